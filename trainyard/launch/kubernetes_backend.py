"""Jobs on a Kubernetes cluster with Kubeflow Trainer: submitted, watched and stopped through kubectl.

What is known of an attempt is in its objects (`trainyard.launch.kubernetes_manifest`), found by their labels. A stop
deletes the TrainJob, which tells the pods; the ConfigMap stays and says that it was so. The objects of an attempt go
with the next one's submission.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trainyard.errors import InputError
from trainyard.launch.backend import LogCursor, LogLine, Observation, Say
from trainyard.launch.kubectl import Cluster, NotThereError, Where, found
from trainyard.launch.kubernetes_manifest import (
    GRACE_SECONDS,
    LABEL,
    NODE,
    RESUME_EXIT_CODE,
    KubernetesPlace,
    check_memory,
    manifests,
    object_name,
)
from trainyard.launch.record import JobRecord, StateChange, utc_now

KINDS = "configmaps,trainjobs.trainer.kubeflow.org,jobsets.jobset.x-k8s.io,pods"
STOP_MARK = f"{LABEL}/stop-requested"
_BROKEN_WAITS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"}
"""Reasons of a container that waits, with which it will wait for ever."""
_LATER_SECONDS = 60
"""A pod may take so much longer to go than it is given to save."""
_POLL_SECONDS = 5
TAIL_LINES = 2000
"""Of each log whose newest lines are wanted."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")
"""A time as a log's line begins with it: RFC 3339, to the nanosecond, in the machine's own time zone."""

_WRITING_KINDS = {"TrainJob", "JobSet", "Pod"}
PlaceOf = Callable[[JobRecord], KubernetesPlace]


