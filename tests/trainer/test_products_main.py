"""The command with degrees set on it: a product of parallelisms is a job like any other, and resumes under another."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from trainer_testing.text_job import run_trainer, write_job

NO_DROPOUT = ("--set", "model.config.attention_dropout=0.0")


def close(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row["tokens"] == wanted["tokens"], "ranks that read the same sequences count them once"
        for number in ("loss", "grad_norm", "learning_rate", "validation_loss"):
            if number in wanted:
                assert row[number] == pytest.approx(wanted[number], rel=1e-5), (row["step"], number)


@pytest.mark.slow
def test_a_product_is_set_on_the_command_line_and_resumes_under_another(tmp_path: Path) -> None:
    job = write_job(tmp_path / "data", "single")
    _, expected = run_trainer(1, job, tmp_path / "single", *NO_DROPOUT)
    output = tmp_path / "product"
    degrees = ("--set", "parallelism.pipeline=2", "--set", "parallelism.tensor=2")
    said, rows = run_trainer(4, job, output, *NO_DROPOUT, *degrees)
    close(rows, expected)
    assert "step=9 loss=" in said
    assert all(row["breakdown"]["forward"] > 0 and row["breakdown"]["backward"] > 0 for row in rows)

    shutil.rmtree(output / "checkpoints" / "step-00000009")
    said, rows = run_trainer(2, job, output, *NO_DROPOUT, "--set", "parallelism.tensor=2")
    assert "resumed step=8" in said
    assert [row["attempt"] for row in rows] == [1] * 8 + [2]
    close(rows, expected)


def test_what_a_model_cannot_do_is_one_line(tmp_path: Path) -> None:
    job = write_job(tmp_path / "data", "single")
    said, rows = run_trainer(2, job, tmp_path / "out", "--set", "parallelism.pipeline=2",
                             "--set", "parallelism.pipeline_schedule=zero_bubble", expected_code=2)  # fmt: skip
    assert rows == []
    assert "trainyard: parallelism.pipeline: 2: zero_bubble makes 4 stages, but the model has 2 layers" in said
