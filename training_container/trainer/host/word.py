"""The last word of a rank or a host, told though the disk is full: in room that was kept for it. Imports no torch.

Who starts a job again goes by that word, and a host that is lost while a shared disk is full leaves nothing else.
"""

import os
from contextlib import suppress
from pathlib import Path

ROOM_BYTES = 16 << 10
"""More than most reasons and the end of what a rank said take."""
_LONGEST_LINK = 1000
"""Of characters, in what a link leads to: Linux takes 4095 bytes, and file systems less of them beside the entry."""


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
    content = text.encode()
    descriptor = os.open(room, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        os.ftruncate(descriptor, written)
    finally:
        os.close(descriptor)
    room.replace(path)


def tell_somehow(path: Path, line: str, more: str, room: Path) -> None:
    """Make `path` a file of the line and what follows it, or of the line alone, or at least a link that leads to it.

    The link is for file systems that write elsewhere what is written over (ZFS, under FSx for Lustre), where the room
    may take nothing: names are kept apart there from what files hold. `first_line` reads both, as
    do Slurm's script and the supervisor of a local job.
    """
    for text in (f"{line}\n{more}", f"{line}\n"):
        with suppress(OSError):
            tell(path, text, room)
            return
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.symlink_to(line[:_LONGEST_LINK])


def first_line(path: Path) -> str:
    """What was told there, however; empty where nothing was."""
    try:
        # No path: that would make one slash of two.
        return os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8").splitlines()[0]  # noqa: PTH115
    except (OSError, IndexError):
        return ""
