"""Closed form and trace agree where layers have heads of two widths (Gemma 4)."""

from typing import Any

import pytest
from trainer_testing.agreement import STATIC, agreement, moving, steps_of
from trainer_testing.agreement import dry_run_cases as cases

MODEL: dict[str, Any] = {
    **{"model_type": "gemma4_text", "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2},
    **{"attention_k_eq_v": True, "intermediate_size": 8192, "sliding_window": 1024, "vocab_size": 32000},
    **{"hidden_size_per_layer_input": 0, "pad_token_id": 0},
}
EXPERTS = MODEL | {
    **{"intermediate_size": 2048, "enable_moe_block": True, "num_experts": 16, "top_k_experts": 4},
    **{"moe_intermediate_size": 512},
}
SHARD, COPY, SPREAD = {"data_shard": 8}, {"data_replicate": 8}, {"data_shard": 8, "expert": 4}
DEEP = MODEL | {"num_hidden_layers": 12}
UNTOLD = MODEL | {"attention_k_eq_v": False}

SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (MODEL, SHARD, {"activation_checkpointing": "none"}),
        (MODEL, COPY, {"activation_checkpointing": "full"}),
        (MODEL, COPY, {"activation_checkpointing": "none"}),
        (MODEL, SHARD, {"activation_checkpointing": "selective"}),
        (MODEL, SHARD, {"activation_checkpointing": "full", "documents": False}),
        (UNTOLD, SHARD, {"activation_checkpointing": "none"}),
        (MODEL, SHARD, {"activation_checkpointing": "none", "precision": "fp32"}),
        (MODEL, SHARD, {"activation_checkpointing": "none", "attention": "eager"}),
        (MODEL, SHARD, {"activation_checkpointing": "selective", "attention": "eager"}),
        (DEEP, {"pipeline": 2, "data_shard": 4}, {"activation_checkpointing": "none", "global_batch_size": 32}),
    ],
)
def test_closed_form_and_trace_agree(model: dict[str, Any], layout: dict[str, Any], said: dict[str, Any]) -> None:
    found = agreement(model, layout, **said)
    assert found.static is not None and abs(found.static) < STATIC
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        ("lora", "none"),
        *(pytest.param("lora", recompute, marks=SLOW) for recompute in ("selective", "full")),
        *(pytest.param("qlora", recompute, marks=SLOW) for recompute in ("none", "selective", "full")),
    ],
)
def test_so_they_do_of_adapters(kind: str, recompute: str) -> None:
    """Attention's value projections are there in five of six layers."""
    planned, traced = moving(agreement(MODEL, SHARD, adapter=kind, activation_checkpointing=recompute))
    assert planned == pytest.approx(traced, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recompute", "kind"),
    [
        (SHARD, "none", None),
        *((SHARD, recompute, None) for recompute in ("selective", "full")),
        *((COPY, recompute, None) for recompute in ("none", "full")),
        *((SPREAD, recompute, None) for recompute in ("none", "full")),
        *((SHARD, "full", kind) for kind in ("lora", "qlora")),
    ],
)
def test_so_they_do_where_experts_are_beside_an_ordinary_block(
    layout: dict[str, Any], recompute: str, kind: str | None
) -> None:
    """With norms of their own, and results weighted in fp32."""
    said: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 32} if kind is None else {"adapter": kind}
    found = agreement(EXPERTS, layout, activation_checkpointing=recompute, **said)
    assert found.static is not None and abs(found.static) < STATIC
    planned, traced = moving(found)
    assert planned == pytest.approx(traced, rel=0.03)


@pytest.mark.parametrize("model", [MODEL, pytest.param(EXPERTS, marks=SLOW)])
def test_a_steps_time_is_that_of_both_kinds_of_layers(model: dict[str, Any]) -> None:
    job = cases().few_layers(SHARD, model, micro_batch_size=4, global_batch_size=32)
    reckoned, counted = steps_of(job, world_size=8)
    assert reckoned.total == pytest.approx(counted.total, rel=0.04)
