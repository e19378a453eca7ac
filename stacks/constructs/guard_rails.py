"""What no role of a tenant can do, whatever other policy somebody attaches to it: the permissions boundary.

Explicit Denies, because a conditional Allow is defeated by any other Allow. The condition keys that exist for
CreateTrainingJob are few: instance count, spot and output path have none (quotas, buckets and keys hold those). They
are spelled as the service authorization reference of September 2026 has them: sagemaker:OutputKmsKey and VolumeKmsKey
of older pages are on no request any more, so that a rule on their absence would refuse every job.
"""

import json
from collections.abc import Mapping
from typing import Any

from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.acknowledged import acknowledge_wildcards
from stacks.constructs.machine_permissions import machine_actions, only_login_nodes
from stacks.constructs.network import TenantNetwork
from stacks.constructs.statements import Conditions, Statement, allow, deny, deny_outside, policy_document
from stacks.constructs.tracking import BOUNDED_ACTIONS, RUN_ACTIONS
from stacks.naming import PARTITION, TAG_TENANT, TenantScope
from trainyard.errors import InputError
from trainyard.hardware import instance

MAX_POLICY_CHARACTERS = 6144
"""IAM: of a managed policy, white space not counted."""

MAX_INLINE_CHARACTERS = 10_240
"""IAM: of all inline policies of a role together, counted in the same way."""

BUCKET_ARN_CHARACTERS = 76
"""At most."""

ROLE_NAME_CHARACTERS = 64
"""At most, without the path."""

_SUFFIX_CHARACTERS = 14
"""What CloudFormation adds to the names that it makes of a stack's and a resource's: a dash and 12 or 13 characters."""

_IDENTIFIED = ("Network", "FileSystem", "SmallFiles")
"""Of what resources, by the begin of their logical ids, a reference is an id that AWS makes; of others it is a name."""

CREATE_JOB = "sagemaker:CreateTrainingJob"
_CREATE_JOBS = "sagemaker:CreateTrain*"
"""The same and what may be called alike, in few characters: denied where a condition isn't met."""
INVOKE = "lambda:InvokeFunction"
SUBMIT_JOB = "batch:SubmitServiceJob"
TAG_JOB = "batch:TagResource"
STOP_QUEUED_JOB = "batch:TerminateServiceJob"
MANAGE_JOB_ROLES = ["iam:CreateRole", "iam:DeleteRole", "iam:DeleteRolePolicy", "iam:PutRolePolicy", "iam:TagRole"]
"""Of a broker that makes a role for each job. Nothing that changes a role's trust or its boundary is among them."""
_ON_ROLES = ["iam:C*", "iam:D*", "iam:Pu*", "iam:T*"]
"""The same and more of their kind, in few characters: denied to others and elsewhere."""
REGISTER_MODELS = ["sagemaker:CreateModelPackage*"]
"""A model package and its group."""

ALLOWED_ACTIONS = [
    "batch:Describe*",
    "batch:List*",
    "cloudwatch:Describe*",
    "cloudwatch:Get*",
    "cloudwatch:List*",
    "cloudwatch:PutMetricData",
    "ec2:CreateNetworkInterface*",
    "ec2:DeleteNetworkInterface*",
    "ec2:Describe*",
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:Describe*",
    "ecr:GetAuthorizationToken",
    "ecr:GetDownloadUrlForLayer",
    "fsx:Describe*",
    "iam:Get*",
    "iam:List*",
    "iam:PassRole",
    "kms:CreateGrant",
    "kms:Decrypt",
    "kms:DescribeKey",
    "kms:Encrypt",
    "kms:GenerateDataKey*",
    "kms:GetKey*",
    "logs:CreateLogGroup",
    "logs:CreateLogStream",
    "logs:Describe*",
    "logs:*LogEvents",
    "s3:AbortMultipartUpload",
    "s3:DeleteObject",
    "s3:Get*",
    "s3:List*",
    "s3:PutObject",
    "s3:PutObjectTagging",
    "sagemaker:AddTags",
    *REGISTER_MODELS,
    CREATE_JOB,
    "sagemaker:Describe*",
    "sagemaker:List*",
    "sagemaker:StopTrainingJob",
    "servicequotas:Get*",
    "servicequotas:List*",
    "ssm:GetParameter",
    "ssm:GetParameterHistory",
    "ssm:GetParameters",
    "sts:GetCallerIdentity",
]
"""The most that the roles' own policies, which also name the resources, can make use of. Not in it, among others:
batch:SubmitServiceJob (Batch starts jobs by a service-linked role that no condition below binds, with an unchecked
payload; only a broker of a tenant that queues has it, see `_queue`), sts:AssumeRole (no hop to another tenant's role),
sagemaker:UpdateTrainingJob, and every other kind of job."""


