"""Which checkpoints stay: one rule for the trainer, which removes after each save, and for `checkpoints prune`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from trainyard.spec.base import SpecModel

BEST_METRIC = r"^(loss|validation_[a-z0-9_]+|validation_sets\.[a-z0-9-]+\.[a-z0-9_]+)$"


class BestSpec(SpecModel):
    """The checkpoints with the best values of a metric."""

    metric: str = "validation_loss"
    """As metrics.jsonl names it: validation_loss, validation_perplexity, validation_top1_accuracy, loss, or
    validation_sets.NAME.loss for a named set. A checkpoint competes when its own step was validated: with a
    validation_ metric, each validated step that is the best so far is saved."""
    num: Annotated[int, Field(ge=1)] = 1
    """How many of them stay."""
    mode: Literal["min", "max"] = "min"
    """Whether the least or the greatest value is best."""

    @field_validator("metric")
    @classmethod
    def _is_measured(cls, metric: str) -> str:
        if not re.fullmatch(BEST_METRIC, metric):
            raise ValueError(
                "must be loss, validation_loss or another validation_..., or validation_sets.NAME.loss,"
                " as metrics.jsonl has them"
            )
        return metric

    def is_better(self, value: float, other: float | None) -> bool:
        """Whether `value` beats `other`, the best before; a value that is no number beats nothing."""
        if math.isnan(value):
            return False
        return other is None or (value < other if self.mode == "min" else value > other)


@dataclass(frozen=True)
class Retention:
    """Which of a job's good checkpoints stay: the union of three rules."""

    keep_last: int
    keep_every_steps: int | None = None
    keep_best: BestSpec | None = None

    def kept(self, saved: Mapping[int, float | None], samples: Mapping[int, str | None] | None = None) -> set[int]:
        """The steps that stay of the good ones: step -> its value of keep_best's metric, where it has one.

        `samples`: step -> what that value was measured on, where its checkpoint says so. Values over other samples say
        nothing of each other: the best of each stay.
        """
        steps = sorted(saved)
        kept = set(steps[-self.keep_last :])
        if self.keep_every_steps is not None:
            kept |= {step for step in steps if step % self.keep_every_steps == 0}
        if self.keep_best is not None:
            sign = 1 if self.keep_best.mode == "min" else -1
            # What is no number is neither more nor less than any: among the others it would keep them from their order.
            numbers = {step: value for step, value in saved.items() if value is not None and not math.isnan(value)}
            of = {step: (samples or {}).get(step) for step in numbers}
            for one in {*of.values()}:
                # What doesn't say it, an earlier trainer's, may be of these as well.
                best = sorted((sign * value, step) for step, value in numbers.items() if of[step] in (one, None))
                kept |= {step for _, step in best[: self.keep_best.num]}
        return kept

    def samples_of(self, extra: Mapping[str, Any]) -> str | None:
        """On what a checkpoint's value of keep_best's metric was measured; None where it doesn't say."""
        validated_on = extra.get("validated_on")
        if self.keep_best is None or not isinstance(validated_on, Mapping):
            return None
        found = validated_on.get(set_of(self.keep_best.metric))
        return found if isinstance(found, str) else None

    def value_of(self, extra: Mapping[str, Any]) -> float | None:
        """What a checkpoint saved as keep_best's metric; None where it has none, or what is none."""
        metrics = extra.get("metrics")
        if self.keep_best is None or not isinstance(metrics, Mapping):
            return None
        value = metrics.get(self.keep_best.metric)
        try:
            return float(value) if isinstance(value, int | float) else None
        except OverflowError:  # JSON has numbers of any length
            return None


def set_of(metric: str) -> str | None:
    """Which validation set measures it, as `validated_on` in a checkpoint names that: "" is the one without a name.
    None: it is of training."""
    if metric == "loss":
        return None
    return metric.split(".")[1] if metric.startswith("validation_sets.") else ""


def flat_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics row that keep_best can name, named sets by dotted names."""
    found = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    for name, values in dict(row.get("validation_sets") or {}).items():
        found |= {f"validation_sets.{name}.{key}": float(value) for key, value in values.items() if value is not None}
    return {name: value for name, value in found.items() if math.isfinite(value)}
