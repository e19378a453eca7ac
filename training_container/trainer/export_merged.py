"""An adapter put into its base model, file by file as the base model's tensors are read: W + alpha / rank * B A."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.export_weights import DTYPES, Described, Group
from trainyard.errors import InputError
from trainyard.spec.job import AdapterSpec

_FIRST, _SECOND = ".lora_A.default.weight", ".lora_B.default.weight"
_TRANSPOSED = frozenset({"gpt2", "openai-gpt", "decision_transformer", "imagegpt"})
"""Model types whose linear layers keep their matrix as (in, out): transformers' Conv1D."""
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def merged_groups(
    base: Path,
    adapter: AdapterSpec,
    config: dict[str, Any],
    tensors: Sequence[Described],
    read: Callable[[str], torch.Tensor],
) -> list[Group]:
    """Every tensor of the base model's files, in its own type; adapted ones with what the adapter adds, in float32.

    `tensors`: the adapter's, of the checkpoint. What training computed with a base in 4 bits is only near this.
    """
    adapted = {tensor.name.removesuffix(_FIRST) for tensor in tensors if tensor.name.endswith(_FIRST)}
    add = partial(_added, read, adapter.alpha / adapter.rank, config.get("model_type") in _TRANSPOSED)
    groups, found = [], set()
    for path in _files(base):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                stored = file.get_slice(name)
                described = Described(name, tuple(stored.get_shape()), _type_of(path, name, stored.get_dtype()))
                module = name.removesuffix(".weight")
                if module in adapted:
                    found.add(module)
                    groups.append(Group((described,), partial(_sum, path, name, module, add)))
                else:
                    groups.append(Group((described,), partial(_plain, path, name)))
    if not groups:
        raise InputError(f"--merge: {base} holds no model*.safetensors")
    if lost := sorted(adapted - found):
        raise InputError(
            f"--merge: {base} has no {lost[0]}.weight, which was adapted: another model's, or packed layers"
        )
    return groups


def _files(base: Path) -> list[Path]:
    """The base model's weights, of those beside each other (model.fp16.safetensors, shards of an earlier save) the
    ones that transformers reads, and so the trainer."""
    single, index = base / "model.safetensors", base / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(base.glob("model*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [base / str(name) for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--merge: {index}: is no index of weights ({error!r})") from None


def _type_of(path: Path, name: str, stored: str) -> torch.dtype:
    if stored not in _TYPES:
        raise InputError(f"--merge: {path}: {name} is stored as {stored}, which no merge takes; give the base in bf16")
    return _TYPES[stored]


def _plain(path: Path, name: str) -> dict[str, torch.Tensor]:
    with _opened(path) as file:
        return {name: file.get_tensor(name)}


def _sum(path: Path, name: str, module: str, add: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    values, added = _plain(path, name)[name], add(module)
    if values.shape != added.shape:
        raise InputError(f"--merge: {name} has shape {list(values.shape)}, the adapter's is {list(added.shape)}")
    return {name: values.float().add_(added)}


def _added(read: Callable[[str], torch.Tensor], factor: float, is_transposed: bool, module: str) -> torch.Tensor:
    product = read(module + _SECOND).float() @ read(module + _FIRST).float()
    return (product.T if is_transposed else product) * factor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: can't be read: {' '.join(str(error).split())[:200]}") from None
