"""What an alarm saw is what its runbook finds, of a job on AWS too: how old the newest checkpoint is, how long a job
has waited. Its figures come with its checkpoints, so that only its lines and its record tell."""

import errno
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from runbook_testing import evidence_of, record_of, rows_of

from trainyard.errors import InputError
from trainyard.launch.backend import LogCursor, LogLine, Observation
from trainyard.launch.checkpoints import Checkpoint
from trainyard.launch.place import Place
from trainyard.launch.record import FolderRecordStore, JobRecord, StateChange
from trainyard.operate.runbooks import evidence as looked
from trainyard.operate.runbooks.capacity_or_quota_short import diagnose as capacity
from trainyard.operate.runbooks.checkpoint_stale_or_corrupt import diagnose as checkpoint
from trainyard.operate.runbooks.evidence import Evidence, gather
from trainyard.operate.runbooks.job_hung import diagnose as hung
from trainyard.spec.base import parse
from trainyard.spec.objectives import ObjectivesSpec

NOT_COMMITTED = "checkpoint step=20 not committed: can't upload s3://x/y: AccessDenied; training goes on"


class Lines:
    """A backend that has a job's lines, in as many looks as they are cut into."""

    def __init__(self, *looks: Sequence[LogLine], state: str = "Training") -> None:
        self._looks, self._state = list(looks), state

    def observe(self, record: JobRecord) -> Observation:
        """As SageMaker's."""
        return Observation(self._state, "", "", ())

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """The next look's."""
        found = list(self._looks.pop(0))
        cursor.more = bool(self._looks)
        return found


def line(step: int, seconds_ago: float, host: str = "algo-1") -> LogLine:
    text = f"step={step} loss=2.0 learning_rate=0.001 grad_norm=1.0 tokens=1024 step_seconds=1.0"
    return LogLine(host, text, int(1000 * (time.time() - seconds_ago)))


def gathered(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: Lines,
    saved: Sequence[int] = (),
    record: JobRecord | None = None,
) -> Evidence:
    """Of a job without figures; `saved`: steps of its checkpoints."""
    given = record or record_of()
    store = FolderRecordStore(folder)
    store.create(given)
    found = [Checkpoint(step, f"s3://x/step-{step}/", 3, 100, committed=True) for step in saved]
    monkeypatch.setattr(looked, "_checkpoints", lambda *_: found)
    monkeypatch.setattr(looked, "_rows", lambda *_: [])
    monkeypatch.setattr(looked, "_planned", lambda *_: {})
    return gather(Place(store, backend), given.job_id, [], folder / "evidence")  # type: ignore[arg-type]


def test_a_job_on_aws_whose_saves_fail_is_stale_by_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line(step, 3000 - 60 * step) for step in range(1, 46)]
    failed = LogLine("algo-1", NOT_COMMITTED, lines[20].at_ms)
    evidence = gathered(tmp_path, monkeypatch, Lines([*lines[:20], failed, *lines[20:]]), saved=(5,))
    assert evidence.told_step == 45 and evidence.unsaved_seconds == pytest.approx(2700, abs=30)
    (stale,) = [one for one in checkpoint(evidence) if one.kind == "fault"]
    assert "the tenant's may be 1200 s old" in stale.words
    assert "40 steps (27" in stale.decided_by[0] and "of step 5" in stale.decided_by[0]
    assert any("not committed" in words for words in stale.decided_by), "and why"


