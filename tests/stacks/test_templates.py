"""What holds of every template: the same twice, nothing decided at deploy time, tagged, valid, tenants apart."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainyard.operate.stateful import losses

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ("local", "dev", "staging", "production")

NAMED_BY_US = {
    "AWS::Batch::JobQueue": "JobQueueName",  # in policies of tenants' stacks, and what their shares are of
    "AWS::Batch::QuotaShare": "QuotaShareName",  # the tenant's name, which policies tell shares by
    "AWS::CloudTrail::Trail": "TrailName",  # in the policies of the bucket and the key that it needs first
    "AWS::ECR::Repository": "RepositoryName",  # in image URIs
    "AWS::IAM::InstanceProfile": "InstanceProfileName",  # PCS takes what begins with AWSPCS
    "AWS::IAM::Role": "RoleName",  # the same, and no other role: see below
    "AWS::Lambda::Function": "FunctionName",  # the broker's, in policies of the stack that it stands on
    "AWS::NetworkFirewall::Firewall": "FirewallName",  # these three have no generated names
    "AWS::NetworkFirewall::FirewallPolicy": "FirewallPolicyName",
    "AWS::NetworkFirewall::RuleGroup": "RuleGroupName",
    "AWS::PCS::ComputeNodeGroup": "Name",  # these two are what Slurm's users see
    "AWS::PCS::Queue": "Name",
    "AWS::SageMaker::MlflowTrackingServer": "TrackingServerName",  # in policies of the roles that it needs first
    "AWS::SSM::Parameter": "Name",  # how the launcher finds the contract and the image
}
NAME_PROPERTIES = {
    "AWS::Batch::JobQueue": "JobQueueName",
    "AWS::Batch::QuotaShare": "QuotaShareName",
    "AWS::Batch::SchedulingPolicy": "Name",
    "AWS::Batch::ServiceEnvironment": "ServiceEnvironmentName",
    "AWS::CloudTrail::Trail": "TrailName",
    "AWS::CloudWatch::Alarm": "AlarmName",
    "AWS::EC2::SecurityGroup": "GroupName",
    "AWS::ECR::Repository": "RepositoryName",
    "AWS::Events::Rule": "Name",
    "AWS::IAM::ManagedPolicy": "ManagedPolicyName",
    "AWS::IAM::InstanceProfile": "InstanceProfileName",
    "AWS::IAM::Role": "RoleName",
    "AWS::Lambda::Function": "FunctionName",
    "AWS::Logs::LogGroup": "LogGroupName",
    "AWS::NetworkFirewall::Firewall": "FirewallName",
    "AWS::NetworkFirewall::FirewallPolicy": "FirewallPolicyName",
    "AWS::NetworkFirewall::RuleGroup": "RuleGroupName",
    "AWS::EC2::LaunchTemplate": "LaunchTemplateName",
    "AWS::EC2::PlacementGroup": "GroupName",
    "AWS::PCS::Cluster": "Name",
    "AWS::PCS::ComputeNodeGroup": "Name",
    "AWS::PCS::Queue": "Name",
    "AWS::S3::Bucket": "BucketName",
    "AWS::SageMaker::Cluster": "ClusterName",
    "AWS::SageMaker::MlflowTrackingServer": "TrackingServerName",
    "AWS::SNS::Topic": "TopicName",
    "AWS::SSM::Parameter": "Name",
}
UNTAGGABLE = {
    "AWS::EC2::SecurityGroupEgress",
    "AWS::EC2::SecurityGroupIngress",
    "AWS::EC2::Route",
    "AWS::EC2::SubnetRouteTableAssociation",
    "AWS::EC2::VPCCidrBlock",
    "AWS::EC2::VPCGatewayAttachment",
    "AWS::EFS::MountTarget",
    "AWS::IAM::InstanceProfile",
    "AWS::IAM::ManagedPolicy",
    "AWS::IAM::Policy",
    "AWS::Lambda::Permission",
    "AWS::Logs::MetricFilter",
    "AWS::NetworkFirewall::LoggingConfiguration",
    "AWS::S3::BucketPolicy",
    "AWS::SNS::Subscription",
    "AWS::SNS::TopicPolicy",
}


def _resources(templates: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (stack, name, resource)
        for stacks in templates.values()
        for stack, template in stacks.items()
        for name, resource in template["Resources"].items()
    ]


def test_stacks_are_the_platform_and_two_per_tenant(templates: dict[str, Any], environments: dict[str, Any]) -> None:
    for name, environment in environments.items():
        expected = {f"trainyard-{name}-platform"}
        expected |= {
            f"trainyard-{name}-{tenant}-{part}" for tenant in environment.tenants for part in ("foundation", "training")
        }
        assert set(templates[name]) == expected


def test_two_syntheses_are_equal(synthesize: Any, environments: dict[str, Any], templates: dict[str, Any]) -> None:
    assert synthesize(environments["staging"]) == templates["staging"]


def test_tenants_come_go_and_are_renamed_without_a_change_to_any_other_template(
    synthesize: Any, environments: dict[str, Any], templates: dict[str, Any]
) -> None:
    """At once: aardvark comes (and sorts first), acme goes, and what remains of the first example stays as it is."""
    content = environments["local"].model_dump(mode="json")
    newcomer = {**content["tenants"]["globex"], "network_index": 2}
    # acme is renamed umbrella: the one name goes, the other comes, on the same block of addresses.
    content["tenants"] = {
        "aardvark": newcomer,
        "umbrella": content["tenants"]["acme"],
        "globex": content["tenants"]["globex"],
    }
    changed, before = synthesize(type(environments["local"]).model_validate(content)), templates["local"]
    parts = ("foundation", "training")
    assert set(changed) - set(before) == {
        f"trainyard-local-{tenant}-{part}" for tenant in ("aardvark", "umbrella") for part in parts
    }
    assert set(before) - set(changed) == {f"trainyard-local-acme-{part}" for part in parts}
    stayed = set(before) & set(changed)
    assert {name: changed[name] for name in stayed} == {name: before[name] for name in stayed}


def test_nothing_is_decided_at_deploy_time(templates: dict[str, Any]) -> None:
    for stacks in templates.values():
        for name, template in stacks.items():
            assert not set(template) & {"Parameters", "Conditions", "Rules", "Mappings"}, name


def _imports(value: Any) -> set[str]:
    if isinstance(value, dict):
        here = {value["Fn::ImportValue"]} if "Fn::ImportValue" in value else set()
        return here.union(*(_imports(item) for item in value.values()))
    return set().union(*(_imports(item) for item in value)) if isinstance(value, list) else set()


def test_submission_and_the_budgets_stop_change_in_place_both_ways(
    synthesize: Any, environments: dict[str, Any], templates: dict[str, Any]
) -> None:
    """The stack that exports is deployed first: what it drops while the deployed training stack imports it, is refused
    by CloudFormation; and a role that went would be refused by `trainyard deploy`."""
    content = environments["local"].model_dump(mode="json")
    for name, submission in (("acme", "queue"), ("globex", "direct")):
        content["tenants"][name]["submission"] = submission
        content["tenants"][name]["budget"]["stop_at_percent"] = 90
    before, after = templates["local"], synthesize(type(environments["local"]).model_validate(content))
    for old, new in ((before, after), (after, before)):
        exports = {out["Export"]["Name"] for item in new.values() for out in item.get("Outputs", {}).values()}
        imports = {name: _imports(template) for name, template in old.items()}
        assert all(imports[name] for name in imports if name.endswith("-training"))
        assert {name: found - exports for name, found in imports.items() if found - exports} == {}
        assert losses(old, new) == []


def test_training_depends_on_its_own_foundation_and_nothing_else_crosses_tenants(templates: dict[str, Any]) -> None:
    for environment, stacks in templates.items():
        platform = f"trainyard-{environment}-platform"
        for name, template in stacks.items():
            allowed = set() if name == platform else {platform}
            if name.endswith("-training"):
                allowed = {name.removesuffix("training") + "foundation"}
                # AWS Budgets acts as the platform's role, where a tenant's budget stops anything.
                allowed |= {platform} if any(key.startswith("BudgetStop") for key in template["Resources"]) else set()
            assert {item.split(":")[0] for item in _imports(template)} == allowed, name


def test_all_stacks_deploy_at_once_and_one_tenants_can_be_destroyed_alone(
    assemblies: Path, templates: dict[str, Any]
) -> None:
    """By the order that the CDK gives to CloudFormation: a tenant's stacks wait for the platform, and nothing waits
    for a tenant's but its own training stack."""
    for environment, stacks in templates.items():
        manifest = json.loads((assemblies / environment / "manifest.json").read_text())["artifacts"]
        platform = f"trainyard-{environment}-platform"
        for name in stacks:
            waits = {item for item in manifest[name].get("dependencies", []) if not item.endswith(".assets")}
            expected = set() if name == platform else {platform}
            if name.endswith("-training"):
                expected = {name.removesuffix("training") + "foundation"}
            assert waits in (expected, expected | {platform} - {name}), name


