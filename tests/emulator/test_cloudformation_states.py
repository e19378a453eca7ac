"""What a stack's state allows, what a failed operation leaves, and where things are made: as CloudFormation has it."""

import json
from typing import Any

import boto3
from emulator_testing import Site, refusal
from emulator_testing.templates import ref, resource, trust

from trainyard.launch.session import emulated_account
from trainyard.operate.deploy import check_losses
from trainyard.operate.stateful import failed_creations, release

NO_SUCH_TOPIC = {"TopicArn": "arn:aws:sns:us-east-1:123456789012:nope", "Protocol": "email", "Endpoint": "a@b.org"}


def group(name: str, **more: Any) -> dict[str, Any]:
    """A log group of this name."""
    return resource("Logs::LogGroup", {"LogGroupName": name}, **more)


def groups(site: Site, prefix: str) -> set[str]:
    """Names of the log groups that are there."""
    found = site("logs").describe_log_groups(logGroupNamePrefix=prefix)["logGroups"]
    return {item["logGroupName"].removeprefix(prefix) for item in found}


def failing(name: str) -> dict[str, Any]:
    """Three log groups, and what fails after them."""
    return {
        "Kept": group(f"{name}/kept", DeletionPolicy="Retain"),
        "Empty": group(f"{name}/empty", DeletionPolicy="RetainExceptOnCreate"),
        "Gone": group(f"{name}/gone"),
        "Bad": resource("SNS::Subscription", NO_SUCH_TOPIC, DependsOn=["Kept", "Empty", "Gone"]),
    }


def statuses(site: Site, name: str) -> set[tuple[str, str]]:
    """Every resource's every status."""
    pages = site("cloudformation").get_paginator("describe_stack_events").paginate(StackName=name)
    events = [event for page in pages for event in page["StackEvents"]]
    return {(event["LogicalResourceId"], event["ResourceStatus"]) for event in events}


def test_a_roll_back_keeps_what_is_retained_but_not_what_is_so_except_on_create(site: Site, name: str) -> None:
    assert site.deploy(name, {"Resources": failing(name)}) == "ROLLBACK_COMPLETE"
    assert groups(site, name) == {"/kept"}
    assert {("Kept", "DELETE_SKIPPED"), ("Empty", "DELETE_COMPLETE"), ("Gone", "DELETE_COMPLETE")} <= statuses(
        site, name
    )
    body = site("cloudformation").get_template(StackName=name)["TemplateBody"]
    assert set(body["Resources"]) == {"Kept", "Empty", "Gone", "Bad"}, "what failed can be read"
    site("cloudformation").delete_stack(StackName=name)
    assert site.deploy(name, {"Resources": failing(name)}) == "ROLLBACK_COMPLETE"
    assert "already exists" in site.failures(name), "as the named thing that was kept"

    first = {"Resources": {"Other": group(f"{name}-2/other")}}
    assert site.deploy(f"{name}-2", first) == "CREATE_COMPLETE"
    both = {"Resources": {**first["Resources"], **failing(f"{name}-2")}}
    site("cloudformation").update_stack(StackName=f"{name}-2", TemplateBody=json.dumps(both))
    assert site.stack_status(f"{name}-2") == "UPDATE_ROLLBACK_COMPLETE"
    assert groups(site, f"{name}-2") == {"/kept", "/other"}


def test_what_is_retained_except_on_create_outlives_its_stack(site: Site, name: str) -> None:
    kept = group(f"{name}/empty", DeletionPolicy="RetainExceptOnCreate")
    more = {"Also": kept, "Other": group(f"{name}/other", DeletionPolicy="RetainExceptOnCreate")}
    assert site.deploy(name, {"Resources": more}) == "CREATE_COMPLETE"
    site("cloudformation").update_stack(StackName=name, TemplateBody=json.dumps({"Resources": {"Also": kept}}))
    stack_id = site("cloudformation").describe_stacks(StackName=name)["Stacks"][0]["StackId"]
    site("cloudformation").delete_stack(StackName=name)
    assert groups(site, name) == {"/empty", "/other"}
    assert {("Also", "DELETE_SKIPPED"), ("Other", "DELETE_SKIPPED")} <= statuses(site, stack_id)


