"""Checkpoints on the hosts' own disks before the destination has them: two ranks, each its own host.

The file is also the program that each rank runs: `python -m test_checkpoint_tiers FOLDER`. One start plays all cases.
"""

import builtins
import errno
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from test_checkpoint_ranks import is_same, laid_out, whole
from trainer.checkpoint import Checkpointer, checkpointer, local_tier, manifest, restore
from trainer.checkpoint.destination import DestinationError, LocalDestination
from trainer_testing.distributed import finish
from trainer_testing.pool import run_pooled
from trainer_testing.text_job import run_trainer, start_faulty_trainer, write_job

from trainyard.errors import JobFailedError
from trainyard.spec.job import CheckpointSpec

# ---------------------------------------------------------------- what ranks do


class Host:
    """One rank with its own disk, and a shared destination."""

    def __init__(self, folder: Path, *, peer_copy: bool = False, keeps: bool = True) -> None:
        self.rank = dist.get_rank()
        self.destination = folder / "destination"
        self.disk = folder / f"disk{self.rank}"
        self.said: list[str] = []
        self.checkpoints = Checkpointer(
            str(self.destination),
            rank=self.rank,
            world_size=dist.get_world_size(),
            local_dir=folder / f"scratch{self.rank}",
            local_tier=self.disk if keeps else None,
            peer_copy=peer_copy,
            keep_last=9,
            asynchronous=True,
            process_group=dist.group.WORLD,
            report=self.said.append,
            retry_delays_seconds=(),
        )

    def save(self, step: int, attempt: int = 1) -> None:
        """A checkpoint, wherever it gets to."""
        tensors = laid_out(whole(step), self.rank, dist.get_world_size())
        self.checkpoints.save(step, tensors, {"step": step, "rng": self.rank, "attempt": attempt})
        self.checkpoints.wait()

    def near(self, step: int) -> Path:
        """Where this host keeps its part of a step."""
        (folder,) = self.disk.glob(f"*/checkpoints/step-{step:08d}")
        return folder

    def restore(self, *, is_away_at_load: bool = False) -> dict[str, Any]:
        """What a fresh start of this job finds, loaded and compared."""
        fresh = Host(self.destination.parent)
        info = fresh.checkpoints.latest()
        assert info is not None
        metrics = self.destination.parent / f"metrics{self.rank}"
        metrics.write_text('{"step": 2}\n')
        if is_away_at_load:
            refuse_once(fresh)
        tensors = laid_out({name: torch.zeros_like(t) for name, t in whole(0).items()}, self.rank, 2)
        attachments = {"metrics.jsonl": metrics} if self.rank == 0 else {}
        extra = fresh.checkpoints.load(info, tensors, attachments=attachments)
        metrics.write_text("cut back")
        assert is_same(tensors, laid_out(whole(info.step), self.rank, 2))
        fresh.checkpoints.wait()
        near = str(self.disk) in info.uri
        committed = (self.destination / f"checkpoints/step-{info.step:08d}/COMMITTED").exists()
        beside = self.destination / "metrics.jsonl"
        told = {"metrics": beside.read_text() if beside.exists() else None, "said": fresh.said}
        return {"step": info.step, "near": near, "rng": extra["rng"], "sent": committed, **told}


def refuse_once(host: Host) -> None:
    """The destination can't be listed, the next time the host asks for its newest step."""
    original = host.checkpoints._newest_at_destination

    def refuse() -> int:
        host.checkpoints._newest_at_destination = original  # type: ignore[method-assign]
        raise DestinationError("can't list: the destination is away", permanent=True)

    host.checkpoints._newest_at_destination = refuse  # type: ignore[method-assign]


def cut_off(host: Host, step: int) -> None:
    """A save that reaches the hosts' disks, and not the destination."""
    original = LocalDestination.put_file

    def refuse(self: Any, name: str, path: Path) -> None:
        raise DestinationError("can't upload: the destination is away", permanent=True)

    LocalDestination.put_file = refuse  # type: ignore[method-assign]
    host.save(step)
    LocalDestination.put_file = original  # type: ignore[method-assign]
    dist.barrier()


