"""Jobs that wait in Batch's queues: what the broker submits, what it lets through, and what is told of them."""

import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from launch_testing import JOB_ID, REGION, contract_content

from trainyard.errors import InputError
from trainyard.functions import broker, broker_answers
from trainyard.functions.broker_queue import BATCH, STATUSES, asked_name, training_job_prefix
from trainyard.functions.retry_rules import retry_rules
from trainyard.launch.place import TenantAccess
from trainyard.launch.queue_backend import QUEUED, QueueBackend, backend_of, together
from trainyard.launch.record import JobRecord
from trainyard.launch.sagemaker_backend import SageMakerBackend
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.platform import EnvironmentSpec, TenantContract
from trainyard.spec.shares import BATCH_PREFIX

GPU = "ml.p5.4xlarge"
QUEUE = f"arn:aws:batch:{REGION}:123456789012:job-queue/trainyard-test-p5-4xlarge-0"
START = f"{training_job_prefix('acme', JOB_ID)}{'0' * 32}"


class Batch:
    """AWS Batch as broker and launcher see it."""

    class exceptions:
        """As boto3's clients have them."""

        ClientError = ClientError

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.terminated: list[str] = []
        self.listings: list[str] = []
        self.refusal = self.lost = False
        self.gone: set[str] = set()
        self.queues = {QUEUE}

    def submit_service_job(self, **request: Any) -> None:
        if self.refusal:
            raise ClientError({"Error": {"Code": "ClientException", "Message": "no"}}, "SubmitServiceJob")
        self.asked.append(request)
        self.add(request["jobName"], queue=request["jobQueue"])
        if self.lost:
            raise ClientError({"Error": {"Code": "RequestTimeout", "Message": "lost"}}, "SubmitServiceJob")

    def add(self, name: str, **more: Any) -> dict[str, Any]:
        job = {"jobName": name, "jobId": f"id-{len(self.jobs)}", "createdAt": len(self.jobs), "status": "RUNNABLE"}
        self.jobs.append({**job, "quotaShareName": "acme", **more})
        return self.jobs[-1]

    def get_paginator(self, name: str) -> "Batch":
        assert name == "list_service_jobs"
        return self

    def paginate(
        self, *, jobQueue: str, filters: list[dict[str, Any]], jobStatus: str = "RUNNING"
    ) -> Iterator[dict[str, Any]]:
        if jobQueue in self.gone:
            refused = {"Code": "ClientException", "Message": f"Job queue {jobQueue} does not exist"}
            raise ClientError({"Error": refused}, "ListServiceJobs")
        assert jobQueue in self.queues
        ((field, values),) = [(item["name"], item["values"]) for item in filters]
        self.listings.append(values[0] if field == "JOB_NAME" else jobStatus)
        key = {"JOB_NAME": "jobName", "QUOTA_SHARE_NAME": "quotaShareName"}[field]
        for job in self.jobs:
            # By the name of a job, and by nothing else, those of every status are listed.
            fits = field == "JOB_NAME" or job["status"] == jobStatus
            fits &= job.get("queue", QUEUE) == jobQueue
            yield {"jobSummaryList": [job] if fits and job[key] in values else []}

    def terminate_service_job(self, *, jobId: str, reason: str) -> None:
        assert reason
        self.terminated.append(jobId)


class SageMaker:
    """Training jobs that Batch has started."""

    class exceptions:
        """As boto3's clients have them."""

        ClientError = ClientError

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.described: list[str] = []

    def add(self, name: str, status: str = "InProgress", *, billed: int | None = None, **more: Any) -> None:
        self.jobs[name] = {
            "TrainingJobName": name,
            "TrainingJobStatus": status,
            "SecondaryStatus": "Training" if status == "InProgress" else status,
            "CreationTime": datetime.datetime.now(datetime.UTC),
            "ResourceConfig": {"InstanceType": GPU, "InstanceCount": 2},
            "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
            **({} if billed is None else {"BillableTimeInSeconds": billed}),
            **more,
        }

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        self.described.append(TrainingJobName)
        if TrainingJobName not in self.jobs:
            raise ClientError({"Error": {"Code": "ValidationException", "Message": "none"}}, "DescribeTrainingJob")
        return self.jobs[TrainingJobName]

    def stop_training_job(self, TrainingJobName: str) -> None:
        self.jobs[TrainingJobName] |= {"TrainingJobStatus": "Stopping", "SecondaryStatus": "Stopping"}

    def list_training_jobs(self, *, NameContains: str, **_: Any) -> dict[str, Any]:
        return {"TrainingJobSummaries": [job for name, job in reversed(self.jobs.items()) if NameContains in name]}

    def get_paginator(self, _: str) -> "SageMaker":
        return self

    def paginate(self, *, NameContains: str, **_: Any) -> Iterator[dict[str, Any]]:
        yield self.list_training_jobs(NameContains=NameContains)


