"""What is passed over is slower: bounds hold, layers are the same for all layouts that they don't know apart."""

import dataclasses
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from trainyard.planner import search
from trainyard.planner.candidates import Rules, layouts, offloading_layouts
from trainyard.planner.communication import EFA, Fabric, fabric_of
from trainyard.planner.families import shape_from_config, shape_of_known
from trainyard.planner.fastest import NUM_ALTERNATIVES, Estimates, Fitting, Starting, _is_enough
from trainyard.planner.formulas import Formulas, formulas_of
from trainyard.planner.known_models import KNOWN_CONFIGS
from trainyard.planner.layer_launches import LayerLaunches
from trainyard.planner.layout import Layout, Recompute
from trainyard.planner.memory import Memory
from trainyard.planner.moving import moved_to
from trainyard.planner.once import once
from trainyard.planner.reading import Machines, layout_of, machines_of, required_shape
from trainyard.planner.resolve import micro_batch_choices, sequences_per_rank
from trainyard.planner.search import _Searched
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import part_of, stage_at, stages
from trainyard.planner.time_constants import DEFAULT_CONSTANTS
from trainyard.planner.timing import _Rank, least_step_seconds, step_time
from trainyard.planner.trainer_layers import TrainerLayers, layers_of
from trainyard.planner.weight_tensors import _weight_tensors, weight_tensors
from trainyard.spec.job import JobSpec, ParallelismSpec

MakeJob = Callable[..., JobSpec]

