"""`trainyard promote`: the gate, the export in the artifacts bucket, the package in the registry; twice is once.

AWS is moto, in this process, so the exporter runs in it too; `tests/end_to_end/test_promote.py` has all of it for real.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_testing import IMAGE, job_content

from trainyard.cli import exporting
from trainyard.cli.app import run
from trainyard.errors import InputError, JobFailedError
from trainyard.launch import registry
from trainyard.launch.launcher import new_record
from trainyard.launch.record import FolderRecordStore, S3RecordStore
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.platform import CONTRACT_VERSION, TenantContract, parse_contract

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

JOB_ID = "acme-tiny-20260131120000-1a2b"
STEP = 3
ROWS = (
    {"step": 2, "attempt": 1, "loss": 3.5},
    {"step": STEP, "attempt": 1, "loss": 9.0, "validation_loss": 9.0},  # made again by the second attempt
    {"step": STEP, "attempt": 2, "loss": 3.0, "validation_loss": 2.5, "validation_sets": {"code": {"loss": 2.0}}},
)


def run_here(checkpoints: str, arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """`python -m trainer.export` without its process: moto is in this one."""
    from trainer.export import Export, export

    assert "--continue" in arguments
    pairs = [one for one in arguments if one != "--continue"]
    given = dict(zip(pairs[::2], pairs[1::2], strict=True))
    size, step, tokenizer = int(given["--max-shard-bytes"]), int(given["--step"]), given.get("--tokenizer")
    tokenizer = None if tokenizer is not None and tokenizer.startswith("s3://") else tokenizer  # none lies there
    return export(Export(checkpoints, given["--to"], step, tokenizer=tokenizer, max_shard_bytes=size, goes_on=True))


@pytest.fixture
def site(
    deployed: Account,
    contract: TenantContract,
    resolved: ResolvedJob,
    environment_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Tenant acme with a job that has a checkpoint of step 3, and metrics; the environment file."""
    from trainer.models.build import build_model
    from trainer.models.described import describe_model
    from trainer_testing.checkpoints import save_checkpoint
    from trainer_testing.tiny import VOCAB_SIZE, tiny_job

    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", contract.region)
    monkeypatch.setattr(exporting, "run_export", run_here)
    job = tiny_job("single", 1)
    model = build_model(job, vocab_size=VOCAB_SIZE)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    # Its few ids are no bytes.
    save_checkpoint(tmp_path / "job", tensors, describe_model(job.spec, model) | {"reads_bytes": False})
    s3, bucket = deployed.client("s3"), contract.buckets.checkpoints
    for path in (tmp_path / "job").rglob("*"):
        if path.is_file():
            key = f"jobs/{JOB_ID}/{path.relative_to(tmp_path / 'job').as_posix()}"
            s3.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    text = "".join(json.dumps(row) + "\n" for row in ROWS) + '{"step": 3, "va'
    s3.put_object(Bucket=bucket, Key=f"jobs/{JOB_ID}/metrics.jsonl", Body=text.encode())
    spec = parse(JobSpec, job_content(), "job")
    record = new_record(
        spec,
        resolved,
        job_id=JOB_ID,
        backend="sagemaker",
        environment="test",
        plan={},
        image=IMAGE,
        channels=(),
        forced=(),
        launched_by="",
    )
    S3RecordStore(s3, contract.buckets.data).create(record)
    return str(environment_path)


Promote = Callable[..., dict[str, Any]]


@pytest.fixture
def promote(site: str, capsys: pytest.CaptureFixture[str]) -> Promote:
    def call(*more: str, code: int = 0) -> dict[str, Any]:
        assert run(["promote", JOB_ID, "-e", site, "--gate", "validation_loss<=2.5", "--json", *more]) == code
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    return call


def keys_of(s3: Any, bucket: str, prefix: str) -> list[str]:
    return [item["Key"] for item in s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])]


