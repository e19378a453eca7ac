"""What one micro-batch leaves in memory between forward and backward: layers, logits, buffers of pipelines.

Korthikanti et al. (arXiv:2205.05198, section 4), extended to grouped queries, gated blocks, experts, latent attention,
state-space layers, frozen weights, and kernels that keep no attention matrix. "Unit" is one tensor of tokens x hidden.
"""

import dataclasses
import math
from collections.abc import Set

from trainyard.planner.constants import DEFAULT_MEMORY, MemoryConstants
from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape

TORCHTUNE_CHUNKS, TORCHTUNE_CHUNKS_SINCE = 8, 2024.6
"""torchtune's recipes since its release 0.3 take the logits' loss in so many parts, each in fp32 alone."""


ROWS_OF_FUSED_SOFTMAX = 4
"""Of Megatron's and Transformer Engine's fused softmax: what it takes is a multiple of this."""


ATTENTION_TARGETS = 4
"""Products of attention that an adapter may stand beside: of more, some are the feed-forward block's."""


def layer_activation_bytes(
    shape: ModelShape, layout: Layout, recompute: str, constants: MemoryConstants = DEFAULT_MEMORY
) -> float:
    """Bytes that one layer (the average one) saves of one micro-batch for its backward pass."""
    residual = layout.tokens_per_micro_batch * layout.element_bytes * shape.hidden / layout.norm_split
    if recompute == "full":
        if layout.offloads_checkpoints:
            # One goes out or comes in while the next layer has its own, which counts as rebuilt.
            return 0.0
        return residual * shape.stream_width / shape.hidden * layout.stream_bytes / layout.element_bytes
    if shape.wide_layers:
        kinds = shape.attentions
        found = sum(number * layer_activation_bytes(kind, layout, recompute, constants) for number, kind in kinds)
        return found / shape.layers
    if recompute == "selective" and layout.engine == "torch":
        share = constants.selective_share if layout.saves_every_second_product else 1.0
        kept = layout.tokens_per_micro_batch * layout.element_bytes * shape.value_dim / layout.tensor
        return residual + kept + share * _product_bytes(shape, layout)
    if layout.method != "full" and layout.engine == "plain":
        return _frozen_bytes(shape, layout, constants)
    again: Set[str] = frozenset()
    if recompute == "selective":
        again = layout.recompute_modules if layout.engine == "megatron" else {"core_attn"}
    attention = _attention_bytes(shape, layout, again) * shape.num_attentions
    block = _mlp_bytes(shape, layout, shape.ffn) * shape.num_mlps * ("mlp" not in again)
    # Measured of Megatron alone, whose dispatchers drop no token and wait for the fullest rank.
    spread = constants.load_spread if layout.engine == "megatron" else 0.0
    routed = 0.0
    if shape.moe_layers and "moe" not in again:
        routed = _moe_bytes(shape, layout, spread, again) * shape.moe_layers
    mixer = _mamba_bytes(shape, layout) * shape.mamba_layers
    mixer += _delta_bytes(shape, layout) * shape.delta_layers
    halves = 1 if shape.is_hybrid else 2
    # Residual dropout keeps a mask of a byte an element.
    halves += shape.cross_attention
    units = _norm_units(layout, constants) - ("layernorm" in again)
    if shape.compression is not None:
        # All streams that a block reads from, and its own result, which the weights' gradient needs.
        units += shape.compression.streams + 1
    norms = halves * residual * (units + layout.dropout / layout.element_bytes)
    return (attention + block + routed + mixer) / shape.layers + norms


READERS_OF_A_NORM = 2.5
"""Products that read a norm: three of attention, two of a gated block."""


def keeps_narrow(layout: Layout) -> bool:
    """Whether Megatron's linear layers are Transformer Engine's in FP8 or FP4."""
    return layout.precision in ("fp8", "fp4") and layout.engine == "megatron" and layout.transformer_engine


