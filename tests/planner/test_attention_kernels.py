"""Which kernels fused attention runs on, and how fast these are on each part: held to measurements of kernels alone."""

import json
from typing import Any

import pytest
import yaml

from trainyard.hardware import gpu
from trainyard.planner.communication import EFA, Fabric
from trainyard.planner.layout import AttentionKernel, Layout, Precision
from trainyard.planner.operators import Operators
from trainyard.planner.plan import plan
from trainyard.planner.predict import predict
from trainyard.planner.reading import layout_of, layout_of_resolved, shape_of
from trainyard.planner.resolve import resolve
from trainyard.planner.time_constants import DEFAULT_CONSTANTS
from trainyard.planner.timing import step_time
from trainyard.spec.job import JobSpec, ParallelismSpec

LINKS = Fabric(8, 450.0, 50.0, EFA)

ASKED: dict[str, Any] = {
    **{"model": "qwen3-4b", "gpus": 8, "seq": 65536, "micro_batch": 1, "global_batch": 16, "sharding": "zero3"},
    **{"recompute": "full", "framework": "PyTorch FSDP2, torch.compile", "framework_version": "2026-01"},
}


def tflops(name: str, kernel: AttentionKernel, length: int = 16384) -> float:
    """What fused causal attention reaches there with heads of 128, of the scores that a causal mask leaves."""
    layout = Layout(engine="torch", sequence_length=length, attention_kernel=kernel)
    return 0.5e12 / Operators(layout, gpu(name), DEFAULT_CONSTANTS).fused_attention(1e12, 128) / 1e12


@pytest.mark.parametrize(("slower", "faster", "measured"), [("A100", "H100", 328 / 189), ("A100", "B200", 346 / 176)])
def test_ampere_instructions_are_as_much_faster_on_later_parts_as_measured(
    slower: str, faster: str, measured: float
) -> None:
    """Of the same kernels, FlashAttention-2's, whose speed alone its authors and others have measured."""
    assert tflops(faster, "ampere") / tflops(slower, "ampere") == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("name", "measured"), [("H20", 84 / 148), ("RTX PRO 6000", 343 / 503)])
def test_a_part_with_no_more_than_ampere_instructions_has_all_of_its_peak_for_them(name: str, measured: float) -> None:
    """An A100 reaches 0.6 of its peak with them alone (187 of 312 TFLOP/s at 2,048 tokens, no mask)."""
    alone = tflops(name, "ampere") / gpu(name).peak_tflops("bf16")
    usual = tflops("A100", "ampere") / gpu("A100").peak_tflops("bf16")
    assert alone / usual == pytest.approx(measured / 0.6, rel=0.25)


@pytest.mark.parametrize("name", ["H100", "H200", "B200"])
def test_own_instructions_are_faster_where_a_part_has_them(name: str) -> None:
    """cuDNN's over FlashAttention-2's on H100: 1.7 to 2.3 times (transformers#48163)."""
    assert 1.4 < tflops(name, "own") / tflops(name, "ampere") < 4


@pytest.mark.parametrize("name", ["A100", "L4", "L40S", "RTX PRO 6000"])
def test_others_have_no_other(name: str) -> None:
    assert tflops(name, "own") == tflops(name, "ampere")


def alone(name: str, precision: Precision, head_dim: int) -> float:
    """TFLOP/s without a mask, the forward pass."""
    layout = Layout(engine="torch", sequence_length=1024, precision=precision)
    operators = Operators(layout, gpu(name), DEFAULT_CONSTANTS)
    return 1 / operators.fused_attention(1e12, head_dim, is_causal=False)