def test_a_checkpoint_becomes_a_registered_model_once(
    promote: Promote, deployed: Account, contract: TenantContract
) -> None:
    told = promote("--max-shard-gib", "0.001", "--gate", "validation_sets.code.loss<2.1")
    s3, sagemaker, bucket = deployed.client("s3"), deployed.client("sagemaker"), contract.buckets.artifacts
    assert (told["is_new"], told["approval"], told["step"]) == (True, "PendingManualApproval", STEP)

    package = sagemaker.describe_model_package(ModelPackageName=told["model_package"])
    assert package["ModelPackageGroupName"] == "acme-tiny"
    tags = sagemaker.list_tags(
        ResourceArn=sagemaker.describe_model_package_group(ModelPackageGroupName="acme-tiny")["ModelPackageGroupArn"]
    )["Tags"]
    assert {"Key": "trainyard:tenant", "Value": "acme"} in tags
    (container,) = package["InferenceSpecification"]["Containers"]
    place = container["ModelDataSource"]["S3DataSource"]
    assert (place["S3Uri"], place["S3DataType"], place["CompressionType"]) == (told["model"] + "/", "S3Prefix", "None")

    manifest = f"jobs/{JOB_ID}/checkpoints/step-{STEP:08d}/manifest.json"
    content = s3.get_object(Bucket=contract.buckets.checkpoints, Key=manifest)["Body"].read()
    listing = s3.get_object(Bucket=bucket, Key=f"models/acme-tiny/{JOB_ID}-step-{STEP}/export.json")["Body"].read()
    assert package["CustomerMetadataProperties"] == {
        "job_id": JOB_ID,
        "step": str(STEP),
        "spec_sha256": told["spec_sha256"],
        "image_digest": IMAGE.partition("@")[2],
        "manifest_sha256": hashlib.sha256(content).hexdigest(),
        "export_sha256": hashlib.sha256(listing).hexdigest(),
    }
    source = package["ModelMetrics"]["ModelQuality"]["Statistics"]
    key = source["S3Uri"].removeprefix(f"s3://{bucket}/")
    text = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    assert source["ContentDigest"] == f"sha256:{hashlib.sha256(text).hexdigest()}"
    reason = json.loads(text)
    assert [(gate["metric"], gate["value"]) for gate in reason["gates"]] == [
        ("validation_loss", 2.5),
        ("validation_sets.code.loss", 2.0),
    ]
    assert reason["metrics"]["loss"] == 3.0, "the row of the attempt that made the checkpoint"

    files = json.loads(listing)["files"]
    assert "config.json" in files
    for name, entry in files.items():
        body = s3.get_object(Bucket=bucket, Key=f"models/acme-tiny/{JOB_ID}-step-{STEP}/{name}")["Body"].read()
        assert (len(body), hashlib.sha256(body).hexdigest()) == (entry["bytes"], entry["sha256"])

    before = keys_of(s3, bucket, "")
    again = promote("--max-shard-gib", "0.001")
    assert again == {**told, "is_new": False}
    assert keys_of(s3, bucket, "") == before
    assert len(sagemaker.list_model_packages(ModelPackageGroupName="acme-tiny")["ModelPackageSummaryList"]) == 1
    promote("--approve", code=1)  # it waits for a person, and no role of the tenant changes that


