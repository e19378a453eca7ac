"""Ranks without start-up: one process imports torch, transformers and DeepSpeed once, and every rank is a fork of it.

On two cores importing is most of a small world's time: 8 ranks take half a minute to start and a second to train. The
fork server has run no tensor operation and holds no thread of torch's, so a fork is as good as a fresh interpreter;
what measures start-up, memory or the command itself starts real processes (`distributed`).
"""

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from trainer_testing.distributed import TESTS, free_port

PRELOADED = (
    "deepspeed",
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

Outputs = list[tuple[int, str]]
"""(exit code, output) of each rank."""


class ForkServer:
    """The process that forks ranks; started by the first world, stopped with this one."""

    def __init__(self) -> None:
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The end-to-end tests set it for the whole session, and at its end count the processes that carry it.
        environment.pop("TRAINYARD_STATE_DIR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer_testing.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            cwd=TESTS,
            text=True,
        )
        atexit.register(self.stop)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def run(self, num_ranks: int, module: str, arguments: Sequence[str], timeout_seconds: float) -> Outputs:
        """One world: `module` as `__main__`, with `arguments`, on each rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        world = {"num_ranks": num_ranks, "module": module, "arguments": list(arguments), "timeout": timeout_seconds}
        self._process.stdin.write(json.dumps(world) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the fork server died, exit code {self._process.wait()}; its stderr says why"
        return [(code, output) for code, output in json.loads(answer)]

    def stop(self) -> None:
        """End of input is its sign to go, and to take its ranks with it."""
        if self.is_alive:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)


_servers: list[ForkServer] = []


def run_pooled(num_ranks: int, module: str, *arguments: str, timeout_seconds: float) -> list[str]:
    """As `distributed.run_ranks`, on forks: the ranks' outputs, after all of them ended well."""
    if not _servers or not _servers[-1].is_alive:
        _servers.append(ForkServer())
    outputs = _servers[-1].run(num_ranks, module, arguments, timeout_seconds)
    failed = [f"rank {rank} exited {code}:\n{text[-4000:]}" for rank, (code, text) in enumerate(outputs) if code != 0]
    assert not failed, "\n".join(failed)
    return [text for _, text in outputs]


def serve() -> None:
    """One world a line of standard input, its outputs a line of standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print while they are imported is no answer
    import importlib

    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(_run_world(**json.loads(line))) + "\n")
        answers.flush()


def _run_world(*, num_ranks: int, module: str, arguments: list[str], timeout: float) -> Outputs:
    place = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder) / str(rank)).open("w+b") for rank in range(num_ranks)]
        ranks = [_fork(rank, place, module, arguments, file) for rank, file in enumerate(files)]
        codes = _wait(ranks, time.monotonic() + timeout)
        outputs = [Path(file.name).read_text(encoding="utf-8", errors="replace") for file in files]
        for file in files:
            file.close()
    return list(zip(codes, outputs, strict=True))


def _fork(rank: int, place: dict[str, str], module: str, arguments: list[str], output: IO[bytes]) -> int:
    server = os.getpid()
    if child := os.fork():
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank never outlives its server
        if os.getppid() != server:
            os._exit(1)
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
        import faulthandler

        faulthandler.enable()  # SIGABRT prints where a rank hangs
        os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: list[int], deadline: float) -> list[int]:
    """Exit codes; what has not ended by `deadline`, or soon after another rank failed, is stopped."""
    codes: dict[int, int] = {}
    asked: float | None = None
    while len(codes) < len(ranks):
        for rank in ranks:
            if rank not in codes:
                pid, status = os.waitpid(rank, os.WNOHANG)
                if pid:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank] != 0:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        now = time.monotonic()
        left = [rank for rank in ranks if rank not in codes]
        if asked is None and (now > deadline or _is_over()):
            asked = now
            for rank in left:
                os.kill(rank, signal.SIGABRT)
        elif asked is not None and now > asked + STACKS_SECONDS:
            for rank in left:
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[rank] for rank in ranks]


def _is_over() -> bool:
    """Whether the process that asks has gone: between question and answer it writes nothing, so input means its end."""
    return bool(select.select([0], [], [], 0)[0])


if __name__ == "__main__":
    serve()
