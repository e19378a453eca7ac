"""Cut sequences and spread experts: what the families ask of them, checkpoints, refusals, the command itself.

That both equal one process is the table's in `parity`; here are the models that are cut in their own way. Sequences
have very different lengths, so some ranks hold padding alone; packed ones have two or three documents, cut where ranks
don't. fp32, AdamW, accumulation and clipping, within 1e-5.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer.strategies import check_supported
from trainer.strategies.context_parallel import ContextAttention, SequenceLayout, by_document
from trainer_testing.families import FAMILIES
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import MARK, Result, RunRequest, run, worst_relative_error
from trainer_testing.text_job import run_trainer, write_job
from trainer_testing.tiny import strategy_name, tiny_job
from transformers.masking_utils import causal_mask_function

from trainyard.errors import InputError
from trainyard.spec.job import ParallelismSpec

TOLERANCE = 1e-5
SAVED_AT, LAST = 2, 4
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.0}


def case(
    family: str,
    parallelism: dict[str, Any],
    *,
    is_packed: bool = False,
    model: dict[str, Any] | None = None,
    **job: Any,
) -> RunRequest:
    """A family's run under a layout; `model` changes the family's configuration, `job` the tiny job."""
    settings = {"model": FAMILIES[family] | (model or {}), "parallelism": parallelism} | job
    name = strategy_name(ParallelismSpec.model_validate(parallelism)) if parallelism else "single"
    return RunRequest(name, last_step=LAST, job=settings, is_packed=is_packed)


def alone(request: RunRequest) -> RunRequest:
    """What a case is compared with."""
    return replace(request, strategy="single", job=request.job | {"parallelism": {}}, load=None, save=None)


CASES: dict[int, dict[str, RunRequest]] = {
    2: {
        "context, recomputed": case("Qwen3", {"context": 2}, is_packed=True, activation_checkpointing="full"),
        "context, recomputed in part": case("Llama", {"context": 2}, activation_checkpointing="selective"),
        "context, documents recomputed in part": case(
            "Qwen3", {"context": 2}, is_packed=True, activation_checkpointing="selective"
        ),
        "expert, recomputed": case("Mixtral", {"data_shard": 2, "expert": 2}, activation_checkpointing="selective"),
        "expert in context": case("Qwen3-MoE", {"context": 2, "expert": 2}, is_packed=True),
    },
    4: {
        "sliding window, packed": case("Mistral", {"data_shard": 2, "context": 2}, is_packed=True),
        "learned positions": case("GPT-2, tied", {"data_replicate": 2, "context": 2}, is_packed=True),
        "experts over both": case("DeepSeek-V3", {"data_shard": 2, "context": 2, "expert": 4}, is_packed=True),
        "stages of parts": case("Llama, tied", {"pipeline": 2, "context": 2}, is_packed=True),
        "all but tensor": case("Qwen3-MoE", {"pipeline": 2, "context": 2, "expert": 2}, is_packed=True),
    },
}
MORE_CASES: dict[int, dict[str, RunRequest]] = {
    4: {
        "four pieces of a sequence": case("Llama", {"context": 4}, is_packed=True),
        "sliding window": case("Mistral", {"data_shard": 2, "context": 2}, model={"sliding_window": 5}),
        "copies": case("Qwen2", {"data_replicate": 2, "context": 2}, is_packed=True),
        "NeoX": case("GPT-NeoX", {"data_shard": 2, "context": 2}),
        "Gemma": case("Gemma, tied", {"data_shard": 2, "context": 2}, is_packed=True),
        "context and tensor": case("Qwen3", {"context": 2, "tensor": 2}, is_packed=True),
        "two copies of experts": case("Qwen3-MoE", {"data_shard": 4, "expert": 2}),
        "copies of copies": case("Mixtral", {"data_replicate": 2, "data_shard": 2, "expert": 2}),
        "two stages a rank": case(
            "Mistral",
            {"pipeline": 2, "context": 2, "pipeline_schedule": "zero_bubble"},
            is_packed=True,
            model={"num_hidden_layers": 4},
        ),
        "experts within one": case("DeepSeek-V2", {"data_shard": 2, "context": 2, "expert": 2}),
    },
}
"""In scripts/test --full."""


def check_equal(results: dict[str, Result], reference: dict[str, Result]) -> None:
    errors = {name: worst_relative_error(result, reference[name]) for name, result in results.items()}
    print(", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_documents_one_after_the_other_are_attended_to_as_under_a_mask(rank: int) -> None:
    """Of two sequences cut over two ranks: results and gradients; documents end inside pieces and where they do."""
    length, layout = 32, SequenceLayout(rank=rank, size=2)
    owners = torch.tensor([[0] * 5 + [1] * 12 + [2] * 15, [0] * 20 + [1] * 4 + [2] * 8])
    generator = torch.Generator().manual_seed(rank)
    query, key, value = (
        torch.randn((2, 3, length, 4), generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    attention = ContextAttention.__new__(ContextAttention)  # without a process group
    attention._is_written_out = False
    attention._layout, attention._num_tokens, attention._documents = layout, length, owners
    told = attention.mask(mask_function=causal_mask_function, device=torch.device("cpu"))
    assert told is not None and told.numel() < 4 * 2 * 6, "no mask of own x all tokens"
    found = by_document(layout.own_part(query, dim=2), key, value, told, 0.0, None)
    places = torch.arange(length)
    allowed = (places.unsqueeze(1) >= places) & (owners.unsqueeze(2) == owners.unsqueeze(1))
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed.unsqueeze(1))
    expected = layout.own_part(whole, dim=2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(found, (query, key, value), weights)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, (query, key, value), weights))


class Elements(TorchDispatchMode):
    """Counts those of all tensors that operations give while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        self.count += sum(tensor.numel() for tensor in tree_leaves(given) if isinstance(tensor, torch.Tensor))
        return given


