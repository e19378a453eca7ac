"""All trials of a sweep in one table: the metric at an equal step, speed, cost, the best, who was stopped and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.operate.course import value_at
from trainyard.operate.sweep.record import SweepRecord, Trial


@dataclass(frozen=True)
class Standing:
    """One trial."""

    number: int
    settings: dict[str, str]
    job_id: str | None
    state: str
    step: int
    """The last that the metric is known of."""
    value: float | None
    """There. Infinity: it diverged."""
    value_at_equal_step: float | None
    units_per_second: float | None
    """Tokens, or images, of the warm steps."""
    usd: float | None
    why: str
    is_best: bool = False


@dataclass(frozen=True)
class Standings:
    """The table."""

    name: str
    metric: str
    equal_step: int
    """The last step that every trial with a figure has reached."""
    lines: tuple[Standing, ...]
    usd: float | None
    """Of all; None where no price is known of any."""
    max_cost_usd: float | None

    @property
    def best(self) -> Standing | None:
        """The trial that is best; None before the first figure."""
        return next((line for line in self.lines if line.is_best), None)

    def document(self) -> dict[str, Any]:
        """As JSON: infinity is null there, with `diverged`."""
        lines = []
        for line in self.lines:
            told = asdict(line)
            told["diverged"] = line.value is not None and math.isinf(line.value)
            for name in ("value", "value_at_equal_step"):
                told[name] = told[name] if told[name] is None or math.isfinite(told[name]) else None
            lines.append(told)
        best = self.best
        return {
            "sweep": self.name,
            "metric": self.metric,
            "equal_step": self.equal_step,
            "best": None if best is None else {"trial": best.number, "job_id": best.job_id, "settings": best.settings},
            "usd": self.usd,
            "max_cost_usd": self.max_cost_usd,
            "trials": lines,
        }


def standings(
    record: SweepRecord, curves: Mapping[int, Mapping[int, float]], speeds: Mapping[int, float | None]
) -> Standings:
    """The table of a sweep. Best is the lowest metric at the last step that all completed trials have made, among
    these; among all with a figure, at the equal step, as long as none has completed."""
    told = {number: curve for number, curve in curves.items() if curve}
    equal = min((max(curve) for curve in told.values()), default=0)
    best = _best(record.trials, told)
    lines = tuple(
        Standing(
            number=trial.number,
            settings=dict(one.split("=", 1) for one in trial.overrides),
            job_id=trial.job_id,
            state=trial.state,
            step=max(told.get(trial.number, {}), default=0),
            value=value_at(told.get(trial.number, {}), max(told.get(trial.number, {}), default=0)),
            value_at_equal_step=value_at(told.get(trial.number, {}), equal),
            units_per_second=speeds.get(trial.number),
            usd=trial.usd,
            why=trial.why,
            is_best=trial.number == best,
        )
        for trial in record.trials
    )
    known = [trial.usd for trial in record.trials if trial.usd is not None]
    usd = math.fsum(known) if known else None
    return Standings(record.name, record.metric, equal, lines, usd, record.max_cost_usd)


def _best(trials: Sequence[Trial], told: Mapping[int, Mapping[int, float]]) -> int | None:
    completed = [trial.number for trial in trials if trial.state == "Completed" and trial.number in told]
    among = completed or list(told)
    if not among:
        return None
    equal = min(max(told[number]) for number in among)
    values = {number: value_at(told[number], equal) for number in among}
    finite = {number: value for number, value in values.items() if value is not None and math.isfinite(value)}
    return min(finite, key=lambda number: (finite[number], number)) if finite else None
