"""Saves, failures, hours and dollars: closed forms against the same events played one by one, and by hand."""

import datetime
import io
import json
import math
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from trainyard.errors import InputError
from trainyard.hardware import PriceBook, instance, price
from trainyard.launch.checks import refused_by_plan
from trainyard.planner import plan, search
from trainyard.planner.goodput import (
    RESTART_SECONDS,
    Saved,
    Saving,
    best_interval_seconds,
    expected_seconds,
    goodput,
    hours_between_failures,
    num_nvme_disks,
    spread_of_failures,
    tiers_of,
)
from trainyard.planner.host_memory import host_memory
from trainyard.planner.layout import Layout, Precision
from trainyard.planner.money import ONE_IN_TEN, todays_book
from trainyard.planner.page import page_of
from trainyard.planner.render import print_plan
from trainyard.planner.render_search import render_search
from trainyard.planner.shapes import ModelShape
from trainyard.planner.simulation import mean_seconds, play
from trainyard.spec.job import JobSpec

MakeJob = Callable[..., JobSpec]
Place = Literal["none", "cpu", "nvme"]
DAY = datetime.date(2025, 11, 20)

SAVINGS = [
    Saving(interval=900, stall=2, save=60, recovery=300, between_failures=40_000),
    Saving(interval=600, stall=30, save=0, recovery=200, between_failures=8_000),
    Saving(interval=3600, stall=5, save=300, recovery=400, between_failures=30_000),
    Saving(interval=120, stall=1, save=20, recovery=60, between_failures=1_500),
    Saving(interval=900, stall=2, save=500, recovery=200, between_failures=8_000),
]


@pytest.mark.parametrize("saving", SAVINGS, ids=["often", "synchronous", "hourly", "broken", "slow store"])
def test_the_closed_form_is_the_mean_of_runs_played_event_by_event(saving: Saving) -> None:
    """Within 0.4% beside chance, where saves on their way (a term of first order) make up to 6%."""
    work = 200 * saving.interval
    mean, error = mean_seconds(work, saving, num_runs=400)
    expected = expected_seconds(work, saving)
    assert error / mean < 0.01, "else this would prove nothing"
    assert abs(expected - mean) < 3 * error + 0.004 * mean


