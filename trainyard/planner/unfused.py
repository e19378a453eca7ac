"""What Hugging Face's layers move through memory where each of their operations is a kernel of its own, not compiled.

Beside products and fused attention a layer is norms, rotations, activation functions and sums; each reads its inputs
and writes its results. The counts are bytes an element in 16 bits, by reading transformers' code, and are held against
what a dry run of our own trainer counts (`tests/trainer/test_traced_time.py`). Compiled or fused layers move a fraction
of this.
"""

from dataclasses import dataclass

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.planner.trainer_layers import TrainerLayers

NORM_BYTES = {
    "rms": (36.0, 92.0),
    "rms_wide": (40.0, 104.0),
    "rms_fp32": (40.0, 104.0),
    "layer": (4.0, 6.0),
    "layer_fp32": (20.0, 24.0),
    "layer_written_out": (60.0, 110.0),
}
"""`ModelShape.norm` -> of a normalized element, forward and backward. LlamaRMSNorm widens it (2 + 4 bytes), squares it
(8), takes the mean (4), scales it (8), narrows it (6) and multiplies it with the weight (4)."""

AUTOCAST_BYTES = (21.0, 52.0)
"""Beside that, where what flows between layers is fp32, and cast anew for each product that reads it."""

ROTATION_BYTES = (20.0, 32.0)
"""Of an element of queries and keys: twice multiplied, half of it negated, put together, added."""

RESIDUAL_BYTES = 6.0
"""Two read and one written: of a half's sum with the residual, and of the sum of two gradients."""

GATED_BYTES = (10.0, 18.0)
"""Of an element of a gated block: the activation function and the product with the other half."""

ACTIVATED_BYTES = 4.0
"""More where the activated gate is made again."""

ACTIVATION_BYTES = {0: (4.0, 6.0), 1: (4.0, 6.0), 4: (38.0, 64.0)}
"""`ModelShape.activation_tensors` -> of an element of another block: one kernel, or GELU written out as eight."""

SCORE_BYTES = (18.0, 16.0)
"""Of a score of attention that is written out: scaled, masked, its softmax, and what multiplies values."""

WIDE_SOFTMAX_BYTES, CAPPED_SCORE_BYTES, DROPPED_SCORE_BYTES = (11.0, 13.0), (12.0, 14.0), (5.0, 5.0)
"""Beside that: of a softmax in fp32; of Gemma 2's caps; of dropout."""

GATHERED_BYTES = (9.0, 13.5)
"""Of an element of a half's input or output under sequence parallelism: what tensor ranks gather is put in order."""

LOGIT_BYTES, HEAD_SUM_BYTES = 46.0, 10.0
"""Of a logit of a loss that is made part by part in the head (`losses/head.py` of the trainer): widened, its softmax,
its gradient, narrowed. And of a weight of the head for each part, whose gradient is added to the others'."""

SHARDED_BYTES = (4.8, 10.8)
"""Of a weight that FSDP gathers: copied out of the buffer of all, and its gradient into one of fp32."""

CAST_BYTES = (6.0, 18.0)
"""Of an fp32 weight under autocast: cast, and its gradient cast and summed."""