def test_documents_of_many_sequences_take_no_more_work_a_sequence() -> None:
    def elements_a_row(num_rows: int) -> float:
        length, layout = 32, SequenceLayout(rank=0, size=2)
        attention = ContextAttention.__new__(ContextAttention)  # without a process group
        attention._is_written_out = False
        attention._layout, attention._num_tokens = layout, length
        attention._documents = torch.tensor([[0] * 5 + [1] * 12 + [2] * 15] * num_rows)
        told = attention.mask(mask_function=causal_mask_function, device=torch.device("cpu"))
        assert told is not None
        query, key, value = (torch.randn((num_rows, 3, length, 4), requires_grad=True) for _ in range(3))
        output = by_document(layout.own_part(query, dim=2), key, value, told, 0.0, None)
        with Elements() as elements:
            torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
        return elements.count / num_rows

    assert elements_a_row(8) < 1.2 * elements_a_row(1)


def run_and_check(cases: dict[int, dict[str, RunRequest]]) -> None:
    requests = {name: request for named in cases.values() for name, request in named.items()}
    reference = dict(zip(requests, run(1, [alone(request) for request in requests.values()]), strict=True))
    for world_size, named in cases.items():
        check_equal(dict(zip(named, run(world_size, list(named.values())), strict=True)), reference)


@pytest.mark.slow
def test_two_and_four_ranks_equal_one_process() -> None:
    run_and_check(CASES)


@pytest.mark.full
def test_more_families_and_layouts_equal_one_process() -> None:
    run_and_check(MORE_CASES)


@pytest.mark.slow
def test_one_process_and_spread_ranks_continue_each_other(tmp_path: Path) -> None:
    whole = case("Mixtral", {}, is_packed=True)
    single, spread = str(tmp_path / "single"), str(tmp_path / "spread")
    (expected,) = run(1, [replace(whole, save=single, save_after_step=SAVED_AT)])

    def resumed(parallelism: dict[str, Any], load: str) -> RunRequest:
        return replace(case("Mixtral", parallelism, is_packed=True), first_step=SAVED_AT + 1, load=load)

    expert = {"data_shard": 2, "context": 2, "expert": 4}
    begun = replace(case("Mixtral", expert, is_packed=True), save=spread, save_after_step=SAVED_AT)
    results = run(4, [begun, resumed(expert, single)])
    layouts = ({"data_shard": 2}, {"data_shard": 2, "expert": 2}, {"context": 2})
    results += run(2, [resumed(layout, spread) for layout in layouts])
    assert [len(result["loss"]) for result in results] == [LAST] + [LAST - SAVED_AT] * 4
    errors = [worst_relative_error(result, expected) for result in results]
    assert max(errors) < TOLERANCE, errors


