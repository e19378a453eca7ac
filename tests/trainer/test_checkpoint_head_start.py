"""What is read while a restore is planned is what the plan asks for, and is read only where it plainly will be."""

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_checkpoint_disk import forget
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from trainer.checkpoint import Checkpointer, SpoiledError, disk, head_start, reading, restore
from trainer.checkpoint.destination import LocalDestination
from trainer.checkpoint.head_start import HeadStart
from trainer.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from trainer.checkpoint.ranges import Range
from trainer.checkpoint.reading import StepReader

MIB = 1 << 20
SIZE = 11 * MIB + 123


@pytest.fixture
def direct_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Bytes of each read past the cache; skips where the disk of `tmp_path` knows none."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(2 * MIB))
    forget(probe)
    found: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], at: int) -> int:
        num_read = real(descriptor, buffers, at)
        if _is_direct(descriptor):
            found.append(num_read)
        return num_read

    monkeypatch.setattr(os, "preadv", preadv)
    disk.read_once_at(probe, 0, [memoryview(bytearray(2 * MIB))])
    if not found:
        pytest.skip(f"the disk of {tmp_path} has no reads past the page cache")
    found.clear()
    return found


def _is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def cold(path: Path) -> bytes:
    """Some content, on the disk alone."""
    content = os.urandom(SIZE)
    path.write_bytes(content)
    forget(path)
    return content


def unread(start: int, memory: Sequence[memoryview]) -> int:
    raise AssertionError("it was read already")


def from_file(path: Path) -> Callable[[int, Sequence[memoryview]], int]:
    return lambda start, memory: disk.read_once_at(path, start, memory)


