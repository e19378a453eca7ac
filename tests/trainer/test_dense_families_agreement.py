"""Closed form and trace agree for the families of ordinary layers that have readers of their own."""

from typing import Any

import pytest
from trainer_testing.agreement import FEW, STATIC, agreement

from trainyard.planner.dense_families import DENSE_READERS
from trainyard.planner.kindred_families import KINDRED_READERS

ACTIVATIONS, RECOMPUTED = 0.02, 0.10

MODELS = (*sorted(DENSE_READERS), *sorted(KINDRED_READERS), "gemma", "gemma2")
"""And Gemma's, whose norms were counted short: the second one writes its attention out."""

QUICK = (*sorted(DENSE_READERS)[::4], "gemma2", "minicpm3")

WHOLE: dict[str, Any] = {"num_key_value_heads": 16, "head_dim": None}
"""Latent attention has as many heads of keys as of queries, and their widths by other names."""
OWN = {"minicpm3": WHOLE, "youtu": WHOLE}


def _agreement(model_type: str, recompute: str) -> Any:
    model = {"model_type": model_type, **FEW, "intermediate_size": 6144, **OWN.get(model_type, {})}
    stated = {name: value for name, value in model.items() if value is not None}
    return agreement(stated, activation_checkpointing=recompute)


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MODELS]
)
def test_closed_form_and_trace_agree(model_type: str) -> None:
    found = _agreement(model_type, "none")
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)


OF_TWO_MOMENTS = ("gemma3_text",)
"""Whose layers gathered need what a layer's activations do, of which either side may take the other one."""


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=() if one in QUICK else pytest.mark.full) for one in MODELS]
)
def test_so_they_do_where_layers_are_computed_again(model_type: str, recompute: str) -> None:
    found = _agreement(model_type, recompute)
    assert abs(found.activations) < RECOMPUTED or (model_type in OF_TWO_MOMENTS and found.is_of_two_moments)


OPTIONS: dict[str, dict[str, Any]] = {
    "arcee": {"hidden_act": "gelu_new", "attention_bias": True, "mlp_bias": True},
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gpt_neox": {"hidden_act": "gelu_fast"},
    "nemotron": {"hidden_act": "relu", "partial_rotary_factor": 1.0},
    "olmo": {"clip_qkv": 8.0, "num_key_value_heads": 16},
    "phi": {"resid_pdrop": 0.1},
    "phi3": {"resid_pdrop": 0.1},
    "qwen2": {"head_dim": 128, "num_key_value_heads": 1},
    "stablelm": {"use_parallel_residual": True},
}
"""What a configuration may state that changes what a layer keeps."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OPTIONS)
def test_so_they_do_with_what_a_configuration_may_state(model_type: str) -> None:
    found = agreement({"model_type": model_type, **FEW, "intermediate_size": 6144, **OPTIONS[model_type]})
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_they_do_where_windows_are_a_mask(recompute: str) -> None:
    """Which all layers share, but not their own copies of grouped keys and values."""
    sizes = {"model_type": "mistral", **FEW, "intermediate_size": 6144, "num_key_value_heads": 4}
    found = agreement({**sizes, "sliding_window": 1024}, activation_checkpointing=recompute, documents=False)
    assert abs(found.activations) < {"none": ACTIVATIONS, "full": RECOMPUTED}[recompute]
    plain = agreement({**sizes, "sliding_window": None}, activation_checkpointing=recompute, documents=False)
    more = [
        sum(each[name] for name in ("activations", "buffers")) - sum(other[name] for name in ("activations", "buffers"))
        for each, other in ((found.planned, plain.planned), (found.traced, plain.traced))
    ]
    # Tokens x tokens of a sequence: a byte, and two of what kernels read; where nothing is kept the worst moment is the
    # feed-forward block's, beside which no layer's own copies lie.
    assert more[1] > 0.99 * {"none": 2, "full": 1}[recompute] * 2048**2 * 3
    assert more[0] == pytest.approx(more[1], rel=0.1)


@pytest.mark.parametrize("stated", [{}, {"attention_dropout": 0.1}], ids=["kept", "dropped"])
def test_so_they_do_where_a_job_asks_for_attention_that_is_written_out(stated: dict[str, Any]) -> None:
    found = agreement({"model_type": "qwen2", **FEW, "intermediate_size": 6144, **stated}, attention="eager")
    # Two moments are nearly as dear, of which either side may take the other one.
    planned, traced = (side["activations"] + side["buffers"] for side in (found.planned, found.traced))
    assert planned == pytest.approx(traced, rel=ACTIVATIONS)
