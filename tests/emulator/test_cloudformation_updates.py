"""What an update does to a resource: in place where AWS updates in place, a replacement where AWS replaces."""

import json
from typing import Any

import pytest
from emulator_testing import Site, refusal
from emulator_testing.templates import GROUPS, document, ref, resource, template, trust

from trainyard.emulator.cloudformation.catalogue import RESOURCE_TYPES
from trainyard.operate.stateful import REPLACED_BY

SAID_ELSEWHERE = {
    "AWS::FSx::FileSystem": {"FileSystemTypeVersion", "LustreConfiguration", "StorageType"},
    "AWS::EC2::PlacementGroup": {"GroupName"},
    "AWS::KMS::Key": {"KeySpec", "KeyUsage", "MultiRegion"},
    "AWS::IAM::Policy": {"PolicyName"},
    "AWS::NetworkFirewall::Firewall": {"SubnetMappings"},
}
"""Properties that the registry's schemas leave out: what KMS refuses to change, what FSx' reference says (tested beside
operate/stateful.py), and what can't be done in place here."""


def schema(kind: str) -> dict[str, Any]:
    """The registry's schema of a type."""
    from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

    found: dict[str, Any] = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", kind).schema
    return found


def tops(paths: list[str] | tuple[str, ...]) -> set[str]:
    """The properties themselves of paths into them."""
    return {path.removeprefix("/properties/").replace("/", ".").split(".")[0] for path in paths}


@pytest.mark.parametrize("kind", sorted(RESOURCE_TYPES))
def test_what_replaces_a_resource_here_is_what_the_registry_says(kind: str) -> None:
    known, registered = RESOURCE_TYPES[kind], schema(kind)
    create_only = registered.get("createOnlyProperties", []) + registered.get("conditionalCreateOnlyProperties", [])
    if known.update is None:
        given_back = tops(registered.get("readOnlyProperties", []))
        assert tops(create_only) >= set(registered["properties"]) - given_back - _NEVER_UPDATED.get(kind, set())
    else:
        assert tops(create_only) <= tops(known.replaced_by)
        assert tops(known.replaced_by) - tops(create_only) <= SAID_ELSEWHERE.get(kind, set())
    if kind in REPLACED_BY:
        assert set(known.replaced_by) == set(REPLACED_BY[kind])


_NEVER_UPDATED = {
    "AWS::EC2::VPCGatewayAttachment": {"InternetGatewayId", "VpnGatewayId"},
    "AWS::IAM::ServiceLinkedRole": {"Description"},
}
"""What AWS would update in place and is replaced here: no template of this project changes it."""


def ids(site: Site, name: str) -> dict[str, str]:
    """Physical ids of the stack's resources."""
    found = site("cloudformation").describe_stack_resources(StackName=name)["StackResources"]
    return {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in found}


def update(site: Site, name: str, content: dict[str, Any]) -> str:
    """Update the stack; its status."""
    site("cloudformation").update_stack(StackName=name, TemplateBody=json.dumps(content))
    return site.stack_status(name)


@pytest.mark.parametrize("group", list(GROUPS))
def test_tags_change_in_place(site: Site, name: str, group: str) -> None:
    """Those of a cost centre are on everything: changing one must replace nothing."""
    content = template(group, name)
    for item in content["Resources"].values():
        tagging = schema(item["Type"]).get("tagging") or {}
        if tagging.get("tagUpdatable") and tagging.get("tagProperty") == "/properties/Tags":
            is_map = schema(item["Type"])["properties"]["Tags"].get("type") == "object"
            item["Properties"]["Tags"] = {"cost": "a"} if is_map else [{"Key": "cost", "Value": "a"}]
    assert site.deploy(name, content) == "CREATE_COMPLETE", site.failures(name)
    before = ids(site, name)
    changed = json.loads(
        json.dumps(content).replace('"cost": "a"', '"cost": "b"').replace('"Value": "a"', '"Value": "b"')
    )
    assert changed != content
    assert update(site, name, changed) == "UPDATE_COMPLETE", site.failures(name)
    assert ids(site, name) == before


