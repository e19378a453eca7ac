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
    assert launch_of({}) == launch_of({"TRAINING_JOB_NAME": "somebody-elses"}) == Launch(None, None)
    assert launch_of({"TRAINYARD_JOB_ID": "acme-tiny-20269931120000-1a2b"}).at is None, "no date"


def start(submission: int | None = 1, gone: float | None = None) -> dict[str, Any]:
    return {"start": {"submission": submission, "gone_since": gone}}


STEP, SAVED, ENDED = {"first_step": {}}, {"totals": {"at": 50.0}}, {"ended": {"status": "interrupted"}}


@pytest.mark.parametrize(
    ("rows", "attempt", "written_at", "by_itself", "expected"),
    [
        ([], 1, 90.0, True, None),
        ([start(), STEP, SAVED], 1, 90.0, False, 90.0),
        ([start(), STEP, SAVED], 1, None, False, 50.0),
        ([start(), STEP], 1, None, False, None),
        # Reclaimed or requeued: told to save, and started again by itself.
        ([start(), STEP, SAVED, ENDED], 1, 90.0, False, 90.0),
        # Stopped by a person, and resumed by one.
        ([start(), STEP, SAVED, ENDED], 2, 90.0, True, None),
        # Failed: the resumer's next submission, or, without one, a person's.
        ([start(), STEP, SAVED], 2, 90.0, True, 90.0),
        ([start(), STEP, SAVED], 2, 90.0, False, None),
        # By hand, where nobody says what was asked for.
        ([start(None), STEP, SAVED], None, 90.0, False, 90.0),
        ([start(None), STEP, SAVED, ENDED], None, 90.0, False, None),
        # A start that made no step: away since the one before it, whatever has been written meanwhile.
        ([start(), STEP, SAVED, start(gone=60.0)], 1, 90.0, False, 60.0),
        # An account of a trainer that told less.
        ([{"start": {}}, STEP, {"totals": {}}], 1, 90.0, False, None),
    ],
)
def test_since_when_a_job_was_away(
    rows: list[dict[str, Any]], attempt: int | None, written_at: float | None, by_itself: bool, expected: float | None
) -> None:
    assert gone_since(rows, attempt=attempt, written_at=written_at, is_resumed_by_itself=by_itself) == expected


def test_a_launch_and_a_recovery_are_each_told_once(tmp_path: Path) -> None:
    now = time.time()
    first = GoodputLog(tmp_path, launch=Launch(now - 100.0, 1))
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
    again = GoodputLog(tmp_path, launch=Launch(now - 100.0, 1))
    again.begin([ROW], attempt=2, resumed_step=1, seconds=SECONDS, written_at=now - 40.0)
    again.step(ROW)
    assert again.told_once == {
        "start_seconds": pytest.approx(10.0, abs=5.0),
        "recovery_seconds": pytest.approx(40.0, abs=5.0),
    }
    again.end("interrupted")
    by_hand = GoodputLog(tmp_path, launch=Launch(now - 100.0, 2), is_resumed_by_itself=True)
    by_hand.begin([ROW], attempt=3, resumed_step=1, seconds=SECONDS, written_at=now)
    by_hand.step(ROW)
    assert by_hand.told_once.keys() == {"start_seconds"}, "that a person let it lie is no recovery"
    kinds = [next(iter(json.loads(line))) for line in first.path.read_text().splitlines() if line]
    assert kinds == ["start", "first_step", "start", "first_step", "totals", "ended", "start", "first_step"]


def test_what_is_told_once_has_its_meters() -> None:
    for name in ("start_seconds", "queue_seconds", "launch_seconds", "recovery_seconds"):
        meter = BY_NAME[name]
        assert meter.is_event and meter.per_tenant and meter.read({LIVE: {name: 7.0}}) == 7.0
