"""One attempt at a job: its data, model, engine, checkpoints and metrics, put together and kept in step."""

import functools
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import Checkpointer, CheckpointInfo, Interval, SpoiledError
from trainer.checkpoint.base_model import base_model_digest, check_same_base
from trainer.checkpoint.claim import claimant_of
from trainer.checkpoint.group import Group
from trainer.checkpoint.manifest import ATTEMPT
from trainer.checkpoint.provenance import provenance, told_differences
from trainer.course import Course
from trainer.data import JobData, MicroBatch, ValidationSet
from trainer.heartbeat import beat
from trainer.host.recovery import RECOVERY_FILE
from trainer.models.adapters import notes_on_adapter
from trainer.models.deferred_weights import shapes_alone
from trainer.models.described import describe_model
from trainer.observe import profiling
from trainer.observe.anomalies import AnomalyGuard
from trainer.observe.away import launch_of
from trainer.observe.exposition import Exposition
from trainer.observe.goodput import GOODPUT_FILE, GoodputLog, process_seconds
from trainer.observe.left_out import LEFT_OUT_FILE, LeftOutBatches
from trainer.observe.metrics import ATTEMPTS_FILE, METRICS_FILE, MetricsLog, Row, attempts_in, replace_all, saved_to
from trainer.observe.observer import Observer
from trainer.observe.step_clock import StepClock
from trainer.observe.throughput import Expected
from trainer.rendezvous import Patience
from trainer.runtime import Runtime
from trainer.seeds import restore_rng_state, rng_state, seed_everything, use_deterministic_kernels
from trainer.signals import Decision, StopFlag, urgency
from trainer.speech import say
from trainer.strategies import OptimizerStep, Strategy, build_strategy, check_supported
from trainer.strategies.mesh import data_parallel_rank, has_same_streams, place_of, random_stream
from trainer.tasks import task_of
from trainer.validation import Validation
from trainyard.errors import InputError, JobFailedError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.meters import LIVE
from trainyard.spec.model_files import check_weight_files
from trainyard.spec.retention import flat_metrics, set_of
from trainyard.spec.words import counted, either

