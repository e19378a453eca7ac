"""Limits of services that a deployment would meet: the emulator refuses where AWS does."""

import json
from typing import Any

import pytest
from emulator_testing import Site, allow, policy, refusal
from emulator_testing.templates import att, ref, resource, trust


def statement(characters: int) -> dict[str, Any]:
    """A policy document of so many characters, white space left out."""
    empty = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": ""}]}
    taken = len(json.dumps(empty, separators=(",", ":")))
    empty["Statement"][0]["Resource"] = "arn:aws:s3:::".ljust(characters - taken, "x")  # type: ignore[index]
    return empty


def role(**properties: Any) -> dict[str, Any]:
    """A role of Lambda's."""
    return resource("IAM::Role", {"AssumeRolePolicyDocument": trust("lambda.amazonaws.com"), **properties})


def function(**properties: Any) -> dict[str, Any]:
    """A function and its role."""
    stated = {
        "Runtime": "python3.13",
        "Handler": "index.handler",
        "Code": {"ZipFile": "def handler(event, context):\n    return event\n"},
        "Role": att("Role", "Arn"),
        **properties,
    }
    return {"Role": role(), "Function": resource("Lambda::Function", stated)}


def budget(**subscribers: int) -> dict[str, Any]:
    """A budget that tells so many."""
    addresses = [{"SubscriptionType": "EMAIL", "Address": f"a{number}@b.org"} for number in range(subscribers["email"])]
    notification = {"NotificationType": "ACTUAL", "ComparisonOperator": "GREATER_THAN", "Threshold": 80}
    limit = {"BudgetType": "COST", "TimeUnit": "MONTHLY", "BudgetLimit": {"Amount": 10, "Unit": "USD"}}
    told = [{"Notification": notification, "Subscribers": addresses}]
    return {"Budget": resource("Budgets::Budget", {"Budget": limit, "NotificationsWithSubscribers": told})}


def alarm(**properties: Any) -> dict[str, Any]:
    """An alarm."""
    plain = {"ComparisonOperator": "GreaterThanThreshold", "Threshold": 1, "EvaluationPeriods": 1}
    metric = {"MetricName": "m", "Namespace": "n", "Statistic": "Average", "Period": 300}
    stated = plain | ({} if "Metrics" in properties else metric) | properties
    return {"Alarm": resource("CloudWatch::Alarm", stated)}


def queries(number: int, expression: str) -> list[dict[str, Any]]:
    """So many metrics, and what is made of them."""
    metric = {"Metric": {"Namespace": "n", "MetricName": "x"}, "Period": 300, "Stat": "Average"}
    several = [{"Id": f"m{index}", "MetricStat": metric, "ReturnData": False} for index in range(number)]
    return [*several, {"Id": "e", "Expression": expression}]


def rule(targets: int = 1, schedule: str = "rate(5 minutes)") -> dict[str, Any]:
    """A rule with so many targets."""
    arns = [f"arn:aws:lambda:us-east-1:123456789012:function:f{number}" for number in range(targets)]
    named = [{"Id": f"t{number}", "Arn": arn} for number, arn in enumerate(arns)]
    return {"Rule": resource("Events::Rule", {"ScheduleExpression": schedule, "Targets": named})}


def parameter(characters: int, **properties: Any) -> dict[str, Any]:
    """A parameter of so many characters."""
    return {"Parameter": resource("SSM::Parameter", {"Type": "String", "Value": "x" * characters, **properties})}


def inline(*sizes: int) -> dict[str, Any]:
    """A role with inline policies of these sizes, one of them by a resource of its own."""
    own = [{"PolicyName": f"p{size}", "PolicyDocument": statement(size)} for size in sizes[1:]]
    first = {"PolicyName": "first", "PolicyDocument": statement(sizes[0]), "Roles": [ref("Role")]}
    return {"Role": role(Policies=own), "Policy": resource("IAM::Policy", first)}


def attached(number: int) -> dict[str, Any]:
    """A role with so many managed policies."""
    policies = {
        f"P{index}": resource("IAM::ManagedPolicy", {"PolicyDocument": statement(200)}) for index in range(number)
    }
    return {**policies, "Role": role(ManagedPolicyArns=[*map(ref, policies)])}


