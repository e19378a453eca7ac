"""The same requests through a second, independent evaluator (ministack's): both must give the same answer."""

import random
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from ministack.core import iam_evaluator as other

from trainyard.isolation import Site
from trainyard.isolation.conditions import Context
from trainyard.isolation.crossings import Crossings
from trainyard.isolation.evaluator import Caller, Request, decide, needs_resource_policy
from trainyard.isolation.needs import Needs
from trainyard.isolation.policy import Policy, Statement, parse_statements

ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/team/Job"


def document(policy: Policy | None) -> dict[str, Any]:
    """The policy written as a document again, for the other evaluator."""
    return {"Statement": [_written(statement) for statement in policy.statements] if policy else []}


def _written(statement: Statement) -> dict[str, Any]:
    conditions: dict[str, dict[str, list[str]]] = {}
    for item in statement.conditions:
        conditions.setdefault(item.operator, {})[item.key] = list(item.values)
    parts: dict[str, Any] = {"Action": statement.actions, "NotAction": statement.not_actions}
    parts |= {"Resource": statement.resources, "NotResource": statement.not_resources}
    written = {name: list(value) for name, value in parts.items() if value}
    if statement.principals:
        written["Principal"] = {"AWS": list(statement.principals.aws), "Service": list(statement.principals.services)}
    return {"Effect": "Allow" if statement.allows else "Deny", "Condition": conditions, **written}


@lru_cache(maxsize=10_000)
def read(policy: Policy) -> tuple[dict[str, Any], Any]:
    """The document, and as the other evaluator reads it; None instead where that depends on the request."""
    content = document(policy)
    return content, None if "${" in str(content) else other.parse_policy_document(content)


