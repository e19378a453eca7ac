"""An existing model's weights as files mapped into memory: a rank that shards the model reads no more than its part.

A weight loaded in the type it is stored in is a view of its safetensors file: no memory is spent before it is touched,
and ranks of one host share what is. `deferred_weights` copies a rank's part of it, in the type it is trained in.
transformers packs the experts of a mixture (a matrix each in its file) into one tensor; here it only notes which files'
parts that tensor is made of, so that a rank reads the experts, or the slices of them, that it holds.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, core_model_loading, modeling_utils
from transformers.utils import logging as hf_logging

from trainer.models.configuration import is_of_the_machine, one_line
from trainer.speech import say
from trainyard.errors import InputError

Index = tuple[torch.Tensor, ...]
"""A rank's part of a tensor: of each dimension, the positions (int64, ascending) it has; their product is the part."""

_UNEVEN = torch.Size((0,))
"""The shape of what is made of tensors that don't fit together: no weight's, so that `load` refuses it."""

_NAMED = 3
"""Weights that a message names of many."""

_PLAIN_TYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Types whose numbers are the weights; those of fewer bits are nothing without their scales."""


class Stacked:
    """Stored tensors of one shape, one after the other along a new dimension."""

    def __init__(self, tensors: Sequence["Stored"], dim: int) -> None:
        self._tensors = list(tensors)
        self._dim = dim
        first = tensors[0]
        self.dtype: torch.dtype = _type_for_all(tensors)
        is_even = all(tensor.shape == first.shape for tensor in tensors)
        self.shape: torch.Size = (
            torch.Size((*first.shape[:dim], len(tensors), *first.shape[dim:])) if is_even else _UNEVEN
        )

    def part(self, index: Index) -> torch.Tensor:
        """The positions of each dimension; of the other tensors nothing is read."""
        result = _empty(index, self.dtype)
        inner = (*index[: self._dim], *index[self._dim + 1 :])
        for place, number in enumerate(index[self._dim].tolist()):
            result.select(self._dim, place).copy_(part_of(self._tensors[number], inner))
        return result


class Joined:
    """Stored tensors one after the other along a dimension that they have."""

    def __init__(self, tensors: Sequence["Stored"], dim: int) -> None:
        self._tensors = list(tensors)
        self._dim = dim
        first = tensors[0]
        self.dtype: torch.dtype = _type_for_all(tensors)
        is_even = all(_without(tensor.shape, dim) == _without(first.shape, dim) for tensor in tensors)
        if is_even and _UNEVEN not in [tensor.shape for tensor in tensors]:
            length = sum(tensor.shape[dim] for tensor in tensors)
            self.shape: torch.Size = torch.Size((*first.shape[:dim], length, *first.shape[dim + 1 :]))
        else:
            self.shape = _UNEVEN

    def part(self, index: Index) -> torch.Tensor:
        """The positions of each dimension; of tensors that have none of them nothing is read."""
        result = _empty(index, self.dtype)
        positions, offset, begin = index[self._dim], 0, 0
        for tensor in self._tensors:
            length = tensor.shape[self._dim]
            within = positions[(positions >= offset) & (positions < offset + length)] - offset
            if count := within.numel():
                inner = (*index[: self._dim], within, *index[self._dim + 1 :])
                result.narrow(self._dim, begin, count).copy_(part_of(tensor, inner))
            offset, begin = offset + length, begin + count
        return result


Stored = torch.Tensor | Stacked | Joined
"""A weight that can be read in parts."""


def part_of(stored: Stored, index: Index) -> torch.Tensor:
    """The positions of each dimension, in the type they are stored in; a view where that can be."""
    if isinstance(stored, Stacked | Joined):
        return stored.part(index)
    for dim, positions in enumerate(index):
        stored = select(stored, dim, positions)
    return stored


def select(tensor: torch.Tensor, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """The positions of one dimension; a view where they follow each other."""
    if positions.numel() == 0:
        return tensor.narrow(dim, 0, 0)
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == positions.numel():
        return tensor.narrow(dim, first, positions.numel())
    return tensor.index_select(dim, positions)


class _Packed(nn.Parameter):
    """Stands, on the meta device, for a weight that is made of several stored ones."""

    stored: Stored

    @classmethod
    def of(cls, stored: Stored) -> "_Packed":
        """The stand-in of `stored`, whose shape and type it has."""
        values = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        packed = cls(values, requires_grad=values.is_floating_point())
        packed.stored = stored
        return packed


def stored_of(parameter: nn.Parameter) -> Stored:
    """Where the values of a loaded model's parameter are."""
    return parameter.stored if isinstance(parameter, _Packed) else parameter.detach()