def trusting(number: int) -> dict[str, Any]:
    """A role that so many services may take."""
    services = [f"service-{index:04}.amazonaws.com" for index in range(number)]
    document = {**trust(""), "Statement": [{**trust("")["Statement"][0], "Principal": {"Service": services}}]}
    return {"Role": role(AssumeRolePolicyDocument=document)}


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        (inline(5000, 5240), inline(5000, 5241), "Maximum policy size of 10240 bytes exceeded for role"),
        (
            {"P": resource("IAM::ManagedPolicy", {"PolicyDocument": statement(6144)})},
            {"P": resource("IAM::ManagedPolicy", {"PolicyDocument": statement(6145)})},
            "Cannot exceed quota for PolicySize: 6144",
        ),
        (attached(10), attached(11), "Cannot exceed quota for PoliciesPerRole: 10"),
        (trusting(50), trusting(90), "Cannot exceed quota for ACLSizePerRole: 2048"),
        (parameter(4096), parameter(4097), "Standard tier parameters support a maximum parameter value of 4096"),
        (parameter(8192, Tier="Advanced"), parameter(8193, Tier="Advanced"), "maximum parameter value of 8192"),
        (function(Timeout=900), function(Timeout=901), "Member must have value less than or equal to 900"),
        (function(MemorySize=128), function(MemorySize=64), "greater than or equal to 128"),
        (
            function(Environment={"Variables": {"BIG": "x" * 4093}}),
            function(Environment={"Variables": {"BIG": "x" * 4094}}),
            "exceeded the 4KB limit",
        ),
        (
            function(Environment={"Variables": {"AWS_ZONE": "x"}}),
            function(Environment={"Variables": {"AWS_REGION": "x"}}),
            "Reserved keys used in this request: AWS_REGION",
        ),
        (rule(5), rule(6), "exceeds the maximum number allowed"),
        (rule(schedule="rate(1 minute)"), rule(schedule="rate(1 minutes)"), "ScheduleExpression is not valid"),
        (rule(schedule="rate(2 hours)"), rule(schedule="rate(2 hour)"), "ScheduleExpression is not valid"),
        (budget(email=10), budget(email=11), "at most 10 EMAIL subscribers"),
        (
            alarm(AlarmActions=[f"arn:aws:sns:us-east-1:123456789012:t{index}" for index in range(5)]),
            alarm(AlarmActions=[f"arn:aws:sns:us-east-1:123456789012:t{index}" for index in range(6)]),
            "less than or equal to 5",
        ),
        (
            alarm(Metrics=queries(9, "SUM(METRICS())")),
            alarm(Metrics=queries(10, "SUM(METRICS())")),
            "at most 10 metrics",
        ),
        (
            alarm(Metrics=queries(1, "m0 + 1")),
            alarm(Metrics=queries(1, "SUM(SEARCH('{n} x', 'Average', 300))")),
            "SEARCH is not supported on Metric Alarms",
        ),
        (
            alarm(EvaluationPeriods=288),
            alarm(EvaluationPeriods=289),
            "cannot be checked across more than 86400 seconds",
        ),
    ],
)
def test_a_limit_is_one(site: Site, name: str, good: dict[str, Any], bad: dict[str, Any], told: str) -> None:
    """What fits is deployed; what doesn't fails, alone and as an update."""
    assert site.deploy(name, {"Resources": good}) == "CREATE_COMPLETE", site.failures(name)
    assert site.deploy(f"{name}-2", {"Resources": bad}) == "ROLLBACK_COMPLETE"
    assert told in site.failures(f"{name}-2")
    site("cloudformation").update_stack(StackName=name, TemplateBody=json.dumps({"Resources": bad}))
    assert site.stack_status(name) == "UPDATE_ROLLBACK_COMPLETE"
    assert told in site.failures(name)


def test_a_template_holds_so_many_resources(site: Site, name: str) -> None:
    many = {f"R{number}": resource("SNS::Topic") for number in range(501)}
    told = refusal(lambda: site.deploy(name, {"Resources": many}))
    assert "Number of resources, 501, is greater than maximum allowed, 500" in told


def test_the_apis_themselves_are_limited(site: Site, name: str) -> None:
    site.role(name)
    for index in range(2):
        site("iam").put_role_policy(
            RoleName=name, PolicyName=f"p{index}", PolicyDocument=json.dumps(statement(5000), indent=8)
        )
    told = refusal(
        lambda: site("iam").put_role_policy(
            RoleName=name, PolicyName="p2", PolicyDocument=policy(allow("s3:*", ["arn:aws:s3:::".ljust(240, "x")]))
        )
    )
    assert told.startswith("LimitExceeded: Maximum policy size of 10240 bytes exceeded")
    site("ssm").put_parameter(Name=f"/{name}", Value="x" * 8000, Type="String", Tier="Advanced")
    told = refusal(lambda: site("ssm").put_parameter(Name=f"/{name}-2", Value="x" * 8000, Type="String"))
    assert told.startswith("ValidationException: Standard tier parameters")
