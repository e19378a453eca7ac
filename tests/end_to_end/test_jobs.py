"""A job's life beyond the quickstart: a reclaim with notice, stop and resume, and what a person can get wrong."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from deployed_site import CHECKOUT, Site, bare_environment, wait_until

from trainyard import emulator
from trainyard.emulator.processes import processes_under
from trainyard.launch import watch
from trainyard.launch.contract import read_contract
from trainyard.launch.place import open_tenant
from trainyard.launch.session import open_account
from trainyard.spec.job import load_job
from trainyard.spec.platform import load_environment

pytestmark = pytest.mark.end_to_end
JOB = "jobs/quickstart.yaml"
RECLAIMED_AFTER = 23
"""Not a step whose checkpoint is saved anyway: those are saved every 20."""


def wait_for(site: Site, job_id: str, *states: str) -> None:
    """Looked at here and not by the command, whose start would take the job's processor; then once by the command."""
    place = open_tenant(load_environment(CHECKOUT / "environments/local.yaml"), "acme", "test").place

    def ended() -> str:
        time.sleep(0.5)
        now = watch.status(place.store, place.backend, job_id).state
        return now if now in {*states, "Completed", "Failed", "Stopped"} else ""

    assert wait_until(ended) in states, job_id
    done = site.trainyard("status", job_id, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] in states


def rows(site: Site, job_id: str) -> list[dict[str, Any]]:
    environment = load_environment(CHECKOUT / "environments/local.yaml")
    admin = open_account(environment)
    bucket = read_contract(admin, environment, "acme").buckets.checkpoints
    text = admin.client("s3").get_object(Bucket=bucket, Key=f"jobs/{job_id}/metrics.jsonl")["Body"].read().decode()
    return [json.loads(line) for line in text.splitlines()]


def exact(metrics: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    return [(row["step"], float(row["loss"]).hex(), float(row["grad_norm"]).hex()) for row in metrics]


@pytest.mark.slow
def test_notice_stop_and_resume_leave_no_trace_in_the_losses(site: Site) -> None:
    """The quickstart's job again: reclaimed with notice, stopped by a person, resumed. The same bits."""
    emulator.reclaim_after(site.info, "acme-disturbed-2", log_pattern=f"^step={RECLAIMED_AFTER} ", notice=True)
    launched = site.trainyard("launch", JOB, "--json", "--set", "name=disturbed")
    assert launched.returncode == 0, launched.stderr
    job_id = str(json.loads(launched.stdout)["job_id"])
    stop_in_second_attempt(site, job_id)
    wait_for(site, job_id, "Stopped")
    resumed = site.trainyard("resume", job_id, "--json")
    assert resumed.returncode == 0, resumed.stderr
    wait_for(site, job_id, "Completed")

    metrics = rows(site, job_id)
    assert [row["step"] for row in metrics] == list(range(1, load_job(CHECKOUT / JOB).training.steps + 1))
    # The quickstart has compared its reclaimed job with an uninterrupted one, bit by bit.
    assert exact(metrics) == exact(rows(site, site.report["job"]["name"]))
    first = {number: next(row["step"] for row in metrics if row["attempt"] == number) for number in (1, 2, 3)}
    # On a notice no step is lost: without one, the second attempt would begin at 21, after the checkpoint of step 20.
    assert RECLAIMED_AFTER < first[2] < first[3], first


def stop_in_second_attempt(site: Site, job_id: str) -> None:
    """`trainyard stop` in mid-training: the ranks stand still while the command starts, for they are faster than it."""
    root = site.state_dir / "emulator/jobs" / job_id
    tree = root / "attempt-2/algo-1"

    def has_begun() -> bool:
        try:
            text = (tree / "output/data/metrics.jsonl").read_text()
        except OSError:
            return False
        return any(json.loads(line)["attempt"] == 2 for line in text.splitlines(keepends=True) if line.endswith("\n"))

    wait_until(has_begun)
    # One on each host; what one of them forks looks like it until it runs another program.
    ranks = wait_until(
        lambda: found if len(found := [pid for pid in processes_under(root) if is_rank(pid)]) == 2 else []
    )
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    assert site.trainyard("stop", job_id).returncode == 0
    wait_until((tree / "trainyard/ranks/stop").exists)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)


def is_rank(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return False
    return b"trainer.host.rank" in command and b"trainer.torchrun" not in command


def started() -> tuple[list[str], list[str]]:
    """The tenant's job records and SageMaker's training jobs; asked here, for a command's start takes seconds."""
    access = open_tenant(load_environment(CHECKOUT / "environments/local.yaml"), "acme", "test")
    pages = access.launcher.client("sagemaker").get_paginator("list_training_jobs").paginate()
    names = [row["TrainingJobName"] for page in pages for row in page["TrainingJobSummaries"]]
    assert names, "the quickstart's"
    return sorted(access.place.store.job_ids()), sorted(names)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "training.stepz=3"], 2, "unknown key, did you mean 'steps'?"),
        (["--set", "tenant=initech"], 2, "tenant 'initech' is not in environment local, which has: acme, globex"),
        (["--set", "compute.instance_count=999", "--set", "parallelism=auto"], 2, "999"),
        (["--set", "data.train=[{path: s3://no-such-bucket-here/x, format: jsonl}]"], 3, "no-such-bucket-here"),
        (["--environment", "environments/nowhere.yaml"], 2, "environments/nowhere.yaml"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(site: Site, arguments: list[str], code: int, words: str) -> None:
    before = started()
    done = site.trainyard("launch", JOB, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert started() == before


def test_a_wrong_account_is_refused_by_name(site: Site, tmp_path: Path) -> None:
    text = (CHECKOUT / "environments/local.yaml").read_text()
    (tmp_path / "local.yaml").write_text(text.replace("123456789012", "999999999999"))
    done = site.trainyard("launch", JOB, "--environment", str(tmp_path / "local.yaml"))
    assert done.returncode == 3
    assert "wrong AWS account: the credentials belong to 123456789012" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_occupied_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            ["scripts/quickstart", "--port", str(port)],
            cwd=CHECKOUT,
            env=bare_environment(tmp_path),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert done.stderr.count("\n") == 1
