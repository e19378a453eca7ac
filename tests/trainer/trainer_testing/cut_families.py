"""Tiny models of the families that are cut into stages or along the sequence, each with all that its kind has: windows
shorter than the sequence, layers of two types, caps, scales, experts, tied embeddings where the family's are."""

from typing import Any

from transformers import CONFIG_MAPPING

from trainer_testing.families import FAMILIES, OWN_SIZES, TINY
from trainer_testing.support_table import UNTABLED

NUM_LAYERS = 4
"""Of two stages on each of two ranks, one each."""
_WINDOW = 7
_NAMES_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TWO_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2), "sliding_window": _WINDOW}
_SCALED = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
_CAPPED = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4}
_WITHOUT_NOISE = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "residual_dropout": 0.0}

_OWN: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": _TWO_TYPES | {"logit_scale": 0.5},
    "cohere2_moe": _TWO_TYPES | {"logit_scale": 0.5},
    "cwm": _TWO_TYPES,
    "dots1": _TWO_TYPES,
    "exaone4": _TWO_TYPES,
    "exaone_moe": _TWO_TYPES,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "gemma2": _TWO_TYPES | _CAPPED,
    "gemma3_text": _TWO_TYPES | _CAPPED,
    "glm4_moe": {"use_qk_norm": True, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]], "window_size": _WINDOW},
    "gpt_oss": _TWO_TYPES,
    **dict.fromkeys(("granite", "granitemoe", "hyperclovax"), _SCALED),
    "granitemoeshared": _SCALED | {"shared_intermediate_size": 24},
    "kolibri1": {"shared_expert_intermediate_size": 24},
    "laguna": _TWO_TYPES | {"shared_expert_intermediate_size": 24},
    "mellum": _TWO_TYPES,
    "minicpm3": {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16},
    "ministral": _TWO_TYPES,
    "mpt": {"max_seq_len": 64},
    "nanochat": {"final_logit_softcapping": 2.0},
    "olmo": {"clip_qkv": 0.05},
    "olmo3": _TWO_TYPES,
    "olmoe": {"clip_qkv": 1.0},
    "opt": {"word_embed_proj_dim": 16},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2, "shared_expert_intermediate_size": 24},
    "smollm3": _TWO_TYPES | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1]},
    "stablelm": {"qk_layernorm": True},
    "vaultgemma": _TWO_TYPES | _CAPPED,
}
"""Beside a Llama's sizes."""


def model_of(family: str) -> dict[str, Any]:
    """Its `model.config`: of all these what means something to the family."""
    sizes = UNTABLED.get(family) or _of_tables(family) or TINY | OWN_SIZES.get(family, {})
    common = {"vocab_size": TINY["vocab_size"], "sliding_window": _WINDOW} | _WITHOUT_NOISE
    wanted = sizes | dict.fromkeys(_NAMES_OF_LAYERS, NUM_LAYERS) | common | _OWN.get(family, {})
    kind = CONFIG_MAPPING[family]
    known = (kind.__dataclass_fields__.keys() | kind.attribute_map.keys()) - {"tie_word_embeddings"}  # its default
    return {name: value for name, value in wanted.items() if value is not None and name in known} | {
        "model_type": family
    }


def _of_tables(family: str) -> dict[str, Any] | None:
    return next((model for model in FAMILIES.values() if model["model_type"] == family), None)
