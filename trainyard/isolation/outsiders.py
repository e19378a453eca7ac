"""Who is no tenant's role and asks for what has a policy of its own: strangers, whomever the policy names, services."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainyard.isolation.account import PLATFORM, Account, Thing
from trainyard.isolation.conditions import Context, Value
from trainyard.isolation.evaluator import Caller, Request
from trainyard.isolation.policy import Policy, Statement
from trainyard.isolation.questions import (
    GUARD_RAIL,
    NO_SERVICE,
    OUTSIDER,
    Question,
    Scope,
    example_of,
    examples,
    somebody,
)

_SOURCES = {"logs": ("log group", "log-group:"), "events": ("rule", "rule/"), "cloudwatch": ("alarm", "alarm:")}
"""Services that say for what of whom they are at work: its kind, and how its name begins in an ARN."""


@dataclass(frozen=True)
class Named:
    """Whom a policy names, as a principal or by a condition."""

    name: str
    caller: Caller
    stated: Mapping[str, Value]


def named_by(policy: Policy, account: str) -> Iterator[Named]:
    """Everybody whom an Allow names; of `account` each role and user by himself, without any right of his own. The
    account itself is nobody: what it names there is for the account's own policies to say."""
    allows = [statement for statement in policy.statements if statement.allows]
    names = dict.fromkeys(name for statement in allows for name in _principals(statement))
    for name in names:
        parts = name.split(":")
        owner = name if name.isdigit() else parts[4] if name.startswith("arn:") and len(parts) > 5 else account
        if name in {"*", account, f"arn:aws:iam::{account}:root"}:
            continue
        is_whole = name.isdigit() or name.endswith(":root")
        caller = somebody(owner) if is_whole else Caller(name, owner) if owner == account else somebody(owner, name)
        stated: dict[str, Value] = {"aws:principalaccount": owner, "kms:calleraccount": owner}
        yield Named(name, caller, stated if is_whole else {**stated, "aws:principalarn": _role_of(name)})
    for name in {name for statement in allows if statement.principals for name in statement.principals.others}:
        yield Named(name, somebody("", name), {})


def _principals(statement: Statement) -> Iterator[str]:
    """Principals, and the accounts and roles of conditions; of a pattern an example."""
    yield from statement.principals.aws if statement.principals else ()
    for condition in statement.conditions:
        if condition.key.lower() in {"aws:principalarn", "aws:principalaccount", "kms:calleraccount"}:
            yield from (example_of(value) for value in condition.values)


def _role_of(arn: str) -> str:
    """What a session states as its principal's ARN: its role's."""
    account, name = arn.split(":")[4:6] if arn.startswith("arn:aws:sts:") else ("", "")
    return f"arn:aws:iam::{account}:role/{name.split('/')[1]}" if name.startswith("assumed-role/") else arn


