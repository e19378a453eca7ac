"""Looking after a job that was launched: refresh, wait, stop, resume; all on the record and its backend."""

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from trainyard.errors import AwsAwayError, AwsRefusedError, InputError
from trainyard.functions import job_resumer
from trainyard.launch.backend import (
    AwayError,
    Backend,
    LogCursor,
    LogLine,
    Observation,
    Say,
    SilentError,
    say_nothing,
)
from trainyard.launch.launcher import resumed_meanwhile, submit_attempt
from trainyard.launch.ray_jobs import is_tunnel
from trainyard.launch.record import (
    CREATED,
    TERMINAL_STATES,
    JobRecord,
    RecordConflictError,
    RecordStore,
    StateChange,
    new_claim,
    update,
)

POLL_SECONDS = 1.0
"""Between two looks at a job: DescribeTrainingJob allows far more, and nobody stares at a still screen."""
MOST_AWAY_LOOKS = 30
"""So many looks in a row may find nobody that answers; each has waited for an answer itself."""
LONGEST_PAUSE_SECONDS = 30.0
"""Between two of those: all in all a network may be away for a quarter of an hour."""
SUBMISSION_SECONDS = 300.0
"""Who began to submit an attempt so long ago and didn't say how that ended is dead: the SDK's loading and a broker's or
a cluster's answer take less."""
STREAMS_A_SECOND = 5
"""Of a large job's many logs: CloudWatch Logs counts the reads of all of an account together (25 a second)."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""A full disk, one that an error has made read-only, a colleague's records: who looks, or stops a job, needs none."""
_FROM = {
    None: "from its newest checkpoint (without one, from its first step)",
    True: "from its newest checkpoint",
    False: "from its first step, as it has no checkpoint",
}
"""Where a resume begins, by whether a checkpoint is there."""


@dataclass(frozen=True)
class Status:
    """A job as its record and its backend tell it together."""

    record: JobRecord
    observation: Observation | None
    """None: the backend has never heard of the newest attempt."""
    options: str = ""
    """With which a verb finds the job where this one did (--environment, --tenant): for commands that are printed."""
    has_checkpoint: bool | None = None
    """Whether a committed checkpoint is there; None: nobody looked."""

    @property
    def state(self) -> str:
        """Created, Submitted, SageMaker's words on the way, Completed, Failed or Stopped."""
        return self.observation.state if self.observation else self.record.state

    @property
    def finished(self) -> bool:
        """Whether the newest attempt has ended."""
        return self.observation.finished if self.observation else self.record.finished

    @property
    def advice(self) -> str:
        """What a person can do now; "" where nothing needs doing."""
        job = f"{self.record.job_id}{self.options}"
        if self.observation is None and self.record.attempt.submitted_at is None:
            return (
                f"the record was written at {self.record.attempt.created_at}, but the job isn't submitted: unless its "
                f"launcher is still at work, `trainyard resume {job}` submits it"
            )
        if self.observation is None:
            return f"the backend no longer knows it: `trainyard resume {job}` starts it {_FROM[self.has_checkpoint]}"
        if self.state in {"Failed", "Stopped"}:
            return f"`trainyard resume {job}` starts it {_FROM[self.has_checkpoint]}"
        return ""


def merged(record: JobRecord, observation: Observation) -> JobRecord:
    """The record with what the backend says about its newest attempt; the same record where that is nothing new."""
    # By the moment and not its spelling: records of before hold a state once for each time zone it was looked at from.
    once: dict[tuple[int, str, datetime], StateChange] = {}
    for change in record.states:
        once.setdefault(_moment(change), change)
    for told in observation.transitions:
        attempt, state, at = _moment(told)
        if state not in TERMINAL_STATES:
            once.setdefault((attempt, state, at), told)
        elif not any((attempt, state) == known[:2] and at <= known[2] for known in once):
            change = _not_before(once.values(), told)
            once[_moment(change)] = change
    current = record if len(once) == len(record.states) else record.model_copy(update={"states": tuple(once.values())})
    # The status may be ahead of the transitions, or be coarser than they are (Stopped over MaxRuntimeExceeded).
    end = observation.ended_at or None
    if end:
        now = StateChange(state=observation.state, at=end, attempt=record.attempt.number)
        end = _not_before(current.states, now).at
    current = current.with_state(observation.state, note=observation.note, at=end)
    return current.with_attempt(reclaims=observation.reclaims, failure=observation.failure)


