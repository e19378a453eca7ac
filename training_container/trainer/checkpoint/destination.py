"""Where checkpoints lie: a folder, or a prefix of an S3 bucket. Names are relative, with slashes. No torch."""

import errno
import glob
import os
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from trainer.checkpoint.disk import read_at, read_once_at
from trainer.checkpoint.manifest import FOLDER, step_of
from trainyard.errors import InputError
from trainyard.kept_room import FULL
from trainyard.spec.checkpoint_names import LEADS_NOWHERE, broken_link, is_behind, is_foreign

RETRY_DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before each further try: about 15 s in all, longer than S3's usual 'slow down' and a network blip."""

_MULTIPART_BYTES = 16 << 20
_MOST_TRIES = 3
"""Of a write whose folder goes while it is empty."""
_PIECE_BYTES = 1 << 20
"""Of an answer at a time: the SDK holds it once more."""

_PERMANENT_S3_CODES = {
    "AccessDenied",
    "AllAccessDisabled",
    "InvalidAccessKeyId",
    "KMS.DisabledException",
    "KMS.InvalidKeyUsageException",
    "KMS.KMSInvalidStateException",
    "KMS.NotFoundException",
    "NoSuchBucket",
    "PermanentRedirect",
    "SignatureDoesNotMatch",
}
_PERMANENT_ERRNOS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,  # a file, or a link to what isn't there, in the place of a folder
    errno.EISDIR,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}

Result = TypeVar("Result")


class DestinationError(Exception):
    """The destination refused or could not be reached: one line. `permanent`: another try can't help."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent

    @property
    def is_refusal(self) -> bool:
        """Whether it stays until a person mends the access: a full disk may get room by itself."""
        return self.permanent and getattr(self.__cause__, "errno", None) not in FULL

    def __reduce__(self) -> tuple[Any, ...]:
        # It travels between ranks, and pickle would forget a keyword-only argument.
        return _destination_error, (str(self), self.permanent)


def _destination_error(message: str, permanent: bool) -> DestinationError:
    return DestinationError(message, permanent=permanent)


class MissingFileError(Exception):
    """There is no file of that name."""


class NoFileError(MissingFileError):
    """What has that name is no file, nor a folder: a pipe, which who reads it would wait at for ever, or a device."""


class Destination(ABC):
    """Files under one root. Methods raise DestinationError; reads of what isn't there raise MissingFileError."""

    uri: str
    """The root, without a slash at the end."""

    @abstractmethod
    def put_file(self, name: str, path: Path) -> None:
        """Copy a local file there; it appears whole or not at all."""

    @abstractmethod
    def put_bytes(self, name: str, content: bytes) -> None:
        """Write a small file; it appears whole or not at all, and is durable when this returns."""

    @abstractmethod
    def get_file(self, name: str, path: Path) -> None:
        """Copy a file from there to a local path."""

    @abstractmethod
    def get_bytes(self, name: str) -> bytes:
        """Read a small file."""

    @abstractmethod
    def get_range(self, name: str, *, start: int, num_bytes: int) -> bytes:
        """Read a part of a file; fewer bytes where it ends before."""

    @abstractmethod
    def read_into(self, name: str, *, start: int, memory: Sequence[memoryview]) -> int:
        """Fill `memory`, one after the other, from byte `start` of a file; how many bytes: fewer where it ends."""

    def read_once_into(self, name: str, *, start: int, memory: Sequence[memoryview]) -> int:
        """`read_into`, of bytes that nobody else on this host will want."""
        return self.read_into(name, start=start, memory=memory)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of that name.

        To be asked before a read of what may not be there: to who may list below a prefix alone, as a job's role may,
        S3 refuses that read, and doesn't say that a key is missing.
        """

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """Name -> bytes of every file below the folder `prefix`.

        A step's link to what isn't there is named with a slash at its end.
        """

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that aren't there are no error."""

    def give_up_unfinished(self, prefixes: Sequence[str]) -> int:
        """Remove what uploads that were killed left behind, below names that begin so; how many there were."""
        return 0

    def folder(self, name: str) -> Path | None:
        """The path of a folder that can be read and written in place; None where files must be copied."""
        return None

    def is_behind(self, name: str, others: Iterable[str]) -> bool:
        """Whether the folder is what one of the others, a link, leads to: with its files theirs would go."""
        return False