class Outsiders:
    """Asks on behalf of them."""

    def __init__(self, account: Account, scope: Scope, actions: Mapping[str, tuple[str, ...]]) -> None:
        self._account, self._scope, self._actions = account, scope, actions
        self._id = account.environment.account
        self._roles = {role.arn for role in account.roles}

    def asked(self, tenant: str | None) -> Iterator[Question]:
        """Of the things of a tenant, or of the platform."""
        for thing in self._account.things_of(tenant):
            policy = self._account.policy_of(thing)
            if policy is not None and self._scope.thing(thing):
                yield from self._strangers(tenant, thing, policy)
                yield from self._services(tenant, thing, policy)
                if tenant is not None:
                    yield from self._administrators(tenant, thing, policy)

    def _strangers(self, tenant: str | None, thing: Thing, policy: Policy) -> Iterator[Question]:
        """Another account, whoever of this one has no right, and whom the policy names that is nobody's role."""
        nobody = Caller(f"arn:aws:iam::{self._id}:role/Nobody", self._id)
        mine: dict[str, Value] = {"aws:principalaccount": self._id, "kms:calleraccount": self._id}
        theirs: dict[str, Value] = {"aws:principalaccount": OUTSIDER, "kms:calleraccount": OUTSIDER}
        callers = [
            Named("another account", somebody(OUTSIDER), theirs),
            Named("anybody of the account", nobody, {**mine, "aws:principalarn": nobody.arn}),
            *(item for item in named_by(policy, self._id) if not self._is_known(tenant, item)),
        ]
        for item in callers:
            context = Context({**thing.context, **item.stated}, True, NO_SERVICE)
            for resource in examples(thing, policy):
                for action in self._actions[thing.kind]:
                    request = Request(item.caller, action, resource, context, policy, self._id)
                    yield Question("", tenant or PLATFORM, item.name, thing.name, request)

    def _is_known(self, tenant: str | None, item: Named) -> bool:
        """The roles of the account ask for themselves; a tenant's own path holds none but its own; a service-linked
        role is the service's."""
        own = f"arn:aws:iam::{self._id}:role/"
        path = f"{own}trainyard/{self._account.environment.name}/{tenant}/"
        arn = str(item.stated.get("aws:principalarn", ""))
        return arn in self._roles or arn.startswith((f"{own}aws-service-role/", *((path,) if tenant else ())))

    def _administrators(self, tenant: str, thing: Thing, policy: Policy) -> Iterator[Question]:
        """Of the account: they neither use a tenant's keys nor are its jobs, and its operator only by a second
        factor."""
        administrator, contract = somebody(self._id), self._account.contracts[tenant]
        at_hand = {
            "aws:principalaccount": self._id,
            "kms:calleraccount": self._id,
            "aws:principalarn": administrator.arn,
        }
        context = Context({**thing.context, **at_hand}, True, NO_SERVICE | {"kms:viaservice"})
        forbidden: dict[str, tuple[str, ...]] = {
            "key": ("kms:Decrypt", "kms:Encrypt", "kms:GenerateDataKey", "kms:ReEncryptFrom", "kms:CreateGrant")
        }
        if thing.pattern == contract.roles.job:
            forbidden["role"] = ("sts:AssumeRole",)
        named = [item for item in named_by(policy, self._id) if item.caller.account == self._id]
        for who in ({}, *(item.stated for item in named if not self._is_known(tenant, item))):
            caller = somebody(self._id, str(who.get("aws:principalarn", administrator.arn)))
            said = Context({**context.stated, **who}, True, context.absent)
            for action in forbidden.get(thing.kind, ()):
                request = Request(caller, action, thing.examples[0], said, policy)
                yield Question("", GUARD_RAIL, "an administrator", thing.name, request, "no kms:ViaService")
        if thing.pattern == contract.roles.operator:
            present, age = "aws:multifactorauthpresent", "aws:multifactorauthage"
            yield from (
                Question("", GUARD_RAIL, "an administrator", thing.name, self._glass(thing, said), text)
                for said, text in (
                    ({}, "without a second factor"),
                    ({present: "false", age: "60"}, "with no second factor"),
                    ({present: "true", age: "7200"}, "two hours after the second factor"),
                )
            )

    def _glass(self, thing: Thing, said: Mapping[str, Value]) -> Request:
        """An administrator of the account who would be the operator."""
        caller = somebody(self._id)
        absent = {"aws:multifactorauthpresent", "aws:multifactorauthage"} - set(said)
        stated: dict[str, Value] = {"aws:principalaccount": self._id, "aws:principalarn": caller.arn, **said}
        context = Context(stated, True, NO_SERVICE | absent)
        return Request(caller, "sts:AssumeRole", thing.examples[0], context, self._account.policy_of(thing))

    def _services(self, tenant: str | None, thing: Thing, policy: Policy) -> Iterator[Question]:
        """Services that the thing's policy names, at work for another account or for what is another tenant's."""
        for statement in policy.statements:
            for name in statement.principals.services if statement.allows and statement.principals else ():
                for account, source, text in self._sources(tenant, thing, name):
                    said: dict[str, Value] = {
                        "aws:sourceaccount": account,
                        "aws:sourcearn": source,
                        "kms:encryptioncontext:aws:logs:arn": source,
                    }
                    context = Context({**thing.context, **said}, True, NO_SERVICE)
                    for action in statement.actions or self._actions[thing.kind]:
                        for resource in examples(thing, policy):
                            request = Request(Caller(name, account, service=True), action, resource, context, policy)
                            yield Question("", tenant or PLATFORM, name, thing.name, request, text)

    def _sources(self, tenant: str | None, thing: Thing, service: str) -> Iterator[tuple[str, str, str]]:
        """For which account, and for what there, the service would be at work, and whose that is."""
        region, short = self._account.environment.region, service.partition(".")[0]
        if service in {"lambda.amazonaws.com", "ec2.amazonaws.com"} and thing.kind == "role":
            return  # functions and machines take only roles of their own account, and state no source then
        if thing.kind == "key" and short == "events":
            return  # EventBridge states no source when it encrypts: the topic's own policy holds there
        yield OUTSIDER, f"arn:aws:logs:{region}:{OUTSIDER}:log-group:any", "for another account"
        if short not in _SOURCES or thing.kind == "role" or (thing.kind == "key" and short != "logs"):
            return  # who hands a role to a service is asked (iam:PassRole); for keys the topic's policy holds again
        kind, begin = _SOURCES[short]
        yield self._id, f"arn:aws:{short}:{region}:{self._id}:{begin}anybodys", "for one that is no tenant's"
        for other in self._account.contracts:
            if other != tenant:
                for source in self._account.things_of(other, kind):
                    yield self._id, source.examples[0], f"for {other}'s {kind}"
