"""How ranks find each other, wait for each other and part."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from trainer.rendezvous import arrive, open_store
from trainer.runtime import Runtime
from trainer_testing.distributed import free_port
from trainer_testing.pool import run_pooled

from trainyard.errors import JobFailedError
from trainyard.spec.job import RecoverySpec


def test_collectives_wait_longer_than_a_hang_takes_to_be_seen() -> None:
    assert RecoverySpec().patience_seconds == 600
    assert RecoverySpec(hang_seconds=1000).patience_seconds == 2000
    assert RecoverySpec(hang_seconds=None).patience_seconds == 600
    assert RecoverySpec(collective_seconds=7).patience_seconds == 7


def test_missing_ranks_are_named_in_one_line() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(arrive, store, rank, 5, patience_seconds=4.0) for rank in (0, 1, 3)]
    words = {str(ended.exception()) for ended in waiting}
    assert words == {
        f"ranks 2, 4 of 5 did not arrive within 4 s (recovery.arrival_seconds); hosts that did: {socket.gethostname()}"
    }
    assert all(isinstance(ended.exception(), JobFailedError) for ended in waiting)


def test_who_is_late_is_waited_for() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(arrive, store, 0, 2, patience_seconds=60)
        time.sleep(0.3)
        assert not first.done()
        threads.submit(arrive, store, 1, 2, patience_seconds=60).result(timeout=300)
        first.result(timeout=300)


def test_the_first_rank_keeps_the_store_until_all_that_fail_have_asked() -> None:
    """Gone sooner, the others would print thirty lines of torch's on a lost connection, and the same words again."""
    store, group = HashStore(), SimpleNamespace()
    ranks = [Runtime(rank, 2, rank, torch.device("cpu"), cast(Any, group), store=store) for rank in range(2)]
    with ThreadPoolExecutor() as threads:
        first = threads.submit(ranks[0].is_first_to_say, "what all fail of")
        time.sleep(0.3)
        assert not first.done()
        assert not ranks[1].is_first_to_say("what all fail of"), "the others wait for nobody"
        assert first.result(timeout=300)


def test_who_knows_that_another_said_it_says_it_no_more_though_the_store_goes_away() -> None:
    class Parting(HashStore):
        def add(self, key: str, amount: int) -> int:
            if key == "asked":
                raise dist.DistNetworkError("connection was closed")
            return int(super().add(key, amount))

    store = Parting()
    ranks = [
        Runtime(rank, 2, rank, torch.device("cpu"), cast(Any, SimpleNamespace()), store=store) for rank in range(2)
    ]
    assert [rank.is_first_to_say("what all fail of") for rank in ranks] == [True, False]


def test_a_first_host_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(JobFailedError, match=r"rank 1 can't reach the first host at 127\.0\.0\.1:\d+ within 1 s"):
        open_store(1, patience_seconds=1)


def test_a_failed_rendezvous_is_tried_again_and_collectives_give_up_sooner_once_told_to() -> None:
    first, second = run_pooled(2, "trainer_testing.control_worker", timeout_seconds=600)
    assert "rendezvous try=1 of 2 failed: rank " in first
    assert "connectFullMesh failed" in first
    assert "sum=2.0 tries=2\npatient\nsum=2.0\ngave up: " in first
    assert "imed out" in first
    assert "sum=2.0 tries=2\npatient\nsum=2.0\n" in second


def test_what_a_failed_rank_held_is_held_until_it_has_reported_and_left(tmp_path: Path) -> None:
    """A process group's destructor may wait for a lost peer: with the error's frames it would go before the report."""
    (tmp_path / "failing.py").write_text(
        "class Group:\n    def __del__(self):\n        print('destroyed', flush=True)\n"
        "def main():\n    group = Group()\n    raise RuntimeError('Connection closed by peer')\n"
        "main()\n"
    )
    environment = os.environ | {"RANK": "0", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "trainer.host.rank", str(tmp_path), "failing"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "RuntimeError: Connection closed by peer" in ended.stderr
    assert ended.stdout == ""
