"""What a tenant may ask of its storage, on the template: ages, locks, links, and what a kept file system stands on."""

import json
from typing import Any

import pytest

STACK = "trainyard-production-adapters-foundation"


@pytest.fixture(scope="module")
def resources(synthesize: Any, environments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The foundation of a production tenant that asks for everything."""
    content = environments["production"].model_dump(mode="json")
    tenant = content["tenants"]["adapters"]
    tenant["storage"] = {
        "old_version_days": 14,
        "archive_data_after_days": 60,
        "archive_checkpoints_after_days": 30,
        "delete_checkpoints_after_days": 400,
        "archive_artifacts_after_days": 90,
        "lock_data_days": 7,
        "lock_artifacts_days": 30,
    }
    tenant["file_system"] = {"storage_gib": 9600, "throughput_mb_per_s_per_tib": 1000, "efa": True}
    tenant["file_system"]["links"] = {"/a-b": "text/a", "/a/b": "text/b"}
    tenant["cluster"] = {
        "engine": "hyperpod",
        "controller": {"instance_type": "m5.xlarge"},
        "login": {"instance_type": "m5.xlarge"},
        "node_groups": {"train": {"instance_type": "p5.48xlarge", "max_instances": 2}},
    }
    content["tenants"] = {"adapters": tenant}
    template = synthesize(type(environments["production"]).model_validate(content))[STACK]
    found: dict[str, dict[str, Any]] = template["Resources"]
    return found


def of_type(resources: dict[str, dict[str, Any]], kind: str, part: str = "") -> list[dict[str, Any]]:
    return [item for name, item in resources.items() if item["Type"] == f"AWS::{kind}" and part in name]


def rules(bucket: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {rule["Id"]: rule for rule in bucket["Properties"]["LifecycleConfiguration"]["Rules"]}


def test_objects_age_as_the_environment_file_says(resources: dict[str, dict[str, Any]]) -> None:
    (data,) = of_type(resources, "S3::Bucket", "BucketsData")
    (checkpoints,) = of_type(resources, "S3::Bucket", "BucketsCheckpoints")
    (artifacts,) = of_type(resources, "S3::Bucket", "BucketsArtifacts")
    for bucket, days in ((data, 60), (checkpoints, 30), (artifacts, 90)):
        found = rules(bucket)
        assert found["OldVersionsAndTornUploads"]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 14}
        assert found["OldVersionsAndTornUploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
        assert found["Ages"]["Transitions"] == [{"StorageClass": "GLACIER_IR", "TransitionInDays": days}]
    assert rules(checkpoints)["Ages"]["ExpirationInDays"] == 400
    assert "ExpirationInDays" not in rules(data)["Ages"]
    # Beside the jobs' prefix lies the broker's ledger: deleted, all of a month's spending would be forgotten.
    assert rules(checkpoints)["Ages"]["Prefix"] == "jobs/"
    assert {rule["Id"] for rule in rules(checkpoints).values() if "ExpirationInDays" in rule} == {"Ages"}


def test_data_and_artifacts_are_locked_and_the_checkpoints_can_still_be_pruned(
    resources: dict[str, dict[str, Any]],
) -> None:
    (data,) = of_type(resources, "S3::Bucket", "BucketsData")
    (checkpoints,) = of_type(resources, "S3::Bucket", "BucketsCheckpoints")
    (artifacts,) = of_type(resources, "S3::Bucket", "BucketsArtifacts")
    for bucket, days in ((data, 7), (artifacts, 30)):
        assert bucket["Properties"]["ObjectLockEnabled"] is True
        retention = bucket["Properties"]["ObjectLockConfiguration"]["Rule"]["DefaultRetention"]
        assert retention == {"Days": days, "Mode": "GOVERNANCE"}
    assert "ObjectLockEnabled" not in checkpoints["Properties"]


def test_links_join_a_folder_to_the_data_bucket_and_nothing_backs_it_up(resources: dict[str, dict[str, Any]]) -> None:
    links = [item["Properties"] for item in of_type(resources, "FSx::DataRepositoryAssociation")]
    data = next(
        name for name in resources if name.startswith("BucketsData") and resources[name]["Type"].endswith("Bucket")
    )
    assert sorted((link["FileSystemPath"], link["DataRepositoryPath"]["Fn::Join"][1]) for link in links) == [
        ("/a-b", ["s3://", {"Ref": data}, "/text/a"]),
        ("/a/b", ["s3://", {"Ref": data}, "/text/b"]),
    ]
    (system,) = of_type(resources, "FSx::FileSystem")
    assert system["Properties"]["LustreConfiguration"]["AutomaticBackupRetentionDays"] == 0


def test_only_fsx_itself_uses_the_key_for_links(resources: dict[str, dict[str, Any]]) -> None:
    (key,) = of_type(resources, "KMS::Key", "KeysData")
    (statement,) = [
        item for item in key["Properties"]["KeyPolicy"]["Statement"] if item.get("Sid") == "FileSystemLinks"
    ]
    service = "arn:aws:iam::777788889999:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com"
    assert statement["Condition"]["ArnLike"] == {"aws:PrincipalArn": f"{service}/AWSServiceRoleForFSxS3Access_fs-*"}
    assert statement["Condition"]["StringEquals"]["kms:ViaService"] == "s3.us-east-1.amazonaws.com"


def test_a_file_system_that_is_kept_keeps_the_ground_it_stands_on(
    resources: dict[str, dict[str, Any]], templates: dict[str, Any]
) -> None:
    """FSx leaves its servers' interfaces in the subnet: deleting that would fail half-way through the stack."""
    (system,) = of_type(resources, "FSx::FileSystem")
    assert system["DeletionPolicy"] == "RetainExceptOnCreate"
    ground = [
        *(item["Ref"] for item in system["Properties"]["SubnetIds"]),
        *(item["Fn::GetAtt"][0] for item in system["Properties"]["SecurityGroupIds"]),
    ]
    ground += [resources[name]["Properties"]["VpcId"]["Ref"] for name in ground]
    assert {resources[name].get("DeletionPolicy") for name in ground} == {"RetainExceptOnCreate"}
    local = templates["local"]["trainyard-local-acme-foundation"]["Resources"]
    assert {item.get("DeletionPolicy", "Delete") for item in of_type(local, "EC2::VPC")} == {"Delete"}


def test_a_file_system_with_efa_lets_everything_pass_between_its_servers_and_the_clients(
    resources: dict[str, dict[str, Any]], templates: dict[str, Any]
) -> None:
    """FSx refuses it otherwise; and its rules must be there first. Another one has Lustre's ports alone."""
    own, other = resources, templates["local"]["trainyard-local-acme-foundation"]["Resources"]
    (files,) = of_type(own, "FSx::FileSystem")
    lustre = files["Properties"]["LustreConfiguration"]
    assert lustre["EfaEnabled"] is True and lustre["MetadataConfiguration"] == {"Mode": "AUTOMATIC"}
    assert "EfaEnabled" not in of_type(other, "FSx::FileSystem")[0]["Properties"]["LustreConfiguration"]

    def passed(resources: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str, str, str]]:
        found = {}
        for name, item in resources.items():
            rule, way = item.get("Properties", {}), item["Type"].removeprefix("AWS::EC2::SecurityGroup")
            if way in ("Ingress", "Egress") and "FileSystemGroup" in json.dumps(rule):
                peer = rule.get("SourceSecurityGroupId") or rule["DestinationSecurityGroupId"]
                ends = ["files" if "FileSystem" in json.dumps(end) else "jobs" for end in (rule["GroupId"], peer)]
                found[name] = (way, *ends, rule["IpProtocol"])
        return found

    rules = passed(own)
    ends = [("files", "files"), ("files", "jobs"), ("jobs", "files")]
    assert sorted(rules.values()) == sorted((way, *pair, "-1") for way in ("Ingress", "Egress") for pair in ends)
    assert set(rules) <= set(files["DependsOn"])
    assert {rule[-1] for rule in passed(other).values()} == {"tcp"}
