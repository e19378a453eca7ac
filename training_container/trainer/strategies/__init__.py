"""Engines behind one interface: `build_strategy` picks the one that a job's parallelism asks for.

`base` is the interface, `torch_engine` what the torch ones share, `ddp`, `fsdp` and `zero` the engines for data
parallelism alone, `parallel` the one for every product with `tensor_parallel`, `context_parallel` (`context_states`
where layers carry a state along the sequence) and `expert_parallel` on one `mesh`, and `flat_shard` what lets ZeRO's
memory be checkpointed like everyone's.
"""

from collections.abc import Iterator

from torch import nn

from trainer.models import float8
from trainer.models.attention import check as check_attention
from trainer.models.configuration import check_source, check_stated, configuration_of
from trainer.models.deferred_weights import source_of
from trainer.models.facts import facts_of
from trainer.runtime import Runtime
from trainer.strategies import compiled, tensor_parallel
from trainer.strategies.base import OptimizerStep, Strategy
from trainer.tasks import task_of
from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec, ResolvedJob
from trainyard.spec.obstacles import job_obstacles, layout_obstacles

__all__ = ["OptimizerStep", "Strategy", "build_strategy", "check_supported"]


def check_supported(job: ResolvedJob, *, device_type: str) -> None:
    """Refuses, in one line and before anything is read, what this trainer does not do; never does it half."""
    spec, layout = job.spec, job.parallelism
    if spec.model.source is not None:
        check_source(spec.model.source)
    elif spec.model.config is not None:
        check_stated(spec.model.config)
    if (obstacle := next(_obstacles(job), None)) is not None:
        raise InputError(obstacle)
    task_of(job).check(job)
    config = configuration_of(job) if layout.tensor > 1 else None
    if config is not None:
        tensor_parallel.check(config, layout.tensor)
    if layout.engine == "deepspeed":
        from trainer.strategies import deepspeed_settings

        deepspeed_settings.check(job, device_type=device_type)
    check_attention(job, device_type=device_type)
    float8.check(job, device_type=device_type)
    compiled.check(job, device_type=device_type)


def _obstacles(job: ResolvedJob) -> Iterator[str]:
    """What was refused where the job was launched, now that transformers says what its model is."""
    model = facts_of(job)
    yield from job_obstacles(job.spec, model)
    yield from layout_obstacles(
        job.spec,
        job.parallelism,
        model,
        micro_batch_size=job.micro_batch_size,
        num_micro_batches=job.gradient_accumulation_steps,
        recompute=job.activation_checkpointing,
    )


def _is_product(layout: ParallelismSpec) -> bool:
    """Whether more than data parallelism is asked for."""
    return max(layout.tensor, layout.pipeline, layout.context, layout.expert) > 1


def build_strategy(job: ResolvedJob, *, model: nn.Module, runtime: Runtime) -> Strategy:
    """The job's engine around `model` (equal on every rank: on CPU, or outlined), ready for its first step."""
    check_supported(job, device_type=runtime.device.type)
    assert job.world_size == runtime.world_size
    strategy = _engine_around(model, job, runtime)
    if (source := source_of(model)) is not None:
        source.release()
    return strategy


def _engine_around(model: nn.Module, job: ResolvedJob, runtime: Runtime) -> Strategy:
    # Each engine is imported when it is used: DeepSpeed alone takes seconds.
    if job.parallelism.engine == "deepspeed":
        from trainer.strategies.zero import ZeroStrategy

        return ZeroStrategy(job=job, model=model, runtime=runtime)
    if _is_product(job.parallelism):
        if job.parallelism.pipeline > 1:
            from trainer.strategies.pipelined import PipelineStrategy

            return PipelineStrategy(job=job, model=model, runtime=runtime)
        from trainer.strategies.parallel import ProductStrategy

        return ProductStrategy(job=job, model=model, runtime=runtime)
    if job.parallelism.data_shard > 1:
        from trainer.strategies.fsdp import FullyShardedStrategy

        return FullyShardedStrategy(job=job, model=model, runtime=runtime)
    from trainer.strategies.ddp import ReplicatedStrategy

    return ReplicatedStrategy(job=job, model=model, runtime=runtime)