def flip(path: Path) -> None:
    """One bit, in place."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def case_near_first(folder: Path) -> dict[str, Any]:
    """Each host keeps its own part, of two steps; a restart takes the step that both have from there."""
    host = Host(folder)
    for step in (1, 2, 3):
        host.save(step)
    figures = host.checkpoints.take_figures()
    kept = sorted(path.name for path in host.near(3).parent.iterdir())
    own = sorted(path.name for path in host.near(3).glob("*.distcp"))
    return {"kept": kept, "own": own, "figures": sorted(figures), **host.restore()}


def case_cut_off(folder: Path) -> dict[str, Any]:
    """What only the hosts' disks have is resumed, and sent to the destination then."""
    host = Host(folder)
    host.save(1)
    cut_off(host, 2)
    return {"before": host.checkpoints.last_committed_step, "first": host.said, **host.restore()}


def case_cut_off_with_full_scratch(folder: Path) -> dict[str, Any]:
    """The same where the metrics find no room in scratch: they go through memory, which is given back."""
    host = Host(folder)
    host.save(1)
    cut_off(host, 2)
    original = io.open

    def refuse(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode == "wb" and "/staging/" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, mode, *rest, **options)

    io.open = builtins.open = refuse  # however it is opened
    told = host.restore()
    io.open = builtins.open = original
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {**told, "open": [str(path) for path in descriptors if "metrics" in str(path.readlink())]}


def case_away_at_load(folder: Path) -> dict[str, Any]:
    """The destination went away between the search and the load."""
    host = Host(folder)
    host.save(1)
    cut_off(host, 2)
    return host.restore(is_away_at_load=True)


def case_torn(folder: Path) -> dict[str, Any]:
    """An altered part on one host: the destination's is taken, with a line."""
    host = Host(folder)
    host.save(1)
    if host.rank == 1:
        flip(host.near(1) / "__1_0.distcp")
    dist.barrier()
    return host.restore()


def case_lost_disk(folder: Path) -> dict[str, Any]:
    """A host's disk is lost with what the destination lacks: the step before."""
    host = Host(folder)
    host.save(1)
    cut_off(host, 2)
    if host.rank == 1:
        shutil.rmtree(host.disk)
    dist.barrier()
    return host.restore()


def case_peer(folder: Path) -> dict[str, Any]:
    """The same, with a copy on the other host."""
    host = Host(folder, peer_copy=True)
    host.save(1)
    cut_off(host, 2)
    if host.rank == 1:
        shutil.rmtree(host.disk)
    dist.barrier()
    return host.restore()


def case_newer_at_destination(folder: Path) -> dict[str, Any]:
    """Disks that are older than the destination are not asked."""
    host = Host(folder)
    host.save(1)
    shutil.copytree(host.disk, folder / f"older{host.rank}")
    host.save(2)
    shutil.rmtree(host.disk)
    shutil.move(folder / f"older{host.rank}", host.disk)
    dist.barrier()
    return host.restore()


def case_left_by_an_earlier_start(folder: Path) -> dict[str, Any]:
    """A later start, on other machines or without these disks, went on from before what they alone have."""
    host = Host(folder)
    host.save(1)
    cut_off(host, 4)
    Host(folder, keeps=False).save(2, attempt=2)
    dist.barrier()
    return host.restore()


def case_broken_disk(folder: Path) -> dict[str, Any]:
    """A disk that can't be written keeps no save from the destination."""
    host = Host(folder)
    if host.rank == 1:
        host.disk.write_text("no folder")
    host.save(1)
    return {"step": host.checkpoints.last_committed_step, "error": host.checkpoints.last_error, "said": host.said}


def case_altered_table(folder: Path) -> dict[str, Any]:
    """One host's tables of where tensors lie point elsewhere, or are torn; the other host's copies are whole."""
    host = Host(folder, peer_copy=True)
    host.save(1)
    cut_off(host, 2)
    for path in sorted(host.near(2).glob("*.blocks")) if host.rank == 0 else ():
        table = json.loads(path.read_bytes())
        table["boxes"][0][1] += 64
        path.write_text("torn" if path.name.startswith("__1") else json.dumps(table))
    dist.barrier()
    return host.restore()


def case_unreadable_part(folder: Path) -> dict[str, Any]:
    """A host's disk answers reads of its part with an error: the destination's is taken."""
    host = Host(folder)
    host.save(1)
    original = manifest.shard_file

    def refuse(path: Path, *rest: Any) -> Any:
        if host.rank == 0 and path.is_relative_to(host.disk):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path, *rest)

    manifest.shard_file = refuse
    told = host.restore()
    manifest.shard_file = original
    return told


