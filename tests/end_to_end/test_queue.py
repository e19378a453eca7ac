"""Two tenants in the training queues, with the real trainer: who borrows makes room for the owner, saves within the
notice, and goes on afterwards to the loss that it would have had; and each of its jobs runs as a role of its own."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed_site import CHECKOUT, bare_environment, processes_of

from trainyard import emulator
from trainyard.emulator import EmulatorInfo
from trainyard.functions.broker_queue import training_job_prefix
from trainyard.launch.place import TenantAccess, open_tenant
from trainyard.launch.session import open_account
from trainyard.operate import deploy as deployment
from trainyard.spec.platform import EnvironmentSpec, load_environment

pytestmark = [pytest.mark.end_to_end, pytest.mark.full, pytest.mark.timeout(3600)]

GPU = "ml.p5.4xlarge"
STEPS = 120
# No checkpoint by interval: what the second start goes on from can only be what the first one saved when it was told.
LONG = (f"training.steps={STEPS}", "checkpoint.every_steps=5000", "compute.spot=false")
SHORT = ("training.steps=6", "training.schedule.warmup_steps=1", "compute.instance_count=1", "parallelism=auto")


@dataclass(frozen=True)
class Queues:
    """An environment of two machines, one guaranteed to each of two tenants; acme may borrow the other's."""

    state_dir: Path
    file: Path
    environment: EnvironmentSpec
    info: EmulatorInfo

    def access(self, tenant: str) -> TenantAccess:
        """As the tenant's launcher."""
        return open_tenant(self.environment, tenant, "test")

    def trainyard(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """The CLI, as a person would run it."""
        return subprocess.run(
            [str(CHECKOUT / ".venv/bin/trainyard"), *arguments, "--environment", str(self.file)],
            cwd=CHECKOUT,
            env=bare_environment(self.state_dir),
            capture_output=True,
            text=True,
        )

    def launch(self, tenant: str, name: str, *settings: str) -> str:
        """A job's id."""
        words = [f"tenant={tenant}", f"name={name}", *settings]
        done = self.trainyard(
            "launch", "jobs/quickstart.yaml", "--json", *(word for value in words for word in ("--set", value))
        )
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["job_id"])

    def starts(self, tenant: str, job_id: str) -> list[dict[str, Any]]:
        """The training jobs that Batch made of a job, oldest first."""
        sagemaker = self.access(tenant).launcher.client("sagemaker")
        found = sagemaker.list_training_jobs(
            NameContains=training_job_prefix(tenant, job_id), SortBy="CreationTime", SortOrder="Ascending"
        )["TrainingJobSummaries"]
        return [sagemaker.describe_training_job(TrainingJobName=row["TrainingJobName"]) for row in found]

    def rows(self, tenant: str, job_id: str) -> list[dict[str, Any]]:
        """The job's metrics, a row a step."""
        access = self.access(tenant)
        s3, bucket = access.launcher.client("s3"), access.contract.buckets.checkpoints
        text = s3.get_object(Bucket=bucket, Key=f"jobs/{job_id}/metrics.jsonl")["Body"].read()
        return [json.loads(line) for line in text.decode().splitlines()]

    def roles(self) -> list[str]:
        """Names of the roles of single jobs that are there."""
        iam = open_account(self.environment).client("iam")
        path = f"/trainyard/{self.environment.name}/acme/jobs/each/"
        return [role["RoleName"] for role in iam.list_roles(PathPrefix=path)["Roles"]]

    def until(self, tenant: str, job_id: str, *states: str) -> None:
        """Wait until the job is in one of the states, by what `trainyard status` asks."""
        place = self.access(tenant).place
        record = place.store.read(job_id).record
        wait_for(lambda: (seen := place.backend.observe(record)) is not None and seen.state in states)


