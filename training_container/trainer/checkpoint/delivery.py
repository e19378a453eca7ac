"""What ranks wrote, brought to the destination and committed there, and what retention no longer keeps removed."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint.destination import Destination, DestinationError, MissingFileError, sync
from trainer.checkpoint.manifest import (
    COMMITTED,
    FOLDER,
    MANIFEST,
    Manifest,
    ManifestError,
    NewerFormatError,
    ShardFile,
    commit_marker,
    committed_manifest,
    step_folder,
    step_of,
)
from trainer.checkpoint.restore import Retry
from trainyard.kept_room import FULL
from trainyard.spec.checkpoint_names import problem_with_sizes
from trainyard.spec.retention import Retention

_READ_BACK_BYTES = 16 << 20

Attachment = tuple[str, Path, int]
"""Name at the destination, local file, and how much of it: the file may grow meanwhile."""


@dataclass(frozen=True)
class Promise:
    """A save that every rank has written, before it is committed anywhere."""

    manifest: Manifest
    content: bytes
    """The manifest's bytes."""
    index: bytes
    """DCP's `.metadata`."""


class Delivery:
    """One job's way to its destination. Methods raise DestinationError, MissingFileError and OSError."""

    def __init__(
        self,
        destination: Destination,
        *,
        retention: Retention,
        retry: Retry,
        report: Callable[[str], None],
        staging: Path,
        bad_steps: set[int],
    ) -> None:
        """`staging`: this rank's scratch. `bad_steps`: those known to be altered; one that goes is taken out."""
        self._destination, self._retention = destination, retention
        self._retry, self._report = retry, report
        self._staging, self._bad_steps = staging, bad_steps
        self._looked_at: dict[int, _Look] = {}
        """By step, of older checkpoints (first rank)."""

    def upload(self, name: str, path: Path) -> None:
        """Copy a file to `<destination>/<name>`."""
        self._retry(f"upload of {name}", lambda: self._destination.put_file(name, path))

    def upload_files(self, step: int, files: Sequence[ShardFile], folder: Path) -> None:
        """Copy a rank's files of a step there from `folder`."""
        for file in files:
            self.upload(f"{step_folder(step)}/{file.name}", folder / file.name)

    def read_back(self, step: int, files: Sequence[ShardFile]) -> None:
        """DestinationError unless each file is there as it was sent, or written in place."""
        for file in files:
            name = f"{step_folder(step)}/{file.name}"
            if (path := self._destination.folder(name)) is not None:
                _forget(path)
            digest = hashlib.sha256()
            for start in range(0, file.num_bytes, _READ_BACK_BYTES):
                block = self._retry("reading back", partial(self._read_range, name, start))
                digest.update(block)
            if digest.hexdigest() != file.sha256:
                raise DestinationError(f"{file.name} is not what was sent (its SHA-256 differs)", permanent=True)

    def _read_range(self, name: str, start: int) -> bytes:
        return self._destination.get_range(name, start=start, num_bytes=_READ_BACK_BYTES)

    def commit(self, step: int, promise: Promise, attachments: Sequence[Attachment], written_to: Path) -> None:
        """The first rank's last act: index, attachments, manifest, a look at what is there, marker.

        `written_to`: the folder where the ranks wrote, the index among it.
        """
        folder = step_folder(step)
        in_place = self._destination.folder(folder)
        if written_to != in_place:
            self._retry("index", lambda: self._destination.put_bytes(f"{folder}/.metadata", promise.index))
        if in_place is not None:
            sync(in_place)
        self._attach(attachments)
        self._retry("manifest", lambda: self._destination.put_bytes(f"{folder}/{MANIFEST}", promise.content))
        self._check_presence(folder, promise.manifest.files)
        marker = commit_marker(step, promise.content)
        self._retry("commit", lambda: self._destination.put_bytes(f"{folder}/{COMMITTED}", marker))
        self._looked_at[step] = self._look_of(promise.manifest)

    def complete(self, step: int, more: Mapping[str, Any]) -> None:
        """Put `more` into the `extra` of a committed step's manifest (first rank). ManifestError if it is not whole.

        The marker first, which allows both manifests: whenever this is cut short, the checkpoint is committed.
        """
        folder = step_folder(step)
        marker, content = (
            self._retry("reading", partial(self._destination.get_bytes, f"{folder}/{name}"))
            for name in (COMMITTED, MANIFEST)
        )
        completed = committed_manifest(step, content, marker).completed(more).to_bytes()
        marker = commit_marker(step, completed, replaced=content)
        self._retry("commit", lambda: self._destination.put_bytes(f"{folder}/{COMMITTED}", marker))
        self._retry("manifest", lambda: self._destination.put_bytes(f"{folder}/{MANIFEST}", completed))
        self._looked_at.pop(step, None)

    def _attach(self, attachments: Sequence[Attachment]) -> None:
        for name, path, size in attachments:
            if self.is_there(name, path):
                continue
            with beginning(path, size, self._staging / f"attachment-{name}") as copy:
                self.upload(name, copy)

    def is_there(self, name: str, path: Path) -> bool:
        """Whether `path` itself is the destination's file of that name."""
        root = self._destination.folder("")
        return root is not None and (root / name).exists() and (root / name).samefile(path)

    def _check_presence(self, folder: str, files: Sequence[ShardFile]) -> None:
        there = self._retry("check", lambda: self._destination.sizes(folder))
        for file in files:
            size = there.get(f"{folder}/{file.name}")
            if size != file.num_bytes:
                found = "is not there" if size is None else f"has {size} bytes there, {file.num_bytes} were written"
                hint = "; is the folder shared by all hosts?" if self._destination.folder("") is not None else ""
                raise DestinationError(f"{file.name} {found}{hint}", permanent=True)

    def remove(self, step: int) -> None:
        """Remove a step's files, its promise first."""
        self._looked_at.pop(step, None)
        folder = step_folder(step)
        names = self._destination.sizes(folder)
        for first in (f"{folder}/{COMMITTED}", f"{folder}/{MANIFEST}"):
            if first in names:
                self._destination.delete([first])
                del names[first]
        if names:
            self._destination.delete(names)
        if (place := self._destination.folder(folder)) is not None:
            _remove_rest(place)

    def newest(self) -> int:
        """The newest step that its manifest says is there, or that can't be read now; 0: there is none (first rank)."""
        there = _by_step(self._retry("listing", lambda: self._destination.sizes(FOLDER)))
        for step in sorted((step for step, sizes in there.items() if COMMITTED in sizes), reverse=True):
            look = self._look(step)
            if look.is_unknown or look.is_whole(there[step]):
                return step
        return 0

    def attempt_of(self, step: int) -> int | None:
        """Which start saved the step, where its manifest says so and can be read (first rank)."""
        return self._look(step).attempt

    def prune(self, newest: int) -> None:
        """Remove what retention no longer keeps when `newest` is committed, or about to be (first rank)."""
        error = attempted(lambda: self._remove_expired(newest))
        if error is not None:
            self._report(f"checkpoint retention failed, will try again after the next save: {error}")

    def _remove_expired(self, newest: int) -> None:
        there = _by_step(self._destination.sizes(FOLDER))
        older = {step for step in there if step < newest}
        is_committed = COMMITTED in there.get(newest, {})
        good, unknown = self._good({step: there[step] for step in older - self._bad_steps}, is_committed=is_committed)
        is_valued = self._retention.keep_best is not None and is_committed
        # `newest` is one of those kept. What is not good is of no use to anyone: an interrupted or a corrupt one.
        values = {**good, newest: self._look(newest).value if is_valued else None}
        samples = {step: look.samples for step, look in self._looked_at.items()}
        kept = self._retention.kept(values, samples) | unknown
        if not is_committed and good:
            kept.add(max(good))
        for step in sorted(older - kept):
            # A folder that was moved by hand may be what a good step's link leads to.
            if not self._destination.is_behind(step_folder(step), map(step_folder, kept)):
                self.remove(step)
                self._bad_steps.discard(step)

    def _good(
        self, there: Mapping[int, Mapping[str, int]], *, is_committed: bool
    ) -> tuple[dict[int, float | None], set[int]]:
        """Those that count as good, with their values of keep_best's metric, and those of which that can't be told.

        By markers alone a folder would do that was copied or linked under another step's name, and then the one that it
        is of would go. So manifests are read: of as many of the newest as have to be good, of all where the best stay.
        """
        num_needed = max(1, self._retention.keep_last - is_committed)
        good: dict[int, float | None] = {}
        unknown = set()
        for step, sizes in sorted(there.items(), reverse=True):
            if not {COMMITTED, MANIFEST} <= sizes.keys():
                continue
            look = _Look({})
            if len(good) < num_needed or self._retention.keep_best is not None:
                look = self._look(step)
            if look.is_unknown:
                unknown.add(step)
            elif look.is_whole(sizes):
                good[step] = look.value
        return good, unknown

    def _look(self, step: int) -> "_Look":
        """What a step's marker and manifest say; read once."""
        look = self._looked_at.get(step) or self._newly_looked_at(step)
        if not look.is_unknown:
            self._looked_at[step] = look
        return look

    def _newly_looked_at(self, step: int) -> "_Look":
        folder = step_folder(step)
        try:
            content, marker = (
                self._retry("reading", partial(self._destination.get_bytes, f"{folder}/{name}"))
                for name in (MANIFEST, COMMITTED)
            )
            manifest = committed_manifest(step, content, marker)
        except (NewerFormatError, DestinationError):  # it may be whole
            return _Look(None, is_unknown=True)
        except (ManifestError, MissingFileError):  # one that can't be read must not keep the others for good
            return _Look(None)
        return self._look_of(manifest)

    def _look_of(self, manifest: Manifest) -> "_Look":
        sizes = {file.name: file.num_bytes for file in manifest.files}
        value, samples = self._retention.value_of(manifest.extra), self._retention.samples_of(manifest.extra)
        return _Look(sizes, value, samples, manifest.attempt)


