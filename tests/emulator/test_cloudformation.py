"""The CloudFormation engine: every type really exists, and what goes wrong is said and undone."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from emulator_testing import Site, refusal
from emulator_testing.templates import GROUPS, att, document, identity, ref, resource, template, trust

from trainyard.emulator import verify_deployment
from trainyard.emulator.cloudformation.catalogue import RESOURCE_TYPES
from trainyard.emulator.cloudformation.model import Site as ResourceSite
from trainyard.emulator.cloudformation.model import UnsupportedPropertyError, fit_name, to_api
from trainyard.errors import InputError, JobFailedError


def write_template(folder: Path, stack_name: str, content: dict[str, Any]) -> None:
    (folder / f"{stack_name}.template.json").write_text(json.dumps(content))


def test_the_groups_hold_every_api_backed_type() -> None:
    used = {item["Type"] for make in GROUPS.values() for item in make().values()}
    backed = {name for name, kind in RESOURCE_TYPES.items() if not kind.recorded}
    assert backed - used == {"AWS::IAM::ServiceLinkedRole"}


@pytest.mark.parametrize("group", list(GROUPS))
def test_each_type_is_deployed_verified_missed_and_destroyed(site: Site, name: str, tmp_path: Path, group: str) -> None:
    content = template(group, name)
    write_template(tmp_path, name, content)
    assert site.deploy(name, content) == "CREATE_COMPLETE", site.failures(name)
    report = verify_deployment(site.info, [name], tmp_path)
    assert report.num_resources == len(content["Resources"])
    assert report.recorded_only == ()

    place = ResourceSite(site.info.account, site.info.region, site)
    listed = site("cloudformation").list_stack_resources(StackName=name)["StackResourceSummaries"]
    assert {item["LogicalResourceId"] for item in listed} == set(content["Resources"])
    physical = {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in listed}
    stack_id = site("cloudformation").describe_stacks(StackName=name)["Stacks"][0]["StackId"]
    site("cloudformation").delete_stack(StackName=name)
    for logical_id, item in content["Resources"].items():
        kind = RESOURCE_TYPES[item["Type"]]
        assert not kind.exists(place, physical[logical_id]), (
            f"{logical_id} outlived its stack: {site.failures(stack_id)}"
        )
    with pytest.raises(JobFailedError, match="no such stack"):
        verify_deployment(site.info, [name], tmp_path)


def test_routes_lead_to_a_firewalls_endpoint_and_go_with_it(site: Site, name: str) -> None:
    """The firewall is only recorded; what a route table says of it is the EC2 API's."""
    first = {"Fn::Select": [0, {"Fn::GetAtt": ["Firewall", "EndpointIds"]}]}
    endpoint = {"Fn::Select": [1, {"Fn::Split": [":", first]}]}
    kept = {name: item for name, item in template("network", name)["Resources"].items() if name in {"Vpc", "Subnet"}}
    everywhere = {"DestinationCidrBlock": "0.0.0.0/0", "RouteTableId": {"Ref": "Table"}, "VpcEndpointId": endpoint}
    firewall = {
        "FirewallName": name,
        "FirewallPolicyArn": "arn:aws:network-firewall:us-east-1:123456789012:firewall-policy/x",
        "VpcId": {"Ref": "Vpc"},
        "SubnetMappings": [{"SubnetId": {"Ref": "Subnet"}}],
    }
    resources = {
        **kept,
        "Table": {"Type": "AWS::EC2::RouteTable", "Properties": {"VpcId": {"Ref": "Vpc"}}},
        "Firewall": {"Type": "AWS::NetworkFirewall::Firewall", "Properties": firewall},
        "Out": {"Type": "AWS::EC2::Route", "Properties": everywhere},
    }
    assert site.deploy(name, {"Resources": resources}) == "CREATE_COMPLETE", site.failures(name)
    found = site("cloudformation").describe_stack_resources(StackName=name)["StackResources"]
    ids = {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in found}
    in_vpc = [{"Name": "vpc-id", "Values": [ids["Vpc"]]}]
    (made,) = site("ec2").describe_vpc_endpoints(Filters=in_vpc)["VpcEndpoints"]
    assert (made["VpcEndpointType"], made["SubnetIds"]) == ("GatewayLoadBalancer", [ids["Subnet"]])
    assert site("ec2").describe_route_tables(RouteTableIds=[ids["Table"]])["RouteTables"]
    site("cloudformation").delete_stack(StackName=name)
    left = site("ec2").describe_vpc_endpoints(Filters=in_vpc)["VpcEndpoints"]
    assert [item for item in left if item["State"].lower() not in {"deleting", "deleted"}] == []


