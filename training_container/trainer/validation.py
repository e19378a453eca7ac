"""Validation sets: when each is due, its loss, and what rows, stdout and result.json say of it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer.data import JobData, ValidationSet
from trainer.heartbeat import beat, patiently
from trainer.rendezvous import Patience
from trainer.runtime import Runtime
from trainer.speech import say
from trainer.strategies import Strategy
from trainer.tasks import Task
from trainyard.errors import JobFailedError
from trainyard.spec.job import ResolvedJob

LARGEST_LOSS_NATS = 700.0
"""Its perplexity is about the largest that a float holds; a larger one is told as null."""


class Validation:
    """Runs the sets of a job that are due. A set without a name is the job's own: its loss is `validation_loss`."""

    def __init__(self, job: ResolvedJob, task: Task, data: JobData, runtime: Runtime, patience: Patience) -> None:
        self._measures = task.measures
        self._tells_perplexity = task.unit == "tokens"
        self._runtime = runtime
        self._patience = patience
        self._is_compiled = job.spec.training.compile
        self._known: set[str | None] = set()
        """Sets that were run before, by name: what they need is compiled."""
        # Ranks that split one model read the same sequences: what they count, they count together.
        self._num_readers = runtime.world_size // job.parallelism.data_parallel_size
        own = [] if data.validation is None else [ValidationSet(None, data.validation, every_steps=None)]
        self._sets = [*own, *data.named_validation]
        self.samples = {one.name or "": one.stream.samples for one in self._sets}
        """Set -> what it is validated on, as a checkpoint says it; the one without a name is ""."""
        self._default_every = job.spec.training.validation_every_steps
        self.was_broken_off = False
        """The last one was: who resumes the step makes up for it."""

    def due(self, step: int, num_steps: int) -> list[ValidationSet]:
        """The sets to be validated on after `step`: each at its own steps, all after the last."""
        every = {one.name: one.every_steps or self._default_every for one in self._sets}
        return [one for one in self._sets if step == num_steps or _divides(every[one.name], step)]

    def run(
        self,
        strategy: Strategy,
        sets: Sequence[ValidationSet],
        step: int,
        must_exit: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """What the step's row says: `validation_loss` and such, and `validation_sets` by name.

        `must_exit`, asked before each batch, on all ranks alike: true breaks the validation off, and the row is without
        the sets that were not done: a machine that is taken away leaves two minutes to save.
        """
        self.was_broken_off = False
        row: dict[str, Any] = {}
        for one in sets:
            with self._first_time(one.name):
                found = self._run_set(strategy, one, must_exit)
            if found is None:
                self.was_broken_off = True
                if self._runtime.is_first:
                    say(f"validation step={step} broken off: told to stop; who resumes begins with it")
                break
            if self._runtime.is_first:
                words = [f"validation step={step}", *([] if one.name is None else [f"set={one.name}"])]
                missing = "nan" if found["loss"] is None else "inf"
                words += [f"{name}={missing if value is None else f'{value:.6f}'}" for name, value in found.items()]
                say(" ".join(words))
            if one.name is None:
                row |= {f"validation_{name}": value for name, value in found.items()}
            else:
                row.setdefault("validation_sets", {})[one.name] = found
        return row

    @contextmanager
    def _first_time(self, name: str | None) -> Iterator[None]:
        """Around a set's run: compiled blocks are compiled anew for it, without gradients, as for the first step."""
        if not self._is_compiled or name in self._known:
            yield
            return
        with self._patience.as_at_start(), patiently():
            yield
        self._known.add(name)

    def _run_set(
        self, strategy: Strategy, one: ValidationSet, must_exit: Callable[[], bool]
    ) -> dict[str, float | None] | None:
        """Means over the targets of the same batches every time: loss (nats), perplexity, the task's measures.

        None where it was broken off.
        """
        sums, num_targets = torch.zeros(1 + len(self._measures), dtype=torch.float64), 0
        for batches in one.stream:
            beat()
            if must_exit():
                return None
            sums += strategy.evaluate(batches).cpu()
            num_targets += sum(batch.num_target_tokens for batch in batches)
        *totals, total_targets = self._runtime.sum_over_ranks(*sums.tolist(), num_targets)
        count = int(total_targets) // self._num_readers
        if not count:
            where = "data.validation" if one.name is None else f"data.validation, set {one.name}"
            raise JobFailedError(f"{where}: not a single token to learn in what is validated on; give longer documents")
        loss, *shares = (total / count if math.isfinite(total) else None for total in totals)
        found: dict[str, float | None] = {"loss": loss}
        if self._tells_perplexity:
            found["perplexity"] = math.exp(loss) if loss is not None and loss < LARGEST_LOSS_NATS else None
        return found | dict(zip(self._measures, shares, strict=True))

    def summary(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What result.json says: the last value of each set; null where a set has none."""
        names = ["loss", *(["perplexity"] if self._tells_perplexity else []), *self._measures]
        last: dict[str, Any] = {f"validation_{name}": None for name in names}
        sets: dict[str, Any] = {one.name: None for one in self._sets if one.name is not None}
        for row in rows:
            last |= {name: row[name] for name in last if name in row}
            sets |= row.get("validation_sets", {})
        return last | ({"validation_sets": sets} if sets else {})


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
