"""The resumer: starts failed jobs again that ask for it (`recovery.max_resumes`), where nobody else at AWS does.

SageMaker starts again what spot capacity takes, and its own errors three times; a training queue retries by its rules.
This is for the rest, and only with a broker, which submits: the resumer itself starts no job.
"""

from aws_cdk import Duration
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from constructs import Construct

from stacks.constructs.broker import TIME_LIMIT
from stacks.constructs.functions import PERIOD, function_code, ring, tenant_function
from stacks.constructs.job_events import named, state_changes
from stacks.constructs.permissions import TenantResources
from stacks.naming import TenantScope

FAILURES = {
    "NIST.800.53.R5-LambdaDLQ": (
        "A resume that failed rings the tenant's topic (NotResumed) and names the job in the log, and the job's "
        "record says where it stands, and `trainyard resume` goes on from there. A queue would keep nothing more."
    )
}


class JobResumer(Construct):
    """The rule, the function, and an alarm where it could not do what it should (a refusal is an answer)."""

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
        places = {
            "data": resources.buckets.data.bucket_name,
            "checkpoints": resources.buckets.checkpoints.bucket_name,
            "broker": tenant.broker_name,
        }
        self.function = tenant_function(
            self,
            description=f"Resumes failed training jobs of tenant {tenant.name}",
            handler="trainyard.functions.job_resumer.handler",
            code=function_code(("job_resumer",)),
            role=role,
            resources=resources,
            settings=("RESUMER", places),
            # It waits for the broker, and writes down what that answers.
            timeout=TIME_LIMIT.plus(Duration.seconds(30)),
            findings=FAILURES,
        )
        events.Rule(
            self,
            "FailedJobs",
            description=f"Training jobs of tenant {tenant.name} that have failed",
            event_pattern=state_changes(["Failed"], named(tenant)),
            targets=[
                targets.LambdaFunction(
                    self.function,
                    event=events.RuleTargetInput.from_object(
                        {"job": events.EventField.from_path("$.detail.TrainingJobName")}
                    ),
                )
            ],
        )
        ring(
            self,
            "NotResumed",
            metric=self.function.metric_errors(period=PERIOD),
            topic=topic,
            description=(
                f"Tenant {tenant.name}: a failed training job could not be resumed, if it asks for that. Which, and "
                f"why: {tenant.logs_command}; by hand it is done by trainyard resume JOB --environment "
                f"{tenant.environment.name}, docs/runbooks/README.md."
            ),
        )