def test_a_file_system_grows_and_is_tagged_in_place(site: Site, name: str) -> None:
    content = template("storage", name)
    files = content["Resources"]["Files"]["Properties"]
    files["Tags"] = [{"Key": "cost", "Value": "a"}, {"Key": "old", "Value": "a"}]
    assert site.deploy(name, content) == "CREATE_COMPLETE", site.failures(name)
    system = ids(site, name)["Files"]
    files["StorageCapacity"], files["Tags"] = 2400, [{"Key": "cost", "Value": "b"}]
    files["LustreConfiguration"]["DataCompressionType"] = "LZ4"
    assert update(site, name, content) == "UPDATE_COMPLETE", site.failures(name)
    assert ids(site, name)["Files"] == system
    (found,) = site("fsx").describe_file_systems(FileSystemIds=[system])["FileSystems"]
    assert found["StorageCapacity"] == 2400
    assert found["LustreConfiguration"]["DataCompressionType"] == "LZ4"
    assert found["LustreConfiguration"]["PerUnitStorageThroughput"] == 125
    assert site("fsx").list_tags_for_resource(ResourceARN=found["ResourceARN"])["Tags"] == files["Tags"]
    files["StorageCapacity"] = 1200
    assert update(site, name, content) == "UPDATE_ROLLBACK_COMPLETE"
    assert "must be at least 10 percent above" in site.failures(name)
    files["StorageCapacity"], files["KmsKeyId"] = 2400, "another"
    assert update(site, name, content) == "UPDATE_COMPLETE", site.failures(name)
    assert ids(site, name)["Files"] != system


def test_what_is_in_a_network_is_rewired_in_place(site: Site, name: str) -> None:
    content = template("network", name)
    resources = content["Resources"]
    assert site.deploy(name, content) == "CREATE_COMPLETE", site.failures(name)
    before = ids(site, name)
    out = resources["Out"]["Properties"]
    del out["GatewayId"]
    out["NatGatewayId"] = ref("Nat")
    resources["In"]["Properties"]["Description"] = "between the hosts"
    assert update(site, name, content) == "UPDATE_COMPLETE", site.failures(name)
    after, ec2 = ids(site, name), site("ec2")
    assert {key for key in before if before[key] != after[key]} <= {"In"}
    (table,) = ec2.describe_route_tables(RouteTableIds=[after["Table"]])["RouteTables"]
    routes = [route for route in table["Routes"] if route.get("DestinationCidrBlock") == "0.0.0.0/0"]
    assert [route.get("NatGatewayId") for route in routes] == [after["Nat"]]
    (group,) = ec2.describe_security_groups(GroupIds=[after["Group"]])["SecurityGroups"]
    pairs = [pair for rule in group["IpPermissions"] for pair in rule["UserIdGroupPairs"]]
    assert [(pair["GroupId"], pair["Description"]) for pair in pairs] == [(after["Group"], "between the hosts")]


def test_a_log_group_gets_its_key_in_place(site: Site, name: str) -> None:
    group = {"LogGroupName": f"/{name}", "RetentionInDays": 30}
    content = {"Resources": {"Group": resource("Logs::LogGroup", group)}}
    assert site.deploy(name, content) == "CREATE_COMPLETE"
    site("logs").create_log_stream(logGroupName=f"/{name}", logStreamName="kept")
    for key in (site("kms").create_key()["KeyMetadata"]["Arn"], None):
        group.pop("KmsKeyId", None)
        content["Resources"]["Group"]["Properties"] = {**group, **({"KmsKeyId": key} if key else {})}
        assert update(site, name, content) == "UPDATE_COMPLETE", site.failures(name)
        (found,) = site("logs").describe_log_groups(logGroupNamePrefix=f"/{name}")["logGroups"]
        assert found.get("kmsKeyId") == key
        assert len(site("logs").describe_log_streams(logGroupName=f"/{name}")["logStreams"]) == 1