class FirstPage:
    """IAM as moto has it in an account of more than a hundred roles: a policy's own may not be among the first."""

    def __init__(self, iam: Any) -> None:
        self._iam = iam

    def list_entities_for_policy(self, **_: Any) -> dict[str, Any]:
        """None of the first hundred roles has it."""
        return {"PolicyRoles": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iam, name)


def test_a_policy_is_detached_from_roles_that_are_not_listed(site: Site, name: str) -> None:
    iam = site("iam")
    site.role(name)
    arn = iam.create_policy(PolicyName=name, PolicyDocument=json.dumps(document("s3:ListBucket")))["Policy"]["Arn"]
    iam.attach_role_policy(RoleName=name, PolicyArn=arn)
    place = ResourceSite(site.info.account, site.info.region, lambda service: FirstPage(site(service)))
    RESOURCE_TYPES["AWS::IAM::ManagedPolicy"].delete(place, arn, {"Roles": [name, f"{name}-gone"]})
    assert iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"] == []
    iam.delete_role(RoleName=name)


def remove_queue(site: Site, arn: str) -> None:
    """As AWS wants it: out of service first."""
    assert "must be DISABLED" in refusal(lambda: site("batch").delete_job_queue(jobQueue=arn))
    site("batch").update_job_queue(jobQueue=arn, state="DISABLED")
    site("batch").delete_job_queue(jobQueue=arn)


def test_what_is_removed_behind_its_back_is_missed_by_name(site: Site, name: str, tmp_path: Path) -> None:
    for group, remove in (
        ("storage", lambda ids: site("s3").delete_bucket_policy(Bucket=ids["BucketPolicy"])),
        ("operations", lambda ids: site("sns").unsubscribe(SubscriptionArn=ids["Mail"])),
        ("queues", lambda ids: remove_queue(site, ids["Queue"])),
        ("identity", lambda ids: site("iam").delete_role_policy(RoleName=ids["Role"], PolicyName="more")),
    ):
        stack = f"{name}-{group}"
        content = template(group, stack)
        write_template(tmp_path, stack, content)
        assert site.deploy(stack, content) == "CREATE_COMPLETE", site.failures(stack)
        listed = site("cloudformation").list_stack_resources(StackName=stack)["StackResourceSummaries"]
        remove({item["LogicalResourceId"]: item["PhysicalResourceId"] for item in listed})
        with pytest.raises(JobFailedError, match="1 deployed resource is not there") as caught:
            verify_deployment(site.info, [stack], tmp_path)
        missing = {"storage": "BucketPolicy", "operations": "Mail", "queues": "Queue", "identity": "Inline"}[group]
        assert f"{stack}/{missing} (" in str(caught.value)


def test_a_resource_that_the_stack_lacks_is_missed(site: Site, name: str, tmp_path: Path) -> None:
    content = template("queues", name)
    site.deploy(name, content)
    content["Resources"]["Extra"] = resource("SNS::Topic")
    write_template(tmp_path, name, content)
    with pytest.raises(JobFailedError, match=rf"{name}/Extra \(AWS::SNS::Topic\): not in the stack"):
        verify_deployment(site.info, [name], tmp_path)
    with pytest.raises(InputError, match="no such template"):
        verify_deployment(site.info, ["absent"], tmp_path)


