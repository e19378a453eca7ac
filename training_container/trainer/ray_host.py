"""One machine of a job on Ray: an actor in which `trainer.entrypoint` runs, with Ray's word for who is there. No torch.

The folder of a host is laid out as a container's /opt/ml. What the host says goes to the actor's own log. It dies with
the actor: nothing of a job outlives what Ray knows of.
"""

import contextlib
import ctypes
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trainer import entrypoint
from trainer.host.rank import RESUME_EXIT_CODE
from trainer.host.word import first_line
from trainer.inputs import bring_inputs
from trainyard.errors import TrainyardError

_FOREIGN = ("RAY_", "OMP_NUM_THREADS")
"""Ray's own variables, and the number of threads that it sets by an actor's CPUs, over the job's."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NOTHING_TO_SAVE = "stopped before the ranks started; resume me"


@dataclass(frozen=True)
class Hosts:
    """The machines of one start, in their order."""

    names: Sequence[str]
    addresses: Sequence[str]
    port: int
    """Of the first one: there the ranks meet; on the next the hosts agree."""


class Host:
    """What Ray makes an actor of, one a machine; `run` and `stop` are called at the same time."""

    def __init__(self, directory: str, index: int) -> None:
        """`directory`: of the job, on this machine."""
        self._opt_ml = Path(directory) / f"host-{index}"
        self._index = index
        self._process: subprocess.Popen[bytes] | None = None
        self._is_told = False

    def address(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port that is free on it, with the next one."""
        address = str(importlib.import_module("ray.util").get_node_ip_address())
        return address, _free_ports(address)

    def run(self, job: Mapping[str, str], hosts: Hosts) -> tuple[int, str]:
        """The entrypoint's exit code and reason. `job`: file name to content, the channel `job` and `inputs.json`."""
        try:
            self._lay_out(job, hosts)
            bring_inputs(self._opt_ml)
        except TrainyardError as error:
            return error.exit_code, str(error)
        if self._is_told:
            return RESUME_EXIT_CODE, _NOTHING_TO_SAVE
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "trainer.ray_host", str(os.getpid())],
            env=self._environment(hosts),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        if self._is_told:
            self.stop()
        code = self._process.wait()
        if self._is_told and code == -signal.SIGTERM:  # before it could listen
            return RESUME_EXIT_CODE, _NOTHING_TO_SAVE
        return code, self._reason()

    def stop(self) -> None:
        """Tell the ranks to save and end."""
        self._is_told = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def _lay_out(self, job: Mapping[str, str], hosts: Hosts) -> None:
        files = {f"input/data/job/{name}": text for name, text in job.items() if name != "inputs.json"}
        files["input/data/inputs.json"] = job["inputs.json"]
        place = {"current_host": hosts.names[self._index], "hosts": list(hosts.names)}
        kind = json.loads(job["resolved_job.json"])["spec"]["compute"]["instance_type"] or ""
        files["input/config/resourceconfig.json"] = json.dumps({**place, "current_instance_type": kind})
        for name, text in files.items():
            path = self._opt_ml / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        (self._opt_ml / "output").mkdir(exist_ok=True)
        (self._opt_ml / "output/failure").unlink(missing_ok=True)
        (self._opt_ml / "trainyard").mkdir(exist_ok=True)

    def _environment(self, hosts: Hosts) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return kept | {
            "TRAINYARD_OPT_ML": str(self._opt_ml),
            "TRAINYARD_HOST_ADDRESSES": json.dumps({hosts.names[0]: hosts.addresses[0]}),
            "TRAINYARD_RENDEZVOUS_PORT": str(hosts.port),
        }

    def _reason(self) -> str:
        return first_line(self._opt_ml / "output/failure")


def _free_ports(address: str) -> int:
    """The first of two free ones, below those that the system gives to outgoing connections."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(12_000, 30_000)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind((address, port))
            second.bind((address, port + 1))
            return port


def actor_log(actor: Any) -> str:
    """By which Ray's log service finds what the actor wrote."""
    return str(actor._actor_id.hex())


def main(actor_pid: int) -> int:
    """The entrypoint, which ends with the actor (Linux only): Ray kills that one without asking."""
    signal.signal(signal.SIGTERM, _on_early_stop)  # the entrypoint's own comes with its ranks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != actor_pid:  # it died before we asked
            return 1
    return entrypoint.main()


def _on_early_stop(_: int, __: FrameType | None) -> NoReturn:
    print(f"ray: {_NOTHING_TO_SAVE}", flush=True)
    raise SystemExit(RESUME_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
