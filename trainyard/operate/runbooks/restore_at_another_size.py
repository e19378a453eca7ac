"""A job goes on from its newest whole checkpoint with other machines, or another number of processes."""

import argparse

from trainyard.errors import InputError, JobFailedError
from trainyard.launch.elastic import reviser
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.framework import Finding, Step, command
from trainyard.operate.runbooks.runbook import Context, Runbook, count
from trainyard.spec.words import counted

SUMMARY = "a job goes on from its checkpoint on more or fewer machines"


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--instances", type=count, metavar="N", help="machines to go on with")
    size.add_argument("--processes", type=count, metavar="N", help="of a job on this machine: processes to go on with")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="more, as `trainyard resume` has"
    )


def resume_steps(
    context: Context, evidence: Evidence, overrides: list[str], processes: int | None = None
) -> tuple[Finding, list[Step]]:
    """Which checkpoint the job goes on from, and the calls; InputError where its plan refuses, before anything is made.

    JobFailedError where not one checkpoint is whole: the job would begin anew.
    """
    record = evidence.record
    if record is None:
        raise InputError("JOB: missing; `trainyard jobs` lists them")
    good = [one for one in evidence.checkpoints if one.is_good]
    if not good:
        bad = "; ".join(f"step {one.step}: {one.problem}" for one in evidence.checkpoints)
        bad = bad or evidence.missing.get("checkpoints", "none was saved")
        raise JobFailedError(f"job {record.job_id}: has no whole checkpoint to go on from ({bad}); nothing was changed")
    place = context.place(record.job_id)
    revise = reviser(overrides, processes, needs_price=not place.emulated)
    if revise is not None:
        revise(record)  # refused here, and not when the job is stopped already
    where = context.where(place)
    steps = [command("stop", record.job_id, "--wait", *where)] if not record.finished else []
    settings = [word for one in overrides for word in ("--set", one)]
    settings += ["--processes", str(processes)] if processes is not None else []
    steps.append(command("resume", record.job_id, *where, *settings))
    newest = good[-1]
    by = f"{counted(newest.world_size or 1, 'rank')} ({newest.strategy})"
    words = f"goes on from step {newest.step}, saved by {by}: every byte was hashed"
    if not record.finished:
        words += "; or from a later one, which it saves when it is stopped"
    if later := [str(one.step) for one in evidence.checkpoints if not one.is_readable and one.step > newest.step]:
        words += f"; or, if the job can read it, from what can't be read here: step {', '.join(later)}"
    return Finding("clear", words, (newest.uri,)), steps


def run(context: Context) -> None:
    """Check, then stop and resume."""
    given = context.options
    overrides = [*given.set]
    if given.instances is not None:
        overrides.append(f"compute.instance_count={given.instances}")
    if not any(one.startswith("parallelism") for one in overrides):
        overrides.append("parallelism=auto")
    finding, steps = resume_steps(context, context.gather(), overrides, given.processes)
    context.report.findings.append(finding)
    context.perform(steps)


RUNBOOK = Runbook(
    "restore_at_another_size",
    SUMMARY,
    run,
    options,
    example="acme-llama-20260131120000-1a2b --instances 2 --environment production",
)