def test_an_unknown_type_fails_and_is_named(site: Site, name: str) -> None:
    content = {"Resources": {"Odd": resource("Quantum::Annealer"), "Topic": resource("SNS::Topic")}}
    reason = refusal(lambda: site.deploy(name, content))
    assert "Unrecognized resource types: [AWS::Quantum::Annealer]" in reason
    assert "does not exist" in refusal(lambda: site("cloudformation").describe_stacks(StackName=name))
    changing = refusal(lambda: change(site, name, content, kind="CREATE"))
    assert "AWS::Quantum::Annealer" in changing


def test_an_unknown_property_or_attribute_fails_and_is_undone(site: Site, name: str) -> None:
    first = resource("SSM::Parameter", {"Name": f"/{name}/a", "Type": "String", "Value": "1"})
    odd = resource("SNS::Topic", {"TopicName": name}, DependsOn="First")
    wrong = resource("FSx::FileSystem", {"FileSystemType": "LUSTRE", "Colour": "red"}, DependsOn=["Second"])
    assert site.deploy(name, {"Resources": {"Third": wrong, "Second": odd, "First": first}}) == "ROLLBACK_COMPLETE"
    assert site.failures(name) == "Third: property Colour is not known to the emulator"
    assert "ParameterNotFound" in refusal(lambda: site("ssm").get_parameter(Name=f"/{name}/a"))
    assert not any(item["TopicArn"].endswith(f":{name}") for item in site("sns").list_topics()["Topics"])

    attribute = resource("SSM::Parameter", {"Type": "String", "Value": att("Topic", "Colour")})
    content = {"Resources": {"Topic": resource("SNS::Topic"), "Reader": attribute}}
    assert site.deploy(f"{name}-2", content) == "ROLLBACK_COMPLETE"
    assert "AWS::SNS::Topic has no attribute Colour" in site.failures(f"{name}-2")


def test_a_parameters_value_is_read_at_deployment(site: Site, name: str) -> None:
    """As a cluster's image may be named: docs/tenants.md's own example."""
    topic = resource("SNS::Topic", {"DisplayName": f"{{{{resolve:ssm:/{name}/image}}}}"})
    content = {"Resources": {"Topic": topic}}
    assert site.deploy(name, content) == "ROLLBACK_COMPLETE"
    made = f"[ssm:/{name}/image] cannot be found: aws ssm put-parameter --name /{name}/image"
    assert made in site.failures(name)
    site("cloudformation").delete_stack(StackName=name)

    site("ssm").put_parameter(Name=f"/{name}/image", Value="ami-0123456789abcdef0", Type="String")
    assert site.deploy(name, content) == "CREATE_COMPLETE", site.failures(name)
    arn = site("cloudformation").list_stack_resources(StackName=name)["StackResourceSummaries"][0]["PhysicalResourceId"]
    assert site("sns").get_topic_attributes(TopicArn=arn)["Attributes"]["DisplayName"] == "ami-0123456789abcdef0"


def test_depends_on_is_kept_and_a_circle_is_refused(site: Site, name: str) -> None:
    chain = {
        "A": resource("SNS::Topic", DependsOn="B"),
        "B": resource("SNS::Topic", DependsOn=["C"]),
        "C": resource("SNS::Topic"),
    }
    assert site.deploy(name, {"Resources": chain}) == "CREATE_COMPLETE"
    events = site("cloudformation").describe_stack_events(StackName=name)["StackEvents"]
    done = [item["LogicalResourceId"] for item in reversed(events) if item["ResourceStatus"] == "CREATE_COMPLETE"]
    assert done == ["C", "B", "A", name]
    circle = {"A": resource("SNS::Topic", DependsOn="B"), "B": resource("SNS::Topic", DependsOn="A")}
    assert site.deploy(f"{name}-2", {"Resources": circle}) == "ROLLBACK_COMPLETE"
    assert "Circular dependency" in site.failures(f"{name}-2")


