"""The training queues that tenants share: what the platform makes, each tenant's share, and who changes for whom."""

import copy
from typing import Any

import pytest

from trainyard.spec.platform import EnvironmentSpec

PLATFORM = "trainyard-production-platform"


def of(template: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Logical id -> properties."""
    return {name: item.get("Properties", {}) for name, item in template["Resources"].items() if item["Type"] == kind}


def test_the_platform_has_a_queue_for_each_type_with_its_own_machines(
    templates: dict[str, Any], environments: dict[str, Any]
) -> None:
    made, environment = templates["production"][PLATFORM], environments["production"]
    (policy,) = of(made, "AWS::Batch::SchedulingPolicy").values()
    assert policy["QuotaSharePolicy"] == {"IdleResourceAssignmentStrategy": "FIFO"}
    queues = of(made, "AWS::Batch::JobQueue")
    capacities = of(made, "AWS::Batch::ServiceEnvironment")
    found = {}
    for queue in queues.values():
        assert queue["JobQueueType"] == "SAGEMAKER_TRAINING"
        (order,) = queue["ServiceEnvironmentOrder"]
        name, _ = order["ServiceEnvironment"]["Fn::GetAtt"]
        (limit,) = capacities.pop(name)["CapacityLimits"]  # of one queue alone, as Batch wants
        found[queue["JobQueueName"]] = (limit["CapacityUnit"], limit["MaxCapacity"])
    assert capacities == {}
    assert found == {
        f"trainyard-production-{kind.removeprefix('ml.').replace('.', '-')}-0": (kind, count)
        for kind, count in environment.max_instances.items()
    }


def test_a_tenant_has_its_share_of_each_of_its_types(templates: dict[str, Any]) -> None:
    shares = of(templates["production"]["trainyard-production-language-training"], "AWS::Batch::QuotaShare").values()
    told = {
        share["JobQueue"]: (
            share["QuotaShareName"],
            share["CapacityLimits"],
            share["ResourceSharingConfiguration"],
        )
        for share in shares
    }
    queue = "trainyard-production-"
    assert told == {
        f"{queue}p5-48xlarge-0": (
            "language",
            [{"CapacityUnit": "ml.p5.48xlarge", "MaxCapacity": 16}],
            {"Strategy": "LEND"},
        ),
        f"{queue}p5en-48xlarge-0": (
            "language",
            [{"CapacityUnit": "ml.p5en.48xlarge", "MaxCapacity": 16}],
            {"Strategy": "LEND"},
        ),
        f"{queue}p5-4xlarge-0": (
            "language",
            [{"CapacityUnit": "ml.p5.4xlarge", "MaxCapacity": 4}],
            {"BorrowLimit": 100, "Strategy": "LEND_AND_BORROW"},
        ),
    }


def changed(environment: EnvironmentSpec, change: Any) -> EnvironmentSpec:
    content = copy.deepcopy(environment.model_dump(mode="json"))
    change(content)
    return EnvironmentSpec.model_validate(content)


def test_a_tenant_that_comes_changes_neither_another_nor_the_platform(
    synthesize: Any, templates: dict[str, Any], environments: dict[str, Any]
) -> None:
    """And one that goes over to queues changes its own stacks alone: the queues are there already."""

    def change(content: dict[str, Any]) -> None:
        newcomer = copy.deepcopy(content["tenants"]["adapters"])
        content["tenants"]["newcomer"] = {**newcomer, "network_index": 3}
        content["tenants"]["newcomer"]["share"]["guaranteed"] = {"ml.g6e.12xlarge": 1, "ml.p5.4xlarge": 1}
        content["tenants"]["adapters"]["share"]["guaranteed"]["ml.p5.4xlarge"] = 3
        content["tenants"]["perception"] |= {"submission": "broker", "share": {}}

    before, after = templates["production"], synthesize(changed(environments["production"], change))
    differ = {name for name in before if before[name] != after[name]}
    mine = {
        f"trainyard-production-{name}" for name in ("adapters-training", "perception-training", "perception-foundation")
    }
    assert differ == mine
    assert set(after) - set(before) == {f"trainyard-production-newcomer-{part}" for part in ("foundation", "training")}
    assert not of(after["trainyard-production-perception-training"], "AWS::Batch::QuotaShare")


def test_no_import_ties_the_platform_to_a_queue(templates: dict[str, Any]) -> None:
    """A queue that is exported could never go while a tenant's stack still imports it."""
    exports = templates["production"][PLATFORM]["Outputs"].values()
    assert not [item for item in exports if "Queues" in str(item["Value"])]


def test_who_resumes_nothing_writes_no_records(templates: dict[str, Any]) -> None:
    """Batch retries what waits in its queues: the resumer, which isn't there, has no key."""
    keys = of(templates["production"]["trainyard-production-language-foundation"], "AWS::KMS::Key")
    assert "RolesBroker" in str(keys)
    assert "RolesResumer" not in str(keys)


@pytest.mark.parametrize("role", ["Launcher", "Auditor", "Operator", "Job", "Guard", "Resumer"])
def test_nobody_but_the_broker_may_queue(templates: dict[str, Any], role: str) -> None:
    policies = of(templates["production"]["trainyard-production-language-foundation"], "AWS::IAM::Policy")
    actions = {
        action
        for name, policy in policies.items()
        if name.startswith(f"Permissions{role}")
        for statement in policy["PolicyDocument"]["Statement"]
        for action in (statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]])
    }
    assert not {"batch:SubmitServiceJob", "batch:TagResource", "batch:DescribeServiceJob"} & actions
    # The guard's role is the budget's meter's too, which takes the tenant's own jobs out of a queue.
    assert ("batch:TerminateServiceJob" in actions) == (role in ("Launcher", "Operator", "Guard"))
    assert not {"sagemaker:CreateTrainingJob"} & actions
