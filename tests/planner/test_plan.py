"""The plan: exact arithmetic, one chosen configuration, words for the others, honest gaps."""

import datetime
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from trainyard.errors import InputError
from trainyard.hardware import PriceBook, gpu, price
from trainyard.launch.checks import warned_by_plan
from trainyard.planner import Plan, plan, resolve
from trainyard.planner.configurations import does_not_fit, why_slower
from trainyard.planner.layout import Layout
from trainyard.planner.render import above_limits, print_plan, usd_of
from trainyard.planner.results import Configuration, TimePlan, figure
from trainyard.spec.job import JobSpec

MakeJob = Callable[..., JobSpec]
LLAMA_70B = {"source": "llama-3.1-70b"}
SPLIT = {"tensor": 8, "pipeline": 4, "data_shard": 4}


def test_the_chosen_configuration_is_what_resolve_decides(job: MakeJob) -> None:
    for spec in (job(), job(model=LLAMA_70B), job(model=LLAMA_70B, parallelism=SPLIT)):
        chosen, resolved = plan(spec).chosen, resolve(spec)
        assert chosen.parallelism == resolved.parallelism
        assert chosen.micro_batch_size == resolved.micro_batch_size
        assert chosen.gradient_accumulation_steps == resolved.gradient_accumulation_steps
        assert chosen.activation_checkpointing == resolved.activation_checkpointing


def test_layouts_that_differ_have_other_words() -> None:
    """Two rows of a search were alike but for their figures: one was of another schedule, one kept all on the host."""
    stages = Layout(pipeline=4, num_micro_batches=8)
    zero = Layout(engine="deepspeed", zero_stage=3, data_parallel=2, shard_degree=2)
    assert [one.words() for one in (
        stages, replace(stages, schedule="zero_bubble"), replace(stages, schedule="interleaved_1f1b", chunks=2),
        zero, replace(zero, offload="cpu"), replace(zero, offload="cpu", offload_parameters="nvme"),
    )] == [
        "PP4 one replica", "PP4 (zero_bubble) one replica", "PP4x2 one replica",
        "ZeRO-3 over 2", "ZeRO-3 over 2 offload cpu", "ZeRO-3 over 2 offload cpu+nvme",
    ]  # fmt: skip


def test_configurations_that_fit_come_first_and_by_time(job: MakeJob) -> None:
    found = plan(job(model=LLAMA_70B)).configurations
    assert sum(item.chosen for item in found) == 1
    assert len({item.layout for item in found}) == len(found) > 5
    fitting = [item.time.step_seconds for item in found if item.fits and item.time]
    assert fitting == sorted(fitting)
    rejected = [item.fits is False for item in found]
    assert rejected == sorted(rejected)


def test_what_does_not_fit_says_so_in_words(job: MakeJob) -> None:
    rejected = [item for item in plan(job(model=LLAMA_70B)).configurations if not item.fits]
    replicated = next(item for item in rejected if item.parallelism.data_replicate == 128)
    assert replicated.verdict.startswith("does not fit: ")
    assert "GiB of 79.1; optimizer 525.7" in replicated.verdict
    assert pytest.approx(525.7, abs=0.1) == 70.554e9 * 8 / 2**30


def test_a_stated_layout_that_does_not_fit_is_planned_and_refused(job: MakeJob) -> None:
    found = plan(job(model=LLAMA_70B, parallelism={"data_replicate": 128}))
    assert found.fits is False
    assert "as the job states, but does not fit" in found.chosen.verdict


def test_a_warm_up_that_outlasts_the_job_is_noted(job: MakeJob) -> None:
    for num_steps, is_noted in ((100, False), (101, True)):
        notes = plan(job(training={"schedule": {"warmup_steps": num_steps}})).notes
        assert is_noted == any("warmup_steps: 101 is more than the job's 100 steps" in note for note in notes)


