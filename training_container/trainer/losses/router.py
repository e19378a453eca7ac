"""The router's auxiliary loss of a mixture of experts: what keeps tokens spread over experts.

Asked for by the model's own configuration (output_router_logits: true, with router_aux_loss_coef). It is no sum over
tokens but a product of means, so what is computed has to be said exactly. For one micro-batch of T tokens without
padding, through a model of L layers and E experts, with f_e the mean over layers and tokens of how often expert e was
among the chosen, and p_e the mean of its probability:

    balance = E * sum over e of f_e * p_e        (Switch Transformer, arXiv:2101.03961, equations 4 to 6)

which is transformers' load_balancing_loss_func for one forward pass with an attention mask. The loss of an optimizer
step is the mean, weighted by targets, of cross-entropy + router_aux_loss_coef * balance over its micro-batches: what
transformers computes for each of them. So it is the same under every layout with the same micro-batches, and another
quantity at another training.micro_batch_size. Validation losses are without it: they are what perplexity is made of.

Where no rank has all layers or all tokens of a micro-batch, its tally is what travels: of each expert how often it was
chosen and the sum of its probabilities, two numbers an expert. A pipeline's stages hand it on with their hidden states,
each adding its own, and its gradient comes back with theirs; ranks that have parts of the tokens add theirs up.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from trainer.losses.token_loss import IGNORED_LABEL
from trainer.models.facts import num_experts_of

LIBRARYS = "load_balancing_loss_func"
"""What transformers calls its own, in the module of each model class (5.17 and 5.23)."""


def is_asked_for(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration trains with it."""
    return bool(getattr(config, "output_router_logits", False))


TALLY_TYPE = torch.float64
"""Two numbers an expert; in float32 choices beyond 2^24 would not be counted one by one."""


@dataclass(frozen=True)
class Routed:
    """Which tokens of a micro-batch count, here, and how much its balance does."""

    is_token: torch.Tensor
    """(batch, sequence), or a rank's own part of it: false in padding."""
    num_targets: torch.Tensor
    """(batch,), of whole sequences, on every rank."""

    @classmethod
    def of(cls, targets: torch.Tensor) -> "Routed":
        """By (batch, sequence) targets, shifted already. What follows a sequence's last one is padding."""
        counts = targets != IGNORED_LABEL
        # The token that is predicted last is no target's position but one after: it was routed too.
        is_token = F.pad(counts, (1, 0))[:, :-1] | counts
        return cls(is_token.flip(1).cumsum(1).flip(1) > 0, counts.sum(dim=1))

    def to(self, device: torch.device) -> "Routed":
        """The same there."""
        return Routed(self.is_token.to(device), self.num_targets.to(device))


@dataclass(frozen=True)
class RouterLoss:
    """One model's, on one rank."""

    num_experts: int
    num_chosen: int
    coefficient: float
    parts: dist.ProcessGroup | None = None
    """Whose ranks have other tokens of the same micro-batch, and whose losses are added up."""
    num_copies: int = 1
    """Ranks that compute one loss together (tensor's), each routing all tokens as the others do: between matrices they
    may have a part of the sequence, but a mixture's block is given all of it."""

    @classmethod
    def of(
        cls, config: PretrainedConfig | None, *, parts: dist.ProcessGroup | None = None, num_copies: int = 1
    ) -> "RouterLoss | None":
        """None where the model of this configuration trains without."""
        if config is None or not is_asked_for(config):
            return None
        factor: float = config.router_aux_loss_coef
        return cls(num_experts_of(config), config.num_experts_per_tok, factor, parts, num_copies)

    def tally(self, router_logits: Sequence[torch.Tensor], is_token: torch.Tensor) -> torch.Tensor:
        """(2, experts), float64: how often each was chosen, and the sum of its probabilities, in these layers.

        A layer's logits: (tokens, experts); is_token: (batch, sequence). Layer by layer: of all at once the choices
        alone take more than the layers' activations.
        """
        total = torch.zeros((2, self.num_experts), dtype=TALLY_TYPE, device=is_token.device)
        for logits in router_logits:
            wide = torch.promote_types(logits.dtype, torch.float32)
            assert logits.size(0) == is_token.numel()
            weight = is_token.reshape(-1, 1).to(wide)
            probabilities = logits.to(wide).softmax(dim=-1)
            chosen = probabilities.topk(self.num_chosen, dim=-1).indices
            choices = F.one_hot(chosen, self.num_experts).sum(dim=1).to(wide)
            # No matrix products, which autocast would round to 16 bits.
            total = total + torch.stack([(each * weight).sum(dim=0) for each in (choices, probabilities)])
        return total

    def loss_sum(self, tally: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
        """Coefficient x balance x number of targets (float64), to be added to a micro-batch's sum of losses, by the
        tally of all layers and this rank's tokens: those of other ranks are added to it."""
        # The value as it is, of its gradient a share: the copies' are added up.
        tally = tally.lerp(tally.detach(), 1 - 1 / self.num_copies)
        if self.parts is not None:
            tally = _Total.apply(tally, self.parts)  # type: ignore[no-untyped-call]
        loss = self.coefficient * balance_of(tally, self.num_chosen) * num_targets.sum()
        if self.parts is not None and self.parts.rank() > 0:
            return loss - loss.detach()  # one of those whose losses are added up has its value, all have its gradient
        return loss


def balance_of(tally: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """E x sum of (share of choices x mean probability), by a tally of all layers and tokens."""
    choices, probabilities = tally.unbind()
    total = (choices.sum() / num_chosen).clamp(min=1)
    return choices.numel() * ((choices / total) * (probabilities / total)).sum()


def router_loss_sum(
    forward: nn.Module,
    output: Any,
    targets: torch.Tensor,
    *,
    routed: Routed | None = None,
    router: RouterLoss | None = None,
) -> torch.Tensor | None:
    """`RouterLoss.loss_sum` of a micro-batch that went through all layers; None: the model has none, or doesn't train.

    output: the model's; targets: (batch, sequence), shifted already. Where ranks share its tokens, `routed` and
    `router` are told; else they are those of the targets, and of the model's configuration.
    """
    model: Any = getattr(forward, "module", forward)  # of DistributedDataParallel and of DeepSpeed's engine
    router = router or RouterLoss.of(getattr(model, "config", None))
    if router is None or not model.training:
        return None
    routed = routed or Routed.of(targets)
    return router.loss_sum(router.tally(output.router_logits, routed.is_token), routed.num_targets)


@contextmanager
def librarys_own_left_out(forward: nn.Module) -> Iterator[None]:
    """Inside, a model's forward pass makes no balance of its own. It would, labels or not, and of all choices of all
    layers at once, 8 bytes for each expert of each: 3 GiB of 4,096 tokens, 94 layers and 8 of 128 experts."""
    model: Any = getattr(forward, "module", forward)
    config = getattr(model, "config", None)
    if config is None or not is_asked_for(config):
        yield
        return
    # FSDP's class of the model has a module of its own.
    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    module = next((each for each in modules if hasattr(each, LIBRARYS)), None)
    assert module is not None, f"{type(model).__name__} makes a balance by a function of another name than {LIBRARYS}"
    own = getattr(module, LIBRARYS)
    setattr(module, LIBRARYS, _nothing)
    try:
        yield
    finally:
        setattr(module, LIBRARYS, own)


def _nothing(*_: Any, **__: Any) -> int:
    return 0


class _Total(torch.autograd.Function):
    """The sum over ranks. Each counts once what it gave: the gradient of the sum is that of its own part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
