"""Small templates: for every API-backed type at least one resource, grouped as they are used together."""

from typing import Any

ACCOUNT = "123456789012"
TAGS = [{"Key": "team", "Value": "tests"}]


def ref(name: str) -> dict[str, str]:
    """Ref."""
    return {"Ref": name}


def att(name: str, attribute: str) -> dict[str, list[str]]:
    """Fn::GetAtt."""
    return {"Fn::GetAtt": [name, attribute]}


def resource(kind: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """One resource."""
    return {"Type": f"AWS::{kind}", "Properties": properties or {}, **more}


def trust(service: str) -> dict[str, Any]:
    """A trust policy for a service."""
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}


def document(*actions: str, resource_arn: Any = "*", principal: Any = None) -> dict[str, Any]:
    """A policy document that allows these actions."""
    statement: dict[str, Any] = {"Effect": "Allow", "Action": list(actions), "Resource": resource_arn}
    return {"Version": "2012-10-17", "Statement": [statement | ({"Principal": principal} if principal else {})]}


def network() -> dict[str, Any]:
    """A VPC with everything in it."""
    everywhere = "0.0.0.0/0"
    return {
        "Vpc": resource("EC2::VPC", {"CidrBlock": "10.9.0.0/16", "EnableDnsHostnames": True, "Tags": TAGS}),
        "Subnet": resource(
            "EC2::Subnet",
            {"VpcId": ref("Vpc"), "CidrBlock": "10.9.1.0/24", "AvailabilityZone": "us-east-1a", "Tags": TAGS},
        ),
        "Block": resource("EC2::VPCCidrBlock", {"VpcId": ref("Vpc"), "CidrBlock": "100.64.0.0/27"}),
        "Table": resource("EC2::RouteTable", {"VpcId": ref("Vpc")}),
        "Association": resource(
            "EC2::SubnetRouteTableAssociation", {"SubnetId": ref("Subnet"), "RouteTableId": ref("Table")}
        ),
        "Internet": resource("EC2::InternetGateway"),
        "Attached": resource("EC2::VPCGatewayAttachment", {"VpcId": ref("Vpc"), "InternetGatewayId": ref("Internet")}),
        "Out": resource(
            "EC2::Route",
            {"RouteTableId": ref("Table"), "DestinationCidrBlock": everywhere, "GatewayId": ref("Internet")},
            DependsOn="Attached",
        ),
        "Address": resource("EC2::EIP", {"Domain": "vpc"}),
        "Nat": resource("EC2::NatGateway", {"SubnetId": ref("Subnet"), "AllocationId": att("Address", "AllocationId")}),
        "Group": resource(
            "EC2::SecurityGroup",
            {
                "GroupDescription": "efa",
                "VpcId": ref("Vpc"),
                "SecurityGroupEgress": [{"CidrIp": "10.9.0.0/16", "IpProtocol": "tcp", "FromPort": 443, "ToPort": 443}],
            },
        ),
        "In": resource(
            "EC2::SecurityGroupIngress",
            {
                "GroupId": att("Group", "GroupId"),
                "IpProtocol": "-1",
                "SourceSecurityGroupId": att("Group", "GroupId"),
                "Description": "efa",
            },
        ),
        "OutOfGroup": resource(
            "EC2::SecurityGroupEgress",
            {
                "GroupId": att("Group", "GroupId"),
                "IpProtocol": "-1",
                "DestinationSecurityGroupId": att("Group", "GroupId"),
            },
        ),
        "Endpoint": resource(
            "EC2::VPCEndpoint",
            {
                "VpcId": ref("Vpc"),
                "ServiceName": "com.amazonaws.us-east-1.s3",
                "VpcEndpointType": "Gateway",
                "RouteTableIds": [ref("Table")],
                "PolicyDocument": document("s3:GetObject", principal="*"),
            },
        ),
        "FlowRole": resource("IAM::Role", {"AssumeRolePolicyDocument": trust("vpc-flow-logs.amazonaws.com")}),
        "FlowGroup": resource("Logs::LogGroup", {"RetentionInDays": 30}),
        "Flows": resource(
            "EC2::FlowLog",
            {
                "ResourceId": ref("Vpc"),
                "ResourceType": "VPC",
                "TrafficType": "ALL",
                "LogDestinationType": "cloud-watch-logs",
                "LogGroupName": ref("FlowGroup"),
                "DeliverLogsPermissionArn": att("FlowRole", "Arn"),
            },
        ),
        "Template": resource(
            "EC2::LaunchTemplate", {"LaunchTemplateData": {"InstanceType": "p5.4xlarge", "EbsOptimized": True}}
        ),
    }


