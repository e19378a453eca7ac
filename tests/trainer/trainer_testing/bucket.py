"""An S3 on this machine, with one bucket, for what reads and writes there: this process and all that it starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "acme-data"


@contextmanager
def bucket_here() -> Iterator[Any]:
    """A client of it; the environment names it meanwhile."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    named = {
        "AWS_ENDPOINT_URL": f"http://localhost:{server.get_host_and_port()[1]}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with patch.dict(os.environ, named):
            client = boto3.client("s3")
            client.create_bucket(Bucket=BUCKET)
            yield client
    finally:
        server.stop()


def upload(client: Any, path: Path, prefix: str) -> str:
    """A file, or all files of a folder, below a prefix; the URI."""
    if path.is_file():
        client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}")
        return f"s3://{BUCKET}/{prefix}/{path.name}"
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        client.upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(path)}")
    return f"s3://{BUCKET}/{prefix}"
