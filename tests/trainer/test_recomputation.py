"""How often a block's last product is computed under torch's checkpoints, which the planner's step times count on.

Recomputation ends where the last tensor is there that the backward pass asks for. What a product reads is kept before
it is computed: one whose result nothing keeps, and after which nothing is kept, is not done again.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer.models import float8
from trainer.models.build import build_model
from trainer_testing.families import FAMILIES
from trainer_testing.support_table import save_sources, source_of
from trainer_testing.tiny import VOCAB_SIZE, tiny_job

from trainyard.hardware import gpu
from trainyard.planner.communication import EFA, Fabric
from trainyard.planner.families import shape_from_config
from trainyard.planner.reading import layout_of
from trainyard.planner.time_constants import DEFAULT_CONSTANTS
from trainyard.planner.timing import _Rank
from trainyard.spec.job import ResolvedJob

TOKENS, HIDDEN, LAYERS = 64, 32, 2
WIDTH = {"Llama": 48, "Gemma 2": 48, "GPT-2": 128}
"""Of the feed-forward block: a product's shapes tell which one it is, or whose gradient."""
GEMMA2 = FAMILIES["Gemma"] | {"model_type": "gemma2"}
MODELS = FAMILIES | {"Gemma 2": GEMMA2}
Case = tuple[str, dict[str, Any], dict[str, Any] | None]
CASES: dict[str, Case] = {
    "plain": ("Llama", {}, None),
    "GPT-2": ("GPT-2", {}, None),
    "a norm after it": ("Gemma 2", {}, None),
    "dropout after it": ("GPT-2", {"resid_pdrop": 0.1}, None),
    "adapters elsewhere": ("Llama", {}, {"kind": "lora", "targets": ["q_proj", "gate_proj"]}),
    "an adapter beside it": ("Llama", {}, {"kind": "lora", "targets": ["q_proj", "down_proj"]}),
    "GPT-2's adapter": ("GPT-2", {}, {"kind": "lora", "targets": ["c_proj"]}),
    "of four bits": ("Llama", {}, {"kind": "qlora", "targets": ["q_proj"]}),
    "of eight bits": ("Llama", {}, None),
}
ONCE = ("plain", "GPT-2", "adapters elsewhere")


class LastProducts(TorchDispatchMode):
    """How many of a block's last products run inside: not their gradients, nor the first product's, which has their
    shapes and its matrix the other way round."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self._shapes = [(TOKENS, WIDTH[family]), (WIDTH[family], HIDDEN)]
        self._is_transposed = family != "GPT-2"
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            is_one = [tuple(one.shape) for one in args[-2:]] == self._shapes
            self.count += is_one and args[-1].is_contiguous() is not self._is_transposed
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_sources(folder, ["Llama", "GPT-2"])
    return folder


def job_of(name: str, sources: Path, recompute: str) -> ResolvedJob:
    family, changes, adapter = CASES[name]
    model = {"model": MODELS[family] | changes}
    origin = model if adapter is None else {"source": str(source_of(sources, family)), "adapter": {"rank": 4} | adapter}
    precision = "fp8" if name == "of eight bits" else "fp32"
    return tiny_job("single", 1, activation_checkpointing=recompute, precision=precision, **origin)


def products(job: ResolvedJob, family: str) -> int:
    """Of a step's forward and backward pass."""
    model = build_model(job, vocab_size=VOCAB_SIZE).train()
    is_narrow = job.spec.training.precision == "fp8"
    if is_narrow:
        float8.convert_blocks(model, job)
    tokens = torch.arange(TOKENS)[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow), LastProducts(family) as seen:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return seen.count


@pytest.mark.parametrize("name", CASES)
def test_the_planner_counts_a_last_product_again_where_torch_computes_it_again(
    name: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8, "EMULATE", True)
    family, changes, _ = CASES[name]
    assert products(job_of(name, sources, "none"), family) == LAYERS
    job = job_of(name, sources, "full")
    assert products(job, family) == LAYERS * (1 if name in ONCE else 2)
    layout = layout_of(job.spec, job.parallelism, micro_batch=1, num_micro_batches=1, recompute="full")
    shape = shape_from_config(MODELS[family] | changes)
    rank = _Rank(shape, layout, gpu("H100"), Fabric(1, 1.0, 1.0, EFA), DEFAULT_CONSTANTS)
    assert rank._stops_before_last is (name in ONCE)
