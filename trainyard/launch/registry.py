"""From a checkpoint to a registered model: the gate, the record of why it passed, the model package. No torch.

In the tenant's artifacts bucket lie `models/<group>/<export>/` (what `trainer.export` wrote, `export.json` last) and
`registry/<group>/<export>/<digest>.json` (the metrics, the gates, and what the weights were made of). A model package
of SageMaker's Model Registry names both. Whatever was done is found again, so that a promotion which was interrupted,
or is asked for twice, goes on.
"""

import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.launch.aws import aws_errors, error_code, is_missing
from trainyard.launch.checkpoint_files import open_files
from trainyard.launch.checkpoints import Checkpoint
from trainyard.launch.record import JobRecord
from trainyard.launch.session import Account
from trainyard.spec.platform import TenantContract
from trainyard.spec.retention import BEST_METRIC, flat_metrics

PENDING, APPROVED = "PendingManualApproval", "Approved"
_LISTING = "export.json"
_MAX_NAME = 63
"""SageMaker: characters of a model package group's name."""
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_GATE = re.compile(r"\s*([a-z0-9_.-]+)\s*(<=|>=|<|>)\s*(\S+)\s*")
_MODEL_NAME = re.compile(r"[a-z0-9](-?[a-z0-9])*")
_IMAGE = re.compile(r"\d{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/[a-z0-9._/-]+(:[\w.-]+|@sha256:[0-9a-f]{64})")


@dataclass(frozen=True)
class Gate:
    """What a metric must be for a checkpoint to be promoted."""

    metric: str
    """As metrics.jsonl names it; `validation_sets.NAME.loss` for a named set."""
    comparison: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.bound:g}"


def parse_gate(text: str) -> Gate:
    """`validation_loss<=2.5`; InputError where it isn't of that form."""
    match = _GATE.fullmatch(text)
    how = "write METRIC<=VALUE (or >=, <, >), in quotes: --gate 'validation_loss<=2.5'"
    if match is None:
        raise InputError(f"--gate {text!r}: is no condition; {how}")
    name, comparison, value = match.groups()
    if not re.match(BEST_METRIC, name):
        raise InputError(
            f"--gate {text!r}: {name} is no metric of a model; allowed are loss, validation_... and "
            "validation_sets.NAME.loss, as metrics.jsonl has them"
        )
    try:
        bound = float(value)
    except ValueError:
        raise InputError(f"--gate {text!r}: {value!r} is no number; {how}") from None
    if not math.isfinite(bound):
        raise InputError(f"--gate {text!r}: {value} lets nothing or everything through; give a finite number")
    return Gate(name, comparison, bound)


@dataclass(frozen=True)
class Promotion:
    """What is promoted, and under which name."""

    record: JobRecord
    checkpoint: Checkpoint
    contract: TenantContract
    model: str
    """The model's name; its group is `<tenant>-<model>`."""
    variant: str = ""
    """How the export differs from the plain one: "-merged-bfloat16", "-tokenizer-1a2b3c4d", ..."""
    image: str = ""
    """ECR image that serves it; empty: to be given when the model is deployed."""

    @property
    def group(self) -> str:
        """The model package group: begins with the tenant's name, which is what policies tell tenants apart by."""
        return f"{self.contract.tenant}-{self.model}"

    @property
    def export(self) -> str:
        """The export's folder name."""
        return f"{self.record.job_id}-step-{self.checkpoint.step}{self.variant}"

    @property
    def uri(self) -> str:
        """Where the weights go."""
        return f"s3://{self.contract.buckets.artifacts}/models/{self.group}/{self.export}"

    @property
    def reference(self) -> str:
        """The same as a job's `model.source`."""
        return f"artifact://models/{self.group}/{self.export}"

    @property
    def properties(self) -> dict[str, str]:
        """What the weights were made of: the package's customer metadata."""
        spec = json.dumps(self.record.spec.model_dump(mode="json"), sort_keys=True).encode()
        return {
            "job_id": self.record.job_id,
            "step": str(self.checkpoint.step),
            "spec_sha256": hashlib.sha256(spec).hexdigest(),
            "image_digest": (self.record.image or "").partition("@")[2] or "none",
            "manifest_sha256": self.checkpoint.manifest_sha256,
        }

    @property
    def description(self) -> str:
        """Of the package. By it a later run finds it again: listings show descriptions and no metadata."""
        content = [self.group, self.export, self.image, self.properties]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"trainyard job {self.record.job_id} step {self.checkpoint.step}{self.variant} ({digest[:24]})"


