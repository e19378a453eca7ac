"""New key material for a tenant's keys: what is encrypted stays readable, nothing is deployed, no job is touched."""

import argparse
from datetime import UTC, datetime, timedelta
from typing import Any

from trainyard.errors import AwsRefusedError
from trainyard.launch.aws import aws_errors
from trainyard.operate.runbooks.framework import Finding, call
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "new material for a tenant's keys now, and once a year from then on"
FRESH = timedelta(hours=1)
"""A key that was rotated by hand since is left alone: KMS gives a key few such rotations in its life, and who repeats a
runbook that was interrupted wants the other keys."""


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--tenant", "-t", required=True, help="whose keys")


def run(context: Context) -> None:
    """Every key of the contract: yearly rotation on where it is off, and a rotation now."""
    access = context.tenant(context.options.tenant)
    kms, steps = access.account.client("kms"), []
    for name, key in access.contract.keys.model_dump().items():
        if not key:
            continue
        with aws_errors("asking for the rotation of", f"key {name} ({key})"):
            status = kms.get_key_rotation_status(KeyId=key)
        last, untold = _last_by_hand(kms, name, key)
        yearly = status["KeyRotationEnabled"]
        words = f"key {name}: rotates {'every year' if yearly else 'never by itself'}"
        begun = status.get("OnDemandRotationStartDate")
        is_fresh = last is not None and datetime.now(UTC) - last < FRESH
        if begun is not None:
            words += f"; a rotation is on its way since {begun:%Y-%m-%dT%H:%M:%SZ}, and it gets no other"
        elif last is not None and is_fresh:
            words += f"; was rotated at {last:%Y-%m-%dT%H:%M:%SZ}, less than an hour ago, and is left alone"
        context.report.findings.append(Finding("clear", words, (key,)))
        if untold:
            told = f"key {name}: when it was last rotated by hand can't be told, and it is not left alone: {untold}"
            context.report.findings.append(Finding("unknown", told, (key,)))
        if not yearly:
            steps.append(call(access.account, "kms", "enable_key_rotation", KeyId=key))
        if begun is None and not is_fresh:
            steps.append(call(access.account, "kms", "rotate_key_on_demand", KeyId=key))
    context.perform(steps)


def _last_by_hand(kms: Any, name: str, key: str) -> tuple[datetime | None, str]:
    """When the newest rotation ended that somebody asked for; and why that can't be told, where KMS refuses to say.

    Key policies of an older deployment don't allow it, which must not keep anybody from rotating a key in need.
    """
    try:
        with aws_errors("listing the rotations of", f"key {name} ({key})"):
            pages = kms.get_paginator("list_key_rotations").paginate(KeyId=key)
            moments = [
                one["RotationDate"].astimezone(UTC)
                for page in pages
                for one in page["Rotations"]
                if one.get("RotationType") == "ON_DEMAND"
            ]
    except AwsRefusedError as error:
        return None, str(error)
    return max(moments, default=None), ""


RUNBOOK = Runbook("rotate_keys", SUMMARY, run, options, subject="tenant")
