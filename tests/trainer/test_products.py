"""Tensor and pipeline parallelism and their products train as one process does, and share its checkpoints.

Gradients are accumulated over micro-batches with very different token counts, and clipping is active: a norm that
counts a replica twice, a mean in place of a sum or a gradient that one rank keeps to itself would all show. Each world
size is started once and runs all its cases, the largest first: its checkpoints are what the smaller ones continue.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error
from trainer_testing.tiny import MODEL

TOLERANCE = 1e-5
SAVED_AT, LAST = 3, 5

FOUR_LAYERS = MODEL | {"num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": MODEL,
    "llama4": FOUR_LAYERS,
    "tied": MODEL | {"tie_word_embeddings": True},
    "tied4": FOUR_LAYERS | {"tie_word_embeddings": True},
    "uneven": MODEL | {"intermediate_size": 130, "vocab_size": 97},
    "qwen2": MODEL | {"model_type": "qwen2"},
    "qwen3": MODEL | {"model_type": "qwen3", "head_dim": 16},
    "qwen34": FOUR_LAYERS | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "mistral": MODEL | {"model_type": "mistral"},
    "gemma": MODEL | {"model_type": "gemma", "head_dim": 16},
    "neox": {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 96,
             "hidden_dropout": 0.0, "attention_dropout": 0.0},
}  # fmt: skip
"""Untied but for gemma and those that say so; "uneven" divides by neither the tensor nor the data axis."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tensor2": {"tensor": 2},
    "tensor4": {"tensor": 4},
    "tensor2-fsdp2": {"tensor": 2, "data_shard": 2},
    "tensor2-ddp2": {"tensor": 2, "data_replicate": 2},
    "tensor2-fsdp2-replicate2": {"tensor": 2, "data_shard": 2, "data_replicate": 2},
    "pipeline2": {"pipeline": 2},
    "pipeline4": {"pipeline": 4},
    "pipeline2-tensor2": {"pipeline": 2, "tensor": 2},
    "pipeline2-fsdp2": {"pipeline": 2, "data_shard": 2},
    "pipeline2-ddp2": {"pipeline": 2, "data_replicate": 2},
    "pipeline2-tensor2-fsdp2": {"pipeline": 2, "tensor": 2, "data_shard": 2},
    "fsdp": {},
    "zero2": {},
}
"""Strategy name -> parallelism; fsdp and zero2 are the data-parallel engines, over all ranks."""

Case = tuple[str, str, str]
"""Model, strategy, pipeline schedule."""

CASES: dict[int, list[Case]] = {
    8: [
        ("qwen34", "pipeline2-tensor2-fsdp2", "1f1b"),
        ("llama4", "pipeline2-tensor2-fsdp2", "zero_bubble"),
        ("llama", "tensor2-fsdp2-replicate2", "1f1b"),
    ],
    4: [
        ("neox", "tensor4", "1f1b"),
        ("tied", "tensor2-fsdp2", "1f1b"),
        ("uneven", "tensor2-fsdp2", "1f1b"),
        ("qwen3", "tensor2-ddp2", "1f1b"),
        ("llama4", "pipeline4", "1f1b"),
        ("llama", "pipeline2-tensor2", "gpipe"),
        ("tied4", "pipeline2-fsdp2", "interleaved_1f1b"),
        ("tied4", "pipeline2-tensor2", "zero_bubble"),
        ("llama4", "pipeline2-ddp2", "zero_bubble"),
    ],
    2: [
        *((model, "tensor2", "1f1b") for model in ("llama", "qwen2", "qwen3", "mistral", "gemma", "neox", "uneven")),
        *((model, "pipeline2", "1f1b") for model in ("llama", "tied", "qwen2", "qwen3", "mistral", "gemma", "neox")),
        *(("llama4", "pipeline2", schedule) for schedule in ("gpipe", "interleaved_1f1b", "zero_bubble")),
        *(("tied4", "pipeline2", schedule) for schedule in ("interleaved_1f1b", "zero_bubble")),
    ],
}
SETTINGS: list[tuple[Case, dict[str, Any], float]] = [
    (("llama", "pipeline2-tensor2", "1f1b"), {"activation_checkpointing": "full"}, TOLERANCE),
    (("llama", "tensor2-fsdp2", "1f1b"), {"activation_checkpointing": "selective"}, TOLERANCE),
    (("llama", "tensor2-fsdp2", "1f1b"), {"precision": "bf16"}, 0.02),
    (("llama4", "pipeline2-tensor2", "zero_bubble"), {"precision": "bf16"}, 0.02),
    (("llama4", "pipeline2-fsdp2", "interleaved_1f1b"), {"precision": "fp16"}, 0.02),
]
"""Four ranks under other settings than the reference's, and how far from it they may be."""

