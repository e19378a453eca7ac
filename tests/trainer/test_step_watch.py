"""When a rank that says nothing hangs: at the start, in a restart, between steps, and when its process is stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer.host.rank import RankReport
from trainer.host.watch import StepWatch, heartbeat_file, is_stopped

from trainyard.spec.job import RecoverySpec

SPEC = RecoverySpec(hang_seconds=100, start_minutes=60)


class Host:
    """Two ranks' heartbeats, and a clock that is moved by hand."""

    def __init__(self, folder: Path, *, known_start_seconds: float | None = None, spec: RecoverySpec = SPEC) -> None:
        self.now = 1000.0
        self._folder = folder
        self._num_beats = 0
        self.reports = {rank: RankReport(rank, os.getpid()) for rank in range(2)}
        for rank in range(2):
            heartbeat_file(folder, rank).unlink(missing_ok=True)
        self.watch = StepWatch(folder, range(2), spec, known_start_seconds=known_start_seconds, clock=lambda: self.now)

    def beat(self, rank: int, step: int, *, is_patient: bool = False) -> None:
        self._num_beats += 1
        heartbeat_file(self._folder, rank).write_text(f"{step:012d} {self._num_beats:012d} {is_patient:d}\n")

    def after(self, seconds: float) -> dict[int, float]:
        """Who hangs after so long without a word."""
        self.watch.look()
        self.now += seconds
        self.watch.look()
        return self.watch.hanging(self.reports)


def test_the_first_start_has_its_minutes_and_a_beat_begins_them_anew(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.after(3599) == {}
    host.beat(0, 0)  # it reads a checkpoint, and the other one waits for it
    assert host.after(3599) == {}
    assert set(host.after(2)) == {0, 1}


def test_a_restart_may_be_silent_three_starts_long(tmp_path: Path) -> None:
    assert set(Host(tmp_path, known_start_seconds=70).after(211)) == {0, 1}
    assert Host(tmp_path, known_start_seconds=70).after(209) == {}
    assert Host(tmp_path, known_start_seconds=5).after(99) == {}, "hang_seconds"
    hasty = SPEC.model_copy(update={"hang_seconds": 6.0})
    assert Host(tmp_path, known_start_seconds=5, spec=hasty).after(59) == {}, "imports on a busy machine"
    assert Host(tmp_path, known_start_seconds=5, spec=hasty).after(61)
    patient = SPEC.model_copy(update={"hang_seconds": None})
    assert Host(tmp_path, known_start_seconds=5, spec=patient).after(3599) == {}
    assert Host(tmp_path, known_start_seconds=5000).after(3599) == {}
    assert Host(tmp_path, known_start_seconds=5000).after(3601), "start_minutes"


def test_who_is_late_with_its_first_step_is_not_blamed_for_the_start(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.after(500) == {}
    host.beat(0, 1)
    assert host.after(99) == {}
    assert host.watch.first_step_seconds == 500
    # The second step may be as slow as the first; from then on the median counts.
    assert host.after(400) == {}
    host.beat(0, 2)
    host.beat(1, 2)
    assert host.after(1) == {} and host.watch.limit_seconds == pytest.approx(10 * 499)
    for step in range(3, 9):
        host.beat(0, step)
        host.beat(1, step)
        assert host.after(1) == {}
    host.beat(0, 9)
    assert set(host.after(101)) == {0, 1}


def test_a_rank_that_compiles_may_be_silent_as_at_the_start(tmp_path: Path) -> None:
    host = Host(tmp_path, known_start_seconds=5)
    for step in range(1, 9):
        host.beat(0, step)
        host.beat(1, step)
        assert host.after(1) == {}
    host.beat(0, 8, is_patient=True)
    assert set(host.after(101)) == {1}
    host.beat(1, 8, is_patient=True)
    assert host.after(3400) == {}
    assert set(host.after(200)) == {0}
    host.beat(0, 8)
    host.beat(1, 8, is_patient=True)
    assert host.after(1) == {} and set(host.after(100)) == {0}, "from its next beat on the limit is a step's again"


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def frozen() -> Iterator[int]:
    """A process that is stopped."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(process.pid))
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_process_hangs_in_any_phase(tmp_path: Path, frozen: int) -> None:
    host = Host(tmp_path)
    host.reports[1] = RankReport(1, frozen)
    assert host.after(1) == {}
    assert host.after(99) == {}
    assert set(host.after(2)) == {1}, "before the first beat of the first start"
    os.kill(frozen, signal.SIGCONT)
    wait_until(lambda: not is_stopped(frozen))
    assert host.after(1) == {}, "it runs again"
    os.kill(frozen, signal.SIGSTOP)
    wait_until(lambda: is_stopped(frozen))
    assert host.after(1) == {}, "counted anew"
    never = SPEC.model_copy(update={"hang_seconds": None})
    patient = Host(tmp_path, spec=never)
    patient.reports[1] = RankReport(1, frozen)
    assert patient.after(1) == {} and patient.after(3000) == {}
