"""One unit's tokens on disk: written whole or not at all, found again by what they were made of.

A unit is `KEY.tokens` (uint16 or uint32), `KEY.ends` (int64: where documents end, counted from the unit's first token),
`KEY.learnt` (a bit a token; only where some token isn't learnt) and, written last, `KEY.json`.
"""

import hashlib
import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.bad_records import BadRecordError, BadRecords
from trainer.data.documents import DocumentEncoder, Encoded, by_characters
from trainer.data.readers import TokenFile, Unit
from trainer.data.shared_work import AtWork
from trainer.heartbeat import beat
from trainyard.errors import InputError

_FORMAT_VERSION = 1
_READERS = {"text": 2, "parquet": 2}
"""By format, the version of its reader: one more whenever it finds other text in the same bytes, or a cache from before
would go on with the old tokens. Text 2: a byte order mark at a file's begin is no text. Parquet 2: null is no empty
text. 1 where none is named."""
_BATCH_CHARACTERS = 1 << 20
_COPY_TOKENS = 1 << 20
MOST_OPEN_IDS = 1 << 28
"""Of ready-made ids whose vocabulary nobody states: far more than any model has rows for. A -1 that was written as a
uint32 is above, and to count how often each id occurs would take 32 GiB."""
KINDS = ("tokens", "ends", "learnt", "json")
"""The files of a unit, in the order in which they must appear."""


@dataclass(frozen=True)
class Vocabulary:
    """Which ids may occur."""

    size: int
    is_open: bool
    """No tokenizer was named, so that ready-made ids may exceed `size`."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """What ids are stored as: ready-made ones of an unknown vocabulary may turn out to be large."""
        return np.dtype("<u2" if self.size <= 1 << 16 and not self.is_open else "<u4")


@dataclass(frozen=True)
class UnitTokens:
    """What a finished unit holds; arrays are memory-mapped when asked for."""

    path: Path
    """Without the kind's suffix."""
    num_tokens: int
    num_documents: int
    dtype: str
    all_learnt: bool
    num_bad: int
    bad: tuple[str, ...]
    """The first few bad records: `place: reason`."""

    @property
    def key(self) -> str:
        """What it was made of."""
        return self.path.name

    def tokens(self) -> npt.NDArray[Any]:
        """(num_tokens,) ids."""
        return _mapped(self.path.with_name(f"{self.key}.tokens"), np.dtype(self.dtype), self.num_tokens)

    def ends(self) -> npt.NDArray[np.int64]:
        """(num_documents,) exclusive ends, ascending."""
        return _mapped(self.path.with_name(f"{self.key}.ends"), np.dtype("<i8"), self.num_documents)

    def learnt(self) -> npt.NDArray[np.uint8] | None:
        """(ceil(num_tokens / 8),) bits, the first in a byte's highest; None: every token is learnt."""
        if self.all_learnt:
            return None
        return _mapped(self.path.with_name(f"{self.key}.learnt"), np.dtype("u1"), -(-self.num_tokens // 8))


def _mapped(path: Path, dtype: "np.dtype[Any]", length: int) -> npt.NDArray[Any]:
    if not length:
        return np.empty(0, dtype=dtype)
    # Units are mapped and let go while sequences are read: np.memmap takes several times as long.
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), length * dtype.itemsize, access=mmap.ACCESS_READ)
    return np.frombuffer(content, dtype=dtype)


