"""The Condition block, against the tables of the IAM user guide."""

import pytest

from trainyard.isolation.conditions import (
    Condition,
    Context,
    Truth,
    UnknownOperatorError,
    all_hold,
    arn_matches,
    matches,
    substitute,
)

SUBNETS = "sagemaker:VpcSubnets"


def holds(operator: str, key: str, values: tuple[str, ...], **stated: str | tuple[str, ...]) -> bool:
    context = Context({name.replace("_", ":"): value for name, value in stated.items()})
    return Condition(operator, key, values).holds(context) is Truth.YES


CASES = [
    # operator, policy's values, the request's value (None: absent), whether it holds
    ("StringEquals", ("a", "b"), "b", True),
    ("StringEquals", ("a", "b"), "B", False),
    ("StringEquals", ("a",), None, False),
    ("StringEqualsIgnoreCase", ("A",), "a", True),
    ("StringNotEquals", ("a", "b"), "b", False),
    ("StringNotEquals", ("a", "b"), "c", True),
    ("StringNotEquals", ("a",), None, True),
    ("StringLike", ("acme-*",), "acme-job", True),
    ("StringLike", ("acme-?",), "acme-job", False),
    ("StringNotLike", ("acme-*",), "globex-job", True),
    ("StringEqualsIfExists", ("a",), None, True),
    ("StringEqualsIfExists", ("a",), "b", False),
    ("StringNotEqualsIfExists", ("a",), "a", False),
    ("NumericGreaterThan", ("3600",), "3601", True),
    ("NumericGreaterThan", ("3600",), "3600", False),
    ("NumericGreaterThan", ("3600",), None, False),
    ("NumericLessThanEquals", ("3600",), "3600.0", True),
    ("NumericNotEquals", ("1",), "1.0", False),
    ("NumericEquals", ("1",), "one", False),
    ("DateLessThan", ("2026-01-02T00:00:00Z",), "2026-01-01T23:59:59Z", True),
    ("DateGreaterThan", ("2026-01-02T00:00:00Z",), "1700000000", False),
    ("Bool", ("true",), "True", True),
    ("Bool", ("true",), None, False),
    ("BoolIfExists", ("true",), None, True),
    ("IpAddress", ("10.0.0.0/8",), "10.1.2.3", True),
    ("IpAddress", ("10.0.0.0/8",), "11.1.2.3", False),
    ("NotIpAddress", ("10.0.0.0/8",), "11.1.2.3", True),
    ("ArnLike", ("arn:aws:s3:::bucket/*",), "arn:aws:s3:::bucket/a/b", True),
    ("ArnEquals", ("arn:aws:iam::*:role/x",), "arn:aws:iam::123456789012:role/x", True),
    ("ArnNotEquals", ("arn:aws:kms:r:1:key/a",), "arn:aws:kms:r:1:key/b", True),
    ("ArnNotEquals", ("arn:aws:kms:r:1:key/a",), None, True),
    ("Null", ("true",), None, True),
    ("Null", ("true",), "x", False),
    ("Null", ("false",), "x", True),
    ("Null", ("false",), None, False),
]


@pytest.mark.parametrize(("operator", "values", "given", "expected"), CASES)
def test_an_operator_on_a_single_value(
    operator: str, values: tuple[str, ...], given: str | None, expected: bool
) -> None:
    stated = {} if given is None else {"x_key": given}
    assert holds(operator, "x:Key", values, **stated) is expected


