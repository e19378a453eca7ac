"""What every place that runs jobs can do: the small protocol behind status, logs, stop and resume."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainyard.errors import InputError
from trainyard.launch.record import TERMINAL_STATES, JobRecord, StateChange

Say = Callable[[str], None]
"""Tells the person what is being done, one short phrase at a time."""


def say_nothing(_: str) -> None:
    """For callers that print nothing."""


class SilentError(InputError):
    """Who knows of a job gives no answer now, and may a little later: who follows the job asks again."""


class AwayError(SilentError):
    """Nothing answers where the job runs: the address is wrong, or it is away for a while and the job goes on."""


@dataclass(frozen=True)
class Observation:
    """What a backend says about a job's newest attempt."""

    state: str
    """Completed, Failed, Stopped, or a state on the way (SageMaker's SecondaryStatus words)."""
    note: str = ""
    """The backend's own words about the state."""
    failure: str = ""
    """Why it failed, first line."""
    transitions: tuple[StateChange, ...] = ()
    """Every state since the attempt was submitted, oldest first."""
    ended_at: str = ""
    """Of one that has ended, when, as far as the backend knows (ISO 8601, UTC): who looks may come days later."""
    reclaims: int = 0
    """How often spot capacity was taken away."""
    running_seconds: float | None = None
    billable_seconds: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the attempt has ended."""
        return self.state in TERMINAL_STATES


@dataclass(frozen=True)
class LogLine:
    """One line of a job's output."""

    host: str
    text: str
    at_ms: int | None
    """When it was written, milliseconds since the epoch; None where its backend doesn't say: a file has no times, and
    when it was read says nothing of a job that somebody looks at hours later."""


@dataclass
class LogCursor:
    """How far logs have been read: a backend's own position per stream."""

    positions: dict[str, str] = field(default_factory=dict)
    """By a name that is one log's for ever: of attempts that write to one log, as on this machine and on Slurm, the
    next one goes on in it, and what has been read is read no more; those that write to their own have other names."""
    more: bool = False
    """The last read stopped before the end of what is there: read again at once."""
    from_end: bool = False
    """Begin near the end of each log that has no position yet, where its backend can, and not at its beginning: who
    wants the newest lines of a job of weeks, or those after now."""
    first_host_alone: bool = False
    """Where each host's log costs a call, read the first one's: it tells of steps and saves for all."""


def without_first_line(tail: bytes) -> bytes:
    """The end of a log without the line that it begins in: the rest of a line may read like another one."""
    return tail[tail.find(b"\n") + 1 :]


class Backend(Protocol):
    """A place that runs jobs."""

    def check(self, record: JobRecord) -> None:
        """InputError where the newest attempt would not be taken now; starts nothing."""

    def submit(self, record: JobRecord, say: Say) -> str | None:
        """Start the newest attempt; doing it twice for one attempt is no error and starts nothing twice. Answers what
        the record is to keep as the cluster that took it, where its address alone can't tell."""

    def observe(self, record: JobRecord) -> Observation | None:
        """The newest attempt as it is now; None where the backend has never heard of it."""

    def stop(self, record: JobRecord) -> None:
        """Ask the newest attempt to save and stop; returns at once."""

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """Lines of the newest attempt since `cursor`, in time order; moves the cursor on, and sets its `more`."""

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """The present state of newest attempts by job id, in as few calls as it takes; without those unknown."""
