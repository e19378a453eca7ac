"""`launch`, `status`, `logs`, `stop`, `resume`, `jobs`: a job from its spec to its end."""

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.options import (
    DEFAULT_ENVIRONMENT,
    EnvironmentOption,
    JobFile,
    JobId,
    JsonOption,
    SetOption,
    TenantOption,
    as_given,
)
from trainyard.cli.output import console, print_json, teller
from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.spec.backends import BackendName
from trainyard.spec.words import counted

if TYPE_CHECKING:
    from trainyard.cli.live import Before
    from trainyard.launch.backend import LogLine
    from trainyard.launch.place import Place
    from trainyard.launch.record import JobRecord
    from trainyard.launch.watch import Status
    from trainyard.spec.job import JobSpec
    from trainyard.spec.platform import EnvironmentSpec

BackendOption = Annotated[
    BackendName | None,
    typer.Option("--backend", help="Where it runs; default: compute.backend of the job file."),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the job to its end; exit code 1 where it fails.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Launch although the plan refuses (memory, budget, hours).")]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", min=1, help="--backend local: how many processes; default: as planned.")
]


def register(app: typer.Typer) -> None:
    """Put the verbs of this file into the command line."""
    for verb in (launch, status, logs, stop, resume, jobs):
        app.command()(verb)


