"""The live meter in the templates: how often it looks, what it knows, whom it tells."""

import json
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


def test_every_five_minutes_the_meter_is_called(account: Any) -> None:
    rules = account.resources(TRAINING, "AWS::Events::Rule").values()
    (rule,) = (item for item in rules if "ScheduleExpression" in item)
    assert rule["ScheduleExpression"] == "rate(5 minutes)"
    (target,) = rule["Targets"]
    assert "BudgetMeter" in target["Arn"] or "budgetmeter" in target["Arn"]


def test_it_knows_exact_prices_gpus_and_the_quotas(settings: dict[str, Any]) -> None:
    from trainyard.hardware import price

    on_demand = price("ml.p5.4xlarge", "us-east-1").usd_per_hour
    assert settings["rates"]["ml.p5.4xlarge"]["on_demand"] == str(on_demand), "text: no float on the way"
    assert settings["gpus"] == {"ml.p5.4xlarge": 1}
    assert settings["budget"] == {"monthly_usd": 5000.0, "monthly_gpu_hours": None, "when_spent": "finish"}
    assert settings["prefixes"][0] == "acme-" and settings["queues"] == []


def test_the_tenants_topic_hears_of_the_warning_and_of_the_end(account: Any) -> None:
    alarms = account.resources(TRAINING, "AWS::CloudWatch::Alarm")
    found = {name: item for name, item in alarms.items() if name.startswith("BudgetMeter")}
    thresholds = {item["Threshold"] for item in found.values() if item["MetricName"] == "BudgetUsedPercent-local"}
    assert thresholds == {80, 100}
    assert all(item["AlarmActions"] for item in found.values())


def test_its_role_may_stop_the_tenants_jobs_and_start_none(decide: Any) -> None:
    own = "arn:aws:sagemaker:us-east-1:123456789012:training-job/acme-llama-1"
    other = own.replace("acme-", "globex-")
    assert decide("acme", "Guard", "sagemaker:ListTrainingJobs", "*") == "Allow"
    assert decide("acme", "Guard", "sagemaker:StopTrainingJob", own) == "Allow"
    assert decide("acme", "Guard", "sagemaker:StopTrainingJob", other) != "Allow"
    assert decide("acme", "Guard", "sagemaker:CreateTrainingJob", own) != "Allow"
