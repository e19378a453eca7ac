"""Families with routed experts that have readers of their own: parameter counts equal those of the real models."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig

from trainyard.errors import InputError
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.expert_families import EXPERT_READERS
from trainyard.planner.families import shape_from_config

Counted = Callable[[dict[str, Any]], int]

NARROW = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
NARROW |= {"vocab_size": 500, "pad_token_id": 0}

LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20}

SMALL: dict[str, dict[str, Any]] = {
    "afmoe": {"num_experts": 6, "head_dim": 24, "num_shared_experts": 3},
    "afmoe-dense-first": {"num_experts": 6, "num_dense_layers": 2, "tie_word_embeddings": True},
    "cohere2_moe": {"num_experts": 6, "num_shared_experts": 2},
    "cohere2_moe-dense-first": {"num_experts": 6, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80},
    "cohere2_moe-listed": {"num_experts": 6, "mlp_layer_types": ["dense", "sparse", "dense"], "rms_norm_eps": 1e-5},
    "hy_v3": {"num_experts": 6, "num_shared_experts": 2, "attention_bias": True},
    "hy_v3-listed": {"num_local_experts": 6, "mlp_layer_types": ["sparse", "dense", "sparse"], "head_dim": 24},
    "glm4_moe": {"n_routed_experts": 6, "head_dim": 24, "use_qk_norm": True, "first_k_dense_replace": 2},
    "glm4_moe-biased": {"n_routed_experts": 6, "attention_bias": True, "n_shared_experts": 2},
    "solar_open": {"n_routed_experts": 6, "attention_bias": True},
    "minimax_m2": {"num_local_experts": 6},
    "minimax_m2-narrow": {"num_local_experts": 6, "head_dim": 20, "tie_word_embeddings": True},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "dots1-biased": {"n_routed_experts": 6, "n_shared_experts": 1, "attention_bias": True},
    "olmoe": {"num_experts": 6},
    "olmoe-biased": {"num_experts": 6, "attention_bias": True},
    "flex_olmo": {"head_dim": 24, "tie_word_embeddings": True},
    "granitemoe": {"tie_word_embeddings": True},
    "granitemoe-biased": {"attention_bias": True, "num_local_experts": 5},
    "granitemoeshared": {"shared_intermediate_size": 80},
    "granitemoeshared-without": {"attention_bias": True, "tie_word_embeddings": True},
    "glm4_moe_lite": {**LATENTS, "n_routed_experts": 6, "n_shared_experts": 2},
    "glm4_moe_lite-direct": {**LATENTS, "n_routed_experts": 6, "q_lora_rank": None, "first_k_dense_replace": 2},
    "glm4_moe_lite-listed": {**LATENTS, "n_routed_experts": 6, "mlp_layer_types": ["dense", "dense", "sparse"]},
    "llama4_text": {"num_local_experts": 6, "intermediate_size_mlp": 80},
    "llama4_text-in-turn": {
        **{"num_local_experts": 6, "interleave_moe_layer_step": 2, "num_hidden_layers": 5, "attention_bias": True},
        **{"head_dim": 24, "tie_word_embeddings": True},
    },
    "llama4_text-without": {"num_local_experts": 0, "moe_layers": [], "intermediate_size_mlp": 80},
    "llama4_text-listed": {"num_local_experts": 6, "moe_layers": [0, 2]},
    "phimoe": {},
    "phimoe-biased": {"attention_bias": True, "lm_head_bias": True, "head_dim": 24},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": [2, 2, 2], "head_dim": 16},
    "hunyuan_v1_moe-biased": {"num_experts": 6, "moe_topk": 2, "attention_bias": True, "head_dim": 24},
    "exaone_moe": {"num_experts": 6, "num_shared_experts": 2},
    "exaone_moe-listed": {"num_experts": 6, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2},
    "ernie4_5_moe-every-second": {
        **{"num_hidden_layers": 7, "moe_layer_interval": 2, "moe_layer_end_index": 4, "tie_word_embeddings": False},
        **{"num_experts": 6, "moe_num_shared_experts": 0},
    },
}
FEW = {"num_hidden_layers": 3, "moe_intermediate_size": 40, "num_experts_per_tok": 2}

PUBLISHED: dict[str, dict[str, Any]] = {
    "GLM-4.5": {
        **{"model_type": "glm4_moe", "hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96},
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536},
        **{"n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True},
    },
    "GLM-4.5-Air": {"model_type": "glm4_moe", "head_dim": 128, "attention_bias": True},
    "MiniMax-M2": {"model_type": "minimax_m2"},
    "dots.llm1": {
        **{"model_type": "dots1", "hidden_size": 4096, "n_routed_experts": 128, "num_experts_per_tok": 6},
        **{"n_shared_experts": 2, "first_k_dense_replace": 1, "vocab_size": 152064},
    },
    "OLMoE-1B-7B": {"model_type": "olmoe", "intermediate_size": 1024},
    "granite-3.1-3b-a800m": {
        **{"model_type": "granitemoe", "hidden_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 24},
        **{"num_key_value_heads": 8, "intermediate_size": 512, "num_local_experts": 40, "num_experts_per_tok": 8},
        **{"vocab_size": 49155, "tie_word_embeddings": True},
    },
    "granite-3.1-1b-a400m": {
        **{"model_type": "granitemoe", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 8},
        **{"vocab_size": 49155, "tie_word_embeddings": True},
    },
    "Phi-3.5-MoE": {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True},
    "Hunyuan-A13B": {
        **{"model_type": "hunyuan_v1_moe", "intermediate_size": 3072, "num_key_value_heads": 8, "num_experts": 64},
        **{"moe_topk": [8] * 32, "vocab_size": 128167, "tie_word_embeddings": True, "head_dim": 128},
    },
    "FlexOlmo-7x7B-1T": {"model_type": "flex_olmo"},
    "ERNIE-4.5-21B-A3B": {"model_type": "ernie4_5_moe"},
    "ERNIE-4.5-300B-A47B": {
        **{"model_type": "ernie4_5_moe", "hidden_size": 8192, "num_hidden_layers": 54, "num_attention_heads": 64},
        **{"num_key_value_heads": 8, "intermediate_size": 28672, "moe_intermediate_size": 3584, "moe_k": 8},
        **{"moe_layer_start_index": 3, "moe_num_shared_experts": 0, "tie_word_embeddings": False},
    },
}
"""Sizes as published, where they are not the family's defaults."""


