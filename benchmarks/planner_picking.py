"""What it costs to run the layout that a search would take, of those that somebody measured of the same job.

The rule is the search's own (`as_fast_simplest_first`): of layouts whose estimates lie closer together than an estimate
can tell, the simplest, with the micro-batch that is estimated to be its fastest.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainyard.planner.configurations import SAME_SPEED, as_fast_simplest_first
from trainyard.spec.job import ParallelismSpec

MOST_APART = 10
"""Percent from which on pairs are counted together."""


@dataclass(frozen=True)
class Measured:
    """One layout and micro-batch of a job: seconds (or a multiple of them) by measurement and by estimate."""

    job: tuple[str, ...]
    layout: ParallelismSpec
    measured: float
    predicted: float


def layout_of_row(row: dict[str, str]) -> ParallelismSpec:
    """The columns tp, pp and dp of a row."""
    return ParallelismSpec(tensor=int(row["tp"]), pipeline=int(row["pp"]), data_replicate=int(row["dp"]))


def taken(found: Iterable[Measured], gain: float = SAME_SPEED) -> Measured:
    """What the search would take of one job's."""
    return as_fast_simplest_first(found, lambda item: item.predicted, lambda item: item.layout, gain)[0]


def picking(found: Iterable[Measured], name: str) -> str:
    """The line on what was lost: by the search's rule, and, with no regard to what is simple, by the estimate alone."""
    jobs = [members for members in _by_job(found) if len(members) > 1]
    if not jobs:
        return f"{name}: no job with more than one layout"
    lost, bare = (sorted(_lost(members, gain) for members in jobs) for gain in (SAME_SPEED, 0.0))
    good = sum(one <= 0.03 for one in lost) / len(lost)
    return (
        f"{name}: picking as the search does, {len(jobs)} jobs: {statistics.median(lost):.1%} slower than the best "
        f"measured one (median), {statistics.fmean(lost):.1%} (mean), {lost[-1]:.1%} (worst); at most 3% slower in "
        f"{good:.0%}; by the fastest estimate alone {statistics.fmean(bare):.1%} (mean)"
    )


def _by_job(found: Iterable[Measured]) -> list[list[Measured]]:
    jobs: dict[tuple[str, ...], list[Measured]] = {}
    for item in found:
        jobs.setdefault(item.job, []).append(item)
    return list(jobs.values())


def _lost(members: list[Measured], gain: float) -> float:
    return taken(members, gain).measured / min(item.measured for item in members) - 1


def told_apart(found: Iterable[Measured], name: str) -> Iterator[str]:
    """Of pairs of one job's layouts, by how far apart their estimates are, in how many the faster one is known."""
    right: dict[int, list[bool]] = {}
    for members in _by_job(found):
        for one, other in itertools.combinations(members, 2):
            if one.layout != other.layout:
                fast, slow = sorted((one, other), key=lambda item: item.predicted)
                step = int((slow.predicted / fast.predicted - 1) / 0.01)
                right.setdefault(min(step, MOST_APART), []).append(fast.measured < slow.measured)
    words = [
        f"{sum(found) / len(found):.0%} of {len(found)} ({_percents(step)})" for step, found in sorted(right.items())
    ]
    if words:
        yield f"{name}: of two layouts, by what their estimates differ, the faster one is known: {', '.join(words)}"


def _percents(step: int) -> str:
    return f"{step}% and more" if step == MOST_APART else f"{step} to {step + 1}%"
