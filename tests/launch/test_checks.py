"""What is refused before submitting: quotas always, the plan's refusals unless forced."""

from typing import Any

import pytest

from trainyard import planner
from trainyard.errors import InputError
from trainyard.functions import broker_rules
from trainyard.launch.checks import (
    RunningJob,
    check_destination,
    check_queue,
    refused_by_plan,
    refused_hours,
    warned_by_plan,
    warned_by_recovery,
)
from trainyard.launch.kubernetes import launch_on_tenants_kubernetes
from trainyard.launch.ray import launch_on_tenants_ray
from trainyard.planner.results import HostMemoryPlan
from trainyard.spec.job import CheckpointSpec, JobSpec
from trainyard.spec.platform import TenantContract


def with_compute(job: JobSpec, **changes: Any) -> JobSpec:
    return job.model_copy(update={"compute": job.compute.model_copy(update=changes)})


def test_the_queue_that_offers_the_type_takes_the_job(job: JobSpec, contract: TenantContract) -> None:
    assert check_queue(job, contract) == "gpu"
    assert check_queue(with_compute(job, queue="gpu"), contract) == "gpu"
    assert check_queue(with_compute(job, instance_type="ml.g6e.8xlarge", instance_count=1), contract) == "small"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instance_count": 5}, r"instance_count 5: over the quota of tenant acme, which is 4 x ml.p5.4xlarge"),
        ({"instance_type": "ml.p4d.24xlarge"}, "no queue of tenant acme offers it; it has: gpu .*small"),
        ({"queue": "huge"}, "has no such queue; it has: gpu"),
        ({"queue": "small"}, "no queue of tenant acme offers it"),
        ({"instance_type": "ml.g6e.8xlarge"}, "one-host jobs only"),
        ({"instance_type": "ml.g5.xlarge"}, "has no EFA"),
    ],
)
def test_what_no_queue_takes(job: JobSpec, contract: TenantContract, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_queue(with_compute(job, **changes), contract)


@pytest.mark.parametrize("launch", [launch_on_tenants_kubernetes, launch_on_tenants_ray])
def test_a_cluster_that_knows_no_types_is_told_one(job: JobSpec, contract: TenantContract, launch: Any) -> None:
    unnamed = with_compute(job, instance_type=None).model_copy(update={"tenant": contract.tenant})
    with pytest.raises(InputError, match=r"compute\.instance_type: is missing; name the cluster's machines"):
        launch(unnamed, contract, account=None, launcher=None)


def test_running_jobs_count_against_their_queue(job: JobSpec, contract: TenantContract) -> None:
    two = RunningJob("acme-a", "ml.p5.4xlarge", 2)
    assert check_queue(job, contract, [two, RunningJob("acme-b", "ml.g6e.8xlarge", 2)]) == "gpu"
    one = RunningJob("acme-c", "ml.g5.xlarge", 1)  # another type, but of the same queue
    with pytest.raises(InputError, match=r"3 of the 4 instances of queue gpu are held by acme-a \(2\), acme-c \(1\)"):
        check_queue(job, contract, [two, one])
    spare = contract.queues["gpu"].model_copy(update={"max_instances": 2})
    roomier = contract.model_copy(update={"queues": {**contract.queues, "spare": spare}})
    both = r"acme-c \(1\) \(a job counts in each queue that offers its type: "
    with pytest.raises(InputError, match=rf"queue gpu .*{both}gpu, spare\).*queue spare .*{both}spare, gpu\)"):
        check_queue(job, roomier, [two, one])
    held = [{"name": one.name, "type": one.instance_type, "count": one.instance_count} for one in (two, one)]
    with pytest.raises(broker_rules.Refused, match=rf"queue gpu .*{both}gpu, spare\).*queue spare .*{both}spare, gpu"):
        broker_rules.check_quota(job.compute.model_dump(), 2, roomier.model_dump(mode="json"), held)
    large = contract.model_copy(
        update={"queues": {**contract.queues, "spare": spare.model_copy(update={"max_instances": 5})}}
    )
    assert check_queue(job, large, [two, one]) == "spare"


def test_hours_over_the_tenants(job: JobSpec, contract: TenantContract) -> None:
    assert refused_hours(with_compute(job, max_hours=24), contract) == []
    (reason,) = refused_hours(with_compute(job, max_hours=25), contract)
    assert "over the 24 hours" in reason


def test_the_plan_refuses_memory_money_and_time(job: JobSpec) -> None:
    plan = planner.plan(job)
    assert refused_by_plan(plan) == []
    assert plan.cost is not None
    dear = plan.cost.model_copy(update={"planned_usd": 150.0, "expected_hours": 3.0})
    too_much = plan.model_copy(update={"fits": False, "cost": dear})
    memory, hours, money = refused_by_plan(too_much)
    assert plan.chosen.layout in memory
    assert "max_hours 2 is less than the 3.0 hours" in hours
    assert "max_usd 100.00 is less than the 150.00 USD" in money


def test_a_host_that_is_too_small_has_advice_of_its_own_and_what_is_assumed_warns(job: JobSpec) -> None:
    plan = planner.plan(job)

    def with_host(**parts: float) -> planner.Plan:
        host = {"processes_gib": 40.0, "checkpoint_gib": 10.0, "offloaded_gib": 0.0, "rank_gib": 6.0, **parts}
        host["total_gib"] = host["processes_gib"] + host["checkpoint_gib"] + host["offloaded_gib"]
        changed = plan.chosen.model_copy(update={"host": HostMemoryPlan(**host), "chosen": True})
        return plan.model_copy(update={"fits": False, "configurations": (changed,), "cost": None})

    large = with_host(offloaded_gib=100.0, available_gib=90.0)
    (refusal,) = refused_by_plan(large)
    assert "checkpoint.asynchronous: false" in refusal and "recompute" not in refusal
    assert warned_by_plan(large, job) == []
    tight = with_host(available_gib=45.0)
    assert refused_by_plan(tight) == [], "40 of the 50 are assumed"
    (warning,) = warned_by_plan(tight, job)
    assert "which is assumed" in warning and "\n" not in warning
    assert warned_by_plan(plan, job) == []


def test_a_stop_that_leaves_no_time_for_a_step_and_its_save_is_said(job: JobSpec) -> None:
    plan = planner.plan(job)
    assert warned_by_plan(plan, job) == [] and plan.chosen.time is not None and plan.checkpoint is not None
    slow = plan.chosen.model_copy(update={"time": plan.chosen.time.model_copy(update={"step_seconds_high": 100.0})})
    s3 = next(tier for tier in plan.checkpoint.tiers if tier.name == "s3").model_copy(update={"save_seconds": 40.0})
    checkpoint = plan.checkpoint.model_copy(update={"tiers": (s3,)})
    late = plan.model_copy(update={"configurations": (slow,), "checkpoint": checkpoint})
    (warning,) = warned_by_plan(late, job)
    assert "leaves 110 s; a step (up to 100 s) and its save to s3 (40 s) take 140 s" in warning
    assert warned_by_plan(late, job, is_on_this_machine=True) == []
    # The hosts' own disks go with the machines: what counts is where the job's checkpoints stay.
    fsx = s3.model_copy(update={"name": "fsx", "save_seconds": 5.0})
    tiered = late.model_copy(update={"checkpoint": checkpoint.model_copy(update={"tier": "nvme", "tiers": (s3, fsx)})})
    there = {"local_directory": "/opt/ml/near", "destination": "/fsx/checkpoints"}
    on_fsx = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=there)})
    assert warned_by_plan(tiered, on_fsx) == [] and warned_by_plan(tiered, job) == [warning]


