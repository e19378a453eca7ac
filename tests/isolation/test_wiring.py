"""What the templates connect beside their policies: each way that one mistake opens is found, and named."""

import copy
import json
import re
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from isolation_testing import (
    FOUNDATION,
    OTHERS_TRAINING,
    PLATFORM,
    STRANGER,
    TRAINING,
    Mistake,
    Templates,
    add,
    logical_id,
    others,
    others_arn,
    resource,
)

from trainyard.errors import JobFailedError
from trainyard.isolation import Site, prove, resolve_templates
from trainyard.isolation.report import lines, page
from trainyard.isolation.templates import Deployment, synthesize
from trainyard.spec.platform import EnvironmentSpec, load_environment

ROOT = Path(__file__).parents[2]
Alter = Callable[[Callable[[Any], None]], Site]


def groups_rule(templates: Templates, names: Deployment) -> None:
    rule = resource(templates, FOUNDATION, "EC2::SecurityGroupIngress", "NetworkFileSystemGroup")
    rule["SourceSecurityGroupId"] = others(names, "EC2::SecurityGroup", "NetworkTraining")


def addresses(templates: Templates, names: Deployment) -> None:
    rule = resource(templates, FOUNDATION, "EC2::SecurityGroupIngress", "NetworkFileSystemGroup")
    del rule["SourceSecurityGroupId"]
    rule["CidrIp"] = "10.0.0.0/8"


def all_ports(templates: Templates, names: Deployment) -> None:
    rule = resource(templates, FOUNDATION, "EC2::SecurityGroup", "NetworkTraining")["SecurityGroupEgress"][0]
    rule |= {"IpProtocol": "-1", "FromPort": 0, "ToPort": 65535}


def files_in_others_subnet(templates: Templates, names: Deployment) -> None:
    found = resource(templates, FOUNDATION, "FSx::FileSystem")
    found["SubnetIds"] = [others(names, "EC2::Subnet", "NetworkTraining")]


def files_under_others_key(templates: Templates, names: Deployment) -> None:
    resource(templates, FOUNDATION, "FSx::FileSystem")["KmsKeyId"] = others_arn(names, "KMS::Key", "KeysData")


def link_to(templates: Templates, path: str) -> None:
    """The tenant's file system linked to a bucket."""
    system = {"Ref": logical_id(templates, FOUNDATION, "FSx::FileSystem")}
    kind = "FSx::DataRepositoryAssociation"
    add(templates, FOUNDATION, kind, FileSystemId=system, DataRepositoryPath=path)


def link_to_others_bucket(templates: Templates, names: Deployment) -> None:
    link_to(templates, f"s3://{others(names, 'S3::Bucket', 'BucketsData')}/x")


def link_to_anybodys_bucket(templates: Templates, names: Deployment) -> None:
    link_to(templates, "s3://carried-out")


def copied_elsewhere(templates: Templates, names: Deployment) -> None:
    bucket = resource(templates, FOUNDATION, "S3::Bucket", "BucketsCheckpoints")
    there = {"Bucket": "arn:aws:s3:::carried-out", "Account": STRANGER}
    bucket["ReplicationConfiguration"] = {"Rules": [{"Status": "Enabled", "Destination": there}]}


def public_bucket(templates: Templates, names: Deployment) -> None:
    bucket = resource(templates, FOUNDATION, "S3::Bucket", "BucketsData")
    bucket["PublicAccessBlockConfiguration"]["RestrictPublicBuckets"] = False


def listed_bucket(templates: Templates, names: Deployment) -> None:
    bucket = resource(templates, FOUNDATION, "S3::Bucket", "BucketsData")
    bucket["OwnershipControls"] = {"Rules": [{"ObjectOwnership": "ObjectWriter"}]}


def called_by_anybody(templates: Templates, names: Deployment) -> None:
    resource(templates, TRAINING, "Lambda::Permission")["Principal"] = STRANGER


def called_by_any_rule(templates: Templates, names: Deployment) -> None:
    del resource(templates, TRAINING, "Lambda::Permission")["SourceArn"]


def called_by_others_rule(templates: Templates, names: Deployment) -> None:
    arn = others_arn(names, "Events::Rule", stack=OTHERS_TRAINING)
    resource(templates, TRAINING, "Lambda::Permission")["SourceArn"] = arn


def hears_of_others(templates: Templates, names: Deployment) -> None:
    detail = resource(templates, TRAINING, "Events::Rule", "BudgetMeter")["EventPattern"]["detail"]
    detail["TrainingJobName"].append({"prefix": "globex-"})


def hears_of_all(templates: Templates, names: Deployment) -> None:
    del resource(templates, TRAINING, "Events::Rule", "BudgetMeter")["EventPattern"]["detail"]["TrainingJobName"]


def hears_of_all_by_role(templates: Templates, names: Deployment) -> None:
    heard = resource(templates, TRAINING, "Events::Rule", "JobGuard")["EventPattern"]["detail"]["$or"]
    heard[1]["RoleArn"] = [{"prefix": "arn:aws:iam::123456789012:role/trainyard/"}]


