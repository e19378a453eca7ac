"""What Hugging Face's layers move through memory where each of their operations is a kernel of its own, not compiled.

Beside products and fused attention a layer is norms, rotations, activation functions and sums; each reads its inputs
and writes its results. The counts are bytes an element in 16 bits, by reading transformers' code, and are held against
what a dry run of our own trainer counts (`tests/trainer/test_traced_time.py`). Compiled or fused layers move a fraction
of this.
"""

from dataclasses import dataclass

from trainyard.planner.layout import Layout
from trainyard.planner.once import once
from trainyard.planner.shapes import ModelShape
from trainyard.planner.trainer_layers import LOSS_PART_TOKENS, TrainerLayers, layers_of

NORM_BYTES = {
    "rms": (36.0, 92.0),
    "rms_wide": (40.0, 104.0),
    "rms_cast": (40.0, 104.0),
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

WHOLE_LOGIT_BYTES, WIDE_LOGIT_BYTES = (18.0, 26.0), (12.0, 20.0)
"""Of a logit where all are there: widened, its softmax, that one's gradient, narrowed; and of those of fp32."""

LOGIT_PART_BYTES = 22.0
"""More in the backward pass where these are too many for one softmax: made once more, and put together."""

SCALED_LOGIT_BYTES = {"plain": (0.0, 0.0), "scaled": (4.0, 4.0), "capped": (12.0, 14.0)}
"""`ModelShape.logits` -> of a logit of 16 bits before the loss."""

COPY_PASSES, EXPERT_PASSES = (7.0, 16.0), (5.0, 13.0)
"""Reads and writes of a token's copy for each expert: put in order, weighed, put back, added up; and of an element of
an expert's width: the activation function and the product with the other half, beside its products."""

PLAIN_EXPERT_PASSES = (2.0, 3.0)
"""The same of experts that are not gated."""

WIDE_COPY_PASSES = (5.0, 15.0)
"""More of copies that are weighed in fp32."""

READ_COPY_PASSES = (5.0, 8.0)
"""More of copies of a hidden state of fp32, cast for the experts' products."""

EXCHANGED_PASSES = (12.0, 7.0)
"""More of copies that go to other ranks: into the order of ranks, into that of experts, and home again."""

TOKEN_PASSES = (1.0, 4.0)
"""Of the hidden state itself: the sum over experts, and that of both gradients of what router and experts read."""

WHOLE_KEY_PASSES, REPEATED_KEY_PASSES, OWN_PASSES = (6.0, 8.0), (2.0, 8.25), (6.0, 3.0)
"""Under context parallelism, of an element of all ranks' keys (and values): put in order; of these once they are
repeated for every query head, with the gradients of the pieces that queries see of them; and of an own query's."""

SUMMED_KEY_PASSES = 2.0
"""More backward, of both, where they are repeated."""

GATHERED_WEIGHT_BYTES, OWN_WEIGHT_BYTES = 4.0, 6.0
"""Of a weight that FSDP gathers in 16 bits: copied out of the buffer of all; and of a rank's own, narrowed for it where
it is trained. Of one that no rank shares it does the same, but where it is frozen."""

WIDE_WEIGHT_BYTES, SENT_GRADIENT_BYTES = 8.0, (6.0, 8.0)
"""Of one that it gathers in fp32; and of its gradient, put into a buffer of fp32, by either width."""

OWN_GRADIENT_BYTES, DIVIDED_GRADIENT_BYTES = 8.0, 8.0
"""Of the gradient of one that no rank shares: copied out of that buffer; and divided, where others have copies."""

WIDENED_GRADIENT_BYTES, ADDED_GRADIENT_BYTES = 6.0, 10.0
"""Of a gradient of 16 bits in a pipeline, whose sums have 32 until the step's end: the first; and each further one."""

CAST_BYTES, SUMMED_GRADIENT_BYTES = 6.0, 12.0
"""Of an fp32 weight under autocast: cast, and its gradient, too. And of a gradient of fp32 that is added to others:
those of earlier micro-batches, or what DDP's buckets hold."""


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
        if shape.normalizes_values:
            # Without a weight, of one type.
            normed = NORM_BYTES["layer" if self._is_ours else shape.norm]
            values = self.layout.tokens_per_micro_batch * shape.kv_dim / split
            forward, backward = forward + normed[0] * values, backward + normed[1] * values
        if not (shape.learned_positions or shape.alibi):
            widened = 2.0 if shape.wide_scores else 1.0
            forward += ROTATION_BYTES[0] * widened * scored
            backward += ROTATION_BYTES[1] * widened * scored
        if not self.layout.flash_attention:
            scores = self.layout.tokens_per_micro_batch * self.layout.sequence_length * shape.heads / split
            forward, backward = (
                moved + each * scores for moved, each in zip((forward, backward), self._score_bytes(), strict=True)
            )
        if self.layout.context > 1 and self._is_ours:
            forward, backward = (
                moved + more for moved, more in zip((forward, backward), self._of_context(), strict=True)
            )
        # Gradients of the inputs of queries, keys and values are summed.
        backward += RESIDUAL_BYTES * self._hidden * (0 if shape.fused_qkv else shape.projected_kv_dim / shape.kv_dim)
        return self._with_ends(forward, backward)

    def _of_context(self) -> tuple[float, float]:
        """What comes from other ranks, put in order and repeated (`strategies/context_parallel.py` of the trainer)."""
        shape, layout = self.shape, self.layout
        own = layout.tokens_per_micro_batch / layout.tensor
        repeated = (shape.query_dim + shape.heads * shape.rope_dim + shape.value_dim) / 2 * own * layout.context
        keys = repeated if shape.kv_lora_rank else shape.kv_dim * own * layout.context
        found = [
            2
            * (
                WHOLE_KEY_PASSES[way] * keys
                + REPEATED_KEY_PASSES[way] * repeated
                + OWN_PASSES[way] * shape.query_dim * own
            )
            for way in (0, 1)
        ]
        sums = SUMMED_KEY_PASSES * 2 * (keys + repeated) if keys < repeated else 0.0
        return found[0], found[1] + sums

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

    def whole_loss(self, num_logits: float) -> tuple[float, float]:
        """Of so many logits that are all there at once."""
        layout = self.layout
        is_wide = layout.element_bytes >= 4
        forward, backward = WIDE_LOGIT_BYTES if is_wide else WHOLE_LOGIT_BYTES
        scaled = SCALED_LOGIT_BYTES[self.shape.logits]
        in_parts = LOGIT_PART_BYTES * (not is_wide and layout.tokens_per_micro_batch > LOSS_PART_TOKENS)
        more = [each * layout.element_bytes / 2 for each in scaled]
        return (forward + more[0]) * num_logits, (backward + in_parts + more[1]) * num_logits

    def routed(self, copies: float) -> tuple[float, float]:
        """Around a layer's routed experts, of so many copies of tokens, with its norm and residual."""
        shape, layout, layers = self.shape, self.layout, self._layers
        of_copies = [COPY_PASSES, *([EXCHANGED_PASSES] if layout.expert_split > 1 else [])]
        if layers.weighed_element > layers.element:
            of_copies.append(WIDE_COPY_PASSES)
        if layers.residual_element > layers.element:
            of_copies.append(READ_COPY_PASSES)
        width = shape.latent or shape.hidden
        inner = EXPERT_PASSES if shape.gated_mlp else PLAIN_EXPERT_PASSES
        moved = [
            layout.element_bytes
            * (
                copies * (width * sum(part[way] for part in of_copies) + shape.moe_ffn * inner[way])
                + self._hidden * TOKEN_PASSES[way]
            )
            for way in (0, 1)
        ]
        if shape.shared_ffn:  # whose block has the norm and the residual
            return moved[0], moved[1]
        norms = self._norms(shape.norms_per_layer / (1 if shape.parallel_residual else 2))
        around = RESIDUAL_BYTES * self._hidden * layout.element_bytes / 2
        wide = layout.element_bytes / 2
        return moved[0] + wide * norms[0] + around, moved[1] + wide * norms[1] + around

    def weights(self, count: float) -> tuple[float, float]:
        """So many weights of a rank's layer, gathered or cast for each pass (a pipeline's for all passes of a step at
        once), and their gradients."""
        layout = self.layout
        if layout.engine != "torch":
            return 0.0, 0.0
        earlier = 1 - 1 / layout.num_micro_batches
        if not layout.is_uncut:
            forward, backward = (
                self._of_weight_in_pipeline(earlier) if layout.pipeline > 1 else self._of_weight(earlier)
            )
            return forward * count, backward * count
        if layout.method != "full":  # frozen weights are narrow already
            return 0.0, 0.0
        cast = CAST_BYTES * self._layers.is_autocast
        summed = SUMMED_GRADIENT_BYTES * (1.0 if layout.data_parallel > 1 else earlier)
        return cast * count, (cast + summed) * count

    def _of_weight(self, earlier: float) -> tuple[float, float]:
        """Of one that FSDP gathers for each pass; `earlier`: the share of micro-batches that have some before them."""
        layout = self.layout
        sent = 0.0
        if layout.method == "full":
            sent = SENT_GRADIENT_BYTES[layout.element_bytes >= 4] + self._own_gradient
            sent += earlier * SUMMED_GRADIENT_BYTES / self._ranks
        return self._gathered, self._gathered * (not layout.keeps_gathered) + sent

    def _of_weight_in_pipeline(self, earlier: float) -> tuple[float, float]:
        """Of one that is gathered before a step's passes, and whose gradients are summed where they are until its end:
        a micro-batch's share of both counted as of the forward pass."""
        layout, is_wide = self.layout, self.layout.element_bytes >= 4
        if layout.method != "full":
            return self._gathered / layout.num_micro_batches, 0.0
        first, added = (0.0, SUMMED_GRADIENT_BYTES) if is_wide else (WIDENED_GRADIENT_BYTES, ADDED_GRADIENT_BYTES)
        once = self._gathered + SENT_GRADIENT_BYTES[True] + self._own_gradient
        return once / layout.num_micro_batches, first + (added - first) * earlier

    @once
    def _ranks(self) -> int:
        """That share a weight."""
        return self.layout.shard_degree if self.layout.zero_stage == 3 else 1

    @once
    def _gathered(self) -> float:
        """Bytes of a weight for being gathered once."""
        layout = self.layout
        if layout.method != "full":
            return self._layers.weight_element * GATHERED_WEIGHT_BYTES / 2 * (self._ranks > 1)
        if layout.element_bytes >= 4:
            return WIDE_WEIGHT_BYTES
        return GATHERED_WEIGHT_BYTES + OWN_WEIGHT_BYTES / self._ranks

    @once
    def _own_gradient(self) -> float:
        """Bytes of a weight's gradient that no rank has a part of."""
        if self._ranks > 1:
            return 0.0
        return OWN_GRADIENT_BYTES + DIVIDED_GRADIENT_BYTES * (self.layout.data_parallel > 1)

    def embedding_gradient(self, weights: float) -> float:
        """Of so many of a rank's rows: it is as large as they are, and is added to the head's where both are one."""
        return self._layers.residual_element * (1 + 3 * self.shape.tied_embeddings) * weights

    @once
    def _layers(self) -> TrainerLayers:
        return layers_of(self.shape, self.layout)

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
        ours = self._layers.half_norm
        each = NORM_BYTES[ours if self._is_ours else self.shape.norm]
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
