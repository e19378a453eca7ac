"""What a job's own figures say: metrics.jsonl's rows against the plan, or against its own better times. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.launch.compare import WARM_STEPS
from trainyard.spec.meters import BY_NAME, OBJECTIVES
from trainyard.spec.words import counted

Row = Mapping[str, Any]
Cause = Literal["data", "communication", "straggler", "throttling", "checkpoint"]

WINDOW = 20
"""Newest steps that are looked at: a job's slowness is what it is now."""
LEAST_SHARE_OF_PLAN = next(one.limit for one in OBJECTIVES if one.name == "throughput")
"""The objective's own limit, where the job's tenant states no other: what rings is what is explained here."""
SLOWER = 1.25
"""So many times the job's own better times is slow, where no plan says what to expect; the trainer's own measure of a
straggler (trainer.observe.stragglers)."""
DATA_SHARE = 0.15
"""Of a step: a loader that keeps up leaves the wait near zero."""
CHECKPOINT_SHARE = 0.15
"""Of the window's time: the interval's optimum costs a few percent (docs/checkpoints.md)."""
MORE_THAN_PLANNED = 0.1
"""Share of a step by which exposed communication may pass the plan's before it is the cause."""
HELD_BACK_SHARE = 0.25
"""Of the time with clocks kept down by heat, the power brake or the hardware: a cool GPU has none of it."""
COMPARISONS = 6
"""Newest ones of the ranks' figures (`training.observe_every_steps` apart) in which a straggler is looked for."""
OWN_WORK = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Slowness:
    """One reason for which a job is slow."""

    cause: Cause
    words: str
    """What decided, with its figures."""


@dataclass(frozen=True)
class Speed:
    """How fast a job is now."""

    num_steps: int
    step_seconds: float
    """Median of the window."""
    of_plan: float | None
    """Speed over the plan's; None where there is no plan for the machine."""
    is_below_plan: bool | None
    """Whether that is so little that the objective is missed; None where there is no plan."""
    of_best: float
    """Speed over that of the job's own best window of the same length; 1 where the newest is the best."""
    shares: Mapping[str, float]
    """Of a step, by phase."""
    slow: tuple[Slowness, ...]
    """Empty: nothing is wrong that these figures show."""

    def as_line(self) -> str:
        """One line."""
        plan = "no plan for this machine" if self.of_plan is None else f"{100 * self.of_plan:.0f}% of the plan's speed"
        parts = ", ".join(f"{name} {100 * share:.0f}%" for name, share in self.shares.items() if share >= 0.005)
        return f"step {self.step_seconds:.3f} s over the last {counted(self.num_steps, 'step')}, {plan}: {parts}"


def warm_rows(rows: Sequence[Row]) -> list[Row]:
    """Without the first steps of each attempt, which load and compile; all of them where there are no others."""
    return _later_rows(rows) or [row for row in rows if _number(row.get("step_seconds")) is not None]


def are_cold(rows: Sequence[Row]) -> bool:
    """Whether there are none but such first steps, by which nothing can be judged."""
    return not _later_rows(rows)


def _later_rows(rows: Sequence[Row]) -> list[Row]:
    timed = [row for row in rows if _number(row.get("step_seconds")) is not None]
    first: dict[Any, int] = {}
    for row in timed:
        first.setdefault(row.get("attempt", 1), int(row.get("step", 0)))
    return [row for row in timed if int(row.get("step", 0)) >= first[row.get("attempt", 1)] + WARM_STEPS]


