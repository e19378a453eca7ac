"""Following a job: a live screen on a terminal, plain lines in a pipe or a log."""

import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.live import Live

from trainyard.cli import live_view
from trainyard.cli.output import console
from trainyard.cli.seen import Seen
from trainyard.errors import InputError, TrainyardError
from trainyard.launch import watch
from trainyard.launch.backend import LogCursor, LogLine
from trainyard.launch.place import Place
from trainyard.launch.record import JobRecord
from trainyard.launch.watch import Status

_NOTABLE = re.compile(r"^(checkpoint step=|resumed step=|validation step=|recovery restart=|anomaly step=|warning: )")


class _Notable:
    """What of a log is told beside its steps: between two of these each once, however many hosts say it; a warning
    once at all, as hosts come to theirs at different steps, and none that was `warned` of before."""

    def __init__(self, seen: Seen, warned: Collection[str]) -> None:
        self._seen = seen
        self._told: set[str] = set()
        self._warned = set(warned)

    def of(self, lines: Sequence[LogLine]) -> Iterator[tuple[LogLine, bool]]:
        """Of new lines those to be told, and whether each is a step; all of them are taken in."""
        for line in lines:
            if is_step := self._seen.read(line):
                self._told.clear()
            told = self._warned if line.text.startswith("warning: ") else self._told
            if is_step or (_NOTABLE.match(line.text) and line.text not in told):
                told.add(line.text)
                yield line, is_step


@dataclass(frozen=True)
class Before:
    """What a job's logs have told up to now, so far as it is wanted: where they end, and their newest lines."""

    cursor: LogCursor
    lines: list[LogLine]


def before_now(place: Place, record: JobRecord) -> Before | None:
    """To be asked before an attempt begins: what comes after is its own, however fast it is. None where the logs give
    no answer."""
    cursor = LogCursor(from_end=True)
    lines: list[LogLine] = []
    try:
        while True:
            lines += place.backend.read_logs(record, cursor)
            if not cursor.more:
                # Logs that begin after now are read from their beginning.
                return Before(replace(cursor, from_end=False), lines)
    except (TrainyardError, OSError):
        return None


def follow(
    place: Place,
    job_id: str,
    *,
    quiet: bool,
    options: str = "",
    before: Before | None = None,
    warned: Collection[str] = (),
) -> Status:
    """Show the job's progress until it ends; its last status. `quiet` prints nothing (a program reads the JSON).

    `options`: as of Status. `before`: what is not shown again, be it a million lines. `warned`: what this command has
    warned of already, as the job's first rank does too.
    """
    out = console(stderr=True)
    last: Status | None = None
    shown = _Quiet() if quiet else _Live(out, warned) if sys.stderr.isatty() else _Plain(out, warned)
    with shown:
        shown.recall(before.lines if before else [])
        cursor = before.cursor if before else LogCursor()
        for current, lines in watch.watch(
            place.store, place.backend, job_id, sleep=time.sleep, options=options, cursor=cursor
        ):
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

    def recall(self, lines: list[LogLine]) -> None:
        """Take in what was told before, and show none of it."""

    def show(self, current: Status, lines: list[LogLine]) -> None:
        """Nothing."""


class _Plain(_Quiet):
    """For a pipe: a line per change of state with why it waits, per step and per checkpoint."""

    def __init__(self, out: Console, warned: Collection[str]) -> None:
        self._out = out
        self._state = ""
        self._seen = Seen()
        self._notable = _Notable(self._seen, warned)

    def recall(self, lines: list[LogLine]) -> None:
        """See _Quiet."""
        for line in lines:
            self._seen.read(line)

    def show(self, current: Status, lines: list[LogLine]) -> None:
        """Print what is new."""
        if said := self._seen.new_reclaim(current):
            self._out.print(said, markup=False)
        for line, is_step in self._notable.of(lines):
            self._out.print(str(self._seen) if is_step else line.text, markup=False)
        if current.state != self._state:
            self._state = current.state
            why = live_view.waits_for(current)
            self._out.print(f"{current.record.job_id}: {current.state}{f': {why}' if why else ''}", markup=False)


class _Live(_Quiet):
    """For a terminal: a screen that goes on turning and counting while AWS is silent."""

    def __init__(self, out: Console, warned: Collection[str]) -> None:
        self._out = out
        self._seen = Seen()
        self._notable = _Notable(self._seen, warned)
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

    def recall(self, lines: list[LogLine]) -> None:
        """See _Quiet."""
        with self._lock:
            for line in lines:
                self._seen.read(line)

    def show(self, current: Status, lines: list[LogLine]) -> None:
        """Bring the screen up to date; notable lines scroll above it."""
        with self._lock:
            said = self._seen.new_reclaim(current)
            told = [line.text for line, is_step in self._notable.of(lines) if not is_step]
            self._current = current
        if said:
            self._out.print(said, markup=False, style="yellow")
        for text in told:
            self._out.print(text, markup=False, style="dim")
        self._live.refresh()
