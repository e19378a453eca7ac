"""The network: EFA and Lustre rules as AWS needs them, no way out, endpoints for this account only."""

import ipaddress
import json
from typing import Any

import pytest

from stacks.constructs.network import subnet_blocks

STACK = "trainyard-local-acme-foundation"
RULES = {"in": "AWS::EC2::SecurityGroupIngress", "out": "AWS::EC2::SecurityGroupEgress"}
OTHER = {"in": "SourceSecurityGroupId", "out": "DestinationSecurityGroupId"}


def _rules(account: Any, direction: str) -> set[tuple[str, str, str, int | None, int | None]]:
    """(group, other group, protocol, from, to) of every rule between groups."""
    return {
        (rule["GroupId"], rule[OTHER[direction]], rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort"))
        for rule in account.resources(STACK, RULES[direction]).values()
    }


def _group(account: Any, name: str) -> str:
    return account.identifier(STACK, account.only(STACK, "AWS::EC2::SecurityGroup", name)) + ".GroupId"


@pytest.mark.parametrize("direction", ["in", "out"])
def test_efa_group_admits_every_protocol_from_and_to_itself(account: Any, direction: str) -> None:
    group = _group(account, "TrainingGroup")
    assert (group, group, "-1", None, None) in _rules(account, direction)


@pytest.mark.parametrize("direction", ["in", "out"])
def test_lustre_ports_are_open_both_ways_and_no_others(account: Any, direction: str) -> None:
    clients, servers = _group(account, "TrainingGroup"), _group(account, "FileSystemGroup")
    ports = {(988, 988), (1018, 1023)}
    for group, other in ((clients, servers), (servers, clients), (servers, servers)):
        found = {(low, high) for one, two, _, low, high in _rules(account, direction) if (one, two) == (group, other)}
        assert found == ports, f"{direction} {group} <- {other}"


def test_groups_admit_no_addresses_and_reach_only_https(account: Any) -> None:
    groups = account.resources(STACK, "AWS::EC2::SecurityGroup").values()
    assert [group for group in groups if group.get("SecurityGroupIngress")] == []
    egress = [rule for group in groups for rule in group.get("SecurityGroupEgress", [])]
    open_ports = {(rule["FromPort"], rule["ToPort"]) for rule in egress if rule["CidrIp"] == "0.0.0.0/0"}
    assert open_ports == {(443, 443)}


def test_file_system_waits_for_every_rule_of_its_groups(foundation: dict[str, Any]) -> None:
    resources = foundation["Resources"]
    file_system = next(item for item in resources.values() if item["Type"] == "AWS::FSx::FileSystem")
    rules = {
        name
        for name, item in resources.items()
        if item["Type"] in RULES.values() and "FileSystemGroup" in json.dumps(item["Properties"])
    }
    assert len(rules) == 12
    assert rules <= set(file_system["DependsOn"])


def test_nothing_leads_out_of_the_network_of_who_did_not_ask(
    templates: dict[str, Any], environments: dict[str, Any]
) -> None:
    ways_out = {"InternetGateway", "NatGateway", "EIP", "Route", "TransitGatewayAttachment", "VPCPeeringConnection"}
    asked = {
        f"trainyard-{environment}-{tenant}-foundation"
        for environment, spec in environments.items()
        for tenant in spec.tenants
        if spec.tenants[tenant].network.egress
    }
    opened = {
        name
        for stacks in templates.values()
        for name, template in stacks.items()
        if {item["Type"] for item in template["Resources"].values()} & {f"AWS::EC2::{kind}" for kind in ways_out}
    }
    assert opened == asked == {"trainyard-staging-perception-foundation"}


def test_endpoints_serve_what_training_calls_and_admit_the_tenants_roles_alone(account: Any) -> None:
    endpoints = account.resources(STACK, "AWS::EC2::VPCEndpoint").values()
    services = {item["ServiceName"].split("us-east-1.")[1]: item for item in endpoints}
    interfaces = {"sagemaker.api", "logs", "monitoring", "ecr.api", "ecr.dkr", "kms", "ssm", "sts"}
    assert set(services) == interfaces | {"s3", "dynamodb"}
    for name, endpoint in services.items():
        admitted = [s for s in endpoint["PolicyDocument"]["Statement"] if s.get("Sid") != "EcrImageLayers"]
        assert admitted
        for statement in admitted:
            roles = statement["Condition"]["ArnLike"]["aws:PrincipalArn"]
            assert roles == "arn:aws:iam::123456789012:role/trainyard/local/acme/*", name
    assert all(services[name]["PrivateDnsEnabled"] for name in interfaces)
    (layers,) = [s for s in services["s3"]["PolicyDocument"]["Statement"] if s["Sid"] == "EcrImageLayers"]
    assert layers["Resource"] == "arn:aws:s3:::prod-us-east-1-starport-layer-bucket/*"
    assert layers["Action"] == "s3:GetObject"


def test_an_endpoint_lets_any_resource_through_only_for_actions_that_name_none(account: Any) -> None:
    anywhere = set()
    for endpoint in account.resources(STACK, "AWS::EC2::VPCEndpoint").values():
        for statement in endpoint["PolicyDocument"]["Statement"]:
            if statement["Resource"] == "*":
                actions = statement["Action"]
                anywhere |= {actions} if isinstance(actions, str) else set(actions)
    assert anywhere == {
        "cloudwatch:DescribeAlarms",
        "cloudwatch:GetMetricData",
        "cloudwatch:ListMetrics",
        "cloudwatch:PutMetricData",
        "ecr:GetAuthorizationToken",
        "sagemaker:ListTrainingJobs",
        "sts:GetCallerIdentity",
    }


def test_training_and_file_system_share_a_subnet_in_the_first_zone(account: Any) -> None:
    training = account.only(STACK, "AWS::EC2::Subnet", "Training")
    assert account.resources(STACK, "AWS::EC2::Subnet")[training]["AvailabilityZone"] == "us-east-1a"
    (file_system,) = account.resources(STACK, "AWS::FSx::FileSystem").values()
    assert file_system["SubnetIds"] == [account.identifier(STACK, training)]


@pytest.mark.parametrize(("prefix", "zones"), [(16, 1), (20, 2), (20, 3), (22, 6), (24, 6)])
def test_subnets_fit_the_block_without_overlap(prefix: int, zones: int) -> None:
    vpc = ipaddress.IPv4Network(f"10.64.0.0/{prefix}")
    training, endpoints = subnet_blocks(str(vpc), zones)
    blocks = [ipaddress.IPv4Network(block) for block in (training, *endpoints)]
    assert len(endpoints) == zones
    assert all(block.subnet_of(vpc) and block.prefixlen <= 28 for block in blocks)
    assert not any(a.overlaps(b) for i, a in enumerate(blocks) for b in blocks[i + 1 :])
    assert blocks[0].num_addresses * 2 == vpc.num_addresses
