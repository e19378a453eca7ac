"""Families whose layers have heads of two widths: parameters equal those of the real models, and each kind counts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from trainyard.errors import InputError
from trainyard.planner.adapters import adapter_params
from trainyard.planner.config_values import NotCoveredError
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.known_models import KNOWN_CONFIGS
from trainyard.planner.layout import Layout
from trainyard.planner.stages import part_of, stage_at

Counted = Callable[[dict[str, Any]], int]

SMALL: dict[str, Any] = {
    **{"model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "global_head_dim": 24, "intermediate_size": 48, "vocab_size": 500, "num_hidden_layers": 7},
    **{"hidden_size_per_layer_input": 0, "sliding_window": 32},
}
SHARED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40}
AS_SIXTH = {"head_dim": 32, "num_key_value_heads": 4}
UNIFIED = {name: value for name, value in SMALL.items() if name != "hidden_size_per_layer_input"}


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL | SHARED,
        SMALL | {"num_global_key_value_heads": 1},
        SMALL | SHARED | {"attention_bias": True, "tie_word_embeddings": False},
        SMALL | SHARED | EXPERTS,
        SMALL | {"layer_types": ["full_attention", *["sliding_attention"] * 5, "full_attention"]},
        SMALL | SHARED | {"per_layer_config": {"05": {"head_dim": 32, "num_key_value_heads": 4}, "6": AS_SIXTH}},
        SMALL | {"per_layer_config": {5: {"head_dim": 8}, 6: {"head_dim": 8}}},
        SMALL | {"per_layer_config": {}},
        SMALL | {"per_layer_config": None},
        UNIFIED | EXPERTS | {"model_type": "gemma4_unified_text"},
        UNIFIED | SHARED | {"model_type": "gemma4_unified_text"},
    ],
    ids=[
        "plain",
        "shared",
        "shared not asked for",
        "biased",
        "experts",
        "listed",
        "saved",
        "saved, by number",
        "saved, alike",
        "saved, null",
        "unified has no experts",
        "unified",
    ],
)
def test_parameters_are_those_of_the_real_model(config: dict[str, Any], real_parameters: Counted) -> None:
    shape = shape_from_config(config)
    assert shape.params == real_parameters(config)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("gemma-4-12b", 11.9, 11.9), ("gemma-4-26b-a4b", 25.2, 3.8), ("gemma-4-31b", 30.7, 30.7)],
)
def test_known_models_have_what_their_cards_say(
    name: str, billions: float, active: float, real_parameters: Counted
) -> None:
    shape = shape_of_known(name)
    assert shape.params == real_parameters(KNOWN_CONFIGS[name])
    assert (round(shape.params / 1e9, 1), round(shape.active_params / 1e9, 1)) == (billions, active)


def test_one_layer_in_six_and_the_last_one_see_everything() -> None:
    shape = shape_from_config(SMALL | SHARED)
    (narrow, local), (wide, whole) = shape.attentions
    assert shape.wide_places == (5, 6) and (narrow, wide) == (5, 2)
    assert (local.head_dim, local.kv_heads, local.mean_span(4096)) == (16, 2, 2 * 32)
    assert (whole.head_dim, whole.kv_heads, whole.mean_span(4096)) == (24, 1, 4096)
    assert whole.projected_kv_dim == whole.kv_dim == 24 and local.projected_kv_dim == 2 * local.kv_dim
    flops = shape.flops_per_token(4096) - 6 * shape.matmul_params
    assert flops == pytest.approx(12 * 4 * (5 * 16 * 64 + 2 * 24 * 4096))


def test_a_pipelines_rank_has_the_kinds_of_its_own_layers() -> None:
    shape = shape_from_config(SMALL | {"num_hidden_layers": 12})
    layout = Layout(library="trainyard", pipeline=4, num_micro_batches=4)
    assert [stage_at(shape, layout, place).wide for place in range(4)] == [(), (0,), (), (0,)]
    turns = replace(layout, pipeline=2, schedule="interleaved_1f1b", chunks=2)
    assert [stage_at(shape, turns, place).wide for place in range(2)] == [(), (0, 3)]


def test_a_stage_of_one_kind_alone_has_its_windows() -> None:
    shape = shape_from_config(SMALL | {"num_hidden_layers": 12})
    layout = Layout(library="trainyard", pipeline=12, num_micro_batches=12)
    parts = [part_of(shape, layout, stage_at(shape, layout, place)) for place in range(12)]
    assert [part.wide_layers for part in parts] == [0] * 5 + [1] + [0] * 5 + [1]
    assert [part.mean_span(4096) for part in parts] == [64.0] * 5 + [4096.0] + [64.0] * 5 + [4096.0]


def test_an_adapter_is_beside_the_products_that_a_layer_has() -> None:
    shape = shape_from_config(SMALL | SHARED)
    layout = Layout(method="lora", lora_rank=8, lora_targets=("q_proj", "v_proj", "o_proj"))
    queries = 5 * (64 + 4 * 16) + 2 * (64 + 4 * 24)
    values = 5 * (64 + 2 * 16)
    assert adapter_params(shape, layout, 7, has_head=False) == pytest.approx(8 * (2 * queries + values))


@pytest.mark.parametrize(
    "config",
    [
        {name: value for name, value in SMALL.items() if name != "hidden_size_per_layer_input"},
        SMALL | {"num_kv_shared_layers": 2},
        SMALL | {"per_layer_config": {"5": AS_SIXTH}},
        SMALL | {"per_layer_config": {"4": AS_SIXTH, "5": AS_SIXTH, "6": AS_SIXTH}},
        SMALL | {"per_layer_config": {"5": {"intermediate_size": 96}, "6": {"intermediate_size": 96}}},
        SMALL | {"use_bidirectional_attention": "all"},
    ],
)
def test_what_no_formula_describes_is_not_covered(config: dict[str, Any]) -> None:
    with pytest.raises(NotCoveredError, match="not covered"):
        shape_from_config(config)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (
            SHARED | {"num_global_key_value_heads": 3},
            r"num_global_key_value_heads: must divide the 4 heads \(given: 3\)",
        ),
        (SHARED | {"num_global_key_value_heads": 0}, r"num_global_key_value_heads: must be at least 1 \(given: 0\)"),
        ({"global_head_dim": 0}, r"global_head_dim: must be at least 1 \(given: 0\)"),
    ],
)
def test_heads_that_cannot_be_are_refused_in_a_line(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        shape_from_config(SMALL | stated)


def test_what_transformers_saves_is_read_as_what_was_published(tmp_path: Path) -> None:
    published = SMALL | SHARED
    AutoConfig.for_model(**published).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in saved and saved["per_layer_config"]
    assert shape_from_config(saved) == shape_from_config(published)


def test_a_model_that_also_sees_is_not_taken_for_a_slip_of_the_pen() -> None:
    with pytest.raises(
        NotCoveredError, match=r"'gemma4': its sizes can't be planned; those of its language model alone, g"
    ):
        shape_from_config({"model_type": "gemma4", "text_config": SMALL})


def test_experts_without_sizes_are_refused_in_a_line() -> None:
    with pytest.raises(InputError, match="num_experts is missing"):
        shape_from_config(SMALL | {"enable_moe_block": True})
