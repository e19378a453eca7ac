"""Training queues: shares from a stack, jobs that wait, borrow, make room for the owner and go on; who may ask."""

import json
import re
import time
from typing import Any

import pytest
from emulator_testing import TRUST_SAGEMAKER, Caller, Site, allow, refusal, wait_for

GPU = "ml.p5.4xlarge"
ENDED = ("SUCCEEDED", "FAILED")


class Queue:
    """A queue of four machines, and a share of one for each of two tenants, that borrow all the rest."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name = site, name
        self.bucket, self.role = f"bucket-{name}", site.role(name, TRUST_SAGEMAKER)
        site("s3").create_bucket(Bucket=self.bucket)
        rights = [allow("s3:*", [f"arn:aws:s3:::{self.bucket}", f"arn:aws:s3:::{self.bucket}/*"]), allow("logs:*")]
        document = json.dumps({"Version": "2012-10-17", "Statement": rights})
        site("iam").put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=document)
        status = site.deploy(name, self.template())
        assert status == "CREATE_COMPLETE", site.failures(name)
        self.arn = f"arn:aws:batch:us-east-1:123456789012:job-queue/{name}"

    def template(self) -> dict[str, Any]:
        def share(tenant: str) -> dict[str, Any]:
            return {
                "Type": "AWS::Batch::QuotaShare",
                "DependsOn": "Queue",
                "Properties": {
                    "QuotaShareName": tenant,
                    "JobQueue": self.name,
                    "CapacityLimits": [{"CapacityUnit": GPU, "MaxCapacity": 1}],
                    "ResourceSharingConfiguration": {"Strategy": "LEND_AND_BORROW", "BorrowLimit": 100},
                    "PreemptionConfiguration": {"InSharePreemption": "DISABLED"},
                },
            }

        quota = {"IdleResourceAssignmentStrategy": "FIFO"}
        capacity = {
            "ServiceEnvironmentType": "SAGEMAKER_TRAINING",
            "CapacityLimits": [{"CapacityUnit": GPU, "MaxCapacity": 2}],
        }
        queue = {
            "JobQueueName": self.name,
            "JobQueueType": "SAGEMAKER_TRAINING",
            "Priority": 1,
            "SchedulingPolicyArn": {"Ref": "Policy"},
            "ServiceEnvironmentOrder": [{"Order": 1, "ServiceEnvironment": {"Ref": "Capacity"}}],
        }
        policy = {"Type": "AWS::Batch::SchedulingPolicy", "Properties": {"QuotaSharePolicy": quota}}
        environment = {"Type": "AWS::Batch::ServiceEnvironment", "Properties": capacity}
        shared = {"Policy": policy, "Capacity": environment}
        return {
            "Resources": {
                **shared,
                "Queue": {"Type": "AWS::Batch::JobQueue", "Properties": queue},
                "Acme": share("acme"),
                "Globex": share("globex"),
            }
        }

    def submit(self, tenant: str, job: str, *, batch: Any = None, **more: Any) -> str:
        """A job's id."""
        asked = {
            "TrainingJobName": f"{tenant}-{job}",
            "RoleArn": self.role,
            "AlgorithmSpecification": {"TrainingImage": "registry/image@sha256:0", "TrainingInputMode": "File"},
            "ResourceConfig": {"InstanceType": GPU, "InstanceCount": 1, "VolumeSizeInGB": 10},
            "StoppingCondition": {"MaxRuntimeInSeconds": 600},
            "OutputDataConfig": {"S3OutputPath": f"s3://{self.bucket}/out/"},
            "HyperParameters": {"steps": "5"},
            "Tags": [{"Key": "trainyard:tenant", "Value": tenant}],
            **more.pop("payload", {}),
        }
        request = {
            "jobName": f"{tenant}-{job}",
            "jobQueue": self.arn,
            "quotaShareName": tenant,
            "serviceJobType": "SAGEMAKER_TRAINING",
            "serviceRequestPayload": json.dumps(asked),
            "tags": {"trainyard:tenant": tenant},
            **more,
        }
        return str((batch or self.site("batch")).submit_service_job(**request)["jobId"])

    def job(self, job_id: str) -> dict[str, Any]:
        """DescribeServiceJob."""
        return dict(self.site("batch").describe_service_job(jobId=job_id))

    def until(self, job_id: str, *states: str) -> dict[str, Any]:
        """The job, once it is in one of the states."""
        wait_for(lambda: self.job(job_id)["status"] in states)
        return self.job(job_id)

    def training(self, job_id: str) -> dict[str, Any]:
        """The training job that was started last."""
        arn = self.job(job_id)["latestAttempt"]["serviceResourceId"]["value"]
        name = arn.rpartition("/")[2]
        names = self.site("sagemaker").list_training_jobs(NameContains="AWSBatch", MaxResults=100)
        named = {row["TrainingJobName"].lower(): row["TrainingJobName"] for row in names["TrainingJobSummaries"]}
        return dict(self.site("sagemaker").describe_training_job(TrainingJobName=named[name.lower()]))


