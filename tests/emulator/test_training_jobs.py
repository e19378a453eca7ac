"""SageMaker training jobs as processes: the container's contract, ends of every kind, spot reclaims."""

import io
import json
import os
import re
import tarfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from emulator_testing import TRUST_SAGEMAKER, Site, allow, policy, refusal, wait_for

from trainyard import emulator
from trainyard.emulator import shapes
from trainyard.emulator.authorization.principals import Principals, Session
from trainyard.emulator.client import job_attempts, reclaim_after
from trainyard.emulator.processes import processes_under
from trainyard.emulator.training.rights import JobRights
from trainyard.errors import InputError

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


class Place:
    """A bucket and a job role that may use it and write logs."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.name = f"p{uuid.uuid4().hex[:10]}"
        self.bucket = f"bucket-{self.name}"
        site("s3").create_bucket(Bucket=self.bucket)
        self.role = site.role(self.name, TRUST_SAGEMAKER)
        own = [f"arn:aws:s3:::{self.bucket}", f"arn:aws:s3:::{self.bucket}/*"]
        self.grant(allow("s3:*", own), allow("logs:*"))

    def grant(self, *statements: Any) -> None:
        """The job role's rights, all of them."""
        document = policy(*statements)
        self.site("iam").put_role_policy(RoleName=self.name, PolicyName="own", PolicyDocument=document)

    def put(self, key: str, body: bytes = b"data") -> None:
        """An object in the bucket."""
        self.site("s3").put_object(Bucket=self.bucket, Key=key, Body=body)

    def channel(self, name: str, prefix: str, **source: Any) -> dict[str, Any]:
        """An input channel."""
        where = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{self.bucket}/{prefix}", **source}
        return {"ChannelName": name, "DataSource": {"S3DataSource": where}}

    def request(self, job: str, *, hosts: int = 1, spot: bool = False, **more: Any) -> dict[str, Any]:
        """A CreateTrainingJob request."""
        stopping = {"MaxRuntimeInSeconds": 600} | ({"MaxWaitTimeInSeconds": 1200} if spot else {})
        return {
            "TrainingJobName": f"{self.name}-{job}",
            "RoleArn": self.role,
            "AlgorithmSpecification": {"TrainingImage": "registry/image@sha256:0", "TrainingInputMode": "File"},
            "ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": hosts, "VolumeSizeInGB": 10},
            "StoppingCondition": stopping,
            "EnableManagedSpotTraining": spot,
            "OutputDataConfig": {"S3OutputPath": f"s3://{self.bucket}/out/"},
            **more,
        }

    def create(self, job: str, **more: Any) -> str:
        """Start a job; its name."""
        request = self.request(job, **more)
        self.site("sagemaker").create_training_job(**request)
        return str(request["TrainingJobName"])

    def describe(self, job: str) -> dict[str, Any]:
        """DescribeTrainingJob."""
        described: dict[str, Any] = self.site("sagemaker").describe_training_job(TrainingJobName=job)
        return described

    def finished(self, job: str, seconds: float = 240.0) -> dict[str, Any]:
        """DescribeTrainingJob of an ended job."""
        wait_for(lambda: self.describe(job)["TrainingJobStatus"] in ("Completed", "Failed", "Stopped"), seconds)
        return self.describe(job)

    def lines(self, job: str, host: str = "algo-1") -> list[list[str]]:
        """A host's log lines in CloudWatch, per attempt."""
        logs = self.site("logs")
        streams = logs.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/{host}-")["logStreams"]
        names = sorted(stream["logStreamName"] for stream in streams)
        events = [logs.get_log_events(logGroupName=LOG_GROUP, logStreamName=name)["events"] for name in names]
        return [[event["message"] for event in stream] for stream in events]

    def shown(self, job: str, host: str = "algo-1") -> dict[str, Any]:
        """What the fake image said of its host."""
        line = self.lines(job, host)[0][0]
        content: dict[str, Any] = json.loads(line.removeprefix("shown "))
        return content

    def object(self, key: str) -> bytes:
        """An object's content."""
        content: bytes = self.site("s3").get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return content


@pytest.fixture
def place(site: Site) -> Place:
    """A bucket and a job role of the test's own."""
    return Place(site)