def test_what_a_job_of_this_machine_wrote_of_its_faults_is_kept_with_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it ran may be cleaned up before anybody reads the evidence. It lies in the job's own folder, wherever its
    checkpoints go."""
    written = {
        "recovery.jsonl": '{"at": "t", "what": "restarted"}\n',
        "left_out_batches.jsonl": "{}\n",
        "stacks/rank-0.txt": "Thread 0x1\n",
        "anomalies/step-3/batch.json": "[]\n",
    }
    for name, text in written.items():
        path = tmp_path / record_of().job_id / "output" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    record = record_of().model_copy(update={"checkpoint_destination": str(tmp_path / "elsewhere")})
    evidence = gathered(tmp_path, monkeypatch, Lines([line(1, 5)]), record=record)
    kept = tmp_path / "evidence"
    assert {name: (kept / name).read_text(encoding="utf-8") for name in written} == written
    assert "step=1 loss=2.0" in (kept / "lines.txt").read_text(encoding="utf-8")
    assert [one["what"] for one in evidence.recoveries] == ["restarted"]


@pytest.mark.parametrize(
    ("copier", "name", "error"),
    [
        ("copyfile", "recovery.jsonl", OSError(errno.ENOSPC, "No space left on device")),
        ("copytree", "stacks", shutil.Error([("from", "to", "[Errno 28] No space left on device")])),
    ],
)
def test_a_disk_that_fills_while_evidence_is_copied_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copier: str, name: str, error: OSError
) -> None:
    output = tmp_path / record_of().job_id / "output"
    (output / "stacks").mkdir(parents=True)
    (output / "recovery.jsonl").write_text("{}\n", encoding="utf-8")

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(shutil, copier, full)
    record = record_of().model_copy(update={"checkpoint_destination": str(tmp_path / "elsewhere")})
    with pytest.raises(InputError, match=rf"{name} can't be written \(.*No space left on device\); give another"):
        gathered(tmp_path, monkeypatch, Lines([line(1, 5)]), record=record)


def test_without_any_checkpoint_the_age_is_since_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = gathered(tmp_path, monkeypatch, Lines([line(1, 1500), line(3, 5)]))
    assert evidence.unsaved_seconds == pytest.approx(1500, abs=30)
    (stale,) = checkpoint(evidence)
    assert stale.kind == "fault" and "and no commit" in stale.decided_by[0]


def test_a_checkpoint_of_a_step_after_the_lines_is_as_old_as_the_newest_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are read before checkpoints are looked for, and of a long log that takes a while."""
    lines = [line(step, 36000 - 720 * step) for step in range(1, 50)]
    evidence = gathered(tmp_path, monkeypatch, Lines(lines), saved=(25, 50))
    assert evidence.unsaved_seconds == pytest.approx(720, abs=30)
    assert [one.kind for one in checkpoint(evidence)] == ["clear"]


