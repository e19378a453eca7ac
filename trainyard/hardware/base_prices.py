"""What a tenant costs that runs nothing: endpoints, keys, the file system. From dated rows; what has none is named."""

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard.errors import InputError
from trainyard.hardware.prices import price
from trainyard.hardware.tables import rows

HOURS_PER_MONTH = 730
"""AWS's own months."""

EVERY_REGION = "any"
"""In the table, of what costs the same everywhere."""

BY_USE = frozenset(
    {
        "AWS::CloudTrail::Trail",
        "AWS::EC2::FlowLog",
        "AWS::ECR::Repository",
        "AWS::EFS::FileSystem",
        "AWS::FSx::DataRepositoryAssociation",
        "AWS::Lambda::Function",
        "AWS::Logs::LogGroup",
        "AWS::Logs::MetricFilter",
        "AWS::S3::Bucket",
        "AWS::SNS::Topic",
    }
)
"""Types that cost by what is stored, sent or run: nothing while nobody works. Of the others those that `_billed` knows
cost by the month; the rest costs nothing by itself."""


@dataclass(frozen=True)
class CostLine:
    """One kind of resource."""

    item: str
    quantity: float
    unit: str
    """What the quantity counts."""
    usd_per_month: float | None
    """None: the table has no row for the item in this region."""
    as_of: datetime.date | None = None
    source: str = ""
    elsewhere: tuple[str, ...] = ()
    """Without a price here: those of other regions, each with its unit, region and date."""

    @property
    def amount(self) -> str:
        """USD a month with the price's date and source; or that there is none, and what is known elsewhere."""
        if self.usd_per_month is not None:
            return f"{self.usd_per_month:,.2f} USD, as of {self.as_of}: {self.source}"
        return "; ".join(("no price known", *self.elsewhere))


@dataclass(frozen=True)
class BaseCost:
    """The sum, and what it rests on."""

    region: str
    lines: tuple[CostLine, ...]
    by_use: tuple[str, ...]
    """CloudFormation types that cost by use and aren't in the sum."""

    @property
    def known_usd_per_month(self) -> float:
        """The sum of what has a price."""
        return round(sum(line.usd_per_month or 0.0 for line in self.lines), 2)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Items without a price: the sum is too low by them."""
        return tuple(line.item for line in self.lines if line.usd_per_month is None)

    @property
    def oldest(self) -> datetime.date | None:
        """The oldest date among the prices used."""
        return min((line.as_of for line in self.lines if line.as_of), default=None)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "region": self.region,
            "known_usd_per_month": self.known_usd_per_month,
            "unknown": list(self.unknown),
            "oldest_price": self.oldest and self.oldest.isoformat(),
            "costs_by_use": list(self.by_use),
            "lines": [
                {**line.__dict__, "as_of": line.as_of and line.as_of.isoformat(), "item": line.item}
                for line in self.lines
            ],
        }


def base_cost(templates: Iterable[Mapping[str, Any]], region: str) -> BaseCost:
    """What the resources of CloudFormation templates cost a month while nothing runs, in `region`."""
    amounts: Counter[tuple[str, str]] = Counter()
    by_use: set[str] = set()
    for template in templates:
        for resource in template.get("Resources", {}).values():
            kind, properties = resource["Type"], resource.get("Properties", {})
            if kind in BY_USE:
                by_use.add(kind)
            for item, quantity, unit in _billed(kind, properties):
                amounts[item, unit] += quantity
        acting = _budgets_that_act(template)
        if acting:
            amounts["action-enabled-budget", "days"] += round(acting * HOURS_PER_MONTH / 24)
    lines = tuple(_line(item, quantity, unit, region) for (item, unit), quantity in sorted(amounts.items()))
    return BaseCost(region, lines, tuple(sorted(by_use)))


def _budgets_that_act(template: Mapping[str, Any]) -> int:
    """Budgets with actions, however many each has: AWS bills the budget's days."""
    resources = template.get("Resources", {}).values()
    actions = [item["Properties"] for item in resources if item["Type"] == "AWS::Budgets::BudgetsAction"]
    return len({json.dumps(action["BudgetName"], sort_keys=True) for action in actions})