def secondary(description: dict[str, Any]) -> list[str]:
    return [item["Status"] for item in description["SecondaryStatusTransitions"]]


def test_two_hosts_get_the_container_contract(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("in/a.txt")
    place.put("in/deep/b.txt")
    place.put("in2/c.txt")
    place.put("one.json", b"{}")
    job = place.create(
        "contract",
        hosts=2,
        Environment={"MINE": "1"},
        HyperParameters={"mode": "succeed"},
        InputDataConfig=[place.channel("train-0", "in"), place.channel("job", "one.json")],
        Tags=[{"Key": "trainyard:tenant", "Value": "acme"}],
    )
    described = place.finished(job)
    assert described["TrainingJobStatus"] == "Completed", described
    assert secondary(described) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    ends = [item["EndTime"] for item in described["SecondaryStatusTransitions"]]
    assert ends == sorted(ends)
    assert described["TrainingTimeInSeconds"] == described["BillableTimeInSeconds"] >= 1
    assert described["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{place.bucket}/out/{job}/output/model.tar.gz"
    assert described["Environment"] == {"MINE": "1"}

    one, two = place.shown(job, "algo-1"), place.shown(job, "algo-2")
    assert one["hosts"] == two["hosts"] == ["algo-1", "algo-2"]
    assert one["files"] == [
        "input/data/job/one.json",
        "input/data/train-0/a.txt",
        "input/data/train-0/deep/b.txt",
        "input/data/train-0/in2/c.txt",  # its key begins with the prefix, which has no slash at its end
    ]
    assert one["files"] == two["files"]
    assert one["channels"]["train-0"] == {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    }
    assert one["addresses"] == {"algo-1": "127.0.0.2", "algo-2": "127.0.0.3"}
    assert one["port"] == two["port"]
    assert set(one["environment"]) <= {
        *("PATH", "HOME", "TMPDIR", "LANG", "PYTHONUNBUFFERED", "PYTHONPATH", "MINE", "LC_CTYPE"),
        *("TRAINING_JOB_NAME", "TRAINING_JOB_ARN", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"),
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_EC2_METADATA_DISABLED"),
        *("TRAINYARD_OPT_ML", "TRAINYARD_HOST_ADDRESSES", "TRAINYARD_RENDEZVOUS_PORT", "TRAINYARD_SKIP_EFA_CHECK"),
    }
    with tarfile.open(fileobj=io.BytesIO(place.object(f"out/{job}/output/model.tar.gz"))) as model:
        assert sorted(model.getnames()) == ["weights-algo-1.bin", "weights-algo-2.bin"]
    with tarfile.open(fileobj=io.BytesIO(place.object(f"out/{job}/output/output.tar.gz"))) as output:
        assert output.getnames() == ["result.json"]
    tags = place.site("sagemaker").list_tags(ResourceArn=described["TrainingJobArn"])["Tags"]
    assert tags == [{"Key": "trainyard:tenant", "Value": "acme"}]
    place.site("sagemaker").add_tags(ResourceArn=described["TrainingJobArn"], Tags=[{"Key": "a", "Value": "b"}])
    assert len(place.site("sagemaker").list_tags(ResourceArn=described["TrainingJobArn"])["Tags"]) == 2


def test_a_sharded_channel_gives_each_host_its_part(place: Place) -> None:
    for index in range(3):
        place.put(f"in/{index}")
    sharded = place.channel("data", "in/", S3DataDistributionType="ShardedByS3Key")
    job = place.create("sharded", hosts=2, InputDataConfig=[sharded])
    assert place.finished(job)["TrainingJobStatus"] == "Completed"
    assert place.shown(job, "algo-1")["files"] == ["input/data/data/0", "input/data/data/2"]
    assert place.shown(job, "algo-2")["files"] == ["input/data/data/1"]


def test_the_failure_file_is_the_reason(place: Place) -> None:
    described = place.finished(place.create("fails", HyperParameters={"mode": "fail"}))
    assert described["TrainingJobStatus"] == described["SecondaryStatus"] == "Failed"
    assert described["FailureReason"].startswith("AlgorithmError: the loss is not a number")
    assert described["FailureReason"].endswith("exit code: 3")


def test_one_hosts_failure_ends_the_other(place: Place) -> None:
    job = place.create("half", hosts=2, HyperParameters={"mode": "fail_on_two", "steps": "1000"})
    described = place.finished(job)
    assert described["TrainingJobStatus"] == "Failed"
    assert "exit code: " in described["FailureReason"]
    assert "algo-2 7" in described["FailureReason"]


def test_an_input_that_is_not_there_or_not_allowed_is_named(site: Site, place: Place) -> None:
    absent = place.finished(place.create("absent", InputDataConfig=[place.channel("train", "nothing/here")]))
    assert absent["FailureReason"] == (
        f"ClientError: Data download failed: No S3 objects found under S3 URL s3://{place.bucket}/nothing/here "
        "given in input data source."
    )
    other = Place(site)
    other.put("secret/x")
    stolen = place.finished(place.create("stolen", InputDataConfig=[other.channel("train", "secret")]))
    assert stolen["TrainingJobStatus"] == "Failed"
    assert "s3:ListBucket" in stolen["FailureReason"]


def test_artifacts_need_the_job_roles_rights(place: Place) -> None:
    place.grant(allow("logs:*"))
    described = place.finished(place.create("poor"))
    assert described["TrainingJobStatus"] == "Failed"
    assert "s3:PutObject" in described["FailureReason"]


def test_a_role_that_may_not_write_logs_trains_all_the_same(place: Place) -> None:
    place.grant(allow("s3:*"))
    job = place.create("mute")
    assert place.finished(job)["TrainingJobStatus"] == "Completed"
    assert place.lines(job) == []


def test_stop_is_sigterm_and_keeps_the_artifacts(place: Place) -> None:
    job = place.create("stopped", HyperParameters={"steps": "5000"})
    wait_for(
        lambda: place.describe(job)["SecondaryStatus"] == "Training" and any("step=" in x for x in flat(place, job))
    )
    place.site("sagemaker").stop_training_job(TrainingJobName=job)
    assert place.describe(job)["TrainingJobStatus"] in ("Stopping", "Stopped")
    described = place.finished(job)
    assert described["TrainingJobStatus"] == "Stopped"
    assert secondary(described)[-3:] == ["Stopping", "Uploading", "Stopped"]
    assert "saved on SIGTERM" in flat(place, job)
    assert place.object(f"out/{job}/output/model.tar.gz")
    again = refusal(lambda: place.site("sagemaker").stop_training_job(TrainingJobName=job))
    assert again.startswith("ValidationException")


def flat(place: Place, job: str) -> list[str]:
    """All lines of the first host so far; none while there is no stream."""
    try:
        return [line for attempt in place.lines(job) for line in attempt]
    except place.site("logs").exceptions.ResourceNotFoundException:
        return []


def test_max_runtime_stops_a_job(place: Place) -> None:
    stopping = {"MaxRuntimeInSeconds": 1}
    described = place.finished(place.create("long", HyperParameters={"steps": "5000"}, StoppingCondition=stopping))
    assert described["TrainingJobStatus"] == "Stopped"
    assert described["SecondaryStatus"] == "MaxRuntimeExceeded"


@pytest.mark.parametrize("notice", [False, True])
def test_a_reclaim_lands_at_its_step_and_the_job_comes_back(
    place: Place, info: emulator.EmulatorInfo, state_dir: Path, notice: bool
) -> None:
    place.put("in/a")
    reclaim_after(info, f"{place.name}-spot", log_pattern=r"^step=7 ", notice=notice)
    steps_of = {"steps": "9", "hold_at": "7"}
    job = place.create(
        "spot", hosts=2, spot=True, HyperParameters=steps_of, InputDataConfig=[place.channel("train", "in/")]
    )
    described = place.finished(job)
    assert described["TrainingJobStatus"] == "Completed", described
    assert secondary(described) == [
        *("Starting", "Downloading", "Training", "Interrupted"),
        *("Starting", "Downloading", "Training", "Uploading", "Completed"),
    ]
    first, second = job_attempts(info, job)
    assert first["outcome"] == "interrupted"
    assert second["outcome"] == "completed"
    assert first["port"] != second["port"]
    assert not set(first["pids"].values()) & set(second["pids"].values())
    before, after = place.lines(job)
    steps = [line.split()[0] for line in before if line.startswith("step=")]
    # Step 7 would have taken ten minutes: nothing but the reclaim ended it.
    assert steps[-1] == "step=7" and first["reclaimed"]["line"].startswith("step=7 "), steps
    assert ("saved on SIGTERM" in before) == notice
    assert [line.split()[0] for line in after if line.startswith("step=")][-1] == "step=9"
    assert place.shown(job)["files"] == ["input/data/train/a"]
    if not notice:
        assert set(first["exit_codes"].values()) == {-9}
    assert not [pid for pid in processes_under(state_dir / "jobs") if str(job) in environment_of(pid)]


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def test_reclaim_on_demand_and_what_cannot_be_reclaimed(place: Place, info: emulator.EmulatorInfo) -> None:
    from trainyard.emulator.client import _call

    spot = place.create("now", spot=True, HyperParameters={"steps": "4", "hold_at": "3"})
    wait_for(lambda: any("step=3 " in line for line in flat(place, spot)))
    _call(info, "reclaim", {"training_job_name": spot, "notice": False})
    described = place.finished(spot)
    assert described["TrainingJobStatus"] == "Completed"
    assert secondary(described).count("Interrupted") == 1
    with pytest.raises(InputError, match="only a job in Training can be reclaimed"):
        _call(info, "reclaim", {"training_job_name": spot, "notice": False})
    on_demand = place.create("od", HyperParameters={"steps": "1"})
    with pytest.raises(InputError, match="only managed spot capacity is reclaimed"):
        _call(info, "reclaim", {"training_job_name": on_demand, "notice": False})
    place.finished(on_demand)


def test_what_sagemaker_does_as_the_jobs_role_is_the_roles_to_allow(place: Place) -> None:
    """The network interfaces, the image and the grant for a volume's key: without one of them AWS fails the job."""
    ec2, kms = place.site("ec2"), place.site("kms")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName=place.name, Description="its", VpcId=vpc)["GroupId"]
    key = kms.create_key()["KeyMetadata"]["Arn"]
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainer@sha256:" + "0" * 64
    of_the_vpc = {"ArnEquals": {"ec2:Vpc": f"arn:aws:ec2:us-east-1:123456789012:vpc/{vpc}"}}
    of_sagemaker = {
        "Bool": {"kms:GrantIsForAWSResource": "true"},
        "StringEquals": {"kms:ViaService": "sagemaker.us-east-1.amazonaws.com"},
    }
    interfaces = "arn:aws:ec2:us-east-1:123456789012:network-interface/*"
    repository = "arn:aws:ecr:us-east-1:123456789012:repository/trainer"
    rights = {
        "s3:": allow("s3:*", [f"arn:aws:s3:::{place.bucket}", f"arn:aws:s3:::{place.bucket}/*"]),
        "logs:": allow("logs:*"),
        "ecr:GetAuthorizationToken on resource: *": allow("ecr:GetAuthorizationToken"),
        f"ecr:BatchCheckLayerAvailability on resource: {repository}": allow("ecr:Batch*", repository),
        f"ecr:GetDownloadUrlForLayer on resource: {repository}": allow("ecr:GetDownloadUrlForLayer", repository),
        "ec2:DescribeNetworkInterfaces on resource: *": allow("ec2:Describe*"),
        f"ec2:CreateNetworkInterface on resource: .*{subnet}": allow("ec2:CreateNetworkInterface"),
        "ec2:CreateNetworkInterfacePermission": allow("ec2:*", interfaces, Condition=of_the_vpc),
        f"kms:CreateGrant on resource: {key}": allow("kms:CreateGrant", key, Condition=of_sagemaker),
    }
    more = {
        "AlgorithmSpecification": {"TrainingImage": image, "TrainingInputMode": "File"},
        "VpcConfig": {"Subnets": [subnet], "SecurityGroupIds": [group]},
        "ResourceConfig": RESOURCES | {"InstanceType": "ml.p3.16xlarge", "VolumeKmsKeyId": key},
    }
    for number, missing in enumerate([*list(rights)[2:], ""]):
        place.grant(*(right for name, right in rights.items() if name != missing))
        described = place.finished(place.create(f"needs-{number}", **more))
        told = described.get("FailureReason", "")
        assert (described["TrainingJobStatus"] == "Completed") == (missing == ""), (missing, told)
        assert re.search(f"^ClientError: .* not authorized to perform: {missing}" if missing else "^$", told), told
    kms.disable_key(KeyId=key.rpartition("/")[2])
    told = place.finished(place.create("key", **more))["FailureReason"]
    assert told == f"ClientError: the volumes' key {key} is Disabled"

    def elsewhere(subnet: str, group: str) -> str:
        network = {"Subnets": [subnet], "SecurityGroupIds": [group]}
        return refusal(lambda: place.create("elsewhere", VpcConfig=network))

    assert "ValidationException: VpcConfig: the subnet ID 'subnet-none' does not exist" in elsewhere(
        "subnet-none", group
    )
    assert "the security group ID 'sg-none' does not exist" in elsewhere(subnet, "sg-none")
    other = ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["default"]}])["SecurityGroups"]
    foreign = next(one["GroupId"] for one in other if one["VpcId"] != vpc)
    assert "of 2 VPCs" in elsewhere(subnet, foreign)


