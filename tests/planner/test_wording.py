"""Requests in users' own words: other names of fields, other spellings, machines for GPUs, models unknown here."""

import re
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware import gpu
from trainyard.planner import predict
from trainyard.planner.predict import understand
from trainyard.planner.wording import FIELDS, in_plain_words

LLAMA: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "H100", "gpus": 16, "seq": 4096}


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        ({"sharding": "ZeRO-3"}, {"sharding": "zero3"}),
        ({"sharding": "fsdp"}, {"sharding": "zero3"}),
        ({"sharding": "stage 2"}, {"sharding": "zero2"}),
        ({"sharding": 1}, {"sharding": "zero1"}),
        ({"sharding": "DDP"}, {"sharding": "none"}),
        ({"precision": "bfloat16"}, {"precision": "bf16"}),
        ({"precision": "amp_bf16"}, {"precision": "bf16"}),
        ({"precision": "MXFP8"}, {"precision": "fp8"}),
        ({"precision": "float8_e4m3"}, {"precision": "fp8"}),
        ({"precision": "half"}, {"precision": "fp16"}),
        ({"precision": "bf16_with_fp8_current_scaling_mixed"}, {"precision": "fp8"}),
        ({"precision": "bf16_with_mxfp8_mixed"}, {"precision": "fp8"}),
        ({"precision": "BF16 (fp32 grad accumulation)"}, {"precision": "bf16"}),
        ({"precision": "NVFP4", "gpu": "B300"}, {"precision": "fp4", "gpu": "B300"}),
        ({"optimizer": "adamw_torch_fused"}, {"optimizer": "adamw"}),
        ({"optimizer": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "torch.optim.AdamW"}, {"optimizer": "adamw"}),
        ({"optimizer": "FusedAdam"}, {"optimizer": "adamw"}),
        ({"optimizer": "8-bit AdamW"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": "paged_adamw_32bit"}, {"optimizer": "adamw_paged"}),
        ({"recompute": True}, {"recompute": "full"}),
        ({"recompute": False}, {"recompute": "none"}),
        ({"recompute": "uniform"}, {"recompute": "full"}),
        ({"recompute": "True"}, {"recompute": "full"}),
        ({"recompute": "no"}, {"recompute": "none"}),
        ({"recompute": "selective_op"}, {"recompute": "selective"}),
        ({"method": "SFT"}, {"method": "full"}),
        ({"method": "full fine-tuning"}, {"method": "full"}),
        ({"method": "continued pre-training"}, {"method": "full"}),
        ({"method": "LoRA (4-bit)"}, {"method": "qlora"}),
        ({"sharding": "HSDP"}, {"sharding": "zero3", "data_replicate": 2}),
        (
            {"sharding": "HYBRID_SHARD", "tp": 4, "gpus": 64},
            {"sharding": "zero3", "data_replicate": 8, "tp": 4, "gpus": 64},
        ),
        (
            {"sharding": "hybrid_shard", "gpus_per_node": 4},
            {"sharding": "zero3", "data_replicate": 4, "gpus_per_node": 4},
        ),
        ({"sharding": "hsdp", "data_replicate": 4}, {"sharding": "zero3", "data_replicate": 4}),
        ({"sharding": "hsdp", "gpus": 4}, {"sharding": "zero3", "data_replicate": 1, "gpus": 4}),
        ({"sharding": "hsdp", "gpus": 12}, {"sharding": "zero3", "gpus": 12}),
        ({"tensor_parallel_size": 4, "mbs": 2, "gbs": 64}, {"tp": 4, "micro_batch": 2, "global_batch": 64}),
        ({"model": "Llama3.1-8B"}, {}),
        ({"model": "deepseek-ai/DeepSeek-V3.1", "ep": 8}, {"model": "deepseek-v3", "ep": 8}),
        ({"model": "Qwen-2.5-7B"}, {"model": "qwen2.5-7b"}),
    ],
)
def test_other_words_say_the_same(words: dict[str, Any], plain: dict[str, Any]) -> None:
    assert predict(LLAMA | words) == predict(LLAMA | plain)
    if "model" not in words:  # names of models are read later
        assert in_plain_words(LLAMA | words) == LLAMA | plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("precision", value) for value in ("tensorfloat32", "bf16/fp16", "bf16, without fp8", "w8a16")),
        *(("optimizer", value) for value in ("adamw_torch_4bit", "galore_adamw", "apollo_adamw", "adam_mini")),
        *(("method", value) for value in ("dora", "galore", "freeze", "prefix-tuning", "qlora 8bit")),
        *(("recompute", value) for value in ("sometimes", "1", "half", "block")),
        *(("optimizer", value) for value in ("adamw_bf16", "DeepSpeedCPUAdam", "schedule_free_adamw", "nadam")),
    ],
)
def test_words_that_say_more_than_the_planner_knows_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match=rf"{name}: must be one of .* \(given: '{re.escape(value.lower())}'\)"):
        predict(LLAMA | {name: value})


