"""4-bit storage of frozen weights for QLoRA (Dettmers et al. 2023, arXiv:2305.14314), in plain torch.

A weight is cut into blocks of 64 along its rows (fewer in odd rows, see `quantized_block`). A block keeps its largest
absolute value, and of each weight the nearest of 16 values, NF4: quantiles of a normal distribution scaled to [-1, 1].
The blocks' largest values are stored in 8 bits themselves (double quantization), as steps between the smallest and the
largest of their row. That is 0.5 + 1/64 + 8/row bytes a weight: 0.518 for rows of 4096.

Blocks never cross rows, so that a matrix can be cut by rows, by columns between blocks, or both, and every layout
computes with the same numbers. All of it is stored as integers, which no engine casts to the type it computes in.
bitsandbytes has kernels for the same 16 values, but keeps them in tensors that FSDP2 and DTensor don't cut.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from trainer.models.deferred_weights import WeightSource, source_of
from trainer.models.packed_experts import num_packed, packed_matrices
from trainer.models.replay import has_result
from trainer.models.routers import is_router
from trainer.models.sharded_source import Index
from trainer.optimizers.build import local_tensor
from trainyard.errors import InputError
from trainyard.spec.support import quantized_block

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The paper's appendix E, and bitsandbytes' table."""

_CHUNK_ELEMENTS = 1 << 24
"""Weights quantized at once: the float32 copies of a whole embedding-sized matrix would not fit beside it."""

_READ_ELEMENTS = 1 << 24
"""Weights read at once, at most, beside what is made of them all: of a mixture's layer they would be as many again. A
GPU moves about 130 MB by six kernels then (a count: not measured on one), longer than the host takes to launch them."""


@torch.no_grad()
def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., rows, row) weights -> codes (..., rows, row / 2), scales (..., rows, blocks), both uint8; ranges.

    ranges: (..., rows, 2) int32, the bits of two float32: what scale 0 stands for, and one step of it.
    """
    rows = weight.flatten(end_dim=-2)
    num_rows = max(1, _CHUNK_ELEMENTS // rows.size(1))
    parts = [_quantize_rows(chunk.float()) for chunk in torch.split(rows, num_rows)]
    codes, scales, ranges = (torch.cat(tensors).view(*weight.shape[:-1], -1) for tensors in zip(*parts, strict=True))
    return codes, scales, ranges


def _quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks = rows.reshape(rows.size(0), -1, quantized_block(rows.size(1)))
    largest = blocks.abs().amax(dim=2)
    low, high = largest.amin(dim=1, keepdim=True), largest.amax(dim=1, keepdim=True)
    step = (high - low) / 255
    scales = torch.where(step > 0, (largest - low) / step, 0.0).round_().clamp_(0, 255).to(torch.uint8)
    ranges = torch.cat([low, step], dim=1).contiguous().view(torch.int32)
    table = torch.tensor(NF4, device=rows.device)
    # Divided by the scale as it will be read, not as it was: its rounding is then not an error of its own.
    relative = torch.nan_to_num(blocks / _scales_of(scales, ranges).unsqueeze(2), nan=0.0, posinf=1.0, neginf=-1.0)
    nearest = torch.bucketize(relative.flatten(1), (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
    return nearest[:, 0::2] * 16 + nearest[:, 1::2], scales, ranges


def _scales_of(scales: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    low, step = ranges.view(torch.float32).unbind(-1)
    return low.unsqueeze(-1) + scales * step.unsqueeze(-1)


@torch.no_grad()
def dequantize(codes: torch.Tensor, scales: torch.Tensor, ranges: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize` took, about: (..., rows, row). Multiplied in `dtype`, for half the memory traffic in bf16; some
    rows at a time, whose codes and values are there beside the result."""
    values = torch.tensor(NF4, dtype=dtype, device=codes.device)
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)  # one look-up a byte
    result = torch.empty((*codes.shape[:-1], 2 * codes.size(-1)), dtype=dtype, device=codes.device)
    all_rows = max(1, result[..., 0].numel())
    num_rows = math.ceil(all_rows / math.ceil(result.numel() / _READ_ELEMENTS or 1))
    parts = (torch.split(part.flatten(end_dim=-2), num_rows) for part in (codes, scales, ranges))
    written = torch.split(result.flatten(end_dim=-2), num_rows)
    for some_codes, some_scales, some_ranges, rows in zip(*parts, written, strict=True):
        factors = _scales_of(some_scales, some_ranges).to(dtype).unsqueeze(-1)
        _write_products(pairs, some_codes, factors, rows)
    return result


