"""Whether ranks that failed are started again: a budget, a backoff, and an eye for what can't get better. No torch."""

import contextlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.host.rank import RESUME_EXIT_CODE
from trainer.host.standings import Standing, mismatch
from trainer.speech import say
from trainyard.spec.job import RecoverySpec
from trainyard.spec.words import counted, either

LONGEST_BACKOFF_SECONDS = 300.0
_MOST_DOUBLINGS = 64
"""A month's job may be started again more often than a power of two has room in a number."""

_REPEATS_OF_WORDS = 2
"""The same error at the same step, again after a restart from a checkpoint: the program does that, not the machine."""
_REPEATS_OF_STEP = 3
"""The same step, whatever was said or not said (out of memory kills without a word)."""
_WRONG_INPUT = 2
RECOVERY_FILE = "recovery.jsonl"
"""In the trainer's output folder, and beside the checkpoints: a row a restart in place."""
GOODPUT_FILE = "goodput.jsonl"
"""In the trainer's output folder: what each of its starts took."""
_PARTS = ("process", "rendezvous", "build", "load")


@dataclass(frozen=True)
class Ending:
    """How a host's share of the job, or all of it, ended."""

    exit_code: int
    reason: str
    """One line; empty when done."""
    details: tuple[str, ...] = ()
    """The end of what the failing rank, or torchrun, said."""
    step: int = 0
    """Last step that a rank of this start finished; 0: none."""
    has_spoken: bool = False
    """The reason is an error that a rank raised itself, not a death or a stand-still."""
    is_consequence: bool = False
    """Another host's rank was lost first, as far as this host can tell."""
    is_hang: bool = False
    """A rank stood still, so the other hosts look at their stacks too before theirs are killed."""
    was_told_to_stop: bool = False
    """A signal asked for the end, so nothing is started again."""
    standings: dict[str, Standing] = field(default_factory=dict)
    """Where ranks stood in their collectives when they hung, by rank."""

    @property
    def is_failure(self) -> bool:
        """Neither done nor saved."""
        return self.exit_code not in (0, RESUME_EXIT_CODE)

    @property
    def outweighs_a_lost_host(self) -> bool:
        """Whether it stays what this host says when another one is lost: done, steps saved, or a failure of its own.

        Who was told to stop before a step has saved nothing; SageMaker tells all hosts to when it has lost one, and a
        resumer looks for that loss.
        """
        if self.is_failure:
            return not self.is_consequence
        return self.exit_code == 0 or self.step > 0


@dataclass(frozen=True)
class Restart:
    """Start all ranks again."""

    delay_seconds: float
    number: int
    """Restarts so far, this one included."""
    failure: Ending
    """Of all hosts together: why."""


