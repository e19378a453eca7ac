"""The trainer on a real Ray of two nodes: a worker that is killed, a stop and a resume; it learns bit for bit the same.

The trajectories are those of the metrics that go with the checkpoints: each step once, none left out, losses equal to
those of the same job on this machine without Ray.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_testing import RayCluster

from trainyard.errors import InputError
from trainyard.launch import launch_here, watch
from trainyard.launch.backend import LogCursor
from trainyard.launch.goodput import goodput
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.ray import here_backend, launch_on_ray_here
from trainyard.launch.ray_backend import EVENT
from trainyard.launch.ray_jobs import HttpJobServer
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.launch.watch import Status
from trainyard.spec.job import JobSpec, load_job

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from trainer_testing.distributed import TESTS  # after the path is set
from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE, MODULE
from trainer_testing.text_job import write_job

pytestmark = pytest.mark.full

STEPS = 60


class RayDesk:
    """Jobs of a folder on the cluster."""

    def __init__(self, cluster: RayCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder / "records"
        self.file = write_job(folder / "job", "ddp", steps=STEPS)
        self.store, self.backend = FolderRecordStore(self.folder), here_backend(self.folder)

    def spec(self, *changes: str, python: Path | None = None) -> JobSpec:
        ray = f'{{"address":"{self.cluster.address}","python":"{python or self.cluster.python}"}}'
        return load_job(
            self.file,
            [
                *("compute.backend=ray", "compute.instance_count=2", f"compute.ray={ray}"),
                *("checkpoint.every_steps=20", "recovery.max_restarts=0"),
                *changes,
            ],
        )

    @property
    def faults(self) -> Path:
        """What becomes of the `python_with` orders."""
        return self.file.parent / "faults"

    def python_with(self, *orders: dict[str, Any]) -> Path:
        """An interpreter whose ranks keep to these (`faulty_trainer`): nothing comes too late for a quick job."""
        self.faults.mkdir()
        (self.faults / "faults.json").write_text(json.dumps(orders))
        python = self.file.parent / "python"
        python.write_text(
            f"#!/bin/sh\nexport TRAINYARD_RANK_MODULE={MODULE} {FOLDER_VARIABLE}='{self.faults}'"
            f' PYTHONPATH="{TESTS}:$PYTHONPATH"\nexec \'{self.cluster.python}\' "$@"\n'
        )
        python.chmod(0o755)
        return python

    def status(self, record: JobRecord) -> Status:
        return watch.status(self.store, self.backend, record.job_id)

    def until(self, record: JobRecord, is_so: Callable[[Status], bool], what: str, seconds: float = 300) -> Status:
        deadline = time.monotonic() + seconds
        while not is_so(current := self.status(record)):
            assert time.monotonic() < deadline, f"{what} did not come: {current}\n{self.lines(current.record)}"
            assert not current.finished, f"{what} did not come: {current}\n{self.lines(current.record)}"
            time.sleep(0.5)
        return current

    def ended(self, record: JobRecord) -> Status:
        return self.until(record, lambda status: status.finished, "the end")

    def lines(self, record: JobRecord) -> list[str]:
        return [f"{line.host} {line.text}" for line in self.backend.read_logs(record, LogCursor())]

    def rows(self, record: JobRecord, file: Path) -> int:
        path = self.folder / record.job_id / file
        return len(path.read_text().splitlines()) if path.exists() else 0

    def trajectory(self, record: JobRecord) -> list[tuple[float, float, float]]:
        return trajectory(self.folder / record.job_id / "metrics.jsonl")


def trajectory(path: Path) -> list[tuple[float, float, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.fixture
def desk(ray_cluster: RayCluster, tmp_path: Path) -> RayDesk:
    return RayDesk(ray_cluster, tmp_path)


LIVE = Path("host-0/output/data/metrics.jsonl")


def test_a_killed_worker_costs_no_step_and_the_losses_are_this_machines(desk: RayDesk, tmp_path: Path) -> None:
    local = launch_here(load_job(desk.file, ["checkpoint.every_steps=20"]), tmp_path / "local", num_processes=2)
    store, backend = FolderRecordStore(tmp_path / "local"), LocalBackend(tmp_path / "local")
    *_, (last, _) = watch.watch(store, backend, local.job_id, sleep=time.sleep)
    assert last.state == "Completed", last
    expected = trajectory(tmp_path / "local" / local.job_id / "metrics.jsonl")
    assert [step for step, _, _ in expected] == list(range(1, STEPS + 1))

    python = desk.python_with({"rank": 0, "kind": "worker_killed", "step": 27, "holds": 0.2})
    record = launch_on_ray_here(desk.spec("recovery.max_resumes=1", python=python), desk.folder)
    desk.until(record, lambda _: desk.rows(record, LIVE) > 25, "step 26")
    # Saves are made beside training: on a busy machine none may be whole by then, and the job would begin anew.
    saved = Path(record.checkpoint_destination, "checkpoints")
    desk.until(record, lambda _: any(saved.glob("*/COMMITTED")), "a checkpoint")
    assert desk.backend.states([record]) == {record.job_id: "Training"}
    log = HttpJobServer().driver_log(desk.cluster.address, record.job_id)
    started = [json.loads(line.removeprefix(EVENT)) for line in log.splitlines() if '"Training"' in line]
    os.kill(started[0]["pids"][1], signal.SIGKILL)
    (desk.faults / "over-0").touch()
    status = desk.ended(record)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1), desk.lines(record)
    told = ("Training", "Interrupted", "Completed", "Failed")
    states = [change.state for change in status.record.states if change.state in told]
    assert states == ["Training", "Interrupted", "Training", "Completed"]
    (note,) = (change.note for change in status.record.states if change.state == "Interrupted")
    assert note.startswith("host node-1 is gone: Ray: "), note
    assert desk.trajectory(record) == expected
    lines = desk.lines(record)
    assert sum(line.startswith("node-0 resumed step=") for line in lines) == 1, lines
    session = status.record.attempt.cluster
    assert session.startswith("session_") and (desk.cluster.folder / session).is_dir(), "Ray's own name of it"
    reached = goodput(status.record, None)
    assert reached is not None and reached.num_starts == 2 and 0 < reached.share < 1


def test_stop_saves_and_resume_goes_on_with_the_same_steps(desk: RayDesk) -> None:
    python = desk.python_with(*({"rank": rank, "kind": "await_stop", "step": 14} for rank in range(2)))
    record = launch_on_ray_here(desk.spec(python=python), desk.folder)
    desk.until(record, lambda _: desk.rows(record, LIVE) > 12, "step 13")
    watch.stop(desk.store, desk.backend, record.job_id)
    status = desk.ended(record)
    assert (status.state, status.observation and status.observation.note) == ("Stopped", "")
    saved = len(desk.trajectory(record))
    assert saved == 14, "the step that was under way when the stop came"
    watch.resume(desk.store, desk.backend, record.job_id)
    status = desk.ended(record)
    assert (status.state, status.record.attempt.number) == ("Completed", 2)
    lines = desk.lines(status.record)
    assert any(f"node-0 resumed step={saved} " in line for line in lines), lines
    assert [step for step, _, _ in desk.trajectory(record)] == list(range(1, STEPS + 1))


def test_a_job_that_cannot_go_on_and_a_cluster_that_is_not_there_are_told(desk: RayDesk) -> None:
    with pytest.raises(InputError, match="no Ray job server answers"):
        launch_on_ray_here(desk.spec("compute.ray.address=http://127.0.0.1:9"), desk.folder)
    record = launch_on_ray_here(desk.spec("recovery.max_resumes=3"), desk.folder)
    (desk.file.parent / "train.txt").unlink()  # long before a rank looks for it
    status = desk.ended(record)
    assert status.state == "Failed" and "train.txt" in status.record.attempt.failure, status
    assert status.record.attempt.reclaims == 0, "another start would end the same way"
