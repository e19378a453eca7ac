"""`plan --dry-run`: one rank's step, traced by the trainer's own code, beside what the formulas say of it."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainyard.cli.output import console, print_json
from trainyard.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainyard.planner import Plan
    from trainyard.planner.memory import Memory
    from trainyard.spec.job import JobSpec, ResolvedJob

GIB = 2**30
STATE = ("parameters", "gradients", "optimizer")
MOVING = ("activations", "temporaries")
"""Of the trace; the formulas call these activations and logits."""
_NAMED_MESSAGES = 20
"""Rows of the table; --json has all."""


def plan_and_trace(job: "JobSpec", rank: int, *, as_json: bool) -> None:
    """The plan, and the trace of one rank; with --json the trace is `dry_run`. Where a language model has no formulas
    the plan is what ranks of each kind were traced to need."""
    from trainyard import planner
    from trainyard.planner.config_values import NotCoveredError
    from trainyard.planner.render import render as render_plan

    result, by_trace = None, False
    try:
        result = planner.plan(job)
    except NotCoveredError:
        by_trace = True
    except InputError:
        if job.task == "causal_lm":  # another task without formulas can be traced all the same
            raise
    with console(stderr=True).status("tracing a step"):
        found = dry_run(job, rank)
        if by_trace:
            result = _plan_by_trace(job, found)
    if as_json:
        print_json((json.loads(result.model_dump_json()) if result is not None else {}) | {"dry_run": found})
        return
    if result is not None:
        console().print(render_plan(result))
    console().print(render(found))


def _plan_by_trace(job: "JobSpec", found: dict[str, Any]) -> "Plan | None":
    """None under an engine of which a trace says too little; the trace's own note says why."""
    from trainyard.launch.tracing import plan_by_trace

    if found["memory_bytes"]["parameters"] is None:
        return None
    return plan_by_trace(job, known={found["rank"]: found})


def dry_run(job: "JobSpec", rank: int, world_size: int | None = None) -> dict[str, Any]:
    """What the trainer's own code says of a rank, with `planned_bytes`: the formulas' of the same rank, or None.

    Of a job whose machine is known also `seconds_of_step`: {"traced", "formulas"}, each {what: seconds} or None.
    Needs torch on this machine. InputError and JobFailedError are the trainer's own lines.
    """
    from trainyard import planner
    from trainyard.launch.tracing import trace_rank

    resolved = planner.resolve(job, world_size=world_size)
    traced = trace_rank(job, resolved, rank)
    return traced | {
        "planned_bytes": planned_bytes(job, resolved, rank),
        "seconds_of_step": seconds_of_step(job, resolved, traced),
    }


def seconds_of_step(job: "JobSpec", resolved: "ResolvedJob", traced: dict[str, Any]) -> dict[str, Any] | None:
    """What the step takes on the job's machines, by what was counted and by the formulas; None of machines that nobody
    knows, and under an engine whose messages a trace doesn't see."""
    from trainyard.planner.communication import fabric_of
    from trainyard.planner.formulas import formulas_of
    from trainyard.planner.reading import layout_of_resolved, machines_of
    from trainyard.planner.traced import traced_step

    machine = machines_of(job).instance
    if machine is None or machine.gpu is None or traced["messages"] is None:
        return None
    layout, links = layout_of_resolved(job, resolved), fabric_of(machine)
    counted = traced_step([traced], resolved.parallelism, layout, machine.gpu, links)
    try:
        reckoned = formulas_of(job).step(layout, machine.gpu, links).breakdown()
    except InputError:
        reckoned = None
    return {"traced": counted.breakdown(), "formulas": reckoned}


def planned_bytes(job: "JobSpec", resolved: "ResolvedJob", rank: int) -> dict[str, float] | None:
    """The closed form's bytes of that rank, by the trace's categories, gradients at their most; None for a model
    without formulas."""
    from trainyard.planner.memory import PARTS

    use = planned_memory(job, resolved, rank)
    if use is None:
        return None
    # How DeepSpeed updates is not traced.
    parts = use.at_peak if resolved.parallelism.engine == "torch" else {name: getattr(use, name) for name in PARTS}
    moving = {"activations": parts["activations"] + parts["logits"], "buffers": parts["buffers"]}
    return {name: getattr(use, name) for name in STATE} | moving


