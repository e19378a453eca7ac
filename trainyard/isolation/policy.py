"""Policy documents as statements that know where they stand, indexed by action so that a proof asks each once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from trainyard.isolation.conditions import (
    Condition,
    Context,
    Truth,
    all_hold,
    glob,
    has_open_variable,
    matches,
    substitute,
)


@dataclass(frozen=True)
class Origin:
    """Where a statement is written."""

    stack: str
    resource: str
    """Logical id."""
    document: str
    """Which of the resource's documents: `PolicyDocument`, `KeyPolicy`, `AssumeRolePolicyDocument`, ..."""
    index: int
    sid: str = ""

    def __str__(self) -> str:
        return f"{self.stack}/{self.resource} {self.document} statement {self.sid or self.index}"


@dataclass(frozen=True)
class Principals:
    """Whom a resource's statement is about."""

    aws: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Federated and canonical users."""

    @classmethod
    def parse(cls, value: Any) -> "Principals":
        """The Principal or NotPrincipal element."""
        if value == "*":
            return cls(aws=("*",))
        parts = {kind: texts(names) for kind, names in value.items()}
        others = tuple(name for kind in ("Federated", "CanonicalUser") for name in parts.get(kind, ()))
        return cls(parts.get("AWS", ()), parts.get("Service", ()), others)


@dataclass(frozen=True)
class Statement:
    """One statement, intrinsics resolved."""

    origin: Origin
    allows: bool
    actions: tuple[str, ...] = ()
    not_actions: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    not_resources: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    principals: Principals | None = None
    not_principals: Principals | None = None
    _covered: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Resources that were asked about, where the answer is the same whoever asks."""
    _covered_actions: dict[str, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def covers_action(self, action: str) -> bool:
        """By Action or NotAction; action names have no case."""
        # Kept, as a resource's: every mutant's policies ask the same statements again.
        covered = self._covered_actions.get(action)
        if covered is None:
            listed = any(action_matches(pattern, action) for pattern in self.not_actions or self.actions)
            covered = self._covered_actions[action] = listed != bool(self.not_actions)
        return covered

    def covers_resource(self, resource: str, context: Context) -> bool:
        """By Resource or NotResource. A trust policy has neither: it is about its role."""
        # Asked millions of times a survey, of the same statements and things: an answer is worked out once, unless it
        # hangs on who asks.
        covered = self._covered.get(resource)
        if covered is None:
            covered = self._covers_resource(resource, context)
            if not self._asks_context:
                self._covered[resource] = covered
        return covered

    def _covers_resource(self, resource: str, context: Context) -> bool:
        for pattern in self.not_resources or self.resources:
            if _resource_matches(pattern, resource, context, self.allows != bool(self.not_resources)):
                return not self.not_resources
        return bool(self.not_resources) or not self.resources

    @cached_property
    def _asks_context(self) -> bool:
        """Whether a pattern has a policy variable."""
        return any("${" in pattern for pattern in (*self.resources, *self.not_resources))

    def holds(self, context: Context) -> Truth:
        """Whether the conditions hold."""
        return all_hold(self.conditions, context) if self.conditions else Truth.YES


@lru_cache(maxsize=200_000)
def action_matches(pattern: str, action: str) -> bool:
    """Whether IAM's pattern matches the action: without case."""
    return pattern == "*" or glob(pattern, ignore_case=True).fullmatch(action) is not None


def _resource_matches(pattern: str, resource: str, context: Context, generous: bool) -> bool:
    """`generous`: what to answer where the caller chooses a variable of the pattern."""
    if "${" not in pattern:
        return matches(pattern, resource)
    if has_open_variable(pattern, context):
        return generous
    text = substitute(pattern, context)
    return text is not None and matches(text, resource)


@dataclass(frozen=True, eq=False)
class Policy:
    """Statements that are judged together, e.g. all of a role's own."""

    statements: tuple[Statement, ...]
    _by_action: dict[str, tuple[tuple[Statement, ...], tuple[Statement, ...]]] = field(default_factory=dict, repr=False)

    def about(self, action: str) -> tuple[tuple[Statement, ...], tuple[Statement, ...]]:
        """The Allows and the Denies that cover an action."""
        found = self._by_action.get(action)
        if found is None:
            covering = [statement for statement in self.statements if statement.covers_action(action)]
            allows = tuple(statement for statement in covering if statement.allows)
            denies = tuple(statement for statement in covering if not statement.allows)
            found = self._by_action[action] = (allows, denies)
        return found

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """What the Allows name, but for everything; where one names what it leaves out, a name that is rarely it."""
        allows = [statement for statement in self.statements if statement.allows]
        named = [pattern for statement in allows for pattern in statement.resources if pattern != "*"]
        return tuple(dict.fromkeys(named + ["*elsewhere" for statement in allows if statement.not_resources]))


def parse_statements(document: Mapping[str, Any], stack: str, resource: str, name: str) -> tuple[Statement, ...]:
    """The statements of one resolved document."""
    items = document.get("Statement", [])
    return tuple(
        _statement(item, Origin(stack, resource, name, index, str(item.get("Sid", ""))))
        for index, item in enumerate([items] if isinstance(items, dict) else items)
    )


def _statement(item: Mapping[str, Any], origin: Origin) -> Statement:
    principals = {
        name: Principals.parse(item[name]) if name in item else None for name in ("Principal", "NotPrincipal")
    }
    return Statement(
        origin,
        allows=item["Effect"] == "Allow",
        actions=texts(item.get("Action", ())),
        not_actions=texts(item.get("NotAction", ())),
        resources=texts(item.get("Resource", ())),
        not_resources=texts(item.get("NotResource", ())),
        conditions=tuple(
            Condition(operator, key, tuple(_text(value) for value in _many(values)))
            for operator, keys in item.get("Condition", {}).items()
            for key, values in keys.items()
        ),
        principals=principals["Principal"],
        not_principals=principals["NotPrincipal"],
    )


def texts(value: Any) -> tuple[str, ...]:
    """One string or many, as IAM lets both be written."""
    return tuple(str(item) for item in _many(value))


def _many(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
