"""From a Hugging Face configuration, or the name of a known model, to a `ModelShape`.

A key that a configuration leaves out has the default of its family in transformers, as it will have in the trainer.
"""

import difflib
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import (
    Config,
    NotCoveredError,
    common_sizes,
    listed,
    number,
    without_experts,
)
from trainyard.planner.delta_families import DELTA_READERS
from trainyard.planner.dense_families import DENSE_READERS
from trainyard.planner.expert_families import EXPERT_READERS
from trainyard.planner.family_parts import (
    EXPERT_NAMES,
    LLAMA_LIKE,
    LOCAL_EXPERT_NAMES,
    activation_tensors,
    first_dense,
    four_biases,
    late_windows,
    latents,
    listed_windows,
    patterned_windows,
    routed,
    window_of,
    windows,
    without_head_dim,
)
from trainyard.planner.kindred_families import KINDRED_READERS
from trainyard.planner.kinds import EXPERTS, is_plain
from trainyard.planner.known_models import BESIDE_TOWERS, KNOWN_CONFIGS, STAND_INS
from trainyard.planner.older_families import LEARNED_POSITIONS, OLDER_READERS
from trainyard.planner.shapes import ModelShape
from trainyard.planner.sparse_families import SPARSE_READERS
from trainyard.planner.wide_families import WIDE_READERS
from trainyard.spec.model_types import position_names
from trainyard.spec.words import counted


def _llama(config: Config) -> ModelShape:
    return ModelShape(
        **common_sizes(config, LLAMA_LIKE),
        **four_biases(config),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _mistral(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_LIKE, "intermediate_size": 14336, "num_key_value_heads": 8})
    return ModelShape(**sizes, **windows(window_of(config, 4096), sizes["layers"]))


def _mixtral(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_LIKE, "intermediate_size": 14336, "num_key_value_heads": 8})
    return ModelShape(
        **sizes,
        **routed(config, width=sizes["ffn"], experts=8, per_token=2, experts_names=LOCAL_EXPERT_NAMES),
        **windows(window_of(config), sizes["layers"]),
        wide_weights=True,
    )


QWEN_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 22016,
    "vocab_size": 151936,
}


def _qwen2(config: Config) -> ModelShape:
    sizes = common_sizes(config, QWEN_DEFAULTS)
    return ModelShape(**sizes, **late_windows(config, sizes["layers"]), qkv_bias=True)


def _qwen3(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**QWEN_DEFAULTS, "head_dim": 128})
    seen = late_windows(config, sizes["layers"])
    return ModelShape(**sizes, **four_biases(config), **seen, qk_norm_per_head=True)


def _qwen3_moe(config: Config) -> ModelShape:
    defaults = QWEN_DEFAULTS | {
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "num_hidden_layers": 24,
        "intermediate_size": 6144,
    }
    sizes = common_sizes(config, defaults)
    expert = number(config, 768, "moe_intermediate_size")
    window = window_of(config, 4096) if config.get("use_sliding_window", False) else 0
    return ModelShape(
        **sizes,
        **four_biases(config),
        **routed(config, width=expert, experts=128, per_token=8, experts_names=EXPERT_NAMES),
        **windows(window, sizes["layers"]),
        qk_norm_per_head=True,
        **without_experts(config, sizes["layers"]),
    )


def _qwen2_moe(config: Config) -> ModelShape:
    defaults = QWEN_DEFAULTS | {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 24,
        "intermediate_size": 5632,
    }
    sizes = common_sizes(config, defaults)
    expert = number(config, 1408, "moe_intermediate_size")
    return ModelShape(
        **sizes,
        **routed(config, width=expert, experts=60, per_token=4, experts_names=("num_experts",)),
        **_qwen2_moe_windows(config, sizes["layers"]),
        qkv_bias=bool(config.get("qkv_bias", True)),
        shared_ffn=number(config, 5632, "shared_expert_intermediate_size"),
        shared_gate=True,
        shared_first=True,
        **without_experts(config, sizes["layers"]),
    )


