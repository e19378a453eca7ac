"""How often to save: what saving and redoing cost together is least."""

import math

from trainyard.spec.job import CheckpointSpec

HOURS_BETWEEN_FAILURES = 24.0
"""Where the job was resolved without them."""

_SECONDS_AFTER_THE_FIRST = 60.0
"""Until a save has told what one costs, the next can wait so long."""

_WORTH_A_LINE = 1.2
"""An interval is told again when it has changed by so much."""


class Interval:
    """How long training goes on between saves by the clock: what the job says, or what costs least."""

    def __init__(self, spec: CheckpointSpec, hours_between_failures: float | None) -> None:
        """`hours_between_failures`: of all hosts together."""
        minutes = spec.every_minutes
        self.is_automatic = "auto" in (spec.every_steps, minutes)
        self._bound_seconds = 60 * minutes if isinstance(minutes, float) else None
        self._between_seconds = 3600 * (hours_between_failures or HOURS_BETWEEN_FAILURES)
        self._told_seconds: float | None = None
        self.seconds: float | None = self._bound_seconds
        """None: saves don't go by the clock. Automatic ones are what `measured` found last."""
        if self.is_automatic:
            self.seconds = 0.0  # the first save, after the first step, measures

    def began(self) -> None:
        """A save has begun whose cost isn't known yet, or was known before."""
        if self.is_automatic and not self.seconds:
            self.seconds = self._bounded(_SECONDS_AFTER_THE_FIRST)

    def measured(self, save_seconds: float, stall_seconds: float) -> str | None:
        """Decide anew by what the last save took; what there is to say about it, if it changed."""
        if not self.is_automatic:
            return None
        between = self._between_seconds
        best = best_interval_seconds(
            save_seconds=save_seconds, stall_seconds=stall_seconds, seconds_between_failures=between
        )
        self.seconds = self._bounded(best)
        told = self._told_seconds
        if told is not None and told / _WORTH_A_LINE < self.seconds < told * _WORTH_A_LINE:
            return None
        self._told_seconds = self.seconds
        bound = "" if self.seconds >= best else " (no longer than every_minutes)"
        return (
            f"checkpoint interval_seconds={self.seconds:.1f}{bound}: a save stalls training for {stall_seconds:.3f} s,"
            f" takes {save_seconds:.3f} s, and a failure comes every {between / 3600:.1f} h"
        )

    def _bounded(self, seconds: float) -> float:
        return seconds if self._bound_seconds is None else min(seconds, self._bound_seconds)


def best_interval_seconds(*, save_seconds: float, stall_seconds: float, seconds_between_failures: float) -> float:
    """Seconds from one save to the next.

    `stall_seconds`: training stands still for so long per save. Daly (2006, "A higher order estimate of the optimum
    checkpoint interval", eq. 37): with d the stall and M the mean time between failures,
    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d while d < 2M, else M. Its first term is Young's (1974).
    A save must end before the next begins, so never less than `save_seconds`.
    """
    stall, between = stall_seconds, seconds_between_failures
    if stall >= 2 * between:
        return max(between, save_seconds)
    ratio = stall / (2 * between)
    best = math.sqrt(2 * stall * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall
    return max(best, save_seconds)
