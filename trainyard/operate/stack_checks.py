"""Every check of an environment's templates, in one report: what `app.py` enforces, and the opinions of others.

checkov is not part of the CDK's validation and has too many dependencies to share an environment with anything: it gets
one of its own under .trainyard/, and where it can't be had the report says so and the command fails.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import TrainyardError
from trainyard.isolation.templates import synthesize_into
from trainyard.launch.place import environment_file
from trainyard.launch.session import checkout_root
from trainyard.spec.platform import load_environment
from trainyard.spec.words import counted

CHECKOV = "checkov==3.3.30"
SECONDS = 900
"""For an installation or a run; checkov alone takes half a minute of one core."""

_FUNCTION = "a small function that calls AWS's APIs alone: stacks/constructs/acknowledged.py has the reasons"
_BOUNDARY = "the permissions boundary, which grants nothing: the roles' own policies name every resource"

ACCEPTED = {
    "CKV_AWS_18": "the trail logs every read and write of every object, validated and locked",
    "CKV_AWS_45": "any word of forty characters counts; that the code has no secret, tests/stacks/test_app.py holds",
    "CKV_AWS_107": _BOUNDARY,
    "CKV_AWS_108": _BOUNDARY,
    "CKV_AWS_109": _BOUNDARY,
    "CKV_AWS_110": _BOUNDARY,
    "CKV_AWS_111": _BOUNDARY,
    "CKV_AWS_115": _FUNCTION,
    "CKV_AWS_116": _FUNCTION,
    "CKV_AWS_117": _FUNCTION,
    "CKV_AWS_173": "names of the tenant's own resources, no secrets; Lambda encrypts them at rest anyway",
}
"""checkov's findings that are as they should be, with the reason; the policy ones for boundaries alone."""

ACCEPTED_AT = {
    ("CKV_AWS_33", "KeysCheckpoints"): (
        "the volumes of a cluster's machines: anybody in the principal, held by its conditions to PCS's and EC2 spot's "
        "service-linked roles of the account, through EC2; the isolation proof breaks each condition in turn"
    ),
    ("CKV_AWS_111", "PermissionsLogin"): (
        "a login node's session channels and its report that it is alive, which have no resource"
    ),
}
"""The same of one construct's resources alone: the check, and how their logical ids begin."""

_HELD_BY = {
    ("StringEquals", "kms:ViaService"),
    ("StringEquals", "kms:CallerAccount"),
    ("ArnEquals", "aws:PrincipalArn"),
}
"""What must hold whom a statement for anybody means: the service, the account and the roles."""

_OF_BOUNDARIES = {check for check, reason in ACCEPTED.items() if reason is _BOUNDARY}


@dataclass(frozen=True)
class Finding:
    """What a tool has against a resource."""

    rule: str
    text: str
    resource: str
    """Stack and logical id, or where in the template."""

    def __str__(self) -> str:
        return f"{self.rule} at {self.resource} ({self.text})"


class NotRunError(Exception):
    """A tool that isn't there; its opinion is missing, and is said to be."""


def lint(templates: list[Path], region: str) -> list[Finding]:
    """cfn-lint's errors; NotRunError where it isn't installed (it comes with the development dependencies)."""
    program = Path(sys.executable).parent / "cfn-lint"
    command = [str(program), "--format", "json", "--regions", region, "--template"]
    done = _run([*command, *map(str, templates)])
    try:
        found = json.loads(done.stdout or "[]")
    except json.JSONDecodeError:
        raise NotRunError(_last_line(done.stderr)) from None
    if not done.stdout.strip() and done.returncode:
        raise NotRunError(_last_line(done.stderr))
    return [
        Finding(item["Rule"]["Id"], item["Message"], f"{Path(item['Filename']).name}:{item['Location']['Path']}")
        for item in found
        if item["Level"] == "Error"
    ]


def install_checkov(folder: Path) -> Path:
    """checkov's command in a virtual environment in `folder`, made where it isn't there; NotRunError where it can't."""
    program = folder / "bin" / "checkov"
    marker = folder / "version"
    if program.is_file() and marker.is_file() and marker.read_text() == CHECKOV:
        return program
    python = folder / "bin" / "python"
    # uv, because pip takes minutes to choose among checkov's dependencies.
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "uv"],
        [str(python), "-m", "uv", "pip", "install", "--quiet", "--python", str(python), CHECKOV],
    ):
        done = _run(command)
        if done.returncode:
            raise NotRunError(f"{CHECKOV} can't be installed: {_last_line(done.stderr)}")
    marker.write_text(CHECKOV)
    return program


def checkov(program: Path, templates: Path) -> tuple[list[Finding], Counter[str]]:
    """What checkov finds in the templates of a folder that nobody accepted, and how often what is accepted."""
    command = [str(program), "-d", str(templates), "--framework", "cloudformation"]
    done = _run([*command, "--skip-download", "--compact", "--quiet", "-o", "json"])
    try:
        report = json.loads(done.stdout)
        failed = report["results"]["failed_checks"] if "results" in report else []
        if report.get("summary", report).get("parsing_errors"):
            raise NotRunError("it couldn't read the templates")
    except (json.JSONDecodeError, KeyError, AttributeError):
        raise NotRunError(_last_line(done.stderr or done.stdout)) from None
    return sort_out(failed, templates)


