"""Closed form and trace agree for the families with routed experts that have readers of their own."""

from typing import Any

import pytest
from trainer_testing.agreement import FEW, STATIC, agreement, moving

from trainyard.planner.expert_families import EXPERT_READERS
from trainyard.spec.support import EXPERT_FAMILIES

ACTIVATIONS = 0.10
SPREAD_ACTIVATIONS = 0.03

ROUTED = {**FEW, "intermediate_size": 768, "moe_intermediate_size": 768, "num_experts_per_tok": 4}
MODELS: dict[str, dict[str, Any]] = {
    "afmoe": {"intermediate_size": 6144, "num_experts": 32, "sliding_window": 4096},
    "cohere2_moe": {"num_experts": 32, "num_shared_experts": 2},
    "hy_v3": {"intermediate_size": 6144, "num_experts": 32},
    "dots1": {"intermediate_size": 6144, "n_routed_experts": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"intermediate_size": 6144, "moe_num_experts": 32},
    "exaone_moe": {"intermediate_size": 6144, "num_experts": 32},
    "flex_olmo": {"num_experts": 8},
    "glm4_moe": {"intermediate_size": 6144, "n_routed_experts": 32, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {"intermediate_size": 6144, "n_routed_experts": 32, "num_key_value_heads": 16},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 1024},
    "granitemoe": {"num_local_experts": 32},
    "granitemoeshared": {"num_local_experts": 32, "shared_intermediate_size": 1536},
    "hunyuan_v1_moe": {"num_experts": 32, "moe_topk": 4},
    "llama4_text": {"num_local_experts": 8, "intermediate_size_mlp": 6144},
    "minimax_m2": {"num_local_experts": 32},
    "olmoe": {"num_experts": 32, "clip_qkv": 8.0},
    "phimoe": {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {"num_experts": 32, "shared_expert_intermediate_size": 3072},
    "solar_open": {"n_routed_experts": 32},
}
"""And Qwen2's, whose shared expert runs before the routed ones too, and gpt-oss', whose attention is written out."""

QUICK = (*sorted(EXPERT_READERS)[::4], "gpt_oss", "qwen2_moe")


SPREAD = {"data_shard": 8, "expert": 4}
SPREAD_QUICK = ("glm4_moe", "gpt_oss", "minimax_m2")


def _agreement(model_type: str, recompute: str, layout: dict[str, int] | None = None) -> Any:
    config = {"model_type": model_type, **ROUTED, **MODELS[model_type]}
    return agreement(config, layout, activation_checkpointing=recompute)


def test_every_family_is_tried() -> None:
    assert set(MODELS) == {*EXPERT_READERS, "gpt_oss", "qwen2_moe"}


@pytest.mark.parametrize(
    "recompute",
    ["none", pytest.param("selective", marks=pytest.mark.full), pytest.param("full", marks=pytest.mark.full)],
)
@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MODELS]
)
def test_closed_form_and_trace_agree(model_type: str, recompute: str) -> None:
    found = _agreement(model_type, recompute)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(one, marks=() if one in SPREAD_QUICK else pytest.mark.slow)
        for one in MODELS
        if one in EXPERT_FAMILIES
    ],
)
def test_so_they_do_where_experts_are_on_different_ranks(model_type: str) -> None:
    found = _agreement(model_type, "none", SPREAD)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < SPREAD_ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["minimax_m2", "olmoe"])
def test_so_they_do_where_ranks_share_a_norm_of_all_heads(model_type: str) -> None:
    """Which they write out in float32, where one rank's is a kernel that keeps its input alone."""
    found = _agreement(model_type, "none", {"tensor": 2, "data_shard": 4})
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < SPREAD_ACTIVATIONS


ALTERNATE = {
    **{"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "pad_token_id": 0},
    **{"num_hidden_layers": 8, "num_experts_per_tok": 4, "vocab_size": 16000},
}
QWEN = ALTERNATE | {
    **{"model_type": "qwen3_moe", "intermediate_size": 4096, "moe_intermediate_size": 512, "num_experts": 16},
    "decoder_sparse_step": 2,
}
LLAMA_4 = ALTERNATE | {
    **{"model_type": "llama4_text", "intermediate_size": 2048, "intermediate_size_mlp": 4096, "num_local_experts": 8},
    **{"num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [QWEN, LLAMA_4], ids=["qwen3", "llama4"])
def test_so_they_do_of_stages_where_every_other_layer_has_experts(model: dict[str, Any], recompute: str) -> None:
    """Those without were taken for a model's first ones, and its first stage for one that has hardly an expert."""
    found = agreement(
        *(model, {"pipeline": 2, "data_shard": 4}), activation_checkpointing=recompute, global_batch_size=32, rank=1
    )
    assert found.static is not None and abs(found.static) < 1e-3
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.02)
