"""Rich tables of jobs, states and checkpoints."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainyard.cli.signs import Signs
from trainyard.launch.checkpoints import Checkpoint
from trainyard.launch.goodput import Goodput
from trainyard.launch.queue_backend import QUEUED
from trainyard.launch.record import JobRecord
from trainyard.launch.watch import Status
from trainyard.operate.runbooks.log_lines import RUNBOOKS, classify, decisive
from trainyard.spec.words import counted

_COLOURS = {"Completed": "green", "Failed": "red", "Stopped": "yellow", "Interrupted": "yellow", "Created": "yellow"}


def status_table(current: Status, reached: Goodput | None = None, alive: Signs | None = None) -> Group:
    """A job on one screen: what it is, what happened to it and when, what to do."""
    record, observation = current.record, current.observation
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("job", record.job_id)
    facts.add_row("state", state_text(current.state))
    compute = record.resolved.spec.compute
    machines = f"{record.resolved.num_hosts} x {compute.instance_type or 'a machine'}"
    where = "this machine" if record.backend == "local" else machines
    processes = counted(record.resolved.world_size, "process")
    facts.add_row("runs on", f"{where}, {processes}{', spot' if compute.spot else ''}")
    if record.attempt.number > 1:
        facts.add_row("attempt", f"{record.attempt.number} ({record.attempt.training_job_name})")
    if record.attempt.reclaims:
        facts.add_row("reclaimed", f"{record.attempt.reclaims} x, resumed by itself")
    if observation and observation.state == QUEUED:
        facts.add_row("waits", observation.note)
    if observation and observation.running_seconds is not None:
        facts.add_row("running", f"{observation.running_seconds:.0f} s")
    if alive is not None:
        is_running = current.observation is not None and not current.finished
        failure = record.attempt.failure
        for name, words in alive.as_rows(record.resolved.steps, is_running=is_running, failure=failure):
            facts.add_row(name, Text(words))
    if reached is not None:
        facts.add_row("goodput", reached.as_line())
    if record.attempt.failure:
        facts.add_row("failure", Text(record.attempt.failure, style="red"))
    elif before := [one for one in record.attempts[:-1] if one.failure]:
        facts.add_row("failed before", Text(f"attempt {before[-1].number}: {before[-1].failure}"))
    if record.forced:
        facts.add_row("forced", "; ".join(record.forced))
    facts.add_row("checkpoints", record.checkpoint_destination)
    parts: list[Table | Text] = [facts, _history(record)]
    if advice := next_step(current):
        parts.append(Text(f"next: {advice}"))
    return Group(*parts)


def next_step(current: Status) -> str:
    """What a person can do now: of a job that failed of what a runbook looks into, that runbook first."""
    failure = current.record.attempt.failure
    hit = decisive(classify([failure])) if current.state == "Failed" and failure else None
    if hit is None or not RUNBOOKS[hit.fault].startswith("scripts/"):
        return current.advice
    look = f"`{RUNBOOKS[hit.fault]} {current.record.job_id}{current.options}`"
    if hit.fault == "diverged":  # a resume keeps data, rate and clipping
        return f"{look} says from where to begin anew: a resume would diverge again"
    return f"{look} looks into why; then {current.advice}"


def _history(record: JobRecord) -> Table:
    history = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("at", "state", "attempt", "note"):
        history.add_column(heading, style="dim" if heading == "at" else "")
    for change in record.states:
        at = datetime.fromisoformat(change.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        history.add_row(at, state_text(change.state), str(change.attempt), change.note)
    return history


def jobs_table(records: Sequence[JobRecord], states: Mapping[str, str]) -> Table:
    """Jobs, one a row; `states`: each one's present state by job id."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    # A job's id is what the other verbs are given: it is never cut short, however narrow the terminal.
    table.add_column("job", no_wrap=True, min_width=max(len(record.job_id) for record in records))
    for heading in ("tenant", "state", "attempts", "created"):
        table.add_column(heading)
    for record in records:
        created = datetime.fromisoformat(record.attempts[0].created_at).astimezone().strftime("%Y-%m-%d %H:%M")
        state = state_text(states[record.job_id])
        table.add_row(record.job_id, record.tenant or "-", state, str(len(record.attempts)), created)
    return table


def checkpoints_table(found: Sequence[Checkpoint]) -> Table:
    """Checkpoints, one a row."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("step", "MiB", "files", "state", "where"):
        right = heading in {"step", "MiB"}
        table.add_column(heading, no_wrap=heading != "where", overflow="fold", justify="right" if right else "left")
    for item in found:
        if not item.is_readable:
            state = Text(f"can't be read: {item.problem}", style="yellow")
        elif not item.committed:
            state = Text("torn: never read", style="yellow")
        elif item.problem:
            state = Text(f"broken: {item.problem}", style="red")
        else:
            state = Text("committed", style="green")
        table.add_row(str(item.step), f"{item.size_bytes / 2**20:.1f}", str(item.num_files), state, item.uri)
    return table


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_COLOURS.get(state, ""))
