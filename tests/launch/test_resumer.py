"""Who starts a failed job again without a person: the resumer's function on records that the launcher reads."""

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError
from launch_testing import IMAGE, JOB_ID, contract_content

from trainyard.emulator.training.tree import failure_reason
from trainyard.errors import InputError
from trainyard.functions import job_resumer, retry_rules
from trainyard.functions.broker_rules import check_record
from trainyard.launch import watch
from trainyard.launch.backend import Observation, Say
from trainyard.launch.elastic import revised
from trainyard.launch.launcher import new_record
from trainyard.launch.record import JobRecord, S3RecordStore
from trainyard.launch.session import Account
from trainyard.planner import resolve
from trainyard.planner.elastic import smaller
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ResolvedJob

DATA, CHECKPOINTS = "acme-data", "acme-checkpoints"
PLACES = {"data": DATA, "checkpoints": CHECKPOINTS, "broker": "the-broker"}
NO_ROOM = "CapacityError: Unable to provision requested ML compute capacity."
INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
LOST = "AlgorithmError: host algo-2 is gone: its entrypoint was killed, or the network parted, exit code: 1"


class Aws:
    """S3 by moto; what SageMaker says of a job, and a broker that remembers what it was asked."""

    def __init__(self, s3: Any, reason: str = INTERNAL) -> None:
        self.s3, self.status, self.reason = s3, "Failed", reason
        self.answer: dict[str, Any] = {"submitted": "yes"}
        self.asked: list[str] = []
        self.environment: dict[str, str] = {}

    def __call__(self, service: str) -> Any:
        return self.s3 if service == "s3" else self

    def describe_training_job(self, **_: str) -> dict[str, Any]:
        return {"TrainingJobStatus": self.status, "FailureReason": self.reason, "Environment": self.environment}

    def invoke(self, *, FunctionName: str, Payload: bytes) -> dict[str, Any]:
        assert FunctionName == "the-broker"
        self.asked.append(json.loads(Payload)["job_id"])
        return {"Payload": io.BytesIO(json.dumps(self.answer).encode())}

    def resume(self, number: int) -> dict[str, Any]:
        """What the function does when that attempt has ended."""
        return job_resumer.resume(JOB_ID if number == 1 else f"{JOB_ID}-r{number}", PLACES, self)

    def commit(self, step: int) -> None:
        """A checkpoint, and one that was never finished."""
        for name in (f"step-{step:08d}/COMMITTED", f"step-{step + 1:08d}/shard-0"):
            self.s3.put_object(Bucket=CHECKPOINTS, Key=f"jobs/{JOB_ID}/checkpoints/{name}", Body=b"")


@pytest.fixture
def store(aws: Account, job: JobSpec, resolved: ResolvedJob) -> S3RecordStore:
    """The record of a job that may be resumed twice."""
    s3 = aws.client("s3")
    for bucket in (DATA, CHECKPOINTS):
        s3.create_bucket(Bucket=bucket)
    recovery = resolved.spec.recovery.model_copy(update={"max_resumes": 2})
    resolved = resolved.model_copy(update={"spec": resolved.spec.model_copy(update={"recovery": recovery})})
    record = new_record(
        job,
        resolved,
        job_id=JOB_ID,
        backend="sagemaker",
        environment="test",
        plan={},
        image=IMAGE,
        channels=(),
        forced=(),
        launched_by="",
    )
    made = S3RecordStore(s3, DATA)
    made.create(record.with_attempt(submitted_at="2026-01-31T12:00:00+00:00"))
    return made


def read(store: S3RecordStore) -> JobRecord:
    return store.read(JOB_ID).record


def test_a_resume_is_the_launchers_own_within_the_budget_and_its_repetition_changes_nothing(
    aws: Account, store: S3RecordStore
) -> None:
    cloud = Aws(aws.client("s3"), NO_ROOM)
    first = read(store)
    assert cloud.resume(1) == {"submitted": "yes"}
    record = read(store)
    expected = first.with_next_attempt()
    own = {"created_at", "claim", "handed_over_at", "submitted_at"}
    assert [item.model_dump(exclude=own) for item in record.attempts] == [
        item.model_dump(exclude=own) for item in expected.attempts
    ]
    assert record.attempt.claim and record.attempt.handed_over_at
    assert job_resumer.in_seconds(record.attempt.handed_over_at) == record.attempt.submitted_at
    assert record.attempt.submitted_at and record.state == "Submitted"
    assert record.states[-2].note == "resumed by itself (1): no capacity; from step 0"
    # SageMaker may tell of one change more than once.
    assert cloud.resume(1) == {"left": "somebody has resumed it"} and cloud.asked == [JOB_ID]
    assert read(store) == record
    assert cloud.resume(2) == {"submitted": "yes"}, "no capacity is no crash loop"
    assert cloud.resume(3) == {"left": "recovery.max_resumes is spent (2)"} and len(cloud.asked) == 2


