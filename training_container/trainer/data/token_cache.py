"""Tokens of a data set in memory-mapped files: written once, then read at random without loading anything.

A data set is cut into units (see `readers`), and the processes of a host, which all call `open_token_cache`, share the
work: each takes the next unit that nobody has finished or is at. Whoever is killed loses the unit that it was at; a
changed file has other units. When all are there, one process reads them through once and writes `meta.json`
(digest, frequencies) and `document_ends.bin` into the data set's folder. Order and digest don't depend on who did what.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.bad_records import BadRecords
from trainer.data.chat import ChatTemplate
from trainer.data.documents import DocumentEncoder, encoder_of
from trainer.data.readers import Unit, units_of
from trainer.data.shared_work import AtWork, exclusive
from trainer.data.token_units import UnitTokens, Vocabulary, open_unit, unit_key, write_unit
from trainer.data.tokenizer import TextTokenizer
from trainyard.errors import InputError
from trainyard.spec.job import DataSource
from trainyard.spec.words import counted

if TYPE_CHECKING:  # only who shares units with other hosts needs it
    from trainer.data.shared_units import SharedUnits

_FORMAT_VERSION = 2
_READ_TOKENS = 1 << 22
_MOST_MAPPED = 64
"""Units of a data set that stay mapped: each takes a descriptor, of which a process may have 1,024, and there may be
thousands of units."""


class Tokens(Protocol):
    """A read-only array of ids, of which slices are read: a memory map, or several one after the other."""

    def __len__(self) -> int: ...

    def __getitem__(self, stretch: slice, /) -> npt.NDArray[Any]: ...


class LearntTokens(Protocol):
    """Which tokens count in the loss."""

    def __getitem__(self, stretch: slice, /) -> npt.NDArray[np.bool_]: ...


@dataclass(frozen=True)
class TokenCache:
    """One data set's tokens. `digest` depends on them, on document ends and what is learnt, not on paths or times."""

    tokens: Tokens
    """T ids, uint16 or uint32."""
    document_ends: npt.NDArray[np.int64]
    """(D,) end of each document in `tokens`, exclusive, ascending; memory-mapped."""
    digest: str
    unigram_entropy_nats: float | None
    """Entropy of the frequencies of what is learnt: the loss of a model that knows them and nothing else. None: not
    counted."""
    vocab_size: int
    """The tokenizer's, or with ready-made ids and no tokenizer one more than the largest."""
    learnt: LearntTokens | None = None
    """None: all of them."""
    num_bad_records: int = 0
    bad_records: tuple[str, ...] = field(default=())
    """The first few that were left out: `place: reason`."""


def open_token_cache(
    sources: Sequence[DataSource],
    tokenizer: TextTokenizer,
    cache_dir: Path,
    *,
    vocab_is_open: bool = False,
    chat_template: ChatTemplate | None = None,
    max_bad_records: int = 0,
    where: str = "data",
    streaming: bool = False,
    shared: "SharedUnits | None" = None,
) -> TokenCache:
    """The tokens of `sources`, one after the other; tokenized now if `cache_dir` doesn't hold them yet.

    `vocab_is_open`: no tokenizer was named, so ready-made ids (format: tokens) may exceed the fallback's vocabulary.
    `where` names the data set in messages; `streaming`: s3:// sources are read where they lie, once.
    `shared`: where hosts find each other's units. Any number of processes may call this at once: they share the work.
    """
    is_ready_made = vocab_is_open and all(source.format == "tokens" for source in sources)
    # Without text the fallback's 257 bytes are nobody's ids: a model of proteins or of letters has a few dozen.
    vocabulary = Vocabulary(0 if is_ready_made else tokenizer.vocab_size, vocab_is_open)
    parts = _parts(sources, tokenizer, chat_template, vocabulary, streaming)
    key = hashlib.sha256(json.dumps([_FORMAT_VERSION, vocab_is_open, [part.key for part in parts]]).encode())
    folder, units_folder = cache_dir / key.hexdigest()[:24], cache_dir / "units"
    bad = BadRecords(max_bad_records, where)
    try:
        cache = _open(folder, units_folder, bad)
        if cache is None:
            units_folder.mkdir(parents=True, exist_ok=True)
            units = _tokenize(parts, units_folder, vocabulary, bad, shared)
            with exclusive(folder.with_name(f"{folder.name}.lock")) as at_work:
                assert at_work is not None
                if _open(folder, units_folder, BadRecords(max_bad_records, where)) is None:
                    _finish(folder, units, vocabulary, ", ".join(source.path for source in sources), bad, at_work)
            cache = _open(folder, units_folder, BadRecords(max_bad_records, where))
    except OSError as error:
        raise InputError(
            f"token cache {cache_dir}: can't be written: {error.strerror or error}; free space or give another folder"
        ) from None
    assert cache is not None, f"{folder} was just written"
    return cache


