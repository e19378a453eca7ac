"""The live screen and a job's money: each line from what the record, the backend and the logs really say."""

import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_testing import JOB_ID
from rich.console import Console

from trainyard.cli import live
from trainyard.cli.app import run
from trainyard.cli.live_view import SPARKS, sparkline, view
from trainyard.cli.output import duration
from trainyard.cli.seen import Seen
from trainyard.errors import InputError
from trainyard.launch.backend import LogCursor, LogLine, Observation
from trainyard.launch.record import Attempt, FolderRecordStore, JobRecord, StateChange
from trainyard.launch.spending import billed_seconds, spent
from trainyard.launch.watch import Status
from trainyard.spec.job import JobSpec, ResolvedJob

NOON = datetime(2026, 3, 20, 12, tzinfo=UTC)
QUOTE = {"usd_per_hour": 6.88, "basis": "EC2 on demand", "as_of": "2026-03-01"}
PLAN: dict[str, Any] = {
    "on_demand": QUOTE,
    "spot": None,
    # In half of the measured step 2.5 times its tokens: a plan counts the padding.
    "configurations": [{"chosen": True, "time": {"step_seconds": 15.0, "tokens_per_second": 2500.0, "mfu": 0.4}}],
}


def changed(*states: tuple[str, float]) -> tuple[StateChange, ...]:
    """States and how many minutes before noon the job came into them."""
    return tuple(StateChange(state=name, at=(NOON - timedelta(minutes=ago)).isoformat()) for name, ago in states)


@pytest.fixture
def running(job: JobSpec, resolved: ResolvedJob) -> JobRecord:
    """Two machines since an hour, of it ten minutes without them."""
    return JobRecord(
        job_id=JOB_ID,
        tenant="acme",
        environment="test",
        backend="sagemaker",
        spec=job,
        resolved=resolved,
        plan=PLAN,
        image=None,
        checkpoint_destination="s3://acme-checkpoints/x/",
        attempts=(Attempt(number=1, training_job_name=JOB_ID, created_at=NOON.isoformat()),),
        states=changed(("Created", 70), ("Starting", 65), ("Training", 60), ("Interrupted", 30), ("Training", 20)),
    )


def screen(record: JobRecord, seen: Seen, *, state: str = "Training", note: str = "", width: int = 110) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=width, highlight=False)
    console.print(view(Status(record, Observation(state, note)), seen, now=NOON))
    return out.getvalue()


def stepped(*losses: float, start: int = 1) -> Seen:
    seen = Seen()
    for index, loss in enumerate(losses):
        line = f"step={start + index} loss={loss:.6f} tokens=64 tokens_per_second=1000.0 step_seconds=30.0"
        assert seen.read(LogLine("algo-1", line, 0))
    return seen


def test_every_line_of_the_screen_is_there(running: JobRecord) -> None:
    seen = stepped(4.0, 3.0, 2.0)
    saved_at = round(1000 * (NOON - timedelta(seconds=250)).timestamp())
    seen.read(LogLine("algo-1", "checkpoint step=2 committed uri=s3://x seconds=1.0", saved_at))
    text = screen(running, seen)
    assert "Training  for 20 min" in text
    assert "3 of 20  15%  8 min 30 s left" in text, "17 steps of 30 seconds"
    assert f"{SPARKS[-1]}{SPARKS[4]}{SPARKS[0]}  2.000000" in text
    assert "1,000 tokens/s  50% of plan  MFU 20.0% (plan 40.0%)" in text
    assert "step 2, 4 min 10 s ago" in text
    assert "11.47 of 100 USD (11%), at 6.88 USD/h each, EC2 on demand; as of 2026-03-01" in " ".join(text.split())


