"""What a pipeline rank holds: its layers and ends, the micro-batches in flight there, and its parameters.

Micro-batches in flight per schedule: Narayanan et al. (arXiv:2104.04473, section 2.2).
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.spec.support import MOST_EXPERT_PADDING


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds."""

    layers: int
    embedding: bool
    head: bool
    in_flight: float
    """Micro-batches whose activations it holds at its peak, as full passes through its layers."""
    dense_layers: int = 0
    """Of a mixture, in our own trainer's pipeline: its layers without experts, which are a model's first."""
    delta_layers: int = 0
    """There too, of a model that says which of its layers have a delta rule: how many of these."""
    wide: tuple[int, ...] = ()
    """There too: which of its layers, counted back from the last as 0, have heads of another width."""


def stages(shape: ModelShape, layout: Layout) -> tuple[Stage, ...]:
    """Pipeline ranks of which one is the worst: of other frameworks the first and the last, of our own trainer one of
    each kind, as a later rank may have a layer more than the first, and zero_bubble's first has both ends."""
    if layout.library == "trainyard":
        return _kinds(shape, layout)[0]
    count = layout.pipeline
    layers = math.ceil(shape.layers / count)
    first = Stage(layers, True, count == 1, micro_batches_in_flight(layout, 0))
    if count == 1:
        return (first,)
    last = layers if layout.last_stage_layers is None else layout.last_stage_layers
    return first, Stage(last, False, True, micro_batches_in_flight(layout, count - 1))


