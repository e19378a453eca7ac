"""What tenants share: the audit trail sees every object and key, and nobody can quietly rewrite it."""

import json
from typing import Any

import pytest


def only(resources: dict[str, Any], kind: str, part: str = "") -> dict[str, Any]:
    (found,) = [item for name, item in resources.items() if item["Type"] == f"AWS::{kind}" and part in name]
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def platform(templates: dict[str, Any]) -> dict[str, Any]:
    resources: dict[str, Any] = templates["production"]["trainyard-production-platform"]["Resources"]
    return resources


def test_the_trail_logs_every_object_but_its_own_and_every_call_in_every_region(platform: dict[str, Any]) -> None:
    trail = only(platform, "CloudTrail::Trail")["Properties"]
    selectors = {item["Name"]: item["FieldSelectors"] for item in trail["AdvancedEventSelectors"]}
    objects = {item["Field"]: item for item in selectors["Objects"]}
    assert objects["resources.type"]["Equals"] == ["AWS::S3::Object"]
    log = next(
        name for name, item in platform.items() if name.startswith("AuditLog") and item["Type"].endswith("Bucket")
    )
    (prefix,) = objects["resources.ARN"]["NotStartsWith"]
    assert prefix["Fn::Join"][1] == [{"Fn::GetAtt": [log, "Arn"]}, "/"]
    assert len(objects) == 3, "no tenant is named: one that comes later is seen too"
    submissions = {item["Field"]: item for item in selectors["Submissions"]}
    assert submissions["resources.type"]["Equals"] == ["AWS::Lambda::Function"]
    (brokers,) = submissions["resources.ARN"]["StartsWith"]
    assert brokers.endswith(":function:trainyard-production-"), "every tenant's broker, by its name"
    assert selectors["ApiCalls"] == [{"Field": "eventCategory", "Equals": ["Management"]}]
    assert trail["IsMultiRegionTrail"] and trail["EnableLogFileValidation"] and trail["IncludeGlobalServiceEvents"]


def test_log_files_are_locked_where_data_is_kept_and_can_be_destroyed_elsewhere(templates: dict[str, Any]) -> None:
    for name, locked in (("production", True), ("local", False)):
        resources = templates[name][f"trainyard-{name}-platform"]["Resources"]
        bucket = only(resources, "S3::Bucket")
        lock = bucket["Properties"].get("ObjectLockConfiguration", {}).get("Rule")
        expected = {"DefaultRetention": {"Days": 400, "Mode": "GOVERNANCE"}}
        assert lock == (expected if locked else None)
        # CloudTrail writes into it as it is made: a creation that fails could not delete it, nor then the stack.
        for kept in (bucket, only(resources, "KMS::Key")):
            assert kept["DeletionPolicy"] == ("Retain" if locked else "Delete")
        (rule,) = bucket["Properties"]["LifecycleConfiguration"]["Rules"]
        assert rule["ExpirationInDays"] == 400, "not before the lock ends, or the lifecycle would never finish"


def test_only_this_trail_writes_the_log(platform: dict[str, Any]) -> None:
    arn = "arn:aws:cloudtrail:us-east-1:777788889999:trail/trainyard-production"
    bucket = only(platform, "S3::BucketPolicy")["Properties"]["PolicyDocument"]["Statement"]
    key = only(platform, "KMS::Key")["Properties"]["KeyPolicy"]["Statement"]
    statements = [*bucket, *key]
    services = [item for item in statements if "Service" in item["Principal"]]
    assert {item["Principal"]["Service"] for item in services} == {"cloudtrail.amazonaws.com"}
    assert all(item["Condition"] == {"StringEquals": {"aws:SourceArn": arn}} for item in services)
    assert len(services) == 3


def test_an_organization_with_a_trail_of_its_own_gets_no_second_one(
    synthesize: Any, environments: dict[str, Any]
) -> None:
    content = environments["local"].model_dump(mode="json")
    content["tenants"] = {"acme": content["tenants"]["acme"]}
    made = synthesize(type(environments["local"]).model_validate({**content, "audit": {"trail": False}}))
    kinds = {item["Type"] for item in made["trainyard-local-platform"]["Resources"].values()}
    queues = {f"AWS::Batch::{kind}" for kind in ("JobQueue", "SchedulingPolicy", "ServiceEnvironment")}
    assert kinds == {"AWS::ECR::Repository", "AWS::IAM::Role", "AWS::SSM::Parameter", *queues}


def test_unusual_spending_is_watched_only_where_it_is_asked_for(templates: dict[str, Any]) -> None:
    """A member account can't have the monitor: nobody's first deployment may fail on it."""
    kinds = {
        item["Type"]
        for stacks in templates.values()
        for stack in stacks.values()
        for item in stack["Resources"].values()
    }
    assert not {kind for kind in kinds if kind.startswith("AWS::CE::")}


def test_unusual_spending_of_a_tenant_is_mailed(synthesize: Any, environments: dict[str, Any]) -> None:
    content = environments["local"].model_dump(mode="json")
    content["tenants"] = {"acme": content["tenants"]["acme"]}
    content["tenants"]["acme"]["budget"]["anomaly_usd"] = 12_345_678.5
    made = synthesize(type(environments["local"]).model_validate(content))
    resources = made["trainyard-local-acme-training"]["Resources"]
    monitor = only(resources, "CE::AnomalyMonitor")["Properties"]
    tagged = json.loads(monitor["MonitorSpecification"])["Tags"]
    assert (tagged["Key"], tagged["Values"]) == ("trainyard:tenant", ["acme"])
    mail = only(resources, "CE::AnomalySubscription")["Properties"]
    assert mail["Subscribers"] == [{"Type": "EMAIL", "Address": "acme-leads@example.com"}]
    assert json.loads(mail["ThresholdExpression"])["Dimensions"]["Values"] == ["12345678.5"], "no exponent"


@pytest.mark.parametrize("environment", ["local", "dev", "staging", "production"])
def test_no_stack_comes_near_what_cloudformation_takes(environment: str, templates: dict[str, Any]) -> None:
    """500 resources; 50 are left for what comes."""
    assert max(len(template["Resources"]) for template in templates[environment].values()) < 450
