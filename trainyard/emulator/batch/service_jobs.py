"""Jobs in training queues: each waits for its turn, runs as training jobs, is stopped for others and retried."""

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moto.batch.exceptions import ClientException
from moto.sagemaker.exceptions import SagemakerClientError
from moto.sagemaker.models import sagemaker_backends

from trainyard.emulator.batch.scheduler import Held, Share, Turn, Wanted, turn
from trainyard.emulator.info import EmulatorInfo
from trainyard.emulator.training.job import FINAL
from trainyard.emulator.training.jobs import ResourceLimitExceeded, TrainingJobs
from trainyard.spec.shares import BATCH_PREFIX

_FROM_SAGEMAKER = "Received status from SageMaker: "
PREEMPTED = "Cross-share preemption triggered to reclaim borrowed capacity"
NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Unable to provision requested compute resources"
_NAME_LENGTH = 23
"""Of the name that was asked for: SageMaker's 63 characters, less AWSBatch and 32. That Batch cuts a longer one is a
guess, and nothing here asks for one."""
_RETRY_SECONDS = 1.0
_STATUS = {"Starting": "SCHEDULED", "Downloading": "STARTING"}
"""Batch's word for a training job's secondary status; RUNNING for the others (Batch user guide, "Mapping ...")."""
ENDED = frozenset({"SUCCEEDED", "FAILED"})


def milliseconds() -> int:
    """Now, as Batch counts."""
    return int(time.time() * 1000)


@dataclass
class ServiceJob:
    """One job of a queue."""

    request: Mapping[str, Any]
    arn: str
    job_id: str
    queue: str
    order: int
    payload: dict[str, Any]
    status: str = "RUNNABLE"
    reason: str = ""
    created: int = field(default_factory=milliseconds)
    started: int = 0
    stopped: int = 0
    training_job: str = ""
    """Of the start that runs now; empty while it waits."""
    start_order: int = 0
    attempts: list[dict[str, Any]] = field(default_factory=list)
    preempted: list[dict[str, Any]] = field(default_factory=list)
    latest: str = ""
    """ARN of the training job that was started last."""
    stopping: bool = False
    """Told to make room."""
    terminated: str | None = None
    """Why somebody ended it; None: nobody did."""

    @property
    def share(self) -> str:
        """The quota share's name."""
        return str(self.request.get("quotaShareName") or "")

    @property
    def kind(self) -> str:
        """The instance type."""
        return str(self.payload["ResourceConfig"]["InstanceType"])

    @property
    def count(self) -> int:
        """Instances that it holds while it runs."""
        return int(self.payload["ResourceConfig"].get("InstanceCount", 1))

    def summary(self) -> dict[str, Any]:
        """One row of ListServiceJobs."""
        row: dict[str, Any] = {
            "jobArn": self.arn,
            "jobId": self.job_id,
            "jobName": self.request["jobName"],
            "serviceJobType": "SAGEMAKER_TRAINING",
            "createdAt": self.created,
            "status": self.status,
            "capacityUsage": [{"capacityUnit": self.kind, "quantity": float(self.count)}],
        }
        for name, value in (
            ("statusReason", self.reason),
            ("quotaShareName", self.share),
            ("startedAt", self.started),
            ("stoppedAt", self.stopped),
            ("latestAttempt", {"serviceResourceId": _resource(self.latest)} if self.latest else None),
            ("isTerminated", self.terminated is not None),
        ):
            if value:
                row[name] = value
        return row

    def description(self) -> dict[str, Any]:
        """DescribeServiceJob's answer."""
        content = self.summary() | {
            "jobQueue": self.queue,
            "attempts": self.attempts,
            "startedAt": self.started,
            "retryStrategy": self.request.get("retryStrategy") or {"attempts": 1},
            "serviceRequestPayload": self.request["serviceRequestPayload"],
            "tags": dict(self.request.get("tags") or {}),
        }
        if self.preempted:
            recent = self.preempted[-10:]
            content["preemptionSummary"] = {
                "preemptedAttemptCount": len(self.preempted),
                "recentPreemptedAttempts": recent,
            }
        return content


def _resource(arn: str) -> dict[str, str]:
    return {"name": "TrainingJobArn", "value": arn}


@dataclass
class QuotaShare:
    """A share as its API keeps it."""

    arn: str
    name: str
    queue: str
    content: dict[str, Any]

    def of(self, kind: str) -> Share | None:
        """Its part of one instance type; None where it has none."""
        limits = {item["capacityUnit"]: int(item["maxCapacity"]) for item in self.content["capacityLimits"]}
        if kind not in limits:
            return None
        sharing = self.content["resourceSharingConfiguration"]
        borrows = sharing["strategy"] == "LEND_AND_BORROW"
        percent = int(sharing.get("borrowLimit", -1)) if borrows else 0
        return Share(limits[kind], percent, lends=sharing["strategy"] != "RESERVE")


