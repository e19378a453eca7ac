"""Corrections and additions to moto's services, each with the reason why it is needed."""

import json
from typing import Any
from urllib.parse import parse_qs

from moto.batch import urls as batch_urls
from moto.batch.exceptions import ClientException
from moto.batch.models import BatchBackend, JobQueue
from moto.batch.responses import BatchResponse
from moto.core.exceptions import JsonRESTError
from moto.core.responses import BaseResponse
from moto.ec2.models.vpcs import VPCBackend
from moto.fsx.exceptions import FileSystemNotFound
from moto.fsx.models import FileSystem
from moto.fsx.responses import FSxResponse
from moto.iam.access_control import PermissionResult
from moto.iam.models import iam_backends
from moto.logs.exceptions import ResourceNotFoundException as LogGroupNotFound
from moto.logs.responses import LogsResponse
from moto.s3.models import FakeBucket
from moto.s3.responses import S3Response
from moto.sts.exceptions import STSValidationError
from moto.sts.models import STSBackend
from moto.sts.responses import TokenResponse

from trainyard.emulator.authorization.requests import OPERATION_KEY
from trainyard.emulator.cloudformation.storage import lustre_mount_name


def install() -> None:
    """Put every correction in place; before the first request."""
    # moto applies a bucket policy without its Conditions, so `enforce_ssl` denies everybody; the authorizer judges.
    FakeBucket.get_permission = lambda self, action, resource: PermissionResult.NEUTRAL
    _execute_what_was_judged()
    _let_vpcs_go()
    _complete_file_systems()
    _encrypt_log_groups()
    _end_sessions_in_time()
    _name_the_root()
    _add_service_environments()


def _execute_what_was_judged() -> None:
    """moto looks for an operation in query, form, headers and JSON texts; a judged request has said which it is.

    S3 parameters come from the query alone: moto would also take them from forms, JSON objects and headers.
    """
    get_action = BaseResponse._get_action

    def judged_action(self: Any) -> Any:
        return self.normalized_request.environ.get(OPERATION_KEY) or get_action(self)

    def query_parameter(self: Any, param_name: str, if_none: Any = None) -> Any:
        return parse_qs(self.parsed_url.query, keep_blank_values=True).get(param_name, [if_none])[0]

    BaseResponse._get_action = judged_action
    S3Response._get_param = query_parameter


def _let_vpcs_go() -> None:
    """DeleteVpc takes the main route table with it; moto stumbles over any other table that a stack deleted late."""
    delete_vpc = VPCBackend.delete_vpc

    def delete(self: Any, vpc_id: str) -> Any:
        for table in list(self.describe_route_tables(filters={"vpc-id": vpc_id})):
            if not table.main_association_id and not table.associations:
                self.delete_route_table(table.id)
        return delete_vpc(self, vpc_id)

    VPCBackend.delete_vpc = delete


def _complete_file_systems() -> None:
    """Clients wait for Lifecycle AVAILABLE and mount by MountName; moto's file systems have neither."""
    to_dict = FileSystem.to_dict

    def described(self: Any) -> dict[str, Any]:
        content = {**to_dict(self), "Lifecycle": "AVAILABLE"}
        if self.file_system_type == "LUSTRE":
            lustre = self.lustre_configuration or {}
            kind = lustre.get("DeploymentType", "SCRATCH_1")
            content["LustreConfiguration"] = {**lustre, "MountName": lustre_mount_name(self.file_system_id, kind)}
        return content

    FileSystem.to_dict = described
    response: Any = FSxResponse
    response.update_file_system = _update_file_system


def _update_file_system(self: Any) -> str:
    """UpdateFileSystem: in place, and never smaller. moto has none."""
    given = json.loads(self.body)
    system = self.fsx_backend.file_systems.get(given["FileSystemId"])
    if system is None:
        raise FileSystemNotFound(given["FileSystemId"])
    wanted = given.get("StorageCapacity")
    if wanted is not None and wanted * 10 < system.storage_capacity * 11:
        raise JsonRESTError(
            "BadRequest",
            f"StorageCapacity {wanted} must be at least 10 percent above the {system.storage_capacity} GiB",
        )
    system.storage_capacity = wanted or system.storage_capacity
    system.lustre_configuration = {**(system.lustre_configuration or {}), **given.get("LustreConfiguration", {})}
    return json.dumps({"FileSystem": system.to_dict()})


