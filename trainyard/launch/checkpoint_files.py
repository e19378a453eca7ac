"""Files under one root, a folder or a prefix of a bucket: what looking after checkpoints needs of either."""

import errno
import fcntl
import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from trainyard.errors import InputError, JobFailedError
from trainyard.launch.aws import aws_errors, is_conflict, is_missing
from trainyard.launch.backend import Say, say_nothing
from trainyard.launch.upload_journal import journal
from trainyard.spec.checkpoint_names import (
    CLAIM_OUTPUT,
    LEADS_NOWHERE,
    MOST_CLAIM_BYTES,
    broken_link,
    is_behind,
    is_foreign,
)

RECOVERY_FILE = "recovery.jsonl"
"""A row a restart in place (trainer.host.recovery); beside the checkpoints too."""
FOLDER = "checkpoints"
"""Below a root: each checkpoint is a folder in it."""

_CLAIM = ".in_use"
"""The trainer's file below a root (trainer.checkpoint.claim): locked while a job saves there."""
_BLOCK_BYTES = 8 << 20
_MOST_BREAKS = 5
"""So often in a row an answer may break off before its first block is whole."""


class Files(Protocol):
    """Names are relative to the root, with slashes."""

    root: str
    """As given, without a slash at the end."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Name -> bytes of every file below the folder `prefix`; empty where there is none. A step's link to what isn't
        there, and among all a step's folder that may not be looked into, has a slash at its end."""

    def why_hidden(self, folder: str) -> str:
        """What is wrong with a step's folder that `sizes` names with a slash."""

    def read(self, name: str) -> bytes | None:
        """A small file's content; None where it isn't there."""

    def written_at(self, name: str) -> float | None:
        """When a file was last written, seconds since the epoch; None where it isn't there."""

    def blocks(self, name: str) -> Iterator[bytes]:
        """A file's content, block by block."""

    def write(self, name: str, content: bytes) -> None:
        """A small file, whole or not at all."""

    def write_new(self, name: str, content: bytes) -> str | None:
        """A small file, whole, where there is none; its mark. None: there is one, which stays."""

    def take(self, name: str, source: "Files") -> str:
        """Copy the file of that name from another root, whole or not at all; its mark."""

    def marks(self, prefix: str) -> dict[str, str]:
        """As `sizes`, with what changes whenever a file is written again."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, in this order."""

    def drop_empty(self, folder: str) -> None:
        """Remove a folder, those in it and the one it lies in, as far as they hold nothing; a link stays."""

    def is_behind(self, folder: str, others: Iterable[str]) -> bool:
        """Whether it is what one of the others, a link, leads to: with its files theirs would go."""

    def is_same(self, other: "Files") -> bool:
        """Whether both have one root, however it is written."""

    def refuse_file(self) -> None:
        """InputError where the root is a file, or can be in none that it names."""

    def claimed(self, say: Say = say_nothing) -> AbstractContextManager[None]:
        """Have the root for this process alone: no job begins to save there meanwhile. InputError where one does.

        Where there are no locks nobody can say; of a bucket that is known of this machine's copies alone, and `say` is
        told how many uploads of one that was killed were given up.
        """


def open_files(root: str, s3: Any) -> Files:
    """The files under an s3:// prefix or a folder; `s3`: the client for the former."""
    refuse_empty(root, "a folder or an s3:// prefix")
    if root.startswith("s3://"):
        if s3 is None:
            advice = "nothing here says whose role may go there: give --tenant NAME, or a folder"
            raise InputError(f"{root}: is on S3, and {advice}")
        return _S3Files(root, s3)
    if is_foreign(root):
        raise InputError(f"{root}: must be an s3:// prefix or a folder")
    return _FolderFiles(root)


def refuse_empty(place: str, what: str) -> None:
    """InputError: an empty path is the folder that one is in, and most often a variable that isn't set."""
    if not place.strip():
        raise InputError(f"{place!r} names no place: give {what}")


def sha256(files: Files, name: str) -> str:
    """A file's hash, lower-case hex; it is read block by block."""
    digest = hashlib.sha256()
    for block in files.blocks(name):
        digest.update(block)
    return digest.hexdigest()


