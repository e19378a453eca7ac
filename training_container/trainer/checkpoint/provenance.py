"""Which job and which code wrote a checkpoint, so that a resume that goes on with others says so."""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trainer
import trainyard
from trainyard.spec.job import ResolvedJob

_KEYS = ("job_sha256", "code_sha256")
_OF_THE_RUN = {"compute", "checkpoint", "preflight", "recovery", "meters", "tracking", "budget"}
"""Sections that say where and how a job is run, saved and watched: no loss depends on them."""


def provenance(job: ResolvedJob) -> dict[str, str]:
    """`job_sha256` of the resolved job but for how it is run, `code_sha256` of the trainer that runs; hex."""
    told = job.model_dump(mode="json", exclude={"spec": _OF_THE_RUN, "hours_between_failures": True})
    content = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return dict(zip(_KEYS, (hashlib.sha256(content.encode()).hexdigest(), code_digest()), strict=True))


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


def told_difference(saved: Mapping[str, Any], own: Mapping[str, str], *, step: int) -> str | None:
    """The line for a resume of a checkpoint that another job's text or other code wrote; None where neither did."""
    named = zip(_KEYS, ("another version of the job", "other code"), strict=True)
    # The first trainers' checkpoints have no digests.
    differing = {key: what for key, what in named if saved.get(key, own[key]) != own[key]}
    if not differing:
        return None
    digests = ", ".join(
        f"{key.removesuffix('_sha256')} {saved[key][:12]} then, {own[key][:12]} now" for key in differing
    )
    what = " and ".join(differing.values())
    return f"checkpoint step={step} was written by {what} ({digests}): its losses may go on differently"
