"""`trainyard tenant add|show|logs|remove`: a tenant comes into an environment file, is looked at, and leaves."""

import contextlib
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.options import JsonOption
from trainyard.cli.output import console, print_json, turner
from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.spec.words import counted

if TYPE_CHECKING:
    from pathlib import Path

    from trainyard.hardware import BaseCost
    from trainyard.operate.tenants.preview import Preview
    from trainyard.operate.tenants.removal import Report
    from trainyard.spec.platform import EnvironmentSpec

app = typer.Typer(help="Tenants of an environment: add, show, logs, remove.", no_args_is_help=False)

EnvironmentArgument = Annotated[
    str, typer.Argument(metavar="ENV.yaml", help="The environment file, or a name for environments/<name>.yaml.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]
EndedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ended",
        metavar="JOB",
        help="A job that can't run any longer, though its cluster gives no answer. May be repeated.",
    ),
]


@app.callback(invoke_without_command=True)
def _no_verb(context: typer.Context) -> None:
    """Tenants of an environment: add, show, logs, remove."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def add(
    environment: EnvironmentArgument,
    name: NameArgument,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME=TYPE[,TYPE]:MAX", help="A queue, e.g. gpu=ml.p5.4xlarge:4; repeatable."),
    ] = None,
    guarantee: Annotated[
        list[str] | None,
        typer.Option("--guarantee", metavar="TYPE:N", help="With submission: queue, machines of its own; repeatable."),
    ] = None,
    monthly_usd: Annotated[float | None, typer.Option("--monthly-usd", help="Its budget.")] = None,
    notify: Annotated[list[str] | None, typer.Option("--notify", help="Who hears of it; may be repeated.")] = None,
    cost_center: Annotated[str | None, typer.Option("--cost-center", help="Who pays.")] = None,
    like: Annotated[str | None, typer.Option("--like", metavar="TENANT", help="Take what isn't given from it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a tenant's entry into the environment file, and show what deploying it would make and cost.

    The file keeps its comments and order. Nothing is deployed: trainyard deploy ENV.yaml --tenant NAME does that.

    Example: trainyard tenant add environments/dev.yaml vision --queue gpu=ml.g6e.12xlarge:1 --monthly-usd 900 --notify
    vision@example.com
    """
    from trainyard.launch.place import environment_file
    from trainyard.launch.session import checkout_root
    from trainyard.operate.tenants import entry
    from trainyard.operate.tenants.preview import preview
    from trainyard.spec.platform import load_environment

    path = environment_file(environment)
    spec = load_environment(path)
    if name in spec.tenants:
        raise InputError(f"{path}: tenant {name} is there already; `trainyard tenant show {environment} {name}`")
    wanted = _entry(spec, queue or [], monthly_usd, notify or [], cost_center, like)
    if guarantee:
        wanted["share"] = {**wanted.get("share", {}), "guaranteed": dict(map(_guarantee, guarantee))}
    text = entry.with_tenant(entry.read_text(path), name, wanted, str(path))
    with _spinner("synthesizing the environment without and with the tenant"):
        _, difference = preview(path, text, checkout_root())
    if not dry_run:
        entry.replace_file(path, text)
    if as_json:
        print_json(
            {"environment": spec.name, "tenant": name, "entry": wanted, "written": not dry_run}
            | {"preview": difference.document()}
        )
        return
    _print_preview(difference)
    deploy = f"trainyard deploy {environment} --tenant {name}"
    print(f"{path}: not written (--dry-run)" if dry_run else f"{path}: tenant {name} written; deploy it: {deploy}")


