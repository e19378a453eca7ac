"""Adafactor and Muon for plain and sharded parameters alike.

Both need a matrix as a whole: a sharded gradient is gathered, one parameter at a time, every rank computes the same
update and applies its own part of it. That costs one all-gather of the gradients a step more than AdamW, and makes the
numbers those of one process, however a matrix is cut. Muon, whose update is many products, deals matrices of one shape
out to the ranks that they are cut over, or that all have them; experts it leaves on those that they are spread over.
torch's own classes are the reference of the tests; they know no shards, and torch's Muon iterates in bf16, where two
layouts' rounding differs by percents.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainer.optimizers.momentum import new_step

ADAFACTOR_BETA2_DECAY = -0.8
ADAFACTOR_SMALLEST_RMS = 1e-3
"""Steps are relative to a weight's size, at least this one: Shazeer and Stern 2018, as torch.optim.Adafactor."""

MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The quintic's coefficients of Jordan 2024: steepest at zero, so that five steps are enough."""
_MATRIX_DIMS, _STACK_DIMS = 2, 3

MUON_RMS = 0.2
"""An update's root mean square is brought to that of AdamW's (Liu et al. 2025), so that one rate fits both."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank: a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(update: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole `update`, cut as `like` is; nothing is sent."""
    if not isinstance(like, DTensor):
        return update
    mesh, coordinates = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinates is not None
    for axis, dim in _cuts(like):  # a rank's rows follow each other, and no copy is made of them
        begin, end = _share(update.size(dim), mesh.size(axis), coordinates[axis])
        update = update.narrow(dim, begin, end - begin)
    assert update.shape == like.to_local().shape, f"{like.placements} gives {like.to_local().shape}, not {update.shape}"
    return update


def _cuts(like: DTensor) -> list[tuple[int, int]]:
    """The axes of its mesh that cut a tensor, each with the dimension along which, one after the other: FSDP cuts what
    tensor parallelism has cut, whichever axis comes first."""
    shards = [(axis, place) for axis, place in enumerate(like.placements) if isinstance(place, Shard | _StridedShard)]
    shards.sort(key=lambda shard: isinstance(shard[1], _StridedShard))
    return [(axis, place.dim % like.ndim) for axis, place in shards]


