"""What is refused before anything is submitted, each in one line that says how to mend it."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainyard import hardware
from trainyard.errors import InputError
from trainyard.functions import broker_rules
from trainyard.hardware import PriceBook
from trainyard.launch.backend import Say, say_nothing
from trainyard.launch.kubernetes_manifest import memory_mib
from trainyard.launch.session import price_file
from trainyard.planner.host_memory import counted_gib
from trainyard.planner.money import destination_tier
from trainyard.planner.plan import Plan
from trainyard.planner.reading import warned_of_slurm
from trainyard.planner.results import Configuration
from trainyard.spec.job import STOP_SECONDS, JobSpec
from trainyard.spec.platform import QueueContract, TenantContract
from trainyard.spec.words import counted, either


@dataclass(frozen=True)
class RunningJob:
    """What one of the tenant's jobs holds, or waits for."""

    name: str
    instance_type: str
    instance_count: int


def check_machines_are_named(job: JobSpec) -> None:
    """InputError where a cluster that knows no instance types is to run a job that names none."""
    if job.compute.instance_type is None:
        raise InputError("compute.instance_type: is missing; name the cluster's machines, p5.48xlarge say")


def check_queue(job: JobSpec, contract: TenantContract, running: Sequence[RunningJob] = ()) -> str:
    """The name of the tenant's queue that takes the job; InputError where none does (no --force overrides a quota).

    A queue's max_instances bounds the tenant's jobs together: those `running` on a queue's types count against it (a
    type that two queues offer counts in both). Two launches in the same second can still pass each other here; not a
    broker, which writes down what it lets through.
    """
    compute = job.compute
    instance_type = compute.instance_type
    assert instance_type is not None, "a job for SageMaker has an instance type"
    try:
        broker_rules.check_capacity(compute.model_dump(), compute.instance_count, contract.model_dump(mode="json"))
    except broker_rules.Refused as refusal:
        raise InputError(str(refusal)) from None
    offers = "; ".join(_describe(name, queue) for name, queue in sorted(contract.queues.items()))
    if compute.queue is not None and compute.queue not in contract.queues:
        raise InputError(
            f"compute.queue '{compute.queue}': tenant {contract.tenant} has no such queue; it has: {offers}"
        )
    wanted = {compute.queue: contract.queues[compute.queue]} if compute.queue else dict(contract.queues)
    typed = {name: queue for name, queue in wanted.items() if instance_type in queue.instance_types}
    if not typed:
        raise InputError(
            f"compute.instance_type {instance_type}: no queue of tenant {contract.tenant} offers it; it has: {offers}"
        )
    roomy = {name: queue for name, queue in typed.items() if compute.instance_count <= queue.max_instances}
    if not roomy:
        largest = max(queue.max_instances for queue in typed.values())
        raise InputError(
            f"compute.instance_count {compute.instance_count}: over the quota of tenant {contract.tenant}, which is "
            f"{largest} x {instance_type}; use fewer, or raise max_instances of the queue in the environment file"
        )
    if compute.instance_count == 1:
        return _with_room(job, roomy, running, contract.queues)
    multi_node = [name for name, queue in roomy.items() if queue.multi_node]
    if not multi_node:
        raise InputError(
            f"compute.instance_count {compute.instance_count}: queue {next(iter(roomy))} takes one-host jobs only; "
            f"use instance_count 1 or another queue: {offers}"
        )
    if not hardware.instance(instance_type).efa_interfaces:
        raise InputError(
            f"compute.instance_type {instance_type}: has no EFA: {counted(compute.instance_count, 'host')} "
            "would talk over "
            "TCP; use one host, or a type with EFA such as ml.p5.4xlarge"
        )
    return _with_room(job, {name: roomy[name] for name in multi_node}, running, contract.queues)


def check_share(job: JobSpec, contract: TenantContract) -> None:
    """InputError where the job is larger than the tenant's share of its queue can ever be: it would wait for ever."""
    kind, count = job.compute.instance_type, job.compute.instance_count
    share = contract.shares.get(str(kind))
    if share is None:
        raise InputError(f"compute.instance_type {kind}: tenant {contract.tenant} has no share of its queue")
    if count > share.most:
        raise InputError(
            f"compute.instance_count {count}: tenant {contract.tenant} may hold up to {share.most} x {kind}, borrowed "
            "ones with them; use fewer, or raise max_instances of the queue in the environment file"
        )


def check_destination(job: JobSpec, contract: TenantContract) -> None:
    """InputError where a tenant's job wants its checkpoints elsewhere: it would be dropped without a word."""
    if job.checkpoint.destination is not None:
        raise InputError(
            f"checkpoint.destination {job.checkpoint.destination}: jobs of tenant {contract.tenant} save to"
            f" s3://{contract.buckets.checkpoints}/jobs/, where their policies and a resume look; leave it out"
            " (checkpoint.local_directory adds the hosts' own disks; `trainyard checkpoints copy` brings one elsewhere)"
        )


