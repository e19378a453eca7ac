"""Expert parallel: each rank of an axis owns some of a layer's experts, and tokens travel to the experts they chose.

Two all-to-all exchanges a layer, there and back, with as many rows as were routed: no token is dropped and none is
padded, so the result is one process's. The axis lies inside data_shard x context, whose ranks hold different tokens;
copies of an expert, on ranks of the same place along the axis, are sharded by FSDP like other weights.

With tensor parallelism a layer's experts are divided over the tensor axis too, whole ones: narrow slices of every
expert would be many small products, and slices of packed gate and up matrices are no boxes that a checkpoint can
describe. Ranks of the tensor axis hold the same tokens, so each sends those alone that chose experts at its own place
along it, and what its experts give is a part of a sum over the axis, which `tensor_parallel` takes.

An expert weight stays one packed tensor (experts, out, in) under its Hugging Face name; its own forward computes what
it is, so that gates, biases and transposed or interleaved matrices are no matter here. The expert and tensor axes
split its first dimension and FSDP another one, so that a checkpoint describes it plainly and any layout can load it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from trainer.models.packed_experts import num_packed
from trainer.strategies.fsdp import inner_placement, left_as_they_are, shard
from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec

EXPERT_DIM = 0
"""The dimension of an expert weight that the expert and tensor axes split."""

_NUM_ARGUMENTS = 4
"""Of the class of experts that are told which are chosen: self, hidden states, experts, their weights."""


def build_mesh(layout: ParallelismSpec, device_type: str) -> DeviceMesh:
    """All ranks once more, with data_shard x context regrouped: copies of an expert (expert_shard) and experts.

    Ranks are counted as in the mesh of the other weights, whose axes are (pipeline, data_replicate, data_shard,
    context, tensor).
    """
    num_copies = layout.data_shard * layout.context // layout.expert
    return init_device_mesh(
        device_type,
        (layout.pipeline, layout.data_replicate, num_copies, layout.expert, layout.tensor),
        mesh_dim_names=("pipeline", "data_replicate", "expert_shard", "expert", "tensor"),
    )


def apply(
    model: PreTrainedModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard_after_forward: bool = True
) -> set[nn.Parameter]:
    """Splits every experts module of `model` over `mesh` (of `build_mesh`) and lets tokens travel.

    They are then FSDP modules: shard the blocks around them afterwards, and sum their gradients like the others'. What
    is returned are weights of theirs that are none, since FSDP would do nothing for them: leave these as they are.
    """
    copies = mesh["data_replicate", "expert_shard"] if mesh["data_replicate"].size() > 1 else mesh["expert_shard"]
    # Routing weights keep the type that the router gave them, as they do where experts are in their block's unit.
    policy = replace(policy, cast_forward_inputs=False)
    left: set[nn.Parameter] = set()
    for module in expert_modules(model):
        _split(module, mesh)
        left |= left_as_they_are(module, copies, policy)
        if left.issuperset(module.parameters()):
            continue
        placements = {weight: _shard_placement(weight, mesh["expert_shard"].size()) for weight in module.parameters()}
        shard(
            module,
            mesh=copies,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placements.get,
            ignored_params=left,
        )
    return left


def _shard_placement(weight: nn.Parameter, num_ranks: int) -> Shard:
    if (found := inner_placement(weight, num_ranks)) is not None:
        return found
    raise InputError(
        f"parallelism: each expert's weight {tuple(weight.shape[1:])} can't be split over the {num_ranks} ranks that"
        " hold a copy of it: raise expert, or move ranks from data_shard to data_replicate"
    )


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that hold packed experts: whose every parameter has one slice an expert, a matrix or (gpt-oss) its
    bias, and that are called with (hidden states, chosen experts, their weights)."""
    return [module for module in model.modules() if _num_experts(module) is not None]


def _num_experts(module: nn.Module) -> int | None:
    # By its class's signature, since 4-bit storage stands in for the module's own and takes anything. JetMoE's and
    # Llama 4's experts are given rows, and no choice.
    takes_choice = len(signature(type(module).forward).parameters) == _NUM_ARGUMENTS
    return num_packed(module) if takes_choice else None


