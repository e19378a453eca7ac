"""Status, stop, resume and following, on a backend that plays a script."""

import errno
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta, timezone
from functools import partialmethod
from pathlib import Path

import pytest
import urllib3
from boto3.exceptions import RetriesExceededError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError, SSLError

from trainyard.errors import AwsAwayError, AwsRefusedError, InputError, TrainyardError
from trainyard.launch import launcher, watch
from trainyard.launch.aws import aws_errors
from trainyard.launch.backend import AwayError, LogCursor, LogLine, Observation, Say, SilentError, say_nothing
from trainyard.launch.launcher import SubmissionInterruptedError, new_record
from trainyard.launch.record import FolderRecordStore, JobRecord, StateChange, StoredRecord
from trainyard.spec.job import JobSpec, ResolvedJob

JOB_ID = "acme-tiny-20260131120000-1a2b"


class ScriptedBackend:
    """Answers each look with the next observation of a script; the last one stays."""

    def __init__(self, *script: Observation | None) -> None:
        self.script = list(script)
        self.submitted: list[str] = []
        self.stopped: list[str] = []
        self.lines: list[LogLine] = []
        self.checked: list[str] = []

    def check(self, record: JobRecord) -> None:
        self.checked.append(record.attempt.training_job_name)

    def submit(self, record: JobRecord, say: Say) -> None:
        self.submitted.append(record.attempt.training_job_name)

    def observe(self, record: JobRecord) -> Observation | None:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def stop(self, record: JobRecord) -> None:
        self.stopped.append(record.attempt.training_job_name)

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        return {record.job_id: seen.state for record in records if (seen := self.observe(record))}

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        start = int(cursor.positions.get("lines", "0"))
        cursor.positions["lines"] = str(len(self.lines))
        return self.lines[start:]


def transition(state: str, second: int) -> StateChange:
    return StateChange(state=state, at=f"2026-01-31T12:00:{second:02}+00:00")


STARTING = Observation("Starting", transitions=(transition("Starting", 1),))
TRAINING = Observation("Training", transitions=(transition("Starting", 1), transition("Training", 5)))
RECLAIMED = Observation(
    "Training",
    transitions=(
        *TRAINING.transitions,
        transition("Interrupted", 9),
        transition("Starting", 12),
        transition("Training", 20),
    ),
    reclaims=1,
)
FAILED = Observation(
    "Failed", failure="out of memory on rank 3", transitions=(*TRAINING.transitions, transition("Failed", 30))
)
COMPLETED = Observation("Completed", transitions=(*TRAINING.transitions, transition("Completed", 40)))


@pytest.fixture
def store(tmp_path: Path, job: JobSpec, resolved: ResolvedJob) -> FolderRecordStore:
    """A store with one job, submitted."""
    folder = FolderRecordStore(tmp_path)
    record = new_record(
        job,
        resolved,
        job_id=JOB_ID,
        backend="local",
        environment="test",
        plan={},
        image=None,
        channels=(),
        forced=(),
        launched_by="",
    )
    folder.create(record.with_attempt(submitted_at="2026-01-31T12:00:00+00:00").with_state("Submitted"))
    return folder


def test_status_writes_what_is_new_into_the_record_once(store: FolderRecordStore) -> None:
    backend = ScriptedBackend(RECLAIMED)
    watch.status(store, backend, JOB_ID)
    before = store.read(JOB_ID)
    assert [change.state for change in before.record.states] == [
        "Created", "Submitted", "Starting", "Training", "Interrupted", "Starting", "Training",
    ]  # fmt: skip
    assert before.record.attempt.reclaims == 1
    watch.status(store, backend, JOB_ID)
    assert store.read(JOB_ID).etag == before.etag, "a second look finds nothing new and writes nothing"


