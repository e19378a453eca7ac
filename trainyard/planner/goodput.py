"""Saves and failures: what a checkpoint costs on each kind of storage, how often to save, and what of the time is left.

Model of Young (1974) and Daly (2006): failures come at random, M seconds apart in the mean, also while a run recovers;
each throws it back to its newest whole checkpoint. With work t between saves, a stall d per save and a recovery r, the
expected time of a piece is M e^(r/M) (e^((t+d)/M) - 1). A save that goes on beside the training for s seconds is no
checkpoint until it ends: each failure loses s more. `planner.simulation` plays the same events one by one, and the
tests hold the two together.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Literal

from trainyard.hardware import Instance, failures_per_node_day
from trainyard.hardware.tables import rows

WEIGHT_BYTES = 4
"""In fp32, as all in the trainer's layout-free format: weights, the optimizer's averages, the weights' own if asked."""

CHECKPOINT_BYTES_PER_PARAM = 3 * WEIGHT_BYTES
"""Weights and AdamW's two averages; those that it keeps in 8 bits are saved in fp32."""

SAVED_AVERAGES = {"adamw": 2, "adamw_8bit": 2, "adafactor": 0, "muon": 1, "sgd": 1}
"""Optimizer -> the averages of a weight that it saves; adafactor's rows and columns are next to nothing."""

HOST_COPY_BYTES_PER_SECOND = 10e9
"""From one GPU to pinned host memory, over PCIe, with the copy's own overhead: an asynchronous save's only stall."""

S3_BYTES_PER_SECOND_PER_NODE = 6.25e9
"""Half of the 100 Gb/s that AWS's documentation gives as one instance's most."""

FSX_CLIENT_BYTES_PER_SECOND = 12.5e9
"""One client's most without EFA: 100 Gb/s (FSx documentation)."""

FSX_BYTES_PER_SECOND = 9.6e9
"""Of a whole file system, assumed: 9.6 TiB at 1,000 MB/s per TiB, the least that EFA allows at that rate."""

NVME_READ_BYTES_PER_SECOND_PER_DISK = 2e9
"""Assumed: the eight disks of a p4d read 16 GB/s together."""

NVME_WRITE_BYTES_PER_SECOND_PER_DISK = 1e9
"""Assumed: half of what is read."""

RESTART_SECONDS = 210.0
"""From a failure to the next step, but for reading the checkpoint: the budget of parts in docs/recovery.md (300 s less
the 90 s of its load)."""

RECOVERY_OBJECTIVE_SECONDS = 300.0
"""The platform's objective. Meta reports 200 s for 16,384 GPUs (arXiv:2602.00277)."""

GPUS_PER_MEASURED_NODE = 8

SPOT_HOURS_BETWEEN_RECLAIMS = 12.0
"""Of a whole job, assumed: nobody publishes a rate per type and region. Too short only costs a few saves more."""

FAILURE_RATE_SPREAD = 1.7
"""Factor up and down of published failure rates: 2.3 (Meta, arXiv:2602.00277) to 6.5 (arXiv:2410.21680) per 1000 node
days around Llama 3's 3.79."""

MOST_TIMES_THE_WORK = 1e6
"""A run that takes longer than so many times its work does not finish."""

TierName = Literal["nvme", "fsx", "s3"]


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    params: float
    """The adapters' alone, for LoRA."""
    bytes_per_param: float = CHECKPOINT_BYTES_PER_PARAM


@dataclass(frozen=True)
class Tier:
    """A place for checkpoints: bytes/s of all hosts of a job together."""

    name: TierName
    write_bytes_per_second: float
    read_bytes_per_second: float


