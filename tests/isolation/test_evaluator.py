"""The decision, rule by rule of IAM's documented logic."""

from typing import Any

import pytest

from trainyard.isolation.conditions import Context
from trainyard.isolation.evaluator import Caller, Request, decide
from trainyard.isolation.policy import Policy, parse_statements

ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/team/Job"
ROOT = f"arn:aws:iam::{ACCOUNT}:root"
SESSION = f"arn:aws:sts::{ACCOUNT}:assumed-role/Job/session"
OBJECT = "arn:aws:s3:::bucket/key"
KEY = f"arn:aws:kms:us-east-1:{ACCOUNT}:key/k"
OTHER = f"arn:aws:iam::{ACCOUNT}:role/other"


def policy(*statements: dict[str, Any]) -> Policy:
    return Policy(parse_statements({"Statement": list(statements)}, "stack", "resource", "document"))


def allow(action: str, resource: str = "*", **more: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **more}


def deny(action: str, resource: str = "*", **more: Any) -> dict[str, Any]:
    return {**allow(action, resource, **more), "Effect": "Deny"}


def named(principal: Any, action: str = "*", **more: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": "*", "Principal": principal, **more}


def ask(
    action: str,
    resource: str,
    own: Policy | None = None,
    *,
    boundary: Policy | None = None,
    on_resource: Policy | None = None,
    endpoint: Policy | None = None,
    stated: dict[str, str] | None = None,
    owner: str = "",
) -> str:
    caller = Caller(ROLE, ACCOUNT, own or policy(), boundary)
    context = Context(stated or {})
    return decide(Request(caller, action, resource, context, on_resource, owner, endpoint)).outcome


def test_nothing_allows_nothing() -> None:
    assert ask("s3:GetObject", OBJECT) == "ImplicitDeny"


def test_own_policy_allows_what_it_covers() -> None:
    own = policy(allow("s3:Get*", "arn:aws:s3:::bucket/*"))
    assert ask("s3:GetObject", OBJECT, own) == "Allow"
    assert ask("S3:getobject", OBJECT, own) == "Allow"
    assert ask("s3:PutObject", OBJECT, own) == "ImplicitDeny"
    assert ask("s3:GetObject", "arn:aws:s3:::Bucket/key", own) == "ImplicitDeny"


def test_an_explicit_deny_wins_wherever_it_stands() -> None:
    everything, refusal = policy(allow("*")), deny("s3:GetObject")
    assert ask("s3:GetObject", OBJECT, policy(allow("*"), refusal)) == "Deny"
    assert ask("s3:GetObject", OBJECT, everything, boundary=policy(allow("*"), refusal)) == "Deny"
    assert ask("s3:GetObject", OBJECT, everything, on_resource=policy({**refusal, "Principal": "*"})) == "Deny"
    assert ask("s3:GetObject", OBJECT, everything, endpoint=policy(named("*"), {**refusal, "Principal": "*"})) == "Deny"


def test_the_complements() -> None:
    own = policy({"Effect": "Allow", "NotAction": "iam:*", "NotResource": "arn:aws:s3:::secret/*"})
    assert ask("s3:GetObject", OBJECT, own) == "Allow"
    assert ask("iam:GetRole", ROLE, own) == "ImplicitDeny"
    assert ask("s3:GetObject", "arn:aws:s3:::secret/x", own) == "ImplicitDeny"


def test_a_boundary_limits_and_gives_nothing() -> None:
    limit = policy(allow("s3:*"))
    assert ask("s3:GetObject", OBJECT, policy(allow("*")), boundary=limit) == "Allow"
    assert ask("ec2:RunInstances", "*", policy(allow("*")), boundary=limit) == "ImplicitDeny"
    assert ask("s3:GetObject", OBJECT, policy(), boundary=limit) == "ImplicitDeny"


@pytest.mark.parametrize(
    ("principal", "without_boundary", "boundary_says_no"),
    [
        ({"AWS": ROLE}, "Allow", "ImplicitDeny"),
        ({"AWS": SESSION}, "Allow", "Allow"),
        ("*", "Allow", "Allow"),
        ({"AWS": ROOT}, "ImplicitDeny", "ImplicitDeny"),
        ({"AWS": ACCOUNT}, "ImplicitDeny", "ImplicitDeny"),
        ({"AWS": OTHER}, "ImplicitDeny", "ImplicitDeny"),
        ({"Service": "sagemaker.amazonaws.com"}, "ImplicitDeny", "ImplicitDeny"),
    ],
)
def test_whom_a_resources_policy_names(principal: Any, without_boundary: str, boundary_says_no: str) -> None:
    on_resource = policy(named(principal))
    assert ask("s3:GetObject", OBJECT, on_resource=on_resource) == without_boundary
    assert ask("s3:GetObject", OBJECT, on_resource=on_resource, boundary=policy(allow("ec2:*"))) == boundary_says_no


def test_a_resources_deny_by_exception() -> None:
    everything = policy(allow("*"))
    spared = policy({"Effect": "Deny", "NotPrincipal": {"AWS": ROLE}, "Action": "*", "Resource": "*"})
    others = policy({"Effect": "Deny", "NotPrincipal": {"AWS": OTHER}, "Action": "*", "Resource": "*"})
    assert ask("s3:GetObject", OBJECT, everything, on_resource=spared) == "Allow"
    assert ask("s3:GetObject", OBJECT, everything, on_resource=others) == "Deny"


def test_a_key_is_used_only_where_its_own_policy_says_so() -> None:
    own = policy(allow("kms:*", KEY))
    assert ask("kms:Decrypt", KEY, own, on_resource=policy(named({"AWS": OTHER}))) == "ImplicitDeny"
    assert ask("kms:Decrypt", KEY, own, on_resource=policy(named({"AWS": ROOT}))) == "Allow"  # delegated
    assert ask("kms:Decrypt", KEY, on_resource=policy(named({"AWS": ROOT}))) == "ImplicitDeny"
    assert ask("kms:Decrypt", KEY, on_resource=policy(named({"AWS": ROLE}, "kms:Decrypt"))) == "Allow"
    assert ask("kms:Encrypt", KEY, own, on_resource=policy(named({"AWS": ROLE}, "kms:Decrypt"))) == "ImplicitDeny"


def test_a_role_is_assumed_only_by_whom_it_trusts() -> None:
    own = policy(allow("sts:AssumeRole", OTHER))
    assert ask("sts:AssumeRole", OTHER, own, on_resource=policy(named({"AWS": ROOT}, "sts:AssumeRole"))) == "Allow"
    assert ask("sts:AssumeRole", OTHER, on_resource=policy(named({"AWS": ROOT}, "sts:AssumeRole"))) == "ImplicitDeny"
    assert ask("sts:AssumeRole", OTHER, own, on_resource=policy(named({"Service": "x"}))) == "ImplicitDeny"


def test_a_service_needs_the_resources_policy_and_its_conditions() -> None:
    trust = policy(
        named(
            {"Service": "sagemaker.amazonaws.com"},
            "sts:AssumeRole",
            Condition={"StringEquals": {"aws:SourceAccount": ACCOUNT}},
        )
    )
    for name, account, expected in (
        ("sagemaker.amazonaws.com", ACCOUNT, "Allow"),
        ("sagemaker.amazonaws.com", "999999999999", "ImplicitDeny"),
        ("lambda.amazonaws.com", ACCOUNT, "ImplicitDeny"),
    ):
        request = Request(
            Caller(name, ACCOUNT, service=True), "sts:AssumeRole", ROLE, Context({"aws:sourceaccount": account}), trust
        )
        assert decide(request).outcome == expected


def test_from_another_account_both_sides_must_allow() -> None:
    own, door = policy(allow("s3:*")), policy(named({"AWS": ROLE}))
    assert ask("s3:GetObject", OBJECT, own, on_resource=door, owner="999999999999") == "Allow"
    assert ask("s3:GetObject", OBJECT, own, owner="999999999999") == "ImplicitDeny"
    assert ask("s3:GetObject", OBJECT, on_resource=door, owner="999999999999") == "ImplicitDeny"


def test_an_endpoints_policy_takes_away_and_gives_nothing() -> None:
    own = policy(allow("s3:*"))
    passage = policy(named("*", "s3:*", Condition={"StringEquals": {"aws:PrincipalAccount": ACCOUNT}}))
    here, there = {"aws:principalaccount": ACCOUNT}, {"aws:principalaccount": "999999999999"}
    assert ask("s3:GetObject", OBJECT, own, endpoint=passage, stated=here) == "Allow"
    assert ask("s3:GetObject", OBJECT, own, endpoint=passage, stated=there) == "ImplicitDeny"
    assert ask("s3:GetObject", OBJECT, endpoint=passage, stated=here) == "ImplicitDeny"


def test_a_caller_that_may_choose_chooses_to_its_own_good() -> None:
    """An Allow on a condition counts as met, a Deny on one as avoided."""
    tagged = {"StringEquals": {"aws:RequestTag/team": "acme"}}
    caller = Caller(ROLE, ACCOUNT, policy(allow("s3:*", Condition=tagged)))
    assert decide(Request(caller, "s3:GetObject", OBJECT, Context({}))).outcome == "ImplicitDeny"
    assert decide(Request(caller, "s3:GetObject", OBJECT, Context({}, free=True))).outcome == "Allow"
    caller = Caller(ROLE, ACCOUNT, policy(allow("s3:*"), deny("s3:*", Condition=tagged)))
    assert decide(Request(caller, "s3:GetObject", OBJECT, Context({}, free=True))).outcome == "Allow"
    stated = Context({"aws:requesttag/team": "acme"}, free=True)
    assert decide(Request(caller, "s3:GetObject", OBJECT, stated)).outcome == "Deny"


def test_an_open_variable_matches_an_allow_and_no_deny() -> None:
    home = "arn:aws:s3:::bucket/${aws:RequestTag/team}/*"
    caller = Caller(ROLE, ACCOUNT, policy(allow("s3:*", home)))
    assert decide(Request(caller, "s3:GetObject", OBJECT, Context({}, free=True))).allowed
    assert not decide(Request(caller, "s3:GetObject", OBJECT, Context({}))).allowed
    caller = Caller(ROLE, ACCOUNT, policy(allow("s3:*"), deny("s3:*", home)))
    assert decide(Request(caller, "s3:GetObject", OBJECT, Context({}, free=True))).allowed


def test_the_decision_names_the_statement() -> None:
    caller = Caller(ROLE, ACCOUNT, policy(allow("s3:*", Sid="Wide")))
    decision = decide(Request(caller, "s3:GetObject", OBJECT, Context({})))
    assert [str(origin) for origin in decision.origins] == ["stack/resource document statement Wide"]
