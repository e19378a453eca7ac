"""What the planner proposes, the trainer takes: every layout of a search passes the trainer's own checks."""

from typing import Any

import pytest
from trainer.strategies import check_supported
from trainer_testing.families import FAMILIES

from trainyard.errors import InputError
from trainyard.planner.candidates import Rules, layouts
from trainyard.planner.reading import Machines, machines_of, shape_of
from trainyard.planner.resolve import levels, micro_batch_choices, sequences_per_rank
from trainyard.spec.base import parse
from trainyard.spec.job import JobSpec, ResolvedJob
from trainyard.spec.support import EXPERT_FAMILIES

POSITIONS = ("max_position_embeddings", "n_positions")
KINDS = sorted({str(settings["model_type"]) for settings in FAMILIES.values()})


def job_of(model: dict[str, Any], **sections: Any) -> JobSpec:
    return parse(
        JobSpec,
        {
            "name": "test",
            # As many positions as the sequence has.
            "model": {"config": {key: value for key, value in model.items() if key not in POSITIONS}},
            "data": {"train": [{"path": "x", "format": "text"}], "sequence_length": 8192, "document_masks": False},
            "training": {"steps": 10, "global_batch_size": 64, "learning_rate": 1e-3, **sections},
            "compute": {"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": 1},
        },
        "job",
    )


def resolved(job: JobSpec, layout: Any, machines: Machines, *, size: int, count: int, recompute: Any) -> ResolvedJob:
    return ResolvedJob(
        spec=job.model_copy(update={"parallelism": layout}),
        parallelism=layout,
        num_hosts=machines.num_hosts,
        processes_per_host=machines.processes_per_host,
        steps=10,
        micro_batch_size=size,
        gradient_accumulation_steps=count,
        activation_checkpointing=recompute,
        learning_rate=1e-3,
    )


MUON = {"optimizer": {"kind": "muon"}}
OTHERS = ("phi3", "gemma2", "glm4_moe", "gpt_oss", "llama4_text", "qwen2_moe")
CASES = [*((kind, {}) for kind in (*KINDS, *OTHERS)), ("llama", MUON)]


@pytest.mark.parametrize(("model_type", "sections"), CASES, ids=lambda item: item if isinstance(item, str) else "")
def test_the_trainer_takes_every_layout_that_is_proposed(model_type: str, sections: dict[str, Any]) -> None:
    stated = next(
        (dict(item) for item in FAMILIES.values() if item["model_type"] == model_type), {"model_type": model_type}
    )
    job = job_of(stated, **sections)
    shape, machines = shape_of(job), machines_of(job)
    assert shape is not None
    rules = Rules(job, shape)
    proposed = 0
    found = layouts(job, machines, shape, rules)
    assert any(layout.expert > 1 for layout in found) == (model_type in EXPERT_FAMILIES)
    for layout in found:
        per_rank = sequences_per_rank(job, layout)
        for size in micro_batch_choices(job, layout)[-1:]:
            for recompute in levels(job, layout):
                count = per_rank // size
                if not rules.accepts_batch(layout, micro_batch=size, num_micro_batches=count, recompute=recompute):
                    continue
                asked = resolved(job, layout, machines, size=size, count=count, recompute=recompute)
                try:
                    check_supported(asked, device_type="cuda")
                except InputError as error:
                    pytest.fail(f"{layout}: {error}")
                proposed += 1
    assert proposed > 5