def sort_out(failed: list[dict[str, str]], templates: Path) -> tuple[list[Finding], Counter[str]]:
    """checkov's failed checks of a folder's templates: those that nobody accepted, and how often those that somebody
    did. That a key lets anybody in is accepted only where its own conditions hold who that is."""
    found, accepted = [], Counter[str]()
    for item in failed:
        check, resource = item["check_id"], item["resource"]
        in_boundary = ".BoundaryPolicy" in resource
        name = resource.rpartition(".")[2]
        at_home = any(check == rule and name.startswith(part) for rule, part in ACCEPTED_AT)
        if check == "CKV_AWS_33":
            at_home = at_home and _is_held(templates / Path(item["file_path"]).name, name)
        if at_home or (check in ACCEPTED and (in_boundary or check not in _OF_BOUNDARIES)):
            accepted[check] += 1
        else:
            stack = Path(item["file_path"]).name.removesuffix(".template.json")
            found.append(Finding(check, item["check_name"], f"{stack}/{name}"))
    return found, accepted


def _is_held(template: Path, key: str) -> bool:
    """Whether each statement of a key's policy that allows anybody has every condition of `_HELD_BY`, each to values
    without a wildcard."""
    policy = json.loads(template.read_text(encoding="utf-8"))["Resources"][key]["Properties"]["KeyPolicy"]
    for statement in policy["Statement"]:
        if statement["Effect"] != "Allow" or '"*"' not in json.dumps(statement.get("Principal", "*")):
            continue
        conditions = statement.get("Condition", {})
        values = [conditions.get(operator, {}).get(name) for operator, name in _HELD_BY]
        if not all(values) or "*" in json.dumps(values):
            return False
    return True


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRunError(str(error)[:200]) from None


def _last_line(text: str) -> str:
    return (text.strip() or "it printed nothing").splitlines()[-1][:200]


def check(environment: Path, checkout: Path, work: Path, program: Path | str) -> Iterator[tuple[str, bool]]:
    """Lines of the report, each with whether it is good; TrainyardError where an enforced check has a finding."""
    spec = load_environment(environment)
    folder = work / spec.name
    assembly, reports = folder / "cdk.out", folder / "reports"
    assembly.mkdir(parents=True, exist_ok=True)
    for stale in assembly.glob("*.template.json"):
        stale.unlink()
    synthesize_into(assembly, environment, checkout, {"reports": str(reports)})
    yield "the CDK's rules, our Guard rules, AwsSolutions and NIST 800-53 R5: nothing without a reason", True
    for report in sorted(reports.glob("*.json")):
        number = sum(len(item["resources"]) for item in json.loads(report.read_text(encoding="utf-8")))
        yield f"{report.stem}: {counted(number, 'finding')}, a report: {report}", True
    plain = folder / "templates"
    plain.mkdir(exist_ok=True)
    for stale in plain.iterdir():
        stale.unlink()
    templates = sorted(assembly.glob("*.template.json"))
    for path in templates:  # alone: checkov would read the assembly's other files for minutes
        (plain / path.name).write_bytes(path.read_bytes())
    try:
        found = lint(templates, spec.region)
        yield _verdict("cfn-lint", found), not found
    except NotRunError as error:
        yield f"cfn-lint: NOT RUN: {error}", False
    if isinstance(program, str):
        yield f"checkov: NOT RUN: {program}", False
        return
    try:
        found, accepted = checkov(program, plain)
        yield f"{_verdict('checkov', found)}; accepted: {dict(sorted(accepted.items()))}", not found
    except NotRunError as error:
        yield f"checkov: NOT RUN: {error}", False


def _verdict(tool: str, found: list[Finding]) -> str:
    return f"{tool}: {counted(len(found), 'finding')}" + "".join(f"\n    {finding}" for finding in found)


def main(arguments: list[str] | None = None) -> int:
    """0: nothing found; 1: something found, or a tool missing; 2: wrong input or a finding of an enforced check."""
    parser = argparse.ArgumentParser(prog="scripts/check_stacks", description=__doc__)
    parser.add_argument("environments", metavar="ENV.yaml", nargs="*", help="default: all of environments/")
    chosen, checkout = parser.parse_args(arguments).environments, checkout_root()
    work = checkout / ".trainyard" / "checks"
    good = True
    try:
        files = [environment_file(item) for item in chosen] or sorted((checkout / "environments").glob("*.yaml"))
        program: Path | str
        try:
            program = install_checkov(work / "checkov")
        except NotRunError as error:
            program = str(error)
        for file in files:
            print(file, flush=True)
            for line, fine in check(file, checkout, work, program):
                print(f"  {line}", flush=True)
                good = good and fine
    except TrainyardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