def _qwen2_moe_windows(config: Config, layers: int) -> dict[str, Any]:
    """Where they are asked for: as listed, else every second layer, the first one of them, before max_window_layers."""
    window = window_of(config, 4096) if config.get("use_sliding_window", False) else 0
    last = number(config, 28, "max_window_layers")
    return listed_windows(config, layers, window, unlisted=lambda: (min(layers, last) + 1) // 2)


def _gemma(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 28,
        "intermediate_size": 24576,
        "vocab_size": 256000,
        "head_dim": 256,
    }
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(**sizes, **four_biases(config), norm="rms_fp32", scales_words=True)


def _gemma2(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 26,
        "intermediate_size": 9216,
        "vocab_size": 256000,
        "head_dim": 256,
    }
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(
        **sizes,
        **four_biases(config),
        **patterned_windows(config, sizes["layers"], every=2),
        norm="rms_fp32",
        norms_per_layer=4,
        has_capped_scores=caps_scores(config),
        scales_words=True,
        logits="plain" if config.get("final_logit_softcapping", 30.0) is None else "capped",
    )


WRITTEN_OUT = frozenset(
    {"bloom", "codegen", "deepseek_v4", "gemma2", "gpt_neo", "gpt_oss", "gptj", "mpt", "vaultgemma"}
)
"""Model types whose attention transformers writes out: it gives them to none of torch's kernels (`_supports_sdpa`)."""

NARROW_SOFTMAX = frozenset({"falcon", "gpt2", "gpt_oss"})
"""Model types whose attention, where it is written out, has its softmax in the type of what it reads."""


def caps_scores(config: Config) -> bool:
    """Whether attention's scores are capped, which no fused kernel of the trainer's does; Gemma 2's are by default."""
    default = 50.0 if config.get("model_type") in ("gemma2", "vaultgemma") else None
    return config.get("attn_logit_softcapping", default) is not None


def writes_scores_out(config: Config) -> bool:
    """Whether attention's scores are kept, as no fused kernel of the trainer's computes this model's attention."""
    return caps_scores(config) or config.get("model_type") in WRITTEN_OUT


def _phi3(config: Config) -> ModelShape:
    defaults = {**LLAMA_LIKE, "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064}
    sizes = common_sizes(config, defaults)
    seen = windows(window_of(config), sizes["layers"])
    dropout = bool(config.get("resid_pdrop", 0.0))
    return ModelShape(
        **sizes,
        **seen,
        fused_qkv=True,
        whole_qkv=True,
        whole_gate_up=True,
        copies_attention=True,
        keeps_activated_gate=True,
        dropout=dropout,
    )


def _gpt_neox(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "intermediate_size": 24576,
        "vocab_size": 50432,
    }
    sizes = common_sizes({**without_head_dim(config), "num_key_value_heads": None}, defaults)
    return ModelShape(
        **sizes,
        **four_biases(config, default=True),
        gated_mlp=False,
        norm="layer",
        mlp_bias=True,
        fused_qkv=True,
        copies_attention=True,
        parallel_residual=bool(config.get("use_parallel_residual", True)),
        dropout=bool(config.get("hidden_dropout", 0.0)),
        activation_tensors=activation_tensors(config.get("hidden_act", "gelu")),
    )


DEEPSEEK_DEFAULTS = {
    "deepseek_v2": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "vocab_size": 102400,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    },
}


def _deepseek(config: Config) -> ModelShape:
    """DeepSeek V2 and V3 (and Kimi K2, of V3's kind): latent attention, shared experts, a few dense layers first."""
    is_second = config.get("model_type") == "deepseek_v2"
    defaults = DEEPSEEK_DEFAULTS[str(config.get("model_type"))]
    if is_second and config.get("mlp_bias", False):
        raise NotCoveredError("model.config: a deepseek_v2 with mlp_bias is not covered: of its experts none has one")
    other = "num_experts" if is_second else "num_local_experts"
    sizes = common_sizes({**config, "num_key_value_heads": None}, defaults)
    expert = number(config, defaults["moe_intermediate_size"], "moe_intermediate_size")
    return ModelShape(
        **sizes
        | latents(config, query=1536, key=128, value=128)
        | routed(
            config,
            width=expert,
            experts=defaults["n_routed_experts"],
            per_token=defaults["num_experts_per_tok"],
            experts_names=(other, "n_routed_experts"),
        ),
        shared_ffn=expert * number(config, defaults["n_shared_experts"], "n_shared_experts"),
        dense_layers=first_dense(config, defaults["first_k_dense_replace"], sizes["layers"]),
        wide_router=True,
        wide_weights=True,
        sigmoid_weights=not is_second,
    )


def _gpt_oss(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "head_dim": 64,
    }
    sizes = common_sizes(config, defaults)
    return ModelShape(
        **sizes,
        **four_biases(config, default=True),
        **routed(config, width=sizes["ffn"], experts=128, per_token=4, experts_names=LOCAL_EXPERT_NAMES),
        **patterned_windows(config, sizes["layers"], every=2, window=128),
        norm="rms_wide",
        mlp_bias=True,
        # Of each expert also the cut gate, its sigmoid, their product, and one more than the cut input.
        activation_tensors=4,
        attention_sinks=True,
    )


HYBRID_BLOCKS = {
    **dict.fromkeys(("mamba", "linear_attention"), "M"),
    **dict.fromkeys(("attention", "full_attention"), "*"),
    "moe": "E",
    "mlp": "-",
}
"""What transformers calls a hybrid's layers, by its older and its newer words -> their letter in a pattern."""


def _hybrid_pattern(config: Config) -> str:
    """A hybrid's layers, one letter each: transformers 5 writes a list, and reads a pattern where there is none."""
    name = next((name for name in ("layers_block_type", "layer_types") if config.get(name) is not None), None)
    if name is not None:
        blocks = listed(config, name) or []
        if not blocks or any(not isinstance(block, str) or block not in HYBRID_BLOCKS for block in blocks):
            raise InputError(f"model.config.{name}: must be a list of {', '.join(HYBRID_BLOCKS)} (one a layer)")
        return "".join(HYBRID_BLOCKS[block] for block in blocks)
    pattern = config.get("hybrid_override_pattern", "ME*-")
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*E-"):
        raise InputError("model.config.hybrid_override_pattern: must be a text of M, *, E and - (one a layer)")
    return pattern


def _check_nemotron_h(config: Config) -> None:
    """NotCoveredError for biases that NVIDIA's published hybrids don't have, and for the lack of one that they have."""
    for name, usual in (("use_bias", False), ("mlp_bias", False), ("use_conv_bias", True)):
        if bool(config.get(name, usual)) is not usual:
            raise NotCoveredError(f"model.config: a nemotron_h with {name}: {str(not usual).lower()} is not covered")


def _nemotron_h(config: Config) -> ModelShape:
    """NVIDIA's hybrids: a pattern of M (Mamba-2), * (attention), E (experts) and - (feed-forward); squared ReLU."""
    pattern = _hybrid_pattern(config)
    if "M" not in pattern:
        raise NotCoveredError("model.config: a nemotron_h without Mamba layers is not covered")
    defaults = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": len(pattern),
        "intermediate_size": 21504,
        "vocab_size": 131072,
        "head_dim": 128,
    }
    sizes = common_sizes(config, defaults)
    _check_nemotron_h(config)
    has_experts = "E" in pattern
    return ModelShape(
        **{**sizes, "layers": len(pattern), "tied_embeddings": False},  # whatever tie_word_embeddings says
        gated_mlp=False,
        norm="rms_wide",
        norms_per_layer=1,
        experts=number(config, 8, "num_local_experts", "n_routed_experts") if has_experts else 0,
        experts_per_token=number(config, 2, "num_experts_per_tok") if has_experts else 0,
        moe_ffn=number(config, 7688, "moe_intermediate_size") if has_experts else 0,
        shared_ffn=number(config, 7688, "moe_shared_expert_intermediate_size") if has_experts else 0,
        dense_layers=pattern.count("-"),
        mamba_layers=pattern.count("M"),
        attention_layers=pattern.count("*"),
        mamba_heads=number(config, 128, "mamba_num_heads"),
        mamba_head_dim=number(config, 64, "mamba_head_dim"),
        mamba_state=number(config, 128, "ssm_state_size"),
        mamba_groups=number(config, 8, "n_groups"),
        convolution=number(config, 4, "conv_kernel"),
        latent=number(config, 0, "moe_latent_size"),
    )


