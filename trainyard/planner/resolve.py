"""Every `auto` of a job decided, by fixed rules: the same job on the same machines always resolves alike.

The rules, where the machine and the model are known: the least recomputation, then the least sharding, with which
one sequence per rank fits; then the largest power-of-two micro-batch that fits. Elsewhere (this machine's CPU, a
model family without formulas) plain data parallelism and small micro-batches.
"""

import math
from collections.abc import Iterator, Sequence

from trainyard.errors import InputError
from trainyard.planner.candidates import Rules
from trainyard.planner.constants import GIB
from trainyard.planner.facts import check_job, facts_of
from trainyard.planner.goodput import hours_between_failures
from trainyard.planner.layout import Recompute
from trainyard.planner.memory import Memory, memory
from trainyard.planner.preflight import check_preflight
from trainyard.planner.reading import Machines, check_shape, check_world, layout_of, machines_of, shape_of
from trainyard.planner.results import told_apart
from trainyard.planner.shapes import ModelShape
from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob
from trainyard.spec.obstacles import layout_obstacles, separates_documents
from trainyard.spec.words import counted

UNKNOWN_MACHINE_MICRO_BATCH = 8
"""Sequences at most where nothing tells what fits: enough to keep a CPU busy."""

MAX_MICRO_BATCH_TOKENS = 65536
"""Above this a larger micro-batch makes a GPU no faster, and a smaller one leaves room."""

LEVELS: tuple[Recompute, ...] = ("none", "selective", "full")


def resolve(job: JobSpec, *, world_size: int | None = None) -> ResolvedJob:
    """The job with every `auto` decided; `world_size` overrides what the compute section says of ranks.

    InputError in one line: degrees that don't multiply to the ranks, a batch that doesn't divide, a degree that
    doesn't divide the model, a machine that can't do it, nothing that fits, or what the trainer doesn't do with it.
    """
    machines = machines_of(job, world_size)
    check_precision(job, machines)
    _check_peers(job, machines)
    check_preflight(job, machines)
    shape = shape_of(job)
    check_job(job, shape)
    if isinstance(job.parallelism, ParallelismSpec):
        parallelism = job.parallelism if job.recovery.elastic is None else spread(job.parallelism, machines.world_size)
        check_world(job, parallelism, machines, started=world_size is not None)
        check_shape(parallelism, shape)
        per_rank = sequences_per_rank(job, parallelism)
        recompute, micro_batch = _explicit_choice(job, parallelism, machines, shape, per_rank)
    else:
        parallelism, recompute, micro_batch = _automatic_choice(job, machines, shape)
        per_rank = sequences_per_rank(job, parallelism)
    check_micro_batch(job, parallelism, micro_batch, per_rank)
    count = per_rank // micro_batch
    _check_layout(job, parallelism, shape, recompute=recompute, size=micro_batch, count=count)
    return ResolvedJob(
        spec=job,
        parallelism=parallelism,
        num_hosts=machines.num_hosts,
        processes_per_host=machines.processes_per_host,
        steps=num_steps(job),
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=count,
        activation_checkpointing=recompute,
        learning_rate=scaled_learning_rate(job),
        hours_between_failures=hours_between_failures(
            machines.num_hosts * machines.processes_per_host, spot=job.compute.spot
        ),
    )


def check_precision(job: JobSpec, machines: Machines) -> None:
    """InputError where the job asks for 8-bit products of GPUs that have none."""
    machine = machines.instance
    if job.training.precision == "fp8" and machine is not None and machine.gpu and machine.gpu.fp8_tflops is None:
        raise InputError(
            f"training.precision: fp8 needs Ada or Hopper GPUs or newer, and {job.compute.instance_type} has"
            f" {machine.accelerator}; use bf16, or an instance like ml.p5.48xlarge"
        )


def _check_peers(job: JobSpec, machines: Machines) -> None:
    """InputError where a host's checkpoints are to lie on the next host's disk too, and there never is a next one."""
    elastic = job.recovery.elastic
    most = machines.num_hosts if elastic is None else max(machines.num_hosts, elastic.max_instances)
    if job.checkpoint.peer_copy and most == 1:
        raise InputError("checkpoint.peer_copy: needs two hosts or more, and this job has one; set it to false")