@pytest.fixture
def queue(site: Site, name: str) -> Queue:
    return Queue(site, name)


HELD = {"payload": {"HyperParameters": {"steps": "6000"}}}


def test_a_borrower_is_stopped_for_the_owner_and_goes_on_after_it(queue: Queue) -> None:
    first = queue.submit("acme", "one", **HELD)
    queue.until(first, "RUNNING")
    borrowed = queue.submit("acme", "two", **HELD)
    queue.until(borrowed, "RUNNING")
    name = queue.training(borrowed)["TrainingJobName"]
    assert name.startswith("AWSBatchacme-two")
    assert len(name) == len("AWSBatchacme-two") + 32

    owner = queue.submit("globex", "mine")
    queue.until(owner, "SUCCEEDED")
    waiting = queue.until(borrowed, "RUNNING")
    assert waiting["preemptionSummary"]["preemptedAttemptCount"] == 1, "and runs again, the owner being done"
    assert waiting["attempts"] == [], "being stopped for others counts as no attempt"
    assert queue.training(borrowed)["TrainingJobName"] != name
    assert queue.job(first)["status"] == "RUNNING", "what is its own nobody takes"
    stopped = queue.site("sagemaker").describe_training_job(TrainingJobName=name)
    assert stopped["TrainingJobStatus"] == "Stopped", "it had its SIGTERM and its time to save"

    batch = queue.site("batch")
    listed = batch.list_service_jobs(jobQueue=queue.arn, filters=[{"name": "QUOTA_SHARE_NAME", "values": ["acme"]}])
    assert {row["jobId"] for row in listed["jobSummaryList"]} == {first, borrowed}
    for job_id in (first, borrowed):
        batch.terminate_service_job(jobId=job_id, reason="enough")
        ended = queue.until(job_id, "FAILED")
        assert (ended["isTerminated"], ended["statusReason"]) == (True, "enough")


@pytest.mark.full  # the rules alone, and whose turn it is: test_scheduler
def test_a_job_is_started_again_by_its_rules_and_leaves_the_queue_while_it_waits(queue: Queue) -> None:
    rules = [
        {"action": "RETRY", "onStatusReason": "Received status from SageMaker: AlgorithmError: the loss*"},
        {"action": "EXIT", "onStatusReason": "*"},
    ]
    failing = {"payload": {"HyperParameters": {"mode": "fail"}}}
    again = queue.submit("acme", "again", retryStrategy={"attempts": 2, "evaluateOnExit": rules}, **failing)
    assert len(queue.until(again, "FAILED")["attempts"]) == 2
    never = queue.submit("acme", "never", retryStrategy={"attempts": 2, "evaluateOnExit": rules[1:]}, **failing)
    assert len(queue.until(never, "FAILED")["attempts"]) == 1

    large = {"payload": {"ResourceConfig": {"InstanceType": GPU, "InstanceCount": 3, "VolumeSizeInGB": 10}}}
    waits = queue.submit("acme", "large", clientToken="one", **large)
    assert queue.job(waits)["status"] == "RUNNABLE"
    queue.site("batch").terminate_service_job(jobId=waits, reason="never mind")
    assert queue.until(waits, *ENDED)["attempts"] == []
    wrong = queue.submit("acme", "wrong", payload={"RoleArn": "arn:aws:iam::123456789012:role/nobody"})
    assert "Could not assume role" in queue.until(wrong, *ENDED)["statusReason"]


def test_a_token_makes_one_request_of_identical_ones_alone(queue: Queue) -> None:
    def large(seconds: int) -> dict[str, Any]:
        resources = {"InstanceType": GPU, "InstanceCount": 3, "VolumeSizeInGB": 10}
        return {"ResourceConfig": resources, "StoppingCondition": {"MaxRuntimeInSeconds": seconds}}

    one = queue.submit("acme", "large", clientToken="one", payload=large(600))
    same = queue.submit("acme", "large", clientToken="one", payload=large(600))
    other = queue.submit("acme", "large", clientToken="one", payload=large(60))
    assert same == one != other
    for job_id in (one, other):
        queue.site("batch").terminate_service_job(jobId=job_id, reason="never mind")


