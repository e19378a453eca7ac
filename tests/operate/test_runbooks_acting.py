"""Runbooks that act: without --yes nothing is changed and the exact calls are printed; with it these are made."""

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.client
import botocore.exceptions
import pytest
import yaml
from launch_testing import JOB_ID, job_content
from runbook_testing import record_of, rows_of

from trainyard.errors import AwsRefusedError, InputError, JobFailedError
from trainyard.launch import watch
from trainyard.launch.backend import AwayError, LogLine, Observation
from trainyard.launch.backends import ByRecord
from trainyard.launch.local_backend import LocalBackend
from trainyard.launch.local_paths import local_job
from trainyard.launch.place import Place
from trainyard.launch.record import FolderRecordStore, JobRecord, S3RecordStore
from trainyard.launch.session import Account
from trainyard.operate import canary as canaries
from trainyard.operate.doctor import Check
from trainyard.operate.runbooks import audit_tenant, framework, fsx_full_or_slow, runbook
from trainyard.operate.runbooks.__main__ import main
from trainyard.operate.runbooks.spot_storm import storm
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, load_job
from trainyard.spec.platform import TenantContract

READS = ("Get", "List", "Describe", "Head", "Lookup", "AssumeRole")
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
REPOSITORY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainyard@"
SNAPSHOTS = Path(__file__).resolve().parents[1] / "stacks/snapshots"
OPERATOR = "arn:aws:iam::123456789012:role/trainyard/test/acme/Operator-1"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every operation that AWS is asked for, as boto sends it."""
    seen: list[str] = []
    original = botocore.client.BaseClient._make_api_call

    def counted(client: Any, operation: str, parameters: Any) -> Any:
        seen.append(operation)
        return original(client, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", counted)
    return seen


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The `trainyard` commands that would have been run as processes."""
    seen: list[list[str]] = []

    def run(argv: Sequence[str]) -> str:
        seen.append(list(argv[3:]) if argv[1] == "-m" else list(argv))
        return "done"

    monkeypatch.setattr(framework, "_run", run)
    return seen


@pytest.fixture
def tenant(deployed: Account, contract: TenantContract) -> TenantContract:
    """acme with real keys, an operator, versioned buckets, and two jobs, one with a checkpoint."""
    kms, s3, iam = (deployed.client(name) for name in ("kms", "s3", "iam"))
    keys = {name: kms.create_key()["KeyMetadata"]["Arn"] for name in ("data", "checkpoints", "logs", "artifacts")}
    iam.create_role(RoleName="Operator-1", Path="/trainyard/test/acme/", AssumeRolePolicyDocument="{}")
    roles = contract.roles.model_copy(update={"operator": OPERATOR})
    told = contract.model_copy(update={"keys": contract.keys.model_copy(update=keys), "roles": roles})
    name = "/trainyard/test/acme/contract"
    deployed.client("ssm").put_parameter(Name=name, Value=told.model_dump_json(), Type="String", Overwrite=True)
    for bucket in told.buckets.model_dump().values():
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    record = spot_job(reclaims=3)
    store = S3RecordStore(s3, told.buckets.data)
    store.create(record)
    write_checkpoint(lambda name, body: s3.put_object(Bucket="acme-checkpoints", Key=f"x/{name}", Body=body), 40)
    return told


def spot_job(*, reclaims: int, job_id: str = JOB_ID) -> JobRecord:
    record = record_of().model_copy(update={"job_id": job_id, "checkpoint_destination": "s3://acme-checkpoints/x"})
    return record.with_attempt(reclaims=reclaims, submitted_at="2026-01-31T12:00:00+00:00").with_state("Training")


def write_checkpoint(put: Callable[[str, bytes], Any], step: int) -> None:
    """A checkpoint of one file, as the trainer commits it."""
    shard = b"weights" * 100
    promised = {"name": "rank-0.bin", "bytes": len(shard), "sha256": hashlib.sha256(shard).hexdigest()}
    manifest = json.dumps(
        {"version": 1, "step": step, "world_size": 2, "shards": [promised], "extra": {"strategy": "zero-2"}}
    ).encode()
    folder = f"checkpoints/step-{step:08d}"
    put(f"{folder}/rank-0.bin", shard)
    put(f"{folder}/manifest.json", manifest)
    put(f"{folder}/COMMITTED", json.dumps({"manifest_sha256": hashlib.sha256(manifest).hexdigest()}).encode())


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's checks have tests of their own, and ask for what moto lacks."""
    checks = [Check("acme: data bucket", "pass", "acme-data"), Check("prices", "warn", "old", "refresh them")]
    monkeypatch.setattr(audit_tenant, "examine", lambda *_: iter(checks))


@pytest.fixture
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "evidence"