def test_a_status_is_told_though_it_can_not_be_written_down(
    store: FolderRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, on one that an error has made read-only, or of a colleague's job; who stops a job looks too."""
    backend = ScriptedBackend(TRAINING)
    honest = Path.write_bytes

    def half(path: Path, body: bytes, *, number: int) -> int:
        honest(path, body[:10])
        raise OSError(number, "no room")

    with monkeypatch.context() as patched:
        for number in (errno.ENOSPC, errno.EROFS, errno.EACCES):
            patched.setattr(Path, "write_bytes", partialmethod(half, number=number))
            assert watch.status(store, backend, JOB_ID).record.state == "Training"
        patched.setattr(Path, "write_bytes", partialmethod(half, number=errno.EIO))
        with pytest.raises(OSError, match="no room"):
            watch.status(store, backend, JOB_ID)
    assert store.read(JOB_ID).record.state != "Training"
    assert {path.name for path in store.directory(JOB_ID).iterdir()} == {"record.json", ".record.lock"}
    watch.status(store, backend, JOB_ID)
    assert store.read(JOB_ID).record.state == "Training"


def test_a_failed_job_says_why_and_what_to_do(store: FolderRecordStore) -> None:
    status = watch.status(store, ScriptedBackend(FAILED), JOB_ID)
    assert status.finished
    assert status.record.attempt.failure == "out of memory on rank 3"
    assert f"trainyard resume {JOB_ID}" in status.advice


OPTIONS = " --environment 'my production.yaml' --tenant acme"


@pytest.mark.parametrize("observation", [FAILED, None])
def test_what_is_advised_looks_where_the_job_is(store: FolderRecordStore, observation: Observation | None) -> None:
    backend = ScriptedBackend(observation)
    resume = f"`trainyard resume {JOB_ID}{OPTIONS}`"
    assert resume in watch.status(store, backend, JOB_ID, options=OPTIONS).advice
    (*_, (last, _)) = watch.watch(store, backend, JOB_ID, sleep=lambda _: None, options=OPTIONS)
    assert resume in last.advice
    with pytest.raises(InputError) as refused:
        watch.stop(store, backend, JOB_ID, options=OPTIONS)
    assert observation is FAILED or resume in str(refused.value)


def test_who_may_not_resume_is_sent_to_where_the_job_is(store: FolderRecordStore) -> None:
    with pytest.raises(InputError) as refused:
        watch.resume(store, ScriptedBackend(TRAINING), JOB_ID, options=OPTIONS)
    assert str(refused.value).endswith(f"trainyard stop {JOB_ID}{OPTIONS}")

    class Raced(ScriptedBackend):
        """Somebody else resumes while this one asks whether it may."""

        def check(self, record: JobRecord) -> None:
            watch.resume(store, ScriptedBackend(FAILED), JOB_ID)

    with pytest.raises(InputError, match="somebody else has just resumed it") as refused:
        watch.resume(store, Raced(FAILED), JOB_ID, options=OPTIONS)
    assert str(refused.value).endswith(f"trainyard status {JOB_ID}{OPTIONS}")


def test_following_ends_with_the_job_and_shows_its_last_lines(store: FolderRecordStore) -> None:
    backend = ScriptedBackend(STARTING, TRAINING, COMPLETED)
    backend.lines = [LogLine("algo-1", f"line {index}", index) for index in range(3)]
    states, texts, slept = [], [], []
    for status, lines in watch.watch(store, backend, JOB_ID, sleep=slept.append):
        states.append(status.state)
        texts += [line.text for line in lines]
        if status.state == "Training":
            backend.lines.append(LogLine("algo-1", "the end", 9))
    assert states == ["Starting", "Training", "Completed"]
    assert texts == ["line 0", "line 1", "line 2", "the end"]
    assert len(slept) == 2 and max(slept) <= 2.0, "nobody looks at a still screen for more than 2 s"


class PagedBackend(ScriptedBackend):
    """A log of which a read brings one page."""

    def __init__(self, pages: list[list[str]], *script: Observation | None) -> None:
        super().__init__(*script)
        self.pages = pages

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        pages, begun = self.pages, int(cursor.positions.get("page", "0"))
        ended = min(begun + 1, len(pages))
        cursor.positions["page"], cursor.more = str(ended), ended < len(pages)
        return [LogLine("algo-1", text, None) for page in pages[begun:ended] for text in page]


def test_what_is_left_of_a_log_is_read_at_once_and_before_an_ended_job_is_left(store: FolderRecordStore) -> None:
    backend = PagedBackend([["a"], [], ["b"], ["c"]], TRAINING, TRAINING, COMPLETED)
    slept: list[float] = []
    cursor = LogCursor()
    seen = watch.watch(store, backend, JOB_ID, sleep=slept.append, cursor=cursor)
    assert [(status.state, [line.text for line in lines], cursor.more) for status, lines in seen] == [
        ("Training", ["a"], True),
        ("Training", [], True),
        ("Completed", ["b"], True),
        ("Completed", ["c"], False),
    ]
    assert slept == [], "there was more at each look, and then the end"
    assert cursor.positions == {"page": "4"}, "the caller's own, who goes on from there"


def test_who_goes_on_from_a_cursor_is_shown_nothing_twice(store: FolderRecordStore) -> None:
    backend = PagedBackend([["a"], ["b"]], COMPLETED)
    cursor = LogCursor(positions={"page": "1"})
    seen = watch.watch(store, backend, JOB_ID, sleep=lambda _: None, cursor=cursor)
    assert [line.text for _, lines in seen for line in lines] == ["b"]


def test_a_look_without_an_answer_moves_no_cursor(store: FolderRecordStore) -> None:
    class Away(PagedBackend):
        def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
            reads.append(cursor.positions.get("page", "0"))
            if len(reads) in (2, 3):
                raise AwsAwayError("no answer")
            return super().read_logs(record, cursor)

    reads: list[str] = []
    backend = Away([["a"], ["b"]], TRAINING, COMPLETED)
    seen = watch.watch(store, backend, JOB_ID, sleep=lambda _: None)
    assert [line.text for _, lines in seen for line in lines] == ["a", "b"]
    assert reads == ["0", "1", "1", "1"]


class AwayBackend(ScriptedBackend):
    """Does not answer the looks whose numbers (from 0) are given."""

    def __init__(self, away: Collection[int], *script: Observation | None) -> None:
        super().__init__(*script)
        self.away, self.looks = away, 0

    def observe(self, record: JobRecord) -> Observation | None:
        self.looks += 1
        if self.looks - 1 in self.away:
            raise AwayError("does not answer")
        return super().observe(record)


def test_who_does_not_answer_for_a_while_is_asked_again(store: FolderRecordStore) -> None:
    seen = watch.watch(store, AwayBackend({1, 2}, TRAINING, COMPLETED), JOB_ID, sleep=lambda _: None)
    assert [status.state for status, _ in seen] == ["Training", "Completed"]
    with pytest.raises(AwayError):
        next(watch.watch(store, AwayBackend({0}, TRAINING), JOB_ID, sleep=lambda _: None))
    gone = AwayBackend(range(1, 99), TRAINING)
    with pytest.raises(AwayError):
        list(watch.watch(store, gone, JOB_ID, sleep=lambda _: None))
    assert gone.looks == watch.MOST_AWAY_LOOKS + 2


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (EndpointConnectionError(endpoint_url="https://s3"), True),
        (ReadTimeoutError(endpoint_url="https://s3"), True),
        (ClientError({"Error": {"Code": "ThrottlingException", "Message": "Rate exceeded"}}, "GetLogEvents"), True),
        (ClientError({"Error": {"Code": "503"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "GetObject"), True),  # type: ignore[typeddict-item]
        (RetriesExceededError(ConnectionError("reset")), True),
        (urllib3.exceptions.SSLError("DECRYPTION_FAILED_OR_BAD_RECORD_MAC"), True),
        (ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "GetObject"), False),
        (NoCredentialsError(), False),
        (SSLError(endpoint_url="https://s3", error="self-signed"), False),
    ],
)
def test_a_watch_outlives_what_passes_by_itself(error: Exception, passes: bool, store: FolderRecordStore) -> None:
    class Aws(ScriptedBackend):
        def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
            if (number := len(slept)) in (1, 2, 3):
                with aws_errors("reading", f"look {number}"):
                    raise error
            return super().read_logs(record, cursor)

    slept: list[float] = []
    seen = watch.watch(store, Aws(*[TRAINING] * 5, COMPLETED), JOB_ID, sleep=slept.append)
    if passes:
        assert [status.state for status, _ in seen] == ["Training", "Training", "Completed"]
        assert slept[1:4] == sorted(slept[1:4]) and slept[3] > slept[1], "longer and longer"
    else:
        with pytest.raises(AwsRefusedError, match=r"^reading look 1: "):
            list(seen)


