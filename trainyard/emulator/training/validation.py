"""What SageMaker refuses at CreateTrainingJob, before anything starts."""

from collections.abc import Mapping
from typing import Any

from moto.sagemaker.exceptions import AWSValidationException, SagemakerClientError

from trainyard import hardware
from trainyard.emulator import shapes
from trainyard.errors import InputError

_MAX_RUNTIME_SECONDS = 28 * 24 * 3600


class SerializationException(SagemakerClientError):  # type: ignore[misc]  # moto's classes are untyped here
    """AWS's error code for a request of another form than the operation's."""

    code = "SerializationException"


def validate(request: Mapping[str, Any]) -> None:
    """ValidationException where the request itself is wrong."""
    try:
        wrong = shapes.violations("sagemaker", "CreateTrainingJob", request)
    except shapes.WrongTypeError as error:
        raise SerializationException(str(error)) from None
    if wrong:
        raise AWSValidationException(shapes.detected(wrong))
    algorithm = request.get("AlgorithmSpecification") or {}
    if not algorithm.get("TrainingImage"):
        raise AWSValidationException(
            "AlgorithmSpecification.TrainingImage is missing; the emulator runs images, not AlgorithmName"
        )
    _validate_resources(request)
    _validate_stopping(request)
    _validate_channels(request)
    if request.get("CheckpointConfig"):
        raise AWSValidationException(
            "the emulator doesn't sync CheckpointConfig; write checkpoints to S3 from the training code"
        )


def instance_type(request: Mapping[str, Any]) -> str:
    """The job's instance type."""
    return str(request["ResourceConfig"]["InstanceType"])


def instance_count(request: Mapping[str, Any]) -> int:
    """The number of hosts."""
    return int(request["ResourceConfig"].get("InstanceCount", 1))


def _validate_resources(request: Mapping[str, Any]) -> None:
    resources = request.get("ResourceConfig") or {}
    if resources.get("InstanceGroups"):
        raise AWSValidationException("ResourceConfig.InstanceGroups: the emulator runs homogeneous clusters only")
    kind = resources.get("InstanceType")
    if kind is None:
        raise AWSValidationException("ResourceConfig.InstanceType is missing")
    if resources.get("VolumeKmsKeyId") and _has_nvme(kind):
        raise AWSValidationException(
            f"VolumeKmsKeyId is not supported for the instance type {kind}, whose local storage its hardware encrypts"
        )
    if resources.get("TrainingPlanArn"):
        raise AWSValidationException(
            f"Training plan {resources['TrainingPlanArn']} doesn't exist: the emulator has none"
        )
    if resources.get("KeepAlivePeriodInSeconds") and request.get("EnableManagedSpotTraining"):
        raise AWSValidationException("KeepAlivePeriodInSeconds is not supported with managed spot training")
    if int(resources.get("InstanceCount", 0)) < 1:
        raise AWSValidationException("ResourceConfig.InstanceCount must be at least 1")


def _has_nvme(kind: str) -> bool:
    """Whether its disks are its own (API reference, ResourceConfig); no for a type that nothing here knows."""
    try:
        return bool(hardware.instance(kind).local_nvme_gib)
    except InputError:
        return False


def _validate_stopping(request: Mapping[str, Any]) -> None:
    stopping = request.get("StoppingCondition") or {}
    runtime = int(stopping.get("MaxRuntimeInSeconds", 86400))
    if not 1 <= runtime <= _MAX_RUNTIME_SECONDS:
        raise AWSValidationException(f"MaxRuntimeInSeconds {runtime} must be between 1 and {_MAX_RUNTIME_SECONDS}")
    wait = stopping.get("MaxWaitTimeInSeconds")
    if request.get("EnableManagedSpotTraining"):
        if wait is None or int(wait) < runtime:
            raise AWSValidationException(
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to "
                f"MaxRuntimeInSeconds ({runtime}) for managed spot training."
            )
    elif wait is not None:
        raise AWSValidationException(
            "MaxWaitTimeInSeconds is only supported for managed spot training: set EnableManagedSpotTraining"
        )


def _validate_channels(request: Mapping[str, Any]) -> None:
    channels = request.get("InputDataConfig") or []
    names = [channel.get("ChannelName") for channel in channels]
    if len(names) != len(set(names)):
        raise AWSValidationException("InputDataConfig: each channel name may stand only once")
    for channel in channels:
        source = channel.get("DataSource") or {}
        if "S3DataSource" not in source:
            raise AWSValidationException(
                f"channel {channel.get('ChannelName')}: the emulator reads S3DataSource only, and mounts no FSx"
            )
        if source["S3DataSource"].get("S3DataType", "S3Prefix") != "S3Prefix":
            raise AWSValidationException(
                f"channel {channel.get('ChannelName')}: the emulator knows S3DataType S3Prefix only"
            )
        mode = channel.get("InputMode") or (request.get("AlgorithmSpecification") or {}).get(
            "TrainingInputMode", "File"
        )
        if mode == "Pipe":
            raise AWSValidationException(
                f"channel {channel.get('ChannelName')}: the emulator has no input mode Pipe; use File or FastFile"
            )
