"""What a host's own memory must hold: processes, the copy of a save on its way, and training state that lives there."""

from dataclasses import dataclass

from trainyard.planner.constants import GIB
from trainyard.planner.goodput import CHECKPOINT_BYTES_PER_PARAM
from trainyard.planner.layout import Layout
from trainyard.planner.memory import state_bytes

PROCESS_GIB = 4.0
"""A rank's process: Python, torch, CUDA's own host memory, NCCL's buffers, tokenized data ahead of it (assumed)."""

SYSTEM_GIB = 8.0
"""The operating system, agents and page cache that must not go (assumed)."""

OFFLOADED_BYTES = 16.0
"""A parameter's fp32 master weight, gradient and two moments in host memory: as DeepSpeed itself estimates."""

OFFLOAD_BUFFER_FACTOR = 1.5
"""Buffers beside them: the additional_buffer_factor of that estimate."""

NVME_BUFFER_GIB = 8.0
"""A rank's pinned buffers on the way to a disk: DeepSpeed keeps a few sub-groups of parameters in flight (assumed)."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one host."""

    processes: float
    """Of all ranks, and the system beside them."""
    checkpoint: float
    """Copies that an asynchronous save writes from: every rank's part."""
    offloaded: float
    """Optimizer state, gradients and weights that live there."""
    disk_buffers: float = 0.0
    """On the way to a disk, of what lives on it."""

    @property
    def needed(self) -> float:
        """All of it."""
        return self.processes + self.checkpoint + self.offloaded + self.disk_buffers


def host_memory(
    params: float,
    saved: float,
    layout: Layout,
    ranks_per_host: int,
    *,
    asynchronous_saves: bool,
    bytes_per_saved: float = CHECKPOINT_BYTES_PER_PARAM,
) -> HostMemory:
    """What one host of so many ranks needs; each rank writes its equal part of a checkpoint.

    `params`: the model's; `saved`: those that a checkpoint holds, which are those that are trained.
    """
    copies = saved * bytes_per_saved / layout.world_size if asynchronous_saves else 0.0
    return HostMemory(
        processes=(SYSTEM_GIB + PROCESS_GIB * ranks_per_host) * GIB,
        checkpoint=copies * ranks_per_host,
        offloaded=_offloaded_bytes(params, saved, layout) * ranks_per_host,
        disk_buffers=NVME_BUFFER_GIB * GIB * ranks_per_host * ("nvme" in (layout.offload, layout.offload_parameters)),
    )


def counted_gib(checkpoint_gib: float, offloaded_gib: float) -> float:
    """The part of a host's memory that is counted and not assumed, GiB: a save's copies and what is offloaded to it."""
    return checkpoint_gib + offloaded_gib


def _offloaded_bytes(params: float, trained: float, layout: Layout) -> float:
    """Of one rank: DeepSpeed splits evenly what it offloads.

    A disk takes the optimizer's state, and what its step reads of gradients. Between micro-batches they are summed in
    memory (DeepSpeed 0.19, stage3.py: grad_partitions_flat_buffer).
    """
    if layout.offload == "none":
        return 0.0
    each = state_bytes(layout)
    weights = params * each.parameter * (layout.offload_parameters == "cpu")
    if layout.offload == "nvme":
        return (trained * each.gradient + weights) / max(1, layout.shard_degree)
    return (trained * OFFLOADED_BYTES + weights) * OFFLOAD_BUFFER_FACTOR / max(1, layout.shard_degree)
