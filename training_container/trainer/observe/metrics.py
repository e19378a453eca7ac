"""metrics.jsonl: one row an optimizer step, and what a resume keeps of it."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.speech import say
from trainyard.errors import JobFailedError
from trainyard.kept_room import FULL
from trainyard.spec.words import counted

METRICS_FILE = "metrics.jsonl"
ATTEMPTS_FILE = "attempts.json"


@dataclass(frozen=True)
class Row:
    """One optimizer step, as metrics.jsonl holds it."""

    step: int
    attempt: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """In the task's unit."""
    step_seconds: float
    breakdown: dict[str, float]
    was_applied: bool = True
    validation: dict[str, Any] = field(default_factory=dict)
    """Where there was one: validation_loss, validation_perplexity, the task's measures, validation_sets by name."""
    more: dict[str, Any] = field(default_factory=dict)
    """What few rows have: `observed`, `anomaly`, `checkpoint`."""
    unit: str = "tokens"
    """Of `tokens`, and its key: a row of image_classification has `images` instead."""

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: loss and norm of a step that overflowed are null. Empty rare fields are left out."""
        values: dict[str, Any] = {
            name: getattr(self, name) for name in ("step", "attempt", "loss", "learning_rate", "grad_norm")
        }
        values |= {self.unit: self.tokens, "step_seconds": self.step_seconds, "breakdown": self.breakdown}
        for name in ("loss", "grad_norm"):
            values[name] = values[name] if math.isfinite(values[name]) else None
        values |= self.more
        if not self.was_applied:
            values["skipped"] = True
        return values | self.validation

    def as_line(self) -> str:
        """The line on stdout, which log filters match from its beginning."""
        return (
            f"step={self.step} loss={self.loss:.6f} learning_rate={self.learning_rate:.6g}"
            f" grad_norm={self.grad_norm:.4f} {self.unit}={self.tokens}"
            f" {self.unit}_per_second={self.tokens / self.step_seconds:.1f} step_seconds={self.step_seconds:.4f}"
        )


class MetricsLog:
    """The file of one rank: appended to row by row, so that a killed process leaves at most one broken line.

    What a full disk doesn't take waits in memory: the job goes on, as it does without the saves that don't fit.
    """

    def __init__(self, folder: Path, *, is_published: bool = False) -> None:
        """`is_published`: checkpoints have their metrics here, in this very file."""
        self.path = folder / METRICS_FILE
        self.attempts_path = folder / ATTEMPTS_FILE
        self._is_published = is_published
        self._whole: str | None = None
        """What the file should hold, where there was no room to write it anew."""
        self._waiting: list[Row] = []
        """Rows to be put behind that."""
        self._in_memory: list[int] = []
        """Descriptors of copies; a save that is on its way may still read the last but one."""
        self._is_told = False
        """That some rows can't be read."""

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows; a line broken by a kill is dropped, and what a disk has altered too, which is said once."""
        lines = self._text().splitlines()
        rows = _rows_in(lines)
        num_lost = len(lines) - len(rows)
        # The last line is the one that a kill breaks.
        if num_lost > (bool(lines) and not _rows_in(lines[-1:])) and not self._is_told:
            self._is_told = True
            say(f"warning: {self.path}: {num_lost} of {counted(len(lines), 'row')} can't be read: dropped")
        return rows

    def _text(self) -> str:
        return self._written() + "".join(map(_line, self._waiting))

    def _written(self) -> str:
        if self._whole is not None:
            return self._whole
        try:
            # A byte that a disk altered costs its row: what the job goes on from are its checkpoints.
            return self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise JobFailedError(
                f"{self.path}: can't be read: {error.strerror or error}; mend it, or move it away"
            ) from None

    def written_at(self) -> float | None:
        """When the file was last written on this machine (epoch); None where it isn't here."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def recent(self, num_rows: int = 20) -> list[dict[str, Any]]:
        """The last whole rows."""
        lines = self._text().splitlines()
        return _rows_in(lines[-num_rows - 1 :])[-num_rows:]  # one more: a kill may have broken the last

    def begin_attempt(
        self, *, resumed_step: int, rows: Sequence[dict[str, Any]] | None = None, destination: str = ""
    ) -> int:
        """Drops rows past the checkpoint and returns this attempt's number, one more than any seen before.

        `rows`: those of `rows()`, where the caller has them. `destination`: where it saves; see `saved_to`.
        """
        rows = self.rows() if rows is None else rows
        attempt = self.num_attempts(rows) + 1
        self.drop_after(resumed_step, rows)
        # Where there is no room for it, the rows still tell of every attempt that made one.
        replace_all(self.attempts_path, json.dumps({"attempts": attempt, "destination": destination}) + "\n")
        return attempt

    def num_attempts(self, rows: Sequence[dict[str, Any]] | None = None) -> int:
        """How many there were, as far as it is known here. `rows`: those of `rows()`."""
        rows = self.rows() if rows is None else rows
        # The counter is empty where a machine's power went before it was on the disk: the rows tell of attempts too.
        counted = attempts_in(self.attempts_path.read_bytes()) if self.attempts_path.exists() else 0
        return max([counted, *(int(row["attempt"]) for row in rows)])

    def drop_after(self, step: int, rows: Sequence[dict[str, Any]] | None = None) -> None:
        """Drops the rows of later steps, which are made again. `rows`: those of `rows()`."""
        rows = self.rows() if rows is None else rows
        kept = [row for row in rows if row["step"] <= step]
        # A resume finds no more than there should be, as a rule, and to write 200,000 rows anew takes seconds.
        if len(kept) < len(rows) or not self._is_as_written(len(rows)):
            self._rewrite(kept)

    def _is_as_written(self, num_rows: int) -> bool:
        """Whether the file has so many rows, each whole, and nothing waits to be put behind them."""
        if self._whole is not None or self._waiting or not self.path.exists():
            return False
        text = self._written()
        return text.count("\n") == num_rows and text[-1:] in ("", "\n") and "\ufffd" not in text

    def add_later(self, others: Sequence[dict[str, Any]]) -> None:
        """Puts those of `others` behind the rows that are of later steps: a host's own disk may have a checkpoint of a
        start that others followed, and that was newer than what these went on from."""
        if others:
            rows = self.rows()
            last = max((row["step"] for row in rows), default=0)
            if later := [row for row in others if row["step"] > last]:
                self._rewrite([*rows, *later])

    def complete(self, step: int, validation: dict[str, Any]) -> None:
        """Puts into a step's row what its validation says now that it was made up for."""
        self._rewrite([row | validation if row["step"] == step else row for row in self.rows()])

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self._whole = "".join(json.dumps(row) + "\n" for row in rows)
        self._waiting.clear()
        self.flush()

    def append(self, row: Row) -> None:
        """Writes one row through to the file, or as soon as its disk has room again."""
        self._waiting.append(row)
        self.flush()

    def flush(self) -> None:
        """Writes what waits, if there is room by now."""
        if self._whole is not None:
            if not replace_all(self.path, self._whole):
                return
            self._whole = None
        if self._waiting and append_all(self.path, "".join(map(_line, self._waiting))):
            self._waiting.clear()

    def to_copy(self) -> Path:
        """The file; while rows wait, one in memory that has them too (Linux only): no checkpoint lacks a row.

        Where checkpoints have their metrics in the file itself, always the file: a copy would take its place when the
        checkpoint is committed, and the rows that were written meanwhile would be gone.
        """
        self.flush()
        if self._is_published or (not self._waiting and self._whole is None):
            return self.path
        self._in_memory.append(os.memfd_create(METRICS_FILE))
        for descriptor in self._in_memory[:-2]:
            os.close(descriptor)
        del self._in_memory[:-2]
        path = Path(f"/proc/self/fd/{self._in_memory[-1]}")
        path.write_text(self._text(), encoding="utf-8")
        return path


