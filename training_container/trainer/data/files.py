"""The files of a source, wherever they lie: listed in one order, opened, told apart when they change."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainer.speech import say
from trainyard.errors import InputError
from trainyard.spec.data_files import files_of, no_file, told_left_out
from trainyard.spec.job import DataSource


@dataclass(frozen=True)
class DataFile(ABC):
    """One file of a source."""

    where: str
    """Its path or URI, for messages."""
    size: int
    """Bytes."""
    version: str
    """Another one when the content changes, without reading it: modification time, or S3's ETag."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Its bytes, seekable; OSError when it can't be read."""

    @abstractmethod
    def head(self, size: int) -> bytes:
        """Its first bytes and no more, as many as it has; OSError when it can't be read."""

    @abstractmethod
    def is_unchanged(self) -> bool:
        """Whether it still is what was listed."""


@dataclass(frozen=True)
class LocalFile(DataFile):
    """A file of this machine, or of a file system mounted here."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> "LocalFile":
        """The file as it is now. Its place is absolute: a relative one names other files from another folder."""
        try:
            facts = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        return cls(str(path), facts.st_size, f"{path.resolve()} {facts.st_mtime_ns}", path)

    def open(self) -> BinaryIO:
        """See DataFile."""
        return self.path.open("rb")

    def head(self, size: int) -> bytes:
        """See DataFile."""
        with self.open() as handle:
            return handle.read(size)

    def is_unchanged(self) -> bool:
        """See DataFile."""
        with contextlib.suppress(InputError):  # it is gone
            return LocalFile.at(self.path) == self
        return False


def local_files(source: DataSource) -> list[Path]:
    """The paths of a source on this machine, in order; InputError where there are none."""
    if "://" in source.path:
        raise InputError(
            f"data path {source.path}: the trainer reads local files; launch the job (which brings them as a channel), "
            "copy them here first, or read them from S3 with data.streaming: true"
        )
    root = Path(source.path)
    files: list[Path] = []
    left_out: list[str] = []
    try:
        if not (root.is_file() or root.is_dir()):
            raise InputError(f"data path {source.path}: no such file or folder")
        for path, why in files_of(source):
            if why is None:
                files.append(path)
            else:
                left_out.append(f"{path.relative_to(root).as_posix()} ({why})")
    except OSError as error:
        raise _unreadable(root, error) from None
    if not files:
        raise no_file(f"data path {source.path}", source, left_out)
    if left_out:
        warn(source, left_out)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def warn(source: DataSource, left_out: Sequence[str]) -> None:
    """A line of the first rank's, on what of a source is not read and why: all see the same."""
    if int(os.environ.get("RANK", "0")) == 0:
        say(f"warning: data path {source.path}: without {told_left_out(left_out)}")


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"data path {path}: can't be read: {error.strerror or error}")
