"""Where the time of a step goes, measured: phases that exclude each other and sum to the whole."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from trainer.observe import waits

PHASES = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
_HOST_PHASES = frozenset({"checkpoint"})
"""Measured by the host's time on a GPU too: it waits for the GPU before."""


class StepClock:
    """Splits the time between two rows into phases; the rest is `other`, so that phases always sum to the whole.

    A row's time begins where the row before ended: a checkpoint taken after step s shows up in the row of s + 1.
    On a GPU the phases are measured by events on its stream, without making it wait: what the host does while the GPU
    still works (it reads the next batch, and waits for other ranks' message) costs no time, and is in no phase.

    `communication` is what is exposed of it: the time in which computing stood still for other ranks, be it for their
    data or for them to arrive. It is taken out of the phase in which it fell. What overlaps with computing costs no
    time and is not in it. A checkpoint's agreements belong to the checkpoint. How waits are seen:
    `trainer.observe.waits`.
    """

    def __init__(self, device: torch.device, *, world_size: int, show_ranges: bool = False) -> None:
        """`show_ranges`: phases are NVTX ranges too (record_function on CPU), for Nsight Systems."""
        self._uses_events = device.type == "cuda"
        self._show_ranges = show_ranges
        self._phase: str | None = None
        self._excludes = False
        self._restart()
        waits.listen(self if world_size > 1 else None)

    def _restart(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._wait_events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._excluded_seconds = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the block's time to `phase`."""
        assert phase in self._seconds
        outer, self._phase = self._phase, phase
        with torch.profiler.record_function(f"trainyard:{phase}") if self._show_ranges else nullcontext():
            if self._uses_events and self._show_ranges:
                torch.cuda.nvtx.range_push(phase)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if self._uses_events and phase not in _HOST_PHASES:
                begin, end = _event(), _event()
                begin.record()
                yield
                end.record()
                self._events.append((phase, begin, end))
            else:
                started = time.perf_counter()
                yield
                self._seconds[phase] += time.perf_counter() - started
            if self._uses_events and self._show_ranges:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]  # as above
        self._phase = outer

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for other ranks: its time goes to `communication` instead of the phase in which it falls."""
        phase = self._phase or "other"
        if self._excludes or phase == "checkpoint":
            yield
        elif self._uses_events:
            # The stream stands still from the end of what was queued before the wait to the end of what is waited for.
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._wait_events.append((phase, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._move_to_communication(phase, time.perf_counter() - started)

    def waited(self, seconds: float) -> None:
        """A wait of the backward pass that something else measured."""
        if not self._excludes:
            self._move_to_communication("backward", seconds)

    def _move_to_communication(self, phase: str, seconds: float) -> None:
        self._seconds["communication"] += seconds
        if phase != "other":  # which is what remains
            self._seconds[phase] -= seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Keeps the block's time out of every row: validation is not part of a step."""
        started = time.perf_counter()
        self._excludes = True
        yield
        self._excludes = False
        self._excluded_seconds += time.perf_counter() - started

    def finish_row(self) -> tuple[float, dict[str, float]]:
        """(seconds since the row before, the same by phase); starts the next row."""
        for events in (self._events, self._wait_events):
            if events:
                events[-1][2].synchronize()
        for phase, begin, end in self._events:
            self._seconds[phase] += begin.elapsed_time(end) / 1000.0
        for phase, begin, end in self._wait_events:
            self._move_to_communication(phase, begin.elapsed_time(end) / 1000.0)
        # Two clocks may differ by microseconds, so no part is below nothing, nor the whole less than its parts.
        breakdown = {phase: max(0.0, seconds) for phase, seconds in self._seconds.items()}
        known = sum(breakdown.values())
        total = max(time.perf_counter() - self._started - self._excluded_seconds, known)
        breakdown["other"] = total - known
        self._restart()
        return total, breakdown


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
