"""Reads of this host's files: through the page cache, or past it for bytes that are wanted once.

A read through the cache costs the processor 0.4 to 0.7 ms a MiB (pages are found, filled, copied, and pushed out by
later ones), past it 0.2 to 0.3 with the copy, and a block's hash less than 0.1: on the cores of benchmarks/results, by
their load. So where ranks have hardly more cores than they restore with, this lets a restore keep closer to the disk.
Bytes that the cache has already, as after a restart in place, come out of it.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

_MOST_BUFFERS = 1024
"""Of one system call: Linux's IOV_MAX."""
_ALIGNMENT = 4096
"""Of places in the file and in memory: the largest logical block that disks have, and a page."""
_SCRATCH_BYTES = 2 << 20
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
    with path.open("rb", buffering=0) as file:
        if _is_worth_it(file.fileno(), start, sum(map(len, memory))):
            try:
                direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
                try:
                    return _read_aligned(direct, start, memory)
                finally:
                    os.close(direct)
            except OSError as error:
                if error.errno != errno.EINVAL:  # that is how a file system says that it knows no such reads
                    raise
        return read_at(file.fileno(), start, memory)


def _is_worth_it(descriptor: int, start: int, num_bytes: int) -> bool:
    there = os.fstat(descriptor)
    # Network and stacked file systems (Lustre, NFS, overlay) have no device of their own, and caches that they need.
    if os.major(there.st_dev) == 0 or num_bytes < _LEAST_BYTES or start + num_bytes > there.st_size:
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
    num_requests = -(-(end - at) // (_SCRATCH_BYTES - _ALIGNMENT))
    most = _rounded_up((end - at) // num_requests)  # all alike: a short last one would wait as long
    num_filled = 0
    while at < end:
        most = min(most, _rounded_up(end - at))
        num_read = os.preadv(descriptor, [scratch[:most].data], at)
        wanted = scratch[max(0, start - at) : min(num_read, end - at)]
        left = _scattered(wanted, left)
        num_filled += len(wanted)
        if num_read == 0 or (num_read < most and num_read % _ALIGNMENT):
            break  # the file's end
        at += num_read
    return num_filled


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _scattered(content: _Bytes, targets: list[_Bytes]) -> list[_Bytes]:
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
    """This thread's own: one huge page.

    A request to the disk lists its memory piece by piece, one for every page that doesn't lie beside the one before. Of
    512 pages it becomes several requests: the disk of a virtual machine brought 0.9 GiB/s to those, 2.4 to one page.
    """
    scratch: _Bytes | None = getattr(_own, "scratch", None)
    if scratch is None:
        memory = mmap.mmap(-1, 2 * _SCRATCH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them gives small pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, dtype=np.uint8)
        first = -whole.ctypes.data % _SCRATCH_BYTES
        scratch = _own.scratch = whole[first : first + _SCRATCH_BYTES]
        scratch[:: mmap.PAGESIZE] = 0  # its pages now, not in the midst of a read
    return scratch
