"""What must hold for any job: sharding never costs memory, slow links never save time, dollars add up."""

import dataclasses
import datetime
import math
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.hardware import Price, gpu
from trainyard.planner.communication import EFA, Fabric, all_reduce_seconds, group
from trainyard.planner.constants import DEFAULT_MEMORY
from trainyard.planner.goodput import Saved, goodput
from trainyard.planner.layout import Engine, Layout, Schedule
from trainyard.planner.memory import Memory, memory
from trainyard.planner.money import cost_usd
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import micro_batches_in_flight, part_of, stage_at, stage_params
from trainyard.planner.timing import step_time

degrees = st.sampled_from([1, 2, 4, 8])
SCHEDULES = st.sampled_from(get_args(Schedule))


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    head_dim, kv_heads = draw(st.sampled_from([64, 128])), draw(st.sampled_from([8, 16]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    hidden = heads * head_dim
    experts = draw(st.sampled_from([0, 0, 8]))
    return ModelShape(
        layers=draw(st.integers(8, 64)),
        hidden=hidden,
        ffn=hidden * 4,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=draw(st.integers(1000, 200_000)),
        gated_mlp=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        experts=experts,
        experts_per_token=2 if experts else 0,
        moe_ffn=hidden if experts else 0,
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    engines: list[Engine] = ["torch", "deepspeed", "megatron"]
    engine = draw(st.sampled_from(engines))
    data_parallel = draw(st.sampled_from([1, 4, 16, 64]))
    return Layout(
        tensor=draw(degrees),
        pipeline=draw(degrees),
        data_parallel=data_parallel,
        zero_stage=draw(st.integers(1, 3)),
        shard_degree=draw(st.sampled_from([size for size in (1, 4, 16, 64) if size <= data_parallel])),
        micro_batch=draw(st.sampled_from([1, 2, 8])),
        num_micro_batches=draw(st.sampled_from([8, 32])),
        sequence_length=draw(st.sampled_from([512, 2048, 8192])),
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        engine=engine,
    )


def not_more(less: Memory, more: Memory) -> bool:
    return less.allocated <= more.allocated * (1 + 1e-9) and less.needed <= more.needed * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts())
def test_more_ranks_to_shard_over_never_need_more_memory(shape: ModelShape, layout: Layout) -> None:
    sharded = dataclasses.replace(layout, data_parallel=256, shard_degree=max(4, layout.shard_degree))
    wider = dataclasses.replace(sharded, shard_degree=sharded.shard_degree * 4)
    assert not_more(memory(shape, wider), memory(shape, sharded))


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts())
def test_a_higher_zero_stage_never_keeps_more_state(shape: ModelShape, layout: Layout) -> None:
    by_stage = [memory(shape, dataclasses.replace(layout, zero_stage=stage)).state for stage in (0, 1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts())
def test_tensor_parallelism_never_needs_more_memory(shape: ModelShape, layout: Layout) -> None:
    alone = dataclasses.replace(layout, tensor=1, data_parallel=64)
    halved = dataclasses.replace(alone, tensor=2)
    assert not_more(memory(shape, halved), memory(shape, alone))


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts(), st.sampled_from([2, 4, 8]))
def test_expert_parallelism_never_needs_more_memory_but_for_megatrons_uneven_routers(
    shape: ModelShape, layout: Layout, ranks: int
) -> None:
    shape = dataclasses.replace(shape, experts=8, experts_per_token=2, moe_ffn=shape.hidden)
    alone = dataclasses.replace(layout, data_parallel=64, shard_degree=64)
    one, many = memory(shape, alone), memory(shape, dataclasses.replace(alone, expert=ranks))
    assert many.state <= one.state * (1 + 1e-9)
    if layout.engine != "megatron":
        assert not_more(many, one)
    elif layout.recompute != "full" and layout.pipeline == 1:  # of several stages another may be the worst now
        most = 1 + DEFAULT_MEMORY.load_spread
        assert one.activations * (1 - 1e-9) <= many.activations <= most * one.activations


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts())
def test_recomputation_never_needs_more_memory(shape: ModelShape, layout: Layout) -> None:
    none, full = (memory(shape, dataclasses.replace(layout, recompute=level)) for level in ("none", "full"))
    assert full.activations <= none.activations * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts())
