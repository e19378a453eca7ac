"""What the lines of a job, its machines and AWS say: each known message with the fault that it stands for. Pure.

The patterns are of messages as they are written by NCCL, aws-ofi-nccl, PyTorch, the NVIDIA driver, the Linux kernel,
Lustre, botocore, SageMaker and our own trainer; tests/operate/runbook_testing/lines.py has one of each, and its source.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainyard.functions.job_resumer import HOST_KILLED, HOST_MEMORY

Fault = Literal[
    "bad_node",
    "out_of_memory",
    "fsx_full",
    "access_denied",
    "image_pull",
    "capacity",
    "quota",
    "diverged",
    "checkpoint_spoiled",
    "checkpoint_failed",
    "nccl_error",
    "hung",
    "efa_missing",
    "slow_network",
    "slow_host",
    "host_lost",
    "straggler",
]

CAUSES: tuple[Fault, ...] = (
    "bad_node",
    "out_of_memory",
    "fsx_full",
    "access_denied",
    "image_pull",
    "capacity",
    "quota",
    "efa_missing",
    "slow_network",
    "slow_host",
    "diverged",
)
"""What ends a job by itself. A rank that is lost so makes the others say that NCCL failed, or that they waited in
vain."""

RUNBOOKS: dict[Fault, str] = {
    "bad_node": "scripts/runbooks/bad_node",
    "out_of_memory": "scripts/runbooks/out_of_memory",
    "fsx_full": "scripts/runbooks/fsx_full_or_slow",
    "access_denied": "trainyard doctor",
    "image_pull": "trainyard doctor",
    "capacity": "scripts/runbooks/capacity_or_quota_short",
    "quota": "scripts/runbooks/capacity_or_quota_short",
    "diverged": "scripts/runbooks/loss_diverged",
    "checkpoint_spoiled": "scripts/runbooks/checkpoint_stale_or_corrupt",
    "checkpoint_failed": "scripts/runbooks/checkpoint_stale_or_corrupt",
    "nccl_error": "scripts/runbooks/nccl_error",
    "hung": "scripts/runbooks/job_hung",
    "efa_missing": "scripts/runbooks/efa_not_used",
    "slow_network": "scripts/runbooks/efa_not_used",
    "slow_host": "scripts/runbooks/bad_node",
    "host_lost": "scripts/runbooks/bad_node",
    "straggler": "scripts/runbooks/job_slow",
}
"""Who looks into a fault."""


@dataclass(frozen=True)
class Signature:
    """A message that is known."""

    name: str
    fault: Fault
    pattern: re.Pattern[str]
    meaning: str


@dataclass(frozen=True)
class Hit:
    """A line that says something."""

    fault: Fault
    name: str
    """Of the signature; of an Xid `xid-79`."""
    meaning: str
    line: str
    number: int
    """Of the line, from 1."""
    is_warning: bool = False
    """It only warned: the job trains all the same, so it is no cause of an end."""


def _known(name: str, fault: Fault, pattern: str, meaning: str) -> Signature:
    return Signature(name, fault, re.compile(pattern), meaning)


SIGNATURES: tuple[Signature, ...] = (
    _known(
        "device-memory",
        "out_of_memory",
        r"CUDA out of memory\. Tried to allocate|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU's memory was full",
    ),
    _known(
        "host-memory",
        "out_of_memory",
        rf"{HOST_MEMORY}|DefaultCPUAllocator: can't allocate memory|^(?:\S+ )?MemoryError\b"
        # One host or a list of them; beside one that was told to stop it is a host that was lost (host-killed).
        r"|AlgorithmError: .*[Ee]xit [Cc]ode: (?!(?:.*\s)?75\b)(?:\S+ -?\d+, )*(?:\S+ )?(?:137|-9)\b",
        "the host's memory was full: the kernel kills without a word, so a SIGKILL from outside looks alike",
    ),
    _known(
        "shared-memory",
        "out_of_memory",
        r"out of shared memory|unable to (?:open|write to) (?:shared memory )?file <?/?torch_|/dev/shm.*No space left",
        "/dev/shm was full",
    ),
    _known(
        "no-space",
        "fsx_full",
        r"(?:Errno 28\] )?No space left on device: '/(?:fsx|opt/ml/input/data)|No space left on device: '/mnt/lustre"
        r"|LustreError: .*rc = -28\b|Disk quota exceeded: '/fsx",
        "the Lustre file system, or one of its targets, took no more bytes",
    ),
    _known(
        "denied",
        "access_denied",
        r"\((?:AccessDenied|AccessDeniedException|KMSAccessDeniedException|UnauthorizedOperation)\)"
        r"|is not authorized to perform: [a-z0-9-]+:\w+",
        "a policy refused",
    ),
    _known(
        "image",
        "image_pull",
        r"Cannot pull algorithm container|CannotPullContainerError|Access denied for repository: "
        r"|does not grant ecr:GetDownloadUrlForLayer",
        "the training image could not be pulled",
    ),
    _known(
        "no-capacity",
        "capacity",
        r"CapacityError\b|InsufficientInstanceCapacity|Unable to provision requested ML compute capacity"
        r"|Insufficient capacity error from EC2",
        "AWS has no machine of the type free in the zone",
    ),
    _known(
        "quota",
        "quota",
        r"ResourceLimitExceeded\b|The account-level service limit |VcpuLimitExceeded|MaxSpotInstanceCountExceeded",
        "a limit of the account is reached",
    ),
    _known(
        "quota-of-tenant",
        "quota",
        r"over the quota of tenant ",
        "the tenant's own limit is reached",
    ),
    _known(
        "efa-cards",
        "efa_missing",
        r"EFA: \S+ has \d+ interfaces, \S+ shows \d+",
        "EFA cards are missing: the job refused to start without them",
    ),
    _known(
        "floor-between-hosts",
        "slow_network",
        r"(?P<warned>warning: )?(?:preflight: all_reduce between hosts has|all_reduce over across \(.+\):) "
        r"\S+ GB/s of bus bandwidth, the floor is",
        "the network between hosts is below its floor",
    ),
    _known(
        "floor-inside-a-host",
        "slow_host",
        r"(?P<warned>warning: )?(?:preflight: all_reduce inside a host has|all_reduce over host \(.+\):) "
        r"\S+ GB/s of bus bandwidth, the floor is",
        "the GPUs of a host are connected below their floor: PCIe instead of NVLink?",
    ),
    _known(
        "anomaly",
        "diverged",
        r"^(?:\S+ )?anomaly step=\d+|\b(?:loss|grad_norm) is (?:nan|inf|-inf)\b"
        r"|\b(?:loss|grad_norm) \S+ is \d+(?:\.\d+)? times its running median",
        "loss or gradient norm was no number, or a spike",
    ),
    _known(
        "spoiled",
        "checkpoint_spoiled",
        r"checkpoint step=\d+ (?:on the hosts' disks )?skipped: |checkpoint none of \d+ at \S+ is whole",
        "a restore passed a checkpoint over",
    ),
    _known(
        "save-failed",
        "checkpoint_failed",
        r"checkpoint step=\d+ not committed: |checkpoint step=\d+ needs \d+ MiB, .* MiB free",
        "a save was given up",
    ),
    _known(
        "watchdog",
        "hung",
        r"Watchdog caught collective operation timeout: WorkNCCL\(",
        "a rank waited in a collective until NCCL's watchdog gave up",
    ),
    _known(
        "stand-still",
        "hung",
        r"rank \d+ on .+ hangs: no progress for \d+ s",
        "the host found a rank that stood still",
    ),
    _known(
        "host-gone",
        "host_lost",
        r"\bhost \S+ is gone: its entrypoint was killed, or the network parted",
        "a host was lost without a word of its own",
    ),
    _known(
        "host-killed",
        "host_lost",
        rf"AlgorithmError: .*{HOST_KILLED}",
        "a host was killed, and the others were told to stop for it",
    ),
    _known(
        "nccl",
        "nccl_error",
        r"nccl(?:Remote|System|Internal|UnhandledCuda|InvalidUsage|InvalidArgument)Error\b"
        r"|NET/OFI Request completed with error|NET/IB *: Got completion (?:from peer .*)?with (?:status|error)"
        r"|NCCL WARN .*(?:Connection closed by remote peer|Call to .* failed|No route to host)",
        "NCCL, or its network plugin, failed",
    ),
    _known(
        "straggler",
        "straggler",
        r"^(?:\S+ )?straggler step=\d+ rank=\d+ ",
        "a rank was slower than its like",
    ),
)

_MEASURED = re.compile(
    r"preflight all_reduce=(?P<kind>across|host) "
    r".*slowest_bus_gb_per_second=(?P<speed>\d+\.\d+) floor=(?P<floor>\d+\.\d+)"
)
_FLOORS: dict[str, Fault] = {"across": "slow_network", "host": "slow_host"}
"""What is said where a measurement of that kind falls short."""
_OF_A_START: tuple[Fault, ...] = ("efa_missing", *_FLOORS.values())
_ENDING: tuple[Fault, ...] = (*CAUSES, "host_lost", "nccl_error", "hung")
"""What a start ends by, which another one may run past."""
_START = re.compile(r"\bentrypoint: .+?: .*-m trainer\.torchrun --nnodes (?P<hosts>\d+) --node-rank (?P<rank>\d+) ")
"""Of a host that starts its ranks: once a start, before any of its steps."""
_STEP = re.compile(r"(?:\S+ )?step=(?P<step>\d+) ")

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)[^)]*\): (?P<code>\d+),")
_XID_TOLD = re.compile(r"\bgpu rank=(?P<rank>\d+) host=(?P<host>\S+) xid=(?P<code>\d+)\b")
"""The trainer's own words (trainer.observe.gpu_use), as its driver told it: a container sees no kernel's log."""
_FELL_OFF = re.compile(r"NVRM:.*fallen off the bus and is not responding")
"""Newer drivers tell of it without a number (leptonai/gpud#1209)."""


@dataclass(frozen=True)
class Xid:
    """What an error number of the NVIDIA driver asks for."""

    meaning: str
    action: Literal["replace", "reset", "watch", "application"]
    """replace: quarantine the machine and take another; reset: the same for the running job, a reset mends the GPU;
    watch: the GPU has mended itself; application: the program did it, not the machine."""


XIDS: dict[int, Xid] = {
    13: Xid("graphics engine exception, as a rule a program's bad access", "application"),
    31: Xid("memory page fault, as a rule a program's bad access", "application"),
    43: Xid("the GPU stopped processing for a program's fault", "application"),
    45: Xid("clean-up after another error, or a process that was killed", "application"),
    48: Xid("uncorrectable ECC error (double bit)", "reset"),
    62: Xid("the GPU's micro-controller halted", "reset"),
    63: Xid("a memory row was marked for remapping: the next reset does it", "watch"),
    64: Xid("a memory row could not be remapped: failing memory", "replace"),
    74: Xid("NVLink error: this GPU's link, or that of the GPU or switch at its other end", "replace"),
    79: Xid("the GPU has fallen off the bus", "replace"),
    94: Xid("contained ECC error: only the program that met it is lost", "watch"),
    95: Xid("uncontained ECC error: every program on the GPU may be wrong", "reset"),
    119: Xid("the GPU's system processor (GSP) does not answer", "reset"),
    120: Xid("error of the GPU's system processor (GSP)", "reset"),
    140: Xid("unrecovered ECC error", "reset"),
}
"""NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors) and GPU memory error management, read 2026-11: its buckets
RESET_GPU, RESTART_APP and the workflows, as far as they say what an operator does. Others are shown and not judged."""


@dataclass(frozen=True)
class XidSeen:
    """One message of the driver."""

    code: int
    gpu: str
    """Which one, by its bus or by the rank that trains on it. Empty where the line doesn't say."""
    line: str
    number: int

    @property
    def known(self) -> Xid:
        """What is known of the code."""
        return XIDS.get(self.code, Xid("not in this runbook's table: see NVIDIA's Xid catalog", "watch"))


def xids(lines: Iterable[str]) -> list[XidSeen]:
    """Every Xid that the lines tell of; a GPU that fell off the bus without a number counts as 79."""
    found = []
    for number, line in enumerate(lines, start=1):
        if match := _XID.search(line):
            found.append(XidSeen(int(match["code"]), f"GPU {match['bus']}", line.strip(), number))
        elif match := _XID_TOLD.search(line):
            gpu = f"rank {match['rank']}'s GPU on {match['host']}"
            found.append(XidSeen(int(match["code"]), gpu, line.strip(), number))
        elif _FELL_OFF.search(line):
            found.append(XidSeen(79, "", line.strip(), number))
    return found


def classify(lines: Sequence[str]) -> list[Hit]:
    """Every line that says something and still holds, in order; of an Xid only those that are the machine's affair."""
    return judged(lines)[0]


def judged(lines: Sequence[str]) -> tuple[list[Hit], list[Hit]]:
    """What `classify` gives, and what would be there too if a later start of the job had not shown it to be over."""
    hits = [
        Hit("bad_node", f"xid-{one.code}", one.known.meaning, one.line, one.number)
        for one in xids(lines)
        if one.known.action in ("replace", "reset")
    ]
    for number, line in enumerate(lines, start=1):
        hits += [
            Hit(known.fault, known.name, known.meaning, line.strip(), number, bool(match.groupdict().get("warned")))
            for known in SIGNATURES
            if (match := known.pattern.search(line))
        ]
    hits.sort(key=lambda hit: hit.number)
    if not any(hit.fault in _ENDING for hit in hits):
        return hits, []
    over = {(hit.number, hit.name) for hit in (*_refuted(hits, lines), *_passed(hits, lines))}
    is_over = [(hit.number, hit.name) in over for hit in hits]
    return (
        [hit for hit, gone in zip(hits, is_over, strict=True) if not gone],
        [hit for hit, gone in zip(hits, is_over, strict=True) if gone],
    )


def _refuted(hits: Sequence[Hit], lines: Sequence[str]) -> list[Hit]:
    """A start that is refused is repeated, and measured anew: over by a measurement that reached the floor, a refusal
    also by a step after it; a warning is not, since the job makes steps all the same."""
    newest_step, reached = 0, dict[Fault, int]()
    for number, line in enumerate(lines, start=1):
        if _STEP.match(line):
            newest_step = number
        elif (seen := _MEASURED.search(line)) and float(seen["speed"]) >= float(seen["floor"]):
            reached[_FLOORS[seen["kind"]]] = number

    def is_over(hit: Hit) -> bool:
        by_step = hit.fault in _OF_A_START and not hit.is_warning and hit.number < newest_step
        return by_step or hit.number < reached.get(hit.fault, 0)

    return [hit for hit in hits if is_over(hit)]


def _passed(hits: Sequence[Hit], lines: Sequence[str]) -> list[Hit]:
    """What ended a start is over where a later one made a step beyond it: not where that one is still on the way there,
    as the job is resumed from before. What was said before a start's first step, as warnings are, is so by any step of
    a later one."""
    starts, steps = _starts(lines), list[int]()
    furthest = [0] * (starts[-1] + 2)
    for start, line in zip(starts, lines, strict=True):
        if found := _STEP.match(line):
            furthest[start] = max(furthest[start], int(found["step"]))
        steps.append(furthest[start])
    for start in range(len(furthest) - 2, -1, -1):  # of this one or a later one
        furthest[start] = max(furthest[start], furthest[start + 1])

    def is_over(hit: Hit) -> bool:
        return hit.fault in _ENDING and furthest[starts[hit.number - 1] + 1] > steps[hit.number - 1]

    return [hit for hit in hits if is_over(hit)]


def _starts(lines: Sequence[str]) -> list[int]:
    """Which start of the job each line is of; 0 before the first. The first machine, whose log has the steps, counts
    them; another one's next line of a start is of the next of those that had as many hosts. So it holds in time order,
    and where one machine's log comes after the other's. What no machine said (a kernel's log, a failure) is of the
    newest start so far."""
    told = [_START.search(line) for line in lines]
    first = min((int(one["rank"]) for one in told if one), default=0)
    sizes = [one["hosts"] for one in told if one and int(one["rank"]) == first]
    ranks, before, starts = dict[str, int](), dict[str, int](), dict[int, int]()
    for one, line in zip(told, lines, strict=True):
        if one:
            before.setdefault(_speaker(line), _next_start(sizes, one, starts) - 1)
    starts.clear()
    found: list[int] = []
    for one, line in zip(told, lines, strict=True):
        if one:
            ranks[_speaker(line)] = int(one["rank"])
            _next_start(sizes, one, starts)
        speaker = _speaker(line) if _speaker(line) in before else ""
        if speaker in ranks:
            found.append(starts[ranks[speaker]])
        else:
            found.append(before.get(speaker, max(starts.values(), default=0)))
    return found


def _next_start(sizes: Sequence[str], told: re.Match[str], starts: dict[int, int]) -> int:
    """Which one a machine tells of; noted in `starts`. One that nothing matches counts as the newest: it hides none."""
    rank = int(told["rank"])
    left = range(starts.get(rank, 0) + 1, len(sizes) + 1)
    starts[rank] = next((number for number in left if sizes[number - 1] == told["hosts"]), len(sizes))
    return starts[rank]


def _speaker(line: str) -> str:
    """The log that a line is of: its first word; empty in a file that has no such word."""
    return "" if line.startswith("entrypoint: ") else line.partition(" ")[0]


def decisive(hits: Sequence[Hit]) -> Hit | None:
    """The line that tells why a job ended or stands still: a cause goes before its consequences (that a host was lost,
    that NCCL failed, that ranks waited), and among its like the first; each of these goes before the next."""
    for group in (CAUSES, ("host_lost",), ("nccl_error",), ("hung",)):
        found = next((hit for hit in hits if hit.fault in group and not hit.is_warning), None)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class Transport:
    """What NCCL said of its network."""

    providers: tuple[str, ...]
    """libfabric's, as the plugin chose them: efa, tcp."""
    num_nics: int | None
    """The fewest that a rank found."""
    uses_sockets: bool
    """NCCL's own TCP transport was chosen."""
    line: str
    """The one that decided; empty where NCCL said nothing of it."""


_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (?P<name>[\w;-]+)(?:.*\(found (?P<count>\d+) nics\))?")
_SOCKETS = re.compile(r"NCCL INFO Using network Socket|NCCL INFO NET/Socket *: Using ")


def transport(lines: Sequence[str]) -> Transport:
    """From the lines that NCCL_DEBUG=INFO gives, of the newest start that has such. The worst of its ranks decides:
    another provider than efa, then the fewest cards.

    `Using network AWS Libfabric` names the plugin and is there with either provider; `Bootstrap : Using eth0` is how
    ranks meet, and always TCP.
    """
    told: dict[int, list[str]] = {}
    for start, line in zip(_starts(lines), lines, strict=True):
        if _PROVIDER.search(line) or _SOCKETS.search(line):
            told.setdefault(start, []).append(line)
    return _transport(told[max(told)] if told else [])


def _transport(lines: Iterable[str]) -> Transport:
    providers: list[str] = []
    sockets = chosen = worst = fewest_line = ""
    fewest: int | None = None
    for line in lines:
        if match := _PROVIDER.search(line):
            providers.append(match["name"])
            count = int(match["count"]) if match["count"] else None
            if not match["name"].startswith("efa"):
                worst = worst or line.strip()
            elif count is None or fewest is None or count < fewest:
                fewest, fewest_line = (count if count is not None else fewest), line.strip()
        elif "Using network Socket" in line:
            chosen = chosen or line.strip()
        elif _SOCKETS.search(line):
            sockets = sockets or line.strip()
    # NET/Socket also initializes beside a plugin that is then chosen: only its choice, or no plugin at all, counts.
    uses_sockets = bool(chosen) or (bool(sockets) and not providers)
    decided = worst or ((chosen or sockets) if uses_sockets else fewest_line)
    return Transport(tuple(dict.fromkeys(providers)), fewest, uses_sockets, decided)
