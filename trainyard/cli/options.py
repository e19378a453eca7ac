"""Options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

EnvironmentOption = Annotated[
    str,
    typer.Option(
        "--environment",
        "-e",
        metavar="NAME|PATH",
        help="A file, or a name for environments/<name>.yaml.",
        envvar="TRAINYARD_ENVIRONMENT",
    ),
]
TenantOption = Annotated[str | None, typer.Option("--tenant", "-t", help="The tenant, where the name doesn't tell.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the job file; may be repeated."),
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.", show_default=False)]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `launch` printed it.", show_default=False)]

DEFAULT_ENVIRONMENT = "local"
