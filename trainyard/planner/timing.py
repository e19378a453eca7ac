"""Step time: a roofline per layer, exposed communication, the pipeline's bubble, the optimizer.

FLOPs as in Narayanan et al. (arXiv:2104.04473, section 5.1) without their recomputation term, which is counted where
recomputation is on. Bubble of one-forward-one-backward schedules: (p-1)/(m v) of the ideal time (ibid., section 2.2).
A handful of global constants, fitted to published runs; none belongs to one model or one system.
"""

import dataclasses
from dataclasses import dataclass

from trainyard.hardware import Gpu
from trainyard.planner.communication import (
    Fabric,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    group,
    send_seconds,
)
from trainyard.planner.layout import Layout
from trainyard.planner.memory import Stage, layer_activation_bytes, stage_params, stages, state_bytes
from trainyard.planner.shapes import ModelShape

PCIE_BYTES_PER_SECOND = 24e9
"""One way between a host's memory and a GPU: what 16 lanes of PCIe 4 give in practice."""


@dataclass(frozen=True)
class Constants:
    """What the formulas can't derive. One set for everything, rounded from a fit to the dense 16-bit rows.

    The rows fitted are those that benchmarks/planner_accuracy.py scores, so its errors on them are no proof for others.
    """

    matmul_ceiling: float = 0.85
    """Of the dense peak, reached by large matrix products, where no measurement of the part is known."""
    fp8_ceiling: float = 0.55
    """The same for FP8, with its casts and scales."""
    half_tokens: float = 500.0
    """Tokens in a micro-batch at which a product reaches half of the ceiling."""
    half_width: float = 60.0
    """Width of a rank's share of a projection at which it reaches half."""
    flash_efficiency: float = 0.28
    """Of the peak, for attention without a matrix in memory."""
    attention_matrix_passes: float = 5.0
    """Reads and writes of the scores, forward and backward, where attention keeps its matrix."""
    bandwidth_efficiency: float = 0.90
    """Of the memory bandwidth, for element-wise work."""
    elementwise_passes: float = 4.4
    """Reads and writes of saved activations, forward; backward has twice as many."""
    layer_launch_seconds: float = 850e-6
    """What the host needs to launch a layer's kernels, forward: a small layer can't be faster than that."""
    tensor_exposed: float = 0.50
    """Share of tensor-parallel communication that stands alone."""
    data_overlap: float = 0.90
    """Share of backward time behind which gradient and parameter traffic hides."""
    optimizer_passes: float = 1.5
    """Reads and writes of gradients and optimizer state per step, over their size."""


DEFAULT_CONSTANTS = Constants()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank, by what they go into; they add up to `total`."""

    forward: float
    backward: float
    recompute: float
    tensor_communication: float
    data_communication: float
    pipeline_communication: float
    expert_communication: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return sum(self.breakdown().values())

    @property
    def communication(self) -> float:
        """Exposed communication of every kind."""
        return (
            self.tensor_communication
            + self.data_communication
            + self.pipeline_communication
            + self.expert_communication
        )

    def breakdown(self) -> dict[str, float]:
        """{what: seconds}."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch through one pipeline rank."""

    forward: float
    backward: float
    recompute: float
    tensor: float
    expert: float
    sharding: float
    """Of parameter gathering and gradient scattering (ZeRO-3), before overlap."""

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.recompute


def step_time(
    shape: ModelShape, layout: Layout, device: Gpu, links: Fabric, constants: Constants = DEFAULT_CONSTANTS
) -> StepTime:
    """One optimizer step of the layout on nodes of that GPU."""
    passes = [_pass(shape, layout, stage, device, links, constants) for stage in stages(shape, layout)]
    # The slowest stage sets the rhythm of a full pipeline.
    slowest = max(passes, key=lambda item: item.compute + item.tensor + item.expert + item.sharding)
    count = layout.num_micro_batches
    hidden_behind = constants.data_overlap * slowest.compute
    sharding = 0.0 if layout.gathers_once else max(0.0, slowest.sharding - hidden_behind) * count
    once = slowest.sharding if layout.gathers_once else 0.0
    gradients = _gradient_seconds(shape, layout, links) + once
    # Replicated gradients travel once a step, behind the backward pass of the last micro-batch.
    exposed = max(0.0, gradients - constants.data_overlap * slowest.backward) + 0.02 * gradients
    tensor, expert = slowest.tensor * count, slowest.expert * count
    rhythm = slowest.compute + slowest.tensor + slowest.expert + sharding / count
    return StepTime(
        forward=slowest.forward * count,
        backward=slowest.backward * count,
        recompute=slowest.recompute * count,
        tensor_communication=tensor,
        data_communication=sharding + exposed,
        pipeline_communication=_pipeline_seconds(shape, layout, links),
        expert_communication=expert,
        bubble=bubble_passes(layout) * rhythm,
        optimizer=_optimizer_seconds(shape, layout, device, constants),
    )


