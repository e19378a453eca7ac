"""Every configuration of the table over ten steps, against the single-process run of the same job.

In float64 loss, gradient norm, validation loss and weights, in float32 loss and gradient norms. Ranks are forks of one
process that has imported everything (`trainer_testing.pool`), and train one configuration after the other.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from trainer_testing.strategy_worker import Result, run, worst_relative_error

from parity.table import LAYOUTS, MODELS, SCHEDULES, SHORT, STEPS, TABLE, TOLERANCES, Configuration, Reference

GROUP_SIZE = 6
GROUP_SECONDS = 500
"""For so many configurations of one model at one number of ranks; on two idle cores, the largest take half a minute."""


class Runs:
    """Results of the configurations that were chosen, each group of them run when its first one is asked for."""

    def __init__(self, chosen: list[Configuration], folder: Path) -> None:
        self._folder = folder
        alike: dict[tuple[int, str, str], list[Configuration]] = defaultdict(list)
        for one in chosen:
            alike[one.parallelism.world_size, one.model, one.parallelism.engine].append(one)
        groups = [group[i : i + GROUP_SIZE] for group in alike.values() for i in range(0, len(group), GROUP_SIZE)]
        self._groups = {one: group for group in groups for one in group}
        self._results: dict[Configuration, Result] = {}
        self._references: dict[Reference, Result] = {}
        self._failures: dict[Configuration, str] = {}

    def reference(self, configuration: Configuration) -> Result:
        """What one process gave."""
        self._run(configuration)
        return self._references[configuration.reference]

    def result(self, configuration: Configuration) -> Result:
        """What its ranks gave."""
        self._run(configuration)
        return self._results[configuration]

    def _run(self, configuration: Configuration) -> None:
        if configuration in self._results:
            return
        group = self._groups[configuration]
        # One that breaks its group is not run once more for each of the others.
        assert configuration not in self._failures, self._failures[configuration]
        try:
            self._run_group(group)
        except AssertionError as error:
            self._failures |= dict.fromkeys(group, f"its group failed: {error}")
            raise

    def _run_group(self, group: list[Configuration]) -> None:
        missing = list(dict.fromkeys(one.reference for one in group if one.reference not in self._references))
        if missing:
            results = run(1, [reference.request(self._folder) for reference in missing], GROUP_SECONDS)
            self._references |= dict(zip(missing, results, strict=True))
        requests = [one.request(self._folder) for one in group]
        results = run(group[0].parallelism.world_size, requests, GROUP_SECONDS)
        self._results |= dict(zip(group, results, strict=True))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of the configurations that this run of pytest has selected."""
    chosen = [
        item.callspec.params["configuration"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_equals_one_process.__name__
    ]
    return Runs(chosen, tmp_path_factory.mktemp("references"))


def lines() -> list[Any]:
    """The table as parameters."""
    return [
        pytest.param(one, id=one.name, marks=() if one.is_short else (pytest.mark.full, pytest.mark.timeout(1200)))
        for one in TABLE
    ]


@pytest.mark.parametrize("configuration", lines())
def test_equals_one_process(configuration: Configuration, runs: Runs) -> None:
    result, reference = runs.result(configuration), runs.reference(configuration)
    assert len(reference["loss"]) == STEPS
    assert reference["loss"][-1] < 0.99 * reference["loss"][0], "what doesn't learn proves nothing"
    assert min(reference["grad_norm"]) > 0.5, "the clip of 0.5 must have been active at every step"
    numbers, weights = worst_relative_error(result, reference), result["weights_error"]
    print(f"{configuration.name}: numbers {numbers:.1e}, weights {weights:.1e}")
    assert numbers < TOLERANCES[configuration.precision]
    assert weights < (TOLERANCES["fp64"] if configuration.precision == "fp64" else 1e-2)


def test_the_short_part_has_something_of_everything() -> None:
    """A line that goes missing from it would be missed by nobody."""
    layouts = [configuration.parallelism for configuration in SHORT]
    for axis in ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert"):
        assert any(getattr(layout, axis) > 1 for layout in layouts), axis
    assert {layout.pipeline_schedule for layout in layouts if layout.pipeline > 1} == set(SCHEDULES)
    assert {layout.zero_stage for layout in layouts if layout.engine == "deepspeed"} == {1, 2, 3}
    assert any(layout.offload == "cpu" for layout in layouts)
    assert {configuration.model for configuration in SHORT} == set(MODELS)
    assert {configuration.accumulation for configuration in SHORT} == {1, 4}
    assert {configuration.is_packed for configuration in SHORT} == {True, False}
    assert {layout.world_size for layout in layouts} == {2, 4, 8}


def test_the_table_has_every_layout_in_full_precision_and_in_float32() -> None:
    for layout, settings in LAYOUTS.items():
        precisions = {configuration.precision for configuration in TABLE if configuration.layout == layout}
        assert precisions == ({"fp32"} if "engine" in settings else {"fp64", "fp32"}), layout
    assert len({configuration.name for configuration in TABLE}) == len(TABLE)