def change(site: Site, stack: str, content: dict[str, Any], *, kind: str = "UPDATE") -> str:
    """What the CDK CLI does: create a change set, execute it; its status when there is nothing to execute."""
    cloudformation = site("cloudformation")
    cloudformation.delete_change_set(StackName=stack, ChangeSetName="cdk-deploy-change-set")
    cloudformation.create_change_set(
        StackName=stack,
        ChangeSetName="cdk-deploy-change-set",
        ChangeSetType=kind,
        TemplateBody=json.dumps(content),
    )
    described = cloudformation.describe_change_set(StackName=stack, ChangeSetName="cdk-deploy-change-set")
    if described["Status"] == "FAILED":
        return str(described["StatusReason"])
    cloudformation.execute_change_set(StackName=stack, ChangeSetName="cdk-deploy-change-set")
    return site.stack_status(stack)


def test_change_sets_of_one_name_belong_to_their_stacks(site: Site, name: str) -> None:
    def run(index: int) -> str:
        stack = f"{name}-{index}"
        content = {
            "Resources": {"P": resource("SSM::Parameter", {"Name": f"/{stack}", "Type": "String", "Value": stack})}
        }
        assert change(site, stack, content, kind="CREATE") == "CREATE_COMPLETE"
        assert "didn't contain changes" in change(site, stack, content)
        return str(site("ssm").get_parameter(Name=f"/{stack}")["Parameter"]["Value"])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(6))) == [f"{name}-{index}" for index in range(6)]
    missing = refusal(lambda: site("cloudformation").describe_change_set(StackName=f"{name}-0", ChangeSetName="other"))
    assert missing.startswith("ChangeSetNotFound")


def test_updates_change_in_place_replace_or_remove(site: Site, name: str) -> None:
    def content(actions: str, value: str, cidr: str) -> dict[str, Any]:
        return {
            "Resources": {
                "Role": resource(
                    "IAM::Role",
                    {
                        "AssumeRolePolicyDocument": trust("sagemaker.amazonaws.com"),
                        "Policies": [{"PolicyName": "p", "PolicyDocument": document(actions)}],
                    },
                ),
                "Managed": resource("IAM::ManagedPolicy", {"PolicyDocument": document(actions)}),
                "Value": resource("SSM::Parameter", {"Name": f"/{name}", "Type": "String", "Value": value}),
                "Vpc": resource("EC2::VPC", {"CidrBlock": cidr}),
            },
            "Outputs": {
                "Role": {"Value": ref("Role")},
                "Vpc": {"Value": ref("Vpc")},
                "Managed": {"Value": ref("Managed")},
            },
        }

    assert change(site, name, content("s3:GetObject", "1", "10.1.0.0/16"), kind="CREATE") == "CREATE_COMPLETE"
    role, vpc = site.output(name, "Role"), site.output(name, "Vpc")
    assert change(site, name, content("s3:PutObject", "2", "10.2.0.0/16")) == "UPDATE_COMPLETE"
    assert site.output(name, "Role") == role
    inline = site("iam").get_role_policy(RoleName=role, PolicyName="p")["PolicyDocument"]
    assert inline["Statement"][0]["Action"] == ["s3:PutObject"]
    managed = site("iam").get_policy(PolicyArn=site.output(name, "Managed"))["Policy"]
    version = site("iam").get_policy_version(PolicyArn=managed["Arn"], VersionId=managed["DefaultVersionId"])
    assert version["PolicyVersion"]["Document"]["Statement"][0]["Action"] == ["s3:PutObject"]
    assert site("ssm").get_parameter(Name=f"/{name}")["Parameter"]["Value"] == "2"
    assert site.output(name, "Vpc") != vpc
    assert "NotFound" in refusal(lambda: site("ec2").describe_vpcs(VpcIds=[vpc]))

    smaller = content("s3:PutObject", "2", "10.2.0.0/16")
    del smaller["Resources"]["Value"]
    assert change(site, name, smaller) == "UPDATE_COMPLETE"
    assert "ParameterNotFound" in refusal(lambda: site("ssm").get_parameter(Name=f"/{name}"))


