"""Could a tenant's jobs come back? Their newest checkpoints are fetched, and each byte is held against its manifest."""

import argparse
import shlex
import shutil
import time
from pathlib import Path

from trainyard.errors import JobFailedError, TrainyardError
from trainyard.launch import checkpoints, watch
from trainyard.launch.aws import aws_errors
from trainyard.launch.place import TenantAccess
from trainyard.launch.record import JobRecord
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
    for job_id in place.store.job_ids()[: context.options.jobs]:
        try:
            record = watch.status(place.store, place.backend, job_id).record
            if not _has_trained(record) and not checkpoints.list_checkpoints(record.checkpoint_destination, place.s3):
                findings.append(Finding("unknown", f"job {job_id}: {record.state}: has saved nothing yet"))
                continue
            chosen = checkpoints.chosen(record.checkpoint_destination, place.s3, None)
        except TrainyardError as error:
            findings.append(Finding("fault", f"job {job_id}: could not come back: {error}"))
            continue
        size = chosen.size_bytes / 2**30
        findings.append(Finding("clear", f"job {job_id}: step {chosen.step}, {size:.3f} GiB", (chosen.uri,)))
        steps.append(_fetch(context, record, place.s3, chosen))
    if not steps and not any(one.kind == "fault" for one in findings):
        findings.append(Finding("unknown", f"tenant {context.options.tenant} has no job: there is nothing to drill"))
    context.perform(steps)


def _has_trained(record: JobRecord) -> bool:
    """Whether any attempt of it had machines that made steps, as far as anybody saw."""
    return any(one.state == "Training" for one in record.states) or record.state == "Completed"


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
