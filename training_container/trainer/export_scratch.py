"""The folder beside an export's target in which it is written, and what dead exports left there. Imports no torch."""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainyard.errors import InputError

MARK = "trainyard-export"
"""In a scratch folder: who holds its lock writes there, on the host that it names."""


@contextlib.contextmanager
def scratch_beside(to: Path) -> Iterator[Path]:
    """Scratch beside the folder `to`, gone afterwards; InputError where that can't be one, before anything is read."""
    try:
        to = to.resolve()
        there = next(place for place in (to, *to.parents) if place.exists())
        if not there.is_dir():
            raise InputError(f"--to {to}: {'' if there == to else f'{there} '}is no folder; give a new folder")
        if there == to and any(to.iterdir()):
            raise InputError(f"--to {to}: is not empty; give a new folder")
        if to == Path.cwd():
            raise InputError(f"--to {to}: is the folder that this runs in, which can't be replaced; give a new folder")
        to.parent.mkdir(parents=True, exist_ok=True)
        remove_left(to)
        folder = tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent)
    except OSError as error:
        raise InputError(f"--to {to}: can't be written: {error.strerror or error}; give another folder") from None
    with folder as path, marked(Path(path)):
        yield Path(path)


@contextlib.contextmanager
def marked(scratch: Path) -> Iterator[None]:
    """While this lasts nobody takes the folder for a dead export's. Without locks it has no mark, and is left alone."""
    with (scratch / f"{MARK}.new").open("w", encoding="utf-8") as mark:
        with contextlib.suppress(OSError):
            # Under its name it is locked from the first instant.
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mark.write(socket.gethostname())
            mark.flush()
            Path(mark.name).rename(scratch / MARK)
        yield


def remove_left(to: Path) -> None:
    """Remove what exports beside `to` left that were killed: the mark says that they are exports', its lock that
    nobody writes there. Those of another host stay: a shared file system may not tell of its locks."""
    for scratch in to.parent.iterdir():
        if not scratch.name.startswith(f".{to.name}-") or scratch.is_symlink() or not (scratch / MARK).is_file():
            continue
        with contextlib.suppress(OSError), (scratch / MARK).open("r+", encoding="utf-8") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if mark.read() == socket.gethostname() and os.fstat(mark.fileno()).st_uid == os.getuid():
                shutil.rmtree(scratch)