def test_memory_by_hand(job: MakeJob) -> None:
    """A 70B model over TP8 x PP4 x FSDP4: every part of the state on a rank is counted once."""
    spec = job(model=LLAMA_70B, parallelism=SPLIT, training={"micro_batch_size": 1})
    use = plan(spec).chosen.memory
    layers = 20 * ((4 * 8192 * 8192 * (1 + 1 / 8) / 2 + 3 * 8192 * 28672) / 8 + 2 * 8192)
    on_rank = (layers + 128256 * 8192 / 8) / 4
    assert use.parameters_gib == pytest.approx(4 * on_rank / 2**30)
    assert use.gradients_gib == 0  # until a pipeline's end whole sums, in buffers
    assert use.buffers_gib > 6 * on_rank * 4 / 2**30
    assert use.optimizer_gib == pytest.approx(8 * on_rank / 2**30)
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "workspace", "margin")
    assert use.total_gib == pytest.approx(sum(getattr(use, f"{part}_gib") for part in parts))


def test_dollars_are_hours_times_machines_times_price(job: MakeJob) -> None:
    found = plan(job())
    assert found.cost is not None and found.checkpoint is not None and found.chosen.time is not None
    assert found.chosen.time.hours == pytest.approx(100 * found.chosen.time.step_seconds / 3600)
    assert found.chosen.time.hours is not None
    hours = found.chosen.time.hours / found.checkpoint.goodput
    assert found.cost.expected_hours == pytest.approx(hours)
    assert found.cost.usd_on_demand == pytest.approx(hours * 16 * 55.04)
    spot = price("ml.p5.48xlarge", spot=True).usd_per_hour
    assert found.cost.usd_spot == pytest.approx(hours * 16 * spot)
    assert found.cost.storage_usd is not None and found.cost.usd_on_demand is not None
    assert found.cost.planned_usd == pytest.approx(found.cost.usd_on_demand + found.cost.storage_usd)
    assert "EC2 on demand" in found.cost.price_basis and found.cost.price_as_of is not None


def test_a_spot_job_is_planned_at_the_spot_price_or_the_on_demand_one(job: MakeJob) -> None:
    cheap = plan(job(compute={"spot": True}))
    assert cheap.cost is not None and cheap.cost.usd_spot is not None
    assert cheap.cost.planned_usd == pytest.approx(cheap.cost.usd_spot + (cheap.cost.storage_usd or 0))
    assert "not a forecast" in cheap.cost.price_basis
    unknown = plan(
        job(
            model={"source": "gpt2"},
            data={"sequence_length": 1024},
            compute={"spot": True, "instance_type": "ml.p5.4xlarge"},
        )
    )
    assert unknown.cost is not None and unknown.cost.usd_spot is None
    assert unknown.cost.usd_on_demand is not None
    storage = unknown.cost.storage_usd or 0
    assert unknown.cost.planned_usd == pytest.approx(unknown.cost.usd_on_demand + storage)
    assert unknown.cost.price_basis.startswith("spot price unknown, counted on demand: ")
    assert any("no spot price known" in note for note in unknown.notes)


def test_budget_and_hours_decide_whether_it_is_affordable(job: MakeJob) -> None:
    assert plan(job(budget={"max_usd": 1e6})).affordable is True
    assert plan(job(budget={"max_usd": 1})).affordable is False
    assert plan(job(budget={"max_usd": 1e6}, compute={"max_hours": 0.01})).affordable is False
    small = {"instance_type": "ml.g5.48xlarge", "instance_count": 1}
    unpriced = plan(
        job(model={"source": "gpt2"}, data={"sequence_length": 1024}, compute=small, budget={"max_usd": 1e6})
    )
    assert unpriced.affordable is None, "no price is known for g5"
    assert unpriced.cost is not None and unpriced.cost.planned_usd is None


def test_a_job_in_epochs_has_no_cost_yet(job: MakeJob) -> None:
    found = plan(job(training={"steps": None, "epochs": 3}))
    assert found.cost is None and found.affordable is None and found.steps is None
    assert found.chosen.time is not None and found.chosen.time.hours is None
    assert any("epochs" in note for note in found.notes)


def test_here_memory_is_all_that_is_known(job: MakeJob) -> None:
    local = {"backend": "local", "instance_type": None, "instance_count": 1}
    found = plan(job(model={"source": "gpt2"}, data={"sequence_length": 1024}, compute=local))
    assert found.fits is None and found.cost is None and found.chosen.time is None
    assert found.chosen.memory.total_gib > 1


