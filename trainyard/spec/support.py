"""Which layouts the trainer runs for which models: one set of rules, asked by the trainer and by the planner.

What is verified for a model family is measured by the parity suite and printed in docs/support.md. An obstacle is one
line that names the field to change; None: there is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard.spec.job import ParallelismSpec
from trainyard.spec.words import counted

TENSOR_FAMILIES = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "qwen2", "qwen3"),
        "qwen3_moe",
    }
)
"""Model types whose matrices are cut in the parity suite: what is proposed to a person is of these."""

STAGE_FAMILIES = frozenset(
    {
        *(
            "afmoe",
            "axk2",
            "bailing_hybrid",
            "bamba",
            "deepseek_v32",
            "deepseek_v4",
            "doge",
            "dots3_note_text",
            "falcon_h1",
        ),
        *("falcon_mamba", "flint", "gemma4_text", "gemma4_unified_text", "glm_moe_dsa", "granite_swa"),
        *(
            "granitemoe_swa",
            "granitemoehybrid",
            "hy_v4",
            "inkling_text",
            "jamba",
            "kimi_linear",
            "lfm2",
            "lfm2_moe",
            "lfm3",
        ),
        *("llama4_text", "mamba", "mamba2", "mimo_v2_flash", "minimax", "minimax_m3_vl_text", "nemotron_h"),
        *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma"),
    }
)
"""Model types with layers that carry a state along the sequence (state spaces, linear attention, convolutions), choose
tokens, or are of other new kinds: a stage has each sequence whole, so that it may have any of them."""

PIPELINE_FAMILIES = (
    TENSOR_FAMILIES
    | STAGE_FAMILIES
    | {
        *("apertus", "arcee", "aria_text", "axk1", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe"),
        *("cwm", "dbrx", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon"),
        *("flex_olmo", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
        *("gpt_bigcode", "gpt_neo", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoeshared", "helium"),
        *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2"),
        *("jetmoe", "kolibri1", "laguna", "mellum", "minicpm3", "minimax_m2", "ministral", "ministral3", "mpt"),
        *("nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe"),
        *("qwen2_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
    }
)
"""Models whose blocks hand one tensor of hidden states from each to the next, and nothing else that depends on tokens,
so that a forward pass may be interrupted between any two. Each is tried at two ranks (`test_cut_families`)."""

_DELTA_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_STATE_SPACE_HEADS = {"mamba_n_heads": 128, "mamba_n_groups": 1}
STATE_HEADS: Mapping[str, Mapping[str, int | str]] = {
    "bailing_hybrid": {"num_attention_heads": 32},
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _STATE_SPACE_HEADS),
    "kimi_linear": {"linear_num_heads": 32},
    "lfm2": {"hidden_size": 2560},
    "lfm2_moe": {"hidden_size": 2048},
    "lfm3": {"hidden_size": 2048},
    "mamba2": {"num_heads": 128, "n_groups": 8},
    "nemotron_h": {"mamba_num_heads": 128, "n_groups": 8},
    "olmo_hybrid": dict.fromkeys(_DELTA_HEADS, "num_attention_heads"),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA_HEADS),
}
"""Model types whose layers with a state along the sequence (delta rules, state spaces of Mamba-2's kind, short
convolutions) ranks divide by heads while they see whole sequences (`strategies/context_states.py` of the trainer) ->
the fields that number these heads (or channels), and what transformers (5.23) takes where nothing is stated, a number
or another field."""

_SHARED_HEADS = frozenset({"mamba_n_groups", "n_groups"})
"""Fields of STATE_HEADS of which several ranks may have the same one."""

CONTEXT_FAMILIES = (
    (PIPELINE_FAMILIES - STAGE_FAMILIES) - {"bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt"}
) | STATE_HEADS.keys()
"""Model types whose tokens meet in attention through transformers' AttentionInterface, and beside it in layers of
STATE_HEADS at most (each tried as above).