SETS = [
    ("ForAllValues:StringEquals", ("a", "b"), ("a", "b"), True),
    ("ForAllValues:StringEquals", ("a", "b"), ("a", "c"), False),
    ("ForAllValues:StringEquals", ("a",), None, True),  # the trap: true of an absent key
    ("ForAnyValue:StringEquals", ("a",), ("c", "a"), True),
    ("ForAnyValue:StringEquals", ("a",), None, False),
    ("ForAnyValue:StringNotEquals", ("a",), ("a",), False),
    ("ForAnyValue:StringNotEquals", ("a",), ("a", "c"), True),
    ("ForAnyValue:StringNotEquals", ("a",), None, False),
    ("ForAllValues:StringNotEquals", ("a",), ("b", "c"), True),
    ("ForAllValues:StringNotEquals", ("a",), ("b", "a"), False),
    ("StringNotEquals", ("a",), ("b", "c"), True),
    ("StringNotEquals", ("a",), ("b", "a"), False),  # one that is refused among others that aren't is refused
    ("StringNotEquals", ("a",), ("a", "b"), False),
]


@pytest.mark.parametrize(("operator", "values", "given", "expected"), SETS)
def test_an_operator_on_a_set(
    operator: str, values: tuple[str, ...], given: tuple[str, ...] | None, expected: bool
) -> None:
    stated = {} if given is None else {"sagemaker_vpcsubnets": given}
    assert holds(operator, SUBNETS, values, **stated) is expected


def test_an_operator_that_iam_lacks_is_no_condition() -> None:
    with pytest.raises(UnknownOperatorError, match="StringEqual is not"):
        holds("StringEqual", "x:Key", ("a",), x_key="a")


def test_all_conditions_must_hold() -> None:
    both = (Condition("StringEquals", "x:A", ("1",)), Condition("StringEquals", "x:B", ("2",)))
    assert all_hold(both, Context({"x:a": "1", "x:b": "2"})) is Truth.YES
    assert all_hold(both, Context({"x:a": "1", "x:b": "3"})) is Truth.NO


def test_a_key_at_the_callers_choice_decides_nothing() -> None:
    condition = Condition("StringEquals", "x:Key", ("a",))
    assert condition.holds(Context({}, free=True)) is Truth.MAYBE
    assert condition.holds(Context({}, free=True, absent=frozenset({"x:key"}))) is Truth.NO
    assert condition.holds(Context({"x:key": "b"}, free=True)) is Truth.NO
    tag = Condition("StringEquals", "aws:PrincipalTag/team", ("a",))
    assert tag.holds(Context({}, free=True, absent=frozenset({"aws:principaltag/*"}))) is Truth.NO
    assert tag.holds(Context({}, free=True, absent=frozenset({"aws:requesttag/*"}))) is Truth.MAYBE, "of other tags"


def test_a_key_that_nobody_stated_is_noted() -> None:
    context = Context({"x:a": "1"}, absent=frozenset({"x:b"}))
    for key in ("x:A", "x:B", "x:Typo"):
        Condition("StringEquals", key, ("1",)).holds(context)
    assert context.unknown == {"x:typo"}


def test_wildcards_span_what_iam_lets_them() -> None:
    assert matches("arn:aws:s3:::b/*", "arn:aws:s3:::b/x/y")
    assert not matches("arn:aws:s3:::b/*", "arn:aws:s3:::bb/x")
    assert matches("a?c", "abc")
    assert not matches("a?c", "ac")
    assert arn_matches("arn:aws:kms:*:123456789012:key/*", "arn:aws:kms:us-east-1:123456789012:key/k")
    assert not arn_matches("arn:aws:kms:*:key/k", "arn:aws:kms:us-east-1:123456789012:key/k")  # * stays in its part
    group = "arn:aws:logs:us-east-1:123456789012:log-group:/aws/sagemaker"  # a resource that has colons of its own
    assert arn_matches("arn:aws:logs:*:*:log-group:/aws/*", f"{group}:log-stream:x")
    assert not arn_matches("arn:aws:logs:*:*:log-group:/acme/*", f"{group}:log-stream:x")


def test_policy_variables() -> None:
    context = Context({"aws:principaltag/team": "acme"})
    assert substitute("home/${aws:PrincipalTag/team}/*", context) == "home/acme/*"
    assert substitute("${aws:username, 'nobody'}", context) == "nobody"
    assert substitute("${aws:username}", context) is None
    assert substitute("a${*}b${$}", context) == "a*b$"
