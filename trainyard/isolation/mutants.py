"""Does the proof see? Every statement of one tenant's policies, and of the platform's, is broken in turn, and the proof
asked again.

A mutant that opens something is caught: the proof names what it opened. One that opens nothing survives, and `why`
finds the guard that still holds: the one without which the mutant would open what the untouched policies wouldn't.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainyard.errors import InputError
from trainyard.isolation.account import Account, DocumentKey, Role
from trainyard.isolation.policy import Origin, Principals, Statement
from trainyard.isolation.proof import Finding, examine
from trainyard.isolation.questions import Scope

REFUSES_MORE = "it only refuses more, and nothing that the tenant needs"
_NAMED_ACCOUNT = Principals(aws=("arn:aws:iam::888888888888:root",))
"""Which the proof can know from the policy alone."""
OWN_ONLY = "it reaches nothing but the tenant's own: no guard that is lifted makes it open more"


@dataclass(frozen=True)
class Mutant:
    """One break."""

    what: str
    origin: Origin
    documents: Mapping[DocumentKey, tuple[Statement, ...]]
    unbounded: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.origin}: {self.what}"


@dataclass(frozen=True)
class Verdict:
    """What the proof says of a mutant."""

    mutant: Mutant
    opened: tuple[Finding, ...]
    """What it lets through that was shut."""
    shut: tuple[Finding, ...]
    """Own needs that it refuses."""
    reason: str = ""
    """Of a survivor: why nothing opened."""

    @property
    def caught(self) -> bool:
        """Whether the proof fails because of it."""
        return bool(self.opened or self.shut)


@dataclass(frozen=True)
class Survey:
    """All mutants of one tenant."""

    tenant: str
    verdicts: tuple[Verdict, ...]

    @property
    def caught(self) -> tuple[Verdict, ...]:
        """Those that the proof finds."""
        return tuple(verdict for verdict in self.verdicts if verdict.caught)

    @property
    def survivors(self) -> tuple[Verdict, ...]:
        """Those that open and shut nothing, with the reason."""
        return tuple(verdict for verdict in self.verdicts if not verdict.caught)

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "tenant": self.tenant,
            "mutants": len(self.verdicts),
            "caught": len(self.caught),
            "survivors": [{"mutant": str(item.mutant), "reason": item.reason} for item in self.survivors],
        }


def survey(account: Account) -> Survey:
    """Every mutant of the first tenant's policies: the others' are the same by construction."""
    tenants = list(account.environment.tenants)
    if len(tenants) < 2:
        raise InputError(
            f"environment {account.environment.name} has one tenant, so no policy can be swapped for another's; "
            "give an environment with two"
        )
    trial = Trial(account, tenants[0])
    return Survey(tenants[0], tuple(map(trial.judge, mutants(account, tenants[0], tenants[1]))))


def mutants(account: Account, tenant: str, intruder: str) -> Iterator[Mutant]:
    """Every break of every statement in the tenant's stacks and the platform's; principals are swapped for the roles of
    `intruder`, and for another account."""
    prefix, platform = (
        f"trainyard-{account.environment.name}-{tenant}-",
        f"trainyard-{account.environment.name}-platform",
    )
    contract = account.contracts[intruder]
    others = Principals(aws=(contract.roles.job, contract.roles.launcher, contract.roles.auditor))
    for key, statements in account.documents.items():
        if key[0].startswith(prefix) or key[0] == platform:
            for index, statement in enumerate(statements):
                for what, changed in _breaks(statement, others, intruder):
                    rest = (*statements[:index], *((changed,) if changed else ()), *statements[index + 1 :])
                    yield Mutant(what, statement.origin, {key: rest})
    for role in account.roles_of(tenant):
        if role.boundary:
            stack, logical_id, _ = role.trust
            yield Mutant(
                "boundary lifted", Origin(stack, logical_id, "PermissionsBoundary", 0), {}, frozenset({role.arn})
            )


def _breaks(statement: Statement, others: Principals, intruder: str) -> Iterator[tuple[str, Statement | None]]:
    if not statement.allows:
        yield "removed", None
    for condition in statement.conditions:
        rest = tuple(item for item in statement.conditions if item is not condition)
        yield f"condition dropped: {condition}", replace(statement, conditions=rest)
    if len(statement.conditions) > 1:
        yield "all conditions dropped", replace(statement, conditions=())
    if statement.resources not in {(), ("*",)} or statement.not_resources:
        yield "resource widened to *", replace(statement, resources=("*",), not_resources=())
    if statement.actions != ("*",):
        yield "action widened to *", replace(statement, actions=("*",), not_actions=())
    if statement.principals is not None:
        yield f"principal swapped for {intruder}'s roles", replace(statement, principals=others)
        yield "principal swapped for another account", replace(statement, principals=_NAMED_ACCOUNT)
        if statement.principals.aws != ("*",):
            yield "principal widened to *", replace(statement, principals=Principals(aws=("*",)))


class Trial:
    """Judges mutants of one tenant against the untouched account."""

    def __init__(self, account: Account, tenant: str) -> None:
        self._account, self._tenant = account, tenant
        self._guards = _guards(account)
        self._statements = {item.origin: item for items in account.documents.values() for item in items}
        self._known: dict[tuple[str, Scope], frozenset[Finding]] = {}

    def judge(self, mutant: Mutant) -> Verdict:
        """Whether the proof catches it, and why not where it doesn't."""
        scope = self._scope(mutant)
        account = self._account.changed(mutant.documents, mutant.unbounded)
        answers = examine(account, scope, [self._tenant])
        opened = self._new(frozenset([*answers.crossed, *answers.unruly]), self._findings("", self._account, scope))
        verdict = Verdict(mutant, opened, tuple(answers.denied))
        return verdict if verdict.caught else replace(verdict, reason=self._why(mutant, scope))

    def _scope(self, mutant: Mutant) -> Scope:
        keys = frozenset(mutant.documents)
        arns = {role.arn for role in self._account.roles if keys & {*role.identity, role.boundary}}
        return Scope(frozenset(arns) | mutant.unbounded, keys, self._actions(mutant))

    def _actions(self, mutant: Mutant) -> frozenset[str] | None:
        """Patterns of the only actions about which an answer can change: those of the statement, broken or whole."""
        touched = [self._statements.get(mutant.origin)]
        touched += [item for items in mutant.documents.values() for item in items if item.origin == mutant.origin]
        if any(item is None or item.not_actions for item in touched):
            return None
        patterns = frozenset(pattern for item in touched if item for pattern in item.actions)
        return None if "*" in patterns else patterns

    def _findings(self, guard: str, account: Account, scope: Scope) -> frozenset[Finding]:
        """What the untouched account, a guard lifted, lets through."""
        if (guard, scope) not in self._known:
            answers = examine(account, scope, [])
            self._known[guard, scope] = frozenset([*answers.crossed, *answers.unruly])
        return self._known[guard, scope]

    def _new(self, found: frozenset[Finding], known: frozenset[Finding]) -> tuple[Finding, ...]:
        before = {_request(item) for item in known}
        return tuple(sorted((item for item in found if _request(item) not in before), key=str))

    def _why(self, mutant: Mutant, scope: Scope) -> str:
        broken = self._statements.get(mutant.origin)
        if broken is not None and not broken.allows and mutant.what != "removed" and "principal" not in mutant.what:
            return REFUSES_MORE
        for guard, account in self._guards.items():
            untouched = self._findings(guard, account, scope)
            documents = {
                key: _lifted(guard, items) if account.documents[key] is not self._account.documents[key] else items
                for key, items in mutant.documents.items()
            }
            answers = examine(account.changed(documents, mutant.unbounded), scope, [])
            if self._new(frozenset([*answers.crossed, *answers.unruly]), untouched):
                return f"still refused by {guard}"
        return OWN_ONLY


