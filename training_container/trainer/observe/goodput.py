"""Where a job's time went, told by itself: goodput.jsonl, beside the checkpoints too. `trainyard status` reads it.

Useful time is that of steps that the job kept, without the saves in them. What a start took is split by who waits for
whom: the processes, the rendezvous, data and model, the checkpoint, the first step. Steps that were made again are
lost; those of a machine that took its metrics along are in nobody's account, and so in what the reader calls `other`.

Rows, each with one key, only ever appended (a save takes the file along while training goes on):
- `start`: attempt, at (epoch), resumed_step, lost_steps, lost_seconds, {process,rendezvous,build,load}_seconds;
  submission and gone_since (epoch), both of `trainer.observe.away`, null where they aren't known;
- `first_step`: attempt, seconds from the end of the load;
- `lost`: attempt, steps, seconds: undone by a roll back;
- `totals`: steps, useful_seconds, save_seconds of the steps that were kept, at (epoch); the last row counts;
- `ended`: attempt, status: of a start that was not killed.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.observe.away import UNKNOWN, Launch, gone_since
from trainer.observe.metrics import append_all

GOODPUT_FILE = "goodput.jsonl"


class GoodputLog:
    """The first rank's account."""

    def __init__(self, output_dir: Path, *, launch: Launch = UNKNOWN) -> None:
        """`launch`: of what submission this start is."""
        self.path = output_dir / GOODPUT_FILE
        self._launch = launch
        self._attempt = 0
        self._loaded_at: float | None = None
        self._totals = {"steps": 0, "useful_seconds": 0.0, "save_seconds": 0.0}
        self._first_start = time.time()
        self._before_load_seconds = 0.0
        self._began_at = self._first_start
        self._gone_since: float | None = None
        self._is_launch = False
        self.told_once: dict[str, float] = {}
        """What a start has taken, by its meters' names; empty but after its very first step."""

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        attempt: int,
        resumed_step: int,
        seconds: dict[str, float],
        written_at: float | None = None,
    ) -> None:
        """A start goes on from `resumed_step`; `rows`: metrics.jsonl as the start before left it.

        `seconds`: process, rendezvous, build and load, each from its own beginning to its end. `written_at`: when that
        file was last written here (epoch), None where it wasn't here.
        """
        self._attempt, self._loaded_at = attempt, time.monotonic()
        self._began_at = time.time() - sum(seconds.values())
        before = _rows_of(self.path)
        self._gone_since = gone_since(before, launch=self._launch, written_at=written_at)
        # Without an account of the starts before nobody knows whether one of them made a step.
        is_known = attempt == 1 or any("start" in row for row in before)
        self._is_launch = is_known and not any("first_step" in row for row in before)
        num_steps, lost_seconds = self._keep(rows, resumed_step)
        start = {
            "attempt": attempt,
            "at": self._began_at,
            "submission": self._launch.attempt,
            "gone_since": self._gone_since,
            "resumed_step": resumed_step,
            "lost_steps": num_steps,
            "lost_seconds": lost_seconds,
            **{f"{name}_seconds": value for name, value in seconds.items()},
        }
        self._append("start", start)
        self._first_start = _first_start_of(self.path) or self._began_at
        self._before_load_seconds = sum(seconds.values())

    def share(self) -> float:
        """Useful seconds over those since the job's first start, 0 to 1; a queue before that start is not in it."""
        return self._totals["useful_seconds"] / max(time.time() - self._first_start, 1e-9)

    def _keep(self, rows: Sequence[dict[str, Any]], last_step: int) -> tuple[int, float]:
        """Counts the rows up to a step; the number and seconds of the others."""
        self._totals = {"steps": 0, "useful_seconds": 0.0, "save_seconds": 0.0}
        lost = [float(row["step_seconds"]) for row in rows if row["step"] > last_step]
        for row in rows:
            if row["step"] <= last_step:
                self._add(row)
        return len(lost), sum(lost)

    def step(self, row: dict[str, Any]) -> None:
        """A step was finished and written down."""
        self._add(row)
        self.told_once = {}
        if self._loaded_at is not None:
            seconds = time.monotonic() - self._loaded_at
            self._append("first_step", {"attempt": self._attempt, "seconds": seconds})
            self.told_once = self._waited_for(self._before_load_seconds + seconds)
            self._loaded_at = None

    def _waited_for(self, start_seconds: float) -> dict[str, float]:
        """How long the start has taken, and for how long the job was waited for; clocks of two machines may differ by
        seconds, and nothing took less than no time."""
        found = {"start_seconds": start_seconds}
        ended_at = self._began_at + start_seconds
        # Told at the first step, however many starts it took: the launches whose first start fails are the bad ones.
        if self._is_launch and self._launch.is_asked_once and self._launch.at is not None:
            found["queue_seconds"] = max(0.0, self._first_start - self._launch.at)
            found["launch_seconds"] = max(start_seconds, ended_at - self._launch.at)
        if self._gone_since is not None:
            found["recovery_seconds"] = max(start_seconds, ended_at - self._gone_since)
        return found

    def _add(self, row: dict[str, Any]) -> None:
        saving = float(row.get("breakdown", {}).get("checkpoint", 0.0))
        self._totals["steps"] += 1
        self._totals["useful_seconds"] += max(0.0, float(row["step_seconds"]) - saving)
        self._totals["save_seconds"] += saving

    def went_back(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        """The steps after `step` of `rows` will be made again, by this very process."""
        num_steps, seconds = self._keep(rows, step)
        self._append("lost", {"attempt": self._attempt, "steps": num_steps, "seconds": seconds})

    def total(self) -> None:
        """Writes down how far it has come."""
        self._append("totals", {**self._totals, "at": time.time()})

    def end(self, status: str) -> None:
        """Writes down how far it has come, and that it ended by itself."""
        self.total()
        self._append("ended", {"attempt": self._attempt, "status": status})

    def _append(self, kind: str, values: dict[str, Any]) -> None:
        # Half a row of a process that was killed stays a row of its own, which readers pass over.
        start = "\n" if kind == "start" and self.path.exists() else ""
        # A full disk costs the row, not the job.
        append_all(self.path, f"{start}{json.dumps({kind: values})}\n")


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """Whole rows, each a key and what it has; none where there is no file."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and all(isinstance(value, dict) for value in row.values()):
            rows.append(row)
    return rows


def _first_start_of(path: Path) -> float | None:
    """When the job's first start began (epoch); None where the file doesn't say."""
    for row in _rows_of(path):
        try:
            return float(row["start"]["at"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def process_seconds() -> float:
    """How long this process has existed, as Linux counts it; 0 where it can't be asked."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        since_boot = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return max(0.0, since_boot - int(fields[19]) / os.sysconf("SC_CLK_TCK"))  # starttime, proc(5) field 22
    except (OSError, ValueError, IndexError):
        return 0.0
