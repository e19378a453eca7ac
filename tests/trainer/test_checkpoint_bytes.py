"""Loading reads what is needed and no more, and believes nothing that it has not hashed.

The file is also the program that each rank runs: `python -m test_checkpoint_bytes FOLDER`.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from trainer import heartbeat
from trainer.checkpoint import Checkpointer, SpoiledError, restore
from trainer.checkpoint.blocks import BlockTable, values_in, write_blocks
from trainer.checkpoint.destination import LocalDestination, S3Destination
from trainer.checkpoint.manifest import commit_marker, shard_file
from trainer.checkpoint.needs import Needs, Placement
from trainer.checkpoint.ranges import Extents, Share, divided, ranges_of
from trainer.checkpoint.reading import StepReader
from trainer.strategies.flat_shard import FlatShard
from trainer_testing.pool import run_pooled

from trainyard.errors import AwsRefusedError, InputError, JobFailedError

MOST = 1.1
"""Bytes read to bytes needed."""
NUM_LAYERS = 4


def whole() -> dict[str, torch.Tensor]:
    """Matrices and vectors of four layers: 9 MiB."""
    generator = torch.Generator().manual_seed(3)
    return {
        f"{kind}.layers.{layer}.{name}": torch.randn(shape, generator=generator)
        for kind in ("model", "optim")
        for layer in range(NUM_LAYERS)
        for name, shape in (("up", (512, 256)), ("down", (256, 512)), ("norm", (256,)))
    }


# ---------------------------------------------------------------- layouts of four ranks

Layout = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def fsdp(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows over four ranks."""
    mesh = init_device_mesh("cpu", (4,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}


def tensor_parallel(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two by two: rows over pairs, and inside of a pair rows or columns."""
    mesh = init_device_mesh("cpu", (2, 2))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0), Shard(1 if name.endswith("down") else 0)])
        for name, tensor in full.items()
    }


def zero(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flat quarters of every tensor."""
    rank = dist.get_rank()
    pieces = {name: tensor.flatten().tensor_split(4) for name, tensor in full.items()}
    return {
        name: FlatShard(own[rank].clone(), tuple(full[name].shape), sum(len(one) for one in own[:rank]))
        for name, own in pieces.items()
    }


def replicated(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All of it."""
    return {name: tensor.clone() for name, tensor in full.items()}


def pipeline(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Half of the layers on two ranks each, rows over these."""
    stage = dist.get_rank() // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "rows"))["rows"]
    mine = {f"layers.{layer}." for layer in range(2 * stage, 2 * stage + 2)}
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in full.items()
        if any(part in name for part in mine)
    }


CASES: list[tuple[str, Layout, Layout, int, float]] = [
    ("fsdp to fsdp, a rank a host", fsdp, fsdp, 1, 1 / 4),
    ("fsdp to tensor parallel, one host", fsdp, tensor_parallel, 4, 1),
    ("fsdp to tensor parallel, a pair a host", fsdp, tensor_parallel, 2, 1 / 2),
    ("zero to ddp, one host", zero, replicated, 4, 1),
    ("zero to ddp, a rank a host", zero, replicated, 1, 1),
    ("zero to fsdp, a rank a host", zero, fsdp, 1, 1 / 4),
    ("pipeline to pipeline, a stage a host", pipeline, pipeline, 2, 1 / 2),
    ("fsdp to pipeline, a rank a host", fsdp, pipeline, 1, 1 / 4),
    ("pipeline to fsdp, a rank a host", pipeline, fsdp, 1, 1 / 4),
]
"""Name, saved as, loaded as, ranks of a host, and the share of the checkpoint that a host needs."""


def rank_main(folder: str) -> None:
    """One rank: saves and loads every case; prints the bytes that it read in each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_read = [0]
    for name in ("get_range", "get_bytes", "read_into", "read_once_into"):
        original = getattr(LocalDestination, name)

        def counted(self: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
            content: bytes | int = original(self, *arguments, **options)
            num_read[0] += content if isinstance(content, int) else len(content)
            return content

        setattr(LocalDestination, name, counted)
    full = whole()
    for layout in (fsdp, zero, pipeline):
        checkpoints = _checkpointer(Path(folder) / layout.__name__, a_host=4)
        checkpoints.save(1, layout(full), {})
        assert checkpoints.last_error is None, checkpoints.last_error
        checkpoints.close()
    read = {}
    for name, saved, loaded, a_host, _ in CASES:
        num_read[0] = 0
        checkpoints = _checkpointer(Path(folder) / saved.__name__, a_host=a_host)
        tensors = loaded({name: torch.zeros_like(tensor) for name, tensor in full.items()})
        info = checkpoints.latest(lambda tensors=tensors: tensors)  # type: ignore[misc]
        assert info is not None
        checkpoints.load(info, tensors)
        check_loaded(tensors, loaded(full), name)
        read[name] = num_read[0]
        num_read[0] = 0
        tensors = loaded({name: torch.zeros_like(tensor) for name, tensor in full.items()})
        info = checkpoints.latest(lambda tensors=tensors: tensors, may_spoil=True)  # type: ignore[misc]
        assert info is not None
        checkpoints.load(info, tensors)
        check_loaded(tensors, loaded(full), name)
        read[f"{name}, straight"] = num_read[0]
        checkpoints.close()
    print("RESULT " + json.dumps(read), flush=True)
    dist.destroy_process_group()


def check_loaded(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    """Every tensor is what was saved, on this rank."""
    for key, tensor in expected.items():
        assert torch.equal(_local(tensors[key]), _local(tensor)), (name, key, dist.get_rank())


def _checkpointer(folder: Path, *, a_host: int) -> Checkpointer:
    rank = dist.get_rank()
    os.environ |= {"LOCAL_WORLD_SIZE": str(a_host), "LOCAL_RANK": str(rank % a_host)}
    return Checkpointer(
        str(folder),
        rank=rank,
        world_size=4,
        local_dir=folder / "local",
        keep_last=1,
        asynchronous=False,
        process_group=dist.group.WORLD,
        report=lambda line: None,
    )


def _local(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, FlatShard):
        return tensor.local
    values: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return values


def test_a_host_reads_what_its_ranks_need(tmp_path: Path) -> None:
    outputs = run_pooled(4, "test_checkpoint_bytes", str(tmp_path), timeout_seconds=600)
    lines = [next(line for line in output.splitlines() if line.startswith("RESULT ")) for output in outputs]
    read = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    size = sum(tensor.numel() * 4 for tensor in whole().values())
    for case, way in itertools.product(CASES, ("", ", straight")):
        _, _, _, a_host, share = case
        name = case[0] + way
        hosts = [sum(one[name] for one in read[first : first + a_host]) for first in range(0, 4, a_host)]
        for host, num_bytes in enumerate(hosts):
            assert share * size <= num_bytes <= MOST * share * size, f"{name}: host {host} read {num_bytes / size:.3f}"


# ---------------------------------------------------------------- one process


class Job:
    """A checkpointer of one rank, and what it said."""

    def __init__(self, destination: str, tmp_path: Path, *, keep_last: int = 9) -> None:
        self.said: list[str] = []
        self.checkpoints = Checkpointer(
            destination,
            rank=0,
            world_size=1,
            local_dir=tmp_path / "local",
            keep_last=keep_last,
            asynchronous=False,
            report=self.said.append,
            retry_delays_seconds=(),
        )

    def load(self, *names: str) -> tuple[int | None, dict[str, torch.Tensor]]:
        """The step that is taken when these tensors are wanted, and they."""
        tensors = {name: torch.zeros(1000, 1000) for name in names}
        info = self.checkpoints.latest(lambda: tensors)
        if info is not None:
            self.checkpoints.load(info, tensors)
        return info and info.step, tensors


def saved(destination: str, tmp_path: Path) -> None:
    """Steps 1 and 2 with three tensors of 4 MB that are 1 and 2."""
    job = Job(destination, tmp_path)
    for step in (1, 2):
        job.checkpoints.save(step, {name: torch.full((1000, 1000), float(step)) for name in "abc"}, {"step": step})
        assert job.checkpoints.last_error is None


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_half_of_a_model_is_refused_and_what_has_no_averages_may_be_left(tmp_path: Path) -> None:
    """Buffers that another version of a model's code makes anew, an average of weights that is switched off."""
    layers = [f"model.layers.{number}.w" for number in range(6)]
    moments = [f"optim.layers.{number}.w.{kind}" for number in range(6) for kind in ("exp_avg", "average")]
    tensors = {name: torch.ones(3) for name in (*layers, *moments, "model.rotary.inv_freq", "optim.step")}
    job = Job(str(tmp_path), tmp_path)
    job.checkpoints.save(1, tensors, {})
    fewer = {name: torch.zeros(3) for name in tensors if "average" not in name and "rotary" not in name}
    info = job.checkpoints.latest(lambda: fewer)
    assert info is not None
    job.checkpoints.load(info, fewer)
    assert all(one.sum() == 3 for one in fewer.values())
    half = {name: torch.zeros(3) for name in fewer if not any(f"layers.{number}" in name for number in (2, 3, 4, 5))}
    with pytest.raises(InputError, match=r"it holds model.layers.2.w, .* and 1 more, which the job doesn't train"):
        job.checkpoints.latest(lambda: half, may_spoil=True)
    assert all(one.sum() == 0 for one in half.values()), "none of it was read"


def test_a_flipped_bit_is_found_where_it_is_read_and_only_there(tmp_path: Path) -> None:
    saved(str(tmp_path), tmp_path)
    step = tmp_path / "checkpoints/step-00000002"
    size = (step / "__0_0.distcp").stat().st_size
    flip(step / "__0_0.distcp", size // 2)  # in the middle one of three
    job = Job(str(tmp_path), tmp_path)
    assert job.load("a", "c")[0] == 2 and job.said == []
    taken, tensors = job.load("a", "b")
    assert taken == 1 and tensors["b"].eq(1).all()
    assert job.said == [
        "checkpoint step=2 skipped: __0_0.distcp is altered (a block's hash is not the one that was saved);"
        " looking for the one before it"
    ]
    # Without a word on what is wanted all of it is read.
    info = job.checkpoints.latest()
    assert info is not None and info.step == 1


def test_what_may_be_spoiled_is_read_once_and_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(str(tmp_path), tmp_path)
    shards = [tmp_path / f"checkpoints/step-0000000{step}/__0_0.distcp" for step in (1, 2)]
    flip(shards[1], shards[1].stat().st_size // 2)
    monkeypatch.setattr(restore, "fill_from", lambda folder, ranges, *_: ranges and pytest.fail("read twice"))
    job, tensors = Job(str(tmp_path), tmp_path), {name: torch.zeros(1000, 1000) for name in "abc"}
    info = job.checkpoints.latest(lambda: tensors, may_spoil=True)
    assert info is not None and info.step == 1 and "step=2 skipped: __0_0.distcp is altered" in job.said[0]
    assert all(tensor.eq(1).all() for tensor in tensors.values())  # it has nothing of step 2 any more
    assert job.checkpoints.load(info, tensors) == {"step": 1}
    flip(shards[0], shards[0].stat().st_size // 2)
    shutil.rmtree(shards[1].parent)
    with pytest.raises(SpoiledError):
        job.checkpoints.latest(lambda: tensors, may_spoil=True)
    assert "none of 1" in job.said[-1] and "starting anew" in job.said[-1]
    # An index that is torn shows before anything is read: they are what they were.
    flip(shards[0].with_name(".metadata"), 60)
    assert job.checkpoints.latest(lambda: tensors, may_spoil=True) is None


def test_older_checkpoints_are_looked_at_only_where_the_newest_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With keep_every_steps there are many, and S3 takes some 30 ms for each look.
    job = Job(str(tmp_path), tmp_path, keep_last=5)
    for step in range(1, 6):
        job.checkpoints.save(step, {"a": torch.full((1000, 1000), float(step))}, {"step": step})
    looked_at: list[str] = []
    original = LocalDestination.get_bytes

    def noted(self: LocalDestination, name: str) -> bytes:
        looked_at.append(name.split("/")[1])
        return original(self, name)

    monkeypatch.setattr(LocalDestination, "get_bytes", noted)
    assert Job(str(tmp_path), tmp_path).load("a")[0] == 5 and set(looked_at) == {"step-00000005"}
    (tmp_path / "checkpoints/step-00000005/COMMITTED").unlink()
    looked_at.clear()
    assert Job(str(tmp_path), tmp_path).load("a")[0] == 4 and set(looked_at) == {"step-00000004"}
    opened = job.checkpoints.open_step(2)
    assert opened is not None and opened.manifest.step == 2


@pytest.mark.parametrize("name", ["__0_0.distcp.blocks", ".metadata"])
def test_an_index_is_not_believed_either(tmp_path: Path, name: str) -> None:
    saved(str(tmp_path), tmp_path)
    flip(tmp_path / "checkpoints/step-00000002" / name, 60)
    job = Job(str(tmp_path), tmp_path)
    assert job.load("a")[0] == 1
    assert f"step=2 skipped: {name} is altered" in job.said[0]


def test_where_none_of_several_is_whole_nothing_is_started_anew(tmp_path: Path) -> None:
    saved(str(tmp_path), tmp_path)
    for step in (1, 2):
        shard = tmp_path / f"checkpoints/step-0000000{step}/__0_0.distcp"
        flip(shard, shard.stat().st_size // 2)
    job = Job(str(tmp_path), tmp_path)
    with pytest.raises(
        InputError, match=r"none of what was committed at .* \(the newest: step 2\) is whole, and nothing was"
    ):
        job.load("a", "b", "c")
    # A job's first is one interval's work: not worth a stop. One that was never committed is no work at all.
    (tmp_path / "checkpoints/step-00000002/COMMITTED").unlink()
    taken, tensors = job.load("a", "b", "c")
    assert taken is None and all(tensor.eq(0).all() for tensor in tensors.values())
    assert "none of 2" in job.said[-1] and "starting anew" in job.said[-1]


@pytest.mark.parametrize("altered", ["__0_0.distcp", "manifest.json"])
def test_the_only_one_that_is_left_is_no_jobs_first(tmp_path: Path, altered: str) -> None:
    """Whatever removed the others: keep_last: 1, a full disk, a hand."""
    saved(str(tmp_path), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/step-00000001")
    file = tmp_path / "checkpoints/step-00000002" / altered
    flip(file, file.stat().st_size // 2)
    with pytest.raises(InputError, match=r"the newest: step 2.* a copy of its files; .* launch it as a new job"):
        Job(str(tmp_path), tmp_path).load("a", "b", "c")


def test_a_step_that_was_loaded_is_the_one_before_the_next(tmp_path: Path) -> None:
    saved(str(tmp_path), tmp_path)
    job = Job(str(tmp_path), tmp_path)
    job.load("a")
    job.checkpoints.save(3, {"a": torch.ones(10)}, {})
    extras = [json.loads(path.read_bytes())["extra"] for path in sorted(tmp_path.rglob("manifest.json"))]
    assert [extra["previous_step"] for extra in extras] == [None, 1, 2]


def test_checkpoints_without_tables_are_read_whole(tmp_path: Path) -> None:
    # As trainers wrote them before there were tables of blocks.
    saved(str(tmp_path), tmp_path)
    for step in (1, 2):
        folder = tmp_path / f"checkpoints/step-0000000{step}"
        (folder / "__0_0.distcp.blocks").unlink()
        _promise_anew(folder, without=".blocks")
    job = Job(str(tmp_path), tmp_path)
    taken, tensors = job.load("c")
    assert taken == 2 and tensors["c"].eq(2).all()
    shard = tmp_path / "checkpoints/step-00000002/__0_0.distcp"
    flip(shard, shard.stat().st_size // 2)
    assert job.load("c")[0] == 1


def _promise_anew(folder: Path, without: str = "nothing") -> None:
    """Give a step's folder the manifest and the marker of the files that are there now."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    names = [one["name"] for one in manifest["shards"] if not one["name"].endswith(without)]
    files = [shard_file(folder / name) for name in names]
    manifest["shards"] = [{"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256} for file in files]
    content = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMITTED").write_bytes(commit_marker(manifest["step"], content))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on this machine."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{server.get_host_and_port()[1]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket="checkpoints")
    yield "s3://checkpoints/job"
    server.stop()


def test_of_an_object_only_the_bytes_needed_are_fetched(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(s3, tmp_path)
    ranges: list[int] = []
    original = S3Destination.read_into

    def counted(self: S3Destination, name: str, *, start: int, memory: Any) -> int:
        num_read = original(self, name, start=start, memory=memory)
        ranges.append(num_read)
        return num_read

    monkeypatch.setattr(S3Destination, "read_into", counted)
    monkeypatch.setattr(S3Destination, "get_file", lambda *_: pytest.fail("a whole file was fetched"))
    taken, tensors = Job(s3, tmp_path).load("b")
    assert taken == 2 and tensors["b"].eq(2).all()
    assert 4_000_000 <= sum(ranges) <= MOST * 4_000_000
    assert not [path for path in (tmp_path / "local").rglob("*") if path.is_file()]
    # A bit that changed at the destination is found, and the step before it is taken.
    import boto3

    client = boto3.client("s3")
    key = "job/checkpoints/step-00000002/__0_0.distcp"
    content = bytearray(client.get_object(Bucket="checkpoints", Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    client.put_object(Bucket="checkpoints", Key=key, Body=bytes(content))
    taken, tensors = Job(s3, tmp_path).load("b")
    assert taken == 1 and tensors["b"].eq(1).all()


@pytest.mark.slow
def test_room_is_looked_for_once_a_host_and_what_a_killed_run_left_is_no_lack(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(s3, tmp_path)
    fetched = tmp_path / "local/fetched"
    for name in ("step-00000001/__0_0.distcp", "step-00000002/__0_0.distcp"):
        (fetched / name).parent.mkdir(parents=True)
        (fetched / name).write_bytes(bytes(10_000_000))

    def usage(path: Path) -> Any:
        left = sum(file.stat().st_size for file in fetched.rglob("*") if file.is_file())
        return SimpleNamespace(free=5_000_000 - left)

    monkeypatch.setattr(restore, "shutil", SimpleNamespace(disk_usage=usage, rmtree=shutil.rmtree))
    assert Job(s3, tmp_path).load("b")[0] == 2
    with pytest.raises(AwsRefusedError, match="no room for step-00000002: 4 MiB free"):
        Job(s3, tmp_path).load("a", "b")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    other = Job(s3, tmp_path).checkpoints._restorer
    candidate = next(other._candidates())
    assert candidate.manifest is not None
    reader = StepReader(other._destination, candidate.manifest, other._retry)
    needs = Needs(reader.index, {name: torch.zeros(1000, 1000) for name in "ab"})
    # It doesn't raise: the first rank of the host sees to it.
    other._make_room(2, reader, needs.blocks(reader.table))


# ---------------------------------------------------------------- arithmetic


def test_bytes_of_a_box_go_where_they_belong_however_they_are_cut() -> None:
    for sizes in ((), (5,), (3, 4), (2, 3, 4)):
        numbers = torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes)
        content = numbers.reshape(-1).view(torch.uint8)
        spans = [[(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in sizes]
        for block in itertools.product(*spans):
            wanted = numbers[tuple(slice(a, b) for a, b in block)]
            place = {"sizes": sizes, "offsets": [a for a, _ in block], "lengths": [b - a for a, b in block]}
            targets = [torch.full_like(wanted, -1, dtype=kind) for kind in (torch.float32, torch.float64)]
            targets.append(torch.full((*wanted.shape, 2), -1.0)[..., 0])  # with gaps
            for target in targets:
                placement = Placement(target, torch.float32, **place)  # type: ignore[arg-type]
                for start, end in itertools.pairwise(range(0, len(content) + 12, 12)):
                    piece = content[start : min(end, len(content))]
                    memory = placement.memory(start, start + len(piece))
                    if memory is None:
                        placement.put(start, piece.clone())
                    else:
                        memory[:] = piece.numpy().data
                assert torch.equal(target.float(), wanted), (sizes, block)


def test_each_block_is_read_by_one_of_those_that_need_it() -> None:
    assert [divided([{"a": [(0, 9)]}])[0], divided([{"a": [(0, 4)]}, {}])[1].borrowed] == [
        Share({"a": [(0, 9)]}, {}, {}),
        {},
    ]
    generator = random.Random(1)
    for _ in range(50):
        wanted = [{name: {b for b in range(30) if generator.random() < 0.6} for name in "ab"} for _ in range(3)]
        needs = [{name: [(b, b + 1) for b in sorted(blocks)] for name, blocks in one.items()} for one in wanted]
        shares = divided(needs)
        for name in "ab":
            read = [_blocks(one.alone, name) + _blocks(one.shared, name) for one in shares]
            assert sorted(itertools.chain(*read)) == sorted(set().union(*(one[name] for one in wanted)))
            for rank, share in enumerate(shares):
                assert sorted(read[rank] + _blocks(share.borrowed, name)) == sorted(wanted[rank][name])
                others = set().union(*(one[name] for place, one in enumerate(wanted) if place != rank))
                assert not others & set(_blocks(share.alone, name)) and others >= set(_blocks(share.shared, name))


def _blocks(extents: Extents, name: str) -> list[int]:
    return [block for first, end in extents.get(name, []) for block in range(first, end)]


def test_values_are_found_in_what_torch_saves(tmp_path: Path) -> None:
    tensors = [torch.randn(3, 5), torch.ones(7, dtype=torch.bfloat16), torch.tensor(2.5), torch.zeros(0, 4)]
    path, places = tmp_path / "shard", []
    with path.open("wb") as file:
        for tensor in tensors:
            start = file.tell()
            torch.save(tensor, file)
            places.append((start, file.tell() - start))
    with path.open("rb") as file:
        for tensor, place in zip(tensors, places, strict=True):
            start, num_bytes = values_in(file, *place)
            assert num_bytes == tensor.nbytes
            expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if num_bytes else b""
            assert path.read_bytes()[start : start + num_bytes] == expected
    table = write_blocks(path, places)
    assert [
        box["num_bytes"] if isinstance(box, dict) else box[2] for box in json.loads(table.read_text())["boxes"]
    ] == [tensor.nbytes for tensor in tensors]


def test_the_first_tables_had_sha256_and_are_read(tmp_path: Path) -> None:
    saved(str(tmp_path), tmp_path)
    folder = tmp_path / "checkpoints/step-00000002"
    path, shard = folder / "__0_0.distcp.blocks", (folder / "__0_0.distcp").read_bytes()
    table = json.loads(path.read_bytes())
    assert table["version"] == 2
    for box in table["boxes"]:
        _, start, num_bytes, block_bytes, _ = box
        ends = [*range(start + block_bytes, start + num_bytes, block_bytes), start + num_bytes]
        blocks = [shard[begin:end] for begin, end in itertools.pairwise([start, *ends])]
        box[4] = "".join(hashlib.sha256(block).hexdigest() for block in blocks)

    def write(**more: Any) -> None:
        path.write_text(json.dumps(table | more))
        _promise_anew(folder)

    job = Job(str(tmp_path), tmp_path)
    write(version=1)
    assert job.load("a", "b", "c")[0] == 2 and job.said == []
    for box in table["boxes"]:
        box[4] = box[4][::-1]
    write(version=1)
    assert job.load("a")[0] == 1 and "step=2 skipped: __0_0.distcp is altered" in job.said[-1]
    write(version=2)
    assert job.load("a")[0] == 1 and "as many hashes as blocks" in job.said[-1]


@pytest.mark.parametrize("newer", ["__0_0.distcp.blocks", "manifest.json"])
def test_what_a_newer_trainer_wrote_is_neither_passed_over_nor_removed(tmp_path: Path, newer: str) -> None:
    saved(str(tmp_path), tmp_path)
    folder = tmp_path / "checkpoints/step-00000002"
    content = json.dumps(json.loads((folder / newer).read_bytes()) | {"version": 99}).encode()
    (folder / newer).write_bytes(content)
    if newer == "manifest.json":
        (folder / "COMMITTED").write_bytes(commit_marker(2, content))
    else:
        _promise_anew(folder)
    job = Job(str(tmp_path), tmp_path)
    with pytest.raises(InputError, match=r"step-00000002: .* has version 99, .* launch the job with that image"):
        job.load("a")
    assert job.said == []
    if newer == "manifest.json":
        with pytest.raises(InputError, match="has version 99"):
            job.checkpoints.open_step(None)
    else:
        step = job.checkpoints.open_step(None)
        assert step is not None
        with pytest.raises(InputError, match="has version 99"):
            step.tensor("a")
    assert (folder / "COMMITTED").exists()


def test_what_a_newer_trainer_left_on_the_hosts_own_disk_ends_the_start(tmp_path: Path) -> None:
    def checkpointer() -> Checkpointer:
        return Checkpointer(
            str(tmp_path / "destination"),
            rank=0,
            world_size=1,
            local_dir=tmp_path / "scratch",
            local_tier=tmp_path / "disk",
            keep_last=9,
            asynchronous=False,
            report=lambda line: None,
        )

    checkpointer().save(1, {"a": torch.ones(10)}, {})
    (manifest,) = (tmp_path / "disk").rglob("manifest.json")
    content = json.dumps(json.loads(manifest.read_bytes()) | {"version": 99}).encode()
    manifest.write_bytes(content)
    manifest.with_name("COMMITTED").write_bytes(commit_marker(1, content))
    with pytest.raises(InputError, match=r"disk/.*step-00000001: manifest.json has version 99"):
        checkpointer().latest()


def test_what_lies_apart_is_one_request_only_where_little_is_between() -> None:
    digest = bytes(16)
    near = BlockTable([(at, at + 10, 65536, 65536, digest) for at in range(0, 10 * 65600, 65600)])
    far = BlockTable([(at, at + 10, 65536, 65536, digest) for at in range(0, 10 * 99_000, 99_000)])
    tables = {"near": near, "far": far}.__getitem__
    assert [len(one.blocks) for one in ranges_of({"near": [(0, 10)]}, tables)] == [10]
    assert [len(one.blocks) for one in ranges_of({"far": [(0, 10)]}, tables)] == [1] * 10
    mixed = ranges_of({"near": [(2, 5), (7, 9)], "far": [(0, 2)]}, tables)
    assert [one.blocks for one in mixed] == [(2, 3, 4), (7, 8), (0,), (1,)]


if __name__ == "__main__":
    rank_main(*sys.argv[1:])


def test_a_long_read_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(str(tmp_path), tmp_path)
    heart = tmp_path / "heart"
    monkeypatch.setenv(heartbeat.FILE_VARIABLE, str(heart))
    monkeypatch.setattr(heartbeat, "_heart", functools.cache(heartbeat._Heart))
    job = Job(str(tmp_path), tmp_path)
    assert job.load("a", "b")[0] == 2
    at_start = heartbeat.read_beat(heart)
    assert at_start is not None and at_start.step == 0 and at_start.number > 0
    heartbeat.beat(3)
    assert job.load("a", "b")[0] == 2
    beat = heartbeat.read_beat(heart)
    assert beat is not None and beat.step == 3 and beat.number > at_start.number + 1


def test_an_index_that_is_gone_when_it_is_loaded_is_one_line(tmp_path: Path) -> None:
    saved(str(tmp_path), tmp_path)
    job = Job(str(tmp_path), tmp_path)
    info = job.checkpoints.latest()
    assert info is not None and info.reader is not None
    (tmp_path / "checkpoints/step-00000002/.metadata").unlink()
    with pytest.raises(JobFailedError, match=r"step-00000002: can't be read: .*\.metadata"):
        job.checkpoints.load(info, {"a": torch.zeros(1000, 1000)})
