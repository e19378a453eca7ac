"""SageMaker's training-job operations in moto, answered by our jobs."""

import datetime
import json
from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.sagemaker.exceptions import AWSValidationException
from moto.sagemaker.responses import SageMakerResponse

from trainyard.emulator.training.job import TrainingJob
from trainyard.emulator.training.jobs import TrainingJobs

_SORT_KEYS = {"Name": lambda job: job.name, "CreationTime": lambda job: job.created, "Status": lambda job: job.status}
_MAX_RESULTS = 100


def install(jobs: TrainingJobs) -> None:
    """Put `jobs` in place of moto's training jobs, which are records that are Completed at once."""

    def create(self: Any) -> ActionResult:
        job = jobs.create(json.loads(self.body))
        # moto's own tag operations look the resource up here.
        self.sagemaker_backend.training_jobs[job.name] = job
        return ActionResult({"TrainingJobArn": job.arn})

    def describe(self: Any) -> ActionResult:
        return ActionResult(jobs.get(self._get_param("TrainingJobName")).response())

    def stop(self: Any) -> EmptyResult:
        job = jobs.get(self._get_param("TrainingJobName"))
        if job.status in ("Completed", "Failed", "Stopped"):
            raise AWSValidationException(
                f"The request was rejected because the training job is in status {job.status}."
            )
        job.stop()
        return EmptyResult()

    def list_jobs(self: Any) -> ActionResult:
        return ActionResult(_list(jobs, json.loads(self.body or "{}")))

    response: Any = SageMakerResponse
    response.create_training_job = create
    response.describe_training_job = describe
    response.stop_training_job = stop
    response.list_training_jobs = list_jobs


def _list(jobs: TrainingJobs, query: dict[str, Any]) -> dict[str, Any]:
    sort_by = query.get("SortBy", "CreationTime")
    if sort_by not in _SORT_KEYS:
        raise AWSValidationException(f"Value '{sort_by}' at 'sortBy' must be one of {', '.join(_SORT_KEYS)}")
    found = sorted(
        (job for job in jobs.all() if _matches(job, query)),
        key=_SORT_KEYS[sort_by],
        reverse=query.get("SortOrder", "Descending") == "Descending",
    )
    start, limit = int(query.get("NextToken") or 0), int(query.get("MaxResults") or 10)
    if not 1 <= limit <= _MAX_RESULTS:
        raise AWSValidationException(f"Value '{limit}' at 'maxResults' must be between 1 and {_MAX_RESULTS}")
    page: dict[str, Any] = {"TrainingJobSummaries": [job.summary() for job in found[start : start + limit]]}
    if start + limit < len(found):
        page["NextToken"] = str(start + limit)
    return page


def _matches(job: TrainingJob, query: dict[str, Any]) -> bool:
    if query.get("NameContains") and query["NameContains"] not in job.name:
        return False
    if query.get("StatusEquals") and query["StatusEquals"] != job.status:
        return False
    for key, moment in (("CreationTime", job.created), ("LastModifiedTime", job.modified)):
        after, before = query.get(f"{key}After"), query.get(f"{key}Before")
        if (after is not None and moment <= _moment(after)) or (before is not None and moment >= _moment(before)):
            return False
    return True


def _moment(value: Any) -> datetime.datetime:
    """A timestamp as the JSON protocol carries it: seconds since the epoch."""
    return datetime.datetime.fromtimestamp(float(value), datetime.UTC)
