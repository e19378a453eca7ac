"""The router's auxiliary loss where no rank has all layers or all tokens of a micro-batch: equal to one process."""

from dataclasses import replace
from typing import Any

import pytest
from trainer.strategies.parallel import name_of
from trainer_testing.families import FAMILIES
from trainer_testing.mixtures import MIXTURES, mixture
from trainer_testing.strategy_worker import Result, RunRequest, run, worst_relative_error

from trainyard.spec.job import ParallelismSpec
from trainyard.spec.support import CONTEXT_FAMILIES, PIPELINE_FAMILIES, ROUTER_FAMILIES, STAGE_FAMILIES

TOLERANCE = 1e-7
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""Large enough that a loss or a gradient without it is off by a hundredth and more."""


def request(model: dict[str, Any], parallelism: dict[str, Any], **changes: Any) -> RunRequest:
    job = {"model": model, "precision": "fp64", "micro_batch_size": 2, "parallelism": parallelism, **changes}
    name = name_of(ParallelismSpec.model_validate(parallelism))
    return RunRequest(name, last_step=3, job=job, is_packed=changes.get("document_masks", True))


def family(name: str, **changes: Any) -> dict[str, Any]:
    return FAMILIES[name] | BALANCED | changes


FOUR = {"num_hidden_layers": 4}
TWO_RANKS = {
    "stages": request(family("Mixtral"), {"pipeline": 2}),
    "stages, whole logits": request(family("Qwen3-MoE"), {"pipeline": 2}, loss="logits"),
    # Unpacked sequences end in padding, of which one rank has more than the other.
    "tokens": request(family("Mixtral"), {"context": 2}, document_masks=False),
    "matrices": request(family("Qwen3-MoE"), {"tensor": 2}, document_masks=False),
}
SCHEDULES = {
    f"{schedule}, {recompute}": request(
        family("Mixtral", **FOUR), {"pipeline": 2, "pipeline_schedule": schedule}, activation_checkpointing=recompute
    )
    for schedule, recompute in (("gpipe", "none"), ("interleaved_1f1b", "full"), ("zero_bubble", "none"))
}
OTHERS = {
    # A stage without a mixture, whose tally has no gradient.
    "dense first": request(family("Qwen3-MoE", **FOUR, mlp_only_layers=[0, 1]), {"pipeline": 2}),
    "jamba": request(mixture("jamba"), {"pipeline": 2}, document_masks=False),
    "gpt_oss": request(mixture("gpt_oss"), {"pipeline": 2}),
    "one sequence": request(family("Mixtral"), {"context": 2}, micro_batch_size=1),
    "odd length": request(family("Mixtral"), {"tensor": 2}, sequence_length=31, loss="logits"),
}
PRODUCTS = {
    "stages and experts": request(family("Mixtral"), {"pipeline": 2, "data_shard": 2, "expert": 2}),
    "stages and tokens": request(family("Mixtral"), {"pipeline": 2, "context": 2}),
    "stages and matrices": request(family("Qwen3-MoE"), {"pipeline": 2, "tensor": 2}),
    "tokens and matrices": request(family("Mixtral"), {"context": 2, "tensor": 2}),
    "tokens, experts": request(family("Qwen3-MoE"), {"context": 2, "data_shard": 2, "expert": 4}),
}


def alone(asked: RunRequest) -> RunRequest:
    return replace(asked, strategy="single", job=asked.job | {"parallelism": {}})


def errors(world_size: int, cases: dict[str, RunRequest]) -> dict[str, float]:
    references: list[Result] = run(1, [alone(case) for case in cases.values()])
    results = run(world_size, list(cases.values()))
    return {name: worst_relative_error(*both) for name, *both in zip(cases, results, references, strict=True)}


@pytest.mark.slow
def test_it_equals_one_process_on_two_ranks() -> None:
    found = errors(2, TWO_RANKS)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.slow
def test_so_it_does_in_products() -> None:
    found = errors(4, PRODUCTS)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.full
@pytest.mark.parametrize("cases", [SCHEDULES, OTHERS])
def test_so_it_does_under_each_schedule_and_of_odd_kinds(cases: dict[str, RunRequest]) -> None:
    found = errors(2, cases)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.full
@pytest.mark.parametrize("axis", ["pipeline", "context"])
def test_so_does_each_familys(axis: str) -> None:
    """With tensor: test_expert_families."""
    allowed = {"pipeline": PIPELINE_FAMILIES | STAGE_FAMILIES, "context": CONTEXT_FAMILIES}[axis]
    families = sorted(ROUTER_FAMILIES & MIXTURES.keys() & allowed)
    found = errors(2, {name: request(mixture(name), {axis: 2}, document_masks=False) for name in families})
    assert len(found) > 10
    assert max(found.values()) < TOLERANCE, found


def test_without_it_they_differ() -> None:
    """What the others compare is not all cross-entropy."""
    with_it, without = (family("Mixtral", router_aux_loss_coef=factor) for factor in (0.5, 0.0))
    ones = run(1, [alone(request(model, {})) for model in (with_it, without)])
    assert worst_relative_error(ones[0], ones[1]) > 1e-3


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_tally_is_handed_on_unrounded(precision: str) -> None:
    """FSDP casts what a module is given to the type that it computes in; `Stage.forward` asserts that this is not."""
    asked = request(family("Mixtral"), {"pipeline": 2}, precision=precision)
    one, two = run(1, [alone(asked)])[0], run(2, [asked])[0]
    assert worst_relative_error(two, one) < (0.02 if precision == "bf16" else 1e-5)
