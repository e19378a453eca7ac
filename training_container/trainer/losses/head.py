"""Which way a model's loss is computed, and the output head that computes it.

`plan_loss` decides, before an engine cuts the model; `install` then makes the head, inside the model's own forward
pass and whatever the engine wrapped around it, return a loss in place of logits whenever targets are laid out for it.
So hooks fire, sharded weights are gathered, and names stay the same under every engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer.losses import linear as linear_loss
from trainer.models import rotary
from trainer.models.attention import attention_of
from trainer.models.routers import noise_told
from trainer.optimizers import router_bias
from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.obstacles import head_obstacle, loss_obstacle


@dataclass(frozen=True)
class LossPlan:
    """How the loss is computed."""

    kind: Literal["logits", "chunked", "vocabulary_parallel"]
    """logits: whole, then cross-entropy. The others: see `linear_loss`; vocabulary_parallel is chunked over ranks."""
    reason: str
    """Why, in a few words."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})"


def _cannot(obstacle: str) -> InputError:
    return InputError(f"training.loss: chunked can't be had: {obstacle}; set it to auto or logits")


def plan_loss(model: nn.Module, job: ResolvedJob) -> LossPlan:
    """The plan for `model`, whole and not yet wrapped; InputError when what training.loss asks for can't be had."""
    asked, layout = job.spec.training.loss, job.parallelism
    if asked == "logits":
        return LossPlan("logits", "training.loss asks for it")
    obstacle = _obstacle(model, job)
    if obstacle is not None:
        if asked == "chunked":
            raise _cannot(obstacle)
        return LossPlan("logits", obstacle)
    if layout.tensor > 1 and model.config.get_text_config().vocab_size % layout.tensor == 0:  # type: ignore[union-attr,operator]
        return LossPlan("vocabulary_parallel", f"the head is split over {layout.tensor} ranks")
    num_tokens = job.micro_batch_size * job.spec.data.sequence_length // layout.context
    if asked == "auto" and num_tokens <= linear_loss.CHUNK_TOKENS:
        return LossPlan("logits", f"a micro-batch's {num_tokens} positions are one chunk")
    return LossPlan("chunked", f"{linear_loss.CHUNK_TOKENS} positions at a time")


def choices_of(model: nn.Module, job: ResolvedJob, plan: LossPlan, device: torch.device) -> dict[str, str]:
    """What an engine runs, for `Strategy.choices`; other tasks than language models choose no loss and no attention."""
    positions = rotary.described(model, job.spec.data.sequence_length)
    chosen = {} if positions is None else {"positions": positions}
    if job.spec.task != "causal_lm":
        return chosen
    assert isinstance(model, PreTrainedModel)
    if (bias := router_bias.described(model, job)) is not None:
        chosen["router"] = bias
    if (noise := noise_told(model)) is not None:
        chosen["router_noise"] = noise
    return {"loss": str(plan), "attention": attention_of(model, job, device), **chosen}


def install(model: nn.Module, plan: LossPlan) -> None:
    """Gives `model`'s head its second way, if `plan` wants it; after the engine has cut and wrapped the model.

    Does nothing on a pipeline stage that has no head.
    """
    head = None if plan.kind == "logits" else model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.Linear):
        setattr(head, "forward", ScoringHead(head).forward)  # noqa: B010  # mypy forbids methods to be assigned


class ScoringHead:
    """Stands in for a linear head's forward: logits, or the loss of the targets that were laid out."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._to_logits = head.forward
        self._targets: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None

    @staticmethod
    def of(forward: nn.Module) -> "ScoringHead | None":
        """The one installed in a model, which its engine may have wrapped; None: the model gives logits alone."""
        model: Any = getattr(forward, "module", forward)  # of DistributedDataParallel and of DeepSpeed's engine
        head = getattr(model.get_output_embeddings(), "forward", None)  # an instance's own, where one is installed
        owner = getattr(head, "__self__", None)
        return owner if isinstance(owner, ScoringHead) else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, hidden) -> logits, or inside `scoring` the sum of the losses."""
        if self._targets is None:
            logits: torch.Tensor = self._to_logits(hidden)
            return logits
        assert hidden.shape[:-1] == self._targets.shape
        bias: torch.Tensor | None = self._head.bias
        return linear_loss.linear_loss_sum(hidden, self._head.weight, bias, self._targets)

    @contextmanager
    def scoring(self, targets: torch.Tensor) -> Iterator[None]:
        """Inside, the head returns the loss of `targets` (batch, sequence), shifted already."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None


def _obstacle(model: nn.Module, job: ResolvedJob) -> str | None:
    """Why this model's loss can't be computed in its head; None when it can."""
    obstacle = loss_obstacle(job.spec, job.parallelism)
    if obstacle is not None:
        return obstacle
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if (adapter := job.spec.model.adapter) is not None:  # a head of any name, which the spec can't know
        names = {path.rpartition(".")[2] for path, module in model.named_modules() if module is head}
        if (obstacle := head_obstacle(adapter, names)) is not None:
            return obstacle
    if not isinstance(head, nn.Linear) or isinstance(head.weight, DTensor) or not head.weight.is_floating_point():
        return f"the head is no plain linear layer but {type(head).__name__}"
    if not _returns_heads_output(model, head):
        return f"{type(model).__name__} changes the logits after its head"
    return None


class _Hidden:
    """A base model's output, with hidden states and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _: str) -> None:
        return None

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.last_hidden_state


class _Stub(nn.Module):
    """Stands in for a module: returns one value, and has the attributes of the module."""

    def __init__(self, module: nn.Module, value: Any) -> None:
        super().__init__()
        self.__dict__["stands_for"], self.__dict__["value"] = module, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """The value."""
        return self.__dict__["value"]


def _returns_heads_output(model: Any, head: nn.Module) -> bool:
    """Whether the model's logits are what its head returns, and not that soft-capped or scaled (Gemma 2, Granite).

    Tried out on the model's own forward, with base model and head replaced by stubs: no layer is computed.
    """
    base, size = model.base_model, model.config.get_text_config().hidden_size
    names = {id(module): name for name, module in model.named_children()}
    if id(base) not in names or id(head) not in names:
        return False
    hidden, marker = torch.zeros((1, 2, size)), torch.zeros((1, 2, 1))
    stubs = {names[id(base)]: _Stub(base, _Hidden(hidden)), names[id(head)]: _Stub(head, marker)}
    own = {name: model._modules[name] for name in stubs}
    model._modules.update(stubs)
    try:
        output = type(model).forward(model, input_ids=torch.zeros((1, 2), dtype=torch.int64), use_cache=False)
        return output.logits is marker
    except Exception:  # whatever a model does with such inputs: then it is not what was asked
        return False
    finally:
        model._modules.update(own)