def tells_another_account(templates: Templates, names: Deployment) -> None:
    rule = resource(templates, TRAINING, "Events::Rule", "BudgetMeter")
    rule["Targets"].append({"Id": "Out", "Arn": f"arn:aws:events:us-east-1:{STRANGER}:event-bus/theirs"})


def tells_others_topic(templates: Templates, names: Deployment) -> None:
    rule = resource(templates, TRAINING, "Events::Rule", "BudgetMeter")
    rule["Targets"].append({"Id": "Out", "Arn": others_arn(names, "SNS::Topic", stack=OTHERS_TRAINING)})


def alarms_to_a_hook(templates: Templates, names: Deployment) -> None:
    topic = {"Ref": logical_id(templates, TRAINING, "SNS::Topic")}
    add(templates, TRAINING, "SNS::Subscription", TopicArn=topic, Protocol="https", Endpoint="https://example.com")


def broker_as_other(templates: Templates, names: Deployment) -> None:
    function = resource(templates, TRAINING, "Lambda::Function", "Broker")
    function["Role"] = others_arn(names, "IAM::Role", "RolesBroker")


def broker_as_platform(templates: Templates, names: Deployment) -> None:
    function = resource(templates, TRAINING, "Lambda::Function", "Broker")
    function["Role"] = others_arn(names, "IAM::Role", "BudgetActor", stack=PLATFORM)


def meter_of_other(templates: Templates, names: Deployment) -> None:
    variables = resource(templates, TRAINING, "Lambda::Function", "BudgetMeter")["Environment"]["Variables"]
    variables["METER"] = variables["METER"].replace('"tenant": "acme"', '"tenant": "globex"')


def meter_of_others_jobs(templates: Templates, names: Deployment) -> None:
    variables = resource(templates, TRAINING, "Lambda::Function", "BudgetMeter")["Environment"]["Variables"]
    variables["METER"] = variables["METER"].replace('"acme-"', '"globex-"')


def a_higher_budget(templates: Templates, names: Deployment) -> None:
    variables = resource(templates, TRAINING, "Lambda::Function", "BudgetMeter")["Environment"]["Variables"]
    variables["METER"] = variables["METER"].replace('"monthly_usd": ', '"monthly_usd": 9')


def tagged_as_other(templates: Templates, names: Deployment) -> None:
    tags = resource(templates, FOUNDATION, "S3::Bucket", "BucketsData")["Tags"]
    next(tag for tag in tags if tag["Key"] == "trainyard:tenant")["Value"] = "globex"


def without_a_boundary(templates: Templates, names: Deployment) -> None:
    del resource(templates, FOUNDATION, "IAM::Role", "RolesAuditor")["PermissionsBoundary"]


def under_others_boundary(templates: Templates, names: Deployment) -> None:
    role = resource(templates, FOUNDATION, "IAM::Role", "RolesAuditor")
    role["PermissionsBoundary"] = others_arn(names, "IAM::ManagedPolicy", "Boundary")


def rights_for_a_user(templates: Templates, names: Deployment) -> None:
    resource(templates, FOUNDATION, "IAM::Policy", "PermissionsAuditor")["Users"] = ["somebody"]


def rights_for_the_platform(templates: Templates, names: Deployment) -> None:
    roles = resource(templates, FOUNDATION, "IAM::Policy", "PermissionsAuditor")["Roles"]
    roles.append(others(names, "IAM::Role", "BudgetActor", stack=PLATFORM))


def others_share(templates: Templates, names: Deployment) -> None:
    add(templates, TRAINING, "Batch::QuotaShare", QuotaShareName="globex", JobQueue="trainyard-local-any")


def a_gateway(templates: Templates, names: Deployment) -> None:
    add(templates, FOUNDATION, "EC2::InternetGateway")


def machines_as_other(templates: Templates, names: Deployment) -> None:
    profile = resource(templates, FOUNDATION, "IAM::InstanceProfile")
    profile["Roles"] = [others(names, "IAM::Role", "RolesNodes")]


def cluster_as_platform(templates: Templates, names: Deployment) -> None:
    group = resource(templates, TRAINING, "PCS::ComputeNodeGroup")
    group["IamInstanceProfileArn"] = "arn:aws:iam::123456789012:instance-profile/administrators"


def machines_as_platform(templates: Templates, names: Deployment) -> None:
    profile = resource(templates, FOUNDATION, "IAM::InstanceProfile")
    profile["Roles"] = [others(names, "IAM::Role", "BudgetActor", stack=PLATFORM)]


def template_as_anybody(templates: Templates, names: Deployment) -> None:
    data = resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]
    data["IamInstanceProfile"] = {"Name": "administrators"}


def runs(templates: Templates, command: str) -> None:
    data = resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]
    text = data["UserData"]["Fn::Base64"]
    data["UserData"]["Fn::Base64"] = {"Fn::Join": ["", [text, command]]}


