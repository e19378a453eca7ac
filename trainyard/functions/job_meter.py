"""What a training job takes: instance-seconds from SageMaker's own description of it, and dollars at a dated price.

Standard library alone, and pure but for `described`: the same figures for the function that watches a month's quota and
for `trainyard cost`. Dollars are decimal numbers to a millionth; those of any parts of a job's time add up to the job's
own, exactly.
"""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

LONGEST_DAYS = 2 * 28
"""A job's waiting and running: what was created before a month may still take something of it."""
MICRO = Decimal("0.000001")
ENDED = ("Completed", "Failed", "Stopped", "Deleting")
"""SageMaker's statuses of a job that has ended; one that is deleted is no more after the last."""
OVER = ("Terminated", "Reused")
"""States of a warm pool that no longer waits."""
WITHOUT_MACHINES = frozenset({"Pending", "Starting", "LaunchingMLInstances", "PreparingTrainingStack", "Interrupted"})
"""Secondary statuses of a job that has no machines yet, or none any more: nobody is billed then."""

Rates = Mapping[str, Mapping[str, Decimal]]
"""USD an instance-hour: instance type -> way to buy (on_demand, spot, training_plan) -> price, where known."""

Span = tuple[datetime.datetime, datetime.datetime]


@dataclass(frozen=True)
class Use:
    """One training job's hold on machines."""

    name: str
    instance_type: str
    count: int
    purchase: str
    """on_demand, spot or training_plan."""
    began: datetime.datetime
    """When its machines began to be billed (TrainingStartTime)."""
    until: datetime.datetime
    """When they ceased to be; of a job that runs, the moment of the look."""
    held_seconds: int
    """Of each instance, a warm pool's idle time among them."""
    billed_seconds: int
    """As many; of a spot job that has ended less what spot saved, as SageMaker tells it (BillableTimeInSeconds): times
    the on-demand price that is its bill."""
    is_running: bool
    without: tuple[Span, ...] = ()
    """When between the two it was without machines, in order: what it took falls into the rest."""

    @property
    def priced_as(self) -> str:
        """The way to buy whose price counts."""
        if self.purchase == "spot" and not self.is_running:
            return "on_demand"
        return self.purchase

    def rate(self, rates: Rates) -> Decimal | None:
        """USD an instance-hour; None where it isn't known. A running spot job without a spot price counts on demand."""
        known = rates.get(self.instance_type, {})
        price = known.get(self.priced_as)
        return known.get("on_demand") if price is None and self.priced_as == "spot" else price

    def share(self, since: datetime.datetime, until: datetime.datetime) -> Decimal:
        """Of its time, what lies between two moments: 0 to 1."""
        return self._share_until(until) - self._share_until(since)

    def instance_seconds(self, since: datetime.datetime, until: datetime.datetime) -> Decimal:
        """Held between two moments, to a millionth."""
        one, other = (self._until(moment, self.held_seconds, Decimal(1)) for moment in (since, until))
        return other - one

    def usd(self, since: datetime.datetime, until: datetime.datetime, rate: Decimal) -> Decimal:
        """Between two moments, at `rate` USD an instance-hour, to a millionth of a dollar."""
        one, other = (self._until(moment, self.billed_seconds, rate / 3600) for moment in (since, until))
        return other - one

    def _until(self, moment: datetime.datetime, seconds: int, per_second: Decimal) -> Decimal:
        """From its beginning to a moment. Rounded here, so that parts between the same moments add up."""
        return (self.count * seconds * self._share_until(moment) * per_second).quantize(MICRO, ROUND_HALF_EVEN)

    def _share_until(self, moment: datetime.datetime) -> Decimal:
        whole = self._with_machines_until(self.until)
        if whole <= 0:
            return Decimal(1 if moment > self.began else 0)
        return self._with_machines_until(moment) / whole

    def _with_machines_until(self, moment: datetime.datetime) -> Decimal:
        nothing, at = datetime.timedelta(0), min(moment, self.until)
        gone = sum((max(min(other, at) - one, nothing) for one, other in self.without), nothing)
        return _seconds(max(at - self.began - gone, nothing))


