"""One rank: builds a job's model from a source under one strategy and prints how much private memory that took.

`python -m trainer_testing.source_worker SOURCE STRATEGY`; only rank 0 prints.
"""

import json
import sys
import threading
from pathlib import Path

import torch
from trainer.leaving import leave
from trainer.model import outline_model
from trainer.runtime import distributed_runtime
from trainer.strategies import build_strategy

from trainer_testing.tiny import VOCAB_SIZE, tiny_job

MARK = "MEMORY "


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


def main(small: str, large: str, name: str) -> None:
    """Builds the small model first, which imports everything, then the large one."""
    with distributed_runtime(cpu_threads=1) as runtime:
        for source in (small, large):
            job = tiny_job(name, runtime.world_size, source=source)
            with Peak() as peak:
                model = outline_model(job, vocab_size=VOCAB_SIZE)
                num_elements = sum(parameter.numel() for parameter in model.parameters())
                loaded = peak.num_bytes
                # The moments of AdamW are no part of the source: they are made at the end.
                strategy = build_strategy(job, model=model, runtime=runtime)
            strategy.close()
        if runtime.is_first:
            print(MARK + json.dumps({"elements": num_elements, "loaded": loaded, "peak": peak.num_bytes}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    leave(0)
