"""Every alarm, judged as CloudWatch judges it on figures as their producers write them: it rings for its fault and for
nothing else, it ends, and what it says can be pasted at three in the morning."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from trainyard.cli.app import app
from trainyard.operate.runbooks.__main__ import parser_of
from trainyard.operate.runbooks.catalog import BY_NAME

ROOT = Path(__file__).parents[2]
VERBS = typer.main.get_command(app)
Samples = Mapping[int, list[float]]
"""Figures by the number of the period in which they were published."""

COMPARED: dict[str, Callable[[float, float], bool]] = {
    "GreaterThanThreshold": lambda value, limit: value > limit,
    "GreaterThanOrEqualToThreshold": lambda value, limit: value >= limit,
    "LessThanThreshold": lambda value, limit: value < limit,
}
STATISTICS: dict[str, Callable[[list[float]], float]] = {"Maximum": max, "Minimum": min, "Sum": sum}

FAULTS: dict[str, tuple[list[float], list[float], int]] = {
    # Figures of a period in which it is wrong, of one in which all is well, and how many wrong ones it takes.
    "StorageAlmostFull": ([1.0], [10.0**15], 15),
    "TrafficRejected": ([1.0] * 101, [1.0] * 100, 1),
    "ThroughputFast": ([0.9, 0.84], [0.9, 0.86], 2),
    "ThroughputSlow": ([0.9, 0.84], [0.9, 0.86], 4),
    "CheckpointAgeFast": ([30.0, 1300.0], [30.0, 1100.0], 2),
    "CheckpointAgeSlow": ([30.0, 1300.0], [30.0, 1100.0], 4),
    "StartFast": ([301.0], [299.0], 2),
    "StartSlow": ([301.0], [299.0], 4),
    "QueueFast": ([3601.0], [3599.0], 2),
    "QueueSlow": ([3601.0], [3599.0], 4),
    "LaunchFast": ([4201.0], [4199.0], 2),
    "LaunchSlow": ([4201.0], [4199.0], 4),
    "RecoveryFast": ([301.0], [299.0], 2),
    "RecoverySlow": ([301.0], [299.0], 4),
    "GoodputFast": ([0.9, 0.7], [0.9, 0.85], 9),
    "GoodputSlow": ([0.9, 0.7], [0.9, 0.85], 22),
    "JobStopped": ([1.0, -1.0], [], 1),
    "JobNotChecked": ([1.0], [0.0], 1),
    "BudgetMeterWarning": ([80.0], [79.0], 1),
    "BudgetMeterSpent": ([100.0], [99.0], 1),
    "BudgetMeterUnpriced": ([1.0], [0.0], 1),
    "BudgetMeterWaiting": ([3600.0], [0.0], 1),
    "BudgetMeterBlind": ([1.0], [0.0], 3),
    "BudgetMeterSilent": ([], [1.0], 3),
    "BrokerFailed": ([1.0], [0.0], 1),
    "ResumerNotResumed": ([1.0], [0.0], 1),
}
KEEPS_RINGING = {"BudgetMeterWarning", "BudgetMeterSpent", "BudgetMeterUnpriced", "StorageAlmostFull"}
"""Without figures they say what they said: nobody has looked."""


def state(alarm: Mapping[str, Any], samples: Samples, before: str, now: int) -> str:
    """Its state after period `now`, as "Configuring how CloudWatch alarms treat missing data" has it."""
    num_periods = int(alarm["EvaluationPeriods"])
    needed = int(alarm.get("DatapointsToAlarm", num_periods))
    told = [samples.get(number) for number in range(now - num_periods + 1, now + 1)]
    is_bad = lambda value: COMPARED[alarm["ComparisonOperator"]](value, float(alarm["Threshold"]))  # noqa: E731
    bad = [is_bad(STATISTICS[alarm["Statistic"]](values)) if values else None for values in told]
    missing = alarm["TreatMissingData"]
    if all(one is None for one in bad):
        return {"missing": "INSUFFICIENT_DATA", "ignore": before, "breaching": "ALARM", "notBreaching": "OK"}[missing]
    if bad.count(True) + (bad.count(None) if missing == "breaching" else 0) >= needed:
        return "ALARM"
    return before if missing == "ignore" and bad.count(None) > num_periods - needed else "OK"


def played(alarm: Mapping[str, Any], samples: Samples, until: int) -> list[str]:
    """Its states from its making on, by period."""
    states = ["INSUFFICIENT_DATA"]
    for now in range(until):
        states.append(state(alarm, samples, states[-1], now))
    return states[1:]


@pytest.fixture(scope="module")
def alarms(templates: Any) -> dict[str, dict[str, Any]]:
    """Of the local environment, by the name that a mail has, without the tenant; two tenants' have all kinds."""
    found = {}
    for stack, template in templates["local"].items():
        for logical, resource in template["Resources"].items():
            if resource["Type"] == "AWS::CloudWatch::Alarm":
                name = re.sub(r"[0-9A-F]{8}$", "", logical)
                found[re.sub(r"^(Alarms|Objectives|JobGuard)", "", name)] = {"stack": stack, **resource["Properties"]}
    return found


