"""The broker's way by a queue: a job handed to AWS Batch, which hands it to SageMaker when the tenant's share has room.

Batch takes the CreateTrainingJob request as it is and checks nothing of it: it is made here, like the direct one. Batch
calls the training jobs itself, one for each time that it starts the job: `AWSBatch`, the name that it is asked for, and
32 characters. The name asked for is short, so that all of it stays, and different for each attempt of a record, so that
its training jobs and log streams can be found by it.
"""

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from trainyard.functions import broker_rules as rules
from trainyard.functions.broker_answers import answered
from trainyard.functions.broker_ledger import RUNS, UNSEEN_SECONDS, Jobs, Ledger
from trainyard.functions.retry_rules import retry_rules

BATCH = "AWSBatch"
"""trainyard.spec.shares has it too, which a function doesn't carry."""
NAME_LENGTH = 23
"""SageMaker's 63 characters, less Batch's own 40."""
ENDED = ("SUCCEEDED", "FAILED")
STATUSES = ("SUBMITTED", "PENDING", "RUNNABLE", "SCHEDULED", "STARTING", "RUNNING", *ENDED)
"""Batch's, in the order in which a job comes through them."""
PRIORITY = 1
"""The same for all jobs: who came first goes first."""


def asked_name(tenant: str, attempt: str) -> str:
    """The TrainingJobName that Batch is given for an attempt: the tenant's, and at least 8 characters of a hash."""
    return f"{tenant}-{hashlib.sha256(attempt.encode()).hexdigest()}"[:NAME_LENGTH]


def training_job_prefix(tenant: str, attempt: str) -> str:
    """How the names of all training jobs begin that Batch makes for an attempt."""
    return f"{BATCH}{asked_name(tenant, attempt)}"


def service_job_request(
    request: Mapping[str, Any], spec: Mapping[str, Any], contract: Mapping[str, Any], queue: str
) -> dict[str, Any]:
    """SubmitServiceJob's arguments for a CreateTrainingJob request; pure. The job is called as the attempt is."""
    name = request["TrainingJobName"]
    payload = {**request, "TrainingJobName": asked_name(contract["tenant"], name)}
    return {
        "jobName": name,
        "jobQueue": queue,
        "quotaShareName": contract["tenant"],
        "serviceJobType": "SAGEMAKER_TRAINING",
        "serviceRequestPayload": json.dumps(payload, sort_keys=True),
        # What is stopped for somebody else's turn waits again, as often as it takes: no preemptionConfiguration.
        "retryStrategy": retry_rules(spec),
        "schedulingPriority": PRIORITY,
        # Of two identical calls with one token Batch takes one. Calls that differ are different jobs to it: of those
        # the ledger refuses the second.
        "clientToken": name,
        "tags": {tag["Key"]: tag["Value"] for tag in request["Tags"]},
    }


def queued_job(batch: Any, queue: str, name: str) -> dict[str, Any] | None:
    """Batch's summary of the newest job of that name in a queue; None where there is none (or it ended long ago: Batch
    forgets a job some days after its end)."""
    pages = batch.get_paginator("list_service_jobs").paginate(
        jobQueue=queue, filters=[{"name": "JOB_NAME", "values": [name]}]
    )
    found = [job for page in pages for job in page["jobSummaryList"] if job["jobName"] == name]
    return max(found, key=lambda job: job.get("createdAt", 0), default=None)


def attempt_in_queues(batch: Any, queues: Iterable[str], name: str) -> dict[str, Any] | None:
    """As `queued_job`, in the first of several queues that has one: a record can name another type, and so another
    queue, than the one that its attempt waits in."""
    return next((job for queue in dict.fromkeys(queues) if (job := known_job(batch, queue, name))), None)


def known_job(batch: Any, queue: str, name: str) -> dict[str, Any] | None:
    """As `queued_job`; a queue that is gone, with its jobs, has none."""
    try:
        return queued_job(batch, queue, name)
    except batch.exceptions.ClientError as error:
        if not is_gone(error):
            raise
        return None


def is_gone(error: Any) -> bool:
    """Whether Batch says that it has no such queue."""
    told = error.response["Error"]
    return bool(told["Code"] == "ClientException" and "does not exist" in told.get("Message", ""))


def jobs_in_share(batch: Any, queue: str, tenant: str, statuses: Iterable[str] = STATUSES) -> Iterator[dict[str, Any]]:
    """Batch's summaries of a tenant's jobs in a queue, newest first. Asked status by status: of a share, Batch lists
    what runs alone where none is named."""
    jobs: dict[str, dict[str, Any]] = {}
    share = [{"name": "QUOTA_SHARE_NAME", "values": [tenant]}]
    paginator = batch.get_paginator("list_service_jobs")
    for status in statuses:
        for page in paginator.paginate(jobQueue=queue, filters=share, jobStatus=status):
            # What went on meanwhile is listed twice: as it was seen last.
            jobs |= {job["jobId"]: job for job in page["jobSummaryList"]}
    yield from sorted(jobs.values(), key=lambda job: job.get("createdAt", 0), reverse=True)


