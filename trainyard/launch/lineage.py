"""Whose checkpoints lie at a place: a copy that mixed two runs would have a resume go on from either's."""

import json
from collections.abc import Iterable
from typing import Any, Protocol

from trainyard.errors import InputError
from trainyard.launch.checkpoint_files import Files

METRICS = "metrics.jsonl"


class Saved(Protocol):
    """A checkpoint, as far as it tells whose it is."""

    @property
    def step(self) -> int:
        """Its step."""

    @property
    def manifest_sha256(self) -> str:
        """Empty where it can't be read."""

    @property
    def extra(self) -> dict[str, Any]:
        """What its manifest says beside the tensors."""


def refuse_anothers(source: Files, sink: Files, here: Iterable[Saved], there: Iterable[Saved], target: str) -> None:
    """InputError where the sink holds checkpoints of another run than the source's.

    `here`, `there`: all that the two hold. The same manifest is the same checkpoint, and one that both have makes them
    one run's, whatever either has gone on to. Else two runs differ in the row of any step by its loss, or, in the same
    attempt (a later one replays steps), its seconds; where no row tells, the job's own hashes do, of which that without
    its layout outlives a move. A job may be of several versions: it is enough that the source has one of that version.
    """
    here = list(here)
    own = {one.manifest_sha256 for one in here}
    strangers = [one for one in there if one.manifest_sha256]
    if any(one.manifest_sha256 in own for one in strangers):
        return
    readable = [_jobs_of(one) for one in here if one.manifest_sha256]
    jobs = set[str]().union(*readable)
    rows, rows_there = _rows_of(source), _rows_of(sink)
    for one in strangers:
        row, row_there = rows.get(one.step), rows_there.get(one.step)
        if row is not None and row_there is not None:
            is_anothers = row[0] != row_there[0] or (row[1] == row_there[1] and row != row_there)
        else:  # the first trainers' manifests don't tell
            job = _jobs_of(one)
            is_anothers = bool(job) and all(readable) and job.isdisjoint(jobs)
        if is_anothers:
            raise InputError(
                f"{target}: holds what seem to be another job's checkpoints (step {one.step}), which stay;"
                " give another prefix or folder"
            )


def _jobs_of(saved: Saved) -> set[str]:
    """The digests by which it knows its job, with its layout and without: either will do. Empty: it doesn't say."""
    told = (saved.extra.get(name) for name in ("job_sha256", "recipe_sha256"))
    return {digest for digest in told if isinstance(digest, str)}


def _rows_of(files: Files) -> dict[int, tuple[Any, Any, Any]]:
    """Step -> loss, attempt and seconds of its row."""
    rows = {}
    for line in (files.read(METRICS) or b"").splitlines():
        try:
            row = json.loads(line)
            rows[int(row["step"])] = (row.get("loss"), row.get("attempt"), row.get("step_seconds"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue  # broken by a kill
    return rows
