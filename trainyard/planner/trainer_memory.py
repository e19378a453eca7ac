"""The worst moment of a step of our own trainer: what a rank holds beside its state, in closed form.

A step has a few moments that can be the worst: the loss, when all layers' activations are there; the backward pass of
a layer, with the gradients that it makes (in its feed-forward block, and in either norm), where FSDP has gathered two
layers and still sends the gradients of the one before; and the end, when the vocabulary's gradients are reduced. Which
one it is depends on the sizes, so each is reckoned, and the largest is the answer.

What is there at all of them is in `trainer_rank`; moments that only layers with experts, adapters and scores that are
written out have are in `trainer_experts`, `trainer_adapters` and `trainer_scores`.
"""

from collections.abc import Iterator, Sequence

from trainyard.planner.layout import Layout
from trainyard.planner.shapes import ModelShape
from trainyard.planner.stages import Stage, StageParams, vocabulary_split
from trainyard.planner.trainer_adapters import at_first_pass as adapters_at_first_pass
from trainyard.planner.trainer_adapters import in_backward as adapters_in_backward
from trainyard.planner.trainer_adapters import in_forward as adapters_in_forward
from trainyard.planner.trainer_experts import in_routed_layer, in_spread_layer, kept_experts_bytes
from trainyard.planner.trainer_layers import NORM_BACKWARD_BYTES
from trainyard.planner.trainer_rank import Moment, TrainerRank, passes_done
from trainyard.planner.trainer_scores import in_last_block, in_last_scores, rotating_again_bytes, scores_in_backward


