"""Layers for further tokens, as Megatron trains them, and steps launched from one CUDA graph."""

import re
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner import predict
from trainyard.planner.families import shape_of_known
from trainyard.planner.known_models import KNOWN_CONFIGS, PREDICT_FURTHER

BRIDGE = "Megatron-Core (Megatron-Bridge)"
V3: dict[str, Any] = {"model": "deepseek-v3", "gpu": "GB200", "gpus": 256, "pp": 4, "vp": 4, "ep": 64, "seq": 4096}
V3 |= {"micro_batch": 1, "global_batch": 4096, "precision": "fp8", "framework": BRIDGE, "framework_version": "26.08"}


def _gflops_per_token(request: dict[str, Any]) -> float:
    answer = predict(request)
    return float(answer["model_tflops_per_gpu"] / answer["tokens_per_second_per_gpu"]) * 1e3


@pytest.mark.parametrize(
    ("model", "measured", "size"),
    [
        # Of the pages' own figures: TFLOP/s a GPU over tokens a second a GPU (Megatron-Bridge 26.08; 25.11 without).
        ("DeepSeek-V3", 1276 / 4912 * 1e3, {}),
        ("DeepSeekV3 (w/o MTP)", 249.7, {}),
        ("DeepSeekV4 Flash", 748 / 8224 * 1e3, {"gpus": 128, "pp": 1, "vp": 1, "global_batch": 2048}),
        ("kimi-k2", 204.5, {}),
    ],
)
def test_flops_of_a_token_are_those_behind_what_megatron_bridge_prints(
    model: str, measured: float, size: dict[str, Any]
) -> None:
    assert _gflops_per_token({**V3, "model": model, **size}) == pytest.approx(measured, rel=0.01)


def test_what_is_said_counts_and_what_is_taken_is_said() -> None:
    assert predict(V3)["assumed"]["mtp_layers"] == 1
    for said in ({"mtp_layers": 0}, {"framework": f"{BRIDGE}, no MTP"}, {"model": "DeepSeek-V3 without MTP"}):
        answer = predict({**V3, **said})
        assert "mtp_layers" not in answer.get("assumed", {})
        assert answer["step_seconds"] < predict(V3)["step_seconds"]
    alone = {**V3, "pp": 1, "vp": 1}
    assert predict({**alone, "mtp_layers": 0})["model_state_gib"] < predict(alone)["model_state_gib"]
    both = predict({**V3, "mtp_layers": 2})
    assert "mtp_layers" not in both["assumed"]
    assert both["step_seconds"] > predict(V3)["step_seconds"]


@pytest.mark.parametrize(
    "other",
    [
        {"framework": "NeMo Automodel (torch FSDP2)", "pp": 1, "vp": 1},
        {"layers": 8, "pp": 1, "vp": 1, "global_batch": 256},
        {"method": "lora"},
    ],
    ids=str,
)
def test_other_loops_adapters_and_models_cut_short_have_none(other: dict[str, Any]) -> None:
    assert "mtp_layers" not in predict({**V3, **other}).get("assumed", {})


def test_a_pipelines_last_rank_has_fewer_layers_beside_them() -> None:
    """Else it alone would hold the others up: 16 ranks of four layers, of which the last has its own ends too."""
    deep = {**V3, "gpus": 1024, "pp": 16, "vp": 1}
    without = predict({**deep, "mtp_layers": 0})["step_seconds"]
    assert predict(deep)["step_seconds"] < 1.15 * without
    assert predict({**deep, "last_stage_layers": 4})["step_seconds"] > 1.25 * without


def test_every_model_that_predicts_further_tokens_is_known() -> None:
    assert set(KNOWN_CONFIGS) >= PREDICT_FURTHER
    assert all(shape_of_known(name).mtp_layers == 0 for name in PREDICT_FURTHER)  # transformers makes none


QWEN: dict[str, Any] = {"model": "qwen3-235b-a22b", "gpu": "GB200", "gpus": 256, "pp": 8, "vp": 3, "ep": 32}
QWEN |= {"seq": 4096, "micro_batch": 1, "global_batch": 8192, "precision": "fp8", "framework": BRIDGE}


