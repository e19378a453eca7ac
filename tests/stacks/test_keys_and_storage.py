"""Keys, buckets and the file system: who may decrypt, and what keeps data from being lost or readable."""

import json
from collections.abc import Callable
from typing import Any

import pytest

TENANTS = ("acme", "globex")
USE = {"kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey", "kms:GenerateDataKeyWithoutPlaintext", "kms:CreateGrant"}


def _stack(tenant: str) -> str:
    return f"trainyard-local-{tenant}-foundation"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _key_statements(account: Any, tenant: str) -> list[dict[str, Any]]:
    keys = account.resources(_stack(tenant), "AWS::KMS::Key").values()
    return [statement for key in keys for statement in key["KeyPolicy"]["Statement"]]


@pytest.mark.parametrize("tenant", TENANTS)
def test_four_keys_rotate_yearly(account: Any, tenant: str) -> None:
    keys = account.resources(_stack(tenant), "AWS::KMS::Key").values()
    assert [(key["EnableKeyRotation"], key["RotationPeriodInDays"]) for key in keys] == [(True, 365)] * 4


@pytest.mark.parametrize("tenant", TENANTS)
def test_the_account_can_administer_a_key_but_use_it_only_through_fsx(account: Any, tenant: str) -> None:
    root = f"arn:aws:iam::{account.account}:root"
    for statement in _key_statements(account, tenant):
        if root not in _as_list(statement["Principal"].get("AWS")):
            continue
        actions = set(_as_list(statement["Action"]))
        assert not any("*" in action for action in actions)
        if actions & USE:
            assert statement["Condition"]["StringEquals"]["kms:ViaService"] == "fsx.us-east-1.amazonaws.com"
        else:
            assert "kms:PutKeyPolicy" in actions, "without it nobody could ever mend the key's policy"


@pytest.mark.parametrize(("tenant", "other"), [("acme", "globex"), ("globex", "acme")])
def test_no_policy_of_a_tenant_names_anything_of_another(account: Any, tenant: str, other: str) -> None:
    for kind in ("KMS::Key", "S3::BucketPolicy", "IAM::Role", "IAM::Policy", "IAM::ManagedPolicy", "EC2::VPCEndpoint"):
        for name, properties in account.resources(_stack(tenant), f"AWS::{kind}").items():
            assert other not in json.dumps(properties), f"{name} of {tenant}"


@pytest.mark.parametrize(
    ("role", "key", "action", "expected"),
    [
        ("Job", "Data", "kms:Decrypt", "Allow"),
        ("Job", "Data", "kms:GenerateDataKey", "ImplicitDeny"),
        ("Job", "Checkpoints", "kms:GenerateDataKey", "Allow"),
        ("Job", "Checkpoints", "kms:CreateGrant", "ImplicitDeny"),
        ("Job", "Logs", "kms:Decrypt", "ImplicitDeny"),
        ("Job", "Artifacts", "kms:Decrypt", "Allow"),
        ("Job", "Artifacts", "kms:GenerateDataKey", "ImplicitDeny"),
        ("Launcher", "Artifacts", "kms:GenerateDataKey", "Allow"),
        ("Auditor", "Artifacts", "kms:GenerateDataKey", "ImplicitDeny"),
        ("Launcher", "Data", "kms:GenerateDataKey", "Allow"),
        ("Launcher", "Checkpoints", "kms:Decrypt", "Allow"),
        ("Launcher", "Checkpoints", "kms:GenerateDataKey", "ImplicitDeny"),
        ("Auditor", "Checkpoints", "kms:Decrypt", "Allow"),
        ("Auditor", "Data", "kms:GenerateDataKey", "ImplicitDeny"),
    ],
)
def test_each_role_uses_each_key_as_far_as_it_needs(
    account: Any, decide: Callable[..., str], role: str, key: str, action: str, expected: str
) -> None:
    stack = _stack("acme")
    logical_id = account.only(stack, "AWS::KMS::Key", f"Keys{key}")
    policy = account.resources(stack, "AWS::KMS::Key")[logical_id]["KeyPolicy"]
    assert decide("acme", role, action, account.arn(stack, logical_id), resource_policy=policy) == expected


def test_a_job_role_grants_its_key_only_to_aws_services_for_volumes(account: Any, decide: Callable[..., str]) -> None:
    stack = _stack("acme")
    logical_id = account.only(stack, "AWS::KMS::Key", "KeysCheckpoints")
    arguments = ("acme", "Job", "kms:CreateGrant", account.arn(stack, logical_id))
    policy = account.resources(stack, "AWS::KMS::Key")[logical_id]["KeyPolicy"]
    service = {"kms:GrantIsForAWSResource": "true", "kms:ViaService": "sagemaker.us-east-1.amazonaws.com"}
    assert decide(*arguments, resource_policy=policy, keys=service) == "Allow"
    foreign = {**service, "kms:ViaService": "rds.us-east-1.amazonaws.com"}
    assert decide(*arguments, resource_policy=policy, keys=foreign) == "ImplicitDeny"


