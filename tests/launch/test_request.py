"""The CreateTrainingJob request: what it says, that it is pure, and that the SageMaker SDK sends exactly it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from botocore.validate import validate_parameters

from trainyard.launch.channels import Channel
from trainyard.launch.request import training_job_request
from trainyard.launch.sagemaker_backend import model_trainer
from trainyard.launch.session import Account
from trainyard.spec.job import ResolvedJob
from trainyard.spec.platform import TenantContract

GOLDEN = Path(__file__).parent / "golden" / "create_training_job.json"
IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/trainyard@sha256:{'ab' * 32}"
JOB_ID = "acme-tiny-20260131120000-1a2b"


def request_of(resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]) -> dict[str, Any]:
    return training_job_request(
        resolved, contract, job_id=JOB_ID, training_job_name=JOB_ID, image=IMAGE, channels=channels
    )


def with_compute(resolved: ResolvedJob, **compute: Any) -> ResolvedJob:
    changed = resolved.spec.compute.model_copy(update=compute)
    return resolved.model_copy(update={"spec": resolved.spec.model_copy(update={"compute": changed})})


def test_request_is_the_golden_one(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    assert request_of(resolved, contract, channels) == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_request_satisfies_the_service_model(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    shape = get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    with_file_system = (*channels, Channel("model", "fsx", "models/base", "fsx://models/base"))
    for changes in ({}, {"spot": False}, {"instance_type": "ml.inf2.xlarge", "spot": False}):
        request = request_of(with_compute(resolved, **changes), contract, with_file_system)
        report = validate_parameters(request, shape)
        assert report is None or not report


def test_same_inputs_same_request(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    first, second = (request_of(resolved, contract, channels) for _ in range(2))
    assert first == second
    first["Tags"].clear()
    assert request_of(resolved, contract, channels) == second, "a caller's change must not leak into the next request"


def test_spot_waits_and_on_demand_does_not(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    spot = request_of(resolved, contract, channels)
    assert spot["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400}
    stated = request_of(with_compute(resolved, max_wait_hours=3.0), contract, channels)
    assert stated["StoppingCondition"]["MaxWaitTimeInSeconds"] == 10800
    on_demand = request_of(with_compute(resolved, spot=False), contract, channels)
    assert on_demand["EnableManagedSpotTraining"] is False
    assert on_demand["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200}


def test_volume_key_only_where_sagemaker_takes_one(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    nvme = request_of(resolved, contract, channels)["ResourceConfig"]
    assert "VolumeKmsKeyId" not in nvme
    ebs = request_of(with_compute(resolved, instance_type="ml.inf2.xlarge"), contract, channels)["ResourceConfig"]
    assert ebs["VolumeKmsKeyId"] == contract.keys.checkpoints


def test_file_system_channel_begins_with_the_mount_name(resolved: ResolvedJob, contract: TenantContract) -> None:
    request = request_of(resolved, contract, (Channel("model", "fsx", "models/base", "fsx://models/base"),))
    source = request["InputDataConfig"][1]["DataSource"]["FileSystemDataSource"]
    assert source["DirectoryPath"] == "/abcdefgh/models/base"
    assert source["FileSystemAccessMode"] == "ro"


@pytest.mark.parametrize(
    "changes", [{}, {"spot": False}, {"instance_type": "ml.inf2.xlarge", "spot": False}], ids=["spot", "demand", "ebs"]
)
def test_model_trainer_sends_exactly_the_request(
    aws: Account,
    resolved: ResolvedJob,
    contract: TenantContract,
    channels: tuple[Channel, ...],
    changes: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inputs = (*channels, Channel("model", "fsx", "models/base", "fsx://models/base"))
    request = request_of(with_compute(resolved, **changes), contract, inputs)
    sent: list[tuple[str, Any]] = []
    aws.session.events.register(
        "before-parameter-build.*.*", lambda params, model, **_: sent.append((model.name, params))
    )
    with caplog.at_level(logging.WARNING):
        model_trainer(request, aws).train(wait=False, logs=False)
    assert [name for name, _ in sent] == ["CreateTrainingJob", "DescribeTrainingJob"], "and it calls nothing else"
    assert sent[0][1] == request
