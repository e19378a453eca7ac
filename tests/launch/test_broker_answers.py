"""What counts as a lost answer, and as another job than the one that was asked for."""

import copy
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import ProtocolError

from trainyard.functions.broker_answers import difference, is_lost

WHERE = "https://sagemaker"


def _told(status: int, code: str) -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "CreateTrainingJob")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ReadTimeoutError(endpoint_url=WHERE), True),
        (ConnectTimeoutError(endpoint_url=WHERE), True),
        (ConnectionClosedError(endpoint_url=WHERE), True),
        (ResponseStreamingError(error="broke off"), True),
        (SSLError(endpoint_url=WHERE, error="broke off"), True),
        (ResponseParserError("a proxy's page"), True),
        (ProtocolError("broke off"), True),
        (_told(500, "InternalFailure"), True),
        (_told(400, "ResourceInUse"), True),
        (_told(400, "ResourceLimitExceeded"), False),
        (_told(429, "ThrottlingException"), False),
        (ParamValidationError(report="x"), False),
        (NoCredentialsError(), False),
        (KeyError("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_come_of_a_request_that_aws_has_taken_is_a_lost_answer(error: Exception, lost: bool) -> None:
    assert is_lost(error) == lost


REQUEST = {
    "AlgorithmSpecification": {"TrainingImage": "image@sha256:1", "TrainingInputMode": "File"},
    "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 2, "VolumeSizeInGB": 100},
    "StoppingCondition": {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 9000},
    "EnableManagedSpotTraining": True,
}


@pytest.mark.parametrize(
    ("group", "key", "value", "told"),
    [
        ("AlgorithmSpecification", "TrainingImage", "image@sha256:2", "TrainingImage is image@sha256:2, not image@"),
        ("ResourceConfig", "InstanceType", "ml.g5.xlarge", "InstanceType is ml.g5.xlarge, not ml.p5.4xlarge"),
        ("ResourceConfig", "InstanceCount", 1, "InstanceCount is 1, not 2"),
        ("StoppingCondition", "MaxRuntimeInSeconds", 60, "MaxRuntimeInSeconds is 60, not 7200"),
        ("StoppingCondition", "MaxWaitTimeInSeconds", 60, "MaxWaitTimeInSeconds is 60, not 9000"),
        ("", "EnableManagedSpotTraining", False, "it runs without spot capacity"),
    ],
)
def test_a_job_that_is_another_is_told_by_what_its_record_decides(group: str, key: str, value: Any, told: str) -> None:
    job: dict[str, Any] = copy.deepcopy(REQUEST)
    assert difference(job, REQUEST) == ""
    (job[group] if group else job)[key] = value
    assert difference(job, REQUEST).startswith(told)


def test_what_aws_does_not_tell_and_what_a_contract_decides_is_no_difference() -> None:
    job: dict[str, Any] = copy.deepcopy(REQUEST)
    job["ResourceConfig"] |= {"VolumeSizeInGB": 500}
    del (
        job["StoppingCondition"]["MaxWaitTimeInSeconds"],
        job["EnableManagedSpotTraining"],
        job["AlgorithmSpecification"],
    )
    assert difference(job, REQUEST) == ""
    on_demand: dict[str, Any] = copy.deepcopy(REQUEST) | {"EnableManagedSpotTraining": False}
    del on_demand["StoppingCondition"]["MaxWaitTimeInSeconds"]
    assert difference(REQUEST, on_demand) == "MaxWaitTimeInSeconds is 9000, not none"