@dataclass(frozen=True)
class _Look:
    """What is known of a committed checkpoint by its manifest."""

    sizes: Mapping[str, int] | None
    """Of its files; None: its marker and manifest promise nothing of this step."""
    value: float | None = None
    """Of keep_best's metric."""
    samples: str | None = None
    """What that was measured on, where the checkpoint says so."""
    attempt: int | None = None
    """Which start saved it, where it says so."""
    is_unknown: bool = False
    """It can't be read now, or not by this trainer: neither counted on nor removed."""

    def is_whole(self, there: Mapping[str, int]) -> bool:
        """Whether these files, name -> bytes, are what it promises."""
        return self.sizes is not None and problem_with_sizes(self.sizes, there) is None


def _by_step(names: Mapping[str, int]) -> dict[int, dict[str, int]]:
    """Step -> name within its folder -> bytes. Without links whose disk is away: they may lead to what is to stay."""
    found: dict[int, dict[str, int]] = {}
    for name, size in names.items():
        step = None if name.endswith("/") else step_of(name)
        if step is not None:
            found.setdefault(step, {})[name.removeprefix(f"{step_folder(step)}/")] = size
    return found


def _remove_rest(place: Path) -> None:
    """What no listing of a step's files has: folders, that itself, and what is no file (a pipe, where who writes would
    wait for a reader). In the place of a file they would keep the step from being saved."""
    if not place.is_symlink():
        for at, _, names in os.walk(place, topdown=False):
            for path in (Path(at, name) for name in names):
                with suppress(OSError):  # what can't be looked at may be a file
                    mode = path.lstat().st_mode
                    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                        path.unlink()
            with suppress(OSError):  # one that holds something
                Path(at).rmdir()


