"""How often a block's last product is computed under torch's checkpoints, which the planner's step times count on.

Recomputation ends where the last tensor is there that the backward pass asks for. What a product reads is kept before
it is computed: one whose result nothing keeps, and after which nothing is kept, is not done again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from trainer.models import float8, quantized, recomputation
from trainer.models.build import build_model
from trainer.models.recomputation import _kept_contexts
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import RunRequest, run, worst_relative_error
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
    "an adapter beside four bits": ("Llama", {}, {"kind": "qlora", "targets": ["down_proj"]}),
    "of eight bits": ("Llama", {}, None),
}
ONCE = ("plain", "GPT-2", "adapters elsewhere", "of four bits")


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


def four_bit_gradients(sources: Path, recompute: str, targets: list[str]) -> list[torch.Tensor | None]:
    """Of a QLoRA's adapters, none of which is zero."""
    adapter = {"rank": 4, "kind": "qlora", "targets": targets}
    job = tiny_job(
        "single", 1, activation_checkpointing=recompute, source=str(source_of(sources, "Llama")), adapter=adapter
    )
    model = build_model(job, vocab_size=VOCAB_SIZE).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(TOKENS)[None]
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return [one.grad for one in trained]


def test_a_product_whose_result_was_not_kept_is_no_number(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever operation a later torch makes it: not one of a weight that nobody read."""
    monkeypatch.setattr(recomputation, "_KEPT_OPERATIONS", frozenset())
    gradients = four_bit_gradients(sources, "selective", ["down_proj"])
    assert all(one is not None and one.isnan().all() for one in gradients)


@pytest.mark.parametrize("targets", [["q_proj"], ["down_proj"]])
def test_weights_of_four_bits_are_read_again_for_products_that_are_computed_again(
    targets: list[str], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selective recomputation keeps their results: it has what it keeps without reading a weight."""
    reads: list[torch.Size] = []
    read = quantized.dequantize

    def counted(codes: torch.Tensor, *others: Any) -> torch.Tensor:
        reads.append(codes.shape)
        return read(codes, *others)

    monkeypatch.setattr(quantized, "dequantize", counted)
    numbers, gradients = {}, {}
    for recompute in ("none", "selective", "full"):
        reads.clear()
        gradients[recompute] = four_bit_gradients(sources, recompute, targets)
        numbers[recompute] = len(reads)
    assert numbers["selective"] == numbers["none"]
    again = 7 if targets == ["down_proj"] else 6
    assert numbers["full"] == numbers["none"] + LAYERS * again
    for recompute in ("selective", "full"):
        assert all(map(torch.equal, gradients[recompute], gradients["none"]))


def test_nothing_in_front_of_the_first_adapter_has_a_gradient(sources: Path) -> None:
    """transformers has the embedding give what takes one; beside frozen weights it is made of them all, for nothing,
    and stays to the end of the step."""
    adapter = {"rank": 4, "kind": "lora", "targets": ["down_proj"]}
    job = tiny_job(
        "single", 1, activation_checkpointing="full", source=str(source_of(sources, "Llama")), adapter=adapter
    )
    model = build_model(job, vocab_size=VOCAB_SIZE).train()
    given: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: given.append(output))
    tokens = torch.arange(TOKENS)[None]
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert [one.requires_grad for one in given] == [False]
    trained = [one for one in model.parameters() if one.requires_grad]
    assert len(trained) == 2 * LAYERS and all(one.grad is not None for one in trained)


def _scores_of(rows: torch.Tensor) -> torch.Tensor:
    return rows @ rows.transpose(-1, -2)


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scores": lambda rows, _: _scores_of(rows).div_(2.0).softmax(-1) @ rows,
    "a bias": lambda rows, weight: (rows @ weight).add_(weight[0]).sin() @ weight,
    "through a view": lambda rows, weight: (rows @ weight).view(-1).mul_(2.0).view_as(rows).sin() @ weight,
    "twice": lambda rows, weight: (rows @ weight).add_(1.0).mul_(2.0).sin() @ weight,
    "of two dimensions": lambda rows, weight: (rows[0, 0] @ weight).add_(weight[0]).sin() @ weight,
    "of many at once": lambda rows, weight: (
        torch._foreach_mul_([rows @ weight, rows.detach() @ weight], 2.0)[0].sin() @ weight
    ),
    "of many by name": lambda rows, weight: (
        torch.ops.aten._foreach_add_.Scalar(self=(kept := [rows @ weight]), scalar=1.0) or kept[0].sin() @ weight
    ),
    "into what is given": lambda rows, weight: (
        torch.mul(kept := rows.detach() @ weight.detach(), 2.0, out=kept).sin() @ weight
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_kept_stays_what_it_was_when_it_is_changed_in_place(name: str) -> None:
    def gradients(**options: Any) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(1)
        shapes = (2, 3, 4, 4), (4, 4)
        rows, weight = (torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes)
        if not options:
            result = IN_PLACE[name](rows, weight)
        else:
            result = checkpoint(IN_PLACE[name], rows, weight, **options)
        result.square().sum().backward()
        return [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in (rows, weight)]

    kept = gradients(use_reentrant=False, context_fn=_kept_contexts)
    assert all(map(torch.equal, gradients(), kept))


def test_selective_recomputation_adds_zero_3s_biases_once() -> None:
    """Which begin as zeros: twice nothing was nothing, in the first step."""
    job = {"model": FAMILIES["Qwen2"]}
    one = RunRequest("single", last_step=3, job=job)
    single, zero = run(1, [one, RunRequest("zero3", last_step=3, job=job | {"activation_checkpointing": "selective"})])
    assert worst_relative_error(zero, single) < 1e-6
