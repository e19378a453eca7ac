"""What was planned for a job beside what it did: step, memory, hours, dollars; from its record and metrics.jsonl."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.checkpoint_files import open_files
from trainyard.launch.goodput import Goodput, goodput, jsonl_rows
from trainyard.launch.record import TERMINAL_STATES, JobRecord

WARM_STEPS = 3
"""First steps of an attempt that are left out: they load, compile and fill caches."""

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Line:
    """One figure."""

    name: str
    unit: str
    planned: float | None
    """None: the plan doesn't know it."""
    measured: float | None
    """None: the job didn't tell it."""
    low: float | None = None
    """With the next: the plan's 80% interval."""
    high: float | None = None

    @property
    def error(self) -> float | None:
        """Planned over measured, less one."""
        if self.planned is None or self.measured is None or not self.measured or not math.isfinite(self.planned):
            return None
        return self.planned / self.measured - 1

    @property
    def verdict(self) -> str:
        """In words: whether the interval held."""
        if self.measured is None:
            return "not measured"
        if self.planned is None:
            return "not planned"
        if self.low is None or self.high is None:
            return ""
        return "within the interval" if self.low <= self.measured <= self.high else "outside of the interval"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**self.__dict__, "error": self.error, "verdict": self.verdict}


@dataclass(frozen=True)
class Comparison:
    """A job's plan and its course."""

    job_id: str
    num_steps: int
    """Measured, warm ones."""
    lines: tuple[Line, ...]
    breakdown: tuple[Line, ...]
    """Of a step."""
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "job_id": self.job_id,
            "num_steps": self.num_steps,
            "lines": [line.document() for line in self.lines],
            "breakdown": [line.document() for line in self.breakdown],
            "notes": list(self.notes),
        }


def compare(record: JobRecord, s3: Any) -> Comparison:
    """The plan in the record against metrics.jsonl, goodput.jsonl and the states; InputError where nothing ran yet."""
    plan = record.plan
    chosen = next((item for item in plan.get("configurations", []) if item.get("chosen")), None)
    rows = metrics_rows(record, s3)
    warm = [row for row in rows if _number(row.get("step_seconds")) and _number(row.get("step")) is not None]
    first = {row.get("attempt", 1): row.get("step", 0) for row in reversed(warm)}
    warm = [row for row in warm if row.get("step", 0) >= first[row.get("attempt", 1)] + WARM_STEPS] or warm
    if not warm:
        raise InputError(
            f"job {record.job_id}: has no metrics.jsonl at {record.checkpoint_destination} yet: nothing was measured; "
            "it is written with each checkpoint"
        )
    time = (chosen or {}).get("time") or {}
    step = statistics.median(float(row["step_seconds"]) for row in warm)
    unit = "images" if any("images" in row for row in warm) else "tokens"
    seen = [float(row[unit]) for row in warm if _number(row.get(unit)) is not None]
    lines = [
        Line("step", "s", _get(time, "step_seconds"), step, *_interval(time, "step_seconds")),
        _throughput(time, statistics.median(seen) / step if seen else None, unit),
        *_memory(chosen, rows),
        *_course(record, plan, goodput(record, s3)),
    ]
    return Comparison(
        job_id=record.job_id,
        num_steps=len(warm),
        lines=tuple(lines),
        breakdown=_breakdown(time, warm),
        notes=tuple(_notes(record, plan, chosen, time)),
    )


def _throughput(time: Mapping[str, Any], measured: float | None, unit: str) -> Line:
    """Of all ranks together; `unit`: what the task counts (a plan's `tokens_per_second` is of the same)."""
    planned, step = _get(time, "tokens_per_second"), _get(time, "step_seconds")
    low = high = None
    if planned and step and _get(time, "step_seconds_high") and _get(time, "step_seconds_low"):
        low = planned * step / float(time["step_seconds_high"])
        high = planned * step / float(time["step_seconds_low"])
    return Line("throughput", f"{unit}/s", planned, measured, low, high)


def _memory(chosen: Mapping[str, Any] | None, rows: list[dict[str, Any]]) -> list[Line]:
    """The allocator's peak on a GPU (the plan's without margin and what lies outside), and a process's host memory.

    A plan that knows no machine says nothing of a host: its processes are counted with CUDA and its libraries.
    """
    use = (chosen or {}).get("memory") or {}
    host = (chosen or {}).get("host") or {} if (chosen or {}).get("time") else {}
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    values = [_get(use, f"{part}_gib") for part in parts]
    known = [value for value in values if value is not None]
    return [
        Line("peak memory of a GPU", "GiB", sum(known) if known else None, _peak_gib(rows, "allocated_peak")),
        Line("host memory of a rank", "GiB", _get(host, "rank_gib"), _peak_gib(rows, "host_peak")),
    ]