def attempted(action: Callable[[], Any]) -> str | None:
    """What went wrong, in one line, or None."""
    try:
        action()
    except (DestinationError, MissingFileError) as error:
        return str(error)
    except OSError as error:
        return f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    except Exception as error:  # torch's writer wraps what went wrong in kinds of its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def _forget(path: Path) -> None:
    """Have the page cache give up a file that is on the disk: who reads it then reads what the disk has."""
    with suppress(OSError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def beginning(source: Path, num_bytes: int, copy: Path) -> Iterator[Path]:
    """So many bytes of a file that grows: in `copy`, or in memory where that disk is full, as the other may not be."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy_beginning(source, copy, num_bytes)
    except OSError as error:
        if error.errno not in FULL:
            raise
    else:
        yield copy
        return
    copy.unlink(missing_ok=True)  # half of one would keep the disk's last free bytes
    descriptor = os.memfd_create(copy.name)
    try:
        in_memory = Path(f"/proc/self/fd/{descriptor}")
        _copy_beginning(source, in_memory, num_bytes)
        yield in_memory
    finally:
        os.close(descriptor)


def _copy_beginning(source: Path, target: Path, num_bytes: int) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        left = num_bytes
        while left > 0 and (block := reader.read(min(left, 1 << 20))):
            writer.write(block)
            left -= len(block)
