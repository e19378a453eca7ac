"""Documents out of files: text, jsonl, parquet, and ready-made token ids. A file is never held whole in memory."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trainyard.errors import InputError
from trainyard.spec.job import DataSource

TEXT_BLOCK_CHARACTERS = 1 << 20
"""A text file is tokenized in blocks of about this size, cut at line ends, so that a file may be larger than memory."""

_SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin"),
    "webdataset": (".tar",),
}

Piece = tuple[str, bool]
"""Some text, and whether its document ends with it."""


def source_files(source: DataSource) -> list[Path]:
    """The files of a source, ordered by their path inside it: the same order on every machine."""
    if "://" in source.path:
        raise InputError(
            f"data path {source.path}: the trainer reads local files; launch the job (which brings them as a channel) "
            "or copy them here first"
        )
    root = Path(source.path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise InputError(f"data path {source.path}: no such file or folder")
    suffixes = _SUFFIXES.get(source.format)
    files = [
        path
        for path in root.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
        and (suffixes is None or path.name.endswith(suffixes))
    ]
    if not files:
        wanted = f"no file that ends in {', '.join(suffixes)}" if suffixes else "no file"
        raise InputError(f"data path {source.path}: {wanted} (format: {source.format})")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_pieces(source: DataSource) -> Iterator[Piece]:
    """The text of a source in pieces, in order. Empty documents are left out."""
    for path in source_files(source):
        if source.format == "text":
            yield from _text_pieces(path)
        elif source.format == "jsonl":
            yield from ((text, True) for text in _jsonl_texts(path, source.text_field) if text)
        else:
            assert source.format == "parquet", source.format
            yield from ((text, True) for text in _parquet_texts(path, source.text_field) if text)


def read_token_files(source: DataSource) -> Iterator[tuple[Path, npt.NDArray[Any]]]:
    """Each file of a `tokens` source as a memory-mapped 1-D array of ids: one document per file.

    `.npy` carries its integer type; `.bin` is bare little-endian uint16.
    """
    for path in source_files(source):
        if path.name.endswith(".npy"):
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, OSError) as error:
                raise InputError(f"{path}: is not a NumPy array file ({error})") from None
        else:
            if path.stat().st_size % 2:
                raise InputError(
                    f"{path}: {path.stat().st_size} bytes are no whole number of uint16 ids; use .npy for wider ids"
                )
            array = np.memmap(path, dtype="<u2", mode="r") if path.stat().st_size else np.empty(0, dtype="<u2")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(f"{path}: must hold a 1-D array of integers, holds {array.ndim}-D {array.dtype}")
        yield path, array


def _open_text(path: Path) -> IO[str]:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _text_pieces(path: Path) -> Iterator[Piece]:
    try:
        with _open_text(path) as handle:
            block = _read_block(handle)
            while block:
                following = _read_block(handle)
                yield block, not following
                block = following
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start} of a block)") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: can't be read: {error}") from None


def _read_block(handle: IO[str]) -> str:
    block = handle.read(TEXT_BLOCK_CHARACTERS)
    return block + handle.readline() if block and not block.endswith("\n") else block


def _jsonl_texts(path: Path, field: str) -> Iterator[str]:
    try:
        with _open_text(path) as handle:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    yield _jsonl_text(path, number, line, field)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({error.reason})") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: can't be read: {error}") from None


def _jsonl_text(path: Path, number: int, line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {number} is not JSON ({error.msg}); jsonl holds one object a line") from None
    if not isinstance(row, dict) or field not in row:
        present = ", ".join(sorted(row)[:8]) if isinstance(row, dict) else type(row).__name__
        raise InputError(
            f"{path}: line {number} has no field {field!r} (it has: {present}); set text_field to the one with the text"
        )
    text = row[field]
    if not isinstance(text, str):
        raise InputError(f"{path}: line {number}: field {field!r} must be a string, is {type(text).__name__}")
    return text


def _parquet_texts(path: Path, field: str) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            f"{path}: reading parquet needs the package pyarrow; install it, or convert the data to jsonl"
        ) from None
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        if field not in names:
            raise InputError(f"{path}: has no column {field!r} (it has: {', '.join(names[:8])}); set text_field")
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise InputError(f"{path}: column {field!r} must hold strings, holds {type(text).__name__}")
                yield text or ""
    except OSError as error:  # pyarrow's ArrowInvalid is a ValueError, its ArrowIOError an OSError
        raise InputError(f"{path}: can't be read: {error}") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is not a parquet file ({str(error).splitlines()[0]})") from None
