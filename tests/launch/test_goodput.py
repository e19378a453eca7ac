"""Where a job's time went, from what the trainer and the backend wrote down."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from trainyard.launch.goodput import account_of, goodput
from trainyard.launch.launcher import new_record
from trainyard.launch.record import JobRecord, StateChange
from trainyard.spec.job import JobSpec, ResolvedJob

NOW = datetime.fromisoformat("2026-01-31T12:05:00+00:00")


def at(state: str, minute: int, second: int = 0) -> StateChange:
    return StateChange(state=state, at=f"2026-01-31T12:{minute:02}:{second:02}+00:00")


def start(lost_steps: int = 0, lost_seconds: float = 0.0) -> dict[str, Any]:
    times = {f"{name}_seconds": seconds for name, seconds in
             {"process": 4.0, "rendezvous": 1.0, "build": 2.0, "load": 3.0}.items()}  # fmt: skip
    return {"start": {"attempt": 1, "at": 0.0, "lost_steps": lost_steps, "lost_seconds": lost_seconds, **times}}


ROWS = [
    start(),
    {"first_step": {"attempt": 1, "seconds": 3.0}},
    {"totals": {"steps": 10, "useful_seconds": 10.0, "save_seconds": 0.5}},
    start(lost_steps=4, lost_seconds=4.0),
    {"first_step": {"attempt": 2, "seconds": 3.0}},
    {"lost": {"attempt": 2, "steps": 1, "seconds": 1.0}},
    {"totals": {"steps": 100, "useful_seconds": 100.0, "save_seconds": 5.0}},
]
STATES = [at("Created", 0), at("Starting", 0, 10), at("Training", 0, 30), at("Completed", 4)]


def test_every_second_is_somewhere() -> None:
    found = account_of(ROWS, STATES, now=NOW)
    assert found is not None
    assert (found.wall_seconds, found.useful_seconds) == (240.0, 100.0)
    assert found.elsewhere == {
        "queue": 30.0, "start": 12.0, "rendezvous": 2.0, "load": 6.0, "first_step": 4.0, "lost_steps": 5.0,
        "saves": 5.0, "other": 76.0,
    }  # fmt: skip
    assert found.useful_seconds + sum(found.elsewhere.values()) == found.wall_seconds
    assert (found.lost_steps, found.num_starts) == (5, 2)
    assert found.share == pytest.approx(100 / 240)
    assert found.as_line() == (
        "42% of 240 s made steps that were kept; other 76 s, queue 30 s, start 12 s, load 6 s, lost steps 5 s,"
        " saves 5 s"
    )


def test_waiting_for_a_person_is_nobodys_time_and_a_job_that_runs_is_measured_until_now() -> None:
    states = [at("Created", 0), at("Training", 1), at("Failed", 2), at("Created", 3), at("Training", 4)]
    found = account_of(ROWS[:3], states, now=NOW)
    assert found is not None and found.elsewhere["queue"] == 120.0
    assert found.wall_seconds == 60.0 * 4, "two minutes of each attempt"


def test_an_account_that_is_missing_torn_or_not_begun_is_no_error(
    tmp_path: Path, job: JobSpec, resolved: ResolvedJob
) -> None:
    record = _record(job, resolved, tmp_path)
    assert goodput(record, None) is None
    path = tmp_path / "goodput.jsonl"
    path.write_text('{"totals": {"steps": 1}}\n')
    assert goodput(record, None) is None
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '\n{"totals": {"st')
    found = goodput(record, None)
    assert found is not None and found.useful_seconds == 100.0
    path.write_text('{"start": 3}\n')
    assert goodput(record, None) is None


def _record(job: JobSpec, resolved: ResolvedJob, destination: Path) -> JobRecord:
    spec = resolved.spec
    moved = spec.checkpoint.model_copy(update={"destination": str(destination)})
    resolved = resolved.model_copy(update={"spec": spec.model_copy(update={"checkpoint": moved})})
    return new_record(
        job, resolved, job_id="acme-tiny-20260131120000-1a2b", backend="local", environment=None, plan={},
        image=None, channels=(), forced=(), launched_by="",
    )  # fmt: skip
