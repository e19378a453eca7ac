"""A tenant's roles whose older sessions were closed by hand: by `break_glass close`, or with IAM's console.

That is a policy on the role which no stack owns, and CloudFormation deletes no role that holds one: a removal takes it
off. Then those sessions would serve again until the role is gone, so that it waits until none of them is left.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.aws import aws_errors
from trainyard.launch.session import Account

POLICY = "AWSRevokeOlderSessions"
"""The name that IAM's console gives such a policy."""
LONGEST_SESSION_SECONDS = 3600
"""Of a role that doesn't say how long its sessions may last."""


@dataclass(frozen=True)
class Revocation:
    """One role, and when its last closed session would have ended by itself."""

    role: str
    needed_until: datetime


def closed_before(moment: datetime) -> dict[str, Any]:
    """The policy that refuses everything to sessions that are older; a later one is not bound by it."""
    condition = {"DateLessThan": {"aws:TokenIssueTime": moment.strftime("%Y-%m-%dT%H:%M:%SZ")}}
    return {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*", "Condition": condition}],
    }


def revocations(account: Account, stacks: Iterable[str]) -> list[Revocation]:
    """Those on roles of these stacks, all of which exist."""
    iam = account.client("iam")
    return [found for name in stacks for role in _roles(account, name) if (found := _on(iam, role)) is not None]


def _roles(account: Account, stack: str) -> Iterator[str]:
    with aws_errors("listing the roles of", f"stack {stack}"):
        pages = account.client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=stack)
        for item in (item for page in pages for item in page["StackResourceSummaries"]):
            is_there = item.get("PhysicalResourceId") and item["ResourceStatus"] != "DELETE_COMPLETE"
            if item["ResourceType"] == "AWS::IAM::Role" and is_there:
                yield item["PhysicalResourceId"]


def _on(iam: Any, role: str) -> Revocation | None:
    """None where there is none, or one of another shape: what somebody else put there stays his."""
    with aws_errors("looking for closed sessions of", f"role {role}"):
        try:
            document = iam.get_role_policy(RoleName=role, PolicyName=POLICY)["PolicyDocument"]
            longest = iam.get_role(RoleName=role)["Role"].get("MaxSessionDuration", LONGEST_SESSION_SECONDS)
        except iam.exceptions.NoSuchEntityException:
            return None
    try:
        (statement,) = document["Statement"]
        closed = datetime.fromisoformat(statement["Condition"]["DateLessThan"]["aws:TokenIssueTime"])
    except (KeyError, TypeError, ValueError):
        return None
    if closed.tzinfo is None:  # written by hand: IAM takes a moment without a zone for UTC
        closed = closed.replace(tzinfo=UTC)
    return Revocation(role, closed + timedelta(seconds=longest))


def refuse_needed(tenant: str, found: Iterable[Revocation]) -> None:
    """InputError while a closed session would serve again without its policy."""
    needed = [one for one in found if one.needed_until > datetime.now(UTC)]
    if needed:
        last = max(needed, key=lambda one: one.needed_until)
        raise InputError(
            f"tenant {tenant}: sessions of role {last.role} were closed ({POLICY}), and would serve again while the "
            f"role is deleted; nothing was changed: repeat the command after {last.needed_until:%Y-%m-%dT%H:%M:%SZ}, "
            "when they have ended"
        )


def lift(account: Account, found: Iterable[Revocation]) -> None:
    """Take the policies off, so that their roles can be deleted."""
    iam = account.client("iam")
    for one in found:
        gone = contextlib.suppress(iam.exceptions.NoSuchEntityException)
        with aws_errors("taking off", f"{POLICY} of role {one.role}"), gone:
            iam.delete_role_policy(RoleName=one.role, PolicyName=POLICY)
