"""The container's first process: the image's entry point, and `train` on its PATH (SageMaker runs `IMAGE train`).

    train              run the job under /opt/ml: `trainer.entrypoint`, whose exit codes and flags these are
    train COMMAND ...  run another command in the same way, as in `docker run IMAGE python -m trainer --job ...`

Nobody says in a CreateTrainingJob request as whom a container runs: the image decides, and SageMaker promises for no
user but root that /opt/ml can be read and written. So the image starts as root, and this process gives the folders
that a job writes to the user `trainer` and becomes that user, before anything of the job is read. Where the user could
not read an input (a file system with owners of its own), it stays root, and says so. Started as another user already,
as on a cluster, it goes on as that one. TRAINYARD_RUN_AS_ROOT=1 stays root in any case.

Imports no torch.
"""

import contextlib
import itertools
import os
import pwd
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.speech import say

USER = "trainer"
WRITTEN = ("output", "output/data", "model", "checkpoints", "trainyard", "tmp")
"""Folders of /opt/ml that a job writes."""
MOST_LOOKED_AT = 2000
"""Inputs whose rights are looked at: enough to find a file system that belongs to others, and quick on a large one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the user, then run the job (or the command, which takes this process's place); the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    opt_ml = Path(os.environ.get("TRAINYARD_OPT_ML", "/opt/ml"))
    say(f"container: {leave_root(opt_ml)}")
    if given and given != ["train"]:
        try:
            os.execvp(given[0], given)
        except OSError as error:
            print(f"container: {given[0]}: {error.strerror}; `train` runs the job", file=sys.stderr)
            return 2
    from trainer import entrypoint

    return entrypoint.main()


def leave_root(opt_ml: Path, user: str = USER) -> str:
    """Become `user` where we are root and it can do the job; in words, what was done and why."""
    if os.geteuid() != 0:
        return f"runs as uid {os.geteuid()}"
    if os.environ.get("TRAINYARD_RUN_AS_ROOT") == "1":
        return "stays root, as TRAINYARD_RUN_AS_ROOT=1 says"
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return f"stays root: there is no user {user} here"
    groups = os.getgroups()
    try:
        _give_folders(opt_ml, account)
        # Devices may be a group's (EFA, GPUs): the groups that the container was started with stay, but root's.
        os.setgroups(sorted({group for group in groups if group} | {account.pw_gid}))
        obstacle = _obstacle(opt_ml, account)
        if obstacle:
            os.setgroups(groups)
            return f"stays root: {user} can't read {obstacle}"
        _lift_locked_memory()
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    except OSError as error:
        return f"stays root: can't become {user}: {error.strerror} ({error.filename or 'the system call'})"
    os.environ.update(HOME=account.pw_dir, USER=user, LOGNAME=user)
    return f"runs as {user} (uid {account.pw_uid})"


def _give_folders(opt_ml: Path, account: pwd.struct_passwd) -> None:
    """What the job writes, to the user; what lies in there stays as it is, and an attempt before left it writable."""
    for folder in (opt_ml, *(opt_ml / name for name in WRITTEN)):
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, account.pw_uid, account.pw_gid)


def _obstacle(opt_ml: Path, account: pwd.struct_passwd) -> Path | None:
    """The first input that the user can't read."""
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        for path in itertools.islice(_inputs(opt_ml / "input"), MOST_LOOKED_AT):
            needed = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
            if not os.access(path, needed, effective_ids=True):
                return path
        return None
    finally:
        os.seteuid(0)
        os.setegid(0)


def _inputs(folder: Path) -> Iterator[Path]:
    """The folder and what lies under it, a level after the other, so that every channel is looked at."""
    level = [folder] if folder.exists() else []
    while level:
        yield from level
        level = [child for path in level if path.is_dir() and os.access(path, os.R_OK) for child in _children(path)]


def _children(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in itertools.islice(entries, MOST_LOOKED_AT)]


def _lift_locked_memory() -> None:
    """EFA and pinned buffers lock memory, which an ordinary user may do up to this limit only."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
