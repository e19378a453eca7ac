"""Hugging Face's safetensors, sharded, written while they are read: what is in memory is one group of tensors.

The file format (8 bytes of header length, a JSON header, the tensors one after the other) is that of
https://github.com/huggingface/safetensors. The header comes first, so shapes and types have to be known before values:
a `Group` knows the former and makes the latter when its turn comes.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainyard.errors import InputError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch's types, and their names in a safetensors header."""
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Described:
    """One tensor of the result."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors that come out of the same ones of the checkpoint, and so are made together."""

    tensors: tuple[Described, ...]
    make: Callable[[], Mapping[str, torch.Tensor]]
    """Their values by name, of these shapes, on CPU; they are converted to these types."""


def keep(path: Path) -> None:
    """A finished file stays where it was written."""


def write_shards(
    folder: Path,
    groups: Sequence[Group],
    *,
    stem: str,
    max_shard_bytes: int,
    finished: Callable[[Path], None] = keep,
) -> list[str]:
    """Write the groups' tensors, in order, as `<stem>.safetensors`, or shards and an index; the files' names.

    A shard holds `max_shard_bytes` at most, but a tensor at least. `finished` may take each one away before the next
    is begun.
    """
    shards = _shards([tensor for group in groups for tensor in group.tensors], max_shard_bytes)
    names = [_file_name(stem, number, len(shards)) for number in range(1, len(shards) + 1)]
    values = _values(groups)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            _write_header(file, shard)
            for tensor, content in zip(shard, values, strict=False):
                assert content.nbytes == tensor.num_bytes, tensor.name
                file.write(content)
        finished(folder / name)
    if len(shards) > 1:
        _write_index(folder / f"{stem}.safetensors.index.json", names, shards)
    return names


def _shards(tensors: Sequence[Described], max_bytes: int) -> list[list[Described]]:
    """Tensors in order, a new file where the next would make one too large."""
    shards: list[list[Described]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _file_name(stem: str, number: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def _write_header(file: BinaryIO, tensors: Sequence[Described]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)


def _values(groups: Sequence[Group]) -> Iterator[memoryview]:
    """Each tensor's bytes; a group is made when its first is asked for, and gone before the next one's."""
    for group in groups:
        made = group.make()
        for tensor in group.tensors:
            values = _typed(made[tensor.name], tensor).contiguous()
            assert tuple(values.shape) == tensor.shape, tensor.name
            # A tensor without dimensions has no view as bytes of its own.
            content: Any = values.reshape(-1).view(torch.uint8).numpy()
            yield memoryview(content)
            del values, content
        del made


def _typed(values: torch.Tensor, tensor: Described) -> torch.Tensor:
    """In the type that it is written in; InputError where that has no place for a value: it would become infinite."""
    typed = values.to(tensor.dtype)
    if typed.dtype != values.dtype and typed.is_floating_point() and bool((typed.isinf() & values.isfinite()).any()):
        name = str(tensor.dtype).removeprefix("torch.")
        largest = float(values[values.isfinite()].abs().max())
        raise InputError(
            f"--dtype {name}: {tensor.name} has values up to {largest:g}, and {name} ends at"
            f" {torch.finfo(tensor.dtype).max:g}: they would be infinite; use float32"
            + (" or bfloat16" if tensor.dtype == torch.float16 else "")
        )
    return typed


def _write_index(path: Path, names: Sequence[str], shards: Sequence[Sequence[Described]]) -> None:
    places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
