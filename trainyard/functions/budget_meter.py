"""Lambda: every few minutes, what a tenant's jobs of this month have taken of its dollars and GPU-hours.

The broker lets a job in or not; this looks at what really runs. It publishes the figures, on which alarms tell the
tenant, and where the tenant says so (`budget.when_spent: stop`) it ends the jobs at 100 %: SageMaker sends SIGTERM, the
trainer saves a checkpoint and ends, and the job can be resumed.
"""

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from trainyard.functions.job_meter import (
    ENDED,
    LONGEST_DAYS,
    Rates,
    Use,
    described,
    is_settled,
    month_of,
    uses_of,
    waiting_seconds,
)

WAITING_STATES = ("SUBMITTED", "PENDING", "RUNNABLE")
"""Of a job in a training queue that SageMaker doesn't have yet."""
QUEUE_STATES = (*WAITING_STATES, "SCHEDULED", "STARTING", "RUNNING")
REASON = "the month's budget is spent"

PATIENCE_SECONDS = 180.0
"""How long one look describes ended jobs: a while less than it may take (stacks/constructs/budget_meter.py). At its own
end Lambda would take the process away, and what it knows with it."""

_ended: dict[str, list[Use]] = {}
"""What has ended and is settled doesn't change: kept while Lambda keeps the process."""


def taken(uses: Iterable[Use], rates: Rates, gpus: Mapping[str, int], now: datetime.datetime) -> dict[str, Any]:
    """The month's `usd` and `gpu_hours` (Decimal) of some jobs, `unpriced`: types that no price is known of, and
    `unpriced_jobs`: how many jobs with such machines took something of the month. What runs on a training plan was paid
    when that was bought: it takes no dollars, and lacks no price."""
    since, until = month_of(now)
    usd = gpu_hours = Decimal(0)
    unpriced: set[str] = set()
    jobs: set[str] = set()
    for use in uses:
        gpu_hours += use.instance_seconds(since, until) * gpus.get(use.instance_type, 0) / 3600
        if use.purchase == "training_plan":
            continue
        rate = use.rate(rates)
        if rate is not None:
            usd += use.usd(since, until, rate)
        elif use.instance_seconds(since, until):
            unpriced.add(use.instance_type)
            jobs.add(use.name)
    return {"usd": usd, "gpu_hours": gpu_hours, "unpriced": sorted(unpriced), "unpriced_jobs": len(jobs)}


def used_percent(found: Mapping[str, Any], budget: Mapping[str, Any]) -> Decimal:
    """Of the quota that is nearer to its end."""
    parts: list[Decimal] = [100 * found["usd"] / Decimal(str(budget["monthly_usd"]))]
    if budget.get("monthly_gpu_hours"):
        parts.append(100 * found["gpu_hours"] / Decimal(str(budget["monthly_gpu_hours"])))
    return max(parts)


def survey(
    sagemaker: Any,
    prefixes: Iterable[str],
    *,
    since: datetime.datetime,
    now: datetime.datetime,
    ended: dict[str, list[Use]],
    patience_seconds: float = math.inf,
) -> tuple[list[Use], list[str], float]:
    """(use of the jobs whose names begin so and that may hold machines after `since`, names of those that run and
    aren't being stopped, seconds that the one waits that waits longest). `ended`: what is known of ended ones already,
    and gets to be. RuntimeError where there are more of these than `patience_seconds` let it look at: the next one goes
    on."""
    states = _states(sagemaker, prefixes, since - datetime.timedelta(days=LONGEST_DAYS))
    uses = []
    longest_wait = 0.0
    until, already = time.monotonic() + patience_seconds, len(ended)
    for name in sorted(states, key=lambda name: (states[name] not in ENDED, name)):
        found = ended.get(name)
        if found is None:
            if states[name] in ENDED and len(ended) > already and time.monotonic() > until:
                raise RuntimeError(
                    f"{len(ended):,} ended jobs are known, not all yet; the next look goes on from there"
                )
            job = described(sagemaker, name)
            if job is None:  # deleted since it was listed
                continue
            found = uses_of(job, now)
            longest_wait = max(longest_wait, waiting_seconds(job, now))
            if is_settled(job):
                ended[name] = found
        uses += found
    return uses, sorted(name for name, state in states.items() if state == "InProgress"), longest_wait


def _states(sagemaker: Any, prefixes: Iterable[str], created: datetime.datetime) -> dict[str, str]:
    """Status of each job whose name begins so, created after that moment."""
    states: dict[str, str] = {}
    for prefix in prefixes:
        pages = sagemaker.get_paginator("list_training_jobs").paginate(
            NameContains=prefix, CreationTimeAfter=created, PaginationConfig={"PageSize": 100}
        )
        listed = [job for page in pages for job in page["TrainingJobSummaries"]]
        states |= {job["TrainingJobName"]: job["TrainingJobStatus"] for job in listed}
    return {name: state for name, state in states.items() if name.startswith(tuple(prefixes))}


