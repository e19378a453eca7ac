"""AWS Batch's operations on quota shares and on jobs in training queues, which moto lacks."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from moto.batch import urls as batch_urls
from moto.batch.exceptions import ClientException
from moto.batch.models import SchedulingPolicy, batch_backends
from moto.batch.responses import BatchResponse

from trainyard.emulator import shapes
from trainyard.emulator.backends import service_environments
from trainyard.emulator.batch.service_jobs import QuotaShare, ServiceJobs
from trainyard.emulator.info import EmulatorInfo

_MAX_SHARES = 20
_MAX_LIMITS = 5
_PAGE = 100
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MAX_ATTEMPTS = 10
_MAX_PATTERN_CHARACTERS = 512
_MAX_PRIORITY = 9999
_STRATEGIES = ("RESERVE", "LEND", "LEND_AND_BORROW")


def install(jobs: ServiceJobs) -> None:
    """Put the operations into moto's Batch."""
    operations: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
        "createquotashare": lambda backend, request: _create_share(jobs, backend, request),
        "describequotashare": lambda backend, request: _describe_share(jobs, request),
        "updatequotashare": lambda backend, request: _update_share(jobs, request),
        "deletequotashare": lambda backend, request: _delete_share(jobs, request),
        "listquotashares": lambda backend, request: _list_shares(jobs, backend, request),
        "submitservicejob": lambda backend, request: _submit(jobs, backend, request),
        "describeservicejob": lambda backend, request: jobs.get(request["jobId"]).description(),
        "listservicejobs": lambda backend, request: _list(jobs, backend, request),
        "terminateservicejob": lambda backend, request: _terminate(jobs, request),
    }
    response: Any = BatchResponse
    for action, operation in operations.items():
        setattr(response, action, _answering(operation))
        batch_urls.url_paths[f"{{0}}/v1/{action}$"] = BatchResponse.dispatch
    _remember_quota_policies(response)
    _follow_capacity(jobs, response)


