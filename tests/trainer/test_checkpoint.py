"""Checkpoints of one process: committed or not there, whatever breaks."""

import errno
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from botocore.exceptions import CredentialRetrievalError, NoCredentialsError
from moto.server import ThreadedMotoServer
from trainer.checkpoint import Checkpointer, checkpointer, delivery
from trainer.checkpoint.claim import claimant_of
from trainer.checkpoint.destination import (
    DestinationError,
    LocalDestination,
    S3Destination,
    open_destination,
    s3_errors,
    with_retries,
)
from trainer.checkpoint.manifest import commit_marker
from trainer.checkpoint.saving import Saver
from trainer_testing.distributed import free_port

from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.launch.checkpoint_files import open_files
from trainyard.launch.checkpoints import list_checkpoints, prune
from trainyard.spec.retention import BestSpec, Retention

BUCKET = "acme-checkpoints"


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """An S3 on this machine, in this process's environment."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{port}")
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        patch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield f"http://localhost:{port}"
    patch.undo()
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for checkpoints, of each kind."""
    if request.param == "folder":
        return str(tmp_path / "destination")
    request.getfixturevalue("s3_endpoint")
    return f"s3://{BUCKET}/{tmp_path.name}"


class Job:
    """A checkpointer and what it said."""

    def __init__(self, destination: str, tmp_path: Path, **options: Any) -> None:
        self.said: list[str] = []
        settings: dict[str, Any] = {
            "keep_last": 3,
            "asynchronous": False,
            "retry_delays_seconds": (0.0, 0.0),
            **options,
        }
        self.checkpointer = Checkpointer(
            destination, rank=0, world_size=1, local_dir=tmp_path / "local", report=self.said.append, **settings
        )

    def save(self, *steps: int) -> None:
        """Checkpoints of these steps, and wait for them."""
        for step in steps:
            self.checkpointer.save(step, state(step), {"step": step, "data": {"sequences_consumed": 8 * step}})
        self.checkpointer.wait()

    def newest(self) -> int | None:
        """The step that a fresh start would resume, after loading and comparing it; None if there is none."""
        info = self.checkpointer.latest()
        if info is None:
            return None
        tensors = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
        extra = self.checkpointer.load(info, tensors)
        expected = state(info.step)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert extra["step"] == info.step
        return info.step


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell their step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(64, 32, generator=generator),
        "model.b": torch.randn(10, generator=generator).to(torch.bfloat16),
        "optim.a.exp_avg": torch.randn(64, 32, generator=generator),
        "optim.step": torch.tensor(float(step)),
    }


def step_names(destination: str) -> set[str]:
    """Folders of steps that hold anything."""
    return {name.split("/")[1] for name in open_destination(destination).sizes("checkpoints")}


# ---------------------------------------------------------------- the good way


def test_what_a_hosts_disk_has_under_another_steps_name_is_not_that_step(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "destination"), tmp_path, local_tier=tmp_path / "disk")
    job.save(10)
    (kept,) = (tmp_path / "disk").glob("*/checkpoints/step-00000010")
    shutil.copytree(kept, kept.with_name("step-00000020"))
    resumed = Job(str(tmp_path / "destination"), tmp_path, local_tier=tmp_path / "disk")
    assert resumed.newest() == 10
    assert resumed.said[0].startswith("checkpoint step=20 on the hosts' disks skipped: its manifest is of step 10;")


def test_what_was_saved_comes_back(destination: str, tmp_path: Path) -> None:
    job = Job(destination, tmp_path)
    job.save(5, 10)
    assert Job(destination, tmp_path).newest() == 10
    assert f"checkpoint step=10 committed uri={job.checkpointer.uri}/checkpoints/step-00000010" in job.said[1]
    names = open_destination(destination).sizes("checkpoints/step-00000010")
    files = {"__0_0.distcp", "__0_0.distcp.blocks", ".metadata"}
    assert {name.rsplit("/", 1)[1] for name in names} == files | {"manifest.json", "COMMITTED"}
    manifest = json.loads(open_destination(destination).get_bytes("checkpoints/step-00000010/manifest.json"))
    assert manifest["step"] == 10 and manifest["extra"]["data"] == {"sequences_consumed": 80}
    assert {shard["name"] for shard in manifest["shards"]} == files
    assert not list((tmp_path / "local").rglob("*.distcp")), "staging and fetched copies must go"


def test_nothing_saved_is_nothing_found(destination: str, tmp_path: Path) -> None:
    job = Job(destination, tmp_path)
    assert job.newest() is None
    assert job.said == []


def test_a_large_file_goes_up_in_parts(s3_endpoint: str, tmp_path: Path) -> None:
    assert s3_endpoint
    path = tmp_path / "large"
    path.write_bytes(random.Random(0).randbytes(40 << 20))
    there = S3Destination(f"s3://{BUCKET}/parts")
    there.put_file("large", path)
    assert '-3"' in boto3.client("s3").head_object(Bucket=BUCKET, Key="parts/large")["ETag"]
    there.get_file("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_the_copy_is_of_the_moment_of_the_save(destination: str, tmp_path: Path) -> None:
    job = Job(destination, tmp_path, asynchronous=True)
    tensors = state(5)
    for step in (5, 6):  # the second save uses the first one's buffers again
        for name, tensor in state(step).items():
            tensors[name].copy_(tensor)
        job.checkpointer.save(step, tensors, {"step": step})
        for tensor in tensors.values():
            tensor.zero_()
    job.checkpointer.wait()
    assert Job(destination, tmp_path).newest() == 6


def test_tensors_may_change_their_shapes_between_saves(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "destination"), tmp_path)
    job.save(1)
    grown = state(2) | {"model.new": torch.ones(3)}
    job.checkpointer.save(2, grown, {})
    info = job.checkpointer.latest()
    assert info is not None and info.step == 2
    loaded = {name: torch.zeros_like(tensor) for name, tensor in grown.items()}
    job.checkpointer.load(info, loaded)
    assert all(torch.equal(loaded[name], grown[name]) for name in grown)


def test_a_step_is_saved_once(destination: str, tmp_path: Path) -> None:
    job = Job(destination, tmp_path)
    job.save(5, 5)
    assert len(job.said) == 1
    later = Job(destination, tmp_path)
    assert later.newest() == 5
    later.save(5)
    assert later.said == []