_ONE_PRICE = {
    "AWS::CloudWatch::Alarm": ("cloudwatch-alarm", 1, "months"),
    "AWS::CloudWatch::Dashboard": ("cloudwatch-dashboard", 1, "months"),
    "AWS::EC2::EIP": ("public-ipv4-address", HOURS_PER_MONTH, "hours"),
    "AWS::EC2::NatGateway": ("nat-gateway", HOURS_PER_MONTH, "hours"),
    "AWS::KMS::Key": ("kms-key", 1, "months"),
}
"""Types of which each resource costs the same."""


def _firewall(properties: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    zones = len(properties.get("SubnetMappings", []))
    return [("network-firewall-endpoint", HOURS_PER_MONTH * zones, "zone-hours")]


def _tracking_server(properties: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    size = str(properties.get("TrackingServerSize", "Small")).lower()
    return [(f"mlflow-tracking-server-{size}", HOURS_PER_MONTH, "hours")]


def _hyperpod(properties: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Its machines run all the time, at SageMaker's prices."""
    return [
        (f"hyperpod-{group['InstanceType']}", HOURS_PER_MONTH * int(group["InstanceCount"]), "hours")
        for group in properties.get("InstanceGroups", [])
    ]


_BY_SIZE = {
    "AWS::SageMaker::Cluster": _hyperpod,
    "AWS::NetworkFirewall::Firewall": _firewall,
    "AWS::SageMaker::MlflowTrackingServer": _tracking_server,
}
"""Types whose price follows from one property of theirs."""


def _billed(kind: str, properties: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """(item, quantity, unit) of a resource; nothing for one that costs by use or not at all."""
    if kind == "AWS::EC2::VPCEndpoint" and properties.get("VpcEndpointType") == "Interface":
        return [("interface-endpoint", HOURS_PER_MONTH * len(properties.get("SubnetIds", [])), "zone-hours")]
    if kind.startswith("AWS::PCS::"):
        return _cluster(kind, properties)
    if kind in _BY_SIZE:
        return _BY_SIZE[kind](properties)
    if kind in _ONE_PRICE:
        return [_ONE_PRICE[kind]]
    if kind == "AWS::FSx::FileSystem":
        lustre = properties.get("LustreConfiguration", {})
        deployment = str(lustre.get("DeploymentType", "")).lower().replace("_", "-")
        tier = lustre.get("PerUnitStorageThroughput")
        item = f"fsx-lustre-{deployment}-{str(properties.get('StorageType', '')).lower()}-{tier}"
        return [(item, int(properties["StorageCapacity"]), "GB-months")]
    advanced = kind == "AWS::SSM::Parameter" and properties.get("Tier") == "Advanced"
    return [("ssm-advanced-parameter", 1, "months")] if advanced else []


def _cluster(kind: str, properties: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Slurm's controller and its accounting by their size, and the machines that run whether a job does or not."""
    if kind == "AWS::PCS::Cluster":
        size = str(properties["Size"]).lower()
        return [(f"pcs-{part}-{size}", HOURS_PER_MONTH, "hours") for part in ("controller", "accounting")]
    floor = int(properties.get("ScalingConfiguration", {}).get("MinInstanceCount", 0))
    types = [item["InstanceType"] for item in properties.get("InstanceConfigs", [])]
    return [(f"ec2-{types[0]}", HOURS_PER_MONTH * floor, "hours")] if floor else []


def _line(item: str, quantity: float, unit: str, region: str) -> CostLine:
    if item.startswith("ec2-"):
        return _machine_line(item, quantity, unit, region)
    named = [row for row in rows("aws_base_prices") if row["item"] == item]
    here = [row for row in named if row["region"] in (region, EVERY_REGION)]
    if not here:
        known = (f"in {row['region']} {row['price']} {row['unit']} as of {row['as_of']}" for row in named)
        return CostLine(item, quantity, unit, None, elsewhere=tuple(known))
    row = here[0]
    return CostLine(
        item,
        quantity,
        unit,
        round(quantity * float(row["price"]), 2),
        datetime.date.fromisoformat(row["as_of"]),
        row["source"],
    )


def _machine_line(item: str, quantity: float, unit: str, region: str) -> CostLine:
    """Machines that run all month, at EC2's on-demand price; None for a type without one (spot and bought blocks cost
    otherwise)."""
    try:
        known = price(item.removeprefix("ec2-"), region)
    except InputError:
        return CostLine(item, quantity, unit, None)
    return CostLine(item, quantity, unit, round(quantity * known.usd_per_hour, 2), known.as_of, known.source)