def test_a_queue_follows_its_capacity(queue: Queue) -> None:
    """Jobs that wait see more machines without another's coming, and fewer; what runs goes on."""
    batch = queue.site("batch")
    (order,) = batch.describe_job_queues(jobQueues=[queue.arn])["jobQueues"][0]["serviceEnvironmentOrder"]

    def update(**more: Any) -> None:
        if "count" in more:
            more["capacityLimits"] = [{"maxCapacity": more.pop("count"), "capacityUnit": GPU}]
        batch.update_service_environment(serviceEnvironment=order["serviceEnvironment"], **more)

    update(count=1)
    first = queue.submit("acme", "one", **HELD)
    queue.until(first, "RUNNING")
    second = queue.submit("globex", "two", **HELD)
    assert queue.job(second)["status"] == "RUNNABLE"
    update(count=2)
    queue.until(second, "RUNNING")
    update(count=2, state="DISABLED")
    third = queue.submit("acme", "three")
    batch.terminate_service_job(jobId=first, reason="enough")
    queue.until(first, "FAILED")
    assert (queue.job(second)["status"], queue.job(third)["status"]) == ("RUNNING", "RUNNABLE")
    update(count=1, state="ENABLED")
    time.sleep(1)
    assert queue.job(third)["status"] == "RUNNABLE", "of the one machine there is the other's job has it"
    update(count=2)
    queue.until(third, "SUCCEEDED")
    batch.terminate_service_job(jobId=second, reason="enough")
    queue.until(second, "FAILED")


def test_what_is_in_service_is_not_deleted(queue: Queue) -> None:
    batch = queue.site("batch")
    (order,) = batch.describe_job_queues(jobQueues=[queue.arn])["jobQueues"][0]["serviceEnvironmentOrder"]
    environment = order["serviceEnvironment"]
    delete = {"serviceEnvironment": environment}
    assert "must be DISABLED" in refusal(lambda: batch.delete_service_environment(**delete))
    assert "must be DISABLED" in refusal(lambda: batch.delete_job_queue(jobQueue=queue.name))
    batch.update_service_environment(serviceEnvironment=environment, state="DISABLED")
    assert "JobQueue relationship" in refusal(lambda: batch.delete_service_environment(**delete))
    waits = queue.submit("acme", "waits")
    batch.update_job_queue(jobQueue=queue.name, state="DISABLED")
    assert "existing quota shares" in refusal(lambda: batch.delete_job_queue(jobQueue=queue.name))
    for tenant in ("acme", "globex"):
        share = f"{queue.arn}/quota-share/{tenant}"
        batch.update_quota_share(quotaShareArn=share, state="DISABLED")
        batch.delete_quota_share(quotaShareArn=share)
    assert queue.job(waits)["statusReason"] == "Quota share acme was deleted"
    batch.delete_job_queue(jobQueue=queue.name)
    batch.delete_service_environment(**delete)
    queue.site("cloudformation").delete_stack(StackName=queue.name)


def test_jobs_are_listed_by_name_whatever_its_case(queue: Queue) -> None:
    batch = queue.site("batch")
    large = {"payload": {"ResourceConfig": {"InstanceType": GPU, "InstanceCount": 3, "VolumeSizeInGB": 10}}}
    ids = [queue.submit("acme", job, **large) for job in ("One", "one-more", "two")]

    def listed(*values: str) -> list[str]:
        found = batch.list_service_jobs(jobQueue=queue.arn, filters=[{"name": "JOB_NAME", "values": list(values)}])
        return [job["jobName"] for job in found["jobSummaryList"]]

    assert listed("ACME-one") == ["acme-One"]
    assert listed("acme-ONE*") == ["acme-one-more", "acme-One"]
    assert listed("one*") == []
    both = [{"name": "JOB_NAME", "values": ["x"]}, {"name": "QUOTA_SHARE_NAME", "values": ["acme"]}]
    assert "one filter" in refusal(lambda: batch.list_service_jobs(jobQueue=queue.arn, filters=both))
    for job_id in ids:
        batch.terminate_service_job(jobId=job_id, reason="never mind")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"jobName": "x" * 300}, "jobName takes up to 128"),
        ({"jobName": "bad name!*"}, "jobName takes up to 128"),
        ({"retryStrategy": {"attempts": 50}}, "between 1 and 10"),
        (
            {"retryStrategy": {"attempts": 1, "evaluateOnExit": [{"action": "EXIT", "onStatusReason": "x" * 513}]}},
            "up to 512",
        ),
        ({"tags": {f"key-{number}": "" for number in range(80)}}, "'tags' failed.*less than or equal to 50"),
        ({"clientToken": "x" * 65}, "'clientToken' failed.*less than or equal to 64"),
        ({"schedulingPriority": 10_000}, "between 0 and 9999"),
        ({"serviceJobType": "OTHER"}, "SAGEMAKER_TRAINING"),
        # A second of it would be no limit here, where nothing looks at it.
        ({"timeoutConfig": {"attemptDurationSeconds": 1}}, "timeoutConfig: the emulator"),
    ],
)
def test_what_batch_refuses_of_a_job(queue: Queue, change: dict[str, Any], told: str) -> None:
    refused = refusal(lambda: queue.submit("acme", "job", **change))
    assert refused.startswith("ClientException: ")
    assert re.search(told, refused), refused


