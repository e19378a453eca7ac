"""The broker: sends what the launcher would, refuses what a record was forged to say, and keeps quota and budget."""

import datetime
import io
import itertools
import json
import types
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    ParamValidationError,
    ReadTimeoutError,
)
from launch_testing import IMAGE, JOB_ID, REGION

from trainyard.errors import AwsAwayError, AwsRefusedError, InputError
from trainyard.functions import broker, broker_answers, broker_ledger, broker_rules
from trainyard.functions.broker_ledger import Ledger
from trainyard.functions.job_meter import month_of
from trainyard.launch import sagemaker_backend
from trainyard.launch.broker import ask_broker
from trainyard.launch.checks import RunningJob, check_queue
from trainyard.launch.elastic import reviser
from trainyard.launch.launcher import submit_attempt
from trainyard.launch.record import JobRecord, S3RecordStore, update
from trainyard.launch.sagemaker_backend import SageMakerBackend
from trainyard.launch.session import Account
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract

PRICE = 6.0
Change = Callable[[dict[str, Any]], None]


class Jobs:
    """SageMaker as the broker sees it: jobs that hold their instances until told to end."""

    class exceptions:
        """As boto3's clients have them."""

        ClientError = ClientError

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self.described: list[str] = []
        self.refusal = ""

    def add(self, name: str, count: int, *, hours: float = 1, billed: int | None = None, old: bool = False) -> None:
        created = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=40 if old else 0)
        self.jobs[name] = {
            "TrainingJobName": name,
            "TrainingJobStatus": "InProgress" if billed is None else "Completed",
            "CreationTime": created,
            "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": count},
            "StoppingCondition": {"MaxRuntimeInSeconds": round(hours * 3600)},
            **({} if billed is None else {"BillableTimeInSeconds": billed}),
        }

    def create_training_job(self, **request: Any) -> None:
        if self.refusal:
            raise ClientError({"Error": {"Code": self.refusal, "Message": "no\nroom"}}, "CreateTrainingJob")
        self.created.append(request)
        resources = request["ResourceConfig"]
        hours = request["StoppingCondition"]["MaxRuntimeInSeconds"] / 3600
        self.add(request["TrainingJobName"], resources["InstanceCount"], hours=hours)

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        self.described.append(TrainingJobName)
        if TrainingJobName not in self.jobs:
            raise ClientError({"Error": {"Code": "ValidationException", "Message": "none"}}, "DescribeTrainingJob")
        return self.jobs[TrainingJobName]

    def get_paginator(self, _: str) -> "Jobs":
        return self

    def paginate(self, *, NameContains: str, **only: Any) -> Iterator[dict[str, Any]]:
        status, after = only.get("StatusEquals"), only.get("CreationTimeAfter")
        found = [
            {key: job[key] for key in ("TrainingJobName", "TrainingJobStatus", "TrainingEndTime") if key in job}
            for name, job in self.jobs.items()
            if NameContains in name
            and status in (None, job["TrainingJobStatus"])
            and (after is None or job["CreationTime"] > after)
        ]
        yield {"TrainingJobSummaries": found}


@pytest.fixture
def sagemaker() -> Jobs:
    return Jobs()


