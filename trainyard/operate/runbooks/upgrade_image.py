"""Another training image: released, tried by a canary job, and kept, or rolled back."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainyard.errors import AwsRefusedError, JobFailedError
from trainyard.launch.aws import aws_errors
from trainyard.launch.compare import metrics_rows
from trainyard.launch.session import checkout_root
from trainyard.operate.image import publish
from trainyard.operate.runbooks.figures import diverged, speed
from trainyard.operate.runbooks.framework import Finding, Step, keep, trainyard_command
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "another training image: released, tried by a canary job, kept or rolled back"
SLOWER = 1.10
"""So many times the baseline's step is too slow: runs of one image differ by a few percent."""
WORSE = 1.02
"""So many times the baseline's last loss is worse: the canary repeats the same job with the same seed."""


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--digest", required=True, metavar="sha256:...", help="of an image that is in the repository")
    parser.add_argument("--canary", required=True, type=Path, metavar="JOB.yaml", help="a short job that must complete")
    parser.add_argument(
        "--baseline", metavar="JOB", help="the same job with the old image: step time and loss to reach"
    )
    parser.add_argument("--tenant", "-t", help="whose job the baseline is, where its name doesn't tell")


def judge(canary: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """Why the image is not kept, empty where it is; and the figures. Pure; `baseline` may be empty."""
    now, before = speed(canary, {}), speed(baseline, {})
    if now is None:
        return "the canary made no step", ()
    figures = [f"canary: {now.as_line()}, last loss {canary[-1].get('loss')}"]
    if broken := diverged(canary):
        return f"the canary's loss diverged: {broken}", tuple(figures)
    if before is None:
        return "", tuple(figures)
    figures.append(f"baseline: {before.as_line()}, last loss {baseline[-1].get('loss')}")
    if now.step_seconds > SLOWER * before.step_seconds:
        slower = now.step_seconds / before.step_seconds
        return f"a step takes {slower:.2f} times the baseline's", tuple(figures)
    loss, old = canary[-1].get("loss"), baseline[-1].get("loss")
    if isinstance(loss, float) and isinstance(old, float) and loss > WORSE * old:
        return f"the last loss is {loss:.4g}, the baseline's {old:.4g}", tuple(figures)
    return "", tuple(figures)


def run(context: Context) -> None:
    """Release, canary, verdict; rolled back where the canary fails or is worse, whatever the reason."""
    given, environment = context.options, context.environment
    account = context.account()
    repository = publish.find_repository(account, environment)
    with aws_errors("reading", f"SSM parameter {environment.image_parameter}"):
        answer = account.client("ssm").get_parameter(Name=environment.image_parameter)
    old = str(answer["Parameter"]["Value"]).partition("@")[2]
    baseline: list[dict[str, Any]] = []
    if given.baseline:
        place = context.place(given.baseline)
        baseline = metrics_rows(place.store.read(given.baseline).record, place.s3)
    keep(context.report.folder, "before.json", {"digest": old, "baseline": given.baseline})

    def release(digest: str) -> Step:
        words = f"scripts/publish_image {context.environment_path} --digest {digest}"
        return Step(words, lambda: publish.release(account, environment, repository, digest, context.say))

    canary = _Canary(context)
    if context.dry_run:
        context.perform([release(given.digest), canary.step()])
        worse = "only where the canary fails or is worse"
        context.report.findings.append(Finding("clear", f"rolled back to {old}, {worse}", (), (release(old).words,)))
        return
    context.perform([release(given.digest)])
    try:
        context.perform([canary.step()])
        why, figures = judge(canary.rows, baseline)
    except (JobFailedError, AwsRefusedError) as error:
        why, figures = f"the canary failed: {error}", ()
    except BaseException:
        release(old).make()  # nobody is left to decide: the old one stays in use
        raise
    if why:
        context.perform([release(old)])
        context.report.findings.append(Finding("fault", f"{given.digest} is not kept: {why}; rolled back", figures))
    else:
        context.report.findings.append(Finding("clear", f"{given.digest} is kept", figures, (release(old).words,)))


class _Canary:
    """The job that tries the image."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.rows: list[dict[str, Any]] = []

    def step(self) -> Step:
        """Launch it and follow it to its end."""
        given = self._context.options
        arguments = ("launch", str(given.canary), "--environment", given.environment, "--wait", "--json")
        return Step(f"trainyard {' '.join(arguments)}", lambda: self._run(arguments))

    def _run(self, arguments: tuple[str, ...]) -> str:
        done = subprocess.run(
            trainyard_command(*arguments), cwd=checkout_root(), stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        )
        keep(self._context.report.folder, "canary.json", done.stdout)
        try:
            job_id = str(json.loads(done.stdout)["job_id"])
        except (ValueError, KeyError):
            raise JobFailedError("it was not launched") from None
        if done.returncode:
            raise JobFailedError(f"job {job_id} did not complete; scripts/runbooks/job_hung {job_id} and the others")
        place = self._context.place(job_id)
        self.rows = metrics_rows(place.store.read(job_id).record, place.s3)
        return job_id


RUNBOOK = Runbook("upgrade_image", SUMMARY, run, options, subject="environment")
