"""New key material for a tenant's keys: what is encrypted stays readable, nothing is deployed, no job is touched."""

import argparse

from trainyard.launch.aws import aws_errors
from trainyard.operate.runbooks.framework import Finding, call
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "new material for a tenant's keys now, and once a year from then on"


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
            yearly = kms.get_key_rotation_status(KeyId=key)["KeyRotationEnabled"]
        words = f"key {name}: rotates {'every year' if yearly else 'never by itself'}"
        context.report.findings.append(Finding("clear", words, (key,)))
        if not yearly:
            steps.append(call(access.account, "kms", "enable_key_rotation", KeyId=key))
        steps.append(call(access.account, "kms", "rotate_key_on_demand", KeyId=key))
    context.perform(steps)


RUNBOOK = Runbook("rotate_keys", SUMMARY, run, options, subject="tenant")
