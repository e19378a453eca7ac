"""Start, find and stop the emulator's daemon. It lives apart from whoever started it, and never without its lock."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainyard.emulator.info import (
    CONTROL_PREFIX,
    INFO_FILE,
    LOCK_FILE,
    LOG_FILE,
    EmulatorInfo,
    open_here,
    read_info,
)
from trainyard.emulator.processes import kill_all
from trainyard.errors import AwsRefusedError, InputError

_START_SECONDS = 180.0
"""One that ends is noticed at once; a busy machine takes its time to import moto."""
_STOP_SECONDS = 15.0
_ANSWER_SECONDS = 60.0
"""For a daemon that holds its lock: it is there, however busy. Taken for dead, it would lose its jobs."""
_GOING_SECONDS = 5.0
"""A killed process's lock lives until the last of its threads is gone, a moment after it stops answering."""
_FULL_BYTES = 4096
"""Less room than that takes no line of a log."""
_START_LOCK_FILE = "start.lock"
_CHECKOUT = Path(__file__).resolve().parents[2]
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def start(
    state_dir: Path,
    *,
    port: int | None = None,
    idle_exit_seconds: float = 1800.0,
    training_argv: list[str] | None = None,
) -> EmulatorInfo:
    """The emulator of `state_dir`: the one that runs, else a new daemon on `port` (default: any free one).

    `idle_exit_seconds` without a request and without a running job end a new daemon; `training_argv` replaces
    the training container's entrypoint, for tests. InputError when `port` is taken by something else; AwsRefusedError
    when one runs and doesn't answer: its jobs are left alone.
    """
    state_dir = state_dir.resolve()
    state_dir.mkdir(parents=True, exist_ok=True)
    with _exclusive(state_dir / _START_LOCK_FILE):  # two starters at once get one daemon
        running = _settled(state_dir)
        if running is not None:
            if port is not None and port != running.port:
                raise InputError(
                    f"port {port}: the emulator of {state_dir} runs on port {running.port}; leave the port out, "
                    f"or stop it first: python -m trainyard.emulator stop --state-dir {state_dir}"
                )
            return running
        if port is not None:
            _require_free(port)
        _clean_up_after_a_killed_daemon(state_dir)
        return _spawn(state_dir, port or 0, idle_exit_seconds, training_argv)


def find(state_dir: Path) -> EmulatorInfo | None:
    """The running emulator of `state_dir`, or None. A stale file of a killed daemon is no emulator."""
    state_dir = state_dir.resolve()
    if not daemon_alive(state_dir):
        return None
    info = read_info(state_dir)
    if info is None:
        return None
    try:
        url = f"http://127.0.0.1:{info.port}{CONTROL_PREFIX}health"
        with open_here(url, _ANSWER_SECONDS) as answer:
            health = json.load(answer)
    except (OSError, ValueError):
        return None
    return replace(info, started_now=False) if health.get("instance_id") == info.instance_id else None


def stop(state_dir: Path) -> bool:
    """End the emulator of `state_dir` and every job process of it; False when none ran.

    AwsRefusedError when it can't be ended: what lives on is never called stopped.
    """
    state_dir = state_dir.resolve()
    if not any((state_dir / name).exists() for name in (_START_LOCK_FILE, LOCK_FILE)):
        return False
    with _exclusive(state_dir / _START_LOCK_FILE):  # not between a daemon and its file
        info = _written_info(state_dir)
        alive = daemon_alive(state_dir)
        for way in (signal.SIGTERM, signal.SIGKILL):
            if info is None or not daemon_alive(state_dir):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, way)
            _wait_until_gone(state_dir, _STOP_SECONDS)
        if daemon_alive(state_dir):
            who = f"process {info.pid}" if info is not None else f"the process that holds {state_dir / LOCK_FILE}"
            raise AwsRefusedError(f"{state_dir}: the emulator does not end; end {who} yourself")
        _clean_up_after_a_killed_daemon(state_dir)
    return alive


