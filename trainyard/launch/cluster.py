"""Jobs for a Slurm cluster: the tenant's own, or the one that this machine can submit to; checked, recorded, submitted.

A tenant's job goes to the tenant's cluster and to no other: by the tenant's login node, or by this machine if it has
the tenant's file system. It reads and writes what a training job does, by the rights of the cluster's machines.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from trainyard.errors import InputError
from trainyard.launch import checks
from trainyard.launch.backend import Say, say_nothing
from trainyard.launch.cluster_shell import HereShell, has_slurm_here, shell_of
from trainyard.launch.launcher import launch_from_here, launch_on_machines
from trainyard.launch.local_backend import trainer_environment
from trainyard.launch.local_paths import local_job
from trainyard.launch.machines import IMAGE_PYTHON
from trainyard.launch.moved import own_folder, refused_resume
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.launch.slurm_backend import SlurmBackend
from trainyard.launch.slurm_script import ClusterPlace
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract

TENANT_DIRECTORY = "/fsx/cluster/trainyard"
"""Folder of jobs on a tenant's cluster; /fsx/cluster is what everybody there may write (docs/tenants.md)."""
TENANT_PYTHON = f"{TENANT_DIRECTORY}/venv/bin/python"
_NOT_IN_A_FOLDER = re.compile(r"[\s%\"'\\]")
"""sbatch ends an option at the first, and reads the others as its own signs."""


def launch_on_cluster(
    job: JobSpec,
    contract: TenantContract,
    *,
    account: Account,
    launcher: Account,
    force: bool = False,
    say: Say = say_nothing,
) -> JobRecord:
    """Launch `job` on the tenant's cluster; returns once Slurm has taken it.

    InputError where the cluster, the plan, the hours or the budget refuse it (the plan's refusals yield to `force`).
    """
    assert job.tenant == contract.tenant
    partition_of(job, contract)
    return launch_on_machines(
        job,
        contract,
        "slurm",
        tenant_backend(launcher, contract),
        image=job.compute.slurm.container_image,
        account=account,
        launcher=launcher,
        force=force,
        say=say,
    )


def launch_on_slurm_here(job: JobSpec, folder: Path, *, force: bool = False, say: Say = say_nothing) -> JobRecord:
    """Launch `job` on the cluster that this machine submits to; its record and files are under `folder`, which the
    cluster's machines must see too."""
    if not has_slurm_here():
        raise InputError(
            "compute.backend slurm: there is no `sbatch` on the PATH here; run this on a cluster's login node, or give "
            "--environment NAME of one where the tenant has a cluster (docs/clusters.md)"
        )
    root = Path(job.compute.slurm.directory or folder.resolve())
    if found := _NOT_IN_A_FOLDER.search(str(root)):
        raise InputError(
            f"folder {root}: has {found[0]!r} in its path, which options of a batch script can't hold; set "
            "compute.slurm.directory, or TRAINYARD_STATE_DIR, to a folder that all machines see and that has none"
        )
    return launch_from_here(
        job,
        folder,
        "slurm",
        here_backend(folder),
        sent=local_job(job, runs_here=False),
        root=root,
        image=job.compute.slurm.container_image,
        force=force,
        say=say,
    )


def tenant_backend(launcher: Account, contract: TenantContract) -> SlurmBackend:
    """The tenant's cluster."""
    return SlurmBackend(
        shell_of(launcher, contract),
        tenant_places(contract),
        tenant_directory,
        lambda record: checks.refused_by_tenant(record.resolved.spec, contract),
    )


def here_backend(folder: Path) -> SlurmBackend:
    """The cluster that this machine can submit to."""
    return SlurmBackend(
        HereShell(),
        here_places(folder),
        lambda record: here_directory(folder, record),
        lambda record: refused_resume(record, folder),
    )


