"""Who starts a job again, on the deployed platform: the resumer for what the job allows, on fewer hosts, then a person
on more; and the detective, which looks at what has started."""

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from deployed_site import CHECKOUT, Site, access, copy_data

from trainyard import emulator
from trainyard.emulator.processes import processes_under
from trainyard.launch import watch
from trainyard.launch.place import TenantAccess
from trainyard.launch.queue_backend import backend_of
from trainyard.launch.session import open_account
from trainyard.spec.platform import load_environment

pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(3600)]
NO_ROOM = "CapacityError: Unable to provision requested ML compute capacity."
INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
SMALL = (
    "name=again",
    "tenant=globex",
    "training.steps=16",
    "training.schedule.warmup_steps=1",
    "checkpoint.every_steps=4",
    "checkpoint.asynchronous=false",
    "compute.spot=false",
    "recovery.max_resumes=1",
    "recovery.elastic={min_instances: 1, max_instances: 2}",
)


def wait_for(look: Callable[[], Any], seconds: float = 900.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.5)
    raise AssertionError("it never came")


def lasting(site: Site) -> str:
    """A stopped job thousands of steps from its end: one that is done already would be gone before anybody looks."""
    settings = ("name=lasting", "tenant=globex", "training.steps=5000", "checkpoint.every_steps=5000")
    overrides = [word for value in (*settings, "compute.spot=false") for word in ("--set", value)]
    launched = site.trainyard("launch", "jobs/quickstart.yaml", "--json", *overrides)
    assert launched.returncode == 0, launched.stderr
    job_id = str(json.loads(launched.stdout)["job_id"])
    stopped = site.trainyard("stop", job_id, "--wait")
    assert stopped.returncode == 0, stopped.stderr
    return job_id


def sneaked_past_the_rules(site: Site, globex: TenantAccess, job_id: str) -> str:
    """A training job of another image, which no broker has seen: its name, once it has been stopped."""
    request = backend_of(globex.launcher, globex.contract).request(globex.place.store.read(lasting(site)).record)
    foreign = f"globex-foreign-{job_id[-4:]}"
    request |= {"TrainingJobName": foreign}
    request["AlgorithmSpecification"] |= {"TrainingImage": "elsewhere/image@sha256:0"}
    administrator = open_account(load_environment(CHECKOUT / "environments/local.yaml"))
    administrator.client("sagemaker").create_training_job(**request)
    sagemaker = globex.launcher.client("sagemaker")

    def ending() -> Any:
        found = sagemaker.describe_training_job(TrainingJobName=foreign)
        return found if found["TrainingJobStatus"] in ("Stopped", "Failed", "Completed") else None

    ended = wait_for(ending)
    assert ended["TrainingJobStatus"] == "Stopped", ended
    return foreign


def judgements(site: Site) -> dict[str, Any]:
    """What the detective found of each job that it looked at."""
    told = [item for item in emulator.deliveries(site.info) if "rules" in item.get("event", {})]
    return {item["event"]["job"]: json.loads(item["payload"]) for item in told if not item["error"]}