FAMILIES: dict[str, Callable[[Config], ModelShape]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    **DELTA_READERS,
    **DENSE_READERS,
    **EXPERT_READERS,
    **KINDRED_READERS,
    **OLDER_READERS,
    **SPARSE_READERS,
    **WIDE_READERS,
}
"""model_type to reader; parameter counts are tested against transformers."""


def shape_from_config(config: Config) -> ModelShape:
    """The shape of a Hugging Face configuration; InputError for a size that can't be, NotCoveredError for a model of
    which no formula tells."""
    if config.get("model_type") is None:
        raise InputError("model.config.model_type: is missing; it names the model's family, e.g. llama")
    model_type = str(config["model_type"])
    reader = FAMILIES.get(model_type)
    if reader is None:
        known = _words_on_known(model_type, config.get("text_config"))
        raise NotCoveredError(f"model.config.model_type {model_type!r}: its sizes can't be planned{known}")
    for name in ("hidden_act", "hidden_activation"):
        if not isinstance(config.get(name) or "", str):
            raise InputError(f"model.config.{name}: must be a text, e.g. silu (given: {config[name]!r})"[:200])
    shape = replace(checked(reader(config)), attention_dropout=_drops_attention(config))
    _check_heads(config, shape)
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    return replace(shape, keeps_activated_gate=shape.keeps_activated_gate or activation not in THIN_ACTIVATIONS)


