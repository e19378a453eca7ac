"""AWS Batch: service environments for SageMaker training jobs, scheduling policies, queues."""

from collections.abc import Mapping
from typing import Any

from trainyard.emulator.cloudformation.model import (
    Created,
    Properties,
    ResourceType,
    Site,
    UnsupportedPropertyError,
    found,
    ignore_missing,
    tags_of,
    to_api,
)


def _tags(properties: Properties) -> dict[str, dict[str, str]]:
    tags = {tag["Key"]: tag["Value"] for tag in tags_of(properties)}
    return {"tags": tags} if tags else {}


def _create_policy(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api(
        "batch",
        "CreateSchedulingPolicy",
        {**properties, "Name": properties.get("Name") or generated},
        without=("Tags",),
    )
    arn = site.client("batch").create_scheduling_policy(**parameters, **_tags(properties))["arn"]
    return Created(arn, {"Arn": arn})


def _update_policy(site: Site, arn: str, old: Properties, new: Properties) -> None:
    if "QuotaSharePolicy" in old or "QuotaSharePolicy" in new:
        if old.get("QuotaSharePolicy") != new.get("QuotaSharePolicy"):
            raise UnsupportedPropertyError("a scheduling policy can't change between fair shares and quota shares")
        return
    parameters = to_api(
        "batch", "UpdateSchedulingPolicy", {"Arn": arn, "FairsharePolicy": new.get("FairsharePolicy", {})}
    )
    site.client("batch").update_scheduling_policy(**parameters)


def _policy_exists(site: Site, arn: str) -> bool:
    return found(lambda: site.client("batch").describe_scheduling_policies(arns=[arn])["schedulingPolicies"])


def _create_environment(site: Site, properties: Properties, generated: str) -> Created:
    name = properties.get("ServiceEnvironmentName") or generated
    parameters = to_api(
        "batch", "CreateServiceEnvironment", {**properties, "ServiceEnvironmentName": name}, without=("Tags",)
    )
    arn = site.client("batch").create_service_environment(**parameters, **_tags(properties))["serviceEnvironmentArn"]
    return Created(arn, {"ServiceEnvironmentArn": arn})


def _update_environment(site: Site, arn: str, old: Properties, new: Properties) -> None:
    changes = {"ServiceEnvironment": arn, "CapacityLimits": new["CapacityLimits"], "State": new.get("State", "ENABLED")}
    site.client("batch").update_service_environment(**to_api("batch", "UpdateServiceEnvironment", changes))


def _environment_exists(site: Site, arn: str) -> bool:
    return found(
        lambda: site.client("batch").describe_service_environments(serviceEnvironments=[arn])["serviceEnvironments"]
    )


def _delete_environment(site: Site, arn: str, properties: Properties) -> None:
    def delete() -> None:
        site.client("batch").update_service_environment(serviceEnvironment=arn, state="DISABLED")
        site.client("batch").delete_service_environment(serviceEnvironment=arn)

    ignore_missing(delete)


def _create_queue(site: Site, properties: Properties, generated: str) -> Created:
    name = properties.get("JobQueueName") or generated
    parameters = to_api("batch", "CreateJobQueue", {**properties, "JobQueueName": name}, without=("Tags",))
    arn = site.client("batch").create_job_queue(**parameters, **_tags(properties))["jobQueueArn"]
    return Created(arn, {"JobQueueArn": arn})


def _update_queue(site: Site, arn: str, old: Properties, new: Properties) -> Mapping[str, Any] | None:
    changes = {name: value for name, value in new.items() if name not in ("JobQueueName", "JobQueueType", "Tags")}
    site.client("batch").update_job_queue(**to_api("batch", "UpdateJobQueue", {**changes, "JobQueue": arn}))
    return None


def _queue_exists(site: Site, arn: str) -> bool:
    return found(lambda: site.client("batch").describe_job_queues(jobQueues=[arn])["jobQueues"])


def _delete_queue(site: Site, arn: str, properties: Properties) -> None:
    def delete() -> None:
        site.client("batch").update_job_queue(jobQueue=arn, state="DISABLED")
        site.client("batch").delete_job_queue(jobQueue=arn)

    ignore_missing(delete)


def _create_share(site: Site, properties: Properties, generated: str) -> Created:
    parameters = to_api("batch", "CreateQuotaShare", properties, without=("Tags",))
    arn = site.client("batch").create_quota_share(**parameters, **_tags(properties))["quotaShareArn"]
    return Created(arn, {"QuotaShareArn": arn})


def _update_share(site: Site, arn: str, old: Properties, new: Properties) -> None:
    changes = {name: value for name, value in new.items() if name not in ("QuotaShareName", "JobQueue", "Tags")}
    site.client("batch").update_quota_share(
        **to_api("batch", "UpdateQuotaShare", {**changes, "QuotaShareArn": arn, "State": new.get("State", "ENABLED")})
    )


def _share_exists(site: Site, arn: str) -> bool:
    return found(lambda: site.client("batch").describe_quota_share(quotaShareArn=arn)["quotaShareName"])


def _delete_share(site: Site, arn: str, properties: Properties) -> None:
    def delete() -> None:
        site.client("batch").update_quota_share(quotaShareArn=arn, state="DISABLED")
        site.client("batch").delete_quota_share(quotaShareArn=arn)

    ignore_missing(delete)


TYPES = (
    ResourceType(
        "AWS::Batch::QuotaShare",
        _create_share,
        _share_exists,
        _delete_share,
        _update_share,
        ("QuotaShareName", "JobQueue"),
        "QuotaShareName",
    ),
    ResourceType(
        "AWS::Batch::SchedulingPolicy",
        _create_policy,
        _policy_exists,
        lambda site, arn, properties: ignore_missing(lambda: site.client("batch").delete_scheduling_policy(arn=arn)),
        _update_policy,
        ("Name",),
        "Name",
    ),
    ResourceType(
        "AWS::Batch::ServiceEnvironment",
        _create_environment,
        _environment_exists,
        _delete_environment,
        _update_environment,
        ("ServiceEnvironmentName", "ServiceEnvironmentType"),
        "ServiceEnvironmentName",
    ),
    ResourceType(
        "AWS::Batch::JobQueue",
        _create_queue,
        _queue_exists,
        _delete_queue,
        _update_queue,
        ("JobQueueName", "JobQueueType"),
        "JobQueueName",
    ),
)
