"""Names of causal language models and of their layers, for refusals where transformers isn't installed.

Tests hold both against the transformers of the image.
"""

CAUSAL_LM_TYPES = frozenset(
    {
        *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "beam"),
        *("bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot"),
        *("blenderbot-small", "bloom", "blt", "camembert", "codegen", "cohere", "cohere2", "cohere2_moe"),
        *("cohere_compass_text", "cpmant", "ctrl", "cwm", "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3"),
        *("deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1", "dots3_note", "dots3_note_text", "electra"),
        *("emu3", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1"),
        *("falcon_mamba", "flex_olmo", "flint", "fuyu", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
        *("gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_text", "gemma4_unified", "gemma4_unified_assistant"),
        *("gemma4_unified_text", "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2"),
        *("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite"),
        *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium"),
        *("hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling2_text"),
        *("inkling_text", "internlm3", "iquestcoder", "jais2", "jamba", "jetmoe", "kimi_linear", "kolibri1"),
        *("laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4", "llama4_text", "longcat_flash", "mamba", "mamba2"),
        *("marian", "mbart", "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2"),
        *("minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "mllama", "modernbert-decoder"),
        *("moshi", "moss_transcribe_diarize", "mpt", "musicgen", "musicgen_melody", "mvp", "nanochat", "nemotron"),
        *("nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "pegasus"),
        *("persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "plbart", "prophetnet", "qwen2", "qwen2_moe"),
        *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
        *("qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer", "rembert", "roberta", "roberta-prelayernorm"),
        *("roc_bert", "roformer", "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr"),
        *("vaultgemma", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "youtu"),
        *("zamba", "zamba2", "zaya"),
    }
)
"""What `model.config.model_type` may be of a causal_lm job: the types of transformers' AutoModelForCausalLM (5.23)."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
_LLAMA = frozenset({*_ATTENTION, "gate_proj", "up_proj", "down_proj"})
_LATENT = frozenset({"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "lm_head", "gate_proj", "up_proj", "down_proj"})

POSITION_NAMES: dict[str, str] = {
    **dict.fromkeys(("codegen", "ctrl", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"), "n_positions"),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), "model_max_length"),
    "dbrx": "max_seq_len",
    "rwkv": "context_length",
}
"""Model type -> its own name for what others call max_position_embeddings, which it understands too."""

LINEAR_LAYERS: dict[str, frozenset[str]] = {
    "deepseek_v2": _LATENT | {"q_proj", "q_a_proj", "q_b_proj"},
    "deepseek_v3": _LATENT | {"q_proj", "q_a_proj", "q_b_proj"},
    "gemma": _LLAMA,
    "gpt2": frozenset({"c_attn", "c_proj", "c_fc", "lm_head"}),
    "gpt_neox": frozenset({"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "lm_head"}),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": frozenset(_ATTENTION),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
}
"""Model type -> names of linear layers that one of it may have, which an adapter can name."""

HEADS = frozenset({"lm_head", "embed_out"})
"""The output projection: once in a model, not in each layer."""


def position_names(model_type: str | None) -> tuple[str, ...]:
    """What a configuration may call its number of positions; of two that are stated transformers takes the first.

    Another type's name for it (n_positions in a Llama's) is one that transformers keeps, and nothing looks at.
    """
    own = POSITION_NAMES.get(model_type or "")
    return ("max_position_embeddings",) if own is None else ("max_position_embeddings", own)
