"""The model that a request to `predict` names, states the sizes of, or both."""

import dataclasses
import math
import re
from typing import Any

from trainyard.errors import InputError
from trainyard.planner.families import (
    checked,
    has_size,
    known_name,
    normal_name,
    says_experts,
    shape_of_known,
    size_of_unknown,
)
from trainyard.planner.kinds import other_kinds
from trainyard.planner.known_models import PREDICT_FURTHER
from trainyard.planner.layout import Engine
from trainyard.planner.request_fields import Fields
from trainyard.planner.request_framework import RECIPES
from trainyard.planner.shapes import ModelShape


def stated_size(fields: Fields) -> float | None:
    """Billions of parameters that an unknown dense model's name states, where nothing else says its size."""
    name = fields.text("model")
    stated = any(fields.given(field) for field in ("params_b", "layers", "hidden", "hybrid_pattern"))
    return None if stated or not name else size_of_unknown(name)


def _with_rows_and_mixture(fields: Fields, shape: ModelShape, base: ModelShape | None) -> ModelShape:
    """Stated positions and products of the head, and the mixture of a known hybrid's layers."""
    for name in ("learned_positions", "head_products"):
        if fields.given(name):
            stated: dict[str, Any] = {name: fields.whole(name, 0, least=0)}
            shape = dataclasses.replace(shape, **stated)
    if base is not None and base.is_hybrid and not fields.given("hybrid_pattern"):
        # A cut or longer one keeps the mixture of its layers.
        share = shape.layers / base.layers
        mixture = {name: round(getattr(base, name) * share) for name in ("mamba_layers", "attention_layers")}
        shape = dataclasses.replace(shape, **mixture)
    if base is not None and base.indexer is not None and shape.layers != base.layers:
        shape = _with_choosing_layers(shape, base.layers)
    return shape


def _with_choosing_layers(shape: ModelShape, of: int) -> ModelShape:
    """Of a cut or longer model that chooses or compresses what it sees, as many of its layers as do so in `of`."""
    assert shape.indexer is not None
    share = shape.layers / of
    indexer = dataclasses.replace(shape.indexer, layers=round(shape.indexer.layers * share))
    compression = shape.compression
    if compression is not None:
        kinds = {name: round(getattr(compression, name) * share) for name in ("chosen_layers", "heavy_layers")}
        compression = dataclasses.replace(compression, **kinds)
    return dataclasses.replace(shape, indexer=indexer, compression=compression)


def _is_label(fields: Fields) -> bool:
    """Whether an unknown model's name is no more than a name: the widths that count are stated beside its depth."""
    name = fields.text("model")
    widths = fields.given("experts") or (fields.given("ffn") and not says_experts(name))
    return widths and known_name(name) is None


def _check_kind(fields: Fields) -> None:
    """InputError for an unknown model's name that says another kind of model than a decoder of the stated sizes."""
    name = fields.text("model")
    if not name or known_name(name) is not None:
        return
    for kind, word in other_kinds(normal_name(name)):
        if any(fields.given(field) for field in kind.fields):
            continue
        stated = f"state {' or '.join(kind.fields)} beside its sizes, or " if kind.fields else ""
        raise InputError(
            f"unknown model {name!r}: is {kind.what} by its name ({word}), for which no plain decoder stands; {stated}"
            "leave model out and state layers, hidden, ffn, heads, kv_heads and vocab of a decoder"
        )