def test_what_was_interrupted_goes_on_and_nothing_is_mixed(
    promote: Promote,
    deployed: Account,
    contract: TenantContract,
    monkeypatch: pytest.MonkeyPatch,
    site: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from trainer.export import Export, export

    s3, bucket = deployed.client("s3"), contract.buckets.artifacts
    folder = f"models/acme-tiny/{JOB_ID}-step-{STEP}"
    s3.put_object(Bucket=bucket, Key=f"{folder}/model.safetensors", Body=b"half of it")  # a killed export's
    num_exports = 0

    def counted(*asked: Any) -> dict[str, Any]:
        nonlocal num_exports
        num_exports += 1
        return run_here(*asked)

    monkeypatch.setattr(exporting, "run_export", counted)
    # Nobody else's export goes there; and not even this one, beside another sharding's file: which would be loaded?
    s3.put_object(Bucket=bucket, Key=f"{folder}/", Body=b"")  # a console's mark of a folder
    with pytest.raises(InputError, match=r"is not empty \(model\.safetensors is there\)"):
        export(Export(f"s3://{contract.buckets.checkpoints}/jobs/{JOB_ID}", f"s3://{bucket}/{folder}"))
    asked = ["promote", JOB_ID, "-e", site, "--gate", "validation_loss<=2.5"]
    s3.put_object(Bucket=bucket, Key=f"{folder}/model-00001-of-00009.safetensors", Body=b"old")
    assert run(asked) == 1
    assert "model-00001-of-00009.safetensors is there and is not of this export" in capsys.readouterr().err
    assert f"{folder}/export.json" not in keys_of(s3, bucket, folder)
    s3.delete_object(Bucket=bucket, Key=f"{folder}/model-00001-of-00009.safetensors")

    def refused(self: Any, promotion: Any, request: Any) -> Any:
        raise JobFailedError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(registry.Registry, "register", refused)
        assert run(asked) == 1
    told = promote("--approve")
    assert (told["is_new"], told["approval"]) == (True, "Approved")
    assert num_exports == 2, "the second one was whole"
    assert told["source"] == f"artifact://{folder}"
    assert promote("--approve")["is_new"] is False

    assert run(asked) == 0
    assert "registered already" in (said := capsys.readouterr().out) and "without a tokenizer" in said

    s3.put_object(Bucket=bucket, Key=f"{folder}/adapter_config.json", Body=b"{}")
    assert run(asked) == 1
    assert "adapter_config.json: is there and not in export.json" in capsys.readouterr().err
    s3.delete_object(Bucket=bucket, Key=f"{folder}/adapter_config.json")
    s3.put_object(Bucket=bucket, Key=f"{folder}/model.safetensors", Body=b"somebody else's")
    assert run(asked) == 1
    assert "model.safetensors: has 15 bytes" in capsys.readouterr().err


def test_what_changes_the_files_changes_their_place(tmp_path: Path) -> None:
    def variant(tokenizer: str | None = None, base: Path | None = None) -> str:
        return exporting._variant(merge=base is not None, base=base, tokenizer=tokenizer, dtype=None)

    own = tmp_path / "own"
    own.mkdir()
    names = {variant(), variant("s3://acme/one"), variant("s3://acme/two"), variant(base=own)}
    for text in ("{}", "[]"):
        (own / "tokenizer.json").write_text(text)
        names |= {variant(str(own)), variant(base=own), variant(str(own), own)}
    assert len(names) == 10 and variant(str(own)) in names, names
    assert variant() == "" and variant(base=own).startswith("-merged-base-")


REFUSED: tuple[tuple[list[str], int, str], ...] = (
    ([], 2, "--gate is missing"),
    (["--gate", "validation_loss"], 2, "is no condition; write METRIC<=VALUE"),
    (["--gate", "validation_loss<=low"], 2, "'low' is no number"),
    (["--gate", "validation_loss<=nan"], 2, "give a finite number"),
    (["--gate", "learning_rate<=1"], 2, "learning_rate is no metric of a model"),
    (["--gate", "validation_loss<=2.4"], 1, "step 3 misses its gate: validation_loss is 2.5, not <=2.4"),
    (["--gate", "validation_top1_accuracy>=0.7"], 2, "has no validation_top1_accuracy at step 3 (there: loss, valida"),
    (["--gate", "loss<9", "--step", "2"], 2, "--step 2: s3://acme-checkpoints/jobs/acme-tiny-20260131120000-1a2b/ has"),
    (["--gate", "loss<9", "--average"], 2, "--average: metrics.jsonl has the metrics of the weights and none of"),
    (["--gate", "loss<9", "--model", "Tiny"], 2, "--model Tiny: a model's name has 1 to 58 lower-case letters"),
    (["--gate", "loss<9", "--image", "nginx"], 2, "--image nginx: must be an image of ECR"),
)


def test_what_cannot_be_promoted_is_refused_before_anything_is_written(
    site: str, deployed: Account, contract: TenantContract, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for arguments, code, words in REFUSED:
        assert run(["promote", JOB_ID, "-e", site, *arguments]) == code, arguments
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and words in error, error
    assert keys_of(deployed.client("s3"), contract.buckets.artifacts, "") == []
    assert deployed.client("sagemaker").list_model_package_groups()["ModelPackageGroupSummaryList"] == []


def test_a_job_of_this_machine_and_a_tenant_without_the_bucket(
    site: str,
    deployed: Account,
    contract: TenantContract,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    old = contract.model_dump(mode="json")
    del old["buckets"]["artifacts"], old["keys"]["artifacts"]
    text = json.dumps({**old, "version": 1})
    assert parse_contract(text, "a contract of version 1").buckets.artifacts == ""
    with pytest.raises(InputError, match=f"contract version 99 is above {CONTRACT_VERSION}; upgrade trainyard"):
        parse_contract(json.dumps({**old, "version": 99}), "a newer contract")
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/acme/contract", Value=text, Type="String", Overwrite=True
    )
    assert run(["promote", JOB_ID, "-e", site, "--gate", "loss<9"]) == 2
    assert "names no artifacts bucket; deploy its stacks again" in capsys.readouterr().err
    (tmp_path / "state/jobs" / JOB_ID).mkdir(parents=True)
    (tmp_path / "state/jobs" / JOB_ID / "record.json").write_text("{}")
    assert run(["promote", JOB_ID, "-e", site, "--gate", "loss<9"]) == 2
    assert "ran on this machine, which has no registry" in capsys.readouterr().err


@pytest.mark.full
def test_two_different_exports_are_two_packages(promote: Promote, deployed: Account) -> None:
    """The description tells them apart: image, model and variant are part of what it is a hash of."""
    first = promote()
    image = f"{IMAGE.partition('/')[0]}/serving@sha256:{'cd' * 32}"
    second = promote("--image", image)
    assert second["is_new"] and second["model_package"] != first["model_package"] and second["model"] == first["model"]
    third = promote("--model", "other")
    assert third["is_new"] and "/acme-other/" in third["model"]
    package = deployed.client("sagemaker").describe_model_package(ModelPackageName=second["model_package"])
    assert package["InferenceSpecification"]["Containers"][0]["Image"] == image


def test_gates_compare_as_they_say() -> None:
    for text, value, passes in (
        ("loss<=2", 2.0, True),
        ("loss<2", 2.0, False),
        ("validation_accuracy >= 0.5", 0.5, True),
        ("validation_accuracy>0.5", 0.5, False),
    ):
        gate = registry.parse_gate(text)
        try:
            registry.check_gates([gate], {gate.metric: value}, 1)
            assert passes, text
        except JobFailedError:
            assert not passes, text
    assert registry.parse_gate("loss<=2") == replace(registry.parse_gate("loss<=3"), bound=2.0)


def test_who_names_a_prefix_and_a_tenant_acts_as_its_launcher(
    site: str,
    deployed: Account,
    contract: TenantContract,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the prefix itself, or of a job of this machine that saves there, whose record names no role."""
    prefix, asked = f"s3://{contract.buckets.checkpoints}/jobs/{JOB_ID}", list[tuple[str, bool]]()

    def note(checkpoints: str, _: list[str], variables: dict[str, str]) -> dict[str, Any]:
        asked.append((checkpoints, bool(variables.get("AWS_ACCESS_KEY_ID"))))
        return {"kind": "model", "num_tensors": 1, "num_bytes": 1, "step": STEP, "beside": ["tokenizer.json"]}

    monkeypatch.setattr(exporting, "run_export", note)
    own = S3RecordStore(deployed.client("s3"), contract.buckets.data).read(JOB_ID).record
    here = own.model_copy(update={"job_id": "local-tiny-20260131120000-1a2b", "checkpoint_destination": prefix})
    FolderRecordStore(tmp_path / "state/jobs").create(here)
    for named in (prefix, here.job_id):
        for to in ("hf", "s3://kept/hf"):
            assert run(["export", named, "-e", site, "--tenant", "acme", "--to", to]) == 0
        assert asked == [(prefix, True)] * 2
        asked.clear()
    assert run(["export", str(tmp_path), "-e", site, "--tenant", "acme", "--to", "s3://kept/hf"]) == 0
    assert asked == [(str(tmp_path), True)]
    assert run(["export", str(tmp_path), "-e", site, "--to", "s3://kept/hf"]) == 2
    assert "nothing says whose role may write there: give --tenant NAME, or a folder" in capsys.readouterr().err
    capsys.readouterr()
    assert run(["checkpoints", here.job_id, "-e", site, "--tenant", "acme", "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [STEP]
    assert run(["checkpoints", here.job_id, "-e", site]) == 2
    assert "give --tenant NAME" in capsys.readouterr().err
