"""Actions by the kind of thing that they act on: what could read, write, use, delete or impersonate.

From the service authorization reference. A list like this is never complete: `every_action` adds what any policy of
the environment names, so that an Allow for an action that is missing here is still asked about.
"""

from functools import lru_cache

from trainyard.isolation.conditions import glob

KIND_OF_TYPE = {
    "AWS::S3::Bucket": "bucket",
    "AWS::KMS::Key": "key",
    "AWS::FSx::FileSystem": "file system",
    "AWS::EFS::FileSystem": "small files",
    "AWS::EFS::AccessPoint": "small files' folder",
    "AWS::IAM::Role": "role",
    "AWS::IAM::ManagedPolicy": "managed policy",
    "AWS::Batch::JobQueue": "queue",
    "AWS::Batch::QuotaShare": "quota share",
    "AWS::Batch::SchedulingPolicy": "queue",
    "AWS::Batch::ServiceEnvironment": "queue",
    "AWS::SQS::Queue": "message queue",
    "AWS::SSM::Parameter": "parameter",
    "AWS::Logs::LogGroup": "log group",
    "AWS::ECR::Repository": "image repository",
    "AWS::SNS::Topic": "topic",
    "AWS::EC2::VPC": "network",
    "AWS::EC2::Subnet": "network",
    "AWS::EC2::SecurityGroup": "network",
    "AWS::EC2::RouteTable": "network",
    "AWS::EC2::VPCEndpoint": "network",
    "AWS::EC2::FlowLog": "network",
    "AWS::EC2::InternetGateway": "network",
    "AWS::EC2::NatGateway": "network",
    "AWS::NetworkFirewall::Firewall": "firewall",
    "AWS::NetworkFirewall::FirewallPolicy": "firewall",
    "AWS::NetworkFirewall::RuleGroup": "firewall",
    "AWS::CloudWatch::Alarm": "alarm",
    "AWS::Events::Rule": "rule",
    "AWS::Budgets::Budget": "budget",
    "AWS::Lambda::Function": "function",
    "AWS::StepFunctions::StateMachine": "state machine",
    "AWS::DynamoDB::Table": "table",
    "AWS::SecretsManager::Secret": "secret",
    "AWS::EC2::LaunchTemplate": "launch template",
    "AWS::EC2::PlacementGroup": "launch template",
    "AWS::IAM::InstanceProfile": "instance profile",
    "AWS::PCS::Cluster": "cluster",
    "AWS::PCS::ComputeNodeGroup": "cluster",
    "AWS::PCS::Queue": "cluster",
    "AWS::SageMaker::Cluster": "cluster",
    "AWS::SageMaker::MlflowTrackingServer": "tracking server",
}
"""What the proof tells apart. A type that isn't here holds nothing of a tenant's and can't be acted as."""

FAMILIES: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "bucket": (
        (
            "object",
            "/",
            ("jobs/job-1/checkpoints/step-1/shard-0", "train/part-0.jsonl", "models/m/x/weights"),
        ),
    ),
    "log group": (("log stream", ":log-stream:", ("stream-1",)),),
}
"""What is in a thing: kind, what follows the thing's ARN, examples."""


def _actions(service: str, names: str) -> tuple[str, ...]:
    return tuple(f"{service}:{name}" for name in names.split())


