"""What is odd about a job, though nothing refuses it: a short trial of a long job may mean it.

One list for all who tell of it: `plan` notes it, `launch` and the trainer warn of it. A note is one line that says
which setting it is and what comes of it.
"""

import math
from collections.abc import Iterator, Mapping

from trainyard.spec.base import SpecModel
from trainyard.spec.job import JobSpec
from trainyard.spec.support import ROUTER_FAMILIES
from trainyard.spec.words import counted

_MOSTLY = 0.5
"""A running average that is still more than this share of what the job began with has next to none of its training."""


def notes_on(job: JobSpec, num_steps: int | None) -> tuple[str, ...]:
    """What is odd about a job of so many steps; None: not known before its data is read."""
    found = [*_idle_settings(job), *_notes_of_kept(job), *_notes_of_router(job)]
    if num_steps is not None:
        found += [*job.training.schedule.notes(num_steps), *_long_intervals(job, num_steps)]
        found += _notes_of_average(job, num_steps)
    return tuple(found)


def _idle_settings(job: JobSpec) -> Iterator[str]:
    """What is set, and read by nobody beside what else is set."""
    training, optimizer, schedule = job.training, job.training.optimizer, job.training.schedule
    kind = f"kind: {schedule.kind}"
    if schedule.kind == "constant":
        yield from _idle("training.schedule", schedule, ("final_fraction",), f"with {kind}")
    if schedule.kind != "wsd":
        yield from _idle("training.schedule", schedule, ("decay_fraction",), f"with {kind}: it is wsd's")
    kind = f"kind: {optimizer.kind}"
    if optimizer.kind != "sgd":
        yield from _idle("training.optimizer", optimizer, ("momentum", "nesterov"), f"with {kind}: it is sgd's")
    if optimizer.kind in ("sgd", "adafactor"):
        yield from _idle("training.optimizer", optimizer, ("betas", "eps"), f"with {kind}: it is adamw's")
    if training.on_anomaly == "stop":
        yield from _idle("training", training, ("max_skips",), "with on_anomaly: stop")
    if not job.data.validation:
        names = ("validation_every_steps", "validation_batches")
        yield from _idle("training", training, names, "without a source in data.validation")


def notes_on_rank(rank: int, widths: Mapping[str, int]) -> tuple[str, ...]:
    """What is odd about an adapter of that rank; `widths`: by the names of the layers that it stands beside, the
    narrower of a layer's two sides. Whoever knows these calls it: a job states none of its model's."""
    width, name = min(((width, name) for name, width in widths.items()), default=(rank, ""))
    if rank <= width:
        return ()
    return (
        f"model.adapter.rank: {rank} is more than the width of {name}, {width}, and what is added to a matrix has no"
        " higher rank than that: the rest of that layer's is trained and saved for nothing",
    )


NORMALIZES: Mapping[str, bool] = {"deepseek_v3": True, "mixtral": True, "qwen3_moe": False}
"""Model type -> whether it makes the weights of a token's experts sum to 1 where `norm_topk_prob` says nothing
(transformers 5.23; Mixtral, which has no such field, always)."""


def _notes_of_router(job: JobSpec) -> Iterator[str]:
    config = job.model.config or {}
    kind = str(config.get("model_type"))
    if config.get("num_experts_per_tok") != 1 or kind not in NORMALIZES:
        return
    is_normalized = NORMALIZES[kind] if kind == "mixtral" else config.get("norm_topk_prob", NORMALIZES[kind])
    is_balanced = config.get("output_router_logits") and config.get("router_aux_loss_coef", 1.0)
    if is_normalized and not (is_balanced and kind in ROUTER_FAMILIES):
        otherwise = "" if kind == "mixtral" else ", or norm_topk_prob: false"
        yield (
            f"model.config.num_experts_per_tok: 1 where {kind} makes a token's weights sum to 1: its only expert has"
            f" weight 1 whatever the router says, which gets no gradient and stays as it began; choose 2{otherwise}"
        )


def _idle(where: str, section: SpecModel, names: tuple[str, ...], why: str) -> Iterator[str]:
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            told = list(value) if isinstance(value, tuple) else str(value).lower()
            yield f"{where}.{name}: {told} changes nothing {why}"


def _long_intervals(job: JobSpec, num_steps: int) -> Iterator[str]:
    """What comes round later than the job's end."""
    length, last = f"is more than the job's {counted(num_steps, 'step')}", "the last step alone"
    every = job.training.validation_every_steps
    if job.data.validation and every is not None and every > num_steps:
        yield f"training.validation_every_steps: {every} {length}: it is validated after {last}"
    named = {source.name: source.every_steps for source in job.data.validation}
    for name, own in named.items():
        if own is not None and own > num_steps:
            yield f"data.validation, set {name}: every_steps {own} {length}: it is validated on after {last}"
    saving = job.checkpoint
    if isinstance(saving.every_steps, int) and saving.every_steps > num_steps and saving.every_minutes is None:
        yield (
            f"checkpoint.every_steps: {saving.every_steps} {length}, and every_minutes is null: it is saved after"
            f" {last}, and whatever fails before loses all of it"
        )
    if saving.keep_every_steps is not None and saving.keep_every_steps > num_steps:
        yield f"checkpoint.keep_every_steps: {saving.keep_every_steps} {length}: none stays for good"


def _notes_of_kept(job: JobSpec) -> Iterator[str]:
    """Of checkpoints that stay, where hardly any is saved that could."""
    saving, best = job.checkpoint, job.checkpoint.keep_best
    kept, by_steps = saving.keep_every_steps, saving.every_steps
    if kept is not None and not isinstance(by_steps, int):
        yield (
            f"checkpoint.keep_every_steps: {kept} keeps what happens to be saved at such a step, as nothing is saved by"
            " steps: set checkpoint.every_steps to it, or to a part of it"
        )
    elif kept is not None and isinstance(by_steps, int) and kept % by_steps:
        yield (
            f"checkpoint.keep_every_steps: {kept} is no multiple of checkpoint.every_steps, {by_steps}: what stays for"
            f" good are the saves of every {math.lcm(kept, by_steps)} steps"
        )
    if best is not None and best.metric.startswith("validation_"):
        named = best.metric.split(".")[1] if best.metric.startswith("validation_sets.") else None
        own = {source.name: source.every_steps for source in job.data.validation}
        if own.get(named) is None and job.training.validation_every_steps is None:
            yield (
                f"checkpoint.keep_best.metric: {best.metric} is measured after the last step alone, which is the best"
                " then: set training.validation_every_steps"
            )


def _notes_of_average(job: JobSpec, num_steps: int) -> Iterator[str]:
    """Of an average that the job's steps hardly move."""
    decay = job.training.optimizer.average_decay
    if decay is None:
        return
    if not decay:
        yield "training.optimizer.average_decay: 0 keeps the weights as they are a second time; null keeps none"
    elif (left := decay**num_steps) > _MOSTLY:
        yield (
            f"training.optimizer.average_decay: {decay:g} over {counted(num_steps, 'step')} leaves an average "
            f"that is {left:.0%}"
            f" the weights that the job began with: {0.05 ** (1 / num_steps):.4g} leaves 5%"
        )