def test_a_line_read_late_is_as_old_as_it_says(running: JobRecord) -> None:
    """A file has no times of its own: hours later its lines were "0 s ago"."""
    seen, line = stepped(4.0), "checkpoint step=2 committed uri=/x seconds=1.0"
    seen.read(LogLine("local", f"{line} at={(NOON - timedelta(hours=3)).isoformat()}", None))
    assert "step 2, 3 h ago" in screen(running, seen)
    for cut in ("", " at=2026-1"):
        seen.read(LogLine("local", line + cut, None))
        assert "step 2; its log doesn't say when" in screen(running, seen)


def test_a_save_that_came_to_nothing_stays_told_until_one_is_committed(running: JobRecord) -> None:
    seen, at = stepped(4.0), round(1000 * NOON.timestamp())
    seen.read(LogLine("algo-1", "checkpoint step=2 not committed: a disk is too full for it; training goes on", at))
    assert "none yet; step 2 was not committed: a disk is too full for it" in screen(running, seen)
    seen.read(LogLine("algo-1", "checkpoint step=4 committed uri=s3://x seconds=1.0", at))
    assert "step 4, 0 s ago\n" in "".join(line.rstrip() + "\n" for line in screen(running, seen).splitlines())


def test_why_it_waits_is_said_and_no_more_once_it_runs(running: JobRecord) -> None:
    assert "waits       in share acme" in screen(running, Seen(), state="Queued", note="in share acme of its queue")
    assert "waits" not in screen(running, Seen(), note="training image downloaded")
    assert "none yet" in screen(running, Seen()) and "0 of 20  0%" in screen(running, Seen())


def test_steps_that_are_made_again_replace_what_was(running: JobRecord) -> None:
    seen = stepped(4.0, 3.0, 9.0)
    seen.read(LogLine("algo-1", "step=2 loss=3.1 tokens_per_second=5", 0))
    assert seen.losses == {1: 4.0, 2: 3.1} and seen.step == 2
    seen.read(LogLine("algo-1", "step=3 loss=nan tokens_per_second=5", 0))
    assert seen.losses == {1: 4.0, 2: 3.1}, "what is no number is not drawn"


def test_a_step_costs_the_same_however_many_went_before() -> None:
    seen = stepped(4.0, 3.0)
    kept = seen.losses
    for step in range(3, 100):
        seen.read(LogLine("algo-1", f"step={step} loss=2.0", 0))
        assert seen.losses is kept, "all of them were copied"
    assert len(kept) == 99


def test_a_sparkline_is_as_wide_as_asked_and_keeps_its_shape() -> None:
    assert sparkline([]) == "" and sparkline([1.0]) == SPARKS[0] and sparkline([2.0, 2.0]) == SPARKS[0] * 2
    line = sparkline([float(value) for value in range(1000, 0, -1)], width=16)
    assert len(line) == 16 and list(line) == sorted(line, reverse=True)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s"), (59, "59 s"), (250, "4 min 10 s"), (7200, "2 h"), (7501, "2 h 5 min"), (273_600, "3 d 4 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_only_the_time_on_machines_costs(running: JobRecord) -> None:
    assert billed_seconds(running.states, NOON) == 50 * 60
    found = spent(running, now=NOON)
    assert found is not None
    assert found.instance_hours == Decimal(2 * 50) / 60
    assert found.usd == Decimal("11.47"), "two machines, 50 minutes, 6.88 an hour"
    cheaper = running.model_copy(update={"plan": {**PLAN, "spot": {**QUOTE, "usd_per_hour": 2.0}}})
    at_spot = spent(cheaper, now=NOON)
    assert at_spot is not None and at_spot.usd == Decimal("3.33")
    assert spent(running.model_copy(update={"plan": {}}), now=NOON) is None
    assert spent(running.model_copy(update={"backend": "local"}), now=NOON) is None


