"""Pipeline parallelism on unmodified Hugging Face models: how a model is cut into stages, and how stages take turns.

A stage is the whole model with everything that is not its own replaced by a module that hands its input on. So the
model's own forward pass runs on every stage (masks, positions, types of layers and all), names don't change, and a
checkpoint of one layout is a checkpoint of every other. What came from the stage before enters in front of the stage's
first block, and what goes on is taken behind its last: whatever a model's code does around its blocks (Granite scales,
OPT adds positions) is done once, at the ends. The schedules are torch.distributed.pipelining's.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule
from transformers import PreTrainedModel

from trainer.losses.head import ScoringHead
from trainer.losses.router import TALLY_TYPE, RouterLoss, librarys_own_left_out
from trainer.models.build import path_to_blocks
from trainer.strategies.base import Clock
from trainer.strategies.fsdp import add_up_gradients
from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec, ResolvedJob
from trainyard.spec.support import TWO_STAGES

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


def stages_of_rank(schedule: str, place: int, num_ranks: int) -> list[int]:
    """Which stages the pipeline's rank `place` has: zero_bubble goes through the ranks and back again, in a V."""
    second = {"interleaved_1f1b": place + num_ranks, "zero_bubble": 2 * num_ranks - 1 - place}
    return [place, second[schedule]] if schedule in TWO_STAGES else [place]