def narrow_bytes(layout: Layout) -> float:
    """Of a value in FP8, or in NVFP4: four bits, and a byte of scale for each 16."""
    return 0.5 + 1 / 16 if layout.precision == "fp4" else 1.0


def _kept_of_input(layout: Layout) -> float:
    """Of what a product reads, the share that is kept of it for the backward pass: FP8's products keep it as they read
    it, in one byte of two (`_Linear.forward` saves the quantized input)."""
    return narrow_bytes(layout) / layout.element_bytes if keeps_narrow(layout) else 1.0


def _norm_units(layout: Layout, constants: MemoryConstants) -> float:
    """A norm keeps its input and output; computed in fp32 by parts, also a copy and the normalized value. Under
    autocast input and normalized value are in fp32, and each product has its own narrow copy of the output."""
    if layout.autocast:
        return 2 * layout.stream_bytes / layout.element_bytes + READERS_OF_A_NORM
    fused = layout.engine == "megatron" or layout.compiled or layout.precision in ("fp32", "fp64")
    return 1.0 + _kept_of_input(layout) if fused else constants.unfused_norm_units


def _attention_bytes(shape: ModelShape, layout: Layout, again: Set[str]) -> float:
    """Queries, keys, values, and the attention's output; with an attention matrix, scores, mask and dropped scores.

    `again`: of RECOMPUTED_MODULES those that aren't kept.
    """
    tokens, element = layout.tokens_per_micro_batch, layout.element_bytes
    width: float = 2 * shape.query_dim + 2 * shape.kv_dim
    if shape.kv_lora_rank:
        # Latent attention (arXiv:2405.04434, section 2.1): keys have all heads, and the position's dimensions are
        # beside the others; both compressed streams and their norms' outputs stay, on every tensor rank.
        width = 2 * (shape.query_dim + shape.value_dim) + 2 * shape.heads * shape.rope_dim
        if "mla_up_proj" in again:
            width = shape.value_dim
        width += 2 * (shape.q_lora_rank + shape.kv_lora_rank) * layout.tensor // layout.norm_split
    width += _sparse_width(shape) * layout.tensor // layout.norm_split
    if keeps_narrow(layout):
        # What the output projection reads, beside attention's own.
        width += shape.value_dim * _kept_of_input(layout)
    statistics = 4 * shape.heads / layout.tensor
    matrix = 0.0
    if not layout.flash_attention and "core_attn" not in again:
        seen = layout.sequence_length + (shape.encoder_tokens if shape.cross_attention else 0)
        if layout.engine == "megatron" and not _softmax_is_fused(shape, layout):
            layout = dataclasses.replace(layout, fp32_softmax=True)
        matrix = _score_bytes(layout, element) * shape.heads * seen / layout.tensor
    if shape.cross_attention:
        width += 2 * shape.query_dim
    if layout.library == "nanotron":
        # Queries and keys are rotated in fp32, out of place.
        width += 2 * (shape.query_dim + shape.kv_dim)
    return tokens * (element * width / layout.tensor + statistics + matrix)


def _sparse_width(shape: ModelShape) -> float:
    """Elements a token, the mean layer's, of what chooses and compresses positions: its queries and key, or values and
    gates of entries; and of DeepSeek-V4's latent, and the groups' results."""
    indexer, compression = shape.indexer, shape.compression
    if indexer is None:
        return 0.0
    queries = indexer.heads * (indexer.head_dim + 1) * indexer.layers / shape.layers
    if compression is None:
        return queries + indexer.head_dim * indexer.layers / shape.layers
    entries = 4 * (shape.head_dim + indexer.head_dim) * compression.chosen_layers / shape.layers
    entries += 2 * shape.head_dim * compression.heavy_layers / shape.layers
    # Queries are normalized head by head, and their norm's input stays beside what it gives.
    latent = 2 * shape.q_lora_rank + shape.query_dim + compression.output_groups * compression.output_rank
    return queries + entries + latent


