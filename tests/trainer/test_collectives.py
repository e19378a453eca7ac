"""The benchmark of collectives: its formulas, its check of every element, its floor; and a run of two ranks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer.collectives import (
    OPERATIONS,
    Bench,
    Measurement,
    bus_factor,
    check_floors,
    main,
    parse_size,
)
from trainer_testing.distributed import finish
from trainer_testing.pool import start_pooled

from trainyard.errors import InputError
from trainyard.hardware.bandwidth import bandwidth_floors


def test_bus_bandwidth_is_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert [bus_factor(name, 8) for name in OPERATIONS[1:4]] == [7 / 8] * 3
    assert bus_factor("point_to_point", 8) == 1.0


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("all_reduce", [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]),
        ("all_gather", [0.0, 1.0, 1.0, 2.0, 2.0, 3.0]),
        ("reduce_scatter", [9.0, 12.0]),
        ("all_to_all", [2.0, 3.0, 3.0, 4.0, 4.0, 5.0]),
        ("point_to_point", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    ],
)
def test_what_the_second_of_three_ranks_must_get(
    operation: str, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 3)
    bench = Bench(None, 24, torch.device("cpu"))  # type: ignore[arg-type]  # its group is asked for nothing else
    assert bench.expected(operation).tolist() == expected

    def right() -> None:
        bench.out[: len(expected)] = torch.tensor(expected)

    def wrong() -> None:
        right()
        bench.out[len(expected) - 1] += 1

    assert bench.num_wrong(operation, right) == 0
    assert bench.num_wrong(operation, wrong) == 1
    assert bench.num_wrong(operation, lambda: None) > 0, "nothing that was there before counts as a result"


def measured(kind: str, num_bytes: int, bus: float) -> Measurement:
    return Measurement("all_reduce", kind, 8, num_bytes, 0.1, bus, bus)


def test_the_largest_all_reduce_is_held_against_the_floor() -> None:
    floors = {"host": (300.0, "a table"), "across": (20.0, "a line rate")}
    found = [measured("host", 100, 1.0), measured("host", 200, 400.0), measured("across", 200, 1.6)]
    (line,) = check_floors(found, floors)
    assert line.startswith(
        "all_reduce over across (8 ranks, 200 bytes): 1.60 GB/s of bus bandwidth, the floor is 20.00"
    )
    assert "a line rate" in line
    assert check_floors(found[:2], floors) == []


def test_floors_have_sources_and_lie_above_a_fallback() -> None:
    floors = bandwidth_floors("ml.p5.48xlarge")
    assert floors["host"][0] == pytest.approx(300)
    assert floors["across"][0] == pytest.approx(20)
    assert all(source for _, source in floors.values())
    # TCP: one 100 Gb/s card for eight GPUs.
    assert floors["across"][0] > 100 / 8 / 8
    with pytest.raises(InputError, match="unknown instance type"):
        bandwidth_floors("ml.p5.big")


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "64KiB", "1MiB", "2gib")] == [4096, 2**16, 2**20, 2**31]
    for text in ("", "x", "1TB", "0"):
        with pytest.raises(InputError, match="--sizes"):
            parse_size(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--groups", "rack"], "--groups rack: is not known; it takes world, host, across"),
        (["--operations", "gossip"], "--operations gossip: is not known"),
        (["--repeats", "0"], "--repeats: must be at least 1"),
        (["--floor", "1", "--instance-type", "p5.48xlarge"], "give one of them"),
        (["--instance-type", "p5.tiny"], "unknown instance type"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operations", "all_gather", "--floor", "1"], "all_reduce over world and host and across; asked for and"),
        (["--groups", "world", "--instance-type", "ml.p5.48xlarge"], "ml.p5.48xlarge has floors for all_reduce over"),
        (["--groups", "host", "--floor", "1"], "over no group of two ranks or more"),
        (["--json", "nowhere/found.json"], "--json nowhere/found.json: its folder doesn't exist"),
    ],
)
def test_what_could_not_be_compared_or_kept_is_refused_before_it_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two hosts with a rank each."""

    @contextmanager
    def two_ranks(**_: object) -> Iterator[Any]:
        yield SimpleNamespace(world_size=2, rank=0, is_first=True, sum_over_ranks=lambda *values: list(values))

    def no_measurement(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("trainer.collectives.distributed_runtime", two_ranks)
    monkeypatch.setattr("trainer.collectives.Bench", no_measurement)
    monkeypatch.setattr(dist, "new_group", lambda _: None)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert ("nothing would be compared with a floor" in error) == ("--json" not in arguments)
    assert error.count("\n") == 1


def test_two_ranks_on_two_hosts_are_measured_and_fall_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    path = tmp_path / "found.json"
    options = ["--sizes", "4KiB,64KiB", "--repeats", "2", "--floor", "1e6", "--json", str(path)]
    outputs = finish(start_pooled(2, "trainer.collectives", *options), timeout_seconds=600)
    assert [code for code, _ in outputs] == [1, 1], outputs
    lines = [line for line in outputs[0][1].splitlines() if line.startswith("collective ")]
    assert len(lines) == 2 * 2 * len(OPERATIONS), "world and across; a host of one rank has nobody to talk to"
    assert all(line.endswith("results=right") for line in lines)
    found = json.loads(path.read_text())
    assert (found["world_size"], found["backend"]) == (2, "gloo")
    for one in found["measurements"]:
        assert one["num_bytes"] in (2**12, 2**16)
        assert one["algorithm_gb_per_second"] == pytest.approx(one["num_bytes"] / one["seconds"] / 1e9)
        assert one["bus_gb_per_second"] == pytest.approx(
            one["algorithm_gb_per_second"] * bus_factor(one["operation"], one["num_ranks"])
        )
    errors = [line for line in outputs[0][1].splitlines() if line.startswith("trainyard: ")]
    assert len(errors) == 1
    assert "all_reduce over across (2 ranks, 65536 bytes):" in errors[0]
    assert "trainyard" not in outputs[1][1]
