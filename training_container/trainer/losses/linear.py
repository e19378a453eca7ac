"""Cross-entropy from hidden states: the head's product and the loss together, so that no sequence's logits ever exist.

A chunk of positions at a time is taken through head, softmax and loss, and its gradients are computed at once, while
its logits are there: nothing is computed twice, and what remains until the backward pass is the gradient of the hidden
states and of the head's weight, whatever the vocabulary's size. (The idea is known from Wijmans et al., "Cut Your
Losses in Large-Vocabulary Language Models", arXiv:2411.09009, and fused linear cross-entropy kernels; here it is plain
torch: three matrix products a chunk, on any device.)

Under tensor parallelism the head's rows, one a vocabulary entry, are split over ranks and so are the chunk's logits:
their maximum, their sum of exponentials and the target's logit are what ranks tell each other, a few numbers a position
(Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3), instead of whole logits on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.losses.token_loss import IGNORED_LABEL

CHUNK_TOKENS = 1024
"""Positions whose logits exist at one time: half a GiB of float32 with a vocabulary of 128k."""

_FP16_UNIT = 2.0**15
"""In fp16 a logit's gradient, which lies between -1 and 1, is kept as so many times itself.

Its gradients are computed before the loss's scale is known, so that the scale can't keep them in fp16's range: a sum
over positions may be beyond 65504 whatever the scale, and the chance of a rare token is below the smallest number.
Larger by a power of two it loses nothing, and what is summed is summed in float32 until the scale has been applied."""


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the head this rank has: those from `first` on; the ranks of `group` have the others."""

    group: dist.ProcessGroup
    first: int


def linear_loss_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Sum of the cross-entropy (nats, float32 or wider) of `targets` under softmax(hidden @ weight.T + bias).

    hidden: (..., hidden size), equal on all ranks that share the head; weight: (vocabulary, hidden size), a DTensor
    where ranks share it; bias: (vocabulary,) likewise; targets: (...), shifted already, IGNORED_LABEL does not count.
    Its gradient can be taken once.
    """
    shard = _shard_of(weight)
    local_weight, local_bias = (part.to_local() if isinstance(part, DTensor) else part for part in (weight, bias))
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    loss: torch.Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), local_weight, local_bias, targets.flatten(), shard, dtype, torch.is_grad_enabled()
    )
    return loss


def _shard_of(weight: torch.Tensor) -> VocabularyShard | None:
    if not isinstance(weight, DTensor):
        return None
    assert weight.device_mesh.ndim == 1 and weight.placements[0].is_shard(0), "a head is split by vocabulary alone"
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return VocabularyShard(group=weight.device_mesh.get_group(), first=int(offset[0]))


class _LinearLoss(torch.autograd.Function):
    """Computes the gradients in its forward pass; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        shard: VocabularyShard | None,
        dtype: torch.dtype,
        wants_gradients: bool,
    ) -> torch.Tensor:
        needed = [wants_gradients and needs for needs in ctx.needs_input_grad[:3]]
        ctx.unit = _FP16_UNIT if dtype == torch.float16 else 1.0
        sums = _Sums(
            hidden, weight, bias, needed, is_one_chunk=hidden.size(0) <= CHUNK_TOKENS, in_fp16=dtype == torch.float16
        )
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        for rows in _chunks(hidden.size(0)):
            part = hidden[rows].to(dtype)
            logits = F.linear(part, cast_weight, cast_bias)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            sums.loss += _to_gradient(logits, targets[rows], shard)
            if any(needed):
                sums.add(rows, (logits.mul_(ctx.unit) if ctx.unit != 1 else logits).to(dtype), part, cast_weight)
            del logits  # else two chunks' are there while the next one's are made: in fp32 the loss's worst moment
        ctx.gradients, ctx.shard, ctx.types = sums.gradients(), shard, sums.types
        return sums.loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        assert ctx.gradients is not None, "the loss's gradient was taken twice; it is gone after the first time"
        found, ctx.gradients = ctx.gradients, None
        hidden = found[0]
        if hidden is not None and ctx.shard is not None:
            dist.all_reduce(hidden, group=ctx.shard.group)
        # In the type of the loss: rounded to the gradient's, which may be bf16, the one factor of a step would shift
        # every gradient by up to 0.4 %.
        factor = scale.reshape(1) / ctx.unit
        scaled = [
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(found, ctx.types, strict=True)
        ]
        return (*scaled, None, None, None, None)


class _Sums:
    """What chunks add to. The weight's gradient is summed in at least float32 where it has several terms."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needed: list[bool],
        *,
        is_one_chunk: bool,
        in_fp16: bool,
    ) -> None:
        self.loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        self.types = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        self._in_fp16 = in_fp16
        self._hidden = (
            torch.empty_like(hidden, dtype=self.loss.dtype if in_fp16 else hidden.dtype) if needed[0] else None
        )
        self._weight = None if is_one_chunk or not needed[1] else torch.zeros_like(weight, dtype=self.loss.dtype)
        self._bias = bias.new_zeros(bias.shape, dtype=self.loss.dtype) if bias is not None and needed[2] else None
        self._needs_weight = needed[1]

    def add(self, rows: slice, logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """One chunk's, given the gradient of its logits."""
        if self._hidden is not None:
            self._hidden[rows] = _product(logits, weight)
        if self._bias is not None:
            self._bias += logits.sum(dim=0, dtype=self._bias.dtype)
        if not self._needs_weight:
            return
        if self._weight is None:
            self._weight = _product(logits.T, hidden)
        elif self._weight.dtype == logits.dtype:
            self._weight.addmm_(logits.T, hidden)
        else:
            self._weight += _product(logits.T, hidden)

    def gradients(self) -> list[torch.Tensor | None]:
        """Of hidden states, weight and bias, each in its own type; in fp16 not before they are scaled."""
        found = [self._hidden, self._weight, self._bias]
        if self._in_fp16:
            return found
        return [None if value is None else value.to(dtype) for value, dtype in zip(found, self.types, strict=True)]


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right; of factors in fp16 in float32, as it is added up anyway: see _FP16_UNIT."""
    if left.dtype != torch.float16:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    with torch.autocast(left.device.type, enabled=False):  # which would make them fp16 again
        return left.float() @ right.float()  # torch has no product with another type on CPU


def _chunks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, CHUNK_TOKENS):
        yield slice(start, min(start + CHUNK_TOKENS, num_rows))


def _to_gradient(logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    """The chunk's loss. Turns `logits` in place into their gradient: softmax, less one at the target."""
    counts = targets != IGNORED_LABEL
    ids = targets - (0 if shard is None else shard.first)
    is_here = counts & (ids >= 0) & (ids < logits.size(1))
    wanted_entries = (torch.arange(targets.size(0), device=targets.device), torch.where(is_here, ids, 0))
    top = logits.amax(dim=1)
    if shard is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)
    logits.sub_(top.unsqueeze(1))
    wanted = logits[wanted_entries] * is_here
    total = logits.exp_().sum(dim=1)
    if shard is not None:
        both = torch.stack([wanted, total])
        dist.all_reduce(both, group=shard.group)
        wanted, total = both.unbind()
    loss = ((total.log() - wanted) * counts).sum()
    logits.mul_((counts / total).unsqueeze(1))
    logits[wanted_entries] -= is_here.to(logits.dtype)
    return loss
