"""A real Ray of two nodes on this machine: its own processes, started and ended by the tests.

Ray is no part of the checkout's environment (79 MB, for these tests alone): at the first run it is installed, at the
versions of `requirements.txt` here, into `.trainyard/ray`, an environment that sees the checkout and its packages.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
CHECKOUT = Path(__file__).resolve().parents[3]
CACHE = CHECKOUT / ".trainyard" / "ray"
INSTALL_SECONDS = 600
START_SECONDS = 240


class NoRay(Exception):
    """Why there is no Ray to be had here; a test skips with these words."""


def ray_python() -> Path:
    """An interpreter with ray and the checkout's packages; NoRay where it can't be had."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode() + sys.prefix.encode()).hexdigest()[:16]
    folder = CACHE / wanted
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(folder))
            packages = next(folder.glob("lib/python*/site-packages"))
            paths = [*site.getsitepackages(), str(CHECKOUT), str(CHECKOUT / "training_container")]
            (packages / "checkout.pth").write_text("\n".join(paths) + "\n")
            pip = (str(folder / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps")
            _run(*pip, "--require-hashes", "-r", str(REQUIREMENTS))
            (folder / "complete").touch()
    return folder / "bin/python"


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NoRay(f"{command[0]} took longer than {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise NoRay(f"ray can't be installed: {done.stderr.strip().splitlines()[-1:]}")


class RayCluster:
    """A head and a worker node, each with room for one host."""

    def __init__(self, python: Path) -> None:
        self.python = python
        # A socket's path has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="ty-ray-", dir="/tmp"))
        self._port, dashboard = _free_port(), _free_port()
        self.address = f"http://127.0.0.1:{dashboard}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        head = ["--head", f"--port={self._port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        try:
            self._bring_up([*head, f"--temp-dir={self.folder}"])
            self._bring_up([f"--address=127.0.0.1:{self._port}"])
        except BaseException:
            self.close()
            raise

    def _bring_up(self, options: list[str]) -> None:
        """One node more. A busy machine may need several tries: Ray gives its own processes 30 s to start."""
        deadline = time.monotonic() + START_SECONDS
        before = len(self._nodes)
        self._nodes.append(self._started(options))
        while self._num_answering() <= before:
            assert time.monotonic() < deadline, (self.folder / "nodes.txt").read_text()
            if self._nodes[-1].poll() is not None:
                self._nodes[-1] = self._started(options)
            time.sleep(0.5)

    def _started(self, options: list[str]) -> "subprocess.Popen[bytes]":
        common = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000"]
        # Of two nodes of one machine the second finds Ray's own choice taken, and has no agent then.
        common.append(f"--dashboard-agent-listen-port={_free_port()}")
        command = [str(self.python), "-m", "ray.scripts.scripts", "start", *common, "--disable-usage-stats", "--block"]
        with (self.folder / "nodes.txt").open("ab") as log:
            return subprocess.Popen(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": "", "RAY_AUTH_MODE": "disabled"},
            )

    def _num_answering(self) -> int:
        """Nodes that live and whose agent does: it comes later, and without it Ray has no log of what runs there."""
        try:
            nodes = self._asked("nodes")["result"]
            return sum(node["state"] == "ALIVE" and self._has_agent(node["node_id"]) for node in nodes)
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _has_agent(self, node_id: str) -> bool:
        try:
            return bool(self._asked(f"logs?node_id={node_id}"))
        except urllib.error.HTTPError:
            return False

    def _asked(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/api/v0/{what}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    def close(self) -> None:
        """End our own nodes; `ray stop` would end everybody's on this machine."""
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            try:
                node.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    """Above those that Ray gives its workers, below those that the system gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """Up for all tests of a module."""
    try:
        python = ray_python()
    except NoRay as reason:
        pytest.skip(str(reason))
    cluster = RayCluster(python)
    yield cluster
    cluster.close()
