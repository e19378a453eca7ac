"""Every engine's hooks fire around a head that gives a loss: 4 steps in float64 equal one process with whole logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_testing.families import FAMILIES, adapter
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.support_table import save_sources, source_of

TOLERANCE = {"fp64": 1e-7, "fp32": 1e-5, "bf16": 0.02}


def request(strategy: str, family: str, precision: str = "fp64", **changes: Any) -> RunRequest:
    parallelism = {
        "tensor2": {"tensor": 2},
        "tensor2-fsdp2": {"tensor": 2, "data_shard": 2},
        "context2": {"context": 2},
        "pipeline2": {"pipeline": 2},
        "expert2-fsdp2": {"data_shard": 2, "expert": 2},
        "pipeline2-tensor2": {"pipeline": 2, "tensor": 2},
    }.get(strategy, {})
    job: dict[str, Any] = {"loss": "chunked", "precision": precision, "model": FAMILIES[family]} | changes
    if "source" in job:
        del job["model"]
    job["parallelism"] = parallelism | job.get("parallelism", {})
    return RunRequest(strategy=strategy, last_step=3, job=job, is_packed=True)


def alone(asked: RunRequest) -> RunRequest:
    """The same on one process, from whole logits."""
    return replace(asked, strategy="single", job=asked.job | {"loss": "logits", "parallelism": {}})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where adapters find their model."""
    folder = tmp_path_factory.mktemp("sources")
    save_sources(folder, ["Llama"])
    return folder


def compare(world_size: int, cases: dict[str, RunRequest]) -> None:
    """All cases in one launch, each against one process."""
    references: dict[str, Result] = dict(zip(cases, run(1, [alone(case) for case in cases.values()]), strict=True))
    results = dict(zip(cases, run(world_size, list(cases.values())), strict=True))
    wrong = {}
    for name, result in results.items():
        error = worst_relative_error(result, references[name])
        if not error < TOLERANCE[cases[name].job["precision"]]:
            wrong[name] = error
    assert wrong == {}


MIXTURE = FAMILIES["Mixtral"] | {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def cases_of(base: Path) -> dict[str, RunRequest]:
    """Every engine's hooks, every kind of head, low precision, and the router's loss beside the head's."""
    lora = {"source": str(source_of(base, "Llama")), "adapter": adapter("Llama", "lora")}
    odd = FAMILIES["Llama"] | {"vocab_size": 97}
    return {
        "ddp": request("ddp", "Llama, tied"),
        "fsdp": request("fsdp", "Llama"),
        "fsdp, frozen head": request("fsdp", "Llama", **lora),
        "zero2": request("zero2", "Llama", "fp32"),
        "zero3": request("zero3", "Llama, tied", "fp32"),
        "zero3, frozen head": request("zero3", "Llama", "fp32", **lora),
        "ddp, bf16": request("ddp", "Llama", "bf16"),
        "fsdp, bf16": request("fsdp", "Llama, tied", "bf16"),
        "zero3, bf16": request("zero3", "Llama", "bf16"),
        "vocabulary over ranks, bf16": request("tensor2", "Llama", "bf16"),
        "vocabulary over ranks": request("tensor2", "Llama"),
        "vocabulary over ranks, tied": request("tensor2", "Qwen2, tied"),
        "vocabulary of odd size": request("tensor2", "Llama", model=odd),
        "context": request("context2", "Llama"),
        "pipeline": request("pipeline2", "Llama, tied"),
        # The router's loss is a micro-batch's: one process takes the same.
        "router loss, ddp": request("ddp", "Mixtral", model=MIXTURE, micro_batch_size=2),
        "router loss, experts": request("expert2-fsdp2", "Mixtral", "fp32", model=MIXTURE, micro_batch_size=2),
        "router loss, zero3": request("zero3", "Mixtral", "fp32", model=MIXTURE, micro_batch_size=2),
        "interleaved": request(
            "pipeline2",
            "Llama",
            model=FAMILIES["Llama"] | {"num_hidden_layers": 4},
            parallelism={"pipeline": 2, "pipeline_schedule": "interleaved_1f1b"},
        ),
    }


SHORT = ("fsdp, frozen head", "zero3", "vocabulary over ranks, tied", "context", "pipeline", "router loss, experts")


def test_two_ranks_equal_one_with_whole_logits(base: Path) -> None:
    cases = cases_of(base)
    compare(2, {name: cases[name] for name in SHORT})


@pytest.mark.full
def test_every_engine_equals_one_process_with_whole_logits(base: Path) -> None:
    compare(2, {name: case for name, case in cases_of(base).items() if name not in SHORT})
