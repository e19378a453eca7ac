"""What a part keeps up of its peak, what a host takes to update weights, and what frameworks' words say of both."""

import dataclasses
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware import gpu, instance
from trainyard.planner import predict
from trainyard.planner.communication import EFA, HOST_MEMORY_GB_PER_SECOND, fabric, fabric_of
from trainyard.planner.families import shape_of_known
from trainyard.planner.layout import Engine, Layout, Library, Masters
from trainyard.planner.memory import state_bytes
from trainyard.planner.operators import Operators
from trainyard.planner.predict import understand
from trainyard.planner.time_constants import DEFAULT_CONSTANTS
from trainyard.planner.timing import SPREAD_DENSE, SPREAD_UNMEASURED, step_time, time_spread
from trainyard.planner.unfused import Unfused

TUNED: dict[str, Any] = {
    **{"model": "qwen2.5-7b", "gpu": "H100", "gpus": 8, "seq": 8192, "micro_batch": 1, "global_batch": 8},
    **{"sharding": "zero3", "recompute": "full", "framework": "transformers", "framework_version": "2025-05"},
}


@pytest.mark.parametrize("usual", ["V100", "A100", "H100", "B200"])
def test_the_part_that_constants_were_fitted_to_is_as_fast_as_fitted(usual: str) -> None:
    assert gpu(usual).sustained == 1


@pytest.mark.parametrize(
    ("name", "tflops"), [("L4", 70.9), ("H20", 142.0), ("A10G", 69.5), ("MI300X", 668.4), ("H100 PCIe", 495.9)]
)
def test_a_parts_products_are_as_much_faster_as_they_were_measured(name: str, tflops: float) -> None:
    """Of the measured ceiling of a product a run reaches the same share on every part of a generation."""
    part, layout = gpu(name), Layout(engine="torch")
    usual = {"L4": "A100", "A10G": "A100", "MI300X": "B200"}.get(name, "H100")
    reached = Operators(layout, part, DEFAULT_CONSTANTS).wide / tflops
    measured = gpu(usual).achievable_bf16_tflops
    assert measured is not None
    expected = Operators(layout, gpu(usual), DEFAULT_CONSTANTS).wide / measured
    assert reached == pytest.approx(expected, rel=1e-6)


def test_nobody_measured_is_no_slower_than_its_generation() -> None:
    part = dataclasses.replace(gpu("L4"), achievable_bf16_tflops=None)
    assert part.sustained == 1 > gpu("L4").sustained


def test_fp32_has_no_tensor_cores_to_throttle() -> None:
    layout = Layout(engine="torch", precision="fp32")
    part = gpu("L4")
    assert Operators(layout, part, DEFAULT_CONSTANTS).wide == pytest.approx(DEFAULT_CONSTANTS.ceiling_ampere * 30.3e12)


def _update_seconds(layout: Layout, machine: str) -> float:
    found = instance(machine)
    assert found.gpu is not None
    return step_time(shape_of_known("llama-2-7b"), layout, found.gpu, fabric_of(found)).optimizer


def test_ranks_share_the_memory_of_the_host_that_updates_their_weights() -> None:
    """7B on 8 GPUs: 28 bytes a parameter of the whole model pass through one host's memory, however many ranks."""
    away = Layout(engine="deepspeed", zero_stage=3, shard_degree=8, data_parallel=8, offload="cpu", library="trainyard")
    params = shape_of_known("llama-2-7b").params
    least = params * 28 / HOST_MEMORY_GB_PER_SECOND / 1e9
    assert least < _update_seconds(away, "p4d.24xlarge") < 1.5 * least
    there = dataclasses.replace(away, offload="none")
    assert _update_seconds(there, "p4d.24xlarge") < 0.05 * least


def test_a_small_host_has_fewer_cores_to_update_with() -> None:
    assert fabric_of(instance("p5.48xlarge")).host_memory_gb_per_second == HOST_MEMORY_GB_PER_SECOND
    assert fabric_of(instance("g5.xlarge")).host_memory_gb_per_second == 30  # two cores
    assert fabric(gpu("A10G"), 1, 10, EFA).host_memory_gb_per_second == HOST_MEMORY_GB_PER_SECOND


