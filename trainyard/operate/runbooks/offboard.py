"""A tenant leaves: its data by its policy, as a rule made unreadable with its keys; with a report of what is left."""

import argparse

from trainyard.errors import InputError
from trainyard.launch.contract import check_tenant
from trainyard.operate.runbooks.framework import Finding, command
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "a tenant leaves: its keys and data are shredded (or kept, by its policy), and what is left is listed"


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--tenant", "-t", required=True, help="who leaves")
    parser.add_argument("--keep-data", action="store_true", help="its policy keeps the data, and that is meant")
    parser.add_argument(
        "--ended",
        action="append",
        default=[],
        metavar="JOB",
        help="a job that can't run any longer, though its cluster gives no answer",
    )


def run(context: Context) -> None:
    """The removal's own plan first; then the removal, which refuses while jobs run."""
    given, environment, path = context.options, context.environment, str(context.environment_path)
    check_tenant(environment, given.tenant, "--tenant")
    policy = environment.data_on_removal(given.tenant)
    if policy != "shred" and not given.keep_data:
        raise InputError(
            f"tenant {given.tenant}: its data would be kept (removal.data is {policy}); to shred them, set removal: "
            f"{{data: shred}} in {path} (no deployment is needed), or give --keep-data"
        )
    words = (
        "its keys serve nobody from then on: no copy or backup under them can be read" if policy == "shred" else "kept"
    )
    context.report.findings.append(Finding("clear", f"removal.data is {policy}: {words}"))
    remove = ("tenant", "remove", path, given.tenant, *(word for job in given.ended for word in ("--ended", job)))
    context.perform([command(*remove, changes=False), command(*remove, "--confirm", given.tenant)])


RUNBOOK = Runbook("offboard", SUMMARY, run, options, subject="tenant")
