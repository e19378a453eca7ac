"""Following a job: a live screen on a terminal, plain lines in a pipe or a log."""

import math
import re
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live

from trainyard.cli import live_view
from trainyard.cli.output import console
from trainyard.errors import InputError
from trainyard.launch import watch
from trainyard.launch.backend import LogLine
from trainyard.launch.place import Place
from trainyard.launch.watch import Status

_STEP = re.compile(r"^step=(?P<step>\d+) loss=(?P<loss>\S+)(?:.* (?P<unit>tokens|images)_per_second=(?P<speed>\S+))?")
_STEP_SECONDS = re.compile(r" step_seconds=(\S+)")
_SAVED = re.compile(r"^checkpoint step=(?P<step>\d+) committed ")
_NOTABLE = re.compile(r"^(checkpoint step=|resumed step=|validation step=)")


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
    """Of the newest committed checkpoint, and with the next when it was said (epoch)."""
    saved_at: float | None = None

    def read(self, line: LogLine) -> bool:
        """Take in one line; whether it was a step."""
        if (saved := _SAVED.match(line.text)) is not None:
            self.saved_step, self.saved_at = int(saved["step"]), line.at_ms / 1000
        match = _STEP.match(line.text)
        if match is None:
            return False
        step = int(match["step"])
        if step <= self.step:
            self.losses = {known: loss for known, loss in self.losses.items() if known < step}
        self.step = step
        self.loss = match["loss"]
        self.speed = match["speed"] or ""
        self.unit = match["unit"] or self.unit
        if (loss := _number(self.loss)) is not None:
            self.losses[self.step] = loss
        if (found := _STEP_SECONDS.search(line.text)) and (seconds := _number(found[1])) is not None:
            self.step_seconds = [*self.step_seconds, seconds][-live_view.RECENT_STEPS :]
        return True

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


def follow(place: Place, job_id: str, *, quiet: bool) -> Status:
    """Show the job's progress until it ends; its last status. `quiet` prints nothing (a program reads the JSON)."""
    out = console(stderr=True)
    last: Status | None = None
    shown = _Quiet() if quiet else _Live(out) if sys.stderr.isatty() else _Plain(out)
    with shown:
        for current, lines in watch.watch(place.store, place.backend, job_id, sleep=time.sleep):
            last = current
            shown.show(current, lines)
    if last is None or not last.finished:
        raise InputError(f"job {job_id}: {last.advice if last else 'has no record'}")
    return last


class _Quiet:
    def __enter__(self) -> "_Quiet":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, current: Status, lines: list[LogLine]) -> None:
        """Nothing."""


class _Plain(_Quiet):
    """For a pipe: a line per change of state with why it waits, per step and per checkpoint."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._state = ""
        self._seen = Seen()

    def show(self, current: Status, lines: list[LogLine]) -> None:
        """Print what is new."""
        if said := self._seen.new_reclaim(current):
            self._out.print(said, markup=False)
        for line in lines:
            if self._seen.read(line):
                self._out.print(str(self._seen), markup=False)
            elif _NOTABLE.match(line.text):
                self._out.print(line.text, markup=False)
        if current.state != self._state:
            self._state = current.state
            why = live_view.waits_for(current)
            self._out.print(f"{current.record.job_id}: {current.state}{f': {why}' if why else ''}", markup=False)


class _Live(_Quiet):
    """For a terminal: a screen that goes on turning and counting while AWS is silent."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._seen = Seen()
        self._current: Status | None = None
        self._lock = threading.Lock()
        self._live = Live(get_renderable=self._screen, console=out, refresh_per_second=4)

    def _screen(self) -> RenderableType:
        with self._lock:
            return live_view.view(self._current, self._seen) if self._current else ""

    def __enter__(self) -> "_Live":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, current: Status, lines: list[LogLine]) -> None:
        """Bring the screen up to date; notable lines scroll above it."""
        with self._lock:
            said = self._seen.new_reclaim(current)
            told = [line.text for line in lines if not self._seen.read(line) and _NOTABLE.match(line.text)]
            self._current = current
        if said:
            self._out.print(said, markup=False, style="yellow")
        for text in told:
            self._out.print(text, markup=False, style="dim")
        self._live.refresh()


def _number(text: str) -> float | None:
    """None for what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
