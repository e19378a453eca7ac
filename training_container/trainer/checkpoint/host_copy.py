"""Which rank writes what, and this rank's part copied to host memory: all that a save does while training waits.

The plan is torch.distributed.checkpoint's own. It is made together once and kept as long as every rank's tensors keep
their names and shapes. So a later save needs no planning round, and a rank copies only what it is the one to write:
with plain DDP a 1/N share of the replicated tensors, not all of them.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from trainer.checkpoint.disk import written_once
from trainer.checkpoint.group import Group, cores_a_rank
from trainer.checkpoint.writing import ArchiveWrappings, ShardStream

Tensors = Mapping[str, torch.Tensor]

_MOST_COPIERS = 4
_LEAST_BYTES_TO_SHARE = 16 << 20
"""Below this threads cost more than they bring."""


class SharedPlan:
    """The cached division of one set of tensors among the ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._planned: dict[str, tuple[Hashable, list[WriteItem]]] = {}
        """Name -> how the tensor lay, and what this rank could write of it."""
        self._local_items: list[WriteItem] | None = None
        self._mine: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._num_bytes = 0

    def local_items(self, tensors: Tensors) -> list[WriteItem]:
        """What this rank could write. Training waits, so what lies as it did at the last call is not planned anew."""
        planned: dict[str, tuple[Hashable, list[WriteItem]]] = {}
        changed: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            layout = layout_of(tensor)
            if layout is None or name not in self._planned or self._planned[name][0] != layout:
                changed[name] = tensor
                planned[name] = layout, []
            else:
                planned[name] = self._planned[name]
        if changed:
            for item in _planner(changed, self._group.rank == 0).create_local_plan().items:
                planned[item.index.fqn][1].append(item)
        self._planned = planned
        return [item for _, items in planned.values() for item in items]

    def holds(self, items: list[WriteItem]) -> bool:
        """Whether the kept plan was made for these items (on this rank)."""
        return self._local_items is not None and self._local_items == items

    def make(self, tensors: Tensors, items: list[WriteItem]) -> None:
        """Divide the items of all ranks; all ranks call this together."""
        plans = self._group.gather(SavePlan(items))
        divided: list[SavePlan] | None = None
        if plans is not None:
            planner = _planner(tensors, True)
            divided, self._metadata = planner.create_global_plan(plans)
            divided = FileSystemWriter("").prepare_global_plan(divided)
        self._mine = self._group.scatter(divided)
        self._num_bytes = sum(map(_item_bytes, self._mine.items))  # asked for at each save, while training waits
        self._local_items = items

    @property
    def mine(self) -> SavePlan:
        """What this rank writes."""
        assert self._mine is not None, "make() comes first"
        return self._mine

    @property
    def num_bytes(self) -> int:
        """Tensor bytes that this rank writes."""
        return self._num_bytes

    def write_index(self, folder: Path, results: list[list[WriteResult]]) -> Path:
        """Write DCP's `.metadata` over what all ranks wrote (first rank only); its path."""
        assert self._metadata is not None, "only the first rank, after make()"
        writer = FileSystemWriter(folder, sync_files=True)
        # `finish` fills the object in: the kept one stays as planned.
        writer.finish(dataclasses.replace(self._metadata), results)
        return folder / ".metadata"


class HostCopy:
    """This rank's part of a checkpoint in host memory, in buffers that later saves use again."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._wrappings = ArchiveWrappings()

    def take(self, plan: SavePlan, tensors: Tensors) -> None:
        """Copy the current values. Returns when the tensors may change again."""
        planner = _planner(tensors, False)
        wanted = {item.index for item in plan.items}
        self._buffers = {index: buffer for index, buffer in self._buffers.items() if index in wanted}
        with torch.no_grad():  # a DTensor's part takes ten times as long where its gradient might be asked for
            values = [planner.resolve_data(item) for item in plan.items]
        pairs = []
        for item, value in zip(plan.items, values, strict=True):
            assert isinstance(value, torch.Tensor), f"{item.index.fqn}: only tensors are staged"
            buffer = self._buffers.get(item.index)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                # Page-locked memory makes the copy from a GPU several times faster, and asynchronous.
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                self._buffers[item.index] = buffer
            pairs.append((buffer, value.detach()))
        _copy(pairs)

    def write(self, plan: SavePlan, folder: Path, *, durable: bool) -> tuple[list[WriteResult], dict[str, ShardStream]]:
        """Write the copied values as this rank's shard file in `folder`, named as DCP's own writer would.

        The files by name, hashed; a rank with nothing to write has none. `durable`: they are on the disk then.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if not plan.items:
            return [], {}
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        buffers = [(item.index, self._buffers[item.index]) for item in plan.items]
        results = []
        with written_once(folder / name, sum(buffer.nbytes for _, buffer in buffers), durable=durable) as file:
            shard = ShardStream(file, self._wrappings)
            for index, buffer in buffers:
                start, num_bytes = shard.append(buffer)
                results.append(WriteResult(index, num_bytes, _StorageInfo(name, start, num_bytes)))
        return results, {name: shard}


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies second into first, all of them; returns when it is done."""
    near = [pair for pair in pairs if not pair[1].is_cuda]
    for buffer, value in pairs:
        if value.is_cuda:
            buffer.copy_(value, non_blocking=True)
    num_threads = min(_MOST_COPIERS, cores_a_rank())
    if sum(value.nbytes for _, value in near) < _LEAST_BYTES_TO_SHARE:
        num_threads = 1
    # One core doesn't use all of a memory's bandwidth, and while training waits the others have nothing to do.
    shares: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(num_threads)]
    sizes = [0] * num_threads
    for pair in sorted(near, key=lambda pair: -pair[1].nbytes):
        least = sizes.index(min(sizes))
        shares[least].append(pair)
        sizes[least] += pair[1].nbytes
    if num_threads == 1:
        _copy_share(near)
    else:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="host-copy") as pool:
            list(pool.map(_copy_share, shares))
    if len(near) < len(pairs):
        torch.cuda.current_stream().synchronize()


def _copy_share(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():  # of each thread its own
        for buffer, value in pairs:
            buffer.copy_(value)


def layout_of(tensor: torch.Tensor) -> Hashable:
    """Equal as long as a tensor's items are; None of one that doesn't tell. DCP takes some 35 us to plan one.

    Other classes that describe their shards to DCP may have `shard_layout`.
    """
    if type(tensor) is DTensor:
        return tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.dtype, tensor.shape
    told: Hashable = getattr(tensor, "shard_layout", None)
    return told


def _planner(tensors: Tensors, is_first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=is_first)
    return planner


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn}: only tensors are checkpointed; give other values in `extra`"
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
