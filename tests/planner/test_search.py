"""The search: it finds the best of what it looked at, says in words what it rejects, and what it proposes runs."""

import dataclasses
import datetime
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from trainyard.errors import InputError
from trainyard.hardware import PriceBook, instance
from trainyard.planner import plan, resolve, search
from trainyard.planner.candidates import Rules, complexity_of, layouts, split_of
from trainyard.planner.configurations import SAME_SPEED, verdict_of
from trainyard.planner.fastest import Fitting, Starting
from trainyard.planner.layout import Layout
from trainyard.planner.reading import layout_of, machines_of, required_shape
from trainyard.planner.render_search import render_search
from trainyard.planner.results import Option, Search
from trainyard.planner.scaling import scaling
from trainyard.planner.search import _fastest_to_run, fastest, front_of
from trainyard.spec.base import apply_overrides, parse
from trainyard.spec.job import BudgetSpec, JobSpec, ParallelismSpec

MakeJob = Callable[..., JobSpec]
EVERY = ("tensor", "pipeline", "context", "expert")
LLAMA_70B = {"source": "llama-3.1-70b"}
PRICED = "p4d.24xlarge,p4de.24xlarge,p5.48xlarge"


_FOUND: dict[str, Search] = {}


def found_for(job: JobSpec, **options: Any) -> Search:
    """A search of a few machines; the same question is asked once."""
    asked = {"max_nodes": 4, **options}
    key = f"{job.model_dump_json()} {sorted(asked.items())}"
    if key not in _FOUND:
        _FOUND[key] = search(job, instances=PRICED.split(","), **asked)
    return _FOUND[key]