def open_destination(uri: str, *, in_haste: bool = False) -> Destination:
    """The destination that `uri` names: s3://bucket/prefix or a local path. `in_haste`: see s3_client."""
    if uri.startswith("s3://"):
        return S3Destination(uri, in_haste=in_haste)
    if is_foreign(uri):
        raise InputError(f"checkpoint.destination {uri}: must be an s3:// prefix or a folder")
    return LocalDestination(Path(uri))


def with_retries(
    operation: Callable[[], Result],
    *,
    what: str,
    report: Callable[[str], None],
    delays_seconds: Sequence[float] = RETRY_DELAYS_SECONDS,
) -> Result:
    """`operation()`, tried again with growing pauses while DestinationError says that another try may help."""
    for delay in delays_seconds:
        try:
            return operation()
        except DestinationError as error:
            if error.permanent:
                raise
            report(f"checkpoint {what} failed, next try in {delay:g} s: {error}")
        time.sleep(delay)
    return operation()


class LocalDestination(Destination):
    """A folder, shared by all hosts where there are several (FSx for Lustre)."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.uri = str(self._root)

    def put_file(self, name: str, path: Path) -> None:
        target = self._root / name
        with os_errors(f"write {target}"):
            if target.exists() and path.exists() and target.samefile(path):
                return
            _replace(target, lambda partial: shutil.copyfile(path, partial))

    def put_bytes(self, name: str, content: bytes) -> None:
        target = self._root / name
        with os_errors(f"write {target}"):
            _replace(target, lambda partial: partial.write_bytes(content))

    def get_file(self, name: str, path: Path) -> None:
        source = self._root / name
        with os_errors(f"read {source}"):
            if path.exists() and source.exists() and path.samefile(source):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)

    def get_bytes(self, name: str) -> bytes:
        path = self._root / name
        with os_errors(f"read {path}"):
            kind = path.stat().st_mode
            # A folder can't be read: to whom it stands for all that was saved, that is no word of a missing file.
            if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                raise NoFileError(f"can't read {path}: it is no file")
            return path.read_bytes()

    def get_range(self, name: str, *, start: int, num_bytes: int) -> bytes:
        with os_errors(f"read {self._root / name}"), (self._root / name).open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)

    def read_into(self, name: str, *, start: int, memory: Sequence[memoryview]) -> int:
        with os_errors(f"read {self._root / name}"), (self._root / name).open("rb", buffering=0) as file:
            return read_at(file.fileno(), start, memory)

    def read_once_into(self, name: str, *, start: int, memory: Sequence[memoryview]) -> int:
        """See Destination."""
        with os_errors(f"read {self._root / name}"):
            return read_once_at(self._root / name, start, memory)

    def has(self, name: str) -> bool:
        """See Destination."""
        with os_errors(f"look for {self._root / name}"):
            return (self._root / name).is_file()

    def sizes(self, prefix: str) -> dict[str, int]:
        """See Destination."""
        top = self._root / prefix
        found: dict[str, int] = {}
        if (link := broken_link(top)) is not None:
            if link == top and _is_a_steps(prefix):
                return {f"{prefix}/": 0}
            raise DestinationError(f"can't list {top}: {link} {LEADS_NOWHERE}", permanent=True)

        def judge(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError) and _may_be_a_steps(Path(error.filename), top):
                raise error

        # A step that may not be looked into is no step that isn't there; one that was moved to another disk, with a
        # link in its place, is as good as any: passed over in silence either would begin the job anew.
        with os_errors(f"list {top}"):
            for at, folders, names in os.walk(top, onerror=judge, followlinks=True):
                if Path(at) != top:  # a link that leads back up would have no end
                    folders[:] = [name for name in folders if not Path(at, name).is_symlink()]
                for path in (Path(at, name) for name in names):
                    name = path.relative_to(self._root).as_posix()
                    try:
                        if path.is_file():
                            found[name] = path.stat().st_size
                        elif path.is_symlink() and _is_a_steps(name):
                            found[f"{name}/"] = 0
                    except OSError as error:
                        judge(error)
        return found

    def delete(self, names: Iterable[str]) -> None:
        """See Destination."""
        folders = set()
        for name in names:
            path = self._root / name
            with os_errors(f"remove {path}"):
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

    def give_up_unfinished(self, prefixes: Sequence[str]) -> int:
        """See Destination."""
        # A process that is killed while it writes leaves its copy: the next one writes under a name of its own.
        num_found = 0
        for prefix in prefixes:
            folder, _, beginning = prefix.rpartition("/")
            pattern = f".{glob.escape(beginning)}*.partial"
            with os_errors(f"look for unfinished files below {self._root / prefix}"):
                found = (self._root / folder).glob(pattern if beginning else f"**/{pattern}")
                for path in [*found]:
                    path.unlink(missing_ok=True)
                    num_found += 1
        return num_found

    def folder(self, name: str) -> Path | None:
        return self._root / name

    def is_behind(self, name: str, others: Iterable[str]) -> bool:
        """See Destination."""
        return is_behind(self._root / name, [self._root / other for other in others])


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Have `target` be what is written to the path that `write` is given: whole or not at all, and durable."""
    for tries_left in range(_MOST_TRIES - 1, -1, -1):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            write(partial)
            sync(partial)
            partial.replace(target)
            sync(target.parent)
            return
        except FileNotFoundError:  # who removes empty folders may have met this one
            if not tries_left:
                raise
        finally:
            partial.unlink(missing_ok=True)


