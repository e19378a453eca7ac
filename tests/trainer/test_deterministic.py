"""training.deterministic: only kernels that give the same bits, and a benchmark of what that costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from trainer.seeds import use_any_kernels, use_deterministic_kernels

ROOT = Path(__file__).resolve().parents[2]


def test_an_operation_without_a_deterministic_kernel_raises() -> None:
    use_deterministic_kernels()
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        use_any_kernels()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_cost_is_measured_in_turns(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "deterministic_cost.py"), "--rounds", "1", "--steps", "1"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "training_container")])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = tmp_path / "result.json"
    subprocess.run(
        [*command, "--out", str(result)], env=environment | {"PYTHONPATH": paths}, check=True, timeout=240, cwd=ROOT
    )
    content = json.loads(result.read_text(encoding="utf-8"))
    assert content["steps_each"] == 1
    assert content["ratio_wall"] > 0
    assert set(content["median_processor_seconds"]) == {"deterministic", "free"}
