"""Hashes of small blocks beside every shard file, so that a reader believes the bytes it read without reading the rest.

A shard file is torch.distributed.checkpoint's: one `torch.save` archive after the other, each holding the values of one
box of one tensor. `<shard>.blocks` says where in the file each box's values lie and gives the hash of every block of
them. The manifest holds the SHA-256 of the table, and the marker the manifest's: a tree of hashes, the marker its root.
The archives' wrapping is in no block. It is not read either, except by torch itself; the manifest's SHA-256 of the
whole file covers it.

A block's hash is XXH3 of 128 bits. What it is for are accidents: a bit that turned, a block of another file or of none,
a file that was cut. It misses one in 2^128 of them, and takes a twentieth of SHA-256's time, which was two thirds of a
restore's. Who writes to the bucket with intent can write a manifest as well, whatever the hash.
"""

import hashlib
import io
import json
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from trainer.checkpoint.manifest import ManifestError, NewerFormatError

BLOCKS_SUFFIX = ".blocks"
_VERSION = 2
_SMALLEST_BLOCK_BYTES = 64 << 10
_LARGEST_BLOCK_BYTES = 8 << 20
_BLOCKS_A_BOX = 32
"""A reader of a part of a box reads up to two blocks too much: 1/16 of the box at most, where it has that many."""
_HASHED_AT_ONCE_BYTES = _LARGEST_BLOCK_BYTES
"""Each hash lets go of the interpreter and asks for it again, which training beside a save may have to wait for: the
fewer, the better. Pieces that fit a core's cache, for the two hashes in turn, would save 2 % of their time alone."""
_VALUES = "data/0"
"""The record of a `torch.save` archive that holds a tensor's values."""
_LOCAL_HEADER_BYTES = 30
"""Of a zip record, without its name and extra field: section 4.3.7 of PKWARE's APPNOTE.TXT."""


def _sha256(content: memoryview) -> bytes:
    return hashlib.sha256(content).digest()


_HASH_OF_VERSION: Mapping[int, Callable[[memoryview], bytes]] = {1: _sha256, _VERSION: xxhash.xxh3_128_digest}
_DIGEST_BYTES = {1: 32, _VERSION: 16}
"""Of the hash of each version of a table."""

HashedValues = tuple[int, int, int, bytes]
"""Of a box: (start of its values in the file, bytes, bytes of a block, hashes of the blocks in a row)."""