class Logged:
    """A backend whose log is read a page at a time; each look takes the next state, the last one stays."""

    def __init__(self, pages: list[list[str]], *states: str | None) -> None:
        self.pages, self.states_to_come = pages, list(states)

    def observe(self, _: JobRecord) -> Observation | None:
        states = self.states_to_come
        state = states.pop(0) if len(states) > 1 else states[0]
        return Observation(state) if state else None

    def read_logs(self, _: JobRecord, cursor: LogCursor) -> list[LogLine]:
        number = int(cursor.positions.get("page", "0"))
        cursor.positions["page"], cursor.more = str(number + 1), number == 0
        return [LogLine("algo-1", text, None) for page in self.pages[number : number + 1] for text in page]


def followed(
    running: JobRecord, folder: Path, backend: Logged, *, quiet: bool = False, from_now: bool = False
) -> Status:
    store = FolderRecordStore(folder)
    store.create(running)
    place: Any = SimpleNamespace(store=store, backend=backend)
    before = live.before_now(place, running) if from_now else None
    return live.follow(place, JOB_ID, quiet=quiet, before=before)


def step(number: int) -> str:
    return f"step={number} loss=2.5 tokens_per_second=10.0"


@pytest.mark.parametrize("from_now", [False, True])
def test_who_waits_from_now_on_is_shown_what_comes_and_not_what_was_there(
    running: JobRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    from_now: bool,
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    past = [[step(1), "checkpoint step=1 committed uri=x"], [step(2)]]  # in two reads, as of a log of a million lines
    backend = Logged([*past, [step(3), "checkpoint step=3 committed uri=x"]], *["Training"] * 3, "Completed")
    assert followed(running, tmp_path, backend, from_now=from_now).state == "Completed"
    lines = capsys.readouterr().err.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith("step ")]
    assert shown == (["3"] if from_now else ["1", "2", "3"])
    saved = [line.split()[1] for line in lines if line.startswith("checkpoint ")]
    assert saved == (["step=3"] if from_now else ["step=1", "step=3"])
    assert [line for line in lines if line.startswith(JOB_ID)] == [f"{JOB_ID}: Training", f"{JOB_ID}: Completed"]


def test_who_waits_is_told_why_steps_come_again_and_what_was_warned_of_once(
    running: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps were shown twice, and nobody said that a rank had died; a job that trained nothing had just completed."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    died = "recovery restart=1 last_step=2 backoff_seconds=2 reason=rank 1 on algo-2 was killed by SIGKILL"
    warned = "warning: the job ends at step 2, and its checkpoint is of step 4: nothing is trained"
    pages = [
        [step(1), step(2), died, died],
        [step(1), warned, warned, "a warning: of somebody else", step(2), died],
        [warned, warned.replace("4", "5"), step(3), warned],  # a later host's
    ]
    assert followed(running, tmp_path, Logged(pages, *["Training"] * 2, "Completed")).state == "Completed"
    shown = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(JOB_ID)]
    assert [line.split("  ")[0] for line in shown] == [
        *("step 1", "step 2", died, "step 1", warned, "step 2", died),
        *(warned.replace("4", "5"), "step 3"),
    ]


def test_a_program_that_waits_is_told_the_end_alone(
    running: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    last = followed(running, tmp_path, Logged([[step(1)], [step(2)]], "Training", "Failed"), quiet=True)
    assert (last.state, last.finished) == ("Failed", True)
    assert capsys.readouterr() == ("", "")


def test_who_waits_for_a_job_that_its_backend_forgot_is_told_how_it_starts_again(
    running: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    begun = running.with_attempt(submitted_at=NOON.isoformat())
    with pytest.raises(InputError, match=f"^job {JOB_ID}: the backend no longer knows it: `trainyard resume {JOB_ID}`"):
        followed(begun, tmp_path, Logged([[step(1)], []], "Training", None))


def test_watch_of_no_job_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, told in (("Not A Job", "job id 'Not A Job'"), ("nobody-x-20260131120000-1a2b", "begins with no tenant")):
        assert run(["watch", typed]) == 2
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1