@app.command()
def show(environment: EnvironmentArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Show what a tenant has: its network, queues, budget and policy; whether it is deployed, and its base cost.

    Example: trainyard tenant show environments/production.yaml language
    """
    from trainyard.launch.contract import check_tenant
    from trainyard.launch.place import environment_file
    from trainyard.launch.session import open_account
    from trainyard.operate.tenants import survey
    from trainyard.spec.platform import load_environment

    path = environment_file(environment)
    spec = load_environment(path)
    check_tenant(spec, name, str(path))
    found, why = None, ""
    with _spinner("asking the account"):
        try:
            found = survey.state(open_account(spec), spec, name)
        except TrainyardError as error:  # without credentials the file can still be read
            why = str(error)
    if as_json:
        print_json(survey.document(spec, name, found, why))
        return
    _print_settings(spec, name)
    if found is None:
        print(f"state: unknown: {why}")
        return
    for stack, status in found.stacks.items():
        print(f"stack {stack}: {status}")
    print(f"contract: {found.contract}")
    if found.cost is not None:
        _print_cost(found.cost)


@app.command()
def logs(
    environment: EnvironmentArgument,
    name: NameArgument,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="The connections that its security groups refused, instead.")
    ] = False,
    hours: Annotated[float, typer.Option("--hours", help="How far back.", min=0.01, max=24 * 731)] = 3.0,
) -> None:
    """Print what a tenant's functions wrote (broker, meter, detective, resumer): where its alarms' causes are told.

    Example: trainyard tenant logs environments/production.yaml language --hours 12
    """
    from trainyard.launch.contract import check_tenant
    from trainyard.launch.place import environment_file
    from trainyard.launch.session import open_account
    from trainyard.operate.tenants.logs import function_lines, refused_connections
    from trainyard.spec.platform import load_environment

    path = environment_file(environment)
    spec = load_environment(path)
    check_tenant(spec, name, str(path))
    read, what = (refused_connections, "no refused connection") if rejected else (function_lines, "no line")
    is_empty = True
    for line in read(open_account(spec), spec, name, hours=hours):
        is_empty = False
        print(line)
    if is_empty:
        print(
            f"{what} of tenant {name} in the last {counted(hours, 'hour')}; --hours N looks further back",
            file=sys.stderr,
        )


@app.command()
def remove(
    environment: EnvironmentArgument,
    name: NameArgument,
    confirm: Annotated[
        str | None,
        typer.Option("--confirm", metavar="NAME", help="The tenant's name again: do it. Else: only the plan."),
    ] = None,
    ended: EndedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what removing a tenant would delete and keep; with --confirm, do it and write a report of what is left.

    The tenant's `removal` says whether its data stays (retain) or goes with its keys (shred), and whether it is copied
    elsewhere first. An interrupted removal is finished by the same command.

    Example: trainyard tenant remove environments/dev.yaml vision --confirm vision
    """
    from trainyard.launch.contract import check_tenant
    from trainyard.launch.place import environment_file
    from trainyard.launch.session import open_account, state_root
    from trainyard.operate.tenants import entry, removal
    from trainyard.spec.platform import load_environment

    path = environment_file(environment)
    spec = load_environment(path)
    check_tenant(spec, name, str(path))
    if confirm not in (None, name):
        raise InputError(f"--confirm {confirm}: is not the tenant's name, {name}; nothing was changed")
    entry.without_tenant(entry.read_text(path), name, str(path))  # refused before anything is deleted
    with _spinner("asking the account") as spinner:
        account = open_account(spec)
        planned = removal.plan(account, spec, name, state_root(), ended or ())
        report = None
        if confirm is not None:
            report = removal.remove(account, planned, state_root(), spinner)
    if report is None:
        _print_plan(planned, as_json)
        return
    _tell_removed(report, path, as_json)


def _tell_removed(report: "Report", path: "Path", as_json: bool) -> None:
    """Keep and print what was done, and take the entry out; JobFailedError where either can't be. What is gone is gone,
    so the report comes first, and whatever befalls the file is told after it."""
    from trainyard.launch.session import state_root
    from trainyard.operate.tenants import removal

    name, kept, open_ends = report.tenant, None, []
    try:
        kept = removal.write_report(report, state_root())
    except OSError as error:
        where = f"{error.filename or state_root()}: {error.strerror}"
        open_ends.append(f"the report can't be kept ({where}); keep what was printed")
    try:
        _take_out(path, name)
    except InputError as error:
        open_ends.append(f"its entry is still in the file ({error}); take it out by hand")
    if as_json:
        print_json({**_document(report), "report": str(kept) if kept else None})
    else:
        for line in report.lines():
            print(line)
        print(f"report: {kept or 'not kept'}")
    if open_ends:
        raise JobFailedError(f"tenant {name} is removed, but {'; and '.join(open_ends)}")
    if not as_json:
        print(f"{path}: the entry of {name} is taken out")


def _take_out(path: "Path", name: str) -> None:
    """The file is read again: a removal takes long, and others edit it meanwhile, or take the entry out themselves."""
    from trainyard.operate.tenants import entry
    from trainyard.spec.platform import load_environment

    if name in load_environment(path).tenants:
        entry.replace_file(path, entry.without_tenant(entry.read_text(path), name, str(path)))


def _entry(
    spec: "EnvironmentSpec",
    queues: list[str],
    monthly_usd: float | None,
    notify: list[str],
    cost_center: str | None,
    like: str | None,
) -> dict[str, Any]:
    """The entry as it will stand in the file; the spec's own validation says what is wrong with the values."""
    from trainyard.launch.contract import check_tenant
    from trainyard.operate.tenants.entry import queue_of

    if monthly_usd is not None and not math.isfinite(monthly_usd):  # equal to nothing, itself included, once it is read
        raise InputError(f"--monthly-usd {monthly_usd:g}: must be dollars a month, above 0")
    model: dict[str, Any] = {}
    if like is not None:
        check_tenant(spec, like, "--like")
        model = spec.tenant(like).model_dump(mode="json", exclude_unset=True)
        model.pop("cluster", None)  # capacity that was bought for the one is not the other's
    budget = dict(model.get("budget", {}))
    budget |= {"monthly_usd": monthly_usd} if monthly_usd is not None else {}
    budget |= {"notify": notify} if notify else {}
    missing = [
        option for option, key in (("--monthly-usd", "monthly_usd"), ("--notify", "notify")) if key not in budget
    ]
    missing += [] if queues or "queues" in model else ["--queue"]
    if missing:
        raise InputError(
            f"{', '.join(missing)}: missing; give it, or --like TENANT to take what isn't given from another"
        )
    model |= {"network_index": _free_index(spec), "budget": budget}
    model |= {"queues": dict(map(queue_of, queues))} if queues else {}
    model |= {"cost_center": cost_center} if cost_center is not None else {}
    first = [key for key in ("network_index", "cost_center") if key in model]
    return {key: model[key] for key in (*first, *(key for key in model if key not in first))}


def _free_index(spec: "EnvironmentSpec") -> int:
    """The block after the last one in use, as those between may be a removed tenant's; the first free where none is.

    Of a removed tenant that had the last block nothing is known any more: its block is given out again. That matters
    only where its VPC was retained and both are to be peered.
    """
    used = {tenant.network_index for tenant in spec.tenants.values()}
    if max(used) + 1 < spec.network.num_blocks:
        return max(used) + 1
    free = sorted(set(range(spec.network.num_blocks)) - used)
    if not free:
        raise InputError(
            f"environment {spec.name}: every block of {spec.network.cidr} ({spec.network.num_blocks}) is taken; "
            "use another environment for more tenants, as a range can't grow under deployed networks"
        )
    return free[0]


def _guarantee(text: str) -> tuple[str, int]:
    kind, colon, number = text.rpartition(":")
    if not (kind and colon and number.isdigit()):
        raise InputError(f"--guarantee {text}: must look like TYPE:COUNT, e.g. ml.p5.4xlarge:2")
    return kind, int(number)


@contextlib.contextmanager
def _spinner(text: str) -> "Any":
    """A spinner on a terminal; gives a function that changes its text."""
    status = console(stderr=True).status(text)
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with status:
        yield turner(status)


def _document(report: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report)


def _print_plan(planned: Any, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "tenant": planned.tenant,
                "policy": planned.policy,
                "export_to": planned.export_to,
                "stacks": dict(planned.stacks),
                "running_jobs": list(planned.running.jobs),
                "unanswered_jobs": dict(planned.running.unanswered),
                "untold_jobs": planned.running.untold,
                "held": [{**item.__dict__, "fate": planned.fate(item)} for item in planned.held],
                "contents": {bucket: inside.__dict__ for bucket, inside in planned.contents.items()},
                "unowned": planned.unowned(),
            }
        )
        return
    for line in planned.lines():
        print(line)
    for line in planned.running.lines():
        print(line)
    print(f"nothing was changed; to do it: add --confirm {planned.tenant}")


