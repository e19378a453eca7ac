"""A whole run: hours with saves and failures, dollars on named and dated prices, each with its 80% interval."""

import datetime
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainyard.errors import InputError
from trainyard.hardware import GIB, Price, PriceBook
from trainyard.hardware.prices import PURCHASES, Purchase
from trainyard.planner.goodput import (
    RECOVERY_OBJECTIVE_SECONDS,
    SAVED_AVERAGES,
    WEIGHT_BYTES,
    Goodput,
    Saved,
    expected_seconds,
    goodput,
    spread_of_failures,
)
from trainyard.planner.layout import Layout
from trainyard.planner.memory import lora_params
from trainyard.planner.reading import Machines
from trainyard.planner.results import CheckpointPlan, Cost, PriceQuote, TierPlan, TimePlan
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage
from trainyard.spec.job import JobSpec

ONE_IN_TEN = 1.2816
"""Standard deviations that a normal error exceeds once in ten times, to either side."""

HOURS_PER_MONTH = 730
"""AWS's own months."""

STORE = "s3-standard"


def today() -> datetime.date:
    """The day whose prices count."""
    return datetime.date.today()


def todays_book() -> PriceBook:
    """The shipped prices, of which those that are too old today are refused."""
    return PriceBook.opened(today=today())


@dataclass(frozen=True)
class Quotes:
    """What is known of prices for a job's machines."""

    found: dict[Purchase, Price]
    notes: tuple[str, ...]
    """Why the price that the job would pay isn't known."""

    def documents(self) -> tuple[PriceQuote, ...]:
        """For the plan."""
        return tuple(
            PriceQuote(
                purchase=purchase,
                usd_per_hour=found.usd_per_hour,
                basis=found.basis,
                as_of=found.as_of,
                source=found.source,
            )
            for purchase, found in self.found.items()
        )


def quotes_of(job: JobSpec, machines: Machines, region: str, book: PriceBook) -> Quotes:
    """Every way to buy the job's machines that has a price."""
    name = job.compute.instance_type
    if machines.instance is None or name is None or job.compute.backend == "local":
        return Quotes({}, ())
    wanted = "spot" if job.compute.spot else "training_plan" if job.compute.training_plan else "on_demand"
    found: dict[Purchase, Price] = {}
    notes = []
    for purchase in PURCHASES:
        try:
            found[purchase] = book.price(name, region, purchase)
        except InputError as error:
            if purchase in ("on_demand", wanted):
                notes.append(str(error))
    return Quotes(found, tuple(notes))


def unpriced(job: JobSpec, machines: Machines, region: str, quotes: Quotes) -> str | None:
    """Which price the dollars lack, what that means for the budget, and how to get it; None where they lack none."""
    rate, _ = _rate(job, quotes)
    if machines.instance is None or rate is not None or not quotes.notes:
        return None
    # A price that is too old brings its own advice, of no region and type.
    reasons = "; ".join(note.partition("; get today's")[0] for note in quotes.notes)
    kept = (
        f", and budget.max_usd {job.budget.max_usd:,.2f} can't be kept" if job.budget else " and no budget can be kept"
    )
    how = f"trainyard prices refresh --region {region} --instances {machines.instance.type}"
    return f"{reasons}; without a price no dollars are quoted{kept}; get one: {how}"


def cost_usd(hours: float, instances: int, rate: Price | None) -> float | None:
    """Hours x instances x price, and nothing else; None without a price."""
    return None if rate is None else hours * instances * rate.usd_per_hour


def saved_params(job: JobSpec, shape: ModelShape) -> float:
    """Parameters that a checkpoint holds: the adapters alone where there are some."""
    adapter = job.model.adapter
    if adapter is None:
        return float(shape.params)
    whole = Layout(lora_rank=adapter.rank, lora_targets=tuple(adapter.targets))
    return lora_params(shape, whole, Stage(shape.layers, True, True, 1))


def saved_of(job: JobSpec, params: float, *, ends: float = 0.0) -> Saved:
    """So many parameters as a checkpoint holds them. `ends`: embedding's and head's, which muon leaves to AdamW."""
    optimizer = job.training.optimizer
    averages = float(SAVED_AVERAGES[optimizer.kind])
    if optimizer.kind == "muon":
        averages += (SAVED_AVERAGES["adamw"] - SAVED_AVERAGES["muon"]) * ends / params
    elif optimizer.kind == "sgd" and not optimizer.momentum:
        averages = 0.0
    averages += optimizer.average_decay is not None
    return Saved(params, (1 + averages) * WEIGHT_BYTES * (2 if job.training.precision == "fp64" else 1))


def destination_tier(job: JobSpec) -> Literal["fsx", "s3"]:
    """Where a save stays when the machines are gone."""
    return "fsx" if Path(job.checkpoint.destination or "").is_relative_to("/fsx") else "s3"


