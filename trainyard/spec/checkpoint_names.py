"""Names in a checkpoint's manifest: one rule for the trainer, which restores it, and for `checkpoints copy`."""

from typing import Any


def file_name(given: Any) -> str:
    """ValueError where it would lead out of the step's folder: who reads or copies the file would touch another."""
    name = str(given)
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    return name
