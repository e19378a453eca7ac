"""The Condition block of a policy statement, as the IAM user guide documents it ("IAM JSON policy elements:
Condition operators", "Creating a condition with multiple keys or values").

A request states some context keys. What it doesn't state is absent, or, where `free`, at the caller's choice:
then a condition on it is neither true nor false but MAYBE, and the evaluator takes the answer that lets more
through. That makes a denial hold whatever else the request says.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache

Value = str | tuple[str, ...]
"""A context key's value; a tuple where the key is multivalued."""


class Truth(Enum):
    """Whether a statement's conditions hold."""

    NO = 0
    MAYBE = 1
    YES = 2


@dataclass(frozen=True)
class Context:
    """What a request says beside who, what and on what. Keys are lower case: IAM compares them without case."""

    stated: Mapping[str, Value]
    free: bool = False
    """Keys that are not stated are the caller's choice, not absent."""
    absent: frozenset[str] = frozenset()
    """Keys, or with a trailing * families of keys, that are known not to be in the request, free or not."""
    unknown: set[str] = field(default_factory=set, compare=False)
    """Filled by the evaluation: keys that a policy read and of which the request says nothing."""

    def lookup(self, key: str) -> Value | None:
        """The key's value; None where the request has none."""
        return self.stated.get(key.lower())

    def is_open(self, key: str) -> bool:
        """Whether the caller chooses the key; notes the key as unknown where nobody has said."""
        lower = key.lower()
        if _is_absent(lower, self.absent):
            return False
        if not self.free:
            self.unknown.add(lower)
        return self.free


@lru_cache(maxsize=10_000)
def _is_absent(key: str, absent: frozenset[str]) -> bool:
    return key in absent or any(item.endswith("*") and key.startswith(item[:-1]) for item in absent)


@lru_cache(maxsize=200_000)
def glob(pattern: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """IAM's wildcards: `*` any characters, `?` one."""
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in pattern)
    return re.compile("".join(parts), re.DOTALL | (re.IGNORECASE if ignore_case else 0))


def matches(pattern: str, value: str) -> bool:
    """Whether IAM's pattern matches the whole value, with case."""
    return pattern == "*" or glob(pattern).fullmatch(value) is not None


def arn_matches(pattern: str, value: str) -> bool:
    """ArnLike and ArnEquals: each of an ARN's six parts by itself, wildcards included."""
    wanted, given = pattern.split(":", 5), value.split(":", 5)
    if len(wanted) != 6 or len(given) != 6:
        return pattern == "*"
    return all(matches(part, actual) for part, actual in zip(wanted, given, strict=True))


def _number(compare: Callable[[float, float], bool]) -> Callable[[str, str], bool]:
    def run(wanted: str, given: str) -> bool:
        try:
            return compare(float(given), float(wanted))
        except ValueError:
            return False

    return run


def _instant(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _date(compare: Callable[[float, float], bool]) -> Callable[[str, str], bool]:
    def run(wanted: str, given: str) -> bool:
        try:
            return compare(_instant(given), _instant(wanted))
        except ValueError:
            return False

    return run


def _in_network(wanted: str, given: str) -> bool:
    try:
        return ipaddress.ip_address(given) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "equals": lambda given, wanted: given == wanted,
    "lessthan": lambda given, wanted: given < wanted,
    "lessthanequals": lambda given, wanted: given <= wanted,
    "greaterthan": lambda given, wanted: given > wanted,
    "greaterthanequals": lambda given, wanted: given >= wanted,
}

_POSITIVE: dict[str, Callable[[str, str], bool]] = {
    "stringequals": lambda wanted, given: wanted == given,
    "stringequalsignorecase": lambda wanted, given: wanted.lower() == given.lower(),
    "stringlike": matches,
    "bool": lambda wanted, given: wanted.lower() == given.lower(),
    "binaryequals": lambda wanted, given: wanted == given,
    "ipaddress": _in_network,
    "arnequals": arn_matches,
    "arnlike": arn_matches,
    **{f"numeric{name}": _number(compare) for name, compare in _COMPARISONS.items()},
    **{f"date{name}": _date(compare) for name, compare in _COMPARISONS.items()},
}