def tiers_of(machine: Instance | None, num_hosts: int) -> tuple[Tier, ...]:
    """The places that a job's hosts can save to, fastest last: S3, a file system, and their own disks."""
    s3 = S3_BYTES_PER_SECOND_PER_NODE * num_hosts
    fsx = min(FSX_CLIENT_BYTES_PER_SECOND * num_hosts, FSX_BYTES_PER_SECOND)
    found = [Tier("s3", s3, s3), Tier("fsx", fsx, fsx)]
    disks = num_nvme_disks(machine) * num_hosts if machine is not None else 0
    if disks:
        found.append(
            Tier("nvme", disks * NVME_WRITE_BYTES_PER_SECOND_PER_DISK, disks * NVME_READ_BYTES_PER_SECOND_PER_DISK)
        )
    return tuple(found)


def num_nvme_disks(machine: Instance) -> int:
    """Local disks of a type: 8 of "8x3800GB"."""
    row = next(row for row in rows("aws_instances") if row["instance"] == machine.type)
    return sum(int(count) for count in re.findall(r"(\d+)x", row["local_nvme_disks"] or ""))


def hours_between_failures(num_gpus: int, *, spot: bool) -> float:
    """Mean hours between two failures of a job: its hardware's, and reclaims where its capacity is spot."""
    rate, _ = failures_per_node_day()
    per_hour = rate * num_gpus / GPUS_PER_MEASURED_NODE / 24
    return 1 / (per_hour + (1 / SPOT_HOURS_BETWEEN_RECLAIMS if spot else 0.0))


@dataclass(frozen=True)
class Saving:
    """How a run saves and fails. Seconds."""

    interval: float
    """Work from one save to the next; infinite: nothing is saved before the end."""
    stall: float
    """While training waits for a save."""
    save: float
    """From the end of the stall until the checkpoint is whole, while training goes on."""
    recovery: float
    """From a failure to the next step."""
    between_failures: float
    """Mean time from one failure to the next."""


def best_interval_seconds(stall: float, between_failures: float) -> float:
    """The work between saves that costs least: the exact optimum of Daly's expectation, sqrt(2 d M) to first order.

    Its derivative is zero where 1 - x = e^(-x - d/M), with x = t/M: solved by Newton's method from Young's value.
    """
    if stall <= 0 or not math.isfinite(between_failures):
        return 0.0 if stall <= 0 else math.inf
    delta = stall / between_failures
    x = min(math.sqrt(2 * delta), 1.0)
    for _ in range(60):
        fallen = math.exp(-x - delta)
        slope = 1 - fallen
        step = (x - 1 + fallen) / slope
        x -= step
        if abs(step) < 1e-15:
            break
    return x * between_failures


def expected_seconds(work: float, saving: Saving) -> float:
    """Mean wall-clock time of `work` seconds of training, saves and failures included; infinite where it would be more
    than MOST_TIMES_THE_WORK: nobody waits for that, and its dollars would be numbers of a hundred digits."""
    interval = min(saving.interval, work)
    if work <= 0:
        return 0.0
    mean = saving.between_failures
    if not math.isfinite(mean):
        return work / interval * (interval + saving.stall)
    # Failures while the newest save is on its way go back one save further.
    share = 1 - min(saving.save, interval) / mean
    if share <= 0:
        return math.inf
    try:
        piece = mean * math.exp(saving.recovery / mean) * math.expm1((interval + saving.stall) / mean)
    except OverflowError:
        return math.inf
    total = work / interval * piece / share
    return total if total <= MOST_TIMES_THE_WORK * work else math.inf


def spread_of_failures(work: float, saving: Saving) -> float:
    """Relative standard deviation of the wall-clock time by chance and by what isn't known of the rate.

    The number of failures is Poisson's; each loses a uniform part of an interval, the save on its way, the recovery.
    """
    total = expected_seconds(work, saving)
    if not math.isfinite(total) or total <= 0 or not math.isfinite(saving.between_failures):
        return 0.0
    count = total / saving.between_failures
    interval = min(saving.interval, work) + saving.stall
    fixed = saving.save + saving.recovery
    square = interval**2 / 3 + interval * fixed + fixed**2
    by_chance = math.sqrt(count * square)
    by_rate = count * (interval / 2 + fixed) * math.log(FAILURE_RATE_SPREAD) / 1.2816
    return math.hypot(by_chance, by_rate) / total


