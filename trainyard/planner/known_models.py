"""Hugging Face configurations of well-known models: what a plan needs of them, from their config.json files."""

import re
from typing import Any

Config = dict[str, Any]


def _sizes(
    model_type: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, **others: Any
) -> Config:
    """A configuration by the names that most families give their sizes."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **others,
    }


def _gemma4(*sizes: int, model_type: str = "gemma4_text", **others: Any) -> Config:
    """One layer in six sees everything, with heads twice as wide whose values are their keys. `sizes` as `_sizes`."""
    hidden, ffn, layers, heads, kv_heads = sizes
    alike = {"head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024}
    if model_type == "gemma4_text":
        alike["hidden_size_per_layer_input"] = 0
    return _sizes(
        *(model_type, hidden, ffn, layers, heads, kv_heads, 262144),
        **(alike | {"tie_word_embeddings": True, "final_logit_softcapping": 30.0} | others),
    )


def _neox(hidden: int, layers: int, heads: int, vocab: int, **others: Any) -> Config:
    config = _sizes("gpt_neox", hidden, 4 * hidden, layers, heads, heads, vocab, **others)
    del config["num_key_value_heads"]
    return config


def _gpt(hidden: int, layers: int, heads: int, positions: int) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return {"model_type": "gpt2", **sizes, "vocab_size": 50257}


def _big_code(hidden: int, layers: int, heads: int, vocab: int = 49152, positions: int = 8192) -> Config:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": 4 * hidden, "n_positions": positions}
    return {"model_type": "gpt_bigcode", **sizes, "vocab_size": vocab, "multi_query": True}


def _bloom(hidden: int, layers: int, heads: int) -> Config:
    return {"model_type": "bloom", "hidden_size": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 250880}


def _mpt(hidden: int, layers: int, heads: int) -> Config:
    return {"model_type": "mpt", "d_model": hidden, "n_layers": layers, "n_heads": heads, "vocab_size": 50432}


def _opt(hidden: int, layers: int, heads: int) -> Config:
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    words = {"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden}
    return {"model_type": "opt", **sizes, **words}


def _falcon(hidden: int, layers: int, heads: int) -> Config:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_kv_heads": 8}
    return {"model_type": "falcon", **sizes, "new_decoder_architecture": True, "vocab_size": 65024}


def _latent(nope: int = 128, rope: int = 64, value: int = 128, *, query: int | None = 1536) -> Config:
    """DeepSeek's latent attention."""
    heads = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    return {"q_lora_rank": query, "kv_lora_rank": 512, **heads}


def _routed(experts: int, per_token: int, ffn: int, *, shared: int, dense: int) -> Config:
    """DeepSeek's experts: `shared` beside those that are chosen, and `dense` layers before them."""
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": ffn,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
    }


def _delta(
    hidden: int, layers: int, heads: int, kv_heads: int, *, ffn: int = 0, values: int, experts: Config | None = None
) -> Config:
    """Qwen3.5's text part: three gated delta rules, of so many value heads, to a layer of attention."""
    kind = "qwen3_5_text" if experts is None else "qwen3_5_moe_text"
    sizes = _sizes(kind, hidden, ffn, layers, heads, kv_heads, 248320, head_dim=256, linear_num_value_heads=values)
    # Of experts alone there is no other width.
    return {name: value for name, value in sizes.items() if ffn or name != "intermediate_size"} | (experts or {})


def _qwen_experts(experts: int, per_token: int, ffn: int) -> Config:
    """Experts, and a shared one as wide as one of them."""
    return {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": ffn,
    }


def _compressed(hidden: int, layers: int, heads: int, *, query: int, chosen: int, groups: int, plain: bool) -> Config:
    """DeepSeek-V4's attention; `plain`: of the first two layers, which have a window alone and not heavy entries."""
    first = [0, 0] if plain else [128, 128]
    ratios = first + [128 if index % 2 else 4 for index in range(layers - 2)]
    return {
        "model_type": "deepseek_v4",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "vocab_size": 129280,
        "q_lora_rank": query,
        "index_topk": chosen,
        "o_groups": groups,
        "compress_ratios": ratios,
    }


