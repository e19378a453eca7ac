"""The order in which sequences are read, and the micro-batches made of them.

One global order for all ranks: position p of the training stream is sequence permutation_e(p mod N) of epoch
e = p div N. Step s reads positions [s*G, (s+1)*G), with G the global batch size. Inside a step, micro-step a of rank r
reads the block of m (= micro batch size) positions that starts at s*G + (a*R + r)*m, with R the data-parallel size. So
the global batch of a step is the same for every R, and "sequences consumed" is all the position there is.

No thread reads ahead of the loop: a step's micro-batches take about 0.1 ms per 1,024 tokens (measured on one core that
others used too: sequences of 1,024 to 8,192, with document masks), the session asks for them while a GPU still works on
the step before, and on a CPU a thread would take the core that computes. Only what lies in S3 is fetched ahead.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.streamed_tokens import StreamedTokens
from trainer.data.token_cache import LearntTokens, TokenCache
from trainer.heartbeat import beat
from trainyard.errors import InputError

IGNORED_LABEL = -100
"""Label of a position that doesn't count in the loss (torch's cross_entropy default)."""

_SHORTEST = 2
"""Tokens of a sequence: one has nothing to predict."""
_ROWS_AT_ONCE = 4096
_TOKENS_AT_ONCE = 1 << 22
"""Masks that are looked at together: some 20 MiB of memory. A longer sequence comes alone."""

STEPS_AHEAD = 8
"""Steps whose sequences are fetched before they are wanted, where the tokens lie in S3."""

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass on one rank. B = micro batch size, S = sequence length."""

    input_ids: torch.Tensor
    """(B, S) int64."""
    labels: torch.Tensor
    """(B, S) int64: the input ids, not shifted (the loss shifts); IGNORED_LABEL where padded, on what is not learnt
    (prompts), and on the first token of a document that follows another in its sequence, where documents are kept
    apart."""
    position_ids: torch.Tensor | None
    """(B, S) int64: from 0 again at each document's start, which is how engines know that documents end there; or None
    where positions simply count from 0."""
    num_target_tokens: int
    """Labels that count in the next-token loss: those of labels[:, 1:] that are not IGNORED_LABEL."""
    num_tokens: int
    """Tokens without padding."""


class Permutation:
    """A shuffle of range(size) that is computed, not stored: any position in constant time and memory.

    A balanced Feistel network over the next even power of two, walked until it lands inside range(size) (cycle walking;
    Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Only integer arithmetic, so the order is the same
    on every machine and library version, which numpy's own shuffles don't promise.
    """

    _NUM_ROUNDS = 8

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        assert size >= 1
        self._size = np.uint64(size)
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        rounds = np.arange(1, self._NUM_ROUNDS + 1, dtype=np.uint64)
        key = _mix(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)) ^ np.uint64(epoch)
        self._keys = _mix(_mix(key) ^ rounds)

    def __call__(self, positions: Positions) -> Positions:
        """The elements at `positions` (int64, each in range(size))."""
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = self._rounds(values[outside])
            outside = values >= self._size
        return values.astype(np.int64)

    def _rounds(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): 64-bit wrap-around is meant."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class SequenceTable:
    """Sequences of at most `sequence_length` tokens over a token cache; a tail of one token is dropped.

    Packed: the token stream cut every `sequence_length` tokens; documents run on, each ends with the end token.
    Not packed: every document begins a sequence; a longer one is continued in the next, so that no text is lost.

    `separate_documents`: packed documents are trained as if each stood alone: positions restart at each, attention
    stays inside (the engines see to that), and no token is predicted from another document's.
    """

    def __init__(
        self, cache: TokenCache, *, sequence_length: int, packing: bool, separate_documents: bool = False
    ) -> None:
        self._tokens = cache.tokens
        self._learnt = cache.learnt
        self._document_ends = cache.document_ends if packing and separate_documents else None
        self.sequence_length = sequence_length
        if packing:
            self._spans: _Spans = _PackedSpans(len(cache.tokens), sequence_length)
        else:
            self._spans = _DocumentSpans(np.asarray(cache.document_ends), sequence_length)
        if cache.learnt is not None:
            # A long prompt may fill whole sequences: without a target they'd cost a step and teach nothing.
            kept = _with_targets(self._spans, cache.learnt)
            if not kept.all():
                self._spans = _SomeSpans(self._spans, kept)

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def is_streamed(self) -> bool:
        """Whether the tokens lie in S3, so that it helps to know early what is read."""
        return isinstance(self._tokens, StreamedTokens)

    def will_read(self, rows: Positions) -> None:
        """Says which sequences are read soon: tokens that aren't on this machine are fetched meanwhile."""
        if isinstance(self._tokens, StreamedTokens):
            for start, length in zip(*self._spans.of(rows), strict=True):
                self._tokens.will_read(slice(int(start), int(start + length)))

    def close(self) -> None:
        """Ends the threads that fetch."""
        if isinstance(self._tokens, StreamedTokens):
            self._tokens.close()

    def micro_batch(self, rows: Positions) -> MicroBatch:
        """The sequences `rows` as one micro-batch; a negative row is an empty sequence (all padding)."""
        input_ids = np.zeros((len(rows), self.sequence_length), dtype=np.int64)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        positions = np.tile(np.arange(self.sequence_length, dtype=np.int64), (len(rows), 1))
        num_targets = num_tokens = 0
        (filled,) = np.nonzero(rows >= 0)
        starts, lengths = self._spans.of(rows[filled])
        for index, start, length in zip(filled.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            input_ids[index, :length] = self._tokens[start : start + length]
            labels[index, :length] = input_ids[index, :length]
            begins = self._begins(start, length)
            for begin in begins:
                labels[index, begin] = IGNORED_LABEL
                positions[index, begin:] = np.arange(self.sequence_length - begin)
            if self._learnt is not None:
                labels[index, :length][~self._learnt[start : start + length]] = IGNORED_LABEL
            num_targets += int(np.count_nonzero(labels[index, 1:length] != IGNORED_LABEL))
            num_tokens += length
        return MicroBatch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            None if self._document_ends is None else torch.from_numpy(positions),
            num_targets,
            num_tokens,
        )

    def _begins(self, start: int, length: int) -> Positions:
        """Where in the sequence of tokens [start, start + length) further documents begin, counted from its start."""
        ends = self._document_ends
        if ends is None:
            return np.zeros(0, dtype=np.int64)
        first, last = np.searchsorted(ends, [start + 1, start + length])
        return np.unique(np.asarray(ends[first:last], dtype=np.int64) - start)  # an empty document ends where one does