def _softmax_is_fused(shape: ModelShape, layout: Layout) -> bool:
    """Whether Megatron's softmax of attention scores is one kernel, which keeps its result alone. It takes sequences,
    and heads of all sequences together, in multiples of four; others go through torch's in fp32.

    (`is_kernel_available` in megatron/core/fusions/fused_softmax.py, and Transformer Engine's.)
    """
    batches = layout.micro_batch * shape.heads // layout.tensor
    return layout.sequence_length % ROWS_OF_FUSED_SOFTMAX == 0 and batches % ROWS_OF_FUSED_SOFTMAX == 0


def _score_bytes(layout: Layout, element: int) -> float:
    """Bytes kept of one attention score, where attention is not fused: of the softmax and, with dropout, beyond it."""
    kept = 2 * element + 1 if layout.dropout else element
    if layout.fp32_softmax and element < 4:
        # Its fp32 result is kept as it is, beside the narrow copy that values are multiplied with; what is in fp32
        # anyway has no second one.
        kept += 4 - element if layout.dropout else 4
    return kept


def _mlp_bytes(shape: ModelShape, layout: Layout, width: float, split: float | None = None) -> float:
    """Inputs and output of the activation function; unfused SwiGLU keeps the activated gate as well."""
    tensors = 2.0
    if shape.gated_mlp:
        makes_again = layout.compiled or (layout.engine == "megatron" and layout.library != "nanotron")
        tensors = 3.0 if makes_again else 4.0
    tensors -= 1.0 - _kept_of_input(layout)
    return layout.tokens_per_micro_batch * layout.element_bytes * width * tensors / (split or layout.tensor)


def _moe_bytes(shape: ModelShape, layout: Layout, load_spread: float, again: Set[str]) -> float:
    """Each token's copies to its experts, their blocks, the shared expert, and the router's fp32 scores.

    Tensor ranks that share an expert all hold its tokens, whole in width; where fewer share it (expert tensor
    parallelism of 1: none), a rank holds fewer of them. Routers don't spread tokens evenly: where each expert's load
    has a standard deviation of `load_spread` about the mean, that of a rank with experts / expert-parallel of them is
    load_spread x sqrt((expert-parallel - 1) / experts), as all loads together are fixed. With a capacity all are even.
    """
    uneven = 1 + load_spread * math.sqrt((layout.expert - 1) / shape.experts)
    copies = shape.experts_per_token * (layout.capacity_factor or uneven)
    routed = _mlp_bytes(shape, layout, shape.moe_ffn * copies)
    if "moe_act" in again:
        routed *= 2 / 3 if shape.gated_mlp else 1 / 2  # of Megatron's two or three tensors the activated one
    shared = _mlp_bytes(shape, layout, shape.shared_ffn) * ("shared_experts" not in again)
    tokens, element = layout.tokens_per_micro_batch, layout.element_bytes
    split = layout.tensor / (layout.expert_tensor or layout.tensor)
    # Experts that work in a latent (Nemotron 3) are sent that.
    # As they come, which the first product reads, and as they go, if they are weighted then.
    each = tokens * element * (copies * (shape.latent or shape.hidden) + 2 * shape.latent) / split
    dispatched = ((not layout.weighs_inside) + _kept_of_input(layout)) * each
    return routed + shared + dispatched + tokens * 2 * 4 * shape.experts / layout.norm_split


def _product_bytes(shape: ModelShape, layout: Layout) -> float:
    """Outputs of every matrix product: what selective recomputation chooses from, beside the attention's."""
    element = layout.element_bytes
    attention = shape.query_dim + 2 * shape.kv_dim
    inputs = 2 if shape.gated_mlp else 1
    width = shape.ffn * shape.num_mlps / shape.layers
    if shape.moe_layers:
        copies = shape.experts_per_token * (layout.capacity_factor or 1.0)
        width += (shape.moe_ffn * copies + shape.shared_ffn) * shape.moe_layers / shape.layers
    split = (attention + inputs * width) / layout.tensor
    whole = 2 * shape.hidden / layout.norm_split
    return layout.tokens_per_micro_batch * element * (split + whole)


