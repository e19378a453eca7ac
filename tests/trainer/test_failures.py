"""Of the ranks of a host that failed, which one is the cause, and what the others' words are taken for."""

from collections.abc import Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.host.failures import death
from trainer.host.rank import RankReport
from trainer.host.recovery import Ending
from trainer.host.run import HostRun

NOON = datetime(2026, 11, 23, 12).timestamp()
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
NAN = "ValueError: loss is NaN in my loss"


def torchrun(*dead: tuple[int, int, float]) -> list[str]:
    """What it says of ranks that it found dead: rank, exit code, seconds after noon. As torch, the root cause last."""
    parts = [
        f"[{number}]:\n  time      : {datetime.fromtimestamp(int(NOON + after)).isoformat(sep='_')}\n"
        f"  host      : algo-1.local\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 1{rank})"
        for number, (rank, code, after) in enumerate(dead)
    ]
    return "\n".join(["Failures:", *parts[:-1], "Root Cause (first observed failure):", *parts[-1:]]).splitlines()


def said(rank: int, error: str, after: float = 0.0) -> RankReport:
    return RankReport(rank, 10 + rank, 1, NOON + after, error)


def running(rank: int) -> RankReport:
    """The report of one that ended without a word."""
    return RankReport(rank, 10 + rank)


def ended(
    tail: Sequence[str], *reports: RankReport, world_size: int = 2, told: bool = False, step: bool = True
) -> Ending:
    place, job = SimpleNamespace(host="algo-1", hosts=("algo-1", "algo-2")), SimpleNamespace(world_size=world_size)
    host: Any = SimpleNamespace(_tail=tail, _place=place, _job=job, _killed=(), _was_told_to_stop=told)
    return HostRun._failure(host, {report.rank: report for report in reports}, 1, made_a_step=step)


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:15029. This is typically caused by a rem", True),
        (f"{GLOO}pair.cc:537] Read error [127.0.0.1]:30596: Connection reset by peer. This is typically cau", True),
        (f"{GLOO}unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete", True),
        ("RuntimeError: Connection closed by peer [127.0.0.2]:1234", True),
        (f"{GLOO}device.cc:84] Unable to find address for: eth9", False),
        ("DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//nope", True),
        ("DistNetworkError: The client socket has timed out after 2000ms while trying to connect to (a, 1).", True),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a netw", True),
        ("DistBackendError: NCCL error in: x.cpp:1, ncclSystemError: Connection closed by remote peer a<1>", True),
        ("RuntimeError: NCCL communicator was aborted on rank 1.", True),
        ("DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran f", True),
        ("DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.27", False),
        ("TimeoutError: [Errno 110] Connection timed out: '/data/train.bin'", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("BrokenPipeError: [Errno 32] Broken pipe", False),
        ("ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10", False),
        ("RuntimeError: DataLoader timed out after 60 seconds", False),
        ("ValueError: NCCL_TIMEOUT=x is no number", False),
    ],
)
def test_torchs_own_words_alone_tell_of_a_lost_rank(error: str, is_loss: bool) -> None:
    ending = ended([], said(0, error))
    assert (ending.is_consequence, ending.has_spoken) == (is_loss, not is_loss)
    assert ending.reason.endswith("(it lost another rank: see the other hosts' reason)") == is_loss
    alone = ended([], said(0, error), world_size=1)
    assert alone.has_spoken and alone.reason == f"rank 0 on algo-1: {error}", "a single rank has none to lose"


def test_a_network_that_fails_as_the_job_is_told_to_stop_is_told_of() -> None:
    timed_out = said(0, "ReadTimeoutError: the bucket timed out")
    assert ended([], timed_out, told=True, step=False).exit_code == 1
    lost = said(0, f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:15029")
    assert ended([], lost, told=True, step=False).exit_code == 75
    assert ended([], lost, told=True, step=True).exit_code == 1


def test_torchrun_that_waited_for_another_host_in_vain_is_a_consequence() -> None:
    tail = ["Traceback", "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 here."]
    assert ended(tail).is_consequence
    assert not ended(["OSError: [Errno 98] Address already in use"]).is_consequence


@pytest.mark.parametrize(
    ("tail", "reports", "reason"),
    [
        # torch's text has the root cause last, and what came of it before.
        (torchrun((1, -6, 5), (0, -9, 0)), [running(0), running(1)], "rank 0 on algo-1 was killed by SIGKILL: out of"),
        (torchrun((1, -9, 0), (0, -6, 0)), [running(0), running(1)], "rank 1 on algo-1 was killed by SIGKILL: out of"),
        (torchrun((1, -6, 5), (0, -6, 0)), [running(0), running(1)], "rank 0 on algo-1 was killed by SIGABRT"),
        (torchrun((1, -6, 0)), [said(0, NAN, after=0.4), running(1)], f"rank 0 on algo-1: {NAN}"),
        (torchrun((1, -15, 5)), [said(0, NAN), running(1)], f"rank 0 on algo-1: {NAN}"),
        (torchrun((1, -6, 0)), [said(0, NAN, after=9), running(1)], "rank 1 on algo-1 was killed by SIGABRT"),
        # A report is written as the rank ends, which torchrun sees a moment later.
        (torchrun((1, -9, 0)), [said(0, "RuntimeError: odd", after=-0.5), running(1)], "rank 1 on algo-1 was killed"),
        (torchrun((1, -9, 5)), [said(0, NAN), running(1)], f"rank 0 on algo-1: {NAN}"),
        (torchrun((1, -6, 9)), [said(0, f"{GLOO}x.cc:1] Connection closed by peer"), running(1)], "rank 1 on algo-1 w"),
        # Told to stop by the other's end, and a second time as it wrote its word.
        (torchrun((1, 75, 0), (0, 1, 0)), [said(0, NAN), running(1)], f"rank 0 on algo-1: {NAN}"),
    ],
)
def test_the_first_cause_is_named(tail: list[str], reports: list[RankReport], reason: str) -> None:
    assert ended(tail, *reports).reason.startswith(reason)


def test_ranks_that_we_killed_and_signals_without_a_name() -> None:
    assert death(-40) == "was killed by signal 40"
    assert death(3) == "ended with exit code 3 and no word"


def test_who_is_killed_when_all_ranks_have_ended_was_not_too_late() -> None:
    """torchrun alone was left when the time after a signal to stop was over."""
    reports = {0: said(0, NAN), 1: RankReport(1, 11, 75, NOON)}
    host: Any = SimpleNamespace(
        _all_reports=lambda: reports, _own_ranks=range(2), _hang="", _was_told_to_stop=True, _was_killed=True
    )
    place = SimpleNamespace(host="algo-1", hosts=("algo-1",))
    host._tail, host._place, host._job, host._killed = [], place, SimpleNamespace(world_size=2), ()
    host._failure = lambda *given, **named: HostRun._failure(host, *given, **named)
    assert HostRun._ending(host, 1, made_a_step=True).reason == f"rank 0 on algo-1: {NAN}"
