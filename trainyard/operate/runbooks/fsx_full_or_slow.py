"""The Lustre file system is full, or jobs wait for its data; and how files are brought in before a job needs them."""

import argparse
import shlex
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trainyard.errors import InputError, JobFailedError, TrainyardError
from trainyard.launch.aws import aws_errors
from trainyard.launch.session import Account
from trainyard.operate.runbooks.diagnosis import clear_or_unknown, fault, job_words, others, over, own_hits, shown
from trainyard.operate.runbooks.evidence import Evidence
from trainyard.operate.runbooks.figures import speed
from trainyard.operate.runbooks.framework import Finding, Step, keep
from trainyard.operate.runbooks.runbook import Context, Runbook
from trainyard.spec.platform import TenantContract
from trainyard.spec.words import counted

SUMMARY = "FSx for Lustre is full, or data come slowly; --warm-up FOLDER reads files in before a job does"
FULL_FRACTION = 0.1
"""As the alarm has it (stacks/constructs/alarms.py): below this share of free space Lustre slows down."""
BUSY_FRACTION = 0.9
"""Of the provisioned throughput: more is waited for."""
PERIOD_SECONDS = 300
LATEST_SECONDS = 180
"""CloudWatch has a minute's figures by then. Before, some storage targets' are missing, and a sum is too small."""
PERIODS = 3
BLOCK_BYTES = 8 << 20
SAY_SECONDS = 5.0
WORKERS = 8
TARGETS = "lfs df -h /fsx   # on a machine that has it (a job's): one target may be full alone"
OLD_FILES = "lfs find /fsx --mtime +30 --type f   # on a machine that has it: what nobody has changed for a month"
GIB = 2**30


def diagnose(evidence: Evidence) -> list[Finding]:
    """By what the job was refused, and by how long it waits for data that lie on the file system."""
    job = job_words(evidence)
    hits = own_hits(evidence, "fsx_full")
    if hits:
        then = (
            TARGETS,
            OLD_FILES,
            f"trainyard resume {job}   # when there is room again",
        )
        return [fault(evidence, "the file system takes no more bytes", shown(hits), then)]
    found = speed(evidence.rows, evidence.planned, evidence.least_of_plan)
    slow = [one for one in found.slow if one.cause == "data"] if found else []
    on_lustre = [one for one in evidence.record.channels if one.kind == "fsx"] if evidence.record else []
    if slow and on_lustre:
        where = ", ".join(one.uri for one in on_lustre)
        mends = (
            "scripts/runbooks/fsx_full_or_slow --warm-up /fsx/FOLDER --yes   # on a machine that has it",
            "trainyard tenant show ENV TENANT   # its throughput per TiB",
        )
        return [fault(evidence, f"data come slowly from {where}", (slow[0].words,), mends)]
    told = "the file system refused nothing, and no job waits for it"
    if slow:
        told = "the job waits for data, which do not lie on the file system: scripts/runbooks/job_slow"
    return [clear_or_unknown(evidence, told, "lines"), *over(evidence, "fsx_full"), *others(evidence, "fsx_full")]


