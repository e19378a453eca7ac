"""One job at a time saves to a folder: a lock that the kernel takes back when its holder dies. No torch.

Two jobs at one destination would go on from each other's steps, and each remove what the other one writes.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.heartbeat import beat
from trainyard.errors import InputError

CLAIM_FILE = ".in_use"
_OWN_SECONDS = 60.0
"""A start of this very job may still be on its way out, on a machine that was lost: its file system takes so long."""
_OTHER_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_TAKEN = (errno.EACCES, errno.EAGAIN)


class Claim:
    """What one process holds; `close`, or its end, lets go."""

    def __init__(
        self,
        folder: Path,
        *,
        job: str,
        report: Callable[[str], None],
        own_seconds: float = _OWN_SECONDS,
        other_seconds: float = _OTHER_SECONDS,
    ) -> None:
        """`job`: its id, empty where it has none. InputError where another job saves to `folder`.

        A file system that knows no locks, or can't be written, costs nothing here: who saves will say so.
        """
        self._descriptor: int | None = None
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / CLAIM_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        if self._descriptor is None:
            return
        began = time.monotonic()
        while (holder := self._holder()) is not None:
            is_own = bool(job) and holder.startswith(f"{job} ")
            if time.monotonic() - began > (own_seconds if is_own else other_seconds):
                if is_own:  # a start must not be lost to one that can't end
                    report(f"warning: {folder}: {holder} has not let go of it; this start goes on")
                    return
                self.close()
                raise InputError(
                    f"checkpoint.destination {folder}: {holder} saves there, and two jobs would overwrite each other's"
                    " checkpoints: wait for its end, stop it, or name another folder"
                )
            beat()
            time.sleep(_LOOK_SECONDS)
        self._sign(job)

    def _holder(self) -> str | None:
        """Who has it; None once this process has, or where there are no locks."""
        assert self._descriptor is not None
        try:
            # Of the process: children that it forks don't keep it.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                words = os.pread(self._descriptor, 400, 0).decode(errors="replace").partition("\n")[0]
                return words or "another process"
        return None

    def _sign(self, job: str) -> None:
        assert self._descriptor is not None
        with suppress(OSError):  # a full disk costs the name
            os.ftruncate(self._descriptor, 0)
            line = f"{job or 'a job'} on {socket.gethostname()}, process {os.getpid()}\n"
            os.pwrite(self._descriptor, line.encode(), 0)

    def close(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