def test_lora_checkpoints_hold_the_adapters_alone(job: MakeJob) -> None:
    adapter = {"kind": "lora", "rank": 16, "targets": ["q_proj", "v_proj"]}
    full, lora = plan(job()), plan(job(model={"adapter": adapter}))
    assert full.checkpoint is not None and lora.checkpoint is not None
    assert full.checkpoint.size_gib == pytest.approx(8.0303e9 * 12 / 2**30, rel=1e-3)
    assert lora.checkpoint.size_gib < full.checkpoint.size_gib / 100
    trained = [item.chosen.memory.gradients_gib + item.chosen.memory.optimizer_gib for item in (full, lora)]
    assert trained[1] < trained[0] / 100


def test_mfu_is_model_flops_over_the_peak(job: MakeJob) -> None:
    time = plan(job(model={"source": "llama-2-7b"})).chosen.time
    assert time is not None
    per_token = 6 * (6.738e9 - 32000 * 4096) + 12 * 32 * 4096 * 4096
    assert time.mfu == pytest.approx(
        per_token * time.tokens_per_second / (128 * gpu("H100").bf16_tflops * 1e12), rel=1e-3
    )


def test_an_adapters_step_makes_no_gradients_of_frozen_weights(job: MakeJob) -> None:
    """Of their three products two are left, forward and back; attention's own have all."""
    adapter = {"kind": "lora", "rank": 8, "targets": ["q_proj"]}
    time = plan(job(model={"source": "llama-2-7b", "adapter": adapter})).chosen.time
    assert time is not None
    per_token = 4 * (6.738e9 - 32000 * 4096) + 12 * 32 * 4096 * 4096
    assert time.mfu == pytest.approx(
        per_token * time.tokens_per_second / (128 * gpu("H100").bf16_tflops * 1e12), rel=1e-3
    )


def test_a_plan_survives_json(job: MakeJob) -> None:
    found = plan(job())
    assert Plan.model_validate_json(found.model_dump_json()) == found
    assert json.loads(found.model_dump_json())["configurations"][0]["memory"]["activations_gib"] > 0


def test_another_region_has_its_own_prices(job: MakeJob) -> None:
    found = plan(job(), region="eu-west-1")
    assert found.on_demand is None and found.cost is not None and found.cost.planned_usd is None
    assert found.price_missing is not None and found.notes[0] == found.price_missing
    assert found.price_missing == (
        "no on-demand price known for ml.p5.48xlarge in eu-west-1; known in us-east-1, us-west-2; without a price no "
        "dollars are quoted and no budget can be kept; get one: trainyard prices refresh --region eu-west-1 "
        "--instances p5.48xlarge"
    )
    limited = plan(job(budget={"max_usd": 5000}), region="eu-west-1")
    assert limited.affordable is None and limited.price_missing is not None
    assert "quoted, and budget.max_usd 5,000.00 can't be kept; get one: " in limited.price_missing
    epochs = plan(job(training={"steps": None, "epochs": 2}), region="eu-west-1")
    assert epochs.cost is None and epochs.price_missing == found.price_missing


def test_a_price_is_missing_only_where_one_would_be_paid(job: MakeJob) -> None:
    assert plan(job()).price_missing is None
    no_spot = plan(job(compute={"instance_type": "ml.p5.4xlarge", "instance_count": 128, "spot": True}))
    assert no_spot.price_missing is None, "counted on demand"
    assert plan(job(compute={"backend": "local"}), region="eu-west-1").price_missing is None


def test_an_unknown_model_is_refused_with_what_would_help(job: MakeJob) -> None:
    with pytest.raises(InputError, match=r"model.source 's3://x/mystery'.*config.json.*--set model.source=FOLDER"):
        plan(job(model={"source": "s3://x/mystery"}))


@pytest.mark.parametrize(("num", "told"), [(1, "on 1 process here (1 rank)"), (2, "on 2 processes here (2 ranks)")])
def test_one_of_them_is_no_plural(job: MakeJob, num: int, told: str) -> None:
    console = Console(width=200, record=True, force_terminal=False)
    layout = {"data_replicate": num}
    print_plan(plan(job(compute={"backend": "local", "instance_type": None}, parallelism=layout)), console)
    assert told in console.export_text().splitlines()[0]