Another layer with a state would silently see a cut sequence, so others are refused; of those without one that are left
out here the attention is written out in their own code.
"""

HANDED_ALONG: Mapping[str, Mapping[str, int | str]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "glm_moe_dsa": {"indexer_types": 0},
    "hy_v4": {"indexer_types": "shared"},
}
"""Model type -> fields by which layers have more than hidden states from those before (parts of the embedding, keys and
values, chosen tokens), and what transformers (5.23) takes where nothing is stated; 0: each layer has its own."""

OTHER_TENSOR_FAMILIES = frozenset(
    {
        *("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm"),
        *("glm4", "gptj", "granite", "helium", "hyperclovax", "internlm3", "iquestcoder", "jais2", "minicpm3"),
        *("ministral", "ministral3", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3"),
        *("qwen3_5_text", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma", "youtu"),
    }
)
"""Model types whose matrices are cut by transformers' plan or one of the trainer's, each tried at two ranks alone
(`test_more_families`)."""

OWN_HEAD_NORMS: Mapping[str, str] = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}
"""Model type -> the field by which norms of queries and keys have weights of each head's own, which ranks don't cut."""

EXPERT_FAMILIES = frozenset(
    {
        *("afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3"),
        *("deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo"),
        *("flint", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe"),
        *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4"),
        *("inkling_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash"),
        *("minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe"),
        *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "solar_open", "zaya"),
    }
)
"""Model types with packed experts that are called as (hidden states, chosen experts, their weights).

Each is tested at two ranks, in float64: those of TENSOR_FAMILIES in the parity suite, with every other axis, the
others by `tests/trainer/test_expert_families.py`."""

UNSPREAD_EXPERTS: Mapping[str, str] = {
    "dbrx": "they are rows of one flat matrix",
    "doge": "they are rows of embeddings, looked up token by token",
    "jetmoe": "its attention's heads are experts too, and all are given rows that are sorted already",
    "llama4_text": "they are given every token, those that were not chosen with zeros, and no choice",
    "longcat_flash": "some of them are no weights but hand their tokens on",
}
"""Mixtures whose experts take another call, or lie in memory otherwise -> how."""

EXPERT_TENSOR_FAMILIES = frozenset(
    {
        *("afmoe", "aria_text", "axk2", "cohere2_moe", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
        *("flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa"),
        *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1", "mellum", "mimo_v2_flash", "minimax"),
        *("minimax_m2", "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "solar_open"),
    }
)
"""Mixtures whose attention and shared experts are cut beside their experts, each tried at two ranks, and with `expert`
at four (`tests/trainer/test_expert_families.py`). In others a norm of what is to be summed (A.X K1), a recurrence,
noise, or a block around the experts (Gemma 4) stands in the way."""

DOCUMENT_FAMILIES = frozenset(
    {
        *("apertus", "arcee", "aria_text", "axk1", "beam", "bitnet", "codegen", "cohere", "cohere2"),
        *("cohere2_moe", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5"),
        *("ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text"),
        *("gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2"),
        *("gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granitemoe"),
        *("granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax"),
        *("internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "llama", "longcat_flash"),
        *("mellum", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral"),
        *("modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon"),
        *("phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
        *("solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
    }
)
"""Model types that keep packed documents apart when position ids restart at each.

transformers (5.23, masking_utils) finds documents in position ids and masks the others, in models that make their mask
there (of two whose masks lack the ids trainer/models/attention.py tells them) and see other tokens in attention alone.
A model that does not would silently read across documents (state-space, convolution and linear-attention layers carry
text on whatever the mask says), so only those that were tried are let in:
`tests/trainer/test_packing.py` compares each with its documents run one by one."""

NO_RECOMPUTATION = frozenset(
    {"cpmant", "ctrl", "gpt_neox_japanese", "jetmoe", "openai-gpt", "reformer", "xlm", "xlnet"}
)
"""Model types whose classes in transformers (5.23) can't compute their blocks again."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""config.layer_types that look through a mask."""

