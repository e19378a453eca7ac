"""`checkpoints list|show|verify|prune|copy`: what a job has saved."""

import difflib
import re
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
import typer.core

from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JsonOption, TenantOption, as_given
from trainyard.cli.output import console, print_json
from trainyard.errors import AwsAwayError, AwsRefusedError, InputError, JobFailedError
from trainyard.spec.words import counted, either

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainyard.launch.moved import Copied
    from trainyard.launch.place import Place
    from trainyard.launch.record import JobRecord
    from trainyard.spec.retention import Retention

DEFAULT_VERB = "list"
_OF_A_JOB = re.compile(r"s3://[^/]+/jobs/([^/]+)/*")
"""Where a tenant's job saves (trainyard.launch.names.checkpoint_destination)."""


class _ListByDefault(typer.core.TyperGroup):
    """`trainyard checkpoints JOB` lists, as it always did."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            meant = difflib.get_close_matches(args[0], self.commands, n=1)
            if meant and len(args) > 1 and not args[1].startswith("-"):
                raise typer.BadParameter(f"no such verb: {args[0]}; did you mean {meant[0]}?", ctx=ctx)
            args = [DEFAULT_VERB, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ListByDefault,
    help="List, show, verify, prune or copy a job's checkpoints. Without a verb: list. Every verb knows --json.",
    no_args_is_help=True,
)

CheckpointsOf = Annotated[
    str,
    typer.Argument(
        metavar="JOB|FOLDER",
        help="The job's id, or the folder (or s3:// prefix, with --tenant) that holds checkpoints/.",
        show_default=False,
    ),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="Of this step; default: the newest good one.")]


def register(parent: typer.Typer) -> None:
    """Put the verbs of this file into the command line."""
    parent.add_typer(app, name="checkpoints")


@app.command("list")
def list_(
    job: CheckpointsOf,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a job's checkpoints: step, size, and whether a resume would take it (it takes the newest good one).

    Names and sizes are held against the manifests, and no contents read: `verify` does that. Exit code 3 where S3
    refuses to show some (1 where a folder does): all are listed, those with the reason.

    Example: trainyard checkpoints list acme-stdlib-llama-20260131120000-1a2b
    """
    from trainyard.launch.checkpoints import list_checkpoints, refuse_unreadable

    with console(stderr=True).status("asking"):
        destination, s3, *_ = destination_of(job, environment, tenant)
        found = list_checkpoints(destination, s3)
    if as_json:
        print_json([checkpoint.as_json() for checkpoint in found])
    elif found:
        from trainyard.cli.tables import checkpoints_table

        console().print(checkpoints_table(found))
        if any(checkpoint.is_good for checkpoint in found):
            # A bit that has turned shows in no size.
            verify = f"trainyard checkpoints verify {shlex.quote(job)}{as_given(environment, tenant)}"
            print(f"names and sizes are as the manifests say; contents were not read: {verify}")
    else:
        print(_none_at(destination))
    refuse_unreadable(destination, found)


def _none_at(destination: str) -> str:
    from trainyard.launch.checkpoints import is_gone

    if not is_gone(destination):
        return "no checkpoint yet"
    if Path(destination).is_absolute():
        return f"no checkpoint: there is no {destination}"
    return (
        f"no checkpoint: there is no {destination} in {Path.cwd()}, and its record, an earlier trainyard's, doesn't say"
        " from where that path is (where the job was launched, on a Ray cluster where Ray was started): give its folder"
    )


