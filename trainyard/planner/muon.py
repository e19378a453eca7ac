"""What Muon's update takes: the products that make each matrix orthogonal, and what ranks that share them send.

Of our own trainer (`training_container/trainer/optimizers/matrix.py`): five steps of Newton and Schulz in float32, of
which a GPU takes TF32 in jobs of 16 bits and less. Matrices of one shape are dealt out to the ranks that they are cut
over or that all have them; experts stay where they are. Others' Muon is planned by its bytes alone.
"""

import math
from collections import Counter
from collections.abc import Iterator

from trainyard.hardware import Gpu
from trainyard.planner.communication import Fabric, all_gather_seconds, all_to_all_seconds, group
from trainyard.planner.layout import Layout
from trainyard.planner.operators import wide_ceiling_tflops
from trainyard.planner.shapes import ModelShape
from trainyard.planner.time_constants import PRE_AMPERE, Constants
from trainyard.planner.weight_tensors import WeightTensors

STEPS = 5
"""Of Newton and Schulz."""

TF32_SHARE = 0.5
"""Of what tensor cores do in 16 bits, by every datasheet since Ampere; measured alike (zzc0721's torch.mm: 122 of 240
TFLOP/s on an RTX 5090, 240 of 496 on an H100 PCIe)."""

Matrix = tuple[int, int]
"""Rows and columns."""


def muon_seconds(shape: ModelShape, layout: Layout, device: Gpu, constants: Constants) -> float:
    """Beside what its bytes take; 0 of other optimizers, of adapters, whose matrices are thin, and of others' loops."""
    is_ours = layout.library == "trainyard" and layout.engine == "torch" and layout.method == "full"
    if layout.optimizer != "muon" or not is_ours:
        return 0.0
    return muon_flops(shape, layout) / (_tflops(layout, device, constants) * 1e12)


def muon_sending_seconds(shape: ModelShape, layout: Layout, links: Fabric) -> float:
    """What ranks that share the work send each other."""
    element, matrices = 8 if layout.precision == "fp64" else 4, _matrices(shape, layout)
    if layout.zero_stage == 3 and layout.shard_degree > 1:
        # Parts of theirs to the rank that makes a matrix orthogonal, and back: a rank's own size, all at once.
        members, seconds = group(layout.shard_degree, layout.tensor, links.gpus_per_node), 0.0
        for ((rows, columns), _), number in matrices.items():
            stacks = math.ceil(number / layout.shard_degree)
            sent = element * rows * columns * number / layout.shard_degree / layout.tensor / stacks
            seconds += 2 * stacks * all_to_all_seconds(sent, members, links)
        return seconds
    if layout.zero_stage or layout.tensor > 1 or layout.data_parallel == 1:
        return 0.0
    # Replicas send each other whole matrices.
    sent = 0.0 + sum(number * rows * columns for ((rows, columns), _), number in _matrices(shape, layout).items())
    sent += sum(number * rows * columns for (rows, columns), number in _experts(shape, layout)) * layout.data_parallel
    members = group(layout.data_parallel, layout.context, links.gpus_per_node)
    return all_gather_seconds(sent * element, members, links)


def muon_flops(shape: ModelShape, layout: Layout) -> float:
    """Of the products that one update takes the rank that has most of them."""
    flops: float = sum(orthogonal_flops(*expert) * number for expert, number in _experts(shape, layout))
    for (matrix, _), number in _matrices(shape, layout).items():
        flops += math.ceil(number / _sharing_ranks(layout)) * orthogonal_flops(*matrix)
    return flops


ADAMW_LAUNCHES, ORTHOGONAL_LAUNCHES, OWN_LAUNCHES, STACK_LAUNCHES = 11, 19, 4, 26
"""Kernels of a tensor that is left to AdamW; of a matrix that is made orthogonal; of what each rank does with each
matrix anyway (its count of steps, momentum, decay, step); and of one rank's work on matrices that it gets its share of
from others, put together and taken apart included."""


