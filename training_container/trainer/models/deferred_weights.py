"""A model without its weights first, cut over the ranks, and only then the values: each rank makes or reads its part.

`outline` builds a model whose parameters are on the meta device: shapes and types, no memory. An engine cuts it, and
`fill` gives each parameter that is left on this rank its values, from one of two places:

- a new model's from the recipe that its own class initializes it by, which is recorded while the class does so on meta
  (`normal_`, `zeros_`, a residual layer's smaller deviation). Random numbers come from a generator a chunk of rows,
  seeded by (seed, name, chunk): a weight has the same value under every layout, and a rank makes the rows it has.
- an existing model's from its files, mapped into memory: what no rank touches is never read.

So no rank ever holds more than its shard and one chunk, whatever the size of the model.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.heartbeat import beat
from trainer.models.sharded_source import Index, Stored, part_of, select, stored_of

CHUNK_ELEMENTS = 2**20
"""Elements drawn from one generator: part of what the values depend on, so it never changes."""

_KEPT_ELEMENTS = 2**16
"""A parameter of no more elements keeps the value it was constructed with, for a class that never initializes it."""

_SHAPES_ALONE: ContextVar[bool] = ContextVar("_SHAPES_ALONE", default=False)

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property of C

_aten = torch.ops.aten
_FILLING = frozenset({_aten.normal_.default, _aten.uniform_.default})
_OVERWRITING = frozenset(
    {
        *_FILLING,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.copy_.default,
    }
)
_ELEMENTWISE = _OVERWRITING | {
    _aten.mul_.Scalar,
    _aten.mul_.Tensor,
    _aten.add_.Scalar,
    _aten.add_.Tensor,
    _aten.sub_.Scalar,
    _aten.div_.Scalar,
    _aten.div_.Tensor,
    _aten.clamp_.default,
    _aten.erfinv_.default,
}
"""Operations that make element i of a tensor from element i alone: part of a tensor can be made by itself."""


class WeightSource(Protocol):
    """Where the values of a model's parameters come from."""

    def read(self, name: str, index: Index) -> torch.Tensor:
        """The part of one parameter, on CPU."""

    def release(self) -> None:
        """Lets go of what it holds: every rank has its part."""


@dataclass(frozen=True)
class _Operation:
    """One step of a recipe: `function(tensor, *arguments, **options)`, on one row of it or on all."""

    function: Any
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    row: int | None = None


@dataclass(frozen=True)
class _Recipe:
    """How a parameter of a shape gets its first value."""

    shape: tuple[int, ...]
    operations: list[_Operation]


