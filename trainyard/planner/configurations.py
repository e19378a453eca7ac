"""One configuration of a job as a document: memory, time, whether it fits, and why it is not the chosen one."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

from trainyard.hardware import Instance
from trainyard.planner.candidates import complexity_of
from trainyard.planner.communication import fabric_of
from trainyard.planner.constants import GIB
from trainyard.planner.formulas import Formulas
from trainyard.planner.host_memory import SYSTEM_GIB, HostMemory, host_memory
from trainyard.planner.layout import Layout
from trainyard.planner.loading import loading_of
from trainyard.planner.memory import Memory
from trainyard.planner.reading import Machines
from trainyard.planner.resolve import num_steps
from trainyard.planner.results import Configuration, HostMemoryPlan, MemoryPlan, TimePlan, told_apart
from trainyard.spec.job import JobSpec, ParallelismSpec

DATA = "data"
"""In a step's breakdown, of jobs with images: what it waits for them."""

SAME_SPEED = 0.03
"""Step times closer than this are no reason to prefer one: of 417 pairs of layouts of one measured job whose estimates
lay so near, the one that was estimated to be faster was so in 48%, no better than a coin; of 499 that lay 3 to 6%
apart, in 65% (benchmarks/planner_accuracy.py counts them)."""

T = TypeVar("T")


def as_fast_simplest_first(
    found: Iterable[T], seconds: Callable[[T], float], split: Callable[[T], ParallelismSpec], gain: float = SAME_SPEED
) -> list[T]:
    """What no estimate can tell from the fastest (slower by up to `gain`): the simplest first, of these the fastest."""
    by_time = sorted(found, key=seconds)
    near = [item for item in by_time if seconds(item) <= seconds(by_time[0]) * (1 + gain)]
    return sorted(near, key=lambda item: complexity_of(split(item)))


def configuration(
    job: JobSpec, parallelism: ParallelismSpec, layout: Layout, machines: Machines, formulas: Formulas
) -> Configuration:
    """The layout's memory and time on the machines; no verdict yet."""
    use = formulas.memory(layout)
    host = host_of(job, layout, machines, formulas)
    machine = machines.instance
    available = machine.gpu.memory_gib if machine and machine.gpu else None
    return Configuration(
        layout=layout.words(),
        parallelism=parallelism,
        micro_batch_size=layout.micro_batch,
        gradient_accumulation_steps=layout.num_micro_batches,
        activation_checkpointing=layout.recompute,
        memory=memory_plan(use, available),
        host=host_plan(host, machines),
        time=_time_plan(job, layout, machines, formulas),
        fits=fits_both(use, host, machine),
        chosen=False,
        verdict="",
    )


def host_of(job: JobSpec, layout: Layout, machines: Machines, formulas: Formulas) -> HostMemory:
    """A host's own memory under the layout."""
    return host_memory(
        formulas.params,
        formulas.saved.params,
        layout,
        machines.processes_per_host,
        asynchronous_saves=job.checkpoint.asynchronous,
        bytes_per_saved=formulas.saved.bytes_per_param,
    )


def fits_both(use: Memory, host: HostMemory, machine: Instance | None) -> bool | None:
    """Whether GPU and host hold it; None where the machine isn't known."""
    if machine is None or machine.gpu is None:
        return None
    return use.needed <= machine.gpu.memory_gib * GIB and host.needed <= machine.memory_gib * GIB


def memory_plan(use: Memory, available_gib: float | None) -> MemoryPlan:
    """The document of a GPU's memory."""
    parts = {f"{name}_gib": value / GIB for name, value in use.at_peak.items()}
    parts["workspace_gib"] += (use.needed - use.margin - use.allocated) / GIB
    return MemoryPlan(**parts, margin_gib=use.margin / GIB, total_gib=use.needed / GIB, available_gib=available_gib)


def host_plan(host: HostMemory, machines: Machines) -> HostMemoryPlan:
    """The document of a host's memory."""
    parts = {f"{name}_gib": value / GIB for name, value in dataclasses.asdict(host).items()}
    total = host.needed / GIB
    return HostMemoryPlan(
        **parts,
        total_gib=total,
        rank_gib=(total - SYSTEM_GIB) / machines.processes_per_host,
        available_gib=machines.instance.memory_gib if machines.instance is not None else None,
    )


