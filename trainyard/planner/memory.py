"""Memory of the worst rank, in closed form, by category.

Formulas: ZeRO (arXiv:1910.02054, section 3) for training state; Korthikanti et al. (arXiv:2205.05198, section 4)
for activations, extended to grouped queries, gated blocks, experts and kernels that keep no attention matrix;
Narayanan et al. (arXiv:2104.04473, section 2.2) for micro-batches in flight per pipeline schedule.
"""

import math
from dataclasses import dataclass, fields

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape

GIB = 2**30

WORKSPACE_BYTES = 0.1 * GIB
"""cuBLAS workspaces and kernels' scratch, measured at about 0.1 GiB in small runs whatever the model."""

CONTEXT_BYTES = 0.9 * GIB
"""What a process holds outside the allocator: the CUDA context and NCCL's channels."""

FRAGMENTATION = 0.03
"""Share by which the allocator's reserved memory exceeds what is allocated at the peak."""

DEEPSPEED_BUCKET_ELEMENTS = 5e8
"""DeepSpeed's default reduce_bucket_size and allgather_bucket_size."""

QLORA_BYTES = 0.5 + 4 / 64
"""NF4: four bits a weight and one fp32 scale for 64 of them (arXiv:2305.14314)."""

NCCL_BUFFER_BYTES = 0.05 * GIB


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the peak of a step."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    """Gathered parameters, reduction buckets, cast copies."""
    workspace: float

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer: what stays between steps."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """The allocator's peak (torch.cuda.max_memory_allocated)."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def needed(self) -> float:
        """What the device must have: the peak, fragmentation, and what lies outside the allocator."""
        return self.allocated * (1 + FRAGMENTATION) + CONTEXT_BYTES


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter, before sharding."""

    parameter: float
    gradient: float
    optimizer: float
    """Moments, and the fp32 master weights where the parameters are not fp32 themselves."""
    compute_copy: float
    """A copy in the compute precision that exists while a layer runs."""


def moment_bytes(layout: Layout) -> float:
    """What the optimizer keeps of a parameter of a large matrix, besides master weights; fp32 unless it says otherwise.

    adamw: two averages. adamw_8bit: two of a byte each, and an fp32 scale for 256 of them (arXiv:2110.02861).
    adafactor: a mean per row and column, next to nothing (arXiv:1804.04235). muon and sgd: one average.
    """
    kinds = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256), "adafactor": 0.01, "muon": 4.0, "sgd": 4.0}
    return kinds[layout.optimizer] + 4.0 * layout.keeps_average


def state_bytes(layout: Layout) -> StateBytes:
    """The training state under the layout's engine, precision and optimizer."""
    moments = moment_bytes(layout)
    if layout.precision == "fp32":
        return StateBytes(4, 4, moments, 0)
    if layout.precision == "fp64":
        return StateBytes(8, 8, 2 * moments, 0)
    if layout.engine == "plain":
        return StateBytes(2, 2, moments / 2, 0)
    if layout.engine == "deepspeed":
        return StateBytes(2, 2, 4 + moments, 0)
    if layout.engine == "megatron":
        return StateBytes(2, 4, 4 + moments, 0)
    return StateBytes(4, 4, moments, 2)


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds."""

    layers: int
    embedding: bool
    head: bool
    in_flight: float
    """Micro-batches whose activations it holds at its peak, as full passes through its layers."""


def stages(shape: ModelShape, layout: Layout) -> tuple[Stage, ...]:
    """The first and the last pipeline rank: one of them is the worst."""
    count = layout.pipeline
    layers = math.ceil(shape.layers / count)
    first = Stage(layers, True, count == 1, micro_batches_in_flight(layout, 0))
    if count == 1:
        return (first,)
    return first, Stage(layers, False, True, micro_batches_in_flight(layout, count - 1))


def micro_batches_in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches that pipeline rank `rank` holds at once, in units of its whole part of the model."""
    ranks, count = layout.pipeline, layout.num_micro_batches
    if layout.schedule == "gpipe":
        return count
    if layout.chunks > 1:
        # Warm-up passes of Megatron's interleaved schedule, each through one chunk, and the one in steady state.
        passes = 2 * (ranks - rank - 1) + (layout.chunks - 1) * ranks + 1
        return min(passes, count * layout.chunks) / layout.chunks
    return min(ranks - rank, count)


def memory(shape: ModelShape, layout: Layout) -> Memory:
    """The worst rank's memory, in bytes."""
    return max(
        (_stage_memory(shape, layout, stage) for stage in stages(shape, layout)), key=lambda item: item.allocated
    )


def _stage_memory(shape: ModelShape, layout: Layout, stage: Stage) -> Memory:
    params = stage_params(shape, layout, stage)
    parameters, gradients, optimizer = _state(shape, layout, stage, params)
    activations = _stage_activations(shape, layout, stage)
    logits = logits_bytes(shape, layout) if stage.head else 0.0
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        buffers=_buffers(shape, layout, stage, params),
        workspace=WORKSPACE_BYTES,
    )


