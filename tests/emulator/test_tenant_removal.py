"""A tenant leaves, on the emulator: what its policy keeps is kept, the rest is gone, and the report says which."""

import json
import types
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from emulator_testing import Site
from emulator_testing.templates import att, ref, resource

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch.session import Account, emulated_account
from trainyard.operate.tenants import leftovers, removal
from trainyard.operate.tenants.removal import plan, remove, write_report
from trainyard.operate.tenants.revocations import POLICY, closed_before
from trainyard.operate.tenants.survey import state
from trainyard.operate.tenants.unfinished import Unfinished
from trainyard.spec.platform import EnvironmentSpec

STATEFUL = ("Data", "Lustre", "Key", "Group", "Vpc", "Subnet", "Clients")


@pytest.fixture
def account(site: Site) -> Account:
    return emulated_account(site.info, site.info.region)


def environment(name: str, *, retain_data: bool, **removal_spec: str) -> EnvironmentSpec:
    tenant = {
        "queues": {"gpu": {"instance_types": ["ml.p5.4xlarge"], "max_instances": 1}},
        "budget": {"monthly_usd": 10, "notify": ["a@example.com"]},
    }
    content = {
        "name": name,
        "account": "123456789012",
        "region": "us-east-1",
        "availability_zones": ["us-east-1a"],
        "max_instances": {"ml.p5.4xlarge": 1},
        "retain_data": retain_data,
        "tenants": {
            "acme": {**tenant, "network_index": 0, "removal": removal_spec},
            "globex": {**tenant, "network_index": 1},
        },
    }
    return EnvironmentSpec.model_validate(content)


def deploy(site: Site, spec: EnvironmentSpec, tenant: str = "acme") -> dict[str, str]:
    """A tenant's two stacks in small, with objects in the bucket; physical ids by logical id."""
    lustre = {
        "FileSystemType": "LUSTRE",
        "StorageCapacity": 1200,
        "SubnetIds": [ref("Subnet")],
        "LustreConfiguration": {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
    }
    resources = {
        "Key": resource("KMS::Key", {"KeyPolicy": KEY_POLICY}),
        "Data": resource("S3::Bucket", {"VersioningConfiguration": {"Status": "Enabled"}}),
        "Group": resource("Logs::LogGroup", {"RetentionInDays": 30}),
        "Vpc": resource("EC2::VPC", {"CidrBlock": "10.64.0.0/20"}),
        "Subnet": resource("EC2::Subnet", {"VpcId": ref("Vpc"), "CidrBlock": "10.64.0.0/21"}),
        "Clients": resource("EC2::SecurityGroup", {"GroupDescription": "clients", "VpcId": ref("Vpc")}),
        "Lustre": resource("FSx::FileSystem", lustre),
    }
    for item in resources.values():
        item["DeletionPolicy"] = "RetainExceptOnCreate" if spec.retain_data else "Delete"
    stack = f"trainyard-{spec.name}-{tenant}"
    foundation = {
        "Resources": resources,
        "Outputs": {"Key": {"Value": att("Key", "Arn"), "Export": {"Name": f"{stack}-key"}}},
    }
    parameter = {"Type": "String", "Value": {"Fn::ImportValue": f"{stack}-key"}}
    assert site.deploy(f"{stack}-foundation", foundation) == "CREATE_COMPLETE", site.failures(f"{stack}-foundation")
    training = {"Resources": {"Contract": resource("SSM::Parameter", parameter)}}
    assert site.deploy(f"{stack}-training", training) == "CREATE_COMPLETE"
    for name in (f"{stack}-foundation", f"{stack}-training"):
        site("cloudformation").update_termination_protection(StackName=name, EnableTerminationProtection=True)
    listed = site("cloudformation").list_stack_resources(StackName=f"{stack}-foundation")["StackResourceSummaries"]
    physical = {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in listed}
    for key in ("a", "b"):
        for body in (b"old", b"newer"):
            site("s3").put_object(Bucket=physical["Data"], Key=key, Body=body)
    site("s3").delete_object(Bucket=physical["Data"], Key="a")
    site("s3").create_multipart_upload(Bucket=physical["Data"], Key="torn")
    return physical


KEY_POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"AWS": "arn:aws:iam::123456789012:root"},
            "Action": ["kms:DescribeKey", "kms:PutKeyPolicy", "kms:ScheduleKeyDeletion"],
            "Resource": "*",
        }
    ],
}


