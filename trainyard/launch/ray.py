"""Jobs for a Ray cluster: checked, recorded, submitted to its job server.

The cluster is the one whose job server the job names, and a job has the rights of its machines: Ray knows no users. A
tenant's job reads and writes what a training job does, so the cluster must be the tenant's own.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from trainyard.errors import InputError
from trainyard.launch import checks
from trainyard.launch.backend import Say, say_nothing
from trainyard.launch.launcher import launch_from_here, launch_on_machines
from trainyard.launch.local_backend import trainer_environment
from trainyard.launch.local_paths import local_job
from trainyard.launch.machines import IMAGE_PYTHON
from trainyard.launch.moved import own_folder, refused_resume
from trainyard.launch.ray_backend import RayBackend, RayPlace
from trainyard.launch.ray_jobs import HttpJobServer, address_of
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract

TENANT_DIRECTORY = "/tmp/trainyard"
"""On each machine's own disk: inputs are brought to each, checkpoints go to S3."""


def launch_on_tenants_ray(
    job: JobSpec,
    contract: TenantContract,
    *,
    account: Account,
    launcher: Account,
    force: bool = False,
    say: Say = say_nothing,
) -> JobRecord:
    """Launch `job` on the tenant's Ray cluster; returns once its job server has taken it.

    InputError where the plan, the hours or the budget refuse it (which yield to `force`), or no server answers.
    """
    assert job.tenant == contract.tenant
    checks.check_machines_are_named(job)
    return launch_on_machines(
        pinned(job),
        contract,
        "ray",
        tenant_backend(launcher, contract),
        image=None,
        account=account,
        launcher=launcher,
        force=force,
        say=say,
    )


def launch_on_ray_here(job: JobSpec, folder: Path, *, force: bool = False, say: Say = say_nothing) -> JobRecord:
    """Launch `job` on the Ray cluster that the job, or this environment, names; its record and files are under
    `folder`, which the cluster's machines must see too."""
    sent = pinned(job)
    return launch_from_here(
        sent,
        folder,
        "ray",
        here_backend(folder),
        sent=local_job(sent, runs_here=False),
        root=Path(job.compute.ray.directory) if job.compute.ray.directory else None,
        force=force,
        say=say,
    )


def pinned(job: JobSpec) -> JobSpec:
    """`job` with the address that is meant now; InputError for what Ray has not."""
    if job.compute.queue is not None:
        raise InputError(f"compute.queue {job.compute.queue}: Ray has no queues; leave it out")
    if job.compute.spot:
        raise InputError("compute.spot: whether a Ray cluster's machines are spot ones is the cluster's; leave it out")
    ray = job.compute.ray.model_copy(update={"address": address_of(job.compute.ray.address)})
    return job.model_copy(update={"compute": job.compute.model_copy(update={"ray": ray})})


def tenant_backend(_: Account, contract: TenantContract) -> RayBackend:
    """The clusters that the tenant's jobs name."""
    return RayBackend(
        HttpJobServer(),
        tenant_places(contract),
        lambda record: checks.refused_by_tenant(record.resolved.spec, contract),
    )


def here_backend(folder: Path) -> RayBackend:
    """The clusters that jobs of nobody's environment name; `folder` holds this machine's records."""
    return RayBackend(
        HttpJobServer(),
        here_places(folder),
        lambda record: refused_resume(record, folder),
    )


def tenant_places(contract: TenantContract) -> Callable[[JobRecord], RayPlace]:
    """Where on the tenant's cluster a job goes."""

    def place_of(record: JobRecord) -> RayPlace:
        """That job's, on its machines' own disks."""
        ray = record.resolved.spec.compute.ray
        return RayPlace(
            directory=f"{ray.directory or TENANT_DIRECTORY}/{record.job_id}",
            python=ray.python or IMAGE_PYTHON,
            labels=(
                ("environment", contract.environment),
                ("tenant", contract.tenant),
                ("cost-center", contract.cost_center),
            ),
            region=contract.region,
        )

    return place_of


def here_places(folder: Path) -> Callable[[JobRecord], RayPlace]:
    """Where jobs of this machine's own records go: into their folder, run by this interpreter and checkout."""

    def place_of(record: JobRecord) -> RayPlace:
        """That job's, in a folder that the machines and this one see."""
        ray = record.resolved.spec.compute.ray
        # The checkout is not installed anywhere: who runs this interpreter must be told of it.
        path = trainer_environment()["PYTHONPATH"]
        return RayPlace(
            directory=str(own_folder(record, folder)),
            python=ray.python or sys.executable,
            variables=() if ray.python else (("PYTHONPATH", path),),
        )

    return place_of
