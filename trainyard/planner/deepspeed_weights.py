"""Which of a model's weights DeepSpeed's stage 3 leaves whole on every rank: those of few elements, which it gathers
once and never lets go (`mark_persistent_parameters`, deepspeed/runtime/zero/parameter_offload.py, 0.19).
"""

from collections.abc import Iterator

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape


def whole_elements(shape: ModelShape, layout: Layout) -> float:
    """Elements of the weights that stay whole; 0 but under our own trainer's stage 3 of several ranks."""
    ours = layout.engine == "deepspeed" and layout.library == "trainyard"
    if not ours or layout.zero_stage < 3 or layout.shard_degree == 1:
        return 0.0
    most = layout.zero_sizes.persistence
    small = sum(count * elements for elements, count in _weights(shape) if elements <= most)
    limit = layout.zero_sizes.persistent_in_all
    return float(small if limit is None else min(small, limit))


def _weights(shape: ModelShape) -> Iterator[tuple[int, int]]:
    """(elements, how many) of each kind of weight. Left away are biases and norms of heads: next to nothing."""
    hidden = shape.hidden
    for number, kind in shape.attentions:
        for elements in _attention(kind):
            yield elements, number
    inputs = 2 if shape.gated_mlp else 1
    yield hidden * shape.ffn, (inputs + 1) * shape.num_mlps
    if shape.moe_layers:
        # transformers has all experts of a layer in two weights, in and out.
        expert = shape.experts * shape.moe_ffn * (shape.latent or hidden)
        yield inputs * expert, shape.moe_layers
        yield expert, shape.moe_layers
        yield hidden * shape.experts, shape.moe_layers
        yield hidden * shape.shared_ffn, (inputs + 1) * shape.moe_layers
    if shape.delta_layers:
        keys, values, heads = shape.delta_key_width, shape.delta_value_width, shape.delta_value_heads
        whole = shape.delta_inputs == 2
        for width in (2 * (keys + values), 2 * heads) if whole else (2 * keys + values, values, heads, heads):
            yield hidden * width, shape.delta_layers
        yield hidden * values, shape.delta_layers
        yield 4 * (2 * keys + values), shape.delta_layers
    if shape.mamba_layers:
        mixed = shape.mamba_inner + 2 * shape.mamba_groups * shape.mamba_state
        yield hidden * (shape.mamba_inner + mixed + shape.mamba_heads), shape.mamba_layers
        yield hidden * shape.mamba_inner, shape.mamba_layers
    yield hidden * shape.vocab, 1 if shape.tied_embeddings else 2
    yield hidden * shape.learned_positions, 1
    norms = shape.layers * shape.norms_per_layer + shape.final_norm
    yield hidden, norms * (shape.norm_params // hidden)


def _attention(shape: ModelShape) -> Iterator[int]:
    """Elements of each weight of one layer's attention."""
    hidden = shape.hidden
    yield shape.value_dim * hidden
    if not shape.kv_lora_rank:
        if shape.fused_qkv:
            yield hidden * (shape.query_dim + 2 * shape.kv_dim)
            return
        yield hidden * shape.query_dim * (1 + shape.attention_gate)
        for _ in range(shape.projected_kv_dim // shape.kv_dim):
            yield hidden * shape.kv_dim
        return
    query = shape.query_dim + shape.heads * shape.rope_dim
    if shape.q_lora_rank:
        yield hidden * shape.q_lora_rank
    yield (shape.q_lora_rank or hidden) * query
    yield hidden * (shape.kv_lora_rank + shape.rope_dim)
    yield shape.kv_lora_rank * (shape.query_dim + shape.value_dim)