def worst_moment(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> Moment:
    """The moment of a step at which a rank of the stage holds most; of a stage without layers or head there is none."""
    moments = (moment for rank in _ways(shape, layout, stage, params) for moment in _moments(rank))
    return max(moments, key=lambda moment: moment.total, default=Moment(0.0, 0.0, 0.0))


def least_moment(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> Moment:
    """What no worst moment of a stage with layers has less than, quickly there."""
    return max((_least(rank) for rank in _ways(shape, layout, stage, params)), key=lambda moment: moment.total)


def _ways(shape: ModelShape, layout: Layout, stage: Stage, params: StageParams) -> list[TrainerRank]:
    """A rank as it goes forward and back, of a pipeline's where it may hold most."""
    rank = TrainerRank(shape, layout, stage, params)
    return [rank.at(done) for done in passes_done(layout, stage)] if layout.pipeline > 1 else [rank]


def _least(rank: TrainerRank) -> Moment:
    """In the backward pass of a stage's last layer there is no less: what layers keep of the micro-batches in flight,
    and in a pipeline all weights that FSDP has gathered, with sums of gradients."""
    return Moment(rank.kept_in_all, 0.0, rank.weights(0.0) * (rank.layout.pipeline > 1))


def _moments(rank: TrainerRank) -> Iterator[Moment]:
    """All that can be the worst."""
    done = rank.done
    if rank.stage.head and (done is None or done.has_losses):
        yield from _from_loss(rank) if done is not None and done.is_all_forward else _at_loss(rank)
    if rank.is_sharded and rank.layout.pipeline == 1:
        yield _at_first_layer(rank)
    yield from in_last_scores(rank.of_kind(0))
    yield from in_last_block(rank.of_kind(0))
    yield from _in_two_passes(rank)
    yield from _in_final_norm(rank)
    if rank.layout.method != "full":
        yield from adapters_in_forward(rank)
        if rank.is_sharded and rank.gathers_frozen and rank.layout.pipeline > 1:
            yield from adapters_at_first_pass(rank)
    for number in _dearest(rank):
        # Layers without experts are a model's first.
        here = rank.of_kind(number)
        if number >= rank.routed_layers:
            yield from _in_layer(here, number)
        elif rank.layers.is_spread and rank.is_sharded and rank.layout.pipeline == 1:
            yield from in_spread_layer(here, number)
        else:
            yield from in_routed_layer(here, number)
        yield from _at_reduction(rank, number)
    yield from _at_end(rank)


def _dearest(rank: TrainerRank) -> Sequence[int]:
    """Numbers of layers of which one's backward pass can be the worst. A pipeline gathers all for the whole step: from
    layer to layer of a kind as much comes and goes, whatever the moment, so that it is the first or the last one, by
    what there is beside it. Of layers whose heads are of two widths both kinds are asked."""
    found, wide = _dearest_of_all(rank), rank.stage.wide
    if not wide:
        return found
    kinds = (wide, sorted(set(range(rank.stage.layers)) - set(wide)))
    near = (min(kind, key=lambda each: abs(each - number)) for number in found for kind in kinds if kind)
    return sorted({*found, *near})


def _dearest_of_all(rank: TrainerRank) -> Sequence[int]:
    count, routed = rank.stage.layers, rank.routed_layers
    if rank.layout.pipeline == 1 or rank.layers.delta_excess_bytes:
        return rank.units.dearest
    kinds = [(first, last) for first, last in ((0, routed - 1), (routed, count - 1)) if first <= last]
    if not rank.makes_sums:
        return [first for first, _ in kinds]  # what layers before it keep is most
    return [max(kind, key=lambda number: _beside(rank, number)) for kind in kinds]


def _beside(rank: TrainerRank, number: int) -> float:
    """What a pipeline's rank holds beside the layer whose backward pass it is, but for what is always there."""
    return rank.others(number) + rank.weights_and_gradients(number, 0.0, 0.0)


def _at_loss(rank: TrainerRank) -> Iterator[Moment]:
    """The last micro-batch in flight has just gone through the head."""
    layers = rank.layers
    held = rank.kept_in_all + rank.ends + layers.final_norm_bytes
    # Whole logits are worst in the forward pass, when the last layer's weights are no longer there.
    gathered = rank.units.after_forward + (rank.last_gathered() if layers.loss_is_in_head else 0.0)
    beside = rank.received + kept_experts_bytes(rank, rank.routed_layers)
    is_again, cast = rank.layout.recompute != "none", None
    if is_again:
        # Autocast's own copies last until the forward pass ends; experts are narrowed without it, but batched ones.
        head = layers.head_weight * rank.stage.head
        experts = rank.experts * rank.routed_layers * (not rank.shape.batches_experts)
        cast = rank.params - rank.root - experts + head
        if not layers.loss_is_in_head:
            yield Moment(held, layers.forward_logits_bytes, rank.weights(gathered, cast) + beside)
            cast = head
    yield Moment(held, layers.loss_bytes, rank.weights(gathered, cast) + beside)
    if not layers.loss_is_in_head:
        # Nothing is left of the loss but what comes to the logits; to their weight, whose cast is gone when its
        # gradient is widened; and to what it read.
        made, coming = rank.adding(layers.head_weight) + layers.whole_hidden_bytes, layers.logits_gradient_bytes
        if layers.is_autocast:
            coming, cast = 0.0, 0.0 if is_again else rank.params - rank.root
        yield Moment(held + made, coming, rank.weights(gathered, cast) + beside)


def _in_final_norm(rank: TrainerRank) -> Iterator[Moment]:
    """Of a norm that is written out (Cohere's) the last one, when it goes back beside all that layers keep."""
    layers, layout, done = rank.layers, rank.layout, rank.done
    if not rank.stage.head or layers.norm != "layer_written_out" or (done is not None and not done.has_losses):
        return
    cast = 0.0 if layout.recompute != "none" else rank.params - rank.root
    made = layers.head_weight * layers.element * (rank.is_sharded and layout.method == "full")
    held = rank.kept_in_all + rank.ends + layers.hidden * (4 + NORM_BACKWARD_BYTES)
    yield Moment(held, 0.0, rank.weights(rank.last_gathered(), cast) + made + rank.received)


def _from_loss(rank: TrainerRank) -> Iterator[Moment]:
    """The loss of a later micro-batch goes back: of the head's gradient, which it has made and keeps, a copy."""
    layers = rank.layers
    held = rank.kept_in_all + rank.ends + layers.kept_end_bytes
    made = layers.head_weight * layers.sum_element * (not layers.is_frozen)
    yield Moment(held + layers.whole_hidden_bytes, 0.0, rank.weights(rank.last_gathered()) + made)


def _at_first_layer(rank: TrainerRank) -> Moment:
    """In the forward pass: what FSDP gathered the vocabulary's matrices into stays until a unit is gathered too."""
    number = rank.stage.layers - 1
    first = rank.units.arriving(number) if number >= 0 else 0.0
    return Moment(rank.layers.input_bytes, 0.0, rank.weights(first) + rank.gathered_root * rank.layers.element)


def _in_layer(rank: TrainerRank, number: int) -> Iterator[Moment]:
    """The backward pass of the layer that is `number`th from the stage's end."""
    layers = rank.layers
    others, above = rank.others(number), rank.above
    gradients = rank.own_gradients(rank.units.num_reduced(number))
    before = rank.units.above(number)
    mlp = rank.mlp_weights
    left = layers.whole_bytes - layers.mlp_bytes
    in_block = _in_block(rank, above) + rank.adding(mlp / 3)
    yield rank.moment(others + in_block, rank.weights_and_gradients(number, mlp / 3, before), mlp / 3, gradients)
    if layers.is_frozen:
        for there in adapters_in_backward(rank):
            yield rank.moment(others + there, rank.weights_and_gradients(number, 0.0, before), 0.0, gradients)
    # Both products that read a norm's output give it a gradient; the residual's stands beside them.
    after_block = left + layers.input_bytes + 2 * layers.whole_hidden_bytes
    after_block += layers.product_bytes if rank.shape.gated_mlp else above - layers.input_bytes
    if rank.layout.tensor > 1 and not layers.is_frozen:
        # A whole matrix's gradient is put together of the rank's own columns' and zeros, beside both.
        after_block += rank.shape.uncut_mlp_params * layers.element
    yield rank.moment(others + after_block, rank.weights_and_gradients(number, mlp, before), mlp, gradients)
    for there in scores_in_backward(rank):
        yield rank.moment(others + there, rank.weights_and_gradients(number, mlp, before), mlp, gradients)
    yield from rank.in_norms(number, others, left, mlp)
    if layers.rotating_bytes:
        there = rotating_again_bytes(rank)
        yield rank.moment(others + there, rank.weights_and_gradients(number, 0.0, before), 0.0, gradients)


def _in_block(rank: TrainerRank, above: float) -> float:
    """What there is of a layer whose feed-forward block goes back: its last product reads its weight, or its factors
    have their gradients."""
    layers = rank.layers
    factors = _block_tensors(rank) - layers.keeps_block_result
    if layers.is_frozen and layers.keeps_block_result:
        # An adapter and what it adapts give a gradient each, and their sum is made beside both.
        factors = max(factors, 2)
    # QLoRA reads the last product's weight before its layer is made again; or once an adapter's gradients are made, for
    # which alone the product's input is kept.
    read = 0.0 if layers.stops_before_reading else layers.reads.last_bytes
    made = factors * layers.product_bytes
    if layers.is_frozen and rank.layout.recompute == "none":
        made -= layers.last_norm_bytes  # which has gone back, and let go of what it kept
    elif rank.layout.method == "qlora" and layers.adapts_last and rank.shape.norms_after:
        made += layers.whole_hidden_bytes  # the norm's gradient, while the weight is read beside the adapter's
    return layers.whole_bytes + above + max(layers.product_bytes * (not layers.adapts_last) + read, made)


def _block_tensors(rank: TrainerRank) -> int:
    """Gradients as wide as the feed-forward block, and what is made on their way, at their most: a thin gate lets go of
    what it has read."""
    is_whole = rank.shape.gated_mlp or rank.shape.activation_tensors > 1
    return 3 if is_whole and not rank.layers.has_thin_gates else 2


def _at_reduction(rank: TrainerRank, number: int) -> Iterator[Moment]:
    """All of a unit's gradients, and what they are copied into to be sent, when its weights are gone. To make them is
    worse beside as many that are on their way until then; but a unit may be the only one."""
    layers, units, layout = rank.layers, rank.units, rank.layout
    first, end = units.bounds(number)
    if layout.pipeline > 1 or layout.method != "full" or not rank.is_sharded or number != end - 1:
        return
    following = units.in_backward(number) - units.of(number)
    made = units.of(number) * (layers.element + layers.sum_element)
    made += layers.head_weight * rank.stage.head * layers.element
    gradients = rank.own_gradients(first)
    yield Moment(rank.others(number) + layers.input_bytes, 0.0, rank.weights(following) + made, gradients)


def _in_two_passes(rank: TrainerRank) -> Iterator[Moment]:
    """zero_bubble: one of a rank's two stages has given its inputs' gradients, and keeps for its weights' all that it
    kept, and what came to each product (thin gates have let go of what they read); then these are made."""
    layers, layout = rank.layers, rank.layout
    if layout.schedule != "zero_bubble" or layout.method != "full":
        return
    num_layers, held = rank.stage.layers / 2, rank.kept_in_all + rank.ends
    came = layers.product_gradient_bytes - 2 * layers.product_bytes * layers.has_thin_gates
    buffers = rank.weights(0.0) + rank.received
    norm = layers.split_hidden * rank.norm_bytes + rank.above
    yield Moment(held + num_layers * came + norm, 0.0, buffers)
    made = rank.params / 2 * layers.element
    yield Moment(held - num_layers * layers.kept_bytes + made, 0.0, buffers)


def _at_end(rank: TrainerRank) -> Iterator[Moment]:
    """The embedding's gradient, and the reduction of the vocabulary's matrices."""
    layout, wide = rank.layout, rank.layers.sum_element
    if layout.method != "full":
        return
    if layout.pipeline > 1:
        # All sums, of which the ends' are copied to be sent.
        missing = (rank.params - rank.summed()) * wide
        yield Moment(0.0, 0.0, rank.weights(0.0) + missing + rank.root * wide)
    elif rank.is_sharded:
        yield from _at_sharded_end(rank)
    elif rank.is_replicated and layout.engine == "torch":
        gradients = rank.own_gradients(rank.stage.layers)
        if rank.is_tied and rank.stage.head:
            # Of either end, and their sum, in the weight's own type; learned positions have one.
            made = 2 * rank.layers.head_weight + rank.root
            yield Moment(rank.layers.input_bytes, 0.0, made * wide, gradients)
        elif rank.makes_gradients_once and rank.stage.embedding:
            # Beside what came to it.
            own = (rank.root - rank.layers.head_weight * rank.stage.head) * wide
            yield Moment(rank.layers.input_bytes, 0.0, 0.0, gradients + own)


def _at_sharded_end(rank: TrainerRank) -> Iterator[Moment]:
    """The same where FSDP reduces them."""
    layers, layout, element = rank.layers, rank.layout, rank.layers.element
    gradients, below = rank.own_gradients(rank.stage.layers), layers.input_bytes
    is_tied = rank.is_tied and rank.stage.head
    wide = layers.sum_element
    last = rank.units.of(rank.stage.layers - 1) if rank.stage.layers else 0.0
    yield Moment(below, 0.0, rank.root * (element + wide), gradients)
    # A matrix that is tied has a gradient of either end, and becomes their sum. Ranks that share an embedding whose
    # module scales what it gives make the whole one's, as each has all of what comes to it.
    made = rank.root * (1 + (3 if is_tied else 1))
    ranks = vocabulary_split(rank.shape, layout)
    made += layers.head_weight * ranks * (rank.shape.scales_words and ranks > 1)
    yield Moment(below, 0.0, made * element + last * wide, gradients)
    # What is sent, and what arrives, which is the rank's own gradient where it isn't added to one; divided by one,
    # where FSDP is of one rank but others have copies.
    copies = 1 + (layout.num_micro_batches > 1) / layout.shard_degree
    copies += layout.shard_degree == 1 and layout.data_parallel > 1
    # Of several ranks FSDP has its last parameter's gradient in its hands, as it was made, until all is sent.
    is_last = rank.stage.head and not (is_tied or rank.shape.head_bias)
    head = layers.head_weight * (is_last and layout.shard_degree > 1)
    if rank.makes_gradients_once:
        gradients += 4 * rank.root / layout.shard_degree
    yield Moment(below, 0.0, rank.root * wide * copies + head * element, gradients)
