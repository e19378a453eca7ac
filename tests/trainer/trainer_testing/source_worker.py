"""One rank: builds a job's model under one strategy after the other, and prints how much private memory each took.

`python -m trainer_testing.source_worker '[{"strategy": ..., "job": {...}}, ...]'`; only rank 0 prints.
`--one-of 4` before them makes it one of four ranks of which the others are not there.
"""

import ctypes
import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer.leaving import leave
from trainer.models.build import outline_model
from trainer.runtime import Runtime, distributed_runtime
from trainer.strategies import build_strategy

from trainer_testing.tiny import VOCAB_SIZE, tiny_job

MARK = "MEMORY "
_M_MMAP_THRESHOLD = -3  # malloc.h


def private_bytes() -> int:
    """Memory of this process that is no view of a file."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the kernel names no RssAnon")


class Peak:
    """The largest growth of private memory while the block runs."""

    def __enter__(self) -> "Peak":
        self.num_bytes = 0
        self._start = private_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self.num_bytes = max(self.num_bytes, private_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        # What the block leaves is often the most, and it may have come since the last look.
        self.num_bytes = max(self.num_bytes, private_bytes() - self._start)


def give_back() -> None:
    """Returns freed memory to the system, and has it get every later tensor from there, so that its growth is seen."""
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    # glibc raises the limit by itself, and then gives new tensors what freed ones have left.
    assert libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024) == 1
    libc.malloc_trim(0)


@contextmanager
def one_of(world_size: int) -> Iterator[Runtime]:
    """A rank in the middle, whose process group sends nothing: building a model is each rank's own work."""
    rank = world_size // 2
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield Runtime(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            device=torch.device("cpu"),
            control_group=dist.new_group(),
        )
    finally:
        dist.destroy_process_group()


def measure(cases: list[dict[str, Any]], runtime: Runtime, *, prints: bool) -> None:
    """Each case; the first one also imports everything, so it is run to be forgotten."""
    for case in cases:
        job = tiny_job(case["strategy"], runtime.world_size, **case["job"])
        give_back()
        with Peak() as peak:
            model = outline_model(job, vocab_size=VOCAB_SIZE)
            num_elements = sum(parameter.numel() for parameter in model.parameters())
            loaded = peak.num_bytes
            # The moments of AdamW, made at the end, are counted too.
            strategy = build_strategy(job, model=model, runtime=runtime)
        strategy.close()
        del strategy, model
        if prints:
            seen = {"elements": num_elements, "loaded": loaded, "peak": peak.num_bytes}
            print(MARK + json.dumps(seen), flush=True)


def main(arguments: list[str]) -> None:
    cases = json.loads(arguments[-1])
    if arguments[0] == "--one-of":
        with one_of(int(arguments[1])) as runtime:
            measure(cases, runtime, prints=True)
    else:
        with distributed_runtime(cpu_threads=1) as runtime:
            measure(cases, runtime, prints=runtime.is_first)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
    leave(0)
