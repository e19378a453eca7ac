"""The moments of a step that a layer with experts has of its own, when it goes back on a rank of our trainer.

Where all of a layer's experts are here it is a unit of FSDP's like any other; where they are spread over ranks, they
are gathered and reduced by themselves. Whence each term comes: `trainer_layers`, which has what such a layer keeps.
"""

from collections.abc import Iterator

from trainyard.planner.trainer_rank import Moment, TrainerRank

WEIGHING = 3
"""Tensors of a hidden state of every choice of a token, while the weighted sum of its experts is differentiated: what
comes to it, the experts' gradient, and the product that becomes the weights'."""

SPREAD_WEIGHING = 2
"""Of experts on other ranks, whose results lie in the order of the tokens, no more comes to it than the sum's own."""


def in_routed_layer(rank: TrainerRank, number: int) -> Iterator[Moment]:
    """The backward pass of a layer with experts that are all here, or are not gathered one layer at a time."""
    layers = rank.layers
    others, above = rank.others(number), rank.above
    gradients = rank.own_gradients(rank.units.num_reduced(number))
    before = rank.units.above(number)
    whole = layers.whole_routed_bytes
    yield from _being_gathered(rank, number, others, above, gradients)
    # Batched experts' results are added up as they are: their gradient, and that of their product.
    weighing = _weighing(rank) + _beside_both_halves(rank)
    yield rank.moment(
        others + whole + above + weighing,
        rank.weights_and_gradients(number, 0.0, before),
        0.0,
        gradients,
    )
    if layers.reads.experts_bytes:
        # The experts have run once more, from weights that are read anew beside what came to their sum, when it is
        # differentiated: there is what they gave, and their blocks. Nothing needs what they read: they are frozen.
        run = layers.rows_bytes + 3 * layers.expert_product_bytes
        run = max(layers.weighed_bytes + layers.reads.experts_bytes, weighing + layers.reads.read_experts_bytes + run)
        yield Moment(others + whole + above + run, 0.0, rank.weights_and_gradients(number, 0.0, before))
    last = rank.experts * rank.last_share
    yield rank.moment(
        others + whole + above + _gating(rank) + rank.adding(last),
        rank.weights_and_gradients(number, last, before),
        last,
        gradients,
    )
    # The product that read the chosen tokens has given its gradients: both are there, with what came to it.
    left = whole - layers.experts_bytes - layers.shared_bytes
    read = (0.0 if layers.is_frozen else layers.rows_bytes) / (rank.layout.tensor if layers.is_spread else 1)
    beside = layers.shared_bytes if rank.shape.shared_first else 0.0
    in_block = left + beside + 2 * layers.expert_product_bytes + layers.rows_bytes + read + above
    made = rank.experts
    if not layers.is_autocast:  # else below
        in_block += rank.adding(made * (1 - rank.last_share))
    yield rank.moment(others + in_block, rank.weights_and_gradients(number, made, before), made, gradients)
    if layers.is_autocast and not layers.is_frozen and not rank.shape.batches_experts:
        # The gradient of the weight that reads them is widened to its own type.
        if rank.makes_gradients_once:
            gradients += 4 * rank.experts
        yield Moment(
            others + left + beside + layers.rows_bytes + above, 0.0, _widening_experts(rank, number), gradients
        )
    if layers.score_gradient_bytes:
        in_scores = left + above + layers.score_gradient_bytes
        yield rank.moment(others + in_scores, rank.weights_and_gradients(number, made, before), made, gradients)
    yield from rank.in_norms(number, others, left, made)


