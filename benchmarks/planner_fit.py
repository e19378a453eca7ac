"""How the planner's time constants are fitted, and what they are worth on a source that the fit never saw.

    python benchmarks/planner_accuracy.py --rows DIR --dump FILE --cross-validate

Each source is predicted with constants fitted to the others, from the same first guesses, within the same bounds; two
files of the same program on the same machines are left out together. A source counts by the square root of its rows; a
wild row counts little. First guesses are not unseen: some were chosen with these scores in view, and that of
`proxy_peer_seconds` is what AWS's rows alone once gave.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard.planner.predict import Question
from trainyard.planner.time_constants import Constants
from trainyard.planner.timing import step_time

GUESSES: dict[str, tuple[float, float, float]] = {
    "ceiling_volta": (0.80, 0.5, 0.9),
    "ceiling_ampere": (0.80, 0.6, 0.87),
    "ceiling_hopper": (0.72, 0.55, 0.82),
    "ceiling_blackwell": (0.70, 0.5, 0.8),
    "ceiling_hopper_torch": (0.65, 0.5, 0.8),
    "fp8_ceiling_hopper": (0.65, 0.45, 0.75),
    "fp8_ceiling_blackwell": (0.65, 0.45, 0.8),
    "fp4_ceiling": (0.60, 0.3, 0.8),
    "half_waves": (0.20, 0.05, 1.5),
    "half_depth": (200.0, 20.0, 500.0),
    "flash_ampere": (0.50, 0.3, 0.75),
    "ring_speed": (0.75, 0.4, 1.0),
    "flash_hopper_native": (0.50, 0.3, 0.7),
    "flash_blackwell": (0.45, 0.25, 0.7),
    "half_head": (20.0, 4.0, 100.0),
    "attention_matrix_passes": (3.0, 0.3, 10.0),
    "passes_fused": (2.0, 0.7, 8.0),
    "passes_compiled": (1.5, 0.7, 4.0),
    "passes_early": (1.5, 0.8, 5.0),
    "fp8_cast_passes": (1.5, 0.2, 4.0),
    "fp8_cast_passes_torch": (2.0, 0.2, 6.0),
    "launch_seconds": (600e-6, 100e-6, 2000e-6),
    "launch_moe_seconds": (3000e-6, 500e-6, 8000e-6),
    "launch_exposed": (0.3, 0.02, 1.0),
    "moe_passes": (5.0, 2.0, 40.0),
    "moe_gain_per_year": (0.2, 0.1, 0.4),
    "imbalance": (1.1, 1.001, 1.25),
    "tensor_exposed_megatron": (0.5, 0.15, 1.0),
    "tensor_exposed_torch": (1.0, 0.4, 1.2),
    "expert_exposed": (0.6, 0.2, 1.0),
    "send_exposed": (0.3, 0.05, 1.0),
    "data_overlap": (0.8, 0.5, 1.0),
    "data_exposed": (0.05, 0.005, 0.2),
    "sharding_exposed": (0.15, 0.01, 1.0),
    "unaligned_speed": (0.5, 0.15, 1.0),
    "proxy_peer_seconds": (15e-6, 2e-6, 40e-6),
    "optimizer_passes": (1.5, 1.0, 4.0),
    "jitter_per_doubling": (0.002, 0.0005, 0.03),
}
"""Constant: (first guess, least, most)."""

NOT_FITTED = ("bandwidth_efficiency", "flash2_ampere")
"""Constants set by hand: trainyard/planner/timing.py says by what."""

MOST_CASES = 20
"""Of one source, evenly spread over its rows: enough to fit, and a refit stays a matter of seconds."""

ROBUST = 0.08
"""Relative errors beyond this count linearly, not squared."""

PRIOR = 0.2
"""What a constant's logarithm pays for its distance from the first guess: what the rows can't tell stays near it. By
how well left-out sources are met: without it, those with experts were off twice as far."""

ITERATIONS = 10

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class TimeCase:
    """A measured run."""

    source: str
    question: Question
    measured_seconds: float
    """Of one step."""
    fitted: bool = True
    """Whether it may be fitted to; otherwise it is only scored."""
    left_out_with: str = ""
    """Sources of one word here are left out together: what one shows of a constant, the other would show as well."""

    def log_error(self, constants: Constants) -> float:
        """Natural logarithm of predicted over measured."""
        question = self.question
        time = step_time(question.shape, question.layout, question.device, question.links, constants)
        return math.log(time.total / self.measured_seconds)


def _thinned(cases: Sequence[TimeCase]) -> list[TimeCase]:
    found: dict[str, list[TimeCase]] = {}
    for case in cases:
        if case.fitted:
            found.setdefault(case.source, []).append(case)
    return [case for group in found.values() for case in group[:: max(1, math.ceil(len(group) / MOST_CASES))]]


def _with(values: Vector) -> Constants:
    changed = {name: float(math.exp(value)) for name, value in zip(GUESSES, values, strict=True)}
    return dataclasses.replace(Constants(), **changed)


def _residuals(cases: Sequence[TimeCase], weights: Vector, values: Vector) -> Vector:
    constants = _with(values)
    errors = np.array([case.log_error(constants) for case in cases])
    bent = np.sign(errors) * np.sqrt(2 * ROBUST * (np.sqrt(errors**2 + ROBUST**2) - ROBUST))
    guesses = np.log(np.array([guess for guess, _, _ in GUESSES.values()]))
    return np.concatenate([weights * bent, PRIOR * (values - guesses)])


def _weights(cases: Sequence[TimeCase], chosen: Sequence[TimeCase]) -> Vector:
    """Of each chosen case: its source's share by the square root of all its rows, over those chosen of it."""
    rows = Counter(case.source for case in cases if case.fitted)
    kept = Counter(case.source for case in chosen)
    return np.array([(rows[case.source] ** 0.5 / kept[case.source]) ** 0.5 for case in chosen])


