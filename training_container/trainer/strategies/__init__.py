"""Engines behind one interface: `build_strategy` picks the one that a job's parallelism asks for.

`base` is the interface, `torch_engine` what the torch ones share, `ddp`, `fsdp` and `zero` the engines for data
parallelism alone, `parallel` the one for every product with `tensor_parallel`, `context_parallel` and
`expert_parallel` on one `mesh`, and `flat_shard` what lets ZeRO's memory be checkpointed like everyone's.
"""

from torch import nn

from trainer.attention import check as check_attention
from trainer.deferred_weights import source_of
from trainer.runtime import Runtime
from trainer.strategies.base import OptimizerStep, Strategy
from trainer.tasks import task_of
from trainyard.errors import InputError
from trainyard.spec.job import AdapterSpec, OptimizerSpec, ParallelismSpec, ResolvedJob

__all__ = ["OptimizerStep", "Strategy", "build_strategy", "check_supported"]


def check_supported(job: ResolvedJob, *, device_type: str) -> None:
    """Refuses, in one line and before anything is read, what this trainer does not do; never does it half."""
    spec, layout = job.spec, job.parallelism
    task_of(job).check(job)
    if spec.model.adapter is not None:
        _check_adapter(spec.model.adapter, layout)
    _check_optimizer(spec.training.optimizer, layout)
    if spec.training.precision == "fp8":
        raise InputError("training.precision: fp8 is not implemented in this trainer; use bf16")
    if _is_product(layout):
        from trainer.strategies.parallel import check_product

        check_product(job)
    if layout.engine == "deepspeed":
        _check_deepspeed(job, device_type=device_type)
    check_attention(job, device_type=device_type)


def _is_product(layout: ParallelismSpec) -> bool:
    """Whether more than data parallelism is asked for."""
    return max(layout.tensor, layout.pipeline, layout.context, layout.expert) > 1


def _check_adapter(adapter: AdapterSpec, layout: ParallelismSpec) -> None:
    if adapter.kind == "qlora" and layout.engine == "deepspeed":
        raise InputError(
            "model.adapter: qlora is not implemented with engine: deepspeed, whose partitions are of one floating-point"
            " type; use engine: torch, which shards 4-bit weights with data_shard"
        )
    if layout.pipeline > 1 and set(adapter.targets) == {"lm_head"}:
        raise InputError(
            "model.adapter.targets: lm_head alone leaves the first pipeline stages nothing to train; add a layer of the"
            " blocks, or set parallelism.pipeline to 1"
        )


def _check_optimizer(settings: OptimizerSpec, layout: ParallelismSpec) -> None:
    if settings.kind == "adamw_8bit":
        raise InputError(
            "training.optimizer.kind: adamw_8bit needs 8-bit CUDA kernels that this image does not hold; use adamw, or"
            " adafactor to save memory"
        )
    names = [f"kind: {settings.kind}"] * (settings.kind != "adamw")
    names += ["average_decay"] * (settings.average_decay is not None)
    degrees = ("tensor", "pipeline", "context", "expert")
    is_product = max(getattr(layout, degree) for degree in degrees) > 1
    if names and (layout.engine == "deepspeed" or is_product):
        where = "engine: deepspeed" if layout.engine == "deepspeed" else "tensor, pipeline, context or expert above 1"
        raise InputError(
            f"training.optimizer.{names[0]} is not implemented with {where}; use it with data_replicate and data_shard"
            " alone (engine: torch), or plain adamw"
        )


def _check_deepspeed(job: ResolvedJob, *, device_type: str) -> None:
    layout = job.parallelism
    if layout.offload == "nvme":
        raise InputError("parallelism.offload: nvme needs DeepSpeed's compiled aio kernel; use cpu or none")
    if job.spec.training.precision == "fp64":
        raise InputError(
            "training.precision: fp64 is not what DeepSpeed computes in, its optimizer states are float32;"
            " use engine: torch, or fp32"
        )
    if job.spec.training.precision != "fp16":
        return
    if layout.zero_stage == 0:
        raise InputError(
            "training.precision: fp16 with zero_stage 0 is not implemented; use engine: torch, or zero_stage 1"
        )
    if device_type == "cpu":
        raise InputError("training.precision: DeepSpeed has no fp16 on this CPU; use fp32 or bf16, or engine: torch")


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
