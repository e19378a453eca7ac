"""What an optimizer's step takes, in seconds: what it moves and multiplies, its kernels' launches, and what is sent."""

from trainyard.hardware import Gpu
from trainyard.planner.communication import PCIE_BYTES_PER_SECOND, Fabric
from trainyard.planner.exchanges import most_params
from trainyard.planner.launches import kernel_seconds, update_kernels, update_sending_seconds
from trainyard.planner.layout import Layout
from trainyard.planner.memory import lora_params, masters_of, state_bytes, sums_on_host
from trainyard.planner.muon import muon_seconds
from trainyard.planner.optimizer_updates import update_moved_bytes
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import stages
from trainyard.planner.time_constants import Constants


def update_seconds(shape: ModelShape, layout: Layout, device: Gpu, links: Fabric, constants: Constants) -> float:
    """All of an update: what it moves and multiplies, or where that takes longer the launching of its kernels; and what
    our own trainer's ranks send for it."""
    on_gpu = _optimizer_seconds(shape, layout, device, links, constants) + muon_seconds(
        shape, layout, device, constants
    )
    if layout.library != "trainyard" or layout.engine != "torch" or layout.offload != "none":
        return on_gpu
    launching = update_kernels(shape, layout) * kernel_seconds(constants)
    return max(on_gpu, launching) + update_sending_seconds(shape, layout, links)


def _optimizer_seconds(shape: ModelShape, layout: Layout, device: Gpu, links: Fabric, constants: Constants) -> float:
    """An update reads and writes its state once, or as often as our own trainer's kernels do: bound by memory (by PCIe
    and the host's memory when offloaded)."""
    each = state_bytes(layout)
    share = layout.shard_degree if layout.zero_stage else 1
    both = most_params(shape, layout)
    # Experts are spread over the ranks already: fewer of them share an expert's state.
    params = both.dense / share + both.expert / (layout.expert_shard_degree if layout.zero_stage else 1)
    is_ours = layout.library == "trainyard" and layout.engine == "torch"
    if layout.method != "full":
        params = (
            max(lora_params(shape, layout, stage) for stage in stages(shape, layout)) / share
            if is_ours
            else (0.01 * params)
        )
    if layout.offload == "none":
        bytes_ = constants.optimizer_passes * (params * (each.parameter + each.gradient + each.optimizer))
        if is_ours:
            bytes_ = update_moved_bytes(shape, layout, params)
        bandwidth = device.memory_tb_per_second * 1e12 * constants.bandwidth_efficiency
        return bytes_ / bandwidth
    # Gradients out and, where they aren't offloaded too, parameters back over PCIe.
    moved = each.gradient * _gradient_trips(layout) + each.parameter * (layout.offload_parameters == "none")
    moved *= params / PCIE_BYTES_PER_SECOND
    # The update reads gradients, reads and writes state, in a memory that the node's ranks share: of AdamW 28 bytes.
    # Where no copy of the weights is among the state, they are updated themselves. DeepSpeed has a copy in fp32, too.
    is_wide = layout.precision in ("fp32", "fp64")
    has_copy = layout.engine == "deepspeed" if is_wide else masters_of(layout) == "copy"
    updated = params * (each.gradient + 2 * (each.optimizer + (0.0 if has_copy else each.parameter)))
    return moved + updated * min(layout.world_size, links.gpus_per_node) / (links.host_memory_gb_per_second * 1e9)


def _gradient_trips(layout: Layout) -> int:
    """How often a step's gradients cross PCIe, where optimizer state is offloaded.

    Once, at its end. Where they are summed on the host, once for each micro-batch; DeepSpeed (0.19) brings the sum back
    to add to it on the GPU, so that it makes two trips for each but the first.
    """
    more = layout.num_micro_batches - 1
    if layout.engine != "deepspeed":
        return 1 + more
    return 1 + 2 * more if sums_on_host(layout) else 1
