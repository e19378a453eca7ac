"""A tenant's buckets on the way out: counted, copied elsewhere, emptied with all their versions."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.errors import AwsRefusedError
from trainyard.launch.aws import aws_errors
from trainyard.launch.session import Account

Say = Callable[[str], None]
BATCH = 1000
"""Keys that one DeleteObjects takes."""
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
        return f"{self.objects} objects ({self.size_bytes / 2**30:.2f} GiB), {self.old_versions} old versions"


def contents(account: Account, bucket: str) -> Contents:
    """Counted by listing: a call for every thousand versions."""
    objects = size = old = 0
    for version in _versions(account, bucket):
        if version.get("IsLatest") and "Size" in version:
            objects, size = objects + 1, size + int(version["Size"])
        else:
            old += 1
    return Contents(objects, size, old)


def export(launcher: Account, writer: Account, bucket: str, target: str, say: Say) -> tuple[int, int]:
    """Copy every current object of `bucket` to s3://TARGET/<bucket>/...; how many objects and bytes.

    Read as the tenant's launcher, written as whoever removes the tenant: no one else's role may do both, as the
    account's own administrators can't use the tenant's keys. So the bytes pass through this machine.
    """
    reader, store = launcher.client("s3"), writer.client("s3")
    target_bucket, _, prefix = target.removeprefix("s3://").partition("/")
    folder = f"{prefix.rstrip('/')}/{bucket}".lstrip("/")
    objects = size = 0
    with aws_errors("copying", f"s3://{bucket} to {target}", "check that you may write there"):
        for page in reader.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for item in page.get("Contents", []):
                read = reader.get_object(Bucket=bucket, Key=item["Key"])
                copied = f"{folder}/{item['Key']}"
                wanted = int(read["ContentLength"])
                store.upload_fileobj(read["Body"], target_bucket, copied, Config=_transfer(wanted))
                written = int(store.head_object(Bucket=target_bucket, Key=copied)["ContentLength"])
                if written != wanted:
                    raise AwsRefusedError(
                        f"s3://{target_bucket}/{copied} holds {written} bytes instead of {wanted}; nothing was "
                        "deleted: see who else writes there, and repeat the command"
                    )
                objects, size = objects + 1, size + written
                say(f"copied {objects} objects of {bucket}")
    return objects, size


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


def empty(account: Account, bucket: str, say: Say) -> tuple[int, list[str]]:
    """Delete every version, marker and torn upload of a bucket: how many versions went, and why others stayed."""
    s3 = account.client("s3")
    gone, refused = 0, []
    with aws_errors("emptying", f"s3://{bucket}"):
        for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket):
            for upload in page.get("Uploads", []):
                s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        for batch in _batches(_versions(account, bucket)):
            answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": batch, "Quiet": True})
            errors = answer.get("Errors", [])
            refused += [f"{item['Key']}: {item.get('Code')} {item.get('Message', '')}".strip() for item in errors]
            gone += len(batch) - len(errors)
            say(f"emptied {gone} versions of {bucket}")
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
