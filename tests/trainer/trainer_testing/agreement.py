"""Closed form against trace, of a few layers of a family that are as wide as the formulas are made for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.dry_run.trace import trace

from trainyard import planner
from trainyard.hardware import gpu
from trainyard.planner.communication import EFA, fabric
from trainyard.planner.reading import layout_of_resolved, shape_of
from trainyard.planner.step import StepTime
from trainyard.planner.timing import step_time
from trainyard.planner.traced import traced_step
from trainyard.planner.traced_plan import check_traceable, ranks_to_trace
from trainyard.spec.job import JobSpec
from trainyard.spec.support import DOCUMENT_FAMILIES

ROOT = Path(__file__).resolve().parents[3]

FEW = {
    **{"num_hidden_layers": 3, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 128, "vocab_size": 32000, "pad_token_id": 0, "tie_word_embeddings": False},
}
LINKS = fabric(gpu("H100"), 8, 400, EFA)
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


def moving(found: Any) -> tuple[float, float]:
    """Activations and buffers, by formulas and by trace."""
    planned, traced = (side["activations"] + side["buffers"] for side in (found.planned, found.traced))
    return planned, traced


def steps_of(job: JobSpec, *, world_size: int | None = None) -> tuple[StepTime, StepTime]:
    """A step on H100, (by the formulas, by the trace). InputError of jobs whose traces say too little for a time."""
    resolved = planner.resolve(job, world_size=world_size)
    check_traceable(resolved)
    layout, shape = layout_of_resolved(job, resolved), shape_of(job)
    assert shape is not None
    traces = [trace(resolved, rank) for rank in ranks_to_trace(resolved)]
    counted = traced_step(traces, resolved.parallelism, layout, gpu("H100"), LINKS)
    return step_time(shape, layout, gpu("H100"), LINKS), counted
