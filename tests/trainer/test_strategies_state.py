"""One checkpoint format for every engine: bitwise into the same layout, within 1e-5 into any other."""

from dataclasses import replace
from pathlib import Path

import pytest
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error

SAVED_AT, LAST = 3, 6
SOURCES = ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> dict[str, Result]:
    """Two ranks of each strategy over all steps, saving half-way without stopping."""
    requests = [
        RunRequest(strategy=name, last_step=LAST, save=str(folder / name), save_after_step=SAVED_AT) for name in SOURCES
    ]
    return {result["strategy"]: result for result in run(2, requests)}


def resumed(strategy: str, folder: Path, source: str) -> RunRequest:
    return RunRequest(strategy=strategy, first_step=SAVED_AT + 1, last_step=LAST, load=str(folder / source))


def check_equal_bits(resumed_results: list[Result], whole: dict[str, Result]) -> None:
    for result in resumed_results:
        expected = whole[result["strategy"]]
        for key in ("loss", "grad_norm", "validation"):
            wanted = expected[key] if key == "validation" else expected[key][SAVED_AT:]
            assert [value.hex() for value in result[key]] == [value.hex() for value in wanted], result["strategy"]


def test_new_processes_of_the_same_layout_go_on_bit_for_bit(folder: Path, uninterrupted: dict[str, Result]) -> None:
    check_equal_bits(run(2, [resumed(name, folder, name) for name in SOURCES]), uninterrupted)


def test_so_do_those_that_compute_blocks_again(folder: Path, uninterrupted: dict[str, Result]) -> None:
    """What ZeRO-3 has gathered when it begins is another thing after a load, and so is what it gathers when."""
    cases = [(name, mode) for name in ("zero3", "fsdp") for mode in ("selective", "full")]
    requests = [replace(resumed(name, folder, name), job={"activation_checkpointing": mode}) for name, mode in cases]
    check_equal_bits(run(2, requests), uninterrupted)


def check_continuations(pairs: list[tuple[str, str]], results: list[Result], whole: dict[str, Result]) -> None:
    for (source, target), result in zip(pairs, results, strict=True):
        assert len(result["loss"]) == LAST - SAVED_AT
        assert worst_relative_error(result, whole[source]) < 1e-5, f"{source} -> {target}"


def test_one_process_goes_on_from_two(folder: Path, uninterrupted: dict[str, Result]) -> None:
    pairs = [("zero2", "single"), ("fsdp", "zero3"), ("ddp", "zero1")]
    results = run(1, [resumed(target, folder, source) for source, target in pairs])
    check_continuations(pairs, results, uninterrupted)


@pytest.mark.slow
def test_four_processes_go_on_from_two_and_from_four_bit_for_bit(
    folder: Path, uninterrupted: dict[str, Result]
) -> None:
    """DDP at four ranks is equal only because its buckets are settled before the first step."""
    pairs = [("zero2", "fsdp"), ("zero3", "hsdp"), ("fsdp", "zero2"), ("zero1", "zero3"), ("ddp", "zero1")]
    whole = [
        RunRequest(strategy=name, last_step=LAST, save=str(folder / f"four-{name}"), save_after_step=SAVED_AT)
        for name in ("ddp", "hsdp")
    ]
    results = run(4, [*(resumed(target, folder, source) for source, target in pairs), *whole])
    check_continuations(pairs, results[: len(pairs)], uninterrupted)
    again = run(4, [resumed(name, folder, f"four-{name}") for name in ("ddp", "hsdp")])
    check_equal_bits(again, {result["strategy"]: result for result in results[len(pairs) :]})
