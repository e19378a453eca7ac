"""What the environment file alone can't be checked for: its values against each other and against the machines."""

import difflib
import re

from aws_cdk.region_info import RegionInfo

from stacks.constructs.network import most_zones
from trainyard.errors import InputError
from trainyard.hardware import instance, network_interfaces
from trainyard.spec.cluster import ClusterSpec
from trainyard.spec.platform import EnvironmentSpec, QueueSpec

OTHER_PARTITIONS = ("cn-", "us-gov-", "us-iso", "eu-isoe-")

MAX_BUDGET_ADDRESSES = 10
"""AWS Budgets: subscribers of one notification."""

KEPT_ADDRESSES = 25
"""Of the training subnet, for other things than machines: AWS's own five, the file system's servers, PCS's controller,
the firewall's neighbours."""


def check_environment(environment: EnvironmentSpec) -> None:
    """InputError for what AWS would refuse half-way through a deployment, or what would let tenants see each other."""
    _check_region(environment)
    _check_zones(environment)
    for tenant_name, tenant in environment.tenants.items():
        _check_addresses(f"tenants.{tenant_name}.budget.notify", tenant.budget.notify)
        for queue_name, queue in tenant.queues.items():
            _check_types(f"tenants.{tenant_name}.queues.{queue_name}", queue)
        if tenant.cluster is not None:
            _check_cluster(f"tenants.{tenant_name}.cluster", tenant.cluster, environment)
        if tenant.file_system.efa:
            _check_efa_clients(f"tenants.{tenant_name}.file_system.efa", tenant.cluster)


def _check_region(environment: EnvironmentSpec) -> None:
    if environment.region.startswith(OTHER_PARTITIONS):
        raise InputError(
            f"environment {environment.name}: region {environment.region} is in a partition of its own, with other "
            "ARNs and without AWS Budgets; choose a commercial region"
        )
    known = [region.name for region in RegionInfo.regions]
    if environment.region not in known:
        close = ", ".join(difflib.get_close_matches(environment.region, known, n=3)) or "none"
        raise InputError(
            f"environment {environment.name}: region {environment.region} is none that the CDK knows; "
            f"close to it: {close}"
        )


def _check_zones(environment: EnvironmentSpec) -> None:
    zones = environment.availability_zones
    twice = sorted({zone for zone in zones if zones.count(zone) > 1})
    if twice:
        raise InputError(
            f"environment {environment.name}: availability_zones names {', '.join(twice)} twice; an endpoint takes one "
            "subnet per zone, so name each zone once"
        )
    taking, prefix = environment.endpoint_zones, environment.network.vpc_prefix_length
    if not taking:
        raise InputError(
            f"environment {environment.name}: availability_zones names Local Zones alone, which take no endpoints; "
            f"name one of the region's own zones beside them, e.g. {environment.region}a"
        )
    if len(taking) > most_zones(prefix):
        raise InputError(
            f"environment {environment.name}: availability_zones names {len(taking)} zones, and a tenant's /{prefix} "
            f"has endpoint subnets for {most_zones(prefix)}; name fewer, or take a smaller network.vpc_prefix_length "
            "before the first deployment"
        )


def _check_addresses(where: str, addresses: tuple[str, ...]) -> None:
    wrong = [address for address in addresses if not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", address)]
    if wrong:
        raise InputError(f"{where}: {', '.join(wrong)}: not an e-mail address, e.g. team-leads@example.com")
    if len(set(addresses)) != len(addresses) or len(addresses) > MAX_BUDGET_ADDRESSES:
        raise InputError(
            f"{where}: {len(addresses)} addresses, {len(set(addresses))} of them different; AWS Budgets takes up to "
            f"{MAX_BUDGET_ADDRESSES} different ones, so use a mailing list"
        )


def _check_types(where: str, queue: QueueSpec) -> None:
    for instance_type in queue.instance_types:
        if not instance_type.startswith("ml."):
            raise InputError(f"{where}: {instance_type!r} is not a SageMaker type; write ml.{instance_type}")
        try:
            machine = instance(instance_type)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if queue.multi_node and not machine.efa_interfaces:
            raise InputError(
                f"{where}: {instance_type} has no EFA, so jobs over several hosts would run over plain TCP; choose a "
                "type with EFA, or set multi_node: false for this queue"
            )


def _check_efa_clients(where: str, cluster: ClusterSpec | None) -> None:
    """A file system with EFA costs its large size: refused where nobody would reach it so."""
    groups = cluster.node_groups.values() if cluster else ()
    if not any(instance(group.instance_type).efa_interfaces for group in groups):
        raise InputError(
            f"{where}: no machine of the tenant would use it, as SageMaker's training jobs mount Lustre over TCP; give "
            "the tenant a cluster with a type that has EFA, or leave it out"
        )


def _check_cluster(where: str, cluster: ClusterSpec, environment: EnvironmentSpec) -> None:
    taken = 1 if cluster.controller is None else 2
    for name, group in cluster.node_groups.items():
        try:
            machine = instance(group.instance_type)
        except InputError as error:
            raise InputError(f"{where}.node_groups.{name}: {error}") from None
        if group.max_instances > 1 and not machine.efa_interfaces:
            raise InputError(
                f"{where}.node_groups.{name}: {group.instance_type} has no EFA, so jobs over several machines would "
                "run over plain TCP; choose a type with EFA, or set max_instances: 1"
            )
        taken += group.max_instances * sum(card.has_address for card in network_interfaces(machine, efa_only=False))
    there = 2 ** (31 - environment.network.vpc_prefix_length) - KEPT_ADDRESSES
    if taken > there:
        raise InputError(
            f"{where}: its machines take {taken} addresses, one for each network card, and the tenant's training "
            f"subnet has {there} for machines; lower max_instances, or give the environment a smaller "
            "network.vpc_prefix_length before its first deployment"
        )