def _words_on_known(model_type: str, text_config: Any) -> str:
    inner = text_config.get("model_type") if isinstance(text_config, dict) else None
    if isinstance(inner, str) and inner in FAMILIES:
        return f"; those of its language model alone, {inner}, can: by its text_config"
    close = difflib.get_close_matches(model_type, FAMILIES, n=1)
    return f"; did you mean {close[0]}?" if close else f" (known are {len(FAMILIES)}, {', '.join(COMMON)}, ...)"


HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
"""What families call the number of a layer's heads."""


def _check_heads(config: Config, shape: ModelShape) -> None:
    """InputError where stated heads, whose width nobody states, can't share the hidden size: transformers builds no
    such model, or one whose rotation fails. Latent attention has widths of its own."""
    follows = config.get("head_dim") is None and not shape.kv_lora_rank
    is_stated = any(config.get(name) is not None for name in HEADS)
    if follows and is_stated and shape.hidden % shape.heads and shape.head_dim == shape.hidden // shape.heads:
        raise InputError(
            f"model.config: {counted(shape.heads, 'head')} don't divide a hidden size of {shape.hidden}; change "
            "one of the two, "
            "or state head_dim"
        )


COMMON = ("deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Of FAMILIES, what a message names of those that are known."""

THIN_ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh"})
"""Of one kernel of torch's, so that the trainer makes the activated gate again (`trainer/models/gates.py`)."""


ATTENTION_DROPOUT = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("attn_pdrop", 0.1)),
    **dict.fromkeys(("codegen", "gptj"), ("attn_pdrop", 0.0)),
    "seed_oss": ("attention_dropout", 0.1),
}
"""Model type -> its own name for the share of scores that are dropped, and how many are where nobody says."""

KEEPS_SCORES = frozenset({"ernie4_5", "ernie4_5_moe", "falcon"})
"""Model types that drop no scores whatever they state: Falcon does with ALiBi alone, which isn't covered."""


def _drops_attention(config: Config) -> bool:
    """Whether the model drops scores in training."""
    model_type = str(config.get("model_type"))
    if model_type in KEEPS_SCORES:
        return False
    if model_type == "mpt":
        return bool((config.get("attn_config") or {}).get("attn_pdrop"))
    name, default = ATTENTION_DROPOUT.get(model_type, ("attention_dropout", 0.0))
    return bool(config.get(name, default))


def with_positions(config: Config, sequence_length: int) -> Config:
    """A new model's configuration as the trainer builds it: where it states no positions, enough for its sequences."""
    model_type = str(config.get("model_type"))
    default, names = LEARNED_POSITIONS.get(model_type), position_names(model_type)
    if default is None or any(config.get(name) is not None for name in names):
        return config
    return {**config, names[0]: max(default, sequence_length)}