@dataclass(frozen=True)
class StoredBox:
    """Where the values of one box of a tensor lie in a shard file, row-major, without gaps."""

    archive_start: int
    """Of its `torch.save` archive: what DCP's index knows it by."""
    start: int
    """Of its values, bytes from the file's beginning."""
    num_bytes: int
    block_bytes: int
    """Of each of its blocks; the last may be shorter."""
    first_block: int
    """Number of its first block among the file's."""

    @property
    def num_blocks(self) -> int:
        """How many blocks its values have."""
        return -(-self.num_bytes // self.block_bytes)


class BlockTable:
    """The blocks of one shard file, numbered in the order in which they lie there."""

    def __init__(self, boxes: Iterable[tuple[int, int, int, int, bytes]], version: int = _VERSION) -> None:
        """`boxes`: (start of the archive, start of the values, bytes, bytes of a block, hashes in a row).

        `version`: of the table's file, which says by what its blocks were hashed. ManifestError where a box's hashes
        are more or fewer than its blocks.
        """
        self._version, self._hash, digest_bytes = version, _HASH_OF_VERSION[version], _DIGEST_BYTES[version]
        self.boxes: dict[int, StoredBox] = {}
        self._places: list[tuple[int, int]] = []
        self._digests: list[bytes] = []
        self._box_of: list[StoredBox] = []
        for archive_start, start, num_bytes, block_bytes, digests in sorted(boxes):
            box = StoredBox(archive_start, start, num_bytes, block_bytes, len(self._places))
            self.boxes[archive_start] = box
            self._box_of += [box] * box.num_blocks
            starts = range(start, start + num_bytes, block_bytes)
            self._places += zip(starts, [*starts[1:], start + num_bytes], strict=False)  # of no bytes no block
            self._digests += [digests[at : at + digest_bytes] for at in range(0, len(digests), digest_bytes)]
            if len(self._digests) != len(self._places):
                raise ManifestError("a table of blocks doesn't have as many hashes as blocks")

    def place(self, block: int) -> tuple[int, int]:
        """First byte of a block in the file, and the one after its last."""
        return self._places[block]

    def box_of(self, block: int) -> StoredBox:
        """The box that a block is of."""
        return self._box_of[block]

    def digest(self, block: int) -> bytes:
        """The hash of a block."""
        return self._digests[block]

    def is_as_promised(self, block: int, content: memoryview) -> bool:
        """Whether `content` is the block that was saved."""
        return self._hash(content) == self._digests[block]

    def to_bytes(self) -> bytes:
        """The table's file."""
        rows = [
            [
                box.archive_start,
                box.start,
                box.num_bytes,
                box.block_bytes,
                b"".join(self._digests[box.first_block : box.first_block + box.num_blocks]).hex(),
            ]
            for box in self.boxes.values()
        ]
        return (json.dumps({"version": self._version, "boxes": rows}) + "\n").encode()


def parse_blocks(content: bytes) -> BlockTable:
    """The table in `content`; ManifestError where it isn't one, NewerFormatError where it is a newer trainer's."""
    try:
        raw = json.loads(content)
        version = int(raw["version"])
        if version > _VERSION:
            raise NewerFormatError(f"a table of blocks has version {version}, this trainer reads up to {_VERSION}")
        boxes = [(*map(int, numbers), bytes.fromhex(digests)) for *numbers, digests in raw["boxes"]]
        return BlockTable(boxes, version)  # type: ignore[arg-type]  # a row may be too short: ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"a table of blocks can't be read ({type(error).__name__}: {error})") from None


def write_blocks(shard: Path, archives: Sequence[tuple[int, int]], hashed: Sequence[HashedValues] = ()) -> Path:
    """Write the table of a shard file's blocks beside it; its path.

    `archives`: (start, bytes) of each tensor's archive in the file. `hashed`: those whose values were hashed when they
    were written; the others' are now.
    """
    starts = [start for start, *_ in hashed]
    boxes = []
    with shard.open("rb") as file:
        for start, length in archives:
            first = bisect_left(starts, start)
            is_there = first < len(starts) and starts[first] < start + length
            values = hashed[first] if is_there else _hashed(file, *values_in(file, start, length))
            boxes.append((start, *values))
    path = shard.with_name(shard.name + BLOCKS_SUFFIX)
    path.write_bytes(BlockTable(boxes).to_bytes())
    return path


def unhashed_blocks(shard: Path, archives: Sequence[tuple[int, int]]) -> BlockTable:
    """A table that knows where the values of these archives lie, and no hashes: of a file that was hashed whole."""
    boxes = []
    with shard.open("rb") as file:
        for start, length in archives:
            begin, num_bytes = values_in(file, start, length)
            block_bytes = _block_bytes(num_bytes)
            num_blocks = -(-num_bytes // block_bytes)
            boxes.append((start, begin, num_bytes, block_bytes, bytes(_DIGEST_BYTES[_VERSION] * num_blocks)))
    return BlockTable(boxes)


def hashed_values(values: memoryview, start: int, whole: "hashlib._Hash") -> HashedValues:
    """The hashes of a box's values that go to `start` of a file; `whole`: the file's own hash, updated on the way."""
    block_bytes = _block_bytes(len(values))
    digests: list[bytes] = []
    for at in range(0, len(values), _HASHED_AT_ONCE_BYTES):
        piece = values[at : at + _HASHED_AT_ONCE_BYTES]
        whole.update(piece)
        blocks = (piece[begin : begin + block_bytes] for begin in range(0, len(piece), block_bytes))
        digests += map(xxhash.xxh3_128_digest, blocks)
    return start, len(values), block_bytes, b"".join(digests)


def _hashed(file: BinaryIO, start: int, num_bytes: int) -> HashedValues:
    block_bytes = _block_bytes(num_bytes)
    file.seek(start)
    digests = []
    for at in range(0, num_bytes, block_bytes):
        digests.append(xxhash.xxh3_128_digest(file.read(min(block_bytes, num_bytes - at))))
    return start, num_bytes, block_bytes, b"".join(digests)


def _block_bytes(num_bytes: int) -> int:
    """A power of two: so large that there are few hashes, so small that a part of the box costs little more."""
    wanted = max(1, num_bytes // _BLOCKS_A_BOX)
    return min(_LARGEST_BLOCK_BYTES, max(_SMALLEST_BLOCK_BYTES, 1 << (wanted - 1).bit_length()))


def values_in(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """(first byte, bytes) of the tensor's values in the `torch.save` archive at [start, start + length) of `file`."""
    with zipfile.ZipFile(_Window(file, start, length)) as archive:
        (record,) = [one for one in archive.infolist() if one.filename.endswith(_VALUES)]
    file.seek(start + record.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return start + record.header_offset + _LOCAL_HEADER_BYTES + names, record.file_size


class _Window(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        num_read = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += num_read
        return int(num_read)
