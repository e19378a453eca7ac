"""`trainyard isolation`: the proof that no tenant can reach another, from the environment file alone."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.options import JsonOption
from trainyard.cli.output import check_page, console, print_json, write_page


def register(app: typer.Typer) -> None:
    """Put the verb into the command line."""
    app.command()(isolation)


def isolation(
    environment: Annotated[str, typer.Argument(metavar="ENV.yaml", help="The environment file, or its name.")],
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report for an auditor.")] = None,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Also break every statement in turn, and say what each break opens.")
    ] = False,
) -> None:
    """Prove that no tenant's role can touch another tenant's things, and that each can do its own work.

    Synthesizes the environment and evaluates its policies; calls no AWS. Exit code 1 where anything is open or shut
    that should not be.

    Example: trainyard isolation environments/production.yaml --html isolation.html
    """
    from trainyard.isolation import open_site, prove, survey
    from trainyard.isolation.report import lines, page
    from trainyard.launch.place import environment_file
    from trainyard.launch.session import checkout_root

    if html is not None:
        check_page("--html", html)
    spinner = console(stderr=True).status("synthesizing and evaluating")
    if sys.stderr.isatty():
        spinner.start()
    try:
        site = open_site(environment_file(environment), checkout_root())
        broken = survey(site.account) if mutants else None
        proof = prove(site)
    finally:
        spinner.stop()
    if html is not None:
        write_page("--html", html, page(proof, broken))
    if as_json:
        print_json(proof.document() | ({"mutants": broken.document()} if broken else {}))
    else:
        for line in lines(proof, broken):
            print(line)
    if not proof.holds:
        raise typer.Exit(1)