@pytest.mark.parametrize("saving", SAVINGS, ids=["often", "synchronous", "hourly", "broken", "slow store"])
def test_the_spread_is_what_runs_show(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    """By chance alone where the rate of failures is known; else each run has a rate of its own, four of five of them
    within the published factor up and down."""
    work = 100 * saving.interval
    rng = random.Random(3)

    def shown(factor: float) -> float:
        monkeypatch.setattr("trainyard.planner.goodput.FAILURE_RATE_SPREAD", factor)
        times = []
        for seed in range(1000):
            rate = math.exp(rng.gauss(0, math.log(factor) / ONE_IN_TEN))
            of_its_own = replace(saving, between_failures=saving.between_failures / rate)
            times.append(play(work, of_its_own, seed=seed).seconds)
        return statistics.stdev(times) / statistics.fmean(times)

    assert shown(1.0) == pytest.approx(spread_of_failures(work, saving), rel=0.08)
    # To first order in the rate: the longest of a failing run's tail is beyond it.
    assert shown(1.7) == pytest.approx(spread_of_failures(work, saving), rel=0.25)


def test_a_run_without_failures_is_its_work_and_its_stalls() -> None:
    saving = Saving(interval=100, stall=3, save=10, recovery=50, between_failures=math.inf)
    played = play(1000, saving, seed=1)
    assert (played.seconds, played.num_failures, played.num_saves) == (1000 + 9 * 3, 0, 8)
    assert expected_seconds(1000, saving) == pytest.approx(1000 + 10 * 3)
    assert spread_of_failures(1000, saving) == 0.0


def test_a_run_that_never_gets_on_is_endless_in_both() -> None:
    hopeless = Saving(interval=10_000, stall=1, save=1, recovery=100, between_failures=20)
    assert expected_seconds(50_000, hopeless) > 1e12
    with pytest.raises(ValueError, match="never ends"):
        play(50_000, hopeless, seed=1, most_failures=2000)
    never_back = Saving(interval=100, stall=1, save=10, recovery=1e6, between_failures=10)
    with pytest.raises(ValueError, match="never ends"):
        play(1000, never_back, seed=0, most_failures=2000)


def test_without_saves_a_long_run_does_not_finish_and_words_say_so(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A dozen searches, which say nothing of money.
    monkeypatch.setattr("trainyard.planner.page.scaling", lambda *_, **__: ())
    unsaved = Saving(interval=math.inf, stall=2, save=60, recovery=300, between_failures=40_000)
    for work in (1e5, 1e6, 1e7, 2e7, 2.5e7, 3e7, 1e12):
        total = expected_seconds(work, unsaved)
        assert total == math.inf or total < 1e6 * work
        assert math.isfinite(spread_of_failures(work, unsaved))
    assert expected_seconds(1e5, unsaved) < 1e6 and expected_seconds(2e7, unsaved) == math.inf
    spec = job(training={"steps": 200_000_000}, checkpoint={"every_minutes": 1e9})
    endless = plan(spec)
    assert endless.cost is not None and endless.cost.expected_hours == math.inf
    shown = Console(width=200, record=True, file=io.StringIO())
    print_plan(endless, shown)
    assert "cost: unknown: the run does not finish" in shown.export_text()
    reason = refused_by_plan(endless)[-1]
    assert "does not finish" in reason and "\n" not in reason
    found = search(spec, instances=["p5.48xlarge"], max_nodes=1)
    assert not any(item.chosen or item.on_front for item in found.options)
    assert "on no machines does the run finish" in found.notes[-1]
    page = page_of(spec, endless, book=todays_book(), search=found)
    shown.print(render_search(found))
    for text in (page, shown.export_text()):
        assert "does not finish" in text and not re.search(r"\binf\b", text)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 500), st.floats(1_000, 1e7))
def test_no_other_interval_costs_less_than_the_best(stall: float, between: float) -> None:
    best = best_interval_seconds(stall, between)

    def cost(interval: float) -> float:
        saving = Saving(interval, stall, 0.0, 300.0, between)
        return expected_seconds(1000 * interval, saving) / (1000 * interval)

    for factor in (0.5, 0.9, 1.1, 2.0):
        assert cost(best) <= cost(best * factor) * (1 + 1e-9)


def test_the_best_interval_is_youngs_where_failures_are_rare() -> None:
    assert best_interval_seconds(2.0, 1e7) == pytest.approx(math.sqrt(2 * 2.0 * 1e7), rel=1e-3)


def test_tiers_by_hand() -> None:
    machine = instance("p5.48xlarge")
    assert num_nvme_disks(machine) == 8
    tiers = {tier.name: tier for tier in tiers_of(machine, 4)}
    assert tiers["nvme"].write_bytes_per_second == 4 * 8 * 1e9
    assert tiers["s3"].read_bytes_per_second == 4 * 6.25e9
    assert tiers["fsx"].read_bytes_per_second == 9.6e9, "the file system's own rate, shared by four clients"
    assert {tier.name for tier in tiers_of(None, 1)} == {"s3", "fsx"}
    found = goodput(Saved(70e9), 128, 16, asynchronous=True, interval_seconds=1800, machine=machine)
    times = {tier.name: tier for tier in found.tiers}
    assert times["s3"].save_seconds == pytest.approx(70e9 * 12 / (16 * 6.25e9))
    assert times["s3"].recovery_seconds == pytest.approx(RESTART_SECONDS + times["s3"].restore_seconds)
    assert found.stall_seconds == pytest.approx(70e9 * 12 / 128 / 10e9)
    assert times["nvme"].save_seconds < times["fsx"].save_seconds


