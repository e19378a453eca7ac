"""A job's new status reaches the functions that EventBridge's rules name; failures that are SageMaker's own."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from emulator_testing import ACCOUNT, TRUST_SAGEMAKER, Site, allow, policy, wait_for

from trainyard import emulator
from trainyard.emulator.batch.service_jobs import QuotaShare, ServiceJobs
from trainyard.emulator.functions import events
from trainyard.emulator.functions.events import EventBus, Schedule, input_of
from trainyard.emulator.functions.runs import Run

CODE = """
def handler(event, context):
    if event.get("reason") == "ask again":
        raise RuntimeError("not now")
    return event
"""
NO_ROOM = "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different instance."


def template(name: str) -> dict[str, Any]:
    """A function for failed jobs of a name, called by one rule that may, and named by one that may not."""
    trust = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    pattern = {
        "source": ["aws.sagemaker"],
        "detail-type": ["SageMaker Training Job State Change"],
        "detail": {
            "TrainingJobStatus": ["Failed"],
            "$or": [{"TrainingJobName": [{"prefix": name}]}, {"RoleArn": [""]}],
        },
    }
    transformer = {
        "InputPathsMap": {"job": "$.detail.TrainingJobName", "reason": "$.detail.FailureReason"},
        "InputTemplate": '{"job": <job>, "said": "of <job>", "reason": <reason>, "rules": {"most": 3}}',
    }
    function: dict[str, Any] = {"Fn::GetAtt": ["Function", "Arn"]}

    def rule(own: str) -> dict[str, Any]:
        target = {"Id": "it", "Arn": function, "InputTransformer": transformer}
        return {"Type": "AWS::Events::Rule", "Properties": {"Name": own, "EventPattern": pattern, "Targets": [target]}}

    return {
        "Resources": {
            "Role": {
                "Type": "AWS::IAM::Role",
                "Properties": {"AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": [trust]}},
            },
            "Function": {
                "Type": "AWS::Lambda::Function",
                "Properties": {
                    "Runtime": "python3.13",
                    "Handler": "index.handler",
                    "Code": {"ZipFile": CODE},
                    "Role": {"Fn::GetAtt": ["Role", "Arn"]},
                },
            },
            "May": rule(f"{name}-may"),
            "MayNot": rule(f"{name}-may-not"),
            "Permission": {
                "Type": "AWS::Lambda::Permission",
                "Properties": {
                    "Action": "lambda:InvokeFunction",
                    "FunctionName": function,
                    "Principal": "events.amazonaws.com",
                    "SourceArn": f"arn:aws:events:us-east-1:{ACCOUNT}:rule/{name}-may",
                },
            },
        },
        "Outputs": {"Arn": {"Value": function}},
    }


def test_a_failed_job_reaches_the_function_whose_policy_lets_the_rule(site: Site, name: str) -> None:
    assert site.deploy(f"stack-{name}", template(name)) == "CREATE_COMPLETE", site.failures(f"stack-{name}")
    function = site.output(f"stack-{name}", "Arn")
    bucket = f"bucket-{name}"
    site("s3").create_bucket(Bucket=bucket)
    role = site.role(name, TRUST_SAGEMAKER)
    own = allow(["s3:*", "logs:*"])
    site("iam").put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=policy(own))

    def ended(job: str, **hyperparameters: str) -> dict[str, Any]:
        site("sagemaker").create_training_job(
            TrainingJobName=job,
            RoleArn=role,
            AlgorithmSpecification={"TrainingImage": "registry/image@sha256:0", "TrainingInputMode": "File"},
            ResourceConfig={"InstanceType": "ml.p5.4xlarge", "InstanceCount": 1, "VolumeSizeInGB": 10},
            StoppingCondition={"MaxRuntimeInSeconds": 600},
            OutputDataConfig={"S3OutputPath": f"s3://{bucket}/out/"},
            HyperParameters=hyperparameters,
        )
        look = lambda: site("sagemaker").describe_training_job(TrainingJobName=job)  # noqa: E731
        wait_for(lambda: look()["TrainingJobStatus"] in ("Completed", "Failed"))
        answer: dict[str, Any] = look()
        return answer

    def delivered() -> list[dict[str, Any]]:
        return [item for item in emulator.deliveries(site.info) if item["function"] == function]

    emulator.fail_jobs(site.info, f"{name}-room", reason=NO_ROOM)
    first = ended(f"{name}-room")
    assert (first["TrainingJobStatus"], first["FailureReason"]) == ("Failed", NO_ROOM)
    assert "TrainingStartTime" not in first and ended(f"{name}-fine")["TrainingJobStatus"] == "Completed"
    wait_for(lambda: len(delivered()) == 2)
    refused, done = sorted(delivered(), key=lambda item: "refused" not in item)
    assert (
        refused["refused"] == f"its policy doesn't let arn:aws:events:us-east-1:{ACCOUNT}:rule/{name}-may-not call it"
    )
    expected = {"job": f"{name}-room", "said": f"of {name}-room", "reason": NO_ROOM, "rules": {"most": 3}}
    assert done["event"] == expected and json.loads(done["payload"]) == expected

    emulator.fail_jobs(site.info, f"{name}-lost", reason="ask again", after_log_pattern="step=2 ")
    lost = ended(f"{name}-lost", steps="600")
    assert (lost["TrainingJobStatus"], lost["FailureReason"]) == ("Failed", "ask again")
    # What raises is asked again, twice, as Lambda does.
    wait_for(lambda: [item["attempt"] for item in delivered() if item.get("error")] == [1, 2, 3])


def test_what_a_target_gets_of_an_event() -> None:
    event = {"source": "aws.it", "detail": {"Name": 'a "b"', "Count": 2, "Tags": [{"Key": "k"}]}}
    assert json.loads(input_of({}, event)) == event
    assert input_of({"Input": "{}"}, event) == b"{}"
    assert json.loads(input_of({"InputPath": "$.detail.Tags"}, event)) == [{"Key": "k"}]
    paths = {"name": "$.detail.Name", "count": "$.detail.Count", "tags": "$.detail.Tags", "gone": "$.detail.Gone.On"}
    text = r'{"a": <name>, "b": "x <name> <count>\" <nothing>", "c": <count>, "d": <tags>, "e": <gone>, "f": 1}'
    filled = input_of({"InputTransformer": {"InputPathsMap": paths, "InputTemplate": text}}, event)
    assert json.loads(filled) == {
        "a": 'a "b"',
        "b": 'x a "b" 2" <nothing>',
        "c": 2,
        "d": [{"Key": "k"}],
        "e": None,
        "f": 1,
    }


def test_what_a_call_raises_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """More events that raise than there are workers, a text that is no JSON among them; then one that is well."""
    monkeypatch.setattr(events, "_RETRIES", 0)
    target = {"Arn": "arn:aws:lambda:us-east-1:1:function:f"}

    class Raising:
        def permits(self, *_: str) -> bool:
            return True

        def invoke(self, _: str, event: bytes) -> Run:
            if b"well" not in event:
                raise OSError("no room")
            return Run(event)

    inputs = ["{}", "no JSON", "{}", '"well"', "well, and no JSON", '"well"']
    functions: Any = Raising()
    info: Any = None
    bus = EventBus(info, functions, lambda event: [("rule", {**target, "Input": event["input"]})])
    for text in inputs:
        bus.put({"input": text})
    wait_for(lambda: len(bus.deliveries) == len(inputs))
    told = [(item["event"], item["payload"], item["error"]) for item in bus.deliveries]
    assert told.count(("well", '"well"', "")) == 2
    assert told.count(({}, "OSError: no room", "Unhandled")) == 2
    assert ("no JSON", "OSError: no room", "Unhandled") in told and ("well, and no JSON", inputs[4], "") in told


def test_a_rate_is_due_once_a_period_and_a_cron_never() -> None:
    schedule, rules = Schedule(), [("five", "rate(5 minutes)"), ("hour", "rate(1 hour)"), ("cron", "cron(0 1 * * ? *)")]
    assert [schedule.due(rules, now) for now in (0.0, 299.0, 300.0, 301.0, 600.0)] == [[], [], ["five"], [], ["five"]]
    assert schedule.due(rules, 3600.0) == ["five", "hour"]
    assert schedule.due([], 9000.0) == [] and schedule.due(rules, 9001.0) == [], "gone and back: a new period"


def test_a_rule_with_a_rate_and_a_pattern_is_called_by_events_too() -> None:
    """One with a rate alone is not, though its missing pattern matches everything."""
    from moto.events.models import EventPattern

    def rule(arn: str, pattern: dict[str, Any] | None, rate: str | None) -> SimpleNamespace:
        loaded = EventPattern.load(json.dumps(pattern) if pattern else None)
        return SimpleNamespace(arn=arn, event_pattern=loaded, scheduled_expression=rate, targets=[{"Arn": arn}])

    ends = {"source": ["aws.sagemaker"], "detail": {"TrainingJobStatus": ["Failed"]}}
    rules = [rule("both", ends, "rate(5 minutes)"), rule("pattern", ends, None), rule("rate", None, "rate(5 minutes)")]
    bus = cast(EventBus, SimpleNamespace(_enabled=lambda: rules))
    for status, called in (("Failed", ["both", "pattern"]), ("InProgress", [])):
        event = {"source": "aws.sagemaker", "detail": {"TrainingJobStatus": status}}
        assert [arn for arn, _ in EventBus._rules(bus, event)] == called


def test_a_queued_jobs_end_is_told_by_its_name_and_queue() -> None:
    heard: list[Any] = []
    bus = EventBus(
        cast(Any, SimpleNamespace(account="1", region="here")), cast(Any, None), lambda e: heard.append(e) or []
    )
    jobs = ServiceJobs(
        cast(Any, SimpleNamespace(account="1", region="here")), cast(Any, SimpleNamespace(listen=id)), lambda _: {}
    )
    jobs.listen(bus.service_job_ended)
    jobs.shares["q/quota-share/acme"] = QuotaShare("arn", "acme", "q", {})
    request = {"jobName": "acme-a", "jobQueue": "q", "quotaShareName": "acme"}
    payload = {"ResourceConfig": {"InstanceType": "ml.p5.4xlarge", "InstanceCount": 1}}
    job = jobs.submit(request | {"serviceRequestPayload": json.dumps(payload)}, "q")
    assert heard == []
    jobs.terminate(job.job_id, "enough")
    (event,) = heard
    assert (event["source"], event["detail-type"]) == ("aws.batch", "Batch Service Job State Change")
    assert event["resources"] == [job.arn]
    told = {name: event["detail"][name] for name in ("jobName", "jobQueue", "status", "isTerminated")}
    assert told == {"jobName": "acme-a", "jobQueue": "q", "status": "FAILED", "isTerminated": True}
    assert not {"serviceRequestPayload", "tags"} & set(event["detail"])
    jobs.terminate(job.job_id, "again")
    assert len(heard) == 1


@pytest.mark.full
def test_a_schedule_calls_its_function(site: Site, name: str) -> None:
    content = template(name)
    rule = content["Resources"]["May"]["Properties"]
    del rule["EventPattern"]
    rule |= {"ScheduleExpression": "rate(1 minute)", "Targets": [{"Id": "it", "Arn": rule["Targets"][0]["Arn"]}]}
    del content["Resources"]["MayNot"]
    assert site.deploy(f"stack-{name}", content) == "CREATE_COMPLETE", site.failures(f"stack-{name}")
    function = site.output(f"stack-{name}", "Arn")

    def delivered() -> list[dict[str, Any]]:
        found = emulator.deliveries(site.info)
        return [item for item in found if item["function"] == function]

    wait_for(delivered, seconds=240.0)
    assert delivered()[0]["event"]["detail-type"] == "Scheduled Event" and not delivered()[0]["error"]
