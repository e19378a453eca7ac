"""Slurm's programs: those of this machine, or Debian's packages unpacked into a folder, which needs no root."""

import fcntl
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
CACHE = Path(__file__).resolve().parents[3] / ".trainyard" / "slurm"
COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
DOWNLOAD_SECONDS = 300


class NoSlurm(Exception):
    """Why there is no Slurm to be had here; a test skips with these words."""


@dataclass(frozen=True)
class Programs:
    """Where they are."""

    root: Path
    """`/`, or the folder into which the packages are unpacked."""

    @property
    def libraries(self) -> str:
        """For LD_LIBRARY_PATH."""
        found = (self.root / "usr/lib").glob("*-linux-gnu")
        return os.pathsep.join(str(path) for folder in found for path in (folder, folder / "slurm-wlm"))

    @property
    def plugins(self) -> Path:
        """Slurm's PluginDir."""
        return next((self.root / "usr/lib").glob("*-linux-gnu/slurm-wlm"))

    def daemon(self, name: str) -> str:
        """Path of slurmctld, slurmd, slurmstepd or munged. Unpacking makes none of Debian's links to alternatives."""
        folder = self.root / "usr/sbin"
        return str(next(path for path in (folder / f"{name}-wlm", folder / name) if path.exists()))


def programs() -> Programs:
    """Installed ones, else the unpacked packages, fetched at first use; NoSlurm where neither can be had."""
    if all(Path("/usr/sbin", f"{name}-wlm").exists() for name in ("slurmctld", "slurmd")) and shutil.which("munged"):
        return Programs(Path("/"))
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root = CACHE / "root"
        if not root.exists():
            _unpack(_fetch(CACHE / "packages"), root)
    return Programs(root)


def _fetch(folder: Path) -> list[Path]:
    """The packages and what they need that isn't installed here."""
    if not all(shutil.which(name) for name in ("apt-get", "dpkg-deb")):
        raise NoSlurm("this is no Debian: there is no apt-get")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plan = _run("apt-get", "-s", "install", "--no-install-recommends", "-y", *PACKAGES, folder=folder)
    # "Inst libmunge2 (0.5.15-2 Debian:12 [amd64])"
    wanted = [line.split() for line in plan.splitlines() if line.startswith("Inst ")]
    versions = [f"{words[1]}={next(word for word in words[2:] if word.startswith('('))[1:]}" for words in wanted]
    _run("apt-get", "-q", "download", *versions, folder=folder)
    return sorted(folder.glob("*.deb"))


def _unpack(packages: list[Path], root: Path) -> None:
    draft = root.with_name("root.new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for package in packages:
        _run("dpkg-deb", "-x", str(package), str(draft), folder=draft)
    draft.rename(root)


def _run(*command: str, folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoSlurm(f"`{command[0]}` gave no answer within {DOWNLOAD_SECONDS} s") from None
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise NoSlurm(f"`{' '.join(command[:3])}` failed: {words[-1] if words else done.returncode}")
    return done.stdout