def _write_products(pairs: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor, rows: torch.Tensor) -> None:
    """Of those of one part of a weight; nothing but `rows` is left of it."""
    num_blocks = factors.size(1)
    blocks = pairs.index_select(0, codes.flatten().int()).view(-1, num_blocks, rows.size(1) // num_blocks)
    torch.mul(blocks, factors, out=rows.view_as(blocks))


PARTS = ("codes", "scales", "ranges")
"""What a weight is stored as, in the order of `quantize`."""


def _empty_parts(shape: torch.Size) -> list[nn.Parameter]:
    """Parameters on meta for what a weight of `shape` is stored as."""
    *leading, row = shape
    if row % 2:
        raise InputError(
            f"model.adapter: qlora stores two weights to a byte, and a layer's rows have {row} of them; use kind: lora"
        )
    stored = [(row // 2, torch.uint8), (row // quantized_block(row), torch.uint8), (2, torch.int32)]
    return [
        nn.Parameter(torch.empty((*leading, size), dtype=dtype, device="meta"), requires_grad=False)
        for size, dtype in stored
    ]


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose matrix (out_features, in_features) is stored in 4 bits."""

    codes: nn.Parameter
    scales: nn.Parameter
    ranges: nn.Parameter

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        """Takes over the bias; the matrix gets its values from `QuantizedWeights`."""
        super().__init__()
        self.is_transposed = isinstance(linear, Conv1D)
        weight = linear.weight.T if self.is_transposed else linear.weight
        self.out_features, self.in_features = int(weight.size(0)), int(weight.size(1))
        self._dtype = weight.dtype
        for name, parameter in zip(PARTS, _empty_parts(weight.shape), strict=True):
            self.register_parameter(name, parameter)
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self.product(hidden, self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, read anew, in the type that it came in: for models that multiply it themselves (Mamba)."""
        codes, scales, ranges = (local_tensor(part) for part in (self.codes, self.scales, self.ranges))
        weight = dequantize(codes, scales, ranges, self._dtype)
        return weight.T if self.is_transposed else weight

    def product(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`hidden` times this rank's part of the matrix, plus `bias`."""
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        stored = (local_tensor(self.codes), local_tensor(self.scales), local_tensor(self.ranges))
        result: torch.Tensor = _Product.apply(hidden.to(dtype), *stored)  # type: ignore[no-untyped-call]
        return result if bias is None else result + bias.to(dtype)


def _factor(codes: torch.Tensor, scales: torch.Tensor, ranges: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight; where the product's result is there already, one of its shape that nobody reads: if anybody did, by
    an operation whose results are not kept, no number would come of it."""
    if has_result():
        return scales.new_full((), float("nan"), dtype=dtype).expand(codes.size(0), 2 * codes.size(1))
    return dequantize(codes, scales, ranges, dtype)


class _Product(torch.autograd.Function):
    """hidden @ weight.T; backward reads the weight anew, so that it is never kept in 16 or 32 bits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, ranges: torch.Tensor
    ) -> torch.Tensor:
        # Not saved by torch: a layer that is computed again would go on to here, and read the weight, to save them.
        ctx.stored = (codes, scales, ranges)
        return functional.linear(hidden, _factor(codes, scales, ranges, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        codes, scales, ranges = ctx.stored
        return gradient @ dequantize(codes, scales, ranges, gradient.dtype), None, None, None


class QuantizedExperts:
    """Stands in for the forward of a module of packed experts (experts, out, in), all of them stored in 4 bits but for
    biases (experts, out), which stay as they are.

    What it is called with is the module's own affair: mostly hidden states, the chosen experts and their weights.
    """

    def __init__(self, module: nn.Module) -> None:
        """`module`'s weights become `<name>_codes`, `_scales` and `_ranges`, each again one slice an expert."""
        self._module = module
        self._names = list(packed_matrices(module))
        self._biases = [name for name, _ in module.named_parameters(recurse=False) if name not in self._names]
        self._forward = module.forward
        for name in self._names:
            weight = module._parameters.pop(name)
            assert weight is not None
            for part, parameter in zip(PARTS, _empty_parts(weight.shape), strict=True):
                module.register_parameter(f"{name}_{part}", parameter)
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the module's own. Runs once more in the backward pass: the read weights would be kept for it else."""
        result: torch.Tensor = checkpoint(self._run, *args, use_reentrant=False, **kwargs)
        return result

    def _run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        stored = self._module._parameters
        read = {}
        for name in self._names:
            parts = [stored[f"{name}_{part}"] for part in PARTS]
            codes, scales, ranges = (local_tensor(part) for part in parts if part is not None)
            read[name] = dequantize(codes, scales, ranges, hidden.dtype)
        for name in self._biases:
            bias = stored[name]
            assert bias is not None
            read[name] = local_tensor(bias).to(hidden.dtype)
        self._module.__dict__.update(read)
        try:
            result: torch.Tensor = self._forward(*args, **kwargs)
        finally:
            for name in read:
                del self._module.__dict__[name]
        return result


@dataclass(frozen=True)
class _Original:
    """Where a stored tensor comes from."""

    name: str
    """The weight's, in the model's source."""
    part: int
    """Which of PARTS."""
    row_length: int
    is_transposed: bool = False
    """Whether the source has it as (in, out)."""


class QuantizedWeights:
    """Where the values of a model are whose blocks were quantized: a rank quantizes the rows that it has a part of."""

    def __init__(self, source: WeightSource, originals: dict[str, "_Original"]) -> None:
        """`originals`: stored name -> where it comes from."""
        self._source = source
        self._originals = originals
        self._last: tuple[Any, Any] = (None, None)

    def read(self, name: str, index: Index) -> torch.Tensor:
        """See deferred_weights.WeightSource."""
        if name not in self._originals:
            return self._source.read(name, index)
        original = self._originals[name]
        return self._quantized(original, index[:-1])[original.part].index_select(-1, index[-1])

    def release(self) -> None:
        """See deferred_weights.WeightSource."""
        self._last = (None, None)
        self._source.release()

    def _quantized(self, original: "_Original", rows: Index) -> tuple[torch.Tensor, ...]:
        key = (original.name, tuple(tuple(positions.tolist()) for positions in rows))
        if self._last[0] != key:  # a weight's parts are asked for one after the other
            columns, turned = torch.arange(original.row_length), original.is_transposed
            weight = self._source.read(original.name, (columns, *rows) if turned else (*rows, columns))
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else weight.device
            quantized = quantize((weight.T if turned else weight).to(device))
            self._last = (key, tuple(tensor.cpu() for tensor in quantized))
        stored: tuple[torch.Tensor, ...] = self._last[1]
        return stored


def quantize_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Stores every linear layer and all packed experts of `blocks` (outlined: on meta) in 4 bits, in place.

    Embeddings, norms, convolutions, routers, the head and adapters stay as they are.
    """
    names = {module: name for name, module in model.named_modules()}
    originals: dict[str, _Original] = {}
    for parent in [module for block in blocks for module in block.modules()]:
        for child_name, child in list(parent.named_children()):
            is_adapter = isinstance(parent, nn.ModuleDict)  # peft's lora_A and lora_B
            if _multiplies(child) and not is_adapter and not is_router(names[child]):
                layer = QuantizedLinear(child)
                setattr(parent, child_name, layer)
                for number, part in enumerate(PARTS):
                    original = _Original(f"{names[child]}.weight", number, layer.in_features, layer.is_transposed)
                    originals[f"{names[child]}.{part}"] = original
        if _holds_experts(names[parent], parent):
            weights = packed_matrices(parent)
            QuantizedExperts(parent)
            for name, weight in weights.items():
                whole_name = f"{names[parent]}.{name}"
                for number, part in enumerate(PARTS):
                    originals[f"{whole_name}_{part}"] = _Original(whole_name, number, weight.size(-1))
    source = source_of(model)
    assert source is not None, "quantized while it is an outline"
    model._weight_source = QuantizedWeights(source, originals)  # type: ignore[assignment]  # no module


_SAME_PRODUCT = frozenset({"FalconLinear"})
"""Classes with a forward pass of their own that gives what nn.Linear's does. Others' are more than a product (routers
that choose, layers in groups): they stay as they are."""


def _multiplies(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer, and computes what one computes."""
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return is_plain or isinstance(module, Conv1D) or type(module).__name__ in _SAME_PRODUCT


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Whether a module's weights are packed experts, told by their number, or by its name where all are matrices (as
    others count them)."""
    weights = list(module.parameters(recurse=False))
    if not all(weight.is_floating_point() for weight in weights):
        return False
    are_matrices = bool(weights) and len(packed_matrices(module)) == len(weights)
    return num_packed(module) is not None or (are_matrices and name.endswith("experts"))
