"""Which failures are started again, after which pause, and which end the job with a diagnosis: the rules alone."""

from collections.abc import Callable

import pytest
from trainer.host.hosts import judged
from trainer.host.recovery import LONGEST_BACKOFF_SECONDS, Ending, Restart, RestartPolicy

from trainyard.spec.job import RecoverySpec


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def policy(clock: Clock | None = None, **settings: float) -> Callable[[Ending], Restart | Ending]:
    return RestartPolicy(RecoverySpec.model_validate(settings), clock or Clock()).judge


def died(step: int) -> Ending:
    """A rank that was killed after that step."""
    return Ending(1, f"rank {step % 4} on algo-1 was killed by SIGKILL", step=step)


def raised(step: int, words: str = "ValueError: row 17 is broken") -> Ending:
    return Ending(1, f"rank {step % 4} on algo-1: {words}", step=step, has_spoken=True)


def test_pauses_double_within_the_window_up_to_a_limit() -> None:
    judge = policy(max_restarts=12, backoff_seconds=2)
    orders = [judge(died(step)) for step in range(10, 20)]
    assert all(isinstance(order, Restart) for order in orders)
    pauses = [order.delay_seconds for order in orders if isinstance(order, Restart)]
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, LONGEST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS]
    assert [order.number for order in orders if isinstance(order, Restart)] == list(range(1, 11))


def test_the_budget_is_of_a_window_and_comes_back_with_time() -> None:
    clock = Clock()
    judge = policy(clock, max_restarts=2, window_minutes=10, backoff_seconds=1)
    assert isinstance(judge(died(5)), Restart)
    clock.now += 300
    assert isinstance(judge(died(6)), Restart)
    spent = judge(died(7))
    assert isinstance(spent, Ending) and spent.exit_code == 1
    assert spent.reason.endswith("; 2 restarts within 10 minutes are spent (recovery.max_restarts)")
    clock.now += 301  # the first restart lies outside of the window now, the second within
    again = judge(died(8))
    assert isinstance(again, Restart) and (again.number, again.delay_seconds) == (3, 2)


def test_time_gives_no_restart_back_that_came_no_further() -> None:
    """A job that fails an hour and more after each start, somewhere before its next checkpoint, never at one step."""
    clock = Clock()
    judge = policy(clock, max_restarts=3, window_minutes=60)

    def failed(step: int) -> Restart | Ending:
        clock.now += 3601
        return judge(died(step))

    assert all(isinstance(failed(step), Restart) for step in (100, 104, 103, 101, 105, 102, 104))
    ended = failed(103)
    assert isinstance(ended, Ending)
    assert ended.reason.endswith(
        "; 3 restarts in a row came no further than step 105, and are spent (recovery.max_restarts)"
    )
    judge = policy(clock, max_restarts=3, window_minutes=60)
    assert all(isinstance(failed(step), Restart) for step in range(100, 2000, 50)), "a month's job may fail each day"


@pytest.mark.parametrize("step", [0, 6])
def test_the_same_error_at_the_same_step_is_the_programs(step: int) -> None:
    judge = policy(max_restarts=9)
    assert isinstance(judge(raised(step)), Restart)
    # Ranks and rows differ from one time to the next: numbers are no other words.
    ended = judge(raised(step, "ValueError: row 9 is broken"))
    where = f"after step {step}" if step else "before the first step is made"
    assert isinstance(ended, Ending), "it would come back for ever"
    assert f"; twice in a row {where} with the same error, so another restart can't help" in ended.reason


def test_three_failures_at_one_step_are_enough_whatever_they_say() -> None:
    judge = policy(max_restarts=9)
    assert isinstance(judge(died(6)), Restart) and isinstance(judge(raised(6)), Restart)
    ended = judge(raised(6, "OSError: the disk is gone"))
    assert isinstance(ended, Ending) and "three times in a row after step 6" in ended.reason


def test_progress_is_no_loop() -> None:
    judge = policy(max_restarts=9)
    assert all(isinstance(judge(raised(step)), Restart) for step in (3, 4, 3, 4, 5))


@pytest.mark.parametrize(
    ("settings", "failure"),
    [({"max_restarts": 0}, died(3)), ({"max_restarts": 9}, Ending(2, "the job's input is wrong"))],
)
def test_what_is_not_to_be_started_again_ends_as_it_is(settings: dict[str, float], failure: Ending) -> None:
    assert policy(**settings)(failure) == failure


def test_of_many_hosts_one_that_was_told_to_stop_ends_all_and_the_first_cause_is_named() -> None:
    follows = Ending(1, "rank 1 on algo-2: connection closed by peer", step=8, is_consequence=True)
    order = judged(RestartPolicy(RecoverySpec()), {"algo-1": died(7), "algo-2": follows})
    assert isinstance(order, Restart)
    assert order.failure.reason == died(7).reason and order.failure.step == 8, "the last step that any rank finished"
    told = Ending(1, "rank 0 on algo-1 did not save", step=8, was_told_to_stop=True)
    assert judged(RestartPolicy(RecoverySpec()), {"algo-1": told, "algo-2": follows}) == told
    saved = Ending(75, "saved; resume me")
    assert judged(RestartPolicy(RecoverySpec()), {"algo-1": Ending(0, ""), "algo-2": saved}) == saved


def test_a_job_may_be_started_again_more_often_than_a_number_can_be_doubled() -> None:
    judge = policy(max_restarts=5000)
    orders = [judge(died(step)) for step in range(1, 1200)]
    assert {order.delay_seconds for order in orders[9:] if isinstance(order, Restart)} == {LONGEST_BACKOFF_SECONDS}
    assert all(isinstance(order, Restart) for order in orders)