def queue_up(
    job: Mapping[str, Any],
    contract: Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    batch: Any,
    ledger: "QueueLedger",
    longest_seconds: int,
    prepare: Callable[[str], None],
) -> dict[str, Any]:
    """Put a checked job into its type's queue; the broker's answer. `request`: CreateTrainingJob's, by the attempt's
    name; `longest_seconds`: that one start of it may run; `prepare`: makes what the job runs as, told of the queue."""
    name, spec = job["name"], job["spec"]
    share = rules.check_share(spec["compute"], job["num_hosts"], contract)
    rules.check_resumes(spec)
    queues = [share["queue"], *(other["queue"] for other in contract["shares"].values())]
    if attempt_in_queues(batch, queues, name) is not None:
        return {"submitted": name, "already": True}
    asked = service_job_request(request, spec, contract, share["queue"])
    # Each start that Batch may make by itself can run as long as the first.
    longest = longest_seconds * asked["retryStrategy"]["attempts"]
    entry = ledger.entry(spec["compute"]["instance_type"], job["num_hosts"], longest) | {"queue": share["queue"]}

    warnings: list[str] = []

    def check(jobs: Jobs, _: list[dict[str, Any]]) -> None:
        told = rules.check_budget(entry, jobs.values(), contract, ledger.month, now_seconds=ledger.now_seconds)
        warnings[:] = told

    ledger.promise(name, entry, check)
    answered(
        name,
        partial(batch.submit_service_job, **asked),
        partial(known_job, batch, share["queue"], name),
        prepare=partial(prepare, share["queue"]),
        give_up=partial(ledger.release, name, entry),
    )
    return {"submitted": name, "already": False, "request": asked, **rules.remarks(entry, warnings)}


class QueueLedger(Ledger):
    """A month of a tenant that queues. A job counts at its longest from its submission until Batch says that it has
    ended; what each of its training jobs was billed counts by itself, under SageMaker's name."""

    def __init__(self, *args: Any, batch: Any, tenant: str, **more: Any) -> None:
        super().__init__(*args, tenant=tenant, **more)
        self._batch, self._tenant = batch, tenant
        self._prefixes += (f"{BATCH}{tenant}-",)

    def _read(self) -> tuple[Jobs, str]:
        """A month's first ledger begins with what was promised in the month before: that may still wait or run. What
        has ended goes when it is brought up to date."""
        jobs, etag = super()._read()
        if not etag:
            before = self._now.replace(day=1) - datetime.timedelta(days=1)
            earlier, _ = self._load(f"broker/ledger-{before:%Y-%m}.json")
            jobs = {name: entry for name, entry in earlier.items() if "queue" in entry}
        return jobs, etag

    def _looks(self, jobs: Jobs) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """As Batch says it of what was promised, and SageMaker of what runs and ran."""
        waiting = {name: entry for name, entry in jobs.items() if "queue" in entry}
        over = set()
        for name in self._over(waiting):
            over.add(name)
            yield name, None
        promised = tuple(training_job_prefix(self._tenant, name) for name in waiting if name not in over)
        states = self._of_the_month()
        for name in sorted({*states, *(name for name, entry in jobs.items() if "queue" not in entry)}):
            known, is_running = jobs.get(name), states.get(name) in RUNS
            if known is not None and (known["billed"] is not None or (is_running and known.get("started") is not None)):
                continue
            # What runs for a promise is in it already; what nobody promised (a lost ledger) counts at its longest.
            is_promised = bool(promised) and name.startswith(promised)
            found = None if is_running and is_promised else self._describe(name)
            if found is not None and found["billed"] is None and is_promised:
                found = None
            yield name, found
        if self._follows_spot:
            yield from self._spot_again(jobs, {name for name, state in states.items() if state in RUNS})

    def _over(self, waiting: Jobs) -> Iterator[str]:
        """Which of the promised jobs have ended, or were never seen, or went with their queue."""
        for queue in sorted({entry["queue"] for entry in waiting.values()}):
            listed = self._newest(queue)
            for name, entry in waiting.items():
                if entry["queue"] != queue:
                    continue
                # By its name alone where the list lacks it: it may have gone from one status to another meanwhile.
                found = None if listed is None else listed.get(name) or known_job(self._batch, queue, name)
                is_late = self.now_seconds - entry["at"] > UNSEEN_SECONDS
                if is_late if found is None else found.get("status") in ENDED:
                    yield name

    def _newest(self, queue: str) -> dict[str, dict[str, Any]] | None:
        """By name, what the tenant has in a queue; None where that is gone."""
        try:
            listed = list(jobs_in_share(self._batch, queue, self._tenant))
        except self._batch.exceptions.ClientError as error:
            if not is_gone(error):
                raise
            return None
        return {job["jobName"]: job for job in reversed(listed)}

    def _holders(self, jobs: Jobs) -> list[dict[str, Any]]:
        """Nobody is told to hold instances: who finds none waits."""
        return []