def _moment(change: StateChange) -> tuple[int, str, datetime]:
    return change.attempt, change.state, datetime.fromisoformat(change.at)


def _not_before(states: Iterable[StateChange], end: StateChange) -> StateChange:
    """`end`, no earlier than what is known of its attempt: some backends know no better end than when a stop was asked
    for, or what a job's controller decided before its hosts had saved."""
    moments = [datetime.fromisoformat(one.at) for one in states if one.attempt == end.attempt]
    latest = max(moments, default=datetime.fromisoformat(end.at))
    if latest <= datetime.fromisoformat(end.at):
        return end
    return end.model_copy(update={"at": latest.isoformat(timespec="seconds")})


def status(store: RecordStore, backend: Backend, job_id: str, *, options: str = "") -> Status:
    """The job as it is now; what is new goes into its record. `options`: as of Status."""
    while True:
        record = store.read(job_id).record
        observation = backend.observe(record)
        if observation is None:
            return Status(record, None, options)
        refreshed = _refreshed(store, record, observation)
        if refreshed.attempt.number == record.attempt.number:
            return Status(refreshed, observation, options)
        # Somebody resumed the job in between: what was seen is of the attempt before.


def record_now(store: RecordStore, backend: Backend, job_id: str) -> JobRecord:
    """The record with what its backend says now; as somebody saw it last where that can't be asked: what was measured
    outlives a cluster. InputError where there is none."""
    try:
        return status(store, backend, job_id).record
    except (SilentError, AwsRefusedError):
        return store.read(job_id).record


def _refreshed(store: RecordStore, record: JobRecord, observation: Observation) -> JobRecord:
    number = record.attempt.number

    def change(current: JobRecord) -> JobRecord:
        return merged(current, observation) if current.attempt.number == number else current

    try:
        return update(store, record.job_id, change).record
    except (RecordConflictError, OSError) as error:
        # The next look writes it; a status must not fail because somebody else looks too, or nothing can be written.
        if isinstance(error, OSError) and error.errno not in _UNWRITABLE:
            raise
        return merged(record, observation)


def watch(
    store: RecordStore,
    backend: Backend,
    job_id: str,
    *,
    sleep: Callable[[float], None],
    options: str = "",
    cursor: LogCursor | None = None,
) -> Iterator[tuple[Status, list[LogLine]]]:
    """The job's state and its new log lines, again and again, until it has ended and its logs are read.

    `cursor`: the caller's, who sees by it how far they were read.
    SilentError or AwsAwayError where nothing answers the first look, or MOST_AWAY_LOOKS later ones: the job goes on
    without being seen.
    """
    cursor = cursor or LogCursor()
    attempt, ended_logs, away = None, 0, MOST_AWAY_LOOKS
    while True:
        try:
            current = status(store, backend, job_id, options=options)
            if attempt not in (None, current.record.attempt.number):
                ended_logs = len(cursor.positions)
            attempt = current.record.attempt.number
            # Asked before the logs are read: lines written before the end are then always seen.
            finished = current.finished or current.observation is None
            lines = backend.read_logs(current.record, cursor)
        except (SilentError, AwsAwayError):
            away += 1
            if away > MOST_AWAY_LOOKS:
                raise
            sleep(min(POLL_SECONDS * 2 ** (away - 1), LONGEST_PAUSE_SECONDS))
            continue
        away = 0
        yield current, lines
        if cursor.more:
            continue
        if finished:
            return
        sleep(POLL_SECONDS * max(1.0, (len(cursor.positions) - ended_logs) / STREAMS_A_SECOND))


def may_be_resumed(record: JobRecord) -> bool:
    """Whether a tenant's resumer would start this failed job again; it alone knows whether it is a crash loop."""
    spent = sum(state.note.startswith(job_resumer.NOTE) for state in record.states)
    why = job_resumer.cause({"TrainingJobStatus": record.state, "FailureReason": record.attempt.failure})
    return why is not None and spent < record.resolved.spec.recovery.max_resumes


def stop(store: RecordStore, backend: Backend, job_id: str, *, options: str = "") -> Status:
    """Ask a running job to save and stop; InputError where it has ended already. `options`: as of Status."""
    current = status(store, backend, job_id, options=options)
    if current.observation is None:
        raise InputError(f"job {job_id}: there is nothing to stop: {current.advice}")
    if current.finished:
        raise InputError(f"job {job_id}: has ended already ({current.state}); there is nothing to stop")
    backend.stop(current.record)
    return status(store, backend, job_id, options=options)


