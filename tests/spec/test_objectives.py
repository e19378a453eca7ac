"""A tenant's own objectives: what they change, what they leave, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.spec.base import parse
from trainyard.spec.meters import BURNS, OBJECTIVES, Objective
from trainyard.spec.objectives import LEAST_TARGET, MOST_TARGET, ObjectivesSpec


def applied(content: dict[str, Any]) -> dict[str, Objective]:
    return {one.name: one for one in parse(ObjectivesSpec, content, "x").applied()}


def test_without_own_limits_all_is_everybodys() -> None:
    assert ObjectivesSpec().applied() == OBJECTIVES and ObjectivesSpec().own() == ()
    same = {"goodput": {"least": 0.8}, "queue": {}, "start": {"most_seconds": 300, "target": 0.99}}
    assert parse(ObjectivesSpec, same, "x").own() == (), "who states everybody's limit has no other"


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_a_limit_and_a_target_are_the_objectives_own_and_nobody_elses(objective: Objective) -> None:
    limit = 2 * objective.limit if objective.is_upper else objective.limit / 2
    field = "most_seconds" if objective.is_upper else "least"
    found = applied({objective.name.replace("-", "_"): {field: limit, "target": 0.97}})
    assert (found[objective.name].limit, found[objective.name].target) == (limit, 0.97)
    # A launch is a queue and a start: it moves with them.
    moved = {objective.name, *({"launch"} if objective.name in ("queue", "start") else set())}
    assert {one.name for one in OBJECTIVES if found[one.name] != one} == moved


def test_a_launch_moves_with_queue_and_start_until_it_is_stated() -> None:
    longer = {"queue": {"most_seconds": 14_400}, "start": {"most_seconds": 200}}
    assert applied(longer)["launch"].limit == 4200 + (14_400 - 3600) + (200 - 300)
    assert applied({**longer, "launch": {"most_seconds": 5000}})["launch"].limit == 5000


def test_who_is_woken_reads_the_limit_that_rang() -> None:
    assert "a job waited over an hour for" in applied({})["queue"].advice
    for seconds, words in (
        (60, "a minute"),
        (5400, "90 minutes"),
        (14_400, "4 hours"),
        (90.5, "90.5 seconds"),
        (1_234_567, "1234567 seconds"),
    ):
        assert f"a job waited over {words} for" in applied({"queue": {"most_seconds": seconds}})["queue"].advice
    assert "below 72.5 % of its plan's" in applied({"throughput": {"least": 0.725}})["throughput"].advice


@pytest.mark.parametrize("target", [LEAST_TARGET, MOST_TARGET])
def test_every_target_that_is_taken_can_ring(target: float) -> None:
    """CloudWatch refuses an alarm that wants more bad periods than it looks at."""
    (objective,) = parse(ObjectivesSpec, {"goodput": {"target": target}}, "x").own()
    for burn in BURNS:
        bad, num_periods = burn.bad_periods(objective)
        assert 2 <= bad <= num_periods


def test_a_target_beyond_the_highest_would_change_no_alarm() -> None:
    def alarms(target: float) -> list[tuple[int, int]]:
        return [burn.bad_periods(replace(OBJECTIVES[0], target=target)) for burn in BURNS]

    assert alarms(MOST_TARGET) != alarms(0.995) == alarms(0.999) == alarms(0.9999)
    fast = BURNS[0].rate_at_alarm
    assert fast(replace(OBJECTIVES[0], target=0.95)) == pytest.approx(9 / 12 / 0.05)
    assert fast(replace(OBJECTIVES[0], target=MOST_TARGET)) == pytest.approx(2 / 12 / 0.006), "not the 14.4 asked for"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"checkpoint-age": {}}, "checkpoint-age: unknown key, did you mean 'checkpoint_age'?"),
        ({"queue": {"least": 0.5}}, r"queue.least: unknown key, .*allowed: most_seconds, target"),
        ({"queue": 3600}, "queue: input should be a mapping of settings"),
        ({"goodput": {"least": 80}}, r"goodput.least: .*less than or equal to 1 .*given: 80"),
        ({"start": {"most_seconds": 0}}, r"start.most_seconds: .*greater than 0 .*given: 0"),
        ({"recovery": {"target": 0.9}}, r"recovery.target: .*greater than or equal to 0.94 .*given: 0.9"),
        ({"recovery": {"target": 1}}, r"recovery.target: .*less than or equal to 0.994 .*given: 1"),
        ({"start": {"most_seconds": True}}, r"start.most_seconds: input should be a valid number, .*given: 'true'"),
        ({"goodput": {"least": True}}, r"goodput.least: input should be a valid number, .*given: 'true'"),
        ({"goodput": {"target": True}}, r"goodput.target: input should be a valid number, .*given: 'true'"),
    ],
)
def test_what_is_no_objective_is_refused_in_one_line(content: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=f"^x: {told}") as caught:
        parse(ObjectivesSpec, content, "x")
    assert "\n" not in str(caught.value)
