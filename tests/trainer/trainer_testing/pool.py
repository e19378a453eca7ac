"""Ranks without start-up: one process imports torch, transformers and DeepSpeed once, and every rank is a fork of it.

On two cores importing is most of a small world's time: 8 ranks take half a minute to start and a second to train. The
fork server has run no tensor operation and holds no thread of torch's, and every fork draws its own random numbers, as
fresh interpreters do; only the hash seed of strings is shared. What measures start-up, memory or the command itself
starts real processes (`distributed`).
"""

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from trainer_testing.distributed import TESTS, collect, free_port
from trainyard.importing import importing

PRELOADED = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # every engine of its asks for it, and it for torch's compiler
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "peft",
    "torch.distributed.checkpoint",
    "trainer.__main__",
    "trainer.models.build",
    "trainer.strategies.ddp",
    "trainer.strategies.fsdp",
    "trainer.strategies.pipelined",
    "trainer.strategies.zero",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral", "qwen3", "qwen3_moe")),
)
GRACE_SECONDS = 10.0
"""After one rank failed, the others have this long to say why they did too."""
STACKS_SECONDS = 2.0
"""Between asking a rank that hangs for its stacks and killing it."""

_POLL_SECONDS = 0.02


class ForkedRank:
    """A rank that the server forked: the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: "ForkServer", pid: int, output: int) -> None:
        self.pid = pid
        self.stdout: TextIO = os.fdopen(output, encoding="utf-8", errors="replace")
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()
        self._text: list[str] = []
        self._reader: threading.Thread | None = None

    def poll(self) -> int | None:
        """The exit code (a signal's number, negative), or None while it runs."""
        with self._lock:  # an end can be asked for only once
            if self.returncode is None:
                self.returncode = self._server.exit_code(self.pid)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """`number`, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the server itself may have ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it says until it ends. TimeoutExpired when that takes longer than `timeout` seconds: call it again."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        self._reader.join(max(0.0, deadline - time.monotonic()))
        while self._reader.is_alive() or self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0)
            time.sleep(_POLL_SECONDS)
        self.stdout.close()
        return "".join(self._text), None

    def _read(self) -> None:
        for line in self.stdout:
            self._text.append(line)


class ForkServer:
    """The process that forks ranks; started by the first world, stopped with this one."""

    def __init__(self) -> None:
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The end-to-end tests set it for the whole session, and at its end count the processes that carry it.
        environment.pop("TRAINYARD_STATE_DIR", None)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._answers = self._socket.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer_testing.pool", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            cwd=TESTS,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.stop)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def start(self, module: str, arguments: Sequence[str], environments: Sequence[dict[str, str]]) -> list[ForkedRank]:
        """`module` as `__main__`, with `arguments`, once in each of the environments."""
        pipes = [os.pipe() for _ in environments]
        try:
            with tempfile.TemporaryFile("w+", encoding="utf-8") as asked:
                json.dump({"module": module, "arguments": list(arguments), "environments": list(environments)}, asked)
                asked.flush()
                pids = self._ask("start", [asked.fileno(), *(write for _, write in pipes)])
        finally:
            for _, write in pipes:
                os.close(write)
        return [ForkedRank(self, pid, read) for pid, (read, _) in zip(pids, pipes, strict=True)]

    def exit_code(self, pid: int) -> int | None:
        """A rank's exit code; None while it runs."""
        code: int | None = self._ask(str(pid), [])
        return code

    def _ask(self, word: str, files: Sequence[int]) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [f"{word:<16}".encode()], files)
            answer = self._answers.readline()
        assert answer, f"the fork server died, exit code {self._process.wait()}; its stderr says why"
        return json.loads(answer)

    def stop(self) -> None:
        """A closed socket is its sign to go, and its ranks die with it."""
        if self.is_alive:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._process.wait(timeout=60)


_servers: list[ForkServer] = []


def start_pooled(num_ranks: int, module: str, *arguments: str) -> list[ForkedRank]:
    """As `distributed.start_ranks`, on forks: stdout and stderr of a rank are one pipe."""
    if not _servers or not _servers[-1].is_alive:
        _servers.append(ForkServer())
    place = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    own = {name: value for name, value in os.environ.items() if name not in ranks[0]}
    own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return _servers[-1].start(module, arguments, [own | rank for rank in ranks])