def interval_seconds(job: JobSpec, step_seconds: float, best_seconds: float) -> float | None:
    """Work between saves, as the job says it: the shorter of steps and minutes; None: none before the end."""
    spec = job.checkpoint
    intervals = [
        *([spec.every_steps * step_seconds] if isinstance(spec.every_steps, int) else []),
        *([spec.every_minutes * 60] if isinstance(spec.every_minutes, float) else []),
        *([best_seconds] if "auto" in (spec.every_steps, spec.every_minutes) else []),
    ]
    return min(intervals, default=None)


def goodput_of(
    job: JobSpec, machines: Machines, saved: Saved, step_seconds: float, steps: int | None
) -> tuple[Goodput, float | None]:
    """(saves and failures of the job's run, the work between saves as the job says it)."""
    # Without periodic saves, a failure costs the run up to its end; one in epochs counts as a day.
    run_seconds = (steps or 0) * step_seconds or 24 * 3600.0

    def found(interval: float) -> Goodput:
        return goodput(
            saved,
            machines.world_size,
            machines.num_hosts,
            asynchronous=job.checkpoint.asynchronous,
            interval_seconds=interval,
            machine=machines.instance,
            destination=destination_tier(job),
            disks_first=job.checkpoint.local_directory is not None,
            copied_to_peers=job.checkpoint.peer_copy,
            spot=job.compute.spot,
        )

    stated = interval_seconds(job, step_seconds, found(run_seconds).best_interval_seconds)
    return found(run_seconds if stated is None else min(stated, run_seconds)), stated


def checkpoint_plan(result: Goodput, stated_interval: float | None) -> CheckpointPlan:
    """The document of a run's saves."""
    return CheckpointPlan(
        size_gib=result.checkpoint_bytes / GIB,
        tier=result.tier,
        save_seconds=result.save_seconds,
        stall_seconds=result.stall_seconds,
        interval_seconds=stated_interval,
        best_interval_seconds=result.best_interval_seconds,
        mean_hours_between_failures=result.mean_time_between_failures_seconds / 3600,
        recovery_seconds=result.saving.recovery,
        goodput=result.fraction,
        tiers=tuple(
            TierPlan(
                name=tier.name,
                save_seconds=tier.save_seconds,
                restore_seconds=tier.restore_seconds,
                recovery_seconds=tier.recovery_seconds,
                within_objective=tier.recovery_seconds <= RECOVERY_OBJECTIVE_SECONDS,
            )
            for tier in result.tiers
        ),
    )


@dataclass(frozen=True)
class Hours:
    """Of a whole run by the clock, with its 80% interval."""

    expected: float
    low: float
    high: float


def hours_of(time: TimePlan, run: Goodput) -> Hours | None:
    """Hours of the run with saves and failures; None for a job in epochs.

    The interval joins two errors as if independent, in logarithms: the step's own (from published runs) and that of the
    failures, whose number is chance and whose rate differs between clusters.
    """
    if time.hours is None:
        return None
    work = time.hours * 3600
    expected = expected_seconds(work, run.saving) / 3600
    if not math.isfinite(expected):
        return Hours(math.inf, math.inf, math.inf)
    step = math.log(time.step_seconds_high / time.step_seconds) / ONE_IN_TEN
    failures = math.log1p(spread_of_failures(work, run.saving))
    factor = math.exp(ONE_IN_TEN * math.hypot(step, failures))
    # Failures only ever add: nothing ends before the work itself at its fastest.
    fastest = time.hours * time.step_seconds_low / time.step_seconds
    return Hours(expected, max(expected / factor, fastest), expected * factor)


@dataclass(frozen=True)
class Kept:
    """Numbers of checkpoints that retention leaves."""

    during: float
    """The mean over the run."""
    after: float
    """When it has ended, until somebody removes them."""


