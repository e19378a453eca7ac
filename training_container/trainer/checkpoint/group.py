"""Ranks that agree on small Python values; a world of one needs no process group."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


def cores_a_rank() -> int:
    """How many of this host's cores one of its ranks has for itself, at least one."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


class Group:
    """All ranks, over one gloo group. Every rank makes the same calls in the same order, from one thread at a time."""

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
        assert world_size == 1 or process_group is not None
        self._process_group = process_group
        self.rank = rank
        self.world_size = world_size

    def gather(self, value: Value) -> list[Value] | None:
        """Every rank's value, by rank, on the first rank; None on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._process_group)
        return values

    def gather_everywhere(self, value: Value) -> list[Value]:
        """Every rank's value, by rank, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._process_group)
        return values

    def scatter(self, values: list[Value] | None) -> Value:
        """The first rank's values[r] on rank r."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, src=0, group=self._process_group)
        mine: Value = received[0]
        return mine

    def from_first(self, make: Callable[[], Value]) -> Value:
        """`make()` of the first rank, everywhere; what it raises is raised everywhere."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = make()
            except Exception as error:  # re-raised below, on every rank
                outcome[1] = error
        if self.world_size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._process_group)
        if outcome[1] is not None:
            raise outcome[1]
        result: Value = outcome[0]
        return result

    def any(self, *flags: bool) -> list[bool]:
        """Each flag: true if it is on any rank."""
        return self.ask_any(*flags)()

    def ask_any(self, *flags: bool) -> Callable[[], list[bool]]:
        """`any`, which comes about while the caller does something else; the answer is called for."""
        if self.world_size == 1:
            return lambda: list(flags)
        votes = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._process_group, async_op=True)

        def answer() -> list[bool]:
            if work is not None:
                work.wait()
            return [bool(vote) for vote in votes.tolist()]

        return answer

    def send(self, block: torch.Tensor, to: int) -> None:
        """Give a tensor to another rank, which takes it with `receive`."""
        dist.send(block, group=self._process_group, group_dst=to)

    def receive(self, block: torch.Tensor, source: int) -> None:
        """Fill a tensor with what another rank sends."""
        dist.recv(block, group=self._process_group, group_src=source)

    def wait_for_all(self) -> None:
        """Returns when every rank is here."""
        self.any(False)
