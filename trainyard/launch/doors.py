"""Machines that neither SageMaker runs nor this one is: a door each, by its word in `compute.backend`.

A door is a module of this room: how a job goes there, for a tenant and from this machine, and the backend that looks
after it. What else a door needs it has to itself; the verbs and the places know this table alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainyard.launch import cluster, kubernetes, ray
from trainyard.launch.backend import Backend, Say, say_nothing
from trainyard.launch.kubernetes_backend import namespace_of
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.spec.backends import BackendName
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract


class LaunchForTenant(Protocol):
    """Launches a tenant's job: checked, recorded in its bucket, submitted."""

    def __call__(
        self,
        job: JobSpec,
        contract: TenantContract,
        *,
        account: Account,
        launcher: Account,
        force: bool = False,
        say: Say = say_nothing,
    ) -> JobRecord:
        """InputError where the place, the plan or the tenant's limits refuse it."""


class LaunchFromHere(Protocol):
    """Launches a job of nobody's environment; its record lies in a folder of this machine."""

    def __call__(self, job: JobSpec, folder: Path, *, force: bool = False, say: Say = say_nothing) -> JobRecord:
        """InputError where the place or the plan refuses it."""


@dataclass(frozen=True)
class Door:
    """One kind of machines."""

    launch_for_tenant: LaunchForTenant
    launch_from_here: LaunchFromHere
    tenant_backend: Callable[[Account, TenantContract], Backend | None]
    """None where the tenant has no such machines."""
    here_backend: Callable[[Path], Backend]
    """Of the jobs whose records lie in that folder."""
    machines_of: Callable[[JobRecord], str]
    """Which of these machines a job went to: those of one word are asked together, and answer or don't."""


def _kubernetes_of(record: JobRecord) -> str:
    return f"{record.resolved.spec.compute.kubernetes.context or ''} {namespace_of(record)}"


def _ray_of(record: JobRecord) -> str:
    return record.resolved.spec.compute.ray.address or ""


def _tenants_slurm(launcher: Account, contract: TenantContract) -> Backend | None:
    return None if contract.cluster is None else cluster.tenant_backend(launcher, contract)


DOORS: dict[BackendName, Door] = {
    "slurm": Door(
        cluster.launch_on_cluster,
        cluster.launch_on_slurm_here,
        _tenants_slurm,
        cluster.here_backend,
        lambda _: "",  # a tenant has one, and so has this machine
    ),
    "kubernetes": Door(
        kubernetes.launch_on_tenants_kubernetes,
        kubernetes.launch_on_kubernetes_here,
        kubernetes.tenant_backend,
        kubernetes.here_backend,
        _kubernetes_of,
    ),
    "ray": Door(ray.launch_on_tenants_ray, ray.launch_on_ray_here, ray.tenant_backend, ray.here_backend, _ray_of),
}


def asked_together(records: Iterable[JobRecord]) -> list[list[JobRecord]]:
    """The records by who answers for them: what one cluster doesn't say hides no job of another."""
    groups: dict[tuple[str, str], list[JobRecord]] = {}
    for record in records:
        door = DOORS.get(record.backend)
        groups.setdefault((record.backend, door.machines_of(record) if door else ""), []).append(record)
    return [groups[key] for key in sorted(groups)]