class RestartPolicy:
    """Judges one failure after the other."""

    def __init__(self, spec: RecoverySpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._restarted_at: deque[float] = deque()
        self._num_restarts = 0
        self._in_a_row: list[Ending] = []
        """Failures at one and the same step."""
        self._furthest_step = 0
        self._num_in_vain = 0
        """Restarts since then that came no further."""

    def judge(self, failure: Ending) -> Restart | Ending:
        """A restart, or the job's ending with the reason why there is none."""
        assert failure.is_failure
        if failure.exit_code == _WRONG_INPUT or self._spec.max_restarts == 0:
            return failure
        if self._in_a_row and self._in_a_row[-1].step != failure.step:
            self._in_a_row.clear()
        self._in_a_row.append(failure)
        diagnosis = self._crash_loop()
        if diagnosis:
            return _with_words(failure, diagnosis)
        self._note_progress(failure)
        now = self._clock()
        if spent := self._spent(now):
            return _with_words(failure, f"{spent} (recovery.max_restarts)")
        doubled = self._spec.backoff_seconds * 2.0 ** min(len(self._restarted_at), _MOST_DOUBLINGS)
        delay = min(doubled, LONGEST_BACKOFF_SECONDS)
        self._restarted_at.append(now)
        self._num_restarts += 1
        return Restart(delay, self._num_restarts, failure)

    def _note_progress(self, failure: Ending) -> None:
        if failure.step > self._furthest_step or not self._restarted_at:
            self._furthest_step, self._num_in_vain = max(failure.step, self._furthest_step), 0
        else:
            self._num_in_vain += 1

    def _spent(self, now: float) -> str:
        """Why there is no restart left, in words; empty while there is.

        Time gives back what a long job lost now and then, and not what came no further: a job that fails somewhere
        before its next checkpoint, each time elsewhere and after more than the window's share, would go on for ever.
        """
        window, made = 60 * self._spec.window_minutes, self._restarted_at
        in_window = sum(now - at <= window for at in made)
        while len(made) > max(in_window, self._num_in_vain):
            made.popleft()
        if len(made) < self._spec.max_restarts:
            return ""
        if in_window >= self._spec.max_restarts:
            return (
                f"{counted(in_window, 'restart')} within {counted(self._spec.window_minutes, 'minute')} "
                f"{either(in_window, 'is', 'are')} spent"
            )
        count, spent = len(made), either(len(made), "is", "are")
        return (
            f"{counted(count, 'restart')} in a row came no further than step {self._furthest_step}, and {spent} spent"
        )

    def _crash_loop(self) -> str:
        last = self._in_a_row[-1]
        # Not "at step 3" after step 2: a step's loss is judged once it is made, so that the reason may name step 2.
        where = f"after step {last.step}" if last.step else "before the first step is made"
        same = 0
        for earlier in reversed(self._in_a_row):
            if not earlier.has_spoken or _without_numbers(earlier.reason) != _without_numbers(last.reason):
                break
            same += 1
        # A resume keeps `training`: where that is at fault (a rate too high), only another job has another one.
        advice = (
            "so another restart can't help: mend it, then `trainyard resume`; other settings of training need a launch"
        )
        if same >= _REPEATS_OF_WORDS:
            return f"{_times(same)} in a row {where} with the same error, {advice}"
        if len(self._in_a_row) >= _REPEATS_OF_STEP:
            return f"{_times(len(self._in_a_row))} in a row {where}, {advice}"
        return ""


def cause(endings: dict[str, Ending]) -> Ending:
    """The ending of all hosts together, by host: a failure where there is one, and of those the one that was first."""
    failures = [ending for ending in endings.values() if ending.is_failure]
    if failures:
        first = min(failures, key=lambda ending: (ending.is_consequence, ending.has_spoken, ending.step))
        first = replace(first, step=max(ending.step for ending in endings.values()), standings={})
        return _with_words(first, _who_waits_for_whom(endings.values())) if first.is_hang else first
    return next((ending for ending in endings.values() if ending.exit_code), next(iter(endings.values())))


def _who_waits_for_whom(endings: Iterable[Ending]) -> str:
    """The collective that ranks wait in and who is missing there, over all hosts; empty where that can't be told."""
    found = mismatch({int(rank): one for ending in endings for rank, one in ending.standings.items()})
    return found.words if found else ""


def _with_words(failure: Ending, words: str) -> Ending:
    return replace(failure, reason=f"{failure.reason}; {words}") if words else failure


def _without_numbers(text: str) -> str:
    """Ranks, ports and addresses differ from one time to the next."""
    return re.sub(r"(0x[0-9a-f]+|\d+)", "#", text)


def _times(count: int) -> str:
    return {2: "twice", 3: "three times"}.get(count, f"{count} times")


class RecoveryLog:
    """What the first host tells of restarts: a line each on stdout, a row each in recovery.jsonl.

    A row has the parts of the time to the next step: detection (before it was noticed), then stop, backoff, schedule,
    process, rendezvous, build, load and first_step, which add up to seconds_to_next_step. A restart that failed before
    any step has a row that ends with its backoff; the next one's `earlier_seconds` is the time since the first of them
    failed, and a part of its seconds_to_next_step.
    """

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        self._path = folder / RECOVERY_FILE
        self._is_first = is_first
        self._open: dict[str, Any] | None = None
        self._failed_at = 0.0
        self._first_failed_at = 0.0
        """Of the failures without a step between them."""

    def failed(self, restart: Restart, *, noticed_at: float | None = None, quiet_seconds: float = 0.0) -> None:
        """The ranks failed, and are started again.

        `noticed_at` (monotonic): when this host found out; `quiet_seconds`: how long no rank had beaten by then.
        """
        ending = restart.failure
        now = time.monotonic()
        is_another = self._open is not None
        self.ended()
        self._failed_at = now if noticed_at is None else noticed_at
        if not is_another:
            self._first_failed_at = self._failed_at
        self._open = {
            "restart": restart.number,
            "at": time.time(),
            "last_step": ending.step,
            "reason": ending.reason,
            # No longer than this: a rank may have lived on for a while after its last beat.
            "detection_seconds": quiet_seconds,
            "stop_seconds": now - self._failed_at,
            "backoff_seconds": restart.delay_seconds,
        }
        if is_another:
            self._open["earlier_seconds"] = self._failed_at - self._first_failed_at
        self._say(
            f"recovery restart={restart.number} last_step={ending.step} backoff_seconds={restart.delay_seconds:g}"
            # One word with what is before it: commands of before it was said expect one there.
            f",at={datetime.now(UTC).isoformat(timespec='seconds')} reason={ending.reason}"
        )

    def progress(self, last_step: int) -> None:
        """The newest finished step of the ranks that run now: the first one closes the row."""
        if self._open is None or last_step == 0:
            return
        waited = time.monotonic() - self._failed_at
        row = {**self._open, **self._parts(waited)}
        row["seconds_to_next_step"] = waited + row.get("earlier_seconds", 0.0)
        self._open = None
        self._say(
            f"recovery restart={row['restart']} goes_on step={last_step}"
            f" seconds_to_next_step={row['seconds_to_next_step']:.1f}"
        )
        self._write(row)

    def ended(self) -> None:
        """The ranks that were started again ended without a step, or the job did: the row stays without its end."""
        if self._open is not None:
            self._write(self._open)
        self._open = None

    def _say(self, line: str) -> None:
        # One restart is told once: logs come host by host, and a line of another host would be another restart.
        if self._is_first:
            say(line)

    def _write(self, row: dict[str, Any]) -> None:
        if self._is_first:
            # A full disk costs the row, not the job.
            with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _parts(self, waited: float) -> dict[str, float]:
        """What the start took, as the trainer's first rank tells it (trainer.observe.goodput); nothing where it can't.

        schedule: from the pause's end to the ranks' processes; first_step: what is left.
        """
        assert self._open is not None
        try:
            lines = (self._path.parent / GOODPUT_FILE).read_text(encoding="utf-8").splitlines()
            start = next(row["start"] for line in reversed(lines) if "start" in (row := row_of(line)))
            if start["at"] < self._open["at"]:
                return {}
            parts = {f"{name}_seconds": float(start[f"{name}_seconds"]) for name in _PARTS}
        except (OSError, StopIteration, KeyError, TypeError, ValueError):
            return {}
        known = self._open["stop_seconds"] + self._open["backoff_seconds"]
        begun = max(0.0, start["at"] - self._open["at"] - self._open["backoff_seconds"])
        left = waited - known - begun - sum(parts.values())
        return {"schedule_seconds": begun, **parts, "first_step_seconds": max(0.0, left)}


def row_of(line: str) -> dict[str, Any]:
    """A row of a file of them; empty where a killed process left half of one."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
