"""Watches one start of this host's ranks: steps by their heartbeats, stand-stills; takes their stacks. No torch.

A rank hangs when its heartbeat has not changed for `hang_seconds` and for ten times the median step. Before the first
step of a start the newest beat of all ranks here counts, since one that has read its part of a checkpoint waits for the
others: it may be `start_minutes` old in the job's first start, and as old as three such starts in later ones. A rank
that says so (it compiles what a validation runs) has `start_minutes` too. A process that is stopped (SIGSTOP, frozen)
for `hang_seconds` hangs whatever it is at.
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
_STARTS_OF_A_HANG = 3
_LEAST_START_SECONDS = 60.0
"""A start is all imports and caches: on a busy machine 62 s were measured for what takes 10 s (docs/recovery.md)."""
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

    def __init__(
        self,
        folder: Path,
        ranks: range,
        spec: RecoverySpec,
        *,
        known_start_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: where the ranks' heartbeats lie, as `heartbeat_file` names them.

        `known_start_seconds`: the longest that a start before this one took to its first step; None: there was none.
        """
        self._folder = folder
        self._spec = spec
        self._known_start_seconds = known_start_seconds
        self._clock = clock
        self._stopped_since: dict[int, float] = {}
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
        if not self._step_seconds:  # the second step may be as slow as the first
            return max(self._spec.hang_seconds, self.first_step_seconds or 0.0)
        return max(self._spec.hang_seconds, _STEPS_OF_A_HANG * median(self._step_seconds))

    @property
    def start_limit_seconds(self) -> float:
        """How long all ranks may be silent before the first step of this start."""
        longest = 60 * self._spec.start_minutes
        if self._known_start_seconds is None or self._spec.hang_seconds is None:
            return longest
        known = _STARTS_OF_A_HANG * self._known_start_seconds
        return min(longest, max(self._spec.hang_seconds, known, _LEAST_START_SECONDS))

    def hanging(self, reports: Mapping[int, RankReport]) -> dict[int, float]:
        """Ranks that are silent for too long, with their seconds of silence; those that have ended don't count."""
        silent = self.silent_seconds(reports)
        stopped = self._stopped_for_too_long(reports)
        if stopped:
            return {rank: seconds for rank, seconds in silent.items() if rank in stopped}
        if not self.last_step:
            return silent if self.quiet_seconds > self.start_limit_seconds else {}
        # Who is still at its first step has been waited for since another one's was done, not since the start.
        since_first = self._clock() - self._started - (self.first_step_seconds or 0.0)
        silent = {rank: min(seconds, since_first) for rank, seconds in silent.items()}
        limit = self.limit_seconds
        if limit is None:
            return {}
        # Three starts may be too few: what is compiled now may be no part of a start.
        patient = {rank: max(limit, 60 * self._spec.start_minutes) for rank in silent if self._is_patient(rank)}
        return {rank: seconds for rank, seconds in silent.items() if seconds > patient.get(rank, limit)}

    def _is_patient(self, rank: int) -> bool:
        beat = self._seen[rank].beat
        return beat is not None and beat.is_patient

    def _stopped_for_too_long(self, reports: Mapping[int, RankReport]) -> set[int]:
        """Ranks whose processes have been stopped at every look for `hang_seconds`."""
        now, limit = self._clock(), self._spec.hang_seconds
        stopped = {rank for rank, report in reports.items() if report.exit_code is None and is_stopped(report.pid)}
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        return {rank for rank, since in self._stopped_since.items() if limit is not None and now - since > limit}

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
