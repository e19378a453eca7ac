"""A training job without the daemon: hosts that can't all be started, capacity that is taken away too late."""

import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.emulator.authorization.principals import Principals, Session
from trainyard.emulator.info import ACCOUNT, REGION, EmulatorInfo
from trainyard.emulator.processes import processes_under
from trainyard.emulator.training import job as job_module
from trainyard.emulator.training.attempt import ReclaimTrigger
from trainyard.emulator.training.job import JobSite, TrainingJob
from trainyard.emulator.training.tree import failure_reason


class NoLogs:
    """Takes the place of the shipper of logs."""

    error = ""

    def add(self, stream: str, line: str) -> None:
        """Nothing is kept."""

    def flush(self) -> None:
        """Nothing is sent."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainingJob]:
    """`make(program, **of_the_request)`: a job whose hosts run that line of Python; nothing is fetched or logged."""
    monkeypatch.setattr(job_module, "fetch_channels", lambda *_: None)
    monkeypatch.setattr(job_module, "LogShipper", lambda client: NoLogs())
    monkeypatch.setattr(TrainingJob, "_assume", lambda self: Session("ASIA", "secret", "token"))
    info = EmulatorInfo("http://localhost:1", 1, 1, ACCOUNT, REGION, "AKIA", "secret")

    def run(program: str, **more: Any) -> TrainingJob:
        site = JobSite(info, Principals(ACCOUNT, "AKIA"), tmp_path / "jobs", [sys.executable, "-uc", program])
        request = {
            "TrainingJobName": "it",
            "RoleArn": f"arn:aws:iam::{ACCOUNT}:role/job",
            "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
            "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10},
            "StoppingCondition": {"MaxRuntimeInSeconds": 600},
            "OutputDataConfig": {"S3OutputPath": "s3://nowhere/out"},
            **more,
        }
        return TrainingJob(request, f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/it", site)

    return run


def test_a_host_that_was_started_ends_when_the_next_one_can_not_be(
    make: Callable[..., TrainingJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_second_host(client: Any, request: Any, trees: list[Path]) -> None:
        shutil.rmtree(trees[1])  # Popen fails: its working directory is gone

    monkeypatch.setattr(job_module, "fetch_channels", lose_the_second_host)
    two = {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 2, "VolumeSizeInGB": 10}
    job = make("import time; time.sleep(600)", ResourceConfig=two)
    job._run()
    assert job.status == "Failed"
    assert len(job.attempts) == 1
    assert len(job.attempts[0].pids) == 1
    assert processes_under(tmp_path / "jobs") == set()


def test_max_wait_ends_a_job_that_is_reclaimed_too_late(
    make: Callable[..., TrainingJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 900}
    job = make(
        "print('step=1'); import time; time.sleep(600)", EnableManagedSpotTraining=True, StoppingCondition=stopping
    )

    go_on = job._may_go_on

    def later() -> bool:
        if len(job.attempts) == 2:  # by the end of the second attempt the wait is over, and not by that of the first
            job._created_monotonic -= 901
        return go_on()

    monkeypatch.setattr(job, "_may_go_on", later)
    job.site.trigger_for = lambda _, is_spot: ReclaimTrigger(re.compile("^step=1"), notice=False)
    job._run()
    assert job.status == "Stopped"
    assert [item["Status"] for item in job.transitions] == [
        *("Starting", "Downloading", "Training", "Interrupted"),
        *("Starting", "Downloading", "Training", "Interrupted", "MaxWaitTimeExceeded"),
    ]
    assert processes_under(tmp_path / "jobs") == set()


@pytest.mark.parametrize(
    ("reclaims", "wait", "end"), [(True, 5, "MaxWaitTimeExceeded"), (False, 60, "MaxRuntimeExceeded")]
)
def test_what_ends_first_ends_the_job(make: Callable[..., TrainingJob], reclaims: bool, wait: int, end: str) -> None:
    """The wait is waiting and training together: a reclaimed job is not trained past it."""
    stopping = {"MaxRuntimeInSeconds": 4, "MaxWaitTimeInSeconds": wait}
    job = make(
        "import time; print('step=1'); time.sleep(600)", EnableManagedSpotTraining=True, StoppingCondition=stopping
    )

    def reclaim(_: str, is_spot: bool) -> ReclaimTrigger | None:
        if reclaims:
            job._created_monotonic -= 1.5  # what the next machines took to come
        return ReclaimTrigger(re.compile("^step=1"), notice=False) if reclaims and not job.attempts else None

    job.site.trigger_for = reclaim
    begun = time.monotonic()
    job._run()
    assert (job.status, job.secondary_status) == ("Stopped", end), job.failure_reason
    assert time.monotonic() - begun < 50  # of the 600 that it would sleep


def test_a_failure_reason_has_a_limit(tmp_path: Path) -> None:
    """Whatever is said and however much stands around it."""
    (tmp_path / "algo-1" / "output").mkdir(parents=True)
    (tmp_path / "algo-1" / "output" / "failure").write_text("x" * 5000)
    assert len(failure_reason([tmp_path / "algo-1"], {"algo-1": 1})) == 1024
    assert len(failure_reason([], {f"algo-{number}": 1 for number in range(200)})) == 1024