ROUTER_FAMILIES = frozenset(
    {
        *("ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
        *("granitemoeshared", "jamba", "laguna", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe"),
        *("qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
    }
)
"""Model types whose router logits are tested; each gives one (tokens, experts) tensor a layer."""

ROUTER_BIAS_FAMILIES = frozenset(
    {
        *("axk1", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        *("hy_v3", "mimo_v2_flash", "minimax_m2", "solar_open"),
    }
)
"""Model types whose routers choose by a bias that no gradient reaches, tested with optimizer.router_bias_rate."""

_ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
MADE_CAUSAL_BY: Mapping[str, tuple[str, object] | None] = {
    **dict.fromkeys(_ENCODERS, ("is_decoder", True)),
    "xlm": ("causal", True),
    "xlnet": ("attn_type", "uni"),
    "cpmant": None,
}
"""Model types of which transformers (5.23) has a class for causal language models whose tokens see later ones all the
same, unless a field has this value; None: always."""

LAYER_DROPS = ("layerdrop", "decoder_layerdrop")
"""Fields with the share of a model's blocks that are skipped in a pass of training, drawn on each rank by itself."""

TWO_STAGES = frozenset({"interleaved_1f1b", "zero_bubble"})
"""Pipeline schedules in which a rank has two stages."""


QUANTIZED_BLOCK = 64
"""Weights that share a scale, at most."""

QUANTIZED_CUTS = 8
"""Ranks, at most, that a row of 4-bit weights can always be cut for between blocks."""


MOST_EXPERT_PADDING = 1 / 8
"""Of a layer's experts: up to it FSDP cuts them by number, and pads that; beyond it the trainer cuts inside of each,
which costs a copy of a unit's experts while they are gathered."""


def quantized_block(row_length: int) -> int:
    """Weights a block: 64, or the largest power of two of which an eighth of the row is a multiple; at least 2, a byte.

    11008 has blocks of 32, for 43 of them in an eighth; 4096, 14336 and most others have 64.
    """
    return max(2, min(QUANTIZED_BLOCK, (row_length & -row_length) // QUANTIZED_CUTS))


@dataclass(frozen=True)
class ModelFacts:
    """What rules ask of a language model. The trainer takes it from transformers' configuration, the planner from what
    a job or a folder states of one; what isn't known makes no rule object."""

    model_type: str | None = None
    num_layers: int | None = None
    num_experts: int = 0
    """Routed ones a layer."""
    hidden_size: int | None = None
    split_sizes: Mapping[str, int] = field(default_factory=dict)
    """The configuration's name -> size, of what tensor parallelism divides."""
    row_widths: Mapping[str, int] = field(default_factory=dict)
    """What goes into a row-wise matrix -> its width."""
    layer_types: frozenset[str] = frozenset()
    widest_head: int | None = None
    """Of a query in any layer, with the part that carries the position."""
    max_positions: int | None = None
    """None where a longer sequence is no matter."""
    balances_router: bool = False
    """Whether the configuration asks for the router's auxiliary loss."""
    router_noise: float = 0.0
    """router_jitter_noise: what goes into the router is multiplied by 1 give or take as much, in training."""
    norms_heads: bool = False
    """A field of OWN_HEAD_NORMS: queries and keys are normalized, in its model type by weights of each head's own."""
    has_query_latent: bool | None = None
    """Of latent attention, whether queries come through a latent as well (q_lora_rank); None: it has none at all."""
    handed_along: str | None = None
    """The setting of HANDED_ALONG by which layers need more of each other than hidden states; None: there is none."""
    causal_if: str | None = None
    """What would keep tokens from seeing later ones, which they do; None: they don't."""
    layer_drop: str | None = None
    """A field of LAYER_DROPS with its value; None: every block is computed in every pass."""
    state_heads: Mapping[str, int] = field(default_factory=dict)
    """Fields of STATE_HEADS with their values, of a model type that is there."""


def layer_drop(stated: Callable[[str], Any]) -> str | None:
    """See ModelFacts. `stated`: the configuration's value of a field, None where it says nothing."""
    for name in LAYER_DROPS:
        share = stated(name)
        if isinstance(share, int | float) and share > 0:
            return f"{name}: {share:g}"
    return None


def state_heads(model_type: str | None, stated: Callable[[str], Any]) -> dict[str, int]:
    """See ModelFacts. `stated`: the configuration's value of a field, None where it says nothing."""
    found = {}
    for name, usual in STATE_HEADS.get(model_type or "", {}).items():
        value = stated(name)
        if value is None and name == "linear_num_heads":  # Kimi Linear's, as it is published
            nested = stated("linear_attn_config")
            value = nested.get("num_heads") if isinstance(nested, Mapping) else None
        if value is None:
            value = stated(usual) if isinstance(usual, str) else usual
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = value
    return found


def causal_if(model_type: str | None, stated: Callable[[str], Any]) -> str | None:
    """See ModelFacts. `stated`: the configuration's value of a field, None where it says nothing."""
    for field_name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):  # not "vision" (Gemma 4)
        if stated(field_name) is (not causal):
            return f"set {field_name}: {str(causal).lower()} in its configuration"
    if model_type is None or model_type not in MADE_CAUSAL_BY:
        return None
    setting = MADE_CAUSAL_BY[model_type]
    if setting is None:
        return "use another model"
    name, value = setting
    written = str(value).lower() if isinstance(value, bool) else value
    return None if stated(name) == value else f"set {name}: {written} in its configuration, or use another model"


def handed_along(model_type: str | None, stated: Callable[[str, Any], Any]) -> str | None:
    """See ModelFacts. `stated`: the configuration's value of a field, its second argument where it says nothing."""
    for name, usual in HANDED_ALONG.get(model_type or "", {}).items():
        value = stated(name, None)
        if value is None:
            value = _scheduled_indexers(stated) if model_type == "glm_moe_dsa" else usual
        if isinstance(value, list | tuple):  # a word a layer
            value = "shared" if "shared" in value else None
        if value:
            return f"{name}: {value}"
    return None


def _scheduled_indexers(stated: Callable[[str, Any], Any]) -> str | None:
    """What GLM-5's configuration makes of a schedule where it names no layers' indexers (transformers 5.23)."""
    pattern, every = stated("index_topk_pattern", None), stated("index_topk_freq", None)
    is_shared = "S" in pattern or "shared" in pattern if pattern else isinstance(every, int) and every > 1
    return "shared" if is_shared else None


def _listed(families: frozenset[str]) -> str:
    """Where a refused person finds them: dozens of names are no line that anybody reads."""
    return f"one of the {len(families)} model types that docs/support.md lists for it"


def _uncut(model: ModelFacts) -> str | None:
    """Why the model is not cut into stages, however many."""
    if model.model_type not in PIPELINE_FAMILIES:
        return (
            f"{model.model_type} is not cut into stages by this trainer; set it to 1 and use data_shard, or take"
            f" {_listed(PIPELINE_FAMILIES)}"
        )
    if model.handed_along is not None:
        return (
            f"layers of {model.model_type} with {model.handed_along} need more of each other than hidden states, which"
            " are all that stages hand on; set it to 1 and use data_shard"
        )
    return None


def pipeline_obstacle(
    model: ModelFacts, layout: ParallelismSpec, *, num_micro_batches: int, recompute: str
) -> str | None:
    """Why a model and a batch can't go through the layout's pipeline (of more than one stage)."""
    asked, schedule = f"parallelism.pipeline: {layout.pipeline}", layout.pipeline_schedule
    if (reason := _uncut(model)) is not None:
        return f"{asked}: {reason}"
    num_layers = model.num_layers
    num_stages = layout.pipeline * (2 if schedule in TWO_STAGES else 1)
    if num_layers is not None and num_layers < num_stages:
        return (
            f"{asked}: {schedule} makes {num_stages} stages, but the model has"
            f" {counted(num_layers, 'layer')}; lower it, or use 1f1b, which makes one stage a rank"
        )
    count = num_micro_batches
    if count < layout.pipeline:
        return (
            f"{asked}: needs at least as many micro-batches a step, there are {count};"
            " lower training.micro_batch_size or raise training.global_batch_size"
        )
    num_rounds = count // layout.pipeline
    if schedule == "interleaved_1f1b" and count % num_rounds:
        return (
            f"{asked}: interleaved_1f1b takes {count} micro-batches a step in {num_rounds} rounds (one for every"
            f" {layout.pipeline}, rounded down), which must be of equal size: make them a multiple of {layout.pipeline}"
            " by training.micro_batch_size or training.global_batch_size, or use 1f1b"
        )
    if schedule == "zero_bubble" and recompute != "none":
        return (
            f"parallelism.pipeline_schedule: zero_bubble computes two backward passes of each stage, and can't with"
            f" training.activation_checkpointing: {recompute}; set that to none, or use 1f1b"
        )
    return None


def context_obstacle(model: ModelFacts, layout: ParallelismSpec, *, sequence_length: int, attention: str) -> str | None:
    """Why a model's sequences can't be cut over the layout's context axis (of more than one rank)."""
    degree = layout.context
    if model.model_type not in CONTEXT_FAMILIES:
        return (
            f"parallelism.context: {degree} is not verified for model_type {model.model_type}: set it to 1, or use"
            f" {_listed(CONTEXT_FAMILIES)}"
        )
    if attention not in ("auto", "sdpa"):
        return (
            f"model.attention: {attention} is not what parallelism.context {degree} computes, which is sdpa over"
            " exchanged keys and values: set it to auto, or context to 1"
        )
    if sequence_length % (2 * degree):
        below = max(sequence_length - sequence_length % (2 * degree), 2 * degree)
        return (
            f"parallelism.context: {degree} cuts a sequence into {2 * degree} equal pieces, but data.sequence_length is"
            f" {sequence_length}: use {below}, or another multiple of {2 * degree}"
        )
    return _undivided_heads(model.state_heads, layout)


def _undivided_heads(heads: Mapping[str, int], layout: ParallelismSpec) -> str | None:
    """Of layers with a state along the sequence, whose heads are divided over the context axis inside of tensor's."""
    ranks = layout.context * layout.tensor
    both = f" x tensor {layout.tensor}" if layout.tensor > 1 else ""
    for name, count in heads.items():
        told = "linear_attn_config.num_heads" if name == "linear_num_heads" else name
        if count < 1:
            return f"parallelism.context: {layout.context}: model.config.{told} must be at least 1 (given: {count})"
        can_share = name in _SHARED_HEADS
        if count % ranks and not (can_share and ranks % count == 0):
            product = "so that the product is" if both else "use"
            return (
                f"parallelism.context: {layout.context}{both} does not divide the model's {told} ({count}), over which"
                f" layers with a state along the sequence are spread: {product} a divisor{' or a multiple' * can_share}"
                " of it"
            )
    return None


def expert_obstacle(model_type: str, num_experts: int, layout: ParallelismSpec) -> str | None:
    """Why a model's experts can't be spread over the layout's expert and tensor axes (one of them above 1)."""
    degree = layout.expert * layout.tensor
    if layout.pipeline > 1 and layout.pipeline_schedule == "zero_bubble":
        return (
            "parallelism.pipeline_schedule: zero_bubble takes weight gradients apart from the others, which experts on"
            f" {degree} ranks don't survive: use 1f1b, or set expert and tensor to 1"
        )
    # Tensor parallelism alone divides experts too: what is named is what the job set.
    asked = f"parallelism.expert: {layout.expert}" if layout.expert > 1 else f"parallelism.tensor: {layout.tensor}"
    if (reason := UNSPREAD_EXPERTS.get(model_type)) is not None:
        return (
            f"{asked}: {model_type}'s experts are not put on different ranks: {reason}; set it to 1 and use data_shard"
        )
    if model_type not in EXPERT_FAMILIES:
        return (
            f"{asked} needs a mixture of experts that is verified for it, model_type"
            f" {model_type} is not: set it to 1, or use {_listed(EXPERT_FAMILIES)}"
        )
    if num_experts % degree:
        both = f" x tensor {layout.tensor}" if layout.expert > 1 and layout.tensor > 1 else ""
        return f"{asked}{both} does not divide the model's {counted(num_experts, 'expert')}: use a divisor"
    return None


def tensor_obstacle(model: ModelFacts, degree: int, *, is_quantized: bool) -> str | None:
    """Why a model's matrices can't be cut over so many ranks (more than one). `is_quantized`: they have 4 bits."""
    known = TENSOR_FAMILIES | OTHER_TENSOR_FAMILIES | EXPERT_TENSOR_FAMILIES
    if model.model_type is not None and model.model_type not in known:
        return (
            f"parallelism.tensor: {degree} is not verified for model_type {model.model_type}: set it to 1 and use"
            f" data_shard, or use {_listed(known)}"
        )
    if model.router_noise:
        return (
            f"parallelism.tensor: {degree}: model.config.router_jitter_noise: {model.router_noise} is not implemented"
            " with it, since all tensor ranks would have to draw the same noise; set it to 0, or tensor to 1"
        )
    if model.norms_heads and (name := OWN_HEAD_NORMS.get(model.model_type or "")) is not None:
        return (
            f"parallelism.tensor: {degree}: model.config.{name} is not implemented with it in {model.model_type}, where"
            " each head's norm has weights of its own; set tensor to 1 and use data_shard"
        )
    for name, size in model.split_sizes.items():
        if size % degree:
            return f"parallelism.tensor: {degree} does not divide the model's {name} ({size}); choose a divisor of it"
    for name, width in model.row_widths.items() if is_quantized else ():
        if width // degree % quantized_block(width):
            return (
                f"parallelism.tensor: {degree} cuts the model's {name} ({width}) inside a block of"
                f" {quantized_block(width)} 4-bit weights; choose a smaller degree, or model.adapter.kind: lora"
            )
    return None