@pytest.fixture
def ask(deployed: Account, sagemaker: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The handler, in an account where SageMaker is ours."""
    settings = {"contract": "/trainyard/test/acme/contract", "prices": {"ml.p5.4xlarge": PRICE}, "volume_keys": []}
    monkeypatch.setenv("BROKER", json.dumps(settings))
    clients: dict[str, Any] = {"sagemaker": sagemaker}
    for name in ("s3", "ssm"):
        clients[name] = boto3.client(name, region_name=REGION)

    def client(name: str, **_: Any) -> Any:
        return clients[name]

    monkeypatch.setattr(boto3, "client", client)
    monkeypatch.setattr(broker_answers, "LOOK_SECONDS", 0.0)

    def asked(job_id: Any = JOB_ID) -> dict[str, Any]:
        return broker.handler({"job_id": job_id}, None)

    return asked


def forge(deployed: Account, change: Change) -> None:
    """The tenant rewrites its record."""
    s3, place = deployed.client("s3"), {"Bucket": "acme-data", "Key": f"jobs/{JOB_ID}/record.json"}
    content = json.loads(s3.get_object(**place)["Body"].read())
    change(content)
    s3.put_object(**place, Body=json.dumps(content).encode())


def test_it_sends_what_the_launcher_would_send_and_only_once(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, contract: TenantContract, capsys: Any
) -> None:
    assert ask() == {"submitted": JOB_ID, "already": False}
    brokered = contract.model_copy(update={"broker": "broker"})
    assert sagemaker.created == [SageMakerBackend(deployed, brokered).request(record)]
    assert ask() == {"submitted": JOB_ID, "already": True}
    assert len(sagemaker.created) == 1
    audit = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["audit"], line["job_id"], line["already"]) for line in audit] == [
        ("submission", JOB_ID, False),
        ("submission", JOB_ID, True),
    ]
    assert audit[0]["request"] == sagemaker.created[0], "an auditor sees what was submitted"


def test_nothing_of_the_request_is_the_tenants_word(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account
) -> None:
    """A record that names a network, a role, an environment: none of it is looked at."""
    ask()
    proper = sagemaker.created.pop()
    sagemaker.jobs.clear()

    def change(content: dict[str, Any]) -> None:
        content["VpcConfig"] = {"Subnets": ["subnet-other"], "SecurityGroupIds": ["sg-other"]}
        content["RoleArn"] = content["resolved"]["spec"]["role"] = "arn:aws:iam::123456789012:role/Admin"
        content["resolved"]["spec"]["tenant"] = "globex"
        content["Environment"] = {"LD_PRELOAD": "/tmp/x"}
        content["resolved"]["spec"]["checkpoint"]["destination"] = "s3://globex-checkpoints/jobs/x/"

    forge(deployed, change)
    deployed.client("s3").delete_object(Bucket="acme-checkpoints", Key=f"broker/ledger-{_month()}.json")
    ask()
    assert sagemaker.created == [proper]


def _month() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m}"


def _compute(**changes: Any) -> Change:
    return lambda content: content["resolved"]["spec"]["compute"].update(changes)


def _resolved(**changes: Any) -> Change:
    return lambda content: content["resolved"].update(changes)


def _top(**changes: Any) -> Change:
    return lambda content: content.update(changes)


def _channel(**changes: Any) -> Change:
    return lambda content: content["channels"][0].update(changes)


def _data(**changes: Any) -> Change:
    return lambda content: content["resolved"]["spec"]["data"].update(streaming=True, **changes)


def _attempt(**changes: Any) -> Change:
    return lambda content: content["attempts"][-1].update(changes)


FORGED: dict[str, tuple[Change, str]] = {
    "another tenant": (_top(tenant="globex"), "says tenant 'globex', not acme"),
    "another environment": (_top(environment="production"), "says environment 'production'"),
    "another job": (_top(job_id="acme-other"), "says job_id 'acme-other'"),
    "another's name": (_attempt(training_job_name="globex-llama-1"), "names attempt 1 'globex-llama-1', not"),
    "no such attempt": (_attempt(number=0), "attempt '0' is not between 1 and 99"),
    "no attempts": (_top(attempts=[]), "its record is no job record"),
    "no spec": (_top(resolved=None), "its record is no job record"),
    "no compute": (lambda c: c["resolved"]["spec"].update(compute="all"), "its record is no job record"),
    "no name": (lambda c: c["resolved"]["spec"].pop("name"), "its record is no job record"),
    "attempts by name": (_top(attempts={"number": 1}), "its record is no job record"),
    "a job's name": (lambda c: c["resolved"]["spec"].update(name="x\ny"), "is no job's name"),
    "a foreign type": (_compute(instance_type="ml.p5.48xlarge"), "no queue of tenant acme offers it"),
    "no type": (_compute(instance_type=None), "'None' is no instance type"),
    "no such queue": (_compute(queue="huge"), "compute.queue 'huge': tenant acme has no such queue"),
    "more hosts than stated": (_resolved(num_hosts=4), "'4' hosts is no number of machines"),
    "hosts": (lambda c: (_resolved(num_hosts=5)(c), _compute(instance_count=5)(c)), "which is 4 x ml.p5.4xlarge"),
    "negative hosts": (lambda c: (_resolved(num_hosts=-1)(c), _compute(instance_count=-1)(c)), "no number of machines"),
    "true hosts": (lambda c: (_resolved(num_hosts=True)(c), _compute(instance_count=1)(c)), "no number of machines"),
    "too long": (_compute(max_hours=25), "over the 24 hours"),
    "endless": (_compute(max_hours=float("inf")), "is no running time"),
    "no number": (_compute(max_hours=float("nan")), "is no running time"),
    "no second": (_compute(max_hours=0.0001), "'0.0001' is no running time"),
    "spot by number": (_compute(spot=1), "'1' is neither true nor false"),
    "a short wait": (_compute(max_wait_hours=1), "is not between max_hours and"),
    "spot perhaps": (_compute(spot="yes"), "is neither true nor false"),
    "an image of elsewhere": (
        _top(image="999999999999.dkr.ecr.us-east-1.amazonaws.com/x@sha256:1"),
        "none that the pl",
    ),
    "an image by tag": (_top(image=IMAGE.partition("@")[0] + ":latest"), "none that the platform has released"),
    "another's bucket": (
        _channel(location="s3://globex-data/x/"),
        "is outside of tenant acme's buckets (acme-data, ac",
    ),
    "a bucket that begins alike": (_channel(location="s3://acme-data-2/x/"), "is outside of tenant acme's buckets"),
    "up the file system": (_channel(kind="fsx", location="a/../../other"), "is no path of the file system"),
    "another source": (_channel(kind="http"), "is neither s3 nor fsx"),
    "the spec's channel": (_channel(name="job"), "none `job`"),
    "two of a name": (_channel(name="tokenizer"), "each once"),
    "a source of no path": (_data(train=[{}]), "data.train of its record has a source without a path"),
    "a source of a number": (_data(validation=[1]), "data.validation of its record has a source without a path"),
    "sources of a number": (_data(train=5), "its record has no list of data.train"),
    "no channels": (_top(channels={"a": 1}), "no list of channels"),
    **{
        f"spec {number}": (_top(spec_name=name), "of its record is not 16 hex digits")
        for number, name in enumerate(
            (
                "../../../secret",
                "0123456789ABCDEF",
                "0123456789abcde",
                "0" * 17,
                f"{'0' * 16}\n",
                "x/" * 8,
                16,
                None,
                [],
            )
        )
    },
}


def test_a_forged_record_is_refused_in_one_line(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account
) -> None:
    proper = record.model_dump(mode="json")
    for what, (change, words) in FORGED.items():
        forge(deployed, lambda content: (content.clear(), content.update(json.loads(json.dumps(proper)))))
        forge(deployed, change)
        answer = ask()
        assert answer.get("by") == "rules", f"{what}: {answer}"
        assert words in answer["refused"], f"{what}: {answer['refused']}"
        assert "\n" not in answer["refused"]
    assert sagemaker.created == []


def test_each_attempt_reads_the_spec_that_it_was_handed_over_with(
    ask: Any,
    record: JobRecord,
    sagemaker: Jobs,
    deployed: Account,
    contract: TenantContract,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = SageMakerBackend(deployed, contract.model_copy(update={"broker": "broker"}))
    s3, store = deployed.client("s3"), S3RecordStore(deployed.client("s3"), "acme-data")
    monkeypatch.setattr(sagemaker_backend, "ask_broker", lambda *_: ask())

    def hand_over() -> JobRecord:
        return submit_attempt(store, backend, store.read(JOB_ID).record, lambda _: None)

    first = hand_over()
    sagemaker.add(JOB_ID, 2, billed=60)
    update(store, JOB_ID, lambda now: reviser(("checkpoint.keep_last=7",), None)(now).with_next_attempt())
    second = hand_over()
    sagemaker.add(f"{JOB_ID}-r2", 2, billed=60)
    update(store, JOB_ID, JobRecord.with_next_attempt)
    hand_over()
    assert [request["TrainingJobName"] for request in sagemaker.created] == [JOB_ID, f"{JOB_ID}-r2", f"{JOB_ID}-r3"]
    assert [kept_last(s3, request) for request in sagemaker.created] == [first.spec.checkpoint.keep_last, 7, 7]
    assert sagemaker.created[:2] == [backend.request(first), backend.request(second)]
    assert sagemaker.created[1]["InputDataConfig"] == sagemaker.created[2]["InputDataConfig"], "the same spec"

    # A record of a launcher that had one place for all, and a broker that still asks for that.
    sagemaker.add(f"{JOB_ID}-r3", 2, billed=60)
    forge(deployed, lambda content: content.pop("spec_name"))
    forge(deployed, _attempt(number=4, training_job_name=f"{JOB_ID}-r4"))
    assert ask()["submitted"] == f"{JOB_ID}-r4"
    assert spec_place(sagemaker.created[3]) == f"s3://acme-data/jobs/{JOB_ID}/spec/"
    assert kept_last(s3, sagemaker.created[3]) == 7

    # One that is refused at the door leaves the record as it was.
    def refuse(*_: object) -> None:
        raise AwsRefusedError("the queue is full")

    before = store.read(JOB_ID).record
    sagemaker.add(f"{JOB_ID}-r4", 2, billed=60)
    update(store, JOB_ID, lambda now: reviser(("checkpoint.keep_last=9",), None)(now).with_next_attempt())
    with monkeypatch.context() as door, pytest.raises(AwsRefusedError):
        door.setattr(sagemaker_backend, "ask_broker", refuse)
        hand_over()
    after = store.read(JOB_ID).record
    assert (after.attempt.number, after.spec_name, after.attempt.handed_over_at) == (5, before.spec_name, None)


def spec_place(request: dict[str, Any]) -> str:
    (channel,) = [one for one in request["InputDataConfig"] if one["ChannelName"] == "job"]
    return str(channel["DataSource"]["S3DataSource"]["S3Uri"])


def kept_last(s3: Any, request: dict[str, Any]) -> int:
    """checkpoint.keep_last of the spec that the request's job reads."""
    _, _, bucket, prefix = spec_place(request).split("/", 3)
    text = s3.get_object(Bucket=bucket, Key=f"{prefix}resolved_job.json")["Body"].read()
    return int(json.loads(text)["spec"]["checkpoint"]["keep_last"])


def test_a_job_id_is_the_tenants_own_and_has_a_record(ask: Any, sagemaker: Jobs, deployed: Account) -> None:
    ids = {
        "globex-tiny-20260131120000-1a2b": "is no job of tenant acme",
        "acme-../../globex": "is no job id",
        "acme-" + "x" * 63: "is no job of tenant acme",
        "acme-nothing-20260131120000-1a2b": "there is no record of it",
        f"{JOB_ID}-r2": "doesn't end as a job's id does",
        "acme-tiny": "doesn't end as a job's id does",
        JOB_ID[:-1]: "doesn't end as a job's id does",
    }
    for job_id, words in ids.items():
        assert words in ask(job_id)["refused"]
    for odd in (None, 7, ["acme-a"]):
        assert "is no job id" in ask(odd)["refused"]
    assert "is no job id" in broker.handler([], None)["refused"]  # type: ignore[arg-type]
    bad = {b"{": "is not JSON", b"[" * 100_000: "is not JSON", b" " * (broker.MAX_RECORD_BYTES + 1): "is larger than"}
    for body, words in bad.items():
        deployed.client("s3").put_object(Bucket="acme-data", Key=f"jobs/{JOB_ID}/record.json", Body=body)
        assert words in ask()["refused"]
    assert sagemaker.created == []


def test_a_resume_goes_on_with_the_image_that_it_began_with(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account
) -> None:
    released = IMAGE.replace("ab", "cd")
    deployed.client("ssm").put_parameter(Name="/trainyard/test/image", Value=released, Overwrite=True)
    forge(deployed, _attempt(number=2, training_job_name=f"{JOB_ID}-r2"))
    assert ask() == {"submitted": f"{JOB_ID}-r2", "already": False}
    assert sagemaker.created[0]["AlgorithmSpecification"]["TrainingImage"] == IMAGE


def test_running_jobs_count_and_two_at_once_do_not_pass_each_other(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, contract: TenantContract
) -> None:
    sagemaker.add("acme-since-last-month", 3, old=True)
    sagemaker.add("globex-acme-like", 9)
    answer = ask()
    assert "3 of the 4 instances of queue gpu are held by acme-since-last-month (3)" in answer["refused"]
    del sagemaker.jobs["acme-since-last-month"]

    ledger = _ledger(deployed, sagemaker)
    rival = _ledger(deployed, sagemaker)
    entry = ledger.entry("ml.p5.4xlarge", 3, 3600)
    compute, rules = {"instance_type": "ml.p5.4xlarge"}, contract.model_dump(mode="json")
    seen = []

    def check(_: Any, holders: list[dict[str, Any]]) -> None:
        seen.append([job["name"] for job in holders])
        if len(seen) == 1:  # after this one has read, before it writes
            rival.promise("acme-rival", entry, lambda jobs, held: None)
        broker_rules.check_quota(compute, 3, rules, holders)

    with pytest.raises(broker_rules.Refused, match=r"held by acme-rival \(3\)"):
        ledger.promise("acme-slower", entry, check)
    assert seen == [[], ["acme-rival"]]
    assert "are held by acme-rival" in ask()["refused"]


def test_machines_that_are_kept_warm_are_held_but_for_the_job_that_takes_them(
    ask: Any, record: JobRecord, sagemaker: Jobs
) -> None:
    """The job asks for two of the queue's four machines."""
    sagemaker.add("acme-warm", 3, billed=60)
    job = sagemaker.jobs["acme-warm"]
    job["ResourceConfig"]["KeepAlivePeriodInSeconds"] = 3600
    job["WarmPoolStatus"] = {"Status": "Available"}
    for _ in range(2):  # also once the ledger has it
        assert "3 of the 4 instances of queue gpu are held by acme-warm (3)" in ask()["refused"]
    sagemaker.add("acme-other", 2)
    job["ResourceConfig"]["InstanceCount"] = 2
    assert ask()["submitted"] == JOB_ID, "the two that are warm are the ones that it gets"


def test_machines_that_are_warm_no_more_are_free(ask: Any, record: JobRecord, sagemaker: Jobs) -> None:
    sagemaker.add("acme-warm", 3, billed=60)
    sagemaker.jobs["acme-warm"]["WarmPoolStatus"] = {"Status": "InUse"}
    assert "are held by acme-warm (3)" in ask()["refused"]
    sagemaker.jobs["acme-warm"]["WarmPoolStatus"] = {"Status": "Terminated"}
    assert ask()["submitted"] == JOB_ID


def _ledger(deployed: Account, sagemaker: Jobs, **ahead: float) -> Ledger:
    return Ledger(
        deployed.client("s3"),
        sagemaker,
        bucket="acme-checkpoints",
        tenant="acme",
        prices={"ml.p5.4xlarge": PRICE},
        gpus={"ml.p5.4xlarge": 1},
        now=datetime.datetime.now(datetime.UTC) + datetime.timedelta(**ahead),
    )


def test_the_months_money_is_spent_promised_and_capped(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account
) -> None:
    # 5,000 USD; the job could cost 2 hosts x 2 h x 6 USD = 24. What ended counts as billed, what runs at its longest.
    sagemaker.add("acme-ended", 2, hours=1000, billed=412 * 3600)
    sagemaker.add("acme-running", 1, hours=6)
    refused = ask()["refused"]
    assert "this job could cost up to 24.00 USD (2 x ml.p5.4xlarge for 2 h)" in refused
    assert f"of {_month()}'s 5,000.00 USD, 4,944.00 are spent and 36.00 could go to jobs that run" in refused
    sagemaker.jobs["acme-running"] |= {"TrainingJobStatus": "Failed", "BillableTimeInSeconds": 60}
    assert ask()["submitted"] == JOB_ID


def _since_last_month(sagemaker: Jobs, name: str, *, hours: float, before: float, billed: int | None = None) -> None:
    """A job whose machines were up `before` hours of last month, and 3 of this one if it is over."""
    first = month_of(datetime.datetime.now(datetime.UTC))[0]
    sagemaker.add(name, 1, hours=hours, billed=billed)
    started = first - datetime.timedelta(hours=before)
    sagemaker.jobs[name] |= {"CreationTime": started - datetime.timedelta(days=1), "TrainingStartTime": started}
    if billed is not None:
        sagemaker.jobs[name] |= {"TrainingEndTime": first + datetime.timedelta(hours=3)}


@pytest.mark.parametrize("over", [2, 0])
def test_what_ran_over_the_first_of_the_month_counts_with_its_part_of_it(
    ask: Any, record: JobRecord, sagemaker: Jobs, over: float
) -> None:
    # 5,000 USD at 6 USD an hour. One could still run 815 hours of this month: 4,890 USD. Of one's 6 billed hours 3 are
    # of this month: 18 USD. This job's 24 USD fit beside them; where the first could run 20 hours more they don't.
    _since_last_month(sagemaker, "acme-running", hours=48 + 815 + 10 * over, before=48)
    _since_last_month(sagemaker, "acme-ended", hours=9, before=3, billed=6 * 3600)
    _since_last_month(sagemaker, "acme-long-over", hours=9, before=90, billed=9000 * 3600)
    ended = month_of(datetime.datetime.now(datetime.UTC))[0] - datetime.timedelta(seconds=1)
    sagemaker.jobs["acme-long-over"]["TrainingEndTime"] = ended
    answer = ask()
    if over:
        assert f"of {_month()}'s 5,000.00 USD, 18.00 are spent and 5,010.00 could go to jobs" in answer["refused"]
    else:
        assert answer["submitted"] == JOB_ID


def _retell(deployed: Account, contract: TenantContract, **changes: Any) -> None:
    """The tenant's contract says otherwise."""
    told = contract.model_copy(update=changes).model_dump_json()
    deployed.client("ssm").put_parameter(Name="/trainyard/test/acme/contract", Value=told, Overwrite=True)


def test_gpu_hours_are_a_quota_of_their_own_without_a_price(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, contract: TenantContract, monkeypatch: Any
) -> None:
    settings = {"contract": "/trainyard/test/acme/contract", "prices": {}, "gpus": {"ml.p5.4xlarge": 1}}
    monkeypatch.setenv("BROKER", json.dumps(settings | {"volume_keys": []}))
    _retell(deployed, contract, monthly_gpu_hours=100.0)
    # Spot saved half of its money and no GPU-hour.
    sagemaker.add("acme-ended", 2, hours=100, billed=24 * 3600)
    sagemaker.jobs["acme-ended"]["TrainingTimeInSeconds"] = 48 * 3600
    sagemaker.add("acme-running", 1, hours=0.5)
    refused = ask()["refused"]
    assert "this job could take up to 4.00 GPU-hours (2 x ml.p5.4xlarge for 2 h)" in refused
    assert f"of {_month()}'s 100.00 GPU-hours, 96.00 are spent and 0.50 could go to jobs that run" in refused
    assert refused.endswith("or raise budget.monthly_gpu_hours in the environment file")
    _retell(deployed, contract, monthly_gpu_hours=101.0)
    assert ask()["warning"] == f"100% of {_month()}'s 101.00 GPU-hours are spent or promised with this job"


def test_gpu_hours_of_what_was_kept_warm_count_though_they_were_idle(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, contract: TenantContract
) -> None:
    """As the meter counts them: of an hour of training and six of waiting all seven."""
    sagemaker.add("acme-warm", 2, billed=3600)
    retained = {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 6 * 3600}
    sagemaker.jobs["acme-warm"] |= {"TrainingTimeInSeconds": 3600, "WarmPoolStatus": retained}
    _ledger(deployed, sagemaker).promise("acme-x", _ledger(deployed, sagemaker).entry("x", 1, 60), lambda *_: None)
    kept = _kept(deployed)["acme-warm"]
    assert (kept["held"], kept["billed"]) == (7 * 3600, 7 * 3600)


def test_a_job_that_names_no_machines_keeps_nobody_from_submitting(
    ask: Any, record: JobRecord, sagemaker: Jobs
) -> None:
    """SageMaker's answer about a serverless job, an administrator's perhaps, says nothing of resources."""
    sagemaker.add("acme-serverless", 1, billed=60)
    sagemaker.jobs["acme-serverless"]["WarmPoolStatus"] = {"Status": "InUse"}
    sagemaker.add("acme-serverless-2", 1)
    for name in ("acme-serverless", "acme-serverless-2"):
        del sagemaker.jobs[name]["ResourceConfig"]
    assert ask()["submitted"] == JOB_ID


@pytest.fixture
def mid_month(monkeypatch: pytest.MonkeyPatch) -> datetime.datetime:
    """The broker's moment: what began hours or days ago began in the same month."""
    moment = month_of(datetime.datetime.now(datetime.UTC))[0] + datetime.timedelta(days=20)
    frozen = types.SimpleNamespace(datetime=types.SimpleNamespace(now=lambda _: moment), UTC=datetime.UTC)
    monkeypatch.setattr(broker, "datetime", frozen)
    return moment


def test_with_stop_a_job_starts_as_long_as_something_is_left(
    ask: Any,
    record: JobRecord,
    sagemaker: Jobs,
    deployed: Account,
    contract: TenantContract,
    mid_month: datetime.datetime,
) -> None:
    _retell(deployed, contract, when_spent="stop")
    # 4,944 of 5,000 USD, and a job that runs since an hour: 6 USD of it, not the 6,000 that it may run for.
    sagemaker.add("acme-ended", 2, hours=1000, billed=412 * 3600)
    sagemaker.add("acme-running", 1, hours=1000)
    started = mid_month - datetime.timedelta(hours=1)
    sagemaker.jobs["acme-running"]["TrainingStartTime"] = started
    answer = ask()
    assert answer["submitted"] == JOB_ID
    assert answer["warning"] == f"99% of {_month()}'s 5,000.00 USD are spent"
    sagemaker.jobs["acme-running"]["TrainingStartTime"] = started - datetime.timedelta(hours=9)
    deployed.client("s3").delete_object(Bucket="acme-checkpoints", Key=f"broker/ledger-{_month()}.json")
    del sagemaker.jobs[JOB_ID]
    refused = ask()["refused"]
    assert refused.startswith(f"budget of tenant acme: 5,004.00 of {_month()}'s 5,000.00 USD are spent; wait for the")


def test_with_stop_who_waits_for_machines_spends_nothing_until_they_come(
    ask: Any,
    record: JobRecord,
    sagemaker: Jobs,
    deployed: Account,
    contract: TenantContract,
    mid_month: datetime.datetime,
) -> None:
    """Created 15 days ago, without machines until ten hours ago; also where an earlier release wrote the ledger."""
    _retell(deployed, contract, when_spent="stop")
    sagemaker.add("acme-ended", 2, hours=1000, billed=412 * 3600)  # 4,944 of 5,000 USD
    sagemaker.add("acme-waiting", 1, hours=1000)
    waiting = sagemaker.jobs["acme-waiting"]
    waiting["CreationTime"] = mid_month - datetime.timedelta(days=15)
    earlier = _ledger(deployed, sagemaker).entry("ml.p5.4xlarge", 1, 3_600_000)
    earlier |= {"at": waiting["CreationTime"].timestamp(), "seen": True}
    earlier.pop("started", None)
    body = json.dumps({"version": 1, "month": _month(), "jobs": {"acme-waiting": earlier}}).encode()
    deployed.client("s3").put_object(Bucket="acme-checkpoints", Key=f"broker/ledger-{_month()}.json", Body=body)
    assert ask()["submitted"] == JOB_ID
    del sagemaker.jobs[JOB_ID]
    waiting["TrainingStartTime"] = mid_month - datetime.timedelta(hours=10)
    assert "5,004.00 of" in ask()["refused"]
    sagemaker.described.clear()
    assert "5,004.00 of" in ask()["refused"]
    assert "acme-waiting" not in sagemaker.described, "it has begun, and need not be asked again"


def test_with_stop_a_spot_job_spends_nothing_while_its_machines_are_gone(
    ask: Any,
    record: JobRecord,
    sagemaker: Jobs,
    deployed: Account,
    contract: TenantContract,
    mid_month: datetime.datetime,
) -> None:
    """It ran for an hour, and waits for spot capacity since; when that is back it spends again."""
    _retell(deployed, contract, when_spent="stop")
    sagemaker.add("acme-ended", 2, hours=1000, billed=412 * 3600)  # 4,944 of 5,000 USD
    sagemaker.add("acme-spot", 1, hours=1000)
    began = mid_month - datetime.timedelta(hours=40)
    lost = {"Status": "Interrupted", "StartTime": began + datetime.timedelta(hours=1)}
    job = sagemaker.jobs["acme-spot"]
    job |= {"TrainingStartTime": began, "EnableManagedSpotTraining": True, "SecondaryStatusTransitions": [lost]}
    assert ask()["submitted"] == JOB_ID
    del sagemaker.jobs[JOB_ID]
    back = began + datetime.timedelta(hours=30)
    trains = {"Status": "Training", "StartTime": back}
    job["SecondaryStatusTransitions"] = [{**lost, "EndTime": back}, trains]
    assert "5,010.00 of" in ask()["refused"], "11 hours of it"


def test_spot_jobs_are_looked_at_again_with_stop_alone_last_and_as_time_allows(
    deployed: Account, sagemaker: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many run: one that is known refuses nobody, and one that waits still changes nothing in the ledger."""
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    began = month_of(now)[0] - hour
    gone = [{"Status": "Interrupted", "StartTime": began}]
    for name in ("acme-a", "acme-b"):
        sagemaker.add(name, 1)
        told = {"TrainingStartTime": began, "EnableManagedSpotTraining": True}
        sagemaker.jobs[name] |= told | ({"SecondaryStatusTransitions": gone} if name == "acme-b" else {})
    writes: list[str] = []

    def submit(follows_spot: bool) -> list[str]:
        sagemaker.described.clear()
        ledger = _ledger(deployed, sagemaker)
        ledger._follows_spot = follows_spot
        write = ledger._write
        monkeypatch.setattr(ledger, "_write", lambda jobs, etag: (writes.append(etag), write(jobs, etag))[1])
        with pytest.raises(broker_rules.Refused):
            ledger.promise("acme-new", ledger.entry("ml.p5.4xlarge", 1, 60), _refuse)
        return list(sagemaker.described)

    submit(False)
    assert submit(False) == [], "at its longest it counts all the same"
    assert len(writes) == 1
    sagemaker.add("acme-z", 1, billed=60)
    assert submit(True) == ["acme-z", "acme-b", "acme-a"], "what the ledger lacks, what waited, what ran"
    assert submit(True) == ["acme-b", "acme-a"]
    assert len(writes) == 2, "nothing has changed, though time went on"
    monkeypatch.setattr(broker_ledger, "PATIENCE_SECONDS", -1.0)
    assert submit(True) == []


def test_a_ledgers_write_whose_answer_was_lost_ends_well(deployed: Account, sagemaker: Jobs) -> None:
    """The SDK sends it again, and S3 refuses that for what the first one wrote."""
    ledger = _ledger(deployed, sagemaker)
    s3 = ledger._s3
    lost = ["promise"]

    class Twice:
        exceptions, get_object = s3.exceptions, s3.get_object

        def put_object(self, **request: Any) -> Any:
            answer = s3.put_object(**request)
            return s3.put_object(**request) if lost and lost.pop(0) else answer

    ledger._s3 = Twice()
    entry = ledger.entry("ml.p5.4xlarge", 1, 60)
    ledger.promise("acme-a", entry, lambda jobs, held: None)
    assert _kept(deployed) == {"acme-a": entry} and not lost
    lost.append("release")
    ledger.release("acme-a", entry)
    assert _kept(deployed) == {} and not lost


@pytest.mark.parametrize("when_spent", ["finish", "stop"])
def test_what_was_interrupted_before_the_month_was_no_runtime(
    when_spent: str,
    ask: Any,
    record: JobRecord,
    sagemaker: Jobs,
    deployed: Account,
    contract: TenantContract,
    mid_month: datetime.datetime,
) -> None:
    """It may run for 28 days, and was without machines for nearly as long before the first: most of it is to come."""
    _retell(deployed, contract, when_spent=when_spent)
    first = month_of(mid_month)[0]
    began, lost = first - datetime.timedelta(days=30), first - datetime.timedelta(days=28)
    sagemaker.add("acme-spot", 1, hours=28 * 24)
    changes = [
        {"Status": "Interrupted", "StartTime": lost, "EndTime": first},
        {"Status": "Training", "StartTime": first},
    ]
    job = sagemaker.jobs["acme-spot"]
    job |= {"CreationTime": began, "TrainingStartTime": began, "EnableManagedSpotTraining": True}
    job["SecondaryStatusTransitions"] = changes
    sagemaker.add("acme-ended", 1, billed=round(2121 / PRICE * 3600))
    told = {"stop": "5,001.00 of", "finish": "2,121.00 are spent and 3,744.00 could go to jobs that run"}
    assert told[when_spent] in ask()["refused"], "20 days of this month; 26 that it may still run"


def test_a_type_without_a_price_is_let_through_and_said_to_be_uncapped(
    ask: Any, record: JobRecord, sagemaker: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"contract": "/trainyard/test/acme/contract", "prices": {}, "volume_keys": []}
    monkeypatch.setenv("BROKER", json.dumps(settings))
    line = "no price of ml.p5.4xlarge is known here: what it costs is not held against budget.monthly_usd"
    assert ask() == {"submitted": JOB_ID, "already": False, "uncapped": line}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["uncapped"] == line


def test_a_request_that_was_never_sent_keeps_no_promise(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [ParamValidationError(report="MaxRuntimeInSeconds is 0"), KeyError("a fault of ours")]

    def refuse(**_: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(sagemaker, "create_training_job", refuse)
    assert ask()["code"] == "ParamValidationError"
    assert _kept(deployed) == {}
    with pytest.raises(KeyError):
        ask()
    assert _kept(deployed) == {}


def _refused(code: str, status: int, operation: str = "CreateTrainingJob") -> ClientError:
    answer: Any = {"Error": {"Code": code, "Message": "x"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)


LOST = [
    ReadTimeoutError(endpoint_url="https://sagemaker"),
    EndpointConnectionError(endpoint_url="https://sagemaker"),
    _refused("ServiceUnavailable", 503),
    _refused("ResourceInUse", 400),
]
"""What may come of a request that SageMaker has taken: of the last one's repetition by the SDK."""


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_job_whose_answer_was_lost_is_submitted(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    create, describe, looks = sagemaker.create_training_job, sagemaker.describe_training_job, []

    def lose(**request: Any) -> None:
        create(**request)
        monkeypatch.setattr(sagemaker, "describe_training_job", slow)
        raise error

    def slow(TrainingJobName: str) -> dict[str, Any]:
        looks.append(TrainingJobName)
        return describe("acme-not-yet" if len(looks) == 1 else TrainingJobName)

    monkeypatch.setattr(sagemaker, "create_training_job", lose)
    assert ask() == {"submitted": JOB_ID, "already": False}
    assert set(_kept(deployed)) == {JOB_ID} and looks == [JOB_ID] * 2
    assert ask() == {"submitted": JOB_ID, "already": True} and len(sagemaker.created) == 1


def test_a_refusal_of_a_request_that_the_sdk_repeated_is_no_refusal_of_the_first(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That job holds the machines, and SageMaker may show it a little later."""
    create, describe, looks = sagemaker.create_training_job, sagemaker.describe_training_job, []

    def late(TrainingJobName: str) -> dict[str, Any]:
        looks.append(TrainingJobName)
        return describe("acme-not-yet" if len(looks) < 3 else TrainingJobName)

    def repeat(**request: Any) -> None:
        create(**request)
        monkeypatch.setattr(sagemaker, "describe_training_job", late)
        error = _refused("ResourceLimitExceeded", 400)
        error.response["ResponseMetadata"]["RetryAttempts"] = 1
        raise error

    monkeypatch.setattr(sagemaker, "create_training_job", repeat)
    assert ask() == {"submitted": JOB_ID, "already": False}
    assert set(_kept(deployed)) == {JOB_ID}


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_where_nobody_can_know_the_broker_says_so_and_the_next_call_settles_it(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    create, sent = sagemaker.create_training_job, list[dict[str, Any]]()

    def lose(**request: Any) -> None:
        sent.append(request)
        raise error

    monkeypatch.setattr(sagemaker, "create_training_job", lose)
    answer = ask()
    assert (answer["code"], answer["may_run"]) == ("Unknown", True)
    assert answer["refused"].startswith(f"whether {JOB_ID} was taken can't be known now: ")
    assert answer["refused"].endswith("; it isn't there, and may come yet")
    assert set(_kept(deployed)) == {JOB_ID}, "its promise stands"
    create(**sent[0])  # SageMaker was only late
    assert ask() == {"submitted": JOB_ID, "already": True} and len(sagemaker.created) == 1


def test_a_look_that_gets_no_answer_refuses_nothing(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where SageMaker's word was a refusal: the SDK may have asked twice, and the first job holds the machines."""
    create = sagemaker.create_training_job
    silent: list[BotoCoreError | ClientError] = [
        ReadTimeoutError(endpoint_url="https://sagemaker"),
        _refused("ThrottlingException", 400, "DescribeTrainingJob"),
    ]

    def describe(TrainingJobName: str) -> dict[str, Any]:
        raise silent.pop()

    def lose(**request: Any) -> None:
        create(**request)
        monkeypatch.setattr(sagemaker, "describe_training_job", describe)
        raise _refused("ResourceLimitExceeded", 400)

    honest = sagemaker.describe_training_job
    monkeypatch.setattr(sagemaker, "create_training_job", lose)
    while silent:
        answer = ask()
        assert (
            answer["may_run"] and "ResourceLimitExceeded" in answer["refused"] and "looking for it" in answer["refused"]
        )
        assert set(_kept(deployed)) == {JOB_ID}
        monkeypatch.setattr(sagemaker, "describe_training_job", honest)
        if silent:
            sagemaker.jobs.clear()
    assert ask() == {"submitted": JOB_ID, "already": True}


def test_a_role_that_could_not_be_made_is_no_lost_answer(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, contract: TenantContract, monkeypatch: Any
) -> None:
    _retell(deployed, contract, job_boundary="arn:aws:iam::123456789012:policy/boundary")

    def make(*_: Any) -> None:
        raise ReadTimeoutError(endpoint_url="https://iam")

    monkeypatch.setattr(broker, "JobRoles", lambda *_: types.SimpleNamespace(make=make))
    monkeypatch.setattr(boto3, "client", lambda name, client=boto3.client, **_: client(name) if name != "iam" else None)
    answer = ask()
    assert answer["code"] == "ReadTimeoutError" and "may_run" not in answer
    assert _kept(deployed) == {} and not sagemaker.created


@pytest.mark.parametrize("lost", [False, True])
def test_a_job_of_that_name_that_is_another_is_not_taken_for_the_one_that_is_asked_for(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def lose(**request: Any) -> None:
        sagemaker.add(JOB_ID, 2, hours=7)
        raise LOST[0]

    if lost:
        monkeypatch.setattr(sagemaker, "create_training_job", lose)
    else:
        sagemaker.add(JOB_ID, 2, hours=7)
    answer = ask()
    assert answer["by"] == "rules" and not sagemaker.created
    assert answer["refused"].startswith(
        f"job {JOB_ID}: is there already, and not as its record says now: MaxRuntimeInSeconds is 25200, not 7200; stop"
    )


def _kept(deployed: Account) -> dict[str, Any]:
    """The month's jobs as the broker wrote them down."""
    ledger = deployed.client("s3").get_object(Bucket="acme-checkpoints", Key=f"broker/ledger-{_month()}.json")
    return dict(json.load(ledger["Body"])["jobs"])


def test_of_two_calls_for_one_job_the_second_rewrites_no_promise(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between promise and job the record is rewritten to something small, and the broker called again."""
    create, answers = sagemaker.create_training_job, []

    def slow(**request: Any) -> None:
        monkeypatch.setattr(sagemaker, "create_training_job", create)
        answers.append(ask())  # the record says the same: one job, one promise
        assert sagemaker.created.pop() == request
        sagemaker.jobs.clear()
        forge(deployed, _compute(max_hours=0.01, max_wait_hours=None))
        answers.append(ask())
        create(**request)

    monkeypatch.setattr(sagemaker, "create_training_job", slow)
    assert ask()["submitted"] == JOB_ID
    assert answers[0]["submitted"] == JOB_ID
    assert (answers[1]["by"], answers[1]["code"]) == ("aws", "Busy")
    assert f"{JOB_ID} is being submitted as 2 x ml.p5.4xlarge by another call" in answers[1]["refused"]
    assert _kept(deployed)[JOB_ID]["seconds"] == 2 * 3600


def test_a_call_that_fails_takes_back_its_own_promise_alone(deployed: Account, sagemaker: Jobs) -> None:
    one, other = _ledger(deployed, sagemaker), _ledger(deployed, sagemaker, seconds=1)
    first, second = (ledger.entry("ml.p5.4xlarge", 1, 60) for ledger in (one, other))
    one.promise("acme-a", first, lambda jobs, held: None)
    other.promise("acme-a", second, lambda jobs, held: None)
    other.release("acme-a", second)
    assert _kept(deployed) == {"acme-a": first}
    one.release("acme-a", first)
    assert _kept(deployed) == {}


def test_what_runs_counts_as_sagemaker_says_whatever_was_promised(deployed: Account, sagemaker: Jobs) -> None:
    held: list[int] = []
    ledger = _ledger(deployed, sagemaker)
    ledger.promise("acme-a", ledger.entry("ml.p5.4xlarge", 1, 36), lambda jobs, held: None)
    sagemaker.add("acme-a", 3, hours=5)
    for name in ("acme-b", "acme-c"):
        entry = ledger.entry("ml.p5.4xlarge", 1, 60)
        ledger.promise(name, entry, lambda jobs, holders: held.append(sum(job["count"] for job in holders)))
        ledger.release(name, entry)
    assert held == [3, 3]
    assert (_kept(deployed)["acme-a"]["count"], _kept(deployed)["acme-a"]["seconds"]) == (3, 5 * 3600)


def test_a_promise_lapses_is_taken_back_and_a_lost_ledger_is_made_anew(
    ask: Any, record: JobRecord, sagemaker: Jobs, deployed: Account
) -> None:
    sagemaker.refusal = "ResourceLimitExceeded"
    answer = ask()
    assert (answer["by"], answer["code"]) == ("aws", "ResourceLimitExceeded")
    assert answer["refused"] == "CreateTrainingJob: ResourceLimitExceeded: no room"
    sagemaker.refusal = ""
    seen: list[Any] = []

    def look(jobs: Any, holders: Any) -> None:
        seen.append((sorted(jobs), sorted(job["name"] for job in holders)))

    entry = _ledger(deployed, sagemaker).entry("ml.p5.4xlarge", 1, 60)
    _ledger(deployed, sagemaker).promise("acme-never-created", entry, look)
    _ledger(deployed, sagemaker).promise("acme-second", entry, look)
    _ledger(deployed, sagemaker, minutes=16).promise("acme-third", entry, look)
    assert seen == [([], []), (["acme-never-created"],) * 2, ([], [])]
    sagemaker.add("acme-ended", 1, billed=60)
    deployed.client("s3").delete_object(Bucket="acme-checkpoints", Key=f"broker/ledger-{_month()}.json")
    _ledger(deployed, sagemaker).promise("acme-fourth", entry, look)
    assert seen[-1] == (["acme-ended"], [])


def _refuse(*_: Any) -> None:
    raise broker_rules.Refused("spent")


def test_what_a_refused_call_has_learnt_is_not_asked_again(deployed: Account, sagemaker: Jobs) -> None:
    for number in range(120):
        sagemaker.add(f"acme-ended-{number}", 1, billed=60)
    entry = _ledger(deployed, sagemaker).entry("ml.p5.4xlarge", 1, 60)
    for _ in range(2):
        with pytest.raises(broker_rules.Refused):
            _ledger(deployed, sagemaker).promise("acme-new", entry, _refuse)
    assert len(sagemaker.described) == 120
    assert set(_kept(deployed)) == set(sagemaker.jobs), "and nothing is promised"


def test_a_call_that_ran_out_of_time_leaves_its_batches_to_the_next(
    deployed: Account, sagemaker: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2 * broker_ledger.BATCH + 30):
        sagemaker.add(f"acme-ended-{number}", 1, billed=60)
    describe = sagemaker.describe_training_job

    def ending(TrainingJobName: str) -> dict[str, Any]:
        if len(sagemaker.described) == 2 * broker_ledger.BATCH + 20:
            raise TimeoutError("Lambda ends the function")
        return describe(TrainingJobName)

    monkeypatch.setattr(sagemaker, "describe_training_job", ending)
    entry = _ledger(deployed, sagemaker).entry("ml.p5.4xlarge", 1, 60)
    with pytest.raises(TimeoutError):
        _ledger(deployed, sagemaker).promise("acme-new", entry, lambda jobs, held: None)
    assert len(_kept(deployed)) == 2 * broker_ledger.BATCH
    monkeypatch.setattr(sagemaker, "describe_training_job", describe)
    sagemaker.described.clear()
    _ledger(deployed, sagemaker).promise("acme-new", entry, lambda jobs, held: None)
    assert len(sagemaker.described) == 30


def test_a_call_that_sees_its_time_run_out_says_so_and_the_next_goes_on(
    ask: Any, record: JobRecord, sagemaker: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        sagemaker.add(f"acme-ended-{number}", 1, billed=60)
    monkeypatch.setattr(broker_ledger, "PATIENCE_SECONDS", -1.0)
    for _ in range(3):
        answer = ask()
        assert (answer["by"], answer["code"]) == ("aws", "Busy")
        assert "than one call can look at (this one: 1); repeat the command" in answer["refused"]
    assert ask()["submitted"] == JOB_ID


def test_two_that_look_at_once_lose_nothing_of_each_other(
    deployed: Account, sagemaker: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sagemaker.add("acme-ended", 1, billed=60)
    entry = _ledger(deployed, sagemaker).entry("ml.p5.4xlarge", 1, 60)
    describe, rivals = sagemaker.describe_training_job, [_ledger(deployed, sagemaker)]

    def slow(TrainingJobName: str) -> dict[str, Any]:
        while rivals:
            rivals.pop().promise("acme-rival", entry, lambda jobs, held: None)
        return describe(TrainingJobName)

    monkeypatch.setattr(sagemaker, "describe_training_job", slow)
    seen: list[list[str]] = []
    _ledger(deployed, sagemaker).promise("acme-new", entry, lambda jobs, held: seen.append(sorted(jobs)))
    assert seen == [["acme-ended", "acme-rival"]]
    assert set(_kept(deployed)) == {"acme-ended", "acme-new", "acme-rival"}


def test_broker_and_launcher_know_the_same_quota(job: JobSpec, contract: TenantContract) -> None:
    rules = contract.model_dump(mode="json")
    cases = itertools.product(
        ("ml.p5.4xlarge", "ml.g6e.8xlarge", "ml.p4d.24xlarge"), (1, 2, 3, 5), (None, "gpu", "small", "none"), (0, 1, 3)
    )
    verdicts = {_verdicts(job, contract, rules, *case) for case in cases}
    assert all(one == other for one, other in verdicts)
    assert {one for one, _ in verdicts} == {"gpu", "small", "refused"}


def _verdicts(
    job: JobSpec, contract: TenantContract, rules: dict[str, Any], kind: str, count: int, queue: str | None, held: int
) -> tuple[str, str]:
    compute = {"instance_type": kind, "instance_count": count, "queue": queue}
    asked = job.model_copy(update={"compute": job.compute.model_copy(update=compute)})
    running = [RunningJob("acme-x", kind, held)] if held else []
    holders = [{"name": item.name, "type": item.instance_type, "count": held} for item in running]
    return (
        _verdict(lambda: check_queue(asked, contract, running), InputError),
        _verdict(lambda: broker_rules.check_quota(compute, count, rules, holders), broker_rules.Refused),
    )


def _verdict(call: Callable[[], str], refusal: type[Exception]) -> str:
    try:
        return call()
    except refusal:
        return "refused"


class Called:
    """A Lambda client that answers."""

    def __init__(self, answer: Any, error: str = "") -> None:
        self.answer, self.error, self.asked = answer, error, b""

    def invoke(self, FunctionName: str, Payload: bytes) -> dict[str, Any]:
        self.asked = Payload
        body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        return {"Payload": io.BytesIO(body)} | ({"FunctionError": self.error} if self.error else {})


def test_what_the_broker_says_reaches_the_person(
    deployed: Account, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = contract.model_copy(update={"broker": "trainyard-test-acme-broker"})

    def answer(content: Any, error: str = "") -> Called:
        function = Called(content, error)
        monkeypatch.setattr(deployed.session, "client", lambda *_, **__: function)
        return function

    asked = answer({"submitted": JOB_ID, "already": False})
    ask_broker(deployed, told, JOB_ID)
    assert json.loads(asked.asked) == {"job_id": JOB_ID}
    answer({"refused": "compute.max_hours 25 is over", "by": "rules"})
    with pytest.raises(InputError, match=r"^compute.max_hours 25 is over \(tenant acme's broker\)$"):
        ask_broker(deployed, told, JOB_ID)
    answer({"refused": "CreateTrainingJob: ResourceLimitExceeded: full", "by": "aws", "code": "ResourceLimitExceeded"})
    with pytest.raises(AwsRefusedError, match=r"AWS refused: .*full; ask for a higher quota"):
        ask_broker(deployed, told, JOB_ID)
    answer({"refused": "other jobs are being submitted; repeat the command", "by": "aws", "code": "Busy"})
    with pytest.raises(AwsRefusedError, match=rf"^broker {told.broker} for job {JOB_ID}: other jobs are being"):
        ask_broker(deployed, told, JOB_ID)
    lost = f"whether {JOB_ID} was taken can't be known now"
    answer({"refused": lost, "by": "aws", "code": "Unknown", "may_run": True})
    with pytest.raises(AwsAwayError, match=rf"^broker {told.broker} for job {JOB_ID}: {lost}$"):
        ask_broker(deployed, told, JOB_ID)
    for content in ({"errorMessage": "no module\nnamed x", "errorType": "ImportError"}, b"not JSON"):
        answer(content, "Unhandled")
        # It may have submitted the job before: nobody may change the attempt for a while.
        with pytest.raises(AwsAwayError, match=r"it failed: (no module named x|not JSON); its log is in log group"):
            ask_broker(deployed, told, JOB_ID)


def test_where_there_is_a_broker_the_launcher_submits_nothing_itself(
    deployed: Account, record: JobRecord, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "trainyard.launch.sagemaker_backend.ask_broker", lambda launcher, contract, job_id, say: asked.append(job_id)
    )
    told = contract.model_copy(update={"broker": "trainyard-test-acme-broker"})
    SageMakerBackend(deployed, told).submit(record, lambda _: None)
    assert asked == [JOB_ID]
    assert deployed.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []
