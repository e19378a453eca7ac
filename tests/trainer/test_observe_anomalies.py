"""Losses that are no numbers, or spikes: the job stops with a snapshot, or leaves the batch out on every rank."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer.observe.anomalies import LEAST_STEPS, MOST_OVERFLOWS, WINDOW, AnomalyGuard, AnomalyWatch
from trainer.strategies import OptimizerStep, check_supported
from trainer_testing.distributed import finish
from trainer_testing.pool import start_pooled
from trainer_testing.text_job import rows_of, write_job
from trainer_testing.tiny import tiny_job

from trainyard.errors import InputError, JobFailedError

SPIKE = 100.0


def test_only_what_is_no_number_is_an_anomaly_unless_a_factor_is_given() -> None:
    watch = AnomalyWatch(None)
    assert watch.judge(2.0, 1.0) is None
    assert watch.judge(1e9, 1e9) is None
    assert watch.judge(math.nan, 1.0) == "loss is nan"
    assert watch.judge(2.0, math.inf) == "grad_norm is inf"
    assert watch.num_in_a_row == 2
    assert watch.judge(2.0, 1.0) is None
    assert watch.num_in_a_row == 0


def test_a_spike_is_above_the_factor_and_outside_the_usual_spread() -> None:
    watch = AnomalyWatch(3.0)
    assert watch.judge(90.0, 1.0) is None, "the first steps have nothing to compare with"
    for step in range(LEAST_STEPS):
        assert watch.judge(2.0 + 0.01 * (step % 3), 1.0 + 0.1 * (step % 3)) is None
    assert watch.judge(5.9, 1.0) is None, "below the factor"
    assert watch.judge(7.0, 1.0) == "loss 7 is 3.5 times its running median"
    assert watch.judge(2.0, 9.0) == "grad_norm 9 is 8.6 times its running median"
    assert watch.num_in_a_row == 2
    wild = AnomalyWatch(3.0)
    for step in range(50):
        wild.judge(2.0, 10.0 ** (step % 3 - 1))
    assert wild.judge(2.0, 6.0) is None, "six times the median, but such norms are usual here"


def test_a_median_of_zero_is_no_measure_of_a_spike() -> None:
    watch = AnomalyWatch(3.0)
    assert [watch.judge(0.0, 1.0) for _ in range(2 * LEAST_STEPS)] == [None] * 2 * LEAST_STEPS
    assert watch.judge(1.0, 1.0) is None


def test_a_resumed_watch_judges_alike() -> None:
    watch = AnomalyWatch(3.0)
    for step in range(WINDOW + 20):
        watch.judge(2.0 + 0.001 * step, 1.0)
    watch.judge(math.nan, 1.0)
    twin = AnomalyWatch(3.0)
    twin.load_state(json.loads(json.dumps(watch.state())))
    assert twin.state() == watch.state()
    assert twin.judge(7.0, 1.0) == watch.judge(7.0, 1.0) is not None
    assert twin.num_in_a_row == watch.num_in_a_row == 2


def test_what_cannot_skip_says_so_before_anything_is_read() -> None:
    job = tiny_job("zero1", 2, on_anomaly="skip")
    with pytest.raises(InputError, match=r"training\.on_anomaly: skip is not implemented with engine: deepspeed"):
        check_supported(job, device_type="cpu")


def guard_of(precision: str, on_anomaly: str, folder: Path) -> AnomalyGuard:
    runtime: Any = SimpleNamespace(is_first=True, sum_over_ranks=lambda *values: list(values))
    job = tiny_job("ddp", 1)
    training = job.spec.training.model_copy(update={"precision": precision, "on_anomaly": on_anomaly})
    return AnomalyGuard(
        job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})}), runtime, folder, list
    )


@pytest.mark.parametrize(
    ("precision", "loss", "is_found"),
    [
        ("fp32", math.nan, True),
        ("bf16", math.nan, True),
        ("bf16", 2.0, True),
        ("fp16", 2.0, False),
        ("fp16", math.nan, True),
    ],
)
def test_an_update_that_the_engine_left_out_passes_in_silence_only_where_a_loss_scale_explains_it(
    precision: str, loss: float, is_found: bool, tmp_path: Path
) -> None:
    """DeepSpeed leaves out what is no number by itself: without a verdict the job would learn nothing any more."""
    guard = guard_of(precision, "rollback", tmp_path)
    assert guard.gate(torch.tensor(1.0), 1) is None, "an engine that can't be asked can go back too"
    guard.check(3, loss, OptimizerStep(grad_norm=math.inf, was_applied=False), loss)
    assert guard.wants_rollback is is_found


@pytest.mark.parametrize("on_anomaly", ["rollback", "skip"])
def test_overflows_without_an_end_are_no_longer_the_loss_scales(on_anomaly: str, tmp_path: Path) -> None:
    guard, overflow = guard_of("fp16", on_anomaly, tmp_path), OptimizerStep(grad_norm=math.inf, was_applied=False)
    for _ in range(2):
        for step in range(MOST_OVERFLOWS):
            guard.begin({})
            guard.check(step, 2.0, overflow, 2.0)
            assert guard.found is None
        guard.begin({})
        guard.check(MOST_OVERFLOWS, 2.0, OptimizerStep(grad_norm=1.0, was_applied=True), 2.0)
    for step in range(MOST_OVERFLOWS + 1):
        guard.begin({})
        guard.check(step, 2.0, overflow, 2.0)
    assert guard.found == "grad_norm is inf"


def test_a_resume_goes_on_counting_overflows(tmp_path: Path) -> None:
    """Where each attempt was shorter than the count, a job that learns nothing would go on for ever."""
    overflow = OptimizerStep(grad_norm=math.inf, was_applied=False)
    guard = guard_of("fp16", "stop", tmp_path)
    for step in range(MOST_OVERFLOWS):
        guard.begin({})
        guard.check(step, 2.0, overflow, 2.0)
    state = json.loads(json.dumps(guard.watch.state()))
    resumed, older = guard_of("fp16", "rollback", tmp_path), guard_of("fp16", "rollback", tmp_path)
    resumed.watch.load_state(state)
    older.watch.load_state({name: value for name, value in state.items() if name != "num_overflows"})
    for each, found in ((resumed, "grad_norm is inf"), (older, None)):
        each.begin({})
        each.check(MOST_OVERFLOWS, 2.0, overflow, 2.0)
        assert each.found == found


def test_a_loss_that_is_no_number_counts_where_the_loss_scale_had_refused_the_update(tmp_path: Path) -> None:
    guard = guard_of("fp16", "skip", tmp_path)
    for number in (1, 2):
        guard.begin({})
        guard.check(number, math.nan, OptimizerStep(grad_norm=math.inf, was_applied=False), math.nan)
        assert guard.found == "loss is nan" and guard.watch.num_in_a_row == number


def test_a_rank_that_cannot_write_its_snapshot_still_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[Any] = []

    def gather(everyone: list[Any], mine: Any, group: object) -> None:
        gathered.append(mine)
        everyone[:] = [mine]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    (tmp_path / "anomalies").write_text("no folder")
    runtime: Any = SimpleNamespace(rank=0, world_size=1, is_first=True, control_group=None)
    guard = AnomalyGuard(tiny_job("fsdp", 1), runtime, tmp_path, list)
    guard.begin({})
    update: Any = SimpleNamespace(grad_norm=1.0, was_applied=True)
    with pytest.raises(JobFailedError, match=r"loss is nan; rank 0 on .*; snapshot: not written: Not a directory$"):
        guard.check(3, math.nan, update, math.nan)
    assert len(gathered) == 1


def run_poisoned(
    job: Path, output_dir: Path, factors: dict[int, Any], *arguments: str
) -> tuple[list[int], list[str], list[dict[str, Any]]]:
    """Exit codes and outputs by rank, and the rows."""
    wrong = json.dumps({str(step): factor for step, factor in factors.items()})
    options = ["--job", str(job), "--output-dir", str(output_dir), *arguments]
    outputs = finish(start_pooled(2, "trainer_testing.poisoned_trainer", wrong, "1", *options), timeout_seconds=600)
    return [code for code, _ in outputs], [text for _, text in outputs], rows_of(output_dir)


def test_a_skipped_batch_is_skipped_everywhere_and_a_resume_skips_the_same(tmp_path: Path) -> None:
    job = write_job(tmp_path, "fsdp", steps=16, on_anomaly="skip", spike_factor=4.0, observe_every_steps=4)
    factors = {3: "nan", 14: SPIKE}
    (tmp_path / "out").mkdir()
    (tmp_path / "out/profile_me").write_text("2 all")
    codes, outputs, rows = run_poisoned(job, tmp_path / "out", factors)
    assert codes == [0, 0], outputs
    assert "a barrier in a step" not in outputs[0] + outputs[1]
    assert [row["step"] for row in rows if row.get("skipped")] == [3, 14], outputs[0]
    assert [(row["loss"], row["anomaly"]) for row in rows if row["step"] == 3] == [(None, "loss is nan")]
    assert "anomaly step=3 skipped: loss is nan" in outputs[0]
    assert all(row["loss"] is not None and row["loss"] < 10 for row in rows if not row.get("skipped"))
    assert all("NaN" not in line for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "observed" in row] == [4, 8, 12, 16]
    read_profile(tmp_path / "out", outputs[0])
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert (result["num_skipped"], result["observed"]) == (2, rows[-1]["observed"])
    assert result["observed"]["throughput"]["model_tflops_full"] > 0
    assert result["observed"]["throughput"]["mfu_full"] is None, "a CPU has no peak here"

    shutil.rmtree(tmp_path / "out/checkpoints/step-00000016")
    codes, outputs, again = run_poisoned(job, tmp_path / "out", factors)
    assert codes == [0, 0], outputs
    assert "resumed step=12 " in outputs[0]
    assert [(row["loss"], row["grad_norm"], row.get("anomaly")) for row in again] == [
        (row["loss"], row["grad_norm"], row.get("anomaly")) for row in rows
    ]

    limit = ("--set", "training.max_skips=2", "--set", "training.steps=20")
    codes, outputs, _ = run_poisoned(job, tmp_path / "out", {17: "nan", 18: "nan"}, *limit)
    assert codes == [1, 1], outputs
    # By whichever rank was the first to end.
    assert "step 18: training diverged: loss is nan, 2 batches in a row; rank 1 on " in "".join(outputs)
    assert "Traceback" not in "".join(outputs)
    read_snapshot(tmp_path / "out/anomalies/step-00000018", rows)


def read_snapshot(folder: Path, rows: list[dict[str, Any]]) -> None:
    first, second = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert (first["step"], first["rank"], second["rank"]) == (18, 0, 1)
    assert (first["first_sequence"], first["num_sequences"]) == (17 * 8, 8), "step 18 begins after 17 batches of 8"
    assert second["own_loss_sum"] == "nan"
    assert isinstance(first["own_loss_sum"], float)
    assert first["recent_rows"][-1]["step"] == 17
    assert first["recent_rows"][-3]["loss"] == rows[14]["loss"]
    assert set(first["rng"]) == {"cpu"}


def read_profile(output_dir: Path, said: str) -> None:
    """Asked for before the first step, so made of the second and third; on both ranks."""
    folder = output_dir / "profiles/step-00000002"
    assert f"profile steps=2-3 folder={folder}\n" in said
    assert not (output_dir / "profile_me").exists()
    for rank in (0, 1):
        events = json.loads((folder / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [str(event.get("name")) for event in events]
        assert sum(name.startswith("Optimizer.step") for name in names) == 1, "of two steps one was skipped"
        assert any(name == "gloo:all_reduce" or name.startswith("c10d::") for name in names)
        entries = json.loads((folder / f"rank-{rank}-collectives.json").read_text())["gloo"]["entries"]
        assert {"gloo:all_reduce"} <= {entry["profiling_name"] for entry in entries}
