"""A plan as tables in the terminal. It and `render_search` need rich, which the container lacks."""

import math
from collections.abc import Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainyard.planner.fitted import Fitted
from trainyard.planner.results import CheckpointPlan, Configuration, Cost, Plan, figure, told_apart
from trainyard.spec.words import counted

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "workspace", "margin")
MAX_FITTING_ROWS = 8
MAX_REJECTED_ROWS = 3
"""Configurations shown; the chosen one always is."""


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """The plan on the console."""
    (console or Console()).print(render(plan))


def render(plan: Plan) -> Group:
    """Summary, ranked configurations, the chosen one's memory, and notes."""
    parts: list[Text | Fitted] = [Text.from_markup(_headline(plan)), _configurations(plan), _memory(plan.chosen)]
    parts += [Text(line) for line in _money(plan)]
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    return Group(*parts)


def _headline(plan: Plan) -> str:
    length = counted(plan.steps, "step") if plan.steps else "by epochs"
    length += f", {count_of(plan.tokens)} tokens" if plan.tokens else ""
    size = count_of(plan.params)
    where = f"{machines_of(plan)} ({counted(plan.num_gpus, 'rank')})"
    return f"[bold]{escape(plan.job)}[/bold]: {size} parameters, {length}, on {where}"


def machines_of(plan: Plan) -> str:
    """Where the job would run."""
    if plan.instance_type:
        return f"{plan.instance_count} x {plan.instance_type}"
    return f"{counted(plan.num_gpus, 'process')} here"