class ServiceJobs:
    """All jobs of all queues, and the one thread that moves them on."""

    def __init__(
        self, info: EmulatorInfo, training: TrainingJobs, capacity: Callable[[str], Mapping[str, int]]
    ) -> None:
        """`capacity`: of a queue by its ARN, instances by type, as they are now; of a type that isn't there nothing new
        starts, and nothing is stopped."""
        self._info, self._training, self._capacity_of = info, training, capacity
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self.jobs: dict[str, ServiceJob] = {}
        self.shares: dict[str, QuotaShare] = {}
        self._tokens: dict[str, str] = {}
        self._orders = 0
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        training.listen(self._heard)
        threading.Thread(target=self._work, daemon=True, name="batch").start()

    # ---- what the API does ---------------------------------------------------------------------------------

    def submit(self, request: Mapping[str, Any], queue: str) -> ServiceJob:
        """SubmitServiceJob into a quota-managed queue. As on AWS, the payload isn't looked at but for what it holds."""
        token = str(request.get("clientToken") or "")
        try:
            payload = json.loads(request["serviceRequestPayload"])
            assert payload["ResourceConfig"]["InstanceType"]
        except (ValueError, KeyError, TypeError, AssertionError):
            raise ClientException("serviceRequestPayload is no CreateTrainingJob request") from None
        with self._lock:
            share = self.shares.get(f"{queue}/quota-share/{request.get('quotaShareName')}")
            if share is None or share.content.get("state") == "DISABLED":
                raise ClientException(f"Quota share {request.get('quotaShareName')} does not accept jobs in {queue}")
            # AWS's reference: requests with identical payloads and tokens are the same request.
            known = self.jobs.get(self._tokens.get(token, ""))
            if token and known is not None and known.request == request:
                return known
            job_id = str(uuid.uuid4())
            arn = f"arn:aws:batch:{self._info.region}:{self._info.account}:service-job/{job_id}"
            self._orders += 1
            job = ServiceJob(request, arn, job_id, queue, self._orders, payload)
            self.jobs[job_id] = job
            if token:
                self._tokens[token] = job_id
        self._changed.set()
        return job

    def get(self, given: str) -> ServiceJob:
        """By id or ARN."""
        job = self.jobs.get(given.rpartition("/")[2])
        if job is None:
            raise ClientException(f"Service job {given} does not exist")
        return self._seen(job)

    def all(self) -> list[ServiceJob]:
        """Every job of every queue, oldest first."""
        return [self._seen(job) for job in list(self.jobs.values())]

    def _seen(self, job: ServiceJob) -> ServiceJob:
        """The job with the state that its training job is in now: of its steps on the way nobody is told."""
        with self._lock:
            if job.training_job and (training := self._training.get(job.training_job)).status not in FINAL:
                job.status = _STATUS.get(training.secondary_status, "RUNNING")
            return job

    def terminate(self, given: str, reason: str) -> None:
        """TerminateServiceJob: out of the queue, or its training job stopped."""
        job = self.get(given)
        with self._lock:
            if job.status in ENDED:
                return
            job.terminated = reason
            # Taken here: the thread that looks after the queue empties it when the training job has ended.
            name = job.training_job
            if not name:
                self._end(job, "FAILED", reason)
                return
        self._training.get(name).stop()
        self._changed.set()

    def tags(self, job_id: str) -> dict[str, str]:
        """Of a job; empty where there is none."""
        job = self.jobs.get(job_id.rpartition("/")[2])
        return dict(job.request.get("tags") or {}) if job else {}

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Have `listener` told of every job that ends, with DescribeServiceJob's answer; it must not wait."""
        self._listeners.append(listener)

    def shares_changed(self) -> None:
        """Look again at whose turn it is: by other shares, or another capacity."""
        self._changed.set()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _heard(self, description: Mapping[str, Any]) -> None:
        self._changed.set()

    def _work(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                self._look()
            except Exception as error:
                # A thread that ended would leave every queue waiting.
                print(f"training queues: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _look(self) -> None:
        with self._lock:
            for job in list(self.jobs.values()):
                if job.training_job:
                    self._follow(job)
            wanted = dict.fromkeys((job.queue, job.kind) for job in self.jobs.values() if job.status not in ENDED)
            turns = [self._turn(queue, kind) for queue, kind in wanted]
        for item in turns:
            for job_id in item.preempt:
                self._preempt(self.jobs[job_id])
            for job_id in item.start:
                self._start(self.jobs[job_id])

    def _turn(self, queue: str, kind: str) -> Turn:
        capacity = self._capacity_of(queue).get(kind)
        if capacity is None:
            return Turn()
        shares = {item.name: share for item in self.shares.values() if item.queue == queue and (share := item.of(kind))}
        mine = [
            job for job in self.jobs.values() if job.queue == queue and job.kind == kind and job.status not in ENDED
        ]
        held = [
            Held(job.job_id, job.share, job.count, job.start_order, job.stopping) for job in mine if job.training_job
        ]
        waiting = [
            Wanted(job.job_id, job.share, job.count)
            for job in sorted(mine, key=lambda job: job.order)
            if not job.training_job
        ]
        return turn(capacity, shares, held, waiting)

    def _start(self, job: ServiceJob) -> None:
        with self._lock:
            if job.terminated is not None or job.training_job:
                return
            name = f"{BATCH_PREFIX}{str(job.payload.get('TrainingJobName'))[:_NAME_LENGTH]}{uuid.uuid4().hex}"
            try:
                made = self._training.create({**job.payload, "TrainingJobName": name})
            except ResourceLimitExceeded as error:
                # The account's quota is taken by jobs that came by another way: asked again later.
                job.reason = f"{_FROM_SAGEMAKER}{error.message}"
                self._later()
                return
            except SagemakerClientError as error:
                self._end(job, "FAILED", f"{_FROM_SAGEMAKER}{error.code}: {error.message}")
                return
            except Exception as error:  # what nobody foresaw must not leave it waiting, and look at it for ever
                self._end(job, "FAILED", f"{_FROM_SAGEMAKER}ValidationException: {type(error).__name__}: {error}")
                return
            # moto's own tag operations look the resource up here.
            sagemaker_backends[self._info.account][self._info.region].training_jobs[name] = made
            self._orders += 1
            job.training_job, job.latest, job.start_order = name, made.arn, self._orders
            job.status, job.reason, job.stopping = "SCHEDULED", "", False
            job.started = job.started or milliseconds()
        self._changed.set()

    def _preempt(self, job: ServiceJob) -> None:
        with self._lock:
            if job.stopping or not job.training_job:
                return
            job.stopping, job.reason = True, f"PREEMPTION_IN_PROGRESS: {PREEMPTED}"
        self._training.get(job.training_job).stop()

    def _follow(self, job: ServiceJob) -> None:
        training = self._training.get(job.training_job)
        if training.status not in FINAL:
            return
        attempt = {"serviceResourceId": _resource(training.arn), "startedAt": job.started, "stoppedAt": milliseconds()}
        stopping, job.stopping, job.training_job = job.stopping, False, ""
        told = training.failure_reason or f"Training job {training.status.lower()}"
        reason = f"{_FROM_SAGEMAKER}{told}"
        if training.status == "Completed":
            job.attempts.append({**attempt, "statusReason": reason})
            self._end(job, "SUCCEEDED", reason)
        elif job.terminated is not None:
            job.attempts.append({**attempt, "statusReason": reason})
            self._end(job, "FAILED", job.terminated)
        elif stopping:
            job.preempted.append({**attempt, "statusReason": PREEMPTED})
            job.status, job.reason = "RUNNABLE", PREEMPTED
        elif told.startswith("CapacityError"):
            job.status, job.reason = "RUNNABLE", NO_CAPACITY
            self._later()
        else:
            job.attempts.append({**attempt, "statusReason": reason})
            if may_retry(job.request.get("retryStrategy") or {}, len(job.attempts), reason):
                job.status, job.reason = "RUNNABLE", reason
            else:
                self._end(job, "FAILED", reason)

    def _end(self, job: ServiceJob, status: str, reason: str) -> None:
        job.status, job.reason, job.stopped = status, reason, milliseconds()
        self._changed.set()
        for listener in self._listeners:
            listener(job.description())

    def _later(self) -> None:
        timer = threading.Timer(_RETRY_SECONDS, self._changed.set)
        timer.daemon = True
        timer.start()


def may_retry(strategy: Mapping[str, Any], attempts: int, reason: str) -> bool:
    """Whether a job that ended so is started again: within its attempts, by the first rule whose pattern fits, and
    where none does (Batch user guide, "Service job retry strategies")."""
    if attempts >= int(strategy.get("attempts", 1)):
        return False
    for rule in strategy.get("evaluateOnExit") or []:
        pattern = str(rule.get("onStatusReason", "*"))
        if reason.startswith(pattern[:-1]) if pattern.endswith("*") else reason == pattern:
            return str(rule.get("action", "")).upper() == "RETRY"
    return True
