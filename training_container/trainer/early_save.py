"""SIGUSR1 ("save and go on") to a rank that does not listen yet: noted, for its first step to answer. Imports no torch.

Left alone the signal ends a process, and a rank's imports take seconds at every start and restart.
"""

import signal
from types import FrameType

_noted: list[int] = []


def note_early_saves() -> None:
    """Note SIGUSR1 from now on, until somebody else listens (main thread only)."""
    signal.signal(signal.SIGUSR1, _note)


def take_early_save() -> bool:
    """Whether it came; asked again, whether it came since."""
    came = bool(_noted)
    _noted.clear()
    return came


def _note(number: int, _: FrameType | None) -> None:
    _noted.append(number)
