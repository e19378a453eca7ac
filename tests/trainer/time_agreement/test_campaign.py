"""The time campaign itself: what its seeds stand for, some of them played, and that what is off is found.

The long part is `scripts/time_campaign`; docs/dry_run.md says what it has found.
"""

from pathlib import Path
from typing import Any

import pytest
from memory_agreement.draws import draw
from trainer_testing import seeds

from time_agreement import campaign
from time_agreement.campaign import Played, parts, play_seed, problems, table
from trainyard.errors import InputError


def test_jobs_are_the_memory_campaigns_but_for_deepspeeds() -> None:
    """Whose seeds are drawn on, the model being the same."""
    engines = {seed: draw(seed).job.parallelism.engine for seed in range(1, 31)}  # type: ignore[union-attr]
    assert {"torch", "deepspeed"} == set(engines.values())
    for seed, engine in engines.items():
        drawn = draw(seed, engine="torch")
        assert drawn.job.parallelism.engine == "torch"  # type: ignore[union-attr]
        assert (drawn.job == draw(seed).job) == (engine == "torch")
        assert drawn.job.model.config == draw(seed).job.model.config


@pytest.mark.parametrize("seed", [9015, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (9001, 9008))])
def test_a_seed_agrees(seed: int) -> None:
    told = play_seed(seed)
    assert told.problems == []
    assert told.planned.keys() == told.traced.keys()
    assert abs(told.off) < campaign.TOTAL_LIMIT and told.traced["forward"] > 0.001


def _played(**planned: float) -> Played:
    """A step of which formulas and trace say the same, but for what is given, in seconds."""
    usual: dict[str, Any] = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1, "bubble": 0.0}
    return Played(0, "Llama: {}", "fsdp: {}", usual, usual | planned)


@pytest.mark.parametrize(
    ("planned", "is_off"),
    [
        ({}, False),
        ({"forward": 0.49}, False),
        ({"forward": 0.51}, True),
        ({"forward": 0.29}, True),
        ({"forward": 0.5, "backward": 0.4}, False),
        ({"bubble": 0.2}, True),
    ],
)
def test_what_is_off_is_found(planned: dict[str, float], is_off: bool) -> None:
    assert [line.split(":")[0] for line in problems(_played(**planned))] == ["step"] * is_off


def test_a_trace_that_fails_is_told_and_the_next_seed_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise InputError("--dry-run: out of tune")

    monkeypatch.setattr(campaign, "steps_of", failing)
    said: list[Played] = []
    played = seeds.campaign([1, 2], play_seed, minutes=None, say=said.append)
    assert [row.problems for row in played] == [["not traced: --dry-run: out of tune"]] * 2
    assert said == played


def test_results_are_kept_and_told(tmp_path: Path) -> None:
    rows = [_played(), _played(optimizer=0.3), Played(2, "Llama: {}", "ddp: {}", refused={"tensor: N": 2})]
    rows[1].problems = problems(rows[1])
    seeds.write(tmp_path / "results.json", rows)
    assert seeds.read(tmp_path / "results.json", Played) == rows
    said = table(rows)
    assert said.startswith("2 of 3 steps agree\n  median 10.0%, from +0% to +20%\n")
    assert "refused 2: tensor: N" in said
    assert "OFF seed 0: step: trace 1000.0, formulas 1200.0 ms (+20%)" in said
    assert parts(rows[1]) == "forward 400.0, 400.0; backward 500.0, 500.0; optimizer 100.0, 300.0 ms"
