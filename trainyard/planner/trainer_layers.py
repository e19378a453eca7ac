"""What a layer and the head of a model leave in memory when our own trainer runs Hugging Face's code, line by line.

Other frameworks' layers are in `activations`. Here each tensor that autograd keeps has its term, so that closed form
and dry run can be held against each other tensor by tensor (docs/planner.md has the table); neither uses the other's
code. All in bytes of one micro-batch. "Whole" tensors are not split by tensor parallelism, whose regions gather what
they read.
"""

from dataclasses import dataclass
from functools import cached_property

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape

NORM_BACKWARD_BYTES = 20
"""Of an element, while an RMS norm written out in fp32 (`LlamaRMSNorm`) is differentiated: five tensors."""

ATTENTION_INPUTS = frozenset({"q_proj", "k_proj", "v_proj", "c_attn", "query_key_value"})
MLP_INPUTS = frozenset({"gate_proj", "up_proj", "c_fc", "dense_h_to_4h", "fc1"})
MLP_OUTPUTS = frozenset({"down_proj", "dense_4h_to_h", "fc2"})
"""Names of adapted layers, by what they read."""


@dataclass(frozen=True)
class TrainerLayers:
    """A model's layers in one layout of our trainer."""

    shape: ModelShape
    layout: Layout

    @property
    def tokens(self) -> float:
        """A rank's, of one micro-batch."""
        return self.layout.tokens_per_micro_batch

    @property
    def element(self) -> int:
        """Bytes of what products give."""
        return self.layout.element_bytes

    @property
    def is_frozen(self) -> bool:
        """Adapters alone are trained."""
        return self.layout.method != "full"

    @cached_property
    def is_autocast(self) -> bool:
        """One copy of fp32 weights on every rank, cast product by product: no FSDP, no DeepSpeed."""
        layout = self.layout
        is_split = layout.tensor * layout.pipeline * layout.context * layout.expert > 1 or layout.zero_stage == 3
        return layout.engine == "torch" and self.element == 2 and not is_split

    @cached_property
    def residual_element(self) -> int:
        """Bytes of what flows between layers: of the embedding's own type."""
        return 4 if self.is_autocast and not self.is_frozen else self.element

    @cached_property
    def hidden(self) -> float:
        """Elements of tokens x hidden, all of them."""
        return self.tokens * self.shape.hidden

    @cached_property
    def split_hidden(self) -> float:
        """The same between regions, where sequence parallelism splits it."""
        return self.hidden / self.layout.norm_split

    @cached_property
    def whole_hidden_bytes(self) -> float:
        """One hidden state as a stage sends it, or a region of tensor parallelism reads it."""
        return self.hidden * self.element

    @cached_property
    def input_bytes(self) -> float:
        """What recomputation keeps of a layer."""
        return self.split_hidden * self.residual_element

    # One layer, nothing recomputed.

    @cached_property
    def norm_input_bytes(self) -> float:
        """What a norm keeps before its weight: the residual, or its fp32 copy."""
        widened = 4 if self.shape.norm == "rms" else self.residual_element
        return self.split_hidden * max(widened, self.residual_element)

    def norm_output_bytes(self, num_readers: int, *, is_read_by_adapter: bool) -> float:
        """Normalized values, for the weight's gradient, and what the products read: each its own cast in autocast."""
        if self.is_frozen:
            return self.hidden * self.element * is_read_by_adapter
        normalized = self.split_hidden * self.residual_element * (self.shape.norm == "rms")
        return normalized + self.hidden * self.element * (num_readers if self.is_autocast else 1)

    @cached_property
    def attention_norm_bytes(self) -> float:
        """The norm before attention. With parallel residuals both norms read the same tensor, counted at the other."""
        own = 0.0 if self.shape.parallel_residual else self.norm_input_bytes
        readers = 1 if self.shape.fused_qkv else 3
        return own + self.norm_output_bytes(readers, is_read_by_adapter=self._adapts(ATTENTION_INPUTS))

    @cached_property
    def mlp_norm_output_bytes(self) -> float:
        """The norm before the feed-forward block, but for its input."""
        readers = 2 if self.shape.gated_mlp else 1
        return self.norm_output_bytes(readers, is_read_by_adapter=self._adapts(MLP_INPUTS))

    @cached_property
    def attention_bytes(self) -> float:
        """Queries, keys, values, the output, a number a query and head, and masks of dropout."""
        shape, layout = self.shape, self.layout
        query, key = shape.query_dim, shape.kv_dim
        if shape.kv_lora_rank:
            width = 4.0 * query + 2 * shape.heads * shape.rope_dim
            width += 2 * (shape.q_lora_rank + shape.kv_lora_rank) * layout.tensor
        elif layout.context > 1:
            # Keys and values of all ranks, repeated for every query head; the output in two pieces and put together.
            width = 3.0 * query + 2.0 * query * layout.context
        elif shape.fused_qkv and not shape.learned_positions:
            # One product whose values are a view of it; queries and keys rotated, so that the output has to be copied.
            width = 3.0 * query + 4.0 * query
        else:
            width = 2.0 * query + 2.0 * key
        if shape.qk_norm_per_head:
            width += (query + key) * (2.0 if self.is_frozen else 3.0)
        statistics = 4.0 * shape.heads
        scores = 0.0
        if not layout.flash_attention:
            scores = self.element * shape.heads * layout.sequence_length
        masks = self.hidden * shape.dropout
        return self.tokens * (self.element * width + statistics + scores) / layout.tensor + masks

    @cached_property
    def mlp_bytes(self) -> float:
        """The feed-forward block, the mean over layers; routed experts by the tokens that they get."""
        shape = self.shape
        dense = self._block_bytes(shape.ffn) * shape.num_mlps
        routed = 0.0
        if shape.moe_layers:
            routed = self._block_bytes(shape.moe_ffn * shape.experts_per_token) + self._block_bytes(shape.shared_ffn)
            routed += 2 * self.hidden * self.element * shape.experts_per_token + self.tokens * 8 * shape.experts
        return (dense + routed * shape.moe_layers) / shape.layers + self.hidden * shape.dropout

    @property
    def product_bytes(self) -> float:
        """One tensor of the feed-forward block's width."""
        return self.tokens * self.element * self._width / self.layout.tensor

    @cached_property
    def _width(self) -> float:
        """Of the feed-forward block, the mean over layers."""
        shape = self.shape
        width = float(shape.ffn * shape.num_mlps)
        width += (shape.moe_ffn * shape.experts_per_token + shape.shared_ffn) * shape.moe_layers
        return width / shape.layers

    def _block_bytes(self, width: int) -> float:
        """Gated: gate, up, activated gate and product. Else what the activation function keeps, and its output."""
        tensors = 3.0 if self.shape.gated_mlp else float(self.shape.activation_tensors)
        tensors += not self.is_frozen or self._adapts(MLP_OUTPUTS)
        return self.tokens * self.element * width * tensors / self.layout.tensor

    @cached_property
    def whole_bytes(self) -> float:
        """All that a layer keeps for its backward pass."""
        norms = self.attention_norm_bytes + self.norm_input_bytes + self.mlp_norm_output_bytes
        return norms + self.attention_bytes + self.mlp_bytes

    @cached_property
    def kept_bytes(self) -> float:
        """What a layer keeps until its backward pass begins, with the layout's recomputation."""
        recompute = self.layout.recompute
        if recompute == "none":
            return self.whole_bytes
        return self.input_bytes + (self._selected_bytes if recompute == "selective" else 0.0)

    @property
    def _selected_bytes(self) -> float:
        """Selective recomputation: results of products but the last, and of attention."""
        shape = self.shape
        qkv = 3 * shape.query_dim if shape.fused_qkv else shape.query_dim + 2 * shape.kv_dim
        split = qkv + shape.query_dim + self._width * (2 if shape.gated_mlp else 1)
        each = self.tokens / self.layout.tensor
        return each * (self.element * split + 4 * shape.heads) + self.whole_hidden_bytes

    # The ends.

    @cached_property
    def final_norm_bytes(self) -> float:
        """The last norm, over all of a rank's tokens: tensor parallelism has gathered them."""
        input_bytes = 4 if self.shape.norm == "rms" else self.residual_element
        normalized = self.residual_element if self.shape.norm == "rms" and not self.is_frozen else 0
        output = 0 if self.is_frozen else self.residual_element
        return self.hidden * (max(input_bytes, self.residual_element) + normalized + output)

    @cached_property
    def head_weight(self) -> float:
        """Elements of a rank's part of the head."""
        return self.shape.vocab * self.shape.hidden / self._head_split

    @cached_property
    def _head_split(self) -> int:
        return self.layout.tensor if self.shape.vocab % self.layout.tensor == 0 else 1

    @property
    def loss_is_in_head(self) -> bool:
        """The trainer's rule (`losses/head.py`): by chunks, or by one where ranks share the vocabulary."""
        chunk = self.layout.loss_chunk_tokens
        return chunk is not None and (self._head_split > 1 or self.tokens > chunk)

    @cached_property
    def loss_bytes(self) -> float:
        """Logits and loss at their most; where the loss is computed in the head, with its gradients."""
        entries = self.shape.vocab / self._head_split
        if not self.loss_is_in_head:
            # Logits, their log-softmax, and two gradients in float32; the logits themselves are let go where they are.
            wide = max(4, self.element)
            is_kept = self.element < wide or self.layout.pipeline > 1
            return self.tokens * self.shape.vocab * (3 * wide + self.element * is_kept)
        chunk = min(float(self.layout.loss_chunk_tokens or 0), self.tokens)
        is_one = self.tokens <= (self.layout.loss_chunk_tokens or 0)
        logits = chunk * entries * (4 + (self.element if self.element < 4 else 0))
        return logits + self.hidden * self.residual_element + self._head_gradient_bytes(is_one=is_one)

    def _head_gradient_bytes(self, *, is_one: bool) -> float:
        """The head's gradient, summed over chunks in float32, and the next one to be added."""
        if self.is_frozen:
            return 0.0
        if is_one:
            return self.head_weight * self.element
        return self.head_weight * (4 + (self.element if self.element < 4 else 0))

    def _adapts(self, names: frozenset[str]) -> bool:
        return self.is_frozen and not names.isdisjoint(self.layout.lora_targets)
