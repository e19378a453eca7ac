"""What a tenant's VPC endpoints let through: the tenant's own roles, on the tenant's own resources.

Who is inside the network with somebody else's credentials, be it another tenant's or another account's, carries nothing
out by them, and the tenant's roles reach nobody else's things from here, whatever other policy somebody attaches.
Attached after the resources are there: nothing depends on an endpoint, so that this closes no circle.
"""

from collections.abc import Mapping, Sequence

from aws_cdk import aws_iam as iam

from stacks.constructs.machine_permissions import (
    REGISTER,
    SESSIONS,
    WRITE_MACHINE_LOGS,
    machine_logs,
    own_clusters,
)
from stacks.constructs.permissions import TenantResources, log_group_arns, parameter_arns
from stacks.constructs.statements import allow
from stacks.naming import TAG_TENANT, TenantScope
from trainyard.spec.platform import TRAINING_LOG_GROUP

ANYTHING = ("*",)
"""For actions that name no resource."""


def open_passages(tenant: TenantScope, resources: TenantResources) -> None:
    """Give every endpoint of the tenant's network its policy."""
    statements = {
        "SageMaker": _sagemaker(tenant),
        "Logs": _logs(tenant, resources),
        "Metrics": _metrics(tenant),
        "EcrApi": [
            _own(tenant, "LogInToRegistry", ["ecr:GetAuthorizationToken"], ANYTHING),
            _images(tenant, resources),
        ],
        "EcrDocker": [_images(tenant, resources)],
        "Kms": [_own(tenant, "OwnKeys", ["kms:*"], _keys(resources))],
        "Parameters": [
            _own(tenant, "OwnParameters", ["ssm:GetParameter", "ssm:GetParameters"], parameter_arns(tenant))
        ],
        "Sts": [_own(tenant, "WhoAmI", ["sts:GetCallerIdentity"], ANYTHING)],
    }
    if tenant.hyperpod:
        statements["Sessions"] = [_own(tenant, "TakeSessions", SESSIONS, ANYTHING)]
        statements["Logs"].append(_own(tenant, "MachineLogs", WRITE_MACHINE_LOGS, machine_logs(tenant)))
    elif tenant.spec.cluster is not None:
        tag = {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}
        statements["Cluster"] = [_own(tenant, "OwnCluster", [REGISTER], own_clusters(tenant), equals=tag)]
        statements["Sessions"] = [_own(tenant, "TakeSessions", SESSIONS, ANYTHING)]
        statements["Parameters"].append(_own(tenant, "SayAlive", ["ssm:UpdateInstanceInformation"], ANYTHING))
    if tenant.spec.tracking is not None:
        statements["Tracking"] = [_own(tenant, "OwnServer", ["sagemaker-mlflow:*"], [tenant.tracking_server])]
    endpoints = resources.network.interface_endpoints
    assert set(statements) == set(endpoints), "an endpoint without a policy lets everything through"
    for name, endpoint in endpoints.items():
        for statement in statements[name]:
            endpoint.add_to_policy(statement)
    objects = [arn for bucket in resources.buckets.all for arn in (bucket.bucket_arn, bucket.arn_for_objects("*"))]
    # A bucket's ARN names no account: a bucket of ours that was deleted could be somebody else's by now.
    here = {"aws:ResourceAccount": tenant.environment.account}
    resources.network.s3_endpoint.add_to_policy(_own(tenant, "OwnBuckets", ["s3:*"], objects, equals=here))
    tables = [tenant.arn("dynamodb", f"table/{tenant.stack_name('')}*")]
    resources.network.tables_endpoint.add_to_policy(_own(tenant, "OwnTables", ["dynamodb:*"], tables))


def _own(
    tenant: TenantScope,
    sid: str,
    actions: list[str],
    arns: Sequence[str],
    *,
    equals: Mapping[str, str] | None = None,
    like: Mapping[str, list[str]] | None = None,
) -> iam.PolicyStatement:
    """An Allow to the tenant's roles, where the request also states what `equals` and `like` say."""
    conditions: dict[str, Mapping[str, object]] = {"ArnLike": {"aws:PrincipalArn": tenant.role_pattern}}
    conditions |= {"StringEquals": equals} if equals else {}
    conditions |= {"StringLike": like} if like else {}
    return iam.PolicyStatement.from_json({**allow(sid, actions, list(arns), conditions), "Principal": {"AWS": "*"}})


def _sagemaker(tenant: TenantScope) -> list[iam.PolicyStatement]:
    names = ["AddTags", "CreateModelPackage*", "DescribeModelPackage*", "ListModelPackages"]
    models = [f"sagemaker:{name}" for name in names]
    return [
        _own(tenant, "OwnJobs", ["sagemaker:*"], [*tenant.training_jobs, *tenant.training_plans.values()]),
        _own(tenant, "OwnModels", models, [tenant.model_packages, tenant.model_package_groups]),
        _own(tenant, "ListJobs", ["sagemaker:ListTrainingJobs"], ANYTHING),
    ]


def _logs(tenant: TenantScope, resources: TenantResources) -> list[iam.PolicyStatement]:
    """SageMaker's group is everybody's: there only to open streams, and to write and read those of own jobs."""
    groups = (resources.logs.group.log_group_name, resources.logs.flows.log_group_name)
    shared = ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams"]
    return [
        _own(tenant, "OwnGroups", ["logs:*"], log_group_arns(tenant, *groups)),
        _own(tenant, "OwnStreams", ["logs:GetLogEvents", "logs:PutLogEvents"], tenant.job_log_streams),
        _own(tenant, "TrainingGroup", shared, log_group_arns(tenant, TRAINING_LOG_GROUP)),
    ]


def _metrics(tenant: TenantScope) -> list[iam.PolicyStatement]:
    spaces = {"cloudwatch:namespace": [f"trainyard/{tenant.name}", "/aws/sagemaker/*"]}
    reading = ["cloudwatch:DescribeAlarms", "cloudwatch:GetMetricData", "cloudwatch:ListMetrics"]
    return [
        _own(tenant, "OwnMetrics", ["cloudwatch:PutMetricData"], ANYTHING, like=spaces),
        _own(tenant, "ReadMetrics", reading, ANYTHING),
    ]


def _images(tenant: TenantScope, resources: TenantResources) -> iam.PolicyStatement:
    actions = ["ecr:BatchCheck*", "ecr:BatchGet*", "ecr:DescribeImages", "ecr:GetDownload*"]
    return _own(tenant, "Images", actions, [resources.images.repository_arn])


def _keys(resources: TenantResources) -> list[str]:
    keys = resources.keys
    return [keys.data.key_arn, keys.checkpoints.key_arn, keys.artifacts.key_arn, keys.logs.key_arn]
