"""Families that are a known one's but for one change: parameter counts equal those of the real models."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig

from trainyard.planner.families import shape_from_config, shape_of_known, writes_scores_out
from trainyard.planner.kindred_families import KINDRED_READERS
from trainyard.planner.known_models import KNOWN_CONFIGS

Counted = Callable[[dict[str, Any]], int]

NARROW = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
NARROW |= {"vocab_size": 500, "pad_token_id": 0, "num_hidden_layers": 5}
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20}

SMALL: dict[str, dict[str, Any]] = {
    "cwm": {"head_dim": 24},
    "cwm-listed": {"mlp_bias": True, "layer_types": ["sliding_attention"] * 5, "tie_word_embeddings": True},
    "hyperclovax": {},
    "hyperclovax-plain": {"use_post_norm": False, "attention_bias": True, "mlp_bias": True},
    "internlm3": {"head_dim": 16},
    "internlm3-biased": {"attention_bias": True, "mlp_bias": True},
    "internlm3-by its own names": {"qkv_bias": True, "bias": True},
    "iquestcoder": {"head_dim": 24},
    "iquestcoder-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "jais2": {},
    "jais2-plain": {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    "minicpm3": {},
    "minicpm3-other": LATENT | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "minicpm3-whole": {"q_lora_rank": None},
    "vaultgemma": {"head_dim": 24},
    "vaultgemma-untied": {"tie_word_embeddings": False, "attention_bias": True},
    "youtu": {},
    "youtu-other": LATENT | {"tie_word_embeddings": False, "attention_bias": True},
    "youtu-whole": {"q_lora_rank": None},
}


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    config = {"model_type": name.partition("-")[0], **NARROW, **SMALL[name]}
    assert shape_from_config(config).params == real_parameters(config)


def test_every_family_is_among_the_small_models() -> None:
    assert {name.partition("-")[0] for name in SMALL} == set(KINDRED_READERS)


@pytest.mark.parametrize("model_type", sorted(KINDRED_READERS))
def test_what_a_configuration_leaves_out_is_as_in_transformers(model_type: str, real_parameters: Counted) -> None:
    shape = shape_from_config({"model_type": model_type})
    assert shape.params == real_parameters({"model_type": model_type})
    real = AutoConfig.for_model(model_type)
    assert shape.windowed_layers == (getattr(real, "layer_types", None) or []).count("sliding_attention")
    assert shape.attention_window == (real.sliding_window if shape.windowed_layers else 0)


@pytest.mark.parametrize("name", ["internlm3-8b", "iquest-coder-v1-40b", "minicpm3-4b", "youtu-llm-2b"])
def test_known_models_are_what_transformers_takes_for_theirs(name: str, real_parameters: Counted) -> None:
    """transformers' defaults are these models' own sizes."""
    config = KNOWN_CONFIGS[name]
    assert shape_of_known(name).params == real_parameters(config)
    assert shape_of_known(name) == shape_from_config({"model_type": config["model_type"]})


def test_vaultgemmas_scores_are_written_out_as_gemma_2s_are() -> None:
    assert writes_scores_out({"model_type": "vaultgemma"})
    assert writes_scores_out({"model_type": "vaultgemma", "attn_logit_softcapping": None})