def attempts_in(content: bytes) -> int:
    """The number that a file of attempts holds; 0 for one that is torn."""
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
        return int(json.loads(content)["attempts"])
    return 0


def saved_to(folder: Path) -> str | None:
    """Where the newest attempt whose records are here saves; None where there is none, or it doesn't say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / ATTEMPTS_FILE).read_bytes())["destination"]) or None
    return None


def _rows_in(lines: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if _is_row(row):
            rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    """Whether it has what is reckoned with."""
    if not isinstance(row, dict) or "loss" not in row or not isinstance(row.get("breakdown", {}), dict):
        return False
    if not all(isinstance(seconds, int | float) for seconds in row.get("breakdown", {}).values()):
        return False
    numbers = (row.get("step"), row.get("attempt"), row.get("step_seconds"))
    return all(isinstance(number, kind) for number, kind in zip(numbers, (int, int, int | float), strict=True))


def _line(row: Row) -> str:
    return json.dumps(row.as_json()) + "\n"


def append_all(path: Path, text: str) -> bool:
    """Put all of `text` behind a file's end, or, where the disk is too full for it, nothing: False."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        if error.errno not in FULL:
            raise
        if path.exists():
            os.truncate(path, size)
        return False
    return True


def replace_all(path: Path, text: str) -> bool:
    """Whole or not at all, whenever the process is killed; False where the disk is too full for it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno not in FULL:
            raise
        partial.unlink(missing_ok=True)
        return False
    partial.replace(path)
    return True
