"""Memory, time and FLOPs of a job by what dry runs of its ranks counted: beside a model's formulas, or in their place.

A trace (`training_container/trainer/dry_run`) says what a rank holds at its peak, every product with its sizes, the
bytes that its other kernels move, and every message. What these take on a GPU and its links are the formulas' own
operators and constants (`operators`, `communication`, `step`); of the model's shapes nothing is asked here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.hardware import Gpu
from trainyard.planner.communication import (
    Fabric,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    group,
    send_seconds,
)
from trainyard.planner.constants import DEFAULT_MEMORY
from trainyard.planner.launches import queued
from trainyard.planner.layout import Layout, Precision
from trainyard.planner.memory import Memory, workspace_bytes
from trainyard.planner.muon import TF32_SHARE
from trainyard.planner.operators import Operators
from trainyard.planner.step import OnceAStep, Pass, StepTime, combined
from trainyard.planner.time_constants import DEFAULT_CONSTANTS, PRE_AMPERE, Constants
from trainyard.planner.trainer_layers import WIDEST_SHARED_HEAD
from trainyard.spec.job import ParallelismSpec

Trace = Mapping[str, Any]
"""What `python -m trainer.dry_run` prints of a rank."""

AXES = ("tensor", "context", "data_shard", "data_replicate", "pipeline")
"""Of the grid of ranks, from neighbours outwards: an axis' ranks lie as far apart as those before it are many."""

PEAK_PRECISIONS: Mapping[str, Precision] = {"float32": "fp32", "float64": "fp64"}
"""Of a product's type, where it isn't of 16 bits."""

SPREAD = 1.45
"""80% interval of a step's time, by factor: assumed, as of images."""


@dataclass(frozen=True)
class _Messages:
    """Seconds of a step's messages, before overlap."""

    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    sharding: float = 0.0
    gradients: float = 0.0
    update: float = 0.0


def traced_memory(trace: Trace, layout: Layout) -> Memory:
    """The rank's memory at its peak. What a trace doesn't see is added as the formulas do: workspaces, and beside the
    allocator what `Memory.needed` counts."""
    held = trace["memory_bytes"]
    return Memory(
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=held["optimizer"],
        activations=held["activations"] + held["temporaries"],
        logits=0.0,
        buffers=held["buffers"],
        workspace=workspace_bytes(layout),
        moving_error=DEFAULT_MEMORY.moving_error,
    )


def traced_step(
    traces: Sequence[Trace],
    parallelism: ParallelismSpec,
    layout: Layout,
    device: Gpu,
    links: Fabric,
    constants: Constants = DEFAULT_CONSTANTS,
) -> StepTime:
    """One optimizer step, by the traces of all ranks along the pipeline, or of its first and its last one, in that
    order."""
    operators = _Traced(traces, layout, device, constants)
    said = [_messages(trace, parallelism, links, layout) for trace in traces]
    with_head = _place_of_head(len(traces), layout)
    passes = [
        (
            operators.one_pass(trace, messages),
            1 if index == with_head or len(traces) == layout.pipeline else layout.pipeline - 1,
        )
        for index, (trace, messages) in enumerate(zip(traces, said, strict=True))
    ]
    # Of a pipeline's sends those stand alone that fill and drain it, and a share of further stages'.
    alone = layout.pipeline - 1 + constants.send_exposed * layout.num_micro_batches * (layout.chunks - 1)
    once = OnceAStep(
        gradients=max(messages.gradients for messages in said),
        waited=0.0,
        parameters=0.0,
        pipeline=2 * alone * max(_longest_send(trace, parallelism, links) for trace in traces),
        optimizer=max(
            operators.phase_seconds(trace, "optimizer") + messages.update
            for trace, messages in zip(traces, said, strict=True)
        ),
    )
    return combined(passes, once, layout, links, constants)


def traced_flops(traces: Sequence[Trace], layout: Layout) -> float:
    """FLOPs of one step's products and attention on all ranks, forward and backward: recomputation is not counted, of
    causal scores all are, and a backward attention kernel counts as twice its forward one."""
    return _of_all([_flops(trace) for trace in traces], layout)


