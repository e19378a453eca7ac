"""Dropout under every layout, the model's own and an adapter's: a block that is computed again drops the same, a resume
goes on with the numbers that were next, and what tensor ranks have alike they drop alike.

Losses with dropout are another layout's but for the draw, so nothing here is held against one process, except where
every rank has to draw what that one does.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy
from trainer.models.recomputation import _selective_policy
from trainer_testing.dropout_worker import MARK
from trainer_testing.families import FAMILIES
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.support_table import save_sources, source_of
from trainer_testing.tiny import VOCAB_SIZE

SAVED_AT, LAST = 2, 4
EXACT = 1e-9
WORLD_SIZE = 2

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.2),
}
MIXTURE = FAMILIES["Mixtral"] | {"attention_dropout": 0.2}
BLOCKS, HEAD = ("q_proj", "v_proj", "o_proj", "down_proj"), ("lm_head",)


class Case(NamedTuple):
    """What drops ("gpt2": everywhere; "adapter": what goes into one; "mixture": attention), and the layout."""

    dropped: str
    strategy: str
    layout: tuple[tuple[str, Any], ...] = ()


def case(dropped: str, strategy: str, **layout: Any) -> Case:
    return Case(dropped, strategy, tuple(layout.items()))


SHORT = (
    case("gpt2", "fsdp"),
    case("adapter", "ddp"),
    case("adapter", "tensor2", tensor=2),
    case("gpt2", "pipeline2", pipeline=2),
)
CASES = (
    *SHORT,
    *(case(dropped, f"zero{stage}") for dropped in ("gpt2", "adapter") for stage in range(4)),
    case("gpt2", "ddp"),
    case("adapter", "fsdp"),
    case("adapter", "pipeline2", pipeline=2),
    case("gpt2", "pipeline2", pipeline=2, pipeline_schedule="gpipe"),
    case("gpt2", "pipeline2", pipeline=2, pipeline_schedule="interleaved_1f1b"),
    case("gpt2", "context2", context=2),
    case("adapter", "context2", context=2),
    case("mixture", "expert2-fsdp2", expert=2, data_shard=2),
)
"""GPT-2 under tensor parallelism is test_dropout.py's."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_sources(folder, ["Llama"])
    return folder


def adapted(sources: Path, targets: tuple[str, ...], dropout: float) -> dict[str, Any]:
    adapter = {"kind": "lora", "rank": 4, "targets": targets, "dropout": dropout}
    return {"source": str(source_of(sources, "Llama")), "adapter": adapter}


def request(asked: Case, sources: Path, recompute: str, **more: Any) -> RunRequest:
    models = {"gpt2": {"model": GPT2}, "mixture": {"model": MIXTURE}, "adapter": adapted(sources, BLOCKS, 0.2)}
    job = models[asked.dropped] | {
        "parallelism": dict(asked.layout),
        "precision": "fp32" if asked.strategy.startswith("zero") else "fp64",
        "steps": LAST,
        "activation_checkpointing": recompute,
    }
    return RunRequest(asked.strategy, **{"last_step": LAST, **more}, job=job)


def check(cases: tuple[Case, ...], sources: Path, folder: Path) -> None:
    """Each without recomputation and with both kinds, of which one is saved half-way; and resumed by new processes."""
    saved = {asked: str(folder / str(number)) for number, asked in enumerate(cases)}
    requests = [request(asked, sources, "none", save=saved[asked], save_after_step=SAVED_AT) for asked in cases]
    requests += [request(asked, sources, mode) for mode in ("full", "selective") for asked in cases]
    results = run(WORLD_SIZE, requests)
    whole = dict(zip(cases, results, strict=False))
    errors = {
        (asked, mode): worst_relative_error(result, whole[asked])
        for (mode, asked), result in zip(
            [(mode, asked) for mode in ("full", "selective") for asked in cases], results[len(cases) :], strict=True
        )
    }
    assert {key: error for key, error in errors.items() if not error < EXACT} == {}
    again = [replace(first, load=first.save, save=None, first_step=SAVED_AT + 1) for first in requests[: len(cases)]]
    for asked, result in zip(cases, run(WORLD_SIZE, again), strict=True):
        check_same_bits(asked, result, whole[asked])


def check_same_bits(asked: Case, resumed: Result, whole: Result) -> None:
    for key in ("loss", "grad_norm", "validation"):
        wanted = whole[key] if key == "validation" else whole[key][SAVED_AT:]
        assert [value.hex() for value in resumed[key]] == [value.hex() for value in wanted], (asked, key)


@pytest.mark.slow
def test_recomputation_and_a_resume_drop_the_same(sources: Path, tmp_path: Path) -> None:
    check(SHORT, sources, tmp_path)


@pytest.mark.full
def test_recomputation_and_a_resume_drop_the_same_under_every_layout(sources: Path, tmp_path: Path) -> None:
    check(CASES, sources, tmp_path)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("_scaled_dot_product_flash_attention", 3),
        ("_scaled_dot_product_efficient_attention", 5),
        ("_scaled_dot_product_cudnn_attention", 5),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_selective_recomputation_keeps_no_fused_attention_that_drops(name: str, place: int, is_named: bool) -> None:
    """Only GPUs have it: kept, it would leave what is dropped after it to other numbers (test_library_traps.py)."""
    operation = getattr(torch.ops.aten, name).default

    def policy(share: float) -> CheckpointPolicy:
        if is_named:
            return _selective_policy(None, operation, *[None] * 3, dropout_p=share)
        return _selective_policy(None, operation, *[None] * place, share)

    assert policy(0.0) == CheckpointPolicy.MUST_SAVE
    assert policy(0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert _selective_policy(None, operation, *[None] * 3) == CheckpointPolicy.MUST_SAVE


def test_an_adapters_dropout_is_one_processs_where_all_tensor_ranks_have_its_input(sources: Path) -> None:
    """The head's, whose adapter every rank has whole: apart, the ranks' copies of it would drift."""
    fp64 = {"precision": "fp64", "steps": LAST, "micro_batch_size": 8}
    jobs = [fp64 | adapted(sources, HEAD, share) for share in (0.2, 0.0)]
    one, undropped = run(1, [RunRequest("single", last_step=LAST, job=job) for job in jobs])
    layout = {"parallelism": {"tensor": 2}}
    requests = [
        RunRequest("tensor2", last_step=LAST, job=jobs[0] | layout | {"activation_checkpointing": recompute})
        for recompute in ("none", "full")
    ]
    for result in run(2, requests):
        assert worst_relative_error(result, one) < EXACT
    assert worst_relative_error(undropped, one) > 1e-4, "nothing was dropped"


def test_tensor_ranks_drop_an_adapters_input_by_themselves_in_a_region_and_alike_at_the_head(sources: Path) -> None:
    job = {"precision": "fp64", "parallelism": {"tensor": 2}, "micro_batch_size": 8}
    cases = {name: job | adapted(sources, targets, 0.2) for name, targets in (("blocks", BLOCKS), ("head", HEAD))}
    output = run_pooled(2, "trainer_testing.dropout_worker", json.dumps(cases), timeout_seconds=300)[0]
    (line,) = [line for line in output.splitlines() if line.startswith(MARK)]
    for name, (first, second) in json.loads(line.removeprefix(MARK)).items():
        alike = {
            own == other
            for (place, own), (_, other) in zip(first, second, strict=True)
            if place.endswith("lora_dropout.default")
        }
        assert alike == {name == "head"}, name
