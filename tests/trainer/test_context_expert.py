"""Cut sequences and spread experts train as one process does: fp32, AdamW, accumulation and clipping, within 1e-5.

Sequences have very different lengths, so some ranks hold padding alone; packed ones have two or three documents, cut
where ranks don't. One launch a world size runs every case, because importing torch is most of the time.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer.strategies import check_supported
from trainer.strategies.context_parallel import SequenceLayout
from trainer_testing.distributed import run_ranks
from trainer_testing.sequence_expert_worker import Case, Result, job_of, run
from trainer_testing.strategy_worker import MARK, worst_relative_error
from trainer_testing.text_job import run_trainer, write_job

from trainyard.errors import InputError

TOLERANCE = 1e-5
SAVED_AT, LAST = 2, 4
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.0}

CASES: dict[int, dict[str, Case]] = {
    2: {
        "context": Case("Llama, tied", {"context": 2}),
        "context, packed": Case("Llama", {"context": 2}, is_packed=True),
        "context, recomputed": Case("Qwen3", {"context": 2}, is_packed=True, job={"activation_checkpointing": "full"}),
        "expert": Case("Mixtral", {"data_shard": 2, "expert": 2}),
        "expert, recomputed": Case(
            "Mixtral", {"data_shard": 2, "expert": 2}, job={"activation_checkpointing": "selective"}
        ),
        "expert in context": Case("Qwen3-MoE", {"context": 2, "expert": 2}, is_packed=True),
    },
    4: {
        "four pieces of a sequence": Case("Llama", {"context": 4}, is_packed=True),
        "sliding window": Case("Mistral", {"data_shard": 2, "context": 2}, model={"sliding_window": 5}),
        "sliding window, packed": Case("Mistral", {"data_shard": 2, "context": 2}, is_packed=True),
        "copies": Case("Qwen2", {"data_replicate": 2, "context": 2}, is_packed=True),
        "learned positions": Case("GPT-2, tied", {"data_replicate": 2, "context": 2}, is_packed=True),
        "NeoX": Case("GPT-NeoX", {"data_shard": 2, "context": 2}),
        "Gemma": Case("Gemma, tied", {"data_shard": 2, "context": 2}, is_packed=True),
        "context and tensor": Case("Qwen3", {"context": 2, "tensor": 2}, is_packed=True),
        "an expert a rank": Case("Mixtral", {"data_shard": 4, "expert": 4}),
        "two copies of experts": Case("Qwen3-MoE", {"data_shard": 4, "expert": 2}),
        "copies of copies": Case("Mixtral", {"data_replicate": 2, "data_shard": 2, "expert": 2}),
        "experts over both": Case("DeepSeek-V3", {"data_shard": 2, "context": 2, "expert": 4}, is_packed=True),
        "stages of parts": Case("Llama, tied", {"pipeline": 2, "context": 2}, is_packed=True),
        "two stages a rank": Case(
            "Mistral",
            {"pipeline": 2, "context": 2, "pipeline_schedule": "zero_bubble"},
            is_packed=True,
            model={"num_hidden_layers": 4},
        ),
        "experts in stages": Case("Mixtral", {"pipeline": 2, "data_shard": 2, "expert": 2}),
        "all but tensor": Case("Qwen3-MoE", {"pipeline": 2, "context": 2, "expert": 2}, is_packed=True),
        "experts within one": Case("DeepSeek-V2", {"data_shard": 2, "context": 2, "expert": 2}),
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints go."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one_process(folder: Path) -> dict[str, Result]:
    """Each case without its layout, and a checkpoint in the middle of one."""
    names = [name for cases in CASES.values() for name in cases]
    alone = [case.on_one_process() for cases in CASES.values() for case in cases.values()]
    saved = Case("Mixtral", is_packed=True, last_step=SAVED_AT, save=str(folder / "single"))
    whole = Case("Mixtral", is_packed=True, last_step=LAST)
    results = run(1, [*alone, whole, saved])
    return dict(zip([*names, "whole", "saved"], results, strict=True))


def check_equal(results: dict[str, Result], reference: dict[str, Result]) -> None:
    errors = {name: worst_relative_error(result, reference[name]) for name, result in results.items()}
    print(", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    for name, result in results.items():
        missing = set(reference[name]["names"]) ^ set(result["names"])
        assert missing == set() or has_stages(name), f"{name}: {missing}"


def has_stages(name: str) -> bool:
    """Whether a case's rank 0 has the names of its own stages alone."""
    return any("pipeline" in cases[name].parallelism for cases in CASES.values() if name in cases)


