"""Dry runs, by the trainer's own code in a process of its own, as torch is not imported here; and plans of them."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainyard import planner
from trainyard.errors import InputError, JobFailedError
from trainyard.hardware import DEFAULT_REGION, PriceBook
from trainyard.launch.local_backend import check_trainer, trainer_environment
from trainyard.planner.families import own_config_from_source
from trainyard.planner.traced_plan import check_traceable, formulas_of_traces, ranks_to_trace
from trainyard.planner.vision_language import config_of
from trainyard.spec.job import JobSpec, ResolvedJob


def trace_rank(
    job: JobSpec, resolved: ResolvedJob, rank: int, *, timeout_seconds: float | None = None
) -> dict[str, Any]:
    """What `python -m trainer.dry_run` says of a rank.

    Needs torch on this machine. InputError and JobFailedError are the trainer's own lines; JobFailedError too where it
    takes longer than `timeout_seconds`.
    """
    check_trainer()
    with tempfile.TemporaryDirectory(prefix="trainyard-dry-run-") as folder:
        path = Path(folder) / "resolved_job.json"
        path.write_text(resolved.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "trainer.dry_run", "--resolved-job", str(path), "--rank", str(rank)]
        if known := known_configuration(job):
            command += ["--model-config", json.dumps(known)]
        try:
            done = subprocess.run(
                command, env=trainer_environment(), capture_output=True, text=True, timeout=timeout_seconds
            )
        except subprocess.TimeoutExpired:
            raise JobFailedError(
                f"--dry-run: rank {rank} takes longer than {timeout_seconds:g} s to trace; trainyard plan JOB --dry-run"
                " has no limit"
            ) from None
    if done.returncode == 0:
        traced: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return traced
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")
    words = last.strip().removeprefix("trainyard: ")
    raise (InputError if done.returncode == InputError.exit_code else JobFailedError)(words)


def known_configuration(job: JobSpec) -> dict[str, Any] | None:
    """For a source that is not on this machine: what its name tells. InputError where it tells nothing."""
    if job.model.source is None or (Path(job.model.source) / "config.json").is_file():
        return None
    if job.task == "causal_lm":
        return dict(own_config_from_source(job.model.source))
    try:
        return dict(config_of(job))
    except InputError:
        raise InputError(
            f"--dry-run: model.source: {job.model.source} is not on this machine; give a folder with its config.json"
            " (--set model.source=FOLDER): of the weights nothing is read"
        ) from None


def plan_by_trace(
    job: JobSpec,
    *,
    region: str = DEFAULT_REGION,
    book: PriceBook | None = None,
    known: dict[int, dict[str, Any]] | None = None,
    timeout_seconds: float | None = None,
) -> planner.Plan:
    """The plan of a job whose model has no formulas, as it is laid out; `known`: ranks that were traced already.
    `timeout_seconds`: of all ranks' traces together.

    InputError and JobFailedError are the trainer's own lines, or say that this engine can't be planned so.
    """
    resolved, traced = planner.resolve(job), known or {}
    check_traceable(resolved)
    ranks = ranks_to_trace(resolved)
    share = None if timeout_seconds is None else timeout_seconds / len(ranks)
    traces = [traced.get(rank) or trace_rank(job, resolved, rank, timeout_seconds=share) for rank in ranks]
    return planner.plan(job, region=region, book=book, formulas=formulas_of_traces(job, resolved, traces))
