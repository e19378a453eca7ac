"""Losses and gradient norms that are no numbers, or spikes; and what is kept of the step for those who look into it."""

import base64
import json
import math
import socket
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.runtime import Runtime
from trainer.speech import say
from trainer.strategies.base import OptimizerStep
from trainyard.errors import JobFailedError
from trainyard.spec.job import ResolvedJob

Rows = Sequence[dict[str, Any]]

WINDOW = 100
"""Steps that the running median is taken over."""
LEAST_STEPS = 10
"""Before so many there is no median to compare with."""
ROBUST_SIGMAS = 8.0
"""A spike also lies so far above the median, in units of the usual spread: the median absolute deviation x 1.4826,
which for normally distributed values is their standard deviation."""


MOST_OVERFLOWS = 64
"""In a row, of fp16's loss scale, which each one halves: by then it has long been at its smallest, 1, and what
overflows after them is no longer its doing."""


class AnomalyWatch:
    """Judges each step by its loss and gradient norm. Its memory is in the checkpoint: a resume judges alike."""

    def __init__(self, spike_factor: float | None) -> None:
        self._spike_factor = spike_factor
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("loss", "grad_norm")}
        self.num_in_a_row = 0
        """Anomalies since the last good step."""
        self.num_overflows = 0
        """Updates in a row that fp16's loss scale left out."""

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """What is wrong with a step, in a few words; None: nothing. Either way the step is remembered."""
        values = {"loss": loss, "grad_norm": grad_norm}
        found = next((words for name, value in values.items() if (words := self._anomaly(name, value))), None)
        if found is None:
            for name, value in values.items():
                self._seen[name].append(value)
        self.num_in_a_row = self.num_in_a_row + 1 if found else 0
        return found

    def _anomaly(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name} is {value}"
        seen = self._seen[name]
        if self._spike_factor is None or len(seen) < LEAST_STEPS:
            return None
        median = statistics.median(seen)
        if median <= 0:
            return None  # nothing is a multiple of it
        spread = 1.4826 * statistics.median(abs(other - median) for other in seen)
        if value > self._spike_factor * median and value > median + ROBUST_SIGMAS * spread:
            return f"{name} {value:.6g} is {value / median:.1f} times its running median"
        return None

    def state(self) -> dict[str, Any]:
        """JSON values, for the checkpoint."""
        counts = {"num_in_a_row": self.num_in_a_row, "num_overflows": self.num_overflows}
        return {**counts, **{name: list(seen) for name, seen in self._seen.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Puts back what `state` gave."""
        self.num_in_a_row = int(state["num_in_a_row"])
        self.num_overflows = int(state.get("num_overflows", 0))  # not in checkpoints of the first trainers
        for name, seen in self._seen.items():
            seen.clear()
            seen.extend(state[name])


def random_states() -> dict[str, torch.Tensor]:
    """torch's generators as they are now; microseconds, so that each step can keep those that it began with."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def write_snapshot(
    output_dir: Path,
    *,
    step: int,
    rank: int,
    anomaly: str,
    facts: dict[str, Any],
    random: dict[str, torch.Tensor],
    recent_rows: Sequence[dict[str, Any]],
) -> Path:
    """This rank's part of the snapshot, OUTPUT_DIR/anomalies/step-N/rank-R.json; returns the folder."""
    folder = output_dir / "anomalies" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "step": step,
        "anomaly": anomaly,
        "rank": rank,
        "host": socket.gethostname(),
        **facts,
        # As they were when the step began, base64 of torch.get_rng_state().
        "rng": {name: base64.b64encode(state.numpy().tobytes()).decode("ascii") for name, state in random.items()},
        "recent_rows": list(recent_rows),
    }
    text = json.dumps({name: _finite(value) for name, value in content.items()}, indent=1)
    (folder / f"rank-{rank}.json").write_text(text + "\n", encoding="utf-8")
    return folder


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class AnomalyGuard:
    """What one job does about anomalies: `training.on_anomaly`."""

    def __init__(self, job: ResolvedJob, runtime: Runtime, output_dir: Path, recent_rows: Callable[[], Rows]) -> None:
        """`recent_rows`: the last rows of metrics.jsonl, on the first rank."""
        self._settings = job.spec.training
        self._batch_size = job.spec.global_batch_size
        self._runtime = runtime
        self._output_dir = output_dir
        self._recent_rows = recent_rows
        self._data: dict[str, Any] = {}
        self._random: dict[str, torch.Tensor] = {}
        self.watch = AnomalyWatch(self._settings.spike_factor)
        self.found: str | None = None
        """What was wrong with the step that is being made, or was made last."""

    def begin(self, data_position: dict[str, Any]) -> None:
        """A step begins whose batch lies at this position of the training stream."""
        self.found = None
        self._data = data_position
        self._random = random_states()

    def gate(self, loss_sum: torch.Tensor, num_targets: int) -> Callable[[float], bool] | None:
        """What a strategy asks, with the gradient norm, before it updates; None: nothing, where jobs stop or go back.

        Who goes back undoes the update too, so that engines which can't be asked (DeepSpeed) do it as well. All ranks
        get one answer, or some would update and others not: any rank's doubt counts.
        """
        if self._settings.on_anomaly != "skip":
            return None
        loss = self._runtime.sum_over_ranks(loss_sum.item())[0] / num_targets

        def accepts(grad_norm: float) -> bool:
            mine = self.watch.judge(loss, grad_norm)
            is_anomaly = self._runtime.sum_over_ranks(float(mine is not None))[0] > 0
            self.found = (mine or "another rank found an anomaly") if is_anomaly else None
            return not is_anomaly

        return accepts

    def check(self, step: int, loss: float, update: OptimizerStep, own_loss_sum: float) -> None:
        """After the update: JobFailedError where the job has to end, with a snapshot named in it."""
        is_overflow = self._is_overflow(loss, update)
        # Who skips was asked before the update, but where the loss scale had refused it already.
        is_unjudged = self._settings.on_anomaly != "skip" or (not update.was_applied and self.found is None)
        if is_unjudged and not is_overflow:
            self.found = self.watch.judge(loss, update.grad_norm)
        if self._settings.on_anomaly == "rollback":
            self._agree()
            return
        if self.found is None:
            return
        if self._settings.on_anomaly == "skip" and self.watch.num_in_a_row < self._settings.max_skips:
            if self._runtime.is_first:
                say(f"anomaly step={step} skipped: {self.found}")
            return
        raise JobFailedError(self._words(step, loss, update, own_loss_sum))

    def _is_overflow(self, loss: float, update: OptimizerStep) -> bool:
        """Whether fp16's loss scale explains why the update was left out: then it is no anomaly.

        It doesn't explain a loss that is no number, which is taken before it is scaled, nor overflows without an end: a
        job that had diverged would go on to its last step, and be told completed. In another precision an engine that
        left the update out (DeepSpeed does where a gradient is no number) had a reason that must not pass in silence.
        """
        is_explained = self._settings.precision == "fp16" and not update.was_applied and math.isfinite(loss)
        self.watch.num_overflows = self.watch.num_overflows + 1 if is_explained else 0
        return is_explained and self.watch.num_overflows <= MOST_OVERFLOWS

    def _agree(self) -> None:
        """One verdict for all ranks: those that went back would wait for ever for one that did not."""
        if self._runtime.sum_over_ranks(float(self.found is not None))[0] > 0:
            self.found = self.found or "another rank found an anomaly"

    @property
    def wants_rollback(self) -> bool:
        """Whether the step that was just made has to be undone; the same on every rank."""
        return self._settings.on_anomaly == "rollback" and self.found is not None

    @property
    def data(self) -> dict[str, Any]:
        """Where in the training stream the batch of the step lies that is being made, or was made last."""
        return self._data

    def _words(self, step: int, loss: float, update: OptimizerStep, own_loss_sum: float) -> str:
        assert self.found is not None
        facts = {
            "loss": loss,
            "grad_norm": update.grad_norm,
            "own_loss_sum": own_loss_sum,
            "first_sequence": self._data.get("sequences_consumed"),
            "num_sequences": self._batch_size,
            "data": self._data,
        }
        try:
            snapshot = str(
                write_snapshot(
                    self._output_dir,
                    step=step,
                    rank=self._runtime.rank,
                    anomaly=self.found,
                    facts=facts,
                    random=self._random,
                    recent_rows=self._recent_rows() if self._runtime.is_first else [],
                )
            )
        except OSError as error:
            # A full disk on one rank: the others wait for it in _ranks.
            snapshot = f"not written: {error.strerror or error}"
        repeats = self.watch.num_in_a_row
        # What it means comes first: who is called at night reads the first words of it.
        what = f"step {step}: training diverged: {self.found}" + (
            f", {repeats} batches in a row" if repeats > 1 else ""
        )
        where = "; ".join(
            f"rank {rank} on {host} has it" for rank, (host, good) in enumerate(self._ranks(own_loss_sum)) if not good
        )
        advice = (
            "lower training.learning_rate or training.gradient_clip, lengthen the warm-up, or use bf16 or fp32;"
            " training.on_anomaly: rollback (or skip) leaves such batches out"
        )
        return "; ".join(part for part in (what, where, advice, f"snapshot: {snapshot}") if part)

    def _ranks(self, own_loss_sum: float) -> list[tuple[str, bool]]:
        """Every rank's host, and whether its own share of the loss is a number."""
        everyone: list[Any] = [None] * self._runtime.world_size
        mine = (socket.gethostname(), math.isfinite(own_loss_sum))
        dist.all_gather_object(everyone, mine, group=self._runtime.control_group)
        return everyone