def _check_layout(
    job: JobSpec, parallelism: ParallelismSpec, shape: ModelShape | None, *, recompute: Recompute, size: int, count: int
) -> None:
    """InputError for what the trainer would refuse of this layout once machines are rented."""
    found = layout_obstacles(
        job,
        parallelism,
        facts_of(job, shape),
        micro_batch_size=size,
        num_micro_batches=count,
        recompute=recompute,
    )
    if (obstacle := next(found, None)) is not None:
        raise InputError(obstacle)


def num_steps(job: JobSpec) -> int | None:
    """Optimizer steps, the last one whole; None for a job in epochs, before its data is read."""
    return None if job.num_sequences is None else math.ceil(job.num_sequences / job.global_batch_size)


def scaled_learning_rate(job: JobSpec) -> float:
    """The linear scaling rule (Goyal et al., arXiv:1706.02677): the stated rate times global over base batch size.

    A batch that `recovery.elastic` adapts without a base scales it too: in proportion for SGD, by the square root for
    optimizers that divide by the gradient's size (Malladi et al., arXiv:2205.10287).
    """
    training, elastic = job.training, job.recovery.elastic
    if training.base_batch_size is not None:
        return training.learning_rate * job.global_batch_size / training.base_batch_size
    if elastic is None or elastic.batch == "keep":
        return training.learning_rate
    share = float(elastic.share(job.compute.instance_count))
    return training.learning_rate * (share if training.optimizer.kind == "sgd" else math.sqrt(share))


