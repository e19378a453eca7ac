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
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.checkpoint.manifest import step_folder
from trainer.export import Export, export
from trainer.models import float8
from trainer.models.build import build_model
from trainer.models.described import describe_model
from trainer.strategies import check_supported
from trainer_testing.checkpoints import save_checkpoint
from trainer_testing.families import FAMILIES
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import MARK, Result, RunRequest
from trainer_testing.support_table import save_sources, source_of
from trainer_testing.tiny import MODEL, VOCAB_SIZE, tiny_job

from trainyard.errors import InputError

LOSS_TOLERANCE, NORM_TOLERANCE = 2e-3, 5e-2
"""Relative, of each step: 4 and 3 bits of mantissa move losses by 1e-3 and gradient norms by 2e-2 (measured)."""


MOST_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
SPREAD = {"parallelism": {"expert": 2, "data_shard": 2}}
SAVED_AT = 2


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


def adapted(folder: Path, strategy: str, precision: str = "fp8", *, family: str = "Llama", **more: Any) -> RunRequest:
    """A run with an adapter on most linear layers (in a mixture on two) of the family's base model in `folder`."""
    targets = MOST_LINEARS if family == "Llama" else ("q_proj", "o_proj")
    adapter = {"kind": "lora", "rank": 4, "targets": targets}
    job = {"source": str(source_of(folder, family)), "adapter": adapter, **more.pop("job", {})}
    return request(strategy, precision, job=job, **more)


def assert_same(result: Result, reference: Result) -> None:
    """Frozen weights are rounded to bf16 everywhere, so that the roundings to 8 bits are the same on every layout."""
    for name in ("loss", "grad_norm", "validation"):
        assert result[name] == pytest.approx(reference[name][-len(result[name]) :], rel=1e-6, abs=0), name


@pytest.mark.slow
def test_an_adapter_beside_8_bit_products_is_one_process_on_every_layout(tmp_path: Path) -> None:
    save_sources(tmp_path, ["Llama"])
    recomputed = adapted(tmp_path, "single", job={"activation_checkpointing": "selective"})
    wide, one, same = run(1, [adapted(tmp_path, "single", "bf16"), adapted(tmp_path, "single"), recomputed])
    assert_near(one, wide)
    assert one["loss"] != wide["loss"]
    assert one["loss"][-1] < one["loss"][0]
    assert same["loss"] == one["loss"]
    saved = str(tmp_path / "saved")
    layouts = [
        adapted(tmp_path, "ddp"),
        adapted(tmp_path, "fsdp", save=saved, save_after_step=SAVED_AT),
        adapted(tmp_path, "pipeline2", job={"parallelism": {"pipeline": 2}}),
        adapted(tmp_path, "context2", job={"parallelism": {"context": 2}, "micro_batch_size": 4}),
    ]
    *equal, cut = whole = run(2, layouts)
    for result in equal:
        assert_same(result, one)
    assert_near(cut, one)  # scales are those of a rank's part of the sequences
    resumed = {"load": saved, "first_step": SAVED_AT + 1}
    again, other = run(2, [adapted(tmp_path, strategy, **resumed) for strategy in ("fsdp", "ddp")])
    for name in ("loss", "grad_norm", "validation"):
        assert again[name] == whole[1][name][-len(again[name]) :], f"{name}: bit for bit at the same layout"
    assert_same(other, one)
    names = FileSystemReader(tmp_path / "saved" / step_folder(SAVED_AT)).read_metadata().state_dict_metadata
    assert all(".lora_A." in name or ".lora_B." in name for name in names if name != "optim.step")


@pytest.mark.full
def test_an_adapter_beside_8_bit_products_in_more_layouts(tmp_path: Path) -> None:
    save_sources(tmp_path, ["Llama", "Mixtral"])
    one, mixture = run(1, [adapted(tmp_path, "single"), adapted(tmp_path, "single", family="Mixtral")])
    four = [
        adapted(tmp_path, "hsdp"),
        adapted(tmp_path, "pipeline2-fsdp2", job={"parallelism": {"pipeline": 2, "data_shard": 2}}),
    ]
    for result in run(4, four):
        assert_same(result, one)
    (result,) = run(2, [adapted(tmp_path, "expert2-fsdp2", family="Mixtral", job=SPREAD)])
    assert_same(result, mixture)


@pytest.mark.full
def test_more_layouts() -> None:
    spread = SPREAD | {"model": FAMILIES["Mixtral"]}
    one, mixture = run(1, [request("single"), request("single", job={"model": FAMILIES["Mixtral"]})])
    four = [request("hsdp"), request("pipeline2-fsdp2", job={"parallelism": {"pipeline": 2, "data_shard": 2}})]
    for result in run(4, four):
        assert_near(result, one)
    (result,) = run(2, [request("expert2-fsdp2", job=spread)])
    assert_near(result, mixture)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def passed(*, is_trained: bool) -> tuple[torch.Tensor, torch.Tensor | None, int, int]:
    """A converted layer's output and gradient of its input, its products, and how many elements it keeps between."""
    torch.manual_seed(1)
    block = torch.nn.Sequential(torch.nn.Linear(64, 48).bfloat16().requires_grad_(is_trained))
    float8._convert(block, {"0"})
    given = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    num_kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_kept
        num_kept += tensor.numel()
        return tensor

    with Products() as products, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(given)
        output.backward(torch.randn_like(output))
    assert (block[0].weight.grad is not None) is is_trained
    return output, given.grad, products.count, num_kept


