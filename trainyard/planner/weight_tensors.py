"""The trained tensors of a model as our own trainer has them: what an update goes through, one after the other.

Experts of a layer are two stacks (gate and up lie together), adapters two thin matrices beside each product.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache

from trainyard.planner.adapters import ATTENTION_OUTPUTS, MLP_INPUTS, MLP_OUTPUTS
from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage
from trainyard.spec.model_types import HEADS

Matrix = tuple[int, int]
"""Rows, of all of a stack's together, and columns."""


@dataclass
class WeightTensors:
    """Of a rank's part of a pipeline, before anything else cuts them; how many of each."""

    matrices: Counter[Matrix] = field(default_factory=Counter)
    vectors: float = 0.0

    @property
    def count(self) -> float:
        """All of them."""
        return sum(self.matrices.values()) + self.vectors

    def add(self, rows: float, columns: float, number: float) -> None:
        """So many matrices."""
        if rows and columns and number:
            self.matrices[round(rows), round(columns)] += number  # type: ignore[assignment]  # means over layers


def weight_tensors(shape: ModelShape, layout: Layout, stage: Stage) -> WeightTensors:
    """Those that the job trains; nobody adds to what is returned."""
    return _weight_tensors(shape, layout.of_layers(), replace(stage, in_flight=0.0))


@lru_cache(maxsize=256)
def _weight_tensors(shape: ModelShape, layout: Layout, stage: Stage) -> WeightTensors:
    found, share = WeightTensors(), stage.layers / shape.layers
    if layout.method != "full":
        _add_adapters(found, shape, layout, stage)
        return found
    for number, kind in shape.attentions:
        _add_attention(found, kind, share * number)
    _add_delta(found, shape, share * shape.delta_layers)
    _add_mlp(found, shape, shape.ffn, share * shape.num_mlps)
    routed = share * shape.moe_layers
    if routed:
        _add_mlp(found, shape, shape.shared_ffn, routed)
        found.add(shape.experts, shape.hidden, routed)
        found.add(shape.hidden, 1, routed * shape.shared_gate)
        found.vectors += 2 * routed * shape.shared_apart
        found.add(shape.experts * (1 + shape.gated_mlp) * shape.moe_ffn, shape.hidden, routed)
        found.add(shape.experts * shape.hidden, shape.moe_ffn, routed)
    found.vectors += stage.layers * shape.norms_per_layer * _of_norm(shape)
    if stage.embedding:
        found.add(shape.vocab, shape.hidden, 1)
        found.add(shape.learned_positions, shape.hidden, 1)
        found.vectors += _of_norm(shape) * shape.embedding_norm
    if stage.head:
        found.add(shape.vocab, shape.hidden, not (shape.tied_embeddings and stage.embedding))
        found.vectors += _of_norm(shape) * shape.final_norm + shape.head_bias
    return found


def _of_norm(shape: ModelShape) -> int:
    return round(shape.norm_params / shape.hidden)


def _add_attention(found: WeightTensors, shape: ModelShape, number: float) -> None:
    if shape.kv_lora_rank:
        _add_latent_attention(found, shape, number)
        return
    queries = shape.query_dim * (1 + shape.attention_gate)
    if shape.fused_qkv:
        found.add(queries + 2 * shape.kv_dim, shape.hidden, number)
    else:
        found.add(queries, shape.hidden, number)
        found.add(shape.kv_dim, shape.hidden, shape.projected_kv_dim // shape.kv_dim * number)
    found.add(shape.hidden, shape.value_dim, number)
    biases = (1 if shape.fused_qkv else 3) * shape.qkv_bias + shape.output_bias
    norms = 2 * (shape.qk_norm_per_head or shape.qk_norm_whole)
    found.vectors += number * (biases + norms + shape.attention_sinks)


def _add_latent_attention(found: WeightTensors, shape: ModelShape, number: float) -> None:
    queries = shape.heads * (shape.head_dim + shape.rope_dim)
    if shape.q_lora_rank:
        found.add(shape.q_lora_rank, shape.hidden, number)
        found.add(queries, shape.q_lora_rank, number)
    else:
        found.add(queries, shape.hidden, number)
    found.add(shape.kv_lora_rank + shape.rope_dim, shape.hidden, number)
    found.add(shape.query_dim + shape.value_dim, shape.kv_lora_rank, number)
    found.add(shape.hidden, shape.value_dim, number)
    latents = 1 + (shape.q_lora_rank > 0)
    found.vectors += number * (latents + latents * shape.qkv_bias + shape.output_bias)


def _add_delta(found: WeightTensors, shape: ModelShape, number: float) -> None:
    """Projections in, the convolution, decay and step of each head, a norm, the projection out."""
    found.add(shape.delta_projected / shape.delta_inputs, shape.hidden, number * shape.delta_inputs)
    found.add(2 * shape.delta_key_width + shape.delta_value_width, shape.convolution, number)
    found.add(shape.hidden, shape.delta_value_width, number)
    found.vectors += 3 * number


def _add_mlp(found: WeightTensors, shape: ModelShape, width: int, number: float) -> None:
    if width:
        found.add(width, shape.hidden, number * (1 + shape.gated_mlp))
        found.add(shape.hidden, width, number)
        found.vectors += number * (2 + shape.gated_mlp) * shape.mlp_bias


def _add_adapters(found: WeightTensors, shape: ModelShape, layout: Layout, stage: Stage) -> None:
    """Of products in feed-forward blocks those layers have one that have such a block, or a shared expert."""
    share, rank = stage.layers / shape.layers, layout.lora_rank
    blocks = shape.num_mlps + shape.moe_layers * (shape.shared_ffn > 0)
    for name in layout.lora_targets:
        of_block = name in MLP_INPUTS or (name in MLP_OUTPUTS and name not in ATTENTION_OUTPUTS)
        number: float = share * (blocks if of_block else shape.layers)
        rows = shape.hidden
        if name in HEADS:
            number, rows = float(stage.head), shape.vocab
        if name == "c_proj":  # GPT-2's attention and its feed-forward block both end in one
            number *= 2
        found.add(rank, shape.hidden, number)
        found.add(rows, rank, number)
