"""What a step's time is made of: each formula where its answer is known."""

import dataclasses
import itertools
import math
import statistics
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.hardware import gpu
from trainyard.planner import predict
from trainyard.planner.communication import EFA, Fabric, all_gather_seconds, all_reduce_seconds, group
from trainyard.planner.exchanges import _distinct, _sharded, expert_group, replica_seconds, waited_share
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.layout import Engine, Layout, Library, Precision, Recompute, ZeroSizes
from trainyard.planner.operators import matmul_ceiling_tflops
from trainyard.planner.predict import understand
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import StageParams, stage_params, stages
from trainyard.planner.step import OnceAStep, Pass, bubble_passes, combined
from trainyard.planner.time_constants import DEFAULT_CONSTANTS
from trainyard.planner.timing import _Rank, step_time

LINKS = Fabric(8, 450, 400, EFA)
DENSE = Layout(engine="megatron", micro_batch=2, num_micro_batches=16, sequence_length=4096, precision="bf16")


def total(layout: Layout, model: str = "llama-2-7b", device: str = "H100") -> float:
    return step_time(shape_of_known(model), layout, gpu(device), LINKS).total


def test_bubbles_of_the_schedules() -> None:
    pipeline = dataclasses.replace(DENSE, pipeline=8)
    assert bubble_passes(DENSE) == 0
    assert bubble_passes(pipeline) == 7
    assert bubble_passes(dataclasses.replace(pipeline, chunks=4)) == 7 / 4
    assert bubble_passes(dataclasses.replace(pipeline, schedule="zero_bubble")) == pytest.approx(7 / 3)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_fills_through_its_other_stages_and_goes_on_at_the_slowest_ones_pace(chunks: int) -> None:
    """A micro-batch passes every stage once, the others wait at the slowest one."""
    layout = dataclasses.replace(DENSE, pipeline=4, chunks=chunks, num_micro_batches=16)
    quick, slow = (
        Pass(forward=each, backward=2 * each, recompute=0.0, tensor=0.0, expert=0.0, context=0.0, sharding=0.0)
        for each in (1.0, 1.5)
    )
    nothing = OnceAStep(gradients=0.0, waited=0.0, parameters=0.0, pipeline=0.0, optimizer=0.0)
    time = combined([(quick, 3), (slow, 1)], nothing, layout, LINKS, DEFAULT_CONSTANTS)
    assert (time.forward, time.backward) == (16 * 1.5, 16 * 3.0)
    assert time.bubble == pytest.approx(3 * 3.0 / chunks)
    two_slow = combined([(quick, 2), (slow, 2)], nothing, layout, LINKS, DEFAULT_CONSTANTS)
    assert two_slow.bubble == pytest.approx((2 * 3.0 + 4.5) / chunks)


def test_full_recomputation_adds_a_forward_pass_of_the_layers() -> None:
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    time = step_time(shape, dataclasses.replace(DENSE, recompute="full"), device, LINKS)
    assert 0.9 * time.forward < time.recompute < time.forward


@pytest.mark.parametrize(
    ("changes", "shape_changes", "stops"),
    [
        ({}, {}, True),
        ({"year": 2022.0}, {}, False),
        ({"engine": "megatron"}, {}, False),
        ({"engine": "deepspeed"}, {}, False),
        # Our own trainer's are torch's checkpoints under each engine.
        ({"engine": "deepspeed", "library": "trainyard"}, {}, True),
        # Gemma 2 and 3: a norm follows, and reads it.
        ({}, {"norms_per_layer": 4}, False),
        ({"dropout": True}, {}, False),
        ({}, {"dropout": True}, False),
        # What an adapter keeps, it keeps after the product beside it.
        ({"method": "lora", "lora_targets": ("q_proj", "up_proj")}, {}, True),
        ({"method": "lora", "lora_targets": ("q_proj", "o_proj")}, {}, True),
        ({"method": "lora", "lora_targets": ("q_proj", "down_proj")}, {}, False),
        ({"method": "lora", "lora_targets": ("c_proj",)}, {}, False),
        # Four bits, and eight: the product itself keeps something, when it is done.
        ({"method": "qlora", "lora_targets": ("q_proj",)}, {}, False),
        ({"precision": "fp8", "library": "trainyard"}, {}, False),
    ],
)
def test_torch_recomputes_no_layers_last_product(
    changes: dict[str, Any], shape_changes: dict[str, Any], stops: bool
) -> None:
    """Its result is the layer's own, which nothing reads again: of a GPT block a third of the products."""
    sizes = {"layers": 8, "hidden": 8192, "ffn": 32768, "heads": 64, "kv_heads": 64, "head_dim": 128, "vocab": 512}
    shape = ModelShape(**{**sizes, "gated_mlp": False, **shape_changes})
    recomputed = {"engine": "torch", "year": 2024.0, "recompute": "full", "sequence_length": 512, "micro_batch": 16}
    layout = dataclasses.replace(DENSE, **(recomputed | changes))
    time = step_time(shape, layout, gpu("H100"), LINKS)
    head = _Rank(shape, layout, gpu("H100"), LINKS, DEFAULT_CONSTANTS)._head_product()
    layers = time.forward - layout.num_micro_batches * max(head, DEFAULT_CONSTANTS.launch_seconds)
    again = time.recompute / layers
    # Our own trainer's forward passes cast weights beside, once.
    whole = 0.15 if changes.get("library") == "trainyard" else 1e-9
    assert again == pytest.approx(2 / 3, abs=0.04) if stops else again == pytest.approx(1.0, abs=whole)


