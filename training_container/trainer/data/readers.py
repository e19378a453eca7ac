"""Records out of files: text, jsonl, parquet, and ready-made token ids. A file is never held whole in memory.

A source is read in units: whole files, or stretches of large jsonl and parquet files, which processes share between
them. The records of all units, one after the other, are those of the source, however it is cut.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainer.data.bad_records import BadRecordError
from trainer.data.files import DataFile, LocalFile, local_files
from trainyard.errors import InputError
from trainyard.spec.job import DataSource

TEXT_BLOCK_CHARACTERS = 1 << 20
"""A text file is tokenized in blocks of about this size, cut at line ends, so that a file may be larger than memory."""

UNIT_BYTES = 64 << 20
"""A jsonl or parquet file larger than this is cut: a killed job loses no more than one unit's tokenization a rank."""

_HEADER_BYTES = 16 << 10
"""Of an .npy file: NumPy takes none of more than 10,000 characters."""
_LEAST_JUDGED = 64
"""Ids of a bare file: fewer may happen to be 0 in turn."""
_LEAST_LOW = 4
"""Upper halves of ids of 32 bits are less: the largest vocabularies (Gemma's) have 262,144 words."""
_COUNTED_BYTES = 1 << 20

_UNREADABLE = (OSError, EOFError, zlib.error)


@dataclass(frozen=True, slots=True)
class Record:
    """One document, or a block of a text file's."""

    number: int
    """Counted from 0 in its unit: what `Unit.place` names it by."""
    value: Any
    """A text file's block: str. Else the row: a dict, where the file is whole; BadRecordError where it is broken."""
    begins: bool = True
    """Whether its document begins with it."""
    ends: bool = True
    """Whether its document ends with it."""


class LineCount:
    """How many lines of a file begin before a byte of it; a count goes on from the nearest one that was made."""

    def __init__(self) -> None:
        self._known = {0: 0, 1: 1}
        """Lines by byte: the first line begins at byte 0."""

    def before(self, file: DataFile, begin: int) -> int:
        """Lines that begin before byte `begin`."""
        if begin not in self._known:
            nearest = max(known for known in self._known if known < begin)
            self._known[begin] = self._known[nearest] + _line_ends(file, nearest - 1, begin - 1)
        return self._known[begin]


@dataclass(frozen=True)
class Unit:
    """A stretch of one file: what one process tokenizes at a time."""

    source: DataSource
    file: DataFile
    begin: int = 0
    """jsonl: first byte; parquet: first row group. A line belongs to the unit in which it begins."""
    end: int | None = None
    """Exclusive; None: to the end of the file."""
    lines: LineCount = field(default_factory=LineCount, compare=False, repr=False)
    """Of its file, which all units of a file share: who names records in many of them reads it once."""

    def records(self) -> Iterator[Record]:
        """Its records in order. A broken one is handed on as BadRecordError; InputError for a broken file.

        A text file that isn't UTF-8 raises BadRecordError: it is one record, of which nothing may be kept.
        """
        try:
            if self.source.format == "text":
                yield from _text_records(self.file)
            elif self.source.format == "jsonl":
                yield from self._jsonl_records()
            else:
                assert self.source.format == "parquet", self.source.format
                yield from self._parquet_records()
        except _UNREADABLE as error:
            raise InputError(f"{self.file.where}: can't be read: {_reason(error)}") from None

    def place(self, number: int) -> str:
        """Where a record is, for a message: FILE:LINE, or FILE: row N of parquet, both counted from 1."""
        if self.source.format == "text":
            return self.file.where
        if self.source.format == "parquet":
            return f"{self.file.where}: row {self._rows_before + number + 1}"
        return f"{self.file.where}:{self.lines.before(self.file, self.begin) + number + 1}"

    def _jsonl_records(self) -> Iterator[Record]:
        with self.file.open() as file, _plain(file, self.file.where) as handle:
            if self.begin:
                # A line that began before is another unit's; one that begins right here follows a line end.
                handle.seek(self.begin - 1)
                handle.readline()
            position = handle.tell() if self.end is not None else 0
            for number, line in enumerate(handle):
                if self.end is not None and position >= self.end:
                    return
                position += len(line)
                if line.strip():
                    yield Record(number, _json_row(line))

    @cached_property
    def _rows_before(self) -> int:
        """Rows of the row groups before this unit's."""
        metadata = _parquet_file(self.file).metadata
        return sum(metadata.row_group(group).num_rows for group in range(self.begin))

    def _parquet_records(self) -> Iterator[Record]:
        table = _parquet_file(self.file)
        source, names = self.source, table.schema_arrow.names
        columns = [source.messages_field] if source.messages_field else [source.prompt_field, source.text_field]
        wanted = [column for column in columns if column is not None]
        for column in wanted:
            if column not in names:
                raise InputError(
                    f"{self.file.where}: has no column {column!r} (it has: {', '.join(names[:8])}); set text_field,"
                    " prompt_field or messages_field"
                )
        if source.messages_field and "tools" in names:
            wanted.append("tools")
        groups = list(range(self.begin, table.num_row_groups if self.end is None else self.end))
        number = 0
        try:
            for batch in table.iter_batches(batch_size=1024, row_groups=groups, columns=wanted):
                for row in batch.to_pylist():
                    yield Record(number, {name: _without_nulls(value) for name, value in row.items()})
                    number += 1
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise _no_parquet(self.file, error) from None


