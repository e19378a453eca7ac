"""What EventBridge tells of training jobs: the patterns by which a tenant's rules hear of them."""

from collections.abc import Mapping, Sequence

from aws_cdk import aws_events as events

from stacks.naming import TenantScope

ENDED = ("Completed", "Failed", "Stopped")
"""The states of a job in which it takes no more machines."""


def named(tenant: TenantScope) -> dict[str, object]:
    """The jobs that have one of the tenant's names."""
    return {"TrainingJobName": [{"prefix": prefix} for prefix in tenant.job_prefixes]}


def state_changes(statuses: Sequence[str], jobs: Mapping[str, object]) -> events.EventPattern:
    """A training job gets into one of these states. `jobs`: whose, as the event's detail tells it."""
    return events.EventPattern(
        source=["aws.sagemaker"],
        detail_type=["SageMaker Training Job State Change"],
        detail={"TrainingJobStatus": list(statuses), **jobs},
    )
