"""A role for each job: the broker makes it with the job's rights, keeps it while anything may start the job again, and
removes it after."""

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from launch_testing import JOB_ID, REGION, contract_content

from trainyard.functions import broker, broker_roles
from trainyard.functions.broker_queue import asked_name
from trainyard.functions.broker_roles import GRACE_SECONDS, JobRoles, inputs_of, once_seen
from trainyard.functions.job_guard import violations
from trainyard.functions.job_roles import job_role_arn
from trainyard.launch.record import JobRecord
from trainyard.launch.sagemaker_backend import SageMakerBackend
from trainyard.launch.session import Account
from trainyard.spec.base import parse
from trainyard.spec.platform import TenantContract

BOUNDARY = "arn:aws:iam::123456789012:policy/trainyard/test/acme/boundary"
QUEUE = f"arn:aws:batch:{REGION}:123456789012:job-queue/trainyard-test-p5-4xlarge-0"
HOUR = 3600.0


class Jobs:
    """SageMaker and Batch as the broker asks them: what each job is at now."""

    class exceptions:
        """As boto3's clients have them."""

        ClientError = ClientError

    def __init__(self) -> None:
        self.training: dict[str, dict[str, Any]] = {}
        self.queued: list[dict[str, Any]] = []
        self.created: list[dict[str, Any]] = []
        self.described: list[str] = []
        self.unseen = 0
        self.is_gone = False

    def create_training_job(self, **request: Any) -> None:
        if self.unseen:
            self.unseen -= 1
            raise refusal("ValidationException", f"Could not assume role {request['RoleArn']}.")
        self.created.append(request)

    def describe_training_job(self, TrainingJobName: str) -> dict[str, Any]:
        self.described.append(TrainingJobName)
        if TrainingJobName not in self.training:
            raise refusal("ValidationException", "Requested resource not found.")
        return self.training[TrainingJobName]

    def get_paginator(self, name: str) -> "Jobs":
        self.asked = name
        return self

    def paginate(self, **_: Any) -> list[dict[str, Any]]:
        if self.asked == "list_training_jobs":
            return [{"TrainingJobSummaries": []}]
        if self.is_gone:
            raise refusal("ClientException", f"Job queue {QUEUE} does not exist")
        return [{"jobSummaryList": self.queued}]


def refusal(code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "Asked")


