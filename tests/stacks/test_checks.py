"""The checks that every template must pass: our examples do, and a broken template is refused by each mechanism."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RULES = ROOT / "stacks" / "rules"


@pytest.mark.parametrize("environment", ["local", "dev", "staging", "production"])
def test_no_finding_of_the_examples_is_without_a_reason(environment: str, unacknowledged: dict[str, str]) -> None:
    assert unacknowledged[environment] == ""


def broken_resources() -> dict[str, tuple[str, dict[str, Any]]]:
    """What every Guard rule must refuse; by logical id: type and properties."""
    anything = {"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}], "Version": "2012-10-17"}
    door = {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}
    return {
        "Group": ("EC2::SecurityGroup", {"GroupDescription": "open", "SecurityGroupIngress": [door]}),
        "Rule": ("EC2::SecurityGroupIngress", door),
        "Subnet": ("EC2::Subnet", {"VpcId": "vpc-1", "CidrBlock": "10.0.0.0/24", "MapPublicIpOnLaunch": True}),
        "Template": ("EC2::LaunchTemplate", {"LaunchTemplateData": {"MetadataOptions": {"HttpTokens": "optional"}}}),
        "Machine": ("EC2::Instance", {"ImageId": "ami-1"}),
        "Log": ("Logs::LogGroup", {}),
        "Topic": ("SNS::Topic", {}),
        "Key": ("KMS::Key", {"KeyPolicy": anything}),
        "Files": ("FSx::FileSystem", {"FileSystemType": "LUSTRE", "SubnetIds": ["subnet-1"]}),
        "Endpoint": ("EC2::VPCEndpoint", {"VpcId": "vpc-1", "ServiceName": "com.amazonaws.us-east-1.s3"}),
        "Plain": ("S3::BucketPolicy", {"Bucket": "open", "PolicyDocument": anything}),
        "Wide": ("IAM::ManagedPolicy", {"PolicyDocument": anything}),
        "WideRole": (
            "IAM::Role",
            {"AssumeRolePolicyDocument": {}, "Policies": [{"PolicyName": "x", "PolicyDocument": anything}]},
        ),
        "Untagged": ("SNS::Topic", {"Tags": [{"Key": "team", "Value": "x"}]}),
    }


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, environments: dict[str, Any]) -> Path:
    """The assembly of an app that breaks every rule, after `app.synth()` has refused it; with the reports in it."""
    from aws_cdk import App, CfnResource, Stack
    from aws_cdk import aws_iam as iam
    from aws_cdk import aws_s3 as s3

    from stacks.checks import enforce_checks, findings, write_reports
    from stacks.constructs.acknowledged import acknowledge_wildcards
    from stacks.naming import TenantScope

    folder = tmp_path_factory.mktemp("broken")
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    app = App(outdir=str(folder), context=context, analytics_reporting=False, stack_traces=False)
    stack = Stack(app, "Broken", description="network of tenant acme")
    for name, (kind, properties) in broken_resources().items():
        CfnResource(stack, name, type=f"AWS::{kind}", properties=properties)
    s3.CfnBucket(stack, "Public", access_control="PublicRead")
    # A public bucket beside no policy at all: that one is a rule of its own.
    s3.CfnBucket(Stack(app, "Bare"), "Bucket")
    role = iam.Role(stack, "Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
    explained = iam.PolicyStatement(sid="WriteMetrics", actions=["cloudwatch:PutMetricData"], resources=["*"])
    surprise = iam.PolicyStatement(sid="Surprise", actions=["s3:GetObject"], resources=["*"])
    own = iam.PolicyStatement(sid="Own", actions=["s3:GetObject"], resources=["arn:aws:s3:::x/trainyard/local/acme/*"])
    tenant = TenantScope(environments["local"], "acme")
    for name, statements in (("Explained", [explained, own]), ("Unexplained", [explained, surprise, own])):
        policy = iam.Policy(stack, name, roles=[role], statements=statements)
        acknowledge_wildcards(policy, tenant, {"WriteMetrics": "it has no resource"})
    enforce_checks(app, environments["production"])
    assert all(write_reports(app, folder / "reports").values())
    with pytest.raises(RuntimeError, match="ValidationFailed"):
        app.synth()
    line = findings(folder)
    assert "\n" not in line and "more; mend them" in line
    return folder


def violations(folder: Path, plugin: str) -> dict[str, list[str]]:
    """Rule -> constructs, of one plugin's errors."""
    content = json.loads((folder / "validation-report.json").read_text())
    (report,) = [item for item in content["pluginReports"] if item["pluginName"] == plugin]
    assert report["conclusion"] == "failure"
    found: dict[str, list[str]] = {}
    for violation in report["violations"]:
        places = [str(place.get("constructPath")) for place in violation["violatingConstructs"]]
        found.setdefault(violation["ruleName"], []).extend(places)
    return found


def test_every_guard_rule_refuses_what_it_is_for(broken: Path) -> None:
    ours = {name for file in RULES.glob("*.guard") for name in re.findall(r"^rule (\w+)", file.read_text(), re.M)}
    assert len(ours) >= 20
    found = violations(broken, "CloudFormation Validate")
    assert ours - set(found) == set()
    assert any(re.match(r"E\d", rule) for rule in found), "the CDK's own template rules"


def test_cdk_nag_refuses_a_public_bucket_and_a_wildcard_that_nobody_explained(broken: Path) -> None:
    solutions, nist = violations(broken, "AwsSolutions"), violations(broken, "NIST.800.53.R5")
    assert "Broken/Public" in " ".join(solutions["AwsSolutions-S10"])
    assert "Broken/Public" in " ".join(nist["NIST.800.53.R5-S3BucketPublicReadProhibited"])
    # One statement's reason doesn't cover another's star in the same policy; what is the tenant's own needs none.
    wild = {rule: places for rule, places in solutions.items() if rule.startswith("AwsSolutions-IAM5")}
    assert list(wild) == ["AwsSolutions-IAM5[Resource::*]"]
    assert [place.rpartition("/")[0] for place in wild["AwsSolutions-IAM5[Resource::*]"]] == ["Broken/Unexplained"]


def test_cfn_lint_refuses_it_too(broken: Path) -> None:
    from cfnlint.api import lint
    from cfnlint.config import ManualArgs

    found = lint((broken / "Broken.template.json").read_text(), config=ManualArgs(regions=["us-east-1"]))
    assert [match for match in found if match.rule.id.startswith("E")]


def test_hipaa_and_pci_are_reports_that_stop_nothing(broken: Path) -> None:
    for name in ("hipaa", "pci-dss-3.2.1"):
        report = json.loads((broken / "reports" / f"{name}.json").read_text())
        assert any("Broken/Public" in place for item in report for place in item["resources"])
        assert all(item["rule"] and item["description"] for item in report)
