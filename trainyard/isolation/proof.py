"""The proof itself: every question asked, and what the answers say."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainyard.isolation.account import Account, build
from trainyard.isolation.catalogue import LISTINGS
from trainyard.isolation.conditions import Context
from trainyard.isolation.crossings import Crossings
from trainyard.isolation.evaluator import Decision, Request, decide
from trainyard.isolation.needs import Need, Needs
from trainyard.isolation.places import Wire
from trainyard.isolation.questions import EVERYWHERE, GUARD_RAIL, Question, Scope
from trainyard.isolation.templates import Deployment, Template, synthesize
from trainyard.isolation.wiring import wires
from trainyard.spec.platform import EnvironmentSpec, load_environment


@dataclass(frozen=True)
class Finding:
    """One request with the wrong answer."""

    tenant: str
    """Whose principal asked; empty where it is no tenant's."""
    principal: str
    action: str
    resource: str
    target: str
    """Whom it would hurt: a tenant, the platform, or a guard-rail; for an own need the tenant itself."""
    stated: str
    """What the request says of itself, or what it is for."""
    decided_by: tuple[str, ...]
    """Statements that allowed it, by stack, resource and Sid; or why it was denied."""

    def __str__(self) -> str:
        stated = f" ({self.stated})" if self.stated else ""
        who = f"{self.tenant}'s {self.principal}" if self.tenant else self.principal
        return f"{who}: {self.action} on {self.resource} of {self.target}{stated}: {'; '.join(self.decided_by)}"


@dataclass(frozen=True)
class Proof:
    """What was asked, and every wrong answer. All five lists empty: isolation is proven, and tenants can work."""

    environment: str
    tenants: int
    pairs: int
    """Ordered pairs of tenants."""
    requests: int
    allowed_cross_tenant: tuple[Finding, ...]
    denied_own: tuple[Finding, ...]
    open_guard_rails: tuple[Finding, ...]
    """What no tenant's role may do even to its own: raise its rights, start unchecked compute, carry data out."""
    foreign_wires: tuple[Wire, ...]
    """What a tenant's resources are connected with, or let in, that isn't its own, whatever the policies say."""
    unknown_keys: tuple[str, ...]
    """Condition keys that a policy reads and of which the proof knows nothing."""
    unscopable: tuple[str, ...] = ()
    """Listings that a tenant's role has and IAM can't scope: names of other tenants' things show there."""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        requests = self.allowed_cross_tenant or self.denied_own or self.open_guard_rails
        return not (requests or self.foreign_wires or self.unknown_keys)

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {"holds": self.holds, **asdict(self)}


@dataclass(frozen=True)
class Site:
    """An environment, synthesized and resolved."""

    account: Account
    seconds: Mapping[str, float]
    wires: tuple[Wire, ...] = ()
    """What is wrongly connected: it takes the templates, which the account no longer has."""


def open_site(environment_file: Path, checkout: Path) -> Site:
    """Synthesize and resolve; InputError where the file is wrong."""
    environment = load_environment(environment_file)
    start = time.perf_counter()
    templates = synthesize(environment_file, checkout)
    synthesized = time.perf_counter()
    site = resolve_templates(templates, environment)
    return replace(site, seconds={"synthesis": synthesized - start, "resolution": time.perf_counter() - synthesized})


def resolve_templates(templates: Mapping[str, Template], environment: EnvironmentSpec) -> Site:
    """A site from templates that are there already, by stack name."""
    deployment = Deployment.of(templates, environment)
    account = build(deployment, environment)
    return Site(account, {}, wires(deployment, account))


def prove(site: Site) -> Proof:
    """Ask everything, once."""
    start = time.perf_counter()
    environment = site.account.environment
    answers = examine(site.account)
    tenants = len(environment.tenants)
    seconds = {**site.seconds, "evaluation": time.perf_counter() - start}
    return Proof(
        environment.name,
        tenants,
        tenants * (tenants - 1),
        answers.requests,
        tuple(answers.crossed),
        tuple(answers.denied),
        tuple(answers.unruly),
        site.wires,
        tuple(sorted(answers.unknown)),
        unscopable(site.account),
        {name: round(value, 2) for name, value in seconds.items()},
    )


@dataclass
class Answers:
    """What `examine` found."""

    requests: int = 0
    crossed: list[Finding] = field(default_factory=list)
    denied: list[Finding] = field(default_factory=list)
    unruly: list[Finding] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    @property
    def wrong(self) -> list[Finding]:
        """All findings."""
        return [*self.crossed, *self.unruly, *self.denied]


def examine(account: Account, scope: Scope = EVERYWHERE, needs: Iterable[str] | None = None) -> Answers:
    """Ask every question in scope and every need (of the tenants given, or of all)."""
    answers = Answers()
    for question in Crossings(account, scope).all():
        answers.requests += 1
        decision = decide(question.request)
        if decision.allowed:
            found = _crossing(question, decision)
            (answers.unruly if question.target == GUARD_RAIL else answers.crossed).append(found)
    for tenant in account.environment.tenants if needs is None else needs:
        for need in Needs(account, tenant).all():
            if not scope.action(need.request.action):
                continue
            answers.requests += 1
            decision = decide(need.request)
            answers.unknown |= need.request.context.unknown
            if not decision.allowed:
                answers.denied.append(_denial(need, decision))
    return answers


def _crossing(question: Question, decision: Decision) -> Finding:
    request = question.request
    by = tuple(str(origin) for origin in decision.origins)
    return Finding(
        question.tenant, question.principal, request.action, request.resource, question.target, question.stated, by
    )


def _denial(need: Need, decision: Decision) -> Finding:
    request = need.request
    return Finding(
        need.tenant, need.principal, request.action, request.resource, need.tenant, need.what, (decision.reason,)
    )


def unscopable(account: Account) -> tuple[str, ...]:
    """The listings that some tenant's role has, `action (roles)`."""
    found: dict[str, set[str]] = {}
    for tenant in account.environment.tenants:
        for role in account.roles_of(tenant):
            for action in LISTINGS:
                request = Request(account.caller(role), action, "*", Context({}, free=True))
                if decide(request).allowed:
                    found.setdefault(action, set()).add(role.label)
    return tuple(f"{action} ({', '.join(sorted(roles))})" for action, roles in sorted(found.items()))
