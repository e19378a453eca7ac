"""One of a thing is told in the singular, with its verb."""

import pytest

from trainyard.spec.words import counted, either


@pytest.mark.parametrize(
    ("number", "thing", "told"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2, "process", "2 processes"),
        (1, "process", "1 process"),
        (3, "micro-batch", "3 micro-batches"),
        (2, "copy", "2 copies"),
        (7, "day", "7 days"),
        (1234, "old version", "1,234 old versions"),
        (1.0, "hour", "1 hour"),
        (1.5, "hour", "1.5 hours"),
    ],
)
def test_a_number_of_things(number: float, thing: str, told: str) -> None:
    assert counted(number, thing) == told


def test_the_verb_goes_with_it() -> None:
    assert [either(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]
