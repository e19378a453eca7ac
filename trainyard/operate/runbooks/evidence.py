"""What a diagnosing runbook looks at, of one job: its record, state, lines, figures, checkpoints and stacks.

`gather` asks for each and keeps a copy; what can't be had is named, and no runbook takes its absence for good news.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from trainyard.errors import InputError, TrainyardError
from trainyard.launch import watch
from trainyard.launch.backend import LogCursor, LogLine
from trainyard.launch.checkpoint_files import RECOVERY_FILE
from trainyard.launch.checkpoints import Checkpoint, list_checkpoints, looked_through, refuse_unreadable
from trainyard.launch.compare import compare
from trainyard.launch.goodput import jsonl_rows
from trainyard.launch.place import Place
from trainyard.launch.record import CREATED, TERMINAL_STATES, JobRecord, StateChange
from trainyard.launch.spending import WAITING
from trainyard.operate.course import newest_rows, own_folder, row_of_line
from trainyard.operate.runbooks.figures import LEAST_SHARE_OF_PLAN
from trainyard.operate.runbooks.framework import keep, keep_copy
from trainyard.operate.runbooks.log_lines import Hit, decisive, judged
from trainyard.spec.job import RecoverySpec
from trainyard.spec.meters import OBJECTIVES
from trainyard.spec.platform import TenantSpec

MOST_LINES = 200_000
"""Newest lines that are read: about 50 MB; what decides is at the end."""
BESIDE = (RECOVERY_FILE, "left_out_batches.jsonl")
_ENDING = TERMINAL_STATES | {"Stopping", "MaxWaitTimeExceeded", "MaxRuntimeExceeded"}
"""States in which a job ends: one that only waited comes into them too, and has no machines by that."""
TIMED = frozenset({"sagemaker", "kubernetes"})
"""Backends that say when a line was written."""
_EVERYBODYS = {one.name: one.limit for one in OBJECTIVES}


@dataclass(frozen=True)
class Evidence:
    """Of one job, as far as it could be had."""

    subject: str
    lines: tuple[str, ...] = ()
    """Of all hosts, `host text`: in time order where their backend knows it (Slurm and Ray give one host's after the
    other's); then those of files that the caller gave (a machine's kernel log)."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """Of metrics.jsonl."""
    record: JobRecord | None = None
    state: str = ""
    """Completed, Failed, Stopped, or one on the way; empty where there is no job."""
    note: str = ""
    """The backend's own words of the state: why a job waits."""
    failure: str = ""
    """The reason of the newest attempt's failure."""
    recoveries: tuple[Mapping[str, Any], ...] = ()
    """Rows of recovery.jsonl: restarts in place."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Oldest first; the newest good one was read and hashed."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step and its parts by the plan, as far as it knows them."""
    least_of_plan: float = LEAST_SHARE_OF_PLAN
    """The share of the plan's speed that the tenant's jobs are promised."""
    silent_seconds: float | None = None
    """Since the newest sign of a step, of a job that runs; None where that can't be told."""
    told_step: int = 0
    """The newest step of which a line tells: of a job on AWS newer than `rows`, which come with its checkpoints."""
    unsaved_seconds: float | None = None
    """Of a job that runs: since its newest committed checkpoint's step, or since its first step without one, by the
    times of its lines; None where they have none. It is the age that the alarm sees."""
    most_unsaved_seconds: float = _EVERYBODYS["checkpoint-age"]
    """How old the tenant's jobs' newest checkpoints may be: beyond, the alarm rings."""
    waited_seconds: float | None = None
    """Of the newest attempt, from its submission until it had its machines, or ended without; of one that waits, until
    now, and where machines were taken from it, since then."""
    has_had_machines: bool = True
    """Whether the newest attempt ever had machines, as far as its record and its lines tell."""
    most_waited_seconds: float = _EVERYBODYS["queue"]
    """How long the tenant's jobs may wait for machines: beyond, the alarm rings."""
    instance_type: str = ""
    num_hosts: int = 1
    missing: Mapping[str, str] = field(default_factory=dict)
    """What could not be had -> why."""
    where: tuple[str, ...] = ()
    """Options that lead another command to the same job; none on this machine."""

    @property
    def is_running(self) -> bool:
        """Whether the job's ranks should be making steps."""
        return self.state in ("Training", "Stopping", "Uploading")

    @property
    def is_waiting(self) -> bool:
        """Whether the job has no machines: not yet, or not any more."""
        return self.state in WAITING

    @property
    def all_lines(self) -> tuple[str, ...]:
        """With why it was restarted in place, first since the newest start came after it; the backend's words last."""
        restarted = [words for row in self.recoveries if (words := str(row.get("reason", "")))]
        return (*restarted, *self.lines, *(line for line in (self.note, self.failure) if line))

    @cached_property
    def _judged(self) -> tuple[list[Hit], list[Hit]]:
        return judged(self.all_lines)

    @property
    def hits(self) -> list[Hit]:
        """What the lines say."""
        return self._judged[0]

    @property
    def over(self) -> list[Hit]:
        """What they would say too, if the job had not run past it."""
        return self._judged[1]

    @property
    def decisive(self) -> Hit | None:
        """The line that tells why the job ended or stands still."""
        return decisive(self.hits)

    @property
    def hang_seconds(self) -> float:
        """The job's own limit of silence, or the default's."""
        usual = RecoverySpec().hang_seconds or 0.0
        stated = self.record.resolved.spec.recovery.hang_seconds if self.record else usual
        steps = [float(row["step_seconds"]) for row in self.rows[-50:] if row.get("step_seconds")]
        return max(stated or usual, 10 * statistics.median(steps) if steps else 0.0)


