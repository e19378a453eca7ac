"""A job of this machine's records whose folder was moved, or copied: at the place that its record knows it would begin
anew, or go on beside the one that it was copied from."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from trainyard.launch.checkpoint_files import FOLDER as CHECKPOINTS
from trainyard.launch.record import JobRecord


@dataclass(frozen=True)
class Copied:
    """A job whose folder was copied: nobody knows which of the two is meant to go on."""

    known: Path
    """Its destination, by its record."""
    here: Path
    """The copy, in the job's own folder."""

    def __str__(self) -> str:
        return (
            f"its checkpoints are in {self.known} by its record, and there are some in {self.here} too: its folder was"
            " copied"
        )


def own_folder(record: JobRecord, folder: Path) -> Path:
    """Where the job's own folder is now; `folder` holds this machine's records."""
    compute = record.resolved.spec.compute
    stated = {"slurm": compute.slurm.directory, "ray": compute.ray.directory}.get(record.backend)
    return Path(stated or folder.resolve()) / record.job_id


def moved_to(record: JobRecord, folder: Path) -> Path | None:
    """What is the job's destination now, where its folder was moved with its checkpoints; None where they are in place,
    or on S3, or nobody knows."""
    now, known = _saved_here(record, folder), Path(record.checkpoint_destination)
    # Of another user's folder nothing is known.
    in_place = known.is_absolute() and os.path.exists(known / CHECKPOINTS)  # noqa: PTH110
    return None if in_place else now


def refused_resume(record: JobRecord, folder: Path) -> list[str]:
    """Why the newest attempt may not go on: its folder was moved, or is a copy. Of the first, which goes on from
    nothing, nothing."""
    now = _saved_here(record, folder) if record.attempt.number > 1 else None
    known = Path(record.checkpoint_destination)
    if now is None or not known.is_absolute():
        return []
    if moved_to(record, folder) is not None:
        link = f"{shlex.join(['mkdir', '-p', str(known.parent)])}; {shlex.join(['ln', '-s', str(now), str(known)])}"
        # A link would be made in what is there.
        mended = f"move what is there away, and then link it: {link}" if os.path.lexists(known) else f"link it: {link}"
        return [
            f"its checkpoints are in {now}, and its record says {known}: its folder was moved, and it would begin anew;"
            f" move it back, or {mended}"
        ]
    if (copied := copied_to(record, folder)) is None:
        return []
    return [
        f"{copied}, and both would save to one place; resume it from where it was, or launch a job with"
        f" checkpoint.destination={now} to go on from the copy"
    ]


def copied_to(record: JobRecord, folder: Path) -> Copied | None:
    """Where the job's checkpoints lie twice: its destination is in place, and a copy of it in the job's own folder."""
    now, known = _saved_here(record, folder), Path(record.checkpoint_destination)
    if now is None or moved_to(record, folder) is not None or record.job_id not in known.parts or now.samefile(known):
        return None
    return Copied(known, now)


def _saved_here(record: JobRecord, folder: Path) -> Path | None:
    """What in the job's own folder is its destination, if there are checkpoints in it; None: elsewhere."""
    if "://" in record.checkpoint_destination:
        return None
    known = Path(record.checkpoint_destination)
    # A stated one may be in a folder of the job's own folder.
    inside = known.parts[known.parts.index(record.job_id) + 1 :] if record.job_id in known.parts else ()
    if record.backend == "slurm" and not known.is_absolute():  # as earlier trainyards noted what they stated from there
        inside = known.parts
    now = own_folder(record, folder).joinpath(*inside)
    return now if os.path.isdir(now / CHECKPOINTS) else None  # noqa: PTH112  # who looks into it says why not
