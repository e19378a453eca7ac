"""Memory of the worst rank, in closed form, by category.

Formulas: ZeRO (arXiv:1910.02054, section 3) for training state; Korthikanti et al. (arXiv:2205.05198, section 4)
for activations, extended to grouped queries, gated blocks, experts and kernels that keep no attention matrix.
"""

import math
from dataclasses import dataclass, replace

from trainyard.planner.activations import (
    encoder_bytes,
    gathered_tokens_bytes,
    keeps_narrow,
    layer_activation_bytes,
    logits_bytes,
    mtp_bytes,
    narrow_bytes,
    pipeline_buffer_bytes,
)
from trainyard.planner.adapters import adapter_params
from trainyard.planner.constants import DEFAULT_MEMORY, GIB, MIB, MemoryConstants
from trainyard.planner.deepspeed_buffers import buffer_bytes, flattening_bytes, update_bytes
from trainyard.planner.deepspeed_weights import whole_elements
from trainyard.planner.layout import Engine, Layout, Masters
from trainyard.planner.optimizer_updates import update_temporary_bytes
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import (
    Stage,
    StageParams,
    num_vocabulary_matrices,
    part_of,
    stage_at,
    stage_params,
    stages,
    vocabulary_split,
)
from trainyard.planner.trainer_layers import layers_of
from trainyard.planner.trainer_memory import least_moment, worst_moment
from trainyard.planner.trainer_rank import gradients_come_late

SMALL_WORKSPACE_MIB, LARGE_WORKSPACE_MIB = 8.125, 32.0
"""torch's cuBLAS workspace of one stream and handle: its default before Hopper, and since (or :4096:8)."""

ONE_IN_TEN = 1.2816
"""Standard deviations that a normal error exceeds once in ten times, upwards."""

TE_WORKSPACE_MIB, TE_HOPPER_WORKSPACE_MIB = 4.0, 32.0
"""Transformer Engine's own workspace for products."""

EXPERT_STREAMS = 4
"""Streams of Transformer Engine's grouped products."""

DEEPSPEED_BUCKET_ELEMENTS = 5e8
"""DeepSpeed's default reduce_bucket_size and allgather_bucket_size."""

DEEPSPEED_SUB_GROUP = 1e9
"""DeepSpeed's default sub_group_size of ZeRO-3."""

QLORA_BYTES = 0.5 + 4 / 64
"""NF4: four bits a weight and one fp32 scale for 64 of them (arXiv:2305.14314)."""


PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "workspace")
"""The fields of `Memory` that are bytes."""


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
    """Kernels' scratch and what pipelines have received: it stays between steps."""
    main_gradients: float = 0.0
    """fp32 copies of gradients that the optimizer's step makes, and that are let go when the next step begins."""
    step_temporary: float = 0.0
    """What the optimizer's step makes and lets go, while no activation is there."""
    late_gradients: float = 0.0
    """Of the gradients, what is not there yet at the worst moment of the passes."""
    last_layer: float | None = None
    """Where no gradient is there before the backward pass (a plain loop's step of one micro-batch): what still moves
    when the last gradients come, one layer's activations. None: gradients may lie beside all activations."""
    moving_error: float = DEFAULT_MEMORY.moving_error
    """Relative standard error of what comes and goes within a step; no bytes."""

    @property
    def state(self) -> float:
        """The training state, which stays between steps: parameters, gradients (their fp32 copies too), optimizer."""
        return self.parameters + self.gradients + self.main_gradients + self.optimizer

    @property
    def in_passes(self) -> float:
        """The most that is allocated while micro-batches go forward and back."""
        everything = float(sum(getattr(self, name) for name in PARTS)) - self.late_gradients
        if self.last_layer is not None:
            everything = max(everything - self.gradients, self.resting + self.buffers + self.last_layer)
        return everything

    @property
    def in_update(self) -> float:
        """The same in the optimizer's step."""
        return self.resting + self.step_temporary

    @property
    def allocated(self) -> float:
        """The allocator's peak (torch.cuda.max_memory_allocated)."""
        return max(self.in_passes, self.in_update)

    @property
    def at_peak(self) -> dict[str, float]:
        """`PARTS` at the peak; of the optimizer's step what it makes is among activations."""
        parts = {name: float(getattr(self, name)) for name in PARTS}
        if self.in_update > self.in_passes:
            return parts | {"activations": self.step_temporary, "logits": 0.0, "buffers": 0.0}
        return parts | {"gradients": self.gradients - self.late_gradients}

    @property
    def resting(self) -> float:
        """What is allocated between steps (Megatron's mem-allocated-bytes)."""
        return self.state + self.workspace

    @property
    def reserved(self) -> float:
        """What the allocator has taken of the device at the peak (torch.cuda.max_memory_reserved)."""
        return self.allocated * (1 + DEFAULT_MEMORY.held_back)

    @property
    def device(self) -> float:
        """What the device shows as taken (nvidia-smi): the allocator's, the CUDA context and NCCL."""
        return self.reserved + DEFAULT_MEMORY.context_gib * GIB

    @property
    def margin(self) -> float:
        """What the prediction may be short of, at most once in ten: its parts' own errors, as if independent."""
        moving = (self.activations, self.logits, self.buffers)
        variance = (DEFAULT_MEMORY.state_error * self.state) ** 2
        variance += sum((self.moving_error * part) ** 2 for part in moving)
        return ONE_IN_TEN * math.sqrt(variance)

    @property
    def needed(self) -> float:
        """What the device must have: the peak and its margin, fragmentation, and what lies outside the allocator."""
        least = self.allocated * (1 + DEFAULT_MEMORY.fragmentation)
        return least + DEFAULT_MEMORY.context_gib * GIB + self.margin


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
    adamw_paged: nothing, its averages live in managed memory that the allocator doesn't see.
    adafactor: a mean per row and column, next to nothing (arXiv:1804.04235). muon and sgd: one average, where muon
    leaves vectors and the model's ends to AdamW (`_beside_matrices`).
    """
    average = layout.moment_bytes or 4.0
    kinds = {
        "adamw_paged": 0.0,
        "adamw": 2 * average,
        "adamw_8bit": 2 * (1 + 4 / 256),
        "adafactor": 0.01,
        "muon": average,
        "sgd": average * layout.has_momentum,
    }
    return kinds[layout.optimizer] + 4.0 * layout.keeps_average


def state_bytes(layout: Layout) -> StateBytes:
    """The training state under the layout's engine, precision and optimizer."""
    moments = moment_bytes(layout)
    if layout.precision == "fp32":
        # Our own trainer's DeepSpeed (0.19) updates a copy of a rank's part of the weights, of whatever type they are.
        is_copied = layout.engine == "deepspeed" and layout.library == "trainyard" and layout.zero_stage > 0
        return StateBytes(4, 4, 4 * is_copied + moments, 0)
    if layout.precision == "fp64":
        return StateBytes(8, 8, 2 * moments, 0)
    masters = masters_of(layout)
    if masters == "copy":
        return StateBytes(2, _narrow_gradient_bytes(layout), _copy_bytes(layout) + moments, 0)
    if masters == "none":
        # Averages of a byte, or of a type that is stated, have that whatever type the weights have.
        own = layout.optimizer == "adamw_8bit" or layout.moment_bytes is not None
        return StateBytes(2, layout.gradient_bytes or 2, moments if own else moments / 2, 0)
    # FSDP gathers what it cut; where autocast makes it narrow, product by product, that is in fp32.
    return StateBytes(4, 4, moments, 6 if layout.autocast and layout.zero_stage == 3 else 2)


def masters_of(layout: Layout) -> Masters:
    """What is in fp32 in training with 16 bits or fewer: never `usual`."""
    if layout.autocast or layout.is_deepspeed_autocast:
        return "weights"
    if layout.masters != "usual":
        return layout.masters
    if layout.library == "nanotron" and (layout.gradient_bytes or 4) < 4:
        # Its copies of the weights come with its fp32 sums (`accumulate_grad_in_fp32`).
        return "none"
    usual: dict[Engine, Masters] = {"plain": "none", "deepspeed": "copy", "megatron": "copy", "torch": "weights"}
    return usual[layout.engine]


