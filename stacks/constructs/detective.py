"""The detective: each training job that starts is looked at again, and stopped if it breaks its tenant's rules.

The guard-rails refuse beforehand what IAM has condition keys for. This sees the rest (image, buckets, number of
instances, serverless compute), and whatever a job got past them by: an administrator's call, a service's own role.
"""

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from constructs import Construct

from stacks.constructs.functions import FUNCTIONS_FOLDER, PERIOD, ring, tenant_function
from stacks.constructs.identity import TenantRoles
from stacks.constructs.job_events import named, state_changes
from stacks.constructs.permissions import TenantResources
from stacks.naming import TenantScope

CODE = FUNCTIONS_FOLDER / "job_guard.py"

FAILURES = {
    "NIST.800.53.R5-LambdaDLQ": (
        "A check that failed twice rings the tenant's topic at once (JobNotChecked) and names the job in the log. It "
        "is about a job that runs now: an event in a queue would be read too late."
    )
}

MAX_INLINE_CHARACTERS = 4096
"""CloudFormation: code that stands in the template itself, so that it needs no bucket of assets."""


class JobGuard(Construct):
    """The rule, the function, and an alarm on each of its two outcomes: a job stopped, a job that it couldn't judge."""

    function: lambda_.Function

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        tenant: TenantScope,
        roles: TenantRoles,
        resources: TenantResources,
        topic: sns.ITopic,
    ) -> None:
        super().__init__(scope, construct_id)
        code = CODE.read_text(encoding="utf-8")
        assert len(code) <= MAX_INLINE_CHARACTERS, f"{CODE.name}: {len(code)} characters can't stand in a template"
        self.function = tenant_function(
            self,
            description=f"Re-checks the training jobs of tenant {tenant.name}",
            handler="index.handler",
            code=lambda_.Code.from_inline(code),
            role=roles.guard,
            resources=resources,
            timeout=Duration.minutes(1),
            findings=FAILURES,
        )
        job_roles = [roles.job.role_arn, {"prefix": tenant.each_job_role_pattern.removesuffix("*")}]
        events.Rule(
            self,
            "StartedJobs",
            description=f"Training jobs of tenant {tenant.name}, by name or by role, that have started",
            event_pattern=state_changes(["InProgress"], {"$or": [named(tenant), {"RoleArn": job_roles}]}),
            targets=[
                targets.LambdaFunction(
                    self.function,
                    event=events.RuleTargetInput.from_object(
                        {
                            "job": events.EventField.from_path("$.detail.TrainingJobName"),
                            "rules": job_rules(tenant, roles, resources),
                        }
                    ),
                )
            ],
        )
        self._alarms(tenant, topic)

    def metric_violations(self, tenant: TenantScope) -> cloudwatch.Metric:
        """1 where a job was stopped. The greatest figure, not their sum, which a forged -1 would bring down to nothing:
        a job of another tenant can write into this namespace. With forged ones it can still hold the alarm ringing, so
        that a further stop isn't told (docs/isolation.md)."""
        return cloudwatch.Metric(
            namespace=_namespace(tenant), metric_name=_metric(tenant), statistic="Maximum", period=PERIOD
        )

    def _alarms(self, tenant: TenantScope, topic: sns.ITopic) -> None:
        texts = {
            "JobStopped": (
                self.metric_violations(tenant),
                "a training job broke a rule and was stopped, if it had not ended; job and rule: "
                f"{tenant.logs_command}, docs/runbooks/README.md",
            ),
            "JobNotChecked": (
                self.function.metric_errors(period=PERIOD),
                "a training job that has started could not be re-checked, stopped or counted; look at it by hand: "
                f"{tenant.logs_command}, docs/runbooks/README.md",
            ),
        }
        for name, (metric, text) in texts.items():
            ring(self, name, metric=metric, topic=topic, description=f"Tenant {tenant.name}: {text}.")


def _namespace(tenant: TenantScope) -> str:
    return f"trainyard/{tenant.name}"


def _metric(tenant: TenantScope) -> str:
    return f"JobViolations-{tenant.environment.name}"


def job_rules(tenant: TenantScope, roles: TenantRoles, resources: TenantResources) -> dict[str, object]:
    """What `trainyard/functions/job_guard.py` holds a job against."""
    network, buckets = resources.network, resources.buckets
    most: dict[str, int] = {}
    for queue in tenant.spec.queues.values():
        for kind in queue.instance_types:
            most[kind] = max(most.get(kind, 0), queue.max_instances)
    return {
        "prefixes": tenant.job_prefixes,
        "role": roles.job.role_arn,
        "own_roles": tenant.each_job_role_pattern.removesuffix("*"),
        "subnets": [network.training_subnet.subnet_id],
        "groups": [network.training_security_group.security_group_id],
        "types": most,
        "key": resources.keys.checkpoints.key_arn,
        "files": resources.file_system.resource.ref,
        "places": [f"s3://{bucket.bucket_name}/" for bucket in buckets.all],
        "images": f"{tenant.image_repository}@",
        "seconds": tenant.max_runtime_seconds,
        "plans": list(tenant.training_plans.values()),
        "metric": _metric(tenant),
        "namespace": _namespace(tenant),
    }
