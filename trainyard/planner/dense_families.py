"""Readers of families whose every layer has an ordinary feed-forward block, beside the ones in `families`: a
configuration to a `ModelShape` each."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, NotCoveredError, common_sizes, listed, number
from trainyard.planner.family_parts import (
    LLAMA_LIKE,
    activation_tensors,
    four_biases,
    listed_windows,
    must_fill_hidden,
    patterned_windows,
    window_of,
    windows,
    without_head_dim,
)
from trainyard.planner.shapes import ModelShape


def _gemma3(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 26,
        "intermediate_size": 9216,
        "vocab_size": 262208,
        "head_dim": 256,
    }
    if config.get("attn_logit_softcapping") is not None:
        raise NotCoveredError("model.config: a gemma3_text with attn_logit_softcapping is not covered")
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(
        **sizes,
        **four_biases(config),
        norm="rms_fp32",
        norms_per_layer=4,
        qk_norm_per_head=True,
        scales_words=True,
        logits="plain" if config.get("final_logit_softcapping") is None else "capped",
        **patterned_windows(config, sizes["layers"], every=6, pattern=("sliding_window_pattern",)),
    )


def _olmo(config: Config) -> ModelShape:
    """Its norms have no weights."""
    sizes = common_sizes(config, {**LLAMA_LIKE, "vocab_size": 50304})
    clips = config.get("clip_qkv") is not None
    return ModelShape(**sizes, **four_biases(config), norm="layer_fp32", clips_qkv=clips)


def _olmo2(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_LIKE, "vocab_size": 50304})
    return ModelShape(**sizes, **four_biases(config), norm="rms_wide", qk_norm_whole=True, norms_after=True)


def _olmo3(config: Config) -> ModelShape:
    shape = _olmo2(config)
    return replace(shape, **patterned_windows(config, shape.layers, every=4))


def _smollm3(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 36,
        "intermediate_size": 11008,
        "vocab_size": 128256,
    }
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(
        **sizes,
        **four_biases(config),
        mlp_bias=bool(config.get("mlp_bias", False)),
        **_smollm3_windows(config, sizes["layers"]),
    )


def _smollm3_windows(config: Config, layers: int) -> dict[str, Any]:
    """Where they are asked for, of the layers without rotation: as listed, else each fourth."""

    def unrotated() -> int:
        rotated = listed(config, "no_rope_layers")
        if rotated is not None:
            if len(rotated) < layers:
                raise InputError(
                    f"model.config.no_rope_layers: must have at least one entry for each of {layers} layers "
                    f"(given: {len(rotated)})"
                )
            # A model cut down to fewer layers still lists them all: transformers reads the first ones.
            return sum(not kind for kind in rotated[:layers])
        return layers // max(number(config, 4, "no_rope_layer_interval"), 1)

    window = window_of(config) if config.get("use_sliding_window", False) else 0
    return listed_windows(config, layers, window, unlisted=unrotated)


def _granite(config: Config) -> ModelShape:
    sizes = common_sizes(config, LLAMA_LIKE)
    mlp_bias = bool(config.get("mlp_bias", False))
    return ModelShape(**sizes, **four_biases(config), mlp_bias=mlp_bias, logits="scaled")


GLM_DEFAULTS: Mapping[str, int] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "num_hidden_layers": 40,
    "intermediate_size": 13696,
    "vocab_size": 151552,
    "head_dim": 128,
}


def _glm(config: Config) -> ModelShape:
    """GLM-4 as published in 2024 (`glm`) and with two more norms (`glm4`); its output projection has no bias."""
    return ModelShape(
        **common_sizes(config, GLM_DEFAULTS),
        qkv_bias=bool(config.get("attention_bias", True)),
        norms_per_layer=4 if config.get("model_type") == "glm4" else 2,
        copies_attention=True,
        keeps_activated_gate=True,
        whole_gate_up=True,
    )


COHERE_DEFAULTS: Mapping[str, int] = {
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "intermediate_size": 22528,
    "vocab_size": 256000,
}


def _cohere(config: Config) -> ModelShape:
    """Command R: attention and feed-forward block read one norm, which has no bias."""
    sizes = common_sizes({"tie_word_embeddings": True, **config}, COHERE_DEFAULTS)
    if config.get("use_qk_norm", False):
        raise NotCoveredError("model.config: a cohere with use_qk_norm is not covered: its norms differ head by head")
    return ModelShape(
        **sizes,
        **four_biases(config),
        norm="layer_written_out",
        norms_per_layer=1,
        parallel_residual=True,
        logits="scaled",
    )


def _cohere2(config: Config) -> ModelShape:
    sizes = common_sizes({"tie_word_embeddings": True, **config}, COHERE_DEFAULTS)
    return ModelShape(
        **sizes,
        **four_biases(config),
        norm="layer_written_out",
        norms_per_layer=1,
        parallel_residual=True,
        logits="scaled",
        **patterned_windows(
            config, sizes["layers"], every=4, pattern=("sliding_window_pattern", "_sliding_window_pattern")
        ),
    )


def _phi(config: Config) -> ModelShape:
    if config.get("qk_layernorm", False):
        raise NotCoveredError("model.config: a phi with qk_layernorm is not covered")
    defaults = {**LLAMA_LIKE, "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192}
    return ModelShape(
        **common_sizes(config, {**defaults, "vocab_size": 51200}),
        gated_mlp=False,
        copies_attention=True,
        norm="layer",
        norms_per_layer=1,
        parallel_residual=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        dropout=bool(config.get("resid_pdrop", 0.0)),
        activation_tensors=activation_tensors(config.get("hidden_act", "gelu_new")),
    )


def _starcoder2(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "num_hidden_layers": 30,
        "intermediate_size": 12288,
        "vocab_size": 49152,
    }
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(
        **sizes,
        **four_biases(config, default=True, name="use_bias"),
        **windows(window_of(config), sizes["layers"]),
        gated_mlp=False,
        norm="layer",
        mlp_bias=bool(config.get("use_bias", True)),
        dropout=bool(config.get("residual_dropout", 0.0)),
        activation_tensors=activation_tensors(config.get("hidden_act", "gelu_pytorch_tanh")),
    )


def _stablelm(config: Config) -> ModelShape:
    if config.get("qk_layernorm", False):
        raise NotCoveredError("model.config: a stablelm with qk_layernorm is not covered: its norms differ by head")
    is_parallel = bool(config.get("use_parallel_residual", False))
    defaults = {**LLAMA_LIKE, "hidden_size": 2560, "intermediate_size": 6912, "vocab_size": 50304}
    return ModelShape(
        **common_sizes(without_head_dim(config), defaults),
        copies_attention=True,
        norm="layer",
        norms_per_layer=1 if is_parallel else 2,
        parallel_residual=is_parallel,
        qkv_bias=bool(config.get("use_qkv_bias", False)),
    )


def _seed_oss(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 4096,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "num_hidden_layers": 64,
        "intermediate_size": 27648,
        "vocab_size": 155136,
        "head_dim": 128,
    }
    return ModelShape(
        **common_sizes(config, defaults),
        qkv_bias=bool(config.get("attention_bias", True)),
        output_bias=bool(config.get("attention_out_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        dropout=bool(config.get("residual_dropout", 0.1)),
        keeps_activated_gate=True,
    )


def _exaone4(config: Config) -> ModelShape:
    defaults = {**LLAMA_LIKE, "intermediate_size": 16384, "vocab_size": 102400}
    sizes = common_sizes(config, defaults)
    seen = patterned_windows(config, sizes["layers"], every=4, pattern=("sliding_window_pattern",))
    return ModelShape(**sizes, qk_norm_per_head=True, norms_after=True, **seen)


def _ernie4_5(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 18,
        "intermediate_size": 3072,
        "vocab_size": 103424,
        "head_dim": 128,
    }
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    bias = bool(config.get("use_bias", False))
    return ModelShape(**sizes, **four_biases(config, name="use_bias"), mlp_bias=bias)


def _arcee(config: Config) -> ModelShape:
    defaults = {**LLAMA_LIKE, "hidden_size": 2560, "intermediate_size": 18432}
    return ModelShape(
        **common_sizes(config, defaults),
        **four_biases(config),
        gated_mlp=False,
        mlp_bias=bool(config.get("mlp_bias", False)),
        activation_tensors=activation_tensors(config.get("hidden_act", "relu2")),
    )


def _nemotron(config: Config) -> ModelShape:
    """Nemotron-4 and Minitron; transformers has no default of its key and value heads that it could use."""
    defaults = {
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "num_hidden_layers": 32,
        "intermediate_size": 24576,
        "vocab_size": 256000,
    }
    sizes = common_sizes(config, defaults)
    if config.get("num_key_value_heads") is None:
        raise InputError("model.config: num_key_value_heads is missing")
    return ModelShape(
        **sizes,
        **four_biases(config),
        gated_mlp=False,
        copies_attention=True,
        norm="layer",
        mlp_bias=bool(config.get("mlp_bias", False)),
        activation_tensors=activation_tensors(config.get("hidden_act", "relu2")),
    )


def _helium(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 2560,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "num_hidden_layers": 24,
        "intermediate_size": 7040,
        "vocab_size": 48000,
        "head_dim": 128,
    }
    sizes = common_sizes(config, defaults)
    must_fill_hidden(sizes, "helium")
    return ModelShape(
        **sizes,
        norm="rms_wide",
        qkv_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _ministral(config: Config) -> ModelShape:
    """`ministral` sees a window in every layer, or in those listed; `ministral3` where its configuration states one."""
    is_third = config.get("model_type") == "ministral3"
    defaults = {**LLAMA_LIKE, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": 128}
    if is_third:
        defaults |= {"num_hidden_layers": 34, "vocab_size": 131072}
    sizes = common_sizes(config, defaults)
    layers = sizes["layers"]
    seen = windows(window_of(config), layers) if is_third else patterned_windows(config, layers, every=0)
    return ModelShape(**sizes, **seen)


def _hunyuan_dense(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_LIKE, "vocab_size": 290943})
    sizes["head_dim"] = number(config, None, "head_dim")  # transformers has no default that it could use
    return ModelShape(**sizes, **four_biases(config), qk_norm_per_head=True)


DENSE_READERS: Mapping[str, Callable[[Config], ModelShape]] = {
    "arcee": _arcee,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm,
    "granite": _granite,
    "helium": _helium,
    "hunyuan_v1_dense": _hunyuan_dense,
    "ministral": _ministral,
    "ministral3": _ministral,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi": _phi,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
"""model_type to reader."""
