"""A piece of a flattened tensor, described so that torch.distributed.checkpoint can save it and load into it.

ZeRO cuts the row-major concatenation of all parameters at arbitrary places, while a checkpoint knows n-dimensional
boxes. Any flat range of a tensor is a union of at most 2 x ndim - 1 boxes: ragged ends, and whole slices between.
With that, a ZeRO checkpoint has the same format as an FSDP or single-process one, and each can load the other's.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from trainer.checkpoint.boxes import Box, boxes_of_range


class FlatShard(torch.Tensor):
    """Elements [start, start + local.numel()) of a tensor of `shape`; `local` is a live 1-d view of engine memory.

    Not for arithmetic: it can be detached, cloned and moved (a checkpoint's host copy), saved and loaded.
    """

    local: torch.Tensor
    start: int
    boxes: list[Box]

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], start: int) -> "FlatShard":
        """`local`: 1-d. `start`: its first element's row-major index in the whole tensor."""
        assert local.ndim == 1 and start + local.numel() <= max(1, math.prod(shape))
        shard: FlatShard = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        shard.local = local
        shard.start = start
        shard.boxes = boxes_of_range(tuple(shape), start, start + local.numel())
        return shard

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch has a private keyword here
        return f"FlatShard(shape={tuple(self.shape)}, start={self.start}, num_elements={self.local.numel()})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a placeholder
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copies: to another device or none. Everything else is a mistake and raises."""
        aten = torch.ops.aten
        shard = args[0]
        if func is aten.detach.default:
            return cls(shard.local.detach(), shard.shape, shard.start)
        if func is aten.clone.default:
            return cls(shard.local.clone(), shard.shape, shard.start)
        if func is aten._to_copy.default:
            return cls(func(shard.local, **(kwargs or {})), shard.shape, shard.start)
        if func is aten.copy_.default and isinstance(args[1], FlatShard):
            shard.local.copy_(args[1].local)
            return shard
        raise NotImplementedError(f"FlatShard only travels to and from checkpoints: {func} is not for it")

    @property
    def shard_layout(self) -> Hashable:
        """Equal where the write items below are (trainer.checkpoint plans a shard anew when it isn't)."""
        return self.dtype, tuple(self.shape), self.start, self.local.numel()

    # torch.distributed.checkpoint calls the next three by these names.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self.boxes:
            if torch.Size(box.offsets) == index.offset:
                return self.local.narrow(0, box.flat_start - self.start, box.num_elements).view(box.sizes)
        raise KeyError(f"{index.fqn}: this rank holds no box at {index.offset}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