def test_names_are_generated_save_for_a_listed_few(templates: dict[str, Any]) -> None:
    named = {
        (resource["Type"], NAME_PROPERTIES[resource["Type"]])
        for _, _, resource in _resources(templates)
        if NAME_PROPERTIES.get(resource["Type"]) in resource.get("Properties", {})
    }
    assert named == set(NAMED_BY_US.items())
    roles = [item.get("Properties", {}) for _, _, item in _resources(templates) if item["Type"] == "AWS::IAM::Role"]
    assert {name.split("-")[0] for item in roles if (name := item.get("RoleName"))} == {"AWSPCS"}


def test_every_resource_says_whose_it_is(templates: dict[str, Any]) -> None:
    for stack, name, resource in _resources(templates):
        if resource["Type"] in UNTAGGABLE:
            continue
        properties = resource["Properties"]
        # A launch template's, and those of all that it launches.
        specified = [properties, properties.get("LaunchTemplateData", {})] if "LaunchTemplateData" in properties else []
        for item in (given for holder in specified for given in holder["TagSpecifications"]):
            assert {"trainyard:tenant", "trainyard:cost-center"} <= {tag["Key"] for tag in item["Tags"]}, name
        if specified:
            continue
        named = ("Tags", "ResourceTags", "FileSystemTags", "AccessPointTags")
        tags = next((found for name in named if (found := properties.get(name))), [])
        keys = set(tags) if isinstance(tags, dict) else {tag["Key"] for tag in tags}
        expected = {"trainyard:environment"}
        if not stack.endswith("-platform"):
            expected |= {"trainyard:tenant", "trainyard:cost-center"}
        assert expected <= keys, f"{stack} {name} ({resource['Type']})"