def _request(finding: Finding) -> tuple[str, ...]:
    return (finding.tenant, finding.principal, finding.action, finding.resource, finding.target, finding.stated)


ROLES_POLICIES = "what the roles' own policies allow"
BOUNDARIES = "the permissions boundary"
DENIALS = "another explicit Deny"
CONDITIONS = "a condition of the Allow"
RESOURCES = "the resources' own policies"


def _guards(account: Account) -> dict[str, Account]:
    """The account with one guard lifted everywhere, by the guard's name, and with two where one alone never shows."""
    roles = [role for role in account.roles if role.tenant]
    identity = {key for role in roles for key in role.identity}
    bounded = frozenset(role.arn for role in roles if role.boundary)
    limits = {role.boundary for role in roles if role.boundary}
    resources = {thing.document for thing in account.things if thing.document}

    def lift(guard: str, keys: set[DocumentKey], base: Account = account) -> Account:
        return base.changed({key: _lifted(guard, base.documents[key]) for key in keys})

    without_boundary = account.changed({}, bounded)
    return {
        BOUNDARIES: without_boundary,
        CONDITIONS: lift(CONDITIONS, identity),
        DENIALS: lift(DENIALS, identity | limits),
        ROLES_POLICIES: _administrators(account, roles),
        RESOURCES: lift(RESOURCES, resources),
        f"{BOUNDARIES} and {ROLES_POLICIES}": _administrators(without_boundary, roles),
        f"{BOUNDARIES} and {RESOURCES}": lift(RESOURCES, resources, without_boundary),
        f"{CONDITIONS} and {DENIALS}": lift(DENIALS, identity | limits, lift(CONDITIONS, identity)),
    }


def _administrators(account: Account, roles: list[Role]) -> Account:
    """Every tenant's role may do everything, as far as its own policies say."""
    documents = {}
    for role in roles:
        if role.identity:
            key = role.identity[0]
            allowed = Statement(Origin(*key, 999, "Administrator"), allows=True, actions=("*",), resources=("*",))
            documents[key] = (*account.documents[key], allowed)
    return account.changed(documents)


def _lifted(guard: str, statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """A document without the guard."""
    if DENIALS in guard:
        statements = tuple(item for item in statements if item.allows)
    if CONDITIONS in guard:
        statements = tuple(replace(item, conditions=()) if item.allows else item for item in statements)
    if RESOURCES in guard and statements:
        # The account is let in: what its roles' own policies say then decides alone.
        own = Principals(aws=tuple({name for item in statements for name in _accounts(item)}) or ("*",))
        first = statements[0].origin
        allowed = Statement(Origin(first.stack, first.resource, first.document, 999), True, ("*",), principals=own)
        statements = (*statements, allowed)
    return statements


def _accounts(statement: Statement) -> Iterator[str]:
    for name in statement.principals.aws if statement.principals else ():
        parts = name.split(":")
        if len(parts) > 4 and parts[4].isdigit():
            yield f"arn:aws:iam::{parts[4]}:root"
