"""The sizes of a transformer: what a Hugging Face configuration says, reduced to what memory and time depend on."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelShape:
    """One decoder (or encoder) of identical layers. Sizes are elements; parameters are exact for known families."""

    layers: int
    hidden: int
    ffn: int
    """Width of the feed-forward block; with a gated block, of each of its two input projections."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated_mlp: bool = True
    """Three projections (SwiGLU and kin) instead of two."""
    tied_embeddings: bool = False
    experts: int = 0
    """0: dense. Otherwise routed experts in each MoE layer."""
    experts_per_token: int = 0
    moe_ffn: int = 0
    """Width of one expert."""
    shared_ffn: int = 0
    """Width of the always-active shared expert; 0: none."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a gate of `hidden` parameters."""
    dense_layers: int = 0
    """Of a MoE model, the layers with an ordinary feed-forward block."""
    norm: Literal["rms", "layer"] = "rms"
    norms_per_layer: int = 2
    qk_norm_per_head: bool = False
    """A norm of head_dim on queries and keys."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    learned_positions: int = 0
    """Rows of a learned position embedding."""
    final_norm: bool = True

    @property
    def query_dim(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.kv_heads * self.head_dim

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over `hidden`."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def attention_params(self) -> int:
        """One layer's projections, with biases and query/key norms."""
        weights = self.hidden * (self.query_dim + 2 * self.kv_dim) + self.query_dim * self.hidden
        biases = (self.query_dim + 2 * self.kv_dim) * self.qkv_bias + self.hidden * self.output_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm_per_head

    def mlp_params(self, width: int) -> int:
        """A feed-forward block of that width, with biases."""
        inputs = 2 if self.gated_mlp else 1
        return (inputs + 1) * self.hidden * width + (inputs * width + self.hidden) * self.mlp_bias

    @property
    def expert_params(self) -> int:
        """All routed experts of one MoE layer."""
        return self.experts * self.mlp_params(self.moe_ffn)

    @property
    def moe_dense_params(self) -> int:
        """A MoE layer's router and shared expert: what expert parallelism does not split."""
        shared = self.mlp_params(self.shared_ffn) if self.shared_ffn else 0
        return self.hidden * self.experts + shared + self.hidden * self.shared_gate

    def layer_params(self, *, moe: bool) -> int:
        """One layer, all experts included."""
        block = self.expert_params + self.moe_dense_params if moe else self.mlp_params(self.ffn)
        return self.attention_params + block + self.norms_per_layer * self.norm_params

    @property
    def embedding_params(self) -> int:
        """Token and learned position embeddings."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Final norm and output projection, where it is not the embedding again."""
        head = 0 if self.tied_embeddings else self.vocab * self.hidden
        return head + self.vocab * self.head_bias + self.norm_params * self.final_norm

    @property
    def params(self) -> int:
        """All parameters."""
        dense_layers = self.layers - self.moe_layers
        layers = dense_layers * self.layer_params(moe=False) + self.moe_layers * self.layer_params(moe=True)
        return self.embedding_params + layers + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token passes through: of the routed experts only the chosen ones."""
        idle = self.experts - self.experts_per_token
        return self.params - self.moe_layers * idle * self.mlp_params(self.moe_ffn) if self.experts else self.params

    @property
    def matmul_params(self) -> int:
        """Weights that a token is multiplied with, the output projection included even where tied, the look-up not."""
        return self.active_params - self.embedding_params + (self.vocab * self.hidden if self.tied_embeddings else 0)

    def flops_per_token(self, sequence_length: int, *, causal: bool = False) -> float:
        """Forward and backward FLOPs per token: 6 a weight, plus attention's 12 x layers x query_dim x S.

        The convention of PaLM (arXiv:2204.02311, appendix B); `causal` counts half of the attention scores.
        """
        attention = 12.0 * self.layers * self.query_dim * sequence_length
        return 6.0 * self.matmul_params + attention * (0.5 if causal else 1.0)