def mounts_others_files(templates: Templates, names: Deployment) -> None:
    runs(templates, f"mount -t lustre {others(names, 'FSx::FileSystem')}.fsx.us-east-1.amazonaws.com@tcp:/x /theirs\n")


def carries_out(templates: Templates, names: Deployment) -> None:
    runs(templates, "aws s3 sync /fsx s3://carried-out\n")


def carries_out_in_base64(templates: Templates, names: Deployment) -> None:
    data = resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]
    data["UserData"] = b64encode(b"#!/bin/bash\naws s3 sync /fsx s3://carried-out\n").decode()


def contract(templates: Templates, old: str, new: str) -> None:
    parameter = resource(templates, TRAINING, "SSM::Parameter", "Contract")
    text = json.dumps(parameter["Value"])
    assert re.search(old, text), f"no {old} in {text}"
    parameter["Value"] = json.loads(re.sub(old, new, text))


def contract_of_more_machines(templates: Templates, names: Deployment) -> None:
    contract(templates, r'max_instances\\":\d+', r'max_instances\\":9999')


def contract_of_more_money(templates: Templates, names: Deployment) -> None:
    contract(templates, r'monthly_usd\\":[\d.]+', r'monthly_usd\\":9e9')


def contract_of_more_hours(templates: Templates, names: Deployment) -> None:
    contract(templates, r'max_job_hours\\":[\d.]+', r'max_job_hours\\":9999')


def settings(templates: Templates, function: str, name: str, **changes: Any) -> None:
    variables = resource(templates, TRAINING, "Lambda::Function", function)["Environment"]["Variables"]
    content = json.loads(variables[name]) | changes
    variables[name] = json.dumps({key: value for key, value in content.items() if value is not None})


def meter_without_a_budget(templates: Templates, names: Deployment) -> None:
    settings(templates, "BudgetMeter", "METER", budget=None)


def meter_of_no_jobs(templates: Templates, names: Deployment) -> None:
    settings(templates, "BudgetMeter", "METER", prefixes=[])


def meter_without_prices(templates: Templates, names: Deployment) -> None:
    settings(templates, "BudgetMeter", "METER", rates={})


def meter_without_gpus(templates: Templates, names: Deployment) -> None:
    settings(templates, "BudgetMeter", "METER", gpus={})


def broker_without_prices(templates: Templates, names: Deployment) -> None:
    settings(templates, "Broker", "BROKER", prices={})


def a_group_without_rules(templates: Templates, names: Deployment) -> None:
    add(templates, FOUNDATION, "EC2::SecurityGroup", GroupDescription="any", VpcId="any")


def alarms_to_a_hook_at_once(templates: Templates, names: Deployment) -> None:
    topic = resource(templates, TRAINING, "SNS::Topic")
    topic["Subscription"] = [{"Protocol": "https", "Endpoint": "https://example.com"}]


def others_parameter(templates: Templates, names: Deployment) -> None:
    add(templates, TRAINING, "SSM::Parameter", Name="/trainyard/local/globex/image", Value="any")