def longest_wait_in_queues(settings: Mapping[str, Any], batch: Any, now: datetime.datetime) -> tuple[float, list[str]]:
    """(seconds that the one waits longest of the tenant's jobs that wait in its training queues, a line for each queue
    that couldn't be asked). Batch counts milliseconds since the epoch. One that has had machines, and gave them back to
    those whose turn it was, waits since it did, of which Batch's list says nothing: it isn't counted."""
    longest, failed = 0.0, []
    for queue in settings["queues"]:
        try:
            waiting = [job for state in WAITING_STATES for job in _queued(batch, queue, settings["tenant"], state)]
        except Exception as error:  # the money is looked at all the same
            failed.append(f"{queue}: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        created = [job["createdAt"] for job in waiting if "createdAt" in job and not job.get("latestAttempt")]
        longest = max([longest, *(now.timestamp() - milliseconds / 1000 for milliseconds in created)])
    return longest, failed


def stop_all(
    settings: Mapping[str, Any], running: Iterable[str], sagemaker: Any, batch: Any
) -> tuple[list[str], list[str]]:
    """Ends what runs, and what waits in training queues: Batch would start it, and again what SageMaker alone ended.

    (names of what was told to end, a line for each that couldn't be): one that fails leaves none of the others running.
    What ended meanwhile, or was stopped by another look (each end of a job starts one), is as good as told; told twice
    it saves once.
    """
    stopped: list[str] = []
    failed: list[str] = []

    def attempt(name: str, end: Callable[[], Any], runs: Callable[[], bool]) -> None:
        try:
            end()
        except Exception as error:  # whatever it was, the next one must be tried
            if not _is_over(runs):
                failed.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
                return
        stopped.append(name)

    # Where there are queues, what Batch named is theirs to end; what was started at once, as before they were, isn't.
    own = f"{settings['tenant']}-" if settings["queues"] else ""
    for name in running:
        if name.startswith(own):
            runs = partial(_runs, sagemaker, name)
            attempt(name, partial(sagemaker.stop_training_job, TrainingJobName=name), runs)
    for queue in settings["queues"]:
        for state in QUEUE_STATES:
            try:
                waiting = _queued(batch, queue, settings["tenant"], state)
            except Exception as error:  # as above: the other queues are looked at
                failed.append(f"{queue}: {type(error).__name__}: {' '.join(str(error).split())}")
                continue
            for job in waiting:
                end = partial(batch.terminate_service_job, jobId=job["jobId"], reason=REASON)
                attempt(job["jobName"], end, partial(_is_queued, batch, queue, settings["tenant"], job["jobId"]))
    return stopped, failed


def _is_over(runs: Callable[[], bool]) -> bool:
    try:
        return not runs()
    except Exception:  # nobody knows; so the refusal is told
        return False


def _runs(sagemaker: Any, name: str) -> bool:
    return bool(sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] == "InProgress")


def _is_queued(batch: Any, queue: str, tenant: str, job_id: str) -> bool:
    return any(job["jobId"] == job_id for state in QUEUE_STATES for job in _queued(batch, queue, tenant, state))


def _queued(batch: Any, queue: str, tenant: str, state: str) -> list[dict[str, Any]]:
    pages = batch.get_paginator("list_service_jobs").paginate(
        jobQueue=queue, filters=[{"name": "QUOTA_SHARE_NAME", "values": [tenant]}], jobStatus=state
    )
    return [job for page in pages for job in page["jobSummaryList"]]


def _publish(cloudwatch: Any, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """The figures as the tenant's metrics of this environment."""
    named = [
        {"MetricName": f"{name}-{settings['environment']}", "Value": float(value)} for name, value in figures.items()
    ]
    cloudwatch.put_metric_data(Namespace=settings["namespace"], MetricData=named)


def handler(event: dict[str, Any], context: object) -> dict[str, Any]:
    """`event`: nothing of it is read. Answers, and logs as one line of JSON, what was found and what was stopped.

    RuntimeError, after that line, where something couldn't be stopped: the function's errors ring.
    """
    import boto3

    settings, now = json.loads(os.environ["METER"]), datetime.datetime.now(datetime.UTC)
    sagemaker, budget = boto3.client("sagemaker"), settings["budget"]
    rates = {kind: {way: Decimal(usd) for way, usd in known.items()} for kind, known in settings["rates"].items()}
    batch = boto3.client("batch") if settings["queues"] else None
    first, _ = month_of(now)
    uses, running, waited = survey(
        sagemaker, settings["prefixes"], since=first, now=now, ended=_ended, patience_seconds=PATIENCE_SECONDS
    )
    found = taken(uses, rates, settings["gpus"], now)
    percent = used_percent(found, budget)
    queued, unasked = longest_wait_in_queues(settings, batch, now)
    figures = {
        "BudgetUsedPercent": percent,
        "SpentUsd": found["usd"],
        "GpuHours": found["gpu_hours"],
        "UnpricedJobs": found["unpriced_jobs"],
        "LongestWaitSeconds": max(waited, queued),
    }
    stopped: list[str] = []
    failed: list[str] = []
    if percent >= 100 and budget["when_spent"] == "stop":
        stopped, failed = stop_all(settings, running, sagemaker, batch)
    answer = {
        "meter": f"{now:%Y-%m}",
        "used_percent": round(float(percent), 3),
        "usd": str(found["usd"]),
        "gpu_hours": str(found["gpu_hours"].quantize(Decimal("0.0001"))),
        "unpriced": found["unpriced"],
        "longest_wait_seconds": round(max(waited, queued)),
        "unasked": unasked,
        "stopped": stopped,
        "failed": failed,
    }
    print(json.dumps(answer))
    # Last, so that jobs are stopped though nobody can be told of it.
    _publish(boto3.client("cloudwatch"), settings, figures)
    if failed:
        raise RuntimeError(f"not stopped: {'; '.join(failed)}")
    return answer
