"""From one job spec to a running job: check, write the record, submit; in that order, so that nothing is lost."""

import contextlib
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainyard import planner
from trainyard.errors import AwsAwayError, InputError, JobFailedError, TrainyardError
from trainyard.functions.job_resumer import moment_after
from trainyard.hardware import DEFAULT_REGION, PriceBook
from trainyard.launch import checks, names
from trainyard.launch.aws import aws_errors
from trainyard.launch.backend import Backend, Say, SilentError, say_nothing
from trainyard.launch.channels import build_inputs, spec_name
from trainyard.launch.contract import read_image
from trainyard.launch.local_backend import LocalBackend, check_trainer, has_trainer
from trainyard.launch.local_paths import check_read, local_job, saving_here
from trainyard.launch.model_config import learn_model
from trainyard.launch.queue_backend import backend_of
from trainyard.launch.record import (
    CREATED,
    SUBMITTED,
    Attempt,
    FolderRecordStore,
    JobRecord,
    RecordedChannel,
    RecordStore,
    S3RecordStore,
    StateChange,
    new_claim,
    update,
    utc_now,
)
from trainyard.launch.session import Account, price_file, unwritable
from trainyard.launch.tracing import plan_by_trace
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.elastic import smaller
from trainyard.planner.formulas import odd_by_model
from trainyard.spec.backends import BackendName
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.notes import notes_on
from trainyard.spec.platform import TenantContract

TRACE_SECONDS = 180.0
"""A launch waits no longer for the dry run of a model without formulas: it goes on without a plan, and says so."""


def launch(
    job: JobSpec,
    contract: TenantContract,
    *,
    account: Account,
    launcher: Account,
    force: bool = False,
    say: Say = say_nothing,
) -> JobRecord:
    """Launch `job` on SageMaker as the tenant's launcher role; returns once SageMaker has taken it.

    InputError where the spec, the quota or the plan refuses it (the plan's refusals yield to `force`),
    AwsRefusedError where something it needs isn't there. `account` reads the image parameter only.
    """
    assert job.tenant == contract.tenant
    backend = backend_of(launcher, contract)
    # Asked again by the backend; here so that nothing is recorded of a job that can't start.
    checks.check_queue(job, contract)
    if contract.shares:
        checks.check_share(job, contract)
    checks.check_queue(job, contract, backend.running())
    say("planning")
    learn_model(launcher.client("s3"), job, contract)
    plan, refusals = planned(job, region=contract.region, needs_price=not contract.emulated, say=say)
    hours = checks.refused_hours(job, contract)
    if hours and contract.broker:  # which holds to it, whatever is forced here
        raise InputError(hours[0])
    forced = refuse_or_force([*hours, *refusals], force)
    say("looking for the data")
    image = read_image(account, contract.image_parameter, emulated=contract.emulated)
    s3 = launcher.client("s3")
    record = tenants_record(
        job, contract, account=account, s3=s3, backend="sagemaker", plan=plan, image=image, forced=forced
    )
    for warning in checks.warned_by_recovery(job, contract):  # not before what refuses it: that is one line
        say(f"warning: {warning}")
    store = S3RecordStore(s3, contract.buckets.data)
    return record_and_submit(record, store, backend, say)


def launch_on_machines(
    job: JobSpec,
    contract: TenantContract,
    name: BackendName,
    backend: Backend,
    *,
    image: str | None,
    account: Account,
    launcher: Account,
    force: bool = False,
    say: Say = say_nothing,
) -> JobRecord:
    """Launch a tenant's `job` on machines that SageMaker does not run (a cluster); returns once `backend` has taken it.

    InputError where the plan, the tenant's hours or its month refuse it (which yield to `force`), or the backend does.
    """
    say("planning")
    learn_model(launcher.client("s3"), job, contract)
    plan, refusals = planned(job, region=contract.region, needs_price=not contract.emulated, say=say)
    forced = refuse_or_force([*checks.refused_by_tenant(job, contract, say), *refusals], force)
    say("looking for the data")
    s3 = launcher.client("s3")
    record = tenants_record(job, contract, account=account, s3=s3, backend=name, plan=plan, image=image, forced=forced)
    # Before anything is written: what the cluster could never start leaves no record.
    backend.check(record)
    return record_and_submit(record, S3RecordStore(s3, contract.buckets.data), backend, say)


def launch_here(
    job: JobSpec, folder: Path, *, num_processes: int | None = None, force: bool = False, say: Say = say_nothing
) -> JobRecord:
    """Launch `job` on this machine, in a new directory under `folder`; returns once its processes are starting."""
    check_trainer()
    sent = saving_here(local_job(job))
    check_read(sent)  # on a cluster the ranks' user may be another
    return launch_from_here(
        job,
        folder,
        "local",
        LocalBackend(folder),
        sent=sent,
        num_processes=num_processes,
        force=force,
        say=say,
    )


