"""Names and places of a job: its id, its attempts' training job names, its S3 prefixes."""

import re
import secrets
from datetime import UTC, datetime

from trainyard.errors import InputError
from trainyard.functions.training_request import output_path, spec_prefix

__all__ = [
    "attempt_name",
    "checkpoint_destination",
    "is_of_job",
    "job_id_of",
    "new_job_id",
    "output_path",
    "record_key",
    "spec_prefix",
]

MAX_TRAINING_JOB_NAME = 63
"""SageMaker's limit (CreateTrainingJob, TrainingJobName)."""
_RESUME_SUFFIX_LENGTH = len("-r99")
_STAMP = "%Y%m%d%H%M%S"
_JOB_ID = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
_ATTEMPT_SUFFIX = re.compile(r"-r\d+$")


def new_job_id(owner: str, name: str, *, now: datetime | None = None, suffix: str | None = None) -> str:
    """`<owner>-<name>-<UTC yyyymmddHHMMSS>-<4 hex>`; `name` is cut so that a resume's `-rN` still fits in 63.

    The tenant comes first because its roles' policies scope `training-job/<tenant>-*`.
    """
    stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime(_STAMP)
    tail = f"-{stamp}-{suffix or secrets.token_hex(2)}"
    return f"{_beginning(owner, name)}{tail}"


def is_of_job(job_id: str, owner: str, name: str) -> bool:
    """Whether an id may be that of a job so called: long names are cut in it, so that its record has the last word."""
    return bool(re.fullmatch(rf"{re.escape(_beginning(owner, name))}-\d{{14}}-[0-9a-f]{{4}}", job_id))


def _beginning(owner: str, name: str) -> str:
    room = MAX_TRAINING_JOB_NAME - _RESUME_SUFFIX_LENGTH - len("-20260131120000-1a2b") - len(owner) - 1
    assert room >= 1
    return f"{owner}-{name[:room].rstrip('-')}"


def attempt_name(job_id: str, number: int) -> str:
    """The training job name of an attempt: the job id itself, then `<job id>-r2`, `-r3`, ... for resumes."""
    return job_id if number == 1 else f"{job_id}-r{number}"


def job_id_of(text: str) -> str:
    """The job id in what a person typed (an attempt's name will do); InputError where it can't be one."""
    if not _JOB_ID.match(text):
        raise InputError(
            f"job id {text!r}: must look like acme-tiny-20260131120000-1a2b (lower-case letters, digits, dashes); "
            "`trainyard jobs` lists them"
        )
    return _ATTEMPT_SUFFIX.sub("", text)


def record_key(job_id: str) -> str:
    """Where the job's record lies in the tenant's data bucket."""
    return f"jobs/{job_id}/record.json"


def checkpoint_destination(checkpoints_bucket: str, job_id: str) -> str:
    """Where the job's checkpoints and metrics go, the same for all its attempts: that is what makes a resume one."""
    return f"s3://{checkpoints_bucket}/jobs/{job_id}/"