def test_a_failed_update_goes_back_to_what_was(site: Site, name: str) -> None:
    good = {"Resources": {"Value": resource("SSM::Parameter", {"Name": f"/{name}", "Type": "String", "Value": "1"})}}
    bad = json.loads(json.dumps(good))
    bad["Resources"]["Value"]["Properties"]["Value"] = "2"
    bad["Resources"]["New"] = resource("SNS::Topic", {"TopicName": name}, DependsOn="Value")
    bad["Resources"]["Wrong"] = resource("ECR::Repository", {"Colour": "red"}, DependsOn="New")
    change(site, name, good, kind="CREATE")
    assert change(site, name, bad) == "UPDATE_ROLLBACK_COMPLETE"
    assert site.failures(name) == "Wrong: property Colour is not known to the emulator"
    assert site("ssm").get_parameter(Name=f"/{name}")["Parameter"]["Value"] == "1"
    assert not any(item["TopicArn"].endswith(f":{name}") for item in site("sns").list_topics()["Topics"])
    assert "didn't contain changes" in change(site, name, good)


def test_exports_follow_change_sets_and_are_held_by_their_users(site: Site, name: str) -> None:
    def producer(value: str) -> dict[str, Any]:
        parameter = resource("SSM::Parameter", {"Name": f"/{name}/{value}", "Type": "String", "Value": value})
        output = {"Value": ref("P"), "Export": {"Name": f"{name}:Out"}}
        return {"Resources": {"P": parameter}, "Outputs": {"Out": output}}

    imported = {"Fn::ImportValue": f"{name}:Out"}
    consumer = {
        "Resources": {"C": resource("SSM::Parameter", {"Type": "String", "Name": f"/{name}/c", "Value": imported})}
    }
    change(site, f"{name}-p", producer("one"), kind="CREATE")
    assert change(site, f"{name}-c", consumer, kind="CREATE") == "CREATE_COMPLETE"
    assert site("ssm").get_parameter(Name=f"/{name}/c")["Parameter"]["Value"] == f"/{name}/one"
    assert "in use by" in refusal(lambda: site("cloudformation").delete_stack(StackName=f"{name}-p"))
    assert change(site, f"{name}-p", producer("two")) == "UPDATE_ROLLBACK_COMPLETE"
    assert "in use by" in site.failures(f"{name}-p")
    site("cloudformation").delete_stack(StackName=f"{name}-c")
    assert change(site, f"{name}-p", producer("two")) == "UPDATE_COMPLETE"
    site("cloudformation").delete_stack(StackName=f"{name}-p")
    assert f"{name}:Out" not in {item["Name"] for item in site("cloudformation").list_exports()["Exports"]}


def test_the_operations_events_are_told_by_the_newer_call_too(site: Site, name: str) -> None:
    site.deploy(name, {"Resources": {"Topic": resource("SNS::Topic")}})
    events = site("cloudformation").describe_events(StackName=name)["OperationEvents"]
    statuses = [(event["LogicalResourceId"], event["ResourceStatus"]) for event in reversed(events)]
    assert ("Topic", "CREATE_COMPLETE") in statuses
    assert statuses[-1] == (name, "CREATE_COMPLETE")


def test_termination_protection_and_retention_hold(site: Site, name: str) -> None:
    kept = resource("SNS::Topic", {"TopicName": f"{name}-kept"}, DeletionPolicy="Retain")
    site.deploy(name, {"Resources": {"Kept": kept, "Gone": resource("SNS::Topic", {"TopicName": f"{name}-gone"})}})
    cloudformation = site("cloudformation")
    cloudformation.update_termination_protection(StackName=name, EnableTerminationProtection=True)
    assert "TerminationProtection" in refusal(lambda: cloudformation.delete_stack(StackName=name))
    cloudformation.update_termination_protection(StackName=name, EnableTerminationProtection=False)
    cloudformation.delete_stack(StackName=name)
    topics = {item["TopicArn"].rpartition(":")[2] for item in site("sns").list_topics()["Topics"]}
    assert f"{name}-kept" in topics
    assert f"{name}-gone" not in topics


