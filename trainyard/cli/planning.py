"""`plan` and `predict`: what a job will need, before it costs anything."""

import sys
from typing import Annotated

import typer

from trainyard.cli.options import JobFile, JsonOption, SetOption
from trainyard.cli.output import console
from trainyard.errors import InputError


def register(app: typer.Typer) -> None:
    """Put the verbs of this file into the command line."""
    for verb in (plan, predict):
        app.command()(verb)


def plan(job: JobFile, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Say what a job will need: memory, time, dollars, and the layout that was chosen.

    Example: trainyard plan jobs/quickstart.yaml --set compute.instance_count=4
    """
    from trainyard import planner
    from trainyard.spec.job import load_job

    result = planner.plan(load_job(job, overrides or []))
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    from trainyard.planner.render import render

    console().print(render(result))


def predict(
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Read one configuration per line of stdin.")] = False,
) -> None:
    """Predict memory and step time of many configurations: one JSON object per line in, one per line out.

    Exit code 2 where a line was wrong: its answer is {"error": ...}, the others are predicted all the same.

    Example: trainyard predict --jsonl < configurations.jsonl > predictions.jsonl
    """
    from trainyard import planner

    if not jsonl:
        raise InputError("predict reads configurations as JSON lines on stdin: trainyard predict --jsonl < FILE")
    errors = planner.Errors()
    for line in planner.predict_jsonl(sys.stdin, errors):
        # Flushed line by line: a program may ask one question, read its answer, and ask the next.
        print(line, flush=True)
    if errors.any:
        raise typer.Exit(InputError.exit_code)
