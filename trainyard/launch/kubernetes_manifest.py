"""A job as the objects of Kubeflow Trainer v2 that run it: one pure function. What becomes of them is docs/clusters.md.

An attempt is three objects of one name: a ConfigMap (the channel `job`, and the mark that the attempt was submitted), a
TrainingRuntime (the pods, and what follows from each way they end) and the TrainJob that runs it. The runtime is the
attempt's own, as a TrainJob can patch neither `podFailurePolicy` nor `failurePolicy`.
"""

import re
from dataclasses import dataclass
from typing import Any

from trainyard import hardware
from trainyard.errors import InputError
from trainyard.launch.channels import job_files
from trainyard.launch.machines import IMAGE_PYTHON, SHARED_ROOT, common_variables, efa_interfaces
from trainyard.launch.record import JobRecord
from trainyard.spec.job import JobSpec, ResolvedJob

API_VERSION = "trainer.kubeflow.org/v1alpha1"
LABEL = "trainyard"
"""Prefix of our labels and annotations."""
NODE = "node"
"""Kubeflow Trainer's word for the job, and the container, that trains."""
GRACE_SECONDS = 130
"""After SIGTERM a host gives its ranks 110 s to save (trainer.host.run); then its pod is killed."""
RESUME_EXIT_CODE = 75
"""The trainer's word for "told to stop, saved"."""
FINAL_EXIT_CODES = (1, 2)
"""The job failed, its input was wrong: another start would end the same way."""
JOB_FOLDER = "/etc/trainyard/job"
"""Where a pod finds its ConfigMap (trainer.kubernetes)."""
_MOST_NAME = 63
_POD_SUFFIX = "-node-0-9999-abcde"
"""What JobSet and Job add to a TrainJob's name for a pod's; the whole is a name in DNS."""
_SHARE_OF_MACHINE = 0.8
"""Of a machine's CPUs and memory a pod asks for so much: no second one fits beside it, and the kubelet's own reserve
(EKS: 255 MiB + 11 MiB for each pod that a machine may have) and the daemons of a cluster find room on all types."""
_TRAINER_USER = 1001
"""User and group `trainer` of the training image (training_container/Dockerfile)."""


@dataclass(frozen=True)
class KubernetesPlace:
    """Where on a cluster a job goes."""

    namespace: str
    image: str
    """By digest."""
    labels: tuple[tuple[str, str], ...] = ()
    """Whose it is: tenant, environment, cost centre."""
    service_account: str | None = None
    region: str | None = None
    """Of the data that the job reads and writes; None without AWS."""


def object_name(record: JobRecord) -> str:
    """Name of the newest attempt's objects: the job's own, cut so that its pods' names are names in DNS."""
    number = record.attempt.number
    suffix = f"-r{number}" if number > 1 else ""
    tail = record.job_id[-20:]  # "-20260131120000-1a2b": no two jobs have the same
    head = record.job_id[:-20]
    if not head[:1].isalpha():
        head = f"t{head}"
    return f"{head[: _MOST_NAME - len(_POD_SUFFIX) - len(tail) - len('-r99')].rstrip('-')}{tail}{suffix}"