@dataclass(frozen=True)
class _Part:
    """A unit to be tokenized."""

    unit: Unit
    encoder: DocumentEncoder | None
    key: str


def _parts(
    sources: Sequence[DataSource],
    tokenizer: TextTokenizer,
    template: ChatTemplate | None,
    vocabulary: Vocabulary,
    streaming: bool,
) -> list[_Part]:
    parts = []
    for source in sources:
        encoder = None if source.format == "tokens" else encoder_of(source, tokenizer, template)
        units = units_of(source, streaming=streaming)
        parts += [_Part(unit, encoder, unit_key(unit, encoder, vocabulary)) for unit in units]
    return parts


def _tokenize(
    parts: Sequence[_Part], folder: Path, vocabulary: Vocabulary, bad: BadRecords, shared: "SharedUnits | None"
) -> list[UnitTokens]:
    """All units, those that were missing made by this process or by another that is at it too."""

    def made(part: _Part, at_work: AtWork) -> UnitTokens:
        unit = open_unit(folder, part.key) or (shared and shared.fetch(folder, part.key))
        if not unit:
            of_unit = BadRecords(bad.limit, bad.where)
            unit = write_unit(folder, part.key, part.unit, part.encoder, vocabulary, of_unit, at_work)
            if shared:
                shared.put(folder, unit)
        at_work()
        return unit

    first = shared.first_of(len(parts)) if shared else 0
    for part in (*parts[first:], *parts[:first]):
        if open_unit(folder, part.key) is None:
            with exclusive(folder / f"{part.key}.lock", wait=False) as at_work:
                if at_work is not None:
                    made(part, at_work)
    units = []
    for part in parts:
        unit = open_unit(folder, part.key)
        if unit is None:
            # Another process is at it: wait until it is done, or make it if that one was killed.
            with exclusive(folder / f"{part.key}.lock") as at_work:
                assert at_work is not None
                unit = made(part, at_work)
        units.append(unit)
    return units


def _open(folder: Path, units_folder: Path, bad: BadRecords) -> TokenCache | None:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        ends = np.memmap(folder / "document_ends.bin", dtype="<i8", mode="r")
        units = [open_unit(units_folder, key) for key in meta["units"]]
    except (OSError, ValueError, KeyError):
        return None
    whole = [unit for unit in units if unit is not None]
    if len(whole) != len(units) or len(ends) != meta["num_documents"]:
        return None
    _count_bad(whole, bad)
    learnt = None if all(unit.all_learnt for unit in whole) else _LearntUnits(whole)
    filled = [unit for unit in whole if unit.num_tokens]
    tokens = filled[0].tokens() if len(filled) == 1 else _UnitsInARow(filled)
    return TokenCache(
        tokens,
        ends,
        meta["digest"],
        meta["unigram_entropy_nats"],
        meta["vocab_size"],
        learnt,
        bad.count,
        tuple(bad.named),
    )


def _count_bad(units: Sequence[UnitTokens], bad: BadRecords) -> None:
    for unit in units:
        bad.extend(unit.num_bad, unit.bad)


def _finish(
    folder: Path, units: Sequence[UnitTokens], vocabulary: Vocabulary, paths: str, bad: BadRecords, at_work: AtWork
) -> None:
    """Reads all units through once, and writes the data set's folder."""
    _count_bad(units, bad)
    # Whoever holds the lock is the only writer, so a leftover is from a killed one.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir()
    digest, ends_digest = hashlib.sha256(), hashlib.sha256()
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    ignored = counts.copy()
    num_tokens = num_documents = 0
    with (partial / "document_ends.bin").open("wb") as ends_file:
        for unit in units:
            counts = _read_through(unit.tokens(), counts, digest, at_work)
            ignored += _ignored_counts(unit, vocabulary.size, at_work)
            ends = (unit.ends() + num_tokens).astype("<i8").tobytes()
            ends_file.write(ends)
            ends_digest.update(ends)
            num_tokens += unit.num_tokens
            num_documents += unit.num_documents
    if not num_tokens:
        shutil.rmtree(partial, ignore_errors=True)
        kept = f" but {counted(bad.count, 'bad record')}, the first: {bad.named[0]}" if bad.count else ""
        raise InputError(f"{bad.where} {paths}: holds no text{kept}; give files with some, or take the source out")
    digest.update(ends_digest.digest())
    _digest_learnt(units, digest, at_work)
    meta = {
        "version": _FORMAT_VERSION,
        "units": [unit.key for unit in units],
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "digest": digest.hexdigest(),
        "unigram_entropy_nats": entropy_nats(counts - np.pad(ignored, (0, len(counts) - len(ignored)))),
        "vocab_size": len(counts),
    }
    (partial / "meta.json").write_text(json.dumps(meta, indent=1))
    partial.rename(folder)


