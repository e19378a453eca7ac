"""`watch`: a job on one live screen, from any machine, at any time of its life. `report`, `track`: its life as one
page, and in MLflow."""

import time
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.options import DEFAULT_ENVIRONMENT, EnvironmentOption, JobId, JsonOption, TenantOption, as_given
from trainyard.cli.output import check_page, console, print_json, write_page
from trainyard.spec.words import counted

TRACK_SECONDS = 15.0
"""Between two looks of --follow: the metrics of a job on AWS come with its checkpoints, minutes apart."""
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default: JOB.html in this folder; - for stdout.")
]
MlflowOption = Annotated[
    str | None,
    typer.Option(
        "--mlflow",
        metavar="URL",
        envvar="MLFLOW_TRACKING_URI",
        help="Address or ARN of the server. Default: the job's, or the tenant's.",
    ),
]


def register(app: typer.Typer) -> None:
    """Put the verb of this file into the command line."""
    app.command()(watch)
    app.command()(report)
    app.command()(track)


def watch(job: JobId, environment: EnvironmentOption = DEFAULT_ENVIRONMENT, tenant: TenantOption = None) -> None:
    """Follow a job to its end: state, steps, loss, speed against plan, checkpoints, money; exit code 1 where it fails.

    Ctrl-C ends the view and not the job. Where stderr is no terminal there is a line for each step.

    Example: trainyard watch acme-stdlib-llama-20260131120000-1a2b
    """
    from trainyard.cli.jobs import begin_tracking, require_completed
    from trainyard.cli.live import follow
    from trainyard.launch.names import job_id_of
    from trainyard.launch.place import place_of

    with console(stderr=True).status("asking"):
        job_id = job_id_of(job)
        place = place_of(job_id, environment, tenant)
        begin_tracking(place.store.read(job_id).record, place, environment)
    options = as_given(environment, tenant)
    last = follow(place, job_id, quiet=False, options=options)
    print(f"{job_id}: {last.state}")
    require_completed(place, last.record, options)


def report(
    job: JobId,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    out: OutOption = None,
) -> None:
    """Write a job's life as one HTML page that needs no network: curves, restarts, plan against measurement, cost.

    Example: trainyard report acme-stdlib-llama-20260131120000-1a2b --out report.html
    """
    from trainyard.launch import watch as watching
    from trainyard.launch.names import job_id_of
    from trainyard.launch.place import place_of
    from trainyard.operate.job_report import report_of

    is_printed = str(out) == "-"
    if out is not None and not is_printed:
        check_page("--out", out)
    with console(stderr=True).status("reading"):
        job_id = job_id_of(job)
        place = place_of(job_id, environment, tenant)
        page = report_of(place.located(watching.status(place.store, place.backend, job_id).record), place.s3)
    if is_printed:
        print(page, end="")
        return
    path = out or Path(f"{job_id}.html")
    write_page("--out", path, page)
    print(path)


def track(
    job: JobId,
    mlflow: MlflowOption = None,
    environment: EnvironmentOption = DEFAULT_ENVIRONMENT,
    tenant: TenantOption = None,
    experiment: Annotated[str, typer.Option("--experiment", help="Default: trainyard/TENANT/NAME OF THE JOB.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep a job in MLflow: its file, plan, settings, metrics, report. Repeated, it tells what is new.

    Example: trainyard track acme-stdlib-llama-20260131120000-1a2b --mlflow http://localhost:5000 --follow
    """
    from trainyard.launch import watch as watching
    from trainyard.launch.names import job_id_of
    from trainyard.launch.place import place_of
    from trainyard.operate.following import experiment_of
    from trainyard.operate.tracking import Server, server_at
    from trainyard.operate.tracking import track as tell

    job_id = job_id_of(job)
    if mlflow is not None and not mlflow.startswith("arn:"):
        Server(mlflow)  # a wrong address is said before AWS is asked for anything
    with console(stderr=True).status("asking") as spinner:
        place = place_of(job_id, environment, tenant)
        asked = place.store.read(job_id).record.spec.tracking
        server = server_at(mlflow or asked.mlflow or "", place.account, place.tracking_server)
        while True:
            current = watching.status(place.store, place.backend, job_id)
            record = place.located(current.record)
            name = experiment or asked.experiment or experiment_of(record)
            is_last = current.finished or not follow
            told = tell(server, record, place.s3, experiment=name, with_page=is_last)
            spinner.update(f"{job_id}: {current.state}, {counted(told.num_steps, 'new step')}")
            if is_last:
                break
            time.sleep(TRACK_SECONDS)
    if as_json:
        print_json(told.__dict__)
    else:
        print(told.url)
