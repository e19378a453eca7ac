"""Somebody else's checkpoint: its index is read without running what is in it, and its names lead nowhere else."""

import hashlib
import json
import os
import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.index import INDEX, parse_index
from trainer.checkpoint.manifest import COMMITTED, MANIFEST, ManifestError, commit_marker, parse_manifest

DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def stored(dtype: torch.dtype, memory_format: torch.memory_format) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0, 2]), torch.Size([3, 4]))
    properties = TensorProperties(dtype=dtype, requires_grad=True, memory_format=memory_format)
    return TensorStorageMetadata(properties, torch.Size([3, 6]), [chunk])


@pytest.mark.parametrize("protocol", range(pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL + 1))
def test_what_an_index_may_hold_is_read_as_torch_reads_it(protocol: int) -> None:
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    tensors = {f"{dtype} {one}": stored(dtype, one) for dtype in DTYPES for one in formats}
    place = filesystem._StorageInfo("__0_0.distcp", 5, 7, ("zstd",))
    written = Metadata(
        {**tensors, "bytes": BytesStorageMetadata()},
        planner_data={"a": ("a", 1)},
        storage_data={MetadataIndex("a", torch.Size([0]), 1): place},
        storage_meta=StorageMeta(checkpoint_id=Path("/x/y"), save_id="one"),
        version="1.0",
    )
    content = pickle.dumps(written, protocol)
    assert parse_index(content) == pickle.loads(content) and len(DTYPES) > 20


class Calls:
    """What a pickle may ask for."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


@pytest.mark.parametrize(
    "asked",
    [(os.system, "touch it"), (getattr, torch.Size, "__call__"), (eval, "1"), (torch.load, "it"), (torch.tensor, [1])],
)
def test_nothing_else_is_made_of_it(asked: tuple[Any, ...]) -> None:
    with pytest.raises(ManifestError, match=r"\.metadata can't be read \(UnpicklingError: "):
        parse_index(pickle.dumps(Calls(*asked)))
    with pytest.raises(ManifestError, match=r"can't be read \(it holds a dict\)"):
        parse_index(pickle.dumps({}))


ENCODING = "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"


@pytest.mark.parametrize(
    ("target", "state"),
    [
        (b"cpathlib\nPosixPath\n", b"(N(Vname\nV../../evil\ndt"),
        (b"cpathlib\nPosixPath\n", b"(Vname\nV../../evil\nd"),
        (b"ctorch.serialization\n_get_layout\n", b"(N(Vcache\n(dV__code__\nNdt"),
        (b"ctorch.serialization\n_get_layout\n", b"(Vcache\n(dd"),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"(N(V__eq__\nNdt"),
        (b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n", b"(N(Vsizes\nNdt"),
        (f"c{ENCODING}".encode(), b"(N(VTORCH_CHANNELS_LAST\nNdt"),
        (f"c{ENCODING}(I0\ntR".encode(), b"(V_value_\nI7\nd"),
        (f"cbuiltins\ngetattr\n(c{ENCODING}VTORCH_CHANNELS_LAST\ntR".encode(), b"(N(V_name_\nVevil\ndt"),
        (b"ctorch\nSize\n", b"(N(V__len__\nNdt"),
        (b"ctorch\nfloat32\n", b"(N(Vitemsize\nI9\ndt"),
        (b"ccollections\nOrderedDict\n", b"(N(Vget\nNdt"),
    ],
)
def test_nothing_of_the_process_is_changed_by_it(target: bytes, state: bytes) -> None:
    """A pickle's BUILD sets attributes of whatever it was given, of classes and functions as well."""

    def of_the_process() -> list[object]:
        owners = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path, torch.serialization._get_layout]
        owners += [torch.Size, OrderedDict, metadata._MEM_FORMAT_ENCODING, *metadata._MEM_FORMAT_ENCODING]
        owners += [
            one for one in vars(metadata).values() if isinstance(one, type) and one.__module__ == metadata.__name__
        ]
        return [dict(vars(owner)) for owner in owners] + [torch.float32.itemsize]

    before = of_the_process()
    with pytest.raises(ManifestError):
        parse_index(target + state + b"b.")
    assert of_the_process() == before


def lay(destination: Path, step: int, files: dict[str, bytes]) -> None:
    """A committed checkpoint of these files."""
    folder = destination / f"checkpoints/step-{step:08d}"
    shards = [{"name": n, "bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()]
    content = json.dumps({"version": 1, "step": step, "world_size": 1, "shards": shards, "extra": {}}).encode()
    for name, one in {**files, MANIFEST: content, COMMITTED: commit_marker(step, content)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(one)


def test_a_checkpoint_that_would_run_a_program_runs_none(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpointer(
        str(tmp_path / "far"),
        rank=0,
        world_size=1,
        local_dir=tmp_path / "local",
        keep_last=2,
        asynchronous=False,
        report=said.append,
    )
    checkpoints.save(1, {"a": torch.ones(3)}, {})
    lay(tmp_path / "far", 2, {INDEX: pickle.dumps(Calls(os.system, f"touch {tmp_path / 'ran'}"))})
    tensors = {"a": torch.zeros(3)}
    info = checkpoints.latest(lambda: tensors)
    assert info is not None and info.step == 1 and not (tmp_path / "ran").exists()
    assert "step=2 skipped: .metadata can't be read" in said[-1]
    checkpoints.load(info, tensors)
    assert tensors["a"].sum() == 3


@pytest.mark.parametrize("name", ["../../../elsewhere", "/etc/elsewhere", "a/b", "..", ".", "", "a\0b"])
def test_a_name_that_leads_out_of_its_folder_is_none(name: str) -> None:
    shard = {"name": name, "bytes": 1, "sha256": "0" * 64}
    content = json.dumps({"version": 1, "step": 1, "world_size": 1, "shards": [shard], "extra": {}}).encode()
    with pytest.raises(ManifestError, match="is no name of a file"):
        parse_manifest(content)
