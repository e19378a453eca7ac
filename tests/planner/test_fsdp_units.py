"""Which layers FSDP gathers at once, counted on fingers."""

import dataclasses

import pytest

from trainyard.planner.fsdp_units import Units, unit_ends

FIVE = Units(
    num_layers=5, num_routed=3, dense=1.0, routed=10.0, ends=None, num_ahead=0, keeps_gathered=False
)  # from the end: 10, 10, 10, 1, 1
TWOS = dataclasses.replace(FIVE, ends=(1, 3, 5))  # 10 | 10, 10 | 1, 1


def test_a_unit_ends_where_it_has_enough() -> None:
    assert unit_ends([10.0] * 5, 1) == (1, 2, 3, 4, 5)
    assert unit_ends([10.0] * 5, 20) == (1, 3, 5)  # the last, incomplete one is the stage's end
    assert unit_ends([10.0] * 5, 1000) == (5,)
    assert unit_ends([1.0, 1.0, 10.0, 10.0, 10.0], 12) == (2, 5)
    assert unit_ends([], 12) == ()


@pytest.mark.parametrize(
    ("units", "number", "gathered"),
    [(FIVE, 0, 20), (FIVE, 2, 11), (FIVE, 4, 1), (TWOS, 0, 30), (TWOS, 1, 22), (TWOS, 2, 22), (TWOS, 4, 2)],
)
def test_in_a_backward_pass_the_next_unit_is_there_too(units: Units, number: int, gathered: float) -> None:
    assert units.in_backward(number) == gathered


def test_as_many_as_are_asked_for_ahead() -> None:
    ahead = dataclasses.replace(FIVE, num_ahead=2)
    assert [ahead.in_backward(number) for number in range(5)] == [30, 21, 12, 2, 1]
    assert [ahead.running(number) for number in range(5)] == [20, 30, 40, 22, 13]
    assert [ahead.arriving(number) for number in range(5)] == [30, 40, 31, 13, 2]


def test_a_unit_is_put_together_beside_what_the_one_before_was_gathered_into() -> None:
    assert [FIVE.arriving(number) for number in range(5)] == [30, 30, 21, 3, 2]
    assert [FIVE.running(number) for number in range(5)] == [20, 20, 20, 2, 2]
    assert [TWOS.arriving(number) for number in range(5)] == [40, 42, 42, 4, 4]
    kept = dataclasses.replace(FIVE, keeps_gathered=True)
    assert [kept.arriving(number) for number in range(5)] == [52, 42, 23, 4, 2]
    assert [dataclasses.replace(FIVE, copied=5.0).arriving(number) for number in (0, 3)] == [35, 3]


def test_in_a_forward_pass_the_last_units_or_the_first_one_are_the_dearest() -> None:
    assert FIVE.dearest_in_forward == [0, 1, 4]
    assert TWOS.dearest_in_forward == [0, 1, 3]
    assert dataclasses.replace(FIVE, num_ahead=2).dearest_in_forward == [0, 1, 2, 3, 4]
    assert dataclasses.replace(FIVE, num_layers=0, num_routed=0).dearest_in_forward == []


def test_what_is_kept_is_let_go_unit_by_unit() -> None:
    kept = dataclasses.replace(TWOS, keeps_gathered=True)
    assert [kept.in_backward(number) for number in range(5)] == [32, 22, 22, 2, 2]
    assert (kept.after_forward, TWOS.after_forward) == (32, 0)


def test_gradients_of_a_unit_are_reduced_when_all_are_made() -> None:
    assert [TWOS.made_above(number) for number in range(5)] == [0, 0, 10, 0, 1]
    assert [TWOS.above(number) for number in range(5)] == [0, 10, 10, 20, 20]
    assert [TWOS.num_reduced(number) for number in range(5)] == [0, 1, 1, 3, 3]


def test_only_ends_of_the_first_and_last_units_can_be_the_worst() -> None:
    assert FIVE.dearest == [0, 1, 3, 4]
    assert TWOS.dearest == [0, 1, 2, 3, 4]
    one = dataclasses.replace(FIVE, num_layers=1, num_routed=1)
    assert one.dearest == [0]
    assert dataclasses.replace(FIVE, num_layers=40, ends=tuple(range(4, 41, 4))).dearest == [0, 3, 4, 7, 32, 35, 36, 39]
    assert dataclasses.replace(FIVE, num_layers=0, num_routed=0).dearest == []