def test_a_network_that_goes_before_an_attempt_starts_fails_the_job_with_a_reason(
    info: emulator.EmulatorInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between CreateTrainingJob and a spot job's second attempt."""
    rights = JobRights(info, Principals(info.account, ""))
    request = {"VpcConfig": {"Subnets": ["subnet-gone"], "SecurityGroupIds": ["sg-1"]}}
    monkeypatch.setattr(Principals, "resolve", lambda *_: None)
    told = rights.denial(request, Session("", "", ""))
    assert told == "VpcConfig: the subnet ID 'subnet-gone' does not exist"


RESOURCES = {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TrainingJobName": "has_underscore"}, "ValidationException.*trainingJobName"),
        ({"TrainingJobName": "ends\n"}, "(?s)ValidationException.*trainingJobName"),
        ({"ResourceConfig": RESOURCES | {"InstanceType": "ml.z9.huge"}}, "resourceConfig.instanceType.*enum value set"),
        ({"ResourceConfig": RESOURCES | {"KeepAlivePeriodInSeconds": 99_999}}, "less than or equal to 21600"),
        ({"ResourceConfig": RESOURCES | {"VolumeKmsKeyId": "some-key"}}, "VolumeKmsKeyId is not supported"),
        ({"Environment": {"LONG": "x" * 513}}, "'environment.LONG' failed.*less than or equal to 512"),
        ({"HyperParameters": {"long": "x" * 9_000}}, "hyperParameters.long"),
        ({"HyperParameters": {"lines": "one\ntwo"}}, "hyperParameters.lines.*pattern"),
        ({"Tags": [{"Key": f"key-{number}", "Value": ""} for number in range(60)]}, "'tags' failed"),
        ({"Tags": [{"Key": "owner", "Value": "a,b"}]}, r"tags.1.member.value.*pattern"),
        ({"VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"] * 9}}, "vpcConfig.securityGroupIds"),
        ({"RetryStrategy": {"MaximumRetryAttempts": 99}}, "retryStrategy.maximumRetryAttempts"),
        ({"OutputDataConfig": {"S3OutputPath": "/not/s3"}}, "outputDataConfig.s3OutputPath"),
        ({"EnableManagedSpotTraining": True}, "Invalid MaxWaitTimeInSeconds"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 90}}, "only supported for managed"),
        (
            {
                "EnableManagedSpotTraining": True,
                "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 30},
            },
            "greater than or equal to MaxRuntimeInSeconds",
        ),
        ({"CheckpointConfig": {"S3Uri": "s3://b/c"}}, "CheckpointConfig"),
        ({"RoleArn": "arn:aws:iam::123456789012:role/absent-role"}, "Could not assume role"),
    ],
)
def test_what_is_refused_at_once(place: Place, change: dict[str, Any], message: str) -> None:
    request = place.request("refused") | change
    refused = refusal(lambda: place.site("sagemaker").create_training_job(**request))
    assert re.search(message, refused), refused