def count_of(number: int) -> str:
    """A number of parameters or tokens in a few signs: 15T, 1.31B, 2.02M, 123K."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{figure(number / unit)}{name}"
    return str(number)


def usd_of(amount: float | None) -> str:
    """Dollars and cents; unknown where there is no price, or where the run does not finish."""
    if amount is None or not math.isfinite(amount):
        return "unknown"
    return f"${amount:,.2f}" if amount >= 0.01 or not amount else "less than $0.01"


UNFINISHED = "does not finish"


def hours_of(hours: float | None) -> str:
    """Hours without their unit; in words where the run does not finish."""
    if hours is None:
        return "-"
    return figure(hours) if math.isfinite(hours) else UNFINISHED


def _configurations(plan: Plan) -> Fitted:
    return alternatives_table(_shown(plan), unit=plan.unit)


def alternatives_table(items: Sequence[Configuration], *, unit: str = "tokens") -> Fitted:
    """Configurations of the same machines, one a row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, right in (("", False), ("layout", False), ("batch", True), ("recompute", False), ("GiB", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for name in ("s/step", f"{unit}/s", "MFU", "hours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for item in items:
        style = "bold green" if item.chosen and item.fits is not False else "red" if item.fits is False else ""
        table.add_row(*_cells(item), style=style)
    return Fitted(table)


def _shown(plan: Plan) -> list[Configuration]:
    fitting = [item for item in plan.configurations if item.fits is not False]
    rejected = [item for item in plan.configurations if item.fits is False]
    kept = (*fitting[:MAX_FITTING_ROWS], *rejected[:MAX_REJECTED_ROWS])
    return [item for item in plan.configurations if item.chosen or item in kept]


def _cells(item: Configuration) -> tuple[str, ...]:
    time = item.time
    speed = ("-", "-", "-", "-")
    if time is not None:
        hours = figure(time.hours) if time.hours is not None else "-"
        speed = (figure(time.step_seconds), f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}", hours)
    batch = f"{item.micro_batch_size} x {item.gradient_accumulation_steps}"
    memory = f"{item.memory.total_gib:.1f}"
    mark = "->" if item.chosen else ""
    return (mark, item.layout, batch, item.activation_checkpointing, memory, *speed, item.verdict)


def _memory(item: Configuration) -> Fitted:
    table = Table(box=None, pad_edge=False, header_style="bold", title=None)
    table.add_column("GiB per GPU")
    for name in (*MEMORY_PARTS, "total", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    use = item.memory
    values = [f"{getattr(use, f'{part}_gib'):.2f}" for part in MEMORY_PARTS]
    available = f"{use.available_gib:.1f}" if use.available_gib is not None else "?"
    table.add_row("worst rank", *values, f"{use.total_gib:.2f}", available)
    return Fitted(table)


def _money(plan: Plan) -> list[str]:
    lines = _saves(plan.checkpoint) if plan.checkpoint is not None else []
    host = plan.chosen.host
    have = f" of {host.available_gib:,.0f}" if host.available_gib is not None else ""
    lines.append(f"host memory: {host.total_gib:,.0f} GiB{have}, offloaded {host.offloaded_gib:,.0f}")
    if plan.cost is not None:
        lines += _dollars(plan, plan.cost)
    if plan.affordable is False:
        lines.append(f"NOT AFFORDABLE: {above_limits(plan)}")
    return lines


def above_limits(plan: Plan) -> str:
    """Which of the job's hours and dollars a run is above, and by what; "" where it keeps to both."""
    cost, said = plan.cost, []
    if cost is None:
        return ""
    if cost.expected_hours > plan.max_hours:
        need, have = told_apart(cost.expected_hours, plan.max_hours, (figure, "{:,.6g}".format, "{:,.9g}".format))
        need = f"{need} h" if math.isfinite(cost.expected_hours) else UNFINISHED
        said.append(f"{need} of compute.max_hours {have}")
    if plan.max_usd is not None and cost.planned_usd is not None and cost.planned_usd > plan.max_usd:
        said.append(f"{usd_of(cost.planned_usd)} of budget.max_usd {usd_of(plan.max_usd)}")
    return ", ".join(said)


def _saves(save: CheckpointPlan) -> list[str]:
    every = f"every {figure(save.interval_seconds / 60, 3)} min" if save.interval_seconds else "at the end only"
    tiers = ", ".join(
        f"{tier.name} {figure(tier.save_seconds, 3)}/{figure(tier.restore_seconds, 3)}/"
        f"{figure(tier.recovery_seconds, 3)}" + ("" if tier.within_objective else " (beyond 300)")
        for tier in save.tiers
    )
    return [
        f"checkpoints: {figure(save.size_gib, 3)} GiB, {every} (best: {figure(save.best_interval_seconds / 60, 3)} "
        f"min), saved in {figure(save.save_seconds, 3)} s ({save.tier}), training stalls "
        f"{figure(save.stall_seconds, 2)} s; a failure in {figure(save.mean_hours_between_failures)} h; goodput "
        f"{save.goodput:.1%}",
        f"seconds to save/restore/next step: {tiers}",
    ]


def _dollars(plan: Plan, cost: Cost) -> list[str]:
    if not math.isfinite(cost.expected_hours):
        return [f"cost: unknown: the run {UNFINISHED}; it fails more often than it saves: checkpoint.every_minutes"]
    limit = f" of {usd_of(plan.max_usd)}" if plan.max_usd is not None else ""
    dated = f", as of {cost.price_as_of}" if cost.price_as_of else ""
    time = f"{figure(cost.expected_hours)} of {figure(plan.max_hours)} h"
    lines = [f"cost: {usd_of(cost.planned_usd)}{limit}, {time} ({cost.price_basis}{dated})"]
    hours = f"{figure(cost.expected_hours_low)} to {figure(cost.expected_hours_high)} h"
    if cost.planned_usd_low is not None and cost.planned_usd_high is not None:
        hours += f", {usd_of(cost.planned_usd_low)} to {usd_of(cost.planned_usd_high)} at that price"
    lines.append(f"80% interval: {hours}; for the step's time and the failures")
    ways = (
        ("on demand", cost.usd_on_demand),
        ("spot", cost.usd_spot),
        ("capacity block", cost.usd_capacity_block),
        ("training plan", cost.usd_training_plan),
    )
    known = [f"{name} {usd_of(amount)}" for name, amount in ways if amount is not None]
    if known:
        tokens = f"; {usd_of(cost.usd_per_million_tokens)} a million tokens" if cost.usd_per_million_tokens else ""
        storage = f"; storage {usd_of(cost.storage_usd)} for {figure(cost.storage_gb_months, 3)} GB-months"
        lines.append(f"machines: {', '.join(known)}{storage}{tokens}")
    return lines
