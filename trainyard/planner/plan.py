"""The plan of a job: configurations ranked by time, with memory, dollars and goodput, before anything is spent."""

import datetime
import math
from collections.abc import Iterator
from typing import Literal

from pydantic import ConfigDict

from trainyard.errors import InputError
from trainyard.hardware import DEFAULT_REGION, Price, price
from trainyard.planner.communication import fabric_of
from trainyard.planner.constants import GIB
from trainyard.planner.goodput import Goodput, goodput
from trainyard.planner.layout import Layout
from trainyard.planner.memory import PARTS, Memory, Stage, lora_params, memory
from trainyard.planner.reading import Machines, layout_of, machines_of, required_shape
from trainyard.planner.resolve import (
    data_parallel_layouts,
    levels,
    micro_batch_choices,
    model_parallel_layouts,
    num_steps,
    resolve,
    sequences_per_rank,
)
from trainyard.planner.shapes import ModelShape
from trainyard.planner.timing import StepTime, step_time, time_spread
from trainyard.spec.base import SpecModel
from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob

SAME_SPEED = 0.02
"""Step times closer than this are no reason to prefer one."""

NOTEWORTHY_GAIN = 0.05
"""A configuration this much faster than the chosen one is worth a note."""


class MemoryPlan(SpecModel):
    """GiB on the worst rank at the peak of a step."""

    parameters_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    buffers_gib: float
    """Gathered parameters, reduction buckets, cast copies."""
    workspace_gib: float
    """Kernels' scratch, the CUDA context, and what the allocator loses to fragmentation."""
    margin_gib: float
    """What the estimate may be short of, at most once in ten."""
    total_gib: float
    available_gib: float | None
    """What a process gets of the GPU; None where the machine isn't known."""


class TimePlan(SpecModel):
    """One optimizer step, and the whole run, by the clock."""

    step_seconds: float
    step_seconds_low: float
    """With the next: the 80% interval, from published runs whose source the formulas' constants had not seen."""
    step_seconds_high: float
    breakdown_seconds: dict[str, float]
    tokens_per_second: float
    """All GPUs together."""
    mfu: float
    """Model FLOPs (attention counted in full, no recomputation) over the GPUs' dense peak."""
    hours: float | None
    """Of the run without failures and saves; None for a job in epochs."""


class Configuration(SpecModel):
    """One way to run the job on its machines."""

    layout: str
    parallelism: ParallelismSpec
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: Literal["none", "selective", "full"]
    memory: MemoryPlan
    time: TimePlan | None
    """None where the machine isn't known."""
    fits: bool | None
    chosen: bool
    verdict: str
    """Why it is chosen or not, in words."""


class PriceQuote(SpecModel):
    """USD for one instance and hour."""

    usd_per_hour: float
    basis: str
    as_of: datetime.date
    source: str


class CheckpointPlan(SpecModel):
    """Saving, and what failures leave of the time."""

    size_gib: float
    save_seconds: float
    stall_seconds: float
    interval_seconds: float | None
    best_interval_seconds: float
    """Young's and Daly's, for the failure rate below."""
    mean_hours_between_failures: float
    goodput: float
    """Share of wall-clock time that is progress, hardware failures counted, spot reclaims not."""


class Cost(SpecModel):
    """Dollars of the whole run, goodput included. A price that isn't known stays unknown."""

    # Without any goodput the run never ends.
    model_config = ConfigDict(allow_inf_nan=True)

    expected_hours: float
    usd_on_demand: float | None
    usd_spot: float | None
    planned_usd_low: float | None = None
    """With the next: the 80% interval of the step's time, in dollars. Prices and failures are not in it."""
    planned_usd_high: float | None = None
    planned_usd: float | None
    """On demand, or for a spot job its spot price; where that isn't known, the on-demand price."""
    price_basis: str
    price_as_of: datetime.date | None


class Plan(SpecModel):
    """What a job will need. `chosen` is what `launch` would run."""

    job: str
    tenant: str | None
    params: int
    active_params: int
    steps: int | None
    tokens: int | None
    instance_type: str | None
    instance_count: int
    num_gpus: int
    gpu: str | None
    region: str
    configurations: tuple[Configuration, ...]
    """Those that fit first, by time."""
    on_demand: PriceQuote | None
    spot: PriceQuote | None
    checkpoint: CheckpointPlan | None
    cost: Cost | None
    max_usd: float | None
    max_hours: float
    fits: bool | None
    """Whether the chosen configuration fits the GPUs; None where they aren't known."""
    affordable: bool | None
    """Whether it stays within budget.max_usd and compute.max_hours; None where price or length isn't known."""
    notes: tuple[str, ...]

    @property
    def chosen(self) -> Configuration:
        """The configuration that runs."""
        return next(item for item in self.configurations if item.chosen)


