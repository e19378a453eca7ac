"""`sweep`: many trials of one job with other settings, as ordinary jobs; one budget, losers stopped, one table."""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainyard.cli.jobs import (
    BackendOption,
    ForceOption,
    ProcessesOption,
    launch_job,
    load_for_backend,
    tenants_environment,
)
from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JsonOption, SetOption
from trainyard.cli.output import console, print_json
from trainyard.errors import InputError, JobFailedError
from trainyard.spec.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from trainyard.launch.place import Place, TenantAccess
    from trainyard.launch.record import JobRecord
    from trainyard.operate.sweep.record import SweepRecord, SweepStore
    from trainyard.operate.sweep.runner import Runner
    from trainyard.operate.sweep.standings import Standing, Standings
    from trainyard.spec.job import JobSpec

POLL_SECONDS = 10.0
"""Between two looks at jobs elsewhere: each is a few calls of AWS a trial."""
LOCAL_POLL_SECONDS = 1.0
DEFAULT_PARALLEL = 2

JobArgument = Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="The job file.", show_default=False)]
OverOption = Annotated[
    list[str] | None,
    typer.Option("--over", metavar="SECTION.KEY=V1,V2|log:LOW..HIGH", help="What trials differ in; may be repeated."),
]
SearchOption = Annotated[
    Literal["grid", "random", "optuna"], typer.Option("--search", help="Every combination, drawn, or learnt (TPE).")
]
TrialsOption = Annotated[int | None, typer.Option("--trials", min=1, help="How many at most; of a grid, the first.")]
ParallelOption = Annotated[int | None, typer.Option("--parallel", min=1, help="Trials at once; default: 2.")]
StopOption = Annotated[
    Literal["halving", "median", "none"], typer.Option("--stop-losers", help="Which rule stops trials early.")
]
MetricOption = Annotated[
    str, typer.Option("--metric", help="A key of metrics.jsonl, less is better: loss, validation_loss, ...")
]
CostOption = Annotated[
    float | None, typer.Option("--max-cost-usd", min=0.01, help="Of all trials together: by plan, then by meter.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="The sweep's name; default: made from the job's.")]
ResumeOption = Annotated[str | None, typer.Option("--resume", metavar="NAME", help="Go on with a sweep.")]
ShowOption = Annotated[str | None, typer.Option("--show", metavar="NAME", help="Only print a sweep's table.")]


def register(app: typer.Typer) -> None:
    """Put the verb of this file into the command line."""
    app.command()(sweep)


def sweep(
    context: typer.Context,
    job: JobArgument = None,
    over: OverOption = None,
    search: SearchOption = "grid",
    trials: TrialsOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    parallel: ParallelOption = None,
    stop_losers: StopOption = "halving",
    metric: MetricOption = "loss",
    max_cost_usd: CostOption = None,
    name: NameOption = None,
    resume: ResumeOption = None,
    show: ShowOption = None,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    backend: BackendOption = None,
    overrides: SetOption = None,
    processes: ProcessesOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Try a job with other settings: trials are ordinary jobs, the worse are stopped early, one table compares them.

    Ctrl-C ends this command and no job; --resume NAME goes on. Exit code 1 where no trial completed.

    Example: trainyard sweep jobs/tiny.yaml --over training.learning_rate=1e-3,5e-3 --backend local
    """
    from trainyard.operate.sweep.record import SweepStore

    given = resume or show
    if given is not None:
        if job is not None or over or (resume and show):
            raise InputError("--resume, --show: take the sweep's name alone; its record has the job and settings")
        _check_alone(context, "--resume" if resume else "--show")
        store = SweepStore(given)
        known = store.read()
        if not Path(known.directory).is_dir():
            raise InputError(
                f"sweep {given}: was begun in {known.directory}, which is gone; its job's paths begin there"
            )
        changed = {"parallel": parallel, "max_cost_usd": max_cost_usd}
        record = known.model_copy(update={name: value for name, value in changed.items() if value is not None})
        job_file = store.job_file
    else:
        if job is None or not over:
            raise InputError("sweep: needs JOB.yaml and --over SECTION.KEY=V1,V2; or --resume NAME (sweep --help)")
        options = _Options(search, trials, seed, parallel or DEFAULT_PARALLEL, stop_losers, metric, max_cost_usd)
        record = _new_record(job, over, name, options, environment, backend, overrides or [], processes, force)
        store, job_file = SweepStore(record.name), job
    begun_in = contextlib.chdir(record.directory) if given else contextlib.nullcontext()
    # Who only looks writes nothing, and may look while another process runs the sweep.
    with begun_in, contextlib.nullcontext() if show else store.held():
        runner = _runner(store, record, job_file, read_only=show is not None)
        if given is None:
            _begin(runner, job_file)
        if show is None:
            found = _run(runner)
        else:
            runner.look(everything=True)
            found = runner.standings()
    if as_json:
        print_json(found.document())
    else:
        console().print(_table(found))
    if show is None and not any(line.state == "Completed" for line in found.lines):
        raise JobFailedError(f"sweep {found.name}: no trial completed; `trainyard sweep --show {found.name}` says why")


ALONE = {"--resume": {"resume", "parallel", "max_cost_usd", "as_json"}, "--show": {"show", "as_json"}}
"""What may be given with them; all else is the record's."""


def _check_alone(context: typer.Context, verb: str) -> None:
    """InputError for an option that would be ignored."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and parameter.name not in ALONE[verb]:
            more = "--parallel, --max-cost-usd and --json" if verb == "--resume" else "--json"
            raise InputError(f"{parameter.opts[0]}: is not for {verb}, which takes the record's; allowed is {more}")


@dataclass(frozen=True)
class _Options:
    search: Literal["grid", "random", "optuna"]
    num_trials: int | None
    seed: int
    parallel: int
    stop_rule: Literal["halving", "median", "none"]
    metric: str
    max_cost_usd: float | None


def _new_record(
    job: Path,
    over: Sequence[str],
    name: str | None,
    options: _Options,
    environment: str,
    backend: str | None,
    overrides: Sequence[str],
    processes: int | None,
    force: bool,
) -> "SweepRecord":
    from trainyard.launch.record import utc_now
    from trainyard.operate.sweep.record import SweepRecord, default_name, new_token

    token = new_token()
    spec = load_for_backend(job, list(overrides), backend)
    if options.stop_rule == "halving" and spec.training.epochs is not None:
        raise InputError("--stop-losers halving: needs to know the steps, and training.epochs doesn't tell; use median")
    return SweepRecord(
        name=name or default_name(spec.name, token),
        token=token,
        directory=str(Path.cwd()),
        environment=environment,
        backend=backend,
        overrides=tuple(overrides),
        over=tuple(over),
        processes=processes,
        force=force,
        started_at=utc_now(),
        **options.__dict__,
    )


def _runner(store: "SweepStore", record: "SweepRecord", job_file: Path, *, read_only: bool = False) -> "Runner":
    from trainyard.operate.sweep.runner import Runner
    from trainyard.operate.sweep.search import search_of
    from trainyard.operate.sweep.space import parse_axes

    out = console(stderr=True)
    search = search_of(record.search, parse_axes(record.over), num_trials=record.num_trials, seed=record.seed)
    launcher = VerbLauncher(record, job_file)
    job_name = launcher.load("", ()).name
    return Runner(store, record, search, launcher, job_name, lambda words: out.print(words, markup=False), read_only)


def _begin(runner: "Runner", job_file: Path) -> None:
    """Check every trial, then write the sweep down."""
    from trainyard.operate.sweep.runner import check_budget, first_trials

    record = runner.record
    trials = first_trials(runner.search, runner.launcher, record.token, runner.job_name)
    check_budget(trials, runner.search.num_trials, record.max_cost_usd, force=record.force)
    # A launch that AWS refuses is tried again for minutes, which is for a sweep that is under way.
    runner.launcher.reach()
    runner.record = record.model_copy(update={"trials": trials})
    runner.store.create(runner.record, job_file.read_text(encoding="utf-8"))
    runner.say(f"sweep {record.name}: {counted(runner.search.num_trials, 'trial')}, {record.parallel} at once")


def _run(runner: "Runner") -> "Standings":
    is_here = runner.launcher.load("", ()).compute.backend == "local"
    seconds = LOCAL_POLL_SECONDS if is_here else POLL_SECONDS
    try:
        return runner.run(lambda: time.sleep(seconds))
    except KeyboardInterrupt:
        runner.say(f"its jobs go on; `trainyard sweep --resume {runner.record.name}` goes on with the sweep")
        raise


class VerbLauncher:
    """Trials by the ways of `trainyard launch`."""

    def __init__(self, record: "SweepRecord", job_file: Path) -> None:
        self._record = record
        self._job_file = job_file

    def load(self, name: str, overrides: Sequence[str]) -> "JobSpec":
        """See operate.sweep.runner.Launcher; an empty name leaves the job's own."""
        from trainyard.spec.checkpoint_names import place_for

        named = [f"name={name}"] if name else []
        given = [*self._record.overrides, *overrides, *named]
        # What stays behind was said of the job as the sweep began.
        spec = load_for_backend(self._job_file, given, self._record.backend, say=lambda _: None)
        if name:
            own = {"destination": place_for(name, spec.checkpoint.destination)}
            spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=own)})
        if spec.tracking.experiment is not None:
            return spec
        # Trials are there to be compared: one experiment for all of them, not one for each name.
        experiment = f"trainyard/{spec.tenant or 'local'}/{self._record.name}"
        return spec.model_copy(update={"tracking": spec.tracking.model_copy(update={"experiment": experiment})})

    def plan_usd(self, spec: "JobSpec") -> float | None:
        """See operate.sweep.runner.Launcher; asked where there is a budget to hold it against."""
        if self._record.max_cost_usd is None:
            return None
        from trainyard.launch.launcher import planned
        from trainyard.launch.model_config import learn_model

        if access := self._tenants_access(spec):
            learn_model(access.launcher.client("s3"), spec, access.contract)
        plan, _ = planned(spec)
        cost = plan.get("cost") or {}
        return cost.get("planned_usd")

    def reach(self) -> None:
        """See operate.sweep.runner.Launcher."""
        self._tenants_place(self.load("", ()))

    def _tenants_place(self, spec: "JobSpec") -> "Place | None":
        """Where the tenant's jobs live; None where they are this machine's."""
        access = self._tenants_access(spec)
        return None if access is None else access.place

    def _tenants_access(self, spec: "JobSpec") -> "TenantAccess | None":
        """The tenant, opened; None where the jobs are this machine's."""
        from trainyard.launch.place import open_tenant

        deployed = None if spec.tenant is None else tenants_environment(spec, self._record.environment)
        return None if deployed is None else open_tenant(deployed, spec.tenant, f"job {spec.name}")

    def launch(self, spec: "JobSpec") -> "tuple[Place, JobRecord]":
        """See operate.sweep.runner.Launcher."""
        record = self._record
        return launch_job(spec, record.environment, processes=record.processes, force=record.force)

    def find(self, spec: "JobSpec") -> "tuple[Place, JobRecord] | None":
        """See operate.sweep.runner.Launcher: on this machine, then at the tenant's."""
        from trainyard.launch.names import is_of_job
        from trainyard.launch.place import local_place

        there = self._tenants_place(spec)
        for place in (local_place(), *([there] if there else [])):
            for job_id in place.store.job_ids():
                if is_of_job(job_id, spec.tenant or "local", spec.name):
                    found = place.store.read(job_id).record
                    if found.spec.name == spec.name:
                        return place, found
        return None

    def place(self, job_id: str) -> "Place":
        """See operate.sweep.runner.Launcher."""
        from trainyard.launch.place import place_of

        return place_of(job_id, self._record.environment, self.load("", ()).tenant)


