"""`python -m trainyard.launch.local_supervisor DIRECTORY ATTEMPT`: runs a job's host and writes down how it ended.

The host is the container's own (`trainer.host.here`): it starts the ranks, and starts them again as the job's
`recovery` allows.
"""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

from trainyard.kept_room import FULL, keep_room, tell, write_whole
from trainyard.launch.record import utc_now

RESUME_EXIT_CODE = 75
"""The host's word for "saved; resume me"."""
FAILURE_FILE = "host/failure"
"""Why the host failed: its first line, or what it leads to as a link (`trainer.host.word`)."""
ROOM = "outcome.room"
"""Kept for `outcome.json`, which is written over it: a disk that is full takes no new file's content."""
GRACE_SECONDS = 120.0
"""What SageMaker gives between SIGTERM and SIGKILL."""
_LOCK_SECONDS = 2.0
"""How long a lock may stay taken before whoever holds it is another supervisor."""
_LONGEST_LINK_FAILURE = 500
"""Of characters of a failure, in an outcome that is a link."""
_OUTCOME_TRIES = 24
_OUTCOME_PAUSE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    started = time.monotonic()
    # What the attempt before left there would be taken for this one's.
    (directory / FAILURE_FILE).unlink(missing_ok=True)
    keep_room(directory / ROOM)
    with (directory / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.host.here", str(directory)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_prepare_host,  # noqa: PLW1509  # this process has one thread
            env=os.environ
            | {
                "TRAINYARD_JOB_ID": directory.name,
                "TRAINYARD_ATTEMPT": str(attempt),
                # The time to save is this process's to give.
                "TRAINYARD_STOP_GRACE_SECONDS": str(2 * GRACE_SECONDS),
            },
        )
        stop = _Stop(process)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        supervisor = {"pid": os.getpid(), "host_pid": process.pid, "attempt": attempt, "started_at": utc_now()}
        write_whole(directory / "process.json", json.dumps(supervisor))
        code = _wait(process, stop)
    state, note = ending(code, stop)
    outcome = {
        "attempt": attempt,
        "state": state,
        "note": note,
        "ended_at": utc_now(),
        "seconds": round(time.monotonic() - started, 3),
        "exit_code": code,
        "failure": failure_reason(directory, code) if state == "Failed" else "",
    }
    _write_in_the_end(directory / "outcome.json", outcome)
    return 0


def _prepare_host() -> None:
    """SIGKILL when the supervisor is gone (Linux only), so that no orphan writes where a resume does. SIGUSR1 ("save
    and go on") ends nothing until the host listens: its pid is told before it does."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Stop:
    """On a signal: the host is told, and tells the ranks."""

    def __init__(self, host: subprocess.Popen[bytes]) -> None:
        self._host = host
        self.asked_at: float | None = None
        self.ran_out = False
        """The time to save was over, and the ranks were killed."""

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            self._host.terminate()


def _wait(process: subprocess.Popen[bytes], stop: _Stop) -> int:
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if stop.asked_at is not None and time.monotonic() > stop.asked_at + GRACE_SECONDS:
                stop.ran_out = True
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait()


def ending(code: int, stop: _Stop) -> tuple[str, str]:
    """Final state and note: a rank that crashed while it was being stopped has failed, it hasn't stopped."""
    if code == 0:
        return "Completed", ""
    if stop.ran_out:
        return "Stopped", f"killed: it had not saved within {GRACE_SECONDS:.0f} s"
    if stop.asked_at is not None and code == -signal.SIGTERM:
        return "Stopped", "before its ranks were started"
    if code == RESUME_EXIT_CODE:
        return "Stopped", "" if stop.asked_at is not None else "a rank was told to stop; it saved"
    return "Failed", ""


def failure_reason(directory: Path, code: int) -> str:
    """Why the host says that it failed, in one line; where it had no time to say so, how it ended."""
    path = directory / FAILURE_FILE
    try:
        # No path: that would make one slash of two.
        text = os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8")  # noqa: PTH115
    except OSError:
        text = ""
    if text:
        return text.splitlines()[0]
    if code < 0:
        return f"its host process was killed by {signal.Signals(-code).name}"
    return f"its host process ended with exit code {code}; the end of {directory / 'log.txt'} may say why"


def _write_in_the_end(path: Path, content: dict[str, Any]) -> None:
    """Without an outcome a job counts as failed, however it ended: over the room that was kept for it; where the file
    system doesn't take that either, once the full disk has room again; at last as what a link leads to."""
    for _ in range(_OUTCOME_TRIES):
        try:
            tell(path, json.dumps(content), path.with_name(ROOM))
        except OSError as error:
            if error.errno not in FULL:
                raise
            time.sleep(_OUTCOME_PAUSE_SECONDS)
        else:
            return
    short = content | {"failure": content["failure"][:_LONGEST_LINK_FAILURE]}
    path.unlink(missing_ok=True)
    path.symlink_to(json.dumps(short))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
