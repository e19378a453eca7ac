"""Uploads in parts through an S3 that fails: slowed down, a wrong ETag, half a body, what a kill leaves."""

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import ClientError
from botocore.response import StreamingBody
from moto.server import DomainDispatcherApplication, create_backend_app
from trainer.checkpoint import Checkpointer, destination
from urllib3.exceptions import SSLError
from werkzeug.serving import make_server

BUCKET = "acme-checkpoints"
NUM_FLOATS = 3 << 20
"""12 MiB: three parts of at least S3's least size."""

Application = Callable[[dict[str, Any], Any], Any]


class Door:
    """In front of moto's S3; `fault` may answer a request itself, or change it, or what is answered."""

    def __init__(self) -> None:
        self._inner: Application = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[dict[str, Any], Any, Application], Any] | None = None
        self.seen: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        self.seen.append(f"{environ['REQUEST_METHOD']} {environ.get('QUERY_STRING', '')}")
        if self.fault is None:
            return self._inner(environ, start)
        return self.fault(environ, start, self._inner)


def is_part(environ: dict[str, Any]) -> bool:
    """Whether the request brings a part of an upload."""
    return bool(environ["REQUEST_METHOD"] == "PUT" and "partNumber=" in environ.get("QUERY_STRING", ""))


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    """The endpoint, in this process's environment."""
    application = Door()
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    patch = pytest.MonkeyPatch()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        patch.setenv(name, value)
    patch.setattr(destination, "_MULTIPART_BYTES", 5 << 20)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield application
    patch.undo()
    server.shutdown()


@pytest.fixture
def job(door: Door, tmp_path: Path) -> Iterator["Job"]:
    """One job, whose step 1 is saved; the door works again afterwards."""
    job = Job(tmp_path)
    job.save(1)
    assert job.checkpoints.last_error is None, job.said
    door.seen.clear()
    yield job
    door.fault = None


class Job:
    """A checkpointer and what it said."""

    def __init__(self, tmp_path: Path) -> None:
        self.said: list[str] = []
        self.prefix = f"jobs/{tmp_path.name}"
        self.checkpoints = Checkpointer(
            f"s3://{BUCKET}/{self.prefix}",
            rank=0,
            world_size=1,
            local_dir=tmp_path / "local",
            keep_last=3,
            asynchronous=True,
            report=self.said.append,
            retry_delays_seconds=(0.0, 0.0),
        )

    def save(self, step: int) -> None:
        """A checkpoint of three parts."""
        self.checkpoints.save(step, {"model.a": torch.full((NUM_FLOATS,), float(step))}, {"step": step})
        self.checkpoints.wait()

    def newest(self) -> int:
        """The step that is found, loaded and compared."""
        info = self.checkpoints.latest()
        assert info is not None
        tensors = {"model.a": torch.zeros(NUM_FLOATS)}
        self.checkpoints.load(info, tensors)
        assert bool((tensors["model.a"] == float(info.step)).all())
        return info.step

    def unfinished(self) -> list[str]:
        """Keys of uploads in parts that nobody ended."""
        found = boto3.client("s3").list_multipart_uploads(Bucket=BUCKET, Prefix=self.prefix)
        return [one["Key"] for one in found.get("Uploads", ())]


def test_slow_down_and_a_wrong_etag_only_cost_time(door: Door, job: Job) -> None:
    left = {"503": 4, "etag": 1}

    def fault(environ: dict[str, Any], start: Any, inner: Application) -> Any:
        if is_part(environ) and left["503"] > 0:
            left["503"] -= 1
            environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        if is_part(environ) and left["etag"] > 0:
            left["etag"] -= 1
            return inner(environ, lambda status, headers, *more: start(status, _wrong(headers), *more))
        return inner(environ, start)

    door.fault = fault
    job.save(2)
    assert left == {"503": 0, "etag": 0}
    assert job.checkpoints.last_error is None, job.said
    assert job.newest() == 2
    assert job.unfinished() == []
    # An upload whose parts aren't what S3 has is begun anew, whole.
    assert sum("uploads" in request and request.startswith("POST") for request in door.seen) >= 2
    assert any("next try in" in line and "InvalidPart" in line for line in job.said), job.said


def _wrong(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (name, '"0123456789abcdef0123456789abcdef"' if name.lower() == "etag" else value) for name, value in headers
    ]