def uses_of(job: Mapping[str, Any], now: datetime.datetime) -> list[Use]:
    """A job's use as DescribeTrainingJob tells it: of its machines, or of each group of a heterogeneous cluster; empty
    for one that has had no machine yet (or never)."""
    began, is_running = job.get("TrainingStartTime"), job["TrainingJobStatus"] not in ENDED
    if began is None:
        return []
    until = now if is_running else job.get("TrainingEndTime") or now
    waited = interrupted_seconds(job, began, until) if is_running else 0
    without = tuple(interruptions(job, began, until))
    wall = max(0, round((until - began).total_seconds()) - waited)
    resources = job.get("ResourceConfig") or {}
    pool = _kept_warm(job, now - until)
    held = wall if is_running else int(job.get("TrainingTimeInSeconds", wall))
    is_spot = bool(job.get("EnableManagedSpotTraining"))
    return [
        Use(
            name=str(job["TrainingJobName"]),
            instance_type=str(group.get("InstanceType", "")),
            count=int(group.get("InstanceCount", 0)),
            purchase="training_plan" if resources.get("TrainingPlanArn") else "spot" if is_spot else "on_demand",
            began=began,
            until=until,
            held_seconds=held + pool,
            billed_seconds=(wall if is_running else int(job.get("BillableTimeInSeconds", held))) + pool,
            is_running=is_running,
            without=without,
        )
        for group in resources.get("InstanceGroups") or [resources]
    ]


def waiting_seconds(job: Mapping[str, Any], now: datetime.datetime) -> float:
    """For how long a job has waited that has had no machine yet; 0 for one that has, or has ended without."""
    if job["TrainingJobStatus"] in ENDED or job.get("TrainingStartTime") is not None:
        return 0.0
    created = job.get("CreationTime")
    return 0.0 if created is None else max(0.0, (now - created).total_seconds())


def interruptions(job: Mapping[str, Any], since: datetime.datetime, until: datetime.datetime) -> list[Span]:
    """When between two moments a job was without the machines that spot capacity took: it isn't billed then."""
    lost, found = False, []
    for change in job.get("SecondaryStatusTransitions") or []:
        lost = change["Status"] == "Interrupted" or (lost and change["Status"] in WITHOUT_MACHINES)
        if lost:
            one, other = max(change["StartTime"], since), min(change.get("EndTime") or until, until)
            found += [(one, other)] if one < other else []
    return found


def interrupted_seconds(job: Mapping[str, Any], since: datetime.datetime, until: datetime.datetime) -> int:
    """For how long in all that was."""
    spans = (other - one for one, other in interruptions(job, since, until))
    return round(sum(spans, datetime.timedelta(0)).total_seconds())


def described(sagemaker: Any, name: str) -> dict[str, Any] | None:
    """DescribeTrainingJob's answer; None where there is no such job."""
    try:
        return dict(sagemaker.describe_training_job(TrainingJobName=name))
    except sagemaker.exceptions.ClientError as error:
        # SageMaker answers ValidationException for an unknown job; the only argument, its name, is well-formed.
        if error.response["Error"]["Code"] in ("ResourceNotFound", "ValidationException"):
            return None
        raise


def is_settled(job: Mapping[str, Any]) -> bool:
    """Whether a job's description won't change: it has ended, and no warm pool of it waits."""
    pool = job.get("WarmPoolStatus")
    return job["TrainingJobStatus"] in ENDED and (not pool or pool["Status"] in OVER)


def _kept_warm(job: Mapping[str, Any], since_its_end: datetime.timedelta) -> int:
    """Seconds for which its machines were kept idle; SageMaker tells them once that is over."""
    pool = job.get("WarmPoolStatus") or {}
    told = int(pool.get("ResourceRetainedBillableTimeInSeconds") or 0)
    if not pool or is_settled(job) or job["TrainingJobStatus"] not in ENDED:
        return told
    # It waits still: by the clock.
    most = int((job.get("ResourceConfig") or {}).get("KeepAlivePeriodInSeconds") or 0)
    return max(told, min(most, round(since_its_end.total_seconds())))


def month_of(moment: datetime.datetime) -> tuple[datetime.datetime, datetime.datetime]:
    """(its month's beginning, the next one's), in UTC, as AWS bills."""
    first = moment.astimezone(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return first, (first + datetime.timedelta(days=32)).replace(day=1)


def _seconds(span: datetime.timedelta) -> Decimal:
    return Decimal(span // datetime.timedelta(microseconds=1)) / 1_000_000
