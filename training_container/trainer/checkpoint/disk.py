"""Reads and writes of this host's files: through the page cache, or past it for bytes that are wanted once.

A read through the cache costs the processor 0.4 to 0.7 ms a MiB (pages are found, filled, copied, and pushed out by
later ones), past it 0.2 with the copy, and a block's hash less than 0.1: on the cores of benchmarks/results, by their
load. So where ranks have hardly more cores than they restore with, this lets a restore keep closer to the disk, and a
save take less from the training beside it. Bytes that the cache has already come out of it.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

_MOST_BUFFERS = 1024
"""Of one system call: Linux's IOV_MAX."""
_ALIGNMENT = 4096
"""Of places in the file and in memory: the largest logical block that disks have, and a page."""
REQUEST_BYTES = 2 << 20
"""Of one request to the disk, and a page of memory of the next size: what is asked for it lies in a row there."""
_NUM_LOOKS = 3
"""Pages of a range that tell whether the cache has it: first, middle, last. Wrong costs time alone."""
_LEAST_BYTES = 1 << 20
"""Below this the rounding to whole blocks, and the wait without readahead, cost more than the cache does."""

_Bytes = npt.NDArray[np.uint8]
_own = threading.local()
_libc = ctypes.CDLL(None, use_errno=True)


def read_at(descriptor: int, start: int, memory: Sequence[memoryview]) -> int:
    """Fill `memory`, one after the other, from byte `start` of an open file; how many bytes: fewer where it ends."""
    at, left = start, [view for view in memory if view]
    os.posix_fadvise(descriptor, start, sum(map(len, left)), os.POSIX_FADV_WILLNEED)
    while left:
        num_read = os.preadv(descriptor, left[:_MOST_BUFFERS], at)
        if num_read == 0:
            break
        at += num_read
        num_whole = 0
        while num_whole < len(left) and len(left[num_whole]) <= num_read:
            num_read -= len(left[num_whole])
            num_whole += 1
        left = left[num_whole:]
        if num_read:
            left[0] = left[0][num_read:]
    return at - start


def read_once_at(path: Path, start: int, memory: Sequence[memoryview]) -> int:
    """Fill `memory`, one after the other, from byte `start` of a file; how many bytes: fewer where it ends. OSError.

    Past the page cache where it doesn't have them already, and the file lies on a disk of this machine.
    """
    descriptor = opened_direct(path)
    if descriptor is None:
        with path.open("rb", buffering=0) as file:
            return read_at(file.fileno(), start, memory)
    try:
        if is_worth_it(descriptor, start, sum(map(len, memory))):
            try:
                return _read_aligned(descriptor, start, memory)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some say it as late as this
                    raise
        _make_plain(descriptor)
        return read_at(descriptor, start, memory)
    finally:
        os.close(descriptor)


def opened_direct(path: Path) -> int | None:
    """A file for direct reads; None where there are none. OSError."""
    if _is_elsewhere(path.stat()):
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # that is how a file system says that it knows no such reads
            raise
        return None


def _is_elsewhere(there: os.stat_result) -> bool:
    """Network and stacked file systems (Lustre, NFS, overlay) have no device of their own, but caches they need."""
    return os.major(there.st_dev) == 0


def _make_plain(descriptor: int) -> bool:
    """What goes on through the page cache from now on; False: it does already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


class Sink(Protocol):
    """What is written from its beginning to its end."""

    def write(self, content: memoryview, /) -> object:
        """Takes all of it."""


@contextlib.contextmanager
def written_once(path: Path, num_bytes: int, *, durable: bool) -> Iterator[Sink]:
    """A new file of about so many bytes. OSError.

    `durable`: it is on the disk when the block ends, past the page cache where that can be. Otherwise it is in the page
    cache, for who reads it next.
    """
    if durable and num_bytes >= _LEAST_BYTES and (descriptor := _opened_direct(path)) is not None:
        try:
            file = _DirectFile(descriptor)
            yield file
            file.finish()
        finally:
            os.close(descriptor)
        return
    with path.open("wb") as plain:
        yield plain
        if durable:
            plain.flush()
            os.fsync(plain.fileno())


def _opened_direct(path: Path) -> int | None:
    """A new file for direct writes; None where there are none."""
    if _is_elsewhere(path.parent.stat()):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


class _DirectFile:
    """A file that was opened for direct writes: whole blocks of it, out of one huge page."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._page = _huge_page()
        self._num_kept = self._num_written = 0

    def write(self, content: memoryview, /) -> None:
        """Copies it, and writes what fills the page."""
        left = np.frombuffer(content, dtype=np.uint8)
        while len(left):
            room = self._page[self._num_kept : self._num_kept + len(left)]
            np.copyto(room, left[: len(room)])
            left = left[len(room) :]
            self._num_kept += len(room)
            if self._num_kept == len(self._page):
                self._put(self._num_kept)
                self._num_kept = 0

    def finish(self) -> None:
        """The rest; the file has its size then, and is on the disk."""
        num_bytes = self._num_written + self._num_kept
        whole = _rounded_up(self._num_kept)
        self._page[self._num_kept : whole] = 0
        self._put(whole)
        os.ftruncate(self._descriptor, num_bytes)
        os.fsync(self._descriptor)

    def _put(self, num_bytes: int) -> None:
        left = self._page[:num_bytes]
        while len(left):
            try:
                num_written = os.pwrite(self._descriptor, left.data, self._num_written)
            except OSError as error:
                # Some file systems open a file for such writes and then know none, of this size or at all.
                if error.errno != errno.EINVAL or not _make_plain(self._descriptor):
                    raise
                continue
            self._num_written += num_written
            left = left[num_written:]


