"""Readers of families with routed experts, beside the ones in `families`: a configuration to a `ModelShape` each."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, NotCoveredError, common_sizes, listed, number
from trainyard.planner.shapes import ModelShape


def _attention_biases(config: Config) -> dict[str, Any]:
    """Of families whose attention_bias speaks of all four projections."""
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias}


GLM4_MOE_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_hidden_layers": 46,
    "intermediate_size": 10944,
    "vocab_size": 151552,
}


def _glm4_moe(config: Config) -> ModelShape:
    """GLM-4.5 and its kin. The layer that predicts further tokens is not made by transformers."""
    sizes = common_sizes(config, GLM4_MOE_DEFAULTS)
    expert = number(config, 1408, "moe_intermediate_size")
    return ModelShape(
        **sizes,
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm_per_head=bool(config.get("use_qk_norm", False)),
        experts=number(config, 128, "n_routed_experts", "num_local_experts"),
        experts_per_token=number(config, 8, "num_experts_per_tok"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, 1, "n_shared_experts"),
        dense_layers=min(number(config, 1, "first_k_dense_replace"), sizes["layers"]),
        wide_router=True,
    )


SOLAR_OPEN_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 48,
    "intermediate_size": 0,
    "vocab_size": 196608,
    "head_dim": 128,
}


def _solar_open(config: Config) -> ModelShape:
    """GLM-4.5's kind without dense layers and norms of queries and keys."""
    expert = number(config, 1280, "moe_intermediate_size")
    return ModelShape(
        **common_sizes(config, SOLAR_OPEN_DEFAULTS),
        qkv_bias=bool(config.get("attention_bias", False)),
        experts=number(config, 128, "n_routed_experts", "num_local_experts"),
        experts_per_token=number(config, 8, "num_experts_per_tok"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, 1, "n_shared_experts"),
        wide_router=True,
    )


MINIMAX_M2_DEFAULTS = {
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_hidden_layers": 62,
    "intermediate_size": 1536,
    "vocab_size": 200064,
    "head_dim": 128,
}


def _minimax_m2(config: Config) -> ModelShape:
    sizes = common_sizes(config, MINIMAX_M2_DEFAULTS)
    return ModelShape(
        **sizes,
        qk_norm_whole=True,
        experts=number(config, 256, "num_local_experts", "num_experts"),
        experts_per_token=number(config, 8, "num_experts_per_tok"),
        moe_ffn=sizes["ffn"],
    )


DOTS1_DEFAULTS = {
    "hidden_size": 4608,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 62,
    "intermediate_size": 10944,
    "vocab_size": 152064,
}


def _dots1(config: Config) -> ModelShape:
    """dots.llm1. Its shared and routed experts have no default in transformers either."""
    sizes = common_sizes(config, DOTS1_DEFAULTS)
    expert = number(config, 1408, "moe_intermediate_size")
    return ModelShape(
        **sizes,
        **_attention_biases(config),
        qk_norm_per_head=True,
        experts=number(config, None, "n_routed_experts", "num_local_experts"),
        experts_per_token=number(config, None, "num_experts_per_tok"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, None, "n_shared_experts"),
        dense_layers=min(number(config, 0, "first_k_dense_replace"), sizes["layers"]),
        wide_router=True,
    )


OLMOE_DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "intermediate_size": 2048,
    "vocab_size": 50304,
}


def _olmoe(config: Config) -> ModelShape:
    """Its heads are hidden_size / num_attention_heads wide whatever a configuration says."""
    sizes = common_sizes(config, {**OLMOE_DEFAULTS, "num_key_value_heads": 16})
    return ModelShape(
        **{**sizes, "head_dim": sizes["hidden"] // sizes["heads"]},
        **_attention_biases(config),
        qk_norm_whole=True,
        experts=number(config, 64, "num_experts", "num_local_experts"),
        experts_per_token=number(config, 8, "num_experts_per_tok"),
        moe_ffn=sizes["ffn"],
    )


LLAMA_LIKE_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def _flex_olmo(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_LIKE_DEFAULTS, "vocab_size": 100352})
    return ModelShape(
        **sizes,
        **_attention_biases(config),
        qk_norm_whole=True,
        experts=number(config, 7, "num_experts", "num_local_experts"),
        experts_per_token=number(config, 5, "num_experts_per_tok"),
        moe_ffn=sizes["ffn"],
    )


def _granitemoe(config: Config) -> ModelShape:
    sizes = common_sizes(config, LLAMA_LIKE_DEFAULTS)
    return ModelShape(
        **sizes,
        **_attention_biases(config),
        experts=number(config, 8, "num_local_experts"),
        experts_per_token=number(config, 2, "num_experts_per_tok"),
        moe_ffn=sizes["ffn"],
    )


def _granitemoeshared(config: Config) -> ModelShape:
    """Granite's experts and one that every token passes; of width 0, as by default, it isn't made."""
    return replace(_granitemoe(config), shared_ffn=number(config, 0, "shared_intermediate_size"))


PHIMOE_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 6400,
    "vocab_size": 32064,
}


def _phimoe(config: Config) -> ModelShape:
    sizes = common_sizes(config, PHIMOE_DEFAULTS)
    return ModelShape(
        **sizes,
        **_attention_biases(config),
        norm="layer",
        head_bias=bool(config.get("lm_head_bias", False)),
        experts=number(config, 16, "num_local_experts"),
        experts_per_token=number(config, 2, "num_experts_per_tok"),
        moe_ffn=sizes["ffn"],
    )


def _one_for_all(config: Config, default: int, name: str) -> int:
    """A number that a configuration may also state layer by layer, if it is the same in all."""
    found = config.get(name)
    if not isinstance(found, list | tuple):
        return number(config, default, name)
    if len(set(map(str, found))) != 1:
        raise NotCoveredError(f"model.config.{name}: layers of different sizes are not covered (given: {found!r})")
    return number({name: found[0]}, default, name)


def _hunyuan_v1_moe(config: Config) -> ModelShape:
    """Every layer has experts and one shared expert, all as wide as intermediate_size."""
    sizes = common_sizes(config, {**LLAMA_LIKE_DEFAULTS, "vocab_size": 290943})
    sizes["head_dim"] = number(config, None, "head_dim")  # transformers has no default that it could use
    return ModelShape(
        **sizes,
        **_attention_biases(config),
        qk_norm_per_head=True,
        experts=_one_for_all(config, 1, "num_experts"),
        experts_per_token=_one_for_all(config, 1, "moe_topk"),
        moe_ffn=sizes["ffn"],
        shared_ffn=sizes["ffn"],
        shared_first=True,
    )


def _sparse_layers(config: Config, layers: int) -> int:
    """Of EXAONE's and GLM-4.7-Flash's layers those with experts: as listed, else all but the first few."""
    kinds = listed(config, "mlp_layer_types")
    if kinds is None:
        return max(layers - number(config, 1, "first_k_dense_replace"), 0)
    if len(kinds) != layers or set(map(str, kinds)) - {"dense", "sparse"}:
        raise InputError(
            f"model.config.mlp_layer_types: must be a list of dense and sparse, one for each of {layers} layers"
        )
    return kinds.count("sparse")


def _exaone_moe(config: Config) -> ModelShape:
    """Counted as if all layers saw all positions: of longer sequences it sees less, and is done sooner."""
    sizes = common_sizes(config, {**LLAMA_LIKE_DEFAULTS, "intermediate_size": 16384, "vocab_size": 102400})
    expert = number(config, 1024, "moe_intermediate_size")
    return ModelShape(
        **sizes,
        qk_norm_per_head=True,
        experts=number(config, 64, "num_experts", "num_local_experts"),
        experts_per_token=number(config, 8, "num_experts_per_tok"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, 1, "num_shared_experts"),
        dense_layers=sizes["layers"] - _sparse_layers(config, sizes["layers"]),
        wide_router=True,
    )


GLM4_MOE_LITE_DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 20,
    "num_hidden_layers": 47,
    "intermediate_size": 10240,
    "vocab_size": 154880,
}


def _glm4_moe_lite(config: Config) -> ModelShape:
    """GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, in GLM's sizes.

    Where no layers are listed transformers makes the first one dense, whatever first_k_dense_replace says.
    """
    if config.get("attention_bias", False):
        raise NotCoveredError("model.config: a glm4_moe_lite with attention_bias is not covered: latents have no bias")
    sizes = common_sizes({**config, "num_key_value_heads": None}, GLM4_MOE_LITE_DEFAULTS)
    expert = number(config, 1536, "moe_intermediate_size")
    key, value = number(config, 192, "qk_nope_head_dim"), number(config, 256, "v_head_dim")
    if value < 1:
        raise InputError(f"model.config.v_head_dim: must be at least 1 (given: {value})")
    return ModelShape(
        **{**sizes, "head_dim": key},
        value_head_dim=0 if value == key else value,
        experts=number(config, 64, "n_routed_experts", "num_local_experts"),
        experts_per_token=number(config, 4, "num_experts_per_tok"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, 1, "n_shared_experts"),
        dense_layers=sizes["layers"] - _sparse_layers({**config, "first_k_dense_replace": 1}, sizes["layers"]),
        q_lora_rank=0 if config.get("q_lora_rank", 768) is None else number(config, 768, "q_lora_rank"),
        kv_lora_rank=number(config, 512, "kv_lora_rank"),
        rope_dim=number(config, 64, "qk_rope_head_dim"),
        wide_router=True,
    )


ERNIE_DEFAULTS = {
    "hidden_size": 2560,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "intermediate_size": 12288,
    "vocab_size": 103424,
}


def _ernie4_5_moe(config: Config) -> ModelShape:
    if config.get("use_bias", False):
        raise NotCoveredError("model.config: an ernie4_5_moe with use_bias is not covered: of its experts none has one")
    sizes = common_sizes({"tie_word_embeddings": True, **config}, ERNIE_DEFAULTS)
    layers, expert = sizes["layers"], number(config, 1536, "moe_intermediate_size")
    first = number(config, 1, "moe_layer_start_index")
    # -1 is the last layer.
    is_last = config.get("moe_layer_end_index", -1) == -1
    last = layers - 1 if is_last else number(config, layers - 1, "moe_layer_end_index")
    step = max(number(config, 1, "moe_layer_interval"), 1)
    routed = sum(first <= index <= last and (index + 1) % step == 0 for index in range(layers))
    return ModelShape(
        **sizes,
        experts=number(config, 64, "moe_num_experts", "num_experts", "num_local_experts"),
        experts_per_token=number(config, 6, "moe_k", "num_experts_per_tok"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, 2, "moe_num_shared_experts"),
        shared_first=True,
        dense_layers=layers - routed,
        wide_router=True,
        router_bias=True,
    )


EXPERT_READERS: Mapping[str, Callable[[Config], ModelShape]] = {
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _flex_olmo,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoeshared,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "minimax_m2": _minimax_m2,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "solar_open": _solar_open,
}
"""model_type to reader."""
