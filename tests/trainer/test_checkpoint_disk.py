"""Bytes that are wanted once come off a local disk past its page cache, the same ones, and hardly more of them."""

import errno
import fcntl
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from trainer.checkpoint import Checkpointer, disk

SIZE = (9 << 20) + 123


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Bytes of each read past the cache; skips where the disk of `tmp_path` knows none."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(2 << 20))
    forget(probe)
    found: list[int] = []
    original = disk._read_aligned

    def counted(descriptor: int, start: int, memory: Sequence[memoryview]) -> int:
        real = os.preadv

        def preadv(descriptor: int, buffers: Sequence[memoryview], at: int) -> int:
            num_read = real(descriptor, buffers, at)
            found.append(num_read)
            return num_read

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            return original(descriptor, start, memory)

    monkeypatch.setattr(disk, "_read_aligned", counted)
    disk.read_once_at(probe, 0, [memoryview(bytearray(2 << 20))])
    if not found:
        pytest.skip(f"the disk of {tmp_path} has no reads past the page cache")
    found.clear()
    return found


def forget(path: Path) -> None:
    """Make the disk, not the page cache, answer for the file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(path: Path, start: int, lengths: Sequence[int]) -> tuple[int, bytes]:
    """How many bytes were read into pieces of these lengths, and all of the pieces."""
    pieces = [memoryview(bytearray(length)) for length in lengths]
    return disk.read_once_at(path, start, pieces), b"".join(pieces)


def test_any_range_is_what_the_file_has_and_no_page_is_kept(tmp_path: Path, asked: list[int]) -> None:
    path, content = tmp_path / "shard", os.urandom(SIZE)
    path.write_bytes(content)
    mib = 1 << 20
    for start, lengths in itertools.product(
        (0, 1, 4096, 70_001), ([mib], [mib - 1, 2], [5, 0, 3 * mib + 7, 4096], [7 * mib], [8 * mib + 123])
    ):
        forget(path)
        asked.clear()
        wanted = sum(lengths)
        assert read(path, start, lengths) == (wanted, content[start : start + wanted])
        assert wanted <= sum(asked) <= wanted + 2 * 4096
        with path.open("rb") as file:
            assert not disk._is_cached(file.fileno(), start, wanted)


def test_what_the_cache_has_comes_out_of_it(tmp_path: Path, asked: list[int]) -> None:
    path, content = tmp_path / "shard", os.urandom(SIZE)
    path.write_bytes(content)
    assert read(path, 11, [5 << 20]) == (5 << 20, content[11 : 11 + (5 << 20)])
    assert asked == []


def test_where_a_file_ends_fewer_bytes_come(tmp_path: Path) -> None:
    path, content = tmp_path / "shard", os.urandom(SIZE)
    path.write_bytes(content)
    forget(path)
    for start in (SIZE - (3 << 20), SIZE - 5, SIZE, SIZE + 9000):
        num_read, found = read(path, start, [4 << 20])
        assert (num_read, found[:num_read]) == (max(0, SIZE - start), content[start:])
    with path.open("rb") as file:  # and where it was cut after its length was looked at
        target = bytearray(4 << 20)
        assert disk._read_aligned(file.fileno(), SIZE - (3 << 20), [memoryview(target)]) == 3 << 20
        assert bytes(target[: 3 << 20]) == content[SIZE - (3 << 20) :]


def test_a_file_system_without_such_reads_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = tmp_path / "shard", os.urandom(SIZE)
    path.write_bytes(content)
    forget(path)

    def refused(*_: object) -> int:
        raise OSError(number, "no")

    monkeypatch.setattr(disk, "is_worth_it", lambda *_: True)
    monkeypatch.setattr(disk, "_read_aligned", refused)
    number = errno.EINVAL
    assert read(path, 5, [2 << 20]) == (2 << 20, content[5 : 5 + (2 << 20)])
    number = errno.EIO
    with pytest.raises(OSError, match="no"):
        read(path, 5, [2 << 20])


def test_a_cold_checkpoint_is_verified_past_the_cache_too(tmp_path: Path, asked: list[int]) -> None:
    said: list[str] = []
    checkpoints = Checkpointer(
        str(tmp_path / "job"),
        rank=0,
        world_size=1,
        local_dir=tmp_path / "local",
        keep_last=9,
        asynchronous=False,
        report=said.append,
    )
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        state = {name: torch.randn(1000, 1000, generator=generator) for name in "abc"}
        checkpoints.save(step, state | {"half": state["a"][:7].bfloat16()}, {})
    shards = sorted((tmp_path / "job").rglob("*.distcp"))
    for spoils in (False, True):
        if spoils:
            with shards[1].open("r+b") as file:
                file.seek(shards[1].stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
        for shard in shards:
            forget(shard)
        asked.clear()
        tensors = {name: torch.zeros(1000, 1000) for name in "abc"} | {"half": torch.zeros(7, 1000)}
        info = checkpoints.latest(lambda tensors=tensors: tensors, may_spoil=True)  # type: ignore[misc]
        assert info is not None and info.step == (1 if spoils else 2)
        checkpoints.load(info, tensors)
        generator = torch.Generator().manual_seed(info.step)
        for name in "abc":
            assert torch.equal(tensors[name], torch.randn(1000, 1000, generator=generator)), name
        assert torch.equal(tensors["half"], tensors["a"][:7].bfloat16().float())
        assert sum(asked) > 10_000_000
    assert "step=2 skipped: __0_0.distcp is altered" in said[-1]


def test_a_file_that_is_cut_before_the_look_at_its_pages_is_read_plainly(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(bytes(100))
    with path.open("rb", buffering=0) as file:
        assert disk._is_cached(file.fileno(), 0, 2 << 20), "a mapping of more than there is is refused"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Bytes of each write past the cache; skips where the disk of `tmp_path` knows none."""
    found: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, content: memoryview, at: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            found.append(len(content))
        return real(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with disk.written_once(tmp_path / "probe", 2 << 20, durable=True) as file:
        file.write(memoryview(bytes(2 << 20)))
    if not found:
        pytest.skip(f"the disk of {tmp_path} has no writes past the page cache")
    found.clear()
    return found


def test_what_is_written_past_the_cache_is_what_was_given(tmp_path: Path, written: list[int]) -> None:
    mib = 1 << 20
    for lengths in ([mib], [mib - 1], [3, 5 * mib + 7, 0, 4096], [2 * mib, 2 * mib], [7 * mib + 1, 1]):
        written.clear()
        path, pieces = tmp_path / "shard", [os.urandom(length) for length in lengths]
        with disk.written_once(path, sum(lengths) + 9, durable=True) as file:
            for piece in pieces:
                file.write(memoryview(piece))
        num_bytes = sum(lengths)
        assert num_bytes <= sum(written) < num_bytes + 4096
        with path.open("rb", buffering=0) as there:
            assert not disk._is_cached(there.fileno(), 0, num_bytes)
        assert path.read_bytes() == b"".join(pieces), lengths


def test_what_somebody_reads_next_and_what_is_small_goes_through_the_cache(tmp_path: Path, written: list[int]) -> None:
    for name, num_bytes, durable in (("staged", 3 << 20, False), ("small", 1000, True)):
        with disk.written_once(tmp_path / name, num_bytes, durable=durable) as file:
            file.write(memoryview(bytes(num_bytes)))
        assert (tmp_path / name).stat().st_size == num_bytes
    assert written == []


def test_a_file_system_without_such_writes_is_written_all_the_same(
    tmp_path: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(5 << 20)
    real_open, real_write, refused = os.open, os.pwrite, list[int]()

    def no_direct_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, mode)

    def no_direct_write(descriptor: int, content: memoryview, at: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and at:
            refused.append(at)
            raise OSError(errno.EINVAL, "no")
        return real_write(descriptor, content, at)

    for name, changed in (("open", no_direct_open), ("pwrite", no_direct_write)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, changed)
            with disk.written_once(tmp_path / name, len(content), durable=True) as file:
                file.write(memoryview(content))
        assert (tmp_path / name).read_bytes() == content
    assert refused == [2 << 20], "once it was refused, nothing is asked past the cache any more"


def test_a_full_disk_is_told_as_such(tmp_path: Path, written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No space"), disk.written_once(tmp_path / "a", 3 << 20, durable=True) as file:
        file.write(memoryview(bytes(3 << 20)))
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_what_is_asked_of_the_disk_lies_in_one_huge_page_where_there_are_some() -> None:
    scratch = disk._scratch()
    address = int(scratch.ctypes.data)
    assert len(scratch) == disk.REQUEST_BYTES and address % len(scratch) == 0
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    (flags,) = (
        re.search(r"^VmFlags:(.*)$", entry, re.M)
        for found in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) .*?(?=^[0-9a-f]+-[0-9a-f]+ |\Z)", smaps, re.M | re.S)
        if int(found[1], 16) <= address < int(found[2], 16)
        for entry in [found[0]]
    )
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no huge pages")
    assert flags is not None and " hg" in flags[1], "nobody asked for huge pages"
