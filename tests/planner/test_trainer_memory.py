"""What a rank of our own trainer holds: the worst of all ranks, and what optimizers, DeepSpeed and adapters keep."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import pytest

from trainyard.planner.adapters import adapter_params
from trainyard.planner.families import shape_of_known
from trainyard.planner.formulas import formulas_of
from trainyard.planner.layout import Layout, Precision, Schedule
from trainyard.planner.memory import lora_params, memory, rank_memory
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage
from trainyard.spec.job import JobSpec

Place = Literal["none", "cpu", "nvme"]

SHAPE = ModelShape(layers=36, hidden=2048, ffn=8192, heads=16, kv_heads=4, head_dim=128, vocab=128256)
"""As large at its ends as in six of its layers each."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("pipeline", [2, 4, 8, 16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_worst_rank_is_the_worst_of_all_along_the_pipeline(
    schedule: Schedule, pipeline: int, is_tied: bool
) -> None:
    """zero_bubble's first rank has both ends; of 36 layers over eight ranks the second has one more than the first."""
    shape = dataclasses.replace(SHAPE, tied_embeddings=is_tied)
    layout = Layout(
        library="trainyard",
        pipeline=pipeline,
        chunks=2 if schedule == "interleaved_1f1b" else 1,
        schedule=schedule,
        num_micro_batches=32,
        data_parallel=2,
        zero_stage=3,
        shard_degree=2,
    )
    every = [rank_memory(shape, layout, place) for place in range(pipeline)]
    worst = memory(shape, layout)
    assert worst.allocated == max(rank.allocated for rank in every)
    assert worst in every
    assert sum(rank.parameters for rank in every) / 4 * 2 == pytest.approx(
        shape.params + (is_tied and schedule != "zero_bubble") * shape.vocab * shape.hidden
    )


DEEPSPEED = Layout(
    library="trainyard",
    engine="deepspeed",
    data_parallel=8,
    shard_degree=8,
    num_micro_batches=2,
    loss_chunk_tokens=2048,
)


@pytest.mark.parametrize(
    ("stage", "precision", "offload", "weights", "gradients", "optimizer"),
    [
        # Autocast, as under DDP.
        (0, "bf16", "none", 4, 4, 8),
        (1, "bf16", "none", 2, 2, 12 / 8),
        (2, "bf16", "none", 2, 4 / 8, 12 / 8),
        (3, "bf16", "none", 2 / 8, 4 / 8, 12 / 8),
        (3, "fp16", "none", 2 / 8, 2 / 8, 12 / 8),
        (0, "fp32", "none", 4, 4, 8),
        # The weights that are updated are a copy, though of the same type.
        (2, "fp32", "none", 4, 4 / 8, 12 / 8),
        # Sums of a wider type than the weights' stay on the GPU under stage 2.
        (1, "bf16", "cpu", 2, 2, 0),
        (2, "bf16", "cpu", 2, 4 / 8, 0),
        (2, "fp16", "cpu", 2, 0, 0),
        (3, "bf16", "cpu", 2 / 8, 0, 0),
        (3, "bf16", "nvme", 2 / 8, 0, 0),
    ],
)
def test_deepspeeds_state_by_stage(
    stage: int, precision: Precision, offload: Place, weights: float, gradients: float, optimizer: float
) -> None:
    """Bytes a parameter, which `tests/trainer/test_deepspeed_memory.py` holds against DeepSpeed's own tensors."""
    layout = dataclasses.replace(DEEPSPEED, zero_stage=stage, precision=precision, offload=offload)
    use = memory(SHAPE, layout)
    kept = (use.parameters, use.gradients, use.optimizer)
    assert [part / SHAPE.params for part in kept] == pytest.approx([weights, gradients, optimizer])


def test_deepspeeds_stage_0_in_bf16_is_what_ddp_is() -> None:
    ddp = memory(SHAPE, dataclasses.replace(DEEPSPEED, engine="torch"))
    assert memory(SHAPE, DEEPSPEED) == ddp
    assert memory(SHAPE, dataclasses.replace(DEEPSPEED, zero_stage=1)).activations < ddp.activations


def test_a_405b_with_all_on_disk_fits_the_gpus_that_hold_its_activations() -> None:
    """94.5 GiB of its gradients were counted on each GPU."""
    shape = shape_of_known("llama-3.1-405b")
    away = dataclasses.replace(
        DEEPSPEED, zero_stage=3, offload="nvme", offload_parameters="nvme", recompute="full", num_micro_batches=1
    )
    use = memory(shape, away)
    assert use.state == 0
    assert use.needed < 79 * 2**30


@pytest.mark.parametrize(
    ("name", "targets", "each"),
    [
        # Phi-4: 40 heads and 10 of keys, each of 128; a block of 17,920.
        ("phi-4", ("qkv_proj",), 5120 + (40 + 2 * 10) * 128),
        ("phi-4", ("gate_up_proj",), 5120 + 2 * 17920),
        # DeepSeek-V3: 128 heads of 128 and 64 with the position, latents of 1,536 and 512.
        ("deepseek-v3", ("q_a_proj",), 7168 + 1536),
        ("deepseek-v3", ("q_b_proj",), 1536 + 128 * (128 + 64)),
        # Each model has one kind of queries: V2-Lite's come through no latent.
        ("deepseek-v3", ("q_proj",), 0),
        ("deepseek-v2-lite", ("q_proj",), 2048 + 16 * (128 + 64)),
        ("deepseek-v2-lite", ("q_a_proj", "q_b_proj"), 0),
        ("deepseek-v3", ("kv_a_proj_with_mqa",), 7168 + 512 + 64),
        ("deepseek-v3", ("kv_b_proj",), 512 + 128 * (128 + 128)),
        ("gpt2-xl", ("c_proj",), 1600 + 1600 + 6400 + 1600),
        ("llama-3.1-8b", ("q_proj", "k_proj"), 4096 + 4096 + 4096 + 1024),
    ],
)
def test_an_adapter_has_the_sizes_of_what_it_is_beside(name: str, targets: tuple[str, ...], each: int) -> None:
    shape = shape_of_known(name)
    layout = Layout(method="lora", lora_rank=16, lora_targets=targets)
    assert adapter_params(shape, layout, shape.layers, has_head=True) == 16 * shape.layers * each


def test_a_heads_adapter_is_there_once() -> None:
    layout = Layout(method="lora", lora_rank=16, lora_targets=("lm_head",))
    shape = shape_of_known("llama-3.1-8b")
    assert adapter_params(shape, layout, 32, has_head=True) == 16 * (4096 + 128256)
    assert adapter_params(shape, layout, 32, has_head=False) == 0


def test_a_checkpoint_holds_the_adapters_that_memory_has(job: Callable[..., JobSpec]) -> None:
    """117.4 million of 167.8 were counted: each as if of a square matrix."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapter = {"kind": "lora", "rank": 64, "alpha": 32, "targets": list(targets)}
    layout = Layout(library="trainyard", method="lora", lora_rank=64, lora_targets=targets)
    kept = lora_params(shape_of_known("llama-3.1-8b"), layout, Stage(32, True, True, 1))
    assert formulas_of(job(model={"adapter": adapter})).saved.params == kept == 167_772_160
