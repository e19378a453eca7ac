"""Another training image: released, tried by a canary job, kept or rolled back; by `trainyard canary`'s own code."""

import argparse
from pathlib import Path

from trainyard.operate.canary import Canary, Limits, Release
from trainyard.operate.runbooks.framework import Finding, Step
from trainyard.operate.runbooks.runbook import Context, Runbook

SUMMARY = "another training image: released, tried by a canary job, kept or rolled back"


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--digest", required=True, metavar="sha256:...", help="of an image that is in the repository")
    parser.add_argument("--canary", required=True, type=Path, metavar="JOB.yaml", help="a short job that must complete")
    parser.add_argument(
        "--baseline", metavar="JOB", help="the same job with the old image; default: it is run first, to compare"
    )
    parser.add_argument("--tenant", "-t", help="whose job the baseline is, where its name doesn't tell")


def run(context: Context) -> None:
    """Release, canary, verdict; rolled back where the canary fails or is worse, whatever the reason."""
    given = context.options
    canary = Canary(
        job=given.canary,
        environment=context.environment_words,
        folder=context.report.folder,
        against=given.baseline,
        image=given.digest,
        tenant=given.tenant,
        limits=Limits(),
    )
    old = Release.of(context.environment, context.say).current()
    back = f"scripts/publish_image {context.environment_path} --digest {old}"
    canary.check(context.say)  # what is refused here has changed nothing
    if context.dry_run:
        context.perform([Step(canary.words, lambda: "")])
        words = f"rolled back to {old}, only where the canary fails or is worse"
        context.report.findings.append(Finding("clear", words, (), (back,)))
        return
    verdicts = []

    def make() -> str:
        verdicts.append(canary.make(context.say))
        return verdicts[0].why or "as good"

    context.perform([Step(canary.words, make)])
    verdict = verdicts[0]
    if verdict.failed:
        words = f"{given.digest} is not kept: {verdict.why}; new jobs run {verdict.image_now}"
        context.report.findings.append(Finding("fault", words, verdict.lines()))
    else:
        context.report.findings.append(Finding("clear", f"{given.digest} is kept", verdict.lines(), (back,)))


EXAMPLE = "--digest sha256:DIGEST --canary jobs/quickstart.yaml --environment production"
RUNBOOK = Runbook("upgrade_image", SUMMARY, run, options, subject="environment", example=EXAMPLE)
