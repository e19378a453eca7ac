"""Which models keep packed documents apart when position ids restart at each.

transformers (5.23, masking_utils) finds documents in position ids and masks the others, in models that make their mask
there and see other tokens in attention alone. A model that doesn't would silently read across documents, so only those
that were tried are let in: `tests/trainer/test_packing.py` compares each with its documents run one by one.
"""

from transformers import PretrainedConfig

from trainyard.errors import InputError

FAMILIES = frozenset(
    {
        *("apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4"),
        *("flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox"),
        *("granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "ministral", "mistral"),
        *("mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2"),
        *("qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Model types. State-space, convolution and linear-attention layers carry text across whatever the mask says."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""config.layer_types that look through a mask."""


def check(config: PretrainedConfig) -> None:
    """InputError, in one line, unless a model of this configuration keeps packed documents apart."""
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if config.model_type in FAMILIES and not others:
        return
    what = f"has layers ({', '.join(sorted(others))}) that see through it" if others else "is not verified for it"
    raise InputError(
        f"data.document_masks: packed documents are kept apart by a mask, and model_type {config.model_type} {what}:"
        " set data.document_masks to false (documents then see each other), or data.packing to false"
    )
