"""Families with gated delta rules: parameter counts equal those of the real models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig

from trainyard.errors import InputError
from trainyard.planner.delta_families import DELTA_READERS
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.layout import Layout
from trainyard.planner.stages import part_of, stage_at, stage_params

Counted = Callable[[dict[str, Any]], int]

NARROW = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 24,
}
NARROW |= {"vocab_size": 500, "pad_token_id": 0, "num_hidden_layers": 5}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20}
ROUTED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
LISTED = {"layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"]}

SMALL: dict[str, dict[str, Any]] = {
    "qwen3_next": ROUTED,
    "qwen3_next-listed": ROUTED | LISTED | {"mlp_only_layers": [1], "attention_bias": True},
    "qwen3_next-dense": ROUTED | {"num_experts": 0, "tie_word_embeddings": True},
    "qwen3_next-every-second": ROUTED | {"decoder_sparse_step": 2, "full_attention_interval": 3},
    "qwen3_5_text": {"attention_bias": True},
    "qwen3_5_text-tied": LISTED | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": ROUTED,
    "qwen3_5_moe_text-listed": ROUTED | LISTED,
    "qwen3_5": {},
    "qwen3_5_moe": ROUTED,
}


def _small(name: str) -> dict[str, Any]:
    model_type, sizes = name.partition("-")[0], NARROW | DELTA | SMALL[name]
    return {"model_type": model_type} | ({"text_config": sizes} if model_type in ("qwen3_5", "qwen3_5_moe") else sizes)


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_real_number_of_parameters(name: str, real_parameters: Counted) -> None:
    config = _small(name)
    assert shape_from_config(config).params == real_parameters(config)


def test_every_family_is_among_the_small_models() -> None:
    assert {name.partition("-")[0] for name in SMALL} == set(DELTA_READERS)


@pytest.mark.parametrize("model_type", sorted(DELTA_READERS))
def test_what_a_configuration_leaves_out_is_as_in_transformers(model_type: str, real_parameters: Counted) -> None:
    config = {"model_type": model_type}
    shape = shape_from_config(config)
    assert shape.params == real_parameters(config)
    real = AutoConfig.for_model(model_type).get_text_config()
    kinds = real.layer_types
    assert shape.delta_places == tuple(place for place, kind in enumerate(kinds) if kind == "linear_attention")
    assert shape.delta_layers == len(shape.delta_places)


@pytest.mark.parametrize(("name", "counts"), [("qwen3_5_text", [2, 2]), ("qwen3_next-listed", [1, 2])])
def test_stages_have_a_models_parameters_between_them(name: str, counts: list[int]) -> None:
    shape = dataclasses.replace(shape_from_config(_small(name)), tied_embeddings=False)
    layout = Layout(library="trainyard", engine="torch", pipeline=2, schedule="1f1b", num_micro_batches=8)
    stages = [stage_at(shape, layout, place) for place in range(2)]
    assert [stage.delta_layers for stage in stages] == counts
    found = [stage_params(part_of(shape, layout, stage), layout, stage).total for stage in stages]
    final_norm = shape.final_norm * shape.norm_params  # which no stage is reckoned to have
    assert sum(found) == pytest.approx(shape.params - final_norm, rel=1e-6)


def test_a_known_one_has_its_published_size() -> None:
    """Qwen3-Next is called 80B with 3B active (its model card)."""
    shape = shape_of_known("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert shape.params == pytest.approx(80e9, rel=0.01)
    assert shape.active_params == pytest.approx(3e9, rel=0.3)
    assert shape.flops_per_token(4096) < 6.6 * shape.active_params


def test_a_state_costs_the_same_at_any_length() -> None:
    """A delta rule has no scores: of four times the length only each fourth layer's attention grows."""
    shape = shape_from_config({"model_type": "qwen3_5_text"})
    longer = shape.flops_per_token(65536) - shape.flops_per_token(16384)
    assert longer == pytest.approx(12 * 8 * 4096 * (65536 - 16384))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"layer_types": ["linear_attention"]}, "one for each of 32 layers"),
        ({"layer_types": ["mamba"] * 32}, "must be a list of linear_attention and full_attention"),
        ({"linear_num_key_heads": 0}, "must be at least 1"),
        ({"linear_num_key_heads": 12}, "must divide"),
        ({"full_attention_interval": 0}, "full_attention_interval: must be at least 1"),
        ({"linear_key_head_dim": "wide"}, "linear_key_head_dim: must be a whole number"),
    ],
)
def test_sizes_that_cannot_be_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shape_from_config({"model_type": "qwen3_5_text", **config})


def test_a_text_part_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"text_config: must be a mapping \(given: 7\)"):
        shape_from_config({"model_type": "qwen3_5", "text_config": 7})
