"""`compare`: what was planned for a job beside what it did."""

from typing import TYPE_CHECKING

import typer

from trainyard.cli.jobs import place_and_id
from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JobId, JsonOption, TenantOption
from trainyard.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.console import Group

    from trainyard.launch.compare import Comparison, Line


def register(app: typer.Typer) -> None:
    """Put the verb of this file into the command line."""
    app.command()(compare)


def compare(
    job: JobId,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a job's plan, as its record keeps it, against what it did: step, memory, hours, goodput, dollars.

    Example: trainyard compare acme-stdlib-llama-20260131120000-1a2b
    """
    from trainyard.launch.compare import compare as compare_job
    from trainyard.launch.watch import record_now

    with console(stderr=True).status("asking"):
        place, job_id = place_and_id(job, environment, tenant)
        found = compare_job(place.located(record_now(place.store, place.backend, job_id)), place.s3)
    if as_json:
        print_json(found.document())
        return
    console().print(_shown(found))


def _shown(found: "Comparison") -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from trainyard.planner.fitted import Fitted

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "planned", "80%", "measured", "planned is"):
        table.add_column(name, justify="left" if name in ("", "planned is") else "right", no_wrap=name != "planned is")
    for line in (*found.lines, *found.breakdown):
        is_part = line in found.breakdown
        table.add_row(*_cells(line, is_part=is_part), style="dim" if is_part else "")
    medians = f"medians of {found.num_steps} steps" if found.num_steps > 1 else "of 1 step"
    parts: list[Fitted | Text] = [Text(f"{found.job_id}: {medians}"), Fitted(table)]
    return Group(*parts, *(Text(f"note: {note}", style="dim") for note in found.notes))


def _cells(line: "Line", *, is_part: bool) -> tuple[str, ...]:
    from trainyard.operate.job_report import compared

    name = f"  of a step: {line.name}, {line.unit}" if is_part else f"{line.name}, {line.unit}"
    return (name, *compared(line))
