"""A job is told to its trackers from its launch to its end, without anybody asking: by a process of this machine that
outlives the command which began it.

    python -m trainyard.operate.following JOB ENVIRONMENT [TENANT]

What it does and what goes wrong is in .trainyard/tracking/JOB.log. Where the machine goes away, the next command that
looks at the job (`watch`, `status`, `resume`) begins it again; each tracker is told what it does not have yet.
"""

import fcntl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

from trainyard.errors import InputError, TrainyardError
from trainyard.launch import watch
from trainyard.launch.local_backend import trainer_environment
from trainyard.launch.place import Place, place_of
from trainyard.launch.record import JobRecord
from trainyard.launch.session import state_root
from trainyard.operate.tracking import Server, Tracked, check_no_secret, metrics_version, server_at, track
from trainyard.operate.wandb_tracking import WandbTracker, check_wandb
from trainyard.spec.job import JobSpec
from trainyard.spec.words import counted

FOLLOW_SECONDS = 15.0
"""Between two tellings: the metrics of a job on AWS come with its checkpoints, minutes apart."""
MOST_FAILURES = 240
"""In a row, an hour of them, until it gives up: a server that is away for a restart is waited for."""
LATE_LOOKS = 20
"""At a failed job that the tenant's resumer may start again, five minutes: it acts within one, or not at all."""


class Tracker(Protocol):
    """Somebody who is told of a job."""

    def tell(self, record: JobRecord, s3: Any) -> Tracked:
        """What is new; TrainyardError where it can't be told now."""

    def close(self, record: JobRecord) -> None:
        """No more is told by this process."""


class MlflowTracker:
    """MLflow, by its REST API."""

    def __init__(self, server: Server, experiment: str | None) -> None:
        self._server, self._experiment = server, experiment

    def tell(self, record: JobRecord, s3: Any) -> Tracked:
        """See Tracker."""
        experiment = self._experiment or experiment_of(record)
        return track(self._server, record, s3, experiment=experiment, with_page=False)

    def close(self, record: JobRecord) -> None:
        """See Tracker: a run there is no longer open than its state says."""


def experiment_of(record: JobRecord) -> str:
    """MLflow's experiment where none is named."""
    return f"trainyard/{record.tenant or 'local'}/{record.spec.name}"


def check_tracking(spec: JobSpec) -> None:
    """InputError where the job asks for a tracker that can't be had from here, OSError where it can't be followed as
    the state folder takes nothing; before anything is launched."""
    tracking = spec.tracking
    if tracking.wandb is not None:
        check_wandb(tracking.wandb)
    if tracking.mlflow is not None:
        # Here and not in the job's model: a record that holds one must still be read, and its job stopped.
        check_no_secret(tracking.mlflow, "tracking.mlflow")
    if tracking.mlflow is not None and tracking.mlflow.startswith("arn:") and spec.compute.backend == "local":
        raise InputError(
            f"tracking.mlflow: {tracking.mlflow}: a job of this machine acts as no tenant of AWS, which a managed "
            "server asks for; give an address, or another backend"
        )
    if tracking.automatic and (tracking.mlflow or tracking.wandb):
        with TemporaryFile(dir=_folder()) as probe:
            probe.write(b"job")


def trackers_of(record: JobRecord, place: Place) -> list[Tracker]:
    """Whom the job is told to: what its file names, and its tenant's own MLflow server; none where there is neither."""
    tracking = record.spec.tracking
    found: list[Tracker] = []
    if tracking.mlflow or place.tracking_server:
        server = server_at(tracking.mlflow or "", place.account, place.tracking_server)
        found.append(MlflowTracker(server, tracking.experiment))
    if tracking.wandb is not None:
        found.append(WandbTracker(tracking.wandb))
    return found


def is_wanted(record: JobRecord, place: Place) -> bool:
    """Whether somebody is to be told from the launch on."""
    tracking = record.spec.tracking
    # An emulated account has a tenant's server by name alone: nobody answers there.
    is_emulated = place.account is not None and place.account.session.endpoint_url is not None
    has_own = bool(place.tracking_server) and not is_emulated
    return tracking.automatic and bool(tracking.mlflow or tracking.wandb or has_own)