def _with_room(
    job: JobSpec,
    queues: Mapping[str, QueueContract],
    running: Sequence[RunningJob],
    offers: Mapping[str, QueueContract],
) -> str:
    """The first of `queues` with room; `offers`: all of the tenant's."""
    count, full = job.compute.instance_count, []
    for name, queue in queues.items():
        holders = [other for other in running if other.instance_type in queue.instance_types]
        held = sum(other.instance_count for other in holders)
        if held + count <= queue.max_instances:
            return name
        jobs = ", ".join(f"{other.name} ({other.instance_count})" for other in holders)
        kinds = {other.instance_type for other in holders}
        also = [other for other in offers if other != name and kinds & set(offers[other].instance_types)]
        shared = f" (a job counts in each queue that offers its type: {', '.join([name, *also])})" if also else ""
        full.append(
            f"{held} of the {counted(queue.max_instances, 'instance')} of queue {name} "
            f"{either(held, 'is', 'are')} held by {jobs}{shared}"
        )
    raise InputError(
        f"compute.instance_count {count}: over the quota of tenant {job.tenant}: {'; '.join(full)}; wait until one "
        "ends, stop one (trainyard stop), or raise max_instances of the queue in the environment file"
    )


def _describe(name: str, queue: QueueContract) -> str:
    return f"{name} ({', '.join(queue.instance_types)}, up to {queue.max_instances})"


def refused_hours(job: JobSpec, contract: TenantContract) -> list[str]:
    """The reason, where the job asks to run longer than the tenant's jobs may."""
    if job.compute.max_hours <= contract.max_job_hours:
        return []
    return [
        f"compute.max_hours {job.compute.max_hours:g} is over the {counted(contract.max_job_hours, 'hour')} "
        "that tenant "
        f"{contract.tenant}'s jobs may run: lower it (a stopped job resumes from its checkpoint)"
    ]


def refused_by_plan(plan: Plan) -> list[str]:
    """What the plan says can't work: memory, running time, money. What it doesn't know is no reason."""
    refusals = []
    chosen = plan.chosen
    if plan.fits is False and not _is_of_the_host(chosen):
        refusals.append(f"{chosen.layout}: {chosen.verdict}: shard more, recompute activations, or use larger GPUs")
    elif plan.fits is False and not _is_assumed(chosen):
        refusals.append(f"{chosen.layout}: {chosen.verdict}: {_HOST_MEND}")
    if plan.cost is None:
        return refusals
    if not math.isfinite(plan.cost.expected_hours):
        return [*refusals, "the run does not finish: it fails more often than it saves; set checkpoint.every_minutes"]
    if plan.cost.expected_hours > plan.max_hours:
        refusals.append(
            f"compute.max_hours {plan.max_hours:g} is less than the {plan.cost.expected_hours:.1f} hours that the plan "
            "expects: raise it, or use more instances"
        )
    if plan.max_usd is not None and plan.cost.planned_usd is not None and plan.cost.planned_usd > plan.max_usd:
        refusals.append(
            f"budget.max_usd {plan.max_usd:,.2f} is less than the {plan.cost.planned_usd:,.2f} USD that the plan "
            f"expects ({plan.cost.price_basis}): raise it, or train for fewer steps"
        )
    return refusals


def refused_without_price(plan: Plan) -> list[str]:
    """The reason, where the job has a budget that no known price holds it to."""
    return [plan.price_missing] if plan.price_missing is not None and plan.max_usd is not None else []


def warned_by_plan(plan: Plan, job: JobSpec, *, is_on_this_machine: bool = False) -> list[str]:
    """What may not work, by a part of the plan that is assumed or only now and then: no reason to refuse.

    `is_on_this_machine`: nobody takes it away, and where the job saves is a folder of its own.
    """
    chosen = plan.chosen
    warnings = [*warned_of_slurm(job), *([] if is_on_this_machine else _warned_of_stops(plan, job))]
    if plan.fits is not False or not _is_of_the_host(chosen) or not _is_assumed(chosen):
        return warnings
    assumed = f"{chosen.layout}: {chosen.verdict}, which is assumed; where the host runs out of memory: {_HOST_MEND}"
    return [assumed, *warnings]


def _warned_of_stops(plan: Plan, job: JobSpec) -> list[str]:
    """Where a step and the save after it are longer than machines that are taken away leave time for."""
    time, saves = plan.chosen.time, plan.checkpoint
    if time is None or saves is None:
        return []
    # The hosts' own disks go with the machines: what counts is the way to the destination.
    tier = next(one for one in saves.tiers if one.name == destination_tier(job))
    needed = time.step_seconds_high + tier.save_seconds
    if needed <= STOP_SECONDS:
        return []
    return [
        f"a stop or reclaim leaves {STOP_SECONDS:.0f} s; a step (up to {time.step_seconds_high:.0f} s) and its save to"
        f" {tier.name} ({tier.save_seconds:.0f} s) take {needed:.0f} s: it would lose what came after the checkpoint"
        " before it; save more often (checkpoint.every_minutes), make steps shorter, or use more machines"
    ]


