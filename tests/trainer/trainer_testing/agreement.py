"""Closed form against trace, of a few layers of a family that are as wide as the formulas are made for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trainyard.spec.support import DOCUMENT_FAMILIES

ROOT = Path(__file__).resolve().parents[3]

FEW = {
    **{"num_hidden_layers": 3, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 128, "vocab_size": 32000, "pad_token_id": 0, "tie_word_embeddings": False},
}
STATIC = 0.03
"""Parameters, gradients and optimizer together, and buffers, are off by less."""


def dry_run_cases() -> ModuleType:
    """benchmarks/planner_dry_run.py."""
    known = sys.modules.get("planner_dry_run")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location("planner_dry_run", ROOT / "benchmarks" / "planner_dry_run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_dry_run"] = module
    spec.loader.exec_module(module)
    return module


def agreement(
    config: dict[str, Any],
    layout: dict[str, Any] | None = None,
    *,
    adapter: str | None = None,
    adapts: dict[str, Any] | None = None,
    attention: str = "auto",
    documents: bool = True,
    sequence_length: int = 2048,
    rank: int = 5,
    **training: Any,
) -> Any:
    """Both, of one rank: of 8 under FSDP, unless another layout is given; `adapts`: fields of the adapter."""
    cases, shard = dry_run_cases(), layout or {"data_shard": 8}
    if adapter is None:
        job = cases.few_layers(shard, config, **training)
    else:
        job = cases.adapted(shard, adapter, config, **training)
    masks = documents and config["model_type"] in DOCUMENT_FAMILIES
    data = job.data.model_copy(update={"document_masks": masks, "sequence_length": sequence_length})
    model = job.model.model_copy(update={"attention": attention})
    if model.adapter is not None:
        model = model.model_copy(update={"adapter": model.adapter.model_copy(update=adapts or {})})
    return cases.agreement(cases.Case("", job.model_copy(update={"data": data, "model": model}), rank))
