"""launch(): against an AWS account by moto, through the real SageMaker SDK; and what a crash in between leaves."""

import json
from typing import Any

import pytest
from launch_testing import IMAGE, objects

from trainyard.errors import AwsRefusedError, InputError
from trainyard.launch import launch, watch
from trainyard.launch import launcher as launcher_module
from trainyard.launch.contract import read_contract, read_image
from trainyard.launch.record import CREATED, SUBMITTED, S3RecordStore
from trainyard.launch.sagemaker_backend import SageMakerBackend
from trainyard.launch.session import Account, assume
from trainyard.spec.job import JobSpec, ModelSpec, ResolvedJob
from trainyard.spec.platform import EnvironmentSpec, TenantContract


def test_a_launched_job_is_recorded_submitted_and_readable(
    deployed: Account, job: JobSpec, environment: EnvironmentSpec
) -> None:
    contract = read_contract(deployed, environment, "acme")
    launcher = assume(deployed, contract.roles.launcher, session_name="test")
    said: list[str] = []
    record = launch(job, contract, account=deployed, launcher=launcher, say=said.append)

    assert record.state == SUBMITTED
    assert record.attempt.submitted_at is not None
    assert record.image == IMAGE
    assert record.plan["job"] == "tiny"
    assert record.checkpoint_destination == f"s3://acme-checkpoints/jobs/{record.job_id}/"

    s3 = deployed.client("s3")
    files = objects(s3, contract.buckets.data, f"jobs/{record.job_id}/")
    described = deployed.client("sagemaker").describe_training_job(TrainingJobName=record.job_id)
    channels = {one["ChannelName"]: one["DataSource"]["S3DataSource"] for one in described["InputDataConfig"]}
    spec = channels["job"]["S3Uri"].removeprefix(f"s3://{contract.buckets.data}/")
    sent = ResolvedJob.model_validate(files[f"{spec}resolved_job.json"])
    assert sent == record.resolved
    assert sent.spec.checkpoint.destination == record.checkpoint_destination
    assert files[f"{spec}channels.json"] == {
        "s3://acme-data/sets/train": "train-0",
        "s3://acme-data/sets/validation.jsonl": "validation-0",
        "s3://acme-data/sets/tokenizer.json": "tokenizer",
    }
    assert described["RoleArn"] == contract.roles.job
    assert described["VpcConfig"]["Subnets"] == list(contract.subnet_ids)
    assert S3RecordStore(s3, contract.buckets.data).read(record.job_id).record == record
    assert said, "a person sees what is being done"