def shape_of(fields: Fields) -> ModelShape:
    """Known sizes, under those that are stated. InputError where neither says how large the model is."""
    _check_kind(fields)
    params = fields.number("params_b") or stated_size(fields)
    has_depth = fields.given("layers") or fields.given("hybrid_pattern")
    has_sizes = has_depth and fields.given("hidden")
    # Of a model cut to fewer layers, the stated size is not the known one's.
    named = fields.given("model") and not (has_sizes and _is_label(fields))
    base = _known_shape(fields, None if has_depth and not has_sizes else params) if named else None
    if base is None and not has_sizes:
        if params is None:
            raise InputError("layers and hidden (or model, or params_b) are needed to know the model's size")
        if says_experts(fields.text("model")):
            raise InputError(
                f"model {fields.text('model')!r}: has experts, and its sizes aren't known; state layers, hidden, "
                "experts, experts_per_token and moe_ffn"
            )
        base = _shape_of_size(params * 1e9)
    hidden = fields.whole("hidden", base.hidden if base else 0)
    heads = fields.whole("heads", base.heads if base else max(1, hidden // 128))
    stated_ffn = fields.whole("ffn", base.ffn if base else 0)
    # Two projections of 4 x hidden, or three of less: the width tells which, where nobody says.
    gated = fields.flag("gated_mlp", base.gated_mlp if base else stated_ffn != 4 * hidden)
    ffn = stated_ffn or (math.ceil(8 * hidden / 3 / 256) * 256 if gated else 4 * hidden)
    heads_or_base = base.kv_heads if base else heads
    stated = ModelShape(
        layers=fields.whole("layers", base.layers if base else 0, least=0 if fields.given("hybrid_pattern") else 1),
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=fields.whole("kv_heads", heads_or_base),
        head_dim=fields.whole("head_dim", base.head_dim if base else max(1, hidden // heads)),
        # GPT-2's words as its trainers pad them: 50,257 would slow the output projection.
        vocab=fields.whole("vocab", base.vocab if base else (32000 if gated else 50304)),
        tied_embeddings=fields.flag("tied_embeddings", base.tied_embeddings if base else not gated),
        **_block(gated=gated),
    )
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp", "tied_embeddings")
    shape = stated
    if base:
        own = {name: getattr(stated, name) for name in sizes}
        shape = dataclasses.replace(base, **(_kinds_at_depth(base, stated.layers) | own))
    has_blocks = base is None or base.ffn > 0 or fields.given("ffn")
    shape = _with_experts(fields, _with_rows_and_mixture(fields, shape, base), has_blocks=has_blocks)
    shape = _with_encoder(fields, shape)
    if fields.flag("mla", False) and not shape.kv_lora_rank:
        # DeepSeek's sizes, which those who follow it keep.
        shape = dataclasses.replace(shape, q_lora_rank=1536, kv_lora_rank=512, rope_dim=64)
    if fields.given("hybrid_pattern"):
        shape = _with_pattern(fields, shape)
    shape = checked(dataclasses.replace(shape, mtp_layers=fields.whole("mtp_layers", shape.mtp_layers, least=0)))
    return shape if base or params is None else _read_by_size(fields, shape, params * 1e9)


def _kinds_at_depth(base: ModelShape, layers: int) -> dict[str, Any]:
    """Of a known model with so many layers, in place of its own, each kind's number in proportion; what is a model's
    first layers stays as it is."""
    if layers == base.layers or not layers:
        return {}

    def part(number: int) -> int:
        return min(max(round(number * layers / base.layers), int(number > 0)), layers)

    def spread(number: int, places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((index + 1) * layers // number - 1 for index in range(number)) if places else ()

    kinds = ("windowed_layers", "delta_layers", "wide_layers")
    found: dict[str, Any] = {name: part(getattr(base, name)) for name in kinds}
    found["dense_layers"] = part(base.dense_layers) if base.dense_places else min(base.dense_layers, layers)
    found["dense_places"] = spread(found["dense_layers"], base.dense_places)
    found["delta_places"] = spread(found["delta_layers"], base.delta_places)
    found["wide_places"] = spread(found["wide_layers"], base.wide_places)
    return found


NO_FURTHER_TOKENS = re.compile(r"(?:\b(?:w/o|without|no)[\s-]*|\bw/o\s*)mtp\b", re.IGNORECASE)


def with_further_tokens(fields: Fields, shape: ModelShape, engine: Engine) -> ModelShape:
    """The shape with the layer for a further token that a known model's configuration states, as Megatron builds it.

    That it trains them tell the FLOPs behind what Megatron-Bridge prints: DeepSeek-V3's of 26.08 are 260 GFLOP a token,
    with that layer, and those of its line "w/o MTP" 250. transformers and what is built on it leave the layer out.
    """
    words = f"{fields.text('model')} {fields.text('framework')}"
    if fields.given("mtp_layers") or NO_FURTHER_TOKENS.search(words) or not predicts_further(fields, engine):
        return shape
    return dataclasses.replace(shape, mtp_layers=1)


def predicts_further(fields: Fields, engine: Engine) -> bool:
    """Whether Megatron trains a whole known model whose configuration states a layer for a further token."""
    is_megatron = engine == "megatron" and any(
        word in fields.text("framework").lower() for word in ("megatron", *RECIPES)
    )
    is_whole = not fields.given("layers") and fields.text("method").lower() in ("", "full")
    return is_megatron and is_whole and known_name(fields.text("model")) in PREDICT_FURTHER


def _block(*, gated: bool) -> dict[str, Any]:
    """What comes with the kind of feed-forward block: Llama's norms and no biases, or GPT's norms and biases."""
    return {
        "gated_mlp": gated,
        "norm": "rms" if gated else "layer",
        "qkv_bias": not gated,
        "output_bias": not gated,
        "mlp_bias": not gated,
    }


STATED_PRECISION = 0.005
"""A size of three digits says this much: a reading that lies nearer meets it."""

FAR_FROM_STATED = 0.03
"""Names round to less ("7B" of 6.74): a usual reading that lies nearer than this stays."""


def _read_by_size(fields: Fields, shape: ModelShape, params: float) -> ModelShape:
    """The reading of a plain decoder's sizes that the stated number of parameters chooses; else the usual one, `shape`.

    Whoever states a size along with layers and widths says by it whether the block is gated and the embeddings are
    tied, where no field does. Of two readings that meet it (layers x ffn = vocab makes one projection of all layers as
    large as the output's) the gated one counts, as nearly all decoders of today are. What the count rests on must be
    stated too: key/value heads or a vocabulary that are guessed would explain a gap as well.
    """
    known = all(fields.given(name) for name in ("ffn", "heads", "kv_heads", "vocab"))
    plain = not (shape.experts or shape.is_hybrid or shape.kv_lora_rank or shape.encoder_layers or shape.mtp_layers)
    if not (known and plain) or abs(shape.params / params - 1) <= FAR_FROM_STATED:
        return shape
    gates = [shape.gated_mlp] if fields.given("gated_mlp") else [True, False]
    ties = [shape.tied_embeddings] if fields.given("tied_embeddings") else [True, False]
    readings = [
        dataclasses.replace(shape, tied_embeddings=tied, **_block(gated=gated)) for gated in gates for tied in ties
    ]
    return next((item for item in readings if abs(item.params / params - 1) <= STATED_PRECISION), shape)


def _known_shape(fields: Fields, params_b: float | None) -> ModelShape | None:
    """The named model; where its size stands apart ("Llama 2", 7), both; None: an unknown name of known size."""
    name = fields.text("model")
    known = known_name(name)
    if params_b is None:
        return shape_of_known(name)
    if known is None:
        family = re.sub(r"[\s_]+", "-", name.strip())
        joined = known_name(f"{family}-{params_b:g}b")
        return shape_of_known(joined) if joined is not None and has_size(joined, params_b) else None
    if has_size(known, params_b):
        return shape_of_known(known)
    if fields.given("layers") or fields.given("hybrid_pattern"):
        # Everything that counts is stated: the name is a family's.
        return None
    raise InputError(
        f"params_b {params_b:g}: {known} has {shape_of_known(known).params / 1e9:.3g}; leave out one of model and "
        "params_b, or state layers and hidden"
    )


def _with_experts(fields: Fields, shape: ModelShape, *, has_blocks: bool) -> ModelShape:
    experts = fields.whole("experts", shape.experts, least=0)
    if experts <= 1 and shape.experts and not (shape.is_hybrid or has_blocks):
        raise InputError(f"experts {experts}: this model has no feed-forward block without experts; state ffn")
    if experts <= 1:
        return dataclasses.replace(shape, experts=0, experts_per_token=0, moe_ffn=0)
    return dataclasses.replace(
        shape,
        experts=experts,
        experts_per_token=fields.whole("experts_per_token", shape.experts_per_token or 2),
        moe_ffn=fields.whole("moe_ffn", shape.moe_ffn or shape.ffn),
        shared_ffn=fields.whole("shared_ffn", shape.shared_ffn, least=0),
        dense_layers=fields.whole("dense_layers", min(shape.dense_layers, shape.layers), least=0),
        dense_places=() if fields.given("dense_layers") else shape.dense_places,
    )


def _with_encoder(fields: Fields, shape: ModelShape) -> ModelShape:
    if not fields.given("encoder_layers"):
        return shape
    return dataclasses.replace(
        shape,
        encoder_layers=fields.whole("encoder_layers", 0, least=0),
        encoder_tokens=fields.whole("encoder_seq", 512),
        cross_attention=fields.flag("cross_attention", False),
        norms_per_layer=shape.norms_per_layer + fields.flag("cross_attention", False),
    )


def _with_pattern(fields: Fields, shape: ModelShape) -> ModelShape:
    """A hybrid by Megatron's letters: M Mamba-2, * attention, - feed-forward, E experts; | cuts the pipeline."""
    letters = fields.text("hybrid_pattern").replace("|", "")
    if not letters or set(letters) - set("M*-E") or "M" not in letters:
        raise InputError(
            "hybrid_pattern: must be made of M (Mamba), * (attention), - (feed-forward) and E (experts), with an M "
            f"(given: {fields.text('hybrid_pattern')!r})"
        )
    if "E" in letters and not shape.experts:
        raise InputError("hybrid_pattern: has E, layers of experts: experts (at least 2) is needed")
    head_dim = 64
    return dataclasses.replace(
        shape,
        layers=len(letters),
        mamba_layers=letters.count("M"),
        attention_layers=letters.count("*"),
        dense_layers=letters.count("-"),
        mamba_heads=2 * shape.hidden // head_dim,
        mamba_head_dim=head_dim,
        mamba_state=128,
        mamba_groups=8,
    )


def _shape_of_size(params: float) -> ModelShape:
    """A Llama-like model of about that many parameters: hidden = 128 x layers, so 12 x 128^2 x layers^3 of them.

    Of larger ones a multiple of eight heads, which tensor parallelism can split.
    """
    heads = max(1, round((params / (12 * 128**2)) ** (1 / 3)))
    if heads > 8:
        heads = 8 * round(heads / 8)
    hidden = 128 * heads
    layers = max(1, round(params / (12 * hidden**2)))
    ffn = math.ceil(8 * hidden / 3 / 256) * 256
    return ModelShape(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=heads, head_dim=128, vocab=32000)