def test_who_has_a_person_start_it_again_is_told(job: JobSpec, contract: TenantContract) -> None:
    brokered = contract.model_copy(update={"broker": "acme-broker"})
    (warning,) = warned_by_recovery(job, brokered)
    assert "trainyard resume" in warning and "with 3" in warning
    (alone,) = warned_by_recovery(job, contract.model_copy(update={"broker": ""}))
    assert "trainyard resume" in alone and "by itself" not in alone, "it has no resumer"
    resumed = job.model_copy(update={"recovery": job.recovery.model_copy(update={"max_resumes": 1})})
    assert warned_by_recovery(resumed, brokered) == []


def test_a_tenants_checkpoints_lie_in_its_bucket(job: JobSpec, contract: TenantContract) -> None:
    check_destination(job, contract)
    for given in ("s3://globex-checkpoints/x", "/fsx/checkpoints"):
        moved = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"destination": given})})
        with pytest.raises(InputError, match=f"checkpoint.destination {given}: jobs of tenant acme save to s3://acme-"):
            check_destination(moved, contract)


@pytest.mark.parametrize("given", ["ftp://x/y", "fsx://x", "s3://", ""])
def test_a_destination_is_a_folder_or_a_prefix(given: str) -> None:
    with pytest.raises(ValueError, match="destination"):
        CheckpointSpec(destination=given)
    for good in ("s3://bucket/x", "/fsx/x", "out"):
        assert CheckpointSpec(destination=good).destination == good


def test_what_the_plan_does_not_know_refuses_nothing(job: JobSpec) -> None:
    unknown = planner.plan(job).model_copy(update={"fits": None, "cost": None, "affordable": None})
    assert refused_by_plan(unknown) == []
