"""Who is stopped early: pure functions of the trials' curves, compared at equal steps. Less of the metric is better."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from trainyard.operate.course import value_at
from trainyard.spec.words import counted

StopRule = Literal["halving", "median", "none"]
Curves = Mapping[int, Mapping[int, float]]
"""Trial -> step -> metric; steps that a trial has not made it has not."""

REDUCTION = 3
"""Of the trials that reach a rung the best third goes on, and rungs are three times as far apart: the factor for which
ASHA's authors found little to choose between 2 and 4 (Li et al. 2020, arXiv:1810.05934)."""
LEAST_TO_COMPARE = 2
"""Other trials at the same step without which nobody is judged."""
GRACE = 0.1
"""Share of a job's steps before which nobody is judged: warm-up tells little."""


def rungs(num_steps: int) -> list[int]:
    """Steps at which successive halving judges, ascending: num_steps / 3, / 9, ..., none within the first GRACE."""
    found, at = [], num_steps // REDUCTION
    while at >= max(1, GRACE * num_steps):
        found.append(at)
        at //= REDUCTION
    return found[::-1]


def halving(running: Sequence[int], curves: Curves, num_steps: int) -> dict[int, str]:
    """Asynchronous successive halving: a trial is judged at the highest rung that it has reached, among all that have.

    Whoever comes to a rung first goes on until others have come, too.
    """
    found: dict[int, str] = {}
    ladder = rungs(num_steps)
    for trial in running:
        last = max(curves.get(trial, {}), default=0)
        rung = max((step for step in ladder if step <= last), default=None)
        if rung is None:
            continue
        values = _values_at(curves, rung)
        if trial not in values:
            continue  # its curve begins after the rung: it resumed, or its first lines were lost
        kept = -(-len(values) // REDUCTION)
        rank = sum(value < values[trial] for value in values.values())
        if len(values) > 1 and rank >= kept:
            found[trial] = f"{values[trial]:.4g} at step {rung}: {_place(rank)} of {len(values)}, the best {kept} go on"
    return found


def median(running: Sequence[int], curves: Curves, num_steps: int) -> dict[int, str]:
    """The median rule (Golovin et al. 2017, Google Vizier): a trial whose best value so far is worse than the median of
    the others' running means at the same step is stopped. Nobody is while nobody knows how many steps a job has (0)."""
    found: dict[int, str] = {}
    if num_steps < 1:
        return found
    for trial in running:
        own = curves.get(trial, {})
        last = max(own, default=0)
        if not own or last < max(1, int(GRACE * num_steps)):
            continue
        others = [
            statistics.fmean(value for step, value in curve.items() if step <= last)
            for number, curve in curves.items()
            if number != trial and curve and max(curve) >= last and min(curve) <= last
        ]
        if len(others) < LEAST_TO_COMPARE:
            continue
        best, middle = min(own.values()), statistics.median(others)
        if best > middle:
            found[trial] = (
                f"best {best:.4g} up to step {last}, the median of {counted(len(others), 'other')} is {middle:.4g}"
            )
    return found


def losers(rule: StopRule, running: Sequence[int], curves: Curves, num_steps: int) -> dict[int, str]:
    """Running trials that the rule stops, each with the figures that decided."""
    if rule == "none":
        return {}
    return (halving if rule == "halving" else median)(running, curves, num_steps)


def _values_at(curves: Curves, step: int) -> dict[int, float]:
    """Of the trials that have come so far."""
    reached = {number: curve for number, curve in curves.items() if max(curve, default=0) >= step}
    values = {number: value_at(curve, step) for number, curve in reached.items()}
    return {number: value for number, value in values.items() if value is not None}


def _place(rank: int) -> str:
    return f"place {rank + 1}"
