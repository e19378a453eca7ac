"""Families before Llama's: parameter counts equal those of the real models."""

from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.known_models import KNOWN_CONFIGS
from trainyard.planner.older_families import LEARNED_POSITIONS, OLDER_READERS

Counted = Callable[[dict[str, Any]], int]

GPT = {"n_embd": 64, "n_head": 4, "n_layer": 5, "vocab_size": 500}
NARROW = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5, "vocab_size": 500}
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
LOCAL = {"attention_types": [[["global", "local"], 2], [["local"], 1]]}

SMALL: dict[str, dict[str, Any]] = {
    "bloom": NARROW,
    "bloom-older-names": {"n_embed": 32, "n_layer": 3, "n_head": 2, "vocab_size": 500, "tie_word_embeddings": False},
    "codegen": GPT | {"rotary_dim": 8},
    "codegen-tied": GPT | {"rotary_dim": 8, "n_inner": 100, "tie_word_embeddings": True},
    "falcon": NARROW | NEW,
    "falcon-biased": NARROW | NEW | {"bias": True, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
    "falcon-all-heads": NARROW | {"new_decoder_architecture": True, "ffn_hidden_size": 100},
    "falcon-older": NARROW | {"multi_query": False},
    "falcon-in-turn": NARROW | {"multi_query": False, "parallel_attn": False, "bias": True, "n_embed": 32},
    "gpt2": {"n_embd": 72, "n_head": 6, "n_layer": 3},
    "gpt2-wide": {"n_embd": 72, "n_head": 6, "n_layer": 3, "n_inner": 100, "n_positions": 77},
    "gpt2-twice": {"n_embd": 72, "n_head": 6, "n_positions": 77, "max_position_embeddings": 50},
    "gpt2-two-names": GPT | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt_bigcode": GPT,
    "gpt_bigcode-heads": GPT | {"multi_query": False, "n_inner": 100, "n_positions": 77},
    "gpt_neo": NARROW | LOCAL,
    "gpt_neo-own-names": {"num_heads": 4, "num_layers": 5, "hidden_size": 64, "intermediate_size": 100, **LOCAL},
    "gptj": GPT | {"rotary_dim": 8},
    "gptj-tied": NARROW | {"rotary_dim": 8, "tie_word_embeddings": True},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 5, "vocab_size": 500},
    "mpt-expanded": {"d_model": 64, "n_heads": 4, "n_layers": 5, "expansion_ratio": 2, "tie_word_embeddings": False},
    "opt": {"hidden_size": 64, "ffn_dim": 100, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    "opt-norms-after": NARROW | {"word_embed_proj_dim": 64, "do_layer_norm_before": False},
    "opt-without-last-norm": NARROW | {"word_embed_proj_dim": 64, "_remove_final_layer_norm": True},
    "opt-without-biases": NARROW | {"word_embed_proj_dim": 64, "enable_bias": False, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    config = {"model_type": name.partition("-")[0], **SMALL[name]}
    assert shape_from_config(config).params == real_parameters(config)


def test_every_family_is_among_the_small_models() -> None:
    assert {name.partition("-")[0] for name in SMALL} == set(OLDER_READERS)


@pytest.mark.parametrize("model_type", sorted(set(OLDER_READERS) - {"falcon"}))
def test_what_a_configuration_leaves_out_is_as_in_transformers(model_type: str, real_parameters: Counted) -> None:
    """A Falcon by default is a 7B, which is refused."""
    config = {"model_type": model_type}
    assert shape_from_config(config).params == real_parameters(config)


PUBLISHED = {
    **{"gpt-j-6b": 6_050_882_784, "gpt-neo-1.3b": 1_315_575_808, "bloom-560m": 559_214_592},
    **{"bloom-7b1": 7_069_016_064, "mpt-7b": 6_649_286_656, "falcon-40b": 41_303_293_952},
}
"""Parameters that the models' pages on Hugging Face show, by their files' headers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_the_parameters_of_their_files(name: str, real_parameters: Counted) -> None:
    assert shape_of_known(name).params == PUBLISHED[name] == real_parameters(KNOWN_CONFIGS[name])


def test_what_a_known_model_states_of_windows_is_no_default() -> None:
    """A Mistral that says nothing has a window of 4,096; the known ones have none."""
    assert shape_from_config({"model_type": "mistral"}).attention_window == 4096
    mistrals = [name for name, config in KNOWN_CONFIGS.items() if config["model_type"] == "mistral"]
    assert mistrals
    assert not any(shape_of_known(name).attention_window for name in mistrals)
    assert shape_of_known("starcoder2-7b").attention_window == 4096


def test_gpt_neos_local_layers_are_windows() -> None:
    shape = shape_from_config({"model_type": "gpt_neo", **NARROW, **LOCAL, "window_size": 128})
    assert (shape.windowed_layers, shape.attention_window) == (3, 128)
    assert shape_from_config({"model_type": "gpt_neo"}).windowed_layers == 12


@pytest.mark.parametrize("model_type", ["bloom", "falcon"])
def test_an_old_name_that_says_nothing_leaves_the_width_to_the_common_one(model_type: str) -> None:
    config = {"model_type": model_type, **NARROW, **NEW, "hidden_size": 1024}
    assert shape_from_config(config | {"n_embed": None}).hidden == 1024
    assert shape_from_config(config | {"n_embed": 512}).hidden == 512


@pytest.mark.parametrize("model_type", sorted(LEARNED_POSITIONS))
def test_tables_of_positions_are_as_long_as_by_default(model_type: str) -> None:
    from transformers import AutoConfig

    assert AutoConfig.for_model(model_type).max_position_embeddings == LEARNED_POSITIONS[model_type]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt_neo", **NARROW}, "must name a kind for each of 5 layers"),
        ({"model_type": "gpt_neo", "attention_types": ["local"]}, r"must be a list of \[kinds .*, how often\]"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], None]]}, r"how often\] \(given: .*None"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], -24]]}, r"how often\] \(given: .*-24"),
        ({"model_type": "gpt_neo", "attention_types": [[["near"], 24]]}, r"kinds \(global or local\)"),
        (
            {"model_type": "gpt_neo", "attention_types": [[["global"], 10**15]]},
            rf"a kind for each of 24 layers \(given: {10**15}\)",
        ),
        ({"model_type": "mpt", "attn_config": "flash"}, "attn_config: must be a mapping"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        shape_from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "falcon"},
        {"model_type": "falcon", "new_decoder_architecture": True, "alibi": True},
        {"model_type": "gpt2", "add_cross_attention": True},
        {"model_type": "opt", "layer_norm_elementwise_affine": False},
        {"model_type": "opt", "word_embed_proj_dim": 512},
    ],
)
def test_what_no_formula_describes_is_not_covered(config: dict[str, Any]) -> None:
    with pytest.raises(NotCoveredError):
        shape_from_config(config)
