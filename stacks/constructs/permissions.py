"""What a tenant's roles may do. Written out, not granted by the constructs: the least that each one needs is exact to
the prefix, and a grant would widen the key policies without anybody reading it."""

from dataclasses import dataclass

from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.acknowledged import acknowledge_wildcards
from stacks.constructs.guard_rails import (
    CREATE_JOB,
    INVOKE,
    MAX_INLINE_CHARACTERS,
    SUBMIT_JOB,
    TAG_JOB,
    counted,
    policy_characters,
)
from stacks.constructs.identity import TenantRoles
from stacks.constructs.keys import READ, READ_WRITE, TenantKeys
from stacks.constructs.logs import TenantLogs
from stacks.constructs.machine_permissions import (
    MACHINE_WILDCARDS,
    SCRIPTS_FOLDER,
    be_hyperpod,
    join_cluster,
    open_shells,
    take_sessions,
)
from stacks.constructs.network import TenantNetwork
from stacks.constructs.small_files import TenantSmallFiles, use_files
from stacks.constructs.statements import Statement, allow, deny, policy_document
from stacks.constructs.storage import TenantBuckets, TenantFileSystem
from stacks.constructs.tracking import TRACKING_WILDCARDS, log_runs, see_runs, track_jobs
from stacks.naming import TAG_TENANT, TenantScope
from trainyard.errors import InputError
from trainyard.spec.platform import TRACKING_FOLDER, TRAINING_LOG_GROUP

LIST_BUCKET = ["s3:GetBucketLocation", "s3:ListBucket", "s3:ListBucketMultipartUploads"]
READ_OBJECTS = ["s3:GetObject", "s3:GetObjectVersion"]
ADD_OBJECTS = ["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts", "s3:PutObject"]
WRITE_OBJECTS = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:ListMultipartUploadParts", "s3:PutObject"]

ANYTHING = ["*"]
"""Only for actions that AWS can't scope to a resource, or that give a name and nothing else."""


SHARED_GROUP = "SageMaker's one log group for all jobs of the account; streams are told apart by the tenant's name."

WILDCARDS = {
    **MACHINE_WILDCARDS,
    **TRACKING_WILDCARDS,
    "CountViolations": "PutMetricData has no resource; the condition holds it to the tenant's namespace.",
    "CreateTrainingLogGroup": SHARED_GROUP,
    "FindFileSystem": "DescribeFileSystems has no resource: it shows that file systems exist, and nothing in them.",
    "FindJobRoles": "ListRoles has no resource: it shows that roles exist; the function looks at those of its path.",
    "FindLogs": SHARED_GROUP,
    "FindQueuedJobs": "ListServiceJobs has no resource: it shows names and states of a queue's jobs, no requests.",
    "JoinNetwork": "An interface's id is made with it; subnet and group, named beside it, are the tenant's own.",
    "LeaveNetwork": "An interface's id is made with it; the condition holds it to the tenant's VPC.",
    "ListJobs": "ListTrainingJobs has no resource: it shows names and states; descriptions are scoped to the tenant's.",
    "LogInToRegistry": "GetAuthorizationToken has no resource; what is pulled is named in a statement of its own.",
    "OpenLogStreams": SHARED_GROUP,
    "SeeAccount": "Listings without a resource: they show that things exist; the isolation proof lists them each time.",
    "SeeNetwork": "Describe* of EC2 has no resource: it shows that networks exist, and changes none.",
    "StopQueuedJobs": "Batch makes up a job's id; the condition on its tag holds it to the tenant's jobs.",
    "SubmitJobs": "Batch makes up a job's id; queue and share, named beside it, and the condition are the tenant's.",
    "TagJobs": "Batch makes up a job's id; the condition holds the tag to the tenant's own.",
    "WriteMetrics": "PutMetricData has no resource; the condition holds it to the tenant's namespace and SageMaker's.",
}
"""Sid to the reason why a statement's pattern is not the tenant's own: what a reviewer would ask."""


