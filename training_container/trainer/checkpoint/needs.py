"""What of a checkpoint some tensors need, and where in them the bytes of its boxes go."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from trainer.checkpoint.blocks import StoredBox
from trainer.checkpoint.boxes import boxes_of_range
from trainer.checkpoint.host_copy import layout_of
from trainer.checkpoint.ranges import Extents, Run, Tables, union

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a value -> a type of the same size that NumPy has too; it knows no bfloat16 and no float8."""


class Placement:
    """Where a part of a stored box goes: elements [offsets, offsets + lengths) of `sizes`, row-major, to `target`."""

    def __init__(
        self,
        target: torch.Tensor,
        dtype: torch.dtype,
        *,
        sizes: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """`target`: of shape `lengths`, any device, strides and type. `dtype`: of the stored values."""
        if not sizes:  # one value, which is a row of one
            target, sizes, offsets, lengths = target.view(1), (1,), (0,), (1,)
        self.target = target.detach()
        self._dtype = dtype
        self._sizes, self._offsets, self._lengths = tuple(sizes), tuple(offsets), tuple(lengths)
        self._strides = tuple(math.prod(self._sizes[dim + 1 :]) for dim in range(len(self._sizes)))
        on_cpu = target.device.type == "cpu" and target.dtype == dtype
        self._array = self.target.view(_BITS[dtype.itemsize]).numpy() if on_cpu and dtype.itemsize in _BITS else None
        self._memory: memoryview | None = None
        if self._array is not None and target.is_contiguous():
            values: Any = self._array.reshape(-1)
            self._memory = memoryview(values).cast("B")

    def num_before(self, position: int) -> int:
        """How many of the elements lie before the box's element `position`."""
        found, left, inner = 0, position, math.prod(self._lengths)
        for stride, offset, length in zip(self._strides, self._offsets, self._lengths, strict=True):
            inner //= length
            here, left = divmod(left, stride)
            if here < offset:
                return found
            if here >= offset + length:
                return found + length * inner
            found += (here - offset) * inner
        return found

    def touched(self, box: StoredBox) -> Iterator[Run]:
        """The runs of the box's blocks that hold any of the elements, numbered within the file."""
        if self._lengths == self._sizes:
            yield box.first_block, box.first_block + box.num_blocks
            return
        size = self._dtype.itemsize
        ends = (min(box.num_bytes, (number + 1) * box.block_bytes) // size for number in range(box.num_blocks))
        before = 0
        for number, end in enumerate(ends):
            after = self.num_before(end)
            if after > before:
                yield box.first_block + number, box.first_block + number + 1
            before = after

    def memory(self, start: int, end: int) -> memoryview | None:
        """The target's own memory for bytes [start, end) of the box; None where they don't lie in it as they are."""
        if self._memory is None:
            return None
        size = self._dtype.itemsize
        first, stop = self.num_before(start // size), self.num_before(end // size)
        return self._memory[first * size : stop * size] if (stop - first) * size == end - start else None

    def put(self, start: int, content: torch.Tensor) -> None:
        """Copy what of the bytes of the box from `start` on is wanted. `content`: uint8, 1-d, at an aligned address."""
        values = content.view(self._dtype)
        first_position = start // self._dtype.itemsize
        first, stop = self.num_before(first_position), self.num_before(first_position + len(values))
        for piece in boxes_of_range(self._lengths, first, stop):
            corner = [offset + at for offset, at in zip(self._offsets, piece.offsets, strict=True)]
            position = sum(at * stride for at, stride in zip(corner, self._strides, strict=True)) - first_position
            source = values.as_strided(piece.sizes, self._strides, values.storage_offset() + position)
            where = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))
            if self._array is not None:
                # Not torch's copy: in each thread that copies it would start as many more as there are cores.
                np.copyto(self._array[where], source.view(_BITS[self._dtype.itemsize]).numpy())
            else:
                self.target[where].copy_(source)


def _own_box(tensor: torch.Tensor) -> ChunkStorageMetadata | None:
    """The box of a tensor that this rank has; None where there are none, several, or it has its own way to tell."""
    if type(tensor) is DTensor:
        boxes: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return boxes[0] if len(boxes) == 1 and tensor.to_local().numel() > 0 else None
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() > 0:
        return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
    return None


Placements = Mapping[str, Mapping[int, Sequence[Placement]]]
"""Shard file -> start of a box's archive in it -> where its values go."""


class Needs:
    """The pieces of stored boxes that make up a rank's tensors: torch.distributed.checkpoint's own load plan.

    It takes some 20 us a tensor and 60 a DTensor, all of it before the first byte is read, so of tensors that lie as
    they were saved it is not asked.
    """

    def __init__(self, index: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors`: as for a save; the checkpoint has to hold them (`reading.mismatch`)."""
        self.index = index
        """Of what is stored."""
        self.placements: dict[str, dict[int, list[Placement]]] = {}
        boxes: dict[Hashable, ChunkStorageMetadata | None] = {}
        others: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            layout = layout_of(tensor)
            if layout not in boxes:
                boxes[layout] = _own_box(tensor)
            box = boxes[layout]
            if box is None or not self._place_as_stored(name, tensor, box):
                others[name] = tensor
        self._place_by_plan(others)

    def _place_as_stored(self, name: str, tensor: torch.Tensor, box: ChunkStorageMetadata) -> bool:
        """Where this rank's box of the tensor was stored as it is: no plan is needed. False: it wasn't."""
        stored = self.index.state_dict_metadata[name]
        place = self.index.storage_data.get(MetadataIndex(name, box.offsets))
        if place is None or not isinstance(stored, TensorStorageMetadata) or box not in stored.chunks:
            return False
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        placement = Placement(
            local, stored.properties.dtype, sizes=box.sizes, offsets=[0] * len(box.sizes), lengths=box.sizes
        )
        self.placements.setdefault(str(place.relative_path), {}).setdefault(int(place.offset), []).append(placement)
        return True

    def _place_by_plan(self, tensors: Mapping[str, torch.Tensor]) -> None:
        index = self.index
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), index, is_coordinator=True)
        sizes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name in tensors
            if isinstance(stored := index.state_dict_metadata[name], TensorStorageMetadata)
            for chunk in stored.chunks
        }
        for item in planner.create_local_plan().items:
            place = index.storage_data[item.storage_index]
            boxes = self.placements.setdefault(str(place.relative_path), {})
            if math.prod(item.lengths) > 0:
                stored_sizes = sizes[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                target = planner.resolve_tensor(item)
                boxes.setdefault(int(place.offset), []).append(self._placement(item, target, stored_sizes))

    def _placement(self, item: ReadItem, target: torch.Tensor, sizes: Sequence[int]) -> Placement:
        stored = self.index.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        return Placement(
            target, stored.properties.dtype, sizes=sizes, offsets=item.storage_offsets, lengths=item.lengths
        )

    @property
    def files(self) -> set[str]:
        """The shard files that hold them."""
        return set(self.placements)

    def archives(self, file: str) -> list[tuple[int, int]]:
        """(start, bytes) of the archives in a shard file that hold some of them."""
        there = self.placements[file]
        return sorted(
            (int(place.offset), int(place.length))
            for place in self.index.storage_data.values()
            if str(place.relative_path) == file and place.offset in there
        )

    @property
    def devices(self) -> set[torch.device]:
        """Where the tensors are."""
        every = (one for boxes in self.placements.values() for placed in boxes.values() for one in placed)
        return {one.target.device for one in every}

    def blocks(self, tables: Tables) -> Extents:
        """Which blocks hold the values."""
        found: Extents = {}
        for file, boxes in self.placements.items():
            table = tables(file)
            found[file] = [
                run for start, placed in boxes.items() for one in placed for run in one.touched(table.boxes[start])
            ]
        return union([{file: runs for file, runs in found.items() if runs}])