def in_spread_layer(rank: TrainerRank, number: int) -> Iterator[Moment]:
    """The same where a layer's experts lie on several ranks: FSDP gathers and reduces them by themselves."""
    layers, element = rank.layers, rank.layers.element
    others, above = rank.others(number), rank.above
    shared = layers.whole_hidden_bytes if rank.shape.shared_ffn else 0.0
    gradients = rank.own_gradients(rank.units.num_reduced(number))
    is_trained = rank.layout.method == "full"
    made = (layers.head_weight * rank.stage.head + rank.units.made_above(number)) * is_trained
    units = (rank.gathered_root + made) * element + rank.units.in_backward(number) * layers.weight_element
    units += kept_experts_bytes(rank, rank.routed_layers - number - 1)
    before = rank.units.above(number) * max(4, element) * is_trained
    whole = layers.whole_routed_bytes - layers.shared_bytes
    left = whole - layers.experts_bytes
    # Of what is not recomputed all is there when the experts are gathered for their backward pass.
    there = whole if rank.layout.recompute == "none" else left
    gathered, weights = gathering_bytes(rank), rank.experts * layers.weight_element * rank.gathers_experts
    if number and rank.layout.keeps_gathered:
        gathered = weights  # once, in the forward pass, where the last layer's meet all others
    yield Moment(others + there + above + shared, 0.0, units + before + gathered, gradients)
    weighing = _weighing(rank)
    weighing += layers.hidden * 4 * (layers.weighed_element > element)
    yield Moment(others + whole + above + shared + weighing, 0.0, units + before + weights, gradients)
    if layers.reads.experts_bytes:
        # What they gave has its gradient, and they run once more, from weights that are read anew.
        arrived = layers.rows_bytes / rank.layout.tensor
        again = layers.reads.read_experts_bytes + 2 * arrived + 4 * layers.expert_product_bytes
        again += layers.weighed_bytes * (layers.weighed_element > element)  # their sum's gradient, in its own type
        run = arrived - layers.rows_bytes + max(layers.reads.experts_bytes, again)
        yield Moment(others + whole + above + shared + run, 0.0, units + before + weights, gradients)
    if rank.layout.recompute != "none" and not layers.reads.experts_bytes:
        # Made again: as they came, by expert, and three of what experts give, none in their tokens' order yet.
        run = whole - layers.experts_bytes + layers.expert_run_bytes
        yield Moment(others + run + above + shared, 0.0, units + before + weights, gradients)
    last = weights * rank.last_share * is_trained
    yield Moment(others + whole + above + shared + _gating(rank), 0.0, units + before + weights + last, gradients)
    rows = layers.rows_bytes / rank.layout.tensor
    in_block = left + 2 * layers.expert_product_bytes + rows * (2 if is_trained else 1) + above + shared
    yield Moment(others + in_block, 0.0, units + before + weights * (1 + is_trained), gradients)
    after_block = left + above + shared + layers.whole_hidden_bytes
    yield Moment(others + after_block, 0.0, units + _reducing(rank), gradients)
    # What was sent stays until the rest of the layer is reduced.
    sent = rank.experts * max(4, element) * is_trained
    norms = layers.split_hidden * rank.norm_bytes + above
    after_norm = left - layers.mlp_norm_output_bytes + norms
    yield Moment(others + after_norm, 0.0, units + sent + rank.rest * element, gradients)
    if layers.score_gradient_bytes:
        in_scores = left - layers.mlp_norm_output_bytes + above + layers.score_gradient_bytes
        yield Moment(others + in_scores, 0.0, units + sent + rank.rest * element, gradients)


def _gating(rank: TrainerRank) -> float:
    """Beside a layer with experts whole, when their last product has given its gradients: what comes to each factor of
    what it read and what is made on the way, in place of that and of what the experts gave."""
    layers = rank.layers
    num_made = 3 if rank.shape.gated_mlp else 2
    is_kept = not layers.is_spread and rank.layout.method != "qlora"
    return (num_made - 1) * layers.expert_product_bytes - layers.rows_bytes * is_kept


def _weighing(rank: TrainerRank) -> float:
    """Beside a layer with experts whole, while their results' weighted sum is differentiated, or made again."""
    layers = rank.layers
    if rank.shape.batches_experts:
        # Made again under autocast, what they read is there before it was narrowed, too.
        is_wide = layers.residual_element > layers.element and rank.layout.recompute != "none"
        return 2 * layers.rows_bytes + layers.rows_bytes * layers.residual_element / layers.element * is_wide
    if layers.is_spread:
        return SPREAD_WEIGHING * layers.weighed_bytes + layers.narrowed_bytes
    found = WEIGHING * layers.weighed_bytes + layers.narrowed_bytes
    if layers.residual_element > layers.element and rank.layout.recompute != "none":
        # What the experts read is there as it was chosen, before autocast narrowed it, until they return.
        chosen = layers.rows_bytes * layers.residual_element / layers.element
        found = max(found, 2 * layers.weighed_bytes + chosen)
    if layers.is_frozen and rank.layout.recompute != "none":
        # Or their product is made again, beside what the layer's code has in its hands: rows, and what they read.
        again = 2 * layers.weighed_bytes + layers.rows_bytes + layers.frozen_experts_input_bytes
        found = max(found, again) - layers.frozen_experts_input_bytes * layers.reruns_experts
    return found


