"""Runbooks on a real job of this machine: healthy, with a slow rank, started again after a rank was killed, with one
that stands still, then spoiled.

One job of two ranks for the whole file. The rank is slowed by stopping and continuing its process, so that the fault is
there for the trainer to notice, and nothing of it is played.
"""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainyard.launch import launch_here, watch
from trainyard.launch.backends import ByRecord
from trainyard.launch.local_backend import LocalBackend, is_running
from trainyard.launch.place import Place
from trainyard.launch.record import FolderRecordStore
from trainyard.operate.runbooks.__main__ import main
from trainyard.operate.runbooks.catalog import RUNBOOKS
from trainyard.operate.runbooks.evidence import Evidence, gather
from trainyard.operate.runbooks.framework import Finding
from trainyard.spec.job import load_job

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240.0
OVERRIDES = (
    "training.steps=1000000",
    "training.observe_every_steps=5",
    "training.schedule.kind=constant",
    "data.validation=[]",
    # Long enough for a rank that is slowed, short for one that is stopped.
    "recovery.hang_seconds=8",
    "recovery.max_restarts=1",
    "checkpoint.every_steps=50",
    "checkpoint.keep_last=2",
)


def place_of(folder: Path) -> Place:
    return Place(FolderRecordStore(folder), ByRecord({"local": LocalBackend(folder)}))


def rows_of(directory: Path) -> list[dict[str, object]]:
    path = directory / "output/metrics.jsonl"
    whole = path.read_text().splitlines()[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


def last_step(directory: Path) -> int:
    return int(str(rows_of(directory)[-1]["step"]))


def wait_for(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def pid_of(directory: Path, rank: int) -> int:
    (path,) = directory.rglob(f"ranks/rank-{rank}.json")
    return int(json.loads(path.read_text())["pid"])


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process runs a tenth of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.09)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.01)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def is_named(directory: Path) -> bool:
    """Whether the trainer has noticed: the newest comparisons of the ranks name rank 1."""
    found = [row["observed"]["stragglers"] for row in rows_of(directory) if "observed" in row][-6:]  # type: ignore[index]
    told = [any(one["rank"] == 1 for one in stragglers) for stragglers in found]
    return sum(told) >= 4 and told[-1] and told[-2]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Evidence]]:
    """What could be seen of the job in each of its states."""
    folder = tmp_path_factory.mktemp("jobs")
    seen: dict[str, Evidence] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        job_id = launch_here(load_job(ROOT / "jobs/tiny.yaml", OVERRIDES), folder, num_processes=2).job_id
    directory, place = folder / job_id, place_of(folder)

    def look(name: str) -> None:
        seen[name] = gather(place, job_id, [], tmp_path_factory.mktemp(f"evidence-{name}"))

    try:
        wait_for("a checkpoint and 60 steps", lambda: len(rows_of(directory)) > 110)
        look("healthy")
        with slowed(pid_of(directory, 1)):
            wait_for("the slow rank to be noticed", lambda: is_named(directory))
            look("slow")
        os.kill(pid_of(directory, 1), signal.SIGKILL)
        killed_at = last_step(directory)
        wait_for("the next start's first steps", (directory / "output/recovery.jsonl").exists)
        wait_for("steps without the fault", lambda: last_step(directory) > killed_at + 80)
        look("passed")
        os.kill(pid_of(directory, 1), signal.SIGSTOP)
        wait_for("the host to find the rank", lambda: not is_running(directory))
        look("hung")
        newest = max(directory.glob("checkpoints/step-*"))
        shard = max((path for path in newest.iterdir()), key=lambda path: path.stat().st_size)
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        look("spoiled")
        yield seen
    finally:
        if is_running(directory):
            watch.stop(place.store, place.backend, job_id)
            wait_for("the job's end", lambda: not is_running(directory))
        shutil.rmtree(directory)


def named(evidence: Evidence) -> set[str]:
    return {
        runbook.name
        for runbook in RUNBOOKS
        if runbook.diagnose is not None and any(one.kind == "fault" for one in runbook.diagnose(evidence))
    }


def looked(evidence: Evidence, name: str) -> list[Finding]:
    (runbook,) = [one for one in RUNBOOKS if one.name == name]
    assert runbook.diagnose is not None
    return runbook.diagnose(evidence)


def decided(evidence: Evidence, name: str) -> str:
    return " ".join(line for one in looked(evidence, name) for line in one.decided_by)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_each_state_of_the_job_is_named_by_its_own_runbook_alone(course: dict[str, Evidence]) -> None:
    # How fast the machine's other work lets a healthy job be is not the job's: job_slow may see that, and nothing else.
    assert named(course["healthy"]) <= {"job_slow"}, course["healthy"].recoveries
    assert named(course["slow"]) == {"job_slow"}
    assert "rank 1 on " in decided(course["slow"], "job_slow")
    assert named(course["passed"]) <= {"job_slow"}, "the job has run past it"
    assert [row["restart"] for row in course["passed"].recoveries] == [1]
    (happened,) = [one for one in looked(course["passed"], "out_of_memory") if "ran past it" in one.words]
    assert happened.kind == "clear" and "was killed by SIGKILL" in happened.decided_by[0]
    assert named(course["hung"]) - {"job_slow"} == {"job_hung"}, (course["hung"].failure, course["hung"].lines[-20:])
    assert "it is stopped (SIGSTOP or frozen)" in decided(course["hung"], "job_hung")
    # The job hung, and its newest checkpoint was spoiled afterwards: both are there now, and nothing else.
    assert named(course["spoiled"]) - {"job_slow"} == {"job_hung", "checkpoint_stale_or_corrupt"}
    told = decided(course["spoiled"], "checkpoint_stale_or_corrupt")
    assert "is altered (its SHA-256 is not the manifest's)" in told


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_evidence_is_kept(course: dict[str, Evidence], tmp_path: Path) -> None:
    hung = course["hung"]
    assert (hung.state, hung.missing) == ("Failed", {})
    assert hung.rows and hung.checkpoints[-1].is_good and "hangs: no progress" in hung.failure


def test_wrong_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    for arguments, words in (
        (["job_slow"], "JOB: missing"),
        (["nonsense"], "there is none of that name; there are: job_slow"),
        (["job_slow", "Not_A_Job"], "must look like"),
        (["job_slow", "--log", str(tmp_path / "none")], "can't be read"),
        (["job_slow", "acme-tiny-20260131120000-1a2b", "-e", "nowhere"], "no such environment"),
    ):
        assert main(arguments) == 2
        *_, line = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("trainyard: ") and words in line and "Traceback" not in line


def test_the_document_has_what_decided_and_the_folder_has_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, folder = tmp_path / "dmesg.txt", tmp_path / "evidence"
    log.write_text("NVRM: Xid (PCI:0000:44:00): 79, pid=1, name=x, GPU has fallen off the bus.\n")
    code = main(["bad_node", "--log", str(log), "--evidence", str(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (code, document["exit_code"], document["findings"][0]["kind"]) == (1, 1, "fault")
    assert document["findings"][0]["decided_by"][0].startswith("line 1: NVRM: Xid")
    assert json.loads((folder / "report.json").read_text()) == document
    assert "fallen off the bus" in (folder / "lines.txt").read_text()
    log.write_text("all is well\n")
    assert main(["bad_node", "--log", str(log), "--evidence", str(folder)]) == 0
