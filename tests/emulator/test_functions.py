"""Lambda functions run: their own code, as their own role, with nothing of this machine; and who may call them."""

import json
from typing import Any

import pytest
from emulator_testing import ACCOUNT, Caller, Site, allow, policy, refusal

CODE = """
import os, sys
import boto3

def handler(event, context):
    print("asked for", event["do"])
    if event["do"] == "fail":
        raise ValueError("the event asks for a failure")
    if event["do"] == "leave":
        os._exit(7)
    if event["do"] == "steal":
        return boto3.client("s3").list_buckets()["Buckets"]
    found = []
    for name in ("pydantic", "moto", "trainyard", "yaml"):
        try:
            __import__(name)
            found.append(name)
        except ImportError:
            pass
    return {
        "who": boto3.client("sts").get_caller_identity()["Arn"],
        "modules": found,
        "variables": sorted(os.environ),
        "tone": os.environ["TONE"],
        "path": [item for item in sys.path if "site-packages" in item],
        "name": context.function_name,
    }
"""


def template(tone: str = "soft") -> dict[str, Any]:
    """A function with its role and log group, and EventBridge's permission to call it for one rule."""
    trust = json.loads(policy(allow("sts:AssumeRole")))
    trust["Statement"][0] |= {"Principal": {"Service": "lambda.amazonaws.com"}}
    del trust["Statement"][0]["Resource"]
    writes = json.loads(policy(allow(["logs:CreateLogStream", "logs:PutLogEvents"])))
    return {
        "Resources": {
            "Role": {
                "Type": "AWS::IAM::Role",
                "Properties": {
                    "AssumeRolePolicyDocument": trust,
                    "Policies": [{"PolicyName": "own", "PolicyDocument": writes}],
                },
            },
            "Log": {"Type": "AWS::Logs::LogGroup", "Properties": {}},
            "Function": {
                "Type": "AWS::Lambda::Function",
                "Properties": {
                    "Runtime": "python3.13",
                    "Handler": "index.handler",
                    "Code": {"ZipFile": CODE},
                    "Role": {"Fn::GetAtt": ["Role", "Arn"]},
                    "Timeout": 30,
                    "Environment": {"Variables": {"TONE": tone}},
                    "LoggingConfig": {"LogGroup": {"Ref": "Log"}},
                },
            },
            "Permission": {
                "Type": "AWS::Lambda::Permission",
                "Properties": {
                    "Action": "lambda:InvokeFunction",
                    "FunctionName": {"Fn::GetAtt": ["Function", "Arn"]},
                    "Principal": "events.amazonaws.com",
                    "SourceArn": f"arn:aws:events:us-east-1:{ACCOUNT}:rule/mine",
                },
            },
        },
        "Outputs": {
            "Function": {"Value": {"Ref": "Function"}},
            "Arn": {"Value": {"Fn::GetAtt": ["Function", "Arn"]}},
            "Log": {"Value": {"Ref": "Log"}},
        },
    }


@pytest.fixture(scope="module")
def stack(site: Site) -> str:
    """The stack's name."""
    assert site.deploy("functions", template()) == "CREATE_COMPLETE", site.failures("functions")
    return "functions"


def invoke(client: Any, name: str, do: str) -> tuple[Any, str]:
    answer = client.invoke(FunctionName=name, Payload=json.dumps({"do": do}).encode())
    return json.load(answer["Payload"]), answer.get("FunctionError", "")


def test_it_runs_as_its_role_and_sees_nothing_of_this_machine(site: Site, stack: str) -> None:
    name = site.output(stack, "Function")
    said, error = invoke(site("lambda"), name, "look")
    assert not error, said
    assert f":assumed-role/{stack}-Role" in said["who"]
    assert (said["modules"], said["path"], said["name"], said["tone"]) == ([], [], name, "soft")
    assert not {"VIRTUAL_ENV", "PYTHONPATH", "USER", "TRAINYARD_STATE_DIR"} & set(said["variables"])
    events = site("logs").filter_log_events(logGroupName=site.output(stack, "Log"))["events"]
    assert "asked for look" in [event["message"] for event in events]
    # Its role may write its log and nothing else.
    said, error = invoke(site("lambda"), name, "steal")
    assert error == "Unhandled" and "is not authorized to perform: s3:ListAllMyBuckets" in said["errorMessage"], said


def test_a_failure_is_told_and_changes_of_the_stack_arrive(site: Site, stack: str) -> None:
    name = site.output(stack, "Function")
    assert invoke(site("lambda"), name, "fail") == (
        {"errorMessage": "the event asks for a failure", "errorType": "ValueError"},
        "Unhandled",
    )
    said, error = invoke(site("lambda"), name, "leave")
    assert (said["errorType"], error) == ("Runtime.ExitError", "Unhandled")
    site("cloudformation").update_stack(StackName=stack, TemplateBody=json.dumps(template("loud")))
    assert site.stack_status(stack) == "UPDATE_COMPLETE"
    assert invoke(site("lambda"), name, "look")[0]["tone"] == "loud"


def test_who_may_call_it(site: Site, stack: str, tenants: tuple[Caller, Caller]) -> None:
    name, arn = site.output(stack, "Function"), site.output(stack, "Arn")
    one, other = tenants
    one.grant("call", allow("lambda:InvokeFunction", arn))
    other.grant("call", allow("lambda:InvokeFunction", arn + "-other"))
    for called in (name, arn):
        one.client("lambda").invoke(FunctionName=called, InvocationType="DryRun")
        denied = refusal(lambda called=called: other.client("lambda").invoke(FunctionName=called))
        assert denied.startswith("AccessDenied") and f"lambda:InvokeFunction on resource: {arn}" in denied
    assert "AccessDenied" in refusal(lambda: one.client("lambda").invoke(FunctionName=name, Qualifier="1"))
    assert "AccessDenied" in refusal(lambda: one.client("lambda").get_function(FunctionName=name))
    assert "ResourceNotFound" in refusal(lambda: site("lambda").invoke(FunctionName="nowhere"))
    policy_text = site("lambda").get_policy(FunctionName=name)["Policy"]
    assert json.loads(policy_text)["Statement"][0]["Principal"] == {"Service": "events.amazonaws.com"}
