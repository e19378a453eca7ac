"""Samples out of WebDataset shards: tar files whose members `KEY.EXTENSION`, one after the other, make up a sample.

`ShardIndex.open(source, cache_dir)` knows where every member of every shard lies, so that any sample is read at
random, without unpacking: `read_sample(number)` gives `{extension: bytes}`. Numbers run over the shards in the order of
their names and, inside a shard, in the order of the tar: one global index, so that a stream over it can be resumed at
any number of ranks. The index is made once per host, from the tar headers alone, and kept in `cache_dir`.
"""

import hashlib
import json
import os
import shutil
import tarfile
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from trainer.data.files import DataFile, LocalFile
from trainer.data.readers import files_of
from trainer.data.s3_files import PartCache, S3File
from trainer.data.shared_work import AtWork, exclusive
from trainyard.errors import InputError
from trainyard.spec.job import DataSource

_FORMAT_VERSION = 2
"""Also of what is refused: an index that was made before the tar's end was looked at is made again."""
_MAX_OPEN_SHARDS = 64
_MEMBERS_AT_ONCE = 1000
"""Whose headers are read between two signs of life."""
_MOST_EXTENSIONS = 1 << 16
_MEMBER = np.dtype([("offset", "<i8"), ("size", "<i8"), ("extension", "<u2")])


class ShardIndex:
    """Where every sample of a source lies. Reading is safe from several threads; a fork may use its parent's."""

    def __init__(self, shards: Sequence[DataFile], folder: Path, parts: PartCache | None = None) -> None:
        """`folder`: an index that `open` has written for these shards; `parts`: reads those that lie in S3."""
        meta = json.loads((folder / "meta.json").read_text())
        self._shards = shards
        self._parts = parts
        self._extensions: list[str] = meta["extensions"]
        self.digest: str = meta["digest"]
        """Of all keys, extensions and sizes, in order: a changed picture of the same size goes unnoticed."""
        self._members = np.load(folder / "members.npy", mmap_mode="r")
        self._first_member = np.load(folder / "first_member.npy", mmap_mode="r")
        self._first_sample = np.load(folder / "first_sample.npy", mmap_mode="r")
        self._keys = np.load(folder / "keys.npy", mmap_mode="r")
        self._key_ends = np.load(folder / "key_ends.npy", mmap_mode="r")
        self._files: OrderedDict[int, _OpenShard] = OrderedDict()
        self._lock = Lock()

    @classmethod
    def open(cls, source: DataSource, cache_dir: Path, *, parts: PartCache | None = None) -> Self:
        """The index of a source's shards, made now unless `cache_dir` holds it; InputError names a broken shard.

        Processes of one host may call this at once: one builds, the others wait. With `parts`, shards in S3 are read
        where they lie: from front to back once for the index, then sample by sample.
        """
        shards = files_of(source, streaming=parts is not None)
        facts = [(shard.where, shard.size, shard.version) for shard in shards]
        key = hashlib.sha256(json.dumps([_FORMAT_VERSION, facts]).encode()).hexdigest()[:24]
        folder = cache_dir / f"webdataset-{key}"
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with exclusive(cache_dir / f"webdataset-{key}.lock") as at_work:
                assert at_work is not None
                if not (folder / "meta.json").exists():
                    _build(shards, folder, at_work)
        except OSError as error:
            raise InputError(
                f"index of {source.path} in {cache_dir}: can't be written: {error.strerror or error}; free space or "
                "give another folder"
            ) from None
        return cls(shards, folder, parts)

    def __len__(self) -> int:
        """Samples."""
        return len(self._first_member) - 1

    @property
    def extensions(self) -> list[str]:
        """Every extension that some sample has, without the dot, in lower case."""
        return list(self._extensions)

    def key(self, number: int) -> str:
        """The sample's key: its members' path in the tar without extension."""
        begin = int(self._key_ends[number - 1]) if number else 0
        return bytes(self._keys[begin : int(self._key_ends[number])]).decode("utf-8", "replace")

    def place(self, number: int) -> str:
        """Where the sample is, for a message: `SHARD: KEY`."""
        return f"{self._shards[self._shard_of(number)].where}: {self.key(number)}"

    def read_sample(self, number: int) -> dict[str, bytes]:
        """The sample's members by extension (lower case, without the dot, e.g. `jpg`, `cls`, `seg.png`).

        InputError if the shard can't be read or is shorter than when it was indexed.
        """
        shard = self._shard_of(number)
        sample = {}
        for member in self._members[int(self._first_member[number]) : int(self._first_member[number + 1])]:
            content = self._read(shard, int(member["offset"]), int(member["size"]))
            sample[self._extensions[int(member["extension"])]] = content
        return sample

    def will_read(self, number: int) -> None:
        """Fetches a sample in the background, where its shard lies in S3."""
        shard = self._shards[self._shard_of(number)]
        if self._parts is not None and isinstance(shard, S3File):
            first, last = int(self._first_member[number]), int(self._first_member[number + 1]) - 1
            begin = int(self._members[first]["offset"])
            end = int(self._members[last]["offset"]) + int(self._members[last]["size"])
            self._parts.will_read(shard, begin, end - begin)

    def close(self) -> None:
        """Closes the shards; the next read opens them again."""
        with self._lock:
            self._files.clear()

    def _shard_of(self, number: int) -> int:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return int(np.searchsorted(self._first_sample, number, side="right")) - 1

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        file = self._shards[shard]
        if isinstance(file, S3File):
            assert self._parts is not None
            return self._parts.read(file, offset, size) if size else b""
        try:
            # Threads read at once: pread has no position, and who holds the file keeps it open.
            opened = self._opened(shard)
            content = os.pread(opened.descriptor, size, offset)
        except OSError as error:
            raise InputError(f"{self._shards[shard].where}: can't be read: {error.strerror or error}") from None
        if len(content) != size:
            raise InputError(
                f"{self._shards[shard].where}: ends before byte {offset + size}: it changed since it was indexed"
            )
        return content

    def _opened(self, shard: int) -> "_OpenShard":
        with self._lock:
            opened = self._files.pop(shard, None)
            if opened is None:
                file = self._shards[shard]
                assert isinstance(file, LocalFile)
                opened = _OpenShard(file.path)
                if len(self._files) >= _MAX_OPEN_SHARDS:
                    self._files.popitem(last=False)
            self._files[shard] = opened
            return opened


