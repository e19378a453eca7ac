"""What the proof asks and must hear a no to: the form of a question, and the examples that it is asked about."""

from dataclasses import dataclass
from functools import lru_cache

from trainyard.isolation.account import DocumentKey, Role, Thing
from trainyard.isolation.evaluator import Caller, Request
from trainyard.isolation.policy import Policy, action_matches, parse_statements

GUARD_RAIL = "a guard-rail"
"""Whom a finding hurts that is no tenant: words, as no tenant's name has a space."""

OUTSIDER = "999999999999"
"""An account that is not the environment's."""

NO_SERVICE = frozenset({"aws:principalservicename"})
"""What no role and no account states: only services have it. A stranger's role has the tags that the stranger
chooses."""

UNTAGGED_ROLE = NO_SERVICE | {"aws:principaltag/*"}
"""Of the account's roles: they have no tags but those of their templates, for no trust policy lets sts:TagSession
through. A thing's tags that nobody states are free: whoever makes or describes it may have tagged it."""


@dataclass(frozen=True)
class Question:
    """A request that must be refused, and whom it would hurt."""

    tenant: str
    """Who asks; empty for somebody who is no tenant's."""
    target: str
    """Whose it is: a tenant, `the platform`, or `a guard-rail`."""
    principal: str
    thing: str
    request: Request
    stated: str = ""
    """What the request says, for a reader."""


@dataclass(frozen=True)
class Scope:
    """Which questions to ask: all, or those that a change of policy can touch."""

    roles: frozenset[str] | None = None
    documents: frozenset[DocumentKey] | None = None
    actions: frozenset[str] | None = None
    """Patterns: no answer about another action can change."""

    def role(self, role: Role) -> bool:
        """Whether everything that the role asks is in scope."""
        return self.roles is None or role.arn in self.roles

    def thing(self, thing: Thing) -> bool:
        """Whether everything that is asked of the thing is in scope."""
        return self.documents is None or thing.document in self.documents

    def document(self, key: DocumentKey | None) -> bool:
        """Whether that document is."""
        return self.documents is None or key in self.documents

    def action(self, action: str) -> bool:
        """Whether a pattern covers the action."""
        return self.actions is None or any(action_matches(pattern, action) for pattern in self.actions)


EVERYWHERE = Scope()


@lru_cache(maxsize=100_000)
def intersection(first: str, second: str) -> str | None:
    """A string that both wildcard patterns match, or None."""
    prefixes = [_literal_prefix(pattern) for pattern in (first, second)]
    shorter = min(map(len, prefixes))
    if prefixes[0][:shorter] != prefixes[1][:shorter]:
        return None
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[int, int, str]] = [(0, 0, "")]
    while stack:
        i, j, made = stack.pop()
        if (i, j) in seen:
            continue
        seen.add((i, j))
        if i == len(first) and j == len(second):
            return made
        left, right = first[i : i + 1], second[j : j + 1]
        if left == "*":
            stack.append((i + 1, j, made))
        if right == "*":
            stack.append((i, j + 1, made))
        if left == "*" and right not in {"", "*"}:
            stack.append((i, j + 1, made + ("x" if right == "?" else right)))
        elif right == "*" and left not in {"", "*"}:
            stack.append((i + 1, j, made + ("x" if left == "?" else left)))
        elif left and right and "*" not in {left, right} and (left == right or "?" in {left, right}):
            both = "x" if left == right == "?" else left if right == "?" else right
            stack.append((i + 1, j + 1, made + both))
    return None


@lru_cache(maxsize=100_000)
def _literal_prefix(pattern: str) -> str:
    ends = [at for at in (pattern.find(char) for char in "*?$") if at >= 0]
    return pattern[: min(ends)] if ends else pattern


def examples(thing: Thing, *policies: Policy | None) -> list[str]:
    """The thing's own examples, and one for each pattern of these policies' Allows that meets the family."""
    if not thing.pattern.endswith("*"):
        return list(thing.examples)
    met = (intersection(pattern, thing.pattern) for policy in policies if policy for pattern in policy.patterns)
    return list(dict.fromkeys([*thing.examples, *(name for name in met if name)]))


def example_of(pattern: str) -> str:
    """A name that the pattern matches."""
    return pattern.replace("*", "x").replace("?", "x")


@lru_cache(maxsize=100)
def somebody(account: str, arn: str = "") -> Caller:
    """Everything allowed by the own policies, no boundary: an administrator of the account, or who has that ARN."""
    statements = parse_statements(
        {"Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}, "", "administrator", "PolicyDocument"
    )
    return Caller(arn or f"arn:aws:iam::{account}:role/Administrator", account, Policy(statements))


@lru_cache(maxsize=1)
def open_door() -> Policy:
    """A bucket policy that lets everybody do everything."""
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "*", "Resource": "*"}
    return Policy(parse_statements({"Statement": everybody}, "", "bucket of another account", "PolicyDocument"))
