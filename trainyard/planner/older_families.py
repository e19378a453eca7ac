"""Readers of families that came before Llama's, most of whose attention transformers writes out: a configuration to a
`ModelShape` each."""

from collections.abc import Callable, Mapping
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.config_values import Config, NotCoveredError, listed, number
from trainyard.planner.family_parts import activation_tensors, four_biases, windows
from trainyard.planner.shapes import ModelShape
from trainyard.spec.model_types import position_names

LEARNED_POSITIONS = {"gpt2": 1024, "gpt_bigcode": 1024, "gpt_neo": 2048, "opt": 2048}
"""Model type -> positions in its table where its configuration states none."""


def _older_sizes(config: Config, *, hidden: int, layers: int, heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    """Sizes by GPT-2's names or the common ones, of which transformers takes the latter where both are stated. All
    heads have keys and values of their own; the feed-forward block is four times as wide as the rest, if nothing else
    is stated."""
    width = number(config, hidden, "hidden_size", "n_embd")
    count = number(config, heads, "num_attention_heads", "n_head")
    return {
        "layers": number(config, layers, "num_hidden_layers", "n_layer"),
        "hidden": width,
        "ffn": number(config, 4 * width, "n_inner"),
        "heads": count,
        "kv_heads": count,
        "head_dim": width // max(count, 1),
        "vocab": number(config, vocab, "vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", tied)),
        "gated_mlp": False,
        "norm": "layer",
    }


def learned_positions(config: Config) -> int:
    """Rows of the table of positions, as stated or by the family's default."""
    model_type = str(config.get("model_type"))
    return number(config, LEARNED_POSITIONS[model_type], *position_names(model_type))


def _gpt2(config: Config) -> ModelShape:
    if config.get("add_cross_attention", False):
        raise NotCoveredError("model.config: a gpt2 with add_cross_attention is not covered")
    return ModelShape(
        **_older_sizes(config, hidden=768, layers=12, heads=12, vocab=50257, tied=True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=learned_positions(config),
        fused_qkv=True,
        whole_qkv=True,
        activation_tensors=activation_tensors(config.get("activation_function", "gelu_new")),
        dropout=bool(config.get("resid_pdrop", 0.1)),
    )


def _gpt_bigcode(config: Config) -> ModelShape:
    """SantaCoder and StarCoder: one head of keys and values for all queries."""
    sizes = _older_sizes(config, hidden=768, layers=12, heads=12, vocab=50257, tied=True)
    return ModelShape(
        **{**sizes, "kv_heads": 1 if config.get("multi_query", True) else sizes["heads"]},
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=learned_positions(config),
        fused_qkv=True,
        dropout=bool(config.get("resid_pdrop", 0.1)),
        activation_tensors=activation_tensors(config.get("activation_function", "gelu_pytorch_tanh")),
    )


def _opt(config: Config) -> ModelShape:
    sizes = _older_sizes(config, hidden=768, layers=12, heads=12, vocab=50272, tied=True)
    if number(config, sizes["hidden"], "word_embed_proj_dim") != sizes["hidden"]:
        raise NotCoveredError("model.config: an OPT whose word_embed_proj_dim differs from hidden_size is not covered")
    if not config.get("layer_norm_elementwise_affine", True):
        raise NotCoveredError("model.config: an OPT without layer_norm_elementwise_affine is not covered")
    is_before = bool(config.get("do_layer_norm_before", True))
    return ModelShape(
        **{**sizes, "ffn": number(config, 3072, "ffn_dim")},
        **four_biases(config, default=True, name="enable_bias"),
        norms_after=not is_before,
        final_norm=is_before and not config.get("_remove_final_layer_norm", False),
        mlp_bias=bool(config.get("enable_bias", True)),
        dropout=bool(config.get("dropout", 0.1)),
        activation_tensors=activation_tensors(config.get("activation_function", "relu")),
        # OPT's position table starts at an offset of 2.
        learned_positions=learned_positions(config) + 2,
    )


def _gptj(config: Config) -> ModelShape:
    """GPT-J and CodeGen: one norm for attention and feed-forward block; the head has a bias, attention has none."""
    return ModelShape(
        **_older_sizes(config, hidden=4096, layers=28, heads=16, vocab=50400, tied=False),
        norms_per_layer=1,
        parallel_residual=True,
        fused_qkv=config.get("model_type") == "codegen",
        wide_scores=True,
        mlp_bias=True,
        head_bias=True,
        dropout=bool(config.get("resid_pdrop", 0.0)),
        activation_tensors=activation_tensors(config.get("activation_function", "gelu_new")),
    )


def _local_layers(config: Config, layers: int) -> int:
    """Of GPT-Neo's layers those that see a window: attention_types lists kinds, and how often they come in a row."""
    stated = listed(config, "attention_types")
    named = local = 0
    for run in [[["global", "local"], 12]] if stated is None else stated:
        kinds, times = _run_of_layers(run)
        # Counted and not spelt out: whatever number stands there costs nothing.
        named += len(kinds) * times
        local += kinds.count("local") * times
    if named != layers:
        raise InputError(f"model.config.attention_types: must name a kind for each of {layers} layers (given: {named})")
    return local


def _run_of_layers(run: Any) -> tuple[list[Any], int]:
    if isinstance(run, list | tuple) and len(run) == 2:
        kinds, times = run
        is_count = isinstance(times, int) and not isinstance(times, bool) and times >= 0
        if is_count and isinstance(kinds, list | tuple) and all(kind in ("global", "local") for kind in kinds):
            return list(kinds), times
    raise InputError(
        f"model.config.attention_types: must be a list of [kinds (global or local), how often] (given: {run!r})"
    )


def _gpt_neo(config: Config) -> ModelShape:
    renamed = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "n_inner": "intermediate_size"}
    own = {common: config.get(name) for common, name in renamed.items() if config.get(common) is None}
    sizes = _older_sizes({**config, **own}, hidden=2048, layers=24, heads=16, vocab=50257, tied=True)
    return ModelShape(
        **sizes,
        **windows(number(config, 256, "window_size"), _local_layers(config, sizes["layers"])),
        wide_scores=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=learned_positions(config),
        dropout=bool(config.get("resid_dropout", 0.0)),
        activation_tensors=activation_tensors(config.get("activation_function", "gelu_new")),
    )


