"""A job's whole life as one page: curves, where the time went, restarts, plan against measurement, money.

The page is whole by itself: no script, no font, no request to anywhere.
"""

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import yaml

from trainyard.errors import InputError
from trainyard.launch.compare import Comparison, Line, compare, metrics_rows
from trainyard.launch.goodput import Goodput, goodput
from trainyard.launch.record import TERMINAL_STATES, JobRecord, StateChange
from trainyard.launch.spending import Spent, spent
from trainyard.planner import results
from trainyard.planner.drawing import COLOURS, WIDTH, Bar, Curve, Mark, Picture, Scale, line_chart, stacked_bars
from trainyard.planner.page import STYLE
from trainyard.spec.meters import BY_NAME
from trainyard.spec.words import counted

Rows = Sequence[Mapping[str, Any]]

SMOOTHED_STEPS = 25
"""Of a loss curve's mean line: a twentieth of the run where that is fewer."""
STATE_COLOURS = {
    "Training": "#4a9d5b",
    "Uploading": "#3a9fb0",
    "Downloading": "#3b6fb6",
    "Interrupted": "#b5493f",
    "Queued": "#b3a53a",
    "Stopping": "#7d62a8",
}
OTHER_STATE = "#c4c8cc"
NOTHING = "<p class=note>The job has told nothing of this yet.</p>"


def report_of(record: JobRecord, s3: Any, *, now: datetime | None = None) -> str:
    """The page as HTML, from the record, metrics.jsonl and goodput.jsonl; as far as the job has come."""
    now = now or datetime.now(UTC)
    rows, reached, money = metrics_rows(record, s3), goodput(record, s3, now=now), spent(record, now=now)
    try:
        found: Comparison | None = compare(record, s3)
    except InputError:
        found = None
    restarts = restarts_of(rows)
    sections = (
        ("Loss", _loss(rows, restarts), "Pale: each step's; dark: their running mean; dots: validation."),
        ("Speed", _speed(record, rows, restarts), "All ranks together. Red: the plan, with its 80 % interval."),
        *_gpus(rows, restarts),
        ("Where a step's time goes", _breakdown(found), "Medians of the warm steps."),
        ("Time line", timeline(record.states, now), _restart_words(record, restarts)),
        ("Where the job's time went", _goodput(reached), reached.as_line() if reached else ""),
        ("Gradient norm", _column("gradient norm", "grad_norm", rows, restarts, COLOURS[4]), ""),
        ("Learning rate", _column("learning rate", "learning_rate", rows, restarts, COLOURS[5]), ""),
    )
    pictures = "".join(
        f"<h2>{escape(title)}</h2>{picture or NOTHING}" + (f"<p class=note>{escape(words)}</p>" if words else "")
        for title, picture, words in sections
    )
    spec = yaml.safe_dump(record.spec.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(record.job_id)}</title>'
        f"<style>{STYLE} pre {{ font-size: 0.8em; overflow-x: auto; }}</style></head><body>"
        f"<h1>{escape(record.job_id)}</h1>{_facts(record, rows, money, now)}"
        f"<h2>Predicted against measured</h2>{_comparison(found)}{pictures}"
        f"<details><summary>The job's file</summary><pre>{escape(spec)}</pre></details></body></html>\n"
    )


def restarts_of(rows: Rows) -> list[Mark]:
    """The first step of each attempt but the first."""
    first: dict[int, float] = {}
    for row in rows:
        first.setdefault(int(row.get("attempt", 1)), float(row.get("step", 0)))
    return [Mark(step, f"start {attempt}") for attempt, step in sorted(first.items()) if attempt != min(first)]


def _facts(record: JobRecord, rows: Rows, money: Spent | None, now: datetime) -> str:
    compute, last = record.resolved.spec.compute, rows[-1] if rows else {}
    where = "this machine" if record.backend == "local" else f"{record.resolved.num_hosts} x {compute.instance_type}"
    cost = record.plan.get("cost") or {}
    planned = cost.get("planned_usd")
    facts = {
        "state": f"{record.state}, attempt {record.attempt.number}"
        + (f": {record.attempt.failure}" if record.attempt.failure else ""),
        "launched": f"{record.attempts[0].created_at}" + (f" by {record.launched_by}" if record.launched_by else ""),
        "ran on": f"{where}, {counted(record.resolved.world_size, 'process')}{', spot' if compute.spot else ''}",
        "steps": f"{last.get('step', 0):,} of {record.resolved.steps:,}" if record.resolved.steps else last.get("step"),
        "cost": money.as_line() if money else "not known: this machine, or no price in its plan",
        "planned cost": f"{planned:,.2f} USD ({cost.get('price_basis')})" if planned is not None else "not planned",
        "image": record.image or "none",
        "checkpoints": record.checkpoint_destination,
        "as of": now.isoformat(timespec="seconds"),
    }
    cells = "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<table>{cells}</table>"


