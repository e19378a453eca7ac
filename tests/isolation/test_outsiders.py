"""What one wrong statement opens to others than the tenants' roles, or to these by another way than their own policies:
each is found, and named."""

from collections.abc import Callable
from typing import Any

import pytest
from isolation_testing import FOUNDATION, PLATFORM, TRAINING, Templates, logical_id, resource

from trainyard.isolation import Site, prove
from trainyard.isolation.crossings import Crossings
from trainyard.isolation.questions import GUARD_RAIL, examples

Alter = Callable[[Callable[[Any], None]], Site]
Edit = Callable[[Templates], None]
OWN, STRANGE, CLOUDTRAIL = "123456789012", "888888888888", "cloudtrail.amazonaws.com"
ADMIN = f"arn:aws:iam::{OWN}:role/Admin"
ROOT, OUTSIDER = f"arn:aws:iam::{STRANGE}:root", "arn:aws:iam::999999999999:root"
READ_JOBS = {"Action": "sagemaker:DescribeTrainingJob", "Resource": "*"}


def allow(action: str | list[str], principal: Any = None, resource: Any = None, **conditions: Any) -> dict[str, Any]:
    said = {"Principal": principal, "Resource": resource, "Condition": conditions}
    return {"Sid": "Mistake", "Effect": "Allow", "Action": action} | {name: item for name, item in said.items() if item}


def objects(templates: Templates, bucket: str, folder: str, stack: str = FOUNDATION) -> dict[str, Any]:
    """The objects below a folder of a bucket whose logical id begins so."""
    arn = {"Fn::GetAtt": [logical_id(templates, stack, "S3::Bucket", bucket), "Arn"]}
    return {"Fn::Join": ["", [arn, f"/{folder}*"]]}


def bucket(name: str, folder: str, action: str, principal: Any, **conditions: Any) -> Edit:
    def edit(templates: Templates) -> None:
        policy = resource(templates, FOUNDATION, "S3::BucketPolicy", name)["PolicyDocument"]
        policy["Statement"].append(allow(action, principal, objects(templates, name, folder), **conditions))

    return edit


def key(name: str, *statements: dict[str, Any]) -> Edit:
    def edit(templates: Templates) -> None:
        resource(templates, FOUNDATION, "KMS::Key", name)["KeyPolicy"]["Statement"].extend(statements)

    return edit


def trust(principal: Any, action: str = "sts:AssumeRole", stack: str = FOUNDATION, role: str = "RolesLauncher") -> Edit:
    def edit(templates: Templates) -> None:
        found = resource(templates, stack, "IAM::Role", role)["AssumeRolePolicyDocument"]
        found["Statement"].append(allow(action, principal))

    return edit


def rights(role: str, *statements: dict[str, Any]) -> Edit:
    def edit(templates: Templates) -> None:
        found = resource(templates, FOUNDATION, "IAM::Policy", role)["PolicyDocument"]
        found["Statement"].extend({"Sid": "Mistake", "Effect": "Allow", **item} for item in statements)

    return edit


def passage(resources: str, **conditions: Any) -> Edit:
    """One statement more of the S3 endpoint's policy, for the tenant's own roles."""
    own = {"aws:PrincipalArn": f"arn:aws:iam::{OWN}:role/trainyard/local/acme/*"}

    def edit(templates: Templates) -> None:
        policy = resource(templates, FOUNDATION, "EC2::VPCEndpoint", "NetworkVpcS3")["PolicyDocument"]
        policy["Statement"].append(allow("s3:*", {"AWS": "*"}, resources, ArnLike=own, **conditions))

    return edit


def passage_for(arn: str) -> Edit:
    def edit(templates: Templates) -> None:
        policy = resource(templates, FOUNDATION, "EC2::VPCEndpoint", "NetworkKms")["PolicyDocument"]
        policy["Statement"].append(allow("kms:*", {"AWS": "*"}, "*", ArnLike={"aws:PrincipalArn": arn}))

    return edit


def ecr(templates: Templates) -> None:
    document = {"Version": "2012-10-17", "Statement": [allow("ecr:*", {"AWS": OUTSIDER})]}
    resource(templates, PLATFORM, "ECR::Repository")["RepositoryPolicyText"] = document


