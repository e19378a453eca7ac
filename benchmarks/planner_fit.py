"""How the planner's time constants are fitted, and what they are worth on a source that the fit never saw.

    python benchmarks/planner_accuracy.py --rows DIR --dump FILE --cross-validate

Each source is predicted with constants fitted to the others, from the same first guesses, within the same bounds. A
source with many rows counts more than one with few, but not in proportion; a wild row counts little.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainyard.planner.predict import Question
from trainyard.planner.timing import Constants, step_time

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
    "flash_hopper": (0.30, 0.15, 0.5),
    "flash_hopper_native": (0.50, 0.3, 0.7),
    "flash_blackwell": (0.45, 0.25, 0.7),
    "half_head": (20.0, 4.0, 100.0),
    "attention_matrix_passes": (3.0, 0.3, 10.0),
    "passes_fused": (2.0, 0.7, 4.0),
    "passes_compiled": (1.5, 0.7, 4.0),
    "passes_early": (1.5, 0.8, 5.0),
    "fp8_cast_passes": (1.5, 0.2, 4.0),
    "launch_seconds": (600e-6, 100e-6, 2000e-6),
    "launch_moe_seconds": (3000e-6, 500e-6, 8000e-6),
    "moe_passes": (5.0, 2.0, 40.0),
    "moe_gain_per_year": (0.3, 0.1, 1.5),
    "imbalance": (1.1, 1.001, 1.25),
    "tensor_exposed_megatron": (0.5, 0.15, 1.0),
    "tensor_exposed_torch": (1.0, 0.4, 1.2),
    "expert_exposed": (0.6, 0.2, 1.0),
    "send_exposed": (0.3, 0.05, 1.0),
    "data_overlap": (0.8, 0.5, 1.0),
    "data_exposed": (0.05, 0.005, 0.2),
    "optimizer_passes": (2.0, 1.0, 4.0),
    "jitter_per_doubling": (0.002, 0.0005, 0.03),
}
"""Constant: (first guess, least, most)."""

MOST_CASES = 20
"""Of one source, evenly spread over its rows: enough to fit, and a refit stays a matter of seconds."""

ROBUST = 0.08
"""Relative errors beyond this count linearly, not squared."""

ITERATIONS = 5

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
    return np.asarray(weights * bent)


def fit(cases: Sequence[TimeCase]) -> Constants:
    """Constants for these cases: Levenberg-Marquardt over the logarithms, clipped to their bounds."""
    chosen = _thinned(cases)
    counts = {source: sum(case.source == source for case in chosen) for source in {case.source for case in chosen}}
    weights = np.array([counts[case.source] ** -0.45 for case in chosen])
    start, least, most = (np.log(np.array(column)) for column in zip(*GUESSES.values(), strict=True))
    values, damping = start.copy(), 0.05
    now = _residuals(chosen, weights, values)
    for _ in range(ITERATIONS):
        slopes = np.empty((len(chosen), len(values)))
        for index in range(len(values)):
            moved = values.copy()
            moved[index] += 0.02 if values[index] + 0.02 <= most[index] else -0.02
            slopes[:, index] = (_residuals(chosen, weights, moved) - now) / (moved[index] - values[index])
        square = slopes.T @ slopes
        for _ in range(4):
            step = np.linalg.solve(square + damping * np.eye(len(values)), -(slopes.T @ now))
            tried = np.clip(values + np.clip(step, -0.7, 0.7), least, most)
            after = _residuals(chosen, weights, tried)
            if after @ after < now @ now:
                values, now, damping = tried, after, damping / 3
                break
            damping *= 4
    return _with(values)


def left_out(cases: Sequence[TimeCase]) -> Iterator[tuple[TimeCase, float]]:
    """Every case with the log error of constants that never saw its source."""
    for source in dict.fromkeys(case.source for case in cases):
        constants = fit([case for case in cases if case.source != source])
        for case in cases:
            if case.source == source:
                yield case, case.log_error(constants)
