"""`trainyard predict --jsonl`: every line answered, unknowns filled as their user would, nonsense refused."""

import dataclasses
import json
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner import Errors, predict, predict_jsonl
from trainyard.planner.communication import EFA, INFINIBAND
from trainyard.planner.predict import understand

OUTPUTS = {
    "peak_memory_gib",
    "model_state_gib",
    "activation_gib",
    "resting_memory_gib",
    "device_memory_gib",
    "reserved_memory_gib",
    "needed_memory_gib",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "tokens_per_second_per_gpu",
    "tokens_per_second_per_gpu_low",
    "tokens_per_second_per_gpu_high",
    "model_tflops_per_gpu",
    "mfu",
    "communication_fraction",
    "bubble_fraction",
    "fits",
}

LLAMA: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "H100", "gpus": 64, "seq": 8192, "sharding": "zero3"}

EVERY_FIELD: dict[str, Any] = {
    "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "seq": 8192,
    "gated_mlp": True, "tied_embeddings": False, "experts": 8, "experts_per_token": 2, "gpu": "H100", "gpus": 64,
    "gpus_per_node": 8, "interconnect": "p5.48xlarge EFA", "tp": 2, "pp": 2, "vp": 2, "cp": 1, "ep": 4, "dp": 16,
    "sharding": "zero1", "micro_batch": 1, "global_batch": 256, "precision": "bf16", "recompute": "selective",
    "framework": "Megatron-Core", "method": "full", "lora_rank": 8, "model": "mixtral-8x7b", "params_b": 46.7,
    "head_dim": 128, "moe_ffn": 14336, "optimizer": "adamw", "offload": "none", "sequence_parallel": True,
    "data_replicate": 1, "gpu_mem_gb": 80, "framework_version": "0.14",
}  # fmt: skip


def test_all_outputs_are_there_and_agree() -> None:
    answer = predict({**LLAMA, "micro_batch": 1})
    assert set(answer) == OUTPUTS | {"assumed"}
    assert answer["fits"] is True or answer["fits"] is False
    assert answer["model_tflops_per_gpu"] == pytest.approx(answer["mfu"] * 989)
    tokens = 64 * 8192
    assert answer["tokens_per_second_per_gpu"] == pytest.approx(tokens / answer["step_seconds"] / 64)
    assert answer["model_state_gib"] == pytest.approx(8.0303e9 * 16 / 64 / 2**30, rel=1e-3)


def test_the_interval_is_around_the_estimate_and_wider_where_software_is_new() -> None:
    old, new = predict(LLAMA), predict({**LLAMA, "gpu": "GB300", "precision": "fp4", "interconnect": "NVL72"})
    for answer in (old, new):
        assert answer["step_seconds_low"] < answer["step_seconds"] < answer["step_seconds_high"]
        assert answer["tokens_per_second_per_gpu_low"] < answer["tokens_per_second_per_gpu"]
        assert answer["tokens_per_second_per_gpu"] < answer["tokens_per_second_per_gpu_high"]
    widths = [answer["step_seconds_high"] / answer["step_seconds_low"] for answer in (old, new)]
    assert widths[1] > widths[0]


def test_fewer_bits_and_newer_releases_are_faster_and_four_bits_have_their_own_peak() -> None:
    blackwell = {**LLAMA, "gpu": "GB300", "micro_batch": 2, "framework": "Megatron-Core", "sharding": "zero1"}
    seconds = {bits: predict({**blackwell, "precision": bits})["step_seconds"] for bits in ("bf16", "fp8", "fp4")}
    assert seconds["fp4"] < seconds["fp8"] < seconds["bf16"]
    answer = predict({**blackwell, "precision": "fp4"})
    assert answer["model_tflops_per_gpu"] == pytest.approx(answer["mfu"] * 15000)
    experts = {"model": "deepseek-v3", "gpu": "GB200", "gpus": 256, "pp": 4, "ep": 64, "framework": "Megatron-Bridge"}
    older, newer = (predict({**experts, "framework_version": text})["step_seconds"] for text in ("25.09", "26.08"))
    assert newer < older


def test_an_unknown_micro_batch_is_the_fastest_that_fits() -> None:
    job = {**LLAMA, "model": "llama-3.2-1b", "gpus": 8, "seq": 2048, "global_batch": 64, "sharding": "none"}
    chosen = predict(job)
    stated = [predict({**job, "micro_batch": size}) for size in (1, 2, 4, 8)]
    assert chosen["step_seconds"] == min(answer["step_seconds"] for answer in stated if answer["fits"])


