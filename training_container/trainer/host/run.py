"""This host's share of a job: torchrun started, watched, and started again as long as the hosts agree to. No torch."""

import contextlib
import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.host.failures import broken_torch, failures, lost_a_peer
from trainer.host.hosts import Hosts
from trainer.host.losses import LostHosts
from trainer.host.rank import RESUME_EXIT_CODE, STOP_FILE, RankReport, read_reports
from trainer.host.recovery import Ending, RecoveryLog
from trainer.host.standings import ANSWER_SECONDS, Standing, asked, mismatch
from trainer.host.watch import StepWatch, innermost, is_stopped, take_stacks
from trainer.host.word import tell_somehow
from trainer.speech import say
from trainyard.errors import JobFailedError
from trainyard.kept_room import FULL, keep_room
from trainyard.spec.job import STOP_SECONDS, ResolvedJob

DEFAULT_PORT = 29500
ROOM = ".room"
"""In a host's output folder: kept for its last word."""
NO_RANK_TO_SAVE = "entrypoint: told to save (SIGUSR1) while no rank runs here: there is nothing new to save"
_TAIL_LINES = 300
_POLL_SECONDS = 0.2
_SURVIVOR_SECONDS = 5.0
"""How long ranks may take to find out that another one is dead, and leave by themselves. Also, once the time after a
signal to stop is over, how long the other hosts may take to say how theirs ended."""
_TORCHRUN_SECONDS = 900
"""How long torchrun waits for its like on the other hosts, if not told (torch's launcher)."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Folders:
    """Where a host keeps what."""

    output: Path
    """`failure` or `resume_me`, at the end."""
    data: Path
    """The trainer's --output-dir, recovery.jsonl, stacks."""
    work: Path
    """Reports of the ranks, and the trainer's scratch: of no use afterwards."""


@dataclass(frozen=True)
class Place:
    """This host among the job's hosts."""

    host: str
    hosts: tuple[str, ...]
    """In numeric order: algo-2 before algo-10, which SageMaker's own order is not."""
    interface: str
    instance_type: str

    @property
    def index(self) -> int:
        """0 for the first host, where the ranks meet."""
        return self.hosts.index(self.host)