def _beside_both_halves(rank: TrainerRank) -> float:
    """Parallel residuals under autocast: a layer is made again when its sum has given each half a gradient in that
    half's type, the experts' in float32 too; beside what the norm gave in float32 and what attention gave."""
    layers = rank.layers
    is_there = rank.shape.parallel_residual and layers.is_autocast and rank.layout.recompute != "none"
    wide = layers.residual_element
    return layers.hidden * (2 * wide + 3 * layers.element) * is_there


def _widening_experts(rank: TrainerRank, number: int) -> float:
    """Under autocast, of the experts' wider weight its gradient as the product gave it and in float32, beside what is
    left of casts: of these experts none."""
    layout, layers = rank.layout, rank.layers
    cast = rank.rest
    if layout.recompute == "none":
        cast = rank.params - rank.root - (number + 1) * rank.experts + layers.head_weight * rank.stage.head
    share = 2 / 3 if rank.shape.gated_mlp else 1 / 2
    # Of a step's only micro-batch it is the rank's own at once, unless DDP has one to add it to.
    wide = 4 * (layout.num_micro_batches > 1 or layout.data_parallel > 1)
    return cast * layers.element + share * rank.experts * (layers.element + wide)


def _being_gathered(rank: TrainerRank, number: int, others: float, above: float, gradients: float) -> Iterator[Moment]:
    """A unit's experts that are cut inside, put together by way of a copy before its backward pass; and their gradients
    taken apart so, when all of the unit's have been made."""
    layers, units = rank.layers, rank.units
    copied = units.copied_of(number) * layers.weight_element
    if not copied or rank.layout.pipeline > 1:
        return
    there = layers.whole_routed_bytes if rank.layout.recompute == "none" else layers.input_bytes
    unit, wide, is_trained = units.of(number), layers.sum_element, rank.layout.method == "full"
    head = layers.head_weight * rank.stage.head * layers.element * is_trained
    following = 0.0 if units.keeps_gathered else units.in_backward(number) - unit
    if not units.keeps_gathered:
        # What was asked for ahead is on its way before; FSDP itself asks for the next when this one is together.
        gathered = rank.weights(2 * unit + following * (units.num_ahead > 0)) + copied
        before = units.above(number) * wide * is_trained
        yield Moment(others + there + above, 0.0, gathered + before + head, gradients)
    if is_trained:
        # Taken apart one by one, of which the last is still there as it was.
        last = rank.experts * layers.element * rank.last_share
        sent = unit * (layers.element + wide) + last + head
        yield Moment(others + above, 0.0, rank.weights(following) + sent, gradients)


def kept_experts_bytes(rank: TrainerRank, num_layers: int) -> float:
    """Bytes of so many layers' spread experts between their forward and backward pass."""
    is_kept = rank.layers.is_spread and rank.layout.keeps_gathered and rank.layout.pipeline == 1
    is_kept = is_kept and rank.gathers_experts
    return num_layers * rank.experts * rank.layers.weight_element * is_kept


def gathering_bytes(rank: TrainerRank) -> float:
    """Bytes of spread experts while they are gathered: FSDP, which cuts each, puts them together by way of two copies;
    where no rank has a copy of them, only in the other type, one of two weights at a time; frozen ones are read where
    they are then."""
    if not rank.gathers_experts:
        return 0.0
    if rank.layout.expert_shard_degree > 1:
        return 3 * rank.experts * rank.layers.weight_element
    return (2 - rank.last_share) * rank.experts * rank.layers.element


def _reducing(rank: TrainerRank) -> float:
    """Bytes of their gradients on the way to the ranks' parts; alone, a rank still copies what it would send."""
    if rank.layout.method != "full":
        return 0.0
    element, wide = rank.layers.element, rank.layers.sum_element
    # FSDP reorders each of a layer's weights' gradients, and holds on to the last one, of its output, as it was.
    last = element * rank.last_share
    each = element + wide + last if rank.layout.expert_shard_degree > 1 else 3 * wide
    return each * rank.experts
