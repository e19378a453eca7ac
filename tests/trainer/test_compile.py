"""Compiled a block at a time, a job has the losses of one that is not, and the same names."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from trainer.models.build import build_model
from trainer.strategies import check_supported, compiled
from trainer_testing.families import FAMILIES
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import MARK, Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.errors import InputError

STEPS = 4
LLAMA = FAMILIES["Llama"] | {"num_hidden_layers": 4}


def compile_and_run(world_size: int, backend: str, requests: list[RunRequest]) -> list[tuple[Result, int]]:
    """Each request's result, and how many graphs were compiled for it; a world each, so that none finds another's."""
    seen = []
    for request in requests:
        asked = json.dumps([asdict(request)])
        worker = "trainer_testing.compile_worker"
        lines = run_pooled(world_size, worker, backend, asked, timeout_seconds=900)[0].splitlines()
        (result,) = (json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK))
        (graphs,) = (int(line.split()[1]) for line in lines if line.startswith("GRAPHS "))
        seen.append((result, graphs))
    return seen


def request(strategy: str, *, model: dict[str, Any] = LLAMA, **more: Any) -> RunRequest:
    job = {"model": model, "compile": True, **more.pop("job", {})}
    return RunRequest(strategy, **{"last_step": STEPS, **more}, job=job)


def eager(models: list[dict[str, Any]], last_step: int = STEPS) -> list[Result]:
    return run(1, [RunRequest("single", last_step=last_step, job={"model": model}) for model in models])


def test_compiled_blocks_equal_eager_ones(tmp_path: Path) -> None:
    (one,) = eager([LLAMA])
    cases = [
        request("fsdp", save=str(tmp_path), save_after_step=2, job={"activation_checkpointing": "full"}),
    ]
    for case, (result, num_graphs) in zip(cases, compile_and_run(2, "aot_eager", cases), strict=True):
        assert worst_relative_error(result, one) < 1e-5, case
        # Not one compilation a block of four, but one for training, one for validation, one for recomputation.
        assert 0 < num_graphs <= 3, case
    # A checkpoint has Hugging Face's names: what isn't compiled goes on from it.
    resumed = run(1, [RunRequest("single", first_step=3, last_step=STEPS, load=str(tmp_path), job={"model": LLAMA})])[0]
    assert worst_relative_error(resumed, one) < 1e-5


def test_names_are_kept() -> None:
    model = build_model(tiny_job("single", 1, compile=True), vocab_size=VOCAB_SIZE)
    names = list(model.state_dict())
    compiled.compile_blocks(model, tiny_job("single", 1, compile=True))
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("zero2", {}, "with engine: deepspeed"),
        ("ddp", {}, "for DDP"),
        ("", {"parallelism": {"tensor": 2}}, r"with parallelism\.tensor: 2"),
        ("", {"parallelism": {"context": 2}}, r"with parallelism\.context: 2"),
        ("", {"parallelism": {"pipeline": 2}}, r"with parallelism\.pipeline: 2"),
        ("fsdp", {"activation_checkpointing": "selective"}, "activation_checkpointing: selective"),
    ],
)
def test_what_is_not_proved_is_refused(strategy: str, changes: dict[str, Any], message: str) -> None:
    job = tiny_job(strategy, 2, model=LLAMA, compile=True, **changes)
    with pytest.raises(InputError, match=f"training.compile: .*{message}") as caught:
        check_supported(job, device_type="cpu")
    assert "\n" not in str(caught.value)


def test_without_a_compiler_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="compiler on a CPU, and no-such-compiler is not on the PATH"):
        check_supported(tiny_job("single", 1, compile=True), device_type="cpu")
