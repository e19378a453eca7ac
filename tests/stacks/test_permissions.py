"""What each role may do on its own tenant's things, and that it may do none of it on another's."""

from collections.abc import Callable
from typing import Any

import pytest

REGIONAL = "us-east-1:123456789012"
LOGS = f"arn:aws:logs:{REGIONAL}:log-group:/aws/sagemaker/TrainingJobs"

# role, action, resource with {tenant}, {data} and {checkpoints} to fill in, context
ALLOWED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("Job", "s3:GetObject", "{data}/jobs/x/resolved_job.json", {}),
    ("Job", "s3:GetObject", "{data}/corpus/train.jsonl", {}),
    ("Job", "s3:ListBucket", "{data}", {}),
    ("Job", "s3:PutObject", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED", {}),
    ("Job", "s3:DeleteObject", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED", {}),
    ("Job", "s3:ListBucket", "{checkpoints}", {}),
    ("Job", "logs:CreateLogStream", LOGS + ":*", {}),
    ("Job", "logs:PutLogEvents", LOGS + ":log-stream:{tenant}-x/algo-1-1", {}),
    ("Launcher", "s3:PutObject", "{data}/jobs/x/record.json", {}),
    ("Launcher", "s3:GetObject", "{checkpoints}/jobs/x/metrics.jsonl", {}),
    ("Launcher", "ssm:GetParameter", f"arn:aws:ssm:{REGIONAL}:parameter/trainyard/local/{{tenant}}/contract", {}),
    ("Launcher", "sagemaker:DescribeTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x", {}),
    ("Launcher", "sagemaker:StopTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x", {}),
    (
        "Submitter",
        "sagemaker:AddTags",
        f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x",
        {"aws:RequestTag/trainyard:tenant": "{tenant}"},
    ),
    ("Launcher", "logs:GetLogEvents", LOGS + ":log-stream:{tenant}-x/algo-1-1", {}),
    ("Submitter", "iam:PassRole", "{job_role}", {"iam:PassedToService": "sagemaker.amazonaws.com"}),
    ("Job", "s3:GetObject", "{artifacts}/models/m/x/config.json", {}),
    ("Launcher", "s3:PutObject", "{artifacts}/models/m/x/config.json", {}),
    ("Launcher", "s3:PutObject", "{artifacts}/registry/m/x.json", {}),
    ("Launcher", "sagemaker:CreateModelPackage", f"arn:aws:sagemaker:{REGIONAL}:model-package/{{tenant}}-m/1", {}),
    ("Launcher", "sagemaker:ListModelPackages", f"arn:aws:sagemaker:{REGIONAL}:model-package/{{tenant}}-m/*", {}),
    (
        "Launcher",
        "sagemaker:CreateModelPackageGroup",
        f"arn:aws:sagemaker:{REGIONAL}:model-package-group/{{tenant}}-m",
        {"aws:RequestTag/trainyard:tenant": "{tenant}"},
    ),
    ("Auditor", "s3:GetObject", "{artifacts}/registry/m/x.json", {}),
    ("Auditor", "sagemaker:DescribeModelPackage", f"arn:aws:sagemaker:{REGIONAL}:model-package/{{tenant}}-m/1", {}),
    ("Operator", "s3:DeleteObject", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED", {}),
    ("Launcher", "s3:DeleteObject", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED", {}),
    ("Operator", "s3:PutObject", "{data}/corpus/train.jsonl", {}),
    ("Operator", "sagemaker:StopTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x", {}),
    ("Guard", "sagemaker:DescribeTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x", {}),
    ("Guard", "sagemaker:StopTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x", {}),
    ("Auditor", "s3:GetObject", "{data}/jobs/x/record.json", {}),
    ("Auditor", "sagemaker:DescribeTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x", {}),
    ("Auditor", "iam:GetRolePolicy", "{job_role}", {}),
]


def _names(account: Any, tenant: str) -> dict[str, str]:
    stack = f"trainyard-local-{tenant}-foundation"
    return {
        "tenant": tenant,
        "data": account.arn(stack, account.only(stack, "AWS::S3::Bucket", "BucketsData")),
        "checkpoints": account.arn(stack, account.only(stack, "AWS::S3::Bucket", "BucketsCheckpoints")),
        "artifacts": account.arn(stack, account.only(stack, "AWS::S3::Bucket", "BucketsArtifacts")),
        "job_role": account.arn(stack, account.only(stack, "AWS::IAM::Role", "RolesJob")),
    }


def _fill(text: str, names: dict[str, str]) -> str:
    return text.format(**names)


@pytest.mark.parametrize("case", ALLOWED, ids=lambda case: f"{case[0]} {case[1]} {case[2][-30:]}")
@pytest.mark.parametrize(("tenant", "other"), [("acme", "globex"), ("globex", "acme")])
def test_own_things_are_allowed_and_the_same_of_another_tenant_are_not(
    account: Any, decide: Callable[..., str], case: Any, tenant: str, other: str
) -> None:
    role, action, resource, context = case
    role = {"acme": "Launcher", "globex": "Broker"}[tenant] if role == "Submitter" else role
    own, foreign = _names(account, tenant), _names(account, other)
    own_keys = {key: _fill(value, own) for key, value in context.items()}
    assert decide(tenant, role, action, _fill(resource, own), keys=own_keys) == "Allow"
    if "{" in resource:
        foreign_keys = {key: _fill(value, foreign) for key, value in context.items()}
        assert decide(tenant, role, action, _fill(resource, foreign), keys=foreign_keys) != "Allow"


@pytest.mark.parametrize(
    ("role", "action", "resource"),
    [
        ("Job", "s3:PutObject", "{data}/jobs/x/record.json"),
        ("Job", "s3:PutObject", "{checkpoints}/elsewhere/x"),
        ("Job", "s3:DeleteObjectVersion", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED"),
        ("Job", "sagemaker:CreateTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x"),
        ("Job", "iam:PassRole", "{job_role}"),
        ("Job", "logs:GetLogEvents", LOGS + ":log-stream:{tenant}-x/algo-1-1"),
        ("Launcher", "s3:PutObject", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED"),
        ("Launcher", "s3:DeleteObject", "{checkpoints}/jobs/x/metrics.jsonl"),
        ("Launcher", "s3:DeleteObjectVersion", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED"),
        ("Resumer", "sagemaker:CreateTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x"),
        ("Resumer", "s3:GetObject", "{data}/corpus/train.jsonl"),
        ("Resumer", "s3:PutObject", "{data}/jobs/x/spec/resolved_job.json"),
        ("Resumer", "s3:GetObject", "{checkpoints}/jobs/x/checkpoints/step-00000010/COMMITTED"),
        ("Job", "s3:PutObject", "{artifacts}/models/m/x/config.json"),
        ("Job", "sagemaker:CreateModelPackage", f"arn:aws:sagemaker:{REGIONAL}:model-package/{{tenant}}-m/1"),
        ("Launcher", "s3:DeleteObject", "{artifacts}/models/m/x/config.json"),
        ("Launcher", "sagemaker:CreateModelPackage", f"arn:aws:sagemaker:{REGIONAL}:model-package/{{tenant}}-m"),
        ("Launcher", "sagemaker:UpdateModelPackage", f"arn:aws:sagemaker:{REGIONAL}:model-package/{{tenant}}-m/1"),
        ("Launcher", "sagemaker:DeleteModelPackage", f"arn:aws:sagemaker:{REGIONAL}:model-package/{{tenant}}-m/1"),
        ("Auditor", "s3:GetObject", "{artifacts}/models/m/x/config.json"),
        ("Launcher", "s3:DeleteObjectVersion", "{data}/corpus/train.jsonl"),
        ("Launcher", "logs:FilterLogEvents", LOGS + ":*"),
        ("Launcher", "iam:PassRole", "{job_role}"),  # to no service but SageMaker
        ("Operator", "s3:DeleteObjectVersion", "{data}/corpus/train.jsonl"),
        ("Operator", "sagemaker:CreateTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x"),
        ("Operator", "iam:PassRole", "{job_role}"),
        ("Guard", "s3:GetObject", "{data}/corpus/train.jsonl"),
        ("Guard", "logs:GetLogEvents", LOGS + ":log-stream:{tenant}-x/algo-1-1"),
        ("Auditor", "s3:PutObject", "{data}/jobs/x/record.json"),
        ("Auditor", "s3:GetObject", "{data}/corpus/train.jsonl"),
        ("Auditor", "sagemaker:StopTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x"),
        ("Auditor", "sagemaker:CreateTrainingJob", f"arn:aws:sagemaker:{REGIONAL}:training-job/{{tenant}}-x"),
    ],
)
def test_each_role_stays_inside_its_work(
    account: Any, decide: Callable[..., str], role: str, action: str, resource: str
) -> None:
    tenant = "globex" if role == "Resumer" else "acme"
    assert decide(tenant, role, action, _fill(resource, _names(account, tenant))) != "Allow"


def test_only_sagemaker_acting_for_this_account_takes_the_job_role(account: Any) -> None:
    stack = "trainyard-local-acme-foundation"
    trust = account.resources(stack, "AWS::IAM::Role")[account.only(stack, "AWS::IAM::Role", "RolesJob")]
    (statement,) = trust["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}


def test_a_wildcard_resource_stands_only_with_actions_that_name_nothing(account: Any) -> None:
    """Every action that a tenant's role has on `*`: none of them reads or changes what is in a resource."""
    stack = "trainyard-local-acme-foundation"
    found: set[str] = set()
    for name, policy in account.resources(stack, "AWS::IAM::Policy").items():
        for statement in policy["PolicyDocument"]["Statement"]:
            if name.startswith("Permissions") and statement["Effect"] == "Allow" and statement["Resource"] == "*":
                actions = statement["Action"]
                found |= set(actions if isinstance(actions, list) else [actions])
    listings = {action for action in found if action.split(":")[1].startswith(("Describe", "List"))}
    assert found - listings == {
        "cloudwatch:GetMetricData",
        "cloudwatch:PutMetricData",
        "ecr:GetAuthorizationToken",
        "servicequotas:GetServiceQuota",
        "sts:GetCallerIdentity",
    }


@pytest.mark.parametrize("tenant", ["acme", "globex"])
def test_a_job_writes_its_own_streams_and_no_line_of_the_brokers_audit(
    account: Any, decide: Callable[..., str], tenant: str
) -> None:
    stack = f"trainyard-local-{tenant}-foundation"
    group = account.identifier(stack, account.only(stack, "AWS::Logs::LogGroup", "LogsGroup"))
    streams = f"arn:aws:logs:{REGIONAL}:log-group:{group}:log-stream"
    assert decide(tenant, "Job", "logs:PutLogEvents", f"{streams}:{tenant}-x/algo-1-1") == "Allow"
    assert decide(tenant, "Job", "logs:PutLogEvents", f"{streams}:2026/01/01/[$LATEST]0a1b") == "ImplicitDeny"
    assert decide(tenant, "Guard", "logs:PutLogEvents", f"{streams}:2026/01/01/[$LATEST]0a1b") == "Allow"


def test_a_launcher_calls_its_own_broker_which_alone_writes_its_ledger(
    account: Any, decide: Callable[..., str]
) -> None:
    own, call = _names(account, "globex"), "lambda:InvokeFunction"
    function = f"arn:aws:lambda:{REGIONAL}:function:trainyard-local-globex-broker"
    assert decide("globex", "Launcher", call, function) == "Allow"
    assert decide("acme", "Launcher", call, function) == "ImplicitDeny"
    ledger = f"{own['checkpoints']}/broker/ledger-2026-01.json"
    assert decide("globex", "Broker", "s3:PutObject", ledger) == "Allow"
    assert decide("globex", "Broker", "s3:GetObject", f"{own['data']}/jobs/x/record.json") == "Allow"
    for role, action, what in (
        ("Launcher", "s3:PutObject", ledger),
        ("Job", "s3:PutObject", ledger),
        ("Broker", "s3:PutObject", f"{own['data']}/jobs/x/record.json"),
        ("Broker", "s3:GetObject", f"{own['data']}/corpus/train.jsonl"),
        ("Broker", "s3:PutObject", f"{own['checkpoints']}/jobs/x/metrics.jsonl"),
    ):
        assert decide("globex", role, action, what) == "ImplicitDeny"
