"""What a step says to other ranks: each message's kind, the axis it goes over, its type and its bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from trainer.strategies.mesh import AXES, place_of
from trainyard.spec.job import ParallelismSpec

SPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Where torch's collectives are registered."""

_SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_"})
_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
}
"""How an operation's name begins -> the kind of message; the longest that fits counts."""


@dataclass(frozen=True)
class Kind:
    """What makes messages alike."""

    name: str
    axis: str
    """The axes along which the group's ranks differ, `data_shard x context`."""
    ranks: int
    """In the group."""
    dtype: str
    purpose: str = "pass"
    """pass: what the passes themselves wait for, and gradients of replicas. weights: FSDP's, gathered, and their
    gradients. update: the optimizer's, and the norm's before it."""


class Messages:
    """Counts messages. A payload is counted as NCCL's tests do: an all-gather's output, a reduce-scatter's input, what
    a rank sends in an all-to-all, and the tensor of everything else; what a group of one says to itself is none."""

    def __init__(self, layout: ParallelismSpec) -> None:
        self._layout = layout
        self._axes: dict[str, str] = {}
        self.counts: dict[Kind, tuple[int, int]] = {}
        """Kind -> (messages, bytes)."""

    def note(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, purpose: str
    ) -> list[torch.Tensor]:
        """Counts a collective; the tensors that travel, none where nothing does."""
        name = operation.name().partition("::")[2].partition(".")[0]
        if name in _SILENT:
            return []
        group = _group_of(operation.namespace, [*args, *kwargs.values()])
        kind = _kind_of(name)
        if group is None or group.size() == 1 or kind == "barrier":
            return []
        tensors = _payload(kind, args, result)
        if kind in ("send", "receive") and tensors[0].numel() == 1:
            return []  # a pipeline's stages agree once, before their first step, that they know their shapes
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        key = Kind(kind, self._axis_of(group), group.size(), dtype, purpose)
        count, num_bytes = self.counts.get(key, (0, 0))
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.counts[key] = (count + 1, num_bytes + payload)
        return [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]

    def _axis_of(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._axes:
            places = [place_of(self._layout, rank) for rank in dist.get_process_group_ranks(group)]
            varying = [axis for axis in AXES if len({getattr(place, axis) for place in places}) > 1]
            self._axes[group.group_name] = " x ".join(varying)
        return self._axes[group.group_name]


def _kind_of(name: str) -> str:
    fitting = [prefix for prefix in _KINDS if name.lstrip("_").startswith(prefix)]
    assert fitting, f"a collective of a kind that is not known: {name}"
    return _KINDS[max(fitting, key=len)]


def _group_of(space: str, values: Sequence[Any]) -> dist.ProcessGroup | None:
    if space != "c10d":
        names = [value for value in values if isinstance(value, str) and value.isdigit()]
        return _resolve_process_group(names[-1]) if names else None  # type: ignore[arg-type]  # a new type of str
    for value in values:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):
                continue  # a ReduceOp
    return None


def _payload(kind: str, args: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """The tensor, or list of them, whose bytes are counted."""
    if kind in ("all_gather", "reduce_scatter"):
        # The larger of what goes in and what comes out tells gathers from scatters without their names.
        candidates = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in args]
        candidates.append([leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return max(candidates, key=lambda found: sum(tensor.numel() * tensor.element_size() for tensor in found))
    sent = args[1] if kind == "all_to_all" and isinstance(args[1], torch.Tensor) else args[0]
    return [leaf for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor)]