def files_of(source: DataSource, *, streaming: bool = False) -> list[DataFile]:
    """The files of a source, ordered by their path inside it: the same order on every machine.

    `streaming`: s3:// is read where it lies; InputError without.
    """
    if streaming and source.path.startswith("s3://"):
        from trainer.data.s3_files import list_s3  # only who streams needs it

        return list_s3(source)
    return [LocalFile.at(path) for path in local_files(source)]


def units_of(source: DataSource, *, streaming: bool = False) -> list[Unit]:
    """A source cut into units, in order; InputError names what can't be read."""
    units = []
    for file in files_of(source, streaming=streaming):
        borders, lines = _borders(source, file), LineCount()
        ends = [*borders[1:], None]
        units += [Unit(source, file, begin, end, lines) for begin, end in zip(borders, ends, strict=True)]
    return units


def _borders(source: DataSource, file: DataFile) -> list[int]:
    """Where the units of a file begin."""
    if file.size <= UNIT_BYTES:
        return [0]
    if source.format == "jsonl" and not file.where.endswith(".gz"):
        return list(range(0, file.size, UNIT_BYTES))
    if source.format == "parquet":
        try:
            metadata = _parquet_file(file).metadata
        except _UNREADABLE as error:
            raise InputError(f"{file.where}: can't be read: {_reason(error)}") from None
        borders, size = [0], 0
        for group in range(metadata.num_row_groups):
            if size >= UNIT_BYTES:
                borders.append(group)
                size = 0
            size += metadata.row_group(group).total_byte_size
        return borders
    return [0]