class _FolderFiles:
    """See Files: a folder."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self.root = str(self._root)

    def sizes(self, prefix: str) -> dict[str, int]:
        folder = self._root / prefix
        found: dict[str, int] = {}
        if (link := broken_link(folder)) is not None:
            raise JobFailedError(f"can't list {folder}: {link} {LEADS_NOWHERE}")

        def judge(error: OSError) -> None:
            path = Path(error.filename)
            # A job that runs removes what it no longer keeps.
            if isinstance(error, FileNotFoundError) or not _may_be_a_steps(path, folder):
                return
            if path == folder or prefix != FOLDER:
                raise error
            found[f"{prefix}/{path.relative_to(folder).parts[0]}/"] = 0  # it hides no other

        with _os_errors("list", folder):
            # As the trainer reads it: a step may be a link to another disk.
            for at, folders, names in os.walk(folder, onerror=judge, followlinks=True):
                if Path(at) != folder:  # a link that leads back up would have no end
                    folders[:] = [name for name in folders if not Path(at, name).is_symlink()]
                for path in (Path(at, name) for name in names):
                    name = path.relative_to(self._root).as_posix()
                    if path.parent == self._root / FOLDER and broken_link(path) == path:
                        found[f"{name}/"] = 0
                        continue
                    try:
                        found[name] = path.stat().st_size
                    except OSError as error:
                        judge(error)
        return found

    def why_hidden(self, folder: str) -> str:
        path = self._root / folder
        if broken_link(path) is not None:
            return f"it {LEADS_NOWHERE}"
        try:
            for name in os.listdir(path):  # noqa: PTH208  # whose error has its name
                (path / name).stat()
        except OSError as error:
            return f"can't look into {error.filename}: {error.strerror}"
        return "it could not be looked into a moment ago; look again"

    def read(self, name: str) -> bytes | None:
        path = self._root / name
        with _os_errors("read", path):
            return path.read_bytes() if path.is_file() else None

    def written_at(self, name: str) -> float | None:
        path = self._root / name
        with _os_errors("look at", path):
            return path.stat().st_mtime if path.exists() else None

    def blocks(self, name: str) -> Iterator[bytes]:
        path = self._root / name
        with _os_errors("read", path), path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    def write(self, name: str, content: bytes) -> None:
        path = self._root / name
        with _os_errors("write", path), _partial_of(path) as partial:
            partial.write_bytes(content)
            partial.replace(path)

    def write_new(self, name: str, content: bytes) -> str | None:
        path = self._root / name
        with _os_errors("write", path), _partial_of(path) as partial:
            partial.write_bytes(content)
            try:
                os.link(partial, path)
            except FileExistsError:
                return None
            except OSError:  # a file system that knows no links
                if path.exists():
                    return None
                partial.replace(path)
            return _mark(path)

    def take(self, name: str, source: Files) -> str:
        path = self._root / name
        with _os_errors("write", path), _partial_of(path) as partial:
            with partial.open("wb") as file:
                for block in source.blocks(name):
                    file.write(block)
            partial.replace(path)
            return _mark(path)

    def marks(self, prefix: str) -> dict[str, str]:
        found = {}
        for name in self.sizes(prefix):
            with suppress(OSError):  # it went meanwhile
                if not name.endswith("/"):
                    found[name] = _mark(self._root / name)
        return found

    def delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._root / name
            with _os_errors("remove", path):
                if path.parent.is_symlink() and path.parent.parent == self._root / FOLDER:
                    path.parent.unlink()  # a step's link; what somebody put elsewhere stays there, as with `rm -r`
                    continue
                path.unlink(missing_ok=True)
                folders.add(path.parent)
        for folder in folders:
            # Only an empty one goes; somebody else's file keeps it. A link is its owner's.
            if folder == self._root or folder.is_symlink():
                continue
            with suppress(OSError):
                folder.rmdir()

    def drop_empty(self, folder: str) -> None:
        place = self._root / folder
        if not place.is_symlink():
            inside = [Path(at) for at, _, _ in os.walk(place, topdown=False)]
            for one in [*inside, place.parent]:
                with suppress(OSError):  # it holds something, or is a link
                    one.rmdir()

    def is_behind(self, folder: str, others: Iterable[str]) -> bool:
        return is_behind(self._root / folder, [self._root / other for other in others])

    def is_same(self, other: Files) -> bool:
        # Path.resolve raises at links that lead in a circle.
        return isinstance(other, _FolderFiles) and os.path.realpath(self._root) == os.path.realpath(other._root)

    def refuse_file(self) -> None:
        for place in (self._root, *self._root.parents):
            if os.path.isdir(place):  # noqa: PTH112  # of what may not be looked at, who copies will say so
                return
            if os.path.exists(place):  # noqa: PTH110
                raise InputError(f"{place}: is no folder, and nothing can be copied into it; give another one")

    @contextmanager
    def claimed(self, say: Say = say_nothing) -> Iterator[None]:
        path = self._root / _CLAIM
        made = [place for place in (self._root, *self._root.parents) if not os.path.lexists(place)]
        descriptor: int | None = None
        is_new = False
        with suppress(OSError):  # where nothing can be written, who copies will say so
            self._root.mkdir(parents=True, exist_ok=True)
            descriptor, is_new = _opened(path)
        try:
            if descriptor is not None:
                _lock(descriptor, self.root)
            yield
        finally:
            if is_new:
                with suppress(OSError):
                    path.unlink()
            if descriptor is not None:
                os.close(descriptor)
            for place in made:
                with suppress(OSError):  # it holds something
                    place.rmdir()


class _S3Files:
    """See Files: a bucket, or a part of one."""

    def __init__(self, root: str, s3: Any) -> None:
        self._s3 = s3
        self._bucket, _, prefix = root.removeprefix("s3://").partition("/")
        if not self._bucket:
            raise InputError(f"{root}: must be s3://bucket/prefix")
        self._prefix = prefix.strip("/")
        self.root = f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def sizes(self, prefix: str) -> dict[str, int]:
        return {name: int(item["Size"]) for name, item in self._listed(prefix)}

    def why_hidden(self, folder: str) -> str:
        return ""

    def _listed(self, prefix: str) -> list[tuple[str, dict[str, Any]]]:
        skip = len(self._key(""))
        with aws_errors("listing", f"{self.root}/{prefix}"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(prefix) + "/"
            )
            found = [(item["Key"][skip:], item) for page in pages for item in page.get("Contents", [])]
        # Without folders' marks, as S3's console and DataSync make them: no name with a slash at its end is a link's.
        return [(name, item) for name, item in found if not name.endswith("/")]

    def read(self, name: str) -> bytes | None:
        from botocore.exceptions import ClientError

        with aws_errors("reading", f"{self.root}/{name}"):
            try:
                body: bytes = self._s3.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
            return body

    def written_at(self, name: str) -> float | None:
        from botocore.exceptions import ClientError

        with aws_errors("looking at", f"{self.root}/{name}"):
            try:
                at = self._s3.head_object(Bucket=self._bucket, Key=self._key(name))["LastModified"]
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
            return float(at.timestamp())

    def blocks(self, name: str) -> Iterator[bytes]:
        from botocore.exceptions import HTTPClientError, IncompleteReadError
        from urllib3.exceptions import HTTPError

        where = {"Bucket": self._bucket, "Key": self._key(name)}
        with aws_errors("reading", f"{self.root}/{name}"):
            answer = self._s3.get_object(**where)
            size, same, num_read, num_breaks = answer["ContentLength"], answer["ETag"], 0, 0
            while True:
                try:
                    for block in answer["Body"].iter_chunks(_BLOCK_BYTES):
                        num_read, num_breaks = num_read + len(block), 0
                        yield block
                    return
                except (HTTPClientError, IncompleteReadError, HTTPError):
                    num_breaks += 1
                    if num_breaks > _MOST_BREAKS:
                        raise
                if num_read >= size:  # it broke at its very end
                    return
                # The SDK repeats requests and no answers that broke off; in hours of reading one does.
                time.sleep(num_breaks)
                answer = self._s3.get_object(**where, Range=f"bytes={num_read}-", IfMatch=same)

    def write(self, name: str, content: bytes) -> None:
        with aws_errors("writing", f"{self.root}/{name}"):
            self._s3.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    def write_new(self, name: str, content: bytes) -> str | None:
        from botocore.exceptions import ClientError

        place = {"Bucket": self._bucket, "Key": self._key(name)}
        writer = {"writer": uuid.uuid4().hex}
        with aws_errors("writing", f"{self.root}/{name}"):
            try:
                return str(self._s3.put_object(**place, Body=content, IfNoneMatch="*", Metadata=writer)["ETag"])
            except ClientError as error:
                if not is_conflict(error):
                    raise
            # The SDK repeats a request whose answer was lost, and then meets what it wrote itself.
            there = self._s3.head_object(**place)
            return str(there["ETag"]) if there["Metadata"] == writer else None

    def take(self, name: str, source: Files) -> str:
        with aws_errors("writing", f"{self.root}/{name}"):
            if isinstance(source, _S3Files):
                # Inside S3, in parts where it is large: nothing passes through this machine.
                origin = {"Bucket": source._bucket, "Key": source._key(name)}
                self._s3.copy(origin, self._bucket, self._key(name))
            else:
                assert isinstance(source, _FolderFiles)
                self._s3.upload_file(str(Path(source.root) / name), self._bucket, self._key(name))
            return str(self._s3.head_object(Bucket=self._bucket, Key=self._key(name))["ETag"])

    def marks(self, prefix: str) -> dict[str, str]:
        return {name: str(item["ETag"]) for name, item in self._listed(prefix)}

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with aws_errors("removing", f"{self.root}/{name}"):
                self._s3.delete_object(Bucket=self._bucket, Key=self._key(name))

    def drop_empty(self, folder: str) -> None:
        """A bucket has no folders."""

    def is_behind(self, folder: str, others: Iterable[str]) -> bool:
        return False

    def is_same(self, other: Files) -> bool:
        return self.root == other.root

    def refuse_file(self) -> None:
        """A bucket has no folders."""

    def claimed(self, say: Say = say_nothing) -> AbstractContextManager[None]:
        return journal(self._s3, self.root, say)


def _may_be_a_steps(path: Path, top: Path) -> bool:
    """Whether checkpoints may be missed with what can't be read there; not with a volume's lost+found, say, or a
    folder of somebody else's."""
    return path == top or any(part.startswith("step-") for part in path.relative_to(top).parts)


