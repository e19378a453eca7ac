"""What a tenant has: by the environment file, and in the account."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.errors import TrainyardError
from trainyard.hardware import BaseCost, base_cost
from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.contract import read_contract
from trainyard.launch.session import Account
from trainyard.operate.deploy import tenant_stacks
from trainyard.operate.stateful import deployed_templates
from trainyard.spec.platform import EnvironmentSpec

NOT_DEPLOYED = "not deployed"
HELD_TYPES = frozenset(
    {
        "AWS::EC2::SecurityGroup",
        "AWS::EC2::Subnet",
        "AWS::EC2::VPC",
        "AWS::EFS::FileSystem",
        "AWS::FSx::DataRepositoryAssociation",
        "AWS::FSx::FileSystem",
        "AWS::KMS::Key",
        "AWS::Logs::LogGroup",
        "AWS::S3::Bucket",
    }
)
"""Types that a removal follows one by one: what holds data or opens it, and the network that a file system keeps."""

_ONLY_RECORDED = frozenset({"AWS::EFS::FileSystem", "AWS::FSx::DataRepositoryAssociation"})
"""Of these, what the emulator only records."""


@dataclass(frozen=True)
class Held:
    """One resource that a removal must account for."""

    kind: str
    stack: str
    logical_id: str
    physical_id: str
    retained: bool
    """CloudFormation leaves it behind when the stack goes."""

    def __str__(self) -> str:
        return f"{self.kind.removeprefix('AWS::')} {self.physical_id}"


@dataclass(frozen=True)
class State:
    """The tenant in its account."""

    stacks: Mapping[str, str]
    """Stack name to CloudFormation's status, or "not deployed"."""
    contract: str
    """The contract's version, and what people need of it to bring data; or why it can't be read."""
    cost: BaseCost | None
    """Of the deployed templates; None where nothing is deployed."""

    @property
    def deployed(self) -> bool:
        """Whether any of its stacks exists."""
        return any(status != NOT_DEPLOYED for status in self.stacks.values())


def state(account: Account, environment: EnvironmentSpec, tenant: str) -> State:
    """The tenant's stacks, contract and base cost, as deployed."""
    names = tenant_stacks(environment, tenant)
    stacks = {name: stack_status(account, name) for name in names}
    contract = NOT_DEPLOYED
    if any(status != NOT_DEPLOYED for status in stacks.values()):
        try:
            found = read_contract(account, environment, tenant)
            contract = (
                f"version {found.version}; log group: {found.log_group}; data bucket: {found.buckets.data}; "
                f"launcher, who writes there: {found.roles.launcher}"
            )
        except TrainyardError as error:
            contract = str(error)
    templates = deployed_templates(account, [name for name in names if stacks[name] != NOT_DEPLOYED])
    return State(stacks, contract, base_cost(templates.values(), environment.region) if templates else None)


def settings(environment: EnvironmentSpec, tenant: str) -> dict[str, Any]:
    """What the environment file gives the tenant, defaults filled in."""
    spec = environment.tenant(tenant)
    return {
        "environment": environment.name,
        "tenant": tenant,
        "network": environment.network.block(spec.network_index),
        "data_on_removal": environment.data_on_removal(tenant),
        **spec.model_dump(mode="json"),
    }


def document(environment: EnvironmentSpec, tenant: str, found: State | None, why_unknown: str = "") -> dict[str, Any]:
    """Settings and state as JSON; `found` is None where the account could not be asked, for `why_unknown`."""
    deployed: dict[str, Any] = {"unknown": why_unknown}
    if found is not None:
        deployed = {key: value for key, value in asdict(found).items() if key != "cost"}
        deployed["base_cost"] = found.cost and found.cost.document()
    return {**settings(environment, tenant), "deployed": deployed}


def stack_status(account: Account, name: str) -> str:
    """CloudFormation's status of a stack, or "not deployed"."""
    from botocore.exceptions import ClientError

    with aws_errors("describing", f"stack {name}"):
        try:
            return str(account.client("cloudformation").describe_stacks(StackName=name)["Stacks"][0]["StackStatus"])
        except ClientError as error:
            if error_code(error) != "ValidationError":  # CloudFormation's word for "no such stack"
                raise
            return NOT_DEPLOYED


def held(account: Account, environment: EnvironmentSpec, tenant: str) -> Iterator[Held]:
    """Everything of HELD_TYPES in the tenant's stacks that exist."""
    names = tenant_stacks(environment, tenant)
    templates = deployed_templates(account, names)
    cloudformation = account.client("cloudformation")
    for name in templates:
        resources = templates[name].get("Resources", {})
        with aws_errors("listing the resources of", f"stack {name}"):
            pages = cloudformation.get_paginator("list_stack_resources").paginate(StackName=name)
            found = [item for page in pages for item in page["StackResourceSummaries"]]
        for item in found:
            if environment.emulated and item["ResourceType"] in _ONLY_RECORDED:
                continue  # the emulator's services could not be asked for one
            # Without a physical id it was never made: its creation failed.
            there = item.get("PhysicalResourceId") and item["ResourceStatus"] != "DELETE_COMPLETE"
            if item["ResourceType"] in HELD_TYPES and there:
                policy = resources.get(item["LogicalResourceId"], {}).get("DeletionPolicy", "Delete")
                yield Held(
                    item["ResourceType"],
                    name,
                    item["LogicalResourceId"],
                    item["PhysicalResourceId"],
                    policy.startswith("Retain"),
                )
