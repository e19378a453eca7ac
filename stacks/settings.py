"""How every stack is made: where, protected or not, and without anything decided at deploy time."""

from typing import Any

from aws_cdk import DefaultStackSynthesizer, Environment, RemovalPolicy, Tags
from constructs import IConstruct

from stacks.naming import TAG_COST_CENTER, TAG_ENVIRONMENT, TAG_TENANT, TenantScope
from trainyard.spec.platform import EnvironmentSpec


def stack_settings(environment: EnvironmentSpec, *, stateful: bool) -> dict[str, Any]:
    """Keyword arguments for `Stack`. A stateful stack that keeps its data can't be deleted by one command."""
    return {
        "env": Environment(account=environment.account, region=environment.region),
        "termination_protection": stateful and environment.retain_data,
        # The rule would be the templates' only Parameter, and the CLI checks the bootstrap version anyway.
        "synthesizer": DefaultStackSynthesizer(generate_bootstrap_version_rule=False),
    }


def removal_policy(environment: EnvironmentSpec) -> RemovalPolicy:
    """Of what holds data: kept, where the environment keeps its data, but for a stack whose creation fails. What that
    made is empty, and would stand in the next attempt's way, by its name or by its cost. What a service writes into as
    soon as it is there isn't empty: see `written_at_once`."""
    return RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE if environment.retain_data else RemovalPolicy.DESTROY


def written_at_once(environment: EnvironmentSpec) -> RemovalPolicy:
    """Of what a service writes into while the stack is still made: kept even where that fails. A bucket whose versions
    are locked can't be deleted, and nor then can the stack. Only for what stands in nobody's way, by a generated name.
    """
    return RemovalPolicy.RETAIN if environment.retain_data else RemovalPolicy.DESTROY


def tag_environment(scope: IConstruct, environment: EnvironmentSpec) -> None:
    """Says of everything under `scope` which environment it belongs to."""
    Tags.of(scope).add(TAG_ENVIRONMENT, environment.name)


def tag_tenant(scope: IConstruct, tenant: TenantScope) -> None:
    """Says of everything under `scope` whose it is and who pays."""
    tag_environment(scope, tenant.environment)
    Tags.of(scope).add(TAG_TENANT, tenant.name)
    Tags.of(scope).add(TAG_COST_CENTER, tenant.spec.cost_center)