@pytest.mark.slow
def test_each_alarm_has_its_fault_here(alarms: dict[str, Any]) -> None:
    assert set(alarms) == set(FAULTS)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_it_rings_for_its_fault_and_ends_with_it(name: str, alarms: dict[str, Any]) -> None:
    alarm, (wrong, well, lasting) = alarms[name], FAULTS[name]
    window = int(alarm["EvaluationPeriods"])
    begins = 2 * window
    fault = dict.fromkeys(range(begins, begins + lasting), wrong)
    around = {number: well for number in range(begins + lasting + 2 * window) if number not in fault}
    states = played(alarm, {**around, **fault}, begins + lasting + 2 * window)
    assert set(states[window:begins]) == {"OK"}, "all is well"
    assert "ALARM" not in states[begins : begins + lasting - 1] and states[begins + lasting - 1] == "ALARM", (
        "not earlier"
    )
    assert states[-1] == "OK" and "ALARM" not in states[begins + lasting + window :], "it ends within its window"


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_new_tenant_and_a_job_that_ends_ring_nobody(name: str, alarms: dict[str, Any]) -> None:
    alarm, (wrong, _, lasting) = alarms[name], FAULTS[name]
    window = int(alarm["EvaluationPeriods"])
    silent = played(alarm, {}, window)
    assert ("ALARM" in silent) is (name == "BudgetMeterSilent"), "nothing runs yet, and only who looks must look"
    if name == "BudgetMeterSilent":
        return
    ended = played(alarm, dict.fromkeys(range(lasting), wrong), lasting + 2 * window)
    assert ended[lasting - 1] == "ALARM"
    kept = {"missing": "INSUFFICIENT_DATA", "ignore": "ALARM"}.get(alarm["TreatMissingData"], "OK")
    assert (ended[-1] == kept) and (kept != "OK") is (name in KEEPS_RINGING)


def commands(text: str) -> Iterator[list[str]]:
    """What can be typed of an alarm's text."""
    for found in re.findall(r"(?:scripts/runbooks/|\btrainyard )[^,;:.`]*(?:\.md)?", text):
        words = shlex.split(found)
        options = [at for at, word in enumerate(words) if word.startswith("--")]
        # Prose follows the last option's value.
        yield words[: options[-1] + 2] if options else words


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_what_it_says_can_be_pasted(name: str, alarms: dict[str, Any]) -> None:
    """It names tenant and environment, commands that exist with options that they take, and a page that exists."""
    text = alarms[name]["AlarmDescription"]
    tenant = alarms[name]["stack"].split("-")[2]
    assert f"enant {tenant}" in text and len(text) <= 1024
    pages = re.findall(r"docs/[\w/]+\.md", text)
    assert all((ROOT / page).is_file() for page in pages)
    found = list(commands(text))
    assert found, "what to type first: a page alone is none"
    for first, *words in found:
        if words[0] == "tenant":
            assert words[1:4] == ["logs", "local", tenant]
            of_tenants = VERBS.get_command(VERBS.make_context("trainyard", list(words)), "tenant")  # type: ignore[attr-defined]
            of_tenants.get_command(of_tenants.make_context("tenant", words[1:]), "logs").make_context("logs", words[2:])
            continue
        assert words[-2:] == ["--environment", "local"] or "--environment local" in shlex.join(words), (first, words)
        # Without it a verb that names no job is of all tenants.
        assert ("--tenant" in words) is ("JOB" not in words) and (
            "JOB" in words or words[words.index("--tenant") + 1] == tenant
        )
        if first == "trainyard":
            context = VERBS.make_context("trainyard", list(words), resilient_parsing=False)
            verb = VERBS.get_command(context, words[0])  # type: ignore[attr-defined]
            assert verb is not None and verb.make_context(words[0], words[1:]), words
        else:
            options = parser_of(BY_NAME[first.rpartition("/")[2]]).parse_args(words)
            assert isinstance(options, argparse.Namespace) and options.environment == "local"


def test_the_table_of_the_page_has_each_alarm() -> None:
    """What a mail names is found there, whole or by its ending."""
    page = (ROOT / "docs/runbooks/README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| the alarm \|.*?\n\n", page, re.DOTALL)
    first = " ".join(row.split("|")[1] for row in table.splitlines()[2:] if "|" in row)
    for name in FAULTS:
        plain = name.removesuffix("Fast").removesuffix("Slow")
        word = plain.removeprefix("BudgetMeter").removeprefix("Broker").removeprefix("Resumer")
        assert re.search(rf"\b{word}\b", first), name