def test_no_custom_resources(templates: dict[str, Any]) -> None:
    """They bring a Lambda with rights of its own beside the data. The functions there are, are ours."""
    kinds = {resource["Type"] for _, _, resource in _resources(templates)}
    assert not {kind for kind in kinds if kind.startswith(("Custom::", "AWS::CloudFormation::"))}
    functions = {name for _, name, item in _resources(templates) if item["Type"] == "AWS::Lambda::Function"}
    ours = {f"{name}Function" for name in ("JobGuard", "BudgetMeter", "Broker", "Resumer")}
    assert {name[:-8] for name in functions} == ours


def test_stateful_stacks_are_protected_where_data_is_kept(assemblies: Path, templates: dict[str, Any]) -> None:
    for name, protected in (("production", {"platform", "foundation"}), ("local", set())):
        manifest = json.loads((assemblies / name / "manifest.json").read_text())["artifacts"]
        stacks = {key: item for key, item in manifest.items() if item["type"] == "aws:cloudformation:stack"}
        assert set(stacks) == set(templates[name])
        found = {key for key, item in stacks.items() if item["properties"].get("terminationProtection")}
        assert {key.rpartition("-")[2] for key in found} == protected


@pytest.mark.parametrize(
    "environment",
    # Production's templates have all that the others' have.
    [pytest.param(name, marks=() if name == "production" else pytest.mark.slow) for name in ENVIRONMENTS],
)
def test_cfn_lint_finds_no_error(environment: str, templates: dict[str, Any], tmp_path: Path) -> None:
    from cfnlint.api import lint
    from cfnlint.config import ManualArgs

    found = []
    for name, template in templates[environment].items():
        region = "us-west-2" if environment == "staging" else "us-east-1"
        matches = lint(json.dumps(template), config=ManualArgs(regions=[region]))
        found += [f"{name}: {match}" for match in matches if match.rule.id.startswith("E")]
    assert found == []


def test_stateful_resources_keep_their_logical_ids(templates: dict[str, Any]) -> None:
    """CloudFormation replaces a resource whose logical id changes: for these that is the loss of data or of a network.

    The list changes only together with a plan for what is deployed.
    """
    stateful = {"AWS::EC2::Subnet", "AWS::EC2::VPC", "AWS::ECR::Repository", "AWS::FSx::FileSystem", "AWS::IAM::Role"}
    stateful |= {"AWS::EFS::FileSystem", "AWS::KMS::Key", "AWS::Logs::LogGroup", "AWS::S3::Bucket"}
    found: dict[str, list[str]] = {}
    for stack, name, resource in _resources({"local": templates["local"]}):
        if resource["Type"] in stateful and "globex" not in stack:
            found.setdefault(stack, []).append(name)
    recorded = json.loads((Path(__file__).parent / "stateful_logical_ids.json").read_text())
    assert {stack: sorted(names) for stack, names in found.items()} == recorded


def test_image_parameter_names_a_pinned_image_that_no_release_can_be_mistaken_for(templates: dict[str, Any]) -> None:
    resources = templates["local"]["trainyard-local-platform"]["Resources"]
    (parameter,) = (item["Properties"] for item in resources.values() if item["Type"] == "AWS::SSM::Parameter")
    assert parameter["Name"] == "/trainyard/local/image"
    assert parameter["Value"]["Fn::Join"][1][-1] == "@sha256:" + "0" * 64