class _Spans(Protocol):
    """Where the sequences of a table lie in its tokens, in their order there."""

    def __len__(self) -> int: ...

    def of(self, rows: Positions) -> tuple[Positions, Positions]:
        """Starts and lengths of these sequences."""


class _PackedSpans:
    """All tokens cut every `length`; computed, since every rank would hold 16 bytes a sequence."""

    def __init__(self, num_tokens: int, length: int) -> None:
        self._num_tokens = num_tokens
        self._length = length

    def __len__(self) -> int:
        whole, tail = divmod(self._num_tokens, self._length)
        return whole + (tail >= _SHORTEST)

    def of(self, rows: Positions) -> tuple[Positions, Positions]:
        """See _Spans."""
        starts = rows * self._length
        return starts, np.minimum(self._num_tokens - starts, self._length)


class _DocumentSpans:
    """Documents cut every `length`, without pieces that are too short."""

    def __init__(self, ends: Positions, length: int) -> None:
        begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
        pieces = -(-(ends - begins) // length)
        first_piece = np.cumsum(pieces) - pieces
        number = np.arange(int(pieces.sum()), dtype=np.int64) - np.repeat(first_piece, pieces)
        starts = np.repeat(begins, pieces) + number * length
        lengths = np.minimum(np.repeat(ends, pieces) - starts, length)
        kept = lengths >= _SHORTEST
        self._starts, self._lengths = starts[kept], lengths[kept].astype(np.int32)

    def __len__(self) -> int:
        return len(self._starts)

    def of(self, rows: Positions) -> tuple[Positions, Positions]:
        """See _Spans."""
        return self._starts[rows], self._lengths[rows].astype(np.int64)


class _SomeSpans:
    """Those of `spans` that are kept."""

    def __init__(self, spans: _Spans, kept: npt.NDArray[np.bool_]) -> None:
        self._spans = spans
        self._rows = np.flatnonzero(kept)
        if len(kept) < 1 << 32:
            self._rows = self._rows.astype(np.uint32)

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, rows: Positions) -> tuple[Positions, Positions]:
        """See _Spans."""
        return self._spans.of(self._rows[rows].astype(np.int64))


def _with_targets(spans: _Spans, learnt: LearntTokens) -> npt.NDArray[np.bool_]:
    """Whether each sequence has a learnt token after its first."""
    kept = np.zeros(len(spans), dtype=bool)
    first = 0
    while first < len(kept):
        begins, lengths = spans.of(np.arange(first, min(first + _ROWS_AT_ONCE, len(kept))))
        # Sequences lie one after the other in the tokens, with gaps at most.
        offset, ends = int(begins[0]), begins + lengths
        count = max(1, int(np.searchsorted(ends, offset + _TOKENS_AT_ONCE, side="right")))
        marks = learnt[offset : int(ends[count - 1])]
        before = np.zeros(len(marks) + 1, dtype=np.int32)
        np.cumsum(marks, out=before[1:])
        kept[first : first + count] = before[ends[:count] - offset] > before[begins[:count] + 1 - offset]
        first += count
        beat()
    return kept


