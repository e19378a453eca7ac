"""One training job from Starting to its end, through spot reclaims, in a thread of its own."""

import datetime
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from trainyard.emulator.authorization.principals import Principals, Session
from trainyard.emulator.info import EmulatorInfo
from trainyard.emulator.training.attempt import Attempt, Outcome, ReclaimTrigger
from trainyard.emulator.training.logs import LogShipper
from trainyard.emulator.training.tree import ChannelError, failure_reason, fetch_channels, upload_artifacts
from trainyard.emulator.training.validation import instance_count

_MESSAGES = {
    "Starting": "Starting the training job",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Interrupted": "Training interrupted: the spot capacity was reclaimed",
    "Stopping": "Stopping the training job",
    "Uploading": "Uploading generated training model",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
}
FINAL = frozenset({"Completed", "Failed", "Stopped"})


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass
class JobSite:
    """What every job needs of the emulator."""

    info: EmulatorInfo
    principals: Principals
    root: Path
    argv: list[str]
    trigger_for: Callable[[str, bool], ReclaimTrigger | None] = lambda name, is_spot: None
    """What a plan says of the job of that name, spot or not."""
    refusal_for: Callable[[str], str] = lambda name: ""
    """FailureReason of the job of that name before it has machines; empty: it gets them."""
    denial_of: Callable[[Mapping[str, Any], Session], str] = lambda request, session: ""
    """What the job's role may not do of what SageMaker does as it; empty: nothing is missing."""
    changed: Callable[[dict[str, Any]], None] = lambda description: None
    """Told of every new TrainingJobStatus, with what DescribeTrainingJob says then."""