def test_spot_fails_more_often_and_costs_goodput() -> None:
    # Reclaims, one in 12 h of a whole job however large it is, come beside the hardware's failures.
    for num_gpus in (8, 512, 16384):
        spot_rate, own_rate = (1 / hours_between_failures(num_gpus, spot=spot) for spot in (True, False))
        assert spot_rate - own_rate == pytest.approx(1 / 12)
    assert hours_between_failures(16384, spot=False) == pytest.approx(54 * 24 / 419, rel=0.01), "Llama 3's own run"
    common = {"asynchronous": True, "interval_seconds": 900.0}
    safe, spot = (goodput(Saved(7e9), 8, 1, spot=spot, **common) for spot in (False, True))  # type: ignore[arg-type]
    assert spot.fraction < safe.fraction < 1
    assert spot.best_interval_seconds < safe.best_interval_seconds


def test_the_plan_says_what_each_tier_is_worth(job: MakeJob) -> None:
    found = plan(job(model={"source": "llama-3.1-70b"}, checkpoint={"local_directory": "/tmp/checkpoints"}))
    assert found.checkpoint is not None
    assert found.checkpoint.tier == "nvme"
    by_name = {tier.name: tier for tier in found.checkpoint.tiers}
    assert found.checkpoint.save_seconds == by_name["nvme"].save_seconds
    # Lost machines take their disks along: what is counted is the way back from S3.
    assert found.checkpoint.recovery_seconds == by_name["s3"].recovery_seconds
    assert all(tier.within_objective is (tier.recovery_seconds <= 300) for tier in found.checkpoint.tiers)
    alone = {"instance_type": "ml.p5.48xlarge", "instance_count": 2}
    large = plan(job(model={"source": "llama-3.1-405b"}, compute=alone, parallelism={"data_shard": 16}))
    assert any("beyond the objective of 300" in note for note in large.notes)


def test_hours_and_dollars_by_hand(job: MakeJob) -> None:
    found = plan(job())
    assert found.cost is not None and found.checkpoint is not None and found.chosen.time is not None
    cost, save, time = found.cost, found.checkpoint, found.chosen.time
    assert time.hours is not None and save.interval_seconds == 900
    work = time.hours * 3600
    saving = Saving(
        interval=min(900.0, work),
        stall=save.stall_seconds,
        save=save.save_seconds,
        recovery=save.recovery_seconds,
        between_failures=save.mean_hours_between_failures * 3600,
    )
    assert cost.expected_hours == pytest.approx(expected_seconds(work, saving) / 3600)
    assert cost.usd_on_demand == pytest.approx(cost.expected_hours * 16 * 55.04)
    assert cost.storage_gb_months == pytest.approx(8.0303e9 * 12 / 1e9 * 0.5 * cost.expected_hours / 730, rel=1e-3)
    assert cost.checkpoints_after == 1, "less than 15 minutes: the end alone is saved"
    assert cost.storage_usd == pytest.approx(cost.storage_gb_months * 0.023)
    assert cost.planned_usd == pytest.approx((cost.usd_on_demand or 0) + (cost.storage_usd or 0))
    assert cost.usd_per_million_tokens == pytest.approx((cost.planned_usd or 0) / (100 * 512 * 4096) * 1e6)
    assert cost.usd_per_million_samples == pytest.approx((cost.usd_per_million_tokens or 0) * 4096)
    step = math.log(time.step_seconds_high / time.step_seconds) / ONE_IN_TEN
    failures = math.log1p(spread_of_failures(work, saving))
    factor = math.exp(ONE_IN_TEN * math.hypot(step, failures))
    assert cost.expected_hours_high == pytest.approx(cost.expected_hours * factor)
    assert cost.expected_hours_low < cost.expected_hours < cost.expected_hours_high
    assert (cost.planned_usd_low or 0) < (cost.planned_usd or 0) < (cost.planned_usd_high or 0)


def test_a_run_of_unknown_length_that_never_saves_loses_a_day(job: MakeJob) -> None:
    """Of a job in epochs nobody knows here when it ends; what a failure costs without saves is counted as a day's."""
    found = plan(job(training={"steps": None, "epochs": 3}, checkpoint={"every_minutes": 1e6}))
    assert found.checkpoint is not None
    machine = instance("p5.48xlarge")
    daily = goodput(Saved(8.0303e9), 128, 16, asynchronous=True, interval_seconds=86_400, machine=machine)
    assert found.checkpoint.goodput == pytest.approx(daily.fraction, rel=1e-6)
    assert daily.fraction < 0.98, "else this would prove nothing"