def is_worth_it(descriptor: int, start: int, num_bytes: int) -> bool:
    """Whether bytes of a file that are wanted once are better read past the page cache."""
    there = os.fstat(descriptor)
    if num_bytes < _LEAST_BYTES or start + num_bytes > there.st_size:
        return False
    return not _is_cached(descriptor, start, num_bytes)


def _is_cached(descriptor: int, start: int, num_bytes: int) -> bool:
    """Whether the page cache seems to have these bytes; asking reads none (preadv2's RWF_NOWAIT begins to)."""
    first = start - start % mmap.PAGESIZE
    length = start + num_bytes - first
    try:
        return _are_pages_there(descriptor, first, length)
    except (OSError, ValueError):  # it was cut meanwhile, or its file system maps none: a plain read tells
        return True


def _are_pages_there(descriptor: int, first: int, length: int) -> bool:
    state = ctypes.c_ubyte()
    with mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=first) as mapped:
        seen = np.frombuffer(mapped, dtype=np.uint8)
        address = int(seen.ctypes.data)
        del seen  # a mapping that is looked at can't be closed
        for look in range(_NUM_LOOKS):
            at = (length - 1) * look // (_NUM_LOOKS - 1)
            page = ctypes.c_void_p(address + at - at % mmap.PAGESIZE)
            if _libc.mincore(page, ctypes.c_size_t(1), ctypes.byref(state)) != 0 or not state.value & 1:
                return False
    return True


def _read_aligned(descriptor: int, start: int, memory: Sequence[memoryview]) -> int:
    """`read_at` of a file that was opened for direct reads: whole blocks of it, to memory at whole blocks."""
    scratch = _scratch()
    left = [np.frombuffer(view, dtype=np.uint8) for view in memory if view]
    at, end = start - start % _ALIGNMENT, start + sum(map(len, left))
    num_requests = -(-(end - at) // (REQUEST_BYTES - _ALIGNMENT))
    most = _rounded_up((end - at) // num_requests)  # all alike: a short last one would wait as long
    num_filled = 0
    while at < end:
        most = min(most, _rounded_up(end - at))
        num_read = os.preadv(descriptor, [scratch[:most].data], at)
        wanted = scratch[max(0, start - at) : min(num_read, end - at)]
        left = scattered(wanted, left)
        num_filled += len(wanted)
        if num_read == 0 or (num_read < most and num_read % _ALIGNMENT):
            break  # the file's end
        at += num_read
    return num_filled


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def scattered(content: _Bytes, targets: list[_Bytes]) -> list[_Bytes]:
    """Copies `content` to the targets, one after the other; what is still to be filled. Holds no lock meanwhile."""
    at = number = 0
    while at < len(content):
        target = targets[number]
        count = min(len(target), len(content) - at)
        np.copyto(target[:count], content[at : at + count])
        at += count
        if count < len(target):
            return [target[count:], *targets[number + 1 :]]
        number += 1
    return targets[number:]


def _scratch() -> _Bytes:
    """This thread's own."""
    scratch: _Bytes | None = getattr(_own, "scratch", None)
    if scratch is None:
        scratch = _own.scratch = _huge_page()
    return scratch


def _huge_page() -> _Bytes:
    """One huge page that is there now, and not in the midst of a read."""
    page = huge_pages(REQUEST_BYTES)
    page[:: mmap.PAGESIZE] = 0
    return page


def huge_pages(num_bytes: int) -> _Bytes:
    """Memory in huge pages, for whole requests to a disk; it occupies none until it is used.

    A request to the disk lists its memory piece by piece, one for every page that doesn't lie beside the one before. Of
    512 pages it becomes several requests, which a virtual machine's disk feels (`benchmarks/direct_reads.py`).
    """
    memory = mmap.mmap(-1, num_bytes + REQUEST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them gives small pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    first = -whole.ctypes.data % REQUEST_BYTES
    return whole[first : first + num_bytes]
