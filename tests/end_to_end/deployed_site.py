"""A platform deployed by the quickstart, and how to run commands beside it as a new shell would."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard import emulator
from trainyard.emulator import EmulatorInfo
from trainyard.launch.place import TenantAccess, open_tenant
from trainyard.spec.platform import load_environment

CHECKOUT = Path(__file__).resolve().parents[2]
UNPACKED_CDK = Path.home() / ".cache/aws/jsii/package-cache"
"""Where the CDK's Python packages unpack their JavaScript, 210 MB: on a new machine once, half a minute of work."""


WAIT_SECONDS = 900.0
"""For anything that comes at all: a busy machine's minutes."""


def bare_environment(state_dir: Path) -> dict[str, str]:
    """What a new shell on a new machine has, where this test's emulator keeps its state, and the CDK unpacked."""
    python_folder = Path(sys.base_prefix) / "bin"
    return {
        "HOME": str(state_dir),
        "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(UNPACKED_CDK),
        "PATH": f"/usr/bin:/bin:{python_folder}",
        "TRAINYARD_STATE_DIR": str(state_dir),
    }


@dataclass(frozen=True)
class Site:
    """A deployed platform and what the quickstart said of it."""

    state_dir: Path
    report: dict[str, Any]
    output: str

    @property
    def info(self) -> EmulatorInfo:
        """The running emulator."""
        found = emulator.find(self.state_dir / "emulator")
        assert found is not None
        return found

    def trainyard(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """The CLI, as a person would run it."""
        return subprocess.run(
            [str(CHECKOUT / ".venv/bin/trainyard"), *arguments],
            cwd=CHECKOUT,
            env=bare_environment(self.state_dir),
            capture_output=True,
            text=True,
        )


def start_quickstart(state_dir: Path, *arguments: str) -> "subprocess.Popen[str]":
    """`scripts/quickstart` in a session of its own, so that a signal reaches it alone."""
    return subprocess.Popen(
        # A shell starts what runs in its background deaf to Ctrl-C, and whatever that starts inherits it.
        ["env", "--default-signal=INT", "scripts/quickstart", *arguments],
        cwd=CHECKOUT,
        env=bare_environment(state_dir),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_of(state_dir: Path) -> list[str]:
    """Command lines of all processes that belong to a state directory, by their command line or environment.

    The daemon and the jobs get a minimal environment, but their arguments and folders lie in the state directory.
    """
    mark = str(state_dir).encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            command = (folder / "cmdline").read_bytes()
            if mark in command or mark in (folder / "environ").read_bytes():
                found.append(command.decode(errors="replace").replace("\0", " ")[:150])
        except OSError:
            continue
    return [line for line in found if line]


def wait_until(look: Callable[[], Any], *, pause_seconds: float = 0.02) -> Any:
    """The first true value of `look`, which is called again and again; give it a pause where it asks the platform."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(pause_seconds)
    raise AssertionError(f"still not so after {WAIT_SECONDS} s")


def access(tenant: str) -> TenantAccess:
    """A tenant of the deployed platform, as its launcher."""
    return open_tenant(load_environment(CHECKOUT / "environments/local.yaml"), tenant, "test")


def copy_data(owner: TenantAccess, other: TenantAccess) -> None:
    """The quickstart's data, which lies in the owner's bucket, for another tenant; by each one's own launcher."""
    theirs, ours = owner.launcher.client("s3"), other.launcher.client("s3")
    for page in theirs.get_paginator("list_objects_v2").paginate(Bucket=owner.contract.buckets.data):
        for item in page.get("Contents", []):
            if not item["Key"].startswith("jobs/"):
                body = theirs.get_object(Bucket=owner.contract.buckets.data, Key=item["Key"])["Body"].read()
                ours.put_object(Bucket=other.contract.buckets.data, Key=item["Key"], Body=body)
