"""What DeepSpeed keeps, by the tensors that live in its ranks, against the planner's formulas: 2 of the 4 bytes of its
gradients in bf16 were missing, and with offload they were counted where they aren't."""

from collections.abc import Sequence
from typing import Any

import pytest
from trainer.models.build import outline_model
from trainer.strategies import deepspeed_settings
from trainer.strategies.deepspeed_settings import configuration
from trainer_testing.families import FAMILIES
from trainer_testing.memory_worker import MODEL, Case, measure
from trainer_testing.tiny import tiny_job

from trainyard.planner.deepspeed_buffers import (
    BUCKET_ELEMENTS,
    LIVE_ELEMENTS,
    MOST_OWNERS,
    bucket_elements,
    buffer_bytes,
    flattening_bytes,
    sums_on_all,
)
from trainyard.planner.deepspeed_weights import whole_elements
from trainyard.planner.families import shape_from_config
from trainyard.planner.host_memory import host_memory
from trainyard.planner.layout import Layout
from trainyard.planner.memory import state_bytes, trained_state
from trainyard.planner.reading import zero_sizes_of
from trainyard.planner.stages import StageParams

pytestmark = pytest.mark.slow

WORLD = 2
SLACK = 0.3
"""Bytes a parameter: a layer that stage 3 leaves gathered, padding, a matrix that stage 2 works in."""

SPLIT = {"zero": {"persistence_threshold_elements": 0}}
"""No matrix is so small that stage 3 would keep it whole."""

CASES = [
    *(Case(f"zero{stage}", precision, SPLIT) for precision in ("bf16", "fp32") for stage in (1, 2, 3)),
    *(
        Case(f"zero{stage}", precision, SPLIT | {"offload": "cpu"})
        for precision in ("bf16", "fp32")
        for stage in (2, 3)
    ),
    # At the end: its autocast stays on in a process, and sets the type of other stages' buckets.
    *(Case("zero0", precision) for precision in ("bf16", "fp32")),
]

SMALL: dict[str, Any] = {
    "persistence_threshold_elements": 0,
    "reduce_bucket_elements": 420_000,
    "max_live_elements": 1_050_000,
    "overlap": True,
}
"""Buckets of a tenth of the model, as those of a large one are."""


def _in_buckets(strategy: str, precision: str, reuse: int = 1_050_000, micro_batches: int = 2, **zero: Any) -> Case:
    """Stage 3 keeps what comes again within a `reuse` of elements: by DeepSpeed's own 1e9, all of this small model."""
    own = {"zero_optimization": {"stage3_max_reuse_distance": reuse}} if strategy == "zero3" else {}
    return Case(strategy, precision, {"zero": SMALL | zero, "deepspeed": own}, True, micro_batches)


IN_BUCKETS = [
    *(_in_buckets(f"zero{stage}", precision) for precision in ("bf16", "fp32") for stage in (1, 2, 3)),
    _in_buckets("zero2", "bf16", overlap=False),
    # Little is asked ahead: what comes again soon is kept all the same.
    _in_buckets("zero3", "bf16", reuse=4_200_000, max_live_elements=500_000),
    # Attention's weights, a quarter of the model, stay whole.
    *(_in_buckets("zero3", precision, persistence_threshold_elements=20_000) for precision in ("bf16", "fp32")),
    # What one micro-batch makes is never there whole.
    *(_in_buckets("zero1", precision, micro_batches=1) for precision in ("bf16", "fp32")),
    _in_buckets("zero2", "bf16", micro_batches=1),
]
ALONE = _in_buckets("zero1", "bf16", micro_batches=1, overlap=False)
"""Each bucket is sent where it was filled: what is counted beside it is up to 5% too much, and nothing too little."""
CASES = [*IN_BUCKETS, ALONE, *CASES]


FIRST = (*(_in_buckets(f"zero{stage}", "bf16") for stage in (1, 2, 3)), _in_buckets("zero1", "fp32", micro_batches=1))
"""Each of the others is like one of these but for a setting."""
assert all(case in IN_BUCKETS for case in FIRST)


def _cases(cases: Sequence[Case]) -> pytest.MarkDecorator:
    kept = [pytest.param(case, id=str(case), marks=_marks(case)) for case in cases]
    return pytest.mark.parametrize("case", kept)


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.full] if case in IN_BUCKETS and case not in FIRST else []


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """Of the cases that this run asks for."""
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = [item.callspec.params.get("case") for item in here if hasattr(item, "callspec")]
    cases = [case for case in CASES if case in asked or case == ALONE]
    return dict(zip(map(str, cases), measure(cases, WORLD), strict=True))


def _layout(case: Case) -> Layout:
    asked = tiny_job(case.strategy, WORLD, parallelism=case.parallelism).parallelism
    return Layout(
        engine="deepspeed",
        library="trainyard",
        zero_stage=int(case.strategy[-1]),
        shard_degree=WORLD,
        data_parallel=WORLD,
        precision=case.precision,  # type: ignore[arg-type]
        offload=case.parallelism.get("offload", "none"),
        num_micro_batches=case.micro_batches,
        zero_sizes=zero_sizes_of(asked),
    )


