"""Parameter counts equal those of the real models, built on the meta device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner.delta_families import DELTA_READERS
from trainyard.planner.dense_families import DENSE_READERS
from trainyard.planner.expert_families import EXPERT_READERS
from trainyard.planner.families import (
    FAMILIES,
    checked,
    known_name,
    shape_from_config,
    shape_from_source,
    shape_of_known,
)
from trainyard.planner.kindred_families import KINDRED_READERS
from trainyard.planner.known_models import KNOWN_CONFIGS
from trainyard.planner.older_families import OLDER_READERS
from trainyard.planner.sparse_families import SPARSE_READERS
from trainyard.planner.wide_families import WIDE_READERS

Counted = Callable[[dict[str, Any]], int]

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2},
    "llama-biased": {"model_type": "llama", "hidden_size": 64, "attention_bias": True, "mlp_bias": True},
    "mistral": {"hidden_size": 64, "intermediate_size": 160, "head_dim": 24},
    "qwen2": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "num_hidden_layers": 3},
    "mixtral": {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5, "num_hidden_layers": 2},
    "qwen3_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 6, "decoder_sparse_step": 2},
    "gemma": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500},
    "gemma2": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500},
    "phi3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "deepseek_v2": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_experts_per_tok": 3},
    "deepseek_v3": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
    },
    "wide-values": {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "n_routed_experts": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 40,
    },
    "values-by-default": {
        "model_type": "deepseek_v2",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 3,
        "qk_nope_head_dim": 32,
    },
    "gpt_oss": {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "num_local_experts": 6},
    "nemotron_h": {"hidden_size": 64, "hybrid_override_pattern": "ME*M-M", "moe_latent_size": 16, "n_groups": 2},
    "hybrid-in-words": {
        "model_type": "nemotron_h",
        "hidden_size": 64,
        "layers_block_type": ["mamba", "moe", "attention", "linear_attention", "mlp", "full_attention"],
        "hybrid_override_pattern": "M",
    },
    "hybrid-of-layer-types": {
        "model_type": "nemotron_h",
        "hidden_size": 64,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "hybrid-by-default": {"model_type": "nemotron_h", "hidden_size": 64},
}


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    config = {"model_type": name, **SMALL[name]}
    assert shape_from_config(config).params == real_parameters(config)


def test_every_family_is_among_the_small_models() -> None:
    assert {config.get("model_type", name) for name, config in SMALL.items()} == set(FAMILIES) - {
        *DELTA_READERS,
        *DENSE_READERS,
        *EXPERT_READERS,
        *KINDRED_READERS,
        *OLDER_READERS,
        *SPARSE_READERS,
        *WIDE_READERS,
    }


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "llama-3.2-1b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-30b-a3b", "gpt2-xl", "gpt-neox-20b"]
)
def test_known_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    assert shape_of_known(name).params == real_parameters(KNOWN_CONFIGS[name])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("mixtral-8x22b", 140.630),
        ("qwen3-235b-a22b", 235.094),
        ("deepseek-v3", 671.026),
        ("kimi-k2", 1026.408),
        ("gpt-oss-120b", 116.829),
        ("nemotron-3-nano", 31.578),
        ("mistral-nemo", 12.248),
        ("mistral-small-24b", 23.572),
        ("phi-4", 14.660),
        ("yi-34b", 34.389),
        ("codellama-34b", 33.744),
        ("deepseek-v2-lite", 15.706),
    ],
)
def test_published_sizes(name: str, billions: float) -> None:
    assert shape_of_known(name).params / 1e9 == pytest.approx(billions, abs=1e-3)


def test_active_parameters_of_experts() -> None:
    assert shape_of_known("mixtral-8x7b").active_params / 1e9 == pytest.approx(12.88, abs=0.01)
    assert shape_of_known("llama-2-7b").active_params == shape_of_known("llama-2-7b").params


def test_of_layers_that_predict_further_tokens_a_token_uses_its_own_experts_too() -> None:
    """As many active parameters as one of the model's own, and its projection."""
    shape = shape_of_known("deepseek-v3")
    further = dataclasses.replace(shape, mtp_layers=1)
    layer = dataclasses.replace(shape, layers=shape.layers + 1)
    projection = 2 * shape.hidden**2 + 2 * shape.hidden
    assert further.params - shape.params == layer.params - shape.params + projection
    assert further.active_params - shape.active_params == layer.active_params - shape.active_params + projection
    assert further.active_params / 1e9 == pytest.approx(38.3, abs=0.1)
    none_routed = dataclasses.replace(shape, mtp_layers=1, dense_layers=shape.layers)
    assert none_routed.active_params == none_routed.params


def test_scores_cost_as_much_as_keys_and_values_are_wide() -> None:
    shape = shape_of_known("deepseek-v3")
    assert shape.score_dim == 128 * (128 + 64 + 128) / 2
    assert dataclasses.replace(shape, value_head_dim=256).score_dim == 128 * (128 + 64 + 256) / 2