def begin(record: JobRecord, place: Place, environment: str) -> bool:
    """Have the job followed by a process of its own, unless one does already, or all is told; whether one is to."""
    if not is_wanted(record, place) or _told_to(record.job_id) == _end_of(record):
        return False
    folder = _folder()
    with (folder / f"{record.job_id}.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", __name__, record.job_id, environment, record.tenant or ""],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Its own session: a Ctrl-C at the terminal ends the watching, not this.
            start_new_session=True,
            env=trainer_environment(),
        )
    return True


@dataclass
class _Told:
    """One tracker, and how far it is."""

    tracker: Tracker
    known: tuple[str, JobRecord] | None = None
    """metrics.jsonl and record as it has them."""
    failures: int = 0
    """In a row."""

    def tell(self, version: tuple[str, JobRecord], s3: Any, say: Callable[[str], None]) -> None:
        """What is new, where something is; what goes wrong is this one's alone."""
        if self.known == version or self.is_given_up:
            return
        record = version[1]
        try:
            told = self.tracker.tell(record, s3)
        except TrainyardError as error:
            self.failures += 1
            say(f"not told, {self.failures} of {MOST_FAILURES}: {error}")
            return
        self.known, self.failures = version, 0
        if told.num_steps or record.finished:
            say(f"{record.state}: {counted(told.num_steps, 'new step')} told to {told.url}")

    @property
    def is_given_up(self) -> bool:
        return self.failures >= MOST_FAILURES


def follow(place: Place, job_id: str, say: Callable[[str], None], sleep: Callable[[float], None]) -> bool:
    """Tell all trackers until the job has ended and they know it; False where one could not be told for too long. A
    failed job that the tenant's resumer may start again has ended when it has not for LATE_LOOKS."""
    all_told = [_Told(tracker) for tracker in trackers_of(place.store.read(job_id).record, place)]
    record: JobRecord | None = None
    unseen = late = 0
    try:
        while True:
            try:
                record = place.located(watch.status(place.store, place.backend, job_id).record)
                version = (metrics_version(record, place.s3), record)
                unseen = 0
            except TrainyardError as error:
                unseen += 1
                say(f"not told, {unseen} of {MOST_FAILURES}: {error}")
                if unseen >= MOST_FAILURES:
                    return False
            else:
                for one in all_told:
                    one.tell(version, place.s3, say)
                late = late + 1 if place.has_resumer and watch.may_be_resumed(record) else 0
                going = [one for one in all_told if not one.is_given_up]
                has_ended = record.finished and not 0 < late <= LATE_LOOKS
                is_over = has_ended and all(one.known == version for one in going)
                if is_over or (all_told and not going):
                    return len(going) == len(all_told)
            sleep(FOLLOW_SECONDS)
    finally:
        if record is not None:
            for one in all_told:
                one.tracker.close(record)


@contextmanager
def _alone(job_id: str) -> Iterator[bool]:
    """Whether nobody else follows the job from this machine; held meanwhile."""
    with (_folder() / f"{job_id}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _folder() -> Path:
    folder = state_root() / "tracking"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _end_of(record: JobRecord) -> str:
    """What tells an end from an earlier one's; empty while the job goes on."""
    return f"{record.attempt.number} {record.state}" if record.finished else ""


def _told_to(job_id: str) -> str | None:
    path = _folder() / f"{job_id}.told"
    return path.read_text(encoding="utf-8") if path.exists() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow one job; its exit code is nobody's to see, its lines are in the log."""
    job_id, environment, tenant = sys.argv[1:] if arguments is None else arguments

    def say(words: str) -> None:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {words}", flush=True)

    with _alone(job_id) as is_alone:
        if not is_alone:
            return 0
        try:
            place = place_of(job_id, environment, tenant or None)
            if not follow(place, job_id, say, time.sleep):
                return 1
            end = _end_of(place.store.read(job_id).record)
        except TrainyardError as error:
            say(f"ended: {error}")
            return error.exit_code
        (_folder() / f"{job_id}.told").write_text(end, encoding="utf-8")
        return 0


if __name__ == "__main__":
    sys.exit(main())
