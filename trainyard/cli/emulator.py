"""`trainyard emulator`: AWS on this machine, started, stopped, looked at."""

import dataclasses
import shlex
from typing import Annotated, Any

import typer

from trainyard.cli.options import JsonOption
from trainyard.cli.output import console, print_json
from trainyard.errors import InputError

app = typer.Typer(help="AWS on this machine: start, stop, status, environment, types.", no_args_is_help=False)

PortOption = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="A fixed port; default: a free one.")]
IdleOption = Annotated[
    float, typer.Option("--idle-exit", min=1, help="Minutes without requests and jobs, after which it ends itself.")
]


@app.callback(invoke_without_command=True)
def _no_verb(context: typer.Context) -> None:
    """AWS on this machine: start, stop, status, environment, types."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def start(port: PortOption = None, idle_exit: IdleOption = 30.0, as_json: JsonOption = False) -> None:
    """Start the emulator, or find the one that runs.

    Example: trainyard emulator start --port 4570
    """
    from trainyard import emulator
    from trainyard.launch.session import emulator_state

    with console(stderr=True).status("starting AWS on this machine"):
        info = emulator.start(emulator_state(), port=port, idle_exit_seconds=idle_exit * 60)
    if as_json:
        print_json(_public(info))
        return
    print(
        f"{'started' if info.started_now else 'runs already'}: {info.endpoint} (account {info.account}, pid {info.pid})"
    )
    if info.started_now:
        print("nothing is deployed in it yet: scripts/quickstart")


@app.command()
def stop() -> None:
    """Stop the emulator and every job that runs in it. What was deployed in it is gone.

    Example: trainyard emulator stop
    """
    from trainyard import emulator
    from trainyard.launch.session import emulator_state

    print("stopped" if emulator.stop(emulator_state()) else "no emulator was running")


@app.command()
def status(as_json: JsonOption = False) -> None:
    """Say whether the emulator runs, and where. Exit code 1 where it doesn't.

    Example: trainyard emulator status --json
    """
    from trainyard import emulator
    from trainyard.launch.session import emulator_state

    info = emulator.find(emulator_state())
    if as_json:
        print_json({"running": info is not None, **(_public(info) if info else {})})
    elif info:
        print(f"runs: {info.endpoint} (account {info.account}, region {info.region}, pid {info.pid})")
    else:
        print("not running: trainyard emulator start")
    if info is None:
        raise typer.Exit(1)


@app.command()
def environment() -> None:
    """Print what points a shell's AWS tools at it, as the account's administrator: for eval, or a file to source.

    Exit code 1 where it doesn't run.

    Example: trainyard emulator environment > .trainyard/emulator.sh && . .trainyard/emulator.sh
    """
    from trainyard import emulator
    from trainyard.launch.session import emulator_state

    info = emulator.find(emulator_state())
    if info is None:
        typer.echo("not running: trainyard emulator start", err=True)
        raise typer.Exit(1)
    for name, value in info.environment().items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def types(as_json: JsonOption = False) -> None:
    """List the CloudFormation types it knows: backed by an API, or only recorded. Any other type fails a deploy.

    Example: trainyard emulator types
    """
    try:
        from trainyard.emulator.cloudformation.catalogue import describe_types
    except ModuleNotFoundError as error:
        raise InputError(f"the emulator needs {error.name}, which isn't installed; run scripts/setup") from None
    known = describe_types()
    if as_json:
        print_json(known)
        return
    for name, backing in sorted(known.items()):
        print(f"{backing:14} {name}")


def _public(info: Any) -> dict[str, Any]:
    # The root key stays in the state directory, readable by its owner only.
    return {key: value for key, value in dataclasses.asdict(info).items() if not key.startswith("admin_")}
