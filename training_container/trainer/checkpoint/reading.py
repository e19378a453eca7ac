"""What a checkpoint's files hold, read from where they lie: each byte once, believed when it was hashed, and placed.

`StepReader` knows one committed step; `Transfer` moves ranges of its shard files, several at a time. A range goes
straight into the memory of the tensors where their bytes lie in a row there, and through a buffer otherwise: columns,
other types, other devices. While one range is hashed others are read.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from trainer.checkpoint.base_model import FROZEN
from trainer.checkpoint.blocks import BLOCKS_SUFFIX, BlockTable, parse_blocks, unhashed_blocks
from trainer.checkpoint.destination import Destination
from trainer.checkpoint.disk import read_at
from trainer.checkpoint.group import cores_a_rank
from trainer.checkpoint.head_start import HeadStart
from trainer.checkpoint.index import INDEX, parse_index
from trainer.checkpoint.manifest import Manifest, ManifestError, NewerFormatError, step_folder
from trainer.checkpoint.needs import Needs, Placements
from trainer.checkpoint.ranges import Range, Tables, ranges_of
from trainer.heartbeat import beat

_NUM_READERS = 8
"""Requests at once of a rank: one connection to S3 gives some 100 MB/s, and one core copies and hashes some 3 GB/s."""
_NUM_BEFORE_BEGUN = 3
"""Ranges that are asked for before those that are being read already."""
_ALIGNMENT = 64
"""Of values in a buffer: any type can be looked at there."""

Read = Callable[[str, int, Sequence[memoryview]], int]
"""(file, first byte, memory to fill, one after the other) -> bytes read: fewer only where the file ends."""


class AlteredError(Exception):
    """Bytes that are not what the manifest promises: one phrase that names the file."""


def altered(name: str) -> AlteredError:
    """The error for a file whose content isn't what was saved."""
    return AlteredError(f"{name} is altered (its SHA-256 is not the manifest's)")


class _Part(NamedTuple):
    """One block on its way."""

    number: int
    memory: memoryview
    bounced: torch.Tensor | None
    """The buffer that it is in, where that isn't the tensor's own memory."""


