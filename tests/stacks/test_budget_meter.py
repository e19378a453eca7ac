"""The live meter in the templates: how often it looks, what it knows, whom it tells."""

import json
from pathlib import Path
from typing import Any

import pytest

TRAINING = "trainyard-local-acme-training"


@pytest.fixture(scope="module")
def settings(account: Any) -> dict[str, Any]:
    (found,) = (
        item["Environment"]["Variables"]["METER"]
        for item in account.resources(TRAINING, "AWS::Lambda::Function").values()
        if "METER" in item.get("Environment", {}).get("Variables", {})
    )
    return dict(json.loads(found))


def test_every_five_minutes_and_as_a_job_ends_the_meter_is_called(account: Any) -> None:
    rules = account.resources(TRAINING, "AWS::Events::Rule").values()
    (rule,) = (item for item in rules if "ScheduleExpression" in item)
    assert rule["ScheduleExpression"] == "rate(5 minutes)"
    assert rule["EventPattern"]["source"] == ["aws.sagemaker"]
    detail = rule["EventPattern"]["detail"]
    assert detail["TrainingJobStatus"] == ["Completed", "Failed", "Stopped"]
    assert {"prefix": "acme-"} in detail["TrainingJobName"] and {"prefix": "globex-"} not in detail["TrainingJobName"]
    (target,) = rule["Targets"]
    assert "BudgetMeter" in target["Arn"] or "budgetmeter" in target["Arn"]


def test_it_knows_exact_prices_gpus_and_the_quotas(settings: dict[str, Any]) -> None:
    from trainyard.hardware import price

    on_demand = price("ml.p5.4xlarge", "us-east-1").usd_per_hour
    assert settings["rates"]["ml.p5.4xlarge"]["on_demand"] == str(on_demand), "text: no float on the way"
    assert settings["gpus"]["ml.p5.4xlarge"] == 1
    assert settings["budget"] == {"monthly_usd": 5000.0, "monthly_gpu_hours": None, "when_spent": "finish"}
    assert settings["prefixes"][0] == "acme-" and settings["queues"] == []


def test_queues_are_named_in_few_characters(templates: dict[str, dict[str, Any]]) -> None:
    """Lambda takes 4,096 bytes of settings, and ARNs of a queue for each of 22 types were more."""
    resources = templates["production"]["trainyard-production-language-training"]["Resources"].values()
    variables = [item["Properties"].get("Environment", {}).get("Variables", {}) for item in resources]
    (text,) = (found["METER"] for found in variables if "METER" in found)
    queues = json.loads(text)["queues"]
    assert queues and all(name.startswith("trainyard-production-") for name in queues)


def test_types_that_only_other_tenants_have_now_are_priced_too(settings: dict[str, Any]) -> None:
    from trainyard.spec.platform import load_environment

    environment = load_environment(Path("environments/local.yaml"))
    own = {kind for queue in environment.tenants["acme"].queues.values() for kind in queue.instance_types}
    assert own < set(environment.max_instances), "a month's jobs may have run on what a queue no longer offers"
    assert set(settings["rates"]) == set(settings["gpus"]) == set(environment.max_instances)


def test_no_figure_is_no_all_clear(account: Any) -> None:
    alarms = account.resources(TRAINING, "AWS::CloudWatch::Alarm")
    found = {
        (item["MetricName"], item["Statistic"]): (item["TreatMissingData"], item["ComparisonOperator"])
        for name, item in alarms.items()
        if name.startswith("BudgetMeter")
    }
    reached = "GreaterThanOrEqualToThreshold"
    assert found == {
        ("BudgetUsedPercent-local", "Maximum"): ("ignore", reached),
        ("UnpricedJobs-local", "Maximum"): ("ignore", reached),
        ("LongestWaitSeconds-local", "Maximum"): ("notBreaching", reached),
        ("Errors", "Sum"): ("notBreaching", reached),
        # Lambda's own count, which no job's log line can add to.
        ("Invocations", "Sum"): ("breaching", "LessThanThreshold"),
    }


@pytest.mark.parametrize(("tenant", "says"), [("acme", False), ("globex", True)])
def test_only_where_a_broker_submits_it_is_said_to_start_no_job(account: Any, tenant: str, says: bool) -> None:
    alarms = account.resources(f"trainyard-local-{tenant}-training", "AWS::CloudWatch::Alarm").values()
    (spent,) = (item["AlarmDescription"] for item in alarms if "budget is spent" in item["AlarmDescription"])
    assert ("the broker starts no job" in spent) is says


def test_the_tenants_topic_hears_of_the_warning_and_of_the_end(account: Any) -> None:
    alarms = account.resources(TRAINING, "AWS::CloudWatch::Alarm")
    found = {name: item for name, item in alarms.items() if name.startswith("BudgetMeter")}
    thresholds = {item["Threshold"] for item in found.values() if item.get("Statistic") == "Maximum"}
    assert thresholds == {80, 100, 1, 3600}
    assert all(item["AlarmActions"] for item in found.values())


def test_its_role_may_stop_the_tenants_jobs_and_start_none(decide: Any) -> None:
    own = "arn:aws:sagemaker:us-east-1:123456789012:training-job/acme-llama-1"
    other = own.replace("acme-", "globex-")
    assert decide("acme", "Guard", "sagemaker:ListTrainingJobs", "*") == "Allow"
    assert decide("acme", "Guard", "sagemaker:StopTrainingJob", own) == "Allow"
    assert decide("acme", "Guard", "sagemaker:StopTrainingJob", other) != "Allow"
    assert decide("acme", "Guard", "sagemaker:CreateTrainingJob", own) != "Allow"
