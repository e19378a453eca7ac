"""AdamW with its two running averages in 8 bits each (Dettmers et al. 2022, arXiv:2110.02861), in plain torch.

An average is stored in blocks of 256 along a parameter's rows (`block_size_of`): the block's largest absolute value in
float32, and one byte an element, which picks one of 256 values between -1 and 1 (the paper's dynamic map: most of them
near zero, so that seven orders of magnitude are told apart). That is 2.03 bytes a parameter in place of 8. Parameters
of fewer than 4096 elements keep float32, as bitsandbytes has it, whose kernels need CUDA and whose blocks go through
each rank's shard: here they never cross rows, so that every sharding computes with the same numbers. Vectors (norms,
biases) keep float32 whatever their length: FSDP cuts them inside their only row.

Two values differ from bitsandbytes': the smallest is -1 exactly, so that a block's largest is kept whatever its sign,
and what a checkpoint holds (float32 under AdamW's names, which any layout and plain AdamW can read) quantizes to the
very bytes that it was read from. And a second moment above zero never becomes zero: a weight without a gradient in one
step would be moved by its first moment over `eps`.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from trainer.optimizers.momentum import new_step

BLOCK_SIZE = 256
SMALLEST_BLOCK = 16
MOST_CUTS = 8
"""Ranks that a row can be cut over, between blocks, where it is long enough for that."""

SMALLEST_QUANTIZED = 4096
"""Elements of a whole parameter; smaller ones, and vectors, keep float32 averages."""

_CHUNK_ELEMENTS = 1 << 22
"""Elements updated at once: the float32 averages of a whole embedding would take what 8 bits save."""

_CONVOLUTION = 4
"""Dimensions of a convolution's weight."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names; the first has a sign, the second has none."""


