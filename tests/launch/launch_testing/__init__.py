"""A tenant's contract, a job, and an AWS account by moto for the launcher's unit tests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from moto import mock_aws

from trainyard import planner
from trainyard.launch.channels import Channel
from trainyard.launch.endpoint import EndpointSession
from trainyard.launch.launcher import new_record
from trainyard.launch.record import JobRecord, RecordedChannel, S3RecordStore
from trainyard.launch.session import Account
from trainyard.spec.backends import BackendName
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.platform import EnvironmentSpec, TenantContract

ACCOUNT = "123456789012"
REGION = "us-east-1"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/trainyard@sha256:{'ab' * 32}"
JOB_ID = "acme-tiny-20260131120000-1a2b"
LOCAL_JOB_ID = "local-tiny-20260131120000-1a2b"


def contract_content() -> dict[str, Any]:
    """A plausible contract, as a tenant's stack publishes it."""
    key = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/"
    role = f"arn:aws:iam::{ACCOUNT}:role/trainyard/test/acme/"
    queues = {
        "gpu": {
            "arn": f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/gpu",
            "instance_types": ["ml.p5.4xlarge", "ml.g5.xlarge"],
            "max_instances": 4,
            "multi_node": True,
        },
        "small": {
            "arn": f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/small",
            "instance_types": ["ml.g6e.8xlarge"],
            "max_instances": 2,
            "multi_node": False,
        },
    }
    return {
        "environment": "test",
        "tenant": "acme",
        "account": ACCOUNT,
        "region": REGION,
        "availability_zone": f"{REGION}a",
        "vpc_id": "vpc-1",
        "subnet_ids": ["subnet-1"],
        "security_group_ids": ["sg-efa", "sg-lustre"],
        "keys": {name: key + name for name in ("data", "checkpoints", "logs", "artifacts")},
        "buckets": {"data": "acme-data", "checkpoints": "acme-checkpoints", "artifacts": "acme-artifacts"},
        "file_system": {"id": "fs-0123456789abcdef0", "mount_name": "abcdefgh", "dns_name": "fs.example.com"},
        "roles": {"job": role + "job", "launcher": role + "launcher", "auditor": role + "auditor"},
        "queues": queues,
        "log_group": "/trainyard/test/acme",
        "image_parameter": "/trainyard/test/image",
        "cost_center": "research-100",
        "max_job_hours": 24,
        "monthly_usd": 5000,
    }


def job_content() -> dict[str, Any]:
    """A small two-host spot job of tenant acme."""
    return {
        "name": "tiny",
        "tenant": "acme",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 512,
            }
        },
        "data": {
            "train": [{"path": "tenant://sets/train", "format": "jsonl"}],
            "validation": [{"path": "s3://acme-data/sets/validation.jsonl", "format": "jsonl"}],
            "tokenizer": "tenant://sets/tokenizer.json",
            "sequence_length": 64,
        },
        "training": {
            "steps": 20,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "precision": "fp32",
        },
        "parallelism": {"engine": "deepspeed", "data_replicate": 2, "zero_stage": 2},
        "checkpoint": {"every_steps": 5},
        "compute": {
            "backend": "sagemaker",
            "instance_type": "ml.p5.4xlarge",
            "instance_count": 2,
            "spot": True,
            "max_hours": 2,
        },
        "budget": {"max_usd": 100},
    }


def environment_content() -> dict[str, Any]:
    """An environment on AWS proper (moto), with two tenants."""
    queue = {"instance_types": ["ml.p5.4xlarge"], "max_instances": 2}
    budget = {"monthly_usd": 100, "notify": ["leads@example.com"]}
    return {
        "name": "test",
        "account": ACCOUNT,
        "region": REGION,
        "availability_zones": [f"{REGION}a", f"{REGION}b"],
        "max_instances": {"ml.p5.4xlarge": 4},
        "tenants": {
            "acme": {"network_index": 0, "queues": {"gpu": queue}, "budget": budget},
            "globex": {"network_index": 1, "queues": {"gpu": queue}, "budget": budget},
        },
    }


