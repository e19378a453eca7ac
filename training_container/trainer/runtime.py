"""This process's place among the ranks: rank, device, and the process groups."""

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from trainer.rendezvous import arrive, join, limit_collectives, open_store, part_in_order
from trainyard.spec.job import RecoverySpec

_PARTING_SECONDS = 2.0
"""How long the first rank, at its own failure, waits for others that fail of the same."""


@dataclass(frozen=True)
class Runtime:
    """One rank's identity. Ranks are numbered host by host, as torchrun does."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control_group: dist.ProcessGroup
    """gloo over CPU, all ranks: flags, counts and checkpoint coordination, never behind a GPU queue."""
    rendezvous_seconds: float = 0.0
    """How long the ranks took to find each other."""
    store: Store | None = None
    """Where ranks leave word for each other without meeting; None: this process is alone."""

    @property
    def is_first(self) -> bool:
        """True on the rank that talks: stdout, metrics.jsonl, result.json."""
        return self.rank == 0

    @property
    def device_name(self) -> str | None:
        """The GPU's name; None on CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None

    def is_first_to_say(self, words: str) -> bool:
        """True on one rank of a host for the same words: what all ranks fail of is said once there.

        A rank that can't ask any more says them itself.
        """
        if self.store is None:
            return True
        key = hashlib.sha256(f"{socket.gethostname()} {words}".encode(errors="backslashreplace")).hexdigest()
        try:
            is_first = int(self.store.add(f"said/{key}", 1)) == 1
        except dist.DistError:
            return True
        with suppress(dist.DistError):
            self._wait_for_who_asks(self.store)
        return is_first

    def _wait_for_who_asks(self, store: Store) -> None:
        """The first rank has the store in its process: gone before the others have asked, each would print torch's own
        thirty lines on a lost connection, and say the words again. They fail at the same moment, or wait elsewhere."""
        num_asked = int(store.add("asked", 1))
        deadline = time.monotonic() + _PARTING_SECONDS
        while self.is_first and num_asked < self.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            num_asked = int(store.add("asked", 0))

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64."""
        return self.begin_sum(*values)()

    def begin_sum(self, *values: float) -> Callable[[], list[float]]:
        """Sends the values on their way; what it returns waits for `sum_over_ranks` of them."""
        if self.world_size == 1:
            alone = [float(value) for value in values]  # gloo would hand even this to another thread
            return lambda: alone
        total = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(total, group=self.control_group, async_op=True)

        def finish() -> list[float]:
            work.wait()
            return [float(value) for value in total]

        return finish


@contextmanager
def distributed_runtime(*, cpu_threads: int, recovery: RecoverySpec | None = None) -> Iterator[Runtime]:
    """Joins the ranks for the length of the block; works without a launcher too, as a world of one.

    `cpu_threads`: intra-op threads of a rank on CPU; how work is split over threads changes the last bits of sums.
    `recovery`: how long ranks wait for each other at the start, and until the first step is done.
    """
    recovery = recovery or RecoverySpec()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(cpu_threads)
    if "RANK" not in os.environ:
        # DeepSpeed reads these from the environment, so a world of one has to announce itself like a big one.
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
        )
    rank, world_size, patience = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), recovery.arrival_seconds
    began = time.monotonic()
    with part_in_order():
        store = open_store(rank, patience_seconds=patience)
        arrive(store, rank, world_size, patience_seconds=patience)
        control_group = join(
            store, rank, world_size, lambda own: _make_groups(own, rank, world_size, device, patience), patience
        )
        limit_collectives(60 * recovery.start_minutes)
        yield Runtime(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            device=device,
            control_group=control_group,
            rendezvous_seconds=time.monotonic() - began,
            store=store if world_size > 1 else None,
        )


def _make_groups(
    store: Store, rank: int, world_size: int, device: torch.device, patience_seconds: float
) -> dist.ProcessGroup:
    """The default group of all ranks, and the control group, which is returned."""
    timeout = timedelta(seconds=patience_seconds)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    control_group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
    assert control_group is not None
    return control_group


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