def num_ranks(shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Of each of `stages`, how many ranks along the pipeline hold the same."""
    if layout.library == "trainyard":
        return _kinds(shape, layout)[1]
    return (1,) if layout.pipeline == 1 else (layout.pipeline - 1, 1)


@lru_cache(maxsize=64)
def _kinds(shape: ModelShape, layout: Layout) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
    """The ranks along the trainer's pipeline; of those that hold the same the earliest, as none has more in flight,
    and how many they are.

    Whatever is reckoned of a layout asks for them; the next layout is another one.
    """
    found: dict[tuple[object, ...], tuple[Stage, int]] = {}
    for place in range(layout.pipeline):
        stage = stage_at(shape, layout, place)
        kinds = (stage.dense_layers, stage.delta_layers, stage.wide)
        held = (stage.layers, *kinds, stage.embedding, stage.head)
        first, number = found.get(held, (stage, 0))
        found[held] = first, number + 1
    return tuple(stage for stage, _ in found.values()), tuple(number for _, number in found.values())


def micro_batches_in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches that pipeline rank `rank` holds at once, in units of its whole part of the model."""
    ranks, count = layout.pipeline, layout.num_micro_batches
    if layout.schedule == "gpipe":
        return count
    if layout.schedule == "zero_bubble":
        # Down and up again: every rank has both an early and a late stage.
        return min(ranks, count)
    if layout.chunks > 1:
        # Warm-up passes of Megatron's interleaved schedule, each through one chunk, and the one in steady state. torch
        # goes on to the next chunk after as many micro-batches as make its rounds equal, which may be more than ranks.
        turn = count // max(count // ranks, 1) if layout.library == "trainyard" else ranks
        passes = 2 * (ranks - rank - 1) + (layout.chunks - 1) * turn + 1
        return min(passes, count * layout.chunks) / layout.chunks
    return min(ranks - rank, count)


def num_stages(layout: Layout) -> int:
    """Stages of a rank of our trainer's pipeline."""
    return 2 if layout.chunks > 1 or layout.schedule == "zero_bubble" else 1


def stage_at(shape: ModelShape, layout: Layout, place: int) -> Stage:
    """What the rank at one place along the trainer's pipeline holds: one stage, or two of twice as many.

    interleaved_1f1b goes through the ranks twice; zero_bubble there and back, so that its first rank has both ends
    (Qi et al., arXiv:2405.15362, section 3).
    """
    ranks = layout.pipeline
    seconds = {"interleaved_1f1b": place + ranks, "zero_bubble": 2 * ranks - 1 - place}
    mine = [place, seconds[layout.schedule]] if layout.schedule in seconds and ranks > 1 else [place]
    count = ranks * len(mine)
    bounds = [(index * shape.layers // count, (index + 1) * shape.layers // count) for index in mine]
    layers = sum(end - begin for begin, end in bounds)
    dense = deltas = 0
    if shape.dense_places:
        dense = sum(begin <= layer < end for begin, end in bounds for layer in shape.dense_places)
    elif shape.dense_layers:
        dense = sum(max(min(end, shape.dense_layers) - begin, 0) for begin, end in bounds)
    if shape.delta_places:
        deltas = sum(begin <= layer < end for begin, end in bounds for layer in shape.delta_places)
    wide: tuple[int, ...] = ()
    if shape.wide_places:
        held = [layer for begin, end in bounds for layer in range(begin, end)]
        wide = tuple(number for number, layer in enumerate(reversed(held)) if layer in shape.wide_places)
    return Stage(layers, 0 in mine, count - 1 in mine, micro_batches_in_flight(layout, place), dense, deltas, wide)


def part_of(shape: ModelShape, layout: Layout, stage: Stage) -> ModelShape:
    """What layers of several kinds are on a stage of our own trainer's pipeline, as a model of their own, so that what
    is reckoned by a mean layer is of these: layers without experts, delta rules, heads of another width. Any
    other shape as it is."""
    is_cut = layout.library == "trainyard" and layout.pipeline > 1 and stage.layers > 0
    has_kinds = shape.delta_places or shape.wide_layers or (shape.dense_layers and not shape.delta_layers)
    # An indexer counts its layers in the whole model.
    if not is_cut or not has_kinds or shape.is_hybrid or shape.indexer is not None:
        return shape
    windowed = shape.windowed_layers * stage.layers / shape.layers
    seen: dict[str, Any] = {}
    if shape.wide_layers:
        # Those that see everything are the wide ones; of none with a window 0 would say half of them.
        windowed = stage.layers - len(stage.wide)
        seen = {"attention_window": shape.attention_window if windowed else 0}
    return replace(
        shape,
        **seen,
        layers=stage.layers,
        dense_layers=stage.dense_layers,
        delta_layers=stage.delta_layers,
        windowed_layers=windowed,
        wide_layers=len(stage.wide),
    )


@dataclass(frozen=True)
class StageParams:
    """Parameters on one rank of a stage before data-parallel sharding."""

    dense: float
    """Split by tensor and pipeline parallelism."""
    expert: float
    """Routed experts: split by expert parallelism too, and replicated over fewer ranks."""

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.expert


def num_vocabulary_matrices(shape: ModelShape, layout: Layout, stage: Stage) -> int:
    """Embedding and head that a rank of the stage has. Tied ones are one, but on two stages of our trainer's pipeline,
    each of which has its own, on whatever rank (zero_bubble's first has both)."""
    is_one = shape.tied_embeddings and not (layout.library == "trainyard" and layout.pipeline > 1)
    return stage.embedding + (stage.head and not (stage.embedding and is_one))


def vocabulary_split(shape: ModelShape, layout: Layout) -> int:
    """Tensor ranks over which embedding and head are cut by vocabulary: our trainer leaves one that they don't divide
    whole on each (`strategies/tensor_parallel.py`), others pad it."""
    is_whole = layout.library == "trainyard" and shape.vocab % layout.tensor
    return 1 if is_whole else layout.tensor


def cuts_experts_inside(shape: ModelShape, layout: Layout) -> bool:
    """Whether our trainer cuts inside of experts (`strategies/fsdp.py`): where their number would be padded by more
    than an eighth, and its ranks divide a dimension of them."""
    number, ranks = shape.experts, layout.shard_degree
    is_padded = _cuts_experts_by_fsdp(layout) and -number % ranks > number * MOST_EXPERT_PADDING
    return is_padded and (shape.hidden % ranks == 0 or shape.moe_ffn % ranks == 0)


def expert_slots(shape: ModelShape, layout: Layout) -> int:
    """For how many experts there is room in a layer: FSDP pads their number to a multiple of our trainer's ranks."""
    if not _cuts_experts_by_fsdp(layout) or cuts_experts_inside(shape, layout):
        return shape.experts
    return shape.experts + -shape.experts % layout.shard_degree


def _cuts_experts_by_fsdp(layout: Layout) -> bool:
    is_cut = layout.library == "trainyard" and layout.engine == "torch" and layout.zero_stage == 3
    return is_cut and layout.expert_split == 1


@lru_cache(maxsize=64)
def stage_params(shape: ModelShape, layout: Layout, stage: Stage) -> StageParams:
    """Parameters of a stage's rank: tensor parallelism splits projections and vocabulary, norms it copies. An estimate
    asks for them six times."""
    blocks = shape.all_attention_params + shape.mamba_layers * shape.mamba_params
    blocks += shape.delta_layers * shape.delta_params
    blocks += shape.num_mlps * shape.mlp_params(shape.ffn) + shape.moe_layers * shape.moe_dense_params
    norms = stage.layers * (1 if shape.is_hybrid else shape.norms_per_layer) * shape.norm_params
    # What chooses or compresses positions has one key for all heads, which ranks can't share.
    beside = shape.beside_attention_params / shape.layers * stage.layers
    dense = blocks / shape.layers * stage.layers / layout.tensor + norms + beside
    if layout.library == "trainyard":
        # Every tensor rank has them whole: what of attention and dense blocks isn't cut, and routers.
        whole = shape.num_attentions * shape.uncut_attention_params + shape.num_mlps * shape.uncut_mlp_params
        whole += shape.delta_layers * shape.uncut_delta_params + shape.moe_layers * shape.hidden * shape.experts
        dense += whole / shape.layers * stage.layers * (1 - 1 / layout.tensor)
    if stage.embedding:
        dense += shape.encoder_params / layout.tensor
    if stage.head:
        dense += shape.mtp_layers * (2 * shape.hidden**2 + blocks / shape.layers) / layout.tensor
        # Not split.
        dense += shape.head_products * shape.hidden * (shape.hidden + 1)
    vocabulary = shape.vocab * shape.hidden / vocabulary_split(shape, layout)
    if stage.head and shape.mtp_layers and not stage.embedding and not shape.tied_embeddings:
        # Layers that predict further tokens look the last ones up, in a copy of the embedding.
        dense += vocabulary
    dense += vocabulary * num_vocabulary_matrices(shape, layout, stage)
    if stage.embedding:
        # Only words are split over tensor ranks.
        dense += shape.embedding_params - shape.vocab * shape.hidden
    moe_layers = stage.layers * shape.moe_layers / shape.layers
    if stage.head and shape.moe_layers:
        moe_layers += shape.mtp_layers
    slots = expert_slots(shape, layout) / max(shape.experts, 1)
    return StageParams(dense, moe_layers * shape.expert_params / layout.expert_split * slots)
