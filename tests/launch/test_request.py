"""The CreateTrainingJob request: what it says, that it is pure, and that the SageMaker SDK sends exactly it."""

import datetime
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from botocore.validate import validate_parameters

from trainyard.errors import InputError
from trainyard.functions import broker_rules
from trainyard.functions.broker_ledger import Ledger
from trainyard.launch.channels import Channel
from trainyard.launch.checks import check_queue
from trainyard.launch.names import attempt_name
from trainyard.launch.request import training_job_request
from trainyard.launch.sagemaker_backend import model_trainer
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.platform import TenantContract

GOLDEN = Path(__file__).parent / "golden" / "create_training_job.json"
IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/trainyard@sha256:{'ab' * 32}"
JOB_ID = "acme-tiny-20260131120000-1a2b"
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring"


def request_of(resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]) -> dict[str, Any]:
    return training_job_request(
        resolved, contract, job_id=JOB_ID, training_job_name=JOB_ID, image=IMAGE, channels=channels
    )


def with_compute(resolved: ResolvedJob, **compute: Any) -> ResolvedJob:
    changed = resolved.spec.compute.model_copy(update=compute)
    return resolved.model_copy(update={"spec": resolved.spec.model_copy(update={"compute": changed})})


def test_request_is_the_golden_one(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    assert request_of(resolved, contract, channels) == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_a_request_says_which_attempt_it_is_and_who_asked_for_it(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    """A training queue renames its training jobs: their own name tells nothing."""

    def said(number: int, asked: int | None) -> tuple[str, str]:
        name = attempt_name(JOB_ID, number)
        request = training_job_request(
            resolved, contract, job_id=JOB_ID, training_job_name=name, image=IMAGE, channels=channels, asked=asked
        )
        return request["Environment"]["TRAINYARD_ATTEMPT"], request["Environment"]["TRAINYARD_ASKED_ATTEMPT"]

    assert (said(1, None), said(12, None), said(3, 2)) == (("1", "1"), ("12", "12"), ("3", "2"))


def test_request_satisfies_the_service_model(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    shape = get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    with_file_system = (*channels, Channel("model", "fsx", "models/base", "fsx://models/base"))
    for changes in ({}, {"spot": False}, {"instance_type": "ml.inf2.xlarge", "spot": False}):
        request = request_of(with_compute(resolved, **changes), contract, with_file_system)
        report = validate_parameters(request, shape)
        assert report is None or not report


def with_capacity(contract: TenantContract) -> TenantContract:
    """Acme may keep machines for half an hour, and has bought two ahead."""
    plan = {"arn": PLAN, "instance_type": "ml.p5.4xlarge", "max_instances": 2}
    content = {**contract.model_dump(mode="json"), "warm_pool_minutes": 30, "training_plans": {"spring": plan}}
    return parse(TenantContract, content, "contract")


def test_machines_are_kept_warm_or_bought_ahead_as_stated(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    shape = get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    tenant = with_capacity(contract)
    warm = request_of(with_compute(resolved, spot=False, keep_alive_minutes=0.5), tenant, channels)
    planned = request_of(with_compute(resolved, spot=False, training_plan="spring"), tenant, channels)
    assert warm["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 30
    assert planned["ResourceConfig"]["TrainingPlanArn"] == PLAN
    for request in (warm, planned):
        report = validate_parameters(request, shape)
        assert report is None or not report


REFUSED_CAPACITY = {
    "warm where none may": ({"keep_alive_minutes": 1.0}, False, "may keep their machines for up to 0 minutes"),
    "too long": ({"keep_alive_minutes": 31.0}, True, "keep_alive_minutes '31.0': tenant acme's jobs may keep"),
    "no plan": ({"training_plan": "spring"}, False, "'spring': is none of tenant acme's (none)"),
    "another plan": ({"training_plan": "autumn"}, True, "is none of tenant acme's (spring)"),
    "too many": ({"training_plan": "spring", "instance_count": 3}, True, "holds 2 x ml.p5.4xlarge, and the job asks"),
    "another type": ({"training_plan": "spring", "instance_type": "ml.g5.xlarge"}, True, "asks for 2 x ml.g5.xlarge"),
    "two kinds": ({"training_plan": "spring", "spot": True}, True, "exclude each other"),
}


@pytest.mark.parametrize("case", REFUSED_CAPACITY)
def test_launcher_and_broker_refuse_capacity_that_is_not_the_tenants(
    case: str, resolved: ResolvedJob, contract: TenantContract
) -> None:
    changes, has_some, words = REFUSED_CAPACITY[case]
    tenant = with_capacity(contract) if has_some else contract
    job = with_compute(resolved, **{"spot": False, **changes}).spec
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        check_queue(job, tenant)
    assert "\n" not in str(caught.value)
    compute, rules = job.compute.model_dump(mode="json"), tenant.model_dump(mode="json")
    with pytest.raises(broker_rules.Refused, match=re.escape(words)):
        broker_rules.check_capacity(compute, compute["instance_count"], rules)


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        ({"spot": True, "keep_alive_minutes": 5}, "spot and keep_alive_minutes exclude each other"),
        ({"training_plan": "x", "keep_alive_minutes": 5}, "keep_alive_minutes and training_plan exclude each other"),
        ({"spot": True, "training_plan": "x"}, "spot and training_plan exclude each other"),
        ({"backend": "local", "training_plan": "x"}, "training_plan is SageMaker's"),
        ({"keep_alive_minutes": 361}, "keep_alive_minutes"),
    ],
)
def test_a_job_asks_for_one_kind_of_capacity(job: JobSpec, compute: dict[str, Any], words: str) -> None:
    content = job.model_dump(mode="json")
    content["compute"] |= {"spot": False, "max_wait_hours": None, **compute}
    with pytest.raises(InputError, match=words):
        parse(JobSpec, content, "job.yaml")


def test_what_was_paid_ahead_costs_nothing_more_and_what_is_kept_warm_does(aws: Account) -> None:
    def described(**resources: Any) -> dict[str, Any]:
        return {
            "TrainingJobStatus": "Completed",
            "CreationTime": datetime.datetime.now(datetime.UTC),
            "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 2, **resources},
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
            "BillableTimeInSeconds": 100,
        }

    class Described:
        def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
            return jobs[TrainingJobName]

    pool = {"KeepAlivePeriodInSeconds": 600}
    jobs = {
        "plain": described(),
        "planned": described(TrainingPlanArn=PLAN),
        "waiting": described(**pool) | {"WarmPoolStatus": {"Status": "Available"}},
        "over": described(**pool)
        | {"WarmPoolStatus": {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 42}},
    }
    ledger = Ledger(
        None,
        Described(),
        bucket="",
        tenant="acme",
        prices={"ml.p5.4xlarge": 6.0},
        gpus={},
        now=datetime.datetime.now(datetime.UTC),
    )
    entries = {name: ledger._describe(name) for name in jobs}
    found = {name: (entry["usd_per_hour"], entry["billed"]) for name, entry in entries.items() if entry}
    assert found == {"plain": (6.0, 100), "planned": (0.0, 100), "waiting": (6.0, 700), "over": (6.0, 142)}


def test_same_inputs_same_request(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    first, second = (request_of(resolved, contract, channels) for _ in range(2))
    assert first == second
    first["Tags"].clear()
    assert request_of(resolved, contract, channels) == second, "a caller's change must not leak into the next request"


def test_spot_waits_and_on_demand_does_not(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    spot = request_of(resolved, contract, channels)
    assert spot["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400}
    stated = request_of(with_compute(resolved, max_wait_hours=3.0), contract, channels)
    assert stated["StoppingCondition"]["MaxWaitTimeInSeconds"] == 10800
    on_demand = request_of(with_compute(resolved, spot=False), contract, channels)
    assert on_demand["EnableManagedSpotTraining"] is False
    assert on_demand["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200}


def test_volume_key_only_where_sagemaker_takes_one(
    resolved: ResolvedJob, contract: TenantContract, channels: tuple[Channel, ...]
) -> None:
    nvme = request_of(resolved, contract, channels)["ResourceConfig"]
    assert "VolumeKmsKeyId" not in nvme
    ebs = request_of(with_compute(resolved, instance_type="ml.inf2.xlarge"), contract, channels)["ResourceConfig"]
    assert ebs["VolumeKmsKeyId"] == contract.keys.checkpoints


def test_file_system_channel_begins_with_the_mount_name(resolved: ResolvedJob, contract: TenantContract) -> None:
    request = request_of(resolved, contract, (Channel("model", "fsx", "models/base", "fsx://models/base"),))
    source = request["InputDataConfig"][1]["DataSource"]["FileSystemDataSource"]
    assert source["DirectoryPath"] == "/abcdefgh/models/base"
    assert source["FileSystemAccessMode"] == "ro"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spot": False},
        {"instance_type": "ml.inf2.xlarge", "spot": False},
        {"spot": False, "keep_alive_minutes": 30.0},
        {"spot": False, "training_plan": "spring"},
    ],
    ids=["spot", "demand", "ebs", "kept warm", "training plan"],
)
def test_model_trainer_sends_exactly_the_request(
    aws: Account,
    resolved: ResolvedJob,
    contract: TenantContract,
    channels: tuple[Channel, ...],
    changes: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inputs = (*channels, Channel("model", "fsx", "models/base", "fsx://models/base"))
    contract = with_capacity(contract)
    request = request_of(with_compute(resolved, **changes), contract, inputs)
    sent: list[tuple[str, Any]] = []
    aws.session.events.register(
        "before-parameter-build.*.*", lambda params, model, **_: sent.append((model.name, params))
    )
    with caplog.at_level(logging.WARNING):
        model_trainer(request, aws).train(wait=False, logs=False)
    assert [name for name, _ in sent] == ["CreateTrainingJob", "DescribeTrainingJob"], "and it calls nothing else"
    assert sent[0][1] == request