def test_the_own_share_and_the_own_jobs_are_told_apart_by_name_and_tag(
    queue: Queue, tenants: tuple[Caller, Caller]
) -> None:
    caller, _ = tenants
    mine = {"StringEquals": {"aws:RequestTag/trainyard:tenant": "acme"}}
    jobs = "arn:aws:batch:us-east-1:123456789012:service-job/*"
    caller.grant(
        "queue",
        allow("batch:SubmitServiceJob", [queue.arn, f"{queue.arn}/quota-share/acme", jobs], Condition=mine),
        allow("batch:TagResource", jobs, Condition=mine),
        allow("iam:PassRole", queue.role),
        allow(
            "batch:TerminateServiceJob",
            jobs,
            Condition={"StringEquals": {"aws:ResourceTag/trainyard:tenant": "acme"}},
        ),
    )
    batch = caller.client("batch")
    theirs = queue.submit("globex", "job", **HELD)
    own = queue.submit("acme", "job", batch=batch, **HELD)
    assert "quota-share/globex" in refusal(
        lambda: queue.submit("globex", "x", batch=batch, tags={"trainyard:tenant": "acme"})
    )
    assert "batch:SubmitServiceJob" in refusal(
        lambda: queue.submit("acme", "x", batch=batch, tags={"trainyard:tenant": "globex"})
    )
    other = {"payload": {"RoleArn": "arn:aws:iam::123456789012:role/other"}}
    assert "iam:PassRole" in refusal(lambda: queue.submit("acme", "x", batch=batch, **other))
    assert refusal(lambda: batch.terminate_service_job(jobId=theirs, reason="x")).startswith("AccessDenied")
    batch.terminate_service_job(jobId=own, reason="done")
    queue.until(own, "FAILED")
    queue.site("batch").terminate_service_job(jobId=theirs, reason="done")
    queue.until(theirs, "FAILED")


def test_what_batch_refuses_of_a_share(queue: Queue) -> None:
    batch = queue.site("batch")
    limit, alone = [{"maxCapacity": 1, "capacityUnit": GPU}], {"inSharePreemption": "DISABLED"}

    def make(name: str, limits: list[Any], **sharing: Any) -> str:
        return refusal(
            lambda: batch.create_quota_share(
                quotaShareName=name,
                jobQueue=queue.name,
                capacityLimits=limits,
                resourceSharingConfiguration=sharing,
                preemptionConfiguration=alone,
            )
        )

    assert "already exists" in make("acme", limit, strategy="LEND")
    assert "LEND_AND_BORROW" in make("other", limit, strategy="LEND", borrowLimit=10)
    assert "1 to 5" in make("other", limit * 6, strategy="LEND")
    for number in range(18):
        assert make(f"share-{number}", limit, strategy="LEND") == ""
    assert "20 quota shares" in make("one-more", limit, strategy="LEND")
    arn = f"{queue.arn}/quota-share/share-0"
    assert "DISABLED" in refusal(lambda: batch.delete_quota_share(quotaShareArn=arn))
    # The rest goes with the stack; what it doesn't know is taken here.
    for number in range(18):
        arn = f"{queue.arn}/quota-share/share-{number}"
        batch.update_quota_share(quotaShareArn=arn, state="DISABLED")
        batch.delete_quota_share(quotaShareArn=arn)
    queue.site("cloudformation").delete_stack(StackName=queue.name)
    assert batch.describe_job_queues(jobQueues=[queue.name])["jobQueues"] == []
