"""Checkpoints of products go on under every other layout; recomputation, lower precision and odd sizes are no matter.

That the products themselves equal one process is the table's in `parity`. Each number of ranks is started once and
runs all its cases, the largest first: its checkpoints are what the smaller ones continue.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_testing.pool import run_pooled
from trainer_testing.strategy_worker import MARK, Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import MODEL

TOLERANCE = 1e-5
SAVED_AT, LAST = 2, 4

FOUR_LAYERS = MODEL | {"num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": MODEL,
    "llama4": FOUR_LAYERS,
    "uneven": MODEL | {"intermediate_size": 130, "vocab_size": 97},
    "qwen34": FOUR_LAYERS | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
""" "uneven" divides by neither the tensor nor the data axis; "qwen34" is tied."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tensor2": {"tensor": 2},
    "tensor2-fsdp2": {"tensor": 2, "data_shard": 2},
    "pipeline2": {"pipeline": 2},
    "pipeline2-tensor2": {"pipeline": 2, "tensor": 2},
    "pipeline2-fsdp2": {"pipeline": 2, "data_shard": 2},
    "pipeline2-tensor2-fsdp2": {"pipeline": 2, "tensor": 2, "data_shard": 2},
    "fsdp": {},
    "zero2": {},
}
"""Strategy name -> parallelism; fsdp and zero2 are the data-parallel engines, over all ranks."""

Case = tuple[str, str, str]
"""Model, strategy, pipeline schedule."""
Saved = dict[int, tuple[Case, ...]]

SAVED: Saved = {
    8: (("qwen34", "pipeline2-tensor2-fsdp2", "1f1b"),),
    4: (("uneven", "tensor2-fsdp2", "1f1b"),),
}
"""What is saved on its way, by number of ranks."""
SAVED_BY_FOUR: Saved = {4: (*SAVED[4], ("qwen34", "pipeline2-tensor2", "1f1b"))}
"""The short version: eight ranks on two cores take a while, and the table in `parity` has some."""

SETTINGS: list[tuple[Case, dict[str, Any], float]] = [
    (("llama", "pipeline2-tensor2", "1f1b"), {"activation_checkpointing": "full"}, TOLERANCE),
    (("llama", "tensor2-fsdp2", "1f1b"), {"activation_checkpointing": "selective"}, TOLERANCE),
    (("llama", "tensor2-fsdp2", "1f1b"), {"precision": "bf16"}, 0.02),
    (("llama4", "pipeline2-tensor2", "zero_bubble"), {"precision": "bf16"}, 0.02),
    (("llama4", "pipeline2-fsdp2", "interleaved_1f1b"), {"precision": "fp16"}, 0.02),
]
"""Four ranks under other settings than the reference's, and how far from it they may be."""

RESUMED: dict[int, list[Case]] = {
    4: [("qwen34", "pipeline2-tensor2", "interleaved_1f1b"), ("qwen34", "fsdp", "1f1b")],
    2: [("qwen34", "tensor2", "1f1b"), ("qwen34", "pipeline2", "zero_bubble"), ("qwen34", "zero2", "1f1b"),
        ("uneven", "pipeline2", "gpipe")],
    1: [("qwen34", "single", "1f1b"), ("uneven", "single", "1f1b")],
}  # fmt: skip
"""Number of ranks -> what continues the checkpoint of its model, beside the one that saved it."""


def request_of(case: Case) -> RunRequest:
    """The whole run of a case."""
    model, strategy, schedule = case
    parallelism = LAYOUTS[strategy] | ({"pipeline_schedule": schedule} if schedule != "1f1b" else {})
    return RunRequest(strategy, last_step=LAST, job={"model": MODELS[model], "parallelism": parallelism, "steps": LAST})


