"""Options that several verbs share."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

ENVIRONMENT_VARIABLE = "TRAINYARD_ENVIRONMENT"
EnvironmentOption = Annotated[
    str,
    typer.Option(
        "--environment",
        "-e",
        metavar="NAME|PATH",
        help="A file, or a name for environments/<name>.yaml.",
        envvar=ENVIRONMENT_VARIABLE,
    ),
]
TenantOption = Annotated[str | None, typer.Option("--tenant", "-t", help="The tenant, where the name doesn't tell.")]
ThisTenantOption = Annotated[
    str | None, typer.Option("--tenant", "-t", help="This tenant alone; default: all of the environment.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the job file; may be repeated."),
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.", show_default=False)]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `launch` printed it.", show_default=False)]

DEFAULT_ENVIRONMENT = "local"


def as_given(environment: str, tenant: str | None = None) -> str:
    """The options with which a command that is printed looks where this one did; empty where it does so by itself."""
    words = []
    if environment != (os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT_ENVIRONMENT):
        words += ["--environment", environment]
    if tenant is not None:
        words += ["--tenant", tenant]
    return "".join(f" {shlex.quote(word)}" for word in words)