@pytest.mark.parametrize("batch", ["keep", "adapt"])
def test_without_capacity_an_elastic_job_goes_on_with_fewer_instances_as_the_launcher_laid_it_out(
    aws: Account, store: S3RecordStore, batch: str
) -> None:
    stored = store.read(JOB_ID)
    limits = {"min_instances": 1, "max_instances": 2, "batch": batch}
    plain = stored.record.resolved.spec.model_dump(mode="json")
    spec = parse(JobSpec, {**plain, "recovery": {**plain["recovery"], "elastic": limits}}, "job")
    before = stored.record.model_copy(update={"resolved": resolve(spec), "spec": spec, "smaller": smaller(spec)})
    store.replace(stored, before)
    cloud = Aws(aws.client("s3"), LOST)
    assert cloud.resume(1) == {"submitted": "yes"}
    lost = read(store)
    assert lost.resolved == before.resolved, "new machines may be had for a lost host"
    assert lost.states[-2].note == "resumed by itself (1) on 2 of 2 instances: a host was lost; from step 0"

    cloud.reason = NO_ROOM
    assert cloud.resume(2) == {"submitted": "yes"}
    fewer = read(store)
    by_hand = revised(before, ["compute.instance_count=1"], None)
    assert (fewer.resolved, fewer.spec) == (by_hand.resolved, by_hand.spec), "what `trainyard resume` would make of it"
    assert fewer.states[-2].note == "resumed by itself (2) on 1 of 2 instances: no capacity; from step 0"
    checked = check_record(json.loads(fewer.model_dump_json()), JOB_ID, contract_content())
    assert checked["num_hosts"] == 1, "the broker takes it"
    assert job_resumer.on_fewer_instances(json.loads(fewer.model_dump_json())) == json.loads(fewer.model_dump_json())


def test_while_there_is_no_capacity_the_number_of_instances_goes_down_to_the_smallest() -> None:
    spec = {"compute": {"instance_count": 4, "spot": True}, "recovery": {}}
    smaller_ones = [{"num_hosts": number} for number in (3, 2, 1)]
    record = {"spec": spec, "resolved": {"num_hosts": 4}, "smaller": smaller_ones}
    found = []
    for _ in range(4):
        record = job_resumer.on_fewer_instances(record)
        found.append((record["resolved"]["num_hosts"], record["spec"]["compute"]["instance_count"]))
    assert found == [(3, 3), (2, 2), (1, 1), (1, 1)], "the smallest is asked for again"


def test_which_attempt_a_person_asked_for_goes_with_the_job(aws: Account, store: S3RecordStore) -> None:
    cloud = Aws(aws.client("s3"), LOST)

    def asked() -> int:
        return int(check_record(json.loads(read(store).model_dump_json()), JOB_ID, contract_content())["asked"])

    assert asked() == 1
    cloud.commit(5)
    assert cloud.resume(1) == {"submitted": "yes"}
    assert asked() == 1, "the second is the resumer's"
    stored = store.read(JOB_ID)
    store.replace(stored, stored.record.with_next_attempt())
    assert asked() == 3
    cloud.commit(10)
    assert cloud.resume(3) == {"submitted": "yes"}
    assert asked() == 3
    assert job_resumer.asked_attempt(4, "forged") == job_resumer.asked_attempt(4, [7, {"note": [], "attempt": {}}]) == 4


def test_a_crash_loop_is_left_to_a_person_and_progress_is_none(aws: Account, store: S3RecordStore) -> None:
    cloud = Aws(aws.client("s3"), LOST)
    cloud.commit(5)
    assert "submitted" in cloud.resume(1)
    assert cloud.resume(2) == {"left": "a crash loop: twice in a row from step 5, a host was lost"}
    cloud.commit(10)
    assert "submitted" in cloud.resume(2)