@pytest.fixture
def run(
    evidence: Path, environment_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Exit code, document, and what was said on stderr."""

    def call(*arguments: str) -> tuple[int, dict[str, Any], str]:
        code = main([*arguments, "-e", str(environment_path), "--evidence", str(evidence), "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out.strip() else {}, said.err

    return call


def words_of(document: dict[str, Any]) -> list[str]:
    return [step["call"] for step in document["steps"]]


ACTING = {
    "restore_at_another_size": (JOB_ID, "--instances", "1"),
    "move_job": (JOB_ID, "--zero-stage", "3"),
    "spot_storm": ("--tenant", "acme"),
    "rotate_keys": ("--tenant", "acme"),
    "break_glass": ("close", "--tenant", "acme"),
    "audit_tenant": ("--tenant", "acme"),
    "onboard": ("--tenant", "vision", "--like", "acme"),
    "offboard": ("--tenant", "acme", "--keep-data"),
    "disaster_drill": ("--tenant", "acme"),
}
LOOKS = {("tenant", "add"), ("tenant", "remove"), ("isolation",)}


@pytest.fixture
def digests(deployed: Account) -> list[str]:
    """Two images in the repository; the first is released."""
    ecr, ssm = deployed.client("ecr"), deployed.client("ssm")
    ecr.create_repository(repositoryName="trainyard")
    found = [
        ecr.put_image(
            repositoryName="trainyard",
            imageManifest=json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "n": n}),
            imageTag=f"t{n}",
        )["image"]["imageId"]["imageDigest"]
        for n in range(2)
    ]
    ssm.put_parameter(Name="/trainyard/test/image", Value=REPOSITORY + found[0], Type="String", Overwrite=True)
    return found


@pytest.fixture
def canary_job(tmp_path: Path) -> str:
    """A job file of the tenant's."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_content()), encoding="utf-8")
    return str(path)


def test_without_yes_nothing_is_changed_and_the_calls_are_told(
    tenant: TenantContract,
    run: Any,
    calls: list[str],
    commands: list[list[str]],
    doctor: None,
    digests: list[str],
    canary_job: str,
    environment_path: Path,
) -> None:
    upgrade = {"upgrade_image": ("--digest", digests[1], "--canary", canary_job)}
    for name, arguments in {**ACTING, **upgrade}.items():
        calls.clear()
        commands.clear()
        _, document, said = run(name, *arguments)
        assert document, (name, said)
        assert [one for one in calls if not one.startswith(READS)] == [], name
        for command in commands:
            is_look = tuple(command[:2]) in LOOKS or tuple(command[:1]) in LOOKS
            assert is_look and "--confirm" not in command and ("add" not in command or "--dry-run" in command), command
        told = [shlex.split(call) for call in words_of(document) if call.startswith("trainyard ")]
        assert all(str(environment_path) in words for words in told), "typed as it is, it is the same call"
        assert name == "audit_tenant" or any(not step["made"] for step in document["steps"]), f"{name}: calls are told"


def test_dry_run_is_the_default_and_both_at_once_are_refused(
    tenant: TenantContract, run: Any, calls: list[str]
) -> None:
    calls.clear()
    _, document, _ = run("rotate_keys", "--tenant", "acme", "--dry-run")
    assert not [one for one in calls if not one.startswith(READS)] and document["steps"]
    code, _, said = run("rotate_keys", "--tenant", "acme", "--dry-run", "--yes")
    assert code == 2 and "not allowed with argument" in said


def test_keys_are_rotated_and_go_on_to_be(tenant: TenantContract, run: Any, deployed: Account) -> None:
    kms = deployed.client("kms")
    code, document, _ = run("rotate_keys", "--tenant", "acme", "--yes")
    assert code == 0 and all(step["made"] for step in document["steps"])
    for key in tenant.keys.model_dump().values():
        assert kms.get_key_rotation_status(KeyId=key)["KeyRotationEnabled"]
        assert f"aws kms rotate-key-on-demand --key-id {key} --region us-east-1" in words_of(document)
        assert len(kms.list_key_rotations(KeyId=key)["Rotations"]) == 1
    code, document, _ = run("rotate_keys", "--tenant", "acme", "--yes")
    assert (code, document["steps"]) == (0, []), "repeated after an interruption, no key is rotated twice"
    assert all("less than an hour ago" in one["words"] for one in document["findings"])


def test_an_administrator_may_make_every_call_of_a_rotation(
    tenant: TenantContract, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, make = set[str](), botocore.client.BaseClient._make_api_call

    def seen(client: Any, operation: str, parameters: Any) -> Any:
        if client.meta.service_model.service_name == "kms":
            asked.add(f"kms:{operation}")
        return make(client, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", seen)
    assert run("rotate_keys", "--tenant", "acme", "--yes")[0] == 0
    template = json.loads((SNAPSHOTS / "globex-foundation.json").read_text(encoding="utf-8"))
    keys = [one for one in template["Resources"].values() if one["Type"] == "AWS::KMS::Key"]
    assert "kms:RotateKeyOnDemand" in asked and len(keys) == 4
    for key in keys:
        statements = {one["Sid"]: one["Action"] for one in key["Properties"]["KeyPolicy"]["Statement"]}
        assert asked <= set(statements["AccountAdministersButCannotUse"])


def test_where_older_rotations_cannot_be_listed_a_key_is_rotated_and_that_is_told(
    tenant: TenantContract, run: Any, monkeypatch: pytest.MonkeyPatch, deployed: Account
) -> None:
    make = botocore.client.BaseClient._make_api_call

    def denied(client: Any, operation: str, parameters: Any) -> Any:
        if operation == "ListKeyRotations" and parameters["KeyId"] == tenant.keys.data:
            answer: Any = {"Error": {"Code": "AccessDeniedException", "Message": "no"}}
            raise botocore.exceptions.ClientError(answer, operation)
        return make(client, operation, parameters)

    with monkeypatch.context() as patch:
        patch.setattr(botocore.client.BaseClient, "_make_api_call", denied)
        code, document, _ = run("rotate_keys", "--tenant", "acme", "--yes")
    assert code == 0 and all(step["made"] for step in document["steps"])
    (untold,) = [one["words"] for one in document["findings"] if one["kind"] == "unknown"]
    assert untold.startswith("key data: ") and "AccessDeniedException" in untold
    assert len(deployed.client("kms").list_key_rotations(KeyId=tenant.keys.data)["Rotations"]) == 1


def test_a_rotation_on_its_way_gets_no_second_one(
    tenant: TenantContract, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = botocore.client.BaseClient._make_api_call

    def begun(client: Any, operation: str, parameters: Any) -> Any:
        answer = make(client, operation, parameters)
        if operation == "GetKeyRotationStatus" and parameters["KeyId"] == tenant.keys.data:
            answer["OnDemandRotationStartDate"] = datetime(2026, 1, 31, 12, tzinfo=UTC)
        return answer

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", begun)
    _, document, _ = run("rotate_keys", "--tenant", "acme")
    rotated = [call for call in words_of(document) if "rotate-key-on-demand" in call]
    assert len(rotated) == 3 and not any(tenant.keys.data in call for call in rotated)
    assert "on its way since 2026-01-31T12:00:00Z" in document["findings"][0]["words"]


def test_the_glass_is_broken_into_a_file_of_the_callers_alone_and_closed_for_good(
    tenant: TenantContract, run: Any, deployed: Account, evidence: Path
) -> None:
    assert run("break_glass", "open", "--tenant", "acme", "--yes")[0] == 2, "a reason is asked for"
    given = ("--mfa-serial", "arn:aws:iam::1:mfa/anna", "--mfa-code", "654987", "--reason", "mend job x", "--yes")
    code, document, said = run("break_glass", "open", "--tenant", "acme", *given)
    path = evidence / "operator.sh"
    assert (code, path.stat().st_mode & 0o777) == (0, 0o600)
    secret = path.read_text().splitlines()[1].partition("=")[2]
    told = json.dumps(document) + said + (evidence / "report.json").read_text() + (evidence / "steps.json").read_text()
    assert secret and secret not in told and "654987" not in told
    assert "--role-session-name mend-job-x" in words_of(document)[0]
    run("break_glass", "close", "--tenant", "acme", "--yes")
    policy = deployed.client("iam").get_role_policy(RoleName="Operator-1", PolicyName="AWSRevokeOlderSessions")
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert (statement["Effect"], list(statement["Condition"])) == ("Deny", ["DateLessThan"])


class History:
    """A region's event history, in AWS's form of it (CloudTrail, LookupEvents), which moto lacks: by one attribute, and
    only as long as nobody asks for more pages than a quick answer has."""

    def __init__(self, *events: tuple[str, str, dict[str, Any]]) -> None:
        """Event's name, role, and what else it says."""
        self.events = events

    def get_paginator(self, _: str) -> Any:
        return self

    def paginate(self, *, LookupAttributes: list[dict[str, str]], **_: Any) -> Iterator[dict[str, Any]]:
        (asked,) = LookupAttributes
        assert asked["AttributeKey"] == "ResourceName", "of a busy account's AssumeRole events there are thousands"
        for name, role, more in self.events:
            if role == asked["AttributeValue"]:
                asks = {"roleArn": role, "roleSessionName": "mend-job-x"}
                identity = {"arn": "arn:aws:iam::1:user/anna"}
                content = {"eventName": name, "userIdentity": identity, "requestParameters": asks} | more
                yield {"Events": [{"CloudTrailEvent": json.dumps(content)}]}


def with_histories(monkeypatch: pytest.MonkeyPatch, **histories: History) -> None:
    """A history by region (with _ for -); another region's, and none at all, refuses."""
    original = Account.client

    def client(account: Account, service: str, region: str | None = None) -> Any:
        if service != "cloudtrail":
            return original(account, service, region)
        if (history := histories.get(str(region).replace("-", "_"))) is None:
            raise AwsRefusedError(f"not authorized in {region}")
        return history

    monkeypatch.setattr(Account, "client", client)


@pytest.fixture
def in_europe(tenant: TenantContract, deployed: Account) -> None:
    """The tenant's contract says so; the histories are played."""
    name = "/trainyard/test/acme/contract"
    content = tenant.model_copy(update={"region": "eu-west-1"}).model_dump_json()
    deployed.client("ssm").put_parameter(Name=name, Value=content, Type="String", Overwrite=True)


def test_who_broke_the_glass_is_told_from_the_trails_of_all_endpoints(
    in_europe: None, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The global endpoint's uses are in us-east-1's history alone."""
    later, denied = {"eventTime": "2026-11-02T03:00:00Z"}, {"errorCode": "AccessDenied"}
    here = History(
        ("AssumeRole", OPERATOR, later),
        ("AssumeRole", "arn:aws:iam::1:role/other", {}),
        ("PutRolePolicy", OPERATOR, {}),
    )
    there = History(("AssumeRole", OPERATOR, {"eventTime": "2026-11-01T03:00:00Z", **denied}))
    with_histories(monkeypatch, eu_west_1=here, us_east_1=there)
    _, document, _ = run("break_glass", "audit", "--tenant", "acme")
    (finding,) = document["findings"]
    assert finding["words"].startswith("2 uses") and "eu-west-1 and us-east-1" in finding["words"]
    assert [line[:10] for line in finding["decided_by"]] == ["2026-11-01", "2026-11-02"]
    assert "refused: AccessDenied" in finding["decided_by"][0]


def test_a_history_that_is_refused_is_no_clear_one(in_europe: None, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_histories(monkeypatch, eu_west_1=History())
    _, document, _ = run("break_glass", "audit", "--tenant", "acme")
    unknown, clear = document["findings"]
    assert unknown["kind"] == "unknown" and "us-east-1" in unknown["words"]
    assert clear["words"].startswith("0 uses") and "us-east-1" not in clear["words"]


def test_a_region_that_is_the_global_endpoints_too_is_asked_once(
    tenant: TenantContract, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_histories(monkeypatch, us_east_1=History(("AssumeRole", OPERATOR, {})))
    _, document, _ = run("break_glass", "audit", "--tenant", "acme")
    assert [one["words"][:6] for one in document["findings"]] == ["1 use "]


def test_a_storm_is_many_jobs_hit_and_moves_only_those(
    tenant: TenantContract, run: Any, commands: list[list[str]]
) -> None:
    hit, calm = spot_job(reclaims=3), [spot_job(reclaims=0, job_id=f"{JOB_ID[:-1]}{number}") for number in range(3)]
    assert storm([hit, *calm], 2)[0].kind == "clear" and storm([hit, *calm], 2)[1] == []
    assert storm([hit, calm[0]], 2)[1] == [hit]
    assert storm([hit.with_state("Completed")], 2)[1] == []
    code, document, _ = run("spot_storm", "--tenant", "acme", "--yes")
    assert (code, document["findings"][0]["kind"]) == (1, "fault")
    assert [command[:2] for command in commands] == [["stop", JOB_ID], ["resume", JOB_ID]]
    assert commands[1][-1] == "compute.spot=false"


def test_a_record_that_cannot_be_read_hides_no_storm(
    tenant: TenantContract, run: Any, commands: list[list[str]], deployed: Account
) -> None:
    later = "acme-tiny-20990131120000-1a2b"
    deployed.client("s3").put_object(
        Bucket=tenant.buckets.data, Key=f"jobs/{later}/record.json", Body=b'{"version": 99}'
    )
    code, document, _ = run("spot_storm", "--tenant", "acme", "--yes")
    assert [one["kind"] for one in document["findings"]] == ["unknown", "fault"] and code == 1
    assert f"job {later}: is not counted: " in document["findings"][0]["words"]
    assert [command[:2] for command in commands] == [["stop", JOB_ID], ["resume", JOB_ID]]


def test_a_storm_is_seen_behind_any_number_of_newer_jobs_and_one_that_ended_holds_nobody_up(
    tenant: TenantContract, run: Any, monkeypatch: pytest.MonkeyPatch, deployed: Account
) -> None:
    store = S3RecordStore(deployed.client("s3"), tenant.buckets.data)
    ended = "acme-tiny-20260131120001-aaaa"
    store.create(spot_job(reclaims=2, job_id=ended))
    for number in range(60):
        store.create(spot_job(reclaims=0, job_id=f"acme-tiny-2099013112{number:02d}00-1a2b").with_state("Completed"))
    seen: list[list[str]] = []

    def refuse(argv: Sequence[str]) -> str:
        seen.append(list(argv[3:5]))
        if ended in argv:
            raise InputError(f"job {ended}: has ended already")
        return "done"

    monkeypatch.setattr(framework, "_run", refuse)
    code, document, said = run("spot_storm", "--tenant", "acme", "--yes")
    assert code == 1 and "2 of 2 running spot jobs" in document["findings"][0]["words"]
    assert seen == [["stop", ended], ["stop", JOB_ID], ["resume", JOB_ID]] and "has ended already" in said
    other = "acme-tiny-20260131120002-bbbb"
    store.create(spot_job(reclaims=2, job_id=other))

    def refuse_two(argv: Sequence[str]) -> str:
        if argv[4] in (ended, other):
            raise InputError(f"job {argv[4]}: refused")
        return "done"

    monkeypatch.setattr(framework, "_run", refuse_two)
    code, document, said = run("spot_storm", "--tenant", "acme", "--yes")
    assert code == 1 and "2 of 3 jobs were not moved" in document["error"]
    assert all(f"job {one}: refused" in document["error"] for one in (ended, other)), "each is somebody's"


def test_a_restore_is_checked_before_the_job_is_stopped(
    tenant: TenantContract, run: Any, commands: list[list[str]], deployed: Account
) -> None:
    code, document, _ = run("restore_at_another_size", JOB_ID, "--instances", "1", "--yes")
    assert code == 0 and "step 40" in document["findings"][0]["words"]
    assert [command[0] for command in commands] == ["stop", "resume"]
    assert commands[1][-3:] == ["compute.instance_count=1", "--set", "parallelism=auto"]
    commands.clear()
    refused = run("restore_at_another_size", JOB_ID, "--instances", "1", "--set", "model.dtype=fp16", "--yes")
    assert (refused[0], commands) == (2, []) and "a resume keeps the job's data" in refused[2]
    uneven = run("restore_at_another_size", JOB_ID, "--instances", "3", "--yes")
    assert (uneven[0], commands) == (2, []), "eight samples on three ranks: refused while the job still runs"
    body = b"altered" * 100
    key = "x/checkpoints/step-00000040/rank-0.bin"
    deployed.client("s3").put_object(Bucket="acme-checkpoints", Key=key, Body=body)
    none = run("restore_at_another_size", JOB_ID, "--instances", "1", "--yes")
    assert (none[0], commands) == (1, []) and "has no whole checkpoint" in none[2] and "altered" in none[2]


def test_a_checkpoint_that_cant_be_read_hides_no_other_from_a_restore(
    tenant: TenantContract, run: Any, commands: list[list[str]], deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = deployed.client("s3")
    write_checkpoint(lambda name, body: s3.put_object(Bucket="acme-checkpoints", Key=f"x/{name}", Body=body), 50)
    refused, make = set[str](), botocore.client.BaseClient._make_api_call

    def refuse(client: Any, operation: str, parameters: dict[str, Any]) -> Any:
        if operation == "GetObject" and parameters["Key"].endswith(tuple(refused)):
            answer: Any = {"Error": {"Code": "AccessDenied", "Message": "kms:Decrypt"}}
            raise botocore.exceptions.ClientError(answer, operation)
        return make(client, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", refuse)
    for what in ("step-00000050/rank-0.bin", "step-00000050/manifest.json"):
        refused.clear()
        refused.add(what)
        code, document, _ = run("restore_at_another_size", JOB_ID, "--instances", "1", "--yes")
        words = document["findings"][0]["words"]
        assert code == 0 and "goes on from step 40, saved by 2 ranks" in words
        assert "from what can't be read here: step 50" in words
    refused.add("step-00000040/manifest.json")
    none = run("restore_at_another_size", JOB_ID, "--instances", "1", "--yes")
    assert none[0] == 1 and "step 40: reading" in none[2] and "AccessDenied" in none[2]


def files_here(folder: Path) -> list[str]:
    """Options that say where the job's files lie on this machine."""
    names = {
        "data.train.0.path": "train.jsonl",
        "data.validation.0.path": "validation.jsonl",
        "data.tokenizer": "tokenizer.json",
    }
    for name in names.values():
        (folder / name).write_text('{"model": {}}\n')
    return [word for key, name in names.items() for word in ("--set", f"{key}={folder / name}")]


def test_a_job_moves_to_another_stage_or_cluster(
    tenant: TenantContract, run: Any, commands: list[list[str]], tmp_path: Path
) -> None:
    run("move_job", JOB_ID, "--zero-stage", "3", "--yes")
    assert commands[1][0] == "resume" and '"zero_stage": 3' in commands[1][-1]
    commands.clear()
    assert run("move_job", JOB_ID, "--to", "local", "--yes")[0] == 2, "a folder is asked for"
    code, _, said = run("move_job", JOB_ID, "--to", "local", "--folder", "/data/moved", "--yes")
    assert (code, commands) == (2, []), "launch would refuse it, and the job be stopped for nothing"
    assert "data.train.0.path: tenant://sets/train is not on this machine" in said and "--set KEY=PATH" in said
    assert run("move_job", JOB_ID, "--zero-stage", "3", "--set", "training.steps=1")[0] == 2
    to, files = ("move_job", JOB_ID, "--to", "local", "--folder", "/data/moved"), files_here(tmp_path)
    for source in ("s3://models/llama", "tenant://models/llama", "models/llama"):
        code, _, said = run(*to, *files, "--set", "model.config=null", "--set", f"model.source={source}", "--yes")
        assert (code, commands) == (2, []) and f"model.source: {source}" in said and "--set KEY=PATH" in said, said
    for wrong in ("training.stops=1", "training.steps=many", "steps"):
        code, _, said = run(*to, *files, "--set", wrong, "--yes")
        assert (code, commands) == (2, []) and "Nothing was changed" in said, said
        assert "say where it is" not in said, "no file is missing"
    run(*to, *files, "--yes")
    assert [command[0] for command in commands] == ["stop", "checkpoints", "launch"]
    assert "checkpoint.destination=/data/moved" in commands[2]
    launched = load_job(Path(commands[2][1]))
    assert launched.name == "tiny" and launched.data.train[0].path == str(tmp_path / "train.jsonl")


def test_a_job_that_moves_keeps_the_files_that_it_read(
    run: Any, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: Path
) -> None:
    """It was launched from another folder than the runbook, and in both there is a file of that name."""
    first, here, jobs = tmp_path / "first", tmp_path / "here", tmp_path / "state/jobs"
    for folder in (first, here):
        folder.mkdir()
        files_here(folder)
    content = job_content()
    content["data"] |= {
        "train": [content["data"]["train"][0] | {"path": "train.jsonl"}],
        "validation": [],
        "tokenizer": "tokenizer.json",
    }
    spec = parse(JobSpec, content, "job")
    monkeypatch.chdir(first)
    sent = local_job(spec)
    record = record_of().model_copy(update={"spec": spec, "environment": None, "backend": "local"})
    record = record.model_copy(update={"checkpoint_destination": str(jobs / JOB_ID)})
    record = record.model_copy(update={"resolved": record.resolved.model_copy(update={"spec": sent})})
    FolderRecordStore(jobs).create(record)
    write_checkpoint(lambda name, body: put_file(jobs / JOB_ID / name, body), 40)
    monkeypatch.chdir(here)
    code, document, said = run("move_job", JOB_ID, "--to", "local", "--folder", "moved", "--yes")
    assert code == 0, (document, said)
    launched = load_job(Path(commands[-1][1]))
    assert (launched.data.train[0].path, launched.data.tokenizer) == (
        str(first / "train.jsonl"),
        str(first / "tokenizer.json"),
    )
    assert f"checkpoint.destination={here / 'moved'}" in commands[-1]


def put_file(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def test_a_tenant_comes_and_goes_by_the_same_verbs(
    tenant: TenantContract, run: Any, commands: list[list[str]], environment_path: Path
) -> None:
    run("onboard", "--tenant", "vision", "--like", "acme", "--yes")
    assert [command[:2] for command in commands] == [
        ["tenant", "add"],
        ["deploy", str(environment_path)],
        commands[2][:2],
    ]
    assert commands[2][0] == "doctor" and "--dry-run" not in commands[0]
    commands.clear()
    refused = run("offboard", "--tenant", "acme", "--yes")
    assert (refused[0], commands) == (2, []) and "its data would be kept" in refused[2]
    refused = run("onboard", "--tenant", "acme", "--monthly-usd", "999999", "--queue", "x=ml.p5.48xlarge:9", "--yes")
    assert (refused[0], commands) == (2, []) and "--monthly-usd, --queue: tenant acme is in" in refused[2]
    entry = yaml.safe_load(environment_path.read_text())["tenants"]["acme"]
    same = ("--monthly-usd", str(entry["budget"]["monthly_usd"]), "--notify", *entry["budget"]["notify"])
    for name, queue in entry["queues"].items():  # as people may write it
        types = ",".join(reversed(queue["instance_types"]))
        same = (*same, "--queue", f"{name}={types}:0{queue['max_instances']}")
    refused = run("onboard", "--tenant", "acme", "--queue", "gpu", "--yes")
    assert (refused[0], commands) == (2, []) and "--queue gpu: must look like NAME=TYPE[,TYPE]:MAX" in refused[2]
    assert run("onboard", "--tenant", "acme", *same, "--yes")[0] == 0, "the same command goes on"
    assert [command[0] for command in commands] == ["deploy", "doctor"]
    commands.clear()
    text = environment_path.read_text().replace("  acme:", "  acme:\n    removal: {data: shred}")
    environment_path.write_text(text)
    _, document, _ = run("offboard", "--tenant", "acme", "--yes")
    assert "shred" in document["findings"][0]["words"]
    assert [command[4:] for command in commands] == [[], ["--confirm", "acme"]]


def test_a_drill_fetches_each_newest_checkpoint_and_leaves_nothing(
    tenant: TenantContract, run: Any, evidence: Path, deployed: Account
) -> None:
    code, document, _ = run("disaster_drill", "--tenant", "acme", "--yes")
    assert (code, document["steps"][0]["made"]) == (0, True) and "whole, in" in document["steps"][0]["answer"]
    assert not list(evidence.rglob("rank-0.bin"))
    s3 = deployed.client("s3")
    s3.put_bucket_versioning(Bucket="acme-data", VersioningConfiguration={"Status": "Suspended"})
    s3.delete_object(Bucket="acme-checkpoints", Key="x/checkpoints/step-00000040/COMMITTED")
    code, document, _ = run("disaster_drill", "--tenant", "acme", "--yes")
    faults = [one["words"] for one in document["findings"] if one["kind"] == "fault"]
    assert code == 1 and "data bucket: versions Suspended" in faults[0] and "could not come back" in faults[1]
    own = {"job_id": f"{JOB_ID[:-4]}ffff", "checkpoint_destination": "s3://acme-checkpoints/y"}
    S3RecordStore(s3, tenant.buckets.data).create(record_of().model_copy(update=own))
    _, document, _ = run("disaster_drill", "--tenant", "acme", "--jobs", "1")
    told = {one["kind"]: one["words"] for one in document["findings"] if "job " in one["words"]}
    assert list(told) == ["unknown"] and "has saved nothing yet" in told["unknown"]


def test_a_drill_asks_who_runs_a_job_only_of_one_without_a_checkpoint_and_writes_nothing_down(
    tenant: TenantContract, run: Any, calls: list[str], deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3RecordStore(deployed.client("s3"), tenant.buckets.data)
    names = [f"acme-tiny-2099013112000{number}-1a2b" for number in range(4)]
    for name in names:
        store.create(
            record_of().model_copy(update={"job_id": name, "checkpoint_destination": f"s3://acme-data/{name}"})
        )
    trains, waits, silent, unknown = names
    asked: list[str] = []

    def observe(_: Any, record: JobRecord) -> Observation | None:
        asked.append(record.job_id)
        if record.job_id == silent:
            raise AwayError("cluster c1 gives no answer")
        states = {trains: Observation("Training"), waits: Observation("Pending")}
        return states.get(record.job_id)

    monkeypatch.setattr(ByRecord, "observe", observe)
    calls.clear()
    _, document, _ = run("disaster_drill", "--tenant", "acme", "--jobs", "5")
    assert sorted(asked) == names and not [one for one in calls if not one.startswith(READS)]
    told = {one["words"].split(": ")[0]: one for one in document["findings"]}
    kinds = {name: told[f"job {name}"]["kind"] for name in (*names, JOB_ID)}
    assert kinds == {trains: "fault", waits: "unknown", silent: "unknown", unknown: "unknown", JOB_ID: "clear"}
    assert "is Training, has trained" in told[f"job {trains}"]["words"]
    assert "cluster c1 gives no answer" in told[f"job {silent}"]["words"]
    assert not any("has no job" in one["words"] for one in document["findings"])
    _, document, _ = run("disaster_drill", "--tenant", "acme", "--jobs", "2")
    assert not any("has no job" in one["words"] for one in document["findings"]), "they merely haven't saved yet"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [(["told to stop before the first step"], "unknown"), (["step=1 loss=2.5"], "fault"), ([], "fault")],
)
def test_a_job_that_ended_before_its_first_step_is_no_lost_one(
    tenant: TenantContract, run: Any, deployed: Account, monkeypatch: pytest.MonkeyPatch, lines: list[str], kind: str
) -> None:
    """Two jobs that were stopped as they started "could not come back"."""
    name = "acme-tiny-20990131120000-1a2b"
    record = record_of().model_copy(update={"job_id": name, "checkpoint_destination": "s3://acme-data/none"})
    ended = record.with_state("Training", at="2099-01-31T12:00:00+00:00").with_state("Stopped")
    S3RecordStore(deployed.client("s3"), tenant.buckets.data).create(ended)
    monkeypatch.setattr(ByRecord, "read_logs", lambda *_: [LogLine("algo-1", text, 1) for text in lines])
    _, document, _ = run("disaster_drill", "--tenant", "acme", "--jobs", "1")
    told = [one["kind"] for one in document["findings"] if name in one["words"]]
    assert told == [kind]


def test_a_reader_that_ends_early_gets_no_traceback(evidence: Path, environment_path: Path) -> None:
    words = [sys.executable, "-m", "trainyard.operate.runbooks", "fsx_full_or_slow", "--warm-up"]
    words += [str(environment_path.parent), "-e", str(environment_path), "--evidence", str(evidence)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    said = child.stderr.read()
    assert child.wait() in (0, 1) and "Traceback" not in said and "Error" not in said, said


def test_a_bucket_that_is_open_or_keeps_no_versions_fails_the_audit(
    tenant: TenantContract, run: Any, deployed: Account, doctor: None
) -> None:
    _, document, _ = run("audit_tenant", "--tenant", "acme", "--skip-isolation")
    told = {one["words"].partition(":")[0]: one for one in document["findings"]}
    assert "BlockPublicAcls" in told["bucket acme-data"]["words"] and told["bucket acme-data"]["kind"] == "fault"
    s3 = deployed.client("s3")
    closed = dict.fromkeys(("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True)
    s3.put_public_access_block(Bucket="acme-data", PublicAccessBlockConfiguration=closed)
    # Without a key it is S3's own, and another tenant's is none of this one's either.
    for own, kind in ((None, "fault"), (tenant.keys.logs, "fault"), (tenant.keys.data, "clear")):
        default = {"SSEAlgorithm": "aws:kms"} | ({"KMSMasterKeyID": own} if own else {})
        rules = [{"ApplyServerSideEncryptionByDefault": default}]
        s3.put_bucket_encryption(Bucket="acme-data", ServerSideEncryptionConfiguration={"Rules": rules})
        _, document, _ = run("audit_tenant", "--tenant", "acme", "--skip-isolation")
        told = {one["words"].partition(":")[0]: one for one in document["findings"]}
        assert told["bucket acme-data"]["kind"] == kind, own
        assert (f"but by {own or 'aws:kms'}" in told["bucket acme-data"]["words"]) == (kind == "fault")


def test_the_calls_that_an_audit_prints_mend_what_it_found(
    tenant: TenantContract, run: Any, deployed: Account, doctor: None
) -> None:
    """By a program that reads them as the AWS CLI does: each option's value is text, or JSON."""
    s3 = deployed.client("s3")
    for bucket in tenant.buckets.model_dump().values():
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    _, document, _ = run("audit_tenant", "--tenant", "acme", "--skip-isolation")
    faults = [one for one in document["findings"] if one["kind"] == "fault"]
    assert len(faults) == 3 and all(len(one["then"]) == 3 for one in faults)
    for line in (line for one in faults for line in one["then"]):
        program, service, operation, *options = shlex.split(line)
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert (program, service, given.pop("--region")) == ("aws", "s3api", "us-east-1")
        words = {"".join(part.title() for part in name[2:].split("-")): value for name, value in given.items()}
        asked = {name: json.loads(value) if value.startswith("{") else value for name, value in words.items()}
        getattr(s3, operation.replace("-", "_"))(**asked)
    _, document, _ = run("audit_tenant", "--tenant", "acme", "--skip-isolation")
    assert {one["kind"] for one in document["findings"] if one["words"].startswith("bucket ")} == {"clear"}
    rule = s3.get_bucket_encryption(Bucket="acme-data")["ServerSideEncryptionConfiguration"]["Rules"][0]
    assert rule["BucketKeyEnabled"] is True, "as the stacks have it: without, each object costs a call of KMS"


def test_what_an_audit_found_is_told_also_where_its_proof_fails(
    tenant: TenantContract, run: Any, doctor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof and the doctor end with 1 and no error: what they found is on stdout."""
    failing = (sys.executable, "-c", "print('NOT PROVEN'); print('acme reads globex'); raise SystemExit(1)")
    monkeypatch.setattr(framework, "trainyard_command", lambda *_: failing)
    code, document, said = run("audit_tenant", "--tenant", "acme")
    assert code == 1 and [step["made"] for step in document["steps"]] == [False]
    assert document["steps"][0]["answer"] == "NOT PROVEN\nacme reads globex" and document["findings"]
    assert "a check failed, exit code 1" in said.splitlines()[-1]
    report = framework.Report("audit_tenant", "acme", Path("x"), steps=document["steps"], error=JobFailedError("no"))
    assert report.lines()[0].startswith("failed: trainyard isolation") and "  acme reads globex" in report.lines()
    assert not any("--yes" in line for line in report.lines())


def test_a_worse_image_is_rolled_back_whatever_the_reason(
    tenant: TenantContract,
    run: Any,
    deployed: Account,
    monkeypatch: pytest.MonkeyPatch,
    digests: list[str],
    canary_job: str,
) -> None:
    ssm, base = deployed.client("ssm"), REPOSITORY
    during: list[str] = []
    ending = ""

    def run_job(_: Path, __: Any, ___: Path, name: str, *____: Any) -> canaries.Ran:
        """The canary's jobs, which a moto account runs without a trainer: their figures are given."""
        used = ssm.get_parameter(Name="/trainyard/test/image")["Parameter"]["Value"]
        if name == "baseline":
            assert used == base + digests[0], "the baseline ran with the old one"
            return canaries.Ran("old", "Completed", "", rows_of(40))
        during.append(used)
        if ending == "unlaunched":
            raise JobFailedError("the candidate was not launched")
        if ending == "interrupted":
            raise KeyboardInterrupt
        rows = rows_of(40, seconds=1.3 if ending == "slower" else 1.0, loss=2.2 if ending == "worse" else 2.0)
        state = "Failed" if ending == "failed" else "Completed"
        record = record_of().model_copy(update={"image": used})
        return canaries.Ran("new", state, "rank 0 failed" if ending == "failed" else "", rows, record)

    monkeypatch.setattr(canaries, "run_job", run_job)
    arguments = ("upgrade_image", "--digest", digests[1], "--canary", canary_job, "--yes")
    for ending in ("worse", "slower", "failed", "unlaunched", "interrupted", "kept"):
        if ending == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                run(*arguments)
        else:
            code, document, _ = run(*arguments)
            assert code == (0 if ending == "kept" else 1), document
        assert during.pop() == base + digests[1], "the canary ran with the new one"
        left = ssm.get_parameter(Name="/trainyard/test/image")["Parameter"]["Value"]
        assert left == base + digests[1 if ending == "kept" else 0], ending


def test_a_dry_run_refuses_what_would_be_refused(
    tenant: TenantContract, run: Any, digests: list[str], canary_job: str, tmp_path: Path
) -> None:
    """Calls that are printed are calls that can be made; and a job is not stopped for one that can't."""
    for digest, job, code, words in (
        ("nonsense", canary_job, 2, "must be sha256:<64 hex digits>"),
        (f"sha256:{'cd' * 32}", canary_job, 3, "has none; publish it first"),
        (digests[1], str(tmp_path / "none.yaml"), 2, "none.yaml"),
        (digests[1], "jobs/tiny.yaml", 2, "jobs of this machine run in no image"),
    ):
        for more in ((), ("--yes",)):
            refused = run("upgrade_image", "--digest", digest, "--canary", job, *more)
            assert (refused[0], refused[1]) == (code, {}) and words in refused[2]
    unknown = f"{JOB_ID[:-4]}ffff"
    assert run("upgrade_image", "--digest", digests[1], "--canary", canary_job, "--baseline", unknown)[0] == 2
    for name, *options in (
        ("disaster_drill", "--tenant", "acme", "--jobs"),
        ("spot_storm", "--tenant", "acme", "--reclaims"),
        ("restore_at_another_size", JOB_ID, "--instances"),
        ("restore_at_another_size", JOB_ID, "--processes"),
    ):
        for number in ("0", "-1", "two"):
            code, _, said = run(name, *options[:-1], f"{options[-1]}={number}")
            assert code == 2 and f"argument {options[-1]}: {number!r}: must be a whole number from 1 on" in said


def test_a_job_does_not_move_to_a_slurm_that_is_not_here(
    tenant: TenantContract, run: Any, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would be stopped, copied, and launched nowhere."""
    monkeypatch.setenv("PATH", str(tmp_path))
    move = ("move_job", JOB_ID, "--to", "slurm", "--folder", "/fsx/moved", *files_here(tmp_path), "--yes")
    code, _, said = run(*move)
    assert (code, commands) == (2, []) and "no `sbatch` is on the PATH here" in said
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert run(*move)[0] == 0 and commands[-1][0] == "launch"


def test_what_a_look_answers_is_shown_whole(tmp_path: Path) -> None:
    """A plan of what a tenant costs, or of what its removal deletes, is what the dry run is asked for."""

    def told(_: Sequence[str]) -> str:
        return "2 stacks\n  fsx: 17 USD\nnot written (--dry-run)"

    report = framework.Report("onboard", "vision", tmp_path)
    look = framework.command("tenant", "add", changes=False, run=told)
    framework.perform(report, [look, framework.command("deploy", run=told)], dry_run=True, say=lambda _: None)
    lines = report.lines()
    assert lines[:4] == ["made: trainyard tenant add", "  2 stacks", "    fsx: 17 USD", "  not written (--dry-run)"]
    assert lines[4] == "would run: trainyard deploy"
    assert framework.command("deploy", run=told).make() == "not written (--dry-run)"


def test_a_step_that_fails_ends_the_runbook_and_later_ones_are_not_made(
    tenant: TenantContract, run: Any, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, evidence: Path
) -> None:
    def refuse(argv: Sequence[str]) -> str:
        commands.append(list(argv))
        raise AwsRefusedError("stopping: AWS refused")

    monkeypatch.setattr(framework, "_run", refuse)
    code, document, said = run("restore_at_another_size", JOB_ID, "--instances", "1", "--yes")
    assert (code, len(commands)) == (1, 1) and said.splitlines()[-1] == "trainyard: stopping: AWS refused"
    kept = json.loads((evidence / "report.json").read_text())
    assert [step["made"] for step in kept["steps"]] == [False] and "AWS refused" in kept["error"]
    assert document == kept, "what was begun is told"


@pytest.mark.parametrize(("failing", "code"), [("--confirm", 1), ("remove", 3)])
def test_a_removal_that_is_refused_half_way_does_not_end_as_if_nothing_was_changed(
    tenant: TenantContract,
    failing: str,
    code: int,
    evidence: Path,
    environment_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 3 says that no step was begun: one that only looks is none."""

    def refuse(argv: Sequence[str]) -> str:
        if failing in argv:
            raise AwsRefusedError("s3://acme-data: versions can't be deleted; repeat the command")
        return "the plan"

    monkeypatch.setattr(framework, "_run", refuse)
    arguments = ["--tenant", "acme", "--keep-data", "-e", str(environment_path), "--evidence", str(evidence), "--yes"]
    assert main(["offboard", *arguments]) == code
    said = capsys.readouterr()
    assert "versions can't be deleted" in said.err and "nothing was changed" not in said.out
    assert "failed: trainyard tenant remove" in said.out and ("--confirm acme" in said.out) == (code == 1)


def test_paths_are_those_of_the_caller_wherever_the_steps_run(
    tenant: TenantContract,
    commands: list[list[str]],
    tmp_path: Path,
    environment_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They run in the checkout's folder: another file of that name may lie there, or none."""
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    (away / "mine.yaml").write_text(environment_path.read_text())
    where = ["-e", "./mine.yaml", "--evidence", "seen", "--yes"]
    for words in (
        ["offboard", "--tenant", "acme", "--keep-data"],
        ["onboard", "--tenant", "vision", "--like", "acme"],
        ["spot_storm", "--tenant", "acme"],
        ["restore_at_another_size", JOB_ID, "--instances", "1"],
        ["move_job", JOB_ID, "--to", "local", "--folder", "moved", *files_here(tmp_path)],
    ):
        commands.clear()
        main([*words, *where])
        told = [word for command in commands for word in command]
        assert told and "./mine.yaml" not in told and "mine.yaml" not in told, words
        named = [word for word in told if "mine.yaml" in word or word.endswith("job.yaml")]
        assert named and all(Path(word).is_absolute() and Path(word).is_file() for word in named), words
        assert f"evidence: {away}/seen" in capsys.readouterr().out
    for words in (["disaster_drill", "--tenant", "acme"],):
        main([*words, *where])
        (call,) = [line for line in capsys.readouterr().out.splitlines() if "checkpoints copy" in line]
        assert f" --environment {away}/mine.yaml" in call and f" {away}/seen/fetched/" in call


def test_a_steps_command_looks_into_the_callers_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINYARD_STATE_DIR", "state")
    seen = framework._run([sys.executable, "-c", "import os; print(os.environ['TRAINYARD_STATE_DIR'], os.getcwd())"])
    assert seen == f"{tmp_path}/state {framework.checkout_root()}"
    assert framework.evidence_folder("any", None).parent == tmp_path / "state" / "runbooks"


def test_a_commands_own_error_and_exit_code_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = framework.command("prices", "--help", changes=False)
    assert good.words == "trainyard prices --help" and good.make().count("\n") > 5
    with pytest.raises(InputError, match="nonsense"):
        framework.command("nonsense").make()
    monkeypatch.setenv("TRAINYARD_STATE_DIR", str(tmp_path))
    with pytest.raises(AwsRefusedError, match="no emulator is running"):
        framework.command("cost").make()


def test_what_is_refused_after_a_change_is_no_wrong_input_and_the_change_is_told(
    tenant: TenantContract,
    evidence: Path,
    environment_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse_resumes(argv: Sequence[str]) -> str:
        if "resume" in argv:
            raise InputError("compute.spot: the tenant has no other")
        return "stopped"

    monkeypatch.setattr(framework, "_run", refuse_resumes)
    storm = ["spot_storm", "--tenant", "acme", "-e", str(environment_path), "--evidence", str(evidence), "--yes"]
    assert main(storm) == 1
    said = capsys.readouterr()
    assert f"made: trainyard stop {JOB_ID}" in said.out and f"failed: trainyard resume {JOB_ID}" in said.out
    assert "nothing was changed" not in said.out and said.err.endswith("the tenant has no other\n")
    assert main([*storm, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [step["made"] for step in document["steps"]] == [True, False] and document["exit_code"] == 1
    assert document == json.loads((evidence / "report.json").read_text()) and "has no other" in document["error"]


def test_a_folder_that_takes_no_evidence_is_found_before_anything_is_changed(
    tenant: TenantContract, run: Any, calls: list[str], evidence: Path, deployed: Account
) -> None:
    evidence.symlink_to("/sys")  # for root there is no folder without the right to write, but the kernel's
    calls.clear()
    code, _, said = run("rotate_keys", "--tenant", "acme", "--yes")
    assert (code, calls) == (2, []) and f"--evidence {evidence}: takes no file" in said
    evidence.unlink()
    (evidence / "steps.json").mkdir(parents=True)  # what can't be known before
    code, document, said = run("rotate_keys", "--tenant", "acme", "--yes")
    assert code == 1 and "steps.json can't be written" in said
    assert document["steps"] and all(step["made"] for step in document["steps"]), "what was done is told"


def test_no_second_factor_is_spent_where_the_credentials_cannot_be_kept(
    tenant: TenantContract, run: Any, calls: list[str], evidence: Path
) -> None:
    path = evidence / "operator.sh"
    path.mkdir(parents=True)
    asked = ("break_glass", "open", "--tenant", "acme", "--reason", "mend job x", "--yes")
    before = ["AssumeRole"]  # the launcher's, who reads the contract
    calls.clear()
    code, _, said = run(*asked)
    assert code == 2 and "operator.sh can't be written (Is a directory)" in said
    assert [one for one in calls if one == "AssumeRole"] == before
    path.rmdir()
    path.write_text("x" * 5000)
    path.chmod(0o644)
    assert run(*asked)[0] == 0
    assert path.stat().st_mode & 0o777 == 0o600 and "x" * 100 not in path.read_text(), "nothing is left of an old one"


def test_evidence_that_cannot_be_kept_is_wrong_input(run: Any, evidence: Path) -> None:
    evidence.write_text("a file")
    code, _, said = run("fsx_full_or_slow", "--warm-up", str(evidence.parent))
    assert code == 2 and f"--evidence {evidence}: can't be made (File exists)" in said
    evidence.unlink()
    (evidence / "steps.json").mkdir(parents=True)  # for root there is no folder without the right to write
    code, _, said = run("fsx_full_or_slow", "--warm-up", str(evidence.parent))
    assert code == 2 and f"--evidence {evidence}: steps.json can't be written (Is a directory)" in said
    (evidence / "report.json").unlink()  # which says what went wrong
    (evidence / "report.json").mkdir()
    code, _, said = run("fsx_full_or_slow", "--warm-up", str(evidence.parent))
    assert code == 2 and said.count("trainyard: ") == 1, "the first that was not kept is told, and no traceback"


def test_what_could_not_be_looked_at_is_no_good_news(run: Any, tmp_path: Path) -> None:
    """A runbook that saw nothing must not end as one that found nothing."""
    code, _, said = run("fsx_full_or_slow", "--tenant", "initech")
    assert code == 2 and "tenant 'initech' is not in environment test" in said
    (tmp_path / "lines").write_text("all is well\n")
    for also in (("--log", str(tmp_path / "lines")), ("--warm-up", str(tmp_path))):
        assert run("fsx_full_or_slow", *also, "--tenant", "initech")[0] == 2, "whatever else could be looked at"
    (tmp_path / "empty").write_text("\n")
    code, _, said = run("job_hung", "--log", str(tmp_path / "empty"))
    assert code == 2 and f"--log {tmp_path}/empty: holds no line" in said


def test_a_bad_node_of_a_running_job_is_left_by_stop_and_resume(
    tenant: TenantContract, run: Any, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderRecordStore(tmp_path / "jobs")
    record = record_of().model_copy(
        update={"backend": "local", "checkpoint_destination": str(tmp_path / "jobs" / JOB_ID)}
    )
    store.create(record)
    place = Place(store, ByRecord({"local": LocalBackend(tmp_path / "jobs")}))
    monkeypatch.setattr(runbook.Context, "place", lambda *_: place)
    log = tmp_path / "dmesg.txt"
    log.write_text("NVRM: Xid (PCI:0000:44:00): 79, pid=1, name=x, GPU has fallen off the bus.\n")
    code, document, _ = run("bad_node", JOB_ID, "--log", str(log))
    assert (code, commands) == (1, []) and words_of(document) == [f"trainyard resume {JOB_ID}"]
    run("bad_node", JOB_ID, "--log", str(log), "--yes")
    assert commands == [["resume", JOB_ID]]
    for state, verbs in {
        "Failed": ["resume"],
        "Downloading": ["stop", "resume"],
        "Training": ["stop", "resume"],
    }.items():
        commands.clear()
        current = watch.Status(record, Observation(state))
        monkeypatch.setattr(watch, "status", lambda *_, current=current: current)
        run("bad_node", JOB_ID, "--log", str(log), "--yes")
        assert [words[0] for words in commands] == verbs, state
    commands.clear()
    log.write_text("all is well\n")
    assert run("bad_node", JOB_ID, "--log", str(log), "--yes")[0] == 0 and commands == []


def test_the_file_systems_own_figures_decide(tenant: TenantContract, run: Any, deployed: Account) -> None:
    made = deployed.client("fsx").create_file_system(
        FileSystemType="LUSTRE",
        StorageCapacity=1200,
        SubnetIds=["subnet-0123456789abcdef0"],
        LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
    )["FileSystem"]["FileSystemId"]
    system = tenant.file_system.model_copy(update={"id": made})
    text = tenant.model_copy(update={"file_system": system}).model_dump_json()
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/acme/contract", Value=text, Type="String", Overwrite=True
    )

    def publish(metric: str, value: float, minutes_ago: float) -> None:
        data = {"MetricName": metric, "Value": value, "Unit": "Bytes"}
        data["Timestamp"] = datetime.now(UTC) - timedelta(minutes=minutes_ago)
        dimensions = [{"Name": "FileSystemId", "Value": made}]
        deployed.client("cloudwatch").put_metric_data(
            Namespace="AWS/FSx", MetricData=[data | {"Dimensions": dimensions}]
        )

    capacity, most_in_five_minutes = 1200 * 2**30, 300 * 125 * 1200 / 1024 * 1e6
    _, document, _ = run("fsx_full_or_slow", "--tenant", "acme")
    assert document["findings"][0]["kind"] == "unknown", "no figure is no good news"
    publish("FreeDataStorageCapacity", 0.5 * capacity, 6)
    # One of several storage targets has told of the newest minute so far: their sum is not the file system's.
    publish("FreeDataStorageCapacity", 0.01 * capacity, 0)
    publish("DataReadBytes", 0.5 * most_in_five_minutes, 6)
    publish("DataWriteBytes", 0.2 * most_in_five_minutes, 6)
    code, document, _ = run("fsx_full_or_slow", "--tenant", "acme")
    assert (code, [one["kind"] for one in document["findings"]]) == (0, ["clear", "clear"]), document
    assert [one["then"] for one in document["findings"]] == [[], []], "where nothing is wrong nothing is to be done"

    publish("DataWriteBytes", 0.25 * most_in_five_minutes, 6)
    publish("DataReadBytes", 0.01 * most_in_five_minutes, 0)
    code, document, _ = run("fsx_full_or_slow", "--tenant", "acme")
    assert (code, document["findings"][1]["kind"]) == (1, "fault"), document
    publish("FreeDataStorageCapacity", 0.05 * capacity, 5)
    code, document, _ = run("fsx_full_or_slow", "--tenant", "acme")
    assert (code, document["findings"][0]["kind"]) == (1, "fault")
    then = document["findings"][0]["then"]
    assert [words.split()[1] for words in then[:2]] == ["df", "find"], "which target, and what to remove"
    assert shlex.split(then[2], comments=True)[:3] == ["trainyard", "tenant", "show"] and " acme " in then[2]


def test_full_and_busy_file_systems_are_told_apart() -> None:
    gib = 2**30

    def kinds(free: float | None, moved: float | None) -> list[str]:
        found = fsx_full_or_slow._judged("fs-1", 1200.0, 125.0, free, moved, "trainyard tenant show test acme")
        return [one.kind for one in found]

    assert kinds(0.09 * 1200 * gib, None) == ["fault"] and kinds(0.5 * 1200 * gib, None) == ["clear"]
    provisioned = 125 * 1200 / 1024 * 1e6
    assert kinds(None, 0.95 * provisioned * 300) == ["unknown", "fault"]
    assert kinds(0.5 * 1200 * gib, 0.6 * provisioned * 300) == ["clear", "clear"]


def test_a_warm_up_reads_every_byte_and_says_how_far_it_is(tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "set"
    (folder / "part").mkdir(parents=True)
    for number in range(5):
        (folder / "part" / f"{number}.bin").write_bytes(b"x" * 1000)
    said: list[str] = []
    seconds = iter(range(0, 1000, 10))
    warm_up = fsx_full_or_slow.WarmUp(folder, said.append, clock=lambda: float(next(seconds)))
    assert warm_up.run().startswith("5 files, 0.00 GiB") and warm_up.done_bytes == warm_up.total_bytes == 5000
    assert len(said) == 5 and "100% of" in said[-1] and "0 s left" in said[-1]
    _, document, _ = run("fsx_full_or_slow", "--warm-up", str(folder))
    assert [step["made"] for step in document["steps"]] == [False]
    _, document, _ = run("fsx_full_or_slow", "--warm-up", str(folder), "--yes")
    assert document["steps"][0]["answer"].startswith("5 files")
    assert run("fsx_full_or_slow", "--warm-up", str(folder / "none"))[0] == 2
