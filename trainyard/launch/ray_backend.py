"""Jobs on a Ray cluster, through its job server: submitted, watched and stopped from anywhere that reaches it.

What happens in a job its driver tells in its log (`trainer.ray`): events, few lines. What its hosts say is in their
actors' logs, which the same server reads from their machines.
"""

import base64
import gzip
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trainyard import hardware
from trainyard.errors import InputError
from trainyard.launch.backend import AwayError, LogCursor, LogLine, Observation, Say
from trainyard.launch.channels import job_files
from trainyard.launch.machines import common_variables, efa_interfaces
from trainyard.launch.ray_jobs import JobServer, RefusedError, address_of, is_tunnel
from trainyard.launch.record import TERMINAL_STATES, JobRecord, StateChange

EVENT = "trainyard event "
"""How a line of the driver's begins that tells what happened (trainer.ray)."""
FIRST_HOST = "node-0"
"""As trainer.ray names it."""
JOB_VARIABLE = "TRAINYARD_JOB"
GPUS_VARIABLE = "TRAINYARD_GPUS_PER_HOST"
STOP_SECONDS = 150
"""Ray kills a driver so long after its SIGTERM (3 s if not told): the hosts give their ranks 110 s to save."""
_RAYS_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""How lines of a worker's log begin that Ray writes for itself."""
MOST_JOB_BYTES = 120_000
"""Of the packed job: Linux takes no longer variable than 128 KiB."""


@dataclass(frozen=True)
class RayPlace:
    """Where on a cluster a job goes."""

    directory: str
    """Of this job alone, absolute, on every machine."""
    python: str
    """Interpreter with the trainer and ray."""
    labels: tuple[tuple[str, str], ...] = ()
    """Whose it is, for Ray's own list of jobs."""
    region: str | None = None
    """Of the data that the job reads and writes; None without AWS."""
    variables: tuple[tuple[str, str], ...] = ()
    """Further environment of driver and hosts."""


PlaceOf = Callable[[JobRecord], RayPlace]