_CHAINED_SESSION_SECONDS = 3600
"""Of AssumeRole's API reference; how long a session may last else is its role's own."""


def _end_sessions_in_time() -> None:
    """A role's session lasts no longer than the role allows, and an hour where a role's session asks for it."""
    assume = TokenResponse.assume_role

    def assume_role(self: Any) -> Any:
        wanted, arn = self._get_int_param("DurationSeconds", 3600), str(self._get_param("RoleArn"))
        roles = iam_backends[self.current_account]["aws"].roles.values()
        longest = next((int(role.max_session_duration or 3600) for role in roles if role.arn == arn), wanted)
        sessions = self.backend.assumed_roles
        if wanted > longest:
            raise STSValidationError("The requested DurationSeconds exceeds the MaxSessionDuration set for this role.")
        if wanted > _CHAINED_SESSION_SECONDS and any(item.access_key_id == self.get_access_key() for item in sessions):
            raise STSValidationError(
                "The requested DurationSeconds exceeds the 1 hour session limit for roles assumed by role chaining."
            )
        return assume(self)

    TokenResponse.assume_role = assume_role


def _encrypt_log_groups() -> None:
    """AssociateKmsKey and DisassociateKmsKey, which moto lacks."""

    def associate(self: Any) -> str:
        name = self._get_param("logGroupName")
        if name not in self.logs_backend.groups:
            raise LogGroupNotFound
        self.logs_backend.groups[name].kms_key_id = self._get_param("kmsKeyId")
        return ""

    response: Any = LogsResponse
    response.associate_kms_key = response.disassociate_kms_key = associate


def _name_the_root() -> None:
    """The account's root is nobody in moto's IAM, which calls it an IAM user of its own."""
    identify = STSBackend.get_caller_identity

    def identified(self: Any, access_key_id: str, region: str) -> tuple[str, str, str]:
        user_id, arn, account = identify(self, access_key_id, region)
        if arn.endswith(":user/moto"):
            return account, f"arn:aws:iam::{account}:root", account
        return user_id, arn, account

    STSBackend.get_caller_identity = identified


# ---- AWS Batch: service environments and queues for SageMaker training jobs, which moto lacks -------------


class _ServiceEnvironments:
    """The service environments of a Batch backend, by ARN."""

    def __init__(self, backend: Any) -> None:
        self.items: dict[str, dict[str, Any]] = backend.__dict__.setdefault("_service_environments", {})

    def find(self, name_or_arn: str) -> dict[str, Any] | None:
        """By either of the ways a client may name it."""
        return next(
            (
                item
                for item in self.items.values()
                if name_or_arn in (item["serviceEnvironmentName"], item["serviceEnvironmentArn"])
            ),
            None,
        )

    def get(self, name_or_arn: str) -> dict[str, Any]:
        """Like `find`, but a missing one is the client's mistake."""
        found = self.find(name_or_arn)
        if found is None:
            raise ClientException(f"Service environment {name_or_arn} does not exist")
        return found

    def arn(self, name_or_arn: str) -> str:
        """The ARN of one that must exist."""
        return str(self.get(name_or_arn)["serviceEnvironmentArn"])


def service_environments(backend: Any) -> _ServiceEnvironments:
    """Those of a Batch backend of moto's."""
    return _ServiceEnvironments(backend)


def _create_environment(self: Any) -> str:
    name, kind = self._get_param("serviceEnvironmentName"), self._get_param("serviceEnvironmentType")
    backend = self.batch_backend
    environments = _ServiceEnvironments(backend)
    if kind != "SAGEMAKER_TRAINING":
        raise ClientException(f"serviceEnvironmentType {kind} must be SAGEMAKER_TRAINING")
    if environments.find(name):
        raise ClientException(f"Service environment {name} already exists")
    arn = f"arn:aws:batch:{backend.region_name}:{backend.account_id}:service-environment/{name}"
    environments.items[arn] = {
        "serviceEnvironmentName": name,
        "serviceEnvironmentArn": arn,
        "serviceEnvironmentType": kind,
        "state": self._get_param("state") or "ENABLED",
        "status": "VALID",
        "capacityLimits": self._get_param("capacityLimits") or [],
        "tags": self._get_param("tags") or {},
    }
    return json.dumps({"serviceEnvironmentName": name, "serviceEnvironmentArn": arn})


