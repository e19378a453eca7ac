"""Acting runbooks on a platform that the real CDK CLI deployed on the emulator, under its real policies."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from trainyard import emulator
from trainyard.launch.place import open_tenant
from trainyard.launch.session import open_account
from trainyard.operate.runbooks import framework
from trainyard.operate.runbooks.__main__ import main
from trainyard.spec.platform import load_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the local environment, deployed; runbooks edit it."""
    state = tmp_path_factory.mktemp("state")
    path = tmp_path_factory.mktemp("environment") / "local.yaml"
    shutil.copyfile(ROOT / "environments/local.yaml", path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINYARD_STATE_DIR", str(state))
        framework.command("emulator", "start").make()
        try:
            framework.command("deploy", str(path)).make()
            yield path
        finally:
            emulator.stop(state / "emulator")


@pytest.fixture
def run(
    environment_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    def call(*arguments: str) -> tuple[int, dict[str, Any], str]:
        code = main([*arguments, "-e", str(environment_file), "--evidence", str(tmp_path / "evidence"), "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out.strip() else {}, said.err

    return call


def test_a_deployed_tenant_passes_its_audit_and_its_keys_rotate(run: Any) -> None:
    code, document, said = run("audit_tenant", "--tenant", "acme", "--skip-isolation")
    assert code == 0, (document, said)
    buckets = [one for one in document["findings"] if one["words"].startswith("bucket ")]
    assert len(buckets) == 3 and {one["kind"] for one in buckets} == {"clear"}
    code, document, said = run("rotate_keys", "--tenant", "acme", "--yes")
    assert (code, len(document["steps"])) == (0, 4), said
    assert all("every year" in one["words"] for one in document["findings"])


def test_the_glass_asks_for_a_second_factor_and_is_closed(run: Any, environment_file: Path) -> None:
    code, _, said = run("break_glass", "open", "--tenant", "acme", "--reason", "drill", "--yes")
    assert (code, "AccessDenied" in said) == (1, True), "the operator's trust wants a second factor"
    assert run("break_glass", "close", "--tenant", "acme", "--yes")[0] == 0
    spec = load_environment(environment_file)
    role = open_tenant(spec, "acme", "test").contract.roles.operator.rpartition("/")[2]
    assert (
        open_account(spec)
        .client("iam")
        .list_role_policies(RoleName=role)["PolicyNames"]
        .count("AWSRevokeOlderSessions")
    )
    _, document, _ = run("break_glass", "audit", "--tenant", "acme")
    assert document["findings"][0]["kind"] == "unknown", (
        "the emulator has no event history, and nobody says all is well"
    )


def test_a_tenant_without_jobs_has_nothing_to_drill_and_no_storm(run: Any) -> None:
    _, document, _ = run("disaster_drill", "--tenant", "acme")
    assert [one["kind"] for one in document["findings"]] == ["clear", "clear", "clear", "unknown"]
    assert run("spot_storm", "--tenant", "acme", "--yes")[0] == 0
    _, document, _ = run("fsx_full_or_slow", "--tenant", "acme")
    assert document["findings"][0]["kind"] == "unknown"


def test_a_tenant_leaves_with_its_keys(run: Any, environment_file: Path) -> None:
    spec = load_environment(environment_file)
    keys = open_tenant(spec, "globex", "test").contract.keys.model_dump().values()
    before = environment_file.read_text()
    account = open_account(spec)
    copy = {"Bucket": f"copies-{uuid.uuid4().hex[:12]}", "Key": "checkpoint"}
    account.client("s3").create_bucket(Bucket=copy["Bucket"])
    key = open_tenant(spec, "globex", "test").contract.keys.checkpoints
    account.client("s3").put_object(**copy, Body=b"weights", ServerSideEncryption="aws:kms", SSEKMSKeyId=key)
    code, document, _ = run("offboard", "--tenant", "globex")
    assert (code, environment_file.read_text()) == (0, before)
    assert [step["made"] for step in document["steps"]] == [True, False]
    code, _, said = run("offboard", "--tenant", "globex", "--yes")
    assert code == 0, said
    kms = account.client("kms")
    assert {kms.describe_key(KeyId=key)["KeyMetadata"]["KeyState"] for key in keys} == {"PendingDeletion"}
    with pytest.raises(ClientError, match="KMSInvalidStateException"):  # what was copied elsewhere is shredded too
        account.client("s3").get_object(**copy)
    assert "globex" not in load_environment(environment_file).tenants