def kept_checkpoints(job: JobSpec, steps: int, step_seconds: float, interval_seconds: float) -> Kept:
    """How many checkpoints of a run stay. Those of `keep_every_steps` grow from none to all of them.

    `interval_seconds`: between saves.
    """
    spec = job.checkpoint
    best = spec.keep_best.num if spec.keep_best is not None else 0
    # The end is saved whatever the interval is; less than a millionth of one is rounding.
    saves = max(math.ceil(steps * step_seconds / interval_seconds - 1e-6), 1)
    if spec.keep_every_steps is None:
        return _kept(spec.keep_last, saves, best=best, for_good=0.0)
    wanted = steps // spec.keep_every_steps
    by_steps = spec.every_steps if isinstance(spec.every_steps, int) else None
    for_good = float(steps // math.lcm(by_steps, spec.keep_every_steps) if by_steps else 0)
    if by_steps is None or interval_seconds < by_steps * step_seconds:
        # Saves by the clock come at any step, and are kept where it happens to be one of these.
        for_good += (wanted - for_good) * min(1.0, step_seconds / interval_seconds)
    # Of the newest some stay for good as well.
    newest = spec.keep_last * (1 - min(1.0, for_good / saves))
    return _kept(newest, max(saves, for_good), best=best, for_good=for_good)


def _kept(newest: float, saves: float, *, best: int, for_good: float) -> Kept:
    """No more than is saved: of a short run what is saved grows, as what stays for good does, from none to all. The
    best are saves of their own, whenever a validation finds one."""
    others = saves - for_good
    return Kept(best + min(newest, others / 2) + for_good / 2, best + min(newest, others) + for_good)


def cost_of(
    job: JobSpec,
    *,
    steps: int | None,
    time: TimePlan,
    run: Goodput,
    machines: Machines,
    quotes: Quotes,
    book: PriceBook,
) -> Cost | None:
    """Dollars of the whole run; None for one of unknown length."""
    hours = hours_of(time, run)
    if hours is None or steps is None:
        return None
    rate, basis = _rate(job, quotes)
    month = hours.expected / HOURS_PER_MONTH
    kept, each_gb = kept_checkpoints(job, steps, time.step_seconds, run.interval_seconds), run.checkpoint_bytes / 1e9
    gb_months = kept.during * each_gb * month if math.isfinite(month) else math.inf
    storage = _storage_usd(job, gb_months, quotes, book)

    def usd(each: float, price: Price | None) -> float | None:
        return cost_usd(each, machines.num_hosts, price)

    def planned(each: float) -> float | None:
        machine_usd = usd(each, rate)
        return None if machine_usd is None else machine_usd + (storage or 0.0)

    total = planned(hours.expected)
    samples = steps * job.global_batch_size
    per_million = None if total is None else total / samples * 1e6
    return Cost(
        expected_hours=hours.expected,
        expected_hours_low=hours.low,
        expected_hours_high=hours.high,
        usd_on_demand=usd(hours.expected, quotes.found.get("on_demand")),
        usd_spot=usd(hours.expected, quotes.found.get("spot")),
        usd_capacity_block=usd(hours.expected, quotes.found.get("capacity_block")),
        usd_training_plan=usd(hours.expected, quotes.found.get("training_plan")),
        storage_gb_months=gb_months,
        storage_usd=storage,
        checkpoints_after=kept.after,
        storage_gb_after=kept.after * each_gb,
        storage_usd_a_month_after=_storage_usd(job, kept.after * each_gb, quotes, book),
        planned_usd=total,
        planned_usd_low=planned(hours.low),
        planned_usd_high=planned(hours.high),
        usd_per_million_samples=per_million,
        usd_per_million_tokens=None if per_million is None else per_million / job.data.sequence_length,
        price_basis=basis,
        price_as_of=rate.as_of if rate else None,
    )


def affordable(job: JobSpec, cost: Cost | None) -> bool | None:
    """Whether a run stays within the job's hours and dollars; None where one isn't known."""
    if cost is None:
        return None
    if cost.expected_hours > job.compute.max_hours:
        return False
    if job.budget is None:
        return True
    return None if cost.planned_usd is None else cost.planned_usd <= job.budget.max_usd


def _rate(job: JobSpec, quotes: Quotes) -> tuple[Price | None, str]:
    """(what the job would pay for an instance and hour, on which basis)."""
    on_demand, spot = quotes.found.get("on_demand"), quotes.found.get("spot")
    if job.compute.spot and spot is not None:
        return spot, spot.basis
    plan = quotes.found.get("training_plan")
    if job.compute.training_plan and plan is not None:
        return plan, f"{plan.basis}; paid when training plan {job.compute.training_plan} was bought"
    if on_demand is None:
        return None, "no price known"
    if job.compute.training_plan:
        return on_demand, f"price of the training plan unknown, counted on demand: {on_demand.basis}"
    return (
        on_demand,
        f"spot price unknown, counted on demand: {on_demand.basis}" if job.compute.spot else on_demand.basis,
    )


def _storage_usd(job: JobSpec, gb_months: float, quotes: Quotes, book: PriceBook) -> float | None:
    """Of checkpoints in S3; a file system is the tenant's, whatever lies in it."""
    if not quotes.found:
        return None
    if destination_tier(job) != "s3":
        return 0.0
    region = next(iter(quotes.found.values())).region
    try:
        return gb_months * book.storage(STORE, region).usd_per_gb_month
    except InputError:
        return None


def unpriced_storage(job: JobSpec, region: str, book: PriceBook) -> str | None:
    """That dollars are without what the job's checkpoints cost in S3, and why; None where they have it."""
    if destination_tier(job) != "s3":
        return None
    try:
        book.storage(STORE, region)
    except InputError as error:
        return f"{str(error).partition('; get today')[0]}: what checkpoints cost in S3 is not in the dollars"
    return None
