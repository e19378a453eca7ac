"""`trainyard deploy`: `cdk deploy`, after the question whether anything that holds data would be lost by it."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.options import DEFAULT_ENVIRONMENT
from trainyard.cli.output import console, teller, turner
from trainyard.spec.words import counted

if TYPE_CHECKING:
    from trainyard.spec.platform import EnvironmentSpec

EnvironmentArgument = Annotated[
    str, typer.Argument(metavar="ENV.yaml", help="The environment file, or a name for environments/<name>.yaml.")
]


def register(app: typer.Typer) -> None:
    """Put the verb into the command line."""
    app.command()(deploy)


def deploy(
    environment: EnvironmentArgument = DEFAULT_ENVIRONMENT,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", "-t", help="Only this tenant's stacks; may be repeated.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Ask what would be lost, and deploy nothing.")] = False,
    accept_loss: Annotated[
        list[str] | None,
        typer.Option("--accept-loss", metavar="STACK/ID", help="A stateful resource that may go; may be repeated."),
    ] = None,
) -> None:
    """Deploy an environment's stacks; refused where that would replace or drop a bucket, key, file system or network.

    Exit code 2 and one line name what would be lost. A real account must be bootstrapped once:
    cdk bootstrap -c environment=PATH

    Example: trainyard deploy environments/staging.yaml --check
    """
    from trainyard.launch.contract import check_tenant
    from trainyard.launch.place import environment_file
    from trainyard.launch.session import checkout_root, open_account, state_root
    from trainyard.operate import deploy as deployment
    from trainyard.spec.platform import load_environment

    file = environment_file(environment)
    spec = load_environment(file)
    names = [check_tenant(spec, name, "--tenant") for name in tenant or ()]
    stacks = [stack for name in names for stack in deployment.tenant_stacks(spec, name)]
    with console(stderr=True).status("deploying") as spinner:
        if check:
            deployment.check(checkout_root(), file, open_account(spec), stacks, accept_loss or (), teller(spinner))
        else:
            work = state_root() / "deploy" / spec.name
            work.mkdir(parents=True, exist_ok=True)
            deployment.deploy(
                checkout_root(),
                file,
                spec,
                credentials(spec),
                work=work,
                progress=turner(spinner) if sys.stderr.isatty() else lambda _: None,
                stacks=stacks,
                accepted_losses=accept_loss or (),
                say=teller(spinner),
            )
    chosen = stacks or deployment.stack_names(spec)
    print(
        f"{counted(len(chosen), 'stack')}: nothing stateful would be lost"
        if check
        else f"{counted(len(chosen), 'stack')} deployed"
    )


def credentials(environment: "EnvironmentSpec") -> Mapping[str, str]:
    """The AWS_* variables for the CDK CLI: the emulator's for an emulated environment, the caller's for a real one."""
    if not environment.emulated:
        own = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
        return {**own, "AWS_REGION": environment.region}
    from trainyard import emulator
    from trainyard.errors import AwsRefusedError
    from trainyard.launch.session import emulator_state

    info = emulator.find(emulator_state())
    if info is None:
        raise AwsRefusedError("no emulator is running; start it with `trainyard emulator start`")
    emulator.set_quota(info, environment.max_instances)
    return info.environment()
