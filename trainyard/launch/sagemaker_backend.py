"""Jobs on SageMaker: submitted by the tenant's broker, or through the SageMaker Python SDK where the launcher may;
watched through SageMaker's API and CloudWatch Logs."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from trainyard.errors import AwsAwayError, AwsRefusedError, InputError
from trainyard.functions.broker_answers import difference, is_lost
from trainyard.functions.job_resumer import asked_attempt
from trainyard.importing import importing
from trainyard.launch import names
from trainyard.launch.aws import aws_errors, error_code
from trainyard.launch.backend import LogCursor, LogLine, Observation, Say
from trainyard.launch.broker import ask_broker
from trainyard.launch.channels import Channel, spec_files
from trainyard.launch.checks import RunningJob, check_queue, refused_hours
from trainyard.launch.record import TERMINAL_STATES, JobRecord, StateChange
from trainyard.launch.request import training_job_request
from trainyard.launch.session import Account
from trainyard.spec.platform import TRAINING_LOG_GROUP, TenantContract

if TYPE_CHECKING:
    from sagemaker.train import ModelTrainer

_LOG_PAGES_PER_READ = 20
"""A bound on one read, so that a follower of a chatty job still shows something every second or two."""

_FIRST_HOST = "algo-1"
_PAGE_SIZE = 100
"""SageMaker's largest; unasked it lists ten jobs a call, of few calls a second."""
_CLOCKS_APART = timedelta(days=1)
"""An attempt is written down before SageMaker has it, by the clock of whoever launches it."""


