"""A job's life beyond the quickstart: a reclaim with notice, stop and resume, and what a person can get wrong."""

import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from deployed_site import CHECKOUT, Site, bare_environment

from trainyard import emulator
from trainyard.launch.contract import read_contract
from trainyard.launch.session import open_account
from trainyard.spec.platform import load_environment

pytestmark = pytest.mark.end_to_end
JOB = "jobs/quickstart.yaml"
# Long enough that a stop by the command line, seconds after step 4 was seen, comes before the end on a fast machine.
SHORT = (
    "--set",
    "training.steps=120",
    "--set",
    "checkpoint.every_steps=40",
    "--set",
    "training.schedule.warmup_steps=2",
)


def launch(site: Site, name: str, *overrides: str) -> str:
    done = site.trainyard("launch", JOB, "--json", "--set", f"name={name}", *SHORT, *overrides)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["job_id"])


def state(site: Site, job_id: str) -> str:
    done = site.trainyard("status", job_id, "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["state"])


def wait_for(site: Site, job_id: str, *states: str) -> str:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        now = state(site, job_id)
        if now in states:
            return now
        assert now not in {"Completed", "Failed", "Stopped"}, f"{job_id} is {now}, not {states}"
        time.sleep(1)
    raise AssertionError(f"{job_id} never became {states}")


def rows(site: Site, job_id: str) -> list[dict[str, Any]]:
    environment = load_environment(CHECKOUT / "environments/local.yaml")
    admin = open_account(environment)
    bucket = read_contract(admin, environment, "acme").buckets.checkpoints
    text = admin.client("s3").get_object(Bucket=bucket, Key=f"jobs/{job_id}/metrics.jsonl")["Body"].read().decode()
    return [json.loads(line) for line in text.splitlines()]


def exact(metrics: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    return [(row["step"], float(row["loss"]).hex(), float(row["grad_norm"]).hex()) for row in metrics]


def test_notice_stop_and_resume_leave_no_trace_in_the_losses(site: Site) -> None:
    """One uninterrupted run; one reclaimed with notice; one stopped by a person and resumed: the same bits."""
    plain = launch(site, "plain", "--set", "compute.spot=false")
    wait_for(site, plain, "Completed")
    expected = exact(rows(site, plain))
    assert [step for step, _, _ in expected] == list(range(1, 121))

    emulator.reclaim_after(site.info, "acme-noticed-2", log_pattern="^step=53 ", notice=True)
    noticed = launch(site, "noticed")
    wait_for(site, noticed, "Completed")
    metrics = rows(site, noticed)
    assert exact(metrics) == expected
    assert [row["attempt"] for row in metrics].count(2) > 0
    # On a notice no step is lost: without one, the second attempt would begin at 41, after the checkpoint of step 40.
    assert next(row["step"] for row in metrics if row["attempt"] == 2) > 53

    stopped = launch(site, "stopped", "--set", "compute.spot=false")
    wait_for_step(site, stopped, 4)
    assert site.trainyard("stop", stopped).returncode == 0
    wait_for(site, stopped, "Stopped")
    resumed = site.trainyard("resume", stopped, "--json")
    assert resumed.returncode == 0, resumed.stderr
    wait_for(site, stopped, "Completed")
    metrics = rows(site, stopped)
    assert exact(metrics) == expected
    assert {row["attempt"] for row in metrics} == {1, 2}


def wait_for_step(site: Site, job_id: str, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if f"step={step} " in site.trainyard("logs", job_id).stdout:
            return
        time.sleep(0.5)
    raise AssertionError(f"{job_id} never logged step {step}")


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
    before = site.trainyard("jobs", "--tenant", "acme", "--json").stdout
    done = site.trainyard("launch", JOB, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert site.trainyard("jobs", "--tenant", "acme", "--json").stdout == before


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