@pytest.mark.parametrize("most_bytes", [4 * MIB, 64 * MIB])
def test_any_range_is_what_the_file_has(
    tmp_path: Path, direct_bytes: list[int], monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(head_start, "MOST_BYTES", most_bytes)
    content = cold(path := tmp_path / "shard")
    head = HeadStart(path, SIZE)
    for start, lengths in itertools.product(
        (0, 1, 70_001, 3 * MIB, 4 * MIB, SIZE - 5), ([MIB - 1, 2], [5, 0, 3 * MIB + 7, 4096], [8 * MIB])
    ):
        pieces = [memoryview(bytearray(length)) for length in lengths]
        expected = content[start : start + sum(lengths)]
        assert head.read(start, pieces, from_file(path)) == len(expected)
        assert b"".join(pieces)[: len(expected)] == expected
    assert direct_bytes[0] == head.most_bytes == min(most_bytes, 10 * MIB), "whole requests"
    assert head.read(0, [memoryview(bytearray(head.most_bytes))], unread) == head.most_bytes


def test_what_the_cache_has_is_not_read_again(tmp_path: Path, direct_bytes: list[int]) -> None:
    path = tmp_path / "shard"
    path.write_bytes(content := os.urandom(SIZE))
    target = bytearray(3 * MIB)
    assert HeadStart(path, SIZE).read(7, [memoryview(target)], from_file(path)) == len(target)
    assert (bytes(target), direct_bytes) == (content[7 : 7 + len(target)], [])


def test_an_error_is_met_again_by_who_asks(tmp_path: Path) -> None:
    head = HeadStart(tmp_path / "gone", SIZE)
    with pytest.raises(FileNotFoundError):
        head.read(0, [memoryview(bytearray(MIB))], from_file(tmp_path / "gone"))
    content = cold(path := tmp_path / "cut")
    os.truncate(path, 5 * MIB)
    target = bytearray(8 * MIB)
    assert HeadStart(path, SIZE).read(0, [memoryview(target)], from_file(path)) == 5 * MIB
    assert bytes(target[: 5 * MIB]) == content[: 5 * MIB]


# ---------------------------------------------------------------- in a restore


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shards that were begun early."""
    found: list[str] = []
    original = StepReader.begin

    def begin(self: StepReader, shard: str) -> None:
        found.append(shard)
        original(self, shard)

    monkeypatch.setattr(StepReader, "begin", begin)
    return found


def _values(num_tensors: int = 6) -> dict[str, torch.Tensor]:
    return {f"model.{number}": torch.randn(700, 1000) for number in range(num_tensors)}  # 2.7 MiB each


def _checkpointer(root: Path) -> Checkpointer:
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "local_dir": root / "local", "asynchronous": False}
    return Checkpointer(str(root / "shared"), keep_last=2, report=lambda line: None, **options)


def _saved(root: Path) -> dict[str, torch.Tensor]:
    """What was saved; its files are on the disk alone."""
    values = _values()
    checkpoints = _checkpointer(root)
    checkpoints.save(1, values, {})
    checkpoints.close()
    for path in (root / "shared").rglob("*"):
        if path.is_file():
            forget(path)
    return values


def _restored(root: Path, wanted: dict[str, torch.Tensor], *, may_spoil: bool = True) -> None:
    checkpoints = _checkpointer(root)
    info = checkpoints.latest(lambda: wanted, may_spoil=may_spoil)
    assert info is not None
    checkpoints.load(info, wanted)
    checkpoints.close()


def test_a_rank_that_needs_its_whole_shard_reads_no_byte_of_it_twice(
    tmp_path: Path, direct_bytes: list[int], begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "MOST_BYTES", 6 * MIB)
    saved = _saved(tmp_path)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    _restored(tmp_path, wanted)
    assert all(torch.equal(wanted[name], values) for name, values in saved.items())
    needed = sum(tensor.nbytes for tensor in wanted.values())
    assert begun == ["__0_0.distcp"]
    assert 6 * MIB in direct_bytes
    # What is left of a range beside the first bytes may be so little that the page cache reads it.
    assert needed - disk._LEAST_BYTES <= sum(direct_bytes) <= 1.1 * needed


def test_what_others_of_the_host_read_too_is_not_begun(tmp_path: Path, begun: list[str]) -> None:
    saved = _saved(tmp_path)
    _restored(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in saved.items()}, may_spoil=False)
    assert begun == [], "it is read into the page cache for whoever loads it then"
    reader = StepReader(LocalDestination(tmp_path / "shared"), _manifest(tmp_path), lambda what, read: read())
    restore._begin_early(reader, saved, 1)
    assert begun == [], "another rank's shard"
    restore._begin_early(reader, saved, 0)
    assert begun == ["__0_0.distcp"]
    restorer = _checkpointer(tmp_path)._restorer
    restorer._group.world_size = 2  # as where one rank's checkpoint is replicated over two
    restorer._needed(1, reader, saved, straight=True)
    assert begun == ["__0_0.distcp"], "what is for two ranks was begun by one"
    reader.end_begun()


def _manifest(root: Path) -> Manifest:
    return parse_manifest(next((root / "shared").rglob(MANIFEST)).read_bytes())


def test_no_room_for_a_head_start_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    saved = _saved(tmp_path)
    monkeypatch.setattr(reading, "HeadStart", refused)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    _restored(tmp_path, wanted)
    assert all(torch.equal(wanted[name], values) for name, values in saved.items())


def test_what_lies_as_it_was_saved_is_not_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = _values(3) | {"optim.step": torch.tensor(7.0), "optim.none": torch.zeros(0, 4)}
    checkpoints = _checkpointer(tmp_path)
    checkpoints.save(1, saved, {})
    checkpoints.close()
    planned: list[str] = []
    original = DefaultLoadPlanner.set_up_planner

    def set_up(self: DefaultLoadPlanner, tensors: dict[str, torch.Tensor], *others: Any, **options: Any) -> None:
        planned.extend(tensors)
        original(self, tensors, *others, **options)

    monkeypatch.setattr(DefaultLoadPlanner, "set_up_planner", set_up)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    _restored(tmp_path, wanted)
    assert all(torch.equal(wanted[name], values) for name, values in saved.items())
    assert set(planned) == {"optim.none"}


def test_what_is_being_read_is_asked_for_behind_some_others() -> None:
    manifest: Any = SimpleNamespace(step=1, world_size=1, files=[])
    reader = StepReader(SimpleNamespace(uri="", folder=lambda name: None), manifest, None)  # type: ignore[arg-type]
    ranges = [Range(file, start, start + 5, ()) for file in ("a", "b") for start in range(0, 40, 5)]
    assert reader.in_turn(ranges) == ranges
    reader._begun = "b", SimpleNamespace(most_bytes=12)  # type: ignore[assignment]
    found = reader.in_turn(ranges)
    assert sorted(found, key=ranges.index) == ranges
    assert [ranges.index(one) for one in found[:8]] == [0, 1, 2, 8, 9, 10, 3, 4]


def test_who_needs_less_than_a_shard_begins_nothing(tmp_path: Path, begun: list[str]) -> None:
    saved = _saved(tmp_path)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in list(saved.items())[:5]}
    _restored(tmp_path, wanted)
    assert all(torch.equal(wanted[name], saved[name]) for name in wanted)
    assert begun == []


def test_a_flipped_bit_among_the_first_bytes_is_found(tmp_path: Path, direct_bytes: list[int]) -> None:
    _saved(tmp_path)
    (shard,) = (tmp_path / "shared").rglob("__0_0.distcp")
    with shard.open("r+b") as file:
        file.seek(3 * MIB)
        byte = file.read(1)[0]
        file.seek(3 * MIB)
        file.write(bytes([byte ^ 1]))
    forget(shard)
    checkpoints = _checkpointer(tmp_path)
    told: list[str] = []
    checkpoints._restorer._report = told.append
    with pytest.raises(SpoiledError):
        checkpoints.latest(_values, may_spoil=True)
    assert len(told) == 2 and "__0_0.distcp is altered" in told[0]
    assert direct_bytes, "it was read early"
    checkpoints.close()
