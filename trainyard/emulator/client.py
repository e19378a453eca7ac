"""Calls of the emulator's own endpoints, for programs on this machine."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from trainyard.emulator.info import ADMIN_HEADER, CONTROL_PREFIX, EmulatorInfo, open_here
from trainyard.errors import AwsRefusedError, InputError

_TIMEOUT_SECONDS = 120.0


def reclaim_after(info: EmulatorInfo, training_job_name_prefix: str, *, log_pattern: str, notice: bool) -> None:
    """The next job of that name prefix loses its spot capacity once its first host logs a line that matches.

    With `notice` it gets SIGTERM and 120 s; without, every process is killed at once.
    """
    _call(
        info,
        "reclaim-plan",
        {"training_job_name_prefix": training_job_name_prefix, "after_log_pattern": log_pattern, "notice": notice},
    )


def set_quota(info: EmulatorInfo, max_instances: Mapping[str, int]) -> None:
    """How many instances of each SageMaker type the account may hold at once."""
    _call(info, "quota", dict(max_instances))


def set_prices(info: EmulatorInfo, rows: Sequence[Mapping[str, str]] | None) -> None:
    """The account's prices: rows with instance, region, zone, purchase ("sagemaker on-demand" too), price and as_of.

    They replace all that were; None: those of the shipped table.
    """
    _call(info, "prices", {"rows": None if rows is None else [dict(row) for row in rows]})


def throttle(info: EmulatorInfo, action: str, calls: int) -> None:
    """The next `calls` of an action ("pricing:GetProducts") are refused as too many, as its service says so."""
    _call(info, "throttle", {"action": action, "calls": calls})


def job_attempts(info: EmulatorInfo, training_job_name: str) -> list[dict[str, Any]]:
    """Per attempt of a job: `pids` by host, rendezvous `port`, and times."""
    return list(_call(info, f"jobs/{training_job_name}")["attempts"])


def deliveries(info: EmulatorInfo) -> list[dict[str, Any]]:
    """What EventBridge's rules brought to functions, oldest first: see `trainyard.emulator.functions.events`."""
    return list(_call(info, "deliveries")["deliveries"])


def fail_jobs(info: EmulatorInfo, training_job_name_prefix: str, *, reason: str, after_log_pattern: str = "") -> None:
    """The next job of that name prefix fails with SageMaker's own `reason`, whatever its code does.

    Before it has machines; or, with `after_log_pattern`, once its first host logs a line that matches: every process
    is killed at once, as where a machine is lost.
    """
    _call(
        info,
        "failure-plan",
        {
            "training_job_name_prefix": training_job_name_prefix,
            "reason": reason,
            "after_log_pattern": after_log_pattern,
        },
    )


def _call(info: EmulatorInfo, path: str, body: dict[str, Any] | None = None) -> Any:
    data, headers = None, {}
    if body is not None:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", ADMIN_HEADER: info.admin_secret_access_key}
    request = urllib.request.Request(info.endpoint + CONTROL_PREFIX + path, data=data, headers=headers)
    try:
        with open_here(request, _TIMEOUT_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise InputError(f"emulator, {path}: {json.load(error).get('error', error.reason)}") from None
    except OSError as error:
        raise AwsRefusedError(f"the emulator at {info.endpoint} doesn't answer ({error}); start it again") from None
