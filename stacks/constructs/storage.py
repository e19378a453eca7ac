"""A tenant's buckets, and the file system that jobs read from."""

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from stacks.constructs.keys import TenantKeys
from stacks.constructs.network import TenantNetwork
from stacks.naming import TenantScope

OLD_VERSION_DAYS = 30
"""How long an overwritten or deleted object can be brought back."""


class TenantBuckets(Construct):
    """Data and checkpoints, apart: a job reads the one and writes the other."""

    data: s3.Bucket
    checkpoints: s3.Bucket

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope, keys: TenantKeys) -> None:
        super().__init__(scope, construct_id)
        self.data = self._bucket("Data", tenant, keys.data)
        self.checkpoints = self._bucket("Checkpoints", tenant, keys.checkpoints)

    def _bucket(self, construct_id: str, tenant: TenantScope, key: kms.Key) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            construct_id,
            encryption=s3.BucketEncryption.KMS,
            encryption_key=key,
            bucket_key_enabled=True,  # one KMS call per bucket and hour instead of one per shard
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            enforce_ssl=True,
            versioned=True,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="OldVersionsAndTornUploads",
                    abort_incomplete_multipart_upload_after=Duration.days(7),
                    noncurrent_version_expiration=Duration.days(OLD_VERSION_DAYS),
                )
            ],
            # No auto_delete_objects: it would put a Lambda that can empty the bucket beside the data.
            removal_policy=RemovalPolicy.RETAIN if tenant.environment.retain_data else RemovalPolicy.DESTROY,
        )
        for statement in _own_key_only(bucket, key):
            bucket.add_to_resource_policy(statement)
        return bucket


def _own_key_only(bucket: s3.Bucket, key: kms.Key) -> list[iam.PolicyStatement]:
    """Objects under the tenant's key and no other. A request without encryption headers gets the bucket's default and
    must pass: that is how the SageMaker SDK uploads."""
    algorithm, key_id = "s3:x-amz-server-side-encryption", "s3:x-amz-server-side-encryption-aws-kms-key-id"
    conditions: dict[str, dict[str, dict[str, object]]] = {
        "NoOtherAlgorithm": {"Null": {algorithm: "false"}, "StringNotEquals": {algorithm: "aws:kms"}},
        "NoOtherKey": {"Null": {key_id: "false"}, "ArnNotEquals": {key_id: key.key_arn}},
    }
    return [
        iam.PolicyStatement(
            sid=sid,
            effect=iam.Effect.DENY,
            principals=[iam.AnyPrincipal()],
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects("*")],
            conditions=condition,
        )
        for sid, condition in conditions.items()
    ]


class TenantFileSystem(Construct):
    """FSx for Lustre, PERSISTENT_2 on SSD, in the training subnet."""

    resource: fsx.CfnFileSystem

    def __init__(
        self, scope: Construct, construct_id: str, *, tenant: TenantScope, network: TenantNetwork, keys: TenantKeys
    ) -> None:
        super().__init__(scope, construct_id)
        spec, retain = tenant.spec.file_system, tenant.environment.retain_data
        # The L2 construct opens 988-1023, more than Lustre uses, on the group that it is given.
        self.resource = fsx.CfnFileSystem(
            self,
            "Resource",
            file_system_type="LUSTRE",
            file_system_type_version="2.15",
            storage_type="SSD",
            storage_capacity=spec.storage_gib,
            kms_key_id=keys.data.key_arn,
            subnet_ids=[network.training_subnet.subnet_id],
            security_group_ids=[network.file_system_security_group.security_group_id],
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type="PERSISTENT_2",
                per_unit_storage_throughput=spec.throughput_mb_per_s_per_tib,
                metadata_configuration=fsx.CfnFileSystem.MetadataConfigurationProperty(mode="AUTOMATIC"),
                data_compression_type="LZ4",
                automatic_backup_retention_days=7 if retain else 0,
                copy_tags_to_backups=True if retain else None,
            ),
        )
        self.resource.apply_removal_policy(RemovalPolicy.RETAIN if retain else RemovalPolicy.DESTROY)
        self.resource.node.add_dependency(*network.lustre_rules)
