"""What ranks send each other in a step, in seconds: tensor, expert, pipeline and data parallelism's messages.

How much of it stands alone is step.py's and the calling layer's to say; communication.py has what one message takes.
"""

import math
from collections.abc import Iterator

from trainyard.planner.communication import (
    PCIE_BYTES_PER_SECOND,
    Fabric,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    forwarded_all_to_all_seconds,
    group,
    send_seconds,
)
from trainyard.planner.deepspeed_buffers import bucket_elements, sums_on_all
from trainyard.planner.layout import Layout
from trainyard.planner.memory import state_bytes, sums_narrow
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage, StageParams, stage_params, stages
from trainyard.planner.time_constants import Constants


def waited_share(shape: ModelShape, layout: Layout) -> float:
    """Of the gradients that our trainer's DeepSpeed sends in stages 1 and 2, the share that no backward pass hides.

    Where each part goes to its owner alone, DeepSpeed has the host wait for the GPU before every message
    (`allreduce_and_copy`), and nothing is launched until it goes on: of a bucket's messages only the last one has
    backward kernels beside it. A bucket begins anywhere in a rank's part: if it is longer than one, its last piece is
    half a part in the mean; a shorter one crosses into the next as often as it goes into a part, in the middle.
    """
    trained = shape.params
    if layout.data_parallel == 1 or not _by_owners(layout) or sums_on_all(shape, layout, trained):
        return 0.0
    bucket, own = min(bucket_elements(shape, layout), trained), trained / layout.data_parallel
    return bucket / own / 2 if bucket < own else 1 - own / bucket / 2


def _by_owners(layout: Layout) -> bool:
    """Our own trainer's DeepSpeed sends each part of a bucket to the rank that has it, unless these are many; as it
    comes it sends all to all."""
    return layout.engine == "deepspeed" and layout.library == "trainyard" and layout.zero_stage in (1, 2)


def tensor_seconds(shape: ModelShape, layout: Layout, stage: Stage, links: Fabric) -> float:
    """Of a layer's two blocks an all-reduce each, forward and backward; with sequence parallelism their halves.

    A layer of experts has one block: its tokens go to the experts already split over the tensor ranks.
    """
    if layout.tensor == 1:
        return 0.0
    bytes_ = layout.tokens_per_micro_batch * shape.hidden * layout.element_bytes
    members = group(layout.tensor, 1, links.gpus_per_node)
    if layout.sequence_parallel:
        # A gathering and a scattering, which no switch adds up on its way.
        each = num_gatherings(layout) * all_gather_seconds(bytes_, members, links)
    else:
        each = (3 if layout.recompute == "full" else 2) * all_reduce_seconds(bytes_, members, links)
    blocks = (2 * shape.layers - shape.moe_layers) if not shape.is_hybrid else shape.layers - shape.moe_layers
    return each * stage.layers * blocks / shape.layers


def num_gatherings(layout: Layout) -> float:
    """Gatherings and scatterings of a block's tokens, forward and backward, under sequence parallelism.

    Megatron keeps its own part of a block's input and gathers it once more for the weights' gradients (Korthikanti et
    al., arXiv:2205.05198). torch keeps what it gathered; recomputing, it gathers again, and scatters every block's
    output but a checkpointed layer's last (counted by the dry run of our own trainer).
    """
    if layout.engine == "megatron":
        return 7.0 if layout.recompute == "full" else 5.0
    return 4.0 if layout.recompute == "none" else 5.5


def expert_group(layout: Layout, links: Fabric) -> Group:
    """Ranks that exchange tokens: tensor ranks that hold one expert together, or divide them, lie between them.

    So it is in our own trainer's mesh (training_container/trainer/strategies/expert_parallel.py) and in torchtitan's.
    Megatron's recipes have experts whole on each tensor rank, which takes part with its own tokens.
    """
    between = layout.expert_tensor or (1 if layout.engine == "megatron" else layout.tensor)
    return group(layout.expert, between, links.gpus_per_node)


def expert_seconds(shape: ModelShape, layout: Layout, stage: Stage, links: Fabric, constants: Constants) -> float:
    """Dispatch and combination, forward and backward."""
    if layout.expert == 1 or not shape.experts:
        return 0.0
    tokens = layout.tokens_per_micro_batch * shape.experts_per_token / layout.tensor
    members = expert_group(layout, links)
    bytes_ = tokens * (shape.latent or shape.hidden) * layout.element_bytes
    if layout.forwards_tokens:
        ranks, nodes = (
            _distinct(groups, shape.experts, shape.experts_per_token) / shape.experts_per_token
            for groups in (members.size, members.num_nodes)
        )
        each = forwarded_all_to_all_seconds(bytes_ * ranks, bytes_ * nodes, members, links)
    else:
        each = all_to_all_seconds(bytes_, members, links)
    if layout.host_exchange:
        each += constants.proxy_peer_seconds * (members.size - members.per_node)
    is_again = layout.recompute == "full" or layout.makes_again("moe")
    return each * stage.layers * shape.moe_layers / shape.layers * (6 if is_again else 4)


def _distinct(groups: int, experts: int, chosen: int) -> float:
    """Of groups that share the experts evenly, how many a token's chosen ones lie in, if all are as likely."""
    others = experts - experts / groups
    missed = math.prod(max(0.0, others - index) / (experts - index) for index in range(min(chosen, experts)))
    return groups * (1.0 - missed)