ACTIONS: dict[str, tuple[str, ...]] = {
    "bucket": _actions(
        "s3",
        "ListBucket ListBucketVersions ListBucketMultipartUploads GetBucketLocation GetBucketAcl "
        "GetBucketPolicy GetBucketPolicyStatus GetBucketTagging GetBucketVersioning GetBucketLogging "
        "GetBucketNotification GetBucketPublicAccessBlock GetBucketOwnershipControls "
        "GetEncryptionConfiguration GetLifecycleConfiguration GetReplicationConfiguration "
        "GetInventoryConfiguration GetBucketObjectLockConfiguration PutBucketAcl PutBucketPolicy "
        "DeleteBucketPolicy PutBucketTagging PutBucketVersioning PutBucketLogging PutBucketNotification "
        "PutBucketPublicAccessBlock PutBucketOwnershipControls PutEncryptionConfiguration "
        "PutLifecycleConfiguration PutReplicationConfiguration PutInventoryConfiguration "
        "PutBucketObjectLockConfiguration PutBucketCORS PutBucketWebsite PutAnalyticsConfiguration "
        "PutMetricsConfiguration DeleteBucket CreateAccessPoint",
    ),
    "object": _actions(
        "s3",
        "GetObject GetObjectVersion GetObjectAcl GetObjectAttributes GetObjectTagging "
        "GetObjectVersionTagging GetObjectRetention GetObjectLegalHold GetObjectTorrent "
        "ListMultipartUploadParts AbortMultipartUpload PutObject PutObjectAcl PutObjectVersionAcl "
        "PutObjectTagging PutObjectRetention PutObjectLegalHold DeleteObject DeleteObjectVersion "
        "DeleteObjectTagging RestoreObject ReplicateObject ReplicateDelete BypassGovernanceRetention "
        "ObjectOwnerOverrideToBucketOwner UpdateObjectEncryption",
    ),
    "key": _actions(
        "kms",
        "Decrypt Encrypt GenerateDataKey GenerateDataKeyWithoutPlaintext GenerateDataKeyPair "
        "GenerateDataKeyPairWithoutPlaintext GenerateMac VerifyMac Sign Verify ReEncryptFrom ReEncryptTo "
        "DeriveSharedSecret CreateGrant RevokeGrant RetireGrant ListGrants DescribeKey GetKeyPolicy "
        "PutKeyPolicy GetKeyRotationStatus ListKeyPolicies ListKeyRotations ListResourceTags DisableKey EnableKey "
        "DisableKeyRotation EnableKeyRotation RotateKeyOnDemand ScheduleKeyDeletion CancelKeyDeletion "
        "CreateAlias UpdateAlias DeleteAlias TagResource UntagResource UpdateKeyDescription GetPublicKey "
        "ReplicateKey ImportKeyMaterial DeleteImportedKeyMaterial",
    ),
    "file system": _actions(
        "fsx",
        "UpdateFileSystem DeleteFileSystem CreateBackup CreateFileSystemFromBackup "
        "CreateDataRepositoryAssociation DeleteDataRepositoryAssociation CreateDataRepositoryTask "
        "ReleaseFileSystemNfsV3Locks AssociateFileSystemAliases ManageCrossAccountDataReplication "
        "TagResource UntagResource ListTagsForResource",
    ),
    "small files": _actions(
        "elasticfilesystem",
        "ClientMount ClientWrite ClientRootAccess Backup Restore ReplicationRead ReplicationWrite CreateAccessPoint "
        "CreateMountTarget DeleteMountTarget ModifyMountTargetSecurityGroups CreateReplicationConfiguration "
        "DeleteReplicationConfiguration PutFileSystemPolicy DeleteFileSystemPolicy DescribeFileSystemPolicy "
        "PutLifecycleConfiguration PutBackupPolicy UpdateFileSystem UpdateFileSystemProtection DeleteFileSystem "
        "TagResource UntagResource",
    ),
    "small files' folder": _actions("elasticfilesystem", "DeleteAccessPoint TagResource UntagResource"),
    "role": _actions(
        "iam",
        "CreateRole PassRole GetRole GetRolePolicy ListRolePolicies ListAttachedRolePolicies ListRoleTags "
        "PutRolePolicy DeleteRolePolicy AttachRolePolicy DetachRolePolicy UpdateRole UpdateRoleDescription "
        "UpdateAssumeRolePolicy PutRolePermissionsBoundary DeleteRolePermissionsBoundary DeleteRole "
        "TagRole UntagRole",
    )
    + _actions("sts", "AssumeRole AssumeRoleWithWebIdentity AssumeRoleWithSAML TagSession SetSourceIdentity"),
    "managed policy": _actions(
        "iam", "GetPolicy GetPolicyVersion CreatePolicyVersion SetDefaultPolicyVersion DeletePolicyVersion DeletePolicy"
    ),
    "queue": _actions(
        "batch",
        "SubmitServiceJob SubmitJob TerminateServiceJob TerminateJob CancelJob UpdateJobQueue "
        "DeleteJobQueue UpdateSchedulingPolicy DeleteSchedulingPolicy UpdateServiceEnvironment "
        "DeleteServiceEnvironment CreateQuotaShare TagResource UntagResource",
    ),
    "quota share": _actions("batch", "SubmitServiceJob UpdateQuotaShare DeleteQuotaShare TagResource UntagResource"),
    "service job": _actions("batch", "TerminateServiceJob UpdateServiceJob TagResource UntagResource"),
    "message queue": _actions(
        "sqs", "SendMessage ReceiveMessage DeleteMessage PurgeQueue DeleteQueue SetQueueAttributes AddPermission"
    ),
    "parameter": _actions(
        "ssm",
        "GetParameter GetParameters GetParametersByPath GetParameterHistory PutParameter DeleteParameter "
        "DeleteParameters LabelParameterVersion AddTagsToResource ListTagsForResource",
    ),
    "log group": _actions(
        "logs",
        "DescribeLogStreams FilterLogEvents StartQuery StartLiveTail CreateLogGroup CreateLogStream "
        "CreateExportTask DeleteLogGroup PutRetentionPolicy DeleteRetentionPolicy PutMetricFilter "
        "DeleteMetricFilter PutSubscriptionFilter DeleteSubscriptionFilter AssociateKmsKey "
        "DisassociateKmsKey GetLogGroupFields PutDataProtectionPolicy TagResource",
    ),
    "log stream": _actions("logs", "GetLogEvents PutLogEvents DeleteLogStream Unmask"),
    "training job": _actions(
        "sagemaker",
        "CreateTrainingJob DescribeTrainingJob StopTrainingJob UpdateTrainingJob DeleteTrainingJob AddTags "
        "DeleteTags ListTags",
    ),
    "model package": _actions(
        "sagemaker",
        "CreateModelPackage DescribeModelPackage BatchDescribeModelPackage ListModelPackages AccessModelPackage "
        "UpdateModelPackage DeleteModelPackage AddTags DeleteTags ListTags",
    ),
    "model package group": _actions(
        "sagemaker",
        "CreateModelPackageGroup DescribeModelPackageGroup DeleteModelPackageGroup GetModelPackageGroupPolicy "
        "PutModelPackageGroupPolicy DeleteModelPackageGroupPolicy AddTags DeleteTags ListTags",
    ),
    "tracking server": _actions(
        "sagemaker-mlflow",
        "CreateExperiment CreateModelVersion CreateRegisteredModel CreateRun DeleteExperiment "
        "DeleteLoggedModel DeleteLoggedModelTag DeleteModelVersion DeleteModelVersionTag "
        "DeleteRegisteredModel DeleteRegisteredModelAlias DeleteRegisteredModelTag DeleteRun DeleteTag "
        "DeleteTraceTag DeleteTraces EndTrace FinalizeLoggedModel GetDownloadURIForModelVersionArtifacts "
        "GetExperiment GetExperimentByName GetLatestModelVersions GetLoggedModel GetMetricHistory "
        "GetModelVersion GetModelVersionByAlias GetRegisteredModel GetRun GetTraceInfo ListArtifacts "
        "ListLoggedModelArtifacts LogBatch LogInputs LogLoggedModelParams LogMetric LogModel LogOutputs "
        "LogParam RenameRegisteredModel RestoreExperiment RestoreRun SearchExperiments SearchLoggedModels "
        "SearchModelVersions SearchRegisteredModels SearchRuns SearchTraces SetExperimentTag "
        "SetLoggedModelTags SetModelVersionTag SetRegisteredModelAlias SetRegisteredModelTag SetTag "
        "SetTraceTag StartTrace TransitionModelVersionStage UpdateExperiment UpdateModelVersion "
        "UpdateRegisteredModel UpdateRun",
    )
    + _actions(
        "sagemaker",
        "CreatePresignedMlflowTrackingServerUrl DescribeMlflowTrackingServer UpdateMlflowTrackingServer "
        "StartMlflowTrackingServer StopMlflowTrackingServer DeleteMlflowTrackingServer AddTags DeleteTags ListTags",
    ),
    "image repository": _actions(
        "ecr",
        "BatchCheckLayerAvailability BatchGetImage GetDownloadUrlForLayer DescribeImages ListImages "
        "PutImage InitiateLayerUpload UploadLayerPart CompleteLayerUpload BatchDeleteImage "
        "DeleteRepository SetRepositoryPolicy DeleteRepositoryPolicy PutImageTagMutability "
        "PutLifecyclePolicy StartImageScan ReplicateImage TagResource",
    ),
    "topic": _actions(
        "sns",
        "Publish Subscribe ListSubscriptionsByTopic SetTopicAttributes GetTopicAttributes AddPermission DeleteTopic",
    ),
    "network": _actions(
        "ec2",
        "CreateNetworkInterface RunInstances AuthorizeSecurityGroupIngress AuthorizeSecurityGroupEgress "
        "RevokeSecurityGroupIngress RevokeSecurityGroupEgress DeleteSecurityGroup ModifySecurityGroupRules "
        "ModifyVpcEndpoint DeleteVpcEndpoints CreateVpcEndpoint CreateRoute ReplaceRoute DeleteRoute "
        "AssociateRouteTable CreateVpcPeeringConnection CreateSubnet DeleteSubnet ModifySubnetAttribute "
        "DeleteVpc ModifyVpcAttribute CreateFlowLogs DeleteFlowLogs AttachInternetGateway CreateNatGateway "
        "CreateTags DeleteTags",
    ),
    "network interface": _actions(
        "ec2",
        "AttachNetworkInterface DetachNetworkInterface DeleteNetworkInterface "
        "ModifyNetworkInterfaceAttribute CreateNetworkInterfacePermission DeleteNetworkInterfacePermission "
        "AssignPrivateIpAddresses",
    ),
    "firewall": _actions(
        "network-firewall",
        "AssociateFirewallPolicy AssociateSubnets DisassociateSubnets DeleteFirewall DeleteFirewallPolicy "
        "DeleteRuleGroup DescribeRuleGroup UpdateFirewallPolicy UpdateLoggingConfiguration UpdateRuleGroup",
    ),
    "alarm": _actions("cloudwatch", "DeleteAlarms PutMetricAlarm SetAlarmState DisableAlarmActions EnableAlarmActions"),
    "rule": _actions("events", "PutRule DeleteRule DisableRule EnableRule PutTargets RemoveTargets"),
    "budget": _actions("budgets", "ViewBudget ModifyBudget CreateBudgetAction DeleteBudgetAction ExecuteBudgetAction"),
    "function": _actions(
        "lambda",
        "InvokeFunction GetFunction UpdateFunctionCode UpdateFunctionConfiguration AddPermission DeleteFunction",
    ),
    "state machine": _actions("states", "StartExecution StopExecution UpdateStateMachine DeleteStateMachine"),
    "table": _actions(
        "dynamodb",
        "GetItem Query Scan BatchGetItem PutItem UpdateItem DeleteItem BatchWriteItem DeleteTable ExportTable",
    ),
    "secret": _actions("secretsmanager", "GetSecretValue PutSecretValue UpdateSecret DeleteSecret PutResourcePolicy"),
    "machine": _actions("ssm", "StartSession SendCommand")
    + _actions(
        "ec2",
        "TerminateInstances StopInstances RebootInstances ModifyInstanceAttribute ModifyInstanceMetadataOptions "
        "AssociateIamInstanceProfile ReplaceIamInstanceProfileAssociation AttachVolume CreateImage GetConsoleOutput "
        "GetPasswordData CreateTags DeleteTags",
    )
    + _actions("ec2-instance-connect", "SendSSHPublicKey OpenTunnel"),
    "launch template": _actions(
        "ec2", "CreateLaunchTemplateVersion ModifyLaunchTemplate DeleteLaunchTemplate DeletePlacementGroup RunInstances"
    ),
    "instance profile": _actions(
        "iam",
        "GetInstanceProfile AddRoleToInstanceProfile RemoveRoleFromInstanceProfile DeleteInstanceProfile "
        "TagInstanceProfile UntagInstanceProfile",
    ),
    "cluster": _actions(
        "pcs",
        "GetCluster UpdateCluster DeleteCluster CreateQueue UpdateQueue DeleteQueue CreateComputeNodeGroup "
        "UpdateComputeNodeGroup DeleteComputeNodeGroup RegisterComputeNodeGroupInstance TagResource UntagResource",
    )
    + _actions(
        "sagemaker",
        "DescribeCluster UpdateCluster UpdateClusterSoftware DeleteCluster BatchAddClusterNodes "
        "BatchDeleteClusterNodes BatchRebootClusterNodes BatchReplaceClusterNodes ListClusterNodes DescribeClusterNode "
        "AttachClusterNodeVolume AttachClusterNodeNetworkInterface",
    )
    + _actions("ssm", "StartSession"),
    "stack": _actions(
        "cloudformation",
        "UpdateStack DeleteStack CreateChangeSet ExecuteChangeSet SetStackPolicy ContinueUpdateRollback",
    ),
}