def test_a_submission_is_no_later_than_what_follows_from_it(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may take its time to answer, while SageMaker starts the job."""
    clock = ["2026-03-01T10:00:00+00:00"]
    monkeypatch.setattr(launcher_module, "utc_now", lambda: clock[0])

    def slow(*_: Any) -> None:
        clock[0] = "2026-03-01T10:00:30+00:00"

    monkeypatch.setattr(SageMakerBackend, "submit", slow)
    record = launch(job, contract, account=deployed, launcher=deployed)
    assert record.states[-1].state == SUBMITTED
    assert record.states[-1].at == record.attempt.submitted_at == "2026-03-01T10:00:00+00:00"


def test_the_record_is_there_before_the_job(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SageMakerBackend, "submit", crash)
        with pytest.raises(KeyboardInterrupt):
            launch(job, contract, account=deployed, launcher=deployed)

    s3 = deployed.client("s3")
    store, backend = S3RecordStore(s3, contract.buckets.data), SageMakerBackend(deployed, contract)
    (job_id,) = store.job_ids()
    status = watch.status(store, backend, job_id)
    assert (status.state, status.observation) == (CREATED, None)
    assert f"trainyard resume {job_id}" in status.advice

    resumed = watch.resume(store, backend, job_id)
    assert [attempt.training_job_name for attempt in resumed.attempts] == [job_id], "the same attempt, submitted late"
    assert watch.status(store, backend, job_id).state == "Completed", "moto completes a job at once"


def test_submitting_an_attempt_twice_starts_it_once(deployed: Account, job: JobSpec, contract: TenantContract) -> None:
    record = launch(job, contract, account=deployed, launcher=deployed)
    # The confirmation of the first submit got lost: whoever repairs it submits again.
    SageMakerBackend(deployed, contract).submit(record, lambda _: None)
    names = [
        item["TrainingJobName"] for item in deployed.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    ]
    assert names == [record.job_id]


def test_nothing_is_recorded_for_a_job_that_is_refused(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    poor = job.model_copy(update={"compute": job.compute.model_copy(update={"max_hours": 30.0})})
    with pytest.raises(InputError, match=r"refused before anything was spent: .*24 hours.*--force"):
        launch(poor, contract, account=deployed, launcher=deployed)
    brokered = contract.model_copy(update={"broker": "trainyard-test-acme-broker"})
    with pytest.raises(InputError, match="24 hours") as refused:  # the broker would refuse it after all
        launch(poor, brokered, account=deployed, launcher=deployed, force=True)
    assert "--force" not in str(refused.value)
    assert S3RecordStore(deployed.client("s3"), contract.buckets.data).job_ids() == []
    forced = launch(poor, contract, account=deployed, launcher=deployed, force=True)
    assert len(forced.forced) == 1


def test_a_budget_that_no_known_price_holds_the_job_to_is_refused(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    elsewhere = contract.model_copy(update={"region": "af-south-1"})
    words = r"no on-demand price known for ml\.p5\.4xlarge in af-south-1; .*budget\.max_usd 100\.00 can't be kept"
    mend = r"prices refresh --region af-south-1 --instances p5\.4xlarge; --force"
    with pytest.raises(InputError, match=f"refused before anything was spent: .*{words}.*{mend}") as refused:
        launch(job, elsewhere, account=deployed, launcher=deployed)
    assert "\n" not in str(refused.value)
    assert S3RecordStore(deployed.client("s3"), contract.buckets.data).job_ids() == []
    forced = launch(job, elsewhere, account=deployed, launcher=deployed, force=True)
    assert len(forced.forced) == 1 and "can't be kept" in forced.forced[0]
    unlimited = job.model_copy(update={"budget": None})
    assert launch(unlimited, elsewhere, account=deployed, launcher=deployed).forced == (), "no budget, nothing to keep"


def test_the_emulator_bills_nobody_so_a_missing_price_only_warns(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    emulated = contract.model_copy(update={"region": "af-south-1", "emulated": True})
    said: list[str] = []
    record = launch(job, emulated, account=deployed, launcher=deployed, say=said.append)
    assert record.forced == ()
    (warning,) = (line for line in said if "price" in line)
    assert warning.startswith("warning: ") and "budget.max_usd 100.00 can't be kept" in warning


def test_checkpoints_that_would_lie_elsewhere_than_asked_leave_no_job(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    elsewhere = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"destination": "/fsx/mine"})})
    with pytest.raises(InputError, match=r"checkpoint\.destination /fsx/mine"):
        launch(elsewhere, contract, account=deployed, launcher=deployed)
    assert S3RecordStore(deployed.client("s3"), contract.buckets.data).job_ids() == []


def test_an_image_by_tag_is_refused(deployed: Account, job: JobSpec, contract: TenantContract) -> None:
    tagged = IMAGE.partition("@")[0] + ":latest"
    deployed.client("ssm").put_parameter(Name=contract.image_parameter, Value=tagged, Overwrite=True)
    with pytest.raises(AwsRefusedError, match="is not an image pinned by digest"):
        launch(job, contract, account=deployed, launcher=deployed)


def test_an_image_that_was_never_published_is_refused_on_aws(deployed: Account, contract: TenantContract) -> None:
    nothing = IMAGE.partition(":")[0] + ":" + "0" * 64
    deployed.client("ssm").put_parameter(Name=contract.image_parameter, Value=nothing, Overwrite=True)
    with pytest.raises(
        AwsRefusedError, match=r"no training image is published yet.*scripts/publish_image.*--backend local"
    ):
        read_image(deployed, contract.image_parameter, emulated=False)
    assert read_image(deployed, contract.image_parameter, emulated=True) == nothing


def test_a_foreign_contract_is_refused(
    deployed: Account, contract: TenantContract, environment: EnvironmentSpec
) -> None:
    other = json.dumps({**contract.model_dump(mode="json"), "tenant": "globex"})
    deployed.client("ssm").put_parameter(Name="/trainyard/test/acme/contract", Value=other, Overwrite=True)
    with pytest.raises(AwsRefusedError, match=r"tenant globex.*which is not where it was read"):
        read_contract(deployed, environment, "acme")


def test_a_model_in_the_tenants_bucket_is_planned_by_its_own_configuration(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    config = {**(job.model.config or {}), "num_hidden_layers": 3}
    s3 = deployed.client("s3")
    for name in ("own", "llama-3.1-8b"):
        s3.put_object(Bucket="acme-data", Key=f"models/{name}/config.json", Body=json.dumps(config))
        s3.put_object(Bucket="acme-data", Key=f"models/{name}/pytorch_model.bin", Body=b"pickled")
    sizes = {}
    for name in ("own", "llama-3.1-8b"):
        named = job.model_copy(update={"model": ModelSpec(source=f"tenant://models/{name}/")})
        sizes[name] = launch(named, contract, account=deployed, launcher=deployed).plan["params"]
    assert sizes["own"] == sizes["llama-3.1-8b"] < 1e6, "its sizes, whatever it is called"


def test_a_job_without_a_plan_says_that_nothing_holds_its_memory_and_dollars(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    s3 = deployed.client("s3")
    for name in ("config.json", "pytorch_model.bin"):
        s3.put_object(Bucket="acme-data", Key=f"models/torn/{name}", Body=b"[1, ")
    named = job.model_copy(update={"model": ModelSpec(source="tenant://models/torn")})
    said: list[str] = []
    record = launch(named, contract, account=deployed, launcher=deployed, say=said.append)
    assert "unplanned" in record.plan
    (warning,) = [line for line in said if "there is no plan" in line]
    assert "memory, hours and dollars" in warning and "tenant://models/torn" in warning and "\n" not in warning
