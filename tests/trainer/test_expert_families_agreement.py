"""Closed form and trace agree for the families with routed experts that have readers of their own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainyard.planner.expert_families import EXPERT_READERS
from trainyard.spec.support import DOCUMENT_FAMILIES

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
    **{"head_dim": 128, "vocab_size": 32000, "pad_token_id": 0, "intermediate_size": 768},
    **{"moe_intermediate_size": 768, "num_experts_per_tok": 4, "tie_word_embeddings": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "dots1": {"intermediate_size": 6144, "n_routed_experts": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"intermediate_size": 6144, "moe_num_experts": 32},
    "exaone_moe": {"intermediate_size": 6144, "num_experts": 32},
    "flex_olmo": {"num_experts": 8},
    "glm4_moe": {"intermediate_size": 6144, "n_routed_experts": 32, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {"intermediate_size": 6144, "n_routed_experts": 32, "num_key_value_heads": 16},
    "granitemoe": {"num_local_experts": 32},
    "granitemoeshared": {"num_local_experts": 32, "shared_intermediate_size": 1536},
    "hunyuan_v1_moe": {"num_experts": 32, "moe_topk": 4},
    "minimax_m2": {"num_local_experts": 32},
    "olmoe": {"num_experts": 32},
    "phimoe": {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {"num_experts": 32, "shared_expert_intermediate_size": 3072},
    "solar_open": {"n_routed_experts": 32},
}
"""And Qwen2's, whose shared expert runs before the routed ones too."""


def _agreement(model_type: str, recompute: str) -> Any:
    config = {"model_type": model_type, **FEW, **MODELS[model_type]}
    job = CASES.few_layers({"data_shard": 8}, config, activation_checkpointing=recompute)
    masks = model_type in DOCUMENT_FAMILIES
    return CASES.agreement(
        CASES.Case("", job.model_copy(update={"data": job.data.model_copy(update={"document_masks": masks})}), 5)
    )


def test_every_family_is_tried() -> None:
    assert set(MODELS) == {*EXPERT_READERS, "qwen2_moe"}


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.full), "full"])
@pytest.mark.parametrize("model_type", MODELS)
def test_closed_form_and_trace_agree(model_type: str, recompute: str) -> None:
    found = _agreement(model_type, recompute)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)
