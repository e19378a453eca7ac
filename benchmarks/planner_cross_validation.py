"""Cross-validation of the planner's fitted constants: each source is predicted with constants fitted without it.

It knows neither memory nor time: a case is a measured value and a function from constants to a prediction.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Constants = TypeVar("Constants")
Grids = Mapping[str, Sequence[float]]
"""Values that may be tried for each fitted constant, by field."""

SWEEPS = 2


@dataclass(frozen=True)
class Case(Generic[Constants]):
    """One measured value."""

    group: str
    """The source that is left out as a whole."""
    measured: float
    predict: Callable[[Constants], float | None]


@dataclass(frozen=True)
class Held(Generic[Constants]):
    """A case with its prediction by constants that never saw its group."""

    case: Case[Constants]
    predicted: float | None
    constants: Constants


def loss(cases: Sequence[Case[Constants]], constants: Constants) -> float:
    """Mean over groups of the median |log(predicted / measured)|: a large source counts no more than a small one."""
    groups: dict[str, list[float]] = {}
    for case in cases:
        predicted = case.predict(constants)
        if predicted is not None and predicted > 0 and case.measured > 0:
            groups.setdefault(case.group, []).append(abs(math.log(predicted / case.measured)))
    return statistics.fmean(statistics.median(errors) for errors in groups.values()) if groups else math.inf


def refit(cases: Sequence[Case[Constants]], constants: Constants, grids: Grids) -> Constants:
    """The constants of the least loss by descent over one grid at a time, from the middle of each grid.

    It starts nowhere near the shipped values, so that they can't lend it what it should not know.
    """
    fitted: Any = constants
    for name, values in grids.items():
        fitted = dataclasses.replace(fitted, **{name: values[len(values) // 2]})
    for _ in range(SWEEPS):
        for name, values in grids.items():
            tried = [dataclasses.replace(fitted, **{name: value}) for value in values]
            fitted = min(tried, key=lambda one: loss(cases, one))
    result: Constants = fitted
    return result


def held_out(cases: Sequence[Case[Constants]], constants: Constants, grids: Grids) -> list[Held[Constants]]:
    """Every case predicted by constants that were fitted without its group, in the order of `cases`."""
    found: dict[str, Constants] = {}
    for group in dict.fromkeys(case.group for case in cases):
        found[group] = refit([case for case in cases if case.group != group], constants, grids)
    return [Held(case, case.predict(found[case.group]), found[case.group]) for case in cases]
