"""`plan --dry-run`: one rank's step, traced by the trainer's own code, beside what the formulas say of it."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.cli.output import console, print_json
from trainyard.errors import InputError, JobFailedError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainyard.spec.job import JobSpec, ResolvedJob

GIB = 2**30
STATE = ("parameters", "gradients", "optimizer")
MOVING = ("activations", "temporaries")
"""Of the trace; the formulas call these activations and logits."""
_NAMED_MESSAGES = 20
"""Rows of the table; --json has all."""


def plan_and_trace(job: "JobSpec", rank: int, *, as_json: bool) -> None:
    """The plan, where there are formulas for the job, and the trace of one rank; with --json the trace is `dry_run`."""
    from trainyard import planner
    from trainyard.planner.render import render as render_plan

    try:
        result = planner.plan(job)
    except InputError:
        if job.task == "causal_lm":
            raise
        result = None  # a task without formulas can be traced all the same
    with console(stderr=True).status("tracing a step"):
        found = dry_run(job, rank)
    if as_json:
        print_json((json.loads(result.model_dump_json()) if result is not None else {}) | {"dry_run": found})
        return
    if result is not None:
        console().print(render_plan(result))
    console().print(render(found))


def dry_run(job: "JobSpec", rank: int) -> dict[str, Any]:
    """What `python -m trainer.dry_run` says of a rank, with `planned`: the formulas' bytes of the same rank, or None.

    Needs torch on this machine. InputError and JobFailedError are the trainer's own lines.
    """
    from trainyard import planner
    from trainyard.launch.local_backend import check_trainer, trainer_environment

    check_trainer()
    resolved = planner.resolve(job)
    with tempfile.TemporaryDirectory(prefix="trainyard-dry-run-") as folder:
        path = Path(folder) / "resolved_job.json"
        path.write_text(resolved.model_dump_json(), encoding="utf-8")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "trainer.dry_run", "--resolved-job", str(path), "--rank", str(rank)),
                *((["--model-config", json.dumps(known)]) if (known := known_configuration(job)) else []),
            ],
            env=trainer_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        traced: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return traced | {"planned_bytes": planned_bytes(job, resolved, rank)}
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")
    words = last.strip().removeprefix("trainyard: ")
    raise (InputError if done.returncode == InputError.exit_code else JobFailedError)(words)


def known_configuration(job: "JobSpec") -> dict[str, Any] | None:
    """For a source that is not on this machine: what its name tells. InputError where it tells nothing."""
    from trainyard.planner.families import own_config_from_source
    from trainyard.planner.vision_language import config_of

    if job.model.source is None or (Path(job.model.source) / "config.json").is_file():
        return None
    if job.task == "causal_lm":
        return dict(own_config_from_source(job.model.source))
    try:
        return dict(config_of(job))
    except InputError:
        raise InputError(
            f"--dry-run: model.source: {job.model.source} is not on this machine; give a folder with its config.json"
            " (--set model.source=FOLDER): of the weights nothing is read"
        ) from None


def planned_bytes(job: "JobSpec", resolved: "ResolvedJob", rank: int) -> dict[str, float] | None:
    """The closed form's bytes of that rank, by the trace's categories; None for a model without formulas."""
    from trainyard.planner.formulas import formulas_of
    from trainyard.planner.reading import layout_of

    try:
        formulas = formulas_of(job)
    except InputError:
        return None
    layout = layout_of(
        job,
        resolved.parallelism,
        micro_batch=resolved.micro_batch_size,
        num_micro_batches=resolved.gradient_accumulation_steps,
        recompute=resolved.activation_checkpointing,
    )
    place = rank // (resolved.world_size // resolved.parallelism.pipeline)
    use = formulas.rank_memory(replace(layout, rank="worst"), place)
    return {
        **{name: getattr(use, name) for name in STATE},
        "activations": use.activations + use.logits,
        "buffers": use.buffers,
    }


def render(found: dict[str, Any]) -> "RenderableType":
    """Memory beside the closed form's, messages, notes."""
    from rich.console import Group
    from rich.text import Text

    place = ", ".join(f"{axis} {index}" for axis, index in found["place"].items() if index) or "the first of all axes"
    parts: list[RenderableType] = [
        Text(f"dry run: rank {found['rank']} of {found['world_size']} ({place}), {found['strategy']}", style="bold"),
        _memory_table(found),
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


def compared(found: dict[str, Any]) -> dict[str, int | None]:
    """The trace in the formulas' categories: gradients at their most, activations with all that backward makes."""
    traced = found["memory_bytes"]
    moving = sum(traced[name] for name in MOVING)
    return {**traced, "gradients": found["gradients_bytes"], "activations": moving}


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