def chosen_of(found: Search) -> Option:
    return next(item for item in found.options if item.chosen)


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2, "pipeline": 4}, {"engine": "deepspeed", "zero_stage": 3}], ids=str
)
@pytest.mark.parametrize("adapter", [None, {"kind": "qlora", "rank": 8, "targets": ["q_proj"]}], ids=["whole", "qlora"])
def test_a_layouts_micro_batches_are_what_the_job_would_give(
    job: MakeJob, layout: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    """Also of what it had reckoned already: nothing of that is of its micro-batches."""
    spec = job(model={**LLAMA_70B, "adapter": adapter} if adapter else LLAMA_70B)
    parallelism = ParallelismSpec.model_validate(
        {"data_shard": 8, **({"data_shard": 1} if "engine" in layout else {}), **layout}
    )
    first = layout_of(spec, parallelism, micro_batch=1, num_micro_batches=16, recompute="full")
    for name in dir(first):
        getattr(first, name)
    for size, count, recompute in ((1, 16, "none"), (2, 8, "selective"), (8, 2, "full")):
        asked = layout_of(spec, parallelism, micro_batch=size, num_micro_batches=count, recompute=recompute)
        made = first.in_micro_batches(size, count, recompute)
        assert made == asked and hash(made) == hash(asked)
        kept = made.__dict__.keys() - {field.name for field in dataclasses.fields(Layout)}
        assert kept and all(getattr(made, name) == getattr(asked, name) for name in kept)


def test_the_chosen_one_is_the_cheapest_within_the_hours(job: MakeJob) -> None:
    spec = job(training={"steps": 1000})
    found = found_for(spec, deadline_hours=24)
    chosen = chosen_of(found)
    rivals = [item for item in found.options if item.configuration.fits and (item.expected_hours or 1e9) <= 24]
    assert len(rivals) > 3
    assert chosen.usd == min(item.usd for item in rivals if item.usd is not None)
    assert found.options[0] is chosen and chosen.on_front
    assert chosen.verdict == "chosen: the cheapest within 24 h"


@pytest.mark.slow
def test_a_shorter_deadline_never_costs_less_and_an_impossible_one_chooses_nothing(job: MakeJob) -> None:
    spec = job(training={"steps": 1000})
    alone = {"instances": ["p5.48xlarge"], "max_nodes": 4}
    by_deadline = [search(spec, **alone, deadline_hours=hours) for hours in (48, 12, 4)]  # type: ignore[arg-type]
    costs = [chosen_of(found).usd or 0.0 for found in by_deadline]
    assert costs == sorted(costs)
    none = search(spec, **alone, deadline_hours=0.001)  # type: ignore[arg-type]
    assert not any(item.chosen for item in none.options) and none.overrides == () and none.alternatives == ()
    assert any("nothing keeps to 0.001 h: the fastest takes" in note for note in none.notes)
    slow = [item for item in none.options if item.configuration.fits]
    assert slow and all(item.verdict.startswith("too slow: ") for item in slow)


def test_a_budget_is_kept(job: MakeJob) -> None:
    spec = job(training={"steps": 1000}, budget={"max_usd": 1.0})
    found = found_for(spec, deadline_hours=24 * 28)
    assert not any(item.chosen for item in found.options)
    assert any(item.verdict.startswith("too dear: $") for item in found.options)


def test_nobody_on_the_front_is_beaten_and_everybody_off_it_is(job: MakeJob) -> None:
    found = found_for(job(training={"steps": 1000}), deadline_hours=24)
    options = [item for item in found.options if item.usd is not None]

    def beats(one: Option, other: Option) -> bool:
        assert one.usd is not None and other.usd is not None
        hours, others = one.expected_hours or 0.0, other.expected_hours or 0.0
        return one.usd <= other.usd and hours <= others and (one.usd < other.usd or hours < others)

    for item in options:
        assert item.on_front is not any(beats(other, item) for other in options if other is not item)
    assert front_of([]) == []


@pytest.mark.slow
def test_a_verdict_says_how_much_faster_and_dearer_than_the_chosen(job: MakeJob) -> None:
    asked = job(training={"steps": 1000}, data={"sequence_length": 4096})
    found = found_for(asked, max_nodes=8, deadline_hours=24)
    chosen, rivals = chosen_of(found), [item for item in found.options if item.on_front and not item.chosen]
    assert chosen.usd and chosen.expected_hours and len(rivals) > 1
    for item in rivals:
        assert item.usd and item.expected_hours
        faster, dearer = chosen.expected_hours / item.expected_hours, item.usd / chosen.usd
        assert faster > 1 and dearer > 1
        words = f"{faster:.2f} times as fast, {dearer - 1:.0%} dearer"
        assert item.verdict == (words if dearer >= 1.005 else f"as dear, {faster:.2f} times as fast")
    assert {item.verdict.startswith("as dear") for item in rivals} == {True, False}, "else one is not asked"


def test_what_does_not_fit_says_so_in_words(job: MakeJob) -> None:
    found = search(job(model=LLAMA_70B), instances=["p5.48xlarge"], max_nodes=1)
    rejected = found.options[-1]
    assert rejected.configuration.fits is False and rejected.usd is None
    assert rejected.verdict.startswith("does not fit")
    assert "GiB of" in rejected.verdict and "; " in rejected.verdict


def test_offloading_is_the_last_resort_and_host_memory_counts(job: MakeJob) -> None:
    small = {"instance_type": "ml.p4d.24xlarge", "instance_count": 1}
    offloaded = fastest(job(model={"source": "llama-2-13b"}, compute=small, data={"sequence_length": 2048}))
    assert offloaded is not None
    if offloaded.parallelism.offload == "cpu":
        assert offloaded.host.offloaded_gib > 100
    stated = {"engine": "deepspeed", "data_replicate": 8, "zero_stage": 3, "offload": "cpu"}
    whole = plan(job(model=LLAMA_70B, compute=small, parallelism=stated))
    needed = 70.554e9 * 16 * 1.5 / 2**30
    assert whole.chosen.host.offloaded_gib == pytest.approx(needed, rel=1e-3)
    assert whole.fits is False
    assert whole.chosen.host.total_gib > (whole.chosen.host.available_gib or 0)


def test_the_host_is_named_where_it_is_what_is_too_small(job: MakeJob) -> None:
    stated = {"engine": "deepspeed", "data_replicate": 8, "zero_stage": 3, "offload": "cpu"}
    small = {"instance_type": "ml.p5.48xlarge", "instance_count": 1}
    spec = job(
        model={"source": "llama-3.1-70b"},
        compute=small,
        parallelism={**stated, "zero": {"offload_parameters": "cpu"}},
        training={"micro_batch_size": 1, "activation_checkpointing": "full"},
    )
    verdict = plan(spec).chosen.verdict
    assert "does not fit the host: " in verdict and "GiB of 2048; offloaded 1774" in verdict
    assert pytest.approx(70.554e9 * 18 * 1.5 / 2**30, abs=1) == 1774


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"source": None, "config": {"model_type": "phi3"}}, ("expert", "tensor")),
        ({"source": None, "config": {"model_type": "opt"}}, ("expert", "tensor")),
        ({"source": None, "config": {"model_type": "bloom"}}, ("expert", "tensor", "context")),
        ({"source": "llama-3.1-8b"}, ("expert",)),
        ({"source": "mixtral-8x7b"}, ()),
    ],
    ids=["phi3", "opt", "bloom", "llama", "mixtral"],
)
def test_what_the_trainer_refuses_is_not_proposed(
    job: MakeJob, model: dict[str, Any], refused: tuple[str, ...]
) -> None:
    spec = job(model=model, data={"sequence_length": 16384})
    shape = required_shape(spec)
    found = layouts(spec, machines_of(spec), shape, Rules(spec, shape))
    used = {axis for axis in EVERY for item in found if getattr(item, axis) > 1}
    assert used == set(EVERY) - set(refused)


