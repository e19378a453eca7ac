"""How a job goes while it runs: its figures by step, from metrics.jsonl and, newer than that, from its own lines.

metrics.jsonl of a job on AWS is as of its newest checkpoint; its lines are seconds old. Of a job of this machine the
file itself is always up to date.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.launch import moved
from trainyard.launch.backend import LogCursor
from trainyard.launch.compare import METRICS_FILE, metrics_rows
from trainyard.launch.goodput import jsonl_rows
from trainyard.launch.place import Place
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.operate.runbooks.figures import warm_rows

Row = dict[str, Any]
SMOOTH_STEPS = 5
"""Newest steps whose mean stands for a training loss: single batches differ by a few percent."""
LOSS = "loss"


def own_folder(place: Place, record: JobRecord) -> Path | None:
    """A job's output folder, where it is on this machine: always up to date. It lies in the job's own folder, wherever
    its checkpoints go."""
    if not isinstance(place.store, FolderRecordStore):
        return None
    folder = moved.own_folder(record, place.store.folder) / "output"
    return folder if folder.is_dir() else None


def newest_rows(place: Place, record: JobRecord) -> list[Row]:
    """The whole rows of the job's metrics.jsonl, as new as they can be had."""
    folder = own_folder(place, record)
    if folder is not None and (folder / METRICS_FILE).exists():
        return jsonl_rows((folder / METRICS_FILE).read_bytes())
    return metrics_rows(place.located(record), place.s3)


def row_of_line(text: str) -> Row | None:
    """What a line of a step, or of a validation on the default set, says: a row with the names of metrics.jsonl."""
    head, _, rest = text.partition("step=")
    if head not in ("", "validation ") or not rest:
        return None
    found: dict[str, Any] = {}
    for word in f"step={rest}".split():
        name, separator, value = word.partition("=")
        if not separator:
            continue
        try:
            found[name] = float(value)
        except ValueError:
            if name == "set":
                return None
    if not math.isfinite(found.get("step", math.nan)):
        return None
    found["step"] = int(found["step"])
    found |= {name: None for name, value in found.items() if isinstance(value, float) and not math.isfinite(value)}
    if head:
        return {name if name == "step" else f"validation_{name}": value for name, value in found.items()}
    return {name: value for name, value in found.items() if not name.endswith("_per_second")}


@dataclass
class Course:
    """One job's rows by step, brought up to date by `look`."""

    rows: dict[int, Row] = field(default_factory=dict)
    _cursor: LogCursor = field(default_factory=LogCursor)
    _attempt: int = 0

    def look(self, place: Place, record: JobRecord, *, finished: bool) -> None:
        """Read what is new. What can't be read now is left for the next look; rows take the place of lines."""
        is_new = record.attempt.number != self._attempt
        if is_new:
            self._attempt = record.attempt.number
        try:
            is_here = own_folder(place, record) is not None
            if not is_here:
                self._read_lines(place, record)
            if is_here or is_new or finished:
                self._take(newest_rows(place, record), replace=True)
        except (TrainyardError, OSError):
            return

    def _read_lines(self, place: Place, record: JobRecord) -> None:
        while True:
            lines = place.backend.read_logs(record, self._cursor)
            self._take([row for line in lines if (row := row_of_line(line.text)) is not None], replace=False)
            if not self._cursor.more:
                return

    def _take(self, rows: Sequence[Row], *, replace: bool) -> None:
        if replace and rows:
            # Steps after a resume's checkpoint are made again: the file has dropped them, and so do we.
            newest = max(int(row["step"]) for row in rows if "step" in row)
            self.rows = {step: row for step, row in self.rows.items() if step > newest}
        for row in rows:
            if "step" in row:
                step = int(row["step"])
                self.rows[step] = {**({} if replace else self.rows.get(step, {})), **row}

    def ordered(self) -> list[Row]:
        """By step."""
        return [self.rows[step] for step in sorted(self.rows)]


def curve(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[int, float]:
    """Step -> the metric; the training loss is the mean of its last SMOOTH_STEPS. What is no number is infinite: a
    trial that diverged loses to every other. `metric`: a key of metrics.jsonl, of which less is better."""
    found: dict[int, float] = {}
    recent: list[float] = []
    for row in rows:
        if metric not in row or row.get("skipped"):
            continue
        value = row[metric]
        recent.append(float(value) if isinstance(value, int | float) and math.isfinite(value) else math.inf)
        window = recent[-SMOOTH_STEPS:] if metric == LOSS else recent[-1:]
        found[int(row["step"])] = math.fsum(window) / len(window) if math.inf not in window else math.inf
    return found


def value_at(course: Mapping[int, float], step: int) -> float | None:
    """A curve's newest value at or before a step; None before its first."""
    known = [at for at in course if at <= step]
    return course[max(known)] if known else None


def units_per_second(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Median speed of the warm steps in the task's unit (tokens, or images); None where no step was made."""
    speeds = []
    for row in warm_rows(rows):
        units, seconds = row.get("tokens", row.get("images")), row.get("step_seconds")
        if isinstance(units, int | float) and isinstance(seconds, int | float) and seconds > 0:
            speeds.append(units / seconds)
    return statistics.median(speeds) if speeds else None


def dumped(rows: Sequence[Mapping[str, Any]]) -> str:
    """As JSON lines, for a folder of evidence."""
    return "".join(json.dumps(row) + "\n" for row in rows)