def plan(job: JobSpec, *, region: str = DEFAULT_REGION) -> Plan:
    """The plan of a job on the machines it names; InputError where the job can't be run at all, in one line."""
    shape = required_shape(job)
    resolved = resolve(job)
    machines = machines_of(job)
    configurations = _ranked(job, resolved, machines, shape)
    chosen = next(item for item in configurations if item.chosen)
    on_demand, spot, notes = _prices(job, machines, region)
    checkpoint = _checkpoint(job, resolved, chosen, shape)
    cost = _cost(job, chosen, checkpoint, machines, on_demand, spot)
    notes += _notes(job, configurations, chosen, checkpoint)
    steps = resolved.steps
    return Plan(
        job=job.name,
        tenant=job.tenant,
        params=shape.params,
        active_params=shape.active_params,
        steps=steps,
        tokens=steps * job.training.global_batch_size * job.data.sequence_length if steps else None,
        instance_type=job.compute.instance_type,
        instance_count=machines.num_hosts,
        num_gpus=machines.world_size,
        gpu=machines.instance.accelerator if machines.instance else None,
        region=region,
        configurations=configurations,
        on_demand=_quote(on_demand),
        spot=_quote(spot),
        checkpoint=checkpoint,
        cost=cost,
        max_usd=job.budget.max_usd if job.budget else None,
        max_hours=job.compute.max_hours,
        fits=chosen.fits,
        affordable=_affordable(job, cost),
        notes=tuple(notes),
    )


def _ranked(job: JobSpec, resolved: ResolvedJob, machines: Machines, shape: ModelShape) -> tuple[Configuration, ...]:
    """The chosen configuration and its alternatives on the same machines, fitting ones first, by time."""
    own = layout_of(
        job,
        resolved.parallelism,
        micro_batch=resolved.micro_batch_size,
        num_micro_batches=resolved.gradient_accumulation_steps,
        recompute=resolved.activation_checkpointing,
    )
    chosen = _configuration(job, resolved.parallelism, own, machines, shape)
    reason = "as the job states" if job.parallelism != "auto" else "the least recomputation and sharding that fits"
    chosen = chosen.model_copy(update={"chosen": True, "verdict": _chosen_verdict(chosen, reason)})
    others = []
    if machines.instance is not None:
        candidates = [*data_parallel_layouts(machines), *model_parallel_layouts(job, machines, shape)]
        for parallelism in candidates:
            best = _best(job, parallelism, machines, shape)
            if best is not None and parallelism != resolved.parallelism:
                others.append(best.model_copy(update={"verdict": _verdict(best, chosen)}))
    return tuple(sorted([chosen, *others], key=_order))


def _order(item: Configuration) -> tuple[bool, float]:
    return item.fits is False, item.time.step_seconds if item.time else 0.0


def _best(job: JobSpec, parallelism: ParallelismSpec, machines: Machines, shape: ModelShape) -> Configuration | None:
    """A layout at its fastest (recomputation, micro-batch) that fits, else its most frugal; None: indivisible batch."""
    found = [_configuration(job, parallelism, layout, machines, shape) for layout in _layouts(job, parallelism)]
    fitting = [item for item in found if item.fits]
    if fitting:
        return min(fitting, key=_order)
    return min(found, key=lambda item: item.memory.total_gib) if found else None


def _layouts(job: JobSpec, parallelism: ParallelismSpec) -> Iterator[Layout]:
    if job.training.global_batch_size % parallelism.data_parallel_size:
        return
    per_rank = sequences_per_rank(job, parallelism)
    for recompute in levels(job, parallelism):
        for size in micro_batch_choices(job, parallelism):
            if per_rank // size >= parallelism.pipeline:
                count = per_rank // size
                yield layout_of(job, parallelism, micro_batch=size, num_micro_batches=count, recompute=recompute)


def _configuration(
    job: JobSpec, parallelism: ParallelismSpec, layout: Layout, machines: Machines, shape: ModelShape
) -> Configuration:
    use = memory(shape, layout)
    available = machines.instance.gpu.memory_gib if machines.instance and machines.instance.gpu else None
    return Configuration(
        layout=layout.words(),
        parallelism=parallelism,
        micro_batch_size=layout.micro_batch,
        gradient_accumulation_steps=layout.num_micro_batches,
        activation_checkpointing=layout.recompute,
        memory=_memory_plan(use, available),
        time=_time_plan(job, layout, machines, shape),
        fits=use.needed <= available * GIB if available is not None else None,
        chosen=False,
        verdict="",
    )


def _memory_plan(use: Memory, available_gib: float | None) -> MemoryPlan:
    parts = {f"{name}_gib": getattr(use, name) / GIB for name in PARTS}
    parts["workspace_gib"] += (use.needed - use.margin - use.allocated) / GIB
    return MemoryPlan(**parts, margin_gib=use.margin / GIB, total_gib=use.needed / GIB, available_gib=available_gib)


def _time_plan(job: JobSpec, layout: Layout, machines: Machines, shape: ModelShape) -> TimePlan | None:
    if machines.instance is None or machines.instance.gpu is None:
        return None
    device = machines.instance.gpu
    time: StepTime = step_time(shape, layout, device, fabric_of(machines.instance))
    tokens = layout.global_batch * layout.sequence_length
    steps = num_steps(job)
    work = shape.flops_per_token(layout.sequence_length) * (1.0 if layout.method == "full" else 2 / 3)
    peak = device.peak_tflops(layout.precision) * 1e12 * layout.world_size
    return TimePlan(
        step_seconds=time.total,
        step_seconds_low=time.total / time_spread(shape, layout, device),
        step_seconds_high=time.total * time_spread(shape, layout, device),
        breakdown_seconds=time.breakdown(),
        tokens_per_second=tokens / time.total,
        mfu=work * tokens / time.total / peak,
        hours=steps * time.total / 3600 if steps is not None else None,
    )


def _largest_part(use: MemoryPlan) -> str:
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    name = max(names, key=lambda part: getattr(use, f"{part}_gib"))
    return f"{name} {getattr(use, f'{name}_gib'):.1f}"


def _does_not_fit(item: Configuration) -> str:
    use = item.memory
    return f"does not fit: {use.total_gib:.1f} GiB of {use.available_gib:.1f}; {_largest_part(use)}"


def _chosen_verdict(item: Configuration, reason: str) -> str:
    return f"{reason}, but {_does_not_fit(item)}" if item.fits is False else f"chosen: {reason}"


def _verdict(item: Configuration, chosen: Configuration) -> str:
    """Why another configuration isn't the chosen one."""
    if item.fits is False:
        return _does_not_fit(item)
    assert item.time is not None and chosen.time is not None
    ratio = item.time.step_seconds / chosen.time.step_seconds
    if abs(ratio - 1) < SAME_SPEED:
        return "as fast by this estimate, with another split"
    if ratio >= 1:
        return f"{ratio - 1:.0%} slower; {_largest_loss(item.time)}"
    return f"{1 - ratio:.0%} faster by this estimate; state it in parallelism to choose it"


def _largest_loss(time: TimePlan) -> str:
    losses = {name: value for name, value in time.breakdown_seconds.items() if name not in ("forward", "backward")}
    name = max(losses, key=lambda part: losses[part])
    return f"{name.replace('_', ' ')} takes {losses[name] / time.step_seconds:.0%} of a step"


def _prices(job: JobSpec, machines: Machines, region: str) -> tuple[Price | None, Price | None, list[str]]:
    """(on demand, spot, notes on what isn't known)."""
    if machines.instance is None or job.compute.instance_type is None or job.compute.backend == "local":
        return None, None, []
    found: list[Price | None] = []
    notes = []
    for spot in (False, True):
        try:
            found.append(price(job.compute.instance_type, region, spot=spot))
        except InputError as error:
            found.append(None)
            if spot == job.compute.spot or not spot:
                notes.append(str(error))
    return found[0], found[1], notes


def _quote(found: Price | None) -> PriceQuote | None:
    if found is None:
        return None
    return PriceQuote(usd_per_hour=found.usd_per_hour, basis=found.basis, as_of=found.as_of, source=found.source)