def active_params(traces: Sequence[Trace], layout: Layout, *, is_frozen: bool) -> int:
    """Weights that a token passes through, by products with weights: 6 FLOPs each a token, 4 where they are frozen."""
    ranks = [
        sum(_product_flops(each) for each in trace["work"]["products"] if each["of_weights"] and _counts(each))
        for trace in traces
    ]
    tokens = layout.global_batch * layout.sequence_length
    return round(_of_all(ranks, layout) / tokens / (4 if is_frozen else 6))


def _place_of_head(count: int, layout: Layout) -> int:
    """Which of the first and the last rank has the head: zero_bubble's first has both ends."""
    return 0 if layout.schedule == "zero_bubble" else count - 1


def _of_all(ranks: Sequence[float], layout: Layout) -> float:
    """The sum over all ranks, of a pipeline's first and last one's values: one stage has the head, all others are as
    the one without."""
    if len(ranks) == 1:
        return ranks[0] * layout.world_size
    with_head = _place_of_head(len(ranks), layout)
    mean = (ranks[with_head] + (layout.pipeline - 1) * ranks[1 - with_head]) / layout.pipeline
    return mean * layout.world_size


def _counts(kind: Mapping[str, Any]) -> bool:
    return kind["phase"] in ("forward", "backward")


def _product_flops(each: Mapping[str, Any]) -> float:
    return 2.0 * float(each["rows"] * each["columns"] * each["depth"] * each["count"])


def _attention_flops(each: Mapping[str, Any]) -> float:
    """Of all scores and of both of their products, one kernel forward."""
    pairs = each["sequences"] * each["heads"] * each["queries"] * each["keys"]
    return 2.0 * float(pairs * (each["head_dim"] + each["value_dim"]))


def _flops(trace: Trace) -> float:
    work = trace["work"]
    products = sum(_product_flops(each) for each in work["products"] if _counts(each))
    passes = {"forward": 1.0, "backward": 2.0}
    attention = (_attention_flops(each) * each["count"] * passes.get(each["phase"], 0.0) for each in work["attention"])
    return products + float(sum(attention))


class _Traced(Operators):
    """What traces counted, in seconds of a GPU."""

    def __init__(self, traces: Sequence[Trace], layout: Layout, device: Gpu, constants: Constants) -> None:
        super().__init__(layout, device, constants)
        widths = {each["head_dim"] for trace in traces for each in trace["work"]["attention"]}
        # Of the model: a pipeline's stage may have those of one alone.
        self._has_widths = len(widths) > 1

    def one_pass(self, trace: Trace, messages: _Messages) -> Pass:
        """A micro-batch's share of the step; what is sent once a step stays whole (`Layout.gathers_once`)."""
        count = self.layout.num_micro_batches
        forward = self.phase_seconds(trace, "forward")
        # What is computed again lies between what is differentiated.
        phases = ("backward", "recompute")
        launches = [trace["work"]["kernels"][phase] for phase in phases]
        backward, again = queued([self._on_gpu(trace, phase) for phase in phases], launches, self.constants)
        return Pass(
            forward=forward / count,
            backward=backward / count,
            recompute=again / count,
            tensor=messages.tensor * self.constants.tensor_exposed_torch / count,
            expert=messages.expert * self.constants.expert_exposed * self.constants.imbalance / count,
            context=messages.context / count,
            sharding=messages.sharding if self.layout.gathers_once else messages.sharding / count,
        )

    def phase_seconds(self, trace: Trace, phase: str) -> float:
        """A whole step's: the GPU's own work, or the host's launching where that takes longer."""
        return queued([self._on_gpu(trace, phase)], [trace["work"]["kernels"][phase]], self.constants)[0]

    def _on_gpu(self, trace: Trace, phase: str) -> float:
        work = trace["work"]
        on_gpu: float = sum(
            self._product_seconds(each) * each["count"] for each in work["products"] if each["phase"] == phase
        )
        on_gpu += sum(
            self._attention_seconds(each) * each["count"] for each in work["attention"] if each["phase"] == phase
        )
        return on_gpu + float(work["moved_bytes"][phase]) / self.bytes_per_second

    def _product_seconds(self, each: Mapping[str, Any]) -> float:
        precision = PEAK_PRECISIONS.get(each["dtype"])
        operators: Operators = self
        if precision is not None and precision != self.layout.precision:
            wider = dataclasses.replace(self.layout, precision=precision)
            operators = Operators(wider, self.device, self.constants)
        seconds = operators.product(each["rows"], each["columns"], each["depth"], each["groups"])
        if precision == "fp32" and each["phase"] == "optimizer" and operators is not self:
            # Muon's, of a narrower job: by TF32, where there is one.
            tf32 = 0.0 if self.device.generation in PRE_AMPERE else TF32_SHARE * self.wide
            seconds *= operators.wide / max(operators.wide, tf32)
        lengths = (each["columns"], each["depth"], each["rows"] if each["phase"] == "backward" else 0)
        is_aligned = all(length * operators.layout.element_bytes % 16 == 0 for length in lengths)
        return seconds if is_aligned else seconds / self.constants.unaligned_speed

    def _attention_seconds(self, each: Mapping[str, Any]) -> float:
        # A dry run tells documents by no mask, having no positions, and windows by one, where a GPU may tell them to a
        # kernel. What the real run has is known.
        masks, has_two_widths = self.layout.masks, each["head_dim"] != each["value_dim"]
        is_refused = has_two_widths or each["drops"] or self._has_widths
        is_masked = masks == "always" or (masks == "documents" and is_refused)
        is_told = each["is_efficient"] and not has_two_widths and masks in ("never", "documents") and not is_masked
        flops = _attention_flops(each)
        if each["is_causal"] and each["queries"] < each["keys"]:
            # The last queries of a sequence, of context parallelism: they see all but half of their own square.
            flops *= 2 - each["queries"] / each["keys"]
        seconds = self.fused_attention(
            flops,
            each["head_dim"],
            is_causal=(each["is_causal"] or is_told) and not is_masked,
            efficient=(each["is_efficient"] and not is_told)
            or (each["is_causal"] and is_masked)
            or each["head_dim"] > WIDEST_SHARED_HEAD,
        )
        return seconds * (2.5 if each["phase"] == "backward" else 1.0)