@pytest.mark.parametrize("error", [SilentError("the controller does not answer"), AwsAwayError("the session ended")])
def test_a_watch_outlives_a_cluster_that_is_silent_for_a_while(error: Exception, store: FolderRecordStore) -> None:
    class Silent(AwayBackend):
        def observe(self, record: JobRecord) -> Observation | None:
            try:
                return super().observe(record)
            except AwayError:
                raise error from None

    seen = watch.watch(store, Silent({1, 2}, TRAINING, COMPLETED), JOB_ID, sleep=lambda _: None)
    assert [status.state for status, _ in seen] == ["Training", "Completed"]
    with pytest.raises(type(error)):
        watch.resume(store, Silent({0}, TRAINING), JOB_ID, force=True)  # it is not gone for good
    assert store.read(JOB_ID).record.attempt.number == 1


def test_many_logs_are_read_less_often(store: FolderRecordStore) -> None:
    class Hosts(ScriptedBackend):
        def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
            cursor.positions = {f"host-{number}": "1" for number in range(64)}
            return []

    slept: list[float] = []
    list(watch.watch(store, Hosts(TRAINING, COMPLETED), JOB_ID, sleep=slept.append))
    assert all(64 / seconds <= 25 for seconds in slept) and slept


class ResumedBackend(ScriptedBackend):
    """Somebody resumes the job before its third look, so that no look sees its first attempt's end. Its attempts write
    to one log, as on this machine and on Slurm, or each to its own, as on SageMaker."""

    def __init__(self, store: FolderRecordStore, *, num_streams: int = 1, one_log: bool) -> None:
        super().__init__(TRAINING, TRAINING, TRAINING, COMPLETED)
        self.store, self.num_streams, self.one_log, self.looks = store, num_streams, one_log, 0
        self.logs: dict[str, list[str]] = {}

    def observe(self, record: JobRecord) -> Observation | None:
        self.looks += 1
        if self.looks == 3:
            self.store.replace(self.store.read(JOB_ID), record.with_next_attempt())
        return super().observe(record)

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        name = "log" if self.one_log else record.attempt.training_job_name
        self.logs.setdefault(name, []).append(f"look {self.looks} of attempt {record.attempt.number}")
        start = int(cursor.positions.get(f"{name} 0", "0"))
        cursor.positions |= {f"{name} {index}": str(len(self.logs[name])) for index in range(self.num_streams)}
        return [LogLine("host", text, None) for text in self.logs[name][start:]]


