"""Where saves go, what of them a failure leaves, and how large they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.hardware import instance
from trainyard.planner import plan, search
from trainyard.planner.formulas import formulas_of
from trainyard.planner.goodput import Goodput, Saved, goodput
from trainyard.planner.money import kept_checkpoints
from trainyard.planner.results import CheckpointPlan, TierPlan
from trainyard.spec.job import JobSpec, load_job

JOBS = Path(__file__).resolve().parents[2] / "jobs"
MakeJob = Callable[..., JobSpec]
LARGE = Saved(70e9)
DISKS = {"local_directory": "/tmp/checkpoints"}


def of(machine: str | None = "p5.48xlarge", **options: Any) -> tuple[Goodput, dict[str, Any]]:
    """(a 70B job's saves from 16 hosts, its times on each kind of storage)."""
    known = instance(machine) if machine else None
    stated = {"asynchronous": True, "interval_seconds": 1800.0} | options
    found = goodput(LARGE, 128, 16, machine=known, **stated)
    return found, {tier.name: tier for tier in found.tiers}


@pytest.mark.parametrize("destination", ["s3", "fsx"])
def test_lost_machines_take_their_disks_along_and_go_on_from_the_destination(destination: str) -> None:
    found, times = of(destination=destination, disks_first=True)
    behind, disks = times[destination], times["nvme"]
    assert (found.tier, found.save_seconds) == ("nvme", disks.save_seconds)
    assert found.saving.recovery == behind.recovery_seconds
    assert found.saving.save == pytest.approx(disks.save_seconds + behind.save_seconds)
    assert found.saving.stall == pytest.approx(70e9 * 12 / 128 / 10e9)


def test_what_the_neighbour_holds_too_is_not_lost() -> None:
    (alone, times), (both, _) = (of(disks_first=True, copied_to_peers=copied) for copied in (False, True))
    assert both.saving.save == pytest.approx(2 * times["nvme"].save_seconds), "a host writes two hosts' parts"
    assert both.saving.save < alone.saving.save
    assert both.saving.recovery == alone.saving.recovery
    assert both.fraction > alone.fraction


@pytest.mark.parametrize("destination", ["s3", "fsx"])
def test_machines_without_disks_save_to_the_destination_at_once(destination: str) -> None:
    asked, times = of(None, destination=destination, disks_first=True, copied_to_peers=True)
    assert asked == of(None, destination=destination)[0]
    assert (asked.tier, asked.saving.save) == (destination, times[destination].save_seconds)


def test_a_save_ends_at_the_destination_before_the_next_begins() -> None:
    found, times = of(disks_first=True, destination="fsx", interval_seconds=1.0)
    whole = times["nvme"].save_seconds + times["fsx"].save_seconds
    assert found.interval_seconds == pytest.approx(whole) and found.best_interval_seconds >= whole
    waiting, _ = of(disks_first=True, destination="fsx", asynchronous=False)
    assert (waiting.saving.stall, waiting.saving.save) == (pytest.approx(whole), 0.0)


def saves_of(job: JobSpec) -> tuple[CheckpointPlan, dict[str, TierPlan]]:
    found = plan(job).checkpoint
    assert found is not None
    return found, {tier.name: tier for tier in found.tiers}


def test_a_job_goes_on_from_its_own_destination(job: MakeJob) -> None:
    cluster = {"backend": "slurm", "instance_type": "p5.48xlarge"}
    large = {"source": "llama-3.1-70b"}
    on_fsx = {"destination": "/fsx/checkpoints"} | DISKS
    shared, tiers = saves_of(job(model=large, compute=cluster, checkpoint=on_fsx))
    assert (shared.tier, shared.recovery_seconds) == ("nvme", tiers["fsx"].recovery_seconds)
    assert tiers["fsx"].recovery_seconds > tiers["s3"].recovery_seconds
    bucket, tiers = saves_of(job(model=large, checkpoint=DISKS))
    assert (bucket.tier, bucket.recovery_seconds) == ("nvme", tiers["s3"].recovery_seconds)
    copied, _ = saves_of(job(model=large, checkpoint=DISKS | {"peer_copy": True}))
    assert copied.goodput > bucket.goodput


def test_a_running_average_lies_in_every_checkpoint_and_in_every_copy_of_it(job: MakeJob) -> None:
    found = {}
    for name, optimizer in {
        "adamw": {},
        "averaged": {"average_decay": 0.999},
        "sgd": {"kind": "sgd"},
    }.items():
        found[name] = plan(job(training={"optimizer": optimizer}))
    assert found["adamw"].checkpoint is not None and found["adamw"].cost is not None
    for name, share in (("averaged", 16 / 12), ("sgd", 8 / 12)):
        one, other = found[name], found["adamw"]
        assert one.checkpoint is not None and one.cost is not None
        assert other.checkpoint is not None and other.cost is not None
        assert one.checkpoint.size_gib == pytest.approx(share * other.checkpoint.size_gib)
        assert one.chosen.host.checkpoint_gib == pytest.approx(share * other.chosen.host.checkpoint_gib)
        ratio = one.cost.storage_gb_months / other.cost.storage_gb_months
        assert ratio == pytest.approx(share * one.cost.expected_hours / other.cost.expected_hours)


def test_a_frozen_towers_weights_are_in_no_checkpoint() -> None:
    both = load_job(JOBS / "vlm-llava-7b.yaml", ["images.freeze_vision=false"])
    frozen = load_job(JOBS / "vlm-llava-7b.yaml", ["images.freeze_vision=true"])
    tower = formulas_of(both).saved.params - formulas_of(frozen).saved.params
    assert tower / 1e6 == pytest.approx(303.5, rel=0.01)


def played(job: JobSpec, steps: int, every_save: int) -> tuple[float, int]:
    """(the mean number of checkpoints over a run that saves every so many steps, the number at its end), by the rule
    that the trainer removes by."""
    saved: dict[int, float | None] = {}
    total = 0
    for step in range(1, steps + 1):
        if step % every_save == 0:
            saved[step] = None
            saved = dict.fromkeys(job.checkpoint.retention.kept(saved))
        total += len(saved)
    return total / steps, len(saved)


@pytest.mark.parametrize(
    ("every_steps", "keep_every_steps", "keep_last"),
    [(100, 100, 3), (100, 1000, 3), (100, 250, 2), (7, 500, 3), (50, None, 4), (1000, 500, 1)],
)
def test_kept_checkpoints_are_those_that_retention_leaves(
    job: MakeJob, every_steps: int, keep_every_steps: int | None, keep_last: int
) -> None:
    spec = job(
        checkpoint={"every_steps": every_steps, "keep_every_steps": keep_every_steps, "keep_last": keep_last},
    )
    steps, seconds = 20_000, 2.0
    found = kept_checkpoints(spec, steps, seconds, min(every_steps * seconds, 1e9))
    during, after = played(spec, steps, every_steps)
    # Half of one more: none is there before its step.
    assert found.during == pytest.approx(during, rel=0.01, abs=0.6)
    assert found.after == pytest.approx(after, abs=1)


@pytest.mark.parametrize("keep_every_steps", [None, 1000, 250])
@pytest.mark.parametrize(("steps", "keep_last"), [(500, 10), (600, 10), (1500, 5), (100, 3)])
def test_a_short_run_keeps_no_more_than_it_saves(
    job: MakeJob, steps: int, keep_last: int, keep_every_steps: int | None
) -> None:
    """Ten were counted of a run with two saves."""
    spec = job(checkpoint={"every_steps": 250, "keep_every_steps": keep_every_steps, "keep_last": keep_last})
    found = kept_checkpoints(spec, steps, 2.0, 500.0)
    during, after = played(spec, steps, 250)
    saves, is_between = divmod(steps, 250)
    # The end is saved though it comes between.
    saves, after = saves + (is_between > 0), after + (is_between > 0)
    assert found.after == pytest.approx(after, abs=0.2) and found.after <= saves
    assert found.during == pytest.approx(during, abs=1.1)


def test_saves_by_the_clock_are_kept_where_they_happen_to_come(job: MakeJob) -> None:
    spec = job(checkpoint={"every_minutes": 15.0, "keep_every_steps": 100, "keep_last": 3})
    # 200 steps are asked for, and of 450 seconds' steps one in two is saved.
    assert kept_checkpoints(spec, 20_000, 450.0, 900.0).after == pytest.approx(100 + 3 * (1 - 100 / 10_000))
    # The clock comes before every_steps, which is then a save of its own.
    both = job(checkpoint={"every_minutes": 15.0, "every_steps": 1000, "keep_every_steps": 100, "keep_last": 3})
    found = kept_checkpoints(both, 20_000, 9.0, 900.0)
    assert found.after == pytest.approx(20 + 180 / 100 + 3, abs=0.5)


def test_checkpoints_that_stay_are_paid_for_during_the_run_and_named_after_it(job: MakeJob) -> None:
    run = {"model": {"source": "llama-3.1-70b"}, "training": {"steps": 20_000}}
    saving = {"every_steps": 100, "every_minutes": 1e6, "keep_last": 3}
    few, many = (plan(job(**run, checkpoint=saving | more)) for more in ({}, {"keep_every_steps": 100}))
    assert few.cost is not None and many.cost is not None and many.checkpoint is not None
    assert many.cost.storage_gb_months == pytest.approx(few.cost.storage_gb_months * 100 / 3)
    assert (few.cost.checkpoints_after, many.cost.checkpoints_after) == (3, 200)
    size = many.checkpoint.size_gib * 2**30 / 1e9
    assert many.cost.storage_gb_after == pytest.approx(200 * size)
    assert many.cost.storage_usd_a_month_after == pytest.approx(200 * size * 0.023)
    assert many.cost.planned_usd is not None and few.cost.planned_usd is not None
    more = (many.cost.storage_usd or 0) - (few.cost.storage_usd or 0)
    assert more > 100 and many.cost.planned_usd - few.cost.planned_usd == pytest.approx(more)
    assert any("about 200 checkpoints are left at the end, 169," in note for note in many.notes)
    assert not any("are left at the end" in note for note in few.notes)
    for more_kept, number in (({}, 5), ({"keep_every_steps": 100}, 202)):
        best = plan(job(**run, checkpoint=saving | {"keep_best": {"metric": "loss", "num": 2}} | more_kept))
        assert best.cost is not None and best.cost.checkpoints_after == number


def test_dollars_say_that_they_are_without_storage_where_its_price_is_not_known(job: MakeJob) -> None:
    words = "no price known for s3-standard in us-west-2: what checkpoints cost in S3 is not in the dollars"
    elsewhere, here = plan(job(), region="us-west-2"), plan(job())
    assert elsewhere.cost is not None and elsewhere.cost.planned_usd is not None, "else this would prove nothing"
    assert elsewhere.cost.storage_usd is None and words in elsewhere.notes
    assert not any("s3-standard" in note for note in here.notes)
    for region, says in (("us-west-2", True), ("us-east-1", False)):
        found = search(job(), instances=["p5.48xlarge"], max_nodes=1, region=region)
        assert (words in found.notes) is says
    cluster = {"backend": "slurm", "instance_type": "p5.48xlarge"}
    shared = plan(job(compute=cluster, checkpoint={"destination": "/fsx/checkpoints"}), region="us-west-2")
    assert shared.cost is not None and shared.cost.storage_usd == 0
    assert not any("s3-standard" in note for note in shared.notes)
