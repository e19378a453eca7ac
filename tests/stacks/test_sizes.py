"""What AWS would refuse half-way through a deployment, as it is too large, is refused before it."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aws_cdk import App, Stack, Token

from stacks.constructs import contract as contracts
from stacks.constructs import functions
from stacks.naming import TenantScope
from trainyard.errors import InputError
from trainyard.spec.platform import BudgetLimits, EnvironmentSpec

Synthesize = Callable[[Any], dict[str, Any]]


def with_queues(environment: EnvironmentSpec, number: int) -> EnvironmentSpec:
    """The environment with acme alone, which has so many queues."""
    content = environment.model_dump(mode="json")
    acme = content["tenants"]["acme"]
    (queue, *_) = acme["queues"].values()
    acme["queues"] = {f"queue-{index:03}": queue for index in range(number)}
    acme["cluster"] = None
    return EnvironmentSpec.model_validate(content | {"tenants": {"acme": acme}})


def test_a_contract_too_long_for_a_parameter_is_refused_in_one_line(
    synthesize: Synthesize, environments: dict[str, EnvironmentSpec]
) -> None:
    with pytest.raises(InputError) as refused:
        synthesize(with_queues(environments["local"], 60))
    told = str(refused.value)
    assert told.startswith("tenants.acme: with 60 queues and 0 training plans the tenant's contract would have up to ")
    assert "Systems Manager takes 8,192 of a parameter" in told and "\n" not in told


def test_a_contracts_length_is_told_as_it_will_be(
    synthesize: Synthesize, environments: dict[str, EnvironmentSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not shorter than what is deployed, and hardly longer: what fits is not refused."""
    seen: list[int] = []

    def dumps(*content: Any, **options: Any) -> str:
        seen.append(len(json.dumps(*content, **options)))
        return ""

    monkeypatch.setattr(contracts, "json", SimpleNamespace(dumps=dumps))
    templates = synthesize(with_queues(environments["local"], 20))
    monkeypatch.undo()
    training = templates["trainyard-local-acme-training"]["Resources"]
    (value,) = (
        item["Properties"]["Value"]
        for item in training.values()
        if item["Type"] == "AWS::SSM::Parameter" and item["Properties"]["Name"].endswith("/contract")
    )
    literal = sum(len(part) for part in value["Fn::Join"][1] if isinstance(part, str))
    references = [part for part in value["Fn::Join"][1] if not isinstance(part, str)]
    queues = [part for part in references if "Queue" in json.dumps(part)]
    assert len(queues) == 20
    # As CloudFormation names queues of Batch: JobQueue-rivR3vgrh6ipJHfa, by the logical id alone.
    arns = 20 * len("arn:aws:batch:us-east-1:123456789012:job-queue/Queuesqueue000Queue01234567-rivR3vgrh6ipJHfa")
    assert literal + arns <= seen[0] <= literal + arns + 170 * (len(references) - 20) + 100


def test_queues_that_fit_are_not_refused(synthesize: Synthesize, environments: dict[str, EnvironmentSpec]) -> None:
    """Their names are counted without the stack's, which Batch's don't have."""
    production = environments["production"]
    content = production.model_dump(mode="json")
    language = content["tenants"]["language"]
    (queue, *_) = language["queues"].values()
    del language["share"]
    language |= {"submission": "broker", "queues": {f"queue-{index:03}": queue for index in range(26)}}
    assert synthesize(EnvironmentSpec.model_validate(content | {"tenants": {"language": language}}))


@pytest.mark.parametrize("region", ["us-east-1", "ap-southeast-2"])
def test_a_longer_regions_names_are_counted_longer(
    environments: dict[str, EnvironmentSpec], monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    content = environments["local"].model_dump(mode="json")
    content |= {"region": region, "availability_zones": [f"{region}a"]}
    tenant = TenantScope(EnvironmentSpec.model_validate(content), "acme")
    monkeypatch.setattr(contracts, "MAX_BYTES", 0)
    still_to_come = Token.as_string({"Ref": "Something"})

    def told(key: str) -> int:
        with pytest.raises(InputError, match="would have up to") as refused:
            contracts._check_size({key: {"name": still_to_come}, "queues": {}}, tenant)
        return int(str(refused.value).split("up to ")[1].split(" ")[0].replace(",", ""))

    frame = len('{"keys":{"name":""},"queues":{}}')
    assert told("keys") - frame == len(f"arn:aws:kms:{region}:123456789012:key/12345678-1234-1234-1234-123456789012")
    file_system = told("file_system") - frame - len("file_system") + len("keys")
    assert file_system == len(f"fs-0123456789abcdef0.fsx.{region}.amazonaws.com")


def test_settings_too_long_for_a_function_are_refused_in_one_line() -> None:
    stack = Stack(App(), "trainyard-test-acme-training")
    functions._check_size({"METER": "x" * 4091}, stack)
    with pytest.raises(InputError) as refused:
        functions._check_size({"METER": "x" * 4092}, stack)
    assert "would have 4,097 bytes, and Lambda takes 4,096 of a function" in str(refused.value)


def test_a_budget_tells_no_more_addresses_than_aws_takes() -> None:
    addresses = [f"a{index}@example.org" for index in range(10)]
    content: dict[str, Any] = {"monthly_usd": 10, "notify": addresses}
    assert len(BudgetLimits.model_validate(content).notify) == 10
    with pytest.raises(ValueError, match="at most 10 items"):
        BudgetLimits.model_validate(content | {"notify": [*addresses, "b@example.org"]})
