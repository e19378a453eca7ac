"""Requests to look inside: read from a file or a signal, agreed on by summed votes; the trace itself is seen in
test_observe_anomalies, where a job runs anyway."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.observe.profiling import MOST_STEPS, REQUEST_FILE, Profiling, Request, parse_request


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Request(3, False)),
        ("7\n", Request(7, False)),
        ("2 all", Request(2, True)),
        ("all", Request(3, True)),
        ("0", Request(1, False)),
        ("1000000", Request(MOST_STEPS, False)),
        ("please", Request(3, False)),
    ],
)
def test_a_request_is_read_leniently(text: str, expected: Request) -> None:
    assert parse_request(text) == expected


def place(rank: int, local_rank: int) -> Any:
    return SimpleNamespace(rank=rank, local_rank=local_rank, is_first=rank == 0)


def test_a_file_is_heard_once_by_one_rank_of_the_host(tmp_path: Path) -> None:
    leader, other = Profiling(place(8, 0), tmp_path), Profiling(place(9, 1), tmp_path)
    (tmp_path / REQUEST_FILE).write_text("5 all")
    assert other.votes() == [0.0, 0.0, 0.0]
    assert leader.votes() == [1.0, 5.0, 1.0]
    assert not (tmp_path / REQUEST_FILE).exists()
    assert leader.votes() == [0.0, 0.0, 0.0]
    other.close()
    leader.close()


def test_a_signal_to_any_rank_is_a_request(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGRTMIN)
    profiling = Profiling(place(9, 1), tmp_path)
    os.kill(os.getpid(), signal.SIGRTMIN)
    assert profiling.votes() == [1.0, 3.0, 0.0]
    assert profiling.votes() == [0.0, 0.0, 0.0]
    profiling.close()
    assert signal.getsignal(signal.SIGRTMIN) == before


def test_a_profile_that_cannot_be_written_costs_the_job_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiles").write_text("no folder")
    profiling = Profiling(place(0, 1), tmp_path)
    profiling.after_step(4, [1.0, 1.0, 0.0])
    profiling.after_step(5, [0.0, 0.0, 0.0])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "profile begins step=5 last_step=5"
    assert said[1].startswith("profile steps=5-5 not written on rank 0: [Errno 20] Not a directory")
    profiling.after_step(6, [1.0, 1.0, 0.0])
    assert capsys.readouterr().out.startswith("profile begins step=7"), "the next request is heard"
    profiling.close()


def test_votes_of_several_hosts_are_one_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiling = Profiling(place(0, 1), tmp_path)
    profiling.after_step(4, [2.0, 6.0, 0.0])
    profiling.after_step(5, [1.0, 9.0, 0.0])
    assert not (tmp_path / "profiles").exists()
    profiling.after_step(6, [0.0, 0.0, 0.0])
    profiling.after_step(7, [0.0, 0.0, 0.0])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "profile begins step=5 last_step=7"
    assert said[1].startswith(f"profile steps=5-7 folder={tmp_path}/profiles/step-00000005")
    assert not (tmp_path / "profiles/step-00000005/rank-0.json").exists(), "no leader, and nobody asked for all"
    profiling.close()
