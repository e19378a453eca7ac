"""What a host's own memory must hold: processes, the copy of a save on its way, and training state that lives there."""

from dataclasses import dataclass

from trainyard.planner.constants import GIB
from trainyard.planner.goodput import CHECKPOINT_BYTES_PER_PARAM
from trainyard.planner.layout import Layout

PROCESS_GIB = 4.0
"""A rank's process: Python, torch, CUDA's own host memory, NCCL's buffers, tokenized data ahead of it (assumed)."""

SYSTEM_GIB = 8.0
"""The operating system, agents and page cache that must not go (assumed)."""

OFFLOADED_BYTES = 16.0
"""A parameter's fp32 master weight, gradient and two moments in host memory: as DeepSpeed itself estimates."""

OFFLOADED_WEIGHT_BYTES = 2.0
"""With the weights there too."""

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
    """Optimizer state, and weights, that live there."""

    @property
    def needed(self) -> float:
        """All of it."""
        return self.processes + self.checkpoint + self.offloaded


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

    `params`: the model's; `saved`: those that a checkpoint holds.
    """
    copies = saved * bytes_per_saved / layout.world_size if asynchronous_saves else 0.0
    return HostMemory(
        processes=(SYSTEM_GIB + PROCESS_GIB * ranks_per_host) * GIB,
        checkpoint=copies * ranks_per_host,
        offloaded=_offloaded_bytes(params, layout) * ranks_per_host,
    )


def counted_gib(checkpoint_gib: float, offloaded_gib: float, offload: str) -> float:
    """The part of a host's memory that is counted and not assumed, GiB: a save's copies, and what is offloaded to it.
    `offload`: the layout's; to `nvme` only buffers before a disk are left, whose size is assumed."""
    return checkpoint_gib + (0.0 if offload == "nvme" else offloaded_gib)


def _offloaded_bytes(params: float, layout: Layout) -> float:
    """Of one rank: DeepSpeed splits evenly what it offloads."""
    if layout.offload == "none":
        return 0.0
    if layout.offload == "nvme":
        return NVME_BUFFER_GIB * GIB
    each = OFFLOADED_BYTES + OFFLOADED_WEIGHT_BYTES * layout.offloads_parameters
    return params * each * OFFLOAD_BUFFER_FACTOR / max(1, layout.shard_degree)
