"""Files of a bucket, read where they lie: by ranges, several at once, each checked and tried again.

`list_s3` gives a source's objects as `S3File`s. Read from front to back (`open`), a file is fetched a few parts ahead.
Read at random (`PartCache`), it is fetched in small aligned parts, which a bounded file on the local disk keeps;
whoever knows what it will read next says so (`will_read`) and finds it there. Every request names the object's ETag, so
that what was listed is what is read.
"""

import io
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO

from trainer.checkpoint.destination import (
    RETRY_DELAYS_SECONDS,
    DestinationError,
    MissingFileError,
    s3_client,
    s3_errors,
)
from trainer.data.files import DataFile, warn
from trainer.speech import say
from trainyard.errors import InputError, JobFailedError
from trainyard.spec.data_files import NEARLY, is_nearly_wanted, is_wanted, no_file
from trainyard.spec.job import DataSource

FRONT_TO_BACK_BYTES = 8 << 20
"""A part of a file that is read from front to back: large, since all of it is wanted."""
PARTS_AHEAD = 4
AT_RANDOM_BYTES = 256 << 10
"""A part of a file that is read at random: a sequence of 4,096 tokens is 8 or 16 KiB, an image some 100."""
_NUM_THREADS = 16
_MOST_UNDER_WAY = 2 * _NUM_THREADS
"""Announced parts that are begun and not there yet, at most: enough for all threads, and what is wanted at once doesn't
wait behind more."""


@dataclass(frozen=True)
class S3File(DataFile):
    """An object, as it was when it was listed; `version` is its ETag."""

    bucket: str
    key: str
    client: Any = field(repr=False, compare=False, hash=False)
    retry_delays_seconds: tuple[float, ...] = field(default=RETRY_DELAYS_SECONDS, compare=False, hash=False)

    def open(self) -> BinaryIO:
        """See DataFile: fetched some parts ahead of the reader."""
        return io.BufferedReader(_FrontToBack(self), buffer_size=1 << 20)

    def head(self, size: int) -> bytes:
        """See DataFile: one request."""
        return self.read(0, min(size, self.size)) if self.size else b""

    def is_unchanged(self) -> bool:
        """See DataFile: every request has asked for this version."""
        return True

    def read(self, offset: int, size: int) -> bytes:
        """These bytes; InputError if the object changed, JobFailedError if it can't be had after several tries."""
        for delay in self.retry_delays_seconds:
            try:
                return self._read_once(offset, size)
            except DestinationError as error:
                if error.permanent:
                    raise InputError(str(error)) from None
                say(f"data read failed, next try in {delay:g} s: {error}")
            time.sleep(delay)
        try:
            return self._read_once(offset, size)
        except DestinationError as error:
            raise JobFailedError(
                f"{error}; tried {1 + len(self.retry_delays_seconds)} times; start the job again: it continues from its"
                " newest checkpoint"
            ) from None

    def _read_once(self, offset: int, size: int) -> bytes:
        what = f"can't read bytes {offset} to {offset + size} of {self.where}"
        try:
            with s3_errors(what):
                answer = self.client.get_object(
                    Bucket=self.bucket, Key=self.key, Range=f"bytes={offset}-{offset + size - 1}", IfMatch=self.version
                )
                content: bytes = answer["Body"].read()
        except MissingFileError as error:
            raise InputError(f"{error}; it was there when the job began") from None
        except DestinationError as error:
            if str(error).endswith(("PreconditionFailed", ": 412", "InvalidRange")):
                raise InputError(f"{self.where}: changed since the job began; put back what was there") from None
            raise
        if len(content) != size:
            raise DestinationError(f"{what}: {len(content)} bytes came", permanent=False)
        return content


