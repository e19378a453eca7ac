"""Families that are a known one's, word for word, but for sizes or one change in a layer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainyard.planner.config_values import Config, common_sizes
from trainyard.planner.family_parts import (
    LLAMA_LIKE,
    activation_tensors,
    four_biases,
    latents,
    listed_windows,
    patterned_windows,
    window_of,
)
from trainyard.planner.shapes import ModelShape


def _sizes(hidden: int, ffn: int, layers: int, heads: int, vocab: int, **others: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        **others,
    }


INTERNLM3 = _sizes(4096, 10240, 48, 32, 128512, num_key_value_heads=2, head_dim=128)
IQUEST_CODER = _sizes(5120, 27648, 80, 40, 76800, num_key_value_heads=8, head_dim=128)


def _of_llamas_layers(config: Config, defaults: Mapping[str, int]) -> ModelShape:
    return ModelShape(
        **common_sizes(config, defaults), **four_biases(config), mlp_bias=bool(config.get("mlp_bias", False))
    )


def _internlm3(config: Config) -> ModelShape:
    """Its own names for biases are Llama's two, which have to be the same."""
    alike = {
        name: config[own]
        for name, own in (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))
        if config.get(own) is not None
    }
    return _of_llamas_layers({**config, **alike}, INTERNLM3)


def _iquest_coder(config: Config) -> ModelShape:
    return _of_llamas_layers(config, IQUEST_CODER)


def _cwm(config: Config) -> ModelShape:
    """Llama's layers, three of four with a window; attention has no biases."""
    defaults = _sizes(6144, 21504, 64, 48, 128256, num_key_value_heads=8, head_dim=128)
    sizes = common_sizes(config, defaults)
    layers = sizes["layers"]
    seen = listed_windows(config, layers, window_of(config, 8192), unlisted=lambda: layers - (layers + 3) // 4)
    return ModelShape(**sizes, **seen, mlp_bias=bool(config.get("mlp_bias", False)))


def _hyperclovax(config: Config) -> ModelShape:
    """Granite's, with a norm of what each half gives, too, unless use_post_norm turns that off."""
    sizes = common_sizes(config, LLAMA_LIKE)
    return ModelShape(
        **sizes,
        **four_biases(config),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norms_per_layer=4 if config.get("use_post_norm", True) else 2,
        logits="scaled",
    )


def _jais2(config: Config) -> ModelShape:
    """Llama's attention, with layer norms and a block of one squared ReLU."""
    sizes = common_sizes(config, _sizes(3328, 26624, 32, 26, 150272))
    return ModelShape(
        **sizes,
        **four_biases(config, default=True),
        gated_mlp=False,
        norm="layer",
        mlp_bias=bool(config.get("mlp_bias", True)),
        activation_tensors=activation_tensors(config.get("hidden_act", "relu2")),
    )


def _vaultgemma(config: Config) -> ModelShape:
    """Gemma 2's without the norms of what both halves give."""
    defaults = _sizes(2304, 9216, 26, 8, 256000, num_key_value_heads=4, head_dim=256)
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(
        **sizes,
        **four_biases(config),
        **patterned_windows(config, sizes["layers"], every=2),
        norm="rms_fp32",
        has_capped_scores=config.get("attn_logit_softcapping", 50.0) is not None,
        scales_words=True,
        logits="plain" if config.get("final_logit_softcapping", 30.0) is None else "capped",
    )


def _of_latent_attention(config: Config, defaults: Mapping[str, int], attention: dict[str, Any]) -> ModelShape:
    sizes = common_sizes({"tie_word_embeddings": True, **config, "num_key_value_heads": None}, defaults)
    return ModelShape(**sizes | attention)


def _minicpm3(config: Config) -> ModelShape:
    """DeepSeek-V2's attention in Llama's layers; values are as wide as the heads that share the hidden size."""
    defaults = _sizes(2560, 6400, 62, 40, 73448)
    sizes = common_sizes(config, defaults)
    own = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}
    attention = latents({**own, **config}, query=768, key=64, value=sizes["hidden"] // sizes["heads"])
    return replace(
        _of_latent_attention(config, defaults, attention),
        mlp_bias=bool(config.get("mlp_bias", False)),
        scales_words=True,
    )


def _youtu(config: Config) -> ModelShape:
    """DeepSeek-V3's attention in Llama's layers."""
    attention = latents(config, query=1536, key=128, value=128)
    return _of_latent_attention(config, _sizes(2048, 6144, 32, 16, 128256), attention)


KINDRED_READERS: dict[str, Callable[[Config], ModelShape]] = {
    "cwm": _cwm,
    "hyperclovax": _hyperclovax,
    "internlm3": _internlm3,
    "iquestcoder": _iquest_coder,
    "jais2": _jais2,
    "minicpm3": _minicpm3,
    "vaultgemma": _vaultgemma,
    "youtu": _youtu,
}
"""model_type to reader."""
