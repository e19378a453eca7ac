"""Starts without start-up for a host's processes: torchrun and its ranks are forks of one that has imported everything.

On two cores the imports are nearly all of a tiny job's restart: a campaign with forks plays several times the faults in
the same time. What stays as it is: the entrypoint, torchrun's own code, the rank's wrapper, the trainer, every process
with a pid of its own that can be killed or stopped, pipes, exit codes, and that nobody outlives who started him. What
is not there: the interpreter's start and the imports, so times to the next step are not those of a user's job.
"""

import contextlib
import ctypes
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from trainyard.importing import importing

VARIABLE = "TRAINYARD_TEST_WARM"
"""Names the modules to import beforehand, with commas between; absent: every start is a real one."""
MODULES = (
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "trainer.loop",
    "trainer.models.build",
    "trainer.runtime",
    "trainer.session",
    "transformers.models.llama.modeling_llama",
)
ENGINE_MODULES = {
    "ddp": "trainer.strategies.ddp",
    "fsdp": "trainer.strategies.fsdp",
    "pipeline": "trainer.strategies.pipelined",
    "zero3": "trainer.strategies.zero",
}
_LOOK_SECONDS = 0.05
_POLL_SECONDS = 0.02
_MOST_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWNET = 0x40000000  # linux/sched.h


def modules_for(engine: str) -> str:
    """The variable's value for jobs of an engine."""
    return ",".join((*MODULES, ENGINE_MODULES[engine]))


