"""A run played event by event: work, saves on their way, failures, recoveries. It checks goodput's closed forms."""

import math
import random
from dataclasses import dataclass

from trainyard.planner.goodput import Saving


@dataclass(frozen=True)
class Played:
    """One run."""

    seconds: float
    """By the clock, to its end."""
    num_failures: int
    num_saves: int
    """Whole ones."""


def play(work: float, saving: Saving, *, seed: int, most_failures: int = 1_000_000) -> Played:
    """One run of `work` seconds of training; failures are memoryless, and strike while it recovers too.

    A save begins after each interval of work, stalls it, and is whole `saving.save` seconds later; a failure throws the
    run back to the newest whole one. The last piece of work needs no save. ValueError where the run never ends.
    """
    draw = random.Random(seed)
    clock, done = 0.0, 0.0
    whole, pending = 0.0, (math.inf, 0.0)  # work in the newest whole save; (when the next one is whole, its work)
    failure = _next(draw, clock, saving)
    failures = saves = 0
    while True:
        if failures > most_failures:
            raise ValueError("this run never ends")
        # To the end of this piece of work, and of the stall behind it.
        piece = min(saving.interval, work - done)
        is_last = done + piece >= work - 1e-9
        end = clock + piece + (0.0 if is_last else saving.stall)
        if failure >= end:
            clock, done = end, done + piece
            if is_last:
                return Played(clock, failures, saves)
            if pending[0] <= clock:
                whole, saves = pending[1], saves + 1
            # One save at a time: it has ended before the next begins, as the interval is no shorter.
            pending = (clock + saving.save, done)
            continue
        clock = failure
        if pending[0] <= clock:
            whole, saves = pending[1], saves + 1
        pending, done, failures = (math.inf, 0.0), whole, failures + 1
        clock, failure, again = _recovered(draw, clock, saving, most_failures - failures)
        failures += again


def _next(draw: random.Random, clock: float, saving: Saving) -> float:
    if not math.isfinite(saving.between_failures):
        return math.inf
    return clock + draw.expovariate(1 / saving.between_failures)


def _recovered(draw: random.Random, clock: float, saving: Saving, most: int) -> tuple[float, float, int]:
    """(when the next step begins, when the next failure comes, failures on the way): each begins the recovery anew.

    ValueError after more than `most` of them.
    """
    again = 0
    while True:
        if again > most:
            raise ValueError("this run never ends")
        failure = _next(draw, clock, saving)
        if failure >= clock + saving.recovery:
            return clock + saving.recovery, failure, again
        clock, again = failure, again + 1


def mean_seconds(work: float, saving: Saving, *, num_runs: int, seed: int = 0) -> tuple[float, float]:
    """(mean, its standard error) over runs of seeds that follow each other."""
    times = [play(work, saving, seed=seed + index).seconds for index in range(num_runs)]
    mean = sum(times) / num_runs
    variance = sum((value - mean) ** 2 for value in times) / max(1, num_runs - 1)
    return mean, math.sqrt(variance / num_runs)