def test_a_failed_job_is_resumed_by_itself_on_one_host_then_by_a_person_on_two(site: Site) -> None:
    acme, globex = access("acme"), access("globex")
    copy_data(acme, globex)
    emulator.fail_jobs(site.info, "globex-again-", reason=NO_ROOM)
    emulator.fail_jobs(site.info, "globex-again-", reason=INTERNAL, after_log_pattern="^step=7 ")
    overrides = [word for value in SMALL for word in ("--set", value)]
    launched = site.trainyard("launch", "jobs/quickstart.yaml", "--json", *overrides)
    assert launched.returncode == 0, launched.stderr
    job_id = str(json.loads(launched.stdout)["job_id"])
    sagemaker = globex.launcher.client("sagemaker")

    def answers(name: str) -> list[Any]:
        """What the resumer's function answered of an attempt."""
        runs = [item for item in emulator.deliveries(site.info) if item.get("event") == {"job": name}]
        return [json.loads(run["payload"]) for run in runs if not run["error"]]

    # The first attempt finds no capacity; the second is lost at step 7, which would be one resume too many.
    assert wait_for(lambda: answers(job_id))[0]["submitted"] == f"{job_id}-r2"
    (left,) = wait_for(lambda: answers(f"{job_id}-r2"))
    assert left["left"] == "recovery.max_resumes is spent (1)"
    shown = site.trainyard("status", job_id, "--json")
    record = globex.place.store.read(job_id).record
    assert json.loads(shown.stdout)["state"] == "Failed", shown.stdout
    assert record.attempt.number == 2 and record.attempt.failure == INTERNAL
    notes = [state.note for state in record.states]
    assert "resumed by itself (1) on 1 of 2 instances: no capacity; from step 0" in notes, notes
    described = [sagemaker.describe_training_job(TrainingJobName=name) for name in (job_id, f"{job_id}-r2")]
    assert [one["ResourceConfig"]["InstanceCount"] for one in described] == [2, 1]

    # Refused before anything is written, then taken.
    wrong = site.trainyard("resume", job_id, "--set", "training.steps=20")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1) and "keeps the job's data" in wrong.stderr
    beyond = site.trainyard("resume", job_id, "--set", "compute.instance_count=3")
    assert (beyond.returncode, beyond.stderr.count("\n")) == (2, 1) and "allows 1 to 2 instances" in beyond.stderr
    changes = ("--set", "compute.instance_count=2", "--set", "parallelism=auto")
    resumed = site.trainyard("resume", job_id, "--json", *changes)
    assert resumed.returncode == 0, resumed.stderr
    name = f"{job_id}-r3"
    wait_for(lambda: sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] != "InProgress")
    completed = sagemaker.describe_training_job(TrainingJobName=name)
    assert completed["TrainingJobStatus"] == "Completed", completed
    assert completed["ResourceConfig"]["InstanceCount"] == 2
    bucket = globex.contract.buckets.checkpoints
    text = globex.launcher.client("s3").get_object(Bucket=bucket, Key=f"jobs/{job_id}/metrics.jsonl")["Body"].read()
    rows = [json.loads(line) for line in text.decode().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 17)), "no step twice, none left out"
    assert next(row["step"] for row in rows if row["attempt"] == 2) == 5, "from the checkpoint of step 4"

    # The detective looked at each attempt that has started, and stops one that an administrator sneaked past the rules.
    foreign = sneaked_past_the_rules(site, globex, job_id)
    wait_for(lambda: foreign in judgements(site))
    judged = judgements(site)
    assert judged[job_id] == judged[name] == [] and judged[foreign] == ["image: elsewhere/image@sha256:0"]


def test_a_job_that_lost_a_host_is_resumed_by_itself(site: Site) -> None:
    """SageMaker ends the other host within the same moment: its word must still be that a host was lost."""
    globex = access("globex")
    copy_data(access("acme"), globex)
    settings = (
        "name=robbed-once",
        "tenant=globex",
        "training.steps=120",
        "checkpoint.every_steps=10",
        "compute.spot=false",
    )
    words = [word for value in (*settings, "recovery.max_resumes=1") for word in ("--set", value)]
    launched = site.trainyard("launch", "jobs/quickstart.yaml", "--json", *words)
    assert launched.returncode == 0, launched.stderr
    job_id = str(json.loads(launched.stdout)["job_id"])
    s3, bucket = globex.launcher.client("s3"), globex.contract.buckets.checkpoints

    def is_saved() -> bool:
        listed = s3.list_objects_v2(Bucket=bucket, Prefix=f"jobs/{job_id}/checkpoints/").get("Contents", [])
        return any(item["Key"].endswith("/COMMITTED") for item in listed)

    wait_for(is_saved)
    for pid in processes_under(site.state_dir / "emulator/jobs" / job_id / "attempt-1/algo-2"):
        os.kill(pid, signal.SIGKILL)
    place = globex.place
    wait_for(lambda: watch.status(place.store, place.backend, job_id).record.attempt.number == 2)
    wait_for(lambda: watch.status(place.store, place.backend, job_id).state in ("Completed", "Failed"))
    record = place.store.read(job_id).record
    assert record.state == "Completed", record.attempt.failure
    notes = [state.note for state in record.states]
    assert any(note.startswith("resumed by itself (1): a host was lost; from step ") for note in notes), notes
