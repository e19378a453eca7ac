"""Files on disks that may be full: written over room that was kept for them, or whole or not at all. Standard library
alone.

The container's hosts and ranks keep room for their last word so, and the supervisor of a local job for its outcome.
"""

import errno
import os
from contextlib import suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What writing says where a disk, or somebody's share of it, is full."""
ROOM_BYTES = 16 << 10
"""More than most reasons and the end of what a rank said take."""


def keep_room(room: Path) -> None:
    """Make `room` a file that a word will be written over; without it, a word takes its chance."""
    with suppress(OSError):
        room.parent.mkdir(parents=True, exist_ok=True)
        if not room.exists() or room.stat().st_size < ROOM_BYTES:  # a start's that was killed will do
            # No zeros: there are file systems that keep none of these.
            room.write_bytes(os.urandom(ROOM_BYTES))


def tell(path: Path, text: str, room: Path) -> None:
    """Make `path` a file of `text`, whole or not at all, by writing over `room`; OSError where that can't be done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reason may name what is no text: a file's name in another encoding, half a character of somebody's JSON.
    content = text.encode(errors="backslashreplace")
    descriptor = os.open(room, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        os.ftruncate(descriptor, written)
    finally:
        os.close(descriptor)
    room.replace(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Make `path` a file of `content`, or leave it as it was, and nothing beside it; OSError where that can't be done.

    One writer at a time: what it writes first lies at `<name>.new`.
    """
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except BaseException:  # a full disk, which half a file fills further, and Ctrl-C
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
