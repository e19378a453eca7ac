"""How far a job must be trained to reach a loss, by the curve of an earlier run: its plan then says what that costs."""

import csv
import math
from pathlib import Path

from trainyard.errors import InputError
from trainyard.planner.resolve import num_steps
from trainyard.spec.job import JobSpec
from trainyard.spec.words import counted

UNITS = ("tokens", "samples")
"""First column of a curve: tokens, or samples (sequences, images) seen; the second is loss."""


def until_loss(job: JobSpec, curve: Path, target: float) -> tuple[JobSpec, str]:
    """(the job with as many steps as the curve needs to `target`, a note that says so); InputError where it never does.

    Between two points the loss is taken to fall evenly with the logarithm of what was seen, as power laws do over short
    stretches (Kaplan et al., arXiv:2001.08361, section 3); before the first and beyond the last nothing is guessed.
    """
    unit, points = _read(curve)
    if unit == "tokens" and job.task == "image_classification":
        raise InputError(f"--loss-curve {curve}: counts tokens, and this job reads images; give samples,loss")
    seen = _seen_at(curve, points, target)
    # Stated steps are steps of the stated batch: an elastic job on fewer instances makes more of its smaller ones.
    each = job.training.global_batch_size * (job.data.sequence_length if unit == "tokens" else 1)
    stated_steps = max(1, math.ceil(seen / each))
    training = job.training.model_copy(update={"steps": stated_steps, "tokens": None, "epochs": None})
    moved = job.model_copy(update={"training": training})
    steps = num_steps(moved)
    assert steps is not None
    note = f"to a loss of {target:g}: {seen:,.4g} {unit} by {curve}, which is {counted(steps, 'step')} of this job"
    return moved, note


def length_words(job: JobSpec) -> tuple[str, ...]:
    """What to --set so that the job ends after the steps of `until_loss`."""
    return f"training.steps={job.training.steps}", "training.tokens=null", "training.epochs=null"


def _seen_at(curve: Path, points: list[tuple[float, float]], target: float) -> float:
    """What was seen when the loss came to `target` to stay: a curve's noise may touch it long before."""
    if not (math.isfinite(target) and target > 0):
        raise InputError(f"--target-loss: must be a finite number above 0 (given: {target:g})")
    first_loss, last_loss = points[0][1], points[-1][1]
    if last_loss > target:
        raise InputError(f"--target-loss {target:g}: {curve} ends at {last_loss:g}, and beyond it nothing is known")
    above = max((index for index, (_, loss) in enumerate(points) if loss > target), default=None)
    if above is not None:
        (seen_before, loss_before), (seen_after, loss_after) = points[above : above + 2]
        share = (loss_before - target) / (loss_before - loss_after)
        return math.exp(math.log(seen_before) + share * (math.log(seen_after) - math.log(seen_before)))
    if first_loss < target:
        raise InputError(
            f"--target-loss {target:g}: {curve} begins at {first_loss:g}, and nothing is known of what came before;"
            f" give {first_loss:g} or less"
        )
    return points[0][0]


def _read(curve: Path) -> tuple[str, list[tuple[float, float]]]:
    """(unit, (seen, loss) in order)."""
    try:
        with curve.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise InputError(f"--loss-curve {curve}: can't be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--loss-curve {curve}: can't be read ({error})") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if len(header) != 2 or header[0] not in UNITS or header[1] != "loss":
        raise InputError(f"--loss-curve {curve}: must begin with a line tokens,loss or samples,loss")
    points: list[tuple[float, float]] = []
    for number, row in enumerate(rows[1:], start=2):
        try:
            seen, loss = (float(cell) for cell in row)
        except ValueError:
            raise InputError(f"--loss-curve {curve}: line {number}: must be two numbers (given: {row})") from None
        if not (math.isfinite(loss) and loss > 0):
            raise InputError(
                f"--loss-curve {curve}: line {number}: loss must be a finite number above 0 (given: {loss:g})"
            )
        if not math.isfinite(seen) or seen <= (points[-1][0] if points else 0.0):
            raise InputError(
                f"--loss-curve {curve}: line {number}: {header[0]} must be above 0 and grow with each line"
            )
        points.append((seen, loss))
    if not points:
        raise InputError(f"--loss-curve {curve}: has no points")
    return header[0], points
