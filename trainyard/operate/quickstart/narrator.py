"""Says what is going on, all the time: nobody stares at a still screen, and every phase is timed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

HEARTBEAT_SECONDS = 10.0
"""Where there is no terminal to animate (CI, a log file): a line at least this often."""


@dataclass
class Narrator:
    """Prints phases as they run and keeps their seconds."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase to wall-clock seconds, in the order they ran."""

    @contextmanager
    def phase(self, key: str, title: str) -> Iterator["Phase"]:
        """A named phase: a spinner with its elapsed time while it runs, one line when it is done."""
        started = time.monotonic()
        phase = Phase(self.console, title)
        with phase.shown():
            yield phase
        self.seconds[key] = self.seconds.get(key, 0.0) + time.monotonic() - started
        summary = f": {phase.summary}" if phase.summary else ""
        seconds = (f" ({self.seconds[key]:.1f} s)", "dim")
        self.console.print(Text.assemble(("✓", "green"), f" {title}{summary}", seconds))


class Phase:
    """The running phase: `update` replaces its line, `note` leaves a line behind. What they are told is often the CDK's
    or the trainer's, so it is printed as it is, brackets too."""

    def __init__(self, console: Console, title: str) -> None:
        self.summary = ""
        """What was done, for the phase's closing line."""
        self._console = console
        self._title = title
        self._text = ""
        self._last_line = time.monotonic()
        self._progress: Progress | None = None

    def update(self, text: str) -> None:
        """Say what is going on now."""
        self._text = text
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=self._line())

    def note(self, text: str, style: str = "") -> None:
        """Leave a line on the screen."""
        self._last_line = time.monotonic()
        self._console.print(Text(f"  {text}", style=style))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Animate on a terminal; elsewhere print the title now and a heartbeat later."""
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as self._progress:
                self._progress.add_task(self._line(), total=None)
                yield
            return
        self._console.print(Text(f"… {self._title}"))
        done = threading.Event()
        heart = threading.Thread(target=self._beat, args=(done,), daemon=True)
        heart.start()
        try:
            yield
        finally:
            done.set()
            heart.join()

    def _line(self) -> str:
        return f"{self._title}: {self._text}" if self._text else self._title

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(1.0):
            if time.monotonic() - self._last_line >= HEARTBEAT_SECONDS:
                self.note(self._text or "working", style="dim")
