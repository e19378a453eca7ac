"""Signs of life in `trainyard status`: last step, newest checkpoint, restarts and why, from lines and files."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from launch_testing import record_without_tenant

from trainyard.cli import jobs as jobs_module
from trainyard.cli import live
from trainyard.cli.app import run
from trainyard.cli.seen import Seen
from trainyard.launch import place as place_module
from trainyard.launch.backend import LogLine, Observation, Say
from trainyard.launch.local_backend import TAIL_BYTES, LocalBackend
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.notes import notes_on

JOBS = Path(__file__).resolve().parents[2] / "jobs"
RESTART = "recovery restart={} last_step={} backoff_seconds=2 reason={}"
KILLED = "rank 1 on this machine was killed by SIGKILL: out of memory on the host, or killed from outside"


class Machine(LocalBackend):
    """This machine, whose job is as a test says."""

    state = "Training"

    def observe(self, _: JobRecord) -> Observation:
        return Observation(self.state, failure="rank 0 on this machine: ValueError: x" * (self.state == "Failed"))


@pytest.fixture
def record(job: JobSpec, resolved: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRecord:
    """A job of this machine with three steps, of which two are saved."""
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(place_module, "LocalBackend", Machine)
    monkeypatch.setattr(Machine, "state", "Training")
    kept = record_without_tenant(job, resolved).with_attempt(submitted_at="2026-01-31T12:00:00+00:00")
    folder = tmp_path / "jobs" / kept.job_id
    kept = kept.model_copy(update={"checkpoint_destination": str(folder)})
    FolderRecordStore(tmp_path / "jobs").create(kept)
    (folder / "output").mkdir()
    (folder / "log.txt").write_text("".join(f"step={step} loss=2.{step}00000\n" for step in (1, 2, 3)))
    rows = [{"step": step, "loss": 2 + step / 10, "step_seconds": 1.0} for step in (1, 2, 3)]
    (folder / "output/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checkpoints/step-00000002").mkdir(parents=True)
    (folder / "checkpoints/step-00000002/COMMITTED").write_text("{}")
    return kept


@pytest.fixture
def folder(record: JobRecord) -> Path:
    """Its folder."""
    return Path(record.checkpoint_destination)


def status_of(record: JobRecord, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Its lines, by their first words."""
    assert run(["status", record.job_id]) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line]
    return {name.strip(): words.strip() for name, words in lines}


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def test_the_last_step_and_the_newest_checkpoint_are_told_with_their_age(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ago = datetime.now(UTC).timestamp() - 605
    os.utime(folder / "output/metrics.jsonl", (ago, ago))
    os.utime(folder / "checkpoints/step-00000002/COMMITTED", (ago - 3600, ago - 3600))
    told = status_of(record, capsys)
    assert told["last step"] in (f"3 of 20, 10 min {seconds} s ago, loss 2.300000" for seconds in range(5, 20))
    assert told["saved"] == "step 2, 1 h 10 min ago" and "restarts" not in told
    (folder / "checkpoints/step-00000002/COMMITTED").unlink()
    assert status_of(record, capsys)["saved"] == "no checkpoint yet"
    add(folder / "log.txt", "checkpoint step=3 not committed: a disk is too full for it; training goes on")
    why = "step 3 was not committed: a disk is too full for it; training goes on"
    assert status_of(record, capsys)["saved"] == f"no checkpoint yet; {why}"
    add(folder / "log.txt", "checkpoint step=3 committed uri=x seconds=1.0 at=2026-01-31T12:00:00+00:00")
    gone = "none at its place now, where step 3 was saved"
    assert status_of(record, capsys)["saved"] == gone, "a look at its place says so"
    # Rows are read after the log: of a job that goes on meanwhile they are newer.
    row = {"step": 4, "loss": 2.4, "step_seconds": 1.0}
    add(folder / "output/metrics.jsonl", json.dumps(row))
    assert (
        status_of(record, capsys)["last step"].startswith("4 of 20, ")
        and " ago, loss 2.400000" in (status_of(record, capsys)["last step"])
    )
    # A start that went back writes the rows anew: that moment is not the last step's.
    add(folder / "log.txt", "step=5 loss=2.0")
    assert status_of(record, capsys)["last step"] == "5 of 20, loss 2.0"


def test_a_resume_is_told_that_the_checkpoints_are_gone(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that isn't mounted is an empty folder: the job began anew, and its log alone said so."""
    monkeypatch.setattr(Machine, "state", "Stopped")
    monkeypatch.setattr(Machine, "check", lambda *_: None)
    monkeypatch.setattr(Machine, "submit", lambda *_: None)
    monkeypatch.setattr(jobs_module, "begin_tracking", lambda *_: None)
    add(folder / "log.txt", "checkpoint step=2 committed uri=x seconds=1.0 at=2026-01-31T12:00:00+00:00")
    assert run(["resume", record.job_id]) == 0
    assert "has no checkpoint" not in capsys.readouterr().err
    (folder / "checkpoints/step-00000002/COMMITTED").unlink()
    assert run(["resume", record.job_id]) == 0
    assert f"warning: {folder} has no checkpoint, where step 2 was saved: the job begins" in capsys.readouterr().err


def test_restarts_in_place_are_counted_and_the_last_ones_reason_is_told(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(folder / "log.txt", RESTART.format(1, 3, KILLED))
    told = status_of(record, capsys)
    earlier_trainers = f"1 in place, the last after step 3: {KILLED} (no step since)"
    assert told["restarts"] == earlier_trainers
    began = (datetime.now(UTC) - timedelta(seconds=61)).isoformat(timespec="seconds")
    lines = (folder / "log.txt").read_text()
    (folder / "log.txt").write_text(lines.replace("backoff_seconds=2 ", f"backoff_seconds=2,at={began} "))
    told = status_of(record, capsys)
    assert told["restarts"] in (
        earlier_trainers.replace("last", f"last 1 min {seconds} s ago") for seconds in range(1, 20)
    )
    add(folder / "log.txt", "recovery restart=1 goes_on step=3 seconds_to_next_step=9.0")
    row = {"restart": 1, "at": datetime.now(UTC).timestamp() - 61, "last_step": 3, "reason": KILLED}
    add(folder / "output/recovery.jsonl", json.dumps(row))
    told = status_of(record, capsys)
    assert told["restarts"] in (
        f"1 in place, the last 1 min {seconds} s ago after step 3: {KILLED}" for seconds in range(1, 20)
    )
    add(folder / "log.txt", RESTART.format(2, 0, "rank 0 on this machine: ValueError: x"))
    assert run(["status", record.job_id, "--json"]) == 0
    signs = json.loads(capsys.readouterr().out)["signs"]
    assert [one["number"] for one in signs["restarts"]] == [1, 2] and signs["is_restarting"]
    assert (signs["step"], signs["saved_step"]) == (3, 2)
    monkeypatch.setattr(Machine, "state", "Failed")
    told = status_of(record, capsys)
    assert told["restarts"] == "2 in place, the last before a step: as it failed in the end (no step since)"


def test_a_later_attempt_that_fails_alike_has_restarts_of_its_own(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each attempt counts from 1: the second one's was taken for the first's, hours ago."""

    def restarts() -> int:
        assert run(["status", record.job_id, "--json"]) == 0
        return len(json.loads(capsys.readouterr().out)["signs"]["restarts"])

    went_on = "recovery restart=1 goes_on step=4 seconds_to_next_step=9.0"
    row = json.dumps({"restart": 1, "at": 1.0, "last_step": 3, "reason": KILLED})
    for line in (RESTART.format(1, 3, KILLED), went_on):
        add(folder / "log.txt", line)
    add(folder / "output/recovery.jsonl", row)
    assert restarts() == 1
    add(folder / "log.txt", RESTART.format(1, 3, KILLED))
    assert restarts() == 2, "it is under way, and has no row"
    add(folder / "log.txt", went_on)
    assert restarts() == 2, "its row comes beside the checkpoints with the next one"
    add(folder / "output/recovery.jsonl", row)
    assert restarts() == 2
    (folder / "log.txt").write_text(RESTART.format(1, 3, KILLED) + "\n")
    assert restarts() == 3, "whatever the log's end still has of those before"


def test_a_row_without_a_loss_tells_its_step_all_the_same(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "log.txt").unlink()
    (folder / "output/metrics.jsonl").write_text(json.dumps({"step": 7, "loss": None}) + "\n")
    told = status_of(record, capsys)["last step"]
    assert told.startswith("7 of 20, ") and told.endswith(" ago")


def test_a_long_log_is_read_from_its_end_and_a_line_that_is_cut_is_none(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = "step=9 loss=1.0\n"
    cut = "validation step=7 loss=9.9"
    # The tail begins at "step=7", which of a whole line would be a step's.
    filler = "x" * (TAIL_BYTES - len(end) - len(cut.removeprefix("validation ")) - 2)
    (folder / "log.txt").write_text(RESTART.format(1, 3, KILLED) + f"\n{cut}\n{filler}\n{end}")
    told = status_of(record, capsys)
    assert told["last step"] == "9 of 20, loss 1.0" and "restarts" not in told
    (folder / "log.txt").write_text(f"{cut}\n{filler}\n" + " " * len(end))
    (folder / "output/metrics.jsonl").unlink()
    assert status_of(record, capsys)["last step"] == "none yet"


def test_files_that_cant_be_read_cost_their_lines_alone(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(folder / "output/recovery.jsonl", '{"restart": "x"}\n[]\nnull\nhalf a ro')
    (folder / "log.txt").unlink()
    (folder / "log.txt").mkdir()
    told = status_of(record, capsys)
    assert told["last step"].startswith("3 of 20") and told["saved"].startswith("step 2") and "restarts" not in told
    (folder / "output/metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "checkpoints").rename(folder / "elsewhere")
    (folder / "checkpoints").symlink_to(folder / "not mounted")
    told = status_of(record, capsys)
    assert "last step" in told and "saved" not in told, "nobody knows whether there is one"


def test_why_an_earlier_attempt_failed_stays_told(
    record: JobRecord, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = FolderRecordStore(tmp_path / "jobs")
    stored = store.read(record.job_id)
    failed = stored.record.with_attempt(failure="disk full on algo-1")
    store.replace(stored, failed.with_next_attempt().with_attempt(submitted_at="2026-01-31T13:00:00+00:00"))
    assert status_of(record, capsys)["failed before"] == "attempt 1: disk full on algo-1"


def test_hosts_that_tell_of_one_restart_tell_of_one() -> None:
    seen = Seen()
    for host in ("algo-1", "algo-2"):
        seen.read(LogLine(host, RESTART.format(1, 5, KILLED), 1000))
    assert len(seen.restarts) == 1 and seen.restarts[0].at == 1.0 and seen.is_restarting
    seen.read(LogLine("algo-1", "step=4 loss=2.5", 5000))
    assert not seen.is_restarting and (seen.step, seen.step_at) == (4, 5.0)
    seen.read(LogLine("algo-1", RESTART.format(1, 5, KILLED), 9000))
    assert len(seen.restarts) == 2, "of the next attempt, whose hosts count anew"


def test_who_launches_and_waits_is_told_what_is_odd_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launch and the job's first rank warn of the same, each in its own right: the other may not be seen."""
    (tmp_path / "text.txt").write_text("a text\n" * 100)
    odd = [
        "--set",
        f"data.train=[{{path: {tmp_path}/text.txt, format: text}}]",
        "--set",
        f"data.validation=[{{path: {tmp_path}/text.txt, format: text}}]",
    ]
    odd += ["--set", "training.max_skips=2"]
    own = "warning: another of the job's own"

    def submit(self: LocalBackend, record: JobRecord, _: Say) -> None:
        (note,) = notes_on(record.spec, record.resolved.steps)
        add(folder.parent / record.job_id / "log.txt", f"warning: {note}\n{own}\n{own}")

    monkeypatch.setattr(LocalBackend, "submit", submit)
    monkeypatch.setattr(Machine, "state", "Completed")
    assert run(["launch", str(JOBS / "tiny.yaml"), "--backend", "local", "--wait", *odd]) == 0
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == 2 and warnings[0].startswith("warning: training.max_skips: 2 changes nothing")
    assert warnings[1] == own


def test_who_resumes_and_waits_is_shown_all_that_the_attempt_writes(
    record: JobRecord, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had written before the first look was taken for the attempt's before it, and not shown."""

    def submit(self: Machine, _: JobRecord, __: Say) -> None:
        add(folder / "log.txt", "resumed step=2 uri=x\nstep=3 loss=1.5")
        monkeypatch.setattr(Machine, "state", "Completed")

    monkeypatch.setattr(Machine, "state", "Failed")
    monkeypatch.setattr(Machine, "submit", submit)
    monkeypatch.setattr(Machine, "check", lambda *_: None)
    monkeypatch.setattr(live.time, "sleep", lambda _: None)
    assert run(["resume", record.job_id, "--wait"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith(("resumed", "step "))] == [
        "resumed step=2 uri=x",
        "step 3  loss 1.5",
    ]
