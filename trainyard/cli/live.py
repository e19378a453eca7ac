"""Following a job: a live screen on a terminal, plain lines in a pipe or a log."""

import re
import sys
import threading
import time

from rich.console import Console, RenderableType
from rich.live import Live

from trainyard.cli import live_view
from trainyard.cli.output import console
from trainyard.cli.seen import Seen
from trainyard.errors import InputError
from trainyard.launch import watch
from trainyard.launch.backend import LogCursor, LogLine
from trainyard.launch.place import Place
from trainyard.launch.watch import Status

_NOTABLE = re.compile(r"^(checkpoint step=|resumed step=|validation step=)")


def follow(place: Place, job_id: str, *, quiet: bool, options: str = "", from_now: bool = False) -> Status:
    """Show the job's progress until it ends; its last status. `quiet` prints nothing (a program reads the JSON).

    `options`: as of Status. `from_now`: lines that are there already are not shown again, be there a million.
    """
    out = console(stderr=True)
    last: Status | None = None
    shown = _Quiet() if quiet else _Live(out) if sys.stderr.isatty() else _Plain(out)
    with shown:
        cursor = LogCursor()
        for current, lines in watch.watch(
            place.store, place.backend, job_id, sleep=time.sleep, options=options, cursor=cursor
        ):
            last = current
            shown.show(current, lines, is_old=from_now)
            from_now = from_now and cursor.more
    if last is None or not last.finished:
        raise InputError(f"job {job_id}: {last.advice if last else 'has no record'}")
    return last


class _Quiet:
    def __enter__(self) -> "_Quiet":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, current: Status, lines: list[LogLine], *, is_old: bool) -> None:
        """Nothing."""


class _Plain(_Quiet):
    """For a pipe: a line per change of state with why it waits, per step and per checkpoint."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._state = ""
        self._seen = Seen()

    def show(self, current: Status, lines: list[LogLine], *, is_old: bool) -> None:
        """Print what is new."""
        if said := self._seen.new_reclaim(current):
            self._out.print(said, markup=False)
        for line in lines:
            is_step = self._seen.read(line)
            if is_old:
                continue
            if is_step:
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

    def show(self, current: Status, lines: list[LogLine], *, is_old: bool) -> None:
        """Bring the screen up to date; notable lines scroll above it."""
        with self._lock:
            said = self._seen.new_reclaim(current)
            told = [line.text for line in lines if not self._seen.read(line) and _NOTABLE.match(line.text)]
            told = [] if is_old else told
            self._current = current
        if said:
            self._out.print(said, markup=False, style="yellow")
        for text in told:
            self._out.print(text, markup=False, style="dim")
        self._live.refresh()
