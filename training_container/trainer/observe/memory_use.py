"""A rank's memory over its steps: peaks, and growth that does not end (a leak)."""

import os
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch

NUM_WINDOWS = 12
"""Windows that are looked back on."""
WARM_UP_WINDOWS = 1
"""Left out: caches and allocators fill up first."""
LEAST_WINDOWS = 5
LEAST_BYTES = 32 * 2**20
LEAST_SHARE = 0.01
"""Growth below both of these is no leak worth a line."""
LEAST_RISES = 0.8
"""Share of windows that must lie above the one before."""


@dataclass(frozen=True)
class Growth:
    """Memory that grows and grows."""

    bytes_per_step: float
    """Theil-Sen slope: the median of all pairwise slopes, which single jumps don't move."""
    first_step: int
    last_step: int
    total_bytes: float


class FloorHistory:
    """The least use in each window of steps: what a step needs for itself goes away again, a leak stays."""

    def __init__(self) -> None:
        self._floors: deque[tuple[int, float]] = deque(maxlen=NUM_WINDOWS)
        self._num_windows = 0
        self._floor = float("inf")

    def sample(self, num_bytes: float) -> None:
        """One step's use."""
        self._floor = min(self._floor, num_bytes)

    def close_window(self, step: int) -> None:
        """The window ends with this step."""
        self._num_windows += 1
        if self._num_windows > WARM_UP_WINDOWS:
            self._floors.append((step, self._floor))
        self._floor = float("inf")

    def growth(self) -> Growth | None:
        """Growth over the windows so far; None where there is none to speak of."""
        return growth(self._floors)


def growth(floors: Sequence[tuple[int, float]]) -> Growth | None:
    """(step, bytes) by step -> growth, where it is steady, and large enough to matter."""
    if len(floors) < LEAST_WINDOWS:
        return None
    rises = [after[1] > before[1] for before, after in pairwise(floors)]
    slope = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(floors, 2))
    (first_step, first), (last_step, last) = floors[0], floors[-1]
    is_large = last - first > max(LEAST_BYTES, LEAST_SHARE * first)
    if slope <= 0 or not is_large or sum(rises) < LEAST_RISES * len(rises):
        return None
    return Growth(slope, first_step, last_step, last - first)


class MemoryUse:
    """Host and device memory of this process, sampled once a step."""

    def __init__(self, device: torch.device) -> None:
        self._has_device = device.type == "cuda"
        # Kept open: opening it costs more than reading it.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._histories = {"host": FloorHistory()} | ({"device": FloorHistory()} if self._has_device else {})
        self._host_peak = 0.0
        self._told: dict[str, float] = {}

    def sample(self) -> None:
        """After a step: reads two counters, waits for nothing."""
        host = self._host_bytes()
        self._host_peak = max(self._host_peak, host)
        self._histories["host"].sample(host)
        if self._has_device:
            self._histories["device"].sample(float(torch.cuda.memory_allocated()))

    def _host_bytes(self) -> float:
        """Resident set (Linux; elsewhere 0, so that nothing is claimed)."""
        if self._statm is None:
            return 0.0
        return float(os.pread(self._statm, 128, 0).split()[1]) * self._page_bytes

    def close_window(self, step: int) -> dict[str, float]:
        """Peaks since the window before, in bytes: `host_peak`, and of a GPU `allocated_peak`, `reserved_peak`."""
        peaks = {"host_peak": self._host_peak}
        self._host_peak = 0.0
        if self._has_device:
            peaks["allocated_peak"] = float(torch.cuda.max_memory_allocated())
            peaks["reserved_peak"] = float(torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
        for history in self._histories.values():
            history.close_window(step)
        return peaks

    def news_of_growth(self) -> dict[str, Growth]:
        """What grows, by `host` and `device`; each is told when it is found, and again when it has doubled."""
        news = {}
        for name, history in self._histories.items():
            found = history.growth()
            if found is not None and found.total_bytes >= 2 * self._told.get(name, 0.0):
                news[name] = found
                self._told[name] = found.total_bytes
        return news