def install(host_module: Any) -> None:
    """Let `host_module` (trainer.host.run) start torchrun, and torchrun its ranks, as forks; in the entrypoint, early.

    Early: this process must not have threads yet.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    entrypoint = os.getpid()
    if not os.fork():
        _die_with(entrypoint)
        _serve(theirs, ours)
    theirs.close()

    def popen(command: Sequence[str], *, env: dict[str, str], **_: Any) -> "Fork":
        assert list(command[1:3]) == ["-m", "trainer.torchrun"], command
        read, write = os.pipe()
        try:
            return Fork(ours, "torchrun", command[3:], env, outputs=(1, write), pipe=read)
        finally:
            os.close(write)

    names = ("DEVNULL", "PIPE", "TimeoutExpired")
    host_module.subprocess = SimpleNamespace(Popen=popen, **{name: getattr(subprocess, name) for name in names})


class HostServer:
    """Forks whole hosts, entrypoint and all, for places that know a host's processes by their working directory."""

    def __init__(self, modules: str) -> None:
        """`modules`: as the variable's value."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer_testing.warm", str(theirs.fileno())],
            env=os.environ | {VARIABLE: modules, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def start(self, folder: Path, environment: dict[str, str], network: str | None) -> "Fork":
        """A host's entrypoint in that directory, and in a network namespace; its output is `stdout`."""
        read, write = os.pipe()
        try:
            where = [str(folder), *([network] if network else [])]
            return Fork(self._socket, "host", where, environment, outputs=(write, write), pipe=read)
        finally:
            os.close(write)

    def close(self) -> None:
        """End it, and all that it forked."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class Fork:
    """A process that the server forked: the part of `subprocess.Popen` that campaigns, hosts and torchrun use."""

    def __init__(
        self,
        server: socket.socket,
        kind: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        *,
        outputs: tuple[int, int] = (1, 2),
        pipe: int | None = None,
    ) -> None:
        """`kind`: host, torchrun or rank. `outputs`: its stdout and stderr; `pipe`: what reads from the latter."""
        self.stderr = os.fdopen(pipe, "rb") if pipe is not None and kind == "torchrun" else None
        self.stdout = os.fdopen(pipe, encoding="utf-8", errors="replace") if pipe and kind == "host" else None
        self.returncode: int | None = None
        asked = {"kind": kind, "arguments": list(arguments), "environment": environment, "owner": os.getpid()}
        self._status, theirs = os.pipe()
        socket.send_fds(server, [json.dumps(asked).encode()], [theirs, *outputs])
        os.close(theirs)
        self._said = b""
        while b"\n" not in self._said:  # its pid; the exit code follows at its end
            part = os.read(self._status, 64)
            assert part, "the process that forks ranks is gone"
            self._said += part
        self.pid = int(self._said.split(b"\n")[0])
        os.set_blocking(self._status, False)

    def poll(self) -> int | None:
        """The exit code (a signal's number, negative), or None while it runs. A signal's handler may ask too."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                part = os.read(self._status, 64)
                self._said += part
                if not part and self.returncode is None and self._said.count(b"\n") < 2:
                    self.returncode = -signal.SIGKILL  # the server is gone, and took it along
            lines = self._said.split(b"\n")
            if len(lines) > 2 and self.returncode is None:
                self.returncode = int(lines[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. TimeoutExpired when that takes longer than `timeout` seconds."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """`number`, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _serve(requests: socket.socket, client: socket.socket | None) -> NoReturn:
    """Fork whatever is asked for, as long as the parent lives. `client`: the other end, for torchruns to ask at."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # Slurm signals every process of a job, and this one is none of the job's.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with importing():
        for name in os.environ[VARIABLE].split(","):
            importlib.import_module(name)
    children: dict[int, tuple[int, int]] = {}
    """Pid to the pipe that its end is told on, and to who asked for it."""
    while True:
        if select.select([requests], [], [], _LOOK_SECONDS)[0]:
            message, files, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            asked = json.loads(message)
            server, foreign = os.getpid(), [requests.fileno(), *(pipe for pipe, _ in children.values())]
            pid = os.fork()
            if not pid:
                _become(asked, files, server, foreign, client)
            os.write(files[0], f"{pid}\n".encode())
            for file in files[1:]:
                os.close(file)
            children[pid] = files[0], asked["owner"]
        _tell_of_the_dead(children)


def _tell_of_the_dead(children: dict[int, tuple[int, int]]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe, _ = children.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(pipe)
        for rank, (_, owner) in children.items():
            if owner == pid:  # a rank doesn't outlive its torchrun
                os.kill(rank, signal.SIGKILL)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(
    asked: dict[str, Any], files: list[int], server: int, foreign: Sequence[int], client: socket.socket | None
) -> NoReturn:
    """A host's entrypoint, torchrun, or a rank of it."""
    code, kind = 1, asked["kind"]
    try:
        _die_with(server)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if kind != "torchrun":
            os.setsid()
        for descriptor, file in zip((1, 2), files[1:], strict=True):
            os.dup2(file, descriptor)
        for descriptor in (*files, *foreign, *([client.fileno()] if client and kind == "rank" else [])):
            os.close(descriptor)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", write_through=True)
            for number in (1, 2)
        )
        _draw_own_numbers()
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.orig_argv = [sys.executable, *asked["arguments"]]
        if kind == "host":
            code = _host(*asked["arguments"])
        elif kind == "rank":
            from trainer.host import rank

            # As the interpreter gets them: -u -m MODULE ARGUMENT ...
            code = rank.main(asked["arguments"][3:])
        else:
            from torch.distributed import run

            assert client is not None
            _let_torchrun_fork(client)
            run.main(asked["arguments"])
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _host(folder: str, network: str = "") -> int:
    """The faulty entrypoint's exit code; `network`: a namespace's name."""
    os.chdir(folder)
    if network:
        with Path(f"/run/netns/{network}").open("rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"can't enter the network namespace {network}")
    from trainer_testing import faulty_entrypoint

    return faulty_entrypoint.run()


def _let_torchrun_fork(server: socket.socket) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def popen(self: Any, arguments: Sequence[str], environment: dict[str, str]) -> Fork:
        return Fork(server, "rank", arguments[1:], environment)

    SubprocessHandler._popen = popen


def _draw_own_numbers() -> None:
    """Forks would all draw the same, and so hide what nobody seeded."""
    import random

    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()


if __name__ == "__main__":
    _die_with(os.getppid())
    _serve(socket.socket(fileno=int(sys.argv[1])), None)
