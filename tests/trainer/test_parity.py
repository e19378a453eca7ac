"""Every strategy at 1, 2 and 4 processes trains as one process does: 20 steps in fp32, within 1e-5 relative.

Gradients are accumulated, clipping is active at every step, and sequences have very different lengths, so a loss
averaged per rank or per micro-batch, a norm of one rank alone, or a gradient off by a factor would all show.
One launch a world size runs all strategies, because importing torch and DeepSpeed is most of the time.
"""

import pytest
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import LAYOUTS

TOLERANCE = 1e-5
STEPS = 20


def run_strategies(world_size: int, names: list[str]) -> dict[str, Result]:
    """Results by strategy."""
    results = run(world_size, [RunRequest(strategy=name, last_step=STEPS) for name in names])
    return {result["strategy"]: result for result in results}


@pytest.fixture(scope="module")
def one_process() -> dict[str, Result]:
    """The reference, and ZeRO on one rank."""
    return run_strategies(1, [name for name, worlds in LAYOUTS.items() if 1 in worlds])


def test_the_reference_learns_and_is_clipped(one_process: dict[str, Result]) -> None:
    reference = one_process["single"]
    assert len(reference["loss"]) == STEPS
    assert reference["loss"][-1] < 0.8 * reference["loss"][0]
    assert min(reference["grad_norm"]) > 0.5, "the clip of 0.5 must have been active at every step"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_norms_equal_one_process(world_size: int, one_process: dict[str, Result]) -> None:
    names = [name for name, worlds in LAYOUTS.items() if world_size in worlds and name != "single"]
    results = one_process if world_size == 1 else run_strategies(world_size, names)
    errors = {name: worst_relative_error(results[name], one_process["single"]) for name in names}
    print(f"world {world_size}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}