@contextmanager
def left_in_files() -> Iterator[None]:
    """Inside, `from_pretrained` copies no weight: each stays a view of its file, in the type that it has there.

    Packed weights are stand-ins, whose values `deferred_weights.defer` finds. transformers has no public way to ask for
    this; a version that packs by other means than these two operations would read packed experts whole, which
    tests/trainer/test_sharded_source.py would see.
    """
    ours: list[tuple[Any, str, Any]] = [
        (core_model_loading, "_materialize_copy", _as_stored),
        (core_model_loading.MergeModulelist, "convert", _stack),
        (core_model_loading.Concatenate, "convert", _join),
    ]
    theirs = [getattr(owner, name) for owner, name, _ in ours]
    for owner, name, function in ours:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(ours, theirs, strict=True):
            setattr(owner, name, function)


def _as_stored(tensor: Any, device: Any = None, dtype: Any = None) -> torch.Tensor:
    """In place of a copy to `device` in `dtype`: a safetensors slice is mapped by indexing it."""
    del device, dtype
    mapped: torch.Tensor = tensor[...]
    return mapped


def _stack(
    operation: Any, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
) -> dict[str, Any]:
    """In place of MergeModulelist.convert: the experts' matrices of each name, along a new dimension."""
    del source_patterns
    number = len(input_dict)
    return {
        operation.get_target_pattern(number, pattern, target_patterns): _Packed.of(Stacked(tensors, operation.dim))
        for pattern, tensors in input_dict.items()
    }


def _join(
    operation: Any, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
) -> dict[str, Any]:
    """In place of Concatenate.convert: what the patterns have, in their order, along a dimension."""
    parts: list[Stored] = []
    for pattern in source_patterns:
        found = input_dict.get(pattern, [])
        parts += [stored_of(tensor) for tensor in (found if isinstance(found, list) else [found])]
    return {operation.get_target_pattern(target_patterns): _Packed.of(Joined(parts, operation.dim))}


LOADING_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, ImportError, RuntimeError, SafetensorError),
    *(ArithmeticError, AssertionError),
)
"""What transformers, and torch of sizes, raise for a directory that holds no model of the kind that was asked for."""


@contextmanager
def refusing_source(source: str) -> Iterator[None]:
    """Around what is made of `model.source`: InputError, in one line, for what a folder that is no good raises."""
    try:
        yield
    except InputError:
        raise  # it is a ValueError too, and says already what is wrong where
    except (StrictDataclassError, *LOADING_ERRORS) as error:
        if is_of_the_machine(error):
            raise
        raise InputError(f"model.source: {source}: can't be loaded: {one_line(error)}") from None


def load(
    auto_class: Any, source: str, config: PretrainedConfig, *, new_head: str | None = None, **options: Any
) -> PreTrainedModel:
    """The model in the folder `source`, its weights left in their files; `deferred_weights.defer` has to follow.

    Buffers are real, and float32 where they are floating-point. Weights whose names begin with `new_head` are new ones
    where the files lack them, or have them in another shape; InputError for others, and for weights that are stored
    quantized. `options` go to `from_pretrained`. Raises LOADING_ERRORS.
    """
    _check_stored_plainly(config, source)
    with _quietly(), left_in_files():
        # float32: constants are rounded to the type that a model is loaded in (Gemma 3's embedding scale).
        model, report = auto_class.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    _check_whole(model, report, source, new_head)
    _tell_strangers(model, report, source)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(torch.float32 if buffer.is_floating_point() else buffer.dtype, copy=True)
    assert isinstance(model, PreTrainedModel)
    return model


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' bar, and its table of what is missing or superfluous: of every rank, many lines.

    `_check_whole` says in one what is wrong, `_tell_strangers` what is left out.
    """
    logger, has_bar = logging.getLogger(modeling_utils.__name__), hf_logging.is_progress_bar_enabled()

    def is_told(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(is_told)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(is_told)
        if has_bar:
            hf_logging.enable_progress_bar()


def _tell_strangers(model: nn.Module, report: dict[str, Any], source: str) -> None:
    """What of the files is left out, once a job."""
    strangers = sorted(report["unexpected_keys"])
    if strangers and int(os.environ.get("RANK", "0")) == 0:
        more = f" and {len(strangers) - _NAMED} more" if len(strangers) > _NAMED else ""
        say(
            f"warning: model.source: {source}: {type(model).__name__} has no place for {', '.join(strangers[:_NAMED])}"
            f"{more}, which its files have: left out"
        )


def _check_stored_plainly(config: PretrainedConfig, source: str) -> None:
    if (Path(source) / "adapter_config.json").is_file():
        # transformers would put it in, and its matrices would be trained among the model's own weights.
        raise InputError(
            f"model.source: {source}: an adapter lies beside the model's weights (adapter_config.json); give a folder"
            " with the model alone, or with the adapter merged into it"
        )
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        method = settings.get("quant_method", "") if isinstance(settings, dict) else settings.quant_method
        raise InputError(
            f"model.source: {source}: its weights are stored quantized (quantization_config: {method}); give the model"
            " in bf16, fp16 or fp32 (model.adapter.kind: qlora then stores it in 4 bits by itself)"
        )


def _check_whole(model: PreTrainedModel, report: dict[str, Any], source: str, new_head: str | None) -> None:
    """transformers would train random weights, and zeros for buffers, in place of what is not there or doesn't fit."""

    def is_needed(name: str) -> bool:
        # A running average with a momentum, as all have here, doesn't ask how many batches it has seen.
        return not (new_head and name.startswith(new_head)) and not name.endswith(".num_batches_tracked")

    if lacking := sorted(filter(is_needed, set(model.state_dict()) & set(report["missing_keys"]))):
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise InputError(
            f"model.source: {source}: its files have no {', '.join(lacking[:_NAMED])}{more}, which"
            f" {type(model).__name__} needs; give a directory with all weights of such a model"
        )
    if strays := sorted(name for name in report["unexpected_keys"] if is_needed(name) and _belongs(model, name)):
        raise InputError(
            f"model.source: {source}: its files have {strays[0]}, for which {type(model).__name__} has no place by its"
            " config.json: it would be left out; give a directory whose files belong together"
        )
    _check_depth(model, report, source)
    for name, weight in model.named_parameters():
        if weight.dtype not in _PLAIN_TYPES:
            raise InputError(
                f"model.source: {source}: {name} is stored as {str(weight.dtype).removeprefix('torch.')}; give the"
                " model in bf16, fp16 or fp32"
            )
    for name, stored, wanted in sorted(item for item in report["mismatched_keys"] if is_needed(item[0])):
        found = "is made of matrices that don't fit together" if stored == _UNEVEN else f"is {tuple(stored)}"
        raise InputError(
            f"model.source: {source}: {name} {found} in its files, but {tuple(wanted)} by its config.json; give a"
            " directory whose files belong together"
        )


