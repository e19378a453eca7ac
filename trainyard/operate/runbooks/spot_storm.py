"""Spot capacity goes again and again: who is hit, and on-demand for those that no longer get on."""

import argparse
from concurrent.futures import ThreadPoolExecutor

from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.launch import watch
from trainyard.launch.place import Place
from trainyard.launch.record import JobRecord
from trainyard.operate.runbooks.framework import Finding, command
from trainyard.operate.runbooks.runbook import Context, Runbook, count
from trainyard.spec.words import counted, either

SUMMARY = "spot capacity is taken again and again: who is hit, and on-demand for those"
STORM_SHARE = 0.5
"""Of a tenant's spot jobs that were interrupted: more than a job's bad luck."""
READS = 16
"""Records that are read at once. All are: a long job is none of the newest where a sweep ran since."""


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--tenant", "-t", required=True, help="whose jobs")
    parser.add_argument("--reclaims", type=count, default=2, metavar="N", help="move jobs with so many (%(default)s)")


def storm(records: list[JobRecord], least: int) -> tuple[Finding, list[JobRecord]]:
    """Whether it is a storm, by the reclaims of the newest attempts of spot jobs; and the jobs to move. Pure."""
    spot = [record for record in records if record.resolved.spec.compute.spot and not record.finished]
    hit = [record for record in spot if record.attempt.reclaims]
    told = tuple(
        f"{one.job_id}: taken {counted(one.attempt.reclaims, 'time')} in attempt {one.attempt.number}" for one in hit
    )
    words = f"{len(hit)} of {counted(len(spot), 'running spot job')} {either(len(hit), 'was', 'were')} interrupted"
    moved = [record for record in hit if record.attempt.reclaims >= least]
    if moved and len(hit) >= STORM_SHARE * len(spot):
        return Finding("fault", f"a spot storm: {words}", told), moved
    return Finding("clear", f"{words}: no storm", told), []


def run(context: Context) -> None:
    """Each job that was hit too often goes on from its checkpoint with on-demand capacity."""
    place = context.tenant(context.options.tenant).place
    finding, moved = storm(_running(context, place), context.options.reclaims)
    context.report.findings.append(finding)
    where = context.where(place)
    failures: list[TrainyardError] = []
    for record in moved:
        stop = command("stop", record.job_id, "--wait", *where)
        resume = command("resume", record.job_id, *where, "--set", "compute.spot=false")
        try:
            context.perform([stop, resume])
        except TrainyardError as error:  # it has ended meanwhile, say: the storm still has the others
            failures.append(error)
    if len(failures) > 1:
        told = "; ".join(dict.fromkeys(map(str, failures)))
        raise JobFailedError(f"{len(failures)} of {counted(len(moved), 'job')} were not moved: {told}")
    if failures:
        raise failures[0]


def _running(context: Context, place: Place) -> list[JobRecord]:
    """The spot jobs that run, as they are now. What can't be read (a later trainyard's, say) or asked for hides no
    storm from the others."""

    def read(job_id: str) -> JobRecord | InputError:
        try:
            return place.store.read(job_id).record
        except InputError as error:
            return error

    job_ids = place.store.job_ids()
    with ThreadPoolExecutor(READS) as pool:
        records = list(pool.map(read, job_ids))
    fresh = []
    for job_id, record in zip(job_ids, records, strict=True):
        try:
            if isinstance(record, InputError):
                raise record
            if record.resolved.spec.compute.spot and not record.finished:
                fresh.append(watch.status(place.store, place.backend, job_id).record)
        except TrainyardError as error:
            context.report.findings.append(Finding("unknown", f"job {job_id}: is not counted: {error}"))
    return fresh


RUNBOOK = Runbook("spot_storm", SUMMARY, run, options, subject="tenant")