def list_s3(source: DataSource) -> list[DataFile]:
    """The objects of a source: one, or all of its format below a prefix, ordered by key."""
    bucket, _, key = source.path.removeprefix("s3://").partition("/")
    key = key.rstrip("/")
    if not bucket or not key:
        raise InputError(f"data path {source.path}: must be s3://BUCKET/PATH of a file or a folder")
    client = s3_client()
    try:
        with s3_errors(f"can't list {source.path}"):
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
            objects = [entry for page in pages for entry in page.get("Contents", ())]
    except (DestinationError, MissingFileError) as error:
        raise InputError(f"data path {source.path}: {error}") from None
    exact = [entry for entry in objects if entry["Key"] == key]
    inside = {entry["Key"].removeprefix(f"{key}/"): entry for entry in objects if entry["Key"].startswith(f"{key}/")}
    below = [entry for name, entry in inside.items() if entry["Size"] and is_wanted(name, source)]
    left_out = [f"{name} ({NEARLY})" for name in inside if is_nearly_wanted(name, source)]
    if not (exact or below):
        raise no_file(f"data path {source.path}", source, left_out)
    if left_out and not exact:
        warn(source, left_out)
    return [
        S3File(
            where=f"s3://{bucket}/{entry['Key']}",
            size=int(entry["Size"]),
            version=str(entry["ETag"]),
            bucket=bucket,
            key=entry["Key"],
            client=client,
        )
        for entry in (exact or sorted(below, key=lambda entry: str(entry["Key"])))
    ]


class _FrontToBack(io.RawIOBase):
    """A seekable stream that fetches the next parts while one is read."""

    def __init__(self, file: S3File) -> None:
        self._file = file
        self._position = 0
        self._parts: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._threads = ThreadPoolExecutor(PARTS_AHEAD, thread_name_prefix="s3-ahead")
        self._last_part = -2  # none, and part 0 doesn't go on from it

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._file.size - self._position)
        if size <= 0:
            return 0
        part, offset = divmod(self._position, FRONT_TO_BACK_BYTES)
        content = self._part(part)[offset : offset + size]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _part(self, part: int) -> bytes:
        # A reader that jumps (to a parquet footer, say) isn't read ahead for.
        goes_on = part in (self._last_part, self._last_part + 1)
        self._last_part = part
        for wanted in range(part, part + (PARTS_AHEAD if goes_on else 1)):
            begin = wanted * FRONT_TO_BACK_BYTES
            if begin < self._file.size and wanted not in self._parts:
                size = min(FRONT_TO_BACK_BYTES, self._file.size - begin)
                self._parts[wanted] = self._threads.submit(self._file.read, begin, size)
        while len(self._parts) > PARTS_AHEAD + 1:
            unwanted = next(number for number in self._parts if not part <= number < part + PARTS_AHEAD)
            self._parts.pop(unwanted).cancel()
        return self._parts[part].result()

    def close(self) -> None:
        if not self.closed:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._parts.clear()
        super().close()


