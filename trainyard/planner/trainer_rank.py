"""A rank of our own trainer in the middle of a step: what it holds whatever the moment, in closed form.

What layers keep of the micro-batches in flight, the weights that are gathered or cast, and the gradients that are
there: of these, and of what each moment has of its own, `trainer_memory` makes the moments that can be a step's worst.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainyard.planner.adapters import adapter_params
from trainyard.planner.fsdp_units import Units, unit_ends
from trainyard.planner.layout import Layout
from trainyard.planner.once import once
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import (
    Stage,
    StageParams,
    cuts_experts_inside,
    expert_slots,
    num_stages,
    num_vocabulary_matrices,
)
from trainyard.planner.trainer_layers import NORM_BACKWARD_BYTES, TrainerLayers, layers_of


class Moment(NamedTuple):
    """Bytes beside the training state."""

    activations: float
    """With gradients of activations."""
    loss: float
    buffers: float
    """Gathered and cast weights, gradients on their way, what pipelines have received."""
    gradients: float = 0.0
    """This rank's own that are there, where they come late (`gradients_come_late`); else they are the state's."""

    @property
    def total(self) -> float:
        """By which moments are compared."""
        return self.activations + self.loss + self.buffers + self.gradients


def gradients_come_late(layout: Layout) -> bool:
    """Whether a rank's own gradients are not there from a step's beginning, or its first micro-batch, on: they come to
    be in the one backward pass of a step, but in DDP's buckets, which stay; and in a pipeline at its end, when FSDP
    cuts the sums of whole ones, which are buffers."""
    if layout.method != "full" or layout.engine != "torch":
        return False
    return layout.pipeline > 1 or (layout.num_micro_batches == 1 and not (layout.is_uncut and layout.data_parallel > 1))


@dataclass(frozen=True)
class PassesDone:
    """How far a pipeline's rank is when it may hold most."""

    in_flight: float
    """As `Stage.in_flight`."""
    summed: float
    """Of its stages' gradients, the share whose sums are there: none before the first backward pass is through."""
    is_all_forward: bool
    """Every micro-batch has gone forward."""
    has_losses: bool
    """The last stage's loss of some micro-batch has not gone back yet."""


def passes_done(layout: Layout, stage: Stage) -> list[PassesDone]:
    """Before a rank's first backward pass, after it, and after the first one of its earlier stage, if it has two: of
    these the later one goes back for as many micro-batches as are taken in turn before the earlier one does."""
    ranks, count = layout.pipeline, layout.num_micro_batches
    each = num_stages(layout)
    passes, all_passes = stage.in_flight * each, count * each
    turn = count // max(count // ranks, 1) if layout.chunks > 1 else 1
    found = []
    for summed, num_gone in [(0.0, 0), (1.0, 1)] if each == 1 else [(0.0, 0), (0.5, 1), (1.0, turn + 1)]:
        left, num_losses = all_passes - num_gone, count - min(num_gone, turn)
        if left > 0:
            found.append(PassesDone(min(passes, left) / each, summed, left < passes, num_losses > 0))
    return found


