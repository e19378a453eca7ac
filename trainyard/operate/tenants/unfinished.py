"""Jobs of a tenant that SageMaker doesn't list as running: they wait in training queues, or are on other machines."""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from trainyard.errors import InputError, TrainyardError
from trainyard.functions.broker_queue import ENDED, STATUSES, is_gone, jobs_in_share
from trainyard.launch.aws import aws_errors
from trainyard.launch.contract import read_contract
from trainyard.launch.doors import DOORS, asked_together
from trainyard.launch.record import TERMINAL_STATES, JobRecord, S3RecordStore
from trainyard.launch.session import Account, assume
from trainyard.spec.platform import EnvironmentSpec, TenantContract
from trainyard.spec.words import counted, either

READS = 16
"""Records that are read at once."""
NOT_TOLD = "jobs on other machines than SageMaker's can't be told"
BEFORE_ITS_END = tuple(status for status in STATUSES if status not in ENDED)
"""Batch's statuses of a job that counts."""


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


@dataclass(frozen=True)
class Unfinished:
    """A tenant's jobs that have not ended: while there are any, it stays."""

    jobs: tuple[str, ...] = ()
    """Told by who runs them, or has them wait."""
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Not ended by their records, and why nobody says more: the tenant's own cluster gives no answer."""
    untold: str = ""
    """Why jobs on other machines than SageMaker's can't be told at all; empty where they can be."""

    def lines(self) -> list[str]:
        """For a person."""
        told = [f"{not_ended(self.jobs)}: {', '.join(self.jobs)}"] if self.jobs else []
        if self.unanswered:
            told.append(f"{silent(self.unanswered)}: {', '.join(self.unanswered)}")
        return told + ([f"{NOT_TOLD}: {self.untold}"] if self.untold else [])

    def without(self, ended: Collection[str]) -> "Unfinished":
        """Without those that a person vouches for. What is told to run runs, whoever says else."""
        return replace(self, unanswered={job: why for job, why in self.unanswered.items() if job not in ended})


def silent(unanswered: Mapping[str, str]) -> str:
    """What is known of jobs whose cluster gives no answer."""
    why = "; ".join(dict.fromkeys(unanswered.values()))
    whose = either(len(unanswered), "its", "their")
    number = counted(len(unanswered), "job")
    return (
        f"{number} had not ended by {whose} record{'' if whose == 'its' else 's'}, and {whose} cluster gives "
        f"no answer ({why})"
    )


def not_ended(jobs: Collection[str]) -> str:
    """1 job has not ended, 2 jobs have not ended."""
    return f"{counted(len(jobs), 'job')} {either(len(jobs), 'has', 'have')} not ended"


def queued(account: Account, contract: TenantContract) -> list[str]:
    """Names of the tenant's jobs in its training queues: one that waits can start at any moment."""
    batch = account.client("batch")
    queues = sorted({share.queue for share in contract.shares.values()})
    return list(dict.fromkeys(name for queue in queues for name in _in_queue(batch, queue, contract.tenant)))


def _in_queue(batch: Any, queue: str, tenant: str) -> list[str]:
    with aws_errors("listing", f"jobs of queue {queue.rpartition('/')[2]}"):
        try:
            return [job["jobName"] for job in jobs_in_share(batch, queue, tenant, BEFORE_ITS_END)]
        except batch.exceptions.ClientError as error:
            if not is_gone(error):
                raise
            return []


def elsewhere(account: Account, contract: TenantContract) -> Unfinished:
    """Ids of the tenant's jobs on machines that SageMaker doesn't run, by its records and by those machines.

    Where its own cluster gives no answer its jobs count: they may run. What nobody answers for of other people's
    machines (Kubernetes, Ray) doesn't: these may be gone for good, and the tenant could never leave. AwsRefusedError
    where who asks may not become the tenant's launcher, who alone can read the records.
    """
    launcher = assume(account, contract.roles.launcher, session_name=f"trainyard-remove-{contract.tenant}")
    store = S3RecordStore(launcher.client("s3"), contract.buckets.data)
    found, unanswered = list[str](), dict[str, str]()
    records = [record for record in _records(store) if record.backend in DOORS and not record.finished]
    for name, door in DOORS.items():
        mine = [record for record in records if record.backend == name]
        backend = door.tenant_backend(launcher, contract) if mine else None
        if backend is None:
            continue
        for together in asked_together(mine):
            try:
                states = backend.states(together)
            except TrainyardError as error:
                if name == "slurm":
                    unanswered |= {record.job_id: str(error) for record in together}
                continue
            found += [job_id for job_id, state in states.items() if state not in TERMINAL_STATES]
    return Unfinished(tuple(found), unanswered)


def _records(store: S3RecordStore) -> list[JobRecord]:
    """All that can be read: one that can't be says nothing of where its job runs."""

    def read(job_id: str) -> JobRecord | None:
        try:
            return store.read(job_id).record
        except InputError:
            return None

    with ThreadPoolExecutor(READS) as pool:
        return [record for record in pool.map(read, store.job_ids()) if record is not None]
