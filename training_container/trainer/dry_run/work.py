"""What a step computes: every product with its sizes, attention, and the bytes that all other kernels move.

An operation is counted as a GPU runs it: a kernel that reads its inputs and writes its results once. Views are none.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer.dry_run.messages import SPACES

_aten = torch.ops.aten

PHASES = ("forward", "recompute", "backward", "optimizer")
"""recompute: forward passes that the backward one runs again."""


@dataclass(frozen=True)
class Product:
    """`groups` products alike: [rows, depth] x [depth, columns], the rows being those of all groups together."""

    phase: str
    of_weights: bool
    """Not of two activations, as scores that are written out are."""
    dtype: str
    groups: int
    rows: int
    columns: int
    depth: int


@dataclass(frozen=True)
class Attention:
    """One fused kernel: scores of `queries` x `keys` positions and `heads` heads of `sequences` sequences."""

    phase: str
    """Of a backward kernel: backward. It computes the scores again."""
    dtype: str
    sequences: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    is_causal: bool
    is_efficient: bool
    """torch's memory-efficient kernel, not a flash one."""
    drops: bool
    """Some scores are dropped."""


class Work:
    """Counts operations by kind, and the others' bytes and kernels by phase."""

    def __init__(self) -> None:
        self.products: Counter[Product] = Counter()
        self.attention: Counter[Attention] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        """Of all kinds, products and attention too."""

    def note(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, phase: str) -> None:
        """One operation that was run."""
        if operation.namespace in SPACES or operation in _NOTHING or operation.is_view:
            return
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        name = operation._schema.name.rpartition("::")[2]
        written = _written(operation, args, kwargs)
        if not written and {_place(each) for each in outputs} <= {_place(each) for each in inputs}:
            return  # another view of the same memory
        self.kernels[phase] += 1
        product = _product(name, args, result, phase)
        if product is not None:
            self.products[product] += 1
        elif (attention := _attention(operation, args, kwargs, phase)) is not None:
            self.attention[attention] += 1
        else:
            self.moved_bytes[phase] += _moved(name, inputs, outputs, written, _filled(operation, args, kwargs))


def phase_now(of_step: str, recomputes: bool) -> str:
    """The phase of what runs now, `of_step` being the step's own word for it (forward, backward or optimizer).

    A pipeline's schedule runs both passes in one go, so that torch is asked: whether autograd is on its way back, and
    there, whether what runs is recorded anew: in a job that `recomputes`, a checkpoint's second forward pass.
    There, what an autograd function's forward does (some norms, the gate of a block) counts as backward: in it nothing
    is recorded.
    """
    if of_step == "optimizer":
        return of_step
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    return "recompute" if recomputes and torch.is_grad_enabled() else "backward"


_NOTHING = frozenset(
    getattr(_aten, name).default
    for name in ("empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "_local_scalar_dense")
) | {_aten.empty.memory_format, _aten.resize_.default}
"""Memory that nobody fills, and questions."""

_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "_foreach_zero_", "_foreach_copy_"}
)
"""Of what these write, nothing is read before."""

_ROWS = frozenset({"embedding", "index", "gather", "index_select"})
"""Of a large input these read as much as they return."""


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The inputs that an operation changes."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _num_bytes(tensor: torch.Tensor) -> int:
    """What of it exists: an expanded tensor is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))


def _unique(tensors: Iterable[torch.Tensor]) -> dict[tuple[int, int, int], torch.Tensor]:
    return {(_place(each), int(each.storage_offset()), each.numel()): each for each in tensors}


def _filled(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The inputs that an operation writes and doesn't read: where its results go."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(operation._schema.arguments):
        if argument.is_out:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _moved(
    name: str,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    written: list[torch.Tensor],
    filled: list[torch.Tensor],
) -> int:
    if name == "all_gather_copy_in":  # of what all ranks gather into, a rank's own part
        return 2 * _num_bytes(outputs[0])
    changed, unread = _unique(written), _unique(filled)
    if name in _OVERWRITES:
        unread = changed
    made = {key: each for key, each in _unique(outputs).items() if key not in changed}
    read = {key: each for key, each in _unique(inputs).items() if key not in unread}
    made_bytes = sum(map(_num_bytes, made.values()))
    if name in _ROWS:
        return 2 * made_bytes
    if name.startswith(("index_put", "index_add", "scatter_add", "index_copy")):
        # They read and write the rows that are named, which as many new values say.
        values = [key for key in read if key not in changed]
        return 3 * max((_num_bytes(read[key]) for key in values), default=0)
    return sum(map(_num_bytes, read.values())) + made_bytes + sum(map(_num_bytes, changed.values()))


def _word(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _product(name: str, args: Sequence[Any], result: Any, phase: str) -> Product | None:
    """The sizes of a matrix product; None for other operations."""
    name = name.removesuffix("_")  # in place: of a loss's parts in float32, the head's gradient
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        first, second = args[1:3] if "add" in name else args[:2]
        groups = first.size(0) if first.dim() == 3 else 1
        sizes = (groups, groups * first.size(-2), second.size(-1), first.size(-1))
    elif name == "_grouped_mm":
        first = args[0]
        sizes = _grouped(first, args[1], result)
    elif name in ("convolution", "convolution_backward"):
        is_backward = name.endswith("backward")
        first, weight, made = (args[1], args[2], args[0]) if is_backward else (args[0], args[1], result)
        if weight.size(1) == 1:
            return None  # a channel at a time: bound by memory
        # Backward there are two alike: of the images and of the weights.
        sizes = _convolution(first, weight, made, times=1 + is_backward)
    else:
        return None
    if sizes[-1] == 1:
        return None  # a column times a row: bound by memory
    return Product(phase, first.dim() != 3 or name == "_grouped_mm", _word(first), *sizes)


def _grouped(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor) -> tuple[int, int, int, int]:
    """Experts' products: rows cut into groups, or (weights' gradients) the sum."""
    if second.dim() == 3:
        return second.size(0), first.numel() // first.size(-1), second.size(-1), first.size(-1)
    groups = result.size(0)
    return groups, groups * result.size(-2), result.size(-1), first.size(-1) // groups


def _convolution(
    images: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, times: int
) -> tuple[int, int, int, int]:
    """A convolution as a product over patches."""
    places = made.numel() // made.size(1)
    groups = images.size(1) // weight.size(1)
    return times * groups, times * groups * places, weight.size(0) // groups, math.prod(weight.shape[1:])


_FORWARD = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")


def _attention(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], phase: str) -> Attention | None:
    """The sizes of a fused attention kernel; None for other operations."""
    name = operation._schema.name.rpartition("::")[2]
    if not name.startswith(_FORWARD):
        return None
    is_backward = name.endswith("_backward")
    query, key, value = args[1:4] if is_backward else args[:3]
    sequences, heads, queries, head_dim = query.shape
    return Attention(
        phase=phase,
        dtype=_word(query),
        sequences=sequences,
        heads=heads,
        queries=queries,
        keys=key.size(-2),
        head_dim=head_dim,
        value_dim=value.size(-1),
        is_causal=bool(_stated(operation, args, kwargs, "is_causal")),
        is_efficient="efficient" in name,
        drops=bool(_stated(operation, args, kwargs, "dropout_p")),
    )


def _stated(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """An argument by its name in the operation's schema."""
    place = next(index for index, argument in enumerate(operation._schema.arguments) if argument.name == name)
    return args[place] if place < len(args) else kwargs.get(name)