def test_copies_of_hsdp_are_as_many_as_the_machines() -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "g5.12xlarge", "gpus": 16, "seq": 4096}
    assert in_plain_words(asked | {"sharding": "HSDP"})["data_replicate"] == 4


def test_a_whole_models_training_that_has_a_rank_is_asked_about() -> None:
    with pytest.raises(InputError, match=r"method: must be one of full, lora, qlora .given: 'SFT'"):
        predict(LLAMA | {"method": "SFT", "lora_rank": 16})


OTHERS: dict[str, Any] = {
    "gpus": 32, "seq": 2048, "micro_batch": 2, "global_batch": 64, "tp": 2, "pp": 2, "cp": 2, "ep": 1, "layers": 16,
    "hidden": 2048, "ffn": 8192, "heads": 16, "kv_heads": 4, "vocab": 32000, "model": "qwen3-8b",
}  # fmt: skip
"""A value of each field that is another than the usual one."""


@pytest.mark.parametrize(("name", "usual"), FIELDS.items())
def test_every_other_name_of_a_field_is_read_as_that_field(name: str, usual: str) -> None:
    without = {field: value for field, value in LLAMA.items() if field != usual}
    assert predict(without | {name: OTHERS[usual]}) == predict(without | {usual: OTHERS[usual]})


def test_two_names_of_one_field_must_agree() -> None:
    assert predict(LLAMA | {"num_gpus": 16}) == predict(LLAMA)
    with pytest.raises(InputError, match="num_gpus 8: gpus is 16; leave one of the two out"):
        predict(LLAMA | {"num_gpus": 8})


@pytest.mark.parametrize(
    ("stated", "name", "memory_gib", "per_node"),
    [
        ({"gpu": "p4d.24xlarge"}, "A100", 39.6, 8),
        ({"gpu": "ml.p4de.24xlarge"}, "A100", 79.1, 8),
        ({"gpu": None, "interconnect": "2 x p5.48xlarge"}, "H100", 79.1, 8),
        ({"gpu": "GB300"}, "GB300", None, 16),
    ],
)
def test_a_machine_says_its_gpu_and_a_rack_is_one_node(
    stated: dict[str, Any], name: str, memory_gib: float | None, per_node: int
) -> None:
    question = understand(LLAMA | stated)
    assert question.device.name == name
    assert memory_gib is None or question.device.memory_gib == pytest.approx(memory_gib, abs=0.3)
    assert question.links.gpus_per_node == per_node


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"gpu": "p5.48xlarge", "gpu_mem_gb": 0}, "gpu_mem_gb: must be a number above 0"),
        ({"gpu": 0, "interconnect": "p5.48xlarge"}, "gpu: must be a text"),
        ({"gpu": "p5.48xlarge", "interconnect": 0}, "interconnect: must be a text"),
    ],
)
def test_a_machine_takes_the_place_of_nothing_that_is_stated_wrongly(stated: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        predict(LLAMA | stated)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("H100 80GB PCIe", "H100 PCIE"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 NVL", "H100 NVL"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 ADA"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIE"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 TI SUPER"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 TI"),
        ("RTX 6000 Pro Blackwell", "RTX PRO 6000"),
        ("NVIDIA RTX A5000", "A5000"),
        ("NVIDIA A10", "A10"),
        ("A10G", "A10G"),
        ("L40", "L40"),
    ],
)
def test_parts_of_like_names_are_told_apart(words: str, name: str) -> None:
    assert gpu(words).name == name


def test_an_unknown_decoder_is_taken_by_the_size_in_its_name_and_that_is_said() -> None:
    asked = {"gpu": "H100", "gpus": 64, "recompute": "full"}
    answer = predict(asked | {"model": "google/gemma-4-27b-it"})
    (note,) = answer["notes"]
    assert "'google/gemma-4-27b-it' is not known here" in note and "Llama of 27 billion" in note
    named = predict(asked | {"params_b": 27})
    assert named == {name: value for name, value in answer.items() if name != "notes"}


def test_the_name_of_an_unknown_model_whose_widths_are_stated_is_a_label() -> None:
    sizes = {"layers": 60, "hidden": 5120, "ffn": 20480, "gpu": "H100", "gpus": 64}
    assert predict(sizes | {"model": "our-27b"}) == predict(sizes)
    experts = sizes | {"ffn": None, "moe_ffn": 1536, "experts": 160, "experts_per_token": 8}
    assert predict(experts | {"model": "zai-org/GLM-4.8"}) == predict(experts)
    # Experts of which nobody says how many are no dense model.
    with pytest.raises(InputError, match="unknown model 'our-60b-a3b'"):
        predict(sizes | {"model": "our-60b-a3b"})


