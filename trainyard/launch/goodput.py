"""How much of a job's time made steps that it kept, and where the rest went: from the job's own account and record."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.launch.checkpoint_files import open_files
from trainyard.launch.record import TERMINAL_STATES, JobRecord, StateChange

GOODPUT_FILE = "goodput.jsonl"
"""Written by the trainer (trainer.observe.goodput), as of the newest checkpoint."""
_RUNNING = frozenset({"Training", "Stopping", "Uploading"})


@dataclass(frozen=True)
class Goodput:
    """Of one job, all attempts together; seconds."""

    wall_seconds: float
    """From its launch to its end, or to now, without the time that it lay stopped or failed and waited for a person."""
    useful_seconds: float
    """Of steps that were kept, without saves."""
    elsewhere: dict[str, float]
    """queue, start, rendezvous, load, first_step, lost_steps, saves; `other` is what nobody has accounted for, among it
    the detection of failures and, while a job runs, the steps since its newest checkpoint."""
    lost_steps: int
    num_starts: int

    @property
    def share(self) -> float:
        """Useful time over wall time, 0 to 1."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def as_line(self) -> str:
        """For people: the share, then the largest of what took the rest."""
        parts = sorted(self.elsewhere.items(), key=lambda part: -part[1])
        words = [f"{name.replace('_', ' ')} {seconds:.0f} s" for name, seconds in parts if seconds >= 0.5]
        rest = f"; {', '.join(words[:6])}" if words else ""
        return f"{100 * self.share:.0f}% of {self.wall_seconds:.0f} s made steps that were kept{rest}"

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {**self.__dict__, "share": self.share}


def goodput(record: JobRecord, s3: Any, *, now: datetime | None = None) -> Goodput | None:
    """A job's goodput; None before its first start has told of itself, or where that can't be read."""
    try:
        content = open_files(record.checkpoint_destination.rstrip("/"), s3).read(GOODPUT_FILE)
        return account_of(jsonl_rows(content or b""), record.states, now=now or datetime.now(UTC))
    except (TrainyardError, ValueError, KeyError, TypeError, AttributeError):
        # A status must not fail for want of a figure.
        return None


def jsonl_rows(content: bytes) -> list[dict[str, Any]]:
    """The whole rows of a file of JSON lines: a process that was killed may have left half of one."""
    rows = []
    for line in content.decode("utf-8", "replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def account_of(rows: Sequence[dict[str, Any]], states: Sequence[StateChange], *, now: datetime) -> Goodput | None:
    """The trainer's rows (see trainer.observe.goodput) together with what the backend told of the job."""
    starts = [row["start"] for row in rows if "start" in row]
    if not starts:
        return None
    last = next((row["totals"] for row in reversed(rows) if "totals" in row), None)
    totals = last or {"steps": 0, "useful_seconds": 0.0, "save_seconds": 0.0}
    undone = [row["lost"] for row in rows if "lost" in row]
    wall, queue = _times(states, now)

    def total(name: str) -> float:
        return float(sum(start.get(name) or 0.0 for start in starts))

    useful, saves = float(totals["useful_seconds"]), float(totals["save_seconds"])
    # The first step of a start is a step too: what it took beyond an ordinary one is the start's.
    ordinary = useful / totals["steps"] if totals["steps"] else 0.0
    first_step = sum(max(0.0, row["first_step"]["seconds"] - ordinary) for row in rows if "first_step" in row)
    parts = {
        "queue": queue,
        "start": total("process_seconds") + total("build_seconds"),
        "rendezvous": total("rendezvous_seconds"),
        "load": total("load_seconds"),
        "first_step": first_step,
        "lost_steps": total("lost_seconds") + sum(row["seconds"] for row in undone),
        "saves": saves,
    }
    known = useful + sum(parts.values())
    # A job's clock and its backend's differ by a second or so: nothing took less than no time.
    parts["other"] = max(0.0, wall - known)
    lost_steps = int(total("lost_steps")) + sum(row["steps"] for row in undone)
    return Goodput(max(wall, known), useful, parts, lost_steps, len(starts))


def _times(states: Sequence[StateChange], now: datetime) -> tuple[float, float]:
    """Seconds in which the job was on its way or ran, and of these the ones before the ranks could start."""
    wall = queue = 0.0
    for change, following in zip(states, [*states[1:], None], strict=True):
        if change.state in TERMINAL_STATES:
            continue
        end = now if following is None else datetime.fromisoformat(following.at)
        seconds = max(0.0, (end - datetime.fromisoformat(change.at)).total_seconds())
        wall += seconds
        if change.state not in _RUNNING:
            queue += seconds
    return wall, queue
