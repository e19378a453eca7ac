"""The worst moment of a step of our own trainer: what a rank holds beside its state, in closed form.

A step has a few moments that can be the worst: the loss, when all layers' activations are there; the backward pass of
a layer, with the gradients that it makes (in its feed-forward block, and in either norm), where FSDP has gathered two
layers and still sends the gradients of the one before; and the end, when the vocabulary's gradients are reduced. Which
one it is depends on the sizes, so each is reckoned, and the largest is the answer.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainyard.planner.adapters import adapter_params
from trainyard.planner.fsdp_units import Units, unit_ends
from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import (
    Stage,
    StageParams,
    cuts_experts_inside,
    expert_slots,
    num_stages,
    num_vocabulary_matrices,
    vocabulary_split,
)
from trainyard.planner.trainer_layers import NORM_BACKWARD_BYTES, TrainerLayers, layers_of

WEIGHING = 3
"""Tensors of a hidden state of every choice of a token, while the weighted sum of its experts is differentiated: what
comes to it, the experts' gradient, and the product that becomes the weights'."""

SPREAD_WEIGHING = 2
"""Of experts on other ranks, whose results lie in the order of the tokens, no more comes to it than the sum's own."""


@dataclass(frozen=True)
class Moment:
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


def worst_moment(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> Moment:
    """The moment of a step at which a rank of the stage holds most; of a stage without layers or head there is none."""
    moments = (moment for way in _ways(shape, layout, stage, params) for moment in way.moments())
    return max(moments, key=lambda moment: moment.total, default=Moment(0.0, 0.0, 0.0))


def least_moment(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> Moment:
    """What no worst moment of a stage with layers has less than, quickly there."""
    return max((way.least() for way in _ways(shape, layout, stage, params)), key=lambda moment: moment.total)


def _ways(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> list["_Step"]:
    """A rank as it goes forward and back, of a pipeline's where it may hold most."""
    step = _Step(shape, layout, stage, params)
    return [step.at(done) for done in _passes_done(layout, stage)] if layout.pipeline > 1 else [step]


def gradients_come_late(layout: Layout) -> bool:
    """Whether a rank's own gradients are not there from a step's beginning, or its first micro-batch, on: they come to
    be in the one backward pass of a step, but in DDP's buckets, which stay; and in a pipeline at its end, when FSDP
    cuts the sums of whole ones, which are buffers."""
    if layout.method != "full" or layout.engine != "torch":
        return False
    return layout.pipeline > 1 or (layout.num_micro_batches == 1 and not (layout.is_uncut and layout.data_parallel > 1))


@dataclass(frozen=True)
class _PassesDone:
    """How far a pipeline's rank is when it may hold most."""

    in_flight: float
    """As `Stage.in_flight`."""
    summed: float
    """Of its stages' gradients, the share whose sums are there: none before the first backward pass is through."""
    is_all_forward: bool
    """Every micro-batch has gone forward."""
    has_losses: bool
    """The last stage's loss of some micro-batch has not gone back yet."""


def _passes_done(layout: Layout, stage: Stage) -> list[_PassesDone]:
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
            found.append(_PassesDone(min(passes, left) / each, summed, left < passes, num_losses > 0))
    return found


class _Step:
    """The moments of one rank."""

    def __init__(self, shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> None:
        self._shape, self._layout, self._stage = shape, layout, stage
        self._at: _PassesDone | None = None
        self._layers = self._mean = layers_of(shape, layout)
        vocabulary = self._layers.head_weight
        matrices = num_vocabulary_matrices(shape, layout, stage)
        self._is_tied = shape.tied_embeddings and matrices == 1
        self._root = vocabulary * matrices + shape.learned_positions * shape.hidden * stage.embedding
        self._layer = max(params.total - self._root, 0.0) / max(stage.layers, 1)
        self._routed_layers = round(stage.layers * shape.moe_layers / shape.layers)
        # Of a layer with experts: they, and all the rest, which are units of their own where experts are spread.
        slots = expert_slots(shape, layout) / max(shape.experts, 1)
        self._experts = shape.expert_params / layout.expert_split * slots if shape.moe_layers else 0.0
        norms = shape.norms_per_layer * shape.norm_params
        self._rest = (shape.mixing_params + shape.moe_dense_params) / layout.tensor + norms
        if shape.moe_layers:
            self._layer = (shape.mixing_params + shape.mlp_params(shape.ffn)) / layout.tensor + norms
        self._stage_params, self._params = params, params.total
        self._passes = stage.layers * stage.in_flight
        self._is_replicated = layout.is_uncut
        self._is_sharded = layout.engine == "torch" and not self._is_replicated
        # Frozen weights that no rank shares are read where they are.
        self._gathers_frozen = layout.method == "full" or layout.shard_degree > 1
        self._gathered_root = self._root * self._gathers_frozen
        self._gathers_experts = layout.method == "full" or layout.expert_shard_degree > 1
        self._units = self._taken_apart()

    def at(self, done: _PassesDone) -> "_Step":
        """The same where a pipeline's rank is so far in its passes."""
        found = copy.copy(self)
        found._at, found._stage = done, replace(self._stage, in_flight=done.in_flight)
        found._passes = found._stage.layers * done.in_flight
        return found

    def _of_kind(self, number: int) -> "_Step":
        """The same where a layer is that `number`th from the stage's end, of those whose heads are of two widths."""
        if not self._shape.wide_layers:
            return self
        found = copy.copy(self)
        found._layers = self._kind_of(number)
        return found

    def _kind_of(self, number: int) -> TrainerLayers:
        narrow, wide = (kind for _, kind in self._mean.kinds)
        return wide if number in self._stage.wide else narrow

    def _taken_apart(self) -> Units:
        """The layers as FSDP gathers them."""
        shape, layout, stage = self._shape, self._layout, self._stage
        least = layout.unit_parameters
        ends = None
        # Adapters are gathered beside what they adapt, in the type of products.
        adapters = self._adapters(1, has_head=False) if layout.method != "full" else 0.0
        adapters *= self._layers.element / self._layers.weight_element
        if least is not None and layout.pipeline == 1:
            # Units are counted in whole layers' parameters, as they are stored, whatever ranks hold of them.
            stored = self._layers.weight_element if layout.method == "qlora" else 1.0
            added = adapter_params(shape, layout, 1, has_head=False) if layout.method != "full" else 0.0
            dense = self._layer * layout.tensor * stored + added
            routed = (self._rest * layout.tensor + shape.expert_params) * stored + added
            num_dense = stage.layers - self._routed_layers
            ends = unit_ends([dense] * num_dense + [routed] * self._routed_layers, least)
        return Units(
            num_layers=stage.layers,
            num_routed=self._routed_layers,
            dense=self._layer * self._gathers_frozen + adapters,
            routed=(self._rest + (0.0 if self._layers.is_spread else self._experts)) * self._gathers_frozen + adapters,
            ends=ends,
            num_ahead=layout.units_ahead,
            keeps_gathered=layout.keeps_gathered,
            copied=self._experts if cuts_experts_inside(shape, layout) else 0.0,
        )

    def least(self) -> Moment:
        """In the backward pass of a stage's last layer there is no less: what layers keep of the micro-batches in
        flight, and in a pipeline all weights that FSDP has gathered, with sums of gradients."""
        return Moment(self._kept_in_all(), 0.0, self._weights(0.0) * (self._layout.pipeline > 1))

    def moments(self) -> Iterator[Moment]:
        """All that can be the worst."""
        at = self._at
        if self._stage.head and (at is None or at.has_losses):
            yield from self._from_loss() if at is not None and at.is_all_forward else self._at_loss()
        if self._is_sharded and self._layout.pipeline == 1:
            yield self._at_first_layer()
        yield from self._of_kind(0)._in_last_scores()
        yield from self._of_kind(0)._in_last_block()
        yield from self._in_two_passes()
        yield from self._in_final_norm()
        if self._layout.method != "full":
            yield from self._in_forward()
            if self._is_sharded and self._gathers_frozen and self._layout.pipeline > 1:
                yield from self._at_first_pass()
        for number in self._dearest():
            # Layers without experts are a model's first.
            here = self._of_kind(number)
            if number >= self._routed_layers:
                yield from here._in_layer(number)
            elif self._layers.is_spread and self._is_sharded and self._layout.pipeline == 1:
                yield from here._in_spread_layer(number)
            else:
                yield from here._in_routed_layer(number)
            yield from self._at_reduction(number)
        yield from self._at_end()

    def _dearest(self) -> Sequence[int]:
        """Numbers of layers of which one's backward pass can be the worst. A pipeline gathers all for the whole step:
        from layer to layer of a kind as much comes and goes, whatever the moment, so that it is the first or the last
        one, by what there is beside it. Of layers whose heads are of two widths both kinds are asked."""
        found, wide = self._dearest_of_all(), self._stage.wide
        if not wide:
            return found
        return sorted({*found, *(min(wide, key=lambda each: abs(each - number)) for number in found)})

    def _dearest_of_all(self) -> Sequence[int]:
        count, routed = self._stage.layers, self._routed_layers
        if self._layout.pipeline == 1 or self._layers.delta_excess_bytes:
            return self._units.dearest
        kinds = [(first, last) for first, last in ((0, routed - 1), (routed, count - 1)) if first <= last]
        return [max(kind, key=self._beside) for kind in kinds]

    def _beside(self, number: int) -> float:
        """What a pipeline's rank holds beside the layer whose backward pass it is, but for what is always there."""
        return self._others(number) + self._weights_and_gradients(number, 0.0, 0.0)

    def _whole(self, number: int) -> float:
        """Parameters of the layer that is `number`th from the stage's end."""
        return self._experts + self._rest if number < self._routed_layers else self._layer

    def _own_gradients(self, num_layers: float) -> float:
        """This rank's part of the gradients of the last so many layers, where they come late; in one process of the
        head, too, unless that is tied."""
        layout = self._layout
        if not self._makes_gradients_once:
            return 0.0
        routed = min(num_layers, self._routed_layers)
        dense = routed * self._rest + (num_layers - routed) * self._layer
        if not self._is_sharded:
            dense += self._layers.head_weight * (self._stage.head and not self._is_tied)
        each = max(4, self._layers.element)
        return each * (routed * self._experts / layout.expert_shard_degree + dense / layout.shard_degree)

    @property
    def _makes_gradients_once(self) -> bool:
        """A rank's own gradients come to be in the one backward pass of a step."""
        return gradients_come_late(self._layout) and self._layout.pipeline == 1

    def _ends(self) -> float:
        """What a stage of a pipeline keeps of what it gives, until that micro-batch's backward pass; and its mask."""
        layout, layers = self._layout, self._mean
        if layout.pipeline == 1:
            return layers.mask_bytes + layers.rotation_bytes
        passes = self._stage.in_flight * layout.chunks
        sent = passes - (1 if self._stage.head else 0)
        split = passes * layers.input_bytes if layout.tensor > 1 and layout.recompute == "selective" else 0.0
        # Of other schedules each loss is followed by its own backward pass.
        waiting = (self._stage.in_flight - 1) * self._stage.head * (layout.schedule == "gpipe")
        # Each stage makes its own.
        masks = math.ceil(self._stage.in_flight * num_stages(layout)) * (layers.mask_bytes + layers.rotation_bytes)
        return max(sent, 0.0) * layers.whole_hidden_bytes + split + masks + waiting * layers.kept_end_bytes

    def _at_loss(self) -> Iterator[Moment]:
        """The last micro-batch in flight has just gone through the head."""
        layers = self._layers
        held = self._kept_in_all() + self._ends() + layers.final_norm_bytes
        # Whole logits are worst in the forward pass, when the last layer's weights are no longer there.
        gathered = self._units.after_forward + (self._last_gathered() if layers.loss_is_in_head else 0.0)
        beside = self._received() + self._kept_experts(self._routed_layers)
        is_again, cast = self._layout.recompute != "none", None
        if is_again:
            # Autocast's own copies last until the forward pass ends; experts are narrowed without it, but batched ones.
            head = layers.head_weight * self._stage.head
            experts = self._experts * self._routed_layers * (not self._shape.batches_experts)
            cast = self._params - self._root - experts + head
            if not layers.loss_is_in_head:
                yield Moment(held, layers.forward_logits_bytes, self._weights(gathered, cast) + beside)
                cast = head
        yield Moment(held, layers.loss_bytes, self._weights(gathered, cast) + beside)
        if not layers.loss_is_in_head:
            # Nothing is left of the loss but what comes to the logits; to their weight, whose cast is gone when its
            # gradient is widened; and to what it read.
            made, coming = self._adding(layers.head_weight) + layers.whole_hidden_bytes, layers.logits_gradient_bytes
            if layers.is_autocast:
                coming, cast = 0.0, 0.0 if is_again else self._params - self._root
            yield Moment(held + made, coming, self._weights(gathered, cast) + beside)

    def _in_final_norm(self) -> Iterator[Moment]:
        """Of a norm that is written out (Cohere's) the last one, when it goes back beside all that layers keep."""
        layers, layout, at = self._layers, self._layout, self._at
        if not self._stage.head or layers.norm != "layer_written_out" or (at is not None and not at.has_losses):
            return
        cast = 0.0 if layout.recompute != "none" else self._params - self._root
        made = layers.head_weight * layers.element * (self._is_sharded and layout.method == "full")
        held = self._kept_in_all() + self._ends() + layers.hidden * (4 + NORM_BACKWARD_BYTES)
        yield Moment(held, 0.0, self._weights(self._last_gathered(), cast) + made + self._received())

    def _from_loss(self) -> Iterator[Moment]:
        """The loss of a later micro-batch goes back: of the head's gradient, which it has made and keeps, a copy."""
        layers = self._layers
        held = self._kept_in_all() + self._ends() + layers.kept_end_bytes
        made = layers.head_weight * max(4, layers.element) * (not layers.is_frozen)
        yield Moment(held + layers.whole_hidden_bytes, 0.0, self._weights(self._last_gathered()) + made)

    def _in_last_scores(self) -> Iterator[Moment]:
        """Selective recomputation keeps all layers' scores, as a product gave them, when the last layer's have their
        sinks in the forward pass; beside copies of its keys and values for every query."""
        layers, shape = self._layers, self._shape
        if self._layout.recompute != "selective" or not layers.sink_bytes or not self._stage.layers:
            return
        copies = layers.input_bytes + 2 * layers.tokens * layers.element * shape.query_dim / self._layout.tensor
        held = self._kept_in_all() + self._ends() + layers.sink_bytes + copies
        yield Moment(held, 0.0, self._weights(self._units.running(0)) + self._received())

    def _in_last_block(self) -> Iterator[Moment]:
        """Trained whole and computed again, where scores are written out: the last layer's feed-forward block in the
        forward pass, beside the scores that its code still has in its hands and nobody keeps."""
        layers, layout = self._layers, self._layout
        is_there = layout.method == "full" and layout.recompute != "none" and self._stage.layers
        if not (layers.returned_scores_bytes and is_there):
            return
        held = self._kept_in_all() + self._ends() + layers.returned_scores_bytes
        # Its last product and what that reads; the residual, and what the norm before it gave.
        block = layers.product_bytes + layers.whole_hidden_bytes
        block += layers.input_bytes + layers.hidden * layers.residual_element
        yield Moment(held + block, 0.0, self._weights(self._units.running(0)) + self._received())

    def _at_first_layer(self) -> Moment:
        """In the forward pass: what FSDP gathered the vocabulary's matrices into stays until a unit is gathered too."""
        number = self._stage.layers - 1
        first = self._units.arriving(number) if number >= 0 else 0.0
        return Moment(self._layers.input_bytes, 0.0, self._weights(first) + self._gathered_root * self._layers.element)

    def _at_first_pass(self) -> Iterator[Moment]:
        """Adapters in a pipeline, where sums that would outweigh it are small: what FSDP gathered a unit into, the
        ends' before any layer's, stays until the next one is put together of its own."""
        layers, layer = self._layers, 2 * self._units.of(self._stage.layers - 1) if self._stage.layers else 0.0
        ends = 2 * self._root * layers.element
        yield Moment(layers.input_bytes, 0.0, ends + layer * layers.weight_element + self._received())
        experts = 0.0
        if layers.is_spread and self._routed_layers and self._layout.expert_shard_degree > 1:
            experts = self._gathering() - self._experts * layers.weight_element  # one of three stays
        put_together = max(layer * layers.weight_element, experts)
        yield Moment(layers.input_bytes, 0.0, self._weights(0.0) + put_together + self._received())

    def _in_forward(self) -> Iterator[Moment]:
        """Of adapters, whose backward pass makes next to no gradients: a unit that is put together beside what the one
        before it was gathered into, and its last layer's feed-forward block."""
        layers, units = self._layers, self._units
        mask = layers.given_mask_bytes * (self._layout.recompute == "none")
        for number in units.dearest_in_forward:
            before = self._kept_before(number) + mask + self._embedded()
            yield Moment(before + layers.input_bytes, 0.0, self._weights(units.arriving(number)) + self._received())
            gathered = self._weights(units.running(number)) + self._received()
            here = self._of_kind(number)
            running = max(here._running(number), here._in_forward_norm(), here._at_layers_end())
            yield Moment(before + running, 0.0, gathered)
        if layers.has_norm_copies and self._stage.head:
            # The last norm, written out: what it reads, twice in float32, and narrowed.
            held = self._kept_in_all() + self._embedded() + layers.input_bytes + layers.hidden * (8 + layers.element)
            yield Moment(held, 0.0, self._weights(self._last_gathered()) + self._received())

    def _embedded(self) -> float:
        """In a forward pass a model's code has what the embedding gave, of which sequence parallelism made parts; else
        it counts as what the first layer keeps, if that keeps it."""
        layers = self._layers
        if self._layout.tensor > 1:
            return layers.whole_hidden_bytes * self._stage.embedding
        return layers.input_bytes * (layers.unreached_bytes > 0) * self._stage.embedding

    def _in_forward_norm(self) -> float:
        """Adapters: the second norm of a layer that is kept whole, written out: what it makes in float32 is narrowed
        beside the residual and the layer's own input."""
        layers = self._layers
        if not layers.has_norm_copies or self._layout.recompute != "none":
            return 0.0
        return layers.attention_half_bytes + 2 * layers.input_bytes + layers.split_hidden * (4 + layers.element)

    def _at_layers_end(self) -> float:
        """Adapters: a layer that is kept whole and ends in a norm, when what this gave has been added to the residual;
        with what came to the layer."""
        layers = self._layers
        if self._layout.recompute != "none" or not self._shape.norms_after:
            return 0.0
        residual = layers.whole_hidden_bytes * (not layers.adapts_first)  # else kept
        return layers.whole_bytes + layers.unkept_input_bytes + residual + 2 * layers.whole_hidden_bytes

    def _running(self, number: int) -> float:
        """Adapters: what there is of a layer in its forward pass, while its feed-forward block's last product runs. Of
        one that is computed again nothing is kept: there is what its code has in its hands."""
        layers = self._layers
        held, is_again = 2 * layers.whole_hidden_bytes, self._layout.recompute == "full"
        if number < self._routed_layers:
            rows = 2 * (layers.rows_bytes + layers.weighed_bytes) + 3 * layers.expert_product_bytes
            there = held + layers.kept_routed_bytes
            if self._layout.recompute == "none":
                there = layers.block_frame_bytes + layers.attention_half_bytes + held * layers.has_norm_copies
            return there + max(layers.reads.experts_bytes, rows)
        if is_again:
            block = 3 * layers.product_bytes + max(layers.product_bytes, layers.reads.last_bytes)
            return held + layers.input_bytes + layers.block_frame_bytes + block
        # What is activated beside what is gated; the last product, its weight read, or its adapter's, scaled too, of
        # which selective recomputation keeps one; what the layer gives.
        is_whole = self._layout.recompute == "none"
        num_last = 1 + layers.adapts_last * (1 + is_whole)
        is_by_steps = self._shape.activation_tensors > 1 and not is_whole
        activated = layers.product_bytes * (self._shape.gated_mlp or is_by_steps)
        made = layers.whole_hidden_bytes * (layers.adapts_last and not is_whole)  # kept once its weight has been read
        last = max(activated, layers.reads.last_bytes - made, num_last * layers.whole_hidden_bytes)
        if is_whole:
            # Its last norm has read nothing yet.
            there = layers.whole_bytes - layers.mlp_norm_output_bytes - layers.last_norm_bytes
            there += held * layers.has_norm_copies
            there += layers.unkept_input_bytes
            # Of parallel halves attention's result waits for the other's.
            there += layers.whole_hidden_bytes * self._shape.parallel_residual
            running = layers.product_bytes * (not layers.keeps_block_result) + last
            if layers.adapts_first and not self._shape.gated_mlp:
                # Or the first one's, when nothing of the block is kept yet.
                running = max(running, 3 * layers.product_bytes - layers.mlp_bytes)
            return there + layers.block_frame_bytes + max(running, held)
        there = layers.kept_bytes + layers.input_bytes + layers.block_frame_bytes + layers.summed_products_bytes
        return there + max(layers.product_bytes + last, held)

    def _in_layer(self, number: int) -> Iterator[Moment]:
        """The backward pass of the layer that is `number`th from the stage's end."""
        layers = self._layers
        others, above = self._others(number), self._above()
        gradients = self._own_gradients(self._units.num_reduced(number))
        before = self._units.above(number)
        mlp = self._mlp_weights()
        left = layers.whole_bytes - layers.mlp_bytes
        # The feed-forward block: its last product reads its weight, or its factors have their gradients.
        factors = self._block_tensors() - layers.keeps_block_result
        if layers.is_frozen and layers.keeps_block_result:
            # An adapter and what it adapts give a gradient each, and their sum is made beside both.
            factors = max(factors, 2)
        in_block = layers.whole_bytes + above
        # QLoRA reads the last product's weight before its layer is made again; or once an adapter's gradients are made,
        # for which alone the product's input is kept.
        read = 0.0 if layers.stops_before_reading else layers.reads.last_bytes
        made = factors * layers.product_bytes
        if layers.is_frozen and self._layout.recompute == "none":
            made -= layers.last_norm_bytes  # which has gone back, and let go of what it kept
        elif self._layout.method == "qlora" and layers.adapts_last and self._shape.norms_after:
            made += layers.whole_hidden_bytes  # the norm's gradient, while the weight is read beside the adapter's
        in_block += max(layers.product_bytes * (not layers.adapts_last) + read, made)
        in_block += self._adding(mlp / 3)
        yield self._moment(others + in_block, self._weights_and_gradients(number, mlp / 3, before), mlp / 3, gradients)
        if layers.is_frozen and self._layout.recompute != "none":
            again = self._made_again()
            yield self._moment(others + again, self._weights_and_gradients(number, 0.0, before), 0.0, gradients)
        if self._layout.method == "qlora":
            reading = others + max(self._reading_first(), self._reading_mixing())
            yield self._moment(reading, self._weights_and_gradients(number, 0.0, before), 0.0, gradients)
        # Both products that read a norm's output give it a gradient; the residual's stands beside them.
        after_block = left + layers.input_bytes + 2 * layers.whole_hidden_bytes
        after_block += layers.product_bytes if self._shape.gated_mlp else above - layers.input_bytes
        if self._layout.tensor > 1 and not layers.is_frozen:
            # A whole matrix's gradient is put together of the rank's own columns' and zeros, beside both.
            after_block += self._shape.uncut_mlp_params * layers.element
        yield self._moment(others + after_block, self._weights_and_gradients(number, mlp, before), mlp, gradients)
        if layers.score_gradient_bytes:
            gone = layers.norm_input_bytes + layers.mlp_norm_output_bytes + layers.outputs_norms_bytes * 2
            # A layer's only norm has not gone back; beside the copies of context parallelism traces have as much as two
            # norms keep.
            is_there = self._layout.flash_attention or self._shape.norms_per_layer == 1
            gone *= self._shape.norms_per_layer >= 4 or not is_there
            if not self._layout.flash_attention and layers.is_frozen and layers.adapts_mixed:
                # What attention's last product has read for its adapter.
                gone += layers.tokens * layers.element * self._shape.value_dim / self._layout.tensor
            in_scores = left - gone + above + layers.score_gradient_bytes
            yield self._moment(others + in_scores, self._weights_and_gradients(number, mlp, before), mlp, gradients)
        if layers.scores_again_bytes:
            again = layers.kept_bytes + above + layers.whole_hidden_bytes + layers.scores_again_bytes
            yield self._moment(others + again, self._weights_and_gradients(number, mlp, before), mlp, gradients)
        yield from self._in_norms(number, left, mlp)
        if layers.rotating_bytes:
            again = 0.0
            if self._layout.recompute != "none":
                again = above + max(layers.kept_bytes - layers.input_bytes - layers.scored_products_bytes, 0.0)
            in_rotation = layers.attention_norm_bytes + layers.rotating_bytes + again
            yield self._moment(others + in_rotation, self._weights_and_gradients(number, 0.0, before), 0.0, gradients)

    def _made_again(self) -> float:
        """Adapters: of a layer that is made again what there is in its feed-forward block, or in its norms."""
        layers, above = self._layers, self._above()
        # Gate and up, or what is activated, and as many tensors on the way to the last product's input.
        block = (4 if self._shape.gated_mlp else 2) * layers.product_bytes
        if layers.reads_last_again:
            block = max(block, block - layers.product_bytes + layers.reads.last_bytes)
        if self._layout.recompute == "full" and "gate_up_proj" in self._layout.lora_targets:
            block = max(block, 3 * 2 * layers.product_bytes)  # the two's product, and its adapter's, scaled too
        if self._layout.recompute == "full" and layers.adapts_first and not self._shape.gated_mlp:
            # Or the first product, its adapter's, scaled too.
            waits = layers.whole_hidden_bytes * self._shape.parallel_residual  # attention's result
            block = max(block, 3 * layers.product_bytes + waits)
        again = layers.attention_half_bytes + block + above + layers.block_frame_bytes
        again += layers.input_bytes * layers.has_norm_copies - layers.mlp_norm_output_bytes
        if self._shape.norms_after or not layers.reads_last_again:
            # Whose input nothing has given yet; beside the last weight that QLoRA reads again traces of four norms a
            # layer have as much, all the same (`test_adapters.py`: "norms after both").
            again -= layers.last_norm_bytes
        again = max(again, self._in_norm_again())
        # What came to the last product's input already; or what came to the layer, scaled for that one's adapter:
        # where a norm comes after it, that one asks first.
        scaled = layers.adapts_last and not self._shape.ends_in_norm
        again += layers.product_bytes * layers.stops_before_reading + layers.input_bytes * scaled
        if self._shape.ends_in_norm:
            again = max(again, self._in_last_norm_again())
        return again

    def _reading_first(self) -> float:
        """QLoRA: the backward pass of the products that read the second norm's output, the last of them first: what
        came to each, and what an adapter gave."""
        layers, above = self._layers, self._above()
        adapted = layers.whole_hidden_bytes * layers.adapts_first
        came = layers.product_bytes * (1 + self._shape.gated_mlp)
        return layers.attention_half_bytes + above + came + adapted + layers.reads.first_bytes

    def _reading_mixing(self) -> float:
        """The same of attention's last product, when the second norm's gradient is there; and of its queries', when
        keys and values have given theirs."""
        layers, shape = self._layers, self._shape
        width = layers.tokens * layers.element / self._layout.tensor
        left = layers.attention_half_bytes - layers.norm_input_bytes - layers.mlp_norm_output_bytes
        last = left + width * shape.value_dim * layers.adapts_mixed
        first = layers.attention_norm_bytes + width * shape.query_dim + 2 * layers.whole_hidden_bytes
        return max(last, first) + self._above() + layers.reads.mixing_bytes

    def _in_norm_again(self) -> float:
        """Adapters: the second norm of a layer that is made again, written out, as in `_in_forward_norm`; beside what
        is kept of the feed-forward block, and the gradient that came to the layer."""
        layers = self._layers
        if not layers.has_norm_copies:
            return 0.0
        norm = layers.input_bytes + layers.split_hidden * (4 + layers.element)
        half = layers.attention_half_bytes - layers.mlp_norm_output_bytes
        return half + norm + layers.kept_block_bytes + self._above()

    def _in_last_norm_again(self) -> float:
        """Adapters: of a layer that is made again the norm of what its feed-forward block gave, which asks for it; what
        came to it is there in float32 too, where the norm is written out, and what it gives beside what it reads."""
        layers = self._layers
        # The residual stands for what the block read, which is gone.
        kept = layers.attention_half_bytes + layers.input_bytes
        kept += (1 + self._shape.gated_mlp + layers.keeps_block_result) * layers.product_bytes
        if not layers.has_norm_copies:
            # Or before it the last product's adapter gives its own, which is scaled.
            return kept + max(layers.input_bytes, 2 * layers.whole_hidden_bytes * layers.adapts_last) + self._above()
        return kept + layers.whole_hidden_bytes + 2 * 4 * layers.split_hidden + self._above()

    def _others(self, number: int) -> float:
        """What layers before the `number`th keep, and what a pipeline's rank keeps of what it gave."""
        return self._kept_below(number) + self._beyond_mean(number)

    def _beyond_mean(self, number: int) -> float:
        """What that layer and those before it keep beyond the mean of all layers, by which they are reckoned, where
        some have a delta rule. Of layers that are computed again any may be one of them; else each n-th from the end
        has attention (Qwen's default is each fourth, the last one of them)."""
        shape, excess = self._shape, self._layers.delta_excess_bytes
        if not excess or not shape.num_attentions or self._layout.recompute != "none":
            return max(excess, 0.0)
        every = max(shape.layers // shape.num_attentions, 1)
        num_deltas = sum(index % every != 0 for index in range(number))
        less = excess * shape.delta_layers / shape.num_attentions
        return (number - num_deltas) * less - num_deltas * excess

    def _kept_below(self, number: int) -> float:
        layers = self._layers
        # A layer that is computed again has its input beside the float32 copy that an RMS norm makes of it.
        has_copy = layers.has_norm_copies and self._layout.recompute != "none"
        return self._kept_before(number) + layers.input_bytes * has_copy

    def _kept_before(self, number: int) -> float:
        """What the layers before the `number`th keep, and the stage's ends."""
        unreached = self._unreached()
        left = self._kept_in_all() + unreached - self._kept_of_last(number + 1)
        return max(left, 0.0) - unreached + self._ends()

    def _kept_of_last(self, count: int) -> float:
        """What the last so many layers keep, those with experts of them first."""
        routed = min(count, self._routed_layers)
        if not self._shape.wide_layers:
            return routed * self._mean.kept_routed_bytes + (count - routed) * self._mean.kept_bytes
        kinds = [self._kind_of(number) for number in range(count)]
        return sum(kind.kept_routed_bytes for kind in kinds[:routed]) + sum(kind.kept_bytes for kind in kinds[routed:])

    def _kept_in_all(self) -> float:
        """What all layers keep of the micro-batches in flight."""
        return self._passes * self._mean.kept_bytes - self._unreached()

    def _unreached(self) -> float:
        """Adapters: nothing is kept in front of a model's first one, which no gradient reaches."""
        return self._mean.unreached_bytes * self._stage.in_flight * self._stage.embedding

    def _above(self) -> float:
        """The gradient that comes to a layer from above."""
        layers = self._layers
        above = layers.split_hidden * layers.residual_element
        return above + (layers.whole_hidden_bytes if self._layout.tensor > 1 else 0.0)

    def _in_routed_layer(self, number: int) -> Iterator[Moment]:
        """The backward pass of a layer with experts that are all here, or are not gathered one layer at a time."""
        layers = self._layers
        others, above = self._others(number), self._above()
        gradients = self._own_gradients(self._units.num_reduced(number))
        before = self._units.above(number)
        whole = layers.whole_routed_bytes
        yield from self._being_gathered(number, others, above, gradients)
        # Batched experts' results are added up as they are: their gradient, and that of their product.
        weighing = self._weighing() + self._beside_both_halves()
        yield self._moment(
            others + whole + above + weighing,
            self._weights_and_gradients(number, 0.0, before),
            0.0,
            gradients,
        )
        if layers.reads.experts_bytes:
            # The experts have run once more, from weights that are read anew beside what came to their sum, when it is
            # differentiated: there is what they gave, and their blocks. Nothing needs what they read: they are frozen.
            run = layers.rows_bytes + 3 * layers.expert_product_bytes
            run = max(
                layers.weighed_bytes + layers.reads.experts_bytes, weighing + layers.reads.read_experts_bytes + run
            )
            yield Moment(others + whole + above + run, 0.0, self._weights_and_gradients(number, 0.0, before))
        last = self._experts * self._last_share
        yield self._moment(
            others + whole + above + self._gating() + self._adding(last),
            self._weights_and_gradients(number, last, before),
            last,
            gradients,
        )
        # The product that read the chosen tokens has given its gradients: both are there, with what came to it.
        left = whole - layers.experts_bytes - layers.shared_bytes
        read = (0.0 if layers.is_frozen else layers.rows_bytes) / (self._layout.tensor if layers.is_spread else 1)
        beside = layers.shared_bytes if self._shape.shared_first else 0.0
        in_block = left + beside + 2 * layers.expert_product_bytes + layers.rows_bytes + read + above
        made = self._experts
        if not layers.is_autocast:  # else below
            in_block += self._adding(made * (1 - self._last_share))
        yield self._moment(others + in_block, self._weights_and_gradients(number, made, before), made, gradients)
        if layers.is_autocast and not layers.is_frozen and not self._shape.batches_experts:
            # The gradient of the weight that reads them is widened to its own type.
            if self._makes_gradients_once:
                gradients += 4 * self._experts
            yield Moment(
                others + left + beside + layers.rows_bytes + above, 0.0, self._widening_experts(number), gradients
            )
        if layers.score_gradient_bytes:
            in_scores = left + above + layers.score_gradient_bytes
            yield self._moment(others + in_scores, self._weights_and_gradients(number, made, before), made, gradients)
        yield from self._in_norms(number, left, made)

    def _gating(self) -> float:
        """Beside a layer with experts whole, when their last product has given its gradients: what comes to each factor
        of what it read and what is made on the way, in place of that and of what the experts gave."""
        layers = self._layers
        num_made = 3 if self._shape.gated_mlp else 2
        is_kept = not layers.is_spread and self._layout.method != "qlora"
        return (num_made - 1) * layers.expert_product_bytes - layers.rows_bytes * is_kept

    @property
    def _last_share(self) -> float:
        """Of the experts' weights, the share of their last product."""
        return 1 / 3 if self._shape.gated_mlp else 1 / 2

    def _weighing(self) -> float:
        """Beside a layer with experts whole, while their results' weighted sum is differentiated, or made again."""
        layers = self._layers
        if self._shape.batches_experts:
            # Made again under autocast, what they read is there before it was narrowed, too.
            is_wide = layers.residual_element > layers.element and self._layout.recompute != "none"
            return 2 * layers.rows_bytes + layers.rows_bytes * layers.residual_element / layers.element * is_wide
        if layers.is_spread:
            return SPREAD_WEIGHING * layers.weighed_bytes + layers.narrowed_bytes
        found = WEIGHING * layers.weighed_bytes + layers.narrowed_bytes
        if layers.residual_element > layers.element and self._layout.recompute != "none":
            # What the experts read is there as it was chosen, before autocast narrowed it, until they return.
            chosen = layers.rows_bytes * layers.residual_element / layers.element
            found = max(found, 2 * layers.weighed_bytes + chosen)
        if layers.is_frozen and self._layout.recompute != "none":
            # Or their product is made again, beside what the layer's code has in its hands: rows, and what they read.
            again = 2 * layers.weighed_bytes + layers.rows_bytes + layers.frozen_experts_input_bytes
            found = max(found, again) - layers.frozen_experts_input_bytes * layers.reruns_experts
        return found

    def _beside_both_halves(self) -> float:
        """Parallel residuals under autocast: a layer is made again when its sum has given each half a gradient in that
        half's type, the experts' in float32 too; beside what the norm gave in float32 and what attention gave."""
        layers = self._layers
        is_there = self._shape.parallel_residual and layers.is_autocast and self._layout.recompute != "none"
        wide = layers.residual_element
        return layers.hidden * (2 * wide + 3 * layers.element) * is_there

    def _widening_experts(self, number: int) -> float:
        """Under autocast, of the experts' wider weight its gradient as the product gave it and in float32, beside what
        is left of casts: of these experts none."""
        layout, layers = self._layout, self._layers
        cast = self._rest
        if layout.recompute == "none":
            cast = self._params - self._root - (number + 1) * self._experts + layers.head_weight * self._stage.head
        share = 2 / 3 if self._shape.gated_mlp else 1 / 2
        # Of a step's only micro-batch it is the rank's own at once, unless DDP has one to add it to.
        wide = 4 * (layout.num_micro_batches > 1 or layout.data_parallel > 1)
        return cast * layers.element + share * self._experts * (layers.element + wide)

    def _being_gathered(self, number: int, others: float, above: float, gradients: float) -> Iterator[Moment]:
        """A unit's experts that are cut inside, put together by way of a copy before its backward pass; and their
        gradients taken apart so, when all of the unit's have been made."""
        layers, units = self._layers, self._units
        copied = units.copied_of(number) * layers.weight_element
        if not copied or self._layout.pipeline > 1:
            return
        there = layers.whole_routed_bytes if self._layout.recompute == "none" else layers.input_bytes
        unit, wide, is_trained = units.of(number), max(4, layers.element), self._layout.method == "full"
        head = layers.head_weight * self._stage.head * layers.element * is_trained
        following = 0.0 if units.keeps_gathered else units.in_backward(number) - unit
        if not units.keeps_gathered:
            # What was asked for ahead is on its way before; FSDP itself asks for the next when this one is together.
            gathered = self._weights(2 * unit + following * (units.num_ahead > 0)) + copied
            before = units.above(number) * wide * is_trained
            yield Moment(others + there + above, 0.0, gathered + before + head, gradients)
        if is_trained:
            # Taken apart one by one, of which the last is still there as it was.
            last = self._experts * layers.element * self._last_share
            sent = unit * (layers.element + wide) + last + head
            yield Moment(others + above, 0.0, self._weights(following) + sent, gradients)

    def _in_spread_layer(self, number: int) -> Iterator[Moment]:
        """The same where a layer's experts lie on several ranks: FSDP gathers and reduces them by themselves."""
        layers, element = self._layers, self._layers.element
        others, above = self._others(number), self._above()
        shared = layers.whole_hidden_bytes if self._shape.shared_ffn else 0.0
        gradients = self._own_gradients(self._units.num_reduced(number))
        is_trained = self._layout.method == "full"
        made = (layers.head_weight * self._stage.head + self._units.made_above(number)) * is_trained
        units = (self._gathered_root + made) * element + self._units.in_backward(number) * layers.weight_element
        units += self._kept_experts(self._routed_layers - number - 1)
        before = self._units.above(number) * max(4, element) * is_trained
        whole = layers.whole_routed_bytes - layers.shared_bytes
        left = whole - layers.experts_bytes
        # Of what is not recomputed all is there when the experts are gathered for their backward pass.
        there = whole if self._layout.recompute == "none" else left
        gathered, weights = self._gathering(), self._experts * layers.weight_element * self._gathers_experts
        if number and self._layout.keeps_gathered:
            gathered = weights  # once, in the forward pass, where the last layer's meet all others
        yield Moment(others + there + above + shared, 0.0, units + before + gathered, gradients)
        weighing = self._weighing()
        weighing += layers.hidden * 4 * (layers.weighed_element > element)
        yield Moment(others + whole + above + shared + weighing, 0.0, units + before + weights, gradients)
        if layers.reads.experts_bytes:
            # What they gave has its gradient, and they run once more, from weights that are read anew.
            arrived = layers.rows_bytes / self._layout.tensor
            again = layers.reads.read_experts_bytes + 2 * arrived + 4 * layers.expert_product_bytes
            again += layers.weighed_bytes * (layers.weighed_element > element)  # their sum's gradient, in its own type
            run = arrived - layers.rows_bytes + max(layers.reads.experts_bytes, again)
            yield Moment(others + whole + above + shared + run, 0.0, units + before + weights, gradients)
        if self._layout.recompute != "none" and not layers.reads.experts_bytes:
            # Made again: as they came, by expert, and three of what experts give, none in their tokens' order yet.
            run = whole - layers.experts_bytes + layers.expert_run_bytes
            yield Moment(others + run + above + shared, 0.0, units + before + weights, gradients)
        last = weights * self._last_share * is_trained
        yield Moment(others + whole + above + shared + self._gating(), 0.0, units + before + weights + last, gradients)
        rows = layers.rows_bytes / self._layout.tensor
        in_block = left + 2 * layers.expert_product_bytes + rows * (2 if is_trained else 1) + above + shared
        yield Moment(others + in_block, 0.0, units + before + weights * (1 + is_trained), gradients)
        after_block = left + above + shared + layers.whole_hidden_bytes
        yield Moment(others + after_block, 0.0, units + self._reducing(), gradients)
        # What was sent stays until the rest of the layer is reduced.
        sent = self._experts * max(4, element) * is_trained
        norms = layers.split_hidden * self._norm_bytes() + above
        after_norm = left - layers.mlp_norm_output_bytes + norms
        yield Moment(others + after_norm, 0.0, units + sent + self._rest * element, gradients)
        if layers.score_gradient_bytes:
            in_scores = left - layers.mlp_norm_output_bytes + above + layers.score_gradient_bytes
            yield Moment(others + in_scores, 0.0, units + sent + self._rest * element, gradients)

    def _kept_experts(self, num_layers: int) -> float:
        """Bytes of so many layers' spread experts between their forward and backward pass."""
        is_kept = self._layers.is_spread and self._layout.keeps_gathered and self._layout.pipeline == 1
        is_kept = is_kept and self._gathers_experts
        return num_layers * self._experts * self._layers.weight_element * is_kept

    def _gathering(self) -> float:
        """Bytes of spread experts while they are gathered: FSDP, which cuts each, puts them together by way of two
        copies; where no rank has a copy of them, only in the other type, one of two weights at a time; frozen ones are
        read where they are then."""
        if not self._gathers_experts:
            return 0.0
        if self._layout.expert_shard_degree > 1:
            return 3 * self._experts * self._layers.weight_element
        return (2 - self._last_share) * self._experts * self._layers.element

    def _reducing(self) -> float:
        """Bytes of their gradients on the way to the ranks' parts; alone, a rank still copies what it would send."""
        if self._layout.method != "full":
            return 0.0
        element, wide = self._layers.element, max(4, self._layers.element)
        # FSDP reorders each of a layer's weights' gradients, and holds on to the last one, of its output, as it was.
        last = element * self._last_share
        each = element + wide + last if self._layout.expert_shard_degree > 1 else 3 * wide
        return each * self._experts

    def _at_reduction(self, number: int) -> Iterator[Moment]:
        """All of a unit's gradients, and what they are copied into to be sent, when its weights are gone. To make them
        is worse beside as many that are on their way until then; but a unit may be the only one."""
        layers, units, layout = self._layers, self._units, self._layout
        first, end = units.bounds(number)
        if layout.pipeline > 1 or layout.method != "full" or not self._is_sharded or number != end - 1:
            return
        following = units.in_backward(number) - units.of(number)
        made = units.of(number) * (layers.element + max(4, layers.element))
        made += layers.head_weight * self._stage.head * layers.element
        gradients = self._own_gradients(first)
        yield Moment(self._others(number) + layers.input_bytes, 0.0, self._weights(following) + made, gradients)

    def _in_norms(self, number: int, left: float, made: float) -> Iterator[Moment]:
        """The backward pass of both norms, of a layer of which so much is `left`; `made` as in `_moment`."""
        layers = self._layers
        others, above = self._others(number), self._above()
        gradients = self._own_gradients(self._units.num_reduced(number))
        before = self._units.above(number)
        norm = layers.split_hidden * self._norm_bytes() + above
        second = left - layers.mlp_norm_output_bytes + norm
        yield self._moment(others + second, self._weights_and_gradients(number, made, before), made, gradients)
        # All of a layer's gradients are there from the last of the products that read the first norm's output on.
        first, unit = layers.norm_input_bytes + norm, self._whole(number)
        first = max(first, layers.last_input_bytes + layers.input_bytes)  # beside the gradient of the residual
        yield self._moment(others + first, self._weights_and_gradients(number, unit, before), unit, gradients)

    def _adding(self, made: float) -> float:
        """Bytes of a weight's gradient that is about to be added to its sum, where every rank has whole ones: under
        autocast it is widened first. 0 where it becomes the sum."""
        if self._layout.method != "full" or not self._is_replicated or self._makes_gradients_once:
            return 0.0
        return made * (self._layers.element + 4 if self._layers.is_autocast else self._layers.element)

    def _moment(self, activations: float, buffers: float, made: float, gradients: float) -> Moment:
        """`made`: weights of which the backward pass has just made gradients; a pipeline adds them up afterwards, but
        those of the sums' own type one by one; and in one process they are the rank's own."""
        if self._layout.pipeline > 1 and self._layout.method == "full":
            if self._layers.element >= 4 and self._at is not None and self._at.summed == 1:
                made = min(made, self._largest_weight)
            activations += made * self._layers.element * (self._layout.schedule != "zero_bubble")
        if self._makes_gradients_once and not self._is_sharded:
            gradients += made * max(4, self._layers.element)
        return Moment(activations, 0.0, buffers + self._received(), gradients)

    @property
    def _largest_weight(self) -> float:
        """Elements of it, but for the ends': experts' gate and up are one, others' are two."""
        share = 1 - self._last_share
        block = self._mlp_weights() * (share / 2 if self._shape.gated_mlp else share)
        return max(self._experts * share, block * (self._routed_layers < self._stage.layers))

    def _in_two_passes(self) -> Iterator[Moment]:
        """zero_bubble: one of a rank's two stages has given its inputs' gradients, and keeps for its weights' all that
        it kept, and what came to each product (thin gates have let go of what they read); then these are made."""
        layers, layout = self._layers, self._layout
        if layout.schedule != "zero_bubble" or layout.method != "full":
            return
        num_layers, held = self._stage.layers / 2, self._kept_in_all() + self._ends()
        came = layers.product_gradient_bytes - 2 * layers.product_bytes * layers.has_thin_gates
        buffers = self._weights(0.0) + self._received()
        norm = layers.split_hidden * self._norm_bytes() + self._above()
        yield Moment(held + num_layers * came + norm, 0.0, buffers)
        made = self._params / 2 * layers.element
        yield Moment(held - num_layers * layers.kept_bytes + made, 0.0, buffers)

    def _at_end(self) -> Iterator[Moment]:
        """The embedding's gradient, and the reduction of the vocabulary's matrices."""
        layout, element = self._layout, self._layers.element
        if layout.method != "full":
            return
        if layout.pipeline > 1:
            # All sums, of which the ends' are copied to be sent.
            missing = (self._params - self._summed()) * max(4, element)
            yield Moment(0.0, 0.0, self._weights(0.0) + missing + self._root * max(4, element))
        elif self._is_sharded:
            yield from self._at_sharded_end()
        elif self._is_replicated and layout.engine == "torch":
            gradients = self._own_gradients(self._stage.layers)
            if self._is_tied and self._stage.head:
                # Of either end, and their sum, in the weight's own type; learned positions have one.
                made = 2 * self._layers.head_weight + self._root
                yield Moment(self._layers.input_bytes, 0.0, made * max(4, element), gradients)
            elif self._makes_gradients_once and self._stage.embedding:
                # Beside what came to it.
                own = (self._root - self._layers.head_weight * self._stage.head) * max(4, element)
                yield Moment(self._layers.input_bytes, 0.0, 0.0, gradients + own)

    def _at_sharded_end(self) -> Iterator[Moment]:
        """The same where FSDP reduces them."""
        layers, layout, element = self._layers, self._layout, self._layers.element
        gradients, below = self._own_gradients(self._stage.layers), layers.input_bytes
        is_tied = self._is_tied and self._stage.head
        wide = 4 if element < 4 else element
        last = self._units.of(self._stage.layers - 1) if self._stage.layers else 0.0
        yield Moment(below, 0.0, self._root * (element + wide), gradients)
        # A matrix that is tied has a gradient of either end, and becomes their sum. Ranks that share an embedding whose
        # module scales what it gives make the whole one's, as each has all of what comes to it.
        made = self._root * (1 + (3 if is_tied else 1))
        ranks = vocabulary_split(self._shape, layout)
        made += layers.head_weight * ranks * (self._shape.scales_words and ranks > 1)
        yield Moment(below, 0.0, made * element + last * wide, gradients)
        # What is sent, and what arrives, which is the rank's own gradient where it isn't added to one; divided by one,
        # where FSDP is of one rank but others have copies.
        copies = 1 + (layout.num_micro_batches > 1) / layout.shard_degree
        copies += layout.shard_degree == 1 and layout.data_parallel > 1
        # Of several ranks FSDP has its last parameter's gradient in its hands, as it was made, until all is sent.
        is_last = self._stage.head and not (is_tied or self._shape.head_bias)
        head = layers.head_weight * (is_last and layout.shard_degree > 1)
        if self._makes_gradients_once:
            gradients += 4 * self._root / layout.shard_degree
        yield Moment(below, 0.0, self._root * wide * copies + head * element, gradients)

    def _block_tensors(self) -> int:
        """Gradients as wide as the feed-forward block, and what is made on their way, at their most: a thin gate lets
        go of what it has read."""
        is_whole = self._shape.gated_mlp or self._shape.activation_tensors > 1
        return 3 if is_whole and not self._layers.has_thin_gates else 2

    def _norm_bytes(self) -> float:
        kind, element = self._layers.half_norm, self._layers.residual_element
        return {"layer": 2 * element, "layer_fp32": 8}.get(kind, NORM_BACKWARD_BYTES)

    def _mlp_weights(self) -> float:
        """Of a layer's parameters, those of its feed-forward block."""
        shape = self._shape
        dense = max(shape.num_mlps, 1) if shape.moe_layers else shape.layers
        block = shape.mlp_params(shape.ffn) * shape.num_mlps / dense / self._layout.tensor
        return min(block, self._layer)

    def _last_gathered(self) -> float:
        """Of the layer above, what FSDP gathered it into stays until the next one is: of spread experts their own."""
        if not self._layers.is_spread:
            return self._units.of(0)
        return self._experts if self._layout.expert_shard_degree > 1 else 0.0

    def _weights(self, gathered: float, cast: float | None = None) -> float:
        """Weights that are gathered, so many of layers, or cast by autocast: so many, if it isn't all of them."""
        layers, layout = self._layers, self._layout
        is_trained = layout.method == "full"
        if self._is_replicated:
            if not layers.is_autocast:
                return 0.0
            if cast is None:
                cast = self._params - self._root + layers.head_weight * self._stage.head
            return layers.element * (
                cast if is_trained else self._adapters(self._stage.layers, has_head=self._stage.head)
            )
        if not self._is_sharded:
            return 0.0
        if layout.pipeline > 1:
            # Gathered once for all micro-batches; of one rank they are copied, too, but what is frozen.
            experts = self._experts * self._routed_layers * layers.is_spread
            whole = self._root * layers.element + (self._params - self._root - experts) * layers.weight_element
            experts *= layers.weight_element
            if not is_trained:
                adapters = self._adapters(self._stage.layers, has_head=self._stage.head) * layers.element
                return whole * self._gathers_frozen + experts * self._gathers_experts + adapters
            return whole + experts + self._summed() * max(4, layers.element)
        return self._gathered_root * layers.element + gathered * layers.weight_element

    def _summed(self) -> float:
        """Of a pipeline's rank the parameters whose gradients' sums are there: its later stage's have the head's."""
        share = 1.0 if self._at is None else self._at.summed
        ends = self._root if share == 1 else self._layers.head_weight * self._stage.head * (share > 0)
        return (self._params - self._root) * share + ends

    def _adapters(self, num_layers: int, *, has_head: bool) -> float:
        split = self._layout.tensor
        return adapter_params(self._shape, self._layout, num_layers, has_head=has_head, split=split)

    def _weights_and_gradients(self, number: int, made: float, before: float) -> float:
        """In a backward pass: this layer and the next, the gradients that it made, those of the one `before` on their
        way, and the head's."""
        layers, layout = self._layers, self._layout
        head = layers.head_weight * self._stage.head
        if layout.pipeline > 1:
            is_first = layout.method == "full" and self._at is not None and not self._at.summed
            made = (self._units.size(0, number) + head) * is_first
            return self._weights(0.0) + made * max(4, layers.element)
        # Of layers that are computed again, autocast has forgotten all but the one; else those that have gone back.
        cast = self._whole(number)
        if layout.recompute == "none":
            done = min(number, self._routed_layers)
            gone = done * (self._experts + self._rest) + (number - done) * self._layer
            cast = self._params - self._root - gone
        found = self._weights(self._units.in_backward(number), cast)
        if layout.method != "full":
            return found
        if not self._is_sharded:
            # They are the rank's own at once, but for a tied head's: that waits for the embedding's.
            waits = self._is_tied and layout.engine == "torch" and self._is_replicated
            return found + head * max(4, layers.element) * waits
        made += self._units.made_above(number)
        return found + (made + head) * layers.element + before * max(4, layers.element)

    def _received(self) -> float:
        """What a pipeline's rank has received of micro-batches in flight, and one gradient."""
        layout = self._layout
        if layout.pipeline == 1:
            return 0.0
        passes = self._stage.in_flight * layout.chunks
        if self._stage.embedding:
            passes = passes * (layout.chunks - 1) / (2 * layout.chunks)
        layers = self._layers
        if layout.tensor == 1 and (layers.norm == "layer" or layout.recompute != "none"):
            passes = 0  # what a stage's first layer keeps is what was received
        return (passes + (0 if self._stage.head and layout.chunks == 1 else 1)) * layers.whole_hidden_bytes
