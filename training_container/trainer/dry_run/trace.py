"""One optimizer step of one rank, written down: memory by category, every message, and what would go wrong."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from trainer.dry_run.batches import made_up, tensors_of
from trainer.dry_run.building import NoValues, alone_as, build, shortened
from trainer.dry_run.kernels import as_on_gpus
from trainer.dry_run.ledger import CATEGORIES, Ledger
from trainer.dry_run.messages import Kind, Messages
from trainer.dry_run.watch import Watch
from trainer.dry_run.work import PHASES, Work
from trainer.runtime import Runtime
from trainer.strategies import check_supported
from trainer.strategies.mesh import place_of
from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.spec.job import ResolvedJob
from trainyard.spec.support import TWO_STAGES

LONGEST_WHOLE = 3
"""Micro-batches a rank of the pipeline, up to which a step is traced as it is."""

LONGEST_OF_TWO_STAGES = 4
"""The same where a rank has two stages, which hold more micro-batches at a time."""

OF_THE_MODEL = ("activations", "temporaries")
"""Categories that a model has whatever its engine."""


@dataclass(frozen=True)
class Step:
    """What one rank's step did, with some number of micro-batches."""

    num_micro_batches: int
    at_peak: dict[str, int]
    """Bytes by category, at the moment when most is held."""
    phase: str
    """Of that moment: forward, backward or optimizer."""
    gradients: int
    """Bytes after the last backward pass: whatever the peak's moment, the update needs them."""
    messages: dict[Kind, tuple[int, int]]
    """Kind -> (messages, bytes)."""
    work: Work
    num_params: int
    """Of the whole model."""
    num_trained: int
    strategy: str
    choices: dict[str, str]


def trace(job: ResolvedJob, rank: int) -> dict[str, Any]:
    """What `rank` of the job holds and says in one step, as JSON values. InputError, in one line, for what a launch
    would refuse, and JobFailedError for what it would end in.

    A step of many micro-batches is traced twice with few, of which the second has more than a pipeline holds at a time:
    each further one does what made the difference.
    """
    began = time.perf_counter()
    if not 0 <= rank < job.world_size:
        raise InputError(f"--rank {rank}: the job has ranks 0 to {job.world_size - 1}")
    _check(job)
    count, depth = job.gradient_accumulation_steps, job.parallelism.pipeline
    longest = LONGEST_OF_TWO_STAGES if job.parallelism.pipeline_schedule in TWO_STAGES else LONGEST_WHOLE
    traced = [count] if count <= longest * depth else [(longest - 1) * depth, longest * depth]
    with alone_as(rank, job.world_size, job.processes_per_host) as runtime:
        steps = [_one_step(shortened(job, number), runtime) for number in traced]
    return _report(job, rank, steps) | {"seconds": round(time.perf_counter() - began, 2)}


def _check(job: ResolvedJob) -> None:
    """What a dry run can't do, and what the trainer would refuse on whatever machine."""
    if job.spec.training.precision == "fp8":
        raise InputError(
            "--dry-run: training.precision: fp8 runs kernels that this machine has not; trace it in bf16 (--set"
            " training.precision=bf16), whose memory is the same but for 8-bit copies inside of products"
        )
    if job.parallelism.engine == "deepspeed" and job.spec.training.precision == "fp16":
        raise InputError(
            "--dry-run: training.precision: fp16 is what DeepSpeed has not on this machine; trace it in bf16 (--set"
            " training.precision=bf16), whose memory is the same"
        )
    check_supported(shortened(job, job.gradient_accumulation_steps), device_type="cpu")


def _one_step(job: ResolvedJob, runtime: Runtime) -> Step:
    try:
        return _traced_step(job, runtime)
    except TrainyardError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise InputError(
            f"--dry-run: this model's code asks for values of tensors, which a dry run has not ({_one_line(error)});"
            " leave --dry-run out"
        ) from error
    except Exception as error:  # of whatever kind: the launch would end in it
        where = f"rank {runtime.rank} of {runtime.world_size}"
        raise JobFailedError(f"--dry-run: {where}: {type(error).__name__}: {_one_line(error)}") from error


def _traced_step(job: ResolvedJob, runtime: Runtime) -> Step:
    mode = NoValues()
    built = build(job, runtime, mode)
    strategy = built.strategy
    ledger, messages, work = Ledger(), Messages(job.parallelism), Work()
    watch = Watch(ledger, messages, work, recomputes=job.activation_checkpointing != "none")
    for category, tensors in strategy.held().items():
        ledger.hold(tensors, category)
    with warnings.catch_warnings(), mode, as_on_gpus(job), ledger.watching_resizes():
        warnings.simplefilter("ignore")
        batches = made_up(job, built.model.config)
        ledger.leave_out(tensors_of(batches))
        with watch.without_questions_of_shape(), watch.inside_of_fsdp(), watch:
            strategy.forward_backward(batches, sum(batch.num_target_tokens for batch in batches), watch.clock)
            for category in ("parameters", "gradients"):  # FSDP makes a padded shard's memory anew at its first use
                ledger.hold(strategy.held()[category], category)
            gradients = ledger.held_as("gradients")
            with watch.clock("optimizer"):
                strategy.optimizer_step(job.learning_rate)
    peak = ledger.peak(of_the_model=job.parallelism.engine == "deepspeed")
    return Step(
        num_micro_batches=job.gradient_accumulation_steps,
        at_peak=peak.by_category,
        phase=peak.phase,
        gradients=gradients,
        messages=dict(messages.counts),
        work=work,
        num_params=built.num_params,
        num_trained=built.num_trained,
        strategy=strategy.name,
        choices=strategy.choices,
    )


