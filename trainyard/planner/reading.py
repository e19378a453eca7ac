"""What a job spec means to the formulas: its model's shape, its machines, and its layout for given choices."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

from trainyard.errors import InputError
from trainyard.hardware import Instance, instance, instance_types
from trainyard.planner.config_values import Config, NotCoveredError
from trainyard.planner.constants import has_hopper_workspaces
from trainyard.planner.families import (
    NARROW_SOFTMAX,
    config_from_source,
    own_config_from_source,
    shape_from_source,
    trained_shape,
    with_positions,
    writes_scores_out,
)
from trainyard.planner.layout import AttentionKernel, Layout, Masks, Recompute, ZeroSizes
from trainyard.planner.shapes import ModelShape
from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob
from trainyard.spec.obstacles import separates_documents
from trainyard.spec.words import counted, either

BYTE_VOCABULARY = 257
"""The trainer's BYTE_VOCAB_SIZE: without a tokenizer a token is a byte, or a document's end."""

LOSS_CHUNK_TOKENS = 1024
"""The trainer's CHUNK_TOKENS: positions whose logits exist at one time."""

WITHOUT_KERNELS = frozenset({"volta"})
"""GPU generations that torch 2.13's wheels, of CUDA 13, have no kernels for (pytorch#172352)."""

INTERLEAVED_CHUNKS = 2
"""Model chunks per rank under the interleaved schedule."""


@dataclass(frozen=True)
class Machines:
    """Where the ranks run."""

    num_hosts: int
    processes_per_host: int
    instance: Instance | None
    """None: this machine, or one of which nothing is known."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.num_hosts * self.processes_per_host


def shape_of(job: JobSpec) -> ModelShape | None:
    """The model's shape; None for tasks and families whose sizes the formulas don't cover."""
    if job.task != "causal_lm":
        return None
    config = _stated_config(job)
    if config is not None:
        # A covered model with an impossible size is an error; another one is only unknown.
        with suppress(NotCoveredError):
            return trained_shape(config)
        return None
    try:
        return required_shape(job)
    except InputError:
        return None


def required_shape(job: JobSpec) -> ModelShape:
    """The model's shape; InputError says why there is none."""
    if job.task != "causal_lm":
        raise InputError(
            f"task {job.task}: only causal_lm can be planned; give the layout in parallelism and launch it"
        )
    config = _stated_config(job)
    if config is not None:
        return trained_shape(config)
    assert job.model.source is not None
    return shape_from_source(job.model.source)


def _stated_config(job: JobSpec) -> Config | None:
    """The configuration in the job, with what the trainer gives one that doesn't state it: positions, and its
    tokenizer's vocabulary, here that of bytes."""
    config, data = job.model.config, job.data
    if config is None:
        return None
    is_bytes = data.tokenizer is None and all(source.format != "tokens" for source in data.train)
    if config.get("vocab_size") is None and is_bytes:
        config = {**config, "vocab_size": BYTE_VOCABULARY}
    return with_positions(config, data.sequence_length)


def model_type_of(job: JobSpec) -> str | None:
    """transformers' name of the model's family; None where nothing tells."""
    if job.model.config is not None:
        return str(job.model.config["model_type"])
    assert job.model.source is not None
    try:
        found = own_config_from_source(job.model.source).get("model_type")
    except InputError:
        return None
    return None if found is None else str(found)