class KubernetesBackend:
    """Jobs of one person's clusters, each in the context and namespace that its record names."""

    def __init__(
        self,
        cluster: Cluster,
        place_of: PlaceOf,
        refusals: Callable[[JobRecord], Sequence[str]] = lambda _: (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`place_of`: where a record's job goes; InputError where nothing takes it any longer. `refusals`: why its
        owner may not start it, beyond what the cluster says."""
        self._cluster = cluster
        self._place_of = place_of
        self._refusals = refusals
        self._sleep = sleep

    def check(self, record: JobRecord) -> None:
        """InputError where the newest attempt is over its owner's limits (and was not forced), or where the cluster
        would not take its objects. The TrainJob itself is not asked about: its check looks for its runtime."""
        place = self._place_of(record)
        objects = manifests(record, place)
        check_memory(record.resolved.spec)
        if refused := [reason for reason in self._refusals(record) if reason not in record.forced]:
            raise InputError(f"job {record.job_id}: {'; '.join(refused)}")
        where = _where(record, place.namespace)
        self._cluster.call(where, "apply", "--dry-run=server", "--filename=-", manifest=objects[:-1])
        self._cluster.call(where, "auth", "can-i", "create", "trainjobs.trainer.kubeflow.org")

    def submit(self, record: JobRecord, say: Say) -> None:
        """Apply the newest attempt's objects; those of earlier ones go. What is there already stays as it is."""
        place = self._place_of(record)
        where = _where(record, place.namespace)
        say(f"submitting {object_name(record)} to {where}")
        if record.attempt.number > 1:
            older = f"{LABEL}/job={record.job_id},{LABEL}/attempt!={record.attempt.number}"
            kinds = "trainjobs.trainer.kubeflow.org,trainingruntimes.trainer.kubeflow.org,configmaps"
            self._cluster.call(where, "delete", kinds, f"--selector={older}", "--cascade=foreground", "--wait=false")
            self._wait_for_the_end(where, older, str(record.attempt.number), say)
        self._cluster.call(where, "apply", "--filename=-", manifest=manifests(record, place))

    def _wait_for_the_end(self, where: Where, selector: str, attempt: str, say: Say) -> None:
        """Until nothing of earlier attempts is left that writes: two would write to one place. Pods are asked about
        themselves, as those of a job that was at its deadline outlive their TrainJob's children while they save."""
        left: list[str] = []
        for _ in range((GRACE_SECONDS + _LATER_SECONDS) // _POLL_SECONDS + 1):
            kinds = "trainjobs.trainer.kubeflow.org,jobsets.jobset.x-k8s.io,pods"
            objects = found(self._cluster.call(where, "get", kinds, f"--selector={selector}", "--output=json"))
            left = [_called(one) for one in objects if _may_write(one, attempt)]
            if not left:
                return
            say(f"the last attempt still saves: {', '.join(left[:3])}")
            self._sleep(_POLL_SECONDS)
        raise InputError(
            f"{where}: an attempt before still has {', '.join(left)}, after {GRACE_SECONDS + _LATER_SECONDS} s; "
            "on a machine that is lost a pod stays until its node is deleted. Once it can't write any longer: kubectl "
            "delete pod NAME --force --grace-period=0, then resume again"
        )

    def observe(self, record: JobRecord) -> Observation | None:
        """The newest attempt by its objects; None where the cluster has none of them."""
        return self._looked([record], f"{LABEL}/job={record.job_id}").get(record.job_id)

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """One call for each namespace."""
        seen = self._looked([record for record in records if not record.finished], f"{LABEL}/job")
        return {job_id: observation.state for job_id, observation in seen.items()}

    def _looked(self, records: Iterable[JobRecord], selector: str) -> dict[str, Observation]:
        by_place: dict[Where, list[JobRecord]] = {}
        for record in records:
            by_place.setdefault(_where(record, namespace_of(record)), []).append(record)
        seen = {}
        for where, ours in by_place.items():
            objects = found(self._cluster.call(where, "get", KINDS, f"--selector={selector}", "--output=json"))
            for record in ours:
                look = Look.of(record, objects)
                if (observation := look.observation(record.attempt.number)) is not None:
                    seen[record.job_id] = observation
        return seen

    def stop(self, record: JobRecord) -> None:
        """Mark the attempt, and delete its TrainJob: its pods are told, save, and end within their grace period."""
        where, name = _where(record, namespace_of(record)), object_name(record)
        self._cluster.call(where, "annotate", "configmap", name, f"{STOP_MARK}={utc_now()}", "--overwrite")
        self._cluster.call(
            where,
            *("delete", "trainjobs.trainer.kubeflow.org", name),
            *("--cascade=foreground", "--wait=false", "--ignore-not-found"),
        )

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """New lines of every pod of the newest attempt that has begun; a start's logs go with its pods."""
        where = _where(record, namespace_of(record))
        selector = f"{LABEL}/job={record.job_id},{LABEL}/attempt={record.attempt.number}"
        pods = found(self._cluster.call(where, "get", "pods", f"--selector={selector}", "--output=json"))
        lines: list[LogLine] = []
        for pod in sorted(pods, key=_index):
            if cursor.first_host_alone and _index(pod) > 0:
                continue
            if _container(pod).get("state", {}).keys() & {"running", "terminated"}:
                lines += self._new_lines(where, pod, cursor)
        cursor.more = False
        return sorted(lines, key=lambda line: line.at_ms or 0)

    def _new_lines(self, where: Where, pod: dict[str, Any], cursor: LogCursor) -> list[LogLine]:
        name = str(pod["metadata"]["name"])
        last = cursor.positions.get(name, "")
        newest = [f"--tail={TAIL_LINES}"] if cursor.from_end else []
        since = [f"--since-time={last}"] if last else newest  # to the second: what is known is left out below
        try:
            text = self._cluster.call(where, "logs", name, f"--container={NODE}", "--timestamps", *since)
        except NotThereError:
            return []  # the pod went since it was listed, or its next container is not there yet
        lines = []
        at = last or _started(pod)
        # Only at the ends that the server writes: a progress bar's \r and a form feed are within a line.
        for line in text.removesuffix("\n").split("\n"):
            stamp, _, words = line.partition(" ")
            if _STAMP.fullmatch(stamp):
                at = stamp
            elif line and at:  # the machine's own word about the log, or the rest of a line
                words = line
            else:
                continue
            if not last or _nanoseconds(at) > _nanoseconds(last):
                cursor.positions[name] = at
                lines.append(LogLine(f"node-{_index(pod)}", words, _milliseconds(at)))
        return lines


def namespace_of(record: JobRecord) -> str:
    """The job's own, else its tenant's (a tenant's is named after it)."""
    return record.resolved.spec.compute.kubernetes.namespace or record.tenant or "default"


def _where(record: JobRecord, namespace: str) -> Where:
    return Where(record.resolved.spec.compute.kubernetes.context, namespace)


@dataclass
class Look:
    """An attempt's objects, as the cluster has them."""

    config_map: dict[str, Any] | None = None
    train_job: dict[str, Any] | None = None
    job_set: dict[str, Any] | None = None
    pods: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, record: JobRecord, objects: Iterable[dict[str, Any]]) -> "Look":
        """Those of the record's newest attempt."""
        look = cls()
        name, number = object_name(record), str(record.attempt.number)
        for item in objects:
            labels = item["metadata"].get("labels", {})
            if (labels.get(f"{LABEL}/job"), labels.get(f"{LABEL}/attempt")) != (record.job_id, number):
                continue
            if item["kind"] == "Pod":
                look.pods.append(item)
            elif item["kind"] == "JobSet":
                look.job_set = item
            elif item["kind"] == "TrainJob":
                look.train_job = item
            elif item["metadata"]["name"] == name:  # and no other ConfigMap that somebody labelled
                look.config_map = item
        return look

    def observation(self, attempt: int) -> Observation | None:
        """What they say together; None where there is none of them."""
        if self.config_map is None and self.train_job is None:
            return None
        state, note, failure, at = self._state()
        started = max(map(_started, self.pods), default="")
        transitions = [StateChange(state="Training", at=_iso(started), attempt=attempt)] if started else []
        if at:
            transitions.append(StateChange(state=state, at=_iso(at), attempt=attempt, note=note))
        restarts = self.job_set.get("status", {}).get("restarts", 0) if self.job_set else 0
        seconds = (_milliseconds(at) - _milliseconds(started)) / 1000 if at and started else None
        return Observation(
            state=state,
            note=note,
            failure=failure,
            transitions=tuple(transitions),
            ended_at=self._stop_asked_at if state == "Stopped" and not at else "",
            reclaims=int(restarts),
            running_seconds=seconds,
        )

    def _state(self) -> tuple[str, str, str, str]:
        """State, note, failure, and when it ended ("" while it has not)."""
        if self.train_job is None or self.train_job["metadata"].get("deletionTimestamp"):
            return self._deleted()
        conditions = {
            one["type"]: one
            for one in self.train_job.get("status", {}).get("conditions", [])
            if one.get("status") == "True"
        }
        if done := conditions.get("Complete"):
            return "Completed", "", "", done["lastTransitionTime"]
        if failed := conditions.get("Failed"):
            state, note, failure = self._failed(failed)
            return state, note, failure, failed["lastTransitionTime"] if state != "Stopping" else ""
        if "Suspended" in conditions:
            return "Queued", _queued_words(self.train_job), "", ""
        return (*self._on_the_way(), "")

    @property
    def _is_running(self) -> bool:
        return any(_container(pod).get("state", {}).get("running") for pod in self.pods)

    @property
    def _marks(self) -> dict[str, str]:
        found: dict[str, str] = (self.config_map or {}).get("metadata", {}).get("annotations", {})
        return found

    @property
    def _stop_asked_at(self) -> str:
        """All that is known of the end of a job whose objects are gone: it came within two minutes after that."""
        asked = self._marks.get(STOP_MARK, "")
        return _iso(asked) if _STAMP.fullmatch(asked) else ""

    def _deleted(self) -> tuple[str, str, str, str]:
        if self._is_running or self.train_job is not None:
            return "Stopping", "", "", ""
        return "Stopped", "" if STOP_MARK in self._marks else "its TrainJob was deleted, or never applied", "", ""

    def _failed(self, condition: dict[str, Any]) -> tuple[str, str, str]:
        if condition.get("reason") == "DeadlineExceeded":
            note = "its time limit came; told to save (compute.max_hours)"
            return "Stopping" if self._is_running else "Stopped", note, ""
        ended = [one for pod in self.pods if (one := _container(pod).get("state", {}).get("terminated"))]
        # The first to end is the cause; the others were told.
        ended.sort(key=lambda one: (one["exitCode"] in (0, RESUME_EXIT_CODE), one.get("finishedAt", "")))
        if ended and all(one["exitCode"] in (0, RESUME_EXIT_CODE) for one in ended):
            return "Stopped", "saved, and asks to be resumed", ""
        words = [line for one in ended[:1] for line in str(one.get("message", "")).splitlines() if line.strip()]
        if ended and not words:
            code, reason = ended[0]["exitCode"], ended[0].get("reason", "no reason")
            words = [f"its container ended with exit code {code} ({reason})"]
        # A termination message is the reason alone; the end of a log, where there is none, ends with it.
        is_log = len(words) > 1
        failure = words[-1 if is_log else 0] if words else str(condition.get("message", "no reason given"))
        return "Failed", "", failure.removeprefix("entrypoint: ")

    def _on_the_way(self) -> tuple[str, str, str]:
        running = [pod for pod in self.pods if _container(pod).get("state", {}).get("running")]
        if self.pods and len(running) == len(self.pods):
            return "Training", "", ""
        waiting = [_waiting_words(pod) for pod in self.pods if pod not in running]
        words = next((one for one in waiting if one), "")
        if running or any(_container(pod) for pod in self.pods):
            return "Starting", words or f"{len(running)} of {len(self.pods)} pods run", ""
        return "Queued", words or "its pods are not made yet", ""


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    """Status of the container that trains; empty before its machine has taken the pod."""
    statuses: list[dict[str, Any]] = pod.get("status", {}).get("containerStatuses", [])
    return next((one for one in statuses if one["name"] == NODE), {})


def _index(pod: dict[str, Any]) -> int:
    annotations, labels = pod["metadata"].get("annotations", {}), pod["metadata"].get("labels", {})
    name = "batch.kubernetes.io/job-completion-index"
    return int(labels.get(name) or annotations.get(name) or 0)


def _started(pod: dict[str, Any]) -> str:
    state = _container(pod).get("state", {})
    return str((state.get("running") or state.get("terminated") or {}).get("startedAt") or "")


def _waiting_words(pod: dict[str, Any]) -> str:
    waiting = _container(pod).get("state", {}).get("waiting", {})
    if waiting.get("reason") in _BROKEN_WAITS:
        return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    conditions = pod.get("status", {}).get("conditions", [])
    unscheduled = [one for one in conditions if one["type"] == "PodScheduled" and one["status"] == "False"]
    return str(unscheduled[0].get("message", "")) if unscheduled else ""


def _queued_words(train_job: dict[str, Any]) -> str:
    queue = train_job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    return f"in queue {queue}: Kueue has not admitted it yet" if queue else "its TrainJob is suspended"


def _iso(at: str) -> str:
    """Kubernetes' time as records have it."""
    return datetime.fromisoformat(at).isoformat(timespec="seconds")


def _milliseconds(at: str) -> int:
    """Since the epoch."""
    return _nanoseconds(at) // 1_000_000


def _nanoseconds(at: str) -> int:
    """Since the epoch; datetime reads no nanoseconds, and as text 03.2Z comes after 03.25Z."""
    stamp = _STAMP.fullmatch(at)
    assert stamp is not None, at
    whole, fraction, zone = stamp.groups()
    return round(datetime.fromisoformat(whole + zone).timestamp()) * 10**9 + int((fraction or "0")[:9].ljust(9, "0"))


def _called(item: dict[str, Any]) -> str:
    return f"{item['kind'].lower()} {item['metadata']['name']}"


def _may_write(item: dict[str, Any], attempt: str) -> bool:
    """Whether it is of another attempt, and is, or makes, a pod that has not ended."""
    if item["metadata"].get("labels", {}).get(f"{LABEL}/attempt") == attempt or item["kind"] not in _WRITING_KINDS:
        return False
    return item["kind"] != "Pod" or item.get("status", {}).get("phase") not in ("Succeeded", "Failed")