def _describe_environments(self: Any) -> str:
    wanted = self._get_param("serviceEnvironments") or []
    environments = _ServiceEnvironments(self.batch_backend)
    found = [environments.find(name) for name in wanted] if wanted else list(environments.items.values())
    return json.dumps({"serviceEnvironments": [item for item in found if item]})


def _update_environment(self: Any) -> str:
    environment = _ServiceEnvironments(self.batch_backend).get(self._get_param("serviceEnvironment"))
    for name in ("state", "capacityLimits"):
        if self._get_param(name) is not None:
            environment[name] = self._get_param(name)
    return json.dumps({key: environment[key] for key in ("serviceEnvironmentName", "serviceEnvironmentArn")})


def _delete_environment(self: Any) -> str:
    environments = _ServiceEnvironments(self.batch_backend)
    environment = environments.get(self._get_param("serviceEnvironment"))
    arn = environment["serviceEnvironmentArn"]
    users = [queue.name for queue in self.batch_backend._job_queues.values() if arn in _environments_of(queue)]
    if environment["state"] != "DISABLED":
        raise ClientException(f"Service environment {arn} must be DISABLED before it is deleted")
    if users:
        raise ClientException(f"Cannot delete, found existing JobQueue relationship: {users[0]}")
    del environments.items[arn]
    return json.dumps({})


def _environments_of(queue: Any) -> list[str]:
    return [item["serviceEnvironment"] for item in getattr(queue, "service_environment_order", [])]


def _add_service_environments() -> None:
    response: Any = BatchResponse
    for action, function in (
        ("createserviceenvironment", _create_environment),
        ("describeserviceenvironments", _describe_environments),
        ("updateserviceenvironment", _update_environment),
        ("deleteserviceenvironment", _delete_environment),
    ):
        setattr(response, action, function)
        batch_urls.url_paths[f"{{0}}/v1/{action}$"] = BatchResponse.dispatch
    _teach_queues(response)


def _create_training_queue(self: Any, order: list[dict[str, Any]]) -> str:
    backend: BatchBackend = self.batch_backend
    name, policy = self._get_param("jobQueueName"), self._get_param("schedulingPolicyArn")
    if backend.get_job_queue_by_name(name) is not None:
        raise ClientException(f"Job queue {name} already exists")
    if policy and not backend.describe_scheduling_policies([policy]):
        raise ClientException(f"Scheduling policy {policy} does not exist")
    queue = JobQueue(
        name,
        str(self._get_param("priority")),
        self._get_param("state") or "ENABLED",
        [],
        [],
        backend=backend,
        schedule_policy=policy,
        tags=self._get_param("tags"),
    )
    queue.service_environment_order = [
        {**item, "serviceEnvironment": _ServiceEnvironments(backend).arn(item["serviceEnvironment"])} for item in order
    ]
    backend._job_queues[queue.arn] = queue
    return json.dumps({"jobQueueArn": queue.arn, "jobQueueName": name})


def _teach_queues(response: Any) -> None:
    """A queue of type SAGEMAKER_TRAINING orders service environments where others order compute environments."""
    create, update, describe = response.createjobqueue, response.updatejobqueue, JobQueue.describe

    def create_queue(self: Any) -> str:
        order = self._get_param("serviceEnvironmentOrder")
        return _create_training_queue(self, order) if order else str(create(self))

    def update_queue(self: Any) -> str:
        queue = self.batch_backend.get_job_queue(self._get_param("jobQueue"))
        if queue is None or not hasattr(queue, "service_environment_order"):
            return str(update(self))
        queue.service_environment_order = self._get_param("serviceEnvironmentOrder") or queue.service_environment_order
        queue.priority = str(self._get_param("priority") or queue.priority)
        queue.state = self._get_param("state") or queue.state
        queue.schedule_policy = self._get_param("schedulingPolicyArn") or queue.schedule_policy
        return json.dumps({"jobQueueArn": queue.arn, "jobQueueName": queue.name})

    def described(self: Any) -> dict[str, Any]:
        order = getattr(self, "service_environment_order", None)
        extra = {"serviceEnvironmentOrder": order, "jobQueueType": "SAGEMAKER_TRAINING"} if order else {}
        return {**describe(self), **extra}

    response.createjobqueue, response.updatejobqueue = create_queue, update_queue
    JobQueue.describe = described
