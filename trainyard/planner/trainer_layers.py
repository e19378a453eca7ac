"""What a layer and the head of a model leave in memory when our own trainer runs Hugging Face's code, line by line.

Other frameworks' layers are in `activations`. Here each tensor that autograd keeps has its term, so that closed form
and dry run can be held against each other tensor by tensor (docs/dry_run.md has the table); neither uses the other's
code. All in bytes of one micro-batch. "Whole" tensors are not split by tensor parallelism, whose regions gather what
they read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from trainyard.planner.adapters import (
    ATTENTION_INPUTS,
    ATTENTION_OUTPUTS,
    KEY_LATENT_INPUTS,
    MLP_INPUTS,
    MLP_OUTPUTS,
    QUERY_LATENT_INPUTS,
    adapter_outputs,
    reads_last_product,
)
from trainyard.planner.layout import Layout
from trainyard.planner.once import once
from trainyard.planner.quantized_reads import QuantizedReads, four_bit_bytes
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import vocabulary_split
from trainyard.spec.model_types import HEADS

NORM_BACKWARD_BYTES = 20
"""Of an element, while an RMS norm written out in fp32 (`LlamaRMSNorm`) is differentiated: five tensors."""

FUSED_NORMS = ("rms", "rms_wide", "rms_cast", "rms_fp32")
"""Of `ModelShape.norm`, what the trainer runs as one kernel; the last between two casts."""

WIDEST_SHARED_HEAD = 256
"""Wider heads are left to torch's memory-efficient kernel, which takes none by groups: transformers copies their keys
and values for every query head."""

DELTA_CHUNK = 64
"""Tokens that a delta rule takes together (`torch_chunk_gated_delta_rule` of transformers)."""

DELTA_HEAD_BYTES = 40
"""Of a token and head of a delta rule's values: its rate, its decay and what they are made of, mostly in fp32."""

LOSS_PART_TOKENS = 2048
"""Positions of whole logits of 16 bits whose loss the trainer makes at one time (`losses/token_loss.py`)."""


