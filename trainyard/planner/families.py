"""From a Hugging Face configuration, or the name of a known model, to a `ModelShape`.

A key that a configuration leaves out has the default of its family in transformers, as it will have in the trainer.
"""

import difflib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainyard.errors import InputError
from trainyard.planner.config_values import (
    Config,
    NotCoveredError,
    common_sizes,
    layers_without_experts,
    listed,
    number,
)
from trainyard.planner.delta_families import DELTA_READERS
from trainyard.planner.dense_families import DENSE_READERS
from trainyard.planner.expert_families import EXPERT_READERS
from trainyard.planner.kinds import EXPERTS, is_plain
from trainyard.planner.known_models import KNOWN_CONFIGS, STAND_INS
from trainyard.planner.shapes import ModelShape
from trainyard.spec.model_types import position_names

LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def _llama(config: Config) -> ModelShape:
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        **common_sizes(config, LLAMA_DEFAULTS),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _mistral(config: Config) -> ModelShape:
    return ModelShape(**common_sizes(config, {**LLAMA_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8}))


def _mixtral(config: Config) -> ModelShape:
    sizes = common_sizes(config, {**LLAMA_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8})
    return ModelShape(
        **sizes,
        experts=number(config, 8, "num_local_experts"),
        experts_per_token=number(config, 2, "num_experts_per_tok"),
        moe_ffn=sizes["ffn"],
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
    return ModelShape(**common_sizes(config, QWEN_DEFAULTS), qkv_bias=True)


def _qwen3(config: Config) -> ModelShape:
    bias = bool(config.get("attention_bias", False))
    sizes = common_sizes(config, {**QWEN_DEFAULTS, "head_dim": 128})
    return ModelShape(**sizes, qkv_bias=bias, output_bias=bias, qk_norm_per_head=True)


def _qwen3_moe(config: Config) -> ModelShape:
    defaults = QWEN_DEFAULTS | {
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "num_hidden_layers": 24,
        "intermediate_size": 6144,
    }
    sizes = common_sizes(config, defaults)
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        **sizes,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm_per_head=True,
        experts=number(config, 128, "num_experts", "num_local_experts"),
        experts_per_token=number(config, 8, "num_experts_per_tok"),
        moe_ffn=number(config, 768, "moe_intermediate_size"),
        dense_layers=layers_without_experts(config, sizes["layers"]),
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
    return ModelShape(
        **sizes,
        qkv_bias=bool(config.get("qkv_bias", True)),
        experts=number(config, 60, "num_experts", "num_local_experts"),
        experts_per_token=number(config, 4, "num_experts_per_tok"),
        moe_ffn=number(config, 1408, "moe_intermediate_size"),
        shared_ffn=number(config, 5632, "shared_expert_intermediate_size"),
        shared_gate=True,
        shared_first=True,
        dense_layers=layers_without_experts(config, sizes["layers"]),
    )


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
    bias = bool(config.get("attention_bias", False))
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(**sizes, qkv_bias=bias, output_bias=bias, norm="rms_fp32")


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
    bias = bool(config.get("attention_bias", False))
    sizes = common_sizes({"tie_word_embeddings": True, **config}, defaults)
    return ModelShape(
        **sizes,
        qkv_bias=bias,
        output_bias=bias,
        norm="rms_fp32",
        norms_per_layer=4,
        has_capped_scores=caps_scores(config),
        logits="plain" if config.get("final_logit_softcapping", 30.0) is None else "capped",
    )


def caps_scores(config: Config) -> bool:
    """Whether attention's scores are capped, which no fused kernel of the trainer's does; Gemma 2's are by default."""
    default = 50.0 if config.get("model_type") == "gemma2" else None
    return config.get("attn_logit_softcapping", default) is not None


def _phi3(config: Config) -> ModelShape:
    defaults = LLAMA_DEFAULTS | {"hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064}
    return ModelShape(**common_sizes(config, defaults), fused_qkv=True)


LEARNED_POSITIONS = {"gpt2": 1024, "opt": 2048}
"""Model type -> positions in its table where its configuration states none."""


def _gpt2(config: Config) -> ModelShape:
    hidden = number(config, 768, "n_embd", "hidden_size")
    heads = number(config, 12, "n_head", "num_attention_heads")
    return ModelShape(
        layers=number(config, 12, "n_layer", "num_hidden_layers"),
        hidden=hidden,
        ffn=number(config, 4 * hidden, "n_inner"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // max(heads, 1),
        vocab=number(config, 50257, "vocab_size"),
        gated_mlp=False,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=number(config, LEARNED_POSITIONS["gpt2"], *position_names("gpt2")),
        fused_qkv=True,
        # gelu_new is written out in transformers: input, its half, the tanh, and one more than it.
        activation_tensors=4 if config.get("activation_function", "gelu_new") == "gelu_new" else 1,
        dropout=bool(config.get("resid_pdrop", 0.1)),
    )


def _gpt_neox(config: Config) -> ModelShape:
    defaults = {
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "intermediate_size": 24576,
        "vocab_size": 50432,
    }
    bias = bool(config.get("attention_bias", True))
    sizes = common_sizes({**config, "num_key_value_heads": None}, defaults)
    return ModelShape(
        **sizes,
        gated_mlp=False,
        norm="layer",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        fused_qkv=True,
        parallel_residual=bool(config.get("use_parallel_residual", True)),
        dropout=bool(config.get("hidden_dropout", 0.0)),
    )


def _opt(config: Config) -> ModelShape:
    hidden = number(config, 768, "hidden_size")
    if number(config, hidden, "word_embed_proj_dim") != hidden:
        raise NotCoveredError("model.config: an OPT whose word_embed_proj_dim differs from hidden_size is not covered")
    heads = number(config, 12, "num_attention_heads")
    return ModelShape(
        layers=number(config, 12, "num_hidden_layers"),
        hidden=hidden,
        ffn=number(config, 3072, "ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // max(heads, 1),
        vocab=number(config, 50272, "vocab_size"),
        gated_mlp=False,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        # OPT's position table starts at an offset of 2.
        learned_positions=number(config, LEARNED_POSITIONS["opt"], *position_names("opt")) + 2,
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
    defaults = DEEPSEEK_DEFAULTS[str(config.get("model_type"))]
    sizes = common_sizes({**config, "num_key_value_heads": None}, defaults)
    expert = number(config, defaults["moe_intermediate_size"], "moe_intermediate_size")
    key, value = number(config, 128, "qk_nope_head_dim"), number(config, 128, "v_head_dim")
    if value < 1:
        raise InputError(f"model.config.v_head_dim: must be at least 1 (given: {value})")
    return ModelShape(
        **{**sizes, "head_dim": key},
        value_head_dim=0 if value == key else value,
        experts=number(config, defaults["n_routed_experts"], "n_routed_experts"),
        experts_per_token=number(config, defaults["num_experts_per_tok"], "num_experts_per_tok"),
        moe_ffn=expert,
        shared_ffn=expert * number(config, defaults["n_shared_experts"], "n_shared_experts"),
        dense_layers=min(number(config, defaults["first_k_dense_replace"], "first_k_dense_replace"), sizes["layers"]),
        # DeepSeek-V2-Lite says null: its queries have no bottleneck.
        q_lora_rank=0 if config.get("q_lora_rank", 1536) is None else number(config, 1536, "q_lora_rank"),
        kv_lora_rank=number(config, 512, "kv_lora_rank"),
        rope_dim=number(config, 64, "qk_rope_head_dim"),
        wide_router=True,
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
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        experts=number(config, 128, "num_local_experts"),
        experts_per_token=number(config, 4, "num_experts_per_tok"),
        moe_ffn=sizes["ffn"],
        attention_window=number(config, 128, "sliding_window"),
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
    routed = "E" in pattern
    return ModelShape(
        **{**sizes, "layers": len(pattern)},
        gated_mlp=False,
        norms_per_layer=1,
        experts=number(config, 8, "n_routed_experts") if routed else 0,
        experts_per_token=number(config, 2, "num_experts_per_tok") if routed else 0,
        moe_ffn=number(config, 7688, "moe_intermediate_size") if routed else 0,
        shared_ffn=number(config, 7688, "moe_shared_expert_intermediate_size") if routed else 0,
        dense_layers=pattern.count("-"),
        mamba_layers=pattern.count("M"),
        attention_layers=pattern.count("*"),
        mamba_heads=number(config, 128, "mamba_num_heads"),
        mamba_head_dim=number(config, 64, "mamba_head_dim"),
        mamba_state=number(config, 128, "ssm_state_size"),
        mamba_groups=number(config, 8, "n_groups"),
        latent=number(config, 0, "moe_latent_size"),
    )


FAMILIES: dict[str, Callable[[Config], ModelShape]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    **DELTA_READERS,
    **DENSE_READERS,
    **EXPERT_READERS,
}
"""model_type to reader; parameter counts are tested against transformers."""


def shape_from_config(config: Config) -> ModelShape:
    """The shape of a Hugging Face configuration; InputError for a size that can't be, NotCoveredError for a model of
    which no formula tells."""
    model_type = str(config.get("model_type"))
    reader = FAMILIES.get(model_type)
    if reader is None:
        close = difflib.get_close_matches(model_type, FAMILIES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise NotCoveredError(
            f"model.config.model_type {model_type!r}: its sizes can't be planned{hint} (known: {', '.join(FAMILIES)})"
        )
    return replace(checked(reader(config)), attention_dropout=_drops_attention(config))


def _drops_attention(config: Config) -> bool:
    """Whether the model drops scores in training; GPT-2 does where nobody says otherwise."""
    if config.get("model_type") == "gpt2":
        return bool(config.get("attn_pdrop", 0.1))
    return bool(config.get("attention_dropout", 0.0))


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
        raise InputError(f"model: {shape.kv_heads} key/value heads must divide the {shape.heads} heads")
    if shape.dense_layers > shape.layers or shape.moe_layers < 0:
        raise InputError(
            f"model: dense_layers must be at most the model's {shape.layers} layers (given: {shape.dense_layers})"
        )
    if shape.experts and not 1 <= shape.experts_per_token <= shape.experts:
        raise InputError(
            f"model: experts per token must be 1 to {shape.experts}, the number of experts "
            f"(given: {shape.experts_per_token})"
        )
    return shape


OTHER_SIZES = re.compile(
    r"(?<![a-z0-9])(?:distill(?:ed)?|lite|moe|mini|nano|tiny|multimodal|vision|audio|omni|vl|"
    r"\d+x(?:\d+b)?|a\d+(?:\.\d+)?b)(?![a-z0-9])"
)
"""Words beside a model's name that say that its sizes are another's: what was distilled, cut down, made of experts, or
built to see and hear."""

SIZE_MARGIN = 1.15
"""Rounded sizes ("7B" for 6.7 billion) are within this factor of the exact one."""


def _stated_sizes(text: str) -> list[float]:
    """Billions of parameters that a name states: 8 of "llama-3.1-8b"."""
    return [float(size) for size in re.findall(r"(?<![a-z0-9.])(\d{1,5}(?:\.\d{1,3})?)b(?![a-z0-9])", text)]


def _near(one: float, other: float) -> bool:
    return one < other * SIZE_MARGIN and other < one * SIZE_MARGIN


def normal_name(name: str) -> str:
    """The last part of a hub id or path, in lower case and with hyphens, as the known names are written."""
    text = re.sub(r"[_\s]+", "-", name.strip().rstrip("/").rsplit("/", 1)[-1].lower())
    text = text.replace("deepseekv", "deepseek-v").replace("nemotron-v3", "nemotron-3")
    text = re.sub(r"deepseek-v3\.1(?!\d)", "deepseek-v3", text)  # of the same sizes
    # "Llama3-8B", "Phi3-mini"; "Qwen-2.5-7B", "GPT-2".
    text = re.sub(r"(?<![a-z0-9])(llama|gemma|phi)(?=\d)", r"\1-", text)
    return re.sub(r"(?<![a-z0-9])(?:(qwen)-(?=(?:2\.5|3)-)|(gpt)-(?=2(?!\d)))", r"\1\2", text)


def says_experts(name: str) -> bool:
    """Whether a name says that the model has experts: "moe", "8x7b", "a3b", or a smaller one of a kind that has."""
    text = normal_name(name)
    if EXPERTS.search(text):
        return True
    routed = (known for known, config in KNOWN_CONFIGS.items() if shape_from_config(config).experts)
    return "distill" not in text and any(known in text for known in routed)


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
        if not OTHER_SIZES.search(beside) and all(has_size(known, size) for size in _stated_sizes(beside)):
            return known
    return None


def has_size(known: str, billions: float) -> bool:
    """Whether a known model has about that many parameters, or is called so (Gemma's 7B has 8.5)."""
    exact = shape_from_config(KNOWN_CONFIGS[known]).params / 1e9
    return any(_near(billions, size) for size in (exact, *_stated_sizes(known)))


def shape_of_known(name: str) -> ModelShape:
    """The shape of a known model by name; InputError offers close names."""
    known = known_name(name)
    if known is None:
        close = difflib.get_close_matches(name.lower(), KNOWN_CONFIGS, n=3, cutoff=0.5)
        hint = ", ".join(close) or ", ".join(sorted(KNOWN_CONFIGS))
        raise InputError(
            f"unknown model {name!r}; {'close to it' if close else 'known'}: {hint}; of another state layers, hidden, "
            "ffn, heads, kv_heads and vocab (of experts also experts, experts_per_token and moe_ffn)"
        )
    return shape_from_config(KNOWN_CONFIGS[known])


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
        raise InputError(
            f"model.source {source!r}: its sizes aren't known here; name a folder with config.json, or a path that "
            f"ends in a known model's name, such as llama-3.1-8b (known: {', '.join(sorted(KNOWN_CONFIGS))})"
        )
    return KNOWN_CONFIGS[known]


def own_config_from_source(source: str) -> Config:
    """As `config_from_source`, for who asks what the model is and not how large: InputError for a known name whose
    sizes alone are known."""
    config = config_from_source(source)
    known = next((name for name in STAND_INS if KNOWN_CONFIGS[name] is config), None)
    if known is not None:
        raise InputError(
            f"model.source {source!r}: of {known} only the sizes are known here, not its configuration; name a folder "
            "with its config.json"
        )
    return config


def shape_from_source(source: str) -> ModelShape:
    """The shape of `model.source`."""
    return shape_from_config(config_from_source(source))
