"""Jobs on this machine: the supervisor's life, told apart from its death, with a trainer that plays a script."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launch_testing import LOCAL_JOB_ID, job_content, record_without_tenant

from trainyard.errors import InputError, JobFailedError
from trainyard.kept_room import keep_room
from trainyard.launch import launch_here, local_backend, local_supervisor, watch
from trainyard.launch.local_backend import LocalBackend, is_running
from trainyard.launch.local_supervisor import failure_reason
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ModelSpec, ResolvedJob

TRAINER = """
import argparse, json, os, pathlib, signal, sys, time

parser = argparse.ArgumentParser()
parser.add_argument("--resolved-job")
parser.add_argument("--output-dir")
parser.add_argument("--scratch-dir")
arguments = parser.parse_args()
job = json.loads(pathlib.Path(arguments.resolved_job).read_text())
destination = pathlib.Path(job["spec"]["checkpoint"]["destination"])
mode = job["spec"]["name"]
rank = int(os.environ["RANK"])

def save_and_leave(*_):
    time.sleep(0.2)  # torchrun would have killed us by now, had it been signalled as well
    destination.mkdir(parents=True, exist_ok=True)
    if mode == "stopping-badly":
        raise OSError("no space left on device")
    (destination / f"saved-{rank}").touch()
    (pathlib.Path(arguments.output_dir) / "resume_me").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, save_and_leave)
ready = pathlib.Path(arguments.output_dir)
ready.mkdir(parents=True, exist_ok=True)
(ready / f"ready-{rank}").write_text(str(os.getpid()))
with (ready / "starts").open("a") as starts:
    starts.write(f"{rank}\\n")
