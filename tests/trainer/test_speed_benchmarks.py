"""The benchmarks' arithmetic, and that the GPU one goes its whole way where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import trainer_cpu  # noqa: E402
import trainer_cpu_rank  # noqa: E402
import trainer_gpu  # noqa: E402
from model_flops import flops_per_token  # noqa: E402


@pytest.mark.parametrize(
    ("model", "full", "causal"),
    [("1b", 9.0, 8.2), ("3b", 23.5, 21.4), ("8b", 51.5, 48.2)],
)
def test_flops_per_token_are_the_published_ones(model: str, full: float, causal: float) -> None:
    """Both conventions, GFLOP a token at 4096: a public card's figures for the three shapes."""
    flops = flops_per_token(trainer_gpu.SHAPES[model], 4096, method="full")
    assert flops["full"] / 1e9 == pytest.approx(full, abs=0.06)
    assert flops["causal"] / 1e9 == pytest.approx(causal, abs=0.06)


def test_lora_leaves_out_the_gradients_of_frozen_weights() -> None:
    """12,473 tokens/s of an 8B at 4096 are published as 402 TFLOP/s (NeMo Automodel), in the causal convention."""
    flops = flops_per_token(trainer_gpu.SHAPES["8b"], 4096, method="lora")
    assert 12_473 * flops["causal"] / 1e12 == pytest.approx(402, rel=0.01)


def gpu_run(contender: str, precision: str, **more: Any) -> dict[str, Any]:
    return {"case": "8b-lora", "contender": contender, "precision": precision, "flops_per_token": {"full": 1e12}} | more


@pytest.mark.parametrize(("rate", "passed"), [(12_400.0, False), (12_600.0, True)])
def test_a_gpu_case_passes_by_our_median(rate: float, passed: bool) -> None:
    runs = [gpu_run("ours", "bf16", tokens_per_second=value, peak_memory_gib=40.0) for value in (1.0, rate, 99_999.0)]
    runs += [gpu_run("trainer", "bf16", tokens_per_second=10_000.0)]
    runs += [gpu_run("ours", "fp8", skipped="no torchao"), gpu_run("trainer", "bf16", failed="out of memory")]
    result = trainer_gpu.summary(trainer_gpu.CASES[2], runs, {"bf16": 2 * rate}, is_tiny=False)
    assert result["passed"] is passed
    assert result["ours_to_trainer"] == rate / 10_000
    assert result["share_of_measured_ceiling"] == {"full": 0.5}
    assert result["skipped"] == ["ours fp8: no torchao"]
    assert result["failed"] == ["trainer bf16: out of memory"]


def test_a_tiny_run_is_held_against_trainer_by_processor_time() -> None:
    runs = [gpu_run("ours", "bf16", tokens_per_second=value, processor_seconds=0.2) for value in (10.0, 1.0)]
    runs += [gpu_run("trainer", "bf16", tokens_per_second=10.0, processor_seconds=value) for value in (0.1, 0.3, 0.25)]
    result = trainer_gpu.summary(trainer_gpu.CASES[2], runs, {}, is_tiny=True)
    assert result["ours_to_trainer_by_processor_time"] == 1.25
    only_ours = trainer_gpu.summary(trainer_gpu.CASES[2], runs[:2], {}, is_tiny=True)
    assert only_ours["ours_to_trainer_by_processor_time"] is None


def cpu_repeat(**seconds: list[float]) -> dict[str, Any]:
    return {
        "tokens_per_rank": 100,
        "worst_weight_difference": 1e-6,
        "step_seconds": seconds,
        "cpu_seconds": seconds,
    }


def test_cpu_ratios_are_taken_turn_by_turn() -> None:
    """A machine that is slowed down for one turn of all slows nobody down in the ratio."""
    repeat = cpu_repeat(ours=[1.0, 1.0, 9.0, 9.0, 1.0, 1.0], bare=[0.9, 0.9, 8.1, 8.1, 0.9, 0.9])
    result = trainer_cpu.summary("2 x ddp", 2, [repeat, repeat], block=2)
    assert result["ours_to"] == {"bare": 0.9}
    assert result["tokens_per_second"] == {"ours": 200.0, "bare": pytest.approx(222.2)}
    assert result["missed_goals"] == ["2 x ddp: 0.900 of bare's tokens/s, goal 0.98"]


def test_cpu_goals_that_are_met_are_not_missed() -> None:
    repeat = cpu_repeat(ours=[1.0, 1.0], bare=[0.985, 0.985], trainer=[1.0, 1.0])
    assert trainer_cpu.summary("1 x ddp", 1, [repeat], block=2)["missed_goals"] == []


def test_useful_tokens_are_those_of_the_steps_that_were_timed() -> None:
    """Three steps of warm-up, two turns of two; a batch of a step more that the loader had read is left out."""
    ours = [7, 7, 7, 1, 2, 3, 4, 5]
    assert trainer_cpu_rank.useful_of_turns(ours, 1, rounds=2, block=2).tolist() == [3, 7]
    padded = [batch for step in ours for batch in (step, 10 * step)] + [99]
    assert trainer_cpu_rank.useful_of_turns(padded, 2, rounds=2, block=2).tolist() == [33, 77]


@pytest.mark.slow
def test_the_gpu_benchmark_goes_its_whole_way_on_a_cpu(tmp_path: Path) -> None:
    """Weights written and read, ours and Trainer trained and measured, fp8 (emulated) too, result kept."""
    output = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "trainer_gpu.py"), "--tiny", "--case", "8b-lora", "--output", output]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(output.read_text(encoding="utf-8"))["results"]
    runs = {name: len(values) for name, values in result["runs"].items()}
    assert runs == {"ours bf16": 2, "trainer bf16": 2, "ours fp8": 1}
    assert result["ours_to_trainer_by_processor_time"] > 0
    assert result["passed"] is None, "a tiny model says nothing about the goal"
    assert result["failed"] == []
    assert result["loss"]["ours bf16"] == pytest.approx(6.24, abs=0.15), "ln of 512 ids: nothing is learnt in 19 steps"
    assert result["loss"]["ours fp8"] == pytest.approx(result["loss"]["ours bf16"], rel=1e-3)
    assert result["loss"]["ours fp8"] != result["loss"]["ours bf16"]
    assert result["skipped"] == []
