"""One tiny configuration of each further family whose experts may lie on ranks (`EXPERT_FAMILIES`): the real classes.

Two layers and four experts, so that two ranks have two each; of those that begin with dense layers the second has them.
"""

from typing import Any

from trainer_testing.tiny import VOCAB_SIZE
from trainyard.spec.support import ROUTER_FAMILIES

NUM_EXPERTS = 4
_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False, "pad_token_id": 0},
    **{"attention_dropout": 0.0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}
_PLAIN = {"num_experts": NUM_EXPERTS}
_LOCAL = {"num_local_experts": NUM_EXPERTS}
_GROUPS = {
    **{"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 2, "topk_group": 1},
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SHARED = {"num_shared_experts": 1}
_LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "num_key_value_heads": 4,
}
_INDEXED = _GROUPS | _LATENT | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
_LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 48},
}
_COMPRESSED = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
    **{"indexer_compress_ratio": 2, "hc_lowrank": 8},
}
_WINDOWS = {
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "swa_v_head_dim": 8},
    **{"v_head_dim": 8, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
    "mlp_layer_types": ["dense", "sparse"],
}
_GEMMA = {
    **{"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 16, "num_kv_shared_layers": 0},
    **{"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8},
    "layer_types": ["sliding_attention", "full_attention"],
}
_MAMBA = {"expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
_SWITCHED = {"mlp_layer_types": ["dense", "sparse"]}

MIXTURES: dict[str, dict[str, Any]] = {
    "afmoe": _PLAIN | _SHARED | {"num_dense_layers": 1, "sliding_window": 8},
    "aria_text": {"moe_num_experts": NUM_EXPERTS, "moe_topk": 2},
    "axk1": _GROUPS | _LATENT,
    "axk2": _GROUPS | _LATENT,
    "bailing_hybrid": _PLAIN | _LATENT | _ONE_GROUP | _SHARED | {"first_k_dense_replace": 1},
    "beam": _PLAIN | _ONE_GROUP | _SWITCHED | {"layer_types": ["full_attention", "sliding_attention"]},
    "cohere2_moe": _PLAIN | _SHARED,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {"n_routed_experts": NUM_EXPERTS},
    "dots1": _GROUPS,
    "dots3_note_text": _INDEXED | _ONE_GROUP | _SWITCHED | {"shared_experts_intermediate_size": 24},
    "ernie4_5_moe": {
        **{"moe_num_experts": NUM_EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 0}
    },
    "exaone_moe": _PLAIN | _ONE_GROUP | _SHARED | {"first_k_dense_replace": 1},
    "flex_olmo": _PLAIN,
    "flint": _PLAIN | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 48},
    "gemma4_text": _PLAIN | _GEMMA,
    "glm4_moe": _GROUPS,
    "glm4_moe_lite": _GROUPS | _LATENT,
    "glm_moe_dsa": _INDEXED,
    "gpt_oss": _LOCAL | {"sliding_window": 8},
    "granitemoe": _LOCAL,
    "granitemoe_swa": _LOCAL | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "granitemoehybrid": _LOCAL
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48, "mamba_n_heads": 4, "mamba_d_head": 16},
    "granitemoeshared": _LOCAL | {"shared_intermediate_size": 48},
    "hunyuan_v1_moe": _PLAIN | {"moe_topk": 2},
    "hy_v3": _PLAIN | _SHARED | {"first_k_dense_replace": 1},
    "hy_v4": _GROUPS | _LATENT,
    "inkling_text": _GROUPS,
    "jamba": _PLAIN | _MAMBA,
    "kimi_linear": _PLAIN | _LATENT | _SHARED | {"first_k_dense_replace": 1},
    "kolibri1": _LOCAL | {"n_shared_experts": 1},
    "laguna": _PLAIN,
    "lfm2_moe": _PLAIN | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mellum": _LOCAL,
    "mimo_v2_flash": _GROUPS | _ONE_GROUP | _WINDOWS,
    "minimax": _LOCAL,
    "minimax_m2": _LOCAL,
    "minimax_m3_vl_text": _LOCAL,
    "nemotron_h": {"n_routed_experts": NUM_EXPERTS},
    "olmoe": _PLAIN | {"clip_qkv": 1.0},
    "phimoe": _LOCAL,
    "qwen2_moe": _PLAIN | {"shared_expert_intermediate_size": 48},
    "qwen3_5_moe_text": _PLAIN | _LINEAR,
    "qwen3_next": _PLAIN | _LINEAR,
    "qwen4_exp_text": _PLAIN | _LINEAR | _COMPRESSED,
    "solar_open": _GROUPS,
    "zaya": _PLAIN | {"num_experts_per_tok": 1},
}
"""Model type -> what it has of its own."""


def mixture(family: str, *, is_balanced: bool = True) -> dict[str, Any]:
    """Its `model.config`; with its routers' auxiliary loss, felt, where that is verified and unless told otherwise."""
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    own = balance if is_balanced and family in ROUTER_FAMILIES else {}
    return _COMMON | MIXTURES[family] | own | {"model_type": family}
