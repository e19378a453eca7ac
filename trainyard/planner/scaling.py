"""How a job's speed grows with its machines: with the same global batch (strong), or with one that grows too (weak)."""

import math
from dataclasses import dataclass

from trainyard.errors import InputError
from trainyard.hardware import PriceBook
from trainyard.planner.candidates import powers
from trainyard.planner.results import Configuration
from trainyard.planner.search import fastest
from trainyard.spec.job import JobSpec

LEAST_MACHINES = 8
"""The curve goes so far at least, or to twice the job's own number."""


@dataclass(frozen=True)
class Point:
    """A number of machines at its fastest layout."""

    num_machines: int
    num_gpus: int
    configuration: Configuration
    tokens_per_second: float
    """With the next two: all GPUs together, and its 80% interval."""
    low: float
    high: float
    efficiency: float
    """Tokens/s a GPU over those of the fewest machines of the curve, 0 to 1 or a little more."""


def scaling(job: JobSpec, *, weak: bool, book: PriceBook | None = None) -> tuple[Point, ...]:
    """The curve over powers of two of the job's machines; empty where its machine isn't known, or none fits."""
    own, job = job.compute.instance_count, job.inelastic()
    found: list[Point] = []
    for count in powers(max(LEAST_MACHINES, 2 * own)):
        batch = job.training.global_batch_size
        if weak:
            batch = max(1, math.ceil(batch * count / own))
        moved = job.model_copy(
            update={
                "compute": job.compute.model_copy(update={"instance_count": count}),
                "training": job.training.model_copy(update={"global_batch_size": batch}),
                "parallelism": "auto",
            }
        )
        try:
            best = fastest(moved, book=book)
        except InputError:
            continue
        if best is None or best.time is None or not best.fits:
            continue
        rate = best.time.tokens_per_second
        spread = best.time.step_seconds_high / best.time.step_seconds
        gpus = best.parallelism.world_size
        first = found[0].tokens_per_second / found[0].num_gpus if found else rate / gpus
        found.append(Point(count, gpus, best, rate, rate / spread, rate * spread, rate / gpus / first))
    return tuple(found)
