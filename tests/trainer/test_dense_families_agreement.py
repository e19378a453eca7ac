"""Closed form and trace agree for the families of ordinary layers that have readers of their own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainyard.planner.dense_families import DENSE_READERS
from trainyard.spec.support import DOCUMENT_FAMILIES

ROOT = Path(__file__).resolve().parents[2]


def _cases() -> ModuleType:
    """benchmarks/planner_dry_run.py."""
    spec = importlib.util.spec_from_file_location("planner_dry_run", ROOT / "benchmarks" / "planner_dry_run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_dry_run"] = module
    spec.loader.exec_module(module)
    return module


CASES = _cases()
STATIC, ACTIVATIONS = 0.03, 0.02
RECOMPUTED = 0.10

FEW = {
    **{"num_hidden_layers": 3, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 128, "vocab_size": 32000, "pad_token_id": 0, "intermediate_size": 6144},
    "tie_word_embeddings": False,
}
OLDER = {"n_embd": 2048, "n_head": 16, "n_layer": 3, "vocab_size": 32000, "n_positions": 2048}
OWN = {"gpt_bigcode": OLDER}
MODELS = (*sorted(DENSE_READERS), "gemma", "gemma2")
"""And Gemma's, whose norms were counted short: the second one writes its attention out."""


def _agreement(model_type: str, recompute: str) -> Any:
    config = {"model_type": model_type, **OWN.get(model_type, FEW)}
    job = CASES.few_layers({"data_shard": 8}, config, activation_checkpointing=recompute)
    masks = model_type in DOCUMENT_FAMILIES
    return CASES.agreement(
        CASES.Case("", job.model_copy(update={"data": job.data.model_copy(update={"document_masks": masks})}), 5)
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_closed_form_and_trace_agree(model_type: str) -> None:
    found = _agreement(model_type, "none")
    assert found.static is not None and abs(found.static) < STATIC
    assert abs(found.activations) < ACTIVATIONS
    assert found.planned["buffers"] == pytest.approx(found.traced["buffers"], rel=STATIC)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model_type", MODELS)
def test_so_they_do_where_layers_are_computed_again(model_type: str, recompute: str) -> None:
    found = _agreement(model_type, recompute)
    assert abs(found.activations) < RECOMPUTED