def _read_through(
    tokens: npt.NDArray[Any], counts: npt.NDArray[np.int64], digest: Any, at_work: AtWork
) -> npt.NDArray[np.int64]:
    for start in range(0, len(tokens), _READ_TOKENS):
        ids = np.asarray(tokens[start : start + _READ_TOKENS])
        found = np.bincount(ids, minlength=len(counts))
        if len(found) > len(counts):
            counts = np.concatenate([counts, np.zeros(len(found) - len(counts), dtype=np.int64)])
        counts += found
        digest.update(ids.astype("<u4").tobytes())
        at_work()
    return counts


def _ignored_counts(unit: UnitTokens, vocab_size: int, at_work: AtWork) -> npt.NDArray[np.int64]:
    """How often each id stands where it isn't learnt. Only what a tokenizer made is ever masked: its ids are known."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    if not unit.all_learnt:
        tokens, learnt = unit.tokens(), _LearntUnits([unit])
        for start in range(0, len(tokens), _READ_TOKENS):
            stretch = slice(start, start + _READ_TOKENS)
            counts += np.bincount(tokens[stretch][~learnt[stretch]], minlength=vocab_size)
            at_work()
    return counts


def _digest_learnt(units: Sequence[UnitTokens], digest: Any, at_work: AtWork) -> None:
    """Nothing where all is learnt. A byte a token, so that it doesn't depend on where units are cut."""
    if all(unit.all_learnt for unit in units):
        return
    learnt = _LearntUnits(units)
    for start in range(0, len(learnt), _READ_TOKENS):
        digest.update(learnt[start : start + _READ_TOKENS].tobytes())
        at_work()


class _UnitsInARow:
    """The tokens of several units as one array."""

    def __init__(self, units: Sequence[UnitTokens]) -> None:
        self._array = lru_cache(_MOST_MAPPED)(lambda unit: units[unit].tokens())
        self._bounds = _bounds(units)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, stretch: slice) -> npt.NDArray[Any]:
        found = list(pieces(self._bounds, stretch))
        if len(found) == 1:
            unit, begin, end = found[0]
            return self._array(unit)[begin:end]
        # Copies: a view would keep its unit mapped, and a sequence may go over thousands of short files.
        return np.concatenate([np.array(self._array(unit)[begin:end]) for unit, begin, end in found])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self[:].astype(dtype) if dtype is not None else self[:]


class _LearntUnits:
    """Which tokens of several units are learnt."""

    def __init__(self, units: Sequence[UnitTokens]) -> None:
        self._bits = lru_cache(_MOST_MAPPED)(lambda unit: units[unit].learnt())
        self._bounds = _bounds(units)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, stretch: slice) -> npt.NDArray[np.bool_]:
        parts = [np.zeros(0, dtype=bool)]
        for unit, begin, end in pieces(self._bounds, stretch):
            bits = self._bits(unit)
            if bits is None:
                parts.append(np.ones(end - begin, dtype=bool))
            else:
                first = begin // 8
                content = np.unpackbits(bits[first : -(-end // 8)])
                parts.append(content[begin - 8 * first : end - 8 * first].astype(bool))
        return np.concatenate(parts)


def _bounds(units: Sequence[UnitTokens]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum([unit.num_tokens for unit in units], dtype=np.int64)]).astype(np.int64)


def pieces(bounds: npt.NDArray[np.int64], stretch: slice) -> Iterator[tuple[int, int, int]]:
    """(part, first, one after the last) of each part's stretch; where nothing is asked, an empty one."""
    begin, end, step = stretch.indices(int(bounds[-1]))
    assert step == 1
    part = int(np.searchsorted(bounds, begin, side="right")) - 1
    part = min(part, len(bounds) - 2)
    while True:
        offset = int(bounds[part])
        last = min(end, int(bounds[part + 1]))
        yield part, begin - offset, max(begin, last) - offset
        begin, part = last, part + 1
        if begin >= end:
            return


def entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    """Shannon entropy, in nats, of the distribution that `counts` (occurrences by id) is a sample of: -sum p ln p."""
    present = counts[counts > 0].astype(np.float64)
    total = float(present.sum())
    if not total:
        return 0.0
    return math.log(total) - float((present * np.log(present)).sum()) / total