def bubble_passes(layout: Layout) -> float:
    """Idle time of a pipeline rank per step, in micro-batches' full passes."""
    if layout.pipeline == 1:
        return 0.0
    idle = (layout.pipeline - 1) / layout.chunks
    # Zero-bubble schedules fill most of it with weight gradients (arXiv:2401.10241: a third of 1F1B's remains).
    return idle / 3 if layout.schedule == "zero_bubble" else idle


def _pass(shape: ModelShape, layout: Layout, stage: Stage, device: Gpu, links: Fabric, constants: Constants) -> _Pass:
    layer_forward = _layer_seconds(shape, layout, device, constants)
    head = _head_seconds(shape, layout, device, constants) if stage.head else 0.0
    forward = stage.layers * layer_forward + head
    recomputed = {"none": 0.0, "selective": 0.12, "full": 1.0}[layout.recompute]
    if layout.recompute == "selective" and not layout.flash_attention:
        recomputed = 0.06
    return _Pass(
        forward=forward,
        # Frozen base weights need no gradients of their own: half of the backward products.
        backward=(2.0 if layout.method == "full" else 1.1) * forward,
        recompute=recomputed * stage.layers * layer_forward,
        tensor=_tensor_seconds(shape, layout, stage, links) * constants.tensor_exposed,
        expert=_expert_seconds(shape, layout, stage, links),
        sharding=_sharding_seconds(shape, layout, stage, links),
    )


def matmul_flops_per_second(layout: Layout, device: Gpu, width: float, constants: Constants) -> float:
    """What matrix products of this width reach: a ceiling of the peak, less where the product is small."""
    if layout.precision == "fp8" and device.fp8_tflops is not None:
        ceiling = constants.fp8_ceiling * device.fp8_tflops
    elif layout.precision in ("fp32", "fp64") or device.achievable_bf16_tflops is None:
        ceiling = constants.matmul_ceiling * device.peak_tflops(layout.precision)
    else:
        ceiling = device.achievable_bf16_tflops
    tokens = layout.tokens_per_micro_batch
    fill = tokens / (tokens + constants.half_tokens) * width / (width + constants.half_width)
    return ceiling * 1e12 * fill


def _layer_seconds(shape: ModelShape, layout: Layout, device: Gpu, constants: Constants) -> float:
    """Forward of the average layer for one micro-batch on one rank."""
    tokens = layout.tokens_per_micro_batch
    moe_share = shape.moe_layers / shape.layers
    attention = _product_seconds(shape.attention_params, shape.query_dim, layout, device, constants)
    dense = _product_seconds(shape.mlp_params(shape.ffn), shape.ffn, layout, device, constants) if shape.ffn else 0.0
    block = dense * (1 - moe_share)
    if moe_share:
        active = shape.experts_per_token * shape.mlp_params(shape.moe_ffn) + shape.moe_dense_params
        block += _product_seconds(active, shape.moe_ffn, layout, device, constants) * moe_share
    saved = layer_activation_bytes(shape, dataclasses.replace(layout, flash_attention=True), "none")
    elementwise = constants.elementwise_passes * saved / _bytes_per_second(device, constants)
    scores = _score_seconds(shape, layout, tokens, device, constants)
    return max(attention + block + scores + elementwise, constants.layer_launch_seconds)


def _bytes_per_second(device: Gpu, constants: Constants) -> float:
    return device.memory_tb_per_second * 1e12 * constants.bandwidth_efficiency


def _product_seconds(weights: float, width: int, layout: Layout, device: Gpu, constants: Constants) -> float:
    flops = 2.0 * weights * layout.tokens_per_micro_batch / layout.tensor
    return flops / matmul_flops_per_second(layout, device, width / layout.tensor, constants)


def _score_seconds(shape: ModelShape, layout: Layout, tokens: float, device: Gpu, constants: Constants) -> float:
    """Attention's own products: causal and fused, or whole and through memory."""
    flops = 4.0 * layout.sequence_length * shape.query_dim * tokens / layout.tensor
    peak = device.peak_tflops(layout.precision if layout.precision in ("fp32", "fp64") else "bf16") * 1e12
    if layout.flash_attention:
        return 0.5 * flops / (constants.flash_efficiency * peak)
    matrix = tokens * layout.sequence_length * shape.heads / layout.tensor * layout.element_bytes
    passes = constants.attention_matrix_passes / 3
    return flops / (constants.flash_efficiency * peak) + matrix * passes / _bytes_per_second(device, constants)


