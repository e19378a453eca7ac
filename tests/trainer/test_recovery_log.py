"""What recovery.jsonl says of a restart: its parts, from the host's own looks and the trainer's account."""

import json
import time
from pathlib import Path

import pytest
from trainer.host.recovery import Ending, RecoveryLog, Restart
from trainer.observe.goodput import GoodputLog

from trainyard.cli.seen import Seen
from trainyard.launch.backend import LogLine

RESTART = Restart(0.0, 1, Ending(1, "rank 1 on algo-1 was killed by SIGKILL", step=7))


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "recovery.jsonl").read_text().splitlines()]


def test_the_parts_add_up_to_the_time_to_the_next_step(tmp_path: Path) -> None:
    log = RecoveryLog(tmp_path, is_first=True)
    log.failed(RESTART, noticed_at=time.monotonic() - 3.0, quiet_seconds=0.5)
    account = GoodputLog(tmp_path)
    time.sleep(0.05)
    account.begin([], attempt=2, resumed_step=6, seconds={"process": 0.01, "rendezvous": 0.02, "build": 0, "load": 0})
    log.progress(0)
    assert not (tmp_path / "recovery.jsonl").exists(), "no step yet"
    log.progress(7)
    (row,) = rows_of(tmp_path)
    assert row["detection_seconds"] == 0.5
    assert row["stop_seconds"] >= 3.0
    parts = ("stop", "backoff", "schedule", "process", "rendezvous", "build", "load", "first_step")
    assert sum(row[f"{part}_seconds"] for part in parts) == pytest.approx(row["seconds_to_next_step"], abs=0.02)
    assert (row["process_seconds"], row["rendezvous_seconds"]) == (0.01, 0.02)


def test_a_restart_that_failed_before_a_step_has_a_row_too(tmp_path: Path) -> None:
    log = RecoveryLog(tmp_path, is_first=True)
    log.failed(RESTART, noticed_at=time.monotonic() - 30.0)
    log.progress(0)
    log.failed(Restart(0.0, 2, Ending(1, "rank 0 on algo-1 was killed by SIGKILL")), noticed_at=time.monotonic() - 3.0)
    log.progress(7)
    log.failed(Restart(0.0, 3, Ending(1, "boom", step=9)))
    log.ended()
    log.ended()
    first, second, third = rows_of(tmp_path)
    assert [first["restart"], second["restart"], third["restart"]] == [1, 2, 3]
    assert "seconds_to_next_step" not in first and "seconds_to_next_step" not in third
    # As long as the job stood still: since the first failure, of which the first start's time is a part of its own.
    assert second["seconds_to_next_step"] >= 30.0 and second["earlier_seconds"] >= 26.0
    assert "earlier_seconds" not in third


def test_a_trainer_that_tells_nothing_leaves_the_whole(tmp_path: Path) -> None:
    # An account of the start before, and half a row: neither is this start's.
    GoodputLog(tmp_path).begin([], attempt=1, resumed_step=0, seconds=dict.fromkeys(("process", "load"), 0.0))
    time.sleep(0.01)
    log = RecoveryLog(tmp_path, is_first=True)
    log.failed(RESTART)
    with (tmp_path / "goodput.jsonl").open("a") as file:
        file.write('{"start": {"at"')
    log.progress(7)
    (row,) = rows_of(tmp_path)
    assert row["seconds_to_next_step"] >= 0
    assert "load_seconds" not in row


def test_goodput_so_far_is_of_all_time_since_the_jobs_first_start(tmp_path: Path) -> None:
    """Lost steps and saves are none of it, and what came before a restart is in both."""
    GoodputLog(tmp_path).begin([], attempt=1, resumed_step=0, seconds={"process": 1000.0})
    again = GoodputLog(tmp_path)
    rows = [{"step": step, "step_seconds": 100.0, "breakdown": {"checkpoint": 25.0}} for step in range(1, 6)]
    again.begin(rows, attempt=2, resumed_step=3, seconds={"process": 200.0})
    assert again.share() == pytest.approx(3 * 75 / 1000, rel=0.03)
    again.step(rows[3])
    assert again.share() == pytest.approx(4 * 75 / 1000, rel=0.03)
    again.went_back(rows[:4], 2)
    assert again.share() == pytest.approx(2 * 75 / 1000, rel=0.03)


def test_steps_that_are_made_again_are_lost_and_saves_are_no_steps(tmp_path: Path) -> None:
    account = GoodputLog(tmp_path)
    rows = [{"step": step, "step_seconds": 1.0, "breakdown": {"checkpoint": 0.25}} for step in range(1, 6)]
    seconds = {"process": 1.0, "rendezvous": 1.0, "build": 1.0, "load": 1.0}
    account.begin(rows, attempt=2, resumed_step=3, seconds=seconds)
    account.step(rows[3])
    account.total()
    account.went_back(rows[:4], 3)
    account.total()
    written = [json.loads(line) for line in account.path.read_text().splitlines() if line]
    assert [next(iter(row)) for row in written] == ["start", "first_step", "totals", "lost", "totals"]
    assert (written[0]["start"]["lost_steps"], written[0]["start"]["lost_seconds"]) == (2, 2.0)
    assert all(row["totals"].pop("at") <= time.time() for row in written if "totals" in row)
    assert written[2]["totals"] == {"steps": 4, "useful_seconds": 3.0, "save_seconds": 1.0}
    assert written[3]["lost"] == {"attempt": 2, "steps": 1, "seconds": 1.0}
    assert written[4]["totals"] == {"steps": 3, "useful_seconds": 2.25, "save_seconds": 0.75}


def test_other_hosts_say_nothing_of_a_restart_that_the_first_one_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logs come host by host: told by each, one restart was as many."""
    for is_first in (True, False):
        log = RecoveryLog(tmp_path, is_first=is_first)
        log.failed(RESTART)
        log.progress(RESTART.failure.step + 1)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and all(line.startswith("recovery restart=") for line in told)
    seen = Seen()
    seen.read(LogLine("algo-1", told[0], None))
    (restart,) = seen.restarts
    assert (restart.last_step, restart.reason) == (RESTART.failure.step, RESTART.failure.reason)
    assert restart.at is not None and 0 <= time.time() - restart.at < 60, "a log without times tells it all the same"
