"""A plan as tables in the terminal. The one module of this package that needs rich, which the container lacks."""

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainyard.planner.plan import Configuration, Plan

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "workspace", "margin")
MAX_FITTING_ROWS = 8
MAX_REJECTED_ROWS = 3
"""Configurations shown; the chosen one always is."""


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """The plan on the console."""
    (console or Console()).print(render(plan))


def render(plan: Plan) -> Group:
    """Summary, ranked configurations, the chosen one's memory, and notes."""
    parts: list[Text | Table] = [Text.from_markup(_headline(plan)), _configurations(plan), _memory(plan.chosen)]
    parts += [Text(line) for line in _money(plan)]
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    return Group(*parts)


def _headline(plan: Plan) -> str:
    where = f"{plan.instance_count} x {plan.instance_type}" if plan.instance_type else f"{plan.num_gpus} processes here"
    length = f"{plan.steps:,} steps, {_count(plan.tokens)} tokens" if plan.steps and plan.tokens else "by epochs"
    size = _count(plan.params)
    return f"[bold]{escape(plan.job)}[/bold]: {size} parameters, {length}, on {where} ({plan.num_gpus} ranks)"


def _count(number: int) -> str:
    """1.31B, 2.02M, 123K."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:,.4g}{name}"
    return str(number)


def _usd(amount: float | None) -> str:
    if amount is None:
        return "unknown"
    return f"${amount:,.2f}" if amount >= 0.01 else "less than $0.01"


def _configurations(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, right in (("", False), ("layout", False), ("batch", True), ("recompute", False), ("GiB", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for name in ("s/step", "tokens/s", "MFU", "hours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for item in _shown(plan):
        style = "bold green" if item.chosen and item.fits is not False else "red" if item.fits is False else ""
        table.add_row(*_cells(item), style=style)
    return table


def _shown(plan: Plan) -> list[Configuration]:
    fitting = [item for item in plan.configurations if item.fits is not False]
    rejected = [item for item in plan.configurations if item.fits is False]
    kept = (*fitting[:MAX_FITTING_ROWS], *rejected[:MAX_REJECTED_ROWS])
    return [item for item in plan.configurations if item.chosen or item in kept]


def _cells(item: Configuration) -> tuple[str, ...]:
    time = item.time
    speed = ("-", "-", "-", "-")
    if time is not None:
        hours = f"{time.hours:,.4g}" if time.hours is not None else "-"
        speed = (f"{time.step_seconds:.4g}", f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}", hours)
    batch = f"{item.micro_batch_size} x {item.gradient_accumulation_steps}"
    memory = f"{item.memory.total_gib:.1f}"
    mark = "->" if item.chosen else ""
    return (mark, item.layout, batch, item.activation_checkpointing, memory, *speed, item.verdict)


def _memory(item: Configuration) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=None)
    table.add_column("GiB per GPU")
    for name in (*MEMORY_PARTS, "total", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    use = item.memory
    values = [f"{getattr(use, f'{part}_gib'):.2f}" for part in MEMORY_PARTS]
    available = f"{use.available_gib:.1f}" if use.available_gib is not None else "?"
    table.add_row("worst rank", *values, f"{use.total_gib:.2f}", available)
    return table


def _money(plan: Plan) -> list[str]:
    lines = []
    if plan.checkpoint is not None:
        save = plan.checkpoint
        every = f"every {save.interval_seconds / 60:.3g} min" if save.interval_seconds else "at the end only"
        lines.append(
            f"checkpoints: {save.size_gib:,.3g} GiB, {every} (best: {save.best_interval_seconds / 60:.3g} min), "
            f"saved in {save.save_seconds:.3g} s; goodput {save.goodput:.1%}"
        )
    if plan.cost is not None:
        cost = plan.cost
        limit = f" of {_usd(plan.max_usd)}" if plan.max_usd is not None else ""
        dated = f", as of {cost.price_as_of}" if cost.price_as_of else ""
        time = f"{cost.expected_hours:,.4g} of {plan.max_hours:,.4g} h"
        lines.append(f"cost: {_usd(cost.planned_usd)}{limit}, {time} ({cost.price_basis}{dated})")
        if cost.planned_usd_low is not None and cost.planned_usd_high is not None:
            between = f"{_usd(cost.planned_usd_low)} to {_usd(cost.planned_usd_high)}"
            lines.append(f"80% interval: {between}, for what is uncertain in the step's time, at that price")
    if plan.affordable is False:
        lines.append("NOT AFFORDABLE: above budget.max_usd or compute.max_hours")
    return lines