def _messages(trace: Trace, parallelism: ParallelismSpec, links: Fabric, layout: Layout) -> _Messages:
    """The seconds of a rank's messages, by what they are for."""
    found: dict[str, float] = {}
    for message in trace["messages"]:
        purpose = _purpose(message, has_experts=layout.expert > 1)
        if purpose is not None:
            seconds = message["count"] * _message_seconds(message, parallelism, links)
            found[purpose] = found.get(purpose, 0.0) + seconds
    return _Messages(**found)


def _purpose(message: Mapping[str, Any], *, has_experts: bool) -> str | None:
    """The field of `_Messages` that a kind of message counts in; None: its other end is counted, or the pipeline's."""
    name, axis, purpose = message["name"], message["axis"], message["purpose"]
    if name == "receive" or (name == "send" and axis == "pipeline"):
        return None
    if purpose == "update":
        return "update"
    if purpose == "weights":
        return "sharding" if name in ("all_gather", "reduce_scatter") else "gradients"
    if name == "all_to_all" and has_experts:
        return "expert"
    return str(axis) if axis in ("tensor", "context") else "gradients"


def _longest_send(trace: Trace, parallelism: ParallelismSpec, links: Fabric) -> float:
    """Seconds of one message to a pipeline's next rank."""
    sends = [each for each in trace["messages"] if each["name"] == "send" and each["axis"] == "pipeline"]
    return max((_message_seconds(each, parallelism, links) for each in sends), default=0.0)


def _message_seconds(message: Mapping[str, Any], parallelism: ParallelismSpec, links: Fabric) -> float:
    """One of them, of the mean size."""
    bytes_ = message["bytes"] / message["count"]
    axes = message["axis"].split(" x ")
    nearest = min(AXES.index(axis) for axis in axes)
    stride = 1
    for axis in AXES[:nearest]:
        stride *= getattr(parallelism, axis)
    if message["name"] == "send":
        return send_seconds(bytes_, between_nodes=stride >= links.gpus_per_node, links=links)
    members = group(message["ranks"], stride, links.gpus_per_node)
    kinds = {"all_reduce": all_reduce_seconds, "all_to_all": all_to_all_seconds}
    return kinds.get(message["name"], all_gather_seconds)(bytes_, members, links)
