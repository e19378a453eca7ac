"""One try of a job: its hosts' trees, processes and output, from start to exit, reclaim or stop."""

import contextlib
import json
import math
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.emulator.authorization.principals import Session
from trainyard.emulator.info import EmulatorInfo
from trainyard.emulator.processes import kill_all
from trainyard.emulator.training.tree import write_tree

GRACE_SECONDS = 120.0
"""From SIGTERM to SIGKILL, at a stop and at a spot notice (SageMaker developer guide, "Stop a training job")."""
_CHECKOUT = Path(__file__).resolve().parents[3]
_MAX_LINE_BYTES = 1024 * 1024
_LAST_WORDS_SECONDS = 60.0
"""For what was said before the end to be read; nobody is left who could say more."""
_PORTS = range(12_000, 30_000)
"""Below those that systems give to outgoing connections: one of these might take the port before a rank listens."""


@dataclass
class ReclaimTrigger:
    """Take the capacity away when the first host logs a line that matches."""

    pattern: re.Pattern[str]
    notice: bool
    failure: str = ""
    """The job ends with it, as FailureReason; empty: it starts again elsewhere, as spot jobs do."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: completed, failed, interrupted, stopped or overdue."""

    kind: str
    exit_codes: Mapping[str, int]
    detail: str = ""


