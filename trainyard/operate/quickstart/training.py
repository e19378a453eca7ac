"""Launching a job through the CLI, watching it by its logs, and reading what it left in the tenant's bucket."""

import json
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainyard.emulator import EmulatorInfo, job_attempts
from trainyard.errors import JobFailedError
from trainyard.launch.backend import LogCursor, LogLine
from trainyard.launch.place import TenantAccess
from trainyard.launch.record import TERMINAL_STATES
from trainyard.operate.quickstart.narrator import Phase
from trainyard.operate.quickstart.options import Options, run_quietly

FIRST_HOST = "algo-1"
"""Rank 0's host, whose lines tell the steps."""
JOBS_FILE = "jobs.txt"
"""Ids of the jobs that quickstarts launched, so that a later one stops no job of a person."""
STEP_LINE = re.compile(r"^step=(\d+) loss=(\S+)")
RESUMED_LINE = re.compile(r"^resumed step=(\d+) ")
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Reclaim:
    """How the job lost its machines and came back."""

    step: int
    resumed_step: int
    seconds_to_next_step: float
    fresh_processes: bool
    """No process id and no rendezvous port of the first attempt was used again."""


@dataclass(frozen=True)
class JobRun:
    """A job from launch to end. What is read from the bucket is filled by `watch`."""

    job_id: str
    status: str = "InProgress"
    rows: tuple[dict[str, Any], ...] = ()
    """metrics.jsonl."""
    result: dict[str, Any] | None = None
    lines: tuple[LogLine, ...] = ()
    """The first host's output, over all attempts."""
    attempts: tuple[dict[str, Any], ...] = ()
    description: dict[str, Any] | None = None
    artifacts: tuple[str, ...] = ()
    checkpoint_key: str = ""

    @property
    def num_steps(self) -> int:
        """Optimizer steps in the metrics."""
        return len(self.rows)

    @property
    def losses(self) -> tuple[float, ...]:
        """One a step."""
        return tuple(float(row["loss"]) for row in self.rows)

    @property
    def exact_rows(self) -> tuple[tuple[int, str, str, int], ...]:
        """What must be equal bit for bit: step, loss and gradient norm as hexadecimal floats, tokens."""
        return tuple(
            (int(row["step"]), float(row["loss"]).hex(), float(row["grad_norm"]).hex(), int(row["tokens"]))
            for row in self.rows
        )

    @property
    def tokens_per_second(self) -> float:
        """Median over steps."""
        return statistics.median(float(row["tokens"]) / float(row["step_seconds"]) for row in self.rows)

    @property
    def validation_loss(self) -> float:
        """At the end, nats per token."""
        assert self.result is not None
        return float(self.result["validation_loss"])

    @property
    def strategy(self) -> str:
        """As the trainer reports it."""
        assert self.result is not None
        return str(self.result["strategy"])

    @property
    def num_hosts(self) -> int:
        """Instances of the job."""
        assert self.description is not None
        return int(self.description["ResourceConfig"]["InstanceCount"])

    @property
    def held_seconds(self) -> float:
        """Billable instance-seconds, summed over hosts."""
        assert self.description is not None
        return float(self.description["BillableTimeInSeconds"]) * self.num_hosts

    def reclaim(self) -> Reclaim:
        """What the logs, the metrics and the job's transitions say of the reclaim; JobFailedError if there was none."""
        assert self.description is not None
        interrupted = [
            item for item in self.description["SecondaryStatusTransitions"] if item["Status"] == "Interrupted"
        ]
        resumed_at = next((index for index, line in enumerate(self.lines) if RESUMED_LINE.match(line.text)), None)
        if not interrupted or resumed_at is None or len(self.attempts) < 2:
            raise JobFailedError(
                f"{self.job_id}: was not reclaimed and resumed (attempts: {len(self.attempts)}); see its logs"
            )
        before = [int(match[1]) for line in self.lines[:resumed_at] if (match := STEP_LINE.match(line.text))]
        after = [(int(match[1]), line) for line in self.lines[resumed_at:] if (match := STEP_LINE.match(line.text))]
        first, second = self.attempts[0], self.attempts[1]
        fresh = first["port"] != second["port"] and not set(first["pids"].values()) & set(second["pids"].values())
        seconds = (after[0][1].at_ms or 0) / 1000 - interrupted[0]["StartTime"].timestamp()
        return Reclaim(step=before[-1], resumed_step=after[0][0], seconds_to_next_step=seconds, fresh_processes=fresh)


