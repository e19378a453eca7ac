"""Become a tenant's operator for an hour, end that, and see who has been it."""

import argparse
import errno
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from trainyard.errors import InputError, TrainyardError
from trainyard.launch.aws import aws_errors
from trainyard.launch.place import TenantAccess
from trainyard.operate.runbooks.framework import Finding, Step, call, keep
from trainyard.operate.runbooks.runbook import Context, Runbook
from trainyard.operate.tenants.revocations import POLICY, closed_before
from trainyard.spec.words import counted

SUMMARY = "become a tenant's operator for an hour (open), end it (close), see who has been it (audit)"
SESSION_SECONDS = 3600
GLOBAL_REGION = "us-east-1"
"""Whose event history has what STS's global endpoint was asked."""
AUDIT_DAYS = 90
"""CloudTrail's event history reaches as far."""


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("verb", choices=("open", "close", "audit"))
    parser.add_argument("--tenant", "-t", required=True, help="whose operator")
    parser.add_argument("--reason", help="open: why; it is in the session's name, which CloudTrail keeps")
    parser.add_argument("--mfa-serial", help="open: ARN of your second factor's device")
    parser.add_argument("--mfa-code", help="open: the code that it shows now")


def run(context: Context) -> None:
    """One of the three."""
    access = context.tenant(context.options.tenant)
    role = access.contract.roles.operator
    if not role:
        raise InputError(f"tenant {context.options.tenant}: has no operator role; deploy its stacks again")
    if context.options.verb == "audit":
        context.report.findings += _audit(context, access, role)
    elif context.options.verb == "close":
        context.perform([_close(access, role)])
    else:
        step = _open(context, access, role)
        if not context.dry_run:
            _credentials_file(context.report.folder).close()  # where there can be none, nothing is begun
        context.perform([step])


def _open(context: Context, access: TenantAccess, role: str) -> Step:
    given = context.options
    if not given.reason:
        raise InputError("--reason: missing; say in a few words why, CloudTrail keeps it")
    session = "".join(letter if letter.isalnum() else "-" for letter in given.reason)[:48].strip("-")
    asked: dict[str, Any] = {"RoleArn": role, "RoleSessionName": session, "DurationSeconds": SESSION_SECONDS}
    if given.mfa_serial or given.mfa_code:
        if not (given.mfa_serial and given.mfa_code):
            raise InputError("--mfa-serial and --mfa-code: give both")
        asked |= {"SerialNumber": given.mfa_serial, "TokenCode": given.mfa_code}
    shown = {name: "..." if name == "TokenCode" else value for name, value in asked.items()}

    def make() -> str:
        mend = "show a second factor: --mfa-serial ARN --mfa-code CODE of your IAM user"
        with _credentials_file(context.report.folder) as file:  # a code of the second factor is good once
            with aws_errors("assuming", role, mend):
                answer = access.account.client("sts").assume_role(**asked)["Credentials"]
            _write_credentials(file, answer)
        return f". {file.name}   # until {answer['Expiration']}; then: break_glass close, which also ends it at once"

    return Step(call(access.account, "sts", "assume_role", **shown).words, make)


def _credentials_file(folder: Path) -> BinaryIO:
    """A file that only the caller can read, also where it was there already; what it holds stays until it is written.
    InputError where there can be none."""
    path = folder / "operator.sh"
    try:
        return open(str(path), "r+b", buffering=0, opener=_opened_to_the_caller)
    except OSError as error:
        raise InputError(
            f"--evidence {folder}: {path.name} can't be written ({error.strerror}); give another folder"
        ) from None


def _opened_to_the_caller(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _write_credentials(file: BinaryIO, answer: dict[str, Any]) -> None:
    """No secret is printed, nor in the report: they are here alone."""
    names = {"ACCESS_KEY_ID": "AccessKeyId", "SECRET_ACCESS_KEY": "SecretAccessKey", "SESSION_TOKEN": "SessionToken"}
    content = "".join(f"export AWS_{name}={answer[key]}\n" for name, key in names.items()).encode()
    try:
        file.truncate(0)
        if file.write(content) < len(content):  # a full disk takes a part of it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise InputError(f"--evidence: {file.name} can't be written ({error.strerror}); give another folder") from None


def _close(access: TenantAccess, role: str) -> Step:
    name = role.rpartition("/")[2]
    asked = {"RoleName": name, "PolicyName": POLICY, "PolicyDocument": json.dumps(closed_before(datetime.now(UTC)))}
    return call(access.account, "iam", "put_role_policy", **asked)


def _audit(context: Context, access: TenantAccess, role: str) -> list[Finding]:
    """Each time that somebody became the operator, from CloudTrail's own history; refusals that name the role too."""
    findings: list[Finding] = []
    uses: list[dict[str, Any]] = []
    read: list[str] = []
    for region in dict.fromkeys((access.contract.region, GLOBAL_REGION)):
        try:
            uses += _uses(access, role, region)
        except TrainyardError as error:
            findings.append(Finding("unknown", f"who has been the operator by {region}'s STS can't be told: {error}"))
        else:
            read.append(region)
    keep(context.report.folder, "uses.json", uses)
    if read:
        told = tuple(_use(one) for one in sorted(uses, key=lambda one: str(one.get("eventTime"))))
        where = f"by the event history of {' and '.join(read)}; what another region's STS was asked is in that one's"
        findings.append(Finding("clear", f"{counted(len(uses), 'use')} of {role} in {AUDIT_DAYS} days, {where}", told))
    return findings


def _uses(access: TenantAccess, role: str, region: str) -> list[dict[str, Any]]:
    """What a region's history says of the role. It is asked by the role: of all that is assumed in a busy account three
    months would take hours, at the 100 events a second that AWS gives out."""
    with aws_errors("reading", f"CloudTrail's event history in {region}"):
        pages = (
            access.account.client("cloudtrail", region)
            .get_paginator("lookup_events")
            .paginate(
                LookupAttributes=[{"AttributeKey": "ResourceName", "AttributeValue": role}],
                StartTime=datetime.now(UTC) - timedelta(days=AUDIT_DAYS),
            )
        )
        events = [json.loads(event["CloudTrailEvent"]) for page in pages for event in page["Events"]]
    assumed = [one for one in events if one.get("eventName") == "AssumeRole"]
    return [one for one in assumed if (one.get("requestParameters") or {}).get("roleArn") == role]


def _use(event: dict[str, Any]) -> str:
    who = (event.get("userIdentity") or {}).get("arn", "?")
    why = (event.get("requestParameters") or {}).get("roleSessionName", "")
    refused = f", refused: {event['errorCode']}" if event.get("errorCode") else ""
    return f"{event.get('eventTime', '?')} {who}: {why}{refused}"


RUNBOOK = Runbook(
    "break_glass",
    SUMMARY,
    run,
    options,
    subject="tenant",
    example='open --tenant acme --environment production --reason "INC-1234: a shard by hand"',
)
