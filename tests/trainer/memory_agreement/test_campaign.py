"""The memory campaign itself: what its seeds stand for, one of them played, and that what is off is found.

The long part is `scripts/memory_campaign`; docs/dry_run.md says what it has found.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from trainer_testing import seeds
from trainer_testing.families import FAMILIES

from memory_agreement import campaign
from memory_agreement.campaign import Played, play, problems, table
from memory_agreement.draws import OPTIMIZERS, ROUTED, WORLD_SIZES, Drawn, draw
from trainyard.errors import InputError
from trainyard.planner.expert_families import EXPERT_READERS

SEEDS = range(1, 81)


@pytest.fixture(scope="module")
def drawn() -> list[Drawn]:
    return [draw(seed) for seed in SEEDS]


def test_a_seed_is_always_the_same_job() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_every_family_with_experts_can_be_drawn() -> None:
    assert set(ROUTED) == {*EXPERT_READERS, "gpt_oss", "qwen2_moe"}


def test_seeds_are_of_everything(drawn: list[Drawn]) -> None:
    layouts: list[Any] = [one.job.parallelism for one in drawn]
    for axis in ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert"):
        assert any(getattr(layout, axis) > 1 for layout in layouts), axis
    assert {layout.world_size for layout in layouts} == set(WORLD_SIZES)
    assert {layout.zero_stage for layout in layouts if layout.engine == "deepspeed"} == {0, 1, 2, 3}
    assert {layout.fsdp.wrap for layout in layouts} == {"block", "size"}
    assert {layout.fsdp.reshard_after_forward for layout in layouts} == {True, False, "auto"}
    jobs = [one.job for one in drawn]
    assert {job.training.optimizer.kind for job in jobs} == set(OPTIMIZERS)
    assert {job.model.adapter.kind if job.model.adapter else None for job in jobs} == {None, "lora", "qlora"}
    assert {job.training.precision for job in jobs} == {"bf16", "fp32"}
    assert {job.training.activation_checkpointing for job in jobs} == {"none", "selective", "full"}
    assert {job.training.loss for job in jobs} == {"auto", "logits", "chunked"}
    assert {job.data.document_masks for job in jobs} == {True, False}
    assert {job.data.sequence_length for job in jobs} == {512, 1024, 2048, 4096, 8192}
    families = {one.family for one in drawn}
    assert families & set(FAMILIES) and families & set(ROUTED) and len(families) > 25
    assert any(one.rank > 0 for one in drawn)


def test_what_is_refused_is_told_with_its_reason(drawn: list[Drawn]) -> None:
    refused: Counter[str] = Counter()
    for one in drawn:
        refused.update(one.refused)
    assert any(reason.startswith("parallelism.tensor: N is not verified") for reason in refused)
    assert not any(re.search(r"\d", reason) for reason in refused)


def test_a_seed_agrees() -> None:
    told = play(draw(1))
    assert told.problems == []
    assert told.state is not None and told.state[0] > 2**30 / 8 and told.moving[0] > 2**30
    assert told.moving[1] == pytest.approx(told.moving[0], rel=0.02)


GIB = 2**30


def _played(
    planned: dict[str, float], at_peak: float = 1.0, planned_at_peak: float = 1.0, **traced: float | None
) -> Played:
    """A rank of which formulas and trace say the same, but for what is given; in GiB. `at_peak`: of gradients."""
    usual: dict[str, Any] = {"parameters": 1.0, "gradients": 1.0, "optimizer": 2.0, "activations": 8.0, "buffers": 2.0}
    found = {name: None if value is None else round(value * GIB) for name, value in (usual | traced).items()}
    said = {name: round(value * GIB) for name, value in (usual | planned).items()}
    gradients = round(at_peak * GIB), round(planned_at_peak * GIB)
    return Played(0, "Llama: {}", "fsdp: {}", 3, found, said, *gradients, "backward")


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ({}, []),
        ({"optimizer": 2.1}, []),
        ({"optimizer": 2.2}, ["state"]),
        ({"optimizer": 1.8}, ["state"]),
        ({"activations": 8.5}, []),
        ({"activations": 8.8}, ["whole"]),
        ({"activations": 7.2}, ["whole"]),
        ({"activations": 9.2}, ["whole", "moving"]),
        ({"activations": 10.0, "buffers": 0.0}, []),
        ({"buffers": 0.0}, ["whole", "moving"]),
    ],
)
def test_what_is_off_is_found(planned: dict[str, float], said: list[str]) -> None:
    assert [line.split(":")[0] for line in problems(_played(planned))] == said


def test_gradients_that_come_late_let_either_moment_be_the_worst() -> None:
    """The trace's has none of them yet; the formulas' has all, and as much less of what moves."""
    assert problems(_played({"activations": 7.0}, at_peak=0.0)) == []
    assert problems(_played({}, at_peak=0.0, planned_at_peak=0.0)) == []
    for planned in ({}, {"activations": 7.0}):
        assert problems(_played(planned, *((0.0, 1.0) if not planned else (1.0, 1.0)))) != []
    assert problems(_played({"activations": 9.0}, at_peak=0.0)) != []


def test_of_deepspeeds_jobs_activations_are_compared_alone() -> None:
    untraced = {"parameters": None, "gradients": None, "optimizer": None, "buffers": None}
    assert problems(_played({"buffers": 9.0, "optimizer": 9.0}, **untraced)) == []
    assert problems(_played({"activations": 9.0}, **untraced))[0].startswith("moving")


def test_a_trace_that_fails_is_told_and_the_next_seed_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> dict[str, Any]:
        raise InputError("--dry-run: out of tune")

    monkeypatch.setattr(campaign, "trace", failing)
    said: list[Played] = []
    played = seeds.campaign([1, 2], campaign.play_seed, minutes=None, say=said.append)
    assert [row.problems for row in played] == [["not traced: --dry-run: out of tune"]] * 2
    assert said == played


def test_results_are_kept_and_told(tmp_path: Path) -> None:
    rows = [_played({}), _played({"activations": 4.0}), Played(2, "Llama: {}", "ddp: {}", 0, refused={"tensor: N": 2})]
    rows[1].problems = problems(rows[1])
    seeds.write(tmp_path / "results.json", rows)
    assert seeds.read(tmp_path / "results.json", Played) == rows
    said = table(rows)
    assert said.startswith("2 of 3 ranks agree")
    assert "refused 2: tensor: N" in said
    assert "OFF seed 0: whole: trace 14,336, formulas 10,240 MiB (-28.6%); moving: " in said
    assert "activations 8,192, 4,096; buffers 2,048, 2,048 MiB; peak in backward" in said
    assert seeds.read(tmp_path / "none.json", Played) == []