@pytest.mark.parametrize(
    ("stage", "library", "trips"),
    [
        (3, "trainyard", 2),
        (2, "", 2),
        (2, "trainyard", 0),  # summed in fp32 on the GPU
        (1, "trainyard", 0),  # sent once, at the end
        (1, "", 0),
    ],
)
def test_sums_on_the_host_come_and_go_with_each_micro_batch(stage: int, library: Library, trips: int) -> None:
    away = Layout(engine="deepspeed", zero_stage=stage, shard_degree=8, data_parallel=8, offload="cpu", library=library)
    once, often = (
        _update_seconds(dataclasses.replace(away, num_micro_batches=count), "p4d.24xlarge") for count in (1, 8)
    )
    share = shape_of_known("llama-2-7b").params / 8
    assert often - once == pytest.approx(7 * trips * share * state_bytes(away).gradient / 24e9, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    ("engine", "masters", "updated", "sent"),
    [
        # A gradient is read; moments, and the copy or else the weight itself, are read and written.
        ("torch", "usual", 4 + 2 * (8 + 4), 4),
        ("torch", "none", 2 + 2 * (4 + 2), 2),
        ("torch", "copy", 2 + 2 * (8 + 4), 2),
        ("plain", "usual", 2 + 2 * (4 + 2), 2),
        ("plain", "weights", 4 + 2 * (8 + 4), 4),
    ],
)
def test_fsdps_weights_are_masters_and_stay_where_they_are(
    engine: Engine, masters: Masters, updated: int, sent: int
) -> None:
    """Bytes of the update a parameter, of which the whole model passes through the host, and of its traffic the
    gradient alone."""
    away = Layout(
        engine=engine,
        masters=masters,
        zero_stage=3,
        shard_degree=8,
        data_parallel=8,
        offload="cpu",
        offload_parameters="cpu",
    )
    params = shape_of_known("llama-2-7b").params
    expected = params * updated / HOST_MEMORY_GB_PER_SECOND / 1e9 + params / 8 * sent / 24e9
    assert _update_seconds(away, "p4d.24xlarge") == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("words", "chunk", "unfused"),
    [
        ("transformers (ms-swift, Liger kernels)", 256, False),
        ("transformers, Liger disabled", None, True),
        ("transformers, non-Liger", None, True),
        ("transformers, uncompiled, without fused Liger kernels", None, True),
        ("transformers, no torch compile", None, True),
        ("transformers (trl, no Liger kernels)", None, True),
        ("transformers without liger", None, True),
        ("transformers", None, True),
        ("transformers, torch.compile", None, False),
        # A loop of one's own, whose layers are nobody's kernels, is taken to be compiled unless it says otherwise.
        ("PyTorch FSDP2", None, False),
        ("PyTorch FSDP2, not compiled", None, True),
        ("PyTorch (uncompiled)", None, True),
        ("torchtitan, torch.compile disabled", None, True),
        ("PyTorch FSDP2 (torch.compile: off)", None, True),
        ("PyTorch FSDP2, compile=False", None, True),
        ("PyTorch FSDP2, compile: no", None, True),
        ("PyTorch FSDP2 (torch.compile is disabled)", None, True),
        ("PyTorch FSDP2, isn't compiled", None, True),
        ("PyTorch FSDP2, not yet compiled", None, True),
        ("PyTorch FSDP2 without compilation", None, True),
        ("PyTorch FSDP2, torch.compile, no Liger", None, False),
        ("PyTorch FSDP2 (no flash, compiled)", None, False),
        ("transformers, torch.compile=False", None, True),
        ("Megatron-Core, not compiled", None, False),
        ("litgpt, uncompiled", None, False),
    ],
)
def test_ligers_loss_makes_logits_of_a_part_at_a_time(words: str, chunk: int | None, unfused: bool) -> None:
    """152,064 words are 42.4 widths of 3,584: 8,192 tokens in parts of 191, rounded up to a power of two."""
    layout = understand({**TUNED, "framework": words}).layout
    assert layout.loss_chunk_tokens == chunk and layout.unfused is unfused