@pytest.fixture
def contract() -> TenantContract:
    """Acme queues: it is guaranteed two machines and may hold three."""
    share = {"queue": QUEUE, "guaranteed": 2, "most": 3}
    content = {**contract_content(), "broker": "trainyard-test-acme-broker", "shares": {GPU: share}}
    return parse(TenantContract, content, "contract")


@pytest.fixture
def batch() -> Batch:
    return Batch()


@pytest.fixture
def sagemaker() -> SageMaker:
    return SageMaker()


@pytest.fixture
def ask(
    deployed: Account, contract: TenantContract, batch: Batch, sagemaker: SageMaker, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[str, Any]]:
    """The handler, in an account where Batch and SageMaker are ours."""
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/acme/contract", Value=contract.model_dump_json(), Overwrite=True, Type="String"
    )
    settings = {"contract": "/trainyard/test/acme/contract", "prices": {GPU: 6.0}, "volume_keys": []}
    monkeypatch.setenv("BROKER", json.dumps(settings))
    clients: dict[str, Any] = {"sagemaker": sagemaker, "batch": batch}
    clients |= {name: boto3.client(name, region_name=REGION) for name in ("s3", "ssm")}
    monkeypatch.setattr(boto3, "client", lambda name, **_: clients[name])
    return lambda: broker.handler({"job_id": JOB_ID}, None)


def forge(deployed: Account, change: Callable[[dict[str, Any]], None]) -> None:
    """The tenant rewrites its record."""
    s3, place = deployed.client("s3"), {"Bucket": "acme-data", "Key": f"jobs/{JOB_ID}/record.json"}
    content = json.loads(s3.get_object(**place)["Body"].read())
    change(content)
    s3.put_object(**place, Body=json.dumps(content).encode())


def test_it_queues_what_the_launcher_would_send_and_only_once(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account, contract: TenantContract
) -> None:
    assert ask() == {"submitted": JOB_ID, "already": False}
    (asked,) = batch.asked
    payload = json.loads(asked["serviceRequestPayload"])
    direct = SageMakerBackend(deployed, contract).request(record)
    assert payload == {**direct, "TrainingJobName": asked_name("acme", JOB_ID)}
    assert (asked["jobName"], asked["jobQueue"], asked["quotaShareName"]) == (JOB_ID, QUEUE, "acme")
    assert asked["retryStrategy"] == retry_rules(record.resolved.spec.model_dump(mode="json"))
    assert asked["tags"] == {tag["Key"]: tag["Value"] for tag in direct["Tags"]}
    assert asked["clientToken"] == JOB_ID
    assert ask() == {"submitted": JOB_ID, "already": True}
    assert len(batch.asked) == 1


def test_a_queued_attempt_reads_the_spec_that_its_record_names(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account
) -> None:
    forge(deployed, lambda content: content.update(spec_name="0123456789abcdef"))
    assert ask()["submitted"] == JOB_ID
    (channel, *_) = json.loads(batch.asked[0]["serviceRequestPayload"])["InputDataConfig"]
    place = channel["DataSource"]["S3DataSource"]["S3Uri"]
    assert (channel["ChannelName"], place) == ("job", f"s3://acme-data/jobs/{JOB_ID}/spec/0123456789abcdef/")


def test_its_requests_are_batchs(ask: Any, record: JobRecord, batch: Batch) -> None:
    """By botocore's model: every name is one that SubmitServiceJob takes, within its limits."""
    import botocore.session
    from botocore.validate import ParamValidator

    ask()
    model = botocore.session.get_session().get_service_model("batch").operation_model("SubmitServiceJob")
    assert ParamValidator().validate(batch.asked[0], model.input_shape).generate_report() == ""


