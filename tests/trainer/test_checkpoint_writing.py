"""What a save plans once and what it hashes while it writes: the same as planned anew, and as read back."""

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer.checkpoint import blocks, host_copy
from trainer.checkpoint.blocks import write_blocks
from trainer.checkpoint.group import Group
from trainer.checkpoint.host_copy import HostCopy, SharedPlan
from trainer.checkpoint.manifest import shard_file
from trainer.checkpoint.writing import ArchiveWrappings, ShardStream
from trainer.strategies.flat_shard import FlatShard

TENSORS = {
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "bytes": torch.arange(200, dtype=torch.uint8),
    "columns": torch.randn(300, 40).t(),
    "half": torch.randn(700, 300).bfloat16(),
    "large": torch.randn(9, 1 << 20),
    "middle": torch.randn(1100, 1000),
    "same": torch.randn(700, 300).bfloat16(),
}


def test_hashes_are_those_of_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, copy, read_back = SharedPlan(Group(None, 0, 1)), HostCopy(), list[int]()
    original = blocks._hashed
    plan.make(TENSORS, plan.local_items(TENSORS))
    for turn in range(2):  # the second one's buffers are the first one's
        tensors = {name: tensor + turn for name, tensor in TENSORS.items()}
        copy.take(plan.mine, tensors)
        results, written = copy.write(plan.mine, tmp_path / str(turn), durable=True)
        (name,) = written
        path = tmp_path / str(turn) / name
        assert written[name].shard_file(name) == shard_file(path)
        archives = [(int(one.storage_data.offset), int(one.storage_data.length)) for one in results]
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "_hashed", lambda *place: read_back.append(place[2]) or original(*place))
            table = write_blocks(path, archives, written[name].values).read_bytes()
        assert table == write_blocks(path, archives).read_bytes()
    assert read_back == [0, 0], "only what has no values isn't known when it is written"


def test_archives_are_what_torch_would_have_saved(tmp_path: Path) -> None:
    """Byte for byte but for the archive's id, in the first save and in one that knows what goes around the values."""
    plan, copy = SharedPlan(Group(None, 0, 1)), HostCopy()
    plan.make(TENSORS, plan.local_items(TENSORS))
    for turn in range(2):
        tensors = {name: (tensor + turn).contiguous() for name, tensor in TENSORS.items()}
        copy.take(plan.mine, tensors)
        results, written = copy.write(plan.mine, tmp_path, durable=False)
        content = (tmp_path / next(iter(written))).read_bytes()
        for one in results:
            archive = content[one.storage_data.offset :][: one.storage_data.length]
            saved = io.BytesIO()
            torch.save(tensors[one.index.fqn], saved)
            records = zipfile.ZipFile(io.BytesIO(archive))  # which holds each record against its CRC32
            theirs = zipfile.ZipFile(io.BytesIO(saved.getvalue()))
            assert records.testzip() is None and len(archive) == len(saved.getvalue())
            for mine, its in zip(records.infolist(), theirs.infolist(), strict=True):
                assert (mine.filename, mine.header_offset, mine.flag_bits) == (
                    its.filename,
                    its.header_offset,
                    its.flag_bits,
                )
                assert mine.filename.endswith("serialization_id") or records.read(mine) == theirs.read(its)
            loaded = torch.load(io.BytesIO(archive), weights_only=True)
            assert loaded.dtype == tensors[one.index.fqn].dtype and torch.equal(loaded, tensors[one.index.fqn])


@pytest.mark.slow
def test_values_of_more_than_4_gib_are_wrapped_as_torch_does(tmp_path: Path) -> None:
    """Zip records of such a size are written in another form, whose CRC32 lies elsewhere."""
    tensor = torch.zeros((4 << 30) + 5, dtype=torch.uint8)
    tensor[-3:] = 7
    with (tmp_path / "shard").open("wb") as file:
        ShardStream(file, ArchiveWrappings()).append(tensor)
    del tensor
    with zipfile.ZipFile(tmp_path / "shard") as archive:
        assert archive.testzip() is None
    loaded = torch.load(tmp_path / "shard", weights_only=True, mmap=True)
    assert len(loaded) == (4 << 30) + 5 and loaded[-4:].tolist() == [0, 7, 7, 7]


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """This process is rank 0 of two, the other of which is only imagined."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("first_of_two")
def test_only_what_lies_otherwise_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        "whole": torch.zeros(4, 6),
        "rows": DTensor.from_local(torch.zeros(3, 5), mesh, [Shard(0)]),
        "flat": FlatShard(torch.zeros(7), (5, 4), 3),
    }
    plan, planned = SharedPlan(Group(None, 0, 1)), list[list[str]]()
    original = host_copy._planner

    def counted(asked: host_copy.Tensors, is_first: bool) -> object:
        planned.append(list(asked))
        return original(asked, is_first)

    monkeypatch.setattr(host_copy, "_planner", counted)

    def check(name: str, changed: torch.Tensor) -> None:
        tensors[name] = changed
        items = plan.local_items(tensors)
        assert planned.pop() == [name] and not planned and not plan.holds(items)
        assert items == SharedPlan(Group(None, 0, 1)).local_items(tensors)
        planned.clear()
        plan.make(tensors, items)
        planned.clear()

    plan.make(tensors, plan.local_items(tensors))
    planned.clear()
    same: dict[str, Callable[[], torch.Tensor]] = {
        "whole": lambda: torch.ones(4, 6),
        "rows": lambda: DTensor.from_local(torch.ones(3, 5), mesh, [Shard(0)]),
        "flat": lambda: FlatShard(torch.ones(7), (5, 4), 3),
    }
    assert plan.holds(plan.local_items({name: make() for name, make in same.items()})) and not planned
    check("whole", torch.zeros(6, 4))
    check("whole", torch.zeros(6, 4, dtype=torch.float64))
    check("rows", DTensor.from_local(torch.zeros(6, 5), mesh, [Replicate()]))
    check("rows", DTensor.from_local(torch.zeros(4, 5), mesh, [Shard(0)]))
    check("flat", FlatShard(torch.zeros(7), (5, 4), 4))
    check("flat", FlatShard(torch.zeros(8), (5, 4), 4))
    check("flat", FlatShard(torch.zeros(8), (4, 5), 4))
    check("new", torch.zeros(2))
    del tensors["whole"]
    assert not plan.holds(plan.local_items(tensors)) and not planned
    assert not plan.holds(plan.local_items(dict(reversed(tensors.items())))) and not planned
