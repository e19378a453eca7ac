"""The detective: what the rule of the synthesized template hands over, and what the function makes of each job."""

import copy
import json
from collections.abc import Callable
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.exceptions import ClientError
from botocore.validate import ParamValidator

from trainyard.functions import job_guard

FOUNDATION, TRAINING = "trainyard-local-acme-foundation", "trainyard-local-acme-training"


@pytest.fixture(scope="module")
def rule(account: Any) -> dict[str, Any]:
    (found,) = (
        item for item in account.resources(TRAINING, "AWS::Events::Rule").values() if "started" in item["Description"]
    )
    return dict(found)


@pytest.fixture(scope="module")
def event(rule: dict[str, Any]) -> dict[str, Any]:
    """What the function is called with, as EventBridge puts it together."""
    (target,) = rule["Targets"]
    transformer = target["InputTransformer"]
    ((name, path),) = transformer["InputPathsMap"].items()
    assert path == "$.detail.TrainingJobName"
    made: dict[str, Any] = json.loads(transformer["InputTemplate"].replace(f"<{name}>", json.dumps("acme-llama-1")))
    return made


@pytest.fixture(scope="module")
def proper_job(account: Any) -> dict[str, Any]:
    """A job that follows every rule, as DescribeTrainingJob describes it."""
    subnet = account.identifier(FOUNDATION, account.only(FOUNDATION, "AWS::EC2::Subnet", "Training"))
    group = account.identifier(FOUNDATION, account.only(FOUNDATION, "AWS::EC2::SecurityGroup", "TrainingGroup"))
    key = account.arn(FOUNDATION, account.only(FOUNDATION, "AWS::KMS::Key", "KeysCheckpoints"))
    data, checkpoints = (
        account.identifier(FOUNDATION, account.only(FOUNDATION, "AWS::S3::Bucket", f"Buckets{name}"))
        for name in ("Data", "Checkpoints")
    )
    (repository,) = account.resources("trainyard-local-platform", "AWS::ECR::Repository").values()
    registry = f"{account.account}.dkr.ecr.{account.region}.amazonaws.com"
    files = account.identifier(FOUNDATION, account.only(FOUNDATION, "AWS::FSx::FileSystem"))
    return {
        "TrainingJobName": "acme-llama-1",
        "RoleArn": account.arn(FOUNDATION, account.only(FOUNDATION, "AWS::IAM::Role", "RolesJob")),
        "AlgorithmSpecification": {"TrainingImage": f"{registry}/{repository['RepositoryName']}@sha256:{'0' * 64}"},
        "InputDataConfig": [
            {"DataSource": {"S3DataSource": {"S3Uri": f"s3://{data}/jobs/acme-llama-1/spec"}}},
            {"DataSource": {"FileSystemDataSource": {"FileSystemId": files}}},
        ],
        "OutputDataConfig": {"S3OutputPath": f"s3://{checkpoints}/jobs/acme-llama-1/output", "KmsKeyId": key},
        "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 4},
        "VpcConfig": {"Subnets": [subnet], "SecurityGroupIds": [f"{group}.GroupId"]},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        "RemoteDebugConfig": {"EnableRemoteDebug": False},
    }


def test_the_rule_hears_of_jobs_of_the_tenants_name_or_role_that_have_started(
    rule: dict[str, Any], account: Any
) -> None:
    pattern, role = (
        rule["EventPattern"],
        account.arn(FOUNDATION, account.only(FOUNDATION, "AWS::IAM::Role", "RolesJob")),
    )
    assert pattern["source"] == ["aws.sagemaker"]
    assert pattern["detail"] == {
        "TrainingJobStatus": ["InProgress"],
        "$or": [
            {"TrainingJobName": [{"prefix": "acme-"}]},
            {"RoleArn": [role, {"prefix": "arn:aws:iam::123456789012:role/trainyard/local/acme/jobs/each/"}]},
        ],
    }


def test_a_proper_job_is_left_alone(event: dict[str, Any], proper_job: dict[str, Any]) -> None:
    assert event["job"] == "acme-llama-1"
    assert job_guard.violations(proper_job, event["rules"]) == []


