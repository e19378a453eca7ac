"""The products of a layer as our own trainer runs Hugging Face's code: (columns, depth) of each that its tokens meet.

Queries, keys and values are one product or three, and what goes up from a latent is another: small ones don't fill a
GPU, which one as wide as all of them together would.
"""

from collections.abc import Iterator

from trainyard.planner.shapes import ModelShape

Product = tuple[float, float]
"""Columns and depth."""


def attention_products(shape: ModelShape, split: int) -> Iterator[Product]:
    """Of a layer's attention on one of `split` tensor ranks; the last one gives what the residual is added to."""
    queries = shape.query_dim * (1 + shape.attention_gate)
    if shape.kv_lora_rank:
        yield from _latent_products(shape, split)
    elif shape.fused_qkv:
        yield (queries + 2 * shape.kv_dim) / split, shape.hidden
    else:
        yield queries / split, shape.hidden
        for _ in range(shape.projected_kv_dim // shape.kv_dim):
            yield shape.kv_dim / split, shape.hidden
    yield shape.hidden, shape.value_dim / split


def block_products(shape: ModelShape, width: float, split: int) -> Iterator[Product]:
    """Of a feed-forward block of that width, in the same way."""
    for _ in range(1 + shape.gated_mlp):
        yield width / split, shape.hidden
    yield shape.hidden, width / split


def _latent_products(shape: ModelShape, split: int) -> Iterator[Product]:
    queries = shape.heads * (shape.head_dim + shape.rope_dim) / split
    if shape.q_lora_rank:
        yield shape.q_lora_rank, shape.hidden
    yield queries, shape.q_lora_rank or shape.hidden
    yield shape.kv_lora_rank + shape.rope_dim, shape.hidden
    yield (shape.query_dim + shape.value_dim) / split, shape.kv_lora_rank