def audit(principal: Any) -> Edit:
    def edit(templates: Templates) -> None:
        policy = resource(templates, PLATFORM, "S3::BucketPolicy")["PolicyDocument"]
        policy["Statement"].append(allow("s3:*", principal, objects(templates, "Audit", "", PLATFORM)))

    return edit


def actor(statement: dict[str, Any]) -> Edit:
    """What AWS Budgets acts as."""

    def edit(templates: Templates) -> None:
        found = resource(templates, PLATFORM, "IAM::Role", "BudgetActor")
        found["Policies"][0]["PolicyDocument"]["Statement"].append({"Sid": "Mistake", **statement})

    return edit


def actor_of_any_policy(templates: Templates) -> None:
    (statement,) = resource(templates, PLATFORM, "IAM::Role", "BudgetActor")["Policies"][0]["PolicyDocument"][
        "Statement"
    ]
    del statement["Condition"]


def actor_of_policies(pattern: str) -> Edit:
    def edit(templates: Templates) -> None:
        document = resource(templates, PLATFORM, "IAM::Role", "BudgetActor")["Policies"][0]["PolicyDocument"]
        document["Statement"][0]["Condition"] = {"ArnLike": {"iam:PolicyARN": f"arn:aws:iam::{OWN}:policy/{pattern}"}}

    return edit


def ledger(role: str) -> Edit:
    def edit(templates: Templates) -> None:
        found = resource(templates, FOUNDATION, "IAM::Policy", role)["PolicyDocument"]
        found["Statement"].append(allow("s3:PutObject", resource=objects(templates, "BucketsCheckpoints", "")))

    return edit


def topic_of_any_alarm(templates: Templates) -> None:
    statements = resource(templates, TRAINING, "SNS::TopicPolicy")["PolicyDocument"]["Statement"]
    del next(item for item in statements if item["Sid"] == "Alarms")["Condition"]["ArnLike"]


def topic_of_any_rule(templates: Templates) -> None:
    statements = resource(templates, TRAINING, "SNS::TopicPolicy")["PolicyDocument"]["Statement"]
    found = next(item for item in statements if item["Sid"] == "BrokenGlass")
    found["Condition"] = {"StringEquals": {"aws:SourceAccount": OWN}}


USE = ["kms:Decrypt", "kms:CreateGrant"]
GROUPS = {"kms:EncryptionContext:aws:logs:arn": f"arn:aws:logs:us-east-1:{OWN}:log-group:*"}
ARTIFACTS, CHECKPOINTS = "BucketsArtifacts", "BucketsCheckpoints"
TAG = "aws:ResourceTag/trainyard:"