@dataclass(frozen=True)
class TenantResources:
    """What the tenant's roles work on."""

    network: TenantNetwork
    keys: TenantKeys
    buckets: TenantBuckets
    file_system: TenantFileSystem
    logs: TenantLogs
    images: ecr.IRepository
    small_files: TenantSmallFiles | None = None
    """EFS, where the tenant's cluster has it."""


class TenantPermissions(Construct):
    """The policies of the roles, and the denials that must name a key."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        roles: TenantRoles,
        resources: TenantResources,
    ) -> None:
        super().__init__(scope, construct_id)

        characters: dict[str, int] = {}

        def attach(name: str, role: iam.Role, statements: list[Statement]) -> None:
            policy = iam.Policy(self, name, roles=[role], document=policy_document(statements))
            resolved = acknowledge_wildcards(policy, tenant, WILDCARDS)
            holder = role.node.id
            characters[holder] = characters.get(holder, 0) + policy_characters(resolved, tenant)
            _check_size(holder, characters[holder], tenant)

        attach("Job", roles.job, _job(tenant, resources))
        if roles.nodes is not None and roles.login is not None:
            shared = use_files(tenant, resources.small_files)
            if tenant.hyperpod:
                machine = _hyperpod(tenant, resources)
                attach("Nodes", roles.nodes, [*_work(tenant, resources), *machine])
                attach("Login", roles.login, [allow("DecryptScript", READ, [resources.keys.data.key_arn]), *machine])
            else:
                attach("Nodes", roles.nodes, [*join_cluster(tenant), *_work(tenant, resources), *shared])
                attach("Login", roles.login, [*join_cluster(tenant), *take_sessions(), *shared])
        submit = [*_submit(tenant, roles), *_job_roles(tenant, roles)]
        if not tenant.brokered:
            attach("Launcher", roles.launcher, [*submit, *_launcher(tenant, resources)])
        else:
            ask = allow("AskBroker", [INVOKE], [tenant.broker_arn])
            attach("Launcher", roles.launcher, [ask, *_launcher(tenant, resources)])
            attach("Broker", roles.broker, [*submit, *_broker(tenant, resources)])
        if tenant.resumed:
            attach("Resumer", roles.resumer, [*_resumer(tenant, resources)])
        attach("Auditor", roles.auditor, _auditor(tenant, resources))
        attach("Guard", roles.guard, _guard(tenant, resources))
        attach("Operator", roles.operator, _operator(tenant, resources))
        if roles.tracking is not None:
            attach("Tracking", roles.tracking, _tracking(resources))
        # Nothing of a tenant that queues says CreateTrainingJob: its boundary refuses that altogether.
        if not tenant.queued:
            attach("GuardRails", roles.submitter, _own_keys_and_files(resources))


def _check_size(role: str, characters: int, tenant: TenantScope) -> None:
    """InputError for policies that IAM wouldn't take half-way through a deployment."""
    if characters > MAX_INLINE_CHARACTERS:
        raise InputError(
            f"tenants.{tenant.name}: with {counted(tenant)} the policies of the tenant's {role.lower()} role would "
            f"have {characters:,} characters, and IAM takes {MAX_INLINE_CHARACTERS:,} of a role: name fewer types or "
            "training plans, or split the tenant"
        )


def log_group_arns(tenant: TenantScope, *names: str) -> list[str]:
    """A log group, spelled both ways: IAM has compared the ARN with and without the trailing :* over the years."""
    return [tenant.arn("logs", f"log-group:{name}{end}") for name in names for end in ("", ":*")]