def test_layouts_multiply_to_the_ranks_divide_the_batch_and_are_valid(job: MakeJob) -> None:
    spec = job(model={"source": "mixtral-8x7b"}, data={"sequence_length": 8192})
    shape = required_shape(spec)
    found = layouts(spec, machines_of(spec), shape, Rules(spec, shape))
    assert len(found) > 50
    assert [split_of(item) for item in found] == sorted(split_of(item) for item in found)
    assert len({item.model_dump_json() for item in found}) == len(found)
    for item in found:
        assert item.world_size == 128 and 512 % item.data_parallel_size == 0
        assert ParallelismSpec.model_validate(item.model_dump()) == item


@pytest.mark.parametrize(
    ("sections", "never"),
    [
        ({"training": {"precision": "fp8"}}, "tensor"),
        ({"training": {"compile": True}, "model": {"source": "mixtral-8x7b"}}, "tensor"),
        ({"training": {"compile": True}, "model": {"source": "mixtral-8x7b"}}, "expert"),
        ({"training": {"optimizer": {"kind": "muon"}}}, "deepspeed"),
        ({"training": {"on_anomaly": "skip"}}, "deepspeed"),
        ({"model": {"adapter": {"kind": "qlora"}}}, "deepspeed"),
    ],
)
def test_what_the_job_asks_for_rules_layouts_out(job: MakeJob, sections: dict[str, Any], never: str) -> None:
    spec = job(**sections)
    shape = required_shape(spec)
    found = layouts(spec, machines_of(spec), shape, Rules(spec, shape))
    assert found
    if never == "deepspeed":
        assert not [item for item in found if item.engine == "deepspeed"]
    else:
        assert not [item for item in found if getattr(item, never) > 1]
    plain = job()
    rules = Rules(plain, required_shape(plain))
    others = layouts(plain, machines_of(plain), required_shape(plain), rules)
    assert [item for item in others if item.engine == "deepspeed"]


def test_four_bit_weights_may_be_cut_over_ranks(job: MakeJob) -> None:
    spec = job(model={"source": "llama-3.1-8b", "adapter": {"kind": "qlora"}})
    shape = required_shape(spec)
    found = layouts(spec, machines_of(spec), shape, Rules(spec, shape))
    assert [item for item in found if item.tensor > 1]


def test_run_it_says_what_runs_as_chosen(job: MakeJob) -> None:
    found = found_for(job(training={"steps": 1000}), deadline_hours=24)
    chosen = chosen_of(found)
    moved = parse(JobSpec, apply_overrides(job(training={"steps": 1000}).model_dump(mode="json"), found.overrides), "x")
    again = plan(moved).chosen
    assert again.parallelism == chosen.configuration.parallelism
    assert again.time is not None and chosen.configuration.time is not None
    assert again.time.step_seconds == pytest.approx(chosen.configuration.time.step_seconds)
    assert resolve(moved).num_hosts == chosen.instance_count


def test_run_it_allows_the_hours_that_were_searched_with(job: MakeJob) -> None:
    spec = job(training={"steps": 1000}, compute={"max_hours": 1, "max_wait_hours": 2, "spot": True})
    by_hours = {hours: found_for(spec, deadline_hours=hours, max_nodes=1) for hours in (100, 1000)}
    for hours, most in ((100, "100"), (1000, "672")):
        found = by_hours[hours]
        assert (chosen_of(found).expected_hours or 0) > 1, "else nothing is asked"
        assert found.overrides[-2:] == (f"compute.max_hours={most}", f"compute.max_wait_hours={most}")
        moved = parse(JobSpec, apply_overrides(spec.model_dump(mode="json"), found.overrides), "x")
        assert plan(moved).affordable is not False
    usual = found_for(job(training={"steps": 1000}), deadline_hours=24)
    assert not any("hours" in item for item in usual.overrides)


def test_the_most_machines_are_kept_though_the_job_has_more(job: MakeJob) -> None:
    spec = job(
        training={"steps": 1000},
        compute={"backend": "sagemaker", "instance_type": "ml.p5.48xlarge", "instance_count": 4},
    )
    found = search(spec, instances=["p5.48xlarge"], max_nodes=2)
    assert {item.instance_count for item in found.options} == {1, 2}


