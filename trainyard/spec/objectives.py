"""What a tenant's jobs are promised where the tenant's entry says otherwise than everybody's list (`spec.meters`)."""

from dataclasses import replace

from pydantic import Field

from trainyard.spec.base import SpecModel, on_change
from trainyard.spec.meters import OBJECTIVES, Objective

LEAST_TARGET = 0.94
"""A little below, at 0.93, the fast alarm (`spec.meters.BURNS`) would ring when all of its window's periods are bad and
not before; at 0.92 it would want more than there are."""
MOST_TARGET = 0.994
"""Beyond, both alarms stand at the two bad periods that they want at least: a higher target would change nothing."""


class TimeObjectiveSpec(SpecModel):
    """An objective on a time: what takes longer makes a period a bad one."""

    most_seconds: float | None = Field(default=None, gt=0, json_schema_extra=on_change("update"))
    """The limit; default: everybody's (docs/meters.md)."""
    target: float | None = Field(default=None, ge=LEAST_TARGET, le=MOST_TARGET, json_schema_extra=on_change("update"))
    """Share of periods that must be good; default: everybody's."""


class ShareObjectiveSpec(SpecModel):
    """An objective on a share: what is lower makes a period a bad one."""

    least: float | None = Field(default=None, gt=0, le=1, json_schema_extra=on_change("update"))
    """The limit, 0.85 for 85 %; default: everybody's (docs/meters.md)."""
    target: float | None = Field(default=None, ge=LEAST_TARGET, le=MOST_TARGET, json_schema_extra=on_change("update"))
    """Share of periods that must be good; default: everybody's."""


class ObjectivesSpec(SpecModel):
    """The tenant's own limits, by the objectives' names; what isn't given is everybody's."""

    throughput: ShareObjectiveSpec = ShareObjectiveSpec()
    checkpoint_age: TimeObjectiveSpec = TimeObjectiveSpec()
    start: TimeObjectiveSpec = TimeObjectiveSpec()
    queue: TimeObjectiveSpec = TimeObjectiveSpec()
    """Also of the alarm on jobs that still wait."""
    launch: TimeObjectiveSpec = TimeObjectiveSpec()
    """Default: as much longer or shorter than everybody's as the tenant's queue and start are together."""
    recovery: TimeObjectiveSpec = TimeObjectiveSpec()
    goodput: ShareObjectiveSpec = ShareObjectiveSpec()

    def applied(self) -> tuple[Objective, ...]:
        """Everybody's objectives with the tenant's own limits and targets in them, in the list's order."""
        limits = {name: _limit(getattr(self, _field(name))) for name in _EVERYBODYS}
        if limits["launch"] is None:
            longer = [
                limit - _EVERYBODYS[name].limit for name in ("queue", "start") if (limit := limits[name]) is not None
            ]
            limits["launch"] = _EVERYBODYS["launch"].limit + sum(longer)
        return tuple(
            replace(
                one,
                limit=one.limit if (limit := limits[one.name]) is None else limit,
                target=one.target if (target := getattr(self, _field(one.name)).target) is None else target,
            )
            for one in OBJECTIVES
        )

    def own(self) -> tuple[Objective, ...]:
        """Those of `applied` that are not everybody's."""
        return tuple(one for one in self.applied() if one != _EVERYBODYS[one.name])


_EVERYBODYS = {objective.name: objective for objective in OBJECTIVES}


def _field(objective: str) -> str:
    return objective.replace("-", "_")


def _limit(given: TimeObjectiveSpec | ShareObjectiveSpec) -> float | None:
    return given.most_seconds if isinstance(given, TimeObjectiveSpec) else given.least
