"""What SageMaker and CloudWatch tell of a tenant's jobs, on clients that play a script and on moto."""

import json
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from trainyard.errors import AwsAwayError, AwsRefusedError, InputError
from trainyard.launch import launch, launcher, sagemaker_backend, watch
from trainyard.launch.backend import LogCursor
from trainyard.launch.channels import spec_name
from trainyard.launch.checks import RunningJob
from trainyard.launch.elastic import reviser
from trainyard.launch.goodput import account_of
from trainyard.launch.launcher import submit_attempt
from trainyard.launch.record import JobRecord, S3RecordStore, update
from trainyard.launch.sagemaker_backend import SageMakerBackend, _read_stream, observation
from trainyard.launch.session import Account
from trainyard.launch.watch import merged
from trainyard.spec.job import JobSpec
from trainyard.spec.platform import TenantContract


class PagedLogs:
    """GetLogEvents over given pages: a token to the next one, and at the end the same token again."""

    def __init__(self, *pages: list[int]) -> None:
        self.pages = list(pages)

    def get_log_events(self, *, nextToken: str = "0", **_: object) -> dict[str, Any]:
        index = int(nextToken)
        events = [{"message": str(number), "timestamp": number} for number in (self.pages[index:] or [[]])[0]]
        return {"events": events, "nextForwardToken": str(min(index + 1, len(self.pages)))}


def test_an_empty_page_does_not_end_a_log() -> None:
    cursor, logs = LogCursor(), PagedLogs([1], [], [2])
    assert [line.text for line in _read_stream(logs, "job/algo-1-17", cursor)] == ["1", "2"]
    assert not cursor.more
    logs.pages.append([3])
    assert [line.text for line in _read_stream(logs, "job/algo-1-17", cursor)] == ["3"]


def test_who_wants_the_newest_lines_begins_at_a_logs_end() -> None:
    asked: list[dict[str, Any]] = []

    class Logs(PagedLogs):
        """Keeps what it was asked."""

        def get_log_events(self, **words: Any) -> dict[str, Any]:
            asked.append(words)
            return super().get_log_events(**words)

    for cursor in (LogCursor(), LogCursor(from_end=True)):
        _read_stream(Logs([1]), "job/algo-1-17", cursor)
    assert [one.get("startFromHead") for one in asked] == [True, None, False, None]