def checked(shape: ModelShape) -> ModelShape:
    """The shape itself, if a model can have it; InputError names the size that can't be."""
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
        if getattr(shape, field) < 1:
            raise InputError(f"model: {field} must be at least 1 (given: {getattr(shape, field)})")
    if shape.ffn < 1 and not shape.experts:
        raise InputError(f"model: the feed-forward width must be at least 1 (given: {shape.ffn})")
    if shape.heads % shape.kv_heads:
        raise InputError(
            f"model: {counted(shape.kv_heads, 'key/value head')} must divide the {counted(shape.heads, 'head')}"
        )
    if shape.dense_layers > shape.layers or shape.moe_layers < 0:
        raise InputError(
            f"model: dense_layers must be at most the model's {counted(shape.layers, 'layer')} (given: "
            f"{shape.dense_layers})"
        )
    if shape.windowed_layers > shape.layers:
        raise InputError(
            f"model: windowed_layers must be at most the model's {counted(shape.layers, 'layer')} (given: "
            f"{shape.windowed_layers})"
        )
    if shape.experts and not 1 <= shape.experts_per_token <= shape.experts:
        raise InputError(
            f"model: experts per token must be 1 to {shape.experts}, the number of experts "
            f"(given: {shape.experts_per_token})"
        )
    return shape


OTHER_SIZES = re.compile(
    r"(?<![a-z0-9])(?:distill(?:ed)?|lite|moe|mini|flash|nano|tiny|multimodal|vision|audio|omni|vl|"
    r"\d+x(?:\d+b)?|a\d+(?:\.\d+)?b)(?![a-z0-9])"
)
"""Words beside a model's name that say that its sizes are another's: what was distilled, cut down, made of experts, or
built to see and hear."""

SIZE_MARGIN = 1.15
"""Rounded sizes ("7B" for 6.7 billion) are within this factor of the exact one."""


def _stated_sizes(text: str) -> list[float]:
    """Billions of parameters that a name states: 8 of "llama-3.1-8b", 0.125 of "opt-125m". "1M" and "10M" are
    words of a sequence."""
    billions = re.findall(r"(?<![a-z0-9.])(\d{1,5}(?:\.\d{1,3})?)b(?![a-z0-9])", text)
    # BLOOM's "7b1".
    billions += [f"{whole}.{tenth}" for whole, tenth in re.findall(r"(?<![a-z0-9.])(\d{1,3})b(\d)(?![a-z0-9])", text)]
    millions = re.findall(r"(?<![a-z0-9.])(1[1-9]|[2-9]\d|\d{3})m(?![a-z0-9])", text)
    return [float(size) for size in billions] + [float(size) / 1000 for size in millions]


def _near(one: float, other: float) -> bool:
    return one < other * SIZE_MARGIN and other < one * SIZE_MARGIN


def normal_name(name: str) -> str:
    """The last part of a hub id or path, in lower case and with hyphens, as the known names are written."""
    text = re.sub(r"\bw/o\b", "without", name.strip().lower()).rstrip("/").rsplit("/", 1)[-1]
    # A version's point as "phi-1_5", "llama3_1_8b" or "qwen-2-5-7b" write it.
    text = re.sub(r"(?<![a-z0-9])(phi-1|internlm2)_5(?!\d)", r"\1.5", text)
    text = re.sub(
        r"(?<![a-z0-9])(llama[-_]?3|qwen[-_]?2|qwen[-_]?3(?=[-_][56][-_]))[-_](\d)(?=[-_]\d+b(?![a-z0-9]))",
        r"\1.\2",
        text,
    )
    versioned = r"(?<![a-z0-9])(nemotron[-_]3|deepseek[-_]v3|glm[-_][45]|kimi[-_]k2)[-_](\d)(?![a-z0-9])"
    text = re.sub(versioned, r"\1.\2", text)
    text = re.sub(r"(?<=-)(\d)_(\d)(?=b(?![a-z0-9]))", r"\1.\2", text)  # "stablelm-2-1_6b"
    text = re.sub(r"[_\s]+", "-", text)
    text = (
        text.replace("deepseekv", "deepseek-v")
        .replace("nemotron-v3", "nemotron-3")
        .replace("command-r+", "command-r-plus")
    )
    text = re.sub(r"deepseek-v3\.1(?!\d)", "deepseek-v3", text)  # of the same sizes
    # "Llama3-8B", "Phi3-mini"; "Qwen-2.5-7B", "GPT-2", "GPT-3".
    text = re.sub(r"(?<![a-z0-9])(llama|gemma|phi)(?=\d)", r"\1-", text)
    return re.sub(r"(?<![a-z0-9])(?:(qwen)-(?=(?:2\.5|3|3\.[56])-)|(gpt)-(?=[23](?![\d.])))", r"\1\2", text)


