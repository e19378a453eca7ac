"""Tiny models of the families that are cut into stages or along the sequence, each with all that its kind has: windows
shorter than the sequence, layers of two types, caps, scales, experts, tied embeddings where the family's are."""

from typing import Any

from transformers import CONFIG_MAPPING

from trainer_testing.families import FAMILIES, OWN_SIZES, TINY
from trainer_testing.mixtures import MIXTURES
from trainer_testing.support_table import UNTABLED
from trainyard.spec.support import STAGE_FAMILIES

NUM_LAYERS = 4
"""Of two stages on each of two ranks, one each."""
_WINDOW = 7
_NAMES_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TWO_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2), "sliding_window": _WINDOW}
_SCALED = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
_CAPPED = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)}
_STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DEEP = {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "num_global_key_value_heads": 1}
_WITHOUT_NOISE = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "residual_dropout": 0.0}

_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "bamba": _STATES | {"attn_layer_indices": [1, 3]},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": _TWO_TYPES | {"logit_scale": 0.5},
    "cohere2_moe": _TWO_TYPES | {"logit_scale": 0.5},
    "cwm": _TWO_TYPES,
    "dots1": _TWO_TYPES,
    "dots3_note_text": {"layer_types": ["indexed_attention", "sliding_attention"] * (NUM_LAYERS // 2)},
    "exaone4": _TWO_TYPES,
    "exaone_moe": _TWO_TYPES,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "falcon_h1": _STATES | {"mamba_d_ssm": 64, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5},
    "gemma2": _TWO_TYPES | _CAPPED,
    "gemma3_text": _TWO_TYPES | _CAPPED,
    "gemma4_text": _TWO_TYPES | _DEEP | {"attention_k_eq_v": True, "final_logit_softcapping": 2.0},
    "gemma4_unified_text": _TWO_TYPES | _DEEP,
    "glm4_moe": {"use_qk_norm": True, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]], "window_size": _WINDOW},
    "gpt_oss": _TWO_TYPES,
    **dict.fromkeys(("granite", "granitemoe", "hyperclovax"), _SCALED),
    "granite_swa": _TWO_TYPES | _SCALED,
    "granitemoe_swa": _TWO_TYPES | _SCALED,
    "granitemoehybrid": _STATES | _SCALED,
    "granitemoeshared": _SCALED | {"shared_intermediate_size": 24},
    "kolibri1": {"shared_expert_intermediate_size": 24},
    "laguna": _TWO_TYPES | {"shared_expert_intermediate_size": 24},
    "hy_v4": {"indexer_types": ["full"] * NUM_LAYERS},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * (NUM_LAYERS // 2)},
    "kimi_linear": _LINEAR | {"linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "llama4_text": {
        **{"attention_chunk_size": 8, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
        **{"no_rope_layers": [1, 0, 1, 0], "floor_scale": 4},
    },
    "mamba": {"residual_in_fp32": True},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "mellum": _TWO_TYPES,
    "minimax_m3_vl_text": {
        **{"layer_types": ["minimax_m3_sparse", "full_attention"] * (NUM_LAYERS // 2), "index_n_heads": 2},
        **{"index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
    },
    "minimax": _LINEAR | {"block_size": 8, "linear_attn_alpha_factor": 2.0, "full_attn_beta_factor": 0.5},
    "minicpm3": {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16},
    "ministral": _TWO_TYPES,
    "mpt": {"max_seq_len": 64},
    "nanochat": {"final_logit_softcapping": 2.0},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "n_groups": 2, "chunk_size": 8},
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 24},
    },
    "olmo": {"clip_qkv": 0.05},
    "olmo3": _TWO_TYPES,
    "olmo_hybrid": _LINEAR
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    "olmoe": {"clip_qkv": 1.0},
    "opt": {"word_embed_proj_dim": 16},
    **{
        name: {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        for name in ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
    },
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2, "shared_expert_intermediate_size": 24},
    "qwen4_exp_text": {
        **{"ple_layer_ids": [1, 3], "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8},
        **{"heads_per_ngram": 2, "split_ngram_parts": 1, "eos_token_id": 1},
    },
    "smollm3": _TWO_TYPES | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 1]},
    "stablelm": {"qk_layernorm": True},
    "vaultgemma": _TWO_TYPES | _CAPPED,
}
"""Beside a Llama's sizes."""


def model_of(family: str) -> dict[str, Any]:
    """Its `model.config`: of all these what means something to the family."""
    sizes = UNTABLED.get(family) or _of_tables(family) or TINY | OWN_SIZES.get(family, {})
    if family in STAGE_FAMILIES:
        sizes = {name: _for_layers(value) for name, value in (sizes | MIXTURES.get(family, {})).items()}
    common = {"vocab_size": TINY["vocab_size"], "sliding_window": _WINDOW} | _WITHOUT_NOISE
    wanted = sizes | dict.fromkeys(_NAMES_OF_LAYERS, NUM_LAYERS) | common | _OWN.get(family, {})
    kind = CONFIG_MAPPING[family]
    known = (kind.__dataclass_fields__.keys() | kind.attribute_map.keys()) - {"tie_word_embeddings"}  # its default
    return {name: value for name, value in wanted.items() if value is not None and name in known} | {
        "model_type": family
    }


def _for_layers(value: Any) -> Any:
    """What is stated of each of two layers, of all."""
    return value * (NUM_LAYERS // len(value)) if isinstance(value, list) and len(value) == 2 else value


def _of_tables(family: str) -> dict[str, Any] | None:
    return next((model for model in FAMILIES.values() if model["model_type"] == family), None)