@dataclass(frozen=True)
class TokenFile:
    """A file of a `tokens` source: one document of ready-made ids.

    `.npy` carries its integer type; `.bin` is bare little-endian uint16.
    """

    file: DataFile
    dtype: "np.dtype[Any]"
    offset: int
    """Bytes before the first id."""
    num_tokens: int

    @classmethod
    def of(cls, file: DataFile) -> "TokenFile":
        """What the file's first bytes say; InputError where it holds no row of integers."""
        if not file.where.endswith(".npy"):
            if file.size % 2:
                raise InputError(
                    f"{file.where}: {file.size} bytes are no whole number of uint16 ids; use .npy for wider ids"
                )
            _check_width(file)
            return cls(file, np.dtype("<u2"), 0, file.size // 2)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        try:
            handle = io.BytesIO(file.head(_HEADER_BYTES))
            shape, _, dtype = read_header[np.lib.format.read_magic(handle)](handle)
            offset = handle.tell()
        except (ValueError, KeyError, *_UNREADABLE) as error:
            raise InputError(
                f"{file.where}: is not a NumPy array file ({_reason(error)}); write ids by numpy.save, or name a file"
                " of bare uint16 ids .bin"
            ) from None
        if len(shape) != 1 or dtype.kind not in "iu":
            raise InputError(f"{file.where}: must hold a 1-D array of integers, holds {len(shape)}-D {dtype}")
        if file.size != offset + shape[0] * dtype.itemsize:
            raise InputError(f"{file.where}: is not the size that its header says: copy it again")
        return cls(file, dtype, offset, int(shape[0]))

    def chunks(self, num_tokens: int) -> Iterator[npt.NDArray[Any]]:
        """All ids, so many at a time."""
        try:
            with self.file.open() as handle:
                handle.seek(self.offset)
                left = self.num_tokens
                while left:
                    content = handle.read(min(left, num_tokens) * self.dtype.itemsize)
                    ids = np.frombuffer(content, dtype=self.dtype)
                    if not len(ids):
                        raise EOFError("it ends early")
                    left -= len(ids)
                    yield ids
        except (ValueError, *_UNREADABLE) as error:
            raise InputError(f"{self.file.where}: can't be read: {_reason(error)}") from None


def _check_width(file: DataFile) -> None:
    """InputError for bare ids of 32 bits: read as uint16 every second one would be 0, or little more."""
    try:
        ids = np.frombuffer(file.head(_HEADER_BYTES), dtype="<u2")
    except _UNREADABLE as error:
        raise InputError(f"{file.where}: can't be read: {_reason(error)}") from None
    if len(ids) < _LEAST_JUDGED:
        return
    high = int(ids[1::2].max())
    if high < _LEAST_LOW and ids[::2].max() >= (_LEAST_LOW if high else 1):
        told = f"0 to {high}" if high else "0"
        raise InputError(
            f"{file.where}: every second id of it is {told}, as of 32-bit ids that are read as uint16; write them by"
            " numpy.save (.npy), which says how wide they are"
        )


def _line_ends(file: DataFile, begin: int, end: int) -> int:
    """Line ends in a stretch of a file's bytes."""
    found = 0
    with file.open() as handle:
        handle.seek(begin)
        while begin < end and (content := handle.read(min(end - begin, _COUNTED_BYTES))):
            found += content.count(b"\n")
            begin += len(content)
    return found


def _plain(file: BinaryIO, name: str) -> Any:
    return gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file


def _text_records(file: DataFile) -> Iterator[Record]:
    try:
        with file.open() as raw, io.TextIOWrapper(_plain(raw, file.where), encoding="utf-8-sig", newline="") as handle:
            block, number = _read_block(handle), 0
            while block:
                following = _read_block(handle)
                yield Record(number, block, begins=number == 0, ends=not following)
                block, number = following, number + 1
    except UnicodeDecodeError as error:
        raise BadRecordError(f"is not UTF-8 text ({error.reason})") from None


def _read_block(handle: io.TextIOWrapper) -> str:
    block = handle.read(TEXT_BLOCK_CHARACTERS)
    return block + handle.readline() if block and not block.endswith("\n") else block


def _json_row(line: bytes) -> Any:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRecordError(f"is not UTF-8 ({error.reason} at byte {error.start + 1} of the line)")
    except ValueError as error:
        return BadRecordError(f"is not JSON ({str(error)[:100]}); jsonl holds one object a line")
    except RecursionError:
        return BadRecordError("is not JSON that can be read: nested too deeply")
    if not isinstance(row, dict):
        return BadRecordError(f"is no JSON object but {type(row).__name__}; jsonl holds one object a line")
    return row


def _parquet_file(file: DataFile) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            f"{file.where}: reading parquet needs the package pyarrow; install it, or convert the data to jsonl"
        ) from None
    try:
        return parquet.ParquetFile(file.path if isinstance(file, LocalFile) else file.open())
    except ValueError as error:  # pyarrow's ArrowInvalid is a ValueError, its ArrowIOError an OSError
        raise _no_parquet(file, error) from None


def _no_parquet(file: DataFile, error: ValueError) -> InputError:
    return InputError(f"{file.where}: is not a parquet file ({str(error).splitlines()[0]})")


def _without_nulls(value: Any) -> Any:
    """Parquet's structs have all fields of the schema, null where a row has none; templates ask which are there."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return value


def _reason(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())  # pyarrow's have several lines
