"""Jobs that wait in AWS Batch's training queues: the broker puts them there, Batch starts them on SageMaker.

An attempt of a record is one job of a queue, called as the attempt is. Batch may start it several times: after a lack
of capacity, after what its retry rules mend, and after it was stopped because the owner of borrowed machines has work.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from trainyard.errors import InputError
from trainyard.functions import broker_queue
from trainyard.launch.aws import aws_errors
from trainyard.launch.backend import Observation, Say
from trainyard.launch.broker import ask_broker
from trainyard.launch.checks import RunningJob, check_queue, check_share
from trainyard.launch.record import TERMINAL_STATES, JobRecord
from trainyard.launch.sagemaker_backend import SageMakerBackend, nothing_handed_over, observation
from trainyard.launch.session import Account
from trainyard.spec.platform import TenantContract

QUEUED = "Queued"
"""The state of a job that Batch holds: it waits for its first machines, or for them again."""
STOPPED_BY = "trainyard stop"
"""The reason that Batch is given, and tells, of a job that somebody ended."""


class QueueBackend(SageMakerBackend):
    """One tenant's queued jobs, as its launcher role."""

    def check(self, record: JobRecord) -> None:
        """InputError where the tenant's share could never take the newest attempt; what has no room now waits."""
        self._check(record)
        super().check(record)

    def submit(self, record: JobRecord, say: Say) -> None:
        """Have the broker put the newest attempt into its queue; one that is there already is left alone."""
        self._check(record)
        say("writing the job's spec to its input channel")
        with nothing_handed_over():
            self._write_spec(record)
        say(f"handing {record.attempt.training_job_name} to the tenant's broker, for queue {self._queue(record)}")
        ask_broker(self._launcher, self._contract, record.job_id, say)

    def _check(self, record: JobRecord) -> None:
        spec = record.resolved.spec
        check_queue(spec, self._contract)
        check_share(spec, self._contract)

    def running(self, *, but: str = "") -> list[RunningJob]:
        """None that would be in a new job's way: it waits for them."""
        return []

    def observe(self, record: JobRecord) -> Observation | None:
        """The newest attempt as Batch and SageMaker describe it together; None where neither knows it."""
        name = record.attempt.training_job_name
        queued = self._queued(record)
        if queued is None:
            started = self._newest_start(name)  # Batch forgets a job some days after its end, SageMaker never
            return observation(started, record.attempt.number) if started else None
        # By its name and not by the attempt's ARN, in which SageMaker may have made the letters small.
        started = self._newest_start(name) if queued.get("latestAttempt") else None
        return together(queued, started, record.attempt.number)

    def _queued(self, record: JobRecord) -> dict[str, Any] | None:
        share, name = self._share(record), record.attempt.training_job_name
        if share is None:
            return None
        with aws_errors("listing", f"jobs of queue {self._queue(record)}"):
            return broker_queue.queued_job(self._launcher.client("batch"), share, name)

    def _share(self, record: JobRecord) -> str | None:
        share = self._contract.shares.get(str(record.resolved.spec.compute.instance_type))
        return share.queue if share else None

    def _queue(self, record: JobRecord) -> str:
        return str(self._share(record)).rpartition("/")[2]

    def _newest_start(self, attempt: str) -> dict[str, Any] | None:
        prefix = broker_queue.training_job_prefix(self._contract.tenant, attempt)
        with aws_errors("listing", f"training jobs of {attempt}"):
            found = self._launcher.client("sagemaker").list_training_jobs(
                NameContains=prefix, SortBy="CreationTime", SortOrder="Descending"
            )["TrainingJobSummaries"]
        names = [job["TrainingJobName"] for job in found if job["TrainingJobName"].startswith(prefix)]
        # A job from before the tenant queued is called as its attempt is.
        return self._describe(names[0] if names else attempt)

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """By Batch's listing of the tenant's share, queue by queue, of `records` that had not ended."""
        wanted = {record.attempt.training_job_name: record.job_id for record in records if not record.finished}
        found: dict[str, str] = {}
        for queue in sorted({share for record in records if not record.finished and (share := self._share(record))}):
            for job in self._in_share(queue):
                if (job_id := wanted.get(job["jobName"])) and job_id not in found:
                    found[job_id] = _STATES.get(job.get("status", ""), QUEUED)
                    if found[job_id] == "Failed" and _was_stopped(job, None):
                        found[job_id] = "Stopped"
        return found

    def _in_share(self, queue: str) -> Iterator[dict[str, Any]]:
        """Newest first."""
        with aws_errors("listing", f"jobs of queue {queue.rpartition('/')[2]}"):
            yield from broker_queue.jobs_in_share(self._launcher.client("batch"), queue, self._contract.tenant)

    def stop(self, record: JobRecord) -> None:
        """Taken out of the queue, or SIGTERM to every host, 120 s to save, then the end. Batch doesn't start it again,
        as it would if SageMaker alone were told."""
        name = record.attempt.training_job_name
        queued = self._queued(record)
        if queued is None:
            started = self._newest_start(name)
            if started is not None and not observation(started, record.attempt.number).finished:
                super().stop(record)  # a job from before the tenant queued: Batch has never had it
                return
            raise InputError(f"job {record.job_id}: Batch doesn't know {name} any more; there is nothing to stop")
        with aws_errors("stopping", f"job {name}"):
            self._launcher.client("batch").terminate_service_job(jobId=queued["jobId"], reason=STOPPED_BY)

    def _log_prefixes(self, record: JobRecord) -> list[str]:
        """Streams of every start that Batch made of the attempt."""
        name = record.attempt.training_job_name
        return [broker_queue.training_job_prefix(self._contract.tenant, name), *super()._log_prefixes(record)]


