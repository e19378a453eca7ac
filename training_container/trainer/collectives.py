"""Measures the collectives that training is made of, before a job pays for a network that isn't there.

    torchrun --nproc-per-node 8 -m trainer.collectives --instance-type ml.p5.48xlarge --json collectives.json

For every operation, group and size: results are checked element by element, then timed. Bandwidths are nccl-tests'
(NVIDIA/nccl-tests, doc/PERFORMANCE.md): algorithm bandwidth is bytes / seconds; bus bandwidth is that times 2(n-1)/n
(all-reduce), (n-1)/n (all-gather, reduce-scatter, all-to-all) or 1 (point-to-point), which makes it comparable to what
a link can do, whatever the number of ranks n. Bytes are those of a rank's larger buffer.

Groups: `world`, all ranks; `host`, the ranks of one host; `across`, one rank of each host, all local ranks at the same
time. Where several groups work at once, the slowest counts.

Exit codes: 0 done; 1 a result was wrong, or the largest all-reduce stays below the floor; 2 the input was wrong, or a
floor was asked for and nothing of what would be measured has one.
"""

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.collective_names import all_gather_single, reduce_scatter_single
from trainer.leaving import leave
from trainer.runtime import Runtime, distributed_runtime
from trainer.speech import say
from trainyard.errors import InputError, JobFailedError, TrainyardError

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
GROUPS = ("world", "host", "across")
WARM_UPS = 3
_NUM_NAMED = 4
"""Hosts in one line."""
_VALUES = 251
"""Element i of rank r holds i mod 251 + r: sums over thousands of ranks are exact in float32."""


@dataclass(frozen=True)
class Measurement:
    """One operation over one kind of group with one size."""

    operation: str
    group: str
    num_ranks: int
    num_bytes: int
    seconds: float
    """Of one call, on the slowest rank."""
    algorithm_gb_per_second: float
    bus_gb_per_second: float

    def as_line(self) -> str:
        """For people and for log filters."""
        return (
            f"collective operation={self.operation} group={self.group} ranks={self.num_ranks} bytes={self.num_bytes}"
            f" microseconds={self.seconds * 1e6:.1f} algorithm_gb_per_second={self.algorithm_gb_per_second:.3f}"
            f" bus_gb_per_second={self.bus_gb_per_second:.3f} results=right"
        )


