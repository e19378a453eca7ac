"""The trainer itself on a real Slurm with two machines: preempted, or robbed of one, it learns bit for bit the same.

The trajectories are those of the metrics that go with the checkpoints: each step once, none left out, losses equal.
"""

import json
import sys
from pathlib import Path

import pytest
from slurm_testing.desk import Desk

from trainyard.launch.cluster import launch_on_slurm_here
from trainyard.launch.record import JobRecord
from trainyard.spec.job import JobSpec, load_job

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE, MODULE  # after the path is set
from trainer_testing.text_job import write_job

pytestmark = pytest.mark.full

TESTS = Path(__file__).parents[1] / "trainer"
STEPS = 200
REACHED = 50


def spec(folder: Path, python: Path | str) -> JobSpec:
    file = write_job(folder, "ddp", steps=STEPS)
    changes = [
        "compute.backend=slurm",
        "compute.instance_count=2",
        f"compute.slurm.python={python}",
        "recovery.max_resumes=2",
        "checkpoint.every_steps=40",
    ]
    return load_job(file, changes)


def launched(desk: Desk, python: Path | str = sys.executable) -> JobRecord:
    return launch_on_slurm_here(spec(desk.folder / "job", python), desk.folder / "jobs")


def held(desk: Desk, name: str) -> JobRecord:
    """One whose ranks begin the step after REACHED once they are told to stop, or are killed before: nothing that
    happens to it comes too late, however quick its steps are."""
    faults, python = desk.folder / name, desk.folder / f"{name}.sh"
    faults.mkdir()
    orders = [{"rank": rank, "kind": "await_stop", "step": REACHED + 1} for rank in range(2)]
    (faults / "faults.json").write_text(json.dumps(orders))
    python.write_text(
        f"#!/bin/sh\nexport TRAINYARD_RANK_MODULE={MODULE} {FOLDER_VARIABLE}='{faults}'"
        f' PYTHONPATH="{TESTS}:$PYTHONPATH"\nexec \'{sys.executable}\' "$@"\n'
    )
    python.chmod(0o755)
    return launched(desk, python)


def rows(desk: Desk, record: JobRecord) -> list[dict[str, float]]:
    text = (desk.directory(record) / "metrics.jsonl").read_text()
    return [row for line in text.splitlines() if "loss" in (row := json.loads(line))]


def trajectory(desk: Desk, record: JobRecord) -> list[tuple[float, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(desk, record)]


def has_reached(desk: Desk, record: JobRecord, step: int) -> bool:
    path = desk.directory(record) / "output/metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= step


def test_requeued_jobs_learn_what_the_undisturbed_one_learns(desk: Desk) -> None:
    undisturbed = launched(desk)
    assert desk.ended(undisturbed, 400).state == "Completed"
    expected = trajectory(desk, undisturbed)
    assert [step for step, _, _ in expected] == list(range(1, STEPS + 1))

    preempted = held(desk, "preempted")
    desk.until(preempted, lambda _: has_reached(desk, preempted, REACHED), f"step {REACHED}", 300)
    urgent = desk.launch("urgent", "sleep 1; exit 0", queue="urgent")
    assert desk.ended(urgent).state == "Completed"
    status = desk.ended(preempted, 400)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)
    assert [change.note for change in status.record.states if change.state == "Interrupted"] == ["preempted"]
    assert trajectory(desk, preempted) == expected
    resumed = [line for line in desk.lines(preempted) if " resumed step=" in line]
    assert len(resumed) == 1 and f"step={REACHED + 1} " in resumed[0], (
        "it saved when it was told, and went on from there"
    )

    robbed = held(desk, "robbed")
    desk.until(robbed, lambda _: has_reached(desk, robbed, REACHED), f"step {REACHED}", 300)
    desk.cluster.lose_node("node2")
    try:
        desk.until(robbed, lambda status: status.state == "Queued", "the requeue", 120)
    finally:
        desk.cluster.start_node("node2")
    status = desk.ended(robbed, 400)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)
    assert trajectory(desk, robbed) == expected
    assert [line for line in desk.lines(robbed) if " resumed step=40 " in line], "the newest checkpoint before the loss"


def test_stop_saves_and_resume_goes_on_with_the_same_steps(desk: Desk) -> None:
    from trainyard.launch import watch

    record = held(desk, "stopped")
    desk.until(record, lambda _: has_reached(desk, record, REACHED), f"step {REACHED}", 300)
    watch.stop(desk.place.store, desk.place.backend, record.job_id)
    assert desk.ended(record, 200).state == "Stopped"
    saved = rows(desk, record)[-1]["step"]
    assert saved == REACHED + 1, "the step in which it was told"
    watch.resume(desk.place.store, desk.place.backend, record.job_id)
    status = desk.ended(record, 400)
    assert (status.state, status.record.attempt.number) == ("Completed", 2)
    assert [line for line in desk.lines(record) if f" resumed step={saved:.0f} " in line]
    assert [row["step"] for row in rows(desk, record)] == list(range(1, STEPS + 1))