@pytest.fixture
def contract() -> TenantContract:
    return parse(TenantContract, contract_content(), "contract")


@pytest.fixture
def job() -> JobSpec:
    return parse(JobSpec, job_content(), "job")


@pytest.fixture
def environment() -> EnvironmentSpec:
    return parse(EnvironmentSpec, environment_content(), "environment")


@pytest.fixture
def resolved(job: JobSpec) -> ResolvedJob:
    """The job as sent: URIs absolute, checkpoint destination set."""
    content = job_content()
    content["data"]["train"][0]["path"] = "s3://acme-data/sets/train"
    content["data"]["tokenizer"] = "s3://acme-data/sets/tokenizer.json"
    content["checkpoint"]["destination"] = f"s3://acme-checkpoints/jobs/{JOB_ID}/"
    return planner.resolve(parse(JobSpec, content, "job"))


def record_without_tenant(job: JobSpec, resolved: ResolvedJob, backend: BackendName = "local") -> JobRecord:
    """As a launch of nobody's environment makes it; `resolved` has its checkpoints' destination."""
    return new_record(
        job,
        resolved,
        job_id=LOCAL_JOB_ID,
        backend=backend,
        environment=None,
        plan={},
        image=None,
        channels=(),
        forced=(),
        launched_by="",
    )


@pytest.fixture
def channels() -> tuple[Channel, ...]:
    return (
        Channel("train-0", "s3", "s3://acme-data/sets/train/", "s3://acme-data/sets/train"),
        Channel("validation-0", "s3", "s3://acme-data/sets/validation.jsonl", "s3://acme-data/sets/validation.jsonl"),
        Channel("tokenizer", "s3", "s3://acme-data/sets/tokenizer.json", "s3://acme-data/sets/tokenizer.json"),
    )


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Account]:
    """An empty AWS account by moto, with the person's own credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    # Not the developer's own profiles.
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    with mock_aws():
        yield Account(EndpointSession(endpoint_url=None, region_name=REGION))


@pytest.fixture
def deployed(aws: Account, contract: TenantContract) -> Account:
    """The account with tenant acme's contract, image, buckets and data."""
    ssm, s3 = aws.client("ssm"), aws.client("s3")
    ssm.put_parameter(Name="/trainyard/test/acme/contract", Value=contract.model_dump_json(), Type="String")
    ssm.put_parameter(Name="/trainyard/test/image", Value=IMAGE, Type="String")
    for bucket in contract.buckets.model_dump().values():
        s3.create_bucket(Bucket=bucket)
    for key in ("sets/train/part-0.jsonl", "sets/validation.jsonl", "sets/tokenizer.json"):
        s3.put_object(Bucket=contract.buckets.data, Key=key, Body=b"{}\n")
    return aws


@pytest.fixture
def environment_path(tmp_path: Path) -> Path:
    """environment_content() as a file."""
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(environment_content()), encoding="utf-8")
    return path


def objects(s3: Any, bucket: str, prefix: str) -> dict[str, Any]:
    """Keys under a prefix and their JSON contents."""
    listing = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    return {item["Key"]: json.loads(s3.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()) for item in listing}


@pytest.fixture
def record(
    deployed: Account, job: JobSpec, resolved: ResolvedJob, contract: TenantContract, channels: Any
) -> JobRecord:
    """A job's record as the launcher writes it, in the tenant's bucket."""
    made = new_record(
        job,
        resolved,
        job_id=JOB_ID,
        backend="sagemaker",
        environment="test",
        plan={},
        image=IMAGE,
        channels=[RecordedChannel(name=c.name, kind=c.kind, location=c.location, uri=c.uri) for c in channels],
        forced=(),
        launched_by="",
    )
    S3RecordStore(deployed.client("s3"), contract.buckets.data).create(made)
    return made
