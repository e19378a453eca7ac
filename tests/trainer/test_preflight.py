"""The network is measured before the first step: who talks to whom, who is named; a job stops, warns or goes."""

import json
from pathlib import Path
from typing import Any

import pytest
from trainer.preflight import (
    HOSTS_A_GROUP,
    RankSpeed,
    _diagnosis,
    chosen_floors,
    group_members,
    not_compared,
    partner_of,
)
from trainer_testing.pool import run_pooled
from trainer_testing.preflight_worker import MARK, WRONG
from trainer_testing.text_job import run_trainer, write_job

from trainyard.spec.job import PreflightSpec

KNOWN = {"host": (300.0, "a table"), "across": (20.0, "a line rate")}


@pytest.mark.parametrize("size", range(2, 12))
def test_every_rank_meets_two_others(size: int) -> None:
    met: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for shift in range(3):
        for rank in range(size):
            partner = partner_of(rank, size, shift)
            if partner is not None:
                assert partner != rank and partner_of(partner, size, shift) == rank, "both sides must agree"
                met[rank].add(partner)
    assert all(len(partners) >= min(2, size - 1) for partners in met.values())


@pytest.mark.parametrize(("num_hosts", "per_host"), [(2, 8), (8, 8), (9, 2), (17, 4), (512, 8), (3, 1)])
def test_groups_between_hosts_have_one_rank_of_each_of_a_few_hosts(num_hosts: int, per_host: int) -> None:
    groups = group_members("across", num_hosts * per_host, per_host)
    assert sorted(rank for group in groups for rank in group) == list(range(num_hosts * per_host))
    for group in groups:
        assert 2 <= len(group) <= HOSTS_A_GROUP
        assert len({rank // per_host for rank in group}) == len(group)
        assert len({rank % per_host for rank in group}) == 1


def test_groups_of_one_are_none() -> None:
    assert group_members("across", 8, 8) == []
    assert group_members("host", 4, 1) == []
    assert group_members("host", 4, 2) == [[0, 1], [2, 3]]


def test_only_gpus_of_several_hosts_are_measured_unless_the_job_says_so() -> None:
    auto, stop = PreflightSpec(), PreflightSpec(collectives="stop")
    stated = PreflightSpec(across_gb_per_second=3.0)
    own = {"across": (3.0, "preflight.across_gb_per_second")}
    assert chosen_floors(auto, KNOWN, num_hosts=2, is_gpu=True) == KNOWN
    assert chosen_floors(auto, KNOWN, num_hosts=1, is_gpu=True) == {}
    assert chosen_floors(auto, KNOWN, num_hosts=2, is_gpu=False) == {}, "a rehearsal on CPUs"
    assert chosen_floors(auto, {}, num_hosts=2, is_gpu=True) == {}, "no EFA"
    assert chosen_floors(stop, KNOWN, num_hosts=1, is_gpu=True) == KNOWN
    assert chosen_floors(stop, KNOWN, num_hosts=2, is_gpu=False) == {}
    assert chosen_floors(stated, KNOWN, num_hosts=2, is_gpu=True) == KNOWN | own
    assert chosen_floors(stated, KNOWN, num_hosts=2, is_gpu=False) == own
    assert chosen_floors(PreflightSpec(collectives="off"), KNOWN, num_hosts=2, is_gpu=True) == {}


def of(host: int, local: int, group: float, pair: float | None) -> RankSpeed:
    """What a rank of a host of two saw."""
    return RankSpeed(2 * host + local, f"algo-{host}", group, pair)


def test_of_slow_groups_the_hosts_are_named_that_are_slow_with_everybody() -> None:
    pairs = [of(host, local, 1.0 if host < 3 else 30.0, 25.0) for host in range(6) for local in (0, 1)]
    pairs[3] = of(1, 1, 1.0, 1.5)
    found = _diagnosis("across", pairs, 20.0)
    assert found.startswith("it points at algo-1 (rank 3, 1.50 GB/s): it may be TCP instead of EFA")
    assert found.endswith(", or replace the host")
    assert _diagnosis("host", [of(host, 0, 1.0 + host, None) for host in range(6)], 3.5).startswith(
        "it points at algo-0 (rank 0, 1.00 GB/s), algo-1 (rank 2, 2.00 GB/s), algo-2 (rank 4, 3.00 GB/s): it may be"
    )
    assert "and 2 more: " in _diagnosis("host", [of(host, 0, 1.0, None) for host in range(6)], 3.5)


def test_where_only_groups_are_slow_no_host_is_blamed() -> None:
    speeds = [of(0, 0, 1.0, 25.0), of(1, 0, 1.0, 24.0), of(2, 0, 30.0, None), of(3, 0, 30.0, None)]
    found = _diagnosis("across", speeds, 20.0)
    assert found.startswith(
        "it points at no single host: in pairs each reaches 24.00 GB/s or more, in groups less:"
        " algo-0 (rank 0, 1.00 GB/s), algo-1 (rank 2, 1.00 GB/s): it may be TCP instead of EFA"
    )
    assert "replace the host" not in found


def told(num_ranks: int, ill_rank: int, illness: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the check ends with, alike on all ranks, when one is ill, after it had found nothing when none was."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    outputs = run_pooled(num_ranks, "trainer_testing.preflight_worker", str(ill_rank), illness, timeout_seconds=300)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith(MARK)]
    assert len(lines) == num_ranks and len(set(lines)) == 1, lines
    seen: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    assert seen["before"] == ""
    return seen


@pytest.mark.slow
def test_of_four_hosts_the_slow_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told(4, 2, "slow", monkeypatch)
    assert seen["left_over"] == 0, "its process groups are gone"
    assert seen["found"].startswith("preflight: all_reduce between hosts has ")
    assert "(preflight.across_gb_per_second); it points at host-2 (rank 2, " in seen["found"]
    assert seen["found"].count("rank ") == 1


def test_a_host_whose_results_are_wrong_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told(3, 1, "wrong", monkeypatch)
    assert seen["found"].startswith("all_reduce over across (")
    assert f": {WRONG} elements are wrong, on host-1 (rank 1, {WRONG} elements): the network or a GPU" in seen["found"]
    assert seen["left_over"] == 1, "after an error a rank may be gone, so nothing is torn down here"


def test_who_fails_to_connect_once_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(3, 2, "once", monkeypatch) == {"before": "", "found": "", "left_over": 0}


def test_who_never_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = told(3, 2, "always", monkeypatch)
    assert seen["left_over"] == 0
    assert seen["found"].startswith(
        "preflight: the ranks could not connect to each other between hosts in 2 tries;"
        " rank 2 on host-2: no route to anybody, or set preflight.collectives to warn (or off)"
    )


def test_a_job_trains_over_a_network_that_reaches_its_floor_or_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    job = write_job(tmp_path, "ddp", steps=1)
    said, rows = run_trainer(2, job, tmp_path / "good", "--set", "preflight.across_gb_per_second=0.000001")
    assert len(rows) == 1
    (line,) = [line for line in said.splitlines() if line.startswith("preflight all_reduce=across ")]
    assert float(line.split("slowest_bus_gb_per_second=")[1].split()[0]) > 0
    assert "warning: preflight" not in said

    settings = ("--set", "preflight.across_gb_per_second=9999", "--set", "preflight.collectives=warn")
    said, rows = run_trainer(2, job, tmp_path / "warned", *settings)
    assert len(rows) == 1
    assert said.count("warning: preflight: all_reduce between hosts has ") == 1


def test_a_job_stops_before_its_first_step_on_a_slow_network(tmp_path: Path) -> None:
    """Two ranks of one host: the floor inside it counts."""
    job = write_job(tmp_path, "ddp", steps=1)
    output = tmp_path / "slow"
    said, rows = run_trainer(2, job, output, "--set", "preflight.host_gb_per_second=9999", expected_code=1)
    assert rows == [] and not (output / "checkpoints").exists()
    (line,) = {line for line in said.splitlines() if line.startswith("trainyard: ")}
    assert "all_reduce inside a host has " in line and "the floor is 9999.00 (preflight.host_gb_per_second)" in line
    assert "PCIe instead of NVLink" in line and line.endswith(
        "or set preflight.collectives to warn (or off) to train all the same"
    )


def test_a_job_says_nothing_of_a_network_that_it_has_no_floor_for(tmp_path: Path) -> None:
    said, _ = run_trainer(2, write_job(tmp_path, "ddp", steps=1), tmp_path / "out")
    assert "preflight" not in said


def test_a_stated_floor_that_nothing_is_compared_with_is_said(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=1)
    settings = ("--set", "preflight.across_gb_per_second=5", "--set", "preflight.host_gb_per_second=5")
    said, rows = run_trainer(1, job, tmp_path / "out", *settings)
    assert len(rows) == 1
    assert [line for line in said.splitlines() if "preflight" in line] == [
        "warning: preflight.across_gb_per_second: is compared with nothing: all ranks are on one host",
        "warning: preflight.host_gb_per_second: is compared with nothing: each host has one rank",
    ]


def test_what_can_not_be_compared() -> None:
    asked = PreflightSpec(collectives="stop", host_gb_per_second=5.0)
    groups = [[0, 1], [2, 3]]
    assert not_compared(asked, {"host": groups}) == []
    assert not_compared(asked, {"host": [], "across": groups}) == [
        "warning: preflight.host_gb_per_second: is compared with nothing: each host has one rank"
    ]
    assert not_compared(PreflightSpec(collectives="stop"), {"host": [], "across": groups}) == []
    (line,) = not_compared(PreflightSpec(collectives="stop"), {"host": []})
    assert line.startswith("preflight: nothing was measured: ")
    assert not_compared(PreflightSpec(), {}) == []