MISTAKES: list[tuple[Mistake, str, str, str]] = [
    (groups_rule, "SourceSecurityGroupId", "globex", "names another tenant's"),
    (addresses, "SecurityGroupIngress", "every tenant", "lets in what is no group of the tenant's"),
    (all_ports, "SecurityGroupEgress", "every tenant", "sends elsewhere than to port 443"),
    (files_in_others_subnet, "SubnetIds", "globex", "names another tenant's"),
    (files_under_others_key, "KmsKeyId", "globex", "names another tenant's"),
    (link_to_others_bucket, "DataRepositoryPath", "globex", "names another tenant's"),
    (link_to_anybodys_bucket, "DataRepositoryPath", "every tenant", "names a bucket that is none of the tenant's"),
    (copied_elsewhere, "ReplicationConfiguration.Rules.Destination.Bucket", "every tenant", "names a bucket"),
    (public_bucket, "RestrictPublicBuckets", "every tenant", "is not shut to the public"),
    (listed_bucket, "OwnershipControls", "every tenant", "listens to access control lists"),
    (called_by_anybody, "Principal", "every tenant", "may call the function"),
    (called_by_any_rule, "Principal", "every tenant", "may call the function (source: None)"),
    (called_by_others_rule, "Principal", "every tenant", "may call the function"),
    (hears_of_others, "EventPattern", "every tenant", "hears of other tenants' jobs"),
    (hears_of_all, "EventPattern", "every tenant", "hears of other tenants' jobs"),
    (hears_of_all_by_role, "EventPattern", "every tenant", "hears of other tenants' jobs"),
    (tells_another_account, "Targets.Arn", "another account", "names another account's"),
    (tells_others_topic, "Targets.Arn", "globex", "names another tenant's"),
    (alarms_to_a_hook, "Protocol", "every tenant", "they are mailed alone"),
    (broker_as_other, "Role", "globex", "names another tenant's"),
    (broker_as_platform, "Role", "the platform", "runs as a role that is none of the tenant's"),
    (meter_of_other, "Environment.METER", "every tenant", 'is not "acme"'),
    (meter_of_others_jobs, "Environment.METER", "every tenant", 'is not ["acme-"]'),
    (a_higher_budget, "Environment.METER", "every tenant", "is not"),
    (tagged_as_other, "Tags", "globex", "is tagged as another's"),
    (without_a_boundary, "PermissionsBoundary", "every tenant", "stands under no boundary of the tenant's"),
    (under_others_boundary, "PermissionsBoundary", "globex", "names another tenant's"),
    (rights_for_a_user, "Users", "every tenant", "gives rights to whom no boundary holds"),
    (others_share, "QuotaShareName", "globex", "is another tenant's share of a queue"),
    (a_gateway, "Type", "every tenant", "leads out of a network that has no egress"),
    (machines_as_other, "Roles", "globex", "names another tenant's"),
    (others_parameter, "Name", "globex", "names another tenant's"),
    (cluster_as_platform, "IamInstanceProfileArn", "the platform", "runs as a role that is none of the tenant's"),
    (machines_as_platform, "Roles", "the platform", "runs as a role that is none of the tenant's"),
    (rights_for_the_platform, "Roles", "the platform", "gives rights to a role that is none of the tenant's"),
    (template_as_anybody, "LaunchTemplateData.IamInstanceProfile.Name", "the platform", "runs as a role"),
    (mounts_others_files, "LaunchTemplateData.UserData", "globex", "names another tenant's"),
    (carries_out, "LaunchTemplateData.UserData", "every tenant", "names a bucket that is none of the tenant's"),
    (carries_out_in_base64, "LaunchTemplateData.UserData", "every tenant", "names a bucket"),
    (contract_of_more_machines, "Value.queues", "every tenant", "is not"),
    (contract_of_more_money, "Value.monthly_usd", "every tenant", "is not"),
    (contract_of_more_hours, "Value.max_job_hours", "every tenant", "is not"),
    (meter_without_a_budget, "Environment.METER", "every tenant", "is not"),
    (meter_of_no_jobs, "Environment.METER", "every tenant", "is not"),
    (meter_without_prices, "Environment.METER", "every tenant", "is not"),
    (meter_without_gpus, "Environment.METER", "every tenant", "is not"),
    (broker_without_prices, "Environment.BROKER", "every tenant", "is not"),
    (a_group_without_rules, "SecurityGroupEgress", "every tenant", "EC2 lets everything out"),
    (alarms_to_a_hook_at_once, "Protocol", "every tenant", "they are mailed alone"),
]


def test_nothing_is_wired_to_another(site: Site) -> None:
    assert site.wires == ()
    assert prove(site).foreign_wires == ()


@pytest.mark.parametrize(("mistake", "where", "target", "why"), MISTAKES, ids=[item[0].__name__ for item in MISTAKES])
def test_a_wrong_connection_is_found_and_named(
    altered: Alter,
    names: Deployment,
    mistake: Callable[[Templates, Deployment], None],
    where: str,
    target: str,
    why: str,
) -> None:
    found = altered(lambda templates: mistake(templates, names)).wires
    assert any((item.tenant, item.where, item.target) == ("acme", where, target) and why in item.why for item in found)


def test_a_contract_under_another_tenants_name_stops_it(altered: Alter) -> None:
    def edit(templates: Templates) -> None:
        add(templates, TRAINING, "SSM::Parameter", **resource(templates, TRAINING, "SSM::Parameter"))
        templates[TRAINING]["Resources"]["Added"]["Properties"]["Name"] = "/trainyard/local/globex/contract"

    with pytest.raises(JobFailedError, match=r"Added publishes tenant acme's contract as /trainyard/local/globex/cont"):
        altered(edit)


def test_a_proof_with_a_wrong_connection_does_not_hold(altered: Alter, names: Deployment) -> None:
    proof = prove(altered(lambda templates: groups_rule(templates, names)))
    assert not (proof.allowed_cross_tenant or proof.open_guard_rails or proof.denied_own or proof.unknown_keys)
    assert proof.foreign_wires and not proof.holds
    assert "Wired to others: 2" in list(lines(proof))
    assert "SourceSecurityGroupId</td>" in page(proof)


@pytest.mark.parametrize(
    "kind",
    [
        "EC2::VPCPeeringConnection",
        "EC2::TransitGatewayAttachment",
        "IAM::User",
        "RAM::ResourceShare",
        "S3::AccessPoint",
    ],
)
def test_a_type_that_nobody_has_looked_at_stops_it(altered: Alter, kind: str) -> None:
    with pytest.raises(JobFailedError, match=f"AWS::{kind} Added is of a type that the isolation proof doesn't know"):
        altered(lambda templates: add(templates, FOUNDATION, kind))


def test_what_a_macro_would_make_stops_it(altered: Alter) -> None:
    def edit(templates: Templates) -> None:
        templates[TRAINING]["Transform"] = "AWS::Serverless-2016-10-31"

    with pytest.raises(JobFailedError, match="Transform makes resources that the isolation proof can't see"):
        altered(edit)


