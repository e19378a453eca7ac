"""A job goes on with another engine or ZeRO stage, or on another cluster."""

import argparse
import json
from pathlib import Path

from trainyard.errors import InputError
from trainyard.launch.cluster_shell import has_slurm_here
from trainyard.operate.runbooks.framework import Step, command, keep
from trainyard.operate.runbooks.restore_at_another_size import resume_steps
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "a job goes on with another ZeRO stage or layout, or on another cluster"


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--zero-stage", type=int, choices=(1, 2, 3), help="DeepSpeed with this stage")
    to.add_argument("--parallelism", metavar="YAML", help="any layout, as a job file has it; auto")
    to.add_argument("--to", choices=("local", "slurm"), help="this machine, or the Slurm cluster whose sbatch is here")
    parser.add_argument("--folder", type=Path, help="with --to: where the checkpoints are to lie, seen by all machines")


def run(context: Context) -> None:
    """Where it stays on its machines, a resume with another layout; else a copy and a launch beside it."""
    given, evidence = context.options, context.gather()
    if given.to is None:
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
    # The paths as the job was sent with: what lies in S3 has to be on the other cluster, which launch checks.
    keep(
        context.report.folder, "job.yaml", json.dumps(record.spec.model_dump(mode="json", exclude_unset=True), indent=1)
    )
    where = context.where(context.place(record.job_id))
    moved: list[Step] = resumed[:-1]
    moved.append(command("checkpoints", "copy", record.job_id, str(folder), *where))
    launch = ("launch", str(context.report.folder / "job.yaml"), "--backend", given.to)
    moved.append(command(*launch, "--set", f"checkpoint.destination={folder}", "--set", "parallelism=auto"))
    context.perform(moved)


RUNBOOK = Runbook(
    "move_job", SUMMARY, run, options, example="acme-llama-20260131120000-1a2b --zero-stage 3 --environment production"
)
