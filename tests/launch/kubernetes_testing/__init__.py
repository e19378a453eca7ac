"""A kubectl that records what it is told, the cluster's own schema, and objects in the form that a cluster gives them.

`crds/`: the CustomResourceDefinitions of Kubeflow Trainer v2.3.0 (github.com/kubeflow/trainer, Apache-2.0,
manifests/base/crds/trainer.kubeflow.org_{trainjobs,trainingruntimes}.yaml), as JSON without their descriptions. To
renew them: read the two files of a newer tag with yaml, drop every text under the key `description`, write as JSON.
Their CEL rules (x-kubernetes-validations) are not evaluated here; an API server does.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

CRDS = Path(__file__).parent / "crds"
STARTED, ENDED = "2026-01-31T12:05:00Z", "2026-01-31T13:05:00Z"

_KUBECTL = f"""#!{sys.executable} -SE
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
arguments = sys.argv[1:]
text = sys.stdin.read() if "--filename=-" in arguments else ""
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps({{"arguments": arguments, "manifest": json.loads(text) if text else None}}) + "\\n")
for line in (folder / "answers.jsonl").read_text().splitlines()[::-1]:
    answer = json.loads(line)
    if all(word in arguments for word in answer["words"]):
        sys.stdout.buffer.write(answer["out"].encode("utf-8", "surrogateescape"))
        sys.stderr.write(answer["err"])
        sys.exit(answer["code"])
sys.exit("no answer to " + " ".join(arguments))
"""


class FakeKubectl:
    """First on the PATH; answers what a test tells it to, the newest that fits."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "kubectl").write_text(_KUBECTL)
        (folder / "kubectl").chmod(0o755)
        self.answers("apply", out="configured\n")
        self.answers("can-i", out="yes\n")
        self.answers("current-context", out="eks-train\n")
        self.answers("get-contexts", out="eks-train\neks-old\n")
        for verb in ("delete", "annotate"):
            self.answers(verb, out="done\n")
        self.has()

    def answers(self, *words: str, out: str = "", err: str = "", code: int = 0) -> None:
        """From now on, where the call has all these words."""
        with (self._folder / "answers.jsonl").open("a") as file:
            file.write(json.dumps({"words": words, "out": out, "err": err, "code": code}) + "\n")

    def has(self, *objects: dict[str, Any]) -> None:
        """What `get` finds."""
        self.answers("get", out=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    @property
    def calls(self) -> list[list[str]]:
        """Arguments of every call, after the context's and the namespace's."""
        return [call["arguments"] for call in self._calls()]

    @property
    def applied(self) -> list[dict[str, Any]]:
        """Objects of the newest call that had some."""
        manifests = [call["manifest"] for call in self._calls() if call["manifest"]]
        items: list[dict[str, Any]] = manifests[-1]["items"]
        return items

    def _calls(self) -> list[dict[str, Any]]:
        path = self._folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    """Nothing of the person's own cluster can be reached."""
    fake = FakeKubectl(tmp_path / "kubectl-bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'kubectl-bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    return fake


@cache
def _validator(kind: str) -> Draft202012Validator:
    file = {"TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes"}[kind]
    crd = json.loads((CRDS / f"{file}.json").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    # An API server checks the metadata by rules of its own.
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    """A field that the schema doesn't know is an error here; a server drops it, with a warning."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    # Lists of an object's fields by name, where "properties" is a field's own name, hold no schema themselves.
    made = {key: _strict(value) if key != "properties" else _fields(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def _fields(properties: dict[str, Any]) -> dict[str, Any]:
    return {name: _strict(schema) for name, schema in properties.items()}


def schema_errors(item: dict[str, Any]) -> list[str]:
    """What the cluster's own schema has against an object."""
    return [f"{error.json_path}: {error.message}" for error in _validator(item["kind"]).iter_errors(item)]


def condition(kind: str, reason: str, message: str = "") -> dict[str, str]:
    """As a controller writes it, and true."""
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": ENDED}


def pod(
    of: dict[str, Any], index: int, *, suffix: str = "x7k2p", scheduled: bool = True, **state: Any
) -> dict[str, Any]:
    """A TrainJob's pod; `state`: of its container, as `running={...}`; without one it waits for a machine."""
    name = f"{of['metadata']['name']}-node-0-{index}"
    labels = of["metadata"]["labels"] | {"batch.kubernetes.io/job-completion-index": str(index)}
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    waits["message"] = "0/4 nodes are available: 4 Insufficient vpc.amazonaws.com/efa."
    status: dict[str, Any] = {"phase": "Pending", "conditions": [waits]}
    if scheduled:
        status = {"phase": "Running", "conditions": [waits | {"status": "True"}]}
        status["containerStatuses"] = [{"name": "node", "ready": True, "restartCount": 0, "state": state}]
    metadata = {"name": f"{name}-{suffix}", "namespace": of["metadata"]["namespace"], "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


def running() -> dict[str, Any]:
    """A container that runs."""
    return {"startedAt": STARTED}


def terminated(code: int, message: str = "", at: str = ENDED) -> dict[str, Any]:
    """A container that has ended."""
    reason = "Completed" if code == 0 else "Error"
    return {"exitCode": code, "reason": reason, "message": message, "startedAt": STARTED, "finishedAt": at}


def job_set(of: dict[str, Any], restarts: int) -> dict[str, Any]:
    """What the controller made of a TrainJob."""
    metadata = {key: of["metadata"][key] for key in ("name", "namespace", "labels")}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "status": {"restarts": restarts, "restartsCountTowardsMax": 0},
    }
