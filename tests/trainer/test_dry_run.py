"""The dry run against what it stands for: real steps on this machine, and the planner's closed forms.

Its messages are compared with those of real ranks in test_communication_volume.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from trainer.dry_run import kernels, trace
from trainer.models import norms
from trainer.models.build import outline_model
from trainer.runtime import Runtime
from trainer.strategies import build_strategy
from trainer_testing.families import FAMILIES
from trainer_testing.strategy_worker import no_clock
from trainer_testing.tiny import MODEL, rank_batches, tiny_job

from trainyard.cli.dry_running import planned_bytes
from trainyard.errors import InputError, JobFailedError
from trainyard.planner import resolve
from trainyard.spec.job import ResolvedJob, load_job

JOBS = Path(__file__).parents[2] / "jobs"

ALONE = Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), control_group=None)  # type: ignore[arg-type]  # nobody to talk to


def traced(job: ResolvedJob, rank: int = 0) -> dict[str, Any]:
    return trace.trace(job, rank)


def measured_bytes(job: ResolvedJob) -> int:
    """The peak of one real step of a world of one, by torch's own profiler, above what is held before it."""
    strategy = build_strategy(job, model=outline_model(job, vocab_size=MODEL["vocab_size"]), runtime=ALONE)
    batches = rank_batches(job, 1, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        strategy.forward_backward(batches, 100, no_clock)
        strategy.optimizer_step(1e-3)
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    assert changes, "the profiler noted no allocation"
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


EAGER = {"attention": "eager"}


def eager(job: ResolvedJob) -> ResolvedJob:
    """Attention that a CPU computes as it is written: what a GPU's kernel keeps can't be measured here."""
    model = job.spec.model.model_copy(update=EAGER)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})


