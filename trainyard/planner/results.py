"""What the planner answers with: documents that survive JSON, printed by `planner.render` and kept in job records."""

import datetime
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import ConfigDict

from trainyard.spec.base import SpecModel
from trainyard.spec.job import ParallelismSpec


def figure(value: float, digits: int = 4) -> str:
    """So many digits that count, and no exponent where a number is large."""
    return f"{float(f'{value:.{digits}g}'):,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def told_apart(need: float, have: float, forms: Sequence[Callable[[float], str]]) -> tuple[str, str]:
    """Two numbers in the first of the formats in which one can be seen to be more than the other."""
    pairs = [(form(need), form(have)) for form in forms]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


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
    """What takes how much of a step: computing, exposed communication by kind, the pipeline's bubble, the optimizer,
    and for jobs with images waiting for them."""
    tokens_per_second: float
    """All GPUs together."""
    mfu: float
    """Model FLOPs (attention counted in full, no recomputation) over the GPUs' dense peak."""
    hours: float | None
    """Of the run without failures and saves; None for a job in epochs."""


class HostMemoryPlan(SpecModel):
    """GiB of one host's own memory."""

    processes_gib: float
    checkpoint_gib: float
    """Copies that an asynchronous save writes from."""
    offloaded_gib: float
    """Optimizer state, gradients and weights that live there."""
    disk_buffers_gib: float = 0.0
    """Assumed, of what lives on a disk."""
    total_gib: float
    rank_gib: float
    """Of one process: all but the system's part, divided by the ranks."""
    available_gib: float | None
    """None where the machine isn't known."""


class Configuration(SpecModel):
    """One way to run the job on its machines."""

    layout: str
    parallelism: ParallelismSpec
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: Literal["none", "selective", "full"]
    memory: MemoryPlan
    host: HostMemoryPlan
    time: TimePlan | None
    """None where the machine isn't known."""
    fits: bool | None
    """GPU and host."""
    chosen: bool
    verdict: str
    """Why it is chosen or not, in words."""


class PriceQuote(SpecModel):
    """USD for one instance and hour."""

    purchase: str
    """on_demand, spot, capacity_block or training_plan."""
    usd_per_hour: float
    basis: str
    as_of: datetime.date
    source: str


class TierPlan(SpecModel):
    """A checkpoint on one kind of storage."""

    name: Literal["nvme", "fsx", "s3"]
    save_seconds: float
    restore_seconds: float
    recovery_seconds: float
    """From a failure to the next step, read from there."""
    within_objective: bool
    """Of 300 s."""


class CheckpointPlan(SpecModel):
    """Saving, and what failures leave of the time."""

    size_gib: float
    tier: Literal["nvme", "fsx", "s3"]
    """Where the job saves first."""
    save_seconds: float
    """Until a checkpoint is whole there."""
    stall_seconds: float
    """Of training, for each."""
    interval_seconds: float | None
    """None: nothing is saved before the end."""
    best_interval_seconds: float
    """Young's and Daly's, for the failure rate below."""
    mean_hours_between_failures: float
    """Hardware's, and for a spot job reclaims."""
    recovery_seconds: float
    """From a failure to the next step."""
    goodput: float
    """Share of wall-clock time that is progress."""
    tiers: tuple[TierPlan, ...]
    """What it would be on each."""


class Cost(SpecModel):
    """Dollars of the whole run, goodput included. A price that isn't known stays unknown."""

    # Without any goodput the run never ends.
    model_config = ConfigDict(allow_inf_nan=True)

    expected_hours: float
    expected_hours_low: float
    """With the next: the 80% interval, for the step's time, the failure rate and chance. Prices have none."""
    expected_hours_high: float
    usd_on_demand: float | None
    """Of the machines, as the next three."""
    usd_spot: float | None
    usd_capacity_block: float | None
    usd_training_plan: float | None
    storage_gb_months: float
    """Checkpoints that are kept, from the run's begin to its end."""
    storage_usd: float | None
    """Of these in S3; what moves between S3 and machines of one region costs nothing."""
    checkpoints_after: float = 0.0
    """How many are left when the run has ended, until somebody removes them; with the next two."""
    storage_gb_after: float = 0.0
    storage_usd_a_month_after: float | None = None
    """Of these in S3. In no other dollars of the plan."""
    planned_usd: float | None
    """Machines on demand, or for a spot job at its spot price (where that isn't known, the on-demand price); and
    storage, where its price is known."""
    planned_usd_low: float | None = None
    planned_usd_high: float | None = None
    usd_per_million_tokens: float | None = None
    usd_per_million_samples: float | None = None
    """Sequences."""
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
    unit: Literal["tokens", "images"] = "tokens"
    """What `tokens_per_second` counts."""
    instance_type: str | None
    instance_count: int
    num_gpus: int
    gpu: str | None
    region: str
    configurations: tuple[Configuration, ...]
    """Those that fit first, by time."""
    on_demand: PriceQuote | None
    spot: PriceQuote | None
    quotes: tuple[PriceQuote, ...]
    """Every price that is known and young enough, those two among them."""
    checkpoint: CheckpointPlan | None
    cost: Cost | None
    max_usd: float | None
    max_hours: float
    fits: bool | None
    """Whether the chosen configuration fits the GPUs; None where they aren't known."""
    affordable: bool | None
    """Whether it stays within budget.max_usd and compute.max_hours; None where price or length isn't known."""
    notes: tuple[str, ...]
    price_missing: str | None = None
    """Among the notes: which price isn't known, so that no budget can be kept, and how to get it."""

    @property
    def chosen(self) -> Configuration:
        """The configuration that runs."""
        return next(item for item in self.configurations if item.chosen)


class Option(SpecModel):
    """A machine, so many of it, and the configuration that is fastest there."""

    # Without any goodput the run never ends.
    model_config = ConfigDict(allow_inf_nan=True)

    instance_type: str
    instance_count: int
    num_gpus: int
    configuration: Configuration
    """Where nothing fits, the one that is nearest to it."""
    expected_hours: float | None = None
    """With saves and failures; with the next two the 80% interval. None where nothing fits."""
    expected_hours_low: float | None = None
    expected_hours_high: float | None = None
    usd: float | None = None
    usd_low: float | None = None
    usd_high: float | None = None
    price_basis: str = ""
    price_as_of: datetime.date | None = None
    goodput: float | None = None
    on_front: bool = False
    """No other option is at once faster and cheaper."""
    chosen: bool = False
    verdict: str
    """Why it is chosen or not, in words."""


class Search(SpecModel):
    """Every sensible way to run a job, ranked."""

    job: str
    params: int
    steps: int | None
    unit: Literal["tokens", "images"] = "tokens"
    """What `tokens_per_second` counts."""
    region: str
    deadline_hours: float
    max_usd: float | None
    num_layouts: int
    """Looked at, over all machines."""
    num_estimates: int
    options: tuple[Option, ...]
    """The chosen one first, then by dollars; last what doesn't fit."""
    alternatives: tuple[Configuration, ...]
    """Other configurations of the chosen machines, with why they lost."""
    overrides: tuple[str, ...]
    """What to give to --set so that the job runs as chosen."""
    notes: tuple[str, ...]