_NUMBERED = re.compile(r"(.*?)\.(\d+)\..*")


def _check_depth(model: PreTrainedModel, report: dict[str, Any], source: str) -> None:
    """transformers would leave out the layers that config.json doesn't count, and train the first few as the model."""
    modules = dict(model.named_modules())
    for name in sorted(report["unexpected_keys"]):
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            continue
        path, number = numbered[1], int(numbered[2])
        # Files of a model without its head leave out what the others' names begin with.
        layers = modules.get(path) or modules.get(f"{model.base_model_prefix}.{path}")
        if isinstance(layers, nn.ModuleList) and number >= len(layers) + _num_predicting(model.config):
            raise InputError(
                f"model.source: {source}: its files have {path}.{number}, but {type(model).__name__} has"
                f" {len(layers)} of {path} by its config.json: the rest would be left out; state as many there as the"
                " files have (num_hidden_layers), or give a directory whose files belong together"
            )


def _num_predicting(config: PretrainedConfig) -> int:
    """Layers behind the last that predict further tokens (DeepSeek-V3, GLM-4.5), which transformers has no place for;
    those of published models it knows by number, and doesn't report."""
    counts = [getattr(config.get_text_config(), name, 0) for name in ("num_nextn_predict_layers", "num_mtp_layers")]
    return max(count for count in counts if isinstance(count, int))


@torch.no_grad()
def to_trained_type(parameters: Iterable[nn.Parameter], precision: str) -> None:
    """Trained weights become float32 (fp64: float64); frozen ones (under an adapter) the type that the job computes in.

    For parameters that have no values yet: the type is that in which they get them.
    """
    trained_type = torch.float64 if precision == "fp64" else torch.float32
    half_types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    frozen_type = half_types.get(precision, trained_type)
    for parameter in parameters:
        wanted = trained_type if parameter.requires_grad else frozen_type
        if parameter.dtype != wanted and parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted)


def _belongs(model: nn.Module, name: str) -> bool:
    """Whether a weight that the model didn't take is a bias or a scale of a module that it has: without it the module
    computes something else. Others are only told (`_tell_strangers`): whole modules may be left out on purpose
    (heads that predict further tokens, towers of a wider model), and masks and positions are made anew."""
    owner, _, own = name.rpartition(".")
    module = dict(model.named_modules()).get(owner)
    return module is not None and (own == "bias" or "scale" in own) and any(True for _ in module.parameters(False))


def _type_for_all(tensors: Sequence["Stored"]) -> torch.dtype:
    """The type that holds every tensor's values: a file may have some experts in float32 and the others in bf16."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _empty(index: Index, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(positions.numel() for positions in index), dtype=dtype)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
