"""`trainyard resume --set`: other machines, the same batch; what would be another run is refused."""

from pathlib import Path

import pytest

from trainyard.errors import InputError
from trainyard.launch.elastic import revised, reviser
from trainyard.launch.launcher import new_record
from trainyard.launch.record import JobRecord
from trainyard.spec.job import ElasticSpec, JobSpec, ParallelismSpec, ResolvedJob


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


def test_who_was_refused_by_the_networks_floor_may_go_on_with_a_warning(job: JobSpec, resolved: ResolvedJob) -> None:
    """As the refusal advises; and whoever wants to know which network NCCL chose need not launch anew."""
    record = record_of(job, resolved)
    revise = reviser(["preflight.collectives=warn", "preflight.nccl_log=true"], None)
    assert revise is not None
    after = revise(record).resolved.spec
    assert (after.preflight.collectives, after.preflight.nccl_log) == ("warn", True)
    assert after.data == record.resolved.spec.data
    with pytest.raises(InputError, match="leave preflight out"):
        alone = ["compute.instance_count=1", "parallelism=auto", "preflight.collectives=stop"]
        revised(record, alone, None)


def test_a_layout_that_does_not_fit_the_machines_is_refused(job: JobSpec, resolved: ResolvedJob) -> None:
    with pytest.raises(InputError, match="make the two equal"):
        revised(record_of(job, resolved), ["compute.instance_count=1"], None)
    with pytest.raises(InputError, match="--processes is for jobs on this machine"):
        revised(record_of(job, resolved), [], 3)


def local_record(job: JobSpec, resolved: ResolvedJob) -> JobRecord:
    machine = {"backend": "local", "instance_type": None, "instance_count": 1, "spot": False, "max_wait_hours": None}
    local = resolved.spec.compute.model_copy(update=machine)
    here = job.model_copy(update={"compute": local})
    there = resolved.model_copy(update={"spec": resolved.spec.model_copy(update={"compute": local})})
    return record_of(here, there, backend="local")


def test_a_hosts_own_disk_is_a_path_from_where_it_was_set(
    job: JobSpec, resolved: ResolvedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was one from wherever a start ran: the next from another folder did not see what this one's host kept."""
    monkeypatch.chdir(tmp_path)
    after = revised(local_record(job, resolved), ["checkpoint.local_directory=nvme"], None)
    assert after.spec.checkpoint.local_directory == "nvme", "as it was written"
    assert after.resolved.spec.checkpoint.local_directory == str(tmp_path / "nvme")
    away = revised(record_of(job, resolved), ["checkpoint.local_directory=nvme"], None)
    assert away.resolved.spec.checkpoint.local_directory == "nvme", "of the hosts that it has there"
    with pytest.raises(InputError, match=r"^--set for job .*: checkpoint\.local_directory: only a shell takes ~ for a"):
        revised(local_record(job, resolved), ["checkpoint.local_directory=~/nvme"], None)


def test_on_this_machine_the_layout_or_processes_says_how_many(job: JobSpec, resolved: ResolvedJob) -> None:
    record = local_record(job, resolved)
    assert revised(record, ["parallelism=auto"], 4).resolved.world_size == 4
    assert revised(record, ["parallelism.data_replicate=4"], None).resolved.world_size == 4
    assert revised(record, ["checkpoint.keep_last=9"], None).resolved.world_size == 2
    assert isinstance(revised(record, [], 2).spec.parallelism, ParallelismSpec)
    for asked in ("instance_count=3", "instance_type=ml.p4d.24xlarge"):
        with pytest.raises(InputError, match=rf"^compute.{asked}: the job runs on this machine, which is one; "):
            revised(record, [f"compute.{asked}"], None)


@pytest.mark.parametrize(
    "override", ["training.global_batch_size=4", "data.packing=false", "checkpoint.destination=/tmp/x", "name=b"]
)
def test_what_would_be_another_run_is_refused(override: str) -> None:
    with pytest.raises(InputError, match="a resume keeps the job's data, model, batch and checkpoints"):
        reviser([override], None)


def test_a_whole_section_keeps_what_a_resume_keeps(job: JobSpec, resolved: ResolvedJob) -> None:
    """It replaced the checkpoints' place too: the next attempt found none, and trained from the first step on."""
    before = record_of(job, resolved)
    compute = before.spec.compute
    sections = [
        "checkpoint={keep_last: 9}",
        f"compute={{instance_type: {compute.instance_type}, instance_count: {compute.instance_count}}}",
    ]
    after = revised(before, sections, None)
    assert after.spec.checkpoint.keep_last == after.resolved.spec.checkpoint.keep_last == 9
    assert after.resolved.spec.checkpoint.destination == before.checkpoint_destination
    assert after.spec.checkpoint.destination == before.spec.checkpoint.destination
    assert after.spec.compute.backend == after.resolved.spec.compute.backend == "sagemaker"
    for override in ("checkpoint={destination: s3://other/place}", "compute={backend: local}"):
        with pytest.raises(InputError, match=r"but for checkpoint\.destination and compute\.backend") as refused:
            revised(before, ["compute.max_hours=2", override], None)
        assert str(refused.value).startswith(f"--set {override}: a resume keeps")
    with pytest.raises(InputError, match="checkpoint: input should be a mapping"):
        revised(before, ["checkpoint=null"], None)


@pytest.mark.parametrize(
    ("written", "sent"), [(None, "s3://acme-checkpoints/jobs/one"), ("runs/one", "/home/ada/runs/one")]
)
def test_a_whole_section_may_state_the_jobs_own_place(
    written: str | None, sent: str, job: JobSpec, resolved: ResolvedJob
) -> None:
    """It was held against both spellings of the place, as written and as sent, so that none was taken."""
    here = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"destination": written})})
    there = resolved.spec.model_copy(
        update={"checkpoint": resolved.spec.checkpoint.model_copy(update={"destination": sent})}
    )
    before = record_of(here, resolved.model_copy(update={"spec": there}))
    for stated in (written or "null", sent):
        after = revised(before, [f"checkpoint={{keep_last: 9, destination: {stated}}}"], None)
        assert (after.spec.checkpoint.destination, after.resolved.spec.checkpoint.destination) == (written, sent)
        assert after.spec.checkpoint.keep_last == after.resolved.spec.checkpoint.keep_last == 9
    with pytest.raises(InputError, match="a resume keeps the job's data"):
        revised(before, ["checkpoint={destination: s3://acme-checkpoints/jobs/two}"], None)


