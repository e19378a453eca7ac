"""What a rank of our own trainer holds: the worst of all ranks, and what optimizers, DeepSpeed and adapters keep."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest

from trainyard.planner import plan
from trainyard.planner.adapters import adapter_params
from trainyard.planner.deepspeed_buffers import update_bytes
from trainyard.planner.deepspeed_weights import whole_elements
from trainyard.planner.families import shape_of_known
from trainyard.planner.formulas import formulas_of
from trainyard.planner.layout import Layout, Precision, Schedule, ZeroSizes
from trainyard.planner.memory import _engine_buffers, lora_params, memory, rank_memory
from trainyard.planner.reading import layout_of
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage, stage_params, stages
from trainyard.planner.trainer_layers import TrainerLayers
from trainyard.spec.job import JobSpec, ParallelismSpec

Place = Literal["none", "cpu", "nvme"]

SHAPE = ModelShape(layers=36, hidden=2048, ffn=8192, heads=16, kv_heads=4, head_dim=128, vocab=128256)
"""As large at its ends as in six of its layers each."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("pipeline", [2, 4, 8, 16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_worst_rank_is_the_worst_of_all_along_the_pipeline(
    schedule: Schedule, pipeline: int, is_tied: bool
) -> None:
    """zero_bubble's first rank has both ends, a tied matrix twice; of 36 layers over eight ranks the second has one
    more than the first."""
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
        shape.params + is_tied * shape.vocab * shape.hidden
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
    layout = dataclasses.replace(
        DEEPSPEED, zero_stage=stage, precision=precision, offload=offload, zero_sizes=ZeroSizes(persistence=0)
    )
    use = memory(SHAPE, layout)
    kept = (use.parameters, use.gradients, use.optimizer)
    assert [part / SHAPE.params for part in kept] == pytest.approx([weights, gradients, optimizer])


@pytest.mark.parametrize(
    ("changes", "sizes", "expected"),
    [
        # 131 million elements of the embedding: two buckets of bf16, and one flattened and made fp32.
        ({"zero_stage": 2}, {}, 32000 * 4096 * (2 * 2 + 2 + 4)),
        ({"zero_stage": 2}, {"overlaps": False}, 32000 * 4096 * (2 + 2 + 4)),
        ({"zero_stage": 2}, {"bucket": 10**6}, 10**6 * (2 * 2 + 2 + 4)),
        # Sums as wide as the weights are added up beside what a micro-batch sends.
        ({"zero_stage": 2, "precision": "fp32"}, {"bucket": 10**6}, 10**6 * (2 * 4 + 4) + 4 * 6738415616 / 8),
        ({"zero_stage": 2, "precision": "fp32", "num_micro_batches": 1}, {"bucket": 10**6}, 10**6 * (2 * 4 + 4)),
        # Whole gradients are moved into the buckets, and a rank's part is copied from there.
        ({"zero_stage": 1}, {"bucket": 10**6}, 10**6 * (2 + 4) + 2 * 6738415616 / 8),
        ({"zero_stage": 1, "num_micro_batches": 1}, {"bucket": 10**6}, 10**6 * (2 * 2 + 2 + 4)),
        # Summed on all ranks, a bucket is flattened as long as it is, and no longer than a rank's part otherwise.
        ({"zero_stage": 2}, {"sums_on_all": True}, 32000 * 4096 * (2 * 2 + 2 + 4)),
        (
            {"zero_stage": 2, "shard_degree": 64},
            {"sums_on_all": False},
            32000 * 4096 * 2 * 2 + 6738415616 / 64 * (2 + 4),
        ),
        # A bucket in fp32, flattened; weights up to the limit, and the one in use.
        ({"zero_stage": 3}, {}, 32000 * 4096 * (4 + 4 + 2) + 2 * 10**9),
        # All but the norms, which are there all along.
        ({"zero_stage": 3}, {"live": 10**12}, 32000 * 4096 * (4 + 4) + 2 * (6738415616 - 65 * 4096)),
        ({"zero_stage": 3}, {"prefetch": 0}, 32000 * 4096 * (4 + 4 + 2) + 10**9),
        # The limit is of what is asked ahead: what comes again within 1e9 elements stays.
        ({"zero_stage": 3}, {"live": 10**6}, 32000 * 4096 * (4 + 4 + 2) + 10**9),
        ({"zero_stage": 3}, {"live": 10**6, "reuse": 2 * 10**7}, 32000 * 4096 * (4 + 4 + 2) + 2 * 10**7),
        ({"zero_stage": 3}, {"live": 10**6, "reuse": 0}, 32000 * 4096 * (4 + 4 + 2) + 2 * 10**6),
        ({"zero_stage": 3, "offload_parameters": "nvme"}, {}, 32000 * 4096 * (4 + 4 + 2)),
    ],
)
def test_deepspeeds_buffers_by_stage_and_stated_sizes(
    changes: dict[str, Any], sizes: dict[str, Any], expected: float
) -> None:
    """By hand, of a Llama 2 7B; `tests/trainer/test_deepspeed_memory.py` measures the same in real ranks."""
    shape = shape_of_known("llama-2-7b")
    assert shape.params == 6738415616
    layout = dataclasses.replace(DEEPSPEED, **changes, zero_sizes=ZeroSizes(**sizes))
    (stage,) = stages(shape, layout)
    assert _engine_buffers(shape, layout, stage, stage_params(shape, layout, stage)) == pytest.approx(expected)


