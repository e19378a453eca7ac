"""A training job without the daemon: hosts that can't all be started, capacity that is taken away too late."""

import re
import shutil
import sys
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


def test_max_wait_ends_a_job_that_is_reclaimed_too_late(make: Callable[..., TrainingJob], tmp_path: Path) -> None:
    stopping = {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": 900}
    job = make(
        "print('step=1'); import time; time.sleep(600)", EnableManagedSpotTraining=True, StoppingCondition=stopping
    )

    def reclaim(_: str, is_spot: bool) -> ReclaimTrigger:
        if job.attempts:  # by the end of the second attempt the wait is over, and not by that of the first
            job._created_monotonic -= 901
        return ReclaimTrigger(re.compile("^step=1"), notice=False)

    job.site.trigger_for = reclaim
    job._run()
    assert job.status == "Stopped"
    assert [item["Status"] for item in job.transitions] == [
        *("Starting", "Downloading", "Training", "Interrupted"),
        *("Starting", "Downloading", "Training", "Interrupted", "MaxWaitTimeExceeded"),
    ]
    assert processes_under(tmp_path / "jobs") == set()
