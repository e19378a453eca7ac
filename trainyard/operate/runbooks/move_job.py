"""A job goes on with another engine or ZeRO stage, or on another cluster."""

import argparse
import json
from pathlib import Path
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.cluster_shell import has_slurm_here
from trainyard.launch.local_paths import NotHereError, local_job
from trainyard.launch.record import JobRecord
from trainyard.operate.runbooks.framework import Step, command, keep
from trainyard.operate.runbooks.restore_at_another_size import resume_steps
from trainyard.operate.runbooks.runbook import Context, Runbook
from trainyard.spec.base import apply_overrides, as_override_value, parse
from trainyard.spec.job import JobSpec

SUMMARY = "a job goes on with another ZeRO stage or layout, or on another cluster"


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--zero-stage", type=int, choices=(1, 2, 3), help="DeepSpeed with this stage")
    to.add_argument("--parallelism", metavar="YAML", help="any layout, as a job file has it; auto")
    to.add_argument("--to", choices=("local", "slurm"), help="this machine, or the Slurm cluster whose sbatch is here")
    parser.add_argument("--folder", type=Path, help="with --to: where the checkpoints are to lie, seen by all machines")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="with --to: data.train.0.path=PATH, say"
    )


def run(context: Context) -> None:
    """Where it stays on its machines, a resume with another layout; else a copy and a launch beside it."""
    given, evidence = context.options, context.gather()
    if given.to is None:
        if given.set:
            raise InputError("--set: is for --to; a job that stays on its machines keeps its data and settings")
        layout = given.parallelism
        if given.zero_stage is not None:
            ranks = evidence.record.resolved.world_size if evidence.record else 1
            wanted = {"engine": "deepspeed", "data_replicate": ranks, "zero_stage": given.zero_stage}
            layout = json.dumps(wanted)
        finding, steps = resume_steps(context, evidence, [f"parallelism={layout}"])
        context.report.findings.append(finding)
        context.perform(steps)
        return
    if given.folder is None:
        raise InputError(f"--to {given.to}: needs --folder FOLDER, where the checkpoints are copied to")
    if given.to == "slurm" and not has_slurm_here():
        raise InputError("--to slurm: no `sbatch` is on the PATH here; run this on a machine of the cluster")
    finding, resumed = resume_steps(context, evidence, [])
    context.report.findings.append(finding)
    record = evidence.record
    assert record is not None
    folder = given.folder.resolve()
    spec = _there(_as_read(record), given.set)  # refused here, and not when the job is stopped already
    keep(context.report.folder, "job.yaml", json.dumps(spec.model_dump(mode="json", exclude_unset=True), indent=1))
    where = context.where(context.place(record.job_id))
    moved: list[Step] = resumed[:-1]
    moved.append(command("checkpoints", "copy", record.job_id, str(folder), *where))
    launch = ("launch", str(context.report.folder / "job.yaml"), "--backend", given.to)
    moved.append(
        command(
            *launch, "--set", f"checkpoint.destination={as_override_value(str(folder))}", "--set", "parallelism=auto"
        )
    )
    context.perform(moved)


def _there(job: JobSpec, overrides: list[str]) -> JobSpec:
    """The job with the files that it reads there, all of which this machine sees; InputError for one that it doesn't:
    what lies in S3 has to be brought first, and named."""
    content = job.model_dump(mode="json", exclude_unset=True)
    try:
        changed = parse(JobSpec, apply_overrides(content, overrides), f"job {job.name}")
    except InputError as error:
        raise InputError(f"{error}. Nothing was changed") from None
    try:
        return local_job(changed)
    except InputError as error:
        mend = "; and say where it is: --set KEY=PATH" if isinstance(error, NotHereError) else ""
        raise InputError(f"{error}{mend}. Nothing was changed") from None


def _as_read(record: JobRecord) -> JobSpec:
    """The job as it was written; of one without a tenant with the files that its ranks read, as its own paths are of
    the folder that it was launched from, and here another file may have that name."""
    if record.environment is not None:
        return record.spec
    ran = record.resolved.spec
    parts: dict[str, Any] = {
        name: getattr(ran, name) for name in ("data", "model", "images") if name in record.spec.model_fields_set
    }
    return record.spec.model_copy(update=parts)


RUNBOOK = Runbook(
    "move_job", SUMMARY, run, options, example="acme-llama-20260131120000-1a2b --zero-stage 3 --environment production"
)
