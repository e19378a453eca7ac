"""For how long a job was waited for: told once, after a start's first step."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from trainer.observe.away import Launch, gone_since, launch_of
from trainer.observe.goodput import GoodputLog

from trainyard.launch.names import attempt_name, new_job_id
from trainyard.spec.meters import BY_NAME, LIVE

ROW = {"step": 1, "step_seconds": 1.0, "breakdown": {}}
SECONDS = {"process": 1.0, "rendezvous": 2.0, "build": 3.0, "load": 4.0}


def test_an_environment_says_which_submission_of_which_launch_this_is() -> None:
    job_id = new_job_id("acme", "tiny")
    assert abs((launch_of({"TRAINYARD_JOB_ID": job_id}).at or 0.0) - time.time()) < 3.0
    said = {number: {"TRAINING_JOB_NAME": attempt_name(job_id, number)} for number in (1, 2, 12)}
    assert [launch_of({"TRAINYARD_JOB_ID": job_id, **said[number]}).attempt for number in said] == [1, 2, 12]
    assert launch_of({"TRAINYARD_JOB_ID": job_id, "TRAINYARD_ATTEMPT": "3"}).attempt == 3
    # A training queue gives its training jobs names of its own.
    of_batch = {"TRAINING_JOB_NAME": f"AWSBatchacme-{'ab' * 20}", "TRAINYARD_JOB_ID": job_id}
    assert launch_of({**of_batch, "TRAINYARD_ATTEMPT": "2"}).attempt == 2
    assert launch_of(of_batch).asked is None
    # Who asked: a person, where nobody says otherwise.
    third = {"TRAINYARD_JOB_ID": job_id, "TRAINYARD_ATTEMPT": "3"}
    assert (launch_of(third).asked, launch_of({**third, "TRAINYARD_ASKED_ATTEMPT": "1"}).asked) == (3, 1)
    assert launch_of({}) == launch_of({"TRAINING_JOB_NAME": "somebody-elses"}) == Launch()
    assert launch_of({"TRAINYARD_JOB_ID": "acme-tiny-20269931120000-1a2b"}).at is None, "no date"


def start(submission: int | None = 1, gone: float | None = None) -> dict[str, Any]:
    return {"start": {"submission": submission, "gone_since": gone}}


STEP, SAVED, ENDED = {"first_step": {}}, {"totals": {"at": 50.0}}, {"ended": {"status": "interrupted"}}


@pytest.mark.parametrize(
    ("rows", "attempt", "asked", "written_at", "expected"),
    [
        ([], 1, 1, 90.0, None),
        ([start(), STEP, SAVED], 1, 1, 90.0, 90.0),
        ([start(), STEP, SAVED], 1, 1, None, 50.0),
        ([start(), STEP], 1, 1, None, None),
        # Reclaimed or requeued: told to save, and started again by itself.
        ([start(), STEP, SAVED, ENDED], 1, 1, 90.0, 90.0),
        # Stopped or failed, and resumed by a person, whatever the job states of restarts.
        ([start(), STEP, SAVED, ENDED], 2, 2, 90.0, None),
        ([start(), STEP, SAVED], 2, 2, 90.0, None),
        # Failed, or told to save and to ask for it: the resumer's next submission.
        ([start(), STEP, SAVED], 2, 1, 90.0, 90.0),
        ([start(), STEP, SAVED, ENDED], 2, 1, 90.0, 90.0),
        # A person's submission that never started lies between, then the resumer's.
        ([start(), STEP, SAVED], 3, 2, 90.0, None),
        ([start(2), STEP, SAVED], 3, 2, 90.0, 90.0),
        # By hand, where nobody says what was asked for.
        ([start(None), STEP, SAVED], None, None, 90.0, 90.0),
        ([start(None), STEP, SAVED, ENDED], None, None, 90.0, None),
        ([start(None), STEP, SAVED], 2, 1, 90.0, None),
        # A start that made no step: away since the one before it, whatever has been written meanwhile.
        ([start(), STEP, SAVED, start(gone=60.0)], 1, 1, 90.0, 60.0),
        # An account of a trainer that told less.
        ([{"start": {}}, STEP, {"totals": {}}], 1, 1, 90.0, None),
    ],
)
def test_since_when_a_job_was_away(
    rows: list[dict[str, Any]], attempt: int | None, asked: int | None, written_at: float | None, expected: float | None
) -> None:
    assert gone_since(rows, launch=Launch(None, attempt, asked), written_at=written_at) == expected


def told(folder: Path, launch: Launch, attempt: int) -> dict[str, float]:
    """By a start that makes its first step."""
    folder.mkdir(exist_ok=True)
    log = GoodputLog(folder, launch=launch)
    log.begin([], attempt=attempt, resumed_step=0, seconds=SECONDS)
    log.step(ROW)
    return log.told_once


def test_a_launch_is_told_by_the_first_start_that_makes_a_step(tmp_path: Path) -> None:
    """Of those that fail before it nothing would be told otherwise, and they are the ones that take long."""
    now = time.time()
    crashed = GoodputLog(tmp_path, launch=Launch(now - 7300.0, 1, 1))
    crashed.begin([], attempt=1, resumed_step=0, seconds={"process": 7200.0})  # began 7200 s ago, and made no step
    found = told(tmp_path, Launch(now - 7300.0, 1, 1), attempt=2)
    assert found["queue_seconds"] == pytest.approx(100.0, abs=5.0), "until the first start of its processes"
    assert found["launch_seconds"] == pytest.approx(7300.0, abs=5.0)
    assert told(tmp_path, Launch(now - 7300.0, 1, 1), attempt=3).keys() == {"start_seconds"}, "once"


def test_no_launch_is_told_where_a_person_was_waited_for_or_nobody_knows_of_the_first_step(tmp_path: Path) -> None:
    two_days_ago = time.time() - 2 * 86400
    nothing = {"start_seconds"}
    # It failed before any process had started; a person resumed it two days later, or the resumer after that person.
    assert told(tmp_path / "a", Launch(two_days_ago, 2, 2), attempt=1).keys() == nothing
    assert told(tmp_path / "b", Launch(two_days_ago, 3, 2), attempt=1).keys() == nothing
    # The resumer alone: all of it was a wait for the launch.
    assert told(tmp_path / "c", Launch(two_days_ago, 2, 1), attempt=1)["launch_seconds"] > 86400
    # A fresh machine without an account: the start before may have made steps.
    assert told(tmp_path / "d", Launch(two_days_ago, 1, 1), attempt=2).keys() == nothing


def test_a_launch_and_a_recovery_are_each_told_once(tmp_path: Path) -> None:
    now = time.time()
    first = GoodputLog(tmp_path, launch=Launch(now - 100.0, 1, 1))
    first.begin([], attempt=1, resumed_step=0, seconds=SECONDS)
    assert first.told_once == {}, "no step yet"
    first.step(ROW)
    assert first.told_once == {
        "start_seconds": pytest.approx(10.0, abs=5.0),
        "queue_seconds": pytest.approx(90.0, abs=5.0),
        "launch_seconds": pytest.approx(100.0, abs=5.0),
    }
    first.step(ROW)
    assert first.told_once == {}
    again = GoodputLog(tmp_path, launch=Launch(now - 100.0, 1, 1))
    again.begin([ROW], attempt=2, resumed_step=1, seconds=SECONDS, written_at=now - 40.0)
    again.step(ROW)
    assert again.told_once == {
        "start_seconds": pytest.approx(10.0, abs=5.0),
        "recovery_seconds": pytest.approx(40.0, abs=5.0),
    }
    again.end("interrupted")
    by_hand = GoodputLog(tmp_path, launch=Launch(now - 100.0, 2, 2))
    by_hand.begin([ROW], attempt=3, resumed_step=1, seconds=SECONDS, written_at=now)
    by_hand.step(ROW)
    assert by_hand.told_once.keys() == {"start_seconds"}, "that a person let it lie is no recovery"
    kinds = [next(iter(json.loads(line))) for line in first.path.read_text().splitlines() if line]
    assert kinds == ["start", "first_step", "start", "first_step", "totals", "ended", "start", "first_step"]


def test_what_is_told_once_has_its_meters() -> None:
    for name in ("start_seconds", "queue_seconds", "launch_seconds", "recovery_seconds"):
        meter = BY_NAME[name]
        assert meter.is_event and meter.per_tenant and meter.read({LIVE: {name: 7.0}}) == 7.0
