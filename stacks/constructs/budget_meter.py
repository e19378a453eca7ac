"""The live meter: every five minutes, what the tenant's jobs have taken of the month's dollars and GPU-hours.

The broker holds a job against the quota before it starts, AWS's budget hears of the bill hours later; this is what is
between them. It takes the detective's role, which looks at the tenant's jobs and stops them, and nothing else.
"""

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from constructs import Construct

from stacks.constructs.broker import gpus_of, prices_of
from stacks.constructs.functions import function_code, ring, tenant_function
from stacks.constructs.permissions import TenantResources
from stacks.naming import TenantScope

EVERY = Duration.minutes(5)
TIME_LIMIT = Duration.minutes(4)
"""A month's jobs are listed, and described once each: the first look after a pause is the longest."""

FAILURES = {
    "NIST.800.53.R5-LambdaDLQ": (
        "A look that failed is made up for by the next one, five minutes later; three in a row ring the tenant's topic."
    )
}


class BudgetMeter(Construct):
    """The function and its schedule; alarms at the tenant's warning, at 100 %, and where it can't look."""

    function: lambda_.Function

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        role: iam.Role,
        resources: TenantResources,
        topic: sns.ITopic,
    ) -> None:
        super().__init__(scope, construct_id)
        self._tenant = tenant
        self.function = tenant_function(
            self,
            description=f"Meters what the training jobs of tenant {tenant.name} cost",
            handler="trainyard.functions.budget_meter.handler",
            code=function_code(("budget_meter", "job_meter")),
            role=role,
            resources=resources,
            settings=("METER", meter_settings(tenant)),
            timeout=TIME_LIMIT,
            memory_mib=256,
            findings=FAILURES,
        )
        events.Rule(
            self,
            "Schedule",
            description=f"When the budget of tenant {tenant.name} is looked at",
            schedule=events.Schedule.rate(EVERY),
            targets=[targets.LambdaFunction(self.function)],
        )
        self._alarms(topic)

    def metric_used(self) -> cloudwatch.Metric:
        """Percent of the quota that is nearer to its end."""
        return cloudwatch.Metric(
            namespace=_namespace(self._tenant),
            metric_name=f"BudgetUsedPercent-{self._tenant.environment.name}",
            statistic="Maximum",
            period=EVERY,
        )

    def _alarms(self, topic: sns.ITopic) -> None:
        name, budget = self._tenant.name, self._tenant.spec.budget
        ends = "what runs saves and is stopped" if budget.when_spent == "stop" else "what runs goes on"
        percent = budget.warn_at_percent
        for construct_id, metric, threshold, periods, text in (
            ("Warning", self.metric_used(), percent, 1, f"{percent:g} % of the month's budget are used"),
            ("Spent", self.metric_used(), 100, 1, f"the month's budget is spent: no job starts, {ends}"),
            ("Blind", self.function.metric_errors(period=EVERY), 1, 3, "the meter can't look; its log says why"),
        ):
            ring(
                self,
                construct_id,
                metric=metric,
                topic=topic,
                description=f"Tenant {name}: {text}. trainyard cost tells by whom.",
                threshold=threshold,
                periods=periods,
            )


def meter_settings(tenant: TenantScope) -> dict[str, object]:
    """What `trainyard/functions/budget_meter.py` knows of the tenant. Prices are text: decimal numbers stay exact."""
    budget = tenant.spec.budget
    ways = {"on_demand": prices_of(tenant), "spot": prices_of(tenant, spot=True)}
    rates = {
        kind: {way: str(prices[kind]) for way, prices in ways.items() if kind in prices}
        for kind in tenant.instance_types
    }
    return {
        "tenant": tenant.name,
        "environment": tenant.environment.name,
        "namespace": _namespace(tenant),
        "prefixes": tenant.job_prefixes,
        "rates": rates,
        "gpus": gpus_of(tenant),
        "budget": budget.model_dump(mode="json", include={"monthly_usd", "monthly_gpu_hours", "when_spent"}),
        "queues": sorted(tenant.training_queues.values()) if tenant.queued else [],
    }


def _namespace(tenant: TenantScope) -> str:
    return f"trainyard/{tenant.name}"
