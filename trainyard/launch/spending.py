"""What a job has spent so far, by its record: time on machines x the price of its plan, which is named and dated.

For people who watch it. The account of record is `trainyard cost`, by SageMaker's own figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from trainyard.functions.job_meter import WITHOUT_MACHINES
from trainyard.launch.queue_backend import QUEUED
from trainyard.launch.record import CREATED, SUBMITTED, JobRecord, StateChange

BILLED_STATES = frozenset(
    {"Downloading", "DownloadingTrainingImage", "Training", "Uploading", "Stopping", "Restarting", "Updating"}
)
"""SageMaker's words for a job that has its machines; of those without nobody is billed."""
WAITING = WITHOUT_MACHINES | {CREATED, SUBMITTED, QUEUED}
"""States of a job that has no machines yet, or none any more."""
CENT = Decimal("0.01")


@dataclass(frozen=True)
class Spent:
    """Of all attempts together."""

    usd: Decimal
    instance_hours: Decimal
    usd_per_hour: Decimal
    """Of an instance."""
    basis: str
    as_of: str
    budget_usd: Decimal | None
    """The job's own (budget.max_usd)."""

    @property
    def share(self) -> float | None:
        """Of the budget; None without one."""
        return float(self.usd / self.budget_usd) if self.budget_usd else None

    def as_line(self) -> str:
        """For people."""
        of = f" of {self.budget_usd:,.0f} USD ({self.share:.0%})" if self.budget_usd else " USD"
        return f"{self.usd:,.2f}{of}, at {self.usd_per_hour:g} USD/h each, {self.basis}; as of {self.as_of}"


def billed_seconds(states: Sequence[StateChange], now: datetime) -> Decimal:
    """Seconds in which the job had its machines, up to `now`."""
    total = Decimal(0)
    for change, following in zip(states, [*states[1:], None], strict=True):
        if change.state in BILLED_STATES:
            end = now if following is None else datetime.fromisoformat(following.at)
            total += max(Decimal(0), Decimal(str((end - datetime.fromisoformat(change.at)).total_seconds())))
    return total


def spent(record: JobRecord, *, now: datetime | None = None) -> Spent | None:
    """A job's money so far; None on this machine, and where its plan knew no price."""
    compute, plan = record.resolved.spec.compute, record.plan
    quote: dict[str, Any] | None = (plan.get("spot") if compute.spot else None) or plan.get("on_demand")
    if record.backend == "local" or quote is None:
        return None
    rate = Decimal(str(quote["usd_per_hour"]))
    hours = billed_seconds(record.states, now or datetime.now(UTC)) * record.resolved.num_hosts / 3600
    budget = record.resolved.spec.budget
    return Spent(
        usd=(hours * rate).quantize(CENT),
        instance_hours=hours,
        usd_per_hour=rate,
        basis=str(quote.get("basis", "")),
        as_of=str(quote.get("as_of", "")),
        budget_usd=None if budget is None else Decimal(str(budget.max_usd)),
    )