@pytest.mark.slow
def test_the_fastest_is_no_slower_than_what_plan_lists(job: MakeJob) -> None:
    for sections in ({}, {"model": LLAMA_70B}, {"model": {"source": "mixtral-8x7b"}}):
        spec = job(**sections)
        best = fastest(spec)
        listed = [item.time.step_seconds for item in plan(spec).configurations if item.fits and item.time]
        assert best is not None and best.time is not None
        assert best.time.step_seconds <= min(listed) * (1 + SAME_SPEED + 1e-9)


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        # In the order of LAYOUTS: what can't be told apart, the simplest; what can, the fastest.
        ((1.0, 0.985, 0.976), 0),
        ((1.0, 0.94, 0.937), 1),
        ((1.0, 0.997, 0.94), 2),
        ((1.0, 1.0, 1.0), 0),
    ],
)
def test_a_more_complicated_layout_is_taken_for_a_gain_alone(
    monkeypatch: pytest.MonkeyPatch, job: MakeJob, seconds: tuple[float, ...], taken: int
) -> None:
    """Gains of a tenth of a percent were taken for a better plan, with a pipeline in it."""
    plain, cut, piped = (
        ParallelismSpec(data_shard=8),
        ParallelismSpec(data_shard=4, tensor=2),
        ParallelismSpec(data_shard=2, tensor=2, pipeline=2),
    )
    spec = job(training={"steps": 1000})
    found = [
        Fitting(parallelism, layout_of(spec, parallelism, micro_batch=1, num_micro_batches=32, recompute="full"), time)
        for parallelism, time in zip((plain, cut, piped), seconds, strict=True)
    ]
    assert _fastest_to_run(found[::-1], Starting(None)) is found[taken]
    # As the command would start it: the simplest one is refused, and the next is taken.
    monkeypatch.setattr(Starting, "starts", lambda _, item: item.parallelism != plain)
    near = [index for index in (1, 2) if seconds[index] <= min(seconds[1:]) * (1 + SAME_SPEED)]
    assert _fastest_to_run(found, Starting(None)) is found[near[0]]


