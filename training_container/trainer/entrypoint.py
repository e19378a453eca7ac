"""What a SageMaker training container runs: from /opt/ml to `torchrun -m trainer`, and from its end to /opt/ml/output.

    python -m trainer.entrypoint

Reads `input/config/resourceconfig.json` (who and where we are) and the channel `job` (`resolved_job.json`, and
`channels.json`: URI -> channel). Starts the ranks of this host, tells them of SIGTERM and SIGUSR1, and reports.

A rank that dies or stands still stops the others, on every host, and all are started again from the newest checkpoint,
within what the job's `recovery` allows. What happened is a line each on stdout, and in `output/data/recovery.jsonl`.

Exit codes: 0 done; 75 "saved, resume me" (also a file `output/resume_me`); 2 the job's input is wrong; 1 failed. The
reason of a failure is in `output/failure`: one line, then the end of what the failing rank said.

Imports no torch, so that it can tell of a broken one.

Flags in the environment, for tests and the emulator, absent on SageMaker:
- TRAINYARD_OPT_ML: the tree's root instead of /opt/ml.
- TRAINYARD_HOST_ADDRESSES: JSON, host name -> address, instead of asking DNS.
- TRAINYARD_RENDEZVOUS_PORT: port of the first host at which the ranks meet (29500); on the next one the hosts agree.
- TRAINYARD_PROCESSES_PER_HOST: ranks on each host, where it is not what the job was resolved for.
- TRAINYARD_SKIP_EFA_CHECK=1: don't look for EFA devices.
- TRAINYARD_STOP_GRACE_SECONDS: how long the ranks have after SIGTERM (110 of SageMaker's 120 s).
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.host.hosts import Hosts, Judge, ManyHosts, OneHost
from trainer.host.rank import RESUME_EXIT_CODE, STOP_FILE, RankReport, read_reports
from trainer.host.recovery import Ending, RecoveryLog, RestartPolicy
from trainer.host.watch import StepWatch, innermost, is_stopped, take_stacks
from trainer.speech import say
from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.spec.base import parse
from trainyard.spec.job import DataSource, ResolvedJob

DEFAULT_PORT = 29500
DEFAULT_GRACE_SECONDS = 110.0
"""SageMaker kills 120 s after SIGTERM; the rest is for the report."""
RESOLVE_SECONDS = 600.0
"""How long a host's name may take to appear in DNS: hosts of one job don't start together."""

_TAIL_LINES = 300
_POLL_SECONDS = 0.2
_SURVIVOR_SECONDS = 5.0
"""How long ranks may take to find out that another one is dead, and leave by themselves."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PEER_LOSS = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|timed out|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
"""What a rank says when another one is gone: a consequence, not the cause."""
_PEER_MISSED = re.compile(r"did not arrive within|can't reach the first host|could not connect to each other")
"""The same, in the words of `trainer.rendezvous`."""
_TORCHRUN_FAILURE = re.compile(r"rank\s+:\s+(\d+) \(local_rank: \d+\)\s+exitcode\s+:\s+(-?\d+)")


@dataclass(frozen=True)
class Place:
    """This host among the job's hosts, as resourceconfig.json has it."""

    host: str
    hosts: tuple[str, ...]
    """In numeric order: algo-2 before algo-10, which SageMaker's own order is not."""
    interface: str
    instance_type: str

    @property
    def index(self) -> int:
        """0 for the first host, where the ranks meet."""
        return self.hosts.index(self.host)


def main(environment: Mapping[str, str] | None = None, module: str = "trainer") -> int:
    """Run the job's share of this host; the exit code. `module`: what every rank runs."""
    settings = dict(os.environ if environment is None else environment)
    opt_ml = Path(settings.get("TRAINYARD_OPT_ML", "/opt/ml"))
    output = opt_ml / "output"
    try:
        place = read_place(opt_ml)
        job = read_job(opt_ml, place, settings)
        if len(place.hosts) > 1 and settings.get("TRAINYARD_SKIP_EFA_CHECK") != "1":
            check_efa(place.instance_type)
        address = first_address(place, settings)
        hosts = join_hosts(place, job, address, settings)
        try:
            return finish(HostRun(opt_ml, place, job, address, settings, module).run(hosts), output)
        finally:
            hosts.close()
    except TrainyardError as error:
        return finish(Ending(error.exit_code, str(error)), output)