def test_a_larger_micro_batch_never_needs_less_memory(shape: ModelShape, layout: Layout) -> None:
    larger = dataclasses.replace(layout, micro_batch=layout.micro_batch * 2)
    assert not_more(memory(shape, layout), memory(shape, larger))


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts(), st.floats(1, 900), st.floats(1, 900), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_slower_links_never_save_time(
    shape: ModelShape, layout: Layout, link: float, node: float, slower_link: float, slower_node: float
) -> None:
    device = gpu("H100")
    fast = step_time(shape, layout, device, Fabric(8, link, node, EFA)).total
    slow = step_time(shape, layout, device, Fabric(8, link * slower_link, node * slower_node, EFA)).total
    assert slow >= fast * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(shapes(), layouts())
def test_a_step_is_the_sum_of_its_parts_and_never_beats_the_peak(shape: ModelShape, layout: Layout) -> None:
    device = gpu("H100")
    time = step_time(shape, layout, device, Fabric(8, 450, 400, EFA))
    assert math.isclose(time.total, sum(time.breakdown().values()))
    assert all(part >= 0 for part in time.breakdown().values())
    tokens = layout.global_batch * layout.sequence_length
    work = shape.flops_per_token(layout.sequence_length, causal=True) * tokens / layout.world_size
    assert work / time.total < device.peak_tflops(layout.precision) * 1e12


@given(st.floats(1, 1e11), st.integers(2, 512), st.floats(1, 900), st.floats(1, 900))
def test_all_reduce_grows_with_the_buffer(size: float, ranks: int, link: float, node: float) -> None:
    links = Fabric(8, link, node, EFA)
    members = group(ranks, 1, 8)
    assert 0 < all_reduce_seconds(size, members, links) < all_reduce_seconds(size * 2, members, links)


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(1, 64), st.integers(1, 64), st.floats(0.01, 500))
def test_cost_is_additive(hours: float, more: float, few: int, others: int, usd: float) -> None:
    rate = Price("ml.p5.48xlarge", "us-east-1", usd, "test", datetime.date(2026, 1, 1), "test")
    by_time = (cost_usd(hours, few, rate) or 0) + (cost_usd(more, few, rate) or 0)
    assert math.isclose(by_time, cost_usd(hours + more, few, rate) or 0, rel_tol=1e-9, abs_tol=1e-9)
    by_machines = (cost_usd(hours, few, rate) or 0) + (cost_usd(hours, others, rate) or 0)
    assert math.isclose(by_machines, cost_usd(hours, few + others, rate) or 0, rel_tol=1e-9, abs_tol=1e-9)


@given(st.floats(1e6, 1e12), st.sampled_from([1, 8, 64, 1024, 16384]), st.booleans(), st.floats(10, 1e5))
def test_goodput_is_a_share_and_the_best_interval_is_best(
    params: float, gpus: int, asynchronous: bool, interval: float
) -> None:
    hosts = max(1, gpus // 8)
    stated = goodput(Saved(params), gpus, hosts, asynchronous=asynchronous, interval_seconds=interval)
    best = goodput(Saved(params), gpus, hosts, asynchronous=asynchronous, interval_seconds=stated.best_interval_seconds)
    assert 0 <= stated.fraction <= best.fraction + 1e-9 <= 1 + 1e-9


def test_micro_batches_in_flight_by_schedule() -> None:
    one_forward_one_backward = Layout(pipeline=4, num_micro_batches=32)
    assert [micro_batches_in_flight(one_forward_one_backward, rank) for rank in range(4)] == [4, 3, 2, 1]
    gpipe = dataclasses.replace(one_forward_one_backward, schedule="gpipe")
    assert micro_batches_in_flight(gpipe, 0) == 32
    interleaved = dataclasses.replace(one_forward_one_backward, chunks=2)
    # Narayanan et al. 2021: p (1 + (p-1)/(p v)) on the first rank.
    assert micro_batches_in_flight(interleaved, 0) == 4 * (1 + 3 / (4 * 2))


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 4), st.sampled_from([2, 4]), SCHEDULES)
def test_a_pipelines_ranks_have_a_models_parameters_between_them(
    shape: ModelShape, dense_layers: int, ranks: int, schedule: Schedule
) -> None:
    """Whatever layers have no experts: the first stages' are fewer parameters, and the others' are more."""
    shape = dataclasses.replace(shape, tied_embeddings=False, dense_layers=dense_layers if shape.experts else 0)
    layout = Layout(library="trainyard", engine="torch", pipeline=ranks, schedule=schedule, num_micro_batches=8)
    stages = [stage_at(shape, layout, place) for place in range(ranks)]
    found = [stage_params(part_of(shape, layout, stage), layout, stage) for stage in stages]
    assert sum(stage.dense_layers for stage in stages) == shape.dense_layers
    final_norm = shape.final_norm * shape.norm_params  # which no stage is reckoned to have
    assert math.isclose(sum(each.total for each in found), shape.params - final_norm, rel_tol=1e-6)
    routed = [stage.layers - stage.dense_layers for stage in stages] if shape.experts else [0] * ranks
    assert [each.expert for each in found] == [count * shape.expert_params for count in routed]