def _without_variables(content: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """Policy variables in resources (`${aws:userid}`) written out, as this evaluator knows none; one that has no value
    stays, and matches nothing."""
    # A copy of what changes: the content is kept for the next request.
    content = {**content, "Statement": [dict(statement) for statement in content["Statement"]]}
    for statement in content["Statement"]:
        for part in {"Resource", "NotResource"} & statement.keys():
            for key, value in stated.items():
                variable = f"${{{key}}}"
                statement[part] = [item.replace(variable, str(value)) for item in statement[part]]
    return content


def second_opinion(request: Request) -> str:
    """ministack's answer."""
    caller = request.caller
    stated = {key: list(value) if isinstance(value, tuple) else value for key, value in request.context.stated.items()}
    context = other.EvalContext(
        principal_arn=caller.arn,
        principal_type="AssumedRole",
        principal_account=caller.account,
        action=request.action,
        resource_arn=request.resource,
        region="us-east-1",
        source_ip="127.0.0.1",
        secure_transport=stated.get("aws:securetransport", "true") == "true",
        service_context=stated,
    )

    def parsed(policy: Policy) -> Any:
        content, whole = read(policy)
        return whole or other.parse_policy_document(_without_variables(content, stated))

    limits = [[parsed(caller.boundary)]] if caller.boundary else []
    own = other.evaluate(context, [parsed(caller.policy)], *limits)
    required = needs_resource_policy(request.action, request.resource)
    if request.resource_policy is None and not required:
        return str(own.decision)
    resource_policy = read(request.resource_policy)[0] if request.resource_policy else document(None)
    decision = other.combine_resource_policy(
        own, context, resource_policy, ACCOUNT, required=required, limits=tuple(limits)
    )
    return str(decision.decision)


def test_every_crossing_and_every_need_of_the_site(site: Site) -> None:
    """Exactly as stated, without the caller's choice: the other evaluator knows only absent keys."""
    compared, differences = Counter[str](), []
    questions = [item.request for item in Crossings(site.account).all() if item.tenant == "acme"]
    needs = [item.request for tenant in ("acme", "globex") for item in Needs(site.account, tenant).all()]
    for request in [*questions, *needs]:
        if request.caller.service or request.owner:
            continue  # the other evaluator knows only the account's own roles
        stated = {"aws:securetransport": "true", "aws:resourceaccount": ACCOUNT, **request.context.stated}
        exact = replace(request, context=Context(stated), endpoint_policy=None)
        ours, theirs = decide(exact).outcome, second_opinion(exact)
        compared[ours] += 1
        if ours != theirs:
            differences.append((exact.caller.arn, exact.action, exact.resource, ours, theirs))
    assert differences == []
    assert compared["Allow"] > 100
    assert compared["Deny"] > 100
    assert compared["ImplicitDeny"] > 5000


ACTIONS = [
    "s3:GetObject",
    "s3:PutObject",
    "kms:Decrypt",
    "kms:CreateGrant",
    "sagemaker:CreateTrainingJob",
    "iam:PassRole",
]
PATTERNS = [*ACTIONS, "s3:*", "s3:Get*", "kms:*", "*", "sagemaker:Create*"]
RESOURCES = [
    "arn:aws:s3:::acme/a",
    "arn:aws:s3:::globex/a/b",
    f"arn:aws:kms:us-east-1:{ACCOUNT}:key/acme",
    f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/acme-1",
]
RESOURCE_PATTERNS = [*RESOURCES, "*", "arn:aws:s3:::acme/*", "arn:aws:s3:::*", f"arn:aws:kms:*:{ACCOUNT}:key/*"]
VALUES: dict[str, list[Any]] = {
    "aws:RequestTag/team": ["acme", "globex", "acme-labs"],
    "sagemaker:VpcSubnets": [["s-1"], ["s-1", "s-2"], ["s-3"]],
    "sagemaker:MaxRuntimeInSeconds": ["60", "3600", "7200"],
    "sagemaker:EnableRemoteDebug": ["true", "false"],
    "kms:ViaService": ["s3.us-east-1.amazonaws.com", "ec2.us-east-1.amazonaws.com"],
    "sagemaker:OutputKmsKeyArn": [f"arn:aws:kms:us-east-1:{ACCOUNT}:key/{name}" for name in ("a", "b")],
}
OPERATORS = {
    "aws:RequestTag/team": ["StringEquals", "StringNotEquals", "StringLike", "StringNotLike", "StringEqualsIfExists"],
    "sagemaker:VpcSubnets": [
        "ForAllValues:StringEquals",
        "ForAnyValue:StringEquals",
        "ForAnyValue:StringNotEquals",
        "ForAllValues:StringNotEquals",
    ],
    "sagemaker:MaxRuntimeInSeconds": ["NumericGreaterThan", "NumericLessThanEquals", "NumericNotEquals"],
    "sagemaker:EnableRemoteDebug": ["Bool", "BoolIfExists"],
    "kms:ViaService": ["StringEquals", "StringNotEqualsIfExists", "StringEqualsIgnoreCase"],
    "sagemaker:OutputKmsKeyArn": ["ArnEquals", "ArnNotEquals", "ArnLike", "ArnNotEqualsIfExists"],
}


class Maker:
    """Random policies and requests over a small world, so that statements meet."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, items: list[Any], most: int = 2) -> list[Any]:
        return self.random.sample(items, self.random.randint(1, most))

    def condition(self) -> dict[str, Any]:
        key = self.random.choice(list(VALUES))
        if self.random.random() < 0.2:
            return {"Null": {key: self.random.choice(["true", "false"])}}
        values = self.random.choice(VALUES[key])
        given = values if isinstance(values, list) else self.some(VALUES[key])
        return {self.random.choice(OPERATORS[key]): {key: given}}

    def statement(self, *, principal: bool) -> dict[str, Any]:
        effect = "Allow" if self.random.random() < 0.7 else "Deny"
        made: dict[str, Any] = {"Effect": effect}
        made["NotAction" if self.random.random() < 0.1 else "Action"] = self.some(PATTERNS)
        made["NotResource" if self.random.random() < 0.1 else "Resource"] = self.some(RESOURCE_PATTERNS)
        if self.random.random() < 0.5:
            made["Condition"] = self.condition()
        if principal:
            root, stranger = f"arn:aws:iam::{ACCOUNT}:root", f"arn:aws:iam::{ACCOUNT}:role/other"
            made["Principal"] = {"AWS": self.some([ROLE, root, stranger, ACCOUNT])}
            if effect == "Deny" and self.random.random() < 0.3:
                made["Principal"] = "*"
        return made

    def policy(self, *, principal: bool = False) -> Policy:
        statements = [self.statement(principal=principal) for _ in range(self.random.randint(1, 4))]
        return Policy(parse_statements({"Statement": statements}, "s", "r", "d"))

    def request(self) -> Request:
        stated = {
            key.lower(): tuple(value) if isinstance(value, list) else value
            for key, values in VALUES.items()
            if self.random.random() < 0.7
            for value in [self.random.choice(values)]
        }
        boundary = self.policy() if self.random.random() < 0.5 else None
        on_resource = self.policy(principal=True) if self.random.random() < 0.6 else None
        caller = Caller(ROLE, ACCOUNT, self.policy(), boundary)
        resource = self.random.choice(RESOURCES)
        return Request(caller, self.random.choice(ACTIONS), resource, Context(stated), on_resource)


@pytest.mark.slow
def test_random_policies() -> None:
    answers = Counter[str]()
    for seed in range(6000):
        request = Maker(seed).request()
        ours, theirs = decide(request).outcome, second_opinion(request)
        assert ours == theirs, f"seed {seed}: {request.action} on {request.resource}: ours {ours}, theirs {theirs}"
        answers[ours] += 1
    assert min(answers[name] for name in ("Allow", "Deny", "ImplicitDeny")) > 500, answers


def test_the_one_known_difference() -> None:
    """IAM user guide, "AWS JSON policy elements: Principal": a boundary's implicit deny doesn't limit what a resource
    gives to everybody (`*`); the other evaluator lets it. Ours is the answer that finds more."""
    door = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": "*"}
    limit = {"Effect": "Allow", "Action": "ec2:*", "Resource": "*"}
    boundary, on_resource = (Policy(parse_statements({"Statement": [item]}, "s", "r", "d")) for item in (limit, door))
    caller = Caller(ROLE, ACCOUNT, Policy(()), boundary)
    request = Request(caller, "s3:GetObject", RESOURCES[0], Context({}), on_resource)
    assert (decide(request).outcome, second_opinion(request)) == ("Allow", "ImplicitDeny")
