"""Closed form and trace agree for the families before Llama's, most of whose attention is written out."""

from typing import Any

import pytest
from trainer_testing.agreement import STATIC, agreement, moving

from trainyard.planner.older_families import OLDER_READERS

ACTIVATIONS, RECOMPUTED = 0.02, 0.10

GPT = {"n_embd": 2048, "n_head": 16, "n_layer": 3, "vocab_size": 32000, "n_positions": 2048}
SIZES = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 3, "vocab_size": 32000}
UNTIED = {"tie_word_embeddings": False}
"""Tied, the embedding's moment and the loss's are as dear to within a percent, and trace and formulas take each one."""

MODELS: dict[str, dict[str, Any]] = {
    "bloom": SIZES | UNTIED,
    "codegen": GPT,
    "falcon": SIZES | {"new_decoder_architecture": True, "num_kv_heads": 4},
    "falcon-one-norm": SIZES | {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    "falcon-in-turn": SIZES | {"multi_query": False, "parallel_attn": False},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": SIZES | {"attention_types": [[["global", "local", "global"], 1]]},
    "gptj": GPT,
    "mpt": SIZES | UNTIED,
    "mpt-clipped": SIZES | UNTIED | {"attn_config": {"clip_qkv": 8.0}},
    "opt": SIZES | {"ffn_dim": 8192, "word_embed_proj_dim": 2048},
}


def _agreement(
    name: str,
    layout: dict[str, Any] | None = None,
    *,
    attention: str = "auto",
    recompute: str = "none",
    stated: dict[str, Any] | None = None,
) -> Any:
    config = {"model_type": name.partition("-")[0], **MODELS[name], **(stated or {})}
    return agreement(config, layout, attention=attention, activation_checkpointing=recompute)


QUICK = sorted(MODELS)[::4]


def test_every_family_is_tried() -> None:
    assert {name.partition("-")[0] for name in MODELS} == set(OLDER_READERS)


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MODELS])
def test_closed_form_and_trace_agree(name: str) -> None:
    found = _agreement(name)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        *((name, {}) for name in ("falcon", "falcon-in-turn", "gpt2", "opt")),
        # It drops none, whatever it states.
        ("falcon", {"attention_dropout": 0.1}),
    ],
)
def test_so_they_do_where_a_job_asks_for_attention_that_is_written_out(name: str, stated: dict[str, Any]) -> None:
    planned, traced = moving(_agreement(name, attention="eager", stated=stated))
    assert planned == pytest.approx(traced, rel=ACTIVATIONS)


@pytest.mark.parametrize("name", ["falcon", "gpt2"])
def test_so_they_do_where_autocast_widens_a_softmax_that_the_model_has_narrow(name: str) -> None:
    planned, traced = moving(_agreement(name, {"data_replicate": 8}, attention="eager"))
    assert planned == pytest.approx(traced, rel=ACTIVATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.full) for one in MODELS])
def test_so_they_do_where_layers_are_computed_again(name: str, recompute: str) -> None:
    planned, traced = moving(_agreement(name, recompute=recompute))
    assert planned == pytest.approx(traced, rel=RECOMPUTED)