class SageMakerBackend:
    """One tenant's training jobs, as its launcher role."""

    def __init__(self, launcher: Account, contract: TenantContract) -> None:
        self._launcher = launcher
        self._contract = contract

    def request(self, record: JobRecord) -> dict[str, Any]:
        """The CreateTrainingJob request of the record's newest attempt."""
        assert record.image is not None
        channels = [Channel(item.name, item.kind, item.location, item.uri) for item in record.channels]
        return training_job_request(
            record.resolved,
            self._contract,
            job_id=record.job_id,
            training_job_name=record.attempt.training_job_name,
            image=record.image,
            channels=channels,
            asked=asked_attempt(record.attempt.number, [state.model_dump() for state in record.states]),
            spec_name=record.spec_name,
        )

    def check(self, record: JobRecord) -> None:
        """InputError where the tenant's quota, or the hours that its jobs may run, don't allow the newest attempt."""
        spec = record.resolved.spec
        check_queue(spec, self._contract, self.running(but=record.attempt.training_job_name))
        forced = () if self._contract.broker else record.forced  # a broker holds to its hours
        if refused := [reason for reason in refused_hours(spec, self._contract) if reason not in forced]:
            raise InputError("; ".join(refused))

    def submit(self, record: JobRecord, say: Say) -> None:
        """Start the newest attempt; an attempt that SageMaker has already is left alone."""
        request = self.request(record)
        name = request["TrainingJobName"]
        with nothing_handed_over():
            # Every way to start a job comes by here, a resume too.
            check_queue(record.resolved.spec, self._contract, self.running(but=name))
            say("writing the job's spec to its input channel")
            self._write_spec(record)
        if self._contract.broker:
            say(f"handing {name} to the tenant's broker")
            ask_broker(self._launcher, self._contract, record.job_id, say)
            return
        say("loading the SageMaker SDK")
        trainer = model_trainer(request, self._launcher)
        say(f"submitting training job {name}")
        with aws_errors("submitting", f"training job {name}", "run `trainyard doctor` for the tenant"):
            try:
                trainer.train(wait=False, logs=False)
            except Exception as error:
                # The SDK describes the job right after creating it, and retries a create whose answer was lost:
                # what counts is whether the job is there, and is the one that was asked for.
                there = self._looked_for(name, error)
                if there is None and is_lost(error):
                    raise AwsAwayError(
                        f"submitting training job {name}: no answer came, and it may come yet"
                    ) from error
                if there is None:
                    raise
                if other := difference(there, request):
                    raise InputError(
                        f"training job {name}: is there already, and not as its record says: {other}; stop it "
                        "(trainyard stop) or let it end, and resume it then"
                    ) from None

    def _looked_for(self, name: str, error: Exception) -> dict[str, Any] | None:
        """As `_describe`, after `error` came of its submission; AwsAwayError where the look is refused, too: nobody can
        know then whether the job was taken."""
        try:
            return self._describe(name)
        except AwsRefusedError as blind:
            why = " ".join(str(error).split())
            raise AwsAwayError(f"whether {name} was taken can't be known now: {why}; {blind}") from error

    def _write_spec(self, record: JobRecord) -> None:
        s3 = self._launcher.client("s3")
        bucket, prefixes = self._contract.buckets.data, [names.spec_prefix(record.job_id, record.spec_name)]
        if self._contract.broker and record.spec_name:
            # A broker that was deployed before specs had names asks for the one place of all, and nothing in a contract
            # says yet how old its broker is. Nobody else reads it.
            prefixes.append(names.spec_prefix(record.job_id))
        for key, text in ((one + name, text) for one in prefixes for name, text in spec_files(record).items()):
            with aws_errors("writing", f"s3://{bucket}/{key}"):
                s3.put_object(Bucket=bucket, Key=key, Body=text.encode(), ContentType="application/json")

    def observe(self, record: JobRecord) -> Observation | None:
        """The newest attempt as SageMaker describes it; None where there is no such training job."""
        description = self._describe(record.attempt.training_job_name)
        return None if description is None else observation(description, record.attempt.number)

    def _describe(self, name: str) -> dict[str, Any] | None:
        sagemaker = self._launcher.client("sagemaker")
        with aws_errors("describing", f"training job {name}"):
            try:
                return dict(sagemaker.describe_training_job(TrainingJobName=name))
            except sagemaker.exceptions.ClientError as error:
                # SageMaker answers ValidationException for an unknown job; the only argument, its name, is well-formed.
                if error_code(error) in {"ResourceNotFound", "ValidationException"}:
                    return None
                raise

    def states(self, records: Sequence[JobRecord]) -> dict[str, str]:
        """By ListTrainingJobs, newest first, read only as far as the oldest of `records` that had not ended; also where
        SageMaker has none of it, as of a launch that was interrupted."""
        attempts = {record.attempt.training_job_name: record for record in records if not record.finished}
        wanted = {name: record.job_id for name, record in attempts.items()}
        found: dict[str, str] = {}
        if wanted:
            oldest = min(datetime.fromisoformat(record.attempt.created_at) for record in attempts.values())
            for job in self._listed(CreationTimeAfter=oldest - _CLOCKS_APART):
                if job_id := wanted.get(job["TrainingJobName"]):
                    ended = job["TrainingJobStatus"] in TERMINAL_STATES
                    status = job["TrainingJobStatus"]
                    found[job_id] = status if ended else job.get("SecondaryStatus") or status
                    if len(found) == len(wanted):
                        break
        return found

    def running(self, *, but: str = "") -> list[RunningJob]:
        """The tenant's jobs that hold instances now, or wait for them; without the one named `but`."""
        sagemaker = self._launcher.client("sagemaker")
        jobs = []
        for status in ("InProgress", "Stopping"):
            for listed in self._listed(StatusEquals=status):
                name = listed["TrainingJobName"]
                if name == but:
                    continue
                with aws_errors("describing", f"training job {name}"):
                    resources = sagemaker.describe_training_job(TrainingJobName=name)["ResourceConfig"]
                jobs += [
                    RunningJob(name, group.get("InstanceType", ""), group.get("InstanceCount", 0))
                    for group in resources.get("InstanceGroups") or [resources]
                ]
        return jobs

    def _listed(self, **only: Any) -> Iterator[dict[str, Any]]:
        prefix = f"{self._contract.tenant}-"
        with aws_errors("listing", f"training jobs of tenant {self._contract.tenant}"):
            pages = (
                self._launcher.client("sagemaker")
                .get_paginator("list_training_jobs")
                .paginate(
                    NameContains=prefix,
                    SortBy="CreationTime",
                    SortOrder="Descending",
                    PaginationConfig={"PageSize": _PAGE_SIZE},
                    **only,
                )
            )
            for page in pages:
                yield from (job for job in page["TrainingJobSummaries"] if job["TrainingJobName"].startswith(prefix))

    def stop(self, record: JobRecord) -> None:
        """SIGTERM to every host, 120 s to save, then the end."""
        name = record.attempt.training_job_name
        with aws_errors("stopping", f"training job {name}"):
            self._launcher.client("sagemaker").stop_training_job(TrainingJobName=name)

    def read_logs(self, record: JobRecord, cursor: LogCursor) -> list[LogLine]:
        """New lines of every host's log stream, by time."""
        logs = self._launcher.client("logs")
        lines: list[LogLine] = []
        cursor.more = False
        with aws_errors("reading logs of", f"training job {record.attempt.training_job_name}"):
            for prefix in self._log_prefixes(record):
                for stream in self._streams(logs, prefix):
                    if not cursor.first_host_alone or _host_of(stream) == _FIRST_HOST:
                        lines += _read_stream(logs, stream, cursor)
        return sorted(lines, key=lambda line: line.at_ms or 0)

    def _log_prefixes(self, record: JobRecord) -> list[str]:
        """How the names of the newest attempt's log streams begin."""
        return [f"{record.attempt.training_job_name}/"]

    def _streams(self, logs: Any, prefix: str) -> list[str]:
        try:
            pages = logs.get_paginator("describe_log_streams").paginate(
                logGroupName=TRAINING_LOG_GROUP, logStreamNamePrefix=prefix
            )
            return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except logs.exceptions.ResourceNotFoundException:
            return []  # The group appears with the account's first training job.


