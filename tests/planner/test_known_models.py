"""The table of well-known models: their sizes, and the ways in which people write their names."""

from collections.abc import Callable
from typing import Any

import pytest

from trainyard.planner.families import known_name, shape_from_config, shape_of_known, size_of_unknown
from trainyard.planner.known_models import KNOWN_CONFIGS
from trainyard.planner.predict import predict
from trainyard.planner.request_fields import Fields
from trainyard.planner.request_shape import shape_of

Counted = Callable[[dict[str, Any]], int]

PUBLISHED = {
    **{"llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672, "codellama-7b": 6_738_546_688},
    **{"solar-10.7b": 10_731_524_096, "yi-6b": 6_061_035_520, "yi-9b": 8_829_407_232},
    **{"deepseek-llm-7b": 6_910_365_696, "deepseek-moe-16b": 16_375_728_128, "smollm2-135m": 134_515_008},
    **{"smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384, "codestral-22b": 22_247_282_688},
    **{"mistral-large": 122_610_069_504, "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen3-coder-480b-a35b": 480_154_875_392},
    **{"deepseek-r1-distill-qwen-1.5b": 1_777_088_000, "distilgpt2": 81_912_576, "gemma-2-2b": 2_614_341_888},
    **{"gemma-2-27b": 27_227_128_320, "olmo-2-1b": 1_484_916_736, "olmo-2-32b": 32_234_279_936},
    **{"olmoe-1b-7b": 6_919_161_856, "command-r": 34_980_831_232, "phi-3-medium": 13_960_238_080},
    **{"phi-4-mini": 3_836_021_760, "phi-3.5-moe": 41_873_153_344, "stablelm-2-1.6b": 1_644_515_328},
    **{"stablelm-3b-4e1t": 2_795_443_200, "glm-4-9b": 9_399_951_360, "internlm2-7b": 7_737_708_544},
    **{"internlm2-20b": 19_861_149_696, "ernie-4.5-0.3b": 360_748_032, "ernie-4.5-21b-a3b": 21_825_437_888},
    **{"exaone-3.5-2.4b": 2_405_327_360, "exaone-3.5-7.8b": 7_818_448_896, "seed-oss-36b": 36_151_104_512},
    **{"dbrx": 131_596_523_520, "pythia-70m": 70_426_624, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016},
    **{"pythia-1b": 1_011_781_632, "pythia-2.8b": 2_775_208_960, "opt-125m": 125_239_296, "bloom": 176_247_271_424},
    **{"starcoder": 15_517_456_384, "baichuan2-7b": 7_505_973_248, "llama-4-scout": 107_769_861_120},
}
"""Parameters that the models' pages say, of those that are written as another family's too."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_the_parameters_that_their_pages_say(name: str) -> None:
    assert shape_of_known(name).params == PUBLISHED[name]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(KNOWN_CONFIGS))
def test_every_known_model_has_the_parameters_that_transformers_counts(name: str, real_parameters: Counted) -> None:
    assert shape_from_config(KNOWN_CONFIGS[name]).params == real_parameters(KNOWN_CONFIGS[name])


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("huggyllama/llama-13b", "llama-13b"),
        ("GPT-3 6.7B", "gpt3-6.7b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("llama3_1_8b", "llama-3.1-8b"),
        ("Llama-3-8B", "llama-3-8b"),
        ("llama_3_70b", "llama-3-70b"),
        ("Qwen-2_5-7B", "qwen2.5-7b"),
        ("qwen2-7b", "qwen2-7b"),
        ("internlm/internlm2_5-7b-chat", "internlm2.5-7b"),
        ("CohereForAI/c4ai-command-r-plus", "command-r-plus"),
        ("Command R+", "command-r-plus"),
        ("c4ai-command-r-v01", "command-r"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-r1-distill-qwen-1.5b"),
        ("DeepSeek-R1-Distill-Llama-70B", "deepseek-r1-distill-llama-70b"),
        ("DeepSeek-R1", "deepseek-r1"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-coder-32b"),
        ("Qwen2.5-7B-Instruct-1M", "qwen2.5-7b"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-1124-7b"),
        ("openlm-research/open_llama_7b_v2", "llama-7b"),
        ("lmsys/vicuna-13b-v1.5-16k", "vicuna-13b"),
        ("s3://models/bloom/", "bloom"),
        ("bigscience/bloom-7b1", "bloom-7b1"),
        ("starcoder2-15b", "starcoder2-15b"),
        ("zai-org/GLM-4.5-Air", "glm-4.5-air"),
        ("Llama 4 Scout", "llama-4-scout"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama-4-maverick-17b-128e"),
        ("llama_3_1_8b", "llama-3.1-8b"),
        ("stabilityai/stablelm-2-1_6b", "stablelm-2-1.6b"),
        ("Qwen/Qwen-1_8B", "qwen-1.8b"),
        ("nvidia/Minitron-4B-Base", "minitron-4b"),
        ("mistralai/Mistral-Large-Instruct-2411", "mistral-large"),
        ("microsoft/phi-4", "phi-4"),
        ("Nemotron_3_5_Lightning", "nemotron-3.5-lightning"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("Nemotron 3 Super 120B-A12B", "nemotron-3-super-120b-a12b"),
        ("DeepSeekV4 Flash", "deepseek-v4-flash"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("deepseek_v3_2", "deepseek-v3.2"),
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3"),
        ("zai-org/GLM-5.1-FP8", "glm-5.1"),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5"),
        ("MiniMaxAI/MiniMax-M2.7", "minimax-m2.7"),
        ("Qwen/Qwen3.5-397B-A17B", "qwen3.5-397b-a17b"),
        ("Qwen 3.5 397B", "qwen3.5-397b"),
        ("Qwen3 235B", "qwen3-235b"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3-vl-30b-a3b"),
        ("llama3-405b", "llama-3-405b"),
        ("qwen3-0_6b", "qwen3-0.6b"),
        ("Qwen3-1_7B", "qwen3-1.7b"),
        # Another's sizes, or nobody's.
        ("Qwen3-30B-A1B", None),
        ("DeepSeek-V4.1-Flash", None),
        ("GLM-5V", None),
        ("MiniMax-M1", None),
        ("nvidia/nemotron-3-8b-base-4k", None),
        ("Langboat/bloom-1b4-zh", None),
        ("malteos/bloom-6b4-clp-german", None),
        ("nvidia/Llama-3.1-Minitron-4B-Width-Base", None),
        ("nvidia/Mistral-NeMo-Minitron-8B-Base", None),
        ("mistralai/Mistral-Large-3-Base", None),
        ("microsoft/Phi-4-mini-flash-reasoning", None),
        ("HuggingFaceH4/zephyr-7b-gemma-v0.1", None),
        ("bloom-13b", None),
        ("opt-350m", None),
        ("Qwen2.5-VL-7B", None),
        ("starcoder2-40b", None),
        ("deepseek-r1-distill-qwen-3b", None),
    ],
)
def test_names_are_known_however_they_are_written(written: str, known: str | None) -> None:
    assert known_name(written) == known


@pytest.mark.parametrize(
    ("written", "billions"),
    [("llama-300M", 0.3), ("opt-350m", 0.35), ("llama-12m", 0.012), ("llama-9b-1m", 9), ("llama-10m", None)],
)
def test_a_size_in_an_unknown_name_may_be_of_millions(written: str, billions: float | None) -> None:
    assert size_of_unknown(written) == billions


@pytest.mark.parametrize("layers", [1, 4, 13, 200])
def test_a_model_cut_or_deepened_keeps_its_kinds_of_layers_in_proportion(layers: int) -> None:
    """One with windows was refused for these, which nobody had stated, and delta rules were more than all layers."""
    for name in sorted(KNOWN_CONFIGS):
        whole = shape_of_known(name)
        shape = shape_of(Fields({"model": name, "layers": layers}))
        kinds = ("windowed_layers", "delta_layers", "wide_layers")
        for kind in kinds:
            before, after = getattr(whole, kind), getattr(shape, kind)
            assert after == pytest.approx(before * layers / whole.layers, abs=1), (name, kind)
            assert (after > 0) == (before > 0), (name, kind)
        assert shape.num_attentions >= 0 and shape.num_mlps >= 0 and shape.moe_layers >= 0, name
        assert len(shape.wide_places) == shape.wide_layers and all(place < layers for place in shape.wide_places)


def test_a_cut_gemma_is_predicted() -> None:
    asked = {"gpu": "H100", "gpus": 8, "seq": 4096, "global_batch": 8, "framework": "torchtitan"}
    found = [
        predict({"model": model, "layers": 6, **asked})["step_seconds"] for model in ("gemma-3-27b", "gemma-4-31b")
    ]
    assert all(seconds > 0 for seconds in found)