def gather(
    place: Place | None,
    job_id: str,
    log_files: Sequence[Path],
    folder: Path,
    *,
    where: Sequence[str] = (),
    tenants: Mapping[str, TenantSpec] | None = None,
) -> Evidence:
    """Everything that can be had of a job, and of files of lines; copies go to `folder`. `place`: None where there is
    no job, and the files are all. `where`: see Evidence. `tenants`: who may have objectives of their own."""
    extra = tuple(line for path in log_files for line in _file_lines(path))
    if place is None and not any(line.strip() for line in extra):
        # Nothing wrong in no line would be said to be nothing wrong.
        raise InputError(
            f"--log {' '.join(map(str, log_files))}: holds no line; give a job's id, or a file of its lines"
        )
    if place is None:
        keep(folder, "lines.txt", "\n".join(extra) + "\n")
        return Evidence(subject=", ".join(map(str, log_files)), lines=extra, missing={"job": "none was named"})
    current = watch.status(place.store, place.backend, job_id)
    record = place.located(current.record)
    missing: dict[str, str] = {}
    lines = _lines(place, record, missing)
    times = _step_times(record, lines)
    changes = _changes(record)
    if current.state == "Training" and record.backend not in TIMED and own_folder(place, record) is None:
        missing["times"] = f"lines of {record.backend} don't say when they were written"
    rows, saved = _rows(place, record, missing), _checkpoints(place, record, missing)
    seen = current.observation
    limits = _limits((tenants or {}).get(record.resolved.spec.tenant or ""))
    evidence = Evidence(
        subject=job_id,
        lines=(*(f"{line.host} {line.text}" for line in lines), *extra),
        rows=tuple(rows),
        record=record,
        state=current.state,
        note=seen.note if seen else "",
        failure=record.attempt.failure,
        recoveries=tuple(_beside(place, record, RECOVERY_FILE)),
        checkpoints=tuple(saved),
        planned=_planned(record, place, missing),
        least_of_plan=limits["throughput"],
        silent_seconds=_silent_seconds(place, record, current.state, max(times.values(), default=None)),
        told_step=max(times if record.backend in TIMED else _steps_of(lines), default=0),
        unsaved_seconds=_unsaved_seconds(current.state, saved, times) if "checkpoints" not in missing else None,
        most_unsaved_seconds=limits["checkpoint-age"],
        waited_seconds=_waited_seconds(changes, current.state),
        has_had_machines=bool(lines or "lines" in missing or current.state == "Completed" or _with_machines(changes)),
        most_waited_seconds=limits["queue"],
        instance_type=record.resolved.spec.compute.instance_type or "",
        num_hosts=record.resolved.num_hosts,
        missing=missing,
        where=tuple(where),
    )
    _keep(evidence, place, folder)
    return evidence


def _limits(tenant: TenantSpec | None) -> dict[str, float]:
    """By objective: the tenant's own limits, and everybody's where it states none."""
    return _EVERYBODYS | {one.name: one.limit for one in (tenant.objectives.applied() if tenant else ())}


def _file_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-MOST_LINES:]
    except OSError as error:
        raise InputError(f"--log {path}: can't be read ({error.strerror}); give a file of lines") from None


def _lines(place: Place, record: JobRecord, missing: dict[str, str]) -> list[LogLine]:
    """The newest of the job's lines, by time where their backend knows it."""
    cursor, read = LogCursor(), list[LogLine]()
    try:
        while True:
            read += place.backend.read_logs(record, cursor)
            if record.backend in TIMED:
                # Of long logs each look brings a part of every host's: theirs are in order, all looks' together aren't.
                read.sort(key=lambda line: line.at_ms or 0)
            del read[:-MOST_LINES]
            if not cursor.more:
                break
    except TrainyardError as error:
        missing["lines"] = str(error)
    return read


def _steps_of(lines: Sequence[LogLine]) -> list[int]:
    found = (row_of_line(line.text) for line in lines if line.text.startswith("step="))
    return [int(row["step"]) for row in found if row is not None]


def _step_times(record: JobRecord, lines: Sequence[LogLine]) -> dict[int, float]:
    """Step -> when it was last made, seconds since the epoch; empty where lines have no times of their own.

    Those since the job last waited for machines: what spot capacity took keeps its name, and so its streams.
    """
    if record.backend not in TIMED:
        return {}
    began = max((_moment(change).timestamp() for change in _changes(record) if change.state in WAITING), default=0.0)
    told = [(line.at_ms / 1000, line) for line in lines if line.text.startswith("step=") and line.at_ms is not None]
    return {step: at for at, line in told if at >= began for step in _steps_of([line])}