def test_the_first_hosts_log_is_told_from_the_others_whatever_its_training_job_is_called(
    contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training queue gives its training jobs names of its own."""
    streams = ["acme-x/algo-1-17", "acme-x/algo-10-17", "acme-x/algo-2-17", "batch-acme-x-7f/algo-1-18"]
    backend = SageMakerBackend(cast("Account", SimpleNamespace(client=lambda _: PagedLogs([1]))), contract)
    monkeypatch.setattr(backend, "_streams", lambda *_: streams)
    monkeypatch.setattr(backend, "_log_prefixes", lambda _: [""])
    record = cast("JobRecord", SimpleNamespace(attempt=SimpleNamespace(training_job_name="acme-x")))
    hosts = [line.host for line in backend.read_logs(record, LogCursor(first_host_alone=True))]
    assert hosts == ["algo-1", "algo-1"]
    assert len(backend.read_logs(record, LogCursor())) == len(streams)


def test_a_read_that_stops_short_says_so() -> None:
    cursor, logs = LogCursor(), PagedLogs(*([] for _ in range(30)), [7])
    assert _read_stream(logs, "job/algo-1-17", cursor) == []
    assert cursor.more
    cursor.more = False
    assert [line.text for line in _read_stream(logs, "job/algo-1-17", cursor)] == ["7"]
    assert not cursor.more


class ListedJobs:
    """An account whose training jobs are given: listed newest first, two on a page."""

    def __init__(self, *jobs: tuple[str, str, str, int]) -> None:
        self.jobs = jobs
        self.num_pages = 0

    def client(self, _: str) -> "ListedJobs":
        return self

    def get_paginator(self, _: str) -> "ListedJobs":
        return self

    def paginate(self, *, NameContains: str, StatusEquals: str = "", **_: Any) -> Any:
        found = [
            {"TrainingJobName": name, "TrainingJobStatus": status, "SecondaryStatus": f"{status}, finely"}
            for name, status, _, _ in self.jobs
            if NameContains in name and StatusEquals in ("", status)
        ]
        for start in range(0, len(found), 2):
            self.num_pages += 1
            yield {"TrainingJobSummaries": found[start : start + 2]}

    def describe_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:
        (job,) = (job for job in self.jobs if job[0] == TrainingJobName)
        return {"ResourceConfig": {"InstanceType": job[2], "InstanceCount": job[3]}}


P5 = "ml.p5.4xlarge"


def test_running_jobs_are_the_tenants_own_and_hold_instances(contract: TenantContract) -> None:
    account: Any = ListedJobs(
        ("acme-a", "InProgress", P5, 2),
        ("globex-acme-b", "InProgress", P5, 2),
        ("acme-c", "Stopping", P5, 1),
        ("acme-d", "Completed", P5, 4),
    )
    backend = SageMakerBackend(account, contract)
    assert backend.running() == [RunningJob("acme-a", P5, 2), RunningJob("acme-c", P5, 1)]
    assert backend.running(but="acme-a") == [RunningJob("acme-c", P5, 1)]


def test_a_running_job_of_several_groups_holds_all_of_them(contract: TenantContract) -> None:
    class Grouped(ListedJobs):
        def describe_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:
            groups = [{"InstanceType": kind, "InstanceCount": count} for kind, count in ((P5, 2), ("ml.m5.xlarge", 1))]
            return {"ResourceConfig": {"InstanceGroups": groups}}

    account: Any = Grouped(("acme-a", "InProgress", P5, 3))
    running = SageMakerBackend(account, contract).running()
    assert running == [RunningJob("acme-a", P5, 2), RunningJob("acme-a", "ml.m5.xlarge", 1)]


def test_moments_are_told_in_utc_wherever_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    began = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    told = []
    for zone in ("UTC", "America/New_York", "Asia/Kolkata"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        transition = {"Status": "Training", "StartTime": began.astimezone()}
        description = {"TrainingJobStatus": "InProgress", "SecondaryStatusTransitions": [transition]}
        told += [change.at for change in observation(description, 1).transitions]
    monkeypatch.undo()
    time.tzset()
    assert told == ["2026-01-31T12:00:00+00:00"] * 3


def test_a_job_that_came_to_its_time_limit_ended_then_and_not_when_somebody_looks(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    """SageMaker's last transition has a finer word than the status: the days until a look were hours in a queue."""
    record = launch(job, contract, account=deployed, launcher=deployed)
    began = datetime.fromisoformat(record.states[-1].at)
    hours = {"Starting": 0.0, "Training": 1.0, "Stopping": 23.9, "MaxRuntimeExceeded": 24.0}
    changes = [{"Status": word, "StartTime": began + timedelta(hours=at)} for word, at in hours.items()]
    ended = {"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"}
    seen = observation({**ended, "SecondaryStatusTransitions": changes}, 1)
    states = merged(record, seen).states
    assert (states[-1].state, datetime.fromisoformat(states[-1].at)) == ("Stopped", began + timedelta(hours=24))
    start = {"start": {"process_seconds": 1.0}}
    account_of_time = account_of([start], states, now=began + timedelta(days=9))
    assert account_of_time is not None and account_of_time.wall_seconds < 24.1 * 3600
    assert merged(merged(record, seen), seen).states == states
    told = {**ended, "SecondaryStatusTransitions": [], "TrainingEndTime": began + timedelta(hours=3)}
    assert observation(told, 1).ended_at == (began + timedelta(hours=3)).isoformat(timespec="seconds")
    running = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training", "SecondaryStatusTransitions": changes}
    assert observation(running, 1).ended_at == ""


def test_states_come_from_one_list_read_no_further_than_needed(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    record = launch(job, contract, account=deployed, launcher=deployed)
    older = [(f"acme-old-{index}", "Completed", P5, 1) for index in range(9)]
    account: Any = ListedJobs((record.job_id, "Failed", P5, 2), *older)
    assert SageMakerBackend(account, contract).states([record]) == {record.job_id: "Failed"}
    assert account.num_pages == 1
    going: Any = ListedJobs((record.job_id, "InProgress", P5, 2))
    assert SageMakerBackend(going, contract).states([record]) == {record.job_id: "InProgress, finely"}
    ended = record.with_state("Completed")
    assert SageMakerBackend(account, contract).states([ended]) == {}, "nobody asks about what has ended"
    assert account.num_pages == 1


def test_a_record_that_sagemaker_never_had_has_no_history_read(
    deployed: Account, job: JobSpec, contract: TenantContract
) -> None:
    """Its launcher died before the submission: every list of jobs looked for it in all that the tenant ever ran."""
    record = launch(job, contract, account=deployed, launcher=deployed)
    now = datetime.fromisoformat(record.attempt.created_at)

    class History(ListedJobs):
        asked: ClassVar[list[dict[str, Any]]] = []

        def paginate(self, *, CreationTimeAfter: datetime, **asked: Any) -> Any:
            self.asked.append(asked)
            for number in range(99):
                if now - timedelta(days=number) <= CreationTimeAfter:
                    return
                self.num_pages += 1
                yield {"TrainingJobSummaries": [{"TrainingJobName": "acme-x", "TrainingJobStatus": "Completed"}]}

    account: Any = History()
    assert SageMakerBackend(account, contract).states([record]) == {}
    assert account.num_pages == 1
    assert account.asked[0]["PaginationConfig"] == {"PageSize": 100}, "else it is ten a page"
    assert SageMakerBackend(deployed, contract).states([record]).keys() == {record.job_id}


def test_a_resume_counts_the_running_jobs_too(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = launch(job, contract, account=deployed, launcher=deployed)
    store = S3RecordStore(deployed.client("s3"), contract.buckets.data)
    asked: list[str] = []

    def running(_: SageMakerBackend, *, but: str = "") -> list[RunningJob]:
        asked.append(but)
        return [RunningJob("acme-other", P5, 3)]

    backend = SageMakerBackend(deployed, contract)
    monkeypatch.setattr(SageMakerBackend, "running", running)
    monkeypatch.setattr(SageMakerBackend, "observe", lambda *_: None)  # as if retention had dropped it
    with pytest.raises(InputError, match="3 of the 4 instances of queue gpu are held by acme-other"):
        watch.resume(store, backend, record.job_id)
    assert asked == [f"{record.job_id}-r2"], "the attempt itself doesn't count"
    assert store.read(record.job_id).record.attempt.number == 1, "nothing was written down"


def test_a_resume_on_other_machines_meets_quota_hours_memory_and_budget_as_a_launch_does(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = launch(job, contract, account=deployed, launcher=deployed)
    store = S3RecordStore(deployed.client("s3"), contract.buckets.data)
    backend = SageMakerBackend(deployed, contract)
    monkeypatch.setattr(SageMakerBackend, "running", lambda *_, **__: [])
    monkeypatch.setattr(SageMakerBackend, "observe", lambda *_: None)
    submitted: list[JobRecord] = []
    monkeypatch.setattr(SageMakerBackend, "submit", lambda _, given, say: submitted.append(given))

    def resume(*overrides: str, force: bool = False) -> JobRecord:
        return watch.resume(store, backend, record.job_id, revise=reviser(overrides, None, force=force))

    more = ("compute.instance_count=8", "parallelism.data_replicate=8", "training.micro_batch_size=1")
    with pytest.raises(InputError, match=r"over the quota of tenant acme, which is 4 x ml\.p5"):
        resume(*more)
    with pytest.raises(InputError, match=r"compute\.max_hours 30 is over the 24 hours"):
        resume("compute.max_hours=30", "compute.max_wait_hours=null")
    with pytest.raises(InputError, match=r"budget\.max_usd 0\.00 is less than .*--force"):
        resume("budget={max_usd: 0.000001}")
    assert (store.read(record.job_id).record.attempt.number, submitted) == (1, [])
    resumed = resume("budget={max_usd: 0.000001}", force=True)
    assert resumed.attempt.number == 2 and "budget.max_usd" in resumed.forced[-1]
    assert resumed.plan["max_usd"] == 0.000001, "planned anew"


@pytest.mark.parametrize("code", ["", "ResourceInUse"])
@pytest.mark.parametrize("what", ["taken", "not there", "another"])
def test_a_direct_submission_whose_answer_was_lost_goes_by_what_is_there(
    deployed: Account, record: JobRecord, contract: TenantContract, monkeypatch: Any, what: str, code: str
) -> None:
    backend = SageMakerBackend(deployed, contract)
    sagemaker, request = deployed.client("sagemaker"), backend.request(record)
    if what == "another":
        request["StoppingCondition"] = {"MaxRuntimeInSeconds": 60}

    class Trainer:
        def train(self, **_: object) -> None:
            if what != "not there":
                sagemaker.create_training_job(**request)
            if code:
                raise ClientError({"Error": {"Code": code, "Message": "x"}}, "CreateTrainingJob")
            raise ReadTimeoutError(endpoint_url="https://sagemaker")

    monkeypatch.setattr(sagemaker_backend, "model_trainer", lambda *_: Trainer())
    if what == "taken":
        backend.submit(record, lambda _: None)
    elif what == "another":
        with pytest.raises(InputError, match=r"not as its record says: MaxRuntimeInSeconds is 60, not 7200; stop it"):
            backend.submit(record, lambda _: None)
    else:
        with pytest.raises(AwsAwayError, match=f"submitting training job {record.job_id}: no answer came"):
            backend.submit(record, lambda _: None)


def test_an_attempt_that_goes_on_with_other_settings_leaves_the_spec_of_the_one_before(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SageMaker reads it again whenever a job's machines change, and an audit for as long as the job is there."""
    monkeypatch.setattr(sagemaker_backend, "model_trainer", lambda *_: SimpleNamespace(train=lambda **_: None))
    backend, s3 = SageMakerBackend(deployed, contract), deployed.client("s3")
    first = launch(job, contract, account=deployed, launcher=deployed)
    store = S3RecordStore(s3, contract.buckets.data)
    changed = reviser(("checkpoint.keep_last=7",), None)(first).with_next_attempt()
    update(store, first.job_id, lambda _: changed)
    other = submit_attempt(store, backend, changed, lambda _: None)

    def kept(record: JobRecord) -> int:
        (channel,) = [one for one in backend.request(record)["InputDataConfig"] if one["ChannelName"] == "job"]
        _, _, bucket, prefix = channel["DataSource"]["S3DataSource"]["S3Uri"].split("/", 3)
        text = s3.get_object(Bucket=bucket, Key=f"{prefix}resolved_job.json")["Body"].read()
        return int(json.loads(text)["spec"]["checkpoint"]["keep_last"])

    assert (kept(first), kept(other)) == (first.spec.checkpoint.keep_last, 7)
    assert backend.request(first)["InputDataConfig"] == backend.request(first.with_next_attempt())["InputDataConfig"]


def test_a_job_that_is_there_with_another_spec_is_not_the_one_that_was_asked_for(
    deployed: Account, job: JobSpec, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission without an answer that comes late, after somebody changed the attempt."""
    backend = SageMakerBackend(deployed, contract)
    record = launch(job, contract, account=deployed, launcher=deployed)

    with monkeypatch.context() as earlier:  # trainyard, which had one place for all of a job's specs
        earlier.setattr(launcher, "spec_name", lambda _: "")
        older = launch(job, contract, account=deployed, launcher=deployed)
    older = older.model_copy(update={"spec_name": spec_name(older)})

    class Trainer:
        def train(self, **_: object) -> None:
            raise ClientError({"Error": {"Code": "ResourceInUse", "Message": "x"}}, "CreateTrainingJob")

    monkeypatch.setattr(sagemaker_backend, "model_trainer", lambda *_: Trainer())
    backend.submit(record, lambda _: None)  # its very own
    with pytest.raises(
        InputError, match=r"not as its record says: it reads the spec at s3://\S+, not s3://\S+; stop it"
    ):
        changed = reviser(("checkpoint.keep_last=7",), None)(record)
        backend.submit(changed.model_copy(update={"spec_name": spec_name(changed)}), lambda _: None)
    backend.submit(older, lambda _: None)  # it may be the one that is meant


def test_a_look_that_is_refused_after_a_direct_submission_refuses_nothing(
    deployed: Account, record: JobRecord, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sign-in ran out after SageMaker took the job, say: the attempt is nobody's to change."""
    backend = SageMakerBackend(deployed, contract)
    expired: Any = {"Error": {"Code": "ExpiredTokenException", "Message": "over"}}

    class Trainer:
        def train(self, **_: object) -> None:
            deployed.client("sagemaker").create_training_job(**backend.request(record))
            monkeypatch.setattr(backend, "_launcher", Refusing())
            raise ClientError(expired, "DescribeTrainingJob")

    class Refusing:
        exceptions = type("exceptions", (), {"ClientError": ClientError})

        def client(self, _: str) -> "Refusing":
            return self

        def describe_training_job(self, **_: str) -> None:
            raise ClientError(expired, "DescribeTrainingJob")

    monkeypatch.setattr(sagemaker_backend, "model_trainer", lambda *_: Trainer())
    with pytest.raises(AwsAwayError, match=f"whether {record.job_id} was taken can't be known now: .*; sign in again"):
        backend.submit(record, lambda _: None)


def test_what_gets_no_answer_before_a_job_is_handed_over_leaves_no_doubt_about_it(
    deployed: Account, record: JobRecord, contract: TenantContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: JobRecord) -> None:
        raise AwsAwayError("no answer")

    backend = SageMakerBackend(deployed, contract)
    monkeypatch.setattr(backend, "_write_spec", away)
    with pytest.raises(AwsRefusedError) as refused:
        backend.submit(record, lambda _: None)
    assert not isinstance(refused.value, AwsAwayError) and str(refused.value) == "no answer"
