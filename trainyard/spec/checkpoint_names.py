"""What a checkpoint may say of itself: one rule for the trainer, which restores it, and for `trainyard checkpoints`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LEADS_NOWHERE = "is a link to what isn't there (is its disk mounted?)"
"""Said of a link in whose place checkpoints may be: who takes it for nothing begins the job anew."""

CLAIM_OUTPUT = ", with its output in "
"""In a claim's file (`.in_use`), between the job that saves there and its output's folder, which is nobody else's to
know."""

MOST_CLAIM_BYTES = 5000
"""Of what a claim's file says: the longest path that there may be, and a little."""

_ADDRESS = re.compile(r"(s3[an]?|arn|gs|https?|file):", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""As a `Path` has left of an address: one of its slashes."""
HOME = "only a shell takes ~ for a home; write the whole path"


def is_foreign(place: str) -> bool:
    """Whether it is written as an address, and as none of S3's that is read here (`s3:/acme/x`, an ARN): as a folder's
    name it would be made where one is, and who looks for it in the bucket finds nothing."""
    return not place.startswith("s3://") and ("://" in place or _ADDRESS.match(place) is not None)


def why_not_written(place: str) -> str | None:
    """Why nothing is to be written to a place that somebody has just typed; None: it is a folder, or s3://. A folder
    called `~` or `gs:` would be made where one is, and who looks for it where it says finds nothing."""
    if place.lstrip().startswith("~"):
        return HOME
    if names_no_bucket(place):
        return "names no bucket; an s3:// prefix is s3://BUCKET/PREFIX"
    return "must be an s3:// prefix or a folder" if is_foreign(place) else None


def names_no_bucket(place: str) -> bool:
    """Whether it is on S3, and in no bucket: `s3://`, `s3:///x`."""
    return place.startswith("s3://") and not place.removeprefix("s3://").partition("/")[0].strip()


def why_not_here(path: Path) -> str | None:
    """Why nothing is to be written to a path that somebody has just typed, where only this machine's files and folders
    are meant; None: it is one. As `why_not_written`, which takes s3:// too."""
    text = str(path).strip()
    if text.startswith("~"):
        return HOME
    if _ADDRESS.match(text) or _SCHEME.match(text):
        return "must be a path of this machine, and no address"
    return None if text else "names nothing"


def place_for(name: str, stated: Any) -> str | None:
    """Below the destination that a job states: for one of several jobs that are made of the same file, each of which
    would go on from the checkpoints of the one before it. None: it states none, and each has its own."""
    return f"{stated.rstrip('/')}/{name}" if isinstance(stated, str) and stated else None


def misnamed(name: str) -> str:
    """What is wrong with a step's checkpoint that lies under a name of a step, but not under `name`, its folder's."""
    return f"its folder must be called {name.rpartition('/')[2]} again"


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


def problem_with_sizes(expected: Mapping[str, int], there: Mapping[str, int]) -> str | None:
    """What is wrong with a checkpoint's files by their names and bytes: as the manifest says, and as they are there."""
    for name, size in expected.items():
        if name not in there:
            return f"{name} is missing"
        if there[name] != size:
            return f"{name} has {there[name]} bytes, the manifest says {size}"
    return None


def broken_link(path: Path) -> Path | None:
    """The link, `path` or a folder above it, that leads to what isn't there; None: `path` is there, or simply isn't."""
    for place in (path, *path.parents):
        try:
            place.stat()
        except FileNotFoundError:
            if place.is_symlink():
                return place
        except OSError:  # who lists it says why
            return None
        else:
            return None
    return None


def is_behind(folder: Path, others: Iterable[Path]) -> bool:
    """Whether `folder` is what one of the others, a link, leads to: with its files theirs would go."""
    if folder.is_symlink():
        return False
    place = folder.resolve()
    return any(other.is_symlink() and other.resolve() == place for other in others)
