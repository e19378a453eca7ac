"""The command line put together, and every error turned into one line and an exit code."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
import typer.exceptions

from trainyard import __version__
from trainyard.cli import (
    canarying,
    checkpoints,
    comparing,
    costing,
    deploying,
    doctor,
    emulator,
    exporting,
    isolation,
    jobs,
    planning,
    prices,
    sweeping,
    tenants,
    watching,
)
from trainyard.cli.output import report_error
from trainyard.errors import InputError, TrainyardError

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

app = typer.Typer(
    name="trainyard",
    help="Train large models on AWS: plan a job, launch it, bring it home.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainyard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train large models on AWS: plan a job, launch it, bring it home."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


planning.register(app)
jobs.register(app)
sweeping.register(app)
canarying.register(app)
watching.register(app)
comparing.register(app)
costing.register(app)
checkpoints.register(app)
exporting.register(app)
deploying.register(app)
doctor.register(app)
isolation.register(app)
app.add_typer(emulator.app, name="emulator")
app.add_typer(prices.app, name="prices")
app.add_typer(tenants.app, name="tenant")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Never a traceback for what a person or AWS did wrong."""
    command = typer.main.get_command(app)
    try:
        result = command.main(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name="trainyard", standalone_mode=False
        )
        sys.stdout.flush()  # here a full disk is one line; when the interpreter ends it is its own complaint
    except TrainyardError as error:
        report_error(error)
        return error.exit_code
    except OSError as error:
        from trainyard.launch.session import unwritable  # only here: it brings boto3

        if (told := unwritable(error)) is None:
            raise
        report_error(told)
        _give_up_output()
        return told.exit_code
    except typer.exceptions.TyperException as error:
        # An unknown verb, option or value: typer knows the context only of these.
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else "trainyard"
        said = error.format_message().replace("Value error, ", "")
        if not said:  # a group without a verb, whose help was printed
            return 0
        report_error(InputError(f"{said} (see {verb} --help)"))
        return InputError.exit_code
    except typer.Abort:
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _give_up_output() -> None:
    """What stdout still holds and can't take, goes nowhere: the interpreter would try once more, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
