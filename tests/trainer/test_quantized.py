"""4-bit storage: the paper's 16 values, its size and its error; the same numbers however a matrix is cut."""

from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer.export import Export, export
from trainer.models import quantized
from trainer.models.build import build_model, outline_model, transformer_blocks
from trainer.models.deferred_weights import StoredWeights, fill, source_of
from trainer.models.described import describe_model
from trainer.models.quantized import (
    NF4,
    PARTS,
    QuantizedLinear,
    dequantize,
    quantize,
    quantize_blocks,
)
from trainer_testing.checkpoints import save_checkpoint
from trainer_testing.support_table import save_sources
from trainer_testing.support_table import source_of as folder_of
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.errors import InputError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.support import quantized_block

ROWS, ROW = 96, 1024


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn((ROWS, ROW), generator=torch.Generator().manual_seed(5)) * 0.02


def read(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is left of a weight."""
    return dequantize(*quantize(weight), dtype)


def test_the_values_are_the_papers() -> None:
    """Appendix E: 8 quantiles above zero, 7 below, and zero; from 1 - (1/32 + 1/30)/2, which has the same tail."""
    inverse, outermost = NormalDist().inv_cdf, 0.9677083
    above = [inverse(outermost + (0.5 - outermost) * step / 8) for step in range(8)]
    below = [-inverse(outermost + (0.5 - outermost) * step / 7) for step in range(7)]
    values = sorted([*below, 0.0, *above])
    assert [value / values[-1] for value in values] == pytest.approx(NF4, abs=1e-6)


def test_a_weight_takes_half_a_byte_and_little_more(weight: torch.Tensor) -> None:
    stored = sum(part.numel() * part.element_size() for part in quantize(weight))
    assert stored / weight.numel() == 0.5 + 1 / 64 + 8 / ROW
    assert [quantized_block(row) for row in (4096, 14336, 11008, 2880, 48)] == [64, 64, 32, 8, 2]


def test_the_error_is_that_of_sixteen_values_alone(weight: torch.Tensor) -> None:
    """Against exact scales in float32: storing the scales in 8 bits costs less than a hundredth of the error."""
    blocks = weight.view(-1, 64)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    nearest = (blocks / largest).unsqueeze(-1).sub(torch.tensor(NF4)).abs().argmin(dim=-1)
    exact = (torch.tensor(NF4)[nearest] * largest).view_as(weight)
    wanted, ours = ((part - weight).square().mean().sqrt() / weight.std() for part in (exact, read(weight)))
    assert 0.08 < wanted < 0.11
    assert ours < 1.01 * wanted
    torch.testing.assert_close(read(weight, torch.bfloat16).float(), read(weight), rtol=0.01, atol=1e-6)


def test_odd_rows_are_kept(weight: torch.Tensor) -> None:
    assert torch.equal(read(torch.zeros(2, 64)), torch.zeros(2, 64))
    constant = torch.full((2, 512), -0.3)
    torch.testing.assert_close(read(constant), constant)
    spiked = weight.clone()
    spiked[0, 3] = 50.0  # an outlier must not drown the other blocks of its row
    assert (read(spiked)[0, 64:] - weight[0, 64:]).square().mean().sqrt() < 0.5 * weight.std()


def test_a_part_quantizes_to_the_part_of_the_whole(weight: torch.Tensor) -> None:
    codes, scales, ranges = quantize(weight)
    for part, whole in zip(quantize(weight[10:31]), (codes, scales, ranges), strict=True):
        assert torch.equal(part, whole[10:31])
    columns = slice(256, 512)  # what a rank of four has of a row-wise matrix
    part = dequantize(codes[:, 128:256], scales[:, 4:8], ranges, torch.float32)
    assert torch.equal(part, read(weight)[:, columns])


class Made(TorchDispatchMode):
    """Elements of each tensor that an operation makes inside, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given:
            self.num_elements.append(result.numel())
        return result


def test_a_weight_is_read_some_rows_at_a_time(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = torch.stack([weight, -weight])
    stored, whole = quantize(experts), read(experts)
    monkeypatch.setattr(quantized, "_READ_ELEMENTS", 10 * ROW)
    with Made() as made:
        again = dequantize(*stored, torch.float32)
    assert torch.equal(again, whole)
    first, second, *_ = sorted(made.num_elements, reverse=True)
    assert (first, second) == (experts.numel(), 10 * ROW), "the result, and some rows"
    assert dequantize(*(part[:, :0] for part in stored), torch.float32).shape == (2, 0, ROW)


def quantized_linear(weight: torch.Tensor, bias: torch.Tensor) -> QuantizedLinear:
    """One layer, filled."""
    holder = nn.Sequential(nn.Linear(weight.size(1), weight.size(0))).requires_grad_(False)
    holder[0].bias = nn.Parameter(bias, requires_grad=False)
    holder._weight_source = StoredWeights({"0.weight": weight})  # type: ignore[assignment]
    quantize_blocks(holder, [holder])
    layer = fill(holder, device=torch.device("cpu"))[0]  # type: ignore[index]
    assert isinstance(layer, QuantizedLinear)
    return layer


def test_the_layer_multiplies_and_keeps_no_wide_weight(weight: torch.Tensor) -> None:
    bias = torch.arange(float(ROWS))
    layer, plain = quantized_linear(weight, bias), read(weight)
    hidden = torch.randn((3, ROW), requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = layer(hidden)
    assert kept == [], "for which a layer would be computed again"
    assert output.grad_fn is not None
    product: Any = output.grad_fn.next_functions[0][0]
    assert {tensor.dtype for tensor in product.stored} == {torch.uint8, torch.int32}
    torch.testing.assert_close(output, functional.linear(hidden, plain, bias))
    (gradient,) = torch.autograd.grad(output.sum(), hidden)
    torch.testing.assert_close(gradient, plain.sum(dim=0).expand_as(hidden))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(hidden).dtype == torch.bfloat16


def qlora_job(folder: Path, family: str, **adapter: Any) -> ResolvedJob:
    """The family's saved base, to be adapted."""
    stated = {"kind": "qlora", "rank": 4, "targets": ("q_proj", "o_proj")} | adapter
    return tiny_job("single", 1, source=str(folder_of(folder, family)), adapter=stated)


def test_blocks_are_quantized_and_the_rest_is_not(tmp_path: Path) -> None:
    save_sources(tmp_path, ["Llama", "Mixtral"])
    plain = build_model(tiny_job("single", 1, source=str(folder_of(tmp_path, "Mixtral"))), vocab_size=VOCAB_SIZE)
    model = build_model(qlora_job(tmp_path, "Mixtral"), vocab_size=VOCAB_SIZE)
    stored = dict(model.named_parameters())
    integers = {name for name, parameter in stored.items() if not parameter.is_floating_point()}
    assert {name.rpartition(".")[2] for name in integers} == set(PARTS) | {
        f"{name}_{part}" for name in ("gate_up_proj", "down_proj") for part in PARTS
    }
    assert not any(parameter.requires_grad for name, parameter in stored.items() if ".lora_" not in name)
    for name, weight in plain.named_parameters():
        if "norm" in name or "embed" in name or "lm_head" in name or ".gate." in name:
            assert torch.equal(stored[name], weight), name
    prefix = "model.layers.1.mlp.experts.down_proj"
    parts = [stored[f"{prefix}_{part}"] for part in PARTS]
    assert torch.equal(dequantize(*parts, torch.float32), read(plain.get_parameter(prefix)))  # type: ignore[arg-type]
    outline = outline_model(qlora_job(tmp_path, "Llama"), vocab_size=VOCAB_SIZE)
    assert source_of(outline) is not None
    assert all(parameter.is_meta for parameter in outline.parameters())


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROUTED = _TINY | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR_ATTENTION = {"layer_types": ("linear_attention", "full_attention"), "linear_num_value_heads": 2} | {
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}
}
ODD_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "convolutions without a bias": (
        "conv1d.weight",
        _TINY | _LINEAR_ATTENTION | {"model_type": "qwen3_5_text", "num_key_value_heads": 2},
    ),
    "multiplies weights itself": ("conv1d.weight", _TINY | {"model_type": "mamba", "state_size": 4}),
    "a linear layer that is a router": ("router.weight", _ROUTED | {"model_type": "phimoe"}),
    "experts that are called otherwise": (
        "router.weight",
        _ROUTED | {"model_type": "llama4_text", "head_dim": 16, "pad_token_id": 0},
    ),
    "each kind of expert a module": ("router.layer.weight", _ROUTED | {"model_type": "jetmoe", "kv_channels": 16}),
    "a router of its own name": (
        "mlp.gate.wg.weight",
        _ROUTED | {"model_type": "hunyuan_v1_moe", "num_experts": 4, "head_dim": 16, "pad_token_id": 0},
    ),
    "a class of its own for linear layers": ("input_layernorm.weight", _TINY | {"model_type": "falcon"}),
}
"""What the weights are called that stay whole, and the configuration."""


@pytest.mark.parametrize(("whole", "settings"), ODD_FAMILIES.values(), ids=ODD_FAMILIES)
def test_families_that_are_built_otherwise_compute_with_what_was_stored(whole: str, settings: dict[str, Any]) -> None:
    job = tiny_job("single", 1, model=settings | {"vocab_size": VOCAB_SIZE}, document_masks=False)
    outline = outline_model(job, vocab_size=VOCAB_SIZE).eval().requires_grad_(False)
    quantize_blocks(outline, transformer_blocks(outline))
    stored = fill(outline, device=torch.device("cpu"))
    plain = build_model(job, vocab_size=VOCAB_SIZE).eval().requires_grad_(False)
    parts, num_stored = dict(stored.named_parameters()), 0
    for name, weight in plain.named_parameters():
        own = parts.get(name)
        if own is not None:
            assert torch.equal(own, weight), name
            continue
        assert not name.endswith(f".{whole}")
        prefix = f"{name.removesuffix('.weight')}." if f"{name.removesuffix('.weight')}.codes" in parts else f"{name}_"
        weight.data = dequantize(*(parts[f"{prefix}{part}"] for part in PARTS), torch.float32)
        num_stored += 1
    assert any(name.endswith(f".{whole}") for name in parts)
    assert num_stored > 2 * len(transformer_blocks(plain))
    tokens = torch.arange(24)[None]
    ours, expected = (model(input_ids=tokens, use_cache=False).logits for model in (stored, plain))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_an_odd_length_are_refused() -> None:
    with pytest.raises(InputError, match=r"model\.adapter: qlora stores two weights to a byte.* 7 of them"):
        QuantizedLinear(nn.Linear(7, 4))


def test_peft_reads_the_exported_adapter(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_sources(tmp_path, ["Llama"])
    job = qlora_job(tmp_path, "Llama", targets=("q_proj", "down_proj"))
    model = build_model(job, vocab_size=VOCAB_SIZE).eval()
    trained = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    for tensor in trained.values():
        tensor.normal_(std=0.1)
    save_checkpoint(tmp_path / "checkpoints", trained, describe_model(job.spec, model))
    export(Export(str(tmp_path / "checkpoints"), tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(folder_of(tmp_path, "Llama"))
    for block in base.model.layers:
        for layer in (module for module in block.modules() if isinstance(module, nn.Linear)):
            layer.weight.data = read(layer.weight.data)
    served, tokens = PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), torch.arange(8)[None]
    torch.testing.assert_close(served(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
