"""From a checkpoint in S3 to a registered model and back, by the command line, as the deployed policies allow it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from deployed_site import CHECKOUT, Site
from safetensors.torch import load, load_file

from trainyard.launch.contract import read_contract
from trainyard.launch.session import assume, open_account
from trainyard.operate.isolation_probe import DENIED_CODES
from trainyard.spec.platform import TenantContract, load_environment

pytestmark = pytest.mark.end_to_end


def told(site: Site, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = site.trainyard(*arguments, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def promoted(site: Site) -> dict[str, Any]:
    """The quickstart's model, registered."""
    loss, job = site.report["loss"]["validation_last"], site.report["job"]["name"]
    return told(site, "promote", job, "--gate", f"validation_loss<={loss + 0.001}", "--max-shard-gib", "0.001")


def launcher(tenant: str) -> tuple[Any, TenantContract]:
    environment = load_environment(CHECKOUT / "environments/local.yaml")
    account = open_account(environment)
    contract = read_contract(account, environment, tenant)
    return assume(account, contract.roles.launcher, session_name="end-to-end"), contract


def answer(call: Callable[[], Any]) -> str:
    try:
        call()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return "allowed"


def test_it_is_registered_with_what_it_was_made_of(site: Site, promoted: dict[str, Any]) -> None:
    assert promoted["is_new"] and promoted["approval"] == "PendingManualApproval"
    own, _ = launcher("acme")
    package = own.client("sagemaker").describe_model_package(ModelPackageName=promoted["model_package"])
    assert package["CustomerMetadataProperties"]["job_id"] == site.report["job"]["name"]
    assert package["CustomerMetadataProperties"]["manifest_sha256"] == promoted["manifest_sha256"]


@pytest.mark.full
def test_twice_is_once_and_a_missed_gate_is_one_line(site: Site, promoted: dict[str, Any]) -> None:
    job = site.report["job"]["name"]
    again = told(site, "promote", job, "--gate", "validation_loss<=100")
    assert again == {**promoted, "is_new": False}
    missed = site.trainyard("promote", job, "--gate", f"validation_loss<{site.report['loss']['validation_last'] / 2}")
    assert missed.returncode == 1
    assert "misses its gate" in missed.stderr and missed.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_export_from_s3_has_the_registered_weights_bit_by_bit(
    site: Site, promoted: dict[str, Any], tmp_path: Path
) -> None:
    written = told(site, "export", site.report["job"]["name"], "--to", str(tmp_path / "hf"))
    here = load_file(tmp_path / "hf/model.safetensors")
    own, contract = launcher("acme")
    s3, bucket = own.client("s3"), contract.buckets.artifacts
    folder = promoted["model"].removeprefix(f"s3://{bucket}/")
    listing = json.loads(s3.get_object(Bucket=bucket, Key=f"{folder}/export.json")["Body"].read())
    assert listing["step"] == written["step"]
    there = {}
    for name in listing["files"]:
        stored = s3.get_object(Bucket=bucket, Key=f"{folder}/{name}")
        assert stored["SSEKMSKeyId"] == contract.keys.artifacts, name
        there |= load(stored["Body"].read()) if name.endswith(".safetensors") else {}
    assert len([name for name in listing["files"] if name.endswith(".safetensors")]) > 1, "sent shard by shard"
    assert here.keys() == there.keys()
    assert all(tensor.equal(there[name]) for name, tensor in here.items())


def outcomes(account: Any, promoted: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """What looking at the package, and what changing it, is answered."""
    sagemaker, s3 = account.client("sagemaker"), account.client("s3")
    arn, group = promoted["model_package"], "acme-stdlib-llama"
    bucket, _, folder = promoted["model"].removeprefix("s3://").partition("/")
    seen = {
        "describe": answer(lambda: sagemaker.describe_model_package(ModelPackageName=arn)),
        "list": answer(lambda: sagemaker.list_model_packages(ModelPackageGroupName=group)),
        "group": answer(lambda: sagemaker.describe_model_package_group(ModelPackageGroupName=group)),
        "read": answer(lambda: s3.get_object(Bucket=bucket, Key=f"{folder}/export.json")),
    }
    changed = {
        "approve": answer(lambda: sagemaker.update_model_package(ModelPackageArn=arn, ModelApprovalStatus="Approved")),
        "delete": answer(lambda: sagemaker.delete_model_package(ModelPackageName=arn)),
        "remove": answer(lambda: s3.delete_object(Bucket=bucket, Key=f"{folder}/export.json")),
        "list of all": answer(sagemaker.list_model_packages),
    }
    return seen, changed


def test_nobody_changes_it_and_the_other_tenant_sees_nothing(site: Site, promoted: dict[str, Any]) -> None:
    for tenant, may_see in (("acme", True), ("globex", False)):
        seen, changed = outcomes(launcher(tenant)[0], promoted)
        assert {code == "allowed" for code in seen.values()} == {may_see}, f"{tenant}: {seen}"
        denied = {**changed, **({} if may_see else seen)}
        assert all(code in DENIED_CODES for code in denied.values()), f"{tenant}: {denied}"


@pytest.mark.full
def test_a_job_starts_from_the_registered_model(site: Site, promoted: dict[str, Any]) -> None:
    """Its validation before a step that changes nothing (a learning rate next to none) is the registered model's."""
    from test_jobs import rows, wait_for

    done = site.trainyard(
        "launch",
        "jobs/quickstart.yaml",
        "--json",
        *(
            item
            for setting in (
                "name=again",
                f"model={{source: '{promoted['source']}'}}",
                "training.steps=1",
                "training.learning_rate=1.0e-12",
                "training.schedule={kind: constant, warmup_steps: 0}",
                "compute.spot=false",
            )
            for item in ("--set", setting)
        ),
    )
    assert done.returncode == 0, done.stderr
    job = str(json.loads(done.stdout)["job_id"])
    wait_for(site, job, "Completed")
    (row,) = rows(site, job)
    assert row["validation_loss"] == pytest.approx(site.report["loss"]["validation_last"], rel=1e-5)
