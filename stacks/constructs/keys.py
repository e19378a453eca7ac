"""A tenant's encryption keys. The key policy alone says who may decrypt: the account's administrators can manage a
key, and change its policy under the eyes of CloudTrail, but can't use it."""

from dataclasses import dataclass, replace

from aws_cdk import Duration
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from stacks.constructs.identity import TenantRoles
from stacks.naming import PARTITION, TenantScope
from stacks.settings import removal_policy

READ = ["kms:Decrypt", "kms:DescribeKey"]
READ_WRITE = [
    "kms:Decrypt",
    "kms:DescribeKey",
    "kms:Encrypt",
    "kms:GenerateDataKey",
    "kms:GenerateDataKeyWithoutPlaintext",
]
ADMINISTER = [
    "kms:CancelKeyDeletion",
    "kms:DescribeKey",
    "kms:DisableKey",
    "kms:DisableKeyRotation",
    "kms:EnableKey",
    "kms:EnableKeyRotation",
    "kms:GetKeyPolicy",
    "kms:GetKeyRotationStatus",
    "kms:ListGrants",
    "kms:ListKeyPolicies",
    "kms:ListKeyRotations",
    "kms:ListResourceTags",
    "kms:ListRetirableGrants",
    "kms:PutKeyPolicy",
    "kms:RevokeGrant",
    "kms:RotateKeyOnDemand",
    "kms:ScheduleKeyDeletion",
    "kms:TagResource",
    "kms:UntagResource",
    "kms:UpdateKeyDescription",
]
"""Everything but use: no Decrypt, no GenerateDataKey, no CreateGrant."""


@dataclass(frozen=True)
class KeyUse:
    """Who may use a key, and how far."""

    readers: tuple[iam.Role, ...] = ()
    writers: tuple[iam.Role, ...] = ()
    volumes: tuple[iam.Role, ...] = ()
    """Whose training volumes are encrypted with it: SageMaker takes a grant on their behalf."""
    each_job: tuple[str, ...] = ()
    """What the roles of single jobs may do with it, where there are such."""


class TenantKeys(Construct):
    """Four keys, so that a leaked log reader reads no data, a data reader changes no checkpoint, and who serves a model
    reads nothing else."""

    data: kms.Key
    """Data bucket and file system."""
    checkpoints: kms.Key
    """Checkpoint bucket, job outputs and training volumes."""
    artifacts: kms.Key
    """Artifacts bucket: exported models."""
    logs: kms.Key
    """Log group and notifications."""

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope, roles: TenantRoles) -> None:
        super().__init__(scope, construct_id)
        data = KeyUse(
            readers=(*roles.workers, roles.auditor), writers=(roles.launcher, roles.operator), each_job=tuple(READ)
        )
        login = (roles.login,) if tenant.hyperpod and roles.login else ()  # it fetches the tenant's script
        data = replace(data, readers=(*data.readers, *login))
        # The broker reads jobs' records beside the data, and keeps its ledger beside the checkpoints.
        broker = (roles.broker,) if tenant.brokered else ()
        # The resumer writes the next attempt into them.
        resumer = (roles.resumer,) if tenant.resumed else ()
        records = replace(data, readers=(*data.readers, *broker), writers=(*data.writers, *resumer))
        checkpoints = KeyUse(
            readers=(roles.launcher, roles.auditor),
            writers=(*roles.workers, roles.operator, *broker),
            volumes=(
                roles.job,
                *((roles.nodes, roles.login) if tenant.hyperpod and roles.nodes and roles.login else ()),
            ),
            each_job=tuple(READ_WRITE),
        )
        machines = [*_roles(tenant, checkpoints), *_machines(tenant)]
        links = [_links(tenant)] if tenant.spec.file_system.links else []
        files = [_file_system(tenant), *_small_files(tenant), *links]
        self.data = self._key("Data", tenant, "data", [*_roles(tenant, records), *files])
        self.checkpoints = self._key("Checkpoints", tenant, "checkpoints", machines)
        tracking = (roles.tracking,) if roles.tracking is not None else ()
        models = replace(data, writers=(*data.writers, *tracking))
        self.artifacts = self._key("Artifacts", tenant, "exported models", _roles(tenant, models))
        self.logs = self._key("Logs", tenant, "logs and notifications", [_log_service(tenant), *_notifiers(tenant)])

    def _key(
        self, construct_id: str, tenant: TenantScope, purpose: str, statements: list[iam.PolicyStatement]
    ) -> kms.Key:
        administration = iam.PolicyStatement(
            sid="AccountAdministersButCannotUse",
            principals=[iam.AccountRootPrincipal()],
            actions=ADMINISTER,
            resources=["*"],
        )
        retain = tenant.environment.retain_data
        return kms.Key(
            self,
            construct_id,
            description=f"trainyard {tenant.environment.name}, tenant {tenant.name}: {purpose}",
            enable_key_rotation=True,
            rotation_period=Duration.days(365),
            pending_window=Duration.days(30 if retain else 7),
            removal_policy=removal_policy(tenant.environment),
            policy=iam.PolicyDocument(statements=[administration, *statements]),
        )