def case_unreadable_when_received(folder: Path) -> dict[str, Any]:
    """A host's disk can't read what the other host has just given it, before it gives its own: that one goes out."""
    host = Host(folder, peer_copy=True)
    original = local_tier.difference

    def refuse(*_: Any) -> str | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if host.rank == 1:
        local_tier.difference = refuse
    host.save(1)
    local_tier.difference = original
    return {"first": host.said[:1], **host.restore()}


@contextmanager
def no_byte_free(host: Host) -> Iterator[None]:
    """The second host's disk takes nothing at all."""
    mkdir, write = Path.mkdir, Path.write_bytes

    def refusing(original: Any) -> Any:
        def refuse(path: Path, *rest: Any, **options: Any) -> Any:
            if host.rank == 1 and path.is_relative_to(host.disk):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(path, *rest, **options)

        return refuse

    Path.mkdir, Path.write_bytes = refusing(mkdir), refusing(write)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Path.mkdir, Path.write_bytes = mkdir, write  # type: ignore[method-assign]


def case_full_disk(folder: Path) -> dict[str, Any]:
    """One host's disk is full for the second save, which goes to the destination alone, and has room for the third."""
    host = Host(folder)
    host.checkpoints.latest()
    host.save(1)
    host.checkpoints.take_figures()
    original = checkpointer.free_bytes

    def free(place: Path) -> int:
        return 1 << 20 if host.rank == 1 and place.is_relative_to(host.disk) else original(place)

    checkpointer.free_bytes = free
    with no_byte_free(host):
        host.save(2)
    figures = host.checkpoints.take_figures()
    second = {"error": host.checkpoints.last_error, "from": host.restore()["near"], "timed": "local_seconds" in figures}
    checkpointer.free_bytes = original
    host.save(3)
    told = {"second": second, "told": host.said, **host.restore()}
    with no_byte_free(host):  # filled in the moment after it was looked at
        host.save(4)
    filled = host.checkpoints.last_error, host.said[-2:]
    host.save(5)
    return {**told, "filled": filled, "after": host.restore()}


def case_emptied(folder: Path) -> dict[str, Any]:
    """A destination that somebody emptied to start anew: what the hosts keep of the run before is another's."""
    first = Host(folder, peer_copy=True)
    found = [first.checkpoints.latest() is None]
    first.save(7)
    dist.barrier()
    if first.rank == 0:
        subprocess.run(f"rm -rf {first.destination}/checkpoints/*", shell=True, check=True)
    dist.barrier()
    host = Host(folder)
    found += [host.checkpoints.latest() is None, host.checkpoints.latest() is None]
    before = sorted(path.name for path in host.disk.glob("*/checkpoints/*"))
    cut_off(host, 3)
    after = sorted(path.name for path in host.disk.glob("*/checkpoints/*"))
    return {"found": found, "before": before, "after": after, "told": host.said[:-1], **host.restore()}


def case_joined_by_anothers_disk(folder: Path) -> dict[str, Any]:
    """A host comes with what it kept of another run there, whole and newer: the others' word is taken."""
    for name, step in (("another", 5), ("this", 1)):
        host = Host(folder / name, peer_copy=True)
        host.checkpoints.latest()
        host.save(step)
    cut_off(host, 2)
    if host.rank == 1:
        (own,), (anothers,) = host.disk.iterdir(), (folder / "another/disk1").iterdir()
        shutil.rmtree(own)
        shutil.copytree(anothers, own)
    dist.barrier()
    original = socket.gethostname
    socket.gethostname = lambda: f"host-{host.rank}"
    told = host.restore()
    socket.gethostname = original
    return told


def case_never_written(folder: Path) -> dict[str, Any]:
    """The destination takes nothing at the first start, not even the run's name, and has nothing at the next."""
    original = LocalDestination.put_bytes

    def refuse(self: Any, name: str, content: bytes) -> None:
        if "disk" not in str(self.folder("")):
            raise DestinationError("can't write: the destination is full", permanent=True)
        original(self, name, content)

    LocalDestination.put_bytes = refuse  # type: ignore[method-assign]
    host = Host(folder)
    host.checkpoints.latest()
    host.save(1)
    dist.barrier()
    LocalDestination.put_bytes = original  # type: ignore[method-assign]
    return {"error": host.checkpoints.last_error, **host.restore()}


