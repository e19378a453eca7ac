"""Findings of the checks (`stacks/checks.py`) that are as they should be, each with the reason that a reviewer reads.

Where the reason is one construct's alone it stands there; here is how to say it, and what many constructs share.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aws_cdk import Acknowledgment, Stack, Validations
from aws_cdk import aws_iam as iam
from constructs import IConstruct

from stacks.naming import TenantScope

INLINE_POLICIES = {
    "NIST.800.53.R5-IAMNoInlinePolicy": (
        "An inline policy lives and dies with the one role that it is for; a managed one could be attached to another "
        "role too, which for a tenant's rights is the mistake to prevent. The boundary above all of them is managed."
    )
}

BUCKETS = {
    **dict.fromkeys(
        ("AwsSolutions-S1", "NIST.800.53.R5-S3BucketLoggingEnabled"),
        "The account's trail logs every read and write of every object with its caller, validated and under Object "
        "Lock; server access logs are best effort, and would be a second copy that nobody validates.",
    ),
    "NIST.800.53.R5-S3BucketReplicationEnabled": (
        "Objects are versioned and S3 keeps them in several zones. A second region doubles the cost and moves data out "
        "of the region that the tenant was promised; who needs it adds a replication rule of his own."
    ),
}

STATED_ZONES = {
    "CloudFormation-Validate::W3010": (
        "The environment file states the zone: synthesis looks nothing up, and EFA stays in one zone."
    )
}

FUNCTIONS = {
    "NIST.800.53.R5-LambdaConcurrency": (
        "Reserved concurrency comes out of the account's 1,000 and would bound the number of tenants. A throttled "
        "event is tried again for six hours; a throttled caller is told."
    ),
    "NIST.800.53.R5-LambdaInsideVPC": (
        "It calls AWS's APIs and nothing else, and no data of a tenant goes through it: in the tenant's network it "
        "would stand beside the jobs that it judges, and need endpoints that they don't."
    ),
    "AwsSolutions-L1": (
        "The runtime is the newest but one at worst, has years of support left, and is in every region; it is changed "
        "together with the tests that play the function."
    ),
}
"""Of a small function that AWS or the tenant calls. What becomes of its failures is for each one to say."""


def acknowledge(construct: IConstruct, reasons: Mapping[str, str]) -> None:
    """Rule (`AwsSolutions-S1`, `NIST.800.53.R5-...`) to reason, for everything under `construct`."""
    Validations.of(construct).acknowledge(*(Acknowledgment(id=rule, reason=text) for rule, text in reasons.items()))


def acknowledge_wildcards(
    policy: iam.Policy | iam.ManagedPolicy, tenant: TenantScope, reasons: Mapping[str, str]
) -> Mapping[str, Any]:
    """Acknowledge a policy's wildcards: those that stay within what is the tenant's, and those of the statements
    (Sids) that `reasons` gives a reason for. One that neither holds for is left to be found.

    Gives the policy's document, resolved: resolving is most of the work.
    """
    found: dict[str, list[str | None]] = {}
    document: Mapping[str, Any] = Stack.of(policy).resolve(policy.document)
    for statement in document["Statement"]:
        if statement["Effect"] == "Allow":
            for finding in _findings(statement):
                text = reasons.get(statement.get("Sid", ""))
                found.setdefault(finding, []).append(text or (_OWN if _is_own(finding, tenant) else None))
    acknowledge(
        policy,
        {
            f"AwsSolutions-IAM5[{_as_nag_writes(finding)}]": " ".join(dict.fromkeys(map(str, texts)))
            for finding, texts in found.items()
            if all(texts)
        },
    )
    return document


_OWN = (
    "The pattern ends within what is the tenant's own, by resource or by the tenant's name; the isolation proof asks "
    "for every object, stream, job and role that it could name."
)


def _findings(statement: Mapping[str, Any]) -> Iterator[str]:
    """As cdk-nag writes them."""
    yield from (f"Action::{action}" for action in _many(statement["Action"]) if "*" in action)
    resources = (_flat(resource) for resource in _many(statement["Resource"]))
    yield from (f"Resource::{resource}" for resource in resources if "*" in resource)


def _as_nag_writes(finding: str) -> str:
    """cdk-nag writes a policy variable (`${aws:userid}`) as it does a reference: <aws:userid>."""
    return re.sub(r"[$]{([^}]+)}", r"<\1>", finding)


def _is_own(finding: str, tenant: TenantScope) -> bool:
    kind, _, pattern = finding.partition("::")
    fixed = pattern.partition("*")[0]
    name = f"{tenant.environment.name}/{tenant.name}/"
    jobs = [f"{before}{prefix}" for prefix in tenant.job_prefixes for before in "/:"]
    marks = ("<", *jobs, f"/{tenant.name}-", f"/trainyard/{name}", f"{tenant.stack_name('')}")
    return kind == "Resource" and any(mark in fixed for mark in marks)


def _many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _flat(value: Any) -> str:
    """An ARN with its references as <LogicalId.Attribute>."""
    if isinstance(value, str):
        return value
    ((function, argument),) = value.items()
    if function == "Fn::Join":
        return str(argument[0]).join(_flat(item) for item in argument[1])
    if function == "Fn::GetAtt":
        return f"<{'.'.join(argument)}>"
    if function == "Ref":
        return f"<{argument}>"
    return _flat(argument) if function == "Fn::ImportValue" else json.dumps(value, separators=(",", ":"))
