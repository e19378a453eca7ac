"""Training jobs of the emulator's SageMaker, with checkpoints on its S3 behind a door that can fail."""

import contextlib
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from s3_proxy import CLIENT_SECONDS, S3Proxy
from sites import MEETING_SECONDS, environment_of, left_behind
from trainer_testing.faulty_entrypoint import S3_SECONDS_VARIABLE

from trainyard import emulator
from trainyard.emulator.client import _call, job_attempts
from trainyard.emulator.processes import kill_all, processes_under
from trainyard.planner import resolve
from trainyard.spec.job import load_job

S3_FAULTS = {
    "s3_503": "unavailable",
    "s3_slow_down": "slow_down",
    "s3_timeout": "timeout",
    "s3_partial_write": "partial",
    "s3_wrong_etag": "wrong_etag",
    "expired_credential": "expired",
}
_BUCKET = "campaign"
_ROLE = "campaign-job"
_LOG_GROUP = "/aws/sagemaker/TrainingJobs"


class Cloud:
    """One emulator for a campaign: a bucket, and a role for its jobs."""

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()
        entrypoint = [sys.executable, "-m", "trainer_testing.faulty_entrypoint"]
        self.info = emulator.start(self.state, training_argv=entrypoint)
        self.s3 = self.client("s3")
        self.s3.create_bucket(Bucket=_BUCKET)
        trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
        role = self.client("iam").create_role(RoleName=_ROLE, AssumeRolePolicyDocument=_policy(trust))
        self.role = role["Role"]["Arn"]
        allow = {"Effect": "Allow", "Action": ["s3:*", "logs:*"], "Resource": "*"}
        self.client("iam").put_role_policy(RoleName=_ROLE, PolicyName="own", PolicyDocument=_policy(allow))
        self.proxy = S3Proxy("127.0.0.1", self.info.port)

    def client(self, service: str) -> Any:
        """A client as the account's root, straight to the emulator."""
        return boto3.session.Session(
            self.info.admin_access_key_id, self.info.admin_secret_access_key, region_name=self.info.region
        ).client(
            service,
            endpoint_url=self.info.endpoint,
            config=Config(retries={"max_attempts": 3}, s3={"addressing_style": "path"}),
        )

    def close(self) -> None:
        """End the emulator and all that runs in it."""
        self.proxy.close()
        emulator.stop(self.state)


