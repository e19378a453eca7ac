"""fp8: near bf16, the same on every layout, with nothing of it in a checkpoint; and refused where it can't be had.

What runs here is torchao's emulation, the same roundings by float32 products: 8-bit units, and what they are worth in
time, only a GPU shows (docs/trainer.md).
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from trainer.models import float8
from trainer.models.build import build_model
from trainer.strategies import check_supported
from trainer_testing.families import FAMILIES
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import MARK, Result, RunRequest
from trainer_testing.tiny import MODEL, VOCAB_SIZE, tiny_job

from trainyard.errors import InputError

LOSS_TOLERANCE, NORM_TOLERANCE = 2e-3, 5e-2
"""Relative, of each step: 4 and 3 bits of mantissa move losses by 1e-3 and gradient norms by 2e-2 (measured)."""


def run(world_size: int, requests: list[RunRequest]) -> list[Result]:
    asked = json.dumps([asdict(request) for request in requests])
    lines = run_pooled(world_size, "trainer_testing.fp8_worker", asked, timeout_seconds=600)[0].splitlines()
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]


def request(strategy: str, precision: str = "fp8", *, steps: int = 4, **more: Any) -> RunRequest:
    # Scales are a micro-batch's, so that all take the same.
    job = {"precision": precision, "micro_batch_size": 2, **more.pop("job", {})}
    return RunRequest(strategy, **{"last_step": steps, **more}, job=job)


def assert_near(result: Result, reference: Result, *, share: float = 1.0) -> None:
    for name, tolerance in (("loss", LOSS_TOLERANCE), ("validation", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
        expected = reference[name][: len(result[name])]
        assert result[name] == pytest.approx(expected, rel=share * tolerance, abs=0), name


@pytest.mark.slow
def test_it_learns_as_bf16_does_on_every_layout(tmp_path: Path) -> None:
    recomputed = request("single", job={"activation_checkpointing": "selective"})
    wide, one, same = run(1, [request("single", "bf16", steps=10), request("single", steps=10), recomputed])
    assert_near(one, wide)
    assert one["loss"] != wide["loss"]
    assert same["loss"] == one["loss"][:4]
    # Ranks take the same micro-batches, so that products have the same scales; FSDP scales weights rounded to bf16.
    layouts = [
        request("ddp", steps=10),
        request("fsdp", steps=10, save=str(tmp_path), save_after_step=5),
        request("pipeline2", job={"parallelism": {"pipeline": 2}}),
        request("context2", job={"parallelism": {"context": 2}, "micro_batch_size": 4}),
    ]
    for asked, result in zip(layouts, run(2, layouts), strict=True):
        result["validation"] = result["validation"] if asked.last_step == 10 else []
        assert_near(result, one)
        if asked.strategy == "ddp":  # the same weights and products at first; sums' order flips roundings later
            first = {**result, "loss": result["loss"][:1], "grad_norm": result["grad_norm"][:1], "validation": []}
            assert_near(first, one, share=1e-6)
    # A checkpoint has float32 weights under Hugging Face's names: what knows nothing of fp8 goes on from it.
    (resumed,) = run(1, [request("single", "bf16", steps=10, first_step=6, load=str(tmp_path))])
    assert_near(resumed, {**wide, "loss": wide["loss"][5:], "grad_norm": wide["grad_norm"][5:]})


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "EMULATE", True)


def converted(model: dict[str, Any]) -> tuple[torch.nn.Module, str]:
    job = tiny_job("single", 1, model=model, precision="fp8")
    built = build_model(job, vocab_size=VOCAB_SIZE)
    names = {name: (weight.shape, weight.dtype) for name, weight in built.state_dict().items()}
    said = float8.convert_blocks(built, job)
    assert {name: (weight.shape, weight.dtype) for name, weight in built.state_dict().items()} == names
    assert said is not None
    return built, said


@pytest.mark.usefixtures("emulated")
def test_what_is_converted_and_what_not_is_said() -> None:
    model, said = converted(MODEL)
    names = {name for name, module in model.named_modules() if module in float8.layers_of(model)}
    assert len(names) == 2 * 7 and not any("head" in name for name in names)
    assert "14 linear layers of the blocks; all outside" in said
    _, said = converted(MODEL | {"intermediate_size": 120})
    assert "8 linear layers" in said
    assert "6 stay in bf16, for their sizes are no multiples of 16 (mlp.down_proj, mlp.gate_proj, mlp.up_proj)" in said
    model, _ = converted(FAMILIES["Mixtral"])
    assert len(float8.layers_of(model)) == 4 * FAMILIES["Mixtral"].get("num_hidden_layers", 2)  # attention's alone


@pytest.mark.parametrize("name", ["mlp.gate", "block_sparse_moe.router", "mlp.experts.3.up_proj"])
def test_what_routes_and_what_is_routed_keeps_its_precision(name: str) -> None:
    layer = torch.nn.Linear(32, 32)
    assert float8._obstacle(name, layer) is not None
    assert float8._obstacle("mlp.shared_experts.up_proj", layer) is None


@pytest.mark.parametrize(
    ("job", "changes", "message"),
    [
        (
            {"model": MODEL | {"hidden_size": 72, "head_dim": 16}},
            {},
            "multiples of 16, and the model's hidden_size is 72",
        ),
        ({"model": FAMILIES["GPT-2"]}, {}, "no layers to convert in gpt2"),
        ({"micro_batch_size": 1}, {}, "multiples of 16 tokens, and a rank's part of a micro-batch is 24"),
        ({"micro_batch_size": 2}, {"context": 2}, "multiples of 16 tokens, and a rank's part of a micro-batch is 24"),
    ],
)
@pytest.mark.usefixtures("emulated")
def test_sizes_that_8_bit_units_refuse_are_refused(job: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    asked = tiny_job("", max(1, changes.get("context", 1)), parallelism=changes, precision="fp8", **job)
    with pytest.raises(InputError, match=f"training.precision: fp8 .*{message}") as caught:
        check_supported(asked, device_type="cpu")
    assert "\n" not in str(caught.value)


def test_machines_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job("single", 1, precision="fp8")
    with pytest.raises(InputError, match="fp8 needs an NVIDIA GPU, and this machine has none; use bf16"):
        check_supported(job, device_type="cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(InputError, match=r"compute capability 8\.9 or more \(.*\), and this NVIDIA A100 has 8\.0"):
        float8.check(job, device_type="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    float8.check(job, device_type="cuda")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError, match="fp8 needs the package torchao, and it can't be imported here"):
        float8.check(job, device_type="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {"engine": "deepspeed", "data_replicate": 2, "zero_stage": 2}}, "with engine: deepspeed"),
        ({"parallelism": {"tensor": 2}}, r"with parallelism\.tensor: 2, which cuts its layers"),
        ({"source": "model", "adapter": {"kind": "lora"}}, r"that model\.adapter freezes"),
        ({"source": "model", "adapter": {"kind": "qlora"}}, r"that model\.adapter freezes"),
    ],
)
def test_what_no_machine_can_do_is_refused_where_the_job_is_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"training.precision: fp8 .*{message}"):
        tiny_job("", 2, precision="fp8", **changes)