def check_names(model: str, image: str, contract: TenantContract) -> None:
    """InputError where the model's name, the image or the contract won't do; before anything is read."""
    room = _MAX_NAME - len(contract.tenant) - 1
    if not _MODEL_NAME.fullmatch(model) or len(model) > room:
        raise InputError(
            f"--model {model}: a model's name has 1 to {room} lower-case letters, digits and single dashes, and begins "
            "and ends with none of the latter"
        )
    if image and not _IMAGE.fullmatch(image):
        raise InputError(
            f"--image {image}: must be an image of ECR with tag or digest, which is all that SageMaker serves from: "
            "<account>.dkr.ecr.<region>.amazonaws.com/<name>@sha256:<64 hex digits>"
        )
    if not contract.buckets.artifacts:
        raise InputError(
            f"tenant {contract.tenant}: its contract names no artifacts bucket; deploy its stacks again "
            f"(trainyard deploy environments/{contract.environment}.yaml --tenant {contract.tenant})"
        )


def metrics_at(destination: str, s3: Any, step: int) -> dict[str, float]:
    """The numbers of metrics.jsonl's newest row of that step; empty where there is none."""
    content = open_files(destination.rstrip("/"), s3).read("metrics.jsonl") or b""
    found: dict[str, float] = {}
    for line in content.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # half a row, from a process that was killed
        if isinstance(row, dict) and row.get("step") == step:
            found = flat_metrics(row)
    return found


def check_gates(gates: Sequence[Gate], metrics: Mapping[str, float], step: int) -> None:
    """InputError where a metric was not measured at that step, JobFailedError where one misses its gate."""
    for gate in gates:
        if gate.metric not in metrics:
            measured = sorted(name for name in metrics if re.match(BEST_METRIC, name))
            raise InputError(
                f"--gate {gate}: metrics.jsonl has no {gate.metric} at step {step} (there: "
                f"{', '.join(measured) or 'nothing'}); --step takes one that was validated, and "
                "training.validation_every_steps says which are"
            )
    missed = [gate for gate in gates if not _COMPARE[gate.comparison](metrics[gate.metric], gate.bound)]
    if missed:
        words = ", ".join(
            f"{gate.metric} is {metrics[gate.metric]:g}, not {gate.comparison}{gate.bound:g}" for gate in missed
        )
        raise JobFailedError(f"step {step} misses its gate: {words}; nothing was exported or registered")


def exported(promotion: Promotion, s3: Any) -> dict[str, Any] | None:
    """The listing of the export where it is whole in S3; None where it is not there, or not wholly.

    JobFailedError where its files are not those that were written.
    """
    parent, _, folder = promotion.uri.rpartition("/")
    files = open_files(parent, s3)
    content = files.read(f"{folder}/{_LISTING}")
    if content is None:
        return None
    listing: dict[str, Any] = json.loads(content)
    sizes = files.sizes(folder)
    ours = {f"{folder}/{name}" for name in ("", *listing["files"], _LISTING)}  # "": a console's mark of the folder
    if foreign := sorted(set(sizes) - ours):
        raise JobFailedError(
            f"{parent}/{foreign[0]}: is there and not in {_LISTING}, and who loads the model would read it too; have "
            "it removed, or promote under another --model"
        )
    for name, entry in listing["files"].items():
        there = sizes.get(f"{folder}/{name}", "no")
        if there != entry["bytes"]:
            raise JobFailedError(
                f"{promotion.uri}/{name}: has {there} bytes, {_LISTING} says {entry['bytes']}; somebody changed the "
                "export: bring the bucket's older version back, or promote under another --model"
            )
    return {**listing, "listing_sha256": hashlib.sha256(content).hexdigest()}


def record_reason(
    promotion: Promotion, s3: Any, gates: Sequence[Gate], metrics: Mapping[str, float], listing: Mapping[str, Any]
) -> dict[str, str]:
    """Write why the checkpoint was promoted, the source of ModelMetrics; by its content's hash, so none is replaced."""
    content = {
        "version": 1,
        **promotion.properties,
        "checkpoint": promotion.checkpoint.uri,
        "export": promotion.uri,
        "export_sha256": listing["listing_sha256"],
        "gates": [{**asdict(gate), "value": metrics[gate.metric]} for gate in gates],
        "metrics": dict(sorted(metrics.items())),
    }
    text = (json.dumps(content, indent=1) + "\n").encode()
    digest = hashlib.sha256(text).hexdigest()
    bucket = promotion.contract.buckets.artifacts
    key = f"registry/{promotion.group}/{promotion.export}/{digest[:16]}.json"
    with aws_errors("writing", f"s3://{bucket}/{key}"):
        s3.put_object(Bucket=bucket, Key=key, Body=text, ContentType="application/json")
    return {"ContentType": "application/json", "ContentDigest": f"sha256:{digest}", "S3Uri": f"s3://{bucket}/{key}"}