@dataclass(frozen=True)
class Unfused:
    """Bytes of one micro-batch on one rank, (forward, backward)."""

    shape: ModelShape
    layout: Layout

    def attention_half(self) -> tuple[float, float]:
        """Norms, rotation and residual around a layer's attention."""
        shape, split = self.shape, self.layout.tensor
        forward, backward = self._norms(0.0 if shape.parallel_residual else shape.norms_per_layer / 2)
        scored = self.layout.tokens_per_micro_batch * (shape.query_dim + shape.kv_dim) / split
        if shape.qk_norm_per_head or shape.qk_norm_whole:
            normed = NORM_BYTES[self._layers.inner_norm if self._is_ours else shape.norm]
            forward, backward = forward + normed[0] * scored, backward + normed[1] * scored
        if not (shape.learned_positions or shape.alibi):
            widened = 2.0 if shape.wide_scores else 1.0
            forward += ROTATION_BYTES[0] * widened * scored
            backward += ROTATION_BYTES[1] * widened * scored
        if not self.layout.flash_attention:
            scores = self.layout.tokens_per_micro_batch * self.layout.sequence_length * shape.heads / split
            forward, backward = (
                moved + each * scores for moved, each in zip((forward, backward), self._score_bytes(), strict=True)
            )
        # Gradients of the inputs of queries, keys and values are summed.
        backward += RESIDUAL_BYTES * self._hidden * (0 if shape.fused_qkv else 2)
        return self._with_ends(forward, backward)

    def block(self, width: float) -> tuple[float, float]:
        """Norm, activation function and residual of a feed-forward block."""
        shape = self.shape
        forward, backward = self._norms(shape.norms_per_layer / (1 if shape.parallel_residual else 2))
        inner = self.layout.tokens_per_micro_batch * width / self.layout.tensor
        each = GATED_BYTES if shape.gated_mlp else ACTIVATION_BYTES.get(shape.activation_tensors, (16.0, 24.0))
        forward += each[0] * inner
        backward += each[1] * inner + RESIDUAL_BYTES * self._hidden * shape.gated_mlp
        if self._is_ours and self._layers.has_thin_gates:
            backward += ACTIVATED_BYTES * inner
        return self._with_ends(forward, backward)

    def loss(self, num_logits: float) -> float:
        """Of so many logits whose loss is made in the head: both ways, as the gradient is made at once."""
        shape, layout = self.shape, self.layout
        assert layout.loss_chunk_tokens is not None
        sums = 0.0
        if layout.method == "full":
            num_chunks = layout.tokens_per_micro_batch / layout.loss_chunk_tokens
            sums = HEAD_SUM_BYTES * num_chunks * shape.vocab * shape.hidden / layout.tensor
        return LOGIT_BYTES * num_logits + sums

    def weights(self, count: float) -> tuple[float, float]:
        """So many weights of a rank's layer, gathered or cast for each pass."""
        layout = self.layout
        if layout.zero_stage == 3 and layout.shard_degree > 1 and layout.engine == "torch":
            each = SHARDED_BYTES
        elif self._layers.is_autocast and layout.method == "full":
            each = CAST_BYTES
        else:  # frozen weights are narrow already
            return 0.0, 0.0
        # Frozen weights have no gradients.
        return each[0] * count, (each[1] if layout.method == "full" else each[0]) * count

    @property
    def _layers(self) -> TrainerLayers:
        return TrainerLayers(self.shape, self.layout)

    @property
    def _is_ours(self) -> bool:
        """Our trainer's, and not transformers' own."""
        return self.layout.library == "trainyard"

    @property
    def _casts_between_layers(self) -> bool:
        """Whether fp32 flows there, beside narrower products: our own trainer's layouts tell, of others a request."""
        if not self._is_ours:
            return self.layout.autocast
        return self._layers.residual_element > self.layout.element_bytes

    @property
    def _hidden(self) -> float:
        """Elements of tokens x hidden between the halves, which sequence parallelism splits."""
        return self.layout.tokens_per_micro_batch * self.shape.hidden / self.layout.norm_split

    def _score_bytes(self) -> tuple[float, float]:
        shape = self.shape
        parts = [
            SCORE_BYTES,
            *([WIDE_SOFTMAX_BYTES] if self.layout.fp32_softmax else []),
            *([CAPPED_SCORE_BYTES] if shape.has_capped_scores else []),
            *([DROPPED_SCORE_BYTES] if shape.attention_dropout else []),
        ]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    def _norms(self, number: float) -> tuple[float, float]:
        each = NORM_BYTES[self._layers.norm if self._is_ours else self.shape.norm]
        more = AUTOCAST_BYTES if self._casts_between_layers else (0.0, 0.0)
        elements = number * self._hidden
        return (each[0] + more[0]) * elements, (each[1] + more[1]) * elements

    def _with_ends(self, forward: float, backward: float) -> tuple[float, float]:
        """The residual, what tensor ranks gather and scatter, and elements wider than 16 bits."""
        layout = self.layout
        forward, backward = forward + RESIDUAL_BYTES * self._hidden, backward + RESIDUAL_BYTES * self._hidden
        if layout.tensor > 1:
            whole = layout.tokens_per_micro_batch * self.shape.hidden
            forward, backward = forward + GATHERED_BYTES[0] * whole, backward + GATHERED_BYTES[1] * whole
        return forward * layout.element_bytes / 2, backward * layout.element_bytes / 2
