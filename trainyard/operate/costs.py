"""Who spent what: every training job's machines by the day, at a named and dated price, from SageMaker's own word.

SageMaker's descriptions of jobs are what nobody can rewrite, and no role of a tenant's can delete; a job's record tells
what was planned. Dollars are decimal numbers: a table's parts add up to its total to the millionth.
"""

import datetime
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from trainyard.errors import InputError
from trainyard.functions.broker_queue import BATCH, training_job_prefix
from trainyard.functions.budget_meter import survey
from trainyard.functions.job_meter import MICRO, Rates, Use, month_of
from trainyard.hardware import Price, PriceBook, instance
from trainyard.launch.aws import aws_errors
from trainyard.launch.names import job_id_of
from trainyard.launch.place import TenantAccess
from trainyard.launch.record import JobRecord, RecordStore
from trainyard.planner.money import ONE_IN_TEN

By = Literal["day", "tenant", "job", "cost-centre"]
PACE_DAYS = 7
"""The last full days that, with today, make the pace: a week, so that its quiet days are in it once."""

UNNAMED = "no type named"
"""For a training job that names none of its machines."""

LEAST_DAYS = 3
"""That something was spent on, for an interval."""

CSV_FIELDS = (
    *("day", "tenant", "cost_center", "job_id", "training_job", "instance_type", "instances", "purchase"),
    *("instance_hours", "gpu_hours", "usd_per_hour", "usd", "price_basis", "price_as_of"),
)


@dataclass(frozen=True)
class Charge:
    """What one training job held and cost on one day (UTC)."""

    day: datetime.date
    tenant: str
    cost_center: str
    job_id: str
    training_job: str
    instance_type: str
    instances: int
    purchase: str
    """on_demand, spot or training_plan."""
    instance_hours: Decimal
    gpu_hours: Decimal | None
    """None where the type's GPUs aren't known."""
    usd: Decimal | None
    """None where no price of the type is known."""
    price: Price | None

    def row(self) -> dict[str, str]:
        """For a CSV file: decimal numbers as they are, nothing where there is no price."""
        price = self.price
        told = {name: str(getattr(self, name)) for name in CSV_FIELDS[:8]}
        return told | {
            "instance_hours": f"{self.instance_hours:f}",
            "gpu_hours": "" if self.gpu_hours is None else f"{self.gpu_hours:f}",
            "usd_per_hour": "" if price is None else str(price.usd_per_hour),
            "usd": "" if self.usd is None else f"{self.usd:f}",
            "price_basis": "" if price is None else price.basis,
            "price_as_of": "" if price is None else price.as_of.isoformat(),
        }


@dataclass(frozen=True)
class Group:
    """Charges of one key, summed."""

    key: str
    num_jobs: int
    instance_hours: Decimal
    gpu_hours: Decimal
    """Of types whose GPUs are known."""
    usd: Decimal
    """Of what has a price."""
    unpriced: tuple[str, ...]
    """Types without one: the dollars are then at least so many."""
    uncounted: tuple[str, ...]
    """Types whose GPUs aren't known: the GPU-hours are then at least so many."""


@dataclass(frozen=True)
class Forecast:
    """What the month will have cost at its end."""

    spent_usd: Decimal
    pace_usd_per_day: Decimal
    expected_usd: Decimal
    low_usd: Decimal | None
    """With the next the 80 % interval, by how much the last full days differ; None with fewer than three that cost."""
    high_usd: Decimal | None
    num_days: int
    """Full days that the pace is of, beside today's hours."""


def months(text: str | None, now: datetime.datetime) -> tuple[datetime.datetime, datetime.datetime]:
    """(first moment, the moment after the last) of a month "YYYY-MM", by default the present one; InputError."""
    if text is None:
        return month_of(now)
    found = re.fullmatch(r"(20\d\d)-(0[1-9]|1[0-2])", text)
    if found is None:
        raise InputError(f"--month {text}: must look like {now:%Y-%m}")
    since, until = month_of(datetime.datetime(int(found[1]), int(found[2]), 1, tzinfo=datetime.UTC))
    if since > now:
        raise InputError(f"--month {text}: is still to come")
    return since, until


