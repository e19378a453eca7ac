"""Families of ordinary layers that have readers of their own: parameter counts equal those of the real models."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig

from trainyard.errors import InputError
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.dense_families import DENSE_READERS
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.known_models import KNOWN_CONFIGS

Counted = Callable[[dict[str, Any]], int]

NARROW = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
NARROW |= {"vocab_size": 500, "pad_token_id": 0, "num_hidden_layers": 5}
BIASED = {"attention_bias": True}
WIDE = {"head_dim": 24}

SMALL: dict[str, dict[str, Any]] = {
    "arcee": {"head_dim": 16},
    "arcee-biased": BIASED | {"mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    "cohere": {},
    "cohere-biased": BIASED | {"tie_word_embeddings": False},
    "cohere2": WIDE,
    "cohere2-biased": BIASED | WIDE | {"tie_word_embeddings": False},
    "ernie4_5": WIDE,
    "ernie4_5-biased": WIDE | {"use_bias": True, "tie_word_embeddings": False},
    "exaone4": WIDE,
    "exaone4-tied": {"tie_word_embeddings": True, "sliding_window": None, "layer_types": ["full_attention"] * 5},
    "gemma3_text": WIDE,
    "gemma3_text-biased": WIDE | BIASED | {"tie_word_embeddings": False},
    "glm": WIDE,
    "glm-plain": WIDE | {"attention_bias": False, "tie_word_embeddings": True},
    "glm4": WIDE,
    "glm4-plain": WIDE | {"attention_bias": False},
    "granite": {},
    "granite-biased": BIASED | {"mlp_bias": True, "tie_word_embeddings": True},
    "helium": {"head_dim": 16},
    "helium-biased": BIASED | {"head_dim": 16} | {"mlp_bias": True},
    "hunyuan_v1_dense": WIDE,
    "hunyuan_v1_dense-biased": WIDE | BIASED,
    "ministral": WIDE,
    "ministral-tied": WIDE | {"tie_word_embeddings": True},
    "ministral3": WIDE,
    "nemotron": WIDE,
    "nemotron-biased": WIDE | BIASED | {"mlp_bias": True, "tie_word_embeddings": True},
    "olmo": {},
    "olmo-biased": BIASED | {"tie_word_embeddings": True},
    "olmo2": {},
    "olmo2-biased": BIASED,
    "olmo3": {},
    "olmo3-biased": BIASED,
    "phi": {},
    "seed_oss": WIDE,
    "seed_oss-biased": WIDE | {"attention_out_bias": True, "mlp_bias": True},
    "smollm3": {},
    "smollm3-biased": BIASED | {"mlp_bias": True, "tie_word_embeddings": False},
    "stablelm": {},
    "stablelm-parallel": {"use_parallel_residual": True, "use_qkv_bias": True},
    "starcoder2": {},
    "starcoder2-plain": {"use_bias": False, "tie_word_embeddings": False},
}


def _small(name: str) -> dict[str, Any]:
    return {"model_type": name.partition("-")[0], **NARROW, **SMALL[name]}


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    config = _small(name)
    assert shape_from_config(config).params == real_parameters(config)


def test_every_family_is_among_the_small_models() -> None:
    assert {name.partition("-")[0] for name in SMALL} == set(DENSE_READERS)


NO_DEFAULTS = {"hunyuan_v1_dense": "head_dim", "nemotron": "num_key_value_heads"}
"""What transformers asks for, as it has no default that it could use."""


@pytest.mark.parametrize("model_type", sorted(set(DENSE_READERS) - set(NO_DEFAULTS)))
def test_what_a_configuration_leaves_out_is_as_in_transformers(model_type: str, real_parameters: Counted) -> None:
    config = {"model_type": model_type}
    whole = config | ({"head_dim": 128} if model_type == "ministral" else {})
    shape = shape_from_config(whole)
    assert shape.params == real_parameters(whole)
    real = AutoConfig.for_model(model_type)
    kinds = getattr(real, "layer_types", None) or []
    assert shape.windowed_layers == kinds.count("sliding_attention")
    assert shape.attention_window == (real.sliding_window if shape.windowed_layers else 0)


PUBLISHED = {
    **{"gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952, "olmo-2-7b": 7_298_617_344},
    **{"olmo-2-13b": 13_716_198_400, "smollm3-3b": 3_075_098_624, "granite-3.1-2b": 2_533_531_648},
    **{"granite-3.1-8b": 8_170_848_256, "command-r7b": 8_028_033_024, "starcoder2-3b": 3_030_371_328},
    **{"starcoder2-7b": 7_173_923_840, "starcoder2-15b": 15_957_889_024},
}
"""Parameters that the models' pages on Hugging Face show, by their files' headers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_the_parameters_of_their_files(name: str, real_parameters: Counted) -> None:
    shape = shape_of_known(name)
    assert shape.params == PUBLISHED[name] == real_parameters(KNOWN_CONFIGS[name])


def test_windows_count_by_the_layers_that_have_them() -> None:
    config = {"model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 512}
    shape = shape_from_config(config)
    assert (shape.windowed_layers, shape.attention_window) == (10, 512)
    assert shape.mean_span(8192) == pytest.approx((10 * 1024 + 2 * 8192) / 12)
    assert shape.mean_span(512) == 512
    kinds = ["full_attention", *["sliding_attention"] * 11]
    assert shape_from_config(config | {"layer_types": kinds}).windowed_layers == 11
    assert shape_from_config(config | {"sliding_window_pattern": 3}).windowed_layers == 8


def test_of_a_list_for_more_layers_the_first_entries_count() -> None:
    """A model cut down to fewer layers, as transformers reads it."""
    rotated = [1, 1, 1, 0, 1, 0, 1, 1, *[0] * 28]
    stated = {"num_hidden_layers": 8, "no_rope_layers": rotated, "use_sliding_window": True, "sliding_window": 96}
    real = AutoConfig.for_model("smollm3", **stated)
    shape = shape_from_config({"model_type": "smollm3", **stated})
    assert shape.windowed_layers == real.layer_types.count("sliding_attention") == 2
    assert shape.mean_span(8192) == pytest.approx((2 * 192 + 6 * 8192) / 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nemotron"}, "model.config: num_key_value_heads is missing"),
        ({"model_type": "hunyuan_v1_dense"}, "model.config: head_dim is missing"),
        (
            {"model_type": "helium", "head_dim": 100},
            r"must be as wide together as hidden_size, 2560 \(given: 20 of 100\)",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, r"at least one entry for each of 36 layers \(given: 2\)"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"]}, "must have one entry for each of 32 layers"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shape_from_config(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "cohere", "use_qk_norm": True},
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        {"model_type": "phi", "qk_layernorm": True},
        {"model_type": "stablelm", "qk_layernorm": True},
    ],
)
def test_what_no_formula_describes_is_not_covered(config: dict[str, Any]) -> None:
    with pytest.raises(NotCoveredError):
        shape_from_config(config)