def test_what_a_roll_back_cant_delete_fails_it_and_is_the_stacks_to_delete(site: Site, name: str) -> None:
    """A role that is still in an instance profile."""
    role = resource("IAM::Role", {"RoleName": name, "AssumeRolePolicyDocument": trust("ec2.amazonaws.com")})
    held = {"InstanceProfileName": name, "Roles": [ref("Role")]}
    resources = {
        "Role": role,
        "Profile": resource("IAM::InstanceProfile", held, DeletionPolicy="Retain"),
        "Bad": resource("SNS::Subscription", NO_SUCH_TOPIC, DependsOn="Profile"),
    }
    assert site.deploy(name, {"Resources": resources}) == "ROLLBACK_FAILED"
    update = refusal(
        lambda: site("cloudformation").update_stack(StackName=name, TemplateBody=json.dumps({"Resources": {}}))
    )
    assert "is in ROLLBACK_FAILED state and can not be updated" in update
    said: list[str] = []
    release(emulated_account(site.info, site.info.region), [name], said.append)
    (line,) = said
    assert line.endswith(", with what its rollback couldn't delete: Role (AWS::IAM::Role)")
    site("iam").remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
    site("cloudformation").delete_stack(StackName=name)
    assert "does not exist" in refusal(lambda: site.stack_status(name))
    assert "NoSuchEntity" in refusal(lambda: site("iam").get_role(RoleName=name))


def change_set(site: Site, stack: str, content: dict[str, Any], kind: str) -> str:
    """What AWS says against such a change set; nothing where it takes it."""
    cloudformation, body = site("cloudformation"), json.dumps(content)
    return refusal(
        lambda: cloudformation.create_change_set(
            StackName=stack, ChangeSetName="changes", ChangeSetType=kind, TemplateBody=body
        )
    )


def test_a_stack_whose_creation_failed_can_only_be_deleted(site: Site, name: str) -> None:
    good = {"Resources": {"Group": group(f"{name}/good")}}
    assert site.deploy(name, {"Resources": failing(name)}) == "ROLLBACK_COMPLETE"
    assert "is in ROLLBACK_COMPLETE state and can not be updated" in change_set(site, name, good, "UPDATE")
    assert "already exists" in change_set(site, name, good, "CREATE")
    site("cloudformation").delete_stack(StackName=name)
    assert change_set(site, name, good, "CREATE") == ""
    site("cloudformation").execute_change_set(StackName=name, ChangeSetName="changes")
    assert site.stack_status(name) == "CREATE_COMPLETE"
    assert "already exists" in change_set(site, name, good, "CREATE")


def test_an_update_that_changes_nothing_is_refused(site: Site, name: str) -> None:
    content = {"Resources": {"Group": group(f"{name}/same")}}
    assert site.deploy(name, content) == "CREATE_COMPLETE"
    body, update = json.dumps(content), site("cloudformation").update_stack
    same = refusal(lambda: update(StackName=name, TemplateBody=body))
    assert same == "ValidationError: No updates are to be performed."
    update(StackName=name, TemplateBody=body, Tags=[{"Key": "team", "Value": "tests"}])
    assert site.stack_status(name) == "UPDATE_COMPLETE"