def speed(
    rows: Sequence[Row], planned: Mapping[str, float], least_of_plan: float = LEAST_SHARE_OF_PLAN
) -> Speed | None:
    """The newest window judged; None where no step was made.

    `planned`: seconds of a step and of its parts by the plan (`step`, `communication`), as far as it knows them.
    `least_of_plan`: the share of the plan's speed below which a job is slow.
    """
    warm = warm_rows(rows)
    if not warm:
        return None
    window = warm[-WINDOW:]
    step = _median(window, "step_seconds")
    parts = {name: _total(window, name) for name in _phases(window)}
    total = sum(float(row["step_seconds"]) for row in window) or 1.0
    shares = {name: seconds / total for name, seconds in parts.items()}
    begins = range(0, max(1, len(warm) - WINDOW + 1), WINDOW // 2)
    best = min(_median(warm[begin : begin + WINDOW], "step_seconds") for begin in begins)
    # The trainer's own: it knows whether it runs on the machine that was planned.
    of_plan = _number_at(window, ("observed", "throughput", "of_plan"))
    is_below = None if of_plan is None else of_plan < least_of_plan
    is_slow = step > SLOWER * best if is_below is None else is_below
    found = _causes(warm, window, shares, planned, is_below, is_slow=is_slow)
    return Speed(len(window), step, of_plan, is_below, min(1.0, best / step if step else 1.0), shares, tuple(found))


def _causes(
    warm: Sequence[Row],
    window: Sequence[Row],
    shares: Mapping[str, float],
    planned: Mapping[str, float],
    is_below_plan: bool | None,
    *,
    is_slow: bool,
) -> list[Slowness]:
    """`is_slow`: below the plan, or below the job's own better times where there is no plan."""
    found = []
    if shares.get("data", 0.0) > DATA_SHARE:
        found.append(Slowness("data", f"{100 * shares['data']:.0f}% of the time is spent waiting for data"))
    if shares.get("checkpoint", 0.0) > CHECKPOINT_SHARE:
        found.append(Slowness("checkpoint", f"{100 * shares['checkpoint']:.0f}% of the time is blocked by saves"))
    hot_rank, held_back = _held_back(window) if is_slow else (None, "")
    slow_rank, straggler = _straggler(warm)
    if straggler:
        # The others' wait for it is exposed communication: one cause, not two. So are its own clocks, held back.
        if held_back and hot_rank != slow_rank:
            return [*found, Slowness("straggler", straggler), Slowness("throttling", held_back)]
        return [*found, Slowness("straggler", "; ".join(filter(None, (straggler, held_back))))]
    throttled = held_back or _throttled(warm, window)
    if throttled:
        found.append(Slowness("throttling", throttled))
    waits = _communication(warm, window, shares, planned, is_below_plan)
    return [*found, Slowness("communication", waits)] if waits else found


def _straggler(warm: Sequence[Row]) -> tuple[int | None, str]:
    """The rank that the newest comparison of the ranks names, and half of the last few, and words for it; once named
    is bad luck, and no words."""
    compared = [row["observed"]["stragglers"] for row in warm if "stragglers" in (row.get("observed") or {})]
    compared = compared[-COMPARISONS:]
    named = Counter((int(one["rank"]), str(one["host"])) for found in compared for one in found)
    if not named or not compared[-1]:
        return None, ""
    (rank, host), count = named.most_common(1)[0]
    mine = [one for found in compared for one in found if int(one["rank"]) == rank]
    if count < max(2, math.ceil(len(compared) / 2)):
        return None, ""
    ratios = [float(one["own_seconds"]) / float(one["peers_seconds"]) for one in mine if one["peers_seconds"]]
    ratio = f", {statistics.median(ratios):.1f} times as long as its like" if ratios else ""
    return rank, f"rank {rank} on {host} was the slow one in {count} of the last {len(compared)} comparisons{ratio}"


def _held_back(window: Sequence[Row]) -> tuple[int | None, str]:
    """What the GPUs' driver says of their clocks (`trainer.observe.gpu_use`): the worst one's rank, and words; none
    where it says nothing of the kind, or nothing at all."""
    meter = BY_NAME["gpu_held_back"]
    # The newest row that has the figure: later ones may tell of other GPU figures alone.
    row = next((row for row in reversed(window) if _number(meter.read(row)) is not None), {})
    share = meter.read(row)
    if share is None or share < HELD_BACK_SHARE:
        return None, ""
    told = row["observed"]["gpu"]
    return told.get("held_back_rank"), (
        f"heat, the power brake or the hardware kept GPU clocks down {100 * share:.0f}% of the time, by the driver: "
        f"worst on rank {told.get('held_back_rank')}, {told.get('held_back_host')}"
    )


def _throttled(warm: Sequence[Row], window: Sequence[Row]) -> str:
    """Every rank's own work takes longer than it did, no rank alone is to blame: clocks, power, heat, neighbours."""
    before = [row for row in warm[: -len(window)] if row.get("breakdown")]
    if len(before) < WINDOW:
        return ""
    own = [sum(_part(row, name) for name in OWN_WORK) for row in before]
    usual = min(statistics.median(own[begin : begin + WINDOW]) for begin in range(0, len(own) - WINDOW + 1, 5))
    now = statistics.median(sum(_part(row, name) for name in OWN_WORK) for row in window)
    if usual <= 0 or now <= SLOWER * usual:
        return ""
    return f"the ranks' own work takes {now:.3f} s a step, {now / usual:.2f} times what it did ({usual:.3f} s)"


def _communication(
    warm: Sequence[Row],
    window: Sequence[Row],
    shares: Mapping[str, float],
    planned: Mapping[str, float],
    is_below_plan: bool | None,
) -> str:
    share, step = shares.get("communication", 0.0), planned.get("step")
    if is_below_plan is not None and step and "communication" in planned:
        expected = planned["communication"] / step
        if is_below_plan and share > expected + MORE_THAN_PLANNED:
            return f"{100 * share:.0f}% of the time is exposed communication, the plan has {100 * expected:.0f}%"
        return ""
    before = warm[: -len(window)]
    if len(before) < WINDOW:
        return ""
    waits = [_part(row, "communication") for row in before]
    usual = min(statistics.median(waits[begin : begin + WINDOW]) for begin in range(0, len(waits) - WINDOW + 1, 5))
    now, length = (statistics.median(_part(row, "communication") for row in window), _median(window, "step_seconds"))
    if now - usual > MORE_THAN_PLANNED * length and now > SLOWER * usual:
        return f"exposed communication takes {now:.3f} s of a step of {length:.3f} s; before it was {usual:.3f} s"
    return ""


SPIKE = 2.0
"""So many times the best running median of the loss is a divergence; fluctuations of batches are a few percent."""
LEAST_LOSSES = 10


def diverged(rows: Sequence[Row]) -> str:
    """Why the loss is not that of a job that learns, with the step; empty: it is, as far as the rows tell."""
    for row in rows:
        if "anomaly" in row and not row.get("skipped"):
            return f"step {row.get('step')}: {row['anomaly']}"
        for name in ("loss", "grad_norm"):
            if name in row and _number(row[name]) is None and not row.get("skipped"):
                return f"{name} of step {row.get('step')} is no number"
    losses = [(int(row["step"]), value) for row in rows if (value := _number(row.get("loss"))) is not None]
    if len(losses) < 2 * LEAST_LOSSES:
        return ""
    medians = [
        statistics.median(value for _, value in losses[begin : begin + LEAST_LOSSES])
        for begin in range(0, len(losses) - LEAST_LOSSES + 1)
    ]
    best, now = min(medians), medians[-1]
    if best > 0 and now > SPIKE * best:
        step = losses[medians.index(best) + LEAST_LOSSES - 1][0]
        return f"the loss was {best:.4g} about step {step} and is {now:.4g} at step {losses[-1][0]}"
    return ""


def leaks(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """Memories that grew like a leak, as the trainer told of them."""
    return [leak for row in rows for leak in (row.get("observed") or {}).get("leaks") or []]


def peak_gib(rows: Sequence[Row], name: Literal["peak_device_bytes", "peak_host_bytes"]) -> float | None:
    """The highest figure of a meter in GiB; None where the rows have none."""
    told = [value for row in rows if (value := BY_NAME[name].read(row)) is not None]
    return max(told) / 2**30 if told else None


def _phases(window: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in window for name in row.get("breakdown") or {}))


def _part(row: Row, name: str) -> float:
    return _number((row.get("breakdown") or {}).get(name)) or 0.0


def _total(window: Sequence[Row], name: str) -> float:
    return sum(_part(row, name) for row in window)


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(float(row[name]) for row in rows)


def _number_at(rows: Sequence[Row], path: Sequence[str]) -> float | None:
    """The newest number at a path."""
    for row in reversed(rows):
        found: Any = row
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if (value := _number(found)) is not None:
            return value
    return None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