def spread(layout: ParallelismSpec, world_size: int) -> ParallelismSpec:
    """The stated layout over another number of ranks: more or fewer copies; where one copy is too many, fewer shards.

    How the model is split (tensor, pipeline, context, expert) stays. The layout itself where that can't be.
    """
    data, rest = divmod(world_size, layout.tensor * layout.pipeline * layout.context)
    if rest or layout.data_parallel_size == data:
        return layout
    shards = layout.data_shard if data % layout.data_shard == 0 else data
    if (shards * layout.context) % layout.expert:
        return layout
    return layout.model_copy(update={"data_replicate": data // shards, "data_shard": shards})


def sequences_per_rank(job: JobSpec, parallelism: ParallelismSpec) -> int:
    """Sequences that one data-parallel rank reads per step; InputError unless the global batch divides."""
    batch, size = job.global_batch_size, parallelism.data_parallel_size
    if batch % size:
        raise InputError(
            f"training.global_batch_size {batch}: is not divisible by the {counted(size, 'data-parallel rank')}; "
            f"nearest allowed: {_nearest(batch, size)}"
        )
    return batch // size


def check_micro_batch(job: JobSpec, parallelism: ParallelismSpec, micro_batch: int, per_rank: int) -> None:
    """InputError unless micro-batches divide the rank's share and fill the pipeline."""
    if per_rank % micro_batch:
        unit = parallelism.data_parallel_size * micro_batch
        raise InputError(
            f"training.global_batch_size {job.global_batch_size}: is not divisible by {unit} "
            f"({counted(parallelism.data_parallel_size, 'data-parallel rank')} x micro_batch_size {micro_batch}); "
            f"nearest allowed: {_nearest(job.global_batch_size, unit)}"
        )
    count = per_rank // micro_batch
    if count < parallelism.pipeline:
        raise InputError(
            f"parallelism.pipeline {parallelism.pipeline}: needs at least that many micro-batches per step, there are "
            f"{count}; lower micro_batch_size or pipeline, or raise global_batch_size"
        )


def _nearest(batch: int, unit: int) -> str:
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def micro_batch_sizes(per_rank: int, pipeline: int, sequence_length: int) -> Iterator[int]:
    """Power-of-two divisors of a rank's share, descending, that fill the pipeline; 1 always remains."""
    size = 1 << (per_rank.bit_length() - 1)
    while size >= 1:
        small_enough = size * sequence_length <= MAX_MICRO_BATCH_TOKENS or size == 1
        if per_rank % size == 0 and (per_rank // size >= pipeline or size == 1) and small_enough:
            yield size
        size //= 2


def levels(job: JobSpec, parallelism: ParallelismSpec) -> tuple[Recompute, ...]:
    """The recomputation that a job allows: the stated one, or for `auto` all, least first.

    Compiled blocks have no selective one, and with tensor parallelism none at all; nor have zero_bubble's stages, which
    compute two backward passes.
    """
    stated = job.training.activation_checkpointing
    if stated != "auto":
        return (stated,)
    if parallelism.pipeline > 1 and parallelism.pipeline_schedule == "zero_bubble":
        return ("none",)
    if job.training.compile:
        return ("none",) if parallelism.tensor > 1 else ("none", "full")
    return LEVELS


def _unknown_choice(job: JobSpec, parallelism: ParallelismSpec, per_rank: int) -> tuple[Recompute, int]:
    """Recomputation and micro-batch where nothing is known of machine or model."""
    recompute = levels(job, parallelism)[0]
    if job.training.micro_batch_size != "auto":
        return recompute, job.training.micro_batch_size
    largest = min(UNKNOWN_MACHINE_MICRO_BATCH, max(1, per_rank // parallelism.pipeline))
    return recompute, next(size for size in range(largest, 0, -1) if per_rank % size == 0)


def _explicit_choice(
    job: JobSpec, parallelism: ParallelismSpec, machines: Machines, shape: ModelShape | None, per_rank: int
) -> tuple[Recompute, int]:
    """(recomputation, micro-batch) for stated degrees; where nothing fits, the most frugal: `plan` tells."""
    if shape is None or machines.instance is None:
        return _unknown_choice(job, parallelism, per_rank)
    for recompute in levels(job, parallelism):
        found = largest_micro_batch(job, parallelism, machines, shape, recompute)
        if found is not None:
            return recompute, found
    stated = job.training.micro_batch_size
    return levels(job, parallelism)[-1], 1 if stated == "auto" else stated


def micro_batch_choices(job: JobSpec, parallelism: ParallelismSpec) -> list[int]:
    """The stated micro-batch if it divides, or for `auto` every candidate, largest first."""
    per_rank = sequences_per_rank(job, parallelism)
    stated = job.training.micro_batch_size
    if stated == "auto" and job.model.attention == "flash_attention_3" and separates_documents(job):
        return [1]  # more sequences it wouldn't keep apart
    if stated == "auto":
        return list(micro_batch_sizes(per_rank, parallelism.pipeline, job.data.sequence_length))
    return [stated] if per_rank % stated == 0 else []


def largest_micro_batch(
    job: JobSpec, parallelism: ParallelismSpec, machines: Machines, shape: ModelShape, recompute: Recompute
) -> int | None:
    """The stated micro-batch if it fits, else for `auto` the largest that does; None where none does."""
    per_rank = sequences_per_rank(job, parallelism)
    for size in micro_batch_choices(job, parallelism):
        layout = layout_of(job, parallelism, micro_batch=size, num_micro_batches=per_rank // size, recompute=recompute)
        if fits(memory(shape, layout), machines):
            return size
    return None


def fits(use: Memory, machines: Machines) -> bool:
    """Whether the worst rank's need is within what a process gets of the GPU."""
    assert machines.instance is not None and machines.instance.gpu is not None
    return use.needed <= machines.instance.gpu.memory_gib * GIB


def data_parallel_layouts(machines: Machines) -> Iterator[ParallelismSpec]:
    """Layouts without model parallelism, least sharding first: DDP, FSDP within a host, FSDP over all ranks."""
    world, per_host = machines.world_size, machines.processes_per_host
    yield ParallelismSpec(data_replicate=world)
    if 1 < per_host < world:
        yield ParallelismSpec(data_replicate=machines.num_hosts, data_shard=per_host)
    if world > 1:
        yield ParallelismSpec(data_shard=world)


def model_parallel_layouts(job: JobSpec, machines: Machines, shape: ModelShape) -> Iterator[ParallelismSpec]:
    """Tensor parallelism within a host and pipelines over hosts, FSDP over the rest; least splitting first.

    None that the trainer refuses: fp8 and compiled mixtures of experts go without tensor parallelism, and so does what
    is compiled and recomputed.
    """
    rules = Rules(job, shape)
    for pipeline in _powers(machines.num_hosts):
        for tensor in _powers(machines.processes_per_host):
            rest, remainder = divmod(machines.world_size, tensor * pipeline)
            if tensor * pipeline == 1 or remainder or not rest:
                continue
            layout = ParallelismSpec(data_shard=rest, tensor=tensor, pipeline=pipeline)
            if rules.accepts(layout):
                yield layout


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if limit % (1 << exponent) == 0]


def _automatic_choice(
    job: JobSpec, machines: Machines, shape: ModelShape | None
) -> tuple[ParallelismSpec, Recompute, int]:
    if shape is None or machines.instance is None:
        parallelism = ParallelismSpec(data_replicate=machines.world_size)
        return parallelism, *_unknown_choice(job, parallelism, sequences_per_rank(job, parallelism))
    candidates = list(data_parallel_layouts(machines))
    dividing = [item for item in candidates if job.global_batch_size % item.data_parallel_size == 0]
    for recompute in levels(job, candidates[0]):
        for parallelism in dividing:
            found = largest_micro_batch(job, parallelism, machines, shape, recompute)
            if found is not None:
                return parallelism, recompute, found
    split = [
        item
        for item in model_parallel_layouts(job, machines, shape)
        if job.global_batch_size % item.data_parallel_size == 0
    ]
    starved: ParallelismSpec | None = None
    for parallelism in split:
        for recompute in levels(job, parallelism):
            found = largest_micro_batch(job, parallelism, machines, shape, recompute)
            if found is None:
                continue
            if sequences_per_rank(job, parallelism) // found >= parallelism.pipeline:
                return parallelism, recompute, found
            starved = starved or parallelism
    if not (dividing or split):
        sequences_per_rank(job, candidates[0])
    _check_stated_micro_batch(job, [*dividing, *split])
    if starved is not None:
        raise InputError(_too_few_sequences(job, machines, starved))
    raise InputError(_nothing_fits(job, machines, shape, (dividing or split)[-1]))


def _check_stated_micro_batch(job: JobSpec, layouts: Sequence[ParallelismSpec]) -> None:
    """InputError where the stated micro-batch divides no layout's share, so that none was looked at."""
    stated = job.training.micro_batch_size
    if stated != "auto" and not any(micro_batch_choices(job, item) for item in layouts):
        check_micro_batch(job, layouts[0], stated, sequences_per_rank(job, layouts[0]))


def _too_few_sequences(job: JobSpec, machines: Machines, layout: ParallelismSpec) -> str:
    """Of a model that only pipelines hold, whose micro-batches are fewer than their stages."""
    stated = job.training.micro_batch_size
    # At 1 there is nothing to lower.
    smaller = "" if stated in ("auto", 1) else "lower training.micro_batch_size, "
    least = layout.data_parallel_size * layout.pipeline * (1 if stated == "auto" else stated)
    return (
        f"training.global_batch_size {job.global_batch_size}: is too small for "
        f"{counted(machines.world_size, 'rank')}; the layout "
        f"that splits the model least and fits (tensor {layout.tensor}, pipeline {layout.pipeline}, data_shard "
        f"{layout.data_shard}) needs {counted(least, 'sequence')} a step; raise it, {smaller}take fewer "
        "machines, or take a "
        "layout that trainyard plan --search finds"
    )


def _nothing_fits(job: JobSpec, machines: Machines, shape: ModelShape, parallelism: ParallelismSpec) -> str:
    assert machines.instance is not None and machines.instance.gpu is not None
    per_rank = sequences_per_rank(job, parallelism)
    stated = job.training.micro_batch_size
    size = 1 if stated == "auto" else stated
    recompute = levels(job, parallelism)[-1]
    layout = layout_of(
        job, parallelism, micro_batch=size, num_micro_batches=max(1, per_rank // size), recompute=recompute
    )
    room = machines.instance.gpu.memory_gib
    needed, have = told_apart(
        memory(shape, layout).needed / GIB, room, ("{:,.1f}".format, "{:,.2f}".format, "{:,.3f}".format)
    )
    return (
        f"nothing fits {machines.num_hosts} x {machines.instance.type}: the most frugal layout ({layout.words()}, "
        f"{layout.recompute} recomputation, micro-batch {size}) needs {needed} GiB of {have} per GPU; take more or "
        "larger GPUs, or a shorter sequence_length (trainyard plan --search looks at other machines and layouts)"
    )