def with_every_option() -> dict[str, Any]:
    """The production environment, its tenants with every option that makes resources of its own."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "environments/production.yaml").read_text())
    machine, login = {"instance_type": "p5.48xlarge", "max_instances": 2}, {"instance_type": "m6i.xlarge"}
    cluster: dict[str, Any] = {"node_groups": {"train": machine}, "login": login}
    image = {"slurm_version": "25.05", "ami": "ami-0123456789abcdef0", "root_device": "/dev/xvda", "small_files": {}}
    language, perception, adapters = (content["tenants"][name] for name in ("language", "perception", "adapters"))
    language |= {"network": {"egress": {"allowed_domains": ["pypi.org"]}}, "cluster": cluster | image}
    language["budget"]["anomaly_usd"] = 100
    perception |= {"cluster": {"engine": "hyperpod", "controller": login, **cluster}}
    perception |= {"submission": "broker", "job_isolation": "key"}
    perception["file_system"] = {"storage_gib": 9600, "throughput_mb_per_s_per_tib": 1000, "efa": True}
    adapters |= {"submission": "direct", "share": {}}
    return content


Whole = tuple[Templates, EnvironmentSpec]


def made(content: dict[str, Any], folder: Path) -> Whole:
    path = folder / "production.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return synthesize(path, ROOT), load_environment(path)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Synthesized once."""
    return made(with_every_option(), tmp_path_factory.mktemp("everything"))


def test_nothing_is_wired_to_another_with_every_option(everything: Whole) -> None:
    assert resolve_templates(*everything).wires == ()


@pytest.fixture(scope="module")
def called_as_what_all_share(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A queue's name begins as a tenant p5's things do, those in the platform's stack as a tenant platform's."""
    content = with_every_option()
    tenants = content["tenants"]
    content["tenants"] = {"platform": tenants["language"], "p5": tenants["perception"], "p5en": tenants["adapters"]}
    content["tenants"]["platform"]["cluster"]["ami"] = "ssm:/aws/service/x/ami"
    return made(content, tmp_path_factory.mktemp("called"))


def test_a_tenant_may_be_called_as_what_all_share_begins(called_as_what_all_share: Whole) -> None:
    assert resolve_templates(*called_as_what_all_share).wires == ()


def test_a_tenant_called_platform_is_a_tenant(called_as_what_all_share: Whole) -> None:
    """Who has its topic, and what its machines run (an image that its file names is its own), is looked at as any
    tenant's."""
    templates, environment = copy.deepcopy(called_as_what_all_share[0]), called_as_what_all_share[1]
    resource(templates, "trainyard-production-platform-training", "SNS::Subscription")["Endpoint"] = "rival@example.org"
    (found,) = resolve_templates(templates, environment).wires
    assert (found.tenant, found.reaches, found.target) == ("platform", "rival@example.org", "every tenant")


ANY_ID = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"


@pytest.fixture(scope="module")
def own_words(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What people may write into the file as they like, and looks like the id or the name of somebody's thing."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "environments/local.yaml").read_text())
    acme, globex = content["tenants"]["acme"], content["tenants"]["globex"]
    acme["cost_center"], globex["cost_center"] = ANY_ID, "s3://trainyard/acme"
    acme["budget"] |= {"notify": [f"{ANY_ID}@example.org"], "anomaly_usd": 100, "stop_at_percent": 100}
    acme["network"] = {"egress": {"allowed_domains": ["vpce-0123456789abcdef0.example.org"]}}
    acme["file_system"] = {"links": {"/trainyard/local/globex/x": f"exports/{ANY_ID}/trainyard-local-globex"}}
    acme["cluster"] = {
        **{"slurm_version": "25.05", "ami": "ami-0123456789abcdef0", "root_device": "/dev/xvda"},
        "node_groups": {"train": {"instance_type": "p5.48xlarge", "max_instances": 2}},
        "login": {"instance_type": "m6i.xlarge"},
    }
    return made(content, tmp_path_factory.mktemp("words"))


def test_the_files_own_words_name_nothing(own_words: Whole) -> None:
    assert resolve_templates(*own_words).wires == ()


def tagged_by_cost(templates: Templates, names: Deployment) -> None:
    tags = resource(templates, FOUNDATION, "EC2::VPC")["Tags"]
    found = next(tag for tag in tags if tag["Key"] == "trainyard:cost-center")
    found["Value"] = others(names, "EC2::SecurityGroup")


def linked_to_others(templates: Templates, names: Deployment) -> None:
    link = resource(templates, FOUNDATION, "FSx::DataRepositoryAssociation")
    link["DataRepositoryPath"] = f"s3://{others(names, 'S3::Bucket', 'BucketsData')}/exports"


def group_of_that_id(templates: Templates, names: Deployment) -> None:
    rule = resource(templates, FOUNDATION, "EC2::SecurityGroupIngress", "NetworkFileSystemGroup")
    rule["SourceSecurityGroupId"] = ANY_ID


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        (tagged_by_cost, "Tags.Value"),
        (linked_to_others, "DataRepositoryPath"),
        (group_of_that_id, "SourceSecurityGroupId"),
    ],
)
def test_the_files_own_words_count_elsewhere(own_words: Whole, mistake: Mistake, where: str) -> None:
    templates, environment = copy.deepcopy(own_words[0]), own_words[1]
    mistake(templates, Deployment.of(templates, environment))
    assert where in [wire.where for wire in resolve_templates(templates, environment).wires]