@dataclass(frozen=True)
class StageParams:
    """Parameters on one rank of a stage before data-parallel sharding."""

    dense: float
    """Split by tensor and pipeline parallelism."""
    expert: float
    """Routed experts: split by expert parallelism too, and replicated over fewer ranks."""

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.expert


def stage_params(shape: ModelShape, layout: Layout, stage: Stage) -> StageParams:
    """Parameters of a stage's rank: tensor parallelism splits projections and vocabulary, norms it copies."""
    moe_share = shape.moe_layers / shape.layers
    moe_layers, dense_layers = stage.layers * moe_share, stage.layers * (1 - moe_share)
    norms = stage.layers * shape.norms_per_layer * shape.norm_params
    block = dense_layers * shape.mlp_params(shape.ffn) + moe_layers * shape.moe_dense_params
    dense = (stage.layers * shape.attention_params + block) / layout.tensor + norms
    if stage.embedding:
        dense += shape.embedding_params / layout.tensor
    # A tied head on the last of several stages is a second copy of the embedding.
    if stage.head and not (shape.tied_embeddings and stage.embedding):
        dense += shape.vocab * shape.hidden / layout.tensor
    return StageParams(dense, moe_layers * shape.expert_params / layout.tensor / layout.expert)


def lora_params(shape: ModelShape, layout: Layout, stage: Stage) -> float:
    """Adapter parameters on one rank of a stage."""
    return stage.layers * layout.num_lora_targets * layout.lora_rank * 2 * shape.hidden / layout.tensor


def _state(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer) in bytes."""
    share = [1.0, 1.0, 1.0]
    expert_share = [1.0, 1.0, 1.0]
    for index, needed_stage in enumerate((3, 2, 1)):
        if layout.zero_stage >= needed_stage:
            share[index] = 1 / layout.shard_degree
            # Expert parallelism takes its ranks out of the data-parallel ones.
            expert_share[index] = 1 / max(1, layout.shard_degree // layout.expert)
    if layout.method != "full":
        return _adapter_state(shape, layout, stage, params, share[0])
    each = state_bytes(layout)
    weights = 0.0 if layout.offloads_parameters else each.parameter
    per_param = (weights, each.gradient, each.optimizer if layout.offload == "none" else 0.0)
    sizes = [
        bytes_ * (params.dense * dense + params.expert * expert)
        for bytes_, dense, expert in zip(per_param, share, expert_share, strict=True)
    ]
    return sizes[0], sizes[1], sizes[2]


def _adapter_state(
    shape: ModelShape, layout: Layout, stage: Stage, params: StageParams, share: float
) -> tuple[float, float, float]:
    """Frozen base weights in the training precision (NF4 linears under QLoRA), adapters and their moments in fp32."""
    vocabulary = (
        shape.vocab * shape.hidden / layout.tensor * (stage.embedding + (stage.head and not shape.tied_embeddings))
    )
    linears = max(params.total - vocabulary, 0.0)
    linear_bytes = QLORA_BYTES if layout.method == "qlora" else layout.element_bytes
    base = (linears * linear_bytes + vocabulary * layout.element_bytes) * share * (not layout.offloads_parameters)
    adapters = lora_params(shape, layout, stage)
    return base + 4 * adapters * share, 4 * adapters, moment_bytes(layout) * adapters


def _stage_activations(shape: ModelShape, layout: Layout, stage: Stage) -> float:
    """Saved activations at the peak: micro-batches in flight, and with recomputation one layer rebuilt."""
    kept = layer_activation_bytes(shape, layout, layout.recompute)
    held = kept * stage.layers * stage.in_flight
    rebuilt = 0.0 if layout.recompute == "none" else layer_activation_bytes(shape, layout, "none") - kept
    # The embedding's output, and the last hidden states before the head.
    edges = layout.tokens_per_micro_batch * shape.hidden * layout.element_bytes / layout.norm_split
    return held + max(rebuilt, 0.0) + edges * (stage.embedding * stage.in_flight + stage.head)


def layer_activation_bytes(shape: ModelShape, layout: Layout, recompute: str) -> float:
    """Bytes that one layer (the average one) saves of one micro-batch for its backward pass."""
    tokens, element = layout.tokens_per_micro_batch, layout.element_bytes
    residual = tokens * element * shape.hidden / layout.norm_split
    if recompute == "full":
        return residual
    attention = _attention_activation_bytes(shape, layout, recompute)
    moe_share = shape.moe_layers / shape.layers
    dense = _mlp_activation_bytes(shape, layout, shape.ffn, recompute)
    routed = _moe_activation_bytes(shape, layout, recompute) if moe_share else 0.0
    block = dense * (1 - moe_share) + routed * moe_share
    # Each half keeps its norm's input and output; an unfused RMSNorm keeps an fp32 copy and the normalized value too.
    norms = 2 * residual * (2 if _fused_norm(layout) else 4)
    if recompute == "selective" and layout.engine == "torch":
        # Matrix products and attention are kept, norms and element-wise functions rebuilt.
        norms = 2 * residual
    return attention + block + norms


def _fused_norm(layout: Layout) -> bool:
    """Megatron fuses its norms; transformers' models, which the other engines train, compute them in fp32 by parts."""
    return layout.engine == "megatron" or layout.precision in ("fp32", "fp64")