def test_the_table_marks_the_chosen_one_and_names_price_and_date(job: MakeJob) -> None:
    console = Console(width=200, record=True, force_terminal=False)
    print_plan(plan(job(model=LLAMA_70B, budget={"max_usd": 10})), console)
    text = console.export_text()
    assert "-> " in text and "FSDP128" in text
    assert "as of 2026-11-09" in text
    assert "NOT AFFORDABLE" in text
    assert "does not fit: " in text


@pytest.mark.parametrize(
    ("backend", "stated", "told"), [("slurm", 4, True), ("slurm", 8, False), ("sagemaker", 4, False)]
)
def test_gpus_of_slurm_that_are_not_the_machines_are_told(job: MakeJob, backend: str, stated: int, told: bool) -> None:
    asked = job(compute={"backend": backend, "slurm": {"gpus_per_node": stated}})
    found = plan(asked)
    words = "compute.slurm.gpus_per_node 4: the job is planned and started with the 8 GPUs that compute.instance_type "
    assert any(note.startswith(words) for note in found.notes) is told
    assert any(note.startswith(words) for note in warned_by_plan(found, asked)) is told
    assert found.num_gpus == plan(job()).num_gpus


def test_what_the_plan_does_not_know_of_deepspeed_is_told(job: MakeJob) -> None:
    def told(**more: object) -> list[str]:
        split = {"engine": "deepspeed", "zero_stage": 3, "data_replicate": 128, **more}
        return [note for note in plan(job(parallelism=split)).notes if "parallelism." in note]

    read = {"stage3_max_reuse_distance": 10, "sub_group_size": 10, "reduce_scatter": False}
    assert told() == told(deepspeed={"zero_optimization": read}) == []
    own = {"zero_optimization": {"contiguous_gradients": False}, "wall_clock_breakdown": True}
    assert told(deepspeed=own) == [
        "parallelism.deepspeed: not in memory or time: zero_optimization.contiguous_gradients, wall_clock_breakdown"
    ]


def test_what_fsdp_gathers_at_once_is_in_the_plan(job: MakeJob) -> None:
    """Of a 70B in units of three layers, as of as many asked for ahead; in fewer messages."""

    def planned(**fsdp: object) -> Configuration:
        return plan(job(parallelism={"data_shard": 128, "fsdp": fsdp})).chosen

    usual, large = planned(), planned(wrap="size", min_parameters=5_000_000_000)
    for more in (planned(prefetch_units=8), large, planned(reshard_after_forward=False)):
        assert usual.memory.buffers_gib + 4 < more.memory.buffers_gib
    assert large.time is not None and usual.time is not None
    assert large.time.step_seconds < usual.time.step_seconds


@pytest.mark.parametrize(
    "stated",
    [
        *({"model_persistence_threshold": value} for value in (math.inf, math.nan, -2_000_000_000, "5000", None)),
        {"sub_group_size": -1},
        {"stage3_max_reuse_distance": -math.inf},
        {"reduce_scatter": 0},
    ],
)
def test_a_value_of_deepspeeds_that_is_no_number_of_elements_changes_nothing_and_is_told(
    job: MakeJob, stated: dict[str, object]
) -> None:
    """An infinite one was a traceback, and a negative one made memory of less than nothing."""
    split = {"engine": "deepspeed", "zero_stage": 3, "data_replicate": 128}
    plain = plan(job(parallelism=split))
    found = plan(job(parallelism=split | {"deepspeed": {"zero_optimization": stated}}))
    assert found.chosen.memory == plain.chosen.memory
    (name,) = stated
    assert f"parallelism.deepspeed: not in memory or time: zero_optimization.{name}" in found.notes


