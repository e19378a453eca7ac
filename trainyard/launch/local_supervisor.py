"""`python -m trainyard.launch.local_supervisor DIRECTORY ATTEMPT`: runs torchrun and writes down how it ended."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

from trainyard.launch.local_rank import RESUME_FILE, die_with_parent
from trainyard.launch.record import utc_now
from trainyard.spec.job import ResolvedJob

GRACE_SECONDS = 120.0
"""What SageMaker gives between SIGTERM and SIGKILL."""
_FAILURE_LINES = 200
"""How much of the log's end is searched for the reason of a failure."""
_LOCK_SECONDS = 2.0
"""How long a lock may stay taken before whoever holds it is another supervisor."""
_RANK_PREFIX = re.compile(r"^\[(rank|default)\d+\]: ?")
_RANK_ENDED = re.compile(r"exitcode\s*:\s*(?P<signal>-\d+)")
_TORCHRUN_LINE = re.compile(
    r"^[EWI]\d{4} |^Root Cause|^\[\d+\]:$|^torch\.distributed\.|^\s*(time|host|rank|exitcode|error_file)\s*:"
)


def main(directory: Path, attempt: int) -> int:
    """Run one attempt to its end, unless another supervisor has done or does so; its state goes to outcome.json."""
    with (directory / "running.lock").open("a") as lock:
        if not _is_ours(lock) or _was_started(directory, attempt):
            return 0
        return _run(directory, attempt)


def _is_ours(lock: IO[str]) -> bool:
    # Whoever asks for a job's state holds the lock shared for an instant; another supervisor holds it for good.
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def _was_started(directory: Path, attempt: int) -> bool:
    try:
        started = json.loads((directory / "process.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(started["attempt"] >= attempt)


def _run(directory: Path, attempt: int) -> int:
    job = ResolvedJob.model_validate_json((directory / "resolved_job.json").read_bytes())
    started = time.monotonic()
    # What the attempt before left there would be taken for this one's.
    (directory / "output" / RESUME_FILE).unlink(missing_ok=True)
    with (directory / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            _command(directory, job),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  # this process has one thread
        )
        stop = _Stop(process)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        supervisor = {"pid": os.getpid(), "torchrun_pid": process.pid, "attempt": attempt, "started_at": utc_now()}
        _write(directory / "process.json", supervisor)
        code = _wait(process, stop)
    state, note = ending(code, stop, saved=(directory / "output" / RESUME_FILE).exists())
    outcome = {
        "attempt": attempt,
        "state": state,
        "note": note,
        "ended_at": utc_now(),
        "seconds": round(time.monotonic() - started, 3),
        "exit_code": code,
        "failure": failure_reason(directory / "log.txt") if state == "Failed" else "",
    }
    _write(directory / "outcome.json", outcome)
    return 0


def _command(directory: Path, job: ResolvedJob) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(job.processes_per_host)),
        # A fresh port, so that two jobs on one machine never meet.
        *("--master-addr", "127.0.0.1", "--master-port", str(_free_port())),
        *("-m", "trainyard.launch.local_rank", "--resolved-job", str(directory / "resolved_job.json")),
        *("--output-dir", str(directory / "output")),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Stop:
    """On a signal: SIGTERM to the ranks alone, because torchrun itself would kill them 30 s later, mid-save."""

    def __init__(self, torchrun: subprocess.Popen[bytes]) -> None:
        self._torchrun = torchrun
        self.asked_at: float | None = None
        self.ran_out = False
        """The time to save was over, and the ranks were killed."""

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        if self.asked_at is not None:
            return
        self.asked_at = time.monotonic()
        ranks = children(self._torchrun.pid)
        for pid in ranks or [self._torchrun.pid]:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue


def _wait(process: subprocess.Popen[bytes], stop: _Stop) -> int:
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if stop.asked_at is not None and time.monotonic() > stop.asked_at + GRACE_SECONDS:
                stop.ran_out = True
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait()


def ending(code: int, stop: _Stop, *, saved: bool) -> tuple[str, str]:
    """Final state and note: a rank that crashed while it was being stopped has failed, it hasn't stopped.

    `saved`: the trainer left word that it was interrupted and can be resumed.
    """
    if code == 0:
        return "Completed", ""
    if stop.ran_out:
        return "Stopped", f"killed: it had not saved within {GRACE_SECONDS:.0f} s"
    return ("Stopped" if stop.asked_at is not None and saved else "Failed"), ""


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    listing = (
        subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        if not Path("/proc/self/stat").exists()
        else _proc_listing()
    )
    pairs = (line.split() for line in listing.splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def _proc_listing() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (command) state ppid ...": the command may hold spaces and parentheses.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        lines.append(f"{path.parent.name} {fields[1]}")
    return "\n".join(lines)


def failure_reason(log: Path) -> str:
    """What a log says about why it failed: the last exception or `trainyard:` line, else how the ranks ended."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_FAILURE_LINES:]
    except OSError:
        return ""
    if named := [line.strip() for line in lines if _names_a_failure(line)]:
        # The verb that shows it puts its own `trainyard:` in front.
        return named[-1].removeprefix("trainyard: ")
    for line in reversed(lines):
        if ended := _RANK_ENDED.search(line):
            number = -int(ended["signal"])
            hint = ", perhaps for want of memory" if number == signal.SIGKILL else ""
            return f"a rank was killed by signal {number}{hint}"
    said = [line.strip() for line in lines if re.search(r"\w", line) and not _TORCHRUN_LINE.match(line)]
    return said[-1] if said else ""


def _names_a_failure(line: str) -> bool:
    # A rank's own words, not torchrun's ChildFailedError summary, which only repeats that some rank failed.
    text = _RANK_PREFIX.sub("", line).strip()
    if text.startswith("trainyard: "):
        return True
    head = text.partition(":")[0]
    return head.endswith(("Error", "Exception")) and " " not in head and "ChildFailedError" not in head


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