def silent(_: str) -> None:
    pass


def gone(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ClientError:
        return True
    return False


def test_a_bucket_with_objects_blocks_cloudformation_alone(site: Site, name: str) -> None:
    """What the verb is for."""
    spec = environment(name, retain_data=False)
    deploy(site, spec)
    for part in ("training", "foundation"):
        stack = f"trainyard-{name}-acme-{part}"
        site("cloudformation").update_termination_protection(StackName=stack, EnableTerminationProtection=False)
        site("cloudformation").delete_stack(StackName=stack)
    assert site.stack_status(f"trainyard-{name}-acme-foundation") == "DELETE_FAILED"


@pytest.mark.parametrize("retain_data", [False, True], ids=["the stacks delete", "the stacks retain"])
def test_shred_leaves_nothing_but_keys_that_serve_nobody(
    site: Site, account: Account, name: str, tmp_path: Path, retain_data: bool
) -> None:
    spec = environment(name, retain_data=retain_data, data="shred")
    physical = deploy(site, spec)
    deploy(site, spec, "globex")
    planned = plan(account, spec, "acme", tmp_path)
    inside = planned.contents[physical["Data"]]
    assert (inside.objects, inside.size_bytes, inside.old_versions) == (1, 5, 4)
    assert {thing.logical_id for thing in planned.held} == set(STATEFUL)
    assert site.stack_status(f"trainyard-{name}-acme-foundation") == "CREATE_COMPLETE", "planning changes nothing"

    report = remove(account, planned, tmp_path, silent)
    assert [name.rpartition("-")[2] for name in report.stacks_deleted] == ["training", "foundation"]
    assert report.versions_deleted == {physical["Data"]: 5}
    assert gone(lambda: site("s3").head_bucket(Bucket=physical["Data"]))
    file_systems = site("fsx").describe_file_systems()["FileSystems"]
    assert physical["Lustre"] not in {item["FileSystemId"] for item in file_systems}
    assert gone(lambda: site("ec2").describe_vpcs(VpcIds=[physical["Vpc"]]))
    assert site("kms").describe_key(KeyId=physical["Key"])["KeyMetadata"]["KeyState"] == "PendingDeletion"
    left = {item.identifier: item.why for item in report.left}
    assert set(left) == {physical["Key"], "acme-*"}
    assert "deleted for good on 20" in left[physical["Key"]]
    assert state(account, spec, "globex").deployed, "the neighbour is untouched"
    kept = write_report(report, tmp_path)
    assert json.loads(kept.read_text())["versions_deleted"] == {physical["Data"]: 5}
    assert f"left: AWS::KMS::Key {physical['Key']}" in kept.with_suffix(".txt").read_text()


def test_roles_of_single_jobs_go_before_the_boundary_that_they_hold(
    site: Site, account: Account, name: str, tmp_path: Path
) -> None:
    spec = environment(name, retain_data=False)
    deploy(site, spec)
    iam = site("iam")
    for tenant in ("acme", "globex"):
        path, trust = f"/trainyard/{name}/{tenant}/jobs/each/", json.dumps({"Version": "2012-10-17", "Statement": []})
        iam.create_role(Path=path, RoleName=f"{tenant}-{name}", AssumeRolePolicyDocument=trust)
        own = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{tenant}/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [own]})
        iam.put_role_policy(RoleName=f"{tenant}-{name}", PolicyName="own", PolicyDocument=policy)
    group = f"/aws/sagemaker/Clusters/trainyard-{name}-acme/a1b2"
    for owned in (group, group.replace("-acme/", "-acme-labs/")):
        site("logs").create_log_group(logGroupName=owned)
    planned = plan(account, spec, "acme", tmp_path)
    assert planned.job_roles == (f"acme-{name}",) and planned.machine_logs == (group,)
    report = remove(account, planned, tmp_path, silent)
    assert "1 role of its jobs" in report.deleted and f"Logs::LogGroup {group}" in report.deleted
    site("logs").delete_log_group(logGroupName=group.replace("-acme/", "-acme-labs/"))
    assert gone(lambda: iam.get_role(RoleName=f"acme-{name}"))
    assert iam.get_role(RoleName=f"globex-{name}")["Role"]["RoleName"] == f"globex-{name}"


