"""However FSDP takes the model apart, the losses are one process's."""

from typing import Any

import pytest
from torch import nn
from trainer.models.build import outline_model, transformer_blocks
from trainer.strategies.fsdp import unit_bounds
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.errors import InputError
from trainyard.spec.base import parse
from trainyard.spec.job import FsdpSpec, ParallelismSpec

STEPS = 4
MODEL = FAMILIES["Llama"] | {"num_hidden_layers": 5}
SIZED = {"wrap": "size", "min_parameters": 20_000}  # a block has about 8 thousand
SETTINGS: list[dict[str, Any]] = [
    SIZED,
    {"reshard_after_forward": False},
    {"prefetch_units": 2},
    SIZED | {"reshard_after_forward": True, "prefetch_units": 1},
]


def request(strategy: str, fsdp: dict[str, Any], layout: dict[str, int], **job: Any) -> RunRequest:
    return RunRequest(strategy, last_step=STEPS, job={"model": MODEL, "parallelism": {"fsdp": fsdp, **layout}, **job})


@pytest.mark.slow
def test_every_way_of_wrapping_equals_one_process() -> None:
    one = run(1, [RunRequest("single", last_step=STEPS, job={"model": MODEL})])[0]
    two = [request("fsdp", settings, {}) for settings in SETTINGS]
    # Recomputation runs the blocks of a unit once more, one after the other, while it is gathered.
    two.append(request("fsdp", SIZED, {}, activation_checkpointing="full"))
    two.append(request("tensor2", SIZED, {"tensor": 2}))
    two.append(request("pipeline2", SIZED | {"reshard_after_forward": True}, {"pipeline": 2}))
    for result in run(2, two):
        assert worst_relative_error(result, one) < 1e-5, result["strategy"]


def test_rotations_in_float32_are_given_to_a_block_as_they_are() -> None:
    """Cast like the rest to the type of the weights they were more exact than one process in fp64, and less in bf16."""
    job = {"model": MODEL | {"model_type": "ernie4_5"}, "precision": "fp64", "document_masks": False}
    one = run(1, [RunRequest("single", last_step=2, job=job)])[0]
    for recompute in ("none", "full"):
        again = {"activation_checkpointing": recompute}
        (two,) = run(2, [RunRequest("fsdp", last_step=2, job=job | again)])
        assert worst_relative_error(two, one) < 1e-12, recompute


def test_what_is_wider_than_a_blocks_weights_reaches_it_in_their_type() -> None:
    """XGLM's positions are float32, and its norms bf16 here, which take nothing else."""
    sizes = {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "vocab_size": VOCAB_SIZE}
    without = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
    model = {"model_type": "xglm", "max_position_embeddings": 64, **sizes, **without}
    job = {"model": model, "precision": "bf16", "document_masks": False}
    (one,) = run(1, [RunRequest("single", last_step=2, job=job)])
    (two,) = run(2, [RunRequest("fsdp", last_step=2, job=job)])
    assert two["loss"] == pytest.approx(one["loss"], rel=0.02)


@pytest.mark.full
def test_hybrid_sharding_too() -> None:
    one = run(1, [RunRequest("single", last_step=STEPS, job={"model": MODEL})])[0]
    for result in run(4, [request("hsdp", settings, {}) for settings in SETTINGS]):
        assert worst_relative_error(result, one) < 1e-5, result["strategy"]


def test_units_by_size() -> None:
    blocks = [nn.Linear(10, 10, bias=False) for _ in range(5)]
    assert unit_bounds(blocks, FsdpSpec()) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert unit_bounds(blocks, FsdpSpec(wrap="size", min_parameters=200)) == [(0, 2), (2, 4), (4, 5)]
    assert unit_bounds(blocks, FsdpSpec(wrap="size", min_parameters=201)) == [(0, 3), (3, 5)]
    assert unit_bounds(blocks, FsdpSpec(wrap="size", min_parameters=1)) == unit_bounds(blocks, FsdpSpec())
    assert unit_bounds([], FsdpSpec(wrap="size")) == []


def test_it_is_not_deepspeeds() -> None:
    with pytest.raises(InputError, match="fsdp belongs to engine: torch"):
        parse(ParallelismSpec, {"engine": "deepspeed", "zero_stage": 3, "fsdp": {"prefetch_units": 1}}, "job")


def test_embeddings_that_the_head_has_too_are_no_unit_of_their_own() -> None:
    """RoBERTa names them beside its layers."""
    own = {
        "is_decoder": True,
        "tie_word_embeddings": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    job = {"model": MODEL | {"model_type": "roberta"} | own, "document_masks": False}
    model = outline_model(tiny_job("single", 1, **job), vocab_size=VOCAB_SIZE)
    assert [type(block).__name__ for block in transformer_blocks(model)] == ["RobertaLayer"] * 5
    (one,) = run(1, [RunRequest("single", last_step=2, job=job)])
    (two,) = run(2, [RunRequest("fsdp", last_step=2, job=job)])
    assert worst_relative_error(two, one) < 1e-5
