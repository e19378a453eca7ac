"""Spot capacity goes again and again: who is hit, and on-demand for those that no longer get on."""

import argparse

from trainyard.errors import InputError
from trainyard.launch import watch
from trainyard.launch.record import JobRecord
from trainyard.operate.runbooks.framework import Finding, command
from trainyard.operate.runbooks.runbook import Context, Runbook, count

SUMMARY = "spot capacity is taken again and again: who is hit, and on-demand for those"
STORM_SHARE = 0.5
"""Of a tenant's spot jobs that were interrupted: more than a job's bad luck."""
NEWEST = 50


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--tenant", "-t", required=True, help="whose jobs")
    parser.add_argument("--reclaims", type=count, default=2, metavar="N", help="move jobs with so many (%(default)s)")


def storm(records: list[JobRecord], least: int) -> tuple[Finding, list[JobRecord]]:
    """Whether it is a storm, by the reclaims of the newest attempts of spot jobs; and the jobs to move. Pure."""
    spot = [record for record in records if record.resolved.spec.compute.spot and not record.finished]
    hit = [record for record in spot if record.attempt.reclaims]
    told = tuple(f"{one.job_id}: taken {one.attempt.reclaims} times in attempt {one.attempt.number}" for one in hit)
    moved = [record for record in hit if record.attempt.reclaims >= least]
    if moved and len(hit) >= STORM_SHARE * len(spot):
        return Finding(
            "fault", f"a spot storm: {len(hit)} of {len(spot)} running spot jobs were interrupted", told
        ), moved
    return Finding("clear", f"{len(hit)} of {len(spot)} running spot jobs were interrupted: no storm", told), []


def run(context: Context) -> None:
    """Each job that was hit too often goes on from its checkpoint with on-demand capacity."""
    place = context.tenant(context.options.tenant).place
    running = []
    for job_id in place.store.job_ids()[:NEWEST]:
        try:
            record = place.store.read(job_id).record
        except InputError as error:  # a later trainyard's, say: it hides no storm from the others
            context.report.findings.append(Finding("unknown", f"job {job_id}: is not counted: {error}"))
            continue
        if not record.finished:
            running.append(record)
    fresh = [watch.status(place.store, place.backend, record.job_id).record for record in running]
    finding, moved = storm(fresh, context.options.reclaims)
    context.report.findings.append(finding)
    where = context.where(place)
    steps = []
    for record in moved:
        steps.append(command("stop", record.job_id, "--wait", *where))
        steps.append(command("resume", record.job_id, *where, "--set", "compute.spot=false"))
    context.perform(steps)


RUNBOOK = Runbook("spot_storm", SUMMARY, run, options, subject="tenant")