def _roles(tenant: TenantScope, use: KeyUse) -> list[iam.PolicyStatement]:
    def statement(sid: str, roles: tuple[iam.Role, ...], actions: list[str]) -> iam.PolicyStatement:
        return iam.PolicyStatement(sid=sid, principals=list(roles), actions=actions, resources=["*"])

    statements = [statement("Readers", use.readers, READ), statement("Writers", use.writers, READ_WRITE)]
    on_volumes: dict[str, dict[str, object]] = {
        "Bool": {"kms:GrantIsForAWSResource": "true"},
        "StringEquals": {"kms:ViaService": [tenant.via("sagemaker"), tenant.via("ec2")]},
    }
    if use.volumes:
        grants = statement("TrainingVolumes", use.volumes, ["kms:CreateGrant"])
        grants.add_conditions(on_volumes)
        statements.append(grants)
        # HyperPod also looks at the key as the role (SageMaker developer guide, "Customer managed AWS KMS key
        # encryption for SageMaker HyperPod"); readers and writers may anyway.
        unseen = tuple(role for role in use.volumes if role not in (*use.readers, *use.writers))
        if unseen:
            look = statement("SeeVolumesKey", unseen, ["kms:DescribeKey"])
            look.add_conditions({"StringEquals": on_volumes["StringEquals"]})
            statements.append(look)
    if use.each_job and tenant.isolates_jobs:
        statements.append(_each_job(tenant, "EachJob", use.each_job, {}))
        if use.volumes:
            statements.append(_each_job(tenant, "EachJobsVolumes", ("kms:CreateGrant",), on_volumes))
    return statements


def _each_job(
    tenant: TenantScope, sid: str, actions: tuple[str, ...], conditions: dict[str, dict[str, object]]
) -> iam.PolicyStatement:
    """The roles of single jobs, by their path: a key policy that names a role which isn't there yet is refused. Their
    own policies must allow it too."""
    return iam.PolicyStatement(
        sid=sid,
        principals=[iam.AccountRootPrincipal()],
        actions=list(actions),
        resources=["*"],
        conditions={**conditions, "ArnLike": {"aws:PrincipalArn": tenant.each_job_role_pattern}},
    )


def _file_system(tenant: TenantScope) -> iam.PolicyStatement:
    """FSx takes its grant in the name of whoever creates or restores the file system: CloudFormation, an operator."""
    return iam.PolicyStatement(
        sid="FileSystemService",
        principals=[iam.AccountRootPrincipal()],
        actions=["kms:CreateGrant", *READ_WRITE],
        resources=["*"],
        conditions={
            "StringEquals": {
                "kms:ViaService": tenant.via("fsx"),
                "kms:CallerAccount": tenant.environment.account,
            }
        },
    )


def _small_files(tenant: TenantScope) -> list[iam.PolicyStatement]:
    """EFS takes its grant in the same way (EFS user guide, "Encrypting data at rest")."""
    if tenant.spec.cluster is None or tenant.spec.cluster.small_files is None:
        return []
    return [
        iam.PolicyStatement(
            sid="SmallFilesService",
            principals=[iam.AccountRootPrincipal()],
            actions=["kms:CreateGrant", *READ_WRITE],
            resources=["*"],
            conditions={
                "StringEquals": {
                    "kms:ViaService": tenant.via("elasticfilesystem"),
                    "kms:CallerAccount": tenant.environment.account,
                }
            },
        )
    ]


