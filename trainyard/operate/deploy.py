"""Synthesis, the question whether anything stateful would be lost, and `cdk deploy` by the real CLI, with its progress
passed on and its failures in one line."""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainyard.children import end_group, start
from trainyard.errors import AwsRefusedError, InputError
from trainyard.isolation.templates import synthesize_into
from trainyard.launch.session import Account, open_account
from trainyard.operate.stateful import (
    Template,
    deployed_first,
    deployed_stacks,
    deployed_templates,
    failed_creations,
    left_behind,
    refuse_dropped_exports,
    refuse_losses,
    refuse_namesakes,
    release,
)
from trainyard.spec.platform import EnvironmentSpec

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Progress = Callable[[str], None]


def tenant_stacks(environment: EnvironmentSpec, tenant: str) -> list[str]:
    """The tenant's stacks, in the order that they depend on each other."""
    return [f"trainyard-{environment.name}-{tenant}-{part}" for part in ("foundation", "training")]


def stack_names(environment: EnvironmentSpec) -> list[str]:
    """The environment's stacks, in the order that they depend on each other."""
    tenants = [name for tenant in environment.tenants for name in tenant_stacks(environment, tenant)]
    return [f"trainyard-{environment.name}-platform", *tenants]


def cdk(checkout: Path, arguments: list[str], aws: Mapping[str, str], log: Path, progress: Progress) -> None:
    """Run the checkout's pinned CDK CLI; its whole output goes to `log`, each line's gist to `progress`.

    Raises AwsRefusedError with the CLI's own reason when it fails, InputError when it isn't installed.
    """
    command = checkout / ".venv" / "bin" / "cdk"
    if not command.exists():
        raise InputError(f"{command}: no CDK CLI; run scripts/setup")
    # No profile or credential of the caller may slip into a deployment that is meant for `aws`.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))}
    environment = {**inherited, **aws, "CDK_DISABLE_CLI_TELEMETRY": "true", "FORCE_COLOR": "0"}
    lines: list[str] = []
    with log.open("a", buffering=1, encoding="utf-8") as file:  # who waits for a deployment looks at its last line
        process = start(
            [str(command), *arguments, "--no-notices"],
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                file.write(raw)
                line = ANSI.sub("", raw).strip()
                if line:
                    lines.append(line)
                    progress(gist(line))
            code = process.wait()
        except BaseException:
            end_group(process)
            raise
    if code:
        raise AwsRefusedError(f"cdk {arguments[0]} failed: {failure_reason(lines)} (whole log: {log})")


def gist(line: str) -> str:
    """The part of a line of the CLI that fits on a progress line: stack, count, status, type, logical id."""
    columns = [column.strip() for column in line.split("|")]
    if len(columns) >= 5:
        return f"{columns[0]} {columns[1]} {columns[3].lower().replace('_', ' ')} {columns[4]}"
    return line[:110]


def failure_reason(lines: list[str]) -> str:
    """The line that says why, from the CLI's output: what a program of ours that it started says goes before what the
    CLI makes of it; the last one where none stands out."""
    ours = [line.removeprefix("trainyard: ") for line in lines if line.startswith("trainyard: ")]
    if not ours and (failed := list(dict.fromkeys(filter(None, map(_failed_resource, lines))))):
        return "; ".join(failed[:2])[:800] + (f"; and {len(failed) - 2} more" if len(failed) > 2 else "")
    telling = [line for line in lines if re.search(r"_FAILED|❌|[Ee]rror:|ValidationError|not authorized", line)]
    return (ours or telling or lines or ["it printed nothing"])[-1][:400]


def _failed_resource(line: str) -> str | None:
    """Stack, resource and reason of an event that says so; not of what was only given up because of another."""
    columns = [column.strip() for column in line.split("|")]
    statuses = [column for column in columns if re.fullmatch(r"(CREATE|UPDATE|DELETE|IMPORT)_FAILED", column)]
    if not statuses or len(columns) < 5 or re.search(r"(creation|update|deletion) cancelled", line, re.IGNORECASE):
        return None
    return f"{columns[0]}: {columns[-2]} {columns[-1]}"


def deploy(
    checkout: Path,
    environment_file: Path,
    environment: EnvironmentSpec,
    aws: Mapping[str, str],
    *,
    work: Path,
    progress: Progress,
    stacks: Sequence[str] = (),
    accepted_losses: Collection[str] = (),
    say: Progress = lambda _: None,
) -> None:
    """Synthesize, refuse what would replace or drop something stateful, and deploy; unchanged stacks are left alone.

    `work` gets the assembly (`cdk.out`), which is what was checked and what is deployed, and the log (`cdk.log`).
    `say` gets warnings, lines that stay.
    `stacks` names the ones to deploy (and, with them, those that they depend on); all of the environment's by default.
    The emulator's account is bootstrapped; a real one is, once, by whoever may make its deployment roles.
    """
    log, assembly = work / "cdk.log", work / "cdk.out"
    access = open_account(environment)  # who may not in is told before the minute that synthesis can take
    with _alone(work, say):
        progress("synthesizing")
        wanted = prepare(checkout, environment_file, assembly)
        progress("comparing with what is deployed")
        first = check_losses(access, wanted, stacks, accepted_losses, say)
        if environment.emulated:
            progress("bootstrapping")
            account = f"aws://{environment.account}/{environment.region}"
            cdk(checkout, ["bootstrap", account, "--app", str(assembly)], aws, log, progress)
        progress("deploying")
        chosen = list(stacks) or ["--all"]
        options = ["--require-approval", "never", "--concurrency", "4", "--progress", "events"]
        release(access, failed_creations(access, _reached(wanted, stacks)), say)
        if first:
            cdk(checkout, ["deploy", *first, "--exclusively", "--app", str(assembly), *options], aws, log, progress)
        cdk(checkout, ["deploy", *chosen, "--app", str(assembly), *options], aws, log, progress)


@contextmanager
def _alone(work: Path, say: Progress) -> Iterator[None]:
    """Of two that deploy by one folder the second waits: the CLI reads the assembly as long as it deploys."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "cdk.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"warning: another deployment of this environment goes on from here; waiting for its end ({work})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check(
    checkout: Path,
    environment_file: Path,
    account: Account,
    stacks: Sequence[str],
    accepted: Collection[str],
    say: Progress = lambda _: None,
) -> None:
    """What `deploy` would refuse is refused, and nothing is deployed. In a folder of its own, so that it disturbs none
    that deploys meanwhile, and waits for none."""
    with tempfile.TemporaryDirectory(prefix="trainyard-check-") as folder:
        wanted = prepare(checkout, environment_file, Path(folder) / "cdk.out")
    check_losses(account, wanted, stacks, accepted, say)


def prepare(checkout: Path, environment_file: Path, assembly: Path) -> dict[str, Template]:
    """A fresh cloud assembly in the folder `assembly`; its templates by stack name."""
    shutil.rmtree(assembly, ignore_errors=True)
    assembly.mkdir(parents=True)
    return dict(synthesize_into(assembly, environment_file, checkout))


def check_losses(
    account: Account,
    wanted: Mapping[str, Template],
    stacks: Sequence[str],
    accepted: Collection[str],
    say: Progress = lambda _: None,
) -> list[str]:
    """Stacks that must be deployed alone first. InputError where deploying `stacks` of `wanted` would replace or drop
    something stateful, or what another stack still imports, or let two tenants of one name meet for the first time
    (where they have met already `say` gets a warning, and of tenants that are deployed and in the file no more)."""
    there = deployed_stacks(account)
    for warning in [*refuse_namesakes(there, wanted, stacks), *left_behind(there, wanted)]:
        say(f"warning: {warning}")
    chosen = _reached(wanted, stacks)
    deployed = deployed_templates(account, sorted(chosen - set(failed_creations(account, chosen))))
    refuse_losses(deployed, wanted, accepted)
    first = deployed_first(deployed, wanted)
    refuse_dropped_exports(deployed, wanted, first)
    return first


def _reached(wanted: Mapping[str, Template], stacks: Sequence[str]) -> set[str]:
    """What deploying `stacks` deploys: a tenant's bring the platform's along, as the CLI deploys first what they depend
    on."""
    return set(wanted) if not stacks else {*stacks, *(name for name in wanted if name.endswith("-platform"))}
