"""Runs a module as N gloo ranks on this machine, as torchrun would, without torchrun's own start-up time."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

TESTS = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A TCP port nobody listens on right now, from below those that the system gives to outgoing connections.

    One that the system would choose itself could be taken by any process on the machine before a rank listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def start_ranks(num_ranks: int, module: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """`python -m module arguments` once a rank, with torchrun's environment; stdout and stderr are one pipe."""
    port = free_port()
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    ranks = []
    for rank in range(num_ranks):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=base | place,
                cwd=TESTS,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return ranks


Output = tuple[int, str]
"""Exit code, and what was said."""


class Process(Protocol):
    """What a rank is to those who wait for it: a `subprocess.Popen`, or a fork (`pool.ForkedRank`)."""

    returncode: Any

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def communicate(self, *, timeout: float | None = None) -> tuple[str, Any]: ...


def collect(ranks: Sequence[Process], timeout_seconds: float) -> list[Output]:
    """Exit code and output of each, all read at once: one that waits for its pipe to be read would hold up the rest."""
    with ThreadPoolExecutor(len(ranks)) as readers:
        texts = list(readers.map(lambda rank: rank.communicate(timeout=timeout_seconds)[0], ranks))
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


def finish(ranks: Sequence[Process], timeout_seconds: float) -> list[Output]:
    """Waits for all ranks: (exit code, output) of each. When time runs out, all are killed."""
    try:
        return collect(ranks, timeout_seconds)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()


def run_ranks(num_ranks: int, module: str, *arguments: str, timeout_seconds: float = 600) -> list[str]:
    """Runs the ranks to a good end and returns their outputs; fails with the outputs of those that did not end well."""
    outputs = finish(start_ranks(num_ranks, module, *arguments), timeout_seconds)
    failed = [f"rank {rank} exited {code}:\n{text[-4000:]}" for rank, (code, text) in enumerate(outputs) if code != 0]
    assert not failed, "\n".join(failed)
    return [text for _, text in outputs]
