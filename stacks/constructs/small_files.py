"""EFS for what is small and shared on a tenant's cluster: code, environments, notebooks. Data belong on Lustre.

Two locks, of which each would do: the network (only the training group reaches its port) and the file system's own
policy (the tenant's roles, over TLS, through the mount target; a client without credentials is nobody).
"""

from typing import Any

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_efs as efs
from constructs import Construct

from stacks.constructs.acknowledged import acknowledge
from stacks.constructs.keys import TenantKeys
from stacks.constructs.machine_permissions import USE_FILES
from stacks.constructs.network import TenantNetwork
from stacks.constructs.statements import Statement, allow
from stacks.naming import TenantScope
from stacks.settings import removal_policy
from trainyard.spec.cluster import SmallFilesSpec

NFS = ec2.Port.tcp(2049)
OWNER = "1000"
"""The AMI's ordinary user, whose the cluster's files are (docs/clusters.md)."""

BACKUPS = {
    "NIST.800.53.R5-EFSInBackupPlan": (
        "AWS Backup's recovery points are under its vault's key, which a tenant's removal doesn't destroy: what was "
        "shredded could be read there. What must have versions belongs in the tenant's buckets."
    )
}


class TenantSmallFiles(Construct):
    """The file system, its one mount target in the training subnet, and the folder that machines mount."""

    resource: efs.CfnFileSystem
    folder: efs.CfnAccessPoint

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        spec: SmallFilesSpec,
        network: TenantNetwork,
        keys: TenantKeys,
    ) -> None:
        super().__init__(scope, construct_id)
        system = efs.CfnFileSystem
        moves = [
            system.LifecyclePolicyProperty(transition_to_ia=f"AFTER_{spec.archive_after_days}_DAYS"),
            system.LifecyclePolicyProperty(transition_to_primary_storage_class="AFTER_1_ACCESS"),
        ]
        self.resource = system(
            self,
            "Resource",
            encrypted=True,
            kms_key_id=keys.data.key_arn,
            performance_mode="generalPurpose",
            throughput_mode="elastic",
            lifecycle_policies=moves if spec.archive_after_days else None,
            backup_policy=system.BackupPolicyProperty(status="DISABLED"),
            file_system_policy=_policy(tenant),
        )
        self.resource.apply_removal_policy(removal_policy(tenant.environment))
        acknowledge(self.resource, BACKUPS)
        clients = network.training_security_group
        servers = ec2.SecurityGroup(
            self, "Group", vpc=network.vpc, description="EFS for small files", allow_all_outbound=False
        )
        servers.add_ingress_rule(clients, NFS, "The cluster's machines")
        clients.add_egress_rule(servers, NFS, "EFS for small files")
        efs.CfnMountTarget(
            self,
            "Target",
            file_system_id=self.resource.ref,
            security_groups=[servers.security_group_id],
            subnet_id=network.training_subnet.subnet_id,
        )
        point = efs.CfnAccessPoint
        self.folder = point(
            self,
            "Folder",
            file_system_id=self.resource.ref,
            root_directory=point.RootDirectoryProperty(
                path="/shared",
                creation_info=point.CreationInfoProperty(owner_uid=OWNER, owner_gid=OWNER, permissions="0755"),
            ),
        )


def use_files(tenant: TenantScope, files: TenantSmallFiles | None) -> list[Statement]:
    """For the machines of the cluster: the folder, and nothing beside it."""
    if files is None:
        return []
    return [
        allow(
            "UseSmallFiles",
            USE_FILES,
            [tenant.arn("elasticfilesystem", f"file-system/{files.resource.ref}")],
            {"StringEquals": {"elasticfilesystem:AccessPointArn": files.folder.attr_arn}},
        )
    ]


def _policy(tenant: TenantScope) -> dict[str, Any]:
    """That nobody but the tenant's roles mounts it, whatever another policy of the account says; what these may, their
    own policies say. A negated operator also matches an absent key: a client without credentials is refused too."""

    def refused(sid: str, actions: list[str], condition: dict[str, dict[str, str]]) -> dict[str, Any]:
        everybody = {"Effect": "Deny", "Principal": {"AWS": "*"}, "Resource": "*"}
        return {"Sid": sid, **everybody, "Action": actions, **({"Condition": condition} if condition else {})}

    root = "elasticfilesystem:ClientRootAccess"
    return {
        "Version": "2012-10-17",
        "Statement": [
            refused("NobodyElse", [*USE_FILES, root], {"ArnNotLike": {"aws:PrincipalArn": tenant.role_pattern}}),
            refused("OverTls", [*USE_FILES, root], {"Bool": {"aws:SecureTransport": "false"}}),
            refused("InsideTheNetwork", USE_FILES, {"Bool": {"elasticfilesystem:AccessedViaMountTarget": "false"}}),
            refused("NobodyIsRoot", [root], {}),
        ],
    }
