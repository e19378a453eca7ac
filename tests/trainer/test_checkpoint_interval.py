"""checkpoint.every_minutes: auto, from the formula to a run."""

import math
from pathlib import Path

import pytest
from trainer.checkpoint import best_interval_seconds
from trainer_testing.text_job import run_trainer, write_job


def expected_seconds_per_useful_second(interval: float, stall: float, between: float) -> float:
    """Daly's exact model (2006, eq. 20, no restart cost): failures come at random, also while a save is written."""
    return between / interval * (math.exp((interval + stall) / between) - 1)


@pytest.mark.parametrize(("stall", "between"), [(0.5, 3600.0), (10.0, 3600.0), (60.0, 7200.0), (300.0, 3600.0)])
def test_no_other_interval_is_cheaper(stall: float, between: float) -> None:
    best = best_interval_seconds(save_seconds=0, stall_seconds=stall, seconds_between_failures=between)
    cost = expected_seconds_per_useful_second(best, stall, between)
    others = [expected_seconds_per_useful_second(best * 1.05**power, stall, between) for power in range(-60, 60)]
    assert cost < min(others) * 1.0005
    young = math.sqrt(2 * stall * between)
    assert best == pytest.approx(young, rel=math.sqrt(stall / between) + 0.01)


def test_limits() -> None:
    assert best_interval_seconds(save_seconds=900, stall_seconds=0.1, seconds_between_failures=3600) == 900
    assert best_interval_seconds(save_seconds=1, stall_seconds=99, seconds_between_failures=10) == 10


def test_auto_measures_with_the_first_save_and_then_waits(tmp_path: Path) -> None:
    job = write_job(tmp_path, "single", steps=8)
    settings = ("--set", "checkpoint.every_minutes=auto", "--set", "checkpoint.every_steps=null")
    output, _ = run_trainer(1, job, tmp_path / "out", *settings, "--set", "checkpoint.keep_last=9")
    committed = [line.split()[1] for line in output.splitlines() if line.startswith("checkpoint step=")]
    assert committed == ["step=1", "step=8"], output
