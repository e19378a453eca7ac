"""Samples of WebDataset shards as a training stream: read and decoded by threads, one step ahead of the training.

The order is that of `trainer.data.stream`, so positions, resumes and other data-parallel sizes work alike. A sample
that can't be learnt from is counted and named, and the next one of the shards stands in for it: at the same place on
every layout, and no batch is ever short.
"""

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from trainer.data import BatchStream, ValidationStream
from trainer.data.bad_records import BadRecordError, BadRecords
from trainer.data.s3_files import PartCache
from trainer.data.stream import Positions
from trainer.data.webdataset import ShardIndex
from trainer.speech import say
from trainer.tasks.images import IMAGE_EXTENSIONS
from trainyard.errors import InputError
from trainyard.spec.job import DataSource

_LOOKED_AT_FIRST = 32
"""Samples that are read before the model is built: a wrong data set is wrong in its first ones."""
_NUM_SHOWN = 8


class SampleTable(ABC):
    """The samples of some sources, numbered in the order of the sources and their shards."""

    sequence_length = 1
    """Part of what a position counts in (`BatchStream.state_dict`)."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        *,
        cache_dir: Path,
        max_bad_records: int,
        where: str,
        parts: PartCache | None = None,
    ) -> None:
        """`where`: the field, for messages; `parts`: reads shards in S3. InputError names a source it can't read."""
        self._parts = parts
        self._indices = [ShardIndex.open(source, cache_dir, parts=parts) for source in sources]
        self._ends = np.cumsum([len(index) for index in self._indices])
        self.where = where
        self.bad = BadRecords(limit=max_bad_records, where=where)
        self.bad_rows: set[int] = set()
        """Those that were met; some of them by threads that read ahead of what is ever learnt from."""
        self.left_out: set[int] = set()
        """Those in whose place others were learnt from, or validated on."""
        self._lock = Lock()
        found = {extension for index in self._indices for extension in index.extensions}
        if not found & set(IMAGE_EXTENSIONS):
            more = f" and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
            raise InputError(
                f"{where}: no member of the shards is an image ({', '.join(IMAGE_EXTENSIONS)}), they hold:"
                f" {', '.join(sorted(found)[:_NUM_SHOWN]) or 'nothing'}{more}"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def close(self) -> None:
        """Ends the threads that fetch."""
        if self._parts is not None:
            self._parts.close()

    @property
    def digest(self) -> str:
        """Of all shards' keys and sizes, in order."""
        return "-".join(index.digest[:16] for index in self._indices)

    def check_first(self) -> None:
        """Reads the first few samples as training will; InputError when more of them are bad than may be.

        Every rank does, and the first one alone says which are bad.
        """
        for row in range(min(len(self), _LOOKED_AT_FIRST)):
            self._sample_or_none(row, row, tells=int(os.environ.get("RANK", "0")) == 0)

    def sample(self, row: int, position: int) -> Any:
        """Sample `row`, or where that is bad the next good one, as `collate` takes it; safe from several threads.

        `position`: the place in the global order of all epochs, for what is drawn at random. A negative row is an
        empty sample.
        """
        if row < 0:
            return None
        for offset in range(len(self)):
            found = self._sample_or_none((row + offset) % len(self), position)
            if found is not None:
                return found
        raise InputError(f"{self.where}: no sample can be learnt from; the first: {'; '.join(self.bad.named)}")

    def used(self, rows: Positions) -> None:
        """Samples were read for the batch that comes now: notes those that are left out of it."""
        for row in rows[rows >= 0].tolist():
            following = ((row + offset) % len(self) for offset in range(len(self)))
            self.left_out.update(itertools.takewhile(self.bad_rows.__contains__, following))

    def will_read(self, rows: Positions) -> None:
        """Fetches samples that lie in S3 in the background: more of them at once than there are decoding threads."""
        for row in rows[rows >= 0] if self._parts is not None else ():
            index, number = self._place(int(row))
            index.will_read(number)

    def _place(self, row: int) -> tuple[ShardIndex, int]:
        """The source's index, and the sample's number in it."""
        source = int(np.searchsorted(self._ends, row, side="right"))
        return self._indices[source], row - int(self._ends[source]) + len(self._indices[source])

    def _sample_or_none(self, row: int, position: int, *, tells: bool = True) -> Any:
        if row in self.bad_rows:
            return None
        index, number = self._place(row)
        try:
            return self.read(index.read_sample(number), position)
        except BadRecordError as error:
            with self._lock:
                if row not in self.bad_rows:
                    self.bad_rows.add(row)
                    num_named = len(self.bad.named)
                    self.bad.add(lambda: index.place(number), str(error))
                    if tells and len(self.bad.named) > num_named:
                        say(f"{self.where} bad record left out: {self.bad.named[-1]}")
            return None

    @abstractmethod
    def read(self, members: dict[str, bytes], position: int) -> Any:
        """One sample out of its members; BadRecordError says why it can't be learnt from."""

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Any:
        """A micro-batch of what `read` gave; None is an empty sample, without targets."""


def image_of(members: dict[str, bytes]) -> bytes:
    """The sample's image; BadRecordError where it has none."""
    for extension in IMAGE_EXTENSIONS:
        if extension in members:
            return members[extension]
    raise BadRecordError(f"has no image, only {', '.join(sorted(members))}")


class _Pool:
    """Threads that read samples; Pillow and file reads let go of the interpreter while they work."""

    def __init__(self, table: SampleTable, num_threads: int) -> None:
        self._table = table
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")

    def begin(self, rows: Positions, positions: Positions) -> "_Reading":
        """Starts reading one micro-batch."""
        self._table.will_read(rows)
        futures = [
            self._threads.submit(self._table.sample, int(row), int(position))
            for row, position in zip(rows, positions, strict=True)
        ]
        return _Reading(rows, futures)

    def finish(self, reading: "_Reading") -> Any:
        """The micro-batch, once all of it is there."""
        samples = [future.result() for future in reading.futures]
        self._table.used(reading.rows)
        return self._table.collate(samples)

    def close(self) -> None:
        """Ends the threads; what was not begun is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._table.close()


@dataclass(frozen=True)
class _Reading:
    """A micro-batch that is being read."""

    rows: Positions
    futures: Sequence[Future[Any]]


class SampleStream(BatchStream):
    """This rank's share of the endless training stream of samples."""

    def __init__(self, table: SampleTable, *, num_threads: int, **settings: Any) -> None:
        """`settings`: BatchStream's."""
        super().__init__(table, **settings)  # type: ignore[arg-type]  # of the table it needs length and name alone
        self._pool = _Pool(table, num_threads)
        self._ahead: dict[int, list[_Reading]] = {}

    def next_step(self) -> list[Any]:
        """See BatchStream. What was read ahead is not consumed: the position is exact at every checkpoint."""
        first = self._sequences_consumed
        micro_batches = self._ahead.pop(first, None) or self._begin(first)
        following = first + self._blocks.global_batch_size
        self._ahead = {following: self._begin(following)}
        batches = [self._pool.finish(reading) for reading in micro_batches]
        self._sequences_consumed = following
        return batches

    def _begin(self, first: int) -> list[_Reading]:
        return [self._pool.begin(self._rows(positions), positions) for positions in self._blocks.positions(first)]

    def close(self) -> None:
        """Ends the threads."""
        self._pool.close()


class SampleValidation(ValidationStream):
    """The same samples at every validation, in the order of the shards."""

    def __init__(self, table: SampleTable, *, num_threads: int, **settings: Any) -> None:
        """`settings`: ValidationStream's."""
        super().__init__(table, **settings)  # type: ignore[arg-type]  # of the table it needs the length alone
        self._num_samples = len(table)
        self._pool = _Pool(table, num_threads)

    def __iter__(self) -> Iterator[list[Any]]:
        """One whole validation; the next batch is read while one is used."""
        ahead = [self._begin(step) for step in range(min(1, self.num_steps))]
        for step in range(self.num_steps):
            if step + 1 < self.num_steps:
                ahead.append(self._begin(step + 1))
            yield [self._pool.finish(reading) for reading in ahead.pop(0)]

    def _begin(self, step: int) -> list[_Reading]:
        return [
            self._pool.begin(np.where(positions < self._num_samples, positions, -1), positions)
            for positions in self._blocks.positions(step * self._blocks.global_batch_size)
        ]

    def close(self) -> None:
        """Ends the threads."""
        self._pool.close()
