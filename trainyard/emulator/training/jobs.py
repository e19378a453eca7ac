"""All training jobs: creation with its refusals, quotas, reclaim plans, shut-down."""

import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moto.sagemaker.exceptions import (
    AWSValidationException,
    ResourceInUseException,
    SagemakerClientError,
)

from trainyard.emulator.authorization.principals import Principals
from trainyard.emulator.info import EmulatorInfo
from trainyard.emulator.processes import kill_all
from trainyard.emulator.training.attempt import ReclaimTrigger
from trainyard.emulator.training.job import FINAL, JobSite, TrainingJob
from trainyard.emulator.training.rights import JobRights
from trainyard.emulator.training.validation import instance_count, instance_type, validate
from trainyard.errors import InputError

_DEFAULT_QUOTA = 64
"""Instances of one type that jobs may hold together, where no quota was set."""


class ResourceLimitExceeded(SagemakerClientError):  # type: ignore[misc]  # moto's classes are untyped here
    """SageMaker's error code for a full quota."""

    code = "ResourceLimitExceeded"


class TrainingJobs:
    """The account's training jobs."""

    def __init__(self, info: EmulatorInfo, root: Path, principals: Principals, *, argv: list[str] | None) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        default = [sys.executable, "-m", "trainer.entrypoint"]
        self._rights = JobRights(info, principals)
        self._site = JobSite(
            info,
            principals,
            root,
            argv or default,
            self._take_plan,
            self._take_refusal,
            self._rights.denial,
            self._tell,
        )
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._info = info
        self._lock = threading.Lock()
        self._jobs: dict[str, TrainingJob] = {}
        self._quota: dict[str, int] = {}
        self._plans: list[tuple[str, ReclaimTrigger]] = []
        self._refusals: list[tuple[str, str]] = []

    # ---- SageMaker's API ----------------------------------------------------------------------------------

    def create(self, request: dict[str, Any]) -> TrainingJob:
        """CreateTrainingJob, with what SageMaker refuses at once."""
        validate(request)
        name = request["TrainingJobName"]
        arn = f"arn:aws:sagemaker:{self._info.region}:{self._info.account}:training-job/{name.lower()}"
        role = self._site.principals.role(request["RoleArn"])
        if role is None or not self._site.principals.trusts_service(role, "sagemaker.amazonaws.com", arn):
            raise AWSValidationException(
                f"Could not assume role {request['RoleArn']}. Please ensure that the role exists and allows principal "
                "'sagemaker.amazonaws.com' to assume the role."
            )
        self._rights.require_network(request)
        with self._lock:
            if name.lower() in {other.lower() for other in self._jobs}:
                raise ResourceInUseException(
                    "Training job names must be unique within an AWS account and region, "
                    "and a training job with this name already exists."
                )
            self._require_quota(instance_type(request), instance_count(request))
            job = TrainingJob(request, arn, self._site)
            self._jobs[name] = job
        job.start()
        return job

    def _require_quota(self, kind: str, count: int) -> None:
        used = sum(
            instance_count(job.request)
            for job in self._jobs.values()
            if job.status not in FINAL and instance_type(job.request) == kind
        )
        limit = self.quota_of(kind)
        if used + count > limit:
            raise ResourceLimitExceeded(
                f"The account-level service limit '{kind} for training job usage' is {limit} Instances, "
                f"with current utilization of {used} Instances and a request delta of {count} Instances. "
                "Please use AWS Service Quotas to request an increase for this quota."
            )

    def quota_of(self, kind: str) -> int:
        """Instances of a type that jobs may hold together."""
        return self._quota.get(kind, _DEFAULT_QUOTA)

    def get(self, name: str) -> TrainingJob:
        """The job of that name; where there is none, SageMaker calls that an invalid request."""
        job = self._jobs.get(name)
        if job is None:
            raise AWSValidationException("Requested resource not found.")
        return job

    def all(self) -> list[TrainingJob]:
        """Every job, newest first."""
        return sorted(self._jobs.values(), key=lambda job: job.created, reverse=True)

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Have `listener` told of every new status of a job, with DescribeTrainingJob's answer; it must not wait."""
        self._listeners.append(listener)

    def _tell(self, description: dict[str, Any]) -> None:
        for listener in self._listeners:
            try:
                listener(description)
            except Exception as error:
                # The job goes on, and so do the others who listen.
                name = description.get("TrainingJobName")
                print(f"{name}: an event was lost: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    # ---- the emulator's own controls ----------------------------------------------------------------------

    def any_running(self) -> bool:
        """Whether a job keeps the daemon busy."""
        return any(job.status not in FINAL for job in list(self._jobs.values()))

    def plan_reclaim(self, name_prefix: str, pattern: str, *, notice: bool) -> dict[str, Any]:
        """Reclaim the next spot job whose name begins so, when its first host logs a line that matches `pattern`.

        A plan that waits for the same prefix is replaced: whoever made it may be gone without its job.
        """
        return self._plan(name_prefix, ReclaimTrigger(_compiled(pattern), notice))

    def plan_failure(self, name_prefix: str, reason: str, pattern: str) -> dict[str, Any]:
        """Fail the next job whose name begins so, with SageMaker's own `reason`: before it has machines, or, with
        `pattern`, when its first host logs a line that matches; then all its processes are killed."""
        if pattern:
            return self._plan(name_prefix, ReclaimTrigger(_compiled(pattern), notice=False, failure=reason))
        with self._lock:
            self._refusals.append((name_prefix, reason))
            return {"planned": len(self._refusals)}

    def _plan(self, name_prefix: str, trigger: ReclaimTrigger) -> dict[str, Any]:
        with self._lock:
            self._plans = [plan for plan in self._plans if plan[0] != name_prefix]
            self._plans.append((name_prefix, trigger))
            return {"planned": len(self._plans)}

    def _take_plan(self, name: str, is_spot: bool) -> ReclaimTrigger | None:
        """The first plan that fits an attempt about to start; it is good for one. On demand nothing is reclaimed."""
        with self._lock:
            for index, (prefix, trigger) in enumerate(self._plans):
                if name.startswith(prefix) and (is_spot or trigger.failure):
                    del self._plans[index]
                    return trigger
        return None

    def _take_refusal(self, name: str) -> str:
        """The first planned refusal of a job of that name; it is good for one."""
        with self._lock:
            for index, (prefix, reason) in enumerate(self._refusals):
                if name.startswith(prefix):
                    del self._refusals[index]
                    return reason
        return ""

    def reclaim(self, name: str, *, notice: bool) -> dict[str, Any]:
        """Reclaim a running spot job now."""
        job = self._jobs.get(name)
        if job is None:
            raise InputError(f"no training job {name}")
        if not job.spot:
            raise InputError(f"training job {name} runs on demand; only managed spot capacity is reclaimed")
        if not job.reclaim(notice=notice):
            raise InputError(f"training job {name} is {job.secondary_status}; only a job in Training can be reclaimed")
        return {"reclaimed": name, "notice": notice}

    def set_quota(self, limits: dict[str, Any]) -> dict[str, Any]:
        """Instances per type that jobs may hold together: {"ml.p5.4xlarge": 2}."""
        wrong = [
            kind for kind, count in limits.items() if not isinstance(count, int) or isinstance(count, bool) or count < 0
        ]
        if wrong or not limits:
            raise InputError('the body must be {"INSTANCE TYPE": COUNT, ...} with whole counts from 0')
        with self._lock:
            self._quota.update(limits)
            return {"quota": dict(self._quota)}

    def describe(self, name: str) -> dict[str, Any] | None:
        """A job's attempts, pids and ports, for GET jobs/NAME."""
        job = self._jobs.get(name)
        if job is None:
            return None
        return {
            "name": name,
            "status": job.status,
            "secondary_status": job.secondary_status,
            "failure_reason": job.failure_reason,
            "log_error": job.log_error,
            "transitions": job.transitions,
            "attempts": [attempt.describe() for attempt in job.attempts],
        }

    def shut_down(self) -> None:
        """Kill every process of every job."""
        pids = [
            pid
            for job in list(self._jobs.values())
            for attempt in job.attempts[-1:]
            if attempt.outcome is None
            for pid in attempt.pids.values()
        ]
        kill_all(self._site.root, pids)
        shutil.rmtree(self._site.root, ignore_errors=True)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"after_log_pattern {pattern!r} is not a regular expression: {error}") from None
