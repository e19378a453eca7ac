"""Evidence for diagnosing runbooks: of lines, of figures, and of nothing wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch_testing import IMAGE, JOB_ID, job_content

from trainyard import planner
from trainyard.launch.checkpoints import Checkpoint
from trainyard.launch.launcher import new_record
from trainyard.launch.record import JobRecord, RecordedChannel
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec


def record_of() -> JobRecord:
    """Of a job of two hosts, without an account."""
    content = job_content()
    sent = parse(JobSpec, content | {"checkpoint": {"every_steps": 5, "destination": "s3://acme-checkpoints/x"}}, "job")
    return new_record(
        parse(JobSpec, content, "job"),
        planner.resolve(sent),
        job_id=JOB_ID,
        backend="sagemaker",
        environment="test",
        plan={},
        image=IMAGE,
        channels=[RecordedChannel(name="train-0", kind="s3", location="s3://acme-data/t/", uri="s3://acme-data/t")],
        forced=(),
        launched_by="",
    )


def rows_of(
    num_steps: int,
    *,
    first_step: int = 1,
    seconds: float = 1.0,
    loss: float = 2.0,
    observed: Mapping[str, Any] | None = None,
    **parts: float,
) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl. `parts`: seconds of a step by phase; backward has what is left."""
    breakdown = dict.fromkeys(
        ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "other"), 0.0
    ) | {"forward": 0.3 * seconds}
    breakdown |= parts
    breakdown["backward"] += seconds - sum(breakdown.values())
    return [
        {
            "step": step,
            "attempt": 1,
            "loss": loss,
            "grad_norm": 1.0,
            "tokens": 1024,
            "step_seconds": seconds,
            "breakdown": breakdown,
            **({"observed": dict(observed)} if observed and step % 10 == 0 else {}),
        }
        for step in range(first_step, first_step + num_steps)
    ]


def evidence_of(
    record: JobRecord,
    lines: Sequence[str] = (),
    rows: Sequence[Mapping[str, Any]] = (),
    *,
    state: str = "Failed",
    **more: Any,
) -> Evidence:
    """Of a job of two hosts of p5.48xlarge."""
    newest = int(rows[-1]["step"]) if rows else 60
    saved = Checkpoint(newest, f"s3://acme-checkpoints/x/{newest}/", 3, 100, committed=True)
    given = {"checkpoints": (saved,), "instance_type": "ml.p5.48xlarge", "num_hosts": 2, **more}
    return Evidence(
        subject=record.job_id,
        lines=tuple(lines),
        rows=tuple(rows) or tuple(rows_of(60)),
        record=record,
        state=state,
        **given,
    )
