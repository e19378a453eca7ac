"""Jobs for Kubernetes without a cluster: the manifests against the cluster's own schema, what is refused, states read.

That the TrainJob's command trains is test_kubernetes_trainer.py. What kubectl says is in its own words.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kubernetes_testing import (
    ENDED,
    FakeKubectl,
    condition,
    job_set,
    pod,
    running,
    schema_errors,
    terminated,
)
from launch_testing import IMAGE, JOB_ID, job_content
from trainer import kubernetes as entry

from trainyard import hardware, planner
from trainyard.errors import InputError
from trainyard.launch import kubernetes, watch
from trainyard.launch.backend import AwayError, LogCursor, Observation, say_nothing
from trainyard.launch.kubectl import Kubectl
from trainyard.launch.kubernetes import launch_on_kubernetes_here, launch_on_tenants_kubernetes, tenant_places
from trainyard.launch.kubernetes_backend import STOP_MARK, KubernetesBackend
from trainyard.launch.kubernetes_manifest import FINAL_EXIT_CODES, GRACE_SECONDS, manifests, object_name
from trainyard.launch.launcher import new_record, planned, with_destination
from trainyard.launch.local_supervisor import RESUME_EXIT_CODE
from trainyard.launch.record import FolderRecordStore, JobRecord, RecordedChannel, S3RecordStore
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.job import ImageSpec, JobSpec
from trainyard.spec.platform import TenantContract

GOLDEN = Path(__file__).parent / "golden" / "trainjob.json"
INPUT = RecordedChannel(
    name="train-0", kind="s3", location="s3://acme-data/sets/train/", uri="s3://acme-data/sets/train"
)


def pod_job(**compute: Any) -> JobSpec:
    content = job_content()
    content["compute"] = {"backend": "kubernetes", "instance_type": "p5.48xlarge", "instance_count": 2, "max_hours": 2}
    content["compute"] |= {"kubernetes": {"context": "eks-train"}} | compute
    content["training"]["global_batch_size"] = 32
    content["parallelism"] = {"data_shard": 8 * content["compute"]["instance_count"]}
    content["recovery"] = {"max_resumes": 3}
    return parse(JobSpec, content, "job")


def record_of(job: JobSpec, job_id: str = JOB_ID) -> JobRecord:
    return new_record(
        job,
        with_destination(job, f"s3://acme-checkpoints/jobs/{job_id}/"),
        job_id=job_id,
        backend="kubernetes",
        environment="test",
        plan={},
        image=IMAGE,
        channels=(INPUT,),
        forced=(),
        launched_by="",
    )


def objects_of(job: JobSpec, contract: TenantContract) -> list[dict[str, Any]]:
    record = record_of(job)
    return manifests(record, tenant_places(contract)(record))


def pod_spec(runtime: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]
    return spec


def test_the_manifests_are_the_golden_ones_and_the_clusters_schema_takes_them(contract: TenantContract) -> None:
    """To renew them: TRAINYARD_RENEW=1 pytest tests/launch/test_kubernetes.py -k golden; then read the difference."""
    config_map, runtime, train_job = objects_of(pod_job(queue="research"), contract)
    text = json.dumps([runtime, train_job], indent=1) + "\n"
    if os.environ.get("TRAINYARD_RENEW"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert schema_errors(runtime) == [] and schema_errors(train_job) == []
    assert config_map["data"].keys() == {"resolved_job.json", "channels.json", "inputs.json"}
    assert sum(map(len, config_map["data"].values())) < 100_000, "a ConfigMap holds a megabyte"


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("TrainJob", ("spec", "trainer", "gpus"), 8, "'gpus' was unexpected"),
        ("TrainJob", ("spec", "trainer", "numNodes"), "2", "is not of type 'integer'"),
        ("TrainJob", ("spec", "activeDeadlineSeconds"), 0, "less than the minimum"),
        ("TrainingRuntime", ("spec", "template", "spec", "failurePolicy", "rules"), [{"action": "x"}], "is not one of"),
    ],
)
def test_the_schema_refuses_what_a_cluster_would(
    kind: str, path: tuple[str, ...], value: Any, words: str, contract: TenantContract
) -> None:
    (item,) = (one for one in objects_of(pod_job(), contract) if one["kind"] == kind)
    inner = item
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert any(words in error for error in schema_errors(item)), schema_errors(item)


def test_each_way_to_end_has_its_consequence(contract: TenantContract) -> None:
    """As the Job's and JobSet's controllers read them: the first rule that fits."""
    _, runtime, _ = objects_of(pod_job(), contract)
    job_sets = runtime["spec"]["template"]["spec"]
    job = job_sets["replicatedJobs"][0]["template"]["spec"]
    codes = [
        code for rule in job["podFailurePolicy"]["rules"] for code in rule.get("onExitCodes", {}).get("values", [])
    ]
    assert codes == [RESUME_EXIT_CODE, *FINAL_EXIT_CODES] and entry.LOST_EXIT_CODE not in codes
    assert job["backoffLimit"] == 0 and pod_spec(runtime)["restartPolicy"] == "Never"
    assert job_sets["failurePolicy"]["maxRestarts"] == 3
    free, final = job_sets["failurePolicy"]["rules"]
    (saved, taken) = free["onJobFailureMessagePatterns"]
    # pkg/controller/job/pod_failure_policy.go of Kubernetes makes these sentences.
    message = "Container node for pod acme/x-node-0-0-abcde failed with exit code {} matching FailJob rule at index 1"
    assert saved in message.format(75) and not any(saved in message.format(code) for code in (1, 2, 7, 751))
    assert taken in "Pod acme/x-node-0-0-abcde has condition DisruptionTarget matching FailJob rule at index 0"
    assert (free["action"], final["action"]) == ("RestartJobSetAndIgnoreMaxRestarts", "FailJobSet")
    assert pod_spec(runtime)["terminationGracePeriodSeconds"] == GRACE_SECONDS


def test_gpus_and_efa_are_the_machines_own(contract: TenantContract) -> None:
    _, runtime, train_job = objects_of(pod_job(), contract)
    limits = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "memory": "1677721Mi"}
    requests = {"cpu": "153600m", **limits}  # of 192
    assert train_job["spec"]["trainer"]["resourcesPerNode"] == {"limits": limits, "requests": requests}
    assert pod_spec(runtime)["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    _, runtime, alone = objects_of(pod_job(instance_count=1), contract)
    assert alone["spec"]["trainer"]["resourcesPerNode"]["limits"] == {
        "nvidia.com/gpu": "8",
        "memory": "1677721Mi",
    }
    assert "affinity" not in pod_spec(runtime)


@pytest.mark.parametrize("kind", ["g5.xlarge", "p4d.24xlarge", "p5.48xlarge"])
def test_a_pod_leaves_no_room_for_another_and_some_for_the_kubelet(kind: str, contract: TenantContract) -> None:
    machine = hardware.instance(kind)
    content = pod_job(instance_type=kind, instance_count=1).model_dump(mode="json")
    job = parse(JobSpec, content | {"parallelism": {"data_shard": machine.num_gpus}}, "job")
    _, runtime, train_job = objects_of(job, contract)
    asked = train_job["spec"]["trainer"]["resourcesPerNode"]["requests"]
    memory, cpu = float(asked["memory"].removesuffix("Mi")), float(asked["cpu"].removesuffix("m"))
    # EKS keeps 255 MiB and 11 for each of at most 737 pods; a machine has a few percent less than its type says.
    most = min(737, 15 * machine.vcpus)
    assert machine.memory_gib * 512 < memory < 0.95 * machine.memory_gib * 1024 - 255 - 11 * most
    assert 500 * machine.vcpus < cpu < 950 * machine.vcpus
    (shm,) = (one for one in pod_spec(runtime)["volumes"] if one["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{int(memory) // 2}Mi"}


def test_memory_and_disk_are_the_jobs_where_it_says_them(contract: TenantContract) -> None:
    _, runtime, train_job = objects_of(pod_job(kubernetes={"memory_gib": 1.5, "disk_gib": 200}), contract)
    for one in train_job["spec"]["trainer"]["resourcesPerNode"].values():
        assert (one["memory"], one["ephemeral-storage"]) == ("1536Mi", "200Gi")
    volumes = {one["name"]: one.get("emptyDir") for one in pod_spec(runtime)["volumes"]}
    assert volumes["opt-ml"] == {"sizeLimit": "200Gi"} and volumes["shm"]["sizeLimit"] == "768Mi"
    assert schema_errors(runtime) == [] and schema_errors(train_job) == []
    for wrong in ({"memory_gib": 0}, {"disk_gib": -1}, {"disk_gib": 1.5}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            pod_job(kubernetes=wrong)


def test_a_claim_is_mounted_where_the_data_says(contract: TenantContract) -> None:
    chosen = {"volume_claim": "fsx", "node_selector": {"karpenter.sh/capacity-type": "spot"}, "service_account": "me"}
    _, runtime, _ = objects_of(pod_job(kubernetes=chosen), contract)
    spec = pod_spec(runtime)
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "fsx"}} in spec["volumes"]
    assert {"name": "shared", "mountPath": "/fsx"} in spec["containers"][0]["volumeMounts"]
    assert spec["nodeSelector"]["karpenter.sh/capacity-type"] == "spot" and spec["serviceAccountName"] == "me"
    assert schema_errors(runtime) == []


@pytest.mark.parametrize(
    "job_id", [JOB_ID, f"9lives-{'long-' * 7}x-20260131120000-1a2b", f"a-{'b' * 30}--20260131120000-ffff"]
)
def test_names_of_pods_are_names_in_dns(job_id: str) -> None:
    record = record_of(pod_job(), job_id)
    for attempt in (record, *(record.with_next_attempt() for _ in range(1))):
        name = object_name(attempt)
        assert name[0].isalpha() and len(f"{name}-node-0-9999-abcde") <= 63
        assert job_id[-20:] in name
    assert object_name(record) != object_name(record.with_next_attempt())


def backend_of(contract: TenantContract) -> KubernetesBackend:
    return kubernetes.tenant_backend(Account(None), contract)  # type: ignore[arg-type]


@pytest.fixture
def submitted(
    contract: TenantContract, kubectl: FakeKubectl
) -> tuple[KubernetesBackend, JobRecord, list[dict[str, Any]]]:
    backend, record = backend_of(contract), record_of(pod_job())
    backend.submit(record, lambda _: None)
    return backend, record, kubectl.applied


Submitted = tuple[KubernetesBackend, JobRecord, list[dict[str, Any]]]


def test_a_submission_is_one_apply_in_the_jobs_own_place(submitted: Submitted, kubectl: FakeKubectl) -> None:
    _, _, applied = submitted
    assert [item["kind"] for item in applied] == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    (call,) = kubectl.calls
    assert call[:4] == ["--context", "eks-train", "--namespace", "acme"]
    assert {item["metadata"]["namespace"] for item in applied} == {"acme"}
    labels = applied[2]["metadata"]["labels"]
    assert labels["trainyard/tenant"] == "acme" and labels["trainyard/cost-center"] == "research-100"


def test_the_next_attempt_takes_the_place_of_the_last(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, _ = submitted
    backend.submit(record.with_next_attempt(), lambda _: None)
    delete, _, apply = kubectl.calls[-3:]
    assert "delete" in delete and f"--selector=trainyard/job={JOB_ID},trainyard/attempt!=2" in delete
    assert "--wait=false" in delete, "a call ends before a pod has saved; how long is asked below"
    assert "apply" in apply and kubectl.applied[2]["metadata"]["name"].endswith("-r2")


def test_an_attempt_that_still_saves_does_not_meet_the_next_one(contract: TenantContract, kubectl: FakeKubectl) -> None:
    record, slept = record_of(pod_job()), []
    train_job = manifests(record, tenant_places(contract)(record))[2]
    saves = pod(train_job, 0, running=running())

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            saves["status"]["phase"] = "Succeeded"
            kubectl.has(saves)

    backend = KubernetesBackend(Kubectl(), tenant_places(contract), sleep=sleep)
    kubectl.has(saves)
    said: list[str] = []
    backend.submit(record.with_next_attempt(), said.append)
    verbs = [next(verb for verb in ("delete", "get", "apply") if verb in call) for call in kubectl.calls]
    assert verbs == ["delete", "get", "get", "get", "apply"] and len(slept) == 2
    assert said[-1] == f"the last attempt still saves: pod {saves['metadata']['name']}"
    saves["status"]["phase"] = "Running"
    kubectl.has(saves)
    slept += [0.0] * 10
    with pytest.raises(InputError, match=r"an attempt before still has pod \S+, after 190 s"):
        backend.submit(record.with_next_attempt(), say_nothing)
    assert "apply" not in kubectl.calls[-1]


def observed(
    backend: KubernetesBackend, record: JobRecord, kubectl: FakeKubectl, *objects: dict[str, Any]
) -> Observation:
    kubectl.has(*objects)
    seen = backend.observe(record)
    assert seen is not None
    assert backend.states([record]) == {record.job_id: seen.state}
    return seen


def test_a_job_is_followed_from_its_queue_to_its_end(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, applied = submitted
    config_map, _, train_job = applied
    seen = observed(backend, record, kubectl, config_map, train_job)
    assert (seen.state, seen.note) == ("Queued", "its pods are not made yet")
    waits = [pod(train_job, 0, scheduled=False), pod(train_job, 1, running=running())]
    seen = observed(backend, record, kubectl, config_map, train_job, *waits)
    assert (seen.state, seen.note) == ("Starting", "0/4 nodes are available: 4 Insufficient vpc.amazonaws.com/efa.")
    both = [pod(train_job, index, running=running()) for index in (0, 1)]
    seen = observed(backend, record, kubectl, config_map, train_job, *both, job_set(train_job, 2))
    assert (seen.state, seen.reclaims, seen.finished) == ("Training", 2, False)
    assert [(change.state, change.at) for change in seen.transitions] == [("Training", "2026-01-31T12:05:00+00:00")]
    ended = [pod(train_job, index, terminated=terminated(0)) for index in (0, 1)]
    train_job["status"] = {"conditions": [condition("Complete", "AllJobsCompleted")]}
    assert schema_errors(train_job) == [], "the form that the cluster gives"
    seen = observed(backend, record, kubectl, config_map, train_job, *ended)
    assert (seen.state, seen.running_seconds) == ("Completed", 3600)
    assert [change.state for change in seen.transitions] == ["Training", "Completed"]


@pytest.mark.parametrize(
    ("codes", "messages", "reason", "expected"),
    [
        ((75, 1), ("", "rank 8 on b: ValueError: no"), "FailedJobs", ("Failed", "", "rank 8 on b: ValueError: no")),
        ((69, 1), ("host b is gone: parted", "x"), "ReachedMaxRestarts", ("Failed", "", "host b is gone: parted")),
        (
            (137, 69),
            ("", "host a is gone"),
            "ReachedMaxRestarts",
            ("Failed", "", "its container ended with exit code 137 (Error)"),
        ),
        (
            (1, 75),
            ("step=1\nentrypoint: torch can't be imported", ""),
            "FailedJobs",
            ("Failed", "", "torch can't be imported"),
        ),
        ((75, 75), ("", ""), "FailedJobs", ("Stopped", "saved, and asks to be resumed", "")),
        (
            (75, 75),
            ("", ""),
            "DeadlineExceeded",
            ("Stopped", "its time limit came; told to save (compute.max_hours)", ""),
        ),
    ],
)
def test_why_a_job_failed(
    codes: tuple[int, int],
    messages: tuple[str, str],
    reason: str,
    expected: tuple[str, str, str],
    submitted: Submitted,
    kubectl: FakeKubectl,
) -> None:
    backend, record, (config_map, _, train_job) = submitted
    train_job["status"] = {"conditions": [condition("Failed", reason, "jobset failed")]}
    pods = [
        pod(train_job, index, terminated=terminated(code, words, f"2026-01-31T13:0{index}:00Z"))
        for index, (code, words) in enumerate(zip(codes, messages, strict=True))
    ]
    seen = observed(backend, record, kubectl, config_map, train_job, *pods)
    assert (seen.state, seen.note, seen.failure) == expected
    assert seen.transitions[-1].at == ENDED.replace("Z", "+00:00")


def test_an_image_that_cannot_be_pulled_is_named(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, (config_map, _, train_job) = submitted
    waits = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    seen = observed(backend, record, kubectl, config_map, train_job, pod(train_job, 0, waiting=waits))
    assert (seen.state, seen.note) == ("Starting", "ImagePullBackOff: Back-off pulling image")


def test_a_stop_tells_the_pods_and_is_remembered(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, (config_map, _, train_job) = submitted
    backend.stop(record)
    annotate, delete = kubectl.calls[-2:]
    name = object_name(record)
    assert annotate[5:8] == ["annotate", "configmap", name] and annotate[8].startswith(f"{STOP_MARK}=")
    assert delete[5:8] == ["delete", "trainjobs.trainer.kubeflow.org", name] and "--wait=false" in delete
    assert "--cascade=foreground" in delete, "it stays until its pods have saved"
    config_map["metadata"]["annotations"] = {STOP_MARK: "2026-01-31T13:00:00+00:00"}
    train_job["metadata"]["deletionTimestamp"] = ENDED
    seen = observed(backend, record, kubectl, config_map, train_job, pod(train_job, 0, running=running()))
    assert seen.state == "Stopping"
    seen = observed(backend, record, kubectl, config_map)
    assert (seen.state, seen.note, seen.ended_at) == ("Stopped", "", "2026-01-31T13:00:00+00:00")
    del config_map["metadata"]["annotations"]
    assert observed(backend, record, kubectl, config_map).note == "its TrainJob was deleted, or never applied"
    kubectl.has()
    assert backend.observe(record) is None


def test_kueue_holds_a_job_until_it_is_admitted(contract: TenantContract, kubectl: FakeKubectl) -> None:
    backend, record = backend_of(contract), record_of(pod_job(queue="research"))
    backend.submit(record, lambda _: None)
    config_map, _, train_job = kubectl.applied
    train_job["status"] = {"conditions": [condition("Suspended", "Suspended")]}
    seen = observed(backend, record, kubectl, config_map, train_job)
    assert (seen.state, seen.note) == ("Queued", "in queue research: Kueue has not admitted it yet")


def test_logs_come_once_in_time_order_from_every_pod(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, (_, _, train_job) = submitted
    pods = [pod(train_job, index, running=running()) for index in (0, 1)] + [pod(train_job, 2, scheduled=False)]
    kubectl.has(*pods)
    first, second = (one["metadata"]["name"] for one in pods[:2])
    kubectl.answers("logs", first, out="2026-01-31T12:05:01.100000001Z step=1\n2026-01-31T12:05:03.2Z step=2\n")
    kubectl.answers("logs", second, out="2026-01-31T12:05:02.5Z hello there\n")
    cursor = LogCursor()
    lines = backend.read_logs(record, cursor)
    assert [(line.host, line.text) for line in lines] == [
        ("node-0", "step=1"),
        ("node-1", "hello there"),
        ("node-0", "step=2"),
    ]
    assert [line.at_ms % 10000 for line in lines] == [1100, 2500, 3200]
    # The server sends the last second's lines again.
    kubectl.answers("logs", first, out="2026-01-31T12:05:03.2Z step=2\n2026-01-31T12:05:03.7Z step=3\n")
    assert [line.text for line in backend.read_logs(record, cursor)] == ["step=3"]
    assert any("--since-time=2026-01-31T12:05:03.2Z" in call for call in kubectl.calls)
    assert not any("--tail=" in word for call in kubectl.calls for word in call)
    backend.read_logs(record, LogCursor(from_end=True))
    assert "--tail=2000" in kubectl.calls[-1]
    kubectl.answers("logs", first, out="2026-01-31T12:05:03.2Z step=2\n")
    lines = backend.read_logs(record, LogCursor(first_host_alone=True))
    assert {line.host for line in lines} == {"node-0"} and first in kubectl.calls[-1], "a call a pod"


def test_any_bytes_may_be_in_a_log(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, (_, _, train_job) = submitted
    kubectl.has(one := pod(train_job, 0, running=running()))
    name = one["metadata"]["name"]
    bar = "2026-01-31T12:05:01.2Z  1%|\r 50%|\x0c \x85 \u2028 \udcff 100%\nunable to go on\n"
    kubectl.answers("logs", name, out=f"{bar}2026-01-31T13:05:01.25+01:00 step=1\n2026-01-31T12:05:01.3Z \n")
    cursor = LogCursor()
    lines = backend.read_logs(record, cursor)
    assert [line.text for line in lines] == [
        " 1%|\r 50%|\x0c \x85 \u2028 \ufffd 100%",
        "unable to go on",
        "step=1",
        "",
    ]
    assert [line.at_ms % 10000 for line in lines] == [1200, 1200, 1250, 1300]
    assert backend.read_logs(record, cursor) == []


def test_a_log_that_the_machine_lacks_is_said_once(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, (_, _, train_job) = submitted
    kubectl.has(one := pod(train_job, 0, running=running()))
    kubectl.answers("logs", one["metadata"]["name"], out="unable to retrieve container logs for containerd://ab")
    cursor = LogCursor()
    (line,) = backend.read_logs(record, cursor)
    assert line.text == "unable to retrieve container logs for containerd://ab"
    assert backend.read_logs(record, cursor) == []


@pytest.mark.parametrize(
    "words",
    [
        'Error from server (NotFound): pods "x" not found\n',
        'Error from server (BadRequest): container "node" in pod "x" is waiting to start: ContainerCreating\n',
    ],
)
def test_a_pod_that_went_before_its_log_was_read_has_none(
    words: str, submitted: Submitted, kubectl: FakeKubectl
) -> None:
    backend, record, (_, _, train_job) = submitted
    kubectl.has(*(pods := [pod(train_job, index, running=running()) for index in (0, 1)]))
    kubectl.answers("logs", pods[0]["metadata"]["name"], err=words, code=1)
    kubectl.answers("logs", pods[1]["metadata"]["name"], out="2026-01-31T12:05:02Z step=1\n")
    assert [line.text for line in backend.read_logs(record, LogCursor())] == ["step=1"]
    kubectl.answers("get", err="Unable to connect to the server: net/http: TLS handshake timeout\n", code=1)
    with pytest.raises(AwayError, match="does not answer"):
        backend.read_logs(record, LogCursor())


def test_a_job_at_its_deadline_has_not_ended_while_its_pods_save(submitted: Submitted, kubectl: FakeKubectl) -> None:
    backend, record, (config_map, _, train_job) = submitted
    train_job["status"] = {"conditions": [condition("Failed", "DeadlineExceeded", "jobset failed")]}
    pods = [pod(train_job, 0, running=running()), pod(train_job, 1, terminated=terminated(75))]
    seen = observed(backend, record, kubectl, config_map, train_job, *pods)
    assert (seen.state, seen.finished) == ("Stopping", False) and "its time limit came" in seen.note


@pytest.mark.parametrize(
    ("words", "err", "expected"),
    [
        (
            ("apply",),
            'error: context "eks-train" does not exist\n',
            r"context eks-train: is not in kubectl's .*has: eks-train, eks-old",
        ),
        (
            ("apply",),
            'no matches for kind "TrainingRuntime" in version "trainer.kubeflow.org/v1alpha1"\n',
            "has no Kubeflow Trainer",
        ),
        (
            ("apply",),
            "The connection to the server 10.0.0.1 was refused - did you specify the right host or port?\n",
            "does not answer",
        ),
        (("can-i",), "no\n", "kubectl auth: namespace acme of eks-train: you may not create"),
        (
            ("apply",),
            'Error from server (NotFound): namespaces "acme" not found\n',
            r'\(NotFound\): namespaces "acme" not found',
        ),
    ],
)
def test_what_the_cluster_refuses_is_one_line(
    words: tuple[str, ...], err: str, expected: str, contract: TenantContract, kubectl: FakeKubectl
) -> None:
    kubectl.answers(*words, err=err, code=1)
    with pytest.raises(InputError, match=expected) as error:
        backend_of(contract).check(record_of(pod_job()))
    assert "\n" not in str(error.value)


def test_memory_that_no_machine_has_is_refused(contract: TenantContract, kubectl: FakeKubectl) -> None:
    backend_of(contract).check(record_of(pod_job(kubernetes={"memory_gib": 1900})))
    with pytest.raises(InputError, match=r"memory_gib 2048: p5\.48xlarge has 2048 GiB, .* leave it out for 80%"):
        backend_of(contract).check(record_of(pod_job(kubernetes={"memory_gib": 2048})))


def test_no_kubectl_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, contract: TenantContract) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="there is no `kubectl` on the PATH here; install it"):
        backend_of(contract).check(record_of(pod_job()))


def test_a_tenants_launch_is_recorded_and_holds_to_its_limits(
    deployed: Account, contract: TenantContract, kubectl: FakeKubectl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    job = pod_job(kubernetes={}, instance_type="p5.4xlarge", max_hours=1)
    job = parse(JobSpec, job.model_dump(mode="json") | {"parallelism": {"data_shard": 2}}, "job")
    record = launch_on_tenants_kubernetes(job, contract, account=deployed, launcher=deployed, force=True)
    assert record.backend == "kubernetes" and record.image == IMAGE and record.state == "Submitted"
    assert record.resolved.spec.compute.kubernetes.context == "eks-train", "kubectl's current one, kept"
    assert record.checkpoint_destination == f"s3://acme-checkpoints/jobs/{record.job_id}/"
    listed = json.loads(kubectl.applied[0]["data"]["inputs.json"])
    assert {"name": "train-0", "kind": "s3", "location": "s3://acme-data/sets/train/"} in listed
    assert S3RecordStore(deployed.client("s3"), "acme-data").read(record.job_id).record == record
    too_long = parse(
        JobSpec, job.model_dump(mode="json") | {"compute": {**job.compute.model_dump(), "max_hours": 100}}, "job"
    )
    calls = len(kubectl.calls)
    with pytest.raises(InputError, match="over the 24 hours that tenant acme's jobs may run"):
        launch_on_tenants_kubernetes(too_long, contract, account=deployed, launcher=deployed)
    assert not any("apply" in call for call in kubectl.calls[calls:])


def here_job(**changes: Any) -> JobSpec:
    content = pod_job(instance_count=1, kubernetes={"image": IMAGE}).model_dump(mode="json")
    content["tenant"] = None
    content["data"] = {"train": [{"path": "s3://sets/train/", "format": "jsonl"}], "sequence_length": 64}
    content["data"]["tokenizer"] = "s3://sets/tokenizer.json"
    content["checkpoint"]["destination"] = "s3://results/tiny"
    return parse(JobSpec, content | changes, "job")


def memory_job(**kubernetes: Any) -> JobSpec:
    """Of 7 B parameters on one host of eight GPUs: some 80 GiB of copies for a save, 40 more for the processes."""
    model: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    model |= {"num_key_value_heads": 32, "model_type": "llama", "vocab_size": 32000}
    compute = pod_job(instance_count=1, kubernetes={"image": IMAGE, **kubernetes}).compute.model_dump(mode="json")
    return here_job(model={"config": model}, compute=compute)


def test_memory_that_a_pod_cannot_have_is_refused_unless_forced_and_what_is_assumed_is_said(
    kubectl: FakeKubectl, tmp_path: Path
) -> None:
    """The plan is the planner's own."""
    said: list[str] = []
    _, refusals = planned(memory_job(), say=said.append)
    host = planner.plan(memory_job()).chosen.host
    assert refusals == [] and not any("its pod may have" in line for line in said)
    assert 60 < host.checkpoint_gib < 100 < host.total_gib
    tight = memory_job(memory_gib=(host.checkpoint_gib + host.total_gib) / 2)
    assert planned(tight, say=said.append)[1] == []
    (warning,) = [line for line in said if "its pod may have" in line]
    assert warning.startswith(f"warning: the plan has {host.total_gib:.0f} GiB in a host's memory")
    small = memory_job(memory_gib=30)
    told = f"offloaded take {host.checkpoint_gib:.0f} GiB of a host's memory, and its pod may have 30: raise"
    with pytest.raises(InputError, match=told) as refused:
        launch_on_kubernetes_here(small, tmp_path)
    assert "\n" not in str(refused.value) and not any("apply" in call for call in kubectl.calls)
    record = launch_on_kubernetes_here(small, tmp_path, force=True)
    assert any("its pod may have 30" in reason for reason in record.forced)
    # And it is resumed without a word, as is one from before there was such a limit.
    for one in (record, record.model_copy(update={"forced": ()})):
        kubernetes.here_backend(tmp_path).check(one.with_next_attempt())
    elsewhere = small.model_copy(update={"compute": small.compute.model_copy(update={"backend": "slurm"})})
    assert planned(elsewhere)[1] == [], "no pod, no limit"