@settings(max_examples=60, deadline=None)
@given(shapes(), layouts())
def test_optimizers_keep_what_their_papers_say(shape: ModelShape, layout: Layout) -> None:
    layout = dataclasses.replace(layout, engine="torch", precision="bf16", offload="none", method="full")
    kept = {
        kind: memory(shape, dataclasses.replace(layout, optimizer=kind)).optimizer
        for kind in ("adamw", "adamw_8bit", "adafactor", "muon", "sgd")
    }
    assert kept["adafactor"] < 0.01 * kept["adamw"]
    assert math.isclose(kept["adamw_8bit"], kept["adamw"] * 2.03125 / 8)
    assert kept["adamw"] / 2 < kept["muon"] < kept["adamw"], "the model's ends keep AdamW's two averages"
    assert math.isclose(kept["sgd"], kept["adamw"] / 2)
    averaged = memory(shape, dataclasses.replace(layout, keeps_average=True)).optimizer
    assert math.isclose(averaged, kept["adamw"] * 1.5)


@settings(max_examples=60, deadline=None)
@given(shapes(), layouts())
def test_a_chunked_loss_stops_growing_with_the_vocabulary_times_the_sequence(shape: ModelShape, layout: Layout) -> None:
    layout = dataclasses.replace(layout, pipeline=1, tensor=1, loss_chunk_tokens=1024)
    lengths = (8192, 16384)
    short, long = (memory(shape, dataclasses.replace(layout, sequence_length=tokens)).logits for tokens in lengths)
    added_hidden = 8192 * layout.micro_batch * shape.hidden * layout.element_bytes
    assert math.isclose(long - short, added_hidden, rel_tol=1e-6)


@settings(max_examples=60, deadline=None)
@given(shapes(), layouts())
def test_weights_that_stay_gathered_cost_memory_and_spare_a_message(shape: ModelShape, layout: Layout) -> None:
    layout = dataclasses.replace(layout, engine="torch", zero_stage=3, pipeline=1)
    kept = dataclasses.replace(layout, keeps_gathered=True)
    assert not_more(memory(shape, layout), memory(shape, kept))
    device, links = gpu("H100"), Fabric(8, 450, 400, EFA)
    if layout.shard_degree > 1:
        assert memory(shape, kept).buffers >= memory(shape, layout).buffers
        dropped_seconds, kept_seconds = (step_time(shape, each, device, links).total for each in (layout, kept))
        assert kept_seconds <= dropped_seconds


@settings(max_examples=60, deadline=None)
@given(shapes(), layouts())
def test_weights_in_the_hosts_memory_free_the_gpu_of_them_alone_and_cost_time(
    shape: ModelShape, layout: Layout
) -> None:
    layout = dataclasses.replace(
        layout, engine="deepspeed", zero_stage=3, shard_degree=layout.data_parallel, pipeline=1, tensor=1, offload="cpu"
    )
    away = dataclasses.replace(layout, offload_parameters="cpu")
    here_memory, away_memory = memory(shape, layout), memory(shape, away)
    assert away_memory.parameters < here_memory.parameters
    assert away_memory.gradients == here_memory.gradients
    device, links = gpu("H100"), Fabric(8, 450, 400, EFA)
    assert step_time(shape, away, device, links).total >= step_time(shape, layout, device, links).total
