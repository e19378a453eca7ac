"""Which settings are tried next: all of a grid, drawn at random, or as Optuna's sampler learns from the trials before.

Each is a pure function of its seed and of what trials have told, so that who goes on with a sweep proposes what the one
before would have.
"""

import importlib.util
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainyard.errors import InputError
from trainyard.operate.sweep.space import Axis, grid, text_of

SearchKind = Literal["grid", "random", "optuna"]
MOST_TRIALS = 1000


@dataclass(frozen=True)
class Told:
    """A trial that has been proposed."""

    overrides: tuple[str, ...]
    value: float | None
    """Of the sweep's metric, at its last step; None while it runs, or where it told none."""


class Search(Protocol):
    """Proposes trials."""

    num_trials: int
    """In all."""
    is_fixed: bool
    """Whether what is proposed does not depend on what was told: then all can be checked before the first runs."""

    def propose(self, number: int, told: Sequence[Told]) -> tuple[str, ...]:
        """Overrides of trial `number`, from 0; `told`: of the trials before it."""


class _Grid:
    is_fixed = True

    def __init__(self, axes: Sequence[Axis], num_trials: int | None) -> None:
        found, size = grid(axes), math.prod(len(axis.choices) for axis in axes)
        self.num_trials = size if num_trials is None else min(num_trials, size)
        # No more are kept than may be made: of many axes nobody could hold them all.
        self._all = list(itertools.islice(found, min(self.num_trials, MOST_TRIALS)))

    def propose(self, number: int, told: Sequence[Told]) -> tuple[str, ...]:
        """See Search."""
        return self._all[number]


class _Random:
    is_fixed = True

    def __init__(self, axes: Sequence[Axis], num_trials: int, seed: int) -> None:
        self._axes, self._seed, self.num_trials = axes, seed, num_trials

    def propose(self, number: int, told: Sequence[Told]) -> tuple[str, ...]:
        """See Search."""
        source = random.Random(f"{self._seed}-{number}")
        return tuple(f"{axis.key}={axis.draw(source)}" for axis in self._axes)


class _Optuna:
    """Optuna's tree-structured Parzen estimator; less of the metric is better."""

    is_fixed = False

    def __init__(self, axes: Sequence[Axis], num_trials: int, seed: int) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise InputError(
                "--search optuna: the package optuna isn't installed; pip install 'optuna==5.0.0', or use "
                "--search random"
            )
        self._axes, self._seed, self.num_trials = axes, seed, num_trials

    def propose(self, number: int, told: Sequence[Told]) -> tuple[str, ...]:
        """See Search. The study is made anew from what was told: nothing but the sweep's own record has to be kept."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        spread: dict[str, Any] = {axis.key: self._distribution(axis) for axis in self._axes}
        sampler = optuna.samplers.TPESampler(seed=self._seed + number)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        for one in told:
            if one.value is None:
                continue
            # Infinity too, of trials that diverged or were no job: one told as failed would be left out, and the
            # sampler would go there again and again.
            params = self._params(one.overrides)
            study.add_trial(optuna.trial.create_trial(params=params, distributions=spread, value=one.value))
        params = study.ask(spread).params
        return tuple(f"{axis.key}={_text(axis, params[axis.key])}" for axis in self._axes)

    @staticmethod
    def _distribution(axis: Axis) -> Any:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if axis.kind is None:
            return CategoricalDistribution(axis.choices)
        if axis.kind == "int":
            return IntDistribution(int(axis.low), int(axis.high))
        return FloatDistribution(axis.low, axis.high, log=axis.kind == "log")

    def _params(self, overrides: Sequence[str]) -> Mapping[str, Any]:
        given = dict(one.split("=", 1) for one in overrides)
        return {axis.key: _value(axis, given[axis.key]) for axis in self._axes}


def _text(axis: Axis, value: Any) -> str:
    return text_of(value) if isinstance(value, float) else str(value)


def _value(axis: Axis, text: str) -> Any:
    if axis.kind is None:
        return text
    # A number that was rounded to the text may lie a hair outside.
    return int(text) if axis.kind == "int" else min(max(float(text), axis.low), axis.high)


def search_of(kind: SearchKind, axes: Sequence[Axis], *, num_trials: int | None, seed: int) -> Search:
    """The search of a sweep; InputError where what it needs is missing."""
    if kind == "grid":
        found: Search = _Grid(axes, num_trials)
    elif num_trials is None:
        raise InputError(f"--search {kind}: needs --trials N, how many trials it may make")
    else:
        found = _Random(axes, num_trials, seed) if kind == "random" else _Optuna(axes, num_trials, seed)
    if found.num_trials > MOST_TRIALS:
        raise InputError(f"--over: makes {found.num_trials} trials, more than {MOST_TRIALS}; give --trials N, or fewer")
    return found
