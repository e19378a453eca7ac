"""Compiled blocks are planned without what the trainer refuses beside them."""

from collections.abc import Callable
from typing import Any

import pytest

from trainyard.errors import InputError
from trainyard.planner import plan, resolve
from trainyard.spec.job import JobSpec

MakeJob = Callable[..., JobSpec]
COMPILED = {"compile": True}
SMALL = {"instance_type": "ml.p5.48xlarge", "instance_count": 1}


@pytest.mark.parametrize("source", ["llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b"])
def test_no_layout_that_the_trainer_refuses_is_offered(source: str, job: MakeJob) -> None:
    asked = job(model={"source": source}, training=COMPILED)
    offered = plan(asked).configurations
    assert len(offered) > 1
    assert {item.activation_checkpointing for item in offered} <= {"none", "full"}
    cut = [item for item in offered if item.parallelism.tensor > 1]
    assert bool(cut) is (source != "mixtral-8x7b")
    assert {item.activation_checkpointing for item in cut} <= {"none"}


def test_recomputation_of_compiled_blocks_is_full(job: MakeJob) -> None:
    tight: dict[str, Any] = {"global_batch_size": 64, "micro_batch_size": 4}
    data = {"sequence_length": 3072}
    assert resolve(job(compute=SMALL, training=tight, data=data)).activation_checkpointing == "selective"
    assert resolve(job(compute=SMALL, training=tight | COMPILED, data=data)).activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"parallelism": {"engine": "deepspeed", "data_replicate": 128, "zero_stage": 1}},
            "with engine: deepspeed, whose hooks",
        ),
        ({"training": {"activation_checkpointing": "selective"}}, "activation_checkpointing: selective"),
        (
            {"training": {"activation_checkpointing": "full"}, "parallelism": {"tensor": 8, "data_shard": 16}},
            "set activation_checkpointing to none, tensor to 1, or compile to false",
        ),
        (
            {"model": {"source": "mixtral-8x7b"}, "parallelism": {"tensor": 8, "data_shard": 16}},
            r"with parallelism\.tensor: 8 for a mixture of experts",
        ),
    ],
)
def test_what_the_trainer_refuses_is_refused_before_machines_are_rented(
    sections: dict[str, Any], message: str, job: MakeJob
) -> None:
    with pytest.raises(InputError, match=f"training.compile: .*{message}") as caught:
        resolve(job(**{**sections, "training": sections.get("training", {}) | COMPILED}))
    assert "\n" not in str(caught.value)


def test_what_is_compiled_and_recomputed_is_not_cut(job: MakeJob) -> None:
    asked = job(model={"source": "llama-3.1-70b"}, training=COMPILED | {"activation_checkpointing": "full"})
    assert {item.parallelism.tensor for item in plan(asked).configurations} == {1}
