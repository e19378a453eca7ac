"""A sweep's record: what was asked, and what became of every trial; one folder a sweep on this machine.

Beside it lies the job file as it was at the start, and a lock that is held while somebody runs the sweep.
"""

import fcntl
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from trainyard.errors import InputError
from trainyard.kept_room import write_whole
from trainyard.launch.record import TERMINAL_STATES
from trainyard.launch.session import state_root
from trainyard.operate.sweep.search import SearchKind
from trainyard.operate.sweep.stopping import StopRule
from trainyard.spec.base import SpecModel, parse, unknown_keys

SWEEP_VERSION = 1
"""Raised with every field that a record gets: a trainyard that doesn't know it refuses the record, and says why."""
MOST_CHARACTERS = 40
"""Of a job's name (JobSpec.name)."""
_NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")

WAITING, LAUNCHING = "Waiting", "Launching"
"""A trial's states before it has a job: nothing was done yet; its launch was begun, and may have gone through."""
REFUSED = "Refused"
"""No job was started: the launch was refused."""
UNANSWERED = "Unanswered"
"""Nobody said whether a job was started: a sweep that goes on looks for it, and launches it where there is none."""


class Trial(SpecModel):
    """One job of the sweep."""

    number: int = Field(ge=1)
    name: str
    """Of its job (JobSpec.name): by it the job is found again, so no other job has it."""
    overrides: tuple[str, ...]
    state: str = WAITING
    """Waiting, Launching, Refused, Unanswered, or its job's state when it was last looked at."""
    job_id: str | None = None
    why: str = ""
    """Why the sweep ended it, or why it was not started; empty for one that ended by itself."""
    stopped_attempt: int | None = None
    """Of the job's, which the sweep asked to stop; a later one is somebody's wish."""
    planned_usd: float | None = None
    usd: float | None = None
    """Spent so far; None where no price is known."""
    value: float | None = None
    """Of the sweep's metric at `step`."""
    diverged: bool = False
    """The metric is no number there."""
    step: int = 0
    """The last that the metric is known of."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will come of it by itself."""
        return self.state in TERMINAL_STATES or self.state == REFUSED or (self.job_id is None and bool(self.why))

    @property
    def is_waiting(self) -> bool:
        """Whether it is still to be launched."""
        return self.job_id is None and not self.is_over

    @property
    def is_running(self) -> bool:
        """Whether it has a job that has not ended."""
        return self.job_id is not None and not self.is_over


class SweepRecord(SpecModel):
    """Everything that going on with a sweep needs."""

    version: int = SWEEP_VERSION
    name: str
    token: str
    """In the names of its jobs, so that no other sweep's are taken for them."""
    directory: str
    """Where the command was run: relative paths in the job begin there."""
    environment: str
    backend: str | None
    overrides: tuple[str, ...] = ()
    """Of --set, for all trials."""
    over: tuple[str, ...] = Field(min_length=1)
    search: SearchKind
    num_trials: int | None
    seed: int
    parallel: int = Field(ge=1)
    stop_rule: StopRule
    metric: str
    max_cost_usd: float | None = None
    processes: int | None = None
    force: bool = False
    started_at: str
    trials: tuple[Trial, ...] = ()

    def with_trial(self, trial: Trial) -> "SweepRecord":
        """This record with one trial added or changed."""
        kept = {one.number: one for one in self.trials} | {trial.number: trial}
        return self.model_copy(update={"trials": tuple(kept[number] for number in sorted(kept))})


def trial_name(job_name: str, token: str, number: int) -> str:
    """A name for trial `number`'s job, of at most 40 characters."""
    tail = f"-{token}-{number}"
    return f"{job_name[: MOST_CHARACTERS - len(tail)].rstrip('-')}{tail}"


def new_token() -> str:
    """What tells this sweep's jobs from those of all others."""
    return secrets.token_hex(3)


def sweeps_folder() -> Path:
    """Where sweeps are kept."""
    return state_root() / "sweeps"


class SweepStore:
    """A sweep's folder."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        """InputError for what can't be a sweep's name."""
        if not _NAME.match(name):
            raise InputError(f"sweep {name!r}: a name has lower-case letters, digits and dashes, at most 40")
        self.name = name
        self.folder = (folder or sweeps_folder()) / name

    @property
    def job_file(self) -> Path:
        """The job as it was when the sweep began."""
        return self.folder / "job.yaml"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else runs this sweep meanwhile; InputError where somebody does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"sweep {self.name}: is run by another process; see it with `trainyard sweep --show {self.name}`"
                ) from None
            yield

    def create(self, record: SweepRecord, job_text: str) -> None:
        """Write a new sweep; InputError where the name is taken."""
        if (self.folder / "sweep.json").exists():
            raise InputError(
                f"sweep {self.name}: exists already; `trainyard sweep --resume {self.name}` goes on with it, or give "
                "another --name"
            )
        self.job_file.write_text(job_text, encoding="utf-8")
        self.write(record)

    def write(self, record: SweepRecord) -> None:
        """The record, whole or not at all."""
        write_whole(self.folder / "sweep.json", record.model_dump_json(indent=1))

    def read(self) -> SweepRecord:
        """The record; InputError where there is none."""
        path = self.folder / "sweep.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = ", ".join(sorted(path.parent.name for path in self.folder.parent.glob("*/sweep.json"))) or "none"
            raise InputError(f"sweep {self.name}: there is none in {self.folder.parent} (there: {found})") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: can't be read: {error}") from None
        return _parsed(content, str(path))


def _parsed(content: Any, where: str) -> SweepRecord:
    version = content.get("version", 1) if isinstance(content, dict) else None
    if not isinstance(version, int):
        raise InputError(f"{where}: is no sweep's record; bring a copy of it back, or begin a sweep of another --name")
    if version > SWEEP_VERSION:
        raise InputError(f"{where}: sweep version {version} is newer than this trainyard reads; upgrade it")
    try:
        # Whoever writes it again writes all that this one knows.
        return parse(SweepRecord, {**content, "version": SWEEP_VERSION}, where)
    except InputError:
        if not (unknown := unknown_keys(SweepRecord, content)):
            raise
    raise InputError(f"{where}: a newer trainyard wrote it (it has {', '.join(unknown[:3])}); upgrade this one")


def default_name(job_name: str, token: str) -> str:
    """A sweep's name where none is given."""
    tail = f"-{datetime.now(UTC):%Y%m%d}-{token}"
    return f"{job_name[: MOST_CHARACTERS - len(tail)].rstrip('-')}{tail}"
