"""Jobs of a tenant that SageMaker doesn't list as running: they wait in training queues, or are on other machines."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainyard.errors import InputError, TrainyardError
from trainyard.functions.broker_queue import ENDED, STATUSES
from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.contract import read_contract
from trainyard.launch.doors import DOORS
from trainyard.launch.record import TERMINAL_STATES, JobRecord, S3RecordStore
from trainyard.launch.session import Account, assume
from trainyard.spec.platform import EnvironmentSpec, TenantContract

READS = 16
"""Records that are read at once."""
BEFORE_ITS_END = tuple(status for status in STATUSES if status not in ENDED)
"""Batch's statuses of a job. Where none is named it lists, of a share, only what runs."""


def deployed_contract(account: Account, environment: EnvironmentSpec, tenant: str) -> TenantContract | None:
    """The tenant's contract; None where it has none (any more): nobody can launch a job for it then."""
    name = environment.contract_parameter(tenant)
    ssm = account.client("ssm")
    with aws_errors("looking for", f"SSM parameter {name}"):
        try:
            ssm.get_parameter(Name=name)
        except ssm.exceptions.ParameterNotFound:
            return None
    return read_contract(account, environment, tenant)


def queued(account: Account, contract: TenantContract) -> list[str]:
    """Names of the tenant's jobs in its training queues: one that waits can start at any moment."""
    batch = account.client("batch")
    queues = sorted({share.queue for share in contract.shares.values()})
    return list(dict.fromkeys(name for queue in queues for name in _in_queue(batch, queue, contract.tenant)))


def _in_queue(batch: Any, queue: str, tenant: str) -> Iterator[str]:
    share = [{"name": "QUOTA_SHARE_NAME", "values": [tenant]}]
    with aws_errors("listing", f"jobs of queue {queue.rpartition('/')[2]}"):
        try:
            for status in BEFORE_ITS_END:
                pages = batch.get_paginator("list_service_jobs").paginate(
                    jobQueue=queue, filters=share, jobStatus=status
                )
                yield from (job["jobName"] for page in pages for job in page["jobSummaryList"])
        except batch.exceptions.ClientError as error:
            if error_code(error) != "ClientException" or "does not exist" not in str(error):
                raise  # else the queue is gone, with its jobs


def elsewhere(account: Account, contract: TenantContract) -> list[str]:
    """Ids of the tenant's jobs on machines that SageMaker doesn't run, by its records and by those machines.

    Where its own cluster gives no answer its jobs count: they may run. What nobody answers for of other people's
    machines (Kubernetes, Ray) doesn't: these may be gone for good, and the tenant could never leave.
    """
    launcher = assume(account, contract.roles.launcher, session_name=f"trainyard-remove-{contract.tenant}")
    store = S3RecordStore(launcher.client("s3"), contract.buckets.data)
    found: list[str] = []
    records = [record for record in _records(store) if record.backend in DOORS and not record.finished]
    for name, door in DOORS.items():
        mine = [record for record in records if record.backend == name]
        backend = door.tenant_backend(launcher, contract) if mine else None
        if backend is None:
            continue
        try:
            states = backend.states(mine)
        except TrainyardError:
            states = {record.job_id: record.state for record in mine} if name == "slurm" else {}
        found += [job_id for job_id, state in states.items() if state not in TERMINAL_STATES]
    return found


def _records(store: S3RecordStore) -> list[JobRecord]:
    """All that can be read: one that can't be says nothing of where its job runs."""

    def read(job_id: str) -> JobRecord | None:
        try:
            return store.read(job_id).record
        except InputError:
            return None

    with ThreadPoolExecutor(READS) as pool:
        return [record for record in pool.map(read, store.job_ids()) if record is not None]