def _may_be_a_steps(path: Path, top: Path) -> bool:
    """Whether checkpoints may be missed with what can't be read there; not with a volume's lost+found, say, or a
    folder of somebody else's."""
    return path == top or any(part.startswith("step-") for part in path.relative_to(top).parts)


def _is_a_steps(name: str) -> bool:
    """Whether it is the name of a step's folder itself."""
    return name.count("/") == 1 and step_of(f"{name}/") is not None


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """The file system's errors as DestinationError, or MissingFileError: `what` can't be done, and why."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"can't {what}: no such file") from error
    except OSError as error:
        raise DestinationError(
            f"can't {what}: {error.strerror or error}", permanent=error.errno in _PERMANENT_ERRNOS
        ) from error


def s3_client(*, in_haste: bool = False) -> Any:
    """The SDK's client for S3, as every reader and writer of the trainer uses it; a thread may share it.

    `in_haste`: for who has seconds left, and would rather do without the answer than wait for it.
    """
    import boto3
    from botocore.config import Config

    # A private endpoint's bucket host names (bucket.localhost) resolve nowhere.
    private = "AWS_ENDPOINT_URL" in os.environ or "AWS_ENDPOINT_URL_S3" in os.environ
    return boto3.session.Session().client(
        "s3",
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 2 if in_haste else 3},
            connect_timeout=2 if in_haste else 10,
            read_timeout=4 if in_haste else 60,
            max_pool_connections=20,
            s3={"addressing_style": "path" if private else "auto"},
        ),
    )


class S3Destination(Destination):
    """A prefix of a bucket, by the SDK: multipart for large files, checksums that S3 verifies on arrival.

    Encryption is the bucket's default key. The endpoint is AWS_ENDPOINT_URL where that is set, as for every SDK.
    """

    def __init__(self, uri: str, *, in_haste: bool = False) -> None:
        from boto3.s3.transfer import TransferConfig

        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise InputError(f"checkpoint.destination {uri}: must be s3://bucket/prefix")
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        self.uri = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self._client: Any = s3_client(in_haste=in_haste)
        self._transfer = TransferConfig(
            multipart_threshold=_MULTIPART_BYTES, multipart_chunksize=_MULTIPART_BYTES, max_concurrency=10
        )

    def put_file(self, name: str, path: Path) -> None:
        with self._s3_errors("upload", name):
            self._client.upload_file(str(path), self._bucket, self._key(name), Config=self._transfer)

    def put_bytes(self, name: str, content: bytes) -> None:
        with self._s3_errors("upload", name):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=content)

    def get_file(self, name: str, path: Path) -> None:
        with self._s3_errors("download", name):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._client.download_file(self._bucket, self._key(name), str(path), Config=self._transfer)

    def get_bytes(self, name: str) -> bytes:
        with self._s3_errors("read", name):
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()
            return body

    def get_range(self, name: str, *, start: int, num_bytes: int) -> bytes:
        wanted = f"bytes={start}-{start + num_bytes - 1}"
        with self._s3_errors("read", name):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name), Range=wanted)
            body: bytes = answer["Body"].read()
            return body

    def read_into(self, name: str, *, start: int, memory: Sequence[memoryview]) -> int:
        """See Destination."""
        wanted = f"bytes={start}-{start + sum(map(len, memory)) - 1}"
        num_read = 0
        with self._s3_errors("read", name):
            body = self._client.get_object(Bucket=self._bucket, Key=self._key(name), Range=wanted)["Body"]
            for view in memory:
                at = 0
                while at < len(view):
                    count = body.readinto(view[at : at + _PIECE_BYTES])
                    if count == 0:
                        return num_read
                    at, num_read = at + count, num_read + count
        return num_read

    def has(self, name: str) -> bool:
        """See Destination."""
        key = self._key(name)
        with self._s3_errors("list", name):
            # A key comes before all that begin with it.
            answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=key, MaxKeys=1)
        return any(entry["Key"] == key for entry in answer.get("Contents", ()))

    def sizes(self, prefix: str) -> dict[str, int]:
        """See Destination."""
        found: dict[str, int] = {}
        skip = len(self._key(""))
        with self._s3_errors("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(f"{prefix}/" if prefix else "")
            )
            for page in pages:
                found.update({entry["Key"][skip:]: entry["Size"] for entry in page.get("Contents", ())})
        # A folder's mark, as S3's console and DataSync make it: here no name with a slash at its end is a link's.
        return {name: size for name, size in found.items() if name and not name.endswith("/")}

    def delete(self, names: Iterable[str]) -> None:
        """See Destination."""
        keys = [{"Key": self._key(name)} for name in names]
        for start in range(0, len(keys), 1000):
            with self._s3_errors("remove from", ""):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": keys[start : start + 1000], "Quiet": True}
                )
            for failed in answer.get("Errors", ()):
                raise DestinationError(
                    f"can't remove s3://{self._bucket}/{failed['Key']}: {failed['Code']}",
                    permanent=failed["Code"] in _PERMANENT_S3_CODES,
                )

    def give_up_unfinished(self, prefixes: Sequence[str]) -> int:
        """See Destination."""
        # Their parts cost as any object does, and no listing of objects shows them.
        num_found = 0
        for prefix in prefixes:
            with self._s3_errors("look for unfinished uploads below", prefix):
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self._bucket, Prefix=self._key(prefix)
                )
                found = [(one["Key"], one["UploadId"]) for page in pages for one in page.get("Uploads", ())]
            for key, upload in found:
                try:
                    with self._s3_errors("give up an upload to", key[len(self._key("")) :]):
                        self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
                    num_found += 1
                except MissingFileError:  # finished or given up meanwhile
                    continue
        return num_found

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    @contextmanager
    def _s3_errors(self, verb: str, name: str) -> Iterator[None]:
        with s3_errors(f"can't {verb} {self.uri}/{name}"):
            yield


@contextmanager
def s3_errors(what: str) -> Iterator[None]:
    """The SDK's errors as DestinationError, or MissingFileError: `what` failed, and why."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        if code in ("NoSuchKey", "NoSuchUpload", "404", "NotFound"):
            raise MissingFileError(f"{what}: no such object") from error
        raise DestinationError(f"{what}: {code}", permanent=code in _PERMANENT_S3_CODES) from error
    except (BotoCoreError, Boto3Error, HTTPError) as error:  # of TLS amid an answer the SDK wraps nothing
        whole = " ".join(str(error).split())
        # upload_file wraps the service's answer in text alone, behind two long paths: `what` has them already.
        text = whole[max(0, whole.find("An error occurred (")) :][:300]
        # Where there are none at all; who can't be asked for them now may answer later.
        has_none = isinstance(error, (NoCredentialsError, PartialCredentialsError))
        permanent = any(f"({code})" in text for code in _PERMANENT_S3_CODES) or has_none
        raise DestinationError(f"{what}: {text}", permanent=permanent) from error
    except OSError as error:
        raise DestinationError(
            f"{what}: {error.strerror or error}", permanent=error.errno in _PERMANENT_ERRNOS
        ) from error