def _share(length: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Where a rank's share begins and ends, of what is cut as torch's chunks are."""
    piece = -(-length // num_ranks)
    return min(rank * piece, length), min((rank + 1) * piece, length)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed(local_part: torch.Tensor, placements: Sequence[Placement], like: DTensor) -> DTensor:
    """A tensor of the shape and on the mesh of `like`, of which this rank has `local_part`; nothing is sent."""
    return DTensor.from_local(
        local_part, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class Adafactor(torch.optim.Optimizer):
    """Second moments kept as a row and a column a matrix: almost no optimizer state."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._new_state(parameter)

    @staticmethod
    def _new_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        *batch, rows, columns = (1, *parameter.shape) if parameter.ndim == 1 else parameter.shape
        shapes = (
            {"variance": tuple(parameter.shape)}
            if parameter.ndim == 1
            else {"row_var": (*batch, rows, 1), "col_var": (*batch, 1, columns)}
        )
        like: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
        moments = {name: torch.zeros(shape, **like) for name, shape in shapes.items()}
        return {"step": new_step(), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], whole(parameter.grad)
        state["step"] += 1
        step = float(state["step"])
        smallest = torch.finfo(torch.float32).eps
        share = step**ADAFACTOR_BETA2_DECAY
        rate = min(group["lr"], 1 / math.sqrt(step))
        # Sizes stay tensors: a float would wait for the device, twice a parameter.
        size = whole(parameter.detach().norm(2)) / math.sqrt(parameter.numel())
        variance = self._variance(state, gradient.square(), share, smallest)
        update = variance.clamp_(min=smallest**2).rsqrt_().mul_(gradient)
        excess = (update.norm(2) / math.sqrt(update.numel())).clamp(min=1.0)
        update.mul_(size.clamp(min=ADAFACTOR_SMALLEST_RMS) * rate / excess)
        weight = local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(own_part(update, parameter))

    @staticmethod
    def _variance(state: dict[str, torch.Tensor], squares: torch.Tensor, share: float, smallest: float) -> torch.Tensor:
        """The running second moment; of a matrix, the product of its row and column means over the rows' mean."""
        if "variance" in state:
            return state["variance"].lerp_(squares, share).clone()
        row = state["row_var"].lerp_(squares.mean(dim=-1, keepdim=True), share)
        column = state["col_var"].lerp_(squares.mean(dim=-2, keepdim=True), share)
        return (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=smallest))


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal for matrices inside the blocks; AdamW for groups that say `orthogonal: False`.

    A group of `kernels` has convolutions' weights, (channels out, channels in, height, width): each is one matrix, of a
    row for every channel that comes out, as Jordan 2024 has it. Others of three dimensions and more are stacks.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        replicas: dist.ProcessGroup | None = None,
        uses_tf32: bool = False,
    ) -> None:
        """`replicas`: the ranks that all have the plain tensors among the parameters, and share their updates' work.

        `uses_tf32`: of float32 a GPU's tensor cores may take ten bits more than the leading one, eight times as fast on
        an H100; what is orthogonal by 0.7 to 1.2 loses nothing by it.
        """
        self._replicas = replicas
        self.uses_tf32 = uses_tf32
        defaults = {"lr": lr, "weight_decay": 0.0, "orthogonal": False, "kernels": False, "betas": betas, "eps": eps}
        super().__init__(groups, defaults)
        for group in self.param_groups:
            names = ("momentum_buffer",) if group["orthogonal"] else ("exp_avg", "exp_avg_sq")
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in names}
                self.state[parameter] = {"step": new_step(), **moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self.state[parameter]["step"] += 1
            if not group["orthogonal"]:
                for parameter in parameters:
                    self._apply(parameter, self._adamw_update(parameter, group), group)
                continue
            num_replicas = 1 if self._replicas is None else dist.get_world_size(self._replicas)
            for alike in _dealt(parameters, num_replicas, are_kernels=group["kernels"]):
                self._make_orthogonal(alike, group)

    def _make_orthogonal(self, alike: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """In a method of its own, at whose end the last update is let go: else it is there while AdamW's are made."""
        with _tf32_products(alike[0].device, self.uses_tf32):
            for parameter, update in zip(alike, self._orthogonal_updates(alike, group), strict=True):
                self._apply(parameter, update, group)

    @staticmethod
    def _apply(parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        weight = local(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"])

    def _orthogonal_updates(self, alike: Sequence[torch.Tensor], group: dict[str, Any]) -> Iterable[torch.Tensor]:
        """Of each, this rank's part."""
        if len(alike) == 1:
            return [self._orthogonal_update(alike[0], group)]
        cut = [parameter for parameter in alike if isinstance(parameter, DTensor)]
        return self._updates_of_cut(cut) if cut else self._updates_of_replicas(alike, group)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        """Into the momentum; this rank's part."""
        assert parameter.grad is not None
        local(self.state[parameter]["momentum_buffer"]).lerp_(local(parameter.grad), 1 - MUON_MOMENTUM)

    def _direction(self, parameter: torch.Tensor) -> torch.Tensor:
        """By Nesterov, of a momentum that has taken the gradient; this rank's part."""
        assert parameter.grad is not None
        return local(parameter.grad).lerp(local(self.state[parameter]["momentum_buffer"]), MUON_MOMENTUM)

    def _orthogonal_update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The direction, orthogonalized on every rank; this rank's part."""
        self._take_gradient(parameter)
        direction = self._direction(parameter)
        if not isinstance(parameter, DTensor):
            return _scaled_update(direction, are_kernels=group["kernels"])
        placements = _of_whole_matrices(parameter, are_kernels=group["kernels"])
        parts = _placed(direction, parameter.placements, parameter)
        update = _scaled_update(parts.redistribute(placements=placements).to_local(), are_kernels=group["kernels"])
        own: torch.Tensor = _placed(update, placements, parameter).redistribute(placements=parameter.placements)
        return local(own)

    def _updates_of_replicas(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The same of matrices that every rank has, of one shape and no more than there are ranks: each makes one
        orthogonal, and sends it to the others."""
        assert self._replicas is not None
        place = dist.get_rank(self._replicas)
        own: torch.Tensor | None = None
        for index, parameter in enumerate(parameters):
            self._take_gradient(parameter)
            if index == place:
                # Of a tall matrix it is a transpose, and what is sent are its bytes as they lie.
                own = _scaled_update(self._direction(parameter), are_kernels=group["kernels"]).contiguous()
        for index, parameter in enumerate(parameters):
            if index == place and own is not None:
                update = own
            else:  # row by row as well, whatever order the parameter itself has
                update = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            dist.broadcast(update, group=self._replicas, group_src=index)
            yield update

    def _updates_of_cut(self, parameters: Sequence[DTensor]) -> Sequence[torch.Tensor]:
        """The same of matrices of one shape, no more than there are ranks: each rank makes one orthogonal, whole, and
        gets its parts of the others'. To every rank each of them would be as many times the work, and the bytes."""
        like = parameters[0]
        for parameter in parameters:
            self._take_gradient(parameter)
        part = torch.stack([self._direction(parameter) for parameter in parameters])
        moves = _moves_to_whole(like, len(parameters))
        for move in moves:
            part = move.forth(part)
        for matrix in part:
            matrix.copy_(_scaled_update(matrix, are_kernels=False))
        for move in reversed(moves):
            part = move.back(part)
        return part.unbind()

    def _adamw_update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local(parameter.grad)
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update: torch.Tensor = (mean / (1 - beta1**step)).div_(spread)
        return update


@contextmanager
def _tf32_products(device: torch.device, uses_tf32: bool) -> Iterator[None]:
    """Inside, products of float32 on a GPU are by TF32, if wanted."""
    if device.type != "cuda" or not uses_tf32:
        yield
        return
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def _scaled_update(direction: torch.Tensor, *, are_kernels: bool) -> torch.Tensor:
    """What whole matrices move by at a rate of one."""
    matrices = direction.flatten(1) if are_kernels else direction
    factor = MUON_RMS * math.sqrt(max(matrices.shape[-2:]))
    return orthogonalized(matrices).mul_(factor).reshape(direction.shape)


def _dealt(parameters: Sequence[torch.Tensor], num_replicas: int, *, are_kernels: bool) -> list[list[torch.Tensor]]:
    """In groups that ranks share between them: matrices of one shape that are cut in one way, as many as there are
    ranks; of all others one each. The same on every rank."""
    found: list[list[torch.Tensor]] = []
    open_ones: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh.size() if not are_kernels and _is_cut(parameter) else 1
            how: Any = (parameter.placements, parameter.device_mesh)
        else:
            ranks, how = num_replicas, None
        key = (parameter.shape, parameter.dtype, ranks, how)
        alike = open_ones.setdefault(key, [])
        if not alike:
            found.append(alike)
        alike.append(parameter)
        if len(alike) == ranks:
            del open_ones[key]
    return found


def _is_cut(parameter: DTensor) -> bool:
    """Whether it is a matrix of which ranks have parts; an axis of one rank cuts nothing."""
    cuts = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return parameter.ndim == _MATRIX_DIMS and any(size > 1 and not place.is_replicate() for place, size in cuts)


@dataclass(frozen=True)
class _Move:
    """Along one axis of a mesh: from a part of every matrix of a stack to all of some, or of what the rank has of them
    by the other axes."""

    mesh: DeviceMesh
    axis: int
    dim: int | None
    """Of a matrix, along which the axis cuts it; None: each of its ranks has all."""
    shape: torch.Size
    """Of the stack, with what all ranks of the axis have together."""

    def forth(self, part: torch.Tensor) -> torch.Tensor:
        """From parts of all matrices."""
        return self._moved(part, self._parts, Shard(0))

    def back(self, some: torch.Tensor) -> torch.Tensor:
        """To them."""
        return self._moved(some, Shard(0), self._parts)

    @property
    def _parts(self) -> Placement:
        return Replicate() if self.dim is None else Shard(1 + self.dim)

    def _moved(self, tensor: torch.Tensor, before: Placement, after: Placement) -> torch.Tensor:
        """Ranks that differ in other axes have other parts, which this one does not look at."""
        if not self.shape[0]:
            return tensor
        sources: list[Placement] = [Replicate()] * self.mesh.ndim
        targets: list[Placement] = [Replicate()] * self.mesh.ndim
        sources[self.axis], targets[self.axis] = before, after
        stride = torch.empty(self.shape, device="meta").stride()
        whole = DTensor.from_local(tensor, self.mesh, sources, run_check=False, shape=self.shape, stride=stride)
        return whole.redistribute(placements=targets).to_local()


def _moves_to_whole(like: DTensor, number: int) -> list[_Move]:
    """What takes this rank's parts of so many matrices to some of them whole: along axes that cut nothing first, so
    that each replica sends a share, and then the last that cut them first."""
    mesh, coordinates = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinates is not None
    shape = torch.Size(like.shape)
    cuts: list[tuple[int, int | None, torch.Size]] = []
    for axis, dim in _cuts(like):
        cuts.append((axis, dim, shape))
        begin, end = _share(shape[dim], mesh.size(axis), coordinates[axis])
        shape = torch.Size((*shape[:dim], end - begin, *shape[dim + 1 :]))
    cuts += [(axis, None, shape) for axis, place in enumerate(like.placements) if place.is_replicate()]
    moves = []
    for axis, cut_dim, together in reversed(cuts):
        moves.append(_Move(mesh, axis, cut_dim, torch.Size((number, *together))))
        begin, end = _share(number, mesh.size(axis), coordinates[axis])
        number = end - begin
    return moves


def _of_whole_matrices(parameter: DTensor, *, are_kernels: bool) -> list[Placement]:
    """Where every rank has whole matrices: of experts, which are orthogonalized one by one, those that it has anyway;
    where all are cut inside, each rank gets some."""
    if parameter.ndim == _MATRIX_DIMS or are_kernels:
        return [Replicate() for _ in parameter.placements]
    if Shard(0) in parameter.placements:
        return [part if part == Shard(0) else Replicate() for part in parameter.placements]
    return [Shard(0) if isinstance(part, Shard) else part for part in parameter.placements]


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """U V^T of each matrix's singular value decomposition, about: singular values end between 0.7 and 1.2.

    matrices: (..., rows, columns). In their own type (float32, or float64 in an fp64 job): every layout gets the same
    numbers, which bf16's rounding would not give (nor, on a GPU, TF32's, where `Muon` takes it). A product and what is
    added to it are one operation: of a matrix of whole experts every further tensor is memory that a step may lack.
    """
    a, b, c = NEWTON_SCHULZ
    shape = matrices.shape
    if matrices.ndim > _STACK_DIMS:
        matrices = matrices.flatten(0, -_STACK_DIMS)
    added = torch.addmm if matrices.ndim == _MATRIX_DIMS else torch.baddbmm
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        square = added(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = added(x, square, x, beta=a)
        del square
    result: torch.Tensor = x.mT if is_tall else x
    return result.reshape(shape) if len(shape) > _STACK_DIMS else result
