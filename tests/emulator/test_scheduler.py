"""Whose turn it is in a training queue: own before borrowed, first come first served, and back what was lent."""

import random

from trainyard.emulator.batch.scheduler import Held, Share, Turn, Wanted, turn
from trainyard.emulator.batch.service_jobs import may_retry

BORROWS = Share(2, 100)


def held(job_id: str, share: str, count: int, order: int = 0, *, stopping: bool = False) -> Held:
    return Held(job_id, share, count, order, stopping)


def test_each_share_gets_its_own_and_then_what_is_idle() -> None:
    shares = {"a": BORROWS, "b": BORROWS}
    waiting = [Wanted("a1", "a", 2), Wanted("a2", "a", 2), Wanted("b1", "b", 1)]
    assert turn(4, shares, [], waiting) == Turn(("a1", "b1")), "a2 would need three idle ones; one is left"
    assert turn(4, shares, [], waiting[:2]) == Turn(("a1", "a2"))


def test_the_youngest_borrower_makes_room_for_the_owner_and_no_more_than_it_takes() -> None:
    shares = {"a": Share(1, 300), "b": BORROWS}
    running = [held("a1", "a", 1, 1), held("a2", "a", 1, 2), held("a3", "a", 1, 3), held("a4", "a", 1, 4)]
    assert turn(4, shares, running, [Wanted("b1", "b", 1)]) == Turn(preempt=("a4",))
    assert turn(4, shares, running, [Wanted("b1", "b", 2)]) == Turn(preempt=("a4", "a3"))
    asked = [*running[:2], held("a3", "a", 1, 3, stopping=True), held("a4", "a", 1, 4, stopping=True)]
    assert turn(4, shares, asked, [Wanted("b1", "b", 2)]) == Turn(), "they were told already"
    left = [held("a1", "a", 1, 1), held("a2", "a", 1, 2)]
    assert turn(4, shares, left, [Wanted("a3", "a", 1), Wanted("b1", "b", 2)]) == Turn(("b1",)), "not lent out again"


def test_nobody_is_stopped_for_who_would_only_borrow_or_below_what_is_its_own() -> None:
    shares = {"a": BORROWS, "b": BORROWS, "c": Share(0, -1)}
    running = [held("a1", "a", 2, 1), held("b1", "b", 2, 2)]
    assert turn(4, shares, running, [Wanted("c1", "c", 1), Wanted("a2", "a", 1)]) == Turn()


def test_what_is_kept_is_not_lent_and_a_limit_is_one() -> None:
    keeping = {"a": Share(1, 100), "b": Share(2, lends=False)}
    assert turn(3, keeping, [held("a1", "a", 1)], [Wanted("a2", "a", 1)]) == Turn(), "two are b's, used or not"
    lending = {"a": Share(1, 100), "b": Share(2)}
    assert turn(3, lending, [held("a1", "a", 1)], [Wanted("a2", "a", 1), Wanted("a3", "a", 1)]) == Turn(("a2",))


def test_within_a_share_none_is_passed_by_a_smaller_one() -> None:
    shares = {"a": Share(4)}
    waiting = [Wanted("large", "a", 4), Wanted("small", "a", 1)]
    assert turn(4, shares, [held("old", "a", 2)], waiting) == Turn()
    assert turn(4, shares, [], waiting) == Turn(("large",))


def test_whatever_comes_the_promises_hold() -> None:
    """Random queues: never more than there is, never more than a share may have, and with every borrower gone, each
    share's first job that is its own runs."""
    dice = random.Random(7)
    for _ in range(300):
        shares = {name: Share(dice.randint(1, 3), dice.choice([0, 100, -1]), dice.random() < 0.7) for name in "abc"}
        capacity = sum(share.guaranteed for share in shares.values())
        waiting = [Wanted(f"j{n}", dice.choice("abc"), dice.randint(1, 3)) for n in range(8)]
        running: list[Held] = []
        for order in range(12):
            done = turn(capacity, shares, running, waiting)
            by_id = {job.job_id: job for job in waiting}
            running = [job for job in running if job.job_id not in done.preempt]
            running += [held(name, by_id[name].share, by_id[name].count, order) for name in done.start]
            waiting = [job for job in waiting if job.job_id not in done.start]
            assert sum(job.count for job in running) <= capacity
            for name, share in shares.items():
                used = sum(job.count for job in running if job.share == name)
                assert share.most is None or used <= share.most
            if not done.start and not done.preempt:
                break
        for name, share in shares.items():
            used = sum(job.count for job in running if job.share == name)
            first = next((job for job in waiting if job.share == name), None)
            assert first is None or used + first.count > share.guaranteed, (name, shares, running, waiting)


def test_retry_rules_go_by_the_first_that_fits() -> None:
    rules = {
        "attempts": 3,
        "evaluateOnExit": [
            {"action": "RETRY", "onStatusReason": "Received status from SageMaker: InternalServerError*"},
            {"action": "EXIT", "onStatusReason": "*"},
        ],
    }
    lost, wrong = (f"Received status from SageMaker: {words}" for words in ("InternalServerError: x", "ClientError"))
    assert may_retry(rules, 1, lost)
    assert not may_retry(rules, 3, lost), "three attempts were made"
    assert not may_retry(rules, 1, wrong)
    assert may_retry({"attempts": 2}, 1, wrong), "without rules every end is one to retry"
    assert not may_retry({}, 1, lost)
