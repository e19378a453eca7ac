"""A rank's sign of life for the host's entrypoint: a small file that is rewritten in place. Imports no torch.

The file's first number is the last finished step, the second counts the beats, the third is 1 while the rank may be
silent for long. A clock is the reader's alone: what counts is that the content changes, so that a clock that jumps is
no hang.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    is_patient: bool = False
    """What it is at may take as long as the job's first step."""


class _Heart:
    """This process's own."""

    def __init__(self) -> None:
        path = os.environ.get(FILE_VARIABLE)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644) if path else None
        self._beat = Beat(0, 0)

    def beat(self, step: int | None = None, *, is_patient: bool | None = None) -> None:
        if self._descriptor is None:
            return
        if is_patient is not None:
            self._beat = replace(self._beat, is_patient=is_patient)
        step = self._beat.step if step is None else step
        self._beat = replace(self._beat, step=step, number=self._beat.number + 1)
        # One write of one length: a reader sees the old or the new one.
        line = f"{self._beat.step:012d} {self._beat.number:012d} {self._beat.is_patient:d}\n"
        os.pwrite(self._descriptor, line.encode(), 0)


@cache
def _heart() -> _Heart:
    return _Heart()


def beat(step: int | None = None) -> None:
    """Say that this rank is alive, and which step it has just finished (None: still at work on the next)."""
    _heart().beat(step)


@contextmanager
def patiently() -> Iterator[None]:
    """Around what is compiled on its way, as the first step is: no beat may come for as long."""
    _heart().beat(is_patient=True)
    yield
    _heart().beat(is_patient=False)  # not after an error: then the rank ends


def read_beat(path: Path) -> Beat | None:
    """A rank's last beat; None before the first."""
    try:
        step, number, is_patient = path.read_text(encoding="ascii").split()
    except (FileNotFoundError, ValueError):
        return None
    return Beat(int(step), int(number), is_patient == "1")