def test_a_stack_of_another_region_is_made_there(site: Site, name: str) -> None:
    session = boto3.session.Session(
        site.info.admin_access_key_id, site.info.admin_secret_access_key, region_name="eu-west-1"
    )
    there = {service: site.make_client(session, service) for service in ("cloudformation", "logs", "s3")}
    resources = {"Group": group(f"{name}/there"), "Bucket": resource("S3::Bucket", {"BucketName": name})}
    there["cloudformation"].create_stack(StackName=name, TemplateBody=json.dumps({"Resources": resources}))
    (stack,) = there["cloudformation"].describe_stacks(StackName=name)["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE", stack.get("StackStatusReason")
    found = there["logs"].describe_log_groups(logGroupNamePrefix=name)["logGroups"]
    assert [item["arn"].split(":")[3] for item in found] == ["eu-west-1"]
    assert there["s3"].get_bucket_location(Bucket=name)["LocationConstraint"] == "eu-west-1"
    assert groups(site, name) == set()
    there["cloudformation"].delete_stack(StackName=name)
    assert there["logs"].describe_log_groups(logGroupNamePrefix=name)["logGroups"] == []


def test_long_answers_come_in_pages(site: Site, name: str) -> None:
    def parameter(number: int) -> dict[str, Any]:
        return resource("SSM::Parameter", {"Name": f"/{name}/{number}", "Type": "String", "Value": "x"})

    resources = {f"P{number}": parameter(number) for number in range(102)}
    assert site.deploy(name, {"Resources": resources}) == "CREATE_COMPLETE"
    cloudformation = site("cloudformation")
    for operation, key, expected in (
        ("describe_stack_events", "StackEvents", 206),
        ("list_stack_resources", "StackResourceSummaries", 102),
    ):
        first = getattr(cloudformation, operation)(StackName=name)
        assert len(first[key]) == 100
        pages = cloudformation.get_paginator(operation).paginate(StackName=name)
        assert len([item for page in pages for item in page[key]]) == expected
    newest = cloudformation.describe_stack_events(StackName=name)["StackEvents"][0]
    assert newest["ResourceStatus"] == "CREATE_COMPLETE" and newest["LogicalResourceId"] == name

    watch = site("cloudwatch")
    alarm = {"MetricName": "m", "Namespace": "n", "Statistic": "Average", "Period": 60, "EvaluationPeriods": 1}
    for number in range(52):
        watch.put_metric_alarm(
            AlarmName=f"{name}-{number}", ComparisonOperator="GreaterThanThreshold", Threshold=1, **alarm
        )
    assert len(watch.describe_alarms(AlarmNamePrefix=name)["MetricAlarms"]) == 50
    assert len(watch.describe_alarms(AlarmNamePrefix=name, MaxRecords=100)["MetricAlarms"]) == 52
    pages = watch.get_paginator("describe_alarms").paginate(AlarmNamePrefix=name)
    assert len({item["AlarmName"] for page in pages for item in page["MetricAlarms"]}) == 52


def test_a_first_deployment_that_failed_is_no_loss_and_can_be_repeated(site: Site, name: str) -> None:
    """The CLI protects a stack before it makes it, and can't delete it then to make it anew."""
    stack, foreign = f"trainyard-{name}-acme-foundation", f"trainyard-{name}-globex-foundation"
    account = emulated_account(site.info, site.info.region)

    def content(cidr: str) -> dict[str, Any]:
        vpc = resource("EC2::VPC", {"CidrBlock": cidr})
        return {"Resources": {"Vpc": vpc, "Bad": resource("SNS::Subscription", NO_SUCH_TOPIC, DependsOn="Vpc")}}

    for own in (stack, foreign):
        assert site.deploy(own, content("10.4.0.0/20")) == "ROLLBACK_COMPLETE"
        site("cloudformation").update_termination_protection(StackName=own, EnableTerminationProtection=True)
    assert check_losses(account, {stack: content("10.5.0.0/20")}, [], []) == []
    said: list[str] = []
    release(account, failed_creations(account, {stack}), said.append)
    assert said == [f"stack {stack}: its first deployment failed; it is unprotected, deleted and made anew"]
    assert "TerminationProtection" in refusal(lambda: site("cloudformation").delete_stack(StackName=foreign))
    site("cloudformation").delete_stack(StackName=stack)
    assert failed_creations(account, {stack}) == []