def test_an_unknown_batch_leaves_the_micro_batch_free_too() -> None:
    job = {**LLAMA, "model": "llama-3.2-1b", "gpus": 8, "seq": 2048, "sharding": "none"}
    question = understand(job)
    stated = [predict({**job, "micro_batch": size}) for size in (1, 2, 4, 8, 16)]
    best = max(answer["tokens_per_second_per_gpu"] for answer in stated if answer["fits"])
    assert question.layout.micro_batch > 1
    assert predict(job)["tokens_per_second_per_gpu"] == best


def test_every_field_of_the_contract_is_taken() -> None:
    assert set(predict(EVERY_FIELD)) == OUTPUTS | {"assumed"}, "the contract has no field for attention"


def test_null_is_the_same_as_missing() -> None:
    assert predict({**LLAMA, "tp": None, "recompute": None, "framework": None}) == predict(LLAMA)


def test_a_model_name_fills_what_is_missing_and_stated_sizes_win() -> None:
    assert understand(LLAMA).shape.params == pytest.approx(8.0303e9, rel=1e-4)
    assert understand({**LLAMA, "layers": 16}).shape.layers == 16


def test_a_size_alone_is_enough() -> None:
    shape = understand({"params_b": 7, "gpu": "H100"}).shape
    assert shape.params == pytest.approx(7e9, rel=0.1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ffn": 16384}, {"gated_mlp": False, "tied_embeddings": True, "vocab": 50304, "kv_heads": 32}),
        ({"ffn": 11008}, {"gated_mlp": True, "tied_embeddings": False, "vocab": 32000}),
        ({}, {"gated_mlp": True, "ffn": 11008, "head_dim": 128}),
    ],
)
def test_unknown_sizes_are_the_familys(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = understand({"layers": 32, "hidden": 4096, "gpu": "A100", **fields}).shape
    assert {name: getattr(shape, name) for name in expected} == expected


GPT: dict[str, Any] = {
    "layers": 30, "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32, "vocab": 131072, "gpu": "H100",
}  # fmt: skip
LLAMA_3B: dict[str, Any] = {
    "layers": 28, "hidden": 3072, "ffn": 8192, "heads": 24, "kv_heads": 8, "vocab": 128256, "gpu": "H100",
}  # fmt: skip
LLAMA_1B: dict[str, Any] = {**LLAMA_3B, "layers": 16, "hidden": 2048, "heads": 32}


def _reading(fields: dict[str, Any]) -> tuple[bool, bool]:
    """Gated, tied."""
    shape = understand(fields).shape
    # Norms and biases belong to the kind of block.
    assert (shape.norm == "rms") is shape.gated_mlp and shape.mlp_bias is not shape.gated_mlp
    return shape.gated_mlp, shape.tied_embeddings


@pytest.mark.parametrize(
    ("fields", "usual", "params_b", "by_size"),
    [
        (GPT, (False, True), 7.11, (False, False)),
        (GPT, (False, True), 8.59, (True, True)),
        (GPT, (False, True), 9.13, (True, False)),
        # The real Llama 3.2 models, whose widths alone look like another's.
        (LLAMA_3B, (True, False), 3.21, (True, True)),
        (LLAMA_1B, (False, True), 1.24, (True, True)),
        # One projection of all layers is as large as the vocabulary's: two readings meet the size.
        ({**LLAMA_1B, "vocab": 16 * 8192}, (False, True), 1.24, (True, True)),
    ],
)
def test_a_stated_size_chooses_between_readings_of_the_same_widths(
    fields: dict[str, Any], usual: tuple[bool, bool], params_b: float, by_size: tuple[bool, bool]
) -> None:
    assert _reading(fields) == usual
    assert _reading({**fields, "params_b": params_b}) == by_size
    assert understand({**fields, "params_b": params_b}).shape.params == pytest.approx(params_b * 1e9, rel=0.005)


@pytest.mark.parametrize("params_b", [6.58, 6.7, 7.5, 20])
def test_a_size_that_no_other_reading_meets_leaves_the_usual_one(params_b: float) -> None:
    assert understand({**GPT, "params_b": params_b}).shape == understand(GPT).shape


@pytest.mark.parametrize(
    "more",
    [
        {"gated_mlp": False, "tied_embeddings": True},
        {"gated_mlp": True, "tied_embeddings": True},
        *({name: None} for name in ("ffn", "heads", "kv_heads", "vocab")),
        {"mtp_layers": 1},
        {"experts": 2, "moe_ffn": 8192},
    ],
)
def test_a_size_does_not_choose_against_a_field_or_for_widths_that_are_guessed(more: dict[str, Any]) -> None:
    fields = {**GPT, **more}
    # The size that the other ties would have, more than 3% from the usual one's.
    shape = understand(fields).shape
    untied = dataclasses.replace(shape, tied_embeddings=not shape.tied_embeddings)
    assert understand({**fields, "params_b": untied.params / 1e9}).shape == shape


@pytest.mark.parametrize(
    ("name", "params_b"), [("DeepSeek-R1-Distill-Llama-8B", 8), ("GPT2-8B", 8.3), ("Llama 2", 7), ("Qwen-7B", 7)]
)
def test_a_name_never_stands_for_a_model_of_another_size(name: str, params_b: float) -> None:
    shape = understand({"model": name, "params_b": params_b, "gpu": "H100"}).shape
    assert shape.params == pytest.approx(params_b * 1e9, rel=0.15)
    assert not shape.experts


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        ({"framework": "NeMo/Megatron-Core"}, "megatron"),
        ({"framework": "torchtitan 2025-06"}, "torch"),
        ({"framework": "DeepSpeed", "sharding": "zero2"}, "deepspeed"),
        ({"tp": 8}, "megatron"),
        ({"sharding": "zero2"}, "deepspeed"),
        ({"gpus": 1, "method": "lora"}, "plain"),
    ],
)
def test_the_training_state_is_the_frameworks(fields: dict[str, Any], engine: str) -> None:
    assert understand({**LLAMA, "sharding": None, **fields}).layout.engine == engine


