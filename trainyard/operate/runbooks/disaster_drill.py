"""Could a tenant's jobs come back? Their newest checkpoints are fetched, and each byte is held against its manifest."""

import argparse
import shlex
import shutil
import time
from pathlib import Path

from trainyard.errors import AwsAwayError, JobFailedError, TrainyardError
from trainyard.launch import checkpoints, watch
from trainyard.launch.aws import aws_errors
from trainyard.launch.backend import LogCursor
from trainyard.launch.place import Place, TenantAccess
from trainyard.launch.record import JobRecord
from trainyard.operate.course import row_of_line
from trainyard.operate.runbooks.framework import Finding, Step
from trainyard.operate.runbooks.runbook import Context, Runbook, count

SUMMARY = "could a tenant's jobs come back: checkpoints fetched and verified elsewhere, with the time it took"


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--tenant", "-t", required=True, help="whose jobs")
    parser.add_argument("--jobs", type=count, default=3, metavar="N", help="the newest so many (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave what was fetched in the evidence folder")


def run(context: Context) -> None:
    """Versions of the buckets, then each job: record, checkpoint, fetch. Nothing in the account changes."""
    access = context.tenant(context.options.tenant)
    place, findings = access.place, context.report.findings
    findings += _versions(access)
    steps = []
    job_ids = place.store.job_ids()
    for job_id in job_ids[: context.options.jobs]:
        try:
            record = place.store.read(job_id).record
            if not checkpoints.list_checkpoints(record.checkpoint_destination, place.s3):
                findings.append(_without(place, record))
                continue
            chosen = checkpoints.chosen(record.checkpoint_destination, place.s3, None)
        except AwsAwayError as error:
            findings.append(Finding("unknown", f"job {job_id}: can't be looked at now: {error}"))
            continue
        except TrainyardError as error:
            findings.append(Finding("fault", f"job {job_id}: could not come back: {error}"))
            continue
        size = chosen.size_bytes / 2**30
        findings.append(Finding("clear", f"job {job_id}: step {chosen.step}, {size:.3f} GiB", (chosen.uri,)))
        steps.append(_fetch(context, record, place.s3, chosen))
    if not job_ids:
        findings.append(Finding("unknown", f"tenant {context.options.tenant} has no job: there is nothing to drill"))
    context.perform(steps)


def _without(place: Place, record: JobRecord) -> Finding:
    """Of a job without any checkpoint: a fault where it has trained. Its record is as old as the last look at it, so
    that who runs it is asked; nothing is written down, as a drill changes nothing."""
    try:
        observation = None if _has_trained(record) else place.backend.observe(record)
    except TrainyardError as error:
        words = f"job {record.job_id}: has saved nothing, and whether it has trained can't be told: {error}"
        return Finding("unknown", words)
    seen = record if observation is None else watch.merged(record, observation)
    if _has_trained(seen) and _made_no_step(place, record):
        return Finding("unknown", f"job {record.job_id}: {seen.state}: ended before its first step, and saved nothing")
    if _has_trained(seen):
        where = record.checkpoint_destination
        words = f"job {record.job_id}: could not come back: is {seen.state}, has trained, and no checkpoint is there"
        return Finding("fault", words, (where,))
    return Finding("unknown", f"job {record.job_id}: {seen.state}: has saved nothing yet")


def _has_trained(record: JobRecord) -> bool:
    """Whether any attempt of it had machines that made steps, as far as anybody saw."""
    return any(one.state == "Training" for one in record.states) or record.state == "Completed"


def _made_no_step(place: Place, record: JobRecord) -> bool:
    """Whether the lines of its only attempt, which has ended, tell of no step: there was nothing to save."""
    if len(record.attempts) > 1 or not record.finished:
        return False
    cursor = LogCursor(first_host_alone=True)
    try:
        lines = place.backend.read_logs(record, cursor)
    except TrainyardError:
        return False
    # A log that is longer than one look is that of no such job.
    return bool(lines) and not cursor.more and all(row_of_line(line.text) is None for line in lines)


def _versions(access: TenantAccess) -> list[Finding]:
    """What is overwritten or deleted by mistake can be brought back where a bucket keeps versions."""
    found, s3 = [], access.account.client("s3")
    for name, bucket in access.contract.buckets.model_dump().items():
        if not bucket:
            continue
        with aws_errors("asking for the versions of", f"bucket {bucket}"):
            status = s3.get_bucket_versioning(Bucket=bucket).get("Status", "off")
        kind: tuple[str, ...] = (f"GetBucketVersioning {bucket}",)
        found.append(Finding("clear" if status == "Enabled" else "fault", f"{name} bucket: versions {status}", kind))
    return found


def _fetch(context: Context, record: JobRecord, s3: object, chosen: checkpoints.Checkpoint) -> Step:
    folder = context.report.folder / "fetched" / record.job_id

    def make() -> str:
        started = time.monotonic()
        try:
            checkpoints.copy(record.checkpoint_destination, s3, [chosen], str(folder))  # verifies each byte there
            again = checkpoints.verified(str(folder), None, checkpoints.chosen(str(folder), None, chosen.step))
            if not again.is_good:
                raise JobFailedError(f"job {record.job_id}: step {chosen.step}: {again.problem}")
        finally:
            _tidy(folder, keep=context.options.keep)
        seconds = time.monotonic() - started
        return f"whole, in {seconds:.1f} s ({chosen.size_bytes / seconds / 1e6:.1f} MB/s)"

    where = ("--environment", context.environment_words)
    words = ("trainyard", "checkpoints", "copy", record.job_id, str(folder), "--step", str(chosen.step), *where)
    return Step(shlex.join(words), make)


def _tidy(folder: Path, *, keep: bool) -> None:
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


RUNBOOK = Runbook("disaster_drill", SUMMARY, run, options, subject="tenant")
