"""Every so many steps the ranks lay their figures together: who is slow, whose memory grows, how long data took.

Between these steps nothing is sent; a step costs two reads of counters. What was found goes into the step's row under
`observed`, and what somebody should look at is a line on stdout.
"""

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainer.observe.gpu_use import GpuShares, gpu_use_of
from trainer.observe.memory_use import Growth, MemoryUse
from trainer.observe.network_use import NetworkUse
from trainer.observe.stragglers import LEAST_STEPS, find_stragglers
from trainer.observe.throughput import Expected, throughput
from trainer.runtime import Runtime
from trainer.speech import say

OTHERS = frozenset({"communication", "checkpoint"})
"""Phases that are not a rank's own work on a step."""


@dataclass(frozen=True)
class Figures:
    """One rank's window of steps."""

    host: str
    group: int
    """Ranks with the same number do the same work."""
    own_seconds: float
    """Median a step, without waiting for other ranks."""
    data_seconds: tuple[float, float]
    """p50 and p99 of waiting for the loader."""
    copy_seconds: tuple[float, float] | None
    """p50 and p99 of bringing a micro-batch from host to device; None without a device."""
    peaks: dict[str, float]
    """Bytes."""
    growth: dict[str, Growth]
    network: tuple[float, float]
    """(sent, received) bytes a second of the whole host."""
    gpu: GpuShares | None = None
    """None without a GPU whose driver answers."""


def largest_tensor(batch: object) -> torch.Tensor | None:
    """Of a micro-batch's fields, and of what its fields hold (pixels are one object); by bytes."""
    found = []
    for value in vars(batch).values():
        inside = [value] if isinstance(value, torch.Tensor) else getattr(value, "__dict__", {}).values()
        found += [tensor for tensor in inside if isinstance(tensor, torch.Tensor)]
    return max(found, key=lambda tensor: tensor.nbytes, default=None)


class CopyProbe:
    """Times the way from host to device: one real micro-batch a step, by events, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def copy(self, batch: object) -> None:
        """Copies a micro-batch's largest tensor once more, as the engine will copy it itself; microseconds."""
        tensor = largest_tensor(batch) if self._device.type == "cuda" else None
        if tensor is None:
            return
        pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
        pair[0].record()
        tensor.to(self._device, non_blocking=True)
        pair[1].record()
        self._events.append((pair[0], pair[1]))

    def take(self) -> list[float]:
        """Seconds of the copies so far; their steps are done, so nothing is waited for."""
        seconds = [begin.elapsed_time(end) / 1000.0 for begin, end in self._events if end.query()]  # type: ignore[no-untyped-call]  # as above
        self._events.clear()
        return seconds


class Observer:
    """Collects a rank's figures; every `every_steps` and after `last_step` brings all ranks' together on the first."""

    def __init__(self, runtime: Runtime, *, every_steps: int, last_step: int, group: int, expected: Expected) -> None:
        """`group`: see Figures."""
        self._expected = expected
        self._tokens = 0
        self._seconds = 0.0
        self._runtime = runtime
        self._every_steps = every_steps
        self._last_step = last_step
        self._group = group
        self._own: list[float] = []
        self._data: list[float] = []
        self.memory = MemoryUse(runtime.device)
        self.copies = CopyProbe(runtime.device)
        self._network = NetworkUse()
        self._gpu = gpu_use_of(runtime.device, rank=runtime.rank)

    def close(self) -> None:
        """Ends what samples beside the steps."""
        if self._gpu is not None:
            self._gpu.close()

    def finish_step(
        self, step: int, step_seconds: float, breakdown: Mapping[str, float], tokens: int
    ) -> dict[str, Any]:
        """All ranks call it after each step; what the row of an observed step gets (first rank), else nothing."""
        self._own.append(step_seconds - sum(breakdown[phase] for phase in OTHERS))
        self._data.append(breakdown["data"])
        self._tokens += tokens
        self._seconds += step_seconds
        self.memory.sample()
        if step % self._every_steps and step != self._last_step:
            return {}
        num_steps = len(self._own)
        mine = self._take(step)
        rates = throughput(self._tokens, self._seconds, self._runtime.world_size, self._expected, num_steps=num_steps)
        self._tokens, self._seconds = 0, 0.0
        everyone: list[Any] | None = [None] * self._runtime.world_size if self._runtime.is_first else None
        dist.gather_object(mine, everyone, dst=0, group=self._runtime.control_group)
        if everyone is None:
            return {}
        found = summary(step, everyone, judges=num_steps >= min(LEAST_STEPS, self._every_steps))
        found["peak_bytes"]["planned"] = self._expected.planned_bytes
        return {"observed": {"throughput": rates, **found}}

    def _take(self, step: int) -> Figures:
        copies = self.copies.take()
        mine = Figures(
            host=socket.gethostname(),
            group=self._group,
            own_seconds=statistics.median(self._own),
            data_seconds=(percentile(self._data, 50), percentile(self._data, 99)),
            copy_seconds=(percentile(copies, 50), percentile(copies, 99)) if copies else None,
            peaks=self.memory.close_window(step),
            growth=self.memory.news_of_growth(),
            network=self._network.rates(),
            gpu=self._gpu.take() if self._gpu is not None else None,
        )
        self._own.clear()
        self._data.clear()
        return mine