class Meter:
    """Charges of an environment's tenants in a span of time; prices are asked for once a type."""

    def __init__(self, book: PriceBook, *, since: datetime.datetime, until: datetime.datetime, now: datetime.datetime):
        """`book`: as of today, so that an old price is refused."""
        self._book, self._since, self._until, self._now = book, since, until, now
        self._any_age = PriceBook(book.rows, today=None)
        self._prices: dict[tuple[str, str], dict[str, Price]] = {}
        self.unread: list[str] = []
        """Why records could not be read, a line each: jobs that Batch started are then under their training jobs'
        names."""

    def charges(self, access: TenantAccess) -> list[Charge]:
        """Of a tenant's training jobs, each attempt and each day by itself; InputError where a price is too old."""
        tenant = access.contract.tenant
        sagemaker = access.launcher.client("sagemaker")
        prefixes = [f"{tenant}-", f"{BATCH}{tenant}-"]
        with aws_errors("listing", f"training jobs of tenant {tenant}"):
            uses, *_ = survey(sagemaker, prefixes, since=self._since, now=self._now, ended={})
        held = [use for use in uses if use.until > self._since and use.began < self._until]
        owner = _job_ids(held, tenant, access.place.store, self.unread)
        return [charge for use in held for charge in self._days(use, owner(use.name), access)]

    def _days(self, use: Use, job_id: str, access: TenantAccess) -> Iterable[Charge]:
        prices = self._prices_of(use.instance_type, access.contract.region)
        rates: Rates = {use.instance_type: {way: Decimal(str(price.usd_per_hour)) for way, price in prices.items()}}
        rate = use.rate(rates)
        price = next((found for found in prices.values() if Decimal(str(found.usd_per_hour)) == rate), None)
        gpus = _num_gpus(use.instance_type)
        at = max(self._since, use.began.astimezone(datetime.UTC).replace(hour=0, minute=0, second=0, microsecond=0))
        while at < min(self._until, use.until):
            following = at + datetime.timedelta(days=1)
            hours = use.instance_seconds(at, following) / 3600
            yield Charge(
                day=at.date(),
                tenant=access.contract.tenant,
                cost_center=access.contract.cost_center,
                job_id=job_id,
                training_job=use.name,
                instance_type=use.instance_type or UNNAMED,
                instances=use.count,
                purchase=use.purchase,
                instance_hours=hours.quantize(MICRO),
                gpu_hours=None if gpus is None else (hours * gpus).quantize(MICRO),
                usd=None if rate is None else use.usd(at, following, rate),
                price=price,
            )
            at = following

    def _prices_of(self, kind: str, region: str) -> dict[str, Price]:
        """By way to buy. A type without any on-demand price has none; one whose price is too old is refused."""
        key = (kind, region)
        if key not in self._prices:
            found: dict[str, Price] = {}
            for way in ("on_demand", "spot", "training_plan"):
                try:
                    self._any_age.price(kind, region, way)
                except InputError:
                    continue
                try:
                    found[way] = self._book.price(kind, region, way)
                except InputError:
                    if way == "on_demand":
                        raise
            self._prices[key] = found
        return self._prices[key]


def _num_gpus(instance_type: str) -> int | None:
    """Of a type that we know: whoever may start jobs beside trainyard may take others, CPUs among them."""
    try:
        return instance(instance_type).num_gpus
    except InputError:
        return None


