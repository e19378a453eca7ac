"""The plan of a job: configurations ranked by time, with memory, dollars and goodput, before anything is spent."""

from collections.abc import Iterator

from trainyard.hardware import DEFAULT_REGION, PriceBook
from trainyard.planner.configurations import DATA, chosen_verdict, configuration, verdict_of
from trainyard.planner.formulas import Formulas, formulas_of
from trainyard.planner.gains import gain_of_compiling, gain_of_flash_attention_3
from trainyard.planner.goodput import RECOVERY_OBJECTIVE_SECONDS, SPOT_HOURS_BETWEEN_RECLAIMS
from trainyard.planner.layout import Layout
from trainyard.planner.loading import loading_of
from trainyard.planner.money import (
    Quotes,
    affordable,
    checkpoint_plan,
    cost_of,
    goodput_of,
    quotes_of,
    todays_book,
    unpriced,
    unpriced_storage,
)
from trainyard.planner.reading import Machines, layout_of, layout_of_resolved, machines_of, unread_keys, warned_of_slurm
from trainyard.planner.resolve import (
    data_parallel_layouts,
    levels,
    micro_batch_choices,
    model_parallel_layouts,
    resolve,
    sequences_per_rank,
)
from trainyard.planner.results import CheckpointPlan, Configuration, Cost, Plan, TimePlan
from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob
from trainyard.spec.notes import notes_on
from trainyard.spec.words import counted, either

__all__ = ["Configuration", "Plan", "plan"]

NOTEWORTHY_GAIN = 0.05
"""A configuration this much faster than the chosen one is worth a note."""


def plan(
    job: JobSpec,
    *,
    region: str = DEFAULT_REGION,
    book: PriceBook | None = None,
    formulas: Formulas | None = None,
) -> Plan:
    """The plan of a job on the machines it names; InputError where the job can't be run at all, in one line, of which
    NotCoveredError says that its model has no formulas.

    `book`: the prices; default: the shipped ones, as of today. `formulas`: what stands in for the model's own.
    """
    book = book or todays_book()
    formulas = formulas or formulas_of(job)
    resolved = resolve(job)
    machines = machines_of(job)
    configurations = _ranked(job, resolved, machines, formulas)
    chosen = next(item for item in configurations if item.chosen)
    quotes = quotes_of(job, machines, region, book)
    steps = resolved.steps
    checkpoint = cost = None
    if chosen.time is not None:
        run, stated = goodput_of(job, machines, formulas.saved, chosen.time.step_seconds, steps)
        checkpoint = checkpoint_plan(run, stated)
        cost = cost_of(job, steps=steps, time=chosen.time, run=run, machines=machines, quotes=quotes, book=book)
        if cost is not None and formulas.unit == "images":
            # Images are no sequences of tokens.
            cost = cost.model_copy(update={"usd_per_million_tokens": None})
    documents = quotes.documents()
    missing = unpriced(job, machines, region, quotes)
    return Plan(
        job=job.name,
        tenant=job.tenant,
        params=formulas.params,
        active_params=formulas.active_params,
        steps=steps,
        tokens=_tokens(job, steps),
        unit=formulas.unit,
        instance_type=job.compute.instance_type,
        instance_count=machines.num_hosts,
        num_gpus=machines.world_size,
        gpu=machines.instance.accelerator if machines.instance else None,
        region=region,
        configurations=configurations,
        on_demand=next((quote for quote in documents if quote.purchase == "on_demand"), None),
        spot=next((quote for quote in documents if quote.purchase == "spot"), None),
        quotes=documents,
        checkpoint=checkpoint,
        cost=cost,
        max_usd=job.budget.max_usd if job.budget else None,
        max_hours=job.compute.max_hours,
        fits=chosen.fits,
        affordable=affordable(job, cost),
        price_missing=missing,
        notes=(
            *([missing] if missing else quotes.notes),
            *_notes_of_spot(job, quotes),
            *formulas.notes,
            *formulas.odd,
            *_notes_of_storage(job, cost, region, book),
            *_notes(job, steps, machines, configurations, chosen, checkpoint),
            *_notes_of_gains(job, chosen, machines, formulas),
        ),
    )


def _tokens(job: JobSpec, steps: int | None) -> int | None:
    """Of the whole run; not known where samples are images, or hold one."""
    if steps is None or job.task != "causal_lm":
        return None
    return steps * job.global_batch_size * job.data.sequence_length


def _ranked(job: JobSpec, resolved: ResolvedJob, machines: Machines, formulas: Formulas) -> tuple[Configuration, ...]:
    """The chosen configuration and its alternatives on the same machines, fitting ones first, by time."""
    own = layout_of_resolved(job, resolved)
    chosen = configuration(job, resolved.parallelism, own, machines, formulas)
    reason = "the least recomputation and sharding that fits"
    if job.parallelism != "auto":
        reason = "as the job states"
    elif machines.instance is None:
        reason = "plain data parallelism, what auto is where nothing is known of the machine"
    elif formulas.shape is None:
        reason = "plain data parallelism, what auto is where a model's layouts can't be compared"
    chosen = chosen.model_copy(update={"chosen": True, "verdict": chosen_verdict(chosen, reason)})
    others = []
    shape = formulas.shape
    if machines.instance is not None and shape is not None:
        candidates = [*data_parallel_layouts(machines), *model_parallel_layouts(job, machines, shape)]
        for parallelism in candidates:
            best = _best(job, parallelism, machines, formulas)
            if best is not None and parallelism != resolved.parallelism:
                others.append(best.model_copy(update={"verdict": verdict_of(best, chosen)}))
    return tuple(sorted([chosen, *others], key=_order))


def _order(item: Configuration) -> tuple[bool, float]:
    return item.fits is False, item.time.step_seconds if item.time else 0.0


def _best(job: JobSpec, parallelism: ParallelismSpec, machines: Machines, formulas: Formulas) -> Configuration | None:
    """A layout at its fastest (recomputation, micro-batch) that fits, else its most frugal; None: indivisible batch."""
    found = [configuration(job, parallelism, layout, machines, formulas) for layout in _layouts(job, parallelism)]
    fitting = [item for item in found if item.fits]
    if fitting:
        return min(fitting, key=_order)
    return min(found, key=lambda item: item.memory.total_gib) if found else None


def _layouts(job: JobSpec, parallelism: ParallelismSpec) -> Iterator[Layout]:
    if job.global_batch_size % parallelism.data_parallel_size:
        return
    per_rank = sequences_per_rank(job, parallelism)
    for recompute in levels(job, parallelism):
        for size in micro_batch_choices(job, parallelism):
            if per_rank // size >= parallelism.pipeline:
                count = per_rank // size
                yield layout_of(job, parallelism, micro_batch=size, num_micro_batches=count, recompute=recompute)


def _notes(
    job: JobSpec,
    steps: int | None,
    machines: Machines,
    configurations: tuple[Configuration, ...],
    chosen: Configuration,
    checkpoint: CheckpointPlan | None,
) -> list[str]:
    notes = [*warned_of_slurm(job), *notes_on(job, steps)]
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
        notes += _loading(job, machines, chosen, chosen.time)
        notes.append("start-up (machines, image, data) is not in the hours and dollars")
    notes += _notes_of_deepspeed(chosen.parallelism)
    if checkpoint is not None and job.compute.spot:
        notes.append(
            f"spot: one reclaim in {SPOT_HOURS_BETWEEN_RECLAIMS:g} h is assumed, nobody publishes a rate; waiting for "
            "capacity is not in the hours"
        )
    if checkpoint is not None and checkpoint.recovery_seconds > RECOVERY_OBJECTIVE_SECONDS:
        notes.append(
            f"recovery: {checkpoint.recovery_seconds:.0f} s from a failure to the next step, beyond the objective of "
            f"{RECOVERY_OBJECTIVE_SECONDS:.0f}"
        )
    return notes


def _notes_of_gains(job: JobSpec, chosen: Configuration, machines: Machines, formulas: Formulas) -> list[str]:
    layout = layout_of(
        job,
        chosen.parallelism,
        micro_batch=chosen.micro_batch_size,
        num_micro_batches=chosen.gradient_accumulation_steps,
        recompute=chosen.activation_checkpointing,
    )
    asked = (job, chosen, layout, machines, formulas)
    compiling, attention = gain_of_compiling(*asked), gain_of_flash_attention_3(*asked)
    told = (
        (compiling, "training.compile: true", "fewer passes through memory beside the products"),
        (attention, "model.attention: flash_attention_3", "Hopper's own instructions, where the image has its package"),
    )
    return [
        f"{what} is estimated {gain:.0%} faster: {why}"
        for gain, what, why in told
        if gain is not None and gain >= NOTEWORTHY_GAIN
    ]


def _notes_of_deepspeed(parallelism: ParallelismSpec) -> list[str]:
    """What the job states of it that changes memory or time, and isn't in the plan."""
    if parallelism.engine != "deepspeed":
        return []
    unread = unread_keys(parallelism)
    return [f"parallelism.deepspeed: not in memory or time: {', '.join(unread)}"] if unread else []


def _notes_of_spot(job: JobSpec, quotes: Quotes) -> list[str]:
    """Where reclaimable machines cost as much as those that nobody takes away."""
    spot, on_demand = quotes.found.get("spot"), quotes.found.get("on_demand")
    if not job.compute.spot or spot is None or on_demand is None or spot.usd_per_hour < on_demand.usd_per_hour:
        return []
    return [
        f"compute.spot: costs ${spot.usd_per_hour:,.2f} an instance and hour, on demand "
        f"${on_demand.usd_per_hour:,.2f}: spot: false is no dearer, and isn't reclaimed"
    ]


def _notes_of_storage(job: JobSpec, cost: Cost | None, region: str, book: PriceBook) -> list[str]:
    """What the dollars lack of S3's, and what the run leaves there."""
    if cost is None or cost.planned_usd is None:
        return []
    missing = unpriced_storage(job, region, book)
    notes = [missing] if missing else []
    every = job.checkpoint.keep_every_steps
    if every is not None and cost.storage_gb_after:
        a_month, left = cost.storage_usd_a_month_after, round(cost.checkpoints_after)
        price = f", ${a_month:,.2f} a month in S3" if a_month else ""
        notes.append(
            f"checkpoint.keep_every_steps {every}: about {counted(left, 'checkpoint')} "
            f"{either(left, 'is', 'are')} left at the end,"
            f" {cost.storage_gb_after:,.0f} GB{price}, until somebody removes them"
        )
    return notes


def _loading(job: JobSpec, machines: Machines, chosen: Configuration, time: TimePlan) -> list[str]:
    images = chosen.micro_batch_size * chosen.gradient_accumulation_steps
    unhindered = time.step_seconds - time.breakdown_seconds.get(DATA, 0.0)
    reading = loading_of(job, machines, images_per_rank=images, step_seconds=unhindered)
    return [reading.note()] if reading else []
