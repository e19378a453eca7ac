"""The TrainJob's own command, run as the cluster would run it: two pods, the trainer, S3; and what a stop leaves.

What the controller and the kubelet do is done here: PET_* as the torch policy sets them, the ConfigMap as files, the
container's environment, a name in DNS for the first pod. The losses are those of the same job on this machine, bit for
bit; a pod that is told to stop has saved, and the next attempt goes on from there.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from kubernetes_testing import FakeKubectl
from moto.server import ThreadedMotoServer

from trainyard.launch import launch_here, watch
from trainyard.launch.kubernetes import launch_on_kubernetes_here
from trainyard.launch.local_backend import LocalBackend, trainer_environment
from trainyard.launch.record import FolderRecordStore, JobRecord
from trainyard.spec.job import JobSpec, load_job

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from trainer_testing.distributed import TESTS, free_port  # after the path is set
from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE, MODULE
from trainer_testing.text_job import write_job

pytestmark = pytest.mark.full

STEPS = 40
IMAGE = f"registry/trainer@sha256:{'ab' * 32}"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """S3 over HTTP, for this process and the pods."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    names |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    # Another test's server was in this process too, and left what it held.
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", b"").close()
    client = boto3.client("s3")
    client.create_bucket(Bucket="acme")
    yield client
    server.stop()


