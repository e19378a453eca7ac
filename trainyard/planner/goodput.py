"""Checkpoints and failures: what a save costs, how often to save, and the share of time that is progress.

First-order model of Young (1974) and Daly (2006): with a stall d per save, an interval t, a recovery r and a mean
time between failures M, a run loses d/t to saving and (t/2 + r)/M to failures; t = sqrt(2 d M) is best.
"""

import math
from dataclasses import dataclass

from trainyard.hardware import failures_per_node_day

CHECKPOINT_BYTES_PER_PARAM = 12
"""fp32 weights and both moments: the trainer's layout-free format."""

STORE_BYTES_PER_SECOND_PER_NODE = 6.25e9
"""To S3: half of the 100 Gb/s that AWS's documentation gives as one instance's most."""

HOST_COPY_BYTES_PER_SECOND = 10e9
"""From one GPU to pinned host memory, over PCIe, with the copy's own overhead: an asynchronous save's only stall."""

RECOVERY_SECONDS = 300.0
"""From a failure to the next step: the platform's objective. Meta reports 200 s for 16,384 GPUs (arXiv:2602.00277)."""

GPUS_PER_MEASURED_NODE = 8

SPOT_HOURS_BETWEEN_RECLAIMS = 12.0
"""Of a whole job, assumed: nobody publishes a rate per type and region. Too short only costs a few saves more."""


def hours_between_failures(num_gpus: int, *, spot: bool) -> float:
    """Mean hours between two failures of a job: its hardware's, and reclaims where its capacity is spot."""
    rate, _ = failures_per_node_day()
    per_hour = rate * num_gpus / GPUS_PER_MEASURED_NODE / 24
    return 1 / (per_hour + (1 / SPOT_HOURS_BETWEEN_RECLAIMS if spot else 0.0))


@dataclass(frozen=True)
class Goodput:
    """Seconds unless a name says otherwise."""

    checkpoint_bytes: float
    save_seconds: float
    """Until a checkpoint is in the store."""
    stall_seconds: float
    """While training waits for it."""
    interval_seconds: float
    """Between saves, as the job says."""
    best_interval_seconds: float
    mean_time_between_failures_seconds: float
    fraction: float
    """Of wall-clock time that is progress, 0 to 1."""


def goodput(params: float, num_gpus: int, num_hosts: int, *, asynchronous: bool, interval_seconds: float) -> Goodput:
    """Goodput of a job; `params` counts what a checkpoint holds (the adapters alone, for LoRA)."""
    size = params * CHECKPOINT_BYTES_PER_PARAM
    save = size / (STORE_BYTES_PER_SECOND_PER_NODE * num_hosts)
    stall = size / num_gpus / HOST_COPY_BYTES_PER_SECOND if asynchronous else save
    between = 3600 * hours_between_failures(num_gpus, spot=False)
    best = math.sqrt(2 * stall * between)
    # A save must end before the next begins.
    interval = max(interval_seconds, save)
    lost = stall / interval + (interval / 2 + RECOVERY_SECONDS) / between
    return Goodput(size, save, stall, interval, max(best, save), between, max(0.0, 1 - lost))