def orthogonal_launches(shape: ModelShape, layout: Layout, tensors: WeightTensors) -> float:
    """Kernels of an update, `tensors` being what a rank trains."""
    is_cut = layout.zero_stage == 3 and layout.shard_degree > 1
    matrices, stacks, found = _matrices(shape, layout), 2 * math.ceil(shape.moe_layers / layout.pipeline), 0.0
    for number in matrices.values():
        dealt = math.ceil(number / _sharing_ranks(layout))
        found += dealt * (STACK_LAUNCHES if is_cut else ORTHOGONAL_LAUNCHES) + (OWN_LAUNCHES + is_cut) * number
    found += stacks * (ORTHOGONAL_LAUNCHES + OWN_LAUNCHES)
    return found + ADAMW_LAUNCHES * max(0.0, tensors.count - sum(matrices.values()) - stacks)


def orthogonal_flops(rows: int, columns: int) -> float:
    """Of one matrix: each step multiplies it with its own transpose, that with itself, and the matrix by the result."""
    narrow, wide = min(rows, columns), max(rows, columns)
    return STEPS * (4.0 * narrow**2 * wide + 2.0 * narrow**3)


def _sharing_ranks(layout: Layout) -> int:
    """All that have a part of a matrix, or all of it."""
    return layout.tensor * layout.data_parallel * layout.context


def _matrices(shape: ModelShape, layout: Layout) -> Counter[tuple[Matrix, bool]]:
    """((rows, columns), whether tensor parallelism cuts its rows) -> how many of them a rank's layers have. Those that
    are cut in one way are dealt out together."""
    found: Counter[tuple[Matrix, bool]] = Counter()
    share, is_split = layout.pipeline, layout.tensor > 1
    for number, kind in shape.attentions:
        for rows, columns, is_cut_in_rows in _of_attention(kind):
            found[(rows, columns), is_split and is_cut_in_rows] += math.ceil(number / share)
    for width, layers in ((shape.ffn, shape.num_mlps), (shape.shared_ffn, shape.moe_layers)):
        if width and layers:
            found[(width, shape.hidden), is_split] += (1 + shape.gated_mlp) * math.ceil(layers / share)
            found[(shape.hidden, width), False] += math.ceil(layers / share)
    return found


def _of_attention(shape: ModelShape) -> Iterator[tuple[int, int, bool]]:
    if shape.kv_lora_rank:
        latent = shape.q_lora_rank or 0
        queries = shape.query_dim + shape.heads * shape.rope_dim
        yield from (
            [(latent, shape.hidden, False), (queries, latent, True)] if latent else [(queries, shape.hidden, True)]
        )
        yield shape.kv_lora_rank + shape.rope_dim, shape.hidden, False
        yield shape.query_dim + shape.value_dim, shape.kv_lora_rank, True
        yield shape.hidden, shape.value_dim, False
        return
    if shape.fused_qkv:
        yield shape.query_dim + 2 * shape.kv_dim, shape.hidden, True
    else:
        yield shape.query_dim, shape.hidden, True
        for _ in range(shape.projected_kv_dim // shape.kv_dim):
            yield shape.kv_dim, shape.hidden, True
    yield shape.hidden, shape.query_dim, False


def _experts(shape: ModelShape, layout: Layout) -> Iterator[tuple[Matrix, float]]:
    """Each rank makes its own orthogonal, of all layers that it has; gate and up lie together."""
    if shape.moe_layers:
        split = layout.expert_split if layout.expert_split > 1 else layout.shard_degree if layout.zero_stage == 3 else 1
        number = math.ceil(shape.experts / split) * math.ceil(shape.moe_layers / layout.pipeline)
        if split == 1 and layout.zero_stage == 0:  # whole stacks are dealt out to the replicas
            number = shape.experts * math.ceil(shape.moe_layers / layout.pipeline / layout.data_parallel)
        yield ((1 + shape.gated_mlp) * shape.moe_ffn, shape.hidden), number
        yield (shape.hidden, shape.moe_ffn), number


def _tflops(layout: Layout, device: Gpu, constants: Constants) -> float:
    wide = wide_ceiling_tflops(layout, device, constants)
    if layout.precision in ("fp32", "fp64"):
        return wide
    return device.fp32_tflops if device.generation in PRE_AMPERE else TF32_SHARE * wide