def launch(
    job: JobFile,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    backend: BackendOption = None,
    overrides: SetOption = None,
    processes: ProcessesOption = None,
    force: ForceOption = False,
    wait: WaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Launch a job: on AWS, on AWS's stand-in here, on a cluster (Slurm, Kubernetes, Ray), or as processes here.

    Example: trainyard launch jobs/quickstart.yaml --environment local --wait
    """
    spec = load_for_backend(job, overrides or [], backend)
    warned: set[str] = set()
    place, record = launch_job(spec, environment, processes=processes, force=force, warned=warned)
    starts_again = place.has_resumer or place.has_queue
    if record.backend == "sagemaker" and record.spec.recovery.max_resumes and not starts_again:
        print(f"recovery.max_resumes: tenant {record.tenant} submits directly and has no resumer", file=sys.stderr)
    options = as_given(environment)
    if wait:
        record = _follow(place, record.job_id, quiet=as_json, options=options, warned=warned).record
    if as_json:
        print_json(summary(record))
    else:
        _say_launched(record, options)
    if wait:
        require_completed(place, record, options)


def require_completed(place: "Place", record: "JobRecord", options: str = "") -> None:
    """JobFailedError where a job that was followed to its end did not get there; --wait looks no further than one."""
    from trainyard.launch.watch import may_be_resumed

    if record.state == "Completed":
        return
    comes_back = place.has_resumer and record.backend == "sagemaker" and may_be_resumed(record)
    after = (
        f"; the tenant's resumer may start it again: trainyard status {record.job_id}{options}" if comes_back else ""
    )
    raise JobFailedError(f"job {record.job_id}: {record.state}: {record.attempt.failure or 'see its logs'}{after}")


def _say_note(words: str) -> None:
    print(f"note: {words}", file=sys.stderr)


def load_for_backend(
    path: Path, overrides: list[str], backend: str | None, *, say: Callable[[str], None] = _say_note
) -> "JobSpec":
    """The job of a file, moved to another backend where one is asked for; `say` is told what stays behind."""
    from trainyard.spec.job import load_job

    # Before what a person sets, which is kept, or refused: nobody asks for a thing in order not to have it.
    moved = [] if backend in (None, "sagemaker") else _left_on_sagemaker(path, str(backend), say)
    moved += overrides
    if backend is not None:
        moved.append(f"compute.backend={backend}")
    if backend == "local":
        _tell_unused(overrides, say)
        moved += [f"{name}={value}" for name, value in _HERE.items()]
    return load_job(path, moved)


_HERE = {
    "compute.instance_type": "null",
    "compute.instance_count": "1",
    "compute.spot": "false",
    "compute.max_wait_hours": "null",
    "compute.queue": "null",
    "recovery.elastic": "null",
}
"""This machine has neither the type nor the number of the hosts that a job names, nor what else is of those."""


def _tell_unused(overrides: list[str], say: Callable[[str], None]) -> None:
    """A file names what it needs elsewhere; who sets it for this launch hears that it changes nothing."""
    from trainyard.spec.base import apply_overrides

    here = apply_overrides({}, [f"{name}={value}" for name, value in _HERE.items()])
    for override in overrides:
        name = next((name for name in _HERE if override.startswith((f"{name}=", f"{name}."))), None)
        if name is not None and apply_overrides(here, [override]) != here:
            of_ranks = "; --processes N says how many ranks" if name == "compute.instance_count" else ""
            say(f"--set {override} changes nothing: --backend local is one host, this machine{of_ranks}")


def _left_on_sagemaker(path: Path, backend: str, say: Callable[[str], None]) -> list[str]:
    """Overrides that take out what the file states of SageMaker's own machines."""
    from trainyard.spec.base import read_yaml

    compute = read_yaml(path).get("compute")
    stated = compute if isinstance(compute, dict) else {}
    names = [f"compute.{name}" for name in ("keep_alive_minutes", "training_plan") if stated.get(name) is not None]
    if names:
        say(f"{path}: {' and '.join(names)} left out: SageMaker alone has it, and the job goes to {backend}")
    return [f"{name}=null" for name in names]


def launch_job(
    spec: "JobSpec", environment: str, *, processes: int | None, force: bool, warned: set[str] | None = None
) -> "tuple[Place, JobRecord]":
    """Launch a job where its `compute.backend` says, and have its trackers told; where it lives now, and its record.
    Warnings are put into `warned`."""
    from trainyard.operate.following import check_tracking

    check_tracking(spec)
    with _told_what_to_do(as_given(environment)):
        place, record = _launched(spec, environment, processes, force, warned)
    begin_tracking(record, place, environment)
    return place, record


def begin_tracking(record: "JobRecord", place: "Place", environment: str) -> None:
    """Have the job's trackers told of it from now on; a warning where this machine can't, as the job is there already
    and a command that fails would have it launched again."""
    from trainyard.operate.following import begin

    try:
        begin(record, place, environment)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(
            f"warning: job {record.job_id} is {record.state}, but its trackers aren't told of it from here ({why}); "
            f"mend that, then trainyard status {record.job_id}{as_given(environment)}",
            file=sys.stderr,
        )


def tenants_environment(spec: "JobSpec", environment: str) -> "EnvironmentSpec | None":
    """The environment with whose tenant the job is launched; None where it is this machine's: as processes here, or on
    a cluster that this machine reaches, where the environment is emulated and so has no machines."""
    from trainyard.launch.doors import DOORS
    from trainyard.launch.place import environment_file
    from trainyard.spec.platform import load_environment

    if spec.compute.backend == "local":
        return None
    deployed = load_environment(environment_file(environment))
    return None if deployed.emulated and spec.compute.backend in DOORS else deployed


def _launched(
    spec: "JobSpec", environment: str, processes: int | None, force: bool, warned: set[str] | None
) -> "tuple[Place, JobRecord]":
    from trainyard.launch import launch as launch_on_sagemaker
    from trainyard.launch import launch_here
    from trainyard.launch.doors import DOORS
    from trainyard.launch.place import local_jobs_folder, local_place, open_tenant

    with console(stderr=True).status("launching") as spinner:
        say = teller(spinner, warned)
        if spec.compute.backend == "local":
            return local_place(), launch_here(spec, local_jobs_folder(), num_processes=processes, force=force, say=say)
        if processes is not None:
            raise InputError("--processes is for --backend local; on a cluster each GPU has its process")
        deployed = tenants_environment(spec, environment)
        door = DOORS.get(spec.compute.backend)
        if deployed is None:
            assert door is not None, "only a door's jobs are this machine's where its environment has no machines"
            return local_place(), door.launch_from_here(spec, local_jobs_folder(), force=force, say=say)
        spinner.update("opening the account")
        access = open_tenant(deployed, spec.tenant, f"job {spec.name}")
        launch_there = launch_on_sagemaker if door is None else door.launch_for_tenant
        record = launch_there(
            spec, access.contract, account=access.account, launcher=access.launcher, force=force, say=say
        )
        return access.place, record


def _say_launched(record: "JobRecord", options: str) -> None:
    print(f"{record.job_id}: {record.state}")
    for reason in record.forced:
        print(f"  forced: {reason}")
    if record.smaller and record.spec.recovery.max_resumes:
        counts = ", then ".join(str(one.num_hosts) for one in record.smaller)
        print(f"  without capacity for {counted(record.resolved.num_hosts, 'instance')} it goes on with {counts}")
    print(f"  checkpoints {record.checkpoint_destination}")
    if not record.finished:
        print(f"  trainyard logs {record.job_id}{options} --follow")
        print(f"  trainyard status {record.job_id}{options}")


def status(
    job: JobId,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how a job is doing, and what to do where it isn't: state, last step, newest checkpoint, restarts and why.

    Example: trainyard status acme-stdlib-llama-20260131120000-1a2b
    """
    from trainyard.cli.signs import signs
    from trainyard.launch import watch
    from trainyard.launch.checkpoints import has_any
    from trainyard.launch.goodput import goodput

    with console(stderr=True).status("asking"):
        place, job_id = place_and_id(job, environment, tenant)
        current = watch.status(place.store, place.backend, job_id, options=as_given(environment, tenant))
        begin_tracking(current.record, place, environment)
        current = dataclasses.replace(current, record=place.located(current.record))
        reached, alive = goodput(current.record, place.s3), signs(place, current.record)
        if current.finished or current.observation is None:  # where a resume is advised
            saved = has_any(current.record.checkpoint_destination, place.s3)
            # Hosts' own disks may hold one that never came to its destination.
            is_on_disks = current.record.resolved.spec.checkpoint.local_directory is not None
            current = dataclasses.replace(current, has_checkpoint=saved or (None if is_on_disks else saved))
    if as_json:
        told = {"goodput": reached.as_json() if reached else None, "signs": alive.as_json()}
        print_json(summary(current.record, current) | told)
        return
    from trainyard.cli.tables import status_table

    console().print(status_table(current, reached, alive))


def logs(
    job: JobId,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print a job's output, every host's lines in time order, without those that tell CloudWatch its meters.

    Example: trainyard logs acme-stdlib-llama-20260131120000-1a2b --follow
    """
    from trainyard.launch import watch
    from trainyard.launch.backend import LogCursor

    with console(stderr=True).status("asking"):
        place, job_id = place_and_id(job, environment, tenant)
        record = place.store.read(job_id).record
    if not follow:
        _print_all_lines(place, record, LogCursor())
        return
    for _, lines in watch.watch(place.store, place.backend, job_id, sleep=time.sleep):
        for line in filter(_is_for_people, lines):
            print(f"{line.host} {line.text}", flush=True)


def _print_all_lines(place: "Place", record: "JobRecord", cursor: Any) -> None:
    # What ends it is the cursor's word, not an empty read: CloudWatch's pages may be empty before the end.
    while True:
        for line in filter(_is_for_people, place.backend.read_logs(record, cursor)):
            print(f"{line.host} {line.text}")
        if not cursor.more:
            return


def _is_for_people(line: "LogLine") -> bool:
    """Not the meters' lines, 1.5 KB of JSON each, which CloudWatch alone reads; `metrics.jsonl` has them."""
    return not line.text.startswith('{"_aws":')


def stop(
    job: JobId,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    wait: WaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop a job: it gets 120 seconds to save a checkpoint, and can be resumed.

    --wait ends with exit code 1 where the job fails instead of stopping.

    Example: trainyard stop acme-stdlib-llama-20260131120000-1a2b --wait
    """
    from trainyard.cli.live import before_now
    from trainyard.launch import watch

    options = as_given(environment, tenant)
    with console(stderr=True).status("asking"):
        place, job_id = place_and_id(job, environment, tenant)
        current = watch.stop(place.store, place.backend, job_id, options=options)
    if wait:
        # Not before the stop: logs that don't answer must not keep a job running.
        record = current.record
        before = None if as_json else lambda: before_now(place, record)
        current = _follow(place, job_id, quiet=as_json, options=options, before=before)
    if as_json:
        print_json(summary(current.record, current))
    else:
        print(f"{job_id}: {current.state}")
        if current.state != "Completed":
            print(f"  trainyard resume {job_id}{options}")
    if wait and current.state == "Failed":
        raise JobFailedError(f"job {job_id}: Failed: {current.record.attempt.failure or 'see its logs'}")


def resume(
    job: JobId,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    overrides: SetOption = None,
    processes: ProcessesOption = None,
    force: ForceOption = False,
    wait: WaitOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a stopped or failed job again from its newest checkpoint, or submit one that never was.

    --set compute.* or parallelism.* goes on with other machines or another layout, and the same global batch.

    Example: trainyard resume acme-stdlib-llama-20260131120000-1a2b --set compute.instance_count=1 --wait
    """
    from trainyard.cli.live import before_now
    from trainyard.launch import watch
    from trainyard.launch.elastic import reviser
    from trainyard.launch.model_config import learn_recorded

    options = as_given(environment, tenant)
    with _told_what_to_do(options), console(stderr=True).status("resuming") as spinner:
        place, job_id = place_and_id(job, environment, tenant)
        revise = reviser(overrides or [], processes, force=force, needs_price=not place.emulated)
        if revise is not None:  # which plans anew
            learn_recorded(place.s3, place.store.read(job_id).record)
        before = before_now(place, place.store.read(job_id).record) if wait and not as_json else None
        gone = _gone_checkpoints(place, job_id)
        record = watch.resume(
            place.store, place.backend, job_id, revise=revise, force=force, say=teller(spinner), options=options
        )
        if gone is not None:  # of a resume that was not refused
            print(gone, file=sys.stderr)
        begin_tracking(record, place, environment)
    if wait:
        record = _follow(place, job_id, quiet=as_json, options=options, before=lambda: before).record
    if as_json:
        print_json(summary(record))
    else:
        print(f"{record.job_id}: {record.state}, attempt {record.attempt.number}")
    if wait:
        require_completed(place, record, options)


def _gone_checkpoints(place: "Place", job_id: str) -> str | None:
    """The warning of a job of this machine, whose folders are seen from here, that will begin anew, which nobody may
    have meant."""
    from trainyard.cli.signs import signs

    record = place.store.read(job_id).record
    has_disks = record.resolved.spec.checkpoint.local_directory is not None
    if record.backend == "local" and not has_disks and (told := signs(place, record)).are_checkpoints_gone:
        return (
            f"warning: {record.checkpoint_destination} has no checkpoint, where step {told.told_saved_step:,} was "
            "saved: the job begins anew; if its disk is only not mounted, trainyard stop it, mount that and resume"
        )
    return None


def jobs(
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many, newest first.")] = 20,
    local: Annotated[bool, typer.Option("--local", help="Jobs on this machine instead.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first, in their present state.

    Example: trainyard jobs --tenant acme
    """
    from trainyard.launch.place import environment_file, local_place
    from trainyard.spec.platform import load_environment

    closed: list[str] = []
    with console(stderr=True).status("asking"):
        if local:
            places = [local_place()]
        else:
            spec = load_environment(environment_file(environment))
            places, closed = _opened(spec, [tenant] if tenant else sorted(spec.tenants))
        read, unread = _newest(places, limit)
        records = [record for record, _ in read]
        states = {record.job_id: record.state for record in records}
        unasked: list[str] = []
        for place in places:
            # A record is as old as the last look at its job.
            found, silent = _states_now(place, [record for record, owner in read if owner is place])
            states |= found
            unasked += silent
    for line in [*closed, *unread, *unasked]:
        print(f"warning: {line}", file=sys.stderr)
    if as_json:
        print_json([summary(record, state=states[record.job_id]) for record in records])
        return
    from trainyard.cli.tables import jobs_table

    if records or not (unread or closed):
        console().print(jobs_table(records, states) if records else "no jobs yet: trainyard launch JOB.yaml")


def _opened(spec: "EnvironmentSpec", tenants: "Sequence[str]") -> "tuple[list[Place], list[str]]":
    """Those tenants' places, and a line on each that can't be opened: it isn't deployed yet, or whoever asks may not
    act as its launcher, which keeps nobody from the list of the others. TrainyardError where none can be."""
    from trainyard.launch.place import open_tenant

    places: list[Place] = []
    refusals: dict[str, TrainyardError] = {}
    for name in tenants:
        try:
            places.append(open_tenant(spec, name, "--tenant").place)
        except TrainyardError as error:
            refusals[name] = error
    if not places:
        raise _none_opened(refusals)
    return places, [f"tenant {name} is left out: {error}" for name, error in refusals.items()]


def _none_opened(refusals: "Mapping[str, TrainyardError]") -> TrainyardError:
    """What to raise where all tenants that were asked for refused: with every reason, each told once."""
    told: dict[str, list[str]] = {}
    for name, error in refusals.items():
        told.setdefault(str(error), []).append(name)
    first = next(iter(refusals.values()))
    if len(told) == 1:
        return first
    kind = type(first) if len({type(error) for error in refusals.values()}) == 1 else TrainyardError
    whose = {reason: f"tenant{'s' * (len(names) > 1)} {', '.join(names)}" for reason, names in told.items()}
    return kind("no tenant can be opened: " + "; ".join(f"{who}: {reason}" for reason, who in whose.items()))


def _newest(places: "Sequence[Place]", limit: int) -> "tuple[list[tuple[JobRecord, Place]], list[str]]":
    """The newest records of all those places, and a line on each that could not be read (a later trainyard's, say): it
    keeps nobody from the list of all others."""
    from trainyard.launch.record import NoRecordError, newest_first

    owners = {job_id: place for place in places for job_id in place.store.job_ids()}
    read: list[tuple[JobRecord, Place]] = []
    unread = []
    for job_id in newest_first(owners):
        if len(read) == limit:
            break
        try:
            read.append((owners[job_id].store.read(job_id).record, owners[job_id]))
        except NoRecordError:
            unread.append(f"{job_id} is left out: it has no record, so it is no job or one that was removed")
        except InputError as error:
            unread.append(f"job {job_id} is left out: {error}")
    return read, unread


def _states_now(place: "Place", records: "list[JobRecord]") -> tuple[dict[str, str], list[str]]:
    """States of those jobs by their backends, and a line on each cluster that gave none: a cluster that is away keeps
    nobody from the list of all others."""
    from trainyard.launch.doors import asked_together

    found: dict[str, str] = {}
    silent = []
    for asked in asked_together(records):
        try:
            found |= place.backend.states(asked)
        except TrainyardError as error:
            owner = f"tenant {asked[0].tenant}" if asked[0].environment else "this machine"
            silent.append(f"{asked[0].backend} of {owner} was not asked, so its jobs are as last seen: {error}")
    return found, silent


def place_and_id(job: str, environment: str, tenant: str | None) -> "tuple[Place, str]":
    """Where a job is that somebody names by its id or its end, and its whole id."""
    from trainyard.launch.names import job_id_of
    from trainyard.launch.place import place_of

    job_id = job_id_of(job)
    return place_of(job_id, environment, tenant), job_id


@contextmanager
def _told_what_to_do(options: str) -> Iterator[None]:
    """Who interrupts a submission, or gets no answer to it, is told how to find out, and how to mend, what became of
    it: launched once more it would be a second job."""
    from trainyard.launch.launcher import SubmissionInterruptedError

    try:
        yield
    except SubmissionInterruptedError as interrupted:
        _say_what_to_do(f"{interrupted.job_id}{options}")
        raise
    except TrainyardError as error:
        if error.may_run:
            print(f"warning: {error.may_run} was handed over: it may run", file=sys.stderr)
            _say_what_to_do(f"{error.may_run}{options}")
        if error.recorded:  # `jobs` lists it
            job = f"{error.recorded}{options}"
            error.args = (f"{error}; the job is recorded and not submitted: `trainyard resume {job}` submits it",)
        raise


def _say_what_to_do(job: str) -> None:
    print(
        f"`trainyard status {job}` says whether it was submitted; `trainyard stop {job}` ends it,"
        f" `trainyard resume {job}` submits what was not",
        file=sys.stderr,
    )


def _follow(
    place: "Place",
    job_id: str,
    *,
    quiet: bool,
    options: str,
    before: "Callable[[], Before | None] | None" = None,
    warned: "Collection[str]" = (),
) -> "Status":
    from trainyard.cli.live import follow

    try:
        past = before() if before else None
        return follow(place, job_id, quiet=quiet, options=options, before=past, warned=warned)
    except KeyboardInterrupt:  # nothing else here says which job it is that costs money without being watched
        print(
            f"interrupted: {job_id} goes on, not watched from here (`trainyard watch {job_id}{options}`,"
            f" `trainyard stop {job_id}{options}`)",
            file=sys.stderr,
        )
        raise


def summary(record: "JobRecord", current: "Status | None" = None, *, state: str | None = None) -> dict[str, Any]:
    """What --json prints of a job: the record without its bulky parts, and what to do next.

    `state`: what is known of it now, where that is all (`jobs`).
    """
    from trainyard.cli.tables import next_step
    from trainyard.launch.record import TERMINAL_STATES

    state = state or (current.state if current else record.state)
    observation = current.observation if current else None
    return {
        "job_id": record.job_id,
        "name": record.spec.name,
        "tenant": record.tenant,
        "environment": record.environment,
        "backend": record.backend,
        "state": state,
        "finished": state in TERMINAL_STATES,
        "training_job_name": record.attempt.training_job_name,
        "attempt": record.attempt.number,
        "reclaims": record.attempt.reclaims,
        "failure": record.attempt.failure,
        "submitted_at": record.attempt.submitted_at,
        "checkpoint_destination": record.checkpoint_destination,
        "forced": list(record.forced),
        "running_seconds": observation.running_seconds if observation else None,
        "billable_seconds": observation.billable_seconds if observation else None,
        "states": [change.model_dump() for change in record.states],
        "advice": next_step(current) if current else "",
    }
