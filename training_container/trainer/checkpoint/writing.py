"""Shard files that are hashed as they are written: nothing is read back for it.

What is hashed is what was to be written, out of memory. So a byte that turned on its way to the disk is found when it
is read, and not promised.
"""

import hashlib
import io
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.blocks import HashedValues, hashed_values
from trainer.checkpoint.disk import Sink
from trainer.checkpoint.manifest import ShardFile


class ShardStream(io.IOBase):
    """A shard file that is written once, from its beginning to its end: one `torch.save` archive after the other."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self._num_bytes = 0
        self._expected = 0, 0
        """Address and bytes of the values that are being saved."""
        self.values: list[HashedValues] = []
        """Where tensors' values lie in the file, in order, with the hashes of their blocks."""

    def append(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Write a tensor that is in host memory; where its archive starts, and its bytes."""
        start = self._num_bytes
        self._expected = tensor.data_ptr(), tensor.nbytes
        torch.save(tensor, self)  # type: ignore[arg-type]  # of a file it needs to be written to alone
        return start, self._num_bytes - start

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """For torch.save alone: a piece of an archive."""
        view = memoryview(data).cast("B")
        # torch.save writes a tensor's values in one piece, out of the tensor's own memory; all else is its wrapping.
        if len(view) > 0 and (_address(view), len(view)) == self._expected:
            self.values.append(hashed_values(view, self._num_bytes, self._whole))
        else:
            self._whole.update(view)
        self._file.write(view)
        self._num_bytes += len(view)
        return len(view)

    def shard_file(self, name: str) -> ShardFile:
        """What the manifest promises of it."""
        return ShardFile(name, self._num_bytes, self._whole.hexdigest())


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
