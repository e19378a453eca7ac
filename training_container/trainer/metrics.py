"""metrics.jsonl: one row an optimizer step, where its time went, and what a resume keeps of it."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
_DEVICE_PHASES = frozenset({"forward", "backward", "optimizer"})

METRICS_FILE = "metrics.jsonl"
ATTEMPTS_FILE = "attempts.json"


class StepClock:
    """Splits the time between two rows into phases; the rest is `other`, so that phases always sum to the whole.

    A row's time begins where the row before ended: a checkpoint taken after step s shows up in the row of s + 1.
    On a GPU the phases are measured by events on its stream, without making it wait.
    """

    def __init__(self, device: torch.device, *, world_size: int) -> None:
        self._uses_events = device.type == "cuda"
        # Engines overlap communication with the backward pass, so its exposed part can't be told; alone there is none.
        self._communication = 0.0 if world_size == 1 else None
        self._restart()

    def _restart(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._excluded_seconds = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the block's time to `phase`."""
        assert phase in self._seconds
        if self._uses_events and phase in _DEVICE_PHASES:
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - started

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Keeps the block's time out of every row: validation is not part of a step."""
        started = time.perf_counter()
        yield
        self._excluded_seconds += time.perf_counter() - started

    def finish_row(self) -> tuple[float, dict[str, float | None]]:
        """(seconds since the row before, the same by phase); starts the next row."""
        if self._events:
            self._events[-1][2].synchronize()
            for phase, begin, end in self._events:
                self._seconds[phase] += begin.elapsed_time(end) / 1000.0
        breakdown: dict[str, float | None] = {**self._seconds, "communication": self._communication}
        known = sum(seconds for seconds in breakdown.values() if seconds is not None)
        # An event and the wall clock may differ by microseconds, so the whole is never less than its parts.
        total = max(time.perf_counter() - self._started - self._excluded_seconds, known)
        breakdown["other"] = total - known
        self._restart()
        return total, breakdown


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


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
    breakdown: dict[str, float | None]
    was_applied: bool = True
    validation_loss: float | None = None
    validation_measures: dict[str, float] = field(default_factory=dict)
    """What the task measures besides the loss: validation_top1_accuracy, ..."""
    unit: str = "tokens"
    """Of `tokens`, and its key: a row of image_classification has `images` instead."""

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: the norm of a step that overflowed is null. Rare fields are left out when empty."""
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("step", "attempt", "loss", "learning_rate", "grad_norm")
        }
        values |= {self.unit: self.tokens, "step_seconds": self.step_seconds, "breakdown": self.breakdown}
        values["grad_norm"] = self.grad_norm if math.isfinite(self.grad_norm) else None
        if not self.was_applied:
            values["skipped"] = True
        if self.validation_loss is not None:
            values["validation_loss"] = self.validation_loss
            values |= self.validation_measures
        return values

    def as_line(self) -> str:
        """The line on stdout, which log filters match from its beginning."""
        return (
            f"step={self.step} loss={self.loss:.6f} learning_rate={self.learning_rate:.6g}"
            f" grad_norm={self.grad_norm:.4f} {self.unit}={self.tokens}"
            f" {self.unit}_per_second={self.tokens / self.step_seconds:.1f} step_seconds={self.step_seconds:.4f}"
        )


class MetricsLog:
    """The file of one rank: appended to row by row, so that a killed process leaves at most one broken line."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE
        self.attempts_path = folder / ATTEMPTS_FILE

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows; a line broken by a kill is dropped."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def begin_attempt(self, *, resumed_step: int) -> int:
        """Drops rows past the checkpoint and returns this attempt's number, one more than any seen before."""
        rows = self.rows()
        seen = [int(row["attempt"]) for row in rows]
        if self.attempts_path.exists():
            seen.append(int(json.loads(self.attempts_path.read_text(encoding="utf-8"))["attempts"]))
        attempt = max(seen, default=0) + 1
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= resumed_step]
        _replace(self.path, "".join(kept))
        _replace(self.attempts_path, json.dumps({"attempts": attempt}) + "\n")
        return attempt

    def append(self, row: Row) -> None:
        """Writes one row through to the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.as_json()) + "\n")


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, whenever the process is killed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
