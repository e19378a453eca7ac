"""Checkpoints of several ranks: any layout reads any other's, a lost or failing rank spoils nothing.

The file is also the program that each rank runs: `python -m test_checkpoint_ranks SCENARIO DESTINATION LOCAL_DIR`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from trainer.checkpoint import Checkpointer
from trainer.checkpoint.destination import DestinationError, LocalDestination, S3Destination, open_destination
from trainer.strategies.flat_shard import FlatShard
from trainer_testing.distributed import finish
from trainer_testing.pool import run_pooled, start_pooled

from trainyard.errors import InputError

BUCKET = "acme-checkpoints"


def whole(step: int) -> dict[str, torch.Tensor]:
    """The full tensors of a step: no dimension divides by the ranks."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.sharded": torch.randn(13, 7, generator=generator),
        "model.columns": torch.randn(5, 11, generator=generator),
        "optim.flat": torch.randn(9, 5, generator=generator),
        "model.replicated.a": torch.randn(40, 50, generator=generator),
        "model.replicated.b": torch.randn(30, 50, generator=generator),
        "optim.step": torch.tensor(float(step)),
    }


def laid_out(full: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """This rank's part of the tensors: FSDP-like rows, TP-like columns, a ZeRO-like flat range, and whole ones."""
    mesh = init_device_mesh("cpu", (world_size,))
    flat = full["optim.flat"].flatten()
    share = -(-flat.numel() // world_size)
    start, end = min(rank * share, flat.numel()), min((rank + 1) * share, flat.numel())
    return {
        **{name: tensor.clone() for name, tensor in full.items()},
        "model.sharded": distribute_tensor(full["model.sharded"], mesh, [Shard(0)]),
        "model.columns": distribute_tensor(full["model.columns"], mesh, [Shard(1)]),
        "model.replicated.b": distribute_tensor(full["model.replicated.b"], mesh, [Replicate()]),
        "optim.flat": FlatShard(flat[start:end].clone(), tuple(full["optim.flat"].shape), start),
    }


def is_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether this rank's part of every tensor is bitwise as expected."""

    def local(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FlatShard):
            return tensor.local
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    return all(torch.equal(local(loaded[name]), local(expected[name])) for name in expected)


# ---------------------------------------------------------------- what ranks do


class Rank:
    """One rank with its checkpointer."""

    def __init__(self, destination: str, local_dir: Path, **options: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.said: list[str] = []
        settings: dict[str, Any] = {"keep_last": 2, "asynchronous": True, "retry_delays_seconds": (), **options}
        self.checkpoints = Checkpointer(
            destination,
            rank=self.rank,
            world_size=self.world_size,
            local_dir=local_dir,
            process_group=dist.group.WORLD,
            report=self.said.append,
            **settings,
        )

    def save(self, step: int) -> None:
        """A checkpoint of the step; ranks have states of their own in `extra`."""
        tensors = laid_out(whole(step), self.rank, self.world_size)
        extra = {"step": step, "rng": f"rng of rank {self.rank}", "strategy": "fsdp"}
        self.checkpoints.save(step, tensors, extra)

    def load(self) -> dict[str, Any]:
        """The newest one, loaded and compared; its extra."""
        info = self.checkpoints.latest()
        assert info is not None
        tensors = laid_out({name: torch.zeros_like(t) for name, t in whole(0).items()}, self.rank, self.world_size)
        extra = self.checkpoints.load(info, tensors)
        assert is_same(tensors, laid_out(whole(info.step), self.rank, self.world_size))
        return extra


def scenario_save(rank: Rank) -> dict[str, Any]:
    """Two saves, and collectives of the training thread meanwhile."""
    for step in (1, 2):
        rank.save(step)
        for _ in range(300):
            dist.all_reduce(torch.ones(1))
    rank.checkpoints.wait()
    return {"error": rank.checkpoints.last_error, "said": rank.said}


def scenario_load(rank: Rank) -> dict[str, Any]:
    """Load at this layout."""
    return rank.load()


def scenario_failing_rank(rank: Rank) -> dict[str, Any]:
    """Rank 1 can't write the second of three checkpoints."""
    rank.save(1)
    rank.checkpoints.wait()
    original = type(rank.checkpoints._host_copy).write

    def fail(*_: Any, **__: Any) -> Any:
        raise DestinationError("rank 1's disk is broken", permanent=True)

    if rank.rank == 1:
        type(rank.checkpoints._host_copy).write = fail  # type: ignore[method-assign]
    rank.save(2)
    rank.checkpoints.wait()
    failed = rank.checkpoints.last_error
    found = rank.checkpoints.latest()
    type(rank.checkpoints._host_copy).write = original  # type: ignore[method-assign]
    rank.save(3)
    rank.checkpoints.wait()
    return {
        "failed": failed,
        "found": found and found.step,
        "after": rank.checkpoints.last_committed_step,
        "said": rank.said,
    }


def scenario_full_disk(rank: Rank) -> dict[str, Any]:
    """One rank's disk is too full for the second checkpoint: all ranks skip it together. Then all ranks' are."""
    from trainer.checkpoint import checkpointer

    rank.save(1)
    if rank.rank == 1:
        checkpointer.free_bytes = lambda folder: 0
    rank.save(2)
    checkpointer.free_bytes = lambda folder: 0
    rank.save(3)
    rank.checkpoints.wait()
    return {"failed": rank.checkpoints.last_error, "kept": rank.checkpoints.last_committed_step, "said": rank.said}


def scenario_more_on_one_rank(rank: Rank) -> dict[str, Any]:
    """Rank 1 has a tensor more at the second save: the others, who keep their plan, make it anew with it."""
    for step in (1, 2):
        tensors = laid_out(whole(step), rank.rank, rank.world_size)
        if step == 2 and rank.rank == 1:
            tensors["model.more"] = torch.full((3, 4), 7.0)
        rank.checkpoints.save(step, tensors, {"step": step})
    rank.checkpoints.wait()
    error = rank.checkpoints.last_error
    rank.load()
    more = torch.zeros(3, 4)
    info = rank.checkpoints.latest()
    assert info is not None
    rank.checkpoints.load(info, {"model.more": more})
    return {"error": error, "step": info.step, "more": more.unique().tolist()}


def scenario_stages(rank: Rank) -> dict[str, Any]:
    """Each rank has a layer of its own, as a pipeline's stage has; then the last one asks for less than was saved."""
    names = [f"layers.{number}" for number in (rank.rank, rank.rank + rank.world_size)]
    tensors = {f"{kind}.{name}": torch.full((3, 4), 7.0) for name in names for kind in ("model", "optim")}
    tensors = {name + (".exp_avg" if name.startswith("optim") else ""): one for name, one in tensors.items()}
    rank.checkpoints.save(1, tensors, {})
    rank.checkpoints.wait()
    fewer = {name: one for name, one in tensors.items() if "layers.3" not in name}
    refusals = []
    for options in ({"may_spoil": True}, {"may_spoil": False}, None):
        for wanted in (tensors, fewer):
            loaded = {name: torch.zeros_like(one) for name, one in wanted.items()}
            try:
                given = (lambda loaded=loaded: loaded,) if options is not None else ()  # type: ignore[misc]
                info = rank.checkpoints.latest(*given, **(options or {}))
                assert info is not None
                rank.checkpoints.load(info, loaded)
                assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
            except InputError as error:
                refusals.append(str(error).partition(": ")[2])
    return {"refusals": refusals}


def scenario_killed_rank(rank: Rank) -> dict[str, Any]:
    """Rank 1 is killed while it writes the second checkpoint; the others must get out."""
    rank.save(1)
    rank.checkpoints.wait()
    if rank.rank == 1:
        type(rank.checkpoints._host_copy).write = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
    rank.save(2)
    rank.checkpoints.wait()
    return {"failed": rank.checkpoints.last_error, "kept": rank.checkpoints.last_committed_step}


def scenario_count_downloads(rank: Rank) -> dict[str, Any]:
    """Load from S3 and count what was fetched."""
    fetched: list[str] = []
    original = S3Destination.get_file

    def noted(self: S3Destination, name: str, path: Path) -> None:
        fetched.append(name.rsplit("/", 1)[1])
        original(self, name, path)

    S3Destination.get_file = noted  # type: ignore[method-assign]
    rank.load()
    return {"fetched": fetched}


SCENARIOS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    name.removeprefix("scenario_"): value for name, value in list(globals().items()) if name.startswith("scenario_")
}


def rank_main(scenario: str, destination: str, local_dir: str) -> None:
    """One rank: runs the scenario and prints what came of it."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    dist.init_process_group("gloo")
    result = SCENARIOS[scenario](Rank(destination, Path(local_dir)))
    print("RESULT " + json.dumps(result), flush=True)
    if scenario == "killed_rank":
        os._exit(0)  # the group has a hole: there is nobody to say goodbye to
    dist.destroy_process_group()


# ---------------------------------------------------------------- tests


def run(scenario: str, ranks: int, destination: str, tmp_path: Path) -> list[dict[str, Any]]:
    """What each rank printed."""
    arguments = (scenario, destination, str(tmp_path / "local"))
    return [_result(output) for output in run_pooled(ranks, "test_checkpoint_ranks", *arguments, timeout_seconds=600)]


def _result(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.fixture
def s3_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A prefix on an S3 on this machine."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{server.get_host_and_port()[1]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield f"s3://{BUCKET}/{tmp_path.name}"
    server.stop()


def test_any_number_of_ranks_reads_what_three_wrote(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    saved = run("save", 3, destination, tmp_path)
    assert [one["error"] for one in saved] == [None] * 3
    assert [line.split(" uri=")[0] for line in saved[0]["said"]] == [
        "checkpoint step=1 committed",
        "checkpoint step=2 committed",
    ]
    assert saved[1]["said"] == saved[2]["said"] == []
    same = run("load", 3, destination, tmp_path)
    assert [one["rng"] for one in same] == [f"rng of rank {rank}" for rank in range(3)]
    for ranks in (1, 2):
        other = run("load", ranks, destination, tmp_path)
        # Another number of ranks has no states of its own there: it gets the first rank's.
        assert other == [{"step": 2, "rng": "rng of rank 0", "strategy": "fsdp"}] * ranks
    # What every rank holds is written once, and not by one rank alone.
    sizes = open_destination(destination).sizes("checkpoints/step-00000002")
    shards = [size for name, size in sizes.items() if name.endswith(".distcp")]
    assert len(shards) == 3 and max(shards) < 0.7 * sum(shards)
    num_bytes = sum(tensor.numel() * 4 for tensor in whole(0).values())
    assert num_bytes < sum(shards) < 2 * num_bytes + 30_000


def test_a_host_fetches_each_file_once(s3_destination: str, tmp_path: Path) -> None:
    run("save", 2, s3_destination, tmp_path)
    fetched = [one["fetched"] for one in run("count_downloads", 3, s3_destination, tmp_path)]
    shards = ["__0_0.distcp", "__1_0.distcp"]
    tables = [f"{name}.blocks" for name in shards]
    assert sorted(name for names in fetched for name in names) == sorted([".metadata", *shards, *tables])
    assert all(1 <= len(names) <= 2 for names in fetched)
    assert not [path for path in (tmp_path / "local").rglob("*") if path.is_file()]


def test_a_rank_that_cannot_write_costs_one_checkpoint(tmp_path: Path) -> None:
    results = run("failing_rank", 2, str(tmp_path / "destination"), tmp_path)
    for result in results:
        assert result["failed"] == "rank 1: rank 1's disk is broken"
        assert (result["found"], result["after"]) == (1, 3)
    said = results[0]["said"]
    assert "checkpoint step=2 not committed: rank 1: rank 1's disk is broken; training goes on" in said
    assert any(line.startswith("checkpoint step=2 skipped: it has no COMMITTED marker") for line in said)


def test_a_full_disk_on_one_rank_skips_the_save_on_all(tmp_path: Path) -> None:
    results = run("full_disk", 2, str(tmp_path / "destination"), tmp_path)
    for result in results:
        assert result["failed"].startswith("a disk is too full") and result["kept"] == 1
    lacking = [[line[:17] for line in result["said"] if "has 0 MiB free" in line] for result in results]
    assert lacking == [["checkpoint step=3"], ["checkpoint step=2"]], "once a host, by a rank that lacks it"
    assert any(line.startswith("checkpoint step=2 not committed") for line in results[0]["said"])


def test_a_checkpoint_of_more_layers_than_the_job_has_is_refused_on_all_ranks(tmp_path: Path) -> None:
    refusal = "it holds model.layers.3, which the job doesn't train; the job's model is not the one that was saved"
    for result in run("stages", 2, str(tmp_path / "destination"), tmp_path):
        assert result["refusals"] == [refusal] * 3, "and what all ranks together ask for is loaded"


def test_a_tensor_that_only_one_rank_has_anew_is_saved(tmp_path: Path) -> None:
    for result in run("more_on_one_rank", 2, str(tmp_path / "destination"), tmp_path):
        assert result == {"error": None, "step": 2, "more": [7.0]}


def test_a_rank_killed_in_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    ranks = start_pooled(3, "test_checkpoint_ranks", "killed_rank", destination, str(tmp_path / "local"))
    ended = finish(ranks, timeout_seconds=600)
    assert [code for code, _ in ended] == [0, -signal.SIGKILL, 0], ended
    for _, output in (ended[0], ended[2]):
        result = _result(output)
        assert result["failed"] and result["kept"] == 1
    assert run("load", 2, destination, tmp_path)[0]["step"] == 1


def test_threads_of_this_process_do_not_mix_up_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One in flight: a save called while another is on its way waits, in whatever thread it began.
    writing: list[str] = []
    at_once: list[int] = []
    original = LocalDestination.put_bytes

    def noted(self: LocalDestination, name: str, content: bytes) -> None:
        writing.append(name)
        time.sleep(0.05)
        at_once.append(len(writing))
        original(self, name, content)
        writing.remove(name)

    monkeypatch.setattr(LocalDestination, "put_bytes", noted)
    checkpoints = Checkpointer(
        str(tmp_path / "d"), rank=0, world_size=1, local_dir=tmp_path / "l", keep_last=9, asynchronous=True
    )
    for step in range(4):
        checkpoints.save(step, {"a": torch.full((3,), float(step))}, {})
    checkpoints.close()
    assert at_once == [1] * 8, "manifest and marker of each, one after the other"


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
