"""One tiny configuration of each model family that the support table names: the real classes, two layers, hidden 32."""

from typing import Any

from trainer_testing.tiny import VOCAB_SIZE
from trainyard.spec.model_types import LINEAR_LAYERS

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK: dict[str, Any] = (
    _LLAMA
    | _EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
)

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _LLAMA | {"model_type": "llama"},
    "Llama, tied": _LLAMA | {"model_type": "llama", "tie_word_embeddings": True},
    "Qwen2": _LLAMA | {"model_type": "qwen2"},
    "Qwen2, tied": _LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3": _LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "Qwen3, tied": _LLAMA | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "Mistral": _LLAMA | {"model_type": "mistral", "sliding_window": 16},
    "Gemma, tied": _LLAMA | {"model_type": "gemma", "head_dim": 8, "tie_word_embeddings": True},
    "Gemma": _LLAMA | {"model_type": "gemma", "head_dim": 8},
    "GPT-2, tied": _GPT2,
    "GPT-2": _GPT2 | {"tie_word_embeddings": False},
    "GPT-NeoX": _LLAMA | {"model_type": "gpt_neox", "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "GPT-NeoX, tied": _LLAMA | {"model_type": "gpt_neox", "hidden_dropout": 0.0, "tie_word_embeddings": True},
    "Mixtral": _LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3-MoE": _LLAMA | _EXPERTS | {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4},
    "DeepSeek-V2": _DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
    "DeepSeek-V3": _DEEPSEEK | {"model_type": "deepseek_v3", "q_lora_rank": 16},
}
"""Name in the support table -> model.config."""

_LATENT: dict[str, Any] = {
    **{
        name: size
        for name, size in _DEEPSEEK.items()
        if name.startswith(("kv_", "qk_", "v_", "n_", "num_key", "first"))
    },
    **{"q_lora_rank": 16, "head_dim": 8, "n_group": 1, "topk_group": 1},
}
_DENSE_LATENT = {name: size for name, size in _LATENT.items() if not name.startswith(("n_", "topk", "first"))}

OWN_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "glm4_moe_lite", "longcat_flash"), _LATENT),
    **dict.fromkeys(("minicpm3", "youtu"), _DENSE_LATENT),
    "dots1": {name: _DEEPSEEK[name] for name in _DEEPSEEK if name.startswith(("n_", "num_key", "topk", "first"))},
    **{name: {"rotary_dim": 4} for name in ("gptj", "codegen")},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16, "num_layers": 2, "num_heads": 4},
    "gemma4_text": {
        **{"vocab_size_per_layer_input": 2 * VOCAB_SIZE, "hidden_size_per_layer_input": 8},
        **{"global_head_dim": 8, "num_kv_shared_layers": 0},
    },
    "qwen3_5_text": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "full_attention_interval": 2},
    },
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
"""What tiny models of a type need beside a Llama's sizes; the others have enough of these."""

TINY: dict[str, Any] = FAMILIES["Llama"] | {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "head_dim": 8, "sliding_window": 16},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "pad_token_id": 0},
}
"""Means something to every model type."""

ATTENTION_LINEARS: dict[str, tuple[str, ...]] = {
    "GPT-2": ("c_attn",),
    "GPT-2, tied": ("c_attn",),
    "GPT-NeoX": ("query_key_value", "dense"),
    "GPT-NeoX, tied": ("query_key_value", "dense"),
    "DeepSeek-V2": ("q_proj", "kv_b_proj"),
    "DeepSeek-V3": ("q_b_proj", "kv_b_proj"),
}
"""What LoRA adapts, by family; the others have q_proj and v_proj."""


TIED = frozenset({"cohere", "cohere2", "gemma2", "gemma3_text"})
"""Families beside those whose head is nothing but the embedding, as they are published."""

_NO_LAYERS = {"deepseek_v2": {"q_a_proj", "q_b_proj"}, "deepseek_v3": {"q_proj"}}
"""Of those with and without a latent of queries, the other's."""


def adapted_linears(model: dict[str, Any]) -> list[str]:
    """The linear layers of a family of `FAMILIES` that an adapter may name, but for the head."""
    kind = model["model_type"]
    # Experts are packed, and get none.
    experts = {"gate_proj", "up_proj", "down_proj"} if "num_experts_per_tok" in model else set()
    return sorted(LINEAR_LAYERS[kind] - {"lm_head"} - _NO_LAYERS.get(kind, set()) - experts)


def adapter(family: str, kind: str) -> dict[str, Any]:
    """The family's model.adapter section."""
    return {"kind": kind, "rank": 4, "targets": ATTENTION_LINEARS.get(family, ("q_proj", "v_proj"))}