def says_experts(name: str) -> bool:
    """Whether a name says that the model has experts: "moe", "8x7b", "a3b", or a smaller one of a kind that has."""
    text = normal_name(name)
    if EXPERTS.search(text):
        return True
    return "distill" not in text and any(known in text for known in _known_of_experts())


@functools.cache
def _known_of_experts() -> frozenset[str]:
    """Reading all of them takes ten times as long as an estimate."""
    return frozenset(known for known, config in KNOWN_CONFIGS.items() if shape_from_config(config).experts)


def size_of_unknown(name: str) -> float | None:
    """Billions of parameters that the name of an unknown decoder of a plain family states, once; None of all others."""
    text = normal_name(name)
    sizes = _stated_sizes(text)
    if len(sizes) != 1 or sizes[0] <= 0 or not is_plain(text) or says_experts(name):
        return None
    if known_name(name) is not None or "distill" in text:
        return None
    # "lama-3.1-8b" is a slip of the pen.
    meant = difflib.get_close_matches(text, KNOWN_CONFIGS, n=1, cutoff=0.9)
    return None if meant and has_size(meant[0], sizes[0]) else sizes[0]


@functools.lru_cache(maxsize=1024)
def known_name(name: str) -> str | None:
    """The known model that a hub id, an S3 prefix or a folder speaks of, e.g. `s3://x/Meta-Llama-3.1-70B-Instruct`.

    A name inside another's ("GPT2-8B", "DeepSeek-R1-Distill-Llama-8B") is none: what stands beside it must not speak
    of other sizes.
    """
    text = normal_name(name)
    # The longest name first: "llama-3.1-8b" before a shorter name inside it.
    for known in sorted(KNOWN_CONFIGS, key=len, reverse=True):
        found = re.search(rf"(?<![a-z0-9.]){re.escape(known)}(?![a-z0-9.])", text)
        if found is None:
            continue
        beside = f"{text[: found.start()]} {text[found.end() :]}"
        if _is_other(known, beside, after=text[found.end() :]):
            continue
        if not OTHER_SIZES.search(beside) and all(has_size(known, size) for size in _stated_sizes(beside)):
            return known
    return None


def _is_other(known: str, beside: str, *, after: str) -> bool:
    """Whether what stands beside a known name makes it another's: a family's name that it lacks ("zephyr-7b-gemma"), or
    a version behind one that has no size ("mistral-large-3")."""
    named = set(re.findall(r"[a-z]+", beside)) & set(FAMILY_WORDS)
    is_version = not _stated_sizes(known) and re.match(r"-\d{1,2}(?![a-z0-9.])", after) is not None
    return is_version or any(word not in known for word in named)


FAMILY_WORDS = (
    *("llama", "mistral", "mixtral", "qwen", "gemma", "phi", "falcon", "nemotron", "deepseek", "olmo", "granite"),
    *("gpt", "opt", "bloom", "minitron"),
)
"""Names of families that other models' names have in them."""


def has_size(known: str, billions: float) -> bool:
    """Whether a known model has about that many parameters, or is called so (Gemma's 7B has 8.5)."""
    exact = shape_from_config(KNOWN_CONFIGS[known]).params / 1e9
    return any(_near(billions, size) for size in (exact, *_stated_sizes(known)))


def shape_of_known(name: str) -> ModelShape:
    """The shape of a known model by name; InputError offers close names."""
    known = known_name(name)
    if known is None:
        close = difflib.get_close_matches(normal_name(name), KNOWN_CONFIGS, n=3, cutoff=0.5)
        hint = f"close to it: {', '.join(close)}" if close else f"known are sizes of {', '.join(_kinds_known())}"
        raise InputError(
            f"unknown model {name!r}; {hint}; of another state layers, hidden, ffn, heads, kv_heads and vocab (of "
            "experts also experts, experts_per_token and moe_ffn)"
        )
    return shape_from_config(KNOWN_CONFIGS[known])