@dataclass
class TrainingJob:
    """A job as DescribeTrainingJob shows it, and the thread that runs it."""

    request: dict[str, Any]
    arn: str
    site: JobSite
    status: str = "InProgress"
    secondary_status: str = ""
    failure_reason: str = ""
    transitions: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    created: datetime.datetime = field(default_factory=_now)
    modified: datetime.datetime = field(default_factory=_now)
    training_started: datetime.datetime | None = None
    training_ended: datetime.datetime | None = None
    training_seconds: float = 0.0
    model_artifacts: str = ""
    log_error: str = ""
    tags: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name: str = self.request["TrainingJobName"]
        self.training_job_name = self.name  # moto's own tagging and search read these
        self._lock = threading.RLock()
        self._stop_wanted = False
        self._last_epoch = 0
        self._created_monotonic = time.monotonic()
        self.tags = list(self.request.get("Tags") or [])
        self._move("Starting")

    @property
    def spot(self) -> bool:
        """Whether its capacity can be reclaimed."""
        return bool(self.request.get("EnableManagedSpotTraining"))

    def start(self) -> None:
        """Run it, in the background."""
        self.site.changed(self.response())
        threading.Thread(target=self._run, daemon=True, name=self.name).start()

    def stop(self) -> None:
        """StopTrainingJob."""
        with self._lock:
            if self.status in FINAL or self._stop_wanted:
                return
            self._stop_wanted = True
            self.status = "Stopping"
            self._move("Stopping")
            self.site.changed(self.response())
            attempt = self.attempts[-1] if self.attempts else None
        if attempt is not None:
            attempt.stop()

    def reclaim(self, *, notice: bool) -> bool:
        """Take the running attempt's capacity away; False when none is in training."""
        with self._lock:
            running = self.secondary_status == "Training" and self.attempts
            attempt = self.attempts[-1] if running else None
        if attempt is None:
            return False
        attempt.reclaim(notice=notice)
        return True

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                outcome = self._try_once()
                if outcome is None or outcome.kind != "interrupted" or self.status in FINAL:
                    break
                if not self._may_go_on():
                    break
        except ChannelError as error:
            self._end("Failed", "Failed", str(error))
        except (ClientError, BotoCoreError, OSError) as error:
            self._end("Failed", "Failed", f"ClientError: {error}")
        except Exception as error:  # a bug of the emulator's must show in the job, not leave it InProgress for ever
            self._end("Failed", "Failed", f"InternalServerError: the emulator failed: {type(error).__name__}: {error}")
            raise
        finally:
            for attempt in self.attempts:
                attempt.kill()
                attempt.remove()
            shutil.rmtree(self.site.root / self.name, ignore_errors=True)

    def _try_once(self) -> Outcome | None:
        if refusal := self.site.refusal_for(self.name):
            self._end("Failed", "Failed", refusal)
            return None
        number = len(self.attempts) + 1
        attempt = Attempt(
            number, self.site.root / self.name / f"attempt-{number}", self.request, instance_count(self.request)
        )
        session = self._assume()
        if denial := self.site.denial_of(self.request, session):
            self._end("Failed", "Failed", f"ClientError: {denial}")
            return None
        attempt.prepare()
        with self._lock:
            if self._stop_wanted:
                self._end("Stopped", "Stopped")
                return None
            self._move("Downloading")
        fetch_channels(self._client("s3", session), self.request, attempt.trees)
        shipper = LogShipper(self._client("logs", session))
        try:
            outcome = self._train(attempt, session, shipper)
            # Before the job has ended for those who wait for it: they read its log next.
            shipper.flush()
            if outcome is not None:
                self._conclude(attempt, outcome, session)
        finally:
            attempt.kill()
            shipper.close()
            self.log_error = shipper.error or self.log_error
        return outcome

    def _assume(self) -> Session:
        session = self.site.principals.assume_for_service(
            self.request["RoleArn"],
            "sagemaker.amazonaws.com",
            source_arn=self.arn,
            session_name="SageMaker",
            region=self.site.info.region,
        )
        if session is None:
            raise ChannelError(
                f"ClientError: Could not assume role {self.request['RoleArn']}: it doesn't trust SageMaker any more"
            )
        return session

    def _client(self, service: str, session: Session) -> Any:
        config = Config(retries={"max_attempts": 3}, s3={"addressing_style": "path"})
        return boto3.session.Session(
            aws_access_key_id=session.access_key_id,
            aws_secret_access_key=session.secret_access_key,
            aws_session_token=session.session_token,
            region_name=self.site.info.region,
        ).client(service, endpoint_url=self.site.info.endpoint, config=config)

    def _train(self, attempt: Attempt, session: Session, shipper: LogShipper) -> Outcome | None:
        # Each attempt has streams of its own, even when two begin within a second.
        epoch = self._last_epoch = max(int(time.time()), self._last_epoch + 1)
        with self._lock:
            if self._stop_wanted:
                self._end("Stopped", "Stopped")
                return None
            trigger = self.site.trigger_for(self.name, self.spot)
            self.attempts.append(attempt)  # before its first process, so that whatever happens ends them all
            attempt.spawn(
                self.site.argv,
                self.site.info,
                session,
                self.arn,
                lambda host, line: shipper.add(f"{self.name}/{host}-{epoch}", line),
                trigger,
            )
            self._move("Training")
            self.training_started = self.training_started or _now()
        begun = time.monotonic()
        outcome = attempt.run(min(begun + self._runtime_left(), self._wait_ends()))
        self.training_seconds += time.monotonic() - begun
        return outcome

    def _runtime_left(self) -> float:
        most = int((self.request.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds", 86400))
        return most - self.training_seconds

    def _wait_ends(self) -> float:
        """When a spot job must be done, waiting and training together."""
        wait = (self.request.get("StoppingCondition") or {}).get("MaxWaitTimeInSeconds")
        return float("inf") if wait is None else self._created_monotonic + int(wait)

    def _conclude(self, attempt: Attempt, outcome: Outcome, session: Session) -> None:
        if outcome.kind == "interrupted" and attempt.failure:
            self._end("Failed", "Failed", attempt.failure)  # nobody is left to upload anything
            return
        if outcome.kind == "interrupted":
            self._move("Interrupted")
            attempt.remove()  # reclaimed machines take their disks with them
            return
        self._move("Uploading")
        uri = upload_artifacts(self._client("s3", session), self.request, attempt.trees, attempt.root)
        if outcome.kind == "failed":
            self._end("Failed", "Failed", failure_reason(attempt.trees, outcome.exit_codes))
            return
        self.model_artifacts = uri
        if outcome.kind == "stopped":
            self._end("Stopped", "Stopped")
        elif outcome.kind == "overdue":
            self._end("Stopped", "MaxRuntimeExceeded" if self._runtime_left() <= 0 else "MaxWaitTimeExceeded")
        else:
            self._end("Completed", "Completed")

    def _may_go_on(self) -> bool:
        with self._lock:
            if self._stop_wanted:
                self._end("Stopped", "Stopped")
                return False
            if time.monotonic() >= self._wait_ends():
                self._end("Stopped", "MaxWaitTimeExceeded")
                return False
            self._move("Starting")
            return True

    def _move(self, secondary: str) -> None:
        with self._lock:
            now = _now()
            if self.transitions:
                self.transitions[-1]["EndTime"] = now
            self.transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": _MESSAGES[secondary]})
            self.secondary_status = secondary
            self.modified = now

    def _end(self, status: str, secondary: str, reason: str = "") -> None:
        with self._lock:
            self._move(secondary)
            self.transitions[-1]["EndTime"] = self.transitions[-1]["StartTime"]
            if reason:
                self.transitions[-1]["StatusMessage"] = reason
            self.failure_reason = reason
            self.training_ended = _now()
            self.status = status
            self.site.changed(self.response())

    # ---- what callers see ---------------------------------------------------------------------------------

    def response(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer."""
        with self._lock:
            described: dict[str, Any] = {key: value for key, value in self.request.items() if key != "Tags"}
            described |= {
                "TrainingJobArn": self.arn,
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary_status,
                "SecondaryStatusTransitions": [dict(item) for item in self.transitions],
                "CreationTime": self.created,
                "LastModifiedTime": self.modified,
                "FailureReason": self.failure_reason or None,
                "TrainingStartTime": self.training_started,
                "TrainingEndTime": self.training_ended,
                "ModelArtifacts": {"S3ModelArtifacts": self.model_artifacts} if self.model_artifacts else None,
            }
            if self.status in FINAL and self.training_started is not None:
                seconds = max(1, round(self.training_seconds))
                # No spot discount is applied: billable time is training time, as for on-demand capacity.
                described |= {"TrainingTimeInSeconds": seconds, "BillableTimeInSeconds": seconds}
            return {key: value for key, value in described.items() if value is not None}

    def summary(self) -> Mapping[str, Any]:
        """One row of ListTrainingJobs."""
        row = {
            "TrainingJobName": self.name,
            "TrainingJobArn": self.arn,
            "CreationTime": self.created,
            "LastModifiedTime": self.modified,
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.secondary_status,
        }
        return row | ({"TrainingEndTime": self.training_ended} if self.training_ended else {})