def test_the_last_product_of_a_hybrids_layers_is_each_ones_own() -> None:
    """Layers that are attention or a state space model alone end in their own projection."""
    shape = shape_of_known("nemotron-3-nano")
    assert shape.is_hybrid
    adapted = dataclasses.replace(DENSE, engine="torch", recompute="full", method="lora", lora_targets=("o_proj",))
    rank = _Rank(shape, adapted, gpu("H100"), LINKS, DEFAULT_CONSTANTS)
    assert not rank._stops_before_last
    plain = dataclasses.replace(adapted, lora_targets=("q_proj",))
    assert _Rank(shape, plain, gpu("H100"), LINKS, DEFAULT_CONSTANTS)._stops_before_last


def test_our_trainers_selection_by_operator_is_torchs_under_deepspeed_too() -> None:
    shape, own = shape_of_known("llama-2-7b"), dataclasses.replace(DENSE, library="trainyard", recompute="selective")
    torchs, deepspeeds = (
        step_time(shape, dataclasses.replace(own, engine=engine), gpu("H100"), LINKS).recompute
        for engine in ("torch", "deepspeed")
    )
    assert torchs == deepspeeds > 0


def test_what_zero_3_sends_in_every_layer_slows_the_products_it_runs_beside() -> None:
    """The fabric is fast enough to hide all of it, but for that share."""
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    layout = Layout(zero_stage=3, shard_degree=8, data_parallel=8, micro_batch=2, num_micro_batches=4, year=2024.0)

    def exposed(share: float) -> float:
        still = dataclasses.replace(DEFAULT_CONSTANTS, sharding_exposed=share, jitter_per_doubling=0.0)
        return step_time(shape, layout, device, LINKS, still).data_communication

    units = shape.layers + 1
    weights = all_gather_seconds(2 * shape.params / units, group(8, 1, 8), LINKS)
    gradients = all_gather_seconds(4 * shape.params / units, group(8, 1, 8), LINKS)
    assert exposed(0.2) == pytest.approx(0.2 * 4 * units * (2 * weights + gradients), rel=1e-6)
    assert exposed(0.0) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("groups", "experts", "chosen"), [(1, 8, 3), (2, 8, 3), (4, 8, 3), (8, 8, 3), (4, 8, 8)])