def _time_plan(job: JobSpec, layout: Layout, machines: Machines, formulas: Formulas) -> TimePlan | None:
    if machines.instance is None or machines.instance.gpu is None:
        return None
    device = machines.instance.gpu
    time = formulas.step(layout, device, fabric_of(machines.instance))
    spread = formulas.spread(layout, device)
    samples = layout.global_batch
    steps = num_steps(job)
    images = layout.micro_batch * layout.num_micro_batches
    reading = loading_of(job, machines, images_per_rank=images, step_seconds=time.total)
    total = time.total + (reading.exposed_seconds if reading else 0.0)
    waits = {DATA: reading.exposed_seconds} if reading else {}
    peak = device.peak_tflops(layout.precision) * 1e12 * layout.world_size
    return TimePlan(
        step_seconds=total,
        step_seconds_low=total / spread,
        step_seconds_high=total * spread,
        breakdown_seconds={**time.breakdown(), **waits},
        tokens_per_second=samples * formulas.units_per_sample / total,
        mfu=formulas.flops_per_sample * samples / total / peak,
        hours=steps * total / 3600 if steps is not None else None,
    )


def largest_part(use: MemoryPlan) -> str:
    """The category that takes most, with its GiB: "activations 52.0"."""
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    name = max(names, key=lambda part: getattr(use, f"{part}_gib"))
    return f"{name} {getattr(use, f'{name}_gib'):.1f}"


def does_not_fit(item: Configuration) -> str:
    """Why a configuration that doesn't fit doesn't: the GPU's memory, else the host's."""
    use, host = item.memory, item.host
    if use.available_gib is not None and use.total_gib > use.available_gib:
        need, room = told_apart(use.total_gib, use.available_gib, ("{:.1f}".format, "{:.2f}".format, "{:.3f}".format))
        return f"does not fit: {need} GiB of {room}; {largest_part(use)}"
    parts = {"processes": host.processes_gib, "copies of a save": host.checkpoint_gib, "offloaded": host.offloaded_gib}
    parts["buffers before a disk"] = host.disk_buffers_gib
    name = max(parts, key=lambda part: parts[part])
    need, have = f"{host.total_gib:.0f}", "?"
    if host.available_gib is not None:
        need, have = told_apart(host.total_gib, host.available_gib, ("{:.0f}".format, "{:.1f}".format, "{:.2f}".format))
    return f"does not fit the host: {need} GiB of {have}; {name} {parts[name]:.0f}"


def chosen_verdict(item: Configuration, reason: str) -> str:
    """Why the chosen one is chosen."""
    return f"{reason}, but {does_not_fit(item)}" if item.fits is False else f"chosen: {reason}"


def verdict_of(item: Configuration, chosen: Configuration) -> str:
    """Why another configuration of the same machines isn't the chosen one."""
    if item.fits is False:
        return does_not_fit(item)
    assert item.time is not None and chosen.time is not None
    ratio = item.time.step_seconds / chosen.time.step_seconds
    if -SAME_SPEED <= ratio - 1 < 0 and complexity_of(item.parallelism) > complexity_of(chosen.parallelism):
        return f"{1 - ratio:.1%} faster by this estimate, which can't tell so little; more complicated than the chosen"
    if abs(ratio - 1) < SAME_SPEED:
        return "as fast by this estimate, with another split"
    if ratio >= 1:
        return f"{ratio - 1:.0%} slower; {why_slower(item.time, chosen.time)}"
    return f"{1 - ratio:.0%} faster by this estimate; state it in parallelism to choose it"


def why_slower(time: TimePlan, chosen: TimePlan) -> str:
    """What takes most of the difference: "bubble takes 12% of a step", or the computing itself, the narrower products
    of a smaller micro-batch say."""
    ours, theirs = _parts(time), _parts(chosen)
    name = max(ours, key=lambda part: ours[part] - theirs.get(part, 0.0))
    if name == COMPUTING:
        return f"{COMPUTING} takes {ours[name] / theirs[name] - 1:.0%} longer"
    return f"{name.replace('_', ' ')} takes {ours[name] / time.step_seconds:.0%} of a step"


COMPUTING = "computing"


def _parts(time: TimePlan) -> dict[str, float]:
    """Seconds of a step by what they go to; forward and backward are one."""
    parts = dict(time.breakdown_seconds)
    return {COMPUTING: parts.pop("forward", 0.0) + parts.pop("backward", 0.0), **parts}
