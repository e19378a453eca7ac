"""A job on one screen while it runs: where it is, whether it learns, how fast, how safe, how dear."""

import itertools
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trainyard.cli.output import duration
from trainyard.cli.seen import Seen
from trainyard.cli.tables import state_text
from trainyard.launch.spending import WAITING, spent
from trainyard.launch.watch import Status

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
_ASKED_FOR = WAITING | {"Restarting"}
"""States in which a person wants to know for what; one that restarts has its machines."""


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """A line of blocks, each the mean of its part of the values, from the lowest to the highest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [statistics.fmean(values[one:other]) for one, other in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def view(current: Status, seen: Seen, *, now: datetime | None = None) -> Group:
    """The screen, from the record, its backend and what the logs have told so far."""
    now = now or datetime.now(UTC)
    record = current.record
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    since = (now - datetime.fromisoformat(record.states[-1].at)).total_seconds()
    state = Text.assemble(state_text(current.state), f"  for {duration(since)}", f", attempt {record.attempt.number}")
    facts.add_row("state", state)
    if why := waits_for(current):
        facts.add_row("waits", Text(why, overflow="fold"))
    facts.add_row("steps", _steps(current, seen))
    if seen.losses:
        facts.add_row("loss", f"{sparkline(list(seen.losses.values()))}  {seen.loss}")
    if seen.speed:
        facts.add_row("speed", _speed(record.plan, seen))
    facts.add_row("checkpoint", Text(_checkpoint(seen, now), overflow="fold"))
    if (money := spent(record, now=now)) is not None:
        facts.add_row("spent", Text(money.as_line(), overflow="fold"))
    if record.attempt.failure:
        facts.add_row("failure", Text(record.attempt.failure, style="red", overflow="fold"))
    head = Text(record.job_id, style="bold") if current.finished else Spinner("dots", Text(record.job_id, style="bold"))
    return Group(head, facts)


def waits_for(current: Status) -> str:
    """What a job that doesn't run waits for, in its backend's words; empty where it runs or has ended."""
    if current.state not in _ASKED_FOR:
        return ""
    return current.observation.note if current.observation and current.observation.note else current.advice


def _steps(current: Status, seen: Seen) -> Table:
    total = current.record.resolved.steps
    words = f"{seen.step:,}" + (f" of {total:,}  {seen.step / total:.0%}" if total else "")
    if (left := seen.seconds_left(total)) is not None and not current.finished:
        words += f"  {duration(left)} left"
    line = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=total or None, completed=seen.step, width=30, pulse=not total and not current.finished)
    line.add_row(bar, words)
    return line


def _speed(plan: dict[str, Any], seen: Seen) -> str:
    """Against the plan, where it knows the machine: of its step, as a plan's tokens have the padding in them. MFU is
    proportional to speed: the plan's, times that share."""
    speed = float(seen.speed)
    words = f"{speed:,.0f} {seen.unit}/s"
    chosen = next((item for item in plan.get("configurations", []) if item.get("chosen")), None) or {}
    time = chosen.get("time") or {}
    if time.get("step_seconds") and seen.step_seconds:
        share = float(time["step_seconds"]) / statistics.median(seen.step_seconds)
        words += f"  {share:.0%} of plan"
        if time.get("mfu"):
            words += f"  MFU {share * time['mfu']:.1%} (plan {time['mfu']:.1%})"
    return words


def _checkpoint(seen: Seen, now: datetime) -> str:
    failed = f"; {seen.save_failure}" if seen.save_failure else ""
    if seen.saved_step is None:
        return f"none yet{failed}"
    if seen.saved_at is None:
        return f"step {seen.saved_step:,}; its log doesn't say when{failed}"
    return f"step {seen.saved_step:,}, {duration(now.timestamp() - seen.saved_at)} ago{failed}"
