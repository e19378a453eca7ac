"""Shares of the training queues: what of the account's machines each tenant is guaranteed, lends and borrows.

AWS Batch's rules (user guide, "Quota shares"; CreateQuotaShare): a queue takes 20 shares, a share's capacity is counted
by instance type, and what a share may borrow is a percentage of what it is guaranteed.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from trainyard.spec.base import SpecModel, on_change

SHARES_PER_QUEUE = 20
"""Batch: quota shares of one job queue."""

MAX_QUEUED_TENANT_NAME = 14
"""Characters of the name of a tenant that queues. Batch calls a training job `AWSBatch`, the name that was asked for
and 32 characters of its own, SageMaker takes 63: 23 are left, and 8 of them tell the tenant's jobs apart."""

BATCH_PREFIX = "AWSBatch"
"""How the names begin that Batch gives to training jobs."""

Strategy = Literal["RESERVE", "LEND", "LEND_AND_BORROW"]


class ShareSpec(SpecModel):
    """The tenant's part of the training queues, where its jobs wait in them (`submission: queue`)."""

    guaranteed: dict[str, int] = Field(default_factory=dict, json_schema_extra=on_change("update"))
    """Instances by SageMaker type that are the tenant's whenever it has jobs for them, whoever uses them meanwhile.
    Default, type by type: max_instances of its queues, so that nothing is borrowed. What lies between this and
    max_instances is borrowed while it is idle: a job on it is stopped (it saves, and waits again) when its owner has
    work."""
    lend: bool = Field(default=True, json_schema_extra=on_change("update"))
    """Whether others may borrow what the tenant leaves idle. Who borrows must lend."""


class ShareContract(SpecModel):
    """A tenant's share of the queue of one instance type, as deployed."""

    queue: str
    """ARN of the job queue."""
    guaranteed: int
    """Instances that are the tenant's whenever it has work."""
    most: int
    """Instances with what may be borrowed: no job can be larger."""


def borrow_percent(guaranteed: int, most: int) -> int:
    """What a share may borrow on top, in percent of what it is guaranteed, as CreateQuotaShare's borrowLimit counts.

    Rounded up: the whole instances below are then `most`, as long as a percent is less than an instance. Above 100
    guaranteed ones rounded down where that would be more: nobody gets past its max_instances.
    """
    percent = -(-100 * (most - guaranteed) // guaranteed)
    return percent if guaranteed * percent // 100 <= most - guaranteed else percent - 1


def reachable(guaranteed: int, most: int) -> int:
    """What a share may hold of the `most` that was asked for: less than that only where a percent is more than an
    instance."""
    return guaranteed + guaranteed * borrow_percent(guaranteed, most) // 100


def strategy(spec: ShareSpec, guaranteed: int, most: int) -> Strategy:
    """Batch's word for what the share does with idle machines."""
    if most > guaranteed:
        return "LEND_AND_BORROW"
    return "LEND" if spec.lend else "RESERVE"


def shard(network_index: int) -> int:
    """Which of a type's queues takes the tenant. By its stated number, so that nobody's queue depends on who else is
    there: twenty numbers share a queue."""
    return network_index // SHARES_PER_QUEUE


def queue_name(environment: str, kind: str, number: int) -> str:
    """The job queue of an instance type: stated, so that a tenant's policies can name it without importing it."""
    return f"trainyard-{environment}-{kind.removeprefix('ml.').replace('.', '-')}-{number}"


def refusals(name: str, guaranteed: Mapping[str, int], most: Mapping[str, int], spec: ShareSpec) -> list[str]:
    """What is wrong with a tenant's share in itself, each a line that begins with the tenant's field."""
    wrong = [
        f"share.guaranteed: {kind} is no type of the tenant's queues ({', '.join(sorted(most))}); leave it out, or add "
        "it to a queue"
        for kind in sorted(set(spec.guaranteed) - set(most))
    ]
    for kind, count in sorted(spec.guaranteed.items()):
        if kind in most and not 1 <= count <= most[kind]:
            wrong.append(
                f"share.guaranteed.{kind}: {count} is not between 1 and {most[kind]}, the max_instances of the "
                "tenant's queues; raise those, or guarantee fewer"
            )
    borrowing = sorted(kind for kind in most if guaranteed[kind] < most[kind])
    if not wrong and borrowing and not spec.lend:
        wrong.append(
            f"share.lend: false, and {', '.join(borrowing)} is borrowed: who borrows must lend; guarantee all of "
            "max_instances, or leave lend out"
        )
    if len(name) > MAX_QUEUED_TENANT_NAME:
        wrong.append(
            f"submission: queue takes tenants with names of up to {MAX_QUEUED_TENANT_NAME} characters, as Batch adds "
            f"40 to each job's; {name} has {len(name)}: take submission: broker, or a shorter name"
        )
    return wrong
