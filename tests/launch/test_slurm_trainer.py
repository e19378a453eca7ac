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

from trainer_testing.text_job import write_job  # after the path is set

pytestmark = pytest.mark.full

STEPS = 200


def spec(folder: Path) -> JobSpec:
    file = write_job(folder, "ddp", steps=STEPS)
    changes = [
        "compute.backend=slurm",
        "compute.instance_count=2",
        "recovery.max_resumes=2",
        "checkpoint.every_steps=40",
    ]
    return load_job(file, changes)


def launched(desk: Desk) -> JobRecord:
    return launch_on_slurm_here(spec(desk.folder / "job"), desk.folder / "jobs")


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

    preempted = launched(desk)
    desk.until(preempted, lambda _: has_reached(desk, preempted, 50), "step 50", 300)
    urgent = desk.launch("urgent", "sleep 1; exit 0", queue="urgent")
    assert desk.ended(urgent).state == "Completed"
    status = desk.ended(preempted, 400)
    assert (status.state, status.record.attempt.reclaims) == ("Completed", 1)
    assert [change.note for change in status.record.states if change.state == "Interrupted"] == ["preempted"]
    assert trajectory(desk, preempted) == expected
    resumed = [line for line in desk.lines(preempted) if " resumed step=" in line]
    assert len(resumed) == 1, "it saved when it was told, and went on from there"

    robbed = launched(desk)
    desk.until(robbed, lambda _: has_reached(desk, robbed, 50), "step 50", 300)
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

    record = launched(desk)
    desk.until(record, lambda _: has_reached(desk, record, 30), "step 30", 300)
    watch.stop(desk.place.store, desk.place.backend, record.job_id)
    assert desk.ended(record, 200).state == "Stopped"
    saved = rows(desk, record)[-1]["step"]
    assert 30 <= saved < STEPS
    watch.resume(desk.place.store, desk.place.backend, record.job_id)
    status = desk.ended(record, 400)
    assert (status.state, status.record.attempt.number) == ("Completed", 2)
    assert [line for line in desk.lines(record) if f" resumed step={saved:.0f} " in line]
    assert [row["step"] for row in rows(desk, record)] == list(range(1, STEPS + 1))
