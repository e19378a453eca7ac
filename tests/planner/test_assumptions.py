"""What a request leaves unsaid is in the answer, and said where it decides what fits."""

from typing import Any

import pytest

from trainyard.planner.predict import predict

LARGE = {"model": "llama-3-8b", "gpu": "H100", "gpus": 8, "sharding": "zero3", "micro_batch": 2, "seq": 8192}
TUNED = {
    "model": "llama-3.1-8b",
    "gpu": "H100",
    "gpus": 1,
    "micro_batch": 4,
    "method": "lora",
    "framework": "trl, peft",
}


def test_an_answer_has_what_nobody_stated_and_stays_itself_when_that_is_stated() -> None:
    answer = predict(LARGE)
    unsaid = answer.pop("assumed")
    assert unsaid == {
        "global_batch": 16,
        "precision": "bf16",
        "optimizer": "adamw",
        "recompute": "none",
        "attention": "flash",
        "master_weights": "weights",
    }
    answer.pop("notes")
    assert predict(LARGE | unsaid) == answer, "stated, it is assumed no more, and is the same"


def test_ligers_parts_of_the_loss_are_those_of_the_micro_batch_that_is_taken() -> None:
    request = {"model": "llama-3-8b", "gpu": "H200", "gpus": 8, "sharding": "zero3", "framework": "transformers, Liger"}
    answer = predict(request)
    unsaid = answer.pop("assumed")
    assert unsaid["micro_batch"] > 1
    assert predict(request | unsaid) == answer


def test_what_would_be_needed_is_what_is_needed_once_that_is_stated() -> None:
    """Of a batch that nobody states the number of micro-batches stays: one of transformers' holds no gradients beside
    its activations."""
    request = {"model": "llama-2-7b", "gpu": "H100", "gpus": 1, "framework": "transformers", "seq": 8192}
    answer = predict(request)
    other = predict(request | {"recompute": "none"})
    assert answer["fits"] and answer["assumed"]["micro_batch"] > 1 and not other["fits"]
    (note,) = answer["notes"]
    assert f"with none {other['needed_memory_gib']:.1f}" in note


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"framework": "Megatron-Core"}, {"sharding": "none", "master_weights": "copy"}),
        ({"framework": "NeMo 24.07"}, {"sharding": "zero1"}),
        ({"framework": "Megatron-DeepSpeed"}, {"attention": "unfused"}),
        ({"framework": "transformers"}, {"recompute": "full", "master_weights": "none"}),
        ({"framework": "transformers", "method": "lora"}, {"lora_rank": 16, "lora_targets": 2}),
        ({"framework": "litgpt", "method": "lora", "adapter": "prefix"}, {}),
        ({"framework": "Megatron-Core", "cp": 8}, {"sharding": "none"}),
        ({"gpus": 1, "precision": "fp32"}, {"seq": 4096}),
    ],
)
def test_what_is_assumed_goes_by_what_is_said(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request: dict[str, Any] = {"model": "llama-2-7b", "gpu": "H100", "gpus": 8, "global_batch": 64} | fields
    unsaid = predict(request)["assumed"]
    assert expected.items() <= unsaid.items()
    assert ("lora_rank" in unsaid) == (request.get("method") == "lora" and "adapter" not in request)
    assert ("master_weights" in unsaid) == ("method" not in request and request.get("precision") != "fp32")
    assert ("sharding" in unsaid) == (request["gpus"] > 1)
    assert predict(request | {"seq": None})["assumed"] == unsaid, "null is unsaid"


def test_a_request_that_says_all_assumes_nothing() -> None:
    said = {"global_batch": 16, "precision": "bf16", "optimizer": "adamw", "recompute": "full", "attention": "flash"}
    assert "assumed" not in predict(LARGE | said | {"master_weights": "weights"})


@pytest.mark.parametrize(
    ("request_", "levels", "verdict"),
    [
        (LARGE, ["full"], "does not fit"),
        (LARGE | {"micro_batch": 1, "seq": 2048}, [], ""),
        (TUNED | {"seq": 1024}, [], ""),
        (TUNED | {"seq": 2048}, ["none", "selective"], "fits"),
    ],
)
def test_recomputation_that_decides_what_fits_is_said(
    request_: dict[str, Any], levels: list[str], verdict: str
) -> None:
    answer = predict(request_)
    stated = {level: predict(request_ | {"recompute": level}) for level in ("none", "selective", "full")}
    turned = [level for level, other in stated.items() if other["fits"] != answer["fits"]]
    assert turned == levels
    if not levels:
        assert not any("by what is not stated" in note for note in answer.get("notes", []))
        return
    (note,) = answer["notes"]
    need = f"{answer['needed_memory_gib']:.1f} GiB needed of 79."
    assert note.startswith(f"{verdict}, {need}") and "\n" not in note and note.endswith("; state it")
    for level in levels:
        assert f"with {level} {stated[level]['needed_memory_gib']:.1f}" in note
    assert not any("by what is not stated" in note for other in stated.values() for note in other.get("notes", []))


def test_recomputation_that_another_field_says_is_not_assumed() -> None:
    request = TUNED | {"seq": 2048, "offload_checkpoints": "cpu"}
    answer = predict(request)
    assert answer["fits"] and not predict(TUNED | {"seq": 2048, "recompute": "none"})["fits"]
    assert "recompute" not in answer["assumed"] and "notes" not in answer
    modules = predict({"model": "llama-2-7b", "gpu": "H100", "framework": "Megatron-Core", "recompute_modules": "mlp"})
    assert "recompute" not in modules["assumed"]


def test_an_empty_word_says_nothing() -> None:
    assert predict(LARGE | {"recompute": "", "precision": ""}) == predict(LARGE)


def test_weights_that_transformers_may_have_read_in_fp32_are_said_where_they_decide() -> None:
    request = {"model": "llama-2-7b", "gpu": "H100", "gpus": 1, "micro_batch": 1, "framework": "transformers"}
    answer = predict(request | {"recompute": "full"})
    wide = predict(request | {"recompute": "full", "master_weights": "weights"})
    assert answer["fits"] and not wide["fits"]
    (note,) = answer["notes"]
    assert f"master_weights, taken as none (with weights {wide['needed_memory_gib']:.1f})" in note
    for known in ({"autocast": True}, {"framework": "torchtitan"}):
        # None would fit, but autocast has weights in fp32, and so has that framework.
        other = predict(request | {"recompute": "full"} | known)
        assert not other["fits"] and "notes" not in other
    both = predict(request | {"micro_batch": 4, "seq": 8192})
    assert both["notes"][0].endswith("; state them")