@pytest.mark.parametrize("one_log", [True, False], ids=["one log", "a log each"])
def test_a_watch_over_two_attempts_shows_each_line_once(store: FolderRecordStore, one_log: bool) -> None:
    cursor, texts, attempts = LogCursor(), [], []
    backend = ResumedBackend(store, one_log=one_log)
    for status, lines in watch.watch(store, backend, JOB_ID, sleep=lambda _: None, cursor=cursor):
        texts += [line.text for line in lines]
        attempts.append(status.record.attempt.number)
    assert attempts == [1, 1, 2], "the look that met another attempt was made again"
    assert texts == ["look 1 of attempt 1", "look 2 of attempt 1", "look 4 of attempt 2"]
    name = "log" if one_log else f"{JOB_ID}-r2"
    assert cursor.positions[f"{name} 0"] == ("3" if one_log else "1"), "the caller sees how far they were read"


def test_an_ended_attempts_logs_make_no_look_at_the_next_one_later(store: FolderRecordStore) -> None:
    slept: list[float] = []
    backend = ResumedBackend(store, num_streams=64, one_log=False)
    backend.script = [*[TRAINING] * 5, COMPLETED]
    list(watch.watch(store, backend, JOB_ID, sleep=slept.append))
    assert backend.logs.keys() == {JOB_ID, f"{JOB_ID}-r2"}
    assert slept == [64 / watch.STREAMS_A_SECOND] * 4


def test_a_state_is_recorded_once_whatever_the_time_zone_it_was_looked_at_from(store: FolderRecordStore) -> None:
    """Earlier records hold it once for each, and hours were counted as often."""
    away = tuple(
        change.model_copy(update={"at": datetime.fromisoformat(change.at).astimezone(zone).isoformat()})
        for zone in (timezone(timedelta(hours=1)), timezone(timedelta(hours=-5)))
        for change in TRAINING.transitions
    )
    stored = store.read(JOB_ID)
    store.replace(stored, stored.record.model_copy(update={"states": (*stored.record.states, *away)}))
    watch.status(store, ScriptedBackend(TRAINING), JOB_ID)
    states = store.read(JOB_ID).record.states
    assert [change.state for change in states] == ["Created", "Submitted", "Starting", "Training"]


def recorded(store: FolderRecordStore, *states: StateChange) -> JobRecord:
    """The job's record, with that as all that has become of it."""
    return store.read(JOB_ID).record.model_copy(update={"states": states})


