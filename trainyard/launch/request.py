"""The CreateTrainingJob request: one pure function for every path that submits a job."""

from collections.abc import Sequence
from typing import Any

from trainyard import hardware
from trainyard.launch import names
from trainyard.launch.channels import JOB_CHANNEL, Channel
from trainyard.spec.job import ResolvedJob
from trainyard.spec.platform import TenantContract

NVME_VOLUME_GIB = 30
"""On types with local NVMe SageMaker mounts that and takes no larger EBS volume than it; 30 GiB holds the image."""
EBS_VOLUME_GIB = 500
"""Types without local NVMe keep inputs and outputs on this volume, under the key that the guard-rails demand."""
MAX_RETRIES = 3
"""RetryStrategy retries only InternalServerError (SageMaker's own fault): always worth it, the job resumes."""
DEFAULT_WAIT_FACTOR = 2
"""Spot: hours of waiting and running together, as a multiple of max_hours, where the job doesn't say."""


def training_job_request(
    job: ResolvedJob,
    contract: TenantContract,
    *,
    job_id: str,
    training_job_name: str,
    image: str,
    channels: Sequence[Channel],
) -> dict[str, Any]:
    """CreateTrainingJob's arguments for one attempt of `job`; nothing is read and no clock is asked.

    EnableInterContainerTrafficEncryption is off on purpose: it tunnels collectives through IPsec, its effect on
    EFA is undocumented, and the traffic never leaves the tenant's private subnets and its self-only security
    group, on instance types whose network cards encrypt between themselves. EnableNetworkIsolation is off
    because it takes the role's credentials from the container, and the trainer uploads its own checkpoints.
    """
    spec = job.spec
    assert spec.compute.instance_type is not None
    request: dict[str, Any] = {
        "TrainingJobName": training_job_name,
        # The spec travels as a channel; the SDK sends this key even when empty.
        "HyperParameters": {},
        "AlgorithmSpecification": {"TrainingInputMode": "File", "TrainingImage": image},
        "RoleArn": contract.roles.job,
        "InputDataConfig": _input_data_config(channels, contract, job_id),
        "OutputDataConfig": {
            "S3OutputPath": names.output_path(contract.buckets.checkpoints, job_id),
            "KmsKeyId": contract.keys.checkpoints,
        },
        "ResourceConfig": _resource_config(job, contract),
        "VpcConfig": {"SecurityGroupIds": list(contract.security_group_ids), "Subnets": list(contract.subnet_ids)},
        "StoppingCondition": _stopping_condition(job),
        "Tags": _tags(job, contract, job_id),
        "EnableNetworkIsolation": False,
        "EnableInterContainerTrafficEncryption": False,
        "EnableManagedSpotTraining": spec.compute.spot,
        # TRAINING_JOB_NAME changes with each attempt, the job id doesn't.
        "Environment": {"TRAINYARD_JOB_ID": job_id},
        "RetryStrategy": {"MaximumRetryAttempts": MAX_RETRIES},
    }
    return request


def _stopping_condition(job: ResolvedJob) -> dict[str, int]:
    compute = job.spec.compute
    condition = {"MaxRuntimeInSeconds": round(compute.max_hours * 3600)}
    if compute.spot:
        wait_hours = compute.max_wait_hours or compute.max_hours * DEFAULT_WAIT_FACTOR
        condition["MaxWaitTimeInSeconds"] = round(wait_hours * 3600)
    return condition


def _resource_config(job: ResolvedJob, contract: TenantContract) -> dict[str, Any]:
    instance_type = job.spec.compute.instance_type
    assert instance_type is not None
    config: dict[str, Any] = {
        "InstanceType": instance_type,
        "InstanceCount": job.num_hosts,
        "VolumeSizeInGB": NVME_VOLUME_GIB,
    }
    if not hardware.instance(instance_type).local_nvme_gib:
        # VolumeKmsKeyId may not be set on types with local NVMe (hardware-encrypted): CreateTrainingJob refuses it.
        config |= {"VolumeSizeInGB": EBS_VOLUME_GIB, "VolumeKmsKeyId": contract.keys.checkpoints}
    return config


def _input_data_config(channels: Sequence[Channel], contract: TenantContract, job_id: str) -> list[dict[str, Any]]:
    spec_uri = f"s3://{contract.buckets.data}/{names.spec_prefix(job_id)}"
    spec_channel = Channel(JOB_CHANNEL, "s3", spec_uri, spec_uri)
    return [_channel(channel, contract) for channel in (spec_channel, *channels)]


def _channel(channel: Channel, contract: TenantContract) -> dict[str, Any]:
    if channel.kind == "fsx":
        source: dict[str, Any] = {
            "FileSystemDataSource": {
                "FileSystemId": contract.file_system.id,
                "FileSystemAccessMode": "ro",
                "FileSystemType": "FSxLustre",
                # The mount name comes first in the path of a Lustre channel.
                "DirectoryPath": f"/{contract.file_system.mount_name}/{channel.location}",
            }
        }
    else:
        source = {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": channel.location,
                "S3DataDistributionType": "FullyReplicated",
            }
        }
    return {"ChannelName": channel.name, "DataSource": source, "InputMode": "File"}


def _tags(job: ResolvedJob, contract: TenantContract, job_id: str) -> list[dict[str, str]]:
    tags = {
        "trainyard:environment": contract.environment,
        "trainyard:tenant": contract.tenant,
        "trainyard:cost-center": contract.cost_center,
        "trainyard:job": job.spec.name,
        "trainyard:job-id": job_id,
    }
    return [{"Key": key, "Value": value} for key, value in tags.items()]
