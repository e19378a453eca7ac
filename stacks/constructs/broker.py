"""The broker: the function that hands a tenant's jobs to SageMaker, so that no role of the tenant's people needs to."""

from collections.abc import Iterable

from aws_cdk import Annotations, Duration
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from constructs import Construct

from stacks.constructs.functions import PERIOD, function_code, ring, tenant_function
from stacks.constructs.job_events import ENDED, state_changes
from stacks.constructs.permissions import TenantResources
from stacks.naming import TenantScope
from trainyard.errors import InputError
from trainyard.hardware import instance, price

MODULES = (
    *("broker", "broker_answers", "broker_ledger", "broker_queue", "broker_roles", "broker_rules"),
    *("job_meter", "job_resumer", "job_roles", "retry_rules", "training_request"),
)
TIME_LIMIT = Duration.seconds(120)
"""A tenant's jobs of a month are listed, and described once each."""

ASKED_AND_ANSWERED = {
    "NIST.800.53.R5-LambdaDLQ": (
        "It is called by a person who waits for its answer: a call that failed is told to that person, and nothing is "
        "left that a queue could keep."
    )
}


class Broker(Construct):
    """The function with its settings, and an alarm where it fails (a refusal is an answer, no failure)."""

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
        prices = prices_of(tenant.instance_types, tenant.environment.region)
        if unpriced := [kind for kind in tenant.instance_types if kind not in prices]:
            Annotations.of(self).add_warning_v2(
                "trainyard:NoPrice",
                f"tenant {tenant.name}: no price of {', '.join(unpriced)} in {tenant.environment.region} is known: "
                "budget.monthly_usd doesn't hold what they cost",
            )
        settings = {
            "contract": tenant.environment.contract_parameter(tenant.name),
            "prices": prices,
            "gpus": gpus_of(tenant.instance_types),
            "volume_keys": [kind for kind in tenant.instance_types if not instance(kind).local_nvme_gib],
        }
        self.function = tenant_function(
            self,
            name=tenant.broker_name,
            description=f"Submits the training jobs of tenant {tenant.name}",
            handler="trainyard.functions.broker.handler",
            code=function_code(MODULES),
            role=role,
            resources=resources,
            settings=("BROKER", settings),
            timeout=TIME_LIMIT,
            memory_mib=256,
            findings=ASKED_AND_ANSWERED,
        )
        ring(
            self,
            "Failed",
            metric=self.function.metric_errors(period=PERIOD),
            topic=topic,
            description=(
                f"Tenant {tenant.name}: the broker failed, so that {_not_done(tenant)}. Why: "
                f"{tenant.logs_command}, docs/runbooks/README.md."
            ),
        )
        if tenant.isolates_jobs:
            self._remove_roles(tenant)

    def _remove_roles(self, tenant: TenantScope) -> None:
        """The broker is asked to look for roles of jobs that are over: after each end of a job for that job's, by the
        name of the attempt, and each hour for all, as some are over only later (a failed job that nobody resumed, a
        queue's last try)."""
        events.Rule(
            self,
            "EndedJobs",
            description=f"Training jobs of tenant {tenant.name} that have ended: their roles go",
            # By the attempt's own name: of what a queue starts, under names of Batch's, Batch tells the end.
            event_pattern=state_changes(ENDED, {"TrainingJobName": [{"prefix": f"{tenant.name}-"}]}),
            targets=[self._sweep("$.detail.TrainingJobName")],
        )
        if tenant.queued:
            events.Rule(
                self,
                "EndedQueuedJobs",
                description=f"Queued jobs of tenant {tenant.name} that have ended: their roles go",
                event_pattern=events.EventPattern(
                    source=["aws.batch"],
                    detail_type=["Batch Service Job State Change"],
                    detail={
                        "status": ["SUCCEEDED", "FAILED"],
                        "jobName": [{"prefix": f"{tenant.name}-"}],
                        # Not each by name: EventBridge takes 2,048 characters of a pattern, less than 26 queues have.
                        "jobQueue": [{"prefix": tenant.training_queue_prefix}],
                    },
                ),
                targets=[self._sweep("$.detail.jobName")],
            )
        events.Rule(
            self,
            "EachHour",
            description=f"Roles of tenant {tenant.name}'s jobs that are over go",
            schedule=events.Schedule.rate(Duration.hours(1)),
            targets=[self._sweep()],
        )

    def _sweep(self, ended: str = "") -> targets.LambdaFunction:
        """`ended`: where the event has the name of the attempt that is over."""
        said = {"sweep": True, **({"ended": events.EventField.from_path(ended)} if ended else {})}
        return targets.LambdaFunction(self.function, event=events.RuleTargetInput.from_object(said))


def _not_done(tenant: TenantScope) -> str:
    """What an error of the function may mean."""
    if not tenant.isolates_jobs:
        return "a job was not submitted"
    return "a job was not submitted, or roles of jobs that are over still stand (each hour it looks for them again)"


def prices_of(kinds: Iterable[str], region: str, *, spot: bool = False) -> dict[str, float]:
    """USD an instance-hour, on demand or spot, of each of the types whose price the shipped table has."""
    known = {}
    for kind in kinds:
        try:
            known[kind] = price(kind, region, spot=spot).usd_per_hour
        except InputError:
            continue
    return known


def gpus_of(kinds: Iterable[str]) -> dict[str, int]:
    """GPUs of an instance of each type: what an hour of it takes of budget.monthly_gpu_hours."""
    return {kind: instance(kind).num_gpus for kind in kinds}
