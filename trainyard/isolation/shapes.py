"""What each type of resource may say: every property that the proof has looked at, and the only value of some.

A property is a way that nobody has looked at as much as a type is: a function takes a layer or a file system, a bucket
copies itself elsewhere, a key is replicated to another region, a machine's metadata opens to containers. So a property
that is not listed here is a finding, whatever stands in it, and so is a value that decides who gets in and isn't there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainyard.isolation.account import DOCUMENTS

Shortcoming = tuple[str, object, str]
"""Property, what it says, what is wrong."""

_LOOKED_AT = {
    "AWS::Batch::JobQueue": """
        JobQueueName JobQueueType Priority SchedulingPolicyArn ServiceEnvironmentOrder.* State Tags.*""",
    "AWS::Batch::QuotaShare": """
        CapacityLimits.* JobQueue PreemptionConfiguration.* QuotaShareName ResourceSharingConfiguration.* State
        Tags.*""",
    "AWS::Batch::SchedulingPolicy": "FairsharePolicy.* QuotaSharePolicy.* Tags.*",
    "AWS::Batch::ServiceEnvironment": "CapacityLimits.* ServiceEnvironmentType Tags.*",
    "AWS::Budgets::Budget": """
        Budget.BudgetLimit.* Budget.BudgetType Budget.CostFilters.* Budget.TimeUnit NotificationsWithSubscribers.*
        ResourceTags.*""",
    "AWS::Budgets::BudgetsAction": """
        ActionThreshold.* ActionType ApprovalModel BudgetName Definition.IamActionDefinition.PolicyArn
        Definition.IamActionDefinition.Roles ExecutionRoleArn NotificationType ResourceTags.* Subscribers.*""",
    "AWS::CE::AnomalyMonitor": "MonitorName MonitorSpecification MonitorType ResourceTags.*",
    "AWS::CE::AnomalySubscription": """
        Frequency MonitorArnList ResourceTags.* Subscribers.* SubscriptionName ThresholdExpression""",
    "AWS::CloudTrail::Trail": """
        AdvancedEventSelectors.* EnableLogFileValidation IncludeGlobalServiceEvents IsLogging IsMultiRegionTrail
        KMSKeyId S3BucketName Tags.* TrailName""",
    "AWS::CloudWatch::Alarm": """
        AlarmActions AlarmDescription ComparisonOperator DatapointsToAlarm Dimensions.* EvaluationPeriods MetricName
        Namespace OKActions Period Statistic Tags.* Threshold TreatMissingData""",
    "AWS::CloudWatch::Dashboard": "DashboardBody Tags.*",
    "AWS::EC2::EIP": "Domain Tags.*",
    "AWS::EC2::FlowLog": """
        DeliverLogsPermissionArn LogDestinationType LogGroupName ResourceId ResourceType Tags.* TrafficType""",
    "AWS::EC2::InternetGateway": "Tags.*",
    "AWS::EC2::LaunchTemplate": """
        LaunchTemplateData.BlockDeviceMappings.DeviceName LaunchTemplateData.BlockDeviceMappings.Ebs.DeleteOnTermination
        LaunchTemplateData.BlockDeviceMappings.Ebs.Encrypted LaunchTemplateData.BlockDeviceMappings.Ebs.KmsKeyId
        LaunchTemplateData.BlockDeviceMappings.Ebs.VolumeSize LaunchTemplateData.BlockDeviceMappings.Ebs.VolumeType
        LaunchTemplateData.CapacityReservationSpecification.* LaunchTemplateData.InstanceMarketOptions.*
        LaunchTemplateData.InstanceType LaunchTemplateData.MetadataOptions.* LaunchTemplateData.Monitoring.*
        LaunchTemplateData.NetworkInterfaces.DeleteOnTermination LaunchTemplateData.NetworkInterfaces.DeviceIndex
        LaunchTemplateData.NetworkInterfaces.Groups LaunchTemplateData.NetworkInterfaces.InterfaceType
        LaunchTemplateData.NetworkInterfaces.NetworkCardIndex LaunchTemplateData.NetworkInterfaces.SubnetId
        LaunchTemplateData.Placement.GroupName LaunchTemplateData.TagSpecifications.* LaunchTemplateData.UserData
        TagSpecifications.*""",
    "AWS::EC2::NatGateway": "AllocationId SubnetId Tags.*",
    "AWS::EC2::PlacementGroup": "Strategy Tags.*",
    "AWS::EC2::Route": "DestinationCidrBlock GatewayId NatGatewayId RouteTableId VpcEndpointId",
    "AWS::EC2::RouteTable": "Tags.* VpcId",
    "AWS::EC2::SecurityGroup": "GroupDescription SecurityGroupEgress.* SecurityGroupIngress.* Tags.* VpcId",
    "AWS::EC2::SecurityGroupEgress": """
        CidrIp Description DestinationSecurityGroupId FromPort GroupId IpProtocol ToPort""",
    "AWS::EC2::SecurityGroupIngress": """
        CidrIp Description FromPort GroupId IpProtocol SourceSecurityGroupId ToPort""",
    "AWS::EC2::Subnet": "AvailabilityZone CidrBlock MapPublicIpOnLaunch Tags.* VpcId",
    "AWS::EC2::SubnetRouteTableAssociation": "RouteTableId SubnetId",
    "AWS::EC2::VPC": "CidrBlock EnableDnsHostnames EnableDnsSupport InstanceTenancy Tags.*",
    "AWS::EC2::VPCCidrBlock": "CidrBlock VpcId",
    "AWS::EC2::VPCEndpoint": """
        PrivateDnsEnabled RouteTableIds SecurityGroupIds ServiceName SubnetIds Tags.* VpcEndpointType VpcId""",
    "AWS::EC2::VPCGatewayAttachment": "InternetGatewayId VpcId",
    "AWS::ECR::Repository": """
        EmptyOnDelete EncryptionConfiguration.* ImageScanningConfiguration.* ImageTagMutability LifecyclePolicy.*
        RepositoryName Tags.*""",
    "AWS::EFS::AccessPoint": "AccessPointTags.* FileSystemId RootDirectory.*",
    "AWS::EFS::FileSystem": """
        BackupPolicy.* Encrypted FileSystemTags.* KmsKeyId LifecyclePolicies.* PerformanceMode ThroughputMode""",
    "AWS::EFS::MountTarget": "FileSystemId SecurityGroups SubnetId",
    "AWS::Events::Rule": """
        Description EventPattern.* ScheduleExpression State Tags.* Targets.Arn Targets.Id Targets.Input
        Targets.InputTransformer.*""",
    "AWS::FSx::DataRepositoryAssociation": """
        BatchImportMetaDataOnCreate DataRepositoryPath FileSystemId FileSystemPath S3.* Tags.*""",
    "AWS::FSx::FileSystem": """
        FileSystemType FileSystemTypeVersion KmsKeyId LustreConfiguration.AutomaticBackupRetentionDays
        LustreConfiguration.CopyTagsToBackups LustreConfiguration.DataCompressionType LustreConfiguration.DeploymentType
        LustreConfiguration.EfaEnabled LustreConfiguration.MetadataConfiguration.*
        LustreConfiguration.PerUnitStorageThroughput SecurityGroupIds StorageCapacity StorageType SubnetIds Tags.*""",
    "AWS::IAM::InstanceProfile": "InstanceProfileName Path Roles",
    "AWS::IAM::ManagedPolicy": "Description Groups ManagedPolicyName Path Roles Users",
    "AWS::IAM::Policy": "Groups PolicyName Roles Users",
    "AWS::IAM::Role": """
        Description ManagedPolicyArns MaxSessionDuration Path PermissionsBoundary Policies.* RoleName Tags.*""",
    "AWS::KMS::Key": "Description EnableKeyRotation PendingWindowInDays RotationPeriodInDays Tags.*",
    "AWS::Lambda::Function": """
        Code.S3Bucket Code.S3Key Code.ZipFile Description Environment.Variables.BROKER Environment.Variables.METER
        Environment.Variables.RESUMER FunctionName Handler LoggingConfig.LogGroup MemorySize Role Runtime Tags.*
        Timeout""",
    "AWS::Lambda::Permission": "Action FunctionName Principal SourceArn",
    "AWS::Logs::LogGroup": "KmsKeyId LogGroupName RetentionInDays Tags.*",
    "AWS::Logs::MetricFilter": "FilterPattern LogGroupName MetricTransformations.*",
    "AWS::NetworkFirewall::Firewall": """
        DeleteProtection Description FirewallName FirewallPolicyArn SubnetMappings.* Tags.* VpcId""",
    "AWS::NetworkFirewall::FirewallPolicy": "Description FirewallPolicy.* FirewallPolicyName Tags.*",
    "AWS::NetworkFirewall::LoggingConfiguration": "FirewallArn LoggingConfiguration.*",
    "AWS::NetworkFirewall::RuleGroup": "Capacity Description RuleGroup.* RuleGroupName Tags.* Type",
    "AWS::PCS::Cluster": "Networking.* Scheduler.* Size SlurmConfiguration.* Tags.*",
    "AWS::PCS::ComputeNodeGroup": """
        AmiId ClusterId CustomLaunchTemplate.* IamInstanceProfileArn InstanceConfigs.* Name PurchaseOption
        ScalingConfiguration.* SpotOptions.* SubnetIds Tags.*""",
    "AWS::PCS::Queue": "ClusterId ComputeNodeGroupConfigurations.* Name SlurmConfiguration.* Tags.*",
    "AWS::S3::Bucket": """
        AccessControl BucketEncryption.* LifecycleConfiguration.* ObjectLockConfiguration.* ObjectLockEnabled
        OwnershipControls.* PublicAccessBlockConfiguration.* Tags.* VersioningConfiguration.*""",
    "AWS::S3::BucketPolicy": "Bucket",
    "AWS::SNS::Subscription": "Endpoint Protocol TopicArn",
    "AWS::SNS::Topic": "DisplayName KmsMasterKeyId Subscription.* Tags.*",
    "AWS::SNS::TopicPolicy": "Topics",
    "AWS::SSM::Parameter": "Description Name Tags.* Tier Type Value",
    "AWS::SageMaker::Cluster": """
        ClusterName InstanceGroups.ExecutionRole InstanceGroups.InstanceCount InstanceGroups.InstanceGroupName
        InstanceGroups.InstanceStorageConfigs.* InstanceGroups.InstanceType InstanceGroups.LifeCycleConfig.*
        InstanceGroups.MinInstanceCount InstanceGroups.NetworkInterface.* InstanceGroups.SlurmConfig.*
        InstanceGroups.TrainingPlanArn NodeProvisioningMode NodeRecovery Orchestrator.Slurm.* Tags.*
        VpcConfig.SecurityGroupIds VpcConfig.Subnets""",
    "AWS::SageMaker::MlflowTrackingServer": """
        ArtifactStoreUri AutomaticModelRegistration RoleArn Tags.* TrackingServerName TrackingServerSize""",
}
"""By type, with the policies that DOCUMENTS has; `X.*` is all below X. A type of the catalogue that isn't here has no
property that anybody has looked at."""

_MUST: dict[str, dict[str, object]] = {
    "AWS::Budgets::BudgetsAction": {
        "ActionType": "APPLY_IAM_POLICY",
        "ApprovalModel": "AUTOMATIC",
    },
    "AWS::EC2::LaunchTemplate": {
        "LaunchTemplateData.MetadataOptions.HttpTokens": "required",
        "LaunchTemplateData.MetadataOptions.HttpPutResponseHopLimit": 1,
        "LaunchTemplateData.BlockDeviceMappings.Ebs.Encrypted": True,
    },
    "AWS::EFS::FileSystem": {"Encrypted": True},
    "AWS::EC2::FlowLog": {"TrafficType": "ALL"},
    "AWS::EC2::Subnet": {"MapPublicIpOnLaunch": False},
    "AWS::Lambda::Function": {"Runtime": "python3.13"},
    "AWS::Lambda::Permission": {"Action": "lambda:InvokeFunction"},
    "AWS::NetworkFirewall::RuleGroup": {"Type": "STATEFUL"},
}
"""What must stand there: what AWS takes where nothing does would open something, or start nothing."""


def shortcomings(kind: str, properties: Mapping[str, Any]) -> Iterator[Shortcoming]:
    """What the resource says that nobody has looked at, and what it doesn't say as it must."""
    known = {*_LOOKED_AT.get(kind, "").split(), *(f"{name}.*" for name in DOCUMENTS.get(kind, ()))}
    first: dict[str, object] = {}
    for where, value in leaves(properties):
        first.setdefault(where, value)
    for where, value in first.items():
        if not _is_known(where, known):
            yield where, value, "says what the isolation proof hasn't looked at (trainyard/isolation/shapes.py)"
    for where, right in _MUST.get(kind, {}).items():
        for value in stated(properties, where):
            if _plain(value) != _plain(right):
                yield where, value, f"is not {right}"


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, object]]:
    """Every value with its place; those in a list stand where the list does."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list) and value:
        for item in value:
            yield from leaves(item, where)
    else:
        yield where, value


_INSTEAD = {"EbsVolumeConfig": "FsxLustreConfig"}
"""What an item of a list may be instead: a file system that is mounted has no volume."""


def stated(properties: object, where: str) -> list[object]:
    """What stands in a place, of each item of each list on the way: None where one lacks it. Of two disks the one that
    is under a key says nothing of the other."""
    name, _, rest = where.partition(".")
    if isinstance(properties, list) and properties:
        found = [value for item in properties for value in stated(item, where)]
        return found or [None]
    if not name:
        return [properties]
    if not isinstance(properties, dict) or name not in properties:
        is_another = isinstance(properties, dict) and _INSTEAD.get(name) in properties
        return [] if is_another else [None]
    return stated(properties[name], rest)


def _is_known(where: str, known: set[str]) -> bool:
    parts = where.split(".")
    ways = (".".join([*parts[:length], "*"]) for length in range(1, len(parts) + 1))
    return where in known or any(way in known for way in ways)


def _plain(value: object) -> str:
    """CloudFormation takes true and "true" for the same."""
    return str(value).lower()
