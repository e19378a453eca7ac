"""Killed without notice, a job goes on in new processes as if nothing had happened: the same losses, bit for bit."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.observe.left_out import LEFT_OUT_FILE
from trainer.observe.metrics import MetricsLog
from trainer.session import Session
from trainer_testing.checkpoints import unchanged_bytes
from trainer_testing.distributed import finish
from trainer_testing.text_job import bits, rows_of, run_trainer, start_faulty_trainer, write_job

from trainyard.errors import AwsRefusedError

STEPS, CHECKPOINT, KILLED_AT = 24, 4, 10
"""A save is begun when the one before is committed: in step 10, with one every 4 steps, one is."""


@pytest.mark.parametrize("layout", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero2"))])
def test_kill_9_and_resume_equal_the_uninterrupted_run(layout: str, tmp_path: Path) -> None:
    job = write_job(tmp_path, layout, steps=STEPS, validation_every_steps=3)
    _, whole = run_trainer(2, job, tmp_path / "whole")
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    folders = [tmp_path / f"whole/checkpoints/step-{step:08d}" for step in (STEPS - CHECKPOINT, STEPS)]
    same, total = unchanged_bytes(*folders)
    # The texts are ASCII: the second half of the embedding's rows, a shard of its own under FSDP, has moments of zero.
    assert same == (2 * 4 * 128 * 32 if layout == "fsdp" else 0) and total > 12 * same, "each save writes what changed"

    # fsdp: another machine, with the checkpoints' folder alone in common.
    output_dir = tmp_path / ("fresh" if layout == "fsdp" else "killed")
    shared = ("--set", f"checkpoint.destination={tmp_path}/shared") if layout == "fsdp" else ()
    faults = [{"rank": rank, "step": KILLED_AT, "kind": "kill"} for rank in range(2)]
    ended = finish(start_faulty_trainer(2, job, tmp_path / "killed", faults, *shared), timeout_seconds=600)
    assert -signal.SIGKILL in [code for code, _ in ended]
    assert not (tmp_path / "killed" / "result.json").exists()

    output, resumed = run_trainer(2, job, output_dir, *shared)
    step = resumed_step(output)
    assert CHECKPOINT <= step < STEPS
    assert bits(resumed) == bits(whole)
    assert [row["attempt"] for row in resumed] == [1] * step + [2] * (STEPS - step)
    result = json.loads((output_dir / "result.json").read_text())
    assert (result["attempts"], result["status"], result["strategy"]) == (2, "completed", layout)
    assert result["loss_last"] == whole[-1]["loss"]
    if layout == "fsdp":
        assert json.loads((tmp_path / "shared" / "result.json").read_text()) == result
        assert bits(rows_of(tmp_path / "shared")) == bits(whole)
    if layout == "ddp":
        stop_and_resume(job, tmp_path / "stopped", whole)
    if layout == "zero2":
        take_over_with_one_rank(job, output_dir, whole)


def resumed_step(output: str) -> int:
    lines = [line for line in output.splitlines() if line.startswith("resumed step=")]
    assert len(lines) == 1, output
    return int(lines[0].split()[1].removeprefix("step="))


def stop_and_resume(job: Path, output_dir: Path, whole: list[dict[str, Any]]) -> None:
    """SIGTERM to one rank alone: all save the same step, say that they want to be resumed, and are, bit for bit."""
    faults = [{"rank": 1, "step": 3, "kind": "terminate"}]
    outputs = finish(start_faulty_trainer(2, job, output_dir, faults), timeout_seconds=600)
    assert [code for code, _ in outputs] == [75, 75], outputs
    step = rows_of(output_dir)[-1]["step"]
    assert step < STEPS
    assert (output_dir / "resume_me").read_text() == f"step={step}\n"
    assert json.loads((output_dir / "result.json").read_text())["status"] == "interrupted"
    assert f"checkpoint step={step} committed" in outputs[0][1]

    output, resumed = run_trainer(2, job, output_dir)
    assert resumed_step(output) == step
    assert "was written by" not in output, "the same job, the same code"
    assert bits(resumed) == bits(whole)
    assert not (output_dir / "resume_me").exists()


def take_over_with_one_rank(job: Path, output_dir: Path, whole: list[dict[str, Any]]) -> None:
    """Another engine on one rank goes on: other bits (dropout is drawn per rank), the same past, and no jump."""
    more = ("--set", "parallelism={}", "--set", f"training.steps={STEPS + 3}", "--set", "training.learning_rate=1e-5")
    output, rows = run_trainer(1, job, output_dir, *more)
    assert resumed_step(output) == STEPS
    assert bits(rows[:STEPS]) == bits(whole)
    assert len(rows) == STEPS + 3
    assert abs(rows[-1]["loss"] - whole[-1]["loss"]) < 0.1 * whole[-1]["loss"]


def test_a_machine_that_a_job_comes_back_to_has_what_others_made_of_it_meanwhile(tmp_path: Path) -> None:
    """On a cluster whose hosts keep their own folders, say. Its rows ended where the job had left it, and the next
    checkpoint put them in the place of all; a batch that was left out meanwhile it learnt from."""
    there = tmp_path / "there"
    settings = ("--set", f"checkpoint.destination={there}")
    noted = json.dumps({"step": 9, "anomaly": "x", "first_sequence": 64, "rolled_back_to": 8, "at": 0.0}) + "\n"
    for steps, machine in ((4, "one"), (8, "other"), (12, "one")):
        job = write_job(tmp_path, "single", steps=steps)
        run_trainer(1, job, tmp_path / machine, *settings)
        if machine == "other":
            (there / LEFT_OUT_FILE).write_text(noted)
    for folder in (tmp_path / "one", there):
        assert [(row["step"], row["attempt"]) for row in rows_of(folder)] == [
            (step, (step + 3) // 4) for step in range(1, 13)
        ]
        assert (folder / LEFT_OUT_FILE).read_text() == noted
    manifest = json.loads((there / "checkpoints/step-00000012/manifest.json").read_text())
    assert manifest["extra"]["data"]["sequences_consumed"] == 8 * 13, "and is passed over"
    assert not list(tmp_path.rglob("*.fetched"))


@pytest.mark.parametrize("broken", [LEFT_OUT_FILE, "goodput.jsonl", "recovery.jsonl", "metrics.jsonl", "attempts.json"])
def test_a_start_that_ends_while_it_takes_over_leaves_the_next_one_to_take_all(tmp_path: Path, broken: str) -> None:
    """The rows tell whether what is here is old: with them alone the next one learnt from a batch that was left out."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, last in ((here, 4), (there, 8)):
        folder.mkdir()
        rows = [
            {"step": step, "attempt": (step + 3) // 4, "loss": 1.0, "step_seconds": 1.0} for step in range(1, last + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "attempts.json").write_text(json.dumps({"attempts": last // 4}))
        (folder / LEFT_OUT_FILE).write_text("batch\n" * (last // 8))
        (folder / "goodput.jsonl").write_text("row\n" * last)
        (folder / "recovery.jsonl").write_text("restart\n" * last)

    class Beside:
        """What lies beside the checkpoints."""

        is_away = True

        def read_file(self, name: str) -> bytes:
            """Its content."""
            return (there / name).read_bytes()

        def fetch_file(self, name: str, path: Path) -> bool:
            """Copies it, or gets no answer."""
            if self.is_away and name == broken:
                raise AwsRefusedError("S3: 503")
            shutil.copy(there / name, path)
            return True

    beside, session = Beside(), object.__new__(Session)
    parts = {"_left_out": LEFT_OUT_FILE, "_goodput": "goodput.jsonl"}
    vars(session).update({name: SimpleNamespace(path=here / file) for name, file in parts.items()})
    vars(session).update(_checkpointer=beside, _metrics=MetricsLog(here), _output_dir=here)
    with pytest.raises(AwsRefusedError):
        session._bring_records()
    beside.is_away, session._metrics = False, MetricsLog(here)
    assert session._bring_records()
    assert all((here / path.name).read_bytes() == path.read_bytes() for path in there.iterdir())
    assert not list(here.glob("*.fetched"))


def test_a_destination_that_went_is_not_begun_anew_until_somebody_says_so(tmp_path: Path) -> None:
    """The disk that it lies on isn't mounted, or its folder was moved: all was trained again, on another disk."""
    job, saved = write_job(tmp_path, "single", steps=4), tmp_path / "disk/saved"
    there = ("--set", f"checkpoint.destination={saved}")
    run_trainer(1, job, tmp_path / "out", *there)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    job = write_job(tmp_path, "single", steps=8)
    said, rows = run_trainer(1, job, tmp_path / "out", *there, expected_code=2)
    assert f"checkpoint.destination {saved}: an earlier start of this job saved there, and it is gone: mount" in said
    assert "Traceback" not in said and len(rows) == 4 and not (tmp_path / "disk").exists()
    elsewhere, _ = run_trainer(1, job, tmp_path / "out", "--set", f"checkpoint.destination={tmp_path}/other")
    told = "has no checkpoint, and an earlier start came to step {}: all begins anew"
    assert told.format(4) in elsewhere, "as the job says to save elsewhere"
    (tmp_path / "other").rename(tmp_path / "other before")
    (tmp_path / "other").mkdir()
    anew, _ = run_trainer(1, job, tmp_path / "out", "--set", f"checkpoint.destination={tmp_path}/other")
    assert told.format(8) in anew, "as somebody has made the folder"
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    resumed, _ = run_trainer(1, job, tmp_path / "out", *there)
    assert "resumed step=4 " in resumed and "begins anew" not in resumed