def test_host_memory_by_hand() -> None:
    shape = ModelShape(layers=2, hidden=64, ffn=128, heads=4, kv_heads=4, head_dim=16, vocab=1000)
    layout = Layout(engine="deepspeed", zero_stage=2, shard_degree=8, data_parallel=8, offload="cpu")
    use = host_memory(shape.params, shape.params, layout, 8, asynchronous_saves=True)
    assert use.offloaded == pytest.approx(shape.params * 16 * 1.5)
    assert use.checkpoint == pytest.approx(shape.params * 12)
    assert use.processes == (8 + 4 * 8) * 2**30
    synchronous = host_memory(shape.params, shape.params, Layout(data_parallel=8), 8, asynchronous_saves=False)
    assert synchronous.checkpoint == 0 and synchronous.offloaded == 0


@pytest.mark.parametrize(
    ("precision", "optimizer", "weights", "each", "buffers"),
    [
        ("bf16", "cpu", "none", 1.5 * 16, 0),
        ("bf16", "cpu", "cpu", 1.5 * 18, 0),
        ("fp32", "cpu", "cpu", 1.5 * 20, 0),
        ("bf16", "cpu", "nvme", 1.5 * 16, 8),
        # On the disk are weights, moments and the step's gradients; those that micro-batches add up are not.
        ("bf16", "nvme", "none", 4, 8),
        ("fp16", "nvme", "none", 2, 8),
        ("bf16", "nvme", "nvme", 4, 8),
        ("bf16", "nvme", "cpu", 4 + 2, 8),
    ],
)
def test_what_deepspeed_leaves_in_a_hosts_memory(
    precision: Precision, optimizer: Place, weights: Place, each: float, buffers: float
) -> None:
    layout = Layout(
        engine="deepspeed",
        library="trainyard",
        zero_stage=3,
        shard_degree=16,
        data_parallel=16,
        precision=precision,
        offload=optimizer,
        offload_parameters=weights,
    )
    use = host_memory(7e9, 7e9, layout, 8, asynchronous_saves=False)
    assert use.offloaded == pytest.approx(7e9 * each / 2)
    assert use.disk_buffers == buffers * 8 * 2**30
    assert use.needed == use.processes + use.offloaded + use.disk_buffers


def test_of_adapters_the_host_holds_their_state_alone() -> None:
    layout = Layout(engine="deepspeed", zero_stage=3, shard_degree=8, data_parallel=8, offload="cpu", method="lora")
    both = host_memory(70e9, 1e9, layout, 8, asynchronous_saves=False)
    weights = host_memory(70e9, 1e9, replace(layout, offload_parameters="cpu"), 8, asynchronous_saves=False)
    assert both.offloaded == pytest.approx(1e9 * 16 * 1.5)
    assert weights.offloaded - both.offloaded == pytest.approx(70e9 * 2 * 1.5)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 8, 16]), st.booleans())
def test_more_hosts_never_need_more_of_each(hosts: int, weights_too: bool) -> None:
    shape = ModelShape(layers=8, hidden=512, ffn=2048, heads=8, kv_heads=8, head_dim=64, vocab=32000)

    def needed(count: int) -> float:
        layout = Layout(
            engine="deepspeed",
            zero_stage=3,
            shard_degree=8 * count,
            data_parallel=8 * count,
            offload="cpu",
            offload_parameters="cpu" if weights_too else "none",
        )
        return host_memory(shape.params, shape.params, layout, 8, asynchronous_saves=True).needed

    assert needed(2 * hosts) <= needed(hosts)


def test_an_old_price_is_refused_and_says_how_to_get_todays() -> None:
    read = datetime.date(2026, 11, 9)
    last_day, next_day = (PriceBook.opened(today=read + datetime.timedelta(days=days)) for days in (540, 541))
    assert last_day.price("ml.p5.48xlarge").usd_per_hour == 55.04
    with pytest.raises(InputError, match=r"of 2026-11-09, 541 days old, and is not quoted after 540; .*prices refresh"):
        next_day.price("ml.p5.48xlarge")