@pytest.mark.usefixtures("emulated")
def test_a_frozen_layer_is_torchaos_without_the_gradient_of_its_weight() -> None:
    output, gradient, *counts = passed(is_trained=False)
    trained_output, trained_gradient, *trained_counts = passed(is_trained=True)
    assert gradient is not None and trained_gradient is not None
    assert torch.equal(output, trained_output) and torch.equal(gradient, trained_gradient)
    assert counts == [2, 64 * 48]
    assert trained_counts == [3, 64 * 48 + 2 * 32 * 64]


def test_torchs_own_8_bit_product_gives_what_the_emulation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU it has one too. Its operands lie in memory as a GPU's kernels ask: one by rows, the other by columns."""
    asked: list[tuple[tuple[int, ...], tuple[int, ...], set[torch.dtype]]] = []
    multiply = torch._scaled_mm

    def scaled_mm(first: torch.Tensor, second: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        asked.append((first.stride(), second.stride(), {first.dtype, second.dtype}))
        product: torch.Tensor = multiply(first, second, *more, **options)
        return product

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    own, own_gradient, *_ = passed(is_trained=False)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert asked == [((64, 1), (1, 64), {e4m3}), ((48, 1), (1, 48), {e5m2, e4m3})]
    monkeypatch.setattr(float8, "EMULATE", True)
    emulated, gradient, *_ = passed(is_trained=False)
    assert len(asked) == 2
    # Sums in another order, then rounded to bf16.
    torch.testing.assert_close(own, emulated, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(own_gradient, gradient, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("emulated")
def test_under_an_adapter_the_frozen_layers_are_converted_and_their_names_kept(tmp_path: Path) -> None:
    save_sources(tmp_path, ["Llama"])
    asked = adapted(tmp_path, "single").job | {"activation_checkpointing": "selective"}
    job = tiny_job("single", 1, **asked)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    before = {name: (weight.shape, weight.dtype) for name, weight in model.state_dict().items()}
    marked = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    said = float8.convert_blocks(model, job)
    assert said is not None
    assert "14 frozen linear layers of the blocks; adapters and all outside of the blocks stay in bf16" in said
    assert {name: (weight.shape, weight.dtype) for name, weight in model.state_dict().items()} == before
    assert {dtype for name, (_, dtype) in before.items() if "lora" not in name} == {torch.bfloat16}
    assert {dtype for name, (_, dtype) in before.items() if "lora" in name} == {torch.float32}
    converted = {name for name, module in model.named_modules() if module in float8.layers_of(model)}
    assert all(name.endswith(("base_layer", "mlp.down_proj")) for name in converted)
    # Selective recomputation has marked a block's last product, and the mark is still there.
    assert marked == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert marked == [name for name, module in model.named_modules() if module._forward_pre_hooks]
    # What is trained beside them is exported and merged as ever.
    trained = {f"model.{name}": weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    for tensor in trained.values():
        tensor.normal_(std=0.1)
    save_checkpoint(tmp_path / "job", trained, describe_model(job.spec, model))
    assert export(Export(str(tmp_path / "job"), tmp_path / "merged", merge=True))["kind"] == "merged model"
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", tmp_path / "Llama"))
    name = "model.layers.1.mlp.up_proj"
    first, second = (trained[f"model.{name}.lora_{part}.default.weight"] for part in "AB")
    assert job.spec.model.adapter is not None
    scale = job.spec.model.adapter.alpha / job.spec.model.adapter.rank
    expected = base[f"{name}.weight"].float() + scale * second @ first
    torch.testing.assert_close(merged[f"{name}.weight"].float(), expected, rtol=1e-2, atol=1e-3)


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


@pytest.mark.parametrize(
    "name", ["mlp.gate", "mlp.gate.base_layer", "block_sparse_moe.router", "mlp.gate.wg", "mlp.experts.3.up_proj"]
)
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
        (
            {
                **{"source": "model", "adapter": {"kind": "lora"}},
                "parallelism": {"engine": "deepspeed", "data_replicate": 2, "zero_stage": 2},
            },
            "with engine: deepspeed",
        ),
        ({"source": "model", "adapter": {"kind": "lora"}, "parallelism": {"tensor": 2}}, r"parallelism\.tensor: 2"),
        ({"source": "model", "adapter": {"kind": "qlora"}}, r"adapter: qlora, .* in 4 bits .*; use lora, or bf16"),
    ],
)
def test_what_no_machine_can_do_is_refused_where_the_job_is_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"training.precision: fp8 .*{message}"):
        tiny_job("", 2, precision="fp8", **changes)