def test_a_stop_policy_that_gives_rights_is_found(everything: Whole) -> None:
    """It is on no role of the templates, so that no question is asked of it."""
    templates, stack = copy.deepcopy(everything[0]), "trainyard-production-language-training"
    allowed = {"Sid": "Extra", "Effect": "Allow", "Action": "*", "Resource": "*"}
    resource(templates, stack, "IAM::ManagedPolicy")["PolicyDocument"]["Statement"].append(allowed)
    (found,) = resolve_templates(templates, everything[1]).wires
    assert (found.tenant, found.where, found.reaches) == ("language", "PolicyDocument", "Extra")


def test_what_a_policy_refuses_is_no_connection(altered: Alter, names: Deployment) -> None:
    def edit(templates: Templates) -> None:
        bucket = others_arn(names, "S3::Bucket", "BucketsData")
        refused = {"Sid": "Extra", "Effect": "Deny", "Action": "s3:*", "Resource": bucket}
        resource(templates, FOUNDATION, "IAM::Policy")["PolicyDocument"]["Statement"].append(refused)
        policy = {"PolicyName": "Extra", "PolicyDocument": {"Version": "2012-10-17", "Statement": [refused]}}
        resource(templates, FOUNDATION, "IAM::Role")["Policies"] = [policy]

    assert altered(edit).wires == ()


@pytest.mark.parametrize("text", ["not base64!", b64encode(b"\x1f\x8b\x08\x00\xff").decode()], ids=["word", "gzip"])
def test_what_machines_run_unreadably_stops_it(altered: Alter, text: str) -> None:
    def edit(templates: Templates) -> None:
        resource(templates, TRAINING, "EC2::LaunchTemplate")["LaunchTemplateData"]["UserData"] = text

    with pytest.raises(JobFailedError, match=r"EC2::LaunchTemplate \w+: UserData is no text in base64"):
        altered(edit)


LARGE, LARGE_TRAINING = "trainyard-production-language-foundation", "trainyard-production-language-training"


def sharing(templates: Templates, kind: str, **changes: Any) -> None:
    resource(templates, LARGE_TRAINING, "Batch::QuotaShare", kind)["ResourceSharingConfiguration"] = changes


def fence(templates: Templates, **changes: Any) -> None:
    resource(templates, LARGE, "NetworkFirewall::FirewallPolicy")["FirewallPolicy"] |= changes


def hosts(templates: Templates, source: dict[str, Any]) -> None:
    resource(templates, LARGE, "NetworkFirewall::RuleGroup")["RuleGroup"]["RulesSource"] = source


def any_host(templates: Templates) -> None:
    listed = {"GeneratedRulesType": "ALLOWLIST", "TargetTypes": ["TLS_SNI"], "Targets": [".com", "pypi.org"]}
    hosts(templates, {"RulesSourceList": listed})


def anothers_fence(templates: Templates) -> None:
    firewall = resource(templates, LARGE, "NetworkFirewall::Firewall")
    firewall["FirewallPolicyArn"] = "arn:aws:network-firewall:us-east-1:777788889999:firewall-policy/open"


def anothers_endpoint(templates: Templates) -> None:
    resource(templates, LARGE, "EC2::Route", "EgressTrainingToFence")["VpcEndpointId"] = "vpce-0123456789abcdef0"


def anothers_hosts(templates: Templates) -> None:
    listed = {"ResourceArn": "arn:aws:network-firewall:us-east-1:aws-managed:stateful-rulegroup/any", "Priority": 1}
    fence(templates, StatefulRuleGroupReferences=[listed])


def open_log(templates: Templates) -> None:
    del resource(templates, "trainyard-production-platform", "S3::Bucket")["PublicAccessBlockConfiguration"]


def a_share_without_limits(templates: Templates) -> None:
    resource(templates, LARGE_TRAINING, "Batch::QuotaShare", "Sharesp548xlarge")["CapacityLimits"] = []


def calls_the_platform(templates: Templates) -> None:
    rights = {"Action": "lambda:InvokeFunction", "FunctionName": "any", "Principal": "*"}
    add(templates, "trainyard-production-platform", "Lambda::Permission", **rights)


def hooks_the_platform(templates: Templates) -> None:
    told = [{"Protocol": "https", "Endpoint": "https://example.com"}]
    add(templates, "trainyard-production-platform", "SNS::Topic", Subscription=told)