class Transfer:
    """Brings ranges of shard files to memory, hashes them there and puts them where they are wanted."""

    def __init__(
        self,
        read: Read,
        tables: Tables,
        *,
        verifies: bool,
        placements: Placements | None = None,
        devices: Collection[torch.device] = (),
        keep_in: Path | None = None,
        of_disk: bool = False,
    ) -> None:
        """`verifies`: AlteredError where a block isn't as promised. `placements`: None: the values go nowhere.

        `keep_in`: a folder whose files get the ranges too. `of_disk`: more readers than cores can't make it faster.
        """
        self._num_readers = min(_NUM_READERS, 2 * cores_a_rank()) if of_disk else _NUM_READERS
        self._read, self._tables, self._verifies = read, tables, verifies
        self._placements: Placements = placements or {}
        self._keep_in = keep_in
        self._gpu = next((device for device in devices if device.type == "cuda"), None)
        self._own = threading.local()
        self._failed = threading.Event()

    def run(self, ranges: Sequence[Range]) -> None:
        """Returns when all are where they belong. AlteredError, OSError, and what `read` raises."""
        if not ranges:
            return
        with ThreadPoolExecutor(min(self._num_readers, len(ranges)), initializer=self._begin_thread) as pool:
            for brought in as_completed([pool.submit(self._bring, one) for one in ranges]):
                brought.result()
                beat()  # a read may take longer than a rank may be silent

    def _begin_thread(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # page-locked memory would occupy the first GPU otherwise

    def _bring(self, one: Range) -> None:
        if self._failed.is_set():
            return
        try:
            self._bring_whole(one)
        except BaseException:
            self._failed.set()  # the rest isn't worth its time
            raise

    def _bring_whole(self, one: Range) -> None:
        table = self._tables(one.file)
        parts, memory = self._laid_out(one, table)
        num_read = self._read(one.file, one.start, memory)
        if num_read != one.end - one.start:
            raise AlteredError(f"{one.file} ends at byte {one.start + num_read}, before its tensors do")
        if self._verifies and not all(table.is_as_promised(part.number, part.memory) for part in parts):
            raise AlteredError(f"{one.file} is altered (a block's hash is not the one that was saved)")
        if self._keep_in is not None:
            _write_at(self._keep_in / one.file, one.start, memory)
        placements = self._placements.get(one.file, {})
        for part in parts:
            if part.bounced is not None:
                box = table.box_of(part.number)
                for placement in placements.get(box.archive_start, ()):
                    placement.put(table.place(part.number)[0] - box.start, part.bounced)

    def _laid_out(self, one: Range, table: BlockTable) -> tuple[list[_Part], list[memoryview]]:
        """Where each block goes, and the memory for all of the range's bytes in a row."""
        placements = self._placements.get(one.file, {})
        buffer = self._buffer(one.end - one.start + _ALIGNMENT * len(one.blocks))
        parts: list[_Part] = []
        memory: list[memoryview] = []
        at, used = one.start, 0
        for row in _rows(one.blocks, table):
            start, end = table.place(row[0])[0], table.place(row[-1])[1]
            if start > at:  # nobody wants it
                memory.append(_bytes_of(buffer[used : used + start - at]))
                used += start - at
            at = end
            box = table.box_of(row[0])
            placed = placements.get(box.archive_start, ())
            straight = placed[0].memory(start - box.start, end - box.start) if len(placed) == 1 else None
            if straight is not None:
                memory.append(straight)
                parts += [
                    _Part(block, straight[place * box.block_bytes : (place + 1) * box.block_bytes], None)
                    for place, block in enumerate(row)
                ]
                continue
            for block in row:
                start, end = table.place(block)
                used = -(-used // _ALIGNMENT) * _ALIGNMENT
                bounced = buffer[used : used + end - start]
                parts.append(_Part(block, _bytes_of(bounced), bounced))
                memory.append(parts[-1].memory)
                used += end - start
        return parts, memory

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """This thread's own; what of it is never written to occupies no memory."""
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._gpu is not None)
            self._own.buffer = buffer
        return buffer


class StepReader:
    """Reads of one committed step at its destination; what it gives was compared with the manifest's hashes."""

    def __init__(self, destination: Destination, manifest: Manifest, retry: Any) -> None:
        """`retry`: see `restore.Retry`."""
        self._destination = destination
        self._retry = retry
        self.world_size = manifest.world_size
        self._folder = step_folder(manifest.step)
        self._files = {file.name: file for file in manifest.files}
        self._tables: dict[str, BlockTable] = {}
        self._kept_tables: dict[str, bytes] = {}
        """Not parsed yet."""
        self._index: Metadata | None = None
        self._begun: tuple[str, HeadStart] | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether every shard has its table: checkpoints of the first trainers have none."""
        shards = [name for name in self._files if name != INDEX and not name.endswith(BLOCKS_SUFFIX)]
        return all(name + BLOCKS_SUFFIX in self._files for name in shards)

    @property
    def knows_index(self) -> bool:
        """Whether `index` is at hand already."""
        return self._index is not None

    @property
    def index(self) -> Metadata:
        """torch.distributed.checkpoint's: which box of which tensor lies where. AlteredError when it isn't whole."""
        if self._index is None:
            try:
                self._index = parse_index(self._whole(INDEX))
            except ManifestError as error:
                raise AlteredError(str(error)) from None
        return self._index

    def num_bytes(self, shard: str) -> int:
        """Of a shard file; 0 where the manifest has none of that name."""
        return self._files[shard].num_bytes if shard in self._files else 0

    def table(self, shard: str) -> BlockTable:
        """The blocks of a shard file. AlteredError; InputError where a newer trainer wrote them."""
        if shard not in self._tables:
            try:
                self._tables[shard] = parse_blocks(self._unparsed(shard))
            except NewerFormatError as error:
                raise error.refusal(f"{self._destination.uri}/{self._folder}") from None
            except ManifestError as error:
                raise AlteredError(f"{shard}: {error}") from None
        return self._tables[shard]

    def read_into(self, shard: str, start: int, memory: Sequence[memoryview]) -> int:
        """See `Read`. DestinationError, MissingFileError."""
        full = f"{self._folder}/{shard}"
        num_read: int = self._retry(
            f"reading {full}", lambda: self._destination.read_into(full, start=start, memory=memory)
        )
        return num_read

    def read_once_into(self, shard: str, start: int, memory: Sequence[memoryview]) -> int:
        """`read_into`, of bytes that nobody else on this host will want. DestinationError, MissingFileError."""
        full = f"{self._folder}/{shard}"

        def read(at: int, left: Sequence[memoryview]) -> int:
            num_read: int = self._retry(
                f"reading {full}", lambda: self._destination.read_once_into(full, start=at, memory=left)
            )
            return num_read

        begun, head = self._begun or ("", None)
        return read(start, memory) if head is None or begun != shard else head.read(start, memory, read)

    def begin(self, shard: str) -> None:
        """Reads of its first bytes begin, for `read_once_into` to have them; where it lies on this host, else nothing.

        `end_begun` gives their memory back. AlteredError, DestinationError of its table.
        """
        folder = self._destination.folder(self._folder)
        if folder is not None and self._begun is None:
            # Small, and soon wanted: it would wait for all that was asked for before it. Parsed it can be meanwhile.
            self._kept_tables[shard] = self._unparsed(shard)
            with contextlib.suppress(OSError, RuntimeError):  # no memory, no thread: then the plan is waited for
                self._begun = shard, HeadStart(folder / shard, self._files[shard].num_bytes)

    def in_turn(self, ranges: Sequence[Range]) -> list[Range]:
        """The ranges whose bytes `begin` reads behind some others: while they are copied, the disk has what to read."""
        if self._begun is None:
            return list(ranges)
        shard, head = self._begun
        begun = [one for one in ranges if one.file == shard and one.start < head.most_bytes]
        others = [one for one in ranges if one.file != shard or one.start >= head.most_bytes]
        return others[:_NUM_BEFORE_BEGUN] + begun + others[_NUM_BEFORE_BEGUN:]

    def end_begun(self) -> None:
        """What `begin` read isn't wanted any more."""
        if self._begun is not None:
            self._begun[1].wait()
            self._begun = None

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on CPU. Reads its bytes alone. AlteredError, DestinationError, MissingFileError."""
        stored = self.index.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        values = torch.empty(stored.size, dtype=stored.properties.dtype)
        needs = Needs(self.index, {name: values})
        transfer = Transfer(self.read_into, self.table, verifies=True, placements=needs.placements)
        transfer.run(ranges_of(needs.blocks(self.table), self.table))
        return values

    def _unparsed(self, shard: str) -> bytes:
        return self._kept_tables.pop(shard, None) or self._whole(shard + BLOCKS_SUFFIX)

    def _whole(self, name: str) -> bytes:
        if name not in self._files:
            raise AlteredError(f"{name} is not in the manifest")
        full = f"{self._folder}/{name}"
        content: bytes = self._retry(f"reading {full}", lambda: self._destination.get_bytes(full))
        if hashlib.sha256(content).hexdigest() != self._files[name].sha256:
            raise altered(name)
        return content


class FolderReader:
    """Reads of files on this host that were verified whole: whatever tables they have."""

    def __init__(self, folder: Path, manifest: Manifest, needs: Needs) -> None:
        self._folder, self._needs = folder, needs
        self._names = {file.name for file in manifest.files}
        """What was verified: whatever else lies there is nobody's word."""
        self._tables: dict[str, BlockTable] = {}

    def table(self, shard: str) -> BlockTable:
        """Where in a shard file boxes lie; their hashes may be missing. AlteredError, OSError; InputError where a
        newer trainer wrote it."""
        if shard not in self._names:
            raise AlteredError(f"{shard} is not in the manifest")
        if shard not in self._tables:
            name = shard + BLOCKS_SUFFIX
            try:
                self._tables[shard] = (
                    parse_blocks((self._folder / name).read_bytes())
                    if name in self._names
                    else unhashed_blocks(self._folder / shard, self._needs.archives(shard))
                )
            except NewerFormatError as error:
                raise error.refusal(str(self._folder)) from None
            except ManifestError as error:
                raise AlteredError(f"{shard}: {error}") from None
        return self._tables[shard]

    def fill(self) -> None:
        """Copy all that is needed into its tensors. OSError, AlteredError, InputError."""
        extents = self._needs.blocks(self.table)
        fill_from(self._folder, ranges_of(extents, self.table, of_disk=True), self.table, self._needs)


def fill_from(folder: Path, ranges: Sequence[Range], tables: Tables, needs: Needs) -> None:
    """Copy ranges of verified files into the tensors that need them. OSError, AlteredError where a file ends early."""

    def read(file: str, start: int, memory: Sequence[memoryview]) -> int:
        with (folder / file).open("rb", buffering=0) as opened:
            return read_at(opened.fileno(), start, memory)

    Transfer(read, tables, verifies=False, placements=needs.placements, devices=needs.devices, of_disk=True).run(ranges)


_MODEL, _OPTIMIZER = "model.", "optim."
_MOMENTUM = "momentum_buffer"
"""Muon's of a matrix, and SGD's of every parameter."""
_OTHER_MODEL = "the job's model is not the one that was saved"
_OTHER_OPTIMIZER = (
    "the job's training.optimizer (kind, momentum, average_decay) is not the one that it was saved with: restore it, or"
    " train on from its export as model.source, with another checkpoint.destination"
)
_OTHER_MATRICES = (
    "an earlier trainer's Muon took these for matrices, which they are not: go on with that trainer's image, or train"
    " on from its export as model.source, with another checkpoint.destination"
)


def without_unsaved(index: Metadata, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The tensors but for frozen ones, where the checkpoint is of a trainer that saved none: they stay as they are."""
    if any(name.startswith(FROZEN) for name in index.state_dict_metadata):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(FROZEN)}


def mismatch(index: Metadata, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Why a checkpoint doesn't hold these tensors, and what of the job is another: one line, or None."""
    saved = index.state_dict_metadata
    missing = [name for name in tensors if name not in saved]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        # Weights are told of first: another model's optimizer keeps other averages too.
        is_optimizer = all(name.startswith(_OPTIMIZER) for name in missing)
        cause = _other_optimizer(saved, tensors, missing) if is_optimizer else _OTHER_MODEL
        return f"it holds no {', '.join(missing[:3])}{more}; {cause}"
    for name, tensor in tensors.items():
        stored = saved[name]
        if isinstance(stored, TensorStorageMetadata) and stored.size != tensor.shape:
            shapes = f"{list(stored.size)} in it and {list(tensor.shape)} in the job"
            return f"{name} has shape {shapes}; {_OTHER_MODEL}"
    return None


def weights_asked_for(index: Metadata, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Which of the weights that were trained these tensors are, a bit each: for `left_weights`."""
    return np.packbits(np.array([name in tensors for name in _trained_weights(index)], dtype=bool)).tobytes()


def left_weights(index: Metadata, asked: Iterable[bytes]) -> str | None:
    """Why a checkpoint is of more than all ranks' tensors are (`weights_asked_for`): one line, or None.

    Half of a larger model would train on as if it were a model. Of what has no averages nothing is said: buffers, which
    one version of a model's code keeps and another makes anew; nor, therefore, of what SGD trained without momentum.
    """
    weights = _trained_weights(index)
    bits = np.bitwise_or.reduce([np.frombuffer(one, dtype=np.uint8) for one in asked])
    is_asked = np.unpackbits(bits, count=len(weights))
    left = [name for name, flag in zip(weights, is_asked, strict=True) if not flag]
    if not left:
        return None
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return f"it holds {', '.join(left[:3])}{more}, which the job doesn't train; {_OTHER_MODEL}"


def moment_kinds(names: Iterable[str]) -> frozenset[str]:
    """What an optimizer keeps of any weight ("exp_avg", "average"), by the names of a rank's tensors."""
    return frozenset(name.rpartition(".")[2] for name in names if name.startswith(_OPTIMIZER))


def left_moments(index: Metadata, kept: Iterable[frozenset[str]]) -> str | None:
    """What a checkpoint has of its optimizer that no rank keeps (`moment_kinds` of each): one line, or None.

    Not refused: who turns a running average off means to be rid of it.
    """
    saved = {
        name: stored
        for name, stored in index.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and len(stored.size)  # not counts of steps
    }
    left = sorted(moment_kinds(saved).difference(*kept))
    if not left:
        return None
    return (
        f"it holds {', '.join(left)} of its weights, which the job's training.optimizer (kind, momentum, average_decay)"
        " doesn't keep: what is saved from now on has none of it"
    )


def _trained_weights(index: Metadata) -> list[str]:
    """Names of weights that the checkpoint has the optimizer's averages of."""
    saved = index.state_dict_metadata
    owners = {name.removeprefix(_OPTIMIZER).rpartition(".")[0] for name in saved if name.startswith(_OPTIMIZER)}
    return sorted(name for name in saved if name.startswith(_MODEL) and name.removeprefix(_MODEL) in owners)


def _other_optimizer(saved: Mapping[str, Any], wanted: Iterable[str], missing: Iterable[str]) -> str:
    """Why averages are missing. Muon's earlier checkpoints have a matrix's momentum for state-space rates, norms of
    heads and packed biases, of which it keeps AdamW's averages now; SGD's have momentum alone."""
    owners = [name.rpartition(".") for name in missing]
    took_others = all(own in ("exp_avg", "exp_avg_sq") and f"{owner}.{_MOMENTUM}" in saved for owner, _, own in owners)
    were_both = any(name.endswith(".exp_avg") for name in saved)
    is_muon = any(name.endswith(f".{_MOMENTUM}") for name in wanted)
    return _OTHER_MATRICES if took_others and were_both and is_muon else _OTHER_OPTIMIZER


def _rows(blocks: Sequence[int], table: BlockTable) -> Iterator[Sequence[int]]:
    """Blocks of one box that follow on each other."""
    begin = 0
    while begin < len(blocks):
        box = table.box_of(blocks[begin])
        end, stop = begin + 1, box.first_block + box.num_blocks
        while end < len(blocks) and blocks[end] == blocks[end - 1] + 1 < stop:
            end += 1
        yield blocks[begin:end]
        begin = end


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    values: Any = buffer.numpy()
    return memoryview(values)


def _write_at(path: Path, start: int, memory: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        left, at = [view for view in memory if view], start
        while left:
            written = os.pwrite(descriptor, left[0], at)
            at += written
            left[:1] = [rest] if (rest := left[0][written:]) else []
    finally:
        os.close(descriptor)