def test_attachments_are_as_long_as_they_were(
    destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(destination, tmp_path, asynchronous=True)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("1\n2\n")
    _slow(monkeypatch, 0.3)
    job.checkpointer.save(2, state(2), {"step": 2}, attachments={"metrics.jsonl": metrics, "absent": tmp_path / "no"})
    with metrics.open("a") as handle:
        handle.write("3\n")
    job.checkpointer.wait()
    assert job.checkpointer.last_error is None
    assert open_destination(destination).get_bytes("metrics.jsonl") == b"1\n2\n"
    assert job.checkpointer.publish_file("metrics.jsonl", metrics)
    assert job.checkpointer.fetch_file("metrics.jsonl", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "1\n2\n3\n"
    assert not job.checkpointer.fetch_file("nothing.json", tmp_path / "back")


def test_a_role_that_is_not_told_what_is_missing_begins_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, honest = Job(str(tmp_path / "there"), tmp_path), LocalDestination.get_file

    def refusing(self: LocalDestination, name: str, path: Path) -> None:
        if not (self._root / name).exists():
            raise DestinationError(f"can't download {name}: 403", permanent=True)
        honest(self, name, path)

    monkeypatch.setattr(LocalDestination, "get_file", refusing)
    assert not job.checkpointer.fetch_file("metrics.jsonl", tmp_path / "back")
    open_destination(str(tmp_path / "there")).put_bytes("metrics.jsonl", b"1\n")
    assert job.checkpointer.fetch_file("metrics.jsonl", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"1\n"


def test_scratch_without_room_for_an_attachment_costs_no_checkpoint_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, send = Path.open, LocalDestination.put_file
    halves: list[Path] = []
    left: list[Path] = []

    class Half(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if mode == "wb" and path.name == "attachment-metrics.jsonl":
            halves.append(path)
            return Half(path, "wb")
        return honest(path, mode, *rest, **options)

    def sent(self: LocalDestination, name: str, path: Path) -> None:
        left.extend(half for half in halves if half.exists())
        send(self, name, path)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(LocalDestination, "put_file", sent)
    job = Job(str(tmp_path / "elsewhere"), tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("1\n2\n")
    job.checkpointer.save(2, state(2), {"step": 2}, attachments={metrics.name: metrics})
    assert job.checkpointer.last_error is None
    assert (tmp_path / "elsewhere/metrics.jsonl").read_text() == "1\n2\n"
    assert halves and left == [], "the disk's last bytes are free while the copy in memory is sent"
    assert not [
        path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and "memfd" in str(path.readlink())
    ]


def test_an_attachment_that_lies_at_the_destination_is_left_alone(tmp_path: Path) -> None:
    job = Job(str(tmp_path), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("1\n")
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    job.checkpointer.save(1, state(1), {"step": 1}, attachments={"metrics.jsonl": tmp_path / "metrics.jsonl"})
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode
    assert Job(str(tmp_path), tmp_path).newest() == 1


def _slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for kind in (LocalDestination, S3Destination):
        original = kind.put_bytes

        def late(self: Any, name: str, content: bytes, original: Any = original) -> None:
            time.sleep(seconds)
            original(self, name, content)

        monkeypatch.setattr(kind, "put_bytes", late)


def test_training_waits_for_the_copy_alone_and_a_second_save_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(str(tmp_path / "destination"), tmp_path, asynchronous=True)
    job.save(1)  # makes the plan and the buffers
    may_write, written = threading.Event(), []
    original = LocalDestination.put_bytes

    def held(self: LocalDestination, name: str, content: bytes) -> None:
        assert may_write.wait(timeout=300)
        original(self, name, content)
        written.append(name)

    monkeypatch.setattr(LocalDestination, "put_bytes", held)
    job.checkpointer.save(2, state(2), {"step": 2})
    assert job.checkpointer.is_saving and written == [], "the caller waited for a write"
    assert not job.checkpointer.wait(timeout_seconds=0.01)
    threading.Timer(0.3, may_write.set).start()
    job.checkpointer.save(3, state(3), {"step": 3})
    assert len(written) >= 2, "the second save waits for the first: manifest and marker"
    assert 0 < job.checkpointer.backpressure_seconds <= job.checkpointer.blocked_seconds
    assert job.checkpointer.wait() and len(written) == 4
    assert job.checkpointer.last_save_seconds is not None and job.checkpointer.last_save_seconds > 0


def test_who_waits_for_a_save_without_an_end_no_longer_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, beats = threading.Event(), []
    monkeypatch.setattr(checkpointer, "beat", lambda: beats.append(1))
    monkeypatch.setattr(checkpointer, "_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(LocalDestination, "put_bytes", lambda *_: may_write.wait(timeout=300))
    # What the last save took is patience, too: 1000 s of it are no hang.
    cases = ((1000.0, 0.0, False), (None, 0.0, False), (0.0, 0.0, True), (0.0, 1000.0, False))
    for patience, took, dies in cases:
        job = Job(str(tmp_path / f"to-{patience}-{took}"), tmp_path, asynchronous=True, patience_seconds=patience)
        job.checkpointer.last_save_seconds = took
        job.checkpointer.save(1, state(1), {"step": 1})
        beats.clear()
        assert not job.checkpointer.wait(timeout_seconds=0.1)
        assert (not beats) == dies, patience
        may_write.set()
        job.checkpointer.wait()
        may_write.clear()


# ---------------------------------------------------------------- broken checkpoints


def _altered(change: Callable[[bytes], bytes], name: str) -> Callable[[str], None]:
    def alter(destination: str) -> None:
        there = open_destination(destination)
        name_there = f"checkpoints/step-00000020/{name}"
        there.put_bytes(name_there, change(there.get_bytes(name_there)))

    return alter


def _removed(name: str) -> Callable[[str], None]:
    return lambda destination: open_destination(destination).delete([f"checkpoints/step-00000020/{name}"])


def _taken_from_before(*names: str) -> Callable[[str], None]:
    """As by a `cp -r` from one step's folder to another's."""

    def alter(destination: str) -> None:
        there = open_destination(destination)
        for path in there.sizes("checkpoints/step-00000010"):
            if not names or path.endswith(names):
                there.put_bytes(path.replace("10/", "20/"), there.get_bytes(path))

    return alter


def _promised(**changes: Any) -> Callable[[str], None]:
    """A manifest of other values, which is the committed one."""

    def alter(destination: str) -> None:
        there, folder = open_destination(destination), "checkpoints/step-00000020"
        content = json.dumps(json.loads(there.get_bytes(f"{folder}/manifest.json")) | changes).encode()
        there.put_bytes(f"{folder}/manifest.json", content)
        there.put_bytes(f"{folder}/COMMITTED", commit_marker(20, content))

    return alter


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {
    "no marker": (_removed("COMMITTED"), "it has no COMMITTED marker (its save was interrupted)"),
    "torn marker": (_altered(lambda content: content[:7], "COMMITTED"), "COMMITTED is torn"),
    "missing shard": (_removed("__0_0.distcp"), "__0_0.distcp is missing"),
    "truncated shard": (_altered(lambda content: content[:-100], "__0_0.distcp"), "the manifest says"),
    "flipped bit": (_altered(_flip, "__0_0.distcp"), "__0_0.distcp is altered (its SHA-256 is not the manifest's)"),
    "flipped bit in the index": (_altered(_flip, ".metadata"), ".metadata is altered"),
    "missing manifest": (_removed("manifest.json"), "manifest.json is missing"),
    "torn manifest": (_altered(lambda content: content[:50], "manifest.json"), "is not the one that was committed"),
    "swapped manifest": (_altered(lambda content: content.replace(b"20", b"21"), "manifest.json"), "is not the one"),
    "a step without an end": (_promised(step=float("inf")), "can't be read (OverflowError"),
    "a rank's values that are none": (_promised(extra_by_rank={"0": 3}), "can't be read (TypeError"),
    "another step's": (_taken_from_before(), "its manifest is of step 10;"),
    "another step's promise": (_taken_from_before("manifest.json", "COMMITTED"), "its manifest is of step 10;"),
    "another step's marker": (_altered(lambda content: content.replace(b" 20", b" 10"), "COMMITTED"), "its marker is"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_line(destination: str, tmp_path: Path, damage: str) -> None:
    job = Job(destination, tmp_path)
    job.save(10, 20)
    do_damage, words = DAMAGES[damage]
    do_damage(destination)
    resumed = Job(destination, tmp_path)
    assert resumed.newest() == 10
    (line,) = resumed.said
    assert line.startswith("checkpoint step=20 skipped: ") and words in line
    # The run goes on and comes to the same step again.
    resumed.save(15, 20)
    assert Job(destination, tmp_path).newest() == 20


@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", ".metadata", "__0_0.distcp"])
def test_a_pipe_in_the_place_of_a_steps_file_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    """Who reads it waits for a writer, and who writes it for a reader."""
    job = Job(str(tmp_path / "destination"), tmp_path)
    job.save(10, 20)
    place = tmp_path / "destination/checkpoints/step-00000020" / name
    place.unlink()
    os.mkfifo(place)
    with _alarm():
        resumed = Job(str(tmp_path / "destination"), tmp_path)
        assert resumed.newest() == 10
        (line,) = resumed.said
        assert line.startswith("checkpoint step=20 skipped: ") and name in line
        resumed.save(15, 20)
        assert Job(str(tmp_path / "destination"), tmp_path).newest() == 20


@contextmanager
def _alarm() -> Iterator[None]:
    """Who waits here for ever has failed after a minute."""

    def ring(*_: object) -> None:
        pytest.fail("it waits")  # no error of the system, which would be tried again

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 60, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_pipe_on_a_hosts_own_disk_keeps_nobody_waiting(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "destination"), tmp_path, local_tier=tmp_path / "disk")
    job.save(10)
    (kept,) = (tmp_path / "disk").glob("*/checkpoints/step-00000010")
    for name in ("checkpoints/step-00000010/manifest.json", "run"):
        (kept.parents[1] / name).unlink(missing_ok=True)
        os.mkfifo(kept.parents[1] / name)
    with _alarm():
        assert Job(str(tmp_path / "destination"), tmp_path, local_tier=tmp_path / "disk").newest() == 10


def test_when_none_is_whole_it_says_so(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    Job(destination, tmp_path).save(20)
    DAMAGES["flipped bit"][0](destination)
    job = Job(destination, tmp_path)
    assert job.newest() is None
    assert "none of 1" in job.said[-1] and "starting anew" in job.said[-1]


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "destination"), tmp_path)
    job.save(1)
    info = job.checkpointer.latest()
    assert info is not None
    with pytest.raises(InputError, match=r"holds no model\.c; the job's model is not"):
        job.checkpointer.load(info, {"model.c": torch.zeros(2)})
    with pytest.raises(InputError, match=r"model\.a has shape \[64, 32\] in it and \[32, 64\] in the job"):
        job.checkpointer.load(info, {"model.a": torch.zeros(32, 64)})


@pytest.mark.parametrize("straight", [True, False])
def test_what_the_optimizer_keeps_no_more_is_told_of_and_nothing_else_is(
    destination: str, tmp_path: Path, straight: bool
) -> None:
    """A running average, say: gone with the next checkpoint, and no loss would tell."""
    job = Job(destination, tmp_path)
    job.checkpointer.save(1, state(1) | {"optim.a.average": torch.zeros(64, 32)}, {"step": 1})
    job.checkpointer.wait()

    def resumed(tensors: dict[str, torch.Tensor]) -> list[str]:
        later = Job(destination, tmp_path)
        info = later.checkpointer.latest(lambda: tensors) if straight else later.checkpointer.latest()
        assert info is not None and later.checkpointer.load(info, tensors)["step"] == 1
        return [line for line in later.said if "warning" in line]

    (told,) = resumed(state(0))
    assert "/checkpoints/step-00000001: it holds average of its weights, which the job's training.optimizer" in told
    assert "\n" not in told
    assert not resumed(state(0) | {"optim.a.average": torch.zeros(64, 32)})
    count = state(0)
    del count["optim.step"]
    assert "average of" in resumed(count)[0], "a count of steps is none of it"


# ---------------------------------------------------------------- retention


def test_the_last_ones_are_kept(destination: str, tmp_path: Path) -> None:
    Job(destination, tmp_path, keep_last=2).save(1, 2, 3, 4)
    assert step_names(destination) == {"step-00000003", "step-00000004"}


def test_every_nth_and_the_best_are_kept_too_also_by_a_later_attempt(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    rules = {"keep_last": 1, "keep_every_steps": 4, "keep_best": BestSpec(metric="validation_loss", num=1)}
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 5.0, 5: 2.0, 6: float("nan")}
    for steps in ((1, 2, 3), (4, 5, 6)):
        job = Job(destination, tmp_path, **rules)
        for step in steps:
            value = losses[step]
            metrics = {} if value is None else {"validation_loss": value}
            job.checkpointer.save(step, state(step), {"step": step, "metrics": metrics})
        job.checkpointer.wait()
    assert step_names(destination) == {"step-00000002", "step-00000004", "step-00000006"}


@pytest.mark.parametrize("best", [None, BestSpec(metric="validation_loss", num=1)])
def test_an_old_one_without_its_manifest_keeps_nothing_from_going(tmp_path: Path, best: BestSpec | None) -> None:
    destination = str(tmp_path / "destination")
    Job(destination, tmp_path, keep_last=1).save(1)
    (tmp_path / "destination/checkpoints/step-00000001/manifest.json").unlink()
    job = Job(destination, tmp_path, keep_last=1, keep_best=best)
    job.save(2, 3)
    assert step_names(destination) == {"step-00000003"} and not any("retention failed" in line for line in job.said)


def test_one_alone_is_read_back_before_the_one_before_it_goes(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3_endpoint
    destination = f"s3://{BUCKET}/{tmp_path.name}"
    job = Job(destination, tmp_path, keep_last=1)
    job.save(1)
    original = S3Destination.put_file

    def altered(self: S3Destination, name: str, path: Path) -> None:
        if name.endswith("__0_0.distcp"):
            path.write_bytes(_flip(path.read_bytes()))
        original(self, name, path)

    monkeypatch.setattr(S3Destination, "put_file", altered)
    job.save(2)
    assert job.checkpointer.last_error == "rank 0: __0_0.distcp is not what was sent (its SHA-256 differs)"
    assert Job(destination, tmp_path).newest() == 1


def test_one_alone_in_a_folder_is_read_back_from_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=1)
    job.save(1)
    original, forgotten = delivery._forget, []

    def turned(path: Path) -> None:
        original(path)
        forgotten.append(path.name)
        if path.name == "__0_0.distcp":
            path.write_bytes(_flip(path.read_bytes()))

    monkeypatch.setattr(delivery, "_forget", turned)
    job.save(2)
    assert job.checkpointer.last_error == "rank 0: __0_0.distcp is not what was sent (its SHA-256 differs)"
    assert forgotten == ["__0_0.distcp"] and Job(destination, tmp_path).newest() == 1


def test_all_of_a_checkpoint_is_on_the_disk_before_its_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []
    original = os.fsync

    def fsync(file: int) -> None:
        original(file)
        synced.append((Path(f"/proc/self/fd/{file}").readlink().name, os.fstat(file).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    Job(str(tmp_path / "destination"), tmp_path).save(1)
    folder = tmp_path / "destination/checkpoints/step-00000001"
    for name in ("__0_0.distcp", "__0_0.distcp.blocks"):
        assert (name, (folder / name).stat().st_size) in synced, synced


@pytest.mark.parametrize("cut_short", [False, True])
def test_what_is_known_of_a_checkpoint_later_counts_and_never_endangers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: bool
) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=1, keep_best=BestSpec(metric="validation_loss"))
    job.save(1)
    if cut_short:
        original = LocalDestination.put_bytes

        def put_bytes(self: LocalDestination, name: str, content: bytes) -> None:
            if name.endswith("manifest.json"):
                raise DestinationError("gone", permanent=True)
            original(self, name, content)

        monkeypatch.setattr(LocalDestination, "put_bytes", put_bytes)
    job.checkpointer.complete(1, {"metrics": {"validation_loss": 0.5}})
    monkeypatch.undo()
    assert job.said[-1:] == (["checkpoint step=1 not completed with metrics: gone"] if cut_short else job.said[-1:])
    assert Job(destination, tmp_path).newest() == 1
    (seen,) = list_checkpoints(destination, None)
    assert seen.is_good and seen.extra.get("metrics") == (None if cut_short else {"validation_loss": 0.5})
    job.save(2, 3)
    assert step_names(destination) == {"step-00000003"} | (set() if cut_short else {"step-00000001"})


def test_who_reads_while_it_is_completed_finds_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export beside the job that resumed: its newest checkpoint must not look altered for a moment."""
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path)
    job.save(1, 2)
    honest, reads = LocalDestination.get_bytes, []

    def get_bytes(self: LocalDestination, name: str) -> bytes:
        content = honest(self, name)
        reads.append(name)
        if len(reads) == 1:
            job.checkpointer.complete(2, {"metrics": {"validation_loss": 0.5}})
        return content

    monkeypatch.setattr(LocalDestination, "get_bytes", get_bytes)
    found = Job(destination, tmp_path).checkpointer.open_step(None)
    assert found is not None and found.manifest.step == 2 and len(reads) > 2


def test_damaged_and_interrupted_ones_do_not_count_and_go(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    Job(destination, tmp_path).save(1, 10, 20)
    DAMAGES["flipped bit"][0](destination)
    (tmp_path / "destination/checkpoints/step-00000015").mkdir()
    (tmp_path / "destination/checkpoints/step-00000015/__0_0.distcp").write_text("half")
    job = Job(destination, tmp_path, keep_last=2)
    assert job.newest() == 10
    job.save(21)
    assert step_names(destination) == {"step-00000010", "step-00000021"}


def alias(destination: str, step: int, of: int, *, is_link: bool = False) -> Path:
    """A step's second name, or a copy by hand under another one: whole by every hash, and no checkpoint of its step."""
    folder = Path(destination, f"checkpoints/step-{step:08d}")
    source = folder.with_name(f"step-{of:08d}")
    if is_link:
        folder.symlink_to(source)
    else:
        shutil.copytree(source, folder)
    return folder


@pytest.mark.parametrize("is_link", [False, True])
def test_another_name_of_a_checkpoint_does_not_count_as_one(tmp_path: Path, is_link: bool) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=2)
    job.save(10)
    alias(destination, 15, of=10, is_link=is_link)
    job.save(20)
    assert step_names(destination) == {"step-00000010", "step-00000020"}
    DAMAGES["flipped bit"][0](destination)
    assert Job(destination, tmp_path).newest() == 10


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_full_disk_leaves_the_good_one_and_not_its_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool, is_resumed: bool
) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=1)
    job.save(10)
    if is_resumed:
        job = Job(destination, tmp_path, keep_last=1)
        assert job.newest() == 10
    alias(destination, 15, of=10, is_link=is_link)
    monkeypatch.setattr(checkpointer, "free_bytes", lambda folder: 0)
    job.save(20)
    assert job.checkpointer.num_failed_saves == 1
    assert step_names(destination) == {"step-00000010"} and Job(destination, tmp_path).newest() == 10


@pytest.mark.parametrize("damage", ["another name", "no manifest", "short"])
def test_what_is_no_checkpoint_at_the_destination_hides_none_on_the_hosts_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, local_tier=tmp_path / "disk")
    job.save(10)
    with monkeypatch.context() as away:
        away.setattr(LocalDestination, "put_file", _failing(99, permanent=True))
        job.save(20)
    assert job.checkpointer.last_error is not None
    folder = alias(destination, 30, of=10)
    if damage != "another name":
        shutil.rmtree(folder)
        other = Job(str(tmp_path / "other"), tmp_path)
        other.save(30)
        shutil.move(tmp_path / "other/checkpoints/step-00000030", folder)
        (folder / "manifest.json").unlink() if damage == "no manifest" else os.truncate(folder / "__0_0.distcp", 10)
    resumed = Job(destination, tmp_path, local_tier=tmp_path / "disk")
    assert resumed.newest() == 20
    resumed.checkpointer.wait()
    assert resumed.checkpointer.last_error is None and resumed.checkpointer.last_committed_step == 20
    assert 20 in [one.step for one in list_checkpoints(destination, None) if one.is_good], "it is sent there"


def test_what_the_destination_cannot_show_now_is_not_passed_over_for_an_older_one_on_the_hosts_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = str(tmp_path / "destination")
    Job(destination, tmp_path, local_tier=tmp_path / "disk").save(10)
    Job(destination, tmp_path).save(20)
    honest = LocalDestination.get_bytes

    def get_bytes(self: LocalDestination, name: str) -> bytes:
        if "step-00000020" in name:
            raise DestinationError("stale", permanent=True)
        return honest(self, name)

    with monkeypatch.context() as away:
        away.setattr(LocalDestination, "get_bytes", get_bytes)
        with pytest.raises(JobFailedError, match="stale"):
            Job(destination, tmp_path, local_tier=tmp_path / "disk").newest()
    assert Job(destination, tmp_path, local_tier=tmp_path / "disk").newest() == 20


def test_the_best_is_not_its_copy_under_an_older_steps_name(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=1, keep_best=BestSpec(metric="validation_loss"))
    job.checkpointer.save(10, state(10), {"step": 10, "metrics": {"validation_loss": 1.0}})
    job.checkpointer.wait()
    alias(destination, 5, of=10)
    job.save(20)
    assert step_names(destination) == {"step-00000010", "step-00000020"}


def test_a_folder_that_a_good_steps_name_leads_to_stays(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=2)
    job.save(10)
    step = tmp_path / "destination/checkpoints/step-00000010"
    step.rename(step.with_name("step-00000005"))
    step.symlink_to("step-00000005")  # its own copy, too, leads to what lies beside it
    job.save(20)
    DAMAGES["flipped bit"][0](destination)
    assert Job(destination, tmp_path).newest() == 10
    save_again = tmp_path / "again"
    shutil.copytree(tmp_path / "destination", save_again, symlinks=True)
    prune(str(save_again), None, rules=Retention(1), dry_run=False)
    assert Job(str(save_again), tmp_path).newest() == 10


def test_one_of_a_newer_format_or_that_cannot_be_read_now_is_not_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=3)
    job.save(10, 20, 30)
    manifest = tmp_path / "destination/checkpoints/step-00000020/manifest.json"
    content = json.dumps(json.loads(manifest.read_bytes()) | {"version": 99}).encode()
    manifest.write_bytes(content)
    manifest.with_name("COMMITTED").write_bytes(commit_marker(20, content))
    honest = LocalDestination.get_bytes

    def get_bytes(self: LocalDestination, name: str) -> bytes:
        if "step-00000030" in name:
            raise DestinationError("stale", permanent=True)
        return honest(self, name)

    again = Job(destination, tmp_path, keep_last=2)
    with monkeypatch.context() as away:
        away.setattr(LocalDestination, "get_bytes", get_bytes)
        again.save(40)
    assert step_names(destination) == {f"step-000000{step}" for step in (10, 20, 30, 40)}
    again.save(50)
    assert step_names(destination) == {"step-00000040", "step-00000050"}, "two that are known to be good"
    assert not any("retention failed" in line for line in again.said)


def test_the_promise_is_removed_before_what_it_promises(
    destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    for kind in (LocalDestination, S3Destination):
        original = kind.delete

        def noted(self: Any, names: Any, original: Any = original) -> None:
            names = list(names)
            removed.extend(name.rsplit("/", 1)[1] for name in names)
            original(self, names)

        monkeypatch.setattr(kind, "delete", noted)
    Job(destination, tmp_path, keep_last=1).save(1, 2)
    assert removed[:2] == ["COMMITTED", "manifest.json"]
    assert set(removed[2:]) == {"__0_0.distcp", "__0_0.distcp.blocks", ".metadata"}


def test_a_start_removes_what_a_killed_one_was_writing_and_nothing_else(tmp_path: Path) -> None:
    """A fault campaign's find: a launcher that is killed while it copies metrics.jsonl left that copy for ever."""
    root = tmp_path / "destination"
    left = [root / ".metrics.jsonl.4711.partial", root / "checkpoints/step-00000007/.__0_0.distcp.4711.partial"]
    others = [root / ".mine.4711.partial", root / "other/.metrics.jsonl.4711.partial"]
    for path in (*left, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    job = Job(str(root), tmp_path)
    job.checkpointer.save(1, state(1), {"step": 1}, attachments={metrics.name: metrics})
    job.checkpointer.wait()
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    assert (root / metrics.name).read_text() == "{}\n"
    # A start that has nothing to save, because the one before was killed while it said so, does it too.
    result = root / ".result.json.4711.partial"
    result.write_bytes(b"half")
    again = Job(str(root), tmp_path)
    assert again.checkpointer.publish_file("result.json", metrics) and not result.exists()
    assert all(path.exists() for path in others)


def test_the_only_good_one_stays_when_a_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=1)
    job.save(1)
    monkeypatch.setattr(LocalDestination, "put_bytes", _failing(99, permanent=True))
    job.save(2)
    assert job.checkpointer.num_failed_saves == 1 and job.checkpointer.failed_steps == {2}
    monkeypatch.undo()
    assert Job(destination, tmp_path).newest() == 1
    job.save(2)
    assert job.checkpointer.failed_steps == set() and Job(destination, tmp_path).newest() == 2


def test_a_step_that_is_trained_again_has_not_failed_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(str(tmp_path / "destination"), tmp_path)
    with monkeypatch.context() as away:
        away.setattr(LocalDestination, "put_bytes", _failing(99, permanent=True))
        job.save(1)
    job.save(2)
    with monkeypatch.context() as away:
        away.setattr(LocalDestination, "put_bytes", _failing(99, permanent=True))
        job.save(3)
    assert job.checkpointer.failed_steps == {1, 3}
    info = job.checkpointer.latest()
    assert info is not None
    job.checkpointer.load(info, state(0))
    assert job.checkpointer.failed_steps == {1}


# ---------------------------------------------------------------- failures


def _failing(times: int, *, permanent: bool, original: Any = None) -> Any:
    left = [times]

    def fail(self: Any, *arguments: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise DestinationError("can't upload: SlowDown", permanent=permanent)
        return original(self, *arguments)

    return fail


def test_an_upload_error_is_tried_again(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3_endpoint
    destination = f"s3://{BUCKET}/{tmp_path.name}"
    monkeypatch.setattr(S3Destination, "put_file", _failing(2, permanent=False, original=S3Destination.put_file))
    job = Job(destination, tmp_path)
    job.save(1)
    assert [line for line in job.said if "next try in" in line and "SlowDown" in line]
    assert job.checkpointer.last_error is None and Job(destination, tmp_path).newest() == 1


def test_a_destination_that_stays_broken_is_reported_and_training_goes_on(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3_endpoint
    destination = f"s3://{BUCKET}/{tmp_path.name}"
    job = Job(destination, tmp_path, asynchronous=True)
    monkeypatch.setattr(S3Destination, "put_file", _failing(99, permanent=False))
    job.save(1, 2)
    assert job.checkpointer.num_failed_saves == 2
    assert job.checkpointer.last_error == "rank 0: can't upload: SlowDown"
    assert job.said[-1] == "checkpoint step=2 not committed: rank 0: can't upload: SlowDown; training goes on"
    assert not list((tmp_path / "local").rglob("*.distcp"))
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    assert Job(destination, tmp_path).newest() is None


def test_a_refusal_is_not_tried_again(s3_endpoint: str, tmp_path: Path) -> None:
    assert s3_endpoint
    job = Job("s3://no-such-bucket-here/x", tmp_path, retry_delays_seconds=(60.0,))
    job.save(1)
    assert job.said == [f"checkpoint step=1 not committed: {job.checkpointer.last_error}; training goes on"]
    assert "NoSuchBucket" in str(job.checkpointer.last_error)


@pytest.mark.parametrize(("code", "is_final"), [(errno.EROFS, True), (errno.EACCES, True), (errno.ENOSPC, False)])
def test_a_start_at_a_destination_that_nobody_can_write_is_refused(
    code: int, is_final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("trainer.checkpoint.destination.sync", refuse)
    (tmp_path / "attempts.json").write_text("{}")
    job = Job(str(tmp_path / "destination"), tmp_path)
    if is_final:
        with pytest.raises(InputError, match=rf"can't write .*: {os.strerror(code)}; no checkpoint could be saved"):
            job.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
        return
    job.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
    assert job.said[-1].startswith("checkpoint attempts.json not uploaded: can't write")


@pytest.mark.parametrize("times", [1, 2])
def test_who_removes_an_empty_folder_at_that_moment_costs_no_start(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainyard checkpoints copy` removes folders that hold nothing; the probe needs one, and so does a save."""
    honest, left = Path.write_bytes, [None] * times

    def write_bytes(path: Path, content: Any) -> int:
        if left and path.suffix == ".partial":
            left.pop()
            path.parent.rmdir()
        return honest(path, content)

    (tmp_path / "attempts.json").write_text("{}")
    job = Job(str(tmp_path / "destination"), tmp_path)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    job.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
    assert not left and not job.said
    LocalDestination(tmp_path / "destination").put_bytes("checkpoints/run", b"1")
    assert (tmp_path / "destination/checkpoints/run").read_bytes() == b"1"


def test_a_folder_that_somebody_else_removes_or_fills_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = LocalDestination(tmp_path)
    for code in (errno.ENOENT, errno.ENOTEMPTY):
        place.put_bytes("checkpoints/.probe", b"")

        def rmdir(_: Path, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as racing:
            racing.setattr(Path, "rmdir", rmdir)
            place.delete(["checkpoints/.probe"])
    assert not place.sizes("checkpoints")


def test_a_file_that_is_refused_alone_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As by a policy for checkpoints/ alone.
    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("trainer.checkpoint.destination.shutil.copyfile", refuse)
    (tmp_path / "attempts.json").write_text("{}")
    job = Job(str(tmp_path / "destination"), tmp_path)
    job.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
    assert job.said[-1].startswith("checkpoint attempts.json not uploaded: can't write")
    assert [path for path in (tmp_path / "destination").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (NoCredentialsError(), True),
        (CredentialRetrievalError(provider="container-role", error_msg="Connect timeout"), False),
    ],
)
def test_credentials_that_cannot_be_asked_for_now_may_come(error: Exception, is_final: bool) -> None:
    with pytest.raises(DestinationError, match="can't write it: ") as caught, s3_errors("can't write it"):
        raise error
    assert caught.value.permanent == caught.value.is_refusal == is_final


def test_on_s3_too(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert s3_endpoint
    (tmp_path / "attempts.json").write_text("{}")
    job = Job("s3://no-such-bucket-here/x", tmp_path)
    with pytest.raises(AwsRefusedError, match=r"NoSuchBucket.*; no checkpoint could be saved: mend the access"):
        job.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
    there = Job(f"s3://{BUCKET}/{tmp_path.name}", tmp_path)
    monkeypatch.setattr(S3Destination, "put_file", _failing(99, permanent=False))
    there.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
    assert there.said[-1] == "checkpoint attempts.json not uploaded: can't upload: SlowDown", "it may come back"


def test_an_unreachable_destination_never_means_starting_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    job = Job(f"s3://{BUCKET}/x", tmp_path, retry_delays_seconds=())
    with pytest.raises(AwsRefusedError, match="nothing was started anew") as caught:
        job.checkpointer.latest()
    assert "\n" not in str(caught.value)
    job.save(1)
    assert job.checkpointer.num_failed_saves == 1


def test_an_unreadable_folder_never_means_starting_anew(tmp_path: Path) -> None:
    (tmp_path / "destination").write_text("a file where the folder should be")
    job = Job(str(tmp_path / "destination"), tmp_path)
    (tmp_path / "destination").unlink()
    Job(str(tmp_path / "destination"), tmp_path).save(1)
    folder = tmp_path / "destination/checkpoints/step-00000001/COMMITTED"
    folder.unlink()
    folder.mkdir()
    (folder / "x").touch()
    assert job.newest() is None
    assert "no COMMITTED marker" in job.said[0]
    with pytest.raises(DestinationError):
        LocalDestination(tmp_path).get_bytes("destination")
    assert issubclass(JobFailedError, Exception)


def test_a_destination_that_can_be_no_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    for where, why in (
        ("/proc/foo", "No such file or directory"),
        (f"{tmp_path}/file", "it is no folder"),
        (f"{tmp_path}/file/below", "Not a directory"),
        (f"{tmp_path}/link", f"{tmp_path}/link is a link to what isn't there (is its disk mounted?)"),
    ):
        with pytest.raises(InputError) as refused:
            Job(where, tmp_path).checkpointer.claim(claimant_of({}))
        assert str(refused.value) == f"checkpoint.destination {where}: can't be made: {why}; name another folder"


def test_a_place_in_which_nothing_can_be_made_is_not_called_full(tmp_path: Path) -> None:
    job = Job("/proc/foo", tmp_path)
    (tmp_path / "attempts.json").touch()
    with pytest.raises(
        InputError, match=r"can't write /proc/foo/checkpoints/\.probe: .*; no checkpoint could be saved"
    ):
        job.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
    job.save(1)  # as of a disk that went away meanwhile
    assert "full" not in job.said[-1] and "No such file or directory" in job.said[-1]


def test_a_step_that_may_not_be_looked_into_never_means_starting_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(str(tmp_path / "shared"), tmp_path)
    job.save(10, 20)
    honest = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("step-00000020"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return honest(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(JobFailedError, match=r"can't list \S+: Permission denied; a checkpoint may be there"):
        Job(str(tmp_path / "shared"), tmp_path).newest()


@pytest.mark.parametrize("kind", [PermissionError, NotADirectoryError])
def test_somebody_elses_folder_beside_the_steps_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[OSError]
) -> None:
    """A volume's lost+found, say, which is root's alone."""
    job = Job(str(tmp_path / "shared"), tmp_path)
    job.save(10)
    theirs = tmp_path / "shared/checkpoints/lost+found"
    theirs.mkdir()
    honest = os.scandir

    def refused(path: Any) -> Any:
        if str(path) == str(theirs):
            raise kind(errno.EIO, "refused", str(path))
        return honest(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert Job(str(tmp_path / "shared"), tmp_path).newest() == 10
    assert [one.step for one in list_checkpoints(str(tmp_path / "shared"), None)] == [10]


def test_a_users_own_link_to_the_destination_is_never_removed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    (tmp_path / "real/elsewhere").mkdir(parents=True)
    (tmp_path / "real/checkpoints").symlink_to(tmp_path / "real/elsewhere")
    for there in (LocalDestination(link), open_files(str(link), None)):
        for name in ("probe", "checkpoints/.probe"):  # beside a step's files there are these two kinds
            (link / name).write_bytes(b"1")
            there.delete([name])
            assert link.is_symlink() and (link / "checkpoints").is_symlink() and not (link / name).exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/probe").touch()
    open_files(str(tmp_path / "empty"), None).delete(["probe"])
    assert (tmp_path / "empty").is_dir()


def test_a_step_that_was_moved_and_linked_is_resumed_and_what_lies_elsewhere_is_never_removed(tmp_path: Path) -> None:
    shared, elsewhere = tmp_path / "shared", tmp_path / "another disk"
    job = Job(str(shared), tmp_path, keep_last=1)
    job.save(10)
    elsewhere.mkdir()
    step = shared / "checkpoints/step-00000010"
    shutil.move(step, elsewhere / "kept")
    step.symlink_to(elsewhere / "kept")
    (shared / "checkpoints/back").symlink_to(shared)  # a way without an end
    names = sorted(path.name for path in (elsewhere / "kept").iterdir())
    assert [one.is_good for one in list_checkpoints(str(shared), None)] == [True]
    resumed = Job(str(shared), tmp_path, keep_last=1)
    assert resumed.newest() == 10
    resumed.save(20)
    assert sorted(path.name for path in (shared / "checkpoints").iterdir()) == ["back", "step-00000020"]
    assert sorted(path.name for path in (elsewhere / "kept").iterdir()) == names
    # All of them may lie elsewhere.
    shutil.move(shared / "checkpoints", elsewhere / "all")
    (shared / "checkpoints").symlink_to(elsewhere / "all")
    resumed.save(30)
    assert resumed.checkpointer.last_error is None and (shared / "checkpoints").is_symlink()
    assert sorted(path.name for path in (elsewhere / "all").iterdir()) == ["back", "step-00000030"]
    assert Job(str(shared), tmp_path).newest() == 30


def test_checkpoints_behind_a_link_to_what_is_not_there_never_mean_starting_anew(tmp_path: Path) -> None:
    shared, away = tmp_path / "shared", tmp_path / "not mounted"
    Job(str(shared), tmp_path).save(10)
    (tmp_path / "attempts.json").touch()
    for link, where in (
        (shared / "checkpoints", shared),
        (shared, shared),
        (shared, shared / "of this job"),
    ):
        shutil.rmtree(link)
        link.symlink_to(away)
        told = rf"{link} is a link to what isn't there \(is its disk mounted\?\)"
        with pytest.raises(JobFailedError, match=f"{told}; a checkpoint may be there"):
            Job(str(where), tmp_path).newest()
        with pytest.raises(JobFailedError, match=told):
            list_checkpoints(str(where), None)
        job = Job(str(where), tmp_path, retry_delays_seconds=(60.0,))  # nothing here is worth a second try
        with pytest.raises(InputError, match="File exists; no checkpoint could be saved"):
            job.checkpointer.publish_first("attempts.json", tmp_path / "attempts.json")
        link.unlink()
        shared.mkdir(exist_ok=True)
    assert Job(str(shared), tmp_path).newest() is None


@pytest.mark.parametrize("name", ["COMMITTED", "__0_0.distcp", "manifest.json/below"])
def test_a_folder_in_the_place_of_a_steps_file_keeps_no_save_out(tmp_path: Path, name: str) -> None:
    step = tmp_path / "shared/checkpoints/step-00000010"
    (step / name).mkdir(parents=True)
    job = Job(str(tmp_path / "shared"), tmp_path)
    job.save(10)
    assert job.checkpointer.last_error is None and Job(str(tmp_path / "shared"), tmp_path).newest() == 10


def test_a_step_whose_folder_was_renamed_is_told_and_never_means_starting_anew(tmp_path: Path) -> None:
    destination = str(tmp_path / "destination")
    Job(destination, tmp_path).save(10, 20)
    folders = tmp_path / "destination/checkpoints"
    (folders / "step-00000020").rename(folders / "step-20")
    told = "its folder must be called step-00000020 again"
    job = Job(destination, tmp_path, keep_last=1)
    assert job.newest() == 10
    assert job.said == [f"checkpoint step=20 skipped: {told}; looking for the one before it"]
    found = list_checkpoints(destination, None)
    assert [(one.step, one.problem, one.is_readable) for one in found] == [(10, "", True), (20, told, False)]
    shutil.rmtree(folders / "step-00000010")
    with pytest.raises(InputError, match=r"none of what was committed .* \(the newest: step 20\) is whole"):
        Job(destination, tmp_path).newest()
    job.save(30)
    done = prune(destination, None, rules=Retention(1), dry_run=False)
    assert (folders / "step-20/COMMITTED").is_file() and not done.removed
    (folders / "step-20").rename(folders / "step-00000020")
    shutil.rmtree(folders / "step-00000030")
    assert Job(destination, tmp_path).newest() == 20


def test_a_bucket_that_marks_its_folders_has_as_good_checkpoints_as_any(s3_endpoint: str, tmp_path: Path) -> None:
    """S3's console and DataSync make an empty object `step-00000010/`; in a folder that would be a link's name."""
    assert s3_endpoint
    destination, s3 = f"s3://{BUCKET}/{tmp_path.name}", boto3.client("s3")
    Job(destination, tmp_path).save(10)
    for folder in ("", "checkpoints/", "checkpoints/step-00000010/", "checkpoints/step-00000020/"):
        s3.put_object(Bucket=BUCKET, Key=f"{tmp_path.name}/{folder}", Body=b"")
    job = Job(destination, tmp_path, keep_last=1)
    assert job.newest() == 10 and not job.said
    assert [(one.step, one.is_good) for one in list_checkpoints(destination, s3)] == [(10, True)]
    job.save(30)
    assert [one.step for one in list_checkpoints(destination, s3)] == [30] and job.checkpointer.last_error is None


def test_a_steps_link_to_what_is_not_there_is_passed_over_with_a_line_and_stays(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    Job(str(shared), tmp_path).save(10, 20)
    step = shared / "checkpoints/step-00000020"
    shutil.move(step, tmp_path / "kept")
    step.symlink_to(tmp_path / "not mounted/kept")
    told = "it is a link to what isn't there (is its disk mounted?)"
    resumed = Job(str(shared), tmp_path, keep_last=1)
    assert resumed.newest() == 10
    assert resumed.said == [f"checkpoint step=20 skipped: {told}; looking for the one before it"]
    (seen,) = [one for one in list_checkpoints(str(shared), None) if one.step == 20]
    assert seen.problem == told and not seen.is_readable and not seen.is_good
    resumed.save(30)
    assert resumed.checkpointer.last_error is None and step.is_symlink(), "retention leaves what it can't look at"
    resumed.save(20)
    assert resumed.checkpointer.last_error is None and not step.is_symlink()
    shutil.rmtree(shared / "checkpoints")
    (shared / "checkpoints").mkdir()
    step.symlink_to(tmp_path / "not mounted/kept")
    with pytest.raises(InputError, match=r"none of what was committed .* \(the newest: step 20\) is whole"):
        Job(str(shared), tmp_path).newest()


def test_a_disk_that_is_too_full_is_foreseen(destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(destination, tmp_path, keep_last=1)
    job.save(1)
    monkeypatch.setattr(checkpointer, "free_bytes", lambda folder: 1 << 20)
    job.save(2)
    assert "needs 16 MiB" in job.said[1] and "has 1 MiB free" in job.said[1]
    kept = "checkpoint step=2 not committed: a disk is too full for it; the one before it is kept"
    assert job.said[2].startswith(kept)
    first = Job(f"{destination}/else", tmp_path)
    first.save(1)
    assert first.said[1].startswith(
        "checkpoint step=1 not committed: a disk is too full for it; none is at its destination"
    )
    monkeypatch.setattr(checkpointer, "free_bytes", lambda folder: 1 << 40)
    assert Job(destination, tmp_path).newest() == 1
    job.save(3)
    assert Job(destination, tmp_path).newest() == 3


def test_who_empties_the_destination_starts_anew_whatever_the_host_keeps(destination: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    job = Job(destination, tmp_path, local_tier=near)
    assert job.newest() is None
    job.save(7)
    again = Job(destination, tmp_path, local_tier=near)
    info = again.checkpointer.latest()
    assert info is not None and info.folder.is_relative_to(near)
    if destination.startswith("s3:"):
        open_destination(destination).delete([*open_destination(destination).sizes("")])
    else:
        shutil.rmtree(f"{destination}/checkpoints")
    anew = Job(destination, tmp_path, local_tier=near)
    assert anew.newest() is None and "is of another run than" in anew.said[-1]
    anew.save(1)
    assert Job(destination, tmp_path, local_tier=near).newest() == 1
    assert [path.parent.name for path in near.rglob("COMMITTED")] == ["step-00000001"]


def test_full_disks_of_hosts_go_by_where_the_save_is_written(
    destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's own disk is full: files go through scratch to a bucket, and straight to a folder."""
    near = tmp_path / "near"
    job = Job(destination, tmp_path, local_tier=near)
    full = {near}
    monkeypatch.setattr(
        checkpointer, "free_bytes", lambda folder: (1 << 20) if any(map(folder.is_relative_to, full)) else 1 << 40
    )
    job.save(1)
    assert job.checkpointer.last_error is None and Job(destination, tmp_path).newest() == 1, job.said
    assert not [*near.rglob("*.distcp")], "nothing was written there"
    full.add(tmp_path / "local")
    job.save(2)
    assert (job.checkpointer.last_error is None) == (not destination.startswith("s3:"))
    full.remove(near)
    job.save(3)
    assert job.checkpointer.last_error is None and [*near.rglob("*.distcp")], job.said


def test_a_destination_that_does_not_answer_costs_a_save_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(str(tmp_path / "far/destination"), tmp_path)
    job.save(1)
    (tmp_path / "far/metrics.jsonl").write_text("{}")
    stat = os.stat

    def stale(path: Any, *rest: Any, **options: Any) -> Any:
        if str(path).startswith(str(tmp_path / "far")):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stale)
        job.checkpointer.save(2, state(2), {}, attachments={"metrics.jsonl": tmp_path / "far/metrics.jsonl"})
    assert "Stale file handle" in str(job.checkpointer.last_error)
    assert any(line.startswith("checkpoint step=2 is saved without metrics.jsonl: Stale") for line in job.said)
    job.save(3)
    assert job.checkpointer.last_error is None and job.newest() == 3


def test_room_is_made_by_what_would_go_anyway_never_by_the_only_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = str(tmp_path / "destination")
    monkeypatch.setattr(checkpointer, "free_bytes", lambda folder: (2 - len(step_names(destination))) << 30)
    job = Job(destination, tmp_path, keep_last=2)
    job.save(1, 2, 3)
    assert step_names(destination) == {"step-00000002", "step-00000003"}
    assert job.checkpointer.num_failed_saves == 0 and not any("free space" in line for line in job.said)
    monkeypatch.setattr(checkpointer, "free_bytes", lambda folder: (1 - len(step_names(destination))) << 30)
    job = Job(destination, tmp_path, keep_last=1)
    job.save(4)
    assert job.checkpointer.num_failed_saves == 1
    assert step_names(destination) == {"step-00000003"} and Job(destination, tmp_path).newest() == 3


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_that_no_disk_tells_of_costs_one_save_and_not_all_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """What a save that failed has left stands in the way of the next, and so does what that would make go."""
    destination, honest = str(tmp_path / "destination"), Saver._write_own_part

    def write(saver: Saver, save: Any) -> None:
        if len(step_names(destination)) >= 3:
            folder = tmp_path / f"destination/checkpoints/step-{save.step:08d}"
            folder.mkdir()
            (folder / "__0_0.distcp").write_bytes(b"half")
            raise OSError(code, os.strerror(code))
        honest(saver, save)

    monkeypatch.setattr(Saver, "_write_own_part", write)
    job = Job(destination, tmp_path, keep_last=3)
    job.save(1, 2, 3, 4)
    assert job.checkpointer.failed_steps == {4} and step_names(destination) >= {f"step-0000000{n}" for n in (1, 2, 3)}
    for step, left in ((5, (2, 3, 5)), (6, (3, 5, 6)), (7, (5, 6, 7))):
        job.save(step)
        assert job.checkpointer.last_error is None, "it is met once"
        assert step_names(destination) == {f"step-0000000{step}" for step in left}
    monkeypatch.setattr(Saver, "_write_own_part", honest)
    again = Job(destination, tmp_path, keep_last=3)
    monkeypatch.setattr(LocalDestination, "put_bytes", _failing(99, permanent=True))
    again.save(8, 9)
    assert step_names(destination) >= {f"step-0000000{step}" for step in (5, 6, 7)}, "other errors make no room"


def test_a_hosts_own_disk_without_room_takes_nothing_from_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    destination = str(tmp_path / "destination")
    job = Job(destination, tmp_path, keep_last=3, local_tier=tmp_path / "disk")
    job.save(1, 2, 3)
    with monkeypatch.context() as full:
        full.setattr(Saver, "_write_own_part", write)
        job.save(4)
    assert job.said[-2].endswith("saves go to the destination alone from now on")
    monkeypatch.setattr(LocalDestination, "put_bytes", _failing(99, permanent=True))
    job.save(5)
    assert step_names(destination) >= {"step-00000001", "step-00000002", "step-00000003"}


def test_a_write_that_fails_half_way_leaves_the_one_before(destination: str, tmp_path: Path) -> None:
    job = Job(destination, tmp_path)
    job.save(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        job.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert job.checkpointer.num_failed_saves == 1
    assert Job(destination, tmp_path).newest() == 1


def test_retries_stop_at_once_when_they_cannot_help() -> None:
    tries: list[int] = []

    def refuse() -> None:
        tries.append(1)
        raise DestinationError("denied", permanent=True)

    with pytest.raises(DestinationError):
        with_retries(refuse, what="upload", report=lambda line: None, delays_seconds=(0.0,) * 5)
    assert len(tries) == 1


def test_wrong_destinations_are_named() -> None:
    for uri in ("gs://bucket/x", "s3:///x", "s3:/bucket/x", "arn:aws:s3:::bucket/x"):
        with pytest.raises(InputError, match=r"checkpoint\.destination"):
            open_destination(uri)


# ---------------------------------------------------------------- killed at any moment


def _save_until_killed(destination: str, tmp_path: str, said: Any, first: int) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpointer(
        destination,
        rank=0,
        world_size=1,
        local_dir=Path(tmp_path) / "local",
        keep_last=2,
        asynchronous=True,
        report=said.put,
    )
    said.put("ready")
    for step in range(first, first + 10_000):
        checkpoints.save(step, state(step), {"step": step})


def test_a_kill_at_any_moment_leaves_the_last_committed_one(destination: str, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    moments = random.Random(int.from_bytes(os.urandom(4)))
    torch.set_num_threads(1)
    first, resumed = 1, None
    num_kills, longest = (7, 0.6) if destination.startswith("s3") else (12, 0.3)
    for number in range(10 * num_kills):
        if number >= num_kills and resumed is not None and resumed > 5:
            break
        # On a machine so busy that hardly one is committed meanwhile, they have longer.
        patience = longest * (1 + number // num_kills)
        # SimpleQueue: written in the caller's thread, so that a line is out before the next save begins.
        said = fork.SimpleQueue()
        process = fork.Process(target=_save_until_killed, args=(destination, str(tmp_path), said, first))
        process.start()
        assert said.get() == "ready"
        time.sleep(moments.uniform(0.0, patience))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        committed = [resumed or 0]
        while not said.empty():
            line = said.get()
            assert "committed" in line, line
            committed.append(int(line.split("step=")[1].split()[0]))
        resumed = Job(destination, tmp_path).newest()
        # The marker may have been written just before the line was.
        assert (resumed or 0) in (max(committed), max(committed) + 1)
        first = (resumed or 0) + 1
    assert resumed is not None and resumed > 5
    shutil.rmtree(tmp_path / "local", ignore_errors=True)