def check_trained(model: PreTrainedModel, layout: ParallelismSpec) -> None:
    """InputError where a rank of the pipeline would have nothing to train: an adapter goes to modules that layers of
    another kind lack (attention's, in stages of linear attention alone). Every rank looks at all of them."""
    blocks = list(model.get_submodule(path_to_blocks(model)).children())
    trained = [_is_trained(block) for block in blocks]
    # The ends' own are their ranks'.
    trained[0] = trained[0] or _is_trained(model.get_input_embeddings())
    trained[-1] = trained[-1] or _is_trained(model.get_output_embeddings())
    for place in range(layout.pipeline):
        mine = stages_of_rank(layout.pipeline_schedule, place, layout.pipeline)
        count, total = len(blocks), layout.pipeline * len(mine)
        bounds = [(index * count // total, (index + 1) * count // total) for index in mine]
        if not any(any(trained[begin:end]) for begin, end in bounds):
            names = " and ".join(f"{begin} to {end - 1}" for begin, end in bounds)
            raise InputError(
                f"parallelism.pipeline: {layout.pipeline}: its rank {place} has layers {names} alone, none of which has"
                " a module of model.adapter.targets: name one of theirs too, or lower it"
            )


def _is_trained(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


class Absent(nn.Module):
    """Stands where another stage's module was, and hands its input on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return args[0] if args else next(iter(kwargs.values()))


class AbsentBlock(Absent):
    """Stands where another stage's block was, and gives what that gave."""

    def __init__(self, block: nn.Module, *, num_given: int) -> None:
        """`num_given`: how many things `block` gives in a tuple; 0 where hidden states are all, and in none."""
        super().__init__()
        self._num_given = num_given
        # A model's code may choose a block's mask by what the block says of itself (Nemotron-H's, its kind).
        for name, value in vars(block).items():
            if isinstance(value, str | int | float) and not name.startswith("_") and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, which are the first argument; alone, or as the first of several things."""
        hidden = super().forward(*args, **kwargs)
        return (hidden, *[None] * (self._num_given - 1)) if self._num_given else hidden


class Entrance(AbsentBlock):
    """Stands where the block before a stage's first was, and gives what came from the stage before.

    What the model made of it on the way here is thrown away: scales and norms of embeddings, positions and dropout are
    the first stage's.
    """

    hidden: torch.Tensor | None = None
    """Of the micro-batch that is on its way."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """What the stage before sent."""
        return super().forward(self.hidden)


class Exit(AbsentBlock):
    """Stands where the block after a stage's last was, and keeps what that gave, to be sent on.

    What the model still makes of it is thrown away: it is the last stage's.
    """

    hidden: torch.Tensor | None = None
    """Of the micro-batch that is on its way."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states."""
        self.hidden = Absent.forward(self, *args, **kwargs)
        return super().forward(self.hidden)


class NoEmbedding(Absent):
    """Stands where the embedding of tokens was, in a model that is told token ids on every stage, and gives what the
    model's code can go on with, which an `Entrance` throws away."""

    hidden: torch.Tensor | None = None
    """What came from the stage before, of the micro-batch that is on its way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, *_: Any, **__: Any) -> Any:
        """(batch, sequence, hidden): a residual stream."""
        assert self.hidden is not None
        return self.hidden.flatten(2)[..., : self._width]


class NoPositions(nn.Module):
    """Stands where an embedding of positions was: the hidden states have it in them since the first stage."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """What is added to the hidden states."""
        return torch.zeros((), device=next(iter((*args, *kwargs.values()))).device)


BLOCKS_IN_TUPLES: Mapping[str, int] = {
    **dict.fromkeys(("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt"), 2),
    **{"bamba": 2, "falcon_h1": 1, "glm_moe_dsa": 2, "hy_v4": 2},
}
"""Model types (transformers 5.23) whose blocks give their hidden states as the first of so many things."""

STREAMS: Mapping[str, tuple[str, bool]] = {
    **dict.fromkeys(("deepseek_v4", "hy_v4"), ("hc_mult", False)),
    "qwen4_exp_text": ("hc_count", True),
}
"""Model types (transformers 5.23) whose blocks hand on several residual streams, and may look at token ids as well: the
field that counts streams, and whether these lie side by side, in one dimension."""

_ENDS: dict[str, frozenset[str]] = {"opt": frozenset({"final_layer_norm", "project_out"})}
"""By model type, modules that come after the blocks, though the class has them before."""

_BEGINNINGS: dict[str, frozenset[str]] = {"inkling_text": frozenset({"embed_norm"})}
"""By model type, modules that come before the blocks, though the class has them after (in transformers 5.17)."""


@dataclass(frozen=True)
class _Outline:
    """Where a model's blocks are, and what around them has weights or drops something."""

    path: tuple[str, ...]
    """Names that lead from the model to the list of blocks, which is the last."""
    entry: tuple[str, ...]
    """Beside the list: what comes before the first block."""
    exit: tuple[str, ...]
    """Beside the list: what comes after the last block."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_Outline":
        """Of a model that is whole, by the order in which its class has its modules."""
        path = path_to_blocks(model).split(".")
        host = model.get_submodule(".".join(path[:-1]))
        model_type = model.config.get_text_config().model_type
        ends, beginnings = (known.get(model_type, frozenset()) for known in (_ENDS, _BEGINNINGS))
        entry, exit_, is_before = [], [], True
        for name, module in host.named_children():
            if name == path[-1]:
                is_before = False
            elif isinstance(module, nn.Dropout) or (
                _has_weights(module) and name not in ends and (is_before or name in beginnings)
            ):
                entry.append(name)  # nothing is dropped behind the blocks, wherever a class has its dropout
            elif _has_weights(module):
                exit_.append(name)
        return cls(tuple(path), tuple(entry), tuple(exit_))


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class Stage(nn.Module):
    """One stage: token ids or hidden states in, hidden states or logits out."""

    def __init__(self, model: PreTrainedModel, index: int, num_stages: int, router: RouterLoss | None = None) -> None:
        """Takes its part of `model`, whose modules it shares; `model` itself is left as it was. `router`: the model
        trains with that auxiliary loss."""
        super().__init__()
        self.router = router
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.is_tied = False
        self.blocks: list[nn.Module] = []
        self.config = model.config
        self.model = self._part(model, num_stages)
        # Read off a block: of other models' configurations some have the field, and nothing that asks for it.
        self.is_wide = any(getattr(module, "residual_in_fp32", False) for module in model.modules())
        self._receivers = [module for module in self.modules() if isinstance(module, Entrance | NoEmbedding)]
        self._exit = next((module for module in self.modules() if isinstance(module, Exit)), None)

    @property
    def reads_tokens(self) -> bool:
        """Whether every stage of such a model is told the token ids."""
        return self.config.get_text_config().model_type in STREAMS

    def forward(
        self,
        hidden: torch.Tensor,
        tally: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        is_token: torch.Tensor | None = None,
        num_targets: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(batch, sequence) token ids on the first stage, else what `handed` says.

        `targets`: given where the last stage returns their loss in place of logits; the others don't look at them.
        `tokens`: the token ids, where all stages read them. With a router's loss `tally` is that of the stages before,
        `is_token` and `num_targets` are a `Routed`'s (without: hidden states or logits are all that is given), and the
        second of two results is the tally to hand on, or on the last stage that loss.
        """
        ids = hidden if self.is_first else tokens
        begins = {"inputs_embeds": hidden} if ids is None else {"input_ids": ids}
        inputs = {**begins, "position_ids": position_ids, "use_cache": False}
        for receiver in self._receivers:
            receiver.hidden = hidden
        try:
            result, output = self._scored(inputs, targets) if self._exit is None else self._sent_on(inputs, self._exit)
            if self.router is None or is_token is None:
                return result
            assert tally is None or tally.dtype == TALLY_TYPE
            total = self.router.tally(output.router_logits or (), is_token)
            total = total if tally is None else total + tally
            if self._exit is not None:
                return result, total
            assert num_targets is not None
            # A validation has none, but as many results as the schedule was told of.
            return result, self.router.loss_sum(total, num_targets) if self.training else total.new_zeros(())
        finally:
            for boundary in (*self._receivers, *([] if self._exit is None else [self._exit])):
                boundary.hidden = None

    def _scored(self, inputs: dict[str, Any], targets: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        head = None if targets is None else ScoringHead.of(self.model)
        with (
            nullcontext() if head is None or targets is None else head.scoring(targets),
            librarys_own_left_out(self.model),
        ):
            output = self.model(**inputs)
        return output.logits, output

    def _sent_on(self, inputs: dict[str, Any], end: Exit) -> tuple[torch.Tensor, Any]:
        output = self.model.base_model(**inputs)
        assert end.hidden is not None
        # What is sent on is detached in place once it is used up, which torch does not allow for a view.
        return end.hidden.clone() if end.hidden._is_view() else end.hidden, output

    def handed(self, tokens: torch.Size | tuple[int, ...], computed: torch.dtype, **more: Any) -> torch.Tensor:
        """Room for what stages hand on of (batch, sequence) tokens, where matrices compute in `computed`: hidden
        states, or several streams of them, which may be kept in float32 (Mamba's)."""
        config = self.config.get_text_config()
        name, is_flat = STREAMS.get(config.model_type, ("", True))
        count = getattr(config, name) if name else 1
        width = (count * config.hidden_size,) if is_flat else (count, config.hidden_size)
        dtype = torch.promote_types(computed, torch.float32) if self.is_wide else computed
        return torch.empty((*tokens, *width), dtype=dtype, **more)

    def _part(self, model: PreTrainedModel, num_stages: int) -> PreTrainedModel:
        outline = _Outline.of(model)
        part: PreTrainedModel = _shallow_copy(model)
        host: Any = part
        for name in outline.path[:-1]:
            child = _shallow_copy(getattr(host, name))
            setattr(host, name, child)
            host = child
        layers = _shallow_copy(getattr(host, outline.path[-1]))
        setattr(host, outline.path[-1], layers)
        self._keep_own(layers, num_stages, model.config.get_text_config().model_type)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.is_tied = head.weight is embedding.weight
        if not self.is_last:
            heads = [name for name, module in part.named_children() if name != outline.path[0] and _has_weights(module)]
            for owner, name in [*((host, name) for name in outline.exit), *((part, name) for name in heads)]:
                setattr(owner, name, Absent())
        if not self.is_first:
            for name in outline.entry:
                module = getattr(host, name)
                stand_in: nn.Module = Absent()
                if isinstance(module, nn.Embedding) and module is not embedding:
                    stand_in = NoPositions()
                elif module is embedding and self.reads_tokens:
                    stand_in = NoEmbedding(module.embedding_dim)
                setattr(host, name, stand_in)
        if self.is_last and not self.is_first and self.is_tied:
            self._own_tied_weight(part, embedding, head)
        return part

    def _keep_own(self, layers: nn.ModuleList, num_stages: int, model_type: str) -> None:
        """Of all blocks, in place: others leave a place each, by which a model's code chooses masks and positions."""
        begin, end = (number * len(layers) // num_stages for number in (self.index, self.index + 1))
        self.blocks = list(layers[begin:end])
        for number in range(len(layers)):
            if not begin <= number < end:
                kind = {begin - 1: Entrance, end: Exit}.get(number, AbsentBlock)
                layers[number] = kind(layers[number], num_given=BLOCKS_IN_TUPLES.get(model_type, 0))

    @staticmethod
    def _own_tied_weight(part: PreTrainedModel, embedding: nn.Module, head: nn.Module) -> None:
        """The last stage keeps the embedding, which it doesn't use, so that its head's weight has the same name."""
        own_embedding, own_head = copy.deepcopy(embedding), copy.deepcopy(head)
        own_head.weight = own_embedding.weight
        part.set_input_embeddings(own_embedding)
        part.set_output_embeddings(own_head)


def _shallow_copy(module: Any) -> Any:
    """Another module of the same class that holds the same children, to be replaced one by one."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


class TimedStage(PipelineStage):
    """A stage whose computation is measured, and that has memory for a message only while it needs it.

    Waiting for other stages is what remains of a step.

    torch (2.13) makes room for all activations and gradients of a step before its first micro-batch, and keeps it until
    the next step: 16 GiB on a middle rank of a 70B whose step has 128 micro-batches.
    """

    clock: Clock

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """Finds out what one micro-batch receives; the others receive as much."""
        result = super()._prepare_forward_infra(1, *args, **kwargs)
        self.args_recv_info = _on_demand(self.args_recv_info[0], num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """The same for gradients."""
        result = super()._prepare_backward_infra(1, *args, **kwargs)
        self.chunks = num_microbatches
        self.grad_recv_info = _on_demand(self.grad_recv_info[0], num_microbatches)
        return result

    def clear_runtime_states(self) -> None:
        """Forgets a step's micro-batches; torch 2.11 would look for a gradient at buffers that have gone by then."""
        received, self.args_recv_info = self.args_recv_info, {}
        super().clear_runtime_states()
        self.args_recv_info = received

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What connects the ranks before the first step, in torch 2.11, which connects a rank to itself as well.

        zero_bubble has neighbouring stages on one rank; gloo can't send to its own.
        """
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.peer != dist.get_rank()]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """What receives a micro-batch's activations."""
        _make_room(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """What receives the gradients of what a micro-batch gave."""
        if self.has_backward:
            _make_room(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward."""
        with self.clock("forward"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            _leave_room(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> Any:
        """One micro-batch backward, or as much of it as the stage before waits for."""
        with self.clock("backward"):
            result = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if isinstance(loss, torch.Tensor) and full_backward:
            # The schedule keeps the losses until the step's end, and with their graphs (in which a leaf is held) what
            # each micro-batch received: 8 GiB on the last rank of a 70B whose step has 128 of them.
            loss.detach_()
        if self.has_backward:
            _leave_room(self.args_recv_info[bwd_chunk_id])
            _leave_room(self.grad_recv_info[bwd_chunk_id])
        return result

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """The weights' part of a micro-batch's backward pass (zero_bubble)."""
        with self.clock("backward"):
            result = super().backward_weight_one_chunk(*args, **kwargs)
            add_up_gradients(self.submod)
        return result


_ROOM = "room"
"""Attribute of what a stage receives: how much memory that takes."""


def _on_demand(received: tuple[Any, ...], num_micro_batches: int) -> dict[int, tuple[Any, ...]]:
    """What each micro-batch receives, without memory for it yet; `received`: one's, with memory."""
    for info in received:
        if (buffer := getattr(info, "buffer", None)) is not None:
            setattr(info, _ROOM, (buffer.shape, buffer.dtype, buffer.device, buffer.requires_grad))
            info.buffer = None
    return {number: tuple(copy.copy(info) for info in received) for number in range(num_micro_batches)}


def _make_room(received: tuple[Any, ...]) -> None:
    for info in received:
        if (room := getattr(info, _ROOM, None)) is not None and info.buffer is None:
            shape, dtype, device, requires_grad = room
            info.buffer = torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)


def _leave_room(received: tuple[Any, ...]) -> None:
    for info in received:
        if hasattr(info, _ROOM):
            info.buffer = None


def timed_stage(
    stage: Stage,
    job: ResolvedJob,
    *,
    num_stages: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    gives_loss: bool,
) -> TimedStage:
    """The stage as a schedule takes it; shapes are told, so that none has to be found out by a trial run.

    `gives_loss`: the last stage returns a micro-batch's loss, not its logits.
    """
    config = stage.model.config.get_text_config()
    shape = (job.micro_batch_size, job.spec.data.sequence_length // job.parallelism.context)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    handed = [stage.handed(shape, dtype, device="meta", requires_grad=True)]
    loss_dtype = torch.promote_types(dtype, torch.float32)
    given = [
        torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True)
        if gives_loss
        else torch.empty((*shape, config.vocab_size), dtype=dtype, device="meta", requires_grad=True)
    ]
    if stage.router is not None:
        kinds: dict[str, Any] = {"dtype": TALLY_TYPE, "device": "meta", "requires_grad": True}
        handed.append(torch.empty((2, stage.router.num_experts), **kinds))
        given.append(torch.empty((), **kinds))
    return TimedStage(
        stage,
        stage.index,
        num_stages,
        device,
        input_args=(tokens,) if stage.is_first else tuple(handed),
        output_args=tuple(given) if stage.is_last else tuple(handed),
        group=group,
    )


def schedule_of(
    job: ResolvedJob, stages: Sequence[TimedStage], loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> _PipelineSchedule:
    """The job's schedule. Gradients stay sums: a mean over micro-batches is wrong when their token counts differ."""
    name = job.parallelism.pipeline_schedule
    taken: Any = list(stages) if name in TWO_STAGES else stages[0]
    schedule: _PipelineSchedule = SCHEDULES[name](
        taken, job.gradient_accumulation_steps, loss_fn=loss, scale_grads=False
    )
    return schedule


@torch.no_grad()
def forward_in_v(
    stages: Sequence[Stage],
    tokens: Sequence[torch.Tensor],
    kwargs: Sequence[dict[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    on_output: Callable[[int, torch.Tensor], object],
) -> None:
    """Every micro-batch down the V and up again, without gradients; `on_output` gets number and output at its end.

    torch's zero-bubble schedule can't run forward alone (`eval` raises in 2.13): it asks for gradients between the
    two stages of a rank.
    """
    place, last_place = dist.get_rank(group), dist.get_world_size(group) - 1
    down, up = stages
    turned: list[torch.Tensor] = []
    for number, batch in enumerate(tokens):
        hidden = batch if down.is_first else _receive(down, batch, dtype, place - 1, group)
        hidden = down(hidden, **kwargs[number])
        if place == last_place:
            turned.append(hidden)
        else:
            dist.send(hidden.contiguous(), group=group, group_dst=place + 1)
    for number, batch in enumerate(tokens):
        hidden = turned[number] if place == last_place else _receive(up, batch, dtype, place + 1, group)
        hidden = up(hidden, **kwargs[number])
        if up.is_last:
            on_output(number, hidden)
        else:
            dist.send(hidden.contiguous(), group=group, group_dst=place - 1)


def _receive(
    stage: Stage, tokens: torch.Tensor, dtype: torch.dtype, source: int, group: dist.ProcessGroup
) -> torch.Tensor:
    hidden = stage.handed(tokens.shape, dtype, device=tokens.device)
    dist.recv(hidden, group=group, group_src=source)
    return hidden
