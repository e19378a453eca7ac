"""A job on other numbers of instances than it was launched on, within what its `recovery.elastic` allows."""

from trainyard.errors import InputError
from trainyard.planner.formulas import formulas_of
from trainyard.planner.reading import layout_of, machines_of
from trainyard.planner.resolve import fits, resolve
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.words import counted


def on_hosts(job: JobSpec, num_hosts: int, *, processes_per_host: int | None = None) -> ResolvedJob:
    """The job resolved for so many instances; InputError, one line, where its limits, batch or layout forbid it.

    `processes_per_host`: what has really been started on each, where that isn't the instance type's to say.
    """
    moved = job.on_instances(num_hosts, f"{job.name} on {counted(num_hosts, 'instance')}")
    world_size = None if processes_per_host is None else num_hosts * processes_per_host
    resolved = resolve(moved, world_size=world_size)
    if world_size is None or resolved.num_hosts == num_hosts:
        return resolved
    return resolved.model_copy(update={"num_hosts": num_hosts, "processes_per_host": processes_per_host})


def smaller(job: JobSpec) -> tuple[ResolvedJob, ...]:
    """The job on fewer and fewer instances: each time the most of at most half as many on which it can be laid out, or,
    where there is none, the most that is fewer. Nothing where it isn't elastic.

    InputError where its limits allow fewer, and not one of these numbers can run it.
    """
    elastic, most = job.recovery.elastic, job.compute.instance_count
    if elastic is None or most == elastic.min_instances:
        return ()
    found: list[ResolvedJob] = []
    while (following := _next_smaller(job, elastic.min_instances, most)) is not None:
        found.append(following)
        most = following.num_hosts
    if not found:
        least = elastic.min_instances
        raise InputError(
            f"recovery.elastic.min_instances {least}: no number of instances from {least} to {most - 1} can run this"
            f" job: {_obstacle(job, least)}; set it to {most}, or change the layout or the batch"
        )
    return tuple(found)


def _next_smaller(job: JobSpec, least: int, most: int) -> ResolvedJob | None:
    at_most_half = range(most // 2, least - 1, -1)
    others = range(most - 1, max(most // 2, least - 1), -1)
    return next((one for count in (*at_most_half, *others) if (one := _laid_out(job, count)) is not None), None)


def _obstacle(job: JobSpec, num_hosts: int) -> str:
    try:
        on_hosts(job, num_hosts)
    except InputError as error:
        return str(error)
    return f"{num_hosts} x {job.compute.instance_type} have too little memory for it"


def _laid_out(job: JobSpec, num_hosts: int) -> ResolvedJob | None:
    """Nothing where the planner knows that it doesn't fit the GPUs; what it doesn't know is no reason."""
    try:
        resolved = on_hosts(job, num_hosts)
    except InputError:
        return None
    machines = machines_of(resolved.spec)
    try:
        formulas = formulas_of(resolved.spec)
    except InputError:
        return resolved
    if machines.instance is None:
        return resolved
    layout = layout_of(
        resolved.spec,
        resolved.parallelism,
        micro_batch=resolved.micro_batch_size,
        num_micro_batches=resolved.gradient_accumulation_steps,
        recompute=resolved.activation_checkpointing,
    )
    return resolved if fits(formulas.memory(layout), machines) else None
