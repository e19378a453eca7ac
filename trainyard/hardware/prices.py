"""What an instance-hour costs, where that was read, and when. No price is ever guessed."""

import datetime
import statistics
from dataclasses import dataclass

from trainyard.errors import InputError
from trainyard.hardware.instances import instance
from trainyard.hardware.tables import rows

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Price:
    """USD for one instance and one hour."""

    instance_type: str
    region: str
    usd_per_hour: float
    basis: str
    """What kind of price it is, and how the bill may differ from it."""
    as_of: datetime.date
    """The day it was read or last confirmed; for an undated source, the earliest that its contents allow."""
    source: str


def price(instance_type: str, region: str = DEFAULT_REGION, *, spot: bool = False) -> Price:
    """The hourly price of a type in a region; InputError where the table has none.

    On demand it is EC2's rate. SageMaker bills its own `ml.` rate, which the table doesn't hold.
    Spot is the median over the region's zones at the snapshot's instant.
    """
    machine = instance(instance_type)
    offers = [row for row in rows("aws_prices") if row["instance"] == machine.type and row["price"] != "none"]
    purchase = "spot snapshot" if spot else "on-demand"
    matching = [row for row in offers if row["purchase"] == purchase]
    here = [row for row in matching if row["region"] == region]
    if not here:
        raise InputError(_refusal(instance_type, region, spot, offers, matching))
    values = [float(row["price"]) for row in here]
    return Price(
        instance_type=instance_type,
        region=region,
        usd_per_hour=statistics.median(values),
        basis=_spot_basis(values) if spot else _on_demand_basis(instance_type),
        as_of=datetime.date.fromisoformat(here[0]["as_of"]),
        source=here[0]["source"],
    )


def _on_demand_basis(instance_type: str) -> str:
    if instance_type.startswith("ml."):
        return "EC2 on demand; SageMaker's own ml. rate is not in the table and is usually higher"
    return "EC2 on demand"


def _spot_basis(values: list[float]) -> str:
    spread = f"{min(values):.2f} to {max(values):.2f} over {len(values)} zones" if len(values) > 1 else "one zone"
    return f"EC2 spot, median of one undated snapshot ({spread}); not a forecast"


def _refusal(
    instance_type: str, region: str, spot: bool, offers: list[dict[str, str]], matching: list[dict[str, str]]
) -> str:
    kind = "spot" if spot else "on-demand"
    message = f"no {kind} price known for {instance_type} in {region}"
    if matching:
        return f"{message}; known in {', '.join(sorted({row['region'] for row in matching}))}"
    other = sorted({row["purchase"] for row in offers})
    return f"{message}; known for it: {', '.join(other)}" if other else f"{message} or anywhere else"