class RayBackend:
    """Jobs of Ray clusters, each on the one that its record names."""

    def __init__(
        self, server: JobServer, place_of: PlaceOf, refusals: Callable[[JobRecord], Sequence[str]] = lambda _: ()
    ) -> None:
        """`place_of`: where a record's job goes. `refusals`: why its owner may not start it."""
        self._server = server
        self._place_of = place_of
        self._refusals = refusals

    def check(self, record: JobRecord) -> None:
        """InputError where the newest attempt is over its owner's limits (and was not forced), or no server answers."""
        submission(record, self._place_of(record))
        if refused := [reason for reason in self._refusals(record) if reason not in record.forced]:
            raise InputError(f"job {record.job_id}: {'; '.join(refused)}")
        self._server.jobs(_address(record))

    def submit(self, record: JobRecord, say: Say) -> str:
        """Hand the newest attempt to the job server; one that it has already is left alone. The cluster's session."""
        address, name = _address(record), record.attempt.training_job_name
        session = self._server.session(address)
        say(f"submitting {name} to Ray at {address}{f', {session}' if session else ''}")
        if self._server.job(address, name) is None:
            self._server.submit(address, submission(record, self._place_of(record)))
        return session

    def _check_its_cluster(self, record: JobRecord) -> None:
        """AwayError where what does not know the attempt is another cluster than the one that took it. At an address
        that is no tunnel's it is the same one, started anew: the job went with it."""
        address, known = _address(record), record.attempt.cluster
        if not known or not is_tunnel(address) or (found := self._server.session(address)) == known:
            return
        raise AwayError(
            f"job {record.job_id}: the Ray cluster of {known} has it, and {found or 'another one'} answers at "
            f"{address}: bring that one's port here, unless it is gone or was started anew"
        )

    def observe(self, record: JobRecord) -> Observation | None:
        """The newest attempt by the job server and by its driver's own events; None where the server has none.
        AwayError where behind a tunnel another cluster answers than the one that took it; of an attempt that has ended
        by its record no cluster need know any longer."""
        address, name = _address(record), record.attempt.training_job_name
        job = self._server.job(address, name)
        if job is None:
            if not record.finished:
                self._check_its_cluster(record)
            return None
        return Look(job, read_events(self._server.driver_log(address, name))).observation(record.attempt.number)

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """One call for each cluster, and the driver's events of jobs that have ended: Ray's word is Failed for one that
        saved at its time limit. One that runs may still wait for its machines."""
        by_address: dict[str, list[JobRecord]] = {}
        for record in records:
            if not record.finished:
                by_address.setdefault(_address(record), []).append(record)
        found = {}
        for address, ours in by_address.items():
            jobs = {job.get("submission_id"): job for job in self._server.jobs(address)}
            for record in ours:
                if (job := jobs.get(record.attempt.training_job_name)) is not None:
                    events = None
                    if job["status"] in ("FAILED", "STOPPED"):
                        events = read_events(self._server.driver_log(address, record.attempt.training_job_name))
                    found[record.job_id] = Look(job, events).observation(record.attempt.number).state
        return found

    def stop(self, record: JobRecord) -> None:
        """The driver is signalled, and has its hosts save and end."""
        self._server.stop(_address(record), record.attempt.training_job_name)

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """New whole lines of every host of every start, then of the driver; a host's go with its machine."""
        address, name = _address(record), record.attempt.training_job_name
        if self._server.job(address, name) is None:
            return []
        driver = self._server.driver_log(address, name)
        lines: list[LogLine] = []
        for event in read_events(driver):
            for host, actor in event.logs.items():
                if cursor.first_host_alone and host != FIRST_HOST:
                    continue
                try:
                    lines += _new_lines(host, actor, self._server.actor_log(address, actor), cursor)
                except RefusedError as error:
                    lines += _unseen(host, actor, error.words, cursor)
        own = "".join(line for line in driver.splitlines(keepends=True) if not line.startswith(EVENT))
        cursor.more = False
        return [*lines, *_new_lines("driver", f"driver of {name}", own.encode(), cursor)]


def submission(record: JobRecord, place: RayPlace) -> dict[str, Any]:
    """The newest attempt as Ray's job server takes it; nothing is read and no clock is asked."""
    job = record.resolved
    packed = base64.b64encode(gzip.compress(json.dumps(job_files(record)).encode(), mtime=0)).decode()
    if len(packed) > MOST_JOB_BYTES:
        raise InputError(
            f"job {record.job_id}: its spec is {len(packed)} bytes long, packed; Ray takes {MOST_JOB_BYTES}: name "
            "folders instead of files"
        )
    variables = {
        JOB_VARIABLE: packed,
        **common_variables(record, place.region),
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
    }
    kind = job.spec.compute.instance_type
    if kind and (machine := hardware.instance(kind)).gpu is not None:
        variables[GPUS_VARIABLE] = str(machine.num_gpus)
    if not efa_interfaces(job):
        variables["TRAINYARD_SKIP_EFA_CHECK"] = "1"
    return {
        "submission_id": record.attempt.training_job_name,
        "entrypoint": f"{shlex.quote(place.python)} -u -m trainer.ray {shlex.quote(place.directory)}",
        # Workers run the interpreter that has the trainer, whichever one Ray itself was started with.
        "runtime_env": {"py_executable": place.python, "env_vars": variables | dict(place.variables)},
        "metadata": {f"trainyard:{key}": value for key, value in (*place.labels, ("job", record.job_id))},
    }


def _address(record: JobRecord) -> str:
    return address_of(record.resolved.spec.compute.ray.address)


@dataclass(frozen=True)
class Event:
    """A line of the driver's."""

    state: str
    at: str
    note: str = ""
    failure: str = ""
    logs: dict[str, str] = field(default_factory=dict)
    """Of a start: host to the actor whose log is its own."""


