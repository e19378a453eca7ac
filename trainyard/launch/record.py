"""The job record: what was asked, what was planned, what happened; written before anything is submitted.

One JSON object a job, `jobs/<job id>/record.json` in the tenant's data bucket (or in a folder, for jobs on this
machine). Every write is conditional: If-None-Match on creation, If-Match on update, so that two people or a person
and a resumer can't overwrite each other in silence.
"""

import fcntl
import hashlib
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from trainyard.errors import InputError
from trainyard.kept_room import write_whole
from trainyard.launch import names
from trainyard.launch.aws import aws_errors, is_conflict, is_missing
from trainyard.spec.backends import BackendName
from trainyard.spec.base import SpecModel, parse, unknown_keys
from trainyard.spec.job import JobSpec, ResolvedJob

RECORD_VERSION = 3
"""Raised with every field that a record gets: a trainyard that doesn't know it refuses the record, and says why."""
_WRITER = "writer"
"""Of an object's metadata: which write it is of."""
_MAX_UPDATE_TRIES = 5

CREATED = "Created"
"""The record is written; the job is not submitted yet (or the launcher died in between)."""
SUBMITTED = "Submitted"
TERMINAL_STATES = frozenset({"Completed", "Failed", "Stopped"})
"""SageMaker's final states, used for every backend; the states between are its SecondaryStatus words."""


def utc_now() -> str:
    """Now, as records say it: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_claim() -> str:
    """See Attempt.claim."""
    return uuid.uuid4().hex


class RecordedChannel(SpecModel):
    """One input channel, as trainyard.launch.channels.Channel."""

    name: str
    kind: Literal["s3", "fsx"]
    location: str
    uri: str


class StateChange(SpecModel):
    """The job came into a state."""

    state: str
    at: str
    """ISO 8601, UTC."""
    attempt: int = 1
    note: str = ""


class Attempt(SpecModel):
    """One submission: the launch, or a resume. Spot reclaims happen inside one."""

    number: int = Field(ge=1)
    training_job_name: str
    """SageMaker's name; on this machine, a name of the same form."""
    created_at: str
    claim: str = ""
    """Whose attempt it is, while it is not submitted: new whenever somebody writes or changes it, so that who wrote it
    before finds out."""
    handed_over_at: str | None = None
    """None: nobody has begun to submit it, or who did was refused. Until then it may be changed. Else who handed it
    over last knows its own by it: to the microsecond (trainyard.functions.job_resumer.moment_after)."""
    submitted_at: str | None = None
    """None: written down but never confirmed by the backend."""
    cluster: str = ""
    """Which one took it, where its address alone can't tell: the session of a Ray cluster, new whenever that starts."""
    reclaims: int = 0
    failure: str = ""


