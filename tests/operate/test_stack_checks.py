"""The report of all checks: what is accepted is accepted by name, and a tool that isn't there is said to be missing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainyard.children import start
from trainyard.isolation import templates
from trainyard.isolation.templates import synthesize
from trainyard.operate import stack_checks
from trainyard.operate.deploy import prepare
from trainyard.operate.stack_checks import (
    ACCEPTED,
    ACCEPTED_AT,
    NotRunError,
    checkov,
    install_checkov,
    lint,
    sort_out,
)

BROKEN = {
    "Resources": {
        "Bucket": {"Type": "AWS::S3::Bucket", "Properties": {"AccessControl": "PublicRead"}},
        "Policy": {
            "Type": "AWS::IAM::ManagedPolicy",
            "Properties": {
                "PolicyDocument": {
                    "Version": "2012-10-17",
                    "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
                },
                "Rolls": ["misspelt"],
            },
        },
    }
}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken" / "Broken.template.json"
    path.parent.mkdir()
    path.write_text(json.dumps(BROKEN))
    return path


def test_cfn_lint_refuses_a_broken_template(broken: Path) -> None:
    assert any("Rolls" in finding.text and "Broken" in finding.resource for finding in lint([broken], "us-east-1"))


def _write_keys(folder: Path, **conditions: dict[str, Any]) -> None:
    """A template of keys, by logical id, that anybody may use under those conditions."""
    anybody = {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "kms:Decrypt", "Resource": "*"}
    resources = {
        name: {"Properties": {"KeyPolicy": {"Statement": [{**anybody, "Condition": condition}]}}}
        for name, condition in conditions.items()
    }
    (folder / "trainyard-x-y.template.json").write_text(json.dumps({"Resources": resources}))


HELD: dict[str, Any] = {
    "StringEquals": {"kms:ViaService": "ec2.us-east-1.amazonaws.com", "kms:CallerAccount": "123456789012"},
    "ArnEquals": {"aws:PrincipalArn": ["arn:aws:iam::123456789012:role/aws-service-role/x"]},
}


@pytest.mark.parametrize(
    "condition",
    [
        {},
        {"StringEquals": HELD["StringEquals"]},
        {**HELD, "StringEquals": {"kms:ViaService": "ec2.us-east-1.amazonaws.com"}},
        {**HELD, "StringEquals": {"kms:CallerAccount": "123456789012"}},
        {**HELD, "ArnEquals": {"aws:PrincipalArn": "arn:aws:iam::123456789012:role/*"}},
    ],
)
def test_a_key_for_anybody_is_accepted_only_with_every_condition(condition: dict[str, Any], tmp_path: Path) -> None:
    failed = {"check_id": "CKV_AWS_33", "check_name": "words", "resource": "AWS::KMS::Key.KeysCheckpoints1"}
    failed["file_path"] = "/trainyard-x-y.template.json"
    for held, number in ((condition, 1), (HELD, 0)):
        _write_keys(tmp_path, KeysCheckpoints1=held)
        assert len(sort_out([failed], tmp_path)[0]) == number


def test_what_is_accepted_is_accepted_by_name_and_policies_only_of_boundaries(tmp_path: Path) -> None:
    _write_keys(tmp_path, KeysCheckpoints1=HELD, KeysData1=HELD)

    def failed(check: str, resource: str) -> dict[str, str]:
        return {
            "check_id": check,
            "check_name": "words",
            "resource": resource,
            "file_path": "/trainyard-x-y.template.json",
        }

    found, accepted = sort_out(
        [
            failed("CKV_AWS_18", "AWS::S3::Bucket.Data"),
            failed("CKV_AWS_108", "AWS::IAM::ManagedPolicy.BoundaryPolicy1"),
            failed("CKV_AWS_108", "AWS::IAM::ManagedPolicy.Another"),
            failed("CKV_AWS_20", "AWS::S3::Bucket.Data"),
            failed("CKV_AWS_33", "AWS::KMS::Key.KeysCheckpoints1"),
            failed("CKV_AWS_33", "AWS::KMS::Key.KeysData1"),
        ],
        tmp_path,
    )
    assert [str(item) for item in found] == [
        "CKV_AWS_108 at trainyard-x-y/Another (words)",
        "CKV_AWS_20 at trainyard-x-y/Data (words)",
        "CKV_AWS_33 at trainyard-x-y/KeysData1 (words)",
    ]
    assert accepted == {"CKV_AWS_18": 1, "CKV_AWS_33": 1, "CKV_AWS_108": 1}
    assert all(len(reason) > 30 for reason in [*ACCEPTED.values(), *ACCEPTED_AT.values()])


def test_a_tool_that_is_not_there_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no such index\n")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(NotRunError, match=r"^checkov==[\d.]+ can't be installed: ERROR: no such index$"):
        install_checkov(tmp_path / "checkov")
    with pytest.raises(NotRunError, match="no such index"):
        checkov(tmp_path / "none", tmp_path)


@pytest.mark.parametrize(("line", "status"), [("", 0), ("cfn-lint: NOT RUN: gone", 1)])
def test_a_missing_opinion_fails_the_report(
    line: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stack_checks, "install_checkov", lambda folder: folder / "checkov")
    monkeypatch.setattr(stack_checks, "check", lambda *_: iter([("enforced: nothing", True), (line, not line)]))
    assert stack_checks.main(["environments/dev.yaml"]) == status
    assert line in capsys.readouterr().out


def test_a_deployment_is_checked_and_a_look_at_the_templates_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainyard deploy` prepares what it deploys; the proof of isolation only looks."""
    seen: list[dict[str, str]] = []

    def app(command: list[str], *, env: dict[str, str], **options: Any) -> "subprocess.Popen[str]":
        assert Path(command[1]).name == "app.py"
        seen.append(env)
        return start([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(templates, "start", app)
    checkout = Path(__file__).parents[2]
    environment = checkout / "environments" / "dev.yaml"
    prepare(checkout, environment, tmp_path / "cdk.out")
    synthesize(environment, checkout)
    contexts = [json.loads(env["CDK_CONTEXT_JSON"]) for env in seen]
    assert [context.get("checks") for context in contexts] == [None, "off"]
    assert ["CDK_VALIDATION" in env for env in seen] == [False, True]
    assert all(context["@aws-cdk/core:validateAgainstDefaultRules"] is True for context in contexts)


@pytest.mark.full
def test_checkov_refuses_a_public_bucket_and_a_wildcard(broken: Path, tmp_path: Path) -> None:
    """Installs checkov: needs a package index."""
    program = install_checkov(tmp_path / "checkov")
    found, _ = checkov(program, broken.parent)
    assert {"CKV_AWS_20", "CKV_AWS_108"} <= {finding.rule for finding in found}