@pytest.mark.parametrize("tenant", ["a1", "acme", "platform-teams"])
def test_names_fit_whatever_batch_adds(tenant: str) -> None:
    names = {asked_name(tenant, f"{JOB_ID}-r{number}") for number in range(1, 100)}
    assert BATCH == BATCH_PREFIX
    assert len(names) == 99, "each attempt's training jobs and streams are found by it"
    assert all(name.startswith(f"{tenant}-") and 8 + len(name) + 32 <= 63 for name in names)


def test_a_full_queue_is_no_refusal_and_a_job_that_never_fits_is_one(
    ask: Any, record: JobRecord, batch: Batch, sagemaker: SageMaker, deployed: Account
) -> None:
    sagemaker.add(f"AWSBatchacme-old{'0' * 32}")
    sagemaker.add("acme-other")
    assert ask()["submitted"] == JOB_ID

    def large(content: dict[str, Any]) -> None:
        content["resolved"]["num_hosts"] = content["resolved"]["spec"]["compute"]["instance_count"] = 4
        content["attempts"][-1] |= {"number": 2, "training_job_name": f"{JOB_ID}-r2"}

    forge(deployed, large)
    assert "may hold up to 3 x ml.p5.4xlarge, borrowed ones with them" in ask()["refused"]
    for wrong in (-1, 1000, "many", True):
        forge(
            deployed, lambda content, given=wrong: content["resolved"]["spec"].update(recovery={"max_resumes": given})
        )
        forge(deployed, lambda content: content["resolved"].update(num_hosts=2))
        forge(deployed, lambda content: content["resolved"]["spec"]["compute"].update(instance_count=2))
        assert "recovery.max_resumes" in ask()["refused"], wrong
    assert len(batch.asked) == 1


def test_the_budget_holds_what_waits_what_runs_and_what_was_billed(
    ask: Any, record: JobRecord, batch: Batch, sagemaker: SageMaker, deployed: Account
) -> None:
    # 5,000 USD. A job of two hosts for two hours at 6 USD could cost 24, and as often again as Batch may start it.
    forge(deployed, lambda content: content["resolved"]["spec"].update(recovery={"max_resumes": 9}))
    assert ask()["submitted"] == JOB_ID
    sagemaker.add(START)
    sagemaker.add(f"AWSBatchacme-other{'0' * 32}", "Completed", billed=393 * 3600)  # 4,716 USD
    forge(deployed, lambda content: content["attempts"][-1].update(number=2, training_job_name=f"{JOB_ID}-r2"))
    refused = ask()["refused"]
    assert "this job could cost up to 240.00 USD" in refused
    assert "4,716.00 are spent and 240.00 could go" in refused, "the start counts in its job's promise, and not twice"
    batch.jobs[0]["status"] = "FAILED"
    sagemaker.jobs[START] |= {"TrainingJobStatus": "Failed", "BillableTimeInSeconds": 60}
    assert ask()["submitted"] == f"{JOB_ID}-r2"


def _ledger(deployed: Account, month: datetime.datetime, jobs: dict[str, dict[str, Any]] | None = None) -> Any:
    """A month's jobs as the broker wrote them down; written anew where `jobs` are given."""
    s3, place = deployed.client("s3"), {"Bucket": "acme-checkpoints", "Key": f"broker/ledger-{month:%Y-%m}.json"}
    if jobs is not None:
        s3.put_object(**place, Body=json.dumps({"version": 1, "month": f"{month:%Y-%m}", "jobs": jobs}).encode())
    return json.loads(s3.get_object(**place)["Body"].read())["jobs"]


def _promised(at: float, queue: str = QUEUE) -> dict[str, Any]:
    held = {"type": GPU, "count": 2, "seconds": 3600, "usd_per_hour": 6.0, "billed": None}
    return {**held, "at": at, "queue": queue}


def test_a_queue_that_went_away_takes_its_jobs_with_it(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account
) -> None:
    now, gone = datetime.datetime.now(datetime.UTC), f"{QUEUE}-gone"
    batch.gone.add(gone)
    _ledger(deployed, now, {"acme-lost": _promised(0, gone), "acme-young": _promised(now.timestamp(), gone)})
    assert ask()["submitted"] == JOB_ID
    assert set(_ledger(deployed, now)) == {"acme-young", JOB_ID}


