"""`watch`: a job on one live screen, from any machine, at any time of its life."""

import typer

from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JobId, TenantOption
from trainyard.cli.output import console


def register(app: typer.Typer) -> None:
    """Put the verb of this file into the command line."""
    app.command()(watch)


def watch(job: JobId, environment: EnvironmentOption = DEFAULT_ENVIRONMENT, tenant: TenantOption = None) -> None:
    """Follow a job to its end: state, steps, loss, speed against plan, checkpoints, money; exit code 1 where it fails.

    Ctrl-C ends the view and not the job. Where stderr is no terminal there is a line for each step.

    Example: trainyard watch acme-stdlib-llama-20260131120000-1a2b
    """
    from trainyard.cli.jobs import require_completed
    from trainyard.cli.live import follow
    from trainyard.launch.names import job_id_of
    from trainyard.launch.place import place_of

    with console(stderr=True).status("asking"):
        job_id = job_id_of(job)
        place = place_of(job_id, environment, tenant)
    last = follow(place, job_id, quiet=False)
    print(f"{job_id}: {last.state}")
    require_completed(place, last.record)
