"""Watches one start of this host's ranks: steps by their heartbeats, stand-stills; takes their stacks. No torch.

A rank hangs when its heartbeat has not changed for `hang_seconds` and for ten times the median step; before its first
step, when the start takes longer than `start_minutes`.
"""

import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainer.heartbeat import Beat, read_beat
from trainer.host.rank import RankReport, stacks_file
from trainyard.spec.job import RecoverySpec

_STEPS_OF_A_HANG = 10
_STEPS_REMEMBERED = 50
_DUMP_SECONDS = 5.0
"""faulthandler writes within milliseconds, where the process gets to run at all."""
_ENDS_OF_MAIN_THREAD = ("in _run_module_as_main\n", "in <module>\n", "\n  ...\n")
"""The last line of a rank's stacks, whose main thread comes last: its outermost frame, or the cut after 100 of them."""
_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass
class _Seen:
    """A rank's newest beat, and when this host saw it change."""

    beat: Beat | None
    at: float


class StepWatch:
    """What the heartbeats of this host's ranks say."""

    def __init__(self, folder: Path, ranks: range, spec: RecoverySpec, clock: Callable[[], float] = time.monotonic):
        """`folder`: where the ranks' heartbeats lie, as `heartbeat_file` names them."""
        self._folder = folder
        self._spec = spec
        self._clock = clock
        self._started = clock()
        self._seen = {rank: _Seen(None, self._started) for rank in ranks}
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._last_step_at: float | None = None
        self.first_step_seconds: float | None = None
        """From the start of the ranks to their first finished step; None before it."""
        self.last_step = 0
        """The last step that any rank finished in this start; 0: none."""

    def look(self) -> None:
        """Read every rank's heartbeat."""
        now = self._clock()
        for rank, seen in self._seen.items():
            beat = read_beat(heartbeat_file(self._folder, rank))
            if beat is not None and beat != seen.beat:
                self._seen[rank] = _Seen(beat, now)
                if beat.step > self.last_step:
                    self._note_step(beat.step, now)

    def _note_step(self, step: int, now: float) -> None:
        if self._last_step_at is None:
            self.first_step_seconds = now - self._started
        else:
            self._step_seconds.append((now - self._last_step_at) / (step - self.last_step))
        self.last_step, self._last_step_at = step, now

    @property
    def limit_seconds(self) -> float | None:
        """How long a rank may be silent once it has finished a step; None: for ever."""
        if self._spec.hang_seconds is None:
            return None
        return max(self._spec.hang_seconds, _STEPS_OF_A_HANG * median(self._step_seconds or [0.0]))

    def hanging(self, reports: Mapping[int, RankReport]) -> dict[int, float]:
        """Ranks that are silent for too long, with their seconds of silence; those that have ended don't count."""
        limit = self.limit_seconds
        silent = self.silent_seconds(reports)
        allowed = {rank: 60 * self._spec.start_minutes if self._seen[rank].beat is None else limit for rank in silent}
        return {
            rank: seconds for rank, seconds in silent.items() if (most := allowed[rank]) is not None and seconds > most
        }

    def silent_seconds(self, reports: Mapping[int, RankReport]) -> dict[int, float]:
        """Seconds since the last beat of every rank that has not ended."""
        now = self._clock()
        ended = {rank for rank, report in reports.items() if report.exit_code is not None}
        return {rank: now - seen.at for rank, seen in self._seen.items() if rank not in ended}

    @property
    def quiet_seconds(self) -> float:
        """Since the last beat of any rank, or since the start."""
        return self._clock() - max(seen.at for seen in self._seen.values())

    def step_of(self, rank: int) -> int:
        """The last step that a rank finished in this start."""
        beat = self._seen[rank].beat
        return beat.step if beat else 0


def heartbeat_file(folder: Path, rank: int) -> Path:
    """A rank's heartbeat among the reports."""
    return folder / f"heartbeat-{rank}"


def take_stacks(folder: Path, reports: Mapping[int, RankReport]) -> dict[int, str]:
    """Every living rank's stacks, by faulthandler: text by rank, "" where the process could not answer.

    A stopped process (SIGSTOP, a debugger) answers only when it runs. So it is continued, after the others are stopped:
    nobody may train on. The caller kills them all.
    """
    asked = {rank: report.pid for rank, report in reports.items() if report.exit_code is None}
    for pid in asked.values():
        _send(pid, signal.SIGUSR2)
    _wait_for_stacks(folder, [rank for rank, pid in asked.items() if not is_stopped(pid)])
    silent = [rank for rank in asked if not _size(stacks_file(folder, rank))]
    for rank, pid in asked.items():
        _send(pid, signal.SIGCONT if rank in silent else signal.SIGSTOP)
    _wait_for_stacks(folder, silent)
    for rank in silent:  # with another host's ranks it would train on
        _send(asked[rank], signal.SIGSTOP)
    return {rank: _text(stacks_file(folder, rank)) for rank in asked}


def _wait_for_stacks(folder: Path, ranks: Iterable[int]) -> None:
    deadline = time.monotonic() + _DUMP_SECONDS
    while time.monotonic() < deadline and not all(_is_whole(_text(stacks_file(folder, rank))) for rank in ranks):
        time.sleep(0.002)


def _is_whole(stacks: str) -> bool:
    """Whether all threads are there: faulthandler writes line by line, the main thread's outermost frame last."""
    return stacks.endswith(_ENDS_OF_MAIN_THREAD)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def innermost(stacks: str) -> str:
    """Where the main thread stands: `name (file:line)`, its innermost frame outside of torch; "" where unknown.

    faulthandler writes the newest call first, and the main thread last.
    """
    frames: list[re.Match[str]] = []
    for line in stacks.splitlines():
        if "(most recent call first)" in line:
            frames = []
        elif match := _FRAME.match(line):
            frames.append(match)
    own = [frame for frame in frames if "/torch/" not in frame["path"]]
    if not own:
        return ""
    called = frames[0]["name"] if frames[0] is not own[0] else ""
    frame = own[0]
    place = f"{frame['name']} ({Path(frame['path']).name}:{frame['line']})"
    return f"{called} of {place}" if called else place


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
