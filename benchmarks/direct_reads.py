"""How should a restore read a disk? Past the page cache into a huge page or 512 small ones, or through it, in turns.

    python benchmarks/direct_reads.py [--mib 512] [--rounds 8] [--scratch DIR]

A file is read to its end by as many readers as there are cores, 2 MiB at a time, each read copied to where it belongs:
memory of small pages, as tensors have it. Before each turn the file is written back and dropped from the page cache;
another way begins each round.
Prints medians, their ratios and the machine, and keeps no file; exit code 1 where the huge page is not the fastest.
What `trainer.checkpoint.disk` says of huge pages is this.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine
import numpy as np
import numpy.typing as npt

_READ_BYTES = 2 << 20
_Bytes = npt.NDArray[np.uint8]


def _pages(num_bytes: int, advice: int) -> _Bytes:
    """Memory that begins where a huge page would, and is there."""
    memory = mmap.mmap(-1, num_bytes + _READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    whole = np.frombuffer(memory, dtype=np.uint8)
    first = -whole.ctypes.data % _READ_BYTES
    pages = whole[first : first + num_bytes]
    pages[:: mmap.PAGESIZE] = 0
    return pages


def _reader(path: Path, target: _Bytes, flags: int, advice: int) -> Callable[[ThreadPoolExecutor], None]:
    """Reads all of the file into `target`, by way of a buffer a thread."""
    own = threading.local()
    descriptor = os.open(path, os.O_RDONLY | flags)

    def read(at: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = _pages(_READ_BYTES, advice)
        assert os.preadv(descriptor, [own.buffer.data], at) == _READ_BYTES
        np.copyto(target[at : at + _READ_BYTES], own.buffer)

    def read_all(pool: ThreadPoolExecutor) -> None:
        list(pool.map(read, range(0, len(target), _READ_BYTES)))

    return read_all


def main() -> int:
    """Prints the result as JSON; 1 when the huge page is not the fastest way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="of the file, in steps of 2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--scratch", type=Path, help="a folder on the disk that is measured; default: a temporary one")
    options = parser.parse_args()
    num_bytes = max(1, (options.mib << 20) // _READ_BYTES) * _READ_BYTES
    with tempfile.TemporaryDirectory(prefix="direct-reads-", dir=options.scratch) as folder:
        path = Path(folder, "file")
        with path.open("wb") as file:
            for _ in range(num_bytes // _READ_BYTES):
                file.write(os.urandom(_READ_BYTES))
        target = _pages(num_bytes, mmap.MADV_NOHUGEPAGE)
        ways = {
            "huge page": _reader(path, target, os.O_DIRECT, mmap.MADV_HUGEPAGE),
            "small pages": _reader(path, target, os.O_DIRECT, mmap.MADV_NOHUGEPAGE),
            "page cache": _reader(path, target, 0, mmap.MADV_HUGEPAGE),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            names = list(ways)
            for number in range(options.rounds + 1):
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    machine.drop_from_page_cache(path)
                    begin = time.perf_counter()
                    ways[name](pool)
                    if number:  # the first turn makes the buffers
                        seconds[name].append(time.perf_counter() - begin)
    best = seconds["huge page"]
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "gib_per_second": {
            name: round(num_bytes / 2**30 / statistics.median(all_), 2) for name, all_ in seconds.items()
        },
        "time_to_huge_page": {
            name: round(statistics.median(one / mine for one, mine in zip(all_, best, strict=True)), 2)
            for name, all_ in seconds.items()
        },
    }
    print(json.dumps(result, indent=1))
    return 0 if min(result["time_to_huge_page"].values()) >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
