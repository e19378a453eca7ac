"""training.deterministic: only kernels that give the same bits, and a benchmark of what that costs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer.seeds import use_any_kernels, use_deterministic_kernels

ROOT = Path(__file__).resolve().parents[2]


def test_an_operation_without_a_deterministic_kernel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back, also where it wasn't there
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    was_deterministic, had_benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark

    def put() -> list[float]:
        return torch.zeros(2).put_(torch.tensor([1]), torch.tensor([3.0])).tolist()

    try:
        use_deterministic_kernels()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            put()
        use_any_kernels()
        assert put() == [0.0, 3.0]
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.backends.cudnn.benchmark = had_benchmark


@pytest.mark.slow
def test_the_cost_is_measured_in_turns(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "deterministic_cost.py"), "--rounds", "1", "--steps", "1"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "training_container")])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = tmp_path / "result.json"
    subprocess.run(
        [*command, "--out", str(result)], env=environment | {"PYTHONPATH": paths}, check=True, timeout=600, cwd=ROOT
    )
    content = json.loads(result.read_text(encoding="utf-8"))
    assert content["steps_each"] == 1
    assert content["ratio_wall"] > 0
    assert set(content["median_processor_seconds"]) == {"deterministic", "free"}