def test_what_stage_1_makes_in_one_micro_batch_is_never_there_whole() -> None:
    shape = shape_of_known("llama-2-7b")

    def gradients(**changes: Any) -> float:
        return memory(shape, dataclasses.replace(DEEPSPEED, zero_stage=1, **changes)).gradients

    whole = 2 * shape.params
    assert gradients(num_micro_batches=1) == pytest.approx(whole / 8, rel=1e-6)
    assert gradients(num_micro_batches=2) == pytest.approx(whole, rel=1e-6)
    # Without overlap nothing leaves before all are there.
    assert gradients(num_micro_batches=1, zero_sizes=ZeroSizes(overlaps=False)) == pytest.approx(whole, rel=1e-6)
    assert gradients(num_micro_batches=1, library="") == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "most", "in_all", "elements"),
    [
        ("llama-2-7b", 0, None, 0),
        # Norms, which are vectors: two a layer, and the last one.
        ("llama-2-7b", 100_000, None, 65 * 4096),
        # Attention's four squares too.
        ("llama-2-7b", 4096**2, None, 65 * 4096 + 32 * 4 * 4096**2),
        ("llama-2-7b", 4096**2 - 1, None, 65 * 4096),
        ("llama-2-7b", 10**12, None, 6738415616),
        ("llama-2-7b", 10**12, 10**9, 10**9),
        # A bias beside each norm; queries, keys and values are one weight; 1,024 positions. Biases of products aside.
        ("gpt2-xl", 1600**2, None, 97 * 1600 + 97 * 1600 + 48 * 1600**2 + 1024 * 1600),
        # Router and norms; a layer's experts are two weights.
        ("mixtral-8x7b", 100_000, None, 65 * 4096 + 32 * 8 * 4096),
        ("mixtral-8x7b", 8 * 14336 * 4096, None, 46702792704 - 32 * 2 * 8 * 14336 * 4096),
        # Each product of the latents by itself, and experts: all there is.
        ("deepseek-v2-lite", 10**12, None, 15706484224 - 27 * 512),
    ],
)
def test_small_weights_stay_whole_under_stage_3(name: str, most: int, in_all: int | None, elements: int) -> None:
    shape, sizes = shape_of_known(name), ZeroSizes(persistence=most, persistent_in_all=in_all)
    layout = dataclasses.replace(DEEPSPEED, zero_stage=3, zero_sizes=sizes)
    split = dataclasses.replace(layout, zero_sizes=ZeroSizes(persistence=0))
    assert whole_elements(shape, layout) == elements
    assert memory(shape, layout).parameters - memory(shape, split).parameters == pytest.approx(2 * elements)
    # What stays whole isn't gathered as well.
    both = [memory(shape, one) for one in (layout, split)]
    assert both[0].parameters + both[0].buffers <= 2 * shape.params * (1 + 1 / 8) + both[1].buffers
    for other in ({"zero_stage": 2}, {"shard_degree": 1, "data_parallel": 1}, {"library": ""}):
        assert whole_elements(shape, dataclasses.replace(layout, **other)) == 0