def bus_factor(operation: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, see the top."""
    if operation == "point_to_point":
        return 1.0
    share = (num_ranks - 1) / num_ranks
    return 2 * share if operation == "all_reduce" else share


class Bench:
    """Buffers for one group and size: rank p of n has `own` (its whole input) and receives into `out`."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # A whole number of elements for each rank.
        self.part = max(1, num_bytes // 4 // self.size)
        self.count = self.part * self.size
        self.index = torch.arange(self.count, device=device) % _VALUES
        self.own = self.values_of(self.rank)
        self.out = torch.zeros_like(self.own)

    def values_of(self, rank: int) -> torch.Tensor:
        """What rank `rank` has in its whole buffer."""
        return (self.index + rank).float()

    def part_of(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        """Share `rank` of a whole buffer."""
        return values[rank * self.part : (rank + 1) * self.part]

    def all_reduce(self) -> None:
        """In place, on `out`."""
        dist.all_reduce(self.out, group=self.group)

    def all_gather(self) -> None:
        """Every rank's first part."""
        all_gather_single(self.out, self.own[: self.part], group=self.group)

    def reduce_scatter(self) -> None:
        """This rank's part of the sum, into the first part of `out`."""
        reduce_scatter_single(self.out[: self.part], self.own, group=self.group)

    def all_to_all(self) -> None:
        """Part p of every rank's buffer to rank p."""
        dist.all_to_all_single(self.out, self.own, group=self.group)

    def point_to_point(self) -> None:
        """To the next rank, from the one before, all at once."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sent = dist.P2POp(dist.isend, self.own, group=self.group, group_peer=after)
        received = dist.P2POp(dist.irecv, self.out, group=self.group, group_peer=before)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    def expected(self, operation: str) -> torch.Tensor:
        """What `out` holds after the operation; reduce_scatter fills only its first part."""
        ranks = range(self.size)
        if operation in ("all_reduce", "reduce_scatter"):
            total = (self.index * self.size + sum(ranks)).float()
            return total if operation == "all_reduce" else self.part_of(total, self.rank)
        if operation == "all_gather":
            return torch.cat([self.values_of(rank)[: self.part] for rank in ranks])
        if operation == "all_to_all":
            return torch.cat([self.part_of(self.values_of(rank), self.rank) for rank in ranks])
        return self.values_of((self.rank - 1) % self.size)

    def num_wrong(self, operation: str, run: Callable[[], None]) -> int:
        """Elements that are not what they must be after one call."""
        self.out.copy_(self.own) if operation == "all_reduce" else self.out.fill_(-1)
        run()
        expected = self.expected(operation)
        return int((self.out[: len(expected)] != expected).sum())


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")


def measure(bench: Bench, operation: str, kind: str, num_repeats: int, runtime: Runtime) -> Measurement:
    """Checks, warms up, times; JobFailedError where any rank got a wrong result."""
    run: Callable[[], None] = getattr(bench, operation)
    check_results(bench, operation, kind, runtime)
    mine = torch.tensor([own_seconds(run, num_repeats, runtime, warm_ups=WARM_UPS)], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=runtime.control_group)
    num_bytes = 4 * bench.count
    algorithm = num_bytes / mine.item() / 1e9
    bus = algorithm * bus_factor(operation, bench.size)
    return Measurement(operation, kind, bench.size, num_bytes, mine.item(), algorithm, bus)


def check_results(bench: Bench, operation: str, kind: str, runtime: Runtime) -> None:
    """One call; JobFailedError, one line alike on all ranks, names the hosts where any got a wrong result."""
    run: Callable[[], None] = getattr(bench, operation)
    wrong = bench.num_wrong(operation, run)
    total = runtime.sum_over_ranks(wrong)[0]
    if total == 0:
        return
    found: list[tuple[int, int, str]] = [(0, 0, "")] * runtime.world_size
    dist.all_gather_object(found, (-wrong, runtime.rank, socket.gethostname()), group=runtime.control_group)
    where = [(host, f"rank {rank}, {-count} elements") for count, rank, host in sorted(found) if count]
    raise JobFailedError(
        f"{operation} over {kind} ({bench.count * 4} bytes): {total:.0f} elements are wrong, on {by_host(where)}: the"
        " network or a GPU corrupts data; take the host out, of several one after the other"
    )


def by_host(found: Sequence[tuple[str, str]]) -> str:
    """`algo-1 (rank 3, ...), algo-2 (...) and 5 more` of (host, what to say of it): each host's first, in order."""
    first: dict[str, str] = {}
    for host, words in found:
        first.setdefault(host, words)
    named = [f"{host} ({words})" for host, words in first.items()]
    more = f" and {len(named) - _NUM_NAMED} more" if len(named) > _NUM_NAMED else ""
    return f"{', '.join(named[:_NUM_NAMED])}{more}"


def own_seconds(run: Callable[[], None], num_repeats: int, runtime: Runtime, *, warm_ups: int) -> float:
    """Seconds of one call on this rank; all ranks measure together, each what it has to do."""
    for _ in range(warm_ups):
        run()
    _synchronize(runtime)
    started = time.perf_counter()
    for _ in range(num_repeats):
        run()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / num_repeats
    _synchronize(runtime)
    return seconds


def _synchronize(runtime: Runtime) -> None:
    """Every rank is here, and its device idle."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    runtime.sum_over_ranks(0.0)


def make_groups(runtime: Runtime, kinds: Sequence[str]) -> dict[str, dist.ProcessGroup]:
    """This rank's group of every kind that has more than one rank; all ranks call it together."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(runtime.world_size)))
    ranks = range(runtime.world_size)
    members: dict[str, list[list[int]]] = {
        "world": [list(ranks)],
        "host": [list(ranks[first : first + per_host]) for first in ranks[::per_host]],
        "across": [list(ranks[local::per_host]) for local in range(per_host)],
    }
    groups = {}
    for kind in kinds:
        if len(members[kind][0]) < 2:
            continue
        for group_ranks in members[kind]:
            group = dist.new_group(group_ranks)
            if runtime.rank in group_ranks:
                groups[kind] = group
    return groups


def check_floors(found: Sequence[Measurement], floors: dict[str, tuple[float, str]]) -> list[str]:
    """What falls short, a line each: the largest all-reduce of each kind of group against its floor."""
    short = []
    for kind, (floor, source) in floors.items():
        candidates = [one for one in found if (one.operation, one.group) == ("all_reduce", kind)]
        if not candidates:
            continue
        best = max(candidates, key=lambda one: one.num_bytes)
        if best.bus_gb_per_second < floor:
            short.append(
                f"all_reduce over {kind} ({best.num_ranks} ranks, {best.num_bytes} bytes):"
                f" {best.bus_gb_per_second:.2f} GB/s of bus bandwidth, the floor is {floor:.2f} ({source}); is it TCP"
                " instead of EFA, or PCIe instead of NVLink? NCCL_DEBUG=INFO shows the provider and the paths"
            )
    return short


def check_comparable(
    operations: Sequence[str], kinds: Iterable[str], floors: dict[str, tuple[float, str]], option: str
) -> None:
    """InputError where a floor was asked for (`option` says by what) and nothing to be measured has one."""
    if "all_reduce" in operations and set(kinds) & set(floors):
        return
    raise InputError(
        f"nothing would be compared with a floor: {option} has floors for all_reduce over"
        f" {' and '.join(floors) or 'no group'}; asked for and there: {', '.join(operations) or 'no operation'} over"
        f" {' and '.join(kinds) or 'no group of two ranks or more'}; mend --operations and --groups, or drop {option}"
    )


def parse_size(text: str) -> int:
    """Bytes of `64MiB`, `1GiB` or `4096`; InputError says what is allowed."""
    match = re.fullmatch(r"(\d+)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in UNITS or int(match[1]) == 0:
        raise InputError(f"--sizes {text}: is no size; write bytes, or KiB, MiB, GiB: 1MiB,64MiB,1GiB")
    return int(match[1]) * UNITS[match[2]]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.collectives", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--sizes", default="1MiB,16MiB,256MiB", help="bytes of the larger buffer (default: %(default)s)"
    )
    parser.add_argument("--groups", default=",".join(GROUPS), help="of world, host, across (default: all)")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="default: all: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls (default: %(default)s)")
    parser.add_argument("--floor", type=float, help="GB/s of bus bandwidth that the largest all-reduces must reach")
    parser.add_argument("--instance-type", help="compare with this type's floors instead, e.g. ml.p5.48xlarge")
    parser.add_argument("--json", type=Path, help="write the measurements and the machine here")
    return parser.parse_args(arguments)


def _chosen(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise InputError(f"{option} {name}: is not known; it takes {', '.join(allowed)}")
    return names


def _floors(options: argparse.Namespace) -> dict[str, tuple[float, str]]:
    if options.floor is not None and options.instance_type:
        raise InputError("--floor and --instance-type: give one of them")
    if options.instance_type:
        from trainyard.hardware.bandwidth import bandwidth_floors

        return bandwidth_floors(options.instance_type)
    return {} if options.floor is None else dict.fromkeys(GROUPS, (options.floor, "--floor"))


def _run(options: argparse.Namespace) -> None:
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    kinds = _chosen("--groups", options.groups, GROUPS)
    operations = _chosen("--operations", options.operations, OPERATIONS)
    if options.repeats < 1:
        raise InputError("--repeats: must be at least 1")
    floors = _floors(options)
    found: list[Measurement] = []
    with distributed_runtime(cpu_threads=1) as runtime:
        if runtime.world_size == 1:
            raise InputError("one rank talks to nobody: start it with torchrun --nproc-per-node N")
        # Only the first rank's disk counts, and all ranks have to leave together.
        has_no_place = runtime.is_first and options.json is not None and not options.json.absolute().parent.is_dir()
        if runtime.sum_over_ranks(float(has_no_place))[0] > 0:
            raise InputError(f"--json {options.json}: its folder doesn't exist; make it first")
        groups = make_groups(runtime, kinds)
        if options.instance_type or options.floor is not None:
            option = f"--instance-type {options.instance_type}" if options.instance_type else "--floor"
            check_comparable(operations, groups, floors, option)
        if options.instance_type and runtime.is_first:
            for kind in sorted(set(groups) - set(floors) - {"world"}):
                say(f"no floor is known for {options.instance_type} over {kind}: measured, compared with nothing")
        for kind, group in groups.items():
            for num_bytes in sizes:
                bench = Bench(group, num_bytes, runtime.device)
                for operation in operations:
                    found.append(measure(bench, operation, kind, options.repeats, runtime))
                    if runtime.is_first:
                        say(found[-1].as_line())
        if runtime.is_first and options.json:
            _write(options.json, _report(found, runtime))
    if short := check_floors(found, floors):
        raise JobFailedError("; ".join(short))


def _write(path: Path, report: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise JobFailedError(f"--json {path}: can't be written ({error.strerror}); the lines above say all") from None


def _report(found: Sequence[Measurement], runtime: Runtime) -> dict[str, object]:
    is_gpu = runtime.device.type == "cuda"
    return {
        "world_size": runtime.world_size,
        "backend": "nccl" if is_gpu else "gloo",
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
        "first_host": socket.gethostname(),
        "measurements": [asdict(one) for one in found],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns its exit code."""
    try:
        _run(_options(arguments))
    except TrainyardError as error:
        # One line for all: every rank knows the same.
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stderr.write(f"trainyard: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    leave(main())