def test_a_job_without_a_tenant_is_launched_stopped_and_resumed(kubectl: FakeKubectl, tmp_path: Path) -> None:
    record = launch_on_kubernetes_here(here_job(), tmp_path, force=True)
    assert kubectl.calls[-1][3] == "default" and record.resolved.spec.compute.kubernetes.context == "eks-train"
    config_map, _, train_job = kubectl.applied
    kubectl.has(config_map, train_job, pod(train_job, 0, running=running()))
    store, backend = FolderRecordStore(tmp_path), kubernetes.here_backend(tmp_path)
    assert watch.status(store, backend, record.job_id).state == "Training"
    watch.stop(store, backend, record.job_id)
    kubectl.has(config_map | {"metadata": {**config_map["metadata"], "annotations": {STOP_MARK: "x"}}})
    assert watch.status(store, backend, record.job_id).state == "Stopped"
    watch.resume(store, backend, record.job_id)
    assert kubectl.applied[2]["metadata"]["name"] == f"{object_name(record)}-r2"
    states = [change.state for change in store.read(record.job_id).record.states]
    assert states == ["Created", "Submitted", "Training", "Stopped", "Created", "Submitted"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute": {"backend": "kubernetes"}}, "compute.kubernetes.image: is missing"),
        (
            {"checkpoint": {"destination": "/tmp/x", "every_steps": 5}},
            "checkpoint.destination /tmp/x: goes with the pod",
        ),
        ({"model": {"source": "fsx://models/x"}}, "fsx://models/x: is on a file system that the pods don't have"),
        ({"model": {"source": "models/x"}}, "models/x: is on no machine of the cluster"),
    ],
)
def test_what_no_pod_could_reach_is_refused(
    changes: dict[str, Any], words: str, kubectl: FakeKubectl, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        launch_on_kubernetes_here(here_job(**changes), tmp_path, force=True)
    assert not any("apply" in call for call in kubectl.calls)


def test_spot_is_asked_for_by_label(contract: TenantContract) -> None:
    with pytest.raises(
        InputError, match=r"set compute.kubernetes.node_selector to \{eks.amazonaws.com/capacityType: SPOT"
    ):
        objects_of(pod_job(spot=True), contract)


def test_the_config_map_is_laid_out_as_a_container_would_have_it(tmp_path: Path, contract: TenantContract) -> None:
    config_map, runtime, _ = objects_of(pod_job(), contract)
    for name, text in config_map["data"].items():
        (tmp_path / name).write_text(text)
    entry.lay_out(tmp_path, tmp_path / "data")
    found = {path.relative_to(tmp_path / "data").as_posix() for path in (tmp_path / "data").rglob("*.json")}
    assert found == {"job/resolved_job.json", "job/channels.json", "inputs.json"}
    with pytest.raises(InputError, match=r"none/resolved_job.json: can't be read"):
        entry.lay_out(tmp_path / "none", tmp_path / "data")
    mounts = pod_spec(runtime)["containers"][0]["volumeMounts"]
    inside = [mount["mountPath"] for mount in mounts if mount["mountPath"].startswith("/opt/ml/")]
    assert inside == [], "root would own the folders above it"


def test_a_pod_finds_its_place_by_the_controllers_variables(tmp_path: Path) -> None:
    settings = {"PET_NNODES": "11", "PET_NODE_RANK": "10", "PET_MASTER_ADDR": "job-node-0-0.job"}
    hosts = entry.host_names(settings)
    assert hosts[0] == "job-node-0-0.job" and hosts[10] == "job-node-0-10.job" and len(hosts) == 11
    entry.write_place(tmp_path, hosts, 10, "p5.48xlarge")
    from trainer.entrypoint import read_place

    place = read_place(tmp_path)
    assert (place.index, place.hosts, place.instance_type) == (10, tuple(hosts), "p5.48xlarge")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PET_NNODES", "auto", "PET_NNODES: is 'auto', so this is no pod of a TrainJob's"),
        ("PET_NODE_RANK", "2", "PET_NODE_RANK 2: must be below PET_NNODES 2"),
        ("PET_MASTER_ADDR", "", "PET_MASTER_ADDR '': is no first pod's name"),
    ],
)
def test_a_pod_of_something_else_says_so(name: str, value: str, words: str, tmp_path: Path) -> None:
    settings = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"} | {name: value}
    message = tmp_path / "message"
    settings |= {"TRAINYARD_OPT_ML": str(tmp_path / "ml"), "TRAINYARD_TERMINATION_LOG": str(message)}
    assert entry.main(settings) == 2
    assert message.read_text().startswith(words)


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (1, "host b is gone: its entrypoint was killed, or the network parted", 69),
        (1, "the first host (a) is gone: its entrypoint was killed, or the network parted", 69),
        (1, "host b-node-0-0.b has no address after 600 s: [Errno -2] Name or service not known", 69),
        (1, "the first host (10.0.0.1 port 29401) does not answer after 600 s: timed out; does the security", 69),
        (1, "rank 1 on b: ValueError: host b is gone", 1),
        (2, "PET_NNODES: is not set", 2),
        (75, "", 75),
        (0, "", 0),
    ],
)
def test_a_lost_host_has_an_exit_code_of_its_own(code: int, reason: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output/failure").write_text(f"{reason}\nmore\n")
    assert entry.tell_ending(code, tmp_path, tmp_path / "message") == expected
    assert (tmp_path / "message").exists() == (code in (1, 2))


def test_the_names_of_classes_are_brought_too() -> None:
    job = pod_job().model_copy(update={"images": ImageSpec.model_construct(class_names="fsx://sets/names.txt")})
    with pytest.raises(InputError, match=r"fsx://sets/names.txt: is on a file system that the pods don't have"):
        kubernetes._check_shared(job)
