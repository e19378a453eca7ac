"""Lambda: every few minutes, what a tenant's jobs of this month have taken of its dollars and GPU-hours.

The broker lets a job in or not; this looks at what really runs. It publishes the figures, on which alarms tell the
tenant, and where the tenant says so (`budget.when_spent: stop`) it ends the jobs at 100 %: SageMaker sends SIGTERM, the
trainer saves a checkpoint and ends, and the job can be resumed.
"""

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from trainyard.functions.job_meter import ENDED, LONGEST_DAYS, Rates, Use, month_of, use_of

QUEUE_STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "SCHEDULED", "STARTING", "RUNNING")
REASON = "the month's budget is spent"

_ended: dict[str, Use | None] = {}
"""What has ended doesn't change: kept while Lambda keeps the process."""


def taken(uses: Iterable[Use], rates: Rates, gpus: Mapping[str, int], now: datetime.datetime) -> dict[str, Any]:
    """The month's `usd` and `gpu_hours` (Decimal) of some jobs, and `unpriced`: types that no price is known of."""
    since, until = month_of(now)
    usd = gpu_hours = Decimal(0)
    unpriced = set()
    for use in uses:
        gpu_hours += use.instance_seconds(since, until) * gpus.get(use.instance_type, 0) / 3600
        rate = use.rate(rates)
        if rate is None:
            unpriced.add(use.instance_type)
        else:
            usd += use.usd(since, until, rate)
    return {"usd": usd, "gpu_hours": gpu_hours, "unpriced": sorted(unpriced)}


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
    ended: dict[str, Use | None],
) -> tuple[list[Use], list[str]]:
    """(use of the jobs whose names begin so and that may hold machines after `since`, names of those that run and
    aren't being stopped). `ended`: what is known of ended ones already, and gets to be."""
    states: dict[str, str] = {}
    created = since - datetime.timedelta(days=LONGEST_DAYS)
    for prefix in prefixes:
        pages = sagemaker.get_paginator("list_training_jobs").paginate(NameContains=prefix, CreationTimeAfter=created)
        listed = [job for page in pages for job in page["TrainingJobSummaries"]]
        states |= {job["TrainingJobName"]: job["TrainingJobStatus"] for job in listed}
    states = {name: state for name, state in states.items() if name.startswith(tuple(prefixes))}
    uses = []
    for name, state in sorted(states.items()):
        if name in ended:
            use = ended[name]
        else:
            use = use_of(sagemaker.describe_training_job(TrainingJobName=name), now)
            if state in ENDED:
                ended[name] = use
        uses += [use] if use is not None else []
    return uses, sorted(name for name, state in states.items() if state == "InProgress")


def stop_all(settings: Mapping[str, Any], running: Iterable[str], sagemaker: Any, batch: Any) -> list[str]:
    """Ends what runs, and what waits in training queues: Batch would start it, and again what SageMaker alone ended."""
    stopped = []
    for queue in settings["queues"]:
        share = [{"name": "QUOTA_SHARE_NAME", "values": [settings["tenant"]]}]
        for state in QUEUE_STATES:
            for page in batch.get_paginator("list_service_jobs").paginate(
                jobQueue=queue, filters=share, jobStatus=state
            ):
                for job in page["jobSummaryList"]:
                    batch.terminate_service_job(jobId=job["jobId"], reason=REASON)
                    stopped.append(job["jobName"])
    if not settings["queues"]:
        for name in running:
            sagemaker.stop_training_job(TrainingJobName=name)
            stopped.append(name)
    return stopped


def handler(event: dict[str, Any], context: object) -> dict[str, Any]:
    """`event`: nothing of it is read. Answers, and logs as one line of JSON, what was found and what was stopped."""
    import boto3

    settings, now = json.loads(os.environ["METER"]), datetime.datetime.now(datetime.UTC)
    sagemaker, budget = boto3.client("sagemaker"), settings["budget"]
    rates = {kind: {way: Decimal(usd) for way, usd in known.items()} for kind, known in settings["rates"].items()}
    uses, running = survey(sagemaker, settings["prefixes"], since=month_of(now)[0], now=now, ended=_ended)
    found = taken(uses, rates, settings["gpus"], now)
    percent = used_percent(found, budget)
    figures = {"BudgetUsedPercent": percent, "SpentUsd": found["usd"], "GpuHours": found["gpu_hours"]}
    boto3.client("cloudwatch").put_metric_data(
        Namespace=settings["namespace"],
        MetricData=[
            {"MetricName": f"{name}-{settings['environment']}", "Value": float(value)}
            for name, value in figures.items()
        ],
    )
    stopped: list[str] = []
    if percent >= 100 and budget["when_spent"] == "stop":
        batch = boto3.client("batch") if settings["queues"] else None
        stopped = stop_all(settings, running, sagemaker, batch)
    answer = {
        "meter": f"{now:%Y-%m}",
        "used_percent": round(float(percent), 3),
        "usd": str(found["usd"]),
        "gpu_hours": str(found["gpu_hours"].quantize(Decimal("0.0001"))),
        "unpriced": found["unpriced"],
        "stopped": stopped,
    }
    print(json.dumps(answer))
    return answer