def dynamic_map(*, signed: bool) -> torch.Tensor:
    """The 256 values, ascending, float32: decades down to 1e-6, each with twice the values of the one below it."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += means.tolist() + ((-means).tolist() if signed else [])
    table = torch.tensor(values, dtype=torch.float64).sort().values
    if signed:
        table[0] = -1.0
    return table.float()


def block_size_of(row_length: int) -> int:
    """256, or less where a power of two of which an eighth of the row is a multiple is at least 16.

    Then tensor parallelism cuts rows between blocks. Other rows have 256 to a block whatever their length: cut, they
    are quantized in other blocks than whole, which changes the training as much as 8 bits do.
    """
    aligned = min(BLOCK_SIZE, (row_length & -row_length) // MOST_CUTS)
    return aligned if aligned >= SMALLEST_BLOCK else BLOCK_SIZE


class AdamW8bit(torch.optim.Optimizer):
    """One parameter after the other, in chunks of rows: averages are read, moved, applied and stored again."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "betas": betas, "eps": eps})
        self._tables: dict[torch.device, dict[str, torch.Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": new_step(), **_new_state(parameter)}
                self._table(MOMENTS[0], parameter.device)  # made here, no step has to

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1
                    self._update(parameter, group)

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Both averages in float32, as `parameter` is sharded; in host memory where they had to be read."""
        state = self.state[parameter]
        if MOMENTS[0] in state:
            return {moment: state[moment] for moment in MOMENTS}
        return {moment: _like(parameter, self._read(parameter, moment)) for moment in MOMENTS}

    @torch.no_grad()
    def set_moment(self, parameter: nn.Parameter, moment: str, values: torch.Tensor) -> None:
        """Stores an average that was loaded into what `moments` gave."""
        state = self.state[parameter]
        if moment in state or not _local(parameter).numel():
            return  # it was loaded in place
        rows = _rows(_local(values))
        codes, scales = state[f"{moment}_codes"], state[f"{moment}_scales"]
        for part in _slices(rows):
            self._store(moment, rows[part].to(codes.device), codes[part], scales[part], _block_size(parameter))

    def state_bytes(self) -> int:
        """Bytes of all averages on this rank."""
        tensors = [_local(tensor) for state in self.state.values() for name, tensor in state.items() if name != "step"]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, weight, gradient = self.state[parameter], _local(parameter), _local(parameter.grad)
        if not weight.numel():
            return
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        if MOMENTS[0] in state:
            whole = [_local(state[moment]) for moment in MOMENTS]
            _adamw(weight, gradient, *whole, step=float(state["step"]), group=group)
            return
        weights, gradients, step = _rows(weight), _rows(gradient), float(state["step"])
        size = _block_size(parameter)
        for part in _slices(weights):
            stored = {name: (state[f"{name}_codes"][part], state[f"{name}_scales"][part]) for name in MOMENTS}
            averages = {name: self._load(name, *stored[name], size) for name in MOMENTS}
            _adamw(weights[part], gradients[part], *averages.values(), step=step, group=group)
            for name in MOMENTS:
                self._store(name, averages[name], *stored[name], size)

    def _table(self, moment: str, device: torch.device) -> torch.Tensor:
        if device not in self._tables:
            self._tables[device] = {name: dynamic_map(signed=name == MOMENTS[0]).to(device) for name in MOMENTS}
        return self._tables[device][moment]

    def _load(self, moment: str, codes: torch.Tensor, scales: torch.Tensor, block_size: int) -> torch.Tensor:
        values = self._table(moment, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)
        return values.mul_(scales.repeat_interleave(block_size, dim=1)[:, : codes.size(1)])

    def _store(
        self, moment: str, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block_size: int
    ) -> None:
        num_missing = -values.size(1) % block_size
        blocks = functional.pad(values, (0, num_missing)).view(values.size(0), -1, block_size)
        scales.copy_(blocks.abs().amax(dim=2))
        relative = values / scales.repeat_interleave(block_size, dim=1)[:, : values.size(1)]
        table = self._table(moment, values.device)
        # 0 / 0 in a block of zeros: the code of zero.
        nearest = torch.bucketize(relative.nan_to_num_(nan=0.0), (table[1:] + table[:-1]) / 2, out_int32=True)
        if moment == MOMENTS[1]:
            nearest = torch.where(values > 0, nearest.clamp(min=1), nearest)
        codes.copy_(nearest)

    def _read(self, parameter: nn.Parameter, moment: str) -> torch.Tensor:
        state, local = self.state[parameter], _local(parameter)
        if not local.numel():
            return torch.empty(local.shape)
        codes, scales = state[f"{moment}_codes"], state[f"{moment}_scales"]
        size = _block_size(parameter)
        parts = [self._load(moment, codes[part], scales[part], size).cpu() for part in _slices(codes)]
        return torch.cat(parts).view(local.shape)


def _new_state(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    if parameter.ndim < 2 or math.prod(parameter.shape) < SMALLEST_QUANTIZED:
        return {moment: torch.zeros_like(parameter) for moment in MOMENTS}
    rows = _rows(_local(parameter.detach()))
    state = {}
    for moment in MOMENTS:
        zero = 0 if moment == MOMENTS[1] else int(dynamic_map(signed=True).abs().argmin())
        state[f"{moment}_codes"] = torch.full(rows.shape, zero, dtype=torch.uint8, device=rows.device)
        state[f"{moment}_scales"] = torch.zeros(
            (rows.size(0), -(-rows.size(1) // _block_size(parameter))), device=rows.device
        )
    return state


def _adamw(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    means: torch.Tensor,
    squares: torch.Tensor,
    *,
    step: float,
    group: dict[str, Any],
) -> None:
    """AdamW's update after decay, in place of everything but the gradients."""
    beta1, beta2 = group["betas"]
    means.lerp_(gradients, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    spread = (squares / (1 - beta2**step)).sqrt_().add_(group["eps"])
    weights.addcdiv_(means, spread, value=-group["lr"] / (1 - beta1**step))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """`local`, sharded as `parameter` is. On the host under any mesh, which DTensor.from_local would not leave it."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _block_size(parameter: nn.Parameter) -> int:
    """By the whole parameter's row, however much of it this rank has."""
    shape = parameter.shape
    return block_size_of(math.prod(shape[1:]) if len(shape) == _CONVOLUTION else shape[-1])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, row) of a contiguous tensor, a view; a convolution's filters are its rows."""
    if not tensor.numel():
        return tensor.reshape(0, 1)
    return tensor.view(tensor.size(0), -1) if tensor.ndim == _CONVOLUTION else tensor.view(-1, tensor.size(-1))


def _slices(rows: torch.Tensor) -> Iterator[slice]:
    """Rows that are updated together."""
    step = max(1, _CHUNK_ELEMENTS // rows.size(1))
    return (slice(begin, begin + step) for begin in range(0, rows.size(0), step))
