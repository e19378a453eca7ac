"""A job of this machine's records whose folder was moved: at the place that its record knows it would begin anew."""

import shlex
from pathlib import Path

from trainyard.launch.checkpoint_files import FOLDER as CHECKPOINTS
from trainyard.launch.record import JobRecord


def own_folder(record: JobRecord, folder: Path) -> Path:
    """Where the job's own folder is now; `folder` holds this machine's records."""
    compute = record.resolved.spec.compute
    stated = {"slurm": compute.slurm.directory, "ray": compute.ray.directory}.get(record.backend)
    return Path(stated or folder.resolve()) / record.job_id


def moved_to(record: JobRecord, folder: Path) -> Path | None:
    """What is the job's destination now, where its folder was moved with its checkpoints; None where they are in place,
    or on S3, or nobody knows."""
    if "://" in record.checkpoint_destination:
        return None
    known, own = Path(record.checkpoint_destination), own_folder(record, folder)
    parts = known.parts
    # A stated one may be in a folder of the job's own folder.
    inside = parts[parts.index(record.job_id) + 1 :] if record.job_id in parts else ()
    now = own.joinpath(*inside)
    return now if (now / CHECKPOINTS).is_dir() and not (known / CHECKPOINTS).exists() else None


def refused_resume(record: JobRecord, folder: Path) -> list[str]:
    """Why the newest attempt may not go on: its folder was moved. Of the first, which goes on from nothing, nothing."""
    now = moved_to(record, folder) if record.attempt.number > 1 else None
    if now is None:
        return []
    known = Path(record.checkpoint_destination)
    link = f"{shlex.join(['mkdir', '-p', str(known.parent)])}; {shlex.join(['ln', '-s', str(now), str(known)])}"
    return [
        f"its checkpoints are in {now}, and its record says {known}: its folder was moved, and it would begin anew;"
        f" move it back, or link it: {link}"
    ]