def _report(job: ResolvedJob, rank: int, steps: Sequence[Step]) -> dict[str, Any]:
    last, count = steps[-1], job.gradient_accumulation_steps
    is_whole = job.parallelism.engine == "torch"
    peak = _peak_continued(steps, count)
    memory = {name: peak[name] if is_whole or name in OF_THE_MODEL else None for name in CATEGORIES}
    kinds = sorted({kind for step in steps for kind in step.messages}, key=lambda kind: (kind.axis, kind.name))
    messages = []
    for kind in kinds:
        pairs = [step.messages.get(kind, (0, 0)) for step in steps]
        counts, num_bytes = ([pair[index] for pair in pairs] for index in (0, 1))
        messages.append(
            asdict(kind) | {"count": _continued(counts, steps, count), "bytes": _continued(num_bytes, steps, count)}
        )
    return {
        "rank": rank,
        "world_size": job.world_size,
        "place": asdict(place_of(job.parallelism, rank)),
        "strategy": last.strategy,
        "choices": last.choices,
        "params": last.num_params,
        "trained_params": last.num_trained,
        "memory_bytes": memory,
        "peak_bytes": sum(value or 0 for value in memory.values()) if is_whole else None,
        "peak_phase": last.phase,
        "gradients_bytes": _continued([step.gradients for step in steps], steps, count) if is_whole else None,
        "messages": messages if is_whole else None,
        "work": _work(steps, count),
        "micro_batches": {"a_step": count, "traced": [step.num_micro_batches for step in steps]},
        "notes": _notes(job, steps),
    }


def _work(steps: Sequence[Step], count: int) -> dict[str, Any]:
    """What the whole step computes, as JSON values: kinds of products and of attention, the other kernels' bytes."""

    def kinds(name: str) -> list[dict[str, Any]]:
        counted = [getattr(step.work, name) for step in steps]
        return [
            asdict(kind) | {"count": _continued([each[kind] for each in counted], steps, count)}
            for kind in dict.fromkeys(kind for each in counted for kind in each)
        ]

    def phases(name: str) -> dict[str, int]:
        counted = [getattr(step.work, name) for step in steps]
        return {phase: _continued([each[phase] for each in counted], steps, count) for phase in PHASES}

    return {
        **{name: kinds(name) for name in ("products", "attention")},
        **{name: phases(name) for name in ("moved_bytes", "kernels")},
    }


def _continued(values: Sequence[int], steps: Sequence[Step], count: int) -> int:
    """What a step of `count` micro-batches has, given what those of fewer had: it grows as it did between them."""
    if len(steps) == 1:
        return values[0]
    few, more = (step.num_micro_batches for step in steps)
    return values[1] + (values[1] - values[0]) * (count - more) // (more - few)


def _peak_continued(steps: Sequence[Step], count: int) -> dict[str, int]:
    """The same of what is held at the peak, by category. What one category has gained at another's cost is no growth:
    a reduced gradient is a buffer, or the gradient itself, as micro-batches come before it."""
    first, last = steps[0].at_peak, steps[-1].at_peak
    gained = {name: max(last[name] - first[name], 0) for name in CATEGORIES}
    growth = max(sum(last.values()) - sum(first.values()), 0)
    if not growth:
        return dict(last)
    few, more = steps[0].num_micro_batches, steps[-1].num_micro_batches
    share = growth * (count - more) / (more - few) / sum(gained.values())
    return {name: last[name] + int(gained[name] * share) for name in CATEGORIES}


def _notes(job: ResolvedJob, steps: Sequence[Step]) -> list[str]:
    notes = []
    if job.parallelism.engine == "deepspeed":
        notes.append(
            "engine: deepspeed cuts its memory and sends its messages by its own code, which copies between addresses"
            " that have to exist: traced is the model alone, its activations and what its backward pass makes"
        )
    if len(steps) > 1:
        few, more = (step.num_micro_batches for step in steps)
        notes.append(
            f"steps of {few} and {more} micro-batches were traced; each of the {job.gradient_accumulation_steps} adds"
            " what made the difference"
        )
    if job.spec.training.compile:
        notes.append("blocks were traced as they are before compilation, which keeps no more than they do")
    return notes


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or "no reason given"