def _split(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves this rank its slice of each weight, and puts the exchange in front of the experts' forward."""
    num_experts = _num_experts(module)
    assert num_experts is not None
    names = tuple(name for name in ("expert", "tensor") if name == "expert" or mesh[name].size() > 1)
    axes = mesh[names] if len(names) > 1 else mesh["expert"]
    for name, weight in list(module.named_parameters(recurse=False)):
        # Every rank built the same weights, so each keeps its slice and nothing is sent.
        part = distribute_tensor(weight.detach(), axes, [Shard(EXPERT_DIM)] * axes.ndim, src_data_rank=None)
        setattr(module, name, nn.Parameter(part, requires_grad=weight.requires_grad))
    exchange = TokenExchange(
        module,
        mesh["expert"],
        mesh["tensor"],
        num_local_experts=num_experts // mesh["expert"].size() // mesh["tensor"].size(),
    )
    module.num_experts = exchange.num_local_experts  # type: ignore[assignment]  # what their own forward counts to
    module.forward = exchange.forward


@dataclass(frozen=True)
class _Route:
    """How one layer's (token, choice) rows travelled."""

    order: torch.Tensor
    """Row i of what was sent is choice order[i] of the flat (token, choice) list."""
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""
    local_experts: torch.Tensor
    """(received rows,): the expert each is for, counted from this rank's first."""


def row_counts(counts: torch.Tensor, received: torch.Tensor, num_rows: int) -> list[list[int]]:
    """Rows to each rank, and rows from each. Waits for the device.

    counts, received: (ranks, local experts); num_rows: (token, choice) pairs that this rank has, from which a dry run,
    whose tensors have no values, makes numbers of its own.
    """
    del num_rows
    sums: list[list[int]] = torch.stack([counts.sum(dim=1), received.sum(dim=1)]).tolist()
    return sums


class TokenExchange:
    """Stands in for an experts module's forward: sends rows to their experts' ranks, runs those here, sends back."""

    def __init__(self, module: nn.Module, axis: DeviceMesh, tensor: DeviceMesh, *, num_local_experts: int) -> None:
        """`axis`: whose ranks hold different tokens; `tensor`: whose ranks hold the same ones and divide the experts
        that are at one place of `axis`."""
        self.num_local_experts = num_local_experts
        self._module = module
        self._forward_local = module.forward
        self._group = axis.get_group()
        self._size = axis.size()
        self._tensor_size, self._tensor_place = tensor.size(), tensor.get_local_rank()

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden): the weighted sum of each token's experts, of those at this place of the tensor axis.

        hidden: (tokens, hidden), this rank's own; chosen: (tokens, choices), experts counted over all ranks; weights:
        (tokens, choices), which are applied on the token's own rank, where their gradient is needed.
        """
        num_choices = chosen.size(1)
        route = self._route(chosen)
        rows = _exchange(hidden[route.order // num_choices], route.received, route.sent, self._group)
        results = _exchange(self._run_experts(rows, route), route.sent, route.received, self._group)
        by_choice: torch.Tensor = _ByChoice.apply(results, route.order, chosen.numel())  # type: ignore[no-untyped-call]
        return (by_choice.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)

    def _route(self, chosen: torch.Tensor) -> _Route:
        """Experts lie on ranks in order, so rows sorted by expert are sorted by rank too.

        Waits for the device once, for how many rows travel. What is for other places of the tensor axis is sorted to
        the end, and cut off when that number is known: to select it would be another wait.
        """
        flat = chosen.reshape(-1)
        is_mine = flat // self.num_local_experts % self._tensor_size == self._tensor_place
        num_experts = self.num_local_experts * self._tensor_size * self._size
        order = torch.argsort(torch.where(is_mine, flat, num_experts), stable=True)
        local_numbers = (
            flat // (self.num_local_experts * self._tensor_size) * self.num_local_experts
            + flat % self.num_local_experts
        )
        counts = torch.zeros(self._size * self.num_local_experts, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add(0, local_numbers, is_mine.long()).view(self._size, self.num_local_experts)
        received = torch.empty_like(counts)  # (sending rank, local expert)
        dist.all_to_all_single(received, counts, group=self._group)
        sums = row_counts(counts, received, flat.numel())
        local = torch.arange(self.num_local_experts, device=flat.device).repeat(self._size)
        return _Route(
            order=order[: sum(sums[0])],
            sent=sums[0],
            received=sums[1],
            # Its size is known here: without it torch would wait once more, to add it up.
            local_experts=local.repeat_interleave(received.reshape(-1), output_size=sum(sums[1])),
        )

    def _run_experts(self, rows: torch.Tensor, route: _Route) -> torch.Tensor:
        chosen = route.local_experts.unsqueeze(1)
        num_rows = rows.size(0)
        if num_rows == 0:
            # Nobody chose these experts. One row of zeros keeps the weights in the graph: FSDP must reduce their
            # gradients on every rank, and backward must reach the exchange that the other ranks wait in.
            rows = torch.cat([rows, rows.new_zeros((1, rows.size(1)))])
            chosen = chosen.new_zeros((1, 1))
        with local_weights(self._module):
            results: torch.Tensor = self._forward_local(rows, chosen, rows.new_ones(chosen.shape))
        return results[:num_rows]


@contextmanager
def local_weights(module: nn.Module) -> Iterator[None]:
    """Inside, the module's own weights are plain tensors, this rank's part; gradients reach the DTensors."""
    weights = {name: weight for name, weight in module.named_parameters(recurse=False) if isinstance(weight, DTensor)}
    module._parameters.update({name: weight.to_local() for name, weight in weights.items()})  # type: ignore[misc]
    try:
        yield
    finally:
        module._parameters.update(weights)


class _ByChoice(torch.autograd.Function):
    """Rows in the order of their tokens' choices. torch's own `index_copy` keeps the rows for their shape's sake."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, num_choices: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        # Zeros: what experts at other places of the tensor axis are chosen for is their ranks' part.
        return rows.new_zeros((num_choices, rows.size(1))).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None, None


def _exchange(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    exchanged: torch.Tensor = _AllToAll.apply(rows.contiguous(), received, sent, group)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    """Sends consecutive rows to consecutive ranks; backward sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        arrived = rows.new_empty((sum(received), rows.size(1)))
        dist.all_to_all_single(arrived, rows, received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        returned = gradient.new_empty((sum(ctx.sent), gradient.size(1)))
        dist.all_to_all_single(returned, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return returned, None, None, None
