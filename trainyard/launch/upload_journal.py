"""What a copy to S3 has on its way, kept on this machine while it lasts.

A copy that is killed leaves parts that cost as any object does, and that no listing of objects shows. The next copy
from here to the same place gives them up.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainyard.errors import InputError, TrainyardError
from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.backend import Say
from trainyard.launch.session import state_root

_STARTED = "after-call.s3.CreateMultipartUpload"
"""The SDK's event with S3's answer that names an upload."""
_UPLOAD = ("Bucket", "Key", "UploadId")


@contextmanager
def journal(s3: Any, root: str, say: Say) -> Iterator[None]:
    """Write down the uploads that `s3` begins meanwhile; those that a dead copy to `root` from this machine wrote down
    are given up before. InputError where such a copy still lives.

    By their ids alone: what another writer has on its way, or this machine's copy to another place, isn't touched.
    Where nothing can be written down, nothing is.
    """
    path = state_root() / "copies" / f"{hashlib.sha256(root.encode()).hexdigest()[:32]}.jsonl"
    descriptor = _locked(path, root)
    if descriptor is None:
        yield
        return
    try:
        left = _given_up(s3, _uploads(descriptor), root, say)
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        for upload in left:
            _note(descriptor, upload)

        # By the name that was asked for: of an access point's alias S3 answers with the bucket's own.
        bucket = root.removeprefix("s3://").partition("/")[0]

        def note(parsed: Mapping[str, Any], **_: object) -> None:
            if "UploadId" in parsed:  # else it was refused
                _note(descriptor, {"Bucket": bucket, "Key": parsed["Key"], "UploadId": parsed["UploadId"]})

        s3.meta.events.register(_STARTED, note)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            s3.meta.events.unregister(_STARTED, note)
            with suppress(OSError):
                # What came to a good end has none on its way; a copy that failed may.
                if not left and (is_done or not os.fstat(descriptor).st_size):
                    path.unlink()
    finally:
        os.close(descriptor)


def _locked(path: Path, root: str) -> int | None:
    """The file, for this process alone; None where none can be had. InputError where another has it."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"{root}: another `trainyard checkpoints copy` of this machine copies there: wait for its end, stop "
                "it, or give another prefix or folder"
            ) from None
        except OSError:  # no locks here
            os.close(descriptor)
            return None
        os.close(descriptor)  # its owner came to an end, and removed it, between the two


def _uploads(descriptor: int) -> list[dict[str, str]]:
    found = []
    with suppress(OSError):
        for line in os.pread(descriptor, os.fstat(descriptor).st_size, 0).splitlines():
            with suppress(ValueError, TypeError, KeyError):  # half a line
                upload = json.loads(line)
                found.append({name: str(upload[name]) for name in _UPLOAD})
    return found


def _given_up(s3: Any, uploads: Iterable[dict[str, str]], root: str, say: Say) -> list[dict[str, str]]:
    """Those that couldn't be given up now."""
    left, num_removed = [], 0
    for upload in uploads:
        try:
            with aws_errors("giving up an upload to", f"s3://{upload['Bucket']}/{upload['Key']}"):
                s3.abort_multipart_upload(**upload)
            num_removed += 1
        except TrainyardError as error:
            if error_code(error.__cause__ or error) != "NoSuchUpload":  # else it came to its end
                left.append(upload)
    if num_removed:
        say(f"unfinished uploads of an earlier copy to {root} removed: {num_removed}")
    return left


def _note(descriptor: int, upload: Mapping[str, str]) -> None:
    with suppress(OSError):  # a full disk costs the note
        # On a line of its own, whatever the one before lacks.
        os.write(descriptor, b"\n" + json.dumps(dict(upload)).encode() + b"\n")