@dataclass(frozen=True)
class TierTimes:
    """A checkpoint on one kind of storage. Seconds."""

    name: TierName
    save_seconds: float
    restore_seconds: float
    recovery_seconds: float
    """From a failure to the next step, where the newest checkpoint is read from there."""


@dataclass(frozen=True)
class Goodput:
    """Seconds unless a name says otherwise."""

    checkpoint_bytes: float
    tier: TierName
    """Where a checkpoint is whole first."""
    tiers: tuple[TierTimes, ...]
    save_seconds: float
    """Until a checkpoint is whole there."""
    stall_seconds: float
    """While training waits for it."""
    interval_seconds: float
    """Between saves, as the job says."""
    best_interval_seconds: float
    mean_time_between_failures_seconds: float
    saving: Saving
    fraction: float
    """Of wall-clock time that is progress, 0 to 1."""


def goodput(
    saved: Saved,
    num_gpus: int,
    num_hosts: int,
    *,
    asynchronous: bool,
    interval_seconds: float,
    machine: Instance | None = None,
    destination: Literal["fsx", "s3"] = "s3",
    disks_first: bool = False,
    copied_to_peers: bool = False,
    spot: bool = False,
    work_seconds: float = math.inf,
) -> Goodput:
    """Goodput of a job.

    `destination`: where a save stays; `disks_first`: it goes there from the hosts' own disks, where they have some;
    `copied_to_peers`: each host's part lies on the next host's disks as well; `work_seconds`: the run's, which no
    interval exceeds.
    """
    size = saved.params * saved.bytes_per_param
    times = {item.name: _times(item, size) for item in tiers_of(machine, num_hosts)}
    behind = times[destination]
    place = times.get("nvme", behind) if disks_first else behind
    local = 0.0 if place is behind else place.save_seconds * (2 if copied_to_peers else 1)
    # A save ends with its commit at the destination; the next one waits for that.
    committed = local + behind.save_seconds
    # Reclaimed and lost machines take their disks with them: what they had is read from the destination, and unless
    # their neighbours have it too, what isn't committed there is lost.
    lag = local if local and copied_to_peers else committed
    stall = size / num_gpus / HOST_COPY_BYTES_PER_SECOND if asynchronous else committed
    between = 3600 * hours_between_failures(num_gpus, spot=spot)
    best = max(best_interval_seconds(stall, between), committed)
    # A save must end before the next begins.
    interval = max(interval_seconds, committed)
    saving = Saving(
        interval=interval,
        stall=stall,
        save=lag if asynchronous else 0.0,
        recovery=behind.recovery_seconds,
        between_failures=between,
    )
    # Of a run without end, that of a single piece is its share.
    work = min(work_seconds, 1000 * interval) if math.isfinite(interval) else work_seconds
    expected = expected_seconds(work, saving) if math.isfinite(work) else math.inf
    fraction = work / expected if math.isfinite(expected) and expected > 0 else 0.0
    return Goodput(
        checkpoint_bytes=size,
        tier=place.name,
        tiers=tuple(times.values()),
        save_seconds=place.save_seconds,
        stall_seconds=stall,
        interval_seconds=interval,
        best_interval_seconds=best,
        mean_time_between_failures_seconds=between,
        saving=saving,
        fraction=fraction,
    )


def without_failures(saving: Saving) -> Saving:
    """The same saves on machines that never fail."""
    return dataclasses.replace(saving, between_failures=math.inf)


def _times(tier: Tier, size: float) -> TierTimes:
    restore = size / tier.read_bytes_per_second
    return TierTimes(tier.name, size / tier.write_bytes_per_second, restore, RESTART_SECONDS + restore)
