"""Which job, code and layout wrote a checkpoint, so that a resume that goes on with others says so."""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trainer
import trainyard
from trainyard.spec.job import ResolvedJob

_JOB, _RECIPE, _CODE, _LAYOUT = "job_sha256", "recipe_sha256", "code_sha256", "layout"
_HANGS_ON_PARTS = "hangs_on_micro_batches"
_OF_THE_RUN = {"compute", "checkpoint", "preflight", "recovery", "meters", "tracking", "budget"}
"""Sections that say where and how a job is run, saved and watched: no loss depends on them."""
_NOT_LEARNT_BY = {
    *("micro_batch_size", "activation_checkpointing"),
    *("validation_every_steps", "validation_batches", "observe_every_steps", "phase_ranges"),
}
"""Of `training`: how a step is laid out, and what only looks at it."""
_LAID_OUT = {
    "num_hosts": "hosts",
    "processes_per_host": "processes a host",
    "micro_batch_size": "training.micro_batch_size",
    "activation_checkpointing": "training.activation_checkpointing",
    "gradient_accumulation_steps": "micro-batches a step",
}
"""Of the resolved job, beside its parallelism -> as it is told."""
_FELT = ("micro_batch_size", "gradient_accumulation_steps")
"""Of these: a balance of routers and norms of a batch are a micro-batch's."""
_MOST_NAMED = 4
"""Settings that a line names; what only follows from others comes last."""


def provenance(job: ResolvedJob) -> dict[str, Any]:
    """What a manifest keeps of who wrote it.

    `job_sha256` of the resolved job but for how it is run, `recipe_sha256` of it without its layout, too, `code_sha256`
    of the trainer that runs; hex. `layout`: setting -> value, of who holds what and of a step's parts.
    `hangs_on_micro_batches`: whether another `training.micro_batch_size` is felt, by the job's text.
    """
    told = job.model_dump(mode="json", exclude={"spec": _OF_THE_RUN, "hours_between_failures": True})
    return {
        **{_JOB: _digest(told), _RECIPE: _digest(_recipe(job)), _CODE: code_digest(), _LAYOUT: _layout(job)},
        _HANGS_ON_PARTS: _hangs_on_parts(job),
    }


def _hangs_on_parts(job: ResolvedJob) -> bool:
    """Whether a micro-batch's loss is more than its samples' sum: by a balance of routers, or norms of a batch."""
    config = job.spec.model.config or {}
    is_balanced = bool(config.get("output_router_logits")) and job.spec.task == "causal_lm"
    return is_balanced or (job.spec.task == "image_classification" and config.get("model_type", "resnet") == "resnet")


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _recipe(job: ResolvedJob) -> dict[str, Any]:
    """What is learnt, of what and how: the same under every layout."""
    spec = job.spec.model_dump(mode="json", exclude=_OF_THE_RUN | {"parallelism"})
    spec["training"] = {name: value for name, value in spec["training"].items() if name not in _NOT_LEARNT_BY}
    # Where the job lets batch and rate follow its machines, they are of the layout.
    follows = {} if _is_adapted(job) else {"steps": job.steps, "learning_rate": job.learning_rate}
    return {"spec": spec, **follows}


def _is_adapted(job: ResolvedJob) -> bool:
    elastic = job.spec.recovery.elastic
    return elastic is not None and elastic.batch == "adapt"


def _layout(job: ResolvedJob) -> dict[str, Any]:
    """By the names that `trainyard resume --set` takes, where it takes them."""
    told = job.model_dump(mode="json", exclude={"spec"})
    parallelism = told["parallelism"]
    nested = {f"{name}.{key}": value for name in ("fsdp", "zero") for key, value in parallelism.pop(name).items()}
    adapted = {"global_batch_size": job.spec.global_batch_size, "learning_rate": job.learning_rate}
    return {
        **{f"parallelism.{name}": value for name, value in (parallelism | nested).items()},
        **(adapted if _is_adapted(job) else {}),
        **{words: told[name] for name, words in _LAID_OUT.items()},
    }


@functools.cache
def code_digest() -> str:
    """SHA-256 of every Python file of the trainer and of the job's specification: path, length, content; hex.

    The two packages that the image's digest would stand for too; a run outside an image has them as well.
    """
    digest = hashlib.sha256()
    for root in (Path(trainer.__file__).parent, Path(trainyard.__file__).parent / "spec"):
        for path in sorted(root.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()}:{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def told_differences(saved: Mapping[str, Any], own: Mapping[str, Any], *, step: int) -> list[str]:
    """The lines for a resume of a checkpoint that another job's text, other code or another layout wrote; none where
    nothing of it differs. `saved`: a manifest's `extra`; the first trainers' have no digests, later ones' no layout."""
    lines = []
    is_another_job = _differs(_JOB, saved, own) and _differs(_RECIPE, saved, own) is not False
    differing = {_JOB: "another version of the job"} if is_another_job else {}
    if is_another_job and _RECIPE not in saved:
        differing[_JOB] += " (or another layout of it)"
    if _differs(_CODE, saved, own):
        differing[_CODE] = "other code"
    if differing:
        digests = ", ".join(
            f"{key.removesuffix('_sha256')} {saved[key][:12]} then, {own[key][:12]} now" for key in differing
        )
        what = " and ".join(differing.values())
        lines.append(f"checkpoint step={step} was written by {what} ({digests}): its losses may go on differently")
    if moved := _moved(saved.get(_LAYOUT), own[_LAYOUT]):
        more = f"; {len(moved) - _MOST_NAMED} more" if len(moved) > _MOST_NAMED else ""
        named = "; ".join(moved[:_MOST_NAMED])
        is_felt = own.get(_HANGS_ON_PARTS) and any(line.startswith(_LAID_OUT[name]) for name in _FELT for line in moved)
        losses = ": its losses may go on differently, as they hang on micro-batches" if is_felt else ""
        lines.append(f"checkpoint step={step} goes on in another layout ({named}{more}){losses}")
    return lines


def _differs(key: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool | None:
    """None: it says nothing of that."""
    return saved[key] != own[key] if isinstance(saved.get(key), str) else None


def _moved(saved: Any, own: Mapping[str, Any]) -> list[str]:
    """Each setting of the layout that both know and that differs."""
    if not isinstance(saved, dict):
        return []
    return [
        f"{name} {json.dumps(saved[name])} then, {json.dumps(value)} now"
        for name, value in own.items()
        if name in saved and saved[name] != value
    ]
