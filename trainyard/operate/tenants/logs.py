"""What a tenant's functions (broker, meter, detective, resumer) wrote, and which connections its network refused."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from trainyard.errors import AwsRefusedError
from trainyard.launch.aws import aws_errors
from trainyard.launch.contract import how_to_deploy, read_contract
from trainyard.launch.session import Account
from trainyard.operate.tenants import survey
from trainyard.spec.platform import EnvironmentSpec

NOTHING_OF_OURS = ("START RequestId", "END RequestId", "REPORT RequestId", "INIT_START")
"""How lines begin that Lambda writes about each call."""
REFUSED = "REJECT"
"""The word of a flow log's line for a connection that a security group refused; others' lines hold no such word."""


def function_lines(account: Account, environment: EnvironmentSpec, tenant: str, *, hours: float) -> Iterator[str]:
    """All functions' lines of the last hours, oldest first of each page, with their times."""
    group = read_contract(account, environment, tenant).log_group
    for at, text in _events(account, group, hours):
        if not text.startswith(NOTHING_OF_OURS):
            yield f"{at} {text}"


def refused_connections(account: Account, environment: EnvironmentSpec, tenant: str, *, hours: float) -> Iterator[str]:
    """The flow logs' lines of refused connections, as `FROM:PORT to TO:PORT`; AwsRefusedError where none are kept."""
    group = next((one.physical_id for one in survey.held(account, environment, tenant) if _is_of_flows(one)), None)
    if group is None:
        raise AwsRefusedError(
            f"tenant {tenant}: no log group of its network's flows is deployed; {how_to_deploy(environment)}"
        )
    for at, text in _events(account, group, hours, filterPattern=REFUSED):
        fields = text.split()
        if len(fields) == 14 and fields[12] == REFUSED:
            yield f"{at} {fields[3]}:{fields[5]} to {fields[4]}:{fields[6]}"


def _is_of_flows(held: survey.Held) -> bool:
    # Its construct's name in stacks/constructs/logs.py.
    return held.kind == "AWS::Logs::LogGroup" and "Flows" in held.logical_id


def _events(account: Account, group: str, hours: float, **only: Any) -> Iterator[tuple[str, str]]:
    since = datetime.now(UTC) - timedelta(hours=hours)
    with aws_errors("reading", f"log group {group}"):
        pages = account.client("logs").get_paginator("filter_log_events")
        for page in pages.paginate(logGroupName=group, startTime=int(1000 * since.timestamp()), **only):
            for event in page["events"]:
                at = datetime.fromtimestamp(event["timestamp"] / 1000, UTC).isoformat(timespec="seconds")
                yield at, event["message"].rstrip()