def test_shapes_know_every_pattern_of_what_is_judged_by_them() -> None:
    """Java's, some of which `re` lacks; letters of any alphabet count as letters."""
    for service, operation in (("sagemaker", "CreateTrainingJob"), ("batch", "SubmitServiceJob")):
        waiting, seen = [shapes._shape(service, operation)], set()
        while waiting:
            shape = waiting.pop()
            if shape.name in seen:
                continue
            seen.add(shape.name)
            shapes._compiled(shape.metadata.get("pattern", ""))
            waiting += getattr(shape, "members", {}).values()
            waiting += [part for name in ("member", "key", "value") if (part := getattr(shape, name, None)) is not None]
        assert len(seen) > 10
    tags = [{"Key": "trainyard:cost-center", "Value": "Prüfung 東京 2"}]
    assert [one for one in shapes.violations("sagemaker", "CreateTrainingJob", {"Tags": tags}) if "tags" in one] == []
    with pytest.raises(shapes.WrongTypeError, match=r"resourceConfig\.instanceCount must be of type integer"):
        shapes.violations("sagemaker", "CreateTrainingJob", {"ResourceConfig": {"InstanceCount": "1"}})


def test_names_are_unique_and_quotas_are_kept(place: Place, info: emulator.EmulatorInfo) -> None:
    from trainyard.emulator.client import _call

    kind = {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 10}
    _call(info, "quota", {"ml.p4d.24xlarge": 3})
    first = place.create("first", ResourceConfig=kind, HyperParameters={"steps": "5000"})
    assert refusal(lambda: place.create("first")).startswith("ResourceInUse")
    full = refusal(lambda: place.create("second", ResourceConfig=kind))
    assert full.startswith("ResourceLimitExceeded")
    assert "is 3 Instances, with current utilization of 2 Instances" in full
    place.site("sagemaker").stop_training_job(TrainingJobName=first)
    place.finished(first)
    assert place.finished(place.create("second", ResourceConfig=kind))["TrainingJobStatus"] == "Completed"