def _opened(path: Path) -> tuple[int, bool]:
    """A claim's file as it lies there, of another user for reading alone; and whether it is new. OSError."""
    flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666), True
    except FileExistsError:
        try:
            return os.open(path, os.O_RDWR | flags), False
        except PermissionError:
            return os.open(path, os.O_RDONLY | flags), False


def _lock(descriptor: int, root: str) -> None:
    """Take it, for as long as it is open, and sign it; InputError where somebody else has it."""
    is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    try:
        # One that is shared keeps a job out as well, which wants it alone.
        fcntl.lockf(descriptor, (fcntl.LOCK_EX if is_writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            said = os.pread(descriptor, MOST_CLAIM_BYTES, 0).decode(errors="replace").partition("\n")[0]
            words = said.partition(CLAIM_OUTPUT)[0] or "another process"
            raise InputError(
                f"{root}: {words} saves there: wait for its end, stop it, or give another prefix or folder"
            ) from None
        return  # no locks here
    if is_writable and os.fstat(descriptor).st_nlink <= 1:  # what has another name as well may be anybody's
        with suppress(OSError):  # a full disk costs the name
            os.ftruncate(descriptor, 0)
            line = f"`trainyard checkpoints copy` on {socket.gethostname()}, process {os.getpid()}\n"
            os.pwrite(descriptor, line.encode(), 0)


def _mark(path: Path) -> str:
    """Changes whenever the file is written again. (Its inode's number may change without that.) OSError."""
    found = path.stat()
    return f"{found.st_size}-{found.st_mtime_ns}"


@contextmanager
def _partial_of(path: Path) -> Iterator[Path]:
    """Where to write what is to be `path`; nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _os_errors(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobFailedError(f"can't {verb} {path}: {error.strerror or error}") from None
