"""The learning rate at a step: a pure function, so that a resume needs the step alone."""

import math

from trainyard.spec.job import ScheduleSpec


def learning_rate_at(step: float, *, num_steps: int, peak: float, schedule: ScheduleSpec) -> float:
    """The rate used in optimizer step `step` (from 1 to `num_steps`; a part of one where a batch is smaller).

    Warm-up is the line from 0 (before step 1) to the peak at `warmup_steps`; the decay ends at
    `final_fraction` x peak in the last step. wsd (warm-up, stable, decay) holds the peak until the last
    `decay_fraction` of all steps and then falls on a line.
    """
    assert 0 < step <= num_steps
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    return peak * _decay_factor(step, num_steps=num_steps, schedule=schedule)


def _decay_factor(step: float, *, num_steps: int, schedule: ScheduleSpec) -> float:
    start = schedule.warmup_steps
    if schedule.kind == "wsd":
        start = max(start, schedule.decay_begins_after(num_steps))
    if schedule.kind == "constant" or step <= start:
        return 1.0
    progress = (step - start) / (num_steps - start)
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1.0 - progress
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining
