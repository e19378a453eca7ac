"""Readers of families with routed experts, beside the ones in `families`: a configuration to a `ModelShape` each."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, NotCoveredError, common_sizes, dense_at, listed, number
from trainyard.planner.family_parts import (
    EXPERT_NAMES,
    LLAMA_LIKE,
    LOCAL_EXPERT_NAMES,
    first_dense,
    four_biases,
    latents,
    listed_windows,
    must_fill_hidden,
    one_per_layer,
    patterned_windows,
    routed,
    window_of,
    windows,
)
from trainyard.planner.shapes import ModelShape

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
        **routed(config, width=expert, experts=128, per_token=8),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm_per_head=bool(config.get("use_qk_norm", False)),
        shared_ffn=expert * number(config, 1, "n_shared_experts"),
        dense_layers=first_dense(config, 1, sizes["layers"]),
        wide_router=True,
        copies_attention=True,
        wide_weights=True,
        sigmoid_weights=True,
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
        **routed(config, width=expert, experts=128, per_token=8),
        qkv_bias=bool(config.get("attention_bias", False)),
        shared_ffn=expert * number(config, 1, "n_shared_experts"),
        wide_router=True,
        wide_weights=True,
        sigmoid_weights=True,
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
        **routed(config, width=sizes["ffn"], experts=256, per_token=8, experts_names=LOCAL_EXPERT_NAMES),
        qk_norm_whole=True,
        copies_attention=True,
        wide_weights=True,
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
        **four_biases(config),
        **routed(config, width=expert, experts=None, per_token=None),
        **_dots1_windows(config, sizes["layers"]),
        qk_norm_per_head=True,
        shared_ffn=expert * number(config, None, "n_shared_experts"),
        dense_layers=first_dense(config, 0, sizes["layers"]),
        wide_router=True,
        wide_weights=True,
        sigmoid_weights=True,
    )


def _dots1_windows(config: Config, layers: int) -> dict[str, Any]:
    """Of layers as listed, else from max_window_layers on."""
    first = number(config, 62, "max_window_layers")
    return listed_windows(config, layers, window_of(config, 4096), unlisted=lambda: max(layers - first, 0))


OLMOE_DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "intermediate_size": 2048,
    "vocab_size": 50304,
}


def _olmoe(config: Config) -> ModelShape:
    """Its norms of queries and keys are as wide as hidden_size, so that its heads have to be too."""
    sizes = common_sizes(config, {**OLMOE_DEFAULTS, "num_key_value_heads": 16})
    must_fill_hidden(sizes, "olmoe")
    return ModelShape(
        **sizes,
        **four_biases(config),
        **routed(config, width=sizes["ffn"], experts=64, per_token=8, experts_names=EXPERT_NAMES),
        qk_norm_whole=True,
        clips_qkv=config.get("clip_qkv") is not None,
    )


def _flex_olmo(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_LIKE, "vocab_size": 100352})
    return ModelShape(
        **sizes,
        **four_biases(config),
        **routed(config, width=sizes["ffn"], experts=7, per_token=5, experts_names=EXPERT_NAMES),
        norm="rms_wide",
        qk_norm_whole=True,
    )


def _granitemoe(config: Config) -> ModelShape:
    sizes = common_sizes(config, LLAMA_LIKE)
    return ModelShape(
        **sizes,
        **four_biases(config),
        **routed(config, width=sizes["ffn"], experts=8, per_token=2, experts_names=("num_local_experts",)),
        logits="scaled",
        weights_as_read=True,
    )


def _granitemoeshared(config: Config) -> ModelShape:
    """Granite's experts and one that every token passes; of width 0, as by default, it isn't made."""
    shared = number(config, 0, "shared_intermediate_size")
    return replace(_granitemoe(config), shared_ffn=shared, keeps_activated_gate=True)


PHIMOE_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 6400,
    "vocab_size": 32064,
}


def _phimoe(config: Config) -> ModelShape:
    """Its router takes two experts, whatever the configuration says."""
    sizes = common_sizes(config, PHIMOE_DEFAULTS)
    two = {**config, "num_experts_per_tok": 2}
    return ModelShape(
        **sizes,
        **four_biases(config),
        **routed(two, width=sizes["ffn"], experts=16, per_token=2, experts_names=("num_local_experts",)),
        **windows(window_of(config), sizes["layers"]),
        norm="layer",
        head_bias=bool(config.get("lm_head_bias", False)),
    )


def _one_for_all(config: Config, default: int, *names: str) -> int:
    """A number that a configuration may also state layer by layer, if it is the same in all."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    found = config.get(name)
    if not isinstance(found, list | tuple):
        return number(config, default, name)
    if not found:
        raise InputError(f"model.config.{name}: must have one entry for each layer (given: 0)")
    if len(set(map(str, found))) != 1:
        raise NotCoveredError(f"model.config.{name}: layers of different sizes are not covered (given: {found!r})")
    return number({name: found[0]}, default, name)


def _hunyuan_v1_moe(config: Config) -> ModelShape:
    """Every layer has experts and one shared expert, all as wide as intermediate_size."""
    sizes = common_sizes(config, {**LLAMA_LIKE, "vocab_size": 290943})
    sizes["head_dim"] = number(config, None, "head_dim")  # transformers has no default that it could use
    return ModelShape(
        **sizes,
        **four_biases(config),
        qk_norm_per_head=True,
        experts=_one_for_all(config, 1, "num_local_experts", "num_experts"),
        experts_per_token=_one_for_all(config, 1, "num_experts_per_tok", "moe_topk"),
        moe_ffn=sizes["ffn"],
        shared_ffn=sizes["ffn"],
        shared_first=True,
    )


def dense_or_listed(config: Config, layers: int, *, dense: int) -> dict[str, Any]:
    """Layers without experts: as listed, else the first few."""
    kinds = listed(config, "mlp_layer_types")
    if kinds is None:
        return dense_at(range(min(dense, layers)))
    if len(kinds) != layers or set(map(str, kinds)) - {"dense", "sparse"}:
        raise InputError(
            f"model.config.mlp_layer_types: must be a list of dense and sparse, one for each of {layers} layers"
        )
    return dense_at(place for place, kind in enumerate(kinds) if kind == "dense")


def _exaone_moe(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_LIKE, "intermediate_size": 16384, "vocab_size": 102400})
    expert, dense = number(config, 1024, "moe_intermediate_size"), number(config, 1, "first_k_dense_replace")
    return ModelShape(
        **sizes,
        **routed(config, width=expert, experts=64, per_token=8, experts_names=("num_experts",)),
        **patterned_windows(config, sizes["layers"], every=4, pattern=("sliding_window_pattern",)),
        qk_norm_per_head=True,
        shared_ffn=expert * number(config, 1, "num_shared_experts"),
        **dense_or_listed(config, sizes["layers"], dense=dense),
        wide_router=True,
        wide_weights=True,
        sigmoid_weights=True,
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
    sizes = common_sizes({**config, "num_key_value_heads": None}, GLM4_MOE_LITE_DEFAULTS)
    expert = number(config, 1536, "moe_intermediate_size")
    # What others call a head's width is here the part of it that is rotated.
    rotated = number(config, 64, "head_dim", "qk_rope_head_dim")
    return ModelShape(
        **sizes
        | latents({**config, "qk_rope_head_dim": rotated}, query=768, key=192, value=256)
        | routed(config, width=expert, experts=64, per_token=4),
        shared_ffn=expert * number(config, 1, "n_shared_experts"),
        **dense_or_listed(config, sizes["layers"], dense=1),
        wide_router=True,
        wide_weights=True,
        sigmoid_weights=True,
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
    dense = [index for index in range(layers) if not (first <= index <= last and (index + 1) % step == 0)]
    return ModelShape(
        **sizes,
        experts=number(config, 64, "num_experts", "moe_num_experts"),
        experts_per_token=number(config, 6, "num_experts_per_tok", "moe_k"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, 2, "moe_num_shared_experts"),
        shared_first=True,
        **dense_at(dense),
        wide_router=True,
        weights_as_read=True,
        router_bias=True,
    )


AFMOE_DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "intermediate_size": 6144,
    "vocab_size": 200192,
    "head_dim": 128,
}


def _afmoe(config: Config) -> ModelShape:
    """Arcee's Trinity: attention's result has a gate, and each half of a layer a norm before and after it."""
    if config.get("attention_bias", False):
        raise NotCoveredError("model.config: an afmoe with attention_bias is not covered: of its gate there is none")
    sizes = common_sizes(config, AFMOE_DEFAULTS)
    expert = number(config, 1408, "moe_intermediate_size")
    every = ("global_attn_every_n_layers",)
    return ModelShape(
        **sizes,
        **routed(config, width=expert, experts=64, per_token=6, experts_names=("num_experts",)),
        **patterned_windows(config, sizes["layers"], every=4, pattern=every, window=1024),
        norm="rms_wide",
        qk_norm_per_head=True,
        attention_gate=True,
        norms_per_layer=4,
        shared_ffn=expert * number(config, 2, "num_shared_experts"),
        shared_first=True,
        dense_layers=min(number(config, 1, "num_dense_layers"), sizes["layers"]),
        router_bias=True,
        wide_weights=True,
    )


HY_V3_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "intermediate_size": 13312,
    "vocab_size": 120832,
    "head_dim": 128,
}


def _hy_v3(config: Config) -> ModelShape:
    """Hunyuan 3. Whatever first_k_dense_replace says, one layer is dense where none are listed."""
    if config.get("mlp_bias", False):
        raise NotCoveredError("model.config: a hy_v3 with mlp_bias is not covered: of its experts none has one")
    sizes = common_sizes(config, HY_V3_DEFAULTS)
    expert = number(config, 1536, "moe_intermediate_size")
    return ModelShape(
        **sizes,
        **four_biases(config),
        **routed(config, width=expert, experts=192, per_token=8, experts_names=EXPERT_NAMES),
        qk_norm_per_head=True,
        shared_ffn=expert * number(config, 1, "num_shared_experts"),
        **dense_or_listed(config, sizes["layers"], dense=1),
        wide_router=True,
        wide_weights=True,
        sigmoid_weights=True,
    )


COHERE2_MOE_DEFAULTS = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "intermediate_size": 22528,
    "vocab_size": 256000,
    "head_dim": 128,
}


def _cohere2_moe(config: Config) -> ModelShape:
    """Command's experts: one norm for attention and feed-forward block, which may be an RMS norm."""
    sizes = common_sizes({"tie_word_embeddings": True, **config}, COHERE2_MOE_DEFAULTS)
    layers: int = sizes["layers"]
    expert: int = sizes["ffn"]
    dense = min(number(config, 0, "first_k_dense_replace"), layers)

    def unlisted() -> int:
        first = max(number(config, 1, "prefix_dense_sliding_window_pattern"), 1)
        rest = max(number(config, 4, "sliding_window_pattern"), 1)
        return layers - dense // first - (layers - dense) // rest

    return ModelShape(
        **{**sizes, "ffn": number(config, expert, "prefix_dense_intermediate_size")},
        **four_biases(config),
        **routed(config, width=expert, experts=8, per_token=2, experts_names=("num_experts",)),
        **listed_windows(config, layers, window_of(config, 4096), unlisted=unlisted),
        norm="layer_written_out" if config.get("rms_norm_eps") is None else "rms",
        norms_per_layer=1,
        parallel_residual=True,
        logits="scaled",
        weights_as_read=True,
        shared_ffn=expert * number(config, 0, "num_shared_experts"),
        **dense_or_listed(config, layers, dense=dense),
    )


LLAMA4_DEFAULTS = {
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_hidden_layers": 48,
    "intermediate_size": 16384,
    "vocab_size": 202048,
    "head_dim": 128,
}


def _llama4(config: Config) -> ModelShape:
    """Of transformers' code every expert computes every token, times its score, which is 0 where it was not chosen: so
    they are counted, in memory and time."""
    sizes = common_sizes({**config, "intermediate_size": config.get("intermediate_size_mlp")}, LLAMA4_DEFAULTS)
    layers, expert = sizes["layers"], number(config, 8192, "intermediate_size")
    experts = number(config, 16, "num_local_experts")
    with_experts = listed(config, "moe_layers")
    if with_experts is None:
        step = max(number(config, 1, "interleave_moe_layer_step"), 1)
        with_experts = list(range(step - 1, layers, step))
    dense = [index for index in range(layers) if index not in with_experts]
    if len(dense) < layers and not experts:
        # With none a shape is dense: nothing else would refuse it.
        raise InputError("model.config.num_local_experts: must be at least 1 (given: 0)")
    return ModelShape(
        **sizes,
        **four_biases(config),
        **_chunks(config, layers),
        normalizes_scores=bool(config.get("use_qk_norm", True)),
        keeps_activated_gate=True,
        # The model calls its base by another name than it has: the trainer finds no head that a loss could be in.
        logits="scaled",
        experts=experts,
        experts_per_token=experts,
        batches_experts=True,
        moe_ffn=expert,
        shared_ffn=expert,
        **dense_at(dense),
    )


def _chunks(config: Config, layers: int) -> dict[str, Any]:
    """Layers that see no further back than where their chunk begins: of half a chunk, the mean, as a window has all."""
    chunk = config.get("attention_chunk_size", 8192)
    size = 0 if chunk is None else number({"attention_chunk_size": chunk}, None, "attention_chunk_size")
    kinds = one_per_layer(config, "layer_types", layers)
    if kinds is not None:
        return windows(size // 2, kinds.count("chunked_attention"))
    # An empty list says nothing; of another transformers makes the types, one an entry.
    if config.get("no_rope_layers") and (rotated := one_per_layer(config, "no_rope_layers", layers)):
        return windows(size // 2, sum(bool(kind) for kind in rotated))
    return windows(size // 2, layers - layers // max(number(config, 4, "no_rope_layer_interval"), 1))


EXPERT_READERS: Mapping[str, Callable[[Config], ModelShape]] = {
    "afmoe": _afmoe,
    "cohere2_moe": _cohere2_moe,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _flex_olmo,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoeshared,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "hy_v3": _hy_v3,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "solar_open": _solar_open,
}
"""model_type to reader."""
