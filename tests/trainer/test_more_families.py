"""Tensor parallelism of the families that the parity suite doesn't hold: each against one process, at two ranks."""

from typing import Any

import pytest
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
from trainer_testing.tiny import VOCAB_SIZE

from trainyard.spec.support import OTHER_TENSOR_FAMILIES

TOLERANCE = 1e-5
STEPS = 3
TIED = frozenset({"cohere", "cohere2", "gemma2", "gemma3_text"})


def model_of(family: str) -> dict[str, Any]:
    """Without dropout, which ranks draw on their own: each has other heads."""
    return {
        **{"model_type": family, "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"max_position_embeddings": 64, "tie_word_embeddings": family in TIED, "pad_token_id": 0},
        **{"attention_dropout": 0.0, "residual_dropout": 0.0},
    }


@pytest.mark.full
def test_families_with_a_plan_of_transformers_are_cut_as_one_process_computes() -> None:
    families = sorted(OTHER_TENSOR_FAMILIES)
    models = [model_of(family) for family in families]
    alone = run(1, [RunRequest("single", last_step=STEPS, job={"model": model}) for model in models], 600)
    layout = {"parallelism": {"tensor": 2}}
    cut = run(2, [RunRequest("tensor2", last_step=STEPS, job={"model": model} | layout) for model in models], 600)
    errors = {name: worst_relative_error(*pair) for name, *pair in zip(families, cut, alone, strict=True)}
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
