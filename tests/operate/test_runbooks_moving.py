"""Runbooks that take a job elsewhere, for real: off a bad machine of a real Slurm; to another layout, another place."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_testing import cluster  # noqa: F401
from slurm_testing import desk as slurm_desk  # noqa: F401
from slurm_testing.desk import Desk

from trainyard.launch import launch_here, watch
from trainyard.launch.cluster_shell import HereShell
from trainyard.launch.local_backend import is_running
from trainyard.launch.place import Place, local_place
from trainyard.operate.runbooks import bad_node
from trainyard.operate.runbooks.__main__ import main
from trainyard.spec.job import load_job

ROOT = Path(__file__).resolve().parents[2]
XID = "NVRM: Xid (PCI:0000:44:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"
PATIENCE_SECONDS = 300.0


def wait_for(what: str, is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def called(*arguments: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()  # what was run before may have told its steps
        code = main([*arguments, "--evidence", str(tmp_path / "evidence"), "--json"])
        printed = capsys.readouterr()
        assert printed.out, printed.err
        return code, json.loads(printed.out)

    return called


def test_a_bad_machine_is_drained_and_its_job_goes_on_with_another(
    slurm_desk: Desk,  # noqa: F811
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = slurm_desk
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(desk.folder))
    record = desk.launch("leaves", "[ -e saved-0 ] && exit 0; wait_for_a_signal", instance_count=1)
    started = desk.directory(record) / "started"
    desk.until(record, lambda _: started.exists() and started.read_text().split(), "its start")
    (bad,) = started.read_text().split()
    log = tmp_path / "dmesg.txt"
    log.write_text(XID)
    arguments = ("bad_node", record.job_id, "--log", str(log), "--node")
    code, document = run(*arguments, bad)
    assert code == 1 and [step["made"] for step in document["steps"]] == [False] * 3
    assert "drain" not in desk.cluster.node_states()[bad], "a dry run changes nothing"
    assert main([*arguments, "node9", "--yes"]) == 1, "Slurm's own refusal"
    assert desk.status(record).state == "Training", "and the job was left alone"
    try:
        code, document = run(*arguments, bad, "--yes")
        assert [step["made"] for step in document["steps"]] == [True] * 3, document
        assert "drain" in desk.cluster.node_states()[bad]
        assert "Xid 79" in desk.cluster.command("scontrol", "show", "node", bad)
        status = desk.ended(record)
        assert (status.state, status.record.attempt.number) == ("Completed", 2)
        first, second = started.read_text().split()
        assert first == bad != second, "it went on with the other machine"
    finally:
        desk.cluster.command("scontrol", "update", f"NodeName={bad}", "State=RESUME")


SCONTROL = """#!/bin/sh
[ -n "$IS_ROOT" ] && echo "$@" > "$FOLDER/told" && exit 0
echo "slurm_update error: $REFUSAL" >&2
exit 1
"""
SUDO = """#!/bin/sh
[ "$1" = -n ] && shift
IS_ROOT=yes exec "$@"
"""


def test_who_may_only_submit_drains_as_root_where_sudo_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("scontrol", SCONTROL), ("sudo", SUDO)):
        (tmp_path / name).write_text(text.replace("$FOLDER", str(tmp_path)).replace("$REFUSAL", "Invalid user id"))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = HereShell().run(bad_node._DRAIN, "node-3", "Xid 79")
    assert answer.code == 0, answer
    assert (tmp_path / "told").read_text() == "update NodeName=node-3 State=DRAIN Reason=Xid 79\n"
    (tmp_path / "scontrol").write_text(SCONTROL.replace("$REFUSAL", "Invalid node name specified"))
    answer = HereShell().run(bad_node._DRAIN, "node-9", "Xid 79")
    assert (answer.code, answer.words) == (1, "slurm_update error: Invalid node name specified"), "no second try"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(ROOT)
    return local_place()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_running_job_goes_on_with_another_layout_and_then_in_another_place(
    place: Place, run: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "state" / "jobs"
    overrides = ("training.steps=100000", "training.schedule.kind=constant", "checkpoint.every_steps=20")
    job_id = launch_here(load_job(ROOT / "jobs/tiny.yaml", overrides), folder, num_processes=2).job_id
    directory = folder / job_id

    def newest() -> int:
        steps = [int(path.parent.name.split("-")[1]) for path in directory.glob("checkpoints/step-*/COMMITTED")]
        return max(steps, default=0)

    try:
        wait_for("a checkpoint", newest)
        code, document = run("move_job", job_id, "--parallelism", "{data_shard: 2}", "--yes")
        assert code == 0 and [step["made"] for step in document["steps"]] == [True, True], document
        saved = newest()
        wait_for("a checkpoint by the other layout", lambda: newest() > saved)
        record = place.store.read(job_id).record
        assert record.attempt.number == 2 and record.resolved.parallelism.data_shard == 2
        code, document = run("move_job", job_id, "--to", "local", "--folder", str(tmp_path / "moved"), "--yes")
        assert code == 0 and [step["made"] for step in document["steps"]] == [True] * 3, document
        (moved,) = [found for found in place.store.job_ids() if found != job_id]
        wait_for("its first line there", lambda: "resumed step=" in (folder / moved / "log.txt").read_text())
        first = next(
            line for line in (folder / moved / "log.txt").read_text().splitlines() if line.startswith("resumed step=")
        )
        assert f"step={newest()} " in first and str(tmp_path / "moved") in first
        assert watch.status(place.store, place.backend, job_id).state == "Stopped", "the old one stays"
        moved_to = place.store.read(moved).record
        assert moved_to.checkpoint_destination == str(tmp_path / "moved")
    finally:
        for found in place.store.job_ids():
            if is_running(folder / found):
                watch.stop(place.store, place.backend, found)
                wait_for("its end", lambda path=folder / found: not is_running(path))  # type: ignore[misc]