def test_a_job_that_came_back_from_a_reclaim_is_as_old_as_its_first_step_since(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its training job, and so its lines of before, stay: five hours without machines are no checkpoint's age."""
    history = {"Submitted": 400, "Training": 397, "Interrupted": 300, "Starting": 2, "Downloading": 1.5}
    came_back = through(record, {**history, "Training again": 1})
    before = [line(step, 60 * 300 + 10 * (64 - step)) for step in range(1, 64)]
    evidence = gathered(tmp_path, monkeypatch, Lines([*before, line(51, 20)]), (50,), came_back)
    assert evidence.unsaved_seconds == pytest.approx(20, abs=5) and evidence.told_step == 51
    assert [one.kind for one in checkpoint(evidence)] == ["clear"]


def test_a_job_that_came_back_and_makes_its_first_step_is_not_silent_since_the_reclaim(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = {"Submitted": 400, "Training": 397, "Interrupted": 300, "Starting": 2, "Training again": 1}
    before = [line(step, 60 * 300 + 10 * (64 - step)) for step in range(1, 64)]
    evidence = gathered(tmp_path, monkeypatch, Lines(before), (50,), through(record, history))
    assert (evidence.silent_seconds, evidence.unsaved_seconds, evidence.told_step) == (None, None, 0)
    assert {one.kind for one in (*hung(evidence), *checkpoint(evidence))} == {"clear"}


def test_an_interval_that_is_longer_than_what_is_promised_is_named(record: JobRecord) -> None:
    slowly = record.resolved.spec.checkpoint.model_copy(update={"every_steps": None, "every_minutes": 60.0})
    spec = record.resolved.spec.model_copy(update={"checkpoint": slowly})
    rare = record.model_copy(update={"resolved": record.resolved.model_copy(update={"spec": spec})})
    late = evidence_of(rare, (), rows_of(60), state="Training", unsaved_seconds=1900.0)
    (stale,) = checkpoint(late)
    assert stale.kind == "fault" and any("checkpoint.every_minutes=10" in command for command in stale.then)
    assert [one.kind for one in checkpoint(replace(late, most_unsaved_seconds=7200.0))] == ["clear"]


def test_saves_beside_fast_steps_may_be_a_little_behind(record: JobRecord) -> None:
    behind = evidence_of(record, (), rows_of(60), state="Training", told_step=80, unsaved_seconds=9.0)
    (told,) = checkpoint(behind)
    assert told.kind == "clear" and "9 s since" in told.words
    assert checkpoint(replace(behind, unsaved_seconds=90.0))[0].kind == "fault"


def test_lines_of_long_logs_are_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, rest = [line(1, 90), line(1, 10, "algo-2")], [line(2, 50)]
    evidence = gathered(tmp_path, monkeypatch, Lines(first, rest))
    assert [words.split()[0] for words in evidence.lines] == ["algo-1", "algo-1", "algo-2"]


def test_where_lines_have_no_times_nobody_says_that_steps_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: JobRecord
) -> None:
    """A backend that stamps lines as it reads them makes each step look new."""
    elsewhere = record.model_copy(update={"backend": "slurm"})
    evidence = gathered(tmp_path, monkeypatch, Lines([line(1, 0)]), record=elsewhere)
    assert (evidence.silent_seconds, evidence.unsaved_seconds) == (None, None)
    (told, *_) = hung(evidence)
    assert told.kind == "unknown" and "slurm" in told.words


@pytest.fixture
def record() -> JobRecord:
    return record_of()


def through(record: JobRecord, minutes_ago: dict[str, float]) -> JobRecord:
    """A job that came into each state so long ago; ` again` makes a second one of a name."""
    now = datetime.now(UTC)
    states = [
        StateChange(state=state.removesuffix(" again"), at=(now - timedelta(minutes=ago)).isoformat(timespec="seconds"))
        for state, ago in minutes_ago.items()
    ]
    return record.model_copy(update={"states": (*record.states, *states)})


def waiting(record: JobRecord, state: str, minutes: float, *after: str) -> JobRecord:
    """A job that came into `state` so long ago, and into the others just now."""
    ago = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat(timespec="seconds")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    states = [StateChange(state="Submitted", at=ago), StateChange(state=state, at=ago, note="no machine yet")]
    states += [StateChange(state=name, at=now) for name in after]
    return record.model_copy(update={"states": (*record.states, *states)})


@pytest.mark.parametrize("state", ["Pending", "Starting", "Queued"])
def test_a_job_that_still_waits_is_short_of_machines(
    state: str, record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence = gathered(tmp_path, monkeypatch, Lines([], state=state), record=waiting(record, state, 75))
    (told, *_) = capacity(evidence)
    assert told.kind == "fault" and "75 minutes" in told.words, told
    assert any(command.startswith("trainyard jobs") for command in told.then)
    resumes = [command for command in told.then if "trainyard resume" in command]
    assert resumes and all(command.startswith("trainyard stop") for command in resumes), "it goes on: stop it first"
    (patient, *_) = capacity(replace(evidence, most_waited_seconds=14400.0))
    assert patient.kind == "clear" and "240" in patient.words


@pytest.mark.parametrize(
    "since",
    [
        {"Interrupted": 300},
        {"Interrupted": 300, "Starting": 200, "Pending": 100},
        # Out of its training queue's turn: the try has ended, and nobody looked until now.
        {"Stopping": 300, "Stopped": 299, "Queued": 0},
    ],
    ids=["reclaimed", "reclaimed and asking", "out of its turn"],
)
def test_a_job_whose_machines_were_taken_waits_since_then(
    since: dict[str, float], record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = through(record, {"Submitted": 399, "Pending": 399, "Downloading": 398, "Training": 397, **since})
    evidence = gathered(tmp_path, monkeypatch, Lines([line(1, 60 * 390)], state=list(since)[-1]), record=taken)
    (told, *_) = capacity(evidence)
    assert told.kind == "fault" and "300 minutes, and still waits" in told.words, told


@pytest.mark.parametrize("end", ["Stopping", "Stopped", "Failed"])
@pytest.mark.parametrize(("minutes", "kind"), [(398, "fault"), (10, "clear")])
def test_a_job_that_ended_in_its_wait_had_no_machines(
    end: str, minutes: float, kind: str, record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has it any by a finer word for its end (a spot job's longest wait)."""
    finer = {"MaxWaitTimeExceeded": 0.0} if end == "Stopped" else {}
    never = through(record, {"Submitted": minutes, "Pending": minutes - 1, **finer, end: 0})
    (told, *_) = capacity(gathered(tmp_path, monkeypatch, Lines([], state=end), record=never))
    assert told.kind == kind and f"ended after {minutes} minutes without having had any machine" in told.words, told
    assert any("Pending" in words for words in told.decided_by) and any(end in words for words in told.decided_by)


def test_a_wait_that_is_over_is_told_with_its_length(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = waiting(record, "Pending", 75, "Downloading", "Training")
    (told, *_) = capacity(gathered(tmp_path, monkeypatch, Lines([line(1, 5)]), record=over))
    assert told.kind == "clear" and "after 75 minutes" in told.words
    assert any("Pending: no machine yet" in words for words in told.decided_by)


def test_the_limits_are_the_tenants_own() -> None:
    own = parse(ObjectivesSpec, {"queue": {"most_seconds": 60}, "checkpoint_age": {"most_seconds": 30}}, "objectives")

    class Tenant:
        objectives = own

    limits = looked._limits(Tenant())  # type: ignore[arg-type]
    assert (limits["queue"], limits["checkpoint-age"], limits["throughput"]) == (60, 30, 0.85)
    assert looked._limits(None)["queue"] == 3600