def _policy(statement: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


@contextlib.contextmanager
def cloud(state: Path) -> Iterator[Cloud]:
    """An emulator for the block."""
    made = Cloud(state)
    try:
        yield made
    finally:
        made.close()


class CloudSite:
    """One job on spot capacity. What ends it for good (a lost host, a failure) is followed by a resume: a new job."""

    def __init__(
        self,
        cloud: Cloud,
        root: Path,
        job: Path,
        overrides: Sequence[str],
        *,
        num_hosts: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables`: for the environment of the hosts."""
        self.root = root
        self._variables = variables
        self.s3 = cloud.s3
        self._cloud = cloud
        self._name = f"c{uuid.uuid4().hex[:8]}"
        self._num_hosts = num_hosts
        self.destination = f"s3://{_BUCKET}/{self._name}"
        resolved = resolve(load_job(job, [*overrides, f"checkpoint.destination={self.destination}"]))
        per_host = resolved.world_size // num_hosts
        resolved = resolved.model_copy(update={"num_hosts": num_hosts, "processes_per_host": per_host})
        for name, text in (("resolved_job.json", resolved.model_dump_json()), ("channels.json", "{}")):
            self.s3.put_object(Bucket=_BUCKET, Key=f"{self._name}/spec/{name}", Body=text.encode())
        self._sagemaker = cloud.client("sagemaker")
        self._job_name = ""
        self._num_jobs = 0

    def start(self) -> None:
        self._num_jobs += 1
        self._job_name = f"{self._name}-{self._num_jobs}"
        variables = environment_of(self.root / "faults", self._variables) | {
            "AWS_ENDPOINT_URL_S3": self._cloud.proxy.url,
            S3_SECONDS_VARIABLE: str(CLIENT_SECONDS),
        }
        spec = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{_BUCKET}/{self._name}/spec/"}
        self._sagemaker.create_training_job(
            TrainingJobName=self._job_name,
            RoleArn=self._cloud.role,
            AlgorithmSpecification={"TrainingImage": "registry/image@sha256:0", "TrainingInputMode": "File"},
            ResourceConfig={
                "InstanceType": "ml.p5.4xlarge",
                "InstanceCount": self._num_hosts,
                "VolumeSizeInGB": 10,
            },
            StoppingCondition={"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
            EnableManagedSpotTraining=True,
            InputDataConfig=[{"ChannelName": "job", "DataSource": {"S3DataSource": spec}}],
            OutputDataConfig={"S3OutputPath": f"s3://{_BUCKET}/{self._name}/output"},
            Environment=variables,
        )

    def outcome(self) -> str | None:
        found = self._sagemaker.describe_training_job(TrainingJobName=self._job_name)
        if found["TrainingJobStatus"] == "Completed":
            return "done"
        if found["TrainingJobStatus"] in ("Failed", "Stopped"):
            return f"{found['TrainingJobStatus']}: {found.get('FailureReason', '').splitlines()[:1]}"
        return None

    def act(self, kind: str, draw: random.Random) -> bool:
        if kind in S3_FAULTS:
            proxy, fault = self._cloud.proxy, S3_FAULTS[kind]
            before = proxy.num_disturbed[fault]
            proxy.fault = fault  # type: ignore[assignment]
            time.sleep(draw.uniform(1.0, 4.0))
            until = time.monotonic() + MEETING_SECONDS
            while proxy.num_disturbed[fault] == before and time.monotonic() < until:
                time.sleep(0.05)
            proxy.fault = None
            return proxy.num_disturbed[fault] > before
        if kind in ("reclaim", "reclaim_again"):
            notice = draw.random() < 0.3
            _call(self._cloud.info, "reclaim", {"training_job_name": self._job_name, "notice": notice})
        elif kind == "kill_host":
            attempt = job_attempts(self._cloud.info, self._job_name)[-1]
            os.kill(draw.choice(list(attempt["pids"].values())), signal.SIGKILL)
        else:
            raise AssertionError(kind)
        return True

    @property
    def lines(self) -> list[str]:
        logs = self._cloud.client("logs")
        lines = []
        try:
            streams = logs.describe_log_streams(logGroupName=_LOG_GROUP, logStreamNamePrefix=f"{self._name}-")
            for stream in streams["logStreams"]:
                events = logs.get_log_events(logGroupName=_LOG_GROUP, logStreamName=stream["logStreamName"])
                lines += [f"{stream['logStreamName']} {event['message']}" for event in events["events"]]
        except logs.exceptions.ResourceNotFoundException:
            pass
        return lines

    def leftovers(self) -> list[str]:
        jobs = self._cloud.state / "jobs"
        until = time.monotonic() + 30
        names = [f"{self._name}-{number}" for number in range(1, self._num_jobs + 1)]
        while (left := set().union(*(processes_under(jobs / name) for name in names))) and time.monotonic() < until:
            time.sleep(0.1)
        problems = [f"left running: {pid}" for pid in sorted(left)]
        # The disks of machines that were lost are gone with them; those of the last ones are not.
        last = jobs / self._job_name / f"attempt-{len(job_attempts(self._cloud.info, self._job_name))}"
        problems += left_behind(last)
        answer = self.s3.list_multipart_uploads(Bucket=_BUCKET, Prefix=f"{self._name}/")
        problems += [f"multipart upload left: {upload['Key']}" for upload in answer.get("Uploads", [])]
        return problems

    def goodput(self) -> None:
        return None

    def close(self) -> None:
        with contextlib.suppress(self._sagemaker.exceptions.ClientError):
            if self.outcome() is None:
                self._sagemaker.stop_training_job(TrainingJobName=self._job_name)
                kill_all(self._cloud.state / "jobs" / self._job_name)