class _RankBlocks:
    """Which sequences of a global batch one rank reads: the rule at the top of this module."""

    def __init__(self, *, global_batch_size: int, micro_batch_size: int, rank: int, size: int) -> None:
        assert 0 <= rank < size
        if global_batch_size % (micro_batch_size * size):
            raise InputError(
                f"training.global_batch_size {global_batch_size} is no multiple of micro_batch_size {micro_batch_size} "
                f"x {size} data-parallel ranks"
            )
        self.global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._size = size
        self.num_micro_batches = global_batch_size // (micro_batch_size * size)

    def positions(self, first: int) -> Iterator[Positions]:
        """Positions of each micro-batch of the step whose global batch begins at position `first`."""
        for micro_step in range(self.num_micro_batches):
            begin = first + (micro_step * self._size + self._rank) * self._micro_batch_size
            yield np.arange(begin, begin + self._micro_batch_size, dtype=np.int64)


class BatchStream:
    """This rank's share of the endless training stream; its position is in the checkpoint."""

    def __init__(
        self,
        table: SequenceTable,
        *,
        dataset_digest: str,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        self._table = table
        self._blocks = _RankBlocks(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            rank=data_parallel_rank,
            size=data_parallel_size,
        )
        self._seed = seed
        self._shuffle = shuffle
        self.dataset_digest = dataset_digest
        self._permutations: dict[int, Permutation] = {}
        self._sequences_consumed = 0
        self._announced = 0

    @property
    def num_sequences(self) -> int:
        """Sequences in one epoch."""
        return len(self._table)

    @property
    def sequences_consumed(self) -> int:
        """The position: sequences that all ranks together have read."""
        return self._sequences_consumed

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next optimizer step: gradient_accumulation_steps of them."""
        self._announce()
        batches = [self._table.micro_batch(self._rows(p)) for p in self._blocks.positions(self._sequences_consumed)]
        self._sequences_consumed += self._blocks.global_batch_size
        return batches

    def _announce(self) -> None:
        """Tells the table what this step and the next ones read, each step once."""
        if not self._table.is_streamed:
            return
        first = max(self._announced, self._sequences_consumed)
        self._announced = self._sequences_consumed + (1 + STEPS_AHEAD) * self._blocks.global_batch_size
        for step in range(first, self._announced, self._blocks.global_batch_size):
            for positions in self._blocks.positions(step):
                self._table.will_read(self._rows(positions))

    def _rows(self, positions: Positions) -> Positions:
        epochs, offsets = np.divmod(positions, self.num_sequences)
        if not self._shuffle:
            return offsets
        rows = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = self._permutation(int(epoch))(offsets[in_epoch])
        return rows

    def _permutation(self, epoch: int) -> Permutation:
        if epoch not in self._permutations:
            self._permutations = {epoch: Permutation(self.num_sequences, self._seed, epoch)}
        return self._permutations[epoch]

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._table.close()

    def state_dict(self) -> dict[str, Any]:
        """The position and what it counts in: JSON values, the same on every rank."""
        return {
            "sequences_consumed": self._sequences_consumed,
            "dataset_digest": self.dataset_digest,
            "sequence_length": self._table.sequence_length,
            "num_sequences": self.num_sequences,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; InputError if it was counted over other data or in another order."""
        now = self.state_dict()
        causes = {
            "sequence_length": "data.sequence_length or data.packing",
            "seed": "training.seed",
            "shuffle": "data.shuffle",
            "num_sequences": "data.packing, the data, the tokenizer or what the image takes for text",
            "dataset_digest": "the data, the tokenizer or what the image takes for text",
        }
        for field, cause in causes.items():
            if state.get(field) != now[field]:
                raise InputError(
                    f"the checkpoint's data position can't be continued: {field} was {state.get(field)!r}, "
                    f"is {now[field]!r}; {cause} changed: restore it, or start anew with another checkpoint.destination"
                )
        self._sequences_consumed = self._announced = int(state["sequences_consumed"])


class ValidationStream:
    """The same global batches at every validation, in file order, each sequence at most once.

    The last batch is filled up with empty sequences (num_target_tokens 0), so that every rank makes the same number of
    forward passes: sharded engines communicate in each.
    """

    def __init__(
        self,
        table: SequenceTable,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        max_steps: int,
        dataset_digest: str,
    ) -> None:
        self._table = table
        self._blocks = _RankBlocks(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            rank=data_parallel_rank,
            size=data_parallel_size,
        )
        self.num_steps = min(max_steps, -(-len(table) // global_batch_size))
        """Global batches of one validation."""
        digest = hashlib.sha256(dataset_digest.encode()).hexdigest()[:16]
        self.samples = f"{min(self.num_steps * global_batch_size, len(table))} of {digest}"
        """What is validated on: values over the same may be compared."""
        self._step = 0

    def reset(self) -> None:
        """Begin again at the first batch."""
        self._step = 0

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next global batch; IndexError after `num_steps` (reset begins again)."""
        if self._step >= self.num_steps:
            raise IndexError(f"a validation has {self.num_steps} batches")
        first = self._step * self._blocks.global_batch_size
        self._step += 1
        return [
            self._table.micro_batch(np.where(positions < len(self._table), positions, -1))
            for positions in self._blocks.positions(first)
        ]

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """One whole validation from its first batch."""
        self.reset()
        while self._step < self.num_steps:
            yield self.next_step()