def _mamba_bytes(shape: ModelShape, layout: Layout) -> float:
    """A state-space layer (Mamba-2, arXiv:2405.21060): projection, convolution's input and output, gate, scan, norm."""
    if not shape.mamba_layers:
        return 0.0
    channels = shape.mamba_inner + 2 * shape.mamba_groups * shape.mamba_state
    width = 2 * channels + 3 * shape.mamba_inner + shape.mamba_heads
    return layout.tokens_per_micro_batch * layout.element_bytes * width / layout.tensor


def _delta_bytes(shape: ModelShape, layout: Layout) -> float:
    """A gated delta rule by kernels of its own (arXiv:2412.06464): what the convolution reads and gives, the gate, new
    values, output and norm, and a state a chunk of 64 tokens."""
    mixed = 2 * shape.delta_key_width + shape.delta_value_width
    width = 2 * mixed + shape.delta_value_width * (4 + shape.delta_key_head_dim / 64)
    return layout.tokens_per_micro_batch * layout.element_bytes * width / layout.tensor


def _frozen_bytes(shape: ModelShape, layout: Layout, constants: MemoryConstants) -> float:
    """A layer whose own weights are frozen: no linear keeps its input, but adapters do, and functions keep theirs.

    Queries, keys, values, rotated and merged with the adapters' outputs, the attention's output and the adapters'
    input; the activation function's input and, gated, both factors of the product; the norms. Four-bit products keep
    their inputs as well, and what transformers doesn't quantize then gives fp32 (prepare_model_for_kbit_training casts
    embeddings and norms), all through the layer where no autocast narrows it again: so one published run measured
    without recomputation; with autocast it is less.
    """
    tokens, element = layout.tokens_per_micro_batch, layout.element_bytes
    qkv = shape.query_dim + 2 * shape.kv_dim
    width = 2.0 * qkv + shape.query_dim + shape.kv_dim + shape.query_dim + shape.hidden
    if layout.adapter == "prefix":
        # No product has an adapter: neither its input is kept nor a sum with its output made.
        width -= qkv + shape.hidden
    elif layout.adapter == "scale":
        # A scale's gradient needs what it scales: the output of every product.
        width += qkv + 2 * shape.hidden + shape.ffn * (2 if shape.gated_mlp else 1)
    width += shape.ffn * (3 if shape.gated_mlp else 1)
    if layout.adapter == "lora" and (len(layout.lora_targets) or layout.num_lora_targets) > ATTENTION_TARGETS:
        # Adapters of the feed-forward block keep what its first products read, and its last.
        width += shape.hidden + shape.ffn
    widened = layout.stream_bytes / element if layout.autocast else 1.0
    width += shape.hidden * (2 if shape.norm == "layer" else 4) * widened
    if layout.method == "qlora":
        width += constants.quantized_inputs * (shape.ffn + 4 * shape.hidden)
        if layout.keeps_rest_in_fp32:
            element = max(element, 4)
    # What has no width in elements: scores, and the masks of residual dropout.
    beside = 2.0 * shape.hidden * layout.dropout
    if not layout.flash_attention:
        beside += _score_bytes(layout, element) * shape.heads * layout.sequence_length
    return tokens * (element * width + beside) / layout.tensor