NEVER = [
    "batch:DescribeServiceJob",
    "batch:RegisterJobDefinition",
    "batch:SubmitJob",
    "ec2:CreateFleet",
    "ec2:Request*",
    "ec2:RunInstances",
    "ecs:RunTask",
    "lambda:Create*",
    "pcs:Create*",
    "sagemaker:Start*",
    "sagemaker:Update*",
]
"""A training job's relatives: machines, functions, notebooks and pipelines started; and Batch's unchecked queue. None
of these is in the list above, so none is allowed; denied by name too, so that no later wildcard there lets one in.
`OwnThings` denies to create anything of SageMaker but the own jobs and models: AWS adds a kind of job a year. The first
of these is within that list's `Describe*`: it shows a queued job's whole request, and IAM can't scope it; listings show
names and states."""


class TenantBoundary(Construct):
    """The permissions boundary of all the tenant's roles."""

    policy: iam.ManagedPolicy

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope, network: TenantNetwork) -> None:
        super().__init__(scope, construct_id)
        allowed = [*ALLOWED_ACTIONS, *([INVOKE] if tenant.brokered else [])]
        allowed += MANAGE_JOB_ROLES if tenant.isolates_jobs else []
        tracks = tenant.spec.tracking is not None
        allowed += BOUNDED_ACTIONS if tracks else []
        if tenant.queued:
            allowed = sorted({*allowed, SUBMIT_JOB, TAG_JOB, STOP_QUEUED_JOB} - {CREATE_JOB})
        self.policy = iam.ManagedPolicy(
            self,
            "Policy",
            path=tenant.iam_path,
            description=f"The most that any role of tenant {tenant.name} can ever do",
            document=policy_document(
                [
                    allow("Services", [*allowed, *machine_actions(tenant)], ["*"]),
                    *(_queue(tenant) if tenant.queued else [*_unstated(tenant), *_outside(tenant, network)]),
                    deny("Never", [*NEVER, CREATE_JOB if tenant.queued else SUBMIT_JOB], {}),
                    _own_things(tenant),
                    *_broker(tenant),
                    *only_login_nodes(tenant),
                    deny(
                        "OwnAccount", ["s3:*"], {"StringNotEqualsIfExists": {"aws:ResourceAccount": _account(tenant)}}
                    ),
                    # A negated operator also matches an absent key: a role is passed to SageMaker or to nobody.
                    deny(
                        "PassToSageMaker",
                        ["iam:PassRole"],
                        {"StringNotEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
                    ),
                ]
            ),
        )
        grants_nothing = (
            "A boundary grants nothing: it is the most that the roles' own policies, exact to the resource,"
        )
        reasons = {"Services": f"{grants_nothing} can make use of."}
        _check_size(acknowledge_wildcards(self.policy, tenant, reasons), tenant)


def _own_things(tenant: TenantScope) -> Statement:
    """What may be made, stopped, called, passed and written to is the tenant's own, each by its ARN.

    One statement for all, because a boundary holds 6,144 characters: an ARN of one kind is none of another, so each
    action is held to its own kind as if it stood alone. SageMaker's other jobs (tuning, processing, clusters, endpoints
    and what comes yet) have ARNs of kinds that aren't here.
    """
    tracks = tenant.spec.tracking is not None
    roles = tenant.each_job_role_pattern if tenant.isolates_jobs else tenant.job_role_pattern
    return deny_outside(
        "OwnThings",
        [
            "sagemaker:Create*",
            "sagemaker:StopTrainingJob",
            "iam:PassRole",
            *(_ON_ROLES if tenant.isolates_jobs else []),
            *([INVOKE] if tenant.brokered else []),
            *(RUN_ACTIONS if tracks else []),
        ],
        [
            *tenant.training_jobs,
            *tenant.training_plans.values(),
            tenant.model_packages,
            tenant.model_package_groups,
            roles,
            *([tenant.broker_arn] if tenant.brokered else []),
            *([tenant.tracking_server] if tracks else []),  # runs on it, and a link to its page
        ],
    )


def _broker(tenant: TenantScope) -> list[Statement]:
    """No job is started but by the broker, whatever a person is allowed besides. Where jobs have roles of their own, it
    makes those under this boundary: by a pattern, as a policy can't name itself. What else that fits grants nothing."""
    if not tenant.brokered:
        return []
    submit = [SUBMIT_JOB, TAG_JOB] if tenant.queued else [_CREATE_JOBS]
    submit += _ON_ROLES if tenant.isolates_jobs else []
    # A negated operator also matches an absent key: a role without a boundary is neither made nor given rights.
    bounded = deny(
        "JobRolesBounded",
        ["iam:CreateRole", "iam:PutRolePolicy"],
        {"StringNotLike": {"iam:PermissionsBoundary": tenant.policy_pattern}},
    )
    return [
        deny("BrokerSubmits", submit, {"ArnNotLike": {"aws:PrincipalArn": tenant.broker_role_pattern}}),
        *([bounded] if tenant.isolates_jobs else []),
    ]


def _queue(tenant: TenantScope) -> list[Statement]:
    """In the place of what binds CreateTrainingJob, which Batch then calls as itself: only the own share of the own
    types' queues, with the own tag. What a job asks of SageMaker no condition key tells; the broker writes it."""
    tag = f"aws:RequestTag/{TAG_TENANT}"
    return [
        deny_outside(
            "OwnShare", [SUBMIT_JOB], [*tenant.training_queues.values(), tenant.share_pattern, tenant.service_jobs]
        ),
        deny("QueuedOwnTag", [SUBMIT_JOB], {"StringNotEquals": {tag: tenant.name}}),
        # A negated operator also matches an absent key: a job that nobody has tagged is not ended either.
        deny("OwnQueuedJobs", [STOP_QUEUED_JOB], {"StringNotEquals": {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}}),
    ]


def _check_size(document: Mapping[str, Any], tenant: TenantScope) -> None:
    """InputError for a boundary that IAM wouldn't take half-way through a deployment."""
    length = policy_characters(document, tenant)
    if length > MAX_POLICY_CHARACTERS:
        raise InputError(
            f"tenants.{tenant.name}: with {counted(tenant)} the tenant's permissions boundary would have {length:,} "
            f"characters, and IAM takes {MAX_POLICY_CHARACTERS:,}: name fewer types or training plans, split the "
            "tenant, or leave out its cluster, tracking or job_isolation"
        )


def counted(tenant: TenantScope) -> str:
    """What of a tenant makes its policies longer, each one: for messages."""
    numbers = {"instance type": len(tenant.instance_types), "training plan": len(tenant.spec.training_plans)}
    return " and ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in numbers.items())


def policy_characters(document: Mapping[str, Any], tenant: TenantScope) -> int:
    """How long a resolved policy of the tenant's foundation will be at most, as IAM counts: without white space,
    references as long as what they refer to."""
    return len(json.dumps(_as_deployed(document, tenant), separators=(",", ":")))


def _as_deployed(value: Any, tenant: TenantScope) -> Any:
    """A document with ARNs, ids and names as long as AWS's in the place of references."""
    if isinstance(value, list):
        return [_as_deployed(item, tenant) for item in value]
    if not isinstance(value, dict):
        return value
    if "Fn::Join" in value:
        separator, parts = value["Fn::Join"]
        return str(separator).join(map(str, _as_deployed(parts, tenant)))
    if len(value) == 1 and (text := _referred_to(value, tenant)):
        return text
    return {key: _as_deployed(item, tenant) for key, item in value.items()}


def _referred_to(value: Mapping[str, Any], tenant: TenantScope) -> str | None:
    """As long as what a reference refers to; None for what is none."""
    ((function, argument),) = value.items()
    if function == "Fn::GetAtt":
        return _longest_arn(argument[0], tenant) if argument[1] == "Arn" else "sg-0123456789abcdef0"
    if function == "Fn::ImportValue":  # the platform's: the image repository's ARN is the one that policies name
        return tenant.arn("ecr", f"repository/trainyard-{tenant.environment.name}")
    if function == "Ref":
        is_identified = argument.startswith(_IDENTIFIED)
        return "subnet-0123456789abcdef0" if is_identified else _generated_name(argument, tenant)
    return None


def _generated_name(logical_id: str, tenant: TenantScope) -> str:
    """As long as the name that CloudFormation makes where none is stated."""
    return f"{tenant.stack_name('foundation')}-{logical_id}" + "x" * _SUFFIX_CHARACTERS


def _longest_arn(logical_id: str, tenant: TenantScope) -> str:
    """As long as the ARN of that resource can be, by what its logical id begins with; any other's is a bucket's, a
    key's or shorter."""
    if logical_id.startswith("Roles"):
        return f"arn:{PARTITION}:iam::{_account(tenant)}:role{tenant.iam_path}jobs/" + "x" * ROLE_NAME_CHARACTERS
    if logical_id.startswith("Logs"):
        return tenant.arn("logs", f"log-group:{_generated_name(logical_id, tenant)}:*")
    key = tenant.arn("kms", "key/01234567-89ab-cdef-0123-456789abcdef")
    return key.ljust(BUCKET_ARN_CHARACTERS, "x")


def _account(tenant: TenantScope) -> str:
    return tenant.environment.account


def _unstated(tenant: TenantScope) -> list[Statement]:
    """What a job must say: an absent key matches none of the value conditions in `_outside`."""
    required = {
        "JobsSayVpc": "sagemaker:VpcSubnets",
        "JobsSayGroups": "sagemaker:VpcSecurityGroupIds",
        "JobsSayTypes": "sagemaker:InstanceTypes",
        "JobsSayOutputKey": "sagemaker:OutputKmsKeyArn",
    }
    denials = [deny(sid, [_CREATE_JOBS], {"Null": {key: "true"}}) for sid, key in required.items()]
    without_nvme = [kind for kind in tenant.instance_types if not instance(kind).local_nvme_gib]
    if without_nvme:
        # Types with local NVMe refuse a volume key (hardware encrypts those disks): demanding it of every type would
        # forbid GPU training.
        volume: Conditions = {
            "Null": {"sagemaker:VolumeKmsKeyArn": "true"},
            "ForAnyValue:StringEquals": {"sagemaker:InstanceTypes": without_nvme},
        }
        denials.append(deny("JobsSayVolumeKey", [_CREATE_JOBS], volume))
    return denials


def _outside(tenant: TenantScope, network: TenantNetwork) -> list[Statement]:
    """What a job may not say. ForAnyValue with a negated operator: one foreign value among several is enough."""
    values: dict[str, Conditions] = {
        "JobsOwnSubnets": {
            "ForAnyValue:StringNotEquals": {"sagemaker:VpcSubnets": [network.training_subnet.subnet_id]}
        },
        "JobsOwnGroups": {
            "ForAnyValue:StringNotEquals": {
                "sagemaker:VpcSecurityGroupIds": [network.training_security_group.security_group_id]
            }
        },
        "JobsQueueTypes": {"ForAnyValue:StringNotEquals": {"sagemaker:InstanceTypes": tenant.instance_types}},
        # IfExists: true of an absent key too. A job that states no time is denied, as it would run for SageMaker's day.
        "JobsMaxTime": {
            "NumericGreaterThanIfExists": {"sagemaker:MaxRuntimeInSeconds": str(tenant.max_runtime_seconds)}
        },
        # A negated operator also matches an absent key: an untagged job is denied too.
        "JobsOwnTag": {"StringNotEquals": {f"aws:RequestTag/{TAG_TENANT}": tenant.name}},
        # Machines that stay after their job are billed as if it ran. Who states no time keeps none.
        "JobsKeepWarm": {"NumericGreaterThan": {"sagemaker:KeepAlivePeriod": str(tenant.warm_pool_seconds)}},
        # Remote debug opens a shell with the job's role.
        "JobsNoShell": {"Bool": {"sagemaker:EnableRemoteDebug": "true"}},
    }
    return [deny(sid, [_CREATE_JOBS], conditions) for sid, conditions in values.items()]
