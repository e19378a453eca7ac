"""Places where a campaign's job runs: hosts that the campaign plays SageMaker for. See also `cloud` and `desk`."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from network import INTERFACE, Network
from trainer_testing.distributed import TESTS, free_port
from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE
from trainer_testing.host import CONTAINER, write_trees
from trainer_testing.warm import VARIABLE, Fork, HostServer

SILENCE_SECONDS = 8.0
"""How long a host of a campaign may say nothing: on SageMaker it is half a minute."""
_SIBLING_SECONDS = 45.0
"""How long the other hosts may take to find out that one is lost."""
DISK_MIB = 48
MEETING_SECONDS = 10.0
"""How much longer S3 fails for a job that has not met it yet, or a disk is full for one that waits at its last step."""
_LONGEST_FULL_SECONDS = 100.0
"""A disk, for a job that has steps to do: on a busy machine a save may be long in coming."""
_MET_FULL_DISK = re.compile(r"checkpoint \S+ .*(not committed|not uploaded|MiB free)")
LEFTOVERS = ("*partial*", "staging/*/*", "fetched/*")
"""Files that no job leaves on its hosts' disks."""


class Site(Protocol):
    """Where one job runs, again and again until it is done."""

    root: Path
    """Everything of the job lies under it."""
    destination: str
    """Where its checkpoints lie."""
    s3: Any
    """The client that reads them; None: they lie in a folder."""
    lines: list[str]
    """What the job's processes said, newest last."""

    def start(self) -> None:
        """Start the job, or start it again."""

    def outcome(self) -> str | None:
        """None while it runs; "done", or how it ended. Who is left of a job that has lost a host is ended here."""

    def act(self, kind: str, draw: random.Random) -> bool:
        """A fault that comes from outside; returns when it is over: whether the job met it."""

    def leftovers(self) -> list[str]:
        """What is left of an ended job and should not be."""

    def goodput(self) -> dict[str, Any] | None:
        """The job's, as its record and its own account tell it; None where it has no record."""

    def close(self) -> None:
        """End all."""


def left_behind(folder: Path) -> list[str]:
    """What no ended job may leave in `folder`. What goes while this looks is not left: machines' disks go with them."""
    found = [Path(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]
    return [f"left behind: {path}" for path in found if any(path.match(pattern) for pattern in LEFTOVERS)]


def mount_disk(folder: Path) -> None:
    """Make `folder` a small file system of its own."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)], check=True)


def unmount_disk(folder: Path) -> None:
    """Take that away."""
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No byte is free under `folder` meanwhile."""
    ballast = folder / f"ballast-{time.monotonic_ns()}"  # it may be filled a second time meanwhile
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        yield
    finally:
        ballast.unlink(missing_ok=True)


def fill_disk(folder: Path, told: Callable[[], Sequence[str]], seconds: float, faults: Path) -> bool:
    """Leave no byte free under `folder` for a while: whether a save met it, by what the job has `told` so far.

    `faults`: where the job's ranks tell that they wait at its last step.
    """
    num_told = len(told())
    with full_disk(folder):
        time.sleep(seconds)
        until, is_held = time.monotonic() + _LONGEST_FULL_SECONDS, False
        while not (is_met := any(map(_MET_FULL_DISK.search, told()[num_told:]))) and time.monotonic() < until:
            if not is_held and any(faults.glob("held-*")):
                is_held, until = True, min(until, time.monotonic() + MEETING_SECONDS)
            time.sleep(0.05)
    return is_met


def environment_of(folder: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every process of a campaign's job gets, `variables` beside it."""
    return {
        **(variables or {}),
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(CONTAINER), str(CONTAINER.parent)]),
        "CUDA_VISIBLE_DEVICES": "",
        "TRAINYARD_SKIP_EFA_CHECK": "1",
        "TRAINYARD_HOST_SILENCE_SECONDS": str(SILENCE_SECONDS),
        FOLDER_VARIABLE: str(folder),
    }


