"""The resumer: which events of the synthesized rule reach it, and where there is none."""

import json
from typing import Any

import pytest
from moto.events.models import EventPattern

TRAINING = "trainyard-local-{}-training"


def rule_of(account: Any, tenant: str) -> dict[str, Any]:
    """The rule for failed jobs; empty where there is none."""
    rules = account.resources(TRAINING.format(tenant), "AWS::Events::Rule").values()
    return next((dict(rule) for rule in rules if "have failed" in rule.get("Description", "")), {})


@pytest.mark.parametrize(
    ("name", "status", "is_called"),
    [
        ("globex-llama-1", "Failed", True),
        ("globex-llama-1-r2", "Failed", True),
        ("globex-llama-1", "Stopped", False),
        ("globex-llama-1", "Completed", False),
        ("acme-llama-1", "Failed", False),
        ("AWSBatch-globex-llama-1", "Failed", False),  # a queue's: Batch retries it
    ],
)
def test_it_hears_of_the_tenants_failed_jobs_and_of_no_others(
    account: Any, name: str, status: str, is_called: bool
) -> None:
    pattern = EventPattern(None, rule_of(account, "globex")["EventPattern"])
    event = {
        "source": "aws.sagemaker",
        "detail-type": "SageMaker Training Job State Change",
        "detail": {"TrainingJobName": name, "TrainingJobStatus": status},
    }
    assert pattern.matches_event(event) is is_called


def test_it_gets_the_jobs_name_and_knows_its_own_tenants_places_alone(account: Any) -> None:
    (target,) = rule_of(account, "globex")["Targets"]
    transformer = target["InputTransformer"]
    ((name, path),) = transformer["InputPathsMap"].items()
    assert path == "$.detail.TrainingJobName"
    assert json.loads(transformer["InputTemplate"].replace(f"<{name}>", '"x"')) == {"job": "x"}
    functions = account.resources(TRAINING.format("globex"), "AWS::Lambda::Function").values()
    (function,) = (item for item in functions if "Resumes" in item["Description"])
    places = json.loads(function["Environment"]["Variables"]["RESUMER"])
    foundation = "trainyard-local-globex-foundation"
    assert places == {
        "data": account.identifier(foundation, account.only(foundation, "AWS::S3::Bucket", "BucketsData")),
        "checkpoints": account.identifier(
            foundation, account.only(foundation, "AWS::S3::Bucket", "BucketsCheckpoints")
        ),
        "broker": "trainyard-local-globex-broker",
    }


def test_who_submits_directly_has_none(account: Any) -> None:
    assert not rule_of(account, "acme")
    policies = account.resources("trainyard-local-acme-foundation", "AWS::IAM::Policy")
    given = [role for policy in policies.values() for role in policy["Roles"]]
    assert given and not [role for role in given if "resumer" in role or "broker" in role], "roles without a right"