@pytest.mark.parametrize(
    "ended",
    [
        Observation("Stopped", ended_at=transition("Stopped", 20).at),
        Observation("Stopped", transitions=(transition("Training", 10), transition("Stopped", 20))),
    ],
)
def test_an_end_stands_no_earlier_than_what_came_before_it(ended: Observation, store: FolderRecordStore) -> None:
    """Of objects that are gone Kubernetes knows when the stop was asked for, and its jobs fail before their pods have
    saved: an end of before made the time of the save less than none."""
    before = recorded(store, transition("Training", 10), transition("Stopping", 30))
    after = watch.merged(before, ended)
    assert after.states == (*before.states, transition("Stopped", 30))
    assert watch.merged(after, ended).states == after.states, "told again it is no second end"
    nothing_since = recorded(store, transition("Training", 10))
    assert watch.merged(nothing_since, ended).states[1:] == (transition("Stopped", 20),)


def test_an_end_that_was_none_is_told_again_and_stays_where_it_was(store: FolderRecordStore) -> None:
    """A job that is requeued goes on in the same attempt; the end of before is no new one."""
    states = (transition("Training", 10), transition("Failed", 20), transition("Training", 30))
    record = recorded(store, *states)
    assert watch.merged(record, Observation("Training", transitions=states)).states == states


def test_a_place_that_is_gone_is_left_by_force_only(store: FolderRecordStore) -> None:
    backend = AwayBackend({0, 1, 2}, TRAINING)
    with pytest.raises(AwayError, match=r"^does not answer$"):
        watch.resume(store, backend, JOB_ID)
    with pytest.raises(AwayError, match=r"whether it still runs can't be asked: does not answer.*--force"):
        watch.resume(store, backend, JOB_ID, revise=lambda record: record)
    assert watch.resume(store, backend, JOB_ID, revise=lambda record: record, force=True).attempt.number == 2
    assert backend.submitted == [f"{JOB_ID}-r2"]


def test_resume_is_a_new_attempt_of_the_same_record(store: FolderRecordStore) -> None:
    backend = ScriptedBackend(FAILED)
    before = store.read(JOB_ID).record
    resumed = watch.resume(store, backend, JOB_ID)
    assert backend.submitted == [f"{JOB_ID}-r2"]
    assert resumed.checkpoint_destination == before.checkpoint_destination
    assert resumed.resolved == before.resolved
    assert [(change.attempt, change.state) for change in resumed.states][-2:] == [(2, "Created"), (2, "Submitted")]


def test_what_the_resumer_may_start_again(store: FolderRecordStore) -> None:
    record = store.read(JOB_ID).record
    recovery = record.resolved.spec.recovery.model_copy(update={"max_resumes": 1})
    spec = record.resolved.spec.model_copy(update={"recovery": recovery})
    allowing = record.model_copy(update={"resolved": record.resolved.model_copy(update={"spec": spec})})
    lost = "CapacityError: Unable to provision requested ML compute capacity."
    for case, state, failure, expected in (
        (allowing, "Failed", lost, True),
        (record, "Failed", lost, False),
        (allowing, "Stopped", lost, False),
        (allowing, "Failed", "AlgorithmError: out of memory", False),
        (allowing.with_state("Training", note="resumed by itself (1): x"), "Failed", lost, False),
    ):
        assert watch.may_be_resumed(case.with_state(state).with_attempt(failure=failure)) is expected, (state, failure)


def test_two_resumes_at_once_start_one_attempt(store: FolderRecordStore) -> None:
    class RacingStore(FolderRecordStore):
        """Somebody else resumes between our look and our write."""

        raced = False

        def replace(self, stored: StoredRecord, record: JobRecord) -> StoredRecord:
            if not self.raced:
                self.raced = True
                watch.resume(store, ScriptedBackend(FAILED), JOB_ID)
            return super().replace(stored, record)

    backend = ScriptedBackend(FAILED)
    watch.status(store, backend, JOB_ID)
    with pytest.raises(InputError, match="somebody else has just resumed it"):
        watch.resume(RacingStore(store.folder), backend, JOB_ID)
    assert backend.submitted == []
    assert store.read(JOB_ID).record.attempt.number == 2


def hours(number: float) -> Callable[[JobRecord], JobRecord]:
    """As `--set compute.max_hours=NUMBER` revises a record."""

    def revise(record: JobRecord) -> JobRecord:
        compute = record.spec.compute.model_copy(update={"max_hours": number})
        return record.model_copy(update={"spec": record.spec.model_copy(update={"compute": compute})})

    return revise


