"""A job on machines that it doesn't name: what has to change with them for it to run there, as `--set` says it."""

from collections.abc import Iterator
from dataclasses import dataclass

from trainyard.hardware import Instance, instance
from trainyard.planner.layout import Recompute
from trainyard.planner.resolve import scaled_learning_rate
from trainyard.spec.base import apply_overrides, parse
from trainyard.spec.job import JobSpec, ParallelismSpec

MACHINES = ("compute.backend", "compute.instance_type", "compute.instance_count")
"""What says where a job runs; everything else that changes is worth a word."""


@dataclass(frozen=True)
class Moved:
    """A job on other machines, its layout forgotten."""

    own: JobSpec
    """As it was stated."""
    job: JobSpec
    overrides: tuple[str, ...]
    """What turns the one into the other, but for the layout."""

    def note(self) -> str | None:
        """What else changes, where anything does."""
        others = [item for item in self.overrides if item.partition("=")[0] not in MACHINES]
        return f"the command also sets what these machines can't keep: {', '.join(others)}" if others else None

    def with_layout(self, words: tuple[str, ...]) -> JobSpec:
        """What `launch` reads when it is told `overrides` and the layout; InputError as it would say it."""
        return changed(self.own, (*self.overrides, *words))


def moved_to(job: JobSpec, instance_type: str, count: int) -> Moved:
    """The job on `count` SageMaker machines of a type (`ml.`); InputError where it can't be there at all."""
    overrides = tuple(_changes(job, instance(instance_type), count))
    return Moved(job, changed(job, (*overrides, "parallelism=auto")), overrides)


def changed(job: JobSpec, overrides: tuple[str, ...]) -> JobSpec:
    """The job as it is read with these overrides; InputError as the command line would say it."""
    return parse(JobSpec, apply_overrides(job.model_dump(mode="json"), overrides), job.name)


def _is_own(job: JobSpec, machine: Instance) -> bool:
    """Whether the job names that type, on SageMaker."""
    stated = (job.compute.instance_type or "").removeprefix("ml.")
    return job.compute.backend == "sagemaker" and stated == machine.type


def _changes(job: JobSpec, machine: Instance, count: int) -> Iterator[str]:
    compute, own = job.compute, _is_own(job, machine)
    if compute.backend != "sagemaker":
        yield "compute.backend=sagemaker"
    yield f"compute.instance_type=ml.{machine.type}"
    yield f"compute.instance_count={count}"
    if compute.queue is not None and not own:
        # A queue has types of its own; a partition or another cluster's queue is none of SageMaker's.
        yield "compute.queue=null"
    if compute.training_plan is not None and not (own and count <= compute.instance_count):
        yield "compute.training_plan=null"
    elastic = job.recovery.elastic
    if elastic is not None and not _is_within(job, count):
        yield from _without_limits(job)
        elastic = None
    hosts = count if elastic is None else max(count, elastic.max_instances)
    if job.checkpoint.peer_copy and hosts == 1:
        yield "checkpoint.peer_copy=false"
    yield from _measured(job, machine, hosts, own=own)


def _is_within(job: JobSpec, count: int) -> bool:
    """Whether the job's own limits allow so many, with the batch that machines are compared by."""
    elastic = job.recovery.elastic
    assert elastic is not None
    within = elastic.min_instances <= count <= elastic.max_instances
    return within and elastic.share(count) == elastic.share(job.compute.instance_count)


def _without_limits(job: JobSpec) -> Iterator[str]:
    """The job with the batch, length and rate that it has on its own machines, whatever their number."""
    still = job.inelastic()
    yield "recovery.elastic=null"
    for name in ("global_batch_size", "steps"):
        if getattr(still.training, name) != getattr(job.training, name):
            yield f"training.{name}={getattr(still.training, name)}"
    if scaled_learning_rate(still) != scaled_learning_rate(job):
        yield f"training.learning_rate={scaled_learning_rate(job)!r}"


def _measured(job: JobSpec, machine: Instance, hosts: int, *, own: bool) -> Iterator[str]:
    """Floors are of a type's links: of another type, or where nobody is to talk to, they say nothing."""
    spec = job.preflight
    if spec.across_gb_per_second is not None and not (own and hosts > 1):
        yield "preflight.across_gb_per_second=null"
    if spec.host_gb_per_second is not None and not (own and machine.num_gpus > 1):
        yield "preflight.host_gb_per_second=null"
    if spec.collectives in ("stop", "warn") and hosts == machine.num_gpus == 1:
        yield "preflight.collectives=auto"


def layout_words(parallelism: ParallelismSpec, micro_batch: int, recompute: Recompute) -> tuple[str, ...]:
    """What to --set for a layout, its micro-batch and its recomputation."""
    default = ParallelismSpec()
    stated = {
        name: value
        for name, value in parallelism.model_dump(mode="json").items()
        if value != getattr(default, name) and name not in ("fsdp", "zero", "deepspeed")
    }
    if parallelism.zero != default.zero:
        stated["zero"] = {"offload_parameters": parallelism.zero.offload_parameters}
    words = ", ".join(f"{name}: {_yaml(value)}" for name, value in stated.items())
    return (
        f"parallelism={{{words}}}",
        f"training.micro_batch_size={micro_batch}",
        f"training.activation_checkpointing={recompute}",
    )


def _yaml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(item)}" for name, item in value.items()) + "}"
    return str(value)