@_cases([case for case in CASES if case not in (*IN_BUCKETS, ALONE)])
def test_a_step_leaves_what_the_formulas_say(measured: dict[str, dict[str, float]], case: Case) -> None:
    found, layout = measured[str(case)], _layout(case)
    weights, gradients, optimizer = trained_state(StageParams(1.0, 0.0), layout)
    if layout.offload == "none":
        assert found["resting"] - found["bucket"] == pytest.approx(
            weights + optimizer + gradients * (layout.zero_stage == 3), abs=SLACK
        )
        # Stage 1's whole gradients are gone when the last backward pass ends, but for a rank's own part.
        if layout.zero_stage != 1:
            assert found["summed"] - found["bucket"] == pytest.approx(weights + gradients + optimizer, abs=SLACK)
        return
    assert optimizer == 0
    assert found["on_device"] == pytest.approx(gradients, abs=0.01)
    assert found["is_on_host"] == (layout.zero_stage == 3)
    if case.precision == "bf16":
        beside = found["summed"] - found["bucket"] - found["on_device"] - weights
        host = host_memory(1.0, 1.0, layout, WORLD, asynchronous_saves=False)
        assert 0.6 < beside / (host.offloaded / WORLD) < 1, "DeepSpeed's own estimate has room for buffers"


@_cases(IN_BUCKETS)
def test_gradients_on_their_way_take_what_the_formulas_say(measured: dict[str, dict[str, float]], case: Case) -> None:
    """DeepSpeed's default buckets of 5e8 elements were counted, which the trainer doesn't have, and no copies."""
    assert measured[str(case)]["most"] == pytest.approx(_expected(case), rel=0.03)


def test_a_bucket_that_is_sent_alone_takes_no_more_than_the_formulas_say(measured: dict[str, dict[str, float]]) -> None:
    assert 0.95 * _expected(ALONE) < measured[str(ALONE)]["most"] < _expected(ALONE)


@_cases([case for case in (*IN_BUCKETS, ALONE) if case.strategy != "zero3"])
def test_the_update_takes_what_the_formulas_say(measured: dict[str, dict[str, float]], case: Case) -> None:
    """Stage 1's own gradients made flat and fp32 were left out: 2 of 12 bytes a parameter of two ranks in bf16."""
    shape, layout = shape_from_config(MODEL), _layout(case)
    each, params = state_bytes(layout), StageParams(shape.params, 0.0)
    sizes = {"weight_bytes": each.parameter, "gradient_bytes": each.gradient}
    making = flattening_bytes(layout, shape.params, shape.params / WORLD, **sizes)
    expected = (sum(trained_state(params, layout)) + making) / shape.params
    assert measured[str(case)]["updating"] == pytest.approx(expected, rel=0.03)


def _expected(case: Case) -> float:
    """Bytes of a parameter at their most, by the formulas."""
    shape, layout = shape_from_config(MODEL), _layout(case)
    each, params = state_bytes(layout), StageParams(shape.params, 0.0)
    buffers = buffer_bytes(shape, layout, shape.params, weight_bytes=each.parameter, gradient_bytes=each.gradient)
    whole = each.parameter * whole_elements(shape, layout)
    return (sum(trained_state(params, layout)) + buffers + whole) / shape.params


@pytest.mark.parametrize(
    ("model", "zero"),
    [
        (MODEL, {}),
        (MODEL, {"reduce_bucket_elements": 7}),
        (FAMILIES["Mixtral"], {}),
        # One matrix has more than a bucket would otherwise.
        (MODEL | {"num_hidden_layers": 1, "vocab_size": 1_000_000}, {}),
        (MODEL | {"hidden_size": 4096, "intermediate_size": 11008}, {}),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 64])
def test_the_trainer_and_the_planner_choose_the_same_buckets(
    model: dict[str, Any], zero: dict[str, Any], num_ranks: int
) -> None:
    layout = {"engine": "deepspeed", "data_replicate": num_ranks, "zero_stage": 2, "zero": zero}
    job = tiny_job("", num_ranks, model=model, parallelism=layout, micro_batch_size=1, global_batch_size=num_ranks)
    sizes = [parameter.numel() for parameter in outline_model(job, vocab_size=model["vocab_size"]).parameters()]
    chosen = configuration(job, sizes, device_type="cuda")["zero_optimization"]
    # As with adapters: few of the weights have gradients, all of which one bucket holds.
    few = configuration(job, sizes, num_trained=1000, device_type="cuda")["zero_optimization"]
    shape = shape_from_config(model)
    ours = Layout(
        engine="deepspeed",
        library="trainyard",
        zero_stage=2,
        data_parallel=num_ranks,
        zero_sizes=zero_sizes_of(job.parallelism),
    )
    assert chosen["reduce_bucket_size"] == bucket_elements(shape, ours)
    assert chosen["use_multi_rank_bucket_allreduce"] == sums_on_all(shape, ours, shape.params)
    assert few["use_multi_rank_bucket_allreduce"] == sums_on_all(shape, ours, 1000)
    assert (BUCKET_ELEMENTS, LIVE_ELEMENTS, MOST_OWNERS) == (
        deepspeed_settings.MAX_BUCKET_ELEMENTS,
        deepspeed_settings.MAX_LIVE_ELEMENTS,
        deepspeed_settings.MAX_OWNERS,
    )
