"""The ranks as one grid: pipeline x data_replicate x data_shard x context x tensor, the last axis fastest.

Neighbouring ranks share a host, and tensor parallelism talks most, so it is the innermost axis; pipeline stages talk
least, so theirs is the outermost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainyard.spec.job import ParallelismSpec

AXES = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
"""From the outermost to the innermost."""

WEIGHT_SHARD = "weight_shard"
"""The flattened axis data_shard x context, over which FSDP splits weights: ranks of one sequence have equal ones."""


@dataclass(frozen=True)
class Place:
    """One rank's coordinates in the grid."""

    pipeline: int
    data_replicate: int
    data_shard: int
    context: int
    tensor: int


def place_of(layout: ParallelismSpec, rank: int) -> Place:
    """Where a rank stands, without any communication: row-major over AXES."""
    coordinates = {}
    for axis in reversed(AXES):
        rank, coordinates[axis] = divmod(rank, getattr(layout, axis))
    return Place(**coordinates)


def data_parallel_rank(layout: ParallelismSpec, rank: int) -> int:
    """Which share of each global batch a rank reads: ranks that differ in pipeline, context or tensor read the same."""
    place = place_of(layout, rank)
    return place.data_replicate * layout.data_shard + place.data_shard


def random_stream(layout: ParallelismSpec, rank: int) -> int:
    """Number of a rank's random stream: what one tensor group computes twice must drop the same activations."""
    return rank // layout.tensor


def has_same_streams(layout: ParallelismSpec, saved: Mapping[str, Any]) -> bool:
    """Whether each rank of `layout` can go on with the random stream that the same rank of a checkpoint had.

    `saved`: its `world_size` and `ranks_a_stream`. With as many ranks in other tensor groups, ranks that have to drop
    the same activations would go on with different streams, and drift apart without a word.
    """
    return (int(saved["world_size"]), int(saved.get("ranks_a_stream", 0))) == (layout.world_size, layout.tensor)


@dataclass(frozen=True)
class Mesh:
    """The grid with its process groups."""

    layout: ParallelismSpec
    whole: DeviceMesh
    """All ranks: pipeline x data_replicate x weight_shard x tensor."""
    sequences: DeviceMesh
    """The same ranks with weight_shard taken apart: pipeline x data_replicate x data_shard x context x tensor."""

    @classmethod
    def of(cls, layout: ParallelismSpec, device_type: str) -> "Mesh":
        """Makes the groups; all ranks call it together."""
        sizes = (layout.pipeline, layout.data_replicate, layout.data_shard * layout.context, layout.tensor)
        names = ("pipeline", "data_replicate", WEIGHT_SHARD, "tensor")
        whole = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        split = (layout.data_shard, layout.context)
        # By number: torch 2.11 refuses every name that there is (its check is the wrong way round).
        return cls(layout, whole, whole._unflatten(names.index(WEIGHT_SHARD), split, ("data_shard", "context")))

    @property
    def place(self) -> Place:
        """This rank's coordinates."""
        return place_of(self.layout, self.whole.get_rank())

    @property
    def weights(self) -> DeviceMesh:
        """What `fully_shard` takes: weight_shard, with copies across data_replicate where there are any."""
        return (
            self.whole["data_replicate", WEIGHT_SHARD] if self.layout.data_replicate > 1 else self.whole[WEIGHT_SHARD]
        )

    def axis(self, name: str) -> DeviceMesh:
        """The 1-d mesh of this rank along one of AXES."""
        return self.sequences[name] if name in ("data_shard", "context") else self.whole[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of this rank along one of AXES."""
        return self.axis(name).get_group()