def test_a_full_bucket_keeps_its_stack(site: Site, name: str) -> None:
    site.deploy(name, {"Resources": {"Bucket": resource("S3::Bucket", {"BucketName": name})}})
    site("s3").put_object(Bucket=name, Key="precious", Body=b"x")
    site("cloudformation").delete_stack(StackName=name)
    assert site.stack_status(name) == "DELETE_FAILED"
    assert "Bucket: The bucket you tried to delete is not empty" in site.failures(name)
    site("s3").delete_object(Bucket=name, Key="precious")
    site("cloudformation").delete_stack(StackName=name)
    assert "does not exist" in refusal(lambda: site.stack_status(name))


def test_role_properties_all_arrive(site: Site, name: str) -> None:
    site.deploy(
        name, {"Resources": identity(), "Outputs": {"Role": {"Value": ref("Role")}, "B": {"Value": ref("Boundary")}}}
    )
    role = site("iam").get_role(RoleName=site.output(name, "Role"))["Role"]
    assert role["Path"] == "/tests/"
    assert role["MaxSessionDuration"] == 7200
    assert role["PermissionsBoundary"]["PermissionsBoundaryArn"] == site.output(name, "B")
    assert role["Tags"] == [{"Key": "team", "Value": "tests"}]
    attached = site("iam").list_attached_role_policies(RoleName=role["RoleName"])["AttachedPolicies"]
    assert len(attached) == 1
    assert set(site("iam").list_role_policies(RoleName=role["RoleName"])["PolicyNames"]) == {"inline", "more"}


def test_bucket_properties_all_arrive(site: Site, name: str) -> None:
    outputs = {"Bucket": {"Value": ref("Bucket")}, "Key": {"Value": att("Key", "Arn")}}
    assert site.deploy(name, {**template("storage", name), "Outputs": outputs}) == "CREATE_COMPLETE"
    s3, bucket = site("s3"), site.output(name, "Bucket")
    rule = s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"][0]
    assert rule["ApplyServerSideEncryptionByDefault"]["KMSMasterKeyID"] == site.output(name, "Key")
    assert rule["BucketKeyEnabled"] is True
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    assert all(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values())
    lifecycle = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"][0]
    assert lifecycle["Expiration"] == {"Days": 7}
    assert lifecycle["Filter"] == {"Prefix": "tmp/"}
    ownership = s3.get_bucket_ownership_controls(Bucket=bucket)["OwnershipControls"]["Rules"]
    assert ownership == [{"ObjectOwnership": "BucketOwnerEnforced"}]


def test_a_file_system_is_mounted_by_one_name(site: Site, name: str) -> None:
    outputs = {"Mount": {"Value": att("Files", "LustreMountName")}, "Id": {"Value": ref("Files")}}
    site.deploy(name, {**template("storage", name), "Outputs": outputs})
    system = site("fsx").describe_file_systems(FileSystemIds=[site.output(name, "Id")])["FileSystems"][0]
    assert system["LustreConfiguration"]["MountName"] == site.output(name, "Mount")
    assert system["Lifecycle"] == "AVAILABLE"


def test_conversion_ignores_case_and_drops_nothing() -> None:
    limits = {
        "ServiceEnvironmentName": "n",
        "ServiceEnvironmentType": "SAGEMAKER_TRAINING",
        "CapacityLimits": [{"MaxCapacity": "4"}],
    }
    assert to_api("batch", "CreateServiceEnvironment", limits) == {
        "serviceEnvironmentName": "n",
        "serviceEnvironmentType": "SAGEMAKER_TRAINING",
        "capacityLimits": [{"maxCapacity": 4}],
    }
    with pytest.raises(UnsupportedPropertyError, match=r"CapacityLimits\.Colour"):
        to_api("batch", "CreateServiceEnvironment", {"CapacityLimits": [{"Colour": "red"}]})


def test_long_names_keep_their_random_end() -> None:
    shortened = fit_name("stack-" + "x" * 80 + "-AB12CD34EF56", 64)
    assert len(shortened) == 64
    assert shortened.endswith("-AB12CD34EF56")
    assert fit_name("short-AB", 64) == "short-AB"