def read_place(opt_ml: Path) -> Place:
    """This host's place from resourceconfig.json."""
    path = opt_ml / "input/config/resourceconfig.json"
    content = _read_json(path)
    try:
        hosts = sorted((str(host) for host in content["hosts"]), key=_numeric_order)
        place = Place(
            host=str(content["current_host"]),
            hosts=tuple(hosts),
            interface=str(content.get("network_interface_name", "")),
            instance_type=str(content.get("current_instance_type", "")),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: has no usable {error}; SageMaker writes current_host and hosts") from None
    if place.host not in place.hosts:
        raise InputError(f"{path}: current_host {place.host} is not among hosts {', '.join(place.hosts)}")
    return place


def _numeric_order(host: str) -> tuple[Any, ...]:
    """Digits compare as numbers, so that algo-10 comes after algo-2."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host))


def read_job(opt_ml: Path, place: Place, settings: Mapping[str, str]) -> ResolvedJob:
    """The job from its channel, its paths turned to local ones, laid out for the hosts that are really here."""
    channel = opt_ml / "input/data/job"
    path = channel / "resolved_job.json"
    job = parse(ResolvedJob, _read_json(path), str(path))
    channels = _read_json(channel / "channels.json")
    per_host = int(settings.get("TRAINYARD_PROCESSES_PER_HOST", job.processes_per_host))
    world_size = len(place.hosts) * per_host
    if world_size != job.world_size:
        from trainyard.planner import resolve

        say(f"entrypoint: {world_size} ranks instead of {job.world_size}: laying the job out anew")
        job = resolve(job.spec, world_size=world_size)
    if (job.num_hosts, job.processes_per_host) != (len(place.hosts), per_host):
        job = job.model_copy(update={"num_hosts": len(place.hosts), "processes_per_host": per_host})
    return _with_local_paths(job, channels, opt_ml / "input/data")


def _with_local_paths(job: ResolvedJob, channels: Mapping[str, Any], inputs: Path) -> ResolvedJob:
    def local(uri: str) -> str:
        name = channels.get(uri)
        if name is None:
            if "://" in uri:
                raise InputError(
                    f"{uri}: no input channel brings it (channels.json has: {', '.join(channels) or 'none'})"
                )
            return uri
        folder = inputs / str(name)
        if not folder.is_dir():
            raise InputError(f"{uri}: its channel {name} is not at {folder}")
        # An S3 prefix may name one object: it lies in the channel under its own name.
        file = folder / uri.rstrip("/").rsplit("/", 1)[-1]
        return str(file if file.exists() else folder)

    spec = job.spec

    def sources(given: Sequence[DataSource]) -> tuple[DataSource, ...]:
        return tuple(
            source
            if spec.data.streaming and source.path.startswith("s3://")
            else source.model_copy(update={"path": local(source.path)})
            for source in given
        )

    data = spec.data.model_copy(
        update={
            "train": sources(spec.data.train),
            "validation": sources(spec.data.validation),
            "tokenizer": spec.data.tokenizer and local(spec.data.tokenizer),
            "chat_template": spec.data.chat_template and local(spec.data.chat_template),
        }
    )
    model = spec.model.model_copy(update={"source": spec.model.source and local(spec.model.source)})
    images = spec.images
    if images and images.class_names:
        images = images.model_copy(update={"class_names": local(images.class_names)})
    return job.model_copy(update={"spec": spec.model_copy(update={"data": data, "model": model, "images": images})})


def check_efa(instance_type: str, devices: Path = Path("/sys/class/infiniband")) -> None:
    """JobFailedError unless every EFA interface of the instance type is there: NCCL would take TCP in silence."""
    from trainyard.hardware import instance

    expected = instance(instance_type).efa_interfaces
    if expected == 0:
        raise InputError(f"compute.instance_type {instance_type}: has no EFA, so it can't run a job over several hosts")
    found = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if len(found) < expected:
        raise JobFailedError(
            f"EFA: {instance_type} has {expected} interfaces, {devices} shows {len(found)}; is the container's EFA "
            "software there, and does the security group let itself in and out? (a job without EFA would crawl)"
        )


def first_address(place: Place, settings: Mapping[str, str], patience_seconds: float = RESOLVE_SECONDS) -> str:
    """Address of the first host; asks DNS again until it knows the name."""
    if len(place.hosts) == 1:
        return "127.0.0.1"
    host = place.hosts[0]
    given = settings.get("TRAINYARD_HOST_ADDRESSES")
    if given:
        addresses = json.loads(given)
        if host not in addresses:
            raise InputError(f"TRAINYARD_HOST_ADDRESSES: has no {host} (it has: {', '.join(addresses)})")
        return str(addresses[host])
    deadline = time.monotonic() + patience_seconds
    pause = 0.5
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() + pause > deadline:
                raise JobFailedError(f"host {host} has no address after {patience_seconds:.0f} s: {error}") from None
            say(f"entrypoint: host {host} has no address yet ({error}), asking again")
        time.sleep(pause)
        pause = min(2 * pause, 10.0)


def join_hosts(place: Place, job: ResolvedJob, address: str, settings: Mapping[str, str]) -> Hosts:
    """This host among the job's: alone, or connected to the first one, which judges."""
    policy = RestartPolicy(job.spec.recovery)
    if len(place.hosts) == 1:
        return OneHost(policy)
    port = int(settings.get("TRAINYARD_RENDEZVOUS_PORT", DEFAULT_PORT)) + 1
    judge = Judge(place.hosts, address, port, policy) if place.index == 0 else None
    return ManyHosts(place.host, address, port, judge=judge, patience_seconds=RESOLVE_SECONDS)


class HostRun:
    """torchrun on this host: started, watched, and started again as long as the hosts agree to."""

    def __init__(
        self, opt_ml: Path, place: Place, job: ResolvedJob, address: str, settings: Mapping[str, str], module: str
    ) -> None:
        self._place = place
        self._job = job
        self._address = address
        self._settings = dict(settings)
        self._module = module
        self._output = opt_ml / "output"
        self._work = opt_ml / "trainyard"
        self._reports = self._work / "ranks"
        self._grace_seconds = float(settings.get("TRAINYARD_STOP_GRACE_SECONDS", DEFAULT_GRACE_SECONDS))
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._was_told_to_stop = False
        self._was_killed = False
        self._hang = ""
        """Which rank hangs and where it stands; empty where none does."""
        self._killed: set[int] = set()
        """Ranks that we killed: their death is no cause."""
        self._is_consequence = False
        self._log = RecoveryLog(self._output / "data", is_first=place.index == 0)

    def run(self, hosts: Hosts) -> Ending:
        """The job's ending, after as many starts as it takes."""
        (self._output / "data").mkdir(parents=True, exist_ok=True)
        for leftover in ("failure", "resume_me"):
            (self._output / leftover).unlink(missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, self._on_signal)
        while True:
            ending = self._run_once(hosts) if not self._was_told_to_stop else _stopped_between()
            order = hosts.conclude(ending)
            if isinstance(order, Ending):
                return order
            self._log.failed(order)
            deadline = time.monotonic() + order.delay_seconds
            while not self._was_told_to_stop and time.monotonic() < deadline:
                time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _run_once(self, hosts: Hosts) -> Ending:
        self._start()
        process = self._process
        assert process is not None and process.stderr is not None
        pump = threading.Thread(target=self._pump, args=(process.stderr,), daemon=True)
        pump.start()
        watch = StepWatch(self._reports, self._own_ranks, self._job.spec.recovery)
        exit_code = self._watch(process, hosts, watch)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # A rank that outlives torchrun would hold the pipe open, and the next start's place.
        self._kill_ranks()
        pump.join(timeout=5)
        if not self._hang:  # a rank that was frozen may have gone on for a moment, to tell where it stood
            watch.look()
        self._log.progress(watch.last_step)
        ending = self._ending(exit_code)
        return replace(
            ending,
            step=watch.last_step,
            was_told_to_stop=self._was_told_to_stop,
            is_hang=bool(self._hang),
            is_consequence=ending.is_consequence or self._is_consequence,
        )

    def _start(self) -> None:
        """Start torchrun with a clean slate."""
        shutil.rmtree(self._reports, ignore_errors=True)
        self._reports.mkdir(parents=True)
        self._tail.clear()
        self._hang, self._is_consequence = "", False
        self._killed.clear()
        resolved = self._work / "resolved_job.json"
        resolved.write_text(self._job.model_dump_json(indent=1), encoding="utf-8")
        say(f"entrypoint: {self._place.host}: {' '.join(self._command(resolved))}")
        self._process = subprocess.Popen(
            self._command(resolved),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # no thread of ours holds a lock that a child needs
        )

    def _watch(self, process: subprocess.Popen[bytes], hosts: Hosts, watch: StepWatch) -> int:
        """torchrun's exit code; it and the ranks are killed where they hang or survive another rank's death."""
        kill_at: float | None = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=_POLL_SECONDS)
            if kill_at is not None:
                if time.monotonic() > kill_at:
                    self._kill_all()
                elif time.monotonic() > kill_at - _SURVIVOR_SECONDS:
                    self._kill_ranks()
                continue
            watch.look()
            self._log.progress(watch.last_step)
            stop = hosts.wants_stop()
            if stop == "told" and not self._was_told_to_stop:
                self._on_signal(signal.SIGTERM, None)
            elif self._has_failed():
                kill_at = time.monotonic() + 2 * _SURVIVOR_SECONDS
            elif stop in ("failed", "lost"):
                self._is_consequence = True
                kill_at = time.monotonic() + (2 * _SURVIVOR_SECONDS if self._ranks() else 0)
            elif stop == "hang":
                self._diagnose(watch, watch.silent_seconds(self._all_reports()))
                kill_at = time.monotonic() + _SURVIVOR_SECONDS
            elif not self._was_told_to_stop and (silent := watch.hanging(self._all_reports())):
                self._diagnose(watch, silent)
                kill_at = time.monotonic() + _SURVIVOR_SECONDS

    def _has_failed(self) -> bool:
        codes = [report.exit_code for report in self._all_reports().values()]
        return any(code not in (None, 0, RESUME_EXIT_CODE) for code in codes) or any(
            not _exists(report.pid) for report in self._all_reports().values() if report.exit_code is None
        )

    def _diagnose(self, watch: StepWatch, silent: Mapping[int, float]) -> None:
        """Keep every rank's stacks, and say in one line which rank it is that the others wait for."""
        reports = self._all_reports()
        stopped = {rank for rank, report in reports.items() if report.exit_code is None and is_stopped(report.pid)}
        stacks = take_stacks(self._reports, reports)
        if not silent:
            self._is_consequence = True
            return
        folder = self._output / "data" / "stacks"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, text in stacks.items():
            path = folder / f"rank-{rank}.txt"
            path.write_text(text or "no answer: the process does not run\n", encoding="utf-8")
        behind = min(watch.step_of(rank) for rank in silent)
        # Of those that are silent, a stopped one is the cause; else the ones that have finished the fewest steps.
        suspects = sorted(stopped & set(silent)) or [rank for rank in sorted(silent) if watch.step_of(rank) == behind]
        rank = suspects[0]
        where = "is stopped (SIGSTOP or frozen)" if rank in stopped else f"stands in {innermost(stacks.get(rank, ''))}"
        # What only waits may wait for another host's rank.
        self._is_consequence = rank not in stopped
        self._hang = (
            f"rank {rank} on {self._place.host} hangs: no progress for {silent[rank]:.0f} s after step"
            f" {watch.step_of(rank)}; it {where}; stacks of all ranks in output/data/stacks"
        )

    def _kill_ranks(self) -> None:
        alive = {rank: report.pid for rank, report in self._all_reports().items() if _exists(report.pid)}
        self._killed |= set(alive)
        self._tell_ranks(signal.SIGKILL, set(alive.values()))

    def _kill_all(self) -> None:
        self._kill_ranks()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _command(self, resolved: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self._place.hosts)), "--node-rank", str(self._place.index)),
            *("--nproc-per-node", str(self._job.processes_per_host)),
            *("--master-addr", self._address),
            *("--master-port", self._settings.get("TRAINYARD_RENDEZVOUS_PORT", str(DEFAULT_PORT))),
            *("--max-restarts", "0"),
            *("-m", "trainer.host.rank", str(self._reports), self._module),
            *("--resolved-job", str(resolved), "--output-dir", str(self._output / "data")),
            # Not in the output folder, which is uploaded as a whole at the end.
            *("--scratch-dir", str(self._work / "scratch")),
        ]

    def _environment(self) -> dict[str, str]:
        defaults = {
            # torchrun would set 1 and say so at length.
            "OMP_NUM_THREADS": str(self._job.spec.training.cpu_threads),
            "PYTHONUNBUFFERED": "1",
        }
        if self._place.interface:
            defaults |= {"NCCL_SOCKET_IFNAME": self._place.interface, "GLOO_SOCKET_IFNAME": self._place.interface}
        if len(self._place.hosts) > 1 and self._settings.get("TRAINYARD_SKIP_EFA_CHECK") != "1":
            # Without it libfabric may choose TCP in silence.
            defaults["FI_PROVIDER"] = "efa"
        return defaults | self._settings

    def _pump(self, pipe: Any) -> None:
        for line in pipe:
            # A rank killed in the middle of a word leaves no end of line; the next start's first line must not join it.
            sys.stderr.buffer.write(line if line.endswith(b"\n") else line + b"\n")
            sys.stderr.buffer.flush()
            self._tail.append(line.decode("utf-8", "replace").rstrip())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._tell_ranks(signal.SIGUSR1, self._ranks())
            return
        if number != signal.SIGALRM and not self._was_told_to_stop:
            self._was_told_to_stop = True
            say(f"entrypoint: told to stop; the ranks have {self._grace_seconds:.0f} s to save")
            signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)
            # For ranks that are only just being started; before the look at those that run.
            (self._reports / STOP_FILE).touch()
            # Not torchrun itself, which would kill the ranks 30 s later, in the middle of a save.
            self._tell_ranks(signal.SIGTERM, self._ranks())
        elif number == signal.SIGALRM:
            self._was_killed = True
            self._kill_all()

    @property
    def _own_ranks(self) -> range:
        first = self._place.index * self._job.processes_per_host
        return range(first, first + self._job.processes_per_host)

    def _all_reports(self) -> dict[int, RankReport]:
        return read_reports(self._reports)

    def _ranks(self) -> set[int]:
        """Pids of this host's ranks: they have reported, so they know what to do with a signal."""
        return {report.pid for report in self._all_reports().values() if report.exit_code is None}

    @staticmethod
    def _tell_ranks(number: signal.Signals, ranks: set[int]) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _ending(self, torchrun_code: int) -> Ending:
        reports = self._all_reports()
        codes = {rank: reports[rank].exit_code if rank in reports else None for rank in self._own_ranks}
        if all(code == 0 for code in codes.values()):
            return Ending(0, "")
        if all(code in (0, RESUME_EXIT_CODE) for code in codes.values()):
            return Ending(RESUME_EXIT_CODE, "saved; resume me")
        if self._hang:
            return Ending(1, self._hang)
        if self._was_told_to_stop and not reports:
            return _stopped_between()
        if self._was_killed:
            late = ", ".join(str(rank) for rank, code in codes.items() if code is None)
            grace = f"{self._grace_seconds:.0f} s after SIGTERM"
            return Ending(1, f"ranks {late} of {self._place.host} did not save and exit within {grace}")
        return self._failure(reports, torchrun_code)

    def _failure(self, reports: Mapping[int, RankReport], torchrun_code: int) -> Ending:
        tail = tuple(self._tail)
        died = {int(rank): int(code) for rank, code in _TORCHRUN_FAILURE.findall("\n".join(tail))}
        silent = [
            rank for rank in died if rank in reports and reports[rank].exit_code is None and rank not in self._killed
        ]
        for rank in silent:
            why = _signal_words(died[rank])
            return Ending(1, f"rank {rank} on {self._place.host} {why}", tail)
        failed = [report for report in reports.values() if report.exit_code not in (None, 0, RESUME_EXIT_CODE)]
        # A cause comes before its consequences, and a peer's loss is always a consequence.
        failed.sort(key=lambda report: (_lost_a_peer(report), not _words(report), report.ended_at or 0.0))
        if self._was_told_to_stop and any(map(_lost_a_peer, failed)) and not any(map(_has_own_words, failed)):
            # Told to stop while the ranks were still meeting: one left before another had found it.
            return Ending(RESUME_EXIT_CODE, "stopped before the first step; resume me")
        if failed:
            report = failed[0]
            words = _words(report) or f"exit code {report.exit_code}; the first host's reason may say more"
            lost_a_peer = _lost_a_peer(report)
            note = " (it lost another rank: see the other hosts' reason)" if lost_a_peer else ""
            return Ending(
                exit_code=2 if report.exit_code == 2 else 1,
                reason=f"rank {report.rank} on {self._place.host}: {words}{note}",
                details=report.stderr_tail,
                has_spoken=not lost_a_peer,
                is_consequence=lost_a_peer,
            )
        broken = _broken_torch(tail) if not reports else None
        if broken is not None:
            return Ending(1, f"torch can't be imported on {self._place.host}: {broken}", tail)
        words = next((line for line in reversed(tail) if line.strip()), f"exit code {torchrun_code}")
        return Ending(1, f"torchrun failed on {self._place.host}: {words.strip()}", tail)