def summary(step: int, ranks: Sequence[Figures], *, judges: bool = True) -> dict[str, Any]:
    """What the row says of all ranks' figures; says stragglers and leaks on stdout.

    `judges`: the window has enough steps to call a rank slow by them.
    """
    own = [rank.own_seconds for rank in ranks]
    hosts, groups = [rank.host for rank in ranks], [rank.group for rank in ranks]
    stragglers = find_stragglers(own, hosts, groups) if judges else []
    for straggler in stragglers:
        say(straggler.as_line(step))
    leaks = [
        (number, rank.host, name, grown) for number, rank in enumerate(ranks) for name, grown in rank.growth.items()
    ]
    for number, host, name, grown in leaks:
        say(
            f"leak step={step} rank={number} host={host} memory={name} mib_per_step={grown.bytes_per_step / 2**20:.4f}"
            f" mib={grown.total_bytes / 2**20:.1f} since_step={grown.first_step}"
        )
    copies = [rank.copy_seconds for rank in ranks if rank.copy_seconds is not None]
    return {
        "own_seconds": {"median": statistics.median(own), "max": max(own), "slowest_rank": own.index(max(own))},
        "stragglers": [asdict(straggler) for straggler in stragglers],
        "leaks": [
            {"rank": number, "host": host, "memory": name, **asdict(grown)} for number, host, name, grown in leaks
        ],
        "data_seconds": _worst([rank.data_seconds for rank in ranks]),
        "host_to_device_seconds": _worst(copies) if copies else None,
        "peak_bytes": {name: max(rank.peaks[name] for rank in ranks) for name in ranks[0].peaks},
        "network": _mean_of_hosts(ranks),
        "gpu": _of_gpus(ranks),
    }


def _of_gpus(ranks: Sequence[Figures]) -> dict[str, Any] | None:
    """Use is a mean of all GPUs, as a job's is; memory and clocks are of the worst one, which the others wait for."""
    gpus = [(number, rank.host, rank.gpu) for number, rank in enumerate(ranks) if rank.gpu is not None]
    if not gpus:
        return None
    used = [gpu.utilization for _, _, gpu in gpus if gpu.utilization is not None]
    held = [(gpu.held_back, number, host) for number, host, gpu in gpus if gpu.held_back is not None]
    worst, number, host = max(held, key=lambda one: one[0], default=(None, None, None))
    return {
        "utilization": statistics.fmean(used) if used else None,
        "memory_peak": max((gpu.memory_peak for _, _, gpu in gpus if gpu.memory_peak is not None), default=None),
        "held_back": worst,
        "held_back_rank": number if worst else None,
        "held_back_host": host if worst else None,
    }


def _mean_of_hosts(ranks: Sequence[Figures]) -> dict[str, float]:
    """Each rank of a host has read the same counters, at slightly different moments: one of them speaks for it."""
    hosts = {rank.host: rank.network for rank in ranks}.values()
    sent, received = (statistics.fmean(figures) for figures in zip(*hosts, strict=True))
    return {"sent_bytes_per_second": sent, "received_bytes_per_second": received}


def _worst(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of the rank that has it worst."""
    return {"p50": max(p50 for p50, _ in pairs), "p99": max(p99 for _, p99 in pairs)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: a value that was there."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
