"""Job records: written under a condition, never overwritten in silence, the same in a bucket and in a folder."""

import errno
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.launch.launcher import new_record
from trainyard.launch.record import (
    CREATED,
    RECORD_VERSION,
    Attempt,
    FolderRecordStore,
    JobRecord,
    RecordConflictError,
    RecordedChannel,
    RecordStore,
    S3RecordStore,
    StateChange,
    StoredRecord,
    newest_first,
    update,
)
from trainyard.launch.session import Account
from trainyard.spec.job import JobSpec, ResolvedJob

JOB_ID = "acme-tiny-20260131120000-1a2b"
MakeRecord = Callable[[str], JobRecord]


@pytest.fixture
def make_record(job: JobSpec, resolved: ResolvedJob) -> MakeRecord:
    def make(job_id: str) -> JobRecord:
        return new_record(
            job,
            resolved,
            job_id=job_id,
            backend="sagemaker",
            environment="test",
            plan={},
            image="image",
            channels=(),
            forced=(),
            launched_by="arn",
        )

    return make


@pytest.fixture(params=["s3", "folder"])
def store(request: pytest.FixtureRequest, aws: Account, tmp_path: Path) -> RecordStore:
    if request.param == "folder":
        return FolderRecordStore(tmp_path / "jobs")
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="records")
    return S3RecordStore(s3, "records")


def test_a_record_comes_back_as_it_was_written(store: RecordStore, make_record: MakeRecord) -> None:
    record = make_record(JOB_ID)
    store.create(record)
    assert store.read(JOB_ID).record == record
    assert (record.state, record.attempt.submitted_at) == (CREATED, None)


def test_a_job_id_is_taken_once(store: RecordStore, make_record: MakeRecord) -> None:
    first = make_record(JOB_ID)
    store.create(first)
    with pytest.raises(InputError, match="exists already"):
        store.create(first.with_state("Completed"))
    assert store.read(JOB_ID).record == first


def test_a_write_whose_answer_was_lost_is_no_conflict(aws: Account, make_record: MakeRecord) -> None:
    """The SDK sends it again, and S3 refuses that for what the first one wrote."""
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="records")

    class Twice:
        exceptions, get_object, head_object = s3.exceptions, s3.get_object, s3.head_object

        def put_object(self, **request: Any) -> Any:
            s3.put_object(**request)
            return s3.put_object(**request)

    store = S3RecordStore(Twice(), "records")
    stored = store.create(make_record(JOB_ID))
    assert store.read(JOB_ID) == stored
    changed = update(store, JOB_ID, lambda record: record.with_state("Training"))
    assert changed.record.state == "Training" and store.read(JOB_ID) == changed
    with pytest.raises(RecordConflictError):
        store.replace(stored, stored.record.with_state("Stopped"))


def test_two_who_write_the_same_are_two(store: RecordStore, make_record: MakeRecord) -> None:
    """Records tell time by the second: two resumes may be alike, and one alone may submit."""
    stored = store.create(make_record(JOB_ID))
    changed = stored.record.with_state("Training")
    store.replace(stored, changed)
    with pytest.raises(RecordConflictError):
        store.replace(stored, changed)
    with pytest.raises(InputError, match="exists already"):
        store.create(make_record(JOB_ID))


def test_the_slower_of_two_writers_is_told(store: RecordStore, make_record: MakeRecord) -> None:
    stored = store.create(make_record(JOB_ID))
    store.replace(stored, stored.record.with_state("Training"))
    with pytest.raises(RecordConflictError, match="somebody else"):
        store.replace(stored, stored.record.with_state("Stopped"))
    assert store.read(JOB_ID).record.state == "Training"


def test_update_applies_its_change_to_what_the_other_wrote(store: RecordStore, make_record: MakeRecord) -> None:
    stored = store.create(make_record(JOB_ID))
    interrupted: list[StoredRecord] = []

    def change(record: JobRecord) -> JobRecord:
        if not interrupted:  # somebody writes between our read and our write
            interrupted.append(store.replace(stored, stored.record.with_state("Starting")))
        return record.with_state("Training")

    result = update(store, JOB_ID, change).record
    assert [item.state for item in result.states] == [CREATED, "Starting", "Training"]
    assert store.read(JOB_ID).record == result


def test_nothing_is_written_where_nothing_changes(store: RecordStore, make_record: MakeRecord) -> None:
    stored = store.create(make_record(JOB_ID))
    assert update(store, JOB_ID, lambda record: record).etag == stored.etag


def test_a_missing_record_names_the_place(store: RecordStore) -> None:
    with pytest.raises(InputError, match="there is no such job in"):
        store.read(JOB_ID)


def test_jobs_are_listed_newest_first(store: RecordStore, make_record: MakeRecord) -> None:
    ids = ["acme-a-20260101000000-0001", "acme-b-20260301000000-0001", "acme-c-20260201000000-0001"]
    for job_id in ids:
        store.create(make_record(job_id))
    assert store.job_ids() == [ids[1], ids[2], ids[0]] == newest_first(ids)


def test_a_job_whose_record_finds_no_room_leaves_no_folder(
    tmp_path: Path, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder, record = FolderRecordStore(tmp_path / "jobs"), make_record(JOB_ID)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            folder.create(record)
    assert not any((tmp_path / "jobs").iterdir())
    stored = folder.create(record)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            folder.replace(stored, record)
    assert folder.read(JOB_ID).record == record, "one that is there stays"


def test_a_torn_record_is_one_line_not_a_traceback(tmp_path: Path) -> None:
    folder = FolderRecordStore(tmp_path)
    folder.directory(JOB_ID).mkdir()
    path = folder.directory(JOB_ID) / "record.json"
    path.write_text('{"version": 1, "job_')
    with pytest.raises(InputError, match="is not JSON"):
        folder.read(JOB_ID)
    path.write_text('{"version": 99}')
    with pytest.raises(InputError, match="newer than this trainyard"):
        folder.read(JOB_ID)


def test_what_an_older_trainyard_wrote_is_read_and_becomes_of_this_version_when_it_is_written(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    folder = FolderRecordStore(tmp_path)
    folder.create(make_record(JOB_ID))
    path = folder.directory(JOB_ID) / "record.json"
    content = json.loads(path.read_text()) | {"version": 1}
    for name in ("claim", "handed_over_at", "cluster"):
        del content["attempts"][0][name]
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    assert update(folder, JOB_ID, lambda record: record).record.attempt.claim == ""
    assert path.read_bytes() == before, "who only looks changes nothing for those who wrote it"
    update(folder, JOB_ID, lambda record: record.with_next_attempt())
    written = json.loads(path.read_text())
    assert written["attempts"][1]["claim"] and written["version"] == RECORD_VERSION > 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda content: content | {"colour": "red"}, "colour"),
        (lambda content: content["attempts"][0].update(colour="red"), "attempts.0.colour"),
        (lambda content: content["spec"]["training"].update(colour="red"), "spec.training.colour"),
    ],
)
def test_fields_that_only_a_newer_trainyard_knows_are_nothing_to_remove(
    tmp_path: Path, make_record: MakeRecord, change: Callable[[dict[str, Any]], dict[str, Any] | None], named: str
) -> None:
    folder = FolderRecordStore(tmp_path)
    folder.create(make_record(JOB_ID))
    path = folder.directory(JOB_ID) / "record.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))
    with pytest.raises(
        InputError, match=rf"record\.json: a newer trainyard wrote it \(it has {named}\); upgrade"
    ) as told:
        folder.read(JOB_ID)
    assert "remove" not in str(told.value)


def test_each_field_that_a_record_gets_is_a_version_of_its_own() -> None:
    """A trainyard that is too old for a field refuses the record by its version, and else by a key's name."""
    fields = [
        f"{model.__name__}.{name}"
        for model in (JobRecord, Attempt, StateChange, RecordedChannel)
        for name in model.model_fields
    ]
    assert (len(fields), RECORD_VERSION) == (34, 3), f"a field came or went: raise RECORD_VERSION; now: {fields}"


_LAST, _FIRST = "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00"


@pytest.mark.parametrize("moment", ["", "yesterday", "2026-01-31T12:00:00", _LAST, _FIRST])
@pytest.mark.parametrize("where", ["states.0.at", "attempts.0.created_at", "attempts.0.handed_over_at"])
def test_a_moment_that_is_none_is_one_line(tmp_path: Path, make_record: MakeRecord, where: str, moment: str) -> None:
    """Who writes a record by hand; a verb that reckoned with it ended in a traceback."""
    folder = FolderRecordStore(tmp_path)
    folder.create(make_record(JOB_ID))
    path = folder.directory(JOB_ID) / "record.json"
    content = json.loads(path.read_text())
    section, _, field = where.split(".")
    content[section][0][field] = moment
    path.write_text(json.dumps(content))
    with pytest.raises(
        InputError, match=rf"record\.json: {where}: '{re.escape(moment)}' is no moment as 2026-"
    ) as told:
        folder.read(JOB_ID)
    assert "\n" not in str(told.value)


def test_jobs_that_may_not_be_listed_are_not_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FolderRecordStore(tmp_path / "jobs")
    assert folder.job_ids() == []
    (tmp_path / "jobs/acme-a-20260101000000-0001").mkdir(parents=True)
    assert folder.job_ids() == [], "a folder without a record"

    def refused(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refused)  # root may look anywhere
    with pytest.raises(InputError, match=rf"^{tmp_path}/jobs: its jobs can't be listed: Permission denied$"):
        folder.job_ids()


def test_a_record_that_cannot_be_read_is_not_a_job_that_is_not_there(tmp_path: Path, make_record: MakeRecord) -> None:
    folder = FolderRecordStore(tmp_path)
    (folder.directory("acme-x") / "record.json").mkdir(parents=True)  # refused to root too
    with pytest.raises(InputError, match=r"^job acme-x: .*record\.json can't be read: Is a directory$"):
        folder.read("acme-x")


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    folder = FolderRecordStore(tmp_path)
    folder.directory("acme-x").mkdir()
    pipe = folder.directory("acme-x") / "record.json"
    os.mkfifo(pipe)
    ends_it = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_WRONLY)), daemon=True)
    ends_it.start()  # who waits at it anyway gets nothing, and no test without an end
    with pytest.raises(InputError, match=r"^job acme-x: .*record\.json can't be read: it is no file; bring the record"):
        folder.read("acme-x")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ends_it.join()
    os.close(reader)


def test_next_attempt_keeps_the_job_and_its_checkpoints(make_record: MakeRecord) -> None:
    record = make_record(JOB_ID).with_attempt(submitted_at="2026-01-31T12:00:01+00:00").with_state("Failed")
    resumed = record.with_next_attempt()
    assert [attempt.training_job_name for attempt in resumed.attempts] == [JOB_ID, f"{JOB_ID}-r2"]
    assert resumed.checkpoint_destination == record.checkpoint_destination
    assert (resumed.state, resumed.attempt.submitted_at) == (CREATED, None)