def _small(name: str) -> dict[str, Any]:
    return {"model_type": name.partition("-")[0], **NARROW, **FEW, **SMALL[name]}


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    config = _small(name)
    assert shape_from_config(config).params == real_parameters(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    shape = shape_from_config(PUBLISHED[name])
    assert shape.params == real_parameters(PUBLISHED[name])
    assert 0 < shape.active_params < shape.params


def test_every_family_is_among_the_small_models() -> None:
    assert {name.partition("-")[0] for name in SMALL} == set(EXPERT_READERS)


@pytest.mark.parametrize("model_type", sorted(set(EXPERT_READERS) - {"dots1", "hunyuan_v1_moe"}))
def test_what_a_configuration_leaves_out_is_as_in_transformers(model_type: str, real_parameters: Counted) -> None:
    """dots1 has no number of experts of its own, and hunyuan_v1_moe no width of heads."""
    config = {"model_type": model_type}
    shape = shape_from_config(config)
    assert shape.params == real_parameters(config)
    real = AutoConfig.for_model(model_type)
    # Of Llama 4's experts all compute all tokens.
    chosen = real.num_local_experts if model_type == "llama4_text" else getattr(real, "num_experts_per_tok", None)
    assert shape.experts_per_token == chosen
    assert shape.kv_heads == real.num_key_value_heads


def test_chunks_are_seen_as_windows_of_half_their_length() -> None:
    config = {"model_type": "llama4_text", "num_hidden_layers": 8}
    shape = shape_from_config(config)
    assert (shape.windowed_layers, shape.attention_window) == (6, 4096)
    assert shape.mean_span(8192) == 8192, "a chunk's own causal half is counted by whoever halves"
    assert shape.mean_span(32768) == pytest.approx((6 * 8192 + 2 * 32768) / 8)
    assert shape_from_config(config | {"no_rope_layers": [1, 0] * 4}).windowed_layers == 4
    assert shape_from_config(config | {"layer_types": ["full_attention"] * 8}).windowed_layers == 0
    assert shape_from_config(config | {"no_rope_layers": []}).windowed_layers == 6
    listed = {"layer_types": ["chunked_attention"] * 8, "no_rope_layers": [1] * 48}
    assert shape_from_config(config | listed).windowed_layers == 8, "of two lists that of types counts"
    assert shape_from_config(config | {"attention_chunk_size": None}).attention_window == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "llama4_text", "num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 48},
            r"layer_types: must have one entry for each of 4 layers \(given: 48\)",
        ),
        (
            {"model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0] * 12},
            r"no_rope_layers: must have one entry for each of 4 layers \(given: 48\)",
        ),
        ({"model_type": "llama4_text", "num_local_experts": 0}, r"num_local_experts: must be at least 1 \(given: 0\)"),
        (
            {"model_type": "hunyuan_v1_moe", "head_dim": 128, "num_experts": []},
            r"num_experts: must have one entry for each layer \(given: 0\)",
        ),
        ({"model_type": "dots1"}, "model.config: n_routed_experts is missing"),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 4}, "model.config: head_dim is missing"),
        (
            {"model_type": "exaone_moe", "num_hidden_layers": 2, "mlp_layer_types": ["dense"]},
            "model.config.mlp_layer_types: must be a list of dense and sparse, one for each of 2 layers",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shape_from_config(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "hunyuan_v1_moe", "num_experts": 8, "head_dim": 128, "moe_topk": [1, 2]},
        {"model_type": "ernie4_5_moe", "use_bias": True},
        {"model_type": "afmoe", "attention_bias": True},
        {"model_type": "hy_v3", "mlp_bias": True},
    ],
)
def test_what_no_formula_describes_is_not_covered(config: dict[str, Any]) -> None:
    with pytest.raises(NotCoveredError):
        shape_from_config(config)