def processes_in(folder: Path) -> set[int]:
    """Living processes whose working directory lies in `folder`: every process of a host, forked or not."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.add(int(entry.name))
    return found - {os.getpid()}


def _kill_hosts(root: Path) -> None:
    until = time.monotonic() + 5
    while (left := processes_in(root)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class HostsSite:
    """One or two hosts of this machine under the real entrypoint; their checkpoints in a folder, or on a small disk."""

    s3 = None

    def __init__(
        self,
        root: Path,
        job: Path,
        overrides: Sequence[str],
        *,
        num_hosts: int,
        network: Network | None,
        disk: bool,
        server: HostServer | None = None,
    ) -> None:
        """`network`: the hosts' own; None: this machine's loopback. `disk`: checkpoints on a file system of their own.

        The latter can be filled; it needs root. `server`: forks the hosts; None: they start as a user's do.
        """
        self.root = root
        self._server = server
        self.lines = []
        self._disk = root / "disk"
        self._disk.mkdir(parents=True)
        self._has_disk = disk
        if disk:
            mount_disk(self._disk)
        self.destination = str(self._disk / "job")
        self._job = job
        self._overrides = [*overrides, f"checkpoint.destination={self.destination}"]
        self._hosts = [f"algo-{number + 1}" for number in range(num_hosts)]
        self._network = network
        self._trees: list[Path] = []
        self._processes: dict[str, subprocess.Popen[str] | Fork] = {}
        self._readers: list[threading.Thread] = []
        self._lost_at: float | None = None
        self._keeps_disks = True
        self.reasons: list[str] = []

    def start(self) -> None:
        if not self._keeps_disks or not self._trees:
            shutil.rmtree(self.root / "hosts", ignore_errors=True)
            self._trees = write_trees(
                self.root / "hosts", self._job, num_hosts=len(self._hosts), overrides=self._overrides
            )
            self._name_interface()
        self._keeps_disks, self._lost_at = True, None
        addresses = (
            self._network.addresses
            if self._network
            else {host: f"127.0.0.{number + 2}" for number, host in enumerate(self._hosts)}
        )
        common = environment_of(self.root / "faults") | {
            "TRAINYARD_RENDEZVOUS_PORT": str(free_port()),
            "TRAINYARD_HOST_ADDRESSES": json.dumps(addresses),
        }
        for host, tree in zip(self._hosts, self._trees, strict=True):
            environment = common | {"TRAINYARD_OPT_ML": str(tree)}
            process = self._fork(host, tree, environment) if self._server else self._spawn(host, tree, environment)
            self._processes[host] = process
            reader = threading.Thread(target=self._read, args=(host, process), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _fork(self, host: str, tree: Path, environment: dict[str, str]) -> Fork:
        assert self._server is not None
        network = self._network.namespace(host) if self._network else None
        return self._server.start(tree, environment | {VARIABLE: "trainer"}, network)

    def _spawn(self, host: str, tree: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [
                *(self._network.inside(host) if self._network else ()),
                *(sys.executable, "-m", "trainer_testing.faulty_entrypoint"),
            ],
            env=environment,
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _name_interface(self) -> None:
        for tree in self._trees if self._network else ():
            path = tree / "input/config/resourceconfig.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"network_interface_name": INTERFACE}))

    def _read(self, host: str, process: "subprocess.Popen[str] | Fork") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(f"{host} {line.rstrip()}")

    def outcome(self) -> str | None:
        codes = {host: process.poll() for host, process in self._processes.items()}
        if all(code == 0 for code in codes.values()):
            return "done"
        if all(code is not None for code in codes.values()):
            return self._ended(codes)
        if self._lost_at is None and any(code not in (None, 0) for code in codes.values()):
            self._lost_at = time.monotonic()
        if self._lost_at is not None and time.monotonic() > self._lost_at + _SIBLING_SECONDS:
            self.reasons.append(f"hosts still ran {_SIBLING_SECONDS:.0f} s after one was lost")
            _kill_hosts(self.root)
        return None

    def _ended(self, codes: dict[str, int | None]) -> str:
        for process in self._processes.values():
            process.wait()
        for reader in self._readers:
            reader.join(timeout=5)
        return f"exit codes {', '.join(f'{host} {code}' for host, code in codes.items())}"

    def act(self, kind: str, draw: random.Random) -> bool:
        if kind == "disk_full":
            return self._fill_disk(draw.uniform(1.0, 2.5))
        host = draw.choice(self._hosts)
        pids = processes_in(self.root / "hosts" / host)
        self._keeps_disks = False
        if kind == "kill_host":
            # Some hosts come back with their disk, some are others.
            self._keeps_disks = draw.random() < 0.5
            self._processes[host].kill()
        elif kind == "freeze_host":
            self._lost_at = time.monotonic()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            self._wait_for_others(host)
            for pid in processes_in(self.root / "hosts" / host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif kind == "partition":
            assert self._network is not None
            self._lost_at = time.monotonic()
            self._network.part(host)
            self._wait_for_others("")
            self._network.heal(host)
        else:
            raise AssertionError(kind)
        return True

    def _wait_for_others(self, lost: str) -> None:
        """Until the hosts that can have left by themselves, or time is up (`outcome` says so)."""
        others = [process for host, process in self._processes.items() if host != lost]
        until = time.monotonic() + _SIBLING_SECONDS
        while any(process.poll() is None for process in others):
            if time.monotonic() > until:
                self.reasons.append(f"hosts still ran {_SIBLING_SECONDS:.0f} s after one was lost")
                _kill_hosts(self.root)
            time.sleep(0.05)

    def _fill_disk(self, seconds: float) -> bool:
        """Whether a save met it."""
        return fill_disk(self._disk, lambda: self.lines, seconds, self.root / "faults")

    def leftovers(self) -> list[str]:
        until = time.monotonic() + 30
        while (left := processes_in(self.root)) and time.monotonic() < until:
            time.sleep(0.1)
        problems = [f"left running: {pid}" for pid in sorted(left)]
        return problems + left_behind(self._disk) + left_behind(self.root / "hosts") + self.reasons

    def goodput(self) -> None:
        return None

    def close(self) -> None:
        _kill_hosts(self.root)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
        for reader in self._readers:
            reader.join(timeout=5)
        if self._has_disk:
            unmount_disk(self._disk)
