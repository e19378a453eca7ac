"""Where saves go, what of them a failure leaves, and how large they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.hardware import instance
from trainyard.planner import plan
from trainyard.planner.formulas import formulas_of
from trainyard.planner.goodput import Goodput, Saved, goodput
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