class Attempt:
    """The processes of one try. `run` waits for the end; `stop` and `reclaim` bring it about from other threads."""

    def __init__(self, number: int, root: Path, request: Mapping[str, Any], num_hosts: int) -> None:
        self.number = number
        self.root = root
        self.request = request
        self.hosts = [f"algo-{index + 1}" for index in range(num_hosts)]
        self.addresses = {host: f"127.0.0.{index + 2}" for index, host in enumerate(self.hosts)}
        self.trees = [root / host for host in self.hosts]
        self.port = 0
        self.started_at = time.time()
        self.ended_at: float | None = None
        self.outcome: Outcome | None = None
        self.reclaimed: dict[str, Any] = {}
        self.failure = ""
        """Why the job ends with the capacity that went; empty where it doesn't."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._pumps: list[threading.Thread] = []
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._trigger: ReclaimTrigger | None = None
        self._reclaim_lock = threading.Lock()
        self._ending: str = ""

    @property
    def pids(self) -> dict[str, int]:
        """Host to the pid of its entrypoint."""
        return {host: process.pid for host, process in self._processes.items()}

    def prepare(self) -> None:
        """Fresh trees for all hosts."""
        shutil.rmtree(self.root, ignore_errors=True)
        for host, tree in zip(self.hosts, self.trees, strict=True):
            write_tree(tree, self.request, host, self.hosts)

    def spawn(
        self,
        argv: Sequence[str],
        info: EmulatorInfo,
        session: Session,
        arn: str,
        on_line: Callable[[str, str], None],
        trigger: ReclaimTrigger | None,
    ) -> None:
        """Start every host's process; `on_line(host, line)` gets their output as it comes."""
        self._trigger = trigger
        self.port = _free_port()
        for host, tree in zip(self.hosts, self.trees, strict=True):
            process = subprocess.Popen(
                list(argv),
                cwd=tree,
                env=self._environment(tree, info, session, arn),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes[host] = process
            pump = threading.Thread(target=self._pump, args=(host, process, on_line), daemon=True, name=f"pump-{host}")
            pump.start()
            self._pumps.append(pump)
            threading.Thread(target=self._await_exit, args=(host, process), daemon=True, name=f"wait-{host}").start()

    def _environment(self, tree: Path, info: EmulatorInfo, session: Session, arn: str) -> dict[str, str]:
        """What a container would have, and the emulator's explicit flags; nothing of the daemon's own environment."""
        home = tree / "tmp"
        return {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(home),
            "TMPDIR": str(home),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(_CHECKOUT / "training_container"), str(_CHECKOUT)]),
            **{str(name): str(value) for name, value in (self.request.get("Environment") or {}).items()},
            "TRAINING_JOB_NAME": self.request["TrainingJobName"],
            "TRAINING_JOB_ARN": arn,
            "AWS_ACCESS_KEY_ID": session.access_key_id,
            "AWS_SECRET_ACCESS_KEY": session.secret_access_key,
            "AWS_SESSION_TOKEN": session.session_token,
            "AWS_ENDPOINT_URL": info.endpoint,
            "AWS_REGION": info.region,
            "AWS_DEFAULT_REGION": info.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "TRAINYARD_OPT_ML": str(tree),
            "TRAINYARD_HOST_ADDRESSES": json.dumps(self.addresses),
            "TRAINYARD_RENDEZVOUS_PORT": str(self.port),
            "TRAINYARD_SKIP_EFA_CHECK": "1",
        }

    def _pump(self, host: str, process: subprocess.Popen[bytes], on_line: Callable[[str, str], None]) -> None:
        output = process.stdout
        assert output is not None
        first = host == self.hosts[0]
        for raw in iter(lambda: output.readline(_MAX_LINE_BYTES), b""):
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            trigger = self._trigger if first else None
            if trigger is not None and trigger.pattern.search(line):
                self._trigger, self.failure = None, trigger.failure
                # Here and now, not by the job's thread: the next step begins a few milliseconds after this line.
                self.reclaim(notice=trigger.notice, line=line)
            on_line(host, line)

    def _await_exit(self, host: str, process: subprocess.Popen[bytes]) -> None:
        self._events.put(("exit", (host, process.wait())))

    def reclaim(self, *, notice: bool, line: str = "") -> None:
        """Take the capacity away: SIGKILL of every process at once, or with `notice` SIGTERM and the grace time."""
        with self._reclaim_lock:
            if self._ending:
                return
            self._ending = "interrupted"
        begun = time.monotonic()
        if not notice:
            kill_all(self.root, self.pids.values())
        self.reclaimed = {
            "notice": notice,
            "line": line,
            "at": time.time(),
            "seconds_to_kill": None if notice else time.monotonic() - begun,
        }
        self._events.put(("reclaim", notice))

    def stop(self) -> None:
        """StopTrainingJob: SIGTERM to the entrypoints, the grace time, SIGKILL."""
        with self._reclaim_lock:
            if self._ending:
                return
            self._ending = "stopped"
        self._events.put(("stop", True))

    def run(self, deadline: float) -> Outcome:
        """Wait for the end; past `deadline` (time.monotonic) it has used its MaxRuntime or MaxWait and is stopped."""
        exit_codes: dict[str, int] = {}
        kill_at: float | None = None
        while len(exit_codes) < len(self.hosts):
            now = time.monotonic()
            limit = min(deadline, kill_at) if kill_at is not None else deadline
            try:
                # No limit is no timeout: one that is infinite overflows.
                kind, value = self._events.get(timeout=None if math.isinf(limit) else max(0.0, limit - now))
            except queue.Empty:
                if kill_at is not None and time.monotonic() >= kill_at:
                    kill_all(self.root, self.pids.values())
                    kill_at, deadline = None, float("inf")
                elif self._claim("overdue"):
                    self._terminate()
                    kill_at, deadline = time.monotonic() + GRACE_SECONDS, float("inf")
                else:
                    deadline = float("inf")
                continue
            if kind == "exit":
                host, code = value
                exit_codes[host] = code
                if code != 0 and self._claim("failed"):
                    # A host that failed takes the job with it: the others wait in a collective for ever.
                    self._terminate()
                    kill_at = time.monotonic() + 10.0
            elif value:  # a stop, or a reclaim with notice
                self._terminate()
                kill_at, deadline = time.monotonic() + GRACE_SECONDS, float("inf")
        return self._finish(exit_codes)

    def _claim(self, ending: str) -> bool:
        with self._reclaim_lock:
            if self._ending:
                return False
            self._ending = ending
            return True

    def _terminate(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def _finish(self, exit_codes: Mapping[str, int]) -> Outcome:
        kill_all(self.root, self.pids.values())  # what a host left running would hold its output open
        for pump in self._pumps:
            pump.join(timeout=_LAST_WORDS_SECONDS)
        for process in self._processes.values():
            if process.stdout is not None:
                process.stdout.close()
        self._claim("completed")
        self.ended_at = time.time()
        self.outcome = Outcome(self._ending, dict(exit_codes))
        return self.outcome

    def kill(self) -> None:
        """End what an attempt that never came to its end left running: a host whose sibling could not be started."""
        if self.outcome is None and self._processes:
            self._finish({})

    def remove(self) -> None:
        """Delete the trees."""
        shutil.rmtree(self.root, ignore_errors=True)

    def describe(self) -> dict[str, Any]:
        """For GET jobs/NAME."""
        return {
            "number": self.number,
            "hosts": self.addresses,
            "pids": self.pids,
            "port": self.port,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "outcome": self.outcome.kind if self.outcome else None,
            "exit_codes": dict(self.outcome.exit_codes) if self.outcome else {},
            "reclaimed": self.reclaimed or None,
        }


_recent_ports: list[int] = []
_port_lock = threading.Lock()


def _free_port() -> int:
    """A port that is free now and was not given to another attempt lately."""
    with _port_lock:
        for _ in range(100):
            port = random.SystemRandom().choice(_PORTS)
            if port in _recent_ports:
                continue
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind(("", port))  # on all addresses, as the ranks' store does
                except OSError:
                    continue
            _recent_ports.append(port)
            del _recent_ports[:-200]
            return port
    raise RuntimeError(f"no free port between {_PORTS.start} and {_PORTS.stop}")