def _points(rows: Rows, name: str) -> list[tuple[float, float]]:
    found = [(row.get("step"), row.get(name)) for row in rows]
    return [(float(x), float(y)) for x, y in found if isinstance(x, int | float) and isinstance(y, int | float)]


def _loss(rows: Rows, restarts: Sequence[Mark]) -> str:
    points = _points(rows, "loss")
    window = max(1, min(SMOOTHED_STEPS, len(points) // 20))
    half = window // 2
    mean = [
        (point[0], statistics.fmean(y for _, y in points[max(0, index - half) : index + half + 1]))
        for index, point in enumerate(points)
    ]
    curves = (
        Curve("training", points, COLOURS[0], pale=half > 0),
        Curve(f"mean of {2 * half + 1} steps", mean if half else [], COLOURS[0]),
        Curve("validation", _points(rows, "validation_loss"), COLOURS[1], dots=True),
    )
    return line_chart("loss", "step", curves, marks=restarts, height=320)


def _column(title: str, name: str, rows: Rows, restarts: Sequence[Mark], colour: str) -> str:
    curve = Curve(title, _points(rows, name), colour)
    return line_chart(title, "step", [curve], marks=restarts, height=200)


def _speed(record: JobRecord, rows: Rows, restarts: Sequence[Mark]) -> str:
    unit = "images" if any("images" in row for row in rows) else "tokens"
    points = [
        (float(row["step"]), row[unit] / row["step_seconds"]) for row in rows if row.get("step_seconds") and unit in row
    ]
    chosen = next((item for item in record.plan.get("configurations", []) if item.get("chosen")), None) or {}
    time, level = chosen.get("time") or {}, None
    if time.get("tokens_per_second"):
        planned, step = time["tokens_per_second"], time["step_seconds"]
        level = (planned, planned * step / time["step_seconds_high"], planned * step / time["step_seconds_low"])
    curve = Curve(f"{unit} a second", points, COLOURS[2])
    return line_chart("speed", "step", [curve], marks=restarts, level=level, level_name="plan")


def _gpus(rows: Rows, restarts: Sequence[Mark]) -> list[tuple[str, str, str]]:
    """Of a job on GPUs, and no picture of any other: a CPU has none of it."""
    curves = []
    for name, meter, colour in (("in use", "gpu_utilization", 0), ("MFU", "mfu", 2), ("held back", "gpu_held_back", 3)):
        read = [(float(row["step"]), BY_NAME[meter].read(row)) for row in rows]
        points = [(step, value) for step, value in read if value is not None]
        curves += [Curve(name, points, COLOURS[colour])] if points else []
    if not curves:
        return []
    words = (
        "Shares of each observed window: of the time in which a kernel ran (mean of the GPUs), of the peak's FLOPs, "
        "of the time with clocks kept down by heat or power (worst GPU)."
    )
    return [("GPU use", line_chart("GPU use", "step", curves, marks=restarts, height=200), words)]


def _breakdown(found: Comparison | None) -> str:
    if found is None:
        return ""
    names = [line.name for line in found.breakdown]
    bars = []
    for kind in ("measured", "planned"):
        parts = [getattr(line, kind) or 0.0 for line in found.breakdown]
        if sum(parts):
            bars.append(Bar(kind, parts, after=f"{sum(parts):.3g} s", marked=kind == "measured"))
    return stacked_bars("a step's time", "s", names, bars) if bars else ""


def _goodput(reached: Goodput | None) -> str:
    if reached is None:
        return ""
    parts = {"kept steps": reached.useful_seconds, **reached.elsewhere}
    names = [name.replace("_", " ") for name, seconds in parts.items() if seconds > 0]
    values = [seconds for seconds in parts.values() if seconds > 0]
    return stacked_bars("the job's time", "s", names, [Bar("wall time", values, after=f"{reached.share:.0%} kept")])


def timeline(states: Sequence[StateChange], now: datetime) -> str:
    """Each attempt's states by the clock, one row an attempt."""
    spans = [
        (change, datetime.fromisoformat(change.at), now if following is None else datetime.fromisoformat(following.at))
        for change, following in zip(states, [*states[1:], None], strict=True)
    ]
    last = max((start for _, start, _ in spans), default=now)
    end = last if states and states[-1].state in TERMINAL_STATES else now
    begin = spans[0][1]
    attempts = sorted({change.attempt for change in states})
    picture = Picture(60 + 30 * len(attempts), "time line")
    whole = max(1.0, (end - begin).total_seconds())
    scale = Scale(0, whole, 110, WIDTH - 20)
    for change, start, until in spans:
        y = 34.0 + 30 * attempts.index(change.attempt)
        at, to = ((moment - begin).total_seconds() for moment in (start, min(until, end)))
        tip = f"{change.state}, {change.at}" + (f": {change.note}" if change.note else "")
        if change.state in TERMINAL_STATES:
            picture.dot(scale.at(at), y + 10, 5, "#111", tip)
            picture.text(max(scale.at(at), 180.0) - 8, y + 14, change.state, anchor="end", size=11, colour="#111")
            continue
        colour = STATE_COLOURS.get(change.state, OTHER_STATE)
        picture.box(scale.at(at), y, max(1.5, scale.at(to) - scale.at(at)), 20, colour, tip)
    for index, attempt in enumerate(attempts):
        picture.text(100, 48 + 30 * index, f"attempt {attempt}", anchor="end")
    _timeline_legend(picture, [change.state for change, *_ in spans])
    hours = whole >= 7200
    picture.text(110, picture.height - 10, begin.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"), colour="#666")
    length = f"{whole / 3600:.1f} h" if hours else f"{whole:.0f} s"
    picture.text(WIDTH - 20, picture.height - 10, f"+ {length}", anchor="end", colour="#666")
    return picture.svg()


def _timeline_legend(picture: Picture, states: Sequence[str]) -> None:
    x = 110.0
    for name in dict.fromkeys(states):
        if name in STATE_COLOURS:
            picture.box(x, 4, 12, 12, STATE_COLOURS[name])
            picture.text(x + 16, 14, name)
            x += 30 + 7 * len(name)
    if any(name not in STATE_COLOURS and name not in TERMINAL_STATES for name in states):
        picture.box(x, 4, 12, 12, OTHER_STATE)
        picture.text(x + 16, 14, "on its way")


def _restart_words(record: JobRecord, restarts: Sequence[Mark]) -> str:
    reclaims = sum(attempt.reclaims for attempt in record.attempts)
    count = len(record.attempts)
    words = [f"{counted(count, 'attempt')}, {counted(reclaims, 'spot reclaim')}"]
    words += [f"{mark.words} went on at step {mark.x:,.0f}" for mark in restarts]
    words += [f"attempt {attempt.number}: {attempt.failure}" for attempt in record.attempts if attempt.failure]
    return "; ".join(words) + "."


def _comparison(found: Comparison | None) -> str:
    if found is None:
        return "<p class=note>Nothing was measured yet: metrics.jsonl comes with the first checkpoint.</p>"
    head = "<tr><th></th><th>planned</th><th>80 %</th><th>measured</th><th>planned is</th></tr>"
    body = "".join(_compared(line) for line in found.lines)
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in found.notes)
    return f"<table>{head}{body}</table><p class=note>Medians of {counted(found.num_steps, 'step')}.</p>{notes}"


def compared(line: Line) -> tuple[str, str, str, str]:
    """A line for people: planned, its interval, measured, and how far the plan is off."""
    interval = "-" if line.low is None or line.high is None else f"{figure(line.low)} to {figure(line.high)}"
    words = line.verdict
    if line.error is not None:
        off = f"{abs(line.error):.0%} too {'high' if line.error > 0 else 'low'}"
        if line.error >= 9:  # 3,047 % too high says less
            off = f"{line.error + 1:,.0f} times as high"
        words = f"{off}, {words}" if words else off
    return figure(line.planned), interval, figure(line.measured), words


def figure(value: float | None) -> str:
    """Four digits that count, and no exponent where a number is large."""
    if value is None:
        return "-"
    return results.figure(value)


def _compared(line: Line) -> str:
    *cells, words = compared(line)
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return f"<tr><td>{escape(line.name)}, {escape(line.unit)}</td>{numbers}<td>{escape(words)}</td></tr>"
