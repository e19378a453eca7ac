"""Shard files that are hashed as they are written: nothing is read back for it.

What is hashed is what was to be written, out of memory. So a byte that turned on its way to the disk is found when it
is read, and not promised.
"""

import hashlib
import io
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.blocks import HashedValues, hashed_values
from trainer.checkpoint.disk import Sink
from trainer.checkpoint.manifest import ShardFile

_CENTRAL_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
"""Signatures of sections 4.3.12 and 4.3.9 of PKWARE's APPNOTE.TXT."""
_CRC_IN_ENTRY, _NAME_IN_ENTRY, _CRC_IN_DESCRIPTOR = 16, 46, 4
_VALUES = b"archive/data/0"
"""The record of a tensor's values."""
_CRC_BYTES = 4


@dataclass(frozen=True)
class _Wrapping:
    """What `torch.save` puts around a tensor's values: the same for every tensor of one shape and type.

    It makes 40 small writes of it, each of which takes the interpreter from the training beside it. So it is asked
    once. (The archive's serialization id, which nothing reads, stays the first one's.)
    """

    head: bytes
    tail: bytes
    crc_places: tuple[int, ...]
    """In the tail, of the values' CRC32."""

    def tail_of(self, crc: int) -> bytes:
        """The tail behind values that have this CRC32."""
        tail = bytearray(self.tail)
        for place in self.crc_places:
            tail[place : place + _CRC_BYTES] = crc.to_bytes(_CRC_BYTES, "little")
        return bytes(tail)


class _Recorder(io.IOBase):
    """Takes a `torch.save` archive of one tensor, all but the values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor.data_ptr(), tensor.nbytes
        self.head, self.tail = bytearray(), bytearray()
        self._has_values = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """A piece of the archive; the values come in one piece, out of the tensor's own memory."""
        view = memoryview(data).cast("B")
        if len(view) > 0 and (_address(view), len(view)) == self._values:
            self._has_values = True
        else:
            part = self.tail if self._has_values else self.head
            part += view
        return len(view)


def _wrapping(tensor: torch.Tensor) -> _Wrapping:
    recorder = _Recorder(tensor)
    torch.save(tensor, recorder)  # type: ignore[arg-type]  # of a file it needs to be written to alone
    tail = bytes(recorder.tail)
    if not tensor.nbytes:
        return _Wrapping(bytes(recorder.head), tail, ())
    entry = tail.rindex(_VALUES) - _NAME_IN_ENTRY
    is_known = tail.startswith(_DESCRIPTOR) and tail.startswith(_CENTRAL_ENTRY, entry)
    assert is_known, "torch.save writes its archives in another way than this was made for"
    return _Wrapping(bytes(recorder.head), tail, (_CRC_IN_DESCRIPTOR, entry + _CRC_IN_ENTRY))


class ArchiveWrappings:
    """Those that were asked for so far."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, torch.Size], _Wrapping] = {}

    def of(self, tensor: torch.Tensor) -> _Wrapping:
        """`tensor`: in host memory, contiguous, all of its storage."""
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        key = tensor.dtype, tensor.shape
        if key not in self._known:
            self._known[key] = _wrapping(tensor)
        return self._known[key]


class ShardStream:
    """A shard file that is written once, from its beginning to its end: one `torch.save` archive after the other."""

    def __init__(self, file: Sink, wrappings: ArchiveWrappings) -> None:
        self._file, self._wrappings = file, wrappings
        self._whole = hashlib.sha256()
        self._num_bytes = 0
        self.values: list[HashedValues] = []
        """Where tensors' values lie in the file, in order, with the hashes of their blocks."""

    def append(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Write a tensor that is in host memory, contiguous; where its archive starts, and its bytes."""
        start = self._num_bytes
        wrapping = self._wrappings.of(tensor)
        self._wrap(wrapping.head)
        crc = 0
        if tensor.nbytes:
            values: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
            self.values.append(hashed_values(values, self._num_bytes, self._whole))
            crc = zlib.crc32(values)
            self._put(values)
        self._wrap(wrapping.tail_of(crc))
        return start, self._num_bytes - start

    def _wrap(self, content: bytes) -> None:
        self._whole.update(content)
        self._put(memoryview(content))

    def _put(self, view: memoryview) -> None:
        self._file.write(view)
        self._num_bytes += len(view)

    def shard_file(self, name: str) -> ShardFile:
        """What the manifest promises of it."""
        return ShardFile(name, self._num_bytes, self._whole.hexdigest())


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
