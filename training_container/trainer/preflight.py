"""Before the first step of every start: is the network the one that the job pays for?

A large all-reduce between hosts and inside each of them, against a floor of bus bandwidth (`trainer.collectives`
defines it): a job whose NCCL fell back from EFA to TCP, or from NVLink to PCIe, would crawl for days without a word.
Hosts are measured in groups of about eight, whatever their number: a large all-reduce over hundreds of them says more
about latency, and a small group says where to look. Where one falls short, its hosts exchange messages pair by pair;
one that is slow with every partner is named, and where there is none, that is said.
"""

import gc
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from trainer.collectives import Bench, bus_factor, by_host, check_results, own_seconds
from trainer.rendezvous import NUM_TRIES
from trainer.runtime import Runtime
from trainer.speech import say
from trainyard.errors import JobFailedError
from trainyard.spec.job import PreflightSpec

Floors = Mapping[str, tuple[float, str]]
"""{"across" or "host": (GB/s of bus bandwidth, where that comes from)}."""

HOSTS_A_GROUP = 8
TRIES = 2
"""A neighbour's burst of traffic must not end a job."""
_GPU_BYTES, _CPU_BYTES = 256 * 2**20, 4 * 2**20
_REPEATS, _WARM_UPS = 5, 2
_PATIENCE = timedelta(minutes=5)
"""For a message, and for a group to connect: seconds where all is well. The ranks have only just met."""
_WHERE = {"across": "between hosts", "host": "inside a host"}
_NOBODY = {"across": "all ranks are on one host", "host": "each host has one rank"}
_MEND = {
    "across": (
        "it may be TCP instead of EFA: --set preflight.nccl_log=true shows the provider; check the image's EFA software"
        " and that the security group lets itself in and out"
    ),
    "host": "it may be PCIe instead of NVLink: nvidia-smi topo -m and nvidia-smi nvlink -s show it",
}


@dataclass(frozen=True)
class RankSpeed:
    """What one rank saw."""

    rank: int
    host: str
    gb_per_second: float
    """Bus bandwidth of its group's all-reduce."""
    pair_gb_per_second: float | None = None
    """With its best partner among the other hosts, where that was measured."""