def test_what_is_above_a_limit_is_named_with_both_numbers(job: MakeJob) -> None:
    dear = plan(job(budget={"max_usd": 1}))
    assert above_limits(dear).endswith("of budget.max_usd $1.00") and "max_hours" not in above_limits(dear)
    slow = plan(job(budget={"max_usd": 1e6}, compute={"max_hours": 0.01}))
    assert above_limits(slow).endswith(" h of compute.max_hours 0.01") and "max_usd" not in above_limits(slow)
    assert slow.cost is not None
    nearly = slow.model_copy(update={"max_hours": slow.cost.expected_hours * (1 - 1e-5)})
    hours, limit = above_limits(nearly).split(" h of compute.max_hours ")
    assert float(hours) > float(limit), "not 3.6 of 3.6"
    assert above_limits(plan(job(budget={"max_usd": 1e6}))) == ""


def test_what_does_not_fit_by_little_is_not_told_as_equal(job: MakeJob) -> None:
    """39.6 GiB of 39.6 would be no reason."""
    item = plan(job()).chosen
    assert item.memory.available_gib is not None
    memory = item.memory.model_copy(update={"total_gib": item.memory.available_gib + 0.004})
    said = does_not_fit(item.model_copy(update={"memory": memory}))
    need, room = re.findall(r"[\d.]+", said)[:2]
    assert float(need) > float(room)


def test_spot_that_is_no_cheaper_is_said(job: MakeJob) -> None:
    row = {"instance": "p5.48xlarge", "region": "us-east-1", "zone": "a", "source": "x", "as_of": "2025-11-19"}
    bought = {"spot": "70.00", "on-demand": "60.00"}
    today = datetime.date(2025, 11, 20)
    dear, cheap = (
        PriceBook([{**row, "purchase": way, "price": usd} for way, usd in prices.items()], today=today)
        for prices in (bought, {**bought, "spot": "20"})
    )
    spot = job(compute={"spot": True})
    (told,) = [note for note in plan(spot, book=dear).notes if note.startswith("compute.spot: ")]
    assert "$70.00" in told and "$60.00" in told
    assert not [note for note in plan(spot, book=cheap).notes if note.startswith("compute.spot: ")]
    assert not [note for note in plan(job(), book=dear).notes if note.startswith("compute.spot: ")]


def test_no_figure_has_an_exponent_however_long_the_run(job: MakeJob) -> None:
    spec = job(model={"source": "gpt3-175b"}, data={"sequence_length": 2048}, training={"steps": 3 * 10**7})
    rare = {"every_steps": 10**6, "every_minutes": None}
    console = Console(width=300, record=True, force_terminal=False)
    print_plan(plan(spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=rare)})), console)
    text = console.export_text()
    assert not re.findall(r"\de\+\d", text), text
    assert "31.46T tokens" in text and "checkpoints: 1,950 GiB" in text


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (0.01234567, "0.01235"), (999.96, "1000"), (12345.6, "12,350"), (2.5e9, "2,500,000,000")],
)
def test_figures_have_four_digits_that_count(value: float, said: str) -> None:
    assert figure(value) == said


def test_what_costs_nothing_is_not_told_as_little() -> None:
    assert [usd_of(amount) for amount in (0.0, 0.004, 0.01, None)] == ["$0.00", "less than $0.01", "$0.01", "unknown"]


def test_of_an_unknown_machine_nothing_is_said_to_fit(job: MakeJob) -> None:
    here = plan(job(compute={"backend": "local", "instance_type": None, "instance_count": 1}))
    assert here.fits is None and "fits" not in here.chosen.verdict


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"forward": 1.0, "backward": 2.0, "bubble": 0.6}, "bubble takes 17% of a step"),
        ({"forward": 1.2, "backward": 2.4, "bubble": 0.1}, "computing takes 20% longer"),
        ({"forward": 1.0, "backward": 2.0, "recompute": 1.0}, "recompute takes 25% of a step"),
        # Most of what it takes beside computing is the chosen one's too.
        ({"forward": 1.1, "backward": 2.2, "data_communication": 0.5}, "computing takes 10% longer"),
    ],
)
def test_what_makes_a_layout_slower_is_what_the_chosen_one_lacks(parts: dict[str, float], says: str) -> None:
    def of(breakdown: dict[str, float]) -> TimePlan:
        step = sum(breakdown.values())
        return TimePlan.model_construct(step_seconds=step, breakdown_seconds=breakdown)

    assert why_slower(of(parts), of({"forward": 1.0, "backward": 2.0, "data_communication": 0.45})) == says
