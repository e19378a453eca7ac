"""Tokens of a data split in a memory-mapped file: written once per host, then read at random without loading anything.

A cache folder holds `tokens.bin` (uint16 or uint32), `document_ends.bin` (int64, exclusive) and `meta.json`. A
half-written cache lies in a folder of another name, so that it can't be taken for a whole one.
"""

import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.readers import Piece, read_pieces, read_token_files, source_files
from trainer.data.tokenizer import TextTokenizer
from trainyard.errors import InputError
from trainyard.spec.job import DataSource

_FORMAT_VERSION = 1
_BATCH_CHARACTERS = 1 << 20
_COPY_TOKENS = 1 << 20


@dataclass(frozen=True)
class TokenCache:
    """One split's tokens. `digest` depends on the tokens and document ends alone: not on paths, times or machines."""

    tokens: npt.NDArray[Any]
    """(T,) uint16 or uint32, memory-mapped."""
    document_ends: npt.NDArray[np.int64]
    """(D,) end of each document in `tokens`, exclusive, ascending; memory-mapped."""
    digest: str
    unigram_entropy_nats: float
    """Entropy of the token frequencies: the loss of a model that knows them and nothing else."""
    vocab_size: int
    """The tokenizer's, or with ready-made ids and no tokenizer one more than the largest."""


def open_token_cache(
    sources: Sequence[DataSource], tokenizer: TextTokenizer, cache_dir: Path, *, vocab_is_open: bool = False
) -> TokenCache:
    """The tokens of `sources`, one after the other; tokenized now if `cache_dir` doesn't hold them yet.

    `vocab_is_open`: no tokenizer was named, so ready-made ids (format: tokens) may exceed the fallback's vocabulary.
    Processes of one host may call this at once: one builds, the others wait.
    """
    key = _cache_key(sources, tokenizer, vocab_is_open)
    folder = cache_dir / key
    cache = _open(folder)
    if cache is not None:
        return cache
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache_dir / f"{key}.lock"):
            cache = _open(folder)
            if cache is None:
                _build(folder, sources, tokenizer, vocab_is_open)
                cache = _open(folder)
    except OSError as error:
        raise InputError(
            f"token cache {cache_dir}: can't be written: {error.strerror or error}; free space or give another folder"
        ) from None
    assert cache is not None, f"{folder} was just written"
    return cache


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _cache_key(sources: Sequence[DataSource], tokenizer: TextTokenizer, vocab_is_open: bool) -> str:
    parts: list[Any] = [_FORMAT_VERSION, tokenizer.digest, vocab_is_open]
    for source in sources:
        # Absolute: a relative path names other files when the job starts from another folder.
        files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in source_files(source)]
        parts.append([source.format, source.text_field, files])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _open(folder: Path) -> TokenCache | None:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        ends = np.memmap(folder / "document_ends.bin", dtype="<i8", mode="r")
    except (OSError, ValueError, KeyError):
        return None
    if len(tokens) != meta["num_tokens"] or len(ends) != meta["num_documents"]:
        return None
    return TokenCache(tokens, ends, meta["digest"], meta["unigram_entropy_nats"], meta["vocab_size"])


def _build(folder: Path, sources: Sequence[DataSource], tokenizer: TextTokenizer, vocab_is_open: bool) -> None:
    # Whoever holds the lock is the only builder, so a leftover is from a killed one.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir()
    writer = _Writer(partial, tokenizer.vocab_size, vocab_is_open)
    try:
        for source in sources:
            if source.format == "tokens":
                for path, ids in read_token_files(source):
                    writer.add_ids(path, ids)
            else:
                writer.add_documents(read_pieces(source), tokenizer)
        writer.finish(", ".join(source.path for source in sources))
    except BaseException:
        writer.close()
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(folder)


class _Writer:
    """Appends tokens to a cache folder while it hashes and counts them."""

    def __init__(self, folder: Path, vocab_size: int, vocab_is_open: bool) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._vocab_is_open = vocab_is_open
        # Ready-made ids of an unknown vocabulary may turn out to be large.
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 and not vocab_is_open else "<u4")
        self._tokens = (folder / "tokens.bin").open("wb")
        self._ends = (folder / "document_ends.bin").open("wb")
        self._hash = hashlib.sha256()
        self._ends_hash = hashlib.sha256()
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._num_tokens = 0
        self._num_documents = 0

    def add_documents(self, pieces: Iterable[Piece], tokenizer: TextTokenizer) -> None:
        """Tokenize and append; each document gets the tokenizer's prefix and end."""
        prefix = np.asarray(tokenizer.prefix_ids, dtype=np.uint32)
        suffix = np.asarray([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=np.uint32)
        begins = True
        for batch in _batches(pieces):
            parts: list[npt.NDArray[np.uint32]] = []
            ends: list[int] = []
            position = self._num_tokens
            for (_, is_end), ids in zip(batch, tokenizer.encode_batch([text for text, _ in batch]), strict=True):
                added = [*([prefix] if begins else []), ids, *([suffix] if is_end else [])]
                parts += added
                position += sum(len(part) for part in added)
                if is_end:
                    ends.append(position)
                begins = is_end
            self._append(np.concatenate(parts))
            self._end_documents(ends)

    def add_ids(self, path: Path, ids: npt.NDArray[Any]) -> None:
        """Append one document of ready-made ids; InputError names the file if an id is outside the vocabulary."""
        for start in range(0, len(ids), _COPY_TOKENS):
            chunk = np.asarray(ids[start : start + _COPY_TOKENS])
            largest, smallest = int(chunk.max()), int(chunk.min())
            if smallest < 0 or largest >= 1 << 32 or (largest >= self._vocab_size and not self._vocab_is_open):
                wrong = smallest if smallest < 0 else largest
                raise InputError(f"{path}: holds id {wrong}, the tokenizer's ids are 0 to {self._vocab_size - 1}")
            self._append(chunk.astype(np.uint32))
        if len(ids):
            self._end_documents([self._num_tokens])

    def finish(self, where: str) -> None:
        """Flush, and write meta.json."""
        if not self._num_tokens:
            raise InputError(f"data {where}: holds no text")
        self.close()
        self._hash.update(self._ends_hash.digest())
        meta = {
            "version": _FORMAT_VERSION,
            "dtype": self._dtype.str,
            "num_tokens": self._num_tokens,
            "num_documents": self._num_documents,
            "digest": self._hash.hexdigest(),
            "unigram_entropy_nats": entropy_nats(self._counts),
            "vocab_size": len(self._counts),
        }
        (self._folder / "meta.json").write_text(json.dumps(meta, indent=1))

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._ends.close()

    def _append(self, ids: npt.NDArray[np.uint32]) -> None:
        if not len(ids):
            return
        counts = np.bincount(ids, minlength=len(self._counts))
        if len(counts) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(len(counts) - len(self._counts), dtype=np.int64)])
        self._counts += counts
        self._hash.update(ids.astype("<u4").tobytes())
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self._num_tokens += len(ids)

    def _end_documents(self, ends: Sequence[int]) -> None:
        """Each end is the number of tokens up to and with that document."""
        content = np.asarray(ends, dtype="<i8").tobytes()
        self._ends.write(content)
        self._ends_hash.update(content)
        self._num_documents += len(ends)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Shannon entropy, in nats, of the distribution that `counts` (occurrences by id) is a sample of: -sum p ln p."""
    present = counts[counts > 0].astype(np.float64)
    total = float(present.sum())
    return math.log(total) - float((present * np.log(present)).sum()) / total
