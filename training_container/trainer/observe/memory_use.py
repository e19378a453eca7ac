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
        """The window ends with this step, for the second time where the job went back behind it."""
        while self._floors and self._floors[-1][0] >= step:
            self._floors.pop()
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


def host_bytes(status: str) -> tuple[float, float]:
    """(bytes resident, bytes the kernel cannot drop) by the text of /proc/PID/status (man proc_pid_status)."""
    kibibytes = dict.fromkeys(("VmRSS", "RssAnon", "RssShmem", "VmSwap"), 0.0)
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in kibibytes:
            kibibytes[name] = float(value.split()[0])
    resident = kibibytes.pop("VmRSS")
    return resident * 1024, sum(kibibytes.values()) * 1024


class MemoryUse:
    """Host and device memory of this process, sampled once a step."""

    def __init__(self, device: torch.device) -> None:
        self._has_device = device.type == "cuda"
        # Kept open: opening it costs more than reading it.
        self._status = os.open("/proc/self/status", os.O_RDONLY) if sys.platform == "linux" else None
        self._histories = {"host": FloorHistory()} | ({"device": FloorHistory()} if self._has_device else {})
        self._host_peak = 0.0
        self._told: dict[str, float] = {}

    def sample(self) -> None:
        """After a step: reads counters, waits for nothing."""
        resident, own = self._host_bytes()
        self._host_peak = max(self._host_peak, resident)
        self._histories["host"].sample(own)
        if self._has_device:
            self._histories["device"].sample(float(torch.cuda.memory_allocated()))

    def _host_bytes(self) -> tuple[float, float]:
        """Resident set, and what of this process the kernel cannot drop (Linux; elsewhere 0: nothing is claimed).

        Views of files (torch's own libraries, cached shards) come and go with the memory that others need: where it is
        short they would hide a leak, and a first touch of them would look like one.
        """
        if self._status is None:
            return 0.0, 0.0
        return host_bytes(os.pread(self._status, 16_384, 0).decode("ascii", "replace"))

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
