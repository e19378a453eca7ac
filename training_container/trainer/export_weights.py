"""A checkpoint's weights as a Hugging Face model directory: config.json, model*.safetensors, an index where sharded.

    python -m trainer.export_weights --checkpoint DESTINATION/checkpoints/step-00000010 --to DIR

One tensor is in memory at a time: the file's header is written from the checkpoint's index, then each tensor is read
and appended. So a machine far smaller than the model can do it (`trainer.export` builds the model instead, and knows
adapters). Prints one line of JSON. Exit codes: 0 done, 1 failed,
2 the input was wrong.

The file format (8 bytes of header length, a JSON header, the tensors one after the other) is that of
https://github.com/huggingface/safetensors.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

from trainer.checkpoint.manifest import COMMITTED, MANIFEST, Manifest, ManifestError, check_marker, parse_manifest
from trainyard.errors import InputError, JobFailedError, TrainyardError

_MODEL = "model."
"""Weights and buffers in a checkpoint; what follows is their Hugging Face name."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Of a configuration: transformers keeps the experts of a layer in one tensor, and one by one in files."""
_HEADER_ALIGNMENT = 8
_DEFAULT_SHARD_BYTES = 5 << 30


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the model, as the checkpoint's index describes it."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def export(checkpoint: Path, to: Path, *, max_shard_bytes: int = _DEFAULT_SHARD_BYTES) -> dict[str, Any]:
    """Write the checkpoint in folder `checkpoint` to the new directory `to`; what was written, as JSON values.

    `to` appears whole or not at all. InputError where the checkpoint is not one, or `to` holds something.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"--to {to}: is not empty; give a new folder")
    manifest = _manifest(checkpoint)
    config = manifest.extra.get("model_config")
    if not isinstance(config, dict):
        raise InputError(f"{checkpoint}: holds no model_config: it was saved by an older trainer, or is no model's")
    reader = FileSystemReader(checkpoint)
    tensors = _stored_tensors(reader)
    if not tensors:
        raise InputError(f"{checkpoint}: holds no weights of a model")
    if any("lora_" in tensor.name for tensor in tensors):
        raise InputError(f"{checkpoint}: holds an adapter; `python -m trainer.export --job JOB.yaml` writes that")
    if any(config.get(name) for name in _EXPERTS):
        raise InputError(
            f"{checkpoint}: experts lie differently in Hugging Face's files and in its models;"
            " `python -m trainer.export --job JOB.yaml` converts them, with the whole model in memory"
        )
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        shards = _shards(tensors, max_shard_bytes)
        names = [_file_name(number, len(shards)) for number in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            _write_shard(partial / name, shard, reader)
        if len(shards) > 1:
            _write_index(partial, names, shards)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if to.exists():
            to.rmdir()
        partial.replace(to)
    except OSError as error:
        raise JobFailedError(f"can't write {to}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {
        "step": manifest.step,
        "to": str(to),
        "files": names,
        "num_tensors": len(tensors),
        "num_bytes": sum(tensor.num_bytes for tensor in tensors),
    }


def _manifest(checkpoint: Path) -> Manifest:
    """The manifest that was committed. Whoever brought the shards here has hashed them (`trainyard export` does)."""
    try:
        content = (checkpoint / MANIFEST).read_bytes()
        check_marker((checkpoint / COMMITTED).read_bytes(), content)
        manifest = parse_manifest(content)
    except OSError:
        raise InputError(f"{checkpoint}: is no committed checkpoint (it lacks {MANIFEST} or {COMMITTED})") from None
    except ManifestError as error:
        raise InputError(f"{checkpoint}: {error}") from None
    for file in manifest.files:
        path = checkpoint / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise InputError(f"{checkpoint}: {file.name} is missing or not as long as the manifest says")
    return manifest


def _stored_tensors(reader: FileSystemReader) -> list[StoredTensor]:
    stored = reader.read_metadata().state_dict_metadata
    return [
        StoredTensor(name.removeprefix(_MODEL), tuple(entry.size), entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
    ]


def _shards(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Tensors in order, a new file where the next would make one too large."""
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_shard(path: Path, tensors: Sequence[StoredTensor], reader: FileSystemReader) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for values in _values(tensors, reader):
            file.write(memoryview(values))


def _values(tensors: Sequence[StoredTensor], reader: FileSystemReader) -> Iterator[Any]:
    """Each tensor's bytes, read when they are asked for."""
    for tensor in tensors:
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        load_in_place(
            {_MODEL + tensor.name: values},
            storage_reader=reader,
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
        # A tensor without dimensions has no view as bytes of its own.
        yield values.reshape(-1).view(torch.uint8).numpy()


def _write_index(folder: Path, names: Sequence[str], shards: Sequence[Sequence[StoredTensor]]) -> None:
    places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export_weights", description="Weights for Hugging Face.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of one step")
    parser.add_argument("--to", type=Path, required=True, help="new folder")
    parser.add_argument("--max-shard-bytes", type=int, default=_DEFAULT_SHARD_BYTES, help="largest file of weights")
    options = parser.parse_args(arguments)
    try:
        written = export(options.checkpoint, options.to, max_shard_bytes=options.max_shard_bytes)
    except TrainyardError as error:
        print(f"trainyard: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    print(json.dumps(written), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