def _attention_activation_bytes(shape: ModelShape, layout: Layout, recompute: str) -> float:
    """Queries, keys, values, and the attention's output; with an attention matrix, scores, mask and dropped scores."""
    tokens, element = layout.tokens_per_micro_batch, layout.element_bytes
    projections = element * (2 * shape.query_dim + 2 * shape.kv_dim) / layout.tensor
    statistics = 4 * shape.heads / layout.tensor
    matrix = 0.0
    if not layout.flash_attention and recompute == "none":
        matrix = (2 * element + 1) * shape.heads * layout.sequence_length / layout.tensor
    return tokens * (projections + statistics + matrix)


def _mlp_activation_bytes(shape: ModelShape, layout: Layout, width: float, recompute: str) -> float:
    """Inputs and output of the activation function; unfused SwiGLU keeps the activated gate as well."""
    tensors = 2.0
    if shape.gated_mlp:
        tensors = 3.0 if layout.engine == "megatron" else 4.0
    if recompute == "selective" and layout.engine == "torch":
        tensors = 2.0 if shape.gated_mlp else 1.0
    return layout.tokens_per_micro_batch * layout.element_bytes * width * tensors / layout.tensor


def _moe_activation_bytes(shape: ModelShape, layout: Layout, recompute: str) -> float:
    """Each token's copies to its experts, their blocks, the shared expert, and the router's fp32 scores.

    A balanced router is assumed: expert parallelism moves tokens, it doesn't change how many a rank holds.
    """
    copies = shape.experts_per_token
    routed = _mlp_activation_bytes(shape, layout, shape.moe_ffn * copies, recompute)
    shared = _mlp_activation_bytes(shape, layout, shape.shared_ffn, recompute)
    tokens, element = layout.tokens_per_micro_batch, layout.element_bytes
    dispatched = 2 * tokens * element * copies * shape.hidden / layout.norm_split
    return routed + shared + dispatched + tokens * 2 * 4 * shape.experts / layout.norm_split


def logits_bytes(shape: ModelShape, layout: Layout) -> float:
    """Logits and cross-entropy at their peak, of one micro-batch.

    transformers: logits kept by the output, log-softmax in fp32, and its gradient before and after (2+4+4+4 bytes);
    Megatron's fused loss works in place (2+4+4). In fp32 everything has 4 bytes. A chunked loss keeps one chunk's
    logits, in both precisions, and their gradient, and until the backward pass the gradients of the hidden states and,
    in fp32, of the head.
    """
    element = layout.element_bytes
    if layout.loss_chunk_tokens is not None and layout.tokens_per_micro_batch > layout.loss_chunk_tokens:
        chunk = layout.loss_chunk_tokens * shape.vocab * (2 * element + 4) / layout.tensor
        head = 4 * shape.vocab * shape.hidden / layout.tensor if layout.method == "full" else 0.0
        return chunk + head + layout.tokens_per_micro_batch * shape.hidden * element
    each = element + 8 if layout.engine == "megatron" else element + 12
    return layout.tokens_per_micro_batch * shape.vocab * each / layout.tensor


def _buffers(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> float:
    """Gathered parameters and reduction buffers, and NCCL's own where there is more than one rank."""
    nccl = NCCL_BUFFER_BYTES if layout.world_size > 1 else 0.0
    each = state_bytes(layout)
    layer = params.total / max(stage.layers, 1)
    gathered_element = each.compute_copy or each.parameter
    if layout.method != "full":
        gathered_element = float(layout.element_bytes)
    if layout.gathers_once:
        return nccl + params.total * (gathered_element + (4 if layout.method == "full" else 0))
    if layout.zero_stage == 3 and layout.shard_degree > 1:
        # Two layers (the next is prefetched), the vocabulary's matrices, and one layer's gradients before reduction.
        vocabulary = shape.vocab * shape.hidden / layout.tensor
        matrices = stage.embedding + (stage.head and not (shape.tied_embeddings and stage.embedding))
        most = params.total if layout.keeps_gathered else 2 * layer + vocabulary * matrices
        gathered = min(most, params.total) * gathered_element
        reduced = 0.0 if layout.method != "full" else min(max(layer, vocabulary * matrices), params.total) * 4
        return nccl + gathered + reduced
    if layout.method != "full":
        return nccl
    if layout.engine == "deepspeed" and layout.zero_stage:
        return nccl + 2 * min(DEEPSPEED_BUCKET_ELEMENTS, params.total) * each.parameter
    # Autocast keeps a low-precision copy of the fp32 weights for the length of a step.
    return nccl + params.total * each.compute_copy