def test_a_submission_lists_the_share_and_asks_for_no_job_that_the_list_has(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    promised = {f"acme-sweep-{number}": _promised(0) for number in range(300)}
    _ledger(deployed, now, promised | {"acme-moved": _promised(0), "acme-forgotten": _promised(0)})
    for number, name in enumerate(promised):
        batch.add(name, status=STATUSES[number % len(STATUSES)])
    # It went on between two listings, so that none has it.
    batch.add("acme-moved", status="BETWEEN")
    assert ask()["submitted"] == JOB_ID
    assert batch.listings == [JOB_ID, *STATUSES, "acme-moved", "acme-forgotten"]
    alive = {job["jobName"] for job in batch.jobs if job["status"] not in ("SUCCEEDED", "FAILED")}
    assert set(_ledger(deployed, now)) == alive
    # A job that was taken out and put in again counts as its newest does.
    batch.add("acme-moved", status="SUCCEEDED")
    forge(deployed, lambda content: content["attempts"][-1].update(number=2, training_job_name=f"{JOB_ID}-r2"))
    assert ask()["submitted"] == f"{JOB_ID}-r2"
    assert set(_ledger(deployed, now)) == alive - {"acme-moved"} | {f"{JOB_ID}-r2"}


def test_what_runs_for_a_promise_is_not_described_and_what_nobody_promised_is_once(
    ask: Any, record: JobRecord, sagemaker: SageMaker, deployed: Account
) -> None:
    stray = f"AWSBatchacme-stray{'0' * 32}"
    sagemaker.add(stray)
    assert ask()["submitted"] == JOB_ID
    sagemaker.add(START, TrainingStartTime=datetime.datetime.now(datetime.UTC))
    described = []
    for number in (2, 3, 4):
        name = f"{JOB_ID}-r{number}"
        attempt = {"number": number, "training_job_name": name}
        forge(deployed, lambda content, attempt=attempt: content["attempts"][-1].update(attempt))
        sagemaker.described.clear()
        assert ask()["submitted"] == name
        described.append(list(sagemaker.described))
        sagemaker.jobs[stray]["TrainingStartTime"] = datetime.datetime.now(datetime.UTC)
    assert described == [[stray], [stray], []], "until it has machines"
    assert set(_ledger(deployed, datetime.datetime.now(datetime.UTC))) >= {stray, JOB_ID}


def test_with_stop_a_spot_job_that_nobody_promised_is_looked_at_again(
    ask: Any, record: JobRecord, sagemaker: SageMaker, deployed: Account, contract: TenantContract
) -> None:
    """As without queues: its machines may have gone, and come back, since."""
    stray = f"AWSBatchacme-stray{'0' * 32}"
    began = datetime.datetime.now(datetime.UTC)
    sagemaker.add(stray, EnableManagedSpotTraining=True, TrainingStartTime=began)
    for when_spent, num_looks in (("finish", 1), ("finish", 0), ("stop", 1), ("stop", 1)):
        told = contract.model_copy(update={"when_spent": when_spent})
        deployed.client("ssm").put_parameter(
            Name="/trainyard/test/acme/contract", Value=told.model_dump_json(), Overwrite=True, Type="String"
        )
        sagemaker.described.clear()
        ask()
        forge(deployed, _next_attempt)
        assert sagemaker.described.count(stray) == num_looks, when_spent


def _next_attempt(content: dict[str, Any]) -> None:
    number = len(content["attempts"]) + 1
    content["attempts"].append(
        {**content["attempts"][-1], "number": number, "training_job_name": f"{JOB_ID}-r{number}"}
    )


def test_what_waits_over_the_first_of_a_month_still_holds_its_budget(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    before = now.replace(day=1) - datetime.timedelta(days=1)
    billed = {key: value for key, value in _promised(0).items() if key != "queue"} | {"billed": 60}
    _ledger(deployed, before, {"acme-waits": _promised(0), "acme-ended": _promised(0), "AWSBatchacme-run": billed})
    batch.add("acme-waits")
    batch.add("acme-ended", status="SUCCEEDED")
    assert ask()["submitted"] == JOB_ID
    assert set(_ledger(deployed, now)) == {"acme-waits", JOB_ID}


def test_what_batch_refuses_is_told_and_what_only_seemed_so_is_not(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account
) -> None:
    batch.refusal = True
    assert ask()["by"] == "aws"
    body = next(
        deployed.client("s3").get_object(Bucket="acme-checkpoints", Key=item["Key"])["Body"].read()
        for item in deployed.client("s3").list_objects_v2(Bucket="acme-checkpoints", Prefix="broker/")["Contents"]
    )
    assert json.loads(body)["jobs"] == {}, "its promise is taken back"
    batch.refusal, batch.lost = False, True
    assert ask()["submitted"] == JOB_ID


def test_a_queued_job_whose_answer_was_lost_is_there_or_nobody_knows(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = batch.submit_service_job
    monkeypatch.setattr(broker_answers, "LOOK_SECONDS", 0.0)

    def lose(**request: Any) -> None:
        raise ReadTimeoutError(endpoint_url="https://batch")

    monkeypatch.setattr(batch, "submit_service_job", lose)
    answer = ask()
    assert answer["may_run"] and answer["code"] == "Unknown"
    assert set(_ledger(deployed, datetime.datetime.now(datetime.UTC))) == {JOB_ID}

    def lose_the_answer(**request: Any) -> None:
        submit(**request)
        lose()

    monkeypatch.setattr(batch, "submit_service_job", lose_the_answer)
    assert ask() == {"submitted": JOB_ID, "already": False} and len(batch.asked) == 1


def test_a_queue_that_goes_as_a_job_is_submitted_refuses_it(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its jobs with it: nobody need wonder whether this one runs."""

    def refuse(**_: Any) -> None:
        batch.gone.add(QUEUE)
        told = {"Code": "ClientException", "Message": f"Job queue {QUEUE} does not exist"}
        raise ClientError({"Error": told}, "SubmitServiceJob")

    monkeypatch.setattr(batch, "submit_service_job", refuse)
    answer = ask()
    assert answer["code"] == "ClientException" and "may_run" not in answer
    assert _ledger(deployed, datetime.datetime.now(datetime.UTC)) == {}


def test_a_record_that_is_rewritten_to_another_type_is_the_same_job(
    ask: Any, record: JobRecord, batch: Batch, deployed: Account, contract: TenantContract
) -> None:
    """Its attempt waits in its first type's queue, and what it could cost there stays promised."""
    small = f"{QUEUE}-small"
    shares = {GPU: contract.shares[GPU].model_dump(), "ml.g5.xlarge": {"queue": small, "guaranteed": 1, "most": 1}}
    content = {**contract.model_dump(mode="json"), "shares": shares}
    content["queues"]["gpu"]["instance_types"].append("ml.g5.xlarge")
    deployed.client("ssm").put_parameter(
        Name="/trainyard/test/acme/contract", Value=json.dumps(content), Overwrite=True, Type="String"
    )
    batch.queues.add(small)
    assert ask() == {"submitted": JOB_ID, "already": False}

    def cheap(content: dict[str, Any]) -> None:
        content["resolved"]["num_hosts"] = 1
        little = {"instance_type": "ml.g5.xlarge", "instance_count": 1, "max_hours": 0.01, "max_wait_hours": None}
        content["resolved"]["spec"]["compute"] |= little

    forge(deployed, cheap)
    before = _ledger(deployed, datetime.datetime.now(datetime.UTC))
    assert ask() == {"submitted": JOB_ID, "already": True}
    batch.jobs.clear()  # as before Batch shows it
    assert ask()["code"] == "Busy"
    assert len(batch.asked) == 1
    assert _ledger(deployed, datetime.datetime.now(datetime.UTC)) == before


@pytest.fixture
def backend(
    deployed: Account, contract: TenantContract, batch: Batch, sagemaker: SageMaker, monkeypatch: pytest.MonkeyPatch
) -> QueueBackend:
    real, mine = deployed.client, {"batch": batch, "sagemaker": sagemaker}
    monkeypatch.setattr(type(deployed), "client", lambda _, name: mine.get(name) or real(name))
    environment = parse(EnvironmentSpec, _environment(), "test")
    place = TenantAccess(environment, contract, deployed, deployed).place
    assert (place.has_queue, place.has_resumer) == (True, False)
    backend = backend_of(deployed, contract)
    assert isinstance(backend, QueueBackend)
    return backend


def _environment() -> dict[str, Any]:
    from launch_testing import environment_content

    return environment_content()


def test_a_jobs_way_through_the_queue(
    backend: QueueBackend, record: JobRecord, batch: Batch, sagemaker: SageMaker
) -> None:
    def seen() -> tuple[str, str]:
        observed = backend.observe(record)
        assert observed is not None
        assert observed.finished == (observed.state in ("Completed", "Failed", "Stopped"))
        return observed.state, observed.note

    assert backend.observe(record) is None
    job = batch.add(JOB_ID)
    assert seen() == (
        QUEUED,
        "in share acme of its training queue: its machines are in use, or lent and on their way back",
    )
    job["statusReason"] = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Unable to provision requested compute resources"
    assert seen()[1].endswith(job["statusReason"])
    assert backend.states([record]) == {JOB_ID: QUEUED}
    job |= {"status": "RUNNING", "latestAttempt": {"serviceResourceId": {"value": f"x/{START.lower()}"}}}
    sagemaker.add(START)
    assert seen()[0] == "Training"
    assert backend.states([record]) == {JOB_ID: "Training"}
    # Stopped for the owner: it waits again.
    sagemaker.add(START, "Stopped")
    job |= {"status": "RUNNABLE", "statusReason": "Cross-share preemption triggered to reclaim borrowed capacity"}
    assert seen()[0] == QUEUED
    assert "Cross-share preemption" in seen()[1]
    again = START[:-1] + "1"
    sagemaker.add(again)
    job |= {"status": "RUNNING", "statusReason": ""}
    assert seen()[0] == "Training"
    backend.stop(record)
    assert batch.terminated == [job["jobId"]], "SageMaker alone would be told in vain: Batch would start it again"
    sagemaker.add(again, "Stopped")
    job |= {"status": "FAILED", "isTerminated": True}
    assert seen()[0] == "Stopped"
    assert backend.states([record]) == {JOB_ID: "Stopped"}, "a list says what a status says"
    batch.jobs.clear()
    assert seen()[0] == "Stopped", "Batch forgets, SageMaker doesn't"
    with pytest.raises(InputError, match="nothing to stop"):
        backend.stop(record)


def test_a_job_from_before_the_tenant_queued_can_still_be_stopped(
    backend: QueueBackend, record: JobRecord, batch: Batch, sagemaker: SageMaker
) -> None:
    """Batch has never heard of it: SageMaker alone can end it, as it is called as its attempt is."""
    with pytest.raises(InputError, match="Batch doesn't know"):
        backend.stop(record)
    sagemaker.add(JOB_ID)
    backend.stop(record)
    observed = backend.observe(record)
    assert observed is not None and observed.state == "Stopping" and batch.terminated == []
    sagemaker.add(JOB_ID, "Stopped")
    with pytest.raises(InputError, match="there is nothing to stop"):
        backend.stop(record)


def test_ends_that_batch_alone_knows() -> None:
    waiting = {"quotaShareName": "acme"}
    assert together({**waiting, "status": "FAILED", "statusReason": "why"}, None, 1).failure == "why"
    assert together({**waiting, "status": "FAILED", "isTerminated": True}, None, 1).state == "Stopped"
    assert together({**waiting, "status": "SUCCEEDED"}, None, 1).state == "Completed"
    taken_out = {**waiting, "status": "FAILED", "isTerminated": True, "stoppedAt": 1_769_860_800_000}
    assert together(taken_out, None, 1).ended_at == "2026-01-31T12:00:00+00:00"
    failed = {"TrainingJobStatus": "Failed", "FailureReason": "InternalServerError: x\ny"}
    assert together({**waiting, "status": "FAILED"}, failed, 1).failure == "InternalServerError: x"
    assert together({**waiting, "status": "RUNNABLE"}, failed, 1).note.endswith("again: InternalServerError: x")


def test_a_job_that_would_wait_for_ever_is_refused_before_anything_is_written(
    backend: QueueBackend, record: JobRecord
) -> None:
    def sized(count: int) -> JobRecord:
        compute = record.resolved.spec.compute.model_copy(update={"instance_count": count})
        spec = record.resolved.spec.model_copy(update={"compute": compute})
        return record.model_copy(update={"resolved": record.resolved.model_copy(update={"spec": spec})})

    backend.check(sized(3))
    with pytest.raises(InputError, match=r"may hold up to 3 x ml\.p5\.4xlarge"):
        backend.check(sized(4))