def manifests(record: JobRecord, place: KubernetesPlace) -> list[dict[str, Any]]:
    """The newest attempt of `record` as `kubectl apply` takes it, in order; nothing is read and no clock is asked."""
    job = record.resolved
    if job.spec.compute.spot:
        raise InputError(
            "compute.spot: a cluster's spot machines are named by their labels: leave it out, and set "
            "compute.kubernetes.node_selector to {eks.amazonaws.com/capacityType: SPOT} or "
            "{karpenter.sh/capacity-type: spot}"
        )
    labels = labels_of(record, place)
    metadata = {"name": object_name(record), "namespace": place.namespace, "labels": labels}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": job_files(record)},
        {
            "apiVersion": API_VERSION,
            "kind": "TrainingRuntime",
            "metadata": {**metadata, "labels": {**labels, "trainer.kubeflow.org/framework": "torch"}},
            "spec": {
                "mlPolicy": {"numNodes": job.num_hosts, "torch": {}},
                "template": {"metadata": {"labels": labels}, "spec": _job_set(record, place)},
            },
        },
        {
            "apiVersion": API_VERSION,
            "kind": "TrainJob",
            "metadata": {**metadata, "labels": {**labels, **_queue(job)}},
            "spec": {
                "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": metadata["name"]},
                "activeDeadlineSeconds": max(1, round(job.spec.compute.max_hours * 3600)),
                "trainer": {
                    "image": place.image,
                    "command": [IMAGE_PYTHON, "-u", "-m", "trainer.kubernetes"],
                    "numNodes": job.num_hosts,
                    "numProcPerNode": job.processes_per_host,
                    "resourcesPerNode": _resources(job),
                    "env": [{"name": name, "value": value} for name, value in variables(record, place).items()],
                },
            },
        },
    ]


def labels_of(record: JobRecord, place: KubernetesPlace) -> dict[str, str]:
    """By which all objects of an attempt are found; values as Kubernetes takes them."""
    own = {"job": record.job_id, "attempt": str(record.attempt.number), "name": record.spec.name}
    return {f"{LABEL}/{key}": _label_value(value) for key, value in {**own, **dict(place.labels)}.items()}


def variables(record: JobRecord, place: KubernetesPlace) -> dict[str, str]:
    """What the ranks find in their environment, beside what the controller sets."""
    job = record.resolved
    found = common_variables(record, place.region)
    if job.spec.compute.instance_type:
        found["TRAINYARD_INSTANCE_TYPE"] = job.spec.compute.instance_type.removeprefix("ml.")
    if not efa_interfaces(job):
        found["TRAINYARD_SKIP_EFA_CHECK"] = "1"
    return found


def _label_value(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-._")


def _queue(job: ResolvedJob) -> dict[str, str]:
    queue = job.spec.compute.queue
    return {"kueue.x-k8s.io/queue-name": queue} if queue else {}


def _machine(job: JobSpec) -> hardware.Instance | None:
    kind = job.compute.instance_type
    return hardware.instance(kind) if kind else None


def _resources(job: ResolvedJob) -> dict[str, dict[str, str]]:
    """A whole machine: its GPUs and EFA interfaces, and of its CPUs, memory and disk what pods may have.

    Memory and disk are limits too: a pod that takes more is ended for that, which is counted as a failure; the kubelet
    of a machine that ran short would evict it as it does for a drain, which is not. CPUs are not: to be throttled helps
    nobody.
    """
    machine, limits, cpus = _machine(job.spec), {}, {}
    if machine is not None and machine.gpu is not None:
        limits["nvidia.com/gpu"] = str(machine.num_gpus)
    if job.num_hosts > 1 and efa_interfaces(job):
        limits["vpc.amazonaws.com/efa"] = str(efa_interfaces(job))
    if memory := memory_mib(job.spec):
        limits["memory"] = f"{memory}Mi"
    if disk := job.spec.compute.kubernetes.disk_gib:
        limits["ephemeral-storage"] = f"{disk}Gi"
    if machine is not None:
        cpus["cpu"] = f"{int(1000 * _SHARE_OF_MACHINE * machine.vcpus)}m"
    return {key: value for key, value in (("limits", limits), ("requests", {**cpus, **limits})) if value}


def memory_mib(job: JobSpec) -> int | None:
    """MiB that a pod may have: what the job says, else the machine's share; None where neither is known."""
    if given := job.compute.kubernetes.memory_gib:
        return round(1024 * given)
    machine = _machine(job)
    return None if machine is None else int(1024 * _SHARE_OF_MACHINE * machine.memory_gib)


def check_memory(job: JobSpec) -> None:
    """InputError where no machine has the memory that the pod asks for: the cluster would wait for ever."""
    given, machine = job.compute.kubernetes.memory_gib, _machine(job)
    if given and machine is not None and given >= machine.memory_gib:
        raise InputError(
            f"compute.kubernetes.memory_gib {given:g}: {machine.type} has {machine.memory_gib:g} GiB, of which the"
            f" kubelet and the system keep some; leave it out for {_SHARE_OF_MACHINE:.0%} of that"
        )


def _job_set(record: JobRecord, place: KubernetesPlace) -> dict[str, Any]:
    """One Job of as many pods as hosts. All of them start again together, or none: a rank that is alone can do nothing.

    Job failures: told to stop or taken from its machine, which costs no restart; 1 and 2, which are final; all else (a
    lost host, out of memory) is counted. FailJob is the only action that tells JobSet which of them it was.
    """
    fails = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        _on_exit_codes(RESUME_EXIT_CODE),
        _on_exit_codes(*FINAL_EXIT_CODES),
    ]
    free = {
        "name": "taken",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"failed with exit code {RESUME_EXIT_CODE} ", "condition DisruptionTarget "],
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "failurePolicy": {
            "maxRestarts": record.resolved.spec.recovery.max_resumes,
            # No pod of a start is there any longer when the next one begins: it would write where that one reads.
            "restartStrategy": "BlockingRecreate",
            "rules": [free, final],
        },
        "replicatedJobs": [
            {
                "name": NODE,
                "replicas": 1,
                "template": {
                    "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                    "spec": {
                        "backoffLimit": 0,
                        "podFailurePolicy": {"rules": fails},
                        "template": {"metadata": {"labels": labels_of(record, place)}, "spec": _pod(record, place)},
                    },
                },
            }
        ],
    }