def _stopped_between() -> Ending:
    return Ending(RESUME_EXIT_CODE, "stopped before the ranks started; resume me", was_told_to_stop=True)


def _exists(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet asked for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _words(report: RankReport) -> str:
    """Why a rank failed, in one line: its exception, else the last thing it wrote to stderr."""
    last_line = report.stderr_tail[-1].strip() if report.stderr_tail else ""
    return report.error or last_line.removeprefix("trainyard: ")


def _lost_a_peer(report: RankReport) -> bool:
    """Whether a rank failed because another one was gone, or never came."""
    return bool(_PEER_LOSS.search(report.error) or _PEER_MISSED.search(_words(report)))


def _has_own_words(report: RankReport) -> bool:
    """Whether it says anything else than that; a host's second rank leaves a common error to the first."""
    return bool(_words(report)) and not _lost_a_peer(report)


def _signal_words(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and no word"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (
        ": out of memory on the host, or killed from outside" if name == "SIGKILL" else ""
    )


def _broken_torch(tail: Sequence[str]) -> str | None:
    """What Python said when `import torch` failed, if it did."""
    errors = ("ImportError", "ModuleNotFoundError", "OSError")
    is_import = any("torch" in line for line in tail)
    return next((line for line in reversed(tail) if line.startswith(errors)), None) if is_import else None


def finish(ending: Ending, output: Path) -> int:
    """Write `output/failure` or `output/resume_me` and say so; the exit code."""
    output.mkdir(parents=True, exist_ok=True)
    if ending.exit_code == RESUME_EXIT_CODE:
        (output / "resume_me").write_text(f"{ending.reason}\n", encoding="utf-8")
        say(f"entrypoint: {ending.reason}")
    elif ending.exit_code != 0:
        (output / "failure").write_text("\n".join((ending.reason, *ending.details)) + "\n", encoding="utf-8")
        print(f"entrypoint: {ending.reason}", file=sys.stderr, flush=True)
    return ending.exit_code


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; `trainyard launch` brings it as an input channel") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: must hold a JSON object, holds {type(content).__name__}")
    return content


def _die_with_parent() -> None:
    """Nothing of the job outlives a killed entrypoint; the ranks ask for the same of torchrun (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