def _job_ids(uses: Iterable[Use], tenant: str, store: RecordStore, unread: list[str]) -> Callable[[str], str]:
    """A training job's name to its job's id; a name that is none of trainyard's stands for itself.

    What Batch named is found by the records, which are only then read; what keeps one from it goes to `unread`.
    """
    by_prefix: dict[str, str] = {}
    if any(use.name.startswith(BATCH) for use in uses):
        for job_id in store.job_ids():
            try:
                attempts = store.read(job_id).record.attempts
            except InputError as error:
                unread.append(str(error))
                continue
            for attempt in attempts:
                by_prefix[training_job_prefix(tenant, attempt.training_job_name)] = job_id

    def owner(name: str) -> str:
        if name.startswith(BATCH):
            return next((job_id for prefix, job_id in by_prefix.items() if name.startswith(prefix)), name)
        try:
            return job_id_of(name)
        except InputError:
            return name

    return owner


def grouped(charges: Iterable[Charge], by: By) -> list[Group]:
    """The charges by one key: days in order, all else by dollars."""
    parts: dict[str, list[Charge]] = defaultdict(list)
    for charge in charges:
        name = {"day": "day", "tenant": "tenant", "job": "job_id", "cost-centre": "cost_center"}[by]
        parts[str(getattr(charge, name))].append(charge)
    found = [summed(key, items) for key, items in parts.items()]
    return sorted(found, key=lambda item: item.key if by == "day" else (-item.usd, item.key))


def summed(key: str, charges: Sequence[Charge]) -> Group:
    """Charges added up."""
    return Group(
        key=key,
        num_jobs=len({charge.job_id for charge in charges}),
        instance_hours=sum((charge.instance_hours for charge in charges), Decimal(0)),
        gpu_hours=sum((charge.gpu_hours for charge in charges if charge.gpu_hours is not None), Decimal(0)),
        usd=sum((charge.usd for charge in charges if charge.usd is not None), Decimal(0)),
        unpriced=tuple(sorted({charge.instance_type for charge in charges if charge.usd is None})),
        uncounted=tuple(sorted({charge.instance_type for charge in charges if charge.gpu_hours is None})),
    )


def planned_usd(record: JobRecord) -> Decimal | None:
    """What the machines were planned to cost, spot's price for a spot job; None where the plan knew no price."""
    cost: Mapping[str, Any] = record.plan.get("cost") or {}
    names = ("usd_spot", "usd_on_demand") if record.resolved.spec.compute.spot else ("usd_on_demand",)
    known = next((cost[name] for name in names if cost.get(name) is not None), None)
    return None if known is None else Decimal(str(known))


def forecast(
    charges: Iterable[Charge], *, since: datetime.datetime, until: datetime.datetime, now: datetime.datetime
) -> Forecast:
    """The month at the pace of its last full days (up to PACE_DAYS) and of today; InputError for a month that is over.

    expected = spent + pace x days that are left; the interval is +-1.2816 standard deviations of a day's dollars times
    the root of these days, as if days were independent. Nothing is cheaper than what is spent.
    """
    if now >= until:
        raise InputError(f"--forecast: month {since:%Y-%m} is over; leave it out")
    by_day: dict[datetime.date, Decimal] = defaultdict(Decimal)
    for charge in charges:
        by_day[charge.day] += charge.usd or Decimal(0)
    spent = sum(by_day.values(), Decimal(0))
    num_full = min(PACE_DAYS, (now.date() - since.date()).days)
    days = [by_day[now.date() - datetime.timedelta(days=back)] for back in range(1, num_full + 1)]
    left = Decimal(str((until - now).total_seconds())) / 86_400
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    today = max(Decimal(str((now - midnight).total_seconds())) / 86_400, Decimal("0.0001"))
    pace = (sum(days, Decimal(0)) + by_day[now.date()]) / (len(days) + today)
    expected = spent + pace * left
    low = high = None
    if sum(1 for usd in days if usd) >= LEAST_DAYS:
        spread = Decimal(str(ONE_IN_TEN)) * statistics.stdev(days) * left.sqrt()
        low, high = max(spent, expected - spread), expected + spread
    rounded = [None if value is None else value.quantize(MICRO) for value in (pace, expected, low, high)]
    assert rounded[0] is not None and rounded[1] is not None
    return Forecast(spent, rounded[0], rounded[1], rounded[2], rounded[3], len(days))