def _job(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """A running job on SageMaker, which puts it into the network and gives it a volume, as the job's role."""
    network = _network_interfaces(tenant, resources.network)
    return [*_work(tenant, resources), _volumes(resources), *network]


def _volumes(resources: TenantResources) -> Statement:
    return allow(
        "EncryptVolumes",
        ["kms:CreateGrant"],
        [resources.keys.checkpoints.key_arn],
        {"Bool": {"kms:GrantIsForAWSResource": "true"}},
    )


def _hyperpod(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """What HyperPod does as the role of any of its machines."""
    data, vpc = resources.buckets.data, resources.network.vpc.vpc_id
    # Of what lies beside the script, its folder's listing alone.
    listing = {"StringLike": {"s3:prefix": [f"{SCRIPTS_FOLDER}/*"]}}
    return [
        allow("FindScript", ["s3:ListBucket"], [data.bucket_arn], listing),
        *be_hyperpod(tenant, vpc_id=vpc, scripts=data.arn_for_objects(f"{SCRIPTS_FOLDER}/*")),
        _volumes(resources),
        allow("SeeVolumesKey", ["kms:DescribeKey"], [resources.keys.checkpoints.key_arn]),
        *_network_interfaces(tenant, resources.network),
    ]


def _work(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """A running job, wherever it is, reads data, writes checkpoints and outputs of jobs, logs and metrics."""
    buckets, keys = resources.buckets, resources.keys
    return [
        allow("ListOwnBuckets", LIST_BUCKET, [bucket.bucket_arn for bucket in buckets.all]),
        allow("ReadData", READ_OBJECTS, [buckets.data.arn_for_objects("*")]),
        allow("ReadModels", READ_OBJECTS, [buckets.artifacts.arn_for_objects("models/*")]),
        allow("ReadWriteCheckpoints", READ_OBJECTS + WRITE_OBJECTS, [buckets.checkpoints.arn_for_objects("jobs/*")]),
        allow("DecryptData", READ, [keys.data.key_arn, keys.artifacts.key_arn]),
        allow("EncryptCheckpoints", READ_WRITE, [keys.checkpoints.key_arn]),
        allow(
            "OpenLogStreams",
            ["logs:CreateLogStream", "logs:DescribeLogStreams"],
            log_group_arns(tenant, TRAINING_LOG_GROUP, resources.logs.group.log_group_name),
        ),
        allow(
            "WriteLogs",
            ["logs:PutLogEvents"],
            # By stream: the broker's audit lines stand in the own group too, and no job shall write one.
            [
                *tenant.job_log_streams,
                *(
                    tenant.arn("logs", f"log-group:{resources.logs.group.log_group_name}:log-stream:{prefix}*")
                    for prefix in tenant.job_prefixes
                ),
            ],
        ),
        allow("CreateTrainingLogGroup", ["logs:CreateLogGroup"], log_group_arns(tenant, TRAINING_LOG_GROUP)),
        allow(
            "WriteMetrics",
            ["cloudwatch:PutMetricData"],
            ANYTHING,
            {"StringLike": {"cloudwatch:namespace": [f"trainyard/{tenant.name}", "/aws/sagemaker/*"]}},
        ),
        allow("LogInToRegistry", ["ecr:GetAuthorizationToken"], ANYTHING),
        allow(
            "PullImage",
            ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
            [resources.images.repository_arn],
        ),
        allow("FindFileSystem", ["fsx:DescribeFileSystems"], ANYTHING),
        *log_runs(tenant),
    ]


def _network_interfaces(tenant: TenantScope, network: TenantNetwork) -> list[Statement]:
    """SageMaker puts a job into a VPC by network interfaces that it makes as the job's role (developer guide,
    "CreateTrainingJob API: execution role permissions"): here only in the own subnet with the own group."""
    vpc = tenant.arn("ec2", f"vpc/{network.vpc.vpc_id}")
    interfaces = tenant.arn("ec2", "network-interface/*")
    return [
        allow(
            "JoinNetwork",
            ["ec2:CreateNetworkInterface"],
            [
                tenant.arn("ec2", f"subnet/{network.training_subnet.subnet_id}"),
                tenant.arn("ec2", f"security-group/{network.training_security_group.security_group_id}"),
                interfaces,
            ],
        ),
        allow(
            "LeaveNetwork",
            [
                "ec2:CreateNetworkInterfacePermission",
                "ec2:DeleteNetworkInterface",
                "ec2:DeleteNetworkInterfacePermission",
            ],
            [interfaces],
            {"ArnEquals": {"ec2:Vpc": vpc}},
        ),
        allow(
            "SeeNetwork",
            [
                "ec2:DescribeDhcpOptions",
                "ec2:DescribeNetworkInterfaces",
                "ec2:DescribeSecurityGroups",
                "ec2:DescribeSubnets",
                "ec2:DescribeVpcs",
            ],
            ANYTHING,
        ),
    ]


def _submit(tenant: TenantScope, roles: TenantRoles) -> list[Statement]:
    """To start a job: the broker's right, or the launcher's where there is no broker."""
    if tenant.queued:
        return [*_queue_up(tenant), _pass_job_role(tenant, roles)]
    return [
        allow(
            "CreateJobs",
            [CREATE_JOB],
            # The developer guide ("IAM for SageMaker training plans") has a job on a plan judged by the plan too.
            [*tenant.training_jobs, *tenant.training_plans.values()],
            {
                "StringEquals": {f"aws:RequestTag/{TAG_TENANT}": tenant.name},
                # ForAllValues alone is true of an absent key; ForAnyValue would let a second, foreign type through.
                "ForAllValues:StringEquals": {"sagemaker:InstanceTypes": tenant.instance_types},
                "Null": {"sagemaker:InstanceTypes": "false"},
            },
        ),
        allow(
            "TagJobs",
            ["sagemaker:AddTags"],
            tenant.training_jobs,
            {"StringEquals": {f"aws:RequestTag/{TAG_TENANT}": tenant.name}},
        ),
        _pass_job_role(tenant, roles),
    ]


def _pass_job_role(tenant: TenantScope, roles: TenantRoles) -> Statement:
    """The one job role, or those of single jobs and then no other."""
    passed = tenant.each_job_role_pattern if tenant.isolates_jobs else roles.job.role_arn
    to_sagemaker = {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    return allow("PassJobRole", ["iam:PassRole"], [passed], to_sagemaker)


def _job_roles(tenant: TenantScope, roles: TenantRoles) -> list[Statement]:
    """To make a role for each job, under the tenant's boundary, and to remove it after the job."""
    if not tenant.isolates_jobs:
        return []
    own = [tenant.each_job_role_pattern]
    bounded = {"StringEquals": {"iam:PermissionsBoundary": roles.boundary.managed_policy_arn}}
    return [
        allow("MakeJobRoles", ["iam:CreateRole", "iam:PutRolePolicy"], own, bounded),
        allow("KeepJobRoles", ["iam:DeleteRole", "iam:DeleteRolePolicy", "iam:ListRoleTags", "iam:TagRole"], own),
        allow("FindJobRoles", ["iam:ListRoles"], ANYTHING),
    ]


def _queue_up(tenant: TenantScope) -> list[Statement]:
    """A job into the tenant's share of its type's queue. Batch asks for queue, share and job each: the queues are
    everybody's, the share is what tells the tenants apart; a job's id isn't known before."""
    queued = [*tenant.training_queues.values(), *tenant.shares, tenant.service_jobs]
    tag = {"StringEquals": {f"aws:RequestTag/{TAG_TENANT}": tenant.name}}
    return [
        allow("SubmitJobs", [SUBMIT_JOB], queued, tag),
        # A job is tagged as it is made; another tenant's, which has a tag, is not tagged over.
        allow(
            "TagJobs",
            [TAG_JOB],
            [tenant.service_jobs],
            {**tag, "StringEqualsIfExists": {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}},
        ),
        allow("FindQueuedJobs", ["batch:ListServiceJobs"], ANYTHING),
    ]


def _leave_queue(tenant: TenantScope) -> list[Statement]:
    """Jobs of the tenant's own taken out of the queues, waiting or running, and seen there."""
    if not tenant.queued:
        return []
    tag = {"StringEquals": {f"aws:ResourceTag/{TAG_TENANT}": tenant.name}}
    return [
        allow("StopQueuedJobs", ["batch:TerminateServiceJob"], [tenant.service_jobs], tag),
        allow("FindQueuedJobs", ["batch:ListServiceJobs"], ANYTHING),
    ]


def _broker(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """The function that submits jobs, besides that: a job's record, the contract, the images that were released, what
    runs now; and its ledger, which no other role can write."""
    buckets, keys = resources.buckets, resources.keys
    environment = tenant.environment
    image = tenant.parameter_arn(environment.image_parameter)
    contract = tenant.parameter_arn(environment.contract_parameter(tenant.name))
    return [
        allow("ReadContract", ["ssm:GetParameter"], [contract]),
        allow("SeeReleases", ["ssm:GetParameterHistory"], [image]),
        allow("FindRecords", ["s3:ListBucket"], [bucket.bucket_arn for bucket in (buckets.data, buckets.checkpoints)]),
        allow("ReadRecords", ["s3:GetObject"], [buckets.data.arn_for_objects("jobs/*/record.json")]),
        allow("KeepLedger", ["s3:GetObject", "s3:PutObject"], [buckets.checkpoints.arn_for_objects("broker/*")]),
        allow("DecryptRecords", ["kms:Decrypt"], [keys.data.key_arn]),
        allow("EncryptLedger", ["kms:Decrypt", "kms:GenerateDataKey"], [keys.checkpoints.key_arn]),
        allow("SeeOwnJobs", ["sagemaker:DescribeTrainingJob"], tenant.training_jobs),
        allow("ListJobs", ["sagemaker:ListTrainingJobs"], ANYTHING),
        allow(
            "WriteLogs",
            ["logs:CreateLogStream", "logs:PutLogEvents"],
            log_group_arns(tenant, resources.logs.group.log_group_name),
        ),
    ]


def _resumer(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """The function that resumes failed jobs: why they failed, from where they can go on, the next attempt in their
    record, and the broker, which decides whether it is submitted."""
    buckets, keys = resources.buckets, resources.keys
    return [
        allow("SeeOwnJobs", ["sagemaker:DescribeTrainingJob"], tenant.training_jobs),
        allow("WriteRecords", ["s3:GetObject", "s3:PutObject"], [buckets.data.arn_for_objects("jobs/*/record.json")]),
        allow("EncryptRecords", ["kms:Decrypt", "kms:GenerateDataKey"], [keys.data.key_arn]),
        allow("FindCheckpoints", ["s3:ListBucket"], [buckets.checkpoints.bucket_arn]),
        allow("AskBroker", [INVOKE], [tenant.broker_arn]),
        allow(
            "WriteLogs",
            ["logs:CreateLogStream", "logs:PutLogEvents"],
            log_group_arns(tenant, resources.logs.group.log_group_name),
        ),
    ]


def _launcher(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """People and CI: the tenant's jobs, data and job records; checkpoints to read."""
    buckets, keys = resources.buckets, resources.keys
    added = ["models", "registry", *([TRACKING_FOLDER] if tenant.spec.tracking is not None else [])]
    return [
        allow(
            "FollowJobs",
            ["sagemaker:DescribeTrainingJob", "sagemaker:ListTags", "sagemaker:StopTrainingJob"],
            tenant.training_jobs,
        ),
        *_leave_queue(tenant),
        # Register and see, without Update and Delete: what passed its gate stays as it was.
        allow(
            "NameModels",
            ["sagemaker:AddTags", "sagemaker:CreateModelPackageGroup"],
            [tenant.model_package_groups],
            {"StringEquals": {f"aws:RequestTag/{TAG_TENANT}": tenant.name}},
        ),
        allow("RegisterModels", ["sagemaker:CreateModelPackage"], [tenant.model_packages]),
        _see_models(tenant),
        allow("ReadContract", ["ssm:GetParameter", "ssm:GetParameters"], parameter_arns(tenant)),
        allow("ListOwnBuckets", LIST_BUCKET, [bucket.bucket_arn for bucket in buckets.all]),
        allow("ReadWriteData", READ_OBJECTS + WRITE_OBJECTS, [buckets.data.arn_for_objects("*")]),
        allow("ReadCheckpoints", READ_OBJECTS, [buckets.checkpoints.arn_for_objects("*")]),
        # `trainyard checkpoints prune`. Without DeleteObjectVersion: what is removed by mistake can be brought back.
        allow("PruneCheckpoints", ["s3:DeleteObject"], [buckets.checkpoints.arn_for_objects("jobs/*/checkpoints/*")]),
        # Without DeleteObject: what is registered stays.
        allow(
            "AddModels",
            READ_OBJECTS + ADD_OBJECTS,
            [buckets.artifacts.arn_for_objects(f"{folder}/*") for folder in added],
        ),
        allow("UseDataKey", READ_WRITE, [keys.data.key_arn, keys.artifacts.key_arn]),
        allow("DecryptCheckpoints", READ, [keys.checkpoints.key_arn]),
        *_read_logs(tenant, resources),
        allow("SeeImage", ["ecr:DescribeImages"], [resources.images.repository_arn]),
        *open_shells(tenant),
        *track_jobs(tenant),
        _see_account(),
    ]


def _auditor(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """What was run, by which configuration, with which records: all to read, nothing to change."""
    buckets, keys = resources.buckets, resources.keys
    bucket_arns = [bucket.bucket_arn for bucket in buckets.all]
    configuration = [
        "s3:GetBucketLogging",
        "s3:GetBucketPolicy",
        "s3:GetBucketPublicAccessBlock",
        "s3:GetBucketTagging",
        "s3:GetBucketVersioning",
        "s3:GetEncryptionConfiguration",
        "s3:GetLifecycleConfiguration",
    ]
    key_arns = [keys.data.key_arn, keys.checkpoints.key_arn, keys.artifacts.key_arn, keys.logs.key_arn]
    records = [bucket.arn_for_objects("jobs/*") for bucket in (buckets.data, buckets.checkpoints)]
    return [
        allow("SeeBuckets", [*LIST_BUCKET, *configuration], bucket_arns),
        allow("ReadJobRecords", READ_OBJECTS, [*records, buckets.artifacts.arn_for_objects("registry/*")]),
        allow("DecryptJobRecords", READ, [keys.data.key_arn, keys.checkpoints.key_arn, keys.artifacts.key_arn]),
        allow("SeeKeys", ["kms:DescribeKey", "kms:GetKeyPolicy", "kms:GetKeyRotationStatus"], key_arns),
        allow("SeeJobs", ["sagemaker:DescribeTrainingJob", "sagemaker:ListTags"], tenant.training_jobs),
        _see_models(tenant),
        *see_runs(tenant),
        allow("ReadContract", ["ssm:GetParameter", "ssm:GetParameters"], parameter_arns(tenant)),
        allow(
            "SeeRoles",
            ["iam:GetRole", "iam:GetRolePolicy", "iam:ListAttachedRolePolicies", "iam:ListRolePolicies"],
            [tenant.role_pattern],
        ),
        *_read_logs(tenant, resources),
        _see_account(),
    ]


def _guard(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """The functions that look at jobs and stop them, for a rule or for the budget: nothing of what they work on."""
    group = log_group_arns(tenant, resources.logs.group.log_group_name)
    return [
        allow("StopJobs", ["sagemaker:DescribeTrainingJob", "sagemaker:StopTrainingJob"], tenant.training_jobs),
        allow("ListJobs", ["sagemaker:ListTrainingJobs"], ANYTHING),
        *_leave_queue(tenant),
        allow("WriteLogs", ["logs:CreateLogStream", "logs:PutLogEvents"], group),
        allow(
            "CountViolations",
            ["cloudwatch:PutMetricData"],
            ANYTHING,
            {"StringEquals": {"cloudwatch:namespace": f"trainyard/{tenant.name}"}},
        ),
    ]


def _operator(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """What nobody may do day by day: data and checkpoints changed and deleted by hand, jobs stopped. Starts none, and
    deletes no version: what it deletes by mistake is there until the bucket's rules expire it."""
    buckets, keys = resources.buckets, resources.keys
    objects = [bucket.arn_for_objects("*") for bucket in buckets.all]
    return [
        allow("ListOwnBuckets", LIST_BUCKET, [bucket.bucket_arn for bucket in buckets.all]),
        allow("MendObjects", READ_OBJECTS + WRITE_OBJECTS, objects),
        allow("UseKeys", READ_WRITE, [keys.data.key_arn, keys.checkpoints.key_arn, keys.artifacts.key_arn]),
        allow("StopJobs", ["sagemaker:DescribeTrainingJob", "sagemaker:StopTrainingJob"], tenant.training_jobs),
        *_leave_queue(tenant),
        allow("ReadContract", ["ssm:GetParameter", "ssm:GetParameters"], parameter_arns(tenant)),
        *_read_logs(tenant, resources),
        _see_account(),
    ]


def _tracking(resources: TenantResources) -> list[Statement]:
    """The MLflow server: the files beside its runs, to show them; their clients write them."""
    bucket, key = resources.buckets.artifacts, resources.keys.artifacts
    below = {"StringLike": {"s3:prefix": [TRACKING_FOLDER, f"{TRACKING_FOLDER}/*"]}}
    return [
        allow("FindFiles", ["s3:ListBucket"], [bucket.bucket_arn], below),
        allow("KeepFiles", READ_OBJECTS + ADD_OBJECTS, [bucket.arn_for_objects(f"{TRACKING_FOLDER}/*")]),
        allow("EncryptFiles", READ_WRITE, [key.key_arn]),
    ]


def _see_models(tenant: TenantScope) -> Statement:
    actions = ["sagemaker:DescribeModelPackage", "sagemaker:DescribeModelPackageGroup", "sagemaker:ListModelPackages"]
    return allow("SeeModels", actions, [tenant.model_packages, tenant.model_package_groups])


def parameter_arns(tenant: TenantScope) -> list[str]:
    """What tenants' tools read: the own contract, and the image that all share."""
    environment = tenant.environment
    return [
        tenant.parameter_arn(name)
        for name in (environment.contract_parameter(tenant.name), environment.image_parameter)
    ]


def _read_logs(tenant: TenantScope, resources: TenantResources) -> list[Statement]:
    """Own streams only. FilterLogEvents works on a whole group, so not on the one that all tenants share."""
    own = log_group_arns(tenant, resources.logs.group.log_group_name, resources.logs.flows.log_group_name)
    return [
        allow("FindLogs", ["logs:DescribeLogStreams"], [*log_group_arns(tenant, TRAINING_LOG_GROUP), *own]),
        allow("ReadJobLogs", ["logs:GetLogEvents"], [*tenant.job_log_streams, *own]),
        allow("SearchOwnLogs", ["logs:FilterLogEvents"], own),
    ]


def _see_account() -> Statement:
    """Listings that IAM can't scope: they show that things exist, and nothing of what is in them."""
    return allow(
        "SeeAccount",
        [
            "batch:DescribeJobQueues",
            "batch:DescribeSchedulingPolicies",
            "batch:DescribeServiceEnvironments",
            "cloudwatch:DescribeAlarms",
            "cloudwatch:GetMetricData",
            "cloudwatch:ListMetrics",
            "ec2:DescribeSecurityGroups",
            "ec2:DescribeSubnets",
            "ec2:DescribeVpcs",
            "fsx:DescribeFileSystems",
            "sagemaker:ListTrainingJobs",
            "servicequotas:GetServiceQuota",
            "servicequotas:ListServiceQuotas",
            "sts:GetCallerIdentity",
        ],
        ANYTHING,
    )


def _own_keys_and_files(resources: TenantResources) -> list[Statement]:
    """In a policy of its own and not in the boundary: the key's policy names the role, and the role its boundary."""
    key, file_system = resources.keys.checkpoints.key_arn, resources.file_system.resource.ref
    return [
        deny("OutputUnderOwnKey", [CREATE_JOB], {"ArnNotEquals": {"sagemaker:OutputKmsKeyArn": key}}),
        deny(
            "VolumeUnderOwnKey",
            [CREATE_JOB],
            {"Null": {"sagemaker:VolumeKmsKeyArn": "false"}, "ArnNotEquals": {"sagemaker:VolumeKmsKeyArn": key}},
        ),
        # ForAnyValue: a job without a file system states none; one among several that is another's is enough.
        deny("OwnFileSystem", [CREATE_JOB], {"ForAnyValue:StringNotEquals": {"sagemaker:FileSystemId": [file_system]}}),
    ]