def machines_of(job: JobSpec, world_size: int | None = None) -> Machines:
    """The machines a job asks for; `world_size` is the number of processes that have really been started."""
    compute = job.compute
    machine = instance(compute.instance_type) if compute.instance_type else None
    if machine is not None and machine.gpu is None:
        raise InputError(
            f"compute.instance_type {compute.instance_type}: has {machine.accelerator}, the trainer runs on NVIDIA GPUs"
        )
    if machine is not None and machine.gpu is not None and machine.gpu.generation in WITHOUT_KERNELS:
        raise InputError(
            f"compute.instance_type {compute.instance_type}: has {machine.accelerator}, for which the trainer's torch "
            "has no kernels (CUDA 13 begins with Turing); take newer GPUs, e.g. those of g5, p4d or p5"
        )
    if machine is not None and compute.backend != "local":
        _check_efa(machine, compute.instance_type or "", compute.instance_count)
    hosts = compute.instance_count if compute.backend != "local" else 1
    if world_size is None:
        return Machines(hosts, _processes_per_host(job, machine, hosts), machine)
    if world_size < 1:
        raise InputError(f"world size must be at least 1 (given: {world_size})")
    per_host = machine.num_gpus if machine is not None else world_size
    if world_size % per_host == 0:
        return Machines(world_size // per_host, per_host, machine)
    # Fewer processes than the machine has GPUs: someone tries the job on another machine.
    return (
        Machines(hosts, world_size // hosts, machine) if world_size % hosts == 0 else Machines(1, world_size, machine)
    )


def warned_of_slurm(job: JobSpec) -> list[str]:
    """In one line, where Slurm is asked for other GPUs a machine than its type has, on which the ranks count."""
    compute = job.compute
    stated = compute.slurm.gpus_per_node
    if compute.backend != "slurm" or stated is None or compute.instance_type is None:
        return []
    has = instance(compute.instance_type).num_gpus
    if stated == has:
        return []
    return [
        f"compute.slurm.gpus_per_node {stated}: the job is planned and started with the {counted(has, 'GPU')} that "
        f"compute.instance_type {compute.instance_type} has, a rank each; make the two equal, or leave it out"
    ]


def _processes_per_host(job: JobSpec, machine: Instance | None, hosts: int) -> int:
    if machine is not None:
        return machine.num_gpus
    if isinstance(job.parallelism, ParallelismSpec):
        world = job.parallelism.world_size
        if world % hosts:
            raise InputError(
                f"parallelism: {_product(job.parallelism)} = {counted(world, 'rank')} can't be spread evenly over "
                f"compute.instance_count {counted(hosts, 'host')}; use a multiple of {hosts}"
            )
        return world // hosts
    return 1


def _check_efa(machine: Instance, name: str, count: int) -> None:
    if count > 1 and machine.efa_interfaces == 0:
        family = machine.type.split(".")[0]
        prefix = "ml." if name.startswith("ml.") else ""
        with_efa = [other for other in instance_types() if instance(other).efa_interfaces and instance(other).gpu]
        near = [other for other in with_efa if other.split(".")[0] == family] or ["p5.4xlarge", "p5.48xlarge"]
        raise InputError(
            f"compute.instance_type {name}: has no EFA, so a job can't span {count} of them; set instance_count: 1 "
            f"or take {', '.join(prefix + other for other in near[:4])}"
        )


def _product(parallelism: ParallelismSpec) -> str:
    degrees = ("data_replicate", "data_shard", "tensor", "pipeline", "context")
    return (
        " x ".join(f"{name} {getattr(parallelism, name)}" for name in degrees if getattr(parallelism, name) > 1) or "1"
    )


def check_world(job: JobSpec, parallelism: ParallelismSpec, machines: Machines, *, started: bool) -> None:
    """InputError unless the degrees multiply to the number of ranks; the message says both products."""
    if parallelism.world_size == machines.world_size:
        return
    if started:
        have = f"{counted(machines.world_size, 'process')} {either(machines.world_size, 'was', 'were')} started"
    elif machines.instance is not None:
        have = (
            f"{machines.num_hosts} x {job.compute.instance_type} have {machines.num_hosts} x "
            f"{machines.processes_per_host} = {counted(machines.world_size, 'GPU')}"
        )
    else:
        have = f"there {either(machines.world_size, 'is', 'are')} {counted(machines.world_size, 'rank')}"
    asked, count = job.compute.backend, job.compute.instance_count
    local = ""
    if asked == "local" and count > 1 and not started:
        local = f", as compute.backend: local is one machine, whatever compute.instance_count ({count}) says"
    raise InputError(
        f"parallelism: {_product(parallelism)} = {counted(parallelism.world_size, 'rank')}, but {have}{local}; make the"
        f" two equal (or parallelism: auto){', or say which backend has the instances' if local else ''}"
    )


def check_shape(parallelism: ParallelismSpec, shape: ModelShape | None) -> None:
    """InputError where a degree can't divide the model."""
    if shape is None:
        return
    for what, count in (("attention heads", shape.heads), ("key/value heads", shape.kv_heads)):
        if count % parallelism.tensor:
            divisors = math.gcd(shape.heads, shape.kv_heads)
            allowed = [str(degree) for degree in range(1, divisors + 1) if divisors % degree == 0]
            raise InputError(
                f"parallelism.tensor {parallelism.tensor}: does not divide the model's {count} {what}; "
                f"allowed: {', '.join(allowed)}"
            )
    if parallelism.pipeline > shape.layers:
        raise InputError(
            f"parallelism.pipeline {parallelism.pipeline}: the model has only {counted(shape.layers, 'layer')}; "
            "use at most that"
        )
    if parallelism.expert > 1 and (not shape.experts or shape.experts % parallelism.expert):
        have = f"{shape.experts} experts, which it must divide" if shape.experts else "no experts; set 1"
        raise InputError(f"parallelism.expert {parallelism.expert}: the model has {have}")


def layout_of(
    job: JobSpec, parallelism: ParallelismSpec, *, micro_batch: int, num_micro_batches: int, recompute: Recompute
) -> Layout:
    """The formulas' view of a job under given choices."""
    deepspeed = parallelism.engine == "deepspeed"
    sharded = parallelism.data_shard * parallelism.context
    interleaved = parallelism.pipeline_schedule == "interleaved_1f1b" and parallelism.pipeline > 1
    adapter = job.model.adapter
    machine = instance(job.compute.instance_type) if job.compute.instance_type else None
    is_eager = _is_eager(job)
    return Layout(
        hopper=machine is not None and machine.gpu is not None and has_hopper_workspaces(machine.gpu.name),
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline,
        chunks=INTERLEAVED_CHUNKS if interleaved else 1,
        context=parallelism.context,
        expert=parallelism.expert,
        data_parallel=parallelism.data_parallel_size,
        zero_stage=parallelism.zero_stage if deepspeed else (3 if sharded > 1 else 0),
        shard_degree=parallelism.data_replicate if deepspeed else sharded,
        micro_batch=micro_batch,
        num_micro_batches=num_micro_batches,
        sequence_length=job.data.sequence_length,
        precision=job.training.precision,
        recompute=recompute,
        schedule=parallelism.pipeline_schedule,
        engine=parallelism.engine,
        method=adapter.kind if adapter else "full",
        lora_rank=adapter.rank if adapter else 16,
        num_lora_targets=len(adapter.targets) if adapter else 2,
        lora_targets=tuple(adapter.targets) if adapter else (),
        library="trainyard",
        unfused=not job.training.compile,
        offload=parallelism.offload,
        offload_parameters=parallelism.zero.offload_parameters,
        zero_sizes=zero_sizes_of(parallelism),
        flash_attention=not is_eager,
        attention_kernel=_attention_kernel(job, parallelism),
        masks=_masks(job, parallelism),
        fp32_softmax=is_eager and model_type_of(job) not in NARROW_SOFTMAX,
        keeps_gathered=parallelism.fsdp.reshard_after_forward is False,
        unit_parameters=parallelism.fsdp.min_parameters if parallelism.fsdp.wrap == "size" else None,
        units_ahead=parallelism.fsdp.prefetch_units,
        optimizer=job.training.optimizer.kind,
        has_momentum=job.training.optimizer.momentum > 0,
        keeps_average=job.training.optimizer.average_decay is not None,
        loss_chunk_tokens=_loss_chunk_tokens(job, parallelism),
        chunks_short_losses=job.training.loss == "chunked",
    )


def layout_of_resolved(job: JobSpec, resolved: ResolvedJob) -> Layout:
    """The same of a job whose choices are made."""
    return layout_of(
        job,
        resolved.parallelism,
        micro_batch=resolved.micro_batch_size,
        num_micro_batches=resolved.gradient_accumulation_steps,
        recompute=resolved.activation_checkpointing,
    )


_SIZES_OF_STAGE_3 = ("max_reuse_distance", "model_persistence_threshold", "sub_group_size")
"""Of zero_optimization, with `stage3_` before it or without."""

_READ_SIZES = {prefix + name for prefix in ("", "stage3_") for name in _SIZES_OF_STAGE_3}
_READ_SWITCHES = {"reduce_scatter", "use_multi_rank_bucket_allreduce"}


def zero_sizes_of(parallelism: ParallelismSpec) -> ZeroSizes:
    """What the job states of them, in DeepSpeed's own words too; `overlap: auto` is so on GPUs."""
    zero, own = parallelism.zero, _own_zero(parallelism)
    reuse, in_all, sub_group = (own.get(f"stage3_{name}", own.get(name)) for name in _SIZES_OF_STAGE_3)
    return ZeroSizes(
        bucket=None if zero.reduce_bucket_elements == "auto" else zero.reduce_bucket_elements,
        prefetch=None if zero.prefetch_elements == "auto" else zero.prefetch_elements,
        live=None if zero.max_live_elements == "auto" else zero.max_live_elements,
        reuse=float(reuse) if _is_number(reuse) else None,
        overlaps=zero.overlap == "auto" or zero.overlap,
        persistence=zero.persistence_threshold_elements,
        persistent_in_all=int(in_all) if _is_number(in_all) else None,
        sub_group=float(sub_group) if _is_number(sub_group) else None,
        sums_on_all=_sums_on_all(own),
    )


def _sums_on_all(own: Mapping[str, Any]) -> bool | None:
    """Without `reduce_scatter` DeepSpeed looks at no owner; else the other field says what the trainer would choose."""
    if own.get("reduce_scatter") is False:
        return True
    stated = own.get("use_multi_rank_bucket_allreduce")
    return stated if isinstance(stated, bool) else None


def unread_keys(parallelism: ParallelismSpec) -> list[str]:
    """What the job states in DeepSpeed's own words and the plan doesn't read, as section.key: of a key that it knows,
    a value that it can't count with."""
    stated = [
        (f"{section}.{key}", content[key]) if isinstance(content, dict) else (section, content)
        for section, content in parallelism.deepspeed.items()
        for key in (content if isinstance(content, dict) else [section])
    ]
    return [key for key, value in stated if not _reads(key.removeprefix("zero_optimization."), value)]


def _reads(key: str, value: object) -> bool:
    return (key in _READ_SIZES and _is_number(value)) or (key in _READ_SWITCHES and isinstance(value, bool))


def _own_zero(parallelism: ParallelismSpec) -> dict[str, Any]:
    """The job's own section of DeepSpeed's JSON. The trainer alone checks its values: what is none is passed over."""
    section = parallelism.deepspeed.get("zero_optimization")
    return section if isinstance(section, dict) else {}


def _is_number(value: object) -> TypeGuard[float]:
    """Of elements: below none and without an end there are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_eager(job: JobSpec) -> bool:
    """Whether attention is written out, its scores kept: where the job asks for it, and where the trainer has no other
    choice (`trainer/models/attention.py`)."""
    if job.task != "causal_lm" or job.model.attention != "auto":
        return job.model.attention == "eager"
    if job.model.config is not None:
        return writes_scores_out(job.model.config)
    assert job.model.source is not None
    try:
        return writes_scores_out(config_from_source(job.model.source))
    except InputError:
        return False


def _attention_kernel(job: JobSpec, parallelism: ParallelismSpec) -> AttentionKernel:
    """What the trainer's fused attention runs on (`trainer/models/attention.py`): without masks torch takes cuDNN's
    kernels first, where a part has instructions of its own; packed documents and cut sequences have
    FlashAttention-2's."""
    if job.model.attention == "flash_attention_3":
        return "own"
    return "ampere" if separates_documents(job) or parallelism.context > 1 else "own"


def _masks(job: JobSpec, parallelism: ParallelismSpec) -> Masks:
    """Where the trainer's fused attention needs a mask (`trainer/models/attention.py`)."""
    if job.model.attention == "flash_attention_3":
        return "never"
    if separates_documents(job) and parallelism.context == 1:  # cut sequences have documents one after the other
        is_half = job.training.precision not in ("fp32", "fp64")
        return "documents" if is_half and job.model.attention != "sdpa" else "always"
    return "windows"


def _loss_chunk_tokens(job: JobSpec, parallelism: ParallelismSpec) -> int | None:
    """The trainer's own choice, except that it also looks for models that change their head's output."""
    is_twice_differentiated = parallelism.pipeline > 1 and parallelism.pipeline_schedule == "zero_bubble"
    return None if job.training.loss == "logits" or is_twice_differentiated else LOSS_CHUNK_TOKENS
