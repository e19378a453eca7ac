"""What a step takes, by what a dry run counted and by the formulas; and plans of models that have no formulas."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from trainer.dry_run.trace import trace
from trainer.models.build import outline_model
from trainer.runtime import Runtime
from trainer.strategies import build_strategy
from trainer_testing.agreement import FEW, LINKS, dry_run_cases, steps_of
from trainer_testing.strategy_worker import no_clock
from trainer_testing.tiny import MODEL, rank_batches, tiny_job

from trainyard import planner
from trainyard.cli.app import run
from trainyard.errors import InputError
from trainyard.hardware import gpu
from trainyard.launch import launcher
from trainyard.planner.formulas import formulas_of
from trainyard.planner.muon import muon_flops
from trainyard.planner.optimizer_updates import update_moved_bytes
from trainyard.planner.reading import layout_of_resolved, shape_of
from trainyard.planner.timing import step_time
from trainyard.planner.traced import active_params, traced_flops, traced_step
from trainyard.planner.traced_plan import formulas_of_traces, ranks_to_trace
from trainyard.spec.job import JobSpec
from trainyard.spec.support import DOCUMENT_FAMILIES

REPOSITORY = Path(__file__).resolve().parents[2]
WIDE = {**FEW, "num_hidden_layers": 4, "intermediate_size": 6144}


FURTHER = ("qwen3", "olmo", "phi", "gpt_neox", "starcoder2", "gemma2")


def wide_job(model_type: str, layout: dict[str, int], adapter: str | None = None, **training: Any) -> JobSpec:
    """Four layers, four sequences of 2,048 tokens a micro-batch."""
    cases, model = dry_run_cases(), {"model_type": model_type, **WIDE}
    settings = {"micro_batch_size": 4, "global_batch_size": 4 * layout.get("data_shard", 1), **training}
    if adapter is None:
        job = cases.few_layers(layout, model, **settings)
    else:
        job = cases.adapted(layout, adapter, model, **settings)
    masks = model_type in DOCUMENT_FAMILIES
    return job.model_copy(update={"data": job.data.model_copy(update={"document_masks": masks})})


def seconds(job: JobSpec, world_size: int) -> tuple[float, float]:
    """(by the formulas, by the trace) of a step on H100."""
    reckoned, counted = steps_of(job, world_size=world_size)
    return reckoned.total, counted.total


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gemma3_text", *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)],
)
def test_formulas_and_trace_agree_on_a_steps_time(model_type: str) -> None:
    """Of norms of all kinds, gates or none, rotated or not, and attention that is written out (Gemma 2)."""
    reckoned, counted = seconds(wide_job(model_type, {"data_shard": 8}), 8)
    assert reckoned == pytest.approx(counted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["olmo2", "phi3", "nemotron", "stablelm", "gpt2", "cohere", "qwen2"])
def test_so_they_do_for_further_families(model_type: str) -> None:
    reckoned, counted = seconds(wide_job(model_type, {"data_shard": 8}), 8)
    assert reckoned == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "adapter", "training"),
    [
        ({"data_shard": 8}, None, {"activation_checkpointing": "full"}),
        ({"data_shard": 8}, None, {"activation_checkpointing": "selective"}),
        ({"data_shard": 8}, "lora", {}),
        ({"data_shard": 8}, "qlora", {}),
        ({"data_replicate": 8}, None, {"global_batch_size": 32}),
        pytest.param({"data_shard": 4, "tensor": 2}, None, {"global_batch_size": 64}, marks=pytest.mark.slow),
        pytest.param(
            {"data_shard": 2, "tensor": 2, "pipeline": 2}, None, {"global_batch_size": 32}, marks=pytest.mark.slow
        ),
    ],
    ids=["full", "selective", "lora", "qlora", "ddp", "tensor", "pipeline"],
)
def test_so_they_do_under_other_layouts(layout: dict[str, int], adapter: str | None, training: dict[str, Any]) -> None:
    reckoned, counted = seconds(wide_job("llama", layout, adapter, **training), 8)
    assert reckoned == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("llama", {"data_replicate": 1}),
        ("llama", {"data_replicate": 8}),
        ("llama", {"data_shard": 8}),
        pytest.param("llama", {"data_replicate": 2, "data_shard": 4}, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": 2, "data_shard": 4}, marks=pytest.mark.slow),
        ("llama", {"context": 2, "data_shard": 4}),
        pytest.param("llama", {"tensor": 2, "data_replicate": 4}, marks=pytest.mark.slow),
        pytest.param("gpt_neox", {"data_shard": 8}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"data_replicate": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"data_shard": 8, "expert": 4}, marks=pytest.mark.slow),
    ],
)
def test_muons_update_takes_the_products_that_its_trace_has(model_type: str, layout: dict[str, int]) -> None:
    """Of a rank: an eighth of them where eight share them. Plans had none, and steps a half too short."""
    job = wide_job(model_type, layout, global_batch_size=32, optimizer={"kind": "muon"})
    resolved = planner.resolve(job, world_size=math.prod(layout[name] for name in layout if name != "expert"))
    products = trace(resolved, 0)["work"]["products"]
    counted = sum(
        2.0 * each["rows"] * each["columns"] * each["depth"] * each["count"]
        for each in products
        if each["phase"] == "optimizer"
    )
    shape = shape_of(job)
    assert shape is not None
    assert muon_flops(shape, layout_of_resolved(job, resolved)) == pytest.approx(counted, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["adamw", "adamw_8bit", "adafactor", "sgd", "muon"],
)
@pytest.mark.parametrize("layout", [{"data_replicate": 1}, {"data_shard": 8}], ids=["single", "fsdp"])
def test_updates_move_the_bytes_that_their_trace_has(kind: str, layout: dict[str, int]) -> None:
    """AdamW's were planned at half, of 8 bits at a twentieth, and Adafactor's as if a rank updated its part alone."""
    job = wide_job("llama", layout, global_batch_size=32, optimizer={"kind": kind})
    world_size = max(layout.values())
    resolved = planner.resolve(job, world_size=world_size)
    shape, counted = shape_of(job), trace(resolved, 0)["work"]["moved_bytes"]["optimizer"]
    assert shape is not None
    planned = update_moved_bytes(shape, layout_of_resolved(job, resolved), shape.params / layout.get("data_shard", 1))
    assert planned == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_autocast_has_nothing_to_cast_of_frozen_weights(adapter: str) -> None:
    """They are narrow as they lie; casting each in every pass would be a twelfth of a large model's step."""
    reckoned, counted = seconds(wide_job("llama", {"data_replicate": 8}, adapter, global_batch_size=32), 8)
    assert reckoned == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("model_type", "masked", "plain"),
    [
        ("mistral", {"sliding_window": 1024}, {"sliding_window": None}),
        (
            "gpt2",
            {"attn_pdrop": 0.1},
            {"attn_pdrop": 0.0},
        ),  # whose packed documents take a mask where scores are dropped
    ],
)
def test_masked_attention_takes_as_much_longer_by_the_trace(
    model_type: str, masked: dict[str, Any], plain: dict[str, Any]
) -> None:
    found = []
    for stated in (masked, plain):
        job = wide_job(model_type, {"data_shard": 8}, micro_batch_size=1, global_batch_size=8)
        assert job.model.config is not None
        model = job.model.model_copy(update={"config": job.model.config | stated | {"max_position_embeddings": 8192}})
        data = job.data.model_copy(update={"sequence_length": 8192, "document_masks": model_type == "gpt2"})
        found.append(seconds(job.model_copy(update={"model": model, "data": data}), 8))
    reckoned, counted = (masks - without for masks, without in zip(*found, strict=True))
    assert reckoned > 0.3 * found[1][0]
    assert counted == pytest.approx(reckoned, rel=0.05)