def test_a_token_is_counted_once_for_each_group_that_has_one_of_its_experts(
    groups: int, experts: int, chosen: int
) -> None:
    """All choices, one by one."""
    choices = list(itertools.combinations(range(experts), chosen))
    counted = sum(len({expert * groups // experts for expert in choice}) for choice in choices) / len(choices)
    assert _distinct(groups, experts, chosen) == pytest.approx(counted)


def test_a_small_layer_is_bound_by_its_launch_and_a_larger_micro_batch_then_costs_nothing() -> None:
    one, two = (dataclasses.replace(DENSE, micro_batch=size, sequence_length=128) for size in (1, 2))
    assert total(two, "qwen3-0.6b") == pytest.approx(total(one, "qwen3-0.6b"), rel=0.05)
    large = [dataclasses.replace(DENSE, micro_batch=size) for size in (4, 8)]
    assert total(large[1]) > 1.8 * total(large[0])


def test_products_with_few_tiles_and_short_sums_are_slower() -> None:
    # The same FLOPs with a quarter of the tokens in a micro-batch.
    few = dataclasses.replace(DENSE, micro_batch=1, num_micro_batches=32, sequence_length=512)
    many = dataclasses.replace(DENSE, micro_batch=4, num_micro_batches=8, sequence_length=512)
    assert total(many, "llama-3-70b") < total(few, "llama-3-70b")


@pytest.mark.parametrize("device", ["V100", "A100", "H100", "H20", "B200", "GB300", "MI300X", "L40S"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp4", "fp32"])
def test_no_part_exceeds_its_peak_in_any_precision(device: str, precision: Precision) -> None:
    layout = dataclasses.replace(DENSE, precision=precision)
    part = gpu(device)
    shape = shape_of_known("llama-3-70b")
    work = shape.flops_per_token(4096, causal=True) * layout.global_batch * layout.sequence_length
    assert work / step_time(shape, layout, part, LINKS).total < part.peak_tflops(precision) * 1e12


def test_a_part_without_narrow_units_computes_in_wider_ones() -> None:
    shares = {
        bits: matmul_ceiling_tflops(dataclasses.replace(DENSE, precision=bits), gpu("A100"), DEFAULT_CONSTANTS)
        for bits in ("bf16", "fp8", "fp4")
    }
    assert shares["fp4"] == shares["fp8"] == shares["bf16"]


def test_attention_of_a_window_costs_less_than_of_the_whole_sequence() -> None:
    long = dataclasses.replace(DENSE, sequence_length=32768, num_micro_batches=2, micro_batch=1)
    shape = shape_of_known("gpt-oss-20b")
    whole = dataclasses.replace(shape, attention_window=0)
    times = [step_time(item, long, gpu("H100"), LINKS).total for item in (shape, whole)]
    assert times[0] < times[1]


def test_older_releases_with_experts_are_slower() -> None:
    routed = dataclasses.replace(DENSE, expert=8, data_parallel=8, micro_batch=4)
    older = dataclasses.replace(routed, year=2024.0)
    assert total(routed, "qwen3-30b-a3b") < total(older, "qwen3-30b-a3b")


def test_selective_recomputation_charges_products_only_where_they_are_not_kept() -> None:
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    ours = dataclasses.replace(DENSE, engine="torch", recompute="selective")
    kept = step_time(shape, ours, device, LINKS)
    halved = step_time(shape, dataclasses.replace(ours, saves_every_second_product=True), device, LINKS)
    assert 0 < kept.recompute < 0.2 * kept.forward < halved.recompute


def test_selective_recomputation_runs_attention_that_drops_again() -> None:
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    drops = dataclasses.replace(shape, attention_dropout=True)
    ours = dataclasses.replace(DENSE, engine="torch", library="trainyard", recompute="selective")
    more = [step_time(one, ours, device, LINKS).recompute for one in (drops, shape)]
    whole = [
        step_time(one, dataclasses.replace(ours, recompute="full"), device, LINKS).recompute for one in (drops, shape)
    ]
    assert more[1] < more[0] < whole[0] == whole[1]
    # Written out, attention is products, which are kept.
    eager = [
        step_time(one, dataclasses.replace(ours, flash_attention=False), device, LINKS).recompute
        for one in (drops, shape)
    ]
    assert eager[0] == eager[1]
    assert shape_from_config({"model_type": "llama", "attention_dropout": 0.1}).attention_dropout
    assert not shape_from_config({"model_type": "llama"}).attention_dropout
    assert shape_from_config({"model_type": "gpt2"}).attention_dropout


def test_context_parallelism_pays_for_its_keys_and_values_where_the_network_is_slow() -> None:
    split = dataclasses.replace(DENSE, context=16, sequence_length=32768, micro_batch=1)
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    fast, slow = (step_time(shape, split, device, Fabric(8, 450, rate, EFA)) for rate in (400, 0.4))
    assert slow.context_communication > fast.context_communication
    assert slow.context_communication > 0.5 * slow.forward
    assert step_time(shape, DENSE, device, LINKS).context_communication == 0


def test_layers_beside_the_decoder_take_time_and_lift_no_utilization() -> None:
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")

    def utilization(item: ModelShape) -> float:
        flops = item.flops_per_token(4096) * DENSE.global_batch * DENSE.sequence_length
        return flops / step_time(item, DENSE, device, LINKS).total / (device.peak_tflops("bf16") * 1e12)

    encoder = dataclasses.replace(shape, encoder_layers=32, encoder_tokens=4096)
    assert step_time(encoder, DENSE, device, LINKS).total > 1.8 * step_time(shape, DENSE, device, LINKS).total
    for extra in ({"mtp_layers": 16}, {"encoder_layers": 32, "encoder_tokens": 16384}):
        assert 0 < utilization(dataclasses.replace(shape, **extra)) < 1.25 * utilization(shape) < 1


QWEN_MOE: dict[str, Any] = {
    "model": "qwen3-235b-a22b", "gpu": "B300", "gpus": 64, "tp": 8, "pp": 4, "ep": 16, "seq": 4096, "micro_batch": 4,
    "global_batch": 256, "precision": "bf16", "recompute": "selective", "framework": "Megatron-Bridge",
    "interconnect": "p6-b300 x8 EFA 6400",
}  # fmt: skip


def test_an_exchange_of_experts_that_nothing_hides_stands_alone() -> None:
    usual, hidden = (predict(QWEN_MOE | {"expert_overlap": said})["step_seconds"] for said in (None, True))
    alone = predict(QWEN_MOE | {"expert_overlap": False})["step_seconds"]
    host_driven = predict(QWEN_MOE | {"expert_exchange": "deepep"})["step_seconds"]
    assert usual == hidden < min(alone, host_driven)
    # DeepEP drives InfiniBand from the GPU, and sends less; EFA it can't.
    elsewhere = QWEN_MOE | {"interconnect": "6400 Gb/s per node"}
    assert predict(elsewhere | {"expert_exchange": "deepep"})["step_seconds"] < predict(elsewhere)["step_seconds"]
    # Of AWS's own runs (p6-b300, 8 nodes; a group of experts over two): 10.5 s overlapped, 12.2 s without.
    assert usual == pytest.approx(10.5, rel=0.1)
    # The second is 14.1 s by today's constants, 16% too long: 10% is a goal for the median of AWS's rows, and this
    # one is named in docs/planner.md. The limit leaves the next fit room.
    assert alone == pytest.approx(12.2, rel=0.18)
    with pytest.raises(InputError, match="expert_exchange: must be one of nccl, deepep"):
        predict(QWEN_MOE | {"expert_exchange": "mpi"})


def test_experts_of_a_capacity_get_and_hold_as_much_as_it_says() -> None:
    tight, loose, dropless = (predict(QWEN_MOE | {"capacity_factor": factor}) for factor in (1.0, 2.0, None))
    for name in ("step_seconds", "activation_gib", "peak_memory_gib"):
        assert tight[name] < dropless[name] < loose[name], name
    assert tight["model_state_gib"] == loose["model_state_gib"] and "ignored_fields" not in tight
    dense = {"model": "llama-2-7b", "gpu": "H100", "gpus": 8}
    assert predict(dense | {"capacity_factor": 2})["ignored_fields"] == ["capacity_factor"]
    assert predict(dense | {"capacity_factor": 2})["step_seconds"] == predict(dense)["step_seconds"]
    for wrong in (0, -1, "much"):
        with pytest.raises(InputError, match="capacity_factor: must be a number above 0"):
            predict(QWEN_MOE | {"capacity_factor": wrong})


def test_deepep_over_efa_is_not_known_better_than_aws_own_runs_say() -> None:
    """Step times by UCCL, then NVSHMEM, without overlap and with it; over two nodes, then over four."""
    two, four = ((13.06, 13.24, 11.57, 11.32), (19.16, 18.31, 21.12, 17.81))
    near = predict(QWEN_MOE | {"expert_exchange": "deepep"})["step_seconds"]
    far = predict(QWEN_MOE | {"expert_exchange": "deepep", "pp": 2, "ep": 32})["step_seconds"]
    assert all(0.9 < measured / near < 1.1 for measured in two)
    # What four nodes cost more is modelled in part: docs/planner.md says by how much it falls short. The limits leave
    # the next fit room.
    assert all(1.15 < measured / far < 1.5 for measured in four)


@pytest.mark.parametrize(
    ("place", "experts", "driven"),
    [
        ("p6-b300 x8 EFA 6400", 16, True),
        ("p5.48xlarge", 16, True),
        # Nothing of it leaves the node.
        ("p6-b300 x8 EFA 6400", 8, False),
        ("6400 Gb/s per node", 16, False),
        ("the default, 6400 Gb/s per node", 16, False),
        # Machines of AWS that have no EFA.
        ("g5.2xlarge", 16, False),
    ],
)
def test_the_host_drives_deepep_only_over_efa_and_between_nodes(place: str, experts: int, driven: bool) -> None:
    asked = QWEN_MOE | {"interconnect": place, "ep": experts}
    usual, deepep = (predict(asked | {"expert_exchange": how})["step_seconds"] for how in ("nccl", "deepep"))
    assert (deepep > usual) is driven


EARLY_RUN = Layout(
    engine="megatron", micro_batch=1, num_micro_batches=8, sequence_length=2048, precision="fp16", year=2021.5
)


def early(**changes: Any) -> Any:
    """A step of a GPT of 2021 on A100."""
    shape = ModelShape(
        layers=24, hidden=4096, ffn=16384, heads=32, kv_heads=32, head_dim=128, vocab=51200, gated_mlp=False
    )
    return step_time(shape, dataclasses.replace(EARLY_RUN, **changes), gpu("A100"), Fabric(8, 300, 100, EFA))


def test_collectives_that_are_waited_for_stand_alone_whatever_overlaps_today() -> None:
    then, hidden = (
        step_time(
            shape_of_known("llama-2-7b"),
            dataclasses.replace(DENSE, tensor=8, year=year),
            gpu("H100"),
            LINKS,
            dataclasses.replace(DEFAULT_CONSTANTS, tensor_exposed_megatron=0.5, tensor_exposed_torch=0.25),
        ).tensor_communication
        for year in (2022.0, 2026.0)
    )
    own = dataclasses.replace(DENSE, tensor=8, library="nanotron")
    assert then == pytest.approx(2 * hidden)
    exposed = dataclasses.replace(DEFAULT_CONSTANTS, tensor_exposed_megatron=0.5, tensor_exposed_torch=1.0)
    time = step_time(shape_of_known("llama-2-7b"), own, gpu("H100"), LINKS, exposed)
    assert time.tensor_communication == pytest.approx(then), "nanotron waits for its own"


def test_gradients_of_fp16_travel_as_such_and_those_of_bf16_as_their_sums() -> None:
    slow = {"data_parallel": 64, "num_micro_batches": 1}
    alone = early(num_micro_batches=1).total - early(num_micro_batches=1).data_communication
    narrow, wide = (early(precision=name, **slow).data_communication for name in ("fp16", "bf16"))
    assert alone > 0 and wide > 1.8 * narrow > 0


def test_updated_parameters_come_back_behind_the_forward_pass() -> None:
    """Over a slow network both directions show, less what each pass hides of its own; over a fast one neither."""
    sharded = {"zero_stage": 1, "shard_degree": 64, "data_parallel": 64, "num_micro_batches": 1}
    slow = dataclasses.replace(DEFAULT_CONSTANTS, data_exposed=0.0, data_overlap=1.0, jitter_per_doubling=0.0)
    shape, device = shape_of_known("llama-2-7b"), gpu("A100")
    layout = dataclasses.replace(EARLY_RUN, year=2024.5, **sharded)

    def exposed(node_gb_per_second: float) -> float:
        links = Fabric(8, 300, node_gb_per_second, EFA)
        return step_time(shape, layout, device, links, slow).data_communication

    once = step_time(shape, layout, device, Fabric(8, 300, 1.0, EFA), slow)
    # Far below either pass's rate, halving the bandwidth adds the whole traffic once more.
    assert exposed(0.5) - exposed(1.0) == pytest.approx(exposed(1.0) + once.forward + once.backward, rel=1e-3)
    assert exposed(1e6) == 0


@pytest.mark.parametrize("library", ["", "trainyard"])
def test_deepspeeds_stage_2_reduces_each_micro_batch(library: Library) -> None:
    """It keeps no whole gradients to add micro-batches up in; stage 1 does, and sends them once. They were counted once
    for both."""
    shape, device, share = shape_of_known("llama-2-7b"), gpu("H100"), 0.1
    still = dataclasses.replace(DEFAULT_CONSTANTS, data_exposed=share, data_overlap=1.0, jitter_per_doubling=0.0)
    layout = Layout(engine="deepspeed", library=library, shard_degree=8, data_parallel=8, year=2025.0)

    def exposed(stage: int, count: int, *, overlaps: bool = True) -> float:
        there = dataclasses.replace(
            layout, zero_stage=stage, num_micro_batches=count, zero_sizes=ZeroSizes(overlaps=overlaps)
        )
        return step_time(shape, there, device, LINKS, still).data_communication

    gradients, weights = replica_seconds(shape, dataclasses.replace(layout, zero_stage=2), LINKS)
    # Of what our own trainer's send to a part's owner alone, some is waited for; the rest hides but for a share.
    waited = waited_share(shape, dataclasses.replace(layout, zero_stage=2))
    assert (waited > 0.05) == bool(library)
    for count in (1, 4, 16):
        alone = waited + share * (1 - waited)
        assert exposed(2, count) == pytest.approx(count * gradients * alone + share * weights, rel=1e-6)
        # Nothing hides what is waited for.
        assert exposed(2, count, overlaps=False) == pytest.approx(count * gradients + share * weights, rel=1e-6)
    assert exposed(1, 16) == exposed(1, 1)


BY_OWNERS = Layout(engine="deepspeed", library="trainyard", zero_stage=2)


@pytest.mark.parametrize(("ranks", "thousandths"), [(8, 50), (8, 125), (8, 500), (4, 1000), (6, 700), (1, 1000)])
def test_of_a_buckets_messages_to_owners_the_last_alone_has_a_backward_pass_beside_it(
    ranks: int, thousandths: int
) -> None:
    """All of them were taken to hide, though the host waits for the GPU before each. Here buckets begin everywhere."""
    shape = shape_of_known("llama-2-7b")
    own, bucket = shape.params / ranks, shape.params * thousandths // 1000
    layout = dataclasses.replace(BY_OWNERS, data_parallel=ranks, shard_degree=ranks, zero_sizes=ZeroSizes(bucket))
    last = [min(bucket, (start + bucket) % own or own) for start in (own * part / 997 for part in range(997))]
    share = 0.0 if ranks == 1 else 1 - statistics.fmean(last) / bucket
    assert waited_share(shape, layout) == pytest.approx(share, abs=2e-3)


def test_where_a_bucket_goes_to_all_ranks_nothing_of_it_is_waited_for() -> None:
    layout, shape = dataclasses.replace(BY_OWNERS, data_parallel=64, shard_degree=64), shape_of_known("llama-2-7b")
    assert waited_share(shape, layout) > 0.5
    assert waited_share(shape, dataclasses.replace(layout, data_parallel=512, shard_degree=512)) == 0
    # As DeepSpeed comes it sends all buckets to all ranks.
    assert waited_share(shape, dataclasses.replace(layout, library="")) == 0


def test_deepspeeds_stage_3_without_overlap_waits_for_all_that_it_sends() -> None:
    """`parallelism.zero.overlap: false` changed nothing of a step."""
    shape, still = shape_of_known("llama-2-7b"), dataclasses.replace(DEFAULT_CONSTANTS, jitter_per_doubling=0.0)
    layout = Layout(engine="deepspeed", library="trainyard", zero_stage=3, shard_degree=8, data_parallel=8)

    def exposed(share: float, *, overlaps: bool) -> float:
        there = dataclasses.replace(layout, num_micro_batches=4, zero_sizes=ZeroSizes(overlaps=overlaps))
        constants = dataclasses.replace(still, sharding_exposed=share)
        return step_time(shape, there, gpu("H100"), LINKS, constants).data_communication

    assert exposed(1.0, overlaps=True) > 2 * exposed(0.1, overlaps=True)
    assert exposed(0.1, overlaps=False) == pytest.approx(exposed(1.0, overlaps=True)) != 0


def test_buckets_of_many_owners_go_to_all_ranks() -> None:
    """Our own trainer has DeepSpeed sum them on all, with twice the bytes, where one bucket is of more than 8 ranks."""
    shape = shape_of_known("llama-2-7b")
    members = Layout(engine="deepspeed", library="trainyard", zero_stage=2)

    def sent(ranks: int, bucket: int | None = None) -> float:
        layout = dataclasses.replace(members, shard_degree=ranks, data_parallel=ranks, zero_sizes=ZeroSizes(bucket))
        return replica_seconds(shape, layout, LINKS)[0]

    few, many = (all_gather_seconds(4 * shape.params, group(ranks, 1, 8), LINKS) for ranks in (64, 512))
    assert sent(64) == pytest.approx(few, rel=1e-5)
    assert sent(512) == pytest.approx(all_reduce_seconds(4 * shape.params, group(512, 1, 8), LINKS), rel=1e-5)
    assert sent(512) > 1.5 * sent(512, bucket=1_000_000) == pytest.approx(1.5 * many, rel=1e-5)


def test_before_2023_gradients_and_parameters_stand_alone() -> None:
    """What is waited for takes its whole time, however long the pass is that hides it today."""
    sharded = {"zero_stage": 1, "shard_degree": 64, "data_parallel": 64, "num_micro_batches": 1}
    tenth = {"data_exposed": 0.1, "sharding_exposed": 0.1}
    for changes in (sharded, sharded | {"zero_stage": 3, "engine": "deepspeed"}):
        then, today = (
            step_time(
                shape_of_known("llama-2-7b"),
                dataclasses.replace(EARLY_RUN, year=year, **changes),
                gpu("A100"),
                Fabric(8, 300, 400, EFA),
                dataclasses.replace(DEFAULT_CONSTANTS, **tenth, data_overlap=1.0, jitter_per_doubling=0.0),
            ).data_communication
            for year in (2022.0, 2024.5)
        )
        assert then == pytest.approx(10 * today, rel=1e-6)


SHARDED: dict[str, Any] = {"model": "llama-2-13b", "gpu": "A100", "gpus": 256, "tp": 2, "micro_batch": 4, "seq": 2048}


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_megatron_waited_for_its_gradients_until_late_in_2023(sharding: str) -> None:
    asked = SHARDED | {"global_batch": 2048, "sharding": sharding, "framework": "Megatron-LM", "recompute": "selective"}
    asked |= {"interconnect": "4x200 Gb/s"}
    waits, overlaps = (predict(asked | {"framework_version": year})["step_seconds"] for year in ("2023-09", "2023-12"))
    # 13 billion parameters' gradients over four cards of 200 Gb/s a node take seconds.
    assert waits > 1.1 * overlaps


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_newer_kernels_of_attention_are_never_slower_and_gain_with_the_sequence(gpu: str) -> None:
    asked = {"model": "llama-2-7b", "gpu": gpu, "gpus": 8, "micro_batch": 1, "framework": "PyTorch FSDP"}
    gains = []
    for tokens in (1024, 8192, 131_072):
        old, new = (
            predict(asked | {"seq": tokens, "framework_version": year})["step_seconds"]
            for year in ("2023-12", "2024-02")
        )
        gains.append(old / new)
    assert gains[0] == pytest.approx(1.0) and 1.0 < gains[1] < gains[2]


VTRAIN: dict[str, Any] = {
    "hidden": 2048, "ffn": 8192, "heads": 16, "seq": 1024, "vocab": 50257, "gpu": "A100", "tp": 2, "micro_batch": 1,
    "framework": "Megatron-DeepSpeed", "precision": "fp16", "recompute": "full",
}  # fmt: skip


@pytest.mark.parametrize(("layers", "measured"), [(12, 4.21e-3), (16, 5.19e-3), (24, 6.71e-3)])
def test_within_a_node_gradients_were_waited_for_too(layers: int, measured: float) -> None:
    """vTrain's runs of two micro-batches a rank, on two GPUs and on four: all that the other two add is an exchange."""
    one, two = (
        predict(VTRAIN | {"layers": layers, "gpus": gpus, "global_batch": gpus})["step_seconds"] for gpus in (2, 4)
    )
    assert 0.6 * measured < two - one < measured


def test_a_layer_of_experts_waits_for_its_host_beside_its_own_work() -> None:
    """Layers with much to do: each pass is longer by that share of the launching, and dense ones by nothing."""
    question = understand(QWEN_MOE | {"micro_batch": 16, "global_batch": 1024, "ep": 8, "tp": 1, "pp": 1})
    parts = question.shape, question.layout, question.device, question.links
    without, with_it = (
        step_time(*parts, dataclasses.replace(DEFAULT_CONSTANTS, launch_exposed=share)) for share in (0.0, 0.5)
    )
    era = math.exp(-DEFAULT_CONSTANTS.moe_gain_per_year * (question.layout.year - 2026.0))
    each = 0.5 * DEFAULT_CONSTANTS.launch_moe_seconds * era * question.shape.layers * question.layout.num_micro_batches
    assert with_it.forward - without.forward == pytest.approx(each, rel=1e-6)
    assert with_it.backward - without.backward == pytest.approx(each, rel=1e-6)
    dense = step_time(shape_of_known("llama-2-7b"), DENSE, gpu("H100"), LINKS)
    unchanged = dataclasses.replace(DEFAULT_CONSTANTS, launch_exposed=1.0)
    assert step_time(shape_of_known("llama-2-7b"), DENSE, gpu("H100"), LINKS, unchanged) == dense


@pytest.mark.parametrize(
    ("engine", "recompute", "gathers"),
    [
        ("megatron", "none", 10),
        ("megatron", "full", 14),
        ("torch", "none", 8),
        ("torch", "selective", 11),
        ("torch", "full", 11),
    ],
)
def test_sequence_parallelism_pays_for_each_of_a_layers_gatherings_and_scatterings(
    engine: Engine, recompute: Recompute, gathers: int
) -> None:
    """How many they are of torch, tests/trainer/test_dry_run_agreement.py counts in our own trainer's traces."""
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    split = dataclasses.replace(DENSE, tensor=8, year=2022.0, engine=engine, recompute=recompute)
    each = all_gather_seconds(2 * 4096 * 4096 * 2, group(8, 1, 8), LINKS)
    time = step_time(shape, split, device, LINKS)
    assert time.tensor_communication == pytest.approx(gathers * each * 32 * 16)


def test_without_sequence_parallelism_switches_add() -> None:
    shape, device = shape_of_known("llama-2-7b"), gpu("H100")
    split = dataclasses.replace(DENSE, tensor=8, year=2022.0)
    each = all_gather_seconds(2 * 4096 * 4096 * 2, group(8, 1, 8), LINKS)
    whole = step_time(shape, dataclasses.replace(split, sequence_parallel=False), device, LINKS)
    reduced = all_reduce_seconds(2 * 4096 * 4096 * 2, group(8, 1, 8), LINKS)
    assert whole.tensor_communication == pytest.approx(2 * reduced * 2 * 32 * 16)
    assert 2 * reduced < 4 * each


def test_unfused_attention_pays_for_the_tiles_that_its_heads_do_not_fill() -> None:
    written = dataclasses.replace(EARLY_RUN, flash_attention=False)

    def scores(head_dim: int, layout: Layout = written) -> float:
        shape = dataclasses.replace(shape_of_known("llama-2-7b"), heads=24, kv_heads=24, head_dim=head_dim)
        return _Rank(shape, layout, gpu("A100"), LINKS, DEFAULT_CONSTANTS)._score_seconds()

    assert scores(64) < scores(96) == scores(128) < scores(160) == scores(192)
    # Twice as far from 128 to 256 as from 64 to 128: what is read and written doesn't depend on the width.
    assert scores(256) - scores(128) == pytest.approx(2 * (scores(128) - scores(64)))
    assert scores(96, EARLY_RUN) < scores(128, EARLY_RUN), "fused kernels have tiles of their own"


def test_words_that_begin_nowhere_even_slow_the_output_projection_until_they_are_padded() -> None:
    def head(vocab: int, tensor: int = 1, **more: Any) -> float:
        few, none = (
            ModelShape(
                layers=2, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=words, tied_embeddings=True
            )
            for words in (vocab, 8)
        )
        layout = dataclasses.replace(DENSE, tensor=tensor, **more)
        return step_time(few, layout, gpu("H100"), LINKS).total - step_time(none, layout, gpu("H100"), LINKS).total

    # The product itself takes 1.9 times as long (a speed of 0.53); the loss beside it takes what it took.
    assert head(50257) > 1.5 * head(50304)
    assert head(50257, tensor=2) == pytest.approx(head(50304, tensor=2), rel=0.01)
    assert head(50257, pads_vocabulary=True) == pytest.approx(head(50304), rel=0.01)
    assert head(50260, precision="fp32") == pytest.approx(head(50264, precision="fp32"), rel=0.01)
    own = {"library": "trainyard", "engine": "torch"}
    # But for casts of the weights, which are autocast's on one rank alone.
    assert head(50257, tensor=2, **own) == pytest.approx(head(50257, **own), rel=0.06), "whole on both ranks"


@pytest.mark.parametrize(
    ("framework", "pads"), [("Megatron-Core", True), ("NeMo", True), ("Megatron-DeepSpeed", False)]
)
def test_megatron_pads_the_words_by_itself_on_one_rank_too(framework: str, pads: bool) -> None:
    rows = {"layers": 24, "hidden": 2048, "heads": 16, "seq": 1024, "gpu": "A100", "gpus": 8, "micro_batch": 8}
    even, odd = (
        float(predict({**rows, "vocab": vocab, "framework": framework, "global_batch": 64})["step_seconds"])
        for vocab in (50304, 50257)
    )
    assert (odd == pytest.approx(even, rel=0.01)) is pads


def test_gradients_of_fp64_are_wider_than_of_fp32() -> None:
    slow = {"data_parallel": 64, "num_micro_batches": 1}
    wide, usual = (early(precision=name, **slow) for name in ("fp64", "fp32"))
    assert wide.data_communication > 1.4 * usual.data_communication > 0


def test_a_host_that_drives_the_exchange_pays_for_each_rank_of_another_node() -> None:
    rows = {"gpu": "B200", "gpus": 32, "experts": 64, "experts_per_token": 8, "moe_ffn": 1536}
    run = {"layers": 16, "hidden": 4096, "heads": 32, "framework": "Megatron-Core", "vocab": 32000, "ffn": 4096}
    efa = {"interconnect": "p6-b200.48xlarge", "expert_overlap": False, "micro_batch": 1, "seq": 4096}

    def more(ep: int) -> float:
        asked = understand(rows | run | efa | {"ep": ep, "global_batch": 32, "expert_exchange": "deepep"})
        assert asked.layout.host_exchange and asked.layout.forwards_tokens
        by_gpu = dataclasses.replace(asked.layout, host_exchange=False)
        driven, free = (
            step_time(asked.shape, layout, asked.device, asked.links).total for layout in (asked.layout, by_gpu)
        )
        return driven - free

    assert more(8) == pytest.approx(0, abs=1e-9), "one node"
    assert more(32) == pytest.approx(3 * more(16), rel=0.2) and more(16) > 0


LONG = {"model": "llama-3.1-8b", "gpu": "H200", "gpus": 8, "seq": 65536, "micro_batch": 1, "framework": "DeepSpeed"}


def test_kernels_written_for_hopper_are_known_by_their_name_and_move_no_memory() -> None:
    usual, native = predict(LONG), predict(LONG | {"attention": "flash_attention_3"})
    assert native["step_seconds"] < usual["step_seconds"] / 1.5
    assert native["peak_memory_gib"] == usual["peak_memory_gib"]
    # They are Hopper's alone.
    older = LONG | {"gpu": "A100"}
    assert predict(older | {"attention": "flash_attention_3"}) == predict(older | {"attention": "flash"})


def _forward_seconds(**changes: Any) -> float:
    asked = {
        "model": "mistral-7b",
        "gpu": "A100",
        "gpus": 1,
        "seq": 4096,
        "micro_batch": 4,
        "framework": "transformers",
    }
    question = understand(asked | changes)
    return step_time(question.shape, question.layout, question.device, question.links).forward


def test_adapters_take_the_time_of_what_they_read_and_write() -> None:
    two, four = (_forward_seconds(method="lora", lora_targets=count) for count in (2, 4))
    passes = 7 * 2 * 32 * 4 * 4096 * 4096 * 2
    bandwidth = gpu("A100").memory_tb_per_second * 1e12 * DEFAULT_CONSTANTS.bandwidth_efficiency
    assert four - two == pytest.approx(passes / bandwidth)
    assert _forward_seconds(method="lora", lora_targets=2) > _forward_seconds(method="full")
    # Megatron's have kernels of their own.
    megatron = {"framework": "Megatron-LM", "framework_version": "2024-07"}
    assert _forward_seconds(method="lora", **megatron) == _forward_seconds(method="full", **megatron)


def test_four_bit_weights_are_unpacked_in_every_pass_whatever_the_batch() -> None:
    # GPTQ keeps 16 bits everywhere else: what differs from LoRA is the unpacking.
    def more(micro_batch: int) -> float:
        same = {"micro_batch": micro_batch, "precision": "fp16"}
        return _forward_seconds(method="qlora", quantization="gptq", **same) - _forward_seconds(method="lora", **same)

    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    bandwidth = gpu("A100").memory_tb_per_second * 1e12 * DEFAULT_CONSTANTS.bandwidth_efficiency
    assert more(4) == pytest.approx(weights * (0.5 + 4 / 64 + 2) / bandwidth)
    assert more(8) == pytest.approx(more(4))


def hosts_of(mesh: list[int], sizes: tuple[int, ...], axis: int) -> tuple[int, int]:
    """(ranks, hosts of eight) of the first group along an axis of a mesh, whose last axis counts fastest."""
    stride = math.prod(sizes[axis + 1 :])
    members = mesh[: stride * sizes[axis] : stride]
    return len(members), len({rank // LINKS.gpus_per_node for rank in members})


@pytest.mark.parametrize(
    ("tensor", "shards", "expert"), [(1, 64, 8), (2, 32, 8), (4, 16, 16), (1, 16, 4), (8, 8, 2), (1, 8, 8)]
)
def test_experts_travel_and_are_shared_along_the_axes_of_the_trainers_own_mesh(
    tensor: int, shards: int, expert: int
) -> None:
    """(expert_shard, expert, tensor), as training_container/trainer/strategies/expert_parallel.py builds it."""
    sizes = (shards // expert, expert, tensor)
    ranks = list(range(math.prod(sizes)))
    layout = Layout(
        tensor=tensor, expert=expert, data_parallel=shards, shard_degree=shards, zero_stage=3, library="trainyard"
    )
    exchanging = expert_group(layout, LINKS)
    assert (exchanging.size, exchanging.num_nodes) == hosts_of(ranks, sizes, 1)
    dense, experts = _sharded(StageParams(3e9, 5e9), layout, LINKS)
    assert (dense[0], experts[0]) == (3e9, 5e9)
    assert (experts[1].size, experts[1].num_nodes) == hosts_of(ranks, sizes, 0)
    assert dense[1] == group(shards, tensor, LINKS.gpus_per_node)


def test_megatrons_experts_are_exchanged_by_neighbours_unless_they_are_cut() -> None:
    layout = Layout(engine="megatron", tensor=2, expert=8, data_parallel=8)
    assert expert_group(layout, LINKS).num_nodes == 1
    assert expert_group(dataclasses.replace(layout, expert_tensor=2), LINKS).num_nodes == 2


def test_replicas_of_an_expert_add_up_all_of_it_that_a_rank_holds() -> None:
    shape = shape_of_known("qwen3-30b-a3b")
    layout = Layout(data_parallel=128, shard_degree=8, zero_stage=3, expert=8, library="trainyard")
    params = stage_params(shape, layout, stages(shape, layout)[0])
    # Eight ranks share the rest; an expert, of which each holds as many as it has, nobody.
    held = params.dense / 8 + params.expert
    expected = all_reduce_seconds(held * 4, group(16, 8, LINKS.gpus_per_node), LINKS)
    assert replica_seconds(shape, layout, LINKS)[0] == pytest.approx(expected)


def test_the_trainers_tensor_ranks_divide_whole_experts() -> None:
    """Of 128 experts each of 8 x 2 ranks computes 8: of few tokens that takes as long as reading the weights does."""
    shape = shape_of_known("qwen3-30b-a3b")
    layout = Layout(tensor=2, expert=8, data_parallel=16, library="trainyard", sequence_length=64)
    rank = _Rank(shape, layout, gpu("H100"), LINKS, DEFAULT_CONSTANTS)
    weights = 128 / 16 * shape.hidden * 3 * shape.moe_ffn * 2 / rank.bytes_per_second
    assert rank._routed().products == pytest.approx(weights, rel=0.1)


def test_products_behind_the_last_layer_take_their_time() -> None:
    """They are counted as the model's work: without their time a step would be faster than its GPU's peak."""
    bert = {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 30592, "gated_mlp": False, "seq": 512}
    asked = bert | {"gpu": "A100", "gpus": 1, "micro_batch": 32, "framework": "Megatron-LM"}
    none, usual, many = (predict(asked | {"head_products": count}) for count in (0, 2, 5000))
    assert none["step_seconds"] < usual["step_seconds"] < 1.05 * none["step_seconds"]
    assert 0.3 < many["mfu"] < 1