@pytest.mark.parametrize(
    ("activation_checkpointing", "training"),
    [("none", {"precision": "bf16"}), ("full", {})],
)
def test_the_trace_of_a_world_of_one_is_what_the_profiler_measures(
    activation_checkpointing: str, training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for norms, whose kernel a CPU hasn't: measured is what stands in for it."""
    monkeypatch.setattr(norms, "rms_norm", kernels._rms_norm)
    job = eager(tiny_job("single", 1, activation_checkpointing=activation_checkpointing, **training))
    found = traced(job)
    before = found["memory_bytes"]["parameters"] + found["memory_bytes"]["optimizer"]
    assert found["peak_bytes"] - before == pytest.approx(measured_bytes(job), rel=0.02)


@pytest.mark.parametrize(
    ("schedule", "num_layers", "count", "few"), [("1f1b", 2, 8, [4, 6]), ("interleaved_1f1b", 4, 10, [6, 8])]
)
def test_a_long_step_continues_what_two_short_ones_show(
    schedule: str, num_layers: int, count: int, few: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"pipeline": 2, "pipeline_schedule": schedule}
    model = MODEL | {"num_hidden_layers": num_layers}
    job = tiny_job("product", 2, model=model, parallelism=layout, micro_batch_size=1, global_batch_size=count)
    continued = traced(job)
    assert continued["micro_batches"] == {"a_step": count, "traced": few}
    monkeypatch.setattr(trace, "LONGEST_WHOLE", 100)
    monkeypatch.setattr(trace, "LONGEST_OF_TWO_STAGES", 100)
    whole = traced(job)
    assert whole["micro_batches"] == {"a_step": count, "traced": [count]}
    for name in ("memory_bytes", "messages", "gradients_bytes", "peak_phase"):
        assert continued[name] == whole[name], name


def test_any_rank_of_a_grid_can_be_traced() -> None:
    job = tiny_job("product", 8, parallelism={"pipeline": 2, "tensor": 2, "data_shard": 2}, micro_batch_size=2)
    found = {rank: traced(job, rank) for rank in (0, 3, 7)}
    assert [one["place"]["pipeline"] for one in found.values()] == [0, 0, 1]
    kinds = {(message["name"], message["axis"]) for message in found[0]["messages"]}
    assert {
        ("send", "pipeline"),
        ("receive", "pipeline"),
        ("all_gather", "tensor"),
        ("reduce_scatter", "data_shard"),
    } <= kinds
    assert found[0]["memory_bytes"] == found[3]["memory_bytes"]
    assert found[0]["memory_bytes"] != found[7]["memory_bytes"]


@pytest.mark.parametrize(
    ("name", "parallelism"),
    [("Mixtral", {"data_shard": 4, "expert": 2})],
)
def test_experts_get_even_shares_of_tokens(name: str, parallelism: dict[str, Any]) -> None:
    job = tiny_job("product", 4, model=FAMILIES[name], parallelism=parallelism)
    messages = {(message["name"], message["axis"], message["dtype"]): message for message in traced(job)["messages"]}
    sizes = FAMILIES[name]
    rows = 24 * 2 * sizes["num_experts_per_tok"] // parallelism.get("tensor", 1)
    exchange = messages["all_to_all", "data_shard", "float32"]
    layers, count = sizes["num_hidden_layers"], job.gradient_accumulation_steps
    assert exchange["count"] == 4 * layers * count
    assert exchange["bytes"] == 4 * layers * count * rows * sizes["hidden_size"] * 4


@pytest.mark.parametrize(
    ("parallelism", "rank", "message"),
    [
        ({"data_shard": 2}, 2, "--rank 2: the job has ranks 0 to 1"),
        ({"tensor": 4}, 0, "parallelism.tensor: 4 does not divide the model's num_key_value_heads"),
        ({"pipeline": 4}, 0, "1f1b makes 4 stages, but the model has 2 layers"),
    ],
)
def test_what_a_launch_would_refuse_is_one_line(parallelism: dict[str, Any], rank: int, message: str) -> None:
    world = max(parallelism.values())
    with pytest.raises(InputError, match=message) as caught:
        traced(tiny_job("product", world, parallelism=parallelism), rank)
    assert "\n" not in str(caught.value)


def test_what_a_launch_would_end_in_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("shapes\ndon't fit")

    monkeypatch.setattr(trace, "build", broken)
    with pytest.raises(JobFailedError, match="rank 1 of 2: RuntimeError: shapes don't fit"):
        traced(tiny_job("fsdp", 2), 1)


def test_ddp_sums_its_bucket_once_a_step() -> None:
    found = traced(tiny_job("ddp", 2), 1)
    weights = found["gradients_bytes"]
    (message,) = found["messages"]
    assert message == {
        "name": "all_reduce",
        "axis": "data_replicate",
        "ranks": 2,
        "dtype": "float32",
        "purpose": "pass",
        "count": 1,
        "bytes": weights,
    }


def test_without_a_tokenizer_both_count_bytes() -> None:
    spec = load_job(JOBS / "tiny.yaml")
    job = resolve(spec, world_size=1)
    planned, found = planned_bytes(spec, job, 0), traced(job)
    assert planned is not None
    assert planned["parameters"] == pytest.approx(found["memory_bytes"]["parameters"], rel=0.03)


@pytest.mark.parametrize("kind", ["muon", "adafactor", "adamw_8bit"])
def test_optimizers_that_ask_for_their_count_of_steps_are_traced(kind: str) -> None:
    found = traced(tiny_job("fsdp", 2, optimizer={"kind": kind}, global_batch_size=4))
    assert found["memory_bytes"]["optimizer"] > 0


def test_what_a_copy_keeps_until_all_are_summed_is_on_its_way_and_no_activation() -> None:
    alone, one_of_two = (
        tiny_job(name, world, global_batch_size=4 * world) for name, world in (("fsdp", 2), ("hsdp", 4))
    )
    assert alone.gradient_accumulation_steps == one_of_two.gradient_accumulation_steps == 2
    moving = [sum(traced(job)["memory_bytes"][name] for name in trace.OF_THE_MODEL) for job in (alone, one_of_two)]
    assert moving[0] == moving[1]


@pytest.mark.parametrize("attention", ["varlen", "flash_attention_3"])
def test_attention_of_gpus_is_traced_here(attention: str) -> None:
    job = tiny_job("fsdp", 2, global_batch_size=4, precision="bf16")
    model = job.spec.model.model_copy(update={"attention": attention})
    asked = job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})
    assert traced(asked)["memory_bytes"] == traced(job)["memory_bytes"]


def test_fp16_of_deepspeed_is_refused_as_what_this_machine_has_not() -> None:
    with pytest.raises(InputError, match=r"^--dry-run: training.precision: fp16 is what DeepSpeed has not"):
        traced(tiny_job("zero2", 2, precision="fp16"))


def test_of_deepspeed_the_model_is_traced_and_no_more() -> None:
    found = traced(tiny_job("zero2", 2))
    assert found["peak_bytes"] is None and found["messages"] is None
    assert {name for name, value in found["memory_bytes"].items() if value is None} == {
        "parameters",
        "gradients",
        "optimizer",
        "buffers",
    }
    assert found["memory_bytes"]["activations"] > 0
    assert "engine: deepspeed" in found["notes"][0]
