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
from trainyard.spec.job import DataSource

SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".jsonl.gz", ".json.gz"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin"),
    "webdataset": (".tar",),
}
"""What the names of a folder's files end in, by format; any name for text."""

_PACKINGS = (".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip")

_NUM_SHOWN = 4


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
    try:
        if root.is_file():
            return [root]
        if not root.is_dir():
            raise InputError(f"data path {source.path}: no such file or folder")
        files, left_out = _below(root, source)
    except OSError as error:
        raise _unreadable(root, error) from None
    if left_out:
        warn(source, left_out)
    if not files:
        raise no_file(source)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _below(root: Path, source: DataSource) -> tuple[list[Path], list[str]]:
    """(the files of a folder, what is left out of it and why), hidden ones apart. Links to folders are not followed:
    what they lead to may be there already."""
    files: list[Path] = []
    left_out: list[str] = []

    def note(path: Path, why: str) -> None:
        left_out.append(f"{path.relative_to(root).as_posix()} ({why})")

    def unread(error: OSError) -> None:
        if Path(error.filename) == root:
            raise error
        note(Path(error.filename), error.strerror or "can't be read")

    for folder, names, found in os.walk(root, onerror=unread):
        names[:] = [name for name in names if not name.startswith(".")]
        for path in (Path(folder, name) for name in names):
            if path.is_symlink():
                note(path, "a link to a folder, which is not followed")
        for path in (Path(folder, name) for name in found):
            if not is_wanted(own := path.relative_to(root).as_posix(), source):
                if is_nearly_wanted(own, source):
                    note(path, NEARLY)
                continue
            try:
                if path.is_file():
                    files.append(path)
                elif path.is_symlink():
                    note(path, "a link to nothing")
            except OSError as error:
                note(path, error.strerror or "can't be read")
    return files, left_out


def warn(source: DataSource, left_out: Sequence[str]) -> None:
    """A line of the first rank's, on what of a source is not read and why: all see the same."""
    if int(os.environ.get("RANK", "0")) == 0:
        more = f" and {len(left_out) - _NUM_SHOWN} more" if len(left_out) > _NUM_SHOWN else ""
        say(f"warning: data path {source.path}: without {', '.join(sorted(left_out)[:_NUM_SHOWN])}{more}")


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"data path {path}: can't be read: {error.strerror or error}")


def is_wanted(name: str, source: DataSource) -> bool:
    """Whether a file of a folder, by its path below it, belongs to the source: not hidden, and of its format."""
    hidden = any(part.startswith(".") for part in name.split("/"))
    return not hidden and name.endswith(SUFFIXES.get(source.format, ""))


NEARLY = "packed in a way that is not read, or its name ends in capitals"
"""Why what `is_nearly_wanted` is left out."""


def is_nearly_wanted(name: str, source: DataSource) -> bool:
    """Whether a file that isn't wanted would be, unpacked or with a name in small letters."""
    plain = name.lower().replace(".tgz", ".tar.gz")
    for packing in _PACKINGS:
        plain = plain.removesuffix(packing)
    return not is_wanted(name, source) and is_wanted(plain, source)


def no_file(source: DataSource) -> InputError:
    """The error for a folder without a file of the format."""
    suffixes = SUFFIXES.get(source.format)
    wanted = f"no file that ends in {', '.join(suffixes)}" if suffixes else "no file"
    return InputError(f"data path {source.path}: {wanted} (format: {source.format})")
