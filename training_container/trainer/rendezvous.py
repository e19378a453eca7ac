"""How the ranks of a job find each other, how long they wait for each other, and how they part.

Every rank notes in the first host's store that it has arrived, so that those that are missing can be named. Then the
process group is made, and once more if that fails: about one start in sixty of gloo's did, and not again. (A start
that ends in an abort of the process, as one in sixty also did, is for the host's entrypoint, which starts all anew.)

Collectives wait long until the first step is done, which compiles, reads and fills caches, and shorter from then on.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainer.speech import say
from trainyard.errors import JobFailedError
from trainyard.spec.job import RecoverySpec

NUM_TRIES = 2
PATIENT = "patient"
"""`group_desc` of a process group whose own timeout is left as it is."""
_LONGEST_PAUSE_SECONDS = 1.0


def open_store(rank: int, *, patience_seconds: float) -> Store:
    """The store of the first host: torchrun's, or the first rank's own; JobFailedError when it can't be reached."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            is_master=rank == 0 and not is_launched,
            timeout=timedelta(seconds=patience_seconds),
            wait_for_workers=False,  # it would wait in silence, and name nobody
            multi_tenant=True,
        )
    except dist.DistError as error:
        words = str(error).splitlines()[0]
        raise JobFailedError(
            f"rank {rank} can't reach the first host at {host}:{port} within {patience_seconds:.0f} s: {words}; did it"
            " start, and does the security group let the hosts talk to each other?"
        ) from None
    return PrefixStore(f"trainyard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def arrive(store: Store, rank: int, world_size: int, *, patience_seconds: float) -> None:
    """Returns when all ranks are here; JobFailedError names those that are not."""
    store.set(f"host/{rank}", socket.gethostname())
    if store.add("arrived", 1) == world_size:
        store.set("all_here", "1")
    if not _wait_until(lambda: bool(store.check(["all_here"])), patience_seconds):
        raise JobFailedError(_missing(store, world_size, patience_seconds))


def _missing(store: Store, world_size: int, patience_seconds: float) -> str:
    here = [rank for rank in range(world_size) if store.check([f"host/{rank}"])]
    missing = sorted(set(range(world_size)) - set(here))
    hosts = sorted({store.get(f"host/{rank}").decode() for rank in here})
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing[:20]))}"
    more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
    return (
        f"{who}{more} of {world_size} did not arrive within {patience_seconds:.0f} s (recovery.arrival_seconds);"
        f" hosts that did: {', '.join(hosts)}"
    )


def _wait_until(is_so: Callable[[], bool], patience_seconds: float) -> bool:
    """Asks again and again, so that a signal is heard meanwhile; False when time is up."""
    deadline, pause = time.monotonic() + patience_seconds, 0.01
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def join(
    store: Store,
    rank: int,
    world_size: int,
    make: Callable[[Store], dist.ProcessGroup],
    patience_seconds: float,
) -> dist.ProcessGroup:
    """What `make` gave on this rank, once it gave something on all; all ranks try again together if one fails."""
    words = ""  # of the last try
    for number in range(1, NUM_TRIES + 1):
        own = PrefixStore(f"try{number}", store)
        # Groups are numbered in the order in which they are made, and meet under their number: a rank whose try failed
        # late has counted more of them.
        dist.distributed_c10d._world.group_count = 0
        try:
            made = make(own)
        except (RuntimeError, dist.DistError) as error:
            own.set("why", f"rank {rank} on {socket.gethostname()}: {str(error).splitlines()[0]}")
            own.add("bad", 1)
        else:
            own.add("good", 1)
        if _all_good(own, world_size, patience_seconds):
            return made
        words = own.get("why").decode() if own.check(["why"]) else "a rank did not answer"
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank == 0:
            say(f"rendezvous try={number} of {NUM_TRIES} failed: {words}")
    raise JobFailedError(f"the ranks could not connect to each other in {NUM_TRIES} tries; {words}")


def _all_good(store: Store, world_size: int, patience_seconds: float) -> bool:
    """Whether every rank says so. Waits for all to say something: gloo's own time runs out later than a failure."""
    _wait_until(lambda: store.add("good", 0) + store.add("bad", 0) == world_size, 2 * patience_seconds)
    return bool(store.add("good", 0) == world_size)


def limit_collectives(seconds: float) -> None:
    """From now on a collective of this process fails when a rank has not joined it by then; sends nothing."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc != PATIENT:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class Patience:
    """How long this process's collectives wait: as at the start, until `shrink` is called, and inside `as_at_start`."""

    def __init__(self, recovery: RecoverySpec) -> None:
        self._start_seconds = 60 * recovery.start_minutes
        self._later_seconds = recovery.patience_seconds
        self._has_shrunk = False

    def shrink(self) -> None:
        """The first step is done."""
        if not self._has_shrunk:
            limit_collectives(self._later_seconds)
            self._has_shrunk = True

    @contextmanager
    def as_at_start(self) -> Iterator[None]:
        """Around a save, and the job's end: one rank's disk or network may be far slower than the others'."""
        limit_collectives(self._start_seconds)
        yield
        if self._has_shrunk:
            limit_collectives(self._later_seconds)


@contextmanager
def part_in_order() -> Iterator[None]:
    """Leaves the process group at the block's end; after an error without waiting for collectives that hang.

    Without this, a gloo process that exits sometimes aborts after good work.
    """
    try:
        yield
    except BaseException:
        if dist.is_initialized() and "nccl" in dist.get_backend_config():
            # destroy_process_group would wait for kernels that wait for ranks that are gone.
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