def test_machines_that_were_not_to_be_had_in_between_hide_no_crash_loop(aws: Account, store: S3RecordStore) -> None:
    cloud = Aws(aws.client("s3"), LOST)
    with_budget(store, 9)
    cloud.commit(5)
    assert "submitted" in cloud.resume(1)
    cloud.reason = NO_ROOM
    assert "submitted" in cloud.resume(2) and "submitted" in cloud.resume(3)
    cloud.reason = LOST
    assert cloud.resume(4) == {"left": "a crash loop: twice in a row from step 5, a host was lost"}


def test_a_person_who_resumes_ends_a_crash_loop(aws: Account, store: S3RecordStore) -> None:
    cloud = Aws(aws.client("s3"), LOST)
    with_budget(store, 9)
    cloud.commit(5)
    assert "submitted" in cloud.resume(1) and "left" in cloud.resume(2)
    stored = store.read(JOB_ID)
    store.replace(stored, stored.record.with_next_attempt())
    assert "submitted" in cloud.resume(3), "it was mended: this is the first loss since"
    assert "crash loop" in cloud.resume(4)["left"]


def with_budget(store: S3RecordStore, max_resumes: int) -> None:
    stored = store.read(JOB_ID)
    spec = stored.record.resolved.spec
    spec = spec.model_copy(update={"recovery": spec.recovery.model_copy(update={"max_resumes": max_resumes})})
    resolved = stored.record.resolved.model_copy(update={"spec": spec})
    store.replace(stored, stored.record.model_copy(update={"resolved": resolved}))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("Failed", "AlgorithmError: rank 0 on algo-1: ValueError: a shape is wrong, exit code: 1"),
        ("Failed", "AlgorithmError: rank 0 on algo-1: CapacityError of the program's own, exit code: 2"),
        ("Failed", "AlgorithmError: stopped at step 75, exit code: 1"),
        ("Failed", "AlgorithmError: the last exit code: 1 at step 75, exit code: 1"),
        ("Failed", "AlgorithmError: no message, exit code: algo-1 1, algo-2 75"),
        ("Failed", "AlgorithmError: , exit code: 175"),
        ("Failed", "ClientError: Data download failed"),
        ("Stopped", ""),
        ("Completed", ""),
    ],
)
def test_what_another_start_would_not_mend_stays_ended(
    aws: Account, store: S3RecordStore, status: str, reason: str
) -> None:
    cloud = Aws(aws.client("s3"), reason)
    cloud.status = status
    before = read(store)
    assert cloud.resume(1) == {"left": "another start wouldn't mend what ended it"}
    assert (read(store), cloud.asked) == (before, [])