def test_jobs_are_listed(place: Place) -> None:
    for job in ("list-a", "list-b"):
        place.finished(place.create(job))
    sagemaker = place.site("sagemaker")
    rows = sagemaker.list_training_jobs(NameContains=place.name, SortBy="Name", SortOrder="Ascending")
    assert [row["TrainingJobName"] for row in rows["TrainingJobSummaries"]] == [
        f"{place.name}-list-a",
        f"{place.name}-list-b",
    ]
    assert sagemaker.list_training_jobs(NameContains=place.name, StatusEquals="Failed")["TrainingJobSummaries"] == []
    page = sagemaker.list_training_jobs(NameContains=place.name, MaxResults=1)
    assert len(page["TrainingJobSummaries"]) == 1
    rest = sagemaker.list_training_jobs(NameContains=place.name, MaxResults=1, NextToken=page["NextToken"])
    assert rest["TrainingJobSummaries"] != page["TrainingJobSummaries"]
    for ask in (sagemaker.describe_training_job, sagemaker.stop_training_job):
        told = refusal(lambda ask=ask: ask(TrainingJobName="nobody"))  # type: ignore[misc]
        assert told == "ValidationException: Requested resource not found."


def test_boto3s_own_waiter_sees_the_end(place: Place) -> None:
    job = place.create("waiter", HyperParameters={"steps": "5"})
    waiter = place.site("sagemaker").get_waiter("training_job_completed_or_stopped")
    waiter.wait(TrainingJobName=job, WaiterConfig={"Delay": 1, "MaxAttempts": 300})
    assert place.describe(job)["TrainingJobStatus"] == "Completed"


def test_the_jobs_own_credentials_are_its_roles(place: Place, state_dir: Path) -> None:
    job = place.create("identity", HyperParameters={"steps": "5000"})
    wait_for(lambda: any("step=1 " in line for line in flat(place, job)))
    pid = next(pid for pid in processes_under(state_dir / "jobs") if job in environment_of(pid))
    variables = dict(item.split("=", 1) for item in environment_of(pid).split("\0") if "=" in item)
    assert os.environ.get("USER", "nobody") not in variables.get("HOME", "")
    import boto3

    session = boto3.session.Session(
        variables["AWS_ACCESS_KEY_ID"],
        variables["AWS_SECRET_ACCESS_KEY"],
        variables["AWS_SESSION_TOKEN"],
        region_name=variables["AWS_REGION"],
    )
    sts = session.client("sts", endpoint_url=variables["AWS_ENDPOINT_URL"])
    assert f":assumed-role/{place.name}/" in sts.get_caller_identity()["Arn"]
    place.site("sagemaker").stop_training_job(TrainingJobName=job)
    place.finished(job)
