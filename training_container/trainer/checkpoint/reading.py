"""What of a checkpoint some tensors need, read from where it lies, believed block by block, and put into the tensors.

Two callers. A job's ranks: `Needs` says which blocks a rank's tensors touch, `ranges_of` what a host's ranks together
read of it, `fill` copies from files on this host that were verified. An export: `StepReader.tensor` reads one tensor.
"""

import hashlib
import math
import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from trainer.checkpoint.blocks import BLOCKS_SUFFIX, BlockTable, parse_blocks, values_in
from trainer.checkpoint.destination import Destination
from trainer.checkpoint.manifest import Manifest, ManifestError, step_folder

INDEX = ".metadata"
LARGEST_RANGE_BYTES = 16 << 20
"""Of one request: S3's own advice is 8 to 16 MB a request."""
_GAP_SHARE = 0.05
"""What may be read without need, so that what lies close together is one request: a share of the bytes needed."""
_PIECE_BYTES = 32 << 20
"""How much is in memory at once on its way into a tensor that can't be read into directly."""

Extents = dict[str, list[tuple[int, int]]]
"""Shard file -> runs of blocks, (first, the one after the last), in order and apart."""


class AlteredError(Exception):
    """Bytes that are not what the manifest promises: one phrase that names the file."""


def altered(name: str) -> AlteredError:
    """The error for a file whose content isn't what was saved."""
    return AlteredError(f"{name} is altered (its SHA-256 is not the manifest's)")


@dataclass(frozen=True)
class Range:
    """Bytes [start, end) of a shard file, with the blocks that lie in them."""

    file: str
    start: int
    end: int
    blocks: tuple[int, ...]


