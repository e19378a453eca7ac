"""A tenant's buckets on the way out: counted, copied elsewhere, emptied with all their versions."""

import datetime
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainyard.errors import AwsRefusedError
from trainyard.launch.aws import DENIED_CODES, aws_errors, error_code, is_missing
from trainyard.launch.session import Account
from trainyard.spec.words import counted

Say = Callable[[str], None]
EMPTY = hashlib.sha256().hexdigest()
"""Fingerprint of a bucket without a current object."""
BATCH = 1000
"""Keys that one DeleteObjects takes."""
LOOKS = 16
"""Versions that are asked for their lock at once."""
_ETAG = "trainyard-etag"
"""In a copy's metadata: the ETag of the object that it is of."""
PART_BYTES = 8 * 2**20
"""Of an upload in parts, where the object is no larger than MOST_PARTS of them."""
MOST_PARTS = 9000
"""S3 takes 10,000 of an upload."""
MOST_PART_BYTES = 5 * 2**30
"""Of a part, for S3."""
MEMORY_BYTES = 512 * 2**20
"""That parts on their way may hold, one at least: of a stream, each waits in memory until it is sent."""


@dataclass(frozen=True)
class Contents:
    """What lies in a bucket."""

    objects: int
    """Current objects."""
    size_bytes: int
    """Of the current objects."""
    old_versions: int
    """Overwritten and deleted ones, and the markers of deletion."""

    def __str__(self) -> str:
        return (
            f"{counted(self.objects, 'object')} ({self.size_bytes / 2**30:.2f} GiB), "
            f"{counted(self.old_versions, 'old version')}"
        )


def contents(account: Account, bucket: str) -> Contents:
    """Counted by listing: a call for every thousand versions."""
    objects = size = old = 0
    for version in _versions(account, bucket):
        if version.get("IsLatest") and "Size" in version:
            objects, size = objects + 1, size + int(version["Size"])
        else:
            old += 1
    return Contents(objects, size, old)


class Exported(NamedTuple):
    """What an export found and did."""

    objects: int
    """Current objects, all of which are at the target now."""
    size_bytes: int
    new_objects: int
    """Those of them that were not there before."""
    new_bytes: int


def export(launcher: Account, writer: Account, bucket: str, target: str, say: Say) -> Exported:
    """Copy every current object of `bucket` to s3://TARGET/<bucket>/..., unless it was copied there before.

    Read as the tenant's launcher, written as whoever removes the tenant: no one else's role may do both, as the
    account's own administrators can't use the tenant's keys. So the bytes pass through this machine.
    """
    reader, store = launcher.client("s3"), writer.client("s3")
    target_bucket, _, prefix = target.removeprefix("s3://").partition("/")
    folder = f"{prefix.rstrip('/')}/{bucket}".lstrip("/")
    done = Exported(0, 0, 0, 0)
    with aws_errors("copying", f"s3://{bucket} to {target}", "check that you may write there"):
        for page in reader.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", []):
                copied = f"{folder}/{item['Key']}"
                if _was_copied(store, target_bucket, copied, item):
                    size, new = int(item["Size"]), 0
                else:
                    size, new = _copy(reader, bucket, item["Key"], store, target_bucket, copied), 1
                counts = (1, size, new, new * size)
                done = Exported(*(one + more for one, more in zip(done, counts, strict=True)))
                say(f"copied {counted(done.objects, 'object')} of {bucket}")
    return done


def _copy(reader: Any, bucket: str, key: str, store: Any, target_bucket: str, copied: str) -> int:
    """One object, with what tells which version it was; its bytes."""
    read = reader.get_object(Bucket=bucket, Key=key)
    wanted = int(read["ContentLength"])
    options = {"ExtraArgs": {"Metadata": {_ETAG: read["ETag"].strip('"')}}, "Config": _transfer(wanted)}
    store.upload_fileobj(read["Body"], target_bucket, copied, **options)
    written = int(store.head_object(Bucket=target_bucket, Key=copied)["ContentLength"])
    if written != wanted:
        raise AwsRefusedError(
            f"s3://{target_bucket}/{copied} holds {written} bytes instead of {wanted}; nothing was "
            "deleted: see who else writes there, and repeat the command"
        )
    return written


def _was_copied(store: Any, target_bucket: str, copied: str, item: Mapping[str, Any]) -> bool:
    """Whether that very content is at the target, by what its copy was told of it."""
    from botocore.exceptions import ClientError

    try:
        there = store.head_object(Bucket=target_bucket, Key=copied)
    except ClientError as error:
        if (
            is_missing(error) or error_code(error) in DENIED_CODES
        ):  # who may not list is told no more of what is missing
            return False
        raise
    is_it = there.get("Metadata", {}).get(_ETAG) == item["ETag"].strip('"')
    return bool(is_it and int(there["ContentLength"]) == int(item["Size"]))


