"""Tables of sequences of large data sets: what a rank holds of them, and what it looks at at once."""

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from trainer.data import stream
from trainer.data.stream import SequenceTable
from trainer.data.token_cache import TokenCache


class _Ids:
    """So many tokens that nobody holds."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, stretch: slice) -> Any:
        return np.arange(stretch.start, stretch.stop) % 100


class _Mask:
    """Every seventh token is learnt; remembers how much was asked for at once."""

    def __init__(self) -> None:
        self.most = 0

    def __getitem__(self, stretch: slice) -> Any:
        self.most = max(self.most, stretch.stop - stretch.start)
        return np.arange(stretch.start, stretch.stop) % 7 == 0


def test_a_packed_table_takes_no_memory_for_its_sequences() -> None:
    count = 200_000_000_100
    tracemalloc.start()
    table = SequenceTable(_cache(_Ids(count), count), sequence_length=4096, packing=True)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept <= peak < 1 << 16
    assert len(table) == -(-count // 4096)
    last = table.micro_batch(np.asarray([len(table) - 1, -1, 3]))
    assert last.num_tokens == count % 4096 + 4096
    assert last.input_ids[0, 0] == (count - count % 4096) % 100 and last.input_ids[2, 0] == 3 * 4096 % 100


@pytest.mark.parametrize(("length", "packing"), [(5000, True), (3, True), (16, False), (1 << 17, True)])
def test_masks_of_long_sequences_are_looked_at_few_tokens_at_a_time(
    monkeypatch: pytest.MonkeyPatch, length: int, packing: bool
) -> None:
    monkeypatch.setattr(stream, "_TOKENS_AT_ONCE", 20_000)
    count, mask = 300_000, _Mask()
    ends = np.cumsum(np.arange(900) % 40)
    ends = np.concatenate([ends[ends < count], [count]]).astype(np.int64)
    table = SequenceTable(_cache(_Ids(count), count, mask, ends), sequence_length=length, packing=packing)
    assert 0 < mask.most <= max(20_000, length)
    borders = [0, count] if packing else [0, *ends.tolist()]
    wanted = [
        (start, min(start + length, end))
        for begin, end in pairwise(borders)
        for start in range(begin, end, length)
        if any(place % 7 == 0 for place in range(start + 1, min(start + length, end)))
    ]
    starts, lengths = table._spans.of(np.arange(len(table)))
    assert list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True)) == wanted


def _cache(tokens: Any, count: int, learnt: Any = None, ends: Any = None) -> TokenCache:
    document_ends = np.asarray([count], dtype=np.int64) if ends is None else ends
    return TokenCache(tokens, document_ends, "digest", None, 100, learnt)
