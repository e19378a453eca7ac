"""Processes of a training job whose hosts can't all be started."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from trainyard.emulator.authorization.principals import Principals, Session
from trainyard.emulator.info import ACCOUNT, REGION, EmulatorInfo
from trainyard.emulator.processes import processes_under
from trainyard.emulator.training import job as job_module
from trainyard.emulator.training.job import JobSite, TrainingJob


class NoLogs:
    """Takes the place of the shipper of logs."""

    error = ""

    def add(self, stream: str, line: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def test_a_host_that_was_started_ends_when_the_next_one_can_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_second_host(client: Any, request: Any, trees: list[Path]) -> None:
        shutil.rmtree(trees[1])  # Popen fails: its working directory is gone

    monkeypatch.setattr(job_module, "fetch_channels", lose_the_second_host)
    monkeypatch.setattr(job_module, "LogShipper", lambda client: NoLogs())
    monkeypatch.setattr(TrainingJob, "_assume", lambda self: Session("ASIA", "secret", "token"))
    info = EmulatorInfo("http://localhost:1", 1, 1, ACCOUNT, REGION, "AKIA", "secret")
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    site = JobSite(info, Principals(ACCOUNT, "AKIA"), tmp_path / "jobs", argv)
    request = {
        "TrainingJobName": "half",
        "RoleArn": f"arn:aws:iam::{ACCOUNT}:role/job",
        "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
        "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 2, "VolumeSizeInGB": 10},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        "OutputDataConfig": {"S3OutputPath": "s3://nowhere/out"},
    }
    job = TrainingJob(request, f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/half", site)
    job._run()
    assert job.status == "Failed"
    assert len(job.attempts) == 1
    assert len(job.attempts[0].pids) == 1
    assert processes_under(tmp_path / "jobs") == set()