def metered(account: Account, contract: TenantContract, folder: Path, *, environment: str) -> list[Finding]:
    """What CloudWatch and FSx say of the tenant's file system: free space, and throughput against the provisioned.
    `environment`: as commands are told it."""
    identity = contract.file_system.id
    with aws_errors("describing", f"file system {identity}"):
        described = account.client("fsx").describe_file_systems(FileSystemIds=[identity])["FileSystems"][0]
    capacity_gib = float(described["StorageCapacity"])
    per_tib = float((described.get("LustreConfiguration") or {}).get("PerUnitStorageThroughput") or 0)
    cloudwatch = account.client("cloudwatch")

    until = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(seconds=LATEST_SECONDS)

    begin = until - timedelta(seconds=PERIODS * PERIOD_SECONDS)

    def sums(metric: str, period: int) -> dict[int, float]:
        """The sum over all storage targets, by the number of the period: whole ones that have all their figures."""
        with aws_errors("reading", f"metric {metric} of {identity}"):
            answer = cloudwatch.get_metric_statistics(
                Namespace="AWS/FSx",
                MetricName=metric,
                Dimensions=[{"Name": "FileSystemId", "Value": identity}],
                StartTime=begin,
                EndTime=until,
                Period=period,
                Statistics=["Sum"],
            )
        return {int((one["Timestamp"] - begin).total_seconds() // period): one["Sum"] for one in answer["Datapoints"]}

    # Free space is published per target each minute: a longer sum would add minutes together.
    left = sums("FreeDataStorageCapacity", 60)
    free = left[max(left)] if left else None
    moved: dict[int, float] = {}
    for name in ("DataReadBytes", "DataWriteBytes"):
        for number, value in sums(name, PERIOD_SECONDS).items():
            moved[number] = moved.get(number, 0.0) + value
    busiest = max(moved.values(), default=None)
    figures = {"capacity_gib": capacity_gib, "mb_per_s_per_tib": per_tib, "free_bytes": free, "moved_bytes": busiest}
    keep(folder, "file_system.json", {**figures, "described": described})
    shows = f"trainyard tenant show {shlex.join((environment, contract.tenant))}"
    return _judged(identity, capacity_gib, per_tib, free, busiest, shows)


def _judged(
    identity: str, capacity_gib: float, per_tib: float, free: float | None, moved: float | None, shows: str
) -> list[Finding]:
    """`moved`: of the busiest five minutes. `shows`: the command that tells of the tenant."""
    findings = []
    if free is None:
        lately = (PERIODS * PERIOD_SECONDS + LATEST_SECONDS) // 60
        findings.append(Finding("unknown", f"CloudWatch has no free space of {identity} in the last {lately} minutes"))
    else:
        share = free / (capacity_gib * GIB)
        words = f"{100 * share:.1f}% of {capacity_gib:.0f} GiB are free"
        decided = (f"FreeDataStorageCapacity of {identity}",)
        raised = f"{shows}   # file_system.storage_gib can be raised in place"
        full = Finding("fault", words, decided, (TARGETS, OLD_FILES, raised))
        findings.append(full if share < FULL_FRACTION else Finding("clear", words, decided))
    if moved is not None and per_tib:
        rate, most = moved / PERIOD_SECONDS / 1e6, per_tib * capacity_gib / 1024
        words = f"{rate:.0f} MB/s of {most:.0f} MB/s provisioned in the busiest five minutes"
        decided = (f"DataReadBytes, DataWriteBytes of {identity}",)
        busy = Finding("fault", words, decided, (f"{shows}   # file_system.throughput_mb_per_s_per_tib",))
        findings.append(busy if rate > BUSY_FRACTION * most else Finding("clear", words, decided))
    return findings


class WarmUp:
    """Reads every byte of a folder's files: what Lustre has not fetched from S3 yet comes in with the first read."""

    def __init__(self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        if not folder.is_dir():
            raise InputError(f"--warm-up {folder}: is no folder here; run it where the file system is mounted (/fsx)")
        self._folder, self._say, self._clock = folder, say, clock
        self._files = [(path, path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file()]
        self.total_bytes = sum(size for _, size in self._files)
        self.done_bytes = self.done_files = 0
        self._lock = threading.Lock()
        self._started = self._said = clock()

    @property
    def num_files(self) -> int:
        """To be read."""
        return len(self._files)

    def run(self) -> str:
        """Read all; the rate, in a line. JobFailedError names the first file that can't be read."""
        with ThreadPoolExecutor(WORKERS) as pool:
            for _ in pool.map(self._read, (path for path, _ in self._files)):
                pass
        seconds = max(self._clock() - self._started, 1e-9)
        rate = self.done_bytes / seconds / 1e6
        return (
            f"{counted(self.done_files, 'file')}, {self.done_bytes / GIB:.2f} GiB in {seconds:.0f} s ({rate:.0f} MB/s)"
        )

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb", buffering=0) as file:
                while block := file.read(BLOCK_BYTES):
                    self._note(len(block))
        except OSError as error:
            raise JobFailedError(f"{path}: can't be read ({error.strerror}); nothing is lost, repeat it") from None
        with self._lock:
            self.done_files += 1

    def _note(self, num_bytes: int) -> None:
        with self._lock:
            self.done_bytes += num_bytes
            now = self._clock()
            if now - self._said < SAY_SECONDS:
                return
            self._said = now
            share = self.done_bytes / max(self.total_bytes, 1)
            left = (now - self._started) * (1 - share) / share
            told = (
                f"{self.done_files} of {counted(self.num_files, 'file')}, {100 * share:.0f}% of "
                f"{self.total_bytes / GIB:.1f} GiB"
            )
            self._say(f"{told}, {left:.0f} s left")


def options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--warm-up", type=Path, metavar="FOLDER", help="read every file below it, with progress")


def run(context: Context) -> None:
    """A job's view, the account's where a tenant is known, and the warm-up where one is asked for."""
    given: Any = context.options
    if given.job is not None or given.log:
        evidence = context.gather()
        context.report.findings += diagnose(evidence)
        tenant = given.tenant or (evidence.record.tenant if evidence.record and evidence.record.environment else None)
    else:
        tenant = given.tenant
    if tenant:
        try:
            access = context.tenant(tenant)
            context.report.findings += metered(
                access.account, access.contract, context.report.folder, environment=context.environment_words
            )
        except InputError:
            raise  # no such tenant: nothing that could be answered another time
        except TrainyardError as error:
            if not context.report.findings and given.warm_up is None:
                raise  # nothing else was looked at: that it could not be looked for is no good news
            context.report.findings.append(Finding("unknown", f"the file system could not be asked: {error}"))
    if given.warm_up is not None:
        warm_up = WarmUp(given.warm_up, context.say)
        words = f"read {counted(warm_up.num_files, 'file')} ({warm_up.total_bytes / GIB:.2f} GiB) below {given.warm_up}"
        context.perform([Step(words, warm_up.run)])
    if not context.report.findings and given.warm_up is None:
        raise InputError("JOB: missing; give a job's id, --tenant NAME, --log FILE, or --warm-up FOLDER")


RUNBOOK = Runbook("fsx_full_or_slow", SUMMARY, run, options, diagnose, example="--warm-up /fsx/acme/data")
