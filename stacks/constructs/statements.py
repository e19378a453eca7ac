"""Statements of policies as the JSON that they end as.

Each object of the CDK's is a message to its Node process; a statement of its own class would be one, a document made
of these is one for all of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from aws_cdk import aws_iam as iam

Statement = Mapping[str, Any]
"""As IAM's policy language has it."""

Conditions = Mapping[str, Mapping[str, object]]
"""Operator -> key -> value or values."""


def allow(sid: str, actions: list[str], resources: list[str], conditions: Conditions | None = None) -> Statement:
    """An Allow of `actions` on `resources` where all `conditions` hold."""
    return _statement("Allow", sid, actions, {"Resource": resources}, conditions)


def deny(sid: str, actions: list[str], conditions: Conditions) -> Statement:
    """A Deny of `actions` on everything where all `conditions` hold."""
    return _statement("Deny", sid, actions, {"Resource": ["*"]}, conditions)


def deny_outside(sid: str, actions: list[str], resources: list[str], conditions: Conditions | None = None) -> Statement:
    """A Deny of `actions` on everything but `resources` where all `conditions` hold."""
    return _statement("Deny", sid, actions, {"NotResource": resources}, conditions)


def policy_document(statements: Iterable[Statement]) -> iam.PolicyDocument:
    """A policy of these."""
    return iam.PolicyDocument.from_json({"Version": "2012-10-17", "Statement": list(statements)})


def _statement(
    effect: str, sid: str, actions: list[str], resources: Mapping[str, list[str]], conditions: Conditions | None
) -> Statement:
    stated = {"Condition": conditions} if conditions else {}
    return {"Sid": sid, "Effect": effect, "Action": actions, **resources, **stated}
