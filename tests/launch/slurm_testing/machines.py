"""A real Slurm on the loopback interface: a controller, machines, munge; started in seconds, stopped without a rest."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from slurm_testing.programs import COMMANDS, Programs

START_SECONDS = 60.0
NODES = ("node1", "node2")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
PluginDir={plugins}
PlugStackConfig={folder}/plugstack.conf
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
ReturnToService=1
SlurmctldDebug=verbose
SlurmdDebug=info
SlurmctldTimeout=30
# A lost machine is noticed within seconds, as its jobs are to be started again here while somebody waits.
SlurmdTimeout=5
KillWait=20
UnkillableStepTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs=1 RealMemory=512 State=UNKNOWN
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 OverSubscribe=EXCLUSIVE GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 OverSubscribe=EXCLUSIVE PreemptMode=OFF
"""


class SlurmCluster:
    """Two machines and a controller. `bin` goes to the PATH of who uses it."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self._programs = programs
        self.folder = folder
        self.bin = folder / "bin"
        self._configuration = folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.left: list[str] = []
        """Command lines of what its jobs left running when it was stopped."""

    def __enter__(self) -> Self:
        for name in ("bin", "state"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "plugstack.conf").touch()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = free_ports(2 + len(NODES))
        self._configuration.write_text(
            _CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                folder=self.folder,
                user=getpass.getuser(),
                ports=ports,
                plugins=self._programs.plugins,
                nodes=f"node[1-{len(NODES)}]",
                node_ports=f"[{ports[2]}-{ports[-1]}]",
            )
        )
        self._write_commands()
        try:
            self._start_munge()
            self.start_controller("-c")
            for name in NODES:
                self.start_node(name)
            self.wait_until(lambda: self.node_states() == dict.fromkeys(NODES, "idle"), START_SECONDS, "nodes idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError, AssertionError):
            self.command("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full")
            self.command("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._steps():
            time.sleep(0.1)
        for daemon in reversed(list(self._daemons)):
            self._end(daemon)
        # Said, not hidden: what a job left running escaped from Slurm, and is a test's to find.
        self.left = self.leftovers()
        for pid in self._steps():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start_munge(self) -> None:
        folder, where = self.folder, self.folder / "munge"
        self._start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"),
            *(f"--pid-file={where}.pid", f"--log-file={where}.log", f"--seed-file={where}.seed"),
        )
        self.wait_until((folder / "munge.sock").exists, START_SECONDS, "munge's socket")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [self._programs.daemon(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment(),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:/usr/sbin:/usr/bin:/sbin:/bin",
            "LD_LIBRARY_PATH": self._programs.libraries,
            "SLURM_CONF": str(self._configuration),
            "HOME": os.environ.get("HOME", "/"),
        }

    def _write_commands(self) -> None:
        """Slurm's commands, told of their libraries and of this cluster."""
        for name in COMMANDS:
            path = self.bin / name
            real = self._programs.root / "usr/bin" / name
            variables = f"SLURM_CONF={self._configuration} LD_LIBRARY_PATH={self._programs.libraries}"
            path.write_text(f'#!/bin/sh\n{variables} exec {real} "$@"\n')
            path.chmod(0o755)

    def start_controller(self, *options: str) -> None:
        """`-c`: with a clean slate."""
        self._start("slurmctld", "slurmctld", "-D", *options, "-f", str(self._configuration))

    def stop_controller(self) -> None:
        """Jobs go on without it."""
        self._end("slurmctld")

    def start_node(self, name: str) -> None:
        """Switch a machine on."""
        stepd = self._programs.daemon("slurmstepd")
        self._start(name, "slurmd", "-D", "-N", name, "-d", stepd, "-f", str(self._configuration))

    def repair(self) -> None:
        """Start what was stopped or lost, and wait until nobody uses the machines."""
        if "slurmctld" not in self._daemons:
            self.start_controller()
        for name in NODES:
            if name not in self._daemons:
                self.start_node(name)
        self.wait_until(lambda: self.node_states() == dict.fromkeys(NODES, "idle"), START_SECONDS, "nodes idle")

    def lose_node(self, name: str) -> None:
        """As when a machine goes for good: its daemon, everything that ran on it, and its disk."""
        self._end(name, signal.SIGKILL)
        for pid in self._steps(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # One that came back with it would find its jobs' scripts there, and Slurm would hold them ("File exists").
        shutil.rmtree(self.folder / f"spool-{name}", ignore_errors=True)

    def _end(self, daemon: str, number: signal.Signals = signal.SIGTERM) -> None:
        process = self._daemons.pop(daemon)
        process.send_signal(number)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _steps(self, node: str | None = None) -> list[int]:
        """Processes of this cluster's jobs, on one machine or all: slurmstepd's and what they started."""
        mine = f"SLURM_CONF={self._configuration}".encode()
        on = f"SLURMD_NODENAME={node}".encode() if node else b""
        daemons = {process.pid for process in self._daemons.values()}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            pid = int(path.parent.name)
            with suppress(OSError):
                environment = path.read_bytes().split(b"\0")
                is_job = any(entry.startswith(b"SLURM_JOB_ID=") for entry in environment)
                title = (path.parent / "cmdline").read_bytes()
                is_step = title.startswith((b"slurmstepd", self._programs.daemon("slurmstepd").encode()))
                if mine not in environment or pid in daemons or not (is_job or is_step):
                    continue
                if node is None or on in environment or (is_step and self._node_of(pid) == node):
                    found.append(pid)
        return found

    def kill_script(self, slurm_id: str) -> None:
        """The batch script of a job, as when its machine runs out of memory."""
        for pid in self._steps():
            with suppress(OSError):
                if f"job{int(slurm_id):05}/slurm_script".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """Command lines of what still runs of its jobs."""
        found = []
        for pid in self._steps():
            with suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def _node_of(self, pid: int) -> str:
        """Of a slurmstepd, whose environment names none: by the spool folder that it has open."""
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(link.readlink())
                    for name in NODES:
                        if f"spool-{name}/" in target or target.endswith(f"slurmd-{name}.log"):
                            return name
        return ""

    def command(self, name: str, *arguments: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            [str(self.bin / name), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{name} {' '.join(arguments)}: {done.stderr or done.stdout}"
        return done.stdout

    def node_states(self) -> Mapping[str, str]:
        """Machine to Slurm's word for it."""
        try:
            lines = self.command("sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=train").splitlines()
        except AssertionError:
            return {}
        return dict(line.split() for line in lines)

    def wait_until(self, is_so: Callable[[], object], seconds: float, what: str) -> None:
        """Return when it is; fail with the daemons' last words otherwise."""
        deadline = time.monotonic() + seconds
        while not is_so():
            dead = [name for name, process in self._daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise AssertionError(f"waited for: {what}; ended: {dead}; {self._words()}")
            time.sleep(0.05)

    def _words(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "; ".join(f"{log.name}: {log.read_text(errors='replace')[-600:]}" for log in logs)

    def remove(self) -> None:
        """Take its files away."""
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """So many in a row, below those that the system gives to outgoing connections."""
    import random

    draw = random.SystemRandom()
    while True:
        first = draw.randrange(12_000, 30_000)
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        else:
            return list(range(first, first + count))
        finally:
            for probe in sockets:
                probe.close()