@pytest.mark.parametrize(
    ("name", "precision", "head_dim", "measured"),
    [
        ("V100", "fp16", 128, 4 * 256 * 1024**2 * 128 / 3856.6e-6),
        ("V100", "fp16", 64, 4 * 256 * 1024**2 * 64 / 2159.1e-6),
        ("V100", "fp32", 128, 4 * 256 * 1024**2 * 128 / 12321.3e-6),
        ("V100", "fp32", 64, 4 * 256 * 1024**2 * 64 / 6334.1e-6),
        ("A100", "fp32", 64, 4 * 1024 * 512**2 * 64 / 2776.7e-6),
        ("A100", "fp32", 128, 2.5 * 4 * 64 * 16 * 1024**2 * 128 / 47294.1e-6),
    ],
)
def test_without_flash_kernels_attention_has_the_memory_efficient_ones(
    name: str, precision: Precision, head_dim: int, measured: float
) -> None:
    """xformers' own measurements of the kernels that torch has (xformers#439, #387, and #587 for the backward pass)."""
    assert alone(name, precision, head_dim) == pytest.approx(measured / 1e12, rel=0.25)


@pytest.mark.parametrize("name", ["V100", "T4", "A100", "A10G", "L4", "L40S", "H100", "B200"])
def test_attention_in_fp32_is_never_as_fast_as_in_16_bits(name: str) -> None:
    assert alone(name, "fp32", 128) < 0.55 * alone(name, "fp16", 128)


def test_jobs_in_fp32_have_no_kernels_of_hoppers_own() -> None:
    """Neither cuDNN's nor FlashAttention's take it."""
    wide = job(LLAMA)
    wide = wide.model_copy(update={"training": wide.training.model_copy(update={"precision": "fp32"})})
    layout = layout_in(wide)
    operators = Operators(layout, gpu("H100"), DEFAULT_CONSTANTS)
    masked = operators.fused_attention(1e12, 128, is_causal=False, efficient=True)
    assert operators.fused_attention(1e12, 128, is_causal=False) == masked


def test_who_says_flash_attention_2_gets_it_on_every_part() -> None:
    said: dict[str, dict[str, float]] = {}
    for name in ("A100", "H100", "B200"):
        for attention in ("flash", "flash_attention_2"):
            answer = predict({**ASKED, "gpu": name, "attention": attention})
            said.setdefault(name, {})[attention] = answer["step_seconds"]
    assert said["B200"]["flash_attention_2"] > 1.5 * said["B200"]["flash"]
    assert said["H100"]["flash_attention_2"] == said["H100"]["flash"], "torch's until 2026"
    assert said["A100"]["flash_attention_2"] == said["A100"]["flash"]
    megatron = {**ASKED, "gpu": "H100", "framework": "Megatron-LM", "sharding": "zero1", "tp": 8}
    named = predict({**megatron, "attention": "flash_attention_2"})
    assert named["step_seconds"] > 1.2 * predict(megatron)["step_seconds"], "Transformer Engine has cuDNN's"


def job(model: dict[str, Any], *, documents: bool = False, attention: str = "auto") -> JobSpec:
    """Of one p5, with sequences long enough for attention to count."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 32768}
    text = f"""
name: kernels
model: {{config: {json.dumps(sizes | model)}, attention: {attention}}}
data:
  train: [{{path: train.jsonl, format: jsonl}}]
  tokenizer: tokenizer
  sequence_length: 32768
  document_masks: {documents}
training: {{steps: 10, learning_rate: 1e-4, global_batch_size: 8, micro_batch_size: 1, activation_checkpointing: none}}
compute: {{instance_type: p5.48xlarge, instance_count: 1}}
parallelism: {{engine: torch, data_shard: 8}}
"""
    return JobSpec.model_validate(yaml.safe_load(text))


def seconds(asked: JobSpec) -> float:
    shape = shape_of(asked)
    assert shape is not None
    return step_time(shape, layout_of_resolved(asked, resolve(asked, world_size=8)), gpu("H100"), LINKS).total


LLAMA = {"model_type": "llama"}


def test_our_own_jobs_have_cudnn_kernels_without_masks_and_ampere_ones_for_documents() -> None:
    """As trainer/models/attention.py chooses: torch takes cuDNN's first on Hopper, and packed documents are told by
    offsets, to FlashAttention-2's."""
    alone, packed = seconds(job(LLAMA)), seconds(job(LLAMA, documents=True))
    assert packed > 1.2 * alone
    assert seconds(job(LLAMA, attention="flash_attention_3")) == alone
    masked = seconds(job(LLAMA, documents=True, attention="sdpa"))
    assert masked > 1.5 * packed, "a mask hides scores that are computed all the same"


