"""The last word of a rank or a host, told though the disk is full: in room that was kept for it. Imports no torch.

Who starts a job again goes by that word, and a host that is lost while a shared disk is full leaves nothing else.
"""

import os
from contextlib import suppress
from pathlib import Path

from trainyard.kept_room import tell

_LONGEST_LINK = 1000
"""Of characters, in what a link leads to: Linux takes 4095 bytes, and file systems less of them beside the entry."""


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
        path.symlink_to(_plain(line)[:_LONGEST_LINK])


def first_line(path: Path) -> str:
    """What was told there, however; empty where nothing was."""
    try:
        # No path: that would make one slash of two.
        if path.is_symlink():
            return _plain(os.readlink(path))  # noqa: PTH115
        return path.read_text(encoding="utf-8", errors="backslashreplace").splitlines()[0]
    except (OSError, IndexError):
        return ""


def _plain(text: str) -> str:
    """With what is no text (a cut character, a file's name in another encoding) written out."""
    return text.encode(errors="backslashreplace").decode()
