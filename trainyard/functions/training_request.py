"""The CreateTrainingJob request: one pure function, for the launcher on a person's machine and for the broker.

It takes plain JSON (a resolved job's spec, a tenant's contract), because the broker's runtime has no pydantic.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.functions.job_roles import job_role_arn

JOB_CHANNEL = "job"
"""The channel that carries the spec: hyperparameters hold at most 256 characters each."""
NVME_VOLUME_GIB = 30
"""On types with local NVMe SageMaker mounts that and takes no larger EBS volume than it; 30 GiB holds the image."""
EBS_VOLUME_GIB = 500
"""Types without local NVMe keep inputs and outputs on this volume, under the key that the guard-rails demand."""
MAX_RETRIES = 3
"""RetryStrategy retries only InternalServerError (SageMaker's own fault): always worth it, the job resumes."""
DEFAULT_WAIT_FACTOR = 2
"""Spot: hours of waiting and running together, as a multiple of max_hours, where the job doesn't say."""


def spec_prefix(job_id: str, spec: str = "") -> str:
    """Where the files of the `job` channel lie in the tenant's data bucket; `spec`: its `spec_name`."""
    return f"jobs/{job_id}/spec/{spec}/" if spec else f"jobs/{job_id}/spec/"


def output_path(checkpoints_bucket: str, job_id: str) -> str:
    """SageMaker's S3OutputPath: model.tar.gz and output.tar.gz go to `<this><training job name>/output/`."""
    return f"s3://{checkpoints_bucket}/jobs/{job_id}/output/"


def training_job_request(
    spec: Mapping[str, Any],
    contract: Mapping[str, Any],
    *,
    job_id: str,
    training_job_name: str,
    image: str,
    channels: Iterable[Mapping[str, str]],
    num_hosts: int,
    volume_key: bool,
    asked: int | None = None,
    spec_name: str = "",
) -> dict[str, Any]:
    """CreateTrainingJob's arguments for one attempt; nothing is read and no clock is asked.

    `spec`: the resolved JobSpec as JSON; `contract`: the TenantContract as JSON; `channels`: `name`, `kind` (s3 or fsx)
    and `location` of each. `volume_key`: whether the type keeps data on EBS, whose volume takes a key (types with local
    NVMe refuse one). `asked`: the newest attempt that a person asked for; None: this one. `spec_name`: which of the
    job's specs, where each has a place of its own.

    EnableInterContainerTrafficEncryption is off on purpose: it tunnels collectives through IPsec, its effect on
    EFA is undocumented, and the traffic never leaves the tenant's private subnets and its self-only security
    group, on instance types whose network cards encrypt between themselves. EnableNetworkIsolation is off
    because it takes the role's credentials from the container, and the trainer uploads its own checkpoints.
    """
    compute, key = spec["compute"], contract["keys"]["checkpoints"]
    spec_uri = f"s3://{contract['buckets']['data']}/{spec_prefix(job_id, spec_name)}"
    spec_channel = {"name": JOB_CHANNEL, "kind": "s3", "location": spec_uri}
    resources = {"InstanceType": compute["instance_type"], "InstanceCount": num_hosts}
    resources |= {"VolumeSizeInGB": EBS_VOLUME_GIB, "VolumeKmsKeyId": key} if volume_key else {}
    if warm := keep_alive_seconds(compute):
        resources["KeepAlivePeriodInSeconds"] = warm
    if plan := compute.get("training_plan"):
        resources["TrainingPlanArn"] = contract["training_plans"][plan]["arn"]
    return {
        "TrainingJobName": training_job_name,
        # The spec travels as a channel; the SDK sends this key even when empty.
        "HyperParameters": {},
        "AlgorithmSpecification": {"TrainingInputMode": "File", "TrainingImage": image},
        "RoleArn": job_role_arn(contract, job_id) if contract.get("job_boundary") else contract["roles"]["job"],
        "InputDataConfig": [_channel(channel, contract) for channel in (spec_channel, *channels)],
        "OutputDataConfig": {"S3OutputPath": output_path(contract["buckets"]["checkpoints"], job_id), "KmsKeyId": key},
        "ResourceConfig": {"VolumeSizeInGB": NVME_VOLUME_GIB, **resources},
        "VpcConfig": {
            "SecurityGroupIds": list(contract["security_group_ids"]),
            "Subnets": list(contract["subnet_ids"]),
        },
        "StoppingCondition": stopping_condition(compute),
        "Tags": _tags(spec, contract, job_id),
        "EnableNetworkIsolation": False,
        "EnableInterContainerTrafficEncryption": False,
        "EnableManagedSpotTraining": compute["spot"],
        "Environment": _environment(contract, job_id=job_id, training_job_name=training_job_name, asked=asked),
        "RetryStrategy": {"MaximumRetryAttempts": MAX_RETRIES},
    }


def _environment(
    contract: Mapping[str, Any], *, job_id: str, training_job_name: str, asked: int | None
) -> dict[str, str]:
    """Of which submission of which job a process is (trainer.observe.away). TRAINING_JOB_NAME doesn't tell it: a
    training queue gives its training jobs names of its own."""
    resumed = re.fullmatch(r"-r(\d+)", training_job_name.removeprefix(job_id))
    attempt = resumed[1] if resumed else "1"
    said = {"TRAINYARD_JOB_ID": job_id, "TRAINYARD_ATTEMPT": attempt, "TRAINYARD_ASKED_ATTEMPT": str(asked or attempt)}
    return {**said, **_tracking(contract)}


def _tracking(contract: Mapping[str, Any]) -> dict[str, str]:
    """Where the job's code may log runs; nowhere where jobs are kept from each other (a server knows no single run)."""
    tracking = contract.get("tracking")
    return {} if tracking is None or contract.get("job_boundary") else {"MLFLOW_TRACKING_URI": tracking["server"]}


def keep_alive_seconds(compute: Mapping[str, Any]) -> int:
    """How long the machines stay after the job for the next one; 0: not."""
    return round((compute.get("keep_alive_minutes") or 0) * 60)


def stopping_condition(compute: Mapping[str, Any]) -> dict[str, int]:
    """Seconds of running, and for spot of waiting and running, after which SageMaker stops the job."""
    condition = {"MaxRuntimeInSeconds": round(compute["max_hours"] * 3600)}
    if compute["spot"]:
        wait_hours = compute.get("max_wait_hours") or compute["max_hours"] * DEFAULT_WAIT_FACTOR
        condition["MaxWaitTimeInSeconds"] = round(wait_hours * 3600)
    return condition


def _channel(channel: Mapping[str, str], contract: Mapping[str, Any]) -> dict[str, Any]:
    if channel["kind"] == "fsx":
        files = contract["file_system"]
        source: dict[str, Any] = {
            "FileSystemDataSource": {
                "FileSystemId": files["id"],
                "FileSystemAccessMode": "ro",
                "FileSystemType": "FSxLustre",
                # The mount name comes first in the path of a Lustre channel.
                "DirectoryPath": f"/{files['mount_name']}/{channel['location']}",
            }
        }
    else:
        source = {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": channel["location"],
                "S3DataDistributionType": "FullyReplicated",
            }
        }
    return {"ChannelName": channel["name"], "DataSource": source, "InputMode": "File"}


def _tags(spec: Mapping[str, Any], contract: Mapping[str, Any], job_id: str) -> list[dict[str, str]]:
    tags = {
        "trainyard:environment": contract["environment"],
        "trainyard:tenant": contract["tenant"],
        "trainyard:cost-center": contract["cost_center"],
        "trainyard:job": spec["name"],
        "trainyard:job-id": job_id,
    }
    return [{"Key": key, "Value": value} for key, value in tags.items()]
