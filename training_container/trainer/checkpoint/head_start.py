"""The first bytes of a file, read while it is still planned which of them are wanted.

A restore's plan takes processor time and the ranks' word to each other, all of it before the first byte is asked for:
10 to 50 ms, in which a fast disk reads a hundred MiB.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trainer.checkpoint.disk import REQUEST_BYTES, huge_pages, is_worth_it, opened_direct, scattered

MOST_BYTES = 32 << 20
"""Of memory that it takes, until it is dropped."""


class HeadStart:
    """Reads a file's beginning past the page cache, in a thread of its own."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """`num_bytes`: of the file; `MOST_BYTES` of them at most are read.

        Reads nothing where the page cache has them, or the file system is better read through it (`disk`).
        """
        self._path = path
        # A direct read fills whole blocks of memory, and the file's last block may not be whole.
        self.most_bytes = min(num_bytes, MOST_BYTES) // REQUEST_BYTES * REQUEST_BYTES
        self._content = huge_pages(self.most_bytes)
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._read, name="head-start", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # Who asks for the rest meets the same error, and knows whom to tell.
        with contextlib.suppress(OSError):
            descriptor = opened_direct(self._path)
            if descriptor is None:
                return
            try:
                if is_worth_it(descriptor, 0, self.most_bytes):
                    # All at once: after each of several calls it would wait for the interpreter, which plans.
                    self._num_bytes = os.preadv(descriptor, [self._content.data], 0)
            finally:
                os.close(descriptor)

    def wait(self) -> None:
        """Returns when its memory isn't written to any more."""
        self._thread.join()

    def read(
        self, start: int, memory: Sequence[memoryview], read_rest: Callable[[int, Sequence[memoryview]], int]
    ) -> int:
        """Fill `memory`, one after the other, from byte `start` on; how many bytes: fewer where the file ends.

        `read_rest` does the same where this has nothing. Any number of threads may call it.
        """
        if start >= self.most_bytes:
            return read_rest(start, memory)
        self.wait()
        left = [np.frombuffer(view, dtype=np.uint8) for view in memory if view]
        there = self._content[start : self._num_bytes][: sum(map(len, left))]
        left = scattered(there, left)
        return len(there) + (read_rest(start + len(there), [view.data for view in left]) if left else 0)
