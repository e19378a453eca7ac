"""This process's place among the ranks: rank, device, and the process groups."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that has not joined a collective by then is lost: long enough for a slow first read of the data."""


@dataclass(frozen=True)
class Runtime:
    """One rank's identity. Ranks are numbered host by host, as torchrun does."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control_group: dist.ProcessGroup
    """gloo over CPU, all ranks: flags, counts and checkpoint coordination, never behind a GPU queue."""

    @property
    def is_first(self) -> bool:
        """True on the rank that talks: stdout, metrics.jsonl, result.json."""
        return self.rank == 0

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control_group)
        return [float(value) for value in total]


@contextmanager
def distributed_runtime(*, cpu_threads: int) -> Iterator[Runtime]:
    """Joins the ranks for the length of the block; works without a launcher too, as a world of one.

    `cpu_threads`: intra-op threads of a rank on CPU; how work is split over threads changes the last bits of sums.
    """
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
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        control_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        assert control_group is not None
        yield Runtime(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=local_rank,
            device=device,
            control_group=control_group,
        )
    finally:
        # Without this, a gloo process that exits sometimes aborts after good work.
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
