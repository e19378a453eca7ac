"""Following a job: one live line on a terminal, plain lines in a pipe or a log."""

import re
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trainyard.cli.output import console
from trainyard.errors import InputError
from trainyard.launch import watch
from trainyard.launch.backend import LogLine
from trainyard.launch.place import Place
from trainyard.launch.watch import Status

_STEP = re.compile(r"^step=(?P<step>\d+) loss=(?P<loss>\S+)(?:.* (?P<unit>tokens|images)_per_second=(?P<speed>\S+))?")
_NOTABLE = re.compile(r"^(checkpoint step=|resumed step=|validation step=)")


@dataclass
class Seen:
    """What the logs and the record have told so far."""

    step: int = 0
    loss: str = ""
    speed: str = ""
    unit: str = "tokens"
    reclaims: int = 0

    def read(self, line: LogLine) -> bool:
        """Take in one line; whether it was a step."""
        match = _STEP.match(line.text)
        if match is None:
            return False
        self.step = int(match["step"])
        self.loss = match["loss"]
        self.speed = match["speed"] or ""
        self.unit = match["unit"] or self.unit
        return True

    def new_reclaim(self, current: Status) -> str:
        """What to say where spot capacity was taken since the last look, else ""; looking alone may miss it."""
        if current.record.attempt.reclaims <= self.reclaims:
            return ""
        self.reclaims = current.record.attempt.reclaims
        return "spot capacity reclaimed: the job comes back by itself, from its newest checkpoint"

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
    """For a pipe: a line per change of state, per step and per checkpoint."""

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
            self._out.print(f"{current.record.job_id}: {current.state}", markup=False)


class _Live(_Quiet):
    """For a terminal: a spinner that turns while AWS is silent, the state, and a bar over the steps."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._seen = Seen()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[state]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[seen]}"),
            TimeElapsedColumn(),
            console=out,
            transient=True,
        )
        self._task = self._progress.add_task("job", total=None, state="", seen="")

    def __enter__(self) -> "_Live":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, current: Status, lines: list[LogLine]) -> None:
        """Move the bar; notable lines scroll above it."""
        if said := self._seen.new_reclaim(current):
            self._out.print(said, markup=False, style="yellow")
        for line in lines:
            if not self._seen.read(line) and _NOTABLE.match(line.text):
                self._out.print(line.text, markup=False, style="dim")
        self._progress.update(
            self._task,
            total=current.record.resolved.steps,
            completed=self._seen.step,
            state=current.state,
            seen=str(self._seen),
        )
