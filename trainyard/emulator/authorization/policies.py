"""The policies that are deployed: read from moto at the time of the request, parsed once per text."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from ministack.core.iam_evaluator import ParsedStatement, parse_policy_document

Statements = list[ParsedStatement]


class PolicyError(Exception):
    """A policy that can't be judged: the request is denied with this as the reason."""


def as_text(document: Any) -> str:
    """A policy document as JSON text, however moto keeps it."""
    if isinstance(document, bytes):
        return document.decode()
    return document if isinstance(document, str) else json.dumps(document)


@functools.lru_cache(maxsize=2048)
def parsed(text: str) -> Statements:
    """The statements of a policy text. The list is shared: don't change it."""
    statements: Statements = parse_policy_document(text)
    return statements


_VARIABLE = re.compile(r"\$\{([^}]+)\}")
_LITERALS = {"*": "*", "?": "?", "$": "$"}


def with_variables(text: str, context: Mapping[str, Any]) -> str:
    """A policy text with its ${...} variables replaced; PolicyError for one without a value: it may sit in a Deny."""
    if "${" not in text:
        return text

    def value(match: re.Match[str]) -> str:
        name, _, default = match[1].partition(",")
        if name in _LITERALS:
            return _LITERALS[name]
        found = context.get(name.strip().lower())
        if found is None:
            found = default.strip().strip("'") if default else None
        if not isinstance(found, str):
            raise PolicyError(f"the policy variable ${{{match[1]}}} has no value here")
        return json.dumps(found)[1:-1]

    return _VARIABLE.sub(value, text)


def role_documents(role: Any) -> list[str]:
    """A role's inline and attached managed policies."""
    documents = [as_text(document) for document in list(role.policies.values())]
    return documents + [_default_version(policy) for policy in list(role.managed_policies.values())]


def boundary_document(role: Any, managed: Mapping[str, Any]) -> str | None:
    """The role's permissions boundary; one that doesn't exist any more allows nothing."""
    arn = role.permissions_boundary_arn
    if not arn:
        return None
    policy = managed.get(arn)
    return _default_version(policy) if policy is not None else json.dumps({"Statement": []})


def _default_version(policy: Any) -> str:
    return next(
        (as_text(version.document) for version in policy.versions if version.version_id == policy.default_version_id),
        "{}",
    )


class ResourcePolicies:
    """Policies that hang on resources: buckets, keys, topics, repositories, and roles (their trust)."""

    def __init__(self, account: str) -> None:
        self._account = account

    def of(self, service: str, resource: str) -> str | None:
        """The policy of the resource with that ARN, or None."""
        if resource == "*":
            return None
        if service == "s3":
            return self._bucket(resource)
        if service == "kms":
            return self._key(resource)
        if service == "sns":
            return self._topic(resource)
        return None

    def _bucket(self, resource: str) -> str | None:
        from moto.s3.models import s3_backends

        name = resource.removeprefix("arn:aws:s3:::").partition("/")[0]
        bucket = s3_backends[self._account]["aws"].buckets.get(name)
        return as_text(bucket.policy) if bucket is not None and bucket.policy else None

    def _key(self, resource: str) -> str | None:
        from moto.kms.models import kms_backends

        region, key_id = resource.split(":")[3], resource.rpartition("/")[2]
        key = kms_backends[self._account][region].keys.get(key_id)
        if key is None:
            return None
        managed = next((alias for alias in key.aliases if alias.startswith("alias/aws/")), None)
        if managed is not None:
            return self._aws_managed_key(region, managed.removeprefix("alias/aws/"))
        return as_text(key.policy)

    def _aws_managed_key(self, region: str, service: str) -> str:
        """The policy that AWS gives its managed keys: everyone in the account, through the one service."""
        through = {"kms:CallerAccount": self._account, "kms:ViaService": f"{service}.{region}.amazonaws.com"}
        actions = [
            "kms:Encrypt",
            "kms:Decrypt",
            "kms:ReEncrypt*",
            "kms:GenerateDataKey*",
            "kms:CreateGrant",
            "kms:DescribeKey",
        ]
        condition = {"StringEquals": through}
        statement = {
            "Effect": "Allow",
            "Principal": {"AWS": "*"},
            "Action": actions,
            "Resource": "*",
            "Condition": condition,
        }
        return json.dumps({"Statement": [statement]})

    def _topic(self, resource: str) -> str | None:
        from moto.sns.models import sns_backends

        parts = resource.split(":")
        topic = sns_backends[self._account][parts[3]].topics.get(resource) if len(parts) > 5 else None
        policy = getattr(topic, "policy", None)
        # SNS's own default policy lets the account's principals in by their identity policies; it grants nothing more.
        return None if not policy or "__default_policy_ID" in as_text(policy) else as_text(policy)


@functools.lru_cache(maxsize=2048)
def sound_resource_policy(text: str) -> dict[str, Any]:
    """A resource policy without the principals that AWS would not match: an ARN with a wildcard names nobody."""
    document = json.loads(text)
    statements = document.get("Statement", [])
    statements = [statements] if isinstance(statements, dict) else statements
    kept = []
    for given in statements:
        statement = dict(given)
        if "NotPrincipal" in statement:
            raise PolicyError("NotPrincipal in a resource policy is not known to the emulator")
        principal = statement.get("Principal")
        if isinstance(principal, dict) and "AWS" in principal:
            names = principal["AWS"] if isinstance(principal["AWS"], list) else [principal["AWS"]]
            sound = [name for name in names if name == "*" or "*" not in str(name)]
            statement["Principal"] = {**principal, "AWS": sound}
        kept.append(statement)
    return {**document, "Statement": kept}