@pytest.mark.parametrize(
    ("text", "gb_per_second"),
    [
        ("p4d.24xlarge x4", 50),
        ("NVLink + 400 Gb/s RDMA per GPU", 400),
        ("Selene: NVSwitch + 8x HDR200 IB/node", 200),
        ("RoCE 1600 Gbps/node", 200),
        ("DGX-H100 (NDR)", 400),
        ("Grand Teton 400 Gb/s", 400),
        ("400 Gb/s per node", 50),
        ("NVL72", 3600),
        ("NVLink 900 GB/s", 400),
        ("NVLink 900 GB/s + 8x200 Gb/s", 200),
        ("intra 150 GB/s, inter 800 Gb/s", 100),
        ("50 GB/s per GPU", 400),
        ("400 GB/s per node", 400),
        ("100GbE", 12.5),
        ("100 Gigabit Ethernet", 12.5),
        ("100 Gb/s Ethernet", 12.5),
        ("4x100 Gb/s Ethernet", 50),
        # Each GPU has a card of what carries RDMA.
        ("400 Gb/s RoCE over Ethernet", 400),
        ("Ethernet, 100 Gb/s", 12.5),
        ("100 Gb/s Ethernet, no InfiniBand", 12.5),
        # Of two networks it is that of the rate, or the one with RDMA.
        ("InfiniBand 400 Gb/s, Ethernet management", 400),
        ("InfiniBand 400 Gb/s and Ethernet for storage", 400),
        ("Ethernet for storage, NDR, 400 Gb/s", 400),
        ("EFA 400 Gb/s ethernet", 400),
        ("Slingshot 200 Gb/s (Ethernet)", 200),
        ("HPE Slingshot 11", 200),
        ("Slingshot-10", 100),
        ("Ethernet 25 Gb/s, InfiniBand 400 Gb/s", 400),
        ("InfiniBand within a pod, 100 Gb/s Ethernet", 12.5),
        ("10G", 1.25),
        ("200Gb", 200),
        ("3.2 Tb/s", 400),
        ("4x100GbE", 50),
        ("3-layer Clos, 8x200G-class NICs", 200),
        ("EDR", 100),
        ("HDR100 InfiniBand", 100),
        ("NDR200", 200),
        ("fast", 400),
        ("", 400),
    ],
)
def test_the_network_is_read_from_words(text: str, gb_per_second: float) -> None:
    assert understand({**LLAMA, "interconnect": text}).links.node_gb_per_second == gb_per_second