def test_spot_grows_old_first() -> None:
    book = PriceBook.opened(today=DAY)
    assert book.price("ml.p5.48xlarge", purchase="spot").usd_per_hour == price("ml.p5.48xlarge", spot=True).usd_per_hour
    later = PriceBook.opened(today=DAY + datetime.timedelta(days=90))
    assert later.price("ml.p5.48xlarge").usd_per_hour == 55.04
    with pytest.raises(
        InputError, match=r"spot price of ml\.p5\.48xlarge in us-east-1 is of 2025-11-01.*prices refresh"
    ):
        later.price("ml.p5.48xlarge", purchase="spot")
    any_age = PriceBook.opened(today=None)
    assert any_age.price("ml.p5.48xlarge", purchase="spot").usd_per_hour > 0


def test_a_plan_on_old_prices_has_no_dollars(job: MakeJob) -> None:
    found = plan(job(), book=PriceBook.opened(today=datetime.date(2030, 1, 1)))
    assert found.cost is not None and found.cost.planned_usd is None and found.on_demand is None
    assert found.price_missing is not None and "days old, and is not quoted after 540; " in found.price_missing
    assert found.price_missing.count("prices refresh") == 1
    assert found.cost.expected_hours > 0


def refreshed(path: Path, *rows: tuple[str, str, str, float, str]) -> Path:
    keys = ("instance", "region", "purchase", "price", "as_of")
    found = [{**dict(zip(keys, row, strict=True)), "zone": "", "source": "a test"} for row in rows]
    path.write_text(json.dumps({"prices": found}), encoding="utf-8")
    return path


def test_refreshed_prices_come_first_and_sagemakers_own_before_ec2s(tmp_path: Path) -> None:
    file = refreshed(
        tmp_path / "prices.json",
        ("p5.48xlarge", "us-east-1", "on-demand", 50.0, "2027-01-01"),
        ("p5.48xlarge", "us-east-1", "sagemaker on-demand", 60.0, "2027-01-01"),
        ("p5.48xlarge", "us-east-1", "training plan", 31.0, "2027-01-01"),
        ("p5.48xlarge", "us-east-1", "spot", 20.0, "2027-01-01"),
        ("p5.48xlarge", "us-east-1", "spot", 30.0, "2027-01-01"),
    )
    book = PriceBook.opened(file, today=datetime.date(2027, 1, 2))
    own = book.price("ml.p5.48xlarge")
    assert (own.usd_per_hour, own.basis) == (60.0, "SageMaker training, on demand")
    assert book.price("p5.48xlarge").usd_per_hour == 50.0
    assert book.price("ml.p5.48xlarge", purchase="training_plan").usd_per_hour == 31.0
    assert book.price("ml.p5.48xlarge", purchase="spot").usd_per_hour == 25.0
    assert book.price("ml.p4d.24xlarge").usd_per_hour == 21.957642, "what wasn't refreshed comes from the table"


@pytest.mark.parametrize("text", ["", "[]", '{"prices": [{}]}', '{"prices": 3}', '{"prices": [{"instance": "p5"}]}'])
def test_a_broken_file_of_prices_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"is no file of prices .*prices refresh") as caught:
        PriceBook.opened(file, today=DAY)
    assert "\n" not in str(caught.value)


def test_blocks_are_quoted_beside_the_rest(job: MakeJob) -> None:
    book = PriceBook.opened(today=datetime.date(2026, 3, 1))
    found = plan(job(compute={"instance_type": "ml.p5en.48xlarge"}), book=book)
    block = next(quote for quote in found.quotes if quote.purchase == "capacity_block")
    assert block.usd_per_hour == 41.61 and "said of most regions" in block.basis
    assert found.cost is not None
    assert found.cost.usd_capacity_block == pytest.approx(found.cost.expected_hours * 16 * 41.61)
