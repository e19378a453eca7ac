"""Families whose layers have attention of two widths: Gemma 4's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, NotCoveredError, common_sizes, number
from trainyard.planner.family_parts import four_biases, one_per_layer, window_of
from trainyard.planner.shapes import ModelShape
from trainyard.spec.words import counted

GEMMA4_DEFAULTS = {
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 30,
    "intermediate_size": 9216,
    "vocab_size": 262144,
    "head_dim": 256,
}
"""Of transformers' `Gemma4TextConfig`."""

WIDE_EVERY = 6
"""Each sixth layer sees everything, where nothing is listed, and the last one in any case."""


def _gemma4(config: Config) -> ModelShape:
    if number(config, 256, "hidden_size_per_layer_input"):
        raise NotCoveredError(
            "model.config: a gemma4_text with inputs of each layer (hidden_size_per_layer_input, E2B's and E4B's) is "
            "not covered"
        )
    return replace(_of_two_widths(config, window=512), **_experts(config))


def _gemma4_unified(config: Config) -> ModelShape:
    return _of_two_widths(config, window=1024)


def _of_two_widths(config: Config, *, window: int) -> ModelShape:
    if number(config, 0, "num_kv_shared_layers"):
        raise NotCoveredError("model.config: a gemma4 whose layers share keys (num_kv_shared_layers) is not covered")
    if config.get("use_bidirectional_attention") == "all":
        raise NotCoveredError("model.config: a gemma4 that sees both ways (use_bidirectional_attention) is not covered")
    sizes = common_sizes({"tie_word_embeddings": True, **config}, GEMMA4_DEFAULTS)
    return ModelShape(
        **sizes,
        **four_biases(config),
        **_wide(config, sizes),
        norms_per_layer=4,
        attention_window=window_of(config, window),
        norm="rms_cast",
        qk_norm_per_head=True,
        normalizes_values=True,
        scales_words=True,
        logits="plain" if config.get("final_logit_softcapping") is None else "capped",
    )


def _wide(config: Config, sizes: dict[str, Any]) -> dict[str, Any]:
    """Layers without a window, whose heads have a width, and keys a number, of their own."""
    layers, shares = sizes["layers"], bool(config.get("attention_k_eq_v", False))
    kinds = one_per_layer(config, "layer_types", layers)
    places = {place for place in range(layers) if (place + 1) % WIDE_EVERY == 0}
    if kinds is not None:
        places = {place for place, kind in enumerate(kinds) if kind != "sliding_attention"}
    wide = sorted(places | {layers - 1})
    head_dim, wide_heads = _wide_sizes(config, sizes, wide, shares=shares)
    for name, size in (("num_global_key_value_heads", wide_heads), ("global_head_dim", head_dim)):
        if size < 1:
            raise InputError(f"model.config.{name}: must be at least 1 (given: {size})")
    if sizes["heads"] % wide_heads:
        raise InputError(
            f"model.config.num_global_key_value_heads: must divide the {counted(sizes['heads'], 'head')} (given: "
            f"{wide_heads})"
        )
    return {
        "wide_layers": len(wide),
        "wide_places": tuple(wide),
        "windowed_layers": layers - len(wide),
        "wide_head_dim": head_dim,
        "wide_kv_heads": wide_heads,
        "wide_values_are_keys": shares,
    }


def _wide_sizes(config: Config, sizes: dict[str, Any], wide: list[int], *, shares: bool) -> tuple[int, int]:
    """A head's width and the number of keys of layers that see everything: under names of their own, as they are
    published, or layer by layer, as transformers saves them."""
    if "per_layer_config" not in config:
        is_own = shares and config.get("num_global_key_value_heads") is not None
        heads = number(config, 0, "num_global_key_value_heads") if is_own else sizes["kv_heads"]
        return number(config, 512, "global_head_dim"), heads
    listed = config["per_layer_config"] or {}  # null, too, says that none differs
    if not isinstance(listed, dict) or not all(isinstance(each, dict) for each in listed.values()):
        raise InputError("model.config.per_layer_config: must have an object for each layer that differs")
    usual = {"head_dim": sizes["head_dim"], "num_key_value_heads": sizes["kv_heads"]}
    own = {str(layer).lstrip("0") or "0": each for layer, each in listed.items()}
    found = {
        (number(each, usual["head_dim"], "head_dim"), number(each, usual["num_key_value_heads"], "num_key_value_heads"))
        for each in (own.pop(str(layer), {}) for layer in wide)
    }
    others = set().union(*listed.values()) - set(usual)
    if own or others or len(found) != 1:
        raise NotCoveredError("model.config: a gemma4 whose layers are of more than two kinds is not covered")
    return found.pop()


def _experts(config: Config) -> dict[str, Any]:
    """Beside an ordinary block in every layer, which counts as a shared one."""
    if not config.get("enable_moe_block", False):
        return {}
    return {
        "experts": number(config, None, "num_experts"),
        "experts_per_token": number(config, None, "top_k_experts"),
        "moe_ffn": number(config, None, "moe_intermediate_size"),
        "shared_ffn": number(config, 9216, "intermediate_size"),
        "shared_apart": True,
        "wide_weights": True,
        "shared_first": True,
        "norms_per_layer": 7,
    }


WIDE_READERS: dict[str, Callable[[Config], ModelShape]] = {
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4_unified,
}
"""model_type to reader."""