@dataclass(frozen=True)
class TrainerLayers:
    """A model's layers in one layout of our trainer. Each value is reckoned once: a search asks often."""

    shape: ModelShape
    layout: Layout

    @once
    def tokens(self) -> float:
        """A rank's, of one micro-batch."""
        return self.layout.tokens_per_micro_batch

    @once
    def element(self) -> int:
        """Bytes of what products give."""
        return self.layout.element_bytes

    @once
    def sum_element(self) -> int:
        """Bytes of gradients' sums: in float32, or as wide as products."""
        return max(4, self.element)

    @once
    def is_frozen(self) -> bool:
        """Adapters alone are trained."""
        return self.layout.method != "full"

    @once
    def is_autocast(self) -> bool:
        """One copy of fp32 weights on every rank, cast product by product: no FSDP, no ZeRO."""
        layout = self.layout
        return layout.is_deepspeed_autocast or (layout.engine == "torch" and self.element == 2 and layout.is_uncut)

    @once
    def residual_element(self) -> int:
        """Bytes of what flows between layers: of the embedding's own type."""
        return 4 if self.is_autocast and not self.is_frozen else self.element

    @once
    def norm(self) -> str:
        """A kind of `ModelShape.norm`: RMS norms run as one kernel (`models/norms.py` of the trainer), which keeps and
        moves what a layer norm's does. Of fp64 they are left to the library's code."""
        return self._kernel_of(self.residual_element)

    @once
    def inner_norm(self) -> str:
        """The same of products' results (queries and keys, latents): under autocast these have 16 bits beside weights
        of 32, of which no kernel makes a plain norm."""
        if self.is_autocast and not self.is_frozen:
            # Gemma 4's widens what it reads for such a weight, as Gemma's always does.
            return "layer_fp32" if self.shape.norm in ("rms_cast", "rms_fp32") else self.shape.norm
        return self._kernel_of(self.element)

    def _kernel_of(self, element: int) -> str:
        if self.shape.norm not in FUSED_NORMS or self.layout.precision == "fp64":
            return self.shape.norm
        return "layer_fp32" if self.shape.norm == "rms_fp32" and element < 4 else "layer"

    @once
    def fuses_inner_norms(self) -> bool:
        """Whether norms of products' results are such kernels: no kernel has all heads' where ranks share them."""
        if self.shape.qk_norm_whole and self.layout.tensor > 1:
            return False
        return self.inner_norm in ("layer", "layer_fp32") and self.shape.norm in FUSED_NORMS

    @once
    def hidden(self) -> float:
        """Elements of tokens x hidden, all of them."""
        return self.tokens * self.shape.hidden

    @once
    def split_hidden(self) -> float:
        """The same between regions, where sequence parallelism splits it."""
        return self.hidden / self.layout.norm_split

    @once
    def whole_hidden_bytes(self) -> float:
        """One hidden state as a stage sends it, or a region of tensor parallelism reads it."""
        return self.hidden * self.element

    @once
    def input_bytes(self) -> float:
        """What recomputation keeps of a layer."""
        return self.split_hidden * self.residual_element

    @once
    def masked_share(self) -> float:
        """Of the layers, those whose fused attention reads a mask."""
        shape, masks = self.shape, self.layout.masks
        if not self.layout.flash_attention:
            return 0.0
        if masks == "windows":
            has_windows = 0 < shape.attention_window <= self.layout.sequence_length
            return shape.windowed_share if has_windows else 0.0
        is_refused = shape.kv_lora_rank > 0 or shape.attention_dropout or shape.wide_head_dim > 0
        return 1.0 if masks == "always" or (masks == "documents" and is_refused) else 0.0

    @once
    def _copied_share(self) -> float:
        """Of the layers, those where each query head has its own copy of its keys and values: written out, and beside a
        mask, where transformers makes them."""
        shape, layout = self.shape, self.layout
        if shape.copies_keys or not (layout.flash_attention or shape.kv_lora_rank):
            return 1.0
        if shape.head_dim > WIDEST_SHARED_HEAD and layout.context == 1:
            return 1.0
        # A single head's are a view for all of them.
        return 0.0 if shape.kv_lora_rank or layout.context > 1 or shape.kv_heads == 1 else self.masked_share

    @once
    def mask_bytes(self) -> float:
        """What kernels read in place of a micro-batch's mask, a number a score of one head, which layers share; and the
        mask itself, where layers are given it once more."""
        kept = self.given_mask_bytes * (self.layout.recompute != "none")
        if not self.masked_share:
            return kept
        # Torch makes one for each sequence; context parallelism's masks are one for all.
        each = self._mask_scores / (self._sequences if self.layout.context > 1 else 1) * self.element
        return kept + self._num_masks * each

    @once
    def _num_masks(self) -> int:
        """That layers are given: where only some have windows one of either kind, but for windows alone."""
        has_both = self.shape.attention_window > 0 and 0 < self.shape.windowed_share < 1
        return 1 + (has_both and not (self.layout.flash_attention and self.layout.masks == "windows"))

    @once
    def given_mask_bytes(self) -> float:
        """The masks that layers are given in a forward pass, a byte a score, one for all sequences where windows are
        their only rule; a number, where attention is written out."""
        if not self.layout.flash_attention:
            return self._mask_scores * self.residual_element * self._num_masks
        share = 1 / self._sequences if self.layout.masks == "windows" else 1.0
        return self._mask_scores * share * (self.masked_share > 0) * self._num_masks

    @once
    def rotation_bytes(self) -> float:
        """Sines and cosines that layers are given, of each width of heads where there are two: of one they are too
        small to count."""
        widths = sum(kind.shape.head_dim for _, kind in self.kinds) if self.shape.wide_layers else 0
        return self.tokens * 2 * widths * self.residual_element

    @once
    def _mask_scores(self) -> float:
        """Of one head of a micro-batch."""
        return self.tokens * self.layout.sequence_length * (self.shape.num_attentions > 0)

    @once
    def _sequences(self) -> float:
        """Of a micro-batch."""
        return self.tokens * self.layout.context / self.layout.sequence_length

    # One layer, nothing recomputed.

    @once
    def norm_input_bytes(self) -> float:
        """What a norm keeps before its weight: the residual, or its fp32 copy."""
        return self.split_hidden * self._norm_input_element

    @once
    def half_norm(self) -> str:
        """The kind of the norms of a layer's halves, which may be of what these give."""
        return self.inner_norm if self.shape.norms_after else self.norm

    @once
    def _norm_input_element(self) -> int:
        return self._input_element_of(self.half_norm)

    @once
    def _normalized_element(self) -> int:
        return self._normalized_element_of(self.half_norm)

    def _input_element_of(self, norm: str) -> int:
        """Written out, a layer norm keeps twice what is left without the mean: to square it, and to scale it."""
        widened = {"layer": self.residual_element, "layer_written_out": 8}.get(norm, 4)
        return max(widened, self.residual_element)

    def _normalized_element_of(self, norm: str) -> int:
        """What a norm keeps of what it normalized, for its weight's gradient; torch's own makes it again."""
        if self.is_frozen or norm in ("layer", "layer_fp32"):
            return 0
        return self.residual_element if norm == "rms" else 4

    @once
    def outputs_norms_bytes(self) -> float:
        """Norms of what both halves give, beside those of what they read (Gemma 2, GLM-4): nothing reads theirs."""
        return (
            (self.shape.norms_per_layer >= 4)
            * self.split_hidden
            * (self._norm_input_element + self._normalized_element)
        )

    def norm_output_bytes(self, num_readers: float, *, is_read_by_adapter: bool) -> float:
        """Normalized values, for the weight's gradient, and what the products read: each its own cast in autocast."""
        if self.is_frozen:
            return self.hidden * self.element * is_read_by_adapter
        normalized = self.split_hidden * self._normalized_element
        return normalized + self.hidden * self.element * (num_readers if self.is_autocast else 1)

    @once
    def reads(self) -> QuantizedReads:
        """QLoRA: what is there while weights are read from four bits."""
        return QuantizedReads(self.shape, self.layout)

    @once
    def weight_element(self) -> float:
        """Bytes of a layer's weight as FSDP gathers it; half of them at rest, unless four bits stand for it."""
        shape = self.shape
        if self.layout.method != "qlora":
            return float(self.element)
        of_hidden, of_ffn = four_bit_bytes(shape.hidden), four_bit_bytes(shape.moe_ffn or shape.ffn)
        experts = shape.moe_layers * shape.expert_params
        blocks = shape.num_mlps * shape.mlp_params(shape.ffn) + experts
        down = blocks / (3 if shape.gated_mlp else 2)
        every = shape.all_attention_params + shape.delta_layers * shape.delta_params + blocks
        return of_hidden + (of_ffn - of_hidden) * down / every

    @once
    def reads_last_again(self) -> bool:
        """QLoRA: whether a layer that is made again ends with its last product, whose weight is read for it: a norm or
        dropout reads what it gives; or its adapter's matrices come after it, whose product selection keeps."""
        if self.layout.method != "qlora" or self.layout.recompute == "none" or self.stops_before_reading:
            return False
        return self.layout.recompute == "full" or not self.adapts_last

    @once
    def attention_norm_bytes(self) -> float:
        """The norm before attention. With parallel residuals both norms read the same tensor, counted at the other; and
        where both are one, what it gives is there too, but for casts of its own."""
        own = 0.0 if self.shape.parallel_residual else self.norm_input_bytes + self.outputs_norms_bytes
        shape = self.shape
        scored = 1 if shape.fused_qkv else 1 + shape.projected_kv_dim // shape.kv_dim
        readers = scored + (shape.delta_inputs - scored) * shape.delta_layers / shape.layers
        if self.shape.norms_per_layer == 1 and self.shape.parallel_residual and not self.is_frozen:
            return own + self.hidden * self.element * readers * self.is_autocast
        return own + self.norm_output_bytes(readers, is_read_by_adapter=self._adapts(ATTENTION_INPUTS))

    @once
    def last_input_bytes(self) -> float:
        """The backward pass of the queries' product, the last of three that read one norm's output: its gradient comes
        in, and that of what it read goes out, beside the sum of the others'. 0 where other products read it."""
        shape = self.shape
        if shape.fused_qkv or shape.kv_lora_rank or shape.delta_layers or shape.parallel_residual:
            return 0.0
        queries = self.tokens * self.element * shape.query_dim / self.layout.tensor
        return self.attention_norm_bytes + 2 * self.whole_hidden_bytes + queries

    @once
    def mlp_norm_output_bytes(self) -> float:
        """The norm before the feed-forward block, but for its input."""
        readers = 2 if self.shape.gated_mlp else 1
        return self.norm_output_bytes(readers, is_read_by_adapter=self._adapts(MLP_INPUTS))

    @once
    def last_norm_bytes(self) -> float:
        """Where it is, what this norm keeps."""
        return (self.outputs_norms_bytes or self.norm_input_bytes) * self.shape.ends_in_norm

    @once
    def block_frame_bytes(self) -> float:
        """What a layer's code has in its hands while its feed-forward block runs, whoever keeps it: what the block
        reads, and with sequence parallelism the rank's part of it too."""
        return self.whole_hidden_bytes + self.input_bytes * (self.layout.tensor > 1)

    @once
    def unkept_input_bytes(self) -> float:
        """What came to a layer that is kept whole, where neither a norm nor an adapter keeps it: its code has it."""
        return self.input_bytes * (self.shape.norms_after and not self._adapts(ATTENTION_INPUTS))

    @once
    def has_norm_copies(self) -> bool:
        """Whether norms keep a wider copy of what they read."""
        return self.norm != "layer" and self.residual_element < 4

    @once
    def summed_products_bytes(self) -> float:
        """Adapters: of the products that read the block's input, the sums with what their adapters give, which
        selective recomputation doesn't keep beside either."""
        if "gate_up_proj" in self.layout.lora_targets:
            return 2 * self.product_bytes
        return len(MLP_INPUTS.intersection(self.layout.lora_targets)) * self.product_bytes

    @once
    def adapts_first(self) -> bool:
        """Whether a product that reads the second norm's output has an adapter."""
        return self._adapts(MLP_INPUTS)

    @once
    def adapts_mixed(self) -> bool:
        """Whether attention's last product has one."""
        return self._adapts(ATTENTION_OUTPUTS)

    @once
    def adapts_last(self) -> bool:
        """Whether a layer's last product has an adapter."""
        return self._adapts(MLP_OUTPUTS)

    @once
    def stops_before_reading(self) -> bool:
        """QLoRA: whether a layer is made again without its last product, whose result nothing reads."""
        layout = self.layout
        is_again = layout.method == "qlora" and layout.recompute != "none"
        return is_again and not reads_last_product(self.shape, layout)

    @once
    def _num_scores(self) -> float:
        """A rank's, of a layer."""
        return self.tokens * self.shape.heads * self.layout.sequence_length / self.layout.tensor

    @once
    def returned_scores_bytes(self) -> float:
        """Where scores are written out, their softmax, which attention returns: a layer's code has it in its hands to
        its end. Under autocast rotated queries, whose type it has, are in fp32."""
        return self._num_scores * self.residual_element * (not self.layout.flash_attention)

    @once
    def scores_again_bytes(self) -> float:
        """Beside what selective recomputation keeps of a layer, where scores are written out, while their softmax is
        made again: wide ones before it and after it (masked ones stand for those that were kept); rotated queries (in
        order, too, in place of those that were kept), and keys and values for every query."""
        if self.layout.flash_attention or self.layout.recompute != "selective":
            return 0.0
        widths = 2 * self.shape.query_dim + self.shape.value_dim
        scores = self._num_scores * (8 if self._widens_softmax else self.element)
        return scores + self.tokens * self.element * widths / self.layout.tensor

    @once
    def score_gradient_bytes(self) -> float:
        """Beside what is kept of attention that is written out, while its softmax is differentiated: the gradient that
        comes to it and the one that it gives, both in its own type. What values were multiplied with has been let go,
        where that is a copy. Of context parallelism the gradients of all ranks' keys and values, and what is added to
        those of keys; 0 where a kernel has no such moment."""
        if self.layout.flash_attention:
            keys = self.shape.query_dim + self.shape.heads * self.shape.rope_dim
            all_tokens = self.tokens * self.layout.context / self.layout.tensor
            is_gathered = self.layout.context > 1
            return all_tokens * self.element * (2 * keys + self.shape.value_dim) * is_gathered
        return self._num_scores * (4 + 4 - self.element if self._widens_softmax else 2 * self.element)

    @once
    def sink_bytes(self) -> float:
        """Written-out attention with sinks (gpt_oss) when it has its softmax: scores with their mask, whose type they
        take, beside their sinks and less each row's largest, and what comes of these; narrowed where autocast was."""
        is_there = self.shape.attention_sinks and not self.layout.flash_attention
        wide = self.residual_element
        return self._num_scores * (3 * wide + self.element * (wide > self.element)) * is_there

    @once
    def attention_bytes(self) -> float:
        """What mixes a layer's tokens, the mean over layers: attention, or a delta rule."""
        shape = self.shape
        if shape.wide_layers:
            return self._mean_of(lambda kind: kind._scored_bytes)
        if not shape.delta_layers:
            return self._scored_bytes
        return (shape.num_attentions * self._scored_bytes + shape.delta_layers * self.delta_bytes) / shape.layers

    @once
    def kinds(self) -> "list[tuple[int, TrainerLayers]]":
        """Each kind of attention with scores: in how many layers, and layers that all have it."""
        kinds = self.shape.attentions
        return [(number, self if kind is self.shape else layers_of(kind, self.layout)) for number, kind in kinds]

    def _mean_of(self, value: "Callable[[TrainerLayers], float]") -> float:
        """Over layers whose heads are of two widths."""
        return sum(number * value(kind) for number, kind in self.kinds) / self.shape.layers

    @once
    def delta_bytes(self) -> float:
        """A gated delta rule as transformers' own torch code has it, in fp32 and chunks of 64 tokens (kernels, where
        flash-linear-attention is installed, keep less).

        Of keys' width, repeated for every value head, eight tensors: queries and keys as they came, normalized, scaled
        and decayed, keys times their rate, and what the solved system makes of them. Of values' three: as they came,
        new ones, and what the state corrects them to; and a state a chunk. Of a chunk's length a head five: both
        products of a chunk, their decay, and what the decayed ones are. Then the norm and its gate, and what the
        convolution read and gave. Autocast multiplies in its own type: what a product reads is there once more, narrow,
        and what nothing else reads is there in that type alone.
        """
        shape, element = self.shape, self.element
        keys, values = shape.delta_value_heads * shape.delta_key_head_dim, shape.delta_value_width
        states = values * shape.delta_key_head_dim / DELTA_CHUNK
        chunk = DELTA_CHUNK * shape.delta_value_heads
        kept: float
        if self.is_autocast:
            kept = keys * (24 + 7 * element) + values * (8 + 2 * element)
            kept += states * (4 + 2 * element) + chunk * (8 + 3 * element)
        else:
            kept = 4 * (8 * keys + 3 * values + states + 5 * chunk)
        mixed = 2 * shape.delta_key_width + values
        # Around the norm: its input, its gate and that through its function in fp32, and what is multiplied.
        weighted = 4 if self.is_autocast and not self.is_frozen else element
        norm = values * (12 + weighted)
        if not self.is_frozen:
            norm += values * 2 * element
        elif self._adapts(ATTENTION_OUTPUTS):
            norm += values * element
        each = kept + norm + 2 * element * mixed + DELTA_HEAD_BYTES * shape.delta_value_heads
        return self.tokens * each / self.layout.tensor

    @once
    def delta_excess_bytes(self) -> float:
        """What a layer with a delta rule keeps beyond the mean of all layers."""
        return self.delta_bytes - self.attention_bytes if self.shape.delta_layers else 0.0

    @once
    def _scored_bytes(self) -> float:
        """Queries, keys, values, the output, a number a query and head, and masks of dropout."""
        shape, layout = self.shape, self.layout
        query, key = shape.query_dim, shape.kv_dim
        is_read = not self.is_frozen or self._adapts(ATTENTION_OUTPUTS)
        statistics = 4.0 * shape.heads
        # A kernel keeps what it gave, which the output projection keeps too, unless it is copied in between; attention
        # that is written out keeps no result.
        output = float(query * (layout.flash_attention or is_read))
        if shape.kv_lora_rank:
            scored = query + shape.heads * shape.rope_dim
            # Values are a view of one product with the keys' dimensions that have no position, which stays whole.
            width = 2.0 * scored + query + 2.0 * shape.value_dim
            if layout.context > 1:
                # Keys and values of all ranks; the output in two pieces and put together.
                width = scored * (1.0 + layout.context) + shape.value_dim * (2.0 + layout.context)
            width += self._latent_norms * layout.tensor
        elif layout.context > 1:
            # Keys and values of all ranks, repeated for every query head; the output in two pieces and, for what reads
            # it, put together. Under a mask it is one.
            width = query * (2.0 + is_read * (1 - self.masked_share) + 2.0 * layout.context)
        else:
            width = query + 2.0 * key + output
            if self._rotates_fused:
                # Values are a view of one product; queries and keys are beside it, rotated.
                width += query + key
            width += query * (shape.copies_attention and layout.flash_attention and is_read)
            if shape.wide_scores and not self.is_autocast:
                width += (query + key) * (4 / self.element - 1)
        if shape.clips_qkv:
            width += query + 2.0 * key
        if shape.attention_gate:
            # The sigmoid, the result that it is multiplied with, and what the output projection reads.
            width += query * (2 if is_read else 1)
        width += 2.0 * (query - key) * self._copied_share
        width += self._inner_norms_width
        if shape.qk_norm_per_head and self.fuses_inner_norms:
            statistics += 4.0 * (shape.heads + shape.kv_heads)
        scores = 0.0
        if not layout.flash_attention:
            scores = self._score_bytes * shape.heads * layout.sequence_length
        masks = self.hidden * shape.dropout
        return self.tokens * (self.element * width + statistics + scores) / layout.tensor + masks

    @once
    def _inner_norms_width(self) -> float:
        """What norms of queries, keys and values keep, in elements of a token."""
        shape, width = self.shape, 0.0
        scored = shape.query_dim + shape.kv_dim
        if shape.qk_norm_per_head or shape.qk_norm_whole:
            width += scored * self._score_norm_bytes / self.element
        if shape.normalizes_values:
            # Its kernel keeps what it reads; the keys' one has that, too, but where it keeps a wider copy.
            width += shape.kv_dim * (not shape.values_are_keys or self.inner_norm != "layer")
        if shape.normalizes_scores:
            width += scored * 4.0 / self.element  # in float32
        return width

    @once
    def _rotates_fused(self) -> bool:
        """Whether rotated queries and keys stand beside the one product that they are parts of."""
        shape = self.shape
        is_rotated = not (shape.learned_positions or shape.alibi)
        return shape.fused_qkv and is_rotated and not (shape.copies_keys or shape.wide_scores)

    @once
    def _score_norm_bytes(self) -> int:
        """Of an element of queries or keys that are normalized: a copy in fp32, and what it is normalized to; of one
        kernel its input."""
        if self.fuses_inner_norms:
            return 4 if self.inner_norm == "layer_fp32" else self.element
        if self.is_frozen:
            return 4
        # Ranks that share all heads' norm write it out, whatever the family's code, as OLMo 2's.
        is_wide = self.shape.norm in ("rms_cast", "rms_fp32", "rms_wide") or (
            self.shape.qk_norm_whole and self.layout.tensor > 1
        )
        return 4 + (4 if is_wide else self.element)

    @once
    def scored_products_bytes(self) -> float:
        """Queries, keys and values as products gave them."""
        return self.tokens * self.element * (self.shape.query_dim + self.shape.projected_kv_dim) / self.layout.tensor

    @once
    def rotating_bytes(self) -> float:
        """Queries and keys that autocast left in fp32 when a norm was written out, while queries are rotated: of both
        what the norm keeps and gave, and of queries three tensors more. 0 where they have 16 bits: then no moment that
        counts."""
        shape = self.shape
        is_normed = shape.qk_norm_per_head or shape.qk_norm_whole
        if not is_normed or self.fuses_inner_norms or self.element == 4 or not self.is_autocast or self.is_frozen:
            return 0.0
        given = self._score_norm_bytes + 4
        return self.tokens * (shape.query_dim * (given + 12) + shape.kv_dim * given) / self.layout.tensor

    @once
    def _widens_softmax(self) -> bool:
        """Whether a written-out softmax is in fp32 beside narrower products: as the model has it, or as autocast has
        every softmax."""
        return (self.layout.fp32_softmax or self.is_autocast) and self.element < 4

    @once
    def _score_bytes(self) -> float:
        """Kept of one score where attention is written out: the softmax, in fp32 and as values are multiplied with it,
        and of capped ones the tanh. Dropout has a mask of a byte, and what it left where that is no copy anyway."""
        kept = self.element + 4 * self._widens_softmax
        if self.shape.attention_dropout:
            kept += 1 + self.element * (not self._widens_softmax)
        return kept + self.element * self.shape.has_capped_scores

    @once
    def _latent_norms(self) -> float:
        """Latents' norms, in elements of a token: inputs in float32, normalized values and outputs; of one kernel its
        input and output."""
        latents = self.shape.q_lora_rank + self.shape.kv_lora_rank
        if not self.is_frozen:
            return latents * (2.0 if self.fuses_inner_norms else 4.0 / self.element + 2.0)
        read = self.shape.q_lora_rank * self._adapts(QUERY_LATENT_INPUTS)
        read += self.shape.kv_lora_rank * self._adapts(KEY_LATENT_INPUTS)
        return latents * (1.0 if self.fuses_inner_norms else 4.0 / self.element) + read

    @once
    def mlp_bytes(self) -> float:
        """The feed-forward block, the mean over layers; routed experts by the tokens that they get."""
        shape = self.shape
        dense = self._block_bytes(shape.ffn, is_thin=self.has_thin_gates) * shape.num_mlps
        routed = self.routed_bytes * shape.moe_layers if shape.moe_layers else 0.0
        return (dense + routed) / shape.layers + self.hidden * shape.dropout

    @once
    def routed_bytes(self) -> float:
        """One layer's router, experts and shared expert."""
        return self.experts_bytes + self.shared_bytes + self._router_bytes + self._apart_bytes

    @once
    def _apart_bytes(self) -> float:
        """Where experts and a shared one have norms of their own: what the norms of what they give read, and the
        router's normalized and scaled."""
        if not self.shape.shared_apart:
            return 0.0
        scaled = self.hidden * (self.residual_element + self.element) * (not self.is_frozen)
        return 2 * self.hidden * self._norm_input_element + scaled

    @once
    def experts_bytes(self) -> float:
        """One layer's routed experts: their blocks, what they read, and what they give before it is weighted.

        Spread over ranks, what they give is kept in the order of the tokens, of which a rank of the tensor axis has all
        rows.
        """
        shape, layout = self.shape, self.layout
        if layout.method == "qlora":
            # Read from four bits, and run, once more in the backward pass: of what other ranks sent, or of all tokens.
            sent = self.rows_bytes / layout.tensor + self.rows_bytes
            return self.frozen_experts_input_bytes if self.reruns_experts else sent
        block = self._block_bytes(shape.moe_ffn * shape.experts_per_token)
        read = 0.0 if self.is_frozen else self.rows_bytes
        if not self.is_spread:
            # Batched ones read every token's state times its score: the state is kept as it came, in its own type.
            came = self.rows_bytes * (self.residual_element / self.element if shape.batches_experts else 1)
            return block + read + came
        return block + read / layout.tensor + self.rows_bytes

    @once
    def reruns_experts(self) -> bool:
        """QLoRA's, which a rank has all of, keep what they read, for their backward pass runs them once more."""
        return self.layout.method == "qlora" and not self.is_spread

    @once
    def frozen_experts_input_bytes(self) -> float:
        """What adapters' experts read, unless the norm that gave it is counted with it: no gradient needs it."""
        return max(self.whole_hidden_bytes - self.mlp_norm_output_bytes, 0.0)

    @once
    def expert_run_bytes(self) -> float:
        """One layer's spread experts while what they give is weighted by one each, on their own rank."""
        block = self._block_bytes(self.shape.moe_ffn * self.shape.experts_per_token)
        return block + 5 * self.rows_bytes / self.layout.tensor

    @once
    def shared_bytes(self) -> float:
        """One layer's shared expert."""
        return self._block_bytes(self.shape.shared_ffn, is_thin=self.has_thin_gates) if self.shape.shared_ffn else 0.0

    @once
    def _router_bytes(self) -> float:
        """Scores in float32, and a copy of what the router reads where that is in float32 too, for its gradient."""
        copied = self.hidden * 4 * (self.shape.wide_router and self.element < 4 and not self.is_frozen)
        return self.tokens * 4 * self.shape.experts + copied

    @once
    def is_spread(self) -> bool:
        """Experts lie on several ranks, as units of their own for FSDP."""
        return self.shape.moe_layers > 0 and self.layout.expert * self.layout.tensor > 1

    @once
    def rows_bytes(self) -> float:
        """A hidden state of every token for each expert that it chose."""
        return self.hidden * self.element * self.shape.experts_per_token

    @once
    def weighed_element(self) -> int:
        """Bytes of an element of experts' results times their weights."""
        if self.shape.weights_as_read:
            return self.residual_element
        # Autocast runs a router's product in its own type, whatever is read; a softmax it widens, but no sigmoid.
        is_narrowed = self.shape.sigmoid_weights and self.is_autocast
        return max(self.element, 4) if self.shape.wide_weights and not is_narrowed else self.element

    @once
    def weighed_bytes(self) -> float:
        """The same as `rows_bytes` of such results."""
        return self.rows_bytes * self.weighed_element / self.element

    @once
    def narrowed_bytes(self) -> float:
        """The experts' gradient, where it was wide: autograd narrows it before it lets go of what it is made of (but in
        a recomputed layer, where traces show none)."""
        is_again = self.layout.recompute != "none" or self.reruns_experts
        return self.rows_bytes * (self.weighed_element > self.element and not is_again)

    @once
    def expert_product_bytes(self) -> float:
        """One tensor of the routed experts' width."""
        width = self.shape.moe_ffn * self.shape.experts_per_token
        return self.tokens * self.element * width / self.layout.tensor

    @once
    def product_bytes(self) -> float:
        """One tensor of the feed-forward block's width."""
        return self.tokens * self.element * self._width / self.layout.tensor

    @once
    def product_gradient_bytes(self) -> float:
        """What comes to the products of a mean layer in their backward pass, a gradient of each one's result."""
        if self.shape.wide_layers:
            return self._mean_of(lambda kind: kind.product_gradient_bytes)
        shape, element = self.shape, self.element
        results = shape.query_dim * (1 + shape.attention_gate) + shape.projected_kv_dim
        found = self.tokens * element * results / self.layout.tensor + (1 + shape.gated_mlp) * self.product_bytes
        routed = (1 + shape.gated_mlp) * self.expert_product_bytes + self.rows_bytes
        return found + 2 * self.whole_hidden_bytes + routed * shape.moe_layers / shape.layers

    @once
    def _width(self) -> float:
        """Of the feed-forward block that is no routed expert, the mean over layers."""
        shape = self.shape
        return (shape.ffn * shape.num_mlps + shape.shared_ffn * shape.moe_layers) / shape.layers

    @once
    def has_thin_gates(self) -> bool:
        """Feed-forward blocks, but for routed experts, make their activated gate again
        (`training_container/trainer/models/gates.py`)."""
        return self.shape.gated_mlp and self.layout.unfused and not self.shape.keeps_activated_gate

    @once
    def keeps_block_result(self) -> bool:
        """Whether what a feed-forward block's last product reads is kept for its weight, or its adapter."""
        return not self.is_frozen or self._adapts(MLP_OUTPUTS)

    def _block_bytes(self, width: int, *, is_thin: bool = False) -> float:
        """Gated: gate, up, activated gate (not in a thin one) and product. Else what the activation function keeps, and
        its output."""
        tensors = float(self.shape.activation_tensors + 2 * self.shape.gated_mlp - is_thin)
        # The result, for the next product's weight; or for the activation's own gradient.
        tensors += self.keeps_block_result or tensors == 0
        return self.tokens * self.element * width * tensors / self.layout.tensor

    @once
    def whole_bytes(self) -> float:
        """All that a layer keeps for its backward pass, the mean over layers."""
        return self.attention_half_bytes + self.mlp_bytes

    @once
    def attention_half_bytes(self) -> float:
        """A layer but for its feed-forward block, both norms included."""
        norms = (
            self.attention_norm_bytes + self.norm_input_bytes + self.mlp_norm_output_bytes + self.outputs_norms_bytes
        )
        return norms + self.attention_bytes

    @once
    def whole_routed_bytes(self) -> float:
        """All that a layer with experts keeps."""
        return self.attention_half_bytes + self.routed_bytes + self.hidden * self.shape.dropout

    @once
    def kept_bytes(self) -> float:
        """What a layer keeps until its backward pass begins, with the layout's recomputation; the mean over layers."""
        if self.shape.wide_layers:
            return self._mean_of(lambda kind: kind.kept_bytes)
        return self._kept(self.whole_bytes, self._width, self.shape.moe_layers / self.shape.layers)

    @once
    def kept_routed_bytes(self) -> float:
        """The same of a layer with experts."""
        if self.shape.wide_layers:
            return self._mean_of(lambda kind: kind.kept_routed_bytes)
        return self._kept(self.whole_routed_bytes, self.shape.shared_ffn, 1.0)

    @once
    def unreached_bytes(self) -> float:
        """Of adapters, what a model's first layer keeps less than others: no gradient comes to where none is trained,
        its first norm, and of adapters that leave out what attention reads all that is before them. With parallel
        residuals none comes from attention to the feed-forward block either, whatever attention's adapters are."""
        # Of two kinds of layers the one that a model's first layer is of.
        shape, first = self.shape, self.kinds[0 in self.shape.wide_places][1]
        inputs = ATTENTION_INPUTS | QUERY_LATENT_INPUTS | KEY_LATENT_INPUTS
        if shape.parallel_residual and self.is_frozen and not shape.moe_layers and self.layout.recompute == "none":
            found = self.norm_input_bytes + self._unreached_block_bytes
            if not self._adapts(inputs):
                read = self.tokens * self.element * first.shape.value_dim / self.layout.tensor
                found += first.attention_bytes - read * self._adapts(ATTENTION_OUTPUTS)
            return found
        if not self.is_frozen or self.layout.recompute != "none" or shape.delta_layers or shape.parallel_residual:
            return 0.0
        if self._adapts(inputs):
            return 0.0 if shape.norms_after else self.norm_input_bytes
        if shape.dense_layers:
            return 0.0
        unreached = self.attention_norm_bytes + first.attention_bytes
        if self._adapts(ATTENTION_OUTPUTS):
            # What the adapter reads, and what a norm of attention's result keeps.
            unreached -= self.norm_input_bytes if shape.norms_after else self.outputs_norms_bytes
            return unreached - self.tokens * self.element * first.shape.value_dim / self.layout.tensor
        return unreached + self.norm_input_bytes * (not shape.norms_after) + self._unreached_block_bytes

    @once
    def _unreached_block_bytes(self) -> float:
        """Of a feed-forward block that no gradient comes to but from its own adapters: all but what these read."""
        if self._adapts(MLP_INPUTS):
            return 0.0
        return self.mlp_bytes - self.product_bytes * self._adapts(MLP_OUTPUTS)

    def _kept(self, whole: float, width: float, routed: float) -> float:
        """`routed`: the share of layers with experts."""
        recompute = self.layout.recompute
        if recompute == "none":
            return whole
        if recompute == "full":
            return self.input_bytes
        return self.input_bytes + self._selected_bytes(width) + routed * self._batched_bytes

    @once
    def _batched_bytes(self) -> float:
        """Selective recomputation: results of experts' products, where they are batched ones."""
        if not self.shape.batches_experts:
            return 0.0
        return (2 if self.shape.gated_mlp else 1) * self.expert_product_bytes + self.rows_bytes

    @once
    def kept_block_bytes(self) -> float:
        """Adapters, of a layer that is made again: what is kept of its feed-forward block's products."""
        if self.layout.recompute != "selective":
            return 0.0
        products = (2 if self.shape.gated_mlp else 1) * self.product_bytes
        return products + self.element * self.tokens * adapter_outputs(
            self.shape, self.layout, names=MLP_INPUTS | MLP_OUTPUTS
        )

    def _selected_bytes(self, width: float) -> float:
        """Selective recomputation: results of products but the last, and of attention; experts' are made again."""
        shape, layout = self.shape, self.layout
        if shape.kv_lora_rank:
            qkv = 2.0 * shape.query_dim + shape.value_dim + shape.heads * shape.rope_dim
            qkv += (shape.q_lora_rank + shape.kv_lora_rank + shape.rope_dim) * layout.tensor
        else:
            qkv = shape.query_dim + shape.projected_kv_dim
        # A kernel that drops scores is run again, with the same numbers: its result isn't kept.
        is_kept = not (shape.attention_dropout and layout.flash_attention)
        scored = qkv + shape.query_dim * shape.attention_gate + shape.value_dim * is_kept
        if not (layout.flash_attention or shape.adds_scores):
            # Scores are a product's result too.
            wide = 4 / self.element if shape.wide_scores and not self.is_autocast else 1
            scored += shape.heads * layout.sequence_length * wide
        mixing = self.element * scored + 4 * shape.heads * is_kept
        if shape.delta_layers:
            share = shape.delta_layers / shape.layers
            mixing = (1 - share) * mixing + share * self._selected_delta_bytes
        each = self.tokens / layout.tensor
        block = self.element * width * (2 if shape.gated_mlp else 1)
        # Where the feed-forward block is routed experts alone, a layer's last product is attention's.
        hidden = self.whole_hidden_bytes * ((width > 0) + shape.shared_apart)
        return each * (mixing + block) + hidden + self._selected_adapter_bytes

    @once
    def _selected_adapter_bytes(self) -> float:
        """Of adapters both products are kept beside the frozen one, but for a layer's very last."""
        if not self.is_frozen:
            return 0.0
        return self.element * self.tokens * adapter_outputs(self.shape, self.layout)

    @once
    def _selected_delta_bytes(self) -> float:
        """Of a token of a delta rule: what its input is projected to, and in fp32 two products within a chunk, what is
        read of the state twice and of the chunk once, and the state itself."""
        shape = self.shape
        values = shape.delta_value_width * (3 + shape.delta_key_head_dim / DELTA_CHUNK)
        return self.element * shape.delta_projected + 4 * (2 * DELTA_CHUNK * shape.delta_value_heads + values)

    # The ends.

    @once
    def final_norm_bytes(self) -> float:
        """The last norm, over all of a rank's tokens: tensor parallelism has gathered them."""
        # A loss in the head reads it, whoever keeps it.
        is_there = not self.is_frozen or self._adapts(HEADS) or self.loss_is_in_head
        output = self.residual_element * is_there
        kept = self._input_element_of(self.norm) + self._normalized_element_of(self.norm)
        return self.hidden * (kept + output)

    @once
    def head_weight(self) -> float:
        """Elements of a rank's part of the head."""
        return self.shape.vocab * self.shape.hidden / self._head_split

    @once
    def _head_split(self) -> int:
        return vocabulary_split(self.shape, self.layout)

    @once
    def loss_is_in_head(self) -> bool:
        """The trainer's rule (`losses/head.py`): by chunks, or by one where ranks share the vocabulary; not of a head
        with an adapter, nor of logits that are more than what it gives."""
        if self.shape.logits != "plain":
            return False
        chunk = self.layout.loss_chunk_tokens
        if chunk is None or self._adapts(HEADS):
            return False
        return self._head_split > 1 or self.tokens > chunk or self.layout.chunks_short_losses

    @once
    def loss_is_one_chunk(self) -> bool:
        """Of a loss in the head: of all of a rank's tokens at a time."""
        return self.tokens <= (self.layout.loss_chunk_tokens or 0)

    @once
    def loss_bytes(self) -> float:
        """Logits and loss at their most; where the loss is computed in the head, with its gradients."""
        entries = self.shape.vocab / self._head_split
        if not self.loss_is_in_head:
            # Logits, their log-softmax, and two gradients in float32; the logits themselves are let go where they are.
            wide = max(4, self.element)
            is_kept = self.shape.logits == "capped" or self.layout.pipeline > 1
            if self.element < wide and self.tokens > LOSS_PART_TOKENS:
                return self._parts_of_logits_bytes(LOSS_PART_TOKENS / self.tokens)
            return self.tokens * self.shape.vocab * (3 * wide + self.element * is_kept)
        chunk = min(float(self.layout.loss_chunk_tokens or 0), self.tokens)
        is_one = self.loss_is_one_chunk
        logits = chunk * entries * (4 + (self.element if self.element < 4 else 0))
        hidden = self.hidden * (4 if self._sums_in_fp32 else self.residual_element)
        if self.is_frozen:
            hidden += chunk * self.shape.hidden * self.element  # a chunk's own, before it is put among the others
        found = logits + hidden + self._head_gradient_bytes(is_one=is_one)
        if is_one and self.is_autocast and not self.is_frozen:
            # A chunk's gradient is widened to its weight's type when its logits are gone.
            found = max(found, hidden + self.head_weight * (self.element + 4))
        return found

    @once
    def logits_gradient_bytes(self) -> float:
        """What comes to whole logits, beside these where something keeps them."""
        return self.tokens * self.shape.vocab * self.element * (1 + (self.shape.logits == "capped"))

    @once
    def kept_end_bytes(self) -> float:
        """What a pipeline's head and its last norm keep of a micro-batch until its backward pass, but for the norm's
        input: whole logits, which are the stage's result, and what a softmax of no more than one part gave; of a loss
        in the head the gradients that it has made already."""
        norm = self.hidden * self._normalized_element_of(self.norm)
        wide = 4 if self._sums_in_fp32 else self.element
        if self.loss_is_in_head:
            return norm + wide * (self.hidden + self.head_weight * (not self.is_frozen))
        is_in_parts = self.element < 4 and self.tokens > LOSS_PART_TOKENS
        logits = self.element + (0 if is_in_parts else max(4, self.element))
        logits += self.element * (self.shape.logits == "capped")
        return norm + self.tokens * self.shape.vocab * logits + self.hidden * self.element * (not self.is_frozen)

    @once
    def forward_logits_bytes(self) -> float:
        """Whole logits in the forward pass, and the tanh that caps them: beside them one part in float32, and its
        log-softmax."""
        part = min(float(LOSS_PART_TOKENS), self.tokens) if self.element < 4 else self.tokens
        whole = self.tokens * self.element * (1 + (self.shape.logits == "capped"))
        return self.shape.vocab * (whole + 2 * max(4, self.element) * part)

    @once
    def _sums_in_fp32(self) -> bool:
        """In fp16 the loss's gradients are products in fp32, until its scale is known."""
        return self.layout.precision == "fp16"

    def _parts_of_logits_bytes(self, part: float) -> float:
        """Whole logits of 16 bits, whose loss is made of one such part at a time: the last part's, beside the others'
        gradients; or all of these, and put together, when the logits are gone; or an adapted head's own logits in the
        forward pass, beside the sum. What caps them is kept."""
        last = self.element + 12 * part + self.element * (1 - part)
        # A pipeline's stage keeps its result.
        together = self.element * (3 if self._adapts(HEADS) or self.layout.pipeline > 1 else 2)
        is_capped = self.shape.logits == "capped"
        return self.tokens * self.shape.vocab * (self.element * is_capped + max(last, together))

    def _head_gradient_bytes(self, *, is_one: bool) -> float:
        """The head's gradient, summed over chunks in float32, and the next one to be added."""
        if self.is_frozen:
            return 0.0
        if is_one:
            return self.head_weight * (self.element + 4 * self._sums_in_fp32)
        added = 4 if self._sums_in_fp32 else self.element if self.element < 4 else 0
        return self.head_weight * (4 + added)

    def _adapts(self, names: frozenset[str]) -> bool:
        return self.is_frozen and not names.isdisjoint(self.layout.lora_targets)


def layers_of(shape: ModelShape, layout: Layout) -> TrainerLayers:
    """The same for every part of an estimate, and for all layouts whose layers are the same: its memory's moments, its
    times and its launches ask for the same."""
    return _layers_of(shape, layout.of_layers())


@lru_cache(maxsize=1024)
def _layers_of(shape: ModelShape, layout: Layout) -> TrainerLayers:
    return TrainerLayers(shape, layout)
