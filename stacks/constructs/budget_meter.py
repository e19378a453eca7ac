"""The live meter: every five minutes, and as a job ends, what the tenant's jobs have taken of the month's quotas.

The broker holds a job against the quota before it starts, AWS's budget hears of the bill hours later; this is what is
between them. It takes the detective's role, which looks at the tenant's jobs and stops them, and nothing else.
"""

from functools import partial

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
from stacks.constructs.job_events import ENDED, named, state_changes
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
    """The function and its schedule; alarms at the tenant's warning, at 100 %, where it fails or isn't called."""

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
            description=f"When the budget of tenant {tenant.name} is looked at: by the clock, and as its jobs end",
            schedule=events.Schedule.rate(EVERY),
            # By an end at once: what a job has taken is final then, but for a warm pool's waiting, and may be the last
            # of the quota. Of many that end at once each has its look: what one has stopped another stops in vain.
            event_pattern=state_changes(ENDED, named(tenant)),
            targets=[targets.LambdaFunction(self.function)],
        )
        self._alarms(topic)

    def metric_used(self) -> cloudwatch.Metric:
        """Percent of the quota that is nearer to its end."""
        return self._metric("BudgetUsedPercent", "Maximum")

    def _metric(self, name: str, statistic: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=_namespace(self._tenant),
            metric_name=f"{name}-{self._tenant.environment.name}",
            statistic=statistic,
            period=EVERY,
        )

    def _alarms(self, topic: sns.ITopic) -> None:
        budget, percent = self._tenant.spec.budget, self._tenant.spec.budget.warn_at_percent
        ends = "what runs saves and is stopped" if budget.when_spent == "stop" else "what runs goes on"
        if self._tenant.brokered:
            ends = f"the broker starts no job, {ends}"
        unpriced = (
            "jobs run on machines without a known price, and in no dollar of the budget; the meter's log says which"
        )
        missing, tell = cloudwatch.TreatMissingData, partial(ring, self, topic=topic)

        costs = f"trainyard cost --environment {self._tenant.environment.name} --tenant {self._tenant.name} --by job"

        def said(text: str, then: str = f"{costs} tells by whom: docs/runbooks/README.md") -> str:
            return f"Tenant {self._tenant.name}: {text}. {then}."

        logs = f"Why: {self._tenant.logs_command}, docs/runbooks/README.md"

        # A meter that doesn't look says nothing of the budget: what rang goes on to ring.
        for construct_id, metric, threshold, text in (
            ("Warning", self.metric_used(), percent, f"{percent:g} % of the month's budget are used"),
            ("Spent", self.metric_used(), 100, f"the month's budget is spent: {ends}"),
            ("Unpriced", self._metric("UnpricedJobs", "Maximum"), 1, unpriced),
        ):
            tell(construct_id, metric=metric, description=said(text), threshold=threshold, no_figure=missing.IGNORE)
        self._alarm_of_waits(topic)
        errors, text = self.function.metric_errors(period=EVERY), "the meter fails"
        tell("Blind", metric=errors, description=said(text, logs), periods=3)
        text = "the meter wasn't called for a quarter of an hour (or never yet)"
        # Lambda's own count of calls, failed ones too, which Blind tells: a job of another tenant can write figures
        # into this namespace (docs/isolation.md).
        looks = self.function.metric_invocations(period=EVERY)
        tell(
            "Silent", metric=looks, description=said(text, logs), periods=3, is_below=True, no_figure=missing.BREACHING
        )

    def _alarm_of_waits(self, topic: sns.ITopic) -> None:
        """A job tells of its wait once that is over; this rings while it lasts."""
        where = f"--environment {self._tenant.environment.name}"
        (queue,) = (one for one in self._tenant.spec.objectives.applied() if one.name == "queue")
        text = (
            f"Tenant {self._tenant.name}: a job has waited over {queue.limit / 60:g} minutes for machines, and still"
            f" waits. trainyard jobs --tenant {self._tenant.name} {where} lists it;"
            f" scripts/runbooks/capacity_or_quota_short JOB {where}, docs/runbooks/capacity_or_quota_short.md"
        )
        metric = self._metric("LongestWaitSeconds", "Maximum")
        ring(self, "Waiting", metric=metric, topic=topic, description=text, threshold=queue.limit)


def meter_settings(tenant: TenantScope) -> dict[str, object]:
    """What `trainyard/functions/budget_meter.py` knows of the tenant. Prices are text: decimal numbers stay exact.

    All of the environment's types, and not the tenant's present ones alone: this month's jobs may have run on others.
    """
    budget, region = tenant.spec.budget, tenant.environment.region
    kinds = sorted({*tenant.instance_types, *tenant.environment.max_instances})
    ways = {"on_demand": prices_of(kinds, region), "spot": prices_of(kinds, region, spot=True)}
    rates = {kind: {way: str(prices[kind]) for way, prices in ways.items() if kind in prices} for kind in kinds}
    return {
        "tenant": tenant.name,
        "environment": tenant.environment.name,
        "namespace": _namespace(tenant),
        "prefixes": tenant.job_prefixes,
        "rates": rates,
        "gpus": gpus_of(kinds),
        "budget": budget.model_dump(mode="json", include={"monthly_usd", "monthly_gpu_hours", "when_spent"}),
        # Names, which Batch takes as it takes ARNs: Lambda has 4,096 bytes for all of this.
        "queues": sorted(arn.rpartition("/")[2] for arn in tenant.training_queues.values()) if tenant.queued else [],
    }


def _namespace(tenant: TenantScope) -> str:
    return f"trainyard/{tenant.name}"