def wait_for(look: Callable[[], Any], seconds: float = 1200.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(1.0)
    raise AssertionError("it never came")


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queues]:
    state_dir = tmp_path_factory.mktemp("state")
    content = yaml.safe_load((CHECKOUT / "environments/local.yaml").read_text())
    content |= {"submission": "queue", "max_instances": {GPU: 2}}
    queue = {"instance_types": [GPU], "max_instances": 2}
    acme = {"submission": "queue", "job_isolation": "key", "queues": {"gpu": queue}, "share": {"guaranteed": {GPU: 1}}}
    content["tenants"]["acme"] |= acme
    content["tenants"]["globex"]["queues"] = {"gpu": {**queue, "max_instances": 1}}
    file = state_dir / "queues.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    environment = load_environment(file)
    try:
        info = emulator.start(state_dir / "emulator")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRAINYARD_STATE_DIR", str(state_dir))
            emulator.set_quota(info, environment.max_instances)
            deployment.deploy(CHECKOUT, file, environment, info.environment(), work=state_dir, progress=lambda _: None)
            made = Queues(state_dir, file, environment, info)
            upload_data(made)
            yield made
    finally:
        emulator.stop(state_dir / "emulator")
        assert processes_of(state_dir) == []


def upload_data(queues: Queues) -> None:
    """The quickstart's, for both tenants."""
    folder = queues.state_dir / "data"
    python = CHECKOUT / ".venv/bin/python"
    subprocess.run([python, "-m", "trainer.data.prepare_stdlib", "--out", folder], check=True, cwd=CHECKOUT)
    for tenant in ("acme", "globex"):
        access = queues.access(tenant)
        for name in ("train.jsonl", "validation.jsonl", "tokenizer.json"):
            key = f"datasets/python-stdlib/{name}"
            access.launcher.client("s3").upload_file(str(folder / name), access.contract.buckets.data, key)


def exact(rows: list[dict[str, Any]]) -> list[tuple[int, str, str, int]]:
    """What must be equal bit for bit."""
    return [
        (int(row["step"]), float(row["loss"]).hex(), float(row["grad_norm"]).hex(), int(row["tokens"])) for row in rows
    ]


def test_a_borrower_makes_room_saves_and_comes_to_the_same_loss(queues: Queues) -> None:
    undisturbed = queues.launch("acme", "undisturbed", *LONG)
    queues.until("acme", undisturbed, "Completed")
    assert exact(queues.rows("acme", undisturbed))[-1][0] == STEPS

    # Both machines: one is acme's own, the other lies idle in globex's share.
    borrower = queues.launch("acme", "borrower", *LONG)
    (first,) = wait_for(lambda: queues.starts("acme", borrower))
    assert first["RoleArn"].endswith(f":role/trainyard/local/acme/jobs/each/{borrower}")
    access = queues.access("acme")
    logs, stream = access.launcher.client("logs"), f"{first['TrainingJobName']}/algo-1"

    def has_trained() -> bool:
        group = "/aws/sagemaker/TrainingJobs"
        streams = logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=stream)["logStreams"]
        return any(
            event["message"].startswith("step=3 ")
            for item in streams
            for event in logs.get_log_events(logGroupName=group, logStreamName=item["logStreamName"])["events"]
        )

    wait_for(has_trained)
    owner = queues.launch("globex", "owner", *SHORT)
    queues.until("acme", borrower, "Queued")
    stopped = queues.starts("acme", borrower)[0]
    assert stopped["TrainingJobStatus"] == "Stopped"
    (attempt,) = emulator.job_attempts(queues.info, stopped["TrainingJobName"])
    assert set(attempt["exit_codes"].values()) == {75}, "each host saved, and asks to be resumed"
    assert borrower in queues.roles(), "a job that waits again needs its role again"

    queues.until("globex", owner, "Completed")
    queues.until("acme", borrower, "Completed")
    (mine,) = queues.starts("globex", owner)
    first, second = queues.starts("acme", borrower)
    assert first["TrainingEndTime"] <= mine["TrainingStartTime"], "the owner's machine was given back"
    assert mine["TrainingEndTime"] <= second["TrainingStartTime"]

    assert access.place.store.read(borrower).record.attempt.number == 1, "preempted, and not resumed by anybody"
    rows = queues.rows("acme", borrower)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no step twice, none left out"
    assert exact(rows) == exact(queues.rows("acme", undisturbed))
    wait_for(lambda: not queues.roles())  # the broker hears of the jobs' ends
