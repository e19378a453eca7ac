"""`trainyard doctor`: what works here and in an environment, and how to mend what doesn't."""

import sys

import typer

from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JsonOption, ThisTenantOption
from trainyard.cli.output import console, print_json

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


def register(app: typer.Typer) -> None:
    """Put the verb into the command line."""
    app.command()(doctor)


def doctor(
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT, tenant: ThisTenantOption = None, as_json: JsonOption = False
) -> None:
    """Check this machine, the environment and its tenants; exit code 1 where something fails.

    Example: trainyard doctor --environment local --tenant acme
    """
    from rich.text import Text

    from trainyard.launch.place import environment_file
    from trainyard.operate.account_checks import Check
    from trainyard.operate.doctor import examine
    from trainyard.spec.platform import load_environment

    spec = load_environment(environment_file(environment))
    checks: list[Check] = []
    out = console()
    spinner = console(stderr=True).status("checking")
    if sys.stderr.isatty():
        spinner.start()
    try:
        for check in examine(spec, tenant):
            checks.append(check)
            spinner.update(f"checking after {check.name}")
            if not as_json:
                out.print(Text.assemble((f"{check.level:4} ", _COLOURS[check.level]), f"{check.name}: {check.finding}"))
                if check.mend:
                    out.print(Text(f"     mend: {check.mend}"))
    finally:
        spinner.stop()
    if as_json:
        print_json([check.__dict__ for check in checks])
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(1)
