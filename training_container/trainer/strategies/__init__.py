"""Engines behind one interface: `build_strategy` picks the one that a job's parallelism asks for.

`base` is the interface, `torch_engine` what the torch ones share, `ddp`, `fsdp` and `zero` the engines for data
parallelism alone, `parallel` the one for every product with `tensor_parallel`, `context_parallel` and
`expert_parallel` on one `mesh`, and `flat_shard` what lets ZeRO's memory be checkpointed like everyone's.
"""

from torch import nn

from trainer.losses import head as loss_head
from trainer.losses import router as router_loss
from trainer.models import float8
from trainer.models.attention import check as check_attention
from trainer.models.configuration import check_source
from trainer.models.deferred_weights import source_of
from trainer.runtime import Runtime
from trainer.strategies import compiled
from trainer.strategies.base import OptimizerStep, Strategy
from trainer.tasks import task_of
from trainyard.errors import InputError
from trainyard.spec.job import AdapterSpec, ParallelismSpec, ResolvedJob

__all__ = ["OptimizerStep", "Strategy", "build_strategy", "check_supported"]


def check_supported(job: ResolvedJob, *, device_type: str) -> None:
    """Refuses, in one line and before anything is read, what this trainer does not do; never does it half."""
    spec, layout = job.spec, job.parallelism
    if spec.model.source is not None:
        check_source(spec.model.source)
    task_of(job).check(job)
    if spec.model.adapter is not None:
        _check_adapter(spec.model.adapter, layout)
    _check_optimizer(job)
    if _is_product(layout):
        from trainer.strategies.parallel import check_product

        check_product(job)
    _check_best(job)
    if spec.training.on_anomaly == "skip":
        _check_skip(spec.task, layout)
    if layout.engine == "deepspeed":
        from trainer.strategies import deepspeed_settings

        deepspeed_settings.check(job, device_type=device_type)
    check_attention(job, device_type=device_type)
    float8.check(job, device_type=device_type)
    compiled.check(job, device_type=device_type)
    loss_head.check(job)
    router_loss.check(job)


def _is_product(layout: ParallelismSpec) -> bool:
    """Whether more than data parallelism is asked for."""
    return max(layout.tensor, layout.pipeline, layout.context, layout.expert) > 1


def _check_best(job: ResolvedJob) -> None:
    best, task = job.spec.checkpoint.keep_best, task_of(job)
    if best is None or best.metric == "loss":
        return
    known = ["loss", *(["perplexity"] if task.unit == "tokens" else []), *task.measures]
    named = best.metric.startswith("validation_sets.")
    measure = best.metric.split(".")[2] if named else best.metric.removeprefix("validation_")
    if measure not in known:
        given = best.metric.removesuffix(measure)
        raise InputError(
            f"checkpoint.keep_best.metric: {best.metric} is not measured by this task; it measures"
            f" {', '.join(given + name for name in known)}"
        )


def _check_skip(task: str, layout: ParallelismSpec) -> None:
    if layout.engine == "deepspeed":
        raise InputError(
            "training.on_anomaly: skip is not implemented with engine: deepspeed, which measures the gradient norm and"
            " updates in one call; use stop, or engine: torch"
        )
    if task == "image_classification":
        raise InputError(
            "training.on_anomaly: skip can't take a batch back from batch norm's running statistics; use stop"
        )


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


def _check_optimizer(job: ResolvedJob) -> None:
    settings = job.spec.training.optimizer
    if job.parallelism.engine == "deepspeed":
        reasons = {
            "adamw_8bit": "keeps its averages in blocks of rows",
            "adafactor": "keeps a row and a column a matrix",
            "muon": "needs whole matrices",
            "sgd": "is not what its checkpoints are made for here",
        }
        reason = reasons.get(settings.kind)
        name = f"kind: {settings.kind}" if reason else "average_decay" if settings.average_decay is not None else None
        if name is not None:
            raise InputError(
                f"training.optimizer.{name} is not implemented with engine: deepspeed, whose optimizer sees flat"
                f" partitions of all parameters{', and this one ' + reason if reason else ''}; use engine: torch, or"
                " plain adamw"
            )
    if settings.kind == "adamw_8bit" and job.spec.training.precision == "fp64":
        raise InputError("training.optimizer.kind: adamw_8bit is of no use in fp64; use adamw")


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