def test_windows_of_packed_documents_are_no_mask_to_a_gpu() -> None:
    """Of a trace on this machine they are one; a GPU's kernel for documents is told them."""
    job = wide_job("mistral", {"data_shard": 8})
    assert job.model.config is not None
    model = job.model.model_copy(update={"config": job.model.config | {"sliding_window": 1024}})
    data = job.data.model_copy(update={"document_masks": True})
    reckoned, counted = seconds(job.model_copy(update={"model": model, "data": data}), 8)
    assert counted == pytest.approx(reckoned, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_images_tower_takes_what_its_trace_says(frozen: bool) -> None:
    """24 layers of 14 small kernels: launching them takes longer than they do, but not than the language model."""
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    model = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **WIDE, "hidden_size": 4096, "num_attention_heads": 32},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, **vision},
    }
    raw = yaml.safe_load((REPOSITORY / "jobs" / "vlm-llava-7b.yaml").read_text())
    raw |= {"model": {"config": model}, "images": {"freeze_vision": frozen}}
    job = JobSpec.model_validate(raw)
    resolved = planner.resolve(job, world_size=8)
    layout = layout_of_resolved(job, resolved)
    counted = traced_step([trace(resolved, 0)], resolved.parallelism, layout, gpu("H100"), LINKS)
    assert formulas_of(job).step(layout, gpu("H100"), LINKS).total == pytest.approx(counted.total, rel=0.15)