@pytest.mark.parametrize(
    ("gpu", "per_node", "gb_per_second"),
    [
        ("H200", 8, 400),
        ("H200", 4, 200),
        ("H200", 1, 50),
        ("A100", 4, 100),
        # A card at least, which parts without NVLink share, and the first nodes with it.
        ("V100", 4, 12.5),
        ("V100", 16, 25),
        ("L4", 4, 12.5),
    ],
)
@pytest.mark.parametrize("words", ["InfiniBand", ""])
def test_a_node_has_as_many_cards_as_gpus(gpu: str, per_node: int, gb_per_second: float, words: str) -> None:
    """Four H200 a node had eight cards, and what crosses the network took half of its time."""
    asked = {**LLAMA, "gpu": gpu, "gpus": 64, "gpus_per_node": per_node, "interconnect": words}
    assert understand(asked).links.node_gb_per_second == gb_per_second


def test_a_rack_of_nvlink_is_one_node() -> None:
    assert understand({**LLAMA, "gpu": "GB200", "interconnect": "NVL72"}).links.gpus_per_node == 72


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpu": "H1000"}, "unknown GPU"),
        ({"gpu": None}, "gpu: is needed"),
        ({"layers": 0}, "layers: must be a whole number of at least 1"),
        ({"tp": 5}, r"tp 5: does not divide the 32 heads \(allowed: 1, 2, 4"),
        ({"micro_batch": -1}, "micro_batch: must be a whole number"),
        ({"micro_batch": 1.5}, "micro_batch: must be a whole number"),
        ({"gpus": 7, "tp": 2}, "gpus 7: is not a multiple"),
        ({"dp": 3}, r"dp 3: gpus 64"),
        ({"global_batch": 100}, "global_batch 100: is not a multiple of dp = 64"),
        ({"precision": "int4"}, "precision: must be one of bf16, fp16, fp8, fp4, fp32"),
        ({"sharding": True}, "sharding: must be a text"),
        ({"gated_mlp": 1}, "gated_mlp: must be true or false"),
        ({"model": "lama-3.1-8b"}, "close to it: .*llama-3.1-8b"),
        ({"params_b": -3}, "params_b: must be a number above 0"),
        ({"seq": float("nan")}, "seq: must be a whole number"),
        ({"ep": 4}, "ep 4: must divide the number of experts"),
        ({"interconnect": "NVL0"}, "interconnect: nvl0 is no NVLink domain"),
        ({"interconnect": "0 Gb/s"}, "interconnect: 0 GB/s a node is no rate"),
        ({"interconnect": "100 GB"}, "interconnect: can't read the rate '100 GB'"),
        ({"model": "gpt2", "params_b": 8.3}, "params_b 8.3: gpt2 has 0.124"),
        ({"model": "llama-2-7b-moe-8x", "params_b": 40}, "has experts, and its sizes aren't known"),
        ({"model": "Mixtral", "params_b": 60}, "has experts, and its sizes aren't known"),
        ({"model": "DeepSeek-V3-Lite", "params_b": 16}, "has experts, and its sizes aren't known"),
        ({"experts": 8, "dense_layers": 100}, "dense_layers must be at most the model's 32 layers"),
        ({"model": "mixtral-8x7b", "gpus": 4, "ep": 8}, "must divide tp x cp x dp = 4"),
        ({"model": "mixtral-8x7b", "gpus": 8, "ep": 8, "expert_tp": 2}, "ep x expert_tp = 16 must divide"),
        ({"model": None, "hidden": 1024, "hybrid_pattern": "ME*E"}, "experts .* is needed"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        predict({**LLAMA, **fields})


@pytest.mark.parametrize(("place", "gpu", "taken"), [("p5.48xlarge", "H100", 8), ("NVL72", "GB200", 72)])
def test_gpus_per_node_that_give_way_to_the_named_machine_are_told(place: str, gpu: str, taken: int) -> None:
    asked = {**LLAMA, "gpu": gpu, "interconnect": place, "recompute": "full"}
    answer = predict({**asked, "gpus_per_node": 4})
    assert answer.pop("notes") == [f"gpus_per_node: 4 gives way to interconnect {place!r}, which is of {taken}"]
    assert answer == predict(asked) == predict({**asked, "gpus_per_node": taken})
    assert "notes" not in predict({**asked, "interconnect": "400 Gb/s per GPU", "gpus_per_node": 4})


def test_a_field_that_nobody_knows_is_named() -> None:
    assert predict({**LLAMA, "micro_bach": 2})["ignored_fields"] == ["micro_bach"]


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"method": "lora", "framework": "litgpt", "adapter": "scale"}, []),
        ({"method": "lora", "framework": "DeepSpeed", "adapter": "scale"}, ["adapter"]),
        ({"method": "lora", "framework": "DeepSpeed", "adapter": "lora"}, []),
        ({"method": "full", "adapter": "prefix", "trains_vocabulary": True}, ["adapter", "trains_vocabulary"]),
        ({"method": "lora", "quantization": "gptq"}, ["quantization"]),
        ({"method": "qlora", "quantization": "gptq"}, []),
    ],
)
def test_a_field_that_nothing_reads_is_named(fields: dict[str, Any], ignored: list[str]) -> None:
    assert predict({**LLAMA, **fields}).get("ignored_fields", []) == ignored


