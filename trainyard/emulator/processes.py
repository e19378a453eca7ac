"""Find and signal every process of a training job, wherever its launcher put it.

Process groups alone don't reach all: torchrun gives each rank a session of its own, and a rank whose
parent was killed is nobody's child any more. What all of them keep is the environment, so each attempt is
marked by the path of its tree in TRAINYARD_OPT_ML; where /proc is missing (macOS) parentage is used.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

MARKER = "TRAINYARD_OPT_ML"
_PROC = Path("/proc")


def processes_under(root: Path, known_pids: Iterable[int] = ()) -> set[int]:
    """PIDs of the living processes whose TRAINYARD_OPT_ML lies in `root`, and of `known_pids`' descendants."""
    return _by_environment(root) if (_PROC / "self" / "environ").exists() else _by_parentage(set(known_pids))


def _by_environment(root: Path) -> set[int]:
    prefix = f"{MARKER}={root}".encode()
    found = set()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        if any(variable == prefix or variable.startswith(prefix + b"/") for variable in variables):
            found.add(int(entry.name))
    found.discard(os.getpid())
    return found


def _by_parentage(roots: set[int]) -> set[int]:
    listing = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parent = {int(pid): int(ppid) for pid, ppid in (line.split() for line in listing.splitlines())}
    found = {pid for pid in roots if pid in parent}
    while True:
        more = {pid for pid, ppid in parent.items() if ppid in found} - found
        if not more:
            return found
        found |= more


def kill_all(root: Path, known_pids: Iterable[int] = (), *, patience_seconds: float = 5.0) -> None:
    """SIGKILL every process of the tree `root` and wait until none is left (a killed rank may just have forked)."""
    known = list(known_pids)
    for pid in known:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + patience_seconds
    while alive := processes_under(root, known):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
