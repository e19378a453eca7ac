"""One job at a time saves to a folder: a lock that the kernel takes back when its holder dies. No torch.

Two jobs at one destination would go on from each other's steps, and each remove what the other one writes.
"""

import errno
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.heartbeat import beat
from trainyard.errors import InputError, JobFailedError
from trainyard.spec.checkpoint_names import CLAIM_OUTPUT, MOST_CLAIM_BYTES

CLAIM_FILE = ".in_use"
_OWN_SECONDS = 60.0
"""A start of this very job may still be on its way out, on a machine that was lost: its file system takes so long."""
_OTHER_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_TAKEN = (errno.EACCES, errno.EAGAIN)
_AS_IT_LIES = os.O_NOFOLLOW | os.O_NONBLOCK
"""Not what a link names, which may be a file of this user's that somebody else wants changed; nor wait for a pipe."""
_NUM_TRIES = 5
"""Of taking a file that others replace meanwhile."""


@dataclass(frozen=True)
class Claimant:
    """Who wants a folder."""

    name: str
    """What the file says of it."""
    tells_starts: bool
    """Whether all that bear the name, and have the same output, are starts of one job, of which this one is the
    newest."""
    output: str = ""
    """Where its output lies: a job whose folder was copied is there twice under one name. Empty: nobody says."""


def claimant_of(environment: Mapping[str, str], output_dir: Path | None = None) -> Claimant:
    """By TRAINYARD_JOB_ID; without one by Slurm's number, which tells starts apart only once Slurm has requeued the
    job: within one allocation two jobs may be started by hand."""
    if job := environment.get("TRAINYARD_JOB_ID"):
        output = "" if output_dir is None else os.path.realpath(output_dir)
        return Claimant(job, tells_starts=True, output=output)
    if number := environment.get("SLURM_JOB_ID"):
        is_requeued = environment.get("SLURM_RESTART_COUNT", "0") != "0"
        return Claimant(f"Slurm's job {number}", tells_starts=is_requeued)
    return Claimant("a job", tells_starts=False)


class Claim:
    """What one process holds; `close`, or its end, lets go."""

    def __init__(
        self,
        folder: Path,
        *,
        claimant: Claimant,
        report: Callable[[str], None],
        own_seconds: float = _OWN_SECONDS,
        other_seconds: float = _OTHER_SECONDS,
    ) -> None:
        """InputError where another job saves to `folder`; JobFailedError where it may be an earlier start of this one:
        another start may find it gone.

        A file system that knows no locks, or can't be written, costs nothing here: who saves will say so.
        """
        self._path = folder / CLAIM_FILE
        self._descriptor: int | None = None
        self._is_writable = False
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._open()
        began, is_told = time.monotonic(), False
        while (holder := self._taken()) is not None:
            is_namesake = claimant.tells_starts and holder.startswith(f"{claimant.name} ")
            # Of one job that was copied the two may run at once.
            is_own = is_namesake and holder.partition(CLAIM_OUTPUT)[2] in ("", _as_read(claimant.output))
            is_another = claimant.tells_starts and not is_namesake
            if time.monotonic() - began > (other_seconds if is_another else own_seconds):
                if is_own:  # a start must not be lost to one that can't end
                    report(f"warning: {folder}: {holder} has not let go of it; this start goes on")
                    return
                self.close()
                kind = InputError if is_another else JobFailedError
                who = holder.partition(CLAIM_OUTPUT)[0] if is_another else holder
                raise kind(
                    f"checkpoint.destination {folder}: {who} saves there, and two jobs would overwrite each other's"
                    " checkpoints: wait for its end, stop it, or name another folder"
                )
            if not is_another and not is_told and time.monotonic() - began > other_seconds:
                is_told = True
                report(f"{folder}: {holder} saves there; this start waits up to {own_seconds:g} s for its end")
            beat()
            time.sleep(_LOOK_SECONDS)
        self._sign(claimant)

    def _open(self) -> None:
        """The file, as far as this user may: another user's, in a folder that both save to, for reading alone."""
        self.close()
        with suppress(OSError):
            try:
                self._descriptor = os.open(self._path, os.O_RDWR | _AS_IT_LIES)
            except FileNotFoundError:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | _AS_IT_LIES, 0o666)
            except PermissionError:
                if os.access(self._path.parent, os.W_OK):  # else nothing is saved there
                    self._descriptor, self._is_writable = os.open(self._path, os.O_RDONLY | _AS_IT_LIES), False
                return
            found = os.fstat(self._descriptor)
            # What has another name as well may be anybody's: it is replaced, not written to.
            self._is_writable = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
            if self._is_writable and found.st_uid == os.geteuid():
                self._admit_others(self._descriptor)

    def _admit_others(self, descriptor: int) -> None:
        """Whoever may write to the folder may have the file, whatever this user's umask and group are."""
        with suppress(OSError):
            folder = self._path.parent.stat()
            mode = folder.st_mode & 0o666
            try:
                os.fchown(descriptor, -1, folder.st_gid)
            except OSError:  # not this user's group: its members are others to the file
                mode |= (mode & 0o060) >> 3
            os.fchmod(descriptor, mode)

    def _taken(self) -> str | None:
        """Who has it; None once this process has, or where nobody can."""
        for _ in range(_NUM_TRIES):
            holder = self._holder()
            if holder is not None or self._descriptor is None:
                return holder
            if self._is_writable and self._is_there():
                return None
            if not self._is_writable:  # of another user whose process has ended, and who alone may write to it
                try:
                    if self._is_there():
                        self._remove()
                except OSError:  # nor may it go: then it keeps nobody out
                    self.close()
                    return None
            self._open()
        return None

    def _remove(self) -> None:
        """The file at hand, and no other: one that somebody else has put in its place meanwhile is theirs. OSError."""
        assert self._descriptor is not None
        aside = self._path.with_name(f"{CLAIM_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        self._path.rename(aside)
        if not os.path.samestat(aside.lstat(), os.fstat(self._descriptor)):
            try:
                os.link(aside, self._path, follow_symlinks=False)
            except FileExistsError:  # who missed theirs has made another
                pass
            except OSError:  # a file system that knows no links
                aside.rename(self._path)
                return
        aside.unlink()

    def _is_there(self) -> bool:
        """Whether the file at hand is still the folder's: who found nobody's may have replaced it."""
        assert self._descriptor is not None
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # nobody can say
            return True

    def _holder(self) -> str | None:
        """Who has the file at hand; None once this process has, or where there are no locks."""
        if self._descriptor is None:
            return None
        kind = fcntl.LOCK_EX if self._is_writable else fcntl.LOCK_SH  # which shows one who has it alone as well
        try:
            # Of the process: children that it forks don't keep it.
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                words = os.pread(self._descriptor, MOST_CLAIM_BYTES, 0).decode(errors="replace").partition("\n")[0]
                return words or "another process"
        return None

    def _sign(self, claimant: Claimant) -> None:
        if self._descriptor is None or not self._is_writable:
            return
        with suppress(OSError):  # a full disk costs the name
            os.ftruncate(self._descriptor, 0)
            output = f"{CLAIM_OUTPUT}{claimant.output}" if claimant.output else ""
            line = f"{claimant.name} on {socket.gethostname()}, process {os.getpid()}{output}\n"
            os.pwrite(self._descriptor, os.fsencode(line), 0)

    def close(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _as_read(path: str) -> str:
    """As a claim's first line tells it."""
    return os.fsencode(path).decode(errors="replace").partition("\n")[0]