def _narrow_gradient_bytes(layout: Layout) -> float:
    """Of a gradient whose weight is narrow."""
    if layout.library == "nanotron":
        # Its accumulators, which are in fp32 if there are any, stand beside the gradients that autograd makes.
        return 2 if (layout.gradient_bytes or 4) < 4 else 6
    if layout.engine == "megatron":
        # With its fp32 copy (`_copies_gradients`) a narrow one counts as one in fp32.
        return 2 if sums_narrow(layout) and not _copies_gradients(layout) else 4
    if layout.gradient_bytes is not None:
        return layout.gradient_bytes
    return 4 if layout.engine == "deepspeed" and _sums_in_fp32(layout) else 2


def _sums_in_fp32(layout: Layout) -> bool:
    """Our own trainer has DeepSpeed sum gradients in fp32 where it cuts them (`strategies/deepspeed_settings.py`)."""
    return layout.library == "trainyard" and layout.precision == "bf16" and layout.zero_stage >= 2


def memory(shape: ModelShape, layout: Layout, constants: MemoryConstants = DEFAULT_MEMORY) -> Memory:
    """The worst rank's memory in bytes, or that of the pipeline rank that `layout.rank` names."""
    asked = stages(shape, layout)
    if layout.rank != "worst":
        asked = asked[:1] if layout.rank == "first" else asked[-1:]
    return max((_stage_memory(shape, layout, stage, constants) for stage in asked), key=lambda item: item.allocated)


def least_memory(shape: ModelShape, layout: Layout) -> Memory:
    """No more than `memory` of our own trainer, for a small part of its work: the first rank's state, and the least
    of its worst moment. A search asks for the rest where this fits."""
    stage = stages(shape, layout)[0]
    shape = part_of(shape, layout, stage)
    params = stage_params(shape, layout, stage)
    parameters, gradients, optimizer = _state(shape, layout, stage, params)
    least = least_moment(shape, layout, stage, params)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=least.activations,
        logits=0.0,
        buffers=least.buffers,
        workspace=workspace_bytes(layout, experts=shape.moe_layers > 0),
        late_gradients=gradients if gradients_come_late(layout) else 0.0,
        moving_error=0.0,  # of the worst moment's activations, which may be fewer beside more of the rest
    )


def rank_memory(shape: ModelShape, layout: Layout, place: int, constants: MemoryConstants = DEFAULT_MEMORY) -> Memory:
    """The memory of a rank at one place along the trainer's pipeline, from 0."""
    return _stage_memory(shape, layout, stage_at(shape, layout, place), constants)


def _stage_memory(shape: ModelShape, layout: Layout, stage: Stage, constants: MemoryConstants) -> Memory:
    shape = part_of(shape, layout, stage)
    params = stage_params(shape, layout, stage)
    parameters, gradients, optimizer = _state(shape, layout, stage, params)
    if layout.library == "trainyard":
        worst = worst_moment(shape, layout, stage, params)
        moving = worst._replace(
            activations=worst.activations + encoder_bytes(shape, layout, constants) * stage.embedding * stage.in_flight,
            buffers=worst.buffers + _engine_buffers(shape, layout, stage, params),
        )
        return Memory(
            parameters=parameters + state_bytes(layout).parameter * whole_elements(shape, layout),
            gradients=gradients,
            optimizer=optimizer,
            activations=moving.activations,
            logits=moving.loss,
            buffers=moving.buffers,
            workspace=workspace_bytes(layout, experts=shape.moe_layers > 0),
            step_temporary=_engine_update(shape, layout, stage, params) + update_temporary_bytes(shape, layout, stage),
            late_gradients=max(gradients - worst.gradients, 0.0) if gradients_come_late(layout) else 0.0,
            moving_error=constants.moving_error,
        )
    logits = logits_bytes(shape, layout, constants) if stage.head else 0.0
    return Memory(
        parameters=parameters + _narrow_copies(shape, layout, stage, params),
        gradients=gradients,
        optimizer=optimizer,
        activations=_stage_activations(shape, layout, stage, logits, constants),
        logits=logits,
        buffers=_buffers(shape, layout, stage, params, logits),
        workspace=workspace_bytes(layout, experts=shape.moe_layers > 0)
        + pipeline_buffer_bytes(shape, layout)
        + gathered_tokens_bytes(shape, layout),
        main_gradients=_main_gradient_bytes(layout) * _held(params, layout, 1),
        step_temporary=_step_temporary(layout, params, optimizer),
        last_layer=_last_layer(shape, layout, constants),
        moving_error=constants.plain_moving_error if layout.engine == "plain" else constants.moving_error,
    )