def launch_from_here(
    job: JobSpec,
    folder: Path,
    name: BackendName,
    backend: Backend,
    *,
    sent: JobSpec,
    root: Path | None = None,
    image: str | None = None,
    channels: Sequence[RecordedChannel] = (),
    num_processes: int | None = None,
    force: bool = False,
    say: Say = say_nothing,
) -> JobRecord:
    """Launch `job`, which no tenant of an environment owns, on `backend`; returns once that has taken it.

    `folder` holds this machine's records; `sent`: the job with the paths that its ranks read; `root`: its checkpoints
    go into a folder of that one (default: `folder`), unless the job says where.
    """
    say("planning")
    plan, refusals = planned(
        job, world_size=num_processes, is_on_this_machine=name == "local", needs_price=True, say=say
    )
    forced = refuse_or_force(refusals, force)
    job_id = names.new_job_id(job.tenant or "local", job.name)
    stated = sent.checkpoint.destination or ""
    # A path is from the job's own folder, where batch scripts run: no other job of the same file goes on from there.
    destination = stated if "://" in stated else str((root or folder.resolve()) / job_id / stated)
    record = new_record(
        job,
        with_destination(sent, destination, world_size=num_processes),
        job_id=job_id,
        backend=name,
        environment=None,
        plan=plan,
        image=image,
        channels=channels,
        forced=forced,
        launched_by="",
    )
    backend.check(record)
    return record_and_submit(record, FolderRecordStore(folder), backend, say)


def planned(
    job: JobSpec,
    *,
    region: str = DEFAULT_REGION,
    world_size: int | None = None,
    is_on_this_machine: bool = False,
    needs_price: bool = False,
    say: Say = say_nothing,
) -> tuple[dict[str, Any], list[str]]:
    """The plan as JSON, and what it refuses; what it is only unsure of is said. A model that can't be planned can be
    launched with a stated layout. `needs_price`: a budget is refused where no price is known, and not only warned of.
    """
    resolved = planner.resolve(job, world_size=world_size)
    for note in (*notes_on(job, resolved.steps), *odd_by_model(job)):
        say(f"warning: {note}")
    # Outside of what follows: prices that can't be read are no model that can't be planned, which isn't refused.
    book = PriceBook.opened(price_file(), today=datetime.date.today())
    try:
        plan = _plan_or_trace(job, region, book, say)
    except (InputError, JobFailedError) as error:
        say(f"warning: there is no plan, so nothing holds memory, hours and dollars against their limits: {error}")
        return {"job": job.name, "unplanned": str(error)}, []
    unpriced = checks.refused_without_price(plan)
    warnings = checks.warned_by_plan(plan, job, is_on_this_machine=is_on_this_machine)
    for warning in [*warnings, *checks.warned_by_pod(plan, job), *([] if needs_price else unpriced)]:
        say(f"warning: {warning}")
    refusals = [*checks.refused_by_plan(plan), *checks.refused_by_pod(plan, job), *(unpriced if needs_price else [])]
    return plan.model_dump(mode="json"), refusals


def _plan_or_trace(job: JobSpec, region: str, book: PriceBook, say: Say) -> planner.Plan:
    """The plan by formulas; of a language model without any by a dry run, if torch is here and the machine is known."""
    try:
        return planner.plan(job, region=region, book=book)
    except NotCoveredError:
        if job.compute.instance_type is None or not has_trainer():
            raise
    say("tracing a step, as there are no formulas for this model")
    return plan_by_trace(job, region=region, book=book, timeout_seconds=TRACE_SECONDS)


def tenants_record(
    job: JobSpec,
    contract: TenantContract,
    *,
    account: Account,
    s3: Any,
    backend: BackendName,
    plan: dict[str, Any],
    image: str | None,
    forced: Sequence[str],
) -> JobRecord:
    """The first record of a tenant's job: inputs found in S3, checkpoints in the tenant's bucket. InputError where the
    job wants them elsewhere, AwsRefusedError where an input isn't there."""
    checks.check_destination(job, contract)
    inputs = build_inputs(job, s3, contract)
    job_id = names.new_job_id(contract.tenant, job.name)
    destination = names.checkpoint_destination(contract.buckets.checkpoints, job_id)
    return new_record(
        job,
        with_destination(inputs.job, destination),
        job_id=job_id,
        backend=backend,
        environment=contract.environment,
        plan=plan,
        image=image,
        channels=[RecordedChannel(name=c.name, kind=c.kind, location=c.location, uri=c.uri) for c in inputs.channels],
        forced=forced,
        launched_by=caller(account),
    )


def new_record(
    job: JobSpec,
    resolved: ResolvedJob,
    *,
    job_id: str,
    backend: BackendName,
    environment: str | None,
    plan: dict[str, Any],
    image: str | None,
    channels: Sequence[RecordedChannel],
    forced: Sequence[str],
    launched_by: str,
) -> JobRecord:
    """The record of a job about to be submitted for the first time."""
    now = utc_now()
    destination = resolved.spec.checkpoint.destination
    assert destination is not None
    return JobRecord(
        job_id=job_id,
        tenant=job.tenant,
        environment=environment,
        backend=backend,
        spec=job,
        resolved=resolved,
        smaller=smaller(resolved.spec) if backend == "sagemaker" else (),
        plan=plan,
        image=image,
        checkpoint_destination=destination,
        channels=tuple(channels),
        forced=tuple(forced),
        launched_by=launched_by,
        attempts=(Attempt(number=1, training_job_name=job_id, created_at=now, claim=new_claim()),),
        states=(StateChange(state=CREATED, at=now),),
    )