@pytest.mark.parametrize("role", ["Job", "Launcher", "Auditor"])
def test_another_tenants_key_stays_shut_even_to_a_role_that_was_given_kms_on_everything(
    account: Any, decide: Callable[..., str], role: str
) -> None:
    everything = {"Statement": [{"Effect": "Allow", "Action": ["kms:*", "s3:*"], "Resource": "*"}]}
    stack = _stack("acme")
    logical_id = account.only(stack, "AWS::KMS::Key", "KeysCheckpoints")
    policy = account.resources(stack, "AWS::KMS::Key")[logical_id]["KeyPolicy"]
    arguments = ("kms:Decrypt", account.arn(stack, logical_id))
    assert decide("globex", role, *arguments, resource_policy=policy, extra_policy=everything) == "ImplicitDeny"
    # The same grants and a key policy that names the role: the result flips, so the denial above is the key's doing.
    named = account.arn(_stack("globex"), account.only(_stack("globex"), "AWS::IAM::Role", f"Roles{role}"))
    opened = {
        "Statement": [
            *policy["Statement"],
            {"Effect": "Allow", "Principal": {"AWS": named}, "Action": "kms:Decrypt", "Resource": "*"},
        ]
    }
    assert decide("globex", role, *arguments, resource_policy=opened, extra_policy=everything) == "Allow"


@pytest.mark.parametrize("tenant", TENANTS)
def test_buckets_are_encrypted_with_bucket_keys_versioned_and_private(account: Any, tenant: str) -> None:
    buckets = account.resources(_stack(tenant), "AWS::S3::Bucket")
    kinds = ("Artifacts", "Checkpoints", "Data")
    assert len(buckets) == len(kinds)
    for name, bucket in buckets.items():
        (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
        (kind,) = (kind for kind in kinds if name.startswith(f"Buckets{kind}"))
        key = account.only(_stack(tenant), "AWS::KMS::Key", f"Keys{kind}")
        assert rule["BucketKeyEnabled"] is True
        assert rule["ServerSideEncryptionByDefault"]["KMSMasterKeyID"] == account.arn(_stack(tenant), key)
        assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
        assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}


def _put(account: Any, decide: Callable[..., str], headers: dict[str, str], secure: str = "true") -> str:
    stack = _stack("acme")
    bucket = account.only(stack, "AWS::S3::Bucket", "BucketsData")
    name = account.identifier(stack, bucket)
    (policy,) = [p for p in account.resources(stack, "AWS::S3::BucketPolicy").values() if p["Bucket"] == name]
    target = account.arn(stack, bucket) + "/jobs/acme-x/record.json"
    keys = {"aws:SecureTransport": secure, **headers}
    return decide("acme", "Launcher", "s3:PutObject", target, resource_policy=policy["PolicyDocument"], keys=keys)


def test_an_upload_needs_no_encryption_header_but_may_name_no_foreign_key(
    account: Any, decide: Callable[..., str]
) -> None:
    algorithm, key_id = "s3:x-amz-server-side-encryption", "s3:x-amz-server-side-encryption-aws-kms-key-id"
    own = account.arn(_stack("acme"), account.only(_stack("acme"), "AWS::KMS::Key", "KeysData"))
    assert _put(account, decide, {}) == "Allow"
    assert _put(account, decide, {algorithm: "aws:kms", key_id: own}) == "Allow"
    assert _put(account, decide, {algorithm: "aws:kms", key_id: own.replace("acme", "globex")}) == "Deny"
    assert _put(account, decide, {algorithm: "AES256"}) == "Deny"
    assert _put(account, decide, {}, secure="false") == "Deny"


def test_file_system_is_persistent_and_under_the_tenants_key(account: Any) -> None:
    stack = _stack("acme")
    (file_system,) = account.resources(stack, "AWS::FSx::FileSystem").values()
    assert file_system["LustreConfiguration"]["DeploymentType"] == "PERSISTENT_2"
    assert file_system["KmsKeyId"] == account.arn(stack, account.only(stack, "AWS::KMS::Key", "KeysData"))


def test_data_outlives_the_stack_where_the_environment_says_so(templates: dict[str, Any]) -> None:
    stateful = {"AWS::KMS::Key", "AWS::S3::Bucket", "AWS::FSx::FileSystem", "AWS::Logs::LogGroup"}
    for environment, expected in (("local", "Delete"), ("production", "RetainExceptOnCreate")):
        policies = {
            (item["Type"], item.get("DeletionPolicy"))
            for template in templates[environment].values()
            for name, item in template["Resources"].items()
            if item["Type"] in stateful and not name.startswith("Audit")  # what CloudTrail writes into at once
        }
        assert policies == {(kind, expected) for kind in stateful}