def case_first_upload_lost(folder: Path) -> dict[str, Any]:
    """The job's first save never came to the destination, which has the run's name alone."""
    host = Host(folder)
    host.checkpoints.latest()
    cut_off(host, 1)
    return {"there": sorted(path.name for path in host.destination.rglob("*") if path.is_file()), **host.restore()}


def case_done(folder: Path) -> dict[str, Any]:
    """The last save came to the destination, or did not: what the hosts' disks keep once the job is done."""
    host = Host(folder, peer_copy=True)
    host.save(1)
    cut_off(host, 2)
    host.checkpoints.leave_hosts_disks()
    dist.barrier()
    kept = [path.name for path in host.disk.glob("*/checkpoints/*")]
    host.save(3)
    host.checkpoints.leave_hosts_disks()
    dist.barrier()
    left = [path.name for path in host.disk.iterdir()]
    return {"kept": sorted(kept), "left": left, **host.restore()}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    name.removeprefix("case_"): value for name, value in list(globals().items()) if name.startswith("case_")
}


def rank_main(folder: str) -> None:
    """One rank: plays all cases and prints what came of them."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "1", "0"  # each its own host
    dist.init_process_group("gloo")
    results = {}
    for name, case in CASES.items():
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        results[name] = case(place)
        dist.barrier()
    print("RESULT " + json.dumps(results), flush=True)
    dist.destroy_process_group()


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each host said of each case."""
    outputs = run_pooled(2, "test_checkpoint_tiers", str(tmp_path_factory.mktemp("tiers")), timeout_seconds=600)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def of(played: list[dict[str, Any]], case: str, key: str) -> list[Any]:
    return [one[case][key] for one in played]


def test_the_hosts_disks_come_first(played: list[dict[str, Any]]) -> None:
    assert of(played, "near_first", "kept") == [["step-00000002", "step-00000003"]] * 2
    assert of(played, "near_first", "own") == [["__0_0.distcp"], ["__1_0.distcp"]]
    assert {"backpressure_seconds", "blocked_seconds", "local_seconds"} <= set(played[0]["near_first"]["figures"])
    assert of(played, "near_first", "step") == [3, 3] and of(played, "near_first", "near") == [True, True]
    assert of(played, "near_first", "rng") == [0, 1]
    assert of(played, "near_first", "said") == [[], []]


def test_a_save_that_was_cut_off_is_resumed_and_sent(played: list[dict[str, Any]]) -> None:
    assert of(played, "cut_off", "before") == [1, 1]
    assert played[0]["cut_off"]["first"][-1] == (
        "checkpoint step=2 not committed: rank 0: can't upload: the destination is away; rank 1: can't upload:"
        " the destination is away; training goes on"
    )
    assert of(played, "cut_off", "step") == [2, 2] and of(played, "cut_off", "near") == [True, True]
    assert of(played, "cut_off", "sent") == [True, True]
    assert of(played, "cut_off", "metrics")[0] == '{"step": 2}\n', "its metrics come along, as they were at the load"
    full = played[0]["cut_off_with_full_scratch"]
    assert (full["sent"], full["metrics"], full["open"]) == (True, '{"step": 2}\n', [])
    assert not [line for line in full["said"] if "without its metrics" in line]
    for key, told in (("step", 2), ("near", True), ("sent", True)):
        assert of(played, "away_at_load", key) == [told, told]


def test_a_torn_part_falls_back_to_the_destination(played: list[dict[str, Any]]) -> None:
    assert of(played, "torn", "step") == [1, 1] and of(played, "torn", "near") == [False, False]
    (line,) = played[0]["torn"]["said"]
    assert line == (
        "checkpoint step=1 on the hosts' disks skipped: __1_0.distcp is altered (its SHA-256 is not the manifest's);"
        " the destination's is taken"
    )