def unit_key(unit: Unit, encoder: DocumentEncoder | None, vocabulary: Vocabulary) -> str:
    """Another one whenever the unit's tokens would be others; `encoder` None: ready-made ids."""
    file = unit.file
    parts = [_FORMAT_VERSION, file.version, file.size, unit.begin, unit.end, unit.source.format]
    reader = _READERS.get(unit.source.format)
    parts += [f"reader {reader}"] if reader else []
    facts = encoder.facts if encoder is not None else [vocabulary.size]
    content = json.dumps([parts, facts, vocabulary.dtype.str])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def open_unit(folder: Path, key: str) -> UnitTokens | None:
    """The unit of that key; None if it isn't there, or not whole."""
    path = folder / key
    try:
        meta = json.loads(path.with_name(f"{key}.json").read_text())
        unit = UnitTokens(path, **{**meta, "bad": tuple(meta["bad"])})
        itemsize = np.dtype(unit.dtype).itemsize
        expected = {"tokens": unit.num_tokens * itemsize, "ends": unit.num_documents * 8}
        if not unit.all_learnt:
            expected["learnt"] = -(-unit.num_tokens // 8)
        torn = any(path.with_name(f"{key}.{kind}").stat().st_size != size for kind, size in expected.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if torn else unit


def write_unit(
    folder: Path,
    key: str,
    unit: Unit,
    encoder: DocumentEncoder | None,
    vocabulary: Vocabulary,
    bad: BadRecords,
    at_work: AtWork = beat,
) -> UnitTokens:
    """Tokenize one unit into `folder`; `bad` gets what is left out. InputError names what can't be used.

    `at_work` is called all the while: a large file may take longer than a rank may be silent.
    """
    writer = _Writer(folder / f"{key}.{os.getpid()}.partial", vocabulary)
    try:
        if encoder is None:
            writer.add_ids(TokenFile.of(unit.file), at_work)
        else:
            _encode(unit, encoder, writer, bad, at_work)
        if not unit.file.is_unchanged():
            raise InputError(f"{unit.file.where}: changed while it was read; start again when it is complete")
        writer.finish(folder / key, bad)
    finally:
        writer.close()
    written = open_unit(folder, key)
    assert written is not None, f"{folder / key} was just written"
    return written


def _encode(unit: Unit, encoder: DocumentEncoder, writer: "_Writer", bad: BadRecords, at_work: AtWork) -> None:
    try:
        for batch in by_characters(unit.records(), lambda record: _num_characters(record.value), _BATCH_CHARACTERS):
            for record, encoded in zip(batch, encoder.encode(batch), strict=True):
                if isinstance(encoded, BadRecordError):
                    bad.add(lambda number=record.number: unit.place(number), str(encoded))  # type: ignore[misc]
                elif encoded is not None:
                    writer.add(encoded)
            at_work()
    except BadRecordError as error:  # the whole file is one bad record
        writer.restart()
        bad.add(lambda: unit.file.where, str(error))


class _Writer:
    """Appends documents to files beside the unit's, which get their names when they are complete."""

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._path = path
        self._files = {kind: path.with_name(f"{path.name}.{kind}").open("wb") for kind in ("tokens", "ends", "learnt")}
        self._reset()

    def _reset(self) -> None:
        self._num_tokens = 0
        self._num_documents = 0
        self._all_learnt = True
        self._bits = np.zeros(0, dtype=bool)
        """Of the last tokens, fewer than 8: they don't fill a byte yet."""

    def restart(self) -> None:
        """Forget everything so far."""
        for file in self._files.values():
            file.seek(0)
            file.truncate()
        self._reset()

    def add(self, document: Encoded) -> None:
        """Append a document, or a part of one."""
        self._append(document.ids, document.learnt)
        if document.ends:
            self._end_document()

    def add_ids(self, file: TokenFile, at_work: AtWork) -> None:
        """Append one document of ready-made ids; InputError names the file if an id is outside the vocabulary."""
        for ids in file.chunks(_COPY_TOKENS):
            check_ids(ids, file.file.where, self._vocabulary)
            self._append(ids.astype(np.uint32), None)
            at_work()
        if file.num_tokens:
            self._end_document()

    def _append(self, ids: npt.NDArray[np.uint32], learnt: npt.NDArray[np.bool_] | None) -> None:
        self._files["tokens"].write(ids.astype(self._vocabulary.dtype).tobytes())
        self._num_tokens += len(ids)
        mask = np.ones(len(ids), dtype=bool) if learnt is None else learnt
        self._all_learnt = self._all_learnt and bool(mask.all())
        bits = np.concatenate([self._bits, mask])
        whole = len(bits) // 8 * 8
        self._files["learnt"].write(np.packbits(bits[:whole]).tobytes())
        self._bits = bits[whole:]

    def _end_document(self) -> None:
        self._files["ends"].write(np.int64(self._num_tokens).astype("<i8").tobytes())
        self._num_documents += 1

    def finish(self, target: Path, bad: BadRecords) -> None:
        """Give the files their names, the description last."""
        self._files["learnt"].write(np.packbits(self._bits).tobytes())
        for kind, file in self._files.items():
            file.close()
            if kind != "learnt" or not self._all_learnt:
                Path(file.name).replace(target.with_name(f"{target.name}.{kind}"))
        meta = {
            "num_tokens": self._num_tokens,
            "num_documents": self._num_documents,
            "dtype": self._vocabulary.dtype.str,
            "all_learnt": self._all_learnt,
            "num_bad": bad.count,
            "bad": bad.named,
        }
        description = self._path.with_name(f"{self._path.name}.json")
        description.write_text(json.dumps(meta))
        description.replace(target.with_name(f"{target.name}.json"))

    def close(self) -> None:
        """Close the files, and remove what has got no name."""
        for file in self._files.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)


def check_ids(ids: npt.NDArray[Any], where: str, vocabulary: Vocabulary) -> None:
    """InputError if an id is outside the vocabulary."""
    largest, smallest = int(ids.max()), int(ids.min())
    count = MOST_OPEN_IDS if vocabulary.is_open else vocabulary.size
    if smallest < 0 or largest >= count:
        wrong = smallest if smallest < 0 else largest
        raise InputError(f"{where}: holds id {wrong}, the vocabulary's ids are 0 to {count - 1}")


def _num_characters(value: Any) -> int:
    """About how much text a record is."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_num_characters(item) for item in value.values())
    return sum(_num_characters(item) for item in value) if isinstance(value, list) else 1