_OF_LLAMA: dict[str, Config] = {
    "llama-2-7b": _sizes("llama", 4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _sizes("llama", 5120, 13824, 40, 40, 40, 32000),
    "llama-30b": _sizes("llama", 6656, 17920, 60, 52, 52, 32000),
    "llama-65b": _sizes("llama", 8192, 22016, 80, 64, 64, 32000),
    "llama-2-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _sizes("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-8b": _sizes("llama", 4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _sizes("llama", 16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": _sizes("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True, head_dim=64),
    "llama-3.2-3b": _sizes("llama", 3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True, head_dim=128),
    "llama-3.3-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 128256),
    "codellama-7b": _sizes("llama", 4096, 11008, 32, 32, 32, 32016),
    "codellama-13b": _sizes("llama", 5120, 13824, 40, 40, 40, 32016),
    "codellama-34b": _sizes("llama", 8192, 22016, 48, 64, 8, 32000),
    "codellama-70b": _sizes("llama", 8192, 28672, 80, 64, 8, 32016),
    "tinyllama-1.1b": _sizes("llama", 2048, 5632, 22, 32, 4, 32000),
    "tiny-llama": _sizes("llama", 2048, 5632, 22, 32, 4, 32000),
    "openllama-3b": _sizes("llama", 3200, 8640, 26, 32, 32, 32000),
    "xgen-7b": _sizes("llama", 4096, 11008, 32, 32, 32, 51200),
    "solar-10.7b": _sizes("llama", 4096, 14336, 48, 32, 8, 32000),
    "yi-6b": _sizes("llama", 4096, 11008, 32, 32, 4, 64000),
    "yi-9b": _sizes("llama", 4096, 11008, 48, 32, 4, 64000),
    "yi-34b": _sizes("llama", 7168, 20480, 60, 56, 8, 64000),
    "deepseek-llm-7b": _sizes("llama", 4096, 11008, 30, 32, 32, 102400),
    "deepseek-llm-67b": _sizes("llama", 8192, 22016, 95, 64, 8, 102400),
    "deepseek-coder-1.3b": _sizes("llama", 2048, 5504, 24, 16, 16, 32256),
    "deepseek-coder-6.7b": _sizes("llama", 4096, 11008, 32, 32, 32, 32256),
    "deepseek-coder-33b": _sizes("llama", 7168, 19200, 62, 56, 8, 32256),
    "smollm2-135m": _sizes("llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "smollm2-360m": _sizes("llama", 960, 2560, 32, 15, 5, 49152, tie_word_embeddings=True),
    "smollm2-1.7b": _sizes("llama", 2048, 8192, 24, 32, 32, 49152, tie_word_embeddings=True),
    "falcon3-1b": _sizes("llama", 2048, 8192, 18, 8, 4, 131072, head_dim=256),
    "falcon3-3b": _sizes("llama", 3072, 9216, 22, 12, 4, 131072, head_dim=256),
    "falcon3-7b": _sizes("llama", 3072, 23040, 28, 12, 4, 131072, head_dim=256),
    "falcon3-10b": _sizes("llama", 3072, 23040, 40, 12, 4, 131072, head_dim=256),
}

_OF_MISTRAL: dict[str, Config] = {
    "mistral-7b": _sizes("mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None),
    "mistral-nemo": _sizes("mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
    "mistral-small-24b": _sizes("mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
    "codestral-22b": _sizes("mistral", 6144, 16384, 56, 48, 8, 32768, head_dim=128, sliding_window=None),
    "mistral-large": _sizes("mistral", 12288, 28672, 88, 96, 8, 32768, head_dim=128, sliding_window=None),
    "mixtral-8x7b": _sizes("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    "mixtral-8x22b": _sizes("mixtral", 6144, 16384, 56, 48, 8, 32768, num_local_experts=8, num_experts_per_tok=2),
}

_OF_QWEN: dict[str, Config] = {
    "qwen-1.8b": _sizes("qwen2", 2048, 5504, 24, 16, 16, 151936),
    "qwen-7b": _sizes("qwen2", 4096, 11008, 32, 32, 32, 151936),
    "qwen-14b": _sizes("qwen2", 5120, 13696, 40, 40, 40, 152064),
    "qwen-72b": _sizes("qwen2", 8192, 24576, 80, 64, 64, 152064),
    "qwen1.5-0.5b": _sizes("qwen2", 1024, 2816, 24, 16, 16, 151936, tie_word_embeddings=True),
    "qwen1.5-1.8b": _sizes("qwen2", 2048, 5504, 24, 16, 16, 151936),
    "qwen1.5-4b": _sizes("qwen2", 2560, 6912, 40, 20, 20, 151936),
    "qwen1.5-7b": _sizes("qwen2", 4096, 11008, 32, 32, 32, 151936),
    "qwen1.5-14b": _sizes("qwen2", 5120, 13696, 40, 40, 40, 152064),
    "qwen1.5-32b": _sizes("qwen2", 5120, 27392, 64, 40, 8, 152064),
    "qwen1.5-72b": _sizes("qwen2", 8192, 24576, 80, 64, 64, 152064),
    "qwen1.5-110b": _sizes("qwen2", 8192, 49152, 80, 64, 8, 152064),
    "qwen1.5-moe-a2.7b": _sizes("qwen2_moe", 2048, 5632, 24, 16, 16, 151936)
    | {"num_experts": 60, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen2-57b-a14b": _sizes("qwen2_moe", 3584, 18944, 28, 28, 4, 151936)
    | {"num_experts": 64, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480},
    "qwen2.5-0.5b": _sizes("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _sizes("qwen2", 1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-3b": _sizes("qwen2", 2048, 11008, 36, 16, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _sizes("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _sizes("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _sizes("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _sizes("qwen2", 8192, 29568, 80, 64, 8, 152064),
    # Its embeddings aren't tied, as Qwen's own are.
    "deepseek-r1-distill-qwen-1.5b": _sizes("qwen2", 1536, 8960, 28, 12, 2, 151936),
    "qwen3-0.6b": _sizes("qwen3", 1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True, head_dim=128),
    "qwen3-1.7b": _sizes("qwen3", 2048, 6144, 28, 16, 8, 151936, tie_word_embeddings=True, head_dim=128),
    "qwen3-4b": _sizes("qwen3", 2560, 9728, 36, 32, 8, 151936, tie_word_embeddings=True, head_dim=128),
    "qwen3-8b": _sizes("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _sizes("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _sizes("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "qwen3-30b-a3b": _sizes(
        "qwen3_moe",
        2048,
        6144,
        48,
        32,
        4,
        151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen3-235b-a22b": _sizes(
        "qwen3_moe",
        4096,
        12288,
        94,
        64,
        4,
        151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
    ),
    "qwen3-coder-480b-a35b": _sizes("qwen3_moe", 6144, 8192, 62, 96, 8, 151936)
    | {"head_dim": 128, "num_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 2560},
    "qwen3.5-27b": _delta(5120, 64, 24, 4, ffn=17408, values=48),
    "qwen3.5-35b-a3b": _delta(2048, 40, 16, 2, values=32, experts=_qwen_experts(256, 8, 512)),
    "qwen3.5-122b-a10b": _delta(3072, 48, 32, 2, values=64, experts=_qwen_experts(256, 8, 1024)),
    "qwen3.5-397b-a17b": _delta(4096, 60, 32, 2, values=64, experts=_qwen_experts(512, 10, 1024)),
    "mimo-7b": _sizes("qwen2", 4096, 11008, 36, 32, 8, 151680),
    "qwen3-next-80b-a3b": {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512},
}

_OF_DEEPSEEK: dict[str, Config] = {
    "deepseek-v2-lite": _sizes("deepseek_v2", 2048, 10944, 27, 16, 16, 102400)
    | _routed(64, 6, 1408, shared=2, dense=1)
    | _latent(query=None),
    "deepseek-v2": _sizes("deepseek_v2", 5120, 12288, 60, 128, 128, 102400)
    | _routed(160, 6, 1536, shared=2, dense=1)
    | _latent(),
    "deepseek-v3": _sizes("deepseek_v3", 7168, 18432, 61, 128, 128, 129280)
    | _routed(256, 8, 2048, shared=1, dense=3)
    | _latent(),
    "deepseek-v3.2": _sizes("deepseek_v32", 7168, 18432, 61, 128, 128, 129280)
    | _routed(256, 8, 2048, shared=1, dense=3)
    | _latent(),
    "deepseek-v4-flash": _compressed(4096, 43, 64, query=1024, chosen=512, groups=8, plain=True)
    | {"n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "n_shared_experts": 1},
    "deepseek-v4-pro": _compressed(7168, 61, 128, query=1536, chosen=1024, groups=16, plain=False)
    | {"n_routed_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 3072, "n_shared_experts": 1},
    "glm-4.7-flash": _sizes("glm4_moe_lite", 2048, 10240, 47, 20, 20, 154880)
    | _routed(64, 4, 1536, shared=1, dense=1)
    | _latent(nope=192, value=256, query=768),
    "glm-5": _sizes("glm_moe_dsa", 6144, 12288, 78, 64, 64, 154880)
    | _routed(256, 8, 2048, shared=1, dense=3)
    | _latent(nope=192, value=256, query=2048),
    "glm-5.2": _sizes("glm_moe_dsa", 6144, 12288, 78, 64, 64, 154880)
    | _routed(256, 8, 2048, shared=1, dense=3)
    | _latent(nope=192, value=256, query=2048)
    | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "kimi-k2": _sizes("deepseek_v3", 7168, 18432, 61, 64, 64, 163840)
    | _routed(384, 8, 2048, shared=1, dense=1)
    | _latent(),
    "deepseek-moe-16b": _sizes("glm4_moe", 2048, 10944, 28, 16, 16, 102400)
    | _routed(64, 6, 1408, shared=2, dense=1)
    | {"head_dim": 128, "use_qk_norm": False, "attention_bias": False},
}

_OF_GPT: dict[str, Config] = {
    "gpt2": _gpt(768, 12, 12, 1024),
    "gpt2-medium": _gpt(1024, 24, 16, 1024),
    "gpt2-large": _gpt(1280, 36, 20, 1024),
    "gpt2-xl": _gpt(1600, 48, 25, 1024),
    "tiny-gpt2": {"model_type": "gpt2", "n_embd": 2, "n_head": 2, "n_layer": 2, "vocab_size": 50257},
    "distilgpt2": _gpt(768, 6, 12, 1024),
    "gpt3-125m": _gpt(768, 12, 12, 2048),
    "gpt3-350m": _gpt(1024, 24, 16, 2048),
    "gpt3-760m": _gpt(1536, 24, 16, 2048),
    "gpt3-1.3b": _gpt(2048, 24, 16, 2048),
    "gpt3-2.7b": _gpt(2560, 32, 32, 2048),
    "gpt3-6.7b": _gpt(4096, 32, 32, 2048),
    "gpt3-13b": _gpt(5120, 40, 40, 2048),
    "gpt3-175b": _gpt(12288, 96, 96, 2048),
    "cerebras-gpt-111m": _gpt(768, 10, 12, 2048),
    "cerebras-gpt-256m": _gpt(1088, 14, 17, 2048),
    "cerebras-gpt-590m": _gpt(1536, 18, 12, 2048),
    "megatron-8.3b": _gpt(3072, 72, 32, 1024),
    "turing-nlg-17b": _gpt(4256, 78, 28, 1024),
    "mt-nlg-530b": _gpt(20480, 105, 128, 2048),
    "gpt-neo-125m": {
        "model_type": "gpt_neo",
        **{"hidden_size": 768, "num_layers": 12, "num_heads": 12},
        "attention_types": [[["global", "local"], 6]],
    },
    "gpt-neo-1.3b": {"model_type": "gpt_neo"},
    "gpt-neo-2.7b": {
        "model_type": "gpt_neo",
        **{"hidden_size": 2560, "num_layers": 32, "num_heads": 20},
        "attention_types": [[["global", "local"], 16]],
    },
    "gpt-j-6b": {"model_type": "gptj"},
    "gpt-neox-20b": _neox(6144, 44, 64, 50432, hidden_act="gelu_fast"),
    "pythia-14m": _neox(128, 6, 4, 50304),
    "pythia-31m": _neox(256, 6, 8, 50304),
    "pythia-70m": _neox(512, 6, 8, 50304),
    "pythia-160m": _neox(768, 12, 12, 50304),
    "pythia-410m": _neox(1024, 24, 16, 50304),
    "pythia-1b": _neox(2048, 16, 8, 50304),
    "pythia-1.4b": _neox(2048, 24, 16, 50304),
    "pythia-2.8b": _neox(2560, 32, 32, 50304),
    "pythia-6.9b": _neox(4096, 32, 32, 50432),
    "pythia-12b": _neox(5120, 36, 40, 50688),
    "redpajama-incite-3b": _neox(2560, 32, 32, 50432),
    "redpajama-incite-7b": _neox(4096, 32, 32, 50432),
    "stablelm-base-alpha-3b": _neox(4096, 16, 32, 50688),
    "stablelm-alpha-3b": _neox(4096, 16, 32, 50688),
    "stablelm-alpha-7b": _neox(6144, 16, 48, 50432),
    "nemotron-8b": _neox(4096, 32, 32, 256000),
    "nemotron-22b": _neox(6144, 40, 48, 256000),
    "phi-1.5": _neox(2048, 24, 32, 51200),
    "phi-2": _neox(2560, 32, 32, 51200),
    "gpt-oss-120b": _sizes(
        "gpt_oss",
        2880,
        2880,
        36,
        64,
        8,
        201088,
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
    "gpt-oss-20b": _sizes(
        "gpt_oss",
        2880,
        2880,
        24,
        64,
        8,
        201088,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
    "santacoder": _big_code(2048, 24, 16, vocab=49280, positions=2048),
    "starcoderbase-1b": _big_code(2048, 24, 16),
    "starcoderbase-3b": _big_code(2816, 36, 22),
    "starcoderbase-7b": _big_code(4096, 42, 32),
    "starcoder": _big_code(6144, 40, 48),
    "bloom-560m": _bloom(1024, 24, 16),
    "bloom-1b1": _bloom(1536, 24, 16),
    "bloom-1b7": _bloom(2048, 24, 16),
    "bloom-3b": _bloom(2560, 30, 32),
    "bloom-7b1": _bloom(4096, 30, 32),
    "bloom": _bloom(14336, 70, 112),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-30b": _mpt(7168, 48, 64),
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12288, 96, 96),
    "falcon-7b": _big_code(4544, 32, 71, vocab=65024, positions=2048),
    "falcon-40b": _falcon(8192, 60, 128),
    "falcon-180b": _falcon(14848, 80, 232),
}

_OF_OTHERS: dict[str, Config] = {
    "gemma-2b": _sizes("gemma", 2048, 16384, 18, 8, 1, 256000, head_dim=256),
    "gemma-7b": _sizes("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256),
    "gemma-2-2b": _sizes("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256),
    "gemma-2-9b": _sizes("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256),
    "gemma-2-27b": _sizes("gemma2", 4608, 36864, 46, 32, 16, 256000, head_dim=128),
    "gemma-3-270m": _sizes("gemma3_text", 640, 2048, 18, 4, 1, 262144, head_dim=256, sliding_window=512),
    "gemma-3-1b": _sizes("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512),
    # Of the larger ones the text model: what sees beside it is 0.4 billion parameters.
    "gemma-3-4b": _sizes("gemma3_text", 2560, 10240, 34, 8, 4, 262208, head_dim=256, sliding_window=1024),
    "gemma-3-12b": _sizes("gemma3_text", 3840, 15360, 48, 16, 8, 262208, head_dim=256, sliding_window=1024),
    "gemma-3-27b": _sizes("gemma3_text", 5376, 21504, 62, 32, 16, 262208, head_dim=128, sliding_window=1024),
    # Language models alone, too; E2B and E4B, whose layers have inputs of their own, have no formula.
    "gemma-4-12b": _gemma4(*(3840, 15360, 48, 16, 8), model_type="gemma4_unified_text", num_global_key_value_heads=1),
    "gemma-4-26b-a4b": _gemma4(
        *(2816, 2112, 30, 16, 8),
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": _gemma4(*(5376, 21504, 60, 32, 16), num_global_key_value_heads=4),
    "minicpm3-4b": _sizes("minicpm3", 2560, 6400, 62, 40, 40, 73448, tie_word_embeddings=True),
    "youtu-llm-2b": _sizes("youtu", 2048, 6144, 32, 16, 16, 128256, tie_word_embeddings=True),
    "iquest-coder-v1-40b": _sizes("iquestcoder", 5120, 27648, 80, 40, 8, 76800, head_dim=128),
    "olmo-1b": _sizes("olmo", 2048, 8192, 16, 16, 16, 50304, tie_word_embeddings=True),
    "olmo-7b": _sizes("olmo", 4096, 11008, 32, 32, 32, 50304),
    "olmo-2-1b": _sizes("olmo2", 2048, 8192, 16, 16, 16, 100352),
    "olmo-2-7b": _sizes("olmo2", 4096, 11008, 32, 32, 32, 100352),
    "olmo-2-13b": _sizes("olmo2", 5120, 13824, 40, 40, 40, 100352),
    "olmo-2-32b": _sizes("olmo2", 5120, 27648, 64, 40, 8, 100352),
    "olmo-3-7b": _sizes("olmo3", 4096, 11008, 32, 32, 32, 100278, sliding_window=4096),
    "olmo-3-32b": _sizes("olmo3", 5120, 27648, 64, 40, 8, 100278, sliding_window=4096),
    "olmoe-1b-7b": _sizes("olmoe", 2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
    "smollm3-3b": _sizes("smollm3", 2048, 11008, 36, 16, 4, 128256),
    "granite-3.1-2b": _sizes("granite", 2048, 8192, 40, 32, 8, 49155, tie_word_embeddings=True),
    "granite-3.1-8b": _sizes("granite", 4096, 12800, 40, 32, 8, 49155, tie_word_embeddings=True),
    "command-r7b": _sizes("cohere2", 4096, 14336, 32, 32, 8, 256000, head_dim=128),
    "command-r": _sizes("cohere", 8192, 22528, 40, 64, 64, 256000),
    "command-r-08-2024": _sizes("cohere", 8192, 24576, 40, 64, 8, 256000),
    "command-r-plus": _sizes("cohere", 12288, 33792, 64, 96, 8, 256000),
    "command-a": _sizes("cohere2", 12288, 36864, 64, 96, 8, 256000, head_dim=128),
    "aya-23-8b": _sizes("cohere", 4096, 14336, 32, 32, 8, 256000),
    "starcoder2-3b": _sizes("starcoder2", 3072, 12288, 30, 24, 2, 49152, sliding_window=4096),
    "starcoder2-7b": _sizes("starcoder2", 4608, 18432, 32, 36, 4, 49152, sliding_window=4096),
    "starcoder2-15b": _sizes(
        "starcoder2", 6144, 24576, 40, 48, 4, 49152, tie_word_embeddings=False, sliding_window=4096
    ),
    "phi-3-mini": _sizes("phi3", 3072, 8192, 32, 32, 32, 32064),
    "phi-3-medium": _sizes("phi3", 5120, 17920, 40, 40, 10, 32064),
    "phi-4": _sizes("phi3", 5120, 17920, 40, 40, 10, 100352),
    "phi-4-mini": _sizes("phi3", 3072, 8192, 32, 24, 8, 200064, tie_word_embeddings=True),
    "phi-3.5-moe": _sizes("phimoe", 4096, 6400, 32, 32, 8, 32064)
    | {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "nemotron-4-15b": _sizes("nemotron", 6144, 24576, 32, 48, 8, 256000, head_dim=128),
    "nemotron-4-340b": _sizes("nemotron", 18432, 73728, 96, 96, 8, 256000, head_dim=192),
    "minitron-4b": _sizes("nemotron", 3072, 9216, 32, 24, 8, 256000, head_dim=128),
    "minitron-8b": _sizes("nemotron", 4096, 16384, 32, 48, 8, 256000, head_dim=128),
    "nemotron-3-nano": {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_shared_experts": 1,
        "intermediate_size": 1856,
        "vocab_size": 131072,
    },
    "nemotron-3-super": {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "hybrid_override_pattern": "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "n_shared_experts": 1,
        "intermediate_size": 2688,
        "vocab_size": 131072,
        "moe_latent_size": 1024,
    },
    "nemotron-3-ultra": {
        "model_type": "nemotron_h",
        "hidden_size": 8192,
        "hybrid_override_pattern": "MEMEMEM*EMEMEM*EMEMEMEM*E" * 4 + "MEMEMEME",
        "num_attention_heads": 64,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 256,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 5120,
        "moe_shared_expert_intermediate_size": 10240,
        "n_shared_experts": 1,
        "intermediate_size": 5120,
        "vocab_size": 131072,
        "moe_latent_size": 2048,
    },
    "nemotron-h-56b": {
        "model_type": "nemotron_h",
        "hidden_size": 8192,
        "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 256,
        "mamba_head_dim": 64,
        "ssm_state_size": 256,
        "n_groups": 8,
        "intermediate_size": 32768,
        "vocab_size": 131072,
    },
    "stablelm-3b-4e1t": _sizes("stablelm", 2560, 6912, 32, 32, 32, 50304),
    "stablelm-2-1.6b": _sizes("stablelm", 2048, 5632, 24, 32, 32, 100352, use_qkv_bias=True),
    "stablelm-2-12b": _sizes("stablelm", 5120, 13824, 40, 32, 8, 100352, use_parallel_residual=True),
    "glm-4-9b": _sizes("glm", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True),
    "glm-4-32b": _sizes("glm4", 6144, 23040, 61, 48, 2, 151552, head_dim=128, attention_bias=False),
    "glm-4.5": _sizes("glm4_moe", 5120, 12288, 92, 96, 8, 151552)
    | _routed(160, 8, 1536, shared=1, dense=3)
    | {"head_dim": 128, "use_qk_norm": True, "attention_bias": True},
    "glm-4.5-air": _sizes("glm4_moe", 4096, 10944, 46, 96, 8, 151552)
    | _routed(128, 8, 1408, shared=1, dense=1)
    | {"head_dim": 128, "use_qk_norm": False, "attention_bias": True},
    "chatglm2-6b": _sizes("glm", 4096, 13696, 28, 32, 2, 65024)
    | {"head_dim": 128, "attention_bias": True, "pad_token_id": 0},
    "glm-130b": _sizes("llama", 12288, 32768, 70, 96, 96, 150528, tie_word_embeddings=True),
    "baichuan-7b": _sizes("llama", 4096, 11008, 32, 32, 32, 64000),
    "baichuan-13b": _sizes("llama", 5120, 13696, 40, 40, 40, 64000),
    "baichuan2-7b": _sizes("llama", 4096, 11008, 32, 32, 32, 125696),
    "baichuan2-13b": _sizes("llama", 5120, 13696, 40, 40, 40, 125696),
    "internlm-7b": _sizes("llama", 4096, 11008, 32, 32, 32, 103168, attention_bias=True),
    "internlm2-1.8b": _sizes("llama", 2048, 8192, 24, 16, 8, 92544),
    "internlm2-7b": _sizes("llama", 4096, 14336, 32, 32, 8, 92544),
    "internlm2-20b": _sizes("llama", 6144, 16384, 48, 48, 8, 92544),
    "internlm3-8b": _sizes("internlm3", 4096, 10240, 48, 32, 2, 128512, head_dim=128),
    "minimax-m2": _sizes("minimax_m2", 3072, 1536, 62, 48, 8, 200064)
    | {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
    "ernie-4.5-0.3b": _sizes("ernie4_5", 1024, 3072, 18, 16, 2, 103424, head_dim=128),
    "ernie-4.5-21b-a3b": _sizes("ernie4_5_moe", 2560, 12288, 28, 20, 4, 103424)
    | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
    "exaone-3.5-2.4b": _sizes("llama", 2560, 7168, 30, 32, 8, 102400, head_dim=80, tie_word_embeddings=True),
    "exaone-3.5-7.8b": _sizes("llama", 4096, 14336, 32, 32, 8, 102400),
    "exaone-3.5-32b": _sizes("llama", 5120, 27392, 64, 40, 8, 102400),
    "exaone-4.0-32b": _sizes("exaone4", 5120, 27392, 64, 40, 8, 102400),
    "seed-oss-36b": _sizes("seed_oss", 5120, 27648, 64, 80, 8, 155136, head_dim=128),
    "dbrx": _sizes("mixtral", 6144, 10752, 40, 48, 8, 100352, num_local_experts=16, num_experts_per_tok=4),
    "grok-1": _sizes("mixtral", 6144, 32768, 64, 48, 8, 131072)
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    "llama-4-scout": _sizes("llama4_text", 5120, 8192, 48, 40, 8, 202048)
    | {"intermediate_size_mlp": 16384, "head_dim": 128}
    | {"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "llama-4-maverick": _sizes("llama4_text", 5120, 8192, 48, 40, 8, 202048)
    | {"intermediate_size_mlp": 16384, "head_dim": 128, "use_qk_norm": False}
    | {"num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
}

_SAME_SIZES = {
    **{"llama-7b": "llama-2-7b", "llama-13b": "llama-2-13b", "llama-33b": "llama-30b"},
    **{"vicuna-7b": "llama-2-7b", "vicuna-13b": "llama-2-13b", "vicuna-33b": "llama-30b", "alpaca-7b": "llama-2-7b"},
    **{"open-llama-3b": "openllama-3b", "openllama-7b": "llama-2-7b", "openllama-13b": "llama-2-13b"},
    **{f"yi-1.5-{size}": f"yi-{size}" for size in ("6b", "9b", "34b")},
    **{f"smollm-{size}": f"smollm2-{size}" for size in ("135m", "360m", "1.7b")},
    **{"zephyr-7b": "mistral-7b", "mathstral-7b": "mistral-7b"},
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    **{f"qwen2.5-coder-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")},
    **{f"qwen2.5-math-{size}": f"qwen2.5-{size}" for size in ("1.5b", "7b", "72b")},
    **{"qwq-32b": "qwen2.5-32b", "qwen3-coder-30b-a3b": "qwen3-30b-a3b"},
    **{f"deepseek-r1-distill-qwen-{size}": f"qwen2.5-{size}" for size in ("7b", "14b", "32b")},
    **{"deepseek-r1-distill-llama-8b": "llama-3.1-8b", "deepseek-r1-distill-llama-70b": "llama-3.3-70b"},
    **{"deepseek-r1": "deepseek-v3"},
    **{"cerebras-gpt-1.3b": "gpt3-1.3b", "cerebras-gpt-2.7b": "gpt3-2.7b"},
    **{"cerebras-gpt-6.7b": "gpt3-6.7b", "cerebras-gpt-13b": "gpt3-13b"},
    **{"dolly-v2-3b": "pythia-2.8b", "dolly-v2-7b": "pythia-6.9b", "dolly-v2-12b": "pythia-12b"},
    **{"codegemma-2b": "gemma-2b", "codegemma-7b": "gemma-7b", "phi-3.5-mini": "phi-3-mini"},
    **{"olmo-2-0425-1b": "olmo-2-1b", "olmo-2-1124-7b": "olmo-2-7b"},
    **{"olmo-2-1124-13b": "olmo-2-13b", "olmo-2-0325-32b": "olmo-2-32b"},
    **{"olmo-3-1025-7b": "olmo-3-7b", "olmo-3-1125-32b": "olmo-3-32b"},
    **{f"granite-3.{minor}-{size}": f"granite-3.1-{size}" for minor in (0, 2, 3) for size in ("2b", "8b")},
    **{"aya-23-35b": "command-r", "aya-expanse-8b": "aya-23-8b", "aya-expanse-32b": "command-r-08-2024"},
    **{"glm-4.6": "glm-4.5", "glm-4.7": "glm-4.5", "glm-5.1": "glm-5", "chatglm3-6b": "chatglm2-6b"},
    # Their vision towers of 0.6 billion beside.
    **{f"qwen3-vl-{size}": f"qwen3-{size}" for size in ("8b", "32b", "30b-a3b", "235b-a22b")},
    **{"llama-3-405b": "llama-3.1-405b"},
    **{"qwen3.6-27b": "qwen3.5-27b", "qwen3.6-35b-a3b": "qwen3.5-35b-a3b"},
    **{f"minimax-m2.{minor}": "minimax-m2" for minor in (1, 5, 7)},
    **{f"kimi-k2.{minor}": "kimi-k2" for minor in (5, 6, 7)},
    **{"nemotron-3-nano-30b-a3b": "nemotron-3-nano", "nemotron-3-super-120b-a12b": "nemotron-3-super"},
    **{"nemotron-3-ultra-550b-a55b": "nemotron-3-ultra"},
    **{"nemotron-3.5-lightning": "nemotron-3-nano", "nemotron-3.5-lightning-30b-a3b": "nemotron-3-nano"},
    **{"llama-4-scout-17b-16e": "llama-4-scout", "llama-4-maverick-17b-128e": "llama-4-maverick"},
    **{"internlm2.5-7b": "internlm2-7b", "internlm2.5-20b": "internlm2-20b"},
}
"""Names of models whose layers and widths are another's, to a few words of the vocabulary."""

KNOWN_CONFIGS: dict[str, Config] = {
    **{**_OF_LLAMA, **_OF_MISTRAL, **_OF_QWEN, **_OF_DEEPSEEK, **_OF_GPT, **_OF_OTHERS},
}
KNOWN_CONFIGS |= {name: KNOWN_CONFIGS[other] for name, other in _SAME_SIZES.items()}
# Of "qwen3-235b-a22b" people say the first size alone.
_SHORT = {re.sub(r"(?<=\db)-a[\d.]+b$", "", name): name for name in KNOWN_CONFIGS}
_SHORT = {short: name for short, name in _SHORT.items() if short not in KNOWN_CONFIGS}
KNOWN_CONFIGS |= {short: KNOWN_CONFIGS[name] for short, name in _SHORT.items()}

STAND_INS = frozenset(
    {
        *("nemotron-8b", "nemotron-22b", "phi-1.5", "phi-2", "deepseek-moe-16b", "dbrx", "grok-1"),
        *("falcon-7b", "command-r-plus", "stablelm-2-12b"),
        *("qwen-1.8b", "qwen-7b", "qwen-14b", "qwen-72b"),
        *("gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-31b"),
        *("llama-4-scout", "llama-4-maverick"),
        *("chatglm2-6b", "chatglm3-6b", "glm-130b", "megatron-8.3b", "turing-nlg-17b", "mt-nlg-530b"),
        *("baichuan-7b", "baichuan-13b", "baichuan2-7b", "baichuan2-13b"),
        *("internlm-7b", "internlm2-1.8b", "internlm2-7b", "internlm2-20b"),
        *("exaone-3.5-2.4b", "exaone-3.5-7.8b", "exaone-3.5-32b"),
        *("qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "qwen3.6-27b", "qwen3.6-35b-a3b"),
        *("qwen3-vl-8b", "qwen3-vl-32b", "qwen3-vl-30b-a3b", "qwen3-vl-235b-a22b"),
        *("mimo-7b", "kimi-k2", "kimi-k2.5", "kimi-k2.6", "kimi-k2.7"),
        *(short for short, name in _SHORT.items() if name.startswith(("qwen3.5", "qwen3.6", "qwen3-vl"))),
    }
)
"""Known names whose sizes are written as another family's, near enough for memory and time: their real configurations
have another model_type, and their layers other names."""

PREDICT_FURTHER = frozenset(
    {
        *("deepseek-v3", "deepseek-r1", "deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro", "mimo-7b"),
        *("glm-4.5", "glm-4.5-air", "glm-4.6", "glm-4.7", "glm-4.7-flash", "glm-5", "glm-5.1", "glm-5.2"),
        *(name for name in KNOWN_CONFIGS if name.startswith(("nemotron-3-super", "nemotron-3-ultra", "nemotron-3.5-"))),
    }
)
"""Known names whose configurations state one layer for a further token (num_nextn_predict_layers), of which
transformers makes nothing."""

BESIDE_TOWERS = frozenset(
    name for name in KNOWN_CONFIGS if name.startswith(("qwen3-vl", "kimi-k2.5", "kimi-k2.6", "kimi-k2.7"))
)
"""Known names of what sees too, planned by `predict` as the language model that most of it is."""
