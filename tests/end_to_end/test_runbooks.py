"""Runbooks on jobs of the deployed platform, each with a fault that was made: what SageMaker, its logs and S3 then say
decides, and no runbook but the fault's own names it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from deployed_site import CHECKOUT, Site, access, wait_until

from trainyard import emulator
from trainyard.emulator.processes import processes_under
from trainyard.launch import watch
from trainyard.launch.session import open_account
from trainyard.operate.runbooks.__main__ import main
from trainyard.operate.runbooks.catalog import RUNBOOKS
from trainyard.spec.platform import load_environment

pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(3600)]

LOOKING = [runbook.name for runbook in RUNBOOKS if runbook.diagnose is not None]
NO_ROOM = "CapacityError: Unable to provision requested ML compute capacity."
Documents = dict[str, dict[str, Any]]


def launched(site: Site, name: str, *settings: str) -> str:
    """A job of two hosts that is not started again by anybody, and has bought its machines."""
    always = (f"name={name}", "compute.spot=false", "recovery.max_restarts=0", "training.steps=5000")
    words = [word for setting in (*always, *settings) for word in ("--set", setting)]
    done = site.trainyard("launch", "jobs/quickstart.yaml", "--json", *words)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["job_id"])


def until_failed(job_id: str) -> None:
    place = access("acme").place
    wait_until(lambda: watch.status(place.store, place.backend, job_id).state == "Failed", pause_seconds=0.5)


def checkpoints(job_id: str) -> list[str]:
    """Keys of the job's committed checkpoints' markers, oldest first."""
    acme = access("acme")
    listed = acme.launcher.client("s3").list_objects_v2(
        Bucket=acme.contract.buckets.checkpoints, Prefix=f"jobs/{job_id}/checkpoints/"
    )
    return sorted(item["Key"] for item in listed.get("Contents", []) if item["Key"].endswith("/COMMITTED"))


def looked_at(job_id: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Documents:
    """What each runbook that looks says of the job."""
    found = {}
    for name in LOOKING:
        code = main([name, job_id, "--json", "--evidence", str(folder / name)])
        said = capsys.readouterr()
        assert code in (0, 1), (name, said.err)
        found[name] = json.loads(said.out)
        assert found[name]["exit_code"] == code and found[name]["findings"], name
    return found


def faults(documents: Documents) -> dict[str, str]:
    """The runbooks that name a fault their own -> what decided."""
    told = {
        name: " ".join(line for one in document["findings"] if one["kind"] == "fault" for line in one["decided_by"])
        for name, document in documents.items()
        if any(one["kind"] == "fault" for one in document["findings"])
    }
    # How fast the machine's other work lets two hosts on two cores be is not the job's.
    told.pop("job_slow", None)
    return told


def neighbours(document: dict[str, Any]) -> list[str]:
    """The commands of other runbooks that it leads to."""
    return [one["then"][0].split()[0] for one in document["findings"] if one["kind"] == "neighbour"]


def test_a_lost_host_and_a_spoiled_checkpoint_are_told_from_a_healthy_job(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = ("checkpoint.every_steps=10", "checkpoint.asynchronous=false")
    job_id = launched(site, "robbed", *often)
    wait_until(lambda: len(checkpoints(job_id)) > 2, pause_seconds=0.5)
    assert faults(looked_at(job_id, tmp_path / "healthy", capsys)) == {}

    second_host = site.state_dir / "emulator/jobs" / job_id / "attempt-1/algo-2"
    alive = processes_under(second_host)
    assert alive
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    until_failed(job_id)
    told = looked_at(job_id, tmp_path / "lost", capsys)
    assert list(faults(told)) == ["bad_node"] and "host algo-2 is gone" in faults(told)["bad_node"]
    assert neighbours(told["nccl_error"]) == neighbours(told["job_hung"]) == ["scripts/runbooks/bad_node"]

    # Nobody but the job writes its checkpoints: the account's owner does here.
    s3 = open_account(load_environment(CHECKOUT / "environments/local.yaml")).client("s3")
    bucket = access("acme").contract.buckets.checkpoints
    *_, before, newest = checkpoints(job_id)
    prefix = newest.removesuffix("COMMITTED")
    shard = max(s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"], key=lambda item: int(item["Size"]))["Key"]
    content = bytearray(s3.get_object(Bucket=bucket, Key=shard)["Body"].read())
    content[len(content) // 2] ^= 1
    s3.put_object(Bucket=bucket, Key=shard, Body=bytes(content))
    told = looked_at(job_id, tmp_path / "spoiled", capsys)
    assert sorted(faults(told)) == ["bad_node", "checkpoint_stale_or_corrupt"]
    assert f"{Path(shard).name} is altered" in faults(told)["checkpoint_stale_or_corrupt"]
    (spoiled,) = [one for one in told["checkpoint_stale_or_corrupt"]["findings"] if one["kind"] == "fault"]
    assert f"goes back to step {int(Path(before).parent.name.removeprefix('step-'))}" in spoiled["words"]


def test_no_capacity_is_told_by_what_sagemaker_said(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator.fail_jobs(site.info, "acme-nowhere-", reason=NO_ROOM)
    job_id = launched(site, "nowhere")
    until_failed(job_id)
    told = looked_at(job_id, tmp_path, capsys)
    assert list(faults(told)) == ["capacity_or_quota_short"] and NO_ROOM in faults(told)["capacity_or_quota_short"]
    assert neighbours(told["bad_node"]) == ["scripts/runbooks/capacity_or_quota_short"]


def test_a_loss_that_jumps_is_told_with_its_step(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jumps = ("training.learning_rate=30", "training.spike_factor=3", "checkpoint.every_steps=10")
    job_id = launched(site, "jumps", *jumps)
    until_failed(job_id)
    told = looked_at(job_id, tmp_path, capsys)
    assert list(faults(told)) == ["loss_diverged"], faults(told)
    assert "step " in faults(told)["loss_diverged"]