class Pods:
    """The pods of one attempt's applied objects, as processes."""

    def __init__(self, folder: Path, applied: list[dict[str, Any]], variables: Mapping[str, str] | None = None) -> None:
        """`variables`: what they get beside what the cluster gives them."""
        self._folder = folder
        self._variables = dict(variables or {})
        folder.mkdir()
        config_map, runtime, train_job = applied
        self._files: dict[str, str] = config_map["data"]
        self._trainer = train_job["spec"]["trainer"]
        self._name = train_job["metadata"]["name"]
        template = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        self._mounts = template["spec"]["containers"][0]["volumeMounts"]
        self._port = free_port()
        self.processes = [self._start(index) for index in range(self._trainer["numNodes"])]

    def _start(self, index: int) -> "subprocess.Popen[bytes]":
        opt_ml = self.opt_ml(index)
        job = self._folder / f"job-{index}"
        job.mkdir()
        for name, text in self._files.items():
            (job / name).write_text(text)
        first = f"{self._name}-node-0-0.{self._name}"
        pet = {"NNODES": self._trainer["numNodes"], "NPROC_PER_NODE": self._trainer["numProcPerNode"]}
        pet |= {"NODE_RANK": index, "MASTER_ADDR": first, "MASTER_PORT": 29400}
        environment = {item["name"]: item["value"] for item in self._trainer["env"]}
        environment |= {f"PET_{name}": str(value) for name, value in pet.items()}
        # What a cluster has and this machine has not: names in DNS, a machine a pod, its message.
        environment["TRAINYARD_HOST_ADDRESSES"] = json.dumps({first: "127.0.0.1"})
        environment |= {"TRAINYARD_OPT_ML": str(opt_ml), "TRAINYARD_RENDEZVOUS_PORT": str(self._port)}
        assert {"name": "job", "mountPath": "/etc/trainyard/job"} in self._mounts
        environment["TRAINYARD_JOB_FOLDER"] = str(job)
        environment["TRAINYARD_TERMINATION_LOG"] = str(opt_ml / "termination-log")
        environment = trainer_environment() | environment
        environment["PYTHONPATH"] += f":{TESTS}"
        command = [sys.executable, *self._trainer["command"][1:]]  # the image's interpreter is ours
        with (self._folder / f"pod-{index}.txt").open("wb") as log:
            return subprocess.Popen(
                command, env=environment | self._variables, stdout=log, stderr=subprocess.STDOUT, cwd="/"
            )

    def opt_ml(self, index: int) -> Path:
        return self._folder / f"opt-ml-{index}"

    def log(self, index: int) -> str:
        return (self._folder / f"pod-{index}.txt").read_text()

    def ended(self, seconds: float = 300) -> list[int]:
        return [process.wait(timeout=seconds) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def until(is_so: Callable[[], bool], pods: Pods, what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert all(process.poll() is None for process in pods.processes), pods.log(0) + pods.log(1)
        assert time.monotonic() < deadline, f"{what} did not come: {pods.log(0)}\n{pods.log(1)}"
        time.sleep(0.1)


def spec(folder: Path, **changes: Any) -> JobSpec:
    return load_job(write_job(folder, "ddp", steps=STEPS), [f"{name}={value}" for name, value in changes.items()])


def pod_spec(folder: Path, s3: Any) -> JobSpec:
    """The same job, its texts on S3 and its two ranks in two pods."""
    write_job(folder, "ddp")
    for split in ("train", "validation"):
        s3.upload_file(str(folder / f"{split}.txt"), "acme", f"sets/{split}.txt")
    changes = {
        f"data.{split}": f'[{{"path":"s3://acme/sets/{split}.txt","format":"text"}}]'
        for split in ("train", "validation")
    }
    compute = {"compute.backend": "kubernetes", "compute.instance_count": 2, "compute.kubernetes.image": IMAGE}
    return spec(folder, **changes, **compute, **{"checkpoint.destination": "s3://acme/results"})


def trajectory(rows: str) -> list[tuple[float, float, float]]:
    parsed = [json.loads(line) for line in rows.splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in parsed if "loss" in row]


def local_trajectory(folder: Path) -> list[tuple[float, float, float]]:
    record = launch_here(spec(folder / "local"), folder / "jobs", num_processes=2)
    for current, _ in watch.watch(
        FolderRecordStore(folder / "jobs"), LocalBackend(folder / "jobs"), record.job_id, sleep=time.sleep
    ):
        last = current
    assert last.state == "Completed", last
    return trajectory((folder / "jobs" / record.job_id / "metrics.jsonl").read_text())


def awaiting_stop(folder: Path, *, step: int) -> dict[str, str]:
    """What the pods get so that their ranks begin that step once they are told to stop: they can't be done before."""
    folder.mkdir()
    faults = [{"rank": rank, "kind": "await_stop", "step": step} for rank in range(2)]
    (folder / "faults.json").write_text(json.dumps(faults))
    return {"TRAINYARD_RANK_MODULE": MODULE, FOLDER_VARIABLE: str(folder)}


@pytest.fixture
def launched(tmp_path: Path, kubectl: FakeKubectl, s3: Any) -> JobRecord:
    return launch_on_kubernetes_here(pod_spec(tmp_path / "job", s3), tmp_path / "records")


def test_the_trainjobs_command_learns_what_this_machine_learns_and_goes_on_after_a_stop(
    tmp_path: Path, kubectl: FakeKubectl, s3: Any, launched: JobRecord
) -> None:
    expected = local_trajectory(tmp_path)
    assert [step for step, _, _ in expected] == list(range(1, STEPS + 1))
    pods = Pods(tmp_path / "first", kubectl.applied, awaiting_stop(tmp_path / "faults", step=21))
    try:
        until(lambda: "step=20 " in pods.log(0), pods, "step 20")
        # As the kubelet does at a stop, a drain or a deadline; one pod is enough, it tells the other.
        pods.processes[1].send_signal(signal.SIGTERM)
        assert pods.ended() == [75, 75], pods.log(0) + pods.log(1)
    finally:
        pods.kill()
    saved = trajectory(s3.get_object(Bucket="acme", Key="results/metrics.jsonl")["Body"].read().decode())
    assert saved == expected[:21], "the step that was under way when the stop came is done and saved"

    pods = Pods(tmp_path / "second", kubectl.applied)
    try:
        assert pods.ended() == [0, 0], pods.log(0) + pods.log(1)
    finally:
        pods.kill()
    assert f"resumed step={len(saved)} " in pods.log(0)
    rows = s3.get_object(Bucket="acme", Key="results/metrics.jsonl")["Body"].read().decode()
    assert trajectory(rows) == expected
    assert s3.head_object(Bucket="acme", Key="results/goodput.jsonl")["ContentLength"] > 0


def test_a_pod_whose_neighbour_is_gone_asks_for_another_start(
    tmp_path: Path, kubectl: FakeKubectl, launched: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_HOST_SILENCE_SECONDS", "3")
    pods = Pods(tmp_path / "pods", kubectl.applied)
    try:
        until(lambda: "step=5 " in pods.log(0), pods, "step 5")
        pods.processes[1].kill()
        codes = pods.ended()
    finally:
        pods.kill()
    assert codes == [69, -signal.SIGKILL], pods.log(0)
    assert (pods.opt_ml(0) / "termination-log").read_text().startswith("host ")