def volumes(templates: Templates) -> list[list[dict[str, Any]]]:
    """Of each instance group of the HyperPod cluster, what its machines store on."""
    groups = resource(templates, "trainyard-production-perception-training", "SageMaker::Cluster")["InstanceGroups"]
    return [group["InstanceStorageConfigs"] for group in groups]


def a_volume_under_awss_key(templates: Templates) -> None:
    del volumes(templates)[-1][1]["EbsVolumeConfig"]["VolumeKmsKeyId"]


def a_group_without_volumes(templates: Templates) -> None:
    """HyperPod gives its machines volumes under a key of AWS's."""
    del volumes(templates)[-1][:2]


def groups_without_storage(templates: Templates) -> None:
    cluster = resource(templates, "trainyard-production-perception-training", "SageMaker::Cluster")
    for group in cluster["InstanceGroups"]:
        del group["InstanceStorageConfigs"]


VOLUME_KEY = "InstanceGroups.InstanceStorageConfigs.EbsVolumeConfig.VolumeKmsKeyId"
SHARING, FENCE = "ResourceSharingConfiguration", "FirewallPolicy"
LARGER: dict[str, tuple[Callable[[Templates], None], str, str, str, str]] = {
    "borrows without a limit": (
        lambda templates: sharing(templates, "Sharesp54xlarge", Strategy="LEND_AND_BORROW"),
        *("language", SHARING, "no limit", "borrows more"),
    ),
    "borrows below nothing": (
        lambda templates: sharing(templates, "Sharesp548xlarge", Strategy="LEND_AND_BORROW", BorrowLimit=-1),
        *("language", SHARING, "no limit", "borrows more"),
    ),
    "doesn't lend": (
        lambda templates: sharing(templates, "Sharesp548xlarge", Strategy="RESERVE"),
        *("language", SHARING, "RESERVE", "is not LEND"),
    ),
    "has no limits": (a_share_without_limits, "language", "CapacityLimits", "None", "takes without a limit"),
    "lets all packets through": (
        lambda templates: fence(templates, StatelessDefaultActions=["aws:pass"]),
        *("language", f"{FENCE}.StatelessDefaultActions", "['aws:pass']", "aws:forward_to_sfe"),
    ),
    "drops nothing": (
        lambda templates: fence(templates, StatefulDefaultActions=[]),
        *("language", f"{FENCE}.StatefulDefaultActions", "[]", "aws:drop_established_app_layer"),
    ),
    "asks other rules first": (
        lambda templates: fence(templates, StatelessRuleGroupReferences=[{"Priority": 1, "ResourceArn": "any"}]),
        *(
            "language",
            f"{FENCE}.StatelessRuleGroupReferences",
            "[{'Priority': 1, 'ResourceArn': 'any'}]",
            "nothing that a firewall of ours says",
        ),
    ),
    "asks others' rules": (
        anothers_hosts,
        *("language", f"{FENCE}.StatefulRuleGroupReferences", "aws-managed", "by rules of others"),
    ),
    "goes by another endpoint": (
        anothers_endpoint,
        *("language", "RouteTableId", "vpce-0123456789abcdef0", "leads jobs out past the firewall"),
    ),
    "stands by another policy": (anothers_fence, "language", "FirewallPolicyArn", "open", "not the tenant's"),
    "passes everything": (
        lambda templates: hosts(templates, {"RulesString": "pass ip any any -> any any (sid:1;)"}),
        *("language", "RuleGroup.RulesSource", "pass ip any any", "is not the list of ['pypi.org']"),
    ),
    "passes other hosts": (any_host, "language", "RuleGroup.RulesSource", ".com", "is not the list of ['pypi.org']"),
    "leaves one volume under AWS's key": (
        a_volume_under_awss_key,
        *("perception", VOLUME_KEY, "None", "is not of the tenant's own things"),
    ),
    "leaves one group's volumes to AWS": (
        a_group_without_volumes,
        *("perception", VOLUME_KEY, "None", "is not of the tenant's own things"),
    ),
    "leaves all volumes to AWS": (
        groups_without_storage,
        *("perception", VOLUME_KEY, "None", "is not of the tenant's own things"),
    ),
    "opens the log": (open_log, "the platform", "BlockPublicAcls", "None", "is not shut to the public"),
    "calls the platform": (calls_the_platform, "the platform", "Principal", "*", "may call the function"),
    "hooks the platform": (hooks_the_platform, "the platform", "Protocol", "https", "mailed alone"),
}


@pytest.mark.parametrize("name", LARGER)
def test_a_wrong_connection_of_an_option_is_found_and_named(everything: Whole, name: str) -> None:
    mistake, tenant, where, reaches, why = LARGER[name]
    templates = copy.deepcopy(everything[0])
    mistake(templates)
    found = [
        wire
        for wire in resolve_templates(templates, everything[1]).wires
        if (wire.where, wire.tenant) == (where, tenant)
    ]
    assert any(reaches in wire.reaches and why in wire.why for wire in found)