def resume(
    store: RecordStore,
    backend: Backend,
    job_id: str,
    *,
    revise: Callable[[JobRecord], JobRecord] | None = None,
    force: bool = False,
    say: Say = say_nothing,
    options: str = "",
) -> JobRecord:
    """Start a stopped, failed or never-submitted job again: same record, same inputs, newest checkpoint.

    `revise`: the record with which it goes on (`launch.elastic`), for other machines or another layout. An attempt that
    was written and never submitted (a broker's rule refused it, say) is submitted, changed so, and gets no successor.
    The checkpoint destination is the record's, so the trainer finds its newest valid checkpoint there by itself.
    InputError where the job runs or has completed, or (unless `force`) where nobody can say that it does not.
    `options`: as of Status.
    """
    try:
        current = status(store, backend, job_id, options=options)
    except AwayError as error:
        if not force:
            if revise is None:
                raise
            raise AwayError(
                f"job {job_id}: whether it still runs can't be asked: {error}. Once that place is gone for good: "
                "--force"
            ) from None
        current = Status(store.read(job_id).record, None)
    if current.observation is None and current.record.attempt.submitted_at is None:
        found = current.record
        if revise is not None:
            found = _revise_unsubmitted(store, backend, current, revise, force=force)
        return submit_attempt(store, backend, found, say, options=options)
    if current.state == "Completed":
        raise InputError(f"job {job_id}: has completed; there is nothing to resume (launch it again for a new run)")
    if not current.finished and current.observation is not None:
        is_ending = current.state == "Stopping"
        words = "wait for its end: trainyard watch" if is_ending else "stop it first: trainyard stop"
        advice = f"{words} {job_id}{options}"
        raise InputError(f"job {job_id}: is still going ({current.state}); {advice}")
    if current.observation is None and not current.finished and not force:
        _refuse_behind_a_tunnel(current.record)
    number = current.record.attempt.number
    # Before anything is written: a resume that can't be had leaves the record as it was.
    backend.check((revise(current.record) if revise else current.record).with_next_attempt())

    def next_attempt(record: JobRecord) -> JobRecord:
        if record.attempt.number != number:
            raise resumed_meanwhile(job_id, options)
        return (revise(record) if revise else record).with_next_attempt()

    record = update(store, job_id, next_attempt).record
    assert record.state == CREATED
    say(f"attempt {record.attempt.number} of {job_id}")
    return submit_attempt(store, backend, record, say, options=options)


def _refuse_behind_a_tunnel(record: JobRecord) -> None:
    """InputError where what does not know a running job's attempt may be another cluster than the one that has it."""
    address = record.resolved.spec.compute.ray.address or ""
    # Where the record knows its cluster, that one was asked (trainyard.launch.ray_backend).
    if record.backend == "ray" and is_tunnel(address) and not record.attempt.cluster:
        raise InputError(
            f"job {record.job_id}: {address} does not know its attempt {record.attempt.number}, which had not ended; "
            "is that tunnel to another cluster now? Two attempts would write to one place. Once its own cluster is "
            "gone, or was started anew: --force"
        )


def _revise_unsubmitted(
    store: RecordStore, backend: Backend, seen: Status, revise: Callable[[JobRecord], JobRecord], *, force: bool
) -> JobRecord:
    """Change the newest attempt before it is submitted; InputError where somebody went on with it meanwhile, or (unless
    `force`) is at it."""
    begun_at = seen.record.attempt.handed_over_at
    if begun_at is not None and not force:
        ended_at = datetime.fromisoformat(begun_at) + timedelta(seconds=SUBMISSION_SECONDS)
        if datetime.now(UTC) < ended_at:
            raise InputError(
                f"job {seen.record.job_id}: somebody else has just resumed it: it is being submitted since "
                f"{job_resumer.in_seconds(begun_at)}; trainyard status {seen.record.job_id}{seen.options}. If that "
                "command was killed: --force"
            )
    backend.check(revise(seen.record))

    def revised(record: JobRecord) -> JobRecord:
        if record.attempt != seen.record.attempt:
            raise resumed_meanwhile(seen.record.job_id, seen.options)
        return revise(record).with_attempt(claim=new_claim(), handed_over_at=None)

    return update(store, seen.record.job_id, revised).record