SAVED: list[tuple[int, Case]] = [(8, CASES[8][0]), (4, ("uneven", "tensor2-fsdp2", "1f1b"))]
"""What is saved on its way, world size first."""

RESUMED: dict[int, list[tuple[Case, str]]] = {
    8: [(CASES[8][0], "qwen34")],
    4: [(("qwen34", "pipeline2-tensor2", "interleaved_1f1b"), "qwen34"), (("qwen34", "fsdp", "1f1b"), "qwen34"),
        (("uneven", "tensor2-fsdp2", "1f1b"), "uneven")],
    2: [(("qwen34", "tensor2", "1f1b"), "qwen34"), (("qwen34", "pipeline2", "zero_bubble"), "qwen34"),
        (("qwen34", "zero2", "1f1b"), "qwen34"), (("uneven", "pipeline2", "gpipe"), "uneven")],
    1: [(("qwen34", "single", "1f1b"), "qwen34"), (("uneven", "single", "1f1b"), "uneven")],
}  # fmt: skip
"""World size -> case and the model whose checkpoint it continues."""


def request_of(case: Case, folder: Path, world_size: int) -> RunRequest:
    """The whole run of a case."""
    model, strategy, schedule = case
    parallelism = LAYOUTS[strategy] | ({"pipeline_schedule": schedule} if schedule != "1f1b" else {})
    job: dict[str, Any] = {"model": MODELS[model], "parallelism": parallelism, "steps": LAST}
    save = str(folder / model) if (world_size, case) in SAVED else None
    return RunRequest(strategy, last_step=LAST, save=save, save_after_step=SAVED_AT, job=job)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Case], Result]:
    """Every case's result, by ("whole" or "resumed at N ranks", case)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cases = CASES | {1: [(model, "single", "1f1b") for model in MODELS]}
    seen: dict[tuple[str, Case], Result] = {}
    for world_size in sorted(cases, reverse=True):
        keys = [("whole", case) for case in cases[world_size]]
        requests = [request_of(case, folder, world_size) for case in cases[world_size]]
        for case, source in RESUMED[world_size]:
            keys.append((f"resumed at {world_size} ranks", case))
            whole = replace(request_of(case, folder, world_size), save=None)
            requests.append(replace(whole, first_step=SAVED_AT + 1, load=str(folder / source)))
        for case, settings, _ in SETTINGS if world_size == 4 else ():
            keys.append((str(settings), case))
            whole = request_of(case, folder, world_size)
            requests.append(replace(whole, job=whole.job | settings))
        seen |= dict(zip(keys, run(world_size, requests), strict=True))
    return seen


def error_of(results: dict[tuple[str, Case], Result], key: tuple[str, Case]) -> float:
    return worst_relative_error(results[key], results["whole", (key[1][0], "single", "1f1b")])


def test_the_references_learn_and_are_clipped(results: dict[tuple[str, Case], Result]) -> None:
    for model in MODELS:
        reference = results["whole", (model, "single", "1f1b")]
        assert len(reference["loss"]) == LAST
        assert reference["loss"][-1] < reference["loss"][0], model
        assert min(reference["grad_norm"]) > 0.5, "the clip of 0.5 must have been active at every step"


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_products_equal_one_process(world_size: int, results: dict[tuple[str, Case], Result]) -> None:
    errors = {case: error_of(results, ("whole", case)) for case in CASES[world_size]}
    print("\n".join(f"{' '.join(case)}: {error:.1e}" for case, error in errors.items()))
    assert {case: error for case, error in errors.items() if error > TOLERANCE} == {}


def test_recomputation_changes_nothing_and_low_precision_little(results: dict[tuple[str, Case], Result]) -> None:
    for case, settings, tolerance in SETTINGS:
        assert error_of(results, (str(settings), case)) < tolerance, (case, settings)
        assert all(results[str(settings), case]["applied"])


def test_a_checkpoint_goes_on_under_every_other_layout(results: dict[tuple[str, Case], Result]) -> None:
    keys = [key for key in results if key[0].startswith("resumed")]
    assert len(keys) == sum(len(cases) for cases in RESUMED.values())
    errors = {key: error_of(results, key) for key in keys}
    assert {key: error for key, error in errors.items() if error > TOLERANCE} == {}


def test_the_same_layout_goes_on_bit_for_bit(results: dict[tuple[str, Case], Result]) -> None:
    for world_size, case in SAVED:
        whole, resumed = results["whole", case], results[f"resumed at {world_size} ranks", case]
        for key in ("loss", "grad_norm", "validation"):
            wanted = whole[key] if key == "validation" else whole[key][SAVED_AT:]
            assert [value.hex() for value in resumed[key]] == [value.hex() for value in wanted], (case, key)