def test_a_lost_disk_costs_the_newest_step_unless_a_peer_has_it(played: list[dict[str, Any]]) -> None:
    assert of(played, "lost_disk", "step") == [1, 1] and of(played, "lost_disk", "near") == [False, False]
    assert played[0]["lost_disk"]["said"] == [
        "checkpoint step=2 on the hosts' disks skipped: __1_0.distcp is on no host's disk; the destination's is taken",
        "checkpoint step=1 on the hosts' disks skipped: __1_0.distcp is on no host's disk; the destination's is taken",
    ]
    assert of(played, "peer", "step") == [2, 2] and of(played, "peer", "near") == [True, True]
    assert of(played, "peer", "sent") == [True, True]


def test_an_altered_table_on_one_host_is_taken_from_the_other(played: list[dict[str, Any]]) -> None:
    """`restore` compares the values."""
    assert of(played, "altered_table", "step") == [2, 2] and of(played, "altered_table", "near") == [True, True]
    assert of(played, "altered_table", "sent") == [True, True]


def test_a_disk_that_answers_with_errors_falls_back_to_the_destination(played: list[dict[str, Any]]) -> None:
    assert of(played, "unreadable_part", "step") == [1, 1] and of(played, "unreadable_part", "near") == [False, False]
    (line,) = played[0]["unreadable_part"]["said"]
    assert line.endswith(".distcp can't be read: Input/output error; the destination's is taken")
    assert of(played, "unreadable_when_received", "near") == [True, True]
    assert played[0]["unreadable_when_received"]["first"] == [
        "checkpoint step=1 on the hosts' disks: no copy on a peer: rank 1: from rank 0: __0_0.distcp can't be read:"
        " Input/output error"
    ]


def test_an_older_step_is_not_taken_for_being_near(played: list[dict[str, Any]]) -> None:
    assert of(played, "newer_at_destination", "step") == [2, 2]
    assert of(played, "newer_at_destination", "near") == [False, False]


def test_what_a_later_start_has_gone_on_without_is_not_gone_back_to(played: list[dict[str, Any]]) -> None:
    """Its step is the newest, and of a course that the job has left: somebody may have gone back on purpose."""
    assert of(played, "left_by_an_earlier_start", "step") == [2, 2]
    assert of(played, "left_by_an_earlier_start", "near") == [False, False]
    (line,) = played[0]["left_by_an_earlier_start"]["said"]
    assert line == (
        "checkpoint step=4 on the hosts' disks skipped: start 1 of the job saved it, and start 2 has gone on without"
        " it; the destination's is taken"
    )


def test_a_broken_disk_keeps_nothing_from_the_destination(played: list[dict[str, Any]]) -> None:
    assert of(played, "broken_disk", "step") == [1, 1] and of(played, "broken_disk", "error") == [None, None]
    assert "saves go to the destination alone from now on" in played[0]["broken_disk"]["said"][0]


def test_a_full_disk_keeps_nothing_from_the_destination_and_is_taken_again_once_it_has_room(
    played: list[dict[str, Any]],
) -> None:
    assert of(played, "full_disk", "second") == [{"error": None, "from": False, "timed": False}] * 2
    (line,) = [line for line in played[1]["full_disk"]["told"] if "MiB free" in line]
    assert line.endswith(
        "free space or give another checkpoint.local_directory; this one goes to the destination alone"
    )
    assert of(played, "full_disk", "step") == [3, 3] and of(played, "full_disk", "near") == [True, True]
    error, (line, _) = played[0]["full_disk"]["filled"]
    assert error is None and line.endswith("No space left on device; step 4 goes to the destination alone")
    assert [(one["step"], one["near"]) for one in of(played, "full_disk", "after")] == [(5, True)] * 2


def test_a_destination_that_was_emptied_starts_anew(played: list[dict[str, Any]]) -> None:
    assert of(played, "emptied", "found") == [[True, True, True]] * 2
    assert of(played, "emptied", "before") == [["step-00000007"]] * 2, "nothing goes before a save takes its place"
    assert of(played, "emptied", "after") == [["step-00000003"]] * 2
    (line,) = [line for line in played[0]["emptied"]["told"] if "local_directory" in line]
    assert line.endswith("has now: it is left out, and removed by the first save")
    assert of(played, "emptied", "step") == [3, 3] and of(played, "emptied", "near") == [True, True]