class Cluster(ScriptedBackend):
    """Knows the attempts that were submitted, with their hours; one that it has already it leaves alone."""

    def __init__(self) -> None:
        super().__init__(FAILED)
        self.taken: dict[str, float] = {}
        self.meanwhile: Callable[[], object] = lambda: None

    def submit(self, record: JobRecord, say: Say) -> None:
        self.meanwhile()
        self.taken.setdefault(record.attempt.training_job_name, record.spec.compute.max_hours)

    def observe(self, record: JobRecord) -> Observation | None:
        if record.attempt.number == 1:
            return FAILED
        return TRAINING if record.attempt.training_job_name in self.taken else None


class InterruptedStore(FolderRecordStore):
    """Once an attempt is written and not yet submitted, something else happens."""

    def __init__(self, folder: Path, meanwhile: Callable[[], object]) -> None:
        super().__init__(folder)
        self.meanwhile = [meanwhile]

    def replace(self, stored: StoredRecord, record: JobRecord) -> StoredRecord:
        written = super().replace(stored, record)
        if record.attempt.number > stored.record.attempt.number:
            self.meanwhile.pop()()
        return written


def test_an_attempt_that_is_changed_before_its_author_submits_it_is_the_others(store: FolderRecordStore) -> None:
    cluster = Cluster()
    racing = InterruptedStore(store.folder, lambda: watch.resume(store, cluster, JOB_ID, revise=hours(3)))
    with pytest.raises(InputError, match=r"somebody else has just resumed it; trainyard status .* --tenant acme"):
        watch.resume(racing, cluster, JOB_ID, revise=hours(1), options=" --tenant acme")
    assert cluster.taken == {f"{JOB_ID}-r2": 3}
    assert store.read(JOB_ID).record.spec.compute.max_hours == 3


def test_an_attempt_that_is_being_submitted_is_changed_by_nobody(store: FolderRecordStore) -> None:
    cluster, refused = Cluster(), list[str]()

    def other() -> None:
        with pytest.raises(InputError) as error:
            watch.resume(store, cluster, JOB_ID, revise=hours(3))
        refused.append(str(error.value))

    cluster.meanwhile = other
    assert watch.resume(store, cluster, JOB_ID, revise=hours(1)).spec.compute.max_hours == 1
    assert "somebody else has just resumed it" in refused[0] and refused[0].endswith("was killed: --force")
    assert cluster.taken == {f"{JOB_ID}-r2": 1}
    assert store.read(JOB_ID).record.spec.compute.max_hours == 1


def test_who_joins_a_submission_and_is_refused_does_not_free_the_attempt_for_others(store: FolderRecordStore) -> None:
    cluster, told = Cluster(), list[str]()

    class Busy(Cluster):
        def submit(self, record: JobRecord, say: Say) -> None:
            raise AwsRefusedError("busy")

    def others() -> None:
        with pytest.raises(AwsRefusedError):
            watch.resume(store, Busy(), JOB_ID)
        with pytest.raises(InputError) as error:
            watch.resume(store, cluster, JOB_ID, revise=hours(3))
        told.append(str(error.value))

    cluster.meanwhile = others
    assert watch.resume(store, cluster, JOB_ID, revise=hours(1)).spec.compute.max_hours == 1
    assert "somebody else has just resumed it" in told[0]
    assert cluster.taken == {f"{JOB_ID}-r2": 1}


def test_of_two_who_submit_within_one_second_the_first_that_is_refused_does_not_free_the_attempt(
    store: FolderRecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "utc_now", lambda: "2026-01-31T12:00:09+00:00")

    class BrokenOff(Cluster):
        def submit(self, record: JobRecord, say: Say) -> None:
            raise AwsAwayError("no answer")

    class Busy(Cluster):
        def submit(self, record: JobRecord, say: Say) -> None:
            with pytest.raises(AwsAwayError):
                watch.resume(store, BrokenOff(), JOB_ID)
            raise AwsRefusedError("busy")

    with pytest.raises(AwsRefusedError):
        watch.resume(store, Busy(), JOB_ID, revise=hours(1))
    with pytest.raises(InputError, match="somebody else has just resumed it"):
        watch.resume(store, Cluster(), JOB_ID, revise=hours(3))


@pytest.mark.parametrize("error", [AwsAwayError("no answer"), OSError(errno.ENOSPC, "No space left on device")])
def test_who_can_not_write_down_that_a_job_was_taken_is_told_that_it_may_run(
    store: FolderRecordStore, error: Exception
) -> None:
    class Failing(FolderRecordStore):
        def replace(self, stored: StoredRecord, record: JobRecord) -> StoredRecord:
            if record.attempt.submitted_at is not None and record.attempt.number == 2:
                raise error
            return super().replace(stored, record)

    with pytest.raises(TrainyardError) as broken_off:
        watch.resume(Failing(store.folder), Cluster(), JOB_ID)
    assert broken_off.value.may_run == JOB_ID