def package_request(
    promotion: Promotion, listing: Mapping[str, Any], metrics: Mapping[str, str], *, approve: bool
) -> dict[str, Any]:
    """CreateModelPackage's arguments. A version of a group takes no tags of its own: the group's hold."""
    container: dict[str, Any] = {
        "ModelDataSource": {
            "S3DataSource": {"S3Uri": f"{promotion.uri}/", "S3DataType": "S3Prefix", "CompressionType": "None"}
        }
    }
    if promotion.image:
        container["Image"] = promotion.image
    return {
        "ModelPackageGroupName": promotion.group,
        "ModelPackageDescription": promotion.description,
        "InferenceSpecification": {
            "Containers": [container],
            "SupportedContentTypes": ["application/json"],
            "SupportedResponseMIMETypes": ["application/json"],
        },
        "ModelMetrics": {"ModelQuality": {"Statistics": dict(metrics)}},
        "CustomerMetadataProperties": {**promotion.properties, "export_sha256": str(listing["listing_sha256"])},
        "ModelApprovalStatus": APPROVED if approve else PENDING,
        # The same promotion twice at once is one package.
        "ClientToken": hashlib.sha256(promotion.description.encode()).hexdigest()[:36],
    }


@dataclass(frozen=True)
class Registered:
    """A version in the registry."""

    arn: str
    approval: str


class Registry:
    """The tenant's groups in SageMaker's Model Registry, as its launcher role."""

    def __init__(self, launcher: Account, contract: TenantContract) -> None:
        self._sagemaker = launcher.client("sagemaker")
        self._contract = contract

    def find(self, promotion: Promotion) -> Registered | None:
        """The package of that very promotion, if it was registered before."""
        with aws_errors("looking for", f"model package group {promotion.group}"):
            try:
                pages = self._sagemaker.get_paginator("list_model_packages").paginate(
                    ModelPackageGroupName=promotion.group
                )
                found = [item for page in pages for item in page["ModelPackageSummaryList"]]
            except self._sagemaker.exceptions.ClientError as error:
                if _is_unknown(error):
                    return None
                raise
        for item in found:
            if item.get("ModelPackageDescription") == promotion.description:
                return Registered(item["ModelPackageArn"], item.get("ModelApprovalStatus", PENDING))
        return None

    def register(self, promotion: Promotion, request: Mapping[str, Any]) -> Registered:
        """Make the group where there is none, and the package in it."""
        self._ensure_group(promotion)
        with aws_errors("registering", f"a version of {promotion.group}", "run `trainyard doctor` for the tenant"):
            arn = self._sagemaker.create_model_package(**request)["ModelPackageArn"]
        return Registered(arn, request["ModelApprovalStatus"])

    def _ensure_group(self, promotion: Promotion) -> None:
        if self._has_group(promotion.group):
            return
        tags = {
            "trainyard:environment": self._contract.environment,
            "trainyard:tenant": self._contract.tenant,
            "trainyard:cost-center": self._contract.cost_center,
        }
        with aws_errors("making", f"model package group {promotion.group}"):
            try:
                self._sagemaker.create_model_package_group(
                    ModelPackageGroupName=promotion.group,
                    ModelPackageGroupDescription=f"Models {promotion.model} of tenant {self._contract.tenant}",
                    Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
                )
            except self._sagemaker.exceptions.ClientError:
                if not self._has_group(promotion.group):  # else somebody else was quicker
                    raise

    def _has_group(self, name: str) -> bool:
        with aws_errors("describing", f"model package group {name}"):
            try:
                self._sagemaker.describe_model_package_group(ModelPackageGroupName=name)
            except self._sagemaker.exceptions.ClientError as error:
                if _is_unknown(error):
                    return False
                raise
        return True


def _is_unknown(error: BaseException) -> bool:
    """SageMaker answers ValidationException for a group that isn't there; its name, all that is given, is sound."""
    return is_missing(error) or error_code(error) == "ValidationException"


def refuse_unapproved(found: Registered) -> None:
    """JobFailedError where the package waits for its approval, which no role of a tenant may give afterwards."""
    if found.approval != APPROVED:
        raise JobFailedError(
            f"--approve: {found.arn} is registered already, as {found.approval}, and no role of a tenant changes what "
            "is registered; an administrator approves it: aws sagemaker update-model-package --model-package-arn "
            f"{found.arn} --model-approval-status {APPROVED}"
        )


def check_listing(listing: Mapping[str, Any] | None, promotion: Promotion) -> dict[str, Any]:
    """The listing; AwsRefusedError where what was just written can't be read."""
    if listing is None:
        raise AwsRefusedError(f"{promotion.uri}/{_LISTING}: was written and is not there; promote again")
    return dict(listing)