class SubmissionInterruptedError(KeyboardInterrupt):
    """Ctrl-C while a job was handed over."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


def submit_attempt(
    store: RecordStore, backend: Backend, written: JobRecord, say: Say, *, options: str = ""
) -> JobRecord:
    """Submit the newest attempt of a record that was just written, and write down that the backend took it.

    InputError where somebody else changed that attempt since: one of the two would lose its settings in silence.
    `options`: as of trainyard.launch.watch.Status.

    Who interrupts this is told the job's name: it may run by then, and cost what it costs. So may one whose submission
    got no answer, or was not written down: the error then has its id as `may_run`. What to do about it the verb says,
    which knows where it was told to look for the job.
    """
    try:
        return _submitted(store, backend, written, say, options)
    except KeyboardInterrupt:
        say(f"warning: interrupted while {written.job_id} was submitted: it may run")
        raise SubmissionInterruptedError(written.job_id) from None


def resumed_meanwhile(job_id: str, options: str) -> InputError:
    """What the slower of two who resume a job is told."""
    return InputError(f"job {job_id}: somebody else has just resumed it; trainyard status {job_id}{options}")


def _submitted(store: RecordStore, backend: Backend, written: JobRecord, say: Say, options: str) -> JobRecord:
    job_id, number = written.job_id, written.attempt.number
    asked_at = utc_now()  # not when the answer came: its machines may have begun before that
    before: list[tuple[str | None, str]] = []

    def handed_over(current: JobRecord) -> JobRecord:
        if (current.attempt.number, current.attempt.claim) != (number, written.attempt.claim):
            raise resumed_meanwhile(job_id, options)
        before.append((current.attempt.handed_over_at, current.spec_name))
        begun = current.with_attempt(handed_over_at=moment_after(current.attempt.handed_over_at))
        if begun.backend != "sagemaker":
            return begun
        # With it the backend, and a broker by the record alone, know which of the job's specs this attempt reads.
        return begun.model_copy(update={"spec_name": spec_name(begun)})

    def taken_back(current: JobRecord) -> JobRecord:
        if current.attempt != record.attempt:
            return current
        handed_over_at, named = before[-1]  # who began before may still be at it
        return current.with_attempt(handed_over_at=handed_over_at).model_copy(update={"spec_name": named})

    # A conditional write, as a change of the attempt is: of two at once one fails. After it nobody changes the attempt.
    record = update(store, job_id, handed_over).record
    try:
        cluster = backend.submit(record, say) or ""
    except TrainyardError as error:
        # Who was broken off without an answer, by Ctrl-C too, may have begun something that has these settings.
        if isinstance(error, AwsAwayError | SilentError):
            error.may_run = job_id
        else:
            with contextlib.suppress(TrainyardError, OSError):  # of the two the first error is the one to tell
                update(store, job_id, taken_back)
        raise

    def confirmed(current: JobRecord) -> JobRecord:
        if current.attempt.number != number or current.attempt.submitted_at is not None:
            return current
        return current.with_attempt(submitted_at=asked_at, cluster=cluster).with_state(SUBMITTED, at=asked_at)

    try:
        return update(store, job_id, confirmed).record
    except TrainyardError as error:
        error.may_run = job_id
        raise
    except OSError as error:  # this machine's records, on a full disk
        if (told := unwritable(error)) is None:
            raise
        told.may_run = job_id
        raise told from error


def record_and_submit(record: JobRecord, store: RecordStore, backend: Backend, say: Say) -> JobRecord:
    """Write a new record, then hand its first attempt to the backend: a launcher that dies in between loses nothing."""
    say(f"writing the record of {record.job_id}")
    written = store.create(record).record
    try:
        return submit_attempt(store, backend, written, say)
    except TrainyardError as error:
        if not error.may_run:
            error.recorded = record.job_id
        raise


def with_destination(job: JobSpec, destination: str, world_size: int | None = None) -> ResolvedJob:
    """`job` resolved, its checkpoints at `destination`; InputError for one that no record can hold."""
    try:
        destination.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"checkpoint.destination {destination!a}: a record holds no path that isn't UTF-8; name another folder,"
            " there or in TRAINYARD_STATE_DIR"
        ) from None
    checkpoint = job.checkpoint.model_copy(update={"destination": destination})
    return planner.resolve(job.model_copy(update={"checkpoint": checkpoint}), world_size=world_size)


def refuse_or_force(refusals: Sequence[str], force: bool) -> tuple[str, ...]:
    """What was refused and is forced; InputError where it isn't."""
    if refusals and not force:
        raise InputError(f"refused before anything was spent: {'; '.join(refusals)}; --force goes on all the same")
    return tuple(refusals)


def caller(account: Account) -> str:
    """Whose credentials these are, as an ARN."""
    with aws_errors("reading", "the caller's identity"):
        return str(account.client("sts").get_caller_identity()["Arn"])