def _head_seconds(shape: ModelShape, layout: Layout, device: Gpu, constants: Constants) -> float:
    """The output projection and the loss."""
    product = _product_seconds(shape.vocab * shape.hidden, shape.vocab, layout, device, constants)
    logits = layout.tokens_per_micro_batch * shape.vocab / layout.tensor * 4
    return product + constants.elementwise_passes * logits / _bytes_per_second(device, constants)


def _tensor_seconds(shape: ModelShape, layout: Layout, stage: Stage, links: Fabric) -> float:
    """Two all-reduces a layer forward and two backward (or as many all-gather and reduce-scatter pairs)."""
    if layout.tensor == 1:
        return 0.0
    bytes_ = layout.tokens_per_micro_batch * shape.hidden * layout.element_bytes
    each = all_reduce_seconds(bytes_, group(layout.tensor, 1, links.gpus_per_node), links)
    return each * stage.layers * (6 if layout.recompute == "full" else 4)


def _expert_seconds(shape: ModelShape, layout: Layout, stage: Stage, links: Fabric) -> float:
    """Dispatch and combination, forward and backward."""
    if layout.expert == 1 or not shape.experts:
        return 0.0
    tokens = layout.tokens_per_micro_batch * shape.experts_per_token / layout.norm_split
    members = group(layout.expert, layout.tensor, links.gpus_per_node)
    each = all_to_all_seconds(tokens * shape.hidden * layout.element_bytes, members, links)
    return each * stage.layers * shape.moe_layers / shape.layers * 4


def _sharding_seconds(shape: ModelShape, layout: Layout, stage: Stage, links: Fabric) -> float:
    """ZeRO-3 per micro-batch: parameters gathered forward and backward, gradients scattered."""
    if layout.zero_stage < 3 or layout.shard_degree == 1:
        return 0.0
    members = group(layout.shard_degree, layout.tensor, links.gpus_per_node)
    params = stage_params(shape, layout, stage).total
    units = stage.layers + 1
    gathered = params * layout.element_bytes / units
    times = (1 if layout.keeps_gathered else 2) * all_gather_seconds(gathered, members, links)
    if layout.offloads_parameters:
        times += 2 * gathered / layout.shard_degree / PCIE_BYTES_PER_SECOND
    if layout.method == "full":
        reduced = params * 4 / units if layout.engine == "torch" else gathered
        times += all_gather_seconds(reduced, members, links)
    return times * units


def _gradient_seconds(shape: ModelShape, layout: Layout, links: Fabric) -> float:
    """Traffic once a step: replicated gradients (DDP, ZeRO-1/2, replicas of FSDP groups), parameters under ZeRO-1/2."""
    if layout.method != "full":
        return 0.0
    stage = stages(shape, layout)[0]
    params = stage_params(shape, layout, stage).total
    each = state_bytes(layout)
    ranks = layout.data_parallel * layout.context
    if layout.zero_stage == 3:
        replicas = ranks // layout.shard_degree
        stride = layout.tensor * layout.shard_degree
        members = group(replicas, stride, links.gpus_per_node)
        return all_reduce_seconds(params / layout.shard_degree * each.gradient, members, links)
    members = group(ranks, layout.tensor, links.gpus_per_node)
    if layout.zero_stage:
        scattered = all_gather_seconds(params * each.gradient, members, links)
        return scattered + all_gather_seconds(params * each.parameter, members, links)
    return all_reduce_seconds(params * each.gradient, members, links)


def _pipeline_seconds(shape: ModelShape, layout: Layout, links: Fabric) -> float:
    """Sends and receives between stages that stand alone: those of the filling and draining pipeline."""
    if layout.pipeline == 1:
        return 0.0
    bytes_ = layout.tokens_per_micro_batch * shape.hidden * layout.element_bytes / layout.tensor
    ranks_before = layout.tensor * layout.context * layout.data_parallel
    each = send_seconds(bytes_, between_nodes=ranks_before >= links.gpus_per_node, links=links)
    return 2 * each * (layout.pipeline - 1 + layout.num_micro_batches * (layout.chunks - 1))


def _optimizer_seconds(shape: ModelShape, layout: Layout, device: Gpu, constants: Constants) -> float:
    """AdamW reads and writes its state once: bound by memory (by PCIe and the host's memory when offloaded)."""
    stage = stages(shape, layout)[0]
    each = state_bytes(layout)
    share = layout.shard_degree if layout.zero_stage else 1
    params = stage_params(shape, layout, stage).total / share
    if layout.method != "full":
        params *= 0.01
    bytes_ = params * (each.parameter + each.gradient + each.optimizer)
    if layout.offload == "none":
        return constants.optimizer_passes * bytes_ / _bytes_per_second(device, constants)
    # Gradients out and parameters back over PCIe, the update at a host's 50 GB/s a process.
    return params * (each.gradient + each.parameter) / PCIE_BYTES_PER_SECOND + bytes_ / 50e9
