"""Closed form and trace agree for the families with gated delta rules, which transformers' own torch code computes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _cases() -> ModuleType:
    """benchmarks/planner_dry_run.py."""
    spec = importlib.util.spec_from_file_location("planner_dry_run", ROOT / "benchmarks" / "planner_dry_run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_dry_run"] = module
    spec.loader.exec_module(module)
    return module


CASES = _cases()
STATIC, ACTIVATIONS = 0.03, 0.10

FEW = {
    **{"num_hidden_layers": 3, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 128, "vocab_size": 32000, "pad_token_id": 0, "intermediate_size": 6144},
    **{"linear_num_key_heads": 8, "linear_num_value_heads": 16, "tie_word_embeddings": False},
}
ROUTED = {"num_experts": 32, "num_experts_per_tok": 4}
DELTAS_FIRST = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
DELTAS_ALONE = {"layer_types": ["linear_attention"] * 3}
ATTENTION_FIRST = {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
SHARDED, COPIED = {"data_shard": 8}, {"data_replicate": 8}


def _agreement(model: dict[str, Any], layout: dict[str, Any], *, adapter: str | None = None, **training: Any) -> Any:
    config = FEW | model
    job = (
        CASES.adapted(layout, adapter, config, **training) if adapter else CASES.few_layers(layout, config, **training)
    )
    data = job.data.model_copy(update={"document_masks": False})
    return CASES.agreement(CASES.Case("", job.model_copy(update={"data": data}), 5))


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.full), "full"])
@pytest.mark.parametrize(
    "model",
    [{"model_type": "qwen3_5_text"}, {"model_type": "qwen3_next", **ROUTED}],
    ids=lambda model: model["model_type"],
)
def test_closed_form_and_trace_agree(model: dict[str, Any], recompute: str) -> None:
    found = _agreement(model | DELTAS_FIRST, SHARDED, activation_checkpointing=recompute)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)


def test_so_they_do_in_autocast_which_narrows_what_products_read() -> None:
    found = _agreement({"model_type": "qwen3_5_text"} | DELTAS_ALONE, COPIED)
    assert abs(found.activations) < 0.01


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_so_they_do_with_adapters(adapter: str) -> None:
    found = _agreement({"model_type": "qwen3_5_text"} | ATTENTION_FIRST, SHARDED, adapter=adapter)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < 0.05


def test_attention_alone_has_a_gate() -> None:
    found = _agreement({"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 3}, SHARDED)
    assert abs(found.activations) < 0.02