class JobRecord(SpecModel):
    """Everything known about one job, for every verb and for the audit."""

    version: int = RECORD_VERSION
    job_id: str
    tenant: str | None
    environment: str | None
    backend: BackendName
    spec: JobSpec
    """As written by the person."""
    resolved: ResolvedJob
    """As sent: no `auto`, URIs absolute, checkpoint destination set."""
    plan: dict[str, Any]
    """The plan at launch, as `trainyard plan --json` prints it."""
    image: str | None
    checkpoint_destination: str
    smaller: tuple[ResolvedJob, ...] = ()
    """With recovery.elastic: `resolved` on fewer and fewer instances. The resumer takes the next where there is no
    capacity: it has no planner."""
    channels: tuple[RecordedChannel, ...] = ()
    """The input channels beside the job's own: a resume reads the same inputs."""
    spec_name: str = Field(default="", pattern=r"^([0-9a-f]{16})?$")
    """Of jobs on SageMaker: which of the job's specs the newest attempt was handed over with
    (trainyard.launch.channels.spec_name). Empty where an older trainyard handed it over: with a broker all have one
    place then, and without one nobody asks, as each hand-over names its own."""
    forced: tuple[str, ...] = ()
    """What the plan refused and --force overrode."""
    launched_by: str = ""
    attempts: tuple[Attempt, ...] = Field(min_length=1)
    states: tuple[StateChange, ...] = Field(min_length=1)

    @property
    def attempt(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def state(self) -> str:
        """The newest state."""
        return self.states[-1].state

    @property
    def finished(self) -> bool:
        """Whether the newest attempt has ended."""
        return self.state in TERMINAL_STATES

    def with_state(self, state: str, *, note: str = "", at: str | None = None) -> "JobRecord":
        """This record in a new state; itself where it is in that state already."""
        if state == self.state and self.states[-1].attempt == self.attempt.number:
            return self
        change = StateChange(state=state, at=at or utc_now(), attempt=self.attempt.number, note=note)
        return self.model_copy(update={"states": (*self.states, change)})

    def with_attempt(self, **changes: Any) -> "JobRecord":
        """This record with fields of the newest attempt changed."""
        newest = self.attempt.model_copy(update=changes)
        return self.model_copy(update={"attempts": (*self.attempts[:-1], newest)})

    def with_next_attempt(self) -> "JobRecord":
        """This record with one more attempt, in state Created."""
        number = self.attempt.number + 1
        now = utc_now()
        name = names.attempt_name(self.job_id, number)
        attempt = Attempt(number=number, training_job_name=name, created_at=now, claim=new_claim())
        state = StateChange(state=CREATED, at=now, attempt=number, note="resume")
        return self.model_copy(update={"attempts": (*self.attempts, attempt), "states": (*self.states, state)})


@dataclass(frozen=True)
class StoredRecord:
    """A record and the version it was read at."""

    record: JobRecord
    etag: str


class RecordStore(Protocol):
    """Where records are kept."""

    def create(self, record: JobRecord) -> StoredRecord:
        """Write a new record; InputError where the job id is taken."""

    def read(self, job_id: str) -> StoredRecord:
        """The record; InputError where there is none."""

    def replace(self, stored: StoredRecord, record: JobRecord) -> StoredRecord:
        """Write `record` over `stored`; RecordConflictError where somebody else wrote since."""

    def job_ids(self) -> list[str]:
        """Every job id, newest first."""


class RecordConflictError(InputError):
    """Somebody else changed the record since it was read."""


def update(store: RecordStore, job_id: str, change: Callable[[JobRecord], JobRecord]) -> StoredRecord:
    """Apply `change` to the stored record, reading again after a conflict; nothing is written where nothing changes."""
    for _ in range(_MAX_UPDATE_TRIES):
        stored = store.read(job_id)
        changed = change(stored.record)
        if changed == stored.record:
            return stored
        try:
            return store.replace(stored, changed)
        except RecordConflictError:
            continue
    raise RecordConflictError(f"job {job_id}: its record keeps changing under this command; repeat it in a moment")


def _parse_record(text: bytes, where: str) -> JobRecord:
    import json

    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: is not JSON ({error}); restore an older version of the object") from None
    if not isinstance(content, dict) or not isinstance(content.get("version", 1), int):
        raise InputError(f"{where}: is no job's record; restore an older version of the object")
    if content.get("version", 1) > RECORD_VERSION:
        raise InputError(f"{where}: record version {content['version']} is newer than this trainyard reads; upgrade it")
    try:
        # Whoever writes it again writes all that this one knows.
        record = parse(JobRecord, {**content, "version": RECORD_VERSION}, where)
        _check_moments(record, where)
        return record
    except InputError:
        # Of a job's spec, too, which has more of them with each release.
        if not (unknown := unknown_keys(JobRecord, content)):
            raise
    names = ", ".join(unknown[:3])
    raise InputError(f"{where}: a newer trainyard wrote it (it has {names}); upgrade this one")


def _check_moments(record: JobRecord, where: str) -> None:
    """InputError for a moment that is none: verbs reckon with them, and records can be written by hand."""
    attempts = (("created_at", "handed_over_at"), "attempts", record.attempts)
    for fields, section, items in (attempts, (("at",), "states", record.states)):
        for index, item in enumerate(items):
            for name in fields:
                moment = getattr(item, name)
                if moment is not None and not _is_moment(moment):
                    raise InputError(
                        f"{where}: {section}.{index}.{name}: {moment!r} is no moment as 2026-01-31T12:00:00+00:00 is; "
                        "restore an older version of the object"
                    )


def _is_moment(text: str) -> bool:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return False
    # Of the first and the last year that there is, an hour before or after may be none.
    return moment.tzinfo is not None and MINYEAR < moment.year < MAXYEAR


class NoRecordError(InputError):
    """There is no record of that job id."""


def _missing(job_id: str, where: str) -> NoRecordError:
    return NoRecordError(f"job {job_id}: there is no such job in {where}; `trainyard jobs` lists them")


class S3RecordStore:
    """Records of one tenant in its data bucket; encryption is the bucket's default (the tenant's key)."""

    def __init__(self, s3: Any, bucket: str) -> None:
        self._s3 = s3
        self._bucket = bucket

    def create(self, record: JobRecord) -> StoredRecord:
        """Write a new record with If-None-Match; InputError where the job id is taken."""
        return self._put(record, {"IfNoneMatch": "*"}, InputError(f"job {record.job_id}: exists already; launch again"))

    def replace(self, stored: StoredRecord, record: JobRecord) -> StoredRecord:
        """Write `record` with If-Match; RecordConflictError where somebody else wrote since."""
        conflict = RecordConflictError(f"job {record.job_id}: somebody else changed its record; repeat the command")
        return self._put(record, {"IfMatch": stored.etag}, conflict)

    def _put(self, record: JobRecord, condition: dict[str, str], conflict: Exception) -> StoredRecord:
        key = names.record_key(record.job_id)
        body = record.model_dump_json(indent=1).encode()
        # Two people may write the same words in the same second: it takes more to know one's own.
        writer = {_WRITER: uuid.uuid4().hex}
        with aws_errors("writing", f"s3://{self._bucket}/{key}"):
            try:
                answer = self._s3.put_object(
                    Bucket=self._bucket,
                    Key=key,
                    Body=body,
                    ContentType="application/json",
                    Metadata=writer,
                    **condition,
                )
            except self._s3.exceptions.ClientError as error:
                if not is_conflict(error):
                    raise
                # The SDK repeats a request whose answer was lost, and then meets what it wrote itself.
                answer = self._s3.head_object(Bucket=self._bucket, Key=key)
                if answer["Metadata"] != writer:
                    raise conflict from None
        return StoredRecord(record, str(answer["ETag"]))

    def read(self, job_id: str) -> StoredRecord:
        """The record; InputError where there is none."""
        key = names.record_key(job_id)
        where = f"s3://{self._bucket}/{key}"
        with aws_errors("reading", where):
            try:
                answer = self._s3.get_object(Bucket=self._bucket, Key=key)
            except self._s3.exceptions.ClientError as error:
                if is_missing(error):
                    raise _missing(job_id, f"s3://{self._bucket}/jobs/") from None
                raise
            return StoredRecord(_parse_record(answer["Body"].read(), where), str(answer["ETag"]))

    def job_ids(self) -> list[str]:
        """Every job id, newest first."""
        with aws_errors("listing", f"s3://{self._bucket}/jobs/"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix="jobs/", Delimiter="/"
            )
            found = [item["Prefix"].split("/")[1] for page in pages for item in page.get("CommonPrefixes", [])]
        return newest_first(found)


class FolderRecordStore:
    """Records of jobs on this machine: `<folder>/<job id>/record.json`, with the same conditional writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def directory(self, job_id: str) -> Path:
        """The job's own directory."""
        return self.folder / job_id

    def create(self, record: JobRecord) -> StoredRecord:
        """Write a new record; InputError where the job id is taken."""
        directory = self.directory(record.job_id)
        was_there = directory.exists()
        try:
            with self._locked(record.job_id) as path:
                if path.exists():
                    raise InputError(f"job {record.job_id}: exists already; launch again")
                return _write_atomically(path, record)
        except OSError:  # a full disk: no job, and so no folder of one
            if not was_there:
                with suppress(OSError):
                    (directory / ".record.lock").unlink(missing_ok=True)
                    directory.rmdir()
            raise

    def replace(self, stored: StoredRecord, record: JobRecord) -> StoredRecord:
        """Write `record`; RecordConflictError where somebody else wrote since."""
        with self._locked(record.job_id) as path:
            if not path.exists() or _etag(path.read_bytes()) != stored.etag:
                raise RecordConflictError(f"job {record.job_id}: somebody else changed its record; repeat the command")
            return _write_atomically(path, record)

    def read(self, job_id: str) -> StoredRecord:
        """The record; InputError where there is none."""
        path = self.directory(job_id) / "record.json"
        try:
            kind = path.stat().st_mode
            if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # a pipe would be waited for without an end
                raise InputError(f"job {job_id}: {path} can't be read: it is no file; bring the record back")
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(job_id, str(self.folder)) from None
        except OSError as error:
            raise InputError(f"job {job_id}: {path} can't be read: {error.strerror or error}") from None
        return StoredRecord(_parse_record(text, str(path)), _etag(text))

    def job_ids(self) -> list[str]:
        """Every job id, newest first."""
        try:
            names = os.listdir(self.folder)  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise InputError(f"{self.folder}: its jobs can't be listed: {error.strerror}") from None
        return newest_first(name for name in names if self._has_record(name))

    def _has_record(self, name: str) -> bool:
        try:
            (self.directory(name) / "record.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # who reads it says why not
        return True

    @contextmanager
    def _locked(self, job_id: str) -> Iterator[Path]:
        directory = self.directory(job_id)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".record.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory / "record.json"


def newest_first(job_ids: Any) -> list[str]:
    """Job ids by the time stamp in them, newest first."""
    return sorted(job_ids, key=lambda job_id: job_id.split("-")[-2:], reverse=True)


def _write_atomically(path: Path, record: JobRecord) -> StoredRecord:
    body = record.model_dump_json(indent=1).encode()
    write_whole(path, body)
    return StoredRecord(record, _etag(body))


def _etag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