def _settled(state_dir: Path) -> EmulatorInfo | None:
    """The daemon that runs here, or None; AwsRefusedError for one that doesn't answer, which is no killed one."""
    _written_info(state_dir)
    found = find(state_dir)
    if found is None:
        _wait_until_gone(state_dir, _GOING_SECONDS)
    if found is None and daemon_alive(state_dir):
        raise AwsRefusedError(
            f"{state_dir}: an emulator runs here and doesn't answer; see {state_dir / LOG_FILE}, or end it and its "
            f"jobs: python -m trainyard.emulator stop --state-dir {state_dir}"
        )
    return found


def _written_info(state_dir: Path) -> EmulatorInfo | None:
    """What the daemon that holds the lock says of itself: one on its way up says nothing yet, one on its way down
    nothing more, and either is waited for. None when nobody holds it."""
    deadline = time.monotonic() + _START_SECONDS
    while daemon_alive(state_dir) and time.monotonic() < deadline:
        info = read_info(state_dir)
        if info is not None:
            return info
        time.sleep(0.05)
    return None


def daemon_alive(state_dir: Path) -> bool:
    """Whether a daemon holds the lock. A lock dies with its process: no pid can be mistaken for another's."""
    try:
        descriptor = os.open(state_dir / LOCK_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def hold_daemon_lock(state_dir: Path) -> int:
    """Take the daemon's lock for the life of this process; InputError when another daemon has it."""
    descriptor = os.open(state_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(
            f"{state_dir}: an emulator already runs here; stop it first or choose another state directory"
        ) from None
    return descriptor


def _spawn(state_dir: Path, port: int, idle_exit_seconds: float, training_argv: list[str] | None) -> EmulatorInfo:
    command = [sys.executable, "-m", "trainyard.emulator", "serve", "--port", str(port), "--state-dir", str(state_dir)]
    command += ["--idle-exit-seconds", str(idle_exit_seconds)]
    if training_argv is not None:
        command += ["--training-argv", json.dumps(training_argv)]
    log_path = state_dir / LOG_FILE
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            command,
            cwd=state_dir,
            env=_daemon_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the starter's Ctrl-C is not the daemon's
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            info = read_info(state_dir)
            if info is not None and info.pid == child.pid and find(state_dir) is not None:
                return replace(info, started_now=True)
            if child.poll() is not None:
                raise InputError(_last_line(log_path))
            time.sleep(0.05)
    except BaseException:
        # A starter that is interrupted here has no handle with which to stop it later.
        child.kill()
        child.wait()
        raise
    child.kill()
    child.wait()
    raise AwsRefusedError(f"the emulator did not answer within {_START_SECONDS:.0f} s; see {log_path}")


def _daemon_environment() -> dict[str, str]:
    # Not the caller's AWS_* variables: a stray profile or endpoint must not leak into the emulated account.
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {"LANG": "C.UTF-8", **kept, "PYTHONPATH": str(_CHECKOUT), "PYTHONUNBUFFERED": "1"}


def _last_line(log_path: Path) -> str:
    lines = [
        line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    # On a full disk it has nowhere to say so.
    is_full = shutil.disk_usage(log_path.parent).free < _FULL_BYTES
    nothing = f"the disk of {log_path.parent} is full; make room there" if is_full else "it said nothing"
    return f"the emulator did not start: {lines[-1] if lines else nothing} (see {log_path})"


def _require_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"port {port} on 127.0.0.1 can't be used ({error.strerror}); choose another or leave the port out"
            ) from None


def _wait_until_gone(state_dir: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not daemon_alive(state_dir):
            return True
        time.sleep(0.05)
    return False


def _clean_up_after_a_killed_daemon(state_dir: Path) -> None:
    kill_all(state_dir / "jobs")
    (state_dir / INFO_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def new_credentials() -> tuple[str, str]:
    """A root key for a new daemon: id in the form of a long-term AWS key, and its secret."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
    return "AKIA" + "".join(secrets.choice(alphabet) for _ in range(16)), secrets.token_urlsafe(30)