RESULT_FILE = "result.json"
_RESUMED_FROM = ("engine", "data", "rng", "world_size")
"""What every trainer has put into a checkpoint's `extra`."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0
"""Between two tries of the last save."""


@dataclass(frozen=True)
class GlobalBatch:
    """One optimizer step's sequences: this rank's share, and counts over all ranks."""

    local: Sequence[MicroBatch]
    num_targets: int
    """Labels that count in the loss."""
    num_tokens: int
    """Tokens without padding."""


@dataclass(frozen=True)
class _Told:
    """A message on its way."""

    upcoming: Sequence[MicroBatch]
    own_loss_sum: float
    answer: Callable[[], list[float]]


def _checkpointer_of(job: ResolvedJob, runtime: Runtime, output_dir: Path, scratch_dir: Path) -> Checkpointer:
    spec = job.spec.checkpoint
    checkpointer = Checkpointer(
        spec.destination or str(output_dir),
        rank=runtime.rank,
        world_size=runtime.world_size,
        local_dir=scratch_dir / "checkpoints",
        keep_last=spec.keep_last,
        asynchronous=spec.asynchronous,
        local_tier=None if (near := spec.local_directory) is None else Path(near),
        peer_copy=spec.peer_copy,
        keep_every_steps=spec.keep_every_steps,
        keep_best=spec.keep_best,
        process_group=runtime.control_group,
        patience_seconds=60 * job.spec.recovery.start_minutes,
    )
    checkpointer.claim(claimant_of(os.environ, output_dir), was_there=saved_to(output_dir) == checkpointer.uri)
    return checkpointer


def _check_places(output_dir: Path) -> None:
    """InputError where a folder lies in the place of a file that the job writes: some are written at its very end."""
    for name in (METRICS_FILE, ATTEMPTS_FILE, GOODPUT_FILE, LEFT_OUT_FILE, RECOVERY_FILE, RESULT_FILE):
        if (output_dir / name).is_dir():
            raise InputError(f"{output_dir / name}: is a folder, where the job writes a file: move it away")


def _exposition_of(job: ResolvedJob, output_dir: Path) -> Exposition:
    spec = job.spec
    return Exposition(
        output_dir,
        tenant=spec.tenant or "",
        job=spec.name,
        port=spec.meters.prometheus_port,
        # SageMaker's own variable: its stdout goes to CloudWatch Logs, nobody else's does.
        embeds_metrics=spec.meters.cloudwatch and "TRAINING_JOB_NAME" in os.environ,
        every_steps=spec.training.observe_every_steps,
    )


class Session:
    """What the loop works with. `step` is the last finished optimizer step, 0 before the first."""

    def __init__(
        self,
        job: ResolvedJob,
        runtime: Runtime,
        *,
        output_dir: Path,
        scratch_dir: Path,
        expected: Expected | None = None,
    ) -> None:
        """`scratch_dir`: tokens and checkpoints on their way, which no one needs when the job is done.

        `expected`: what the planner knows of the job, for the observations.
        """
        check_supported(job, device_type=runtime.device.type)
        self._task = task = task_of(job)
        with shapes_alone():
            task.check_model(job)
        if job.spec.model.source is not None:
            check_weight_files(job.spec.model.source)
        self._started = time.perf_counter()
        self._process_seconds = process_seconds() - runtime.rendezvous_seconds
        self._job = job
        self._runtime = runtime
        self._output_dir = output_dir
        if job.spec.training.deterministic:
            use_deterministic_kernels()
        self.stop_flag = StopFlag(runtime.control_group).install()
        self._group = Group(runtime.control_group, runtime.rank, runtime.world_size)
        self._group.from_first(lambda: _check_places(output_dir))
        self._checkpointer = _checkpointer_of(job, runtime, output_dir, scratch_dir)  # refuses before the long part
        self.data: JobData = task.build_data(
            job,
            data_parallel_rank=data_parallel_rank(job.parallelism, runtime.rank),
            data_parallel_size=job.parallelism.data_parallel_size,
            cache_dir=scratch_dir / "token_cache",
        )
        self._course = Course(job, sequences_per_epoch=self.data.train.num_sequences)
        self._patience = Patience(job.spec.recovery)
        self._validation = Validation(job, task, self.data, runtime, self._patience)
        self.strategy = self._made_engine()
        self._tell_choices()
        assert self.strategy.data_parallel_rank == data_parallel_rank(job.parallelism, runtime.rank)
        self._num_readers = runtime.world_size // job.parallelism.data_parallel_size
        self._open_records()
        self.step = 0
        self._saved_step = 0
        self._bests: list[tuple[int, float]] = []
        """(step, value) of those that were the best so far by keep_best, but for those whose save failed."""
        self._measured: dict[str, float] = {}
        self._is_best = False
        self._base = base_model_digest(job)
        self._provenance = provenance(job)
        self._attempt = self._resume()
        self._last_save_time = self._loaded_time = time.monotonic()
        self._saved_at: dict[int, float] = {}
        self._interval = Interval(job.spec.checkpoint, job.hours_between_failures)
        self._position = self.data.train.state_dict()
        self._upcoming: GlobalBatch | None = None
        self._told: _Told | None = None
        self._checkpoint_is_late = False
        self._begin_observing(expected or Expected())
        if job.spec.training.on_anomaly == "rollback" and self._checkpointer.last_committed_step is None:
            self.save()  # the first step may be the one that goes wrong

    def _tell_choices(self) -> None:
        """What runs, and what is odd about the job."""
        if self._runtime.is_first:
            for name, choice in self.strategy.choices.items():
                say(f"{name}: {choice}")
            for note in (*self._course.notes(), *self._model_notes):
                say(f"warning: {note}")

    def _open_records(self) -> None:
        """What outlives the attempt beside checkpoints: rows, snapshots, what is left out, where the time went."""
        is_published = self._checkpointer.is_place_of(METRICS_FILE, self._output_dir / METRICS_FILE)
        self._metrics = MetricsLog(self._output_dir, is_published=is_published)
        self.anomalies = AnomalyGuard(self._job, self._runtime, self._output_dir, self._metrics.recent)
        self._left_out = LeftOutBatches(self._output_dir, self._runtime)
        self._goodput = GoodputLog(self._output_dir, launch=launch_of(os.environ))

    def _begin_observing(self, expected: Expected) -> None:
        """What looks on, once the attempt stands at its step."""
        self._profiling = profiling.Profiling(self._runtime, self._output_dir)
        self._profile_votes: Sequence[float] = ()
        training = self._job.spec.training
        self._observer = Observer(
            self._runtime,
            every_steps=training.observe_every_steps,
            group=place_of(self._job.parallelism, self._runtime.rank).pipeline,
            last_step=self.num_steps,
            expected=expected,
        )
        self._meters = _exposition_of(self._job, self._output_dir) if self._runtime.is_first else None
        self.clock = StepClock(
            self._runtime.device, world_size=self._runtime.world_size, show_ranges=training.phase_ranges
        )

    def _made_engine(self) -> Strategy:
        """The model and its engine as they are before the first step, and the random numbers of that moment."""
        model = self._task.build_model(self._job, self.data)
        self._model_described = describe_model(self._job.spec, model)
        self._model_notes = notes_on_adapter(model, self._job.spec.model.adapter)
        strategy = build_strategy(self._job, model=model, runtime=self._runtime)
        stream = random_stream(self._job.parallelism, self._runtime.rank)
        seed_everything(self._job.spec.training.seed, rank=stream)
        return strategy

    def _newest_loaded(self) -> CheckpointInfo | None:
        """The newest valid checkpoint, loaded; None where there is none. SpoiledError: the engine must be made anew."""
        tensors = functools.cache(self.strategy.state_tensors)
        info = self._checkpointer.latest(tensors, may_spoil=True)
        if info is not None:
            self._load(info, tensors())
        return info

    def _resume(self) -> int:
        """Continues from the newest valid checkpoint, if there is one; returns the attempt's number."""
        began = time.perf_counter()
        info, is_spoiled = None, False
        try:
            info = self._newest_loaded()
        except SpoiledError:  # its traceback holds the old tensors, so the new ones are made outside
            is_spoiled = True
        if is_spoiled:
            self.strategy.close()
            del self.strategy
            gc.collect()  # hooks and models refer to each other
            self.strategy = self._made_engine()
        attempt = self._group.from_first(lambda: self._begin_attempt(began, is_anew=info is None))
        self._left_out.read()
        self._left_out.check(self.data.train.sequences_consumed, self._job.spec.global_batch_size)
        if info is not None and self._runtime.is_first:
            say(f"resumed step={self.step} uri={info.uri}")
            if self.step > self.num_steps:
                say(
                    f"warning: the job ends at step {self.num_steps}, and its checkpoint is of step {self.step}:"
                    " nothing is trained; for a model of fewer steps start anew with another checkpoint.destination"
                )
            elif self.step == self.num_steps:
                say(f"checkpoint step={self.step} is of the job's last step: nothing is left to train")
            for difference in told_differences(info.manifest.extra, self._provenance, step=self.step):
                say(difference)
        return attempt

    def _begin_attempt(self, began: float, *, is_anew: bool) -> int:
        """Brings the metrics to where the checkpoint stands; a fresh machine gets them from beside the checkpoints.

        `began`: when the search for a checkpoint did (perf_counter). `is_anew`: it found none.
        """
        written_at = self._metrics.written_at()
        if self._bring_records():
            written_at = None  # by a start that others followed
        rows = self._metrics.rows()
        if rows and is_anew:
            reached, where = rows[-1]["step"], self._checkpointer.uri
            say(f"warning: {where} has no checkpoint, and an earlier start came to step {reached}: all begins anew")
        attempt = self._metrics.begin_attempt(resumed_step=self.step, rows=rows, destination=self._checkpointer.uri)
        seconds = {
            "process": self._process_seconds,
            "rendezvous": self._runtime.rendezvous_seconds,
            "build": began - self._started,
            "load": time.perf_counter() - began,
        }
        self._goodput.begin(rows, attempt=attempt, resumed_step=self.step, seconds=seconds, written_at=written_at)
        self._checkpointer.publish_first(ATTEMPTS_FILE, self._metrics.attempts_path)
        return attempt

    def _bring_records(self) -> bool:
        """Has what lies beside the checkpoints here too, where it isn't, or is of a start that others followed on
        another machine: their rows, and the batches that they left out, are there alone. Whether it was of such a one.
        """
        there = self._checkpointer.read_file(ATTEMPTS_FILE)
        is_old = there is not None and self._metrics.num_attempts() < attempts_in(there)
        # What tells that they are here comes last: a start that ends midway leaves the next one to bring them all.
        records = (self._left_out.path, self._goodput.path, self._output_dir / RECOVERY_FILE)
        wanted = (*records, self._metrics.path, self._metrics.attempts_path)
        fetched = {path: path.with_name(f"{path.name}.fetched") for path in wanted if is_old or not path.exists()}
        there_too = [path for path in fetched if self._checkpointer.fetch_file(path.name, fetched[path])]
        for path in there_too:
            own = self._metrics.rows() if path == self._metrics.path else []
            fetched[path].replace(path)
            self._metrics.add_later(own)
        return is_old

    def _load(self, info: CheckpointInfo, tensors: dict[str, torch.Tensor]) -> None:
        attachments = self._attachments() if self._runtime.is_first else {}
        extra = self._checkpointer.load(info, tensors, attachments=attachments)
        if lacking := [key for key in _RESUMED_FROM if key not in extra]:
            raise InputError(
                f"checkpoint {info.uri}: its manifest lacks {', '.join(lacking)}, so no trainer wrote it: bring back a"
                " copy of its files, or take its folder away to go on from the one before it"
            )
        self.strategy.after_load(tensors)
        self.strategy.load_engine_state(extra["engine"])
        self.data.train.load_state_dict(extra["data"])
        if "anomalies" in extra:  # not in checkpoints of the first trainers
            self.anomalies.watch.load_state(extra["anomalies"])
        check_same_base(extra.get("base"), self._base, uri=info.uri, source=self._job.spec.model.source)
        self._measured = extra.get("metrics") or {}
        self._bests = self._bests_of(extra, info.step)
        self._validation.was_broken_off = extra.get("owes_validation", False)
        self.step = self._saved_step = info.step
        self._course.resumed(info.step, self.data.train.sequences_consumed)
        if has_same_streams(self._job.parallelism, extra):
            restore_rng_state(extra["rng"])
        else:
            # Other ranks, or other ranks that have to draw alike, have no streams to continue: fresh ones, which never
            # repeat the first step's.
            stream = random_stream(self._job.parallelism, self._runtime.rank)
            seed_everything(self._job.spec.training.seed + info.step, rank=stream)

    def roll_back(self) -> None:
        """Undoes the step that went wrong: back to the newest checkpoint, from where its batch is left out.

        JobFailedError where there is no checkpoint, or too many batches in a row cost the way back to one.
        """
        step, anomaly = self.step + 1, self.anomalies.found
        assert anomaly is not None
        tensors = functools.cache(self.strategy.state_tensors)
        with self.clock.excluded(), self._patience.as_at_start():
            self._checkpointer.wait()
            # Before the long read: a start that knew nothing of it would learn from the batch.
            awaited = self._checkpointer.last_committed_step
            is_noted = awaited is not None and self._leave_out(step, anomaly, awaited)
            try:
                info = self._checkpointer.latest(tensors, may_spoil=True)
            except SpoiledError:
                info = None
            if info is None:
                raise JobFailedError(f"step {step}: {anomaly}; training.on_anomaly: rollback found no checkpoint")
            if not (is_noted and info.step == awaited) and not self._leave_out(step, anomaly, info.step):
                most = self._job.spec.training.max_skips
                raise JobFailedError(
                    f"step {step}: {anomaly}; {counted(most, 'batch')} {either(most, 'was', 'were')} left out "
                    "since step"
                    f" {info.step} (training.max_skips), so it is no longer the batch: lower training.learning_rate"
                )
            back_at = info.step

            def go_back() -> None:
                rows = self._metrics.rows()
                self._goodput.went_back(rows, back_at)
                self._metrics.drop_after(back_at, rows)
                say(f"anomaly step={step} rolled back to step={back_at}: {anomaly}; its batch is left out")

            self._group.from_first(go_back)  # what keeps it from that ends all: they would wait for it in the load
            self._load(info, tensors())
        self.anomalies.watch.num_overflows = 0  # other batches follow than those that were counted
        self._upcoming = None

    def _leave_out(self, step: int, anomaly: str, checkpoint_step: int) -> bool:
        """Note the batch of that step, here and beside the checkpoints; False: it would be one too many since then."""
        data = self.anomalies.data
        if self._left_out.num_since(checkpoint_step, data) >= self._job.spec.training.max_skips:
            return False
        self._left_out.add(
            step=step,
            anomaly=anomaly,
            data=data,
            checkpoint_step=checkpoint_step,
            num_sequences=self._job.spec.global_batch_size,
        )
        if self._runtime.is_first:
            self._checkpointer.publish_file(LEFT_OUT_FILE, self._left_out.path)
        return True

    def next_batch(self) -> GlobalBatch:
        """The next optimizer step's sequences; apart from the first, `end_step` has read and counted them."""
        batch, self._upcoming = self._upcoming, None
        if batch is None:
            local = self._read()
            batch = self._counted(local, self._runtime.sum_over_ranks(*_counts(local)))
        self.anomalies.begin(self._position)
        self._observer.copies.copy(batch.local[0])
        return batch

    def _read(self) -> Sequence[MicroBatch]:
        """This rank's share of the batch after the last that was read, and what a checkpoint before it has to say."""
        self._left_out.pass_over(self.data.train)
        self._position = self.data.train.state_dict()
        return self.data.train.next_step()

    def _counted(self, local: Sequence[MicroBatch], totals: Sequence[float]) -> GlobalBatch:
        num_targets, num_tokens = (int(total) // self._num_readers for total in totals)
        if num_targets == 0:
            raise JobFailedError(
                "data: a global batch without a single token to learn: all are prompts, or documents of one token;"
                " raise training.global_batch_size, or set data.document_masks to false"
            )
        return GlobalBatch(local=local, num_targets=num_targets, num_tokens=num_tokens)

    @property
    def num_steps(self) -> int:
        """The job's last step."""
        return self._course.num_steps

    def learning_rate(self, step: int) -> float:
        """The rate that optimizer step `step` uses."""
        return self._course.learning_rate(step)

    def tell(self, step: int, loss_sum: torch.Tensor) -> None:
        """Sends the one message of a step that is not the engine's; `end_step` reads the answer.

        Here the gradients have just brought the ranks together, and the message travels behind the optimizer: sent
        after it, every step would wait for the slowest rank twice. In it are the loss, the counts of the next batch (it
        is read while a GPU still works on this step), what signals asked for, whether a checkpoint is late, by the
        first rank's clock, and how many ranks have news of the data.
        """
        with self.clock("data"):
            upcoming = self._read() if step < self.num_steps else []
        votes, is_late = self.stop_flag.votes(step), float(self._runtime.is_first and self._is_checkpoint_late())
        asked, own = self._profiling.votes(), loss_sum.item()
        news = float(self.data.has_news)
        answer = self._runtime.begin_sum(own, is_late, news, *asked, *votes, *_counts(upcoming))
        self._told = _Told(upcoming, own, answer)

    def end_step(self, step: int, batch: GlobalBatch, update: OptimizerStep) -> tuple[float, Decision]:
        """(the step's loss, what all ranks were asked for): after the update, by the message of `tell`.

        The loss is the token-weighted mean over the global batch, nats.
        """
        told, self._told = self._told, None
        assert told is not None
        self.stop_flag.beat(step)
        totals = told.answer()
        self._checkpoint_is_late = totals[1] > 0
        if totals[2] > 0:
            self.data.gather(self._runtime.control_group)
            self.data.check_limits()
        if told.upcoming:
            self._upcoming = self._counted(told.upcoming, totals[-2:])
        loss = totals[0] / batch.num_targets
        try:
            self.anomalies.check(step, loss, update, told.own_loss_sum)
        except JobFailedError as error:
            saved = self._checkpointer.last_committed_step
            newest = "there is no checkpoint yet" if saved is None else f"the newest checkpoint is of step {saved}"
            raise JobFailedError(f"{error}; {newest}") from None
        asked = totals[3:-2]
        self._profile_votes = asked[: profiling.NUM_VOTES]
        return loss, self.stop_flag.decision(step, asked[profiling.NUM_VOTES :])

    def validate(self, request: Decision) -> tuple[dict[str, Any], Decision]:
        """What the row says of the validation sets that are due after this step; empty where none is.

        And the more urgent of `request` and what came meanwhile: a validation takes longer than a step. One that is in
        the way of a stop is broken off; the job's last is not, since nobody would make up for it.
        The others are made up for by who resumes.
        """
        due = self._validation.due(self.step, self.num_steps)
        if not due:
            return {}, request
        row = self._validated(due)
        return row, max(request, self.stop_flag.agreed(self.step), key=urgency)

    def make_up_validation(self) -> bool:
        """Does what a stop broke off after the step that was resumed: its row is then as if nothing had happened, and
        so is its checkpoint, which keep_best goes by. False where it was broken off again: the debt stays."""
        if self._validation.was_broken_off:
            row = self._validated(self._validation.due(self.step, self.num_steps))
            if self._validation.was_broken_off:
                return False
            self._group.from_first(lambda: self._metrics.complete(self.step, row))
            self._measure({**self._measured, **row})
            # The debt stays in it: until the next save the row is on this machine alone.
            self._checkpointer.complete(self.step, self._measures())
        return True

    def _validated(self, due: Sequence[ValidationSet]) -> dict[str, Any]:
        is_last = self.step == self.num_steps
        with self.clock.excluded():
            return self._validation.run(
                self.strategy, due, self.step, lambda: not is_last and self.stop_flag.must_exit()
            )

    def record(
        self,
        batch: GlobalBatch,
        loss: float,
        learning_rate: float,
        update: OptimizerStep,
        step_seconds: float,
        breakdown: dict[str, float],
        validation: dict[str, Any],
    ) -> None:
        """Writes the finished step's row, and says it on stdout."""
        self._patience.shrink()
        self._measure({"loss": loss, **validation})
        with self.clock.excluded():
            self._profiling.after_step(self.step, self._profile_votes)
        more = self._observer.finish_step(self.step, step_seconds, breakdown, batch.num_tokens)
        if self.anomalies.found is not None:
            more["anomaly"] = self.anomalies.found
        if not self._runtime.is_first:
            return
        if saved := self._saved_figures():
            more["checkpoint"] = saved
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
            validation=validation,
            unit=self._task.unit,
            more=more,
        )
        self._metrics.append(row)
        self._goodput.step(row.as_json())
        say(row.as_line())
        if self._meters is not None:
            self._meters.publish(row.as_json() | {LIVE: self._live_figures(batch.num_tokens / step_seconds)})

    def _live_figures(self, tokens_per_second: float) -> dict[str, float | None]:
        """What a row of metrics.jsonl doesn't say, because it is true only now (first rank)."""
        committed = self._checkpointer.last_committed_step
        saved_at = self._loaded_time if committed is None else self._saved_at.get(committed, self._loaded_time)
        return {
            "steps_planned": self.num_steps,
            "tokens_per_second": tokens_per_second,
            "checkpoint_age_seconds": time.monotonic() - saved_at,
            "goodput": self._goodput.share(),
            **self._goodput.told_once,
        }

    @property
    def _best_of(self) -> list[str] | None:
        """What `_bests` are values of, as a checkpoint says it."""
        best = self._job.spec.checkpoint.keep_best
        return None if best is None else [best.metric, best.mode]

    def _measures(self) -> dict[str, Any]:
        """What a checkpoint says of its step's metrics, and of the best so far."""
        samples = self._validation.samples
        return {"metrics": self._measured, "validated_on": samples, "best": self._best, "best_of": self._best_of}

    def _bests_of(self, extra: dict[str, Any], step: int) -> list[tuple[int, float]]:
        """The best so far as the checkpoint of `step` knows it. A resume may ask for another metric, or the other end
        of it: what was best is nothing then that a value could surpass, and only the checkpoint's own step is known.
        Where it validates on other samples, nothing is."""
        value, asked = extra.get("best"), self._best_of
        if asked is None:
            return []
        before = self._job.spec.checkpoint.retention.samples_of(extra)
        if before not in (None, self._validation.samples.get(set_of(asked[0]) or "")):
            return []
        if extra.get("best_of", asked) != asked:  # the first trainers say none
            value = self._measured.get(asked[0])
        return [] if value is None else [(step, value)]

    def _measure(self, row: dict[str, Any]) -> None:
        """Notes what keep_best looks at, alike on all ranks: a validated step that is the best so far is saved."""
        self._measured = flat_metrics(row)
        best = self._job.spec.checkpoint.keep_best
        value = None if best is None else self._measured.get(best.metric)
        self._is_best = False
        if best is None or value is None:
            return
        self._forget_lost_bests()
        if best.is_better(value, self._best):
            self._bests.append((self.step, value))
            self._is_best = self._has_saves_of_bests

    @property
    def _best(self) -> float | None:
        return self._bests[-1][1] if self._bests else None

    @property
    def _has_saves_of_bests(self) -> bool:
        """Every step has a loss, and most improve on it: saves of their own are for what is measured now and then."""
        best = self._job.spec.checkpoint.keep_best
        return best is not None and best.metric != "loss"

    def _forget_lost_bests(self, *, saved_now: int | None = None) -> None:
        """Those whose save failed, on any rank, are not there: the best of the others is what is to be surpassed.

        `saved_now`: a step that is there in a moment.
        """
        if not self._has_saves_of_bests:
            del self._bests[:-1]
            return
        failed = self._checkpointer.failed_steps
        while self._bests and self._bests[-1][0] != saved_now:
            if not self._checkpointer.is_anywhere(self._bests[-1][0] in failed):
                return
            self._bests.pop()

    def is_checkpoint_due(self) -> bool:
        """At the last step, every so many steps, and every so many minutes of the first rank's clock."""
        every = self._job.spec.checkpoint.every_steps
        by_step = self.step == self.num_steps or (isinstance(every, int) and self.step % every == 0)
        return by_step or self._checkpoint_is_late or self._is_best

    def _is_checkpoint_late(self) -> bool:
        seconds = self._interval.seconds
        return seconds is not None and time.monotonic() - self._last_save_time >= seconds

    def _saved_figures(self) -> dict[str, float]:
        """What saves have cost since the last row, and how long to the next where that is decided by it."""
        figures = self._checkpointer.take_figures()
        if "save_seconds" in figures:
            told = self._interval.measured(figures["save_seconds"], self._checkpointer.blocked_seconds)
            if told is not None:
                say(told)
        if figures and self._interval.is_automatic and self._interval.seconds is not None:
            figures["interval_seconds"] = self._interval.seconds
        return figures

    def save(self) -> None:
        """Checkpoints everything that the next step depends on, and the metrics so far."""
        self._forget_lost_bests(saved_now=self.step)
        extra = {
            "step": self.step,
            ATTEMPT: self._attempt,
            "strategy": self.strategy.name,
            **self._model_described,
            "world_size": self._runtime.world_size,
            "ranks_a_stream": self._job.parallelism.tensor,
            "data": self._position if self._upcoming else self.data.train.state_dict(),
            "engine": self.strategy.engine_state(),
            "anomalies": self.anomalies.watch.state(),
            "base": self._base,
            "owes_validation": self._validation.was_broken_off,
            **self._provenance,
            **self._measures(),
            "rng": rng_state(),  # this rank's own: the checkpoint keeps what differs between ranks
        }
        attachments = {}
        if self._runtime.is_first:
            self._goodput.total()
            attachments = self._attachments() | {METRICS_FILE: self._metrics.to_copy()}
        with self._patience.as_at_start():
            self._checkpointer.save(self.step, self.strategy.state_tensors(), extra, attachments=attachments)
        self._metrics.flush()  # the save made room where it could
        self._saved_step = self.step
        self._last_save_time = time.monotonic()
        committed = self._checkpointer.last_committed_step or 0
        self._saved_at = {step: at for step, at in self._saved_at.items() if step >= committed}
        self._saved_at[self.step] = self._last_save_time
        self._interval.began()

    def _attachments(self) -> dict[str, Path]:
        """What goes to the destination with every checkpoint; those that are there yet."""
        own = (self._metrics.path, self._goodput.path, self._left_out.path, self._output_dir / RECOVERY_FILE)
        return {path.name: path for path in own}

    def finish(self, status: str) -> None:
        """Waits for the last checkpoint to be committed, then writes result.json, here and beside the checkpoints."""
        with self._patience.as_at_start():
            self._checkpointer.wait()
            self._insist(time.monotonic() + self._job.spec.checkpoint.last_save_seconds)
        if self._checkpointer.last_error is not None:
            # Also when interrupted: "saved, resume me" must never be said of a step that is not there.
            ran = f"ran {counted(self.num_steps, 'step')}" if status == "completed" else f"stopped at step {self.step}"
            saved = self._checkpointer.last_committed_step
            goes_on = "it continues from the last checkpoint that it finds"
            if saved is not None:
                goes_on = f"it continues from step {saved}"
            elif self._job.spec.checkpoint.local_directory is None:
                goes_on = "no checkpoint is there, so it begins anew"
            raise JobFailedError(
                f"{ran}, but the last checkpoint could not be saved: {self._checkpointer.last_error}; mend it and start"
                f" the job again: {goes_on}"
            )
        if status == "completed":
            self._checkpointer.leave_hosts_disks()
        self.data.gather(self._runtime.control_group)
        if self._runtime.is_first:
            path = self._output_dir / RESULT_FILE
            is_written = replace_all(path, json.dumps(self._result(status), indent=1) + "\n")
            if not is_written:
                path.unlink(missing_ok=True)  # an earlier start's would tell of another end
                say(f"{path}: not written, its disk is full")
            self._goodput.end(status)
            self._checkpointer.publish_file(METRICS_FILE, self._metrics.to_copy())
            self._checkpointer.publish_file(GOODPUT_FILE, self._goodput.path)
            if (recovered := self._output_dir / RECOVERY_FILE).exists():
                self._checkpointer.publish_file(RECOVERY_FILE, recovered)
            if is_written:
                self._checkpointer.publish_file(RESULT_FILE, path)

    def _insist(self, deadline: float) -> None:
        """Try the last save again until it is committed, or the time is up: there is no later one to make up for it."""
        pause = _FIRST_PAUSE_SECONDS
        checkpointer = self._checkpointer
        while checkpointer.is_anywhere(checkpointer.last_error is not None):
            if checkpointer.is_anywhere(time.monotonic() + pause > deadline):
                return
            until = time.monotonic() + pause
            while time.monotonic() < until:
                beat()
                time.sleep(min(0.5, pause))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self.save()
            checkpointer.wait()

    def _result(self, status: str) -> dict[str, Any]:
        rows = self._metrics.rows()
        return {
            "status": status,
            "steps": self.step,
            "loss_first": rows[0]["loss"] if rows else None,
            "loss_last": rows[-1]["loss"] if rows else None,
            **self._validation.summary(rows),
            **self.data.describe(),
            self._task.unit: sum(row.get(self._task.unit, 0) for row in rows),
            "seconds": time.perf_counter() - self._started,
            "step_seconds": sum(row["step_seconds"] for row in rows),
            "attempts": self._attempt,
            "strategy": self.strategy.name,
            "choices": self.strategy.choices,
            "world_size": self._runtime.world_size,
            "num_skipped": sum(bool(row.get("skipped")) for row in rows),
            "observed": next((row["observed"] for row in reversed(rows) if "observed" in row), None),
        }

    def close(self) -> None:
        """Frees what the engine and the checkpoints hold."""
        self.stop_flag.uninstall()
        self._profiling.close()
        self._observer.close()
        if self._meters is not None:
            self._meters.close()
        self._checkpointer.close()
        self.data.close()
        self.strategy.close()


def _counts(batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Labels that count, and tokens without padding."""
    return sum(batch.num_target_tokens for batch in batches), sum(batch.num_tokens for batch in batches)