def _print_preview(difference: "Preview") -> None:
    for stack, count in difference.added.items():
        print(f"new stack {stack}: {counted(count, 'resource')}")
    for stack in difference.removed:
        print(f"stack no longer there: {stack}")
    for stack, ids in difference.changed.items():
        print(f"changed stack {stack}: {', '.join(ids)}")
    for loss in difference.lost:
        print(f"would be lost: {loss}")
    if not difference.changed:
        print("no other stack changes")
    _print_cost(difference.cost)


def _print_cost(cost: "BaseCost") -> None:
    dated = f"; oldest price as of {cost.oldest}" if cost.oldest else ""
    least = "at least " if cost.unknown else ""
    without = f", without {', '.join(cost.unknown)}: no price known there" if cost.unknown else ""
    sum_here = f"{least}{cost.known_usd_per_month:,.2f} USD a month in {cost.region}"
    print(f"base cost while nothing runs: {sum_here}{without}{dated}")
    for line in cost.lines:
        print(f"  {line.item}: {line.quantity:,.0f} {line.unit}: {line.amount}")
    print(f"  by use, not in the sum: {', '.join(kind.removeprefix('AWS::') for kind in cost.by_use)}")


def _print_settings(spec: "EnvironmentSpec", name: str) -> None:
    tenant = spec.tenant(name)
    print(f"tenant {name} of environment {spec.name} (account {spec.account}, {spec.region})")
    print(f"network: {spec.network.block(tenant.network_index)} (network_index {tenant.network_index})")
    storage = tenant.file_system
    print(f"file system: {storage.storage_gib} GiB at {storage.throughput_mb_per_s_per_tib} MB/s per TiB")
    for queue_name, queue in tenant.queues.items():
        print(f"queue {queue_name}: up to {queue.max_instances} of {', '.join(queue.instance_types)}")
    if spec.queued(name):
        parts = ", ".join(f"{count} {kind}" for kind, count in sorted(spec.guaranteed(name).items()))
        idle = "lent" if tenant.share.lend else "kept"
        print(f"share of the training queues: {parts}, {idle} while idle; the rest is borrowed")
    budget = tenant.budget
    hours = f" and {budget.monthly_gpu_hours:,.0f} GPU-hours" if budget.monthly_gpu_hours else ""
    ends = "are saved and stopped" if budget.when_spent == "stop" else "may finish"
    print(
        f"jobs: up to {counted(tenant.max_job_hours, 'hour')}; budget: {budget.monthly_usd:,.0f} USD{hours} a month,",
        end=" ",
    )
    print(f"after which running jobs {ends}")
    print(f"cost center: {tenant.cost_center}; data on removal: {spec.data_on_removal(name)}")