def run_pooled(num_ranks: int, module: str, *arguments: str, timeout_seconds: float) -> list[str]:
    """As `distributed.run_ranks`, on forks: the ranks' outputs, after all of them ended well.

    A world of which a rank died by SIGSEGV runs once more. That is native code: once in several thousand worlds torch
    2.13 crashed so in a fork, under tensor parallelism over gloo; the same world then ran well four times. Whatever
    crashes for a reason of ours crashes twice.
    """
    outputs = _outputs(num_ranks, module, *arguments, timeout_seconds=timeout_seconds)
    if any(code == -signal.SIGSEGV for code, _ in outputs):
        print(f"crashed, and run once more:\n{_failures(outputs)}", file=sys.stderr)
        outputs = _outputs(num_ranks, module, *arguments, timeout_seconds=timeout_seconds)
    assert not any(code for code, _ in outputs), _failures(outputs)
    return [text for _, text in outputs]


def _outputs(num_ranks: int, module: str, *arguments: str, timeout_seconds: float) -> Sequence[tuple[int, str]]:
    """(exit code, output) of each rank."""
    ranks = start_pooled(num_ranks, module, *arguments)
    with ThreadPoolExecutor(1) as reader:
        collected = reader.submit(collect, ranks, timeout_seconds + 60)
        _watch(ranks, time.monotonic() + timeout_seconds)
        return collected.result()


def _failures(outputs: Sequence[tuple[int, str]]) -> str:
    """What the failed ranks said last; of a crash, from its first line on."""
    words = []
    for rank, (code, text) in enumerate(outputs):
        crash = text.find("Fatal Python error")
        if code != 0:
            words.append(f"rank {rank} exited {code}:\n{text[-4000:] if crash < 0 else text[crash : crash + 8000]}")
    return "\n".join(words)


def _watch(ranks: Sequence[ForkedRank], deadline: float) -> None:
    """What has not ended by `deadline`, or soon after another rank failed, is asked for its stacks, and killed."""
    asked = False
    while left := [rank for rank in ranks if rank.poll() is None]:
        now = time.monotonic()
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, now + GRACE_SECONDS)
        if now > deadline:
            for rank in left:
                rank.send_signal(signal.SIGKILL if asked else signal.SIGABRT)
            asked, deadline = True, now + STACKS_SECONDS
        time.sleep(_POLL_SECONDS)


def serve(connection: socket.socket) -> None:
    """Each request is 16 bytes: `start` with files (what to run; an output a rank), or a pid whose end is asked for."""
    os.dup2(2, 1)  # what libraries print while they are imported is no answer
    import importlib

    with importing():  # also: a fork that looks through its imports for garbage gets a copy of all their pages
        import torch

        torch.set_num_threads(1)
        for name in PRELOADED:
            importlib.import_module(name)
    while True:
        request, files, _, _ = socket.recv_fds(connection, 16, 64)
        if len(request) < 16:
            return
        word = request.decode().strip()
        answer = _start(files, connection) if word == "start" else _exit_code(int(word))
        connection.sendall((json.dumps(answer) + "\n").encode())


def _start(files: list[int], connection: socket.socket) -> list[int]:
    with os.fdopen(files[0], "r", encoding="utf-8") as asked:
        asked.seek(0)
        world: dict[str, Any] = json.load(asked)
    pids = []
    for environment, output in zip(world["environments"], files[1:], strict=True):
        if not (pid := os.fork()):
            _become_rank(world["module"], world["arguments"], environment, output, [connection.fileno(), *files[1:]])
        pids.append(pid)
    for output in files[1:]:
        os.close(output)
    return pids


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become_rank(
    module: str, arguments: list[str], environment: dict[str, str], output: int, foreign: Sequence[int]
) -> None:
    """Never returns."""
    code = 1
    try:
        server = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank never outlives its server
        if os.getppid() != server:
            os._exit(1)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        for descriptor in foreign:
            os.close(descriptor)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
        import faulthandler
        import random

        import numpy as np
        import torch

        faulthandler.enable()  # SIGABRT prints where a rank hangs
        # Forks would all draw the same numbers, and so hide what nobody seeded.
        random.seed()
        np.random.seed()
        torch.seed()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        _leave(code)  # before its frames go, and a process group whose destructor may wait for a lost peer
    finally:
        _leave(code)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
