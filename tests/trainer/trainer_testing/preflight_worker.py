"""One rank, alone on its host: what the network check finds among ranks of which one is ill.

`python -m trainer_testing.preflight_worker RANK ILLNESS`: that rank is `slow` (it sleeps in each message), gets `wrong`
sums, or fails to connect `once` or `always`. Every rank prints what it was told.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from trainer import preflight
from trainer.collectives import Bench
from trainer.leaving import leave
from trainer.runtime import Runtime, distributed_runtime

from trainyard.errors import JobFailedError
from trainyard.spec.job import PreflightSpec

MARK = "FOUND "
_ANY_SPEED = 1e-9
_SLEEP_SECONDS = 0.6
"""In each message of the slow rank: others take a thousandth of it, so that a busy machine leaves room."""
_ALLOWED_SECONDS = 0.3
_BYTES = 2**16
_LATE_SECONDS = 0.5
WRONG = 3
"""Elements of the wrong rank's sums."""


def make_slow() -> None:
    """All that this rank says takes longer."""
    reduce, exchange = Bench.all_reduce, preflight._exchange_with

    def slow_reduce(bench: Bench) -> None:
        time.sleep(_SLEEP_SECONDS)
        reduce(bench)

    def slow_exchange(bench: Bench, partner: int) -> Callable[[], None]:
        run = exchange(bench, partner)

        def slow_run() -> None:
            time.sleep(_SLEEP_SECONDS)
            run()

        return slow_run

    Bench.all_reduce = slow_reduce  # type: ignore[method-assign]
    preflight._exchange_with = slow_exchange


def make_wrong() -> None:
    """Some elements of what this rank gets are none that were sent."""
    reduce = Bench.all_reduce

    def wrong_reduce(bench: Bench) -> None:
        reduce(bench)
        bench.out[:WRONG] += 1

    Bench.all_reduce = wrong_reduce  # type: ignore[method-assign]


def make_unconnected(num_times: int, rank: int) -> None:
    """Its own group is made, and lost again, so often."""
    new_group, left = dist.new_group, [num_times]

    def lost_group(ranks: list[int], **options: Any) -> Any:
        group = new_group(ranks, **options)
        if rank in ranks and left[0]:
            left[0] -= 1
            dist.destroy_process_group(group)
            raise RuntimeError("no route to anybody\nand more lines")
        return group

    dist.new_group = lost_group


def fall_ill(illness: str, rank: int) -> None:
    """From now on."""
    if illness == "slow":
        make_slow()
    elif illness == "wrong":
        make_wrong()
    else:
        make_unconnected({"once": 1, "always": 1000}[illness], rank)


def told_by(floor_gb_per_second: float, runtime: Runtime) -> str:
    """The line that the check ends with on this rank; empty where it ends well."""
    try:
        preflight.check_network(PreflightSpec(across_gb_per_second=floor_gb_per_second), {}, runtime)
    except JobFailedError as error:
        return str(error)
    return ""


def main(ill_rank: int, illness: str) -> None:
    """The check twice: of all ranks as they are, then with the ill one."""
    preflight._CPU_BYTES = _BYTES
    preflight._REPEATS, preflight._WARM_UPS = 1, 0
    with distributed_runtime(cpu_threads=1) as runtime:
        preflight.socket.gethostname = lambda: f"host-{runtime.rank}"  # type: ignore[attr-defined]
        num_groups = len(dist.distributed_c10d._world.pg_map)
        before = told_by(_ANY_SPEED, runtime)
        if runtime.rank == 1:
            time.sleep(_LATE_SECONDS)  # the others are at their second check before it has left the first
        if runtime.rank == ill_rank:
            fall_ill(illness, runtime.rank)
        found = told_by(_BYTES / _ALLOWED_SECONDS / 1e9 if illness == "slow" else _ANY_SPEED, runtime)
        left_over = len(dist.distributed_c10d._world.pg_map) - num_groups
        print(MARK + json.dumps({"before": before, "found": found, "left_over": left_over}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2])
    leave(0)