def test_a_role_whose_sessions_were_closed_goes_when_none_of_them_is_left(
    site: Site, account: Account, name: str, tmp_path: Path
) -> None:
    """The policy that closes them is no stack's, and CloudFormation deletes no role that holds one."""
    spec = environment(name, retain_data=False)
    physical = deploy(site, spec)
    iam, stack = site("iam"), f"trainyard-{name}-acme-training"
    trust = {"Version": "2012-10-17", "Statement": []}
    roles = {key: resource("IAM::Role", {"AssumeRolePolicyDocument": trust}) for key in ("Operator", "Other")}
    site("cloudformation").update_termination_protection(StackName=stack, EnableTerminationProtection=False)
    site("cloudformation").delete_stack(StackName=stack)
    assert site.deploy(stack, {"Resources": roles}) == "CREATE_COMPLETE", site.failures(stack)
    listed = site("cloudformation").list_stack_resources(StackName=stack)["StackResourceSummaries"]
    operator, other = (item["PhysicalResourceId"] for item in sorted(listed, key=lambda i: i["LogicalResourceId"]))

    def close(at: datetime) -> None:
        document = json.dumps(closed_before(at))
        iam.put_role_policy(RoleName=operator, PolicyName=POLICY, PolicyDocument=document)

    close(datetime.now(UTC))
    planned = plan(account, spec, "acme", tmp_path)
    assert [one.role for one in planned.revoked] == [operator] and any(operator in line for line in planned.lines())
    with pytest.raises(InputError, match=rf"{operator} were closed .* nothing was changed: repeat .* after 20"):
        remove(account, planned, tmp_path, silent)
    assert not gone(lambda: site("s3").head_bucket(Bucket=physical["Data"])), "refused before anything is emptied"
    close(datetime.now(UTC) - timedelta(hours=2))
    iam.put_role_policy(
        RoleName=other, PolicyName="by-hand", PolicyDocument=json.dumps(closed_before(datetime.now(UTC)))
    )
    with pytest.raises(AwsRefusedError, match=r"Other: .*must delete policies first"):  # another's policy is not ours
        remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    iam.delete_role_policy(RoleName=other, PolicyName="by-hand")
    remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert gone(lambda: iam.get_role(RoleName=operator))


def test_retain_keeps_every_version_and_says_where_it_is(
    site: Site, account: Account, name: str, tmp_path: Path
) -> None:
    spec = environment(name, retain_data=True)
    physical = deploy(site, spec)
    report = remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert site("s3").get_object(Bucket=physical["Data"], Key="b")["Body"].read() == b"newer"
    assert len(site("s3").list_object_versions(Bucket=physical["Data"])["Versions"]) == 4
    assert site("kms").describe_key(KeyId=physical["Key"])["KeyMetadata"]["KeyState"] == "Enabled"
    left = {item.identifier: item.why for item in report.left}
    assert {physical[logical_id] for logical_id in STATEFUL} <= set(left)
    assert "kept by the tenant's policy" in left[physical["Data"]]
    assert (report.versions_deleted, report.deleted) == ({}, [])


