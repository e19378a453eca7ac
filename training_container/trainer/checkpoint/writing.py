"""Shard files that are hashed as they are written: nothing is read back for it.

What is hashed is what was to be written, out of memory. So a byte that turned on its way to the disk is found when it
is read, and not promised.
"""

import hashlib
import io
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from trainer.checkpoint.blocks import HashedValues, hashed_values
from trainer.checkpoint.manifest import ShardFile


class HashedStream(io.IOBase):
    """A binary file that is written once, from its beginning to its end."""

    def __init__(self, stream: io.IOBase, num_bytes_at: dict[int, int]) -> None:
        """`num_bytes_at`: address in memory -> bytes of the tensors whose values will be among what is written."""
        self._stream: Any = stream
        self._num_bytes_at, self._lengths = num_bytes_at, set(num_bytes_at.values())
        self._whole = hashlib.sha256()
        self._num_bytes = 0
        self.values: list[HashedValues] = []
        """Where tensors' values lie in the file, in order, with the hashes of their blocks."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """As any file's."""
        view = memoryview(data).cast("B")
        # torch.save writes a tensor's values in one piece, out of the tensor's own memory; all else is its wrapping.
        if len(view) in self._lengths and self._num_bytes_at.get(_address(view)) == len(view):
            self.values.append(hashed_values(view, self._num_bytes, self._whole))
        else:
            self._whole.update(view)
        self._stream.write(view)
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def shard_file(self, name: str) -> ShardFile:
        """What the manifest promises of it."""
        return ShardFile(name, self._num_bytes, self._whole.hexdigest())


class HashedFiles(FileSystem):
    """torch.distributed.checkpoint's file system, with streams that hash."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """`tensors`: in host memory, those that will be written."""
        super().__init__()
        self._num_bytes_at = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.nbytes}
        self.written: dict[str, HashedStream] = {}
        """File name -> what was written there."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A file to write."""
        with super().create_stream(path, mode) as stream:
            hashed = self.written[Path(path).name] = HashedStream(stream, self._num_bytes_at)
            yield hashed


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
