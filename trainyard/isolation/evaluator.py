"""IAM's decision on one request within one account, from the documented logic (IAM user guide, "Policy evaluation
logic", "Permissions boundaries for IAM entities", "AWS JSON policy elements: Principal"; KMS developer guide, "Key
policies").

1. An explicit Deny in any policy that applies wins.
2. A resource's policy that names the role allows by itself, within the role's boundary; one that names the session or,
   with `*`, everybody, allows past the boundary. One that names the account leaves it to the account's identity
   policies, and by itself gives nothing.
3. Otherwise the role's own policies must allow, and its boundary too.
4. For a KMS key and for assuming a role, the account's identity policies count only if the resource's policy names
   the account: without that, only rule 2 opens.
5. From another account, the caller's own policies and the resource's must both allow.
6. A request that comes through a VPC endpoint must be allowed by the endpoint's policy as well.

Service control and session policies are not modelled: both can only take away.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from trainyard.isolation.conditions import Context, Truth
from trainyard.isolation.policy import Origin, Policy, Principals, Statement

Outcome = Literal["Allow", "Deny", "ImplicitDeny"]

NO_POLICY = Policy(())


@dataclass(frozen=True, eq=False)
class Caller:
    """Who asks: the session of a role, an AWS service, or whom an identity provider or S3 knows by another name."""

    arn: str
    """The role's ARN; a service's name (`sagemaker.amazonaws.com`) where `service`; a provider's or canonical
    user's."""
    account: str
    policy: Policy = NO_POLICY
    boundary: Policy | None = None
    service: bool = False
    sessions: tuple[str, ...] = field(init=False, default=())
    """Patterns of the role's sessions' ARNs."""

    def __post_init__(self) -> None:
        if not self.service:
            name = self.arn.rsplit("/", 1)[-1]
            object.__setattr__(self, "sessions", (f"arn:aws:sts::{self.account}:assumed-role/{name}/",))

    def is_named(self, principal: str) -> Literal["self", "role", "account", ""]:
        """How one AWS principal of a resource's policy names this caller."""
        if principal == "*" or principal.startswith(self.sessions):
            return "self"
        if principal == self.arn:
            return "role"
        if principal in {self.account, f"arn:aws:iam::{self.account}:root"}:
            return "account"
        return ""


@dataclass(frozen=True)
class Request:
    """One action on one resource."""

    caller: Caller
    action: str
    resource: str
    context: Context
    resource_policy: Policy | None = None
    """None where the resource has no policy."""
    owner: str = ""
    """The account of the resource; empty where it is the caller's. From another account both sides must allow."""
    endpoint_policy: Policy | None = None
    """Of the VPC endpoint that the request comes through; None outside a VPC."""


@dataclass(frozen=True)
class Decision:
    """The answer, and the statements that made it."""

    outcome: Outcome
    statements: tuple[Statement, ...] = ()
    """The Allows that let it through, or the Deny that stopped it."""
    reason: str = ""

    @property
    def allowed(self) -> bool:
        """Whether AWS would do it."""
        return self.outcome == "Allow"

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where the deciding statements are."""
        return tuple(statement.origin for statement in self.statements)


def needs_resource_policy(action: str, resource: str) -> bool:
    """Whether the resource's policy must say yes even within its own account: a key's, a role's trust."""
    return action.startswith("sts:AssumeRole") or (action.startswith("kms:") and ":key/" in resource)


def decide(request: Request) -> Decision:
    """What AWS answers."""
    deny = _first_deny(request)
    if deny is not None:
        return Decision("Deny", (deny,), f"explicit deny: {deny.origin}")
    granted = _grant(request)
    if isinstance(granted, str):
        return Decision("ImplicitDeny", (), granted)
    if request.endpoint_policy is not None:
        passing = _first(request.endpoint_policy.about(request.action)[0], request, granting=True, named=True)
        if passing is None:
            return Decision("ImplicitDeny", (), "the VPC endpoint's policy doesn't allow it")
        granted += (passing,)
    return Decision("Allow", granted)


def _grant(request: Request) -> tuple[Statement, ...] | str:
    """The Allows that together grant the request, or why there are none."""
    caller = request.caller
    by_resource = _resource_allows(request)
    if request.owner not in {"", caller.account}:
        own = _first(caller.policy.about(request.action)[0], request, granting=True)
        named = next(iter(by_resource.values()), None)
        return (own, named) if own and named else "from another account both sides must allow it"
    if "self" in by_resource:
        return (by_resource["self"],)
    if caller.service:
        return "no resource policy names the service"
    return _within_account(request, by_resource)


def _within_account(request: Request, by_resource: dict[str, Statement]) -> tuple[Statement, ...] | str:
    caller, action = request.caller, request.action
    limited = caller.boundary is not None and not _first(caller.boundary.about(action)[0], request, granting=True)
    if "role" in by_resource and not limited:
        return (by_resource["role"],)
    own = _first(caller.policy.about(action)[0], request, granting=True)
    if own is None:
        return "no policy allows it"
    if limited:
        return "the permissions boundary doesn't allow it"
    if not needs_resource_policy(action, request.resource):
        return (own,)
    if "account" in by_resource:
        return (own, by_resource["account"])
    return "the resource's own policy names neither the role nor the account for it"


def _resource_allows(request: Request) -> dict[str, Statement]:
    """The Allows of the resource's policy, by how they name the caller."""
    found: dict[str, Statement] = {}
    if request.resource_policy is not None:
        for statement in request.resource_policy.about(request.action)[0]:
            how = _how_named(statement, request.caller)
            if how and how not in found and _applies(statement, request, granting=True):
                found[how] = statement
    return found


def _first_deny(request: Request) -> Statement | None:
    caller = request.caller
    for policy in (caller.policy, caller.boundary):
        if policy is not None and (found := _first(policy.about(request.action)[1], request, granting=False)):
            return found
    for policy in (request.resource_policy, request.endpoint_policy):
        if policy is None:
            continue
        found = _first(policy.about(request.action)[1], request, granting=False, named=True)
        if found:
            return found
    return None


def _first(
    statements: Iterable[Statement], request: Request, *, granting: bool, named: bool = False
) -> Statement | None:
    for statement in statements:
        if (not named or _how_named(statement, request.caller)) and _applies(statement, request, granting=granting):
            return statement
    return None


def _applies(statement: Statement, request: Request, *, granting: bool) -> bool:
    """Whether the statement is about the request: what the caller may choose, it chooses to its own good."""
    if not statement.covers_resource(request.resource, request.context):
        return False
    truth = statement.holds(request.context)
    return truth is Truth.YES or (granting and truth is Truth.MAYBE)


def _how_named(statement: Statement, caller: Caller) -> Literal["self", "role", "account", ""]:
    """How a resource's statement is about the caller. Anything but "" suffices for a Deny."""
    if statement.not_principals is not None:
        return "" if _listed(statement.not_principals, caller) else "self"
    return _listed(statement.principals, caller) if statement.principals is not None else ""


def _listed(principals: Principals, caller: Caller) -> Literal["self", "role", "account", ""]:
    if caller.service:
        return "self" if caller.arn in principals.services or "*" in principals.aws else ""
    if caller.arn in principals.others:
        return "self"
    ways = [caller.is_named(name) for name in principals.aws]
    for way in ("self", "role", "account"):
        if way in ways:
            return way
    return ""