class InitializedWeights:
    """A new model's: each parameter's recipe, replayed on the rows that are asked for."""

    def __init__(self, recipes: dict[str, _Recipe], *, seed: int) -> None:
        """`recipes`: by Hugging Face name."""
        self._recipes = recipes
        self._seed = seed

    def read(self, name: str, index: Index) -> torch.Tensor:
        """See WeightSource. Tensors are taken as rows of their last dimension; a chunk is as many whole rows as fit."""
        recipe = self._recipes[name]
        width = recipe.shape[-1] if len(recipe.shape) > 1 else 1
        leading = recipe.shape[:-1] if len(recipe.shape) > 1 else recipe.shape or (1,)
        rows = _flat_rows(leading, index[: len(leading)] or (torch.zeros(1, dtype=torch.int64),))
        columns = index[-1] if len(recipe.shape) > 1 else torch.zeros(1, dtype=torch.int64)
        rows_per_chunk = max(1, CHUNK_ELEMENTS // width)
        num_rows = math.prod(leading)
        part = torch.empty((rows.numel(), columns.numel()))  # float32, what new weights are made in
        chunks, counts = torch.unique_consecutive(rows // rows_per_chunk, return_counts=True)
        begin = 0
        for chunk, count in zip(chunks.tolist(), counts.tolist(), strict=True):
            first = chunk * rows_per_chunk
            values = self._rows(name, first, min(rows_per_chunk, num_rows - first), width)
            part[begin : begin + count] = select(select(values, 0, rows[begin : begin + count] - first), 1, columns)
            begin += count
        return part.view(tuple(positions.numel() for positions in index))

    def release(self) -> None:
        """See WeightSource."""
        self._recipes = {}

    def _rows(self, name: str, first: int, number: int, width: int) -> torch.Tensor:
        """(number, width): rows from `first` on, which begin a chunk."""
        recipe = self._recipes[name]
        digest = hashlib.blake2b(f"{self._seed}/{name}/{first}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        rows_per_slice = math.prod(recipe.shape[1:-1])
        values = torch.empty((number, width))
        for step in recipe.operations:
            taken = values
            if step.row is not None:
                begin = max(step.row * rows_per_slice - first, 0)
                taken = values[begin : max((step.row + 1) * rows_per_slice - first, 0)]
            arguments = step.arguments
            if step.function is _aten.copy_.default:
                arguments = (arguments[0].expand(recipe.shape).reshape(-1, width)[first : first + number],)
            options = {**step.options, "generator": generator} if _is_random(step.function) else step.options
            step.function(taken, *arguments, **options)
        return values


class StoredWeights:
    """An existing model's: tensors that may be views of files, or made of several, of which the part is read."""

    def __init__(self, tensors: dict[str, Stored]) -> None:
        """`tensors`: by Hugging Face name."""
        self._tensors = tensors

    def read(self, name: str, index: Index) -> torch.Tensor:
        """See WeightSource."""
        return part_of(self._tensors[name], index)

    def release(self) -> None:
        """See WeightSource."""
        self._tensors = {}


def outline(build: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """The new model that `build` makes, with parameters on meta; `fill` knows their values. Buffers are real.

    A class that initializes itself in a way that can't be made in parts is built whole, which takes the memory.
    """
    recorder = _Recorder()
    with _constructed_on_meta(recorder), _Questions(recorder), recorder:
        model = build()
    recipes = {name: recorder.recipe(weight) for name, weight in model.named_parameters(remove_duplicate=False)}
    complete = {name: recipe for name, recipe in recipes.items() if recipe is not None}
    if recorder.is_lost or len(complete) < len(recipes):
        return model if _SHAPES_ALONE.get() else defer(build())
    model._weight_source = InitializedWeights(complete, seed=seed)  # type: ignore[assignment]  # no module
    return model


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Inside, `outline` makes no values at all: who only looks whether a model can be built has no use for them, and of
    a class that is built whole (ViT's, SigLIP's) they would take its memory, and seconds a billion, once more."""
    token = _SHAPES_ALONE.set(True)
    try:
        yield
    finally:
        _SHAPES_ALONE.reset(token)


def defer(model: nn.Module) -> nn.Module:
    """Puts the model's parameters on meta, in place, and returns it; their values, as they are now, are kept aside."""
    tensors = {name: stored_of(weight) for name, weight in model.named_parameters(remove_duplicate=False)}
    twins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                twins.setdefault(id(weight), _on_meta(weight))
                module._parameters[name] = twins[id(weight)]
    model._weight_source = StoredWeights(tensors)  # type: ignore[assignment]  # no module
    return model


def source_of(model: nn.Module) -> WeightSource | None:
    """Where the values of an outlined model's parameters are; None for a model that has them."""
    source: WeightSource | None = getattr(model, "_weight_source", None)
    return source


def fill(model: nn.Module, *, device: torch.device) -> nn.Module:
    """Gives a model that is on this rank alone its values, on `device`, and returns it; one that has them is moved."""
    fill_parameters(model.named_parameters(), source_of(model), device=device)
    return model.to(device)


@torch.no_grad()
def fill_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
    source: WeightSource | None,
    *,
    device: torch.device,
    settle: Callable[[], object] = lambda: None,
) -> None:
    """Gives those of the named parameters (plain or DTensor) that are on meta memory on `device`, and values.

    Parameters stay the same objects, so that tied ones stay tied. `settle` is called between: an FSDP module has to
    learn of the new memory, and pads it.
    """
    waiting = [(name, parameter) for name, parameter in named if parameter.is_meta]
    for _, parameter in waiting:
        memory = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, memory)  # type: ignore[no-untyped-call]
    if waiting:
        settle()
    for name, parameter in waiting:
        assert source is not None, f"{name} is on the meta device, and nothing says what its values are"
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.numel():
            local.copy_(source.read(name, local_index(parameter)))
        beat()  # a large model may take longer to read than a rank may be silent


def local_index(tensor: torch.Tensor) -> Index:
    """Which positions of each dimension this rank has of a DTensor; all of a plain tensor's."""
    positions = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None
        for place, size, placement in zip(coordinates, tensor.device_mesh.shape, tensor.placements, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                dim = placement.dim % tensor.ndim
                positions[dim] = _cut(positions[dim], placement, place, size)
        held = tuple(part.numel() for part in positions)
        assert held == tuple(tensor.to_local().shape), f"{tensor.placements} gives {held}, {tensor.to_local().shape}"
    return tuple(positions)


def _cut(positions: torch.Tensor, placement: Any, place: int, size: int) -> torch.Tensor:
    """What `placement` leaves of one dimension's positions to the rank at `place` of `size`."""
    if isinstance(placement, _StridedShard):
        pieces = positions.tensor_split(_bounds(positions.numel(), int(placement.split_factor)))
        return torch.cat([_cut(piece, Shard(0), place, size) for piece in pieces])
    chunks = positions.chunk(size)
    return chunks[place] if place < len(chunks) else positions[:0]


def _bounds(length: int, number: int) -> list[int]:
    """Where `torch.chunk` would cut; it gives fewer pieces where there is too little for all."""
    piece = -(-length // number)
    return [min(length, piece * index) for index in range(1, number)]


def _flat_rows(shape: Sequence[int], index: Index) -> torch.Tensor:
    """Row-major numbers of the product of positions."""
    flat = torch.zeros(1, dtype=torch.int64)
    for size, positions in zip(shape, index, strict=True):
        flat = (flat[:, None] * size + positions).flatten()
    return flat


def _on_meta(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)


def _is_random(function: Any) -> bool:
    return function in (_aten.normal_.default, _aten.uniform_.default)


@contextmanager
def _constructed_on_meta(recorder: "_Recorder") -> Iterator[None]:
    """Inside, each parameter goes to meta as soon as its module has it; buffers, which begin as constants, stay."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            twin = _on_meta(parameter)
            twin.__dict__.update(parameter.__dict__)
            recorder.expect(twin, parameter.detach())
            parameter = twin
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Questions(TorchFunctionMode):
    """Notices when a function asks whether a parameter is on meta: torch's `trunc_normal_`, `orthogonal_`, `sparse_`
    and `dirac_` ask, and then silently leave it as it is."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs everything as it is."""
        answer = func(*args, **(kwargs or {}))
        if func == _IS_META and answer:
            self._recorder.is_lost = True
        return answer


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Notes what is done to parameters on meta, in place of doing it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_lost = False
        """Whether something was done that can't be done in parts."""
        self._recipes: dict[int, list[_Operation] | None] = {}
        self._aliases: dict[int, tuple[int, int | None]] = {}
        self._alive: list[torch.Tensor] = []  # ids are unique among the living
        self._known: set[Any] = set()

    def expect(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """A parameter, and what it was constructed with."""
        is_kept = value.numel() <= _KEPT_ELEMENTS
        self._recipes[id(parameter)] = [_Operation(_aten.copy_.default, (value,))] if is_kept else None
        self._follow(parameter, id(parameter), None)

    def recipe(self, parameter: nn.Parameter) -> _Recipe | None:
        """None where the class left a parameter as it was allocated, or this is not one that was expected."""
        operations = self._recipes.get(id(parameter))
        return None if operations is None else _Recipe(tuple(parameter.shape), operations)

    def _follow(self, tensor: torch.Tensor, parameter: int, row: int | None) -> None:
        self._aliases[id(tensor)] = (parameter, row)
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, and notes it when it changes a parameter."""
        target = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta" else None
        if target is not None and func in _FILLING and self._is_known(func, args[1:], kwargs or {}):
            self._note(self._aliases.get(id(target)), func, args[1:], kwargs or {})
            return target
        result = func(*args, **(kwargs or {}))
        if target is None:
            return result
        alias = self._aliases.get(id(target))
        if func._schema.is_mutable:
            self._note(alias, func, args[1:], kwargs or {})
        elif alias is not None and func is _aten.detach.default:
            self._follow(result, *alias)
        elif alias is not None and alias[1] is None and func is _aten.select.int and args[1] == 0:
            self._follow(result, alias[0], args[2] % target.size(0))
        return result

    def _is_known(self, func: Any, arguments: Any, options: dict[str, Any]) -> bool:
        """Whether it was run before with these numbers. On meta a random number's distribution is worked out in Python,
        more than half of what an outline takes, and nothing comes of it but a refusal of what can't be drawn."""
        asked = (func, arguments, tuple(options.items()))
        if asked in self._known:
            return True
        self._known.add(asked)
        return False

    def _note(self, alias: tuple[int, int | None] | None, func: Any, arguments: Any, options: dict[str, Any]) -> None:
        is_derived = any(isinstance(value, torch.Tensor) and value.is_meta for value in (*arguments, *options.values()))
        if alias is None or func not in _ELEMENTWISE or is_derived:  # derived: made from what has no values here
            self.is_lost = True
            return
        parameter, row = alias
        operations = self._recipes[parameter]
        is_new = func in _OVERWRITING and row is None
        has_tensor = any(isinstance(argument, torch.Tensor) and argument.ndim for argument in arguments)
        if (operations is None and not is_new) or (has_tensor and (func is not _aten.copy_.default or row is not None)):
            self.is_lost = True
            return
        taken = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in arguments)
        step = _Operation(func, taken, {key: value for key, value in options.items() if key != "generator"}, row)
        self._recipes[parameter] = [step] if is_new else [*(operations or ()), step]
