"""What our own trainer's DeepSpeed (0.19) holds beside state and activations: the buckets that gradients leave in, and
what stage 3 has gathered.

Sizes are the trainer's (`training_container/trainer/strategies/deepspeed_settings.py`), which the planner can't import;
`tests/trainer/test_deepspeed_memory.py` holds both together, and the bytes against a real step of two ranks.
"""

import math

from trainyard.planner.deepspeed_weights import whole_elements
from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape

BUCKET_ELEMENTS = 100_000_000
"""Gradients in one message, unless a single weight has more."""

MOST_OWNERS = 8
"""Ranks that a bucket of stages 1 and 2 is reduced to one by one; for more it is summed on all of them."""

SUB_GROUP_ELEMENTS = 1e9
"""Of a rank's part, what stage 3 updates at a time."""

LIVE_ELEMENTS = 1_000_000_000
"""Gathered weights beyond which stage 3 asks for none ahead."""

REUSE_ELEMENTS = 1e9
"""Stage 3 keeps a gathered weight that is used again before so many others are."""

SENT_BYTES = 4.0
"""Gradients travel in fp32."""


def largest_weight(shape: ModelShape) -> float:
    """Elements of the largest single parameter; a layer's experts are one in transformers."""
    experts = shape.experts * (2 if shape.gated_mlp else 1) * shape.moe_ffn * (shape.latent or shape.hidden)
    widest = max(kind.query_dim for _, kind in shape.attentions)
    return max(shape.hidden * max(shape.vocab, shape.ffn, widest), experts if shape.moe_layers else 0)


def bucket_elements(shape: ModelShape, layout: Layout) -> float:
    """Elements of a bucket of gradients, trained or not."""
    if layout.zero_sizes.bucket is not None:
        return layout.zero_sizes.bucket
    return max(largest_weight(shape), min(shape.params, BUCKET_ELEMENTS))


def sums_on_all(shape: ModelShape, layout: Layout, trained: float) -> bool:
    """Whether stages 1 and 2 send the gradients of `trained` elements to all ranks (an all-reduce), not each to the one
    that has its part."""
    if layout.zero_sizes.sums_on_all is not None:
        return layout.zero_sizes.sums_on_all
    bucket = min(bucket_elements(shape, layout), trained)
    ranks = layout.data_parallel
    return min(ranks, 1 + math.ceil(bucket * ranks / trained)) > MOST_OWNERS


def buffer_bytes(
    shape: ModelShape, layout: Layout, trained: float, *, weight_bytes: float, gradient_bytes: float
) -> float:
    """Bytes while a backward pass sends gradients, of which `trained` elements come to be.

    Stages 1 and 2 fill one bucket while the other one is sent: what is a rank's, flattened once more, and made fp32.
    Stage 1 has whole gradients, which are counted, and moves them into the buckets; its own part is copied from there.
    Of one micro-batch there are none, and what is counted is that copy (`sends_gradients_as_made`). Stage 2 adds such
    a copy up afterwards, unless its sums are wider than the weights. Stage 3 has an fp32 bucket, and flattens it, or
    puts gathered weights in their places.
    """
    bucket, own = bucket_elements(shape, layout), trained / layout.shard_degree
    if layout.zero_stage == 3:
        ahead = _ahead(layout, bucket)
        sent = max(SENT_BYTES * min(bucket, trained), weight_bytes * min(ahead, shape.params))
        return SENT_BYTES * bucket + weight_bytes * _gathered(shape, layout, bucket) + sent
    sent = min(bucket, trained if sums_on_all(shape, layout, trained) else own)
    sent *= weight_bytes + (SENT_BYTES if weight_bytes < SENT_BYTES else 0.0)
    buckets = (2 if layout.zero_sizes.overlaps else 1) * weight_bytes * bucket
    copied = own * weight_bytes
    if layout.zero_stage == 1 and not layout.sends_gradients_as_made:
        return max(buckets, sent + copied)
    return buckets + sent + copied * (gradient_bytes <= weight_bytes and layout.num_micro_batches > 1)


def _ahead(layout: Layout, bucket: float) -> float:
    """Elements of weights that stage 3 asks for at once, ahead of their use."""
    if layout.zero_sizes.prefetch is not None:
        return layout.zero_sizes.prefetch
    return 0.0 if layout.offload_parameters == "nvme" else bucket


def _gathered(shape: ModelShape, layout: Layout, bucket: float) -> float:
    """Elements of weights that stage 3 has gathered, at most: it asks ahead at every module, up to a limit. Whatever
    that is, those stay that come again soon on the way back; and there is the one in use."""
    stated = layout.zero_sizes.live
    most = max(bucket, LIVE_ELEMENTS) if stated is None else float(stated)
    soon = max(most if _ahead(layout, bucket) else 0.0, _reuse(layout) / 2)
    return min(shape.params - whole_elements(shape, layout), soon + largest_weight(shape))


def _reuse(layout: Layout) -> float:
    """Elements between two uses of a weight up to which it is kept: there and back are twice those behind it."""
    if layout.zero_sizes.reuse is not None:
        return layout.zero_sizes.reuse
    return 0.0 if layout.offload_parameters == "nvme" else REUSE_ELEMENTS


def update_bytes(shape: ModelShape, layout: Layout, trained: float, gradient_bytes: float) -> float:
    """Bytes of stage 3's update, when no activation is there: its bucket, and a sub-group's gradients made flat, and
    fp32."""
    if layout.zero_stage < 3 or layout.offload != "none":
        return 0.0
    sub_group = SUB_GROUP_ELEMENTS if layout.zero_sizes.sub_group is None else layout.zero_sizes.sub_group
    flat = _flat_bytes(gradient_bytes) * min(sub_group, trained / layout.shard_degree)
    return SENT_BYTES * bucket_elements(shape, layout) + flat


def flattening_bytes(
    layout: Layout, trained: float, own: float, *, weight_bytes: float, gradient_bytes: float
) -> float:
    """Bytes that the update of stages 1 and 2 takes beside the state; below zero where it has let go of more.

    A rank's part (`own` elements) of the gradients is made flat, and fp32, beside itself; those of the others, which
    stage 1 has summed, are gone by then. What stage 2 sums in a wider type than the weights' lies flat from the start.
    """
    if layout.zero_stage not in (1, 2) or layout.offload != "none":
        return 0.0
    if layout.zero_stage == 2 and gradient_bytes > weight_bytes:
        return 0.0
    is_whole = layout.zero_stage == 1 and not layout.sends_gradients_as_made
    return _flat_bytes(gradient_bytes) * own - gradient_bytes * (trained - own) * is_whole


def _flat_bytes(gradient_bytes: float) -> float:
    """Of an element whose gradient is made flat, then fp32."""
    return gradient_bytes + (SENT_BYTES if gradient_bytes < SENT_BYTES else 0.0)