@app.command()
def show(
    job: CheckpointsOf,
    step: StepOption = None,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one checkpoint: its shards with their hashes, and where the run stood.

    Example: trainyard checkpoints show acme-stdlib-llama-20260131120000-1a2b --step 500
    """
    from trainyard.launch.checkpoints import chosen

    with console(stderr=True).status("asking"):
        destination, s3, *_ = destination_of(job, environment, tenant)
        details = chosen(destination, s3, step).details()
    if as_json:
        print_json(details)
        return
    for name, value in details.items():
        if name == "shards":
            for shard in value:
                print(f"shard {shard['name']}  {shard['bytes']} bytes  sha256 {shard['sha256']}")
        elif name == "extra":
            for key, part in value.items():
                print(f"{key}: {part}")
        elif value not in ("", None):
            print(f"{name}: {value}")


@app.command()
def verify(
    job: CheckpointsOf,
    step: StepOption = None,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every shard again and compare it with its manifest; exit code 1 where a committed one is not whole.

    A save that was interrupted (no marker) is told, but no failure: a resume never reads it. Without --step: all. Exit
    code 3 where all that can be read are whole, and S3 refuses others.

    Example: trainyard checkpoints verify acme-stdlib-llama-20260131120000-1a2b
    """
    from trainyard.launch.checkpoints import chosen, list_checkpoints, looked_through, refuse_unreadable

    with console(stderr=True).status("reading") as spinner:
        destination, s3, *_ = destination_of(job, environment, tenant)
        asked = list_checkpoints(destination, s3) if step is None else [chosen(destination, s3, step)]
        found = []
        for checkpoint in asked:
            spinner.update(f"reading step {checkpoint.step}")
            found.append(looked_through(destination, s3, checkpoint))
    broken = [one for one in found if one.problem and one.is_readable and (one.committed or step is not None)]
    if as_json:
        print_json([checkpoint.as_json() for checkpoint in found])
    else:
        for checkpoint in found:
            print(f"step {checkpoint.step}: {checkpoint.problem or 'whole'}")
        if not found:
            print(_none_at(destination))
    if broken:
        steps = ", ".join(str(one.step) for one in broken)
        raise JobFailedError(
            f"{job}: {len(broken)} of {counted(len(found), 'checkpoint')} {either(len(broken), 'is', 'are')} "
            f"broken (step {steps})"
        )
    refuse_unreadable(destination, found)


@app.command()
def prune(
    job: CheckpointsOf,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, help="How many good ones stay, the newest; default: the job's.")
    ] = None,
    keep_every_steps: Annotated[
        int | None,
        typer.Option("--keep-every-steps", min=1, help="Those of every so many steps stay; with --keep-last."),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option("--keep-best", metavar="METRIC[:min|max[:NUM]]", help="The best stay; with --keep-last."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run/--yes", help="Only say what would go; --yes: remove it.")] = True,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which checkpoints the job's rules no longer keep, and broken ones older than the newest good one.

    With --yes they are removed, after the newest good one was read and verified. The rules are those of the job's
    checkpoint section; --keep-last and its companions replace them all, and a folder needs them.

    Example: trainyard checkpoints prune acme-stdlib-llama-20260131120000-1a2b --keep-last 2 --yes
    """
    from trainyard.launch import checkpoints

    asked = _asked_rules(keep_last, keep_every_steps, keep_best)
    with console(stderr=True).status("pruning"):
        where = destination_of(job, environment, tenant)
        if where.copied is not None:
            raise InputError(
                f"{job}: {where.copied}, and whose are to go is not known; name a folder in the job's place: trainyard"
                f" checkpoints prune {shlex.quote(str(where.copied.here))} --keep-last N"
            )
        rules = asked or where.rules
        if rules is None:
            raise InputError(f"{job}: a folder knows no job's rules; give --keep-last N")
        done = checkpoints.prune(where.destination, where.s3, rules=rules, dry_run=dry_run)
    removed = [checkpoint.step for checkpoint in done.removed]
    kept = [checkpoint.step for checkpoint in done.kept]
    if as_json:
        print_json({"removed": removed, "kept": kept, "freed_bytes": done.freed_bytes, "dry_run": dry_run})
        return
    verb = "would remove" if dry_run else "removed"
    hint = "; --yes removes" if dry_run and removed else ""
    print(f"{verb} {_steps(removed)} ({done.freed_bytes / 2**20:.1f} MiB), kept {_steps(kept)}{hint}")


def _asked_rules(keep_last: int | None, keep_every_steps: int | None, keep_best: str | None) -> "Retention | None":
    from trainyard.spec.base import parse
    from trainyard.spec.retention import BestSpec, Retention

    best = None
    if keep_best is not None:
        metric, _, rest = keep_best.partition(":")
        mode, _, num = rest.partition(":")
        given = {"metric": metric, **({"mode": mode} if mode else {}), **({"num": num} if num else {})}
        best = parse(BestSpec, given, f"--keep-best {keep_best}")
    if keep_last is None:
        if keep_every_steps is not None or best is not None:
            raise InputError("--keep-every-steps and --keep-best replace the job's rules together with --keep-last N")
        return None
    return Retention(keep_last, keep_every_steps, best)


@app.command()
def copy(
    job: CheckpointsOf,
    to: Annotated[str, typer.Argument(metavar="S3-PREFIX|FOLDER", help="Where to.", show_default=False)],
    step: StepOption = None,
    every: Annotated[bool, typer.Option("--all", help="Every good one instead of the newest.")] = False,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a checkpoint to another prefix, bucket or folder: every byte is verified there, and its marker comes last.

    From or to S3 without a job, --tenant says whose role does it.

    Example: trainyard checkpoints copy acme-stdlib-llama-20260131120000-1a2b s3://acme-data/kept/one
    """
    from trainyard.launch import checkpoints
    from trainyard.spec.checkpoint_names import why_not_written

    if every and step is not None:
        raise InputError(f"--all: copies every good one; leave out --step {step}, or --all")
    if (why := why_not_written(to)) is not None:
        raise InputError(f"{to}: {why}")
    with console(stderr=True).status("copying") as spinner:
        destination, s3, *_ = destination_of(job, environment, tenant)
        if s3 is None and to.startswith("s3://") and tenant is not None:
            s3 = tenants_place(tenant, environment, to).s3
        if destination.rstrip("/") != to.rstrip("/"):
            _refuse_running(to, environment, tenant)
        found = checkpoints.list_checkpoints(destination, s3) if every else []
        asked = [one for one in found if one.is_good] or [checkpoints.chosen(destination, s3, step)]
        uris = checkpoints.copy(
            destination, s3, asked, to, say=lambda words: spinner.console.print(words, markup=False)
        )
    if as_json:
        print_json({"copied": uris})
    else:
        for uri in uris:
            print(uri)
    checkpoints.refuse_unreadable(destination, found)


class Where(NamedTuple):
    """Where a job's checkpoints are, and how to get there."""

    destination: str
    s3: Any
    """A client; None for a folder."""
    variables: dict[str, str]
    """What a process of our own needs in its environment to reach it."""
    rules: "Retention | None" = None
    """Which of them the job keeps; None for a folder."""
    beside: tuple[str, ...] = ()
    """Where its tokenizer and its model's files lie in S3."""
    copied: "Copied | None" = None
    """Of a job whose folder was copied: `destination` is the first one's."""


def destination_of(job: str, environment: str, tenant: str | None) -> Where:
    """Where the checkpoints of a job, or of a folder of the bare trainer, lie."""
    from trainyard.launch.checkpoint_files import refuse_empty
    from trainyard.launch.names import job_id_of
    from trainyard.launch.place import place_of
    from trainyard.spec.checkpoint_names import is_foreign

    refuse_empty(job, "a job's id, or the folder that holds checkpoints/")
    if is_foreign(job):
        raise InputError(f"{job}: must be a job's id, an s3://bucket/prefix, or the folder that holds checkpoints/")
    is_s3 = job.startswith("s3://")
    if not is_s3 and ("/" in job or job in (".", "..") or _is_folder(Path(job, "checkpoints"))):
        if not _is_folder(Path(job)):
            raise InputError(f"{job}: no such folder; give a job's id, or the folder that holds checkpoints/")
        return Where(job, None, {})
    if is_s3:
        if tenant is None:
            raise InputError(f"{job}: give --tenant NAME too: its role is the one that reads it")
        there = tenants_place(tenant, environment, job)
        return Where(job, there.s3, there.variables)
    job_id = job_id_of(job)
    place = place_of(job_id, environment, tenant)
    record = place.store.read(job_id).record
    destination, copied = place.located(record).checkpoint_destination, place.copied(record)
    if destination.startswith("s3://") and place.s3 is None and tenant is not None:  # of a job of this machine
        place = tenants_place(tenant, environment, destination)
    rules = record.spec.checkpoint.retention
    return Where(destination, place.s3, place.variables, rules, beside_of(record), copied)


def _is_folder(path: Path) -> bool:
    """InputError where it may not be looked at."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(f"{path}: can't be looked at: {error.strerror}") from None


def beside_of(record: "JobRecord") -> tuple[str, ...]:
    """Where in S3 the job's tokenizer and its model's files lie: its checkpoints know its hosts' paths alone."""
    spec = record.resolved.spec
    return tuple(uri for uri in (spec.data.tokenizer, spec.model.source) if uri and uri.startswith("s3://"))


def tenants_place(tenant: str, environment: str, what: str) -> "Place":
    """Where a client for S3 acts as the tenant's launcher."""
    from trainyard.launch.place import environment_file, open_tenant
    from trainyard.spec.platform import load_environment

    return open_tenant(load_environment(environment_file(environment)), tenant, what).place


def _refuse_running(to: str, environment: str, tenant: str | None) -> None:
    """InputError where a job saves to `to` that has not ended: a bucket knows no locks. Where a tenant's job saves has
    the job's id; where others do, the records of this machine say. Nothing where nobody can say; AwsAwayError where AWS
    doesn't answer now."""
    from trainyard.launch.place import local_place, place_of

    if not to.startswith("s3://"):  # a folder knows locks
        return
    if (named := _OF_A_JOB.fullmatch(to)) is not None:
        _refuse_job_at(to, named[1], lambda job_id: place_of(job_id, environment, tenant), environment, tenant)
    here = local_place()
    for job_id in here.store.job_ids():
        _refuse_job_at(to, job_id, lambda _: here, environment, tenant)


def _refuse_job_at(
    to: str, name: str, place_of: "Callable[[str], Place]", environment: str, tenant: str | None
) -> None:
    from trainyard.launch.names import job_id_of

    try:
        job_id = job_id_of(name)
        place = place_of(job_id)
        record = place.store.read(job_id).record
        saved = record.checkpoint_destination
        is_there = saved.startswith("s3://") and _bare(saved) == _bare(to)
        running = place.backend.observe(record) if is_there else None
    except AwsAwayError:  # it may be answered a little later
        raise
    except (InputError, AwsRefusedError):  # no job of ours, a cluster that doesn't answer, a tenant that isn't deployed
        return
    if running is not None and not running.finished:
        stop = f"trainyard stop {job_id}{as_given(environment, tenant)}"
        raise InputError(
            f"{to}: job {job_id} saves there, and is still going ({running.state}): copy after its end ({stop}), or "
            "give another prefix or folder"
        )


def _bare(uri: str) -> str:
    """As both sides read it, who copies and who saves: the bucket, and the prefix without slashes at its ends."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return f"{bucket}/{prefix.strip('/')}"


def _steps(steps: list[int]) -> str:
    return f"step {', '.join(str(step) for step in steps)}" if steps else "nothing"
