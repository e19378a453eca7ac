"""A tenant comes: its entry, its stacks, and the proof that it works."""

import argparse

from trainyard.errors import InputError
from trainyard.operate.runbooks.framework import Step, command
from trainyard.operate.runbooks.runbook import Context, Runbook
from trainyard.operate.tenants.entry import queue_of
from trainyard.spec.platform import TenantSpec

SUMMARY = "a tenant comes: its entry, its stacks, and the checks that it works"


def options(parser: argparse.ArgumentParser) -> None:
    """Its own: those of `trainyard tenant add`."""
    parser.add_argument("--tenant", "-t", required=True, help="its name")
    parser.add_argument("--queue", action="append", default=[], metavar="NAME=TYPE[,TYPE]:MAX")
    parser.add_argument("--monthly-usd", metavar="USD", help="its budget")
    parser.add_argument("--notify", action="append", default=[], metavar="MAIL", help="who hears of it")
    parser.add_argument("--cost-center", help="who pays")
    parser.add_argument("--like", metavar="TENANT", help="take what isn't given from it")


def run(context: Context) -> None:
    """Write, deploy, check. A dry run synthesizes the new stacks, and says what they cost."""
    given, path = context.options, str(context.environment_path)
    if given.tenant in context.environment.tenants:
        _refuse_others(given, context.environment.tenant(given.tenant), path)
    words = [word for value in given.queue for word in ("--queue", value)]
    words += [word for value in given.notify for word in ("--notify", value)]
    for option in ("monthly_usd", "cost_center", "like"):
        if getattr(given, option) is not None:
            words += [f"--{option.replace('_', '-')}", getattr(given, option)]
    add = ("tenant", "add", path, given.tenant, *words)
    preview: list[Step] = []
    if context.dry_run and given.tenant not in context.environment.tenants:
        preview = [command(*add, "--dry-run", changes=False)]
    # Whoever was interrupted after the entry was written goes on with its deployment.
    entry = [] if given.tenant in context.environment.tenants else [command(*add)]
    context.perform(
        [
            *preview,
            *entry,
            command("deploy", path, "--tenant", given.tenant),
            command("doctor", "--environment", path, "--tenant", given.tenant),
        ]
    )


def _refuse_others(given: argparse.Namespace, entry: TenantSpec, path: str) -> None:
    """InputError for an option that says other than the entry that is there, which nobody would hear of."""
    there = {name: (set(queue.instance_types), queue.max_instances) for name, queue in entry.queues.items()}
    queues = {
        name: (set(queue["instance_types"]), queue["max_instances"]) for name, queue in map(queue_of, given.queue)
    }
    asked = {
        "--monthly-usd": given.monthly_usd is None or _is_number(given.monthly_usd, entry.budget.monthly_usd),
        "--notify": not given.notify or set(given.notify) == set(entry.budget.notify),
        "--cost-center": given.cost_center is None or given.cost_center == entry.cost_center,
        "--queue": not queues or queues == there,
    }
    if other := [option for option, is_so in asked.items() if not is_so]:
        raise InputError(
            f"{', '.join(other)}: tenant {given.tenant} is in {path} already, and its entry says otherwise; edit it "
            "there, then trainyard deploy, or leave the option out to go on with the entry as it is"
        )


def _is_number(text: str, number: float) -> bool:
    try:
        return float(text) == number
    except ValueError:
        return False


RUNBOOK = Runbook(
    "onboard",
    SUMMARY,
    run,
    options,
    subject="tenant",
    example="--tenant initech --like acme --environment production --yes",
)