def workspace_bytes(layout: Layout, *, experts: bool = False) -> float:
    """Kernels' scratch: cuBLAS has one workspace for the forward and one for the backward thread's handle.

    Megatron's own layers, without Transformer Engine, multiply through a third handle. Grouped experts have four
    streams, each with Transformer Engine's workspace.
    """
    each = LARGE_WORKSPACE_MIB if layout.large_workspace or layout.hopper else SMALL_WORKSPACE_MIB
    if layout.engine != "megatron":
        return 2 * each * MIB
    if not layout.transformer_engine:
        return 3 * each * MIB
    streams = 1 + EXPERT_STREAMS * (experts and layout.grouped_experts)
    return (2 * each + streams * (TE_HOPPER_WORKSPACE_MIB if layout.hopper else TE_WORKSPACE_MIB)) * MIB


NARROW_COPIES = 2
"""Of a weight, what narrow products read beside the one that is trained: as forward and as backward ones need it."""


def _narrow_copies(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> float:
    """Of Transformer Engine's linear layers in FP8 or FP4, made once a step for all of its micro-batches, and kept (its
    `get_weight_workspace`); where the weights themselves are in FP8 (`--fp8-param-gather`) there are no others."""
    if layout.narrow_weights or layout.method != "full" or not keeps_narrow(layout):
        return 0.0
    matrices = num_vocabulary_matrices(shape, layout, stage)
    ends = shape.vocab * shape.hidden / vocabulary_split(shape, layout) * matrices
    share = 1 / layout.shard_degree if layout.zero_stage == 3 else 1.0
    return NARROW_COPIES * narrow_bytes(layout) * max(params.total - ends, 0.0) * share


def lora_params(shape: ModelShape, layout: Layout, stage: Stage) -> float:
    """Adapter parameters on one rank of a stage."""
    if layout.lora_targets:
        return adapter_params(shape, layout, stage.layers, has_head=stage.head, split=layout.tensor)
    return stage.layers * layout.num_lora_targets * layout.lora_rank * 2 * shape.hidden / layout.tensor


def _state(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer) in bytes."""
    if layout.method != "full":
        return _adapter_state(shape, layout, stage, params, 1 / layout.shard_degree if layout.zero_stage >= 3 else 1.0)
    weights, gradients, optimizer = trained_state(params, layout)
    if layout.optimizer == "muon" and layout.offload == "none":
        others = StageParams(_beside_matrices(shape, layout, stage), 0.0)
        both = state_bytes(replace(layout, optimizer="adamw")).optimizer - state_bytes(layout).optimizer
        optimizer += both * _held(others, layout, 1)
    return weights, gradients, optimizer


def _beside_matrices(shape: ModelShape, layout: Layout, stage: Stage) -> float:
    """Of a stage's parameters those that Muon leaves to AdamW: embeddings, head and norms, as none of them turns one
    hidden vector into another."""
    matrices = num_vocabulary_matrices(shape, layout, stage)
    words = shape.vocab * shape.hidden
    positions = (shape.embedding_params - words) * stage.embedding
    ends = words * matrices / vocabulary_split(shape, layout) + positions
    return ends + stage.layers * shape.norms_per_layer * shape.norm_params


def trained_state(params: StageParams, layout: Layout) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer) in bytes of what is trained whole."""
    each = state_bytes(layout)
    weights = each.parameter if layout.offload_parameters == "none" else 0.0
    gradient = 0.0 if _offloads_gradients(layout) else each.gradient - _main_gradient_bytes(layout) / 2
    optimizer = each.optimizer if layout.offload == "none" else 0.0
    parts = ((weights, 3), (gradient, 1 if layout.sends_gradients_as_made else 2), (optimizer, 1))
    sizes = [bytes_ * _held(params, layout, needed_stage) for bytes_, needed_stage in parts]
    return sizes[0], sizes[1], sizes[2]


def sums_on_host(layout: Layout) -> bool:
    """Whether DeepSpeed (0.19) sums gradients in the host's memory, as the optimizer's state isn't on the GPU.

    Stage 3 does, for a disk too. Stage 2 has gradients of a wider type than the weights' in a buffer on the GPU until
    the step; stage 1 sends nothing before a step's last micro-batch.
    """
    if layout.engine != "deepspeed" or layout.offload == "none" or layout.zero_stage < 2:
        return False
    each = state_bytes(layout)
    return layout.zero_stage == 3 or each.gradient == each.parameter


def _offloads_gradients(layout: Layout) -> bool:
    """The same of our own trainer's: what other DeepSpeed jobs hold is counted as published runs have it. FSDP brings
    each layer's to the host as it is reduced."""
    is_fsdp = layout.engine in ("torch", "plain") and layout.zero_stage == 3 and layout.offload_parameters != "none"
    return is_fsdp or (layout.library == "trainyard" and sums_on_host(layout))


def _held(params: StageParams, layout: Layout, needed_stage: int) -> float:
    """Of a stage's parameters, those whose state a rank holds, if it is cut from that ZeRO stage on."""
    if layout.zero_stage < needed_stage:
        return params.total
    # Expert parallelism takes its ranks out of the data-parallel ones.
    return params.dense / layout.shard_degree + params.expert / layout.expert_shard_degree


def _step_temporary(layout: Layout, params: StageParams, optimizer: float) -> float:
    """torch's AdamW over all tensors at once (foreach, a plain loop's) makes the roots of the second moments; DeepSpeed
    makes a rank's gradients flat."""
    if layout.engine == "deepspeed" and layout.method == "full":
        return _flattened(layout, params, params.total)
    return optimizer / 2 if layout.engine == "plain" and layout.optimizer == "adamw" else 0.0


def _flattened(layout: Layout, params: StageParams, trained: float) -> float:
    each = state_bytes(layout)
    own = _held(params, layout, 1) * trained / params.total
    return flattening_bytes(layout, trained, own, weight_bytes=each.parameter, gradient_bytes=each.gradient)


def _last_layer(shape: ModelShape, layout: Layout, constants: MemoryConstants) -> float | None:
    """A layer's activations, where gradients and activations are never there together but for it.

    transformers' loop lets gradients go before each step, so that a step of one micro-batch has none while its
    activations and logits stand; they grow as the activations go. litgpt's recipes sum micro-batches by default.
    """
    alone = layout.num_micro_batches == 1 and layout.pipeline == 1
    if layout.method != "full" or layout.library != "transformers" or layout.engine != "plain" or not alone:
        return None
    return layer_activation_bytes(shape, layout, "none", constants)


def sums_narrow(layout: Layout) -> bool:
    """Whether Megatron's gradients are summed, and kept, in 16 bits: fp16's, or of bf16 where somebody says so."""
    if layout.engine != "megatron" or layout.library == "nanotron" or layout.precision in ("fp32", "fp64"):
        return False
    return (layout.gradient_bytes or (2 if layout.precision == "fp16" else 4)) < 4


def _copies_gradients(layout: Layout) -> bool:
    """Whether Megatron's optimizer makes fp32 copies of narrow gradients, to update fp32 copies of the weights that
    are on the GPU."""
    has_copies = masters_of(layout) == "copy" and layout.offload == "none"
    return sums_narrow(layout) and has_copies and not _is_precision_aware(layout)


def _is_precision_aware(layout: Layout) -> bool:
    """Whether it is Megatron's Adam of moments in fewer bits (`--use-precision-aware-optimizer`), which reads gradients
    as they are.

    Under FP8 Megatron makes the copies for it all the same, but with delayed scaling (`optimizer_config.py`:
    use_precision_aware_optimizer_no_fp8_or_ds_fp8); which scaling a run has nobody says.
    """
    is_megatrons = layout.engine == "megatron" and layout.library != "nanotron"
    is_narrow = layout.optimizer == "adamw" and (layout.moment_bytes or 4) < 4
    return is_megatrons and is_narrow and layout.precision in ("bf16", "fp16")


TE_STORES_REMAINDERS = 2025.2
"""Transformer Engine 2.1."""


def _copy_bytes(layout: Layout) -> float:
    """Of the optimizer's copy of a weight, in fp32. Of bf16 ones the precision-aware optimizer keeps those 16 bits that
    the weight itself hasn't (`store_param_remainders`)."""
    is_rest = layout.precision == "bf16" and layout.offload == "none" and layout.year >= TE_STORES_REMAINDERS
    return 2.0 if is_rest and _is_precision_aware(layout) else 4.0


def _main_gradient_bytes(layout: Layout) -> float:
    """Bytes a parameter of these copies."""
    return 4.0 if _copies_gradients(layout) and layout.method == "full" else 0.0


def _adapter_state(
    shape: ModelShape, layout: Layout, stage: Stage, params: StageParams, share: float
) -> tuple[float, float, float]:
    """Frozen base weights in the training precision (NF4 linears under QLoRA), adapters and their moments in fp32."""
    matrices = num_vocabulary_matrices(shape, layout, stage)
    vocabulary = shape.vocab * shape.hidden / vocabulary_split(shape, layout) * matrices
    linears = max(params.total - vocabulary, 0.0)
    # litgpt's head is a four-bit linear too; transformers' fine-tuning keeps what is not quantized in fp32.
    whole_bytes = 4.0 if layout.keeps_rest_in_fp32 or layout.autocast else float(layout.element_bytes)
    narrow_bytes = whole_bytes if layout.autocast else float(layout.element_bytes)
    linear_bytes = QLORA_BYTES if layout.method == "qlora" else narrow_bytes
    base = (linears * linear_bytes + vocabulary * whole_bytes) * share * (layout.offload_parameters == "none")
    adapters = lora_params(shape, layout, stage)
    copies = vocabulary * layout.trains_vocabulary
    # In the training precision, with averages in it as well, unless their type is stated.
    trained = copies * layout.element_bytes
    moments = moment_bytes(layout)
    copied = moments * copies * (1.0 if layout.moment_bytes else 0.5)
    if layout.library == "trainyard":
        ours = layers_of(shape, layout)
        if layout.method == "qlora":
            linear_bytes = ours.weight_element
        # Learned positions are no linear layer either, and whole on every tensor rank. Expert ranks are among those
        # that FSDP cuts over: an expert is cut over fewer.
        ends = (vocabulary + shape.learned_positions * shape.hidden * stage.embedding) * share
        held = _held(params, layout, 3) - ends
        base = (max(held, 0.0) * linear_bytes + ends * whole_bytes) * (layout.offload_parameters == "none")
        # FSDP cuts adapters as all else.
        return base + 4 * adapters * share, 4 * adapters * share, moments * adapters * share
    return base + 4 * adapters * share + trained, 4 * adapters + trained, moments * adapters + copied


def _stage_activations(
    shape: ModelShape, layout: Layout, stage: Stage, logits: float, constants: MemoryConstants
) -> float:
    """Saved activations at the peak: micro-batches in flight, and with recomputation one layer rebuilt.

    A layer is rebuilt when the logits are gone: of the two only the larger counts.
    """
    kept = layer_activation_bytes(shape, layout, layout.recompute, constants)
    # Warm-up passes of an interleaved schedule run through the chunks that are as large as everybody's.
    layers = max(stage.layers, math.ceil(shape.layers / layout.pipeline)) if layout.chunks > 1 else stage.layers
    held = kept * layers * stage.in_flight + mtp_bytes(shape, layout, kept, stage.head)
    held += encoder_bytes(shape, layout, constants) * stage.embedding * stage.in_flight
    rebuilt = 0.0
    if layout.recompute != "none":
        rebuilt = layer_activation_bytes(shape, layout, "none", constants) - kept
    # The embedding's output, and the last hidden states before the head.
    edges = layout.tokens_per_micro_batch * shape.hidden * layout.stream_bytes / layout.norm_split
    return held + max(rebuilt - logits, 0.0) + edges * (stage.embedding * stage.in_flight + stage.head)


def _engine_buffers(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> float:
    """DeepSpeed's own, whatever the model does."""
    if layout.engine != "deepspeed" or not layout.zero_stage:
        return 0.0
    trained, each = _trained(shape, layout, stage, params), state_bytes(layout)
    return buffer_bytes(shape, layout, trained, weight_bytes=each.parameter, gradient_bytes=each.gradient)


def _engine_update(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> float:
    """What DeepSpeed's update makes."""
    if layout.engine != "deepspeed":
        return 0.0
    trained = _trained(shape, layout, stage, params)
    flattened = _flattened(layout, params, trained)
    return flattened + update_bytes(shape, layout, trained, state_bytes(layout).gradient)


def _trained(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> float:
    return params.total if layout.method == "full" else lora_params(shape, layout, stage)


def _reduced_bytes(layout: Layout) -> float:
    """Of a gradient before FSDP adds it up: fp32, or its `reduce_dtype`. Other engines' are counted as published runs
    have them."""
    return (layout.gradient_bytes if layout.engine == "torch" else None) or 4.0


def _buffers(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams, logits: float) -> float:
    """Gathered parameters and reduction buffers; NCCL's own lie outside the allocator."""
    each = state_bytes(layout)
    layer = params.total / max(stage.layers, 1)
    full = layout.method == "full"
    gathered_element = each.compute_copy or each.parameter
    if not full:
        gathered_element = 6.0 if layout.autocast else float(layout.element_bytes)
    if layout.gathers_once:
        return params.total * (gathered_element + (_reduced_bytes(layout) if full else 0))
    if layout.zero_stage == 3 and (layout.shard_degree > 1 or layout.offload_parameters != "none"):
        # Two layers (the next is prefetched), the vocabulary's matrices, and one layer's gradients before reduction,
        # which begins when the logits are gone.
        vocabulary = shape.vocab * shape.hidden / layout.tensor
        matrices = num_vocabulary_matrices(shape, layout, stage)
        most = params.total if layout.keeps_gathered else 2 * layer + vocabulary * matrices
        gathered = min(most, params.total) * gathered_element
        if not full and layout.library == "litgpt":
            # Each rank reads the whole frozen model before it is cut: the peak of the run is then.
            gathered = max(gathered, params.total * layout.element_bytes)
        reduced = min(max(layer, vocabulary * matrices), params.total) * _reduced_bytes(layout) if full else 0.0
        if layout.engine == "deepspeed" and full:
            # The step makes fp32 gradients and their unscaled copy for one sub-group of parameters at a time.
            reduced = max(reduced, min(DEEPSPEED_SUB_GROUP, params.total / layout.shard_degree) * 8 - gathered)
        return gathered + max(reduced - logits, 0.0)
    if not full:
        return 0.0
    if layout.engine == "deepspeed" and layout.zero_stage == 3:
        return max(min(DEEPSPEED_SUB_GROUP, params.total) * 8 - logits, 0.0)
    if layout.engine == "deepspeed" and layout.zero_stage:
        return 2 * min(DEEPSPEED_BUCKET_ELEMENTS, params.total) * each.parameter
    # Autocast keeps a low-precision copy of the fp32 weights for the length of a step.
    return params.total * each.compute_copy
