"""A job that goes on with other machines or another layout: same data, same global batch, same weights.

Any layout reads any other's checkpoint, and the order of the samples doesn't depend on the number of ranks. So all that
has to be decided anew is what `planner.resolve` decides: micro-batch, accumulation, recomputation.
"""

from collections.abc import Callable, Sequence
from typing import Any

from trainyard import planner
from trainyard.errors import InputError
from trainyard.hardware import DEFAULT_REGION
from trainyard.launch.launcher import planned, refuse_or_force
from trainyard.launch.local_paths import saving_here
from trainyard.launch.record import JobRecord
from trainyard.planner.elastic import smaller
from trainyard.spec.base import apply_overrides, parse
from trainyard.spec.job import JobSpec, refuse_homes

_CHANGEABLE = ("compute", "parallelism", "checkpoint", "recovery", "preflight", "budget")
_CHANGEABLE_FIELDS = (
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "training.validation_every_steps",
    "training.validation_batches",
)
_FIXED_FIELDS = ("checkpoint.destination", "compute.backend")


def reviser(
    overrides: Sequence[str], num_processes: int | None, *, force: bool = False, needs_price: bool = True
) -> Callable[[JobRecord], JobRecord] | None:
    """What changes a record before its next attempt; None where nothing is asked for.

    InputError names a setting that would make another run of it (data, model, batch, learning rate, seed). `force`: go
    on although the new plan refuses (memory, hours, budget), as `launch --force` does. `needs_price`: as of `planned`;
    a launch asks for none where AWS is emulated.
    """
    for override in overrides:
        key = override.partition("=")[0]
        allowed = key.split(".")[0] in _CHANGEABLE or key in _CHANGEABLE_FIELDS
        if not allowed or key in _FIXED_FIELDS:
            raise _another_run(override)
    if not overrides and num_processes is None:
        return None
    return lambda record: revised(record, overrides, num_processes, force=force, needs_price=needs_price)


def revised(
    record: JobRecord,
    overrides: Sequence[str],
    num_processes: int | None,
    *,
    force: bool = False,
    needs_price: bool = True,
) -> JobRecord:
    """The record with its spec changed, resolved and planned again; InputError where that can't run or be paid."""
    if num_processes is not None and record.backend != "local":
        raise InputError("--processes is for jobs on this machine; on SageMaker each GPU has its process")
    where = f"--set for job {record.job_id}"
    both = (record.spec, record.resolved.spec)
    spec, absolute = (parse(JobSpec, _with_overrides(given, overrides, both), where) for given in both)
    refuse_homes(absolute, where)
    if record.backend == "local":
        _check_same_machine(record.spec, spec)
        absolute = saving_here(absolute)  # what was set just now is from where it was set
        # Compute says nothing about this machine: as many as before, unless a stated layout asks for its own.
        stated = None if absolute.parallelism == "auto" else absolute.parallelism.world_size
        num_processes = num_processes or stated or record.resolved.world_size
    _check_same_batch(record.spec, spec, where)
    resolved = planner.resolve(absolute, world_size=num_processes)
    region = str(record.plan.get("region") or DEFAULT_REGION)
    # As the launch planned it: without a tenant paths may be relative to another folder than today's.
    asked = absolute if record.environment is None else spec
    plan, refusals = planned(asked, region=region, world_size=num_processes, needs_price=needs_price)
    refusals = [reason for reason in refusals if reason not in record.forced]
    forced = (*record.forced, *refuse_or_force(refusals, force))
    fewer = smaller(resolved.spec) if record.backend == "sagemaker" else ()
    return record.model_copy(
        update={"spec": spec, "resolved": resolved, "smaller": fewer, "plan": plan, "forced": forced}
    )


def _with_overrides(given: JobSpec, overrides: Sequence[str], both: Sequence[JobSpec]) -> dict[str, Any]:
    """The job's content with those set. A whole section, `checkpoint={keep_last: 9}`, replaces all that stands in it
    but for what a resume keeps; InputError where it states that otherwise. `both`: the job as written and as sent, one
    of which is `given`: what is kept may be stated as either has it, and stays in each as it is."""
    content = before = given.model_dump(mode="json")
    known = [one.model_dump(mode="json") for one in both]
    for override in overrides:
        content = apply_overrides(content, [override])
        for section, name in (field.split(".") for field in _FIXED_FIELDS):
            inside = content[section]
            if not isinstance(inside, dict):
                continue  # which is refused for what it is
            if name in inside and inside[name] not in [one[section][name] for one in known]:
                raise _another_run(override)
            inside[name] = before[section][name]
    return content


def _another_run(override: str) -> InputError:
    fixed = " and ".join(_FIXED_FIELDS)
    return InputError(
        f"--set {override}: a resume keeps the job's data, model, batch and checkpoints; it may change"
        f" {', '.join(f'{section}.*' for section in _CHANGEABLE)} (but for {fixed}), {', '.join(_CHANGEABLE_FIELDS)};"
        " launch a new job for anything else"
    )


def _check_same_machine(before: JobSpec, after: JobSpec) -> None:
    """InputError where a job of this machine is to get others: it went on as before, and its record said otherwise."""
    for name in ("instance_count", "instance_type", "spot"):
        if (asked := getattr(after.compute, name)) != getattr(before.compute, name):
            raise InputError(
                f"compute.{name}={asked}: the job runs on this machine, which is one; --processes N, or"
                " parallelism.*, says how many ranks it has; for other machines launch it there"
            )


def _check_same_batch(before: JobSpec, after: JobSpec, where: str) -> None:
    """InputError where limits would change what the stated batch and rate are stated for."""
    old, new = before.recovery.elastic, after.recovery.elastic
    stated = {(one.batch, one.max_instances) if one and one.batch == "adapt" else None for one in (old, new)}
    if len(stated) > 1:
        raise InputError(
            f"{where}: with recovery.elastic.batch: adapt the batch and the learning rate are stated for max_instances,"
            " so a resume keeps both; launch a new job for another batch"
        )