@pytest.mark.parametrize(
    "model",
    [
        "meta-llama/Llama-4-Behemoth-288B-16E",
        "Qwen/Qwen3-Next-40B-A3B",
        "state-spaces/mamba2-2.7b",
        "nvidia/Nemotron-H-8B-Base",
        "olmoe-3b-9b",
        "google/vit-large-patch16-224",
        "Qwen2.5-VL-7B",
        "zai-org/GLM-4.8",
        "our-27b",
        *("falcon-h1-7b", "zamba2-7b", "bamba-9b", "granite-4.0-h-7b", "recurrentgemma-9b"),
        *("arctic-480b", "minimax-text-01-456b", "hunyuan-large-389b", "kimi-linear-48b", "granite-3.0-3b-a800m"),
        *("nllb-3.3b", "ul2-20b", "m2m100-1.2b", "flan-t5-11b"),
        *("internvl2-8b", "pixtral-12b", "llama-3.2-11b-vision", "paligemma-3b", "cogvideox-5b", "qwen2-audio-7b"),
        "microsoft/Phi-4-multimodal-instruct",
    ],
)
def test_what_no_decoder_of_a_size_stands_for_is_refused_and_says_how_to_mend_it(model: str) -> None:
    with pytest.raises(InputError, match=r"unknown model .* state layers, hidden"):
        predict({"model": model, "gpu": "H100", "gpus": 64})


@pytest.mark.parametrize(
    "model",
    [
        *("7.5B", "Meta-Llama-3-9B", "mistralai/Mistral-Small-3.1-24B", "bigscience/bloom-12b", "tiiuae/falcon-13b"),
        *("EleutherAI/gpt-j-7b", "gpt-neo-3b", "CohereForAI/c4ai-command-r-60b", "codegen-9b", "internlm2-12b"),
    ],
)
def test_plain_decoders_are_taken_by_their_size(model: str) -> None:
    (note,) = predict({"model": model, "gpu": "H100", "gpus": 256, "recompute": "full", "sharding": "zero3"})["notes"]
    assert "is not known here, and taken as a Llama" in note


SIZES: dict[str, Any] = {"layers": 24, "hidden": 1024, "ffn": 4096, "gpu": "H100", "gpus": 64}


@pytest.mark.parametrize(
    ("model", "says", "stated"),
    [
        ("nvidia/Nemotron-H-8B-Base", r"is a hybrid by its name \(nemotron-h\)", {"hybrid_pattern": "M*M-"}),
        ("t5-11b", r"is an encoder by its name \(t5\)", {"encoder_layers": 24, "cross_attention": True}),
        ("google-bert/bert-large", r"is an encoder by its name \(bert\)", {"head_products": 2}),
        ("google/vit-huge", r"is a model of images or sound by its name \(vit\)", None),
        ("microsoft/Phi-4-multimodal-instruct", r"images or sound by its name \(multimodal\)", None),
    ],
)
def test_a_label_of_another_kind_needs_what_makes_it_that_kind(
    model: str, says: str, stated: dict[str, Any] | None
) -> None:
    for size in ({}, {"params_b": 8}):
        with pytest.raises(InputError, match=f"{says}.* leave model out"):
            predict(SIZES | {"model": model} | size)
    if stated is not None:
        assert predict(SIZES | stated | {"model": model}) == predict(SIZES | stated)


@pytest.mark.parametrize("billions", [6, 30, 180, 1000])
def test_heads_of_a_guessed_model_can_be_split_by_tensor_parallelism(billions: int) -> None:
    shape = understand({"params_b": billions, "gpu": "H100", "gpus": 64, "tp": 8}).shape
    assert shape.heads % 8 == 0
    assert shape.params == pytest.approx(billions * 1e9, rel=0.08)


@pytest.mark.parametrize(("heads", "says"), [(96, True), (32, True), (100, False), (90, False)])
def test_heads_that_lie_unaligned_are_told(heads: int, says: bool) -> None:
    # BLOOM's trials of 14,400: 150 and 450 elements; 144 and 160 are multiples of 8.
    asked = {"layers": 4, "hidden": 14400, "ffn": 57600, "heads": heads, "gpu": "A100", "gpus": 64, "recompute": "full"}
    notes = predict(asked).get("notes", [])
    assert any(note.startswith(f"head_dim {14400 // heads}: its rows don't begin") for note in notes) == says
