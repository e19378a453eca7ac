"""What a job's logs and record have told so far: steps, losses, speed, the newest checkpoint."""

import math
import re
import statistics
from dataclasses import dataclass, field
from datetime import datetime

from trainyard.launch.backend import LogLine
from trainyard.launch.watch import Status

_STEP = re.compile(r"^step=(?P<step>\d+) loss=(?P<loss>\S+)(?:.* (?P<unit>tokens|images)_per_second=(?P<speed>\S+))?")
_STEP_SECONDS = re.compile(r" step_seconds=(\S+)")
_SAVED = re.compile(r"^checkpoint step=(?P<step>\d+) committed (?:.* at=(?P<at>\S+))?")
_RESTARTED = re.compile(
    r"^recovery restart=(?P<number>\d+) last_step=(?P<step>\d+) backoff_seconds=[^,\s]+"
    r"(?:,at=(?P<at>\S+))? reason=(?P<reason>.*)"
)
_WENT_ON = re.compile(r"^recovery restart=\d+ goes_on step=(?P<step>\d+)")
_NOT_SAVED = re.compile(r"^checkpoint step=(?P<step>\d+) not committed: (?P<reason>.*)")

RECENT_STEPS = 20
"""Whose median is the step's time now: enough that a validation or a save in between doesn't move it."""


@dataclass(frozen=True)
class Restart:
    """All ranks were started again where they are."""

    number: int
    """Since the hosts' start."""
    last_step: int
    """That was made before; 0: none of that start."""
    reason: str
    at: float | None
    """Seconds since the epoch; None where nobody says."""


@dataclass
class Seen:
    """What the logs and the record have told so far."""

    step: int = 0
    loss: str = ""
    speed: str = ""
    unit: str = "tokens"
    reclaims: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    """By step; those of steps that are made again are replaced."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the last steps."""
    saved_step: int | None = None
    """Of the newest committed checkpoint, and with the next when that was (epoch), where the log tells it."""
    saved_at: float | None = None
    save_failure: str = ""
    """Why the newest save came to nothing; empty once a later one was committed."""
    step_at: float | None = None
    """When `step` was made (epoch), where the log's keeper says."""
    restarts: list[Restart] = field(default_factory=list)
    """In place, each once, however many hosts tell of it."""
    is_restarting: bool = False
    """Whether the newest of them came to no step yet."""

    def read(self, line: LogLine) -> bool:
        """Take in one line; whether it was a step."""
        if (saved := _SAVED.match(line.text)) is not None:
            self.saved_step, self.saved_at = int(saved["step"]), _moment(saved["at"], line.at_ms)
            self.save_failure = ""
        elif (unsaved := _NOT_SAVED.match(line.text)) is not None:
            self.save_failure = f"step {int(unsaved['step']):,} was not committed: {unsaved['reason']}"
        match = _STEP.match(line.text)
        if match is None:
            self._read_recovery(line)
            return False
        self.is_restarting = False
        step = int(match["step"])
        if step <= self.step:
            self.losses = {known: loss for known, loss in self.losses.items() if known < step}
        self.step, self.step_at = step, None if line.at_ms is None else line.at_ms / 1000
        self.loss = match["loss"]
        self.speed = match["speed"] or ""
        self.unit = match["unit"] or self.unit
        if (loss := _number(self.loss)) is not None:
            self.losses[self.step] = loss
        if (found := _STEP_SECONDS.search(line.text)) and (seconds := _number(found[1])) is not None:
            self.step_seconds = [*self.step_seconds, seconds][-RECENT_STEPS:]
        return True

    def _read_recovery(self, line: LogLine) -> None:
        if _WENT_ON.match(line.text):
            self.is_restarting = False
        if (told := _RESTARTED.match(line.text)) is None:
            return
        restart = Restart(int(told["number"]), int(told["step"]), told["reason"], _moment(told["at"], line.at_ms))
        if not self.is_restarting or not self.restarts or self.restarts[-1].number != restart.number:
            self.restarts.append(restart)
        self.is_restarting = True

    def seconds_left(self, total: int | None) -> float | None:
        """Up to the last step at the pace of the last ones; None where one of both isn't known."""
        if not total or not self.step_seconds:
            return None
        return max(0, total - self.step) * statistics.median(self.step_seconds)

    def new_reclaim(self, current: Status) -> str:
        """What to say where spot capacity was taken since the last look, else ""; looking alone may miss it."""
        if current.record.attempt.reclaims <= self.reclaims:
            return ""
        self.reclaims = current.record.attempt.reclaims
        words = {"sagemaker": "spot capacity reclaimed", "slurm": "requeued"}
        why = words.get(current.record.backend, "started again")
        return f"{why}: the job comes back by itself, from its newest checkpoint"

    def __str__(self) -> str:
        speed = f"  {float(self.speed):,.0f} {self.unit}/s" if self.speed else ""
        return f"step {self.step}  loss {self.loss}{speed}" if self.step else ""


def _number(text: str) -> float | None:
    """None for what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _moment(told: str | None, at_ms: int | None) -> float | None:
    """Since the epoch: when the log's keeper got the line, else what the line says, by the clock of its machine."""
    if at_ms is not None:
        return at_ms / 1000
    try:
        return None if told is None else datetime.fromisoformat(told).timestamp()
    except ValueError:  # the end of a cut line
        return None