def _transfer(size_bytes: int) -> Any:
    """How a stream of that size is uploaded. It can't be asked for its size: left alone, boto3 sends parts of 8 MiB
    until S3 takes no more of them, after 78 GiB."""
    from boto3.s3.transfer import TransferConfig

    part_bytes = min(MOST_PART_BYTES, max(PART_BYTES, math.ceil(size_bytes / MOST_PARTS)))
    config = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes)
    most = MEMORY_BYTES // part_bytes
    config.max_in_memory_upload_chunks = max(1, min(config.max_in_memory_upload_chunks, most))
    return config


def fingerprint(account: Account, bucket: str) -> str:
    """The same as long as no current object of the bucket comes, goes or is overwritten (names, ETags, sizes)."""
    digest = hashlib.sha256()
    with aws_errors("listing", f"s3://{bucket}"):
        for page in account.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", []):
                digest.update(f"{item['Key']}\0{item['ETag']}\0{item['Size']}\0".encode())
    return digest.hexdigest()


def locked(account: Account, bucket: str) -> str | None:
    """A version of the bucket that a lock keeps, and why; None where none is kept. Asked of each version, in a bucket
    with locks: its rule says nothing of what came under another one, or has a lock of its own."""
    s3 = account.client("s3")
    with aws_errors("looking for locks in", f"s3://{bucket}"), ThreadPoolExecutor(LOOKS) as pool:
        if not _has_locks(s3, bucket):
            return None
        versions = (version for version in _versions(account, bucket) if "Size" in version)  # no markers
        while some := list(itertools.islice(versions, BATCH)):
            found = pool.map(lambda version: _lock_of(s3, bucket, version["Key"], version["VersionId"]), some)
            if kept := next(filter(None, found), None):
                pool.shutdown(cancel_futures=True)
                return kept
    return None


def _has_locks(s3: Any, bucket: str) -> bool:
    try:
        answer = s3.get_object_lock_configuration(Bucket=bucket)
    except s3.exceptions.ClientError as error:
        if error_code(error) == "ObjectLockConfigurationNotFoundError":
            return False
        raise
    return bool(answer["ObjectLockConfiguration"].get("ObjectLockEnabled") == "Enabled")


def _lock_of(s3: Any, bucket: str, key: str, version: str) -> str | None:
    try:
        head = s3.head_object(Bucket=bucket, Key=key, VersionId=version)
    except s3.exceptions.ClientError as error:
        if is_missing(error):  # it went since it was listed
            return None
        raise
    if head.get("ObjectLockLegalHoldStatus") == "ON":
        return f"{key}: under a legal hold"
    until = head.get("ObjectLockRetainUntilDate")
    if until is None or until <= datetime.datetime.now(datetime.UTC):
        return None
    return f"{key}: locked until {until:%Y-%m-%d}"


def empty(account: Account, bucket: str, say: Say) -> tuple[int, list[str]]:
    """Delete every version, marker and torn upload of a bucket: how many versions went, and why others stayed.

    Old versions first: whatever interrupts it, none of them becomes the current one, which an export would copy.
    """
    s3 = account.client("s3")
    gone = 0
    refused: list[str] = []
    with aws_errors("emptying", f"s3://{bucket}"):
        for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket):
            for upload in page.get("Uploads", []):
                s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        old = (version for version in _versions(account, bucket) if not version.get("IsLatest"))
        for batch in itertools.chain(_batches(old), _batches(_versions(account, bucket))):
            if refused:
                break
            answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": batch, "Quiet": True})
            errors = answer.get("Errors", [])
            refused += [f"{item['Key']}: {item.get('Code')} {item.get('Message', '')}".strip() for item in errors]
            gone += len(batch) - len(errors)
            say(f"emptied {counted(gone, 'version')} of {bucket}")
    return gone, refused


def _versions(account: Account, bucket: str) -> Iterator[dict[str, Any]]:
    with aws_errors("listing", f"s3://{bucket}"):
        for page in account.client("s3").get_paginator("list_object_versions").paginate(Bucket=bucket):
            yield from page.get("Versions", [])
            yield from page.get("DeleteMarkers", [])


def _batches(versions: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, str]]]:
    batch: list[dict[str, str]] = []
    for version in versions:
        batch.append({"Key": version["Key"], "VersionId": version["VersionId"]})
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
