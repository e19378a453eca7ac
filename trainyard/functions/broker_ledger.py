"""What a tenant's jobs hold, and what of a month's money they take: a small object in S3 that the broker alone writes.

It is a cache and a lock, not the truth: SageMaker's own descriptions are, which nobody can delete, and from which it is
made anew where it is lost. Every write is conditional, so that of two submissions at the same moment the second sees
the first's instances and money.
"""

import datetime
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.functions.job_meter import ENDED, LONGEST_DAYS, OVER, is_settled, month_of, uses_of

TRIES = 6
PREPAID = 0.0
"""USD an hour on a training plan, which was paid when it was bought."""
UNSEEN_SECONDS = 900
"""How long a promise stands for a job that SageMaker doesn't show: longer than a submission takes."""
SAME = ("type", "count", "seconds", "usd_per_hour", "gpus", "queue")
"""What two promises of one name must share."""

Jobs = dict[str, dict[str, Any]]


class BusyError(Exception):
    """Other submissions of the tenant kept writing the ledger."""


class Ledger:
    """One month of one tenant. `prices`: USD an instance-hour by type, where known; `gpus`: of an instance."""

    def __init__(
        self,
        s3: Any,
        sagemaker: Any,
        *,
        bucket: str,
        tenant: str,
        prices: Mapping[str, float],
        gpus: Mapping[str, int],
        now: datetime.datetime,
    ) -> None:
        self._s3, self._sagemaker, self._bucket, self._now = s3, sagemaker, bucket, now
        self._prices, self._gpus = prices, gpus
        self._contains = f"{tenant}-"
        self._prefixes: tuple[str, ...] = (self._contains,)
        self.month = f"{now:%Y-%m}"
        self._key = f"broker/ledger-{self.month}.json"

    def entry(self, kind: str, count: int, seconds: int) -> dict[str, Any]:
        """A job as the ledger holds it: `seconds` at its longest, `billed` and `held` once it has ended."""
        rates = {"usd_per_hour": self._prices.get(kind), "gpus": self._gpus.get(kind, 0)}
        return {"type": kind, "count": count, "seconds": seconds, **rates, "at": self.now_seconds, "billed": None}

    @property
    def now_seconds(self) -> float:
        """The moment as of which the ledger is read, since the epoch."""
        return self._now.timestamp()

    def promise(self, name: str, entry: dict[str, Any], check: Callable[[Jobs, list[dict[str, Any]]], None]) -> None:
        """Write the job down if `check` (month's jobs, those that hold instances now; without this one) lets it.

        A promise of that name that stands already stays as it is; BusyError where it is of something else: another call
        may be between its promise and its job.
        """
        for number in range(TRIES):
            jobs, etag = self._read()
            holders = self._refresh(jobs)
            standing = jobs.get(name)
            if standing is not None and any(standing.get(key) != entry.get(key) for key in SAME):
                raise BusyError(
                    f"job {name} is being submitted as {standing['count']} x {standing['type']} by another call; "
                    f"repeat the command, after {UNSEEN_SECONDS // 60} minutes at the latest"
                )
            check({key: job for key, job in jobs.items() if key != name}, [j for j in holders if j["name"] != name])
            if self._write({**jobs, name: standing or entry}, etag):
                return
            time.sleep(random.uniform(0.05, 0.3) * (number + 1))
        raise BusyError("other jobs of the tenant are being submitted at this moment; repeat the command")

    def release(self, name: str, entry: dict[str, Any]) -> None:
        """Take a promise back whose job SageMaker refused; another call's stays. Best effort: it lapses by itself."""
        for _ in range(TRIES):
            jobs, etag = self._read()
            if jobs.get(name) != entry or self._write({key: job for key, job in jobs.items() if key != name}, etag):
                return

    def _read(self) -> tuple[Jobs, str]:
        return self._load(self._key)

    def _load(self, key: str) -> tuple[Jobs, str]:
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=key)
        except self._s3.exceptions.NoSuchKey:
            return {}, ""
        return dict(json.load(answer["Body"])["jobs"]), answer["ETag"]

    def _write(self, jobs: Jobs, etag: str) -> bool:
        body = json.dumps({"version": 1, "month": self.month, "jobs": jobs}).encode()
        condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        try:
            self._s3.put_object(Bucket=self._bucket, Key=self._key, Body=body, **condition)
        except self._s3.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                return False
            raise
        return True

    def _refresh(self, jobs: Jobs) -> list[dict[str, Any]]:
        """Bring `jobs` up to date with SageMaker; what holds instances now."""
        alive = {name for status in ("InProgress", "Stopping") for name in self._listed(StatusEquals=status)}
        for name in sorted({*self._of_the_month(), *alive, *jobs}):
            # Each job is described once as it runs: what was promised under its name may have been another's. One that
            # has ended is done with when its machines are kept warm no more.
            known = jobs.get(name, {})
            has_ended = known.get("billed") is not None and not known.get("warm")
            if has_ended or (name in alive and known.get("seen")):
                continue
            found = self._describe(name)
            if found is not None:
                jobs[name] = found
            elif name in jobs and self._now.timestamp() - jobs[name]["at"] > UNSEEN_SECONDS:
                del jobs[name]
        return [{"name": name, **job} for name, job in jobs.items() if job["billed"] is None or job.get("warm")]

    def _of_the_month(self) -> list[str]:
        """Names of the jobs that may have taken something of this month, those created before it with them."""
        first = month_of(self._now)[0]
        created = first - datetime.timedelta(days=LONGEST_DAYS)
        return self._listed(lambda job: job.get("TrainingEndTime", self._now) >= first, CreationTimeAfter=created)

    def _listed(self, takes: Callable[[dict[str, Any]], bool] = bool, **only: Any) -> list[str]:
        pages = self._sagemaker.get_paginator("list_training_jobs").paginate(
            NameContains=self._contains, PaginationConfig={"PageSize": 100}, **only
        )
        names = [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"] if takes(job)]
        return [name for name in names if name.startswith(self._prefixes)]

    def _describe(self, name: str) -> dict[str, Any] | None:
        job = described(self._sagemaker, name)
        if job is None:
            return None
        first, following = month_of(self._now)
        started, resources = job.get("TrainingStartTime") or self._now, job["ResourceConfig"]
        longest = job["StoppingCondition"].get("MaxRuntimeInSeconds", 86_400)
        longest += resources.get("KeepAlivePeriodInSeconds") or 0
        # What it ran before the month is that month's.
        longest = max(0, longest - max(0, round((first - started).total_seconds())))
        entry = self.entry(resources.get("InstanceType", ""), resources.get("InstanceCount", 0), longest)
        entry |= {"at": max(job["CreationTime"], first).timestamp(), "seen": True}
        if resources.get("TrainingPlanArn"):
            entry["usd_per_hour"] = PREPAID
        if job["TrainingJobStatus"] in ENDED:
            uses = uses_of(job, self._now)
            share = uses[0].share(first, following) if uses else 1
            billed = job.get("BillableTimeInSeconds", 0)
            entry["held"] = round(share * job.get("TrainingTimeInSeconds", billed))
            entry["billed"] = round(share * (billed + _kept_warm(job)))
            entry |= {} if is_settled(job) else {"warm": True}
        return entry


def _kept_warm(job: Mapping[str, Any]) -> int:
    """Seconds for which an ended job's machines were kept, or, where that isn't over, will be at the longest."""
    pool = job.get("WarmPoolStatus") or {}
    if pool.get("Status") in OVER:
        return int(pool.get("ResourceRetainedBillableTimeInSeconds", 0))
    return int(job["ResourceConfig"].get("KeepAlivePeriodInSeconds") or 0) if pool else 0


def described(sagemaker: Any, name: str) -> dict[str, Any] | None:
    """DescribeTrainingJob's answer; None where there is no such job."""
    try:
        return dict(sagemaker.describe_training_job(TrainingJobName=name))
    except sagemaker.exceptions.ClientError as error:
        # SageMaker answers ValidationException for an unknown job; the only argument, its name, is well-formed.
        if error.response["Error"]["Code"] in ("ResourceNotFound", "ValidationException"):
            return None
        raise
