"""The roles of single jobs: the broker makes one as it submits the job, and removes it when the job is over.

Over means that nothing starts it again: what SageMaker or a queue has stopped for others, or tries again, isn't, and
what has failed isn't for an hour, in which the resumer has its turn. A job that is resumed later gets its role again,
with its next submission. What a role is for stands in its tags, which only the broker can write: a record in S3 the
tenant can.
"""

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainyard.functions.broker_ledger import UNSEEN_SECONDS
from trainyard.functions.broker_queue import known_job
from trainyard.functions.broker_rules import Refused
from trainyard.functions.job_meter import described
from trainyard.functions.job_roles import (
    MAX_POLICY_CHARACTERS,
    job_role_path,
    job_role_policies,
    job_role_trust,
)

POLICY = "own"
"""Name of a role's one inline policy."""
GRACE_SECONDS = 3600
"""How long the role of a failed job stays."""
SETTLE_SECONDS = 15.0
"""How long AWS may take until a new role is seen everywhere (IAM user guide, "Changes that I make are not always
immediately visible"). Batch starts a job by itself, and a role that SageMaker can't see yet would fail it for good."""
MAX_ROLES = 200
"""Roles of one tenant's jobs at a time. An account has 1,000 roles by default, which all its tenants share."""
TRIES = 10
TRY_SECONDS = 5.0

JOB_ID, ATTEMPT, QUEUE, MADE_AT = (f"trainyard:{name}" for name in ("job-id", "attempt", "queue", "submitted-at"))


class JobRoles:
    """The roles of a tenant's jobs. `clock`: seconds since the epoch."""

    def __init__(self, iam: Any, contract: Mapping[str, Any], *, clock: Callable[[], float] = time.time) -> None:
        self._iam, self._contract, self._clock = iam, contract, clock
        self._path = job_role_path(contract)

    def make(self, job_id: str, job: Mapping[str, Any], queue: str = "") -> None:
        """The role of a checked job, new or as it was left, with the rights of the attempt that is submitted now.

        `queue`: ARN of the training queue that starts it; then it can be used on return. Refused where a policy can't
        name what the job reads, or the tenant has `MAX_ROLES` already.
        """
        policy = self._policy(job_id, job)
        held = set(self._names())
        if job_id not in held and len(held) >= MAX_ROLES:
            raise Refused(
                f"job {job_id}: {len(held)} jobs of tenant {self._contract['tenant']} wait, run or ended within the "
                f"hour, each with a role of its own, and {MAX_ROLES} may; wait until some are over, or stop some "
                "(trainyard stop)"
            )
        stamp = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC).isoformat(timespec="seconds")
        tags = {
            "trainyard:environment": self._contract["environment"],
            "trainyard:tenant": self._contract["tenant"],
            JOB_ID: job_id,
            ATTEMPT: job["name"],
            QUEUE: queue,
            MADE_AT: stamp,
        }
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        try:
            self._iam.create_role(
                Path=self._path,
                RoleName=job_id,
                AssumeRolePolicyDocument=json.dumps(job_role_trust(self._contract)),
                PermissionsBoundary=self._contract["job_boundary"],
                Description=f"Training job {job_id}",
                Tags=listed,
            )
            is_new = True
        except self._iam.exceptions.EntityAlreadyExistsException:
            self._iam.tag_role(RoleName=job_id, Tags=listed)
            is_new = False
        self._iam.put_role_policy(RoleName=job_id, PolicyName=POLICY, PolicyDocument=policy)
        if is_new and queue and not self._contract["emulated"]:
            time.sleep(SETTLE_SECONDS)

    def _policy(self, job_id: str, job: Mapping[str, Any]) -> str:
        try:
            document = job_role_policies(self._contract, job_id, inputs_of(job), attempt=job["name"])
        except ValueError as error:
            raise Refused(f"job {job_id}: {error}; a job with a role of its own reads what the role can name") from None
        text = json.dumps(document, separators=(",", ":"))
        if len(text) > MAX_POLICY_CHARACTERS:
            raise Refused(
                f"job {job_id}: its role's policy would have {len(text):,} characters, and IAM takes "
                f"{MAX_POLICY_CHARACTERS:,}: put its inputs under fewer folders"
            )
        return text

    def sweep(self, sagemaker: Any, batch: Any, only: str = "") -> tuple[list[str], list[str]]:
        """Remove the roles of jobs that are over. (their ids, a line for each that couldn't be looked at or removed)

        `only`: the one job that is looked at; each look at a role is a call of IAM, which the account shares.
        """
        removed, failed = [], []
        for job_id in [only] if only else self._names():
            try:
                # Asked twice: a role that was given to a new attempt meanwhile stays.
                is_over = self._is_over(job_id, sagemaker, batch) and self._is_over(job_id, sagemaker, batch)
                if is_over and self._remove(job_id):
                    removed.append(job_id)
            except Exception as error:  # whatever it was, the next one must be looked at
                failed.append(f"{job_id}: {type(error).__name__}: {' '.join(str(error).split())}")
        return removed, failed

    def _names(self) -> Iterator[str]:
        for page in self._iam.get_paginator("list_roles").paginate(PathPrefix=self._path):
            yield from (role["RoleName"] for role in page["Roles"])

    def _is_over(self, job_id: str, sagemaker: Any, batch: Any) -> bool:
        try:
            answer = self._iam.list_role_tags(RoleName=job_id)
        except self._iam.exceptions.NoSuchEntityException:
            return False  # another sweep removed it
        tags = {item["Key"]: item["Value"] for item in answer["Tags"]}
        ended = _ended_at(tags, sagemaker, batch)
        made = datetime.datetime.fromisoformat(tags[MADE_AT]).timestamp()
        # What nobody has seen yet may be on its way; what nobody knows any more ended long ago.
        return self._clock() > (made + UNSEEN_SECONDS if ended is None else ended)

    def _remove(self, job_id: str) -> bool:
        """False where somebody else has."""
        missing = self._iam.exceptions.NoSuchEntityException
        with contextlib.suppress(missing):  # it never got its policy, or a sweep before this one ended here
            self._iam.delete_role_policy(RoleName=job_id, PolicyName=POLICY)
        try:
            self._iam.delete_role(RoleName=job_id)
        except missing:
            return False
        return True