_STATES = {
    "SCHEDULED": "Starting",
    "STARTING": "Downloading",
    "RUNNING": "Training",
    "SUCCEEDED": "Completed",
    "FAILED": "Failed",
}
"""Batch's words in SageMaker's, where only Batch was asked (Batch user guide, "Mapping service job status")."""


def backend_of(launcher: Account, contract: TenantContract) -> SageMakerBackend:
    """The backend of a deployed tenant."""
    return (QueueBackend if contract.shares else SageMakerBackend)(launcher, contract)


def together(queued: dict[str, Any], started: dict[str, Any] | None, attempt: int) -> Observation:
    """A job's state by Batch's summary and by the description of the training job that it started last, if any."""
    status, reason = queued.get("status", ""), str(queued.get("statusReason") or "")
    last = observation(started, attempt) if started else None
    if status in broker_queue.ENDED:
        ended = "Completed" if status == "SUCCEEDED" else "Stopped" if _was_stopped(queued, last) else "Failed"
        if last is not None and last.state == ended:
            return last
        # It ended where SageMaker had no part in it: taken out while it waited, or never taken.
        failure = reason if ended == "Failed" else ""
        return Observation(ended, reason, failure, last.transitions if last else (), _iso(queued.get("stoppedAt")))
    if last is None or last.state in TERMINAL_STATES or status in ("SUBMITTED", "PENDING", "RUNNABLE"):
        why = reason or "its machines are in use, or lent and on their way back"
        if last is not None and not reason:
            why = f"to be started again: {last.failure or last.note}"
        return Observation(QUEUED, f"{queued_at(queued)}: {why}", "", last.transitions if last else ())
    return last


def _iso(milliseconds: int | None) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds") if milliseconds else ""


def _was_stopped(queued: dict[str, Any], last: Observation | None) -> bool:
    return bool(queued.get("isTerminated")) or (last is not None and last.state == "Stopped")


def queued_at(queued: dict[str, Any]) -> str:
    """Where it waits."""
    share = queued.get("quotaShareName")
    return f"in share {share} of its training queue" if share else "in its training queue"