def _machines(tenant: TenantScope) -> list[iam.PolicyStatement]:
    """The volumes of the cluster's machines, which PCS starts as its service-linked role, and EC2 as that for spot (PCS
    user guide, "Required KMS key policy for use with encrypted EBS volumes"). Anybody as principal, held to these roles
    by condition: a key policy that names a role which isn't there yet is refused, and the account as principal would
    leave it to the roles' own policies, which know no key of ours. EBS asks KMS in their name, they never do."""
    if (cluster := tenant.spec.cluster) is None or tenant.hyperpod:
        return []
    linked = f"arn:{PARTITION}:iam::{tenant.environment.account}:role/aws-service-role"
    roles = [f"{linked}/pcs.amazonaws.com/AWSServiceRoleForPCS"]
    if any(group.purchase == "spot" for group in cluster.node_groups.values()):
        roles.append(f"{linked}/spot.amazonaws.com/AWSServiceRoleForEC2Spot")
    asked: dict[str, dict[str, object]] = {
        "StringEquals": {"kms:ViaService": tenant.via("ec2"), "kms:CallerAccount": tenant.environment.account},
        "ArnEquals": {"aws:PrincipalArn": roles},
    }

    def statement(sid: str, actions: list[str], conditions: dict[str, dict[str, object]]) -> iam.PolicyStatement:
        return iam.PolicyStatement(
            sid=sid, principals=[iam.AnyPrincipal()], actions=actions, resources=["*"], conditions=conditions
        )

    return [
        statement("MachineVolumes", [*READ_WRITE, "kms:ReEncryptFrom", "kms:ReEncryptTo"], asked),
        statement("MachineGrants", ["kms:CreateGrant"], {**asked, "Bool": {"kms:GrantIsForAWSResource": "true"}}),
    ]


def _links(tenant: TenantScope) -> iam.PolicyStatement:
    """FSx reads and writes a linked bucket as a service-linked role of the file system (FSx for Lustre user guide,
    "Working with server-side encrypted S3 buckets"), whose name holds the file system's id, which needs this key first.
    The role's own policy names the one bucket that it is linked to."""
    service = "s3.data-source.lustre.fsx.amazonaws.com"
    role = f"arn:{PARTITION}:iam::{tenant.environment.account}:role/aws-service-role/{service}/"
    return iam.PolicyStatement(
        sid="FileSystemLinks",
        principals=[iam.AccountRootPrincipal()],
        actions=READ_WRITE,
        resources=["*"],
        conditions={
            "StringEquals": {"kms:ViaService": tenant.via("s3"), "kms:CallerAccount": tenant.environment.account},
            "ArnLike": {"aws:PrincipalArn": f"{role}AWSServiceRoleForFSxS3Access_fs-*"},
        },
    )


def _log_service(tenant: TenantScope) -> iam.PolicyStatement:
    """CloudWatch Logs, for log groups of the tenant's own stacks only: generated names begin with the stack's."""
    groups = tenant.arn("logs", f"log-group:{tenant.stack_name('')}*")
    return iam.PolicyStatement(
        sid="LogService",
        principals=[iam.ServicePrincipal(f"logs.{tenant.environment.region}.amazonaws.com")],
        actions=READ_WRITE,
        resources=["*"],
        conditions={"ArnLike": {"kms:EncryptionContext:aws:logs:arn": groups}},
    )


def _notifiers(tenant: TenantScope) -> list[iam.PolicyStatement]:
    """What publishes to the tenant's encrypted topic. EventBridge states no source account when it encrypts."""

    def statement(sid: str, service: str) -> iam.PolicyStatement:
        return iam.PolicyStatement(
            sid=sid,
            principals=[iam.ServicePrincipal(f"{service}.amazonaws.com")],
            actions=["kms:Decrypt", "kms:GenerateDataKey"],
            resources=["*"],
        )

    alarms = statement("Alarms", "cloudwatch")
    alarms.add_condition("StringEquals", {"aws:SourceAccount": tenant.environment.account})
    return [alarms, statement("Events", "events")]
