"""What an alarm's text has typed first: the functions' words, and the connections that were refused."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from trainyard.cli.app import run
from trainyard.launch.session import checkout_root
from trainyard.operate.tenants import logs, survey

ENVIRONMENT = checkout_root() / "environments/local.yaml"
FLOW = "2 123456789012 eni-1 10.64.0.5 10.64.0.9 40000 988 6 3 180 1 2 {} OK"
SAID = "stopping acme-x: NETWORK: no subnet of the tenant's"


class Account:
    """Log groups of an account, and nothing else."""

    def client(self, service: str) -> Any:
        return boto3.client(service, region_name="us-east-1")  # type: ignore[call-overload]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    with mock_aws():
        client = Account().client("logs")

        def write(group: str, stream: str, *lines: str, hours_ago: float = 0.1) -> None:
            client.create_log_stream(logGroupName=group, logStreamName=stream)
            at = int(1000 * (time.time() - 3600 * hours_ago))
            events = [{"timestamp": at + index, "message": line} for index, line in enumerate(lines)]
            client.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)

        for group in ("functions", "flows"):
            client.create_log_group(logGroupName=group)
        monkeypatch.setattr("trainyard.launch.session.open_account", lambda _: Account())
        contract = type("Contract", (), {"log_group": "functions"})
        monkeypatch.setattr(logs, "read_contract", lambda *_: contract)
        groups = {"LogsGroup0A": "functions", "LogsFlows0B": "flows"}
        held = [survey.Held("AWS::Logs::LogGroup", "stack", name, group, True) for name, group in groups.items()]
        monkeypatch.setattr(survey, "held", lambda *_: iter(held))
        yield write


def test_all_functions_words_are_there_and_lambdas_own_are_not(
    written: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    written("functions", "guard", "START RequestId: 1 Version: 2", SAID, "END RequestId: 1", "REPORT RequestId: 1")
    written("functions", "yesterdays", "old", hours_ago=24)
    assert run(["tenant", "logs", str(ENVIRONMENT), "acme"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f"+00:00 {SAID}"), "with its time"
    assert run(["tenant", "logs", str(ENVIRONMENT), "acme", "--hours", "30"]) == 0
    assert "old" in capsys.readouterr().out


def test_of_the_flows_the_refused_ones_are_told_by_their_ports(
    written: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    written("flows", "eni-1", FLOW.format("ACCEPT"), FLOW.format("REJECT"))
    assert run(["tenant", "logs", str(ENVIRONMENT), "acme", "--rejected"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(" 10.64.0.5:40000 to 10.64.0.9:988")


def test_that_there_is_nothing_is_said(written: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tenant", "logs", str(ENVIRONMENT), "acme"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err == "no line of tenant acme in the last 3 hours; --hours N looks further back\n"
    assert run(["tenant", "logs", str(ENVIRONMENT), "nobody"]) == 2


def test_that_no_flows_are_kept_is_no_quiet_network(
    written: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "held", lambda *_: iter(()))
    assert run(["tenant", "logs", str(ENVIRONMENT), "acme", "--rejected"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "tenant acme: no log group of its network's flows is deployed; deploy the stacks: " in line