def test_steps_from_one_graph_wait_for_no_launch() -> None:
    """Small micro-batches of small experts are what launches hold up; of large ones less."""
    new, old = {**QWEN, "framework_version": "26.06"}, {**QWEN, "framework_version": "26.04"}
    gain = predict(old)["step_seconds"] / predict(new)["step_seconds"]
    assert gain > 1.4
    assert predict({**new, "cuda_graphs": "layers"})["step_seconds"] == pytest.approx(
        predict(old)["step_seconds"], rel=0.05
    )
    assert predict({**old, "cuda_graphs": "step"})["step_seconds"] == pytest.approx(
        predict(new)["step_seconds"], rel=0.05
    )
    large = {"micro_batch": 8, "pp": 1, "vp": 1, "gpus": 64}
    assert 1 < predict({**old, **large})["step_seconds"] / predict({**new, **large})["step_seconds"] < gain


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "H100"},
        {"precision": "bf16"},
        {"model": "nemotron-3-super", "pp": 1, "vp": 1},
        {"model": "llama-3.1-405b", "ep": 1},
        {"framework": "torchtitan"},
    ],
    ids=str,
)
def test_other_recipes_are_launched_as_before(other: dict[str, Any]) -> None:
    request = {**QWEN, "framework_version": "26.06", **other}
    assert predict(request)["step_seconds"] == predict({**request, "cuda_graphs": "layers"})["step_seconds"]


def test_another_word_for_graphs_is_one_line() -> None:
    with pytest.raises(InputError, match=re.escape("cuda_graphs: must be one of layers, step")):
        predict({**QWEN, "cuda_graphs": "all"})


def test_experts_that_somebody_exchanges_are_spread() -> None:
    """Over as many ranks as they can be dealt out to, where nobody says; else nobody would exchange anything."""
    asked = {"model": "gpt-oss-120b", "gpu": "H100", "gpus": 64, "micro_batch": 2, "framework": "NeMo Automodel"}
    told = {**asked, "expert_exchange": "deepep"}
    assert predict(told)["assumed"]["ep"] == 64
    assert predict(told)["step_seconds"] == predict({**told, "ep": 64})["step_seconds"]
    assert "ep" not in predict(asked).get("assumed", {})
    assert predict({**told, "gpus": 24})["assumed"]["ep"] == 8  # of 128 experts
    assert "ep" not in predict({**told, "model": "llama-3.1-8b"})["assumed"]
    assert predict({**told, "tp": 2, "expert_tp": 2})["assumed"]["ep"] == 32


@pytest.mark.parametrize("framework", ["transformers", "DeepSpeed", "torchtitan", "litgpt"])
def test_where_no_framework_sends_tokens_to_experts_they_stay(framework: str) -> None:
    asked = {"model": "qwen3-30b-a3b", "gpu": "H100", "gpus": 64, "micro_batch": 1, "framework": framework}
    assert predict({**asked, "expert_exchange": "nccl"}) == predict(asked)
    assert predict({**asked, "expert_exchange": ""}) == predict(asked)


@pytest.mark.parametrize(
    "request_",
    [V3, {**V3, "gpus": 1024, "pp": 16, "vp": 1}, {**QWEN, "framework_version": "26.08"}],
    ids=["V3", "deep", "graphs"],
)
def test_who_states_what_was_taken_gets_the_same(request_: dict[str, Any]) -> None:
    answer = predict(request_)
    for name, value in answer["assumed"].items():
        assert predict({**request_, name: value})["step_seconds"] == answer["step_seconds"], name


@pytest.mark.parametrize("framework", ["nanotron", "Megatron-LM", "Megatron-DeepSpeed"])
def test_recipes_graphs_are_no_other_frameworks(framework: str) -> None:
    request = {**QWEN, "framework": framework, "framework_version": "2026-07"}
    assert "cuda_graphs" not in predict(request)["assumed"]


def test_fp4_copies_are_smaller_than_fp8s() -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "B200", "gpus": 8, "framework": "megatron-core", "micro_batch": 1}
    fp8, fp4 = (predict({**asked, "precision": name})["resting_memory_gib"] for name in ("fp8", "fp4"))
    linears = shape_of_known("llama-3.1-8b").params - 2 * 128256 * 4096
    assert (fp8 - fp4) * 2**30 == pytest.approx(2 * (1 - 0.5625) * linears, rel=0.001)