@pytest.mark.parametrize(
    ("text", "gpu", "is_read"),
    [
        ("fast", "H100", False),
        ("Ethernet", "H100", False),
        ("trn1.32xlarge", "H100", False),
        ("NVLink", "L4", False),
        ("PCIe", "H100", False),
        ("PCIe", "L4", True),
        ("NVLink", "H100", True),
        ("InfiniBand", "H100", True),
        ("400 Gb/s per GPU", "H100", True),
        ("EFA", "H100", True),
        ("p5.48xlarge", "H100", True),
        ("NVL72", "GB200", True),
        ("EDR", "H100", True),
        ("", "H100", True),
    ],
)
def test_words_of_a_network_that_say_nothing_are_named(text: str, gpu: str, is_read: bool) -> None:
    asked = {**LLAMA, "gpu": gpu, "recompute": "full"}
    answer = predict({**asked, "interconnect": text})
    assert answer.get("ignored_fields", []) == ([] if is_read else ["interconnect"])
    if not is_read:
        assert answer["step_seconds"] == predict(asked)["step_seconds"], "the usual network is taken"


def test_lines_in_lines_out_and_bad_ones_are_answered_too() -> None:
    errors = Errors()
    lines = [json.dumps(LLAMA), "", "{", "[1]", json.dumps({**LLAMA, "gpu": "?"}), json.dumps(LLAMA)]
    answers = [json.loads(line) for line in predict_jsonl(lines, errors)]
    assert [set(answer) == {"error"} for answer in answers] == [False, True, True, True, False]
    assert errors.any
    assert answers[0] == answers[4]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"gpu": "H100", "model": "llama-3-8b", "seq": 1e300}', "seq: must be a whole number of at most 1000000000"),
        ('{"gpu": "H100", "params_b": 1e290}', "params_b: must be a number above 0, of at most 1000000"),
        ('{"gpu": "H100", "params_b": %s}' % ("9" * 5000), "can't be read or computed"),
        ('{"gpu": "H100", "params_b": %s}' % ("9" * 4000), "params_b: must be"),
        ("[" * 100_000, "can't be read or computed"),
        ('{"gpu": "H100", "model": "llama-3-8b", "mtp_layers": 1000000000}', "mtp_layers: must be a whole number"),
        (
            '{"gpu": "H100", "model": "llama-3-8b", "experts": 900000000, "experts_per_token": 800000000}',
            "experts_per_token: must be a whole number",
        ),
        (b'{"gpu": "H100", "model": "caf\xe9"}', "can't be read or computed: 'utf-8' codec can't decode"),
    ],
    ids=["float", "double", "unreadable", "whole", "nesting", "many", "more", "bytes"],
)  # fmt: skip
def test_one_odd_line_does_not_end_the_stream(line: str | bytes, words: str) -> None:
    errors = Errors()
    lines = [line if isinstance(line, bytes) else line.encode(), json.dumps(LLAMA).encode()]
    odd, good = (json.loads(text) for text in predict_jsonl(lines, errors))
    assert words in odd["error"] and len(odd["error"]) < 400
    assert errors.any and set(good) == OUTPUTS | {"assumed"}


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    for line in ("\ufeff" + json.dumps(LLAMA), b"\xef\xbb\xbf" + json.dumps(LLAMA).encode()):
        errors = Errors()
        assert [json.loads(text) for text in predict_jsonl([line], errors)] == [predict(LLAMA)]  # type: ignore[arg-type]
        assert not errors.any


