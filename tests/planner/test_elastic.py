"""A job on fewer or more instances: the same batch, or its share of it; layouts that follow; limits that hold."""

import math
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner import plan, resolve, search
from trainyard.planner.elastic import on_hosts, smaller
from trainyard.planner.resolve import spread
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ParallelismSpec


def job(
    num_instances: int = 4, *, elastic: dict[str, Any] | None = None, layout: Any = "auto", **training: Any
) -> JobSpec:
    """A small model on machines of one GPU; `elastic` beside limits of 1 to 4."""
    content = {
        "name": "elastic",
        "tenant": "acme",
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 512,
            }
        },
        "data": {"train": [{"path": "tenant://train", "format": "text"}], "sequence_length": 64},
        "training": {"steps": 100, "global_batch_size": 16, "learning_rate": 1e-3} | training,
        "parallelism": layout,
        "recovery": {"elastic": {"min_instances": 1, "max_instances": 4} | (elastic or {})},
        "compute": {"backend": "sagemaker", "instance_type": "ml.p5.4xlarge", "instance_count": num_instances},
    }
    return parse(JobSpec, content, "job")


def test_fewer_instances_accumulate_more_and_keep_batch_steps_and_rate() -> None:
    whole = resolve(job(micro_batch_size=2))
    for count in (1, 2):
        part = on_hosts(job(micro_batch_size=2), count)
        assert part.num_hosts == part.spec.compute.instance_count == count
        assert part.gradient_accumulation_steps == 4 // count * whole.gradient_accumulation_steps
        assert (part.steps, part.learning_rate) == (whole.steps, whole.learning_rate)
        assert part.spec.training == whole.spec.training and part.spec.global_batch_size == 16
    with pytest.raises(InputError, match="global_batch_size 16: is not divisible by the 3 data-parallel ranks"):
        on_hosts(job(), 3)


def test_of_what_was_started_on_each_host_all_count() -> None:
    """Where it isn't the type's number of GPUs: processes of a cluster's task, or of one machine's emulated hosts."""
    for num_hosts, each in ((2, 2), (1, 4), (2, 1), (4, 4)):
        part = on_hosts(job(), num_hosts, processes_per_host=each)
        assert (part.num_hosts, part.processes_per_host) == (num_hosts, each)
        assert part.parallelism.world_size == part.world_size == num_hosts * each
        assert part.gradient_accumulation_steps * part.micro_batch_size * num_hosts * each == 16


@pytest.mark.parametrize(
    ("training", "rate"),
    [
        ({}, 1e-3 / math.sqrt(2)),
        ({"optimizer": {"kind": "sgd"}}, 5e-4),
        ({"base_batch_size": 16}, 5e-4),
        ({"base_batch_size": 8, "optimizer": {"kind": "sgd"}}, 1e-3),
    ],
)
def test_an_adapted_batch_takes_its_rate_and_its_steps_with_it(training: dict[str, Any], rate: float) -> None:
    half = on_hosts(job(elastic={"batch": "adapt"}, **training), 2)
    assert (half.spec.global_batch_size, half.steps) == (8, 200)
    assert half.learning_rate == pytest.approx(rate, rel=1e-12)
    assert half.gradient_accumulation_steps * half.micro_batch_size * 2 == 8
    assert half.spec.training.global_batch_size == 16, "what is stated stays"
    whole = on_hosts(job(2, elastic={"batch": "adapt"}, **training), 4)
    assert (whole.spec.global_batch_size, whole.steps) == (16, 100)


def test_an_adapted_batch_covers_the_same_samples() -> None:
    tokens = job(elastic={"batch": "adapt"}, steps=None, tokens=99 * 16 * 64 + 1)
    assert [on_hosts(tokens, count).steps for count in (4, 2, 1)] == [100, 200, 400]
    half, whole = plan(tokens.on_instances(2, "test")), plan(tokens)
    assert half.tokens == whole.tokens == 100 * 16 * 64
    for one in (half, whole):
        assert one.cost is not None and one.cost.planned_usd is not None
        assert one.cost.usd_per_million_tokens == pytest.approx(one.cost.planned_usd / one.tokens * 1e6)