OPENINGS: dict[str, tuple[Edit, str, str, str]] = {
    "a bucket for an account": (
        bucket(CHECKPOINTS, "", "s3:GetObject", {"AWS": ROOT}),
        *(ROOT, "s3:GetObject", "acme"),
    ),
    "a bucket for an account by its number": (
        bucket(CHECKPOINTS, "", "s3:GetObject", {"AWS": STRANGE}),
        *(STRANGE, "s3:GetObject", "acme"),
    ),
    "a bucket for an account, by a condition": (
        bucket(CHECKPOINTS, "", "s3:GetObject", "*", StringEquals={"aws:PrincipalAccount": STRANGE}),
        *(STRANGE, "s3:GetObject", "acme"),
    ),
    "a bucket for a role of the account, by a condition": (
        bucket(CHECKPOINTS, "", "s3:GetObject", "*", ArnLike={"aws:PrincipalArn": f"{ADMIN}*"}),
        *(f"{ADMIN}x", "s3:GetObject", "acme"),
    ),
    "a bucket for all of the account": (
        bucket(CHECKPOINTS, "", "s3:GetObject", "*", StringEquals={"aws:PrincipalAccount": OWN}),
        *("anybody of the account", "s3:GetObject", "acme"),
    ),
    "a bucket for a tag of the caller's": (
        bucket(CHECKPOINTS, "", "s3:GetObject", "*", StringEquals={"aws:PrincipalTag/team": "any"}),
        *("another account", "s3:GetObject", "acme"),
    ),
    "a bucket for a canonical user": (
        bucket(CHECKPOINTS, "", "s3:GetObject", {"CanonicalUser": "79a59df900b949e5"}),
        *("79a59df900b949e5", "s3:GetObject", "acme"),
    ),
    "a key for an account": (
        key("KeysCheckpoints", allow(USE, {"AWS": ROOT}, "*")),
        *(ROOT, "kms:CreateGrant", "acme"),
    ),
    "a key for a role of the account": (
        key("KeysCheckpoints", allow(USE, {"AWS": ADMIN}, "*")),
        *(ADMIN, "kms:Decrypt", "acme"),
    ),
    "a key for a role of the account, by a condition": (
        key(
            "KeysCheckpoints",
            allow(USE, {"AWS": f"arn:aws:iam::{OWN}:root"}, "*", ArnLike={"aws:PrincipalArn": ADMIN}),
        ),
        *("an administrator", "kms:Decrypt", GUARD_RAIL),
    ),
    "a role for an account": (trust({"AWS": ROOT}), ROOT, "sts:AssumeRole", "acme"),
    "a role for an identity provider": (
        trust({"Federated": "accounts.google.com"}, "sts:AssumeRoleWithWebIdentity"),
        *("accounts.google.com", "sts:AssumeRoleWithWebIdentity", "acme"),
    ),
    "models for an account": (
        bucket(ARTIFACTS, "models/", "s3:GetObject", {"AWS": OUTSIDER}),
        *("another account", "s3:GetObject", "acme"),
    ),
    "the registry for everybody": (
        bucket(ARTIFACTS, "registry/", "s3:GetObject", "*"),
        *("another account", "s3:GetObject", "acme"),
    ),
    "the ledger for everybody": (
        bucket(CHECKPOINTS, "broker/", "s3:PutObject", "*"),
        *("another account", "s3:PutObject", "acme"),
    ),
    "a registry for another tenant's role": (
        bucket(ARTIFACTS, "registry/2026-??/", "s3:GetObject", "*", StringEquals={"aws:PrincipalAccount": OWN}),
        *("launcher", "s3:GetObject", "acme"),
    ),
    "the endpoint for others' models": (
        passage("arn:aws:s3:::trainyard-*/models/*", StringEquals={"aws:ResourceAccount": OWN}),
        *("acme's job with every right", "s3:GetObject", "globex"),
    ),
    "the endpoint for a bucket of nobody's": (
        passage("arn:aws:s3:::exfil-bucket/*"),
        *("in the network", "s3:Anything", GUARD_RAIL),
    ),
    "an endpoint for a role elsewhere": (
        passage_for(f"arn:aws:iam::{STRANGE}:role/Theirs"),
        *(f"arn:aws:iam::{STRANGE}:role/Theirs", "kms:Anything", GUARD_RAIL),
    ),
    "jobs by the environment's tag": (
        rights("PermissionsLauncher", READ_JOBS | {"Condition": {"StringEquals": {f"{TAG}environment": "local"}}}),
        *("launcher", "sagemaker:DescribeTrainingJob", "globex"),
    ),
    "jobs by another tenant's tag": (
        rights("PermissionsLauncher", READ_JOBS | {"Condition": {"StringEquals": {f"{TAG}tenant": "globex"}}}),
        *("launcher", "sagemaker:DescribeTrainingJob", "globex"),
    ),
    "jobs by a tag that anybody may have": (
        rights("PermissionsLauncher", READ_JOBS | {"Condition": {"StringEquals": {f"{TAG}job": "llama"}}}),
        *("launcher", "sagemaker:DescribeTrainingJob", "globex"),
    ),
    "images for an account": (ecr, "another account", "ecr:PutImage", "the platform"),
    "the trail for an account": (audit({"AWS": OUTSIDER}), "another account", "s3:GetObject", "the platform"),
    "the budget's role for an account": (
        trust({"AWS": OUTSIDER}, stack=PLATFORM, role="BudgetActor"),
        *("another account", "sts:AssumeRole", "the platform"),
    ),
    "a budget's role that may all": (
        actor({"Effect": "Allow", "Action": "*", "Resource": "*"}),
        *("the platform's BudgetActor", "s3:GetObject", "acme"),
    ),
    "a budget's role that starts machines": (
        actor({"Effect": "Allow", "Action": "ec2:RunInstances", "Resource": "*"}),
        *("the platform's BudgetActor", "ec2:RunInstances", GUARD_RAIL),
    ),
    "a budget's role that gives any right": (
        actor_of_any_policy,
        *("the platform's BudgetActor", "iam:AttachRolePolicy", "acme"),
    ),
    "a budget's role that gives any policy of the account": (
        actor_of_policies("*"),
        *("the platform's BudgetActor", "iam:AttachRolePolicy", "acme"),
    ),
    "a budget's role that gives any policy of a tenant": (
        actor_of_policies("trainyard/local/acme/*"),
        *("the platform's BudgetActor", "iam:AttachRolePolicy", "acme"),
    ),
    "the ledger for jobs": (ledger("PermissionsJob"), "job", "s3:PutObject", GUARD_RAIL),
    "the ledger for the launcher": (ledger("PermissionsLauncher"), "launcher", "s3:PutObject", GUARD_RAIL),
    "the ledger for jobs, by its own policy": (
        bucket(
            CHECKPOINTS, "broker/", "s3:DeleteObject", "*", ArnLike={"aws:PrincipalArn": f"arn:aws:iam::{OWN}:role/*"}
        ),
        *("job", "s3:DeleteObject", GUARD_RAIL),
    ),
    "a job's files for the next job, by the bucket's policy": (
        bucket(
            CHECKPOINTS,
            "jobs/",
            "s3:GetObject",
            "*",
            ArnLike={"aws:PrincipalArn": f"arn:aws:iam::{OWN}:role/*/acme/jobs/each/*"},
        ),
        *("each job", "s3:GetObject", GUARD_RAIL),
    ),
    "the logs' key for every group": (
        key("KeysLogs", allow("kms:GenerateDataKey", {"Service": "logs.us-east-1.amazonaws.com"}, "*", ArnLike=GROUPS)),
        *("logs.us-east-1.amazonaws.com", "kms:GenerateDataKey", "acme"),
    ),
    "the topic for every alarm": (topic_of_any_alarm, "cloudwatch.amazonaws.com", "sns:Publish", "acme"),
    "the topic for every rule": (topic_of_any_rule, "events.amazonaws.com", "sns:Publish", "acme"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPENINGS)
def test_what_a_statement_opens_is_found_and_named(altered: Alter, name: str) -> None:
    mistake, who, action, target = OPENINGS[name]
    proof = prove(altered(mistake))
    assert not proof.holds
    found = [*proof.allowed_cross_tenant, *proof.open_guard_rails]
    assert any(item.principal.startswith(who) and (item.action, item.target) == (action, target) for item in found), (
        sorted({(item.principal, item.action, item.target) for item in found})
    )
    assert not (proof.denied_own or proof.foreign_wires)


def test_services_that_work_for_others_are_found_in_each_statement(altered: Alter) -> None:
    """A service that two statements name is asked about both."""

    def edit(templates: Templates) -> None:
        policy = resource(templates, PLATFORM, "S3::BucketPolicy")["PolicyDocument"]
        anybodys = allow("s3:PutObject", {"Service": CLOUDTRAIL}, objects(templates, "Audit", "", PLATFORM))
        policy["Statement"].insert(0, anybodys)

    found = prove(altered(edit)).allowed_cross_tenant
    assert {(item.principal, item.action, item.target) for item in found} == {
        (CLOUDTRAIL, "s3:PutObject", "the platform")
    }


def test_stop_policies_may_be_put_on_roles_and_no_others(site: Site) -> None:
    """What AWS Budgets is there for is no finding; with which policies it was asked, the questions say."""
    asked = [
        question.request.context.stated["iam:policyarn"]
        for question in Crossings(site.account).all()
        if question.principal.startswith("the platform's BudgetActor")
        and question.request.action in ("iam:AttachRolePolicy", "iam:DetachRolePolicy")
    ]
    own = f"arn:aws:iam::{OWN}:policy"
    assert set(asked) == {
        "arn:aws:iam::aws:policy/AdministratorAccess",
        f"{own}/Administrators",
        *(f"{own}/trainyard/local/{folder}Boundary" for folder in ("", "acme/", "globex/")),
    }


def test_each_pattern_makes_an_example_and_what_it_leaves_out_too(site: Site) -> None:
    (thing,) = [item for item in site.account.things_of("acme", "object") if "BucketsData" in item.name]
    assert examples(thing) == list(thing.examples)
    policy = site.account.policy_of(thing)
    assert policy is not None
    role = site.account.role("acme", "job")
    made = examples(thing, policy, site.account.caller(role).policy)
    assert set(thing.examples) < set(made)