MODELS = ("gpt2-xl", "llama-2-7b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-next-80b-a3b", "gemma-4-12b")
WINDOWED_MIXTURE = {
    **{"model_type": "exaone_moe", "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 8192, "moe_intermediate_size": 1024},
    **{"num_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "vocab_size": 32000},
    **{"sliding_window": 128, "first_k_dense_replace": 1},
}
"""Three of four of its layers have a window, and its first has no experts: a stage of two has one or two windows."""
NO_LINKS = Fabric(1, 1.0, 1.0, EFA)


def draws(spec: JobSpec, number: int, seed: int) -> Iterator[Layout]:
    """So many of the layouts that a search proposes of a job, with batches and recomputation."""
    shape, machines, rng = required_shape(spec), machines_of(spec), random.Random(seed)
    rules = Rules(spec, shape)
    proposed = layouts(spec, machines, shape, rules) + offloading_layouts(spec, machines, rules)
    # As many of each kind of splitting as of any other.
    kinds: dict[tuple[bool, ...], list[ParallelismSpec]] = {}
    for each in proposed:
        degrees = (each.tensor, each.pipeline, each.context, each.expert, each.data_shard)
        kinds.setdefault((each.engine == "torch", *(degree > 1 for degree in degrees)), []).append(each)
    for _ in range(number):
        parallelism = rng.choice(rng.choice(list(kinds.values())))
        per_rank = sequences_per_rank(spec, parallelism)
        sizes = [size for size in micro_batch_choices(spec, parallelism) if per_rank // size >= parallelism.pipeline]
        if sizes:
            size, recompute = rng.choice(sizes), rng.choice(get_args(Recompute))
            yield layout_of(
                spec,
                parallelism,
                micro_batch=size,
                num_micro_batches=per_rank // size,
                recompute=recompute,
            )


def spec_of(job: MakeJob, model: str, adapter: str | None, **sections: Any) -> JobSpec:
    compute = {"instance_count": 2, **sections.pop("compute", {})}
    named = {"source": model, **({"adapter": {"kind": adapter}} if adapter else {})}
    return job(model=named, compute=compute, training={"global_batch_size": 64}, **sections)


@pytest.mark.parametrize("sequence_length", [2048, 32768])
@pytest.mark.parametrize(
    "model", [{"config": WINDOWED_MIXTURE}, {"source": "llama-4-maverick"}], ids=["windows", "every other"]
)
def test_nor_is_one_of_stages_with_layers_of_several_kinds(
    job: MakeJob, model: dict[str, Any], sequence_length: int
) -> None:
    spec = job(
        model=model if "source" in model else {**model, "source": None},
        compute={"instance_count": 16},
        training={"global_batch_size": 256},
        data={"sequence_length": sequence_length},
    )
    machine, shape = machines_of(spec).instance, required_shape(spec)
    assert machine is not None and machine.gpu is not None
    for layout in draws(spec, 120, seed=3):
        whole = step_time(shape, layout, machine.gpu, fabric_of(machine)).total
        assert least_step_seconds(shape, layout, machine.gpu, fabric_of(machine)) <= whole * (1 + 1e-12), layout


def test_stages_of_a_mixture_have_the_dense_layers_that_are_theirs() -> None:
    """Every other layer of Llama 4 Maverick, which were taken for its first 24: a step took twice as long in stages."""
    shape = shape_of_known("llama-4-maverick")
    layout = Layout(library="trainyard", pipeline=8, num_micro_batches=8)
    assert [stage_at(shape, layout, place).dense_layers for place in range(8)] == [3] * 8
    first = dataclasses.replace(shape, dense_places=())
    assert [stage_at(first, layout, place).dense_layers for place in range(8)] == [6] * 4 + [0] * 4
    config = {**KNOWN_CONFIGS["qwen3-30b-a3b"], "mlp_only_layers": [0, 1, 40]}
    assert shape_from_config(config).dense_places == (0, 1, 40)
    assert shape_from_config({**config, "mlp_only_layers": [0, 1]}).dense_places == ()
    windowed = shape_from_config(WINDOWED_MIXTURE)
    deep = dataclasses.replace(layout, pipeline=16)
    parts = [part_of(windowed, deep, stage) for stage in stages(windowed, deep)]
    assert {part.windowed_share for part in parts} == {0.75}


def once_of(kind: type) -> list[str]:
    """Names of a class's numbers that are reckoned once."""
    return [name for name, value in vars(kind).items() if isinstance(value, once)]


@pytest.mark.parametrize("adapter", [None, "qlora"], ids=["full", "qlora"])
@pytest.mark.parametrize("model", MODELS)
def test_layers_do_and_keep_the_same_in_every_layout_that_they_do_not_know_apart(
    job: MakeJob, model: str, adapter: str | None
) -> None:
    spec = spec_of(job, model, adapter)
    shape, machine = required_shape(spec), machines_of(spec).instance
    assert machine is not None and machine.gpu is not None
    others: set[Layout] = set()
    for layout in draws(spec, 40, seed=1):
        own, shared = TrainerLayers(shape, layout), layers_of(shape, layout)
        for name in once_of(TrainerLayers):
            value = getattr(own, name)
            if isinstance(value, int | float | str):
                assert value == getattr(shared, name), (name, layout)
        for name in once_of(type(own.reads)):
            assert getattr(own.reads, name) == getattr(shared.reads, name), (name, layout)
        ranks = [_Rank(shape, each, machine.gpu, NO_LINKS, DEFAULT_CONSTANTS) for each in (layout, layout.of_layers())]
        assert ranks[0].layers == ranks[1].layers, layout
        assert ranks[0].head_seconds(frozen=False) == ranks[1].head_seconds(frozen=False), layout
        launches = [LayerLaunches(shape, each).all_layers() for each in (layout, layout.of_layers())]
        assert launches[0] == launches[1], layout
        for stage in stages(shape, layout):
            tensors, uncached = weight_tensors(shape, layout, stage), _weight_tensors.__wrapped__(shape, layout, stage)
            assert tensors == uncached, layout
        others.add(layout.of_layers())
    assert 10 < len(others) < 40, "else they are all different, or all the same"


@pytest.mark.parametrize("kind", ["ml.p4d.24xlarge", "ml.g5.48xlarge"])
@pytest.mark.parametrize("adapter", [None, "lora"], ids=["full", "lora"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_is_shorter_than_its_bound(job: MakeJob, model: str, adapter: str | None, kind: str) -> None:
    spec = spec_of(job, model, adapter, compute={"instance_type": kind})
    machine = machines_of(spec).instance
    assert machine is not None and machine.gpu is not None
    shape, links, ratios = required_shape(spec), fabric_of(machine), []
    for layout in draws(spec, 40, seed=2):
        whole = step_time(shape, layout, machine.gpu, links).total
        ratios.append(least_step_seconds(shape, layout, machine.gpu, links) / whole)
        assert ratios[-1] <= 1 + 1e-12, layout
    assert statistics.median(ratios) > 0.4, "a bound that says nothing lets nothing be passed over"


def without_bounds(asked: JobSpec) -> Formulas:
    """Everything is reckoned."""
    return dataclasses.replace(formulas_of(asked), least_memory=None, least_step_seconds=None)


@pytest.mark.parametrize(
    ("model", "adapter", "most"),
    [("llama-2-7b", None, 2), ("mixtral-8x7b", None, 2), ("llama-3.1-8b", "qlora", 1), ("gpt2-xl", None, 1)],
)
def test_what_is_passed_over_would_not_have_been_chosen_nor_shown_as_fitting(
    job: MakeJob, model: str, adapter: str | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(
        model={"source": model, **({"adapter": {"kind": adapter}} if adapter else {})},
        training={"global_batch_size": 128},
        data={"sequence_length": 4096 if model != "gpt2-xl" else 1024},
    )
    found = search(spec, instances=["p4d.24xlarge"], max_nodes=most)
    monkeypatch.setattr(sys.modules[_Searched.__module__], "formulas_of", without_bounds)
    same = search(spec, instances=["p4d.24xlarge"], max_nodes=most)
    assert found.options == same.options and found.overrides == same.overrides and found.notes == same.notes
    assert [item for item in found.alternatives if item.fits] == [item for item in same.alternatives if item.fits]
    assert found.num_layouts == same.num_layouts
    assert found.num_estimates < same.num_estimates / 1.5, "else little was passed over"


@pytest.mark.parametrize("adapter", ["qlora", None])
def test_what_is_passed_over_unreckoned_would_not_have_fitted(
    job: MakeJob, adapter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = []
    usual = formulas_of

    def without_bound(asked: JobSpec) -> Formulas:
        formulas = usual(asked)
        least, reckon = formulas.least_memory, formulas.memory
        assert least is not None

        def compared(layout: Layout) -> Memory:
            whole = reckon(layout)
            ratios.append(least(layout).needed / whole.needed)
            return whole

        return dataclasses.replace(formulas, least_memory=None, memory=compared)

    spec = job(model={"source": "mixtral-8x7b"} if adapter is None else {"adapter": {"kind": adapter}})
    found = search(spec, instances=["p4d.24xlarge"], max_nodes=2)
    monkeypatch.setattr(sys.modules[_Searched.__module__], "formulas_of", without_bound)
    same = search(spec, instances=["p4d.24xlarge"], max_nodes=2)
    assert max(ratios) < 1 and len(ratios) > 100
    assert same.model_copy(update={"num_estimates": found.num_estimates}) == found
    assert same.num_estimates > found.num_estimates, "else nothing was passed over"


def test_what_does_not_fit_is_shown_where_it_might_have_been_as_fast(job: MakeJob) -> None:
    found = search(job(model={"source": "llama-2-7b"}), instances=["p4d.24xlarge"], max_nodes=1)
    lost = [item for item in found.alternatives if not item.fits]
    assert lost and all(item.verdict.startswith("does not fit") for item in lost)


def test_all_is_looked_at_until_one_that_starts_is_as_fast_as_any_that_is_left(job: MakeJob) -> None:
    spec = job(model={"source": "llama-2-7b"})
    layout = layout_of(spec, ParallelismSpec(data_shard=8), micro_batch=1, num_micro_batches=8, recompute="none")

    class Last(Starting):
        """The last one starts alone."""

        def starts(self, item: Fitting) -> bool:
            return item.seconds == 2.0

    found = [Fitting(ParallelismSpec(data_shard=8), layout, 1.0 + 0.001 * place) for place in range(NUM_ALTERNATIVES)]
    every, last = Starting(None), Last(None)
    slow = Fitting(ParallelismSpec(data_shard=8), layout, 2.0)
    assert not _is_enough(found, 100.0, every), "as many are shown"
    assert not _is_enough([*found, slow], 1.5, every), "one that is left may be among those that are shown"
    assert _is_enough([*found, slow], 2.0, every)
    assert _is_enough([*found, dataclasses.replace(slow, seconds=1.01)], 1.04, every)
    assert not _is_enough([*found, dataclasses.replace(slow, seconds=1.01)], 1.02, every), (
        "nobody tells it from the first"
    )
    assert not _is_enough([*found, slow], 2.0, last) and _is_enough([*found, slow], 2.07, last)
    assert not _is_enough(found + found, 100.0, last), "none of them starts"


def test_a_job_whose_fastest_do_not_start_has_the_fastest_that_does(job: MakeJob) -> None:
    """They are ever more of those that are proposed."""
    spec = job(model={"source": "llama-2-7b"}, training={"global_batch_size": 128})
    moved = moved_to(spec, "ml.p4d.24xlarge", 1)
    machines: Machines = machines_of(moved.job)
    shape: ModelShape | None = formulas_of(spec).shape
    rules = Rules(moved.job, shape)
    proposed = layouts(moved.job, machines, shape, rules)
    every = Estimates(without_bounds(spec)).fastest(moved.job, machines, proposed, rules, Starting(None)).fitting
    by_time = sorted(every, key=lambda item: item.seconds)
    assert len(by_time) > 2 * NUM_ALTERNATIVES
    for wanted in (by_time[0], by_time[NUM_ALTERNATIVES + 5], by_time[-1]):

        class Only(Starting):
            def starts(self, item: Fitting, wanted: Fitting = wanted) -> bool:
                return item.parallelism == wanted.parallelism

        found = Estimates(formulas_of(spec)).fastest(moved.job, machines, proposed, rules, Only(None))
        assert wanted in found.fitting
        assert len(found.fitting) >= by_time.index(wanted) + 1
