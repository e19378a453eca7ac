"""Work that one process does while others wait for it: a lock that shows how the work gets on. No torch.

A waiter's sign of life follows the worker's, who may be on another host: while that one gets on, waiting is no hang;
where it stands still, those who wait for it are as silent as it is.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.heartbeat import beat

AtWork = Callable[[], None]
"""Called by who works, whenever a piece is done."""

_LOOK_SECONDS = 0.05


@contextmanager
def exclusive(lock: Path, *, wait: bool = True) -> Iterator[AtWork | None]:
    """Holds the lock; None where another process does and there is no waiting."""
    with lock.open("a") as handle:  # to open it for writing anew would look like work
        seen = os.fstat(handle.fileno()).st_mtime_ns
        while not _is_taken(handle.fileno()):
            if not wait:
                yield None
                return
            time.sleep(_LOOK_SECONDS)
            now = os.fstat(handle.fileno()).st_mtime_ns
            if now != seen:
                beat()
            seen = now

        def at_work() -> None:
            os.utime(handle.fileno())
            beat()

        yield at_work


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
