"""Runs a module as one rank under torchrun and writes down how it went, for the entrypoint to read.

    torchrun ... -m trainer.host.rank REPORTS_DIR MODULE [ARGUMENT ...]

torchrun tells neither which rank failed first with which words nor "saved, resume me" (exit code 75), which it would
take for a crash and print a traceback. Imports no torch: a broken one must end up in the report too.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from trainer import heartbeat
from trainer.early_save import note_early_saves
from trainer.leaving import leave
from trainyard.kept_room import FULL, keep_room, tell

RESUME_EXIT_CODE = 75
"""The trainer's word for "saved; resume me" (EX_TEMPFAIL of sysexits.h)."""

STOP_FILE = "stop"
"""In the reports' folder: the host was told to stop, so a rank that starts now need not begin."""

_TAIL_LINES = 60
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class RankReport:
    """How one rank went. Without an `exit_code` it is running, or died without a word (SIGKILL, out of memory)."""

    rank: int
    pid: int
    exit_code: int | None = None
    ended_at: float | None = None
    """Seconds since the epoch."""
    error: str = ""
    """The exception in one line; empty where the module ended by an exit code."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines that Python code wrote to stderr."""


def read_reports(folder: Path) -> dict[int, RankReport]:
    """The reports in a folder, by rank."""
    reports = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json"))
    return {report["rank"]: RankReport(**report) for report in reports}


def stacks_file(folder: Path, rank: int) -> Path:
    """Where a rank writes the stacks of all its threads at SIGUSR2, even while it waits inside a kernel."""
    return folder / f"stacks-{rank}.txt"


def write_report(folder: Path, report: RankReport) -> None:
    """Write or replace a rank's report; a reader sees the old or the new one, whole."""
    path = folder / f"rank-{report.rank}.json"
    tell(path, json.dumps(asdict(report)), _room(folder, report.rank))


def _room(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.room"


def _write_last_report(folder: Path, report: RankReport) -> None:
    """Without what the rank said, where a full disk has no more room. A report that stays as it was is a death."""
    for one in (report, replace(report, stderr_tail=tuple(line[:800] for line in report.stderr_tail[-1:]))):
        with contextlib.suppress(OSError):
            write_report(folder, one)
            return


class _TailedStream:
    """stderr that remembers its last lines. Everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: deque[str] = deque([""], maxlen=_TAIL_LINES)

    def write(self, text: str) -> int:
        first, *others = text.split("\n")
        self._lines[-1] += first
        self._lines.extend(others)
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return len(text)  # a log whose disk is full costs the words, not the rank

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(line for line in self._lines if line.strip())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(arguments: list[str]) -> int:
    """Run the module; the exit code for torchrun: 0 for "done" and "resume me", else the module's."""
    note_early_saves()  # before the report, by which the host knows whom to signal
    folder, module, *module_arguments = arguments
    rank = int(os.environ["RANK"])
    _die_with_parent()
    faulthandler.enable()
    stacks = stacks_file(Path(folder), rank).open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    os.environ[heartbeat.FILE_VARIABLE] = str(Path(folder) / f"heartbeat-{rank}")
    stderr = _TailedStream(sys.stderr)
    sys.stderr = stderr
    exit_code, error = _run(Path(folder), rank, module, module_arguments)
    report = RankReport(rank, os.getpid(), exit_code, time.time(), error, stderr.tail)
    _write_last_report(Path(folder), report)
    return 0 if exit_code == RESUME_EXIT_CODE else exit_code


def _run(folder: Path, rank: int, module: str, arguments: list[str]) -> tuple[int, str]:
    """The module's exit code, and its exception in one line."""
    sys.argv = [module, *arguments]
    try:
        # Until the trainer listens for itself: a stop before its first step loses nothing.
        signal.signal(signal.SIGTERM, _nothing_to_save)
        # First the report, then the look: the entrypoint does the reverse, so a stop is never missed by both.
        write_report(folder, RankReport(rank, os.getpid()))
        keep_room(_room(folder, rank))
        if (folder / STOP_FILE).exists():
            _nothing_to_save(signal.SIGTERM, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0, ""
        print(end.code, file=sys.stderr)
        return 1, str(end.code)
    except BaseException as error:
        # In one piece: the ranks of a host share one log, and print_exc() writes by the word.
        sys.stderr.write(traceback.format_exc())
        _ERRORS.append(error)
        return 1, _one_line(error)
    return 0, ""


_ERRORS: list[BaseException] = []
"""Kept until the process leaves. With its frames a process group would go, whose destructor waits for collectives: a
checkpoint's, behind the steps, may hang with a lost peer. The rank stood there, its end untold (torch 2.13, gloo)."""


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:800]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _nothing_to_save(_: int, __: FrameType | None) -> NoReturn:
    print("told to stop before the first step: nothing new to save", file=sys.stderr)
    raise SystemExit(RESUME_EXIT_CODE)


def _die_with_parent() -> None:
    """A rank must not outlive its torchrun: it would hold the GPU, and write to a job that moved on (Linux only)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