def check_network(spec: PreflightSpec, known: Floors, runtime: Runtime, report: Callable[[str], None] = say) -> None:
    """Measures what has a floor, says it (first rank), and stops or warns as `spec` says; all ranks call it together.

    `known`: the instance type's floors, which are its GPUs'. JobFailedError, one line alike on all ranks, where a floor
    is not reached, the ranks can't connect, or (warned or not) a result is wrong.
    """
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(runtime.world_size)))
    floors = chosen_floors(spec, known, num_hosts=runtime.world_size // per_host, is_gpu=runtime.device.type == "cuda")
    members = {kind: group_members(kind, runtime.world_size, per_host) for kind in floors}
    if runtime.is_first:
        for line in not_compared(spec, members):
            report(line)
    for kind in [kind for kind, groups in members.items() if groups]:
        short = _measured(kind, floors[kind], members[kind], runtime, report)
        if short is not None and spec.collectives != "warn":
            raise JobFailedError(f"{short}, or set preflight.collectives to warn (or off) to train all the same")
        if short is not None and runtime.is_first:
            report(f"warning: {short}")


def chosen_floors(spec: PreflightSpec, known: Floors, *, num_hosts: int, is_gpu: bool) -> Floors:
    """What is measured. An instance type's floors are its GPUs': a rehearsal of the job on CPUs has none of them."""
    stated = spec.stated_floors
    if spec.collectives == "off":
        return {}
    has_fast_network = num_hosts > 1 and is_gpu and "across" in known
    if spec.collectives == "auto" and not has_fast_network:
        return stated
    return {**(known if is_gpu else {}), **stated}


def not_compared(spec: PreflightSpec, members: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """What the job asks for and these ranks can't measure, a line each; `members`: the groups by kind."""
    lines = [
        f"warning: {source}: is compared with nothing: {_NOBODY[kind]}"
        for kind, (_, source) in spec.stated_floors.items()
        if not members[kind]
    ]
    if spec.collectives in ("stop", "warn") and not any(members.values()) and not lines:
        return ["preflight: nothing was measured: no floor is known for this machine and number of ranks"]
    return lines


def group_members(kind: str, world_size: int, per_host: int) -> list[list[int]]:
    """The groups of `kind`, each rank in one; none where they would have one rank each."""
    ranks = range(world_size)
    if kind == "host":
        return [list(ranks[first : first + per_host]) for first in ranks[::per_host]] if per_host > 1 else []
    num_hosts = world_size // per_host
    if num_hosts < 2:
        return []
    # As equal as can be, so that no host is left by itself.
    num_groups = -(-num_hosts // HOSTS_A_GROUP)
    bounds = [number * num_hosts // num_groups for number in range(num_groups + 1)]
    chunks = [range(begin, end) for begin, end in pairwise(bounds)]
    return [[host * per_host + local for host in hosts] for hosts in chunks for local in range(per_host)]


def _measured(
    kind: str,
    limit: tuple[float, str],
    groups: Sequence[Sequence[int]],
    runtime: Runtime,
    report: Callable[[str], None],
) -> str | None:
    """`_shortfall` of this rank's group, which leaves nothing behind: the model gets all of a GPU's memory."""
    group = _own_group(groups, runtime)
    if isinstance(group, str):
        return f"preflight: the ranks could not connect to each other {_WHERE[kind]} in {NUM_TRIES} tries; {group}"
    num_bytes = _GPU_BYTES if runtime.device.type == "cuda" else _CPU_BYTES
    # After an error it is left to `part_in_order`: a rank may be gone, and a message to it would hold this up for ever.
    short = _shortfall(kind, limit, Bench(group, num_bytes, runtime.device), runtime, report)
    dist.destroy_process_group(group)
    if runtime.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return short


def _own_group(groups: Sequence[Sequence[int]], runtime: Runtime) -> dist.ProcessGroup | str:
    """This rank's group once every rank has its own, or why one hasn't, alike on all ranks.

    All try again together if one fails, as in `rendezvous.join`: about one start in sixty of gloo's does.
    """
    words = ""  # of the last try
    for _ in range(NUM_TRIES):
        own, why = _try_groups(groups, runtime)
        if runtime.sum_over_ranks(float(own is None))[0] == 0:
            assert own is not None
            return own
        said: list[str] = [""] * runtime.world_size
        dist.all_gather_object(said, why, group=runtime.control_group)
        words = next(one for one in said if one)
        if own is not None:
            dist.destroy_process_group(own)
    return words


def _try_groups(groups: Sequence[Sequence[int]], runtime: Runtime) -> tuple[dist.ProcessGroup | None, str]:
    """(this rank's group, None if that failed; why it failed).

    Every rank goes through all groups: torch names a group by the number of those before it, so that each try has names
    of its own, and no rank finds what an earlier one left in the store. Only a group's members connect or wait.
    """
    own: dist.ProcessGroup | None = None
    why = ""
    for ranks in groups:
        try:
            made = dist.new_group(
                list(ranks), timeout=_PATIENCE, backend="nccl" if runtime.device.type == "cuda" else "gloo"
            )
        except (RuntimeError, dist.DistError) as error:
            why = f"rank {runtime.rank} on {socket.gethostname()}: {str(error).splitlines()[0]}"
            continue
        if runtime.rank in ranks:
            own = made
    return own, why


def _shortfall(
    kind: str, limit: tuple[float, str], bench: Bench, runtime: Runtime, report: Callable[[str], None]
) -> str | None:
    """What is wrong with the groups of `kind`, in words; None where all reach the floor in one of the tries."""
    floor, _ = limit
    began = time.perf_counter()
    check_results(bench, "all_reduce", kind, runtime)
    speeds: list[RankSpeed] = []
    for _ in range(TRIES):
        seconds = own_seconds(bench.all_reduce, _REPEATS, runtime, warm_ups=_WARM_UPS)
        speeds = _of_all_ranks(_speed(bench, seconds, bus_factor("all_reduce", bench.size)), None, runtime)
        if min(one.gb_per_second for one in speeds) >= floor:
            break
    slowest = min(one.gb_per_second for one in speeds)
    if runtime.is_first:
        report(measured_words(kind, 4 * bench.count, slowest, floor, seconds=time.perf_counter() - began))
    if slowest >= floor:
        return None
    if kind == "across":
        own = next(one for one in speeds if one.rank == runtime.rank)
        speeds = _of_all_ranks(own.gb_per_second, _best_pair(bench, runtime), runtime)
    return shortfall_words(kind, limit, speeds)


def measured_words(kind: str, num_bytes: int, slowest: float, floor: float, *, seconds: float) -> str:
    """The line of each measurement; a runbook takes from it that an earlier shortfall is over."""
    return (
        f"preflight all_reduce={kind} bytes={num_bytes} slowest_bus_gb_per_second={slowest:.3f}"
        f" floor={floor:.3f} seconds={seconds:.1f}"
    )


def shortfall_words(kind: str, limit: tuple[float, str], speeds: Sequence[RankSpeed]) -> str:
    """Why a start is refused, or warned of; runbooks know it by these words."""
    floor, source = limit
    slowest = min(one.gb_per_second for one in speeds)
    return (
        f"preflight: all_reduce {_WHERE[kind]} has {slowest:.2f} GB/s of bus bandwidth, the floor is {floor:.2f}"
        f" ({source}); {_diagnosis(kind, speeds, floor)}"
    )


def _speed(bench: Bench, seconds: float, factor: float) -> float:
    return 4 * bench.count / seconds / 1e9 * factor


def _of_all_ranks(speed: float, pair: float | None, runtime: Runtime) -> list[RankSpeed]:
    own = RankSpeed(runtime.rank, socket.gethostname(), speed, pair)
    found: list[RankSpeed | None] = [None] * runtime.world_size
    dist.all_gather_object(found, own, group=runtime.control_group)
    return [one for one in found if one is not None]


def _best_pair(bench: Bench, runtime: Runtime) -> float:
    """GB/s each way with the best of this rank's partners: low only where the rank itself is slow, or all of them."""
    best = 0.0
    for shift in range(3):  # two partners each; of an odd number one rank has none in each round
        partner = partner_of(bench.rank, bench.size, shift)
        run = _nothing if partner is None else _exchange_with(bench, partner)
        seconds = own_seconds(run, _REPEATS, runtime, warm_ups=1)
        if partner is not None:
            best = max(best, _speed(bench, seconds, bus_factor("point_to_point", bench.size)))
    return best


def partner_of(rank: int, size: int, shift: int) -> int | None:
    """Whom `rank` of a group of `size` exchanges with in round `shift`: neighbours of a ring, moved on by one."""
    place = (rank - shift) % size ^ 1
    return None if place >= size else (place + shift) % size


def _nothing() -> None:
    """A round without a partner."""


def _exchange_with(bench: Bench, partner: int) -> Callable[[], None]:
    def run() -> None:
        sent = dist.P2POp(dist.isend, bench.own, group=bench.group, group_peer=partner)
        received = dist.P2POp(dist.irecv, bench.out, group=bench.group, group_peer=partner)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return run


def _diagnosis(kind: str, speeds: Sequence[RankSpeed], floor: float) -> str:
    """The hosts that it points at, and what to do: those slow with every partner; without pairs, those of slow groups.

    Where pairs were tried and none is slow, no host is named as the cause: only together are they slow.
    """
    slow = [one for one in speeds if one.gb_per_second < floor]
    pairs = [one.pair_gb_per_second for one in slow if one.pair_gb_per_second is not None]
    if pairs and min(pairs) >= floor:
        groups = _named([(one.gb_per_second, one) for one in slow])
        return (
            f"it points at no single host: in pairs each reaches {min(pairs):.2f} GB/s or more, in groups less:"
            f" {groups}: {_MEND[kind]}"
        )
    alone = [
        (one.pair_gb_per_second, one)
        for one in slow
        if one.pair_gb_per_second is not None and one.pair_gb_per_second < floor
    ]
    named = _named(alone or [(one.gb_per_second, one) for one in slow])
    return f"it points at {named}: {_MEND[kind]}, or replace the host"


def _named(speeds: Sequence[tuple[float, RankSpeed]]) -> str:
    """Hosts, the slowest first, each with its slowest rank and that one's GB/s."""
    ordered = sorted(speeds, key=lambda one: one[0])
    return by_host([(one.host, f"rank {one.rank}, {speed:.2f} GB/s") for speed, one in ordered])