def test_an_interrupted_removal_is_finished_by_the_same_command(
    site: Site, account: Account, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stacks are gone, and with them CloudFormation's list of what they held; the journal has it."""
    spec = environment(name, retain_data=True, data="shred")
    physical = deploy(site, spec)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(removal, "_delete_retained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert not state(account, spec, "acme").deployed and not gone(
        lambda: site("s3").head_bucket(Bucket=physical["Data"])
    )
    elsewhere = plan(account, spec, "acme", tmp_path / "another machine")
    assert elsewhere.is_blind and any(removal.BLIND in line for line in elsewhere.lines()), "it can't know"
    again = plan(account, spec, "acme", tmp_path)
    assert not again.is_blind
    assert {thing.physical_id for thing in again.held} == {physical[logical_id] for logical_id in STATEFUL}
    report = remove(account, again, tmp_path, silent)
    assert gone(lambda: site("s3").head_bucket(Bucket=physical["Data"]))
    assert {item.identifier for item in report.left} == {physical["Key"], "acme-*"}
    assert plan(account, spec, "acme", tmp_path).held == ()


def test_nothing_goes_while_a_job_runs(
    site: Site, account: Account, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = environment(name, retain_data=False)
    physical = deploy(site, spec)
    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "running_jobs", lambda *_: Unfinished(("acme-tiny-1",)))
        with pytest.raises(InputError, match=r"1 job has not ended \(acme-tiny-1\); stop them"):
            remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert site("s3").get_object(Bucket=physical["Data"], Key="b")["Body"].read() == b"newer"
    assert site.stack_status(f"trainyard-{name}-acme-training") == "CREATE_COMPLETE"


@pytest.mark.parametrize("retain_data", [False, True], ids=["the stacks delete", "the stacks retain"])
def test_a_locked_object_stops_the_removal_before_any_stack_goes(
    site: Site, account: Account, name: str, tmp_path: Path, retain_data: bool
) -> None:
    spec = environment(name, retain_data=retain_data, data="shred")
    retention = {"Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 3}}, "ObjectLockEnabled": "Enabled"}
    versioned = {"VersioningConfiguration": {"Status": "Enabled"}}
    bucket = resource("S3::Bucket", {"ObjectLockEnabled": True, "ObjectLockConfiguration": retention, **versioned})
    stack = f"trainyard-{name}-acme-foundation"
    key = resource("KMS::Key", {"KeyPolicy": KEY_POLICY})
    plain = resource("S3::Bucket", versioned)
    for item in (bucket, key, plain):
        item["DeletionPolicy"] = "RetainExceptOnCreate" if retain_data else "Delete"
    template = {"Resources": {"Data": bucket, "Key": key, "Plain": plain}}
    assert site.deploy(stack, template) == "CREATE_COMPLETE", site.failures(stack)
    listed = site("cloudformation").list_stack_resources(StackName=stack)["StackResourceSummaries"]
    ids = {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in listed}
    physical = ids["Data"]
    site("s3").put_object(Bucket=physical, Key="kept", Body=b"x")
    site("s3").put_object(Bucket=ids["Plain"], Key="free", Body=b"y")
    past = {"ObjectLockMode": "GOVERNANCE", "ObjectLockRetainUntilDate": datetime(2020, 1, 1, tzinfo=UTC)}
    site("s3").put_object(Bucket=physical, Key="a lock of the past", Body=b"z", **past)
    told = r"versions can't be deleted \(kept: locked until .*nothing was deleted: wait until their lock ends"
    with pytest.raises(AwsRefusedError, match=told):
        remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    for key_name, where in (("free", ids["Plain"]), ("a lock of the past", physical)):
        assert not gone(lambda of=key_name, there=where: site("s3").head_object(Bucket=there, Key=of)), "not half of it"
    assert site.stack_status(stack) == "CREATE_COMPLETE"
    assert site("s3").get_object(Bucket=physical, Key="kept")["Body"].read() == b"x"
    assert site("kms").describe_key(KeyId=ids["Key"])["KeyMetadata"]["KeyState"] == "Enabled", "still readable"


@pytest.mark.slow
def test_an_export_is_done_once_and_what_came_since_is_never_emptied(
    site: Site, account: Account, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract goes with the first stack: what an interrupted removal goes on with must not ask for it again."""
    target = f"{name}-away"
    site("s3").create_bucket(Bucket=target)
    spec = environment(name, retain_data=True, data="shred", export_to=f"s3://{target}")
    physical = deploy(site, spec)
    bucket = physical["Data"]
    role = types.SimpleNamespace(roles=types.SimpleNamespace(launcher="arn:aws:iam::123456789012:role/launcher"))
    asked: list[str] = []
    monkeypatch.setattr(removal, "read_contract", lambda *_: role)
    monkeypatch.setattr(removal, "assume", lambda _, arn, **__: asked.append(arn) or account)

    def writes(*_: object) -> Unfinished:  # while the export runs, a job comes, writes and ends
        if asked:
            site("s3").put_object(Bucket=bucket, Key="late", Body=b"late")
        return Unfinished()

    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "running_jobs", writes)
        with pytest.raises(AwsRefusedError, match="was written to since its copying began; nothing was deleted"):
            remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert site("s3").get_object(Bucket=bucket, Key="late")["Body"].read() == b"late"
    planned = plan(account, spec, "acme", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "running_jobs", lambda *_: Unfinished(("acme-tiny-1",)))
        with pytest.raises(InputError, match=r"1 job has not ended"):
            remove(account, planned, tmp_path, silent)  # asked again, though the plan knew of none
    assert site("s3").get_object(Bucket=f"{target}", Key=f"{bucket}/late")["Body"].read() == b"late"

    def refused(*_: object) -> None:
        raise AwsRefusedError("deleting it: AWS refused: not today")

    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "delete", refused)
        with pytest.raises(AwsRefusedError, match=r"not today.*; mend that and repeat the command; what went so far"):
            remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    monkeypatch.setattr(removal, "read_contract", refused)  # its stack is gone
    assert not gone(lambda: site("s3").head_bucket(Bucket=bucket))
    report = remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert (report.exported["objects"], len(asked)) == (2, 2)
    assert gone(lambda: site("s3").head_bucket(Bucket=bucket))
    assert {item.identifier for item in report.left} == {physical["Key"], "acme-*"}


def test_a_removal_that_began_to_empty_copies_what_came_since(
    site: Site, account: Account, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For weeks, perhaps: the tenant is there until its stacks go."""
    target = f"{name}-away"
    s3 = site("s3")
    s3.create_bucket(Bucket=target)
    spec = environment(name, retain_data=False, data="shred", export_to=f"s3://{target}")
    bucket = deploy(site, spec)["Data"]
    role = types.SimpleNamespace(roles=types.SimpleNamespace(launcher="arn:aws:iam::123456789012:role/launcher"))
    monkeypatch.setattr(removal, "read_contract", lambda *_: role)
    monkeypatch.setattr(removal, "assume", lambda *_, **__: account)

    def half(*_: object) -> tuple[int, list[str]]:
        for version in s3.list_object_versions(Bucket=bucket, Prefix="b")["Versions"]:
            s3.delete_object(Bucket=bucket, Key="b", VersionId=version["VersionId"])
        return 2, ["a: AccessDenied"]

    with monkeypatch.context() as patch:
        patch.setattr(removal.storage, "empty", half)
        with pytest.raises(AwsRefusedError, match=r"1 version can't be deleted \(a: AccessDenied\)"):
            remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    s3.put_object(Bucket=bucket, Key="since", Body=b"since")
    again = plan(account, spec, "acme", tmp_path)
    assert "  an earlier removal began to empty its buckets: what went then can't be copied" in again.lines()
    report = remove(account, again, tmp_path, silent)
    copied = {key: s3.get_object(Bucket=target, Key=f"{bucket}/{key}")["Body"].read() for key in ("b", "since")}
    assert copied == {"b": b"newer", "since": b"since"}
    assert report.exported == {"to": f"s3://{target}", "objects": 2, "size_bytes": 10}
    assert gone(lambda: s3.head_bucket(Bucket=bucket))


def test_what_nobody_can_read_any_more_does_not_hold_a_removal_up(
    site: Site, account: Account, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher went with the stacks; what a retained file system still wrote back is under a key for nobody."""
    target = f"{name}-away"
    site("s3").create_bucket(Bucket=target)
    spec = environment(name, retain_data=True, data="shred", export_to=f"s3://{target}")
    bucket = deploy(site, spec)["Data"]
    role = types.SimpleNamespace(roles=types.SimpleNamespace(launcher="arn:aws:iam::123456789012:role/launcher"))
    monkeypatch.setattr(removal, "read_contract", lambda *_: role)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(removal, "assume", lambda *_, **__: account)
        patch.setattr(removal, "_delete_retained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    site("s3").put_object(Bucket=bucket, Key="since", Body=b"since")
    monkeypatch.setattr(removal, "assume", lambda *_, **__: pytest.fail("there is no such role"))
    report = remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert report.exported["objects"] == 1 and gone(lambda: site("s3").head_bucket(Bucket=bucket))


def test_a_tenant_that_was_never_deployed_leaves_nothing(account: Account, name: str, tmp_path: Path) -> None:
    spec = environment(name, retain_data=True)
    report = remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
    assert (report.stacks_deleted, report.deleted) == ([], [])
    assert [item.what for item in report.left] == ["training jobs", "what an earlier removal left"]


def test_export_copies_each_current_object_and_counts_them(site: Site, account: Account, name: str) -> None:
    s3 = site("s3")
    for bucket in (f"{name}-from", f"{name}-to"):
        s3.create_bucket(Bucket=bucket)
    for index in range(3):
        s3.put_object(Bucket=f"{name}-from", Key=f"deep/{index}", Body=b"x" * index)
    said: list[str] = []
    copied = removal.storage.export(account, account, f"{name}-from", f"s3://{name}-to/left/", said.append)
    assert copied == (3, 3, 3, 3) and len(said) == 3
    target = f"left/{name}-from/deep/2"
    assert s3.get_object(Bucket=f"{name}-to", Key=target)["Body"].read() == b"xx"
    s3.put_object(Bucket=f"{name}-to", Key=target, Body=b"zz")  # somebody else's, of the same size
    s3.put_object(Bucket=f"{name}-from", Key="deep/1", Body=b"y")
    again = removal.storage.export(account, account, f"{name}-from", f"s3://{name}-to/left/", silent)
    assert again == (3, 3, 2, 3), "what was copied is not copied again"
    bodies = [s3.get_object(Bucket=f"{name}-to", Key=f"left/{name}-from/deep/{key}")["Body"].read() for key in (1, 2)]
    assert bodies == [b"y", b"xx"]
    with pytest.raises(AwsRefusedError, match=r"-absent/: AWS refused"):
        removal.storage.export(account, account, f"{name}-from", f"s3://{name}-absent/", silent)


def test_why_a_stack_of_many_resources_could_not_be_deleted_is_found_behind_the_newest_events(
    site: Site, account: Account, name: str, tmp_path: Path
) -> None:
    spec = environment(name, retain_data=True, data="retain")
    many = {f"P{index}": resource("SSM::Parameter", {"Type": "String", "Value": "x"}) for index in range(60)}
    bucket = resource("S3::Bucket", {"BucketName": name}, DependsOn=list(many))
    stack = f"trainyard-{name}-acme-foundation"
    assert site.deploy(stack, {"Resources": {**many, "Full": bucket}}) == "CREATE_COMPLETE", site.failures(stack)
    site("s3").put_object(Bucket=name, Key="one", Body=b"x")
    with pytest.raises(AwsRefusedError, match="DELETE_FAILED: Full: The bucket you tried to delete is not empty"):
        remove(account, plan(account, spec, "acme", tmp_path), tmp_path, silent)