def logits_bytes(shape: ModelShape, layout: Layout, constants: MemoryConstants = DEFAULT_MEMORY) -> float:
    """Logits and cross-entropy at their peak, of one micro-batch.

    A plain loop (transformers): logits kept by the output, an fp32 copy, log-softmax and its gradient (2+4+4+4 bytes);
    Megatron's works in place on one fp32 copy and turns its gradient back (2+4), its fused one keeps 4 more. litgpt
    stays in bf16. In fp32 everything has 4 bytes. A chunked loss keeps one chunk's logits, in both precisions, and
    their gradient, and until the backward pass the gradients of the hidden states and, in fp32, of the head.
    """
    element = layout.element_bytes
    tokens = layout.tokens_per_micro_batch
    if layout.loss_chunk_tokens is not None and tokens > layout.loss_chunk_tokens:
        chunk = layout.loss_chunk_tokens * shape.vocab * (2 * element + 4) / layout.loss_split
        head = 4 * shape.vocab * shape.hidden / layout.tensor if layout.method == "full" else 0.0
        return chunk + head + tokens * shape.hidden * element
    return tokens * shape.vocab * _loss_element_bytes(layout, constants) / layout.loss_split


def _loss_element_bytes(layout: Layout, constants: MemoryConstants) -> float:
    element = layout.element_bytes
    if layout.library == "nanotron":
        return element + 10
    if layout.engine == "megatron":
        # Of two micro-batches, where the head's gradient is deferred.
        deferred = 2 * element if layout.deferred_head else 0
        return element + (8 if layout.fused_loss else 4) + deferred
    if layout.engine == "torch" and layout.compiled_loss:
        return element + 4
    if layout.library == "litgpt":
        return 3 * element
    if layout.method == "qlora" and layout.quantization == "gptq":
        # Its kernels want fp16 throughout: no autocast widens the logits, their copy, log-softmax and gradient.
        return 4 * element
    in_parts = layout.library == "torchtune" and layout.year >= TORCHTUNE_CHUNKS_SINCE
    loss = constants.plain_loss_bytes / (TORCHTUNE_CHUNKS if in_parts else 1)
    return (4 if layout.keeps_rest_in_fp32 else element) + loss


def encoder_bytes(shape: ModelShape, layout: Layout, constants: MemoryConstants = DEFAULT_MEMORY) -> float:
    """Activations of all the encoder's layers, and what cross-attention keeps of its output: keys and values."""
    if not shape.encoder_layers:
        return 0.0
    alone = dataclasses.replace(shape, encoder_layers=0, cross_attention=False, experts=0, norms_per_layer=2)
    there = dataclasses.replace(layout, sequence_length=shape.encoder_tokens)
    if layout.engine == "megatron" and not shape.cross_attention:
        # Megatron's LLaVA: an image's patches are cut neither by context nor by sequence parallelism.
        there = dataclasses.replace(there, context=1, sequence_parallel=False)
    layers = shape.encoder_layers * layer_activation_bytes(alone, there, layout.recompute, constants)
    if not shape.cross_attention or layout.recompute == "full":
        return layers
    keys = there.tokens_per_micro_batch * layout.element_bytes * 2 * shape.kv_dim / layout.tensor
    return layers + shape.layers * keys


def mtp_bytes(shape: ModelShape, layout: Layout, kept: float, head: bool) -> float:
    """Layers that predict further tokens: their activations, and logits in fp32 kept beside the first."""
    logits = layout.tokens_per_micro_batch * shape.vocab * 4 / layout.tensor
    return shape.mtp_layers * (kept + logits) * head


def gathered_tokens_bytes(shape: ModelShape, layout: Layout) -> float:
    """Megatron's all-gather dispatcher: every rank's tokens, in a buffer that stays (`expert_gather`)."""
    if not layout.gathers_tokens or not shape.moe_layers or layout.expert * layout.tensor == 1:
        return 0.0
    return layout.tokens_per_micro_batch * layout.expert * (shape.latent or shape.hidden) * layout.element_bytes


def pipeline_buffer_bytes(shape: ModelShape, layout: Layout) -> float:
    """Activations and gradients that a pipeline rank has received or is about to send: they stay between steps."""
    if layout.pipeline == 1:
        return 0.0
    tensors = 3 if layout.chunks == 1 else 2 * layout.chunks + 1
    return tensors * layout.tokens_per_micro_batch * shape.stream_width * layout.element_bytes / layout.norm_split