def test_a_window_saves_nothing_where_it_is_a_mask() -> None:
    windowed = {"model_type": "mistral", "sliding_window": 4096}
    whole = seconds(job(windowed | {"sliding_window": None}))
    assert seconds(job(windowed)) > 1.5 * whole
    by_offsets = seconds(job(windowed, documents=True))
    assert by_offsets < whole, "torch's kernel for documents has windows of its own"
    assert seconds(job(windowed, attention="flash_attention_3")) < whole


def layout_in(asked: JobSpec, **parallelism: int) -> Layout:
    kinds = ParallelismSpec(**(parallelism or {"data_shard": 8}))
    return layout_of(asked, kinds, micro_batch=1, num_micro_batches=1, recompute="none")


def test_cut_sequences_have_windows_alone_as_a_mask_and_wide_numbers_all_documents() -> None:
    """As ContextAttention has documents one after the other, and torch's kernel for them 16 bits alone."""
    shape = shape_of(job({"model_type": "gpt2", "n_positions": 32768}, documents=True))
    assert shape is not None and shape.attention_dropout
    for attention in ("auto", "sdpa"):
        packed = job(LLAMA, documents=True, attention=attention)
        assert layout_in(packed, context=2, data_shard=4).masks == "windows"
        assert layout_in(packed).masks == ("documents" if attention == "auto" else "always")
    wide = job(LLAMA, documents=True)
    fp32 = wide.model_copy(update={"training": wide.training.model_copy(update={"precision": "fp32"})})
    assert layout_in(fp32).masks == "always"


def test_documents_of_a_model_that_drops_scores_take_a_mask() -> None:
    gpt2 = {"model_type": "gpt2", "n_positions": 32768}
    assert seconds(job(gpt2, documents=True)) > 1.5 * seconds(job(gpt2 | {"attn_pdrop": 0.0}, documents=True))


def notes(asked: JobSpec) -> list[str]:
    return [note for note in plan(asked).notes if "flash_attention_3" in note]


def test_no_gain_is_promised_of_kernels_that_take_no_such_heads() -> None:
    gemma4 = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}
    assert notes(job(gemma4, documents=True)) == []
    assert notes(job(gemma4 | {"global_head_dim": 256}, documents=True))


def test_a_plan_says_what_hoppers_own_kernels_would_gain_where_a_job_may_have_them() -> None:
    """Documents are told by offsets, to Ampere's kernels; FlashAttention-3 keeps them apart in one sequence alone."""
    (note,) = notes(job(LLAMA, documents=True))
    assert note.startswith("model.attention: flash_attention_3 is estimated") and "% faster" in note
    said = int(note.split("estimated ")[1].split("%")[0]) / 100
    before, after = seconds(job(LLAMA, documents=True)), seconds(job(LLAMA, attention="flash_attention_3"))
    assert said == pytest.approx(1 - after / before, abs=0.01)
    assert notes(job(LLAMA)) == [], "cuDNN's are there"
    two = job(LLAMA, documents=True)
    wider = two.training.model_copy(update={"micro_batch_size": 2, "global_batch_size": 16})
    assert notes(two.model_copy(update={"training": wider})) == [], "two sequences a micro-batch are refused"
    dropping = {"model_type": "gpt2", "n_positions": 32768}
    assert notes(job(dropping, documents=True)) == [], "its kernels have no dropout"
    assert notes(job({"model_type": "gemma2"}, documents=True)) == [], "its attention is written out"


def test_torchs_own_attention_is_cudnns_on_hopper_from_its_release_of_march_2026_on() -> None:
    def step(version: str, name: str = "H100", attention: str = "flash") -> float:
        asked = {**ASKED, "gpu": name, "framework_version": version, "attention": attention}
        return float(predict(asked)["step_seconds"])

    assert step("2026-02") > 1.3 * step("2026-04")
    assert step("torch 2.11") == step("2026-04") and step("torch 2.10") == step("2026-02")
    assert step("2026-04", attention="flash_attention_2") > 1.3 * step("2026-04")
    assert step("2026-02", "A100") == pytest.approx(step("2026-04", "A100"), rel=1e-6)