def test_nothing_asked_for_changes_nothing() -> None:
    assert reviser([], None) is None


def elastic(record: JobRecord, **limits: object) -> JobRecord:
    """The record of that job, launched with limits."""
    stated = ElasticSpec.model_validate({"min_instances": 1, "max_instances": 2} | limits)

    def with_limits(spec: JobSpec) -> JobSpec:
        return spec.model_copy(update={"recovery": spec.recovery.model_copy(update={"elastic": stated})})

    resolved = record.resolved.model_copy(update={"spec": with_limits(record.resolved.spec)})
    return record_of(with_limits(record.spec), resolved)


def test_within_its_limits_a_job_goes_on_with_another_number_alone(job: JobSpec, resolved: ResolvedJob) -> None:
    before = elastic(record_of(job, resolved))
    assert [one.num_hosts for one in before.smaller] == [1]
    after = revised(before, ["compute.instance_count=1"], None)
    assert after.resolved.num_hosts == 1 and after.resolved.parallelism.data_replicate == 1, "the layout follows"
    assert after.resolved == before.smaller[0] and after.smaller == ()
    assert revised(after, ["compute.instance_count=2"], None).resolved == before.resolved
    with pytest.raises(InputError, match=r"instance_count 3: recovery\.elastic allows 1"):
        revised(before, ["compute.instance_count=3"], None)
    wider = revised(before, ["compute.instance_count=4", "recovery.elastic.max_instances=4"], None)
    assert wider.resolved.num_hosts == 4 and wider.resolved.spec.training == before.resolved.spec.training


def test_limits_that_would_change_an_adapted_batch_are_refused(job: JobSpec, resolved: ResolvedJob) -> None:
    adapted = elastic(record_of(job, resolved), batch="adapt")
    half = revised(adapted, ["compute.instance_count=1"], None).resolved
    assert half.spec.global_batch_size == 4 and half.steps == 40
    for override in ("recovery.elastic.max_instances=4", "recovery.elastic.batch=keep", "recovery.elastic=null"):
        with pytest.raises(InputError, match="are stated for max_instances, so a resume keeps both"):
            revised(adapted, [override], None)
    kept = elastic(record_of(job, resolved))
    with pytest.raises(InputError, match="are stated for max_instances, so a resume keeps both"):
        revised(kept, ["recovery.elastic.batch=adapt"], None)


def test_a_budget_that_no_price_holds_it_to_is_refused_as_by_a_launch(job: JobSpec, resolved: ResolvedJob) -> None:
    nowhere = record_of(job, resolved).model_copy(update={"plan": {"region": "af-south-1"}})
    budget = ["budget={max_usd: 5}"]
    with pytest.raises(InputError, match=r"no on-demand price known for .* in af-south-1.*--force goes on"):
        revised(nowhere, budget, None)
    forced = revised(nowhere, budget, None, force=True)
    assert "af-south-1" in forced.forced[-1] and forced.spec.budget is not None
    # Once forced is forced; who has no budget, or is billed by nobody, needs no price.
    assert revised(forced, ["checkpoint.keep_last=9"], None).forced == forced.forced
    assert revised(nowhere, ["budget=null"], None).forced == ()
    on_the_emulator = reviser(budget, None, needs_price=False)
    assert on_the_emulator is not None and on_the_emulator(nowhere).forced == ()