def test_a_step_in_fp16_takes_what_one_in_bf16_does() -> None:
    """The CPU widens the loss's factors, which a GPU doesn't: three times the seconds of the head would be counted."""
    wide, narrow = (seconds(wide_job("llama", {"data_shard": 8}, precision=bits), 8) for bits in ("bf16", "fp16"))
    assert narrow == pytest.approx(wide, rel=0.05)


def test_momentum_moves_the_weights_by_kernels_of_many() -> None:
    """ResNet-50 has 161 weights: one after the other, as torch's SGD does it on a CPU, over 900 kernels a step."""
    job = JobSpec.model_validate(yaml.safe_load((REPOSITORY / "jobs" / "resnet50-imagenet.yaml").read_text()))
    assert job.training.optimizer.kind == "sgd"
    counts = trace(planner.resolve(job, world_size=8), 0)["work"]
    # 161 of them make the gradients zero.
    assert counts["kernels"]["optimizer"] < 200
    # Decay, momentum and step are four kernels of two reads and a write each, or one; 16 bytes more in norm and zeros.
    assert counts["moved_bytes"]["optimizer"] / 25_557_032 == pytest.approx(52, abs=4)


def test_a_traces_products_are_those_that_torch_counts() -> None:
    """Of one process: a real step on this machine, by torch's own counter of FLOPs."""
    job = tiny_job("single", 1, precision="fp32")
    eager = job.spec.model.model_copy(update={"attention": "eager"})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"model": eager})})
    alone = Runtime(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), control_group=None)  # type: ignore[arg-type]  # nobody to talk to
    strategy = build_strategy(job, model=outline_model(job, vocab_size=MODEL["vocab_size"]), runtime=alone)
    with FlopCounterMode(display=False) as counter:
        strategy.forward_backward(rank_batches(job, 1, 0), 100, no_clock)
    found = traced_flops([trace(job, 0)], layout_of_resolved(job.spec, job))
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_what_is_computed_again_is_no_work_of_the_model() -> None:
    """Recomputation has its own phase: as many FLOPs are counted, and the forward passes' products are found twice."""
    plain, again = (
        trace(planner.resolve(wide_job("llama", {"data_shard": 8}, activation_checkpointing=kind), world_size=8), 0)
        for kind in ("none", "full")
    )
    layout = layout_of_resolved(
        job := wide_job("llama", {"data_shard": 8}, activation_checkpointing="none"), planner.resolve(job, world_size=8)
    )
    assert traced_flops([again], layout) == traced_flops([plain], layout)
    assert plain["work"]["moved_bytes"]["recompute"] == 0 == plain["work"]["kernels"]["recompute"]
    products = {
        phase: sum(each["count"] for each in again["work"]["products"] if each["phase"] == phase)
        for phase in ("recompute", "forward")
    }
    assert products["recompute"] == 4 * 6, "four layers' products but the last of each, which nobody reads"
    shape = shape_of(job)
    assert shape is not None
    # An embedding's rows are looked up, not multiplied.
    multiplied = shape.params - shape.vocab * shape.hidden
    assert active_params([again], layout, is_frozen=False) == pytest.approx(multiplied, rel=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        {"data_shard": 2, "pipeline": 4},
        {"data_shard": 2, "pipeline": 2, "pipeline_schedule": "zero_bubble"},
    ],
    ids=["four stages", "zero_bubble"],
)
def test_one_stage_of_a_pipeline_has_the_head(layout: dict[str, Any]) -> None:
    """Which of the two traced ranks that is, zero_bubble decides; nothing is computed again."""
    job = wide_job("llama", layout, global_batch_size=32)
    resolved, shape = planner.resolve(job, world_size=8 if layout["pipeline"] == 4 else 4), shape_of(job)
    assert shape is not None
    traces = [trace(resolved, rank) for rank in ranks_to_trace(resolved)]
    found = traced_flops(traces, layout_of_resolved(job, resolved))
    length = job.data.sequence_length
    assert found == pytest.approx(shape.flops_per_token(length) * 32 * length, rel=0.02)
    assert all(each["work"]["kernels"]["recompute"] == 0 for each in traces)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 8])
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ({"pipeline": 2}, "bf16"),
        ({"pipeline": 2}, "fp32"),
        ({"pipeline": 2, "data_replicate": 2}, "bf16"),
        ({"pipeline": 2, "data_shard": 2}, "bf16"),
        ({"pipeline": 2, "tensor": 2}, "bf16"),
        ({"tensor": 2}, "bf16"),
        ({"tensor": 2, "data_replicate": 2}, "bf16"),
        ({"tensor": 2, "data_replicate": 2}, "fp32"),
        ({"tensor": 2, "data_shard": 2}, "bf16"),
        ({"context": 2}, "bf16"),
    ],
)
def test_weights_and_sums_of_gradients_count_as_often_as_they_move(
    layout: dict[str, int], precision: str, number: int
) -> None:
    """In a pipeline weights are gathered once a step, and gradients summed where they are; elsewhere in each pass. Of
    one sequence a micro-batch, passes that counted them otherwise were 29% too long to 10% too short."""
    ranks = math.prod(layout.values())
    replicas = layout.get("data_shard", 1) * layout.get("data_replicate", 1)
    asked = {"micro_batch_size": 1, "global_batch_size": number * replicas, "precision": precision}
    job = wide_job("llama", layout, **asked)
    resolved, shape = planner.resolve(job, world_size=ranks), shape_of(job)
    there, stages = layout_of_resolved(job, resolved), layout.get("pipeline", 1)
    assert shape is not None
    traces = [trace(resolved, rank * (ranks // stages)) for rank in range(stages)]
    counted = traced_step(traces, resolved.parallelism, there, gpu("H100"), LINKS)
    reckoned = step_time(shape, there, gpu("H100"), LINKS)
    assert reckoned.total == pytest.approx(counted.total, rel=0.05)
    assert reckoned.forward + reckoned.backward == pytest.approx(counted.forward + counted.backward, rel=0.05)


GEMMA = {
    **{"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
    **{"intermediate_size": 8192, "vocab_size": 32000, "hidden_size_per_layer_input": 0, "num_hidden_layers": 10},
    **{"layer_types": [*["sliding_attention"] * 6, *["full_attention"] * 4], "pad_token_id": 0},
}
DEEPSEEK = {
    **{"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 12288},
    **{"moe_intermediate_size": 1024, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    **{"first_k_dense_replace": 2, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64},
    **{"qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 32000, "num_hidden_layers": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "model", "pipeline"),
    [
        ("llama", {**WIDE, "num_hidden_layers": 5}, 2),
        ("llama", {**WIDE, "num_hidden_layers": 6}, 4),
        ("gemma4_text", GEMMA, 4),
        ("deepseek_v3", DEEPSEEK, 3),
    ],
)
def test_a_pipelines_stages_take_what_their_own_layers_do(
    model_type: str, model: dict[str, Any], pipeline: int
) -> None:
    """Of which some have a layer more, or others than the next, and all are traced."""
    asked = {"micro_batch_size": 4, "global_batch_size": 32, "activation_checkpointing": "full"}
    job = dry_run_cases().few_layers({"pipeline": pipeline}, {"model_type": model_type, **model}, **asked)
    resolved, shape = planner.resolve(job, world_size=pipeline), shape_of(job)
    layout = layout_of_resolved(job, resolved)
    assert shape is not None
    traces = [trace(resolved, rank) for rank in range(pipeline)]
    counted = traced_step(traces, resolved.parallelism, layout, gpu("H100"), LINKS)
    reckoned = step_time(shape, layout, gpu("H100"), LINKS)
    assert reckoned.total == pytest.approx(counted.total, rel=0.05)
    # By both sides' passes, as how a pipeline fills is reckoned once for both (`tests/planner/test_timing.py`).
    assert reckoned.bubble == pytest.approx(counted.bubble, rel=0.08)
    longest = max(counted.forward, counted.backward + counted.recompute) * 0.05
    for one, other in zip((reckoned.forward, reckoned.backward), (counted.forward, counted.backward), strict=True):
        assert one == pytest.approx(other, abs=longest)


APERTUS = {
    "model_type": "apertus",
    **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "vocab_size": 2048},
}
"""A family that has no formulas."""


def job_file(folder: Path, **changes: Any) -> Path:
    job = {
        "name": "apertus",
        "model": {"config": APERTUS},
        "data": {"train": [{"path": "s3://acme-data/text", "format": "tokens"}], "sequence_length": 512},
        "training": {"steps": 1000, "global_batch_size": 32, "learning_rate": 1e-4, "precision": "bf16"},
        "parallelism": {"data_shard": 8},
        "compute": {"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": 1},
        "tenant": "acme",
    } | changes
    (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
    return folder / "job.yaml"


def test_a_model_without_formulas_is_planned_by_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path)
    assert run(["plan", str(path)]) == 2
    assert "trainyard plan JOB --dry-run plans it" in capsys.readouterr().err
    assert run(["plan", str(path), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (chosen,) = plan["configurations"]
    traced = plan["dry_run"]
    assert plan["params"] == traced["params"] > 2 * 512 * 2048
    assert chosen["fits"] is True
    assert chosen["memory"]["parameters_gib"] * 2**30 == traced["memory_bytes"]["parameters"]
    assert chosen["time"]["step_seconds"] == pytest.approx(sum(traced["seconds_of_step"]["traced"].values()))
    assert traced["seconds_of_step"]["formulas"] is None
    assert plan["cost"]["planned_usd"] > 0
    assert any("by a dry run" in note for note in plan["notes"])


def test_a_launch_holds_such_a_plan_against_its_limits(tmp_path: Path) -> None:
    from trainyard.spec.job import load_job

    said: list[str] = []
    tight = load_job(job_file(tmp_path, budget={"max_usd": 0.01}), [])
    plan, refusals = launcher.planned(tight, say=said.append)
    assert "unplanned" not in plan and "tracing a step, as there are no formulas for this model" in said
    assert any("0.01" in refusal for refusal in refusals), refusals


def test_a_launch_goes_on_where_a_trace_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainyard.spec.job import load_job

    monkeypatch.setattr(launcher, "TRACE_SECONDS", 0.01)
    said: list[str] = []
    plan, refusals = launcher.planned(load_job(job_file(tmp_path), []), say=said.append)
    assert refusals == [] and "0.01 s" in plan["unplanned"]
    assert any("nothing holds memory, hours and dollars" in line for line in said)


def test_under_deepspeed_a_trace_is_no_plan() -> None:
    job = wide_job("llama", {"data_shard": 8})
    zero = job.model_copy(
        update={
            "parallelism": job.parallelism.model_copy(  # type: ignore[union-attr]  # stated
                update={"engine": "deepspeed", "data_replicate": 8, "data_shard": 1, "zero_stage": 2}
            )
        }
    )
    with pytest.raises(InputError, match="plan it with engine torch"):
        formulas_of_traces(zero, planner.resolve(zero, world_size=8), [])