class StepReader:
    """Reads of one committed step at its destination; what it returns was compared with the manifest's hashes."""

    def __init__(self, destination: Destination, manifest: Manifest, retry: Any) -> None:
        """`retry`: see `restore.Retry`."""
        self._destination = destination
        self._retry = retry
        self._folder = step_folder(manifest.step)
        self._files = {file.name: file for file in manifest.files}
        self._tables: dict[str, BlockTable] = {}
        self._index: Metadata | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether every shard has its table: checkpoints of the first trainers have none."""
        shards = [name for name in self._files if name != INDEX and not name.endswith(BLOCKS_SUFFIX)]
        return all(name + BLOCKS_SUFFIX in self._files for name in shards)

    @property
    def index(self) -> Metadata:
        """torch.distributed.checkpoint's: which box of which tensor lies where. AlteredError when it isn't whole."""
        if self._index is None:
            content = self._whole(INDEX)
            try:
                self._index = pickle.loads(content)
            except Exception as error:  # of a class that this torch doesn't know: pickle raises what it likes
                raise AlteredError(f"{INDEX} can't be read ({type(error).__name__}: {error})") from None
        return self._index

    def table(self, shard: str) -> BlockTable:
        """The blocks of a shard file."""
        if shard not in self._tables:
            try:
                self._tables[shard] = parse_blocks(self._whole(shard + BLOCKS_SUFFIX))
            except ManifestError as error:
                raise AlteredError(f"{shard}: {error}") from None
        return self._tables[shard]

    def read(self, wanted: Range) -> bytes:
        """The bytes of a range, its blocks verified. AlteredError, DestinationError, MissingFileError."""
        content = self._read_range(wanted.file, wanted.start, wanted.end - wanted.start)
        if len(content) != wanted.end - wanted.start:
            raise AlteredError(f"{wanted.file} ends at byte {wanted.start + len(content)}, before its tensors do")
        table, view = self.table(wanted.file), memoryview(content)
        for block in wanted.blocks:
            start, end = table.place(block)
            if not table.is_as_promised(block, view[start - wanted.start : end - wanted.start]):
                raise altered(wanted.file)
        return content

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on CPU. Reads its bytes alone; holds it and one range of it."""
        stored = self.index.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        values = torch.empty(stored.size, dtype=stored.properties.dtype)
        for index, info in self.index.storage_data.items():
            if index.fqn != name:
                continue
            sizes = _sizes_of(stored, tuple(index.offset or ()))
            content = torch.empty(sizes, dtype=values.dtype)
            self._read_box(str(info.relative_path), int(info.offset), _as_bytes(content))
            target = values
            for dim, (offset, size) in enumerate(zip(index.offset or (), sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(content)
        return values

    def _read_box(self, file: str, archive_start: int, into: memoryview) -> None:
        table = self.table(file)
        box = table.boxes[archive_start]
        if box.num_bytes != len(into):
            raise altered(file)
        blocks = [(box.first_block, box.first_block + box.num_blocks)]
        for one in ranges_of({file: blocks}, {file: table}):
            into[one.start - box.start : one.end - box.start] = self.read(one)

    def _whole(self, name: str) -> bytes:
        if name not in self._files:
            raise AlteredError(f"{name} is not in the manifest")
        full = f"{self._folder}/{name}"
        content: bytes = self._retry(f"reading {full}", lambda: self._destination.get_bytes(full))
        if hashlib.sha256(content).hexdigest() != self._files[name].sha256:
            raise altered(name)
        return content

    def _read_range(self, name: str, start: int, num_bytes: int) -> bytes:
        full = f"{self._folder}/{name}"
        content: bytes = self._retry(
            f"reading {full}", lambda: self._destination.get_range(full, start=start, num_bytes=num_bytes)
        )
        return content


def mismatch(index: Metadata, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Why a checkpoint doesn't hold these tensors: one phrase, or None."""
    saved = index.state_dict_metadata
    missing = [name for name in tensors if name not in saved]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        return f"it holds no {', '.join(missing[:3])}{more}"
    for name, tensor in tensors.items():
        stored = saved[name]
        if isinstance(stored, TensorStorageMetadata) and stored.size != tensor.shape:
            return f"{name} has shape {list(stored.size)} in it and {list(tensor.shape)} in the job"
    return None


class Needs:
    """The pieces of stored boxes that make up a rank's tensors: torch.distributed.checkpoint's own load plan."""

    def __init__(self, index: Metadata, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors`: as for a save; the checkpoint has to hold them (`mismatch`)."""
        self._index = index
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(tensors), index, is_coordinator=True)
        self._items: list[ReadItem] = self._planner.create_local_plan().items
        self._sizes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name in tensors
            if isinstance(stored := index.state_dict_metadata[name], TensorStorageMetadata)
            for chunk in stored.chunks
        }

    @property
    def files(self) -> set[str]:
        """The shard files that hold them."""
        return {str(self._index.storage_data[item.storage_index].relative_path) for item in self._items}

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return sum(math.prod(item.lengths) * self._item_bytes(item) for item in self._items)

    def blocks(self, reader: StepReader) -> Extents:
        """Which blocks hold the values."""
        touched: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}
        for item in self._items:
            info = self._index.storage_data[item.storage_index]
            file = str(info.relative_path)
            table = reader.table(file)
            box = table.boxes[info.offset]
            if box.num_blocks == 0:
                continue
            starts, length = _runs(self._stored_sizes(item), item.storage_offsets, item.lengths)
            item_bytes = self._item_bytes(item)
            first = starts * item_bytes // box.block_bytes
            last = ((starts + length) * item_bytes - 1) // box.block_bytes
            changes = np.zeros(box.num_blocks + 1, dtype=np.int64)
            np.add.at(changes, first, 1)
            np.add.at(changes, last + 1, -1)
            there = touched.setdefault(file, np.zeros(_num_blocks(table), dtype=np.bool_))
            there[box.first_block : box.first_block + box.num_blocks] |= np.cumsum(changes)[:-1] > 0
        return {file: _extents(there) for file, there in touched.items()}

    def fill(self, folder: Path, reader: StepReader | None) -> None:
        """Copy the values into the tensors from the shard files in `folder`, whose blocks were verified.

        `reader`: knows where they lie in the files; without one the files are looked into, and must be whole.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in self._items:
            by_file.setdefault(str(self._index.storage_data[item.storage_index].relative_path), []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: int(self._index.storage_data[item.storage_index].offset))
            with (folder / name).open("rb") as file:
                for item in items:
                    info = self._index.storage_data[item.storage_index]
                    if reader is not None and reader.has_blocks:
                        start = reader.table(name).boxes[info.offset].start
                    else:
                        start = values_in(file, info.offset, info.length)[0]
                    self._fill_item(item, file.fileno(), start)

    def _fill_item(self, item: ReadItem, descriptor: int, values_start: int) -> None:
        target = self._planner.resolve_tensor(item).detach()
        sizes, item_bytes = self._stored_sizes(item), self._item_bytes(item)
        if math.prod(item.lengths) == 0:
            return
        dtype = self._dtype(item)
        starts, _ = _runs(sizes, item.storage_offsets, item.lengths)
        begin = values_start + int(starts[0]) * item_bytes
        if len(starts) == 1 and target.is_contiguous() and target.dtype == dtype and target.device.type == "cpu":
            _read_into(descriptor, _as_bytes(target), begin)
            return
        if not sizes:
            value = torch.empty((), dtype=dtype)
            _read_into(descriptor, _as_bytes(value), begin)
            target.copy_(value)
            return
        # Whole slices of the first dimension, a few at a time; what other ranks need of them is cut away.
        slice_elements = math.prod(sizes[1:])
        num_at_once = max(1, _PIECE_BYTES // (slice_elements * item_bytes))
        for first in range(0, item.lengths[0], num_at_once):
            count = min(num_at_once, item.lengths[0] - first)
            piece = torch.empty((count, *sizes[1:]), dtype=dtype)
            _read_into(
                descriptor,
                _as_bytes(piece),
                values_start + (item.storage_offsets[0] + first) * slice_elements * item_bytes,
            )
            for dim in range(1, len(sizes)):
                piece = piece.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            target.narrow(0, first, count).copy_(piece)

    def _stored_sizes(self, item: ReadItem) -> tuple[int, ...]:
        return self._sizes[item.storage_index.fqn, tuple(item.storage_index.offset or ())]

    def _dtype(self, item: ReadItem) -> torch.dtype:
        stored = self._index.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        return stored.properties.dtype

    def _item_bytes(self, item: ReadItem) -> int:
        return self._dtype(item).itemsize


def union(extents: Iterable[Extents]) -> Extents:
    """The blocks that any of several needs."""
    by_file: dict[str, list[tuple[int, int]]] = {}
    for one in extents:
        for file, runs in one.items():
            by_file.setdefault(file, []).extend(runs)
    return {file: list(_merged(sorted(runs))) for file, runs in sorted(by_file.items())}


def _merged(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, end = runs[0]
    for start, stop in runs[1:]:
        if start > end:
            yield first, end
            first, end = start, stop
        else:
            end = max(end, stop)
    yield first, end


def ranges_of(extents: Extents, tables: Mapping[str, BlockTable]) -> list[Range]:
    """What to request so that these blocks are there: few requests, and hardly a byte too many.

    Blocks that lie apart become one request where what is between them is little: in all at most a twentieth of the
    bytes needed, the narrowest gaps first.
    """
    places = {
        file: [(block, *tables[file].place(block)) for first, end in runs for block in range(first, end)]
        for file, runs in extents.items()
    }
    budget = _GAP_SHARE * sum(end - start for blocks in places.values() for _, start, end in blocks)
    gaps = sorted(
        (later[1] - earlier[2], file, later[0])
        for file, blocks in places.items()
        for earlier, later in pairwise(blocks)
        if later[1] > earlier[2]
    )
    bridged = set()
    for gap, file, block in gaps:
        budget -= gap
        if budget < 0:
            break
        bridged.add((file, block))
    return [one for file, blocks in places.items() for one in _split(file, blocks, bridged)]


def _split(file: str, blocks: Sequence[tuple[int, int, int]], bridged: Collection[tuple[str, int]]) -> Iterator[Range]:
    """`blocks`: (number, first byte, the one after the last); `bridged`: those read together with the one before."""
    numbers: list[int] = []
    begin = finish = 0
    for block, start, end in blocks:
        apart = start > finish and (file, block) not in bridged
        if numbers and (apart or end - begin > LARGEST_RANGE_BYTES):
            yield Range(file, begin, finish, tuple(numbers))
            numbers = []
        if not numbers:
            begin = start
        numbers.append(block)
        finish = end
    if numbers:
        yield Range(file, begin, finish, tuple(numbers))


def _runs(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """(first element of each contiguous run, elements of a run) of a block of a row-major array of `sizes`."""
    whole = len(sizes)
    while whole > 0 and lengths[whole - 1] == sizes[whole - 1]:
        whole -= 1
    if whole == 0:
        return np.zeros(1, dtype=np.int64), math.prod(sizes)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    starts = np.array([offsets[whole - 1] * strides[whole - 1]], dtype=np.int64)
    for dim in reversed(range(whole - 1)):
        steps = (offsets[dim] + np.arange(lengths[dim], dtype=np.int64)) * strides[dim]
        starts = (steps[:, None] + starts[None, :]).reshape(-1)
    return starts, lengths[whole - 1] * strides[whole - 1]


def _extents(there: np.ndarray[Any, np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


def _num_blocks(table: BlockTable) -> int:
    return max((box.first_block + box.num_blocks for box in table.boxes.values()), default=0)


def _sizes_of(stored: TensorStorageMetadata, offsets: tuple[int, ...]) -> tuple[int, ...]:
    return next(tuple(chunk.sizes) for chunk in stored.chunks if tuple(chunk.offsets) == offsets)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    # A tensor without dimensions has no view as bytes of its own.
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values).cast("B")


def _read_into(descriptor: int, into: memoryview, start: int) -> None:
    """Fill `into` from byte `start` of a file."""
    done = 0
    while done < len(into):
        num_read = os.preadv(descriptor, [into[done:]], start + done)
        if num_read == 0:
            raise OSError(f"a shard file ends at byte {start + done}, before its tensors do")
        done += num_read