SHARED_ALLOWED: dict[str, frozenset[str]] = {
    "image repository": frozenset(
        _actions(
            "ecr",
            "BatchCheckLayerAvailability BatchGetImage GetDownloadUrlForLayer DescribeImages ListImages",
        )
    ),
    "parameter": frozenset(_actions("ssm", "GetParameter GetParameters GetParameterHistory")),
    "log group": frozenset(_actions("logs", "DescribeLogStreams CreateLogGroup CreateLogStream")),
    "queue": frozenset(_actions("batch", "SubmitServiceJob")),
}
"""What tenants may do to what the platform shares with all of them: pull the image, read which one it is and was, open
streams in the log group where SageMaker writes everybody's output (IAM scopes that to the group, not to the stream),
and queue for machines: into the own share alone, and the broker alone, which is asked about apart."""

ESCAPES: tuple[str, ...] = (
    *_actions(
        "iam",
        "CreateRole CreateUser CreateAccessKey CreateLoginProfile CreatePolicy CreatePolicyVersion "
        "SetDefaultPolicyVersion PutRolePolicy AttachRolePolicy DetachRolePolicy DeleteRolePolicy "
        "UpdateAssumeRolePolicy PutRolePermissionsBoundary DeleteRolePermissionsBoundary PutUserPolicy "
        "AttachUserPolicy AddUserToGroup CreateInstanceProfile AddRoleToInstanceProfile "
        "CreateServiceLinkedRole CreateOpenIDConnectProvider UpdateSAMLProvider",
    ),
    *_actions("sts", "AssumeRole AssumeRoleWithWebIdentity AssumeRoleWithSAML GetFederationToken"),
    *_actions(
        "sagemaker",
        "CreateProcessingJob CreateHyperParameterTuningJob CreateTransformJob CreateAutoMLJob "
        "CreateAutoMLJobV2 CreateNotebookInstance CreatePresignedNotebookInstanceUrl CreateDomain "
        "CreatePresignedDomainUrl CreateSpace CreateApp CreateCluster UpdateCluster CreatePipeline "
        "StartPipelineExecution CreateModel CreateEndpoint CreateTrialComponent UpdateTrainingJob "
        "CreateTrainingPlan UpdateModelPackage DeleteModelPackage DeleteModelPackageGroup PutModelPackageGroupPolicy "
        "CreateMlflowTrackingServer UpdateMlflowTrackingServer DeleteMlflowTrackingServer CreateMlflowApp "
        "CallMlflowAppApi",
    ),
    *_actions("sagemaker-mlflow", "DeleteExperiment DeleteRun DeleteRegisteredModel DeleteTraces RestoreRun"),
    *_actions(
        "batch",
        "SubmitServiceJob SubmitJob RegisterJobDefinition CreateJobQueue CreateServiceEnvironment CreateQuotaShare "
        "UpdateQuotaShare DeleteQuotaShare UpdateServiceJob DescribeServiceJob",
    ),
    *_actions(
        "ec2",
        "RunInstances CreateVpcPeeringConnection AcceptVpcPeeringConnection CreateRoute "
        "CreateInternetGateway AttachInternetGateway CreateNatGateway AuthorizeSecurityGroupIngress "
        "AuthorizeSecurityGroupEgress ModifyVpcEndpoint CreateTransitGatewayVpcAttachment "
        "AssociateIamInstanceProfile",
    ),
    *_actions("network-firewall", "CreateFirewall UpdateFirewallPolicy UpdateLoggingConfiguration UpdateRuleGroup"),
    *_actions("lambda", "CreateFunction UpdateFunctionCode AddPermission CreateFunctionUrlConfig"),
    *_actions("cloudformation", "CreateStack UpdateStack CreateChangeSet CreateStackSet"),
    *_actions("events", "PutRule PutTargets PutPermission"),
    *_actions("states", "CreateStateMachine StartExecution"),
    *_actions("ssm", "SendCommand StartAutomationExecution CreateAssociation"),
    *_actions("logs", "PutResourcePolicy PutDestinationPolicy PutSubscriptionFilter"),
    *_actions("cloudtrail", "StopLogging DeleteTrail UpdateTrail PutEventSelectors"),
    *_actions("organizations", "LeaveOrganization DetachPolicy"),
    *_actions("s3", "CreateAccessPoint PutAccessPointPolicy CreateJob PutAccountPublicAccessBlock"),
    *_actions("kms", "PutKeyPolicy ScheduleKeyDeletion ReplicateKey"),
    *_actions("glue", "CreateDevEndpoint CreateJob"),
    *_actions("codebuild", "CreateProject StartBuild"),
    *_actions("ecs", "RunTask RegisterTaskDefinition"),
    *_actions("ram", "CreateResourceShare"),
    *_actions("datasync", "CreateTask StartTaskExecution"),
    *_actions("fsx", "CreateFileSystemFromBackup CreateDataRepositoryAssociation CreateDataRepositoryTask CopyBackup"),
    *_actions("ecr", "PutImage BatchDeleteImage SetRepositoryPolicy PutReplicationConfiguration"),
)
"""What no tenant's role may do to anything: raise its own rights, start compute that no guard-rail binds, open its
network, hand rights or data to somebody else, change what was registered."""