def test_half_a_body_is_no_checkpoint(door: Door, job: Job) -> None:
    def fault(environ: dict[str, Any], start: Any, inner: Application) -> Any:
        if is_part(environ) and "partNumber=3" in environ["QUERY_STRING"]:
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body[: len(body) // 2])
            environ["CONTENT_LENGTH"] = str(len(body) // 2)
            environ.pop("HTTP_X_AMZ_DECODED_CONTENT_LENGTH", None)
        return inner(environ, start)

    door.fault = fault
    job.save(2)
    assert "training goes on" in job.said[-1] and job.checkpoints.last_error is not None
    door.fault = None
    assert job.newest() == 1
    job.save(3)
    assert job.newest() == 3


def test_what_a_killed_upload_left_is_removed_at_the_next_start(job: Job, tmp_path: Path) -> None:
    s3 = boto3.client("s3")
    # What S3 keeps of an upload whose process is gone.
    cut = {"Bucket": BUCKET, "Key": f"{job.prefix}/checkpoints/step-00000002/__0_0.distcp"}
    upload = s3.create_multipart_upload(**cut)["UploadId"]
    s3.upload_part(**cut, UploadId=upload, PartNumber=1, Body=b"half of a shard")
    others = {"Bucket": BUCKET, "Key": f"{job.prefix}-another/checkpoints/step-00000002/__0_0.distcp"}
    others_upload = s3.create_multipart_upload(**others)["UploadId"]
    again = Job(tmp_path)
    assert again.newest() == 1 and len(again.unfinished()) == 2
    again.save(3)
    assert again.unfinished() == [others["Key"]], "this job's are given up, another's are not"
    again.save(4)
    assert again.said.count("checkpoint unfinished uploads of an earlier run removed: 1") == 1
    assert again.newest() == 4
    s3.abort_multipart_upload(**others, UploadId=others_upload)


@pytest.mark.parametrize("way", ["readinto", "read"])
def test_a_connection_that_breaks_amid_an_answer_is_asked_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of TLS the HTTP client raises an error of its own, which the SDK hands on as it is."""
    original, broken = getattr(StreamingBody, way), []

    def break_once(self: StreamingBody, *rest: Any, **options: Any) -> Any:
        if not broken:
            broken.append(way)
            raise SSLError("DECRYPTION_FAILED_OR_BAD_RECORD_MAC")
        return original(self, *rest, **options)

    monkeypatch.setattr(StreamingBody, way, break_once)
    tensors = {"model.a": torch.zeros(NUM_FLOATS)}
    info = job.checkpoints.latest(lambda: tensors)
    assert info is not None and info.step == 1 and broken == [way]
    assert any("next try in" in line and "BAD_RECORD_MAC" in line for line in job.said), job.said


@pytest.mark.parametrize(
    "code",
    [
        "KMS.DisabledException",
        "KMS.InvalidKeyUsageException",
        "KMS.KMSInvalidStateException",
        "KMS.NotFoundException",
    ],
)
def test_a_key_out_of_service_is_not_asked_again(code: str) -> None:
    """A person must mend it: a key that awaits its deletion is no passing trouble."""
    answer = {"Error": {"Code": code, "Message": "arn:aws:kms:us-east-1:123456789012:key/one"}}
    with pytest.raises(destination.DestinationError) as caught, destination.s3_errors("can't write it"):
        raise ClientError(answer, "PutObject")
    assert caught.value.is_refusal


def test_why_an_upload_failed_is_said_however_long_the_names_are() -> None:
    """The SDK tells of an upload by two paths, and of the cause after them: what was cut off there was the cause, and
    with it that another try is in vain."""
    paths = f"/opt/ml/{'x' * 200}/shard-0 to {BUCKET}/jobs/{'y' * 200}/shard-0"
    refused = "An error occurred (AccessDenied) when calling the PutObject operation: Access Denied"
    with pytest.raises(destination.DestinationError) as caught, destination.s3_errors("can't upload s3://x/shard-0"):
        raise S3UploadFailedError(f"Failed to upload {paths}: {refused}")
    assert str(caught.value) == f"can't upload s3://x/shard-0: {refused}" and caught.value.permanent
    with pytest.raises(destination.DestinationError, match=": a broken pipe"), destination.s3_errors("can't upload x"):
        raise S3UploadFailedError("Failed to upload a to b: a broken pipe")
