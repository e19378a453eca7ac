"""Tensors that parts of an altered checkpoint were read into are made anew: a job begins as it did the first time."""

import json
from pathlib import Path

import pytest
from trainer_testing.text_job import bits, run_trainer, write_job


def alter(shard: Path) -> None:
    """Change one bit of the last value of a shard file: whatever is read in a row before it, was."""
    _, start, num_bytes, *_ = json.loads(Path(f"{shard}.blocks").read_text())["boxes"][-1]
    with shard.open("r+b") as file:
        file.seek(start + num_bytes - 1)
        byte = file.read(1)[0]
        file.seek(start + num_bytes - 1)
        file.write(bytes([byte ^ 1]))


def begins_anew(tmp_path: Path, layout: str, num_ranks: int) -> None:
    """Run a job, alter its only checkpoint, and start it again: the same numbers, bit for bit."""
    job, output = write_job(tmp_path, layout, steps=4), tmp_path / "output"
    _, whole = run_trainer(num_ranks, job, output)
    (folder,) = (output / "checkpoints").iterdir()
    alter(min(folder.glob("*.distcp")))
    said, again = run_trainer(num_ranks, job, output)
    assert "step=4 skipped: __0_0.distcp is altered" in said and "starting anew" in said
    assert "resumed step=" not in said
    assert [row["step"] for row in again] == [1, 2, 3, 4] and bits(again) == bits(whole)


def test_a_job_whose_only_checkpoint_is_altered_begins_anew(tmp_path: Path) -> None:
    begins_anew(tmp_path, "single", 1)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "zero2", "zero3", "pipeline"])
def test_so_does_one_of_two_ranks(layout: str, tmp_path: Path) -> None:
    begins_anew(tmp_path, layout, 2)
