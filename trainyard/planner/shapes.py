"""The sizes of a transformer: what a Hugging Face configuration says, reduced to what memory and time depend on."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from trainyard.planner.sparse_attention import Compression, Indexer


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
    shared_first: bool = False
    """The shared expert runs before the routed ones, so that theirs is differentiated while its own is all there."""
    shared_apart: bool = False
    """Experts, their router and the shared expert read norms of their own, and what experts and shared one give has one
    each before it is added (Gemma 4, whose shared expert is an ordinary block); the router scales what it reads by a
    weight a dimension, and what it gives by one an expert."""
    batches_experts: bool = False
    """All experts compute all that they are given in one batched product, as nothing chooses (Llama 4)."""
    wide_router: bool = False
    """The router reads its tokens in float32, and keeps that copy."""
    wide_weights: bool = False
    """Experts' results are weighted, and added up, in float32."""
    sigmoid_weights: bool = False
    """These weights are a sigmoid of what the router's product gives, and stay in its type."""
    weights_as_read: bool = False
    """In the type of what the router reads: float32 under autocast."""
    router_bias: bool = False
    """The router chooses by a bias that is a parameter, which no gradient reaches."""
    dense_layers: int = 0
    """Of a MoE model, the layers with an ordinary feed-forward block."""
    dense_places: tuple[int, ...] = ()
    """Which of a model's layers these are, from 0; none: its first ones."""
    norm: Literal["rms", "rms_wide", "rms_cast", "rms_fp32", "layer", "layer_fp32", "layer_written_out"] = "rms"
    """`rms_wide`: its weight multiplies in fp32 too (OLMo 2, gpt-oss). `rms_cast`: that, and what it gives has the type
    of what it reads, whatever the weight's (Gemma 4). `rms_fp32`: that, and the weight is no plain one (Gemma's is what
    one is added to). `layer_fp32`: in fp32, without weights (OLMo). `layer_written_out`: in fp32, step by step, without
    bias (Cohere)."""
    has_norm_biases: bool = True
    """Of `layer` alone."""
    norms_per_layer: int = 2
    norms_after: bool = False
    """Norms are of what attention and feed-forward block give, before it is added, and not of what they read."""
    qk_norm_per_head: bool = False
    """A norm of head_dim on queries and keys."""
    qk_norm_whole: bool = False
    """A norm on all heads' queries, and one on all heads' keys."""
    normalizes_values: bool = False
    """Values pass a norm of head_dim without weights."""
    values_are_keys: bool = False
    """Values are what the keys' product gives, before its norm and rotation."""
    wide_layers: int = 0
    """Layers whose attention has heads of a width and number of their own, and no window (Gemma 4): `head_dim`,
    `kv_heads` and the window above are the others'."""
    wide_places: tuple[int, ...] = ()
    """Which of a model's layers these are, from 0."""
    wide_head_dim: int = 0
    """0: all heads of a model are equally wide."""
    wide_kv_heads: int = 0
    wide_values_are_keys: bool = False
    normalizes_scores: bool = False
    """Queries and keys are normalized, without weights."""
    fused_qkv: bool = False
    """Queries, keys and values come from one matrix."""
    copies_keys: bool = False
    """Keys and values are copied for every query head, whichever kernel reads them."""
    wide_scores: bool = False
    """Written-out attention reads its queries and keys in float32."""
    adds_scores: bool = False
    """Scores come out of one operation with their biases, which selective recomputation doesn't keep."""
    alibi: bool = False
    """Positions are biases of scores (ALiBi): queries and keys are not rotated."""
    whole_qkv: bool = False
    """Queries, keys and values are one matrix in an order that tensor ranks can't cut."""
    whole_gate_up: bool = False
    """So are gate and up projection of dense blocks."""
    copies_attention: bool = False
    """Queries come out of their rotation head by head, as where a part of them is not rotated: attention's result is
    copied before its output projection reads it."""
    clips_qkv: bool = False
    """Queries, keys and values are cut where they are too large, which keeps what they were."""
    parallel_residual: bool = False
    """Attention and feed-forward block read the same residual."""
    keeps_activated_gate: bool = False
    """A gated block's code is not Llama's, of which our own trainer makes the activated gate again."""
    activation_tensors: int = 1
    """Of a block that is not gated, what its activation function keeps beside its result: one, more where it is written
    out, none where the result itself says enough (ReLU)."""
    dropout: bool = False
    """Attention and feed-forward block end in dropout when trained."""
    attention_dropout: bool = False
    """Attention drops some of its scores when trained."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    embedding_norm: bool = False
    """What the embedding gives passes a norm of its own."""
    learned_positions: int = 0
    """Rows of a learned position embedding."""
    head_products: int = 0
    """Square products with a bias behind the last layer, beside the output projection: BERT's pooler and transform."""
    final_norm: bool = True
    q_lora_rank: int = 0
    """Latent attention (DeepSeek's MLA): width of the queries' bottleneck; 0: queries are projected at once."""
    kv_lora_rank: int = 0
    """Latent attention: width of the keys' and values' shared bottleneck; 0: ordinary attention."""
    rope_dim: int = 0
    """Latent attention: dimensions of a query and key head that carry the position, beside `head_dim`."""
    value_head_dim: int = 0
    """Latent attention: dimensions of a value head; 0: `head_dim`."""
    indexer: Indexer | None = None
    """What chooses the positions that attention sees, where something does."""
    compression: Compression | None = None
    """Attention to entries that many positions are compressed into (DeepSeek-V4); it has `kv_heads` 1."""
    attention_window: int = 0
    """Positions that `windowed_layers` attend to; 0: all attend to all."""
    windowed_layers: float = 0
    """Of a part of a model its share of them, where nobody says which they are. 0: half of them (gpt-oss)."""
    attention_sinks: bool = False
    """A learned logit per head that takes the attention nobody else wants."""
    scales_words: bool = False
    """The embedding's module scales what it gives, inside of what tensor parallelism knows of it (Gemma)."""
    has_capped_scores: bool = False
    """Attention's scores pass through a tanh (Gemma 2)."""
    logits: Literal["plain", "scaled", "capped"] = "plain"
    """What the head gives, or that times a number (Granite, Cohere), or through a tanh (Gemma 2)."""
    mamba_layers: int = 0
    """Of a hybrid, layers that are a Mamba-2 block and nothing else. In a hybrid every layer has one block."""
    attention_layers: int = 0
    """Of a hybrid, layers that are attention and nothing else; the rest are feed-forward or routed experts."""
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state: int = 0
    """State dimensions of a Mamba head."""
    mamba_groups: int = 0
    convolution: int = 4
    """Positions that the convolution of a Mamba block or a delta rule reads."""
    encoder_layers: int = 0
    """Layers of the same sizes that run before (an encoder, a vision tower), without experts and vocabulary."""
    encoder_tokens: int = 0
    """Positions of a sample that those layers see."""
    cross_attention: bool = False
    """Every layer also attends to the encoder's output."""
    delta_layers: int = 0
    """Layers whose attention is a gated delta rule (Qwen3-Next): a state of fixed size, no scores."""
    delta_places: tuple[int, ...] = ()
    """Which of a model's layers these are, from 0; none: as many in every part of a model."""
    delta_key_heads: int = 0
    """Of queries, and as many of keys."""
    delta_value_heads: int = 0
    delta_key_head_dim: int = 0
    delta_value_head_dim: int = 0
    delta_inputs: int = 2
    """Products that read a delta layer's input: two (Qwen3-Next), or four (Qwen3.5) as wide together."""
    attention_gate: bool = False
    """Attention's result times the sigmoid of a gate, as wide as all queries and projected with them."""
    mtp_layers: int = 0
    """Layers that predict further tokens (DeepSeek-V3), each with its own pass through the head."""
    latent: int = 0
    """Routed experts work on tokens projected down to this width (LatentMoE); 0: on `hidden`."""

    def __hash__(self) -> int:
        """By sizes that tell most models apart, and the parts of one: all fields together take longer than many a value
        that is kept by a shape."""
        kinds = (self.dense_layers, self.delta_layers, self.windowed_layers)
        sizes = (self.layers, self.hidden, self.ffn, self.heads, self.kv_heads, self.head_dim, self.vocab, self.experts)
        return hash((sizes, kinds))

    @cached_property
    def query_dim(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @cached_property
    def kv_dim(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.kv_heads * self.head_dim

    @cached_property
    def projected_kv_dim(self) -> int:
        """Width of what keys and values are projected to."""
        return self.kv_dim * (1 if self.values_are_keys else 2)

    @cached_property
    def attentions(self) -> "tuple[tuple[int, ModelShape], ...]":
        """Each kind of attention with scores: in how many layers, and a model all of whose layers have it."""
        if not self.wide_layers:
            return ((self.num_attentions, self),)
        # The other kind's width stays: it says that a model has two.
        alike: dict[str, Any] = {"wide_layers": 0, "wide_places": ()}
        narrow = replace(self, windowed_layers=self.layers if self.attention_window else 0, **alike)
        wide = replace(
            self,
            **alike,
            head_dim=self.wide_head_dim,
            kv_heads=self.wide_kv_heads,
            values_are_keys=self.wide_values_are_keys,
            attention_window=0,
            windowed_layers=0,
        )
        return (self.num_attentions - self.wide_layers, narrow), (self.wide_layers, wide)

    @cached_property
    def stream_width(self) -> int:
        """Width of what a layer hands to the next: all residual streams."""
        return self.hidden * (self.compression.streams if self.compression else 1)

    @cached_property
    def value_dim(self) -> int:
        """Width of all heads' values before the output projection: that of the queries, but under MLA."""
        return self.heads * (self.value_head_dim or self.head_dim)

    @cached_property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        if not self.experts:
            return 0
        return self.layers - self.dense_layers - (self.mamba_layers + self.attention_layers if self.is_hybrid else 0)

    @cached_property
    def is_hybrid(self) -> bool:
        """Mamba and attention alternate, one block to a layer."""
        return self.mamba_layers > 0

    @cached_property
    def num_attentions(self) -> int:
        """Layers with attention that has scores."""
        return self.attention_layers if self.is_hybrid else self.layers - self.delta_layers

    @cached_property
    def num_mlps(self) -> int:
        """Layers with an ordinary feed-forward block."""
        if self.is_hybrid:
            return self.layers - self.mamba_layers - self.attention_layers - self.moe_layers
        return self.layers - self.moe_layers

    @cached_property
    def score_dim(self) -> float:
        """What a token's score row costs: the mean of all heads' query and value widths (equal but under MLA)."""
        return (self.query_dim + self.heads * self.rope_dim + self.value_dim) / 2

    @cached_property
    def delta_key_width(self) -> int:
        """Width of a delta layer's queries, and of its keys."""
        return self.delta_key_heads * self.delta_key_head_dim

    @cached_property
    def delta_value_width(self) -> int:
        """Width of a delta layer's values, and of its gate."""
        return self.delta_value_heads * self.delta_value_head_dim

    @cached_property
    def delta_projected(self) -> int:
        """What a delta layer's input is projected to: queries, keys, values, gate, and two numbers a value head."""
        return 2 * (self.delta_key_width + self.delta_value_width + self.delta_value_heads)

    @cached_property
    def delta_params(self) -> int:
        """One gated delta rule (arXiv:2412.06464): projections, convolution, two numbers a head, and a norm."""
        mixed = 2 * self.delta_key_width + self.delta_value_width
        products = self.hidden * (self.delta_projected + self.delta_value_width)
        return products + self.convolution * mixed + 2 * self.delta_value_heads + self.delta_value_head_dim

    @cached_property
    def uncut_delta_params(self) -> int:
        """Of a delta rule what each of our trainer's tensor ranks has whole: convolution, norm and, where they are one
        matrix (Qwen3.5), what queries, keys and values come of."""
        mixed = 2 * self.delta_key_width + self.delta_value_width
        is_fused = self.delta_inputs == 4
        return mixed * (self.convolution + self.hidden * is_fused) + self.delta_value_head_dim

    @cached_property
    def mixing_params(self) -> float:
        """What mixes a layer's tokens, attention or a delta rule: the mean over layers that have either."""
        if not self.delta_layers and not self.wide_layers:
            return self.attention_params
        return (self.all_attention_params + self.delta_layers * self.delta_params) / self.layers

    @cached_property
    def all_attention_params(self) -> int:
        """Of all layers that have attention with scores."""
        return sum(number * kind.attention_params for number, kind in self.attentions)

    @cached_property
    def mamba_inner(self) -> int:
        """Width inside of a Mamba block."""
        return self.mamba_heads * self.mamba_head_dim

    @cached_property
    def mamba_params(self) -> int:
        """One Mamba-2 block: projections in (gate, value, B, C, step) and out, convolution, norm."""
        mixed = self.mamba_inner + 2 * self.mamba_groups * self.mamba_state
        projected = self.mamba_inner + mixed + self.mamba_heads
        small = (self.convolution + 1) * mixed + 3 * self.mamba_heads + self.mamba_inner
        return self.hidden * (projected + self.mamba_inner) + small

    @cached_property
    def norm_params(self) -> int:
        """Parameters of one norm over `hidden`."""
        return self.hidden * {"layer": 1 + self.has_norm_biases, "layer_fp32": 0}.get(self.norm, 1)

    @cached_property
    def attention_params(self) -> int:
        """One layer's projections, with biases and query/key norms; under MLA down and up through the latents."""
        if self.kv_lora_rank:
            return self._latent_attention_params()
        if self.compression:
            return self.compression.attention_params(self.hidden, self.heads, self.head_dim, self.q_lora_rank)
        return self._plain_attention_params() * (2 if self.cross_attention else 1)

    @cached_property
    def beside_attention_params(self) -> int:
        """Of all layers, what chooses or compresses the positions that attention sees, and what weighs streams."""
        if self.indexer is None:
            return 0
        if self.compression is None:
            return self.indexer.layers * self.indexer.params(self.hidden, self.q_lora_rank)
        compressors = self.compression.compressor_params(self.hidden, self.head_dim, self.indexer, self.q_lora_rank)
        return compressors + self.compression.stream_params(self.hidden, self.layers)

    def _plain_attention_params(self) -> int:
        projected = self.query_dim * (1 + self.attention_gate) + self.projected_kv_dim
        weights = self.hidden * projected + self.query_dim * self.hidden
        biases = projected * self.qkv_bias + self.hidden * self.output_bias
        norms = 2 * self.head_dim * self.qk_norm_per_head + (self.query_dim + self.kv_dim) * self.qk_norm_whole
        return weights + biases + norms + self.heads * self.attention_sinks

    @cached_property
    def encoder_params(self) -> int:
        """All layers of the encoder."""
        block = self._plain_attention_params() + self.mlp_params(self.ffn) + 2 * self.norm_params
        return self.encoder_layers * block

    @cached_property
    def uncut_attention_params(self) -> int:
        """Of one layer's attention what each of our trainer's tensor ranks has whole: of latent attention, the
        projections to its latents and to the part that carries the position; GPT-2's and Phi-3's queries, keys and
        values."""
        if self.kv_lora_rank:
            return self.hidden * (self.q_lora_rank + self.kv_lora_rank + self.rope_dim)
        return (self.hidden + self.qkv_bias) * (self.query_dim + 2 * self.kv_dim) if self.whole_qkv else 0

    @cached_property
    def uncut_mlp_params(self) -> int:
        """The same of one dense block: Phi-3's and GLM's gate and up projection."""
        return 2 * self.hidden * self.ffn if self.whole_gate_up else 0

    def _latent_attention_params(self) -> int:
        """DeepSeek-V2 (arXiv:2405.04434, section 2.1): latents with a norm each, keys of `head_dim` beside values.

        Biases, if any, are of what goes to the latents and of the output projection.
        """
        query_out = self.heads * (self.head_dim + self.rope_dim)
        query = self.hidden * query_out
        if self.q_lora_rank:
            query = self.q_lora_rank * (self.hidden + query_out + 1)
        latents = self.kv_lora_rank + self.rope_dim
        down = self.hidden * latents + self.kv_lora_rank
        biases = (self.q_lora_rank + latents) * self.qkv_bias + self.hidden * self.output_bias
        up = self.kv_lora_rank * (self.query_dim + self.value_dim)
        return query + down + up + self.value_dim * self.hidden + biases

    @property
    def ends_in_norm(self) -> bool:
        """Whether a layer's last product is read by a norm: one after it, or the last of four."""
        return self.norms_after or self.norms_per_layer >= 4

    def mlp_params(self, width: int) -> int:
        """A feed-forward block of that width, with biases."""
        inputs = 2 if self.gated_mlp else 1
        return (inputs + 1) * self.hidden * width + (inputs * width + self.hidden) * self.mlp_bias

    @cached_property
    def one_expert_params(self) -> int:
        """One routed expert."""
        if self.latent:
            return (3 if self.gated_mlp else 2) * self.latent * self.moe_ffn
        return self.mlp_params(self.moe_ffn)

    @cached_property
    def expert_params(self) -> int:
        """All routed experts of one MoE layer."""
        return self.experts * self.one_expert_params

    @cached_property
    def moe_dense_params(self) -> int:
        """A MoE layer's router and shared expert: what expert parallelism does not split."""
        shared = self.mlp_params(self.shared_ffn) if self.shared_ffn else 0
        router = (self.hidden + self.mlp_bias + self.router_bias) * self.experts
        router += (self.hidden + self.experts) * self.shared_apart
        return router + shared + self.hidden * self.shared_gate + 2 * self.hidden * self.latent

    def layer_params(self, *, moe: bool) -> int:
        """One layer, all experts included."""
        block = self.expert_params + self.moe_dense_params if moe else self.mlp_params(self.ffn)
        return self.attention_params + block + self.norms_per_layer * self.norm_params

    @cached_property
    def embedding_params(self) -> int:
        """Token and learned position embeddings, and their norm."""
        return (self.vocab + self.learned_positions) * self.hidden + self.norm_params * self.embedding_norm

    @cached_property
    def head_params(self) -> int:
        """Final norm and output projection, where it is not the embedding again."""
        head = 0 if self.tied_embeddings else self.vocab * self.hidden
        head += self.head_products * self.hidden * (self.hidden + 1)
        return head + self.vocab * self.head_bias + self.norm_params * self.final_norm

    @cached_property
    def params(self) -> int:
        """All parameters."""
        if self.is_hybrid:
            return self.embedding_params + self._hybrid_params() + self.head_params
        dense_layers = self.layers - self.moe_layers
        layers = dense_layers * self.layer_params(moe=False) + self.moe_layers * self.layer_params(moe=True)
        layers += self.encoder_params + self.mtp_layers * self.mtp_params
        layers += self.delta_layers * (self.delta_params - self.attention_params) + self.beside_attention_params
        layers += self.all_attention_params - self.num_attentions * self.attention_params
        return self.embedding_params + layers + self.head_params

    @cached_property
    def mtp_params(self) -> int:
        """One layer that predicts a further token: a projection of two streams, two norms, and a layer."""
        return 2 * self.hidden**2 + 2 * self.norm_params + self.layer_params(moe=self.moe_layers > 0)

    def _hybrid_params(self) -> int:
        """All layers of a hybrid: one norm and one block each."""
        blocks = self.mamba_layers * self.mamba_params + self.attention_layers * self.attention_params
        blocks += self.moe_layers * (self.expert_params + self.moe_dense_params)
        return blocks + self.num_mlps * self.mlp_params(self.ffn) + self.layers * self.norm_params

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token passes through: of the routed experts only the chosen ones."""
        if not self.moe_layers:
            return self.params
        routed = self.moe_layers + (0 if self.is_hybrid else self.mtp_layers)
        return self.params - routed * (self.experts - self.experts_per_token) * self.one_expert_params

    @cached_property
    def matmul_params(self) -> int:
        """Weights that a token is multiplied with, the output projection included even where tied, the look-up not."""
        return self.active_params - self.embedding_params + (self.vocab * self.hidden if self.tied_embeddings else 0)

    def flops_per_token(self, sequence_length: int, *, causal: bool = False, is_frozen: bool = False) -> float:
        """Forward and backward FLOPs per token: 6 a weight, plus attention's 12 x layers x query_dim x S.

        The convention of PaLM (arXiv:2204.02311, appendix B); `causal` counts half of the attention scores. Mamba's
        scan adds 6 multiply-adds (18 with the backward pass) for each inner element and state dimension, roughly, and
        so do a delta rule's three products with its state.
        `is_frozen`: under an adapter weights have no gradient of their own, 4 each; scores and scans have no weights,
        and gradients pass through them whole.
        """
        attention = 12.0 * sum(
            number * kind.score_dim * kind.mean_span(sequence_length) for number, kind in self.attentions
        )
        # An encoder sees its own tokens; each further token predicted passes through the head again.
        encoder = self.encoder_params * (self.encoder_tokens / sequence_length - 1)
        heads = self.mtp_layers * self.vocab * self.hidden
        scan = 18.0 * self.mamba_layers * self.mamba_inner * self.mamba_state
        scan += 18.0 * self.delta_layers * self.delta_value_width * self.delta_key_head_dim
        if self.indexer is not None:
            attention += 3.0 * self.indexer.layers * self.indexer.flops_per_token(sequence_length)
        weights = (4.0 if is_frozen else 6.0) * (self.matmul_params + encoder + heads)
        return weights + attention * (0.5 if causal else 1.0) + scan

    def mean_span(self, sequence_length: float) -> float:
        """Positions that a token attends to, the mean over layers, causality not counted."""
        if self.indexer is not None:
            if self.compression is not None:
                return self.compression.mean_span(sequence_length, self.layers, self.indexer)
            return self.indexer.mean_span(sequence_length)
        if not self.attention_window or self.attention_window >= sequence_length:
            return sequence_length
        # A window has no causal half: twice its length, as the caller may halve it.
        window = min(2.0 * self.attention_window, sequence_length)
        return self.windowed_share * window + (1 - self.windowed_share) * sequence_length

    @property
    def windowed_share(self) -> float:
        """Of the layers, those with a window, where some have one."""
        return self.windowed_layers / self.layers if self.windowed_layers else 0.5