def _peak_gib(rows: list[dict[str, Any]], name: str) -> float | None:
    """The highest of a peak that the ranks compared (`observed` in some rows)."""
    found = [_number(_within(_within(row, "observed"), "peak_bytes").get(name)) for row in rows]
    told = [value for value in found if value]
    return max(told) / 2**30 if told else None


def _course(record: JobRecord, plan: Mapping[str, Any], reached: Goodput | None) -> list[Line]:
    """Hours, goodput and dollars of the whole run, once it is over; without the time that it waited for machines."""
    cost, checkpoint = plan.get("cost") or {}, plan.get("checkpoint") or {}
    finished = record.state == "Completed" and reached is not None
    hours = share = None
    if finished and reached is not None:
        # As the plan counts: what waits for machines neither works nor costs.
        seconds = reached.wall_seconds - reached.elsewhere["queue"]
        hours, share = seconds / 3600, reached.useful_seconds / seconds if seconds > 0 else None
    rate = _get(plan.get("on_demand") or {}, "usd_per_hour")
    count = plan.get("instance_count")
    usd = hours * rate * count if hours is not None and rate is not None and isinstance(count, int) else None
    if record.backend == "local":
        usd = None
    return [
        Line("hours", "h", _get(cost, "expected_hours"), hours, *_interval(cost, "expected_hours")),
        Line("goodput", "share", _get(checkpoint, "goodput"), share),
        Line("on-demand dollars", "USD", _get(cost, "usd_on_demand"), usd),
    ]


MEASURED_PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other")


def _breakdown(time: Mapping[str, Any], warm: list[dict[str, Any]]) -> tuple[Line, ...]:
    planned = time.get("breakdown_seconds") or {}
    exposed = [value for name, value in planned.items() if name.endswith("_communication") or name == "bubble"]
    known = {
        "data": _get(planned, "data"),
        "forward": _get(planned, "forward"),
        "backward": _sum(_get(planned, "backward"), _get(planned, "recompute")),
        "communication": float(sum(exposed)) if exposed else None,
        "optimizer": _get(planned, "optimizer"),
    }
    lines = []
    for part in MEASURED_PARTS:
        values = [_number(_within(row, "breakdown").get(part)) for row in warm]
        told = [value for value in values if value is not None]
        lines.append(Line(part, "s", known.get(part), statistics.median(told) if told else None))
    return tuple(lines)


def _notes(
    record: JobRecord, plan: Mapping[str, Any], chosen: Mapping[str, Any] | None, time: Mapping[str, Any]
) -> list[str]:
    notes = []
    if "unplanned" in plan:
        notes.append(f"the job was launched without a plan: {plan['unplanned']}")
    elif chosen is not None and not time:
        notes.append("the plan knows no machine, as of processes here: a GPU's memory alone, no time, host or cost")
    if record.environment is not None and time and "local" in str(record.environment):
        notes.append("environment local stands in for AWS: the plan is of GPUs, the measured steps are of this machine")
    if time and record.spec.task == "causal_lm" and not record.spec.data.packing:
        notes.append("data.packing is false: the plan's tokens have the padding in them, the measured ones have not")
    if record.state != "Completed":
        when = "of one that completes" if record.state in TERMINAL_STATES else "when it has completed"
        notes.append(f"the job is {record.state}: hours, goodput and dollars are compared {when}")
    return notes


def metrics_rows(record: JobRecord, s3: Any) -> list[dict[str, Any]]:
    """The whole rows of the job's metrics.jsonl, one a step (trainer.observe.metrics); as of the newest checkpoint
    where they are in S3."""
    return jsonl_rows(open_files(record.checkpoint_destination.rstrip("/"), s3).read(METRICS_FILE) or b"")


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _within(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What stands there if it is a mapping: a disk may have altered a row, or another version have written it."""
    value = content.get(name)
    return value if isinstance(value, Mapping) else {}


def _get(content: Mapping[str, Any], name: str) -> float | None:
    return _number(content.get(name))


def _interval(content: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    return _get(content, f"{name}_low"), _get(content, f"{name}_high")


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None else one + (other or 0.0)
