"""Which bandwidths a job's network has to reach before its first step, and what can't be asked of it."""

from trainyard.errors import InputError
from trainyard.hardware.bandwidth import bandwidth_floors
from trainyard.planner.reading import Machines
from trainyard.spec.job import JobSpec


def known_floors(job: JobSpec) -> dict[str, tuple[float, str]]:
    """{"host" or "across": (GB/s of bus bandwidth, where that comes from)} of the job's instance type, where known."""
    return {} if job.compute.instance_type is None else bandwidth_floors(job.compute.instance_type)


def check_preflight(job: JobSpec, machines: Machines) -> None:
    """InputError where a measurement is asked for, or a floor stated, that would be compared with nothing.

    Of a job on this machine torchrun says how many ranks and hosts there are: the trainer tells at its start.
    """
    spec = job.preflight
    if spec.collectives in ("auto", "off") and not spec.stated_floors:
        return
    elastic = job.recovery.elastic
    # Only its own machines may be more hosts than a job on this one knows of: torchrun's --nnodes starts it on several.
    num_hosts = machines.num_hosts if elastic is None else max(machines.num_hosts, elastic.max_instances)
    is_one_host = num_hosts == 1 and job.compute.backend != "local"
    # The type's GPUs, not the processes that were started: the job may be rehearsed with fewer of them, or one.
    per_host = machines.processes_per_host if machines.instance is None else machines.instance.num_gpus
    if per_host == 1 and is_one_host:
        raise InputError("preflight: the job has one rank, which talks to nobody; leave preflight out")
    if is_one_host and spec.across_gb_per_second is not None:
        raise InputError(
            "preflight.across_gb_per_second: is for several hosts, and this job has one; use host_gb_per_second, or"
            " leave it out"
        )
    if per_host == 1 and job.compute.backend != "local" and spec.host_gb_per_second is not None:
        whose = f"a host of {job.compute.instance_type}" if machines.instance else "each host of this job"
        raise InputError(
            f"preflight.host_gb_per_second: is for several GPUs of one host, and {whose} has one; use"
            " across_gb_per_second, or leave it out"
        )
    floors = known_floors(job) | spec.stated_floors
    if not (set(floors) - ({"across"} if is_one_host else set())):
        what = f"of {job.compute.instance_type}" if job.compute.instance_type else "without compute.instance_type"
        where = "inside a host" if is_one_host else "between hosts or inside them"
        raise InputError(
            f"preflight.collectives: {spec.collectives}: no floor is known {where} {what}; state host_gb_per_second"
            + ("" if is_one_host else " or across_gb_per_second")
            + " (measured by torchrun -m trainer.collectives), or set collectives to off"
        )