def _answering(operation: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Callable[[Any], str]:
    def answer(self: Any) -> str:
        return json.dumps(operation(self.batch_backend, json.loads(self.body or "{}")))

    return answer


def _follow_capacity(jobs: ServiceJobs, response: Any) -> None:
    """Whose turn it is changes with a service environment; a queue stays as long as its shares, which hold its jobs."""
    update, delete = response.updateserviceenvironment, response.deletejobqueue

    def update_environment(self: Any) -> str:
        answer = str(update(self))
        jobs.shares_changed()
        return answer

    def delete_queue(self: Any) -> str:
        queue = self.batch_backend.get_job_queue(self._get_param("jobQueue"))
        if queue is not None and queue.state != "DISABLED":
            raise ClientException(f"Job queue {queue.name} must be DISABLED before it is deleted")
        if queue is not None and any(share.queue == queue.arn for share in list(jobs.shares.values())):
            raise ClientException(f"Cannot delete, found existing quota shares of job queue {queue.name}")
        return str(delete(self))

    response.updateserviceenvironment, response.deletejobqueue = update_environment, delete_queue


def _remember_quota_policies(response: Any) -> None:
    """moto keeps fair shares alone of a scheduling policy."""
    create, described = response.createschedulingpolicy, SchedulingPolicy.to_dict

    def create_policy(self: Any) -> str:
        answer = str(create(self))
        policy = self.batch_backend._scheduling_policies[json.loads(answer)["arn"]]
        policy.quota_share_policy = json.loads(self.body).get("quotaSharePolicy")
        return answer

    def to_dict(self: Any, create: bool = False) -> dict[str, Any]:
        content: dict[str, Any] = described(self, create)
        quota = getattr(self, "quota_share_policy", None)
        if not create and quota:
            content.pop("fairsharePolicy", None)
            content["quotaSharePolicy"] = quota
        return content

    response.createschedulingpolicy, SchedulingPolicy.to_dict = create_policy, to_dict


def _queue(backend: Any, given: str) -> Any:
    queue = backend.get_job_queue(given)
    if queue is None or not hasattr(queue, "service_environment_order"):
        raise ClientException(f"Job queue {given} is no queue for service jobs")
    return queue


def _capacity(backend: Any, queue: Any) -> dict[str, int]:
    """Instances of a quota-managed queue, by type."""
    policy = backend._scheduling_policies.get(queue.schedule_policy)
    if not getattr(policy, "quota_share_policy", None):
        raise ClientException(f"Job queue {queue.name} has no quota share scheduling policy")
    (order,) = queue.service_environment_order
    environment = service_environments(backend).get(order["serviceEnvironment"])
    if environment["state"] != "ENABLED":
        return {}  # "to prevent new service jobs from being placed in" it (API reference, UpdateServiceEnvironment)
    return {item["capacityUnit"]: int(item["maxCapacity"]) for item in environment["capacityLimits"]}


def capacity_now(info: EmulatorInfo, queue_arn: str) -> Mapping[str, int]:
    """Instances of a quota-managed queue, by type; none where there is none to give, and so nobody's turn."""
    backend = batch_backends[info.account][info.region]
    try:
        return _capacity(backend, _queue(backend, queue_arn))
    except ClientException:  # it is gone, or no quota-managed one any more
        return {}


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    limits, sharing = content["capacityLimits"], content["resourceSharingConfiguration"]
    if not 1 <= len(limits) <= _MAX_LIMITS:
        raise ClientException(f"capacityLimits must have 1 to {_MAX_LIMITS} items")
    if sharing.get("strategy") not in _STRATEGIES:
        raise ClientException(f"strategy must be one of {', '.join(_STRATEGIES)}")
    if "borrowLimit" in sharing and sharing["strategy"] != "LEND_AND_BORROW":
        raise ClientException("borrowLimit can only be applied with a strategy of LEND_AND_BORROW")
    return content


def _create_share(jobs: ServiceJobs, backend: Any, request: dict[str, Any]) -> dict[str, Any]:
    queue, name = _queue(backend, request["jobQueue"]), request["quotaShareName"]
    _capacity(backend, queue)
    arn = f"{queue.arn}/quota-share/{name}"
    if arn in jobs.shares:
        raise ClientException(f"Quota share {name} already exists")
    if sum(share.queue == queue.arn for share in jobs.shares.values()) >= _MAX_SHARES:
        raise ClientException(f"Job queue {queue.name} has {_MAX_SHARES} quota shares already")
    names = ("capacityLimits", "resourceSharingConfiguration", "preemptionConfiguration")
    content = {"state": "ENABLED", **{key: request[key] for key in names}}
    content |= {key: request[key] for key in ("state", "tags") if key in request}
    jobs.shares[arn] = QuotaShare(arn, name, queue.arn, _checked(content))
    return {"quotaShareName": name, "quotaShareArn": arn}


def _share(jobs: ServiceJobs, request: dict[str, Any]) -> QuotaShare:
    share = jobs.shares.get(request["quotaShareArn"])
    if share is None:
        raise ClientException(f"Quota share {request['quotaShareArn']} does not exist")
    return share


def _described(share: QuotaShare) -> dict[str, Any]:
    named = {"quotaShareName": share.name, "quotaShareArn": share.arn, "jobQueueArn": share.queue, "status": "VALID"}
    return {**share.content, **named}


def _describe_share(jobs: ServiceJobs, request: dict[str, Any]) -> dict[str, Any]:
    return _described(_share(jobs, request))


def _update_share(jobs: ServiceJobs, request: dict[str, Any]) -> dict[str, Any]:
    share = _share(jobs, request)
    names = ("capacityLimits", "resourceSharingConfiguration", "preemptionConfiguration", "state")
    share.content = _checked({**share.content, **{key: request[key] for key in names if key in request}})
    jobs.shares_changed()
    return {"quotaShareName": share.name, "quotaShareArn": share.arn}


def _delete_share(jobs: ServiceJobs, request: dict[str, Any]) -> dict[str, Any]:
    share = _share(jobs, request)
    if share.content["state"] != "DISABLED":
        raise ClientException(f"Quota share {share.name} must be DISABLED before it is deleted")
    for job in list(jobs.jobs.values()):
        if (job.queue, job.share) == (share.queue, share.name):
            jobs.terminate(job.job_id, f"Quota share {share.name} was deleted")
    del jobs.shares[share.arn]
    return {}


def _list_shares(jobs: ServiceJobs, backend: Any, request: dict[str, Any]) -> dict[str, Any]:
    queue = _queue(backend, request["jobQueue"])
    return {"quotaShares": [_described(share) for share in jobs.shares.values() if share.queue == queue.arn]}


def _require_sound(request: dict[str, Any]) -> None:
    """What SubmitServiceJob's reference says of its parameters; the SDK's shapes know half of it."""
    try:
        wrong = shapes.violations("batch", "SubmitServiceJob", request)
    except shapes.WrongTypeError as error:
        wrong = [str(error)]
    if wrong:
        raise ClientException(shapes.detected(wrong))
    if not _NAME.fullmatch(request["jobName"]):
        raise ClientException("jobName takes up to 128 letters, digits, hyphens and underscores")
    retries = request.get("retryStrategy") or {"attempts": 1}
    if not 1 <= retries["attempts"] <= _MAX_ATTEMPTS:
        raise ClientException(f"retryStrategy.attempts must be between 1 and {_MAX_ATTEMPTS}")
    if any(len(rule.get("onStatusReason", "")) > _MAX_PATTERN_CHARACTERS for rule in retries.get("evaluateOnExit", [])):
        raise ClientException(f"onStatusReason takes up to {_MAX_PATTERN_CHARACTERS} characters")
    if not 0 <= request.get("schedulingPriority", 0) <= _MAX_PRIORITY:
        raise ClientException(f"schedulingPriority must be between 0 and {_MAX_PRIORITY}")
    for name in ("timeoutConfig", "preemptionConfiguration", "shareIdentifier"):
        if name in request:
            raise ClientException(f"{name}: the emulator's queues don't know it")


def _submit(jobs: ServiceJobs, backend: Any, request: dict[str, Any]) -> dict[str, Any]:
    _require_sound(request)
    queue = _queue(backend, request["jobQueue"])
    if queue.state != "ENABLED":
        raise ClientException(f"Job queue {queue.name} is {queue.state}")
    _capacity(backend, queue)
    job = jobs.submit(request, queue.arn)
    return {"jobArn": job.arn, "jobName": request["jobName"], "jobId": job.job_id}


def _terminate(jobs: ServiceJobs, request: dict[str, Any]) -> dict[str, Any]:
    jobs.terminate(request["jobId"], request["reason"])
    return {}


def _named(name: str, value: str) -> bool:
    """Whether a job's name is one that the filter means: whatever its case, by its beginning with a * at the end."""
    name, value = name.lower(), value.lower()
    return name.startswith(value[:-1]) if value.endswith("*") else name == value


def _list(jobs: ServiceJobs, backend: Any, request: dict[str, Any]) -> dict[str, Any]:
    queue = _queue(backend, request["jobQueue"])
    filters = {item["name"]: item["values"] for item in request.get("filters") or []}
    if len(filters) > 1:
        raise ClientException("only one filter can be used at a time")
    # By a job's name all are listed, else those of one status: botocore says it so of JOB_NAME and QUOTA_SHARE_NAME.
    status = "" if "JOB_NAME" in filters else request.get("jobStatus") or "RUNNING"

    def wanted(job: Any) -> bool:
        fits = {"JOB_NAME": job.request["jobName"], "QUOTA_SHARE_NAME": job.share}
        unknown = set(filters) - set(fits)
        if unknown:
            raise ClientException(f"filter {sorted(unknown)[0]} is not known to the emulator")
        matches = {"JOB_NAME": _named, "QUOTA_SHARE_NAME": str.__eq__}
        by_name = all(any(matches[name](fits[name], value) for value in values) for name, values in filters.items())
        return job.queue == queue.arn and by_name and (not status or job.status == status)

    found = [job.summary() for job in jobs.all() if wanted(job)]
    if filters:
        found.reverse()  # "with the most recent jobs being first"
    start, limit = int(request.get("nextToken") or 0), int(request.get("maxResults") or _PAGE)
    page: dict[str, Any] = {"jobSummaryList": found[start : start + limit]}
    if start + limit < len(found):
        page["nextToken"] = str(start + limit)
    return page