def _on_exit_codes(*codes: int) -> dict[str, Any]:
    return {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": list(codes)}}


def _pod(record: JobRecord, place: KubernetesPlace) -> dict[str, Any]:
    job, kubernetes = record.resolved, record.resolved.spec.compute.kubernetes
    kind = job.spec.compute.instance_type
    selector = {"node.kubernetes.io/instance-type": kind.removeprefix("ml.")} if kind else {}
    volumes, mounts = _volumes(record)
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": {**selector, **kubernetes.node_selector},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "securityContext": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _TRAINER_USER),
        "containers": [
            {
                "name": NODE,
                "image": place.image,
                "volumeMounts": mounts,
                # The reason is the file's first line; where there is none, the end of the log.
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
        "volumes": volumes,
    }
    if place.service_account:
        pod["serviceAccountName"] = place.service_account
    if job.num_hosts > 1:
        attempt = {name: labels_of(record, place)[name] for name in (f"{LABEL}/job", f"{LABEL}/attempt")}
        apart = {"labelSelector": {"matchLabels": attempt}, "topologyKey": "kubernetes.io/hostname"}
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    return pod


def _volumes(record: JobRecord) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The container's /opt/ml on the machine's disk, the channel `job`, shared memory for NCCL, the shared claim."""
    kubernetes, memory = record.resolved.spec.compute.kubernetes, memory_mib(record.resolved.spec)
    claim = kubernetes.volume_claim
    volumes: list[dict[str, Any]] = [
        {"name": "opt-ml", "emptyDir": {"sizeLimit": f"{kubernetes.disk_gib}Gi"} if kubernetes.disk_gib else {}},
        # As Linux has it for a tmpfs: half of the memory, of which what lies there is a part.
        {"name": "shm", "emptyDir": {"medium": "Memory", **({"sizeLimit": f"{memory // 2}Mi"} if memory else {})}},
        {"name": "job", "configMap": {"name": object_name(record)}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "opt-ml", "mountPath": "/opt/ml"},
        {"name": "shm", "mountPath": "/dev/shm"},
        # Not inside of /opt/ml: the folders above a mount are made by root, and the trainer could not write beside it.
        {"name": "job", "mountPath": JOB_FOLDER},
    ]
    if claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "shared", "mountPath": SHARED_ROOT})
    return volumes, mounts
