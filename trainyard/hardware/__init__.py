"""Facts about machines: GPUs, instance types, prices, failures. Every figure has a source, every price a date.

- `instance("ml.p5.48xlarge")`: GPUs, memory, EFA interfaces, network, disks.
- `network_interfaces(machine, efa_only=False)`: how a launch template wires every network card.
- `gpu("H100")`: dense peaks, memory, links.
- `price("ml.p5.48xlarge", "us-east-1", spot=False)`: USD per hour with basis, date and source; refused when unknown.
- `PriceBook.opened(refreshed, today=day)`: the same with refreshed rows, other ways to buy, and nothing too old.
- `base_cost(templates, "us-east-1")`: what a tenant costs a month that runs nothing, and what of it has no price.
- `failures_per_node_day()`: for goodput.
"""

from trainyard.hardware.base_prices import BaseCost, base_cost
from trainyard.hardware.gpus import GIB, Gpu, gpu
from trainyard.hardware.instances import Instance, instance, instance_types
from trainyard.hardware.network_cards import NetworkInterface, network_interfaces
from trainyard.hardware.prices import DEFAULT_REGION, Price, PriceBook, price
from trainyard.hardware.reliability import failures_per_node_day

__all__ = [
    "DEFAULT_REGION",
    "GIB",
    "BaseCost",
    "Gpu",
    "Instance",
    "NetworkInterface",
    "Price",
    "PriceBook",
    "base_cost",
    "failures_per_node_day",
    "gpu",
    "instance",
    "instance_types",
    "network_interfaces",
    "price",
]