def planned_memory(job: "JobSpec", resolved: "ResolvedJob", rank: int) -> "Memory | None":
    """What the closed form says of that rank; None for a model without formulas."""
    from trainyard.planner.formulas import formulas_of
    from trainyard.planner.reading import layout_of_resolved

    try:
        formulas = formulas_of(job)
    except InputError:
        return None
    layout = layout_of_resolved(job, resolved)
    place = rank // (resolved.world_size // resolved.parallelism.pipeline)
    return formulas.rank_memory(replace(layout, rank="worst"), place)


def render(found: dict[str, Any]) -> "RenderableType":
    """Memory beside the closed form's, messages, notes."""
    from rich.console import Group
    from rich.text import Text

    place = ", ".join(f"{axis} {index}" for axis, index in found["place"].items() if index) or "the first of all axes"
    parts: list[RenderableType] = [
        Text(f"dry run: rank {found['rank']} of {found['world_size']} ({place}), {found['strategy']}", style="bold"),
        _memory_table(found),
        *([_time_table(found["seconds_of_step"])] if found["seconds_of_step"] else []),
    ]
    if found["messages"]:
        parts.append(_messages_table(found["messages"]))
    elif found["messages"] is not None:
        parts.append(Text("messages: none"))
    parts += [Text(f"note: {note}", style="dim") for note in found["notes"]]
    parts.append(Text(f"traced in {found['seconds']:.0f} s", style="dim"))
    return Group(*parts)


def _memory_table(found: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GiB of the rank")
    for name in ("traced", "formulas", "formulas against trace"):
        table.add_column(name, justify="right", no_wrap=True)
    traced, planned = compared(found), found["planned_bytes"]
    rows = [*STATE, "activations", "buffers"]
    for name in rows:
        table.add_row(name, *_cells(traced[name], planned and planned[name]))
    peak = found["peak_bytes"]
    moment = f"peak, in {found['peak_phase']}" if peak is not None else "peak"
    table.add_row(moment, "not traced" if peak is None else f"{peak / GIB:.2f}", "", "")
    return table


def _time_table(seconds: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("seconds of a step, this rank the slowest")
    for name in ("traced", "formulas", "formulas against trace"):
        table.add_column(name, justify="right", no_wrap=True)
    traced, planned = seconds["traced"], seconds["formulas"]
    for name, value in traced.items():
        if value or (planned and planned[name]):
            table.add_row(name.replace("_", " "), *_second_cells(value, planned and planned[name]))
    table.add_row("all", *_second_cells(sum(traced.values()), planned and sum(planned.values())), style="bold")
    return table


def _second_cells(traced: float, planned: float | None) -> tuple[str, str, str]:
    said = "no formula" if planned is None else f"{planned:.3g}"
    difference = f"{planned / traced - 1:+.0%}" if planned is not None and traced else ""
    return f"{traced:.3g}", said, difference


def compared(found: dict[str, Any]) -> dict[str, int | None]:
    """The trace in the formulas' categories: gradients at their most, activations with all that backward makes.

    What there is of gradients at the peak beyond those that stay is on its way to them, in buffers.
    """
    traced, gradients = found["memory_bytes"], found["gradients_bytes"]
    moving = sum(traced[name] for name in MOVING)
    more = 0 if gradients is None else max(traced["gradients"] - gradients, 0)
    buffers = None if traced["buffers"] is None else traced["buffers"] + more
    return {**traced, "gradients": gradients, "activations": moving, "buffers": buffers}


def _cells(traced: int | None, planned: float | None) -> tuple[str, str, str]:
    told = "not traced" if traced is None else f"{traced / GIB:.3f}"
    said = "no formula" if planned is None else f"{planned / GIB:.3f}"
    difference = f"{planned / traced - 1:+.1%}" if planned is not None and traced else ""
    return told, said, difference


def _messages_table(messages: list[dict[str, Any]]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("messages a step", "left"), ("along", "left"), ("type", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # one of rich's words
    for name in ("ranks", "number", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    largest = sorted(messages, key=lambda message: -message["bytes"])
    for message in largest[:_NAMED_MESSAGES]:
        table.add_row(
            message["name"],
            message["axis"],
            message["dtype"],
            str(message["ranks"]),
            f"{message['count']:,}",
            f"{message['bytes'] / GIB:.4g}",
        )
    return table
