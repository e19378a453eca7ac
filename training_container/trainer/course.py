"""How long a job is and where its learning rate stands, counted in samples: its batch may change with its machines.

Where the batch stays as stated (all jobs but those with `recovery.elastic.batch: adapt`), a step is a step.
"""

import math
from fractions import Fraction

from trainer.optimizers.schedule import learning_rate_at
from trainyard.spec.job import ResolvedJob
from trainyard.spec.notes import notes_on


class Course:
    """A job's steps, from the last checkpoint's to its end."""

    def __init__(self, job: ResolvedJob, *, sequences_per_epoch: int) -> None:
        training, elastic = job.spec.training, job.spec.recovery.elastic
        self._job = job
        self._stated_batch = training.global_batch_size
        self._batch = job.spec.global_batch_size
        self._is_adapted = elastic is not None and elastic.batch == "adapt"
        known = None if self._is_adapted else job.steps
        self._stated_steps = known or _stated_steps(job, sequences_per_epoch)
        self._step = self._sequences = 0

    def notes(self) -> tuple[str, ...]:
        """What is odd about the job, now that its length is known."""
        return notes_on(self._job.spec, self._stated_steps)

    def resumed(self, step: int, sequences_consumed: int) -> None:
        """The job goes on after `step`, at which all ranks together had read so many sequences."""
        self._step, self._sequences = step, sequences_consumed

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job, those of other batches before a resume among them."""
        if not self._is_adapted:
            return self._stated_steps
        left = self._stated_steps * self._stated_batch - self._sequences
        return self._step + max(0, math.ceil(left / self._batch))

    def learning_rate(self, step: int) -> float:
        """The rate that optimizer step `step` uses: the schedule's at the samples read once it is done."""
        return learning_rate_at(
            self._stated_step(step),
            num_steps=self._stated_steps,
            peak=self._job.learning_rate,
            schedule=self._job.spec.training.schedule,
        )

    def _stated_step(self, step: int) -> float:
        """In steps of the stated batch; the last one may read on for less than a step."""
        if not self._is_adapted:
            return step
        read = self._sequences + (step - self._step) * self._batch
        return min(read / self._stated_batch, float(self._stated_steps))


def _stated_steps(job: ResolvedJob, sequences_per_epoch: int) -> int:
    batch, epochs = job.spec.training.global_batch_size, job.spec.training.epochs
    if job.spec.num_sequences is not None:
        return job.spec.num_sequences // batch
    assert epochs is not None, "a job without steps or tokens is stated in epochs"
    # A batch may reach over an epoch's end: rounded up once, not in each epoch. As written: 1.1 is no binary fraction.
    return math.ceil(Fraction(str(epochs)) * sequences_per_epoch / batch)
