"""One environment file -> stacks."""

from collections.abc import Iterable

from constructs import Construct

from stacks.foundation import FoundationStack
from stacks.naming import TenantScope
from stacks.platform import PlatformStack
from stacks.preflight import check_environment
from stacks.settings import tag_environment, tag_tenant
from stacks.training import TrainingStack
from trainyard.spec.platform import EnvironmentSpec


def deploy_environment(scope: Construct, environment: EnvironmentSpec, tenants: Iterable[str] | None = None) -> None:
    """The platform stack, and a foundation and a training stack for each of `tenants` (default: all). InputError before
    the first of them."""
    check_environment(environment)
    platform = PlatformStack(scope, environment=environment)
    tag_environment(platform, environment)
    for name in environment.tenants if tenants is None else tenants:
        tenant = TenantScope(environment, name)
        foundation = FoundationStack(scope, tenant=tenant, images=platform.images)
        training = TrainingStack(scope, tenant=tenant, foundation=foundation, budget_actor=platform.budget_actor)
        for stack in (foundation, training):
            tag_tenant(stack, tenant)
        training.add_stack_dependency(platform, "its shares are of the platform's queues, which it names")