def test_a_version_may_be_a_number() -> None:
    text = {**LLAMA, "framework": "NeMo", "framework_version": "24.10"}
    assert predict({**text, "framework_version": 24.1}) == predict(text)


def test_good_lines_leave_no_error() -> None:
    errors = Errors()
    assert len(list(predict_jsonl([json.dumps(LLAMA)], errors))) == 1
    assert not errors.any


def test_words_that_nobody_counts_are_padded_ones() -> None:
    gpt = {"layers": 12, "hidden": 1024, "ffn": 4096, "heads": 16, "gpu": "A100", "micro_batch": 8, "seq": 1024}
    unsaid, padded, counted = (predict(gpt | words) for words in ({}, {"vocab": 50304}, {"vocab": 50257}))
    assert unsaid == padded and counted["step_seconds"] > 1.1 * padded["step_seconds"]


def test_the_network_is_efa_where_the_words_say_so_and_infiniband_or_its_like_elsewhere() -> None:
    asked = {"model": "llama-2-7b", "gpu": "H100", "gpus": 64, "global_batch": 64, "framework": "FSDP1"}
    words = ("EFA 3200", "p5.48xlarge", "InfiniBand 400 Gb/s per GPU", "RoCE 400 Gb/s per GPU", None)
    networks = [understand(asked | {"interconnect": said}).links.network for said in words]
    assert networks == [EFA, EFA, INFINIBAND, INFINIBAND, INFINIBAND]
    assert understand(asked | {"interconnect": "the default, 400 Gb/s"}).links.network == INFINIBAND


@pytest.mark.parametrize(
    ("gpu", "precision", "words"),
    [
        ("V100", "bf16", "V100's tensor cores have fp16 alone"),
        ("T4", "bfloat16", "T4's tensor cores have fp16 alone"),
        ("A100", "fp8", "A100 has no units for it; this time is that of 16 bits"),
        ("H100", "fp4", "H100 has no units for it; this time is that of fp8"),
    ],
)
def test_a_stated_precision_that_a_part_has_no_units_for_is_said(gpu: str, precision: str, words: str) -> None:
    asked = {"model": "tinyllama-1.1b", "gpu": gpu, "seq": 1024, "micro_batch": 1, "recompute": "full"}
    notes = predict({**asked, "precision": precision})["notes"]
    assert any(words in note for note in notes), notes
    assert not any(words in note for note in predict(asked).get("notes", [])), "nobody has stated it"
    assert not any("precision" in note for note in predict({**asked, "precision": "fp16"}).get("notes", []))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "xyzzy"}, "unknown model 'xyzzy'; known are sizes of aya, .*llama, .*qwen"),
        ({"model": "meta-llama/Llama-3.1-9B-foo-moe"}, "close to it: llama-3.1-8b"),
        ({"gpu": "ml.p5.49xlarge"}, "unknown instance type 'ml.p5.49xlarge'; close to it: ml.p5.4"),
        ({"gpu": "foo.xlarge"}, "unknown instance type 'foo.xlarge'"),
        ({"gpu": "P5.49XLARGE"}, "unknown instance type '.*'; close to it: p5.4"),
        ({"gpu": "trn1.32xlarge"}, "has Trainium, and no GPU"),
    ],
)
def test_an_unknown_name_is_answered_in_a_line_that_can_be_read(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        predict({"model": "llama-3.1-8b", "gpu": "H100", **asked})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("gpu", "precision", "lacks"),
    [("V100", "fp16", True), ("H100", "fp32", True), ("A100", "bf16", False), ("MI300X", "fp32", False)],
)
def test_stated_kernels_that_there_are_none_of_are_said(gpu: str, precision: str, lacks: bool) -> None:
    asked = {"model": "tinyllama-1.1b", "gpu": gpu, "seq": 1024, "precision": precision, "recompute": "full"}
    told = [
        note for note in predict({**asked, "attention": "flash_attention_2"}).get("notes", []) if "attention" in note
    ]
    assert bool(told) == lacks
    assert not [note for note in predict(asked).get("notes", []) if "attention" in note], "nobody has stated them"