@pytest.fixture
def contract() -> TenantContract:
    """Acme's jobs have roles of their own."""
    return parse(TenantContract, {**contract_content(), "broker": "broker", "job_boundary": BOUNDARY}, "contract")


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def ask(deployed: Account, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The handler, in an account where SageMaker is ours."""
    settings = {"contract": "/trainyard/test/acme/contract", "prices": {}, "volume_keys": []}
    monkeypatch.setenv("BROKER", json.dumps(settings))
    clients: dict[str, Any] = {"sagemaker": jobs, "batch": jobs}
    clients |= {name: boto3.client(name, region_name=REGION) for name in ("s3", "ssm", "iam")}
    monkeypatch.setattr(boto3, "client", lambda name, **_: clients[name])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return lambda **event: broker.handler(event or {"job_id": JOB_ID}, None)


def role_of(deployed: Account) -> dict[str, Any]:
    return dict(deployed.client("iam").get_role(RoleName=JOB_ID)["Role"])


def policy_of(deployed: Account) -> str:
    answer = deployed.client("iam").get_role_policy(RoleName=JOB_ID, PolicyName="own")
    return json.dumps(answer["PolicyDocument"])


def test_a_job_runs_as_a_role_of_its_own_under_the_tenants_boundary(
    ask: Any, record: JobRecord, jobs: Jobs, deployed: Account, contract: TenantContract
) -> None:
    assert ask()["submitted"] == JOB_ID
    assert jobs.created == [SageMakerBackend(deployed, contract).request(record)]
    role = role_of(deployed)
    assert jobs.created[0]["RoleArn"] == role["Arn"] == job_role_arn(contract.model_dump(mode="json"), JOB_ID)
    assert role["PermissionsBoundary"]["PermissionsBoundaryArn"] == BOUNDARY
    trust = role["AssumeRolePolicyDocument"]["Statement"]
    assert [item["Principal"] for item in trust] == [{"Service": "sagemaker.amazonaws.com"}]
    assert deployed.client("iam").list_role_policies(RoleName=JOB_ID)["PolicyNames"] == ["own"]
    text = policy_of(deployed)
    assert f"acme-checkpoints/jobs/{JOB_ID}/*" in text
    for channel in record.channels:
        if channel.kind == "s3":
            assert channel.location.removeprefix("s3://").rstrip("/") in text
    assert "acme-checkpoints/jobs/*" not in text


@pytest.mark.slow
def test_a_role_that_sagemaker_does_not_see_yet_is_waited_for(ask: Any, record: JobRecord, jobs: Jobs) -> None:
    jobs.unseen = 3
    assert ask()["submitted"] == JOB_ID
    assert len(jobs.created) == 1

    def refuse() -> None:
        calls.append(1)
        raise refusal("ValidationException", "1 validation error detected")

    calls: list[int] = []
    with pytest.raises(ClientError):
        once_seen(refuse, ClientError, sleep=lambda _: None)
    assert len(calls) == 1, "only that answer is worth another try"


def test_inputs_that_no_role_could_name_are_refused_before_anything_is_made(
    ask: Any, record: JobRecord, jobs: Jobs, deployed: Account
) -> None:
    s3, place = deployed.client("s3"), {"Bucket": "acme-data", "Key": f"jobs/{JOB_ID}/record.json"}
    content = json.loads(s3.get_object(**place)["Body"].read())
    content["resolved"]["spec"]["data"] |= {"streaming": True, "train": [{"path": "s3://globex-data/sets/"}]}
    s3.put_object(**place, Body=json.dumps(content).encode())
    answer = ask()
    assert answer["by"] == "rules" and "in none of the tenant's buckets" in answer["refused"]
    assert jobs.created == []
    assert deployed.client("iam").list_roles(PathPrefix="/trainyard/")["Roles"] == []
    (ledger,) = s3.list_objects_v2(Bucket="acme-checkpoints", Prefix="broker/")["Contents"]
    promised = json.loads(s3.get_object(Bucket="acme-checkpoints", Key=ledger["Key"])["Body"].read())
    assert promised["jobs"] == {}, "what was refused holds no money"


def test_a_tenant_cannot_take_all_the_accounts_roles(
    ask: Any,
    record: JobRecord,
    jobs: Jobs,
    deployed: Account,
    contract: TenantContract,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_roles, "MAX_ROLES", 2)
    for name in ("acme-one", "acme-two"):
        roles(deployed, contract).make(name, {"name": name, "spec": {}, "channels": []})
    answer = ask()
    assert answer["by"] == "rules" and "2 jobs of tenant acme wait, run or ended" in answer["refused"]
    assert jobs.created == []
    roles(deployed, contract).make("acme-one", {"name": "acme-one-r2", "spec": {}, "channels": []})  # it has one
    deployed.client("iam").delete_role_policy(RoleName="acme-two", PolicyName="own")
    deployed.client("iam").delete_role(RoleName="acme-two")
    assert ask()["submitted"] == JOB_ID


def test_what_is_streamed_is_an_input() -> None:
    spec = {"data": {"streaming": True, "train": [{"path": "s3://b/x"}], "validation": [{"path": "fsx://y"}]}}
    channels = [{"kind": "s3", "location": "s3://b/t.json"}, {"kind": "fsx", "location": "sets"}]
    assert inputs_of({"spec": spec, "channels": channels}) == ["s3://b/t.json", "s3://b/x"]
    assert inputs_of({"spec": {"data": {"train": [{"path": "s3://b/x"}]}}, "channels": []}) == []


def roles(deployed: Account, contract: TenantContract, *, later: float = 0.0) -> JobRoles:
    return JobRoles(deployed.client("iam"), contract.model_dump(mode="json"), clock=lambda: time.time() + later)


def made(deployed: Account, contract: TenantContract, name: str = JOB_ID, queue: str = "") -> None:
    job = {"name": name, "spec": {}, "channels": []}
    roles(deployed, contract).make(JOB_ID, job, queue)


def ended(status: str, *, ago: float = 0.0) -> dict[str, Any]:
    when = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago)
    return {"TrainingJobStatus": status, "LastModifiedTime": when}


@pytest.mark.parametrize(
    ("job", "later", "removed"),
    [
        (ended("InProgress"), 40 * 24 * HOUR, False),  # spot capacity that comes and goes is the same training job
        (ended("Stopping"), HOUR, False),
        (ended("Completed"), 0, True),
        (ended("Stopped"), 0, True),
        (ended("Failed"), 0, False),  # the resumer's turn
        (ended("Failed", ago=GRACE_SECONDS + 60), 0, True),
        (None, 0, False),  # its submission is on its way
        (None, HOUR, True),  # it never came
    ],
)
def test_a_role_goes_when_nothing_starts_its_job_again(
    deployed: Account, contract: TenantContract, jobs: Jobs, job: Any, later: float, removed: bool
) -> None:
    made(deployed, contract)
    jobs.training = {JOB_ID: job} if job else {}
    assert roles(deployed, contract, later=later).sweep(jobs, jobs) == ([JOB_ID] if removed else [], [])
    assert (not deployed.client("iam").list_roles(PathPrefix="/trainyard/")["Roles"]) == removed


@pytest.mark.parametrize(
    ("job", "later", "removed"),
    [
        ({"status": "RUNNABLE"}, 40 * 24 * HOUR, False),  # preempted, it waits for its machines again
        ({"status": "RUNNING"}, HOUR, False),
        ({"status": "SUCCEEDED"}, 0, True),
        ({"status": "FAILED", "isTerminated": True}, 0, True),
        ({"status": "FAILED", "stoppedAt": 0}, 0, True),
        ({"status": "RUNNING", "isTerminated": True}, HOUR, False),  # told to stop, it saves
        (None, HOUR, True),
    ],
)
def test_the_role_of_a_queued_job_outlives_its_preemptions_and_retries(
    deployed: Account,
    contract: TenantContract,
    jobs: Jobs,
    job: Any,
    later: float,
    removed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_roles.time, "sleep", lambda _: None)
    made(deployed, contract, queue=QUEUE)
    jobs.queued = [{"jobName": JOB_ID, **job}] if job else []
    jobs.training = {JOB_ID: ended("Stopped")}  # what SageMaker says of one start is not what counts
    assert roles(deployed, contract, later=later).sweep(jobs, jobs) == ([JOB_ID] if removed else [], [])


def test_the_role_of_a_job_in_a_queue_that_is_gone_goes(
    deployed: Account, contract: TenantContract, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_roles.time, "sleep", lambda _: None)
    made(deployed, contract, queue=QUEUE)
    jobs.is_gone = True
    assert roles(deployed, contract, later=HOUR).sweep(jobs, jobs) == ([JOB_ID], [])


def test_a_resumed_job_has_its_role_again_with_the_new_attempts_streams(
    deployed: Account, contract: TenantContract, jobs: Jobs
) -> None:
    share = {"queue": QUEUE, "guaranteed": 1, "most": 1}
    content = {**contract.model_dump(mode="json"), "shares": {"ml.p5.4xlarge": share}, "emulated": True}
    queued = parse(TenantContract, content, "contract")
    again = f"{JOB_ID}-r2"
    made(deployed, queued, queue=QUEUE)
    assert asked_name("acme", JOB_ID) in policy_of(deployed)
    made(deployed, queued, again, QUEUE)
    assert asked_name("acme", again) in policy_of(deployed)
    assert asked_name("acme", JOB_ID) not in policy_of(deployed)
    jobs.queued = [{"jobName": again, "status": "RUNNING"}, {"jobName": JOB_ID, "status": "SUCCEEDED"}]
    assert roles(deployed, queued).sweep(jobs, jobs) == ([], []), "the newest attempt counts"


def test_a_role_that_is_given_to_a_new_attempt_meanwhile_stays(
    deployed: Account, contract: TenantContract, jobs: Jobs
) -> None:
    made(deployed, contract)
    jobs.training = {JOB_ID: ended("Completed")}
    describe, looked = jobs.describe_training_job, []

    def described(TrainingJobName: str) -> dict[str, Any]:
        looked.append(TrainingJobName)
        answer = describe(TrainingJobName)
        made(deployed, contract, f"{JOB_ID}-r2")  # after the first look, before the removal
        jobs.training[f"{JOB_ID}-r2"] = ended("InProgress")
        return answer

    jobs.describe_training_job = described  # type: ignore[method-assign]
    assert roles(deployed, contract).sweep(jobs, jobs) == ([], [])
    assert looked == [JOB_ID, f"{JOB_ID}-r2"]


def test_anybody_may_ask_for_a_sweep_and_only_what_is_over_goes(
    ask: Any, record: JobRecord, jobs: Jobs, deployed: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    ask()
    jobs.training = {JOB_ID: ended("InProgress")}
    assert ask(sweep=True) == {"removed": []}
    other = deployed.client("iam").create_role(
        Path="/trainyard/test/acme/jobs/", RoleName="shared", AssumeRolePolicyDocument="{}"
    )
    jobs.training = {JOB_ID: ended("Completed")}
    assert ask(sweep=True) == {"removed": [JOB_ID]}
    assert ask(sweep=True) == {"removed": []}
    assert deployed.client("iam").get_role(RoleName="shared")["Role"]["Arn"] == other["Role"]["Arn"]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"audit": "roles", "removed": [JOB_ID]} in lines


def numbered(number: int) -> str:
    return f"acme-tiny-20260131120000-{number:04x}"


def other_roles(deployed: Account, contract: TenantContract, jobs: Jobs, status: str, *, number: int = 3) -> list[str]:
    """Roles of more jobs, and their jobs at that status."""
    names = [numbered(one) for one in range(number)]
    for name in names:
        roles(deployed, contract).make(name, {"name": name, "spec": {}, "channels": []})
        jobs.training[name] = ended(status)
    return names


@pytest.mark.parametrize("attempt", ["", "-r2", "-r12"])
def test_a_jobs_end_has_its_own_role_looked_at_and_no_other(
    ask: Any, deployed: Account, contract: TenantContract, jobs: Jobs, attempt: str
) -> None:
    one, other, third = other_roles(deployed, contract, jobs, "Completed")
    assert ask(sweep=True, ended=f"{other}{attempt}") == {"removed": [other]}
    assert jobs.described == [other, other]
    left = deployed.client("iam").list_roles(PathPrefix="/trainyard/")["Roles"]
    assert {role["RoleName"] for role in left} == {one, third}
    assert set(ask(sweep=True)["removed"]) == {one, third}, "the clock's look takes all"


@pytest.mark.parametrize(
    "name", ["globex-tiny-20260131120000-0000", "acme-by-hand", f"{numbered(0)}-r123", "../each/x", "", 7, ["a"]]
)
def test_the_end_of_what_nobody_launched_here_removes_nothing(
    ask: Any, deployed: Account, contract: TenantContract, jobs: Jobs, name: Any
) -> None:
    other_roles(deployed, contract, jobs, "Completed")
    assert ask(sweep=True, ended=name) == {"removed": []}
    assert jobs.described == []


def test_a_role_that_cannot_be_looked_at_is_named_and_the_others_go(
    ask: Any, deployed: Account, contract: TenantContract, jobs: Jobs, monkeypatch: Any, capsys: Any
) -> None:
    one, other, third = other_roles(deployed, contract, jobs, "Completed")
    describe = jobs.describe_training_job

    def throttled(TrainingJobName: str) -> dict[str, Any]:
        if TrainingJobName == other:
            raise refusal("ThrottlingException", "Rate\nexceeded")
        return describe(TrainingJobName)

    monkeypatch.setattr(jobs, "describe_training_job", throttled)
    line = (
        f"{other}: ClientError: An error occurred (ThrottlingException) when calling the Asked operation: Rate exceeded"
    )
    assert ask(sweep=True, ended=other) == {"removed": [], "failed": [line]}, "the clock's look makes up for it"
    with pytest.raises(RuntimeError, match=r"^roles that may have to go: .*Rate exceeded$"):
        ask(sweep=True)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {**said, "removed": set(said["removed"])} == {"audit": "roles", "removed": {one, third}, "failed": [line]}


@pytest.mark.parametrize("is_clock", [True, False])
def test_a_look_that_does_not_begin_rings_where_no_other_makes_up_for_it(
    ask: Any, monkeypatch: pytest.MonkeyPatch, is_clock: bool
) -> None:
    def throttled(*_: Any) -> Any:
        raise refusal("Throttling", "Rate exceeded")

    monkeypatch.setattr(JobRoles, "sweep", throttled)
    if is_clock:
        with pytest.raises(RuntimeError, match="Throttling"):
            ask(sweep=True)
    else:
        answer = ask(sweep=True, ended=JOB_ID)
        assert answer["removed"] == [] and "Throttling" in answer["failed"][0]


def test_the_detective_stops_a_job_that_runs_as_another_jobs_role() -> None:
    each = "arn:aws:iam::123456789012:role/trainyard/test/acme/jobs/each/"
    rules = {
        **{name: [] for name in ("subnets", "groups", "prefixes", "places")},
        **{
            "plans": [],
            "types": {},
            "role": "shared",
            "own_roles": each,
            "key": "",
            "files": "",
            "images": "",
            "seconds": 1,
        },
    }

    def role_violations(role: str, job_id: str | None) -> list[str]:
        job = {"TrainingJobName": "acme-a", "RoleArn": role, "Environment": {"TRAINYARD_JOB_ID": job_id}}
        job = job if job_id else {"TrainingJobName": "acme-a", "RoleArn": role}
        return [line for line in violations(job, rules) if line.startswith("role: ")]

    assert role_violations(f"{each}acme-a", "acme-a") == []
    assert role_violations("shared", "acme-a") == []
    assert role_violations(f"{each}acme-b", "acme-a") == [f"role: {each}acme-b"]
    assert role_violations(f"{each}acme-b", None) == [f"role: {each}acme-b"]
