"""A tenant's buckets, and the file system that jobs read from."""

from aws_cdk import Duration
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from stacks.constructs.acknowledged import BUCKETS, acknowledge
from stacks.constructs.keys import TenantKeys
from stacks.constructs.network import TenantNetwork
from stacks.naming import TenantScope
from stacks.settings import removal_policy

TORN_UPLOAD_DAYS = 7
"""After which the parts of an upload that was never completed go: nobody sees them, and they cost as objects do."""

CHANGES = ["NEW", "CHANGED", "DELETED"]
"""What FSx carries from the bucket to a linked folder and back."""


ASKED_BY_OBJECT = {
    "CloudFormation-Validate::bucket_asks_kms_seldom": (
        "With job_isolation: key KMS judges each object by its name, so that one job's role opens no other job's; a "
        "bucket key would hide the name. The calls are paid for that (docs/isolation.md)."
    )
}


class TenantBuckets(Construct):
    """Data, checkpoints and artifacts, apart: a job reads the first and writes the second; the third is what leaves."""

    data: s3.Bucket
    checkpoints: s3.Bucket
    artifacts: s3.Bucket
    """Exported models, for those who serve them: under a key of their own, so that serving opens no data."""

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope, keys: TenantKeys) -> None:
        super().__init__(scope, construct_id)
        spec = tenant.spec.storage
        lock = _lock(spec.lock_mode, spec.lock_data_days)
        ages = s3.LifecycleRule(id="Ages", transitions=_archive(spec.archive_data_after_days))
        self.data = self._bucket("Data", tenant, keys.data, ages=ages, lock=lock)
        ages = s3.LifecycleRule(
            id="Ages",
            # What jobs wrote. Beside it lies the broker's ledger, read at every submission: it has no age.
            prefix="jobs/",
            transitions=_archive(spec.archive_checkpoints_after_days),
            expiration=_days(spec.delete_checkpoints_after_days),
        )
        self.checkpoints = self._bucket(
            "Checkpoints", tenant, keys.checkpoints, ages=ages, bucket_key=not tenant.encrypts_by_job
        )
        ages = s3.LifecycleRule(id="Ages", transitions=_archive(spec.archive_artifacts_after_days))
        lock = _lock(spec.lock_mode, spec.lock_artifacts_days)
        self.artifacts = self._bucket("Artifacts", tenant, keys.artifacts, ages=ages, lock=lock)

    @property
    def all(self) -> tuple[s3.Bucket, ...]:
        """Every bucket of the tenant."""
        return self.data, self.checkpoints, self.artifacts

    def _bucket(
        self,
        construct_id: str,
        tenant: TenantScope,
        key: kms.Key,
        *,
        ages: s3.LifecycleRule,
        lock: s3.ObjectLockRetention | None = None,
        bucket_key: bool = True,
    ) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            construct_id,
            encryption=s3.BucketEncryption.KMS,
            encryption_key=key,
            # One KMS call per bucket and hour instead of one per shard; but then KMS is told the bucket alone, and
            # can't tell one job's objects from another's.
            bucket_key_enabled=bucket_key,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            enforce_ssl=True,
            versioned=True,
            object_lock_default_retention=lock,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="OldVersionsAndTornUploads",
                    abort_incomplete_multipart_upload_after=Duration.days(TORN_UPLOAD_DAYS),
                    noncurrent_version_expiration=Duration.days(tenant.spec.storage.old_version_days),
                ),
                *([ages] if ages.transitions or ages.expiration else []),
            ],
            # No auto_delete_objects: it would put a Lambda that can empty the bucket beside the data.
            removal_policy=removal_policy(tenant.environment),
        )
        acknowledge(bucket, BUCKETS | ({} if bucket_key else ASKED_BY_OBJECT))
        for statement in _own_key_only(bucket, key):
            bucket.add_to_resource_policy(statement)
        return bucket


def object_lock(mode: str, days: int) -> s3.ObjectLockRetention:
    """The retention that every new object of a bucket gets; `mode` is governance or compliance."""
    make = s3.ObjectLockRetention.compliance if mode == "compliance" else s3.ObjectLockRetention.governance
    return make(Duration.days(days))


def _lock(mode: str, days: int | None) -> s3.ObjectLockRetention | None:
    return object_lock(mode, days) if days is not None else None


def _days(days: int | None) -> Duration | None:
    return Duration.days(days) if days is not None else None


def _archive(after_days: int | None) -> list[s3.Transition] | None:
    if after_days is None:
        return None
    return [
        s3.Transition(
            storage_class=s3.StorageClass.GLACIER_INSTANT_RETRIEVAL, transition_after=Duration.days(after_days)
        )
    ]


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
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        network: TenantNetwork,
        keys: TenantKeys,
        buckets: TenantBuckets,
    ) -> None:
        super().__init__(scope, construct_id)
        spec, retain = tenant.spec.file_system, tenant.environment.retain_data
        backups = retain and not spec.links  # FSx keeps none of a file system that is linked to a bucket
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
                efa_enabled=spec.efa or None,
                data_compression_type="LZ4",
                automatic_backup_retention_days=7 if backups else 0,
                copy_tags_to_backups=True if backups else None,
            ),
        )
        self.resource.apply_removal_policy(removal_policy(tenant.environment))
        self.resource.node.add_dependency(*network.lustre_rules)
        if retain:
            # Its servers' interfaces stay in these, so a stack that tried to delete them would fail half-way.
            for ground in (network.vpc, network.training_subnet, network.file_system_security_group):
                ground.apply_removal_policy(removal_policy(tenant.environment))
        for path, folder in sorted(spec.links.items()):
            self._link(path, f"s3://{buckets.data.bucket_name}/{folder}", tenant)

    def _link(self, path: str, source: str, tenant: TenantScope) -> None:
        """Objects of a folder of the data bucket as files, fetched at their first read; files written there go back."""
        events = fsx.CfnDataRepositoryAssociation
        link = fsx.CfnDataRepositoryAssociation(
            self,
            # Named by its folder, so that another link's coming or going leaves it alone; no folder holds a colon.
            f"Link{path.replace('/', ':')}",
            file_system_id=self.resource.ref,
            file_system_path=path,
            data_repository_path=source,
            batch_import_meta_data_on_create=True,
            s3=events.S3Property(
                auto_import_policy=events.AutoImportPolicyProperty(events=CHANGES),
                auto_export_policy=events.AutoExportPolicyProperty(events=CHANGES),
            ),
        )
        link.apply_removal_policy(removal_policy(tenant.environment))
