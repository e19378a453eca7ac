"""A real MLflow tracking server on this machine: the checkout's own, which its locks bring; where they don't, 850 MB of
packages in an environment of their own, made once."""

import fcntl
import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "3.17.2"
FOLDER = Path(tempfile.gettempdir()) / f"trainyard-mlflow-{VERSION}-{os.getuid()}"
INSTALL_SECONDS = 900.0
START_SECONDS = 180.0


class NoMlflowError(Exception):
    """Why there is none."""


def python() -> Path:
    """The interpreter that has MLflow; NoMlflowError where it can't be installed."""
    try:
        if importlib.metadata.version("mlflow") == VERSION:
            return Path(sys.executable)
    except importlib.metadata.PackageNotFoundError:
        pass
    found = FOLDER / "bin" / "python"
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "bin" / "mlflow").exists():
            for command in (
                [sys.executable, "-m", "venv", str(FOLDER)],
                [str(found), "-m", "pip", "install", "-q", f"mlflow=={VERSION}"],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
                if done.returncode:
                    raise NoMlflowError(f"mlflow {VERSION} can't be installed: {done.stderr.strip()[-300:]}")
    return found


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server that keeps all it has in `folder`, and its address; nothing of it is left afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    kept = [
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    log = (folder / "server.log").open("wb")
    process = subprocess.Popen(
        [str(python()), "-m", "mlflow", "server", *options, *kept],
        cwd=folder,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, process, folder)
        yield address
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
        log.close()


def _wait_for(address: str, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (folder / "server.log").read_text(errors="replace")[-1500:]
                raise AssertionError(f"MLflow did not start ({error}): {tail}") from None
            time.sleep(0.3)
