"""Closed form and trace agree for the families with gated delta rules, which transformers' own torch code computes."""

from typing import Any

import pytest
from trainer_testing.agreement import FEW, STATIC, agreement

ACTIVATIONS = 0.10
SHORT = {"sequence_length": 256, "micro_batch_size": 8, "global_batch_size": 64}
"""As many tokens as one of 2048: a delta rule's chunks are traced one after the other."""

DELTA = {**FEW, "intermediate_size": 6144, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
ROUTED = {"num_experts": 32, "num_experts_per_tok": 4}
DELTAS_FIRST = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
DELTAS_ALONE = {"layer_types": ["linear_attention"] * 3}
ATTENTION_FIRST = {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
SHARDED, COPIED = {"data_shard": 8}, {"data_replicate": 8}


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param("none", marks=pytest.mark.slow),
        pytest.param("selective", marks=pytest.mark.full),
        pytest.param("full", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "model",
    [{"model_type": "qwen3_5_text"}, {"model_type": "qwen3_next", **ROUTED}],
    ids=lambda model: model["model_type"],
)
def test_closed_form_and_trace_agree(model: dict[str, Any], recompute: str) -> None:
    found = agreement(DELTA | model | DELTAS_FIRST, SHARDED, activation_checkpointing=recompute, **SHORT)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)


@pytest.mark.slow
def test_so_they_do_in_autocast_which_narrows_what_products_read() -> None:
    found = agreement(DELTA | {"model_type": "qwen3_5_text"} | DELTAS_ALONE, COPIED)
    assert abs(found.activations) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_so_they_do_with_adapters(adapter: str) -> None:
    found = agreement(DELTA | {"model_type": "qwen3_5_text"} | ATTENTION_FIRST, SHARDED, adapter=adapter, **SHORT)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < 0.05


def test_attention_alone_has_a_gate() -> None:
    found = agreement(DELTA | {"model_type": "qwen3_5_text", "layer_types": ["full_attention"] * 3}, SHARDED)
    assert abs(found.activations) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_stages_have_the_layers_that_they_have(rank: int) -> None:
    """Of four layers the last has attention: planned as a mean of all the first stage was a fourteenth too small."""
    model = DELTA | {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
    found = agreement(model, {"pipeline": 2}, rank=rank, **SHORT)
    assert found.static is not None and abs(found.static) < 0.005
    assert sum(found.planned.values()) == pytest.approx(sum(found.traced.values()), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [pytest.param({"model_type": "qwen3_5_text"}, marks=pytest.mark.full), {"model_type": "qwen3_next", **ROUTED}],
    ids=["qwen3_5", "qwen3_next"],
)
def test_tensor_ranks_have_their_heads_of_a_delta_rule(model: dict[str, Any]) -> None:
    """And the convolution whole, as well as (in the long part) Qwen3.5's fused matrix."""
    found = agreement(DELTA | model | DELTAS_FIRST, {"tensor": 2}, rank=0, **SHORT)
    assert found.static is not None and abs(found.static) < 0.001
    assert sum(found.planned.values()) == pytest.approx(sum(found.traced.values()), rel=0.05)


@pytest.mark.slow
def test_context_ranks_keep_all_tokens_of_their_heads() -> None:
    """As many bytes as all heads of their own tokens."""
    found = agreement(DELTA | {"model_type": "qwen3_5_text"} | DELTAS_ALONE, {"context": 2}, rank=0, **SHORT)
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < 0.02