def fit(cases: Sequence[TimeCase]) -> Constants:
    """Constants for these cases: Levenberg-Marquardt over the logarithms, within their bounds."""
    chosen = _thinned(cases)
    weights = _weights(cases, chosen)
    start, least, most = (np.log(np.array(column)) for column in zip(*GUESSES.values(), strict=True))
    values, damping = start.copy(), 0.05
    now = _residuals(chosen, weights, values)
    for _ in range(ITERATIONS):
        slopes = _slopes(chosen, weights, values, now, most)
        uphill, square = slopes.T @ now, slopes.T @ slopes
        # A constant on a bound that the data would have beyond it stays there: the others' steps must not count on it.
        free = ~((values <= least) & (uphill > 0) | (values >= most) & (uphill < 0))
        for _ in range(6):
            step = np.zeros(len(values))
            damped = square[np.ix_(free, free)] + damping * np.diag(np.diag(square)[free] + 1e-4)
            step[free] = np.linalg.solve(damped, -uphill[free])
            tried = np.clip(values + np.clip(step, -0.7, 0.7), least, most)
            after = _residuals(chosen, weights, tried)
            if after @ after < now @ now:
                values, now, damping = tried, after, damping / 3
                break
            damping *= 4
    return _with(values)


def _slopes(chosen: Sequence[TimeCase], weights: Vector, values: Vector, now: Vector, most: Vector) -> Vector:
    """Change of each residual by each constant's logarithm, by differences."""
    slopes = np.empty((len(now), len(values)))
    for index in range(len(values)):
        moved = values.copy()
        moved[index] += 0.02 if values[index] + 0.02 <= most[index] else -0.02
        slopes[:, index] = (_residuals(chosen, weights, moved) - now) / (moved[index] - values[index])
    return slopes


def without_each(cases: Sequence[TimeCase]) -> dict[str, Constants]:
    """By source, constants that never saw it, nor what is left out with it."""
    groups = {case.source: case.left_out_with or case.source for case in cases}
    fitted = {
        group: fit([case for case in cases if groups[case.source] != group]) for group in dict.fromkeys(groups.values())
    }
    return {source: fitted[group] for source, group in groups.items()}


def left_out(cases: Sequence[TimeCase], fitted: Mapping[str, Constants]) -> Iterator[tuple[TimeCase, float]]:
    """Every case with the log error of the constants that never saw its source."""
    for case in cases:
        yield case, case.log_error(fitted[case.source])


def constants_table(cases: Sequence[TimeCase], constants: Constants) -> Iterator[str]:
    """Each constant: fitted, shipped, its bounds and first guess, and how many sources' times it has any part in.

    What one source alone decides stays at its first guess where that is left out, which may itself have seen it.
    """
    yield f"{'constant':26} {'fitted':>10} {'shipped':>10} {'least':>10} {'guess':>10} {'most':>10} {'sources':>8}"
    before = [case.log_error(constants) for case in cases]
    for name, (guess, least, most) in GUESSES.items():
        value = getattr(constants, name)
        moved = dataclasses.replace(constants, **{name: value * (0.98 if math.isclose(value, most) else 1.02)})
        sources = {case.source for case, old in zip(cases, before, strict=True) if case.log_error(moved) != old}
        numbers = (value, getattr(Constants(), name), least, guess, most)
        words = [
            f"on its bound, the {word}"
            for word, bound in (("least", least), ("most", most))
            if math.isclose(value, bound)
        ]
        words += [f"decided by one source: {source[:50]}" for source in sources if len(sources) == 1]
        shown = " ".join(f"{number:10.4g}" for number in numbers)
        yield f"{name:26} {shown} {len(sources):8d}  {'; '.join(words)}".rstrip()
