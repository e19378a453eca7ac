"""One rank: builds a job's model under one strategy after the other, and prints how much private memory each took.

`python -m trainer_testing.source_worker '[{"strategy": ..., "job": {...}}, ...]'`; only rank 0 prints.
"""

import ctypes
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from trainer.leaving import leave
from trainer.models.build import outline_model
from trainer.runtime import distributed_runtime
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


def allocate_freely() -> None:
    """After `give_back`, where the process goes on: new tensors may be given what freed ones have left again."""
    ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most to which glibc raises it by itself


def main(cases: list[dict[str, Any]]) -> None:
    """Each case; the first one also imports everything, so it is run to be forgotten."""
    with distributed_runtime(cpu_threads=1) as runtime:
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
            if runtime.is_first:
                seen = {"elements": num_elements, "loaded": loaded, "peak": peak.num_bytes}
                print(MARK + json.dumps(seen), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
    leave(0)
