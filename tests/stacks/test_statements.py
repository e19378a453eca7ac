"""Policies told to the CDK as JSON: the same policies, in fewer messages to its Node process."""

from typing import Any

import pytest

MAX_MESSAGES = 700
"""Of a tenant as the local example has it; each is a round trip between two processes, and a hundred tenants make that
many each."""


def test_json_is_what_the_cdks_own_class_would_have_made() -> None:
    from aws_cdk import App, Stack
    from aws_cdk import aws_iam as iam

    from stacks.constructs.statements import allow, deny, deny_outside, policy_document

    stack = Stack(App(), "Statements")
    role = iam.Role(stack, "Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
    own = {"StringEquals": {"aws:PrincipalTag/team": ["a", "b"]}, "Null": {"aws:PrincipalArn": "false"}}
    told = policy_document(
        [
            allow("One", ["s3:GetObject"], ["arn:aws:s3:::x/*"]),
            allow("Many", ["s3:PutObject", "s3:GetObject"], ["*", role.role_arn], own),
            deny("Never", ["iam:PassRole"], {}),
            deny("Sometimes", ["iam:PassRole"], own),
            deny_outside("Elsewhere", ["iam:*"], [role.role_arn], own),
        ]
    )
    refused = iam.Effect.DENY
    classes = [
        iam.PolicyStatement(sid="One", actions=["s3:GetObject"], resources=["arn:aws:s3:::x/*"]),
        iam.PolicyStatement(
            sid="Many", actions=["s3:PutObject", "s3:GetObject"], resources=["*", role.role_arn], conditions=own
        ),
        iam.PolicyStatement(sid="Never", effect=refused, actions=["iam:PassRole"], resources=["*"]),
        iam.PolicyStatement(sid="Sometimes", effect=refused, actions=["iam:PassRole"], resources=["*"], conditions=own),
        iam.PolicyStatement(
            sid="Elsewhere", effect=refused, actions=["iam:*"], not_resources=[role.role_arn], conditions=own
        ),
    ]
    resolved = stack.resolve(told)
    assert resolved == stack.resolve(iam.PolicyDocument(statements=classes))
    assert [item["Sid"] for item in resolved["Statement"]] == ["One", "Many", "Never", "Sometimes", "Elsewhere"]


def test_a_tenant_takes_few_messages(environments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: what a tenant more takes than none."""
    from aws_cdk import App
    from jsii._kernel.providers.process import _NodeProcess

    from stacks.environment import deploy_environment

    sent = 0
    send = _NodeProcess.send

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal sent
        sent += 1
        return send(self, *arguments)

    monkeypatch.setattr(_NodeProcess, "send", counted)
    numbers = []
    for tenants in ([], ["acme"], ["globex"]):
        before = sent
        deploy_environment(App(analytics_reporting=False), environments["local"], tenants)
        numbers.append(sent - before)
    alone, acme, globex = numbers
    assert 0 < acme - alone <= MAX_MESSAGES and 0 < globex - alone <= MAX_MESSAGES, numbers