def _kinds_known() -> list[str]:
    """The first words of the known names that several have: what a person can look for among three hundred of them."""
    kinds = Counter(re.split(r"[-\d]", known)[0] for known in KNOWN_CONFIGS)
    return sorted(kind for kind, number in kinds.items() if number >= COMMON_KIND)


COMMON_KIND = 4
"""Known models of a kind that is named to who asks for an unknown one."""


_LEARNT: dict[str, Config] = {}
"""What whoever asked AWS has read of models elsewhere, by `model.source`."""


def learn_config(source: str, config: Config) -> None:
    """Plan `source`, which lies elsewhere, by `config` from now on; by its name where that alone can be planned."""
    if known_name(source) is not None:
        try:
            shape_from_config(config)
        except InputError:
            return
    _LEARNT[source] = config


def config_from_source(source: str) -> Config:
    """The configuration of `model.source`: what was learnt of it, a local folder's config.json, else of a known name
    within the path."""
    if source in _LEARNT:
        return _LEARNT[source]
    folder = Path(source)
    # os.path answers False for a name that no folder can have (too long), where Path raises.
    if "://" not in source and os.path.isfile(folder / "config.json"):  # noqa: PTH113
        try:
            found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{folder / 'config.json'}: can't be read ({error.strerror or error})") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{folder / 'config.json'}: is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise InputError(f"{folder / 'config.json'}: must be a JSON object, is {type(found).__name__}")
        return found
    known = known_name(source)
    if known is None and "://" in source:
        raise InputError(
            f"model.source {source!r}: its sizes aren't known here; name a folder with config.json that is a copy of "
            "the model's (--set model.source=FOLDER); a launch reads the one that lies there itself"
        )
    if known is None:
        close = difflib.get_close_matches(normal_name(source).rpartition("/")[2], KNOWN_CONFIGS, n=3, cutoff=0.6)
        raise InputError(
            f"model.source {source!r}: its sizes aren't known here; name a folder with config.json, or a path that "
            f"ends in a known model's name, such as {', '.join(close) or 'llama-3.1-8b'}"
        )
    return KNOWN_CONFIGS[known]


def own_config_from_source(source: str) -> Config:
    """As `config_from_source`, for who asks what the model is and not how large: InputError for a known name whose
    sizes alone are known."""
    config = config_from_source(source)
    known = known_name(source)
    # A folder's own configuration, or one that was read elsewhere, is another object.
    if known in STAND_INS and KNOWN_CONFIGS[known] is config:
        raise InputError(
            f"model.source {source!r}: of {known} only the sizes are known here, not its configuration; name a folder "
            "with its config.json"
        )
    return config


def trained_shape(config: Config) -> ModelShape:
    """As `shape_from_config`, of a model that our own trainer runs by transformers' code: NotCoveredError also where
    formulas are of others' kernels alone."""
    shape = shape_from_config(config)
    written_out = "all of its scores" if shape.indexer is not None else "its states" if shape.is_hybrid else None
    if written_out is not None:
        raise NotCoveredError(
            f"model.config.model_type {config['model_type']!r}: transformers writes {written_out} out, which no "
            "formula here tells (predict plans it under frameworks with kernels of their own)"
        )
    return shape


def shape_from_source(source: str) -> ModelShape:
    """The shape of `model.source`, for our own trainer; NotCoveredError for a known name of what also sees."""
    config, known = config_from_source(source), known_name(source)
    if known in BESIDE_TOWERS and KNOWN_CONFIGS[known] is config:
        raise NotCoveredError(f"model.source {source!r}: {known} has a vision tower, of which no formula here tells")
    try:
        return trained_shape(config)
    except InputError as error:
        # The job states no model.config: its words are of the file that lies there.
        words = re.sub(r"^model\.config(\.|: )", "config.json: ", str(error))
        raise type(error)(f"model.source {source}: {words}" if words != str(error) else words) from None