def _table(found: "Standings") -> "Table":
    from rich.table import Table

    money = "" if found.usd is None else f", {found.usd:,.2f} USD"
    of = "" if found.max_cost_usd is None else f" of {found.max_cost_usd:,.2f}"
    title = f"{found.name}: {found.metric} at step {found.equal_step}, which all have made{money}{of}"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, header_style="bold")
    for heading in (
        "",
        "trial",
        "settings",
        "state",
        "at equal step",
        "last",
        "step",
        "per second",
        "USD",
        "why",
        "job",
    ):
        right = heading in ("at equal step", "last", "step", "per second", "USD")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for line in found.lines:
        table.add_row(*_cells(line), style="bold" if line.is_best else "")
    return table


def _cells(line: "Standing") -> tuple[str, ...]:
    return (
        "*" if line.is_best else "",
        str(line.number),
        " ".join(f"{key}={value}" for key, value in line.settings.items()),
        line.state,
        _figure(line.value_at_equal_step),
        _figure(line.value),
        str(line.step) if line.step else "-",
        "-" if line.units_per_second is None else f"{line.units_per_second:,.0f}",
        "-" if line.usd is None else f"{line.usd:,.2f}",
        line.why or "-",
        line.job_id or "-",
    )


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if math.isfinite(value) else "diverged"
