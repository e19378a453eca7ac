"""Whom the broker is told of: at each job's end that job alone, each hour all; and what its alarm says."""

import copy
import json
from typing import Any

import pytest
from moto.events.models import EventPattern

from stacks.constructs import broker
from trainyard.emulator.functions.events import input_of
from trainyard.functions import broker_ledger, broker_roles

QUEUE = "arn:aws:batch:us-east-1:777788889999:job-queue/trainyard-production-p5-4xlarge-0"


Resources = dict[str, dict[str, Any]]
"""Of a template, by their logical ids."""


@pytest.fixture(scope="module")
def stacks(synthesize: Any, environments: dict[str, Any]) -> dict[str, Resources]:
    """By tenant, its training stack: language queues, perception doesn't; each of their jobs has a role of its own."""
    content = copy.deepcopy(environments["production"].model_dump(mode="json"))
    tenants = {name: content["tenants"][name] | {"job_isolation": "role"} for name in ("language", "perception")}
    tenants["perception"] |= {"submission": "broker", "share": {}}
    for tenant in tenants.values():
        tenant["warm_pool_minutes"] = 0
    made = synthesize(type(environments["production"]).model_validate(content | {"tenants": tenants}))
    return {name: made[f"trainyard-production-{name}-training"]["Resources"] for name in tenants}


@pytest.fixture(scope="module")
def rules(stacks: dict[str, Resources]) -> dict[str, list[dict[str, Any]]]:
    """By tenant, the rules that call its broker."""
    return {name: callers(resources) for name, resources in stacks.items()}


def callers(resources: Resources) -> list[dict[str, Any]]:
    functions = [name for name, item in resources.items() if item["Type"] == "AWS::Lambda::Function"]
    (broker,) = (name for name in functions if name.startswith("Broker"))
    found = [item["Properties"] for item in resources.values() if item["Type"] == "AWS::Events::Rule"]
    return [rule for rule in found if rule["Targets"][0]["Arn"] == {"Fn::GetAtt": [broker, "Arn"]}]


def told(rules: list[dict[str, Any]], source: str, kind: str, **detail: str) -> list[Any]:
    """What the broker is asked after an event."""
    event = {"source": source, "detail-type": kind, "detail": detail}
    return [
        json.loads(input_of(rule["Targets"][0], event))
        for rule in rules
        if "EventPattern" in rule and EventPattern(None, rule["EventPattern"]).matches_event(event)
    ]


def ended(rules: list[dict[str, Any]], name: str) -> list[Any]:
    kind = "SageMaker Training Job State Change"
    return told(rules, "aws.sagemaker", kind, TrainingJobName=name, TrainingJobStatus="Completed")


def test_a_jobs_end_names_the_attempt(rules: dict[str, list[dict[str, Any]]]) -> None:
    assert ended(rules["perception"], "perception-a-r2") == [{"sweep": True, "ended": "perception-a-r2"}]
    assert ended(rules["perception"], "language-a") == []


def test_of_a_queued_job_the_queue_tells_the_end_by_the_attempts_name(rules: dict[str, list[dict[str, Any]]]) -> None:
    assert ended(rules["language"], f"AWSBatchlanguage-{'0' * 40}") == [], "one start of several, under Batch's name"
    kind = "Batch Service Job State Change"
    for status, asked in (("SUCCEEDED", True), ("FAILED", True), ("RUNNABLE", False)):
        said = told(rules["language"], "aws.batch", kind, jobName="language-a", jobQueue=QUEUE, status=status)
        assert said == ([{"sweep": True, "ended": "language-a"}] if asked else [])


def test_its_rules_name_no_queue_by_one_so_that_any_number_fits(rules: dict[str, list[dict[str, Any]]]) -> None:
    """EventBridge takes 2,048 characters of a pattern."""
    patterns = [json.dumps(rule["EventPattern"]) for rule in rules["language"] if "EventPattern" in rule]
    assert any("job-queue" in pattern for pattern in patterns) and not any(QUEUE in pattern for pattern in patterns)
    kind = "Batch Service Job State Change"
    elsewhere = QUEUE.replace("trainyard-production-", "trainyard-productiontwo-")
    assert elsewhere != QUEUE
    said = told(rules["language"], "aws.batch", kind, jobName="language-a", jobQueue=elsewhere, status="SUCCEEDED")
    assert said == [], "another environment's queue"


def test_each_hour_all_are_looked_at(rules: dict[str, list[dict[str, Any]]]) -> None:
    for name, number in (("language", 2), ("perception", 1)):
        hourly = [rule for rule in rules[name] if rule.get("ScheduleExpression") == "rate(1 hour)"]
        assert [json.loads(rule["Targets"][0]["Input"]) for rule in hourly] == [{"sweep": True}]
        assert len(rules[name]) == 1 + number


def test_the_alarm_on_its_errors_says_all_that_they_may_mean(
    stacks: dict[str, Resources], templates: dict[str, Any]
) -> None:
    """Of a tenant whose jobs have no roles of their own nothing but jobs."""

    def said(resources: Resources) -> str:
        (alarm,) = (item for name, item in resources.items() if name.startswith("BrokerFailed"))
        return str(alarm["Properties"]["AlarmDescription"])

    for resources in stacks.values():
        assert "not submitted, or roles of jobs that are over still stand" in said(resources)
    plain = templates["production"]["trainyard-production-perception-training"]["Resources"]
    assert "the broker failed, so that a job was not submitted. Why:" in said(plain)


def test_a_call_that_looks_as_long_as_it_may_has_time_to_wait_for_a_role() -> None:
    """The function's end at any moment would leave its promise, and a person without an answer."""
    waits = max((broker_roles.TRIES - 1) * broker_roles.TRY_SECONDS, broker_roles.SETTLE_SECONDS)
    assert broker_ledger.PATIENCE_SECONDS + waits <= broker.TIME_LIMIT.to_seconds() - 10
