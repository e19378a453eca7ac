"""What a checkpoint may say of itself: one rule for the trainer, which restores it, and for `trainyard checkpoints`."""

from typing import Any


def file_name(given: Any) -> str:
    """ValueError where it would lead out of the step's folder: who reads or copies the file would touch another."""
    name = str(given)
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    return name


def other_step(step: int, *, manifest: Any, marker: Any) -> str | None:
    """Why the folder of `step` holds another step's checkpoint, by the steps that these two say; None: it is its own.

    A folder that was copied or renamed by hand is whole by every hash. A marker may say none (null).
    """
    if manifest != step:
        return f"its manifest is of step {manifest}"
    if marker not in (None, step):
        return f"its marker is of step {marker}"
    return None
