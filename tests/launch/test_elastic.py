"""`trainyard resume --set`: other machines, the same batch; what would be another run is refused."""

import pytest

from trainyard.errors import InputError
from trainyard.launch.elastic import revised, reviser
from trainyard.launch.launcher import new_record
from trainyard.launch.record import JobRecord
from trainyard.spec.job import JobSpec, ParallelismSpec, ResolvedJob


def record_of(job: JobSpec, resolved: ResolvedJob, backend: str = "sagemaker") -> JobRecord:
    return new_record(
        job,
        resolved,
        job_id="acme-tiny-20260131120000-1a2b",
        backend=backend,
        environment="test",
        plan={},
        image="image",
        channels=(),
        forced=(),
        launched_by="arn",
    )


def test_half_the_hosts_accumulate_twice_as_much(job: JobSpec, resolved: ResolvedJob) -> None:
    before = record_of(job, resolved)
    revise = reviser(["compute.instance_count=1", "parallelism.data_replicate=1"], None)
    assert revise is not None
    after = revise(before)
    assert (before.resolved.num_hosts, after.resolved.num_hosts) == (2, 1)
    assert after.spec.compute.instance_count == after.resolved.spec.compute.instance_count == 1
    assert after.resolved.gradient_accumulation_steps == 2 * before.resolved.gradient_accumulation_steps
    assert after.resolved.spec.training == before.resolved.spec.training
    # The inputs and the checkpoints are the launched job's.
    assert after.resolved.spec.data == before.resolved.spec.data
    assert after.checkpoint_destination == before.checkpoint_destination == after.resolved.spec.checkpoint.destination


def test_a_layout_that_does_not_fit_the_machines_is_refused(job: JobSpec, resolved: ResolvedJob) -> None:
    with pytest.raises(InputError, match="make the two equal"):
        revised(record_of(job, resolved), ["compute.instance_count=1"], None)
    with pytest.raises(InputError, match="--processes is for jobs on this machine"):
        revised(record_of(job, resolved), [], 3)


def test_on_this_machine_the_layout_or_processes_says_how_many(job: JobSpec, resolved: ResolvedJob) -> None:
    machine = {"backend": "local", "instance_type": None, "instance_count": 1, "spot": False, "max_wait_hours": None}
    local = resolved.spec.compute.model_copy(update=machine)
    here = job.model_copy(update={"compute": local})
    there = resolved.model_copy(update={"spec": resolved.spec.model_copy(update={"compute": local})})
    record = record_of(here, there, backend="local")
    assert revised(record, ["parallelism=auto"], 4).resolved.world_size == 4
    assert revised(record, ["parallelism.data_replicate=4"], None).resolved.world_size == 4
    assert revised(record, ["checkpoint.keep_last=9"], None).resolved.world_size == 2
    assert isinstance(revised(record, [], 2).spec.parallelism, ParallelismSpec)


@pytest.mark.parametrize(
    "override", ["training.global_batch_size=4", "data.packing=false", "checkpoint.destination=/tmp/x", "name=b"]
)
def test_what_would_be_another_run_is_refused(override: str) -> None:
    with pytest.raises(InputError, match="a resume keeps the job's data, model, batch and checkpoints"):
        reviser([override], None)


def test_nothing_asked_for_changes_nothing() -> None:
    assert reviser([], None) is None