def warned_by_recovery(job: JobSpec, contract: TenantContract) -> list[str]:
    """What only a person would start again."""
    if job.recovery.max_resumes:
        return []
    # Who submits directly has neither a resumer nor a training queue: there the setting would change nothing.
    mend = "; with 3, say, it is started again by itself" if contract.broker or contract.shares else ""
    return [
        "recovery.max_resumes is 0: a lost host, an error of SageMaker's or a lack of capacity ends the job until"
        f" somebody runs `trainyard resume`{mend}"
    ]


def refused_by_pod(plan: Plan, job: JobSpec) -> list[str]:
    """On Kubernetes: why the pod would be killed for its memory, where a save's copies and what is offloaded alone are
    more than it may have. Elsewhere a process may have all of its machine."""
    limit = _pods_gib(job)
    if limit is None or (counted := _counted_gib(plan.chosen)) <= limit:
        return []
    return [
        f"a save's copies and what is offloaded take {counted:.0f} GiB of a host's memory, and its pod may have"
        f" {limit:.0f}: raise compute.kubernetes.memory_gib, {_HOST_MEND}"
    ]


def warned_by_pod(plan: Plan, job: JobSpec) -> list[str]:
    """On Kubernetes: that the pod may be killed for its memory, by all that the plan has in a host's, some of which is
    assumed; what is refused anyway is not said again."""
    limit, total = _pods_gib(job), plan.chosen.host.total_gib
    if limit is None or total <= limit or refused_by_pod(plan, job):
        return []
    return [
        f"the plan has {total:.0f} GiB in a host's memory, some of it assumed, and its pod may have {limit:.0f}: where"
        f" it is killed for that, raise compute.kubernetes.memory_gib, {_HOST_MEND}"
    ]


def _pods_gib(job: JobSpec) -> float | None:
    limit = memory_mib(job) if job.compute.backend == "kubernetes" else None
    return None if limit is None else limit / 1024


_HOST_MEND = (
    "save synchronously (checkpoint.asynchronous: false), offload less (parallelism), or use more machines, or ones "
    "with more memory"
)


def _is_of_the_host(item: Configuration) -> bool:
    """Whether it is the host's memory that is too small, and not the GPU's."""
    use, host = item.memory, item.host
    is_gpus = use.available_gib is not None and use.total_gib > use.available_gib
    return not is_gpus and host.available_gib is not None and host.total_gib > host.available_gib


def _is_assumed(item: Configuration) -> bool:
    """Whether the host would hold what is counted: a save's copies and what is offloaded to its memory. What processes,
    the system and buffers before a disk take is assumed (planner.host_memory)."""
    return _counted_gib(item) <= (item.host.available_gib or 0.0)


def _counted_gib(item: Configuration) -> float:
    return counted_gib(item.host.checkpoint_gib, item.host.offloaded_gib)


def refused_by_tenant(job: JobSpec, contract: TenantContract, say: Say = say_nothing) -> list[str]:
    """Why the tenant's limits (hours of a job, budget of a month) refuse the job, at launch and at each resume."""
    return [*refused_hours(job, contract), *refused_by_month(job, contract, say)]


def refused_by_month(job: JobSpec, contract: TenantContract, say: Say = say_nothing) -> list[str]:
    """The reason, where the job alone, at its longest, costs more than the tenant has for a month. Nothing holds the
    cluster to the sum of its jobs: that is the budget's alarm. Without a price nothing is refused, which is said."""
    compute, kind = job.compute, job.compute.instance_type
    assert kind is not None
    book = PriceBook.opened(price_file(), today=datetime.date.today())
    try:
        rate = book.price(kind, contract.region, "spot" if compute.spot else "on_demand").usd_per_hour
    except InputError as error:
        month = f"the {contract.monthly_usd:,.0f} USD that tenant {contract.tenant} has a month"
        say(f"warning: not checked against {month}: {error}")
        return []
    # A cluster's deadline there is of the whole attempt; elsewhere each start has max_hours of its own.
    starts = 1 if compute.backend in ("kubernetes", "ray") else 1 + job.recovery.max_resumes
    most = compute.max_hours * starts * compute.instance_count * rate
    if most <= contract.monthly_usd:
        return []
    return [
        f"{compute.instance_count} x {kind} for {starts} x {counted(compute.max_hours, 'hour')} could cost "
        f"{most:,.0f} USD, and "
        f"tenant {contract.tenant} has {contract.monthly_usd:,.0f} USD a month: lower compute.max_hours, or use fewer"
    ]