def test_a_loop_of_ones_own_that_nothing_compiles_is_as_uncertain_as_transformers() -> None:
    asked = {**TUNED, "method": "full", "gpus": 8, "framework": "PyTorch FSDP2"}
    spreads = []
    for words in ("", ", not compiled"):
        question = understand({**asked, "framework": asked["framework"] + words})
        spreads.append(time_spread(question.shape, question.layout, question.device))
    assert spreads == [SPREAD_DENSE, SPREAD_UNMEASURED]


@pytest.mark.parametrize("framework", ["PyTorch, not compiled", "transformers"])
def test_layers_of_single_operations_cast_under_autocast_alone(framework: str) -> None:
    """Of a norm that each of three products reads, forward and backward, 21 and 52 bytes an element more."""
    asked = {**TUNED, "method": "full", "gpus": 1, "global_batch": 1, "sharding": "none", "framework": framework}
    moved = []
    for autocast in (False, True):
        question = understand({**asked, "autocast": autocast})
        moved.append(Unfused(question.shape, question.layout).attention_half())
    hidden = question.layout.tokens_per_micro_batch * question.shape.hidden
    assert [wide - narrow for narrow, wide in zip(*moved, strict=True)] == pytest.approx([21 * hidden, 52 * hidden])


def test_a_stated_chunk_is_kept() -> None:
    assert (
        understand({**TUNED, "framework": "transformers, Liger", "loss_chunk_tokens": 4096}).layout.loss_chunk_tokens
        == 4096
    )


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({"offload": "cpu"}, "cpu"),  # FSDP's
        ({"offload": "cpu", "framework": "DeepSpeed (transformers)"}, "none"),
        ({"offload": "cpu", "framework": "DeepSpeed (transformers)", "offload_parameters": "cpu"}, "cpu"),
        ({"offload": "cpu", "offload_parameters": "none"}, "none"),
        ({"offload": "cpu", "gpus": 1, "global_batch": 1}, "none"),
        ({"offload": "cpu", "sharding": "zero2", "framework": "DeepSpeed"}, "none"),
        ({}, "none"),
    ],
)
def test_fsdp_offloads_weights_and_deepspeed_where_it_is_told(changes: dict[str, Any], weights: str) -> None:
    assert understand(TUNED | changes).layout.offload_parameters == weights
    assert "ignored_fields" not in predict(TUNED | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offload": "cpu", "offload_parameters": "cpu", "sharding": "zero2"}, "set sharding to zero3"),
        ({"offload_parameters": "cpu"}, "needs offload; set it to cpu or nvme"),
        ({"offload": "cpu", "offload_parameters": "disk"}, "offload_parameters"),
    ],
)
def test_weights_that_cannot_leave_the_gpu_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        understand(TUNED | changes)


def test_systems_that_no_fitted_source_measured_have_a_wider_interval() -> None:
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    layout = Layout(engine="torch", zero_stage=3, shard_degree=8, data_parallel=8, sequence_length=4096)
    assert time_spread(shape, layout, device) == SPREAD_DENSE
    for changes in ({"library": "trainyard"}, {"engine": "deepspeed"}, {"engine": "plain", "library": "transformers"}):
        assert time_spread(shape, dataclasses.replace(layout, **changes), device) == SPREAD_UNMEASURED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("framework", "stage"),
    [("NeMo", 1), ("Megatron-Core (Megatron-Bridge)", 1), ("Megatron-LM", 0), ("NeMo Automodel", 3)],
)
def test_recipes_have_the_distributed_optimizer_where_nobody_says_otherwise(framework: str, stage: int) -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "H100", "gpus": 8, "framework": framework, "framework_version": "2026-02"}
    asked |= {"pp": 2} if stage < 3 else {}
    assert understand(asked).layout.zero_stage == stage
    assert understand(asked | {"sharding": "none"}).layout.zero_stage == 0
    assert understand(asked | {"method": "lora"}).layout.zero_stage in (0, 3)
