"""Policies that AWS refuses as they are put: they name nobody, another's resource, or lock the account out."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from emulator_testing import ACCOUNT, Site, allow, policy, refusal
from emulator_testing.templates import document, resource

NOBODY = f"arn:aws:iam::{ACCOUNT}:role/nobody"
ROOT = f"arn:aws:iam::{ACCOUNT}:root"
ADMINISTRATION = allow("kms:*", Principal={"AWS": ROOT})


def put_trust(site: Site, name: str, principal: Any) -> None:
    """A role's trust."""
    statement = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"}
    site("iam").update_assume_role_policy(RoleName=name, PolicyDocument=policy(statement))


def make_role(site: Site, name: str, principal: Any) -> None:
    """A role with that trust."""
    statement = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"}
    site("iam").create_role(RoleName=f"{name}-new", AssumeRolePolicyDocument=policy(statement))


def make_key(site: Site, name: str, principal: Any) -> None:
    """A key with a statement for the principal beside the account's."""
    site("kms").create_key(Policy=policy(ADMINISTRATION, allow("kms:Decrypt", Principal=principal)))


def put_key(site: Site, name: str, principal: Any) -> None:
    """A key's policy."""
    key = site("kms").create_key()["KeyMetadata"]["KeyId"]
    document = policy(ADMINISTRATION, allow("kms:Decrypt", Principal=principal))
    site("kms").put_key_policy(KeyId=key, PolicyName="default", Policy=document)


def put_bucket(site: Site, name: str, principal: Any) -> None:
    """A bucket's policy."""
    statement = allow("s3:GetObject", f"arn:aws:s3:::{name}/*", Principal=principal)
    site("s3").put_bucket_policy(Bucket=name, Policy=policy(statement))


def put_topic(site: Site, name: str, principal: Any) -> None:
    """A topic's policy."""
    arn = site("sns").create_topic(Name=name)["TopicArn"]
    text = policy(allow("sns:Publish", arn, Principal=principal))
    site("sns").set_topic_attributes(TopicArn=arn, AttributeName="Policy", AttributeValue=text)


def put_repository(site: Site, name: str, principal: Any) -> None:
    """A repository's policy."""
    statement = {"Effect": "Allow", "Action": "ecr:BatchGetImage", "Principal": principal}
    site("ecr").set_repository_policy(repositoryName=name, policyText=policy(statement))


@pytest.mark.parametrize(
    ("put", "told"),
    [
        (make_role, f'MalformedPolicyDocument: Invalid principal in policy: "AWS":"{NOBODY}"'),
        (put_trust, f'MalformedPolicyDocument: Invalid principal in policy: "AWS":"{NOBODY}"'),
        (make_key, "MalformedPolicyDocumentException: Policy contains a statement with one or more invalid principals"),
        (put_key, "MalformedPolicyDocumentException: Policy contains a statement with one or more invalid principals"),
        (put_bucket, "MalformedPolicy: Invalid principal in policy"),
        (put_topic, "InvalidParameter: Invalid parameter: Policy Error: PrincipalNotFound"),
        (put_repository, "InvalidParameterException: Invalid parameter at 'PolicyText'"),
    ],
)
def test_a_principal_that_is_nobody_is_refused(
    site: Site, name: str, put: Callable[[Site, str, Any], None], told: str
) -> None:
    arn = site.role(name, Path="/tests/")
    site("s3").create_bucket(Bucket=name)
    site("ecr").create_repository(repositoryName=name)
    assert refusal(lambda: put(site, name, {"AWS": [arn, NOBODY]})).startswith(told)
    assert refusal(lambda: put(site, name, {"AWS": arn.replace("/tests/", "/")})), "another path is another role"
    assert refusal(lambda: put(site, name, {"Service": "lambda"})), "no service's name"
    session = f"arn:aws:sts::{ACCOUNT}:assumed-role/{name}/somebody"
    there = [arn, ROOT, ACCOUNT, session, "arn:aws:iam::999999999999:role/whoever"]
    assert refusal(lambda: put(site, name, {"AWS": there, "Service": "lambda.amazonaws.com"})) == ""


def test_a_bucket_policy_is_its_own_buckets(site: Site, name: str) -> None:
    site("s3").create_bucket(Bucket=name)
    for named in (f"arn:aws:s3:::{name}-2/*", "*", f"arn:aws:s3:::{name}*"):
        text = policy(allow("s3:GetObject", [f"arn:aws:s3:::{name}/*", named], Principal="*"))
        told = refusal(lambda text=text: site("s3").put_bucket_policy(Bucket=name, Policy=text))  # type: ignore[misc]
        assert told == "MalformedPolicy: Policy has invalid resource"
    own = policy(allow("s3:*", [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/a/*"], Principal="*"))
    site("s3").put_bucket_policy(Bucket=name, Policy=own)


def test_a_key_stays_its_accounts(site: Site, name: str) -> None:
    role = site.role(name)
    for statements in (
        [allow("kms:Decrypt", Principal={"AWS": ROOT})],
        [allow("kms:*", Principal={"AWS": "arn:aws:iam::999999999999:root"})],
    ):
        told = refusal(lambda statements=statements: site("kms").create_key(Policy=policy(*statements)))  # type: ignore[misc]
        assert told.endswith("will not allow you to update the key policy in the future.")
    site("kms").create_key(Policy=policy(allow("kms:Put*", Principal={"AWS": role})))


def test_a_template_that_names_nobody_fails(site: Site, name: str) -> None:
    key = resource(
        "KMS::Key", {"KeyPolicy": json.loads(policy(ADMINISTRATION, allow("kms:*", Principal={"AWS": NOBODY})))}
    )
    trusting = {"AssumeRolePolicyDocument": document("sts:AssumeRole", principal={"AWS": NOBODY})}
    del trusting["AssumeRolePolicyDocument"]["Statement"][0]["Resource"]
    for index, item in enumerate((key, resource("IAM::Role", trusting))):
        assert site.deploy(f"{name}-{index}", {"Resources": {"Odd": item}}) == "ROLLBACK_COMPLETE"
        assert "nvalid principal" in site.failures(f"{name}-{index}")