def test_who_began_a_submission_and_is_refused_leaves_it_to_one_who_joined_it(store: FolderRecordStore) -> None:
    later = (datetime.now(UTC) + timedelta(seconds=9)).isoformat()

    class Busy(Cluster):
        def submit(self, record: JobRecord, say: Say) -> None:
            stored = store.read(JOB_ID)
            store.replace(stored, stored.record.with_attempt(handed_over_at=later))
            raise AwsRefusedError("busy")

    with pytest.raises(AwsRefusedError):
        watch.resume(store, Busy(), JOB_ID)
    assert store.read(JOB_ID).record.attempt.handed_over_at == later


@pytest.mark.parametrize("end", [KeyboardInterrupt(), AwsAwayError("no answer"), AwayError("no answer")])
def test_what_was_broken_off_without_an_answer_may_run_and_is_changed_by_nobody(
    store: FolderRecordStore, end: BaseException
) -> None:
    """The broker, or the cluster, may be at it: what it starts has the settings that it was told."""

    class Slow(Cluster):
        def submit(self, record: JobRecord, say: Say) -> None:
            raise end

    with pytest.raises(type(end)) as broken_off:
        watch.resume(store, Slow(), JOB_ID, revise=hours(1))
    assert getattr(broken_off.value, "may_run", JOB_ID) == JOB_ID, "who launches it once more has two"
    cluster = Cluster()
    with pytest.raises(InputError, match=r"being submitted since .* If that command was killed: --force"):
        watch.resume(store, cluster, JOB_ID, revise=hours(3))
    assert watch.resume(store, cluster, JOB_ID).spec.compute.max_hours == 1, "as it is, anybody may submit it"
    assert cluster.taken == {f"{JOB_ID}-r2": 1}


def test_who_takes_up_what_a_killed_one_left_has_the_same_minutes_for_it(store: FolderRecordStore) -> None:
    cluster, told = Cluster(), list[str]()
    left_behind(store, cluster)
    stored, begun = store.read(JOB_ID), datetime.now(UTC) - timedelta(seconds=watch.SUBMISSION_SECONDS + 1)
    store.replace(stored, stored.record.with_attempt(handed_over_at=begun.isoformat()))

    def other() -> None:
        with pytest.raises(InputError) as error:
            watch.resume(store, cluster, JOB_ID, revise=hours(3))
        told.append(str(error.value))

    cluster.meanwhile = other
    watch.resume(store, cluster, JOB_ID)
    assert "somebody else has just resumed it" in told[0]


def test_two_who_change_an_attempt_that_was_left_are_told_which_of_them_did(store: FolderRecordStore) -> None:
    cluster = Cluster()
    left_behind(store, cluster)

    def second(record: JobRecord) -> JobRecord:
        if not cluster.taken:  # both have seen it as it was left
            watch.resume(store, cluster, JOB_ID, revise=hours(3))
        return hours(1)(record)

    with pytest.raises(InputError, match="somebody else has just resumed it"):
        watch.resume(store, cluster, JOB_ID, revise=second)
    assert cluster.taken == {f"{JOB_ID}-r2": store.read(JOB_ID).record.spec.compute.max_hours} == {f"{JOB_ID}-r2": 3}


def left_behind(store: FolderRecordStore, cluster: Cluster) -> None:
    """An attempt whose author was killed before it was submitted."""

    def killed() -> None:
        raise SystemExit(137)

    with pytest.raises(SystemExit):
        watch.resume(InterruptedStore(store.folder, killed), cluster, JOB_ID)
    assert cluster.taken == {} and store.read(JOB_ID).record.attempt.number == 2


@pytest.mark.parametrize("revise", [None, hours(3)])
def test_an_attempt_whose_author_died_is_taken_over(
    store: FolderRecordStore, revise: Callable[[JobRecord], JobRecord] | None
) -> None:
    cluster = Cluster()
    left_behind(store, cluster)
    resumed = watch.resume(store, cluster, JOB_ID, revise=revise)
    assert cluster.taken == {f"{JOB_ID}-r2": resumed.spec.compute.max_hours}
    assert resumed.spec.compute.max_hours == (3 if revise else 2)