def _parts(offset: int, size: int) -> range:
    """The aligned parts that a stretch touches."""
    return range(offset // AT_RANDOM_BYTES, -(-(offset + size) // AT_RANDOM_BYTES))


class PartCache:
    """Parts of files on the local disk, at most `max_bytes` of them: the least recently read one makes room.

    They lie in one file without a name, which is gone with the process, however it ends. Safe for several threads.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._disk = tempfile.TemporaryFile(dir=folder, prefix="parts-", buffering=0)  # noqa: SIM115  (kept open)
        self._folder = folder
        self._told_that_full = False
        self._num_slots = max(4, max_bytes // AT_RANDOM_BYTES)
        self._slots: OrderedDict[tuple[S3File, int], int] = OrderedDict()
        self._free_slots: list[int] = []
        """Slots below the highest one in use that hold nothing: a write to them failed."""
        self._under_way: dict[tuple[S3File, int], Future[bytes]] = {}
        self._wanted: OrderedDict[tuple[S3File, int], None] = OrderedDict()
        """Announced and not begun, in the order in which they will be read."""
        self._ahead: set[tuple[S3File, int]] = set()
        """Announced, begun, and not read yet."""
        self._is_beginning = False
        self._lock = RLock()  # a part that is there at once is kept in the thread that asked for it
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="s3-parts")
        self.num_fetched = 0
        """Parts that came from S3 so far."""

    def read(self, file: S3File, offset: int, size: int) -> bytes:
        """These bytes: what isn't there is fetched now, all missing parts at once."""
        pending: list[tuple[bytes | Future[bytes], slice]] = []
        with self._lock:
            for part in _parts(offset, size):
                begin = max(0, offset - part * AT_RANDOM_BYTES)
                stretch = slice(begin, min(AT_RANDOM_BYTES, offset + size - part * AT_RANDOM_BYTES))
                self._wanted.pop((file, part), None)
                self._ahead.discard((file, part))
                pending.append((self._kept((file, part), stretch) or self._begin((file, part)), stretch))
            self._begin_wanted()
        return b"".join(part if isinstance(part, bytes) else part.result()[where] for part, where in pending)

    def will_read(self, file: S3File, offset: int, size: int) -> None:
        """Fetches these bytes in the background, after what was announced before."""
        with self._lock:
            for part in _parts(offset, size):
                if (file, part) in self._slots:
                    self._slots.move_to_end((file, part))
                elif (file, part) not in self._under_way:
                    self._wanted.setdefault((file, part))
            self._begin_wanted()

    def _begin_wanted(self) -> None:
        """Begins what was announced, as far as threads and slots go. The lock is held.

        Half of the slots: between a part's arrival and its turn no more are read, and so touched later, than that.
        """
        if self._is_beginning:  # a part that is there at once comes by here again
            return
        self._is_beginning = True
        while self._wanted and len(self._under_way) < _MOST_UNDER_WAY and len(self._ahead) < self._num_slots // 2:
            part, _ = self._wanted.popitem(last=False)
            self._ahead.add(part)
            self._begin(part)
        self._is_beginning = False

    def _kept(self, part: tuple[S3File, int], stretch: slice) -> bytes | None:
        """These bytes of a part that is on the disk. The lock is held: another thread may need the room."""
        slot = self._slots.get(part)
        if slot is None:
            return None
        self._slots.move_to_end(part)
        return os.pread(self._disk.fileno(), stretch.stop - stretch.start, slot * AT_RANDOM_BYTES + stretch.start)

    def _begin(self, part: tuple[S3File, int]) -> Future[bytes]:
        """The part's fetching. The lock is held."""
        if part not in self._under_way:
            file, number = part
            fetched = self._threads.submit(file.read, number * AT_RANDOM_BYTES, self._length(part))
            self._under_way[part] = fetched
            fetched.add_done_callback(self._keeper(part))
            return fetched
        return self._under_way[part]

    def _keeper(self, part: tuple[S3File, int]) -> Callable[[Future[bytes]], None]:
        def keep(fetched: Future[bytes]) -> None:
            with self._lock:
                self._under_way.pop(part, None)
                if not fetched.cancelled() and fetched.exception() is None:
                    self.num_fetched += 1
                    self._write(part, fetched.result())
                else:
                    self._ahead.discard(part)
                self._begin_wanted()

        return keep

    def _write(self, part: tuple[S3File, int], content: bytes) -> None:
        """Keeps a part, or on a disk that is full does without. The lock is held."""
        slot = self._free_slot()
        try:
            is_whole = os.pwrite(self._disk.fileno(), content, slot * AT_RANDOM_BYTES) == len(content)
        except OSError:
            is_whole = False
        if is_whole:
            self._slots[part] = slot
        else:
            self._free_slots.append(slot)
            self._ahead.discard(part)
            if not self._told_that_full:
                say(f"data.stream_cache_gib: no room left on the disk of {self._folder}; parts are read from S3 again")
            self._told_that_full = True

    def _free_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        if len(self._slots) >= self._num_slots:
            unwanted, slot = self._slots.popitem(last=False)
            self._ahead.discard(unwanted)
            return slot
        return len(self._slots)

    @staticmethod
    def _length(part: tuple[S3File, int]) -> int:
        file, number = part
        return min(AT_RANDOM_BYTES, file.size - number * AT_RANDOM_BYTES)

    def close(self) -> None:
        """Ends the threads; what is under way is waited for, the rest dropped."""
        with self._lock:
            self._wanted.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._disk.close()
