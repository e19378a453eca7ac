"""Dropout where a model is split: alike on what all ranks of a tensor group have, different on what each has alone."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from trainer.strategies.own_stream import OwnStream, drops_anything, drops_inside
from trainer_testing.dropout_worker import MARK
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import SEQUENCE_LENGTH, VOCAB_SIZE

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB_SIZE}
RESIDUAL = GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.2, "embd_pdrop": 0.2}
EVERYWHERE = RESIDUAL | {"attn_pdrop": 0.2}
NOWHERE = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
WHOLE = {"sequence_length": SEQUENCE_LENGTH + 1}
"""Two ranks can't split such sequences: what lies between attention and feed-forward is whole on both."""
JOB = {"precision": "fp64", "steps": 6}
TENSOR = {"parallelism": {"tensor": 2}, "micro_batch_size": 8}
STEPS = 4
EXACT = 1e-9


def of(model: dict[str, Any], **changes: Any) -> RunRequest:
    """Two tensor ranks."""
    return RunRequest("tensor2", last_step=STEPS, job=JOB | TENSOR | {"model": model} | changes)


TWO_RANKS = {
    "residual": of(RESIDUAL, **WHOLE),
    "whole": of(EVERYWHERE, **WHOLE),
    "whole, recomputed": of(EVERYWHERE, **WHOLE, activation_checkpointing="full"),
    "split": of(EVERYWHERE),
    "split, recomputed": of(EVERYWHERE, activation_checkpointing="full"),
    "split, partly recomputed": of(EVERYWHERE, activation_checkpointing="selective"),
}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Result]:
    return dict(zip(TWO_RANKS, run(2, list(TWO_RANKS.values())), strict=True))


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Result]:
    """The same micro-batches in one process, with dropout and without."""
    jobs = {"residual": RESIDUAL, "nowhere": RESIDUAL | NOWHERE}
    requests = [
        RunRequest("single", last_step=STEPS, job=JOB | {"model": model, "micro_batch_size": 8})
        for model in jobs.values()
    ]
    return dict(zip(jobs, run(1, requests), strict=True))


def test_what_all_ranks_have_is_dropped_as_in_one_process(
    two_ranks: dict[str, Result], one_rank: dict[str, Result]
) -> None:
    assert worst_relative_error(two_ranks["residual"], one_rank["residual"]) < EXACT
    assert worst_relative_error(one_rank["nowhere"], one_rank["residual"]) > 1e-3, "nothing was dropped"


@pytest.mark.parametrize("case", [name for name in TWO_RANKS if "recomputed" in name])
def test_what_is_computed_again_drops_the_same(case: str, two_ranks: dict[str, Result]) -> None:
    assert worst_relative_error(two_ranks[case], two_ranks[case.partition(",")[0]]) < EXACT


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[list[tuple[str, float]]]]:
    """By case and rank: the number at each place of a step."""
    cases = {name: TWO_RANKS[name].job for name in ("whole", "split", "split, recomputed")}
    (line,) = [
        line
        for line in run_pooled(2, "trainer_testing.dropout_worker", json.dumps(cases), timeout_seconds=300)[
            0
        ].splitlines()
        if line.startswith(MARK)
    ]
    found: dict[str, list[list[tuple[str, float]]]] = json.loads(line.removeprefix(MARK))
    return found


def alike(ranks: list[list[tuple[str, float]]]) -> dict[str, set[bool]]:
    """Last part of a place's name -> whether both ranks had the same number there."""
    found: dict[str, set[bool]] = {}
    for (place, first), (other, second) in zip(*ranks, strict=True):
        assert place == other
        found.setdefault(".".join(place.split(".")[-2:]), set()).add(first == second)
    return found


OUTSIDE = {"transformer.drop": {True}, "before validation": {True}, "after validation": {True}}


def test_each_rank_drops_its_own_heads_by_itself(drawn: dict[str, list[list[tuple[str, float]]]]) -> None:
    residual = {"attn.resid_dropout": {True}, "mlp.dropout": {True}}
    assert alike(drawn["whole"]) == OUTSIDE | residual | {"attention": {False}}


@pytest.mark.parametrize("case", ["split", "split, recomputed"])
def test_each_rank_drops_its_own_positions_by_itself(
    case: str, drawn: dict[str, list[list[tuple[str, float]]]]
) -> None:
    residual = {"attn.resid_dropout": {False}, "mlp.dropout": {False}}
    assert alike(drawn[case]) == OUTSIDE | residual | {"attention": {False}}


def test_layers_and_micro_batches_draw_anew_and_a_validation_draws_nothing(
    drawn: dict[str, list[list[tuple[str, float]]]],
) -> None:
    for case in ("whole", "split"):
        for rank in drawn[case]:
            *places, (_, before), (_, after) = rank
            assert before == after
            numbers = [number for _, number in places]
            assert len(set(numbers)) == len(numbers), case


ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="only a GPU's generator has an offset that is moved without a draw"
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_rank_comes_back_to_the_groups_stream(device: str) -> None:
    def numbers_of(place: int) -> tuple[float, float, float]:
        torch.manual_seed(3)
        stream = OwnStream(place, device)
        stream.enter()
        own = float(torch.rand((), device=device))
        stream.leave()
        shared = float(torch.rand((), device=device))
        stream.enter()
        return own, shared, float(torch.rand((), device=device))

    first, second = numbers_of(0), numbers_of(1)
    assert first[1] == second[1]
    assert len({first[0], second[0], first[2], second[2]}) == 4
    assert numbers_of(0) == first


def test_a_model_that_drops_nothing_is_left_as_it_is() -> None:
    class Attention(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.attention_dropout = share

    adapted = nn.Module()
    adapted.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.1)})
    after = nn.Sequential(nn.Dropout(0.1))
    assert drops_inside(Attention(0.1)) and not drops_inside(Attention(0.0))
    assert drops_inside(nn.Sequential(adapted)) and not drops_inside(after)
    assert drops_anything([Attention(0.1)]) and drops_anything([after]) and drops_anything([adapted])
    assert not drops_anything([Attention(0.0), nn.Dropout(0.0), nn.Linear(2, 2)])