while len(list(ready.glob("ready-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
resumed = (destination / "saved-0").exists()
if resumed and rank == 0:
    print("resumed step=1 uri=x", flush=True)
for step in range(1, 4):
    if rank == 0:
        print(f"step={step} loss=1.5 tokens_per_second=10.0", flush=True)
    if mode == "crashing":
        raise RuntimeError("the loss is not a number at step 1")
    if mode == "losing-a-rank" and rank == 1 and not (destination / "lost").exists():
        destination.mkdir(parents=True, exist_ok=True)
        (destination / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while mode.startswith("stopping") and not resumed:
        time.sleep(0.05)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of jobs, and a `trainer` package that does as the job's name says, under the real one's host."""
    package = tmp_path / "image" / "trainer"
    package.mkdir(parents=True)
    real = local_backend.trainer_root() / "trainer"
    (package / "__init__.py").write_text(f"__path__.append({str(real)!r})")
    (package / "__main__.py").write_text(textwrap.dedent(TRAINER))
    monkeypatch.setattr(local_backend, "trainer_root", lambda: tmp_path / "image")
    folder = tmp_path / "jobs"
    yield folder
    for process in folder.glob("*/process.json"):
        if is_running(process.parent):
            os.kill(json.loads(process.read_text())["pid"], signal.SIGTERM)
            wait_until(lambda directory=process.parent: not is_running(directory))  # type: ignore[misc]


def local_spec(tmp_path: Path, name: str) -> JobSpec:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "x"}\n')
    content = job_content()
    content |= {"name": name, "tenant": None, "compute": {"backend": "local"}}
    content["recovery"] = {"max_restarts": 1 if name == "losing-a-rank" else 0, "backoff_seconds": 0}
    content["data"] = {"train": [{"path": str(text), "format": "jsonl"}], "sequence_length": 64}
    return parse(JobSpec, content, "job")


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def test_a_job_runs_to_its_end_and_its_lines_are_read(place: Path, tmp_path: Path) -> None:
    record = launch_here(local_spec(tmp_path, "fine"), place)
    assert record.resolved.world_size == 2
    store, backend = FolderRecordStore(place), LocalBackend(place)
    texts: list[str] = []
    for _, lines in watch.watch(store, backend, record.job_id, sleep=lambda _: time.sleep(0.1)):
        texts += [line.text for line in lines]
    assert watch.status(store, backend, record.job_id).state == "Completed"
    assert [text.split()[0] for text in texts if text.startswith("step=")] == ["step=1", "step=2", "step=3"]
    assert [change.state for change in store.read(record.job_id).record.states] == [
        "Created", "Submitted", "Training", "Completed",
    ]  # fmt: skip


def test_a_crash_is_told_by_the_ranks_own_words(place: Path, tmp_path: Path) -> None:
    record = launch_here(local_spec(tmp_path, "crashing"), place)
    store, backend = FolderRecordStore(place), LocalBackend(place)
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    status = watch.status(store, backend, record.job_id)
    assert status.state == "Failed"
    assert status.record.attempt.failure in [
        f"rank {rank} on this machine: RuntimeError: the loss is not a number at step 1" for rank in range(2)
    ]


def test_a_lost_rank_is_started_again_in_place(place: Path, tmp_path: Path) -> None:
    record = launch_here(local_spec(tmp_path, "losing-a-rank"), place)
    store, backend = FolderRecordStore(place), LocalBackend(place)
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    status = watch.status(store, backend, record.job_id)
    assert (status.state, status.record.attempt.number) == ("Completed", 1)
    assert "rank 1 on this machine was killed by SIGKILL" in (place / record.job_id / "log.txt").read_text()
    assert sorted((place / record.job_id / "output/starts").read_text().split()) == ["0", "0", "1", "1"]


def test_a_stopped_job_has_saved_and_resumes(place: Path, tmp_path: Path) -> None:
    record = launch_here(local_spec(tmp_path, "stopping"), place)
    # "Save and go on", while the host is still starting: it ends nothing.
    os.kill(json.loads((place / record.job_id / "process.json").read_text())["host_pid"], signal.SIGUSR1)
    store, backend = FolderRecordStore(place), LocalBackend(place)
    log = place / record.job_id / "log.txt"
    wait_until(lambda: log.exists() and "step=1" in log.read_text())
    watch.stop(store, backend, record.job_id)
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    assert watch.status(store, backend, record.job_id).state == "Stopped"
    saved = sorted(path.name for path in Path(record.checkpoint_destination).glob("saved-*"))
    assert saved == ["saved-0", "saved-1"], "every rank had the time to save"

    resumed = watch.resume(store, backend, record.job_id)
    assert resumed.attempt.number == 2
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    assert watch.status(store, backend, record.job_id).state == "Completed"
    assert "resumed step=1" in log.read_text()


def saving_at(spec: JobSpec, destination: str, **more: str) -> JobSpec:
    checkpoint = spec.checkpoint.model_copy(update={"destination": destination, **more})
    return spec.model_copy(update={"checkpoint": checkpoint})


def recorded(job: JobSpec, resolved: ResolvedJob, destination: str) -> JobRecord:
    return record_without_tenant(job, resolved.model_copy(update={"spec": saving_at(resolved.spec, destination)}))


def test_a_folder_whose_path_no_record_can_hold_is_one_line(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xff"))
    with pytest.raises(
        InputError, match=r"st\\udcff.* holds no path that isn't UTF-8; name another folder, there or in T"
    ):
        launch_here(local_spec(tmp_path, "fine"), folder)
    assert not folder.exists()


def test_a_job_that_is_resumed_from_another_folder_finds_its_checkpoints(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a destination that is a path from the folder of its launch; it began anew, in a folder of that name there."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    record = launch_here(saving_at(local_spec(tmp_path, "stopping"), "saved", local_directory="nvme"), place)
    assert record.checkpoint_destination == str(tmp_path / "here/saved")
    assert record.resolved.spec.checkpoint.local_directory == str(tmp_path / "here/nvme")
    assert record.spec.checkpoint.destination == "saved", "as it was written"
    store, backend = FolderRecordStore(place), LocalBackend(place)
    log = place / record.job_id / "log.txt"
    wait_until(lambda: log.exists() and "step=1" in log.read_text())
    watch.stop(store, backend, record.job_id)
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    monkeypatch.chdir(tmp_path / "there")
    watch.resume(store, backend, record.job_id)
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    assert "resumed step=1" in log.read_text() and not list((tmp_path / "there").iterdir())


def test_a_record_of_before_whose_place_is_no_place_here_is_not_begun_anew(
    job: JobSpec, resolved: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recorded(job, resolved, "saved")
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend(tmp_path / "jobs")
    backend.check(record)  # the first attempt has nothing to go on from
    for refuses in (backend.check, lambda record: backend.submit(record, print)):
        with pytest.raises(
            InputError, match=rf"destination saved is a path from .* none in {tmp_path}: resume it from"
        ):
            refuses(record.with_next_attempt())
    (tmp_path / "saved").mkdir()
    backend.check(record.with_next_attempt())


def test_a_job_whose_folder_was_moved_is_not_begun_anew(job: JobSpec, resolved: ResolvedJob, tmp_path: Path) -> None:
    """With the checkout that it was launched from, most often: its record has the place where they were."""
    before, now, job_id = tmp_path / "before", tmp_path / "now", LOCAL_JOB_ID
    record = recorded(job, resolved, str(before / job_id))
    (before / job_id / "checkpoints").mkdir(parents=True)
    LocalBackend(before).check(record.with_next_attempt())
    before.rename(now)
    LocalBackend(now).check(record)  # the first attempt has nothing to go on from
    told = (
        rf"{job_id}: its checkpoints are in {now / job_id}, and its record says {before / job_id}: .*move it back, or"
    )
    for refuses in (LocalBackend(now).check, lambda record: LocalBackend(now).submit(record, print)):
        with pytest.raises(InputError, match=told):
            refuses(record.with_next_attempt())
    assert not before.exists()
    before.symlink_to(now)
    LocalBackend(now).check(record.with_next_attempt())


@pytest.mark.slow
def test_a_resume_waits_for_the_end_of_the_supervisor_before(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has told how its attempt ended, and holds its lock a moment longer: nothing was started, and nobody told."""
    record = launch_here(local_spec(tmp_path, "stopping"), place)
    store, backend = FolderRecordStore(place), LocalBackend(place)
    directory = place / record.job_id
    wait_until(lambda: (directory / "log.txt").exists() and "step=1" in (directory / "log.txt").read_text())
    watch.stop(store, backend, record.job_id)
    wait_until(lambda: not is_running(directory))
    with (directory / "running.lock").open("a") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert watch.status(store, backend, record.job_id).state == "Stopped"
        resumed = pool.submit(watch.resume, store, backend, record.job_id)
        wait_until(lambda: store.read(record.job_id).record.attempt.number == 2)
        assert not resumed.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert resumed.result(20).attempt.number == 2
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    assert watch.status(store, backend, record.job_id).state == "Completed"
    third = store.read(record.job_id).record.with_next_attempt()
    monkeypatch.setattr(local_backend, "START_SECONDS", 0.2)
    with (directory / "running.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(JobFailedError, match="the supervisor of an attempt before still runs"):
            backend.submit(third, lambda _: None)


def test_a_killed_supervisor_is_noticed_and_resumes(place: Path, tmp_path: Path) -> None:
    record = launch_here(local_spec(tmp_path, "stopping"), place)
    store, backend = FolderRecordStore(place), LocalBackend(place)
    directory = place / record.job_id
    log = directory / "log.txt"
    wait_until(lambda: log.exists() and "step=1" in log.read_text())
    assert watch.status(store, backend, record.job_id).state == "Training"
    process = json.loads((directory / "process.json").read_text())
    ranks = [int((directory / "output" / f"ready-{rank}").read_text()) for rank in range(2)]
    assert all(lives(pid) for pid in (process["host_pid"], *ranks))
    os.kill(process["pid"], signal.SIGKILL)
    wait_until(lambda: not is_running(directory))
    # A rank that lived on would write into the folder that a resume reads.
    wait_until(lambda: not any(lives(pid) for pid in (process["host_pid"], *ranks)))
    status = watch.status(store, backend, record.job_id)
    assert status.state == "Failed"
    assert "supervisor was killed" in status.record.attempt.failure
    assert watch.resume(store, backend, record.job_id).attempt.number == 2
    wait_until(lambda: watch.status(store, backend, record.job_id).state == "Training")


def test_a_job_that_was_never_submitted_starts_once_though_two_resume_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "submit", lambda *_: None)
        record = launch_here(local_spec(tmp_path, "fine"), place)
    store = FolderRecordStore(place)
    stored = store.read(record.job_id)
    store.replace(stored, stored.record.with_attempt(submitted_at=None))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: watch.resume(store, LocalBackend(place), record.job_id), range(2)))
    wait_until(lambda: watch.status(store, LocalBackend(place), record.job_id).finished)
    LocalBackend(place).submit(record, lambda _: None)  # one who comes late, after its end
    directory = place / record.job_id
    supervise(directory)
    assert sorted((directory / "output" / "starts").read_text().split()) == ["0", "1"], "each rank once"


def supervise(directory: Path) -> None:
    """Another supervisor of attempt 1, to its end."""
    command = [sys.executable, "-m", "trainyard.launch.local_supervisor", str(directory), "1"]
    subprocess.run(command, env=local_backend.trainer_environment(), check=True, timeout=300)


@pytest.mark.slow
def test_a_second_supervisor_leaves_quietly(place: Path, tmp_path: Path) -> None:
    record = launch_here(local_spec(tmp_path, "stopping"), place)
    directory = place / record.job_id
    wait_until(lambda: (directory / "log.txt").exists() and "step=1" in (directory / "log.txt").read_text())
    supervise(directory)
    assert is_running(directory)
    assert (directory / "outcome.room").stat().st_size == 16 << 10, "kept while there is room"
    assert sorted((directory / "output" / "starts").read_text().split()) == ["0", "1"]


def test_a_rank_that_crashes_while_stopping_has_failed(place: Path, tmp_path: Path) -> None:
    record = launch_here(local_spec(tmp_path, "stopping-badly"), place)
    store, backend = FolderRecordStore(place), LocalBackend(place)
    log = place / record.job_id / "log.txt"
    wait_until(lambda: log.exists() and "step=1" in log.read_text())
    watch.stop(store, backend, record.job_id)
    wait_until(lambda: watch.status(store, backend, record.job_id).finished)
    status = watch.status(store, backend, record.job_id)
    assert status.state == "Failed"
    assert status.record.attempt.failure in [
        f"rank {rank} on this machine: OSError: no space left on device" for rank in range(2)
    ]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_inputs_are_made_absolute_and_missing_ones_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = local_spec(tmp_path, "fine")
    monkeypatch.chdir(tmp_path)
    relative = spec.data.train[0].model_copy(update={"path": "text.jsonl"})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"train": (relative,)})})
    monkeypatch.setattr(LocalBackend, "submit", lambda *_: None)
    record = launch_here(spec, place)
    assert record.resolved.spec.data.train[0].path == str(tmp_path / "text.jsonl")
    endless = relative.model_copy(update={"path": "x" * 300})  # as a folder that may not be looked into
    unseen = spec.model_copy(update={"data": spec.data.model_copy(update={"train": (endless,)})})
    with pytest.raises(InputError, match=r"data.train.0.path: 'x+': can't be looked at: File name too long"):
        launch_here(unseen, place)
    relative = relative.model_copy(update={"path": "~/text.jsonl"})
    at_home = spec.model_copy(update={"data": spec.data.model_copy(update={"train": (relative,)})})
    with pytest.raises(InputError, match=r"~/text.jsonl: no such file or folder .*only a shell takes ~ for a home"):
        launch_here(at_home, place)
    (tmp_path / "text.jsonl").unlink()
    with pytest.raises(InputError, match=r"data.train.0.path: text.jsonl: no such file or folder"):
        launch_here(spec, place)
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}')
    spec = spec.model_copy(update={"model": ModelSpec(source="tiny-llama")})
    with pytest.raises(InputError, match=r"model.source: tiny-llama: no such file or folder .*`hf download"):
        launch_here(spec, place)  # though its sizes are known, so that it can be planned
    (tmp_path / "tiny-llama").mkdir()
    (tmp_path / "tiny-llama/tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(
        InputError, match=r"model.source: .*tiny-llama: no config.json there; give a Hugging Face model"
    ):
        launch_here(spec, place)
    (tmp_path / "tiny-llama/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tiny-llama/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InputError, match=r"model.safetensors: is a pointer of Git LFS, not the file: git lfs pull"):
        launch_here(spec, place)
    (tmp_path / "tiny-llama/model.safetensors").unlink()
    with pytest.raises(InputError, match=r"tiny-llama: has no weights, neither model.safetensors nor"):
        launch_here(spec, place)
    (tmp_path / "tiny-llama/pytorch_model.bin").touch()
    assert launch_here(spec, place).resolved.spec.model.source == str(tmp_path / "tiny-llama")


def test_a_host_that_could_not_say_why_is_told_by_its_end(tmp_path: Path) -> None:
    assert failure_reason(tmp_path, -9) == "its host process was killed by SIGKILL"
    assert failure_reason(tmp_path, 1).startswith("its host process ended with exit code 1; the end of ")
    (tmp_path / "host").mkdir()
    (tmp_path / "host/failure").write_text("rank 0: OSError: no space\nmore\n")
    assert failure_reason(tmp_path, 1) == "rank 0: OSError: no space"
    (tmp_path / "host/failure").unlink()
    (tmp_path / "host/failure").symlink_to("rank 0: //host/a: no space")
    assert failure_reason(tmp_path, 1) == "rank 0: //host/a: no space", "on a full disk a link may be all there is"


OUTCOME = {"attempt": 1, "state": "Completed", "note": "", "ended_at": "2026-01-31T12:00:00+00:00", "seconds": 2.0}
OUTCOME |= {"exit_code": 0, "failure": "x" * 9000}


class Disk:
    """A full one: files keep their blocks and get no more; or it takes no write at all for so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusals: int = 0, error: int = errno.ENOSPC) -> None:
        self.num_refused = 0
        honest = os.write

        def written(descriptor: int, content: bytes) -> int:
            room = os.fstat(descriptor).st_size - os.lseek(descriptor, 0, os.SEEK_CUR)
            if room <= 0 or self.num_refused < refusals:
                self.num_refused += 1
                raise OSError(error, os.strerror(error))
            return honest(descriptor, content[:room])

        monkeypatch.setattr(os, "write", written)
        monkeypatch.setattr(local_supervisor, "_OUTCOME_PAUSE_SECONDS", 0)


def ended(folder: Path) -> None:
    local_supervisor._write_in_the_end(folder / "outcome.json", OUTCOME)


@pytest.mark.parametrize("refusals", [0, 2])
def test_how_a_job_ended_finds_room_on_a_full_disk(
    refusals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_room(tmp_path / local_supervisor.ROOM)
    disk = Disk(monkeypatch, refusals=refusals)
    ended(tmp_path)
    assert json.loads((tmp_path / "outcome.json").read_text()) == OUTCOME and disk.num_refused == refusals
    assert not (tmp_path / local_supervisor.ROOM).exists(), "it became the outcome"


def test_another_refusal_than_a_full_disks_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, refusals=99, error=errno.EACCES)
    with pytest.raises(PermissionError):
        ended(tmp_path)
    assert disk.num_refused == 1


def test_a_job_that_completed_is_no_failed_one_where_a_full_disk_takes_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda *_: None)
    record = launch_here(local_spec(tmp_path, "fine"), place)
    directory = place / record.job_id
    (directory / "process.json").write_text(json.dumps({"attempt": 1, "started_at": "2026-01-31T11:00:00+00:00"}))
    Disk(monkeypatch, refusals=99)
    ended(directory)
    seen = LocalBackend(place).observe(record)
    assert seen is not None and (seen.state, seen.running_seconds) == ("Completed", 2.0)
    assert set(seen.failure) == {"x"} and len(seen.failure) < 1000, "as much as a link holds"


def test_a_full_disk_keeps_no_job_from_being_stopped(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "submit", lambda *_: None)
    record = launch_here(local_spec(tmp_path, "fine"), place)
    directory = place / record.job_id

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with subprocess.Popen(["sleep", "600"]) as supervisor, (directory / "running.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (directory / "process.json").write_text(json.dumps({"attempt": 1, "pid": supervisor.pid}))
            monkeypatch.setattr(Path, "touch", full)
            LocalBackend(place).stop(record)
            assert supervisor.wait(timeout=60) == -signal.SIGTERM
        finally:
            supervisor.kill()


def test_a_pipe_in_the_place_of_a_supervisors_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    os.mkfifo(path)
    reading = "import sys, pathlib; from trainyard.launch import local_backend as b; print(b._read(pathlib.Path('{}')))"
    command = [sys.executable, "-c", reading.format(path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "None\n"
