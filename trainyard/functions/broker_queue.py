"""The broker's way by a queue: a job handed to AWS Batch, which hands it to SageMaker when the tenant's share has room.

Batch takes the CreateTrainingJob request as it is and checks nothing of it: it is made here, like the direct one. Batch
calls the training jobs itself, one for each time that it starts the job: `AWSBatch`, the name that it is asked for, and
32 characters. The name asked for is short, so that all of it stays, and different for each attempt of a record, so that
its training jobs and log streams can be found by it.
"""

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainyard.functions import broker_rules as rules
from trainyard.functions.broker_ledger import UNSEEN_SECONDS, Jobs, Ledger
from trainyard.functions.retry_rules import retry_rules

BATCH = "AWSBatch"
"""trainyard.spec.shares has it too, which a function doesn't carry."""
NAME_LENGTH = 23
"""SageMaker's 63 characters, less Batch's own 40."""
ENDED = ("SUCCEEDED", "FAILED")
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
        told = error.response["Error"]
        if told["Code"] != "ClientException" or "does not exist" not in told.get("Message", ""):
            raise
        return None


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
    from botocore.exceptions import HTTPClientError

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
    try:
        prepare(share["queue"])
        batch.submit_service_job(**asked)
    except HTTPClientError:
        raise  # no answer: the job may come yet, and its promise stands until it does or lapses
    except Exception:
        # An answer that was lost is no refusal: what counts is whether the job is there.
        if queued_job(batch, share["queue"], name) is None:
            ledger.release(name, entry)
            raise
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

    def _refresh(self, jobs: Jobs) -> list[dict[str, Any]]:
        """Bring `jobs` up to date with Batch and SageMaker. Nobody is told to hold instances: who finds none waits."""
        for name, entry in [(name, entry) for name, entry in jobs.items() if "queue" in entry]:
            found = known_job(self._batch, entry["queue"], name)
            age = self._now.timestamp() - entry["at"]
            if (found is None and age > UNSEEN_SECONDS) or (found is not None and found.get("status") in ENDED):
                del jobs[name]
        promised = tuple(training_job_prefix(self._tenant, name) for name, entry in jobs.items() if "queue" in entry)
        started = {name for name, entry in jobs.items() if "queue" not in entry}
        for name in sorted({*self._of_the_month(), *started}):
            if name in jobs and jobs[name]["billed"] is not None:
                continue
            found = self._describe(name)
            # What runs for a promise is in it already; what nobody promised (a lost ledger) counts at its longest.
            if found is None or (found["billed"] is None and promised and name.startswith(promised)):
                jobs.pop(name, None)
            else:
                jobs[name] = found
        return []
