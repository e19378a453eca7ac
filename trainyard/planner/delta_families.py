"""Readers of families most of whose layers have a gated delta rule for attention (arXiv:2412.06464): a configuration to
a `ModelShape` each."""

from collections.abc import Callable, Mapping
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, common_sizes, listed, number, without_experts
from trainyard.planner.family_parts import four_biases
from trainyard.planner.shapes import ModelShape

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "qwen3_next": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 48,
        "intermediate_size": 5632,
        "vocab_size": 151936,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "qwen3_5": {
        "hidden_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 32,
        "intermediate_size": 12288,
        "vocab_size": 248320,
        "head_dim": 256,
        "num_experts": 0,
        "num_experts_per_tok": 0,
    },
    "qwen3_5_moe": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 40,
        "intermediate_size": 0,
        "vocab_size": 248320,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
}


def _delta_places(config: Config, layers: int) -> tuple[int, ...]:
    """As listed, else all but each fourth, or each `full_attention_interval`-th."""
    kinds = listed(config, "layer_types")
    if kinds is None:
        every = number(config, 4, "full_attention_interval")
        if every < 1:
            raise InputError("model.config.full_attention_interval: must be at least 1 (given: 0)")
        return tuple(place for place in range(layers) if (place + 1) % every)
    if len(kinds) != layers or set(map(str, kinds)) - {"linear_attention", "full_attention"}:
        raise InputError(
            "model.config.layer_types: must be a list of linear_attention and full_attention, one for each of "
            f"{layers} layers"
        )
    return tuple(place for place, kind in enumerate(kinds) if str(kind) == "linear_attention")


def _delta_sizes(config: Config) -> dict[str, Any]:
    sizes = {
        "delta_key_heads": number(config, 16, "linear_num_key_heads"),
        "delta_value_heads": number(config, 32, "linear_num_value_heads"),
        "delta_key_head_dim": number(config, 128, "linear_key_head_dim"),
        "delta_value_head_dim": number(config, 128, "linear_value_head_dim"),
    }
    if min(sizes.values()) < 1 or sizes["delta_value_heads"] % sizes["delta_key_heads"]:
        raise InputError(
            "model.config: linear_num_key_heads, linear_num_value_heads and their head_dims must be at least 1, and "
            f"the first must divide the second (given: {', '.join(map(str, sizes.values()))})"
        )
    return sizes


def _qwen(config: Config) -> ModelShape:
    """Qwen3-Next and Qwen3.5: of four layers three have a delta rule, and one attention whose result has a gate.

    A Qwen3.5 that sees has its sizes in text_config; transformers' causal language model of it is that part alone. The
    layer that predicts a further token is not made by transformers.
    """
    model_type = str(config.get("model_type"))
    text = config.get("text_config") if model_type in ("qwen3_5", "qwen3_5_moe") else config
    if text is not None and not isinstance(text, Mapping):
        raise InputError(f"model.config.text_config: must be a mapping (given: {text!r})")
    stated = text or {}
    defaults = DEFAULTS[model_type.removesuffix("_text")]
    sizes = common_sizes(stated, defaults)
    is_dense = not defaults["num_experts"]
    experts = 0 if is_dense else number(stated, defaults["num_experts"], "num_experts")
    is_next = model_type == "qwen3_next"
    places = _delta_places(stated, sizes["layers"])
    return ModelShape(
        **sizes,
        **_delta_sizes(stated),
        **four_biases(stated),
        convolution=number(stated, 4, "linear_conv_kernel_dim"),
        norm="rms_fp32",
        qk_norm_per_head=True,
        copies_attention=True,
        attention_gate=True,
        delta_layers=len(places),
        delta_places=places,
        delta_inputs=2 if is_next else 4,
        experts=experts,
        experts_per_token=number(stated, defaults["num_experts_per_tok"], "num_experts_per_tok") if experts else 0,
        moe_ffn=number(stated, 512, "moe_intermediate_size") if experts else 0,
        shared_ffn=number(stated, 512, "shared_expert_intermediate_size") if experts else 0,
        shared_gate=experts > 0,
        shared_first=experts > 0,
        **(without_experts(stated, sizes["layers"]) if experts and is_next else {}),
    )


DELTA_READERS: Mapping[str, Callable[[Config], ModelShape]] = {
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_5_moe_text": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_next": _qwen,
}
"""model_type to reader."""
