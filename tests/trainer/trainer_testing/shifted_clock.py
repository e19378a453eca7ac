"""A wall clock that somebody sets: `time.time` goes by what a file says. Monotonic clocks don't, as in life."""

import time
from pathlib import Path

FILE = "clock_shift"
"""In the folder of faults: seconds to add."""
true_time = time.time


def install(folder: Path) -> None:
    """From now on, in this process."""
    path = folder / FILE

    def shifted() -> float:
        try:
            return true_time() + float(path.read_text())
        except (OSError, ValueError):
            return true_time()

    time.time = shifted