@pytest.mark.parametrize(
    ("stated", "world_size", "expected"),
    [
        ({"data_replicate": 4}, 2, {"data_replicate": 2}),
        ({"data_replicate": 2, "data_shard": 8}, 8, {"data_replicate": 1, "data_shard": 8}),
        ({"data_shard": 16}, 8, {"data_shard": 8}),
        ({"data_shard": 8}, 16, {"data_replicate": 2, "data_shard": 8}),
        ({"data_shard": 4, "tensor": 2, "pipeline": 2}, 8, {"data_shard": 2, "tensor": 2, "pipeline": 2}),
        ({"engine": "deepspeed", "data_replicate": 4, "zero_stage": 2}, 1, {"engine": "deepspeed", "zero_stage": 2}),
        # What can't be: half a pipeline, experts that no longer divide the shards.
        ({"pipeline": 4}, 2, {"pipeline": 4}),
        ({"data_shard": 8, "expert": 8}, 4, {"data_shard": 8, "expert": 8}),
    ],
)
def test_a_stated_layout_has_fewer_copies_then_fewer_shards(
    stated: dict[str, Any], world_size: int, expected: dict[str, Any]
) -> None:
    assert spread(ParallelismSpec(**stated), world_size) == ParallelismSpec(**expected)


def test_without_limits_a_stated_layout_is_what_it_says() -> None:
    stated = job(2, layout={"data_replicate": 4})
    assert resolve(stated).parallelism.data_replicate == 2
    recovery = stated.recovery.model_copy(update={"elastic": None})
    with pytest.raises(InputError, match="make the two equal"):
        resolve(stated.model_copy(update={"recovery": recovery}))


def test_without_capacity_it_halves_and_leaves_out_what_cannot_run() -> None:
    assert [one.num_hosts for one in smaller(job())] == [2, 1]
    assert [one.num_hosts for one in smaller(job(3, elastic={"max_instances": 3}, global_batch_size=12))] == [1]
    # Three of four divide a batch of 12; one is below the limit.
    assert [one.num_hosts for one in smaller(job(global_batch_size=12, elastic={"min_instances": 3}))] == [3]
    assert smaller(job(elastic={"min_instances": 4})) == ()
    with pytest.raises(InputError, match=r"min_instances 3: no number of instances from 3 to 3 can run this job: .*16"):
        smaller(job(elastic={"min_instances": 3}))


def test_what_does_not_fit_fewer_is_none_of_them() -> None:
    # 8 billion weights with their moments: 16 GPUs hold them, 8 don't.
    content = job(8, elastic={"min_instances": 1, "max_instances": 8}, layout={"data_shard": 8}).model_dump(mode="json")
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    content["model"]["config"] |= large | {"num_key_value_heads": 8, "vocab_size": 128256}
    assert [one.num_hosts for one in smaller(parse(JobSpec, content, "job"))] == [4, 2]


@pytest.mark.parametrize(
    ("count", "elastic", "training", "words"),
    [
        (5, {}, {}, "compute.instance_count 5: recovery.elastic allows 1 to 4 instances; stay within, or change its"),
        (1, {"min_instances": 2}, {}, "compute.instance_count 1: recovery.elastic allows 2 to 4 instances"),
        (4, {"min_instances": 5}, {}, "min_instances 5: must be at most max_instances 4"),
        (3, {"batch": "adapt"}, {"global_batch_size": 6}, "adapt leaves 3/4 of global_batch_size 6, no whole number"),
        (4, {"batch": "adapt"}, {"on_anomaly": "rollback"}, "can't be had with training.on_anomaly: rollback"),
    ],
)
def test_what_cannot_be_is_one_line(count: int, elastic: dict[str, Any], training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as told:
        job(count, elastic=elastic, **training)
    assert words in str(told.value) and "\n" not in str(told.value)


def test_other_machines_are_compared_by_the_batch_that_the_job_has_now() -> None:
    adapted = job(2, elastic={"batch": "adapt"})
    found = search(adapted, instances=["p5.4xlarge"], max_nodes=8)
    assert found.steps == resolve(adapted).steps == 200
    assert {option.instance_count for option in found.options} == {1, 2, 4, 8}, "beyond its limits too"
    for option in found.options:
        one = option.configuration
        size = one.micro_batch_size * one.gradient_accumulation_steps * one.parallelism.data_parallel_size
        assert size == 8