def _bloom(config: Config) -> ModelShape:
    """Its embedding has a norm; n_embed is an old name for hidden_size, which transformers takes first."""
    renamed = {**config, "hidden_size": number(config, 64, "n_embed", "hidden_size"), "n_inner": None}
    return ModelShape(
        **_older_sizes(renamed, hidden=64, layers=2, heads=8, vocab=250880, tied=True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        fused_qkv=True,
        alibi=True,
        adds_scores=True,
        embedding_norm=True,
        dropout=bool(config.get("hidden_dropout", 0.0)),
    )


def _mpt(config: Config) -> ModelShape:
    """No bias anywhere. transformers reads of attn_config what is named here, and always makes ALiBi."""
    attention = config.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise InputError(f"model.config.attn_config: must be a mapping (given: {attention!r})")
    names = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    own = {common: config.get(name) for common, name in names.items() if config.get(common) is None}
    renamed = {**config, **own, "n_inner": None}
    return ModelShape(
        **_older_sizes(renamed, hidden=2048, layers=24, heads=16, vocab=50368, tied=True),
        has_norm_biases=False,
        fused_qkv=True,
        alibi=True,
        clips_qkv=bool(attention.get("clip_qkv")),
        dropout=bool(attention.get("attn_pdrop", 0)),
    )


def _falcon(config: Config) -> ModelShape:
    """Falcon in its new architecture (40B, 180B, Falcon 2), whose keys and values are copied for every query, and in
    its old one where all heads have keys of their own."""
    is_new = bool(config.get("new_decoder_architecture", False))
    if config.get("alibi", False):
        raise NotCoveredError("model.config: a falcon with alibi is not covered: its mask is as large as its scores")
    if not is_new and config.get("multi_query", True):
        raise NotCoveredError(
            "model.config: a falcon of the old architecture with multi_query is not covered: its one head of keys "
            "reaches torch's attention as it is, which no fused kernel takes"
        )
    named = {**config, "n_inner": config.get("ffn_hidden_size")}
    named["hidden_size"] = number(config, 4544, "n_embed", "hidden_size")
    sizes = _older_sizes(named, hidden=4544, layers=32, heads=71, vocab=65024, tied=True)
    if is_new:
        sizes["kv_heads"] = number(config, sizes["heads"], "num_kv_heads")
    is_parallel = bool(config.get("parallel_attn", True))
    norms = config.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    bias = bool(config.get("bias", False))
    return ModelShape(
        **sizes,
        norms_per_layer=2 if norms == 2 or not is_parallel else 1,
        parallel_residual=is_parallel or is_new,
        fused_qkv=True,
        copies_keys=is_new,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        dropout=bool(config.get("hidden_dropout", 0.0)),
        activation_tensors=activation_tensors(config.get("activation", "gelu")),
    )


OLDER_READERS: Mapping[str, Callable[[Config], ModelShape]] = {
    "bloom": _bloom,
    "codegen": _gptj,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "mpt": _mpt,
    "opt": _opt,
}
"""model_type to reader."""