LISTINGS: tuple[str, ...] = (
    *_actions("batch", "DescribeJobQueues DescribeSchedulingPolicies DescribeServiceEnvironments ListServiceJobs"),
    *_actions("cloudwatch", "DescribeAlarms GetMetricData GetMetricStatistics ListMetrics"),
    *_actions(
        "ec2",
        "DescribeDhcpOptions DescribeInstances DescribeNetworkInterfaces DescribeSecurityGroups DescribeSubnets "
        "DescribeVpcs",
    ),
    *_actions("fsx", "DescribeFileSystems"),
    *_actions("sagemaker", "ListTrainingJobs ListModelPackageGroups"),
    *_actions("servicequotas", "GetServiceQuota ListServiceQuotas"),
    *_actions("iam", "ListRoles ListPolicies"),
    *_actions("kms", "ListKeys ListAliases"),
    *_actions("s3", "ListAllMyBuckets"),
    *_actions("logs", "DescribeLogGroups"),
    *_actions("ecr", "GetAuthorizationToken DescribeRegistry"),
    *_actions("tag", "GetResources"),
    *_actions("ce", "GetCostAndUsage"),
    *_actions("cloudtrail", "LookupEvents"),
)
"""Actions that IAM scopes to no resource: they show that things exist. Which of them a tenant has is reported, because
no policy can hide one tenant's names there from another."""