def test_a_stated_sub_group_is_what_stage_3_updates_at_a_time() -> None:
    shape = shape_of_known("llama-2-7b")
    layout = dataclasses.replace(DEEPSPEED, zero_stage=3)
    sub_groups = [dataclasses.replace(layout, zero_sizes=ZeroSizes(sub_group=size)) for size in (10**8, None, 10**12)]
    own = shape.params / 8
    flat = [update_bytes(shape, one, shape.params, 4.0) - 4 * 32000 * 4096 for one in sub_groups]
    assert flat == pytest.approx([4 * 10**8, 4 * own, 4 * own])


def test_a_job_states_deepspeeds_sizes(job: Callable[..., JobSpec]) -> None:
    """They changed nothing of the plan: a job with small buckets was planned with DeepSpeed's defaults."""
    zero = {"reduce_bucket_elements": 10**6, "prefetch_elements": 0, "max_live_elements": 10**7, "overlap": False}
    names = {"stage3_max_reuse_distance": 10**8, "sub_group_size": 10**7, "model_persistence_threshold": 10**9}
    own = {"zero_optimization": names}
    layout = {"engine": "deepspeed", "data_replicate": 8, "zero_stage": 3, "deepspeed": own}
    stated, chosen = (
        plan(job(compute={"instance_count": 1}, parallelism=layout | {"zero": sizes})).chosen.memory
        for sizes in (zero, {})
    )
    assert stated.buffers_gib < chosen.buffers_gib
    asked = job(compute={"instance_count": 1}, parallelism=layout | {"zero": zero})
    assert isinstance(asked.parallelism, ParallelismSpec)
    read = layout_of(asked, asked.parallelism, micro_batch=1, num_micro_batches=1, recompute="none")
    rest = {"persistence": 100_000, "persistent_in_all": 10**9, "sub_group": 1e7}
    assert read.zero_sizes == ZeroSizes(bucket=10**6, prefetch=0, live=10**7, reuse=1e8, overlaps=False, **rest)


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
    assert use.state == 2 * (2 * 126 + 1) * 16384, "norms stay"
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


def test_the_chunked_loss_of_fp16_makes_its_gradients_in_fp32() -> None:
    """Its scale is not known before the backward pass; of more than one chunk the sum is in fp32 in bf16 too."""
    tokens, weight = 4096, SHAPE.vocab * SHAPE.hidden
    layout = Layout(
        library="trainyard", precision="bf16", sequence_length=tokens, tensor=1, zero_stage=3, shard_degree=8
    )
    bf16, fp16 = (
        TrainerLayers(SHAPE, dataclasses.replace(layout, loss_chunk_tokens=1024, precision=precision))
        for precision in ("bf16", "fp16")
    )
    assert fp16.loss_is_in_head
    assert fp16.loss_bytes - bf16.loss_bytes == 2 * weight + 2 * tokens * SHAPE.hidden
    assert fp16._head_gradient_bytes(is_one=True) - bf16._head_gradient_bytes(is_one=True) == 4 * weight


def test_a_mask_is_kept_beside_what_kernels_read_in_its_place_where_layers_are_given_it_once_more() -> None:
    layouts = (Layout(library="trainyard", masks="always", recompute=again) for again in ("none", "full"))
    none, full = (TrainerLayers(SHAPE, layout).mask_bytes for layout in layouts)
    scores = 2048 * 2048
    assert (none, full) == (2 * scores, 3 * scores)