def test_flops_per_token_by_hand() -> None:
    shape = shape_of_known("llama-2-7b")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096 + 32000 * 4096
    assert shape.flops_per_token(2048) == 6 * weights + 12 * 32 * 4096 * 2048
    # Under an adapter: no gradients of weights, but those of scores, which have none.
    assert shape.flops_per_token(2048, is_frozen=True) == 4 * weights + 12 * 32 * 4096 * 2048


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("s3://models/Meta_Llama_3.1_70B/", "llama-3.1-70b"),
        ("fsx://models/llama-3.1-70b-sft-v2", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2-57B-A14B", "qwen2-57b-a14b"),
        ("s3://models/my-model", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek-r1-distill-llama-8b"),
        ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-v2-lite"),
        ("deepseek-ai/DeepSeek-V3-Lite", None),
        ("nvidia/GPT2-8B", None),
        ("s3://models/llama-2-7b-moe-8x", None),
        ("nvidia/Nemotron_3_Nano_30B", "nemotron-3-nano-30b"),
        ("google/gemma-7b-it", "gemma-7b"),
        ("microsoft/phi-4-reasoning-plus", "phi-4"),
        ("microsoft/Phi-4-multimodal-instruct", None),
        ("our/Llama-3.1-8B-Vision", None),
        ("Qwen/Qwen2.5-7B-Omni", None),
    ],
)
def test_known_models_in_paths(source: str, name: str | None) -> None:
    assert known_name(source) == name


def test_a_folder_with_a_config_is_read(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}')
    assert shape_from_source(str(tmp_path)).layers == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "layers must be at least 1"),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size: must be a whole number"),
        ({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 5}, "5 key/value heads must divide"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "experts per token must be 1 to 8"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 5}, r"mlp_only_layers: must be a list \(given: 5\)"),
        ({"model_type": "deepseek_v3", "v_head_dim": 0}, r"v_head_dim: must be at least 1 \(given: 0\)"),
        ({"model_type": "nemotron_h", "layers_block_type": "mamba"}, "layers_block_type: must be a list"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "gru"]}, "must be a list of mamba, .*mlp"),
        ({"model_type": "nemotron_h", "layers_block_type": [["mamba"]]}, "must be a list of mamba"),
        ({"model_type": "nemotron_h", "layers_block_type": []}, "must be a list of mamba"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "must be a text of M, "),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": 5}, "must be a text of M, "),
    ],
)
def test_impossible_models_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        shape_from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"model_type": "llama", "hidden_size": "big"}', "hidden_size: must be a whole number"),
        ('{"model_type": "llama", "num_attention_heads": 7}', "7 heads don't divide"),
        ("{}", "model_type: is missing"),
    ],
)
def test_what_is_wrong_with_a_folders_config_names_the_file(tmp_path: Any, config: str, words: str) -> None:
    """The job states no model.config, of which the line spoke."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match=f"^model.source {tmp_path}: config.json: {words}"):
        shape_from_source(str(tmp_path))


def test_no_more_layers_than_there_are_see_a_window() -> None:
    shape = dataclasses.replace(shape_of_known("llama-2-7b"), attention_window=4096, windowed_layers=33)
    with pytest.raises(InputError, match=r"windowed_layers must be at most the model's 32 layers \(given: 33\)"):
        checked(shape)


def test_a_config_that_nobody_can_read_is_one_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    for content, words in (
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must be a JSON object"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"config.json: {words}") as caught:
            shape_from_source(str(tmp_path))
        assert "\n" not in str(caught.value)

    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("pathlib.Path.read_text", refused)
    with pytest.raises(InputError, match=r"config.json: can't be read \(Permission denied\)"):
        shape_from_source(str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 33, "num_key_value_heads": 3},
        {"model_type": "gpt2", "n_embd": 100, "n_head": 3},
        {"model_type": "qwen2", "hidden_size": 100, "num_attention_heads": 3, "num_key_value_heads": 3},
    ],
)
def test_heads_that_can_not_share_the_hidden_size_are_refused(config: dict[str, Any]) -> None:
    """transformers refuses most of them, and of the others the first forward pass fails, on rented machines."""
    with pytest.raises(InputError, match=r"heads don't divide a hidden size of \d+; .* state head_dim"):
        shape_from_config(config)
    if config["model_type"] != "gpt2":
        assert shape_from_config({**config, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts", "num_experts_per_tok", "vocab_size"])
@pytest.mark.parametrize("value", [10**10, 10**300])
def test_a_size_beyond_all_reason_is_refused_at_once(name: str, value: int) -> None:
    """Layers and experts are counted one by one: such a number would be counted for hours."""
    with pytest.raises(InputError, match=rf"model.config.{name}: must be a whole number of at most") as caught:
        shape_from_config({**KNOWN_CONFIGS["qwen3-30b-a3b"], name: value})
    assert len(str(caught.value)) <= 200


@pytest.mark.parametrize("value", [{"a": 1}, ["silu"], 3])
def test_an_activation_that_is_no_text_is_one_line(value: object) -> None:
    with pytest.raises(InputError, match=r"model.config.hidden_act: must be a text, e.g. silu"):
        shape_from_config({**KNOWN_CONFIGS["llama-3.1-8b"], "hidden_act": value})