@pytest.mark.parametrize(("age_seconds", "force"), [(0, True), (watch.SUBMISSION_SECONDS + 1, False)])
def test_who_died_while_submitting_keeps_an_attempt_for_minutes_or_until_force(
    store: FolderRecordStore, age_seconds: float, force: bool
) -> None:
    cluster = Cluster()
    left_behind(store, cluster)
    stored = store.read(JOB_ID)
    begun = datetime.now(UTC) - timedelta(seconds=age_seconds)
    store.replace(stored, stored.record.with_attempt(handed_over_at=begun.isoformat()))
    assert watch.resume(store, cluster, JOB_ID, revise=hours(3), force=force).attempt.submitted_at is not None
    assert cluster.taken == {f"{JOB_ID}-r2": 3}


def test_a_status_never_takes_the_old_attempts_end_for_the_new_ones(store: FolderRecordStore) -> None:
    class Racing(ScriptedBackend):
        """Somebody else resumes while we look."""

        def observe(self, record: JobRecord) -> Observation | None:
            if record.attempt.number == 2:
                return TRAINING
            watch.resume(store, ScriptedBackend(FAILED), JOB_ID)
            return FAILED

    status = watch.status(store, Racing(None), JOB_ID)
    assert (status.state, status.record.attempt.number) == ("Training", 2)
    assert status.record.state == "Training"


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (TRAINING, "is still going.*stop it first: trainyard stop"),
        (Observation(state="Stopping"), r"is still going \(Stopping\); wait for its end: trainyard watch"),
        (COMPLETED, "has completed"),
    ],
)
def test_only_an_ended_job_resumes(store: FolderRecordStore, observation: Observation, message: str) -> None:
    backend = ScriptedBackend(observation)
    with pytest.raises(InputError, match=message):
        watch.resume(store, backend, JOB_ID)
    assert backend.submitted == []


def test_stop_asks_a_running_job_and_no_other(store: FolderRecordStore) -> None:
    backend = ScriptedBackend(TRAINING)
    watch.stop(store, backend, JOB_ID)
    assert backend.stopped == [JOB_ID]
    with pytest.raises(InputError, match="has ended already"):
        watch.stop(store, ScriptedBackend(FAILED), JOB_ID)


def test_a_job_the_backend_lost_can_be_resumed(store: FolderRecordStore) -> None:
    # An emulator that was restarted, or a training job that SageMaker's retention has dropped.
    backend = ScriptedBackend(None)
    status = watch.status(store, backend, JOB_ID)
    assert "no longer knows" in status.advice
    watch.resume(store, backend, JOB_ID, say=say_nothing)
    assert backend.submitted == [f"{JOB_ID}-r2"]


def test_who_interrupts_a_submission_is_told_what_may_run_now(store: FolderRecordStore) -> None:
    class Slow(ScriptedBackend):
        """It has the job when the person's patience ends."""

        def submit(self, record: JobRecord, say: Say) -> None:
            super().submit(record, say)
            raise KeyboardInterrupt

    backend, said = Slow(FAILED), list[str]()
    with pytest.raises(SubmissionInterruptedError) as interrupted:
        watch.resume(store, backend, JOB_ID, say=said.append)
    assert backend.submitted == [f"{JOB_ID}-r2"]
    assert said[-1].startswith(f"warning: interrupted while {JOB_ID} was submitted")
    assert interrupted.value.job_id == JOB_ID


def test_a_resume_that_the_broker_refused_is_changed_and_submitted_as_the_same_attempt(
    store: FolderRecordStore,
) -> None:
    class Broker(ScriptedBackend):
        """Its month's budget has room for jobs of an hour, which only it knows."""

        def submit(self, record: JobRecord, say: Say) -> None:
            self.script = [None]  # the backend hears of an attempt when it is submitted
            if record.spec.compute.max_hours > 1:
                raise InputError("over the month's budget")
            super().submit(record, say)

    backend = Broker(FAILED)
    assert store.read(JOB_ID).record.spec.compute.max_hours > 1
    for _ in range(2):
        with pytest.raises(InputError, match="over the month's budget"):
            watch.resume(store, backend, JOB_ID)
    left = store.read(JOB_ID).record
    assert (left.attempt.number, left.state) == (2, "Created")
    resumed = watch.resume(store, backend, JOB_ID, revise=hours(1))
    assert backend.submitted == backend.checked[-1:] == [f"{JOB_ID}-r2"]
    assert (resumed.attempt.number, resumed.state, resumed.spec.compute.max_hours) == (2, "Submitted", 1)
    assert resumed.states[: len(left.states)] == left.states
