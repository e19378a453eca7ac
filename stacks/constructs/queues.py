"""A tenant's training queues: AWS Batch holds a queue's jobs back while its share of the machines is taken.

Nothing submits to them yet: the broker (and the launcher where there is none) hands jobs to SageMaker itself, and
refuses what the running jobs leave no room for. Batch gives its training jobs names of its own (`AWSBatch...`), by
which no policy here tells a tenant's jobs.
"""

from aws_cdk import aws_batch as batch
from constructs import Construct

from stacks.naming import TenantScope
from trainyard.spec.platform import QueueSpec

SHARE_DECAY_SECONDS = 86_400
"""How long past use weighs against a share: a day, so that yesterday's large job doesn't cost today's turn."""


class TrainingQueue(Construct):
    """One queue with its service environment, which bounds the instances that all its jobs hold together."""

    queue: batch.CfnJobQueue

    def __init__(self, scope: Construct, construct_id: str, *, spec: QueueSpec) -> None:
        super().__init__(scope, construct_id)
        capacity = batch.CfnServiceEnvironment(
            self,
            "Capacity",
            service_environment_type="SAGEMAKER_TRAINING",
            capacity_limits=[
                batch.CfnServiceEnvironment.CapacityLimitProperty(
                    capacity_unit="NUM_INSTANCES", max_capacity=spec.max_instances
                )
            ],
        )
        shares = batch.CfnSchedulingPolicy(
            self,
            "Shares",
            fairshare_policy=batch.CfnSchedulingPolicy.FairsharePolicyProperty(
                share_decay_seconds=SHARE_DECAY_SECONDS, compute_reservation=0
            ),
        )
        self.queue = batch.CfnJobQueue(
            self,
            "Queue",
            job_queue_type="SAGEMAKER_TRAINING",
            priority=1,
            state="ENABLED",
            scheduling_policy_arn=shares.attr_arn,
            service_environment_order=[
                batch.CfnJobQueue.ServiceEnvironmentOrderProperty(
                    order=1, service_environment=capacity.attr_service_environment_arn
                )
            ],
        )


class TenantQueues(Construct):
    """All queues of a tenant, by the names of the environment file."""

    queues: dict[str, TrainingQueue]

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope) -> None:
        super().__init__(scope, construct_id)
        self.queues = {name: TrainingQueue(self, name, spec=spec) for name, spec in tenant.spec.queues.items()}