def tenant_directory(record: JobRecord) -> str:
    """The job's folder on the tenant's cluster, whatever has become of the cluster's partitions since."""
    return f"{record.resolved.spec.compute.slurm.directory or TENANT_DIRECTORY}/{record.job_id}"


def here_directory(folder: Path, record: JobRecord) -> str:
    """The job's folder on the cluster that this machine submits to; `folder` holds this machine's records."""
    return str(own_folder(record, folder))


def tenant_places(contract: TenantContract) -> Callable[[JobRecord], ClusterPlace]:
    """Where on the tenant's cluster a job goes."""

    def place_of(record: JobRecord) -> ClusterPlace:
        """That job's, in a partition of its type; InputError where the cluster has none."""
        spec = record.resolved.spec
        slurm = spec.compute.slurm
        words = {
            "environment": contract.environment,
            "tenant": contract.tenant,
            "cost-center": contract.cost_center,
            "job": spec.name,
        }
        return ClusterPlace(
            directory=tenant_directory(record),
            partition=partition_of(spec, contract),
            comment=",".join(f"trainyard:{key}={value}" for key, value in words.items()),
            python=slurm.python or (IMAGE_PYTHON if slurm.container_image else TENANT_PYTHON),
            region=contract.region,
        )

    return place_of


def here_places(folder: Path) -> Callable[[JobRecord], ClusterPlace]:
    """Where jobs of this machine's own records go: into their folder, run by this interpreter and checkout."""

    def place_of(record: JobRecord) -> ClusterPlace:
        """That job's, in the partition that it names, or Slurm's default."""
        spec = record.resolved.spec
        slurm = spec.compute.slurm
        own = slurm.python is None and slurm.container_image is None
        # The checkout is not installed anywhere: who runs this interpreter must be told of it.
        variables = (("PYTHONPATH", trainer_environment()["PYTHONPATH"]),) if own else ()
        return ClusterPlace(
            directory=here_directory(folder, record),
            partition=spec.compute.queue,
            comment=f"trainyard:job={spec.name}",
            python=slurm.python or (IMAGE_PYTHON if slurm.container_image else sys.executable),
            variables=variables,
        )

    return place_of


def partition_of(job: JobSpec, contract: TenantContract) -> str:
    """The partition of the tenant's cluster that takes the job; InputError where none does."""
    cluster, compute = contract.cluster, job.compute
    if cluster is None:
        raise InputError(
            f"compute.backend slurm: tenant {contract.tenant} has no cluster in environment {contract.environment}; "
            "use backend sagemaker, or have the platform team add `cluster:` (docs/clusters.md)"
        )
    offers = "; ".join(f"{name} ({', '.join(kinds)})" for name, kinds in sorted(cluster.queues.items()))
    if compute.instance_type is None:
        raise InputError(f"compute.instance_type: is missing; the cluster of tenant {contract.tenant} has: {offers}")
    if compute.queue is not None and compute.queue not in cluster.queues:
        raise InputError(
            f"compute.queue '{compute.queue}': is no partition of tenant {contract.tenant}'s cluster: {offers}"
        )
    kind = compute.instance_type.removeprefix("ml.")
    wanted = [compute.queue] if compute.queue else sorted(cluster.queues)
    # A partition of several types may give any of them; the plan is for one.
    fitting = sorted(
        (name for name in wanted if kind in cluster.queues[name]), key=lambda name: len(cluster.queues[name])
    )
    if not fitting:
        raise InputError(
            f"compute.instance_type {kind}: no partition of tenant {contract.tenant}'s cluster has it"
            f"{f' under {compute.queue}' if compute.queue else ''}; it has: {offers}"
        )
    others = [other for other in cluster.queues[fitting[0]] if other != kind]
    if others:
        raise InputError(
            f"compute.instance_type {kind}: partition {fitting[0]} also starts {', '.join(others)}, and Slurm may give "
            "either; name a partition of one type, or have one added"
        )
    return fitting[0]
