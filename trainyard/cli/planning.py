"""`plan` and `predict`: what a job will need, before it costs anything."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.options import JobFile, JsonOption, SetOption
from trainyard.cli.output import check_page, console, write_page
from trainyard.errors import InputError

if TYPE_CHECKING:
    from trainyard.hardware import PriceBook
    from trainyard.planner import Plan, Search
    from trainyard.spec.job import JobSpec


def register(app: typer.Typer) -> None:
    """Put the verbs of this file into the command line."""
    app.command()(plan)
    # Whoever names a file is told that it is read from stdin.
    app.command(context_settings={"allow_extra_args": True})(predict)


DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Build one rank by the trainer's own code, and trace a step (needs torch).")
]
RankOption = Annotated[int | None, typer.Option("--rank", min=0, help="With --dry-run: which rank; default: 0.")]


SearchOption = Annotated[
    bool, typer.Option("--search", help="Look at other machines and layouts too: what is fastest, what is cheapest.")
]
InstancesOption = Annotated[
    str | None,
    typer.Option("--instances", metavar="TYPE,TYPE", help="With --search: these types; default: those with a price."),
]
MaxNodesOption = Annotated[
    int | None,
    typer.Option("--max-nodes", min=1, help="With --search: machines at most; default: 16, or twice the job's."),
]
DeadlineOption = Annotated[
    float | None,
    typer.Option("--deadline-hours", help="With --search: hours at most; default: compute.max_hours of the job."),
]
RegionOption = Annotated[str, typer.Option("--region", help="The region whose prices count.")]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the plan as a page with pictures.")
]
CurveOption = Annotated[
    Path | None,
    typer.Option("--loss-curve", metavar="FILE", help="With --target-loss: CSV of an earlier run, tokens,loss."),
]
TargetOption = Annotated[
    float | None, typer.Option("--target-loss", help="Plan up to this loss, by --loss-curve, not the job's own length.")
]


def plan(
    job: JobFile,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
    rank: RankOption = None,
    search: SearchOption = False,
    instances: InstancesOption = None,
    max_nodes: MaxNodesOption = None,
    deadline_hours: DeadlineOption = None,
    region: RegionOption = "us-east-1",
    html: HtmlOption = None,
    loss_curve: CurveOption = None,
    target_loss: TargetOption = None,
) -> None:
    """Say what a job will need: memory, time, dollars, and the layout that was chosen.

    Example: trainyard plan jobs/quickstart.yaml --set compute.instance_count=4

    --search looks at other machines, counts and layouts as well. Example: trainyard plan jobs/llama-7b.yaml --search
    --max-nodes 8 --deadline-hours 12

    --dry-run proves it: the rank's memory, messages and seconds, traced here, of any job; of a model that has no
    formulas it makes the whole plan. Example: trainyard plan
    jobs/llama-70b.yaml --dry-run --rank 127
    """
    if rank is not None and not dry_run:
        raise InputError("--rank: says which rank --dry-run traces; give both, or neither")
    asked = {"--instances": instances, "--max-nodes": max_nodes, "--deadline-hours": deadline_hours}
    target = {"--loss-curve": loss_curve, "--target-loss": target_loss}
    if dry_run:
        _trace(job, overrides, rank, {"--search": search or None, "--html": html, **asked, **target}, as_json)
        return
    _check_options(region, html, search, asked)
    from trainyard.planner.target import length_words, until_loss
    from trainyard.spec.job import load_job

    spec, book = load_job(job, overrides or []), _book()
    if (loss_curve is None) != (target_loss is None):
        raise InputError("--loss-curve and --target-loss: the cost of a loss needs both, or leave both out")
    if loss_curve is not None and target_loss is not None:
        spec, note = until_loss(spec, loss_curve, target_loss)
        print(f"note: {note}", file=sys.stderr)
    found = None
    if search:
        from trainyard import planner

        types = (instances or "").split(",")
        found = planner.search(
            spec, instances=types, max_nodes=max_nodes, deadline_hours=deadline_hours, region=region, book=book
        )
        if target_loss is not None and found.overrides:
            found = found.model_copy(update={"overrides": (*length_words(spec), *found.overrides)})
    if html is not None:
        _write_page(html, spec, region, book, found)
    _show(spec, region, book, found, as_json)
    _note_refusal(spec)


def _note_refusal(spec: "JobSpec") -> None:
    """A line on why a launch on this machine would be refused; a plan needs none of what the job reads."""
    from trainyard.launch.local_paths import local_job

    if spec.compute.backend != "local":
        return
    try:
        local_job(spec)
    except InputError as error:
        words = " ".join(str(error).split())  # names may have line ends
        print(f"note: `trainyard launch` would refuse it as it stands: {words}", file=sys.stderr)


def _trace(
    job: Path, overrides: list[str] | None, rank: int | None, others: Mapping[str, object], as_json: bool
) -> None:
    """`--dry-run`, to which no other option belongs."""
    from trainyard.cli.dry_running import plan_and_trace
    from trainyard.spec.job import load_job

    if (other := next((name for name, value in others.items() if value is not None), None)) is not None:
        raise InputError(f"{other}: not with --dry-run, which traces the job as it is")
    plan_and_trace(load_job(job, overrides or []), rank or 0, as_json=as_json)


def _check_options(region: str, html: Path | None, search: bool, asked: Mapping[str, object]) -> None:
    """InputError before the job is read, where what was `asked` of a search is wrong or there is no search."""
    from trainyard.operate.prices import check_region

    check_region(region)
    types = asked["--instances"]
    if types is not None and not str(types).replace(",", "").strip():
        raise InputError(f"--instances {types!r}: names no type; e.g. p5.48xlarge,p4d.24xlarge")
    if html is not None:
        check_page("--html", html)
    given = [name for name, value in asked.items() if value is not None]
    if given and not search:
        raise InputError(f"{given[0]}: belongs to --search; give both, or neither")


def _show(spec: "JobSpec", region: str, book: "PriceBook", found: "Search | None", as_json: bool) -> None:
    """What was found, or the plan of the job as it is: a table, or JSON."""
    from trainyard import planner

    if as_json:
        result = found or planner.plan(spec, region=region, book=book)
        print(result.model_dump_json(indent=2))
        return
    from trainyard.planner.render import render
    from trainyard.planner.render_search import render_search

    console().print(render_search(found) if found else render(planner.plan(spec, region=region, book=book)))


def _book() -> "PriceBook":
    """Refreshed prices before the shipped ones, none of them too old."""
    import datetime

    from trainyard.hardware import PriceBook
    from trainyard.launch.session import price_file

    return PriceBook.opened(price_file(), today=datetime.date.today())


def _write_page(file: Path, spec: "JobSpec", region: str, book: "PriceBook", found: "Search | None") -> None:
    from trainyard.planner.page import page_of

    job, drawn, refusal = _drawn(spec, region, book, found)
    text = page_of(job, drawn, book=book, search=found, refusal=refusal)
    write_page("--html", file, text)
    print(f"{file}: written", file=sys.stderr)


def _drawn(
    spec: "JobSpec", region: str, book: "PriceBook", found: "Search | None"
) -> "tuple[JobSpec, Plan | None, str | None]":
    """The job and its plan; where its own machines can't have it, as the search has chosen, if anything, and why."""
    from trainyard import planner
    from trainyard.planner.moving import changed

    try:
        return spec, planner.plan(spec, region=region, book=book), None
    except InputError as error:
        if found is None:
            raise
        refusal = str(error)
    if not found.overrides:
        return spec, None, refusal
    moved = changed(spec, found.overrides)
    return moved, planner.plan(moved, region=region, book=book), refusal


def predict(
    context: typer.Context,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Read one configuration per line of stdin.")] = False,
) -> None:
    """Predict memory and step time of many configurations: one JSON object per line in, one per line out.

    Exit code 2 where a line was wrong: its answer is {"error": ...}, the others are predicted all the same.

    Example: trainyard predict --jsonl < configurations.jsonl > predictions.jsonl
    """
    from trainyard import planner

    if not jsonl or context.args:
        given = shlex.join(context.args) or "FILE"
        raise InputError(f"predict reads configurations as JSON lines on stdin: trainyard predict --jsonl < {given}")
    errors = planner.Errors()
    # As bytes: what can't be decoded is one line's fault, in whatever locale.
    for line in planner.predict_jsonl(getattr(sys.stdin, "buffer", sys.stdin), errors):
        # Flushed line by line: a program may ask one question, read its answer, and ask the next.
        print(line, flush=True)
    if errors.any:
        raise typer.Exit(InputError.exit_code)