def test_pieces_cover_the_sequence_once_and_cost_the_same() -> None:
    whole = torch.arange(48).view(1, 24, 2)
    layouts = [SequenceLayout(rank=rank, size=3) for rank in range(3)]
    parts = torch.stack([layout.own_part(whole, dim=1) for layout in layouts])
    assert torch.equal(layouts[1].in_order(parts, dim=1), whole)
    # Causal attention of a piece costs about as much as its end is far from the beginning.
    assert {sum(layout.pieces_of(layout.rank)) for layout in layouts} == {5}


@pytest.mark.parametrize(
    ("family", "parallelism", "message"),
    [
        ("Llama", {"context": 16}, r"context: 16 cuts .* 32 equal pieces, .* is 24: use 32, or another multiple"),
        ("Llama", {"context": 5}, r"context: 5 cuts .* 10 equal pieces, .* is 24: use 20, or another multiple"),
        ("gptj", {"context": 2}, r"context: 2 is not verified for .*gptj"),
        ("Llama", {"data_shard": 2, "expert": 2}, r"expert: 2 needs a mixture of experts .* llama is not"),
        (
            "Mixtral",
            {"pipeline": 2, "data_shard": 2, "expert": 2, "pipeline_schedule": "zero_bubble"},
            r"zero_bubble takes weight gradients apart .* use 1f1b, or set expert",
        ),
        ("Mixtral", {"data_shard": 8, "expert": 8}, r"expert: 8 does not divide the model's 4 experts"),
        ("Qwen3-MoE", {"context": 3, "expert": 3}, r"expert: 3 does not divide the model's 4 experts"),
        ("DeepSeek-V2", {"context": 3, "expert": 3}, r"expert: 3 does not divide the model's 4 experts"),
        ("DeepSeek-V3", {"context": 3, "expert": 3}, r"expert: 3 does not divide the model's 4 experts"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_is_read(
    family: str, parallelism: dict[str, Any], message: str
) -> None:
    model = {"model_type": family} if family not in FAMILIES else FAMILIES[family] | {"num_hidden_layers": 4}
    world_size = ParallelismSpec.model_validate(parallelism).world_size
    job = tiny_job("refused", world_size, model=model, parallelism=parallelism)
    with pytest.raises(InputError, match=message):
        check_supported(job, device_type="cpu")


@pytest.mark.slow
def test_the_command_trains_and_resumes_with_cut_sequences_and_spread_experts(tmp_path: Path) -> None:
    """The data room's shares, counts of tokens and the checkpoint room, on ranks that read the same sequences."""
    settings = [f"model.config.{key}={value}" for key, value in MIXTURE.items()]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    layout = ["--set", "parallelism.data_shard=2", "--set", "parallelism.context=2", "--set", "parallelism.expert=4"]
    job = write_job(tmp_path, "single", schedule={"kind": "constant", "warmup_steps": 2})
    _, alone = run_trainer(1, job, tmp_path / "alone", *arguments)
    _, spread = run_trainer(4, job, tmp_path / "spread", *arguments, *layout, "--set", "training.steps=4")
    assert [row["tokens"] for row in spread] == [row["tokens"] for row in alone[:4]]
    output, resumed = run_trainer(2, job, tmp_path / "spread", *arguments, "--set", "parallelism.context=2")
    assert "resumed step=4 " in output
    for ours, theirs in zip(resumed, alone, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
    assert resumed[-1]["validation_loss"] == pytest.approx(alone[-1]["validation_loss"], rel=TOLERANCE)
    assert json.loads((tmp_path / "spread" / "result.json").read_text())["strategy"] == "context2"


def test_experts_that_nobody_chose_wait_for_no_one() -> None:
    """A rank without tokens must still take part in every exchange and every sum of gradients."""
    output = run_pooled(4, "trainer_testing.exchange_worker", timeout_seconds=600)[0]
    errors = json.loads(next(line for line in output.splitlines() if line.startswith(MARK)).removeprefix(MARK))
    assert len(errors) == 3
    assert max(errors.values()) < 1e-6