@contextmanager
def nothing_handed_over() -> Iterator[None]:
    """What gets no answer before a job is handed over leaves no doubt whether that runs: AwsRefusedError."""
    try:
        yield
    except AwsAwayError as error:
        raise AwsRefusedError(str(error)) from error


def _host_of(stream: str) -> str:
    """Of "<job>/algo-1-1700000000" the host, without the start time of its container."""
    return stream.rpartition("/")[2].rpartition("-")[0]


def _read_stream(logs: Any, stream: str, cursor: LogCursor) -> list[LogLine]:
    host = _host_of(stream)
    lines: list[LogLine] = []
    for _ in range(_LOG_PAGES_PER_READ):
        token = cursor.positions.get(stream)
        where = {"nextToken": token} if token else {"startFromHead": not cursor.from_end}
        page = logs.get_log_events(logGroupName=TRAINING_LOG_GROUP, logStreamName=stream, **where)
        lines += [LogLine(host, event["message"].rstrip("\n"), event["timestamp"]) for event in page["events"]]
        cursor.positions[stream] = page["nextForwardToken"]
        # The end of a stream is told by the same token coming back, never by an empty page.
        if page["nextForwardToken"] == token:
            return lines
    cursor.more = True
    return lines


def observation(description: dict[str, Any], attempt: int) -> Observation:
    """DescribeTrainingJob's answer as an Observation."""
    status = description["TrainingJobStatus"]
    secondary = description.get("SecondaryStatus") or status
    # Stopped and Failed have finer secondary words (MaxRuntimeExceeded ...): those go into the note.
    is_over = status in TERMINAL_STATES
    state = status if is_over else secondary
    transitions = tuple(
        StateChange(
            state=change["Status"],
            at=change["StartTime"].astimezone(UTC).isoformat(timespec="seconds"),
            attempt=attempt,
            note=str(change.get("StatusMessage", "")),
        )
        for change in description.get("SecondaryStatusTransitions", [])
    )
    note = transitions[-1].note if transitions else ""
    if state != secondary:
        note = f"{secondary}: {note}" if note else secondary
    return Observation(
        state=state,
        note=note,
        ended_at=_ended_at(description) if is_over else "",
        failure=(str(description.get("FailureReason") or "").splitlines() or [""])[0],
        transitions=transitions,
        reclaims=sum(change.state == "Interrupted" for change in transitions),
        running_seconds=description.get("TrainingTimeInSeconds"),
        billable_seconds=description.get("BillableTimeInSeconds"),
    )


def _ended_at(description: dict[str, Any]) -> str:
    """When a job ended whose last transition may have a finer word than its status; empty where nothing says it."""
    last = (description.get("SecondaryStatusTransitions") or [{}])[-1]
    moment = last.get("StartTime") or description.get("TrainingEndTime")
    return moment.astimezone(UTC).isoformat(timespec="seconds") if moment else ""


_SDK_SETTINGS = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}

_OPTIONAL_RESOURCES = {
    "volume_kms_key_id": "VolumeKmsKeyId",
    "keep_alive_period_in_seconds": "KeepAlivePeriodInSeconds",
    "training_plan_arn": "TrainingPlanArn",
}
"""The SDK's names of what a request may hold beside type and number of machines."""


