"""What a tenant's jobs hold, and what of a month's money they take: a small object in S3 that the broker alone writes.

It is a cache and a lock, not the truth: SageMaker's own descriptions are, which no role of a tenant's can delete, and
from which it is made anew where it is lost. Every write is conditional, so that of two submissions at the same moment
the second sees the first's instances and money.
"""

import datetime
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainyard.functions.job_meter import (
    ENDED,
    LONGEST_DAYS,
    OVER,
    described,
    interrupted_seconds,
    interruptions,
    is_settled,
    month_of,
    uses_of,
)

TRIES = 6
RUNS = ("InProgress", "Stopping")
PREPAID = 0.0
"""USD an hour on a training plan, which was paid when it was bought."""
BATCH = 50
"""Jobs that are looked at between two writes of the ledger: so many are looked at again where a call breaks off."""
PATIENCE_SECONDS = 60.0
"""How long one call looks at jobs: by so much less than it may take (stacks/constructs/broker.py) as a new role can
need until SageMaker sees it. A call that is ended before it submits leaves a promise without a job."""
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
        follows_spot: bool = False,
    ) -> None:
        """`follows_spot`: look at spot jobs again while they run, which counts where `when_spent` is `stop`."""
        self._s3, self._sagemaker, self._bucket, self._now = s3, sagemaker, bucket, now
        self._prices, self._gpus = prices, gpus
        self._until = time.monotonic() + PATIENCE_SECONDS
        self._spot_until, self._follows_spot = self._until - PATIENCE_SECONDS / 2, follows_spot
        self._contains = f"{tenant}-"
        self._prefixes: tuple[str, ...] = (self._contains,)
        self.month = f"{now:%Y-%m}"
        self._key = f"broker/ledger-{self.month}.json"

    def entry(self, kind: str, count: int, seconds: int) -> dict[str, Any]:
        """A job as the ledger holds it: `seconds` at its longest, `started` (epoch) once it has machines, with spot for
        how many seconds it was `interrupted` since and, without machines, when it `lost` them (so that an entry stays
        as it is until that changes), `billed` and `held` once it has ended."""
        rates = {"usd_per_hour": self._prices.get(kind), "gpus": self._gpus.get(kind, 0)}
        times = {"at": self.now_seconds, "started": None, "billed": None}
        return {"type": kind, "count": count, "seconds": seconds, **rates, **times}

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
            known = self._refresh(jobs, etag)
            if known is None:
                self._wait(number)
                continue
            standing = jobs.get(name)
            if standing is not None and any(standing.get(key) != entry.get(key) for key in SAME):
                raise BusyError(
                    f"job {name} is being submitted as {standing['count']} x {standing['type']} by another call; "
                    f"repeat the command, after {UNSEEN_SECONDS // 60} minutes at the latest"
                )
            others = {key: job for key, job in jobs.items() if key != name}
            check(others, self._holders(others))
            if self._write({**jobs, name: standing or entry}, known) is not None:
                return
            self._wait(number)
        raise BusyError("other jobs of the tenant are being submitted at this moment; repeat the command")

    def release(self, name: str, entry: dict[str, Any]) -> None:
        """Take a promise back whose job SageMaker refused; another call's stays. Best effort: it lapses by itself."""
        for _ in range(TRIES):
            jobs, etag = self._read()
            others = {key: job for key, job in jobs.items() if key != name}
            if jobs.get(name) != entry or self._write(others, etag) is not None:
                return

    def _wait(self, number: int) -> None:
        time.sleep(random.uniform(0.05, 0.3) * (number + 1))

    def _read(self) -> tuple[Jobs, str]:
        return self._load(self._key)

    def _load(self, key: str) -> tuple[Jobs, str]:
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=key)
        except self._s3.exceptions.NoSuchKey:
            return {}, ""
        return dict(json.load(answer["Body"])["jobs"]), answer["ETag"]

    def _write(self, jobs: Jobs, etag: str) -> str | None:
        """The version that was written over `etag` (empty: there is none yet); None where another call wrote since."""
        body = json.dumps({"version": 1, "month": self.month, "jobs": jobs}).encode()
        condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        try:
            return str(self._s3.put_object(Bucket=self._bucket, Key=self._key, Body=body, **condition)["ETag"])
        except self._s3.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                return None
            raise

    def _refresh(self, jobs: Jobs, etag: str) -> str | None:
        """Bring `jobs` up to date with AWS, and the ledger with them, whatever becomes of the promise: what was learnt
        of thousands must not be asked again. The ledger's version then; None where another call wrote it meanwhile.
        BusyError where there is more to look at than one call has time for."""
        has_news, known = False, etag
        for number, (name, entry) in enumerate(self._looks(jobs), 1):
            has_news |= jobs.get(name) != entry
            if entry is None:
                jobs.pop(name, None)
            else:
                jobs[name] = entry
            is_late = time.monotonic() > self._until
            if has_news and (is_late or number % BATCH == 0):
                written = self._write(jobs, known)
                if written is None:
                    return None
                has_news, known = False, written
            if is_late:
                raise BusyError(
                    "the tenant has more jobs that the broker's ledger lacks than one call can look at (this one: "
                    f"{number:,}); repeat the command, which goes on from there"
                )
        return self._write(jobs, known) if has_news else known

    def _looks(self, jobs: Jobs) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """What SageMaker says now of the jobs that it must be asked about, one after the other; None: strike it out."""
        alive = {name for status in RUNS for name in self._listed(StatusEquals=status)}
        for name in sorted({*self._of_the_month(), *alive, *jobs}):
            # Each job is described once as it runs: what was promised under its name may have been another's; and until
            # then, as it has no machines and no beginning. One that has ended is done with when its machines are kept
            # warm no more.
            known = jobs.get(name, {})
            has_ended = known.get("billed") is not None and not known.get("warm")
            if has_ended or (name in alive and known.get("started") is not None):
                continue
            found = self._describe(name)
            is_lapsed = name in jobs and self.now_seconds - jobs[name]["at"] > UNSEEN_SECONDS
            if found is not None or is_lapsed:
                yield name, found
        if self._follows_spot:
            yield from self._spot_again(jobs, alive)

    def _spot_again(self, jobs: Jobs, alive: set[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """What runs on spot may have lost its machines, or have others. Those that were without come first: they count
        nothing. As many as there is time for, others at each call; the rest counts as it was last seen."""
        spot = [name for name in alive if "interrupted" in jobs.get(name, {})]
        for name in sorted(spot, key=lambda name: ("lost" not in jobs[name], random.random())):
            if time.monotonic() > self._spot_until:
                return
            found = self._describe(name)
            if found is not None:
                yield name, found

    def _holders(self, jobs: Jobs) -> list[dict[str, Any]]:
        """What holds instances now."""
        return [{"name": name, **job} for name, job in jobs.items() if job["billed"] is None or job.get("warm")]

    def _of_the_month(self) -> dict[str, str]:
        """Names and states of the jobs that may have taken something of this month, those from before it with them."""
        first = month_of(self._now)[0]
        created = first - datetime.timedelta(days=LONGEST_DAYS)
        return self._listed(lambda job: job.get("TrainingEndTime", self._now) >= first, CreationTimeAfter=created)

    def _listed(self, takes: Callable[[dict[str, Any]], bool] = bool, **only: Any) -> dict[str, str]:
        pages = self._sagemaker.get_paginator("list_training_jobs").paginate(
            NameContains=self._contains, PaginationConfig={"PageSize": 100}, **only
        )
        listed = [job for page in pages for job in page["TrainingJobSummaries"] if takes(job)]
        states = {job["TrainingJobName"]: job["TrainingJobStatus"] for job in listed}
        return {name: state for name, state in states.items() if name.startswith(self._prefixes)}

    def _describe(self, name: str) -> dict[str, Any] | None:
        job = described(self._sagemaker, name)
        if job is None:
            return None
        first, following = month_of(self._now)
        started, resources = job.get("TrainingStartTime"), job.get("ResourceConfig") or {}
        longest = job["StoppingCondition"].get("MaxRuntimeInSeconds", 86_400)
        longest += resources.get("KeepAlivePeriodInSeconds") or 0
        if started and started < first:  # what it ran before the month is that month's
            ran = round((first - started).total_seconds()) - interrupted_seconds(job, started, first)
            longest = max(0, longest - ran)
        entry = self.entry(resources.get("InstanceType", ""), resources.get("InstanceCount", 0), longest)
        entry["at"] = max(job["CreationTime"], first).timestamp()
        entry["started"] = max(started, first).timestamp() if started else None
        if started and job.get("EnableManagedSpotTraining"):
            entry |= self._interrupted(job, max(started, first))
        if resources.get("TrainingPlanArn"):
            entry["usd_per_hour"] = PREPAID
        if job["TrainingJobStatus"] in ENDED:
            uses = uses_of(job, self._now)
            share = uses[0].share(first, following) if uses else 1
            billed = job.get("BillableTimeInSeconds", 0)
            warm = _kept_warm(job)
            entry["held"] = round(share * (job.get("TrainingTimeInSeconds", billed) + warm))
            entry["billed"] = round(share * (billed + warm))
            entry |= {} if is_settled(job) else {"warm": True}
        return entry

    def _interrupted(self, job: Mapping[str, Any], since: datetime.datetime) -> dict[str, Any]:
        spans = interruptions(job, since, self._now)
        if not spans or spans[-1][1] < self._now:
            return {"interrupted": interrupted_seconds(job, since, self._now)}
        lost = spans[-1][0]
        return {"interrupted": interrupted_seconds(job, since, lost), "lost": lost.timestamp()}


def _kept_warm(job: Mapping[str, Any]) -> int:
    """Seconds for which an ended job's machines were kept, or, where that isn't over, will be at the longest."""
    pool = job.get("WarmPoolStatus") or {}
    if pool.get("Status") in OVER:
        return int(pool.get("ResourceRetainedBillableTimeInSeconds", 0))
    return int((job.get("ResourceConfig") or {}).get("KeepAlivePeriodInSeconds") or 0) if pool else 0