def _ended_at(tags: Mapping[str, str], sagemaker: Any, batch: Any) -> float | None:
    """From when on, in seconds since the epoch, the job that a role's tags name is over; infinity while it isn't, None
    where nobody knows it."""
    name, queue = tags[ATTEMPT], tags.get(QUEUE)
    job = known_job(batch, queue, name) if queue else described(sagemaker, name)
    if job is None:
        return None
    status = job.get("status") if queue else job["TrainingJobStatus"]
    if status in ("SUCCEEDED", "Completed", "Stopped") or (status == "FAILED" and job.get("isTerminated")):
        return 0.0
    if status not in ("FAILED", "Failed"):
        return float("inf")
    ended = job.get("stoppedAt", 0) / 1000 if queue else job["LastModifiedTime"].timestamp()
    return float(ended) + GRACE_SECONDS


def inputs_of(job: Mapping[str, Any]) -> list[str]:
    """What a checked job reads from S3 beside its own files: its channels, and what it streams."""
    found = [channel["location"] for channel in job["channels"] if channel["kind"] == "s3"]
    data = job["spec"].get("data")
    if isinstance(data, dict) and data.get("streaming"):
        sources = [*(data.get("train") or []), *(data.get("validation") or [])]
        found += [str(source["path"]) for source in sources if str(source["path"]).startswith("s3://")]
    return found


def once_seen(
    call: Callable[[], Any], error_type: type[Exception], sleep: Callable[[float], None] = time.sleep
) -> None:
    """`call`, CreateTrainingJob with a role that may be new, again while SageMaker doesn't see the role yet."""
    for number in range(TRIES):
        try:
            call()
            return
        except error_type as error:
            told = getattr(error, "response", {}).get("Error", {})
            unseen = told.get("Code") == "ValidationException" and "assume role" in told.get("Message", "").lower()
            if not unseen or number == TRIES - 1:
                raise
        sleep(TRY_SECONDS)
