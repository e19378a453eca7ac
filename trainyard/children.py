"""Commands that start others: ended together, whenever we are told to end."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def start(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    """The command in a session of its own, its text read leniently; `options`: more of Popen's.

    A Ctrl-C that comes while it is being started waits until it can be ended: else it would be nobody's.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_main else None
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True, **options
        )
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
    if came:
        end_group(process)
        raise KeyboardInterrupt
    return process


def output_of(process: "subprocess.Popen[str]", timeout_seconds: float | None = None) -> tuple[str, str]:
    """What a command that leads its own session wrote (stdout, stderr); on any exception here it is ended first."""
    try:
        return process.communicate(timeout=timeout_seconds)
    except BaseException:
        end_group(process)
        raise


def end_group(process: "subprocess.Popen[str]") -> None:
    """End a command that leads its own session, with all that it started: the CLI runs the app, which runs jsii."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    # The leader is gone; what it started was killed, but on a busy machine takes a moment to go.
    deadline = time.monotonic() + 30
    while _is_anyone_left(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_anyone_left(group: int) -> bool:
    """Whether a process of the group still runs; one that only waits to be reaped does not."""
    return any(_group_of(entry) == group for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _group_of(process: Path) -> int | None:
    try:
        stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it went meanwhile
        return None
    state, _, group, *_ = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(group)