Opening = Callable[[Templates, Deployment], None]
PRODUCTION = "trainyard-production"


def from_the_platform(kind: str, **anchors: tuple[str, str, str] | str) -> Opening:
    """A resource of the platform's stack, whose properties name things of tenants: (tenant, type, part of the id)."""

    def open_it(templates: Templates, names: Deployment) -> None:
        said: dict[str, Any] = {}
        for name, anchor in anchors.items():
            if isinstance(anchor, tuple):
                tenant, of, part = anchor
                said[name] = others(names, of, part, stack=f"{PRODUCTION}-{tenant}-foundation")
            else:
                said[name] = anchor
        add(templates, f"{PRODUCTION}-platform", kind, **said)

    return open_it


def linked_from_the_platform(templates: Templates, names: Deployment) -> None:
    bucket = others(names, "S3::Bucket", "BucketsData", stack=f"{PRODUCTION}-perception-foundation")
    path, system = f"s3://{bucket}/x", ("language", "FSx::FileSystem", "")
    kind = "FSx::DataRepositoryAssociation"
    from_the_platform(kind, FileSystemId=system, DataRepositoryPath=path)(templates, names)


GROUP = ("language", "EC2::SecurityGroup", "NetworkTraining")
OTHERS_GROUP = ("perception", "EC2::SecurityGroup", "NetworkTraining")
ALL = {"IpProtocol": "-1"}
REACHING: dict[str, tuple[Opening, set[tuple[str, str]]]] = {
    "lets another's group in": (
        from_the_platform("EC2::SecurityGroupIngress", GroupId=GROUP, SourceSecurityGroupId=OTHERS_GROUP, **ALL),
        {("GroupId", "language"), ("SourceSecurityGroupId", "perception")},
    ),
    "sends everywhere": (
        from_the_platform("EC2::SecurityGroupEgress", GroupId=GROUP, CidrIp="0.0.0.0/0", **ALL),
        {("GroupId", "language")},
    ),
    "links another's bucket": (
        linked_from_the_platform,
        {("FileSystemId", "language"), ("DataRepositoryPath", "perception")},
    ),
    "leads out": (
        from_the_platform(
            "EC2::Route",
            RouteTableId=("language", "EC2::RouteTable", "NetworkTraining"),
            DestinationCidrBlock="10.0.0.0/8",
            GatewayId="local",
        ),
        {("RouteTableId", "language")},
    ),
    "opens a group that no template makes": (
        from_the_platform("EC2::SecurityGroupEgress", GroupId="sg-0123456789abcdef0", CidrIp="0.0.0.0/0", **ALL),
        {("GroupId", "every tenant")},
    ),
}


@pytest.mark.parametrize("name", REACHING)
def test_what_acts_on_a_tenants_thing_from_the_platforms_stack_is_found(everything: Whole, name: str) -> None:
    """Its own stacks' checks don't see it there."""
    mistake, expected = REACHING[name]
    templates = copy.deepcopy(everything[0])
    mistake(templates, Deployment.of(templates, everything[1]))
    found = resolve_templates(templates, everything[1]).wires
    assert {wire.tenant for wire in found} == {"the platform"}
    assert {(wire.where, wire.target) for wire in found} == expected


def test_a_way_past_the_firewall_is_found(everything: Whole) -> None:
    templates, stack = copy.deepcopy(everything[0]), "trainyard-production-language-foundation"
    route = resource(templates, stack, "EC2::Route", "EgressTrainingToFence")
    del route["VpcEndpointId"]
    route["GatewayId"] = {"Ref": logical_id(templates, stack, "EC2::InternetGateway")}
    add(
        templates,
        stack,
        "EC2::Route",
        RouteTableId="rtb-1",
        DestinationCidrBlock="10.0.0.0/8",
        TransitGatewayId="tgw-1",
    )
    found = {(wire.where, wire.why) for wire in resolve_templates(templates, everything[1]).wires}
    assert found == {
        ("RouteTableId", "leads jobs out past the firewall"),
        ("TransitGatewayId", "says what the isolation proof hasn't looked at (trainyard/isolation/shapes.py)"),
    }


def test_a_share_that_takes_more_than_the_file_says_is_found(everything: Whole) -> None:
    templates, stack = copy.deepcopy(everything[0]), "trainyard-production-language-training"
    share = resource(templates, stack, "Batch::QuotaShare", "Sharesp548xlarge")
    share["CapacityLimits"][0]["MaxCapacity"] += 1
    share["ResourceSharingConfiguration"] |= {"Strategy": "LEND_AND_BORROW", "BorrowLimit": 10}
    share["Tags"]["trainyard:tenant"] = "adapters"
    found = [(wire.where, wire.reaches, wire.target) for wire in resolve_templates(templates, everything[1]).wires]
    assert sorted(found) == [
        ("CapacityLimits", "17 ml.p5.48xlarge", "every tenant"),
        ("ResourceSharingConfiguration", "10 %", "every tenant"),
        ("Tags", "adapters", "adapters"),
    ]
