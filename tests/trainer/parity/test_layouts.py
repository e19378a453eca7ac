"""Checkpoints between layouts: one process reads every layout's, every layout reads its, and its own bit for bit.

Whatever A writes one process reads, and what one process writes B reads: so B reads what A wrote, for all pairs of the
table, at a cost that grows with their number alone. The three continuations of a layout are compared with the
undisturbed runs, over the last half of the steps: loss, gradient norm, validation loss, and in float64 the weights.
What scripts/test runs of this is in test_products.py and test_strategies_state.py.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error

from parity.table import LAYOUTS, STEPS, TOLERANCES, Configuration

SAVED_AT = STEPS // 2
SECONDS = 500


def configuration(layout: str) -> Configuration:
    """The layout's line of the table with its first model, in the precision that it is proved in."""
    model = "mixtral" if LAYOUTS[layout].get("expert", 1) > 1 else "llama"
    return Configuration(layout, model, precision="fp32" if "engine" in LAYOUTS[layout] else "fp64")


def saving(request: RunRequest, folder: Path) -> RunRequest:
    return replace(request, save=str(folder), save_after_step=SAVED_AT)


def resuming(request: RunRequest, folder: Path) -> RunRequest:
    return replace(request, first_step=SAVED_AT + 1, load=str(folder))


def check_same_bits(resumed: Result, whole: Result) -> None:
    for key in ("loss", "grad_norm", "validation"):
        wanted = whole[key] if key == "validation" else whole[key][SAVED_AT:]
        assert [value.hex() for value in resumed[key]] == [value.hex() for value in wanted], key


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_between_this_layout_and_one_process(layout: str, tmp_path: Path) -> None:
    one = configuration(layout)
    alone, ranks = one.reference.request(tmp_path), one.request(tmp_path)
    world_size, tolerance = one.parallelism.world_size, TOLERANCES[one.precision]

    reference = run(1, [saving(alone, tmp_path / "one")], SECONDS)[0]
    whole = run(world_size, [saving(ranks, tmp_path / "ranks")], SECONDS)[0]
    assert worst_relative_error(whole, reference) < tolerance

    # Other processes than those that saved.
    requests = [resuming(ranks, tmp_path / "ranks"), resuming(ranks, tmp_path / "one")]
    same, taken_over = run(world_size, requests, SECONDS)
    check_same_bits(same, whole)
    assert len(taken_over["loss"]) == STEPS - SAVED_AT
    back = resuming(replace(alone, keep_weights=None, weights=alone.keep_weights), tmp_path / "ranks")
    for result in (taken_over, run(1, [back], SECONDS)[0]):
        assert worst_relative_error(result, reference) < tolerance
        assert result["weights_error"] < (tolerance if one.precision == "fp64" else 1e-2)