def test_what_no_upload_outlived_is_still_the_runs(played: list[dict[str, Any]]) -> None:
    assert of(played, "first_upload_lost", "there") == [["run"]] * 2
    assert played[0]["never_written"]["error"] is not None
    for case in ("first_upload_lost", "never_written"):
        assert of(played, case, "step") == [1, 1] and of(played, case, "near") == [True, True]
    (line, *_) = played[0]["joined_by_anothers_disk"]["said"]
    assert " keeps on host-1 is of another run than " in line, "the one host, whoever tells it"
    assert of(played, "joined_by_anothers_disk", "step") == [2, 2]
    assert of(played, "joined_by_anothers_disk", "near") == [True, True]


def test_a_job_that_is_done_leaves_nothing_on_its_hosts_disks(played: list[dict[str, Any]]) -> None:
    assert of(played, "done", "kept") == [["step-00000001", "step-00000002"]] * 2, "the destination lacks the newest"
    assert of(played, "done", "left") == [[], []]
    assert of(played, "done", "step") == [3, 3] and of(played, "done", "near") == [False, False]


def test_a_job_that_was_stopped_keeps_what_is_near_and_one_that_is_done_does_not(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=3)
    near = ("--set", f"checkpoint.local_directory={tmp_path / 'near'}")
    stop = [{"rank": 0, "step": 2, "kind": "terminate"}]
    ((code, output),) = finish(start_faulty_trainer(1, job, tmp_path / "out", stop, *near), timeout_seconds=600)
    assert code == 75, output[-3000:]
    assert [path.parent.name for path in (tmp_path / "near").rglob("COMMITTED")] == ["step-00000002"]
    run_trainer(1, job, tmp_path / "out", *near)
    assert [*(tmp_path / "near").iterdir()] == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"local_directory": "s3://bucket/x"}, "must be a folder on each host's own disk"),
        ({"peer_copy": True}, "set that too, e.g. /tmp/checkpoints"),
    ],
)
def test_wrong_tiers_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        CheckpointSpec(**settings)


if __name__ == "__main__":
    rank_main(*sys.argv[1:])


def test_a_start_beats_while_it_hashes_what_its_host_has_and_a_save_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[None] = []
    for module in (local_tier, restore):
        monkeypatch.setattr(module, "beat", lambda: beats.append(None))

    def checkpoints(near: Path | None) -> Checkpointer:
        return Checkpointer(
            str(tmp_path / "far"),
            rank=0,
            world_size=1,
            local_dir=tmp_path / "local",
            keep_last=1,
            asynchronous=False,
            local_tier=near,
            report=lambda line: None,
        )

    saving = checkpoints(tmp_path / "near")
    saving.save(1, {"a": torch.zeros(3 << 20)}, {})
    assert saving.last_error is None and beats == []
    info = checkpoints(tmp_path / "near").latest()
    assert info is not None and "near" in str(info.folder) and len(beats) >= 12, "one a MiB"
    beats.clear()
    info = checkpoints(None).latest()
    assert info is not None and "far" in str(info.folder) and len(beats) >= 12


def test_a_disk_that_does_not_answer_is_a_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the destination nothing else is taken for it; of a step that is sent later only the sending fails."""
    said: list[str] = []

    def checkpoints(near: Path | None, far: str = "far") -> Checkpointer:
        return Checkpointer(
            str(tmp_path / far),
            rank=0,
            world_size=1,
            local_dir=tmp_path / "local",
            keep_last=1,
            asynchronous=False,
            local_tier=near,
            report=said.append,
            retry_delays_seconds=(),
        )

    tensors = {"a": torch.arange(9.0)}
    checkpoints(tmp_path / "near").save(1, tensors, {})

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(restore, "difference", refuse)
        with pytest.raises(JobFailedError, match=r"can't read .*Input/output error; a checkpoint may be there"):
            checkpoints(None).latest()
    (tmp_path / "far/checkpoints/step-00000001/COMMITTED").unlink()
    again = checkpoints(tmp_path / "near")
    info = again.latest()
    assert info is not None and "near" in str(info.folder)
    read = Path.read_bytes

    def gone(path: Path) -> bytes:
        is_behind = threading.current_thread() is not threading.main_thread()
        return refuse() if is_behind and path.name == ".metadata" else read(path)  # type: ignore[return-value]

    loaded = {"a": torch.zeros(9)}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", gone)
        again.load(info, loaded)
        again.wait()
    assert torch.equal(loaded["a"], tensors["a"]) and again.last_error == "Input/output error"
