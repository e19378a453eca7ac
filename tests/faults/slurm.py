"""Jobs of a real Slurm with two machines: it requeues, preempts, loses machines and cancels, and its limits come."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from desk import resumed
from evidence import read_jsonl
from sites import environment_of, fill_disk, full_disk, left_behind, mount_disk, unmount_disk
from slurm_testing.machines import NODES, SlurmCluster, free_ports
from slurm_testing.programs import NoSlurm, programs
from trainer_testing.faulty_entrypoint import FOLDER_VARIABLE

from trainyard.errors import TrainyardError
from trainyard.launch import watch
from trainyard.launch.cluster import here_backend, launch_on_slurm_here
from trainyard.launch.record import FolderRecordStore
from trainyard.spec.job import load_job

MOST_RESUMES = 20
"""Requeues that the job counts: lost machines, time limits, signals."""
_LOOK_SECONDS = 0.5
"""Between two looks at the job's state: each starts several of Slurm's commands."""
_ANSWER_SECONDS = 120.0
"""How long Slurm may take to do what it was asked for: it looks at time limits every half minute."""
_LIMIT_MINUTES = 60
_LEAD_MINUTES = 3
"""So long before its limit the job is signalled (trainyard.launch.slurm_script.SAVE_SECONDS)."""
_PYTHON = """#!/bin/sh
{exports}
shift 3
exec {python} -u -m trainer_testing.faulty_slurm "$@"
"""
"""In the interpreter's place, which the job's script calls with `-u -m trainer.slurm COMMAND DIRECTORY`."""


def why_no_slurm() -> str:
    """Why there is none here, in a line; empty: there is."""
    try:
        programs()
    except NoSlurm as why:
        return str(why)
    return ""


class Slurm:
    """One cluster for a campaign; its commands are on the PATH meanwhile."""

    def __init__(self) -> None:
        # A short path: munge's socket has a name of 107 characters at most.
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.cluster = SlurmCluster(programs(), self._folder / "c")
        self._path = os.environ["PATH"]
        self.cluster.__enter__()
        os.environ["PATH"] = f"{self.cluster.bin}:{self._path}"

    def close(self) -> None:
        """End it and all that runs on it."""
        os.environ["PATH"] = self._path
        self.cluster.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)


class SlurmSite:
    """One job of `trainyard launch --backend slurm`, on both machines; the script that Slurm runs is the real one.

    Slurm and the script start it again; where they leave it ended (cancelled, its script killed), people resume it.
    """

    s3: Any = None

    def __init__(
        self,
        slurm: Slurm,
        root: Path,
        job: Path,
        overrides: Sequence[str],
        *,
        recover: bool,
        disk: bool,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`recover`: whether Slurm may requeue the job. `disk`: its folder on a file system that can be filled.

        `variables`: for the environment of its tasks.
        """
        self.root = root
        self._cluster = slurm.cluster
        self._recover = recover
        self._folder = root / "jobs"
        self._folder.mkdir(parents=True)
        self._has_disk = disk
        if disk:
            mount_disk(self._folder)
        self._store = FolderRecordStore(self._folder)
        self._backend = here_backend(self._folder)
        own = ("backend=slurm", f"instance_count={len(NODES)}", f"slurm.python={self._write_python(variables or {})}")
        compute = [f"compute.{change}" for change in (*own, f"max_hours={_LIMIT_MINUTES / 60:g}")]
        resumes = f"recovery.max_resumes={MOST_RESUMES if recover else 0}"
        self._spec = load_job(job, [*overrides, *compute, resumes])
        self._job_id = ""
        self._resumes = 1
        self._is_to_be_resumed = False
        """By a person: it was cancelled, or its script killed. After anything else it comes back by itself."""
        self._ended = ""
        self._looked_at = 0.0
        self.reasons: list[str] = []

    def _write_python(self, variables: Mapping[str, str]) -> Path:
        """What the job takes for an interpreter: nothing of ours is in the environment of a job of Slurm's."""
        temporary = self.root / "tmp"
        temporary.mkdir()
        settings = environment_of(self.root / "faults", variables)
        del settings["TRAINYARD_SKIP_EFA_CHECK"], settings["PATH"]  # the script's own
        settings |= {"TMPDIR": str(temporary), "TRAINYARD_RENDEZVOUS_PORT": str(free_ports(2)[0])}
        exports = "\n".join(f"export {name}='{value}'" for name, value in settings.items())
        path = self.root / "python"
        path.write_text(_PYTHON.format(exports=exports, python=sys.executable))
        path.chmod(0o755)
        return path

    @property
    def destination(self) -> str:
        """The job's folder, once it has one."""
        return str(self._folder / self._job_id) if self._job_id else str(self.root / "nowhere")

    @property
    def lines(self) -> list[str]:
        logs = sorted(Path(self.destination, "log").glob("*.txt"))
        return [f"{log.stem} {line}" for log in logs for line in log.read_text(errors="replace").splitlines()]

    @property
    def _slurm_id(self) -> str:
        return Path(self.destination, "submitted").read_text().split("id=")[1].strip()

    def start(self) -> None:
        if self._job_id:
            if not self._is_to_be_resumed:
                self.reasons.append(f"a person had to resume it, as Slurm did not: {self._ended}")
            self.reasons += resumed(self._folder, self._job_id, "slurm", times=self._resumes)
            self._resumes, self._is_to_be_resumed = 1, False
        else:
            self._job_id = launch_on_slurm_here(self._spec, self._folder).job_id
        if not self._recover:
            self._cluster.command("scontrol", "update", f"JobId={self._slurm_id}", "Requeue=0")

    def outcome(self) -> str | None:
        if time.monotonic() < self._looked_at + _LOOK_SECONDS:
            return None
        self._looked_at = time.monotonic()
        try:
            current = watch.status(self._store, self._backend, self._job_id)
        except TrainyardError:  # a controller that is down has no word on the job
            return None
        if not current.finished:
            return None
        note = current.observation.note if current.observation else ""
        failure = current.record.attempt.failure
        self._ended = f"{current.state}: {failure or note}"
        return "done" if current.state == "Completed" else self._ended

    def act(self, kind: str, draw: random.Random) -> bool:
        if kind == "disk_full":
            return fill_disk(self._folder, self._told, draw.uniform(1.0, 2.5), self.root / "faults")
        if kind == "controller_lost":
            self._cluster.stop_controller()
            time.sleep(draw.uniform(0.5, 3.0))
            self._cluster.start_controller()
            self._wait(self._job_now, "the controller answers again")
            return True
        slurm_id, starts, is_met = self._slurm_id, self._num_starts(), True
        node = draw.choice(NODES)
        if kind.startswith("kill_host"):
            self._kill_host(node, is_disk_full=kind == "kill_host_disk_full")
        elif kind == "freeze_host":
            _signal(_below(self._task(node)), signal.SIGSTOP)
        elif kind == "node_lost":
            self._cluster.lose_node(node)
            self._wait(lambda: "down" in self._cluster.node_states().get(node, ""), f"{node} is found to be lost")
            self._cluster.start_node(node)
        elif kind == "requeue":
            is_met = self._told_of(slurm_id, "scontrol", "requeue")
        elif kind == "preempted":
            self._preempt()
        elif kind == "time_limit":
            is_met = self._let_the_limit_come(slurm_id, starts)
        elif kind == "scancel_signal":
            # Not --full, which ends srun, and that kills its tasks at once.
            to = draw.choice((["--batch"], []))
            is_met = self._told_of(slurm_id, "scancel", "--signal=TERM", *to)
        elif kind == "scancel":
            self._is_to_be_resumed = True
            self._cluster.command("scancel", slurm_id)
        elif kind in ("kill_launcher", "two_launchers"):
            self._resumes, self._is_to_be_resumed = (2 if kind == "two_launchers" else 1), True
            self._cluster.kill_script(slurm_id)
        else:
            raise AssertionError(kind)
        self._wait(lambda: self._num_starts() > starts or self._has_ended(slurm_id), f"{kind} ends this start")
        return is_met

    def _kill_host(self, node: str, *, is_disk_full: bool) -> None:
        with full_disk(self._folder) if is_disk_full else nullcontext():
            _signal([self._task(node)], signal.SIGKILL)
            if is_disk_full:
                self._wait(lambda: not self._processes(), "the other host has told of the lost one, and ended")
                time.sleep(_LOOK_SECONDS)

    def _preempt(self) -> None:
        """By a job that takes both machines for a moment."""
        arguments = ("--partition=urgent", f"--nodes={len(NODES)}", "--output=/dev/null", "--parsable")
        urgent = self._cluster.command("sbatch", *arguments, "--wrap", "sleep 1").strip()
        self._wait(lambda: not self._cluster.command("squeue", "--noheader", f"--jobs={urgent}"), "the urgent job")

    def _let_the_limit_come(self, slurm_id: str, starts: int) -> bool:
        """The limit is moved to where the job's signal is due, and back when the job waits for its next start.

        False where the job had just been ended by another fault, so that it has no limit any more.
        """
        ran = self._job_now().get("RunTime", "00:00:00").rpartition("-")[2].split(":")
        minutes = 60 * int(ran[0]) + int(ran[1]) + _LEAD_MINUTES
        try:
            self._cluster.command("scontrol", "update", f"JobId={slurm_id}", f"TimeLimit={minutes}")
        except AssertionError as error:
            if "already finished" in str(error):
                return False
            raise
        self._wait(
            lambda: self._job_now().get("JobState") not in ("RUNNING", "COMPLETING") or self._num_starts() > starts,
            "the limit's signal",
        )
        with suppress(AssertionError):  # another fault may have ended it meanwhile
            self._cluster.command("scontrol", "update", f"JobId={slurm_id}", f"TimeLimit={_LIMIT_MINUTES}")
        return True

    def _told_of(self, slurm_id: str, *command: str) -> bool:
        """Whether Slurm took the command for the job; False where another fault had just ended it."""
        try:
            self._cluster.command(*command, slurm_id)
        except AssertionError:
            if slurm_id != self._slurm_id or self._has_ended(slurm_id):
                return False
            raise
        return True

    def _job_now(self) -> dict[str, str]:
        """What Slurm says of the job; empty where it says nothing."""
        with suppress(AssertionError):
            words = self._cluster.command("scontrol", "--oneliner", "show", "job", self._slurm_id).split()
            return dict(pair for word in words if len(pair := tuple(word.split("=", 1))) == 2)
        return {}

    def _has_ended(self, slurm_id: str) -> bool:
        """Whether Slurm is done with it: it will not start it again."""
        return slurm_id == self._slurm_id and self._job_now().get("JobState") in (
            *("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY"),
        )

    def _num_starts(self) -> int:
        """How often the job's script has told of a start."""
        events = Path(self.destination, "events")
        return events.read_text().count("\tTraining\t") if events.exists() else 0

    def _wait(self, is_so: Any, what: str) -> None:
        until = time.monotonic() + _ANSWER_SECONDS
        while not is_so():
            if time.monotonic() > until:
                raise TimeoutError(f"waited {_ANSWER_SECONDS:.0f} s: {what}")
            time.sleep(0.2)

    def _task(self, node: str) -> int:
        """The process that Slurm started on a machine; what that one forked has its name and environment too."""
        own = {f"{FOLDER_VARIABLE}={self.root / 'faults'}".encode(), f"SLURMD_NODENAME={node}".encode()}
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until:
            found = {pid for pid in _pids() if own <= _variables(pid) and b"faulty_slurm" in _command(pid)}
            first = [pid for pid in found if _parent(pid) not in found]
            if first:
                return first[0]
            time.sleep(0.1)
        raise TimeoutError(f"no task of the job on {node}")

    def _processes(self) -> list[int]:
        mine = f"{FOLDER_VARIABLE}={self.root / 'faults'}".encode()
        return [pid for pid in _pids() if mine in _variables(pid) and pid != os.getpid()]

    def _told(self) -> list[str]:
        """What the first rank said; not by its logs, which lie on the disk that is full."""
        return [row["line"] for row in read_jsonl(self.root / "faults/events.jsonl") if "line" in row]

    def leftovers(self) -> list[str]:
        until = time.monotonic() + 30
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.1)
        problems = [f"left running: {pid} {_command(pid).decode()}" for pid in left]
        # What torch keeps there of compiled code is for all jobs.
        kept = {path for path in (self.root / "tmp").iterdir() if not path.name.startswith("torchinductor_")}
        problems += [f"left behind on a machine's disk: {path}" for path in sorted(kept)]
        return problems + left_behind(Path(self.destination)) + self.reasons

    def goodput(self) -> None:
        return None

    def close(self) -> None:
        with suppress(AssertionError, OSError, IndexError):
            self._cluster.command("scancel", self._slurm_id)
        _signal(self._processes(), signal.SIGKILL)
        self._cluster.repair()
        if self._has_disk:
            unmount_disk(self._folder)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _variables(pid: int) -> set[bytes]:
    with suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return set()


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return b""


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _below(pid: int) -> list[int]:
    """It and all that it started, itself first."""
    children = [child for child in _pids() if _parent(child) == pid]
    return [pid, *(one for child in children for one in _below(child))]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