class TrainerRank:
    """One rank of a stage. A layer's `number` counts from the stage's end; parameters are of one tensor rank."""

    shape: ModelShape
    layout: Layout
    stage: Stage
    done: PassesDone | None
    """How far a pipeline's rank is; None: there is no pipeline."""
    in_flight: float
    """Micro-batches, at this moment, as `Stage.in_flight`."""
    kept_in_all: float
    """What all layers keep of the micro-batches in flight."""
    unreached: float
    """Adapters: of that, what is not kept in front of a model's first one, which no gradient reaches."""
    layers: TrainerLayers
    """The stage's; where heads are of two widths those of one kind, while one of its layers is asked (`of_kind`)."""
    mean: TrainerLayers
    """All of the stage's."""
    params: float
    """Of the stage, before data-parallel sharding."""
    root: float
    """Parameters of the stage's ends: embedding, learned positions, head."""
    is_tied: bool
    """The ends have one matrix, on this rank."""
    dense: float
    """Parameters of a layer without experts."""
    experts: float
    """Of a layer with experts these, and what FSDP pads them with."""
    rest: float
    """And all the rest of it, which is a unit of its own where experts are spread."""
    routed_layers: int
    """Layers with experts: the last so many."""
    is_replicated: bool
    """Every rank has all weights as they are."""
    is_sharded: bool
    """FSDP's are gathered for their use."""
    gathers_frozen: bool
    """Weights are gathered though they be frozen: those that no rank shares are read where they are then."""
    gathers_experts: bool
    """The same of experts that are spread."""
    gathered_root: float
    """Of `root`, what FSDP gathers."""
    units: Units

    def __init__(self, shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> None:
        self.shape, self.layout, self.stage = shape, layout, stage
        self.layers = self.mean = layers_of(shape, layout)
        vocabulary = self.layers.head_weight
        matrices = num_vocabulary_matrices(shape, layout, stage)
        self.is_tied = shape.tied_embeddings and matrices == 1
        self.root = vocabulary * matrices + shape.learned_positions * shape.hidden * stage.embedding
        self.dense = max(params.total - self.root, 0.0) / max(stage.layers, 1)
        self.routed_layers = round(stage.layers * shape.moe_layers / shape.layers)
        # Of a layer with experts: they, and all the rest, which are units of their own where experts are spread.
        slots = expert_slots(shape, layout) / max(shape.experts, 1)
        self.experts = shape.expert_params / layout.expert_split * slots if shape.moe_layers else 0.0
        norms = shape.norms_per_layer * shape.norm_params
        self.rest = (shape.mixing_params + shape.moe_dense_params) / layout.tensor + norms
        if shape.moe_layers:
            self.dense = (shape.mixing_params + shape.mlp_params(shape.ffn)) / layout.tensor + norms
        self.params = params.total
        self.is_replicated = layout.is_uncut
        self.is_sharded = layout.engine == "torch" and not self.is_replicated
        self.gathers_frozen = layout.method == "full" or layout.shard_degree > 1
        self.gathered_root = self.root * self.gathers_frozen
        self.gathers_experts = layout.method == "full" or layout.expert_shard_degree > 1
        self.units = self._taken_apart()
        self._go(None, stage.in_flight)

    def at(self, done: PassesDone) -> "TrainerRank":
        """The same where a pipeline's rank is so far in its passes."""
        found = self._copied()
        found._go(done, done.in_flight)
        return found

    def _copied(self) -> "TrainerRank":
        """Without what was reckoned of it."""
        found = object.__new__(TrainerRank)
        found.__dict__.update((name, value) for name, value in self.__dict__.items() if name not in _RECKONED)
        return found

    def of_kind(self, number: int) -> "TrainerRank":
        """The same where a layer is that `number`th from the stage's end, of those whose heads are of two widths."""
        if not self.shape.wide_layers:
            return self
        found = self._copied()
        found.layers = self._kind_of(number)
        return found

    def _kind_of(self, number: int) -> TrainerLayers:
        narrow, wide = (kind for _, kind in self.mean.kinds)
        return wide if number in self.stage.wide else narrow

    def _go(self, done: PassesDone | None, in_flight: float) -> None:
        """To a moment: `done` as it is then."""
        self.done, self.in_flight = done, in_flight
        self.unreached = self.mean.unreached_bytes * in_flight * self.stage.embedding
        self.kept_in_all = self.stage.layers * in_flight * self.mean.kept_bytes - self.unreached

    def _taken_apart(self) -> Units:
        """The layers as FSDP gathers them."""
        shape, layout, stage = self.shape, self.layout, self.stage
        least = layout.unit_parameters
        ends = None
        # Adapters are gathered beside what they adapt, in the type of products.
        adapters = self.adapters(1, has_head=False) if layout.method != "full" else 0.0
        adapters *= self.layers.element / self.layers.weight_element
        if least is not None and layout.pipeline == 1:
            # Units are counted in whole layers' parameters, as they are stored, whatever ranks hold of them.
            stored = self.layers.weight_element if layout.method == "qlora" else 1.0
            added = adapter_params(shape, layout, 1, has_head=False) if layout.method != "full" else 0.0
            dense = self.dense * layout.tensor * stored + added
            routed = (self.rest * layout.tensor + shape.expert_params) * stored + added
            num_dense = stage.layers - self.routed_layers
            ends = unit_ends([dense] * num_dense + [routed] * self.routed_layers, least)
        return Units(
            num_layers=stage.layers,
            num_routed=self.routed_layers,
            dense=self.dense * self.gathers_frozen + adapters,
            routed=(self.rest + (0.0 if self.layers.is_spread else self.experts)) * self.gathers_frozen + adapters,
            ends=ends,
            num_ahead=layout.units_ahead,
            keeps_gathered=layout.keeps_gathered,
            copied=self.experts if cuts_experts_inside(shape, layout) else 0.0,
        )

    # What is kept of micro-batches in flight.

    def kept_before(self, number: int) -> float:
        """What the layers before the `number`th keep, and the stage's ends."""
        left = self.kept_in_all + self.unreached - self._kept_of_last(number + 1)
        return max(left, 0.0) - self.unreached + self.ends

    def _kept_of_last(self, count: int) -> float:
        """What the last so many layers keep, those with experts of them first."""
        routed = min(count, self.routed_layers)
        if not self.shape.wide_layers:
            return routed * self.mean.kept_routed_bytes + (count - routed) * self.mean.kept_bytes
        kinds = [self._kind_of(number) for number in range(count)]
        return sum(kind.kept_routed_bytes for kind in kinds[:routed]) + sum(kind.kept_bytes for kind in kinds[routed:])

    def kept_below(self, number: int) -> float:
        layers = self.layers
        # A layer that is computed again has its input beside the float32 copy that an RMS norm makes of it.
        has_copy = layers.has_norm_copies and self.layout.recompute != "none"
        return self.kept_before(number) + layers.input_bytes * has_copy

    def others(self, number: int) -> float:
        """What layers before the `number`th keep, and what a pipeline's rank keeps of what it gave."""
        return self.kept_below(number) + self._beyond_mean(number)

    def _beyond_mean(self, number: int) -> float:
        """What that layer and those before it keep beyond the mean of all layers, by which they are reckoned, where
        some have a delta rule. Of layers that are computed again any may be one of them; else each n-th from the end
        has attention (Qwen's default is each fourth, the last one of them)."""
        shape, excess = self.shape, self.layers.delta_excess_bytes
        if not excess or not shape.num_attentions or self.layout.recompute != "none":
            return max(excess, 0.0)
        every = max(shape.layers // shape.num_attentions, 1)
        num_deltas = sum(index % every != 0 for index in range(number))
        less = excess * shape.delta_layers / shape.num_attentions
        return (number - num_deltas) * less - num_deltas * excess

    @once
    def ends(self) -> float:
        """What a stage of a pipeline keeps of what it gives, until that micro-batch's backward pass; and its mask."""
        layout, layers = self.layout, self.mean
        if layout.pipeline == 1:
            return layers.mask_bytes + layers.rotation_bytes
        passes = self.in_flight * layout.chunks
        sent = passes - (1 if self.stage.head else 0)
        split = passes * layers.input_bytes if layout.tensor > 1 and layout.recompute == "selective" else 0.0
        # Of other schedules each loss is followed by its own backward pass.
        waiting = (self.in_flight - 1) * self.stage.head * (layout.schedule == "gpipe")
        # Each stage makes its own.
        masks = math.ceil(self.in_flight * num_stages(layout)) * (layers.mask_bytes + layers.rotation_bytes)
        return max(sent, 0.0) * layers.whole_hidden_bytes + split + masks + waiting * layers.kept_end_bytes

    @once
    def received(self) -> float:
        """What a pipeline's rank has received of micro-batches in flight, and one gradient."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        passes = self.in_flight * layout.chunks
        if self.stage.embedding:
            passes = passes * (layout.chunks - 1) / (2 * layout.chunks)
        layers = self.layers
        if layout.tensor == 1 and (layers.norm == "layer" or layout.recompute != "none"):
            passes = 0  # what a stage's first layer keeps is what was received
        return (passes + (0 if self.stage.head and layout.chunks == 1 else 1)) * layers.whole_hidden_bytes

    @once
    def above(self) -> float:
        """The gradient that comes to a layer from above."""
        layers = self.layers
        above = layers.split_hidden * layers.residual_element
        return above + (layers.whole_hidden_bytes if self.layout.tensor > 1 else 0.0)

    # Weights, and gradients of weights.

    def weights(self, gathered: float, cast: float | None = None) -> float:
        """Weights that are gathered, so many of layers, or cast by autocast: so many, if it isn't all of them."""
        layers, layout = self.layers, self.layout
        is_trained = layout.method == "full"
        if self.is_replicated:
            if not layers.is_autocast:
                return 0.0
            if cast is None:
                cast = self.params - self.root + layers.head_weight * self.stage.head
            return layers.element * (cast if is_trained else self.adapters(self.stage.layers, has_head=self.stage.head))
        if not self.is_sharded:
            return 0.0
        if layout.pipeline > 1:
            return self._gathered_for_all
        return self.gathered_root * layers.element + gathered * layers.weight_element

    @once
    def _gathered_for_all(self) -> float:
        """In a pipeline: once for all micro-batches, with the sums of gradients; of one rank they are copied, too, but
        what is frozen."""
        layers = self.layers
        experts = self.experts * self.routed_layers * layers.is_spread
        whole = self.root * layers.element + (self.params - self.root - experts) * layers.weight_element
        experts *= layers.weight_element
        if self.layout.method != "full":
            adapters = self.adapters(self.stage.layers, has_head=self.stage.head) * layers.element
            return whole * self.gathers_frozen + experts * self.gathers_experts + adapters
        return whole + experts + self.summed() * layers.sum_element

    def adapters(self, num_layers: int, *, has_head: bool) -> float:
        split = self.layout.tensor
        return adapter_params(self.shape, self.layout, num_layers, has_head=has_head, split=split)

    def last_gathered(self) -> float:
        """Of the layer above, what FSDP gathered it into stays until the next one is: of spread experts their own."""
        if not self.layers.is_spread:
            return self.units.of(0)
        return self.experts if self.layout.expert_shard_degree > 1 else 0.0

    @once
    def mlp_weights(self) -> float:
        """Of a layer's parameters, those of its feed-forward block."""
        shape = self.shape
        dense = max(shape.num_mlps, 1) if shape.moe_layers else shape.layers
        block = shape.mlp_params(shape.ffn) * shape.num_mlps / dense / self.layout.tensor
        return min(block, self.dense)

    @property
    def last_share(self) -> float:
        """Of the experts' weights, the share of their last product."""
        return 1 / 3 if self.shape.gated_mlp else 1 / 2

    @property
    def _largest_weight(self) -> float:
        """Elements of it, but for the ends': experts' gate and up are one, others' are two."""
        share = 1 - self.last_share
        block = self.mlp_weights * (share / 2 if self.shape.gated_mlp else share)
        return max(self.experts * share, block * (self.routed_layers < self.stage.layers))

    def whole(self, number: int) -> float:
        """Parameters of the layer that is `number`th from the stage's end."""
        return self.experts + self.rest if number < self.routed_layers else self.dense

    def summed(self) -> float:
        """Of a pipeline's rank the parameters whose gradients' sums are there: its later stage's have the head's."""
        share = 1.0 if self.done is None else self.done.summed
        ends = self.root if share == 1 else self.layers.head_weight * self.stage.head * (share > 0)
        return (self.params - self.root) * share + ends

    @property
    def makes_sums(self) -> bool:
        """In the first backward pass of a pipeline's rank the sums of its gradients come to be, layer by layer."""
        return self.layout.method == "full" and self.done is not None and not self.done.summed

    @once
    def makes_gradients_once(self) -> bool:
        """A rank's own gradients come to be in the one backward pass of a step."""
        return gradients_come_late(self.layout) and self.layout.pipeline == 1

    def own_gradients(self, num_layers: float) -> float:
        """This rank's part of the gradients of the last so many layers, where they come late; in one process of the
        head, too, unless that is tied."""
        layout = self.layout
        if not self.makes_gradients_once:
            return 0.0
        routed = min(num_layers, self.routed_layers)
        dense = routed * self.rest + (num_layers - routed) * self.dense
        if not self.is_sharded:
            dense += self.layers.head_weight * (self.stage.head and not self.is_tied)
        each = self.layers.sum_element
        return each * (routed * self.experts / layout.expert_shard_degree + dense / layout.shard_degree)

    def weights_and_gradients(self, number: int, made: float, before: float) -> float:
        """In a backward pass: this layer and the next, the gradients that it made, those of the one `before` on their
        way, and the head's."""
        layers, layout = self.layers, self.layout
        head = layers.head_weight * self.stage.head
        if layout.pipeline > 1:
            made = (self.units.size(0, number) + head) * self.makes_sums
            return self.weights(0.0) + made * layers.sum_element
        # Of layers that are computed again, autocast has forgotten all but the one; else those that have gone back.
        cast = self.whole(number)
        if layout.recompute == "none":
            done = min(number, self.routed_layers)
            gone = done * (self.experts + self.rest) + (number - done) * self.dense
            cast = self.params - self.root - gone
        found = self.weights(self.units.in_backward(number), cast)
        if layout.method != "full":
            return found
        if not self.is_sharded:
            # They are the rank's own at once, but for a tied head's: that waits for the embedding's.
            waits = self.is_tied and layout.engine == "torch" and self.is_replicated
            return found + head * layers.sum_element * waits
        made += self.units.made_above(number)
        return found + (made + head) * layers.element + before * layers.sum_element

    def adding(self, made: float) -> float:
        """Bytes of a weight's gradient that is about to be added to its sum, where every rank has whole ones: under
        autocast it is widened first. 0 where it becomes the sum."""
        if self.layout.method != "full" or not self.is_replicated or self.makes_gradients_once:
            return 0.0
        return made * (self.layers.element + 4 if self.layers.is_autocast else self.layers.element)

    # Moments of every layer.

    def moment(self, activations: float, buffers: float, made: float, gradients: float) -> Moment:
        """`made`: weights of which the backward pass has just made gradients; a pipeline adds them up afterwards, but
        those of the sums' own type one by one; and in one process they are the rank's own."""
        if self.layout.pipeline > 1 and self.layout.method == "full":
            if self.layers.element >= 4 and self.done is not None and self.done.summed == 1:
                made = min(made, self._largest_weight)
            activations += made * self.layers.element * (self.layout.schedule != "zero_bubble")
        if self.makes_gradients_once and not self.is_sharded:
            gradients += made * self.layers.sum_element
        return Moment(activations, 0.0, buffers + self.received, gradients)

    def in_norms(self, number: int, others: float, left: float, made: float) -> Iterator[Moment]:
        """The backward pass of both norms, of a layer of which so much is `left` beside what `others` keep; `made` as
        in `moment`."""
        layers, above = self.layers, self.above
        gradients = self.own_gradients(self.units.num_reduced(number))
        before = self.units.above(number)
        norm = layers.split_hidden * self.norm_bytes + above
        second = left - layers.mlp_norm_output_bytes + norm
        yield self.moment(others + second, self.weights_and_gradients(number, made, before), made, gradients)
        # All of a layer's gradients are there from the last of the products that read the first norm's output on.
        first, unit = layers.norm_input_bytes + norm, self.whole(number)
        first = max(first, layers.last_input_bytes + layers.input_bytes)  # beside the gradient of the residual
        yield self.moment(others + first, self.weights_and_gradients(number, unit, before), unit, gradients)

    @once
    def norm_bytes(self) -> float:
        kind, element = self.layers.half_norm, self.layers.residual_element
        return {"layer": 2 * element, "layer_fp32": 8}.get(kind, NORM_BACKWARD_BYTES)


_RECKONED = frozenset(name for name, value in vars(TrainerRank).items() if isinstance(value, once))
"""Of a rank, what it reckons of the rest when it is asked."""