def launch_job(options: Options, overrides: Iterable[str], phase: Phase) -> JobRun:
    """`trainyard launch --json`, as a person would run it; the job goes on without us."""
    phase.update("submitting through the SageMaker SDK")
    trainyard = str(options.checkout / ".venv/bin/trainyard")
    command = [trainyard, "launch", str(options.job), "--environment", str(options.environment), "--json"]
    for override in overrides:
        command += ["--set", override]
    job_id = str(json.loads(run_quietly(options, command, "launch"))["job_id"])
    with (options.output_dir / JOBS_FILE).open("a", encoding="utf-8") as file:
        file.write(job_id + "\n")
    return JobRun(job_id=job_id)


def watch(access: TenantAccess, info: EmulatorInfo, job: JobRun, phase: Phase) -> JobRun:
    """Follow the job to its end, then read metrics and result from the tenant's bucket.

    Raises JobFailedError with the job's own reason if it does not complete.
    """
    sagemaker, place, cursor = access.launcher.client("sagemaker"), access.place, LogCursor()
    record = place.store.read(job.job_id).record
    lines: list[LogLine] = []
    while True:
        description = sagemaker.describe_training_job(TrainingJobName=job.job_id)
        # Logs after the status: what a job said before it ended is then surely read.
        news = [line for line in place.backend.read_logs(record, cursor) if line.host == FIRST_HOST]
        lines += news
        for line in news:
            report_line(line.text, phase)
        if not any(STEP_LINE.match(line.text) for line in lines):
            phase.update(f"{description['SecondaryStatus'].lower()}: processes starting, libraries loading")
        if cursor.more:
            continue
        if description["TrainingJobStatus"] in TERMINAL_STATES:
            break
        time.sleep(POLL_SECONDS)
    status = description["TrainingJobStatus"]
    if status != "Completed":
        raise JobFailedError(f"{job.job_id}: {status}: {description.get('FailureReason', 'see its logs')}")
    ended = replace(job, status=status, lines=tuple(lines), description=description)
    return read_outputs(access, replace(ended, attempts=tuple(job_attempts(info, job.job_id))))


def report_line(text: str, phase: Phase) -> None:
    """The trainer's own lines, as progress."""
    if match := STEP_LINE.match(text):
        phase.update(f"step {match[1]}, loss {float(match[2]):.3f}")
    elif text.startswith(("resumed ", "validation ")):
        phase.note(text)


def read_outputs(access: TenantAccess, job: JobRun) -> JobRun:
    """Metrics, result and checkpoints from the tenant's checkpoint bucket, as the tenant's launcher."""
    s3, bucket, prefix = access.launcher.client("s3"), access.contract.buckets.checkpoints, f"jobs/{job.job_id}/"
    text = s3.get_object(Bucket=bucket, Key=f"{prefix}metrics.jsonl")["Body"].read().decode()
    result = json.loads(s3.get_object(Bucket=bucket, Key=f"{prefix}result.json")["Body"].read())
    keys = [
        item["Key"] for item in s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}checkpoints/").get("Contents", [])
    ]
    committed = sorted(key for key in keys if key.endswith("/COMMITTED"))
    if not committed:
        raise JobFailedError(f"{job.job_id}: no committed checkpoint under s3://{bucket}/{prefix}checkpoints/")
    newest = committed[-1].removesuffix("COMMITTED")
    uris = [f"s3://{bucket}/{newest}", f"s3://{bucket}/{prefix}metrics.jsonl", f"s3://{bucket}/{prefix}result.json"]
    rows = tuple(json.loads(line) for line in text.splitlines())
    return replace(job, rows=rows, result=result, artifacts=tuple(uris), checkpoint_key=f"{newest}manifest.json")


def stop_own_jobs(access: TenantAccess, output_dir: Path, phase: Phase | None) -> None:
    """Stop what a quickstart left running here, and nothing else: it would take the cores that this one needs."""
    ids = output_dir / JOBS_FILE
    names = set(ids.read_text(encoding="utf-8").split()) if ids.exists() else set()
    sagemaker = access.launcher.client("sagemaker")
    left = [name for name in sorted(names) if _status(sagemaker, name) in {"InProgress", "Stopping"}]
    for name in left:
        if phase is not None:
            phase.note(f"stopping {name}, left by an earlier run")
        if _status(sagemaker, name) == "InProgress":
            sagemaker.stop_training_job(TrainingJobName=name)
    for name in left:
        while _status(sagemaker, name) not in TERMINAL_STATES:
            time.sleep(0.5)
    ids.unlink(missing_ok=True)


def _status(sagemaker: Any, name: str) -> str:
    """The job's status; Stopped where this emulator never heard of it."""
    try:
        return str(sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"])
    except sagemaker.exceptions.ClientError:
        return "Stopped"