def model_trainer(request: dict[str, Any], launcher: Account) -> "ModelTrainer":
    """The SDK's ModelTrainer that sends exactly `request` (a test captures what it sends and compares).

    No `source_code`: our image has its own entrypoint, and without it the SDK uploads nothing.
    """
    prepare_sdk()
    with importing():
        from sagemaker.core import shapes
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.training import configs
        from sagemaker.train import ModelTrainer
    _check_settings_once()

    class NamedModelTrainer(ModelTrainer):  # type: ignore[misc,unused-ignore]
        """ModelTrainer names jobs by the second; our record was written under our name before."""

        def _create_training_job_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            arguments: dict[str, Any] = super()._create_training_job_args(*args, **kwargs)
            if "training_job_name" not in arguments:
                raise AwsRefusedError(
                    "the SageMaker SDK no longer names jobs where 3.27 does; install sagemaker==3.27.0"
                )
            arguments["training_job_name"] = request["TrainingJobName"]
            return arguments

    session = Session(
        boto_session=launcher.session,
        sagemaker_config=_SDK_SETTINGS,
        # Named, so that the SDK never creates a bucket of its own.
        default_bucket=request["OutputDataConfig"]["S3OutputPath"].split("/")[2],
    )
    resources, stopping, vpc = request["ResourceConfig"], request["StoppingCondition"], request["VpcConfig"]
    trainer = NamedModelTrainer(
        sagemaker_session=session,
        role=request["RoleArn"],
        base_job_name=request["TrainingJobName"],
        training_image=request["AlgorithmSpecification"]["TrainingImage"],
        training_input_mode=request["AlgorithmSpecification"]["TrainingInputMode"],
        compute=configs.Compute(
            instance_type=resources["InstanceType"],
            instance_count=resources["InstanceCount"],
            volume_size_in_gb=resources["VolumeSizeInGB"],
            enable_managed_spot_training=request["EnableManagedSpotTraining"],
            **{name: resources[key] for name, key in _OPTIONAL_RESOURCES.items() if key in resources},
        ),
        networking=configs.Networking(
            subnets=vpc["Subnets"],
            security_group_ids=vpc["SecurityGroupIds"],
            enable_network_isolation=request["EnableNetworkIsolation"],
            enable_inter_container_traffic_encryption=request["EnableInterContainerTrafficEncryption"],
        ),
        stopping_condition=configs.StoppingCondition(
            max_runtime_in_seconds=stopping["MaxRuntimeInSeconds"],
            **(
                {"max_wait_time_in_seconds": stopping["MaxWaitTimeInSeconds"]}
                if "MaxWaitTimeInSeconds" in stopping
                else {}
            ),
        ),
        output_data_config=shapes.OutputDataConfig(
            s3_output_path=request["OutputDataConfig"]["S3OutputPath"],
            kms_key_id=request["OutputDataConfig"]["KmsKeyId"],
        ),
        input_data_config=[_sdk_channel(channel) for channel in request["InputDataConfig"]],
        environment=request["Environment"],
        tags=[configs.Tag(key=tag["Key"], value=tag["Value"]) for tag in request["Tags"]],
    )
    attempts = request["RetryStrategy"]["MaximumRetryAttempts"]
    trainer.with_retry_strategy(shapes.RetryStrategy(maximum_retry_attempts=attempts))
    return trainer


def prepare_sdk() -> None:
    """Settings that the SageMaker SDK takes only from the environment, set before its first import.

    Its role validation asks for SimulatePrincipalPolicy and for wildcard actions that a least-privilege role rightly
    lacks. Its defaults files (of the machine and the user) could change a job that the record says is decided.
    """
    os.environ["SAGEMAKER_VALIDATE_ROLE"] = "false"
    for kind in ("ADMIN", "USER"):
        os.environ[f"SAGEMAKER_{kind}_CONFIG_OVERRIDE"] = os.devnull
    # The SDK logs through rich at INFO, into the middle of our own progress.
    logging.getLogger("sagemaker").setLevel(logging.ERROR)


@cache
def _check_settings_once() -> None:
    """A session checks its settings as it is made. The SDK would check them again, and the schema of all settings
    against the schema of schemas, at each of the ten values that it looks up for a job: two seconds of CPU."""
    from sagemaker.core.config.config_manager import SageMakerConfig

    check = SageMakerConfig.validate_sagemaker_config

    def checked(sagemaker_config: dict[str, Any] | None = None) -> None:
        if sagemaker_config != _SDK_SETTINGS:
            check(sagemaker_config)

    SageMakerConfig.validate_sagemaker_config = staticmethod(checked)


def _sdk_channel(channel: dict[str, Any]) -> Any:
    from sagemaker.core.training import configs

    source = channel["DataSource"]
    if "S3DataSource" in source:
        s3 = source["S3DataSource"]
        data_source = configs.DataSource(
            s3_data_source=configs.S3DataSource(
                s3_data_type=s3["S3DataType"],
                s3_uri=s3["S3Uri"],
                s3_data_distribution_type=s3["S3DataDistributionType"],
            )
        )
    else:
        fsx = source["FileSystemDataSource"]
        data_source = configs.DataSource(
            file_system_data_source=configs.FileSystemDataSource(
                file_system_id=fsx["FileSystemId"],
                file_system_access_mode=fsx["FileSystemAccessMode"],
                file_system_type=fsx["FileSystemType"],
                directory_path=fsx["DirectoryPath"],
            )
        )
    return configs.Channel(
        channel_name=channel["ChannelName"], data_source=data_source, input_mode=channel["InputMode"]
    )