def nested(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(job: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            job = job.setdefault(name, {})
        job[last] = value

    return change


BREAKS: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("name: globex-1", nested("TrainingJobName", "globex-1")),
    ("role: arn:aws:iam::1:role/x", nested("RoleArn", "arn:aws:iam::1:role/x")),
    ("subnets: none", nested("VpcConfig", {})),
    ("subnets: subnet-x", nested("VpcConfig.Subnets", ["subnet-x"])),
    ("security groups: sg-x", nested("VpcConfig.SecurityGroupIds", ["sg-x"])),
    ("instance types: ml.p5.48xlarge", nested("ResourceConfig.InstanceType", "ml.p5.48xlarge")),
    ("instance types: none", nested("ResourceConfig", {})),
    ("instances: 5 ml.p5.4xlarge", nested("ResourceConfig.InstanceCount", 5)),
    (
        "instances: 9 ml.p5.4xlarge",
        nested("ResourceConfig.InstanceGroups", [{"InstanceType": "ml.p5.4xlarge", "InstanceCount": 9}]),
    ),
    (
        "instances: 8 ml.p5.4xlarge",
        nested("ResourceConfig.InstanceGroups", [{"InstanceType": "ml.p5.4xlarge", "InstanceCount": 4}] * 2),
    ),
    ("output key: none", nested("OutputDataConfig.KmsKeyId", "")),
    ("output key: other", nested("OutputDataConfig.KmsKeyId", "other")),
    ("volume key: other", nested("ResourceConfig.VolumeKmsKeyId", "other")),
    (
        "file system: fs-x",
        nested("InputDataConfig", [{"DataSource": {"FileSystemDataSource": {"FileSystemId": "fs-x"}}}]),
    ),
    ("buckets: s3://other/x", nested("OutputDataConfig.S3OutputPath", "s3://other/x")),
    ("buckets: s3://other/d", nested("DebugHookConfig.S3OutputPath", "s3://other/d")),
    ("buckets: s3://other/p", nested("ProfilerConfig.S3OutputPath", "s3://other/p")),
    ("buckets: s3://other/t", nested("TensorBoardOutputConfig.S3OutputPath", "s3://other/t")),
    ("buckets: s3://other/c", nested("CheckpointConfig.S3Uri", "s3://other/c")),
    (
        "buckets: s3://other/data",
        nested("InputDataConfig", [{"DataSource": {"S3DataSource": {"S3Uri": "s3://other/data"}}}]),
    ),
    ("image: public/image:latest", nested("AlgorithmSpecification.TrainingImage", "public/image:latest")),
    ("image: none", nested("AlgorithmSpecification", {"AlgorithmName": "anybodys"})),
    ("running time: 86401 s", nested("StoppingCondition.MaxRuntimeInSeconds", 86401)),
    ("remote debug: on", nested("RemoteDebugConfig.EnableRemoteDebug", True)),
    (
        "training plan: arn:aws:sagemaker:us-east-1:1:training-plan/x",
        nested("ResourceConfig.TrainingPlanArn", "arn:aws:sagemaker:us-east-1:1:training-plan/x"),
    ),
    ("serverless: on", nested("ServerlessJobConfig", {"JobType": "FineTuning"})),
]


@pytest.mark.parametrize(("said", "change"), BREAKS, ids=[said for said, _ in BREAKS])
def test_each_broken_rule_is_named(
    said: str, change: Callable[[dict[str, Any]], None], event: dict[str, Any], proper_job: dict[str, Any]
) -> None:
    job = copy.deepcopy(proper_job)
    change(job)
    assert said in job_guard.violations(job, event["rules"])


def test_a_bucket_that_only_begins_like_the_own_is_foreign(event: dict[str, Any], proper_job: dict[str, Any]) -> None:
    job = copy.deepcopy(proper_job)
    job["OutputDataConfig"]["S3OutputPath"] = event["rules"]["places"][1].rstrip("/") + "-x/jobs"
    assert [item[:7] for item in job_guard.violations(job, event["rules"])] == ["buckets"]


class Watched:
    """SageMaker and CloudWatch as the function asks them; what it did, in order."""

    class exceptions:
        """As boto3's clients have them."""

        ClientError = ClientError

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = {"TrainingJobStatus": "InProgress", **job}
        self.did: list[str] = []
        self.is_uncounted = self.is_unstoppable = False

    def describe_training_job(self, **asked: Any) -> dict[str, Any]:
        _check_request("sagemaker", "DescribeTrainingJob", asked)
        return self.job

    def stop_training_job(self, **asked: Any) -> None:
        _check_request("sagemaker", "StopTrainingJob", asked)
        if self.is_unstoppable or self.job["TrainingJobStatus"] != "InProgress":
            refused = {"Code": "ValidationException", "Message": f"it is in status {self.job['TrainingJobStatus']}"}
            raise ClientError({"Error": refused}, "StopTrainingJob")
        self.job["TrainingJobStatus"] = "Stopping"
        self.did.append(f"stopped {asked['TrainingJobName']}")

    def put_metric_data(self, **asked: Any) -> None:
        _check_request("cloudwatch", "PutMetricData", asked)
        if self.is_uncounted:
            raise ClientError({"Error": {"Code": "Throttling", "Message": "later"}}, "PutMetricData")
        assert asked["Namespace"] == "trainyard/acme"
        self.did += [f"counted {item['MetricName']} {item['Value']}" for item in asked["MetricData"]]


def _check_request(service: str, operation: str, asked: dict[str, Any]) -> None:
    """By botocore's model."""
    model = botocore.session.get_session().get_service_model(service).operation_model(operation)
    assert ParamValidator().validate(asked, model.input_shape).generate_report() == ""


@pytest.fixture
def watched(proper_job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A job without a network, which is stopped."""
    clients = Watched({**proper_job, "VpcConfig": {}})
    monkeypatch.setattr(boto3, "client", lambda _: clients)
    return clients


def test_the_function_stops_what_breaks_a_rule_and_counts_it(
    watched: Watched, event: dict[str, Any], proper_job: dict[str, Any]
) -> None:
    broken, watched.job = watched.job, {**watched.job, "VpcConfig": proper_job["VpcConfig"]}
    assert job_guard.handler(event, None) == [] and watched.did == []
    watched.job = broken
    assert job_guard.handler(event, None) and watched.did == ["stopped acme-llama-1", "counted JobViolations-local 1"]


def test_a_job_is_stopped_though_nobody_can_count_it(watched: Watched, event: dict[str, Any]) -> None:
    """Lambda asks again after the error: then it is stopped already, and still to be counted."""
    watched.is_uncounted = True
    for _ in range(2):
        with pytest.raises(ClientError, match="Throttling"):
            job_guard.handler(event, None)
    assert watched.did == ["stopped acme-llama-1"]
    watched.is_uncounted = False
    assert job_guard.handler(event, None) and watched.did[1:] == ["counted JobViolations-local 1"]


def test_a_job_that_could_not_be_looked_at_is_named_in_the_log(
    watched: Watched, event: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm sends its reader there for the name, and what SageMaker says of too many calls has none."""

    def throttled(**_: Any) -> dict[str, Any]:
        raise ClientError({"Error": {"Code": "ThrottlingException", "Message": "Rate exceeded"}}, "DescribeTrainingJob")

    monkeypatch.setattr(watched, "describe_training_job", throttled)
    with pytest.raises(ClientError):
        job_guard.handler(event, None)
    assert event["job"] in capsys.readouterr().out


@pytest.mark.parametrize("status", ["Stopping", "Stopped", "Completed", "Failed"])
def test_a_job_that_has_ended_needs_no_stop(watched: Watched, event: dict[str, Any], status: str) -> None:
    watched.job["TrainingJobStatus"] = status
    assert job_guard.handler(event, None) and watched.did == ["counted JobViolations-local 1"]


def test_a_job_that_runs_on_is_a_failure(watched: Watched, event: dict[str, Any]) -> None:
    watched.is_unstoppable = True
    with pytest.raises(ClientError, match="StopTrainingJob"):
        job_guard.handler(event, None)
    assert watched.did == []


def test_the_template_holds_the_function_as_it_is_tested_here(account: Any) -> None:
    from pathlib import Path

    functions = account.resources(TRAINING, "AWS::Lambda::Function").values()
    (function,) = [item for item in functions if item["Description"].startswith("Re-checks")]
    assert function["Code"]["ZipFile"] == Path(job_guard.__file__).read_text()
    assert function["Handler"] == "index.handler"
    role = account.only(FOUNDATION, "AWS::IAM::Role", "RolesGuard")
    assert function["Role"] == account.arn(FOUNDATION, role)


def test_a_stopped_job_and_one_that_could_not_be_checked_ring(account: Any) -> None:
    alarms = account.resources(TRAINING, "AWS::CloudWatch::Alarm")
    ours = {name: item for name, item in alarms.items() if name.startswith("JobGuard")}
    assert {item["MetricName"] for item in ours.values()} == {"JobViolations-local", "Errors"}
    assert all(item["AlarmActions"] and item["Threshold"] == 1 for item in ours.values())
    (stopped,) = (item for item in ours.values() if item["Namespace"].startswith("trainyard/"))
    assert stopped["Statistic"] == "Maximum", "a sum would be brought down by a forged figure"


def test_breaking_the_glass_is_told(account: Any) -> None:
    (rule,) = (
        item for item in account.resources(TRAINING, "AWS::Events::Rule").values() if "operator" in item["Description"]
    )
    operator = account.arn(FOUNDATION, account.only(FOUNDATION, "AWS::IAM::Role", "RolesOperator"))
    assert rule["EventPattern"]["detail"]["requestParameters"] == {"roleArn": [operator]}
    # Rules in the ordinary state are not told of reads, and AssumeRole counts as one.
    assert rule["State"] == "ENABLED_WITH_ALL_CLOUDTRAIL_MANAGEMENT_EVENTS"
    (target,) = rule["Targets"]
    (policy,) = account.resources(TRAINING, "AWS::SNS::TopicPolicy").values()
    statements = {item["Sid"]: item for item in policy["PolicyDocument"]["Statement"]}
    assert target["Arn"] == statements["BrokenGlass"]["Resource"]


def test_the_operator_needs_a_second_factor_of_this_hour(account: Any) -> None:
    role = account.resources(FOUNDATION, "AWS::IAM::Role")[account.only(FOUNDATION, "AWS::IAM::Role", "RolesOperator")]
    (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Condition"] == {
        "Bool": {"aws:MultiFactorAuthPresent": "true"},
        "NumericLessThan": {"aws:MultiFactorAuthAge": "3600"},
    }
    assert role["MaxSessionDuration"] == 3600
