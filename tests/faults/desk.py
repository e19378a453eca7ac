"""A job of `trainyard launch --backend local`: its launcher dies, and people resume it, two at once."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence import read_jsonl
from sites import environment_of, fill_disk, left_behind, mount_disk, unmount_disk
from trainer_testing.faulty_entrypoint import MODULE

from trainyard.emulator.processes import kill_all
from trainyard.launch import launch_here, local_backend, watch
from trainyard.launch.goodput import goodput
from trainyard.launch.local_backend import LocalBackend, is_running
from trainyard.launch.record import FolderRecordStore
from trainyard.spec.job import load_job

_RESUME = """
import sys
from pathlib import Path
from trainyard.errors import InputError
from trainyard.launch import watch
from trainyard.launch.cluster import here_backend
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.record import FolderRecordStore
folder, job_id, kind = Path(sys.argv[1]), *sys.argv[2:]
backend = here_backend(folder) if kind == "slurm" else LocalBackend(folder)
try:
    print(watch.resume(FolderRecordStore(folder), backend, job_id).attempt.number)
except InputError as error:
    sys.exit(str(error))
"""
_MARK = "TRAINYARD_OPT_ML"
"""What `kill_all` and `processes_under` know a job's processes by."""


def resumed(folder: Path, job_id: str, backend: str, *, times: int) -> list[str]:
    """A job of the records in `folder`, on `backend` (local or slurm), by so many people at once: what went wrong."""
    resumes = [
        subprocess.Popen(
            [sys.executable, "-c", _RESUME, str(folder), job_id, backend],
            env=local_backend.trainer_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(times)
    ]
    answers = [(*resume.communicate(timeout=120), resume.returncode) for resume in resumes]
    # Who comes second is refused, or finds the attempt of the first one and starts nothing.
    return [] if len({said for said, _, code in answers if code == 0}) == 1 else [f"resumed {answers}"]


class DeskSite:
    """The supervisor and its host are the real ones; what the ranks run is the faulty trainer."""

    s3: Any = None

    def __init__(self, root: Path, job: Path, overrides: Sequence[str], *, disk: bool) -> None:
        """`disk`: its folder, with records, logs and checkpoints, on a file system that can be filled."""
        self.root = root
        self._folder = root / "jobs"
        self._folder.mkdir(parents=True)
        self._has_disk = disk
        if disk:
            mount_disk(self._folder)
        self._store = FolderRecordStore(self._folder)
        self._backend = LocalBackend(self._folder)
        self._spec = load_job(job, overrides)
        self._job_id = ""
        self.reasons: list[str] = []
        self._resumes = 1

    @property
    def destination(self) -> str:
        """The job's directory, once it has one."""
        return str(self._folder / self._job_id) if self._job_id else str(self.root / "nowhere")

    @property
    def lines(self) -> list[str]:
        path = Path(self.destination) / "log.txt"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    @contextlib.contextmanager
    def _environment(self) -> Any:
        before = dict(os.environ)
        os.environ.update(environment_of(self.root / "faults"))
        os.environ.update({_MARK: str(self._folder), "TRAINYARD_RANK_MODULE": MODULE})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def start(self) -> None:
        with self._environment():
            if not self._job_id:
                self._job_id = launch_here(self._spec, self._folder, num_processes=2).job_id
                return
            self.reasons += resumed(self._folder, self._job_id, "local", times=self._resumes)
        self._resumes = 1

    def outcome(self) -> str | None:
        current = watch.status(self._store, self._backend, self._job_id)
        if not current.finished:
            return None
        return "done" if current.state == "Completed" else f"{current.state}: {current.record.attempt.failure}"

    def act(self, kind: str, draw: random.Random) -> bool:
        if kind == "disk_full":
            return fill_disk(self._folder, self._told, draw.uniform(1.0, 2.5), self.root / "faults")
        directory = Path(self.destination)
        self._resumes = 2 if kind == "two_launchers" else 1
        os.kill(json.loads((directory / "process.json").read_text())["pid"], signal.SIGKILL)
        until = time.monotonic() + 10
        while is_running(directory) and time.monotonic() < until:
            time.sleep(0.02)
        return True

    def _told(self) -> list[str]:
        """What the first rank said; not by the log, which lies on the disk that is full."""
        return [row["line"] for row in read_jsonl(self.root / "faults/events.jsonl") if "line" in row]

    def leftovers(self) -> list[str]:
        directory = Path(self.destination)
        until = time.monotonic() + 30
        while is_running(directory) and time.monotonic() < until:
            time.sleep(0.1)
        problems = ["its supervisor still runs"] if is_running(directory) else []
        return problems + left_behind(directory) + self.reasons

    def goodput(self) -> dict[str, Any] | None:
        found = goodput(self._store.read(self._job_id).record, None)
        return found.as_json() if found else None

    def close(self) -> None:
        kill_all(self._folder, [])
        if self._has_disk:
            unmount_disk(self._folder)