def _checkpoint(job: JobSpec, resolved: ResolvedJob, chosen: Configuration, shape: ModelShape) -> CheckpointPlan | None:
    if chosen.time is None:
        return None
    step_seconds = chosen.time.step_seconds
    spec = job.checkpoint
    intervals = [
        *([spec.every_steps * step_seconds] if isinstance(spec.every_steps, int) else []),
        *([spec.every_minutes * 60] if isinstance(spec.every_minutes, float) else []),
    ]
    saved = float(shape.params)
    if job.model.adapter:
        whole = Layout(lora_rank=job.model.adapter.rank, num_lora_targets=len(job.model.adapter.targets))
        saved = lora_params(shape, whole, Stage(shape.layers, True, True, 1))
    if "auto" in (spec.every_steps, spec.every_minutes):
        best = goodput(
            saved, resolved.world_size, resolved.num_hosts, asynchronous=spec.asynchronous, interval_seconds=math.inf
        )
        intervals.append(best.best_interval_seconds)
    # Without periodic saves, a failure costs the run up to its end.
    run_seconds = (resolved.steps or 0) * step_seconds or 24 * 3600.0
    result: Goodput = goodput(
        saved,
        resolved.world_size,
        resolved.num_hosts,
        asynchronous=spec.asynchronous,
        interval_seconds=min(intervals, default=run_seconds),
    )
    return CheckpointPlan(
        size_gib=result.checkpoint_bytes / GIB,
        save_seconds=result.save_seconds,
        stall_seconds=result.stall_seconds,
        interval_seconds=min(intervals, default=None),
        best_interval_seconds=result.best_interval_seconds,
        mean_hours_between_failures=result.mean_time_between_failures_seconds / 3600,
        goodput=result.fraction,
    )


def _cost(
    job: JobSpec,
    chosen: Configuration,
    checkpoint: CheckpointPlan | None,
    machines: Machines,
    on_demand: Price | None,
    spot: Price | None,
) -> Cost | None:
    if chosen.time is None or chosen.time.hours is None or checkpoint is None:
        return None
    time = chosen.time
    hours = chosen.time.hours / checkpoint.goodput if checkpoint.goodput > 0 else float("inf")
    low, high = (hours * bound / time.step_seconds for bound in (time.step_seconds_low, time.step_seconds_high))
    rate, basis = on_demand, on_demand.basis if on_demand else "no price known"
    if job.compute.spot and spot is not None:
        rate, basis = spot, spot.basis
    elif job.compute.spot and on_demand is not None:
        basis = f"spot price unknown, counted on demand: {on_demand.basis}"
    return Cost(
        expected_hours=hours,
        usd_on_demand=cost_usd(hours, machines.num_hosts, on_demand),
        usd_spot=cost_usd(hours, machines.num_hosts, spot),
        planned_usd=cost_usd(hours, machines.num_hosts, rate),
        planned_usd_low=cost_usd(low, machines.num_hosts, rate),
        planned_usd_high=cost_usd(high, machines.num_hosts, rate),
        price_basis=basis,
        price_as_of=rate.as_of if rate else None,
    )


def cost_usd(hours: float, instances: int, rate: Price | None) -> float | None:
    """Hours x instances x price, and nothing else; None without a price."""
    return None if rate is None else hours * instances * rate.usd_per_hour


def _affordable(job: JobSpec, cost: Cost | None) -> bool | None:
    if cost is None:
        return None
    if cost.expected_hours > job.compute.max_hours:
        return False
    if job.budget is None:
        return True
    return None if cost.planned_usd is None else cost.planned_usd <= job.budget.max_usd


def _notes(
    job: JobSpec,
    configurations: tuple[Configuration, ...],
    chosen: Configuration,
    checkpoint: CheckpointPlan | None,
) -> list[str]:
    notes = []
    if chosen.time is None:
        notes.append("compute names no known machine: memory only, no time and no cost")
    elif chosen.time.hours is None:
        notes.append("the job is stated in epochs: steps, hours and cost are known when the data has been read")
    best = next((item for item in configurations if item.fits and item.time and not item.chosen), None)
    if best is not None and best.time is not None and chosen.time is not None and chosen.fits:
        gain = 1 - best.time.step_seconds / chosen.time.step_seconds
        if gain > NOTEWORTHY_GAIN:
            notes.append(f"{best.layout} is estimated {gain:.0%} faster than the chosen {chosen.layout}")
    if chosen.time is not None:
        notes.append("start-up (machines, image, data) and storage are not in the hours and dollars")
    if checkpoint is not None and job.compute.spot:
        notes.append("spot reclaims are not in the goodput: no hazard rate is known")
    return notes
