"""How the parts of a step come together: overlap, the pipeline's rhythm and bubble, what happens once.

Bubble of one-forward-one-backward schedules: (p-1)/(m v) of the ideal time (Narayanan et al., arXiv:2104.04473,
section 2.2).
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.planner.communication import Fabric
from trainyard.planner.layout import Layout
from trainyard.planner.time_constants import EARLY, WAITED_UNTIL, Constants


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank, by what they go into; they add up to `total`."""

    forward: float
    backward: float
    recompute: float
    tensor_communication: float
    data_communication: float
    pipeline_communication: float
    expert_communication: float
    context_communication: float
    """Keys and values of context parallelism, beyond the attention that hides them."""
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """The step."""
        return sum(self.breakdown().values())

    @property
    def communication(self) -> float:
        """Exposed communication of every kind."""
        return (
            self.tensor_communication
            + self.data_communication
            + self.pipeline_communication
            + self.expert_communication
            + self.context_communication
        )

    def breakdown(self) -> dict[str, float]:
        """{what: seconds}."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch through one pipeline rank."""

    forward: float
    backward: float
    recompute: float
    tensor: float
    expert: float
    context: float
    sharding: float
    """Of parameter gathering and gradient scattering (ZeRO-3), before overlap."""

    @property
    def compute(self) -> float:
        """The GPU's own work."""
        return self.forward + self.backward + self.recompute

    @property
    def occupied(self) -> float:
        """Computing, and the communication that stands alone in every pass."""
        return self.compute + self.tensor + self.expert + self.context


@dataclass(frozen=True)
class OnceAStep:
    """Seconds of what happens once, whatever the number of micro-batches, before overlap."""

    gradients: float
    """Replicated ones' traffic: DDP, ZeRO-1 and -2, copies of FSDP groups."""
    waited: float
    """Of that, what no backward pass hides."""
    parameters: float
    """Updated ones, on their way back."""
    pipeline: float
    """Sends between stages that stand alone."""
    optimizer: float


def combined(
    passes: Sequence[tuple[Pass, int]], once: OnceAStep, layout: Layout, links: Fabric, constants: Constants
) -> StepTime:
    """One optimizer step, of a micro-batch's pass through each kind of pipeline rank and the number of these."""
    # The slowest stage sets the rhythm of a full pipeline.
    slowest = max((item for item, _ in passes), key=lambda item: item.occupied + item.sharding)
    count = layout.num_micro_batches
    sharding = 0.0
    if not layout.gathers_once:
        sharding = sharding_beyond(slowest.sharding, slowest.compute, layout, constants) * count
    rhythm = slowest.occupied + sharding / count
    bubble = 0.0
    if layout.pipeline > 1:
        # A pipeline fills and drains through the other stages.
        others = sum(number * item.occupied for item, number in passes) - slowest.occupied
        bubble = bubble_passes(layout) * (others / (layout.pipeline - 1) + sharding / count)
    lost = jitter(layout, links, constants)
    exposed = _exposed_once(once, slowest, layout, constants)
    return StepTime(
        forward=slowest.forward * count,
        backward=slowest.backward * count,
        recompute=slowest.recompute * count,
        tensor_communication=slowest.tensor * count,
        data_communication=sharding + exposed + lost * (rhythm * count + bubble),
        pipeline_communication=once.pipeline,
        expert_communication=slowest.expert * count,
        context_communication=slowest.context * count,
        bubble=bubble,
        optimizer=once.optimizer,
    )


def sharding_beyond(sharding: float, compute: float, layout: Layout, constants: Constants) -> float:
    """Of what a pass gathers and scatters, the seconds that stand alone beside so many of computing."""
    # Without overlap, DeepSpeed's gatherings and reductions lie on the stream that computes.
    waits = layout.engine == "deepspeed" and not layout.zero_sizes.overlaps
    hidden = 0.0 if waits else _data_overlap(layout, constants) * compute
    return _beyond(sharding, hidden, constants.sharding_exposed)


def _exposed_once(once: OnceAStep, slowest: Pass, layout: Layout, constants: Constants) -> float:
    """Of replicated gradients and updated parameters, what stands alone.

    They travel once a step, behind the backward pass of the last micro-batch (or of each one); what is updated comes
    back behind the forward pass of the first.
    """
    hides = _data_overlap(layout, constants)
    gathered = slowest.sharding if layout.gathers_once else 0.0
    behind = hides * slowest.backward if layout.zero_sizes.overlaps else 0.0
    exposed = once.waited + _beyond(once.gradients - once.waited + gathered, behind, constants.data_exposed)
    exposed *= layout.num_micro_batches if layout.reduces_each_micro_batch else 1
    return exposed + _beyond(once.parameters, hides * slowest.forward, constants.data_exposed)


def _data_overlap(layout: Layout, constants: Constants) -> float:
    """Share of the computing behind which gradients and parameters travel: none where each collective is waited for."""
    until = WAITED_UNTIL if layout.engine == "megatron" else EARLY
    return 0.0 if layout.year < until else constants.data_overlap


def _beyond(seconds: float, hidden: float, least: float) -> float:
    """Of traffic of gradients or parameters, what stands alone if computing hides so much: at least a share."""
    return max(least * seconds, seconds - hidden)


def jitter(layout: Layout, links: Fabric, constants: Constants) -> float:
    """Share of a step's passes that is lost by waiting for the slowest of many nodes."""
    return constants.jitter_per_doubling * math.log2(max(1.0, layout.world_size / links.gpus_per_node))


def bubble_passes(layout: Layout) -> float:
    """Idle time of a pipeline rank per step, in micro-batches' full passes."""
    if layout.pipeline == 1:
        return 0.0
    idle = (layout.pipeline - 1) / layout.chunks
    # Zero-bubble schedules fill most of it with weight gradients (arXiv:2401.10241: a third of 1F1B's remains).
    return idle / 3 if layout.schedule == "zero_bubble" else idle