def _unsaved_seconds(state: str, saved: Sequence[Checkpoint], times: Mapping[int, float]) -> float | None:
    if state != "Training" or not times:
        return None
    newest = max((one.step for one in saved if one.is_good), default=0)
    # Of a step after the newest line it was saved since that: checkpoints are looked for after the lines were read. A
    # resumed job's is of before its lines: since its own first step.
    made = [step for step in times if step <= newest]
    return max(0.0, time.time() - times[max(made) if made else min(times)])


def _changes(record: JobRecord) -> list[StateChange]:
    """Of the newest attempt, since it was submitted."""
    return [one for one in record.states if one.attempt == record.attempt.number and one.state != CREATED]


def _moment(change: StateChange) -> datetime:
    return datetime.fromisoformat(change.at)


def _with_machines(changes: Sequence[StateChange]) -> list[datetime]:
    """When it came into states in which a job has machines."""
    return [_moment(one) for one in changes if one.state not in WAITING and one.state not in _ENDING]


def _waited_seconds(changes: Sequence[StateChange], state: str) -> float | None:
    """Up to its first state with machines, its end without, or now; of one that waits, since the last with machines."""
    if not changes:
        return None
    had, now = _with_machines(changes), datetime.now(UTC)
    without = [_moment(one) for one in changes if one.state in WAITING or one.state in _ENDING]
    if state in WAITING:
        begins = min((at for at in without if not had or at >= max(had)), default=now)
        return max(0.0, (now - begins).total_seconds())
    ended = [_moment(one) for one in changes if one.state in _ENDING]
    until = min(had or ended, default=now)
    return max(0.0, (until - min(map(_moment, changes))).total_seconds())


def _rows(place: Place, record: JobRecord, missing: dict[str, str]) -> list[dict[str, Any]]:
    try:
        rows = newest_rows(place, record)
    except TrainyardError as error:
        missing["figures"] = str(error)
        return []
    if not rows:
        missing["figures"] = f"no metrics.jsonl at {record.checkpoint_destination} yet: it comes with each checkpoint"
    return rows


def _beside(place: Place, record: JobRecord, name: str) -> list[dict[str, Any]]:
    """Rows of a file of the output folder. Of a job on other machines none: its lines say the same."""
    folder = own_folder(place, record)
    path = folder / name if folder else None
    return jsonl_rows(path.read_bytes()) if path and path.exists() else []


def _checkpoints(place: Place, record: JobRecord, missing: dict[str, str]) -> list[Checkpoint]:
    """What can't be read is among them, and in `missing` too: it hides no other. The newest good one was hashed."""
    where, found = record.checkpoint_destination, list[Checkpoint]()
    try:
        found = list_checkpoints(where, place.s3)
        for number in reversed(range(len(found))):
            # One may be removed meanwhile by the job's own retention: then the next look tells.
            found[number] = looked_through(where, place.s3, found[number])
            if found[number].is_good:
                break
        refuse_unreadable(where, found)
    except (TrainyardError, OSError) as error:
        missing["checkpoints"] = str(error)
    return found


def _planned(record: JobRecord, place: Place, missing: dict[str, str]) -> dict[str, float]:
    try:
        compared = compare(record, place.s3)
    except TrainyardError as error:
        missing["plan against figures"] = str(error)
        return {}
    known = {line.name: line.planned for line in (*compared.lines, *compared.breakdown) if line.unit == "s"}
    return {name: value for name, value in known.items() if value is not None}


def _silent_seconds(place: Place, record: JobRecord, state: str, newest_step_at: float | None) -> float | None:
    if state != "Training":
        return None
    folder = own_folder(place, record)
    if folder is not None:  # its log has no times
        path = folder / "metrics.jsonl"
        return max(0.0, time.time() - path.stat().st_mtime) if path.exists() else None
    return None if newest_step_at is None else max(0.0, time.time() - newest_step_at)


def _keep(evidence: Evidence, place: Place, folder: Path) -> None:
    record = evidence.record
    assert record is not None
    keep(folder, "lines.txt", "\n".join(evidence.all_lines) + "\n")
    keep(folder, "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in evidence.rows))
    keep(folder, "record.json", record.model_dump(mode="json"))
    keep(folder, "checkpoints.json", [one.as_json() for one in evidence.checkpoints])
    told = ("state", "note", "failure", "silent_seconds", "unsaved_seconds", "waited_seconds", "has_had_machines")
    about = {name: getattr(evidence, name) for name in (*told, "planned")}
    keep(folder, "job.json", {**about, "missing": dict(evidence.missing)})
    output = own_folder(place, record)
    for name in BESIDE:
        if output is not None and (output / name).exists():
            keep_copy(folder, name, output / name)
    for part in ("stacks", "anomalies"):
        if output is not None and (output / part).is_dir():
            keep_copy(folder, part, output / part)
