"""Every resource type of the emulator by name. Free of moto: a client probes deployments with it."""

from collections.abc import Mapping

from trainyard.emulator.cloudformation import functions, identity, network, operations, queues, recorded, storage
from trainyard.emulator.cloudformation.model import ResourceType

RESOURCE_TYPES: Mapping[str, ResourceType] = {
    resource_type.name: resource_type
    for module in (network, identity, storage, operations, queues, functions, recorded)
    for resource_type in module.TYPES
}


def describe_types() -> dict[str, str]:
    """CloudFormation type to `api-backed` or `recorded-only`; any other type fails the deploy."""
    return {name: "recorded-only" if kind.recorded else "api-backed" for name, kind in sorted(RESOURCE_TYPES.items())}
