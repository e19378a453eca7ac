"""The way out of a tenant's network: none unless asked for, and then through the firewall alone, to named hosts."""

from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware.base_prices import base_cost
from trainyard.isolation.proof import prove, resolve_templates
from trainyard.isolation.templates import Deployment
from trainyard.spec.base import parse
from trainyard.spec.platform import EnvironmentSpec

STACK = "trainyard-local-acme-foundation"
HOSTS = ["pypi.org", ".hf.co"]


def with_egress(environment: Any, hosts: list[str]) -> dict[str, Any]:
    content: dict[str, Any] = environment.model_dump(mode="json")
    content["tenants"]["acme"]["network"] = {"egress": {"allowed_domains": hosts}}
    return content


@pytest.fixture(scope="module")
def opened(synthesize: Any, environments: dict[str, Any]) -> dict[str, Any]:
    return dict(synthesize(EnvironmentSpec.model_validate(with_egress(environments["local"], HOSTS))))


def resolved(templates: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    deployment = Deployment(templates, "123456789012", "us-east-1")
    return {
        name: deployment.resolve(item.get("Properties", {}), STACK)
        for name, item in templates[STACK]["Resources"].items()
        if item["Type"] == f"AWS::{kind}"
    }


def routes(templates: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Subnet's block -> destination -> what the route leads to."""
    deployment = Deployment(templates, "123456789012", "us-east-1")
    blocks = {
        deployment.physical_id(STACK, name): item["CidrBlock"]
        for name, item in resolved(templates, "EC2::Subnet").items()
    }
    tables = {item["RouteTableId"]: blocks[item["SubnetId"]] for item in associations(templates)}
    found: dict[str, dict[str, str]] = {block: {} for block in blocks.values()}
    for route in resolved(templates, "EC2::Route").values():
        target = next(route[key] for key in ("VpcEndpointId", "NatGatewayId", "GatewayId") if key in route)
        found[tables[route["RouteTableId"]]][route["DestinationCidrBlock"]] = target
    return found


def associations(templates: dict[str, Any]) -> list[dict[str, Any]]:
    return list(resolved(templates, "EC2::SubnetRouteTableAssociation").values())


def test_training_leaves_through_the_firewall_alone_and_answers_come_back_through_it(opened: dict[str, Any]) -> None:
    found = routes(opened)
    training, fence, outside = "10.64.0.0/21", "100.64.0.0/28", "100.64.0.16/28"
    (nat,) = resolved(opened, "EC2::NatGateway").values()
    deployment = Deployment(opened, "123456789012", "us-east-1")
    ids = {
        kind: deployment.physical_id(STACK, next(iter(resolved(opened, kind))))
        for kind in ("NetworkFirewall::Firewall", "EC2::NatGateway", "EC2::InternetGateway")
    }
    firewall, gateway = f"vpce-{ids['NetworkFirewall::Firewall']}", ids["EC2::InternetGateway"]
    assert found.pop(training) == {"0.0.0.0/0": firewall}
    assert found.pop(fence) == {"0.0.0.0/0": ids["EC2::NatGateway"]}
    assert found.pop(outside) == {"0.0.0.0/0": gateway, training: firewall}
    assert len(found) == 2, "the endpoints' subnets"
    assert not any(found.values()), "which lead nowhere"
    assert deployment.resolve(nat["SubnetId"], STACK) == next(
        deployment.physical_id(STACK, name)
        for name, item in resolved(opened, "EC2::Subnet").items()
        if item["CidrBlock"] == outside
    )
    assert not any(item.get("MapPublicIpOnLaunch") for item in resolved(opened, "EC2::Subnet").values())


def test_the_firewall_passes_the_named_hosts_and_drops_and_logs_the_rest(opened: dict[str, Any]) -> None:
    (group,) = resolved(opened, "NetworkFirewall::RuleGroup").values()
    source = group["RuleGroup"]["RulesSource"]["RulesSourceList"]
    assert source == {
        "GeneratedRulesType": "ALLOWLIST",
        "TargetTypes": ["TLS_SNI"],
        "Targets": sorted(HOSTS),
    }
    assert group["RuleGroup"]["RuleVariables"]["IPSets"] == {"HOME_NET": {"Definition": ["10.64.0.0/21"]}}
    (policy,) = (item["FirewallPolicy"] for item in resolved(opened, "NetworkFirewall::FirewallPolicy").values())
    assert policy["StatelessDefaultActions"] == policy["StatelessFragmentDefaultActions"] == ["aws:forward_to_sfe"]
    assert "aws:drop_established_app_layer" in policy["StatefulDefaultActions"]
    assert policy["StatefulEngineOptions"]["RuleOrder"] == "STRICT_ORDER"
    (logging,) = resolved(opened, "NetworkFirewall::LoggingConfiguration").values()
    (destination,) = logging["LoggingConfiguration"]["LogDestinationConfigs"]
    assert destination["LogType"] == "ALERT"
    assert destination["LogDestination"]["logGroup"].startswith(f"{STACK}-EgressDropped")


def test_opening_a_tenant_moves_nothing_of_its_network_and_nobody_elses_stack(
    opened: dict[str, Any], templates: dict[str, Any]
) -> None:
    before = templates["local"]
    assert {name for name in opened if opened[name] != before[name]} == {STACK}
    old, new = before[STACK]["Resources"], opened[STACK]["Resources"]
    assert {name: new.get(name) for name in old} == old
    assert all(name.startswith("Egress") for name in set(new) - set(old))


def test_the_proof_of_isolation_holds_with_a_tenant_opened_and_asks_for_its_firewall(
    opened: dict[str, Any], environments: dict[str, Any]
) -> None:
    spec = EnvironmentSpec.model_validate(with_egress(environments["local"], HOSTS))
    site = resolve_templates(opened, spec)
    firewalls = {thing.pattern for thing in site.account.things_of("acme", "firewall")}
    assert "arn:aws:network-firewall:us-east-1:123456789012:firewall/trainyard-local-acme-egress" in firewalls
    assert prove(site).holds


def test_another_list_of_hosts_replaces_nothing(
    opened: dict[str, Any], synthesize: Any, environments: dict[str, Any]
) -> None:
    other = synthesize(EnvironmentSpec.model_validate(with_egress(environments["local"], ["github.com"])))
    changed = {
        name
        for name, item in other[STACK]["Resources"].items()
        if item["Properties"] != opened[STACK]["Resources"][name]["Properties"]
    }
    (name,) = changed
    assert other[STACK]["Resources"][name]["Type"] == "AWS::NetworkFirewall::RuleGroup"
    groups = (templates[STACK]["Resources"][name]["Properties"] for templates in (other, opened))
    assert len({(group["Capacity"], group["RuleGroupName"]) for group in groups}) == 1, "what replaces a rule group"


def test_the_way_out_is_in_the_base_price_and_unknown_prices_are_named(opened: dict[str, Any]) -> None:
    cost = base_cost([opened[STACK]], "us-east-1")
    lines = {line.item: line for line in cost.lines}
    assert lines["nat-gateway"].usd_per_month == pytest.approx(730 * 0.045, abs=0.01)
    assert lines["public-ipv4-address"].usd_per_month == pytest.approx(730 * 0.005)
    assert lines["network-firewall-endpoint"].quantity == 730
    assert "network-firewall-endpoint" in cost.unknown


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "at least 1 item"),
        (["https://pypi.org"], "'https://pypi.org' is no host name"),
        (["*.hf.co"], r"'\*.hf.co' is no host name"),
        ([".com"], "'.com' is no host name"),
        (["10.0.0.1"], "'10.0.0.1' is no host name"),
        (["Pypi.org"], "'Pypi.org' is no host name"),
        (["s3.eu-west-1.amazonaws.com"], "is AWS's, where everybody has buckets"),
        ([".amazonaws.com"], "is AWS's, where everybody has buckets"),
        (["pypi.org", "pypi.org"], "pypi.org: stands twice"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused_in_one_line(
    environments: dict[str, Any], hosts: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        parse(EnvironmentSpec, with_egress(environments["local"], hosts), "e.yaml")
    assert "tenants.acme.network.egress.allowed_domains" in str(refused.value)
    assert "\n" not in str(refused.value)