_NEGATED = {
    "stringnotequals": "stringequals",
    "stringnotequalsignorecase": "stringequalsignorecase",
    "stringnotlike": "stringlike",
    "notipaddress": "ipaddress",
    "arnnotequals": "arnequals",
    "arnnotlike": "arnlike",
    "numericnotequals": "numericequals",
    "datenotequals": "dateequals",
}


class UnknownOperatorError(ValueError):
    """A condition operator that IAM doesn't have: such a policy can't be deployed."""


@dataclass(frozen=True)
class Condition:
    """One operator on one key."""

    operator: str
    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.operator} {self.key} = {' | '.join(self.values)}"

    def holds(self, context: Context) -> Truth:
        """Whether the request satisfies this condition."""
        given = context.lookup(self.key)
        if given is None and context.is_open(self.key):
            return Truth.MAYBE
        if any(has_open_variable(value, context) for value in self.values):
            return Truth.MAYBE
        return Truth.YES if self._decide(given, context) else Truth.NO

    def _decide(self, given: Value | None, context: Context) -> bool:
        read = _read_operator(self.operator)
        if read is None:
            return (given is None) == (self.values[0].lower() == "true")
        quantifier, compare, negated, optional = read
        if given is None:
            # Absent: ForAllValues is true of no values, ForAnyValue false; a single-valued negation is true.
            return optional or quantifier == "forallvalues" or (negated and not quantifier)
        wanted = [text for value in self.values if (text := substitute(value, context)) is not None]

        def one(value: str) -> bool:
            return any(compare(text, value) for text in wanted) != negated

        values = (given,) if isinstance(given, str) else given
        every = quantifier == "forallvalues" or (negated and not quantifier)
        return all(map(one, values)) if every else any(map(one, values))


@lru_cache(maxsize=1_000)
def _read_operator(operator: str) -> tuple[str, Callable[[str, str], bool], bool, bool] | None:
    """Quantifier, comparison, whether its answer is turned round, whether an absent key will do; None: it is Null."""
    name = operator.lower()
    if name == "null":
        return None
    quantifier, _, name = name.rpartition(":")
    optional, name = name.endswith("ifexists"), name.removesuffix("ifexists")
    compare = _POSITIVE.get(_NEGATED.get(name, name))
    if compare is None or quantifier not in {"", "forallvalues", "foranyvalue"}:
        raise UnknownOperatorError(f"{operator} is not a condition operator")
    return quantifier, compare, name in _NEGATED, optional


def all_hold(conditions: Sequence[Condition], context: Context) -> Truth:
    """A statement's conditions together: all must hold."""
    worst = Truth.YES
    for condition in conditions:
        truth = condition.holds(context)
        if truth is Truth.NO:
            return Truth.NO
        if truth is Truth.MAYBE:
            worst = Truth.MAYBE
    return worst


_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_LITERALS = frozenset("*?$")


def has_open_variable(text: str, context: Context) -> bool:
    """Whether the caller chooses what one of the text's policy variables stands for."""
    if "${" not in text:
        return False
    names = (match[1].partition(",")[0].strip() for match in _VARIABLE.finditer(text))
    return any(name not in _LITERALS and context.lookup(name) is None and context.is_open(name) for name in names)


def substitute(text: str, context: Context) -> str | None:
    """Policy variables (`${aws:PrincipalTag/team}`, with an optional default) put in; None where one has no value."""
    if "${" not in text:
        return text
    missing = False

    def value(match: re.Match[str]) -> str:
        nonlocal missing
        name, _, default = (part.strip() for part in match[1].partition(","))
        given = context.lookup(name)
        if name in _LITERALS:
            return name
        if isinstance(given, str):
            return given
        missing = missing or not default
        return default.strip("'")

    result = _VARIABLE.sub(value, text)
    return None if missing else result