class HostRun:
    """torchrun on this host: started, watched, and started again as long as the hosts agree to."""

    def __init__(
        self, folders: Folders, place: Place, job: ResolvedJob, address: str, settings: Mapping[str, str], module: str
    ) -> None:
        """`settings`: the environment of the ranks, with the flags that `trainer.entrypoint` documents."""
        self._place = place
        self._job = job
        self._address = address
        self._settings = dict(settings)
        self._module = module
        self._output = folders.output
        self._data = folders.data
        self._work = folders.work
        self._reports = self._work / "ranks"
        self._grace_seconds = float(settings.get("TRAINYARD_STOP_GRACE_SECONDS", STOP_SECONDS))
        self._answer_seconds = float(settings.get("TRAINYARD_ANSWER_SECONDS", ANSWER_SECONDS))
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._was_told_to_stop = False
        self._told_at = math.inf
        """When it was (monotonic)."""
        self._was_killed = False
        self._hang = ""
        """Which rank hangs and where it stands; empty where none does."""
        self._standings: dict[int, Standing] = {}
        """Where this host's ranks stand in their collectives, once one hangs."""
        self._noticed_at: float | None = None
        """When this host found out that the ranks have to stop (monotonic)."""
        self._quiet_seconds = 0.0
        """How long no rank had given a sign of life by then."""
        self._longest_start_seconds: float | None = None
        """Of the starts that came to a step, from their begin to it."""
        self._killed: set[int] = set()
        """Ranks that we killed: their death is no cause."""
        self._is_consequence = False
        self._log = RecoveryLog(self._data, is_first=place.index == 0)
        self._losses = LostHosts(
            job.spec.checkpoint.destination or str(folders.data), index=place.index, settings=settings
        )

    def run(self, hosts: Hosts) -> Ending:
        """The job's ending, after as many starts as it takes; JobFailedError where a full disk takes no start."""
        try:
            return self._run(hosts)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # A refused open names its file, a refused write none.
            where = f"{error.filename or self._work} on {self._place.host}"
            raise JobFailedError(f"{where}: its disk is full, so the ranks can't be started: make room there") from None

    def _run(self, hosts: Hosts) -> Ending:
        self._data.mkdir(parents=True, exist_ok=True)
        for leftover in ("failure", "resume_me"):
            (self._output / leftover).unlink(missing_ok=True)
        keep_room(self._output / ROOM)
        # An attempt's before this one: a signal must not reach processes that have its ranks' pids now.
        shutil.rmtree(self._reports, ignore_errors=True)
        self._work.mkdir(parents=True, exist_ok=True)
        # Once: a disk may be full when the ranks are started again.
        (self._work / "resolved_job.json").write_text(self._job.model_dump_json(indent=1), encoding="utf-8")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, self._on_signal)
        while True:
            ending = self._run_once(hosts) if not self._was_told_to_stop else _stopped_between()
            order = hosts.conclude(ending, self._is_time_up)
            if isinstance(order, Ending):
                self._log.ended()
                return self._losses.judged(order, start=hosts.start)
            self._log.failed(order, noticed_at=self._noticed_at, quiet_seconds=self._quiet_seconds)
            deadline = time.monotonic() + order.delay_seconds
            while not self._was_told_to_stop and time.monotonic() < deadline:
                time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _run_once(self, hosts: Hosts) -> Ending:
        self._start()
        process = self._process
        assert process is not None and process.stderr is not None
        pump = threading.Thread(target=self._pump, args=(process.stderr,), daemon=True)
        pump.start()
        recovery = self._job.spec.recovery
        watch = StepWatch(self._reports, self._own_ranks, recovery, known_start_seconds=self._longest_start_seconds)
        exit_code = self._watch(process, hosts, watch)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # A rank that outlives torchrun would hold the pipe open, and the next start's place.
        self._kill_ranks()
        pump.join(timeout=5)
        if not self._hang:  # a rank that was frozen may have gone on for a moment, to tell where it stood
            watch.look()
        self._log.progress(watch.last_step)
        if watch.first_step_seconds is not None:
            self._longest_start_seconds = max(self._longest_start_seconds or 0.0, watch.first_step_seconds)
        ending = self._ending(exit_code, made_a_step=watch.last_step > 0)
        return replace(
            ending,
            step=watch.last_step,
            was_told_to_stop=self._was_told_to_stop,
            is_hang=bool(self._hang),
            standings={str(rank): standing for rank, standing in self._standings.items()},
            is_consequence=ending.is_consequence or self._is_consequence,
        )

    def _start(self) -> None:
        """Start torchrun with a clean slate."""
        shutil.rmtree(self._reports, ignore_errors=True)
        self._reports.mkdir(parents=True, exist_ok=True)  # a signal's handler may have been faster
        if self._was_told_to_stop:  # by a signal since `run` looked: what it left for the ranks was removed above
            (self._reports / STOP_FILE).touch()
        self._tail.clear()
        self._hang, self._standings, self._is_consequence = "", {}, False
        self._noticed_at, self._quiet_seconds = None, 0.0
        self._killed.clear()
        resolved = self._work / "resolved_job.json"
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
                exit_code = process.wait(timeout=_POLL_SECONDS)
                self._notice(watch)
                return exit_code
            if kill_at is not None:
                self._notice(watch)
                if hosts.have_answered():
                    kill_at = min(kill_at, time.monotonic() + _SURVIVOR_SECONDS)
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
                hosts.tell_of_answers()
                kill_at = time.monotonic() + _SURVIVOR_SECONDS + self._answer_seconds
            elif not self._was_told_to_stop and (silent := watch.hanging(self._all_reports())):
                # Ranks that are killed end the others' wait: so not before these have told where they stand.
                wait_seconds = self._answer_seconds if hosts.tell_of_hang() else 0.0
                self._diagnose(watch, silent)
                hosts.tell_of_answers()
                kill_at = time.monotonic() + _SURVIVOR_SECONDS + wait_seconds

    def _notice(self, watch: StepWatch) -> None:
        if self._noticed_at is None:
            self._noticed_at, self._quiet_seconds = time.monotonic(), watch.quiet_seconds

    def _has_failed(self) -> bool:
        codes = [report.exit_code for report in self._all_reports().values()]
        return any(code not in (None, 0, RESUME_EXIT_CODE) for code in codes) or any(
            not _exists(report.pid) for report in self._all_reports().values() if report.exit_code is None
        )

    def _diagnose(self, watch: StepWatch, silent: Mapping[int, float]) -> None:
        """Keep every rank's stacks and collectives, and say in one line which rank it is that the others wait for."""
        reports = self._all_reports()
        stopped = {rank for rank, report in reports.items() if report.exit_code is None and is_stopped(report.pid)}
        # Before the stacks: after them every rank is stopped.
        running = [rank for rank, report in reports.items() if report.exit_code is None and rank not in stopped]
        answers = asked(self._reports, running, answer_seconds=self._answer_seconds)
        self._standings = {rank: answer["standing"] for rank, answer in answers.items()}
        stacks = take_stacks(self._reports, reports)
        if not silent:
            self._is_consequence = True
            return
        self._keep(stacks, answers)
        rank = self._suspect(watch, set(silent), stopped)
        where = "is stopped (SIGSTOP or frozen)" if rank in stopped else f"stands in {innermost(stacks.get(rank, ''))}"
        # What only waits may wait for another host's rank.
        self._is_consequence = rank not in stopped
        self._hang = (
            f"rank {rank} on {self._place.host} hangs: no progress for {silent[rank]:.0f} s after step"
            f" {watch.step_of(rank)}; it {where}; stacks and collectives of all ranks in {self._data / 'stacks'}"
        )

    def _keep(self, stacks: Mapping[int, str], answers: Mapping[int, Mapping[str, Any]]) -> None:
        """A full disk costs what would be kept here, not the job."""
        folder = self._data / "stacks"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for rank, text in stacks.items():
                path = folder / f"rank-{rank}.txt"
                path.write_text(text or "no answer: the process does not run\n", encoding="utf-8")
            for rank, answer in answers.items():
                (folder / f"rank-{rank}-collectives.json").write_text(json.dumps(answer["record"]), encoding="utf-8")

    def _suspect(self, watch: StepWatch, silent: set[int], stopped: set[int]) -> int:
        """Of the silent ranks one that is stopped; else who is missing in a collective; else the one that is behind."""
        if stopped & silent:
            return min(stopped & silent)
        found = mismatch(self._standings)
        if found is not None and found.rank in silent:
            return found.rank
        return min(silent, key=lambda rank: (watch.step_of(rank), rank))

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
            *(sys.executable, "-m", "trainer.torchrun"),
            *("--nnodes", str(len(self._place.hosts)), "--node-rank", str(self._place.index)),
            *("--nproc-per-node", str(self._job.processes_per_host)),
            *("--master-addr", self._address),
            *("--master-port", self._settings.get("TRAINYARD_RENDEZVOUS_PORT", str(DEFAULT_PORT))),
            *("--max-restarts", "0"),
            *("--rdzv-conf", f"timeout={max(_TORCHRUN_SECONDS, math.ceil(self._job.spec.recovery.arrival_seconds))}"),
            # Ranks write there nothing; but where none is given torchrun makes a temporary one that nobody removes.
            *("--log-dir", str(self._work / "torchrun")),
            # Who signals all processes of a job, as Slurm does, reaches torchrun too, which would kill the ranks after
            # 30 s: when their time is over is this host's to say.
            *("--shutdown-timeout", str(math.ceil(self._grace_seconds) + 10)),
            *("-m", "trainer.host.rank", str(self._reports), self._module),
            *("--resolved-job", str(resolved), "--output-dir", str(self._data)),
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
        if self._job.spec.preflight.nccl_log:
            defaults["NCCL_DEBUG"] = "INFO"
        return defaults | self._settings

    def _pump(self, pipe: Any) -> None:
        for line in pipe:
            # A rank killed in the middle of a word leaves no end of line; the next start's first line must not join it.
            with contextlib.suppress(OSError):  # a log whose disk is full; torchrun has to be heard on
                sys.stderr.buffer.write(line if line.endswith(b"\n") else line + b"\n")
                sys.stderr.buffer.flush()
            self._tail.append(line.decode("utf-8", "replace").rstrip())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            ranks = self._ranks()
            if not ranks:  # between two starts, or they have not come so far
                say(NO_RANK_TO_SAVE)
            self._tell_ranks(signal.SIGUSR1, ranks)
            return
        if number != signal.SIGALRM and not self._was_told_to_stop:
            self._was_told_to_stop, self._told_at = True, time.monotonic()
            say(f"entrypoint: told to stop; the ranks have {self._grace_seconds:.0f} s to save")
            signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)
            # For ranks that are only just being started; before the look at those that run. A full disk may take none.
            with contextlib.suppress(OSError):
                self._reports.mkdir(parents=True, exist_ok=True)  # before the first start there is none
                (self._reports / STOP_FILE).touch()
            # Not torchrun itself, which would kill the ranks 30 s later, in the middle of a save.
            self._tell_ranks(signal.SIGTERM, self._ranks())
        elif number == signal.SIGALRM:
            self._was_killed = True
            self._kill_all()

    def _is_time_up(self) -> bool:
        """Whether who told this host to stop would soon kill it: the others' word may come too late."""
        return time.monotonic() > self._told_at + self._grace_seconds + _SURVIVOR_SECONDS

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

    def _ending(self, torchrun_code: int, *, made_a_step: bool) -> Ending:
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
        # What a rank failed of by itself would be met again, and where all have ended none was cut short.
        has_failed = not set(codes.values()) <= {None, 0, RESUME_EXIT_CODE}
        if self._was_killed and None in codes.values() and (made_a_step or not has_failed):
            return self._cut_short(codes, made_a_step=made_a_step)
        return self._failure(reports, torchrun_code, made_a_step=made_a_step)

    def _cut_short(self, codes: Mapping[int, int | None], *, made_a_step: bool) -> Ending:
        """When the time after a signal to stop was over; `codes`: each own rank's exit code."""
        grace = f"{self._grace_seconds:.0f} s after SIGTERM"
        if not made_a_step:
            # A long tokenization or restore is not broken off by the signal; to make it anew is all that is lost.
            return Ending(RESUME_EXIT_CODE, f"stopped before the first step, killed {grace}; resume me")
        late = [str(rank) for rank, code in codes.items() if code is None]
        return Ending(1, f"ranks {', '.join(late)} of {self._place.host} did not save and exit within {grace}")

    def _failure(self, reports: Mapping[int, RankReport], torchrun_code: int, *, made_a_step: bool) -> Ending:
        tail, host = tuple(self._tail), self._place.host
        failed = failures(reports, tail, killed=self._killed, has_peers=self._job.world_size > 1)
        is_only_lost = any(one.lost_a_peer for one in failed) and all(
            one.lost_a_peer or not one.words for one in failed
        )
        if self._was_told_to_stop and is_only_lost and not made_a_step:
            # Told to stop while the ranks were still meeting: one left before another had found it; no step is lost.
            # Or a host was, and SageMaker ends the others: that the judge knows, and `conclude` prefers its word.
            return Ending(RESUME_EXIT_CODE, "stopped before the first step; resume me")
        if failed and (report := failed[0].report) is not None:
            words = failed[0].words or f"exit code {report.exit_code}; the first host's reason may say more"
            note = " (it lost another rank: see the other hosts' reason)" if failed[0].lost_a_peer else ""
            return Ending(
                exit_code=2 if report.exit_code == 2 else 1,
                reason=f"rank {report.rank} on {host}: {words}{note}",
                details=report.stderr_tail,
                has_spoken=not failed[0].lost_a_peer,
                is_consequence=failed[0].lost_a_peer,
            )
        if failed:
            return Ending(1, f"rank {failed[0].rank} on {host} {failed[0].words}", tail)
        broken = broken_torch(tail) if not reports else None
        if broken is not None:
            return Ending(1, f"torch can't be imported on {host}: {broken}", tail)
        words = next((line for line in reversed(tail) if line.strip()), f"exit code {torchrun_code}")
        is_consequence = len(self._place.hosts) > 1 and lost_a_peer(words)
        return Ending(1, f"torchrun failed on {host}: {words.strip()}", tail, is_consequence=is_consequence)


def outlive_early_saves() -> None:
    """Until a HostRun listens SIGUSR1 would end the host; it may wait for the first host's name for minutes."""
    signal.signal(signal.SIGUSR1, lambda *_: say(NO_RANK_TO_SAVE))


def _stopped_between() -> Ending:
    return Ending(RESUME_EXIT_CODE, "stopped before the ranks started; resume me", was_told_to_stop=True)


def _exists(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet asked for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def finish(ending: Ending, output: Path) -> int:
    """Write `output/failure` or `output/resume_me` and say so; the exit code, which no full disk changes."""
    room = output / ROOM
    if ending.exit_code == RESUME_EXIT_CODE:
        say(f"entrypoint: {ending.reason}")
        tell_somehow(output / "resume_me", ending.reason, "", room)
    elif ending.exit_code != 0:
        with contextlib.suppress(OSError):
            print(f"entrypoint: {ending.reason}", file=sys.stderr, flush=True)
        tell_somehow(output / "failure", ending.reason, "".join(f"{line}\n" for line in ending.details), room)
    else:
        room.unlink(missing_ok=True)
    return ending.exit_code


def _die_with_parent() -> None:
    """Nothing of the job outlives a killed entrypoint; the ranks ask for the same of torchrun (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
