"""A tenant's stateless half: queues, budget, alarms, and the contract. It can be deleted and deployed again."""

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks.constructs.alarms import TenantAlarms
from stacks.constructs.broker import Broker
from stacks.constructs.budget_meter import BudgetMeter
from stacks.constructs.budget_stop import BudgetStop
from stacks.constructs.cluster import TenantCluster
from stacks.constructs.contract import PublishedContract
from stacks.constructs.detective import JobGuard
from stacks.constructs.hyperpod import TenantHyperPod
from stacks.constructs.objectives import TenantObjectives
from stacks.constructs.queues import TenantQueues, TenantShares
from stacks.constructs.resumer import JobResumer
from stacks.constructs.spending import SpendingWatch
from stacks.foundation import FoundationStack
from stacks.naming import TenantScope
from stacks.settings import stack_settings


class TrainingStack(Stack):
    """What runs and watches jobs on the foundation."""

    def __init__(
        self, scope: Construct, *, tenant: TenantScope, foundation: FoundationStack, budget_actor: iam.IRole
    ) -> None:
        super().__init__(
            scope,
            tenant.stack_name("training"),
            description=f"trainyard: queues, budget, alarms and contract of tenant {tenant.name}",
            **stack_settings(tenant.environment, stateful=False),
        )
        resources = foundation.resources
        alarms = TenantAlarms(
            self,
            "Alarms",
            tenant=tenant,
            key=resources.keys.logs,
            file_system=resources.file_system,
            flows=resources.logs.flows,
            operator=foundation.roles.operator,
        )
        TenantObjectives(self, "Objectives", tenant=tenant, topic=alarms.topic)
        JobGuard(self, "JobGuard", tenant=tenant, roles=foundation.roles, resources=resources, topic=alarms.topic)
        roles = foundation.roles
        BudgetMeter(self, "BudgetMeter", tenant=tenant, role=roles.guard, resources=resources, topic=alarms.topic)
        if tenant.brokered:
            Broker(self, "Broker", tenant=tenant, role=roles.broker, resources=resources, topic=alarms.topic)
        if tenant.resumed:
            JobResumer(self, "Resumer", tenant=tenant, role=roles.resumer, resources=resources, topic=alarms.topic)
        if (percent := tenant.spec.budget.stop_at_percent) is not None:
            BudgetStop(
                self,
                "BudgetStop",
                tenant=tenant,
                budget_name=alarms.budget.ref,
                percent=percent,
                submitter=roles.submitter,
                actor=budget_actor,
            )
        if (anomaly_usd := tenant.spec.budget.anomaly_usd) is not None:
            SpendingWatch(self, "Spending", tenant=tenant, anomaly_usd=anomaly_usd)
        cluster: TenantCluster | TenantHyperPod | None = None
        if (machines := tenant.spec.cluster) is not None and tenant.hyperpod:
            cluster = TenantHyperPod(self, "Cluster", tenant=tenant, spec=machines, resources=resources)
        elif machines is not None:
            cluster = TenantCluster(self, "Cluster", tenant=tenant, spec=machines, resources=resources)
        queues = None if tenant.queued else TenantQueues(self, "Queues", tenant=tenant)
        if tenant.queued:
            TenantShares(self, "Shares", tenant=tenant)
        PublishedContract(
            self,
            "Contract",
            tenant=tenant,
            roles=foundation.roles,
            resources=resources,
            queues=queues,
            cluster=cluster,
        )
