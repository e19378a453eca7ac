"""A real Ray of two nodes on this machine: its own processes, started and ended by the tests.

Ray is no part of the checkout's environment (79 MB, for these tests alone): at the first run it is installed, at the
versions of `requirements.txt` here, into `.trainyard/ray`, an environment that sees the checkout and its packages.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
CHECKOUT = Path(__file__).resolve().parents[3]
CACHE = CHECKOUT / ".trainyard" / "ray"
INSTALL_SECONDS = 600
START_SECONDS = 180


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
        self._start([*head, f"--temp-dir={self.folder}"])
        self._wait_for(f"{self.address}/api/jobs/")
        self._start([f"--address=127.0.0.1:{self._port}"])

    def _start(self, options: list[str]) -> None:
        common = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000"]
        command = [str(self.python), "-m", "ray.scripts.scripts", "start", *common, "--disable-usage-stats", "--block"]
        with (self.folder / "nodes.txt").open("ab") as log:
            self._nodes.append(
                subprocess.Popen(
                    [*command, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": ""},
                )
            )

    def _wait_for(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except OSError:
                log = (self.folder / "nodes.txt").read_text()
                assert self._nodes[0].poll() is None and time.monotonic() < deadline, log
                time.sleep(0.5)

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
