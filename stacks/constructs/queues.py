"""Training queues: AWS Batch holds jobs back while a tenant's share of the machines is taken.

The platform has a queue for each instance type, because Batch counts a share by type, and five types at most; each
tenant that queues (`submission: queue`) has its share of them in its own stack. Where the broker or the launcher hands
jobs to SageMaker itself, and refuses what the running ones leave no room for, a tenant has a queue of its own for each
of the environment file's, to which nothing submits.
"""

from aws_cdk import aws_batch as batch
from constructs import Construct

from stacks.naming import TenantScope
from trainyard.spec.platform import EnvironmentSpec, QueueSpec
from trainyard.spec.shares import borrow_percent, queue_name, strategy

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


class SharedQueues(Construct):
    """The platform's queues, one for each instance type and each twenty tenants; they cost nothing while empty.

    A service environment that counts by instance type serves one queue alone (Batch user guide, "Create quota
    management resources"), so each queue has its own. They are there whoever submits jobs now: a tenant's change to and
    from `submission: queue` then changes nothing here, unless it is one of the twenty-first on.
    """

    def __init__(self, scope: Construct, construct_id: str, *, environment: EnvironmentSpec) -> None:
        super().__init__(scope, construct_id)
        policy = batch.CfnSchedulingPolicy(
            self,
            "Policy",
            # The only strategy that there is: who asked first borrows first.
            quota_share_policy=batch.CfnSchedulingPolicy.QuotaSharePolicyProperty(
                idle_resource_assignment_strategy="FIFO"
            ),
        )
        for (kind, number), count in environment.queue_capacity().items():
            name = queue_name(environment.name, kind, number)
            capacity = batch.CfnServiceEnvironment(
                self,
                f"Capacity-{name}",
                service_environment_type="SAGEMAKER_TRAINING",
                capacity_limits=[
                    batch.CfnServiceEnvironment.CapacityLimitProperty(capacity_unit=kind, max_capacity=count)
                ],
            )
            batch.CfnJobQueue(
                self,
                f"Queue-{name}",
                job_queue_name=name,
                job_queue_type="SAGEMAKER_TRAINING",
                priority=1,
                state="ENABLED",
                scheduling_policy_arn=policy.attr_arn,
                service_environment_order=[
                    batch.CfnJobQueue.ServiceEnvironmentOrderProperty(
                        order=1, service_environment=capacity.attr_service_environment_arn
                    )
                ],
            )


class TenantShares(Construct):
    """The tenant's share of the queue of each of its types: what is its own, and what it may borrow."""

    def __init__(self, scope: Construct, construct_id: str, *, tenant: TenantScope) -> None:
        super().__init__(scope, construct_id)
        environment = tenant.environment
        most, guaranteed = environment.most(tenant.name), environment.guaranteed(tenant.name)
        for kind in tenant.instance_types:
            count = guaranteed[kind]
            percent = borrow_percent(count, most[kind])
            batch.CfnQuotaShare(
                self,
                kind.removeprefix("ml.").replace(".", "-"),
                quota_share_name=tenant.name,
                # By name: an import would keep the platform from ever dropping a queue.
                job_queue=environment.training_queue(kind, tenant.name),
                capacity_limits=[
                    batch.CfnQuotaShare.QuotaShareCapacityLimitProperty(capacity_unit=kind, max_capacity=count)
                ],
                resource_sharing_configuration=batch.CfnQuotaShare.QuotaShareResourceSharingConfigurationProperty(
                    strategy=strategy(tenant.spec.share, count, most[kind]), borrow_limit=percent or None
                ),
                # Jobs have no priorities, so that none of a tenant's own goes before another.
                preemption_configuration=batch.CfnQuotaShare.QuotaSharePreemptionConfigurationProperty(
                    in_share_preemption="DISABLED"
                ),
                state="ENABLED",
            )
