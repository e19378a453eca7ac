"""How much a rank's GPU is used while it trains, whether its clocks are held back, and which errors it has.

The driver is asked from a thread of its own, every few seconds whatever the step does: asked at the end of a step, it
would tell of ends of steps alone. Where there is no GPU, or no driver that answers, there are no figures.
"""

import socket
import statistics
import threading
from collections import Counter
from dataclasses import dataclass

import torch

from trainer.observe.nvml import NvmlGpu, Reading, open_gpu
from trainer.speech import say

EVERY_SECONDS = 2.0
"""A question takes the driver well under a millisecond; a window of steps has many of these."""
MOST_LINES = 10
"""Of one Xid: a program that errs without end must not fill the log."""


@dataclass(frozen=True)
class GpuShares:
    """One GPU's window of steps; what its driver doesn't tell is None."""

    utilization: float | None
    """Mean."""
    memory_peak: float | None
    """Of its memory, by whomever it is taken."""
    held_back: float | None
    """Share of the time with clocks kept down by heat, the power brake or the hardware."""


class GpuUse:
    """Samples one GPU until it is closed."""

    def __init__(self, gpu: NvmlGpu, *, rank: int, every_seconds: float = EVERY_SECONDS) -> None:
        self._gpu, self._every_seconds = gpu, every_seconds
        self._where = f"rank={rank} host={socket.gethostname()}"
        self._readings: list[Reading] = []
        self._told: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-use", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.is_set():
            if self._gpu.tells_xids:
                self._tell(self._gpu.wait_for_xid(self._every_seconds))
            else:
                self._closed.wait(self._every_seconds)
            reading = self._gpu.read()
            with self._lock:
                self._readings.append(reading)

    def _tell(self, xid: int | None) -> None:
        """A line, which scripts/runbooks/bad_node reads: in a container the kernel's own lines are not to be seen."""
        if xid is None:
            return
        self._told[xid] += 1
        if self._told[xid] <= MOST_LINES:
            say(f"gpu {self._where} xid={xid}" + (", and no more of these" if self._told[xid] == MOST_LINES else ""))

    def take(self) -> GpuShares:
        """Of the time since it was last asked; where that was too short for a sample, of this moment."""
        with self._lock:
            readings, self._readings = self._readings, []
        readings = readings or [self._gpu.read()]
        used = [one.utilization for one in readings if one.utilization is not None]
        memory = [one.memory for one in readings if one.memory is not None]
        held = [one.is_held_back for one in readings if one.is_held_back is not None]
        return GpuShares(
            statistics.fmean(used) if used else None,
            max(memory, default=None),
            statistics.fmean(held) if held else None,
        )

    def close(self) -> None:
        """Ends the sampling, within the time between two questions."""
        self._closed.set()


def gpu_use_of(device: torch.device, *, rank: int) -> GpuUse | None:
    """The sampler of a rank's device; None where there is nobody to ask."""
    if device.type != "cuda":
        return None
    gpu = open_gpu(str(torch.cuda.get_device_properties(device).uuid))
    if gpu is None:
        say(f"gpu rank={rank}: its driver answers no questions (NVML): its use and its errors are not told")
        return None
    return GpuUse(gpu, rank=rank)
