"""One attempt at a job: its data, model, engine, checkpoints and metrics, put together and kept in step."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import Checkpointer, CheckpointInfo, best_interval_seconds
from trainer.data import JobData, MicroBatch
from trainer.heartbeat import beat
from trainer.metrics import ATTEMPTS_FILE, METRICS_FILE, MetricsLog, Row, StepClock
from trainer.runtime import Runtime
from trainer.schedule import learning_rate_at
from trainer.seeds import restore_rng_state, rng_state, seed_everything, use_deterministic_kernels
from trainer.signals import StopFlag
from trainer.speech import say
from trainer.strategies import OptimizerStep, Strategy, build_strategy, check_supported
from trainer.strategies.mesh import data_parallel_rank, random_stream
from trainer.tasks import task_of
from trainyard.errors import JobFailedError
from trainyard.spec.job import ResolvedJob

RESULT_FILE = "result.json"

_HOURS_BETWEEN_FAILURES = 24.0
"""Where the job was resolved without them."""


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's sequences: this rank's share, and counts over all ranks."""

    local: Sequence[MicroBatch]
    num_targets: int
    """Labels that count in the loss."""
    num_tokens: int
    """Tokens without padding."""


class Session:
    """What the loop works with. `step` is the last finished optimizer step, 0 before the first."""

    def __init__(self, job: ResolvedJob, runtime: Runtime, *, output_dir: Path, scratch_dir: Path) -> None:
        """`scratch_dir`: tokens and checkpoints on their way, which no one needs when the job is done."""
        check_supported(job, device_type=runtime.device.type)
        self._started = time.perf_counter()
        self._job = job
        self._runtime = runtime
        self._output_dir = output_dir
        if job.spec.training.deterministic:
            use_deterministic_kernels()
        self.stop_flag = StopFlag(runtime.control_group).install()
        task = task_of(job)
        self.data: JobData = task.build_data(
            job,
            data_parallel_rank=data_parallel_rank(job.parallelism, runtime.rank),
            data_parallel_size=job.parallelism.data_parallel_size,
            cache_dir=scratch_dir / "token_cache",
        )
        self.num_steps = job.steps or _steps_of_epochs(job, self.data)
        model = task.build_model(job, self.data)
        self._model_config = json.loads(model.config.to_json_string(use_diff=False))
        self.strategy: Strategy = build_strategy(job, model=model, runtime=runtime)
        assert self.strategy.data_parallel_rank == data_parallel_rank(job.parallelism, runtime.rank)
        self._num_readers = runtime.world_size // job.parallelism.data_parallel_size
        seed_everything(job.spec.training.seed, rank=random_stream(job.parallelism, runtime.rank))
        self._checkpointer = Checkpointer(
            job.spec.checkpoint.destination or str(output_dir),
            rank=runtime.rank,
            world_size=runtime.world_size,
            local_dir=scratch_dir / "checkpoints",
            keep_last=job.spec.checkpoint.keep_last,
            asynchronous=job.spec.checkpoint.asynchronous,
            process_group=runtime.control_group,
        )
        self._metrics = MetricsLog(output_dir)
        self.step = 0
        self._saved_step = 0
        self._attempt = self._resume()
        self._last_save_time = time.monotonic()
        self.clock = StepClock(runtime.device, world_size=runtime.world_size)

    def _resume(self) -> int:
        """Continues from the newest valid checkpoint, if there is one; returns the attempt's number."""
        info = self._checkpointer.latest()
        if info is not None:
            self._load(info)
        attempt = self._begin_attempt() if self._runtime.is_first else 0
        if info is not None and self._runtime.is_first:
            say(f"resumed step={self.step} uri={info.uri}")
        return int(self._runtime.sum_over_ranks(attempt)[0])

    def _begin_attempt(self) -> int:
        """Brings the metrics to where the checkpoint stands; a fresh machine gets them from beside the checkpoints."""
        for path in (self._metrics.path, self._metrics.attempts_path):
            if not path.exists():
                self._checkpointer.fetch_file(path.name, path)
        attempt = self._metrics.begin_attempt(resumed_step=self.step)
        self._checkpointer.publish_file(ATTEMPTS_FILE, self._metrics.attempts_path)
        return attempt

    def _load(self, info: CheckpointInfo) -> None:
        tensors = self.strategy.state_tensors()
        extra = self._checkpointer.load(info, tensors)
        self.strategy.after_load(tensors)
        self.strategy.load_engine_state(extra["engine"])
        self.data.train.load_state_dict(extra["data"])
        self.step = self._saved_step = info.step
        if extra["world_size"] == self._runtime.world_size:
            restore_rng_state(extra["rng"])
        else:
            # Another number of ranks has no streams to continue: fresh ones, which never repeat the first step's.
            stream = random_stream(self._job.parallelism, self._runtime.rank)
            seed_everything(self._job.spec.training.seed + info.step, rank=stream)

    def next_batch(self) -> GlobalBatch:
        """The next optimizer step's sequences."""
        local = self.data.train.next_step()
        targets = sum(batch.num_target_tokens for batch in local)
        tokens = sum(batch.num_tokens for batch in local)
        num_targets, num_tokens = self._count(targets, tokens)
        return GlobalBatch(local=local, num_targets=num_targets, num_tokens=num_tokens)

    def _count(self, *counts: int) -> list[int]:
        """Counts of this rank's sequences, summed; ranks that read the same ones count them once together."""
        return [int(total) // self._num_readers for total in self._runtime.sum_over_ranks(*counts)]

    def learning_rate(self, step: int) -> float:
        """The rate that optimizer step `step` uses."""
        return learning_rate_at(
            step,
            num_steps=self.num_steps,
            peak=self._job.learning_rate,
            schedule=self._job.spec.training.schedule,
        )

    def global_loss(self, loss_sum: torch.Tensor, batch: GlobalBatch, update: OptimizerStep) -> float:
        """Token-weighted mean over the global batch, nats; a loss that is no number any more ends the job."""
        loss = self._runtime.sum_over_ranks(loss_sum.item())[0] / batch.num_targets
        if update.was_applied and not (math.isfinite(loss) and math.isfinite(update.grad_norm)):
            raise JobFailedError(
                f"step {self.step + 1}: loss is {loss}, gradient norm {update.grad_norm}: training diverged; lower"
                " training.learning_rate or training.gradient_clip, lengthen the warm-up, or use bf16 or fp32;"
                f" the newest checkpoint is of step {self._checkpointer.last_committed_step or 0}"
            )
        return loss

    def is_validation_due(self) -> bool:
        """At the configured steps, and after the last."""
        if self.data.validation is None:
            return False
        every = self._job.spec.training.validation_every_steps
        return self.step == self.num_steps or (every is not None and self.step % every == 0)

    def validate(self) -> float:
        """Token-weighted mean loss, nats, over the same validation batches every time."""
        assert self.data.validation is not None
        with self.clock.excluded():
            loss_sum, num_targets = 0.0, 0
            for batches in self.data.validation:
                beat()
                loss_sum += self.strategy.evaluate(batches).item()
                num_targets += sum(batch.num_target_tokens for batch in batches)
            (total_loss,), (total_targets,) = self._runtime.sum_over_ranks(loss_sum), self._count(num_targets)
        loss = total_loss / total_targets
        if self._runtime.is_first:
            say(f"validation step={self.step} loss={loss:.6f}")
        return loss

    def record(
        self,
        batch: GlobalBatch,
        loss: float,
        learning_rate: float,
        update: OptimizerStep,
        step_seconds: float,
        breakdown: dict[str, float | None],
        validation_loss: float | None,
    ) -> None:
        """Writes the finished step's row, and says it on stdout."""
        if not self._runtime.is_first:
            return
        row = Row(
            step=self.step,
            attempt=self._attempt,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=update.grad_norm,
            tokens=batch.num_tokens,
            step_seconds=step_seconds,
            breakdown=breakdown,
            was_applied=update.was_applied,
            validation_loss=validation_loss,
        )
        self._metrics.append(row)
        say(row.as_line())

    def is_checkpoint_due(self) -> bool:
        """At the last step, every so many steps, and every so many minutes of the first rank's clock."""
        settings = self._job.spec.checkpoint
        if self.step == self.num_steps or (settings.every_steps and self.step % settings.every_steps == 0):
            return True
        if settings.every_minutes is None:
            return False
        is_late = time.monotonic() - self._last_save_time >= self._save_interval_seconds()
        return self._runtime.sum_over_ranks(float(is_late and self._runtime.is_first))[0] > 0

    def _save_interval_seconds(self) -> float:
        minutes = self._job.spec.checkpoint.every_minutes
        assert minutes is not None
        if minutes != "auto":
            return 60 * minutes
        seconds = self._checkpointer.last_save_seconds
        if seconds is None:
            # The first save measures; while it, or one that failed, is the only one, the next can wait a minute.
            return 0.0 if self._saved_step == 0 else 60.0
        return best_interval_seconds(
            save_seconds=seconds,
            stall_seconds=self._checkpointer.blocked_seconds,
            seconds_between_failures=3600 * (self._job.hours_between_failures or _HOURS_BETWEEN_FAILURES),
        )

    def save(self) -> None:
        """Checkpoints everything that the next step depends on, and the metrics so far."""
        extra = {
            "step": self.step,
            "attempt": self._attempt,
            "strategy": self.strategy.name,
            "model_config": self._model_config,  # what an export needs, whatever becomes of the job's file
            "world_size": self._runtime.world_size,
            "data": self.data.train.state_dict(),
            "engine": self.strategy.engine_state(),
            "rng": rng_state(),  # this rank's own: the checkpoint keeps what differs between ranks
        }
        attachments = {METRICS_FILE: self._metrics.path} if self._runtime.is_first else {}
        self._checkpointer.save(self.step, self.strategy.state_tensors(), extra, attachments=attachments)
        self._saved_step = self.step
        self._last_save_time = time.monotonic()

    def finish(self, status: str) -> None:
        """Waits for the last checkpoint to be committed, then writes result.json, here and beside the checkpoints."""
        self._checkpointer.wait()
        if self._checkpointer.last_error is not None:
            # Also when interrupted: "saved, resume me" must never be said of a step that is not there.
            ran = f"all {self.num_steps} steps ran" if status == "completed" else f"stopped at step {self.step}"
            raise JobFailedError(
                f"{ran}, but the last checkpoint could not be saved: {self._checkpointer.last_error}; mend it and start"
                f" the job again: it continues from step {self._checkpointer.last_committed_step or 0}"
            )
        if self._runtime.is_first:
            path = self._output_dir / RESULT_FILE
            path.write_text(json.dumps(self._result(status), indent=1) + "\n", encoding="utf-8")
            self._checkpointer.publish_file(METRICS_FILE, self._metrics.path)
            self._checkpointer.publish_file(RESULT_FILE, path)

    def _result(self, status: str) -> dict[str, Any]:
        rows = self._metrics.rows()
        validated = [row for row in rows if "validation_loss" in row]
        return {
            "status": status,
            "steps": self.step,
            "loss_first": rows[0]["loss"] if rows else None,
            "loss_last": rows[-1]["loss"] if rows else None,
            "validation_loss": validated[-1]["validation_loss"] if validated else None,
            "unigram_entropy_nats": self.data.unigram_entropy_nats,
            "tokens": sum(row["tokens"] for row in rows),
            "seconds": time.perf_counter() - self._started,
            "step_seconds": sum(row["step_seconds"] for row in rows),
            "attempts": self._attempt,
            "strategy": self.strategy.name,
            "world_size": self._runtime.world_size,
        }

    def close(self) -> None:
        """Frees what the engine and the checkpoints hold."""
        self.stop_flag.uninstall()
        self._checkpointer.close()
        self.strategy.close()


def _steps_of_epochs(job: ResolvedJob, data: JobData) -> int:
    epochs = job.spec.training.epochs
    assert epochs is not None, "a resolved job without steps is stated in epochs"
    return max(1, math.ceil(epochs * data.train.steps_per_epoch))
