"""Who did what: a trail of the account's API calls and of every object read or written, in a bucket that is locked."""

from aws_cdk import Duration
from aws_cdk import aws_cloudtrail as cloudtrail
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from stacks.constructs.acknowledged import BUCKETS, acknowledge
from stacks.constructs.keys import ADMINISTER
from stacks.constructs.storage import TORN_UPLOAD_DAYS, object_lock
from stacks.naming import PARTITION
from stacks.settings import written_at_once
from trainyard.spec.platform import EnvironmentSpec

CLOUDTRAIL = "cloudtrail.amazonaws.com"


NO_SECOND_COPY = {
    "NIST.800.53.R5-CloudTrailCloudWatchLogsEnabled": (
        "Every event of every object would be paid for a second time. EventBridge tells alarms of events without it, "
        "and the validated files are searched where they are."
    )
}

LOG_BUCKET = {
    **BUCKETS,
    **dict.fromkeys(
        ("AwsSolutions-S1", "NIST.800.53.R5-S3BucketLoggingEnabled"),
        "It is itself the log: files are validated by their digests and locked, and an access log of the log would "
        "grow by itself. Changes of the bucket and its policy are management events of the trail.",
    ),
}


class AuditTrail(Construct):
    """One trail for the account, not one per tenant: a region has five at most, and an event in each is paid for again.

    Keys need no selector of their own: use of a KMS key is a management event, which the trail has anyway.
    """

    key: kms.Key
    bucket: s3.Bucket
    trail: cloudtrail.CfnTrail

    def __init__(self, scope: Construct, construct_id: str, *, environment: EnvironmentSpec) -> None:
        super().__init__(scope, construct_id)
        self._name = f"trainyard-{environment.name}"
        place = f"{environment.region}:{environment.account}"
        self._arn = f"arn:{PARTITION}:cloudtrail:{place}:trail/{self._name}"
        self.key = self._make_key(environment)
        self.bucket = self._make_bucket(environment)
        self.trail = cloudtrail.CfnTrail(
            self,
            "Trail",
            trail_name=self._name,  # the bucket's and the key's policies name it, and it needs both first
            s3_bucket_name=self.bucket.bucket_name,
            kms_key_id=self.key.key_arn,
            is_logging=True,
            is_multi_region_trail=True,  # IAM and STS log in us-east-1; and nobody works unseen in another region
            include_global_service_events=True,
            enable_log_file_validation=True,
            advanced_event_selectors=[
                _selector("ApiCalls", {"eventCategory": {"equal_to": ["Management"]}}),
                _selector(
                    "Objects",
                    {
                        "eventCategory": {"equal_to": ["Data"]},
                        "resources.type": {"equal_to": ["AWS::S3::Object"]},
                        # Each log file would otherwise be an event of the next one.
                        "resources.ARN": {"not_starts_with": [self.bucket.arn_for_objects("")]},
                    },
                ),
                _selector(
                    "Submissions",  # who had a broker submit a job: what the broker itself can't know
                    {
                        "eventCategory": {"equal_to": ["Data"]},
                        "resources.type": {"equal_to": ["AWS::Lambda::Function"]},
                        "resources.ARN": {
                            "starts_with": [f"arn:{PARTITION}:lambda:{place}:function:trainyard-{environment.name}-"]
                        },
                    },
                ),
            ],
        )
        acknowledge(self.trail, NO_SECOND_COPY)
        acknowledge(self.bucket, LOG_BUCKET)
        assert self.bucket.policy is not None
        self.trail.node.add_dependency(self.bucket.policy)  # CloudTrail tries to write when it is made

    def _make_key(self, environment: EnvironmentSpec) -> kms.Key:
        retain = environment.retain_data
        trail = {"StringEquals": {"aws:SourceArn": self._arn}}
        statements = [
            iam.PolicyStatement(
                sid="AccountAdministers",
                principals=[iam.AccountRootPrincipal()],
                actions=[*ADMINISTER, "kms:Decrypt"],  # to read the log; who in the account may, its own IAM says
                resources=["*"],
            ),
            iam.PolicyStatement(
                sid="Trail",
                principals=[iam.ServicePrincipal(CLOUDTRAIL)],
                actions=["kms:DescribeKey", "kms:GenerateDataKey*"],
                resources=["*"],
                conditions=trail,
            ),
        ]
        return kms.Key(
            self,
            "Key",
            description=f"trainyard {environment.name}: audit log",
            enable_key_rotation=True,
            rotation_period=Duration.days(365),
            pending_window=Duration.days(30 if retain else 7),
            removal_policy=written_at_once(environment),
            policy=iam.PolicyDocument(statements=statements),
        )

    def _make_bucket(self, environment: EnvironmentSpec) -> s3.Bucket:
        audit, retain = environment.audit, environment.retain_data
        bucket = s3.Bucket(
            self,
            "Log",
            encryption=s3.BucketEncryption.KMS,
            encryption_key=self.key,
            bucket_key_enabled=True,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            enforce_ssl=True,
            versioned=True,
            # A lock would outlive an environment that is meant to be destroyed.
            object_lock_default_retention=object_lock(audit.lock_mode, audit.keep_days) if retain else None,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="Kept",
                    expiration=Duration.days(audit.keep_days),
                    noncurrent_version_expiration=Duration.days(1),
                    abort_incomplete_multipart_upload_after=Duration.days(TORN_UPLOAD_DAYS),
                )
            ],
            removal_policy=written_at_once(environment),
        )
        own_trail = {"StringEquals": {"aws:SourceArn": self._arn}}
        files = bucket.arn_for_objects(f"AWSLogs/{environment.account}/*")
        for sid, action, resource in (
            ("TrailLooks", "s3:GetBucketAcl", bucket.bucket_arn),
            ("TrailWrites", "s3:PutObject", files),
        ):
            bucket.add_to_resource_policy(
                iam.PolicyStatement(
                    sid=sid,
                    principals=[iam.ServicePrincipal(CLOUDTRAIL)],
                    actions=[action],
                    resources=[resource],
                    conditions=own_trail,
                )
            )
        return bucket


def _selector(name: str, fields: dict[str, dict[str, list[str]]]) -> cloudtrail.CfnTrail.AdvancedEventSelectorProperty:
    """An event is logged that meets every field."""
    return cloudtrail.CfnTrail.AdvancedEventSelectorProperty(
        name=name,
        field_selectors=[
            cloudtrail.CfnTrail.AdvancedFieldSelectorProperty(
                field=field,
                equal_to=test.get("equal_to"),
                starts_with=test.get("starts_with"),
                not_starts_with=test.get("not_starts_with"),
            )
            for field, test in fields.items()
        ],
    )
