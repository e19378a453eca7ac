"""kubectl, one call at a time: its answers as JSON, its refusals in one line."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainyard.errors import InputError
from trainyard.launch.backend import AwayError

CALL_SECONDS = 60.0
"""For one call; a server that takes longer is away, as kubectl's own --request-timeout says before."""

_AWAY = ("was refused", "Unable to connect", "timed out", "no such host", "TLS handshake timeout", "ServiceUnavailable")
"""In kubectl's words where no server answers."""


@dataclass(frozen=True)
class Where:
    """A namespace of a cluster."""

    context: str | None
    """As kubectl's configuration names the cluster; None: its current one."""
    namespace: str

    def __str__(self) -> str:
        return f"namespace {self.namespace} of {self.context or 'the current context'}"


class NotThereError(InputError):
    """What the verb was to read is gone, or is not there yet."""


class Cluster(Protocol):
    """Runs kubectl's verbs; InputError says in one line what kubectl, or the cluster, refuses."""

    def call(self, where: Where, *arguments: str, manifest: Sequence[dict[str, Any]] = ()) -> str:
        """What the verb printed; `manifest` goes to its standard input as one list."""

    def current_context(self) -> str:
        """The context that is used where none is named."""


class Kubectl:
    """The kubectl on the PATH, with the configuration and the rights that it has."""

    def call(self, where: Where, *arguments: str, manifest: Sequence[dict[str, Any]] = ()) -> str:
        """See Cluster."""
        context = ["--context", where.context] if where.context else []
        command = [*context, "--namespace", where.namespace, f"--request-timeout={CALL_SECONDS / 2:.0f}s", *arguments]
        listed = {"apiVersion": "v1", "kind": "List", "items": list(manifest)}
        done = _run(command, json.dumps(listed) if manifest else None)
        if done.returncode:
            words = done.stderr or done.stdout
            raise _kind(words)(f"kubectl {arguments[0]}: {_refusal(words, where)}")
        return done.stdout

    def current_context(self) -> str:
        """See Cluster."""
        done = _run(["config", "current-context"], None)
        if done.returncode:
            raise InputError(
                f"compute.kubernetes.context: is not set, and kubectl has no current context ({_contexts()}); set one "
                "of them, or make one: aws eks update-kubeconfig --name CLUSTER"
            )
        return done.stdout.strip()


def found(text: str) -> list[dict[str, Any]]:
    """The objects that a `get -o json` printed: a list's items, or the one."""
    content = json.loads(text) if text.strip() else {}
    items = content.get("items", [content] if content else [])
    return [item for item in items if isinstance(item, dict)]


def _run(command: Sequence[str], text: str | None) -> subprocess.CompletedProcess[str]:
    if shutil.which("kubectl") is None:
        raise InputError(
            "compute.backend kubernetes: there is no `kubectl` on the PATH here; install it "
            "(https://kubernetes.io/docs/tasks/tools), then `aws eks update-kubeconfig --name CLUSTER`"
        )
    try:
        # Bytes: a pod's log may hold any, and as text a progress bar's \r would be a line's end.
        done = subprocess.run(
            ["kubectl", *command],
            input=text.encode() if text is not None else None,
            capture_output=True,
            timeout=CALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AwayError(f"kubectl gave no answer within {CALL_SECONDS:.0f} s; does `kubectl get ns` answer?") from None
    out, err = (each.decode("utf-8", "replace") for each in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def _kind(words: str) -> type[InputError]:
    if "(NotFound)" in words or "is waiting to start" in words:
        return NotThereError
    return AwayError if any(one in words for one in _AWAY) else InputError


def _refusal(words: str, where: Where) -> str:
    """kubectl's last line, in ours where it is known to puzzle."""
    line = next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "it failed without a word")
    line = line.removeprefix("error: ").removeprefix("Error from server ")
    if line == "no" or line.startswith("no - "):  # auth can-i
        return f"{where}: you may not create TrainJobs there; docs/clusters.md says which rights are needed"
    if "does not exist" in line and "context" in line:
        return f"compute.kubernetes.context {where.context}: is not in kubectl's configuration ({_contexts()})"
    if "no matches for kind" in words or "the server doesn't have a resource type" in words:
        return (
            f"{where}: has no Kubeflow Trainer (or one older than 2.3): helm install kubeflow-trainer "
            "oci://ghcr.io/kubeflow/charts/kubeflow-trainer --namespace kubeflow-system --create-namespace"
        )
    if any(one in line for one in _AWAY):
        return f"{where}: does not answer: {line}"
    return f"{where}: {line}"


def _contexts() -> str:
    done = _run(["config", "get-contexts", "--output=name"], None)
    return f"it has: {', '.join(done.stdout.split()) or 'none'}"
