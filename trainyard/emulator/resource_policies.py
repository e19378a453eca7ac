"""Policies of resources, looked at as they are put: AWS refuses one that names nobody, that is another resource's, or
that locks its own account out. moto keeps whatever it gets."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.ecr.exceptions import InvalidParameterException
from moto.ecr.models import ECRBackend
from moto.iam.exceptions import MalformedPolicyDocument
from moto.iam.models import IAMBackend, iam_backends
from moto.kms.models import KmsBackend
from moto.s3.exceptions import S3ClientError
from moto.s3.models import S3Backend
from moto.sns.exceptions import SNSInvalidParameter
from moto.sns.models import SNSBackend

Refuse = Callable[[str], Exception]
_SERVICE = re.compile(r"[a-z0-9.-]+\.amazonaws\.com(\.cn)?")


class _MalformedPolicy(S3ClientError):  # type: ignore[misc]  # moto's classes are untyped here
    code = "MalformedPolicy"


def install() -> None:
    """Look at every policy that a resource is given, by whichever way."""
    _look_at_trust()
    _look_at_keys()
    _look_at_buckets()
    _look_at_topics_and_repositories()


def _statements(document: str | bytes) -> list[dict[str, Any]]:
    try:
        found = json.loads(document).get("Statement", [])
    except (ValueError, AttributeError):
        return []  # moto's own to refuse
    return [item for item in (found if isinstance(found, list) else [found]) if isinstance(item, dict)]


def _as_list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _principals(statement: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("Principal", "NotPrincipal"):
        for kind, names in statement[key].items() if isinstance(statement.get(key), dict) else ():
            for name in _as_list(names):
                yield kind, name


def unknown_principal(document: str | bytes, account: str) -> str:
    """The first principal of the account that isn't there, as AWS words it; "" where all are. Who is of another account
    can't be known."""
    for statement in _statements(document):
        for kind, name in _principals(statement):
            known = _SERVICE.fullmatch(name) if kind == "Service" else kind != "AWS" or _is_there(name, account)
            if not known:
                return f'"{kind}":"{name}"'
    return ""


def _is_there(name: str, account: str) -> bool:
    if name == "*" or re.fullmatch(r"\d{12}", name):
        return True
    parts = name.split(":", 5)
    iam: IAMBackend = iam_backends[account]["aws"]
    if len(parts) < 6 or parts[0] != "arn":
        entities = [*iam.roles.values(), *iam.users.values()]
        return name in {entity.id for entity in entities}  # what a policy shows of whom it named and who is gone
    if parts[4] != account:
        return True
    kind, _, path = parts[5].partition("/")
    if parts[2] == "sts":
        return kind == "federated-user" or path.split("/")[0] in {role.name for role in iam.roles.values()}
    if kind == "user":
        return name in {user.arn for user in iam.users.values()}
    return kind == "root" or name in {role.arn for role in iam.roles.values()}


def _require_known(document: str | bytes, account: str, refuse: Refuse) -> None:
    unknown = unknown_principal(document, account)
    if unknown:
        raise refuse(unknown)


def _look_at_trust() -> None:
    create, update = IAMBackend.create_role, IAMBackend.update_assume_role_policy

    def refuse(unknown: str) -> Exception:
        error: Exception = MalformedPolicyDocument(f"Invalid principal in policy: {unknown}")
        return error

    def create_role(self: Any, role_name: str, assume_role_policy_document: str, *args: Any, **kwargs: Any) -> Any:
        _require_known(assume_role_policy_document, self.account_id, refuse)
        return create(self, role_name, assume_role_policy_document, *args, **kwargs)

    def update_assume_role_policy(self: Any, role_name: str, policy_document: str) -> None:
        _require_known(policy_document, self.account_id, refuse)
        update(self, role_name, policy_document)

    IAMBackend.create_role = create_role
    IAMBackend.update_assume_role_policy = update_assume_role_policy


def _look_at_keys() -> None:
    create, put = KmsBackend.create_key, KmsBackend.put_key_policy

    def require_sound(policy: str, account: str) -> None:
        _require_known(
            policy,
            account,
            lambda unknown: JsonRESTError(
                "MalformedPolicyDocumentException",
                f"Policy contains a statement with one or more invalid principals. ({unknown})",
            ),
        )
        if not any(_lets_change(statement, account) for statement in _statements(policy)):
            raise JsonRESTError(
                "MalformedPolicyDocumentException",
                "The new key policy will not allow you to update the key policy in the future.",
            )

    def create_key(self: Any, policy: str | None, *args: Any, **kwargs: Any) -> Any:
        if policy:
            require_sound(policy, self.account_id)
        return create(self, policy, *args, **kwargs)

    def put_key_policy(self: Any, key_id: str, policy: str) -> None:
        require_sound(policy, self.account_id)
        put(self, key_id, policy)

    KmsBackend.create_key = create_key
    KmsBackend.put_key_policy = put_key_policy


def _lets_change(statement: dict[str, Any], account: str) -> bool:
    """Whether somebody of the account may put another policy by this statement. AWS asks it of the caller alone."""
    actions = [re.escape(action).replace(r"\*", ".*") for action in _as_list(statement.get("Action", []))]
    who = statement.get("Principal")
    own = who == "*" or any(account in name or name == "*" for kind, name in _principals(statement) if kind == "AWS")
    covers = any(re.fullmatch(action, "kms:PutKeyPolicy", re.IGNORECASE) for action in actions)
    return statement.get("Effect") == "Allow" and own and covers


def _look_at_buckets() -> None:
    put = S3Backend.put_bucket_policy

    def put_bucket_policy(self: Any, bucket_name: str, policy: bytes) -> None:
        _require_known(policy, self.account_id, lambda unknown: _MalformedPolicy("Invalid principal in policy"))
        own = re.compile(rf"arn:[a-z-]+:s3:::{re.escape(bucket_name)}(/.*)?")
        for statement in _statements(policy):
            named = [*_as_list(statement.get("Resource", [])), *_as_list(statement.get("NotResource", []))]
            if not all(own.fullmatch(name) for name in named):
                raise _MalformedPolicy("Policy has invalid resource")
        put(self, bucket_name, policy)

    S3Backend.put_bucket_policy = put_bucket_policy


def _look_at_topics_and_repositories() -> None:
    set_attribute, set_policy = SNSBackend.set_topic_attribute, ECRBackend.set_repository_policy

    def set_topic_attribute(self: Any, topic_arn: str, attribute_name: str, attribute_value: str) -> None:
        if attribute_name in ("Policy", "policy"):
            words = "Invalid parameter: Policy Error: PrincipalNotFound"
            _require_known(attribute_value, self.account_id, lambda unknown: SNSInvalidParameter(words))
        set_attribute(self, topic_arn, attribute_name, attribute_value)

    def set_repository_policy(self: Any, registry_id: str, repository_name: str, policy_text: str) -> Any:
        words = "Invalid parameter at 'PolicyText' failed to satisfy constraint: 'Principal not found'"
        _require_known(policy_text, self.account_id, lambda unknown: InvalidParameterException(words))
        return set_policy(self, registry_id, repository_name, policy_text)

    SNSBackend.set_topic_attribute = set_topic_attribute
    ECRBackend.set_repository_policy = set_repository_policy