def sharding_seconds(shape: ModelShape, layout: Layout, stage: Stage, links: Fabric) -> float:
    """ZeRO-3 per micro-batch: parameters gathered forward and backward, gradients scattered."""
    if layout.zero_stage < 3 or (layout.shard_degree == 1 and layout.offload_parameters == "none"):
        return 0.0
    units = _num_units(shape, layout, stage) + 1
    times = 0.0
    for params, members in _sharded(stage_params(shape, layout, stage), layout, links):
        gathered = params * (4 if layout.autocast else layout.element_bytes) / units
        times += (1 if layout.keeps_gathered else 2) * all_gather_seconds(gathered, members, links)
        if layout.offload_parameters != "none":
            times += 2 * gathered / members.size / PCIE_BYTES_PER_SECOND
        if layout.method == "full":
            in_fp32 = layout.engine == "torch" or layout.library == "trainyard"
            usual = params * 4 / units if in_fp32 else gathered
            stated = layout.gradient_bytes
            reduced = usual if stated is None else params * stated / units
            times += all_gather_seconds(reduced, members, links)
    return times * units


def _num_units(shape: ModelShape, layout: Layout, stage: Stage) -> int:
    """Messages that a stage's layers are gathered in."""
    if layout.unit_parameters is None:
        return stage.layers
    ends = shape.embedding_params + shape.vocab * shape.hidden * (not shape.tied_embeddings)
    each = max((shape.params - ends) / shape.layers, 1.0)
    return math.ceil(stage.layers / math.ceil(layout.unit_parameters / each))


def _sharded(params: StageParams, layout: Layout, links: Fabric) -> Iterator[tuple[float, Group]]:
    """(parameters, the ranks that share them): of an expert only those that hold it, which are further apart.

    Its neighbours in a host hold other experts, so that the copies of one lie in as many hosts as there are.
    """
    together = group(layout.shard_degree, layout.tensor, links.gpus_per_node)
    if layout.expert == 1 or not params.expert:
        yield params.total, together
        return
    yield params.dense, together
    yield params.expert, group(layout.expert_shard_degree, layout.expert_split, links.gpus_per_node)


def replica_seconds(shape: ModelShape, layout: Layout, links: Fabric) -> tuple[float, float]:
    """Traffic of gradients and of updated parameters, once a step: DDP, ZeRO-1/2, replicas of FSDP groups.

    Experts are replicated over fewer ranks than the rest.
    """
    if layout.method != "full":
        return 0.0, 0.0
    params = most_params(shape, layout)
    parameter, gradient = state_bytes(layout).parameter, sent_gradient_bytes(layout)
    ranks = layout.data_parallel * layout.context
    if layout.zero_stage == 3:
        replicas = ranks // layout.shard_degree
        stride = layout.tensor * layout.shard_degree
        members = group(replicas, stride, links.gpus_per_node)
        held = params.dense / layout.shard_degree + params.expert / layout.expert_shard_degree
        return all_reduce_seconds(held * gradient, members, links), 0.0
    reduced = gathered = 0.0
    for size, count, stride in (
        (params.dense, ranks, layout.tensor),
        (params.expert, ranks * layout.tensor // layout.expert_split, layout.expert_split),
    ):
        members = group(max(1, count), stride, links.gpus_per_node)
        if layout.zero_stage:
            to_all = _by_owners(layout) and sums_on_all(shape, layout, shape.params)
            reduce = all_reduce_seconds if to_all else all_gather_seconds
            reduced += reduce(size * gradient, members, links)
            gathered += all_gather_seconds(size * parameter, members, links)
        else:
            reduced += all_reduce_seconds(size * gradient, members, links)
    return reduced, gathered


def most_params(shape: ModelShape, layout: Layout) -> StageParams:
    """Of the rank that has most, for which the others wait."""
    return max((stage_params(shape, layout, stage) for stage in stages(shape, layout)), key=lambda params: params.total)


def sent_gradient_bytes(layout: Layout) -> float:
    """Bytes a parameter of what the ranks add up: what is stated; else Megatron's fp16 gradients as they are, and its
    others in fp32.

    nanotron's state counts autograd's gradients beside the fp32 sums: only these travel. Our own trainer has DeepSpeed
    send all in fp32.
    """
    if layout.gradient_bytes is not None:
        return layout.gradient_bytes
    if layout.library in ("nanotron", "trainyard") and layout.precision not in ("fp32", "fp64"):
        return 4.0
    if sums_narrow(layout):
        return 2.0
    return state_bytes(layout).gradient


def pipeline_seconds(shape: ModelShape, layout: Layout, links: Fabric, constants: Constants) -> float:
    """Sends and receives between stages that stand alone: those of the filling and draining pipeline."""
    if layout.pipeline == 1:
        return 0.0
    bytes_ = layout.tokens_per_micro_batch * shape.stream_width * layout.element_bytes / layout.tensor
    ranks_before = layout.tensor * layout.context * layout.data_parallel
    each = send_seconds(bytes_, between_nodes=ranks_before >= links.gpus_per_node, links=links)
    full = constants.send_exposed * layout.num_micro_batches * (layout.chunks - 1)
    return 2 * each * (layout.pipeline - 1 + full)