def test_a_policy_is_added_to_one_role_and_taken_from_another(site: Site, name: str) -> None:
    def content(*holders: str) -> dict[str, Any]:
        roles = {
            role: resource("IAM::Role", {"AssumeRolePolicyDocument": trust("lambda.amazonaws.com")})
            for role in ("First", "Second", "Third")
        }
        policy = {"PolicyName": "more", "PolicyDocument": document("s3:GetObject"), "Roles": [*map(ref, holders)]}
        return {"Resources": {**roles, "Policy": resource("IAM::Policy", policy)}}

    assert site.deploy(name, content("First", "Second")) == "CREATE_COMPLETE", site.failures(name)
    for holders in (("First", "Second", "Third"), ("Second", "Third"), ("First",)):
        assert update(site, name, content(*holders)) == "UPDATE_COMPLETE", site.failures(name)
        there = ids(site, name)
        held = {
            role
            for role in ("First", "Second", "Third")
            if site("iam").list_role_policies(RoleName=there[role])["PolicyNames"]
        }
        assert held == set(holders)
    site("cloudformation").delete_stack(StackName=name)
    assert "NoSuchEntity" in refusal(lambda: site("iam").get_role(RoleName=there["First"]))


def test_what_is_only_recorded_is_replaced_as_aws_replaces_it_and_needs_a_free_name(site: Site, name: str) -> None:
    def content(encrypted: bool, capacity: int) -> dict[str, Any]:
        group = {"RuleGroupName": name, "Type": "STATEFUL", "Capacity": capacity}
        return {
            "Resources": {
                "Files": resource("EFS::FileSystem", {"Encrypted": encrypted}),
                "Rules": resource("NetworkFirewall::RuleGroup", group),
            }
        }

    assert site.deploy(name, content(False, 100)) == "CREATE_COMPLETE"
    before = ids(site, name)
    assert update(site, name, content(True, 100)) == "UPDATE_COMPLETE"
    after = ids(site, name)
    assert before["Files"] != after["Files"] and before["Rules"] == after["Rules"]
    assert update(site, name, content(True, 200)) == "UPDATE_ROLLBACK_COMPLETE"
    assert f"custom-named resource requires replacing. Rename {name}" in site.failures(name)
    odd = {"Resources": {"Slurm": resource("PCS::Cluster", {"Size": "GIGANTIC"})}}
    assert site.deploy(f"{name}-2", odd) == "ROLLBACK_COMPLETE"
    assert "Size GIGANTIC: must be one of SMALL, MEDIUM, LARGE" in site.failures(f"{name}-2")


def test_a_repository_with_images_keeps_its_stack_unless_it_says_otherwise(site: Site, name: str) -> None:
    kept = {"Resources": {"Images": resource("ECR::Repository", {"RepositoryName": name})}}
    assert site.deploy(name, kept) == "CREATE_COMPLETE"
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "layers": []}
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 1, "digest": "sha256:" + "a" * 64}
    site("ecr").put_image(repositoryName=name, imageManifest=json.dumps({**manifest, "config": config}), imageTag="v1")
    site("cloudformation").delete_stack(StackName=name)
    assert site.stack_status(name) == "DELETE_FAILED"
    assert "Images: The repository with name" in site.failures(name)
    site("ecr").batch_delete_image(repositoryName=name, imageIds=[{"imageTag": "v1"}])
    site("cloudformation").delete_stack(StackName=name)
    emptied = {"Resources": {"Images": resource("ECR::Repository", {"RepositoryName": name, "EmptyOnDelete": True})}}
    assert site.deploy(name, emptied) == "CREATE_COMPLETE", site.failures(name)
    site("ecr").put_image(repositoryName=name, imageManifest=json.dumps({**manifest, "config": config}), imageTag="v1")
    site("cloudformation").delete_stack(StackName=name)
    assert "RepositoryNotFound" in refusal(lambda: site("ecr").list_images(repositoryName=name))
