"""A search as tables in the terminal."""

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainyard.planner.fitted import Command, Fitted
from trainyard.planner.render import alternatives_table, count_of, hours_of, usd_of
from trainyard.planner.results import Option, Search, figure
from trainyard.spec.words import counted

MAX_FITTING_ROWS = 14
MAX_REJECTED_ROWS = 4
"""Machines shown; the chosen one and the front always are."""


def render_search(found: Search) -> Group:
    """Machines ranked with the chosen one marked, other layouts of it, how to run it, and notes."""
    length = counted(found.steps, "step") if found.steps else "by epochs"
    limits = f"within {figure(found.deadline_hours)} h" + (f" and {usd_of(found.max_usd)}" if found.max_usd else "")
    headline = Text(
        f"{found.job}: {count_of(found.params)} parameters, {length}, {limits}; "
        f"{counted(found.num_layouts, 'layout')} on "
        f"{counted(len(found.options), 'machine')} in {found.region}"
    )
    parts: list[Text | Fitted | Command] = [headline, _machines(found)]
    chosen = next((item for item in found.options if item.chosen), None)
    if found.alternatives and chosen is not None:
        parts += [Text(f"other layouts of {chosen.instance_count} x {chosen.instance_type}:")]
        parts += [alternatives_table(found.alternatives, unit=found.unit)]
    if chosen is not None and chosen.price_as_of is not None:
        parts.append(
            Text(
                f"prices: {chosen.price_basis}, as of {chosen.price_as_of}; * is on the front: none is both"
                " faster and cheaper"
            )
        )
    if found.overrides:
        sets = (f"--set '{item}'" for item in found.overrides)
        parts.append(Command("run it: trainyard launch JOB.yaml", *sets))
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _machines(found: Search) -> Fitted:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("", "machines", "GPUs", "layout", "batch", "recompute", "GiB", "s/step", "MFU", "hours", "80%", "USD")
    for name in columns:
        left = name in ("", "machines", "layout", "recompute")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for item in _shown(found):
        style = "bold green" if item.chosen else "" if item.configuration.fits else "red"
        table.add_row(*_cells(item), style=style)
    return Fitted(table)


def _shown(found: Search) -> list[Option]:
    fitting = [item for item in found.options if item.configuration.fits]
    rejected = [item for item in found.options if not item.configuration.fits]
    kept = {id(item) for item in (*fitting[:MAX_FITTING_ROWS], *rejected[:MAX_REJECTED_ROWS])}
    return [item for item in found.options if item.chosen or item.on_front or id(item) in kept]


def _cells(item: Option) -> tuple[str, ...]:
    use = item.configuration
    time = use.time
    between = "-"
    low, high = item.expected_hours_low, item.expected_hours_high
    if low is not None and high is not None and math.isfinite(high):
        between = f"{figure(low, 3)}-{figure(high, 3)}"
    fits = bool(use.fits)
    return (
        "->" if item.chosen else "*" if item.on_front else "",
        f"{item.instance_count} x {item.instance_type}",
        str(item.num_gpus),
        use.layout,
        f"{use.micro_batch_size} x {use.gradient_accumulation_steps}",
        use.activation_checkpointing,
        f"{use.memory.total_gib:.1f}",
        figure(time.step_seconds) if fits and time else "-",
        f"{time.mfu:.1%}" if fits and time else "-",
        hours_of(item.expected_hours),
        between,
        "-" if not fits else usd_of(item.usd),
        item.verdict,
    )