def test_two_and_four_ranks_equal_one_process_and_continue_each_other(
    folder: Path, one_process: dict[str, Result]
) -> None:
    expert = {"data_shard": 2, "context": 2, "expert": 4}
    resumed = Case("Mixtral", is_packed=True, first_step=SAVED_AT + 1, last_step=LAST)
    begun = Case("Mixtral", expert, is_packed=True, last_step=SAVED_AT, save=str(folder / "spread"))
    more = {
        "begun": begun,
        "from one": replace(resumed, parallelism=expert, load=str(folder / "single")),
    }
    results = dict(zip([*CASES[4], *more], run(4, [*CASES[4].values(), *more.values()]), strict=True))
    check_equal({name: results[name] for name in CASES[4]}, one_process)
    check_equal({"saved": results["begun"], "whole": results["from one"]}, one_process)

    layouts = {"gathered": {"data_shard": 2}, "in two": {"data_shard": 2, "expert": 2}, "cut": {"context": 2}}
    loads = {
        name: replace(resumed, parallelism=layout, load=str(folder / "spread")) for name, layout in layouts.items()
    }
    results = dict(zip([*CASES[2], *loads], run(2, [*CASES[2].values(), *loads.values()]), strict=True))
    check_equal({name: results[name] for name in CASES[2]}, one_process)
    for name in layouts:
        check_equal({"whole": results[name]}, one_process)


def test_pieces_cover_the_sequence_once_and_cost_the_same() -> None:
    whole = torch.arange(48).view(1, 24, 2)
    layouts = [SequenceLayout(rank=rank, size=3) for rank in range(3)]
    parts = torch.stack([layout.own_part(whole, dim=1) for layout in layouts])
    assert torch.equal(layouts[1].in_order(parts, dim=1), whole)
    # Causal attention of a piece costs about as much as its end is far from the beginning.
    assert {sum(layout.pieces_of(layout.rank)) for layout in layouts} == {5}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("Llama", {"context": 16}), r"context: 16 cuts .* 32 equal pieces, .* is 24: use 32, or another multiple"),
        (Case("Llama", {"context": 5}), r"context: 5 cuts .* 10 equal pieces, .* is 24: use 20, or another multiple"),
        (
            Case("Llama", {"context": 2}, model={"model_type": "falcon_mamba"}),
            r"context: 2 is not verified for .*mamba",
        ),
        (Case("Llama", {"data_shard": 2, "expert": 2}), r"expert: 2 needs a mixture of experts .* llama is not"),
        (
            Case(
                "Mixtral",
                {"pipeline": 2, "data_shard": 2, "expert": 2, "pipeline_schedule": "zero_bubble"},
                model={"num_hidden_layers": 4},
            ),
            r"zero_bubble takes weight gradients apart .* use 1f1b, or set expert to 1",
        ),
        (Case("Mixtral", {"data_shard": 8, "expert": 8}), r"expert: 8 does not divide the model's 4 experts"),
        (Case("Qwen3-MoE", {"context": 3, "expert": 3}), r"expert: 3 does not divide the model's 4 experts"),
        (Case("DeepSeek-V2", {"context": 3, "expert": 3}), r"expert: 3 does not divide the model's 4 experts"),
        (Case("DeepSeek-V3", {"context": 3, "expert": 3}), r"expert: 3 does not divide the model's 4 experts"),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_is_read(case: Case, message: str) -> None:
    world_size = math.prod(case.parallelism.get(axis, 1) for axis in ("pipeline", "data_shard", "context"))
    job = job_of(case, world_size)
    with pytest.raises(InputError, match=message):
        check_supported(job, device_type="cpu")


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
    output = run_ranks(4, "trainer_testing.exchange_worker", timeout_seconds=120)[0]
    errors = json.loads(next(line for line in output.splitlines() if line.startswith(MARK)).removeprefix(MARK))
    assert len(errors) == 3
    assert max(errors.values()) < 1e-6