def storage() -> dict[str, Any]:
    """A key, buckets, a file system, a repository."""
    everyone = {"AWS": f"arn:aws:iam::{ACCOUNT}:root"}
    everything = {"Fn::Sub": "${Bucket.Arn}/*"}
    return {
        "Key": resource(
            "KMS::Key",
            {"KeyPolicy": document("kms:*", principal=everyone), "EnableKeyRotation": True, "Tags": TAGS},
        ),
        "Alias": resource("KMS::Alias", {"AliasName": "alias/STACK", "TargetKeyId": ref("Key")}),
        "Bucket": resource(
            "S3::Bucket",
            {
                "BucketEncryption": {
                    "ServerSideEncryptionConfiguration": [
                        {
                            "BucketKeyEnabled": True,
                            "ServerSideEncryptionByDefault": {
                                "SSEAlgorithm": "aws:kms",
                                "KMSMasterKeyID": att("Key", "Arn"),
                            },
                        }
                    ]
                },
                "VersioningConfiguration": {"Status": "Enabled"},
                "PublicAccessBlockConfiguration": {
                    "BlockPublicAcls": True,
                    "BlockPublicPolicy": True,
                    "IgnorePublicAcls": True,
                    "RestrictPublicBuckets": True,
                },
                "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
                "LifecycleConfiguration": {
                    "Rules": [
                        {
                            "Id": "old",
                            "Status": "Enabled",
                            "Prefix": "tmp/",
                            "ExpirationInDays": 7,
                            "NoncurrentVersionExpiration": {"NoncurrentDays": 30},
                            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
                        }
                    ]
                },
                "Tags": TAGS,
            },
        ),
        "BucketPolicy": resource(
            "S3::BucketPolicy",
            {
                "Bucket": ref("Bucket"),
                "PolicyDocument": document("s3:GetObject", resource_arn=everything, principal=everyone),
            },
        ),
        "Vpc": resource("EC2::VPC", {"CidrBlock": "10.8.0.0/16"}),
        "Subnet": resource("EC2::Subnet", {"VpcId": ref("Vpc"), "CidrBlock": "10.8.1.0/24"}),
        "Files": resource(
            "FSx::FileSystem",
            {
                "FileSystemType": "LUSTRE",
                "StorageCapacity": 1200,
                "SubnetIds": [ref("Subnet")],
                "KmsKeyId": ref("Key"),
                "LustreConfiguration": {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
            },
        ),
        "Repository": resource(
            "ECR::Repository",
            {"ImageScanningConfiguration": {"ScanOnPush": True}, "ImageTagMutability": "IMMUTABLE"},
        ),
    }


def identity() -> dict[str, Any]:
    """A role with a boundary and every kind of policy."""
    return {
        "Boundary": resource("IAM::ManagedPolicy", {"PolicyDocument": document("s3:*", "sts:*"), "Path": "/tests/"}),
        "Role": resource(
            "IAM::Role",
            {
                "AssumeRolePolicyDocument": trust("sagemaker.amazonaws.com"),
                "Path": "/tests/",
                "PermissionsBoundary": ref("Boundary"),
                "Policies": [{"PolicyName": "inline", "PolicyDocument": document("s3:GetObject")}],
                "MaxSessionDuration": 7200,
                "Tags": TAGS,
            },
        ),
        "Inline": resource(
            "IAM::Policy",
            {"PolicyName": "more", "PolicyDocument": document("s3:PutObject"), "Roles": [ref("Role")]},
        ),
        "Attached": resource(
            "IAM::ManagedPolicy", {"PolicyDocument": document("s3:ListBucket"), "Roles": [ref("Role")]}
        ),
        "Profile": resource("IAM::InstanceProfile", {"Roles": [ref("Role")]}),
    }


def operations() -> dict[str, Any]:
    """Logs, metrics, alarms, topics, rules, parameters, a budget."""
    return {
        "Group": resource("Logs::LogGroup", {"RetentionInDays": 90, "Tags": TAGS}),
        "Filter": resource(
            "Logs::MetricFilter",
            {
                "LogGroupName": ref("Group"),
                "FilterPattern": "ERROR",
                "MetricTransformations": [{"MetricName": "errors", "MetricNamespace": "tests", "MetricValue": "1"}],
            },
        ),
        "Topic": resource("SNS::Topic", {"DisplayName": "alerts"}),
        "TopicPolicy": resource(
            "SNS::TopicPolicy",
            {
                "Topics": [ref("Topic")],
                "PolicyDocument": document("sns:Publish", principal={"Service": "events.amazonaws.com"}),
            },
        ),
        "Mail": resource(
            "SNS::Subscription", {"TopicArn": ref("Topic"), "Protocol": "email", "Endpoint": "a@example.com"}
        ),
        "Alarm": resource(
            "CloudWatch::Alarm",
            {
                "Namespace": "tests",
                "MetricName": "errors",
                "Statistic": "Sum",
                "Period": 300,
                "EvaluationPeriods": 1,
                "Threshold": 0,
                "ComparisonOperator": "GreaterThanThreshold",
                "AlarmActions": [ref("Topic")],
            },
        ),
        "Dashboard": resource("CloudWatch::Dashboard", {"DashboardName": "STACK", "DashboardBody": '{"widgets": []}'}),
        "Rule": resource(
            "Events::Rule",
            {
                "EventPattern": {"source": ["aws.sagemaker"]},
                "State": "ENABLED",
                "Targets": [{"Id": "topic", "Arn": ref("Topic")}],
            },
        ),
        "Parameter": resource("SSM::Parameter", {"Name": "/STACK/value", "Type": "String", "Value": "1"}),
        "Budget": resource(
            "Budgets::Budget",
            {
                "Budget": {
                    "BudgetType": "COST",
                    "TimeUnit": "MONTHLY",
                    "BudgetLimit": {"Amount": 100, "Unit": "USD"},
                    "CostFilters": {"TagKeyValue": ["user:team$tests"]},
                },
                "NotificationsWithSubscribers": [
                    {
                        "Notification": {
                            "NotificationType": "ACTUAL",
                            "ComparisonOperator": "GREATER_THAN",
                            "Threshold": 80,
                        },
                        "Subscribers": [{"SubscriptionType": "EMAIL", "Address": "a@example.com"}],
                    }
                ],
            },
        ),
    }


def queues() -> dict[str, Any]:
    """A queue for SageMaker training jobs."""
    return {
        "Place": resource(
            "Batch::ServiceEnvironment",
            {
                "ServiceEnvironmentType": "SAGEMAKER_TRAINING",
                "CapacityLimits": [{"MaxCapacity": 4, "CapacityUnit": "NUM_INSTANCES"}],
            },
        ),
        "Fair": resource("Batch::SchedulingPolicy", {"FairsharePolicy": {"ShareDecaySeconds": 3600}}),
        "Queue": resource(
            "Batch::JobQueue",
            {
                "JobQueueType": "SAGEMAKER_TRAINING",
                "Priority": 1,
                "SchedulingPolicyArn": att("Fair", "Arn"),
                "ServiceEnvironmentOrder": [{"Order": 1, "ServiceEnvironment": att("Place", "ServiceEnvironmentArn")}],
            },
        ),
        **_shared_queue(),
    }


def _shared_queue() -> dict[str, Any]:
    """A queue that is divided into shares, and one of them."""
    limit = [{"MaxCapacity": 4, "CapacityUnit": "ml.p5.4xlarge"}]
    return {
        "SharedPlace": resource(
            "Batch::ServiceEnvironment", {"ServiceEnvironmentType": "SAGEMAKER_TRAINING", "CapacityLimits": limit}
        ),
        "Shares": resource("Batch::SchedulingPolicy", {"QuotaSharePolicy": {"IdleResourceAssignmentStrategy": "FIFO"}}),
        "SharedQueue": resource(
            "Batch::JobQueue",
            {
                "JobQueueType": "SAGEMAKER_TRAINING",
                "Priority": 1,
                "SchedulingPolicyArn": att("Shares", "Arn"),
                "ServiceEnvironmentOrder": [
                    {"Order": 1, "ServiceEnvironment": att("SharedPlace", "ServiceEnvironmentArn")}
                ],
            },
        ),
        "Share": resource(
            "Batch::QuotaShare",
            {
                "QuotaShareName": "acme",
                "JobQueue": ref("SharedQueue"),
                "CapacityLimits": limit,
                "ResourceSharingConfiguration": {"Strategy": "RESERVE"},
                "PreemptionConfiguration": {"InSharePreemption": "DISABLED"},
                "State": "ENABLED",
            },
        ),
    }


def functions() -> dict[str, Any]:
    """A function, its role, and who may call it."""
    return {
        "Role": resource("IAM::Role", {"AssumeRolePolicyDocument": trust("lambda.amazonaws.com")}),
        "Function": resource(
            "Lambda::Function",
            {
                "Runtime": "python3.13",
                "Handler": "index.handler",
                "Code": {"ZipFile": "def handler(event, context):\n    return event\n"},
                "Role": att("Role", "Arn"),
                "Environment": {"Variables": {"TONE": "soft"}},
                "Tags": TAGS,
            },
        ),
        "Permission": resource(
            "Lambda::Permission",
            {
                "Action": "lambda:InvokeFunction",
                "FunctionName": att("Function", "Arn"),
                "Principal": "events.amazonaws.com",
            },
        ),
    }


GROUPS = {
    "network": network,
    "storage": storage,
    "identity": identity,
    "operations": operations,
    "queues": queues,
    "functions": functions,
}


def template(group: str, stack_name: str) -> dict[str, Any]:
    """The template of a group, its explicit names made the stack's own."""
    import json

    resources = json.dumps(GROUPS[group]()).replace("STACK", stack_name)
    return {"Resources": json.loads(resources)}