def test_nothing_is_resumed_that_did_not_ask_for_it(aws: Account, store: S3RecordStore) -> None:
    stored = store.read(JOB_ID)
    spec = stored.record.resolved.spec
    plain = spec.model_copy(update={"recovery": spec.recovery.model_copy(update={"max_resumes": 0})})
    resolved = stored.record.resolved.model_copy(update={"spec": plain})
    store.replace(stored, stored.record.model_copy(update={"resolved": resolved}))
    cloud = Aws(aws.client("s3"))
    assert cloud.resume(1) == {"left": "recovery.max_resumes is 0"} and not cloud.asked


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("NoSuchKey", "The specified key does not exist."),
        # S3's answer to who may read the object but not list the bucket, as this function.
        ("AccessDenied", "User: x is not authorized to perform: s3:ListBucket on resource: arn:aws:s3:::acme-data"),
    ],
)
def test_a_job_that_trainyard_did_not_launch_is_left_and_rings_nobody(
    aws: Account, store: S3RecordStore, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    """Its name begins with the tenant's, so that the rule tells of it; an error would ring three times."""
    cloud = Aws(aws.client("s3"))

    def refuse(**_: str) -> None:
        raise ClientError({"Error": {"Code": code, "Message": message}}, "GetObject")

    monkeypatch.setattr(cloud.s3, "get_object", refuse)
    assert "no job record" in cloud.resume(1)["left"] and not cloud.asked
    cloud.environment = {"TRAINYARD_JOB_ID": JOB_ID}
    for number in (1, 2):
        with pytest.raises(RuntimeError, match=f"{JOB_ID}.*launched it, and its record is not in {DATA}"):
            cloud.resume(number)
    code, message = "AccessDenied", "no identity-based policy allows the kms:Decrypt action"
    with pytest.raises(ClientError):
        cloud.resume(1)


def test_the_log_names_the_job_before_anything_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(*_: Any) -> dict[str, Any]:
        raise ClientError({"Error": {"Code": "SlowDown", "Message": "Please reduce your request rate."}}, "GetObject")

    monkeypatch.setenv("RESUMER", "{}")
    monkeypatch.setattr(job_resumer, "resume", away)
    with pytest.raises(ClientError):
        job_resumer.handler({"job": JOB_ID}, None)
    assert JOB_ID in capsys.readouterr().out


def test_of_two_resumers_one_wins(aws: Account, store: S3RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = Aws(aws.client("s3"))
    honest = job_resumer.newest_step

    def meanwhile(*arguments: Any) -> int:
        # A person resumes the job between the function's look and its write.
        monkeypatch.setattr(job_resumer, "newest_step", honest)
        stored = store.read(JOB_ID)
        store.replace(stored, stored.record.with_next_attempt())
        return honest(*arguments)

    monkeypatch.setattr(job_resumer, "newest_step", meanwhile)
    assert cloud.resume(1) == {"left": "somebody has resumed it"}
    assert (read(store).attempt.number, cloud.asked) == (2, [])


def test_who_looks_at_the_job_meanwhile_stops_no_resume(
    aws: Account, store: S3RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = Aws(aws.client("s3"))
    honest = job_resumer.newest_step

    def meanwhile(*arguments: Any) -> int:
        # `trainyard status` writes down what SageMaker says, between the function's look and its write.
        monkeypatch.setattr(job_resumer, "newest_step", honest)
        stored = store.read(JOB_ID)
        store.replace(stored, stored.record.model_copy(update={"launched_by": "somebody"}))
        return honest(*arguments)

    monkeypatch.setattr(job_resumer, "newest_step", meanwhile)
    assert cloud.resume(1) == {"submitted": "yes"}
    assert (read(store).attempt.number, read(store).launched_by) == (2, "somebody")


def test_a_record_that_others_keep_writing_is_an_error_and_changes_nothing(
    aws: Account, store: S3RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, before = Aws(aws.client("s3")), read(store)
    monkeypatch.setattr(job_resumer.Records, "replace", lambda *_: False)
    with pytest.raises(RuntimeError, match="somebody else kept writing its record"):
        cloud.resume(1)
    assert (read(store), cloud.asked) == (before, [])


def test_a_record_that_s3_lets_nobody_write_says_what_s3_says(aws: Account, store: S3RecordStore) -> None:
    before, s3 = read(store), aws.client("s3")

    class ReadOnly:
        exceptions, get_object, head_object = s3.exceptions, s3.get_object, s3.head_object
        get_paginator = s3.get_paginator

        def put_object(self, **_: Any) -> None:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "not authorized"}}, "PutObject")

    cloud = Aws(ReadOnly())
    with pytest.raises(ClientError, match=r"AccessDenied.* PutObject"):
        cloud.resume(1)
    assert (read(store), cloud.asked) == (before, [])


def test_it_waits_for_the_broker_as_long_as_that_may_take_and_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESUMER", json.dumps(PLACES))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def resume(name: str, places: dict[str, str], client: Any) -> dict[str, Any]:
        config = client("lambda").meta.config
        return {"waits": config.read_timeout, "tries": config.retries["total_max_attempts"]}

    monkeypatch.setattr(job_resumer, "resume", resume)
    assert job_resumer.handler({"job": "x"}, None) == {"job": "x", "waits": 130, "tries": 1}


def test_a_submission_that_failed_is_tried_again_and_one_that_was_refused_is_not(
    aws: Account, store: S3RecordStore
) -> None:
    cloud = Aws(aws.client("s3"))
    cloud.answer = {"refused": "try again", "by": "aws", "code": "Busy"}
    with pytest.raises(RuntimeError, match="the broker did not submit it"):
        cloud.resume(1)
    assert read(store).attempt.number == 2 and read(store).attempt.submitted_at is None
    cloud.answer = {"submitted": f"{JOB_ID}-r2"}
    assert cloud.resume(1) == {"submitted": f"{JOB_ID}-r2"}, "the same attempt"
    assert read(store).attempt.number == 2 and read(store).state == "Submitted"
    cloud.commit(3)
    cloud.answer = {"refused": "over the quota", "by": "rules"}
    assert cloud.resume(2) == cloud.answer
    assert read(store).attempt.submitted_at is None, "`trainyard resume` submits it"


@pytest.mark.parametrize("reason", [INTERNAL, LOST, "AlgorithmError: , exit code: 75"])
def test_batch_retries_what_the_resumer_resumes_but_capacity_which_it_retries_by_itself(reason: str) -> None:
    assert job_resumer.cause({"TrainingJobStatus": "Failed", "FailureReason": reason})
    rules = retry_rules.retry_rules({"recovery": {"max_resumes": 3}})
    assert rules["attempts"] == 4 and len(rules["evaluateOnExit"]) <= 5
    said = f"Received status from SageMaker: {reason}"
    first = next(
        rule
        for rule in rules["evaluateOnExit"]
        if re.fullmatch(re.escape(rule["onStatusReason"]).replace(r"\*", ".*"), said, re.DOTALL)
    )
    assert first["action"] == "RETRY"


def test_batch_starts_once_what_did_not_ask_for_more() -> None:
    assert retry_rules.retry_rules({"recovery": {"max_resumes": 0}}) == {"attempts": 1}
    assert retry_rules.retry_rules({}) == {"attempts": 1}
    assert retry_rules.retry_rules({"recovery": {"max_resumes": 20}})["attempts"] == 10
    rules = retry_rules.retry_rules({"recovery": {"max_resumes": 1}})["evaluateOnExit"]
    assert rules[-1] == {"action": "EXIT", "onStatusReason": "*"}


def test_every_host_that_asks_to_be_resumed_is_one_cause() -> None:
    reason = "AlgorithmError: the container ended without a message, exit code: algo-1 75, algo-2 75"
    found = job_resumer.cause({"TrainingJobStatus": "Failed", "FailureReason": reason})
    assert found == "saved, and asked to be resumed"


def _reason(**codes: int) -> str:
    """SageMaker's words for hosts that left none, by their exit codes."""
    return failure_reason([], {host.replace("_", "-"): code for host, code in codes.items()})


@pytest.mark.parametrize(
    "reason",
    [
        _reason(algo_1=75, algo_2=137),
        _reason(algo_1=137, algo_2=75),
        _reason(algo_1=75, algo_2=-9, algo_3=75),
        _reason(algo_1=0, algo_2=137, algo_3=75),
    ],
)
def test_a_host_that_was_killed_beside_one_that_saved_is_resumed_within_a_bound_of_its_own(
    aws: Account, store: S3RecordStore, reason: str
) -> None:
    stored = store.read(JOB_ID)
    spec = stored.record.resolved.spec
    patient = spec.model_copy(update={"recovery": spec.recovery.model_copy(update={"max_resumes": 9})})
    resolved = stored.record.resolved.model_copy(update={"spec": patient})
    store.replace(stored, stored.record.model_copy(update={"resolved": resolved}))
    cloud = Aws(aws.client("s3"), reason)
    for number in (1, 2):
        cloud.commit(5 * number)
        assert cloud.resume(number) == {"submitted": "yes"}
    assert read(store).states[-2].note == "resumed by itself (2): a host was killed; from step 10"
    cloud.commit(15)
    no = "hosts were killed without a word after 2 resumes for that: is their memory enough?"
    assert cloud.resume(3) == {"left": no}, "though it makes steps each time"
    cloud.reason = LOST
    assert cloud.resume(3) == {"submitted": "yes"}, "a host that is known to be lost is another cause"


@pytest.mark.parametrize(
    "reason",
    [
        _reason(algo_1=137, algo_2=137),
        _reason(algo_1=137),
        _reason(algo_1=75, algo_2=137, algo_3=1),
        _reason(algo_1=75, algo_2=1370),
        f"{LOST}\nkernel: Out of memory: Killed process 4711 (python)",
        "AlgorithmError: rank 1 on algo-2 was killed by SIGKILL: out of memory on the host, or killed from outside"
        ", exit code: 1",
    ],
)
def test_hosts_that_the_kernel_kills_for_memory_are_not_resumed(reason: str) -> None:
    assert job_resumer.cause({"TrainingJobStatus": "Failed", "FailureReason": reason}) is None


def test_a_write_whose_answer_was_lost_is_the_resumers_own(aws: Account) -> None:
    """The SDK sends it again, and S3 refuses that for what the first one wrote; another's like it is another's."""
    s3 = aws.client("s3")
    s3.create_bucket(Bucket=DATA)
    key = f"jobs/{JOB_ID}/record.json"

    class Twice:
        exceptions, get_object, head_object = s3.exceptions, s3.get_object, s3.head_object

        def put_object(self, **request: Any) -> Any:
            s3.put_object(**request)
            return s3.put_object(**request)

    version = s3.put_object(Bucket=DATA, Key=key, Body=b"{}")["ETag"]
    record = {"job_id": JOB_ID, "attempts": []}
    assert job_resumer.Records(Twice(), DATA).replace(record, version)
    assert not job_resumer.Records(s3, DATA).replace(record, version)


class Submitting(Aws):
    """Its broker submits what the record's newest attempt is when it reads it; one that it has already stays."""

    def __init__(self, s3: Any, store: S3RecordStore) -> None:
        super().__init__(s3, LOST)
        self.store = store
        self.taken: dict[str, float] = {}
        self.meanwhile: list[Callable[[], object]] = []
        """What others do once it has read the record, and before SageMaker has the job."""

    def invoke(self, *, FunctionName: str, Payload: bytes) -> dict[str, Any]:
        record = read(self.store)
        if self.meanwhile:
            self.meanwhile.pop()()
        if "submitted" in self.answer:
            self.taken.setdefault(record.attempt.training_job_name, record.spec.compute.max_hours)
        return super().invoke(FunctionName=FunctionName, Payload=Payload)


class Person:
    """`trainyard resume` of somebody who asks the same broker."""

    def __init__(self, cloud: Submitting) -> None:
        self.cloud = cloud

    def check(self, record: JobRecord) -> None:
        """Nothing is refused."""

    def submit(self, record: JobRecord, say: Say) -> None:
        self.cloud.invoke(FunctionName="the-broker", Payload=json.dumps({"job_id": record.job_id}).encode())

    def observe(self, record: JobRecord) -> Observation | None:
        if record.attempt.number == 1:
            return Observation("Failed", failure=LOST)
        return Observation("Training") if record.attempt.training_job_name in self.cloud.taken else None

    def resume(self, hours: float | None = None) -> JobRecord:
        """With `--set compute.max_hours=HOURS`, or as the job is."""

        def revise(record: JobRecord) -> JobRecord:
            compute = record.spec.compute.model_copy(update={"max_hours": hours})
            return record.model_copy(update={"spec": record.spec.model_copy(update={"compute": compute})})

        backend: Any = self
        return watch.resume(self.cloud.store, backend, JOB_ID, revise=None if hours is None else revise)


@pytest.fixture
def cloud(aws: Account, store: S3RecordStore) -> Submitting:
    return Submitting(aws.client("s3"), store)


def expect_what_runs_to_be_what_the_record_says(cloud: Submitting, hours: float) -> None:
    assert cloud.taken == {f"{JOB_ID}-r2": hours} == {f"{JOB_ID}-r2": read(cloud.store).spec.compute.max_hours}


@pytest.mark.parametrize("moment", ["written", "handed over"])
def test_a_person_who_resumes_what_the_resumer_is_submitting_is_told_so(
    cloud: Submitting, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    before, refused = read(cloud.store).spec.compute.max_hours, list[str]()

    def person() -> None:
        with pytest.raises(InputError) as error:
            Person(cloud).resume(hours=before + 1)
        refused.append(str(error.value))

    honest = job_resumer.Records.replace

    def replace(records: job_resumer.Records, record: dict[str, Any], version: str) -> bool:
        monkeypatch.setattr(job_resumer.Records, "replace", honest)
        written = honest(records, record, version)
        person()
        return written

    if moment == "written":
        monkeypatch.setattr(job_resumer.Records, "replace", replace)
    else:
        cloud.meanwhile.append(person)
    assert cloud.resume(1) == {"submitted": "yes"}
    assert len(refused) == 1 and "somebody else has just resumed it" in refused[0]
    expect_what_runs_to_be_what_the_record_says(cloud, before)


@pytest.mark.parametrize("hours", [None, 5.0])
def test_a_resumer_that_meets_what_a_person_is_submitting_leaves_it(cloud: Submitting, hours: float | None) -> None:
    before, left = read(cloud.store).spec.compute.max_hours, list[dict[str, Any]]()
    cloud.meanwhile.append(lambda: left.append(cloud.resume(1)))
    assert Person(cloud).resume(hours).attempt.submitted_at
    assert left == [{"left": "somebody has resumed it"}] and len(cloud.asked) == 1
    expect_what_runs_to_be_what_the_record_says(cloud, hours or before)


@pytest.mark.parametrize("moment", ["before its look", "between its look and its write", "while it is submitted"])
def test_an_attempt_of_the_resumers_that_a_person_has_changed_is_the_persons(
    cloud: Submitting, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    cloud.answer = {"refused": "try again", "by": "aws", "code": "Busy"}
    with pytest.raises(RuntimeError, match="the broker did not submit it"):
        cloud.resume(1)
    cloud.answer, cloud.asked = {"submitted": "yes"}, []
    person, honest = Person(cloud), job_resumer.is_ours

    def is_ours(*asked: Any) -> bool:
        monkeypatch.setattr(job_resumer, "is_ours", honest)
        found = honest(*asked)
        person.resume(hours=5)
        return found

    left = list[dict[str, Any]]()
    if moment == "between its look and its write":
        monkeypatch.setattr(job_resumer, "is_ours", is_ours)
        left.append(cloud.resume(1))
    elif moment == "while it is submitted":
        cloud.meanwhile.append(lambda: left.append(cloud.resume(1)))
        person.resume(hours=5)
    else:
        person.resume(hours=5)
        left.append(cloud.resume(1))
    assert left == [{"left": "somebody has resumed it"}] and len(cloud.asked) == 1, "Lambda asks again after an error"
    expect_what_runs_to_be_what_the_record_says(cloud, 5)


def test_what_the_broker_refused_the_resumer_is_free_at_once(cloud: Submitting) -> None:
    cloud.answer = {"refused": "over the quota", "by": "rules"}
    assert cloud.resume(1) == cloud.answer
    assert read(cloud.store).attempt.handed_over_at is None
    cloud.answer = {"submitted": "yes"}
    Person(cloud).resume(hours=5)
    expect_what_runs_to_be_what_the_record_says(cloud, 5)


def test_who_resumes_as_it_is_what_the_resumer_is_submitting_has_the_same_attempt(cloud: Submitting) -> None:
    before = read(cloud.store).spec.compute.max_hours
    cloud.meanwhile.append(lambda: Person(cloud).resume())
    assert cloud.resume(1) == {"submitted": "yes"}
    assert read(cloud.store).attempt.number == 2 and read(cloud.store).attempt.submitted_at
    assert [state.state for state in read(cloud.store).states].count("Submitted") == 1
    expect_what_runs_to_be_what_the_record_says(cloud, before)


def test_of_two_events_at_once_the_one_that_is_refused_does_not_free_the_attempt(cloud: Submitting) -> None:
    before = read(cloud.store).spec.compute.max_hours

    def others() -> None:
        cloud.answer = {"refused": "try again", "by": "aws", "code": "Busy"}
        with pytest.raises(RuntimeError, match="the broker did not submit it"):
            cloud.resume(1)
        cloud.answer = {"submitted": "yes"}
        with pytest.raises(InputError, match="somebody else has just resumed it"):
            Person(cloud).resume(hours=5)

    cloud.meanwhile.append(others)
    assert cloud.resume(1) == {"submitted": "yes"}
    expect_what_runs_to_be_what_the_record_says(cloud, before)


def test_of_two_events_in_one_second_the_first_that_is_refused_does_not_free_the_attempt(
    cloud: Submitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_resumer, "_now", lambda: "2026-01-31T12:00:09+00:00")
    answers: list[dict[str, Any]] = []

    def away() -> None:
        raise TimeoutError

    def others() -> None:
        cloud.meanwhile.append(away)
        with pytest.raises(TimeoutError):
            cloud.resume(1)
        answers.append(cloud.answer)

    cloud.answer = {"refused": "over the quota", "by": "rules"}
    cloud.meanwhile.append(others)
    assert [cloud.resume(1)] == answers
    with pytest.raises(InputError, match="somebody else has just resumed it"):
        Person(cloud).resume(hours=5)


def test_each_who_hands_an_attempt_over_has_a_stamp_of_its_own_whatever_its_clock_says() -> None:
    ahead = "2999-01-31T12:00:09+00:00"
    assert job_resumer.moment_after(ahead) == "2999-01-31T12:00:09.000001+00:00"
    stamps, last = set[str](), None
    for _ in range(100):
        last = job_resumer.moment_after(last)
        stamps.add(last)
    assert len(stamps) == 100 and max(stamps) == last
    for odd in (None, "", "yesterday", "2999-01-31T12:00:09", 7):  # the tenant can write anything there
        assert job_resumer.moment_after(odd) < "2999"  # type: ignore[arg-type]
    assert job_resumer.in_seconds("yesterday") == "yesterday"


def test_a_broker_that_did_not_answer_may_be_at_it(cloud: Submitting) -> None:
    def away() -> None:
        raise TimeoutError

    cloud.meanwhile.append(away)
    with pytest.raises(TimeoutError):
        cloud.resume(1)
    with pytest.raises(InputError, match="somebody else has just resumed it"):
        Person(cloud).resume(hours=5)
    assert cloud.resume(1) == {"submitted": "yes"}


def test_what_the_broker_can_not_know_of_is_asked_again_and_changed_by_nobody(cloud: Submitting) -> None:
    """SageMaker gave no answer: the job may come yet, with the settings that it was told."""
    cloud.answer = {"refused": "can't be known now", "by": "aws", "code": "Unknown", "may_run": True}
    with pytest.raises(RuntimeError, match="can't be known now"):
        cloud.resume(1)
    with pytest.raises(InputError, match="somebody else has just resumed it"):
        Person(cloud).resume(hours=5)
    cloud.answer = {"submitted": "yes"}
    assert cloud.resume(1) == {"submitted": "yes"}
    assert read(cloud.store).attempt.number == 2 and read(cloud.store).attempt.submitted_at


def test_a_record_that_an_older_launcher_wrote_gets_no_field_that_this_would_refuse(cloud: Submitting) -> None:
    content = json.loads(read(cloud.store).model_dump_json())
    for name in ("claim", "handed_over_at"):
        del content["attempts"][0][name]
    key = f"jobs/{JOB_ID}/record.json"
    cloud.s3.put_object(Bucket=DATA, Key=key, Body=json.dumps(content).encode())
    assert cloud.resume(1) == {"submitted": "yes"}
    written = json.load(cloud.s3.get_object(Bucket=DATA, Key=key)["Body"])
    assert [attempt.keys() - content["attempts"][0].keys() for attempt in written["attempts"]] == [set(), set()]


def test_a_broker_whose_function_failed_may_have_submitted_it(cloud: Submitting) -> None:
    """It ran into its time, say, after SageMaker had the job: Lambda's own answer refuses nothing."""
    cloud.answer = {"errorMessage": "Task timed out after 120.00 seconds"}
    with pytest.raises(RuntimeError, match=r"the broker did not submit it: .*timed out"):
        cloud.resume(1)
    with pytest.raises(InputError, match="somebody else has just resumed it"):
        Person(cloud).resume(hours=5)
    cloud.answer = {"submitted": "yes"}
    assert cloud.resume(1) == {"submitted": "yes"}


@pytest.mark.parametrize("own", [{"handed_over_at": "2026-01-31T12:00:09+00:00"}, {"claim": "a person's"}])
@pytest.mark.parametrize("is_refused", [False, True])
def test_what_others_wrote_of_the_attempt_meanwhile_stays(
    cloud: Submitting, own: dict[str, Any], is_refused: bool
) -> None:
    """Another event that submits it too, or (--force) a person who has changed it: theirs is not confirmed here."""
    if is_refused:
        cloud.answer = {"refused": "over the quota", "by": "rules"}

    def others() -> None:
        stored = cloud.store.read(JOB_ID)
        cloud.store.replace(stored, stored.record.with_attempt(**own))

    cloud.meanwhile.append(others)
    assert cloud.resume(1) == cloud.answer
    attempt = read(cloud.store).attempt
    assert {name: getattr(attempt, name) for name in own} == own and attempt.handed_over_at
    assert bool(attempt.submitted_at) == (not is_refused and "claim" not in own)