def read_events(log: str) -> list[Event]:
    """The driver's events, oldest first."""
    events = []
    for line in log.splitlines():
        if not line.startswith(EVENT):
            continue
        try:
            content = json.loads(line.removeprefix(EVENT))
            named = {name: content[name] for name in ("state", "at", "note", "failure", "logs") if name in content}
            events.append(Event(**named))
        except (ValueError, TypeError):
            continue  # half a line, from a driver that was killed
    return events


@dataclass(frozen=True)
class Look:
    """What a job server and a driver say of an attempt."""

    job: dict[str, Any]
    events: Sequence[Event] | None
    """None: the driver's log was not read."""

    def observation(self, attempt: int) -> Observation:
        """Of that attempt, which the server knows."""
        state, note, failure = self._state()
        events = self.events or []
        # "Queued" is the driver's first word; the record has said as much before.
        told = [event for event in events if event.state in ("Training", "Interrupted", "Stopping")]
        transitions = [StateChange(state=one.state, at=one.at, attempt=attempt, note=one.note) for one in told]
        ended = ""
        if state in TERMINAL_STATES:
            ended = self._outcome.at if self._outcome else _iso(self.job.get("end_time"))
            transitions.append(StateChange(state=state, at=ended, attempt=attempt, note=note))
        starts = [event.at for event in events if event.state == "Training"]
        return Observation(
            state=state,
            note=note,
            failure=failure,
            transitions=tuple(transitions),
            reclaims=max(0, len(starts) - 1),
            running_seconds=_seconds_between(starts[0], ended) if starts and ended else None,
        )

    @property
    def _outcome(self) -> Event | None:
        """The driver's last word, where it could give one: its hosts have ended then."""
        newest = self.events[-1] if self.events else None
        return newest if newest is not None and newest.state in TERMINAL_STATES else None

    def _state(self) -> tuple[str, str, str]:
        """State, note and failure."""
        if self._outcome is not None:
            return self._outcome.state, self._outcome.note, self._outcome.failure
        status, message = self.job["status"], str(self.job.get("message") or "")
        if status == "PENDING":
            return "Queued", message, ""
        if status == "RUNNING" and self.events:
            return self.events[-1].state, self.events[-1].note, ""
        if status == "STOPPED":
            return "Stopped", "killed before it had told how it ended" if self.events else "before it was started", ""
        running = "Training" if self.events is None else "Starting"
        known = {"RUNNING": (running, "", ""), "SUCCEEDED": ("Completed", "", "")}
        return known.get(status, ("Failed", "", _last_line(message) or "its driver was killed"))


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _iso(milliseconds: int | None) -> str:
    moment = datetime.now(UTC) if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.isoformat(timespec="seconds")


def _seconds_between(start: str, end: str) -> float:
    return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())


def _unseen(host: str, actor: str, why: str, cursor: LogCursor) -> Iterable[LogLine]:
    """A line in place of a log that nobody gives: who reads none would take the host for silent. Once, and once more
    where lines came since. Why, the server says: an agent that isn't up yet and one that is gone look alike."""
    mark, here = f"{actor} unseen", cursor.positions.get(actor, "")
    if cursor.positions.get(mark) == here:
        return []
    cursor.positions[mark] = here
    which = "log" if here in ("", "0") else "further log"
    words = f"Ray gives no {which} of this start here: {why}; is its machine, and Ray's own agent on it, up?"
    return [LogLine(host, f"({words})", None)]


def _new_lines(host: str, key: str, content: bytes, cursor: LogCursor) -> Iterable[LogLine]:
    """Whole lines since the cursor, which moves on; the server sends a log from its beginning."""
    offset = int(cursor.positions.get(key, "0"))
    whole = content[offset : content.rfind(b"\n") + 1]
    cursor.positions[key] = str(offset + len(whole))
    texts = whole.decode("utf-8", "replace").splitlines()
    return [LogLine(host, text, None) for text in texts if not text.startswith(_RAYS_MARKS)]
