"""What is odd about a job and is told of; nothing of what is as meant."""

import re
from pathlib import Path
from typing import Any

import pytest

from trainyard import planner
from trainyard.launch.launcher import planned
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, load_job
from trainyard.spec.notes import notes_on

JOBS = Path(__file__).resolve().parents[2] / "jobs"
STEPS = 40
TEXT = {"path": "x", "format": "text"}


def job(**sections: dict[str, Any]) -> JobSpec:
    """tiny.yaml's model, without its validation, schedule and saves."""
    training = {"steps": STEPS, "global_batch_size": 16, "learning_rate": 1e-3} | sections.pop("training", {})
    data = {"train": [TEXT], "sequence_length": 64} | sections.pop("data", {})
    model = {"config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}}
    return parse(JobSpec, {"name": "x", "model": model, "data": data, "training": training, **sections}, "job")


SEEN = {"validation": [TEXT]}
NAMED = {"validation": [TEXT | {"name": "code", "every_steps": 41}]}
MIXTRAL = {"model_type": "mixtral", "num_experts_per_tok": 1}
BEST = {"keep_best": {"metric": "validation_loss"}}

ODD: list[tuple[dict[str, Any], str]] = [
    ({"training": {"schedule": {"warmup_steps": 40}}}, "40 is all of the job's steps, .* kind: cosine never lowers it"),
    ({"training": {"schedule": {"kind": "constant", "warmup_steps": 40}}}, "reaches the peak in the last one$"),
    ({"training": {"schedule": {"warmup_steps": 80}}}, "more than the job's 40 steps, .* ends at 50% of the peak"),
    (
        {"training": {"schedule": {"kind": "wsd", "warmup_steps": 20, "decay_fraction": 0.6}}},
        "decay_fraction: 0.6 would lower the learning rate from step 16 of 40 on, and warm-up ends at 20",
    ),
    ({"training": {"schedule": {"kind": "constant", "final_fraction": 0.1}}}, "final_fraction: 0.1 changes nothing"),
    ({"training": {"schedule": {"decay_fraction": 0.5}}}, "decay_fraction: 0.5 changes nothing with kind: cosine"),
    ({"training": {"optimizer": {"momentum": 0.5}}}, "momentum: 0.5 changes nothing with kind: adamw: it is sgd's"),
    ({"training": {"optimizer": {"nesterov": True}}}, "nesterov: true changes nothing with kind: adamw"),
    ({"training": {"optimizer": {"kind": "sgd", "betas": [0.8, 0.9]}}}, r"betas: \[0.8, 0.9\] changes nothing"),
    ({"training": {"optimizer": {"kind": "adafactor", "eps": 1e-6}}}, "eps: 1e-06 changes nothing"),
    ({"training": {"max_skips": 2}}, "max_skips: 2 changes nothing with on_anomaly: stop"),
    ({"training": {"validation_every_steps": 5}}, "validation_every_steps: 5 changes nothing without a source"),
    ({"data": SEEN, "training": {"validation_every_steps": 41}}, "41 is more than the job's 40 steps: it is validated"),
    ({"data": NAMED}, "data.validation, set code: every_steps 41 is more than the job's 40 steps"),
    ({"checkpoint": {"every_steps": 41, "every_minutes": None}}, "every_steps: 41 .*, and every_minutes is null"),
    ({"checkpoint": {"every_steps": 10, "keep_every_steps": 50}}, "keep_every_steps: 50 .*: none stays for good"),
    ({"checkpoint": {"keep_every_steps": 10}}, "keep_every_steps: 10 keeps what happens to be saved at such a step"),
    ({"checkpoint": {"every_steps": 4, "keep_every_steps": 6}}, "6 is no multiple .* the saves of every 12 steps"),
    ({"data": SEEN, "checkpoint": BEST}, "validation_loss is measured after the last step alone"),
    ({"training": {"optimizer": {"average_decay": 0.0}}}, "average_decay: 0 keeps the weights as they are a second"),
    (
        {"training": {"optimizer": {"average_decay": 0.999}}},
        "0.999 over 40 steps leaves an average that is 96% .*: 0.9",
    ),
    (
        {"model": {"config": {"model_type": "mixtral", "num_experts_per_tok": 1}}},
        "num_experts_per_tok: 1 where mixtral makes .* stays as it began; choose 2$",
    ),
    (
        {"model": {"config": MIXTRAL | {"output_router_logits": True, "router_aux_loss_coef": 0.0}}},
        "num_experts_per_tok: 1 where mixtral makes",
    ),
    (
        {"model": {"config": MIXTRAL | {"model_type": "deepseek_v3", "output_router_logits": True}}},
        "num_experts_per_tok: 1 where deepseek_v3",
    ),
    (
        {"model": {"config": {"model_type": "deepseek_v3", "num_experts_per_tok": 1}}},
        "num_experts_per_tok: 1 where deepseek_v3 .*; choose 2, or norm_topk_prob: false$",
    ),
]

PLAIN: list[dict[str, Any]] = [
    {},
    {"training": {"schedule": {"warmup_steps": 39}}},
    {"training": {"steps": 1, "schedule": {"warmup_steps": 1}}},
    {"training": {"schedule": {"kind": "wsd", "warmup_steps": 32}}},
    {"training": {"schedule": {"kind": "wsd", "decay_fraction": 0.5, "final_fraction": 0.1}}},
    {"training": {"optimizer": {"kind": "sgd", "momentum": 0.5, "nesterov": True}}},
    {"training": {"optimizer": {"betas": [0.8, 0.9], "eps": 1e-6, "average_decay": 0.98}}},
    {"training": {"on_anomaly": "skip", "max_skips": 2}},
    {"data": SEEN, "training": {"validation_every_steps": 40, "validation_batches": 2}, "checkpoint": BEST},
    {"checkpoint": {"every_steps": 41}},
    {"checkpoint": {"every_steps": 10, "keep_every_steps": 20}},
    {"checkpoint": {"keep_best": {"metric": "loss"}}},
    {"model": {"config": {"model_type": "mixtral", "num_experts_per_tok": 1, "output_router_logits": True}}},
    {"model": {"config": {"model_type": "mixtral", "num_experts_per_tok": 2}}},
    {"model": {"config": {"model_type": "qwen3_moe", "num_experts_per_tok": 1}}},
    {"model": {"config": {"model_type": "deepseek_v3", "num_experts_per_tok": 1, "norm_topk_prob": False}}},
]


@pytest.mark.parametrize(("sections", "told"), ODD, ids=lambda value: str(value)[:60])
def test_what_is_odd_is_told_in_one_line(sections: dict[str, Any], told: str) -> None:
    (note,) = notes_on(job(**sections), STEPS)
    assert "\n" not in note
    assert re.search(told, note), note


@pytest.mark.parametrize("sections", PLAIN, ids=str)
def test_what_is_as_meant_is_not(sections: dict[str, Any]) -> None:
    spec = job(**sections)
    assert notes_on(spec, spec.training.steps) == ()


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_example_is_odd(path: Path) -> None:
    spec = load_job(path)
    assert notes_on(spec, planner.resolve(spec, world_size=None).steps) == ()


def test_of_a_job_in_epochs_what_needs_no_steps_is_told() -> None:
    training = {"steps": None, "epochs": 1.0, "max_skips": 2, "schedule": {"warmup_steps": 10**6}}
    (note,) = notes_on(job(training=training), None)
    assert note.startswith("training.max_skips")


def test_a_launch_warns_and_a_plan_notes_it() -> None:
    said: list[str] = []
    spec = job(training={"schedule": {"warmup_steps": 40}})
    planned(spec, world_size=2, is_on_this_machine=True, say=said.append)
    assert [line for line in said if line.startswith("warning: training.schedule.warmup_steps: 40 is all of")]
    assert any("40 is all of the job's steps" in note for note in planner.plan(spec).notes)


def test_an_adapters_rank_beyond_its_models_widths_is_told_before_anything_is_spent() -> None:
    """The trainer alone told of it, on machines that were paid for."""
    adapter = {"kind": "lora", "rank": 129, "targets": ["q_proj", "v_proj"]}
    spec = job(model={"source": "Qwen/Qwen2.5-0.5B", "config": None, "adapter": adapter})
    told = "model.adapter.rank: 129 is more than the width of v_proj, 128, and what is added"
    said: list[str] = []
    planned(spec, world_size=2, is_on_this_machine=True, say=said.append)
    assert [line for line in said if line.startswith(f"warning: {told}")]
    assert [note for note in planner.plan(spec).notes if note.startswith(told)]
    fitting = job(model={"source": "Qwen/Qwen2.5-0.5B", "config": None, "adapter": adapter | {"rank": 128}})
    assert not [note for note in planner.plan(fitting).notes if "adapter" in note]
