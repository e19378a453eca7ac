"""Jobs on this machine: the container's host in a directory, under a supervisor that outlives who started it.

A job's directory is its checkpoint destination too: checkpoints/, with metrics.jsonl and result.json as of the newest.
Beside them lie record.json, resolved_job.json, output/ (the trainer's own, always up to date, and recovery.jsonl),
host/ (of the host that runs the ranks: `failure`, and what is of no use afterwards), log.txt, and three files of the
supervisor: process.json (its pid), running.lock (held while it lives, so that even `kill -9` is noticed) and
outcome.json (how the attempt ended; outcome.room until then, so that a full disk has room for it).
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainyard.errors import InputError, JobFailedError
from trainyard.launch.backend import LogCursor, LogLine, Observation, Say, without_first_line
from trainyard.launch.local_paths import check_held, check_places, check_read
from trainyard.launch.moved import refused_resume
from trainyard.launch.record import JobRecord, StateChange
from trainyard.launch.session import checkout_root

TAIL_BYTES = 256 * 1024
"""Of a log whose newest lines are wanted: about two thousand steps."""
START_SECONDS = 20.0
"""How long a supervisor may take to come up before that counts as a failure."""


class LocalBackend:
    """Runs jobs under `folder`, one directory each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, record: JobRecord) -> None:
        """This machine needs a trainer, what the job reads, and a place for checkpoints; a job that is resumed the ones
        it has."""
        check_trainer()
        self._refuse_moved(record)
        spec = record.resolved.spec
        if record.attempt.number > 1:  # a launch has looked, as it made the paths absolute
            check_held(spec)
            check_read(spec)
        check_places(record.spec, spec)

    def submit(self, record: JobRecord, say: Say) -> None:
        """Start the supervisor in the background; an attempt that was started already is left alone."""
        directory = self._folder / record.job_id
        check_trainer()
        self._refuse_moved(record)
        with (directory / "submit.lock").open("a") as lock:
            # Of two that submit one attempt at once, the second waits, and finds it started.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _was_started(directory, record):
                return
            count = record.resolved.world_size
            say(f"starting {count} {'process' if count == 1 else 'processes'} on this machine")
            self._start(record, directory)

    def _refuse_moved(self, record: JobRecord) -> None:
        """InputError where the job's folder was moved with its checkpoints: at the place it knows it began anew. So did
        one whose place is said from the folder of its launch, as earlier trainyards noted it, in another."""
        if record.attempt.number == 1:  # it has nothing to go on from
            return
        known = Path(record.checkpoint_destination)
        if not ("://" in record.checkpoint_destination or known.is_absolute() or known.exists()):
            raise InputError(
                f"job {record.job_id}: its checkpoint.destination {known} is a path from the folder where it was"
                f" launched, and there is none in {Path.cwd()}: resume it from there; to begin anew: mkdir {known}"
            )
        for reason in refused_resume(record, self._folder):
            raise InputError(f"job {record.job_id}: {reason}")

    def _start(self, record: JobRecord, directory: Path) -> None:
        (directory / "resolved_job.json").write_text(record.resolved.model_dump_json(indent=1), encoding="utf-8")
        for stale in ("process.json", "outcome.json", "stop_requested"):
            (directory / stale).unlink(missing_ok=True)
        with (directory / "supervisor.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "trainyard.launch.local_supervisor"),
                    *(str(directory), str(record.attempt.number)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Its own session: a Ctrl-C at the terminal stops the watching, not the job.
                start_new_session=True,
                env=trainer_environment(),
            )
        deadline = time.monotonic() + START_SECONDS
        while not (directory / "process.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise JobFailedError(
                    f"job {record.job_id}: its supervisor didn't start; see {directory / 'supervisor.log'}"
                )
            time.sleep(0.05)

    def observe(self, record: JobRecord) -> Observation | None:
        """The newest attempt: running, ended, or (None) never started."""
        directory = self._folder / record.job_id
        number = record.attempt.number
        # Asked before the outcome is read: the supervisor writes it while it still holds the lock.
        running = is_running(directory)
        outcome = _read(directory / "outcome.json")
        process = _read(directory / "process.json")
        if process is None or process.get("attempt") != number:
            return None
        started = StateChange(state="Training", at=process["started_at"], attempt=number)
        if outcome is not None and outcome.get("attempt") == number:
            ended = StateChange(state=outcome["state"], at=outcome["ended_at"], attempt=number)
            return Observation(
                state=outcome["state"],
                note=outcome["note"],
                failure=outcome["failure"],
                transitions=(started, ended),
                running_seconds=outcome["seconds"],
            )
        if running:
            stopping = (directory / "stop_requested").exists()
            return Observation(state="Stopping" if stopping else "Training", transitions=(started,))
        return Observation(
            state="Failed",
            failure="its supervisor was killed, the machine restarted, or a full disk took no word of its end",
            transitions=(started,),
        )

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """By each job's own files."""
        seen = {record.job_id: self.observe(record) for record in records if not record.finished}
        return {job_id: observation.state for job_id, observation in seen.items() if observation is not None}

    def stop(self, record: JobRecord) -> None:
        """Ask the supervisor to have the ranks save and stop."""
        directory = self._folder / record.job_id
        process = _read(directory / "process.json")
        if process is None or not is_running(directory):
            return
        with contextlib.suppress(OSError):  # it is for the state's name alone; a full disk must not keep a job running
            (directory / "stop_requested").touch()
        os.kill(process["pid"], signal.SIGTERM)

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """Whole lines of log.txt since the cursor."""
        path = self._folder / record.job_id / "log.txt"
        known = cursor.positions.get("log.txt")
        try:
            with path.open("rb") as file:
                is_tail = known is None and cursor.from_end
                offset = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES) if is_tail else int(known or 0)
                file.seek(offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise JobFailedError(f"{path}: can't be read: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1]
        cursor.positions["log.txt"] = str(offset + len(whole))
        if is_tail and offset:
            whole = without_first_line(whole)
        return [LogLine("local", line, None) for line in whole.decode("utf-8", "replace").splitlines()]


def _was_started(directory: Path, record: JobRecord) -> bool:
    """Whether the newest attempt has a supervisor, or had one. The one before it lives on for a moment after it has
    written how it ended, and whose start was interrupted may not have written that it began."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        is_held = is_running(directory)  # asked before the file is read, which the supervisor writes while it holds it
        started = _read(directory / "process.json")
        if started is not None and started.get("attempt") == record.attempt.number:
            return True
        if not is_held:
            return False
        if time.monotonic() > deadline:
            raise JobFailedError(
                f"job {record.job_id}: the supervisor of an attempt before still runs after {START_SECONDS:.0f} s; see "
                f"{directory / 'supervisor.log'}, then resume again"
            )
        time.sleep(0.05)


def is_running(directory: Path) -> bool:
    """Whether a supervisor lives in that directory."""
    try:
        with (directory / "running.lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def has_trainer() -> bool:
    """Whether this Python can train: torch and the trainer package are there."""
    try:
        check_trainer()
    except InputError:
        return False
    return True


def check_trainer() -> None:
    """InputError where this Python can't train: no torch, or no trainer package."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"--backend local: {sys.executable} has no torch; run scripts/setup and use .venv/bin/trainyard"
        )
    if importlib.util.find_spec("trainer") is None and not (trainer_root() / "trainer").is_dir():
        raise InputError("--backend local: the trainer package is missing; run trainyard from its checkout")


def trainer_root() -> Path:
    """The folder of the checkout that holds the package `trainer`."""
    return checkout_root() / "training_container"


def trainer_environment() -> dict[str, str]:
    """This environment, in which `trainyard` and `trainer` can be imported from the checkout."""
    paths = [str(checkout_root()), str(trainer_root())]
    existing = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *([existing] if existing else [])])}


def _read(path: Path) -> dict[str, Any] | None:
    """A supervisor's file; on a full disk it may be a link that leads to the content. None where there is none."""
    try:
        if not path.is_symlink() and not path.is_file():  # a pipe would be waited for without an end
            return None
        text = os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8")  # noqa: PTH115  # as it is
        content = json.loads(text)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