@pytest.mark.parametrize("asked", ["hours", "dollars"])
def test_where_the_simplest_breaks_a_limit_that_the_fastest_keeps_the_fastest_is_taken(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Machines that keep to it were refused for a layout slower by less than an estimate can tell."""
    room = sys.modules["trainyard.planner.search"]  # its name in the package is the function's
    # Wider, so that here too a simpler one is within it.
    monkeypatch.setattr(room._fastest_to_run, "__defaults__", (0.5,))
    spec = job(training={"steps": 1000})
    alone: dict[str, Any] = {"instances": ["p5.48xlarge"], "max_nodes": 1}

    def taken(limit: float, budget: float) -> Option:
        limited = spec.model_copy(update={"budget": BudgetSpec(max_usd=budget)})
        found = search(limited, deadline_hours=limit, **alone)
        return max(found.options, key=lambda item: item.instance_count)

    simple = taken(500.0, 1e9)
    assert simple.expected_hours is not None and simple.usd is not None
    less = 1 - 1e-6
    hours, usd = (less * simple.expected_hours, 1e9) if asked == "hours" else (500.0, less * simple.usd)
    faster = taken(hours, usd)
    assert faster.chosen and faster.expected_hours is not None and faster.expected_hours < simple.expected_hours
    assert faster.configuration.parallelism != simple.configuration.parallelism
    # Where neither keeps to it, the simplest stands.
    assert taken(hours / 100, 1e9).configuration.parallelism == simple.configuration.parallelism


def test_kinds_of_splitting_count_before_ranks() -> None:
    in_order = [
        {"data_shard": 8},
        {"engine": "deepspeed", "data_replicate": 8, "zero_stage": 2},
        {"data_shard": 4, "tensor": 2},
        {"tensor": 8},
        {"data_shard": 4, "data_replicate": 2, "tensor": 2},
        {"data_shard": 2, "tensor": 2, "pipeline": 2},
        {"data_shard": 2, "tensor": 2, "pipeline": 2, "pipeline_schedule": "zero_bubble"},
    ]
    keys = [complexity_of(ParallelismSpec.model_validate(layout)) for layout in in_order]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)


def test_a_gain_that_no_estimate_can_tell_is_said_in_words(job: MakeJob) -> None:
    """Of a listed layout that is faster by less than that, and has more kinds of splitting."""
    one = plan(job()).chosen
    assert one.time is not None
    more = one.parallelism.model_copy(update={"tensor": 2, "pipeline": 2})
    other = one.model_copy(
        update={
            "parallelism": more,
            "time": one.time.model_copy(update={"step_seconds": one.time.step_seconds * 0.996}),
        }
    )
    assert verdict_of(other, one) == (
        "0.4% faster by this estimate, which can't tell so little; more complicated than the chosen"
    )
    assert verdict_of(one, other) == "as fast by this estimate, with another split"


def test_types_without_a_price_are_named_and_can_be_asked_for(job: MakeJob) -> None:
    spec = job(
        model={"source": "gpt2"}, data={"sequence_length": 1024}, training={"steps": 1000, "global_batch_size": 64}
    )
    usual = search(spec, max_nodes=1)
    assert any("types without a price in us-east-1 were left out" in note for note in usual.notes)
    assert all(item.usd is not None for item in usual.options if item.configuration.fits)
    asked = search(spec, instances=["ml.g5.12xlarge"], max_nodes=4)
    assert {item.instance_type for item in asked.options} == {"ml.g5.12xlarge"}
    assert all(item.usd is None for item in asked.options)
    assert chosen_of(asked).verdict.startswith("chosen: the fastest; no price is known within")


def test_a_type_without_efa_is_taken_alone(job: MakeJob) -> None:
    spec = job(model={"source": "gpt2"}, data={"sequence_length": 1024}, training={"global_batch_size": 64})
    found = search(spec, instances=["g5.2xlarge"], max_nodes=8)
    assert [item.instance_count for item in found.options] == [1]
    assert instance("g5.2xlarge").efa_interfaces == 0


def test_a_job_in_epochs_is_ranked_by_a_thousand_steps(job: MakeJob) -> None:
    found = found_for(job(training={"steps": None, "epochs": 3}), max_nodes=2)
    assert any("1,000 steps" in note for note in found.notes)
    assert chosen_of(found).usd is not None


def test_a_search_survives_json_and_is_printed(job: MakeJob) -> None:
    found = found_for(job(model=LLAMA_70B, training={"steps": 1000}), deadline_hours=24 * 28)
    assert Search.model_validate_json(found.model_dump_json()) == found
    console = Console(width=400, record=True, force_terminal=False)
    console.print(render_search(found))
    text = console.export_text()
    assert "-> " in text and "run it: trainyard launch JOB.yaml --set 'compute.instance_type=" in text
    assert "does not fit" in text and "as of 20" in text and "slower and dearer than" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"instances": ["p5.47xlarge"]}, "unknown instance type 'p5.47xlarge'"),
        ({"instances": ["trn1.32xlarge"]}, "--instances trn1.32xlarge: has Trainium"),
        ({"region": "eu-west-1"}, r"no price is known in eu-west-1.*prices refresh --region eu-west-1"),
        ({"max_nodes": 0}, "--max-nodes 0: must be at least 1"),
        ({"deadline_hours": -1.0}, "--deadline-hours -1: must be above 0"),
        ({"deadline_hours": float("nan")}, "--deadline-hours nan: must be above 0"),
    ],
)
def test_wrong_options_are_one_line(job: MakeJob, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        search(job(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_scaling_falls_and_more_machines_are_faster_together(job: MakeJob) -> None:
    spec = job(model={"source": "llama-2-7b"}, compute={"instance_count": 4})
    for weak in (False, True):
        points = scaling(spec, weak=weak)
        assert [point.num_machines for point in points] == [1, 2, 4, 8]
        assert points[0].efficiency == 1.0
        for fewer, more in itertools.pairwise(points):
            assert more.tokens_per_second > fewer.tokens_per_second
            assert more.low < more.tokens_per_second < more.high
            assert more.efficiency < 1.03


def test_a_rate_of_sagemakers_alone_is_enough_to_search_a_region(job: MakeJob) -> None:
    row = {"instance": "p5.48xlarge", "region": "eu-west-1", "zone": "", "purchase": "sagemaker on-demand"}
    book = PriceBook(
        [{**row, "price": "60", "source": "a test", "as_of": "2025-11-01"}], today=datetime.date(2025, 11, 20)
    )
    found = search(
        job(model={"source": "llama-3.2-1b"}), region="eu-west-1", book=book, max_nodes=1, deadline_hours=600
    )
    assert {item.instance_type for item in found.options} == {"ml.p5.48xlarge"}
    assert chosen_of(found).price_basis == "SageMaker training, on demand"