def requests_of(world_size: int, folder: Path, saved: Saved) -> dict[tuple[str, Case], RunRequest]:
    """Everything that so many ranks run, by what it is."""
    own = saved.get(world_size, ())
    requests: dict[tuple[str, Case], RunRequest] = {}
    if world_size == 1:
        requests |= {("whole", case): request_of(case) for case in ((model, "single", "1f1b") for model in MODELS)}
    for case in own:
        save = replace(request_of(case), save=str(folder / case[0]), save_after_step=SAVED_AT)
        requests["whole", case] = save
    for case in (*RESUMED.get(world_size, ()), *own):
        again = replace(request_of(case), first_step=SAVED_AT + 1, load=str(folder / case[0]))
        requests[f"resumed at {world_size} ranks", case] = again
    for case, settings, _ in SETTINGS if world_size == 4 else ():
        whole = request_of(case)
        requests[str(settings), case] = replace(whole, job=whole.job | settings)
    return requests


@pytest.fixture(
    scope="module",
    params=[pytest.param(SAVED_BY_FOUR, marks=pytest.mark.slow), pytest.param(SAVED, marks=pytest.mark.full)],
    ids=["4", "8"],
)
def saved(request: pytest.FixtureRequest) -> Saved:
    """What is saved on its way, by number of ranks."""
    chosen: Saved = request.param
    return chosen


@pytest.fixture(scope="module")
def results(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Case], Result]:
    """Every case's result, by ("whole" or "resumed at N ranks" or settings, case)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    seen: dict[tuple[str, Case], Result] = {}
    for world_size in sorted({*RESUMED, *saved}, reverse=True):
        requests = requests_of(world_size, folder, saved)
        seen |= dict(zip(requests, run(world_size, list(requests.values())), strict=True))
    return seen


def error_of(results: dict[tuple[str, Case], Result], key: tuple[str, Case]) -> float:
    return worst_relative_error(results[key], results["whole", (key[1][0], "single", "1f1b")])


def test_sizes_that_do_not_divide_change_nothing(saved: Saved, results: dict[tuple[str, Case], Result]) -> None:
    errors = {case: error_of(results, ("whole", case)) for cases in saved.values() for case in cases}
    assert {case: error for case, error in errors.items() if not error < TOLERANCE} == {}


def test_recomputation_changes_nothing_and_low_precision_little(results: dict[tuple[str, Case], Result]) -> None:
    for case, settings, tolerance in SETTINGS:
        assert error_of(results, (str(settings), case)) < tolerance, (case, settings)
        assert all(results[str(settings), case]["applied"])


def test_a_checkpoint_goes_on_under_every_other_layout(saved: Saved, results: dict[tuple[str, Case], Result]) -> None:
    keys = [key for key in results if key[0].startswith("resumed")]
    assert len(keys) == sum(len(cases) for cases in (*RESUMED.values(), *saved.values()))
    assert {len(results[key]["loss"]) for key in keys} == {LAST - SAVED_AT}
    errors = {key: error_of(results, key) for key in keys}
    assert {key: error for key, error in errors.items() if error > TOLERANCE} == {}


def test_the_same_layout_goes_on_bit_for_bit(saved: Saved, results: dict[tuple[str, Case], Result]) -> None:
    for world_size, case in ((world_size, case) for world_size, cases in saved.items() for case in cases):
        whole, resumed = results["whole", case], results[f"resumed at {world_size} ranks", case]
        for key in ("loss", "grad_norm", "validation"):
            wanted = whole[key] if key == "validation" else whole[key][SAVED_AT:]
            assert [value.hex() for value in resumed[key]] == [value.hex() for value in wanted], (case, key)


def test_rows_of_a_tied_vocabulary_and_their_gradients_are_those_of_the_whole() -> None:
    """Also where a row is padding, which its own rank alone must know: as an input it has no gradient."""
    output = run_pooled(2, "trainer_testing.vocabulary_worker", timeout_seconds=300)[0]
    errors = json.loads(next(line for line in output.splitlines() if line.startswith(MARK)).removeprefix(MARK))
    assert len(errors) == 6
    for padding, found in errors.items():
        assert found["rows"] == 0 and max(found.values()) < 1e-12, padding
