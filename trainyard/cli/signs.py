"""Signs of a job's life for who is called at night: last step, newest checkpoint, restarts in place and why.

From its newest lines and its files. What can't be had is left out: a status must not fail for want of it.
"""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainyard.cli.output import duration
from trainyard.cli.seen import Restart, Seen
from trainyard.errors import TrainyardError
from trainyard.launch.backend import LogCursor
from trainyard.launch.checkpoint_files import RECOVERY_FILE, open_files
from trainyard.launch.checkpoints import newest_committed
from trainyard.launch.compare import METRICS_FILE
from trainyard.launch.goodput import jsonl_rows
from trainyard.launch.place import Place
from trainyard.launch.record import JobRecord
from trainyard.operate.course import newest_rows, own_folder

_MOST_ROW_BYTES = 64 * 1024
"""At a file's end, of which a row is a few hundred."""
_MOST_LOOKS = 20
"""At a log's end, which has more than one page where the job writes faster than it is read."""


@dataclass(frozen=True)
class Signs:
    """Moments are seconds since the epoch; None: nobody can say."""

    step: int | None = None
    step_at: float | None = None
    loss: str = ""
    saved_step: int | None = None
    """Of the newest committed checkpoint, by its marker."""
    saved_at: float | None = None
    save_failure: str = ""
    """Why the newest save came to nothing; empty where it did not."""
    told_saved_step: int | None = None
    """Of the newest checkpoint that the newest lines tell of, be it there still or not."""
    can_tell_saved: bool = False
    """Whether the place of the checkpoints could be looked at."""
    restarts: tuple[Restart, ...] = ()
    """In place, oldest first; of a job on other machines those before its newest checkpoint, and those that its newest
    lines tell of."""
    is_restarting: bool = False

    @property
    def are_checkpoints_gone(self) -> bool:
        """Whether none is at the place where one was saved: a disk that isn't mounted is an empty folder."""
        return self.can_tell_saved and self.saved_step is None and self.told_saved_step is not None

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        found = asdict(self)
        del found["can_tell_saved"]
        return found

    def as_rows(
        self, num_steps: int | None, *, is_running: bool, failure: str = "", now: datetime | None = None
    ) -> list[tuple[str, str]]:
        """For people: what is known, each with how long ago. `failure`: the attempt's, which stands beside it."""
        epoch = (now or datetime.now(UTC)).timestamp()
        rows = []
        if self.step is not None:
            total = f" of {num_steps:,}" if num_steps else ""
            loss = f", loss {self.loss}" if self.loss else ""
            rows.append(("last step", f"{self.step:,}{total}{_ago(self.step_at, epoch)}{loss}"))
        elif is_running:
            rows.append(("last step", "none yet"))
        failed = f"; {self.save_failure}" if self.save_failure else ""
        if self.saved_step is not None:
            rows.append(("saved", f"step {self.saved_step:,}{_ago(self.saved_at, epoch)}{failed}"))
        elif self.are_checkpoints_gone:
            rows.append(("saved", f"none at its place now, where step {self.told_saved_step:,} was saved{failed}"))
        elif self.can_tell_saved:
            rows.append(("saved", f"no checkpoint yet{failed}"))
        if self.restarts:
            last = self.restarts[-1]
            where = f"after step {last.last_step:,}" if last.last_step else "before a step"
            why = "as it failed in the end" if failure.startswith(last.reason) else last.reason
            words = f"{len(self.restarts)} in place, the last{_ago(last.at, epoch, ' ')} {where}: {why}"
            rows.append(("restarts", f"{words} (no step since)" if self.is_restarting else words))
        return rows


def _ago(at: float | None, now: float, before: str = ", ") -> str:
    return "" if at is None else f"{before}{duration(now - at)} ago"


def signs(place: Place, record: JobRecord) -> Signs:
    """What can be had of them now."""
    seen = _newest_lines(place, record)
    step, step_at, loss = (seen.step or None), seen.step_at, seen.loss
    with suppress(TrainyardError, OSError, KeyError, TypeError, ValueError):
        folder = own_folder(place, record)
        newest = _newest_row(folder / METRICS_FILE) if folder is not None else {}
        if not newest and step is None:
            newest = (newest_rows(place, record) or [{}])[-1]
        if newest and (step is None or (folder is not None and int(newest["step"]) > step)):
            step = int(newest["step"])  # of a job that goes on while it is looked at, the file is read last
            loss = f"{float(newest['loss']):.6f}" if newest.get("loss") is not None else ""
        if folder is not None and step is not None and step == newest.get("step"):
            # Its log has no times, and a start that drops rows writes the file anew: then they end at another step.
            step_at = (folder / METRICS_FILE).stat().st_mtime
    saved: tuple[int, float | None] | None = None
    can_tell = False
    with suppress(TrainyardError, OSError):
        saved = newest_committed(record.checkpoint_destination, place.s3)
        can_tell = True
    return Signs(
        step=step,
        step_at=step_at,
        loss=loss,
        saved_step=saved[0] if saved else None,
        saved_at=saved[1] if saved else None,
        save_failure=seen.save_failure,
        told_saved_step=seen.saved_step,
        can_tell_saved=can_tell,
        restarts=_restarts(place, record, seen),
        is_restarting=seen.is_restarting,
    )


def _newest_row(path: Path) -> dict[str, Any]:
    """The last whole row of a file of them; empty where there is none. OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_ROW_BYTES))
        rows = jsonl_rows(file.read())
    return rows[-1] if rows else {}


def _newest_lines(place: Place, record: JobRecord) -> Seen:
    seen, cursor = Seen(), LogCursor(from_end=True, first_host_alone=True)
    with suppress(TrainyardError, OSError):
        for _ in range(_MOST_LOOKS):
            for line in place.backend.read_logs(record, cursor):
                seen.read(line)
            if not cursor.more:
                break
    return seen


def _restarts(place: Place, record: JobRecord, seen: Seen) -> tuple[Restart, ...]:
    """Those of the file, and of the lines those that are newer: its row comes with the next step."""
    known: list[Restart] = []
    with suppress(TrainyardError, OSError, KeyError, TypeError, ValueError):
        folder = own_folder(place, record)
        files = open_files(str(folder), None) if folder else open_files(record.checkpoint_destination, place.s3)
        for row in jsonl_rows(files.read(RECOVERY_FILE) or b""):
            known.append(Restart(int(row["restart"]), int(row["last_step"]), str(row["reason"]), float(row["at"])))
    # Lines are the end of all restarts and the file their beginning; one under way has no row yet. Each attempt counts
    # from 1, and fails alike where it fails of the same.
    rows, told = ([(one.number, one.last_step, one.reason) for one in kept] for kept in (known, seen.restarts))
    least = 1 if seen.is_restarting and told else 0
    num_both = next(count for count in range(len(told) - least, -1, -1) if rows[len(rows) - count :] == told[:count])
    return (*known, *seen.restarts[num_both:])
