"""Compiled a block at a time, a job has the losses of one that is not, and the same names."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainer import strategies
from trainer.models.build import build_model, outline_model
from trainer.runtime import Runtime
from trainer.strategies import build_strategy, check_supported, compiled
from trainer_testing.cut_families import model_of
from trainer_testing.families import FAMILIES
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import MARK, Result, RunRequest, no_clock, run, worst_relative_error
from trainer_testing.support_table import save_sources, source_of
from trainer_testing.tiny import VOCAB_SIZE, TinyBatch, global_batch, tiny_job

from trainyard.errors import InputError

STEPS = 4
LLAMA = FAMILIES["Llama"] | {"num_hidden_layers": 4}
MIXTRAL = FAMILIES["Mixtral"]


FULL = pytest.mark.full


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


def eager(models: list[dict[str, Any]], last_step: int = STEPS, **job: Any) -> list[Result]:
    return run(1, [RunRequest("single", last_step=last_step, job={"model": model} | job) for model in models])


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


LAYOUTS = [
    # name, ranks, parallelism, more of the job, graphs compiled at most on the first rank
    pytest.param("tensor2", 2, {"tensor": 2}, {}, 6),
    pytest.param("fsdp", 2, None, {"model": MIXTRAL}, 12, marks=FULL),
    pytest.param("ddp", 2, None, {}, 3, marks=FULL),  # one for the pass that settles its buckets
    pytest.param("ddp", 2, None, {"activation_checkpointing": "full"}, 4, marks=FULL),
    pytest.param("hsdp", 4, None, {}, 2, marks=FULL),
    pytest.param("pipeline2", 2, {"pipeline": 2}, {}, 2, marks=FULL),
    pytest.param("pipeline2", 2, {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b"}, {}, 2, marks=FULL),
    pytest.param("pipeline2", 2, {"pipeline": 2}, {"activation_checkpointing": "full"}, 3, marks=FULL),
    pytest.param("context2", 2, {"context": 2}, {}, 12, marks=FULL),
    pytest.param("context2", 2, {"context": 2}, {"activation_checkpointing": "full"}, 8, marks=FULL),
    pytest.param("tensor2-fsdp2", 4, {"tensor": 2, "data_shard": 2}, {}, 6, marks=FULL),
    pytest.param("pipeline2-tensor2", 4, {"pipeline": 2, "tensor": 2}, {}, 6, marks=FULL),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks", "layout", "more", "most_graphs"), LAYOUTS)
def test_compiled_layouts_equal_one_process(
    name: str, num_ranks: int, layout: dict[str, int] | None, more: dict[str, Any], most_graphs: int
) -> None:
    (one,) = eager([more.get("model", LLAMA)])
    case = request(name, job={"parallelism": layout, **more})
    ((result, num_graphs),) = compile_and_run(num_ranks, "aot_eager", [case])
    assert worst_relative_error(result, one) < 1e-5
    assert 0 < num_graphs <= most_graphs, "blocks that are alike share what was compiled"


@FULL
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_stop_at_layers_whose_ranks_trade_tokens_for_heads(recompute: str) -> None:
    """Compiled, they would find the library's own functions, and each rank's state its own tokens alone."""
    model = model_of("qwen3_5_text")
    (one,) = eager([model], document_masks=False)
    job = {"parallelism": {"context": 2}, "document_masks": False, "activation_checkpointing": recompute}
    ((result, num_graphs),) = compile_and_run(2, "aot_eager", [request("context2", model=model, job=job)])
    assert num_graphs > 0
    assert worst_relative_error(result, one) < 1e-5


@FULL
@pytest.mark.parametrize(
    ("name", "layout"), [("ddp", None), ("tensor2", {"tensor": 2}), ("pipeline2", {"pipeline": 2})]
)
def test_what_inductor_compiles_equals_one_process(name: str, layout: dict[str, int] | None) -> None:
    (one,) = eager([LLAMA])
    ((result, _),) = compile_and_run(2, "inductor", [request(name, job={"parallelism": layout})])
    assert worst_relative_error(result, one) < 1e-5


@FULL
@pytest.mark.parametrize("length", [24, 25], ids=["positions are split", "positions are whole"])
def test_compiled_tensor_ranks_drop_what_eager_ones_do(length: int) -> None:
    model = LLAMA | {"attention_dropout": 0.2}
    settings = {"parallelism": {"tensor": 2}, "model": model, "sequence_length": length}
    cases = [request("tensor2", job=settings | {"compile": compiled}) for compiled in (False, True)]
    (eager, _), (result, num_graphs) = compile_and_run(2, "aot_eager", cases)
    assert num_graphs > 0
    assert worst_relative_error(result, eager) < 1e-5


@FULL
def test_compiled_8_bit_products_are_the_eager_ones() -> None:
    cases = [request("fsdp", job={"precision": "fp8", "compile": compiled}) for compiled in (False, True)]
    (eager, _), (result, num_graphs) = compile_and_run(2, "aot_eager", cases)
    assert num_graphs > 0
    assert worst_relative_error(result, eager) < 5e-2, "a bf16 rounding elsewhere becomes one of 8 bits"


@FULL
def test_compiled_8_bit_products_beside_an_adapter_are_the_eager_ones(tmp_path: Path) -> None:
    save_sources(tmp_path, ["Llama"])
    adapter = {"kind": "lora", "rank": 4, "targets": ("q_proj", "o_proj", "gate_proj", "down_proj")}
    job = {"source": str(source_of(tmp_path, "Llama")), "adapter": adapter, "precision": "fp8"}
    runs = [RunRequest("ddp", last_step=STEPS, job=job | {"compile": compiled}) for compiled in (False, True)]
    (eager, _), (result, num_graphs) = compile_and_run(2, "aot_eager", runs)
    assert num_graphs > 0
    assert worst_relative_error(result, eager) < 1e-5
    ((fused, _),) = compile_and_run(2, "inductor", runs[1:])
    assert worst_relative_error(fused, eager) < 5e-2, "a bf16 rounding elsewhere becomes one of 8 bits"


def test_names_are_kept() -> None:
    model = build_model(tiny_job("single", 1, compile=True), vocab_size=VOCAB_SIZE)
    names = list(model.state_dict())
    compiled.compile_blocks(model, tiny_job("single", 1, compile=True))
    assert list(model.state_dict()) == names


@FULL
def test_torch_saves_the_mesh_among_the_tensors_of_a_recomputed_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `tensor` and full recomputation are refused: where this fails, torch has mended it, and that can go."""
    monkeypatch.setattr(strategies, "check_supported", lambda *_, **__: None)
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    job = tiny_job("", 2, parallelism={"tensor": 2}, activation_checkpointing="full", compile=True)
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        group = dist.new_group()
        runtime = Runtime(rank=0, world_size=2, local_rank=0, device=torch.device("cpu"), control_group=group)
        strategy = build_strategy(job, model=outline_model(job, vocab_size=VOCAB_SIZE), runtime=runtime)
        with pytest.raises(AssertionError, match="DeviceMesh"):
            strategy.forward_backward([TinyBatch(*(part[:2] for part in global_batch(1)))], 1, no_clock)
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("", {"parallelism": {"tensor": 2}, "activation_checkpointing": "full"}, r"with parallelism\.tensor: 2 and"),
        ("", {"parallelism": {"tensor": 2}, "model": MIXTRAL}, r"with parallelism\.tensor: 2 for a mixture of experts"),
        ("fsdp", {"activation_checkpointing": "selective"}, "activation_checkpointing: selective"),
    ],
)
def test_what_is_not_proved_is_refused(strategy: str, changes: dict[str, Any], message: str) -> None:
    job = tiny_job(strategy, 2, **{"model": LLAMA, "compile": True, **changes})
    with pytest.raises(InputError, match=f"training.compile: .*{message}") as caught:
        check_supported(job, device_type="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("zero2", {}, "with engine: deepspeed"),
        ("", {"parallelism": {"pipeline": 2, "pipeline_schedule": "zero_bubble"}}, "zero_bubble, which takes"),
        ("", {"parallelism": {"expert": 2, "data_shard": 2}, "model": MIXTRAL}, r"with parallelism\.expert: 2, whose"),
        ("fsdp", {"source": "model", "adapter": {"kind": "qlora"}}, "adapter: qlora"),
    ],
)
def test_what_no_machine_compiles_is_refused_where_the_job_is_read(
    strategy: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=f"training.compile: .*{message}"):
        tiny_job(strategy, 2, compile=True, **changes)


def test_without_a_compiler_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="compiler on a CPU, and no-such-compiler is not on the PATH"):
        check_supported(tiny_job("single", 1, compile=True), device_type="cpu")