WITHOUT_RESOURCE = frozenset(
    {
        "sts:getcalleridentity",
        "cloudwatch:putmetricdata",
        "ssm:updateinstanceinformation",
        "sagemaker-mlflow:accessui",
    }
)
"""Neither on a thing nor a listing: who am I, metrics, which the proof asks about by their namespace, a machine's own
sign of life, and MLflow's page, whose the link says that opens it."""

ON_NO_RESOURCE = WITHOUT_RESOURCE | {action.lower() for action in LISTINGS}
"""What a policy can only allow on `*`."""


@lru_cache(maxsize=1_000)
def every_action(kind: str, patterns: frozenset[str]) -> tuple[str, ...]:
    """The kind's actions, and those of its services that some policy names and this page doesn't know."""
    own = ACTIONS[kind]
    services = {action.partition(":")[0] for action in own}
    known = {action.lower() for actions in (*ACTIONS.values(), ESCAPES) for action in actions} | ON_NO_RESOURCE
    extra = set()
    for pattern in patterns:
        service, _, _ = pattern.partition(":")
        wild = glob(pattern, ignore_case=True)
        if service in services and not any(wild.fullmatch(action) for action in known):
            extra.add(pattern.replace("*", "Any").replace("?", "x"))
    return (*own, *sorted(extra))
