"""A rank's sign of life for the host's entrypoint: a small file that is rewritten in place. Imports no torch.

The file's first number is the last finished step, the second counts the beats. A clock is the reader's alone: what
counts is that the content changes, so that a clock that jumps is no hang.
"""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE_VARIABLE = "TRAINYARD_HEARTBEAT"
"""Path of this rank's file; where it is not set, nobody listens and a beat does nothing."""


@dataclass(frozen=True)
class Beat:
    """What a rank last said."""

    step: int
    """Last step that it finished, 0 before the first."""
    number: int
    """Beats so far."""


class _Heart:
    """This process's own."""

    def __init__(self) -> None:
        path = os.environ.get(FILE_VARIABLE)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644) if path else None
        self._beat = Beat(0, 0)

    def beat(self, step: int | None) -> None:
        if self._descriptor is None:
            return
        self._beat = Beat(self._beat.step if step is None else step, self._beat.number + 1)
        # One write of one length: a reader sees the old or the new one.
        os.pwrite(self._descriptor, f"{self._beat.step:012d} {self._beat.number:012d}\n".encode(), 0)


@cache
def _heart() -> _Heart:
    return _Heart()


def beat(step: int | None = None) -> None:
    """Say that this rank is alive, and which step it has just finished (None: still at work on the next)."""
    _heart().beat(step)


def read_beat(path: Path) -> Beat | None:
    """A rank's last beat; None before the first."""
    try:
        step, number = path.read_text(encoding="ascii").split()
    except (FileNotFoundError, ValueError):
        return None
    return Beat(int(step), int(number))
