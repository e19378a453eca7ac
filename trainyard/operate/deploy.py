"""`cdk bootstrap` and `cdk deploy` by the real CLI, with their progress passed on and their failures in one line."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from trainyard.errors import AwsRefusedError, InputError
from trainyard.spec.platform import EnvironmentSpec

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Progress = Callable[[str], None]


def stack_names(environment: EnvironmentSpec) -> list[str]:
    """The environment's stacks, in the order that they depend on each other."""
    tenants = [
        f"trainyard-{environment.name}-{tenant}-{part}"
        for tenant in environment.tenants
        for part in ("foundation", "training")
    ]
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
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [str(command), *arguments, "--no-notices"],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
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


def end_group(process: "subprocess.Popen[str]") -> None:
    """End a command that leads its own session, with all that it started: the CLI runs the app, which runs jsii."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def gist(line: str) -> str:
    """The part of a line of the CLI that fits on a progress line: stack, count, status, type, logical id."""
    columns = [column.strip() for column in line.split("|")]
    if len(columns) >= 5:
        return f"{columns[0]} {columns[1]} {columns[3].lower().replace('_', ' ')} {columns[4]}"
    return line[:110]


def failure_reason(lines: list[str]) -> str:
    """The line that says why, from the CLI's output; the last one where none stands out."""
    telling = [
        line for line in lines if re.search(r"_FAILED|❌|[Ee]rror:|ValidationError|not authorized|trainyard:", line)
    ]
    return (telling or lines or ["it printed nothing"])[-1][:400]


def deploy(
    checkout: Path,
    environment_file: Path,
    environment: EnvironmentSpec,
    aws: Mapping[str, str],
    *,
    work: Path,
    progress: Progress,
) -> None:
    """Bootstrap the account and deploy all of the environment's stacks; unchanged ones are left alone.

    `work` gets the assembly (`cdk.out`) and the log (`cdk.log`).
    """
    log = work / "cdk.log"
    context = ["-c", f"environment={environment_file}"]
    output = ["--output", str(work / "cdk.out")]
    progress("bootstrapping")
    cdk(
        checkout,
        ["bootstrap", f"aws://{environment.account}/{environment.region}", *context, *output],
        aws,
        log,
        progress,
    )
    progress("synthesizing")
    cdk(
        checkout,
        [
            "deploy",
            "--all",
            *context,
            *output,
            "--require-approval",
            "never",
            "--concurrency",
            "4",
            "--progress",
            "events",
        ],
        aws,
        log,
        progress,
    )