class _OpenShard:
    """A file that closes when nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@dataclass
class _Columns:
    """The index while it is made: plain arrays, since a data set may have millions of samples."""

    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    extensions: "array[int]" = field(default_factory=lambda: array("H"))
    first_member: "array[int]" = field(default_factory=lambda: array("q"))
    first_sample: "array[int]" = field(default_factory=lambda: array("q"))
    keys: bytearray = field(default_factory=bytearray)
    key_ends: "array[int]" = field(default_factory=lambda: array("q"))
    extension_numbers: dict[str, int] = field(default_factory=dict)


def _build(shards: Sequence[DataFile], folder: Path, at_work: AtWork) -> None:
    columns = _Columns()
    digest = hashlib.sha256()
    for shard in shards:
        columns.first_sample.append(len(columns.key_ends))
        _index_shard(shard, columns, digest, at_work)
        at_work()
    columns.first_member.append(len(columns.offsets))
    if not columns.key_ends:
        raise InputError(f"{shards[0].where}: holds no sample; a shard's members are named KEY.EXTENSION")
    members = np.empty(len(columns.offsets), dtype=_MEMBER)
    members["offset"] = columns.offsets
    members["size"] = columns.sizes
    members["extension"] = columns.extensions
    arrays: dict[str, npt.NDArray[Any]] = {
        "members": members,
        "first_member": np.asarray(columns.first_member, dtype="<i8"),
        "first_sample": np.asarray(columns.first_sample, dtype="<i8"),
        "keys": np.frombuffer(bytes(columns.keys), dtype=np.uint8),
        "key_ends": np.asarray(columns.key_ends, dtype="<i8"),
    }
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir()
    for name, values in arrays.items():
        np.save(partial / f"{name}.npy", values)
    meta = {"extensions": list(columns.extension_numbers), "digest": digest.hexdigest()}
    (partial / "meta.json").write_text(json.dumps(meta))
    partial.rename(folder)


def _index_shard(shard: DataFile, columns: _Columns, digest: Any, at_work: AtWork) -> None:
    """Appends the shard's samples. Members of one sample lie side by side, as every writer of shards puts them."""
    last_key: str | None = None
    present: set[str] = set()
    for key, extension, member in _members(shard):
        if key != last_key:
            columns.first_member.append(len(columns.offsets))
            columns.keys += key.encode("utf-8", "replace")
            columns.key_ends.append(len(columns.keys))
            last_key, present = key, set()
        if extension in present:
            raise InputError(f"{shard.where}: {key}: has two members .{extension}; a sample has one of each extension")
        present.add(extension)
        if len(columns.extension_numbers) >= _MOST_EXTENSIONS and extension not in columns.extension_numbers:
            raise InputError(
                f"{shard.where}: {key}: has .{extension}, and {_MOST_EXTENSIONS} other extensions come before: a key"
                " ends at a name's first dot, so name samples without others (img_0001.jpg)"
            )
        columns.offsets.append(member.offset_data)
        columns.sizes.append(member.size)
        columns.extensions.append(columns.extension_numbers.setdefault(extension, len(columns.extension_numbers)))
        digest.update(json.dumps([key, extension, member.size]).encode())
        if len(columns.offsets) % _MEMBERS_AT_ONCE == 0:
            at_work()


def _check_end(shard: DataFile, file: BinaryIO, offset: int) -> None:
    """InputError unless an empty block at `offset`, after the last member, closes the tar.

    tarfile takes whatever is no header for the end, so that a shard cut off or damaged there would be a shorter one.
    """
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if not block and offset == shard.size:
        raise InputError(
            f"{shard.where}: has no end of a tar at byte {offset}, where its last member ends: it is cut off there, or"
            f" its writer left out the end: copy it again, or append {2 * tarfile.BLOCKSIZE} zero bytes"
        )
    if len(block) < tarfile.BLOCKSIZE or any(block):
        raise InputError(
            f"{shard.where}: has no member and no end of a tar at byte {offset} of {shard.size}: it is cut off or"
            " damaged there: copy it again"
        )


def _members(shard: DataFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """(key, extension, header) of each file in the tar. Reads headers alone: what lies between is skipped."""
    try:
        with shard.open() as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isreg() or member.issparse():
                    continue
                if member.offset_data + member.size > shard.size:
                    raise InputError(f"{shard.where}: is cut off inside {member.name}: copy it again")
                folder, slash, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if not stem or not dot or (name.startswith("__") and name.endswith("__")):
                    continue  # no KEY.EXTENSION: a tool's own notes
                yield folder + slash + stem, extension.lower(), member
            _check_end(shard, file, tar.offset)
    except tarfile.TarError as error:
        packed = shard.where.endswith((".gz", ".tgz", ".zst", ".bz2"))
        hint = "samples are read at random, so shards must not be compressed: unpack it once" if packed else str(error)
        raise InputError(f"{shard.where}: is not a plain tar file ({hint})") from None
    except OSError as error:
        raise InputError(f"{shard.where}: can't be read: {error.strerror or error}") from None
